"""PPO and GRPO whose sampling runs ahead of training: in one process, and on two devices, where
both go on at the same time.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.engine import layouts
from tests.launch.cases import grpo, ppo, prepare
from tests.runtime.placed import Command, run_forked, timeless, write_hooks
from weft.errors import ConfigError
from weft.experiments.common import RunConfig
from weft.launch import run
from weft.observe.timeline import read_spans
from weft.runtime import directory

STEPS = 4
pytestmark = pytest.mark.usefixtures("forked_devices")
REPOSITORY = Path(__file__).resolve().parents[2]


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
        config.reward = "tests.launch.coin:coin"
    return config


def test_without_lag_the_experiment_is_the_synchronous_one(root: Path) -> None:
    for case in (ppo, grpo):
        config = case(root, "same")
        plain = config.build()
        assert not any(edge.max_staleness for edge in plain.graph.version_edges)
        assert "actor_inf" not in plain.graph.order
        train = plain.get_node("actor_train")
        assert "versions" not in train.optional_keys


@pytest.mark.parametrize("case", [ppo, grpo])
def test_only_sampling_lags_and_the_loss_is_decoupled(root: Path, case: Any) -> None:
    graph = lagging(case, root, "graph", 2).build().graph
    assert {
        edge.consumer: edge.max_staleness
        for edge in graph.version_edges
        if edge.producer == "actor_train"
    } == {
        "actor_gen": 2,
        "actor_inf": 0,
        **({"ref_inf": 0} if case is ppo else {}),
    }
    assert {"old_logprobs", "sampler_weights"} <= set(graph.get_node("actor_train").inputs)
    correction = graph.get_node("sampler_correction")
    assert correction.args["correction"] == "token_truncate" and correction.args["high"] == 2.0


def test_tokens_carry_their_versions_and_the_loss_makes_up_for_them(root: Path) -> None:
    path = run(lagging(ppo, root, "ppo", 1)).directory
    done = lines(path)
    assert [line["actor_train/staleness"] for line in done] == [0.0, 1.0, 1.0, 1.0]
    assert [line["actor_train/staleness_max"] for line in done] == [0.0, 1.0, 1.0, 1.0]
    # exp of the difference of two log-probs that round by 2^-24 times logits of up to 32
    assert done[0]["sampler_correction/weight"] == pytest.approx(1.0, abs=64 * 2.0**-24), (
        "pi_prox is pi_behave in the first step"
    )
    assert all(line["sampler_correction/weight_max"] > 1.001 for line in done[1:])
    assert all(0.0 <= line["sampler_correction/bounded_fraction"] < 1.0 for line in done)


def test_completions_take_up_new_weights_in_their_middle(root: Path) -> None:
    config = lagging(ppo, root, "interrupted", 1)
    config.ppo.gen.max_new_tokens, config.ppo.interrupt_generation = 150, True
    done = lines(run(config).directory)
    assert sum(line["actor_gen/interruptions_max"] for line in done) > 0
    assert any(
        0.0 < line["actor_train/staleness"] < line["actor_train/staleness_max"] == 1.0
        for line in done
    )
    config.ppo.max_staleness = 0
    with pytest.raises(ConfigError, match=r"ppo\.interrupt_generation=true: with max_staleness=0"):
        config.build()


@pytest.mark.slow
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


def test_adapters_run_ahead(root: Path) -> None:
    config = lagging(grpo, root, "adapters", 1)
    config.actor.lora.r = 4
    done = lines(run(config).directory)
    assert [line["actor_train/staleness"] for line in done] == [0.0, 1.0, 1.0, 1.0]
    assert done[-1]["sampler_correction/weight_max"] > 1.0


def elsewhere(case: Any, root: Path, folder: str, nap: float, staleness: int = 1) -> RunConfig:
    """Completions are sampled on device 1, by a copy of the actor; sampling and training take a
    while.
    """
    config = lagging(case, root, folder, staleness)
    config.actor_gen.device_mesh, config.imports = "1", [str(root / "placed_hooks.py")]
    config.actor_gen.pre_hooks = config.actor_train.pre_hooks = [
        {"function": "nap", "args": {"seconds": nap}}
    ]
    return config


@pytest.mark.slow
def test_on_two_devices_a_batch_is_sampled_while_the_one_before_it_is_trained(root: Path) -> None:
    path = run(elsewhere(grpo, root, "two", 0.5)).directory
    spans = read_spans(path / "timeline.json")
    samples, trains = (
        [span for span in spans if span.name == name] for name in ("actor_gen", "actor_train")
    )
    assert len(samples) == len(trains) == STEPS
    for train, sample in zip(trains[1:-1], samples[2:], strict=True):
        assert max(train.start, sample.start) < min(
            train.start + train.seconds, sample.start + sample.seconds
        )
    one = run(lagging(grpo, root, "one", 1)).directory
    assert timeless(path) == timeless(one), "which weights sample does not depend on devices"
    assert (path / "samples.jsonl").read_text() == (one / "samples.jsonl").read_text()
    assert directory.compute_checksums(path / "checkpoints") == directory.compute_checksums(
        one / "checkpoints"
    )


@pytest.mark.slow
def test_on_two_devices_completions_take_up_new_weights_in_their_middle(root: Path) -> None:
    """Each sampling but the first begins with a training step beside it, and is long enough to see
    its end.
    """
    config = elsewhere(grpo, root, "updated", 0.0)
    config.grpo.gen.max_new_tokens, config.grpo.interrupt_generation = 400, True
    done = lines(run(config).directory)
    assert len(done) == STEPS
    assert sum(line["actor_gen/interruptions_max"] for line in done) > 0
    assert any(
        0.0 < line["actor_train/staleness"] < line["actor_train/staleness_max"] == 1.0
        for line in done
    )


@pytest.mark.slow
@pytest.mark.parametrize(("staleness", "rank"), [(1, 4), (3, 0), (2, 4)])
def test_on_two_devices_kept_weights_and_adapters_give_the_numbers_of_one_process(
    root: Path, staleness: int, rank: int
) -> None:
    """Training takes no time and sampling some, so that several versions are kept; only what is
    trained goes to the copy.
    """
    runs = []
    for name in ("apart", "here"):
        folder = f"{name}-{staleness}-{rank}"
        made = (
            elsewhere(grpo, root, folder, 0.0, staleness)
            if name == "apart"
            else lagging(grpo, root, folder, staleness)
        )
        made.max_steps, made.actor.lora.r = 6, rank
        if name == "apart":
            made.actor_gen.pre_hooks = [{"function": "nap", "args": {"seconds": 0.7}}]
        runs.append(run(made).directory)
    apart, here = runs
    assert timeless(apart) == timeless(here)
    assert [line["actor_train/staleness"] for line in lines(apart)] == [
        float(min(n, staleness)) for n in range(6)
    ]
    assert (apart / "samples.jsonl").read_text() == (here / "samples.jsonl").read_text()
    assert directory.compute_checksums(apart / "checkpoints") == directory.compute_checksums(
        here / "checkpoints"
    )


def words(root: Path, folder: str, algorithm: str, *more: str) -> list[str]:
    """As `grpo` and `ppo` of the cases, for a command line."""
    own = {
        "ppo": [f"critic.path={root}/model", f"rew.path={root}/model", "ppo.ppo_n_minibatches=2"],
        "grpo": ["reward=tests.launch.coin:coin", "grpo.group_size=3"],
    }[algorithm]
    return [
        algorithm,
        "experiment_name=e",
        "trial_name=t",
        f"fileroot={root}/{folder}",
        f"actor.path={root}/model",
        "actor.optimizer.lr=1e-3",
        f"dataset.path={root}/prompts.jsonl",
        "dataset.train_bs_n_seqs=2",
        "total_train_epochs=2",
        f"{algorithm}.gen.max_new_tokens=8",
        *own,
        *more,
    ]


def finished(*asked: str, **environment: str) -> str:
    code, out = run_forked(*asked, cwd=REPOSITORY, **environment)
    assert code == 0, out
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "staleness"), [("actor_gen", 1), ("actor_train", 1), ("actor_gen", 2)]
)
def test_a_device_that_dies_while_batches_are_sampled_ahead_leaves_no_trace(
    root: Path, call: str, staleness: int
) -> None:
    asked = (
        "max_steps=6",
        f"grpo.max_staleness={staleness}",
        "actor_gen.device_mesh=1",
        "recover_freq_steps=2",
        "recover_mode=auto",
        f"imports=[{root}/placed_hooks.py]",
    )
    name = f"{call}-{staleness}"
    finished(*words(root, f"whole-{name}", "grpo", *asked))
    die = f"{call}.pre_hooks=[{{function: die, args: {{step: 3, flag: {root}/{name}}}}}]"
    finished(*words(root, f"died-{name}", "grpo", *asked, die))
    whole, died = (root / f"{which}-{name}" / "e" / "t" for which in ("whole", "died"))
    assert "restart 1 of 3" in (died / "log.txt").read_text()
    assert timeless(died) == timeless(whole)
    assert (died / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()
    assert directory.compute_checksums(died / "checkpoints") == directory.compute_checksums(
        whole / "checkpoints"
    )


TOKEN = 3  # after which new weights come


def interrupted(root: Path, folder: str, algorithm: str, *more: str) -> tuple[Path, dict[int, Any]]:
    """The run, and (tokens, versions) of the completions of each sampling."""
    dump = root / f"{folder}-dump"
    asked = (
        f"{algorithm}.max_staleness=1",
        f"{algorithm}.interrupt_generation=true",
        "max_steps=3",
    )
    said = words(root, folder, algorithm, *asked, "imports=[tests.launch.interrupting]", *more)
    finished(*said, WEFT_TEST_TOKEN=str(TOKEN), WEFT_TEST_DUMP=str(dump))
    found: dict[int, Any] = {}
    for path in sorted(dump.iterdir()):
        of_step = found.setdefault(int(path.stem.split("-")[0]), {})
        for key, completion in json.loads(path.read_text()).items():
            assert of_step.setdefault(key, completion) == completion, (
                "ranks of one part do the same"
            )
    return root / folder / "e" / "t", found


@pytest.fixture(scope="module")
def experts(root: Path) -> str:
    return str(layouts.write_model(layouts.Case("mixtral"), root / "experts"))


@pytest.fixture(scope="module")
def on_one(root: Path, experts: str) -> Any:
    @cache
    def made(algorithm: str, sparse: bool) -> tuple[Path, dict[int, Any]]:
        more = [f"actor.path={experts}"] if sparse else []
        return interrupted(root, f"one-{algorithm}-{sparse}", algorithm, *more)

    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "layout"),
    [
        ("grpo", "t2"),
        ("ppo", "t2"),
        ("grpo", "p2"),
        ("ppo", "c2"),
        ("grpo", "d2e2"),
        ("ppo", "d2f2"),
        ("grpo", "d2f1"),
    ],
)
def test_new_weights_in_the_middle_whatever_the_layout_that_samples(
    root: Path, on_one: Any, experts: str, algorithm: str, layout: str
) -> None:
    """In float64, on devices of its own: the tokens of one process, each of the same version."""
    sparse = "e" in layout
    one, expected = on_one(algorithm, sparse)
    more = [f"actor.path={experts}"] if sparse else []
    mesh = [f"actor_gen.layout={layout}", "actor_gen.device_mesh=1-2"]
    several, found = interrupted(root, f"{algorithm}-{layout}", algorithm, *mesh, *more)
    assert found == expected and len(found) == 3
    for number, completions in found.items():
        for tokens, versions in completions.values():
            assert versions == [max(0, number - 1)] * min(TOKEN, len(tokens)) + [number] * max(
                0, len(tokens) - TOKEN
            )
    assert any(len(tokens) > TOKEN for tokens, _ in found[2].values())
    for ours, theirs in zip(timeless(several), timeless(one), strict=True):
        # Log-probs are stored in float32: 6e-8 of up to 16, and of differences of them 2e-6.
        assert ours == pytest.approx(theirs, rel=1e-5, abs=2e-6)


@pytest.mark.slow
def test_more_devices_than_cores_have_a_thread_each_at_least(root: Path) -> None:
    """Devices on CPUs share the cores; without `OMP_NUM_THREADS` each computes with its share."""
    pytest.importorskip("ray")
    cores = len(os.sched_getaffinity(0))
    devices = cores + 1
    (root / "threads").mkdir()
    count = f"actor_train.pre_hooks=[{{function: count_threads, args: {{folder: {root}/threads}}}}]"
    one, several = "threads-one", "threads-several"
    exact = ("max_steps=2", "actor.dtype=float64")
    finished(*words(root, one, "grpo", *exact))
    asked = (*exact, f"actor.layout=d{devices}", f"imports=[{root}/placed_hooks.py]", count)
    command = Command(*words(root, several, "grpo", *asked), cwd=REPOSITORY, OMP_NUM_THREADS=None)
    code, out = command.end()
    assert code == 0 and command.none_left(), out
    told = [path.read_text() for path in (root / "threads").iterdir()]
    assert told == [str(max(1, cores // devices))] * devices
    for ours, theirs in zip(
        timeless(root / several / "e" / "t"), timeless(root / one / "e" / "t"), strict=True
    ):
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-9)
