"""`weft plan search --output`: plans are written and compared, and edited ones never replaced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.cli.main import main
from weft.planner.plan_file import parse_plan
from weft.registry import families

LLAMA = {"model_type": "llama", **families.get("llama").tiny}


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the words for a run on four GPUs of a model with only a config.json, without data."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.chdir(tmp_path)
    more = ("dataset.max_prompt_len=16", "ppo.gen.max_new_tokens=8", "reward=length")
    roles = [f"{role}.path=model" for role in ("actor", "critic")]
    return ["ppo", *roles, "n_gpus_per_node=4", "search.gpu=H100", *more]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 0
    return capsys.readouterr().out


def test_a_plan_is_written_and_replaced_unless_it_was_edited(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    page = run(capsys, "search", *words, "--output", "plan.yaml")
    assert "written to plan.yaml; weft plan run ... allocation_mode=plan.yaml prices it" in page
    text = Path("plan.yaml").read_text()
    plan = parse_plan(text, "plan.yaml")
    calls = ["actor_gen", "ref_inf", "critic_inf", "actor_train", "critic_train"]
    assert sorted(plan.calls) == sorted(calls)
    for call in plan.calls.values():
        assert set(call.estimated) == {"seconds", "bound", "memory_gb"}
    assert plan.facts.devices == plan.facts.devices_per_node == 4 and plan.facts.rows_per_step == 32
    assert plan.facts.models["actor"]["hidden"] == LLAMA["hidden_size"]
    assert plan.estimates["device"] == "H100" and plan.estimates["prompt_tokens"] == 16
    # Write the same plan again, then over an edited plan, and over another file.
    run(capsys, "search", *words, "--output", "plan.yaml")
    assert Path("plan.yaml").read_text() == text
    Path("plan.yaml").write_text(text + "# mine\n")
    Path("notes.yaml").write_text("mine\n")
    for name, told in (("plan", "has been edited since weft wrote it"), ("notes", "no plan of")):
        before = Path(f"{name}.yaml").read_text()
        assert main(["plan", "search", *words, "--output", f"{name}.yaml"]) == 2
        assert told in capsys.readouterr().err and Path(f"{name}.yaml").read_text() == before
    assert main(["plan", "search", *words, "--output", "model"]) == 2
    assert "is a folder" in capsys.readouterr().err


def test_a_plan_is_compared_with_the_result_of_the_search(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "search", *words, "--output", "plan.yaml")
    page = run(capsys, "search", *words, "allocation_mode=plan.yaml")
    line = page.splitlines()[-1]
    assert line.startswith("plan.yaml: ") and "the search finds" in line and "times" not in line
    text = Path("plan.yaml").read_text()
    plan = parse_plan(text, "plan.yaml")
    for call in plan.calls.values():
        text = text.replace(f'layout: {call.layout}\n    devices: "{call.devices}"', MESH)
    Path("slow.yaml").write_text(text)
    found = json.loads(run(capsys, "search", *words, "allocation_mode=slow.yaml", "--json"))
    assert found["plan"]["step_seconds"] > found["search"]["step_seconds"] and found["plan"]["fits"]


MESH = 'layout: p3\n    devices: "0-2"'


def test_one_device_has_a_plan_too(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words[words.index("n_gpus_per_node=4")] = "n_gpus_per_node=1"
    page = run(capsys, "search", *words, "--output", "plan.yaml")
    assert "nothing to choose" in page and "fits: the device needs about" in page
    calls = parse_plan(Path("plan.yaml").read_text(), "plan.yaml").calls
    assert {(call.layout, call.devices) for call in calls.values()} == {("d1", "0")}
