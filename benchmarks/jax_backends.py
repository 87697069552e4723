"""An SFT step and a batch of completions by `backend=jax`, by the torch engine without weft's own
kernels, and by `transformers`.

Settings: `work` (`sft` or `decode`), `model` (directory); for SFT `lengths`, the tokens of each
sequence; for decoding `prompts`, `new_tokens` and `samples` (`benchmarks.generate_backends`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from benchmarks import generate_backends
from benchmarks.clock import Stopwatch
from benchmarks.engines import batch_of
from benchmarks.pairs import Pause

Settings = Mapping[str, Any]


def jax(settings: Settings, pause: Pause) -> dict[str, Any]:
    return _run_engine(settings, "jax")


def torch(settings: Settings, pause: Pause) -> dict[str, Any]:
    os.environ["WEFT_NATIVE"] = "0"  # before weft is imported, in a process of this side's own
    return _run_engine(settings, "torch")


def transformers(settings: Settings, pause: Pause) -> dict[str, Any]:
    """Sequences and prompts are padded to the longest."""
    if settings["work"] == "decode":
        return generate_backends.padded(settings, pause)
    return _time(_build_padded_step(settings["model"], tuple(settings["lengths"])), settings)


def _run_engine(settings: Settings, backend: str) -> dict[str, Any]:
    engine = _build_engine(settings["model"], backend, settings["work"] == "sft")
    if settings["work"] == "decode":
        return generate_backends.generate_with(engine, settings)
    from weft.algorithms.sft import SFTLoss

    batch = batch_of(settings["lengths"])
    return _time(lambda: engine.train([batch], SFTLoss()), settings)


def _time(step: Callable[[], object], settings: Settings) -> dict[str, Any]:
    watch = Stopwatch()
    step()
    return {**watch.read(), "tokens": sum(settings["lengths"])}


@cache
def _build_engine(path: str, backend: str, trained: bool) -> Any:
    from weft.engine.spec import ModelSpec, Schedule
    from weft.registry import backends
    from weft.topology import Layout

    schedule = Schedule(10_000, 0) if trained else None
    spec = ModelSpec(path=path, backend=backend, device="cpu", trained=trained, schedule=schedule)
    return backends.get(backend)(spec, Layout())


@cache
def _build_padded_step(path: str, lengths: tuple[int, ...]) -> Callable[[], None]:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), fused=True)
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 1000, (len(lengths), max(lengths)), generator=random)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    labels = ids.masked_fill(mask == 0, -100)

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step
