"""Options of rewards; parsing and validation of `reward`, which is given as plain values.

This module has no slow imports.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.errors import ConfigError, build_unknown_name_error, find_nearest
from weft.options import option
from weft.registry import verifiers

FORM = (
    "a verifier's name, module:function, FILE.py:function, {NAME: WEIGHT, ..}, or a list of "
    "these, of [NAME, WEIGHT] and of "
    "{name, weight, args}"
)


@dataclass(frozen=True)
class RewardPart:
    """One of the functions whose weighted sum is the reward.

    `args` are keyword arguments that are passed in addition to the data's columns.
    """

    name: str
    weight: float = 1.0
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardTarget:
    """Location of a reward function, from which another process can import it.

    Attributes:
        label: Name of the function in metrics and messages.
        module: Module that defines the function, or None if it is in `file`.
        file: Python file that defines the function, or None if it is in `module`.
        attribute: Name of the function.
        args: Keyword arguments for the function, in addition to data columns.
        verifier: True if the function is a registered verifier. Parameters of a verifier
            that have a default can be set only by `args`, not by data columns.
        by_token: True if the function may return rewards of single tokens.
    """

    label: str
    module: str | None
    file: str | None
    attribute: str
    args: Mapping[str, Any]
    verifier: bool = False
    by_token: bool = False


def _find_problem(reward: Any) -> str | None:
    try:
        for part in parse_reward(reward):
            locate(part)
    except ConfigError as error:
        return str(error).removeprefix("reward: ")
    return None


@dataclass(frozen=True)
class RewardOptions:
    """Options of the host function `reward`, which describes them in full.

    `num_workers` and `chunk_size` control how the functions are called, and `keep_parts` is set by
    the experiment.
    """

    reward: Any = option(
        None,
        "reward function: a verifier (gsm8k, math, exact, format, ifeval, length, code, judge), "
        "module:function, "
        "FILE.py:function, weights by name as {gsm8k: 1.0, length: 0.1}, or a list of names, of "
        "[name, weight] or of "
        "{name, weight, args}; added to the reward model's score if both are set",
        check=_find_problem,
    )
    column: str | None = option(
        None,
        "column that names each row's verifier, in the forms of reward; rows without one get "
        "reward",
    )
    by_token: bool = option(
        False, "allow reward functions to return a reward for each token or step of a completion"
    )
    timeout_s: float = option(
        60.0, "maximum seconds of a reward function for a batch", at_least=0.001
    )
    on_timeout: float | None = option(
        None, "reward of completions whose function has timed out; absent: the run stops"
    )
    scores_weight: float = option(
        1.0, "weight of the reward model's score if there is also a reward function"
    )
    num_workers: int | None = None
    chunk_size: int | None = None
    keep_parts: bool = False

    @property
    def has_functions(self) -> bool:
        """True if reward functions contribute to the reward."""
        return self.reward is not None or self.column is not None


def parse_reward(reward: Any) -> list[RewardPart]:
    """Return the parts of the option `reward`: functions with their weights and arguments.

    Raises `ConfigError` for an invalid form. Does not check that the functions exist.
    """
    entries = reward if isinstance(reward, (list, tuple)) else [reward]
    if not entries or reward is None or reward == {}:
        raise ConfigError(f"reward: no reward is given; give {FORM}")
    if len(entries) == 2 and isinstance(entries[0], str) and _is_number(entries[1]):
        raise ConfigError(
            f"reward: {reward!r} is a list of a name and a number; write a weighted part as a "
            f"list in the list: [{list(entries)}]"
        )
    parts = []
    for entry in entries:
        parts.extend(_parse_parts(entry))
    if all(part.weight == 0 for part in parts):
        raise ConfigError(
            "reward: all weights are 0, so every reward would be 0; change one of the weights"
        )
    for index, part in enumerate(parts):
        if any((part.name, part.args) == (other.name, other.args) for other in parts[:index]):
            raise ConfigError(
                f"reward: {part.name!r} appears twice; list it once, with the sum of both weights"
            )
    return parts


def _parse_parts(entry: Any) -> list[RewardPart]:
    """Return the reward parts (weighted functions) that one entry of the option `reward` specifies.

    An entry that maps names to weights has one part per name; any other entry has one part.
    """
    if isinstance(entry, RewardPart):
        return [entry]
    if isinstance(entry, str) and entry:
        return [RewardPart(entry)]
    if isinstance(entry, (list, tuple)) and len(entry) == 2 and isinstance(entry[0], str):
        return [_build_part(entry[0], entry[1])]
    if isinstance(entry, Mapping) and "name" in entry:
        return [_parse_named_part(entry)]
    if isinstance(entry, Mapping) and entry:
        return [_build_part(str(name), weight) for name, weight in entry.items()]
    raise ConfigError(f"reward: {entry!r} cannot be read; give {FORM}")


def _parse_named_part(entry: Mapping[str, Any]) -> RewardPart:
    """Return the part of the reward that a mapping specifies.

    The mapping has the key `name`, and can also have `weight` and `args`. Raises `ConfigError` for
    an invalid mapping.
    """
    if not isinstance(entry["name"], str) or set(entry) - {"name", "weight", "args"}:
        raise ConfigError(f"reward: {entry!r} cannot be read; give {FORM}")
    args = entry.get("args") or {}
    if not isinstance(args, Mapping):
        raise ConfigError(f"reward: args={args!r} of {entry['name']!r} must be a mapping")
    return _build_part(entry["name"], entry.get("weight", 1.0), args)


def _build_part(name: str, weight: Any, args: Mapping[str, Any] | None = None) -> RewardPart:
    if not _is_number(weight):
        raise ConfigError(
            f"reward: weight={weight!r} of {name!r} must be a finite number; write a part with "
            f"options as "
            "{name, weight, args}"
        )
    return RewardPart(name, float(weight), dict(args or {}))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def locate(part: RewardPart, *, checked: bool = True) -> RewardTarget:
    """Return the location of the function that `part` names, so that another process can import it.

    `part.name` is either the name of a registered verifier, or has the form `module:function` or
    `FILE.py:function`. Raises `ConfigError` if the verifier, the package or the file does not
    exist, if the file does not define the function, or if another process cannot import the
    verifier. With `checked`, also raises `ConfigError` if `part.args` has an option that the
    verifier does not have.
    """
    place, colon, attribute = part.name.rpartition(":")
    if not colon:
        return _locate_verifier(part, checked)
    if not attribute.isidentifier():
        raise ConfigError(
            f"reward: {part.name!r}: the text after the colon must be a function's name"
        )
    if place.endswith(".py"):
        file = Path(place).expanduser()
        if not file.is_file():
            raise ConfigError(f"reward: {part.name!r}: there is no file {place}")
        _check_defined(part, file, attribute)
        return RewardTarget(attribute, None, str(file.resolve()), attribute, part.args)
    package = place.partition(".")[0]
    if (
        package.isidentifier()
        and package not in sys.modules
        and importlib.util.find_spec(package) is None
    ):
        raise ConfigError(f"reward: {part.name!r}: No module named {package!r}")
    return RewardTarget(attribute, place, None, attribute, part.args)


def _check_defined(part: RewardPart, file: Path, attribute: str) -> None:
    """Raise `ConfigError` if a Python file does not define the function `attribute`.

    The file is parsed but not run, because running it could import anything, and neither a dry run
    nor `weft config validate` runs reward code. A file that defines names only when it is run, for
    example by `import *`, is accepted here; the process that computes rewards checks it.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(
            f"reward: {part.name!r}: {file} cannot be read as Python ({error})"
        ) from error
    # Collect the defined, imported and assigned names.
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.Name):
            names.add(node.id)
    # `import *` and calls such as `globals` can define names that are not in the tree.
    if attribute not in names and names.isdisjoint(
        ("*", "__getattr__", "globals", "locals", "vars", "exec", "setattr")
    ):
        close = find_nearest(attribute, names)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ConfigError(
            f"reward: {part.name!r}: there is no function {attribute!r} in {file}{hint}"
        )


