"""What becomes of a run with mode=ray where its cluster fails: it comes back and ends with the
numbers of one that was never disturbed, or ends with one message that says who, where and in which
call.
"""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest

from tests import overlap, ray_cluster
from tests.launch.cases import prepare
from tests.launch.test_supervisor_restarts import (
    beyond,
    restarted,
    restarts,
    status_of,
    steps,
    undisturbed,
    until,
    words,
)
from tests.ray_cluster import WORKER, Nodes
from tests.runtime.placed import Command, timeless, write_hooks

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.overlap]
# Long enough for something to happen to it, and every call with a deadline.
NAP = "ref_inf.pre_hooks=[{function: nap, args: {seconds: 1.0}}]"
CALLS = ("actor_gen", "rew_inf", "ref_inf", "critic_inf", "actor_train", "critic_train")
LONG = ("max_steps=8", "total_train_epochs=3")
SECONDS = 400.0  # for a run to end, on a busy machine
# Ray gives up a node after five checks without an answer, of which it makes one in three seconds.
# A dead node's port refuses at once; a busy node has ten seconds for each answer, as ever.
CHECKED_OFTEN = {"RAY_health_check_period_ms": "500"}
# Ray ends what has lost its head after a minute; weft has seen it by then, after `GONE_SECONDS`.
WITHOUT_HEAD = {"RAY_gcs_rpc_server_reconnect_timeout_s": "25"}
# Ray's helpers of a head that is lost end by themselves: once they have tried for a minute to reach
# it, and later on a busy machine.
HELPERS_END = 150.0


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("failures")
    prepare(folder)
    write_hooks(folder)
    return folder


@pytest.fixture(scope="module")
def whole(root) -> Iterator[Future[Path]]:
    """A run of the same length that nothing happens to, made while clusters start."""
    with overlap.start(undisturbed, root, "whole", *LONG) as run:
        yield run


def begin(nodes: Nodes, root: Path, folder: str, *more: str) -> tuple[Command, Path]:
    command = Command(
        *words(root, folder, "mode=ray", f"ray_address={nodes.address}", *LONG, NAP, *more),
        cwd=root,
        **nodes.environment,
    )
    return command, root / folder / "e" / "t"


def on(nodes: Nodes, root: Path, folder: str, *more: str) -> tuple[Command, Path]:
    """The run on the cluster, once it has made two steps: from there it goes on after a loss, for
    the recovery point of the first is whole.
    """
    command, run = begin(nodes, root, folder, *more)
    command.after(run / "metrics.jsonl")
    until(command, partial(beyond, run, 1))
    return command, run


def in_call(nodes: Nodes, root: Path, folder: str, *more: str) -> tuple[Command, Path]:
    """The run on the cluster, which waits in its second reference call."""
    flag = root / f"{folder}-waits"
    hang = f"ref_inf.pre_hooks=[{{function: hang, args: {{step: 1, flag: {flag}}}}}]"
    command, run = begin(nodes, root, folder, hang, *more)
    command.after(flag)
    return command, run


def noticed(run: Path) -> bool:
    """Return whether the run has lost its devices and looks for others."""
    log = (run / "log.txt").read_text()
    return "continuing with new processes" in log or "continuing with a new process" in log


def errors(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith("error")]


