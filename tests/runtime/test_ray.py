"""Roles on devices of their own under a real Ray: the numbers of one process, calls that overlap,
tensors that move once.
"""

from __future__ import annotations

import json
import os
import platform
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import overlap
from tests.launch.cases import options, ppo, prepare
from tests.runtime.placed import Command, count_arenas, run_forked, timeless, write_hooks
from weft.errors import ConfigError, DevicesLost, RunError
from weft.experiments import PPOConfig
from weft.launch import run
from weft.observe.timeline import read_spans
from weft.runtime import directory

pytest.importorskip("ray")
pytestmark = pytest.mark.slow  # a cluster starts for them
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is asked")
STEPS = 3
SLOW = "ref_inf.pre_hooks=[{function: nap}]"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("placed")
    prepare(folder)
    write_hooks(folder)
    return folder


def config(root: Path, folder: str) -> PPOConfig:
    """PPO with every state that there is: adaptive KL, value norm, a reference that follows the
    actor.
    """
    made = ppo(root, folder)
    made.max_steps, made.imports = STEPS, [str(root / "placed_hooks.py")]
    return made


def placed(root: Path, folder: str) -> PPOConfig:
    """The critic and the reference on device 1, the reward model on device 2."""
    made = config(root, folder)
    made.critic.device_mesh = made.ref.device_mesh = "1"
    made.rew.device_mesh = "2"
    return made


@pytest.fixture(scope="module")
def one(root) -> Path:
    return run(config(root, "one")).directory


