"""Read files named by the user, and turn library errors into one-line messages.

    with explain_read_errors(f"{path}: no tokenizer can be read", ConfigError, "name another"):
        ...  # call a library
    read_text(path, what, kind); read_json(path, what, kind); read_yaml(path, what, kind)

In all functions, `what` is the start of the error message, which names the option or the file, and
`kind` is the subclass of `UserError` to raise. Only code that reads user input belongs in the
context of `explain_read_errors`: weft's own bugs must not be reported as user errors.
"""

from __future__ import annotations

import copy
import errno
import gzip
import json
import os
import re
import stat
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import UserError, WeftError, find_nearest

if TYPE_CHECKING:
    import yaml

MAX_BYTES = 1 << 26  # largest JSON or text file
MAX_YAML = 1 << 22
MAX_VALUES = 100_000  # values in a YAML file after expanding aliases
MAX_DEPTH = 100
MAX_ENTRIES = 200_000  # files and folders below a searched folder
ROOT = "is the root of the file system; name a folder below it"
SHOWN = 300  # characters of a library's message that are shown
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")
DIGITS = re.compile(r"Exceeds the limit .* for integer string conversion")
# PLACES: system errors caused by the path that the user named, whatever weft was doing there.
NO_HOME = ("Could not determine home directory.",)  # pathlib's message for an unknown ~NAME
PLACES = (
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
)


def find_url_problem(path: str | Path) -> str | None:
    """Return a message with the problem and a fix if `path` is a URL, or None otherwise.

    Paths and names of models on the Hugging Face hub are accepted.
    """
    match = URL.match(str(path))  # `Path` collapses // to /
    if match is None:
        return None
    kind = match[1].lower()
    rest = str(path)[match.end() :]
    fix = "mount the storage, or copy the files to this machine"
    if kind == "file":
        fix = f"write /{rest}"
    elif kind == "local":  # fsspec's name; its path may be relative
        fix = "write the path without local://"
    elif kind == "hf":
        fix = f"write {rest.removeprefix('datasets/').removeprefix('models/')}, its name on the hub"
    return f"is a URL, and weft reads and writes paths of this machine; {fix}"


def refuse_url(path: str | Path, what: str, kind: type[UserError] = UserError) -> None:
    """Raise `kind` if `path` is a URL, which would otherwise be treated as a local folder.

    `what` is the beginning of the message, such as the option with its value.
    """
    problem = find_url_problem(path)
    if problem is not None:
        raise kind(f"{what}: {problem}")


@contextmanager
def explain_read_errors(
    what: str, kind: type[UserError] = UserError, fix: str = ""
) -> Iterator[None]:
    """Turn library errors raised in the context into `kind`, with a one-line message.

    The message consists of `what`, the cause and `fix`. weft's own errors are not changed.
    """
    tail = f"; {fix}" if fix else ""
    try:
        yield
    except WeftError:
        raise
    except Exception as error:
        raise kind(f"{what}: {describe_cause(error)}{tail}") from error
    except BaseException as error:
        # raised by libraries written in Rust (PyO3) on a panic
        if type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what}: {describe_cause(error)}{tail}") from error


def describe_cause(error: BaseException) -> str:
    """Return a one-line description of an error that occurred while reading a file."""
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8 text ({error.reason} at byte {error.start})"
    if isinstance(error, json.JSONDecodeError):
        return f"is not JSON: {error.msg}, line {error.lineno} column {error.colno}"
    if isinstance(error, RecursionError):
        return "is nested too deeply, or contains itself"
    if isinstance(error, MemoryError):
        return "needs more memory than is available"
    if isinstance(error, KeyError):
        return f"lacks {error.args[0]!r}" if error.args else "lacks a key"
    if isinstance(error, gzip.BadGzipFile | zlib.error | EOFError):
        return f"is damaged or cut short ({error})"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror[0].lower()}{error.strerror[1:]}"
    text = " ".join(str(error).split())
    if DIGITS.search(text):
        return "contains a whole number of more than 4,300 digits"
    return (text[:SHOWN] + " ..." if len(text) > SHOWN else text) or type(error).__name__


def shorten(text: str, most: int = 120) -> str:
    """Return `text` shortened to about `most` characters, keeping its beginning and its end."""
    return text if len(text) <= most else f"{text[: most - 40]}...{text[-30:]}"


def find_path_problem(error: Exception) -> str | None:
    """Return a message if an error is caused by a path that the user specified, or None otherwise.

    Examples are a path that is too long, is not a folder, cannot be opened, or starts with `~` and
    an unknown user.
    """
    if isinstance(error, OSError) and error.errno in PLACES and error.filename is not None:
        return f"{shorten(str(error.filename))}: {describe_cause(error)}; choose another path"
    if type(error) is RuntimeError and error.args == NO_HOME:
        return "a path begins with ~ and a user who has no home directory here; write the full path"
    return None


