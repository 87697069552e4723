"""Parallel layouts, and the slice of each parameter that a rank stores.

This is the only module that maps (parameter, layout, rank) to a `Slice`.

With tensor parallelism over t ranks, each rank has some of the attention heads, and a part of the
MLP width and of the vocabulary. The weights of layers that read hidden states are split by rows
(output features), and the weights of layers that write hidden states by columns (input features);
see Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, cast

from weft.errors import ConfigError
from weft.placement import Placement

Slice = tuple[slice, ...]

LETTERS = {"d": "data", "f": "fsdp", "t": "tensor", "p": "pipeline", "c": "context", "e": "expert"}


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism of one role, with a text form such as `d2f2t2p1c1e1`.

    The layout uses data x tensor x pipeline x context devices. Each letter of the text form is the
    initial of a degree. The last two fields have no letter, as the pipeline schedule sets them.

    Attributes:
        data: Number of data-parallel ranks.
        fsdp: Number of data-parallel ranks that share one sharded copy of the parameters.
        tensor: Number of tensor-parallel ranks.
        pipeline: Number of pipeline-parallel ranks.
        context: Number of ranks that share each sequence.
        expert: Number of data-parallel ranks over which the experts are distributed.
        stages_per_rank: Number of pipeline stages per pipeline rank.
        turns: If True, every second group of `pipeline` stages is assigned to the ranks in reverse
            order (V shape).
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    stages_per_rank: int = 1
    turns: bool = False

    def __post_init__(self) -> None:
        for name in LETTERS.values():
            degree = getattr(self, name)
            if degree < 1:
                raise ConfigError(f"layout: {name} is {degree}; every degree is at least 1")
        if self.data % self.fsdp:
            rule = "f ranks of d share one sharded copy"
            raise ConfigError(f"layout: f={self.fsdp} does not divide d={self.data}; {rule}")
        if self.data % self.expert:
            rule = "e ranks of d share the experts, whole ones each"
            raise ConfigError(f"layout: e={self.expert} does not divide d={self.data}; {rule}")
        if self.fsdp % self.expert and self.expert % self.fsdp:
            raise ConfigError(
                f"layout: f={self.fsdp} and e={self.expert}: one must divide the other, since "
                f"ranks that have the same experts "
                "share these in f / e parts; write another f"
            )

    @classmethod
    def parse(cls, text: str, *, trained: bool = False) -> Layout:
        """Return the layout for a string such as `d2t2p1`: data=2, tensor=2 and pipeline=1.

        A missing degree is 1, except that `fsdp` defaults to `data` if `trained` is True and
        `expert` is 1. Raises `ConfigError` for an invalid string.
        """
        rule = "letters d f t p c e, each once, each followed by its degree, such as d2t2p1"
        degrees: dict[str, int] = {}
        if not text or not re.fullmatch(r"([a-z][0-9]{1,6})+", text):
            raise ConfigError(
                f"layout={text[:40]}: cannot be read; it consists of {rule}, at most 999,999"
            )
        for letter, degree in re.findall(r"([a-z])([0-9]+)", text):
            if letter not in LETTERS or LETTERS[letter] in degrees:
                raise ConfigError(
                    f"layout={text}: {letter!r} is unknown or given twice; it consists of {rule}"
                )
            degrees[LETTERS[letter]] = int(degree)
        shards = trained and degrees.get("expert", 1) == 1
        degrees.setdefault("fsdp", degrees.get("data", 1) if shards else 1)
        try:
            return cls(**cast(dict[str, Any], degrees))
        except ConfigError as error:
            raise ConfigError(f"layout={text}: {str(error).removeprefix('layout: ')}") from None

    @property
    def expert_shards(self) -> int:
        """Number of ranks that share one sharded copy of the same experts.

        This is fsdp / expert, but at least 1.
        """
        return max(self.fsdp // self.expert, 1)

    @property
    def num_devices(self) -> int:
        return math.prod((self.data, self.tensor, self.pipeline, self.context))

    @property
    def placement(self) -> Placement:
        """Assignment of pipeline stages to pipeline ranks."""
        return Placement(self.pipeline, self.stages_per_rank, self.turns)

    def __str__(self) -> str:
        return "".join(f"{letter}{getattr(self, name)}" for letter, name in LETTERS.items())


@dataclass(frozen=True)
class MeshCoordinates:
    """Coordinates of a rank along the parallel dimensions of its layout.

    The layout's degrees `fsdp` and `expert` have no coordinates of their own, because `data`
    determines what a rank holds:

    - its group of experts: number `data % expert`
    - its shard of these experts, with FSDP: number `(data % fsdp) // expert`
    - its shard of the other parameters, with FSDP: number `data % fsdp`
    """

    data: int = 0
    tensor: int = 0
    pipeline: int = 0
    context: int = 0


@dataclass(frozen=True)
class Mesh:
    """Device mesh: a parallel layout and the devices on which it is placed.

    `ranks` are the global ranks of the processes, one per device. Along `ranks`, the tensor
    coordinate varies fastest, followed by context, data and pipeline: pipeline stages communicate
    least and can be farthest apart.
    """

    layout: Layout
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        self.check_size(self.layout, self.ranks, ",".join(map(str, self.ranks)))

    @staticmethod
    def check_size(layout: Layout, ranks: Sequence[int], text: str) -> None:
        """Raise `ConfigError` if the number of devices does not fit the layout.

        `text` is the list of devices as the user wrote it, for the message.
        """
        needed = layout.num_devices
        given = len(set(ranks))
        if given != needed or len(ranks) != needed:
            wants = "one device" if needed == 1 else f"{needed:,} devices"
            was = "1 was" if given == 1 else f"{given:,} were"
            rule = f"layout {layout} needs {wants}, and {was} given; name {wants}, or write another layout"
            raise ConfigError(f"device_mesh={text!r}: {rule}")

    @classmethod
    def on_first_devices(cls, layout: Layout) -> Mesh:
        """Return the mesh of this layout on the first devices of the run."""
        return cls(layout, tuple(range(layout.num_devices)))

    def __str__(self) -> str:
        devices = "device" if len(self.ranks) == 1 else "devices"
        return f"{self.layout} ({devices} {', '.join(map(str, self.ranks))})"

    def has_same_parts(self, other: Mesh) -> bool:
        """Return whether every rank has the same part of the batch and the network in both meshes.

        The degree `fsdp` may differ, since sharding affects only where parameters are stored.
        """
        return self.ranks == other.ranks and replace(self.layout, fsdp=1) == replace(
            other.layout, fsdp=1
        )

    def get_coordinates(self, rank: int) -> MeshCoordinates:
        """Return the coordinates of a rank. Raises `ValueError` if the rank is not in this mesh."""
        rest = self.ranks.index(rank)
        rest, tensor = divmod(rest, self.layout.tensor)
        rest, context = divmod(rest, self.layout.context)
        pipeline, data = divmod(rest, self.layout.data)
        return MeshCoordinates(data, tensor, pipeline, context)

    def get_rank(self, at: MeshCoordinates) -> int:
        layout = self.layout
        rows = (at.pipeline * layout.data + at.data) * layout.context + at.context
        return self.ranks[rows * layout.tensor + at.tensor]

    def list_ranks(self, data: int) -> tuple[int, ...]:
        """Return the ranks that process the part of a batch with the data-parallel index `data`."""
        return tuple(rank for rank in self.ranks if self.get_coordinates(rank).data == data)

    def list_ranks_along(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the ranks whose coordinates equal those of `rank`, except along the given axes.

        `axes` are field names of `MeshCoordinates`. The result includes `rank`, and has the order
        of the mesh.
        """
        own = self.get_coordinates(rank)
        fixed_axes = []
        for field in fields(MeshCoordinates):
            if field.name not in axes:
                fixed_axes.append(field.name)
        return tuple(
            r
            for r in self.ranks
            if all(getattr(self.get_coordinates(r), k) == getattr(own, k) for k in fixed_axes)
        )


