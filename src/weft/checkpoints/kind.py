"""Choose the backend of a model from its config.json, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import weft
from weft.checkpoints.config_file import read_config_file
from weft.checkpoints.names import CONFIG, HUB_NAME
from weft.checkpoints.prefix_files import read_prefix
from weft.registry import families

HF_BACKEND = "hf"  # backend for model types without a weft family
TORCH_BACKEND = "torch"
MEAN_POOLED = (
    # weft's own name, so that programs which know the transformers architectures refuse it
    "WeftMeanPooledRewardModel"
)
SCORE_ARCHITECTURES = ("ForSequenceClassification", MEAN_POOLED)  # architectures of reward models
# Types of bidirectional and encoder-decoder models, which no backend of weft runs.
NON_DECODER_TYPES = frozenset(
    (
        "albert",
        "bart",
        "bert",
        "bigbird",
        "camembert",
        "canine",
        "convbert",
        "deberta",
        "deberta-v2",
        "distilbert",
        "electra",
        "ernie",
        "eurobert",
        "funnel",
        "ibert",
        "layoutlm",
        "longformer",
        "luke",
        "mbart",
        "megatron-bert",
        "mobilebert",
        "modernbert",
        "mpnet",
        "mt5",
        "nezha",
        "nystromformer",
        "roberta",
        "roberta-prelayernorm",
        "roformer",
        "squeezebert",
        "t5",
        "umt5",
        "xlm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xlnet",
        "xmod",
        "yoso",
    )
)


@cache
def read_shipped_configs() -> dict[str, dict[str, Any]]:
    """Return the built-in config.json values of the models in weft's recipes, by hub name."""
    models: dict[str, dict[str, Any]] = json.loads(
        (Path(weft.__file__).parent / "recipes" / "models.json").read_text()
    )
    return models


def find_shipped_config(path: str) -> dict[str, Any] | None:
    """Return the built-in config.json values of a recipe's model, or None for other models.

    The values are used to plan a run before the model is downloaded. If the model's own config.json
    is on this machine, the built-in values are not needed, and the result is None.
    """
    if path not in read_shipped_configs() or Path(path).exists():
        return None
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(path, CONFIG), str):
        return None
    return dict(read_shipped_configs()[path])


def read_config_values(path: str) -> Mapping[str, Any]:
    """Return the values of a model's config.json, without downloading anything.

    `path` is a model directory or a hub name. The file is read from this directory, from the hub's
    local cache or from the configurations that weft contains. For a trained prefix (from prefix
    tuning), the base model's file is read. Returns an empty mapping if no file is found. Raises
    `CheckpointError` if the file is invalid; the message starts with its path.
    """
    directory = Path(path).expanduser()
    if not directory.is_dir() and HUB_NAME.fullmatch(path):
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(path, CONFIG)
        directory = Path(cached).parent if isinstance(cached, str) else directory
    if (directory / CONFIG).is_file():
        return read_config_file(directory / CONFIG, str(Path(path) / CONFIG))
    prefix = read_prefix(directory)
    if prefix is None:
        return find_shipped_config(path) or {}
    return read_config_values(prefix.base)


def is_reward_model(values: Mapping[str, Any]) -> bool:
    """Return whether the `values` of a config.json describe a reward model."""
    kinds = values.get("architectures") or []
    return any(scored in str(kind) for kind in kinds for scored in SCORE_ARCHITECTURES)


def choose_backend(values: Mapping[str, Any]) -> str:
    """Return the backend for a model: `torch`, or `hf` if weft does not implement its type."""
    kind = values.get("model_type")
    return TORCH_BACKEND if kind is None or kind in families.list_names() else HF_BACKEND


def describe_disadvantages(values: Mapping[str, Any]) -> str:
    """Return a one-line warning for a model type that weft does not implement itself.

    The warning says that the backend `hf` runs such a model, and names the disadvantages of this
    backend.
    """
    return (
        f"weft has no family for models of type {values.get('model_type')}, so backend=hf runs "
        f"it: slower, and on several "
        "devices only as whole copies (no f, t, p, c or e in a layout)"
    )
