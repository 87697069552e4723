"""A process that computes rewards: `python -m weft.host._worker FD`, started by `weft.host._pool`.

The process does not import torch.

It first reads (sys.path, targets) from the connection with descriptor `FD`, and sends one
`WorkerAnswer` once the targets are imported. It then reads tasks (`weft.host._pool.Task`) and sends
one `WorkerAnswer` for each. It ends when its standard input reaches the end of file, which happens
when the parent process ends or closes that pipe.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from weft.errors import UserError
from weft.host._results import InvalidRewardResult, RewardResultCheck, Value
from weft.host.spec import RewardTarget
from weft.registry import import_user_code

# ("ok", value, None), or ("error", message, index of the completion or None)
WorkerAnswer = tuple[str, Any, int | None]
POSITIONAL = 2  # number of positional arguments of a reward function: prompts, completions
SHOWN_FRAMES = 4  # number of frames of a traceback that a message shows, from the last one


def main(descriptor: int) -> None:
    """Import the reward functions, then answer tasks until the parent closes the connection.

    `descriptor` is the file descriptor of the connection.
    """
    # Redirect the standard streams, and end with the parent.
    connection = Connection(descriptor)
    threading.Thread(target=_kill_group_at_end_of_parent, args=(os.dup(0),), daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # output of rewards must not mix with that of the run
    # Line-buffered, so that the output of a killed worker is complete up to its last line
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    # Import the functions.
    try:
        sys.path[:], targets = connection.recv()
    except EOFError:  # released before it was used
        return
    functions: list[Callable[..., Any]] = []
    for target in targets:
        status, value, _ = _call_and_catch(load, target)
        if status == "error":
            connection.send((status, f"reward {target.label!r}: {value}", None))
            return
        functions.append(value)
    connection.send(("ok", None, None))
    # Compute the tasks.
    loop = asyncio.new_event_loop()
    while True:
        try:
            index, prompts, completions, ids, columns, row_arguments = connection.recv()
        except EOFError:
            return
        arguments = (
            merge_arguments(functions[index], targets[index], columns)
            | row_arguments
            | {"completion_ids": ids}
        )
        expected = RewardResultCheck(completions, ids, targets[index].by_token)
        connection.send(
            _call_and_catch(
                call_reward_function, functions[index], loop, prompts, expected, arguments
            )
        )


def _kill_group_at_end_of_parent(descriptor: int) -> None:
    """Wait until the parent process ends, then kill this process group.

    `descriptor` is the reading end of a pipe from the parent, which closes when the parent ends.
    """
    while os.read(descriptor, 1024):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _call_and_catch(work: Callable[..., Any], *arguments: Any) -> WorkerAnswer:
    """Call `work`, and return the result or, if it fails, the error message.

    The parent process raises an error with this message. All exceptions are caught, since an error
    in a user's code must not end this process.
    """
    try:
        return "ok", work(*arguments), None
    except InvalidRewardResult as error:
        return "error", str(error), error.index
    except UserError as error:
        return "error", str(error), None
    except BaseException as error:
        frames = []
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename != __file__:
                frames.append(frame)
        places = []
        for frame in frames[-SHOWN_FRAMES:]:
            places.append(f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}")
        return "error", "\n  ".join([f"it raised {type(error).__name__}: {error}", *places]), None


def load(target: RewardTarget) -> Callable[..., Any]:
    """Import and return the function at the location `target`.

    Raises `InvalidRewardResult` if the function does not exist, cannot be called, or does not
    accept the target's arguments.
    """
    if target.file is not None:
        import_user_code([target.file])
        module = sys.modules[os.path.splitext(os.path.basename(target.file))[0]]
    else:
        assert target.module is not None, "a target names a module or a file"
        module = importlib.import_module(target.module)
    try:
        function = getattr(module, target.attribute)
    except AttributeError:
        raise InvalidRewardResult(
            f"there is no function {target.attribute!r} in {target.file or target.module}"
        ) from None
    if not callable(function):
        raise InvalidRewardResult(
            f"{target.attribute!r} is of type {type(function).__name__}, not a function"
        )
    reward_function: Callable[..., Any] = function
    parameters = inspect.signature(reward_function).parameters.values()
    unknown = []
    for name in target.args:
        if name not in {p.name for p in parameters}:
            unknown.append(name)
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise InvalidRewardResult(f"it takes no argument {', '.join(map(repr, unknown))}")
    return reward_function


def merge_arguments(
    function: Callable[..., Any], target: RewardTarget, columns: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keyword arguments for a reward function: the data columns and the target's `args`.

    An argument in `args` takes precedence over a column of the same name. For a verifier, columns
    that have the name of one of its options are left out.
    """
    options: set[str] = set()
    if target.verifier:
        for p in inspect.signature(function).parameters.values():
            if p.default is not p.empty:
                options.add(p.name)
    return {name: values for name, values in columns.items() if name not in options} | dict(
        target.args
    )


def call_reward_function(
    function: Callable[..., Any],
    loop: asyncio.AbstractEventLoop,
    prompts: Sequence[str],
    expected: RewardResultCheck,
    arguments: Mapping[str, Any],
) -> tuple[list[Value], dict[str, float]]:
    """Call a reward function on some completions, and return its validated rewards and metrics.

    `expected` holds the completions and validates the result. `arguments` holds the keyword
    arguments. If the function is async, its coroutine is run to completion in `loop`.
    """
    result = function(prompts, expected.texts, **select_accepted_columns(function, arguments))
    if inspect.isawaitable(result):
        result = loop.run_until_complete(_await_result(result))
    return expected.validate(result)


async def _await_result(result: Any) -> Any:
    return await result


def select_accepted_columns(
    function: Callable[..., Any], columns: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the columns that a reward function accepts as keyword arguments.

    Raises `InvalidRewardResult` if a column that the function requires is missing.
    """
    parameters = list(inspect.signature(function).parameters.values())[POSITIONAL:]
    missing = []
    for p in parameters:
        if p.default is p.empty and p.name not in columns and p.kind in NAMED_PARAMETER_KINDS:
            missing.append(p.name)
    if missing:
        available = ", ".join(sorted(set(columns) - {"completion_ids"})) or "none"
        raise InvalidRewardResult(
            f"it needs {', '.join(map(repr, missing))}, but the dataset's columns are: {available}"
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(columns)
    return {p.name: columns[p.name] for p in parameters if p.name in columns}


NAMED_PARAMETER_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


if __name__ == "__main__":
    main(int(sys.argv[1]))