def parse_mesh(text: str | None, layout: Layout) -> Mesh:
    """Return the mesh of `layout` on the devices in `text`, such as `4-7` or `0,2`.

    If `text` is None, the first devices are used. Raises `ConfigError` if the text is invalid or
    the devices do not fit the layout.
    """
    if text is None:
        return Mesh.on_first_devices(layout)
    ranks: list[int] = []
    for part in str(text).split(","):
        match = re.fullmatch(r"\s*([0-9]{1,6})(?:\s*-\s*([0-9]{1,6}))?\s*", part)
        if match is None:
            rule = "write device numbers such as 4-7 or 0,2, below 1,000,000"
            raise ConfigError(f"device_mesh={text!r} cannot be read; {rule}")
        first = int(match[1])
        last = int(match[2] or match[1])
        ranks += range(first, last + 1) if first <= last else range(first, last - 1, -1)
    if ranks != sorted(ranks):  # process groups number their ranks in ascending order
        raise ConfigError(
            f"device_mesh={text!r}: device numbers must be in ascending order; write "
            f"{','.join(map(str, sorted(ranks)))}"
        )
    Mesh.check_size(layout, ranks, str(text))
    return Mesh(layout, tuple(ranks))


def build_whole_slice(shape: tuple[int, ...]) -> Slice:
    """Return the slice that covers a whole tensor of shape `shape`."""
    return tuple(slice(0, n) for n in shape)


