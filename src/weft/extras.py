"""Installation commands for the optional dependencies of weft.

weft is installed from its sources, so the commands contain the path of the source folder.
"""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlparse


def install(extra: str) -> str:
    """Return the shell command that installs an extra of weft (a set of optional dependencies).

    Example for the extra "wandb": `python -m pip install '/home/me/weft[wandb]'`.
    """
    folder = find_sources()
    if folder is not None:
        return f"python -m pip install '{folder}[{extra}]'"
    return f"python -m pip install '.[{extra}]' in the folder of weft's sources"


def find_sources() -> Path | None:
    """Return the folder with weft's sources and pyproject.toml, or None if it is not found.

    This is the source folder that weft is imported from or, if a copy of weft is installed, the
    folder from which it was installed.
    """
    here = Path(__file__).resolve().parents[2]
    candidates = [here, *_read_source_folder()]
    return next((folder for folder in candidates if (folder / "pyproject.toml").is_file()), None)


def _read_source_folder() -> list[Path]:
    """Return a list with the source folder that pip recorded in direct_url.json.

    The list is empty if pip recorded no local folder.
    """
    try:
        written = distribution("weft").read_text("direct_url.json")
        url = urlparse(json.loads(written or "{}").get("url", ""))
    except (PackageNotFoundError, ValueError, AttributeError):
        return []
    return [Path(unquote(url.path))] if url.scheme == "file" else []
