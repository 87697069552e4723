"""Plan files: the layouts and devices of a run's calls, as YAML that users can edit.

    plan = parse_plan(text, "plan.yaml")     # checks the form, and names the line of each mistake
    plan.check_facts(facts)                  # checks that the plan is for this run
    plan.check_calls(names)
    text = format_plan(plan, "ppo")

`weft plan search --output` writes a plan, and `allocation_mode=plan.yaml` runs it. A run also keeps its
plan in its own folder, so that it can be resumed if the file is changed or removed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.errors import ConfigError, find_nearest
from weft.reading import parse_yaml, read_text, refuse_url
from weft.topology import LETTERS, Layout, Mesh, list_rank_intervals, parse_mesh

FORMAT = 1
KEY = "weft_plan"  # key of the format's number, by which a plan is recognized
PLAN = "plan.yaml"  # name of the plan in a run's folder
SECTIONS = (KEY, "calls", "run", "estimates")
CALL_KEYS = ("layout", "devices", "estimated")
RUN_KEYS = ("devices", "devices_per_node", "rows_per_step", "tokens_per_step", "models")
CHECKSUM = re.compile(r"^# checksum ([0-9a-f]{8}):.*\n", re.MULTILINE)
SIZE_NAMES = {
    "layers": "layers",
    "hidden": "hidden width",
    "heads": "attention heads",
    "kv_heads": "key-value heads",
    "inner": "MLP width",
    "vocab": "vocabulary",
    "experts": "experts",
    "parameters": "parameters",
}

HEADER = """# Plan of a run of {algorithm}, made by weft plan search: the layout and the devices of each call.
# Edit them, then price the plan and run it:
#   weft plan run {algorithm} ... allocation_mode={name}
#   weft quickstart {algorithm} ... allocation_mode={name}
# A layout has letters with degrees: d data, f sharded weights, t tensor, p pipeline, c context, e expert.
# Estimates are for information only; weft plan run computes them again.
"""


@dataclass(frozen=True)
class PlannedCall:
    """Layout and devices of a call, as the plan's author wrote them.

    Attributes:
        layout: Layout, such as "d4t2".
        devices: Numbers of the devices, such as "0-7".
        estimated: Estimates for information: seconds, bound, memory_gb.
    """

    layout: str
    devices: str
    estimated: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.layout} on {self.devices}"


@dataclass(frozen=True)
class PlanFacts:
    """Assumptions of a plan on its run; values that are None are not compared.

    Attributes:
        devices: Number of devices of all machines.
        devices_per_node: Number of devices of a machine.
        rows_per_step: Rows of a step's batch.
        tokens_per_step: Tokens of a step's batch, if batches are formed by tokens.
        models: Sizes of each role's model, by their names (`SIZE_NAMES`).
    """

    devices: int | None = None
    devices_per_node: int | None = None
    rows_per_step: int | None = None
    tokens_per_step: int | None = None
    models: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def list_differences(self, other: PlanFacts) -> list[tuple[str, str]]:
        """Return the key of each value that differs, with a phrase that names both values."""
        differences = []
        for key, unit in (
            ("devices", "devices"),
            ("devices_per_node", "devices per machine"),
            ("rows_per_step", "rows per step"),
            ("tokens_per_step", "tokens per step"),
        ):
            mine, theirs = getattr(self, key), getattr(other, key)
            if None not in (mine, theirs) and mine != theirs:
                differences.append((key, f"{mine:,} {unit}, and this run has {theirs:,}"))
        if (self.rows_per_step is None) != (other.rows_per_step is None) and (
            self.tokens_per_step is None
        ) != (other.tokens_per_step is None):
            mine = "rows" if self.rows_per_step is not None else "tokens"
            theirs = "rows" if other.rows_per_step is not None else "tokens"
            differences.append(
                (f"{mine}_per_step", f"batches of {mine}, and this run has batches of {theirs}")
            )
        for role, sizes in self.models.items():
            for name, value in sizes.items():
                theirs = other.models.get(role, {}).get(name, value)
                if name in SIZE_NAMES and value != theirs:
                    differences.append(
                        (
                            f"models.{role}.{name}",
                            f"another model of {role}: {SIZE_NAMES[name]} {value:,}, and this run's "
                            f"has {theirs:,}",
                        )
                    )
        return differences


@dataclass(frozen=True)
class PlacementPlan:
    """Contents of a plan file.

    Attributes:
        calls: Layout and devices of each call.
        facts: Assumptions on the run.
        estimates: Estimates for information: step_seconds, device, ...
        source: Name of the file, for messages.
        lines: Line of each key in the file, such as "calls.actor_gen.layout".
    """

    calls: Mapping[str, PlannedCall]
    facts: PlanFacts
    estimates: Mapping[str, Any] = field(default_factory=dict)
    source: str = PLAN
    lines: Mapping[str, int] = field(default_factory=dict)

    def locate(self, key: str) -> str:
        """Return the file and the line of a key, for messages."""
        line = self.lines.get(key)
        return self.source if line is None else f"{self.source}:{line}"

    def check_facts(self, facts: PlanFacts) -> None:
        """Raise `ConfigError` if the plan is for other devices, models or batches than `facts`."""
        for key, difference in self.facts.list_differences(facts):
            raise ConfigError(
                f"{self.locate(f'run.{key}')}: this plan is for {difference}; make a plan for this "
                f"run: weft plan search ... --output FILE"
            )

    def check_calls(self, names: Sequence[str]) -> None:
        """Raise `ConfigError` if the plan has other calls than `names`, those of the run."""
        for name in self.calls:
            if name not in names:
                near = find_nearest(name, names, 1)
                hint = f"did you mean {near[0]}?" if near else f"its calls are {', '.join(names)}"
                raise ConfigError(
                    f"{self.locate(f'calls.{name}')}: calls.{name}: this run has no such call; "
                    f"{hint}"
                )
        missing = [name for name in names if name not in self.calls]
        if missing:
            raise ConfigError(
                f"{self.locate('calls')}: calls: {', '.join(missing)} of this run "
                f"{'is' if len(missing) == 1 else 'are'} missing; add "
                f"{'its' if len(missing) == 1 else 'their'} layout and devices"
            )

    def describe_calls(self) -> str:
        """Return a phrase with the placement of all calls, those with the same one together."""
        names: dict[str, list[str]] = {}
        for name, call in self.calls.items():
            names.setdefault(str(call), []).append(name)
        return "; ".join(f"{', '.join(calls)} {place}" for place, calls in names.items())


def find_differing_calls(one: PlacementPlan, other: PlacementPlan) -> list[str]:
    """Return a phrase for each call whose layout or devices differ."""
    differences = []
    for name in dict.fromkeys([*one.calls, *other.calls]):
        a, b = one.calls.get(name), other.calls.get(name)
        if a is None or b is None or (a.layout, a.devices) != (b.layout, b.devices):
            differences.append(f"{name}: {a or 'absent'} there, {b or 'absent'} here")
    return differences


# -- reading


def read_plan(path: str | Path, option: str) -> PlacementPlan:
    """Return the plan in a file. `option` names the option in messages on a file that is missing."""
    refuse_url(path, f"{option}={path}", ConfigError)
    place = Path(path).expanduser()
    if not place.exists():
        raise ConfigError(
            f"{option}={path}: there is no such file; weft plan search ... --output {path} makes it"
        )
    return parse_plan(read_text(place, f"{option}={path}", ConfigError), str(path))


def parse_plan(text: str, source: str) -> PlacementPlan:
    """Return the plan in a text. Raises `ConfigError` that names `source` and the line."""
    values, root = parse_yaml(text, source, ConfigError)
    lines = _find_lines(root)
    reader = _PlanReader(source, lines)
    if not isinstance(values, dict) or KEY not in values:
        raise ConfigError(
            f"{source}: is not a plan: it has no {KEY}; weft plan search ... --output FILE makes one"
        )
    version = values[KEY]
    if version != FORMAT:
        age = "newer" if isinstance(version, int) and version > FORMAT else "unknown"
        raise reader.build_error(
            KEY, f"format {version!r} is {age}: this version of weft reads {FORMAT}"
        )
    reader.check_keys("", values, SECTIONS)
    calls = {}
    for name, call in reader.get_mapping(values, "calls").items():
        key = f"calls.{name}"
        if not isinstance(call, dict):
            raise reader.build_error(key, "must have a layout and devices")
        reader.check_keys(f"{key}.", call, CALL_KEYS)
        for part in ("layout", "devices"):
            if part not in call:
                raise reader.build_error(key, f"has no {part}; add one, such as {EXAMPLES[part]}")
        calls[str(name)] = PlannedCall(
            reader.get_word(f"{key}.layout", call["layout"]),
            reader.get_word(f"{key}.devices", call["devices"]),
            reader.get_mapping(call, "estimated", f"{key}."),
        )
    if not calls:
        raise reader.build_error("calls", "has no calls; each has a layout and devices")
    return PlacementPlan(
        calls,
        _read_facts(reader, reader.get_mapping(values, "run")),
        reader.get_mapping(values, "estimates"),
        source,
        lines,
    )


EXAMPLES = {"layout": "d4t2", "devices": "0-7"}


@dataclass(frozen=True)
class _PlanReader:
    """Reader of a plan's values, whose messages name the file and the line."""

    source: str
    lines: Mapping[str, int]

    def build_error(self, key: str, problem: str) -> ConfigError:
        """Return an error about the value of a key."""
        line = f":{self.lines[key]}" if key in self.lines else ""
        return ConfigError(f"{self.source}{line}: {key}: {problem}")

    def check_keys(self, prefix: str, values: Mapping[Any, Any], known: Sequence[str]) -> None:
        for name in values:
            if name not in known:
                near = find_nearest(str(name), known, 1)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
                raise self.build_error(f"{prefix}{name}", f"is unknown; {hint}")

    def get_mapping(self, values: Mapping[str, Any], name: str, prefix: str = "") -> dict[Any, Any]:
        value = values.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.build_error(f"{prefix}{name}", f"must be a mapping, not {value!r}")
        return dict(value)

    def get_word(self, key: str, value: Any) -> str:
        """Return a layout or a list of devices, which may be written as a number or as a list."""
        if isinstance(value, list) and all(type(each) is int for each in value):
            return format_devices(value)
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise self.build_error(
                key, f"cannot be read; write for example {EXAMPLES[key.rpartition('.')[2]]}"
            )
        return str(value)

    def get_count(self, key: str, value: Any) -> int | None:
        if value is None:
            return None
        if type(value) is not int or value < 1:
            raise self.build_error(key, f"must be a whole number of at least 1, not {value!r}")
        return value


