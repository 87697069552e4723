"""A run whose files are damaged or no files: `ls`, `show`, `report` and the dashboard show it and
every other run.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from tests.cli.runs import write_run
from weft.cli.main import main

DEEP = "[" * 600 + "]" * 600
DEEPER = "[" * 20_000
HALF = '"\\ud800"'
LONG = "9" * 4000
BOMB = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
LINE = '{{"step": {step}, "train/loss": {loss}, "step_seconds": 1.0}}\n'
FILES = (
    "run.json",
    "status.json",
    "config.yaml",
    "metrics.jsonl",
    "samples.jsonl",
    "timeline.json",
    "log.txt",
    "hardware.txt",
    "forecast.json",
    "graph.svg",
    "run.lock",
)
CONTENTS = {
    "run.json": {
        "deep": f'{{"algorithm": {DEEP}}}',
        "deeper": DEEPER,
        "bomb": BOMB,
        "bytes": b"\xff\xfe\x00{",
        "list": "[1]",
        "nan": "NaN",
        "half": f'{{"algorithm": {HALF}, "starts": [{{"time": 1e300, "command": {HALF}}}]}}',
        "types": '{"algorithm": {}, "total_steps": [], "chosen": 3, "starts": [{"time": 1, "step": 1, "command": 7, "versions": 3}]}',  # noqa: E501
        "long": f'{{"total_steps": {LONG}, "starts": [{{"time": {LONG}, "step": {LONG}}}]}}',
        "times": '{"starts": [{"time": NaN}, {"time": -1e18, "step": 1e300}, {"time": "x"}, 3, null]}',
    },
    "status.json": {
        "deep": DEEP,
        "half": f'{{"status": {HALF}}}',
        "types": '{"status": {"a": [1]}, "step": "x"}',
        "bytes": b"\xff",
        "long": f'{{"status": "running", "step": {LONG}}}',
        "big": '{"status": "finished", "step": 1e300}',
        "null": "null",
    },
    "config.yaml": {
        "bomb": BOMB,
        "deep": DEEPER[:300],
        "half": 'trial_name: "\\ud800"\n"\\udfff": 1\n',
        "bytes": b"sft:\n\xff\xfe: 1\n",
        "types": "1: 2\n2020-01-01: 2021-01-01\nsft: !!set {a, b}\nppo: !!binary aGk=\n",
        "keys": "? [a, b]\n: 3\n",
        "self": "a: &a [*a]\n",
        "steps": f"max_steps: {LONG}\nsft: {{lr: {LONG}, x: .nan, y: .inf}}\n",
    },
    "metrics.jsonl": {
        "big": LINE.format(step="1e300", loss=1) + LINE.format(step=3, loss=2),
        "nan": LINE.format(step="NaN", loss="NaN"),
        "long": LINE.format(step=LONG, loss=1) + LINE.format(step=2, loss=LONG),
        "negative": LINE.format(step=-5, loss=1),
        "huge": "".join(
            LINE.format(step=n, loss=f"{sign}1e308") for n, sign in enumerate(["", "-", ""] * 30)
        ),
        "half": f'{{"step": 1, "x/\\ud800": 2.0, "train/loss": {HALF}}}\n',
        "deep": f'{{"step": 1, "a/loss": {DEEP}}}\n',
        "types": '{"step": 1, "train/loss": "text", "b": [1], "c": {"d": 1}, "": 3, "/": 4, "time/x": -1e300}\n{"step": true}\n3\n',  # noqa: E501
        "bytes": b"\xff\xfe\n\x00\x00\n",
        "backwards": "".join(LINE.format(step=n, loss=n) for n in (5, 1, 9, 1, 1)),
    },
    "samples.jsonl": {
        "big": '{"step": 1e300, "prompt": "a"}\n{"step": 99999999999999999999999, "prompt": "b"}\n',
        "deep": f'{{"step": 1, "prompt": {DEEP}}}\n',
        "half": f'{{"step": 1, "prompt": {HALF}, "completion": {HALF}}}\n',
        "long": f'{{"step": {LONG}}}\n{{"step": {"9" * 6000}}}\n',
        "types": '{"step": 1, "prompt": [1], "completion": {}, "reward": "x", "tokens": 3, "id": [1]}\n{"step": 1, "tokens": [[1]], "rank": NaN}\n',  # noqa: E501
    },
    "timeline.json": {
        "types": '[\n{"name": "a", "ph": "X", "pid": [], "tid": {}, "ts": 1},\n{"name": "process_name", "ph": "M", "pid": 1, "tid": 1, "ts": 0}\n]',  # noqa: E501
        "big": '[\n{"name": "a", "ph": "X", "pid": 1, "tid": 1, "ts": 1e308, "dur": 1e308, "args": {"step": 1e300}},\n'
        '{"name": "b", "ph": "X", "pid": 1, "tid": 1, "ts": NaN, "dur": -5, "args": 3}\n]',
    },
    "forecast.json": {
        "deep": DEEP,
        "types": '{"title": 1, "calls": {}, "groups": 3}',
        "bytes": b"\xff",
        "long": f'{{"step_seconds": {LONG}}}',
        "list": "[1]",
    },
    "log.txt": {"bytes": b"\xff\xfe\x00 error: x\n"},
}
CASES = [(name, kind) for name, kinds in CONTENTS.items() for kind in kinds]
SPECIAL = ("pipe", "device", "folder", "loop")


def damage(run: Path, name: str, kind: str) -> None:
    """Replace a file of a run by something unusable."""
    path = run / name
    path.unlink(missing_ok=True)
    content = CONTENTS.get(name, {}).get(kind)
    if isinstance(content, str):
        path.write_text(content)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(name)


def broken(root: Path, name: str, kind: str) -> Path:
    run = write_run(root, f"bad/{name.replace('.', '-')}-{kind}")
    damage(run, name, kind)
    return run


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return write_run(tmp_path / "runs", "e/good")


@pytest.mark.parametrize("kind", SPECIAL)
def test_commands_do_not_wait_for_pipes_and_devices(
    good: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = good.parent.parent
    runs = [broken(root, name, kind) for name in FILES]
    _shown(root, runs, "--config", capsys)


@pytest.mark.parametrize("name", CONTENTS)
def test_damaged_files_hide_no_run(
    good: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = good.parent.parent
    runs = [broken(root, name, kind) for each, kind in CASES if each == name]
    _shown(root, runs, "--config" if name == "config.yaml" else "--json", capsys)


def _shown(root: Path, runs: list[Path], more: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All commands exit with 0, and list every run that has a readable file."""
    assert main(["ls", str(root)]) == 0, capsys.readouterr().err
    listed = capsys.readouterr().out
    assert "e/good" in listed and all(f"bad/{run.name}" in listed for run in runs)
    assert main(["ls", str(root), "--json"]) == 0
    found = {
        each["trial"]: each
        for each in json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    }
    assert found["good"]["step"] == 4 and found.keys() == {"good", *(run.name for run in runs)}
    for run in [*runs, root / "e" / "good"]:
        for words in (["show", str(run)], ["show", str(run), more], ["report", str(run)]):
            assert main(words) == 0, (words, capsys.readouterr().err)
        capsys.readouterr().out.encode()
    assert (
        main(
            ["report", *map(str, runs[:3]), str(root / "e" / "good"), "-o", str(root / "all.html")]
        )
        == 0
    )
    capsys.readouterr()


