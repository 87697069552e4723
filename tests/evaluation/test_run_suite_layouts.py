"""Evaluations on tasks give the same figures in every layout, also with separate samplers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.evaluation.stand_in_suite import read_figures, use_stand_in
from tests.evaluation.test_run_suite import small
from tests.launch.cases import ppo, prepare
from weft.launch import run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_devices")]
BOUND = 1e-9  # float64; the model's weights differ by roundings after two steps


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    prepare(folder)
    return folder


def test_data_and_tensor_parallel(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_in(monkeypatch)
    expected = read_figures(run(small(root, "one")).metrics)
    config = small(root, "four")
    config.model.layout = "d2t2"
    assert read_figures(run(config).metrics) == {
        step: pytest.approx(figures, rel=BOUND) for step, figures in expected.items()
    }


def test_samplers_on_other_devices(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are generated with the samplers' copy of the weights, which is updated first."""
    use_stand_in(monkeypatch)
    found = []
    for place in ("0", "1"):
        config = ppo(root, f"ppo-{place}")
        config.eval_suite.tasks, config.eval_at_start = ["quiz"], True
        config.eval_freq_steps, config.max_steps, config.actor.dtype = 1, 2, "float64"
        config.actor.optimizer.lr = 1e-2
        config.actor_gen.device_mesh = None if place == "0" else place
        found.append(read_figures(run(config).metrics))
    assert found[0][0] != found[0][2]
    assert found[1] == {
        step: pytest.approx(figures, rel=BOUND) for step, figures in found[0].items()
    }
