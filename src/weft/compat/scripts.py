"""Run command lines of Open-Assistant's and ReaL's scripts as weft commands."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from weft.checkpoints.names import find_newest_run
from weft.compat.open_assistant.key_mapping import VALID_SPLIT
from weft.compat.triton_command import find_triton_model
from weft.errors import ConfigError, find_nearest
from weft.redaction import mask_words

# weft's own flags, which are passed on: without a value, and with one
OWN_FLAGS = ("--dry-run", "--debug", "--help", "-h", "--print-script")
OWN_VALUES = ("--cfg", "--import", "--config-dir", "--config")
UNQUOTED_VALUE = re.compile(r"[\w./+:@%-]*|[\[{].*[\]}]")
HISTORY = ("--no-history", "--no_history")
# value of --format -> chat template; None: the model's own template
FORMATS = {"v2": "oasst", "v2.5": "oasst_v25", "template": None}
FORMATS_HELP = "Open-Assistant's formats v2 and v2.5, or the model's own template (the default)"
# chat flags without effect -> reason
UNUSED = {
    "--cache_dir": "models are read from the hub's cache; set HF_HOME to move it",
    "--bot_name": "answers are printed without a name before them",
    "--per-digit-tokens": "the tokenizer is that of the checkpoint",
    "--per_digit_tokens": "the tokenizer is that of the checkpoint",
}


@dataclass
class ScriptArguments:
    """Parsed arguments of one of Open-Assistant's scripts.

    `named` maps the script's own flags to their values. `rest` has the other arguments, which are
    passed to weft unchanged.
    """

    named: dict[str, list[str]] = field(default_factory=dict)
    rest: list[str] = field(default_factory=list)

    def get_single(self, name: str, default: str | None = None) -> str | None:
        """Return the last value of a flag, or `default` if the flag is not set."""
        return self.named[name][-1] if self.named.get(name) else default

    def list_sections(self) -> list[str]:
        """Return the names of config sections in `--configs A B` or `--configs A,B`."""
        names = []
        for word in self.named.get("--configs", []):
            names += [name for name in word.split(",") if name]
        return names


def run(script: str, argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Print and run the weft command that replaces an Open-Assistant script.

    `script` is the name of the script, and `argv` are its arguments. Returns the exit code.
    """
    from weft.cli import main

    words: list[str] = []

    def print_command(script_words: Sequence[str]) -> int:
        words.extend(build_command(script, script_words, environment))
        print(f"$ weft {shlex.join(mask_words(words))}", flush=True)
        return 0

    return main.run_guarded(print_command, argv) or main.main(words)


def build_command(
    script: str, argv: Sequence[str], environment: Mapping[str, str] = os.environ
) -> list[str]:
    """Return the words of the weft command that replaces `script` with the arguments `argv`.

    Raises `ConfigError` for arguments that the script does not have.
    """
    return COMMANDS[script](list(argv), environment)


def partition_checkpoint(argv: Sequence[str]) -> int:
    """Run ReaL's transform_to_pipe_ckpt as `weft convert partition`, with the same arguments."""
    from weft.cli import main

    return main.main(["convert", "partition", *argv])


# -- trainers


