"""The ten runs whose step times `benchmarks.plan` forecasts and measures.

They were chosen before any profile was made: every algorithm, full training and adapters, one
device and each layout of two, one process of one thread for each device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

SMALL, LARGE = "12.7M", "40M"  # names in benchmarks.model.SHAPES


@dataclass(frozen=True)
class Case:
    """One run.

    `words` are options of the quickstart `algorithm`; MODEL, LARGE and REWARDS in them stand for
    the directories of models. `rows` is a name in `benchmarks.data.SOURCES`, `batch` counts rows a
    step, and `longest` is the most tokens of a sequence, or of a prompt if completions are sampled.
    """

    name: str
    algorithm: str
    rows: str
    batch: int
    longest: int
    words: tuple[str, ...]
    new_tokens: int = 0

    @property
    def samples(self) -> bool:
        """True if completions are sampled."""
        return self.new_tokens > 0

    def quick(self) -> Case:
        """Return the case at a size that only shows that it runs."""
        words = tuple(word.replace("=8", "=2") for word in self.words)
        return replace(self, batch=2, longest=96, words=words, new_tokens=min(self.new_tokens, 4))


CASES = (
    Case("sft", "sft", "instructions", 8, 512, ("model.path=MODEL",)),
    Case(
        "sft lora, larger",
        "sft",
        "instructions",
        4,
        512,
        ("model.path=LARGE", "model.lora.r=16"),
    ),
    Case("sft d2", "sft", "instructions", 8, 512, ("model.path=MODEL", "model.layout=d2")),
    Case("rw t2", "rw", "pairs", 6, 512, ("model.path=MODEL", "model.layout=t2")),
    Case("dpo lora", "dpo", "pairs", 4, 512, ("actor.path=MODEL", "actor.lora.r=8")),
    Case(
        "dpo p2",
        "dpo",
        "pairs",
        8,
        512,
        (
            "actor.path=MODEL",
            "actor.layout=p2",
            "ref.layout=p2",
            "max_tokens_per_microbatch=1024",
        ),
    ),
    Case(
        "ppo",
        "ppo",
        "questions",
        8,
        128,
        ("actor.path=MODEL", "rew.path=REWARDS", "ppo.ppo_n_minibatches=2"),
        new_tokens=48,
    ),
    Case(
        "grpo d2",
        "grpo",
        "questions",
        4,
        128,
        (
            "actor.path=MODEL",
            "actor.layout=d2",
            "grpo.group_size=8",
            "grpo.kl_coef=0",
            "reward=benchmarks.rewards:distinct",
        ),
        new_tokens=64,
    ),
    Case(
        "grpo lora, sampling apart",
        "grpo",
        "questions",
        2,
        128,
        (
            "actor.path=LARGE",
            "actor.lora.r=16",
            "actor_gen.device_mesh=1",
            "grpo.group_size=8",
            "reward=benchmarks.rewards:distinct",
        ),
        new_tokens=48,
    ),
    Case(
        "distill t2",
        "distill",
        "questions",
        8,
        128,
        (
            "actor.path=MODEL",
            "teacher.path=LARGE",
            "actor.layout=t2",
            "teacher.layout=t2",
        ),
        new_tokens=32,
    ),
)
