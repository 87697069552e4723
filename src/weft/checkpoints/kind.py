"""What a model's config.json says of what can run it, without torch."""

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

OTHERS_RUN = "hf"  # the backend of models of types that weft has no family for
OWN_RUN = "torch"
MEAN_POOLED = (
    # weft's own architecture: a program that goes by a name of transformers' refuses it
    "WeftMeanPooledRewardModel"
)
SCORED = ("ForSequenceClassification", MEAN_POOLED)  # architectures of reward models
# Types of models that read a text from both sides, or in two halves: no decoders, so that no
# backend of weft runs them.
NO_DECODERS = frozenset(
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
def shipped_configs() -> dict[str, dict[str, Any]]:
    """Return what comes with weft of the models of its recipes: their names on the hub, and the
    values of their config.json.
    """
    models: dict[str, dict[str, Any]] = json.loads(
        (Path(weft.__file__).parent / "recipes" / "models.json").read_text()
    )
    return models


def shipped_config(path: str) -> dict[str, Any] | None:
    """Return the values that come with weft for a model of a recipe whose own config.json is not on
    this machine, else None.

    A plan reads them. A run has fetched the file before it looks.
    """
    if path not in shipped_configs() or Path(path).exists():
        return None
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(path, CONFIG), str):
        return None
    return dict(shipped_configs()[path])


def values_of(path: str) -> Mapping[str, Any]:
    """The config.json of a model on this machine, in the hub's cache, or among those of the
    recipes; of a prefix its model's; empty where there is none. Raises `CheckpointError` that
    begins with the file for one that cannot be used.
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
        return shipped_config(path) or {}
    return values_of(prefix.base)


def gives_scores(values: Mapping[str, Any]) -> bool:
    """Return whether a model is a reward model according to its config.json."""
    kinds = values.get("architectures") or []
    return any(scored in str(kind) for kind in kinds for scored in SCORED)


def backend_of(values: Mapping[str, Any]) -> str:
    """The backend that runs a model by its config.json: `torch`, or `hf` where weft has no family
    of its type.
    """
    kind = values.get("model_type")
    return OWN_RUN if kind is None or kind in families.names() else OTHERS_RUN


def cost(values: Mapping[str, Any]) -> str:
    """Return a line on the disadvantages of a model type without a weft family."""
    return (
        f"weft has no family for models of type {values.get('model_type')}, so backend=hf runs "
        f"it: slower, and on several "
        "devices only as whole copies (no f, t, p, c or e in a layout)"
    )
