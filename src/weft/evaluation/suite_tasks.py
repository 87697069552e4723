"""Tasks of lm-evaluation-harness: found by name, checked, and read without a network if possible.

Task files in the user's folders come first; the harness' own tasks are indexed only for other
names, since that takes seconds. A data set of the hub is read from a local copy if there is one.
Errors are found before a model is loaded, and name the file and the line.

This module imports lm_eval when a function needs it.
"""

from __future__ import annotations

import importlib.util
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from jinja2 import TemplateError

from weft import extras
from weft.errors import ConfigError, DataError, build_unknown_name_error, find_nearest
from weft.evaluation.catalogue import (
    CatalogueOptions,
    list_names,
    resolve_tasks,
    silence_logs,
)
from weft.evaluation.task_scoring import score_program
from weft.reading import refuse_url
from weft.writing import write

LEAST_VERSION = (0, 4, 13)
LIBRARY = "lm_eval"
# Formats that the library `datasets` reads from files; other values of dataset_path name a data set.
FILE_FORMATS = ("json", "parquet", "csv", "text", "arrow", "pandas", "xml")
CHECKED_ITEMS = 2000  # items of a task whose targets are checked before a model is loaded
COPIES = "~/.cache/weft/eval"  # default folder of copies of data sets


@dataclass(frozen=True)
class TaskSelection:
    """Tasks to evaluate.

    Attributes:
        names: Names of tasks, groups or tags, patterns of names, or paths of task files.
        include_path: Folders with task files.
        copies: Folder with copies of data sets of the hub, as OWNER/NAME below it.
    """

    names: Sequence[str]
    include_path: Sequence[Path] = ()
    copies: Path = Path(COPIES)


@dataclass(frozen=True)
class LoadedTasks:
    """Tasks and groups of lm_eval with their data, and the task manager that knows their names."""

    manager: Any
    tasks: Sequence[Any]


def require_harness(what: str = "weft eval suite") -> None:
    """Raise `ConfigError` if lm-evaluation-harness, which `what` needs, is missing or too old."""
    least = ".".join(map(str, LEAST_VERSION))
    try:
        installed = version(LIBRARY) if importlib.util.find_spec(LIBRARY) else ""
    except PackageNotFoundError:
        installed = ""
    numbers = tuple(int(part) for part in installed.split(".")[:3] if part.isdigit())
    if not installed or numbers < LEAST_VERSION:
        has = f"version {installed} is installed" if installed else "it is not installed"
        raise ConfigError(
            f"{what} needs lm_eval {least} or newer, and {has}; {extras.install('eval')}"
        )


def load_named_tasks(names: Sequence[str], options: CatalogueOptions) -> LoadedTasks:
    """Return tasks of weft's catalogue and of lm_eval by name, ready to be run.

    Everything is checked that needs no model: see `catalogue.resolve_tasks`, `open_manager` and
    `load_tasks` for the errors.
    """
    built, others = resolve_tasks(names, options)
    if not others and built:
        return LoadedTasks(open_empty_manager(), built)
    manager, expanded_names = open_manager(TaskSelection(others, options.include_path))
    built += load_tasks(manager, expanded_names, options.folder, allow_code=options.allow_code)
    return LoadedTasks(manager, built)


def open_manager(selection: TaskSelection) -> tuple[Any, list[str]]:
    """Return a task manager that knows the tasks of a selection, and the names of these tasks.

    The manager is a `lm_eval.tasks.TaskManager`. Patterns and paths are replaced by names. Raises
    `ConfigError` for a folder that does not exist, for no name, and for an unknown name, with the
    nearest one. Raises `DataError` if an unknown name may be in a task file that cannot be read.
    """
    from lm_eval.tasks import TaskManager

    if not selection.names:
        raise ConfigError("--tasks: no task is named; name one or several, as in --tasks a,b")
    files = {name: Path(name).expanduser().resolve() for name in selection.names}
    files = {name: file for name, file in files.items() if file.is_file()}
    folders = [file.parent for file in files.values()]
    for folder in selection.include_path:
        refuse_url(folder, f"--include_path {folder}", ConfigError)
        if not folder.expanduser().is_dir():
            raise ConfigError(f"--include_path {folder}: there is no such folder; name another")
        folders.append(folder.expanduser().resolve())
    folders = list(dict.fromkeys(folders))
    with silence_logs():
        manager = TaskManager(include_path=folders, include_defaults=False)
        if not all(_find_matches(manager, name, files) for name in selection.names):
            manager = TaskManager(include_path=folders)
    names: list[str] = []
    for name in selection.names:
        matches = _find_matches(manager, name, files)
        if not matches:
            check_files([files[name]] if name in files else _list_files(folders))
            known = [*manager.all_tasks, *list_names()]
            raise build_unknown_name_error("task", name, known)
        names += matches
    return manager, list(dict.fromkeys(names))


