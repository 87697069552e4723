"""What `allocation_mode` makes of roles that name no layout of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from weft.engine.service_spec import NO_NETWORK
from weft.engine.spec import ModelSpec, ParallelSpec
from weft.options import option

MANUAL, HEURISTIC, SEARCH = MODES = ("manual", "heuristic", "search")


@dataclass
class SearchSpec:
    """What `allocation_mode=search` and `--dry-run` reckon with, where this machine and the other
    options do not say it.
    """

    gpu: str | None = option(
        None,
        "GPU that the devices are, such as H100, which --dry-run plans for, too; absent: the one "
        "of this machine",
    )
    memory_gb: float | None = option(
        None,
        "GiB of a device's memory that may be filled; absent: nine tenths, of a CPU's an equal "
        "share",
        at_least=0.0,
    )
    prompt_tokens: int | None = option(
        None,
        "tokens of a prompt; absent: dataset.max_prompt_len where it is set, else 512",
        at_least=1,
    )
    answer_tokens: int | None = option(
        None,
        "tokens of an answer; absent: what is sampled at most, of rows what dataset.max_seqlen "
        "leaves where it is set, "
        "else 512",
        at_least=1,
    )


def allocated(roles: Mapping[str, ModelSpec], mode: str, num_devices: int) -> dict[str, ModelSpec]:
    """The roles with a layout each. `num_devices`: those of all machines.

    A role that names a layout keeps it, and so does one whose backend runs on one device. `manual`
    leaves the others on the first device, a layout is given to all of them, and `heuristic` has
    each work on all devices, data-parallel: trained roles sharded, the others whole on each.
    `search` begins there.
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
    return {
        name: spec if is_placed(spec) else replace(spec, layout=layout, allocated_by=by)
        for name, spec in roles.items()
    }


def is_placed(spec: ModelSpec) -> bool:
    """Whether a role says where it is, or has no choice."""
    return (
        spec.layout is not None
        or spec.parallel != ParallelSpec()
        or spec.backend in ("hf", *NO_NETWORK)
    )
