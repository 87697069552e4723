"""`weft rm`: files that are removed, files that stay, and runs that are refused."""

from __future__ import annotations

import pytest

from tests.cli.runs import write_run
from weft.cli import rm
from weft.cli.rm import main
from weft.errors import ConfigError
from weft.runtime.directory import RunLock


def test_a_run_is_removed_with_all_its_files(tmp_path, capsys):
    run, other = write_run(tmp_path, "e/t"), write_run(tmp_path, "f/t")
    assert main([str(run), "--yes"]) == 0
    out = capsys.readouterr().out
    assert f"{run} (finished)" in out and "checkpoints" in out and "kB" in out
    assert not run.exists() and not run.parent.exists(), (
        "the folder of an experiment without runs goes, too"
    )
    assert other.exists()


def test_parts_alone(tmp_path, capsys):
    run = write_run(tmp_path, "e/t", status="stopped")
    assert main(["e/t", "--fileroot", str(tmp_path), "--recover", "--yes"]) == 0
    assert "cannot be resumed" in capsys.readouterr().out
    assert not (run / "recover").exists() and (run / "checkpoints" / "model" / "step4").is_dir()
    assert main([str(run), "--checkpoints", "--yes"]) == 0
    assert not (run / "checkpoints").exists() and (run / "metrics.jsonl").is_file()
    assert main([str(run), "--checkpoints", "--yes"]) == 0
    assert "nothing to remove" in capsys.readouterr().out


def test_it_asks_at_a_terminal_and_needs_yes_elsewhere(tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path, "e/t")
    monkeypatch.setattr(rm.sys.stdin, "isatty", lambda: False, raising=False)
    with pytest.raises(ConfigError, match="add --yes"):
        main([str(run)])
    monkeypatch.setattr(rm.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda prompt: "n")
    assert main([str(run)]) == 1 and run.exists()
    monkeypatch.setattr("builtins.input", lambda prompt: "y")
    assert main([str(run)]) == 0 and not run.exists()


def test_a_run_that_somebody_works_on_stays(tmp_path):
    run = write_run(tmp_path, "e/t", status="running")
    lock = RunLock(run)
    lock.take()
    with pytest.raises(
        ConfigError, match=r"running, process \d+; stop it first: weft stop -e e -f t"
    ):
        main([str(run), "--yes"])
    lock.release()
    assert run.exists()
    assert main([str(run), "--yes"]) == 0 and not run.exists()


def test_folders_that_are_not_runs_are_refused(tmp_path, monkeypatch):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "config.yaml").write_text("learning_rate: 1\n")
    run = write_run(tmp_path, "e/t")
    link = tmp_path / "e" / "link"
    link.symlink_to(run)
    nested = write_run(tmp_path, "e/outer")
    write_run(nested, "runs/inner")
    for word, why in (
        (folder, "not the directory of a run"),
        (tmp_path / "e", "contains runs"),
        (link, "is a link"),
        (tmp_path / "nowhere", "no such run"),
        (nested, "contains another run"),
    ):
        with pytest.raises(ConfigError, match=why):
            main([str(run), str(word), "--yes"])
    assert run.exists() and folder.exists() and nested.exists(), (
        "all are looked at before any is removed"
    )
    monkeypatch.chdir(run / "checkpoints")
    with pytest.raises(ConfigError, match="contains the current folder"):
        main([str(run), "--yes"])


def test_links_are_removed_and_their_targets_stay(tmp_path, capsys):
    run = write_run(tmp_path / "runs", "e/t")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    (run / "link").symlink_to(outside)
    (run / "recover" / "step4" / "weights").unlink()
    (run / "recover" / "step4").rmdir()
    (run / "recover").rmdir()
    (run / "recover").symlink_to(outside)
    assert main([str(run), "--recover", "--yes"]) == 0
    assert "only the link" in capsys.readouterr().out
    assert not (run / "recover").is_symlink() and (outside / "precious").exists()
    assert main([str(run), "--yes"]) == 0
    assert (outside / "precious").read_text() == "x"


def test_runs_that_began_from_it_are_named(tmp_path, capsys):
    run, user, other = (write_run(tmp_path, name) for name in ("e/sft", "e/ppo", "e/sft2"))
    for path, model in ((user, f"{run}/checkpoints/model/step4"), (other, "data/e/sft3")):
        text = (path / "config.yaml").read_text()
        (path / "config.yaml").write_text(text.replace("path: data/model", f"path: {model}"))
    main([str(run), "--yes"])
    out = capsys.readouterr().out
    assert f"named in the configuration of {user}\n" in out
