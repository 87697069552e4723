"""Losses run under `jax.jit`, differentiated: value and gradient are those of numpy and torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from tests.algorithms.loss_cases import Rows, gradients
from tests.algorithms.test_base_losses import CASES, Case, minibatch
from weft.algorithms.base import Stat, Sum, exp_ratio, fixed
from weft.data.sample import SequenceSample
from weft.registry import register_loss

jax = pytest.importorskip("jax")
jnp = jax.numpy
QUICKLY = {"xla_backend_optimization_level": 0}  # every case is compiled and runs once


@register_loss("test-jit", per="token")
def weighted(logprobs: Any, advantages: Any, power: float = 1.0) -> Any:
    return -fixed(exp_ratio(power * logprobs)) * advantages * logprobs, {"advantage": advantages}


MORE = [
    Case("grpo", {"surrogate": "cispo"}),
    Case("grpo", {"surrogate": "sapo"}),
    Case("grpo", {"surrogate": "clip", "dual_clip": 2.0, "eps_clip": 0.2}),
    Case("test-jit", {"power": 0.5}),
]


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


class JaxRows(Rows):
    """The rows of a sample whose values are traced: `keys` are arguments of the compiled function,
    only the layout is known.
    """

    def __init__(self, sample: SequenceSample, keys: Mapping[str, Any]) -> None:
        super().__init__(sample)
        self.convert, self.keys = jnp.asarray, keys
        self.sequence, self.group, self.mask = (
            keys[name] for name in ("sequence", "group", "mask")
        )
        self.lengths = self.sum(self.mask)

    def __getitem__(self, key: str) -> Any:
        return self.keys[key]

    def pairs(self) -> tuple[Any, Any]:
        return self.keys["better"], self.keys["worse"]


def traced(sample: SequenceSample) -> dict[str, Any]:
    """All that a loss reads of a batch, as arguments of the compiled function."""
    plain = Rows(sample)
    better, worse = plain.pairs()
    own = {
        "sequence": plain.sequence,
        "group": plain.group,
        "mask": plain.mask,
        "better": better,
        "worse": worse,
    }
    return {
        key: jnp.asarray(values)
        for key, values in {**{k: plain[k] for k in sample.data}, **own}.items()
    }


def parts(stat: Stat) -> tuple[Any, Any]:
    """A statistic as arrays: (value, weight)."""
    return stat.value, stat.weight if isinstance(stat, Sum) else 1.0


@pytest.mark.default_cases(
    "dpo-sigmoid-0.3-7",
    "dpo-kto-0.3-7",
    "dpo-ipo-0.3-7",
    "dpo-orpo-0.3-7",
    "gkd-0.5-0.2-7",
    "grpo-0.2-k3-7",
    "grpo-grpo-16-7",
    "grpo-sequence-grpo-0.02-7",
    "ppo_actor--7",
    "ppo_critic--7",
    "rw--7",
    "sft-token-7",
    "test-jit-0.5-7",
)
@pytest.mark.parametrize("seed", [7])
@pytest.mark.parametrize("case", [*CASES, *MORE], ids=str)
def test_a_compiled_loss_equals_numpy_and_its_gradient_torchs(case: Case, seed: int) -> None:
    sample, out = minibatch(seed, masks=True)
    loss = case.build()
    total = loss.denominators(sample)

    def compute(out: Mapping[str, Any], keys: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        value, stats = loss(out, JaxRows(sample, keys), total)
        return value, {name: parts(stat) for name, stat in stats.items()}

    arrays = {key: jnp.asarray(values) for key, values in out.items()}
    compiled = jax.jit(jax.value_and_grad(compute, has_aux=True), compiler_options=QUICKLY)
    (value, made), by = compiled(arrays, traced(sample))

    plain, stats = loss({k: np.asarray(v, np.float64) for k, v in out.items()}, Rows(sample), total)
    assert float(value) == pytest.approx(float(plain), rel=1e-10, abs=1e-13)
    assert made.keys() == stats.keys()
    for name, stat in stats.items():
        assert np.allclose(made[name], parts(stat), rtol=1e-9, atol=1e-12), name
    _, _, wanted = gradients(loss, sample, out)
    np.testing.assert_allclose(by[case.trains], wanted[case.trains], rtol=1e-9, atol=1e-12)


def test_what_is_fixed_has_no_gradient() -> None:
    slope = jax.jit(jax.grad(lambda x: (fixed(x) * x).sum()))(jnp.asarray([2.0, 3.0]))
    assert slope.tolist() == [2.0, 3.0]