def check_working_directory() -> None:
    """Raise `UserError` if the working directory was removed, as relative paths would then fail."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError(
            "the working directory was removed; change to another one (cd ~) and try again"
        ) from None


def check_file(
    path: str | Path, what: str, kind: type[UserError] = UserError, most: int | None = None
) -> None:
    """Raise `kind` unless `path` is a regular file of at most `most` bytes.

    If `most` is None, the size is not limited. `what` is the beginning of the message, such as the
    path. Pipes and devices are refused because reading them might never end.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise kind(f"{what}: {find_url_problem(path) or 'there is no such file'}") from None
    except (OSError, ValueError) as error:
        raise kind(f"{what}: {describe_cause(error)}") from error
    if not stat.S_ISREG(status.st_mode):
        named = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
        raise kind(f"{what}: is {named}, not a file")
    if most is not None and status.st_size > most:
        raise kind(f"{what}: has {status.st_size:,} bytes, and at most {most:,} are read")


def check_folder(folder: Path, what: str, kind: type[UserError] = UserError) -> None:
    """Raise `kind` if a folder contains a pipe or a device, on which a library could hang."""
    with explain_read_errors(what, kind):
        for entry in os.scandir(folder):
            try:
                mode = entry.stat().st_mode
            except FileNotFoundError:  # a broken link
                continue
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise kind(f"{what}: {entry.path} is a pipe or a device, not a file; remove it")


def iterate_files(folder: Path, what: str, kind: type[UserError] = UserError) -> Iterator[Path]:
    """Iterate over all files below a folder, without following links to folders.

    Raises `kind` if the folder is the root of the file system or contains more than `MAX_ENTRIES`
    files and folders, as the path is then probably a mistake. The message begins with `what`.
    """
    if is_root(folder):
        raise kind(f"{what}: {ROOT}")
    count = 0
    for place, folders, names in os.walk(folder):
        count += len(folders) + len(names)
        if count > MAX_ENTRIES:
            raise kind(
                f"{what}: more than {MAX_ENTRIES:,} files and folders are below it; name a "
                f"smaller folder"
            )
        yield from (Path(place, name) for name in names)


def suggest_sibling(path: Path) -> Path | None:
    """Return the path beside `path` with the most similar other name, or None if there is none."""
    if not path.parent.is_dir():
        return None
    close = find_nearest(path.name, [each.name for each in path.parent.iterdir()], 1)
    return path.parent / close[0] if close else None


def is_root(folder: Path) -> bool:
    """Return whether a folder is the root of the file system."""
    return folder.resolve() == Path(folder.resolve().anchor)


def make_folder(path: Path, what: str, kind: type[UserError] = UserError) -> None:
    """Create a folder that a user specified, and its parents, if they do not exist.

    Raises `kind` if the folder cannot be created. The message begins with `what`.
    """
    refuse_url(path, what, kind)
    with explain_read_errors(f"{what}: the folder cannot be created", kind, "name another"):
        path.mkdir(parents=True, exist_ok=True)


def read_text(
    path: str | Path, what: str, kind: type[UserError] = UserError, most: int = MAX_BYTES
) -> str:
    """Return the text of a file.

    Raises `kind` if the file is not regular, is larger than `most` bytes, or is not UTF-8. The
    message begins with `what`.
    """
    check_file(path, what, kind, most)
    with explain_read_errors(what, kind):
        return Path(path).read_text(encoding="utf-8")


def read_json(path: str | Path, what: str, kind: type[UserError] = UserError) -> Any:
    """Return the value in a JSON file. Raises `kind` if it cannot be read or is not JSON."""
    text = read_text(path, what, kind)
    with explain_read_errors(what, kind):
        return json.loads(text)


def read_object(path: str | Path, what: str, kind: type[UserError] = UserError) -> dict[str, Any]:
    """Return the JSON object in a file. Raises `kind` if the file contains anything else."""
    value = read_json(path, what, kind)
    if not isinstance(value, dict):
        raise kind(f"{what}: contains no JSON object")
    return value


# Values of the files that `read_model_object` has read, by device, inode, size and times
_OBJECTS: dict[tuple[int, ...], dict[str, Any]] = {}


def read_model_object(
    path: str | Path, what: str, kind: type[UserError] = UserError
) -> dict[str, Any]:
    """Return the JSON object in a file of a model, such as config.json, as `read_object` does.

    The checks of a run, its plan and its engines need these values. The file is read once, and
    again only after it has changed. The caller may change the result.
    """
    try:
        status = os.stat(path)
    except OSError:
        return read_object(path, what, kind)  # raises an error with a message
    state = (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )
    if state not in _OBJECTS:
        _OBJECTS[state] = read_object(path, what, kind)
    return copy.deepcopy(_OBJECTS[state])


