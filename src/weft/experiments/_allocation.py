"""Assign a layout to each role that has none, according to `allocation_mode`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from weft.engine.service_spec import NO_NETWORK
from weft.engine.spec import ModelSpec, ParallelSpec
from weft.options import option

MANUAL, HEURISTIC, SEARCH = MODES = ("manual", "heuristic", "search")


@dataclass
class SearchSpec:
    """Assumptions for the estimates of `allocation_mode=search` and of `--dry-run`.

    A value that is not set is derived from this machine or from the other options.
    """

    gpu: str | None = option(
        None,
        "type of GPU to estimate for, such as H100, also with --dry-run; absent: the GPU of this "
        "machine",
    )
    memory_gb: float | None = option(
        None,
        "usable GiB of a device's memory; absent: 90% of a GPU's memory, or for CPUs an equal "
        "share of 90% of the machine's memory",
        at_least=0.0,
    )
    prompt_tokens: int | None = option(
        None,
        "tokens per prompt; absent: dataset.max_prompt_len if it is set, else 512",
        at_least=1,
    )
    answer_tokens: int | None = option(
        None,
        "tokens per answer; absent: the maximum of sampled tokens, or for answers in rows what "
        "prompts leave of dataset.max_seqlen, or 512 if that is not set",
        at_least=1,
    )


def allocate_layouts(
    roles: Mapping[str, ModelSpec], mode: str, num_devices: int
) -> dict[str, ModelSpec]:
    """Return the roles, with a parallel layout assigned to each role that needs one.

    `mode` is the value of the option `allocation_mode`, and `num_devices` is the number of devices
    of all machines. A role is unchanged if its layout is set or if its backend runs on one device
    only. For other roles, "manual" assigns no layout, and they run on the first device. "heuristic"
    and "search" make them data-parallel over all devices; `weft.experiments._placement.place_calls`
    later improves their placement. Any other mode is a layout, such as "d4t2", which is assigned to
    all of them.
    """
    if mode in (HEURISTIC, SEARCH):
        layout = f"d{num_devices}"
    elif mode in MODES:
        layout = None
    else:
        layout = mode
    if layout is None:
        return dict(roles)
    by = f"allocation_mode={mode}"
    layouts: dict[str, ModelSpec] = {}
    for name, spec in roles.items():
        layouts[name] = spec if is_placed(spec) else replace(spec, layout=layout, allocated_by=by)
    return layouts


def is_placed(spec: ModelSpec) -> bool:
    """Return whether a role's layout is set, or its backend runs on one device only."""
    return (
        spec.layout is not None
        or spec.parallel != ParallelSpec()
        or spec.backend in ("hf", *NO_NETWORK)
    )
