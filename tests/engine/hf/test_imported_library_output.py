"""What is heard of libraries, and what is not."""

from __future__ import annotations

import logging
import warnings

import pytest

from weft.engine.hf.imported import hide_library_output


def test_only_errors_are_heard_inside_and_all_again_afterwards(
    caplog: pytest.LogCaptureFixture,
) -> None:
    talker = logging.getLogger("torchao.of_this_test")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with hide_library_output():
            talker.warning("a library is missing")
            talker.error("broken")
            warnings.warn("a name will change", FutureWarning, stacklevel=1)
            warnings.warn("another kind", UserWarning, stacklevel=1)
        talker.warning("heard")
    assert caplog.messages == ["broken", "heard"]
    assert [str(each.message) for each in warned] == ["another kind"]
