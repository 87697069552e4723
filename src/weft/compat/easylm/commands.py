"""`weft easylm COMMAND --flag=value`: EasyLM's scripts, as `weft quickstart` and as converters.

A training command prints the notes of its translation and the equivalent `weft quickstart`, then
runs it. Streams are converted to Hugging Face directories first, once for each state of the file.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path

from weft.compat.easylm import flags as tables
from weft.compat.easylm.arguments import (
    GivenFlags,
    TranslatedCommand,
    parse_flags,
)
from weft.compat.easylm.flags import FlagRule, TrainingCommand
from weft.compat.easylm.translation import list_host_variables, translate
from weft.errors import build_unknown_name_error
from weft.redaction import mask_words

HELP = ("--help", "-h", "help", "--helpfull", "--helpshort")
PLAN_FLAGS = ("--dry-run", "--cfg", "--print-script")  # of commands that start no run
CONVERTED = "converted"  # folder of converted streams, in the folder of all runs
CONFIG = "config.json"  # the last file of a converted model
CACHE = "~/.cache/weft"  # where it is if runs are in a bucket
CONVERTER_SUMMARIES = {
    "convert_easylm_to_hf": "a stream as a Hugging Face directory",
    "convert_hf_to_easylm": "a Hugging Face directory as a stream",
    "convert_torch_to_easylm": "Meta's .pth files as a stream",
    "convert_checkpoint": "a stream with another dtype, or as one msgpack",
    "diff_checkpoint": "the difference of two streams, or the stream that it restores",
}


def main(argv: Sequence[str], *, supervise: bool = False) -> int:
    """Run one of EasyLM's commands and return the exit code.

    With `supervise`, a run that needs Ray is started in a child process. Raises `UserError` for
    unusable input.
    """
    if not argv or argv[0] in HELP:
        print(format_overview())
        return 0 if argv else 2
    name, *words = argv
    if name in tables.CONVERTERS:
        module = import_module("weft.compat.easylm.conversions")
        converters: Mapping[str, Callable[[list[str]], int]] = module.COMMANDS
        return converters[name](words)
    if name not in tables.TRAINING:
        raise build_unknown_name_error("command", name, (*tables.TRAINING, *tables.CONVERTERS))
    if not words or set(words) & set(HELP):
        print(format_help(name))
        return 0 if words else 2
    return train(parse_flags(name, words), supervise=supervise)


def train(given: GivenFlags, *, supervise: bool = False) -> int:
    """Print and run the `weft quickstart` that a training command comes to."""
    from weft.cli import quickstart
    from weft.compat.easylm.meshes import choose_backend, count_devices

    backend = choose_backend(given.get("backend"))
    hosts = list_host_variables(given)
    devices = count_devices(backend, {**os.environ, **hosts})
    translated = translate(given, backend=backend, num_devices=devices)
    folder = choose_folder(translated)
    missing = {}
    for role, conversion in translated.streams.items():
        model = conversion.locate(folder)
        translated.options[f"{role}.path"] = str(model)
        if not (model / CONFIG).is_file():
            missing[role] = conversion
    words = translated.format_words()
    quickstart.print_notes(translated.notes)
    if quickstart.is_reporting():
        variables = [f"{name}={value}" for name, value in translated.environment.items()]
        print(f"$ {shlex.join([*variables, 'weft', *mask_words(words)])}", flush=True)
    if missing and any(word.partition("=")[0] in PLAN_FLAGS for word in given.passed):
        for conversion in missing.values():
            print(f"{conversion}: is converted when the run starts, and a plan needs the result")
        return 0
    for conversion in missing.values():
        print(f"converting {conversion} into {folder}", file=sys.stderr, flush=True)
        conversion.write(folder)
    os.environ.update(translated.environment)
    return quickstart.main(words[1:], supervise=supervise)


def choose_folder(translated: TranslatedCommand) -> Path:
    """Return the folder of converted models: in that of all runs, unless runs are in a bucket."""
    root = str(translated.options.get("fileroot", "./runs"))
    return Path(CACHE if "://" in root else root).expanduser() / CONVERTED


# -- help


def format_overview() -> str:
    """Return the list of commands."""
    lines = ["weft easylm COMMAND --flag=value ...    (weft easylm COMMAND --help lists the flags)"]
    summaries = {name: command.summary for name, command in tables.TRAINING.items()}
    for title, commands in (("train", summaries), ("convert", CONVERTER_SUMMARIES)):
        lines += ["", title, *(f"  {name:24} {what}" for name, what in commands.items())]
    return "\n".join(lines)


def format_help(name: str) -> str:
    """Return the flags of a training command, with EasyLM's defaults and weft's options."""
    command = tables.TRAINING[name]
    lines = [
        f"weft easylm {name} --flag=value ... [option=value ...]",
        "",
        f"Runs {command.summary}: the same as `weft quickstart {command.quickstart}`, which it "
        f"prints first. Flags that are not set have EasyLM's default. Words option=value, "
        f"--dry-run, --cfg job and --import are passed on.",
        "",
    ]
    for flag, rule in command.flags.items():
        lines.append(f"  --{flag}={format_default(command.get_default(flag))}")
        lines.append(f"      {describe_rule(command, rule)}")
    return "\n".join(lines)


def format_default(value: object) -> str:
    """Return a default as it is typed; line breaks as two characters."""
    return str(value).replace("\n", "\\n")


def describe_rule(command: TrainingCommand, rule: FlagRule) -> str:
    """Return what a flag is in weft, as one line."""
    if rule.treatment == "refuse":
        return f"refused: {rule.note}"
    if rule.treatment == "ignore":
        return f"without effect: {rule.note}"
    names = [name for option in rule.options for name in command.expand(option)]
    return "; ".join(filter(None, (", ".join(names), rule.note)))