def _locate_verifier(part: RewardPart, checked: bool) -> RewardTarget:
    """Return the location of a registered verifier: the module or file that defines it.

    The location is needed because a verifier can be in user code that other processes have not
    imported. Raises `ConfigError` if the name is not registered, or if another process cannot
    import the verifier. With `checked`, also raises `ConfigError` if `part.args` has an option that
    the verifier does not have.
    """
    if part.name.endswith(".py"):
        raise ConfigError(
            f"reward: {part.name!r} does not name a function in the file; write "
            f"{part.name}:FUNCTION"
        )
    if part.name not in verifiers:
        raise build_unknown_name_error("verifier", part.name, verifiers.list_names())
    function = verifiers.get(part.name)
    if checked:
        _check_options(part, function)
    module = function.__module__
    name = function.__qualname__
    if module == "__main__" or not name.isidentifier():
        raise ConfigError(
            f"reward: {part.name!r} is {module}.{name}, which another process cannot import; "
            f"define it at the top level of a module"
        )
    file = inspect.getsourcefile(sys.modules[module])
    module_spec = importlib.util.find_spec(module)
    importable = (
        module_spec is not None
        and module_spec.origin is not None
        and file is not None
        and Path(module_spec.origin).samefile(file)
    )
    # A file imported by path (`--import FILE.py`) is a module in this process only; other processes
    # import it by path again.
    return RewardTarget(
        part.name,
        module if importable else None,
        None if importable else file,
        name,
        part.args,
        True,
    )


def _check_options(part: RewardPart, function: Callable[..., Any]) -> None:
    """Raise `ConfigError` for arguments that are not options of the verifier `function`.

    A built-in verifier is also called with empty lists, so that it raises an error for invalid
    values of its options.
    """
    parameters = inspect.signature(function).parameters.values()
    options = [p.name for p in parameters if p.default is not p.empty]
    for name in part.args:
        if name not in options:
            close = find_nearest(name, options)
            if close:
                hint = f"did you mean {' or '.join(close)}?"
            else:
                hint = f"its options: {', '.join(options) or 'none'}"
            raise ConfigError(f"reward: verifier {part.name!r} has no option {name!r}; {hint}")
    if function.__module__.startswith("weft.host.verifiers."):
        needed = []
        for p in list(parameters)[2:]:
            if p.default is p.empty and p.kind is p.KEYWORD_ONLY:
                needed.append(p.name)
        function([], [], **{name: [] for name in needed}, **part.args)
