"""`--help` of a quickstart, made from the config dataclass: every option with its type, default and meaning. Loads no torch."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterable
from typing import Any

from weft.options import Leaf, leaves

USAGE = "weft quickstart {name} experiment_name=E trial_name=T key=value ..."
FLAGS = """\
  --help [GROUP]       this page, or the options of one group only (such as --help {group})
  --cfg job            print the resolved configuration as YAML and stop
  --dry-run            print the plan and the memory it needs, and stop; no weights are read and no GPU is needed;
                       --dry-run=config does not read the data either
  --config FILE        read options from a YAML file, such as a run's config.yaml; the command line goes over it
  --configs A B ...    named sections of settings, left to right (weft config ls lists them); the command line goes over them
  --config-dir DIR     a folder of YAML files with sections, searched after ./configs (may be given again)
  --print-script       with mode=slurm: print the script of the job and stop
  --deepspeed [FILE]   read a DeepSpeed JSON: each key is mapped to options or refused by name
  --import NAME        import a module or FILE.py that registers names (may be given again)
  --debug              show the traceback of an error"""
REQUIRED = ("experiment_name", "trial_name")
GRAMMAR = """\
Values: numbers (1e-5), true/false, null, lists [a,b], mappings {a: 1}, texts; quote texts that have spaces, commas or
brackets: 'key="a, b"'. ${other.option} stands for that option's value. ~key puts a default back."""


def quickstart_help(name: str, config: Any, group: str = "") -> str:
    """The page, or the part of it that belongs to `group` (a prefix of dotted names). Unknown groups give an empty list."""
    chosen = [leaf for leaf in leaves(config) if not group or leaf.name == group or leaf.name.startswith(f"{group}.")]
    lines = [USAGE.format(name=name), "", *textwrap.wrap(inspect.cleandoc(type(config).__doc__ or ""), 118), ""]
    groups = list(dict.fromkeys(leaf.name.split(".")[0] for leaf in chosen if "." in leaf.name))
    if not group:
        lines += [FLAGS.format(group=groups[0] if groups else "run"), "", GRAMMAR, ""]
    own = [leaf for leaf in chosen if "." not in leaf.name]
    lines += _section("run and algorithm", own) if own else []
    for first in groups:
        lines += _section(first, [leaf for leaf in chosen if leaf.name.startswith(f"{first}.")])
    return "\n".join(lines).rstrip() + "\n"


def _section(title: str, options: Iterable[Leaf]) -> list[str]:
    lines = [title]
    for leaf in options:
        default = "required" if leaf.name in REQUIRED else f"default {shown(leaf.default)}"
        lines.append(f"  {leaf.name}  [{leaf.type}, {default}]")
        lines += textwrap.wrap(leaf.help, 110, initial_indent="        ", subsequent_indent="        ")
    return [*lines, ""]


def shown(value: Any) -> str:
    """A default as the command line spells it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
