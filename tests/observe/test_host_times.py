"""Host functions in the prediction of the next step."""

from __future__ import annotations

from weft.observe.host_times import HostTimes, read_host_seconds
from weft.observe.predicted import PredictedStep

PREDICTION = PredictedStep({"predicted/step_seconds": 2.0, "predicted/train": 1.5})


def test_the_next_step_includes_the_median_of_past_ones() -> None:
    times = HostTimes(["reward", "filter"])
    assert times.complete(PREDICTION) == PREDICTION.metrics  # nothing is known in the first step
    for seconds in (9.0, 0.25, 0.5):
        times.record({"time/reward": seconds, "time/train": 7.0, "time/filter": float("nan")})
    assert times.medians == {"reward": 0.5}
    assert times.complete(PREDICTION) == {
        "predicted/step_seconds": 2.5,
        "predicted/train": 1.5,
        "predicted/reward": 0.5,
    }
    assert times.complete(PredictedStep()) == {}  # a step that is not predicted stays so
    assert PREDICTION.metrics["predicted/step_seconds"] == 2.0


def test_seconds_are_read_from_another_run() -> None:
    lines = [{"time/reward": seconds} for seconds in (9.0, 1.0, 3.0, 2.0)]
    assert read_host_seconds(lines, ["reward", "filter"]) == {"reward": 2.0}
    assert read_host_seconds(lines[:1], ["reward"]) == {"reward": 9.0}
    assert read_host_seconds([], ["reward"]) == {}
