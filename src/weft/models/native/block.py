"""A block of a network over a pack in one call, and its backward pass in another: the same kernels as part by part, in the same
order, with nothing of Python, autograd or torch between them; only gradients of biases are added up otherwise than by torch.

For networks of Llama's form: RMS norms before attention and MLP, a gated MLP with SiLU, no experts, no adapters, no dropout.
The modules that make up a block are not called, and so no hooks of theirs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from weft.models.config import TransformerConfig
from weft.models.fused_linear import side_by_side
from weft.models.native import attention, library
from weft.models.native.product import MOST_ROWS

if TYPE_CHECKING:
    from weft.models.transformer import Block

FUSED = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))  # layers that read the same input are one product
_Pointers: Any = ctypes.c_void_p * (2 + 2 * len(FUSED))


class _Weights(ctypes.Structure):
    """Of the norms, then weight and bias of each product; or where their gradients go."""

    _fields_ = (("pointers", _Pointers),)

    @classmethod
    def of(cls, tensors: list[Tensor | None]) -> _Weights:
        return cls(_Pointers(*map(pointer, tensors)))


class _Pass(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "cos", "sin", "own", "across", "wanted")),
        *((name, ctypes.c_void_p) for name in ("out", "kept", "room", "by_out", "by_x")),
        *((name, ctypes.c_long) for name in ("owns", "acrosses", "rows", "wants", "hidden", "heads", "kv", "dim")),
        *((name, ctypes.c_long) for name in ("half", "inner", "window", "keeps", "few", "threads")),
        *((name, ctypes.c_double) for name in ("eps", "offset", "scale")),
    )


def plain(config: TransformerConfig) -> bool:
    """Whether blocks of networks like this one have the form that the kernels compute, but for norms of queries and keys."""
    placed = config.placement == "pre" and not config.parallel_residual and config.experts is None
    normed = config.norm != "layer" and config.norm_weight and not config.norm_bias
    gated = config.gated and config.activation == "silu"
    return placed and normed and gated and config.attention_softcap is None and config.head_dim <= attention.MOST_DIM


def layers_of(block: Block) -> list[list[Any]]:
    """The layers that `FUSED` names."""
    return [[getattr(block.attention if name in "qkvo" else block.mlp, name) for name in names] for names in FUSED]


def fused(parts: Sequence[Sequence[Tensor]]) -> list[Tensor | None]:
    """Those that are multiplied together as one, for each product; None where there are none."""
    return [side_by_side(each) if each else None for each in parts]


def serves(config: TransformerConfig, blocks: nn.ModuleList, x: Tensor, rows: Tensor | None) -> bool:
    """Whether `run` computes these blocks of states like x [T, hidden], and of the last one's those of `rows`."""
    some = len(x) > 0 and (rows is None or (rows.dim() == 1 and len(rows) > 0))
    return some and library.serves(x) and plain(config) and config.qk_norm is None and all(map(_fits, blocks))


def _fits(block: Any) -> bool:
    """Whether the layers are no others than the kernels read, and their parameters lie as these do."""
    groups = layers_of(block)
    if not all(isinstance(layer, nn.Linear) for layers in groups for layer in layers):
        return False
    biases = [[layer.bias for layer in layers if layer.bias is not None] for layers in groups]
    whole = all(len(given) in (0, len(layers)) for given, layers in zip(biases, groups, strict=True))
    weights = (layer.weight for layers in ((block.norm1, block.norm2), *groups) for layer in layers)
    return whole and all(one.dtype == torch.float32 and one.is_contiguous() for one in chain(weights, *biases))


def run(
    block: Block, x: Tensor, rotation: tuple[Tensor, Tensor] | None, seen: attention.Seen, rows: Tensor | None
) -> Tensor:
    """What the block makes of x [T, hidden], or of its `rows`, int64 [N], alone, the others giving their keys and values.
    Differentiable once."""
    call = _Call(block, x.shape, rotation, seen, rows)
    if not torch.is_grad_enabled():
        return call.forward(x.contiguous(), keeps=False)[0]
    out: Tensor = _Block.apply(x, call, *call.parameters)
    return out


