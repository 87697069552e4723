"""Plan in a run's folder: unchanged after reading, and ignored if it is damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.observe.plans import make_plan
from weft.observe.shown_plan import FORECAST, ShownPlan, read_plan, write_plan


def test_a_plan_is_the_same_after_reading(tmp_path: Path) -> None:
    assert read_plan(tmp_path) is None
    write_plan(tmp_path, None)
    assert not (tmp_path / FORECAST).exists()
    write_plan(tmp_path, make_plan())
    assert read_plan(tmp_path) == make_plan()


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("step_seconds",), 0.0),
        (("step_seconds",), "3"),
        (("step_ends",), []),
        (("num_devices",), True),
        (("num_devices",), 0),
        (("calls",), []),
        (("calls", 0, "groups"), [2]),
        (("calls", 0, "parts"), {"products": None}),
        (("spans", 0, "start"), -1.0),
        (("spans", 0, "seconds"), 1e300),
        (("groups", 0, "memory"), [[0.0]]),
        (("groups", 0, "intervals"), [[0, 0.5]]),
        (("groups", 0), None),
        (("assumptions",), [["only one"]]),
    ],
)
def test_a_damaged_plan_is_no_plan(tmp_path: Path, where: tuple[Any, ...], value: Any) -> None:
    plain = make_plan().to_plain()
    target = plain
    for key in where[:-1]:
        target = target[key]
    target[where[-1]] = value
    with pytest.raises(ValueError, match=r"Shown|step|device|groups"):
        ShownPlan.from_plain(plain)
    (tmp_path / FORECAST).write_text(json.dumps(plain))
    assert read_plan(tmp_path) is None