def _read_facts(reader: _PlanReader, values: Mapping[str, Any]) -> PlanFacts:
    reader.check_keys("run.", values, RUN_KEYS)
    models: dict[str, dict[str, int]] = {}
    for role in reader.get_mapping(values, "models", "run."):
        sizes = reader.get_mapping(values["models"], role, "run.models.")
        reader.check_keys(f"run.models.{role}.", sizes, tuple(SIZE_NAMES))
        models[str(role)] = {}
        for name, size in sizes.items():
            count = reader.get_count(f"run.models.{role}.{name}", size)
            if count is not None:
                models[str(role)][str(name)] = count
    counts = {}
    for name in RUN_KEYS[:-1]:
        counts[name] = reader.get_count(f"run.{name}", values.get(name))
    return PlanFacts(models=models, **counts)


def _find_lines(root: Any) -> dict[str, int]:
    """Return the line of each key in a YAML document, by its dotted name."""
    lines: dict[str, int] = {}
    stack = [("", root)]
    while stack:
        prefix, node = stack.pop()
        if not isinstance(getattr(node, "value", None), list):
            continue
        for pair in node.value:
            if isinstance(pair, tuple):
                name = f"{prefix}{pair[0].value}"
                lines[name] = pair[0].start_mark.line + 1
                stack.append((f"{name}.", pair[1]))
    return lines


