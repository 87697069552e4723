"""`weft plan profile`: its file, its output, and invalid input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.planner.profiles import measured
from weft.cli import main as weft
from weft.engine import measure, measure_links
from weft.planner.profile import find_folder, read_file
from weft.registry import families

HELD_OUT = [{"kind": "score", "tokens": 250, "length": 100, "layers": 4, "seconds": 1e-2}]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with a config.json and no weights, with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"model_type": "llama", **families.get("llama").tiny}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the networks that were measured; the measurements are replaced by fixed numbers."""
    networks: list[Any] = []

    def measure_network(network: Any, max_tokens: int, tell: Any) -> Any:
        networks.append((network, max_tokens))
        found = measured()
        return {"passes": found["passes"], "decoding": found["decoding"], "held_out": HELD_OUT}

    monkeypatch.setattr(measure, "measure_network", measure_network)
    monkeypatch.setattr(
        measure_links, "measure_links", lambda network, threads, tell: measured()["links"]
    )
    return networks


def list_files() -> list[Path]:
    return sorted(path for path in find_folder().rglob("*") if path.is_file())


def test_a_profile_is_written_to_the_cache(
    model: Path, seen: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "profile", str(model), "--device", "cpu", "--threads", "1"]
    assert weft.main(words) == 0
    (path,) = list_files()
    values = read_file(path, None)
    assert (values["dtype"], values["threads"], values["tensor"]) == ("float32", 1, 1)
    assert path.name.endswith(".float32.t1.threads1.json")
    out = capsys.readouterr().out
    assert f"written to {path}" in out
    assert "full training, 400 tokens: a layer 1.50 + 3.00 backward" in out
    assert "1 x 100: 1.200 + 2.00" in out
    assert "sum between two devices: 101 us at least" in out
    assert "250 tokens in sequences of 100: 10.0 ms, interpolated 7.0 ms (-30%)" in out


def test_options_reach_the_measurement(model: Path, seen: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "there" / "p.json"
    words = ["--dtype", "bfloat16", "--tensor", "2", "--max-tokens", "512", "--output", str(path)]
    assert weft.main(["plan", "profile", str(model), "--device", "cpu", *words]) == 0
    (network, most) = seen[0]
    assert (network.dtype, network.tensor, most) == ("bfloat16", 2, 512)
    assert read_file(path, None)["tensor"] == 2
    assert not list_files()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--threads", "0"], "--threads=0: must be at least 1"),
        (["--tensor", "0"], "--tensor=0: must be at least 1"),
        (["--max-tokens", "9"], "--max-tokens=9: must be at least 128"),
        (["--tensor", "7"], "t=7"),
        (["--device", "nonsense"], "device='nonsense' cannot be used"),
        (["--dtype", "int8"], "--dtype"),
        (["--output", "/"], "/"),
    ],
)
def test_invalid_input_is_refused(
    words: list[str],
    said: str,
    model: Path,
    seen: list[Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    device = [] if "--device" in words else ["--device", "cpu"]
    assert weft.main(["plan", "profile", str(model), *device, *words]) == 2
    assert said in capsys.readouterr().err
    assert not seen and not list_files()


def test_a_model_that_does_not_exist_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert weft.main(["plan", "profile", str(tmp_path / "absent")]) == 2
    assert "absent" in capsys.readouterr().err


def test_an_interrupted_measurement_writes_nothing(
    model: Path, seen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(measure_links, "measure_links", interrupt)
    assert weft.main(["plan", "profile", str(model), "--device", "cpu"]) != 0
    assert len(seen) == 1 and not list_files()


@pytest.mark.slow  # two new processes import torch
def test_a_small_model_is_measured(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "cpu", "--threads", "1", "--max-tokens", "128"]
    assert weft.main(["plan", "profile", str(model), *words]) == 0
    assert "two processes at once" in capsys.readouterr().out
    assert len(list_files()) == 1
