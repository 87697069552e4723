"""`weft convert triton` with a model, and with sections of settings that name one."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.cli.main import main


def test_one_of_model_and_sections(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["convert", "triton", "--triton_mode", "rm"]) == 2
    assert (
        main(["convert", "triton", "model", "store", "--configs", "mine", "--triton-mode", "rm"])
        == 2
    )
    assert capsys.readouterr().err.count("name a MODEL, or --configs") == 2
    assert not list(tmp_path.iterdir())