# -- meshes


def parse_call_mesh(plan: PlacementPlan, name: str, *, sharded: bool) -> Mesh:
    """Return the mesh of a call. With `sharded`, weights are sharded unless the layout has an f.

    Raises `ConfigError` that names the line of an invalid layout or list of devices.
    """
    call = plan.calls[name]
    key = f"calls.{name}.layout"
    try:
        layout = Layout.parse(call.layout, trained=sharded)
    except ConfigError as error:
        raise ConfigError(f"{plan.locate(key)}: calls.{name}.{error}") from None
    key = f"calls.{name}.devices"
    try:
        mesh = parse_mesh(call.devices, layout)
    except ConfigError as error:
        message = str(error).replace("device_mesh=", "devices=", 1)
        raise ConfigError(f"{plan.locate(key)}: calls.{name}.{message}") from None
    most = plan.facts.devices
    if most is not None and mesh.ranks[-1] >= most:
        raise ConfigError(
            f"{plan.locate(key)}: calls.{name}.devices={call.devices}: device {mesh.ranks[-1]} does "
            f"not exist; the {most:,} devices of this plan are 0 to {most - 1:,}"
        )
    return mesh


def plan_call(mesh: Mesh, estimated: Mapping[str, Any] | None = None) -> PlannedCall:
    """Return the layout and the devices of a mesh, as a plan has them."""
    return PlannedCall(format_layout(mesh.layout), format_devices(mesh.ranks), estimated or {})