def _translate_trainer(
    quickstart: str, begins_with: str, words: list[str], environment: Mapping[str, str]
) -> list[str]:
    """Translate a trainer's `--configs A B --key value --no-key ...` to `weft quickstart`.

    `begins_with` is the section that the trainer always applies first, or "" if there is none.
    """
    lists = ("--configs",)
    values = ("--local_rank", "--wandb-entity", "--rng_seed")
    flags: tuple[str, ...] = ("--show_dataset_stats",)
    if quickstart != "ppo":
        flags += ("--deepspeed", "--no-deepspeed", "--resume_from_checkpoint")
    arguments, assigned = _parse_words(words, lists, values, flags, keys=True)
    names = arguments.list_sections()
    if not names and not {"--help", "-h"} & set(arguments.rest):
        raise ConfigError(
            "--configs: needs names of sections, such as --configs defaults pythia-1b; weft "
            "config ls lists them"
        )
    if begins_with and begins_with not in names:
        names.insert(0, begins_with)
    if "--rng_seed" in arguments.named:
        assigned.append(f"rng_seed={arguments.get_single('--rng_seed')}")
    if "--wandb-entity" in arguments.named:
        assigned.append(f"logger.wandb.entity={arguments.get_single('--wandb-entity')}")
    if quickstart == "ppo":
        servers = {"TRITON_HOST_RM": "triton_host_rm", "TRITON_HOST_REF": "triton_host_sft"}
        for name, key in servers.items():
            if environment.get(name):
                assigned.append(_format_assignment(key, environment[name]))
    command = ["quickstart", quickstart, "--configs", *names, *assigned]
    if "--show_dataset_stats" in arguments.named:
        command.append("--verbose")
    if "--deepspeed" in arguments.named and "--no-deepspeed" not in arguments.named:
        command.append("--deepspeed")
    if "--resume_from_checkpoint" in arguments.named:
        command.append("--resume_from_checkpoint")
    return [*command, *arguments.rest]


def _parse_words(
    words: list[str],
    lists: Sequence[str],
    values: Sequence[str],
    flags: Sequence[str],
    *,
    keys: bool = False,
) -> tuple[ScriptArguments, list[str]]:
    """Parse `words`, and return the script's arguments and assignments to config keys.

    `lists` names the arguments with any number of values, `values` those with one value, and
    `flags` those without a value. With `keys`, other arguments `--key value` and `--no-key` become
    assignments. Raises `ConfigError` for unknown arguments.
    """
    arguments = ScriptArguments()
    assigned = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, attached = word.partition("=")
        if not word.startswith("-"):
            if not equals:
                raise ConfigError(
                    f"{word!r}: is not an argument; arguments are "
                    f"{', '.join((*lists, *values, *flags))}"
                )
            arguments.rest.append(word)
        elif flag in lists:
            flag_values = [attached] if equals else []
            while not equals and rest and not rest[0].startswith("-") and "=" not in rest[0]:
                flag_values.append(rest.pop(0))
            arguments.named.setdefault(flag, []).extend(flag_values)
        elif flag in values or flag in OWN_VALUES:
            value = attached if equals else _take_value(flag, rest)
            if flag in values:
                arguments.named.setdefault(flag, []).append(value)
            else:
                arguments.rest += [flag, value]
        elif word in flags:
            arguments.named[word] = [""]
        elif word in OWN_FLAGS:
            arguments.rest.append(word)
        elif keys and word.startswith("--no-"):
            assigned.append(f"{word.removeprefix('--no-')}=null")
        elif keys and word.startswith("--"):
            assigned.append(
                _format_assignment(flag[2:], attached if equals else _take_value(flag, rest))
            )
        else:
            close = find_nearest(word, (*lists, *values, *flags), 1)
            raise ConfigError(
                f"unknown argument {word!r}" + (f"; did you mean {close[0]}?" if close else "")
            )
    return arguments, assigned


def _take_value(flag: str, rest: list[str]) -> str:
    if not rest or rest[0].startswith("--"):
        raise ConfigError(f"{flag}: needs a value; write {flag} VALUE")
    return rest.pop(0)


def _format_assignment(key: str, value: str) -> str:
    """Return the assignment `key=value`, quoted if Hydra's grammar requires quotes."""
    if value in ("None", ""):
        return f"{key}=null"
    quoted = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"{key}={value}" if UNQUOTED_VALUE.fullmatch(value) else f"{key}='{quoted}'"


# -- tools


def _translate_counts(words: list[str], environment: Mapping[str, str]) -> list[str]:
    """Translate `--datasets all|NAMES|SECTIONS --mode sft|rm|rl` to `weft data counts`.

    If no validation share is set, Open-Assistant's default is used.
    """
    arguments, _ = _parse_words(
        words, ("--datasets",), ("--mode", "--output_path"), ("--detect_language",)
    )
    mode = arguments.get_single("--mode", "sft") or "sft"
    command = ["data", "counts", "--datasets", *arguments.named.get("--datasets", ["all"])]
    command += ["--mode", mode, f"dataset.valid_split={VALID_SPLIT}"]
    command += ["--output", arguments.get_single("--output_path", "dataset_counts.csv") or ""]
    if "--detect_language" in arguments.named:
        command.append("--detect-language")
    return [*command, *arguments.rest]


