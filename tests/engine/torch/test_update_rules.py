"""AdamW with moments in bfloat16 and in 8 bits: what is lost, what is kept, and a run that goes on."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.bounds import assert_within, gamma
from tests.engine.common import Nll, batch_of, engine_of, tiny
from tests.engine.torch.test_engine_offload import apart, on_device
from tests.engine.torch.test_engine_state import GROUPS, assert_equal, parameters
from tests.ranks import Ranks
from weft.engine.spec import LoRASpec, OptimizerSpec, Schedule
from weft.engine.torch import update_rules
from weft.engine.torch.engine import TorchEngine
from weft.engine.torch.optimizer import Optimizer
from weft.engine.torch.update_rules import (
    BLOCK,
    EightBitMoments,
    decode_values,
    encode_values,
    round_stochastically,
)
from weft.errors import ConfigError
from weft.models.network.linear import StoredParameter
from weft.parallel.mesh import ProcessGroups, RankMesh
from weft.registry import backends
from weft.topology import Mesh

SPEC = OptimizerSpec(lr=1e-2, lr_scheduler_type="constant", max_grad_norm=0.0)
# A moment in 8 bits is wrong by 1/127 of its block's largest, so an element's update by lr / 127. With
# errors of any sign, a loss whose gradient has the norm 1.7 changes by 6 times the standard
# deviation at most.
NARROW = 6 * 1.7 * 1e-2 / 127
# whose matrices have states in 8 bits
LARGE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 160}
in_8_bits = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes, the extra 8bit"
)


def optimizer_of(
    spec: OptimizerSpec, start: torch.Tensor, **options: Any
) -> tuple[Optimizer, nn.Parameter]:
    parameter = nn.Parameter(start.clone())
    return Optimizer(
        spec, Schedule(10**6, 0), {"w": StoredParameter("w", parameter)}, (), **options
    ), parameter


def step(optimizer: Optimizer, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    parameter.grad = gradient.clone()
    optimizer.step(gradient.norm())


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- bfloat16


def test_what_is_cut_off_is_the_chance_to_round_up() -> None:
    generator = torch.Generator().manual_seed(0)
    for value, down, up in ((1.0 + 2**-9, 1.0, 1.0 + 2**-7), (-1.0 - 2**-9, -1.0, -1.0 - 2**-7)):
        made = round_stochastically(torch.full((40_000,), value), generator).float()
        assert set(made.tolist()) == {down, up}
        share = float((made == up).double().mean())
        assert share == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / 40_000))
    exact = torch.tensor([0.0, 1.5, -3.0, 2.0**100, 1e-30]).bfloat16()
    assert torch.equal(round_stochastically(exact.float(), generator), exact)


def test_a_small_update_of_a_moving_average_is_not_lost() -> None:
    """beta2 = 0.999: the average falls by a thousandth a step, and bfloat16's neighbours are 0.4%
    or more apart.
    """
    spec = replace(SPEC, beta2=0.999, state_dtype="bfloat16")
    optimizer, w = optimizer_of(spec, torch.zeros(4000))
    step(optimizer, w, torch.full((4000,), 100.0))
    nearest = exact = float(optimizer.collect_tensors()["w/exp_avg_sq"].double().mean())
    for _ in range(300):
        step(optimizer, w, torch.zeros(4000))
        exact *= 0.999
        nearest = float(torch.tensor(nearest * 0.999).bfloat16())
    assert nearest > 0.99 * 10.0, "to the nearest it stands still"
    mean = float(optimizer.collect_tensors()["w/exp_avg_sq"].double().mean())
    # A step takes away a thousandth of a value, whose neighbours are 2^-7 of it apart at most: the
    # variance of its rounding is 2^-7 / 1000 at most. Four standard deviations of the mean of 4,000
    # walks of 300 steps.
    assert mean == pytest.approx(exact, rel=4 * math.sqrt(300 * 2**-7 * 1e-3 / 4000))


def test_states_in_bfloat16_train_as_those_in_float32() -> None:
    start, target = draw(0, 2000), draw(1, 2000)
    far = {}
    for dtype in ("float32", "bfloat16"):
        optimizer, w = optimizer_of(replace(SPEC, lr=0.03, beta2=0.999, state_dtype=dtype), start)
        for number in range(150):
            step(optimizer, w, w.detach() - target + 0.1 * draw(2 + number, 2000))
        far[dtype] = float((w.detach() - target).norm() / (start - target).norm())
        assert optimizer.collect_tensors()["w/exp_avg"].dtype == getattr(torch, dtype)
    # A rounding's standard deviation is at most half of what neighbours are apart, 2^-8. That of
    # the second moment, a sum over 1 / (1 - beta2) steps, is sqrt(1 / (1 - beta2^2)) as large; of a
    # step, which divides by the root, half. The distance that is left cannot differ by more.
    noise = 2**-9 / math.sqrt(1 - 0.999**2)
    assert far["bfloat16"] == pytest.approx(far["float32"], rel=noise) and far["float32"] < 0.2


def test_a_step_in_bfloat16_is_adamws_up_to_the_rounding_of_what_is_kept() -> None:
    start = draw(0, 3, 50).double()
    ours, w = optimizer_of(replace(SPEC, weight_decay=0.1, state_dtype="bfloat16"), start)
    theirs, v = optimizer_of(replace(SPEC, weight_decay=0.1), start)
    for each, parameter in ((ours, w), (theirs, v)):
        step(each, parameter, draw(1, 3, 50).double())
    torch.testing.assert_close(w, v, rtol=1e-12, atol=1e-12)
    for name in ("exp_avg", "exp_avg_sq"):
        kept, exact = (each.collect_tensors()[f"w/{name}"].double() for each in (ours, theirs))
        # one place of bfloat16's 8 bits
        assert float(((kept - exact) / exact).abs().max()) <= 2**-7


def test_copies_on_several_ranks_round_alike_and_other_parameters_do_not() -> None:
    spec = replace(SPEC, state_dtype="bfloat16")
    found = []
    for name in ("a", "a", "b"):
        w = nn.Parameter(draw(0, 500))
        optimizer = Optimizer(spec, Schedule(10, 0), {name: StoredParameter(name, w)}, ())
        step(optimizer, w, draw(1, 500))
        found.append(optimizer.collect_tensors()[f"{name}/exp_avg"])
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_pieces_are_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = []
    for piece in (2**24, 2 * BLOCK):
        monkeypatch.setattr(update_rules, "PIECE", piece)
        optimizer, w = optimizer_of(replace(SPEC, state_dtype="bfloat16"), draw(0, 13, 100))
        for number in range(3):
            step(optimizer, w, draw(number, 13, 100))
        moved.append(w.detach())
    # Other noise is drawn: a moment is wrong by 2^-7 of it after each of the first two steps, in
    # either run. A step is lr m / sqrt(v), of size 1.1 lr in the first three at most (by Cauchy and
    # Schwarz), and the root halves v's error.
    noise = 2 * (1 + 2) * (2**-7 + 2**-8) * 1.1 * SPEC.lr
    torch.testing.assert_close(moved[0], moved[1], rtol=gamma(8), atol=noise)


# -- 8 bits


LEVELS = torch.cat(
    [-(2.0 ** -torch.arange(0.0, 64.0)), torch.zeros(1), 2.0 ** -torch.arange(63.0, -1.0, -1.0)]
)
# 256 that rise
LEVELS = torch.cat([LEVELS, torch.linspace(1.1, 2.0, 256 - len(LEVELS))]).sort().values


def test_codes_come_out_as_they_were_where_the_scales_are_known() -> None:
    codes = torch.randint(60, 129, (7, 100), generator=torch.Generator().manual_seed(0)).to(
        torch.uint8
    )
    scales = draw(1, 3).abs() + 0.1
    values = decode_values(codes, scales, LEVELS)
    assert float(values[0, 3]) == float(LEVELS[int(codes[0, 3])] * scales[0])
    again, same = encode_values(values, scales, LEVELS)
    assert torch.equal(again, codes) and torch.equal(same, scales)
    shifted = scales.clone()
    shifted[1] *= 3.0  # of other blocks
    others, own = encode_values(values, shifted, LEVELS)
    assert float(own[1]) == float(values.view(-1)[BLOCK : 2 * BLOCK].abs().max()), (
        "a block has its largest magnitude"
    )
    assert torch.equal(own[::2], scales[::2]) and torch.equal(
        others.view(-1)[:BLOCK], codes.view(-1)[:BLOCK]
    )
    near = decode_values(others, own, LEVELS).view(-1)[BLOCK : 2 * BLOCK]
    assert float((near - values.view(-1)[BLOCK : 2 * BLOCK]).abs().max()) <= float(own[1]) * 0.5


@in_8_bits
def test_a_step_in_8_bits_is_adamws_and_the_library_reads_the_codes_as_we_do() -> None:
    start = draw(0, 40, 200)
    ours, w = optimizer_of(replace(SPEC, weight_decay=0.1, state_dtype="8bit"), start)
    theirs, v = optimizer_of(replace(SPEC, weight_decay=0.1), start)
    for each, parameter in ((ours, w), (theirs, v)):
        step(each, parameter, draw(1, 40, 200))
    # The first step is lr g / |g|, from a dozen roundings on either side, and is subtracted.
    assert_within(w, v, 2 * (gamma(16) * SPEC.lr + gamma(2) * (v.abs().double() + SPEC.lr)))
    state = ours._optimizer.state[w]
    assert {k: (x.dtype, x.numel()) for k, x in state.items() if x.dim()} == {
        "exp_avg": (torch.uint8, 8000),
        "exp_avg_sq": (torch.uint8, 8000),
        "exp_avg:scales": (torch.float32, 32),
        "exp_avg_sq:scales": (torch.float32, 32),
    }
    from bitsandbytes.functional import dequantize_blockwise

    levels = EightBitMoments().get_levels("exp_avg", torch.device("cpu"))
    read = dequantize_blockwise(
        state["exp_avg"], absmax=state["exp_avg:scales"], code=levels, blocksize=BLOCK
    )
    assert torch.equal(read, ours.collect_tensors()["w/exp_avg"])
    exact = theirs.collect_tensors()["w/exp_avg"]
    assert float((read - exact).abs().max()) < 0.02 * float(exact.abs().max())


@in_8_bits
def test_embeddings_and_small_parameters_keep_float32(tmp_path: Path) -> None:
    engine = engine_of(tiny(tmp_path / "m", **LARGE), optimizer=replace(SPEC, state_dtype="8bit"))
    engine.train([batch_of(GROUPS)], Nll())
    optimizer = engine._optimizer
    assert optimizer is not None
    kept = {
        name: optimizer._optimizer.state[part.parameter]["exp_avg"].dtype
        for name, part in optimizer._trained.items()
    }
    assert kept["embed.weight"] == torch.float32
    assert all(kept[name] == torch.float32 for name in kept if "norm" in name) and any(
        "norm" in name for name in kept
    )
    assert kept["blocks.0.mlp.up.weight"] == kept["blocks.1.attention.q.weight"] == torch.uint8


CASES: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "lora": {"lora": LoRASpec(r=64), "dtype": "bfloat16"},
    "host": {"optimizer": replace(SPEC, state_dtype="8bit", offload=True)},
}


@in_8_bits
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_a_run_in_8_bits_goes_on_bit_for_bit_and_its_states_leave_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    path = tiny(tmp_path / "m", **LARGE)
    spec = {"optimizer": replace(SPEC, state_dtype="8bit"), "schedule": Schedule(8, 2), **changes}
    straight, second = (engine_of(path, **spec) for _ in range(2))
    first, _ = apart(
        path, monkeypatch, home="host" in str(changes) or bool(spec["optimizer"].offload), **spec
    )
    batches = [batch_of(GROUPS, seed) for seed in range(4)]
    wanted = [straight.train([b], Nll())[0].metrics["loss"] for b in batches]
    got = []
    for b in batches[:2]:
        got.append(first.train([b], Nll())[0].metrics["loss"])
        first.offload("weights")
        first.offload("optimizer")
    if not spec["optimizer"].offload:
        assert on_device(first) == {"weights": 0, "optimizer": 0}
    (tmp_path / "state").mkdir()
    first.save_state(tmp_path / "state")
    second.load_state(tmp_path / "state")
    got += [second.train([b], Nll())[0].metrics["loss"] for b in batches[2:]]
    assert got == wanted
    assert_equal(parameters(second), parameters(straight))


@in_8_bits
def test_states_go_on_in_another_dtype(tmp_path: Path) -> None:
    path = tiny(tmp_path / "m", **LARGE)
    for saved, taken in (
        ("8bit", "float32"),
        ("float32", "8bit"),
        ("bfloat16", "8bit"),
        ("float32", "bfloat16"),
    ):
        one, other = (
            engine_of(path, optimizer=replace(SPEC, state_dtype=dtype)) for dtype in (saved, taken)
        )
        for seed in range(3):
            one.train([batch_of(GROUPS, seed)], Nll())
        folder = tmp_path / f"{saved}-{taken}"
        folder.mkdir()
        one.save_state(folder)
        other.load_state(folder)
        losses = [
            [each.train([batch_of(GROUPS, seed)], Nll())[0].metrics["loss"] for seed in (3, 4)]
            for each in (one, other)
        ]
        assert losses[0] == pytest.approx(losses[1], rel=0.0, abs=NARROW), (saved, taken)


def spread(
    path: Path, layout: str, dtype: str, folder: Path, resumes: bool
) -> tuple[list[float], dict[str, Any]]:
    """Two steps and the state, or what the state goes on to."""
    import torch.distributed as dist

    from tests.engine.common import spec_of
    from weft.runtime.split import split_over_ranks

    spec = spec_of(path, optimizer=replace(SPEC, state_dtype=dtype), layout=layout)
    parsed = spec.resolve_layout()
    mesh = RankMesh(Mesh.on_first_devices(parsed), dist.get_rank(), ProcessGroups())
    engine: TorchEngine = backends.get(spec.backend)(spec, parsed, mesh)
    parts = [
        split_over_ranks(batch_of(GROUPS, seed), parsed.data, "sequence")[mesh.coordinates.data]
        for seed in range(4)
    ]
    if resumes:
        engine.load_state(folder)
        losses = [step.metrics["loss"] for step in engine.train(parts[2:], Nll())]
    else:
        losses = [step.metrics["loss"] for step in engine.train(parts[:2], Nll())]
        engine.save_state(folder)
        dist.barrier()
        losses += [step.metrics["loss"] for step in engine.train(parts[2:], Nll())]
    return losses, {name: value.clone() for name, _, value in engine.read(engine.slices())}


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("8bit", marks=in_8_bits)])
@pytest.mark.parametrize("layout", ["d2f2", "d1t2"])
def test_states_of_sharded_masters_go_on_bit_for_bit_and_in_another_layout(
    layout: str, dtype: str, ranks: Ranks, tmp_path: Path
) -> None:
    path = tiny(tmp_path / "m", **LARGE)
    folder = tmp_path / "state"
    folder.mkdir()
    saved = ranks.run(spread, path, layout, dtype, folder, False)
    again = ranks.run(spread, path, layout, dtype, folder, True)
    for (losses, values), (later, same) in zip(saved, again, strict=True):
        assert later == losses[2:]
        assert_equal(same, values)
    alone = engine_of(path, optimizer=replace(SPEC, state_dtype=dtype))
    alone.load_state(folder)
    steps = alone.train([batch_of(GROUPS, seed) for seed in (2, 3)], Nll())
    losses = [each.metrics["loss"] for each in steps]  # after two steps with other blocks
    assert losses == pytest.approx(saved[0][0][2:], rel=0.0, abs=2 * NARROW)


# -- what is refused


def test_a_missing_library_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"bitsandbytes.*pip install '.*\[8bit\]'"):
        optimizer_of(replace(SPEC, state_dtype="8bit"), torch.zeros(8))
    optimizer_of(replace(SPEC, state_dtype="bfloat16"), torch.zeros(8))


def test_narrow_states_are_adamws() -> None:
    with pytest.raises(ConfigError, match="state_dtype=8bit is for type=adamw, and type is lion"):
        OptimizerSpec(type="lion", state_dtype="8bit")
