"""Calls on layouts of their own: the numbers of one process, whatever weights have to go where for
it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.launch.cases import ppo, prepare
from tests.runtime.placed import run_forked, timeless
from tests.tiny import make_llama
from weft.experiments import PPOConfig
from weft.launch import run

pytestmark = pytest.mark.usefixtures("forked_devices")
STEPS = 3


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = tmp_path_factory.mktemp("layouts")
    prepare(folder)
    return folder


def config(root: Path, folder: str, steps: int = STEPS) -> PPOConfig:
    """PPO with a reference that follows the actor, in float64; every weight moves every step."""
    made = in_float64(ppo(root, folder))
    made.max_steps = steps
    return made


def lines(directory: Path) -> list[dict[str, float]]:
    return [
        {k: v for k, v in line.items() if isinstance(v, int | float)}
        for line in timeless(directory)
    ]


def assert_equal(found: Path, expected: Path, steps: range = range(1, STEPS + 1)) -> None:
    """Metrics of float64 runs whose sums were made in another order."""
    ours, theirs = ({line["step"]: line for line in lines(path)} for path in (found, expected))
    for step in steps:
        assert ours[step] == pytest.approx(theirs[step], rel=1e-9, abs=1e-9)


@pytest.fixture(scope="module")
def one(root) -> Path:
    return run(config(root, "one", STEPS + 2)).directory


@pytest.fixture(scope="module")
def two(root) -> Path:
    """The actor is trained tensor-parallel, samples data-parallel and goes to host memory after
    each call; its reference and the critic are on the second of the two devices.
    """
    made = config(root, "two")
    made.actor.offload = True
    made.actor_train.layout, made.actor_gen.layout = "t2", "d2"
    made.critic.device_mesh = made.ref.device_mesh = "1"
    return run(made).directory


@pytest.mark.slow
def test_generation_and_training_on_their_own_layouts_give_the_numbers_of_one_process(one, two):
    assert_equal(two, one)


def test_the_run_says_beforehand_where_calls_are_and_what_goes_there(two):
    log = (two / "log.txt").read_text()
    assert "actor: layout d1f1t2p1c1e1 on devices 0, 1" in log
    assert "actor (actor_gen): layout d2f1t1p1c1e1 on devices 0, 1" in log
    assert "memory of actor (actor_gen): parameters" in log
    told = [line for line in log.splitlines() if "parameters of actor to" in line]
    assert (
        len(told) == 2
        and "to ref after actor_train: " in told[0]
        and "to its copy on d2f1" in told[1]
    )
    sent = [int(line.split(": ")[-1].split(" bytes")[0].replace(",", "")) for line in told]
    assert 0 < sent[0] < sent[1], "one device lacks a half, two lack a half each"


def test_a_point_is_taken_up_and_copies_get_its_weights(root, one, two):
    made = config(root, "resumed", STEPS + 2)
    made.resume_from = str(two)
    made.actor_train.layout, made.actor_gen.layout, made.actor_gen.device_mesh = "d2f1", "t2", "1-2"
    assert_equal(run(made).directory, one, range(STEPS + 1, STEPS + 3))


def set_options(made: PPOConfig, options: dict[str, str]) -> None:
    for name, value in options.items():
        group, field = name.split(".")
        setattr(getattr(made, group), field, value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"actor_gen.layout": "d2f2"},
        {"actor_gen.device_mesh": "1"},
        {"actor_train.layout": "d2", "actor_gen.layout": "t2", "ref.device_mesh": "1"},
        pytest.param(
            {"actor_train.layout": "p2", "actor_gen.layout": "d2", "critic.layout": "d2"},
            marks=pytest.mark.exhaustive,
        ),
        {
            "actor_train.layout": "t2",
            "actor_gen.layout": "p2",
            "critic_train.layout": "p2",
            "critic_inf.layout": "d1",
        },
        {"actor_train.layout": "d2t2", "actor_gen.layout": "d2", "actor_gen.device_mesh": "1,3"},
        pytest.param(
            {"actor.layout": "c2", "actor_gen.layout": "d2", "critic.layout": "c2"},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param({"actor.layout": "c2", "ref.layout": "c2"}, marks=pytest.mark.exhaustive),
        {"actor_train.layout": "c2p2", "actor_gen.layout": "t2", "critic.layout": "p2c2"},
    ],
)
def test_any_two_layouts(root, one, options):
    made = config(root, "-".join(value.replace(",", "") for value in options.values()))
    set_options(made, options)
    assert_equal(run(made).directory, one)


@pytest.fixture(scope="module")
def deep(root) -> Path:
    """A model with a layer for each of four stages, and a run on it of one process."""
    make_llama(root / "deep", num_hidden_layers=5, tie_word_embeddings=True)
    return run(on_deep(config(root, "deep-one"), root)).directory


def on_deep(made: PPOConfig, root: Path) -> PPOConfig:
    made.actor.path = made.critic.path = made.rew.path = str(root / "deep")
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"actor.layout": "p2", "actor.pipeline_schedule": "zbv", "critic.layout": "p2"},
        {
            "actor_train.layout": "p2",
            "actor_gen.layout": "t2",
            "actor.pipeline_schedule": "interleaved_1f1b",
        },
        pytest.param(
            {
                "actor_train.layout": "t2",
                "actor_gen.layout": "p2",
                "actor.pipeline_schedule": "zbv",
            },
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_several_stages_on_a_device(root, deep, options):
    """The critic beside it is interleaved."""
    made = on_deep(config(root, "deep-" + "-".join(options.values())), root)
    made.critic.pipeline_schedule = "interleaved_1f1b"
    set_options(made, options)
    assert_equal(run(made).directory, deep)


@pytest.mark.slow
def test_sft_with_several_stages_on_a_device_from_the_command_line(root, deep, tmp_path):
    folders = []
    for name, more in (
        ("sft-one", []),
        ("sft-zbv", ["model.layout=p2", "model.pipeline_schedule=zbv"]),
    ):
        fixed = {
            "experiment_name": "e",
            "trial_name": "t",
            "fileroot": root / name,
            "progress": "false",
            "max_steps": STEPS,
        }
        set_ = {
            "model.path": root / "deep",
            "model.optimizer.lr": 1e-3,
            "model.dtype": "float64",
            "dataset.train_path": root / "sft.jsonl",
        }
        words = [f"{key}={value}" for key, value in (fixed | set_).items()]
        code, said = run_forked("sft", *words, "dataset.train_bs_n_seqs=6", *more, cwd=tmp_path)
        assert code == 0, said
        folders.append(next((root / name).rglob("metrics.jsonl")).parent)
    ours, theirs = (lines(folder) for folder in reversed(folders))
    assert len(ours) >= STEPS
    for line, wanted in zip(ours, theirs, strict=True):
        assert line == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@pytest.mark.slow
def test_adapters_go_to_copies_alone(root):
    runs = []
    for folder, options in (
        ("adapted", {}),
        ("moved", {"actor_train.layout": "t2", "actor_gen.layout": "d2"}),
    ):
        made = config(root, folder)
        made.ppo.ref_ema_eta = None
        made.actor.lora.r = 4
        set_options(made, options)
        runs.append(run(made).directory)
    assert_equal(runs[1], runs[0])
    (told,) = [
        line
        for line in (runs[1] / "log.txt").read_text().splitlines()
        if "parameters of actor to" in line
    ]
    assert int(told.split(": ")[-1].split(" bytes")[0].replace(",", "")) < 80_000, (
        "the whole network has more"
    )


@pytest.fixture(scope="module")
def exact(root) -> Path:
    return run(config(root, "exact")).directory


def in_float64(made: PPOConfig) -> PPOConfig:
    made.actor.dtype = made.critic.dtype = made.ref.dtype = made.rew.dtype = "float64"
    return made


def tokens(directory: Path) -> list[tuple[object, ...]]:
    lines = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
    return [(line["step"], line["prompt"], line["completion"]) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"actor.layout": "d2", "critic.layout": "d2"},
        pytest.param({"actor.layout": "t2", "critic.layout": "t2"}, marks=pytest.mark.exhaustive),
        {"actor.layout": "p2", "critic.layout": "p2"},
        {"actor_gen.layout": "d4", "actor_train.layout": "d1t2p2"},
        pytest.param(
            {"actor.layout": "d2", "critic.layout": "d2", "critic.device_mesh": "2-3"},
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_the_same_tokens_and_numbers_in_float64(root, exact, options):
    made = config(root, "exact-" + "-".join(options.values()))
    set_options(made, options)
    found = run(made).directory
    assert tokens(found) == tokens(exact) and len(tokens(exact)) > STEPS
    for ours, theirs in zip(lines(found), lines(exact), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-9)
