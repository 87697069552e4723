"""Files of a named dataset: a local copy, or a download.

Without a network, an error is raised at once that names the folder for a local copy.
"""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from weft.data import hub
from weft.data.named.entry import Entry
from weft.data.rows import Row
from weft.data.sources import SUFFIXES, Place, Unreadable, find_files, read_rows
from weft.errors import DataError, nearest
from weft.writing import destination, rename

READ_S = 60.0  # timeout in seconds for the next bytes of a download
PARQUET = "refs/convert/parquet"  # revision in which the hub has CONFIG/SPLIT/*.parquet files

Found = TypeVar("Found")


@dataclass(frozen=True)
class Files:
    """Training files, and files of the source's own validation split (empty if it has none)."""

    train: list[Path]
    valid: list[Path]


def copies(entry: Entry, cache: Path) -> Path:
    """Return the folder for local copies of the files, in which URL downloads are saved too."""
    return cache / "datasets" / entry.name


def locate(entry: Entry, path: str | None, cache: Path) -> Files:
    """Return the files, from `path`, the folder of copies, or the public source.

    Raises `DataError` if none are found.
    """
    at_hand = local(entry, path, cache)
    if at_hand is not None:
        return at_hand
    if entry.repo is not None:
        return chosen(entry, _from_hub(entry, cache))
    if entry.url is not None:
        return chosen(entry, _from_url(entry, cache))
    raise DataError(_missing(entry, cache, "it can be fetched from no public place"))


def local(entry: Entry, path: str | None, cache: Path) -> Files | None:
    """Return the files that are available without a network, or None."""
    if path is not None:
        place = Path(path).expanduser()
        if not place.exists():
            if place.parent.is_dir():
                siblings = [p.name for p in place.parent.iterdir()]
            else:
                siblings = []
            close = nearest(place.name, siblings, 1)
            if close:
                hint = f"did you mean {place.parent / close[0]}?"
            else:
                hint = _absent(entry, path)
            raise DataError(
                f"{entry.name}: path={path}: there is no such file or directory; {hint}"
            )
        return chosen(entry, place)
    folder = copies(entry, cache)
    if entry.url is not None and (fetched := folder / entry.url.rsplit("/", 1)[-1]).is_file():
        return chosen(entry, fetched)
    if folder.is_dir() and any(not file.name.startswith(".") for file in folder.iterdir()):
        return chosen(entry, folder)
    if entry.repo is not None:
        try:
            held = Path(huggingface_hub.snapshot_download(**_request(entry), local_files_only=True))
            return chosen(entry, held)
        except (LocalEntryNotFoundError, HfHubHTTPError, DataError, OSError):
            return None
    return None


def _absent(entry: Entry, path: str) -> str:
    """Return advice for a `path` that does not exist.

    A path without a folder comes from an Open-Assistant config section, whose files are on other
    machines.
    """
    if Path(path).name != path:
        return "check the spelling"
    option = f"datasets.{entry.name}"
    if entry.repo is not None:
        hub = f", or take the hub's with {option}.input_file_path=null"
    else:
        hub = ""
    return f"put it here, or give a copy with {option}.data_path=FILE{hub}"


def chosen(entry: Entry, place: Path) -> Files:
    """Return the files of an entry in the folder `place`; a single file is the training file.

    Raises `DataError` if the folder has no such files.
    """
    if place.is_file():
        return Files([place], [place] if entry.valid == entry.train else [])
    # A folder can contain copies of several datasets.
    place = place / entry.name if (place / entry.name).is_dir() else place
    if entry.config and (place / entry.config).is_dir():
        root = place / entry.config
    else:
        root = place
    if _is_pattern(entry.train):
        train = _matching(root, entry.train)
    else:
        train = _of_split(root, entry.train)
    if not train:
        has = ", ".join(sorted(file.name for file in root.iterdir())[:8]) or "nothing"
        raise DataError(
            f"{entry.name}: {root} has no files {entry.train!r} (it has {has}); give the file "
            f"itself as data_path"
        )
    valid: list[Path] = []
    if entry.valid is not None:
        if _is_pattern(entry.valid):
            valid = _matching(root, entry.valid)
        else:
            valid = _of_split(root, entry.valid)
    return Files(train, valid)


def named_file(entry: Entry, file: Path) -> str:
    """Return the name of a file for errors, with the name of the dataset.

    For a file from the hub, it is the name on the hub.
    """
    parts = file.parts
    if entry.repo is not None and "snapshots" in parts:
        inside = parts[parts.index("snapshots") + 2 :]
        return f"{entry.name}: {'/'.join((entry.repo, *inside))}"
    return f"{entry.name}: {file}"


