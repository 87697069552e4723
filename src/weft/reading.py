"""Files that a user names: how they are read, and what a library raises meanwhile as one message.

This is the one place of it.

    with reading(f"{path}: no tokenizer can be read there", ConfigError, "give a tokenizer.json"): ...   # a library at work
    read_text(path, what, kind); read_json(path, what, kind); read_yaml(path, what, kind)

`what` begins the message: the option or the file; `kind` is the `UserError` that it becomes. Only
what reads the user's input belongs inside `reading`: an error of weft's own is no `UserError` and
must not look like one.
"""

from __future__ import annotations

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

from weft.errors import UserError, WeftError

if TYPE_CHECKING:
    import yaml

MOST_BYTES = 1 << 26  # of a JSON or text file that is read whole
MOST_YAML = 1 << 22
MOST_VALUES = 100_000  # of a YAML file, what an alias stands for counted each time
MOST_DEPTH = 100
MOST_ENTRIES = 200_000  # of a folder that is searched, those of the folders in it counted
ROOT = "holds the whole file system; name the folder that is meant"
SHOWN = 300  # characters of a library's message
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")
DIGITS = re.compile(r"Exceeds the limit .* for integer string conversion")
# Errors of the system that speak of the place a user named, whatever weft wanted to do there.
NO_HOME = ("Could not determine home directory.",)  # what pathlib says of ~NAME
PLACES = (
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
)


def url_problem(path: str | Path) -> str | None:
    """Return what is wrong with a URL in place of a path, and what to write; None for a path or the
    name of a hub's model.
    """
    found = URL.match(str(path))  # `Path` makes one slash of two
    if found is None:
        return None
    kind = found[1].lower()
    rest = str(path)[found.end() :]
    fix = "mount the storage, or copy the files to this machine"
    if kind == "file":
        fix = f"write /{rest}"
    elif kind == "hf":
        fix = f"write {rest.removeprefix('datasets/').removeprefix('models/')}, its name on the hub"
    return f"is a URL, and weft reads and writes paths of this machine; {fix}"


def refuse_url(path: str | Path, what: str, kind: type[UserError] = UserError) -> None:
    """Raises `kind` for a URL in place of a path; a folder named after it would be made or looked
    for otherwise.
    """
    problem = url_problem(path)
    if problem is not None:
        raise kind(f"{what}: {problem}")


@contextmanager
def reading(what: str, kind: type[UserError] = UserError, fix: str = "") -> Iterator[None]:
    """Whatever a library raises within is a `kind` that says `what` could not be read, why, and
    `fix`.
    """
    tail = f"; {fix}" if fix else ""
    try:
        yield
    except WeftError:
        raise
    except Exception as error:
        raise kind(f"{what}: {reason(error)}{tail}") from error
    except BaseException as error:
        # what a library written in Rust raises where it gives up
        if type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what}: {reason(error)}{tail}") from error


def reason(error: BaseException) -> str:
    """Why something could not be read, in one line."""
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8 text ({error.reason} at byte {error.start})"
    if isinstance(error, json.JSONDecodeError):
        return f"is not JSON: {error.msg}, line {error.lineno} column {error.colno}"
    if isinstance(error, RecursionError):
        return "nests too deep, or holds itself"
    if isinstance(error, MemoryError):
        return "asks for more memory than there is"
    if isinstance(error, KeyError):
        return f"lacks {error.args[0]!r}" if error.args else "lacks a key"
    if isinstance(error, gzip.BadGzipFile | zlib.error | EOFError):
        return f"is damaged or cut short ({error})"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror[0].lower()}{error.strerror[1:]}"
    text = " ".join(str(error).split())
    if DIGITS.search(text):
        return "holds a whole number of more than 4,300 digits"
    return (text[:SHOWN] + " ..." if len(text) > SHOWN else text) or type(error).__name__


def shortened(text: str, most: int = 120) -> str:
    """A text as a message shows it: of a long one its beginning and its end."""
    return text if len(text) <= most else f"{text[: most - 40]}...{text[-30:]}"


def place_problem(error: Exception) -> str | None:
    """What an error of the system says of a place that a user named: one that is too long, no
    folder, not to be opened, in the home of nobody. None for other errors.
    """
    if isinstance(error, OSError) and error.errno in PLACES and error.filename is not None:
        return f"{shortened(str(error.filename))}: {reason(error)}; name another place"
    if type(error) is RuntimeError and error.args == NO_HOME:
        return "a path begins with ~ and the name of somebody who has no home here; write the folder out"
    return None


def check_working_directory() -> None:
    """Raises `UserError` where the working directory was removed: no relative path leads anywhere
    then.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError(
            "the working directory was removed; change to another one (cd ~) and try again"
        ) from None


def check_file(
    path: str | Path, what: str, kind: type[UserError] = UserError, most: int | None = None
) -> None:
    """Raises `kind` where there is no regular file of at most `most` bytes at `path`: a pipe or a
    device has no end.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        raise kind(f"{what}: {url_problem(path) or 'there is no such file'}") from None
    except (OSError, ValueError) as error:
        raise kind(f"{what}: {reason(error)}") from error
    if not stat.S_ISREG(found.st_mode):
        named = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe or a device"
        raise kind(f"{what}: is {named}, and no file")
    if most is not None and found.st_size > most:
        raise kind(f"{what}: has {found.st_size:,} bytes, and at most {most:,} are read")


def check_folder(folder: Path, what: str, kind: type[UserError] = UserError) -> None:
    """Raises `kind` where a folder whose files a library opens holds a pipe or a device, which it
    would wait for.
    """
    with reading(what, kind):
        for entry in os.scandir(folder):
            try:
                mode = entry.stat().st_mode
            except FileNotFoundError:  # a link to nothing
                continue
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise kind(f"{what}: {entry.path} is a pipe or a device, and no file; remove it")


