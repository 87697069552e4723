"""Trial run of a `transformers` decoder before use.

It determines what the decoder's head computes, and whether the decoder supports packed sequences. A
decoder that uses `AttentionInterface` may still compute a sequence differently in a pack than
alone: it may mix neighboring tokens in convolutions, count positions itself, or use another mask. A
forward pass over three short sequences shows this. It runs in float32 whatever the role's dtype,
because rounding could hide a difference or look like one.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.engine.hf.imported import PreTrainedModel
from weft.engine.hf.network import (
    NAME,
    HeadLayer,
    UnsupportedAttention,
    record_attention,
    register,
    run,
)
from weft.errors import ConfigError
from weft.models.network.packed import pack
from weft.models.network.transformer import Head

PROBES = (5, 3, 7)  # lengths of the sequences
# largest relative difference that counts as equal: rotations and norms round in float32
TOLERANCE = 1e-4
HALF = (torch.bfloat16, torch.float16)
LEAK = 1e-4  # the same kernels on the same shapes: only what comes from the neighbours differs
# configuration keys of factors of the logits: (key, whether logits are divided by it)
LOGIT_SCALES = (("logit_scale", False), ("logits_scaling", True), ("lm_head_multiplier", False))
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap")
# rotations that depend on the longest sequence of the pass
MOVING_ROTATIONS = ("dynamic", "longrope")


@dataclass(frozen=True)
class DecoderTrial:
    """Result of the trial run of a decoder.

    Attributes:
        head: Output layer of the decoder.
        hidden_size: Width of the hidden states.
        callers: Attention modules in call order. Empty if the decoder does not support packed
            sequences; only sequences of equal length are then batched.
        shapes: Numbers of query and key-value heads, and sizes of key and value heads, for each
            attention module.
        reason: Reason why packed sequences are not supported, or None if they are.
    """

    head: HeadLayer
    hidden_size: int
    callers: tuple[nn.Module, ...] = ()
    shapes: tuple[tuple[int, int, int, int], ...] = ()
    reason: str | None = None


@torch.no_grad()
def try_out(module: PreTrainedModel, head: Head, vocab_size: int) -> DecoderTrial:
    """Return a description of the decoder, after running it on packed and on single sequences.

    If packed sequences give the same results as single ones, the decoder uses weft's attention
    afterwards; otherwise the decoder is not changed. Raises `ConfigError` if a token attends to
    later tokens, or if weft does not support the head.
    """
    register()
    own = module.config._attn_implementation
    try:
        with _hold_float32(module, by_block=True):
            return _run_trial(module, head, vocab_size)
    except RuntimeError:  # parameters of a block are read while it does not run
        if module.config._attn_implementation != own:
            module.set_attn_implementation(own)
        with _hold_float32(module, by_block=False):
            return _run_trial(module, head, vocab_size)


def _run_trial(module: PreTrainedModel, head: Head, vocab_size: int) -> DecoderTrial:
    device = next(module.parameters()).device
    generator = torch.Generator().manual_seed(0)
    low = min(8, vocab_size - 1)  # past the special tokens of most vocabularies
    probes = [torch.randint(low, vocab_size, (n,), generator=generator).to(device) for n in PROBES]
    alone = [run(module, probe[None])[0] for probe in probes]
    _check_causal(module, probes, alone)
    layer = _check_head(module, head, probes, alone)
    hidden_size = alone[0].shape[1]
    own = module.config._attn_implementation
    try:
        callers, shapes = _compute_pack(module, probes, alone)
    except (UnsupportedAttention, RuntimeError, ValueError, TypeError, IndexError) as refused:
        if module.config._attn_implementation != own:
            module.set_attn_implementation(own)
        if str(refused):
            reason = str(refused).splitlines()[0]
        else:
            reason = type(refused).__name__
        return DecoderTrial(layer, hidden_size, reason=reason)
    return DecoderTrial(layer, hidden_size, callers, shapes)


def _compute_pack(
    module: PreTrainedModel, probes: list[Tensor], alone: list[Tensor]
) -> tuple[tuple[nn.Module, ...], tuple[tuple[int, int, int, int], ...]]:
    """Run `probes` as one pack, and return the attention modules and their input shapes.

    Raises `UnsupportedAttention` if the results differ from `alone`, the results of the single
    sequences, or if a sequence depends on other sequences in the pack.
    """
    rotation = module.config.to_dict().get("rope_parameters") or {}
    if rotation.get("rope_type") in MOVING_ROTATIONS:
        raise UnsupportedAttention(
            f"its rotations ({rotation['rope_type']}) depend on the longest sequence"
        )
    if not module._can_set_attn_implementation():
        raise UnsupportedAttention("its attention does not use AttentionInterface")
    module.set_attn_implementation(NAME)
    states, recorder = record_attention(module, pack(probes, probes[0].device))
    if not recorder.callers:
        raise UnsupportedAttention("its attention does not use AttentionInterface")
    for wanted, got in zip(alone, states.split(PROBES), strict=True):
        if _compute_difference(got, wanted) > TOLERANCE:
            raise UnsupportedAttention("a pack of sequences is not what they are alone")
    others = [(probe + 1).clamp(max=int(probe.max())) for probe in probes[:-1]]
    again, _ = record_attention(module, pack([*others, probes[-1]], probes[0].device))
    if _compute_difference(again[-PROBES[-1] :], states[-PROBES[-1] :]) > LEAK:
        raise UnsupportedAttention("a sequence sees its neighbours in the pack")
    return tuple(recorder.callers), tuple(recorder.shapes)


def _check_causal(module: PreTrainedModel, probes: list[Tensor], alone: list[Tensor]) -> None:
    """Raise `ConfigError` if a token attends to later tokens, which makes log-probs meaningless."""
    longest = max(range(len(probes)), key=lambda index: len(probes[index]))
    prefix = run(module, probes[longest][None, :-1])[0]
    if _compute_difference(prefix, alone[longest][:-1]) > TOLERANCE:
        raise ConfigError(
            f"backend=hf: a {module.config.model_type} model is not a decoder: its tokens see later "
            f"ones"
        )


def _check_head(
    module: PreTrainedModel, head: Head, probes: list[Tensor], alone: list[Tensor]
) -> HeadLayer:
    """Return the head's layer, after checking that weft can compute the head's outputs with it.

    With this layer, log-probs can be computed in chunks of rows. Raises `ConfigError` if the head
    is not a linear layer followed by a known function.
    """
    values: dict[str, Any] = module.config.to_dict()
    kind = values.get("model_type")
    # Find the output layer, and what the model computes from the probes.
    if head != "lm":
        layers = []
        for m in module.children():
            if isinstance(m, nn.Linear) and m.out_features == 1:
                layers.append(m)
        if len(layers) != 1:
            raise ConfigError(
                f"backend=hf: the classifier of a {kind} model is not a single linear layer, so it "
                f"gives no values"
            )
        head_layer = HeadLayer(layers[0])
        wanted = [module(input_ids=probe[None]).logits[0, -1:] for probe in probes]
        states = [state[-1] for state in alone]
    else:
        layer = module.get_output_embeddings()
        if not isinstance(layer, nn.Linear):
            raise ConfigError(
                f"backend=hf: the output layer of a {kind} model is not a linear layer; weft cannot "
                f"use it"
            )
        scale = 1.0
        for key, divides in LOGIT_SCALES:
            if values.get(key) is not None:
                scale = scale / values[key] if divides else scale * values[key]
        softcap = next((values[key] for key in SOFTCAPS if values.get(key) is not None), None)
        head_layer = HeadLayer(layer, scale, softcap)
        wanted = [module(input_ids=probe[None]).logits[0] for probe in probes]
        states = alone
    # The layer alone must give the same from the hidden states.
    for state, logits in zip(states, wanted, strict=True):
        if (
            _compute_difference(
                head_layer.projection.compute_logits(state * head_layer.scale), logits.float()
            )
            > TOLERANCE
        ):
            raise ConfigError(
                f"backend=hf: what a {kind} model does to its logits after the output layer is "
                f"not known to weft"
            )
    return head_layer


@contextmanager
def _hold_float32(module: nn.Module, *, by_block: bool) -> Iterator[None]:
    """Replace half-precision parameters by float32 copies until the `with` statement ends.

    With `by_block`, the parameters of a transformer block are replaced only while this block runs,
    so that at most one block is in memory twice. All other parameters are replaced for the whole
    time. Buffers are not changed, because those of rotary embeddings are float32 anyway.
    """
    blocks = list(_iterate_blocks(module)) if by_block else []
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    locations: dict[int, list[_ParameterLocation]] = {}
    handles = [
        handle
        for block in blocks
        for handle in (
            block.register_forward_pre_hook(
                lambda block, _: locations.__setitem__(id(block), _widen(block, set()))
            ),
            block.register_forward_hook(
                lambda block, *_: _put_back(locations.pop(id(block), [])), always_call=True
            ),
        )
    ]
    outside = _widen(module, inside)
    try:
        yield
    finally:
        _put_back(outside)
        for handle in handles:
            handle.remove()


def _iterate_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Iterate over the modules in the outermost module lists, which are the decoder's layers."""
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else _iterate_blocks(child)


