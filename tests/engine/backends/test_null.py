"""A role that is a tokenizer alone, and which backends there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.common import Nll, batch_of, engine_of, tiny
from weft.engine.spec import GenerationSpec
from weft.errors import ConfigError
from weft.registry import backends
from weft.topology import Layout

GROUPS = [(5, [4, 7, 1])]


def test_a_role_of_a_tokenizer_alone_refuses_every_use(tmp_path: Path) -> None:
    path = tiny(tmp_path / "m")
    engine = engine_of(path, backend="null", trained=False)
    calls = [
        lambda: engine.forward(batch_of(GROUPS), frozenset({"scores"})),
        lambda: engine.train([batch_of(GROUPS)], Nll()),
        lambda: engine.generating(GenerationSpec()),
        lambda: engine.write([], version=1),
        lambda: engine.save_model(tmp_path, None),
        lambda: engine_of(path, backend="null"),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="backend=null"):
            call()
    (state := tmp_path / "state").mkdir()
    engine.save_state(state)
    engine.load_state(state)
    assert engine.slices() == {} and list(state.iterdir()) == []


def test_unknown_backends_are_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="torch"):
        backends.get("troch")
    assert backends.list_shipped() == ["auto", "hf", "jax", "null", "service", "torch"]
    assert Layout().num_devices == 1