def shard(shape: tuple[int, ...], dim: int, parts: int, index: int) -> Slice:
    """Return the slice of one of `parts` equal parts of a tensor, split along dimension `dim`.

    `index` is the index of the part. The slice covers the other dimensions in full. Raises
    `ConfigError` if the size of the dimension is not divisible by `parts`.
    """
    if shape[dim] % parts:
        raise ConfigError(
            f"{shape[dim]} entries (dim {dim} of {shape}) do not split into {parts} equal parts"
        )
    size = shape[dim] // parts
    cut = list(build_whole_slice(shape))
    cut[dim] = slice(index * size, (index + 1) * size)
    return tuple(cut)


class NetworkSizes(Protocol):
    """Sizes of a network that determine how tensor parallelism slices its parameters.

    Implemented by `TransformerConfig`.
    """

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


# Tensor-parallel splits: (pattern of the canonical name, split quantity, dim counted from the end).
# Quantities: query heads, key-value heads, MLP width, vocabulary. Other parameters are replicated.
SPLITS: tuple[tuple[str, str, int], ...] = (
    (r"attention\.q\.(weight|lora_b)", "heads", -2),
    (r"attention\.q\.bias", "heads", -1),
    (r"attention\.[kv]\.(weight|lora_b)", "kv heads", -2),
    (r"attention\.[kv]\.bias", "kv heads", -1),
    (r"attention\.prefix\.[kv]", "kv heads", -1),
    (r"attention\.q_norm\.(weight|bias)", "heads", -1),
    (r"attention\.k_norm\.(weight|bias)", "kv heads", -1),
    (r"attention\.o\.(weight|lora_a)", "heads", -1),
    (r"mlp\.(experts\.)?(gate|up)\.(weight|lora_b)", "width", -2),
    (r"mlp\.(gate|up)\.bias", "width", -1),
    (r"mlp\.(experts\.)?down\.(weight|lora_a)", "width", -1),
    (r"(embed|head)\.weight", "vocabulary", -2),
    (r"head\.bias", "vocabulary", -1),
)


def compute_tensor_slice(
    name: str, shape: tuple[int, ...], config: NetworkSizes, t: int, rank: int
) -> Slice:
    """Return the slice of a parameter that tensor rank `rank` of `t` ranks stores.

    `name` is the parameter's canonical name, such as `blocks.3.attention.q.weight`, and `shape` is
    the shape of the whole parameter. If there are fewer key-value heads than ranks, several ranks
    store the same key-value head. The parts of the vocabulary can differ in size. Raises
    `ConfigError` if the heads or the MLP width do not split evenly.
    """
    own = re.sub(r"^blocks\.\d+\.", "", name)
    split = next(((what, dim) for pattern, what, dim in SPLITS if re.fullmatch(pattern, own)), None)
    # Every tensor rank stores a norm over the dimensions of an attention head in full.
    is_attention_norm = own.startswith("attention.") and "_norm." in own
    is_head_norm = is_attention_norm and shape[-1] == config.head_dim
    if split is None or t == 1 or is_head_norm:
        return build_whole_slice(shape)
    what, dim = split
    cut = list(build_whole_slice(shape))
    match what:
        case "heads":
            cut[dim] = _multiply_slice(compute_heads(config, t, rank), config.head_dim)
        case "kv heads":
            cut[dim] = _multiply_slice(compute_kv_heads(config, t, rank), config.head_dim)
        case "width":
            cut[dim] = shard(shape, len(shape) + dim, t, rank)[dim]
        case _:
            cut[dim] = compute_vocabulary(shape[dim], t, rank)
    return tuple(cut)


