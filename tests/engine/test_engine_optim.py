"""Learning rates, update rules and weight decay by hand; what a device is asked."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from tests.models.common import tiny_config
from weft.engine import device
from weft.engine.backends.torch import _cost
from weft.engine.flops import Cost
from weft.engine.optim import FUSED, Optimizer, decayed, learning_rate
from weft.engine.spec import OptimizerSpec, Schedule
from weft.errors import CheckpointError, ConfigError
from weft.models.transformer import Transformer


def rates(spec: OptimizerSpec, schedule: Schedule) -> list[float]:
    return [learning_rate(spec, schedule, step) for step in range(schedule.total_steps)]


def test_schedules_by_hand() -> None:
    constant = OptimizerSpec(lr=1.0, lr_scheduler_type="constant")
    assert rates(constant, Schedule(4, 2)) == [0.5, 1.0, 1.0, 1.0]
    linear = OptimizerSpec(lr=1.0, lr_scheduler_type="linear", min_lr_ratio=0.2)
    assert rates(linear, Schedule(6, 2)) == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4])
    cosine = OptimizerSpec(lr=2.0, lr_scheduler_type="cosine", end_lr=1.0)
    assert rates(cosine, Schedule(4, 0)) == pytest.approx(
        [2.0, 1.5 + 0.5 * math.cos(math.pi / 4), 1.5, 1.5 - 0.5 * math.cos(math.pi / 4)]
    )
    assert learning_rate(linear, Schedule(6, 2), 99) == 0.2  # a run that goes on past its end
    assert rates(linear, Schedule(3, 3)) == pytest.approx([1 / 3, 2 / 3, 1.0])


def test_linear_and_cosine_are_those_of_transformers() -> None:
    from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

    for name, make in (("linear", get_linear_schedule_with_warmup), ("cosine", get_cosine_schedule_with_warmup)):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
        theirs, schedule = make(optimizer, 0, 7), Schedule(7, 0)
        for step in range(7):
            ours = learning_rate(OptimizerSpec(lr=0.3, lr_scheduler_type=name), schedule, step)
            assert ours == pytest.approx(theirs.get_last_lr()[0])
            optimizer.step()
            theirs.step()


def optimizer_of(spec: OptimizerSpec, start: list[float]) -> tuple[Optimizer, nn.Parameter]:
    parameter = nn.Parameter(torch.tensor(start))
    return Optimizer(spec, Schedule(10, 0), {"w": parameter}, {"w"}), parameter


def step(optimizer: Optimizer, parameter: nn.Parameter, gradient: list[float]) -> float:
    parameter.grad = torch.tensor(gradient)
    norm = torch.nn.utils.get_total_norm(optimizer.gradients())
    optimizer.step(norm)
    return float(norm)


def test_lion_by_hand() -> None:
    spec = OptimizerSpec(type="lion", lr=0.1, beta1=0.9, beta2=0.5, weight_decay=0.5, lr_scheduler_type="constant")
    optimizer, w = optimizer_of(spec, [1.0, -1.0])
    step(optimizer, w, [0.3, -0.2])
    torch.testing.assert_close(w.detach(), torch.tensor([0.95 - 0.1, -0.95 + 0.1]))
    # The momentum is now [0.15, -0.1]; 0.9 m + 0.1 g = [0.135 - 0.2, -0.09 + 0.08].
    before = w.detach().clone()
    optimizer.spec.max_grad_norm = 0.0
    step(optimizer, w, [-2.0, 0.8])
    torch.testing.assert_close(w.detach(), before * 0.95 - 0.1 * torch.tensor([-1.0, -1.0]))


def test_sgd_decays_weights_and_not_the_momentum() -> None:
    spec = OptimizerSpec(
        type="sgd", lr=0.1, beta1=0.5, weight_decay=1.0, lr_scheduler_type="constant", max_grad_norm=0.0
    )
    optimizer, w = optimizer_of(spec, [1.0])
    step(optimizer, w, [2.0])
    torch.testing.assert_close(w.detach(), torch.tensor([0.9 - 0.2]))
    step(optimizer, w, [0.0])
    torch.testing.assert_close(w.detach(), torch.tensor([0.7 * 0.9 - 0.1 * 1.0]))


def test_adamw_is_torchs() -> None:
    spec = OptimizerSpec(lr=0.01, weight_decay=0.1, lr_scheduler_type="constant", max_grad_norm=0.0)
    optimizer, w = optimizer_of(spec, [1.0, -2.0, 3.0])
    theirs = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    reference = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for gradient in ([0.1, -0.5, 2.0], [1.0, 0.0, -2.0], [0.0, 0.3, 0.3]):
        step(optimizer, w, gradient)
        theirs.grad = torch.tensor(gradient)
        reference.step()
        torch.testing.assert_close(w, theirs)


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
        torch.testing.assert_close(w.detach(), torch.tensor(moved), rtol=1e-5, atol=1e-5)


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
    assert decayed(network) == {"up.weight", "experts", "head.weight"}
    network.head.weight = network.embed.weight
    assert decayed(network) == {"up.weight", "experts"}


def test_state_of_another_network_is_refused() -> None:
    optimizer, w = optimizer_of(OptimizerSpec(), [1.0])
    step(optimizer, w, [1.0])
    tensors = {key.replace("w/", "v/"): value for key, value in optimizer.tensors().items()}
    with pytest.raises(CheckpointError, match="'v'"):
        optimizer.load(tensors, optimizer.values())


def test_devices() -> None:
    assert device.resolve_device("cpu") == torch.device("cpu")
    assert device.resolve_device(None) == device.best_device()
    for name in ("toaster", "cuda:99"):
        with pytest.raises(ConfigError, match=f"device='{name}'"):
            device.resolve_device(name)
    here = torch.device("cpu")
    assert device.peak_memory_gb(here) > 0.01
    assert device.numerics(here)["threads"] == torch.get_num_threads()
    rate = device.matmul_rate(here, torch.float32)
    assert rate > 1e8 and device.matmul_rate(here, torch.float32) == rate


def test_determinism_is_switched_on_and_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    device.set_deterministic(True)
    assert device.numerics(torch.device("cpu"))["deterministic"]
    device.set_deterministic(False)
    assert not device.numerics(torch.device("cpu"))["deterministic"]


def test_cost_of_training_by_hand() -> None:
    import numpy as np

    lengths: Any = np.array([3, 1])
    assert Cost(10, 2).training(lengths) == 3 * (2 * 10 * 4 + 4 * 2 * (6 + 1))
    assert Cost(10, 2, backward=1).per_token == 2 * 2 * 10
    assert Cost(10, 2, late=4).training(lengths, rows=1, across=5) == 3 * (2 * (10 * 4 - 4 * 3) + 4 * 2 * (6 + 1 + 5))


@pytest.mark.parametrize(
    ("name", "head", "late"),
    [
        ("llama", "lm", 131 * 32 + 32 * 32 + 3 * 32 * 56),
        ("llama", "value", 32 + 32 * 32 + 3 * 32 * 56),
        ("mixtral", "lm", 131 * 32 + 32 * 32 + 4 * 32 + 2 * 3 * 32 * 56),
    ],
)
def test_what_the_last_layer_does_for_wanted_rows_alone(name: str, head: Any, late: int) -> None:
    """The output matrix, attention's output, and the MLP: with experts the router and the two a token is routed to."""
    network = Transformer(tiny_config(name), head)
    assert _cost(network, frozen=False).late == late
    if head == "value":
        assert _cost(Transformer(tiny_config(name), "score", "mean"), frozen=False).late == 32, "all tokens are read"


@pytest.mark.skipif(sys.platform != "linux", reason="a child begins at its parent's peak on Linux alone")
def test_peak_memory_is_this_process_s_own() -> None:
    held = torch.ones(200_000_000)  # 800 MB, which a child's ru_maxrss would begin with
    code = "import torch; from weft.engine.device import peak_memory_gb; print(peak_memory_gb(torch.device('cpu')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert float(done.stdout) < device.peak_memory_gb(held.device) - 0.4