def open_empty_manager() -> Any:
    """Return a task manager that knows no names, for tasks that are built already."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=False)


def _find_matches(manager: Any, name: str, files: Mapping[str, Path]) -> list[str]:
    """Return the known tasks that a name, a pattern or one of the task files stands for."""
    if name in files:
        places = manager.task_index.items()
        return [known for known, entry in places if entry.yaml_path == files[name]]
    if any(sign in name for sign in "*?["):
        return list(manager.match_tasks([name]))
    return [name] if name in manager.task_index else []


def load_tasks(
    manager: Any, names: Sequence[str], copies: Path, *, allow_code: bool = False
) -> list[Any]:
    """Return the tasks and groups of these names, with their data.

    `copies` is the folder with copies of data sets of the hub. With `allow_code`, tasks may run
    programs that the model writes, in weft's sandbox. Raises `DataError` for a task file
    with an error (FILE:LINE), and for data sets that are neither on this machine nor on the hub.
    Raises `ConfigError` for tasks that weft does not run.
    """
    on_hub: dict[str, str] = {}
    built: list[Any] = []
    with tempfile.TemporaryDirectory(prefix="weft-tasks-") as scratch:
        files: dict[str, Path] = {}
        for name, entry in _list_leaves(manager, names):
            config = entry.cfg or {}
            changes = find_local_data(config, entry.yaml_path, copies)
            dataset = str(changes.get("dataset_path", config.get("dataset_path") or ""))
            if _is_on_hub(dataset, config):
                on_hub.setdefault(dataset, name)
            files[name] = entry.yaml_path
            if changes and entry.yaml_path is not None:
                # The harness reads the file again: give it one with these changes.
                changed = Path(scratch) / f"{len(files)}.yaml"
                write(changed, yaml.safe_dump({"include": str(entry.yaml_path), **changes}))
                entry.yaml_path = changed
        _check_hub(on_hub, copies)
        for name in names:
            with _explain_task_errors(name, manager.task_index[name].yaml_path, files):
                loaded = manager.load([name])
                groups = loaded.get("groups", {})
                children = {child for each in groups.values() for child in each.child_names}
                for own, each in [*groups.items(), *loaded["tasks"].items()]:
                    if own not in children:
                        built.append(each)
    try:
        tasks = manager.load(built)["tasks"]
    except ValueError as error:  # a task in two of the groups
        raise ConfigError(f"--tasks {','.join(names)}: {error}; name only one of them") from error
    for name, task in tasks.items():
        _check_runs(name, task, allow_code)
        _check_metrics(name, task, files.get(name))
        _check_targets(name, task, files.get(name))
    return built


def _check_runs(name: str, task: Any, allow_code: bool) -> None:
    """Raise `ConfigError` for a task that needs more than a model of text."""
    config = getattr(task, "config", None)
    if not allow_code and config is not None and config.process_results is score_program:
        raise ConfigError(
            f"task {name!r} runs programs that the model writes, in the sandbox of the code reward "
            f"(docs/code-reward.md); allow it with --allow_code, or leave the task out"
        )
    if getattr(task, "UNSAFE_CODE", False):
        raise ConfigError(
            f"task {name!r} runs code that the model writes, without a sandbox; weft does not run "
            f"such tasks; take it out of --tasks"
        )
    if getattr(task, "MULTIMODAL", False):
        raise ConfigError(f"task {name!r} has images; weft evaluates models of text only")


def _check_targets(name: str, task: Any, file: Path | None) -> None:
    """Raise `DataError` if an item's target is none of its choices.

    The harness counts such items as wrong, and only logs it. The first `CHECKED_ITEMS` are checked.
    """
    config = getattr(task, "config", None)
    if (
        task.OUTPUT_TYPE != "multiple_choice"
        or config is None
        or config.process_results is not None
    ):
        return
    if getattr(task, "multiple_input", 0):
        return  # the choices are contexts
    place = f"{file}: " if file is not None else ""
    for number, doc in enumerate(islice(task.eval_docs, CHECKED_ITEMS)):
        try:
            choices = task.doc_to_choice(doc)
            target = task.doc_to_target(doc)
        except TemplateError as error:
            raise DataError(f"{place}task {name!r}, item {number}: {error}") from error
        for each in target if isinstance(target, list) else [target]:
            is_number = isinstance(each, int | float)
            known = 0 <= each < len(choices) if is_number else each in choices
            if not known:
                raise DataError(
                    f"{place}task {name!r}, item {number}: the target {each!r} is none of the "
                    f"{len(choices)} choices, nor the number of one from 0"
                )


def _check_metrics(name: str, task: Any, file: Path | None) -> None:
    """Raise `DataError` for an unknown metric, which the harness would leave out silently."""
    from lm_eval.api.registry import METRIC_REGISTRY, get_metric

    config = getattr(task, "config", None)
    if config is None or config.process_results is not None:
        return
    for each in config.metric_list or []:
        metric = each["metric"]
        if not isinstance(metric, str) or metric in METRIC_REGISTRY or each.get("hf_evaluate"):
            continue
        with silence_logs():
            known = get_metric(metric) is not None
        if not known:
            nearest = find_nearest(metric, METRIC_REGISTRY, 1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            reason = f"task {name!r}: unknown metric {metric!r}{hint}"
            line = f"{file}:{find_line(file, repr(metric))}: " if file is not None else ""
            raise DataError(line + reason)


# -- errors in task files


def _list_files(folders: Sequence[Path]) -> list[Path]:
    """Return the task files in folders and their subfolders."""
    return sorted(file for folder in folders for file in folder.glob("**/*.yaml"))


def check_files(files: Sequence[Path]) -> None:
    """Raise `DataError` with FILE:LINE for each task file that is not valid YAML."""
    reports = []
    for file in files:
        try:
            node = yaml.compose(file.read_text())
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            began = error.context_mark
            during = "" if began is None else f" {error.context} of line {began.line + 1}"
            reports.append(f"{file}:{line}: {error.problem}{during}")
            continue
        except (yaml.YAMLError, ValueError, OSError) as error:
            reports.append(f"{file}:1: {error}")
            continue
        if not isinstance(node, yaml.MappingNode):
            reports.append(f"{file}:1: a task file is a mapping with a key task or group")
            continue
        keys = [key.value for key, _ in node.value]
        included = {key.value: value for key, value in node.value}.get("include")
        if isinstance(included, yaml.ScalarNode) and not (file.parent / included.value).is_file():
            line = included.start_mark.line + 1
            reports.append(f"{file}:{line}: include: there is no file {included.value}")
        elif len(files) == 1 and not {"task", "group", "include"} & set(keys):
            reports.append(f"{file}:1: a task file needs the key task or group")
    if reports:
        raise DataError(reports)


@contextmanager
def _explain_task_errors(
    name: str, file: Path | None, files: Mapping[str, Path | None]
) -> Iterator[None]:
    """Raise a `DataError` that names file and line for any error while a task is built.

    `file` is the task's file, or None for a tag; `files` are those of all selected tasks.
    """
    with silence_logs():
        try:
            yield
        except Exception as error:  # the harness raises many kinds, from a task's own code too
            reason = _describe(error)
            place = files.get(name) or file or next(iter(files.values()), None)
            line = f"{place}:{find_line(place, reason)}: " if place is not None else ""
            raise DataError(f"{line}task {name!r}: {reason}") from error


def _describe(error: BaseException) -> str:
    """Return an error's message on one line, with its cause, and a hint for an unknown key."""
    from lm_eval.api.task import TaskConfig

    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, KeyError):
        text = f"there is no {text}"
    elif isinstance(error, StopIteration):  # the harness looks at the first row
        text = "the files in 'data_files' have no rows"
    unknown = re.search(r"unexpected keyword argument '(\w+)'", text)
    if unknown is not None:
        known = list(TaskConfig.__dataclass_fields__)
        nearest = find_nearest(unknown[1], known, 1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        text = f"unknown key {unknown[1]!r}{hint}"
    cause = error.__cause__
    if cause is not None and str(cause) not in text:
        text = f"{text}: {_describe(cause)}"
    return text


def find_line(file: Path, reason: str) -> int:
    """Return the line of the key or value that an error message mentions, or 1.

    A text in quotes counts more than others, and a longer text more than a shorter one. If no
    text is mentioned, the line is that of the first text that contains a word in quotes, such as a
    template with an unknown name.
    """
    try:
        root = yaml.compose(file.read_text())
    except (yaml.YAMLError, OSError, ValueError):
        return 1
    quoted = re.findall(r"'([^']+)'", reason)
    best = (False, 2)  # whether the text is quoted, and its length
    line = 1
    containing = []
    nodes = [root]
    while nodes:
        node = nodes.pop()
        if isinstance(node, yaml.MappingNode):
            nodes += [each for pair in node.value for each in pair]
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value
        elif isinstance(node, yaml.ScalarNode):
            text = node.value.strip()
            rank = (text in quoted, len(text))
            mentioned = re.search(rf"(?<!\w){re.escape(text)}", reason) is not None
            if mentioned and len(text) > 2 and rank > best:
                best = rank
                line = node.start_mark.line + 1
            if any(re.search(rf"\b{re.escape(word)}\b", text) for word in quoted):
                containing.append(node.start_mark.line + 1)
    return min(containing) if containing and best == (False, 2) else line


# -- data


def _list_leaves(manager: Any, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield (name, entry of the manager's index) of the tasks in the given groups and tags."""
    waiting = list(names)
    seen: set[str] = set()
    while waiting:
        name = waiting.pop(0)
        entry = manager.task_index.get(name)
        if name in seen or entry is None:
            continue
        seen.add(name)
        config = entry.cfg or {}
        members = config.get("task")
        if entry.kind.name == "TAG":
            waiting += sorted(entry.tags)
        elif isinstance(members, list):
            for member in members:
                own = member if isinstance(member, dict) else {"task": member}
                waiting.append(str(own.get("group") or own.get("task")))
        else:
            yield name, entry


def find_local_data(config: Mapping[str, Any], file: Path | None, copies: Path) -> dict[str, Any]:
    """Return changes of a task's configuration, so that it reads files of this machine.

    A data set of the hub is replaced by its copy in the folder `copies`, if there is one. Relative
    paths that do not exist are looked up beside the task file.
    """
    dataset = config.get("dataset_path")
    if not isinstance(dataset, str) or file is None:
        return {}
    if dataset not in FILE_FORMATS and not Path(dataset).exists():
        for place in (copies.expanduser() / dataset, file.parent / dataset):
            if place.exists():
                return {"dataset_path": str(place.resolve())}
    arguments = dict(config.get("dataset_kwargs") or {})
    changed = {}
    for key in ("data_files", "data_dir"):
        if key in arguments:
            changed[key] = _resolve_beside(arguments[key], file.parent)
    if all(arguments[key] == value for key, value in changed.items()):
        return {}
    return {"dataset_kwargs": {**arguments, **changed}}


def _resolve_beside(value: Any, folder: Path) -> Any:
    """Return paths, with those that exist only in `folder` as absolute paths."""
    if isinstance(value, Mapping):
        return {key: _resolve_beside(each, folder) for key, each in value.items()}
    if isinstance(value, list):
        return [_resolve_beside(each, folder) for each in value]
    if not isinstance(value, str) or "://" in value or Path(value).is_absolute():
        return value
    here = Path(value).exists() or any(Path().glob(value))
    beside = (folder / value).exists() or any(folder.glob(value))
    return str(folder / value) if beside and not here else value


def _is_on_hub(dataset: str, config: Mapping[str, Any]) -> bool:
    """Return whether a task's data set is one of the hub."""
    if not dataset or dataset in FILE_FORMATS or config.get("custom_dataset") is not None:
        return False
    return not Path(dataset).exists()


def _check_hub(on_hub: Mapping[str, str], copies: Path) -> None:
    """Raise `DataError` if data sets of the hub are neither cached nor available.

    `on_hub` maps data sets to a task that reads them. The hub is asked once.
    """
    from datasets import config

    from weft.data.hub import check_dataset

    cache = Path(config.HF_DATASETS_CACHE)
    missing = [each for each in on_hub if not (cache / each.replace("/", "___")).exists()]
    if not missing:
        return
    try:
        check_dataset("", missing[0])
    except DataError as error:
        reason = str(error).partition(", and ")[2] or str(error)
        reads = ", ".join(f"{each} (task {on_hub[each]})" for each in missing)
        raise DataError(
            f"these data sets would be fetched from the hub: {reads}; {reason}; put the files of "
            f"each data set's repository in {copies / 'OWNER' / 'NAME'}, such as "
            f"{copies / missing[0]}, or name another folder with --data_dir"
        ) from error
