"""Split a model directory into one file per pipeline stage, without changing the tensors."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from weft.checkpoints.hf_io import ParameterReader, read_raw, resolve
from weft.checkpoints.weight_files import INDEX, format_shard_name, write_safetensors, write_text
from weft.errors import CheckpointError, ConfigError, build_unknown_name_error
from weft.registry import families
from weft.topology import find_stages

WEIGHTS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.pt",
    "*.pth",
    "*.gguf",
)


def partition(
    source: str | Path, target: Path, num_stages: int, type: str | None = None
) -> list[int]:
    """Write a model with one file per pipeline stage, and return the size of each in bytes.

    `source` is a model directory or hub name, `target` is the folder to write, and `type` is the
    model family of the weights, by default the one in config.json. `transformers` and weft load the
    result like the original. A tensor that several stages need (a tied embedding) is in the file of
    the first of these stages. Raises `ConfigError` if there are fewer layers than stages, and
    `CheckpointError` if the directory cannot be read.
    """
    if num_stages < 1:
        raise ConfigError(f"--num_stages {num_stages}: must be at least 1")
    reader = _open_reader(source, type)
    if num_stages > reader.config.num_layers:
        raise ConfigError(
            f"--num_stages {num_stages}: {source} has {reader.config.num_layers} layers, and "
            f"every stage needs at least one"
        )
    names_by_stage = _assign_names(reader, num_stages)
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(reader.directory.iterdir()):
        if file.is_file() and not any(file.match(pattern) for pattern in WEIGHTS):
            shutil.copyfile(file, target / file.name)
    sizes: list[int] = []
    file_by_name: dict[str, str] = {}
    for stage, names in enumerate(names_by_stage):
        tensors = {name: reader.files.read(name) for name in names}
        name = format_shard_name(stage, num_stages)
        write_safetensors(target / name, tensors)
        file_by_name |= dict.fromkeys(names, name)
        sizes.append(sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()))
    write_text(
        target / INDEX,
        json.dumps({"metadata": {"total_size": sum(sizes)}, "weight_map": file_by_name}, indent=2),
    )
    return sizes


def _open_reader(source: str | Path, type: str | None) -> ParameterReader:
    """Return a reader of the parameters of the model `source`.

    `type` is the model family of the weights; if it is None, the family in config.json is used.
    Raises `ConfigError` if there is no family `type`, or if the weights do not belong to it.
    """
    stored_type = read_raw(resolve(source)).get("model_type")
    if type is None or type == stored_type:
        return ParameterReader(source)
    if type not in families.load_all():
        raise ConfigError(
            f"--model_type: {build_unknown_name_error('model family', type, families.list_names())}"
        )
    try:
        return ParameterReader(source, type=type)
    except CheckpointError:
        raise ConfigError(
            f"--model_type {type}: {source} is not such a model: its config.json says "
            f"{stored_type!r}; leave --model_type out"
        ) from None


def _assign_names(reader: ParameterReader, num_stages: int) -> list[list[str]]:
    """Return the names of the tensors of each pipeline stage, in the order of the weight files.

    Raises `CheckpointError` if a stage would have no tensor.
    """
    config = reader.config
    family = reader.family
    stage_by_name: dict[str, int] = {}
    for head in ("score", "lm"):
        for hf, keys in family.keymap(config, head).group_by_hf_name().items():
            stages = find_stages(keys[0].name, config, num_stages, tied=config.tied)
            stage_by_name[reader.to_stored_name(hf)] = stages[0]
    names_by_stage: list[list[str]] = [[] for _ in range(num_stages)]
    for name in reader.files.names:
        stage = stage_by_name[name] if name in stage_by_name else _find_stage(name, stage_by_name)
        names_by_stage[stage].append(name)
    for stage, names in enumerate(names_by_stage):
        if not names:
            raise CheckpointError(
                f"{reader.directory}: stage {stage} of {num_stages} would hold no tensor"
            )
    return names_by_stage


def _find_stage(name: str, stage_by_name: dict[str, int]) -> int:
    """Return the stage of a tensor that is not a parameter, such as a buffer.

    `stage_by_name` maps parameters to stages. The result is the stage of the parameter whose dotted
    name has the most leading components in common with `name`.
    """

    def count_common_parts(other: str) -> int:
        pairs = zip(name.split("."), other.split("."), strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    return stage_by_name[max(stage_by_name, key=count_common_parts)]


def describe(sizes: Sequence[int]) -> str:
    """Return a text that lists the size of each stage in MiB; `sizes` are in bytes."""
    return ", ".join(f"stage {stage} {size / 2**20:,.1f} MiB" for stage, size in enumerate(sizes))
