"""Checks that the tests of verifiable instructions share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from weft.errors import DataError
from weft.host.verifiers.ifeval import is_followed

# (instruction, arguments, responses that follow it, responses that do not)
Case = tuple[str, dict[str, Any], list[str], list[str]]


def check_verdicts(case: Case) -> None:
    """Check the verdicts, also on blank responses and with additional arguments of None."""
    instruction, arguments, good, bad = case
    given = {**arguments, "unused": None}
    for response in good:
        assert is_followed(response, instruction, given), response
    for response in [*bad, "", "  \n"]:
        assert not is_followed(response, instruction, given), response


def check_missing_arguments(instruction: str, arguments: Sequence[str]) -> None:
    with pytest.raises(DataError, match=f"{instruction}' needs the argument"):
        is_followed("Test.", instruction, dict.fromkeys(arguments))
