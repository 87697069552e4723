"""What a run's process tells its supervisor, line by line."""

from __future__ import annotations

import json
import os

from weft.runtime.processes import SUPERVISOR_VARIABLE, SupervisorPipe


def test_calls_are_told_once_and_over_on_the_last_rank() -> None:
    ours, its = os.pipe()
    wire = SupervisorPipe.from_environment({SUPERVISOR_VARIABLE: f"{its}:2:{os.getppid()}"})
    assert wire.is_supervised and wire.restarts == 2
    for _ in range(2):
        wire.report_call(7, "ref_inf", 3, (0, 1), ("device 0", "device 1"))
    wire.finish_rank(7, 0)
    wire.finish_rank(5, 0)
    wire.finish_rank(7, 1)
    wire.report_call(8, "actor_gen", 3, (0,), ("device 0",))
    wire.report_lost_part("Ray's head is gone")
    wire.report_released()
    wire.finish_rank(8, 0)
    wire.report_exit_code(143)
    os.close(its)
    with os.fdopen(ours) as told:
        lines = [json.loads(line) for line in told]
    assert lines == [
        {"started_call": 7, "call": "ref_inf", "firing": 3, "where": ["device 0", "device 1"]},
        {"finished_call": 7},
        {"started_call": 8, "call": "actor_gen", "firing": 3, "where": ["device 0"]},
        {"lost_part": "Ray's head is gone"},
        {"released_devices": True},
        {"exit_code": 143},
    ]


def test_where_nobody_supervises_nothing_is_told() -> None:
    # meant for a process further up
    assert not SupervisorPipe.from_environment(
        {SUPERVISOR_VARIABLE: f"1:2:{os.getpid()}"}
    ).is_supervised
    wire = SupervisorPipe.from_environment({})
    assert not wire.is_supervised and wire.restarts == 0
    wire.report_call(1, "ref_inf", 0, (0,), ("device 0",))
    wire.finish_rank(1, 0)
    wire.report_exit_code(0)


def test_a_supervisor_that_is_gone_ends_nothing() -> None:
    ours, its = os.pipe()
    os.close(ours)
    SupervisorPipe(its).report_exit_code(1)
    os.close(its)
