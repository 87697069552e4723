"""The verifier `math`: compares the final answer of a completion with the reference as mathematics."""

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
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from weft.errors import RunError
from weft.host.verifiers._answers import count_boxes, extract_boxed, extract_stated, find_references
from weft.host.verifiers._latex import (
    are_spelled_alike,
    extract_set,
    is_formula,
    measure,
    parse_exact,
    parse_inequality,
    parse_quantities,
    split_brackets,
    split_list,
    split_name,
    split_union,
    tidy,
    to_plain_form,
)
from weft.host.verifiers._value import compare_congruences, compare_ratios, have_same_value
from weft.registry import register_verifier

SECONDS = 2.0  # maximum processor time of one answer, in seconds
ALLOWANCE = 4.0  # processor time shared by all answers of this process, in seconds
REFILL = 0.05  # seconds added to the allowance for each answer
START_SECONDS = 120.0  # time limit of importing the library
MAX_SEARCHED_CHARACTERS = 100_000  # maximum length of a text that is searched for its answer
MAX_COMMAS = 150  # maximum number of commas in a text's last `TAIL` characters
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
        len(text) > MAX_SEARCHED_CHARACTERS
        or HUGE.search(tail) is not None
        or tail.count(",") > MAX_COMMAS
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
        own_end, other_end = multiprocessing.Pipe()
        # An empty entry would mean the working directory
        path = [str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])]
        with other_end:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-W",
                    "ignore",
                    "-m",
                    f"{__package__}._survival",
                    str(other_end.fileno()),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=(other_end.fileno(),),
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
            )
        self._close = weakref.finalize(self, _end, own_end, process, os.getpid())
        ready = False
        with contextlib.suppress(EOFError, OSError):
            ready = own_end.poll(START_SECONDS) and own_end.recv() == "ready"
        if not ready:
            self._stop()
            raise RunError(
                "the process for `math_verify` did not start; see its error message above"
            )
        self._connection = own_end
        self.process = process
        return own_end

    def _stop(self) -> None:
        self._close()
        self._connection = None


def _end(connection: Connection, process: subprocess.Popen[bytes], owner: int) -> None:
    connection.close()
    if os.getpid() == owner:  # a fork must not kill the parent's process
        process.kill()
        process.wait()


# A number and its base: 101_2, (2A)_{16}.
BASE = re.compile(
    r"\(?\d+\)?_\{(?:[2-9]|[1-3]\d)\}|\(?(?:[\dA-F]{2,}|\d[\da-f]+)\)?_\{(?:1[1-9]|[23]\d)\}"
)
TEXT = re.compile(r"\\(?:text|mbox|mathrm|textrm)\{\s*[A-Za-z][A-Za-z ]+\}")
EITHER = re.compile(r"\d\W*\sor\s\W*\d")  # 5 or 6
SHORT = 200  # maximum number of characters of a text that can be an answer as a whole
MAX_CHARACTERS = 2000  # maximum length of an answer that is compared as mathematics
MAX_MEMBERS = 30  # maximum number of differently spelled members that are compared pairwise


def are_equal(answer: str, reference: str) -> bool:
    r"""Return whether an answer is mathematically equal to the reference.

    For example, 1/2 = 0.5 = \frac12, (x+1)^2 = x^2+2x+1 and {1,2} = {2,1}, but [0,1) differs from
    (0,1].

    Cases that can be decided with certainty (numbers, lists, tuples, intervals, equal spelling,
    equal value) are decided without computer algebra. All other cases are decided by `math_verify`,
    which can ignore parts of an answer. Its verdict "equal" therefore counts only if replacing any
    letter or number in either answer makes the two answers different.
    """
    get_engine().begin()
    return _are_tidy_equal(answer, reference)


def _are_tidy_equal(answer: str, reference: str) -> bool:
    tidy_answer = tidy(answer)
    tidy_reference = tidy(reference)
    verdict = _compare_by_rules(tidy_answer, tidy_reference)
    if verdict is None:
        return are_equal_by_algebra(mark_formula(tidy_reference), mark_formula(tidy_answer))
    return verdict


