"""Files of a named dataset, from a local copy or a download.

If the network is unavailable, downloads fail within seconds, with an error that names the folder in
which to put a local copy.
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
from weft.data.named.catalogue import CatalogueEntry
from weft.data.rows import Row
from weft.data.sources import SUFFIXES, RowLocation, UnreadableRow, find_files, read_rows
from weft.errors import DataError
from weft.reading import suggest_sibling
from weft.writing import rename, resolve_destination

READ_TIMEOUT_S = 60.0  # timeout in seconds for the next bytes of a download
# revision in which the hub has CONFIG/SPLIT/*.parquet files
PARQUET_REVISION = "refs/convert/parquet"

Found = TypeVar("Found")


@dataclass(frozen=True)
class DatasetFiles:
    """Training and validation files of a named dataset.

    `valid` is empty if the dataset has no validation split.
    """

    train: list[Path]
    valid: list[Path]


def find_copies_folder(entry: CatalogueEntry, cache: Path) -> Path:
    """Return the folder in which a user can put local copies of the dataset's files.

    Files downloaded from a URL are saved there too.
    """
    return cache / "datasets" / entry.name


def locate(entry: CatalogueEntry, path: str | None, cache: Path) -> DatasetFiles:
    """Return the files of a named dataset: those at `path`, a local copy, or downloaded files.

    Raises `DataError` if no files are found.
    """
    local = find_local(entry, path, cache)
    if local is not None:
        return local
    if entry.repo is not None:
        return choose_files(entry, _download_from_hub(entry, cache))
    if entry.url is not None:
        return choose_files(entry, _download_from_url(entry, cache))
    raise DataError(_describe_missing(entry, cache, "it can be fetched from no public place"))


def find_local(entry: CatalogueEntry, path: str | None, cache: Path) -> DatasetFiles | None:
    """Return the files of a dataset that are available without a network, or None.

    Raises `DataError` if `path` is given and does not exist.
    """
    if path is not None:
        place = Path(path).expanduser()
        if not place.exists():
            close = suggest_sibling(place)
            if close is not None:
                hint = f"did you mean {close}?"
            else:
                hint = _advise_on_path(entry, path)
            raise DataError(
                f"{entry.name}: path={path}: there is no such file or directory; {hint}"
            )
        return choose_files(entry, place)
    folder = find_copies_folder(entry, cache)
    if entry.url is not None and (fetched := folder / entry.url.rsplit("/", 1)[-1]).is_file():
        return choose_files(entry, fetched)
    if folder.is_dir() and any(not file.name.startswith(".") for file in folder.iterdir()):
        return choose_files(entry, folder)
    if entry.repo is not None:
        try:
            copy = Path(
                huggingface_hub.snapshot_download(**_build_request(entry), local_files_only=True)
            )
            return choose_files(entry, copy)
        except (LocalEntryNotFoundError, HfHubHTTPError, DataError, OSError):
            return None
    return None


def _advise_on_path(entry: CatalogueEntry, path: str) -> str:
    """Return advice for a `path` that does not exist, to be appended to the error message.

    A path without a folder usually comes from an Open-Assistant configuration, so the advice says
    how to provide a copy of the file. For other paths, the advice is to check the spelling.
    """
    if Path(path).name != path:
        return "check the spelling"
    option = f"datasets.{entry.name}"
    if entry.repo is not None:
        hub = f", or take the hub's with {option}.input_file_path=null"
    else:
        hub = ""
    return f"put it here, or give a copy with {option}.data_path=FILE{hub}"


def choose_files(entry: CatalogueEntry, place: Path) -> DatasetFiles:
    """Return an entry's training and validation files in the folder `place`.

    `place` can also be a single training file. Raises `DataError` if the folder has no training
    files of the entry.
    """
    if place.is_file():
        return DatasetFiles([place], [place] if entry.valid == entry.train else [])
    # A folder can contain copies of several datasets.
    place = place / entry.name if (place / entry.name).is_dir() else place
    if entry.config and (place / entry.config).is_dir():
        root = place / entry.config
    else:
        root = place
    if _is_pattern(entry.train):
        train = _find_matching(root, entry.train)
    else:
        train = _find_split_files(root, entry.train)
    if not train:
        has = ", ".join(sorted(file.name for file in root.iterdir())[:8]) or "nothing"
        raise DataError(
            f"{entry.name}: {root} has no files {entry.train!r} (it has {has}); give the file "
            f"itself as data_path"
        )
    valid: list[Path] = []
    if entry.valid is not None:
        if _is_pattern(entry.valid):
            valid = _find_matching(root, entry.valid)
        else:
            valid = _find_split_files(root, entry.valid)
    return DatasetFiles(train, valid)


def format_file_name(entry: CatalogueEntry, file: Path) -> str:
    """Format the name of a file, with the name of its dataset, for error messages.

    A file from the hub is named by its path on the hub.
    """
    parts = file.parts
    if entry.repo is not None and "snapshots" in parts:
        inside = parts[parts.index("snapshots") + 2 :]
        return f"{entry.name}: {'/'.join((entry.repo, *inside))}"
    return f"{entry.name}: {file}"


def read_entry_rows(
    entry: CatalogueEntry, file: Path
) -> Iterator[tuple[RowLocation, Row | UnreadableRow]]:
    """Yield (location, row) for each row of a file of a named dataset.

    If the entry has a `separator`, a `.txt` file is split into records there, and each record
    becomes a row with the single column `text`. If the entry has `rows_in`, the rows of a `.json`
    file are read from the list inside it that `rows_in` names.
    """
    if (
        entry.rows_in is not None
        and file.name.endswith(".json")
        and (rows := _read_nested_rows(file, entry.rows_in)) is not None
    ):
        yield from ((RowLocation(str(file), number), row) for number, row in enumerate(rows, 1))
        return
    if entry.separator is None or not file.name.endswith(".txt"):
        yield from read_rows(file)
        return
    line = 1
    for record in file.read_text(encoding="utf-8").split(entry.separator):
        if record.strip():
            yield RowLocation(str(file), line), {"text": record}
        line += record.count("\n")


def _read_nested_rows(file: Path, key: str) -> list[Row] | None:
    """Return the list of rows under `key`, if the file is one JSON object with such a list.

    Returns None for other files.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        return None
    rows = value.get(key) if isinstance(value, dict) else None
    return rows if isinstance(rows, list) else None


