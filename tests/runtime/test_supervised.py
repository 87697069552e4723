"""What a run's process tells its supervisor, line by line."""

from __future__ import annotations

import json
import os

from weft.runtime.supervised import SUPERVISED, Wire


def test_calls_are_told_once_and_over_on_the_last_rank() -> None:
    ours, its = os.pipe()
    wire = Wire.of({SUPERVISED: f"{its}:2:{os.getppid()}"})
    assert wire.supervised and wire.restarts == 2
    for _ in range(2):
        wire.began(7, "ref_inf", 3, (0, 1), ("device 0", "device 1"))
    wire.over(7, 0)
    wire.over(5, 0)
    wire.over(7, 1)
    wire.began(8, "actor_gen", 3, (0,), ("device 0",))
    wire.gone("Ray's head is gone")
    wire.anew()
    wire.over(8, 0)
    wire.ends(143)
    os.close(its)
    with os.fdopen(ours) as told:
        lines = [json.loads(line) for line in told]
    assert lines == [
        {"began": 7, "call": "ref_inf", "firing": 3, "where": ["device 0", "device 1"]},
        {"over": 7},
        {"began": 8, "call": "actor_gen", "firing": 3, "where": ["device 0"]},
        {"gone": "Ray's head is gone"},
        {"anew": True},
        {"ends": 143},
    ]


def test_where_nobody_supervises_nothing_is_told() -> None:
    # meant for a process further up
    assert not Wire.of({SUPERVISED: f"1:2:{os.getpid()}"}).supervised
    wire = Wire.of({})
    assert not wire.supervised and wire.restarts == 0
    wire.began(1, "ref_inf", 0, (0,), ("device 0",))
    wire.over(1, 0)
    wire.ends(0)


def test_a_supervisor_that_is_gone_ends_nothing() -> None:
    ours, its = os.pipe()
    os.close(ours)
    Wire(its).ends(1)
    os.close(its)
