"""Split a model directory into one file per pipeline stage, without changing the tensors."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from weft.checkpoints.hf_io import ParameterReader, read_raw, resolve
from weft.checkpoints.weight_files import INDEX, shard_name, write_safetensors, write_text
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
    """Write a model with one file per pipeline stage, and return the size of each file in bytes.

    `source` is a model directory or hub name, and `target` is the folder to write. `transformers`
    and weft load the result like the original. A tensor that several stages need (a tied embedding)
    is in the file of the first of these stages. Raises `ConfigError` if there are fewer layers than
    stages, and `CheckpointError` if the directory cannot be read.
    """
    if num_stages < 1:
        raise ConfigError(f"--num_stages {num_stages}: must be at least 1")
    reader = _open_reader(source, type)
    if num_stages > reader.config.num_layers:
        raise ConfigError(
            f"--num_stages {num_stages}: {source} has {reader.config.num_layers} layers, and "
            f"every stage needs at least one"
        )
    members = _assign_names(reader, num_stages)
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(reader.directory.iterdir()):
        if file.is_file() and not any(file.match(pattern) for pattern in WEIGHTS):
            shutil.copyfile(file, target / file.name)
    sizes: list[int] = []
    places: dict[str, str] = {}
    for stage, names in enumerate(members):
        tensors = {name: reader.files.read(name) for name in names}
        name = shard_name(stage, num_stages)
        write_safetensors(target / name, tensors)
        places |= dict.fromkeys(names, name)
        sizes.append(sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()))
    write_text(
        target / INDEX,
        json.dumps({"metadata": {"total_size": sum(sizes)}, "weight_map": places}, indent=2),
    )
    return sizes


def _open_reader(source: str | Path, type: str | None) -> ParameterReader:
    """Return a reader of the parameters of the model `source`.

    `type` is the model family of the weights; None means the family in config.json. Raises
    `ConfigError` if there is no family `type`, or if the weights do not belong to it.
    """
    own = read_raw(resolve(source)).get("model_type")
    if type is None or type == own:
        return ParameterReader(source)
    if type not in families.load_all():
        raise ConfigError(
            f"--model_type: {build_unknown_name_error('model family', type, families.list_names())}"
        )
    try:
        return ParameterReader(source, type=type)
    except CheckpointError:
        raise ConfigError(
            f"--model_type {type}: {source} is not such a model: its config.json says {own!r}; leave "
            f"--model_type out"
        ) from None


def _assign_names(reader: ParameterReader, num_stages: int) -> list[list[str]]:
    """Return the names of the tensors of each pipeline stage, in file order.

    Raises `CheckpointError` if a stage would have no tensor.
    """
    config = reader.config
    family = reader.family
    known: dict[str, int] = {}
    for head in ("score", "lm"):
        for hf, keys in family.keymap(config, head).group_by_hf_name().items():
            stages = find_stages(keys[0].name, config, num_stages, tied=config.tied)
            known[reader.to_stored_name(hf)] = stages[0]
    members: list[list[str]] = [[] for _ in range(num_stages)]
    for name in reader.files.names:
        members[known[name] if name in known else _find_stage(name, known)].append(name)
    for stage, names in enumerate(members):
        if not names:
            raise CheckpointError(
                f"{reader.directory}: stage {stage} of {num_stages} would hold no tensor"
            )
    return members


def _find_stage(name: str, known: dict[str, int]) -> int:
    """Return the stage of a tensor that is not a parameter, such as a buffer.

    `known` maps parameters to stages. The result is the stage of the parameter whose dotted name
    has the most leading components in common with `name`.
    """

    def count_common_parts(other: str) -> int:
        pairs = zip(name.split("."), other.split("."), strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    return known[max(known, key=count_common_parts)]


def describe(sizes: Sequence[int]) -> str:
    """Return a message that lists the size of each stage in MiB; `sizes` are in bytes."""
    return ", ".join(f"stage {stage} {size / 2**20:,.1f} MiB" for stage, size in enumerate(sizes))
