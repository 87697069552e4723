"""Generate docs/options.md from the config dataclasses.

Usage: `python -m weft.cli.reference > docs/options.md`. A test compares that file with
`format_page()`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from weft import registry
from weft.cli.aliases import collect_renamed, collect_translators
from weft.cli.help import format_value
from weft.data.spec import DatasetSpec
from weft.engine.service_spec import ServedSpec
from weft.engine.spec import GenerationSpec, ModelSpec
from weft.experiments.common import MFCOptions, RunConfig
from weft.options import OptionDescription, iterate_options

SHIPPED = ("sft", "rw", "dpo", "online_dpo", "ppo", "grpo", "distill", "gen")
HEAD = """# Options

`python -m weft.cli.reference` generates this page from the source. `weft quickstart NAME --help` shows the options of one
quickstart, and `--cfg job` shows the configuration that a command line results in. Options are dotted names in Hydra's
grammar: `key=value`, lists `[a,b]`, mappings `{a: 1}`, `null`. A text option, or a list of
texts, accepts text outside that grammar as it is written, such as `n[1,2]`. `${other.option}` means the value of another
option, and `~key` restores a default. An unknown name is an error that suggests the nearest ones.
"""
MODEL = """Below the name of a role: `model` for sft, rw and gen; `actor` and `ref` for dpo; `actor`, `critic`, `ref` and `rew`
for ppo; `actor`, `ref` and `rew` for grpo and online_dpo; `actor` and `teacher` for distill. {different}"""
SERVED_ROLE_TEXT = (
    "Below `rew` and `ref` of ppo, grpo and online_dpo, in addition to those above; see "
    "[serving](serving.md)."
)
CALL = """Below the name of a model function call: {calls}."""
SPELLINGS_TEXT = """weft also accepts these spellings of Hugging Face and of older programs, with a note that
names weft's option.
`MODEL` is the trained role (each of them if there are several), `GEN` the options of sampling."""


def format_page() -> str:
    """Return the content of docs/options.md."""
    configs = {name: registry.quickstarts.get(name)() for name in SHIPPED}
    run_options = []
    for leaf in iterate_options(configs["sft"]):
        if _is_run(leaf.name):
            run_options.append(leaf)
    parts = [HEAD, "## Run\n", *_format_table(run_options)]
    parts += [
        "\n## Model\n",
        MODEL.format(different=_describe_differing_defaults(configs)) + "\n",
        *_format_table(iterate_options(ModelSpec())),
    ]
    model_option_names = {leaf.name for leaf in iterate_options(ModelSpec())}
    parts += [
        "\n## Behind a URL\n",
        f"{SERVED_ROLE_TEXT}\n",
        *_format_table(
            leaf for leaf in iterate_options(ServedSpec()) if leaf.name not in model_option_names
        ),
    ]
    parts += ["\n## Data\n", "Below `dataset`.\n", *_format_table(iterate_options(DatasetSpec()))]
    parts += [
        "\n## Sampling\n",
        "Below `ppo.gen`, `grpo.gen`, `online_dpo.gen`, `distill.gen` and `gen`.\n",
        *_format_table(iterate_options(GenerationSpec())),
    ]
    calls = []
    for name, config in configs.items():
        listed = ", ".join(f"`{call}`" for call in _list_calls(config))
        calls.append(f"{name} {listed}")
    parts += [
        "\n## Calls\n",
        CALL.format(calls="; ".join(calls)) + "\n",
        *_format_table(iterate_options(MFCOptions())),
    ]
    for name, config in configs.items():
        own_options = []
        for leaf in iterate_options(config):
            if _is_own(leaf.name, config):
                own_options.append(leaf)
        paragraphs = inspect.cleandoc(type(config).__doc__ or "").split("\n\n")
        text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
        parts += [f"\n## {name}\n", text + "\n", *_format_table(own_options)]
    parts += ["\n## Other spellings\n", SPELLINGS_TEXT + "\n", *_format_spellings(configs)]
    return "\n".join(parts) + "\n"


def _is_run(name: str) -> bool:
    """Return whether an option belongs to all runs: whether `RunConfig` defines it."""
    return name.split(".")[0] in {spec.name for spec in fields(RunConfig)}


def _is_own(name: str, config: RunConfig) -> bool:
    """Return whether an option is specific to the algorithm of `config`.

    All other options are shared by several algorithms: options of runs, roles, data, sampling and
    model calls. The page lists them in separate tables.
    """
    value = getattr(config, name.split(".")[0])
    if _is_run(name) or isinstance(value, (ModelSpec, DatasetSpec)):
        return False
    if isinstance(value, MFCOptions):
        shared = {leaf.name for leaf in iterate_options(MFCOptions())}
    else:
        shared = set()
    if config.generation and name.startswith(f"{config.generation}."):
        for leaf in iterate_options(GenerationSpec()):
            shared.add(leaf.name)
        return name.removeprefix(f"{config.generation}.") not in shared
    return name.split(".", 1)[-1] not in shared


def _list_calls(config: Any) -> list[str]:
    result: list[str] = []
    for spec in fields(config):
        if isinstance(getattr(config, spec.name), MFCOptions):
            result.append(spec.name)
    return result


def _describe_differing_defaults(configs: dict[str, Any]) -> str:
    """Return a sentence about options of roles whose defaults differ from those of `ModelSpec`.

    It is empty if there are no such options.
    """
    default_by_name = {leaf.name: leaf.default for leaf in iterate_options(ModelSpec())}
    names_by_default: dict[str, list[str]] = {}
    for name, config in configs.items():
        for spec in fields(config):
            value = getattr(config, spec.name)
            for leaf in iterate_options(value) if isinstance(value, ModelSpec) else ():
                if leaf.name in default_by_name and leaf.default != default_by_name[leaf.name]:
                    names_by_default.setdefault(
                        f"`{spec.name}.{leaf.name}` is {format_value(leaf.default)}", []
                    ).append(name)
    description = "; ".join(
        f"{default_text} for {' and '.join(names)}"
        for default_text, names in names_by_default.items()
    )
    return f"Other defaults: {description}." if description else ""


def _format_table(options: Iterable[OptionDescription]) -> list[str]:
    lines = ["| option | type | default | meaning |", "|---|---|---|---|"]
    for leaf in options:
        cells = (
            f"`{leaf.name}`",
            leaf.type,
            f"`{format_value(leaf.default)}`" if leaf.default != "" else "",
            leaf.help,
        )
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return lines


def _format_spellings(configs: dict[str, Any]) -> Sequence[str]:
    lines = ["| spelling | option |", "|---|---|"]
    names = {"{first}": "MODEL", "{model}": "MODEL", "{gen}": "GEN"}
    for spelling, option in collect_renamed().items():
        for placeholder, name in names.items():
            option = option.replace(placeholder, name)
        lines.append(f"| `{spelling}` | `{option}` |")
    for name, rule in collect_translators().items():
        lines.append(f"| `{name}` | {' '.join((rule.__doc__ or '').split())} |")
    lines.append("| `optimizer.*` | the optimizer of the one trained role |")
    for name, config in configs.items():
        for spelling, option in config.spellings.items():
            lines.append(f"| `{spelling}` ({name}) | `{option}` |")
    return lines


if __name__ == "__main__":
    print(format_page(), end="")
