"""Report of a search for a placement, as text and as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.observe.metrics import format_three_digits
from weft.planner.devices import GIB, DeviceRates
from weft.planner.plan_file import format_devices, format_layout
from weft.planner.problem import PlacementEstimate, PlacementProblem
from weft.planner.search import SearchResult
from weft.topology import Mesh


@dataclass(frozen=True)
class PlacementReport:
    """Result of a search for a placement, and the problem with the data of the estimates."""

    result: SearchResult
    problem: PlacementProblem

    def to_dict(self) -> dict[str, Any]:
        """Return the estimates for the best, the next best and the heuristic placement.

        The result consists of plain values, and also contains facts about the search and the
        devices.
        """
        result = self.result
        rates = self.problem.rates
        other = result.next_best
        next_best = None
        if other is not None and not other.excess_bytes:
            next_best = {**_estimate_to_dict(other), "differs": list(self._find_changes(other))}
        return {
            "device": rates.name,
            "device_memory_gb": rates.capacity / GIB,
            "basis": rates.basis,
            "tried": result.num_tried,
            "placements": self.problem.num_placements,
            "exhaustive": result.is_exhaustive,
            "bound_seconds": result.bound_seconds,
            "search": _estimate_to_dict(result.best),
            "next_best": next_best,
            "heuristic": _estimate_to_dict(result.first),
        }

    def build_lines(self) -> list[str]:
        """Return lines of text that compare the best placement with the heuristic placement."""
        # Describe the search and the heuristic's placement.
        best = self.result.best
        first = self.result.first
        rates = self.problem.rates
        fits = ""
        if first.excess_bytes:
            sizes = f"{first.peak_bytes / GIB:.1f} GiB of {rates.capacity / GIB:.1f}"
            fits = f", which does not fit: {sizes}"
        lines = [
            f"allocation_mode=search: {format_seconds(best.step_seconds)} per step on "
            f"{format_basis(rates)}, {format_seconds(first.step_seconds)} "
            f"with allocation_mode=heuristic{fits}; {self._describe_search()}"
        ]
        # Compare both placements for each call.
        for call, mesh in best.meshes.items():
            load = self.problem.loads[call]
            lines.append(
                f"  {call}: {format_mesh(mesh)}, {_format_call_seconds(best, call)}, mostly "
                f"{best.get_bound(call)}; heuristic {format_mesh(first.meshes[call])}, "
                f"{_format_call_seconds(first, call)} ({load.num_sequences:,} x ({load.prompt_tokens:,} + "
                f"{load.new_tokens:,}) tokens)"
            )
        lines += self._describe_next_best()
        lines.append(
            f"  memory: {best.peak_bytes / GIB:.2f} GiB at most of {rates.capacity / GIB:.2f} on "
            f"a device"
        )
        return lines

    def _describe_search(self) -> str:
        result = self.result
        if result.is_exhaustive:
            return f"the best of {self.problem.num_placements:,} placements"
        tried = f"the best of {result.num_tried:,} placements that were tried"
        if not result.bound_seconds:
            return tried
        return f"{tried}; none takes less than {format_seconds(result.bound_seconds)}"

    def _describe_next_best(self) -> list[str]:
        """Return a line about the next best placement that fits, or none."""
        best = self.result.best
        other = self.result.next_best
        if other is None or other.excess_bytes:
            return []
        slower = 100 * (other.step_seconds / best.step_seconds - 1)
        than_best = "as fast" if slower < 0.005 else f"+{slower:.2g}%"
        changes = []
        for call, (mesh, old) in self._find_changes(other).items():
            changes.append(f"{call} {format_mesh(mesh)} in place of {format_mesh(old)}")
        return [
            f"  next best: {format_seconds(other.step_seconds)} ({than_best}): {', '.join(changes)}"
        ]

    def _find_changes(self, other: PlacementEstimate) -> Mapping[str, tuple[Mesh, Mesh]]:
        """Return the calls whose meshes differ from the best placement's, with the two meshes."""
        changes = {}
        for call, mesh in self.result.best.meshes.items():
            if other.meshes[call] != mesh:
                changes[call] = other.meshes[call], mesh
        return changes


def format_basis(rates: DeviceRates) -> str:
    """Return the device, and what the estimate for it is based on if that is a profile."""
    return f"{rates.name} as estimated" + ("" if rates.profile is None else f" from {rates.basis}")


def format_mesh(mesh: Mesh) -> str:
    """Return a short text of a mesh, such as `d4f1t2 on 0-7`."""
    return f"{format_layout(mesh.layout)} on {format_devices(mesh.ranks)}"


def format_seconds(number: float) -> str:
    """Return a duration in seconds, or in milliseconds if it is short."""
    return f"{format_three_digits(number)} s" if number >= 0.1 else f"{1e3 * number:.3g} ms"


def _estimate_to_dict(estimate: PlacementEstimate) -> dict[str, Any]:
    calls = {}
    for call, mesh in estimate.meshes.items():
        calls[call] = {
            "layout": str(mesh.layout),
            "devices": list(mesh.ranks),
            "seconds": estimate.seconds[call],
            "seconds_for_its_weights": estimate.transfer_seconds[call],
            "bound": estimate.get_bound(call),
            "parts": dict(estimate.parts[call]),
        }
    return {
        "step_seconds": estimate.step_seconds,
        "memory_gb": estimate.peak_bytes / GIB,
        "fits": not estimate.excess_bytes,
        "calls": calls,
    }


def _format_call_seconds(estimate: PlacementEstimate, call: str) -> str:
    moving = estimate.transfer_seconds[call]
    return format_seconds(estimate.seconds[call]) + (
        f" + {format_seconds(moving)} for its weights" if moving else ""
    )