@pytest.fixture(scope="module")
def three(root) -> Path:
    """The same run on three devices, in which reading rewards and reference takes a while."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    made = placed(root, "three")
    made.ref_inf.pre_hooks = made.rew_inf.pre_hooks = [{"function": "nap"}]
    (root / "arenas").mkdir()
    made.rew_inf.post_hooks = [{"function": "count_arenas", "args": {"folder": f"{root}/arenas"}}]
    return run(made).directory


def test_the_numbers_are_those_of_one_process(one, three):
    assert timeless(three) == timeless(one)
    assert (three / "samples.jsonl").read_text() == (one / "samples.jsonl").read_text()
    assert directory.compute_checksums(three / "checkpoints") == directory.compute_checksums(
        one / "checkpoints"
    )


def test_calls_on_different_devices_overlap(three):
    spans = {(span.name, span.step): span for span in read_spans(three / "timeline.json")}
    for step in range(1, STEPS + 1):
        ref, rew = spans["ref_inf", step], spans["rew_inf", step]
        assert max(ref.start, rew.start) < min(ref.start + ref.seconds, rew.start + rew.seconds)


def test_a_tensor_moves_to_a_device_once_and_only_where_it_is_read(three):
    for line in map(json.loads, (three / "metrics.jsonl").read_text().splitlines()):
        moved = {
            name.split("/")[0]: value
            for name, value in line.items()
            if name.endswith("/num_bytes_moved")
        }
        # The critic is on the reference's device, which got prompts and completions for the
        # reference's call.
        assert moved["critic_inf"] == 0 or moved["ref_inf"] == 0
        assert all(
            moved[name] > 0 for name in ("actor_gen", "rew_inf", "actor_train", "critic_train")
        )


def test_what_devices_print_is_in_a_log_each(three):
    assert sorted(path.name for path in (three / "logs").iterdir()) == [
        f"worker-{rank}.log" for rank in range(3)
    ]


@glibc
def test_all_threads_of_a_device_share_one_heap(root, three):
    """Memory that one thread freed is in reach of every other one, and none is lost between areas."""
    assert list(count_arenas(root / "arenas").values()) == [1]


def words(root: Path, folder: str, *more: str) -> list[str]:
    """DPO with the reference on a device of its own, as a command line."""
    fixed = options(root, folder)
    return [
        "dpo",
        *(
            f"{name}={str(value).lower() if isinstance(value, bool) else value}"
            for name, value in fixed.items()
        ),
        f"actor.path={root}/model",
        "actor.optimizer.lr=1e-3",
        f"dataset.train_path={root}/pairs.jsonl",
        "dataset.train_bs_n_seqs=4",
        "max_steps=6",
        "ref.device_mesh=1",
        f"imports=[{root}/placed_hooks.py]",
        *more,
    ]


@pytest.fixture(scope="module")
def whole(root) -> Iterator[Future[tuple[int, str]]]:
    with overlap.start(run_forked, *words(root, "whole", SLOW), cwd=root) as ended:
        yield ended


@pytest.mark.overlap
def test_a_signal_ends_the_run_after_its_step_and_nothing_is_left(root, whole):
    """What SIGINT does, and what becomes of a command that is killed, is tested in
    `launch/test_supervisor.py`.
    """
    first = Command(*words(root, "stopped", SLOW), cwd=root)
    first.after(root / "stopped" / "e" / "t" / "metrics.jsonl")
    first.signal(signal.SIGTERM)
    code, out = first.end()
    assert code == 128 + signal.SIGTERM and "rerun the same command to resume" in out, out
    assert first.none_left()
    second = Command(*words(root, "stopped", SLOW), cwd=root)
    code, out = second.end()
    assert code == 0 and "resuming after step" in out, out
    code, out = whole.result()
    assert code == 0, out
    assert timeless(root / "stopped" / "e" / "t") == timeless(root / "whole" / "e" / "t")


@pytest.mark.overlap
def test_an_error_in_a_device_is_told_once_with_where_it_was(root):
    command = Command(
        *words(root, "failed", "ref_inf.pre_hooks=[{function: fail, args: {step: 1}}]"),
        cwd=root,
    )
    code, out = command.end()
    told = [line for line in out.splitlines() if line.startswith("error")]
    assert code == 1 and len(told) == 1 and "Traceback" not in out, out
    assert "device 1 (" in told[0] and "ValueError: out of luck" in told[0]
    assert "out of luck" in (root / "failed" / "e" / "t" / "logs" / "worker-1.log").read_text()
    assert command.none_left()


def test_a_point_of_three_devices_is_taken_up_by_one_and_by_two(root, three, one):
    for folder, meshes in (("on-one", {}), ("on-two", {"critic": "1", "ref": "1"})):
        made = config(root, folder)
        made.max_steps, made.resume_from = STEPS + 2, str(three)
        for role, mesh in meshes.items():
            getattr(made, role).device_mesh = mesh
        assert [line["step"] for line in run(made).metrics][-1] == STEPS + 2
    assert timeless(root / "on-one" / "e" / "t") == timeless(root / "on-two" / "e" / "t")


def test_roles_whose_parameters_differ_are_refused_before_the_first_step(root):
    made = placed(root, "refused")
    made.ref.path = str(root / "other")
    from tests.tiny import make_llama

    make_llama(root / "other", num_hidden_layers=1)
    with pytest.raises(ValueError, match="actor -> ref: parameters differ"):
        run(made)
    assert not (root / "refused" / "e").exists()


def test_a_run_error_names_the_device() -> None:
    from weft.runtime.device_process import ProcessAddress, to_picklable_error

    where = ProcessAddress(1, "host", 7, "127.0.0.1")
    assert str(to_picklable_error(RunError("bad"), where)) == "device 1 (host, process 7): bad"


def test_what_is_left_of_a_failed_connection_never_stands_in_the_way_of_the_next_one(monkeypatch):
    """Ray refuses to connect twice with an assertion; a connection that failed halfway counts as
    one.
    """
    from weft.runtime.ray import RayCluster

    calls: list[str] = []

    def fail(**options):
        calls.append("init")
        raise AssertionError("Perhaps you called ray.init twice by accident?")

    monkeypatch.setattr("weft.runtime.ray.check_listens", lambda address: None)
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.shutdown", lambda: calls.append("shutdown"))
    monkeypatch.setattr("ray.init", fail)
    with pytest.raises(ConfigError, match="no Ray cluster answers there"):
        RayCluster.join("127.0.0.1:6379")
    assert calls == ["shutdown", "init", "shutdown"]


@pytest.mark.parametrize(
    ("lost", "reason"),
    [
        (SimpleNamespace(address="10.0.0.2"), "device 0 died: its node 10.0.0.2 is lost"),
        (None, "device 0 died: its process ended"),
    ],
)
def test_a_node_that_is_lost_while_devices_start_is_named(monkeypatch, lost, reason):
    from ray.exceptions import RayActorError

    from weft.runtime.ray import _collect_answers

    def fail(promise):
        raise RayActorError

    asked: list[str] = []
    cluster = SimpleNamespace(
        wait=lambda promises, seconds: [],
        is_alive=lambda: True,
        check_not_lost=lambda: None,
        find_lost_node=lambda node: asked.append(node) or lost,
    )
    monkeypatch.setattr("ray.get", fail)
    with pytest.raises(DevicesLost, match=reason):
        _collect_answers(cluster, ["promise"], "its process", 1.0, ["node of rank 0"])
    assert asked == ["node of rank 0"]
