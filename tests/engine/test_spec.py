"""The layout of a role, and temperatures at which sampling is refused."""

from __future__ import annotations

import pytest

from weft.engine.spec import GenerationSpec, ModelSpec, ParallelSpec
from weft.errors import ConfigError


@pytest.mark.parametrize(
    ("stage", "trained", "fsdp"),
    [
        (None, True, 4),
        (None, False, 1),
        (0, True, 1),
        (1, True, 4),
        (2, True, 4),
        (3, True, 4),
        (3, False, 4),
        (0, False, 1),
    ],
)
def test_zero_stages_say_what_is_sharded(stage: int | None, trained: bool, fsdp: int) -> None:
    for spec in (
        ModelSpec(layout="d4t2", zero_stage=stage, trained=trained),
        ModelSpec(parallel=ParallelSpec(1, 4, 2), zero_stage=stage, trained=trained),
    ):
        layout = spec.resolve_layout()
        assert (layout.data, layout.fsdp, layout.tensor) == (4, fsdp, 2)


def test_a_layout_s_own_f_and_the_stage_agree() -> None:
    assert ModelSpec(layout="d4f2", zero_stage=2, trained=True).resolve_layout().fsdp == 2
    for layout, stage in (("d4f2", 0), ("d4f1", 3)):
        with pytest.raises(ConfigError, match=f"zero_stage={stage} and layout='{layout}' differ"):
            ModelSpec(layout=layout, zero_stage=stage, trained=True).resolve_layout()
    assert ModelSpec(layout="d1", zero_stage=3, trained=True).resolve_layout().num_devices == 1


@pytest.mark.parametrize("temperature", [0.0, 1e-40, 9e-5])
def test_a_temperature_too_small_to_divide_logits_needs_greedy(temperature: float) -> None:
    with pytest.raises(ConfigError, match=rf"gen\.temperature={temperature:g}: .*gen\.greedy=true"):
        GenerationSpec(temperature=temperature)
    assert GenerationSpec(temperature=temperature, greedy=True).greedy
    assert GenerationSpec(temperature=1e-4).temperature == 1e-4
