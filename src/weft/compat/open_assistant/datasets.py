"""Convert Open-Assistant's lists of datasets to entries of `dataset.sources`.

A list item is `- name`, or `- name:` with the dataset's parameters indented below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Parameters that every entry accepts -> the key of a source. Other parameters go into `args`.
PARAMETERS = {
    "fraction": "fraction",
    "size": "size",
    "weight": "weight",
    "val_split": "valid_split",
    "max_val_set": "max_valid",
    "data_path": "path",
    # local copy for oasst_export and augment_oasst; preferred to the hub's
    "input_file_path": "path",
}
# a missing path with one of these endings is a file, any other a folder
FILES = (".jsonl", ".json", ".gz", ".parquet")
SHARES = ("fraction", "size", "weight")  # mutually exclusive
# keys of a source in weft's spelling
SOURCE_KEYS = ("name", "path", "valid_path", "valid_split", "max_valid", "args")
# hf_dataset_name of oasst_export -> name of the dataset fetched from there
HUB_DATASETS = {"OpenAssistant/oasst1": "oasst_export", "OpenAssistant/oasst2": "oasst2"}
VALID_SPLIT = 0.2  # Open-Assistant's default evaluation share
ENTRY_SYNTAX = "an entry is '- name' or '- name:' with its parameters (fraction, size, val_split, ...) indented below it"


class InvalidDatasetEntry(Exception):
    """Raised if a list of datasets has an invalid item.

    `index` is the position of the item, or -1 if the whole list is invalid. The message is the
    reason.
    """

    def __init__(self, index: int, why: str) -> None:
        super().__init__(why)
        self.index = index


def convert_entries(entries: Any) -> list[dict[str, Any]]:
    """Convert a list of datasets to entries of `dataset.sources`.

    The list can also be a string of names separated by commas. Raises `InvalidDatasetEntry` for an
    invalid list or item.
    """
    if isinstance(entries, str):
        entries = [each for each in entries.split(",") if each]
    if not isinstance(entries, Sequence):
        raise InvalidDatasetEntry(-1, f"must be a list; {ENTRY_SYNTAX}")
    return [_convert_entry(entry, index) for index, entry in enumerate(entries)]


def _convert_entry(entry: Any, index: int) -> dict[str, Any]:
    if isinstance(entry, str):
        return {"named": entry}
    if not isinstance(entry, Mapping) or not entry:
        raise InvalidDatasetEntry(index, f"{entry!r} is not a dataset; {ENTRY_SYNTAX}")
    name, *others = entry
    parameters = entry[name]
    if others:
        raise InvalidDatasetEntry(
            index,
            f"{', '.join(map(str, others))} is on the same level as {name!r}; indent it below "
            f"'- {name}:', or begin it with '- '",
        )
    if parameters is None:
        return {"named": str(name)}
    if not isinstance(parameters, Mapping):
        raise InvalidDatasetEntry(
            index, f"{name}: {parameters!r} is not a parameter; {ENTRY_SYNTAX}"
        )
    return _build_source(str(name), parameters, index)


def _build_source(name: str, parameters: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return the entry of `dataset.sources` for the dataset `name` with the given parameters.

    `index` is the dataset's position in the user's list, for error messages. Raises
    `InvalidDatasetEntry` for an unknown hf_dataset_name.
    """
    source: dict[str, Any] = {"named": name}
    given = {}
    for key, value in parameters.items():
        if value is not None:
            given[str(key)] = value
    if "data_path" in given and "input_file_path" in given:
        given["path"] = _join_folder(str(given.pop("data_path")), str(given.pop("input_file_path")))
    hub = given.pop("hf_dataset_name", None)
    # a local file is preferred to the hub
    if hub is not None and not {"path", "data_path", "input_file_path"} & given.keys():
        if hub not in HUB_DATASETS:
            raise InvalidDatasetEntry(
                index,
                f"{name}: hf_dataset_name={hub}: must be {' or '.join(HUB_DATASETS)}; give another as "
                f"data_path, a copy",
            )
        source["named"] = HUB_DATASETS[hub] if name == "oasst_export" else name
    for key, value in given.items():
        if key in PARAMETERS:
            source[PARAMETERS[key]] = value
        elif key in SOURCE_KEYS:
            source[key] = value
        else:
            source.setdefault("args", {})[key] = value
    return source


def _join_folder(data_path: str, file: str) -> str:
    """Return the path of `file` in the folder `data_path`, or `data_path` if that is a file."""
    place = Path(data_path).expanduser()
    is_file = place.is_file() or (place.suffix in FILES and not place.is_dir())
    return data_path if is_file else str(Path(data_path) / file)


def scale_entries(entries: Sequence[Mapping[str, Any]], share: float) -> list[dict[str, Any]]:
    """Return copies of entries of `dataset.sources`, with the rows per epoch multiplied by `share`.

    Raises `InvalidDatasetEntry` for an entry with a weight, because a weight does not determine the
    number of rows.
    """
    scaled_entries = []
    for index, entry in enumerate(entries):
        if "weight" in entry:
            raise InvalidDatasetEntry(index, "weight has no share of an epoch; write fraction")
        if "size" in entry:
            scaled_entries.append({**entry, "size": max(1, round(entry["size"] * share))})
        else:
            scaled_entries.append({**entry, "fraction": entry.get("fraction", 1.0) * share})
    return scaled_entries


def limit_validation(entries: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return copies of the entries, with `max_valid` set to `count` if it is unset or higher.

    `entries` are entries of `dataset.sources`, and `max_valid` limits their validation rows.
    """
    return [{**entry, "max_valid": min(count, entry.get("max_valid", count))} for entry in entries]