def compute_heads(config: NetworkSizes, t: int, rank: int) -> slice:
    """Return the range of query heads that rank `rank` of `t` tensor-parallel ranks stores.

    Raises `ConfigError` if the heads do not split evenly.
    """
    if config.num_heads % t:
        raise ConfigError(
            f"layout: t={t} does not divide the model's {config.num_heads} attention heads"
        )
    size = config.num_heads // t
    return slice(rank * size, (rank + 1) * size)


def compute_kv_heads(config: NetworkSizes, t: int, rank: int) -> slice:
    """Return the range of key-value heads that the query heads of a tensor-parallel rank use.

    Raises `ConfigError` if the heads do not split evenly over the `t` ranks.
    """
    kv = config.num_kv_heads
    if kv % t and t % kv:
        raise ConfigError(
            f"layout: t={t} neither divides the model's {kv} key-value heads nor is a multiple of "
            f"them"
        )
    compute_heads(config, t, rank)
    return slice(rank * kv // t, max(rank * kv // t + 1, (rank + 1) * kv // t))


def compute_vocabulary(size: int, t: int, rank: int) -> slice:
    """Return the range of token ids that belong to a tensor-parallel rank.

    The rank stores the rows of these ids in the embedding and the output matrix. `size` is the size
    of the vocabulary, and `t` is the number of tensor-parallel ranks.
    """
    return slice(rank * size // t, (rank + 1) * size // t)


def is_expert_weight(name: str) -> bool:
    """Return whether `name` is the canonical name of a stacked expert weight or of its adapter."""
    return re.fullmatch(r"blocks\.\d+\.mlp\.experts\..+", name) is not None


def compute_expert_slice(name: str, whole: Slice, e: int, rank: int) -> Slice:
    """Return the slice of a parameter that a rank stores under expert parallelism.

    `whole` is the slice without expert parallelism, `e` is the number of ranks that share the
    experts, and `rank` is the index of this rank among them. Slices of parameters other than expert
    weights are not split. Raises `ConfigError` if the experts do not split evenly.
    """
    if e == 1 or not is_expert_weight(name):
        return whole
    num = _count_elements(whole[0])
    if num % e:
        raise ConfigError(f"layout: e={e} does not divide the model's {num} experts")
    return (slice(rank * num // e, (rank + 1) * num // e), *whole[1:])


def compute_stage(num_layers: int, stages: int, stage: int, head: float = 0.0) -> range:
    """Return the range of consecutive layers in pipeline stage `stage`.

    The stages are balanced as evenly as possible. The last stage also has the output matrix, whose
    cost equals that of `head` layers. Raises `ConfigError` if there are more stages than layers.
    """
    if stages > num_layers:
        rule = "every stage needs at least one"
        raise ConfigError(f"layout: p={stages} stages of a model with {num_layers} layers; {rule}")
    even = math.ceil((num_layers + head) / stages - head - 0.5)
    if stages == 1:
        last = num_layers
    else:
        last = min(max(even, 1), num_layers - stages + 1)
    if stage == stages - 1:
        return range(num_layers - last, num_layers)
    others = num_layers - last
    parts = stages - 1
    return range(
        others - (stages - 1 - stage) * others // parts,
        others - (stages - 2 - stage) * others // parts,
    )


class StagedSizes(NetworkSizes, Protocol):
    """Sizes of a network that determine tensor slices and the pipeline stage of each parameter."""

    @property
    def num_layers(self) -> int: ...
    @property
    def head_layers(self) -> float:
        """Cost of the output matrix, as a number of transformer layers."""
        ...


FIRST_STAGE = r"(embed|positions|embed_in)\..*"
# Parameters stored as rows of one fused parameter, in this order (`weft.models.network.linear`).
FUSED = (("attention.q", "attention.k", "attention.v"), ("mlp.gate", "mlp.up"))


def find_stages(name: str, sizes: StagedSizes, stages: int, *, tied: bool) -> tuple[int, ...]:
    """Return the pipeline stages that store a parameter.

    A parameter is stored by one stage, except for a tied embedding, which the first and the last
    stage store.
    """
    block = re.match(r"blocks\.(\d+)\.", name)
    if block:
        return tuple(
            s
            for s in range(stages)
            if int(block[1]) in compute_stage(sizes.num_layers, stages, s, sizes.head_layers)
        )
    if not re.fullmatch(FIRST_STAGE, name):
        return (stages - 1,)
    if tied and name == "embed.weight":
        return tuple(sorted({0, stages - 1}))
    return (0,)


def compute_holdings(
    shapes: Mapping[str, tuple[int, ...]],
    sizes: StagedSizes,
    layout: Layout,
    at: MeshCoordinates,
    *,
    tied: bool = False,
) -> dict[str, Slice]:
    """Return the slice of each parameter that a rank stores, by canonical name.

    Parameters of which the rank stores nothing are left out. `shapes` are the shapes of the whole
    parameters, `at` are the coordinates of the rank, and `tied` means that the embedding is also
    the output matrix.

    If `fsdp` is above 1, parameters are first split by tensor and expert parallelism. Then the rows
    of each part are split into chunks of equal size, except that the last chunk can be smaller (see
    `torch.chunk`). Expert weights are split in this way among the ranks that have the same experts.
    """
    # Tensor and expert slices of the parameters of this rank's stages.
    own = set(layout.placement.list_stages(at.pipeline))
    slices = {}
    for name, shape in shapes.items():
        if not own.isdisjoint(find_stages(name, sizes, layout.placement.num_stages, tied=tied)):
            slices[name] = compute_expert_slice(
                name,
                compute_tensor_slice(name, shape, sizes, layout.tensor, at.tensor),
                layout.expert,
                at.data % layout.expert,
            )
    if layout.fsdp == 1:
        return slices
    # Shard the rows of each stored parameter; fused parameters are one.
    sharded: dict[str, Slice] = {}
    for names in _group_by_storage(slices):
        total = sum(_count_elements(slices[name][0]) for name in names)
        parts = layout.fsdp
        index = at.data % layout.fsdp
        if is_expert_weight(names[0]):
            parts = layout.expert_shards
            index = index // layout.expert
        chunk = -(-total // parts)
        start = min(index * chunk, total)
        stop = min(start + chunk, total)
        offset = 0
        for name in names:
            rows, *rest = slices[name]
            low = max(start - offset, 0)
            high = min(stop - offset, _count_elements(rows))
            if low < high:
                sharded[name] = (slice(rows.start + low, rows.start + high), *rest)
            offset += _count_elements(rows)
    return sharded


def _group_by_storage(names: Iterable[str]) -> Iterator[list[str]]:
    """Yield groups of the names of parameters that are stored together in one fused parameter.

    The names in a group are in the order of their rows in the fused parameter. A parameter that is
    not fused is a group by itself.
    """
    left = dict.fromkeys(names)
    while left:
        name = next(iter(left))
        layer, _, kind = name.rpartition(".")
        parts = next((group for group in FUSED if layer.endswith(group)), None)
        if parts is None or kind not in ("weight", "bias"):
            together = [name]
        else:
            block = layer.removesuffix(next(part for part in parts if layer.endswith(part)))
            together = [each for part in parts if (each := f"{block}{part}.{kind}") in left]
        for each in together:
            del left[each]
        yield together


def _count_elements(part: slice) -> int:
    size: int = part.stop - part.start
    return size


def _multiply_slice(part: slice, size: int) -> slice:
    return slice(part.start * size, part.stop * size)


def list_rank_intervals(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Return the intervals of adjacent ranks, as pairs (first rank, rank after the last one).

    `ranks` are in ascending order.
    """
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return [(ranks[0], ranks[-1] + 1)]
    intervals = [(ranks[0], ranks[0] + 1)]
    for rank in ranks[1:]:
        start, stop = intervals[-1]
        if rank == stop:
            intervals[-1] = (start, rank + 1)
        else:
            intervals.append((rank, rank + 1))
    return intervals