class _Call:
    """A block over states [T, hidden] = `shape`, and what its two passes have in common. `parameters` are the weights of the
    norms, then those of the layers, then their biases, where they have some."""

    def __init__(
        self, block: Block, shape: torch.Size, rotation: tuple[Tensor, Tensor] | None, seen: attention.Seen,
        rows: Tensor | None,
    ) -> None:  # fmt: skip
        norm, layers = block.norm1, layers_of(block)
        self._norms: list[Any] = [norm.weight, block.norm2.weight]
        self._weights = [[layer.weight for layer in each] for each in layers]
        self._biases = [[layer.bias for layer in each if layer.bias is not None] for each in layers]
        self.parameters = [*self._norms, *chain(*self._weights), *chain(*self._biases)]
        tensors = [
            *(weight.detach() for weight in self._norms),
            *chain(*zip(fused(self._weights), fused(self._biases), strict=True)),
        ]
        angles = None if rotation is None else (rotation[0].contiguous(), rotation[1].contiguous())
        wanted, across = None if rows is None else rows.long().contiguous(), seen.across
        assert seen.own.is_contiguous() and (across is None or across.is_contiguous())
        self._held = tensors, angles, wanted, seen  # what is pointed to
        self._read, own = _Weights.of(tensors), block.attention
        self._pass = _Pass(
            own=pointer(seen.own), across=pointer(across), wanted=pointer(wanted), owns=len(seen.own),
            acrosses=0 if across is None else len(across), rows=shape[0], wants=shape[0] if wanted is None else len(wanted),
            hidden=shape[1], heads=own.num_heads, kv=own.num_kv_heads, dim=own.head_dim, inner=self._weights[-1][0].shape[1],
            window=seen.window or 0, few=MOST_ROWS, threads=torch.get_num_threads(), eps=norm.eps,
            offset=0.0 if norm.kind == "rms" else 1.0, scale=own.scores.scale,
        )  # fmt: skip
        if angles is not None:
            self._pass.cos, self._pass.sin = map(pointer, angles)
            self._pass.half = angles[0].shape[-1]

    def forward(self, x: Tensor, *, keeps: bool) -> tuple[Tensor, Tensor]:
        """What the block makes of x, contiguous, and what the backward pass reads of it, where it `keeps` that."""
        made = self._pass
        made.keeps, made.kept = keeps, None
        out, kept = x.new_empty(made.wants, made.hidden), x.new_empty(library.call("weft_block_kept", made))
        if self._run("weft_block_forward", x=x, out=out, kept=kept):
            raise IndexError(f"a row that is wanted is not among the {made.rows} of the pack")
        return out, kept

    def backward(self, x: Tensor, kept: Tensor, by_out: Tensor, needed: Iterable[bool]) -> list[Tensor | None]:
        """The gradients by x and by each of `parameters`, those that are `needed`, given the one by what `forward` made."""
        wanted = iter(needed)
        by_x = torch.empty_like(x) if next(wanted) else None
        norms = [torch.empty_like(weight) if next(wanted) else None for weight in self._norms]
        (weights, by_weights), (biases, by_biases) = (
            _gradients_of(parts, wanted) for parts in (self._weights, self._biases)
        )
        to = _Weights.of([*norms, *chain(*zip(weights, biases, strict=True))])
        self._run("weft_block_backward", to, x=x, kept=kept, by_out=by_out, by_x=by_x)
        return [by_x, *norms, *by_weights, *by_biases]

    def _run(self, name: str, *to: _Weights, x: Tensor, **tensors: Tensor | None) -> int:
        made = self._pass  # what it points to beside what is held and given here is of passes before, and not read
        for field, tensor in {"x": x, **tensors}.items():
            setattr(made, field, pointer(tensor))
        room = x.new_empty(library.call(f"{name}_room", made))
        made.room = room.data_ptr()
        return library.call(name, self._read, *to, made)


class _Block(torch.autograd.Function):
    """Keeps what the parts of a block keep one by one: what each product reads, and what its activation is computed from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: _Call, *parameters: Tensor) -> Tensor:
        x = x.contiguous()
        out, kept = call.forward(x, keeps=True)
        ctx.save_for_backward(x, kept, *parameters)  # these to be told where one was changed since
        ctx.call = call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        to_x, _, *needed = ctx.needs_input_grad
        by_x, *rest = ctx.call.backward(*ctx.saved_tensors[:2], gradients[0].contiguous(), (to_x, *needed))
        return by_x, None, *rest


def _gradients_of(parts: list[list[Tensor]], wanted: Iterator[bool]) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Room for the gradients of what is multiplied together, for each product, and each part's own; None where none of a
    product's is wanted."""
    whole, own = list[Tensor | None](), list[Tensor | None]()
    for tensors in parts:
        made, sizes = None, [len(tensor) for tensor in tensors]
        asked = [next(wanted) for _ in tensors]
        if any(asked):
            made = tensors[0].new_empty(sum(sizes), *tensors[0].shape[1:])
        whole.append(made)
        own += [None] * len(tensors) if made is None else made.split(sizes)
    return whole, own


def pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
