"""Comparison of two answers by the computer algebra of `math_verify` (Hugging Face), with limits.

The library runs in a separate process (`_survival`), which the kernel ends when its processor time
is used up: no loop in Python, C or a regular expression can exceed the limit. Unlike limits by
signals, this also works in threads.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import weakref
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from weft.errors import RunError

SECONDS = 2.0  # maximum processor time of one answer, in seconds
ALLOWANCE = 4.0  # processor time shared by all answers of this process, in seconds
REFILL = 0.05  # seconds added to the allowance for each answer
START_SECONDS = 120.0  # time limit of importing the library
MOST_SEARCHED_CHARACTERS = 100_000  # maximum length of a text that is searched for its answer
MOST_COMMAS = 150  # maximum number of commas in a text's last `TAIL` characters
TAIL = 300  # number of last characters that are searched for expressions that are too large
# Expressions that take computer algebra too long: large powers of letters and brackets, towers of
# powers, powers, factorials and binomials of large numbers, deep nesting.
HUGE = re.compile(
    r"[A-Za-z)\]}|]\s*\^\s*\{?\s*-?\d{3,}|\^\s*\{?\s*-?\d{5,}|[\d)\]}]\s*\^\s*\{?\s*\(?\d+\s*\^|\d{4,}\s*!|!\s*!|\)\s*!\s*\)\s*!"
    r"|binom\s*\{?\s*\d{5,}|[(\[{]{12}"
)
SOURCE = Path(__file__).resolve().parents[3]  # parent directory of the package


def mark_formula(text: str) -> str:
    """Enclose a text in dollar signs, unless it already contains a marked formula or a box."""
    if any(sign in text for sign in ("$", r"\(", r"\[", r"\boxed")):
        return text
    return f"${text}$"


def are_equal_by_algebra(reference: str, answer: str) -> bool:
    """Return whether `math_verify` finds two texts equal.

    Returns False if the texts are too large or the comparison takes too long. The texts are
    formulas, or sentences that contain one.
    """
    return not (_is_too_large(reference) or _is_too_large(answer)) and get_engine().ask(
        reference, answer
    )


def _is_too_large(text: str) -> bool:
    tail = text[-TAIL:]
    return (
        len(text) > MOST_SEARCHED_CHARACTERS
        or HUGE.search(tail) is not None
        or tail.count(",") > MOST_COMMAS
    )


def get_engine() -> AlgebraProcess:
    """Return the current process's `AlgebraProcess`; every process has a separate one."""
    return _create_engine(os.getpid())


@functools.cache
def _create_engine(pid: int) -> AlgebraProcess:
    return AlgebraProcess()


class AlgebraProcess:
    """Process that compares answers with `math_verify` within a time budget.

    The process is started for the first comparison. Three constants of the module limit its time in
    seconds. One answer can use at most `SECONDS`. In addition, all answers share a budget: it
    starts at `ALLOWANCE`, and each new answer refills it by `REFILL`, up to `ALLOWANCE`. The first
    slow answers therefore get the full time, and later ones only a little. All times are processor
    times, so that verdicts do not depend on the load of the machine.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._close: Any = None
        self.process: subprocess.Popen[bytes] | None = None
        self._count = 0
        self.allowance_seconds = ALLOWANCE  # remaining seconds for all answers
        self._answer_seconds = SECONDS

    def begin(self) -> None:
        """Give the next answer its full time limit, and refill the budget that all answers share.

        The budget grows by `REFILL` seconds of processor time, but to at most `ALLOWANCE` seconds.
        """
        with self._lock:
            self.allowance_seconds = min(ALLOWANCE, self.allowance_seconds + REFILL)
            self._answer_seconds = SECONDS

    def ask(self, reference: str, answer: str) -> bool:
        """Return whether `math_verify` finds two texts equal; False if it runs out of time."""
        with self._lock:
            seconds = min(self.allowance_seconds, self._answer_seconds)
            if seconds < REFILL / 10:
                return False
            is_equal, used = self._send_question(reference, answer, seconds)
            self.allowance_seconds -= used
            self._answer_seconds -= used
            return is_equal

    def _send_question(self, reference: str, answer: str, seconds: float) -> tuple[bool, float]:
        """Let the process compare two texts, using at most `seconds` of processor time.

        Returns whether the texts are equal, and the processor time used, in seconds.
        """
        connection = self._connection or self._start()
        self._count += 1
        try:
            connection.send((self._count, reference, answer, seconds))
            while connection.poll(5 * seconds + 2):
                number, is_equal, used = connection.recv()
                if number is None or number == self._count:
                    return is_equal, used if number else seconds
        except (EOFError, OSError):
            pass
        self._stop()  # the process has died, or gets no processor time
        return False, seconds

    def _start(self) -> Connection:
        ours, theirs = multiprocessing.Pipe()
        # An empty entry would mean the working directory
        path = [str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])]
        with theirs:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-W",
                    "ignore",
                    "-m",
                    f"{__package__}._survival",
                    str(theirs.fileno()),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
            )
        self._close = weakref.finalize(self, _end, ours, process, os.getpid())
        ready = False
        with contextlib.suppress(EOFError, OSError):
            ready = ours.poll(START_SECONDS) and ours.recv() == "ready"
        if not ready:
            self._stop()
            raise RunError(
                "the process for `math_verify` did not start; see its error message above"
            )
        self._connection = ours
        self.process = process
        return ours

    def _stop(self) -> None:
        self._close()
        self._connection = None


def _end(connection: Connection, process: subprocess.Popen[bytes], owner: int) -> None:
    connection.close()
    if os.getpid() == owner:  # a fork must not kill the parent's process
        process.kill()
        process.wait()