def _translate_triton(words: list[str], environment: Mapping[str, str]) -> list[str]:
    """Translate `--configs X --triton_mode rm|sft` to `weft convert triton`.

    The config sections X name the model to convert.
    """
    arguments, assigned = _parse_words(words, ("--configs",), ("--triton_mode",), (), keys=True)
    mode = arguments.get_single("--triton_mode")
    model = find_triton_model(arguments.list_sections(), mode or "", assigned)
    return ["convert", "triton", model, "--triton_mode", str(mode), *arguments.rest]


def _translate_chat(
    defaults: Mapping[str, str], words: list[str], environment: Mapping[str, str]
) -> list[str]:
    """Translate `--model_path M` and sampling options to `weft chat M`.

    `defaults` are the script's default sampling options.
    """
    values = (
        "--model_path",
        "--max_new_tokens",
        "--top_k",
        "--top_p",
        "--temperature",
        "--do-sample",
        "--format",
        "--bot_name",
        "--system_prefix",
        "--cache_dir",
        "--load_checkpoint",
    )
    arguments, _ = _parse_words(
        words, (), values, ("--8bit", "--per-digit-tokens", "--per_digit_tokens", *HISTORY)
    )
    if "--load_checkpoint" in arguments.named:
        raise ConfigError(
            "--load_checkpoint: reads a pickled file; save the model as a directory and give it "
            "as --model_path"
        )
    if arguments.get_single("--format", "v2") not in ("v2", "v2.5"):
        raise ConfigError(
            f"--format {arguments.get_single('--format')}: must be v2 or v2.5 (default: the "
            f"checkpoint's own template)"
        )
    model = arguments.get_single("--model_path")
    if model is None:
        raise ConfigError("--model_path is missing; name a model directory, such as saved_model")
    # Translate the flags one by one.
    command = ["chat", find_newest_run(model)]
    for flag, reason in UNUSED.items():
        if flag in arguments.named:
            print(f"{flag} is left out: {reason}", file=sys.stderr)
    is_greedy = str(arguments.get_single("--do-sample", "true")).lower() in ("false", "0", "no")
    for flag, default in defaults.items():
        value = arguments.get_single(flag, default)
        if flag == "--temperature" and is_greedy:
            value = "0"
        if value is not None:
            command += [flag.replace("_", "-"), str(value)]
    for flag in ("--top_k", "--top_p"):
        if flag not in defaults and flag in arguments.named:
            command += [flag.replace("_", "-"), str(arguments.get_single(flag))]
    if set(HISTORY) & set(arguments.named):
        command.append("--no-history")
    if "--8bit" in arguments.named:
        command.append("--8bit")
    if "--system_prefix" in arguments.named:
        command += ["--system", str(arguments.get_single("--system_prefix"))]
    if "--format" in arguments.named:
        command += ["--format", str(arguments.get_single("--format"))]
    return [*command, *arguments.rest]


COMMANDS: dict[str, Callable[[list[str], Mapping[str, str]], list[str]]] = {
    "trainer_sft": partial(_translate_trainer, "sft", "defaults"),
    "trainer_rm": partial(_translate_trainer, "rw", ""),
    "trainer_rl": partial(_translate_trainer, "ppo", ""),
    "check_dataset_counts": _translate_counts,
    "to_triton": _translate_triton,
    "model_cli": partial(
        _translate_chat, {"--max_new_tokens": "200", "--top_p": "0.9", "--temperature": "0.8"}
    ),
    "model_chat": partial(
        _translate_chat, {"--max_new_tokens": "200", "--top_k": "40", "--temperature": "1.0"}
    ),
}
