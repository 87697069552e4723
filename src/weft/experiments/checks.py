"""Checks of a configuration that need no torch: names, devices, paths, sizes.

They run within the first second of a command.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.checkpoints.config_file import (
    PrefixSettings,
    is_reward_model,
    prefix_option,
    read_config_values,
    read_prefix,
)
from weft.checkpoints.names import ACCEPTED_NAMES, HUB_NAME
from weft.data.named import find_entry
from weft.data.spec import DatasetSpec, list_source_specs
from weft.engine.service_spec import NO_NETWORK
from weft.engine.spec import ModelSpec
from weft.engine.spec_checks import check_quantize
from weft.engine.spec_parts import PrefixSpec
from weft.errors import CheckpointError, ConfigError, build_unknown_name_error, find_nearest
from weft.experiment import RUN_NAME, parse_step_range
from weft.graph.graph import DataflowGraph
from weft.planner.placement import MODES as MODES_OF_ALLOCATION
from weft.planner.placement import is_plan_path
from weft.reading import ROOT, find_url_problem, is_root, refuse_url, suggest_sibling
from weft.registry import interfaces, losses
from weft.storage.buckets import is_remote
from weft.storage.copies import check_data, read_listing
from weft.topology import Layout

MODES = ("local", "ray", "slurm")
MAX_NAME_LENGTH = 255  # bytes of a folder's name
DEVICE = re.compile(r"(cpu|mps|tpu|(cuda|xpu)(:\d+)?)")
HUB_DATA = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w./-]+)?", re.ASCII)
DATA_FILE = re.compile(r"\.(jsonl?|parquet)(\.gz)?$")
FLASH_3 = "flash_attn_interface"  # the package of flash attention 3
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def find_file_problem(path: str) -> str | None:
    """Return an error message if the path is not a file, else None."""
    if Path(path).expanduser().is_file():
        return None
    if is_remote(path):
        try:
            check_data(path, path)
        except ConfigError as error:
            return str(error).removeprefix(f"{path}: ")
        return None
    return find_url_problem(path) or "there is no such file; check the spelling"


def find_mode_problem(mode: str) -> str | None:
    """Return an error message for an unknown `mode`, else None."""
    if mode in MODES:
        return None
    close = find_nearest(mode, MODES, 1)
    return f"must be local, ray or slurm{f' (did you mean {close[0]}?)' if close else ''}"


def find_device_problem(device: str) -> str | None:
    """Return an error message if `device` is invalid, or None if it is valid."""
    if DEVICE.fullmatch(device):
        return None
    return "must be cpu, cuda, cuda:N, xpu, mps or tpu; leave it out for the best device available"


def check_flash(flash_attention: str, mode: str) -> None:
    """Raise `ConfigError` if flash attention 3 is requested but not installed.

    This is checked only in `mode` "local". In other modes, the computation takes place on other
    machines.
    """
    if flash_attention == "fa3" and mode == "local" and importlib.util.find_spec(FLASH_3) is None:
        raise ConfigError(
            f"flash_attention=fa3: needs the package {FLASH_3}, which is not installed; leave it "
            f"out"
        )


def find_profile_problem(steps: str) -> str | None:
    """Return an error message if `steps` is not a range of steps such as "5" or "5:8", else None."""
    try:
        parse_step_range(steps)
    except ConfigError as error:
        return str(error)
    return None


def find_allocation_problem(mode: str) -> str | None:
    """Return an error message for an invalid `allocation_mode`, else None."""
    if mode in MODES_OF_ALLOCATION or is_plan_path(mode):
        return None
    if not re.fullmatch(r"([a-z]\d+)+", mode):
        close = find_nearest(mode, MODES_OF_ALLOCATION, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        return (
            f"must be manual, heuristic, search, a layout such as d1, or a plan file such as "
            f"plan.yaml{hint}"
        )
    return find_layout_problem(mode)


def find_layout_problem(layout: str) -> str | None:
    """Return an error message for an invalid layout, else None."""
    try:
        Layout.parse(layout)
    except ConfigError as error:
        return str(error).removeprefix(f"layout={layout[:40]}: ")
    return None


def check_names(**names: str) -> None:
    """Raise `ConfigError` unless each name is valid as the name of a folder, a process and a job.

    The keys of `names` are the options that set the names.
    """
    for option, name in names.items():
        if not name:
            raise ConfigError(
                f"{option} is missing; write {option}=NAME (letters, digits, . and -)"
            )
        if (count := len(os.fsencode(name))) > MAX_NAME_LENGTH:
            unit = "letters" if name.isascii() else "bytes"
            raise ConfigError(
                f"{option}: {count} {unit}; the name of a folder has at most {MAX_NAME_LENGTH}"
            )
        if not RUN_NAME.fullmatch(name):
            raise ConfigError(
                f"{option}={name!r}: must contain only letters, digits, . and -, and not begin "
                f"with a dot; write {option}={_suggest_name(name)}"
            )


def _suggest_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip(".-") or "NAME"


# -- models


def check_model(role: str, spec: ModelSpec) -> None:
    """Raise `UserError` if the options of a role do not specify a model that can be loaded.

    `role` is the role's name, for messages. Only local paths are checked. Names of models on the
    Hugging Face hub are looked up later.
    """
    if spec.tokenizer.path is not None:
        check_local(f"{role}.tokenizer.path", spec.tokenizer.path)
    if spec.backend in NO_NETWORK:
        if spec.path is None and spec.tokenizer.path is None:
            raise ConfigError(
                f"{role}.backend={spec.backend} loads only a tokenizer: set {role}.tokenizer.path"
            )
        return
    if spec.trained:
        spec.optimizer.check_library()
    check_quantize(spec, role)
    if spec.path is None:
        raise ConfigError(f"{role}.path is missing: give a Hugging Face directory or a hub name")
    directory = check_local(f"{role}.path", spec.path)
    if directory is not None:
        _check_directory(role, spec, directory)


def expand_home(path: str | None) -> str | None:
    """Return the path with a leading `~` replaced by the home directory."""
    if path is not None and path.startswith("~"):
        return str(Path(path).expanduser())
    return path


def is_local(path: str) -> bool:
    """Return whether a model path is local: it exists, or does not have the form of a hub name."""
    return Path(path).expanduser().exists() or HUB_NAME.fullmatch(path) is None


def check_local(option: str, path: str) -> Path | None:
    """Return `path` as a local path, or None if it is a hub name.

    `option` is the option that sets the path, for messages. Raises `CheckpointError` if a local
    path does not exist.
    """
    if not is_local(path):
        return None
    local_path = Path(path).expanduser()
    if local_path.exists():
        return local_path
    close = suggest_sibling(local_path)
    if close is not None:
        hint = f"did you mean {close}?"
    else:
        hint = "check the spelling"
    raise CheckpointError(f"{option}={path!r}: there is no such file or directory; {hint}")


def _check_directory(role: str, spec: ModelSpec, directory: Path) -> None:
    option = f"{role}.path={spec.path!r}"
    if not directory.is_dir():
        raise CheckpointError(
            f"{option}: is a file; give the directory that contains config.json and the weights"
        )
    if prefix := read_prefix(directory):
        _check_prefix(role, spec, prefix)
        return
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{option}: has no config.json; give {ACCEPTED_NAMES}")
    with prefix_option(f"{role}.path"):
        values = read_config_values(str(spec.path))
    if spec.head == "lm" and is_reward_model(values):
        raise CheckpointError(
            f"{option}: is a reward or value model ({values['architectures'][0]}), which cannot "
            "generate text; give a language model"
        )
    names = read_listing(directory)  # of a copy from a bucket, whose weights are copied later
    if not (spec.init_from_scratch or spec.planned) and not any(
        next(directory.glob(p), None) or fnmatch.filter(names, p) for p in WEIGHTS
    ):
        raise CheckpointError(
            f"{option}: has no weights (*.safetensors); add them, or write "
            f"{role}.init_from_scratch=true for random ones"
        )


def _check_prefix(role: str, spec: ModelSpec, prefix: PrefixSettings) -> None:
    """Check a role whose `path` is a trained prefix (prefix tuning) instead of a model.

    The prefix's base model is checked, too. Raises `ConfigError` if the role's backend does not
    support prefixes, or if the role is trained and its option `prefix.num_tokens` is not the length
    of the prefix.
    """
    option = f"{role}.path={spec.path!r}"
    num_tokens = spec.prefix.num_tokens
    if spec.backend == "hf":
        raise ConfigError(
            f"{option}: is a prefix, which {role}.backend=hf does not support; use backend=torch"
        )
    if spec.trained and num_tokens != prefix.num_tokens:
        raise ConfigError(
            f"{option}: is a prefix of {prefix.num_tokens} tokens, but "
            f"{role}.prefix.num_tokens={num_tokens}; write {role}.prefix.num_tokens={prefix.num_tokens} "
            f"to train it further, or {role}.path={prefix.base} for its base model"
        )
    base = check_local(f"{role}.path={spec.path!r}: base_model_name_or_path", prefix.base)
    if base is not None:
        _check_directory(role, replace(spec, path=prefix.base, prefix=PrefixSpec()), base)


def count_prefix_tokens(spec: ModelSpec) -> int:
    """Return the number of context positions that a role's trained prefix uses.

    This is 0 for a role without a prefix.
    """
    if spec.path is not None and is_local(spec.path):
        prefix = read_prefix(spec.path)
    else:
        prefix = None
    return spec.prefix.num_tokens if prefix is None else prefix.num_tokens


def read_model_config(spec: ModelSpec) -> Mapping[str, Any]:
    """Return the contents of the config.json of a role's model.

    The file is read from a local directory, from the hub's cache or from weft's built-in copies.
    Nothing is downloaded. If the file is not available, the result is an empty mapping.
    """
    return {} if spec.path is None else read_config_values(spec.path)


def read_vocab_size(spec: ModelSpec) -> int | None:
    """Return the vocabulary size that the model's config.json states, or None if it is unknown."""
    size = read_model_config(spec).get("vocab_size")
    return size if isinstance(size, int) else None


