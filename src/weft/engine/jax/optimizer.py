"""Optimizer of one role's trained arrays: optax's update rules, with weft's schedule and clipping.

The state is saved in the same files as by `weft.engine.torch.optimizer`, so a run can continue with
either engine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from torch import Tensor

from weft.engine.jax.mesh import put_on_mesh
from weft.engine.jax.parameters import ParameterStacks, StoredArray
from weft.engine.spec import OptimizerSpec, Schedule
from weft.engine.torch.optimizer import CLIP_EPS, compute_learning_rate
from weft.engine.torch.update_rules import MIN_SIZE, SQUARE_EPS
from weft.errors import CheckpointError

# Arrays of each update rule's state: field of optax's state -> name of the slot in files.
SLOTS = {
    "adamw": {"mu": "exp_avg", "nu": "exp_avg_sq"},
    "lion": {"mu": "exp_avg"},
    "sgd": {"trace": "momentum_buffer"},
    "palm": {"mu": "exp_avg", "nu": "exp_avg_sq"},
}


class PalmState(NamedTuple):
    """State of PaLM's update rule."""

    count: Array  # type: ignore[assignment]  # number of steps
    mu: dict[str, Array]  # moving averages of the steps
    nu: dict[str, Array]  # moving averages of the squared gradients


def scale_by_palm(beta1: float, beta2: float) -> optax.GradientTransformationExtraArgs:
    """Return PaLM's update rule, as implemented by `weft.engine.torch.update_rules.PalmOptimizer`.

    `update` needs the learning rate as the argument `rate`. The rule cannot be combined from parts
    of optax, because these would compute the size of a whole stack of matrices instead of the size
    of each matrix.
    """

    def create_state(trained: dict[str, Array]) -> PalmState:
        zeros = jax.tree.map(jnp.zeros_like, trained)
        return PalmState(jnp.zeros((), jnp.int32), zeros, jax.tree.map(jnp.zeros_like, trained))

    def update(
        gradients: dict[str, Array], state: PalmState, trained: Any, *, rate: Array, **_: Any
    ) -> tuple[dict[str, Array], PalmState]:
        count = optax.safe_increment(state.count)
        mu: dict[str, Array] = {}
        nu: dict[str, Array] = {}
        for name, g in gradients.items():
            weight = count.astype(g.dtype) ** -beta2
            nu[name] = (1.0 - weight) * state.nu[name] + weight * (jnp.square(g) + SQUARE_EPS)
            # Scale the step by the root mean square of each parameter, not of the stack.
            value = trained[name]
            axes = tuple(range(name.startswith("blocks."), value.ndim))
            size = jnp.sqrt(jnp.square(value).mean(axes, keepdims=True))
            step = rate.astype(g.dtype) * jnp.maximum(size, MIN_SIZE) * g * lax.rsqrt(nu[name])
            mu[name] = beta1 * state.mu[name] + (1.0 - beta1) * step
        return mu, PalmState(count, mu, nu)

    return optax.GradientTransformationExtraArgs(create_state, update)


def build_rule(spec: OptimizerSpec) -> optax.GradientTransformation:
    """Return the update rule, without weight decay and clipping.

    Only the steps of `palm` are already multiplied by the learning rate.
    """
    if spec.type == "palm":
        return scale_by_palm(spec.beta1, spec.beta2)
    if spec.type == "adamw":
        return optax.scale_by_adam(spec.beta1, spec.beta2, spec.eps)
    if spec.type == "lion":
        return optax.scale_by_lion(spec.beta1, spec.beta2)
    return optax.trace(spec.beta1)