def test_valid_steps_of_a_damaged_run_are_shown(
    good: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = good.parent.parent
    for kind in ("big", "long", "huge"):
        broken(root, "metrics.jsonl", kind)
    main(["ls", str(root), "--json"])
    steps = {each["trial"]: each["step"] for each in json.loads(capsys.readouterr().out)}
    assert steps == {
        "good": 4,
        "metrics-jsonl-big": 4,
        "metrics-jsonl-long": 4,
        "metrics-jsonl-huge": 89,
    }
    main(["ls", str(root)])
    assert max(map(len, capsys.readouterr().out.splitlines())) < 200, "no number of 300 digits"


@pytest.mark.parametrize("option", ["-o", "--output"])
def test_a_page_replaces_no_device_pipe_or_link(
    good: Path, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in ("/dev/full", str(tmp_path / "pipe"), str(tmp_path)):
        assert main(["report", str(good), option, place]) == 2
        assert f"error: {place}: is a" in capsys.readouterr().err
    assert stat.S_ISCHR(os.lstat("/dev/full").st_mode) and stat.S_ISFIFO(
        os.lstat(tmp_path / "pipe").st_mode
    )
    (tmp_path / "link.html").symlink_to("real.html")
    assert main(["report", str(good), option, str(tmp_path / "link.html")]) == 0
    assert (tmp_path / "link.html").is_symlink() and "good" in (tmp_path / "real.html").read_text()


@pytest.mark.parametrize("name", ["report.html", "status.json", "metrics.jsonl"])
def test_outputs_of_a_run_follow_links(good: Path, name: str, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    if (good / name).exists():
        (good / name).rename(target)
    (good / name).symlink_to(target)
    assert main(["report", str(good)]) == 0
    assert (good / name).is_symlink() and target.is_file()
