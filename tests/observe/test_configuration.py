"""Configuration of a run: its start, its changed options, and a folded list of all others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.observe.test_report import Page
from weft.experiments import SFTConfig
from weft.observe.configuration import (
    find_algorithm,
    find_changed_options,
    render_configuration,
    render_starts,
)
from weft.observe.run_files import RunFiles
from weft.options import to_mapping

START = {
    "time": 1.7e9,
    "step": 0,
    "command": ["weft", "quickstart", "sft", "a=b c"],
    "folder": "/work",
    "host": "a-host",
    "hardware": "cpu",
    "commit": "abc123+",
    "versions": {"weft": "0.1.0", "torch": "2.13"},
}


def run(record: dict[str, Any] | None = None, **options: Any) -> RunFiles:
    config = SFTConfig(experiment_name="e", trial_name="t")
    config.model.optimizer.lr, config.dataset.train_path = 0.5, "rows.jsonl"
    return RunFiles(Path("run"), config=to_mapping(config) | options, record=record or {})


def test_changed_options_come_first() -> None:
    found = find_changed_options(run())
    assert (
        found is not None
        and found["model.optimizer.lr"][0] == 0.5
        and found["dataset.train_path"] == ("rows.jsonl", None)
    )
    assert set(found) == {"model.optimizer.lr", "dataset.train_path"}, (
        "the run's own names are no difference"
    )
    page = Page(render_configuration(run()))
    assert (
        page.text.index("Not the defaults of sft")
        < page.text.index("All options")
        < page.text.index("weight_decay")
    )
    assert "show unset" in page.text


def test_options_of_an_unknown_kind_are_all_shown() -> None:
    strange = RunFiles(Path("run"), config={"mine": {"a": 1}})
    assert find_changed_options(strange) is None and find_algorithm(strange) is None
    page = Page(render_configuration(strange))
    assert (
        "Not the defaults" not in page.text
        and "All options" not in page.text
        and "mine" in page.text
    )


def test_a_report_runs_no_code_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit(1)")
    assert find_changed_options(run({"algorithm": f"{tmp_path}/evil.py:Config"})) is None


def test_the_start_of_a_run_is_shown() -> None:
    earlier = START | {"time": 1.6e9, "step": 0}
    page = Page(render_starts(run({"starts": [earlier, START | {"step": 7}]})))
    for part in (
        "weft quickstart sft 'a=b c'",
        "abc123 with changes",
        "a-host",
        "weft 0.1.0, torch 2.13",
        "at step 0",
    ):
        assert part in page.text, part
    for broken in ({}, {"starts": 3}, {"starts": ["x", None]}, {"starts": [{}]}):
        Page(render_starts(run(broken)))


def test_secrets_are_masked(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("launch: {env: {HF_TOKEN: hf_secret}}\n")
    assert "hf_secret" not in render_configuration(RunFiles.read(tmp_path))