# -- data and sizes


def check_dataset(dataset: DatasetSpec) -> None:
    """Raise `ConfigError` if training data are missing, or if two options exclude each other."""
    for kind in ("train", "valid"):
        sizes = [f"{kind}_tokens_per_batch", f"{kind}_bs_n_seqs"]
        if all(getattr(dataset, name) is not None for name in sizes):
            raise ConfigError(
                f"dataset.{sizes[0]} and dataset.{sizes[1]} exclude each other; set one of them"
            )
    if (
        dataset.path is not None
        and dataset.train_path is not None
        and dataset.path != dataset.train_path
    ):
        raise ConfigError(
            "dataset.path and dataset.train_path are the same option, but have different values; "
            "set only one of them"
        )
    train_path = dataset.train_path or dataset.path
    has_rows = train_path is not None or dataset.sources or dataset.named or dataset.args
    if not has_rows and not dataset.planned:
        raise ConfigError(
            "dataset.train_path is missing: give a JSON, JSONL or Parquet file, a directory, or a "
            "hub name"
        )
    for index, source in enumerate(list_source_specs(dataset)):
        if source.named is not None:
            find_entry(source.named, dataset.named_file)
        for name, path in (("path", source.path), ("valid_path", source.valid_path)):
            if path is not None and is_remote(path):
                check_data(path, f"dataset.sources[{index}].{name}={path!r}")
    train = "dataset.train_path" if dataset.path is None else "dataset.path"
    for option, path in ((train, train_path), ("dataset.valid_path", dataset.valid_path)):
        if path is not None and _is_local_path(path):
            _check_data_file(option, path)


