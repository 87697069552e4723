"""Engine for the network of one role on one torch device.

It scores, trains and generates, and reads and writes the network's parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from weft.algorithms.base import Loss, Output, reduce_stats
from weft.data.sample import SequenceSample
from weft.engine import checkpoint
from weft.engine.base import DEFAULT_MAX_TOKENS, Generator, StepStats
from weft.engine.collectives import Collectives, LocalCollectives
from weft.engine.device import (
    BestMatmulRate,
    TokenCost,
    choose_flash,
    keep_sums_wide,
    measure_matmul_rate,
)
from weft.engine.generation.caches import ReusablePageCaches
from weft.engine.generation.generate import open_generator
from weft.engine.generation.passes import Decoder
from weft.engine.rows import PackLayout, SampleRows, join_results, split_batch
from weft.engine.spec import GenerationSpec, ModelSpec
from weft.engine.torch import optimizer
from weft.engine.torch.adapters_off import BaseWeightsEngine
from weft.engine.torch.master_weights import MasterWeights
from weft.engine.torch.optimizer import Optimizer, list_decayed_names, list_embedding_names
from weft.engine.torch.prepare import PassSettings, ScoringProcessor
from weft.engine.torch.step import (
    NO_AUX_LOSS,
    AuxLoss,
    MinibatchSums,
    OptimizerStep,
    Veto,
    require_optimizer,
    to_plain_stats,
)
from weft.kernels import build_copy_queue
from weft.models.network import transformer
from weft.models.network.linear import StoredParameter
from weft.models.network.moe import MoE
from weft.models.network.packed import TopIds
from weft.topology import Layout, Slice

if TYPE_CHECKING:
    from weft.parallel.shard import LocalShards

What = Literal["weights", "optimizer"]
HOST = torch.device("cpu")
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
PARAMETERS = "parameters"
OPTIMIZER = "optimizer"
STATE = "state.json"
T = TypeVar("T")


def choose_dtype(spec: ModelSpec) -> str:
    """Return `spec.dtype`, after checking that it is set.

    The backend must have chosen the dtype before this call.
    """
    assert spec.dtype is not None, "a backend settles the dtype first"
    return spec.dtype


def _build_empty_sample(want: frozenset[Output]) -> SequenceSample:
    """Return a sample with the keys `want` but no ids, for a rank without a part of the batch."""
    return SequenceSample.from_groups(
        [], {key: [] for key in want}, {key: torch.empty(0) for key in want}
    )


@torch.no_grad()
def score(
    network: nn.Module,
    collectives: Collectives,
    device: torch.device,
    batch: SequenceSample,
    want: frozenset[Output],
    *,
    temperature: float,
    top: TopIds | None,
    max_tokens: int,
) -> SequenceSample:
    """Return the outputs of a network for each id of a batch, as `TorchEngine.forward` does."""
    settings = PassSettings(want, temperature, extra=1 if "values" in want else 0, top=top)
    parts = split_batch(batch, max_tokens, "sequence")
    work = ScoringProcessor(network, settings, device)
    outputs = []
    for result in collectives.run(network, parts, work, trains=False):
        if result is not None:
            outputs.append(result)
    return join_results(outputs, batch.ids) if outputs else _build_empty_sample(want)


@torch.no_grad()
def compute_loss(
    collectives: Collectives, batch: SequenceSample, outputs: SequenceSample, loss: Loss
) -> dict[str, float]:
    """Return the loss of a batch and its metrics, as `TorchEngine.evaluate` does.

    `outputs` has the network's outputs for the batch.
    """
    total = collectives.reduce_denominators(loss.denominators(batch))
    sums = MinibatchSums(0.0, [])
    if batch.num_ids:
        layout = PackLayout.from_sample(batch)
        text_keys = []
        for key in ("prompt", "completion", "loss_mask"):
            if key in batch.data:
                text_keys.append(key)
        network = SampleRows(
            batch.select(keys=text_keys).update(outputs), layout, HOST, torch.float32
        )
        out: dict[str, Any] = {name: network[name] for name in loss.outputs}
        value, stats = loss(out, SampleRows(batch, layout, HOST, torch.float32), total)
        sums = MinibatchSums(float(value), to_plain_stats([stats]))
    joined = MinibatchSums.join(collectives.gather_values(sums))
    return {"loss": joined.loss, **loss.summary(reduce_stats(joined.stats))}


@dataclass(frozen=True)
class BuiltNetwork:
    """Network that a backend builds from a `ModelSpec`, with the data that the engine needs for it.

    Trained parameters require gradients. They are float32 or wider, unless the role has adapters.
    All other parameters can have the role's dtype.

    Attributes:
        network: Network on the device, called as `network(x: Packed, want, temperature, support) ->
            {output: tensor}`. For generation, it also has the methods `compute_hidden` and
            `next_token_logits`.
        save: Function that saves the model to a Hugging Face directory.
        cost: Computing cost per token.
        facts: Entries for the engine's description, such as the size of the vocabulary.
        dropout: True if any module uses dropout.
        aux_loss: Load-balancing loss of experts.
        adapters_off: Function that returns a context in which adapters are disabled; None if there
            are no adapters.
        notes: Messages to the user about how this network runs.
        part: Description of this rank's part if the network is distributed over ranks, else None.
        blocks: Blocks of the network in the order of the forward pass.
    """

    network: nn.Module
    # called with (directory, parameters by name, tokenizer)
    save: Callable[[Path, Mapping[str, Tensor], Any], None]
    cost: TokenCost
    facts: Mapping[str, Any]  # family, vocab_size, num_layers
    dropout: bool = False  # True if any module uses dropout
    aux_loss: AuxLoss = NO_AUX_LOSS  # load-balancing loss of experts
    # context that disables the adapters; None without adapters
    adapters_off: Callable[[], AbstractContextManager[None]] | None = None
    notes: tuple[str, ...] = ()  # messages to the user about how this network runs
    part: RankShard | None = None  # set if this rank has a part of the network
    blocks: tuple[nn.Module, ...] = ()  # in the order of the forward pass


@dataclass(frozen=True)
class RankShard:
    """One rank's part of a network that is distributed over several ranks.

    Attributes:
        shapes: Full shape of every parameter of the network, by canonical name.
        trained: Names of the trained parameters of the network.
        places: This rank's slice of each parameter.
        make_collectives: Function that creates the rank's `Collectives`.
        shards: Parameters that FSDP2 shards, or None without FSDP2.
        generating: Function that opens the rank's text generator.
    """

    shapes: Mapping[str, tuple[int, ...]]  # full shape of every parameter, by canonical name
    trained: frozenset[str]
    places: Mapping[str, Slice]  # slice of each parameter on this rank
    # called with a function that returns the stored parameters of this rank
    make_collectives: Callable[[Callable[[], Mapping[str, StoredParameter]]], Collectives]
    shards: LocalShards | None
    # Called with the spec, the version of the weights and the KV pages kept between generators.
    generating: Callable[
        [GenerationSpec, int, ReusablePageCaches], AbstractContextManager[Generator]
    ]


def choose_master_device(spec: ModelSpec, device: torch.device) -> torch.device | None:
    """Return the CPU device if master weights and optimizer state are offloaded, else None.

    For a role on a CPU the result is None, because everything is in host memory already.
    """
    return HOST if spec.optimizer.offload and device.type != HOST.type else None


def _list_offload_notes(spec: ModelSpec, device: torch.device) -> tuple[str, ...]:
    """Return a note for each offload option that has no effect because the device is a CPU."""
    offload_options = {
        "optimizer.offload=true": (
            spec.trained and spec.optimizer.offload,
            "masters and optimizer state are",
        ),
        "offload=true": (spec.offload, "weights are"),
    }
    without_effect = []
    for option, (on, state) in offload_options.items():
        if on and device.type == HOST.type:
            without_effect.append((option, state))
    return tuple(
        f"{option}: on a CPU {state} in host memory already; nothing changes"
        for option, state in without_effect
    )


class TorchEngine:
    """Implementation of `weft.engine.base.Engine` for one rank of a layout."""

    def __init__(
        self, built: BuiltNetwork, spec: ModelSpec, layout: Layout, device: torch.device
    ) -> None:
        self.layout = layout
        self.version = 0
        self.notes = (
            *built.notes,
            *_list_offload_notes(spec, device),
            *choose_flash(device, spec.flash_attention),
        )
        self._built = built
        self._spec = spec
        self._device = device
        self._reusable_caches = ReusablePageCaches()
        self._checked: list[Loss] = []  # losses whose `by_row` declaration was verified
        self._network = built.network.eval()
        self._expert_layers = [each for each in self._network.modules() if isinstance(each, MoE)]
        keep_sums_wide(device)
        # Measure in the role's dtype, in which passes compute: a trained network's parameters are
        # still float32 here.
        self._rate = BestMatmulRate(lambda: measure_matmul_rate(device, DTYPES[choose_dtype(spec)]))
        master_device = choose_master_device(spec, device)
        copy_queue = build_copy_queue(device)
        part = built.part
        # A sharded network stays in the masters' dtype, because FSDP2 casts when it gathers.
        dtype = DTYPES[choose_dtype(spec)]
        if part is not None and part.shards is not None:
            dtype = torch.promote_types(dtype, torch.float32)
        self._masters = MasterWeights(
            self._network,
            dtype,
            copy_queue,
            master_device,
            None if part is None else part.places,
            None if part is None else part.shards,
            built.blocks,
        )
        if device.type == "cuda" and master_device is None and layout.pipeline == 1:
            transformer.add_gradients_to(self._network, self._masters.masters)
        if part is None:
            self._collectives: Collectives = LocalCollectives()
        else:
            self._collectives = part.make_collectives(lambda: self._masters.stored_parameters)
        self._optimizer: Optimizer | None = None
        if spec.trained:
            trained = self._masters.trained_parameters
            assert spec.schedule is not None, "the runtime gives every trained role a schedule"
            self._optimizer = Optimizer(
                spec.optimizer,
                spec.schedule,
                trained,
                list_decayed_names(self._network),
                embeddings=list_embedding_names(self._network),
                scaled=spec.dtype == "float16",
                lane=copy_queue if master_device is None else None,
                updated=None if master_device is None else self._masters.start_device_copies,
            )
        if spec.offload:
            self.offload("weights")

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
        """Return the outputs named in `want` for each id, in float32 on the CPU.

        The outputs for a completion of L tokens are:

        - `logprobs`, `entropy`, `top1`: [L]
        - `values`: [L + 1]
        - `scores`: [1]
        - `top_ids`: int32 [L, K], the most likely ids at each token, as requested by `top`
        - `top_logprobs`: [L, K + 1], the log-probs of `top_ids`, and in the last column the
          log-prob of all other ids together
        - `given_logprobs`: [L, K + 1], the same as `top_logprobs`, but for the ids in the batch's
          key `given_ids`, which has K ids per token

        Log-probs are those of softmax(logits / temperature). If the batch has the key `support`,
        the log-probs of labels are normalized only over the ids in `support`. Raises `ConfigError`
        for an output that the head doesn't provide, or for a sequence longer than `max_tokens`.
        """
        self.onload("weights")
        return score(
            self._network,
            self._collectives,
            self._device,
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
        """Run one optimizer step for each minibatch, then increment `version` by one.

        A minibatch is skipped, with the reason in its `StepStats`, if it has no trained tokens, if
        `veto` returns a reason, or if float16 gradients overflow. It is also skipped if its loss or
        gradient is not finite for another reason and the role has `on_nonfinite=skip`; with
        `on_nonfinite=stop`, this raises `NotFinite` with the ids of the samples.
        """
        role_optimizer = require_optimizer(self._optimizer)
        self.onload("weights")
        step = OptimizerStep(
            self._network,
            role_optimizer,
            self._collectives,
            self._device,
            self._built.cost,
            max_tokens,
            self._spec.on_nonfinite,
            temperature,
            self._rate,
            self._checked,
            self._spec.seed if self._built.dropout else None,
            self._built.aux_loss,
            self._expert_layers,
            self._masters.wait_for_copies,
        )
        stats = []
        self._network.train()
        try:
            for minibatch in minibatches:
                stats.append(step(minibatch, loss, veto))
                self._masters.refresh()
        finally:
            self._network.eval()
        self.version += 1
        return stats

    def evaluate(
        self,
        batch: SequenceSample,
        loss: Loss,
        *,
        temperature: float = 1.0,
        max_tokens: int = DEFAULT_MAX_TOKENS,
    ) -> dict[str, float]:
        """Return the value of `loss` under the key "loss", and the metrics of its `summary`.

        The loss is computed in float32 on the CPU. Raises the same errors as `forward`.
        """
        outputs = self.forward(batch, loss.outputs, temperature=temperature, max_tokens=max_tokens)
        return compute_loss(self._collectives, batch, outputs, loss)

    @contextmanager
    def generating(self, spec: GenerationSpec) -> Iterator[Generator]:
        """Open a generator with continuous batching on the current weights.

        The caller must have set `spec.tokenizer` and `spec.stop_ids`.
        """
        self.onload("weights")
        self._masters.wait_for_copies()
        part = self._built.part
        if part is not None:
            opened = part.generating(spec, self.version, self._reusable_caches)
        else:
            network = cast(Decoder, self._network)
            reusable_caches = self._reusable_caches
            opened = open_generator(
                network,
                spec,
                device=self._device,
                version=self.version,
                eos_ids=(),
                reusable_caches=reusable_caches,
            )
        with opened as generator:
            yield generator

    def gather(self, own: T) -> list[T]:
        """Gather one value from each data-parallel rank, and return the values in rank order.

        `own` is this rank's value. All ranks must call this method.
        """
        return self._collectives.gather_values(own)

    # -- parameters

    @property
    def trained_names(self) -> frozenset[str]:
        """Names of the parameters on this rank that are trained."""
        if self._spec.trained:
            return frozenset(self._masters.trained_parameters)
        return frozenset()

    def slices(self) -> Mapping[str, Slice]:
        return self._masters.list_slices()

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Slice, Tensor]]:
        """Iterate over parameters, as (name, slice of the whole parameter, values in this slice).

        `names` are the canonical names of the parameters to read. For trained parameters, the
        values are those of the master weights.
        """
        return self._masters.read(names)

    def write(
        self, parts: Iterable[tuple[str, Slice, Tensor]], *, version: int, eta: float = 1.0
    ) -> None:
        """Set each parameter to eta * value + (1 - eta) * parameter, computed in float32.

        `parts` contains (name, slice, values) of each parameter, and `version` is the version of
        the new weights. Raises `ConfigError` for unknown names and wrong shapes.
        """
        self._masters.write(parts, eta)
        self.version = version

    # -- memory

    def offload(self, what: What) -> None:
        """Move weights or optimizer state to host memory, if the device has separate memory.

        Offloading the weights also moves the master weights, and frees the KV-cache pages that are
        kept from one generator to the next.
        """
        if what == "weights":
            self._reusable_caches.drop()
            self._masters.offload()
        elif self._optimizer is not None:
            self._optimizer.offload()

    def onload(self, what: What) -> None:
        """Move weights or optimizer state back to the device.

        `forward`, `train` and `generating` do this themselves. This method only starts the copies;
        forward passes and optimizer steps wait for the data that they need.
        """
        if what == "weights":
            self._masters.fetch()
        elif self._optimizer is not None:
            self._optimizer.fetch()

    # -- on disk

    def save_state(self, directory: Path) -> None:
        """Write the state needed to resume training exactly.

        Frozen weights that were never written to are omitted: the backend reads them from the model
        directory.
        """
        values: dict[str, Any] = {"version": self.version}
        self._write(
            directory / self._collectives.name_file(PARAMETERS), self._masters.changed_tensors
        )
        if self._optimizer is not None:
            self._write(
                directory / self._collectives.name_file(OPTIMIZER),
                self._optimizer.collect_tensors(),
            )
            values["optimizer"] = self._optimizer.collect_values()
        checkpoint.write_values(directory / STATE, values)

    def _write(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write to `path` the `tensors` that this rank must save."""
        slices = self._masters.list_slices()
        tensors = optimizer.rename_for_writing(tensors, slices)
        owners = optimizer.map_to_parameters(tensors, slices)
        assigned_names = set(self._collectives.select_saved_names(dict.fromkeys(owners.values())))
        chosen = {}
        for key, value in tensors.items():
            if owners[key] in assigned_names:
                chosen[key] = value
        places = {}
        for key, value in chosen.items():
            if optimizer.has_parameter_shape(key, value):
                places[key] = slices[owners[key]]
        checkpoint.write_tensors(path, chosen, places if self._built.part is not None else None)

    def load_state(self, directory: Path) -> None:
        """Load the state that `save_state` wrote, possibly with a different layout.

        Raises `CheckpointError` if the state is damaged, or if a trained role loads the state of a
        frozen role or the reverse.
        """
        values = checkpoint.read_values(directory / STATE, trained=self._optimizer is not None)
        self.onload("weights")
        self._masters.load(self._read(directory, PARAMETERS))
        if self._optimizer is not None:
            self._optimizer.load(self._read(directory, OPTIMIZER), values["optimizer"])
        self.version = values["version"]

    def _read(self, directory: Path, stem: str) -> dict[str, Tensor]:
        """Return this rank's slices of the tensors in the files `{directory}/{stem}*.safetensors`.

        For example, the optimizer state has the stem "optimizer". The result may contain names that
        this role doesn't have; the caller handles them.
        """
        if self._built.part is None:
            shapes: Mapping[str, Any] = {}
        else:
            shapes = self._built.part.shapes
        return optimizer.read(
            checkpoint.SavedTensors(directory, stem), self._masters.list_slices(), shapes
        )

    def save_model(self, directory: Path, tokenizer: Any) -> None:
        """Write a Hugging Face directory that `transformers` can load, in the role's dtype.

        With adapters, the directory contains the merged model, and its subdirectory `adapter/`
        contains the adapters in PEFT's format.
        """
        parameters = self._collectives.gather_parameters(self._masters.exact_tensors)
        if parameters is not None:
            self._built.save(directory, parameters, tokenizer)

    def without_adapters(self) -> BaseWeightsEngine | None:
        """Return an engine for the frozen base weights, or None if the role has no adapters."""
        if self._built.adapters_off is None:
            return None
        base = []
        for name in self._masters.exact_tensors:
            if name not in self._masters.trained_parameters:
                base.append(name)
        return BaseWeightsEngine(self, self._built.adapters_off, base)

    @property
    def description(self) -> Mapping[str, Any]:
        """Facts about the network.

        The keys are `family`, `vocab_size`, `num_layers`, `flops_per_token`, `dtype`, `device` and
        `notes`, and four parameter counts: `num_parameters` and `num_trainable` for the whole
        network, `held_parameters` and `held_trainable` for this rank's part.
        """
        part = self._built.part
        tensors = self._masters.exact_tensors
        trained = self._masters.trained_parameters
        local_sizes = {name: value.numel() for name, value in tensors.items()}
        if part is None:
            sizes = local_sizes
        else:
            sizes = {name: math.prod(shape) for name, shape in part.shapes.items()}
        return {
            **self._built.facts,
            "num_parameters": sum(sizes.values()),
            "num_trainable": sum(
                sizes[name] for name in (trained if part is None else part.trained)
            ),
            "held_parameters": sum(local_sizes.values()),
            "held_trainable": sum(local_sizes[name] for name in trained),
            "flops_per_token": self._built.cost.flops_per_token,
            "dtype": self._spec.dtype,
            "device": str(self._device),
            "notes": list(self.notes),
        }
