"""Limits on chat templates, normalizers and decoders, which come with a model and run as code.

A template must neither loop forever nor produce texts of unbounded length. Normalizers and decoders
of tokenizer.json must not make texts grow without bound: a chain of forty steps that each replace
one space by two would need a terabyte for one row, and the `tokenizers` library would abort the
process.
"""

from __future__ import annotations

import ctypes
import json
import math
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils.chat_template_utils import render_jinja_template

from weft.errors import UserError
from weft.reading import describe_cause, read_text

GREETING_SECONDS = 5.0  # time limit for rendering a greeting
CONVERSATION_SECONDS = 10.0  # time limit for rendering any other conversation
CHECK_SECONDS = 0.05  # interval at which a `TimeLimitThread` checks its entries
IDLE_SECONDS = 1.0  # time without entries after which a `TimeLimitThread` ends
MAX_CHARACTERS = 1_000_000  # maximum length of a rendered greeting, and of a repeated constant
MAX_EXPONENT = 64
MARKS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # a tag that transformers adds to jinja


class TimeLimitExceeded(Exception):
    """Raised by `limit_time` if the code in its `with` block takes too long."""

    def __str__(self) -> str:
        return super().__str__() or "does not end in time"


@cache
def find_template_problem(template: str) -> str | None:
    """Return a description of the problem with a chat template, or None for a usable template.

    Problems are syntax errors, and templates that need too much time or memory. The description
    includes the line number if it is known.
    """
    try:
        problem = _find_oversized(template)
        if problem is not None:
            return problem
        with limit_time(GREETING_SECONDS):
            rendered: Any = render_jinja_template(
                [[{"role": "user", "content": "Hi"}]], chat_template=template
            )
    except jinja2.TemplateSyntaxError as error:
        return f"does not compile, line {error.lineno}: {error.message}"
    except (TimeLimitExceeded, RecursionError, MemoryError) as error:
        return describe_cause(error)
    except (
        jinja2.TemplateError,
        TypeError,
        LookupError,
        AttributeError,
        ValueError,
        ArithmeticError,
        NameError,
    ):
        return None  # the template compiles; whether it suits the real messages is checked later
    num_characters = len(rendered[0][0])
    if num_characters > MAX_CHARACTERS:
        return f"renders a greeting as {num_characters:,} characters"
    return None


def _find_oversized(template: str) -> str | None:
    """Return a description of a constant expression in the template that would fill the memory.

    Such an expression is a product or power of constants, which Jinja computes while it compiles
    the template. Returns None if the template has no such expression.
    """
    tree = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(
        MARKS.sub("", template)
    )
    for node in reversed(list(_iterate_below(tree))):  # inner expressions first
        if isinstance(node, nodes.Pow):
            exponent = _evaluate_constant(node.right)
            if isinstance(exponent, int | float) and abs(exponent) > MAX_EXPONENT:
                return f"takes a power of {exponent:g}, line {node.lineno}"
        elif isinstance(node, nodes.Mul):
            left = _evaluate_constant(node.left)
            right = _evaluate_constant(node.right)
            size = max(
                (len(value) for value in (left, right) if isinstance(value, str | list | tuple)),
                default=0,
            )
            times = max((value for value in (left, right) if isinstance(value, int)), default=0)
            if size * times > MAX_CHARACTERS:
                return f"repeats a text {times:,} times, line {node.lineno}"
    return None


def _iterate_below(node: nodes.Node) -> Iterator[nodes.Node]:
    yield node
    for child in node.iter_child_nodes():
        yield from _iterate_below(child)


def _evaluate_constant(node: nodes.Expr) -> Any:
    try:
        return node.as_const()
    except (nodes.Impossible, ArithmeticError):
        return None


