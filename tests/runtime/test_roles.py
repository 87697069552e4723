"""A copy of a role on a mesh of its own: it is used with the weights that it is to have or not at
all.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.runtime.toy import Toy
from weft.engine.spec import LoRASpec, Schedule
from weft.errors import RunError
from weft.runtime.roles import EngineKey, RoleEngines


def copy_of(root) -> tuple[RoleEngines, EngineKey]:
    """Device 1, where the actor samples; it is trained on device 0."""
    experiment = Toy(root).experiment().with_mfc("gen", device_mesh="1")
    specs = {
        role: replace(spec, schedule=Schedule(10, 0)) for role, spec in experiment.roles.items()
    }
    (place,) = experiment.copies
    return RoleEngines(experiment, specs, rank=1), place


def test_weights_that_are_not_the_ones_asked_for_are_refused(tmp_path) -> None:
    roles, place = copy_of(tmp_path)
    assert roles.engine(*place, weights=0) is roles.find_engine(place)
    for wrong in (1, None):
        with pytest.raises(
            RunError,
            match=r"role 'actor' on .*device 1.*: its weights are not the role's newest ones",
        ):
            roles.engine(*place, weights=wrong)
    with roles.open_for_update(place, 1):
        pass
    assert roles.engine(*place, weights=1) is roles.find_engine(place)
    with pytest.raises(RunError, match="not the role's newest"):
        roles.engine(*place, weights=0)


def test_a_call_that_takes_newer_weights_is_refused_older_ones_alone(tmp_path) -> None:
    roles, place = copy_of(tmp_path)
    with roles.open_for_update(place, 2):
        pass
    for enough in (1, 2):
        assert roles.engine(*place, weights=enough, or_newer=True) is roles.find_engine(place)
    with pytest.raises(RunError, match="not the role's newest"):
        roles.engine(*place, weights=3, or_newer=True)


def test_a_copy_that_got_part_of_its_weights_is_never_used(tmp_path) -> None:
    roles, place = copy_of(tmp_path)
    with pytest.raises(ValueError, match="lost"), roles.open_for_update(place, 1):
        raise ValueError("lost on the way")
    for weights in (0, 1):
        with pytest.raises(RunError, match="not the role's newest"):
            roles.engine(*place, weights=weights)


def test_a_copy_is_not_trained_not_saved_and_moved_away_by_itself(tmp_path) -> None:
    roles, place = copy_of(tmp_path)
    engine = roles.find_engine(place)
    assert not engine.spec.trained and engine.spec.mirrors and engine.spec.schedule is None
    roles.save_state(tmp_path / "state")
    assert not (tmp_path / "state").exists()
    roles.offload("actor", "weights", place[1])
    roles.engine(*place, weights=0)
    assert engine.moves == ["off weights", "on weights"]


def test_a_copy_of_adapters_has_them_and_trains_none(tmp_path) -> None:
    spec = replace(Toy(tmp_path).experiment().roles["actor"], lora=LoRASpec(r=4)).mirror()
    assert spec.has_adapters and not spec.trained
    assert not replace(spec, mirrors=False).has_adapters
