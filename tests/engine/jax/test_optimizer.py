"""PaLM's rule of the JAX engine beside the same rule made of optax's parts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from weft.engine.jax.engine import allow_dtype
from weft.engine.jax.optimizer import scale_by_palm


@pytest.mark.slow
def test_palm_is_optaxs_adafactor_without_factors_and_measures_each_block() -> None:
    allow_dtype("float64")
    random = np.random.default_rng(0)
    whole = {"embed.weight": random.normal(size=(5, 3)), "blocks.0:2.norm.weight": np.ones((2, 4))}
    whole["blocks.0:2.mlp.up.weight"] = random.normal(size=(2, 4, 3)) * [[[1e-5]], [[9.0]]]
    apart = {}
    for name, values in whole.items():
        if name.startswith("blocks."):
            apart |= {f"{name}/{layer}": values[layer] for layer in range(2)}
        else:
            apart[name] = values
    theirs = optax.chain(
        optax.scale_by_factored_rms(factored=False, decay_rate=0.99),
        optax.scale_by_learning_rate(0.1, flip_sign=False),
        optax.scale_by_param_block_rms(),
        optax.ema(0.9, debias=False),
    )
    ours = scale_by_palm(0.9, 0.99)
    values = jax.tree.map(jnp.asarray, whole)
    parts = jax.tree.map(jnp.asarray, apart)
    state, their_state = ours.init(values), theirs.init(parts)
    for _ in range(4):
        gradients = {name: random.normal(size=value.shape) for name, value in values.items()}
        split = {}
        for name in parts:
            stack, _, layer = name.partition("/")
            split[name] = gradients[stack][int(layer)] if layer else gradients[stack]
        steps, state = ours.update(gradients, state, values, rate=jnp.asarray(0.1))
        their_steps, their_state = theirs.update(split, their_state, parts)
        for name, step in their_steps.items():
            stack, _, layer = name.partition("/")
            own = steps[stack][int(layer)] if layer else steps[stack]
            # optax computes the decay of the second moments in float32
            np.testing.assert_allclose(own, step, rtol=2e-7)
        values = optax.apply_updates(values, jax.tree.map(jnp.negative, steps))
        parts = optax.apply_updates(parts, jax.tree.map(jnp.negative, their_steps))
    assert int(state.count) == 4
    assert float(abs(steps["blocks.0:2.mlp.up.weight"][0]).max()) == pytest.approx(1e-4, rel=1.0)