class TimeLimitThread:
    """Thread that interrupts other threads when they exceed their time limits.

    The same thread monitors all renderings of chat templates. Starting a timer for each rendering
    would usually take longer than the rendering itself. The thread ends after it has been idle for
    a while.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[object, tuple[int, float]] = {}  # entry -> (thread, deadline)
        self._thread: threading.Thread | None = None

    def begin(self, seconds: float) -> object:
        """Start a time limit for the calling thread, and return a token that identifies the limit.

        After `seconds`, the calling thread is interrupted unless `end` has been called with the
        token.
        """
        entry = object()
        with self._lock:
            self._entries[entry] = threading.get_ident(), time.monotonic() + seconds
            # In a forked process the thread does not run.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name="weft-templates", daemon=True
                )
                self._thread.start()
        return entry

    def end(self, entry: object) -> None:
        with self._lock:
            self._entries.pop(entry, None)

    def _run(self) -> None:
        idle_since = time.monotonic()
        while True:
            time.sleep(CHECK_SECONDS)
            with self._lock:
                now = time.monotonic()
                for entry, (thread, until) in list(self._entries.items()):
                    if now > until:
                        del self._entries[entry]
                        exception = ctypes.py_object(TimeLimitExceeded)
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(
                            ctypes.c_ulong(thread), exception
                        )
                idle_since = now if self._entries else idle_since
                if now - idle_since > IDLE_SECONDS:
                    self._thread = None
                    return


@cache
def _get_thread() -> TimeLimitThread:
    return TimeLimitThread()


@contextmanager
def limit_time(seconds: float) -> Iterator[None]:
    """Raise `TimeLimitExceeded` if the code in the context takes longer than `seconds`.

    The error is raised in the calling thread, between two bytecode instructions, so it cannot
    interrupt a C function.
    """
    thread = _get_thread()
    entry = thread.begin(seconds)
    try:
        yield
    except TimeLimitExceeded:
        raise TimeLimitExceeded(f"does not end within {seconds:g} s") from None
    finally:
        thread.end(entry)


MAX_GROWTH = 100  # maximum growth factor of a text; known tokenizers reach about 20
MAX_PREPENDED = 1000  # maximum number of characters that a normalizer may prepend
# Maximum growth factor by kind of step. ByteLevel writes each byte as a letter of two bytes, and a
# character map such as NFKC can replace one character by many.
GROWTH = {"ByteLevel": 2.0, "Precompiled": 20.0}
PARTS = re.compile(r'(?<!\\)"(normalizer|decoder)"\s*:\s*(?=\{)')


def check_growth(file: Path, label: str) -> None:
    """Raise `UserError` if a tokenizer.json can make a text more than `MAX_GROWTH` times longer.

    The limit applies to its normalizer and to its decoder. The error message begins with `label`.
    """
    for part, values in _parse_components(read_text(file, label)):
        growth = compute_growth(values)
        if growth > MAX_GROWTH:
            raise UserError(
                f"{label}: its {part} makes a text up to {growth:.3g} times longer, and at most "
                f"{MAX_GROWTH} are allowed; use "
                "another tokenizer"
            )


def _parse_components(text: str) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for the normalizer and the decoder in the text of a tokenizer.json.

    The rest of the file, which is large, is not parsed.
    """
    decoder = json.JSONDecoder()
    for match in PARTS.finditer(text):
        try:
            yield match[1], decoder.raw_decode(text, match.end())[0]
        except (ValueError, RecursionError):  # the library refuses the file
            continue


def compute_growth(values: Any) -> float:
    """Return the maximum factor by which a normalizer or decoder makes a text longer.

    `values` describes the normalizer or decoder in the format of tokenizer.json. The factor is
    infinite if a step prepends more than `MAX_PREPENDED` characters.
    """
    if not isinstance(values, Mapping):
        return 1.0
    chain = next(
        (
            values[name]
            for name in ("normalizers", "decoders")
            if isinstance(values.get(name), list)
        ),
        None,
    )
    # A sequence of steps.
    if chain is not None:
        return math.prod(compute_growth(each) for each in chain)
    if values.get("type") == "Prepend":
        if len(str(values.get("prepend"))) <= MAX_PREPENDED:
            return 1.0
        return math.inf
    if values.get("type") != "Replace":
        return GROWTH.get(str(values.get("type")), 1.0)
    # A replacement of a text or a regular expression.
    content = str(values.get("content") or "")
    pattern = values.get("pattern")
    if not isinstance(pattern, Mapping):
        return 1.0
    text = pattern.get("String")
    rule = pattern.get("Regex")
    if isinstance(text, str) and text:
        return max(1.0, len(content) / len(text))
    if _has_empty_match(rule):
        return 1.0 + len(content)
    return max(1.0, float(len(content)))


def _has_empty_match(rule: Any) -> bool:
    """Return whether a regular expression can match the empty string.

    Also returns True for an expression that Python cannot compile.
    """
    try:
        return re.match(str(rule or ""), "") is not None
    except (re.error, RecursionError, OverflowError):  # syntax that only the library knows
        return True
