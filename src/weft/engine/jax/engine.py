"""Engine for the network of one role on JAX devices, which can belong to several processes.

The engine computes the same results as `weft.engine.torch`. The network is wrapped in a torch
module, whose forward and backward passes are functions compiled by JAX, so that the training step,
the losses and the conversion of outputs are shared with the torch engine. The outputs, a few
numbers per token, are copied to the host, where torch computes the loss and its gradients with
respect to the outputs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array
from torch import Tensor, nn

from weft.algorithms.base import Loss, Output
from weft.data.sample import SequenceSample
from weft.engine import checkpoint
from weft.engine.base import DEFAULT_MAX_TOKENS, Generator, StepStats
from weft.engine.collectives import LocalCollectives
from weft.engine.device import BestMatmulRate
from weft.engine.generation.generate import open_generator
from weft.engine.jax.decoder import DecoderSettings
from weft.engine.jax.generation import CompiledDecoder, choose_budget
from weft.engine.jax.hosts import find_shared_folder, wait_for_all_hosts
from weft.engine.jax.mesh import put_on_mesh
from weft.engine.jax.network import compute_outputs
from weft.engine.jax.optimizer import JaxOptimizer
from weft.engine.jax.packing import BlockShapes, RowBlock, pack_blocks
from weft.engine.jax.parameters import (
    HostTensors,
    ParameterStacks,
    StoredArray,
    read_on_first_host,
    to_numpy,
    to_torch,
    write_on_first_host,
    write_own_shards,
)
from weft.engine.spec import GenerationSpec, ModelSpec
from weft.engine.torch.engine import (
    OPTIMIZER,
    PARAMETERS,
    STATE,
    BuiltNetwork,
    compute_loss,
    score,
)
from weft.engine.torch.step import OptimizerStep, Veto, require_optimizer
from weft.errors import CheckpointError, ConfigError
from weft.models.network.packed import Packed, SamplingSupport, TopIds
from weft.models.network.transformer import check_outputs
from weft.topology import Layout, Slice, build_whole_slice

HOST = torch.device("cpu")
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float64": jnp.float64}
T = TypeVar("T")


def find_devices(name: str | None) -> list[Any]:
    """Return the JAX devices for a torch device name; None selects JAX's default kind.

    If the name has an index, such as `cuda:1`, only this device is returned. Raises `ConfigError`
    if JAX has no such device.
    """
    # By default, JAX allocates most of a GPU's memory at once, but torch roles may share the GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    kind, _, index = (name or "").partition(":")
    platform = {"": None, "cuda": "gpu"}.get(kind, kind)
    try:
        devices = jax.devices(platform)
    except RuntimeError as error:
        raise ConfigError(
            f"device={name}: jax has no such device here ({str(error).splitlines()[0]}); install "
            f"jax for it, or write another device"
        ) from error
    if not index:
        return list(devices)
    chosen = [device for device in devices if str(device.id) == index]
    if not chosen:
        raise ConfigError(
            f"device={name}: jax has {len(devices)} devices of this kind here, from 0"
        )
    return chosen


def allow_dtype(name: str) -> None:
    """Enable float64 in JAX if the dtype requires it; this affects the whole process."""
    if name == "float64":
        jax.config.update("jax_enable_x64", True)


class JaxNetwork(nn.Module):
    """Network whose passes are functions compiled by JAX; it is called like `Transformer`.

    Attributes:
        arrays: Values of the parameters by the name of their array (`ParameterStacks`).
        anchor: Unused parameter that makes autograd compute the gradients of the outputs.
        add_gradients: Function that is called in each backward pass. Its argument is a function
            that adds the pass's gradients to the summed gradients, which are a dict by array name.
        decoder: Architecture, and settings of the computation.
        config: Architecture, from `decoder`.
        vocab_size: Number of tokens in the vocabulary.
        compiled: Compiled functions for generation.
    """

    def __init__(
        self,
        decoder: DecoderSettings,
        stacks: ParameterStacks,
        arrays: dict[str, Array],
        padding: int | None,
        longest: int | None = None,
    ) -> None:
        super().__init__()
        wide = torch.float64 if decoder.wide == jnp.float64 else torch.float32
        self.anchor = nn.Parameter(torch.zeros((), dtype=wide))
        self.arrays = arrays
        self.add_gradients: Callable[[Callable[[Any], Any]], None] | None = None
        self.decoder = decoder
        self.config = decoder.config
        self.vocab_size = decoder.config.vocab_size
        self._padding = padding
        self._longest = longest
        # Block shapes by kind of pass: ((outputs, whether sampling limits are set), whether the
        # pass has gradients).
        self._shapes: dict[tuple[tuple[frozenset[Output], bool], bool], BlockShapes] = {}
        self._trained = sorted(stacks.trained)

        def compute(*inputs: Any, **static: Any) -> Any:
            with jax.default_matmul_precision(decoder.matmul_precision):
                return compute_outputs(*inputs, decoder=decoder, **static)

        self.compiled = CompiledDecoder(decoder, lambda: self.arrays, longest)
        self._compute = jax.jit(compute, static_argnames=("want", "top"))

        def compute_with_vjp(
            trained: dict[str, Array], frozen: dict[str, Array], *inputs: Any, **static: Any
        ) -> Any:
            def compute_trained(trained: dict[str, Array]) -> Any:
                return compute({**frozen, **trained}, *inputs, **static)

            return jax.vjp(compute_trained, trained)

        def add_vjp(vjp: Any, gradients: Any, sums: dict[str, Array]) -> dict[str, Array]:
            return jax.tree.map(jnp.add, sums, vjp(gradients)[0])

        self._compute_with_vjp = jax.jit(compute_with_vjp, static_argnames=("want",))
        shardings = {name: arrays[name].sharding for name in self._trained}
        self._add_vjp = jax.jit(add_vjp, donate_argnums=2, out_shardings=shardings)

    @property
    def prefix_tokens(self) -> int:
        """0, because the engine does not support trained prefixes."""
        return 0

    @property
    def output_matrix(self) -> None:
        """None, because the matrix is not a torch tensor."""
        return None

    def next_token_logits(self, hidden_rows: Tensor, wide: Tensor | None = None) -> Tensor:
        """Return the logits [R, V] of hidden states [R, hidden]; `wide` is ignored."""
        return self.compiled.compute_next_logits(to_numpy(hidden_rows))

    def can_share_prefixes(self, longest: int, on: torch.device | None = None) -> bool:
        """Return False, because each sequence is computed as a whole."""
        return False

    def forward(
        self,
        x: Packed,
        want: frozenset[Output],
        temperature: float = 1.0,
        support: SamplingSupport | None = None,
    ) -> dict[Output, Tensor]:
        """Return the outputs `want` in host memory, as `Transformer.forward` does."""
        check_outputs(self.decoder.head, want)
        top = x.ids if isinstance(x.ids, TopIds) else None
        has_gradients = bool(self._trained) and torch.is_grad_enabled()
        # In an evaluation, use the passes compiled for training if there are any.
        kind = want, support is not None
        was_trained = (kind, True) in self._shapes and (kind, False) not in self._shapes
        computes_vjp = has_gradients or was_trained
        if (kind, computes_vjp) not in self._shapes:
            self._shapes[kind, computes_vjp] = BlockShapes(self._longest, self.decoder)
        shapes = self._shapes[kind, computes_vjp]
        blocks = []
        for block in pack_blocks(x, self.decoder, self._padding, shapes, support):
            rows = put_on_mesh(block.rows, self.decoder.row_sharding)
            blocks.append(replace(block, rows=rows))
        if has_gradients:
            assert top is None, "the likeliest ids have no gradients"
            names = sorted(want)
            values = _JaxPass.apply(self.anchor, self, blocks, temperature, names)
            return dict(zip(names, values, strict=True))
        parts = []
        for block in blocks:
            if computes_vjp:
                outputs, _ = self.compute_with_vjp(block, temperature, want)
            else:
                divisor = np.asarray(temperature, self.decoder.wide)
                inputs = (self.arrays, block.rows, block.reads, divisor)
                outputs = self._compute(*inputs, want=want, top=top)
            parts.append(outputs)
        return _join_outputs(blocks, parts)

    def compute_with_vjp(
        self, block: RowBlock, temperature: float, want: frozenset[Output]
    ) -> tuple[dict[Output, Array], Any]:
        """Return the outputs, and the function from their gradients to the arrays' gradients."""
        trained: dict[str, Array] = {}
        frozen: dict[str, Array] = {}
        for name, value in self.arrays.items():
            (trained if name in self._trained else frozen)[name] = value
        outputs, vjp = self._compute_with_vjp(
            trained,
            frozen,
            block.rows,
            block.reads,
            np.asarray(temperature, self.decoder.wide),
            want=want,
        )
        return outputs, vjp

    def run_backward(self, vjp: Any, gradients: dict[Output, Array]) -> None:
        """Add the gradients of a pass to the sums.

        `vjp` is the second result of `compute_with_vjp`, and `gradients` are the gradients with
        respect to its outputs.
        """
        assert self.add_gradients is not None, "a frozen role has no backward pass"
        self.add_gradients(lambda sums: self._add_vjp(vjp, gradients, sums))


