"""What weft raises. A `UserError` is the user's to mend: one message, exit code 2, no traceback."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

from weft.redaction import redacted

MAX_REPORTS = 20
MOST_NAMES = 40  # that an error lists
LIKE = 0.65  # of two names: the share of their characters that match in order
BEHIND = 0.15  # how much less like than the nearest one a name may be
PART = 0.75
# how like a name is that begins with what was typed, or one of whose words does; its characters
LEAST_PART = 3
LONGEST_NAME = 200  # characters of a name that are compared with others
# How gloo, NCCL and torch's store say that a neighbour is gone; the first two raise it as a plain
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
    """Root of everything weft raises on purpose.

    `exit_code` is what a command that meets it returns.

    The message is redacted here, so that no place that raises or shows an error can forget it.
    """

    exit_code = 1

    def __init__(self, message: object = "") -> None:
        super().__init__(redacted(str(message)))


class UserError(WeftError, ValueError):
    """Input that cannot be used. The message names the field, the value, the rule and the fix."""

    exit_code = 2


class ConfigError(UserError):
    """An option with an unknown name, a wrong type or a value that breaks a rule."""


class UnknownName(ConfigError):
    """A name that stands for nothing."""


class NoTemplate(UserError):
    """Message lists, and a tokenizer without a chat template."""


class DataError(UserError):
    """Rows or files that cannot be used; holds every report, up to `MAX_REPORTS`, as `FILE:LINE:
    what is wrong`.
    """

    def __init__(self, reports: Sequence[str] | str) -> None:
        self.reports = [
            redacted(each) for each in ([reports] if isinstance(reports, str) else reports)
        ]
        shown = self.reports[:MAX_REPORTS]
        more = len(self.reports) - len(shown)
        tail = [f"... and {more} more"] if more > 0 else []
        super().__init__("\n".join(shown + tail))

    def __reduce__(self) -> tuple[type[DataError], tuple[list[str]]]:
        return type(self), (self.reports,)


class CheckpointError(UserError):
    """A model directory that is missing a file, is truncated, or does not fit what is asked of it."""


class GraphError(UserError):
    """A dataflow graph that has a cycle, a key nobody makes, or a call its interface does not
    implement.
    """


class RunError(WeftError, RuntimeError):
    """A run that cannot go on: a non-finite loss, a full disk, an expired deadline. Exit code 1."""


class NotFinite(RunError):
    """A loss, a gradient or logits that are no numbers: training has diverged, or weights were
    damaged from the start.
    """


class DevicesLost(RunError):
    """Devices of a run are gone, or do not answer; others can go on from the run's last recovery
    point.
    """


class Interrupted(RunError):
    """A run that was asked to stop and did, between two steps; the message says how to go on. 130
    Ctrl-C, 143 SIGTERM.
    """

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The names most like `name`, best first, without itself; what an error about an unknown name
    suggests.
    """
    short = name[:LONGEST_NAME].lower()
    matcher = difflib.SequenceMatcher(b=short)
    found = []
    for other in sorted(each for each in set(known) if each != name):
        matcher.set_seq1(other.lower())
        is_part = len(short) >= LEAST_PART and re.search(
            rf"(?<![^\W_]){re.escape(short)}", other.lower()
        )
        if is_part or (matcher.real_quick_ratio() >= LIKE and matcher.quick_ratio() >= LIKE):
            ratio = matcher.ratio()
            found.append((max(ratio, PART + 0.1 * ratio) if is_part else ratio, other))
    best = max((likeness for likeness, _ in found), default=0.0)
    near = [each for each in found if each[0] >= LIKE and each[0] >= best - BEHIND]
    return [other for _, other in sorted(near, key=lambda each: -each[0])[:count]]


def set_for(name: str, error: ConfigError) -> ConfigError:
    """The error of a role or a call: what it says of an option, such as `layout=d0: ...`, under the
    option's whole name.
    """
    begins = re.match(r"[a-z_]+=", str(error))
    return ConfigError(f"{name}{'.' if begins else ': '}{error}")


def unknown_name(kind: str, name: str, known: Iterable[str]) -> ConfigError:
    """The error for a name that nobody registered: says which names are near, or lists all of them."""
    names = sorted(known)
    close = nearest(name, names)
    if len(names) <= MOST_NAMES:
        listed = ", ".join(names)
    else:
        listed = f"{len(names)} names, none of them like it"
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    else:
        hint = f"known: {listed or 'none'}"
    return UnknownName(f"unknown {kind} {name!r}; {hint}")
