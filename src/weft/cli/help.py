"""`--help` of a quickstart, generated from its config dataclass.

The page shows the common options, all options, or one group. No torch is loaded.
"""

from __future__ import annotations

import inspect
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from weft.cli import dialects
from weft.cli.aliases import map_spellings
from weft.engine.spec import ModelSpec
from weft.errors import ConfigError, find_nearest
from weft.experiments.common import RunConfig
from weft.options import OptionDescription, iterate_options

NAMES = ("experiment_name", "trial_name")
DATA_OPTIONS = ("dataset.path", "dataset.valid_path", "dataset.type", "dataset.columns")
LEARNING_OPTIONS = (
    "optimizer.lr",
    "optimizer.lr_scheduler_type",
    "optimizer.warmup_steps_proportion",
)
LENGTH = ("total_train_epochs", "max_steps")
RUN = ("device", "seed", "save_freq_steps", "logger.wandb.mode")


def _list_model_options(role: str) -> tuple[str, ...]:
    return tuple(
        f"{role}.{name}"
        for name in ("dtype", "lora.r", "gradient_checkpointing", "tokenizer.chat_template")
    )


def _list_learning_options(role: str) -> tuple[str, ...]:
    return tuple(f"{role}.{name}" for name in LEARNING_OPTIONS)


def _list_sampling_options(algorithm: str, *others: str) -> tuple[str, ...]:
    """Return the full names of the sampling options that `--help` shows for an algorithm.

    `others` are the names of additional options without the algorithm's prefix, such as "kl_ctl"
    for `ppo.kl_ctl`.
    """
    return tuple(
        f"{algorithm}.{name}" for name in ("gen.max_new_tokens", "gen.temperature", *others)
    )


TRAINING_DATA_OPTIONS = (*DATA_OPTIONS, "dataset.max_seqlen", "dataset.train_bs_n_seqs")
SAMPLING_DATA_OPTIONS = (
    "dataset.path",
    "dataset.columns",
    "dataset.max_prompt_len",
    "dataset.train_bs_n_seqs",
)
POLICY = ("actor.dtype", "actor.lora.r", "actor.layout")

# quickstart -> title of a group -> common options, which `--help` shows
COMMON: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "sft": {
        "what": (*NAMES, "model.path"),
        "data": TRAINING_DATA_OPTIONS,
        "model": _list_model_options("model"),
        "optimization": (*_list_learning_options("model"), *LENGTH),
        "run": (*RUN, "eval_freq_steps"),
    },
    "rw": {
        "what": (*NAMES, "model.path"),
        "data": TRAINING_DATA_OPTIONS,
        "model": _list_model_options("model"),
        "optimization": (*_list_learning_options("model"), *LENGTH),
        "reward model": ("rw.center", "rw.loss_type"),
        "run": RUN,
    },
    "dpo": {
        "what": (*NAMES, "actor.path", "ref.path"),
        "data": TRAINING_DATA_OPTIONS,
        "model": _list_model_options("actor"),
        "optimization": (*_list_learning_options("actor"), *LENGTH),
        "DPO": ("dpo.beta", "dpo.loss_type"),
        "run": RUN,
    },
    "ppo": {
        "what": (*NAMES, "actor.path", "rew.path", "reward"),
        "data": SAMPLING_DATA_OPTIONS,
        "model": POLICY,
        "optimization": (
            "actor.optimizer.lr",
            "critic.optimizer.lr",
            "ppo.ppo_n_minibatches",
            "ppo.ppo_epochs",
            *LENGTH,
        ),
        "generation and PPO": _list_sampling_options("ppo", "samples_per_prompt", "kl_ctl"),
        "run": RUN,
    },
    "grpo": {
        "what": (*NAMES, "actor.path", "reward", "rew.path"),
        "data": SAMPLING_DATA_OPTIONS,
        "model": POLICY,
        "optimization": ("actor.optimizer.lr", "grpo.ppo_n_minibatches", *LENGTH),
        "generation and GRPO": _list_sampling_options("grpo", "group_size", "kl_coef", "loss_type"),
        "run": RUN,
    },
    "online_dpo": {
        "what": (*NAMES, "actor.path", "rew.path", "reward"),
        "data": SAMPLING_DATA_OPTIONS,
        "model": POLICY,
        "optimization": ("actor.optimizer.lr", "online_dpo.ppo_n_minibatches", *LENGTH),
        "generation and DPO": _list_sampling_options(
            "online_dpo", "samples_per_prompt", "beta", "loss_type"
        ),
        "run": RUN,
    },
    "distill": {
        "what": (*NAMES, "actor.path", "teacher.path"),
        "data": SAMPLING_DATA_OPTIONS,
        "model": POLICY,
        "optimization": ("actor.optimizer.lr", *LENGTH),
        "generation and distillation": _list_sampling_options(
            "distill", "loss_type", "on_policy", "divergence_beta"
        ),
        "run": RUN,
    },
    "gen": {
        "what": (*NAMES, "model.path"),
        "data": (*SAMPLING_DATA_OPTIONS, "dataset.train_bs_n_seqs"),
        "model": ("model.dtype", "model.tokenizer.chat_template"),
        "generation": _list_sampling_options(
            "gen", "samples_per_prompt", "top_p", "top_k", "greedy", "stop"
        ),
        "run": ("device", "seed"),
    },
}

