"""The verifier `code`: run a completion's Python program and its tests.

The program and the tests run in two processes that the operating system isolates.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

from weft.errors import DataError
from weft.host.verifiers._sandbox import SandboxLimits, SandboxTask, run_tests
from weft.registry import register_verifier

FENCED = re.compile(r"```[ \t]*([\w+-]*)[ \t\r]*\n(.*?)(?:```|\Z)", re.DOTALL)
PYTHON = ("", "python", "python3", "py")  # languages of fenced blocks
# Lines between which MBPP's prompt puts programs
BEGIN = re.compile(r"^[ \t]*\[BEGIN\][ \t]*", re.MULTILINE)
DONE = re.compile(r"^[ \t]*\[DONE\]", re.MULTILINE)


def extract_program(prompt: str, completion: str, entry_point: str | None) -> str:
    """Return the program in a completion: its last fenced block of Python, or the whole completion.

    If there are several blocks, the last one that defines `entry_point` is used. Text before a line
    [BEGIN] or after a line [DONE] (MBPP) is ignored. If no block defines `entry_point`, the last
    one is assumed to continue the code of the prompt, so the prompt is put before it (HumanEval:
    the prompt ends in a signature, and the completion is the body).
    """
    before, *rest = BEGIN.split(completion, maxsplit=1)
    text = DONE.split(rest[0] if rest else before, maxsplit=1)[0]
    fenced = FENCED.findall(text)
    blocks = [code for language, code in fenced if language.lower() in PYTHON] or [text]
    if entry_point is None:
        return blocks[-1]
    for code in reversed(blocks):
        if _is_defined(code, entry_point):
            return code
    return prompt + blocks[-1]


def _is_defined(code: str, name: str) -> bool:
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(
        isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name for node in tree.body
    )


def parse_tests(test: Any, entry_point: str | None) -> str:
    """Return the code of a row's tests, given as a string or a list of statements.

    If the tests define a function `check` (HumanEval), a call `check(entry_point)` is appended.
    Raises `DataError` for tests of another type.
    """
    text = "\n".join(test) if isinstance(test, (list, tuple)) else test
    if not isinstance(text, str):
        raise DataError(
            f"code: tests must be a text or a list of statements, not {type(test).__name__}"
        )
    if entry_point and re.search(r"^def check\(", text, re.MULTILINE):
        call = f"\ncheck({entry_point})\n"
    else:
        call = ""
    return text + call


@register_verifier("code")
def code(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    completion_ids: Sequence[Sequence[int]],
    seconds: float = 5.0,
    memory_mb: int = 1024,
    **columns: Sequence[Any],
) -> list[float | None]:
    """Return 1 for completions whose program and tests run without error, else 0.

    The reward is None for rows without tests. The tests run in another process, which calls the
    program's functions; docs/code-reward.md describes how the machine is protected.

    The tests are in the column `test` (a string, as in HumanEval), `tests` or `test_list`
    (statements such as `assert f(1) == 2`, as in MBPP). The column `entry_point`, the function's
    name, is needed if the completion can continue the prompt's code. `seconds` (wall time) and
    `memory_mb` limit each program; reward_timeout_s limits the whole batch.
    """
    limits = SandboxLimits(seconds=seconds, memory_mb=memory_mb)
    tests_by_row = next(
        (columns[name] for name in ("test", "tests", "test_list") if name in columns),
        [None] * len(completions),
    )
    entry_points = columns.get("entry_point", [None] * len(completions))
    rewards: list[float | None] = []
    for prompt, completion, test, entry_point in zip(
        prompts, completions, tests_by_row, entry_points, strict=True
    ):
        if test is None:
            rewards.append(None)
            continue
        program = extract_program(prompt, completion, entry_point)
        rewards.append(
            float(
                run_tests(
                    SandboxTask(program, parse_tests(test, entry_point), prompt, entry_point),
                    limits,
                )
            )
        )
    return rewards
