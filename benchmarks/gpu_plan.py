"""The order and the time limits of the sections of `benchmarks/gpu.py`.

Plain data: no torch, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# seconds at the end in which nothing runs: the last section is ended and the page written
MARGIN = 12.0
LEAST = 12.0  # seconds in which a section finds nothing


@dataclass(frozen=True)
class Section:
    """`about` says on the page what the section shows; `limit` is its share of the run in seconds.

    Neighbours with `measures=False` run at the same time, since none of them times anything.
    """

    name: str
    about: str
    limit: int
    measures: bool = True


EVERY: Mapping[str, Section] = {
    section.name: section
    for section in (
        Section("limits", "How fast the device multiplies and copies at most.", 40),
        Section(
            "probe",
            "Each mechanism that weft uses on a GPU, alone, against float64.",
            75,
            measures=False,
        ),
        Section(
            "algorithms",
            "SFT, GRPO, DPO and PPO end to end on a tiny model: losses on the CPU beside those on "
            "the device.",
            90,
            measures=False,
        ),
        Section(
            "agreement",
            "Log-probs and gradients of weft against those of `transformers` in float32 on the "
            "same weights; sampled log-probs "
            "against recomputed ones.",
            90,
            measures=False,
        ),
        Section(
            "sft",
            "A training step on packed tokens, all parameters trained, and the same by "
            "`transformers`.",
            70,
        ),
        Section(
            "decode",
            "Steady decode steps, against the bytes that each must read and against `generate`.",
            80,
        ),
        Section("grpo", "A GRPO step and where its time goes.", 60),
        Section("lora", "A training step of adapters on the frozen weights of an 8B model.", 45),
        Section("tests", "The tests of the repository that need a GPU.", 60),
        Section(
            "decode_profile",
            "Which kernels take the time of a decode step: torch's, and weft's (`WEFT_GPU_KERNELS`).",
            45,
        ),
        Section(
            "sft_profile",
            "Which kernels take the time of a training step: the slowest of `sft`.",
            35,
        ),
        Section(
            "ragged", "Completions of all lengths, so that the batch shrinks while it decodes.", 40
        ),
        Section(
            "options", "The training step of `sft` with each option that may make it faster.", 60
        ),
        Section("jax", "`backend=jax`: the training step of `sft`, and decode steps.", 57),
        Section(
            "plan_profile",
            "Forecasts of a training step of `sft`: from the GPU's data sheet, and from passes "
            "measured here as by `weft plan profile`.",
            35,
        ),
        Section("peers", "The rollout of `grpo` by vLLM and SGLang, where they are installed.", 60),
    )
}

# Figure -> what it has to reach on one H100.
BARS: Mapping[str, str] = {
    "sft: MFU": ">= 0.5",
    "sft, one sequence of a 0.6B model: tokens": ">= 52000",
    "sft: times as fast as transformers' best": ">= 1.5",
    "adapters of an 8B model: tokens": ">= 12500",
    "decode, 64 sequences: memory roofline by the data sheet": ">= 0.7",
    "decode, 64 sequences: times as fast": ">= 10",
    "jax, sft: MFU": ">= 0.4",
    "sampled and recomputed: mean gap": "<= 0.002",
}

# In the order of what a second of each tells, for a machine that is there for minutes.
FIRST = ("limits", "probe", "algorithms", "agreement", "sft", "decode", "grpo", "lora", "tests")
SECOND = ("decode_profile", "sft_profile", "ragged", "jax", "plan_profile")


def turns(names: Iterable[str]) -> list[list[Section]]:
    """Sections that run one after the other, each with those that run at the same time."""
    found: list[list[Section]] = []
    for section in map(EVERY.__getitem__, names):
        if found and not section.measures and not found[-1][-1].measures:
            found[-1].append(section)
        else:
            found.append([section])
    return found


def seconds(names: Iterable[str]) -> int:
    """The time of these sections if each takes as long as it may."""
    return sum(max(section.limit for section in turn) for turn in turns(names))


def allowance(section: Section, left: float, rest: Sequence[str]) -> float:
    """Seconds that a section may take where `left` remain for it and for `rest`: its limit and what
    others have not used.
    """
    return min(left, section.limit + max(0.0, left - section.limit - seconds(rest)))


def second(first: Mapping[str, Any]) -> list[str]:
    """The sections of the second command after the record of the first: those that explain, then
    those that did not end.
    """
    ended = set(first.get("ran", ())) - set(first.get("why", ()))
    return [*SECOND, *(name for name in FIRST if name not in ended)]


def slowest(rows: Iterable[Mapping[str, Any]]) -> str | None:
    """The training step of `sft` with the lowest MFU, by its name; None where none was measured."""
    end = ": MFU"
    found = {
        row["what"].removesuffix(end): row["value"] for row in rows if row["what"].endswith(end)
    }
    steps = {name: value for name, value in found.items() if name.startswith("sft")}
    return min(steps, key=steps.__getitem__, default=None)
