"""What a chat template may not do, which comes with a model and is run: loop without end, or make texts without bound."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils.chat_template_utils import render_jinja_template

from weft.reading import reason

SECONDS = 5.0  # that a template may take for a greeting
MOST_CHARACTERS = 1_000_000  # that it may make of one
MOST_EXPONENT = 64
MARKS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # a tag that transformers adds to jinja


class TookTooLong(Exception):
    """What `within` raises."""

    def __str__(self) -> str:
        return f"does not end within {SECONDS:g} s"


@cache
def template_problem(template: str) -> str | None:
    """What a template does that it may not, with the line where there is one, or None."""
    try:
        found = _oversized(template)
        if found is not None:
            return found
        with within(SECONDS):
            written: Any = render_jinja_template([[{"role": "user", "content": "Hi"}]], chat_template=template)
    except jinja2.TemplateSyntaxError as error:
        return f"does not compile, line {error.lineno}: {error.message}"
    except (TookTooLong, RecursionError, MemoryError) as error:
        return reason(error)
    except (jinja2.TemplateError, TypeError, LookupError, AttributeError, ValueError, ArithmeticError, NameError):
        return None  # it compiles; what it refuses shows with real messages
    if len(written[0][0]) > MOST_CHARACTERS:
        return f"makes {len(written[0][0]):,} characters of a greeting"
    return None


def _oversized(template: str) -> str | None:
    """A product or power of constants in a template that fills the memory: jinja computes it as soon as it compiles one."""
    tree = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(MARKS.sub("", template))
    for node in reversed(list(_below(tree))):  # what stands inside comes first
        if isinstance(node, nodes.Pow):
            exponent = _constant(node.right)
            if isinstance(exponent, int | float) and abs(exponent) > MOST_EXPONENT:
                return f"takes a power of {exponent:g}, line {node.lineno}"
        elif isinstance(node, nodes.Mul):
            one, other = _constant(node.left), _constant(node.right)
            size = max((len(each) for each in (one, other) if isinstance(each, str | list | tuple)), default=0)
            times = max((each for each in (one, other) if isinstance(each, int)), default=0)
            if size * times > MOST_CHARACTERS:
                return f"repeats a text {times:,} times, line {node.lineno}"
    return None


def _below(node: nodes.Node) -> Iterator[nodes.Node]:
    yield node
    for child in node.iter_child_nodes():
        yield from _below(child)


def _constant(node: nodes.Expr) -> Any:
    try:
        return node.as_const()
    except (nodes.Impossible, ArithmeticError):
        return None


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises `TookTooLong` in this thread where what is done takes longer; between two steps of Python, so not inside a
    library's own code."""
    thread, lock, over = threading.get_ident(), threading.Lock(), False

    def interrupt() -> None:
        with lock:
            if not over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TookTooLong))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            over = True
        timer.cancel()
