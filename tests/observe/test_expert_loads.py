"""Measured expert loads in the prediction of the next step."""

from __future__ import annotations

from collections.abc import Mapping

from weft.observe.expert_loads import ExpertLoads, read_expert_loads
from weft.observe.predicted import PredictedStep


def predict_again(loads: Mapping[str, float]) -> Mapping[str, float]:
    return {"predicted/step_seconds": 10 * loads["actor"]}


PREDICTION = PredictedStep({"predicted/step_seconds": 16.0}, predict_again=predict_again)


def test_the_next_step_has_the_median_load_of_past_ones() -> None:
    loads = ExpertLoads({"actor_train": "actor", "critic_train": "critic"})
    assert loads.complete(PREDICTION) is PREDICTION  # nothing is known in the first step
    for load in (1.5, 9.0, 1.25, float("nan")):
        loads.record({"actor_train/expert_load": load, "ref_inf/expert_load": 7.0})
    assert loads.medians == {"actor": 1.5}
    assert loads.complete(PREDICTION).metrics == {"predicted/step_seconds": 15.0}
    assert loads.complete(PredictedStep()) == PredictedStep(), "nothing depends on the experts"


def test_loads_are_read_from_another_run() -> None:
    lines = [{"train/expert_load": load} for load in (1.0, 3.0, 2.0)]
    assert read_expert_loads(lines, {"train": "model"}) == {"model": 2.0}
    assert read_expert_loads([{"train/loss": 1.0}], {"train": "model"}) == {}
