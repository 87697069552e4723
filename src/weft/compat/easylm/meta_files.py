"""Convert the weights of Meta's releases (`consolidated.NN.pth`) to files of EasyLM.

A large model is divided among several files, one for each device on which Meta's code runs it. The
rows of q and k are in the same order in both formats. One weight is in memory at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from weft.checkpoints.weight_files import read_pickled_tensors
from weft.compat.easylm.checkpoints import WeightPlace, list_weights, sort_weights, write_weights
from weft.compat.easylm.configs import EasyLMConfig, change_config
from weft.errors import CheckpointError, ConfigError
from weft.reading import read_object

EMBEDDING = "tok_embeddings.weight"
GATE = "layers.0.feed_forward.w1.weight"
# fields of EasyLM's configuration -> keys of params.json
PARAMS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_theta",
    "use_scaled_rope": "use_scaled_rope",
}


def write_from_meta(
    folder: Path, path: Path, *, dtype: torch.dtype | None = None, streaming: bool = True
) -> EasyLMConfig:
    """Write the weights of a release of Meta, and return EasyLM's configuration.

    `folder` contains `params.json` and `consolidated.NN.pth`: one file, or the parts of a model
    that is divided among several devices. The files are mapped, and one weight is assembled at a
    time. Raises `CheckpointError` if the files do not make up a model.
    """
    shards = _open_meta(folder)
    config = _read_meta_config(folder, shards)
    places = sort_weights(list_weights(config, "lm"))
    plans = {place.name: _plan_merge(folder, place, shards) for place in places}

    def merge() -> Iterator[tuple[str, Tensor]]:
        for place in places:
            parts = [shard[place.meta] for shard in shards]
            axis = plans[place.name]
            weight = torch.empty(place.hf_shape, dtype=parts[0].dtype)
            if axis is None:
                weight.copy_(parts[0])
            else:
                torch.cat(parts, dim=axis, out=weight)
            yield place.name, weight.T if place.is_matrix else weight
            del weight  # before the next one is assembled

    dtypes = {place.name: shards[0][place.meta].dtype for place in places}
    shapes = {place.name: place.shape for place in places}
    write_weights(path, shapes, dtypes, merge(), dtype, streaming=streaming)
    return config


def _open_meta(folder: Path) -> list[dict[str, Tensor]]:
    """Return the mapped tensors of each file `consolidated.NN.pth`."""
    files = {}
    for file in folder.glob("*.pth"):
        match = re.fullmatch(r"consolidated\.(\d+)\.pth", file.name)
        if match:
            files[int(match[1])] = file
    if not files:
        raise CheckpointError(
            f"{folder}: has no consolidated.00.pth; name the folder of a release of Meta"
        )
    missing = sorted(set(range(max(files) + 1)) - set(files))
    if missing:
        raise CheckpointError(f"{folder}: consolidated.{missing[0]:02}.pth is missing")
    return [read_pickled_tensors(files[index]) for index in sorted(files)]


def _read_meta_config(folder: Path, shards: Sequence[Mapping[str, Tensor]]) -> EasyLMConfig:
    """Return the configuration in params.json, with missing sizes read from the tensors' shapes."""
    file = folder / "params.json"
    params = read_object(file, str(file), CheckpointError)
    for name in (EMBEDDING, GATE):
        if any(name not in shard or shard[name].dim() != 2 for shard in shards):
            raise CheckpointError(f"{folder}: {name} is missing, or is not a matrix")
    values = {own: params[key] for own, key in PARAMS.items() if params.get(key) is not None}
    embeddings = [shard[EMBEDDING].shape for shard in shards]
    # The embedding is divided either by columns, so that each file has a row for every token id, or
    # by rows.
    if embeddings[0][1] == params.get("dim"):
        values["vocab_size"] = sum(shape[0] for shape in embeddings)
    else:
        values["vocab_size"] = embeddings[0][0]
    values["intermediate_size"] = sum(shard[GATE].shape[0] for shard in shards)
    values["tie_word_embeddings"] = "output.weight" not in shards[0]
    try:
        return change_config(EasyLMConfig(), values, str(file))
    except ConfigError as error:
        raise CheckpointError(str(error)) from error


def _plan_merge(
    folder: Path, place: WeightPlace, shards: Sequence[Mapping[str, Tensor]]
) -> int | None:
    """Return the axis along which to join a weight's parts, or None if each file has all of it.

    The axis follows from the shapes. Matrices are divided by rows or by columns, and the embedding
    by columns in Llama 1 and 2, and by rows since Llama 3. Raises `CheckpointError` if the parts do
    not make up the weight.
    """
    missing = [index for index, shard in enumerate(shards) if place.meta not in shard]
    if missing:
        raise CheckpointError(f"{folder}: consolidated.{missing[0]:02}.pth lacks {place.meta}")
    shapes = [tuple(shard[place.meta].shape) for shard in shards]
    if len({shard[place.meta].dtype for shard in shards}) > 1:
        raise CheckpointError(f"{folder}: {place.meta} has several dtypes")
    if all(shape == place.hf_shape for shape in shapes):
        return None
    for axis in range(len(place.hf_shape)):
        joined = list(shapes[0])
        joined[axis] = sum(shape[axis] for shape in shapes)
        others = {shape[:axis] + shape[axis + 1 :] for shape in shapes}
        if tuple(joined) == place.hf_shape and len(others) == 1:
            return axis
    raise CheckpointError(
        f"{folder}: {place.meta} has the shapes {', '.join(map(str, shapes))}, which do not join "
        f"to {place.hf_shape}"
    )