def rows_of(entry: Entry, file: Path) -> Iterator[tuple[Place, Row | Unreadable]]:
    """Iterate over the rows of a file.

    The records of a plain text file, separated by `separator`, are rows `{text: ..}`.
    """
    if (
        entry.rows_in is not None
        and file.name.endswith(".json")
        and (rows := _inside(file, entry.rows_in)) is not None
    ):
        yield from ((Place(str(file), number), row) for number, row in enumerate(rows, 1))
        return
    if entry.separator is None or not file.name.endswith(".txt"):
        yield from read_rows(file)
        return
    line = 1
    for record in file.read_text(encoding="utf-8").split(entry.separator):
        if record.strip():
            yield Place(str(file), line), {"text": record}
        line += record.count("\n")


def _inside(file: Path, key: str) -> list[Row] | None:
    """Return the rows under a key of a file with one JSON object; None for files of rows."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        return None
    rows = value.get(key) if isinstance(value, dict) else None
    return rows if isinstance(rows, list) else None


def _is_pattern(which: str) -> bool:
    return "*" in which or "." in which


def _matching(root: Path, pattern: str) -> list[Path]:
    files = sorted(
        file
        for file in root.rglob("*")
        if file.is_file() and file.name.endswith((*SUFFIXES, ".txt"))
    )
    shown = [
        file
        for file in files
        if not any(part.startswith(".") for part in file.relative_to(root).parts)
    ]
    return [
        f
        for f in shown
        if fnmatch(f.relative_to(root).as_posix(), pattern) or fnmatch(f.name, pattern)
    ]


def _of_split(root: Path, split: str) -> list[Path]:
    try:
        return find_files(str(root), None if split == "train" else split)
    except DataError:
        return []


def _request(entry: Entry) -> dict[str, Any]:
    """Return the arguments of the hub request.

    It requests the files that match the entry's patterns, or all files of its configuration.
    """
    patterns = [
        which for which in (entry.train, entry.valid) if which is not None and _is_pattern(which)
    ]
    folder = entry.config or ("default" if entry.revision == PARQUET else None)
    if not patterns:
        patterns = [f"{folder}/*{suffix}" if folder else f"*{suffix}" for suffix in SUFFIXES]
    request: dict[str, Any] = {
        "repo_id": entry.repo,
        "repo_type": "dataset",
        "allow_patterns": patterns,
    }
    if entry.revision:
        return {**request, "revision": entry.revision}
    return request


def _from_hub(entry: Entry, cache: Path) -> Path:
    assert entry.repo is not None
    repo = entry.repo
    try:
        _within(
            lambda: huggingface_hub.HfApi().dataset_info(
                repo, revision=entry.revision, timeout=hub.SECONDS
            )
        )
        return Path(huggingface_hub.snapshot_download(**_request(entry)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, TimeoutError, RuntimeError) as error:
        raise DataError(_missing(entry, cache, _reason(error))) from error


def _from_url(entry: Entry, cache: Path) -> Path:
    assert entry.url is not None
    url = entry.url
    folder = copies(entry, cache)
    if not url.startswith("https://"):
        raise DataError(f"{entry.name}: url={url}: must begin with https://")
    target = folder / url.rsplit("/", 1)[-1]
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with _within(lambda: urllib.request.urlopen(url, timeout=READ_S)) as answer:
            folder.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as stream:
                while block := answer.read(1 << 20):
                    stream.write(block)
        rename(part, destination(target))
    except (OSError, TimeoutError) as error:
        part.unlink(missing_ok=True)
        raise DataError(_missing(entry, cache, _reason(error))) from error
    return target


def _within(ask: Callable[[], Found]) -> Found:
    """Return the result of `ask`.

    Raises `OSError` or `HfHubHTTPError` if `ask` fails or does not return in time.
    """
    try:
        return hub.within(hub.SECONDS, ask)
    except (OSError, HfHubHTTPError):
        raise
    except Exception as error:  # an error of the HTTP library
        raise OSError(_reason(error)) from error


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _missing(entry: Entry, cache: Path, why: str) -> str:
    """Return the error message for a failed download, with the folder for a local copy."""
    licence = f" (licence: {entry.licence})" if entry.licence else ""
    return (
        f"{entry.name}: there is no local copy, and nothing could be fetched from "
        f"{entry.origin}{licence}: {why}; put its "
        f"files in {copies(entry, cache)}, or name them with path: {{{entry.name}: {{path: "
        f"FILE_OR_FOLDER}}}}"
    )