def _is_pattern(selection: str) -> bool:
    """Return whether a selection of files is a pattern of file names, and not a split."""
    return "*" in selection or "." in selection


def _find_matching(root: Path, pattern: str) -> list[Path]:
    files = sorted(
        file
        for file in root.rglob("*")
        if file.is_file() and file.name.endswith((*SUFFIXES, ".txt"))
    )
    visible_files = []
    for file in files:
        if not any(part.startswith(".") for part in file.relative_to(root).parts):
            visible_files.append(file)
    matching: list[Path] = []
    for file in visible_files:
        path = file.relative_to(root).as_posix()
        if fnmatch(path, pattern) or fnmatch(file.name, pattern):
            matching.append(file)
    return matching


def _find_split_files(root: Path, split: str) -> list[Path]:
    try:
        return find_files(str(root), None if split == "train" else split)
    except DataError:
        return []


def _build_request(entry: CatalogueEntry) -> dict[str, Any]:
    """Return the keyword arguments for downloading an entry from the hub.

    They select the files that match the entry's patterns, or all data files of its configuration.
    """
    patterns = []
    for selection in (entry.train, entry.valid):
        if selection is not None and _is_pattern(selection):
            patterns.append(selection)
    folder = entry.config or ("default" if entry.revision == PARQUET_REVISION else None)
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


def _download_from_hub(entry: CatalogueEntry, cache: Path) -> Path:
    assert entry.repo is not None
    repo = entry.repo
    try:
        _call_with_timeout(
            lambda: huggingface_hub.HfApi().dataset_info(
                repo, revision=entry.revision, timeout=hub.TIMEOUT_SECONDS
            )
        )
        return Path(huggingface_hub.snapshot_download(**_build_request(entry)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, TimeoutError, RuntimeError) as error:
        raise DataError(_describe_missing(entry, cache, _explain_error(error))) from error


def _download_from_url(entry: CatalogueEntry, cache: Path) -> Path:
    assert entry.url is not None
    url = entry.url
    folder = find_copies_folder(entry, cache)
    if not url.startswith("https://"):
        raise DataError(f"{entry.name}: url={url}: must begin with https://")
    target = folder / url.rsplit("/", 1)[-1]
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with _call_with_timeout(
            lambda: urllib.request.urlopen(url, timeout=READ_TIMEOUT_S)
        ) as answer:
            folder.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as stream:
                while block := answer.read(1 << 20):
                    stream.write(block)
        rename(part, resolve_destination(target))
    except (OSError, TimeoutError) as error:
        part.unlink(missing_ok=True)
        raise DataError(_describe_missing(entry, cache, _explain_error(error))) from error
    return target


def _call_with_timeout(ask: Callable[[], Found]) -> Found:
    """Call `ask` with a timeout and return its result.

    Raises `OSError` or `HfHubHTTPError` if `ask` fails or does not return in time.
    """
    try:
        return hub.call_with_timeout(hub.TIMEOUT_SECONDS, ask)
    except (OSError, HfHubHTTPError):
        raise
    except Exception as error:  # an error of the HTTP library
        raise OSError(_explain_error(error)) from error


def _explain_error(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _describe_missing(entry: CatalogueEntry, cache: Path, reason: str) -> str:
    """Format the error message for a failed download.

    `reason` is the reason for the failure. The message names the folder for a local copy.
    """
    licence = f" (licence: {entry.licence})" if entry.licence else ""
    return (
        f"{entry.name}: there is no local copy, and nothing could be fetched from "
        f"{entry.origin}{licence}: {reason}; put its files in {find_copies_folder(entry, cache)}, "
        f"or name them with path: {{{entry.name}: {{path: FILE_OR_FOLDER}}}}"
    )
