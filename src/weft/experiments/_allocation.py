"""What `allocation_mode` makes of roles that name no layout of their own. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from weft.engine.service_spec import NO_NETWORK
from weft.engine.spec import ModelSpec, ParallelSpec
from weft.errors import ConfigError

MANUAL, HEURISTIC, SEARCH = MODES = ("manual", "heuristic", "search")


def allocated(roles: Mapping[str, ModelSpec], mode: str, num_devices: int) -> dict[str, ModelSpec]:
    """The roles with a layout each. `num_devices`: those of all machines.

    A role that names a layout keeps it, and so does one whose backend runs on one device. `manual` leaves the others on the
    first device, a layout is given to all of them, and `heuristic` has each work on all devices, data-parallel: trained roles
    sharded, the others whole on each. Raises `ConfigError` for `search`, where there is something to search for.
    """
    if mode == SEARCH and num_devices > 1:
        raise ConfigError(
            f"allocation_mode=search: there is no search over the layouts of {num_devices} devices yet; write "
            "allocation_mode=heuristic, or MODEL.layout"
        )
    layout = f"d{num_devices}" if mode == HEURISTIC else None if mode in MODES else mode
    if layout is None:
        return dict(roles)
    return {name: spec if _is_placed(spec) else replace(spec, layout=layout) for name, spec in roles.items()}


def _is_placed(spec: ModelSpec) -> bool:
    return spec.layout is not None or spec.parallel != ParallelSpec() or spec.backend in ("hf", *NO_NETWORK)
