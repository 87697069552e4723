"""Short names of files, models and servers, which do not depend on the machine.

A path or URL is reduced to the name at its end. Names on the Hugging Face hub are not changed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.observe.jsonl import CHECKPOINTS, STEP

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.*", re.DOTALL)
PATH_STARTS = ("/", "~", "./", "../")
EMBEDDED_PATH = re.compile(r"(?<![\w<:/])~?/(?:[\w.@+-]+/)+([\w.@+-]+)")
DATA_SUFFIXES = (".json", ".jsonl", ".gz", ".parquet", ".arrow", ".txt", ".yaml", ".csv", ".py")


def is_hub_name(text: str, folder: Path) -> bool:
    """Return whether a model or dataset name can only be a name on the hub, not a path.

    `folder` is the folder to which a path is relative.
    """
    return (
        HUB_NAME.fullmatch(text) is not None
        and not text.endswith(DATA_SUFFIXES)
        and not _is_existing_path(folder / text)
    )


def _is_existing_path(path: Path) -> bool:
    """Return whether a file or folder exists; False for a text that cannot be a path."""
    try:
        return path.exists()
    except (OSError, ValueError):  # too long for a path, or with a NUL character
        return False


def shorten_place(text: str, folder: Path) -> str:
    """Return the name at the end of a path or URL; other texts are returned unchanged.

    A checkpoint of a run becomes `E/T@step40:actor`, where E is the experiment and T the trial.
    Names on the hub are kept. In longer texts, absolute paths are shortened. `folder` is the folder
    to which paths are relative.
    """
    if "\n" in text or (" " in text and not text.startswith(PATH_STARTS)):
        return EMBEDDED_PATH.sub(lambda match: match[1], text)
    if "/" not in text or is_hub_name(text, folder):
        return text
    is_url = URL.fullmatch(text) is not None
    looks_local = text.startswith(PATH_STARTS) or text.endswith(DATA_SUFFIXES)
    if not (is_url or looks_local or _is_existing_path(folder / text)):
        return EMBEDDED_PATH.sub(lambda match: match[1], text)
    parts = Path(text.split("://", 1)[-1]).parts
    if len(parts) > 4 and parts[-3] == CHECKPOINTS and STEP.fullmatch(parts[-1]):
        return f"{parts[-5]}/{parts[-4]}@{parts[-1]}:{parts[-2]}"
    if is_url and len(parts) < 3:
        return "URL"  # of a server
    return parts[-1] if parts else text


def shorten_places(value: Any, folder: Path) -> Any:
    """Return nested plain values with `shorten_place` applied to every text, keys included."""
    if isinstance(value, Mapping):
        shortened = {}
        for key, item in value.items():
            name = shorten_place(key, folder) if isinstance(key, str) else key
            while name in shortened:  # two folders can have files of the same name
                name = f"{name}'"
            shortened[name] = shorten_places(item, folder)
        return shortened
    if isinstance(value, list | tuple):
        return [shorten_places(item, folder) for item in value]
    return shorten_place(value, folder) if isinstance(value, str) else value
