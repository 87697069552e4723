"""Gradients of losses that declare `Loss.by_row`, and a check of that declaration.

The declaration means that a row's gradient doesn't depend on the outputs of other rows, so the
output head can compute gradients during the forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from weft.algorithms.base import Loss, Output
from weft.engine.rows import SampleRows
from weft.errors import ConfigError
from weft.models.network.packed import RowGradient

# outputs to which the declaration applies
BY_ROW: tuple[Output, ...] = ("logprobs", "entropy", "given_logprobs")
TOLERANCE = 1e-5  # relative to the largest gradient; kernels may differ in rounding


def build_row_gradient(
    loss: Loss, rows: SampleRows, total: Mapping[str, float], scale: float
) -> RowGradient:
    """Return a function that maps outputs to the gradients of the loss with respect to them.

    The gradients are multiplied by `scale`. The network's head calls the function after each chunk
    of rows, with outputs of 0 for the rows that it has not computed yet.
    """

    def compute_scaled_gradient(out: Mapping[Output, Tensor]) -> Mapping[Output, Tensor]:
        return {
            "logprobs": torch.zeros_like(out["logprobs"]),
            **_compute_gradients(loss, out, rows, total, scale),
        }

    return compute_scaled_gradient


def is_row_separable(
    loss: Loss, out: Mapping[Output, Tensor], rows: SampleRows, total: Mapping[str, float]
) -> bool:
    """Return whether a check shows that no row's gradient depends on other rows' outputs.

    The check is for a loss that declares `by_row`, whose gradients are computed before the outputs
    of all rows are known. The gradient over all rows is compared with gradients for which the
    outputs of half of the rows are set to 0. If they differ, training would silently be wrong, so
    `ConfigError` is raised with the loss's name.

    Returns False if these rows allow no conclusion: if fewer than two rows have a gradient, or if a
    gradient is not finite.
    """
    plain = {}
    for key, by in _compute_gradients(loss, out, rows, total, 1.0).items():
        if key in BY_ROW:
            plain[key] = by
    if not all(bool(by.isfinite().all()) for by in plain.values()) or not _has_several_rows(plain):
        return False
    every_other = torch.arange(rows.num_rows) % 2 == 0
    random = torch.rand(rows.num_rows, generator=torch.Generator().manual_seed(0)) < 0.5
    for mask in (every_other, ~every_other, random, ~random):
        mask = mask.to(rows.mask.device)
        seen = {}
        for key, value in out.items():
            seen[key] = _mask_values(mask, value) if key in BY_ROW else value
        alone = _compute_gradients(loss, seen, rows, total, 1.0)
        for key, by in plain.items():
            if not _is_equal(by[mask], alone[key][mask] if key in alone else None):
                raise ConfigError(
                    f"loss {get_loss_name(loss)!r} declares by_row=True, but its gradient by the "
                    f"{key} of a row depends on the "
                    "outputs of other rows; set by_row to False"
                )
    return True


def _has_several_rows(gradients: Mapping[Output, Tensor]) -> bool:
    """Return whether more than one row has a nonzero gradient."""
    return any(
        int((by.flatten(1) if by.dim() > 1 else by[:, None]).any(1).sum()) > 1
        for by in gradients.values()
    )


def get_loss_name(loss: Loss) -> str:
    """Return the registered name of a loss, or its class name."""
    return str(getattr(loss, "name", type(loss).__name__))


def _compute_gradients(
    loss: Loss,
    out: Mapping[Output, Tensor],
    rows: SampleRows,
    total: Mapping[str, float],
    scale: float,
) -> dict[Output, Tensor]:
    """Return the gradients of `scale` times the loss, one for each output that the loss depends on."""
    with torch.enable_grad():
        known = {key: value.detach().requires_grad_() for key, value in out.items()}
        zeros = torch.zeros_like(rows.mask)
        value, _ = loss({key: known.get(key, zeros) for key in loss.outputs}, rows, total)
        if not value.requires_grad:
            return {}
        optional_gradients = torch.autograd.grad(
            value * scale, list(known.values()), allow_unused=True
        )
    gradients: dict[Output, Tensor] = {}
    for key, by in zip(known, optional_gradients, strict=True):
        if by is not None:
            gradients[key] = by
    return gradients


def _mask_values(mask: Tensor, value: Tensor) -> Tensor:
    return torch.where(mask.view(-1, *(1,) * (value.dim() - 1)), value, torch.zeros_like(value))


def _is_equal(one: Tensor, other: Tensor | None) -> bool:
    if other is None:
        return not bool(one.any())
    if one.numel():
        return bool((one - other).abs().max() <= TOLERANCE * one.abs().max())
    return True
