"""Exceptions that weft raises.

A `UserError` is an error that the user can fix. It is shown as one message without a traceback, and
the exit code is 2.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

from weft.redaction import redact

MAX_REPORTS = 20
MAX_NAMES = 40  # names listed in an error message
MIN_SIMILARITY = 0.65  # least `SequenceMatcher` ratio of two similar names
MAX_SIMILARITY_GAP = 0.15  # greatest distance in ratio from the most similar name
# SUBSTRING_SIMILARITY: ratio assigned to a name with a word that starts with the typed text.
# MIN_SUBSTRING: minimum length of that text.
SUBSTRING_SIMILARITY = 0.75
MIN_SUBSTRING = 3
LONGEST_NAME = 200  # characters of a name that are compared
# Texts of gloo, NCCL and torch store errors about a lost peer. gloo and NCCL raise a plain
# RuntimeError.
TRANSPORTS = (
    "/gloo/",
    "gloo/transport",
    "NCCL error",
    "NCCL communicator was aborted",
    "Connection closed by peer",
    "torch.distributed.Dist",
)


class WeftError(Exception):
    """Base class of all errors that weft raises on purpose.

    `exit_code` is the exit code of a command that fails with this error. The constructor redacts
    secrets in the message.
    """

    exit_code = 1

    def __init__(self, message: object = "") -> None:
        super().__init__(redact(str(message)))


class UserError(WeftError, ValueError):
    """Raised for invalid user input.

    The message names the option or field, its value, the rule that it breaks and a way to fix it.
    """

    exit_code = 2


class ConfigError(UserError):
    """Raised for an option with an unknown name, a wrong type or a value that breaks a rule."""


class UnknownName(ConfigError):
    """Raised for a name that is not registered."""


class NoTemplate(UserError):
    """Raised if chat messages are passed to a tokenizer that has no chat template."""


class DataError(UserError):
    """Raised for unusable rows or files.

    `reports` lists all problems, each as `FILE:LINE: problem`; the message shows the first
    `MAX_REPORTS` of them.
    """

    def __init__(self, reports: Sequence[str] | str) -> None:
        self.reports = [
            redact(each) for each in ([reports] if isinstance(reports, str) else reports)
        ]
        first_reports = self.reports[:MAX_REPORTS]
        more = len(self.reports) - len(first_reports)
        tail = [f"... and {more} more"] if more > 0 else []
        super().__init__("\n".join(first_reports + tail))

    def __reduce__(self) -> tuple[type[DataError], tuple[list[str]]]:
        return type(self), (self.reports,)


class CheckpointError(UserError):
    """Raised for an unusable model directory.

    For example, a file is missing or truncated, or the model does not fit the requested use.
    """


class GraphError(UserError):
    """Raised for an invalid dataflow graph.

    Examples are a cycle, a key that no node produces, or a method that the node's interface does
    not implement.
    """


class RunError(WeftError, RuntimeError):
    """Raised if a run cannot continue.

    Examples are a non-finite loss, a full disk or an expired deadline. The exit code is 1.
    """


class NotFinite(RunError):
    """Raised for a non-finite loss, gradient or logit.

    Either training has diverged, or the weights are damaged.
    """


class DevicesLost(RunError):
    """Raised if devices of the run are lost or do not respond.

    The run can continue on other devices from the latest recovery point.
    """


class Interrupted(RunError):
    """Raised if Ctrl-C or SIGTERM stopped a run.

    The first signal stops the run after the current training step, and a second one stops it at
    once. The message explains how to resume the run. The exit code is 130 after Ctrl-C and 143
    after SIGTERM.
    """

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


def find_nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Return up to `count` of the `known` names that are similar to `name`, most similar first.

    `name` itself is excluded. Used for suggestions in error messages about unknown names.
    """
    short = name[:LONGEST_NAME].lower()
    matcher = difflib.SequenceMatcher(b=short)
    candidates = []
    for other in sorted(each for each in set(known) if each != name):
        matcher.set_seq1(other.lower())
        is_part = len(short) >= MIN_SUBSTRING and re.search(
            rf"(?<![^\W_]){re.escape(short)}", other.lower()
        )
        if is_part or (
            matcher.real_quick_ratio() >= MIN_SIMILARITY and matcher.quick_ratio() >= MIN_SIMILARITY
        ):
            ratio = matcher.ratio()
            candidates.append(
                (max(ratio, SUBSTRING_SIMILARITY + 0.1 * ratio) if is_part else ratio, other)
            )
    best = max((likeness for likeness, _ in candidates), default=0.0)
    near = [
        each
        for each in candidates
        if each[0] >= MIN_SIMILARITY and each[0] >= best - MAX_SIMILARITY_GAP
    ]
    return [other for _, other in sorted(near, key=lambda each: -each[0])[:count]]


def qualify_error(name: str, error: ConfigError) -> ConfigError:
    """Return a copy of `error` whose message is prefixed with `name`, the name of a role or call.

    For example, `layout=d0: ...` becomes `ROLE.layout=d0: ...`. A message that does not begin with
    an option becomes `ROLE: ...`.
    """
    begins = re.match(r"[a-z_]+=", str(error))
    return ConfigError(f"{name}{'.' if begins else ': '}{error}")


def build_unknown_name_error(kind: str, name: str, known: Iterable[str]) -> ConfigError:
    """Return the error for a name that is not registered.

    `kind` describes the registered objects, such as "model family". The message suggests similar
    names or, if there are none, lists the `known` names.
    """
    names = sorted(known)
    close = find_nearest(name, names)
    if len(names) <= MAX_NAMES:
        listed = ", ".join(names)
    else:
        listed = f"{len(names)} names, none of them like it"
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    else:
        hint = f"known: {listed or 'none'}"
    return UnknownName(f"unknown {kind} {name!r}; {hint}")
