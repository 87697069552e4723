"""Diagnosis of runs: problems that are reported, and healthy runs without findings."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from weft.observe.configuration import compute_defaults
from weft.observe.diagnosis import FINE, diagnose_run
from weft.observe.metric_help import CRITIC, HELP
from weft.observe.observer import RunObserver
from weft.observe.report import build_report
from weft.observe.run_files import RunFiles
from weft.observe.run_list import list_runs
from weft.registry import quickstarts

GRPO = {
    "actor": {"optimizer": {"lr": 3e-6}},
    "grpo": {"kl_coef": 0.001, "gen": {"max_new_tokens": 64}, "group_size": 8},
}
LOOP = "the answer is the answer is the answer is " * 6


def course(
    start: float, end: float, count: int = 40, spread: float = 0.0, seed: int = 0
) -> list[float]:
    draws = random.Random(seed)
    return [
        start + (end - start) * step / (count - 1) + draws.gauss(0, spread) for step in range(count)
    ]


def lines(**columns: list[float] | float) -> list[dict[str, Any]]:
    """Return lines of metrics; the argument `actor_train__kl` sets `actor_train/kl`."""
    count = max(
        (len(values) for values in columns.values() if isinstance(values, list)), default=40
    )
    told = {
        name.replace("__", "/"): v if isinstance(v, list) else [v] * count
        for name, v in columns.items()
    }
    return [
        {"step": step + 1, **{name: values[step] for name, values in told.items()}}
        for step in range(count)
    ]


def healthy(**others: list[float] | float) -> list[dict[str, Any]]:
    """Return lines of a GRPO run that learns: the reward rises beyond its noise, the KL slowly."""
    usual: dict[str, list[float] | float] = {
        "actor_gen__response_length": course(40, 55, spread=2),
        "actor_gen__truncated_fraction": course(0.05, 0.03),
        "reward__reward": course(0.3, 0.8, spread=0.05),
        "reward__reward_std": course(0.4, 0.25, spread=0.02),
        "reward__frac_reward_zero_std": course(0.2, 0.5),
        "actor_train__kl": course(0.0, 0.2, spread=0.01),
        "actor_train__entropy": course(0.5, 0.2),
        "actor_train__clip_ratio": 0.02,
        "actor_train__approx_kl": 0.001,
        "actor_train__loss": course(0.01, -0.01, spread=0.02),
        "actor_train__sampler_logprob_diff": 1e-6,
    }
    return lines(**usual | others)


HACKED = healthy(
    actor_train__kl=course(0.0, 4.4),
    actor_gen__truncated_fraction=[0.1] * 10 + [1.0] * 30,
    actor_gen__response_length=64.0,
    reward__reward_std=[0.3] * 10 + [0.006] * 30,
    reward__reward=course(0.3, 0.99, spread=0.01),
)


def text(found: Any) -> str:
    assert found is not None
    return str(found.summary)


def test_an_exploited_reward_is_reported_in_one_line() -> None:
    told = text(diagnose_run(HACKED, "grpo", lambda: GRPO))
    assert "KL 4.174 nats per token (usual: at most 1)" in told
    assert (
        "100% of the answers are cut by length" in told
        and "reward spread 0.006 (0.3 at first)" in told
    )
    assert (
        "the policy exploits the reward" in told
        and "Try grpo.kl_coef=0.01, or actor.optimizer.lr=1e-6." in told
    )
    assert "\n" not in told


def test_a_reward_exploited_from_the_first_line_on_is_reported() -> None:
    rows = lines(
        actor_train__kl=4.0,
        actor_gen__truncated_fraction=1.0,
        reward__reward=0.9,
        reward__reward_std=0.006,
    )
    assert "KL 4 nats" in text(diagnose_run(rows, None)) and "exploits the reward" in text(
        diagnose_run(rows, None)
    )


def test_a_healthy_run_has_no_findings() -> None:
    for seed in range(20):
        rows = healthy(reward__reward=course(0.3, 0.8, spread=0.1, seed=seed))
        assert text(diagnose_run(rows, "grpo", lambda: GRPO)) == FINE


def test_a_solved_task_has_no_findings() -> None:
    """Its groups have no spread left and its policy is sure, as those of an exploited reward: but
    nothing else is wrong.
    """
    rows = healthy(
        reward__reward=course(0.3, 1.0),
        reward__reward_std=course(0.4, 0.0),
        reward__frac_reward_zero_std=course(0.1, 1.0),
        actor_train__entropy=course(0.5, 0.001),
    )
    assert text(diagnose_run(rows, "grpo", lambda: GRPO)) == FINE


def test_short_runs_are_not_judged() -> None:
    assert diagnose_run(HACKED[:7], "grpo") is None and diagnose_run([], "grpo") is None


def test_one_bad_step_is_no_verdict() -> None:
    kl = course(0.0, 0.2)
    kl[-1] = 50.0
    assert text(diagnose_run(healthy(actor_train__kl=kl), "grpo", lambda: GRPO)) == FINE


SFT = {"model": {"optimizer": {"lr": 3e-3}}, "sft": {}}


@pytest.mark.parametrize(
    ("algorithm", "rows", "config", "told"),
    [
        (
            "grpo",
            healthy(reward__frac_reward_zero_std=0.97, reward__reward=0.0),
            GRPO,
            "too easy or too hard",
        ),
        (
            "grpo",
            healthy(reward__reward=course(0.5, 0.2, spread=0.02)),
            GRPO,
            "reward fell from 0.",
        ),
        ("grpo", healthy(actor_train__clip_ratio=0.6), GRPO, "the updates are too large"),
        (
            "grpo",
            healthy(actor_gen__truncated_fraction=0.5),
            GRPO,
            "50% of the answers are cut by length",
        ),
        ("grpo", healthy(actor_gen__truncated_fraction=0.5), GRPO, "grpo.gen.max_new_tokens=130"),
        (
            "ppo",
            healthy(critic_train__explained_variance=-0.6),
            {"ppo": {}},
            "critic predicts worse than a constant",
        ),
        ("sft", lines(train__loss=course(2.0, 5.0, spread=0.1)), SFT, "loss rose from"),
        ("sft", lines(train__loss=course(2.0, 5.0, spread=0.1)), SFT, "model.optimizer.lr=0.001"),
        (
            "rw",
            lines(train__accuracy=course(0.5, 0.5), train__loss=0.69),
            {"rw": {}},
            "accuracy 0.5 (chance: 0.5)",
        ),
        ("grpo", healthy(reward__timeouts=3.0), GRPO, "timeouts 3"),
        (
            "sft",
            [row | {"train/loss": None} for row in lines(train__grad_norm=1.0)],
            SFT,
            "loss is not finite",
        ),
    ],
)
def test_each_kind_of_problem_is_reported(
    algorithm: str, rows: list[dict[str, Any]], config: Any, told: str
) -> None:
    assert told in text(diagnose_run(rows, algorithm, lambda: config))


@pytest.mark.parametrize(
    ("algorithm", "rows", "config"),
    [
        (
            "sft",
            lines(train__loss=course(4.0, 0.5, spread=0.1), train__accuracy=course(0.1, 0.4)),
            SFT,
        ),
        (
            "rw",
            lines(train__accuracy=course(0.5, 0.7, spread=0.05), train__loss=course(0.69, 0.6)),
            {"rw": {}},
        ),
        (
            "ppo",
            healthy(reward__frac_reward_zero_std=1.0, reward__reward_std=1.0),
            {"ppo": {"samples_per_prompt": 1}},
        ),
        (
            "grpo",
            healthy(reward__frac_reward_zero_std=1.0, reward__reward=0.5),
            {"grpo": {"group_size": 1}},
        ),
        (
            "distill",
            lines(actor_train__kl_exact=course(5.0, 2.0), actor_train__loss=course(1.0, 2.0)),
            {"distill": {}},
        ),
        (
            "grpo",
            healthy(actor_gen__truncated_fraction=1.0),
            {"grpo": {"gen": {"min_new_tokens": 9, "max_new_tokens": 9}}},
        ),
        ("grpo", healthy(actor_train__sampler_logprob_diff=0.2), {"grpo": {"max_staleness": 2}}),
        ("grpo", healthy(actor_train__clip_ratio=0.6), {"grpo": {"importance_level": "sequence"}}),
        ("ppo", healthy(actor_train__kl_max=30.0), {"ppo": {}}),
    ],
)
def test_values_that_are_usual_for_an_algorithm_are_no_findings(
    algorithm: str, rows: list[dict[str, Any]], config: Any
) -> None:
    assert text(diagnose_run(rows, algorithm, lambda: config)) == FINE


def test_a_rising_validation_loss_and_a_falling_training_loss_are_memorizing() -> None:
    rows = lines(train__loss=course(3.0, 0.5))
    for step, value in ((10, 2.0), (20, 1.5), (30, 1.8), (40, 2.2)):
        rows[step - 1]["eval/loss"] = value
    told = text(diagnose_run(rows, "sft", lambda: SFT))
    assert (
        "eval loss rose to 2.2 from 1.5 at step 20, while training loss fell" in told
        and "Try max_steps=20" in told
    )
    rows[29]["eval/loss"], rows[39]["eval/loss"] = 1.5, 1.51
    assert text(diagnose_run(rows, "sft", lambda: SFT)) == FINE


def test_only_text_that_becomes_repetitive_is_reported() -> None:
    def samples(first: str) -> list[Mapping[str, Any]]:
        return [
            {"step": step, "completion": said, "finished": 0.0}
            for step, said in ((1, first), (40, LOOP))
            for _ in range(3)
        ]

    good = "First we count the apples in each box, then add what was bought on Monday, which makes forty-two; divide by 7."
    assert "100% of the last answers repeat themselves" in text(
        diagnose_run(healthy(), "grpo", lambda: GRPO, samples(good))
    )
    assert text(diagnose_run(healthy(), "grpo", lambda: GRPO, samples(LOOP))) == FINE
    assert text(diagnose_run(healthy(), "grpo", lambda: GRPO, samples(good)[:3])) == FINE


def test_every_bound_has_a_cause_and_something_to_try() -> None:
    for about in (one for one in HELP if one.least is not None or one.most is not None):
        low = about.least is not None
        name = about.pattern.replace("?", "1")
        bad = about.least - 1 if about.least is not None else (about.most or 0.0) + 1
        values = {
            f"n__{name}": course(5.0, bad) if low else bad,
            "reward__reward": 0.2,
            "judge__died": 3.0,
        }
        found = diagnose_run(lines(**values), "grpo", lambda: GRPO)
        assert found is not None
        own = [each for each in found.findings if each.key == about.pattern]
        assert (
            own
            and own[0].fixes
            and own[0].cause != "the run has a problem that weft does not recognize"
        ), about.pattern


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "online_dpo"])
def test_options_to_try_are_options(algorithm: str) -> None:
    known = set(compute_defaults(quickstarts.get(algorithm)()))
    for about in (one for one in HELP if one.least is not None or one.most is not None):
        if (about.group == CRITIC and algorithm != "ppo") or (
            about.group == "Policy" and algorithm == "online_dpo"
        ):
            continue  # it has none
        name = about.pattern.replace("?", "1")
        bad = about.least - 1 if about.least is not None else (about.most or 0.0) + 1
        values = {
            f"actor_train__{name}": course(5.0, bad) if about.least is not None else bad,
            "judge__died": 3.0,
        }
        found = diagnose_run(lines(**values), algorithm, dict)
        assert found is not None
        for option in re.findall(
            r"[a-z_]+(?:\.[a-z_]+)+", " ".join(fix for each in found.findings for fix in each.fixes)
        ):
            assert option in known, f"{option}, which {about.pattern} says to try"


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text(
        yaml.safe_dump({"experiment_name": "e", "trial_name": folder.name, **GRPO})
    )
    (folder / "run.json").write_text(json.dumps({"algorithm": "grpo"}))
    (folder / "status.json").write_text('{"status": "finished"}')
    return folder


def test_every_view_of_a_run_has_the_same_diagnosis(tmp_path: Path) -> None:
    for name, rows in (("bad", HACKED), ("good", healthy())):
        run = write(tmp_path / "e" / name, rows)
        told = text(RunFiles.read(run).diagnosis)
        page = build_report(run).read_text()
        assert told.replace('"', "&quot;") in page and ("finished flagged" in page) is (
            name == "bad"
        )
        assert next(each for each in list_runs(tmp_path) if each.trial == name).diagnosis == told
        notes: list[str] = []
        observer = RunObserver(run)
        observer.note = notes.append  # type: ignore[method-assign]
        observer.close("finished", ["next: weft chat"])
        assert notes == [f"check: {told}", "next: weft chat"]
