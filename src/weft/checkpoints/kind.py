"""What a model's config.json says of what can run it, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.checkpoints.names import CONFIG, HUB_NAME
from weft.errors import CheckpointError
from weft.registry import families

OTHERS_RUN = "hf"  # the backend of models of types that weft has no family for
OWN_RUN = "torch"


def read_values(where: str, directory: Path) -> Mapping[str, Any]:
    """The directory's config.json. Raises `CheckpointError` that begins with `where` where it is no JSON object."""
    try:
        values = json.loads((directory / CONFIG).read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{where}: {directory / CONFIG} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{where}: {directory / CONFIG} does not hold a JSON object")
    return values


def values_of(path: str) -> Mapping[str, Any]:
    """The config.json of a model on this machine or in the hub's cache; empty where it is in neither."""
    directory = Path(path).expanduser()
    if not directory.is_dir() and HUB_NAME.fullmatch(path):
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(path, CONFIG)
        directory = Path(cached).parent if isinstance(cached, str) else directory
    return read_values(path, directory) if (directory / CONFIG).is_file() else {}


def backend_of(values: Mapping[str, Any]) -> str:
    """The backend that runs a model by its config.json: `torch`, or `hf` where weft has no family of its type."""
    kind = values.get("model_type")
    return OWN_RUN if kind is None or kind in families.names() else OTHERS_RUN


def cost(values: Mapping[str, Any]) -> str:
    """What it costs that weft has no family of a model's type, in a line."""
    return (
        f"weft has no family for models of type {values.get('model_type')}, so backend=hf runs it: slower, and on several "
        "devices only as whole copies (no f, t, p, c or e in a layout)"
    )
