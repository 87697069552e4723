"""Read and write a trained prefix in PEFT's format.

The files are `adapter_config.json` and `adapter_model.safetensors`. The latter contains
`prompt_embeddings` [tokens, layers x 2 x kv_heads x head_dim]: each row has the keys and values of
one prefix token, layer by layer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from weft.checkpoints import weight_files
from weft.checkpoints.config_file import ADAPTER_WEIGHTS, PREFIX_KIND, PREFIX_TASKS, PrefixSettings
from weft.checkpoints.names import ADAPTER
from weft.checkpoints.weight_files import WeightFiles
from weft.errors import CheckpointError
from weft.models.network.config import TransformerConfig
from weft.models.network.prefix import is_prefix
from weft.models.network.transformer import Head
from weft.topology import Slice

EMBEDDINGS = "prompt_embeddings"
HEAD = "base_model.{name}"  # name of a score head's tensor; `name` is its name in model checkpoints


class PrefixReader:
    """Reader of a prefix-tuning checkpoint: the prefix and, if it was saved, a score head.

    Parameters are read by weft's canonical names. `score` is the name of the head's weight in model
    checkpoints. The constructor raises `CheckpointError` if the shape of the prefix does not match
    `settings` and `config`.
    """

    def __init__(
        self, directory: Path, settings: PrefixSettings, config: TransformerConfig, score: str
    ) -> None:
        self._files = WeightFiles(directory, single=ADAPTER_WEIGHTS)
        self._where = directory / ADAPTER_WEIGHTS
        self._layers = config.num_layers
        self._score = HEAD.format(name=score)
        width = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        expected = (settings.num_tokens, width)
        if EMBEDDINGS not in self._files.names or self._files.get_shape(EMBEDDINGS) != expected:
            if EMBEDDINGS in self._files.names:
                stored: object = self._files.get_shape(EMBEDDINGS)
            else:
                stored = "no"
            raise CheckpointError(
                f"{self._where} holds {stored} {EMBEDDINGS}; a prefix of {settings.num_tokens} "
                f"tokens of {settings.base} has {expected}"
            )

    def __contains__(self, name: object) -> bool:
        """Return whether the checkpoint contains the parameter with the canonical name `name`."""
        return isinstance(name, str) and (
            is_prefix(name) or (name == "score.weight" and self._score in self._files.names)
        )

    def read(self, name: str, where: Slice | None = None) -> Tensor:
        """Return the slice `where` of a parameter, in the dtype of the file.

        `where` has a `slice` for each dimension; None means the whole parameter.
        """
        if name == "score.weight":
            return self._files.read(self._score, where)
        layer = int(name.split(".")[1])
        kind = "kv".index(name[-1])
        tensor = self._files.read(EMBEDDINGS).unflatten(1, (self._layers, 2, -1))[:, layer, kind]
        return tensor if where is None else tensor[where]


def save_prefix(
    directory: str | Path,
    parameters: Mapping[str, Tensor],
    config: TransformerConfig,
    head: Head,
    *,
    base: str,
    score: str,
) -> None:
    """Write the prefix of a prefix-tuned model, and its value or score head if it has one.

    `parameters` are the model's parameters by canonical name (weft's own). `base` is the name of
    the base model, and `score` is the name of the head's weight in model checkpoints. Raises
    `RunError` if writing fails.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for layer in range(config.num_layers):
        for kind in "kv":
            rows.append(parameters[f"blocks.{layer}.attention.prefix.{kind}"].detach())
    tensors = {EMBEDDINGS: torch.cat(rows, dim=1).contiguous()}
    if head != "lm":
        tensors[HEAD.format(name=score)] = parameters["score.weight"].detach().contiguous()
    settings = {
        "peft_type": PREFIX_KIND,
        "task_type": next(
            task for task, kind in PREFIX_TASKS.items() if (kind == "lm") == (head == "lm")
        ),
        "base_model_name_or_path": base,
        "num_virtual_tokens": config.prefix_tokens,
        "num_layers": config.num_layers,
        "num_attention_heads": config.num_kv_heads,  # PEFT counts the heads with keys and values
        "token_dim": config.num_kv_heads * config.head_dim,
        "num_transformer_submodules": 1,
        "prefix_projection": False,
        "encoder_hidden_size": config.num_kv_heads * config.head_dim,
        "modules_to_save": None if head == "lm" else [score.rpartition(".")[0]],
        "inference_mode": True,
    }
    weight_files.write_safetensors(folder / ADAPTER_WEIGHTS, tensors)
    weight_files.write_text(folder / ADAPTER, json.dumps(settings, indent=2, sort_keys=True) + "\n")