def read_yaml(path: str | Path, what: str, kind: type[UserError] = UserError) -> Any:
    """Return the value in a YAML file, or None if the file is empty.

    Raises `kind` if the file cannot be read or is not YAML. The message begins with `what` and, for
    invalid YAML, has the line number.
    """
    values, _ = parse_yaml(read_text(path, what, kind, MAX_YAML), what, kind)
    return values


def parse_yaml(
    text: str, what: str, kind: type[UserError] = UserError
) -> tuple[Any, yaml.Node | None]:
    """Return (value, root node) of a YAML text.

    Raises `kind` if the text is not YAML, if an alias in it refers to an enclosing value, or if it
    expands to too many values. The message begins with `what`.
    """
    import yaml

    with explain_read_errors(what, kind):
        loader = _build_loader()(text)
    try:
        with explain_read_errors(what, kind):
            try:
                node = loader.get_single_node()
                if node is not None:
                    _check_size(node, what, kind)
                return (None if node is None else loader.construct_document(node)), node
            except yaml.MarkedYAMLError as error:
                line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
                cause = _explain_missing_colon(error, text)
                cause = cause or f"is not YAML: {error.problem or error}"
                raise kind(f"{what}{line}: {cause}") from error
    finally:
        loader.dispose()


def _explain_missing_colon(error: yaml.MarkedYAMLError, text: str) -> str | None:
    """Return an explanation if a YAML error is caused by a missing colon, or None otherwise.

    For example, the colon is missing if `- webgpt` is followed by an indented `fraction:`. YAML's
    own message for this mistake is misleading.
    """
    rows = text.splitlines()
    at = error.problem_mark.line if error.problem_mark else 0
    for index in range(min(at, len(rows) - 1), max(at - 4, 0), -1):
        above = re.fullmatch(r"(\s*)-\s+([\w./-]+)\s*(#.*)?", rows[index - 1])
        below = re.match(r"(\s*)(\w+)\s*:", rows[index])
        if above and below and len(below[1]) >= len(above[1]):
            return (
                f"{below[2]!r} is below '- {above[2]}' (line {index}), which has no colon; "
                f"write '- {above[2]}:' so that {below[2]!r} belongs to it"
            )
    return None


def _check_size(root: yaml.Node, what: str, kind: type[UserError]) -> None:
    """Raise `kind` if a YAML document has too many values or too many levels.

    Each use of an alias counts: a few lines of aliases can expand to millions of values, and a
    value that contains itself has infinitely many.
    """
    import yaml

    stack = [(root, 1)]
    count = 0
    while stack:
        node, depth = stack.pop()
        count += 1
        if depth > MAX_DEPTH:
            line = node.start_mark.line + 1
            raise kind(
                f"{what}:{line}: contains itself, or is nested deeper than {MAX_DEPTH} levels"
            )
        if count > MAX_VALUES:
            raise kind(
                f"{what}: contains more than {MAX_VALUES:,} values; aliases (*name) count each "
                f"time they are used"
            )
        if isinstance(node, yaml.MappingNode):
            for pair in node.value:
                for each in pair:
                    stack.append((each, depth + 1))
        elif isinstance(node, yaml.SequenceNode):
            for each in node.value:
                stack.append((each, depth + 1))


@cache
def _build_loader() -> Any:
    """Return a subclass of PyYAML's safe loader with two changes.

    A number such as 1e-5, without a dot, is read as a float, and a repeated key is an error.
    """
    import yaml

    class SafeYamlLoader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: dict[str, int] = {}
            for key, _ in node.value:
                if key.tag == "tag:yaml.org,2002:merge" or not isinstance(key, yaml.ScalarNode):
                    continue
                line = key.start_mark.line + 1
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None,
                        None,
                        f"{key.value!r} is repeated here, first on line {seen[key.value]}",
                        key.start_mark,
                    )
                seen[key.value] = line
            return super().construct_mapping(node, deep)

        def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
            try:
                return super().construct_object(node, deep)
            except (
                ValueError,
                ArithmeticError,
            ) as error:  # a date of month 99, a number of 5,000 digits
                raise yaml.constructor.ConstructorError(
                    None, None, describe_cause(error), node.start_mark
                ) from error

    rules: Mapping[str, Any] = yaml.SafeLoader.yaml_implicit_resolvers
    SafeYamlLoader.yaml_implicit_resolvers = {first: list(each) for first, each in rules.items()}
    SafeYamlLoader.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )
    return SafeYamlLoader
