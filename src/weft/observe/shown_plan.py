"""Plan of a run as plain values, for `weft plan show` and for the run's report.

The planner builds the plan, and a run stores it in `forecast.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from weft.observe.jsonl import read_json
from weft.observe.metrics import is_finite
from weft.writing import write

FORECAST = "forecast.json"
CALL, HOST_FUNCTION, WEIGHTS = "call", "host", "weights"  # kinds of spans
MAX_NUMBER = 1e18  # numbers in a valid plan are smaller


@dataclass(frozen=True)
class ShownCall:
    """Call of a model on its devices, with its forecast for one step.

    Attributes:
        name: Name of the graph's node.
        role: Role of the call.
        layout: Layout, such as `d4f4t2`.
        groups: Indices of the device groups of its mesh.
        seconds: Duration.
        transfer_seconds: Time to move newly trained weights to its devices.
        moved_bytes: Bytes of these weights.
        bound: Name of the largest part, or "".
        parts: Seconds of each part of the duration, by name.
    """

    name: str
    role: str
    layout: str
    groups: list[int]
    seconds: float
    transfer_seconds: float
    moved_bytes: float
    bound: str
    parts: dict[str, float]


@dataclass(frozen=True)
class ShownGroup:
    """Devices that take part in the same calls.

    Attributes:
        name: Their ranks as text, such as `0-7`.
        intervals: Ranks as pairs [first rank, rank after the last one].
        memory: Memory in use on each of the devices over time, as pairs [seconds, bytes]; a value
            holds until the next pair.
        capacity: Usable bytes of a device's memory, or None if they are not known.
    """

    name: str
    intervals: list[list[int]]
    memory: list[list[float]]
    capacity: float | None

    @property
    def num_devices(self) -> int:
        return sum(stop - first for first, stop in self.intervals)

    @property
    def peak_bytes(self) -> float:
        return max((used for _, used in self.memory), default=0.0)

    @property
    def fits(self) -> bool:
        return self.capacity is None or self.peak_bytes <= self.capacity


@dataclass(frozen=True)
class ShownSpan:
    """Activity of the simulated steps.

    Attributes:
        name: Name of the graph's node.
        kind: `CALL`, `HOST_FUNCTION` or `WEIGHTS`.
        step: Step during which it ends.
        groups: Indices of its device groups.
        start: Seconds since the start of the first step.
        seconds: Duration.
        note: Reason why it does not start earlier, as a phrase, or "".
    """

    name: str
    kind: str
    step: int
    groups: list[int]
    start: float
    seconds: float
    note: str


@dataclass(frozen=True)
class ShownPlan:
    """Placement, simulated steps and forecast of a run.

    Attributes:
        title: Name of the run, or of its algorithm.
        device: Name of the devices.
        num_devices: Number of devices.
        per_node: Number of devices per machine.
        step_seconds: Duration of a step in the steady state.
        num_tokens: Tokens of a step.
        max_staleness: Number of steps by which sampling can be ahead of training.
        step_ends: Time at which each simulated step ends, in seconds.
        groups: Devices.
        calls: Calls, in the order of the graph.
        spans: Activities of the simulated steps, by start.
        assumptions: Pairs [assumed quantity, value].
        basis: Basis of the forecast, as a phrase.
        left_out: Roles whose calls are not included.
        notes: Messages to the user.
    """

    title: str
    device: str
    num_devices: int
    per_node: int
    step_seconds: float
    num_tokens: int
    max_staleness: int
    step_ends: list[float]
    groups: list[ShownGroup]
    calls: list[ShownCall]
    spans: list[ShownSpan]
    assumptions: list[list[str]]
    basis: str
    left_out: list[str]
    notes: list[str]

    @property
    def fullest(self) -> ShownGroup:
        """Group of devices that needs the largest share of its memory."""
        return max(self.groups, key=lambda group: group.peak_bytes / (group.capacity or 1.0))

    @property
    def seconds(self) -> float:
        """Duration of the simulated steps."""
        return max([*self.step_ends, *(span.start + span.seconds for span in self.spans)])

    def to_plain(self) -> dict[str, Any]:
        """Return the plan as plain values that JSON can represent."""
        return asdict(self)

    @classmethod
    def from_plain(cls, value: Any) -> ShownPlan:
        """Build a plan from the result of `to_plain`.

        Raises `ValueError` if a value is missing or has another type.
        """
        row = _read_fields(cls, value)
        row["groups"] = [ShownGroup(**_read_fields(ShownGroup, item)) for item in row["groups"]]
        row["calls"] = [ShownCall(**_read_fields(ShownCall, item)) for item in row["calls"]]
        row["spans"] = [ShownSpan(**_read_fields(ShownSpan, item)) for item in row["spans"]]
        plan = cls(**row)
        group_indices = {index for call in plan.calls for index in call.groups}
        group_indices |= {index for span in plan.spans for index in span.groups}
        if not group_indices <= set(range(len(plan.groups))):
            raise ValueError(f"groups are {sorted(group_indices)}")
        if not plan.step_ends or not plan.groups or not plan.calls or plan.step_seconds <= 0:
            raise ValueError("there is no step, no device or no call")
        if plan.num_devices < 1 or plan.seconds <= 0:
            raise ValueError("there is no device, or steps take no time")
        return plan


def _read_fields(kind: type, value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass in `value`. Raises `ValueError` if one is invalid."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{kind.__name__} is {value!r}")
    row = {}
    for dataclass_field in fields(kind):
        content = value.get(dataclass_field.name)
        if not _has_type(str(dataclass_field.type), content):
            raise ValueError(f"{kind.__name__}.{dataclass_field.name} is {content!r}")
        row[dataclass_field.name] = content
    return row


def _has_type(annotation: str, content: Any) -> bool:
    """Return whether a value of a JSON file has the annotated type."""
    if annotation.endswith(" | None"):
        return content is None or _has_type(annotation.removesuffix(" | None"), content)
    if annotation == "str":
        return isinstance(content, str)
    if annotation == "float":
        return is_finite(content) and 0 <= content < MAX_NUMBER
    if annotation == "int":
        return type(content) is int and 0 <= content < MAX_NUMBER
    if annotation.startswith("list["):
        item_type = annotation.removeprefix("list[").removesuffix("]")
        if not isinstance(content, list):
            return False
        if item_type.startswith("list[") and not all(
            isinstance(item, list) and len(item) == 2 for item in content
        ):
            return False
        return all(_has_type(item_type, item) for item in content)
    if annotation == "dict[str, float]":
        return isinstance(content, dict) and all(
            _has_type("float", item) for item in content.values()
        )
    return isinstance(content, Mapping)


def write_plan(directory: Path, plan: ShownPlan | None) -> None:
    """Write the plan to `forecast.json` in a run's directory; without a plan, write nothing."""
    if plan is not None:
        write(directory / FORECAST, json.dumps(plan.to_plain(), allow_nan=False) + "\n")


def read_plan(directory: Path) -> ShownPlan | None:
    """Return the plan in a run's directory, or None if it is missing or damaged."""
    content = read_json(directory / FORECAST)
    if not content:
        return None
    try:
        return ShownPlan.from_plain(content)
    except ValueError:
        return None


def list_nodes(spans: Sequence[ShownSpan]) -> list[str]:
    """Return the names of the nodes of `spans`, in the order in which they first start."""
    return list(dict.fromkeys(span.name for span in spans if span.kind != WEIGHTS))