def _compare_by_rules(answer: str, reference: str) -> bool | None:
    """Return whether two answers are equal, or None if this is uncertain.

    The answers must be results of `_latex.tidy`. Computer algebra is not used on whole answers, but
    can be used on their parts, such as the members of two lists.
    """
    # Quantities, congruences and units
    if not answer or not reference or max(len(answer), len(reference)) > MAX_CHARACTERS:
        return answer == reference
    verdict = _compare_quantities(answer, reference)
    if verdict is not None:
        return verdict
    verdict = compare_congruences(answer, reference, _are_tidy_equal)
    if verdict is not None:
        return verdict
    units = measure(answer), measure(reference)
    if None not in units and units[0] != units[1]:
        return False
    # Spelling, ratios, numbers and words
    plain_answer = to_plain_form(answer)
    plain_reference = to_plain_form(reference)
    if are_spelled_alike(plain_answer, plain_reference):
        return True
    verdict = compare_ratios(plain_answer, plain_reference)
    if verdict is not None:
        return verdict
    numbers = parse_exact(plain_answer), parse_exact(plain_reference)
    if None not in numbers:
        return numbers[0] == numbers[1]
    if BASE.fullmatch(plain_answer) or BASE.fullmatch(plain_reference):
        return False  # different digits or bases
    if (
        plain_answer.isalpha()
        and plain_reference.isalpha()
        and (TEXT.fullmatch(answer) or TEXT.fullmatch(reference))
    ):
        return False  # different words
    # Sets, unions and lists
    members = extract_set(answer)
    reference_members = extract_set(reference)
    if members is not None or reference_members is not None:
        if _is_set_and_tuple(members, reference) or _is_set_and_tuple(reference_members, answer):
            return False
        return _compare_by_rules(
            answer if members is None else members,
            reference if reference_members is None else reference_members,
        )
    answer_parts = split_union(answer)
    reference_parts = split_union(reference)
    if answer_parts and reference_parts:
        return True if _have_same_members(answer_parts, reference_parts) else None
    if split_list(answer) or split_list(reference):
        return _compare_lists(answer, reference)
    # Named values, intervals and values of expressions
    (name, answer), (reference_name, reference) = split_name(answer), split_name(reference)
    if (name is None) != (reference_name is None) or (name is not None and name == reference_name):
        return _compare_by_rules(answer, reference)
    if name is not None and reference_name is not None:
        return False if name[0] == reference_name[0] == "(" else None  # different letters
    verdict = _compare_intervals(answer, reference)
    return have_same_value(plain_answer, plain_reference) if verdict is None else verdict


def _is_set_and_tuple(members: str | None, other: str) -> bool:
    return (
        members is not None
        and split_list(members) is not None
        and split_brackets(other) is not None
    )


def _compare_quantities(answer: str, reference: str) -> bool | None:
    """Return whether two answers are equal compound quantities, such as 3 hours 20 minutes.

    A compound quantity never equals a single number such as 3. Returns None if neither answer is a
    compound quantity, or if the comparison is undecided.
    """
    quantities = parse_quantities(answer), parse_quantities(reference)
    if quantities[0] is None and quantities[1] is None:
        return None
    if quantities[0] is None or quantities[1] is None:
        if parse_exact(to_plain_form(reference if quantities[1] is None else answer)) is not None:
            return False
        return None
    if [number for number, _ in quantities[0]] != [number for number, _ in quantities[1]]:
        return False
    if [unit[0] for _, unit in quantities[0]] == [unit[0] for _, unit in quantities[1]]:
        return True
    return None


def _compare_intervals(answer: str, reference: str) -> bool | None:
    """Return whether two tuples or intervals are equal, or None for other answers.

    An inequality such as `x<5` is compared as the interval that it describes.
    """
    conditions = parse_inequality(answer), parse_inequality(reference)
    if conditions[0] and conditions[1] and conditions[0][0] != conditions[1][0]:
        return None  # different letters
    answer_parts, reference_parts = (
        condition[1] if condition else split_brackets(text)
        for condition, text in zip(conditions, (answer, reference), strict=True)
    )
    if answer_parts and reference_parts:
        return len(answer_parts) == len(reference_parts) and all(
            _are_tidy_equal(*parts) for parts in zip(answer_parts, reference_parts, strict=True)
        )
    return None


