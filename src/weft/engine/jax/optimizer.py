"""Optimizer of one role's trained arrays: optax's update rules, with weft's schedule and clipping.

The files of its state are those of `weft.engine.torch.optimizer`, so a run can continue with either
engine.
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
from weft.engine.torch.update_rules import LEAST_SIZE, SQUARE_EPS
from weft.errors import CheckpointError

# Arrays of each rule's state: field of optax's state -> name of the slot in files.
SLOTS = {
    "adamw": {"mu": "exp_avg", "nu": "exp_avg_sq"},
    "lion": {"mu": "exp_avg"},
    "sgd": {"trace": "momentum_buffer"},
    "palm": {"mu": "exp_avg", "nu": "exp_avg_sq"},
}


class PalmState(NamedTuple):
    """State of PaLM's rule: number of steps, momentum of the steps, mean squared gradients."""

    count: Array  # type: ignore[assignment]
    mu: dict[str, Array]
    nu: dict[str, Array]


def scale_by_palm(beta1: float, beta2: float) -> optax.GradientTransformationExtraArgs:
    """Return PaLM's rule, `weft.engine.torch.update_rules.PalmOptimizer`, with the learning rate `rate`.

    optax has its parts, but these measure the size of a stack of matrices, not of each matrix.
    """

    def create_state(trained: dict[str, Array]) -> PalmState:
        zeros = jax.tree.map(jnp.zeros_like, trained)
        return PalmState(jnp.zeros((), jnp.int32), zeros, jax.tree.map(jnp.zeros_like, trained))

    def update(
        gradients: dict[str, Array], state: PalmState, trained: Any, *, rate: Array, **_: Any
    ) -> tuple[dict[str, Array], PalmState]:
        count = optax.safe_increment(state.count)
        mu, nu = {}, {}
        for name, g in gradients.items():
            share = count.astype(g.dtype) ** -beta2
            nu[name] = (1.0 - share) * state.nu[name] + share * (jnp.square(g) + SQUARE_EPS)
            value = trained[name]
            axes = tuple(range(name.startswith("blocks."), value.ndim))
            size = jnp.sqrt(jnp.square(value).mean(axes, keepdims=True))
            step = rate.astype(g.dtype) * jnp.maximum(size, LEAST_SIZE) * g * lax.rsqrt(nu[name])
            mu[name] = beta1 * state.mu[name] + (1.0 - beta1) * step
        return mu, PalmState(count, mu, nu)

    return optax.GradientTransformationExtraArgs(create_state, update)


def build_rule(spec: OptimizerSpec) -> optax.GradientTransformation:
    """Return the update rule, without weight decay and clipping.

    The steps of `palm` have the learning rate as a factor, those of the other rules do not.
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
        self.attempts = 0  # number of minibatches, skipped ones included
        self.loss_scale = 1.0
        self.gradients: dict[str, Array] | None = None  # sums over the micro-batches so far
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
            new = {}
            for name, value in trained.items():
                own = rate.astype(value.dtype)
                factor, square = (own, own) if spec.type != "palm" else (1.0, own * own)
                left = value * (1.0 - square * decay) if decay and name in decayed else value
                new[name] = left - factor * steps[name]
            return new, state

        # The results lie where the arguments lay, so the next pass is not compiled again.
        places = jax.tree.map(lambda value: value.sharding, (self.trained, self._state))
        self._build_zeros = jax.jit(
            lambda trained: jax.tree.map(jnp.zeros_like, trained), out_shardings=places[0]
        )
        self._update = jax.jit(update, donate_argnums=(0, 1), out_shardings=places)
        self._norm = jax.jit(
            lambda gradients: jnp.sqrt(sum(jnp.square(g).sum() for g in gradients.values()))
        )

    def _build_state(self) -> Any:
        """Return the state before the first step, divided over devices like the arrays."""
        trained = self.trained
        state = jax.eval_shape(self._rule.init, trained)
        shardings = {name: value.sharding for name, value in trained.items()}
        mesh = cast(NamedSharding, next(iter(shardings.values()))).mesh
        places = {}
        for slot in state._fields:
            own = getattr(state, slot)
            places[slot] = shardings if isinstance(own, dict) else NamedSharding(mesh, P())
        return jax.jit(self._rule.init, out_shardings=state._replace(**places))(trained)

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
        """No parameters of torch: their gradients are summed by `add_gradients`."""
        return []

    def add_gradients(self, add: Callable[[dict[str, Array]], dict[str, Array]]) -> None:
        """Replace the sums of gradients, by array, by what `add` returns for them."""
        if self.gradients is None:
            self.gradients = self._build_zeros(self.trained)
        self.gradients = add(self.gradients)

    def collect_gradients(self) -> dict[str, Tensor]:
        return {}

    def compute_norm(self) -> Tensor:
        """Return the L2 norm of the gradient, as a scalar tensor."""
        if self.gradients is None:
            return torch.zeros(())
        return torch.tensor(float(self._norm(self.gradients)), dtype=torch.float64)

    def step(self, norm: Tensor) -> None:
        """Clip the gradient, whose norm is `norm`, and update the arrays."""
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
            names = [n for n, p in self._stacks.places.items() if p.array in self._stacks.trained]
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
        """Load the state of either engine: its tensors, and the result of `collect_values`.

        `keys` are the names of the tensors, and `read` returns one of them. Raises
        `CheckpointError` for an unknown parameter, and for a state of another update rule.
        """
        slots = SLOTS[self.spec.type]
        known = {*slots.values(), "step"}
        by_slot: dict[str, list[str]] = {slot: [] for slot in known}
        for key in keys:
            name, slot = key.rsplit("/", 1)
            place = self._stacks.places.get(name)
            if place is None or place.array not in self._stacks.trained:
                raise CheckpointError(
                    f"the optimizer state contains {name!r}, which this role does not train"
                )
            if slot not in known:
                raise CheckpointError(
                    f"the optimizer state has {slot!r} of {name!r}, which backend=jax cannot "
                    f"continue with optimizer.type={self.spec.type}; continue with backend=torch"
                )
            by_slot[slot].append(name)
        state = self._build_state()
        for field, slot in slots.items():
            keys_of = {name: f"{name}/{slot}" for name in by_slot[slot]}
            self._stacks.load(getattr(state, field), keys_of, read)
        self.steps = int(values["steps"])
        self.attempts = int(values["attempts"])
        if "count" in state._fields:
            steps = self.steps
            if by_slot["step"]:
                steps = int(read(f"{by_slot['step'][0]}/step"))
            count = np.asarray(steps, state.count.dtype)
            state = state._replace(count=put_on_mesh(count, state.count.sharding))
        self._state = state
