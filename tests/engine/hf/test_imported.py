"""The backend hf is imported in silence, whatever other packages have to say of themselves."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from weft.engine.hf.imported import LOGGERS, hide_library_output


def test_remarks_are_unheard_and_errors_are_heard(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger(f"{LOGGERS[1]}.part")
    with hide_library_output():
        logger.warning("no library")
        logger.error("broken")
    logger.warning("later")
    assert [record.message for record in caplog.records] == ["broken", "later"]


@pytest.mark.slow
def test_the_backend_is_imported_in_silence() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import weft.engine.backends.hf"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert (done.stdout, done.stderr) == ("", "")
