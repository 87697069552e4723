"""How to install what an optional part of weft needs. weft is installed from its sources, so that
is what the command names.
"""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlparse


def install(extra: str) -> str:
    """The command that adds an extra, such as `python -m pip install '/home/me/weft[wandb]'`."""
    folder = sources()
    if folder is not None:
        return f"python -m pip install '{folder}[{extra}]'"
    return f"python -m pip install '.[{extra}]' in the folder of weft's sources"


def sources() -> Path | None:
    """The folder that weft was installed from, or that it runs in; None where it is gone."""
    here = Path(__file__).resolve().parents[2]
    found = [here, *_installed_from()]
    return next((folder for folder in found if (folder / "pyproject.toml").is_file()), None)


def _installed_from() -> list[Path]:
    """What pip wrote down about it."""
    try:
        written = distribution("weft").read_text("direct_url.json")
        url = urlparse(json.loads(written or "{}").get("url", ""))
    except (PackageNotFoundError, ValueError, AttributeError):
        return []
    return [Path(unquote(url.path))] if url.scheme == "file" else []