DATA = "dataset.path=data/{}.jsonl dataset.train_bs_n_seqs={}"
EXAMPLES: Mapping[str, str] = {
    "sft": (
        f"model.path=data/model {DATA.format('sft', 64)} model.optimizer.lr=4e-3 "
        f"total_train_epochs=10"
    ),
    "rw": (
        f"model.path=runs/first/sft dataset.type=preference {DATA.format('pairs', 64)} "
        f"model.optimizer.lr=2e-3"
    ),
    "dpo": (
        f"actor.path=runs/first/sft dataset.type=preference {DATA.format('pairs', 64)} "
        f"actor.optimizer.lr=1e-4"
    ),
    "ppo": (
        f"actor.path=runs/first/sft rew.path=runs/first/rw {DATA.format('prompts', 50)} "
        f"ppo.gen.max_new_tokens=4"
    ),
    "grpo": (
        f"actor.path=runs/first/sft reward=gsm8k {DATA.format('prompts', 50)} "
        f"grpo.gen.max_new_tokens=4"
    ),
    "online_dpo": (
        f"actor.path=runs/first/sft reward=gsm8k {DATA.format('prompts', 50)} "
        f"online_dpo.gen.max_new_tokens=4"
    ),
    "distill": (
        f"actor.path=data/model teacher.path=runs/first/sft {DATA.format('prompts', 50)} "
        f"distill.gen.max_new_tokens=4"
    ),
    "gen": f"model.path=runs/first/sft {DATA.format('prompts', 50)} gen.max_new_tokens=4",
}


def find_common_options(config: RunConfig) -> dict[str, tuple[str, ...]]:
    """Return the most common options of `config`, grouped as in `--help`.

    The result maps the title of each group to option names. If the class of `config` is defined by
    a user, the first group lists the options that this class adds.
    """
    names_of_config = {leaf.name for leaf in iterate_options(config)}
    options_by_group = {}
    for group, names in COMMON.get(config.algorithm, {}).items():
        options_by_group[group] = tuple(
            dict.fromkeys(name for name in names if name in names_of_config)
        )
    # Find the options that no class of weft defines: they are the user's.
    weft_classes = []
    for cls in type(config).__mro__:
        if cls.__module__.startswith("weft.") and is_dataclass(cls):
            weft_classes.append(cls)
    weft_options = set()
    for cls in weft_classes:
        for spec in fields(cls):
            weft_options.add(spec.name)
    user_options = tuple(name for name in names_of_config if name.split(".")[0] not in weft_options)
    return (
        {"of this configuration": tuple(sorted(user_options))} if user_options else {}
    ) | options_by_group


