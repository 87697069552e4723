"""Show a run: status, warnings, command, versions, options, checkpoints and metrics.

Only options that differ from the defaults are shown.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from weft import registry
from weft.cli.help import format_value, get_terminal_width, split_command
from weft.cli.ls import UNKNOWN, count_bytes, format_age, format_size, format_steps
from weft.cli.named_run import find_run, name_place, open_root
from weft.cli.parsing import CommandParser, add_fileroot, print_help_if_empty
from weft.errors import ConfigError, UserError
from weft.observe.best import BestRecord
from weft.observe.configuration import CHOSEN_TEXT, compute_defaults, flatten_options
from weft.observe.jsonl import read_config
from weft.observe.metrics import (
    ABOUT_MACHINE,
    EVAL,
    compute_rank,
    format_duration,
    format_number,
    is_finite,
)
from weft.observe.run_files import CONFIG, HARDWARE, RunRecord
from weft.observe.run_list import METRICS, RunSummary, read_last_lines, summarize
from weft.redaction import mask_values, mask_words

METRICS_SHOWN = 12  # number of metrics shown; validation metrics are shown in any case
CHECKPOINTS_SHOWN = 5  # number of newest checkpoints shown per role
NAMES = ("experiment_name", "trial_name")
EPILOG = """examples:
  weft show runs/first/ppo
  weft show latest
  weft show first/ppo --config > ppo.yaml       weft quickstart ppo --config ppo.yaml reads it"""


def main(argv: Sequence[str]) -> int:
    """Run `weft show ...` and return the exit code. Raises `ConfigError` for an unknown run."""
    parser = CommandParser(
        prog="weft show", description=__doc__, epilog=EPILOG, url_arguments=("fileroot",)
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run, EXPERIMENT/TRIAL, or latest")
    add_fileroot(parser)
    parser.add_argument(
        "--config", action="store_true", help="print the whole configuration as YAML"
    )
    parser.add_argument("--json", action="store_true", help="print the page as JSON")
    if print_help_if_empty(parser, argv):
        return 2
    arguments = parser.parse_args(list(argv))
    run = find_run(arguments.run, open_root(arguments.fileroot))
    config = mask_values(_read_run_config(run))
    if arguments.config:
        print(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), end="")
        return 0
    from weft.launch.stop import is_alive

    summary = summarize(run, is_alive)
    record = RunRecord.read(run)
    if arguments.json:
        best = BestRecord.read(run)
        content = {
            "path": name_place(run),
            "status": summary.status,
            "step": summary.step,
            "best": None if best is None else vars(best),
            **mask_values(record.to_plain()),
            "changed_options": _find_changed_options(config, summary.algorithm)[0],
        }
        print(json.dumps(content, indent=1))
        return 0
    print("\n".join(format_page(run, summary, record, config)))
    return 0


def format_page(
    run: Path, summary: RunSummary, record: RunRecord, config: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the lines that `weft show` prints about a run."""
    if summary.step is None:
        state = summary.status
    else:
        state = f"{summary.status}, {format_steps(summary)} steps"
    size = format_size(count_bytes(run))
    age = format_age(summary.changed)
    yield f"{name_place(run)}: {summary.algorithm or 'a run'}, {state}, {size}, written {age} ago"
    if summary.diagnosis is not None:
        yield f"check: {summary.diagnosis}"
    yield ""
    yield from _format_start_commands(run, record)
    changed_options, heading = _find_changed_options(config, summary.algorithm)
    yield heading
    chosen_by_weft = [name for name in changed_options if name in record.chosen]
    option_notes = {}
    for name, (_, default) in changed_options.items():
        if name not in chosen_by_weft:
            option_notes[name] = f"default {_format_value(default)}"
    option_notes |= dict.fromkeys(chosen_by_weft, CHOSEN_TEXT)
    yield from _align_columns(
        [
            (f"{name}={_format_value(changed_options[name][0])}", note)
            for name, note in option_notes.items()
        ]
    )
    yield ""
    yield from _format_checkpoints(run)
    yield from _format_last_metrics(run)
    files = []
    for name in ("report.html", "log.txt", "timeline.json"):
        if (run / name).is_file():
            files.append(name)
    if files:
        yield f"look at: {', '.join(str(run / name) for name in files)}"


def _format_start_commands(run: Path, record: RunRecord) -> Iterator[str]:
    """Yield lines about the last start of the run, with its command, and about earlier starts."""
    if not record.starts:
        return
    last_start = record.starts[-1]
    yield "command"
    yield from split_command(mask_words(last_start.command), get_terminal_width())
    versions = ", ".join(f"{name} {number}" for name, number in last_start.versions.items())
    place = f"on {last_start.host or UNKNOWN}, in {last_start.folder or UNKNOWN}"
    rows = [("started", f"{_format_time(last_start.time)} {place}")]
    if len(record.starts) > 1:
        earlier = ", ".join(
            f"{_format_time(start.time)} after step {start.step}" for start in record.starts[:-1]
        )
        rows.append(("earlier", f"{earlier}; the last one continued after step {last_start.step}"))
    hardware = last_start.hardware or _read(run / HARDWARE).strip()
    rows += [("versions", versions)] if versions else []
    if last_start.commit:
        changes = " with changes" if last_start.commit.endswith("+") else ""
        rows.append(("commit", f"{last_start.commit.rstrip('+')}{changes}"))
    rows += [("hardware", hardware)] if hardware else []
    yield ""
    yield from _align_columns(rows, "")
    yield ""


