"""Layouts and the part of a tensor that a rank holds. The only place that turns (parameter, layout, rank) into a `Slice`.

Of a network whose layers are split over t ranks each rank holds a narrower network: a part of the heads, of the MLP's width and
of the vocabulary. Layers that read hidden states are split by rows, those that make them by columns (Shoeybi et al. 2019,
"Megatron-LM", section 3).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Protocol

from weft.errors import ConfigError

Slice = tuple[slice, ...]

LETTERS = {"d": "data", "f": "fsdp", "t": "tensor", "p": "pipeline", "c": "context", "e": "expert"}


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism of one role on one set of devices; written `d2f2t2p1c1e1`, letters left out are 1.

    `fsdp` counts the ranks that share one sharded copy (it divides `data`). Devices used: data x tensor x pipeline x context.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            degree = getattr(self, field.name)
            if degree < 1:
                raise ConfigError(f"layout: {field.name} is {degree}; every degree is at least 1")
        if self.data % self.fsdp:
            raise ConfigError(
                f"layout: f={self.fsdp} does not divide d={self.data}; f ranks of d share one sharded copy"
            )

    @classmethod
    def parse(cls, text: str, *, trained: bool = False) -> Layout:
        """Read `d2t2p1`; `f` left out is `d` for trained roles and 1 otherwise. Raises `ConfigError` on unknown letters."""
        rule = "letters d f t p c e, each once, each followed by its degree, such as d2t2p1"
        degrees: dict[str, int] = {}
        if not text or not re.fullmatch(r"([a-z]\d+)+", text):
            raise ConfigError(f"layout {text!r} cannot be read; it holds {rule}")
        for letter, degree in re.findall(r"([a-z])(\d+)", text):
            if letter not in LETTERS or LETTERS[letter] in degrees:
                raise ConfigError(f"layout {text!r}: {letter!r} is unknown or given twice; it holds {rule}")
            degrees[LETTERS[letter]] = int(degree)
        degrees.setdefault("fsdp", degrees.get("data", 1) if trained else 1)
        return cls(**degrees)

    @property
    def num_devices(self) -> int:
        return math.prod((self.data, self.tensor, self.pipeline, self.context))

    def __str__(self) -> str:
        return "".join(f"{letter}{getattr(self, name)}" for letter, name in LETTERS.items())


def whole(shape: tuple[int, ...]) -> Slice:
    """The slice that covers a tensor of `shape`."""
    return tuple(slice(0, n) for n in shape)


def shard(shape: tuple[int, ...], dim: int, parts: int, index: int) -> Slice:
    """Part `index` of `parts` equal parts along `dim`. Raises `ConfigError` where the parts would be unequal."""
    if shape[dim] % parts:
        raise ConfigError(f"{shape[dim]} entries (dim {dim} of {shape}) do not split into {parts} equal parts")
    size = shape[dim] // parts
    cut = list(whole(shape))
    cut[dim] = slice(index * size, (index + 1) * size)
    return tuple(cut)


class NetworkSizes(Protocol):
    """What of a network's configuration says how its parameters are split; `TransformerConfig` has it."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


# Which entries of a parameter a tensor rank holds, by its canonical name: of its queries' heads, of the heads that these read,
# of the MLP's width, or of the vocabulary; and along which dim, counted from the last one. Every rank holds all other
# parameters whole.
SPLITS: tuple[tuple[str, str, int], ...] = (
    (r"attention\.q\.(weight|lora_b)", "heads", -2),
    (r"attention\.q\.bias", "heads", -1),
    (r"attention\.[kv]\.(weight|lora_b)", "kv heads", -2),
    (r"attention\.[kv]\.bias", "kv heads", -1),
    (r"attention\.q_norm\.(weight|bias)", "heads", -1),
    (r"attention\.k_norm\.(weight|bias)", "kv heads", -1),
    (r"attention\.o\.(weight|lora_a)", "heads", -1),
    (r"mlp\.(experts\.)?(gate|up)\.(weight|lora_b)", "width", -2),
    (r"mlp\.(gate|up)\.bias", "width", -1),
    (r"mlp\.(experts\.)?down\.(weight|lora_a)", "width", -1),
    (r"(embed|head)\.weight", "vocabulary", -2),
    (r"head\.bias", "vocabulary", -1),
)


def tensor_slice(name: str, shape: tuple[int, ...], config: NetworkSizes, t: int, rank: int) -> Slice:
    """The part of the parameter `name` (its canonical name and whole shape) that rank `rank` of `t` tensor ranks holds.

    With fewer key-value heads than ranks several ranks hold the one that their queries read. The vocabulary's parts may be
    uneven. Raises `ConfigError` where heads or the MLP's width do not split evenly.
    """
    own = re.sub(r"^blocks\.\d+\.", "", name)
    found = next(((what, dim) for pattern, what, dim in SPLITS if re.fullmatch(pattern, own)), None)
    if found is None or t == 1 or _normed_by_head(own, shape, config):
        return whole(shape)
    what, dim = found
    cut = list(whole(shape))
    match what:
        case "heads":
            cut[dim] = _times(heads_of(config, t, rank), config.head_dim)
        case "kv heads":
            cut[dim] = _times(kv_heads_of(config, t, rank), config.head_dim)
        case "width":
            cut[dim] = shard(shape, len(shape) + dim, t, rank)[dim]
        case _:
            cut[dim] = vocabulary_of(shape[dim], t, rank)
    return tuple(cut)


def heads_of(config: NetworkSizes, t: int, rank: int) -> slice:
    """The query heads of a tensor rank. Raises `ConfigError` where they do not split evenly."""
    if config.num_heads % t:
        raise ConfigError(f"layout: t={t} does not divide the model's {config.num_heads} attention heads")
    size = config.num_heads // t
    return slice(rank * size, (rank + 1) * size)


def kv_heads_of(config: NetworkSizes, t: int, rank: int) -> slice:
    """The key-value heads that a tensor rank's queries read. Raises `ConfigError` where they do not split evenly."""
    kv = config.num_kv_heads
    if kv % t and t % kv:
        raise ConfigError(f"layout: t={t} neither divides the model's {kv} key-value heads nor is a multiple of them")
    heads_of(config, t, rank)
    return slice(rank * kv // t, max(rank * kv // t + 1, (rank + 1) * kv // t))


def vocabulary_of(size: int, t: int, rank: int) -> slice:
    """The ids whose rows of the embedding and the head a tensor rank holds."""
    return slice(rank * size // t, (rank + 1) * size // t)


def stage_of(num_layers: int, stages: int, stage: int) -> range:
    """The blocks of a pipeline stage: consecutive, as even as can be. Raises `ConfigError` where a stage would have none."""
    if stages > num_layers:
        raise ConfigError(
            f"layout: p={stages} stages of a model with {num_layers} layers; every stage needs one at least"
        )
    return range(stage * num_layers // stages, (stage + 1) * num_layers // stages)


def _normed_by_head(own: str, shape: tuple[int, ...], config: NetworkSizes) -> bool:
    """Whether this is the norm of each head by itself, which every rank holds whole."""
    return "_norm." in own and own.startswith("attention.") and shape[-1] == config.head_dim


def _times(part: slice, size: int) -> slice:
    return slice(part.start * size, part.stop * size)
