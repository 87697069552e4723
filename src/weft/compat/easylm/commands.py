"""`weft easylm COMMAND --flag=value`: EasyLM's training scripts and converters.

A training command prints notes on its translation and the equivalent `weft quickstart` command,
then runs that command. Before the run, streams are converted to Hugging Face directories, once per
version of the file. Settings are checked before the conversion, as far as this is possible without
the weights.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from importlib import import_module
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from weft.checkpoints.config_file import JAX_BACKEND
from weft.compat.easylm import flags as tables
from weft.compat.easylm.arguments import (
    ModelConversion,
    ParsedFlags,
    TranslatedCommand,
    parse_flags,
)
from weft.compat.easylm.flags import FlagRule, TrainingCommand
from weft.compat.easylm.other_scripts import build_replaced_error, find_other_script
from weft.compat.easylm.translation import list_host_variables, translate
from weft.engine.spec import JAX_COORDINATOR, TPU
from weft.errors import ConfigError, UserError, build_unknown_name_error, qualify_error
from weft.redaction import mask_words
from weft.storage.buckets import is_remote
from weft.storage.copies import CONVERTED, find_cache_folder

if TYPE_CHECKING:
    from weft.experiment import Experiment

HELP = ("--help", "-h", "help", "--helpfull", "--helpshort")
DRY_RUN = "--dry-run"
PLAN_FLAGS = (DRY_RUN, "--cfg", "--print-script")  # with one of these flags, no run is started
CONFIG = "config.json"  # a directory with this file is a complete model
# pattern of tokenizers that are paths, not names on the hub
TOKENIZER_PATH = re.compile(r"[./~]|.*\.model$|.*/.*/")
CONVERTER_SUMMARIES = {
    "convert_easylm_to_hf": "a stream as a Hugging Face directory",
    "convert_hf_to_easylm": "a Hugging Face directory as a stream",
    "convert_torch_to_easylm": "Meta's .pth files as a stream",
    "convert_checkpoint": "a stream with another dtype, or as one msgpack",
    "diff_checkpoint": "the difference of two streams, or the stream that it restores",
}
SUBMIT = "submit_open_instruct_eval"
EVALUATION_SUMMARIES = {SUBMIT: "the suite open-instruct as a job on Beaker"}


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
    if name == SUBMIT:
        submit: Callable[[list[str]], int] = import_module("weft.compat.easylm.evaluation").main
        return submit(words)
    if (other := find_other_script(name)) is not None:
        raise build_replaced_error(name, other, [word for word in words if word not in HELP])
    if name not in tables.TRAINING:
        known = (*tables.TRAINING, *tables.CONVERTERS, SUBMIT)
        raise build_unknown_name_error("command", name, known)
    if not words or set(words) & set(HELP):
        print(format_help(name))
        return 0 if words else 2
    return train(parse_flags(name, words), supervise=supervise)


def train(parsed: ParsedFlags, *, supervise: bool = False) -> int:
    """Print and run the `weft quickstart` command for a training command; return its exit code."""
    from weft.cli import quickstart
    from weft.compat.easylm.meshes import choose_backend, count_devices

    backend = choose_backend(parsed.get("backend"))
    hosts = list_host_variables(parsed)
    devices = count_devices(backend, {**os.environ, **hosts})
    translated = translate(parsed, backend=backend, num_devices=devices)
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
    os.environ.update(translated.environment)
    flags = {word.partition("=")[0] for word in parsed.passed}
    if missing and not flags.isdisjoint(PLAN_FLAGS):
        with write_stand_ins(translated, missing, folder) as planned:
            if DRY_RUN not in flags:
                check_run(planned, starts=False)
            return quickstart.main(planned)
    if missing:
        with write_stand_ins(translated, missing, folder) as planned:
            check_run(planned)
    for conversion in missing.values():
        print(f"converting {conversion} into {folder}", file=sys.stderr, flush=True)
        conversion.write(folder)
    return quickstart.main(words[1:], supervise=supervise)


def choose_folder(translated: TranslatedCommand) -> Path:
    """Return the folder of converted models.

    It is in the folder of all runs or, if that is in a bucket, in the cache folder.
    """
    root = str(translated.options.get("fileroot", "./runs"))
    return (find_cache_folder() if is_remote(root) else Path(root).expanduser()) / CONVERTED


# -- a checkpoint as a Hugging Face directory, for `weft eval submit`


def check_export(load_checkpoint: str, model_size: str, update: str, tokenizer: str) -> None:
    """Raise `UserError` if `convert_easylm_to_hf` would refuse a checkpoint or its tokenizer.

    Only files on this machine are checked, not names on the hub and files in buckets.
    """
    from weft.compat.easylm.checkpoints import check_weights, write_tokenizer
    from weft.compat.easylm.configs import load_llama_config
    from weft.compat.easylm.streams import TensorStream, find_source

    config = load_llama_config(model_size, update, "--model_size")
    is_path = TOKENIZER_PATH.match(tokenizer) is not None and not is_remote(tokenizer)
    if is_path and not Path(tokenizer).expanduser().exists():
        raise ConfigError(f"--tokenizer_path {tokenizer}: there is no such file or folder")
    if Path(tokenizer).expanduser().exists():
        with TemporaryDirectory(prefix="weft-easylm-") as folder:
            write_tokenizer(tokenizer, config, "lm", Path(folder))
    if is_remote(load_checkpoint.rpartition("::")[2]):
        return
    check_weights(TensorStream(find_source(load_checkpoint, "--from-easylm")), config, "lm")


def identify_export(load_checkpoint: str, model_size: str, update: str, tokenizer: str) -> str:
    """Return a name that depends on the checkpoint's contents, the model size and the tokenizer.

    `update` has changes of the model size, as the text of a dictionary, or is "".
    """
    from weft.compat.easylm.prepared_models import locate_model

    return locate_model(load_checkpoint, model_size, update, tokenizer, Path()).name


# -- checks before a conversion, which can take an hour and write 26 GB


@contextmanager
def write_stand_ins(
    translated: TranslatedCommand, missing: Mapping[str, ModelConversion], folder: Path
) -> Iterator[list[str]]:
    """Yield the arguments of `weft quickstart` with stand-ins for models not yet converted.

    The stand-ins lack their weights and are in a temporary folder. In the output and the errors of
    the context, their paths are replaced by those of the future models in `folder`.
    """
    with TemporaryDirectory(prefix="weft-easylm-") as temporary:
        stand_ins = Path(temporary) / CONVERTED
        options = dict(translated.options)
        for role, conversion in missing.items():
            options[f"{role}.path"] = str(conversion.write(stand_ins, weights=False))
        printed = StringIO()
        try:
            with redirect_stdout(printed):
                yield replace(translated, options=options).format_words()[1:]
        except UserError as error:
            error.args = (str(error).replace(str(stand_ins), str(folder)),)
            raise
        print(printed.getvalue().replace(str(stand_ins), str(folder)), end="", flush=True)


def check_run(words: Sequence[str], *, starts: bool = True) -> None:
    """Raise `UserError` if the run of `weft quickstart WORDS` would be refused.

    The weights of its models are not read, and nothing is written. With `starts`, this machine must
    have the run's devices and packages, and the run's name must be free or that of the same run.
    """
    from weft.cli import quickstart
    from weft.cli.named_run import with_names
    from weft.launch.run import (
        build_with_files,
        check,
        check_machine,
        check_mode,
        mark_as_planned,
        plan_checked,
        set_up_experiment,
    )
    from weft.launch.run_lock import find_refusal
    from weft.launch.slurm import plan_job

    config, _ = quickstart.build_config(words)
    config, _ = with_names(config, words[0])
    planned = mark_as_planned(config)
    experiment, mode = set_up_experiment(planned, None)
    if mode == "slurm":
        plan_job(config)
    else:
        check_mode(mode)
        check(experiment)
        check_machine(experiment, mode)
        experiment = build_with_files(planned, experiment)
        if starts:
            check_devices(experiment, mode)
        plan_checked(experiment, mode)
    refusal = find_refusal(experiment) if starts else None
    if refusal is not None:
        raise ConfigError(refusal)


def check_devices(experiment: Experiment, mode: str) -> None:
    """Raise `ConfigError` if this machine lacks devices or packages that a run's roles need.

    JAX devices are counted only for a run in this process on a single host. Several hosts can count
    them only after all have connected.
    """
    from weft.engine.backends.jax import build_role_mesh, check_jax
    from weft.launch.cluster import check_ray, get_device_kind
    from weft.launch.resolve import set_up_device

    in_process = mode == "local" and experiment.num_devices == 1
    if not in_process:
        get_device_kind(experiment)
        check_ray(experiment)
    device = None
    if in_process and JAX_COORDINATOR not in os.environ:
        device = str(set_up_device(experiment, in_process=True))
    for role, spec in experiment.roles.items():
        if spec.backend != JAX_BACKEND:
            continue
        check_jax()
        if device is not None:
            name = TPU if experiment.control.device == TPU else device
            try:
                build_role_mesh(replace(spec, device=name))
            except ConfigError as error:
                if str(error).startswith("device="):  # an option of the run
                    raise
                raise qualify_error(role, error) from error


# -- help


def format_overview() -> str:
    """Return the list of commands."""
    lines = ["weft easylm COMMAND --flag=value ...    (weft easylm COMMAND --help lists the flags)"]
    summaries = {name: command.summary for name, command in tables.TRAINING.items()}
    for title, commands in (
        ("train", summaries),
        ("convert", CONVERTER_SUMMARIES),
        ("evaluate", EVALUATION_SUMMARIES),
    ):
        lines += ["", title, *(f"  {name:26} {summary}" for name, summary in commands.items())]
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
    r"""Return a default as it is typed, with line breaks as `\n`."""
    return str(value).replace("\n", "\\n")


def describe_rule(command: TrainingCommand, rule: FlagRule) -> str:
    """Return a line that describes the treatment of a flag in weft."""
    if rule.treatment == "refuse":
        return f"refused: {rule.note}"
    if rule.treatment == "ignore":
        return f"without effect: {rule.note}"
    names = [name for option in rule.options for name in command.expand(option)]
    return "; ".join(filter(None, (", ".join(names), rule.note)))
