"""`weft ls`: the table, its order, its filters, and JSON."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from tests.cli.runs import write_run
from weft.cli.ls import build_table, format_age, format_size, main
from weft.errors import ConfigError
from weft.observe.run_list import list_runs


def names(capsys, *words: str) -> list[str]:
    assert main(list(words)) == 0
    return [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]


def test_runs_are_listed_newest_first(tmp_path, capsys):
    write_run(tmp_path, "e/old", age=7200.0)
    write_run(tmp_path, "e/new")
    assert main([str(tmp_path)]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split()[:7] == ["run", "algorithm", "status", "steps", "last", "size", "age"]
    assert first.split()[:6] == ["e/new", "sft", "finished", "4/4", "loss", "0.25"]
    assert second.split()[0] == "e/old" and "2 h" in second


def test_order_and_filters(tmp_path, capsys):
    write_run(tmp_path, "b/one", step=2, status="failed")
    write_run(tmp_path, "a/two", step=6, age=60.0)
    assert names(capsys, str(tmp_path)) == ["b/one", "a/two"]
    assert names(capsys, str(tmp_path), "--sort", "name") == ["a/two", "b/one"]
    assert names(capsys, str(tmp_path), "--sort", "steps") == ["a/two", "b/one"]
    assert names(capsys, str(tmp_path), "--sort", "name", "--reverse") == ["b/one", "a/two"]
    assert names(capsys, str(tmp_path), "--status", "failed,running") == ["b/one"]
    assert names(capsys, str(tmp_path), "--algorithm", "ppo") == []
    with pytest.raises(ConfigError, match="did you mean finished"):
        main([str(tmp_path), "--status", "finish"])
    with pytest.raises(ConfigError, match="unknown --sort"):
        main([str(tmp_path), "--sort", "colour"])
    with pytest.raises(ConfigError, match="there is no such folder"):
        main([str(tmp_path / "nowhere")])


def test_a_run_that_says_running_and_is_not_is_unfinished(tmp_path, capsys):
    write_run(tmp_path, "e/killed", status="running")
    main([str(tmp_path)])
    assert "unfinished" in capsys.readouterr().out


def test_json_has_exact_numbers(tmp_path, capsys):
    run = write_run(tmp_path, "e/t", step=3)
    main([str(tmp_path), "--json"])
    (found,) = json.loads(capsys.readouterr().out)
    assert found["path"] == str(run) and found["value"] == 1 / 3 and found["metric"] == "train/loss"
    assert {"num_bytes", "changed", "status", "step", "total_steps"} <= found.keys()


@pytest.mark.parametrize("columns", [40, 60, 80, 160])
def test_the_table_fits(columns, tmp_path):
    write_run(tmp_path, "helpful-usual-name/trial-1")
    out = io.StringIO()
    Console(file=out, width=columns).print(build_table(list_runs(tmp_path), columns))
    head, *lines = out.getvalue().splitlines()
    assert max(map(len, [head, *lines])) <= columns
    assert ("train/loss" in out.getvalue()) == (columns == 160), "a wide terminal shows more"
    assert "".join(line.split()[0] for line in lines) == "helpful-usual-name/trial-1", (
        "the name is never left out"
    )
    assert ("size" in head, "algorithm" in head) == (columns >= 80, columns >= 80)
    if columns >= 80:
        assert len(lines) == 1


def test_a_pipe_has_the_width_that_columns_says(tmp_path, monkeypatch, capsys):
    write_run(tmp_path, "helpful-usual-name/trial-1")
    for told, wide in (("80", False), ("", True), ("x", True)):
        monkeypatch.setenv("COLUMNS", told)
        main([str(tmp_path)])
        assert ("metric" in capsys.readouterr().out) == wide, told


def test_sizes_and_ages_are_short():
    assert [format_size(n) for n in (5, 1500, 12_345_678, 7e9)] == [
        "5 B",
        "1.5 kB",
        "12.3 MB",
        "7 GB",
    ]
    assert format_age(None) == "–"


def test_a_demo_is_one_line_with_all_its_bytes(tmp_path, capsys):
    for trial in ("sft", "ppo", "grpo"):
        write_run(tmp_path, f"demo-2/{trial}", age=100.0 if trial != "grpo" else 10.0)
    (tmp_path / "demo-2" / "material").mkdir()
    (tmp_path / "demo-2" / "material" / "rows").write_bytes(b"r" * 500_000)
    write_run(tmp_path, "demo/mine")  # a user's own run: the folder has no material
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.count("demo-2") == 2 and "demo/mine" in out
    line = next(line for line in out.splitlines() if "demo-2 (3 runs)" in line)
    held = sum(file.stat().st_size for file in (tmp_path / "demo-2").rglob("*") if file.is_file())
    assert (
        line.split()[3:5] == ["demo", "finished"]
        and "loss 0.25" in line
        and f"{held / 1000:.0f} kB" in line
        and "10 s" in line
    )
    assert f"weft ls {tmp_path / 'demo-2'} lists the runs of this demo" in out
    assert len(names(capsys, str(tmp_path / "demo-2"))) == 3
    assert len(names(capsys, str(tmp_path), "--status", "finished")) == 4
    main([str(tmp_path), "--json"])
    assert len(json.loads(capsys.readouterr().out)) == 4


def test_flagged_runs_are_explained_below_the_table_and_marked_in_it(tmp_path, capsys):
    run = write_run(tmp_path, "e/bad", step=20)
    rows = [{"step": n, "train/loss": 1.0 + n} for n in range(1, 21)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_run(tmp_path, "e/good", step=20)
    main([str(tmp_path)])
    out = capsys.readouterr().out.splitlines()
    assert next(line for line in out if line.startswith("e/bad")).split()[2:4] == ["finished", "!"]
    assert [line for line in out if line.startswith("! ")] == [
        "! e/bad: loss rose from 4 to 19. Usually the learning rate is too high. Try a lower "
        "model.optimizer.lr, or a longer "
        "warm-up."
    ]
    main([str(tmp_path), "--json"])
    found = {run["trial"]: run["diagnosis"] for run in json.loads(capsys.readouterr().out)}
    assert found["bad"].startswith("loss rose") and found["good"] == "nothing is out of range"
