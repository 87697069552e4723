"""Process, started by `_symbolic`, that compares answers with the library `math_verify`.

Usage: `python -m weft.host.verifiers._algebra FD`.

The process forks a child that answers questions. The child reads (question number, reference,
answer, time limit in seconds) from the connection with descriptor `FD`, and sends (question number,
whether the two are equal, seconds used). When a question has used up its time limit, which is
processor time, the kernel kills the child, whatever library code it is running. The process then
sends (None, False, 0) and forks another child.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import resource
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import math_verify

from weft.host.verifiers._survival import is_fully_parsed

MEMORY = 4 << 30  # limit of the address space in bytes
TARGETS = (
    math_verify.LatexExtractionConfig(boxed_match_priority=0),
    math_verify.ExprExtractionConfig(),
)


def main(descriptor: int) -> None:
    """Fork a child that compares texts on request, and replace it whenever it is killed.

    The requests come over the connection with the file descriptor `descriptor`. The kernel kills
    the child if a comparison exceeds its time limit. Returns when the connection closes.
    """
    connection = Connection(descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    # Silence the libraries' warnings about texts that are not mathematics.
    for name in (
        "math_verify",
        "latex2sympy2_extended",
    ):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    are_surely_equal("$1$", "$1$")  # triggers lazy imports
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.send("ready")
        while True:
            child = os.fork()
            if child == 0:
                _serve(connection)
            _, status = os.waitpid(child, 0)
            if status == 0:
                return
            connection.send((None, False, 0.0))


def _serve(connection: Connection) -> None:
    """Answer requests to compare two texts until the connection closes, then exit this process.

    This runs in the child that `main` forks.
    """
    try:
        while True:
            number, reference, answer, seconds = connection.recv()
            begin = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, seconds)
            is_equal = are_surely_equal(reference, answer)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send((number, is_equal, time.process_time() - begin))
    except (EOFError, OSError):
        os._exit(0)
    finally:
        os._exit(1)


@functools.lru_cache(maxsize=4096)
def are_surely_equal(reference: str, answer: str) -> bool:
    """Return whether `math_verify` finds two texts equal and this verdict can be trusted.

    The verdict is trusted if the library has parsed both texts completely. The texts are formulas,
    or sentences that contain one.
    """
    return are_equal(reference, answer) and is_fully_parsed(
        reference, answer, are_equal, parse_answer
    )


def are_equal(reference: str, answer: str) -> bool:
    """Return whether `math_verify` finds the answers in two texts equal."""
    one = parse_answer(reference)
    other = parse_answer(answer)
    return bool(
        one
        and other
        and math_verify.verify(
            list(one), list(other), timeout_seconds=None, allow_set_relation_comp=True
        )
    )


@functools.lru_cache(maxsize=4096)
def parse_answer(text: str) -> tuple[Any, ...]:
    """Return the expressions that `math_verify` finds in the last box, formula or number of a text.

    The result is empty if the text has none of these.
    """
    return tuple(math_verify.parse(text, TARGETS, parsing_timeout=None))


if __name__ == "__main__":
    main(int(sys.argv[1]))
