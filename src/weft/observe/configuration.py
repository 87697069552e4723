"""Configuration of a run as HTML: its starts, its changed options, and all options."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from weft import registry
from weft.errors import UserError
from weft.observe.diagnosis import ALGORITHMS
from weft.observe.jsonl import shorten_path
from weft.observe.metrics import LAST_TIME, is_finite
from weft.observe.page import escape_text, render_folded
from weft.observe.run_files import RunFiles
from weft.options import iterate_options

# Options that identify a run; they never count as changed.
IDENTITY_OPTIONS = ("experiment_name", "trial_name", "fileroot")
ABSENT_VALUE = object()  # default of an option that the quickstart does not have
CHOSEN_TEXT = "chosen by weft"  # shown in place of the default if weft chose the value


def flatten_options(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each nested option.

    An empty mapping is not flattened, but yielded as a value.
    """
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten_options(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def find_algorithm(run: RunFiles) -> str | None:
    """Return the name of the run's quickstart, such as `grpo`; None if it is unknown.

    A quickstart is a ready-made experiment that is configured by options.
    """
    algorithm = run.record.get("algorithm")
    if algorithm:
        return str(algorithm)
    return next((name for name in ALGORITHMS if name in run.config), None)


def find_defaults(run: RunFiles) -> dict[str, Any] | None:
    """Return the default of each option of the run's quickstart.

    Returns None if the defaults are unknown, for example because the quickstart is not registered
    in this process.
    """
    name = find_algorithm(run)
    try:
        # A report must not import a user's code, which a name with ":" would do.
        if name is None or ":" in name or name not in registry.quickstarts:
            return None
        base = registry.quickstarts.get(name)()
    except UserError:
        return None
    return compute_defaults(base)


def compute_defaults(base: Any) -> dict[str, Any]:
    """Return the default of each option of a quickstart's configuration `base`, by dotted name.

    Values have the types that YAML loads, so tuples are lists.
    """
    defaults: dict[str, Any] = {}
    for option in iterate_options(base):
        defaults[option.name] = (
            list(option.default) if isinstance(option.default, tuple) else option.default
        )
    return defaults


def find_changed_options(run: RunFiles) -> dict[str, tuple[Any, Any]] | None:
    """Return the value and the default of each option that differs from its default.

    Returns None if the defaults are unknown.
    """
    defaults = find_defaults(run)
    if defaults is None:
        return None
    changed_options = {}
    for name, value in flatten_options(run.config):
        if name not in IDENTITY_OPTIONS and value != defaults.get(
            name, None if is_unset(value) else ABSENT_VALUE
        ):
            changed_options[name] = (value, defaults.get(name))
    return changed_options


def find_chosen_options(run: RunFiles) -> frozenset[str]:
    """Return the names of options that the user left unset, so that weft chose their values."""
    names = run.record.get("chosen")
    if isinstance(names, list):
        return frozenset(map(str, names))
    return frozenset()


def render_configuration(run: RunFiles) -> str:
    """Render the starts of the run, its changed options, and a folded list of all options."""
    parts = [render_starts(run)]
    changed = find_changed_options(run)
    chosen = find_chosen_options(run)
    if changed:
        rows = "".join(
            f'<tr><th scope="row">{escape(name)}</th><td>{escape_text(format_briefly(value))}</td>'
            f'<td class="quiet">{CHOSEN_TEXT if name in chosen else escape_text(format_value(default))}</td></tr>'
            for name, (value, default) in sorted(
                changed.items(), key=lambda item: item[0] in chosen
            )
        )
        parts.append(
            f'<div class="card"><h3>Not the defaults of {escape(find_algorithm(run) or "")}</h3><div class="scroll">'
            '<table class="settings"><thead><tr><th scope="col">option</th><th scope="col">this run</th>'
            f'<th scope="col">default</th></tr></thead><tbody>{rows}</tbody></table></div></div>'
        )
    if run.config:
        parts.append(
            _render_all_options(run)
            if changed is None
            else render_folded("All options", _render_all_options(run), "all options")
        )
    return "".join(parts)


def _render_all_options(run: RunFiles) -> str:
    return (
        '<div class="tools js" hidden>'
        '<input id="filter" class="filter" type="search" placeholder="Filter options" aria-label="Filter options">'
        '<label><input id="unset" class="all" type="checkbox"> show unset</label></div>'
        f'<div class="options">{render_options(run.config)}</div>'
    )


def render_starts(run: RunFiles) -> str:
    """Render the last start of the run in detail, and list the earlier starts in one line.

    The details, such as the command, commit, host and versions, are read from `run.json`.
    """
    recorded = run.record.get("starts")
    if isinstance(recorded, list):
        starts = [start for start in recorded if isinstance(start, Mapping)]
    else:
        starts = []
    if not starts:
        return ""
    # Facts of the last start; earlier starts are one line.
    last = starts[-1]
    command = last.get("command")
    versions = last.get("versions")
    if isinstance(command, list):
        command_line = shlex.join(map(str, command))
    else:
        command_line = str(command or "")
    if isinstance(versions, Mapping):
        version_text = ", ".join(f"{package} {version}" for package, version in versions.items())
    else:
        version_text = ""
    commit = str(last.get("commit") or "")
    if commit.endswith("+"):
        commit = f"{commit.rstrip('+')} with changes"
    earlier = []
    for start in starts[:-1]:
        earlier.append(f"{_format_time(start.get('time'))} at step {start.get('step', 0)}")
    facts = [
        ("commit", commit),
        ("started", _format_time(last.get("time"))),
        ("host", str(last.get("host") or "")),
        ("folder", str(last.get("folder") or "")),
        ("versions", version_text),
        ("hardware", str(last.get("hardware") or run.hardware)),
        ("earlier starts", ", ".join(earlier)),
    ]
    # Render them below the command.
    rows = "".join(
        f"<div><dt>{name}</dt><dd>{escape_text(text)}</dd></div>" for name, text in facts if text
    )
    if command_line:
        code = f'<pre class="command" tabindex="0">{escape_text(command_line)}</pre>'
    else:
        code = ""
    return f'<div class="card"><h3>How it was started</h3>{code}<dl class="facts">{rows}</dl></div>'


def _format_time(seconds: Any) -> str:
    """Format seconds since the epoch as local date and time; "" for an invalid value."""
    if is_finite(seconds) and 0 <= seconds <= LAST_TIME:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    return ""


def render_options(config: Mapping[str, Any]) -> str:
    """Render all options with their dotted names, in one section for each top-level group."""
    ungrouped = {}
    for name, value in config.items():
        if not isinstance(value, Mapping):
            ungrouped[name] = value
    blocks = {"run": ungrouped} | {
        name: value for name, value in config.items() if isinstance(value, Mapping)
    }
    parts = []
    for group, values in blocks.items():
        rows = ""
        for name, value in flatten_options(values):
            style = "option unset" if is_unset(value) else "option"
            rows += f'<div class="{style}"><dt>{escape(name)}</dt><dd>{escape_text(format_value(value))}</dd></div>'
        parts.append(
            f'<section class="group"><h3>{escape(str(group))}</h3><dl>{rows}</dl></section>'
            if rows
            else ""
        )
    return "".join(parts)


def is_unset(value: Any) -> bool:
    """Return whether an option is unset: None, an empty string or an empty container."""
    return value is None or value == "" or (isinstance(value, list | Mapping) and not value)


def is_left_open(value: Any) -> bool:
    """Return whether weft chooses an option's value: the option is unset or `auto`."""
    return is_unset(value) or value == "auto"


def format_briefly(value: Any) -> str:
    """Format a value for display, shortening the path of a run's checkpoint."""
    return shorten_path(format_value(value))


def format_value(value: Any) -> str:
    """Format a value for display, with `none` for a value that is not set."""
    if is_unset(value) or value is ABSENT_VALUE:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {format_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(format_value(item) for item in value)
    return str(value)