USAGE = "weft quickstart {name} experiment_name=E trial_name=T key=value ..."
ALL_GROUPS = "all"
FLAGS = {
    "--help [GROUP]": "the common options, all options (--help all), or those of one group (--help {group})",
    "--cfg job": "print the resolved configuration as YAML and stop",
    "--dry-run[=config]": "print the plan and the memory it needs, and stop; no weights are read and no GPU is needed; "
    "--dry-run=config does not read the data either",
    "--verbose, -v": "show the whole plan before the run, not only its table",
    "--config FILE": "read options from a YAML file, such as a run's config.yaml; the command line overrides it",
    "--configs A B ...": "named sections of settings, left to right (weft config ls lists them); the command line overrides "
    "them",
    "--config-dir DIR": "a folder of YAML files with sections, searched after ./configs (can be repeated)",
    "--print-script": "with mode=slurm: print the script of the job and stop",
    "--deepspeed [FILE]": "read a DeepSpeed JSON file: each key is mapped to options, or named in an error",
    "--import NAME": "import a module or FILE.py that registers names (can be repeated)",
    "--debug": "show the traceback of an error",
}
GRAMMAR = (
    "Values are numbers (1e-5), true or false, null, lists [a,b], mappings {a: 1} and texts; quote "
    "texts with spaces, commas or brackets: 'key=\"a, b\"'. ${other.option} means that option's "
    "value, ~key restores the default."
)
OPTIMIZER = "optimizer"
MAX_WIDTH = 160  # maximum columns; longer lines are hard to read
WIDE_TERMINAL = 110  # minimum columns of the terminal for the wide name column
NARROW_NAME_WIDTH = 24
WIDE_NAME_WIDTH = 40  # fits the names of all common options
MAX_BRIEF_LENGTH = 100  # maximum characters of a short description
MAX_SUGGESTIONS = 8


@dataclass(frozen=True)
class OptionSheet:
    """Formatter for the options of a configuration on a help page.

    `width` is the number of columns of the page.
    """

    name: str
    config: Any
    width: int

    def list_options(self) -> list[OptionDescription]:
        """Return the options of the configuration.

        The optimizer options of roles that are not trained are left out: they have no effect.
        """
        result: list[OptionDescription] = []
        for leaf in iterate_options(self.config):
            if not self._is_without_effect(leaf.name):
                result.append(leaf)
        return result

    def _is_without_effect(self, name: str) -> bool:
        role, _, role_option = name.partition(".")
        if not isinstance(self.config, RunConfig) or not role_option.startswith(f"{OPTIMIZER}."):
            return False
        return (
            isinstance(getattr(self.config, role), ModelSpec)
            and role not in self.config.trained_roles
        )

    def format_title(self) -> list[str]:
        description = textwrap.wrap(" ".join(describe_config(type(self.config))), self.width)
        return [USAGE.format(name=self.name), "", *description, *([""] if description else [])]

    def format_section(
        self, title: str, options: Sequence[OptionDescription], *, brief: bool = False
    ) -> Iterator[str]:
        """Yield the lines of a section of the page: its title, and an entry for each option.

        If `brief` is True, descriptions are shortened and types are left out.
        """
        name_width = WIDE_NAME_WIDTH if self.width >= WIDE_TERMINAL else NARROW_NAME_WIDTH
        if isinstance(self.config, RunConfig):
            spellings = map_spellings(self.config)
        else:
            spellings = {}
        yield title
        for leaf in options:
            yield from self._format_entry(
                leaf.name,
                _describe_option(
                    leaf, spellings.get(leaf.name, ()), self.list_required_options(), brief=brief
                ),
                name_width,
            )
        yield ""

    def _format_entry(self, name: str, text: str, name_width: int) -> Iterator[str]:
        indent = " " * (name_width + 4)
        lines = textwrap.wrap(
            text,
            self.width,
            initial_indent=indent,
            subsequent_indent=indent,
            break_on_hyphens=False,
        )
        if len(name) > name_width or not lines:
            yield f"  {name}"
        else:
            lines[0] = f"  {name:{name_width}}  {lines[0].strip()}"
        yield from lines

    def format_flags(self, group: str) -> Iterator[str]:
        for flag, description in FLAGS.items():
            if dialects.is_flag_available(flag.split(" ")[0]):
                yield from self._format_entry(flag, description.format(group=group), 18)
        yield ""
        yield from textwrap.wrap(GRAMMAR, self.width, break_on_hyphens=False)
        yield ""

    def list_required_options(self) -> tuple[str, ...]:
        """Return the options that must be set for a run to start."""
        if not isinstance(self.config, RunConfig):
            return NAMES
        return (*NAMES, f"{self.config.main_role}.path", "dataset.path")


