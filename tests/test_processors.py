"""`make test-processors`: which configurations there are, and which a processor supports."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from tests.environment import ASKED
from tools import processors
from tools.processors import CONFIGURATIONS, environment, instructions, interpreter, why_not
from weft.kernels.cpu import library

BY_NAME = {each.name: each for each in CONFIGURATIONS}


def test_configurations_have_names_of_their_own_and_cover_every_variant() -> None:
    assert len(BY_NAME) == len(CONFIGURATIONS)
    native = {each.variables.get("WEFT_NATIVE") for each in CONFIGURATIONS}
    assert native >= {"0", *library.VARIANTS}
    for name, needed in library.VARIANTS.items():
        assert set(BY_NAME[f"kernels-{name}"].needs) <= set(needed)
    assert processors.ASKED == ASKED


def test_what_a_processor_lacks_is_said(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("model name\t: a\nflags\t\t: fpu sse2 avx2 fma\n")
    found = instructions(info)
    assert found == {"fpu", "sse2", "avx2", "fma"} and instructions(tmp_path / "absent") == set()
    assert why_not(BY_NAME["torch-avx2"], found) is None
    assert why_not(BY_NAME["torch-avx512"], found) == (
        "this processor has no avx512f, avx512bw, avx512cd, avx512dq, avx512vl"
    )
    assert "amx_tile" in (why_not(BY_NAME["kernels-amx"], found) or "")


def test_variables_reach_tests_through_their_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/more")
    made = environment(BY_NAME["avx2-kernels-off"])
    asked = dict(word.split("=") for word in shlex.split(made[ASKED]))
    assert asked == BY_NAME["avx2-kernels-off"].variables and made.items() >= asked.items()
    assert made["PYTHONPATH"].split(os.pathsep)[1:] == ["/more"]


def test_the_oldest_versions_are_the_lower_bounds() -> None:
    text = (processors.ROOT / "pyproject.toml").read_text()
    for limit in processors.OLDEST:
        name, version = limit.removesuffix(".*").split("==")
        assert f'"{name}>={version.removesuffix(".0")},' in text
    assert interpreter(None, "python") == "python"


def test_an_unknown_configuration_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        processors.main(["--only", "torch-avx3"])
    assert (
        "no configuration torch-avx3; there are unchanged, torch-default" in capsys.readouterr().err
    )
