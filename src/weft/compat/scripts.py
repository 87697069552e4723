"""Run the command lines of other programs' scripts as weft commands: Open-Assistant's and ReaL's."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.checkpoints.names import find_newest_run
from weft.compat.open_assistant.key_mapping import VALID_SPLIT
from weft.compat.triton_command import find_triton_model
from weft.errors import ConfigError, find_nearest
from weft.redaction import mask_words

# weft's own flags, passed through
OWN_FLAGS = ("--dry-run", "--debug", "--help", "-h", "--print-script")
OWN_VALUES = ("--cfg", "--import", "--config-dir", "--config")
UNQUOTED_VALUE = re.compile(r"[\w./+:@%-]*|[\[{].*[\]}]")
HISTORY = ("--no-history", "--no_history")
# value of --format -> chat template, None for the model's own
FORMATS = {"v2": "oasst", "v2.5": "oasst_v25", "template": None}
FORMATS_HELP = "Open-Assistant's formats v2 and v2.5, or the model's own template (the default)"
UNUSED = {  # chat flags without effect -> reason
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
        return self.named[name][-1] if self.named.get(name) else default


def run(script: str, argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Print and run the weft command that replaces an Open-Assistant script.

    `script` is the name of the script, and `argv` are its arguments. Returns the exit code.
    """
    from weft.cli import main

    words: list[str] = []

    def run_translated(given: Sequence[str]) -> int:
        words.extend(build_command(script, given, environment))
        print(f"$ weft {shlex.join(mask_words(words))}", flush=True)
        return 0

    return main.run_guarded(run_translated, argv) or main.main(words)


def build_command(
    script: str, argv: Sequence[str], environment: Mapping[str, str] = os.environ
) -> list[str]:
    """Return the words of the weft command that replaces `script` with the arguments `argv`.

    Raises `ConfigError` for arguments that the script does not have.
    """
    return COMMANDS[script](list(argv), environment)


def partition_checkpoint(argv: Sequence[str]) -> int:
    """Run ReaL's script transform_to_pipe_ckpt, whose arguments are those of `weft convert partition`."""
    from weft.cli import main

    return main.main(["convert", "partition", *argv])


# -- trainers


def _translate_trainer(
    quickstart: str, begins_with: str, words: list[str], environment: Mapping[str, str]
) -> list[str]:
    """Translate a trainer's `--configs A B --key value --no-key ...` to `weft quickstart`.

    `begins_with` is a section that the trainer always applies first, or "".
    """
    lists = ("--configs",)
    values = ("--local_rank", "--wandb-entity", "--rng_seed")
    flags: tuple[str, ...] = ("--show_dataset_stats",)
    if quickstart != "ppo":
        flags += ("--deepspeed", "--no-deepspeed", "--resume_from_checkpoint")
    done, assigned = _take(words, lists, values, flags, keys=True)
    names = []
    for word in done.named.get("--configs", []):
        for name in word.split(","):
            if name:
                names.append(name)
    if not names and not {"--help", "-h"} & set(done.rest):
        raise ConfigError(
            "--configs: needs names of sections, such as --configs defaults pythia-1b; weft "
            "config ls lists them"
        )
    if begins_with and begins_with not in names:
        names.insert(0, begins_with)
    if "--rng_seed" in done.named:
        assigned.append(f"rng_seed={done.get_single('--rng_seed')}")
    if "--wandb-entity" in done.named:
        assigned.append(f"logger.wandb.entity={done.get_single('--wandb-entity')}")
    if quickstart == "ppo":
        servers = {"TRITON_HOST_RM": "triton_host_rm", "TRITON_HOST_REF": "triton_host_sft"}
        for name, key in servers.items():
            if environment.get(name):
                assigned.append(_format_assignment(key, environment[name]))
    command = ["quickstart", quickstart, "--configs", *names, *assigned]
    command += ["--verbose"] if "--show_dataset_stats" in done.named else []
    deepspeed = "--deepspeed" in done.named and "--no-deepspeed" not in done.named
    command += ["--deepspeed"] if deepspeed else []
    command += ["--resume_from_checkpoint"] if "--resume_from_checkpoint" in done.named else []
    return [*command, *done.rest]


