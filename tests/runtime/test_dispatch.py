"""Jobs on devices that a test plays: the order they are issued in, and how every wait ends."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.runtime.thread_devices import Peers
from weft.errors import ConfigError, DevicesLost, RunError
from weft.runtime import dispatch
from weft.runtime.device_process import (
    CommandReport,
    DeviceActivity,
    DeviceProcess,
    ProcessAddress,
    to_picklable_error,
)
from weft.runtime.dispatch import CommandTensors, DeviceJob, DeviceLoss, JobDispatcher


@dataclass(frozen=True)
class Say:
    """A command that returns its word, or raises it."""

    word: str

    def run(self, process: DeviceProcess, number: int) -> str:
        if self.word == "bad":
            raise ValueError("out of luck")
        return self.word


@dataclass
class Played:
    """Devices of a test: it sees what they are sent and says what they report."""

    shared_store = None
    world: int
    sent: list[tuple[int, int, int, str]] = field(default_factory=list)  # rank, place, number, word
    said: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    doing: dict[int, DeviceActivity] = field(default_factory=dict)

    @property
    def addresses(self):
        return [ProcessAddress(rank, "host", 100 + rank, "127.0.0.1") for rank in range(self.world)]

    def send(self, rank, place, number, command, ranks, given) -> None:
        self.sent.append((rank, place, number, command.word))

    def receive(self):
        try:
            return [self.said.get(timeout=0.01)]
        except queue.Empty:
            return []

    def describe_activities(self, ranks):
        return {rank: self.doing[rank] for rank in ranks if rank in self.doing}

    def end(self, rank: int, number: int, value: Any = None) -> None:
        self.said.put(
            (rank, [CommandReport(number, "started"), CommandReport(number, "finished", value)])
        )

    @property
    def words(self):
        return [(rank, word) for rank, _, _, word in self.sent]


def job(word: str, ranks, roles=(), after=(), **more: Any) -> tuple[DeviceJob, Future]:
    over: Future[Any] = Future()
    made = DeviceJob(
        f"job {word}",
        ranks,
        lambda rank: (Say(word), CommandTensors()),
        on_finished=lambda ends: over.set_result(
            {rank: report.value for rank, report in ends.items()}
        ),
        on_failed=over.set_exception,
        roles=frozenset(roles),
        after=after,
        **more,
    )
    return made, over


def test_a_job_ends_when_all_its_ranks_have_ended():
    devices, one = Played(2), job("x", [0, 1])
    jobs = JobDispatcher(devices)
    jobs.submit(one[0])
    devices.end(0, one[0].number, "a")
    with pytest.raises(TimeoutError):
        one[1].result(0.1)
    devices.end(1, one[0].number, "b")
    assert one[1].result(5) == {0: "a", 1: "b"}
    jobs.close()


def test_a_job_that_waits_holds_back_what_shares_a_role_with_it_and_nothing_else():
    devices = Played(3)
    jobs = JobDispatcher(devices)
    give, _ = job("give", [0], ["actor"])
    take, _ = job("take", [1], ["ref"], after=[give])
    read, _ = job("read", [1], ["ref"])
    other, _ = job("other", [1, 2], ["critic"])
    train, _ = job("train", [0], ["actor"])
    jobs.submit(give, take)
    for each in (read, other, train):
        jobs.submit(each)
    assert devices.words == [(0, "give"), (1, "other"), (2, "other"), (0, "train")]
    devices.end(0, give.number)
    while len(devices.sent) < 6:
        pass
    assert devices.words[4:] == [(1, "take"), (1, "read")]
    for rank in range(3):
        assert [place for to, place, _, _ in devices.sent if to == rank] == list(
            range(sum(r == rank for r, *_ in devices.sent))
        )
    jobs.close()


def test_a_failure_on_one_rank_is_told_once_and_takes_along_what_waits_for_it():
    devices = Played(2)
    jobs = JobDispatcher(devices)
    first, over = job("first", [0, 1])
    second, after = job("second", [0], after=[first])
    free, unharmed = job("free", [0])
    jobs.submit(first, second)
    jobs.submit(free)
    for rank in (0, 1):
        devices.said.put(
            (rank, [CommandReport(first.number, "failed", RunError(f"bad on {rank}"))])
        )
    for waiting in (over, after):
        with pytest.raises(RunError, match="bad on 0"):
            waiting.result(5)
    devices.end(0, free.number, 1)
    assert unharmed.result(5) == {0: 1}
    jobs.close()


def test_a_device_that_dies_ends_every_wait_and_names_the_job_it_was_in():
    devices = Played(2)
    jobs = JobDispatcher(devices)
    one, first = job("x", [0])
    two, second = job("y", [1])
    held, third = job("z", [0], after=[two])
    jobs.submit(one)
    jobs.submit(two, held)
    devices.said.put((1, DeviceLoss("killed")))
    for waiting in (first, second, third):
        with pytest.raises(RunError, match=r"device 1 \(host, process 101\) died in job y: killed"):
            waiting.result(5)
    late, over = job("late", [0])
    jobs.submit(late)
    with pytest.raises(RunError, match="died in job y"):
        over.result(0)
    jobs.close()


def test_a_wait_that_takes_too_long_says_who_waits_for_whom():
    devices = Played(2)
    jobs = JobDispatcher(devices)
    one, over = job("x", [0, 1], seconds=0.05)
    jobs.submit(one)
    devices.end(0, one.number)
    with pytest.raises(
        RunError,
        match=r"job x did not end within 0.05 s; it waits for device 1 \(host, process 101\)",
    ):
        over.result(5)
    jobs.close()


def test_a_death_explains_the_broken_connection_that_was_told_before_it():
    devices = Played(2)
    jobs = JobDispatcher(devices)
    one, over = job("x", [0, 1])
    jobs.submit(one)
    broken = to_picklable_error(
        RuntimeError("[/x/gloo/transport/tcp/pair.cc:537] Connection reset by peer"),
        devices.addresses[0],
    )
    devices.said.put((0, [CommandReport(one.number, "failed", broken)]))
    with pytest.raises(TimeoutError):
        over.result(0.2)
    devices.said.put((1, DeviceLoss("killed")))
    with pytest.raises(DevicesLost, match=r"device 1 \(host, process 101\) died in job x: killed"):
        over.result(5)


def test_a_broken_connection_that_no_death_explains_is_told_with_its_job(monkeypatch):
    monkeypatch.setattr(dispatch, "DOUBT_SECONDS", 0.1)
    devices = Played(2)
    jobs = JobDispatcher(devices)
    one, over = job("x", [0, 1])
    jobs.submit(one)
    late = to_picklable_error(
        RuntimeError("[/x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out"), devices.addresses[1]
    )
    devices.said.put((1, [CommandReport(one.number, "failed", late)]))
    with pytest.raises(
        DevicesLost, match=r"device 1 \(host, process 101\): RuntimeError: .*Timed out \(in job x\)"
    ):
        over.result(5)
    jobs.close()


def test_only_what_others_did_counts_as_devices_lost():
    where = ProcessAddress(0, "host", 1, "")
    wrapped = RunError("node 'x': bad")
    wrapped.__cause__ = DevicesLost("tensors are lost")
    assert isinstance(to_picklable_error(wrapped, where), DevicesLost)
    assert isinstance(to_picklable_error(ConnectionResetError("gone"), where), DevicesLost)
    for own in (
        ValueError("x"),
        RunError("the loss is not finite"),
        RuntimeError("shape mismatch"),
    ):
        assert not isinstance(to_picklable_error(own, where), DevicesLost)


def test_a_call_that_is_overdue_names_the_ranks_it_waits_for():
    devices = Played(2)
    jobs = JobDispatcher(devices)
    one, _ = job("x", [0, 1], task=("train", 3))
    jobs.submit(one)
    devices.said.put((0, [CommandReport(one.number, "finished")]))
    while len(one.unfinished_ranks) > 1:
        pass
    assert (
        str(jobs.build_overdue_error(("train", 3), "late"))
        == "late; it waits for device 1 (host, process 101)"
    )
    jobs.close()


@pytest.mark.parametrize(
    ("doing", "named"),
    [
        (
            {
                0: DeviceActivity(True, "all_reduce (c.py:1)"),
                1: DeviceActivity(False, "nap (hooks.py:7)"),
            },
            "device 1 (host, process 101), which is in nap (hooks.py:7)",
        ),
        (
            {0: DeviceActivity(True, "all_reduce (c.py:1)")},
            "device 1 (host, process 101), which does not answer",
        ),
        (
            {rank: DeviceActivity(True, "all_reduce (c.py:1)") for rank in (0, 1)},
            "device 0 (host, process 100), device 1 (host, process 101)",
        ),
        ({}, "device 0 (host, process 100), device 1 (host, process 101)"),
    ],
)
def test_of_devices_that_are_late_the_one_that_holds_up_the_others_is_named(doing, named):
    devices = Played(2, doing=doing)
    jobs = JobDispatcher(devices)
    one, _ = job("x", [0, 1], task=("train", 3))
    jobs.submit(one)
    assert str(jobs.build_overdue_error(("train", 3), "late")) == f"late; it waits for {named}"
    jobs.close()


@dataclass(frozen=True)
class MeetLate:
    """Sum a number over both ranks; rank 1 comes once somebody has made the file."""

    go: Path

    def run(self, process: DeviceProcess, number: int) -> float:
        if process.rank == 1:
            self.go.with_suffix(".waits").touch()
            wait_for_file(self.go)
        y = torch.ones(1)
        dist.all_reduce(y)
        return float(y)


def wait_for_file(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def test_a_real_device_says_whether_it_waits_for_another(tmp_path):
    from tests.runtime.forked_devices import ForkedDevices

    devices = ForkedDevices(2)
    jobs = JobDispatcher(devices)
    over: Future[Any] = Future()
    meet = lambda rank: (MeetLate(tmp_path / "go"), CommandTensors())  # noqa: E731
    jobs.submit(DeviceJob("meeting", [0, 1], meet, over.set_result, over.set_exception))
    wait_for_file(tmp_path / "go.waits")
    while not devices.describe_activities([0]) or not devices.describe_activities([0])[
        0
    ].place.startswith("run (test_dispatch.py"):
        time.sleep(0.01)  # rank 0 comes to the collective in a moment
    found = devices.describe_activities([0, 1])
    (tmp_path / "go").touch()
    assert [found[rank].is_waiting for rank in (0, 1)] == [True, False]
    assert found[1].place.startswith("wait_for_file (test_dispatch.py:")
    assert over.result(30)[0].value == 2.0
    idle = devices.describe_activities([0])[0]
    assert idle.is_waiting and idle.place.startswith("run_commands (device_process.py:")
    jobs.close()
    devices.close(0.0)


def test_devices_that_are_gone_altogether_end_every_wait():
    devices = Played(2)

    def gone():
        raise DevicesLost("Ray's head is gone")

    jobs = JobDispatcher(devices)
    one, over = job("x", [0])
    jobs.submit(one)
    devices.receive = gone
    with pytest.raises(DevicesLost, match="Ray's head is gone in job x"):
        over.result(5)
    assert jobs.find_cause(DevicesLost("tensors")) is over.exception()


def test_trouble_in_hearing_ends_every_wait(monkeypatch):
    devices = Played(1)
    jobs = JobDispatcher(devices)
    one, over = job("x", [0])
    jobs.submit(one)
    monkeypatch.setattr(devices, "said", None)
    with pytest.raises(RunError, match="receiving reports of the devices failed"):
        over.result(5)


def test_commands_run_in_the_order_of_their_places_whatever_order_they_come_in():
    process = DeviceProcess(3, Peers([]))
    for place in (2, 0, 1):
        process.receive(place, 10 + place, Say("bad" if place == 1 else str(place)), (3,), (), ())
    reports: list[CommandReport] = []
    while len(reports) < 6:
        reports += process.next_reports(5.0)
    ends = [report for report in reports if report.kind != "started"]
    assert [(report.number, report.kind) for report in ends] == [
        (10, "finished"),
        (11, "failed"),
        (12, "finished"),
    ]
    assert [ends[0].value, ends[2].value] == ["0", "2"]
    assert str(ends[1].value).startswith("device 3 (") and "ValueError: out of luck" in str(
        ends[1].value
    )
    assert process.next_reports(0.0) == []


def test_an_error_that_is_the_users_stays_so():
    error = ConfigError("x=1: wrong")
    assert to_picklable_error(error, ProcessAddress(0, "host", 1, "")) is error


def test_the_thread_that_hears_is_no_reason_to_go_on_living():
    jobs = JobDispatcher(Played(1))
    hearing = [thread for thread in threading.enumerate() if thread.name == "weft-devices"]
    assert hearing and all(thread.daemon for thread in hearing)
    jobs.close()
