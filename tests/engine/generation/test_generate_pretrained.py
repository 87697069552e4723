"""What a really trained model says, and how far its log-probs as sampled are from those that
training computes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.bounds import assert_within, unit
from tests.roundings import LIKELY, exactly
from weft.cli.main import main
from weft.data.sample import SequenceSample
from weft.data.spec import TokenizerSpec
from weft.data.tokenizer import Tokenizer
from weft.engine.backends import common
from weft.engine.base import Engine
from weft.engine.spec import ModelSpec
from weft.interfaces.base import Model
from weft.interfaces.generate import GenerateInterface
from weft.kernels.cpu import library
from weft.registry import backends
from weft.topology import Layout

PROMPTS = [
    "Once upon a time",
    "The cat",
    "Lily and Tom went to the park. They",
    "One day, a big dog",
]
GOLDEN = ", there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big, red ball."


@pytest.fixture(scope="module")
def path(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, target = (
        data_dir / "weights" / "stories260K",
        tmp_path_factory.mktemp("stories") / "model",
    )
    words = [
        str(source / "stories260K.bin"),
        "--tokenizer",
        str(source / "tok512.bin"),
        "--output",
        str(target),
    ]
    assert main(["convert", "llama2c", *words]) == 0
    return target


@pytest.fixture(scope="module")
def stories(path: Path) -> Model:
    engine: Engine = backends.get("torch")(ModelSpec(path=str(path), device="cpu"), Layout())
    tokenizer = Tokenizer.load(TokenizerSpec(), str(path))
    return Model("actor", engine, tokenizer, tokenizer, "cpu", "float32", step=0, seed=1)


def wide_engine(path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The model in float64."""
    monkeypatch.setattr(common, "choose_reading_dtype", lambda spec: torch.float64)
    made: Engine = backends.get("torch")(ModelSpec(path=str(path), device="cpu"), Layout())
    return made


def batch(model: Model) -> SequenceSample:
    ids = [model.tokenizer.encode(text) for text in PROMPTS]
    flat = [token for row in ids for token in row]
    return SequenceSample.from_default(
        [f"p{i}" for i in range(len(ids))], [len(row) for row in ids], {"prompt": flat}
    )


def test_tells_the_golden_story(stories: Model) -> None:
    made = (
        GenerateInterface(greedy=True, max_new_tokens=60).generate(stories, batch(stories)).outputs
    )
    assert made is not None
    prompt, completion = (
        stories.tokenizer.encode(PROMPTS[0]),
        made.sequences("completion")[0].tolist(),
    )
    assert stories.tokenizer.decode([*prompt, *completion], skip_special=True).startswith(
        PROMPTS[0] + GOLDEN
    )


@pytest.mark.default_cases("limits1-weft's", "limits0-torch's")
@pytest.mark.parametrize("kernels", ["weft's", "torch's"])
@pytest.mark.parametrize(
    "limits", [{}, {"temperature": 0.7}, {"top_p": 0.9, "record_support": True}]
)
def test_sampled_log_probs_are_those_of_training(
    stories: Model,
    path: Path,
    limits: dict[str, float],
    kernels: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kernels == "torch's":
        monkeypatch.setattr(library, "load_library", lambda: None)
    prompts = batch(stories)
    made = (
        GenerateInterface(samples_per_prompt=4, max_new_tokens=150, **limits)
        .generate(stories, prompts)
        .outputs
    )
    assert made is not None
    whole = prompts.update(made)
    trained = stories.engine.forward(
        whole, frozenset({"logprobs"}), temperature=limits.get("temperature", 1.0)
    )
    sampled, wide = made.data["logprobs"], wide_engine(path, monkeypatch)
    temperature = limits.get("temperature", 1.0)
    (exact,) = exactly(
        lambda: wide.forward(whole, frozenset({"logprobs"}), temperature=temperature).data[
            "logprobs"
        ],
        draws=1,
    )
    assert len(sampled) > 1500
    rounded = unit(torch.float32) * exact.value.abs()  # what an engine returns is float32
    for found in (sampled, trained.data["logprobs"]):
        assert_within(found, exact.value, LIKELY * exact.deviation + rounded)
        error = (found - exact.value).square().mean().sqrt()
        assert error <= exact.deviation + rounded.max()
