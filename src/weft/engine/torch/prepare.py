"""Preparation of micro-batches for the network, and mapping of outputs back to their rows."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from weft.algorithms.base import Output, to_host_array
from weft.data.groups import SCORED_ONCE
from weft.data.sample import SequenceSample
from weft.engine.collectives import Outputs, PreparedPass
from weft.engine.generation.scheduler import PREFIX_STRIDE
from weft.engine.rows import (
    PackLayout,
    build_given_ids,
    build_support,
    list_sequence_keys,
    pack,
    to_sample,
)
from weft.kernels import MIN_SPARED_KEYS, put
from weft.models.network.dropout import DropoutKeys
from weft.models.network.moe import MoEAuxLoss
from weft.models.network.packed import Microbatch, RowGradient, TopIds, scatter_rows

Want = frozenset[Output]
SCORED = ("logprobs", "ref_logprobs", "values")
# Minimum share of a micro-batch's tokens that sharing prefixes across ids must save: joining prefix
# and continuation needs a second pass of attention, on an accelerator with a slower kernel.
MIN_SHARE = {"cpu": 0.02}
DEFAULT_MIN_SHARE = 0.25


@dataclass(frozen=True)
class PassSettings:
    """Settings for the pass of a micro-batch through the network.

    Attributes:
        want: Outputs to compute.
        temperature: Number by which logits are divided.
        extra: Number of output rows of each completion in addition to one per token, such as 1 for
            the value after the last token.
        dropout: Seed and step of the dropout masks, or None for a pass without dropout.
        aux_loss: Object that collects the experts' auxiliary loss during the pass, or None.
        trained_only: True to skip rows whose loss mask is 0.
        gradient: Function that computes the loss's gradient with respect to the outputs. It is None
            unless the loss has the property `Loss.by_row`.
        top: Request for the most likely ids, which are returned as `top_ids` and `top_logprobs`.
    """

    want: Want
    temperature: float = 1.0
    extra: int = 0
    dropout: tuple[int, int] | None = None  # (seed, step)
    aux_loss: MoEAuxLoss | None = None  # filled during the pass
    trained_only: bool = False
    gradient: RowGradient | None = None  # gradient by the outputs, for losses with `by_row`
    top: TopIds | None = None  # ids of the outputs `top_ids` and `top_logprobs`


class PrefixSharingNetwork(Protocol):
    """Interface of a network that can compute a prefix once for several sequences."""

    def can_share_prefixes(self, longest: int) -> bool:
        """Return whether prefixes can be shared by sequences of at most `longest` tokens."""
        ...


def share_prompts(layout: PackLayout, keys: Container[str]) -> PackLayout:
    """Return the layout in which completions of the same id share their prompt.

    `keys` are the keys of the batch. If they include `logprobs`, the completions have log-probs
    from the generator. Prompts are then shared exactly where the generator shared them, so that
    log-probs are rounded in the same way.
    """
    if "logprobs" in keys:
        return layout.share_by_id(least=PREFIX_STRIDE + 1, spared=MIN_SPARED_KEYS)
    return layout.share_by_id()


def share_training_prefixes(
    layout: PackLayout, keys: Container[str], sample: SequenceSample, device: torch.device
) -> PackLayout:
    """Return the layout in which sequences share prefixes, for training on `sample`.

    Sequences of different ids share prefixes too, such as a template or system prompt, if this
    saves a large enough share of the tokens; the threshold depends on the type of the device.
    However, if `keys` (the keys of the batch) include log-probs or values, another pass has already
    scored the same tokens. Then only completions of the same id share their prompt, as in that
    pass, so that both passes round in the same way.
    """
    if not any(key in keys for key in SCORED):
        across = layout.share_by_prefix(sample)
        if (
            across.num_saved_tokens
            >= MIN_SHARE.get(device.type, DEFAULT_MIN_SHARE) * across.lengths.sum()
        ):
            return across
    return share_prompts(layout, keys)


def mask_read_rows(
    part: SequenceSample, layout: PackLayout, settings: PassSettings
) -> npt.NDArray[np.bool_]:
    """Return a mask `[N]` of the rows whose output is needed.

    The row of a completion's first token is not needed if the prompt is empty, because no token
    precedes it. With `settings.trained_only`, rows whose loss mask is 0 are not needed either.
    """
    counts = layout.index_rows(settings.extra)[1]
    if settings.trained_only and "loss_mask" in part.data:
        counts = counts & np.not_equal(to_host_array(part.data["loss_mask"]), 0.0)
    return counts


def prepare(
    network: nn.Module, part: SequenceSample, settings: PassSettings, device: torch.device
) -> PreparedPass:
    """Pack a micro-batch for the network, with shared prefixes computed once where possible.

    Unless scores are wanted, the network computes only the rows that `mask_read_rows` selects, and
    the outputs of all other rows are 0. Prefixes are not shared in a pass with an auxiliary loss,
    or with dropout, which differs between the completions of a prompt.
    """
    # Lay out the tokens, and share prefixes if the network can compute them once.
    layout = PackLayout.from_sample(part)
    if (
        settings.dropout is None
        and settings.aux_loss is None
        and cast(PrefixSharingNetwork, network).can_share_prefixes(int(layout.lengths.max()))
    ):
        keys = part.data
        if settings.trained_only or SCORED_ONCE in part.metadata:
            layout = share_training_prefixes(layout, keys, part, device)
        else:
            layout = share_prompts(layout, keys)
    # Pack them with all that the pass needs.
    if "given_logprobs" in settings.want:
        ids: Tensor | TopIds | None = build_given_ids(part, device)
    else:
        ids = settings.top
    packed = replace(
        pack(part, layout, device, extra=settings.extra),
        aux_loss=settings.aux_loss,
        row_gradient=settings.gradient,
        ids=ids,
    )
    if settings.dropout is not None:
        packed = replace(
            packed,
            dropout=DropoutKeys.from_sequences(*settings.dropout, list_sequence_keys(part), device),
        )
    # Compute only the rows whose output is read.
    support = build_support(part, device)
    counts = mask_read_rows(part, layout, settings)
    if counts.all() or "scores" in settings.want:
        return PreparedPass(
            part,
            layout,
            Microbatch(packed, settings.want, settings.temperature, support),
            lambda out: out,
        )
    chosen = np.flatnonzero(counts)
    rows = put(chosen, device)
    given = Microbatch(
        packed.select_rows(rows),
        settings.want,
        settings.temperature,
        None if support is None else support.select(chosen),
    )
    return PreparedPass(part, layout, given, lambda out: scatter_rows(out, rows, len(counts)))


def prepare_filler(network: nn.Module, want: Want, device: torch.device) -> PreparedPass:
    """Return a pass of one token, for a rank that has fewer micro-batches than others.

    The rank runs the pass only because all ranks communicate during each pass.
    """
    outputs: Want = next(
        (frozenset[Output]({output}) for output in ("values", "scores") if output in want),
        frozenset({"logprobs"}),
    )
    token = np.zeros(1, np.int64)
    filler = SequenceSample.from_groups(
        ["fill"], {"prompt": [[1]], "completion": [[1]]}, {"prompt": token, "completion": token}
    )
    return replace(prepare(network, filler, PassSettings(outputs), device), part=None)


@dataclass(frozen=True)
class ScoringProcessor:
    """Implementation of `MicrobatchProcessor` for scoring.

    `finish` returns the outputs of a micro-batch as a sample. It returns None for a filler pass,
    which a rank runs only because other ranks have more micro-batches.
    """

    network: nn.Module
    settings: PassSettings
    device: torch.device

    def prepare(self, part: SequenceSample) -> PreparedPass:
        return prepare(self.network, part, self.settings, self.device)

    def build_filler(self) -> PreparedPass:
        return prepare_filler(self.network, self.settings.want, self.device)

    def finish(self, prepared: PreparedPass, out: Outputs) -> SequenceSample | None:
        if prepared.part is None:
            return None
        return to_sample(prepared.part, prepared.layout, cast(dict[str, Tensor], out))

    def compute_stage_loss(self, prepared: PreparedPass) -> Tensor | None:
        return None
