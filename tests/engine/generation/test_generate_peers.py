"""The generator and its limits against `transformers` on the same directory and the same logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessorList,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.tiny import make_llama
from weft.engine.base import Request
from weft.engine.generation.sampling import select_support
from weft.engine.spec import GenerationSpec, ModelSpec
from weft.registry import backends
from weft.topology import Layout


@pytest.mark.parametrize(
    "limits",
    [{"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 30, "top_p": 0.9, "min_p": 0.05}],
)
def test_limits_keep_what_transformers_keeps(limits: dict[str, float]) -> None:
    scores = (
        torch.randn(64, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    )
    warpers = LogitsProcessorList()
    if "top_k" in limits:
        warpers.append(TopKLogitsWarper(int(limits["top_k"])))
    if "top_p" in limits:
        warpers.append(TopPLogitsWarper(limits["top_p"]))
    if "min_p" in limits:
        warpers.append(MinPLogitsWarper(limits["min_p"]))
    theirs = warpers(torch.zeros(64, 1, dtype=torch.int64), scores) > -torch.inf
    assert torch.equal(select_support(scores, GenerationSpec(**limits)), theirs)  # type: ignore[arg-type]


@pytest.mark.parametrize("least", [0, 10])
def test_greedy_completions_are_those_of_transformers(tmp_path: Path, least: int) -> None:
    path = make_llama(tmp_path / "model", seed=3)
    prompts = [[7, 30, 41], [200, 12, 9, 8, 77, 150], [5]]
    spec = GenerationSpec(greedy=True, max_new_tokens=40, min_new_tokens=least, stop_ids=[2])
    ours: dict[str, list[int]] = {f"p{i}": [] for i in range(len(prompts))}
    with backends.get("torch")(ModelSpec(path=str(path), device="cpu"), Layout()).generating(
        spec
    ) as generator:
        generator.submit([Request(f"p{i}", 0, prompt) for i, prompt in enumerate(prompts)])
        while not generator.idle:
            for event in generator.step():
                ours[event.id].append(event.token)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    for i, prompt in enumerate(prompts):
        with torch.no_grad():
            theirs = model.generate(
                torch.tensor([prompt]),
                do_sample=False,
                max_new_tokens=40,
                min_new_tokens=least or None,
                pad_token_id=0,
            )
        assert ours[f"p{i}"] == theirs[0, len(prompt) :].tolist()