def format_layout(layout: Layout) -> str:
    """Return a layout without degrees of 1; with several data-parallel ranks, f is always given."""
    text = ""
    for letter, name in LETTERS.items():
        degree = getattr(layout, name)
        if degree > 1 or (letter == "f" and layout.data > 1):
            text += f"{letter}{degree}"
    return text or "d1"


def format_devices(ranks: Iterable[int]) -> str:
    """Return the numbers of devices as a list of ranges, such as "0-3,8"."""
    parts = []
    for start, stop in list_rank_intervals(tuple(ranks)):
        parts.append(str(start) if stop == start + 1 else f"{start}-{stop - 1}")
    return ",".join(parts)


# -- writing


def format_plan(plan: PlacementPlan, algorithm: str) -> str:
    """Return the text of a plan file. `algorithm` is the name of the run's quickstart."""
    lines = [f"{KEY}: {FORMAT}", "calls:"]
    for name, call in plan.calls.items():
        lines += [f"  {name}:", f"    layout: {call.layout}", f'    devices: "{call.devices}"']
        if call.estimated:
            lines.append(f"    estimated: {_format_mapping(call.estimated)}")
    lines.append("run:  # the plan is refused for a run with other values")
    for name in RUN_KEYS[:-1]:
        if getattr(plan.facts, name) is not None:
            lines.append(f"  {name}: {getattr(plan.facts, name)}")
    if plan.facts.models:
        lines.append("  models:")
        for role, sizes in plan.facts.models.items():
            lines.append(f"    {role}: {_format_mapping(sizes)}")
    if plan.estimates:
        lines.append("estimates:")
        for name, value in plan.estimates.items():
            lines.append(f"  {name}: {_format_value(value)}")
    body = HEADER.format(algorithm=algorithm, name=plan.source) + "\n".join(lines) + "\n"
    mark = (
        f"# checksum {_compute_checksum(body)}: weft replaces this file only if it is unchanged.\n"
    )
    return body.replace(f"{KEY}:", f"{mark}{KEY}:", 1)


def is_unchanged(text: str) -> bool:
    """Return whether a text is a plan as weft has written it, without later edits."""
    match = CHECKSUM.search(text)
    return match is not None and match[1] == _compute_checksum(CHECKSUM.sub("", text, count=1))


def _compute_checksum(body: str) -> str:
    return hashlib.blake2b(body.encode(), digest_size=4).hexdigest()


def _format_mapping(values: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{key}: {_format_value(value)}" for key, value in values.items()) + "}"


def _format_value(value: Any) -> str:
    """Return a number or a text as YAML; numbers with three digits."""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z][\w .-]*", value):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return str(value)
