"""Placement by a plan: that of a file, and that of a run that is resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.experiments.test_placement import LLAMA_8B
from weft.errors import ConfigError
from weft.experiment import Experiment
from weft.experiments import GRPOConfig, PPOConfig, SFTConfig
from weft.planner import search
from weft.planner.plan_file import PLAN, parse_plan

GRPO_PLAN = """weft_plan: 1
calls:
  actor_gen: {layout: d4, devices: 0-3}
  ref_inf: {layout: t2, devices: 4-5}
  actor_train: {layout: d2t2, devices: 0-3}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(search, "ANNEALING_STEPS", 200)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "plan.yaml").write_text(GRPO_PLAN)
    return tmp_path


def grpo(folder: Path, mode: str = "plan.yaml", **options: Any) -> GRPOConfig:
    fixed = {"experiment_name": "e", "trial_name": "t", "n_gpus_per_node": 8, "reward": "length"}
    config = GRPOConfig(**{**fixed, "allocation_mode": mode, **options})
    config.actor.path, config.actor.init_from_scratch = str(folder), True
    config.dataset.path, config.dataset.train_bs_n_seqs = str(folder / "prompts.jsonl"), 64
    config.dataset.max_prompt_len, config.grpo.gen.max_new_tokens = 128, 128
    config.search.gpu = "H100"
    return config


def save(experiment: Experiment) -> Path:
    """Write what a run leaves in its folder when it starts."""
    run = Path("runs/e/t")
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text(yaml.safe_dump(experiment.resolve()))
    (run / PLAN).write_text(experiment.plan)
    return run


def meshes(experiment: Experiment) -> dict[str, str]:
    return {name: str(mesh) for name, mesh in experiment.call_meshes.items()}


def test_each_call_has_the_layout_and_devices_of_the_plan(folder: Path) -> None:
    made = grpo(folder).build()
    assert meshes(made) == {
        "actor_gen": "d4f1t1p1c1e1 (devices 0, 1, 2, 3)",
        "ref_inf": "d1f1t2p1c1e1 (devices 4, 5)",
        "actor_train": "d2f2t2p1c1e1 (devices 0, 1, 2, 3)",
    }
    assert made.role_meshes["actor"] == made.call_meshes["actor_train"]
    made.check()
    kept = parse_plan(made.plan, "plan.yaml")
    assert kept.facts.devices == 8 and kept.facts.models["actor"]["layers"] == 32
    assert kept.facts.models["actor"]["parameters"] == 8_030_261_248


def test_a_call_on_the_first_device_stays_there(folder: Path) -> None:
    """Without a layout of its own, it would have that of the call which trains its role."""
    Path("plan.yaml").write_text(GRPO_PLAN.replace("d4, devices: 0-3", "d1, devices: 0"))
    made = grpo(folder).build()
    assert made.call_meshes["actor_gen"].ranks == (0,)
    assert made.call_meshes["actor_train"].ranks == (0, 1, 2, 3)


def test_a_plan_of_equal_layouts_agrees_with_those_of_options(folder: Path) -> None:
    config = grpo(folder)
    config.ref.layout, config.ref.device_mesh = "t2", "4-5"
    config.actor_gen.layout = "d4"
    assert meshes(config.build()) == meshes(grpo(folder).build())


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "actor_train",
            "actor_trian",
            r"plan.yaml:5: calls.actor_trian: .*did you mean actor_train",
        ),
        ("  ref_inf: {layout: t2, devices: 4-5}\n", "", "calls: ref_inf of this run is missing"),
        ("t2, devices: 4-5", "t3, devices: 4-6", "plan.yaml:4: calls.ref_inf.layout: t=3 does not"),
        (
            "t2, devices: 4-5",
            "p64, devices: 4-67",
            "plan.yaml:4: calls.ref_inf.layout: p=64 stages",
        ),
    ],
)
def test_a_plan_that_the_run_cannot_have_is_refused(
    folder: Path, old: str, new: str, told: str
) -> None:
    Path("plan.yaml").write_text(GRPO_PLAN.replace(old, new))
    with pytest.raises(ConfigError, match=told):
        grpo(folder).build()


def test_calls_that_train_a_role_have_one_mesh(folder: Path) -> None:
    """The options of a role fix all of its calls."""
    config = grpo(folder)
    config.actor.layout = "d8"
    with pytest.raises(
        ConfigError, match=r"plan.yaml:3: calls.actor_gen is d4 on 0-3, and actor.layout=d8"
    ):
        config.build()


