"""Plan before a run: a short table for any run, with the main counts, and details below it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.launch.cases import grpo, ppo
from tests.planner.test_lengths import Length
from weft.data.counts import SourceCount
from weft.data.loader import LoadedData
from weft.experiment import Experiment
from weft.experiments import PPOConfig
from weft.observe.plan_table import build_plan
from weft.observe.progress import RunPlan
from weft.planner.devices import GIB
from weft.planner.forecast import MemoryForecast
from weft.planner.lengths import RunLength
from weft.planner.memory import RoleMemory
from weft.planner.run_plan import describe_run

ROOM = int(100 * GIB)
NUMERICS = {
    "hardware": "cpu (a processor, 8 cores, 100.00 GiB)",
    "memory": ROOM,
    "threads": 8,
    "torch": "2.13",
}


def forecast(experiment: Experiment, gib: float, device: str = "cuda") -> MemoryForecast:
    held = RoleMemory(int(gib * GIB), 0, 0, 0, 0, 0, 0)
    return MemoryForecast({next(iter(experiment.roles)): held}, device, (), 1.0)


def plan(
    experiment: Experiment, ids: int = 14, gib: float = 1.0, counts: tuple[SourceCount, ...] = ()
) -> RunPlan:
    experiment = replace(
        experiment, roles={r: replace(s, dtype="float32") for r, s in experiment.roles.items()}
    )
    facts = {
        role: {
            "family": "llama",
            "num_parameters": 1_340_000,
            "num_trainable": 1_340_000 if spec.trained else 0,
        }
        for role, spec in experiment.roles.items()
    }
    loader: Any = Length(ids, 4)
    notes = tuple(note for count in counts for note in count.build_notes("max_seqlen=4"))
    data = LoadedData(loader, counts=counts, notes=notes)
    horizon = RunLength.from_experiment(experiment, loader)
    run = describe_run(experiment, horizon, facts, data, forecast(experiment, gib))
    return build_plan(run, NUMERICS)


def changed(config: PPOConfig, **more: Any) -> PPOConfig:
    for name, value in more.items():
        target: Any = config
        *path, last = name.split("__")
        for part in path:
            target = getattr(target, part)
        setattr(target, last, value)
    return config


@pytest.fixture(autouse=True)
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1="}\n')
    monkeypatch.chdir(tmp_path)


def test_ppo_in_nine_lines_of_80_columns() -> None:
    assert plan(ppo(Path(), "runs").build()).format_short(80) == [
        "nodes          actor_gen -> rew_inf, ref_inf, critic_inf -> advantages",
        "               -> actor_train, critic_train",
        "data           14 prompts per epoch, batches of 4 (last: 2)",
        "step           4 prompts x 1 = 4 completions, 2 optimizer steps per model",
        "epoch          4 steps, 14 completions, 8 optimizer steps per model",
        "run            8 steps (2 epochs), 16 optimizer steps per model",
        "actor, critic  model (llama), 1.34M parameters, trained, float32",
        "ref, rew       model (llama), 1.34M parameters, frozen, float32",
        "device         cpu (a processor, 8 cores, 100.00 GiB), 8 threads",
    ]


@pytest.mark.parametrize("width", [60, 80, 160])
def test_models_of_all_kinds_on_many_devices_stay_within_ten_lines(width: int) -> None:
    long = "a-long-name/" * 9
    for path in (long, "rewards"):
        Path(path).mkdir(parents=True)
        (Path(path) / "config.json").write_text('{"model_type": "llama"}')
        (Path(path) / "model.safetensors").touch()
    config = changed(ppo(Path(), "runs"), critic__path=long, rew__path="rewards")
    config = changed(
        config, actor__layout="d2t2", critic__layout="d4", ref__layout="t4", rew__layout="t4"
    )
    made = plan(config.build(), gib=20.0)
    lines = made.format_short(width)
    assert len(lines) <= 10 and all(len(line) <= width for line in lines)
    labels = [line.split("  ")[0] for line in lines if not line.startswith(" ")]
    assert labels[0] == "nodes" and labels[-3:] == ["memory", "layouts", "devices"], (
        "every row has a line"
    )
    text = "\n".join(lines)
    if width > 60:
        assert "layouts actor d2f2t2 on 0-3; critic d4f4 on 0-3; ref, rew t4 on 0-3" in " ".join(
            text.split()
        )
        assert "4 x cpu (" in lines[-1]
    assert "at most about 20.00 GiB on each device" in text
    assert "actor: layout d2f2t2p1c1e1 on devices 0-3" in made.details


def test_different_counts_name_their_models_and_a_limit_is_shown() -> None:
    config = changed(ppo(Path(), "runs"), ppo__critic_warmup_epochs=1, max_steps=7)
    rows = dict(plan(config.build()).rows)
    details = plan(config.build()).details
    assert "actor_train: no optimizer step in the first epoch" in details
    length = "7 steps (max_steps=7, which overrides total_train_epochs=2)"
    assert rows["run"] == f"{length}, 6 optimizer steps of actor, 14 optimizer steps of critic"
    alone = dict(plan(grpo(Path(), "runs").build()).rows)
    assert (
        alone["step"].startswith("4 prompts x 3 = 12 completions, ")
        and "model" not in alone["step"]
    )


@pytest.mark.parametrize(
    ("gib", "row"),
    [
        (9.9, None),
        (10.1, "at most about 10.10 GiB of 100.00 GiB"),
        (
            120.0,
            "at most about 120.00 GiB of 100.00 GiB; it may not fit: weft plan memory shows what "
            "would",
        ),
    ],
)
def test_memory_is_shown_from_a_tenth_of_the_machine_on(gib: float, row: str | None) -> None:
    made = plan(grpo(Path(), "runs").build(), gib=gib)
    assert dict(made.rows).get("memory") == row
    assert any(line.startswith("memory: about ") for line in made.details), (
        "the log has it in any case"
    )


def test_omitted_rows_are_noted_and_unused_columns_are_details() -> None:
    report: Any = SimpleNamespace(
        rows=9, prompts_cut=0, answers_cut=0, dropped=2, unused=["source"], cut=[]
    )
    made = plan(
        grpo(Path(), "runs").build(), counts=(SourceCount("rows", "prompt", 7, 0, 7, report),)
    )
    assert made.notes == ["rows: of 9 rows, 2 left out (max_seqlen=4)"]
    assert "rows: columns that rows of type prompt do not use: source" in made.details


def test_a_plan_without_data_and_device_has_its_other_rows() -> None:
    experiment = ppo(Path(), "runs").build()
    facts = {
        role: {"family": "llama", "num_parameters": 7_000_000_000} for role in experiment.roles
    }
    run = describe_run(experiment, None, facts, None, forecast(experiment, 60.0))
    made = build_plan(run, {"hardware": "a GPU of 80 GB"})
    rows = dict(made.rows)
    assert (
        rows["data"] == "not read, so the number of steps is not known"
        and rows["device"] == "a GPU of 80 GB"
    )
    assert (
        "step" not in rows
        and "memory" not in rows
        and not any("torch" in line for line in made.format_whole())
    )


def test_the_details_repeat_no_number_of_the_table() -> None:
    for made in (plan(ppo(Path(), "runs").build()), plan(grpo(Path(), "runs").build())):
        numbers = {
            found
            for _, text in made.rows[1:5]
            for found in re.findall(r"\d+ (?:completions|steps?|optimizer steps?)", text)
        }
        details = "\n".join(line for line in made.details if not line.startswith("memory"))
        assert not [found for found in numbers if found in details] and "parameters" not in details
        assert "actor: learning rate 0.001 (constant)" in made.details
