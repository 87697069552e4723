"""Look at the runs in a bucket: copies of their small files, without weights and recovery points.

folder = view_runs("gs://b/runs")    # for `weft ls`, `show`, `report` and `logs`
"""

from __future__ import annotations

import json
from pathlib import Path

from weft.errors import ConfigError
from weft.storage.buckets import BucketFolder, explain_store_errors
from weft.storage.copies import MANIFEST, find_cache_folder, split_url
from weft.writing import TEMPORARY, write

VIEWS = "views"
STAMPS = ".weft-view.json"  # versions of the files in a view
HIDDEN_FOLDERS = ("recover",)
CHECKPOINTS = "checkpoints"


def view_runs(url: str, *, missing_ok: bool = False) -> Path:
    """Return a local folder with the small files of all runs at or below a URL, as they are now.

    Checkpoints have only their manifests, and recovery points are left out. Files that have not
    changed since the last call are not copied again. Raises `ConfigError` if the URL cannot be
    read and, unless `missing_ok` is True, if there is nothing there.
    """
    bucket = BucketFolder.open(url)
    folder = find_cache_folder() / VIEWS / split_url(url)
    with explain_store_errors(url, ConfigError):
        listing = bucket.list_files()
        if "" in listing or not (listing or missing_ok):
            raise ConfigError(f"{url}: there is no such folder in the bucket; check the spelling")
        wanted = {name: stamp for name, stamp in listing.items() if is_visible(name)}
        known = _read_stamps(folder)
        for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
            name = path.relative_to(folder).as_posix()
            if path.is_file() and name not in wanted and name != STAMPS:
                path.unlink()
        for name, stamp in wanted.items():
            if known.get(name) != stamp.version or not (folder / name).is_file():
                bucket.download(name, folder / name, stamp)
    stamps = {name: stamp.version for name, stamp in wanted.items()}
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / STAMPS, json.dumps(stamps))
    return folder


def is_visible(name: str) -> bool:
    """Return whether a file of a run is part of a view."""
    *folders, file = name.split("/")
    if file.endswith(TEMPORARY) or not set(folders).isdisjoint(HIDDEN_FOLDERS):
        return False
    return CHECKPOINTS not in folders[:-1] or file == MANIFEST


def _read_stamps(folder: Path) -> dict[str, str]:
    try:
        return dict(json.loads((folder / STAMPS).read_text()))
    except (OSError, ValueError):
        return {}
