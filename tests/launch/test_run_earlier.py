"""Run folders that an earlier version of weft began: their config.yaml is read and they resume.

`ppo_of_an_earlier_version.yaml` is the config.yaml of a run by commit 9fa2580, with ROOT for the
folder of the models and data.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.launch.cases import prepare
from tests.launch.test_run_restart import timeless
from weft.experiments import PPOConfig
from weft.experiments.common import build_experiment
from weft.launch import run
from weft.options import read, validate
from weft.runtime.directory import RunDirectory, admit

EARLIER = Path(__file__).with_name("ppo_of_an_earlier_version.yaml")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("earlier")
    prepare(folder)
    return folder


def configured(root: Path) -> tuple[PPOConfig, str]:
    """Return the options as a user gives them now, and the config.yaml written earlier."""
    text = EARLIER.read_text().replace("ROOT", str(root))
    names = {"experiment_name": "e", "trial_name": "t", "fileroot": str(root), "device": "cpu"}
    config = PPOConfig(**names, progress=False, max_steps=4, recover_freq_steps=1)
    config.actor.path = config.critic.path = config.rew.path = str(root / "model")
    config.actor.optimizer.lr = config.critic.optimizer.lr = 1e-3
    config.dataset.path, config.dataset.train_bs_n_seqs = str(root / "prompts.jsonl"), 4
    config.ppo.gen.max_new_tokens, config.ppo.ppo_n_minibatches = 6, 2
    config.ppo.use_adaptive_kl_ctl, config.ppo.gae_lambda = True, 0.9
    config.ppo.eps_clip_high = 0.3
    return config, text


def test_its_options_are_read_and_missing_ones_have_their_defaults(root: Path) -> None:
    config, text = configured(root)
    found = read(PPOConfig(), yaml.safe_load(text))
    validate(found)
    assert found.ppo == replace(config.ppo, gen=found.ppo.gen)
    assert found.ppo.advantages.gae_lambda == 0.9 and found.ppo.loss.eps_clip_high == 0.3


def test_its_folder_is_admitted(root: Path, tmp_path: Path) -> None:
    config, text = configured(root)
    (tmp_path / "config.yaml").write_text(text)
    experiment = build_experiment(config)
    folder = RunDirectory(tmp_path)
    assert admit(folder, experiment.control, experiment.resolve(), experiment.left_at_default)


@pytest.mark.slow
def test_it_resumes(root: Path) -> None:
    config, text = configured(root)
    whole = run(replace(config, fileroot=str(root / "whole")))
    folder = RunDirectory(Path(run(replace(config, max_steps=2)).directory))
    (folder.path / "config.yaml").write_text(text)
    folder.set_status("stopped", 2)
    run(config)
    metrics = [timeless(Path(each) / "metrics.jsonl") for each in (folder.path, whole.directory)]
    assert metrics[0] == metrics[1] and len(metrics[0]) == 4
