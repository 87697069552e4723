"""The hint that names how to install an extra names a command that works."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from weft import extras
from weft.extras import find_sources, install
from weft.observe.sinks import build_missing_error

ROOT = Path(__file__).resolve().parent.parent


def test_it_names_the_sources():
    assert find_sources() == ROOT
    assert install("wandb") == f"python -m pip install '{ROOT}[wandb]'"
    assert install("wandb") in str(build_missing_error("wandb"))


def test_without_the_sources_it_says_where_to_run_it(monkeypatch, tmp_path):
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "a" / "b" / "extras.py"))
    monkeypatch.setattr(extras, "_read_source_folder", list)
    assert install("ray") == "python -m pip install '.[ray]' in the folder of weft's sources"
    monkeypatch.setattr(extras, "_read_source_folder", lambda: [ROOT])
    assert install("ray") == f"python -m pip install '{ROOT}[ray]'"


@pytest.mark.parametrize("written", [None, "{", "[]", '{"url": "https://x/y.whl"}'])
def test_what_pip_wrote_may_say_nothing(written, monkeypatch):
    class Installed:
        def read_text(self, name: str) -> str | None:
            return written

    monkeypatch.setattr(extras, "distribution", lambda name: Installed())
    assert extras._read_source_folder() == []


def test_no_hint_names_an_index_that_does_not_have_weft():
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    places = [*ROOT.glob("src/**/*.py"), *ROOT.glob("docs/**/*.md"), ROOT / "README.md"]
    for file in places:
        text = file.read_text()
        assert "install 'weft[" not in text, f"{file}: say what weft.extras.install says"
    assert {"ray", "wandb", "serve", "8bit", "fp8", "hf", "languages"} <= known.keys()