def _take(
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
    done = ScriptArguments()
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
            done.rest.append(word)
        elif flag in lists:
            given = [attached] if equals else []
            while not equals and rest and not rest[0].startswith("-") and "=" not in rest[0]:
                given.append(rest.pop(0))
            done.named.setdefault(flag, []).extend(given)
        elif flag in values or flag in OWN_VALUES:
            value = attached if equals else _take_value(flag, rest)
            if flag in values:
                done.named.setdefault(flag, []).append(value)
            else:
                done.rest += [flag, value]
        elif word in flags:
            done.named[word] = [""]
        elif word in OWN_FLAGS:
            done.rest.append(word)
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
    return done, assigned


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
    done, _ = _take(words, ("--datasets",), ("--mode", "--output_path"), ("--detect_language",))
    mode = done.get_single("--mode", "sft") or "sft"
    command = [
        "data",
        "counts",
        "--datasets",
        *done.named.get("--datasets", ["all"]),
        "--mode",
        mode,
    ]
    command += [f"dataset.valid_split={VALID_SPLIT}"]
    command += ["--output", done.get_single("--output_path", "dataset_counts.csv") or ""]
    return [
        *command,
        *(["--detect-language"] if "--detect_language" in done.named else []),
        *done.rest,
    ]


def _translate_triton(words: list[str], environment: Mapping[str, str]) -> list[str]:
    """Translate `--configs X --triton_mode rm|sft` to `weft convert triton`.

    The config sections X name the model to convert.
    """
    done, assigned = _take(words, ("--configs",), ("--triton_mode",), (), keys=True)
    mode = done.get_single("--triton_mode")
    names = []
    for word in done.named.get("--configs", []):
        for name in word.split(","):
            if name:
                names.append(name)
    model = find_triton_model(names, mode or "", assigned)
    return ["convert", "triton", model, "--triton_mode", str(mode), *done.rest]


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
    done, _ = _take(
        words, (), values, ("--8bit", "--per-digit-tokens", "--per_digit_tokens", *HISTORY)
    )
    if "--load_checkpoint" in done.named:
        raise ConfigError(
            "--load_checkpoint: reads a pickled file; save the model as a directory and give it "
            "as --model_path"
        )
    if done.get_single("--format", "v2") not in ("v2", "v2.5"):
        raise ConfigError(
            f"--format {done.get_single('--format')}: must be v2 or v2.5 (default: the checkpoint's own "
            f"template)"
        )
    model = done.get_single("--model_path")
    if model is None:
        raise ConfigError("--model_path is missing; name a model directory, such as saved_model")
    # Translate the flags one by one.
    command = ["chat", find_newest_run(model)]
    for flag, why in UNUSED.items():
        if flag in done.named:
            print(f"{flag} is left out: {why}", file=sys.stderr)
    for flag, default in defaults.items():
        value = done.get_single(flag, default)
        if flag == "--temperature" and str(done.get_single("--do-sample", "true")).lower() in (
            "false",
            "0",
            "no",
        ):
            value = "0"
        command += [flag.replace("_", "-"), str(value)] if value is not None else []
    for flag in ("--top_k", "--top_p"):
        if flag not in defaults and flag in done.named:
            command += [flag.replace("_", "-"), str(done.get_single(flag))]
    command += ["--no-history"] if set(HISTORY) & set(done.named) else []
    command += ["--8bit"] if "--8bit" in done.named else []
    command += (
        ["--system", str(done.get_single("--system_prefix"))]
        if "--system_prefix" in done.named
        else []
    )
    command += ["--format", str(done.get_single("--format"))] if "--format" in done.named else []
    return [*command, *done.rest]


def _with(
    function: Callable[..., list[str]], *first: Any
) -> Callable[[list[str], Mapping[str, str]], list[str]]:
    return lambda words, environment: function(*first, words, environment)


COMMANDS: dict[str, Callable[[list[str], Mapping[str, str]], list[str]]] = {
    "trainer_sft": _with(_translate_trainer, "sft", "defaults"),
    "trainer_rm": _with(_translate_trainer, "rw", ""),
    "trainer_rl": _with(_translate_trainer, "ppo", ""),
    "check_dataset_counts": _translate_counts,
    "to_triton": _translate_triton,
    "model_cli": _with(
        _translate_chat, {"--max_new_tokens": "200", "--top_p": "0.9", "--temperature": "0.8"}
    ),
    "model_chat": _with(
        _translate_chat, {"--max_new_tokens": "200", "--top_k": "40", "--temperature": "1.0"}
    ),
}