def describe_config(config: type) -> list[str]:
    """Return the paragraphs of a configuration class's docstring, each on one line.

    The list is empty if the class has only the docstring that `dataclass` generates.
    """
    text = inspect.cleandoc(config.__doc__ or "")
    if text.startswith(f"{config.__name__}("):
        return []
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]


def get_terminal_width() -> int:
    """Return the number of columns of the terminal, limited to a readable width."""
    return max(60, min(MAX_WIDTH, shutil.get_terminal_size().columns))


def format_quickstart_help(name: str, config: Any, group: str = "", width: int = 80) -> str:
    """Return the help page of a quickstart with its common options, all options, or one group.

    `group` is "" for the common options, "all", or the prefix of a group of dotted names, such as
    `actor.optimizer`. Raises `ConfigError` for an unknown group; the message suggests similar
    options or groups.
    """
    sheet = OptionSheet(name, config, width)
    if (
        not group
        and isinstance(config, RunConfig)
        and (options_by_group := find_common_options(config))
    ):
        lines = list(_format_common_options(sheet, options_by_group))
    elif group in ("", ALL_GROUPS):
        lines = list(_format_all_options(sheet))
    else:
        lines = list(_format_group(sheet, group))
    return "\n".join(lines).rstrip() + "\n"


def _format_common_options(
    sheet: OptionSheet, options_by_group: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    by_name = {leaf.name: leaf for leaf in sheet.list_options()}
    yield from sheet.format_title()
    for title, names in options_by_group.items():
        yield from sheet.format_section(title, [by_name[name] for name in names], brief=True)
    example = EXAMPLES.get(sheet.config.algorithm)
    if example is not None:
        yield "example, on the data of `weft examples write data`"
        trial = sheet.config.algorithm.replace("_", "-")
        command = f"weft quickstart {sheet.name} experiment_name=first trial_name={trial} {example}"
        yield from split_command(command.split(), sheet.width)
        yield ""
    yield "more"
    all_help = f"weft quickstart {sheet.name} --help all"
    example_group = sheet.config.generation or sheet.config.algorithm or "dataset"
    hints = {
        all_help: f"every option ({len(by_name)})",
        f"weft quickstart {sheet.name} --help {example_group}": f"one group: {', '.join(list_groups(by_name))}",
        "--dry-run, --cfg job": "at the end of a command: print the plan, or the configuration, and stop",
    }
    name_width = max(map(len, hints))
    for name, hint in hints.items():
        yield from sheet._format_entry(name, hint, name_width)


def split_command(words: Sequence[str], width: int) -> Iterator[str]:
    """Split a command into lines that can be pasted into a shell, without breaking words."""
    line = " "
    for word in map(shlex.quote, words):
        if len(line) + len(word) + 3 > width and line.strip():
            yield f"{line} \\"
            line = " " * 5
        line += f" {word}"
    yield line


def _format_all_options(sheet: OptionSheet) -> Iterator[str]:
    options = sheet.list_options()
    names = list_groups([leaf.name for leaf in options])
    yield from sheet.format_title()
    yield from sheet.format_flags("dataset" if "dataset" in names else (names or ["GROUP"])[0])
    ungrouped = [leaf for leaf in options if "." not in leaf.name]
    if ungrouped:
        yield from sheet.format_section("run and algorithm", ungrouped)
    for group in names:
        yield from sheet.format_section(
            group, [leaf for leaf in options if leaf.name.startswith(f"{group}.")]
        )


def _format_group(sheet: OptionSheet, group: str) -> Iterator[str]:
    options = sheet.list_options()
    group_options = []
    for leaf in options:
        if leaf.name == group or leaf.name.startswith(f"{group}."):
            group_options.append(leaf)
    if not group_options:
        raise _build_group_error(sheet, group, options)
    yield from sheet.format_title()
    yield from sheet.format_section(group, group_options)


def _build_group_error(
    sheet: OptionSheet, group: str, options: Sequence[OptionDescription]
) -> ConfigError:
    """Return the error for an unknown group, with suggested options or groups."""
    names = [leaf.name for leaf in iterate_options(sheet.config)]
    if any(name.startswith(f"{group}.") for name in names):
        role = group.split(".")[0]
        return ConfigError(
            f"--help {group}: {role} is not trained in {sheet.name}, and has no optimizer"
        )
    if isinstance(sheet.config, RunConfig):
        spellings = map_spellings(sheet.config)
    else:
        spellings = {}
    respelled = [leaf for leaf in options if group in spellings.get(leaf.name, ())]
    whole_words = []
    for leaf in options:
        if group in leaf.name.replace("_", ".").split("."):
            whole_words.append(leaf)
    substrings = [leaf for leaf in options if group in leaf.name]
    matching = list({leaf.name: leaf for leaf in (*respelled, *whole_words, *substrings)}.values())
    if matching:
        lines = [f"--help {group}: no such group; options with this in their name:"]
        for leaf in matching[:MAX_SUGGESTIONS]:
            lines.append(f"  {leaf.name}: {shorten_to_clause(leaf.help)}")
        if len(matching) > MAX_SUGGESTIONS:
            lines.append(f"  and {len(matching) - MAX_SUGGESTIONS} more")
        return ConfigError("\n".join(lines))
    similar = find_nearest(group, [*sorted(list_nested_groups(names)), *names])
    if similar:
        hint = f"did you mean {' or '.join(similar)}?"
    else:
        hint = f"groups: {', '.join(list_groups(names))}"
    return ConfigError(f"--help {group}: no such group; {hint}")


def list_groups(names: Iterable[str]) -> list[str]:
    """Return the distinct first parts of dotted names, in the order in which they first occur."""
    return list(dict.fromkeys(name.split(".")[0] for name in names if "." in name))


def list_nested_groups(names: Iterable[str]) -> list[str]:
    """Return all groups in dotted names, such as `actor` and `actor.optimizer`, without repeats.

    They are in the order in which they first occur.
    """
    groups: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        for depth in range(1, len(parts)):
            groups[".".join(parts[:depth])] = None
    return list(groups)


def _describe_option(
    leaf: OptionDescription, spellings: Sequence[str], required: Sequence[str], *, brief: bool
) -> str:
    """Return an option's description, with its type, default and other spellings in brackets.

    `spellings` are the other spellings, and `required` are the names of all required options. If
    `brief` is True, the description is shortened and the type is left out.
    """
    facts = [] if brief else [leaf.type]
    if leaf.name in required and leaf.default in (None, ""):
        facts.append("required")
    elif not brief or leaf.default not in (None, "", [], {}):
        facts.append(f"default {format_value(leaf.default)}")
    if spellings:
        facts.append(f"also: {', '.join(spellings)}")
    text = shorten_to_clause(leaf.help) if brief else leaf.help
    return f"{text} [{'; '.join(facts)}]" if facts else text


def shorten_to_clause(text: str) -> str:
    """Shorten a help text of more than `MAX_BRIEF_LENGTH` characters to its first clause.

    A clause that is too long is cut at the last comma within the limit, if there is one.
    """
    if len(text) <= MAX_BRIEF_LENGTH:
        return text
    text = text.split("; ", 1)[0]
    if len(text) <= MAX_BRIEF_LENGTH:
        return text
    if ", " in text[:MAX_BRIEF_LENGTH]:
        return f"{text[: text.rfind(', ', 0, MAX_BRIEF_LENGTH)]}, ..."
    return text


def format_value(value: Any) -> str:
    """Format a default value as it is written on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def print_page(page: str) -> None:
    """Print a page, with bold headings on a terminal."""
    if not sys.stdout.isatty():
        print(page, end="")
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    for number, line in enumerate(page.splitlines()):
        heading = bool(line) and (
            number == 0
            or (not line.startswith(" ") and line == line.rstrip(".") and len(line) < 60)
        )
        console.print(line, style="bold" if heading else None, soft_wrap=True)