def test_the_plan_of_a_run_is_kept_and_a_changed_file_refused(folder: Path) -> None:
    made = grpo(folder).build()
    run = save(made)
    assert meshes(grpo(folder).build()) == meshes(made)
    text = GRPO_PLAN.replace("d4, devices: 0-3", "d8, devices: 0-7")
    Path("plan.yaml").write_text(text)
    with pytest.raises(ConfigError, match="actor_gen: d4 on 0-3 there, d8 on 0-7 here"):
        grpo(folder).build()
    assert meshes(grpo(folder, recover_mode="disabled").build()) != meshes(made)
    again = grpo(folder, resume_from=str(run)).build()
    assert again.call_meshes["actor_gen"].layout.data == 8
    Path("plan.yaml").unlink()
    resumed = grpo(folder).build()
    assert meshes(resumed) == meshes(made)
    assert any(
        "there is no such file; the run continues with" in note for note in resumed.resume_notes
    )
    with pytest.raises(ConfigError, match=r"allocation_mode=plan.yaml: there is no such file"):
        grpo(folder, trial_name="other").build()


@pytest.mark.parametrize("mode", ["search", "heuristic"])
def test_a_run_is_planned_again_only_on_other_devices(folder: Path, mode: str) -> None:
    made = grpo(folder, mode).build()
    assert parse_plan(made.plan, "p").facts.devices == 8
    save(made)
    kept = grpo(folder, mode).build()
    assert meshes(kept) == meshes(made) and kept.plan == made.plan
    assert any("the run continues with its plan, runs/e/t/plan.yaml" in n for n in kept.plan_notes)
    fewer = grpo(folder, mode, n_gpus_per_node=4).build()
    assert fewer.num_devices <= 4
    note = fewer.resume_notes[0]
    assert note.startswith(f"allocation_mode={mode}: saved on 8 devices with ")
    assert ", now 4: planned again: " in note
    assert meshes(fewer) == meshes(grpo(folder, mode, n_gpus_per_node=4, trial_name="new").build())


def test_a_run_on_another_kind_of_device_or_batch_is_planned_again(folder: Path) -> None:
    run = save(grpo(folder, "search").build())
    other = grpo(folder, "search", resume_from=str(run))
    other.search.gpu = "A100"
    notes = other.build().resume_notes
    assert any(
        "saved on H100 with " in note and "now A100: planned again" in note for note in notes
    )
    other = grpo(folder, "search", resume_from=str(run))
    other.dataset.train_bs_n_seqs = 32
    notes = other.build().resume_notes
    assert any("saved for 64 rows per step, and this run has 32: planned again" in n for n in notes)


def test_a_run_with_other_layouts_is_planned_again(folder: Path) -> None:
    run = save(grpo(folder, "search").build())
    other = grpo(folder, "search", resume_from=str(run))
    other.actor_gen.layout = "t8"
    again = other.build()
    assert again.call_meshes["actor_gen"].layout.tensor == 8
    assert any(
        "does not suit the options (runs/e/t/plan.yaml" in note for note in again.resume_notes
    )


def test_the_plan_of_a_run_with_another_mode_is_ignored(folder: Path) -> None:
    save(grpo(folder, "heuristic").build())
    other = grpo(folder, "search").build()
    assert not other.resume_notes and not any("continues" in note for note in other.plan_notes)


def test_roles_without_a_network_are_not_in_a_plan(folder: Path) -> None:
    ppo = PPOConfig(
        experiment_name="e", trial_name="t", n_gpus_per_node=2, allocation_mode="search"
    )
    for role in ("actor", "critic"):
        spec = getattr(ppo, role)
        spec.path, spec.init_from_scratch, spec.gradient_checkpointing = str(folder), True, True
        spec.lora.r = 8
    ppo.rew.backend, ppo.rew.tokenizer.path = "null", str(folder)
    ppo.dataset.path, ppo.search.gpu = str(folder / "prompts.jsonl"), "H200"
    ppo.dataset.max_prompt_len, ppo.ppo.gen.max_new_tokens = 64, 64
    calls = parse_plan(ppo.build().plan, "plan.yaml").calls
    assert "rew_inf" not in calls and "actor_gen" in calls


def test_a_run_without_models_here_has_a_plan_of_its_calls(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    fixed = {"experiment_name": "e", "trial_name": "t", "n_gpus_per_node": 2}
    sft = SFTConfig(**fixed, allocation_mode="search")
    (folder / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    sft.model.path, sft.dataset.path, sft.search.gpu = (
        "org/model",
        str(folder / "rows.jsonl"),
        "H100",
    )
    plan = parse_plan(sft.build().plan, "plan.yaml")
    assert list(plan.calls) == ["train"] and plan.facts.models == {}
