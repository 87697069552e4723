"""Names of models: the directory that each refers to, and messages for names without a model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weft.checkpoints.names import (
    CRITICS,
    SCORERS,
    ModelQuery,
    find_model,
    find_newest_run,
    locate_model,
    suggest_path,
)
from weft.data import hub
from weft.errors import CheckpointError
from weft.observe.jsonl import POLICIES


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs of SFT (steps 2, 9, 10), of a reward model, of PPO, and one without a checkpoint, as
    seen from their folder.
    """
    monkeypatch.chdir(tmp_path)
    saved = {
        "sft": ["model/step2", "model/step9", "model/step10", "model/step11.tmp"],
        "rm": ["model/step5"],
    }
    saved |= {"ppo": ["actor/step4", "critic/step4"], "empty": []}
    for trial, steps in saved.items():
        run = tmp_path / "runs" / "e" / trial
        (run / "recover" / "step3").mkdir(parents=True)
        (run / "config.yaml").write_text("{}\n")
        for step in steps:
            (run / "checkpoints" / step).mkdir(parents=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "runs"


def test_the_newest_run_of_a_folder_of_runs(runs: Path) -> None:
    for age, trial in enumerate(("ppo", "sft", "rm")):
        os.utime(runs / "e" / trial / "checkpoints", (1000 - age, 1000 - age))
    assert find_newest_run("runs") == "runs/e/ppo"
    assert find_newest_run("runs/e/sft") == "runs/e/sft", "a run is itself"
    assert find_newest_run("model") == "model" and find_newest_run("owner/name") == "owner/name"


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("model", "model"),
        ("./model", "./model"),
        ("runs/e/sft", "runs/e/sft/checkpoints/model/step10"),
        ("runs/e/sft/", "runs/e/sft/checkpoints/model/step10"),
        ("runs/e/sft@latest", "runs/e/sft/checkpoints/model/step10"),
        ("runs/e/sft/latest", "runs/e/sft/checkpoints/model/step10"),
        ("runs/e/sft@step9", "runs/e/sft/checkpoints/model/step9"),
        ("runs/e/sft@2", "runs/e/sft/checkpoints/model/step2"),
        ("runs/e/sft/checkpoints", "runs/e/sft/checkpoints/model/step10"),
        ("runs/e/sft/checkpoints/model", "runs/e/sft/checkpoints/model/step10"),
        ("runs/e/sft/checkpoints/model/latest", "runs/e/sft/checkpoints/model/step10"),
        ("runs/e/sft/checkpoints/model@step2", "runs/e/sft/checkpoints/model/step2"),
        ("runs/e/ppo", "runs/e/ppo/checkpoints/actor/step4"),
        ("runs/e/ppo@step4:critic", "runs/e/ppo/checkpoints/critic/step4"),
        ("runs/e/ppo:critic", "runs/e/ppo/checkpoints/critic/step4"),
        ("e/sft", "runs/e/sft/checkpoints/model/step10"),
        ("e/sft@step2", "runs/e/sft/checkpoints/model/step2"),
        ("owner/name", "owner/name"),
        ("gpt2", "gpt2"),
    ],
)
def test_names_refer_to_directories(runs: Path, given: str, path: str) -> None:
    assert locate_model(given).path == path


def test_the_role_selects_the_checkpoint_of_a_run_with_several(runs: Path) -> None:
    paths = {
        roles: locate_model("runs/e/ppo", ModelQuery(roles=roles)).path.split("/")[-2]
        for roles in (POLICIES, CRITICS)
    }
    assert paths == {POLICIES: "actor", CRITICS: "critic"}
    assert (
        locate_model("runs/e/rm", ModelQuery(roles=SCORERS)).path
        == "runs/e/rm/checkpoints/model/step5"
    )
    with pytest.raises(
        CheckpointError,
        match=r"rew\.path='runs/e/ppo': .* actor and critic, .*: runs/e/ppo@latest:actor",
    ):
        locate_model("runs/e/ppo", ModelQuery("rew.path", SCORERS))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "runs/e/sft@step3",
            r"no such checkpoint of model; it has @step2, @step9, @step10, and @latest",
        ),
        ("runs/e/sft@stp9", r"it has @step2"),
        ("runs/e/sft@step9:actor", r"no checkpoints of 'actor'; it has those of model"),
        ("runs/e/empty", r"has saved no checkpoint yet; .* save_freq_steps=N"),
        (
            "runs/e",
            r"no config\.json, and no checkpoints of a run; name .* runs/E/T, .* did you mean the "
            r"run runs/e/",
        ),
        ("./runs/e/sfft", r"no such file or directory; .* did you mean the run runs/e/sft"),
        ("./modell", r"did you mean model\?"),
        (".", r"has no config\.json, .* did you mean model\?"),
        ("runs/e/latest", r"there is no such file or directory; .* did you mean the run runs/e/"),
        ("a/b/c/d", r"no such file or directory; .* check the spelling"),
    ],
)
def test_unknown_names_are_refused_with_the_rule_and_the_fix(
    runs: Path, given: str, message: str
) -> None:
    with pytest.raises(CheckpointError, match=r"^model\.path=.*" + message):
        locate_model(given, ModelQuery("model.path"))


