"""Tiny networks and batches for the engine's tests, and the slow, plain way to compute what the
engine computes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from tests.tiny import make_llama
from weft.algorithms.base import Loss, Max, Sum, count_trained_rows
from weft.data.sample import SequenceSample
from weft.engine.spec import ModelSpec, OptimizerSpec, Schedule
from weft.engine.torch.engine import TorchEngine
from weft.registry import backends
from weft.topology import Layout

VOCAB = 300  # below the tiny tokenizer's size
# Of what is computed in float64 in two ways: a tiny network's few thousand roundings of 1e-16 each,
# and far below any mistake.
EXACT = {"rtol": 1e-10, "atol": 1e-12}


def spec_of(path: Path, **changes: Any) -> ModelSpec:
    """A trained role on the CPU, constant learning rate, no clipping."""
    optimizer = OptimizerSpec(lr=1e-3, lr_scheduler_type="constant", max_grad_norm=0.0)
    spec = ModelSpec(
        path=str(path),
        optimizer=optimizer,
        trained=True,
        schedule=Schedule(100, 0),
        device="cpu",
        seed=3,
    )
    return replace(spec, **changes)


def engine_of(path: Path, **changes: Any) -> TorchEngine:
    spec = spec_of(path, **changes)
    return backends.get(spec.backend)(spec, Layout())


def batch_of(
    groups: list[tuple[int, list[int]]], seed: int = 0, **keys: list[float]
) -> SequenceSample:
    """Random tokens: one id for each (prompt length, completion lengths).

    `keys` are values one a completion token or one a completion, flat.
    """
    random = np.random.default_rng(seed)
    lengths = {"prompt": [[p] for p, _ in groups], "completion": [c for _, c in groups]}
    counts = {name: sum(n for group in sizes for n in group) for name, sizes in lengths.items()}
    data: dict[str, Any] = {
        name: random.integers(8, VOCAB, size=count) for name, count in counts.items()
    }
    for key, values in keys.items():
        single = len(values) == sum(len(c) for _, c in groups)
        lengths[key] = [[1] * len(c) for _, c in groups] if single else [list(c) for _, c in groups]
        data[key] = torch.tensor(values, dtype=torch.float32)
    return SequenceSample.from_groups([f"id{i}" for i in range(len(groups))], lengths, data)


def load_exactly(auto: Any, path: Path) -> Any:
    """What `transformers` loads of a directory, in float64."""
    return auto.from_pretrained(path, dtype=torch.float64)


def sequences(batch: SequenceSample) -> list[tuple[Tensor, int]]:
    """(tokens, prompt length) of every sequence."""
    prompts = batch.sequences("prompt")
    owners = batch.group_of("completion")
    return [
        (torch.cat([prompts[g], c]), len(prompts[g]))
        for g, c in zip(owners, batch.sequences("completion"), strict=True)
    ]


def plain_logprobs(model: Any, batch: SequenceSample, temperature: float = 1.0) -> list[Tensor]:
    """[L] a completion, each sequence through a `transformers` model by itself; 0 for a first token
    without a prompt.
    """
    found = []
    for tokens, prompt in sequences(batch):
        logits = model(tokens[None]).logits[0] / temperature
        logp = torch.log_softmax(logits[:-1], dim=-1).gather(1, tokens[1:, None])[:, 0]
        found.append(torch.cat([logp.new_zeros(1), logp])[prompt:])
    return found


@dataclass(frozen=True)
class Nll(Loss):
    """Mean negative log-likelihood of trained tokens."""

    outputs: ClassVar = frozenset({"logprobs"})
    unit: ClassVar = "sequence"

    def denominators(self, minibatch: Any) -> dict[str, float]:
        return {"tokens": float(count_trained_rows(minibatch).sum())}

    def __call__(self, out: Any, batch: Any, total: Any) -> Any:
        nll = -(out["logprobs"] * batch.mask)
        stats = {"nll": Sum(nll.detach().sum(), batch.mask.sum()), "worst": Max(nll.detach().max())}
        return nll.sum() / total["tokens"], stats


def tiny(directory: Path, **changes: Any) -> Path:
    return make_llama(directory, **changes)
