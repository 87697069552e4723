"""Two answers compared by computer algebra: `math_verify` (Hugging Face), within bounds of size and
time.

The library runs in a process of its own (`_algebra`), which the kernel ends when its processor time
is over: no loop in Python, C or a regular expression outlasts that, and a thread may ask as well.
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

SECONDS = 2.0  # of processor time for one answer
ALLOWANCE = 4.0  # for all answers of this process together, beside
REFILL = 0.05  # for each
START_SECONDS = 120.0  # to import the library
MOST_CHARACTERS = 100_000  # of a text that is searched for its answer
MOST_COMMAS = 150
TAIL = 300  # characters of a text that are looked at for what is too large
# What takes a computer algebra system for ever: large powers of letters and brackets, towers of
# powers, powers, factorials and binomials of large numbers, deep nesting.
HUGE = re.compile(
    r"[A-Za-z)\]}|]\s*\^\s*\{?\s*-?\d{3,}|\^\s*\{?\s*-?\d{5,}|[\d)\]}]\s*\^\s*\{?\s*\(?\d+\s*\^|\d{4,}\s*!|!\s*!|\)\s*!\s*\)\s*!"
    r"|binom\s*\{?\s*\d{5,}|[(\[{]{12}"
)
SOURCE = Path(__file__).resolve().parents[3]  # the folder that holds the package


def formula(text: str) -> str:
    """The text with signs around it that say it is a formula, where it has none."""
    if any(sign in text for sign in ("$", r"\(", r"\[", r"\boxed")):
        return text
    return f"${text}$"


def same(reference: str, answer: str) -> bool:
    """Whether two texts say the same to the library: formulas, or sentences that hold one.

    False where it takes too long.
    """
    return not (_too_large(reference) or _too_large(answer)) and engine().ask(reference, answer)


def _too_large(text: str) -> bool:
    tail = text[-TAIL:]
    return (
        len(text) > MOST_CHARACTERS
        or HUGE.search(tail) is not None
        or tail.count(",") > MOST_COMMAS
    )


def engine() -> Engine:
    """The one of this process."""
    return _engine(os.getpid())


@functools.cache
def _engine(pid: int) -> Engine:
    return Engine()


class Engine:
    """The process that compares, started when it is first asked, and the time it has.

    An answer has `SECONDS`, and all answers share an allowance, so that n answers take `ALLOWANCE +
    REFILL * n` seconds at most: the first slow ones get all their time, those that follow little.
    Processor time, so that a busy machine judges alike.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._close: Any = None
        self.process: subprocess.Popen[bytes] | None = None
        self._count = 0
        self.allowed = ALLOWANCE  # seconds
        self._answer = SECONDS

    def begin(self) -> None:
        """What is asked from now on is about another answer."""
        with self._lock:
            self.allowed = min(ALLOWANCE, self.allowed + REFILL)
            self._answer = SECONDS

    def ask(self, reference: str, answer: str) -> bool:
        """Whether two texts say the same; False when the time is over."""
        with self._lock:
            seconds = min(self.allowed, self._answer)
            if seconds < REFILL / 10:
                return False
            found, used = self._asked(reference, answer, seconds)
            self.allowed -= used
            self._answer -= used
            return found

    def _asked(self, reference: str, answer: str, seconds: float) -> tuple[bool, float]:
        """(whether they are the same, the seconds it took)."""
        connection = self._connection or self._start()
        self._count += 1
        try:
            connection.send((self._count, reference, answer, seconds))
            while connection.poll(5 * seconds + 2):
                number, found, used = connection.recv()
                if number is None or number == self._count:
                    return found, used if number else seconds
        except (EOFError, OSError):
            pass
        self._stop()  # it has died, or has no processor
        return False, seconds

    def _start(self) -> Connection:
        ours, theirs = multiprocessing.Pipe()
        # an empty name would be the working folder
        path = [str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])]
        with theirs:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-W",
                    "ignore",
                    "-m",
                    f"{__package__}._algebra",
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
            raise RunError("the process for `math_verify` does not start; its message stands above")
        self._connection = ours
        self.process = process
        return ours

    def _stop(self) -> None:
        self._close()
        self._connection = None


def _end(connection: Connection, process: subprocess.Popen[bytes], owner: int) -> None:
    connection.close()
    if os.getpid() == owner:  # a fork of it leaves the process alone
        process.kill()
        process.wait()