def test_a_model_of_the_cache_comes_before_a_run_of_its_name(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = locate_model("e/sft", ModelQuery("actor.path"))
    assert found.note.startswith(
        "actor.path='e/sft': taken as a run, runs/e/sft/checkpoints/model/step10"
    )
    monkeypatch.setattr(hub, "is_cached", lambda name: name == "e/sft")
    assert locate_model("e/sft").path == "e/sft"
    monkeypatch.setattr(hub, "is_cached", lambda name: False)
    assert locate_model("e/sft", ModelQuery(own_run=runs / "e" / "sft")).path == "e/sft", (
        "a run is not what it begins from"
    )


def test_a_resumed_run_keeps_its_initial_checkpoint(runs: Path) -> None:
    began = ModelQuery("model.path", initial_checkpoint="runs/e/sft/checkpoints/model/step2")
    for given in ("runs/e/sft", "runs/e/sft@latest", "e/sft", str(runs / "e" / "sft")):
        assert locate_model(given, began).path == "runs/e/sft/checkpoints/model/step2"
    assert "step10 is newer" in locate_model("runs/e/sft", began).note
    assert locate_model("runs/e/sft@step9", began).path.endswith("step9"), (
        "a step that is named is that step"
    )
    assert locate_model("runs/e/rm", began).path.endswith("rm/checkpoints/model/step5"), (
        "another run is another run"
    )
    assert locate_model("runs/e/ppo", began).path.endswith("actor/step4")
    gone = ModelQuery("model.path", initial_checkpoint="runs/e/sft/checkpoints/model/step1")
    with pytest.raises(
        CheckpointError,
        match=r"began with runs/e/sft/checkpoints/model/step1, which no longer exists",
    ):
        locate_model("runs/e/sft", gone)


@pytest.fixture
def best(runs: Path) -> Path:
    record = '{"step": 9, "metric": "eval/loss", "value": 1.5, "mode": "min"}'
    (runs / "e" / "sft" / "checkpoints" / "best.json").write_text(record)
    return runs


@pytest.mark.parametrize(
    "given",
    [
        "runs/e/sft@best",
        "runs/e/sft/best",
        "runs/e/sft@best:model",
        "runs/e/sft/checkpoints/model/best",
        "runs/e/sft/checkpoints@best",
        "e/sft@best",
        "latest@best",
    ],
)
def test_the_best_checkpoint_has_a_name(best: Path, given: str) -> None:
    for trial in ("empty", "rm", "ppo"):
        os.utime(best / "e" / trial / "config.yaml", (1000.0,) * 2)
    found = locate_model(given, ModelQuery("model.path"))
    assert found.path.endswith("runs/e/sft/checkpoints/model/step9")
    assert "step9" in found.note


def test_a_run_under_way_keeps_the_best_that_it_began_with(best: Path) -> None:
    began = ModelQuery("model.path", initial_checkpoint="runs/e/sft/checkpoints/model/step2")
    for given in ("runs/e/sft@best", "latest@best"):
        assert locate_model(given, began).path == "runs/e/sft/checkpoints/model/step2"
    assert "step9 is better" in locate_model("runs/e/sft@best", began).note


def test_a_run_without_a_best_checkpoint_says_how_to_get_one(best: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no best checkpoint; a run with save_best=METRIC"):
        locate_model("runs/e/ppo@best")
    (best / "e" / "sft" / "checkpoints" / "model" / "step9").rmdir()
    with pytest.raises(CheckpointError, match=r"step9, is missing; there are @step2, @step10, and"):
        locate_model("runs/e/sft@best")


def test_latest_is_the_newest_run_with_a_suitable_role(runs: Path) -> None:
    for age, trial in enumerate(("empty", "rm", "ppo", "sft")):
        os.utime(runs / "e" / trial / "config.yaml", (1000.0 - age,) * 2)
    places = {
        ("latest", POLICIES): "rm/checkpoints/model/step5",
        ("latest:critic", POLICIES): "ppo/checkpoints/critic/step4",
        ("latest@step4:actor", POLICIES): "ppo/checkpoints/actor/step4",
        ("latest", ("actor",)): "ppo/checkpoints/actor/step4",
    }
    for (given, roles), place in places.items():
        assert locate_model(given, ModelQuery(roles=roles)).path == f"runs/e/{place}", (
            given,
            roles,
        )
    assert locate_model("latest", ModelQuery(own_run=runs / "e" / "rm")).path.endswith(
        "actor/step4"
    ), "not the run that asks"
    began = "runs/e/sft/checkpoints/model/step2"
    assert locate_model("latest", ModelQuery(initial_checkpoint=began)).path == began, (
        "a run under way keeps what it began with"
    )
    with pytest.raises(
        CheckpointError, match=r"^model\.path='latest@step7': .*rm has no such checkpoint of model"
    ):
        locate_model("latest@step7", ModelQuery("model.path"))
    with pytest.raises(
        CheckpointError,
        match=r"^rew\.path='latest:rew': no run in \./runs has a checkpoint of rew; ",
    ):
        locate_model("latest:rew", ModelQuery("rew.path"))


def test_an_unknown_hub_name_is_looked_up_once(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked = list[tuple[str, str, str]]()
    monkeypatch.setattr(hub, "check_model", lambda *words: asked.append(words))
    assert find_model("e/stf", ModelQuery("--model")).path == "e/stf"
    assert asked == [("--model", "e/stf", "did you mean the run runs/e/sft?")]
    find_model("runs/e/sft", ModelQuery("--model"))
    assert len(asked) == 1


def test_hints(runs: Path) -> None:
    assert suggest_path("e") == "did you mean the run runs/e/empty?" or suggest_path(
        "e"
    ).startswith("did you mean the run runs/e/")
    assert suggest_path("xxxxxxxx/yyyyyyy") == "check the spelling"
