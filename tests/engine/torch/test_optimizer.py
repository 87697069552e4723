"""Learning rates, update rules and weight decay by hand; what a device is asked."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.bounds import gamma
from tests.engine.generation.common import LLAMA, build
from weft.engine import checkpoint
from weft.engine.spec import ModelSpec, OptimizerSpec, Schedule
from weft.engine.torch.network_source import check_layout
from weft.engine.torch.optimizer import (
    CLIP_EPS,
    FUSED,
    Optimizer,
    clip_divisor,
    compute_learning_rate,
    list_decayed_names,
)
from weft.errors import CheckpointError, ConfigError
from weft.models.network.linear import (
    StoredParameter,
    find_canonical_parameters,
    find_canonical_values,
)
from weft.topology import Layout


def rates(spec: OptimizerSpec, schedule: Schedule) -> list[float]:
    return [compute_learning_rate(spec, schedule, step) for step in range(schedule.total_steps)]


def test_schedules_by_hand() -> None:
    constant = OptimizerSpec(lr=1.0, lr_scheduler_type="constant")
    assert rates(constant, Schedule(4, 2)) == [0.5, 1.0, 1.0, 1.0]
    linear = OptimizerSpec(lr=1.0, lr_scheduler_type="linear", min_lr_ratio=0.2)
    near = partial(pytest.approx, rel=1e-12)  # Python's floats
    assert rates(linear, Schedule(6, 2)) == near([0.5, 1.0, 1.0, 0.8, 0.6, 0.4])
    cosine = OptimizerSpec(lr=2.0, lr_scheduler_type="cosine", end_lr=1.0)
    assert rates(cosine, Schedule(4, 0)) == near(
        [2.0, 1.5 + 0.5 * math.cos(math.pi / 4), 1.5, 1.5 - 0.5 * math.cos(math.pi / 4)]
    )
    assert (
        compute_learning_rate(linear, Schedule(6, 2), 99) == 0.2
    )  # a run that goes on past its end
    assert rates(linear, Schedule(3, 3)) == near([1 / 3, 2 / 3, 1.0])
    rsqrt = OptimizerSpec(lr=3.0, lr_scheduler_type="rsqrt", min_lr_ratio=0.5)
    assert rates(rsqrt, Schedule(6, 2)) == near(
        [3.0, 3.0, 3.0, 3.0 * math.sqrt(2 / 3), 3.0 * math.sqrt(2 / 4), 3.0 * math.sqrt(2 / 5)]
    )
    assert compute_learning_rate(rsqrt, Schedule(6, 2), 99) == 1.5
    assert rates(rsqrt, Schedule(2, 0)) == [3.0, 3.0]


def test_linear_and_cosine_are_those_of_transformers() -> None:
    from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

    for name, make in (
        ("linear", get_linear_schedule_with_warmup),
        ("cosine", get_cosine_schedule_with_warmup),
    ):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
        theirs, schedule = make(optimizer, 0, 7), Schedule(7, 0)
        for step in range(7):
            ours = compute_learning_rate(
                OptimizerSpec(lr=0.3, lr_scheduler_type=name), schedule, step
            )
            # `transformers` multiplies by a factor a step.
            assert ours == pytest.approx(theirs.get_last_lr()[0], rel=1e-12, abs=1e-15)
            optimizer.step()
            theirs.step()


def optimizer_of(spec: OptimizerSpec, start: list[float]) -> tuple[Optimizer, nn.Parameter]:
    parameter = nn.Parameter(torch.tensor(start, dtype=torch.float64))
    return Optimizer(
        spec, Schedule(10, 0), {"w": StoredParameter("w", parameter)}, {"w"}
    ), parameter


def step(optimizer: Optimizer, parameter: nn.Parameter, gradient: list[float]) -> float:
    parameter.grad = torch.tensor(gradient, dtype=torch.float64)
    norm = torch.nn.utils.get_total_norm(list(optimizer.collect_gradients().values()))
    optimizer.step(norm)
    return float(norm)


def test_lion_by_hand() -> None:
    spec = OptimizerSpec(
        type="lion", lr=0.1, beta1=0.9, beta2=0.5, weight_decay=0.5, lr_scheduler_type="constant"
    )
    optimizer, w = optimizer_of(spec, [1.0, -1.0])
    step(optimizer, w, [0.3, -0.2])
    assert w.tolist() == pytest.approx([0.95 - 0.1, -0.95 + 0.1], rel=1e-12)
    # The momentum is now [0.15, -0.1]; 0.9 m + 0.1 g = [0.135 - 0.2, -0.09 + 0.08].
    before = w.detach().clone()
    optimizer.spec.max_grad_norm = 0.0
    step(optimizer, w, [-2.0, 0.8])
    assert w.tolist() == pytest.approx((before * 0.95 + 0.1).tolist(), rel=1e-12)


def test_palm_by_hand() -> None:
    """Its sizes are of a parameter each: q and k have their own, stored as rows of one matrix."""
    spec = OptimizerSpec(
        type="palm",
        lr=0.1,
        beta1=0.75,
        beta2=0.5,
        weight_decay=2.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
    )
    rows = nn.Parameter(torch.tensor([[3.0, -4.0], [0.0, 1e-4]], dtype=torch.float64))
    parts = {
        "q": StoredParameter("w", rows, slice(0, 1)),
        "k": StoredParameter("w", rows, slice(1, 2)),
    }
    optimizer = Optimizer(spec, Schedule(10, 0), parts, {"q", "k"})
    rows.grad = torch.tensor([[0.5, -2.0], [7.0, 0.0]], dtype=torch.float64)
    optimizer.step(torch.zeros(()))
    # The decay of step 1 is 0, so v = g^2, and each element moves by its sign; k has the least size.
    size = math.sqrt(12.5)
    step = [0.1 * size * 0.25, -0.1 * size * 0.25, 0.1 * 1e-3 * 0.25, 0.0]
    left = [3.0 * 0.98, -4.0 * 0.98, 0.0, 1e-4 * 0.98]  # 1 - 0.1^2 * 2
    moved = [before - moved for before, moved in zip(left, step, strict=True)]
    assert rows.flatten().tolist() == pytest.approx(moved, rel=1e-12)
    # The decay of step 2 is 1 - 1 / sqrt(2).
    rows.grad = torch.tensor([[1.5, 0.0], [0.0, 0.0]], dtype=torch.float64)
    optimizer.step(torch.zeros(()))
    share = 1.0 / math.sqrt(2.0)
    square = (1.0 - share) * 0.25 + share * 2.25
    size = math.sqrt((moved[0] ** 2 + moved[1] ** 2) / 2.0)
    second = 0.75 * step[0] + 0.25 * 0.1 * size * 1.5 / math.sqrt(square)
    last = [moved[0] * 0.98 - second, moved[1] * 0.98 - 0.75 * step[1]]
    assert rows[0].tolist() == pytest.approx(last, rel=1e-12)


@pytest.mark.parametrize("layout", ["d2f2", "t2"])
def test_palm_is_refused_where_parameters_are_divided(layout: str) -> None:
    spec = ModelSpec(trained=True, optimizer=OptimizerSpec("palm"))
    with pytest.raises(ConfigError, match=r"optimizer\.type=palm measures whole parameters"):
        check_layout(spec, Layout.parse(layout), LLAMA)
    check_layout(spec, Layout.parse("d2f1"), LLAMA)
    check_layout(replace(spec, trained=False), Layout.parse(layout), LLAMA)


def test_sgd_decays_weights_and_not_the_momentum() -> None:
    spec = OptimizerSpec(
        type="sgd",
        lr=0.1,
        beta1=0.5,
        weight_decay=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
    )
    optimizer, w = optimizer_of(spec, [1.0])
    step(optimizer, w, [2.0])
    assert w.tolist() == pytest.approx([0.9 - 0.2], rel=1e-12)
    step(optimizer, w, [0.0])
    assert w.tolist() == pytest.approx([0.7 * 0.9 - 0.1 * 1.0], rel=1e-12)


def test_adamw_is_torchs() -> None:
    spec = OptimizerSpec(lr=0.01, weight_decay=0.1, lr_scheduler_type="constant", max_grad_norm=0.0)
    optimizer, w = optimizer_of(spec, [1.0, -2.0, 3.0])
    theirs = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
    reference = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for gradient in ([0.1, -0.5, 2.0], [1.0, 0.0, -2.0], [0.0, 0.3, 0.3]):
        step(optimizer, w, gradient)
        theirs.grad = torch.tensor(gradient, dtype=torch.float64)
        reference.step()
        torch.testing.assert_close(w, theirs, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("type", ["adamw", "sgd"])
def test_torchs_fused_kernels_are_used(type: str) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer, w = optimizer_of(OptimizerSpec(type=type), [1.0])
        step(optimizer, w, [0.1])
    assert f"aten::_fused_{type}_" in {event.key for event in profile.key_averages()}
    assert set(FUSED) == {"cpu", "cuda"}


def test_gradients_are_clipped_to_the_norm_and_0_turns_it_off() -> None:
    plain = {"type": "sgd", "lr": 1.0, "beta1": 0.0, "lr_scheduler_type": "constant"}
    for limit, moved in ((1.0, [-0.6, -0.8]), (10.0, [-3.0, -4.0]), (0.0, [-3.0, -4.0])):
        optimizer, w = optimizer_of(OptimizerSpec(**plain, max_grad_norm=limit), [0.0, 0.0])
        assert step(optimizer, w, [3.0, 4.0]) == 5.0
        # What a clipped gradient is divided by is float32: the norm, 1e-6 more, by the limit.
        share = 5.0 / (5.0 + CLIP_EPS) if limit == 1.0 else 1.0
        assert w.tolist() == pytest.approx([share * x for x in moved], rel=gamma(3))


@pytest.mark.parametrize("most", [0.5, 100.0])
def test_clipping_inside_adamw_is_clipping_before_it(most: float) -> None:
    """A CPU's fused AdamW divides by `grad_scale` as a GPU's does."""
    inside, before = (nn.Parameter(torch.arange(1.0, 7.0).double()) for _ in range(2))
    divided, clipped = (torch.optim.AdamW([each], lr=0.1, fused=True) for each in (inside, before))
    for step in range(3):
        inside.grad, before.grad = (
            torch.tensor([3.0, -4.0, 0.5, 2.0, -1.0, 7.0]).double() * (step + 1) for _ in range(2)
        )
        norm = before.grad.norm()
        divided.grad_scale = clip_divisor(norm, most)  # type: ignore[attr-defined]
        nn.utils.clip_grads_with_norm_([before], most, norm)
        for optimizer in (divided, clipped):
            optimizer.step()
    # The divisor is float32, whose three roundings are a relative error of each gradient, and so of
    # their mean, where all have one sign; the root of the squares' mean is wrong by as much. A step
    # of AdamW is no longer than lr (1 - beta1) / sqrt(1 - beta2), 3.2 lr.
    rounded = 2 * gamma(3)
    torch.testing.assert_close(
        divided.state[inside]["exp_avg"], clipped.state[before]["exp_avg"], rtol=rounded, atol=0.0
    )
    torch.testing.assert_close(inside, before, rtol=0.0, atol=3 * 3.2 * 0.1 * rounded)


def test_matrices_decay_and_nothing_else() -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(4, 3)
            self.up = nn.Linear(3, 5)
            self.norm = nn.LayerNorm(5)
            self.experts = nn.Parameter(torch.zeros(2, 3, 3))
            self.head = nn.Linear(3, 4, bias=False)

    network = Network()
    assert list_decayed_names(network) == {"up.weight", "experts", "head.weight"}
    network.head.weight = network.embed.weight
    assert list_decayed_names(network) == {"up.weight", "experts"}


def test_state_of_another_network_is_refused() -> None:
    optimizer, w = optimizer_of(OptimizerSpec(), [1.0])
    step(optimizer, w, [1.0])
    tensors = {key.replace("w/", "v/"): value for key, value in optimizer.collect_tensors().items()}
    with pytest.raises(CheckpointError, match="'v'"):
        optimizer.load(tensors, optimizer.collect_values())


@pytest.mark.parametrize("rule", ["adamw", "lion", "palm", "sgd"])
def test_state_saved_with_a_tensor_a_parameter_goes_on_where_several_are_stored_as_one(
    rule: str, tmp_path: Path
) -> None:
    """As runs saved it when each parameter was stored by itself: q, k and v, gate and up.

    Their sizes are whole vectors: what is left at the end of a tensor torch's fused rules may round
    in another way.
    """
    network = build(
        replace(LLAMA, head_dim=8, intermediate_size=48, qkv_bias=True), dtype=torch.float32
    )
    spec = OptimizerSpec(
        type=rule, lr=1e-2, weight_decay=0.1, max_grad_norm=0.5, lr_scheduler_type="constant"
    )
    apart = {
        name: StoredParameter(name, nn.Parameter(value.clone()))
        for name, value in find_canonical_values(network).items()
    }
    together = find_canonical_parameters(network)
    assert len({part.name for part in together.values()}) < len(apart)
    draw = torch.Generator().manual_seed(0)

    def train(optimizers: list[tuple[Optimizer, dict[str, StoredParameter]]], steps: int) -> None:
        for _ in range(steps):
            gradients = {
                name: torch.randn(part.data.shape, generator=draw) for name, part in apart.items()
            }
            for optimizer, parts in optimizers:
                for name, part in parts.items():
                    if part.parameter.grad is None:
                        part.parameter.grad = torch.zeros_like(part.parameter)
                    part.select_rows(part.parameter.grad).copy_(gradients[name])
                optimizer.step(
                    torch.nn.utils.get_total_norm(list(optimizer.collect_gradients().values()))
                )

    old = Optimizer(spec, Schedule(10, 0), apart, list_decayed_names(network))
    train([(old, apart)], 3)
    checkpoint.write_tensors(tmp_path / "optimizer.safetensors", old.collect_tensors())
    new = Optimizer(spec, Schedule(10, 0), together, list_decayed_names(network))
    with torch.no_grad():
        for name, part in together.items():
            part.data.copy_(apart[name].data)
    saved = checkpoint.SavedTensors(tmp_path, "optimizer")
    new.load({name: saved.read(name, None) for name in saved.names}, old.collect_values())
    train([(old, apart), (new, together)], 3)
    assert [
        name for name, part in together.items() if not torch.equal(part.data, apart[name].data)
    ] == []
    assert (
        new.collect_values() == old.collect_values()
        and new.collect_tensors().keys() == old.collect_tensors().keys()
    )
    assert [
        key
        for key, value in new.collect_tensors().items()
        if not torch.equal(value, old.collect_tensors()[key])
    ] == []
