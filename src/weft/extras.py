"""Installation commands for the optional dependencies of weft.

weft is installed from its sources, so the commands contain the path of the source folder.
"""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlparse


def install(extra: str) -> str:
    """Return the command that installs the optional dependencies `extra`.

    Example: `python -m pip install '/home/me/weft[wandb]'`.
    """
    folder = find_sources()
    if folder is not None:
        return f"python -m pip install '{folder}[{extra}]'"
    return f"python -m pip install '.[{extra}]' in the folder of weft's sources"


def find_sources() -> Path | None:
    """Return the folder of weft's sources, or None if the folder no longer exists.

    This is the folder that weft runs in or, if weft was installed, the folder from which it was
    installed.
    """
    here = Path(__file__).resolve().parents[2]
    candidates = [here, *_read_source_folder()]
    return next((folder for folder in candidates if (folder / "pyproject.toml").is_file()), None)


def _read_source_folder() -> list[Path]:
    """Return a list with the source folder that pip recorded in direct_url.json, or [] if unknown."""
    try:
        written = distribution("weft").read_text("direct_url.json")
        url = urlparse(json.loads(written or "{}").get("url", ""))
    except (PackageNotFoundError, ValueError, AttributeError):
        return []
    return [Path(unquote(url.path))] if url.scheme == "file" else []