@pytest.mark.parametrize("kills", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_workers_killed_at_random_moments_leave_no_trace(root, whole, kills):
    draw = random.Random(3)
    with ray_cluster.cluster(**CHECKED_OFTEN) as nodes:
        command, run = begin(nodes, root, f"shot{kills}")
        command.after(run / "metrics.jsonl")
        seen = 0
        for number in range(1, kills + 1):
            until(command, partial(beyond, run, seen))
            time.sleep(draw.uniform(0.0, 2.0))
            workers = nodes.processes(WORKER)
            assert len(workers) == 2
            os.kill(draw.choice(workers), signal.SIGKILL)
            until(command, partial(restarted, run, number))
            seen = steps(run)
        code, out = command.end(SECONDS)
        assert code == 0 and command.none_left(20) and nodes.no_workers(), out
        assert restarts(run) == kills, out
        assert timeless(run) == timeless(whole.result())


def test_a_node_that_is_lost_gives_way_to_another(root, whole):
    with ray_cluster.cluster(3, **CHECKED_OFTEN) as nodes:
        command, run = on(nodes, root, "node")
        used = next(index for index in (1, 2) if nodes.processes(WORKER, index))
        nodes.lose(used)
        code, out = command.end(SECONDS)
        assert code == 0 and restarts(run) == 1 and command.none_left(20) and nodes.no_workers(), (
            out
        )
        assert timeless(run) == timeless(whole.result())


def test_a_node_that_comes_back_under_another_id_is_taken_up(root, whole):
    """It joins before the cluster has given up the node that was lost, and has its address."""
    with ray_cluster.cluster() as nodes:
        command, run = on(nodes, root, "back")
        nodes.lose(1)
        nodes.add(address="127.0.0.2")
        code, out = command.end(SECONDS)
        assert code == 0 and command.none_left(20) and nodes.no_workers(), out
        assert "its node 127.0.0.2 is lost" in (run / "log.txt").read_text()
        assert timeless(run) == timeless(whole.result())


def test_where_no_node_is_left_one_message_says_who_and_in_which_call(root):
    with ray_cluster.cluster(**CHECKED_OFTEN) as nodes:
        command, run = in_call(nodes, root, "off", "recover_mode=disabled")
        nodes.lose(1)
        code, out = command.end(SECONDS)
        assert code == 1 and len(errors(out)) == 1 and "Traceback" not in out, out
        assert (
            f"device 1 ({socket.gethostname()}, process " in errors(out)[0]
            and "call '" in errors(out)[0]
        ), out
        assert "its node 127.0.0.2 is lost" in errors(out)[0], out
        assert status_of(run) == "failed" and command.none_left(20) and nodes.no_workers()


def test_a_head_that_is_lost_and_comes_again_costs_no_step(root, whole):
    with ray_cluster.cluster() as nodes:
        command, run = on(nodes, root, "head")
        nodes.lose(0)
        until(command, partial(noticed, run))
        nodes.start_head()
        nodes.add()
        code, out = command.end(SECONDS)
        assert code == 0 and command.none_left(HELPERS_END) and nodes.no_workers(), out
        assert timeless(run) == timeless(whole.result())


def test_a_head_that_is_lost_ends_the_run_with_one_message(root):
    with ray_cluster.cluster(**WITHOUT_HEAD) as nodes:
        command, run = in_call(nodes, root, "headless", "recover_mode=disabled")
        nodes.lose(0)
        code, out = command.end(SECONDS)
        assert code == 1 and len(errors(out)) == 1 and "Traceback" not in out, out
        assert "Ray's head" in errors(out)[0] or "Ray's raylet" in errors(out)[0], out
        port = nodes.address.rpartition(":")[2]
        assert f":{port}) does not respond" in errors(out)[0] and "call '" in errors(out)[0], out
        assert status_of(run) == "failed" and command.none_left(HELPERS_END) and nodes.no_workers()


def test_a_worker_that_stands_still_is_given_up_after_the_shortest_deadline(root, whole):
    with ray_cluster.cluster() as nodes:
        command, run = on(nodes, root, "still", *(f"{call}.deadline_s=30" for call in CALLS))
        (worker,) = nodes.processes(WORKER, 1)
        os.kill(worker, signal.SIGSTOP)
        code, out = command.end(SECONDS)
        assert code == 0 and restarts(run) == 1 and command.none_left(20) and nodes.no_workers(), (
            out
        )
        log = (run / "log.txt").read_text()
        # what it was at
        where = (
            r"died in [^:]*(call '|writing the recovery point)[^:]*: it has not responded for 30 s"
        )
        assert re.search(where, log), log
        assert f"process {worker})" in log, log
        assert timeless(run) == timeless(whole.result())