def _is_local_path(path: str) -> bool:
    """Return whether a dataset path is local, rather than a hub name `OWNER/NAME[:FOLDER]`."""
    if Path(path).expanduser().exists() or DATA_FILE.search(path):
        return True
    return HUB_DATA.fullmatch(path) is None


def _check_data_file(option: str, path: str) -> None:
    if is_remote(path):
        check_data(path, f"{option}={path!r}")
        return
    refuse_url(path, f"{option}={path!r}", ConfigError)
    local_path = Path(path).expanduser()
    if not local_path.exists():
        close = suggest_sibling(local_path)
        if close is not None:
            hint = f"did you mean {close}?"
        else:
            hint = "check the spelling"
        raise ConfigError(f"{option}={path!r}: there is no such file or directory; {hint}")
    if is_root(local_path):
        raise ConfigError(f"{option}={path!r}: {ROOT}")
    if local_path.is_file() and local_path.stat().st_size == 0:
        raise ConfigError(f"{option}={path!r}: the file is empty; it needs at least one row")


def check_fits(option: str, budget: int | None, longest: int, of_what: str) -> None:
    """Raise `ConfigError` if the longest sequence does not fit into a token budget.

    `budget` is the value of the option `option`, or None if there is no limit. `longest` is the
    length of the longest sequence in tokens. `of_what` is a phrase for the message that says which
    options determine this length.
    """
    if budget is not None and budget < longest:
        raise ConfigError(
            f"{option}={budget}: cannot hold the longest sequence, {longest} tokens ({of_what}); "
            "raise the first or lower those"
        )


def count_minibatches(total: int, size: int | None, count: int, algorithm: str) -> int:
    """Return the number of optimizer steps per pass over `total` completions.

    `size` is the number of completions per minibatch; if it is None, there are `count` minibatches.
    `algorithm` is the option group of the algorithm, for messages. Raises `ConfigError` if `total`
    cannot be divided evenly.
    """
    if size is not None:
        if total % size:
            raise ConfigError(
                f"{algorithm}.mini_batch_size={size}: must divide the {total} completions of a "
                f"step "
                f"(dataset.train_bs_n_seqs x samples per prompt); {_format_divisors(total)}"
            )
        return total // size
    if total % count:
        raise ConfigError(
            f"{algorithm}.ppo_n_minibatches={count}: must divide the {total} completions of a step "
            f"(dataset.train_bs_n_seqs x samples per prompt); {_format_divisors(total)}"
        )
    return count


def _format_divisors(total: int) -> str:
    divisors = [n for n in range(1, total + 1) if total % n == 0]
    if len(divisors) < 13:
        return f"{', '.join(map(str, divisors[:12]))} do"
    return f"{', '.join(map(str, divisors[:12]))}, ... do"


# -- calls


def check_losses(graph: DataflowGraph) -> None:
    """Raise `ConfigError` for unknown interfaces, unknown losses and unknown arguments of losses.

    The arguments are checked by building each loss. This does not import torch, since losses work
    on arrays of any library.
    """
    for node in graph.list_model_calls():
        if node.interface not in interfaces:
            raise build_unknown_name_error("interface", node.interface, interfaces.list_names())
        if node.interface == "train" and "loss" in node.args:
            losses.get(node.args["loss"])(**node.args.get("loss_args", {}))