def _find_changed_options(
    config: Mapping[str, Any], algorithm: str | None
) -> tuple[dict[str, tuple[Any, Any]], str]:
    """Return the options that differ from their defaults, and a heading for their list.

    The options map names to (value, default). If the defaults are unknown, all options are
    returned, with the default None.
    """
    values = dict(flatten_options(config))
    defaults = _read_defaults(config, algorithm)
    if defaults is None:
        return {
            name: (value, None) for name, value in values.items()
        }, f"configuration ({algorithm or 'its kind'} has no known defaults)"
    changes = {}
    for name, value in values.items():
        if name not in NAMES and value != defaults.get(name):
            changes[name] = (value, defaults.get(name))
    return changes, f"options that differ from the defaults of {algorithm} (--config shows all)"


def _read_defaults(config: Mapping[str, Any], algorithm: str | None) -> dict[str, Any] | None:
    """Return the default options of the quickstart `algorithm`, or None if they are unknown.

    If the quickstart is not built in, the user code that registers it is imported first.
    """
    if algorithm is None:
        return None
    try:
        if algorithm not in registry.quickstarts:
            registry.import_user_folder()
            registry.import_user_code([str(name) for name in config.get("imports") or []])
        base = registry.quickstarts.get(algorithm)()
    except UserError as error:
        print(f"note: {error}", file=sys.stderr)
        return None
    return compute_defaults(base)


def _format_checkpoints(run: Path) -> Iterator[str]:
    """Yield lines with the newest checkpoints of each role, and the best one."""
    from weft.runtime.directory import RunDirectory

    directory = RunDirectory(run)
    roles = sorted(
        folder.name for folder in directory.checkpoints_folder.glob("*") if folder.is_dir()
    )
    rows = []
    for role in roles:
        steps = directory.list_saved_steps(role)
        if steps:
            if len(steps) > CHECKPOINTS_SHOWN:
                older = f"{len(steps) - CHECKPOINTS_SHOWN} older, "
            else:
                older = ""
            newest = directory.checkpoints_folder / role / f"step{steps[-1]}"
            listed = ", ".join(f"step{step}" for step in steps[-CHECKPOINTS_SHOWN:])
            size = format_size(count_bytes(newest))
            rows.append((role, f"{older}{listed} ({size} each)  {name_place(newest)}"))
    best = BestRecord.read(run)
    if rows and best is not None:
        rows.append(("best", f"{best.format_text()}  {name_place(run)}@best"))
    if rows:
        yield "checkpoints"
        yield from _align_columns(rows)
        yield ""


def _format_last_metrics(run: Path) -> Iterator[str]:
    """Yield lines with the main metrics of the last step."""
    lines = read_last_lines(run / METRICS)
    if not lines:
        return
    last_line = lines[-1]
    names = []
    for name in last_line:
        if "/" in name and not name.startswith(ABOUT_MACHINE) and is_finite(last_line[name]):
            names.append(name)
    names.sort(key=compute_rank)
    validation_names = [name for name in names if name.startswith(EVAL)]
    rows = []
    for name in dict.fromkeys([*names[:METRICS_SHOWN], *validation_names]):
        rows.append((name, format_number(last_line[name])))
    if is_finite(last_line.get("step_seconds")):
        rows.append(("step_seconds", format_duration(last_line["step_seconds"])))
    if is_finite(last_line.get("peak_memory_gb")):
        rows.append(("peak_memory_gb", format_number(last_line["peak_memory_gb"])))
    yield f"metrics of step {last_line['step']}"
    yield from _align_columns(rows)
    yield ""


def _align_columns(rows: Sequence[tuple[str, str]], indent: str = "  ") -> Iterator[str]:
    width = min(52, max((len(name) for name, _ in rows), default=0))
    for name, text in rows:
        yield f"{indent}{name:{width}}  {text}".rstrip()


def _format_value(value: Any) -> str:
    """Format a value as it is written on the command line, truncated to 60 characters."""
    if not isinstance(value, list | dict):
        text = format_value(value)
    else:
        text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _format_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _read(path: Path) -> str:
    if path.is_file():
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def _read_run_config(run: Path) -> dict[str, Any]:
    try:
        return read_config(run / CONFIG)
    except ConfigError as error:
        print(f"note: {error}", file=sys.stderr)
        return {}
