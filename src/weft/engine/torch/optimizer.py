"""Optimizer of one trained role, and the files of its state.

It applies the update rule, weight decay, learning-rate schedule and clipping, and saves its state.
Masters and states are float32, unless the user chooses a narrower dtype for states. AdamW and SGD
are torch's (fused if the device supports it); Lion and AdamW with narrow states are implemented
here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from weft.engine.checkpoint import SavedTensors
from weft.engine.spec import OptimizerSpec, Schedule
from weft.engine.torch.host_memory import HostMemory
from weft.engine.torch.update_rules import (
    BLOCK,
    SCALES,
    SGD,
    AdamW,
    Lion,
    NarrowAdamW,
    PalmOptimizer,
    State,
    build_narrow_adamw,
    count_blocks,
)
from weft.errors import CheckpointError
from weft.kernels import CopyQueue
from weft.models.network.linear import StoredParameter, find_canonical_parameters
from weft.topology import Slice


def is_scales(key: str) -> bool:
    return key.endswith(SCALES)


def to_named_tensors(
    trained: Mapping[str, StoredParameter], states: Mapping[nn.Parameter, State], block: int
) -> dict[str, Tensor]:
    """Return the states of the parameters in `trained` as tensors named `{parameter}/{slot}`.

    A slot is one tensor of a parameter's state, such as `exp_avg`. The network can store several
    parameters as one, such as q, k and v. `states` has one state for each stored parameter, and
    this function splits it into the states of the separate parameters.

    If a state has scales, there is one for every `block` elements of the stored parameter. A
    separate parameter gets the scales of all blocks that contain its elements.
    """
    named_tensors: dict[str, Tensor] = {}
    for name, part in trained.items():
        for slot, value in sorted(states.get(part.parameter, {}).items()):
            named_tensors[f"{name}/{slot}"] = _slice_state(part, slot, value, block)
    return named_tensors


def from_named_tensors(
    trained: Mapping[str, StoredParameter], tensors: Mapping[str, Tensor], block: int
) -> dict[nn.Parameter, State]:
    """Convert the result of `to_named_tensors` back to states of stored parameters.

    A stored parameter can contain several canonical parameters. If `tensors` has scales for only
    some of them, the scales of the others are 0.
    """
    states: dict[nn.Parameter, State] = {}
    for key, value in tensors.items():
        name, slot = key.rsplit("/", 1)
        part = trained[name]
        state = states.setdefault(part.parameter, {})
        if not value.dim():
            state[slot] = value
        elif is_scales(slot):
            blocks = _find_blocks(part, block)
            if value.numel() == blocks.stop - blocks.start:
                count = count_blocks(part.parameter.numel(), block)
                state.setdefault(slot, value.new_zeros(count))[blocks] = value
        else:
            stored = state.setdefault(
                slot, torch.zeros_like(part.parameter, dtype=value.dtype, device=value.device)
            )
            part.select_rows(stored).copy_(value)
    return states


def _slice_state(part: StoredParameter, slot: str, value: Tensor, block: int) -> Tensor:
    if not value.dim():
        return value.clone()
    return value[_find_blocks(part, block)] if is_scales(slot) else part.select_rows(value)


def _find_blocks(part: StoredParameter, block: int) -> slice:
    """Return the range of scale blocks that contain elements of the canonical parameter `part`.

    Scales are computed for the stored parameter `part.parameter`, which can contain several
    canonical parameters. There is one scale for each block of `block` elements.
    """
    if part.rows is None:
        return slice(0, count_blocks(part.parameter.numel(), block))
    row = math.prod(part.parameter.shape[1:])
    return slice(part.rows.start * row // block, count_blocks(part.rows.stop * row, block))


def rename_for_writing(
    tensors: Mapping[str, Tensor], places: Mapping[str, Slice]
) -> dict[str, Tensor]:
    """Return the tensors, keyed by their names in the saved file.

    The names of scale tensors get a suffix such as `@0:128,0:64`, because scales can only be loaded
    for the same slice of the parameter. Other names are unchanged. `places` maps parameters to the
    slices that this rank has.
    """
    for_writing: dict[str, Tensor] = {}
    for key, value in tensors.items():
        for_writing[_append_slice(key, places) if is_scales(key) else key] = value
    return for_writing


def has_parameter_shape(written_as: str, value: Tensor) -> bool:
    """Return whether a state tensor has its parameter's shape, and therefore the same slices.

    `written_as` is the name of the tensor in a file.
    """
    return value.dim() > 0 and not is_scales(written_as.partition("@")[0])


def read(
    saved: SavedTensors, places: Mapping[str, Slice], elsewhere: Collection[str]
) -> dict[str, Tensor]:
    """Return this rank's slice of every saved tensor.

    `elsewhere` contains the names of parameters that may be on other ranks. If this rank does not
    have such a parameter, the parameter's tensors are left out. Block scales of quantized states
    are included only if they were saved for exactly the slice of the parameter that this rank has.
    """
    names = _map_saved_names(saved.names, places)
    parameter_of = map_to_parameters(names, places)
    result: dict[str, Tensor] = {}
    for key, name in names.items():
        if parameter_of[key] in places or parameter_of[key] not in elsewhere:
            result[name] = saved.read(
                key, None if is_scales(name) else places.get(parameter_of[key])
            )
    return result


def map_to_parameters(names: Iterable[str], slices: Mapping[str, Slice]) -> dict[str, str]:
    """Map the name of each tensor, `{parameter}` or `{parameter}/{slot}`, to its parameter.

    The keys of `slices` are the names of parameters.
    """
    return {name: name if name in slices else name.rsplit("/", 1)[0] for name in names}


def _map_saved_names(keys: Iterable[str], places: Mapping[str, Slice]) -> dict[str, str]:
    """Map the names of saved tensors to the names that the tensors have on this rank.

    In the file, the name of a scale tensor ends with the slice of its parameter, as in
    `@0:128,0:64`. If this rank has a different slice of the parameter, the tensor is left out.
    `places` maps parameters to the slices that this rank has.
    """
    own_names = {}
    for written_as in keys:
        name = written_as.partition("@")[0]
        if not is_scales(name):
            own_names[written_as] = written_as
        elif name.rsplit("/", 1)[0] in places and written_as == _append_slice(name, places):
            own_names[written_as] = name
    return own_names


def _append_slice(key: str, places: Mapping[str, Slice]) -> str:
    place = places[key.rsplit("/", 1)[0]]
    return f"{key}@{','.join(f'{part.start}:{part.stop}' for part in place)}"


FUSED = ("cuda", "cpu")
# elements updated at once if states or new values are copied while others are updated
BUCKET = 2**24
Updated = Callable[[Sequence[nn.Parameter]], None]
FIRST_SCALE = 2.0**16
GROWTH_INTERVAL = 2000  # steps without overflow until the loss scale of float16 doubles

CLIP_EPS = 1e-6  # added to the norm, as in `torch.nn.utils.clip_grads_with_norm_`


def compute_learning_rate(spec: OptimizerSpec, schedule: Schedule, step: int) -> float:
    """Return the learning rate of optimizer step `step`, where the first step is 0.

    The warm-up is linear and reaches the peak rate on its last step, so that no step has rate 0
    (`transformers` starts at 0). After the warm-up, a constant schedule keeps the peak rate. Other
    schedules fall towards `last_lr`, which they would reach one step after the run's last step, as
    in `transformers`. The schedule `rsqrt` has the peak rate during the warm-up, and then falls with
    the root of the step, to `last_lr` at least (Chowdhery et al. 2022, arXiv:2204.02311, section 5).
    """
    if spec.lr_scheduler_type == "rsqrt":
        first = max(schedule.warmup_steps, 1)
        return max(spec.last_lr, spec.peak_lr * math.sqrt(first / max(step, first)))
    if step < schedule.warmup_steps:
        return spec.peak_lr * (step + 1) / schedule.warmup_steps
    decay_steps = schedule.total_steps - schedule.warmup_steps
    progress = min((step - schedule.warmup_steps) / decay_steps, 1.0) if decay_steps > 0 else 1.0
    if spec.lr_scheduler_type == "constant":
        return spec.peak_lr
    if spec.lr_scheduler_type == "linear":
        share = 1.0 - progress
    else:
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    return spec.last_lr + (spec.peak_lr - spec.last_lr) * share


def list_decayed_names(network: nn.Module) -> frozenset[str]:
    """Return the canonical names of the parameters with weight decay.

    These are all tensors with two or more dimensions except embeddings. Norms and biases have one
    dimension. A head that is tied to the embedding is the same parameter, so it isn't decayed
    either.
    """
    embeddings = list_embedding_names(network)
    return frozenset(
        name
        for name, part in find_canonical_parameters(network).items()
        if part.data.dim() >= 2 and name not in embeddings
    )


def list_embedding_names(network: nn.Module) -> frozenset[str]:
    """Return the canonical names of embeddings, and of heads tied to an embedding."""
    parameter_ids = set()
    for module in network.modules():
        if isinstance(module, nn.Embedding):
            for parameter in module.parameters(recurse=False):
                parameter_ids.add(id(parameter))
    return frozenset(
        name
        for name, part in find_canonical_parameters(network).items()
        if id(part.parameter) in parameter_ids
    )


def make(
    spec: OptimizerSpec,
    names: Mapping[nn.Parameter, str],
    embeddings: Collection[nn.Parameter],
    trained: Iterable[StoredParameter],
    decayed: Collection[nn.Parameter],
) -> torch.optim.Optimizer:
    """Return the torch optimizer for `spec`; `names` maps each parameter to its name.

    `sgd` uses `beta1` as its momentum (0 is plain SGD); `lion` and `palm` use both betas. States of
    `embeddings` are never stored in 8 bits. `trained` has the canonical parameters, whose sizes
    `palm` measures, and `decayed` the parameters with weight decay, which `palm` applies itself.
    """
    parameters = list(names)
    fused = parameters[0].device.type in FUSED
    betas = (spec.beta1, spec.beta2)
    if spec.state_dtype != "float32":
        spec.check_library()
        return build_narrow_adamw(
            spec.state_dtype, names, embeddings, spec.peak_lr, betas, spec.eps
        )
    if spec.type == "adamw":
        return AdamW(
            parameters, lr=spec.peak_lr, betas=betas, eps=spec.eps, weight_decay=0.0, fused=fused
        )
    if spec.type == "lion":
        return Lion(parameters, lr=spec.peak_lr, betas=betas)
    if spec.type == "palm":
        return PalmOptimizer(trained, decayed, spec.peak_lr, betas, spec.weight_decay)
    return SGD(parameters, lr=spec.peak_lr, momentum=spec.beta1, fused=fused)


class Optimizer:
    """Optimizer of one role's trained parameters.

    In saved states, parameters have their canonical names, regardless of how the network stores
    them. `steps` is the number of steps taken.

    The state can be offloaded to host memory. The next step then fetches it in buckets (groups of
    parameters): the state of one bucket is copied while the parameters of the previous one are
    updated.

    Gradients in float16 underflow below 6e-8. For a float16 network, the loss must be multiplied by
    `loss_scale` before the backward pass. `collect_gradients` divides the gradients by it, and
    `handle_overflow` halves it (Micikevicius et al. 2017, arXiv:1710.03740).

    Args:
        spec: Options of the optimizer.
        schedule: Lengths of the phases of the learning-rate schedule.
        trained: Stored parameters by canonical name.
        decay: Names of the parameters with weight decay.
        embeddings: Names of the embedding parameters, whose states are never stored in 8 bits.
        scaled: True if the loss is scaled, as a float16 network needs.
        lane: Queue for copies between device and host, needed to offload the state.
        updated: Function that is called with the parameters of each bucket after their update. It
            can copy their values to the device while the next bucket is updated.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        schedule: Schedule,
        trained: Mapping[str, StoredParameter],
        decay: Iterable[str],
        *,
        embeddings: Collection[str] = (),
        scaled: bool = False,
        lane: CopyQueue | None = None,
        updated: Updated | None = None,
    ) -> None:
        self.spec = spec
        self.schedule = schedule
        self.steps = 0
        self.attempts = 0  # number of minibatches, skipped ones included; seeds the dropout masks
        self.loss_scale = FIRST_SCALE if scaled else 1.0
        self._calm_steps = 0
        self._scaled = scaled
        self._trained = dict(trained)
        names: dict[nn.Parameter, str] = {}
        for name, part in self._trained.items():
            names.setdefault(part.parameter, name)
        self._parameters = list(names)
        shrink = set(decay)
        self._decayed = list(
            dict.fromkeys(part.parameter for name, part in self._trained.items() if name in shrink)
        )
        self._optimizer = make(
            spec,
            names,
            [self._trained[name].parameter for name in embeddings if name in self._trained],
            self._trained.values(),
            self._decayed,
        )
        self._lane = lane
        self._updated = updated
        self._buckets = _split_buckets(self._parameters)
        self._memory: HostMemory | None = None  # copies of the state; set by the first `offload`
        self._held: list[list[Tensor]] = []  # tensors in `_memory`, by bucket

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return compute_learning_rate(self.spec, self.schedule, self.steps)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Stored parameters that the optimizer updates."""
        return self._parameters

    def collect_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of all masters that have one, by canonical name.

        The gradients are first divided by the loss scale in place, so this must be called only once
        per step.
        """
        if self._scaled:
            torch._foreach_div_(
                [p.grad for p in self._parameters if p.grad is not None], self.loss_scale
            )
        gradients: dict[str, Tensor] = {}
        for name, part in self._trained.items():
            if part.grad is not None:
                gradients[name] = part.grad
        return gradients

    def step(self, norm: Tensor) -> None:
        """Clip the gradients, apply weight decay and update the masters.

        `norm` is the norm of the gradient before clipping to `max_grad_norm`. Weight decay is
        decoupled for every update rule (Loshchilov & Hutter 2017, arXiv:1711.05101): it multiplies
        parameters by 1 - learning rate * `weight_decay`, or by PaLM's own factor.
        """
        if self.spec.max_grad_norm > 0.0:
            self._clip(norm)
        rate = self.learning_rate
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        if self.spec.weight_decay > 0.0 and not isinstance(self._optimizer, PalmOptimizer):
            shrunk: list[Tensor] = [p for p in self._decayed if p.grad is not None]
            if shrunk:
                with torch.no_grad():
                    torch._foreach_mul_(shrunk, 1.0 - rate * self.spec.weight_decay)
        self._update()
        self.steps += 1
        self._calm_steps += 1
        if self._scaled and self._calm_steps == GROWTH_INTERVAL:
            self.loss_scale = 2.0 * self.loss_scale
            self._calm_steps = 0

    def _update(self) -> None:
        """Update all trained parameters.

        If the state is offloaded, or if new values have to be copied to the device, the parameters
        are updated one bucket at a time, so that copying overlaps with the updates.
        """
        if self._memory is not None and self._memory.is_offloaded:
            memory = self._memory
        else:
            memory = None
        if memory is None and self._updated is None:
            self._optimizer.step()
            return
        (group,) = self._optimizer.param_groups
        try:
            for number, bucket in enumerate(self._buckets):
                if memory is not None:
                    memory.fetch(*range(number, min(number + 2, len(self._buckets))))
                    memory.make_device_wait(number)
                group["params"] = bucket
                self._optimizer.step()
                if self._updated is not None:
                    self._updated(bucket)
        finally:
            group["params"] = self._parameters

    def _clip(self, norm: Tensor) -> None:
        """Clip the gradients to `max_grad_norm`; `norm` is their norm before clipping.

        If AdamW runs on a GPU, this only sets the number by which AdamW will divide the gradients
        when it reads them. This saves a pass over the gradients.
        """
        if isinstance(self._optimizer, AdamW) and self._parameters[0].device.type == "cuda":
            self._optimizer.grad_scale = clip_divisor(norm, self.spec.max_grad_norm)  # type: ignore[attr-defined]
        else:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self.spec.max_grad_norm, norm)

    def handle_overflow(self) -> bool:
        """Halve the loss scale after a gradient overflow, and return whether it was halved.

        It is not halved if the loss isn't scaled, or if the scale can't be reduced further.
        """
        if not self._scaled or self.loss_scale <= 1.0:
            return False
        self.loss_scale = self.loss_scale / 2.0
        self._calm_steps = 0
        return True

    def zero_grad(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    # -- state

    def collect_tensors(self) -> dict[str, Tensor]:
        """Return the state tensors, named `{parameter}/{slot}`.

        A slot is one tensor of a parameter's state, such as `exp_avg`. Before the first step, the
        result is empty.
        """
        return to_named_tensors(
            self._trained, {p: self._encode_state(p) for p in self._parameters}, BLOCK
        )

    def _encode_state(self, parameter: nn.Parameter) -> State:
        """Return a parameter's state in the form in which it is saved."""
        state: Mapping[str, object] = self._optimizer.state.get(parameter, {})
        values = {}
        for slot, value in state.items():
            if isinstance(value, Tensor):
                # While a tensor is offloaded, its values are in host memory.
                on_host = None if self._memory is None else self._memory.on_host(value)
                values[slot] = value if on_host is None else on_host
        optimizer = self._optimizer
        if values and isinstance(optimizer, NarrowAdamW):
            return optimizer.encode_state(parameter, values)
        return values

    def collect_values(self) -> dict[str, float]:
        """Return the state that consists of plain numbers, such as the step count."""
        return {
            "steps": self.steps,
            "attempts": self.attempts,
            "loss_scale": self.loss_scale,
            "calm_steps": self._calm_steps,
        }

    def load(self, tensors: Mapping[str, Tensor], values: Mapping[str, float]) -> None:
        """Load the results of `collect_tensors` and `collect_values`, bit for bit.

        Raises `CheckpointError` for an unknown parameter.
        """
        if unknown := [
            name for name in (key.rsplit("/", 1)[0] for key in tensors) if name not in self._trained
        ]:
            raise CheckpointError(
                f"the optimizer state contains {unknown[0]!r}, which this role does not train"
            )
        self._memory = None  # offloaded state is replaced, not fetched
        self._optimizer.state.clear()
        for parameter, saved in from_named_tensors(self._trained, tensors, BLOCK).items():
            self._optimizer.state[parameter] = self._decode_state(parameter, saved)
        self.steps = int(values["steps"])
        self.attempts = int(values["attempts"])
        self._calm_steps = int(values["calm_steps"])
        self.loss_scale = float(values["loss_scale"])

    def _decode_state(self, parameter: nn.Parameter, saved: State) -> State:
        """Return a parameter's state from its saved form, which may have other dtypes."""
        if isinstance(self._optimizer, NarrowAdamW):
            return self._optimizer.decode_state(parameter, saved)
        slot_values = {}
        for slot, value in saved.items():
            if not is_scales(slot):
                slot_values[slot] = value
        steps = {}
        for slot, value in slot_values.items():
            if not value.dim():
                steps[slot] = value.clone()
        if self._optimizer.defaults.get("fused"):
            steps = {slot: value.to(parameter.device) for slot, value in steps.items()}
        return {
            **{
                slot: value.to(parameter, copy=True)
                for slot, value in slot_values.items()
                if value.dim()
            },
            **steps,
        }

    def offload(self) -> None:
        """Move the state to host memory, except the step counters."""
        if self._lane is None or not self._lane.has_separate_memory:
            return
        slots = []
        for bucket in self._buckets:
            slots.append([self._optimizer.state.get(parameter, {}) for parameter in bucket])
        held = []
        for states in slots:
            tensors = []
            for state in states:
                for value in state.values():
                    if isinstance(value, Tensor) and value.dim():
                        tensors.append(value)
            held.append(tensors)
        # Tensors are compared by identity: new ones need new host memory.
        ids = [[*map(id, tensors)] for tensors in held]
        if self._memory is None or ids != [[*map(id, tensors)] for tensors in self._held]:
            self.fetch()
            self._memory = HostMemory(held, self._lane)
            self._held = held
        self._memory.offload()

    def fetch(self) -> None:
        """Start fetching the state to the device now, instead of during the next step."""
        if self._memory is not None:
            self._memory.fetch()
            self._memory.make_device_wait()


def clip_divisor(norm: Tensor, most: float) -> Tensor:
    """Return the number by which to divide a gradient of norm `norm` to clip its norm to `most`.

    The result is at least 1.
    """
    return ((norm.float() + CLIP_EPS) / most).clamp(min=1.0)


def _split_buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Split parameters, in order, into buckets of up to `BUCKET` elements.

    A larger parameter is in a bucket by itself.
    """
    buckets: list[list[nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        if not buckets or parameter.numel() > room:
            buckets.append([])
            room = BUCKET
        buckets[-1].append(parameter)
        room -= parameter.numel()
    return buckets
