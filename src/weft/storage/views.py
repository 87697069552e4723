"""Look at the runs in a bucket: copies of their small files, without weights and recovery points.

folder = view_runs("gs://b/runs")           # for `weft ls`, `show`, `report` and `logs`
find_view_url(folder / "e/t")               # gs://b/runs/e/t
count_view_bytes(folder / "e/t")            # of all files in the bucket
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
STAMPS = ".weft-view.json"  # a `ViewListing`
HIDDEN_FOLDERS = ("recover",)
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class ViewListing:
    """Listing of the folder in the bucket that a view shows.

    Attributes:
        url: URL of the folder
        versions: version of each file that the view has, by name
        sizes: bytes of each file in the bucket, by name, also of those that the view leaves out
    """

    url: str
    versions: dict[str, str]
    sizes: dict[str, int]


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
        listed = _read_listing(folder)
        known = {} if listed is None else listed.versions
        for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
            name = path.relative_to(folder).as_posix()
            if path.is_file() and name not in wanted and name != STAMPS:
                path.unlink()
                _remove_empty_folders(path.parent, folder)
        for name, stamp in wanted.items():
            if known.get(name) != stamp.version or not (folder / name).is_file():
                bucket.download(name, folder / name, stamp)
    current = ViewListing(
        bucket.url,
        {name: stamp.version for name, stamp in wanted.items()},
        {name: stamp.size for name, stamp in listing.items()},
    )
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / STAMPS, json.dumps(vars(current)))
    return folder


def find_view_url(path: Path) -> str | None:
    """Return the URL of a file or folder in a view, or None if `path` is not in a view."""
    place = _find_listing(path)
    if place is None:
        return None
    listing, name = place
    return f"{listing.url.rstrip('/')}/{name}".rstrip("/")


def count_view_bytes(path: Path) -> int | None:
    """Return the size of a folder's files in the bucket, or None if `path` is not in a view.

    The sizes are those of the bucket's listing, so that weights and recovery points count too.
    """
    place = _find_listing(path)
    if place is None:
        return None
    listing, folder = place
    beginning = f"{folder}/" if folder else ""
    return sum(size for name, size in listing.sizes.items() if name.startswith(beginning))


def is_visible(name: str) -> bool:
    """Return whether a file of a run is part of a view."""
    *folders, file = name.split("/")
    if file.endswith(TEMPORARY) or not set(folders).isdisjoint(HIDDEN_FOLDERS):
        return False
    return CHECKPOINTS not in folders[:-1] or file == MANIFEST


def _find_listing(path: Path) -> tuple[ViewListing, str] | None:
    """Return the listing of the view that has `path`, and the name of `path` in it.

    A view can contain one of a folder inside it, which is then the newer one.
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
    """Return the listing in a folder; None if it has none, or one of an earlier version."""
    try:
        values: Any = json.loads((folder / STAMPS).read_text())
        return ViewListing(**values)
    except (OSError, ValueError, TypeError):
        return None


def _remove_empty_folders(folder: Path, view: Path) -> None:
    """Remove a folder of a view, and those above it, if they are empty."""
    while folder != view and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent
