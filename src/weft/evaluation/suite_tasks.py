"""Loader for tasks of lm-evaluation-harness: by name, with checks, and if possible without network.

Task files in the user's folders take precedence. The tasks of the harness are indexed only if other
names remain, since this takes seconds. A data set of the hub is read from a local copy if there is
one. Errors are found before a model is loaded, and name the file and the line.

lm_eval is imported only when a function needs it.
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

MIN_VERSION = (0, 4, 13)
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
    """Tasks and groups of lm_eval with their data, and the task manager that has their names."""

    manager: Any
    tasks: Sequence[Any]


def require_harness(user: str = "weft eval suite") -> None:
    """Raise `ConfigError` if lm-evaluation-harness is missing or too old; `user` needs it."""
    min_version = ".".join(map(str, MIN_VERSION))
    try:
        installed = version(LIBRARY) if importlib.util.find_spec(LIBRARY) else ""
    except PackageNotFoundError:
        installed = ""
    numbers = tuple(int(part) for part in installed.split(".")[:3] if part.isdigit())
    if not installed or numbers < MIN_VERSION:
        state = f"version {installed} is installed" if installed else "it is not installed"
        raise ConfigError(
            f"{user} needs lm_eval {min_version} or newer, and {state}; {extras.install('eval')}"
        )


def load_named_tasks(names: Sequence[str], options: CatalogueOptions) -> LoadedTasks:
    """Load tasks of weft's catalogue and of lm_eval by name, with all checks that need no model.

    See `catalogue.resolve_tasks`, `open_manager` and `load_tasks` for the errors raised.
    """
    tasks, other_names = resolve_tasks(names, options)
    if not other_names and tasks:
        return LoadedTasks(open_empty_manager(), tasks)
    manager, expanded_names = open_manager(TaskSelection(other_names, options.include_path))
    tasks += load_tasks(manager, expanded_names, options.folder, allow_code=options.allow_code)
    return LoadedTasks(manager, tasks)


def open_manager(selection: TaskSelection) -> tuple[Any, list[str]]:
    """Return a task manager with the tasks of a selection, and the names of these tasks.

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
    """Return a task manager without names, for tasks that are already built."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=False)


def _find_matches(manager: Any, name: str, files: Mapping[str, Path]) -> list[str]:
    """Return the names of the manager's tasks for a name, a pattern or the path of a task file."""
    if name in files:
        entries = manager.task_index.items()
        return [task_name for task_name, entry in entries if entry.yaml_path == files[name]]
    if any(wildcard in name for wildcard in "*?["):
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
    hub_data: dict[str, str] = {}  # data set of the hub -> name of a task that reads it
    built: list[Any] = []
    with tempfile.TemporaryDirectory(prefix="weft-tasks-") as scratch:
        files: dict[str, Path] = {}
        for name, entry in _list_leaves(manager, names):
            config = entry.cfg or {}
            changes = find_local_data(config, entry.yaml_path, copies)
            dataset = str(changes.get("dataset_path", config.get("dataset_path") or ""))
            if _is_on_hub(dataset, config):
                hub_data.setdefault(dataset, name)
            files[name] = entry.yaml_path
            if changes and entry.yaml_path is not None:
                # The harness reads the file again, so the changes need a file.
                changed_file = Path(scratch) / f"{len(files)}.yaml"
                write(changed_file, yaml.safe_dump({"include": str(entry.yaml_path), **changes}))
                entry.yaml_path = changed_file
        _check_hub(hub_data, copies)
        for name in names:
            with _explain_task_errors(name, manager.task_index[name].yaml_path, files):
                loaded = manager.load([name])
                groups = loaded.get("groups", {})
                children = {child for group in groups.values() for child in group.child_names}
                for loaded_name, item in [*groups.items(), *loaded["tasks"].items()]:
                    if loaded_name not in children:
                        built.append(item)
    try:
        tasks = manager.load(built)["tasks"]
    except ValueError as error:  # a task in two of the groups
        raise ConfigError(f"--tasks {','.join(names)}: {error}; name only one of them") from error
    for name, task in tasks.items():
        _check_supported(name, task, allow_code)
        _check_metrics(name, task, files.get(name))
        _check_targets(name, task, files.get(name))
    return built


def _check_supported(name: str, task: Any, allow_code: bool) -> None:
    """Raise `ConfigError` for a task that runs code, unless it is allowed, or that has images."""
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

    The harness only logs such items, and counts them as wrong. The first `CHECKED_ITEMS` items are
    checked.
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
        for answer in target if isinstance(target, list) else [target]:
            if isinstance(answer, int | float):
                is_choice = 0 <= answer < len(choices)
            else:
                is_choice = answer in choices
            if not is_choice:
                raise DataError(
                    f"{place}task {name!r}, item {number}: the target {answer!r} is none of the "
                    f"{len(choices)} choices, nor the number of one from 0"
                )


def _check_metrics(name: str, task: Any, file: Path | None) -> None:
    """Raise `DataError` for an unknown metric, which the harness would leave out silently."""
    from lm_eval.api.registry import METRIC_REGISTRY, get_metric

    config = getattr(task, "config", None)
    if config is None or config.process_results is not None:
        return
    for entry in config.metric_list or []:
        metric = entry["metric"]
        if not isinstance(metric, str) or metric in METRIC_REGISTRY or entry.get("hf_evaluate"):
            continue
        with silence_logs():
            is_known = get_metric(metric) is not None
        if not is_known:
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
            context = error.context_mark
            while_text = "" if context is None else f" {error.context} of line {context.line + 1}"
            reports.append(f"{file}:{line}: {error.problem}{while_text}")
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
    """Raise a `DataError` with file and line for any error in the body, which builds a task.

    `file` is the task's file, or None for a tag. `files` has the files of all selected tasks by
    name.
    """
    with silence_logs():
        try:
            yield
        except Exception as error:  # the harness raises many kinds, from a task's own code too
            reason = _describe_error(error)
            place = files.get(name) or file or next(iter(files.values()), None)
            line = f"{place}:{find_line(place, reason)}: " if place is not None else ""
            raise DataError(f"{line}task {name!r}: {reason}") from error


def _describe_error(error: BaseException) -> str:
    """Return an error's message on one line, with its cause, and a hint for an unknown key."""
    from lm_eval.api.task import TaskConfig

    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, KeyError):
        text = f"there is no {text}"
    elif isinstance(error, StopIteration):  # the harness looks at the first row
        text = "the files in 'data_files' have no rows"
    unknown = re.search(r"unexpected keyword argument '(\w+)'", text)
    if unknown is not None:
        keys = list(TaskConfig.__dataclass_fields__)
        nearest = find_nearest(unknown[1], keys, 1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        text = f"unknown key {unknown[1]!r}{hint}"
    cause = error.__cause__
    if cause is not None and str(cause) not in text:
        text = f"{text}: {_describe_error(cause)}"
    return text


def find_line(file: Path, reason: str) -> int:
    """Return the line of the key or value that an error message mentions, or 1.

    Keys and values that the message quotes are preferred to others, and longer ones to shorter
    ones. If the message mentions none, the line is that of the first text that contains a quoted
    word of the message, such as a template with an unknown name.
    """
    try:
        root = yaml.compose(file.read_text())
    except (yaml.YAMLError, OSError, ValueError):
        return 1
    quoted = re.findall(r"'([^']+)'", reason)
    best = (False, 2)  # (True if the text is quoted, its length)
    line = 1
    containing = []
    nodes = [root]
    while nodes:
        node = nodes.pop()
        if isinstance(node, yaml.MappingNode):
            nodes += [item for pair in node.value for item in pair]
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value
        elif isinstance(node, yaml.ScalarNode):
            text = node.value.strip()
            rank = (text in quoted, len(text))
            is_mentioned = re.search(rf"(?<!\w){re.escape(text)}", reason) is not None
            if is_mentioned and len(text) > 2 and rank > best:
                best = rank
                line = node.start_mark.line + 1
            if any(re.search(rf"\b{re.escape(word)}\b", text) for word in quoted):
                containing.append(node.start_mark.line + 1)
    return min(containing) if containing and best == (False, 2) else line


# -- data


def _list_leaves(manager: Any, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield (name, entry of the manager's index) of all tasks in the given names, groups and tags."""
    pending = list(names)
    seen: set[str] = set()
    while pending:
        name = pending.pop(0)
        entry = manager.task_index.get(name)
        if name in seen or entry is None:
            continue
        seen.add(name)
        config = entry.cfg or {}
        members = config.get("task")
        if entry.kind.name == "TAG":
            pending += sorted(entry.tags)
        elif isinstance(members, list):
            for member in members:
                member_config = member if isinstance(member, dict) else {"task": member}
                pending.append(str(member_config.get("group") or member_config.get("task")))
        else:
            yield name, entry


def find_local_data(config: Mapping[str, Any], file: Path | None, copies: Path) -> dict[str, Any]:
    """Return changes of a task's configuration with which it reads local files.

    A data set of the hub is replaced by its copy in the folder `copies`, if there is one. Relative
    paths that do not exist are looked up in the folder of the task file.
    """
    dataset = config.get("dataset_path")
    if not isinstance(dataset, str) or file is None:
        return {}
    if dataset not in FILE_FORMATS and not Path(dataset).exists():
        for path in (copies.expanduser() / dataset, file.parent / dataset):
            if path.exists():
                return {"dataset_path": str(path.resolve())}
    arguments = dict(config.get("dataset_kwargs") or {})
    changed = {}
    for key in ("data_files", "data_dir"):
        if key in arguments:
            changed[key] = _resolve_paths(arguments[key], file.parent)
    if all(arguments[key] == value for key, value in changed.items()):
        return {}
    return {"dataset_kwargs": {**arguments, **changed}}


def _resolve_paths(value: Any, folder: Path) -> Any:
    """Resolve relative paths that exist only in `folder`, in nested plain values."""
    if isinstance(value, Mapping):
        return {key: _resolve_paths(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [_resolve_paths(item, folder) for item in value]
    if not isinstance(value, str) or "://" in value or Path(value).is_absolute():
        return value
    exists_here = Path(value).exists() or any(Path().glob(value))
    exists_in_folder = (folder / value).exists() or any(folder.glob(value))
    return str(folder / value) if exists_in_folder and not exists_here else value


def _is_on_hub(dataset: str, config: Mapping[str, Any]) -> bool:
    """Return whether a task reads a data set of the hub."""
    if not dataset or dataset in FILE_FORMATS or config.get("custom_dataset") is not None:
        return False
    return not Path(dataset).exists()


def _check_hub(hub_data: Mapping[str, str], copies: Path) -> None:
    """Raise `DataError` if data sets of the hub are neither cached nor available.

    `hub_data` maps each data set to a task that reads it. Only the first missing one is requested.
    """
    from datasets import config

    from weft.data.hub import check_dataset

    cache = Path(config.HF_DATASETS_CACHE)
    missing = [
        dataset for dataset in hub_data if not (cache / dataset.replace("/", "___")).exists()
    ]
    if not missing:
        return
    try:
        check_dataset("", missing[0])
    except DataError as error:
        reason = str(error).partition(", and ")[2] or str(error)
        listing = ", ".join(f"{dataset} (task {hub_data[dataset]})" for dataset in missing)
        raise DataError(
            f"these data sets would be fetched from the hub: {listing}; {reason}; put the files of "
            f"each data set's repository in {copies / 'OWNER' / 'NAME'}, such as "
            f"{copies / missing[0]}, or name another folder with --data_dir"
        ) from error