@dataclass(frozen=True)
class _ParameterLocation:
    """Parameter together with its location: the attribute `name` of the module `owner`."""

    owner: nn.Module
    name: str
    parameter: nn.Parameter


def _widen(module: nn.Module, but: Container[int]) -> list[_ParameterLocation]:
    """Replace half-precision parameters by float32 copies, and return the originals.

    Each original is returned with its location. Parameters whose `id` is in `but` are not replaced.
    Tied parameters stay tied.
    """
    locations: list[_ParameterLocation] = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.dtype in HALF and id(parameter) not in but:
            owner, _, own = name.rpartition(".")
            locations.append(_ParameterLocation(module.get_submodule(owner), own, parameter))
    wide = {}
    for place in locations:
        wide[id(place.parameter)] = nn.Parameter(
            place.parameter.detach().float(), requires_grad=False
        )
    for place in locations:
        setattr(place.owner, place.name, wide[id(place.parameter)])
    return locations


def _put_back(places: Iterable[_ParameterLocation]) -> None:
    for place in places:
        setattr(place.owner, place.name, place.parameter)


def _compute_difference(got: Tensor, wanted: Tensor) -> float:
    """Return the L2 norm of `got - wanted`, divided by the norm of `wanted` if that is not 0."""
    size = float(wanted.double().norm())
    if size > 0:
        return float((got.double() - wanted.double()).norm()) / size
    return float(got.double().norm())