class JaxOptimizer:
    """Update of the trained arrays of one role; implements `weft.engine.torch.step.StepOptimizer`.

    `arrays` has all arrays of the role, and is changed in place. `decayed` are the names of the
    arrays with weight decay.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        schedule: Schedule,
        stacks: ParameterStacks,
        arrays: dict[str, Array],
        decayed: Collection[str],
    ) -> None:
        self.spec = spec
        self.schedule = schedule
        self.steps = 0
        self.attempts = 0  # number of minibatches, including skipped ones
        self.loss_scale = 1.0
        # Gradients summed over the micro-batches so far, or None before the first one.
        self.gradients: dict[str, Array] | None = None
        self._stacks = stacks
        self._arrays = arrays
        self._rule = optax.with_extra_args_support(build_rule(spec))
        self._state: Any = self._build_state()
        decay = spec.weight_decay

        def update(
            trained: dict[str, Array],
            state: Any,
            gradients: dict[str, Array],
            rate: Array,
            divisor: Array,
        ) -> tuple[dict[str, Array], Any]:
            clipped = {name: g / divisor.astype(g.dtype) for name, g in gradients.items()}
            steps, state = self._rule.update(clipped, state, trained, rate=rate)
            new: dict[str, Array] = {}
            for name, value in trained.items():
                array_rate = rate.astype(value.dtype)
                step_factor: Any = array_rate
                decay_rate = array_rate
                if spec.type == "palm":  # its steps include the rate, and it decays by the square
                    step_factor = 1.0
                    decay_rate = array_rate * array_rate
                if decay and name in decayed:
                    value = value * (1.0 - decay_rate * decay)
                new[name] = value - step_factor * steps[name]
            return new, state

        # Keep the sharding of the arguments, so that the next pass is not compiled again.
        shardings = jax.tree.map(lambda value: value.sharding, (self.trained, self._state))
        self._build_zeros = jax.jit(
            lambda trained: jax.tree.map(jnp.zeros_like, trained), out_shardings=shardings[0]
        )
        self._update = jax.jit(update, donate_argnums=(0, 1), out_shardings=shardings)
        self._norm = jax.jit(
            lambda gradients: jnp.sqrt(sum(jnp.square(g).sum() for g in gradients.values()))
        )

    def _build_state(self) -> Any:
        """Return the state before the first step, with the same sharding as the arrays."""
        trained = self.trained
        state = jax.eval_shape(self._rule.init, trained)
        shardings = {name: value.sharding for name, value in trained.items()}
        mesh = cast(NamedSharding, next(iter(shardings.values()))).mesh
        state_shardings: dict[str, Any] = {}
        for field in state._fields:
            if isinstance(getattr(state, field), dict):
                state_shardings[field] = shardings
            else:
                state_shardings[field] = NamedSharding(mesh, P())
        out_shardings = state._replace(**state_shardings)
        return jax.jit(self._rule.init, out_shardings=out_shardings)(trained)

    @property
    def trained(self) -> dict[str, Array]:
        """Arrays that the optimizer updates, by name."""
        return {name: self._arrays[name] for name in sorted(self._stacks.trained)}

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return compute_learning_rate(self.spec, self.schedule, self.steps)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Empty list, because there are no torch parameters; see `add_gradients`."""
        return []

    def add_gradients(self, add: Callable[[dict[str, Array]], dict[str, Array]]) -> None:
        """Replace the summed gradients, by array name, with `add(summed gradients)`."""
        if self.gradients is None:
            self.gradients = self._build_zeros(self.trained)
        self.gradients = add(self.gradients)

    def collect_gradients(self) -> dict[str, Tensor]:
        return {}

    def compute_norm(self) -> Tensor:
        """Return the L2 norm of the gradient, as a scalar tensor; 0 without gradients."""
        if self.gradients is None:
            return torch.zeros(())
        return torch.tensor(float(self._norm(self.gradients)), dtype=torch.float64)

    def step(self, norm: Tensor) -> None:
        """Clip the gradient, which has the norm `norm`, and update the arrays."""
        if self.gradients is None:  # the loss does not depend on the network's outputs
            self.steps += 1
            return
        divisor = 1.0
        if self.spec.max_grad_norm > 0.0:
            divisor = max(1.0, (float(norm) + CLIP_EPS) / self.spec.max_grad_norm)
        new, self._state = self._update(
            self.trained,
            self._state,
            self.gradients,
            np.float64(self.learning_rate),
            np.float64(divisor),
        )
        self._arrays.update(new)
        self.steps += 1

    def zero_grad(self) -> None:
        self.gradients = None

    def handle_overflow(self) -> bool:
        """Return False: gradients are not scaled, so an overflow is an error."""
        return False

    # -- on disk

    def select_tensors(self) -> dict[str, StoredArray]:
        """Return the arrays of the state, by the names `{parameter}/{slot}` of their tensors."""
        stored: dict[str, StoredArray] = {}
        has_state = self.spec.type != "sgd" or self.spec.beta1 > 0.0
        if self.steps and has_state:
            trained_arrays = self._stacks.trained
            names = [
                name for name, place in self._stacks.places.items() if place.array in trained_arrays
            ]
            for field, slot in SLOTS[self.spec.type].items():
                for name in sorted(names):
                    array = self._stacks.select(getattr(self._state, field), name)
                    stored[f"{name}/{slot}"] = array
            if self.spec.type in ("adamw", "palm"):
                count = put_on_mesh(np.float32(self._state.count), self._state.count.sharding)
                for name in names:
                    stored[f"{name}/step"] = StoredArray(count)
        return stored

    def collect_values(self) -> dict[str, float]:
        """Return the state that consists of plain numbers, such as the step count."""
        return {
            "steps": self.steps,
            "attempts": self.attempts,
            "loss_scale": self.loss_scale,
            "calm_steps": 0,
        }

    def load(
        self, keys: Iterable[str], read: Callable[[str], Tensor], values: Mapping[str, float]
    ) -> None:
        """Load a state that either engine saved: its tensors and the result of `collect_values`.

        `keys` are the names of the tensors, and `read` returns one of them. Raises
        `CheckpointError` for an unknown parameter, and for a state of another update rule.
        """
        slots = SLOTS[self.spec.type]
        known_slots = {*slots.values(), "step"}
        by_slot: dict[str, list[str]] = {slot: [] for slot in known_slots}
        for key in keys:
            name, slot = key.rsplit("/", 1)
            place = self._stacks.places.get(name)
            if place is None or place.array not in self._stacks.trained:
                raise CheckpointError(
                    f"the optimizer state contains {name!r}, which this role does not train"
                )
            if slot not in known_slots:
                raise CheckpointError(
                    f"the optimizer state has {slot!r} of {name!r}, which backend=jax cannot "
                    f"continue with optimizer.type={self.spec.type}; continue with backend=torch"
                )
            by_slot[slot].append(name)
        state = self._build_state()
        for field, slot in slots.items():
            slot_keys = {name: f"{name}/{slot}" for name in by_slot[slot]}
            self._stacks.load(getattr(state, field), slot_keys, read)
        self.steps = int(values["steps"])
        self.attempts = int(values["attempts"])
        if "count" in state._fields:
            steps = self.steps
            if by_slot["step"]:
                steps = int(read(f"{by_slot['step'][0]}/step"))
            count = np.asarray(steps, state.count.dtype)
            state = state._replace(count=put_on_mesh(count, state.count.sharding))
        self._state = state
