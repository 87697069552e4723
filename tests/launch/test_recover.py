"""A run of several devices that loses them comes back by itself, and ends with the numbers of one that never did."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.launch.cases import prepare
from tests.runtime.placed import Command, timeless, write_hooks

pytest.importorskip("ray")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recover")
    prepare(folder)
    write_hooks(folder)
    return folder


def words(root: Path, folder: str, *more: str) -> list[str]:
    """PPO with critic, reference and reward model on a device of their own, a recovery point after every step."""
    return [
        "ppo", "experiment_name=e", "trial_name=t", f"fileroot={root}/{folder}", f"actor.path={root}/model",
        f"critic.path={root}/model", f"rew.path={root}/model", "actor.optimizer.lr=1e-3", "critic.optimizer.lr=1e-3",
        f"dataset.path={root}/prompts.jsonl", "dataset.train_bs_n_seqs=4", "ppo.gen.max_new_tokens=6", "max_steps=6",
        "total_train_epochs=2", "ppo.value_norm=true", "ppo.use_adaptive_kl_ctl=true", "ppo.ppo_n_minibatches=2",
        "recover_freq_steps=1", "critic.device_mesh=1", "ref.device_mesh=1", "rew.device_mesh=1",
        f"imports=[{root}/placed_hooks.py]", *more,
    ]  # fmt: skip


def die(root: Path, call: str, step: int, flag: str) -> str:
    return f"{call}.pre_hooks=[{{function: die, args: {{step: {step}, flag: {root}/{flag}}}}}]"


@pytest.fixture(scope="module")
def whole(root) -> Path:
    command = Command(*words(root, "whole"), cwd=root)
    code, out = command.end()
    assert code == 0, out
    return root / "whole" / "e" / "t"


@pytest.mark.slow
def test_a_device_that_dies_is_replaced_and_the_numbers_stay(root, whole):
    command = Command(*words(root, "died", die(root, "ref_inf", 3, "once")), cwd=root)
    code, out = command.end()
    assert code == 0 and command.none_left(), out
    run = root / "died" / "e" / "t"
    assert timeless(run) == timeless(whole)
    assert (run / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()
    log = (run / "log.txt").read_text()
    assert "died in call 'ref_inf' of role 'ref'" in log and "restart 1 of 3" in log and "going on after step 3" in log
    assert json.loads((run / "status.json").read_text())["status"] == "finished"
