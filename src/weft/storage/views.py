"""Views of runs in a bucket: local copies of the small files of the runs.

folder = view_runs("gs://b/runs")           # used by `weft ls`, `show`, `report` and `logs`
find_view_url(folder / "e/t")               # gs://b/runs/e/t
count_view_bytes(folder / "e/t")            # size of all files of the run in the bucket
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import ConfigError
from weft.storage.buckets import BucketFolder, explain_store_errors
from weft.storage.copies import MANIFEST, find_cache_folder, split_url
from weft.writing import TEMPORARY, write

VIEWS = "views"
STAMPS = ".weft-view.json"  # file with the `ViewListing` of a view
HIDDEN_FOLDERS = ("recover",)
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class ViewListing:
    """Files of a folder in a bucket, listed when a view of the folder was made.

    Attributes:
        url: URL of the folder.
        versions: Version of each file in the view, by name.
        sizes: Size in bytes of each file in the bucket, by name, including files that are not in
            the view.
    """

    url: str
    versions: dict[str, str]
    sizes: dict[str, int]


def view_runs(url: str, *, missing_ok: bool = False) -> Path:
    """Return a local folder with current copies of the small files of all runs at or below a URL.

    Of checkpoints, only the manifests are copied; recovery points are left out. Files that have not
    changed since the last call are not copied again. Raises `ConfigError` if the URL cannot be
    read or is a file. If nothing exists at the URL, raises `ConfigError` unless `missing_ok` is
    True.
    """
    bucket = BucketFolder.open(url)
    folder = find_cache_folder() / VIEWS / split_url(url)
    with explain_store_errors(url, ConfigError):
        listing = bucket.list_files()
        if "" in listing or not (listing or missing_ok):
            raise ConfigError(f"{url}: there is no such folder in the bucket; check the spelling")
        visible = {name: stamp for name, stamp in listing.items() if is_visible(name)}
        previous = _read_listing(folder)
        known_versions = {} if previous is None else previous.versions
        for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
            name = path.relative_to(folder).as_posix()
            if path.is_file() and name not in visible and name != STAMPS:
                path.unlink()
                _remove_empty_folders(path.parent, folder)
        for name, stamp in visible.items():
            if known_versions.get(name) != stamp.version or not (folder / name).is_file():
                bucket.download(name, folder / name, stamp)
    current = ViewListing(
        bucket.url,
        {name: stamp.version for name, stamp in visible.items()},
        {name: stamp.size for name, stamp in listing.items()},
    )
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / STAMPS, json.dumps(vars(current)))
    return folder


def find_view_url(path: Path) -> str | None:
    """Return the URL of a file or folder in a view, or None if `path` is not in a view."""
    match = _find_listing(path)
    if match is None:
        return None
    listing, name = match
    return f"{listing.url.rstrip('/')}/{name}".rstrip("/")


def count_view_bytes(path: Path) -> int | None:
    """Return the bytes of a folder's files in the bucket, or None if `path` is not in a view.

    Files that are not in the view, such as weights and recovery points, are counted, too.
    """
    match = _find_listing(path)
    if match is None:
        return None
    listing, folder = match
    prefix = f"{folder}/" if folder else ""
    return sum(size for name, size in listing.sizes.items() if name.startswith(prefix))


def is_visible(name: str) -> bool:
    """Return whether a file of a run is part of a view."""
    *folders, file = name.split("/")
    if file.endswith(TEMPORARY) or not set(folders).isdisjoint(HIDDEN_FOLDERS):
        return False
    return CHECKPOINTS not in folders[:-1] or file == MANIFEST


def _find_listing(path: Path) -> tuple[ViewListing, str] | None:
    """Return the listing of the innermost view that contains `path`, and the name of `path` in it.

    Views can be nested. The innermost one is the newest, since updating a view removes the listings
    of views inside it.
    """
    root = find_cache_folder() / VIEWS
    path = path.absolute()
    for folder in (path, *path.parents):
        if not folder.is_relative_to(root):
            return None
        listing = _read_listing(folder)
        if listing is not None:
            name = path.relative_to(folder).as_posix()
            return listing, "" if name == "." else name
    return None


def _read_listing(folder: Path) -> ViewListing | None:
    """Return the listing in a folder, or None if it has none that this version of weft can read."""
    try:
        values: Any = json.loads((folder / STAMPS).read_text())
        return ViewListing(**values)
    except (OSError, ValueError, TypeError):
        return None


def _remove_empty_folders(folder: Path, view: Path) -> None:
    """Remove `folder` and then its parents inside `view`, up to the first that is not empty."""
    while folder != view and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent
