"""Nothing outside the repository reaches a test: not the shell's variables, and not the user's
home.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest
from tests.environment import ASKED, CACHE, SET, cleaned, prepared

ROOT = Path(__file__).resolve().parent.parent
HOSTILE = {
    "RAY_ADDRESS": "nowhere:1",
    "RAY_AUTH_MODE": "token",
    "HF_TOKEN": "x",
    "HF_HUB_OFFLINE": "yes",
    "HF_HOME": "/nowhere",
    "WANDB_MODE": "x",
    "WEFT_NATIVE": "x",
    "WEFT_SERVE_TOKEN": "x",
    "OMP_NUM_THREADS": "3",
    "MKL_NUM_THREADS": "3",
    "MKL_CBWR": "COMPATIBLE",
    "ATEN_CPU_CAPABILITY": "default",
    "COLUMNS": "20",
    "NO_COLOR": "1",
    "FORCE_COLOR": "1",
    "TERM": "dumb",
    "LANG": "tr_TR.ISO-8859-9",
    "LC_ALL": "C",
    "TZ": "Asia/Kathmandu",
    "http_proxy": "http://nowhere:1",
    "HTTPS_PROXY": "http://nowhere:1",
    "SSL_CERT_FILE": "/nowhere",
    "PYTHONWARNINGS": "error",
    "PYTHONHASHSEED": "7",
    "CXX": "/nowhere",
    "SLURM_JOB_ID": "5",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "nowhere",
    "CUBLAS_WORKSPACE_CONFIG": ":0:0",
    "XDG_CACHE_HOME": "/nowhere",
    "TORCHINDUCTOR_CACHE_DIR": "/nowhere",
    "OPENAI_API_KEY": "x",
}


CACHES = {"HF_HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"}  # in folders of the tests


def test_what_is_not_listed_is_dropped(tmp_path: Path) -> None:
    given = {"PATH": "/bin", "WEFT_TEST_DATA": "/data", **HOSTILE}
    made = cleaned(given, tmp_path)
    assert (
        made["PATH"] == "/bin"
        and made["WEFT_TEST_DATA"] == "/data"
        and made["HOME"] == str(tmp_path)
    )
    assert {name for name in HOSTILE if made.get(name) == given[name]} == set()
    assert made.items() >= SET.items()


def test_what_is_asked_for_is_there(tmp_path: Path) -> None:
    words = "OMP_NUM_THREADS=2 WEFT_NATIVE=avx2 NOTE='two words'"
    made = cleaned({ASKED: words}, tmp_path)
    assert [made[name] for name in ("OMP_NUM_THREADS", "WEFT_NATIVE", "NOTE")] == [
        "2",
        "avx2",
        "two words",
    ]
    assert cleaned(made, tmp_path) == made | {ASKED: words}


def test_this_process_has_it() -> None:
    """Also run by the test below, in a process with a hostile environment."""
    import torch

    asked = ASKED in os.environ
    assert asked or torch.get_num_threads() == 1
    assert time.tzname[0] == "UTC" and Path.home() == Path(os.environ["HOME"]) != CACHE
    assert not list(Path.home().glob("*.netrc")) and not (Path.home() / ".ray").exists()
    # Not `os.environ`: fixtures of other tests may have set RAY_AUTH_MODE and the like since.
    assert asked or not set(prepared) & (set(HOSTILE) - set(SET) - CACHES)
    assert asked or not {name for name, value in HOSTILE.items() if prepared.get(name) == value}
    with warnings.catch_warnings(record=True):
        warnings.warn("only a warning", ImportWarning, stacklevel=1)


def test_no_test_begins_after_the_time_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(conftest.UNTIL, str(time.time() + 1000))
    conftest.pytest_runtest_setup()
    monkeypatch.setenv(conftest.UNTIL, str(time.time() - 1))
    with pytest.raises(pytest.skip.Exception, match="not run"):
        conftest.pytest_runtest_setup()


def test_tests_that_are_not_run_for_lack_of_time_are_told_with_their_files() -> None:
    def report(name: str, reason: str) -> SimpleNamespace:
        return SimpleNamespace(nodeid=name, longrepr=("file", 1, f"Skipped: {reason}"))

    late = [
        report(name, conftest.TOO_LATE)
        for name in ("tests/b.py::x", "tests/a.py::y", "tests/b.py::z")
    ]
    lines: list[str] = []
    terminal: Any = SimpleNamespace(
        stats={"skipped": [*late, report("tests/c.py::x", "needs a CUDA device")]},
        section=lambda title, **markup: lines.append(title),
        write_line=lines.append,
    )
    conftest.pytest_terminal_summary(terminal)
    assert lines == ["NOT RUN FOR LACK OF TIME", "!!! 3 tests of: tests/a.py, tests/b.py"]


@pytest.mark.slow
@pytest.mark.skipif(ASKED in os.environ, reason="another environment is asked for")
def test_a_hostile_shell_and_home_change_nothing(tmp_path: Path) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    (tmp_path / ".netrc").write_text("not a netrc file")
    (tmp_path / "sub").mkdir()
    tmp_path.chmod(0o555)
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    test = f"{Path(__file__).relative_to(ROOT)}::{test_this_process_has_it.__name__}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test],
        cwd=ROOT,
        env={**kept, **HOSTILE, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    tmp_path.chmod(0o755)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