def _join_outputs(
    blocks: Sequence[RowBlock], parts: Sequence[Mapping[Output, Array]]
) -> dict[Output, Tensor]:
    """Return the outputs of a micro-batch in host memory; `parts` are the outputs of its blocks."""
    total = sum(len(block.outputs) for block in blocks)
    joined: dict[Output, Tensor] = {}
    for block, outputs in zip(blocks, parts, strict=True):
        for key, value in outputs.items():
            used = to_torch(value)[: len(block.outputs)]
            if key not in joined:
                joined[key] = used.new_zeros(total, *used.shape[1:])
            joined[key][block.outputs] = used
    return joined


class _JaxPass(torch.autograd.Function):
    """Autograd function around a forward and a backward pass of JAX.

    The gradients of the parameters are not returned, but passed to the network's `add_gradients`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        network: JaxNetwork,
        blocks: list[RowBlock],
        temperature: float,
        names: list[Output],
    ) -> tuple[Tensor, ...]:
        want = frozenset(names)
        passes = [network.compute_with_vjp(block, temperature, want) for block in blocks]
        ctx.network = network
        ctx.names = names
        ctx.passes = []
        for block, (outputs, vjp) in zip(blocks, passes, strict=True):
            layouts = {name: (value.shape, value.dtype) for name, value in outputs.items()}
            ctx.passes.append((block.outputs, layouts, vjp))
        joined = _join_outputs(blocks, [outputs for outputs, _ in passes])
        return tuple(joined[name] for name in names)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        for indices, layouts, vjp in ctx.passes:
            block_gradients: dict[Output, Any] = {}
            for name, gradient in zip(ctx.names, gradients, strict=True):
                block_gradients[name] = np.zeros(*layouts[name])
                if gradient is not None:
                    block_gradients[name][: len(indices)] = gradient[indices].numpy()
            ctx.network.run_backward(vjp, block_gradients)
        return None, None, None, None, None


class _JaxCollectives(LocalCollectives):
    """Collectives of a role whose processes all have the same batch, so nothing is exchanged.

    The gradient norm is computed from JAX's gradients, which torch does not have.
    """

    def __init__(self, optimizer: JaxOptimizer | None) -> None:
        self._optimizer = optimizer

    def compute_gradient_norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        assert self._optimizer is not None
        return self._optimizer.compute_norm()


class JaxEngine:
    """Implementation of `weft.engine.base.Engine` on a mesh of JAX devices.

    `built` contains a `JaxNetwork`, whose arrays are on the devices. `stacks` has the places of the
    parameters in the arrays, and `decayed` has the names of the arrays with weight decay.
    """

    def __init__(
        self,
        built: BuiltNetwork,
        stacks: ParameterStacks,
        spec: ModelSpec,
        layout: Layout,
        decayed: frozenset[str],
    ) -> None:
        network = built.network
        assert isinstance(network, JaxNetwork)
        self.layout = layout
        self.version = 0
        self._network = network
        self._stacks = stacks
        self._spec = spec
        self._built = built
        self._checked: list[Loss] = []  # losses whose `by_row` declaration was verified
        self._is_written = False  # True if frozen weights have changed since they were read
        devices = next(iter(network.arrays.values())).sharding.device_set
        self._rate = BestMatmulRate(lambda: _measure_matmul_rate(spec, devices))
        self._optimizer: JaxOptimizer | None = None
        if spec.trained:
            assert spec.schedule is not None, "the runtime gives every trained role a schedule"
            self._optimizer = JaxOptimizer(
                spec.optimizer, spec.schedule, stacks, network.arrays, decayed
            )
            network.add_gradients = self._optimizer.add_gradients
        self._collectives = _JaxCollectives(self._optimizer)

    # -- scoring and training

    def forward(
        self,
        batch: SequenceSample,
        want: frozenset[Output],
        *,
        temperature: float = 1.0,
        top: TopIds | None = None,
        max_tokens: int = DEFAULT_MAX_TOKENS,
    ) -> SequenceSample:
        """Return the outputs named in `want` for each id, as `TorchEngine.forward` does."""
        return score(
            self._network,
            self._collectives,
            HOST,
            batch,
            want,
            temperature=temperature,
            top=top,
            max_tokens=max_tokens,
        )

    def train(
        self,
        minibatches: Sequence[SequenceSample],
        loss: Loss,
        *,
        veto: Veto | None = None,
        temperature: float = 1.0,
        max_tokens: int = DEFAULT_MAX_TOKENS,
    ) -> list[StepStats]:
        """Run one optimizer step for each minibatch, as `TorchEngine.train` does."""
        step = OptimizerStep(
            self._network,
            require_optimizer(self._optimizer),
            self._collectives,
            HOST,
            self._built.cost,
            max_tokens,
            self._spec.on_nonfinite,
            temperature,
            self._rate,
            self._checked,
        )
        done = [step(minibatch, loss, veto) for minibatch in minibatches]
        self.version += 1
        return done

    def evaluate(
        self,
        batch: SequenceSample,
        loss: Loss,
        *,
        temperature: float = 1.0,
        max_tokens: int = DEFAULT_MAX_TOKENS,
    ) -> dict[str, float]:
        """Return the value of `loss` under the key "loss", and the metrics of its `summary`."""
        outputs = self.forward(batch, loss.outputs, temperature=temperature, max_tokens=max_tokens)
        return compute_loss(self._collectives, batch, outputs, loss)

    @contextmanager
    def generating(self, spec: GenerationSpec) -> Iterator[Generator]:
        """Open a generator with continuous batching on the current weights.

        The caller must have set `spec.tokenizer` and `spec.stop_ids`.
        """
        network = self._network
        devices = list(next(iter(network.arrays.values())).sharding.device_set)
        with open_generator(
            network,
            spec,
            device=HOST,
            version=self.version,
            eos_ids=(),
            budget=choose_budget(network.decoder, devices, spec.kv_cache_gb),
            reusable_caches=network.compiled,
        ) as generator:
            yield generator

    def gather(self, own: T) -> list[T]:
        """Return a list with only `own`, because all processes of the role have the same value."""
        return [own]

    # -- parameters

    @property
    def trained_names(self) -> frozenset[str]:
        """Names of the parameters that are trained."""
        if not self._spec.trained:
            return frozenset()
        places = self._stacks.places.items()
        return frozenset(name for name, place in places if place.array in self._stacks.trained)

    def slices(self) -> Mapping[str, Slice]:
        """Return the slice of each parameter that this engine stores: the whole parameter."""
        slices = {}
        for name, place in self._stacks.places.items():
            shape = self._network.arrays[place.array].shape
            slices[name] = build_whole_slice(shape if place.index is None else shape[1:])
        return slices

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Slice, Tensor]]:
        """Iterate over parameters, as (name, whole slice, values in host memory)."""
        slices = self.slices()
        for name, values in self._stacks.read(self._network.arrays, names):
            yield name, slices[name], values

    def write(
        self, parts: Iterable[tuple[str, Slice, Any]], *, version: int, eta: float = 1.0
    ) -> None:
        """Set each parameter to eta * value + (1 - eta) * parameter, computed in float32.

        `parts` contains (name, slice, values) of each parameter, and `version` is the version of
        the new weights. Raises `ConfigError` for unknown names.
        """
        parts = list(parts)
        for name, _, _ in parts:
            if name not in self._stacks.places:
                raise ConfigError(f"this network has no parameter {name!r}")
        self._network.arrays.update(self._stacks.replace(self._network.arrays, parts, eta))
        self._is_written = True
        self.version = version

    def offload(self, what: Literal["weights", "optimizer"]) -> None:
        """Do nothing, because `weft.engine.backends.jax` refuses the option `offload`."""

    def onload(self, what: Literal["weights", "optimizer"]) -> None:
        """Do nothing, because `weft.engine.backends.jax` refuses the option `offload`."""

    # -- on disk

    def save_state(self, directory: Path) -> None:
        """Write the state needed to resume training, in the format of `TorchEngine.save_state`.

        If all hosts share the directory, each host writes the shards of its own devices. Otherwise,
        the first host writes one tensor after the other, and the other hosts take part in gathering
        each tensor.
        """
        values: dict[str, Any] = {"version": self.version}
        names = self._stacks.places if self._is_written else self.trained_names
        tensors = {PARAMETERS: self._select(names)}
        if self._optimizer is not None:
            tensors[OPTIMIZER] = self._optimizer.select_tensors()
            values["optimizer"] = self._optimizer.collect_values()
        folder = find_shared_folder(directory)
        if folder is None:
            for stem, stored in tensors.items():
                write_on_first_host(directory / f"{stem}.safetensors", HostTensors(stored))
        else:
            with wait_for_all_hosts(f"{folder}: a host could not write its part"):
                for stem, stored in tensors.items():
                    write_own_shards(folder, stem, stored)
        if jax.process_index() == 0:
            checkpoint.write_values(directory / STATE, values)

    def load_state(self, directory: Path) -> None:
        """Load a state that this engine or `TorchEngine` wrote.

        Raises `CheckpointError` if the state is damaged or belongs to another kind of role.
        """
        values = checkpoint.read_values(directory / STATE, trained=self._optimizer is not None)
        saved = checkpoint.SavedTensors(directory, PARAMETERS)
        slices = self.slices()
        for name in saved.names:
            if name not in slices:
                raise CheckpointError(f"{directory}: the state has {name!r}, which this role lacks")
        for name in sorted(self.trained_names - set(saved.names)):
            raise CheckpointError(f"{directory}: the state lacks {name!r}, which this role trains")
        self._is_written = not self.trained_names.issuperset(saved.names)
        keys = {name: name for name in saved.names}
        self._stacks.load(self._network.arrays, keys, lambda name: saved.read(name, slices[name]))
        if self._optimizer is not None:
            state = checkpoint.SavedTensors(directory, OPTIMIZER)

            def read(key: str) -> Tensor:
                return state.read(key, slices.get(key.rsplit("/", 1)[0]))

            self._optimizer.load(state.names, read, values["optimizer"])
        self.version = values["version"]

    def save_model(self, directory: Path, tokenizer: Any) -> None:
        """Write a Hugging Face directory that `transformers` can load, in the role's dtype.

        The first process writes one tensor after the other, and the others take part in gathering
        each tensor.
        """
        with read_on_first_host(HostTensors(self._select(self._stacks.places))) as tensors:
            if tensors is not None:
                self._built.save(directory, tensors, tokenizer)

    def _select(self, names: Iterable[str]) -> dict[str, StoredArray]:
        """Return the stored values of parameters, sorted by name, so that all hosts agree."""
        arrays = self._network.arrays
        return {name: self._stacks.select(arrays, name) for name in sorted(names)}

    @property
    def description(self) -> Mapping[str, Any]:
        """Facts about the network, under the same keys as in `TorchEngine.description`."""
        arrays = self._network.arrays
        total = sum(math.prod(value.shape) for value in arrays.values())
        trained = sum(math.prod(arrays[name].shape) for name in self._stacks.trained)
        devices: Collection[Any] = next(iter(arrays.values())).sharding.device_set
        first = min(devices, key=lambda device: device.id)
        return {
            **self._built.facts,
            "num_parameters": total,
            "num_trainable": trained,
            "held_parameters": total,
            "held_trainable": trained,
            "flops_per_token": self._built.cost.flops_per_token,
            "dtype": self._spec.dtype,
            "device": str(first) if len(devices) == 1 else f"{len(devices)} x {first.platform}",
            "notes": list(self._built.notes),
        }


def _measure_matmul_rate(spec: ModelSpec, devices: Collection[Any]) -> float:
    """Return the rate of large matrix products on all devices, in operations per second.

    The products are in the role's dtype. Only one device is measured, and its rate is multiplied by
    the number of devices.
    """
    local = [device for device in devices if device.process_index == jax.process_index()]
    first = min(local, key=lambda device: device.id)
    size = 1024 if first.platform == "cpu" else 8192
    values = np.random.default_rng(0).standard_normal((size, size))
    x = jax.device_put(values.astype(DTYPES[spec.dtype or "float32"]), first)
    product = jax.jit(lambda x: x @ x)
    product(x).block_until_ready()
    best = math.inf
    for _ in range(3):
        start = perf_counter()
        product(x).block_until_ready()
        best = min(best, perf_counter() - start)
    return len(devices) * 2.0 * size**3 / best