def _compare_lists(answer: str, reference: str) -> bool | None:
    members = split_list(answer)
    reference_members = split_list(reference)
    if members and reference_members:
        if len(members) != len(reference_members):
            return None
        return _have_same_members(members, reference_members)
    text, single_member = (answer, reference) if members else (reference, answer)
    if split_brackets(single_member):
        return None if split_union(text) else False
    number = parse_exact(to_plain_form(single_member))
    commas_are_points = number is not None and parse_exact(text.replace(",", ".")) == number  # 1,22
    return True if commas_are_points else None


def _have_same_members(members: Sequence[str], other_members: Sequence[str]) -> bool:
    """Return whether two lists have the same members in any order."""
    unmatched = list(members)
    remaining = list(other_members)
    for member in members:
        index = next(
            (n for n, candidate in enumerate(remaining) if candidate.strip() == member.strip()),
            None,
        )
        if index is not None:
            unmatched.remove(member)
            del remaining[index]
    if len(unmatched) > MAX_MEMBERS:
        return False
    for member in unmatched:
        match = next(
            (n for n, candidate in enumerate(remaining) if _are_tidy_equal(member, candidate)), None
        )
        if match is None:
            return False
        del remaining[match]
    return not remaining


def is_correct(completion: str, reference: str, *, strict: bool = False) -> bool:
    """Return whether the answer of a completion equals the reference.

    With `strict`, only an answer in a box counts.
    """
    # Find the answer in the completion.
    get_engine().begin()
    expected = extract_boxed(reference) or reference
    boxed = extract_boxed(completion)
    stated = boxed if boxed is not None or strict else extract_stated(completion)
    if stated == "" or (stated is None and strict):
        return False
    if stated is None and len(completion) <= SHORT:
        answer: str | None = completion
    else:
        answer = stated
    # Compare it with the reference; a verdict "different" is not final if there are several boxes.
    has_several_boxes = max(count_boxes(reference), count_boxes(completion)) > 1
    if answer is not None:
        if (
            boxed is None
            and stated is not None
            and answer.endswith("!")
            and _are_tidy_equal(answer[:-1], expected)
        ):
            return True  # an exclamation mark, not a factorial
        tidy_answer = tidy(answer)
        tidy_reference = tidy(expected)
        verdict = _compare_by_rules(tidy_answer, tidy_reference)
        if verdict is not None and (verdict or not has_several_boxes):
            return verdict
        if are_equal_by_algebra(mark_formula(tidy_reference), mark_formula(tidy_answer)):
            return True
        names_alternatives = (
            EITHER.search(answer) is not None and split_list(tidy_reference) is None
        )
        if (
            boxed is None
            and not has_several_boxes
            and (names_alternatives or is_formula(tidy_answer))
        ):
            return False
    # Let computer algebra find the answer in the whole text.
    text = completion if boxed is None or has_several_boxes else rf"\boxed{{{boxed}}}"
    return are_equal_by_algebra(mark_formula(reference), text) or (
        not is_formula(reference) and are_equal_by_algebra(reference, text)
    )


@register_verifier("math")
def math_answer(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    completion_ids: Sequence[Sequence[int]],
    column: str | None = None,
    strict: bool = False,
    **columns: Sequence[Any],
) -> list[float | None]:
    r"""Return 1 for completions whose answer is mathematically equal to the reference, else 0.

    The reward is None for rows without a reference.

    The answer is the content of the last `\boxed{}`. Without a box (and without `strict`), it is
    the text after "the answer is", or the last formula or number. The reference is in `column` or,
    by default, in the first of the columns `answer`, `ground_truth`, `solution` and `target` that
    is present: the answer itself, or a solution with the answer in a box. Fractions, roots, percent
    signs, degrees, units, tuples, intervals, sets and lists are compared by their meaning; an
    expression need not be simplified.

    Computer algebra can ignore parts of an answer. Its verdict "equal" therefore counts only if
    replacing any letter or number in either answer makes the two answers different. Otherwise, the
    answers must be spelled alike. An answer that computer algebra does not decide in time (two
    seconds, less if many are slow) gets 0.
    """
    rewards: list[float | None] = []
    for completion, reference in zip(
        completions, find_references(columns, column, len(completions)), strict=True
    ):
        if reference is None:
            rewards.append(None)
            continue
        rewards.append(float(is_correct(completion, str(reference), strict=strict)))
    return rewards