def files_below(folder: Path, what: str, kind: type[UserError] = UserError) -> Iterator[Path]:
    """Every file in a folder and those below it, links to folders not followed.

    Raises `kind` for one of very many entries: who writes / means another.
    """
    if is_root(folder):
        raise kind(f"{what}: {ROOT}")
    count = 0
    for place, folders, names in os.walk(folder):
        count += len(folders) + len(names)
        if count > MOST_ENTRIES:
            raise kind(
                f"{what}: more than {MOST_ENTRIES:,} files and folders lie below it; name the "
                f"folder that is meant"
            )
        yield from (Path(place, name) for name in names)


def is_root(folder: Path) -> bool:
    """Whether a folder is that of the whole file system."""
    return folder.resolve() == Path(folder.resolve().anchor)


def make_folder(path: Path, what: str, kind: type[UserError] = UserError) -> None:
    """Make a folder that a user named, and those above it, where they are not there.

    Raises `kind` where the system refuses.
    """
    refuse_url(path, what, kind)
    with reading(f"{what}: the folder cannot be made", kind, "name another"):
        path.mkdir(parents=True, exist_ok=True)


def read_text(
    path: str | Path, what: str, kind: type[UserError] = UserError, most: int = MOST_BYTES
) -> str:
    """The text of a file. Raises `kind` for what is no regular file, is too large, or no UTF-8."""
    check_file(path, what, kind, most)
    with reading(what, kind):
        return Path(path).read_text(encoding="utf-8")


def read_json(path: str | Path, what: str, kind: type[UserError] = UserError) -> Any:
    """What a JSON file holds. Raises `kind`."""
    text = read_text(path, what, kind)
    with reading(what, kind):
        return json.loads(text)


def read_object(path: str | Path, what: str, kind: type[UserError] = UserError) -> dict[str, Any]:
    """The object that a JSON file holds. Raises `kind`."""
    found = read_json(path, what, kind)
    if not isinstance(found, dict):
        raise kind(f"{what}: holds no JSON object")
    return found


def read_yaml(path: str | Path, what: str, kind: type[UserError] = UserError) -> Any:
    """What a YAML file holds; None where it is empty.

    Raises `kind`: with the line, for what is not YAML.
    """
    values, _ = parse_yaml(read_text(path, what, kind, MOST_YAML), what, kind)
    return values


def parse_yaml(
    text: str, what: str, kind: type[UserError] = UserError
) -> tuple[Any, yaml.Node | None]:
    """(what a YAML text holds, its nodes).

    Raises `kind`, also for a text that holds itself or unfolds to too much.
    """
    import yaml

    with reading(what, kind):
        loader = _loader()(text)
    try:
        with reading(what, kind):
            try:
                node = loader.get_single_node()
                if node is not None:
                    _check_size(node, what, kind)
                return (None if node is None else loader.construct_document(node)), node
            except yaml.MarkedYAMLError as error:
                raise _wrong(error, text, what, kind) from error
    finally:
        loader.dispose()


def _wrong(error: yaml.MarkedYAMLError, text: str, what: str, kind: type[UserError]) -> UserError:
    line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
    return kind(f"{what}{line}: {_slip(error, text) or f'is not YAML: {error.problem or error}'}")


def _slip(error: yaml.MarkedYAMLError, text: str) -> str | None:
    """`- webgpt` with an indented `fraction:` below it is the slip that YAML words worst."""
    rows = text.splitlines()
    at = error.problem_mark.line if error.problem_mark else 0
    for index in range(min(at, len(rows) - 1), max(at - 4, 0), -1):
        above = re.fullmatch(r"(\s*)-\s+([\w./-]+)\s*(#.*)?", rows[index - 1])
        below = re.match(r"(\s*)(\w+)\s*:", rows[index])
        if above and below and len(below[1]) >= len(above[1]):
            return (
                f"{below[2]!r} stands below '- {above[2]}' (line {index}), which has no colon; "
                f"write '- {above[2]}:' so that {below[2]!r} belongs to it"
            )
    return None


def _check_size(root: yaml.Node, what: str, kind: type[UserError]) -> None:
    """Counts the values below a node as they unfold: aliases may make millions of a few lines, or a
    value hold itself.
    """
    import yaml

    stack = [(root, 1)]
    count = 0
    while stack:
        node, depth = stack.pop()
        count += 1
        if depth > MOST_DEPTH:
            line = node.start_mark.line + 1
            raise kind(f"{what}:{line}: holds itself, or nests deeper than {MOST_DEPTH} levels")
        if count > MOST_VALUES:
            raise kind(
                f"{what}: holds more than {MOST_VALUES:,} values; aliases (*name) count each time "
                f"they stand there"
            )
        if isinstance(node, yaml.MappingNode):
            stack += [(each, depth + 1) for pair in node.value for each in pair]
        elif isinstance(node, yaml.SequenceNode):
            stack += [(each, depth + 1) for each in node.value]


@cache
def _loader() -> Any:
    """PyYAML's safe loader, for which 1e-5 without a dot is a number and a key given twice is an
    error.
    """
    import yaml

    class Loader(yaml.SafeLoader):
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
                        f"{key.value!r} stands here again, first on line {seen[key.value]}",
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
                    None, None, reason(error), node.start_mark
                ) from error

    rules: Mapping[str, Any] = yaml.SafeLoader.yaml_implicit_resolvers
    Loader.yaml_implicit_resolvers = {first: list(each) for first, each in rules.items()}
    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )
    return Loader
