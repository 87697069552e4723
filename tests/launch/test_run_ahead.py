"""PPO and GRPO whose sampling runs ahead of training: in one process, and on two devices, where both go on at the same time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch.cases import grpo, ppo, prepare
from tests.runtime.placed import timeless, write_hooks
from weft.errors import ConfigError
from weft.experiments.common import RunConfig
from weft.launch import run
from weft.observe.timeline import read_spans
from weft.runtime import disk

STEPS = 4


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ahead")
    prepare(folder)
    write_hooks(folder)
    return folder


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def lagging(case: Any, root: Path, folder: str, staleness: int) -> RunConfig:
    config = case(root, folder)
    config.dataset.train_bs_n_seqs, config.max_steps = 2, STEPS
    options = config.ppo if case is ppo else config.grpo
    options.max_staleness = staleness
    if case is grpo:
        config.reward = "tests.launch.cases:coin"
    return config


def test_without_lag_the_experiment_is_the_synchronous_one(root: Path) -> None:
    for case in (ppo, grpo):
        config = case(root, "same")
        plain = config.build()
        assert not any(edge.max_staleness for edge in plain.graph.version_edges)
        assert "actor_inf" not in plain.graph.order
        train = plain.node("actor_train")
        assert "versions" not in train.optional_keys


@pytest.mark.parametrize("case", [ppo, grpo])
def test_only_sampling_lags_and_the_loss_is_decoupled(root: Path, case: Any) -> None:
    graph = lagging(case, root, "graph", 2).build().graph
    assert {edge.consumer: edge.max_staleness for edge in graph.version_edges if edge.producer == "actor_train"} == {
        "actor_gen": 2, "actor_inf": 0, **({"ref_inf": 0} if case is ppo else {}),
    }  # fmt: skip
    assert {"old_logprobs", "sampler_weights"} <= set(graph.node("actor_train").inputs)
    correction = graph.node("sampler_correction")
    assert correction.args["correction"] == "token_truncate" and correction.args["high"] == 2.0


def test_tokens_carry_their_versions_and_the_loss_makes_up_for_them(root: Path) -> None:
    path = run(lagging(ppo, root, "ppo", 1)).directory
    done = lines(path)
    assert [line["actor_train/staleness"] for line in done] == [0.0, 1.0, 1.0, 1.0]
    assert [line["actor_train/staleness_max"] for line in done] == [0.0, 1.0, 1.0, 1.0]
    assert done[0]["sampler_correction/weight"] == pytest.approx(1.0, abs=1e-5), (
        "pi_prox is pi_behave in the first step"
    )
    assert all(line["sampler_correction/weight_max"] > 1.001 for line in done[1:])
    assert all(0.0 <= line["sampler_correction/bounded_fraction"] < 1.0 for line in done)


def test_completions_take_up_new_weights_in_their_middle(root: Path) -> None:
    config = lagging(ppo, root, "interrupted", 1)
    config.ppo.gen.max_new_tokens, config.ppo.interrupt_generation = 150, True
    done = lines(run(config).directory)
    assert sum(line["actor_gen/interruptions_max"] for line in done) > 0
    assert any(0.0 < line["actor_train/staleness"] < line["actor_train/staleness_max"] == 1.0 for line in done)
    config.ppo.max_staleness = 0
    with pytest.raises(ConfigError, match=r"ppo\.interrupt_generation=true: with max_staleness=0"):
        config.build()


def test_a_run_goes_on_with_what_was_sampled_ahead(root: Path) -> None:
    whole = run(lagging(grpo, root, "whole", 1)).directory
    config = lagging(grpo, root, "parts", 1)
    config.max_steps = None
    config.actor_train.post_hooks = [{"function": "fail", "args": {"step": 2}}]
    config.imports = [str(root / "placed_hooks.py")]
    with pytest.raises(ValueError, match="out of luck"):
        run(config)
    again = lagging(grpo, root, "again", 1)
    again.resume_from = str(root / "parts" / "e" / "t")
    found = timeless(run(again).directory)
    assert found == timeless(whole)[2:]


def elsewhere(case: Any, root: Path, folder: str, nap: float) -> RunConfig:
    """Completions are sampled on device 1, by a copy of the actor; sampling and training take a while."""
    config = lagging(case, root, folder, 1)
    config.actor_gen.device_mesh, config.imports = "1", [str(root / "placed_hooks.py")]
    config.actor_gen.pre_hooks = config.actor_train.pre_hooks = [{"function": "nap", "args": {"seconds": nap}}]
    return config


@pytest.mark.slow
def test_on_two_devices_a_batch_is_sampled_while_the_one_before_it_is_trained(root: Path) -> None:
    pytest.importorskip("ray")
    path = run(elsewhere(grpo, root, "two", 0.5)).directory
    spans = read_spans(path / "timeline.json")
    samples, trains = ([span for span in spans if span.name == name] for name in ("actor_gen", "actor_train"))
    assert len(samples) == len(trains) == STEPS
    for train, sample in zip(trains[1:-1], samples[2:], strict=True):
        assert max(train.start, sample.start) < min(train.start + train.seconds, sample.start + sample.seconds)
    one = run(lagging(grpo, root, "one", 1)).directory
    assert timeless(path) == timeless(one), "which weights sample does not depend on devices"
    assert (path / "samples.jsonl").read_text() == (one / "samples.jsonl").read_text()
    assert disk.checksums(path / "checkpoints") == disk.checksums(one / "checkpoints")


@pytest.mark.slow
def test_on_two_devices_completions_take_up_new_weights_in_their_middle(root: Path) -> None:
    """Each sampling but the first begins with a training step beside it, and is long enough to see its end."""
    pytest.importorskip("ray")
    config = elsewhere(grpo, root, "updated", 0.0)
    config.grpo.gen.max_new_tokens, config.grpo.interrupt_generation = 400, True
    done = lines(run(config).directory)
    assert len(done) == STEPS
    assert sum(line["actor_gen/interruptions_max"] for line in done) > 0
    assert any(0.0 < line["actor_train/staleness"] < line["actor_train/staleness_max"] == 1.0 for line in done)
