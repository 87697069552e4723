"""The engine on one torch device: scores, trains and samples from one role's network, and hands its
parameters in and out.
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
from weft.engine import checkpoint, microbatches
from weft.engine.base import DEFAULT_MAX_TOKENS, Generator, StepStats
from weft.engine.device import choose_flash, keep_sums_wide, matmul_rate
from weft.engine.flops import Cost, ProductRate
from weft.engine.generation.caches import KeptPages
from weft.engine.generation.generate import Decoder, open_generator
from weft.engine.rows import PackLayout, SampleRows
from weft.engine.spec import GenerationSpec, ModelSpec
from weft.engine.spread import OneDevice, Spread
from weft.engine.torch import states
from weft.engine.torch.adapters_off import AdaptersOff
from weft.engine.torch.master_weights import MasterWeights
from weft.engine.torch.optimizer import Optimizer, decayed, embeddings
from weft.engine.torch.prepare import Pass, Scoring
from weft.engine.torch.step import NO_AUX_LOSS, Accumulated, AuxLoss, Step, Veto, plain
from weft.errors import CheckpointError, ConfigError
from weft.kernels import lane_of
from weft.models.network import gradient_sums
from weft.models.network.packed import TopIds
from weft.models.network.parameters import StoredParameter
from weft.topology import Layout, Slice

if TYPE_CHECKING:
    from weft.parallel.shard import Shards

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


def dtype_of(spec: ModelSpec) -> str:
    """The role's dtype, which a backend has settled before it builds anything."""
    assert spec.dtype is not None, "a backend settles the dtype first"
    return spec.dtype


def _nothing(want: frozenset[Output]) -> SequenceSample:
    """The outputs of a batch without ids: a rank's part may have none."""
    return SequenceSample.from_groups(
        [], {key: [] for key in want}, {key: torch.empty(0) for key in want}
    )


@dataclass(frozen=True)
class BuiltNetwork:
    """What a backend makes of a spec.

    `network` is called as `network(x: Packed, want, temperature, support) -> {output: tensor}` and
    has `hidden` and `next_token_logits` for generation. It lies on the device; where the role is
    trained it is float32 and the parameters to train require gradients, elsewhere it has the role's
    dtype. `save` writes a Hugging Face directory.
    """

    network: nn.Module
    # (directory, parameters by name, tokenizer)
    save: Callable[[Path, Mapping[str, Tensor], Any], None]
    cost: Cost
    facts: Mapping[str, Any]  # family, vocab_size, num_layers
    dropout: bool = False  # whether anything in it drops
    aux_loss: AuxLoss = NO_AUX_LOSS  # that balances experts
    # of a network with adapters
    adapters_off: Callable[[], AbstractContextManager[None]] | None = None
    notes: tuple[str, ...] = ()  # what the user should know about how this network runs
    part: Part | None = None  # where this rank holds a part of the network
    blocks: tuple[nn.Module, ...] = ()  # that a pass goes through one after the other


@dataclass(frozen=True)
class Part:
    """One rank's part of a network that several hold: what lies where, whom to ask of the others,
    and how it generates.
    """

    shapes: Mapping[str, tuple[int, ...]]  # of every parameter, whole, by canonical name
    trained: frozenset[str]
    places: Mapping[str, Slice]  # what this rank holds of them
    # given where its part lies
    spread: Callable[[Callable[[], Mapping[str, StoredParameter]]], Spread]
    shards: Shards | None
    # Given the weights' version, and what generators leave to the next.
    generating: Callable[[GenerationSpec, int, KeptPages], AbstractContextManager[Generator]]


def home_of_masters(spec: ModelSpec, device: torch.device) -> torch.device | None:
    """Where masters and optimizer state live when that is not where the network is; on a CPU it is
    the same memory.
    """
    return HOST if spec.optimizer.offload and device.type != HOST.type else None


def _notes(spec: ModelSpec, device: torch.device) -> tuple[str, ...]:
    """What the user asked for and this device has no use for."""
    asked = {
        "optimizer.offload=true": (
            spec.trained and spec.optimizer.offload,
            "masters and optimizer state are",
        ),
        "offload=true": (spec.offload, "weights are"),
    }
    there = [
        (option, what) for option, (on, what) in asked.items() if on and device.type == HOST.type
    ]
    return tuple(
        f"{option}: on a CPU {what} in host memory already; nothing changes"
        for option, what in there
    )


class TorchEngine:
    """Implements `weft.engine.base.Engine` for one rank of a layout."""

    def __init__(
        self, built: BuiltNetwork, spec: ModelSpec, layout: Layout, device: torch.device
    ) -> None:
        self.layout = layout
        self.version = 0
        self.notes = (
            *built.notes,
            *_notes(spec, device),
            *choose_flash(device, spec.flash_attention),
        )
        self._built = built
        self._spec = spec
        self._device = device
        self._kept = KeptPages()
        self._checked: list[Loss] = []  # losses whose `by_row` is known to be true
        self._network = built.network.eval()
        keep_sums_wide(device)
        # A trained network's parameters are float32 until its backend casts them: passes compute in
        # the role's dtype.
        self._rate = ProductRate(lambda: matmul_rate(device, DTYPES[dtype_of(spec)]))
        home = home_of_masters(spec, device)
        lane = lane_of(device)
        part = built.part
        dtype_of_masters = torch.promote_types(DTYPES[dtype_of(spec)], torch.float32)
        self._masters = MasterWeights(
            self._network,
            # FSDP2 casts
            dtype_of_masters
            if part is not None and part.shards is not None
            else DTYPES[dtype_of(spec)],
            lane,
            home,
            None if part is None else part.places,
            None if part is None else part.shards,
            built.blocks,
        )
        if device.type == "cuda" and home is None and layout.pipeline == 1:
            gradient_sums.add_to(self._network, self._masters.masters)
        if part is None:
            self._spread: Spread = OneDevice()
        else:
            self._spread = part.spread(lambda: self._masters.stored)
        self._optimizer: Optimizer | None = None
        if spec.trained:
            trained = self._masters.trained
            assert spec.schedule is not None, "the runtime gives every trained role a schedule"
            self._optimizer = Optimizer(
                spec.optimizer,
                spec.schedule,
                trained,
                decayed(self._network),
                embeddings=embeddings(self._network),
                scaled=spec.dtype == "float16",
                lane=lane if home is None else None,
                updated=None if home is None else self._masters.updated,
            )
        if spec.offload:
            self.offload("weights")

    # -- scoring and training

    @torch.no_grad()
    def forward(
        self,
        batch: SequenceSample,
        want: frozenset[Output],
        *,
        temperature: float = 1.0,
        top: TopIds | None = None,
        max_tokens: int = DEFAULT_MAX_TOKENS,
    ) -> SequenceSample:
        """`want` by id, on the CPU in float32: `[L]` logprobs, entropy and top1, `[L + 1]` values,
        `[1]` scores a completion, `[L, K]` top_ids in int32, `[L, K + 1]` top_logprobs, and
        given_logprobs of the key `given_ids` [L, K].

        Log-probs are of softmax(logits / temperature); those of labels over the ids of the key
        `support` where the batch holds it. `top` says which ids the `top_` outputs are of. Raises
        `ConfigError` for an output that the head lacks, or a sequence longer than a micro-batch may
        be.
        """
        self.onload("weights")
        how = Pass(want, temperature, extra=1 if "values" in want else 0, top=top)
        parts = microbatches.cut(batch, max_tokens, "sequence")
        work = Scoring(self._network, how, self._device)
        made = [
            each
            for each in self._spread.run(self._network, parts, work, trains=False)
            if each is not None
        ]
        return microbatches.join(made, batch.ids) if made else _nothing(want)

    def train(
        self,
        minibatches: Sequence[SequenceSample],
        loss: Loss,
        *,
        veto: Veto | None = None,
        temperature: float = 1.0,
        max_tokens: int = DEFAULT_MAX_TOKENS,
    ) -> list[StepStats]:
        """One optimizer step a minibatch; `version` then counts one more train step.

        A minibatch is skipped, with the reason, where nothing in it is trained, where `veto`
        objects, or where its loss is not finite and the role's spec says to go on; otherwise such a
        loss raises `RunError` with the ids of its samples.
        """
        if self._optimizer is None:
            raise ConfigError(
                "this role is not trained: its weights are frozen and it has no optimizer"
            )
        self.onload("weights")
        step = Step(
            self._network,
            self._optimizer,
            self._spread,
            self._device,
            self._built.cost,
            max_tokens,
            self._spec.on_nonfinite,
            temperature,
            self._spec.seed if self._built.dropout else None,
            self._built.aux_loss,
            self._rate,
            self._checked,
            self._masters.ready,
        )
        done = []
        self._network.train()
        try:
            for minibatch in minibatches:
                done.append(step(minibatch, loss, veto))
                self._masters.refresh()
        finally:
            self._network.eval()
        self.version += 1
        return done

    @torch.no_grad()
    def evaluate(
        self,
        batch: SequenceSample,
        loss: Loss,
        *,
        temperature: float = 1.0,
        max_tokens: int = DEFAULT_MAX_TOKENS,
    ) -> dict[str, float]:
        """`loss` and the loss's summary of a batch, in float32 on the CPU.

        Raises what `forward` raises.
        """
        total = self._spread.reduce_denominators(loss.denominators(batch))
        made = self.forward(batch, loss.outputs, temperature=temperature, max_tokens=max_tokens)
        own = Accumulated(0.0, [])
        if batch.num_ids:
            layout = PackLayout.of(batch)
            text = [key for key in ("prompt", "completion", "loss_mask") if key in batch.data]
            network = SampleRows(batch.select(keys=text).update(made), layout, HOST, torch.float32)
            out: dict[str, Any] = {name: network[name] for name in loss.outputs}
            value, stats = loss(out, SampleRows(batch, layout, HOST, torch.float32), total)
            own = Accumulated(float(value), plain([stats]))
        done = Accumulated.join(self._spread.gather_values(own))
        return {"loss": done.loss, **loss.summary(reduce_stats(done.stats))}

    @contextmanager
    def generating(self, spec: GenerationSpec) -> Iterator[Generator]:
        """Continuous batching on these weights; `spec.tokenizer` and `spec.stop_ids` are the
        caller's to fill in.
        """
        self.onload("weights")
        self._masters.ready()
        part = self._built.part
        if part is not None:
            opened = part.generating(spec, self.version, self._kept)
        else:
            network = cast(Decoder, self._network)
            kept = self._kept
            opened = open_generator(
                network, spec, device=self._device, version=self.version, eos_ids=(), kept=kept
            )
        with opened as generator:
            yield generator

    def gather(self, own: T) -> list[T]:
        """Plain values of every data-parallel rank, in the order of ranks; all of them call it."""
        return self._spread.gather_values(own)

    # -- parameters

    @property
    def trained_names(self) -> frozenset[str]:
        """Parameters of this rank that train steps change."""
        if self._spec.trained:
            return frozenset(self._masters.trained)
        return frozenset()

    def slices(self) -> Mapping[str, Slice]:
        return self._masters.slices()

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Slice, Tensor]]:
        """(name, slice, values) in the most exact form there is: the float32 master of what is
        trained.
        """
        return self._masters.read(names)

    def write(
        self, parts: Iterable[tuple[str, Slice, Tensor]], *, version: int, eta: float = 1.0
    ) -> None:
        """parameter <- eta * value + (1 - eta) * parameter, in float32.

        Raises `ConfigError` for what does not fit.
        """
        self._masters.write(parts, eta)
        self.version = version

    # -- memory

    def offload(self, what: What) -> None:
        """Move weights, with masters and what generators kept, or optimizer state to host memory,
        if the device has its own.
        """
        if what == "weights":
            self._kept.drop()
            self._masters.leave()
        elif self._optimizer is not None:
            self._optimizer.leave()

    def onload(self, what: What) -> None:
        """The way back.

        `forward`, `train` and `generating` take it by themselves: weights come while the first
        blocks are computed, optimizer state while the first masters are updated.
        """
        if what == "weights":
            self._masters.come()
        elif self._optimizer is not None:
            self._optimizer.come()

    # -- on disk

    def save_state(self, d: Path) -> None:
        """Everything that the role goes on from, exactly.

        Frozen weights that nobody wrote to are left out: the backend reads them again.
        """
        values: dict[str, Any] = {"version": self.version}
        self._write(d / self._spread.file(PARAMETERS), self._masters.changeable)
        if self._optimizer is not None:
            self._write(d / self._spread.file(OPTIMIZER), self._optimizer.tensors())
            values["optimizer"] = self._optimizer.values()
        checkpoint.write_values(d / STATE, values)

    def _write(self, path: Path, held: Mapping[str, Tensor]) -> None:
        """Those of the tensors here that no other rank writes."""
        slices = self._masters.slices()
        held = states.written(held, slices)
        owners = states.owners(held, slices)
        kept = set(self._spread.kept(dict.fromkeys(owners.values())))
        chosen = {key: value for key, value in held.items() if owners[key] in kept}
        places = {
            key: slices[owners[key]]
            for key, value in chosen.items()
            if states.fits_layouts(key, value)
        }
        checkpoint.write_tensors(path, chosen, places if self._built.part is not None else None)

    def load_state(self, d: Path) -> None:
        """Go on from what `save_state` wrote, on this layout or another.

        Raises `CheckpointError` where it is of another kind of role, or broken.
        """
        values = checkpoint.read_values(d / STATE)
        if ("optimizer" in values) != (self._optimizer is not None):
            raise CheckpointError(
                f"{d}: the state is of a role that is "
                f"{'' if self._optimizer is None else 'not '}trained"
            )
        self.onload("weights")
        self._masters.load(self._read(d, PARAMETERS))
        if self._optimizer is not None:
            self._optimizer.load(self._read(d, OPTIMIZER), values["optimizer"])
        self.version = values["version"]

    def _read(self, d: Path, stem: str) -> dict[str, Tensor]:
        """This rank's part of every tensor that was saved; names that the role does not have are
        left to the caller.
        """
        if self._built.part is None:
            elsewhere: Mapping[str, Any] = {}
        else:
            elsewhere = self._built.part.shapes
        return states.read(checkpoint.Saved(d, stem), self._masters.slices(), elsewhere)

    def save_model(self, d: Path, tokenizer: Any) -> None:
        """A Hugging Face directory that `transformers` loads, in the role's dtype.

        With adapters it holds the merged model, and `adapter/` the adapters alone in PEFT's layout.
        """
        whole = self._spread.gather_parameters(self._masters.all)
        if whole is not None:
            self._built.save(d, whole, tokenizer)

    def without_adapters(self) -> AdaptersOff | None:
        """This engine's frozen base as an engine of its own, for a reference role; None where there
        are no adapters.
        """
        if self._built.adapters_off is None:
            return None
        base = [name for name in self._masters.all if name not in self._masters.trained]
        return AdaptersOff(self, self._built.adapters_off, base)

    @property
    def description(self) -> Mapping[str, Any]:
        """family, vocab_size, num_layers, num_parameters, num_trainable (of the whole network;
        `held_*` of this rank), flops_per_token, dtype, notes.
        """
        part = self._built.part
        held = self._masters.all
        trained = self._masters.trained
        here = {name: value.numel() for name, value in held.items()}
        if part is None:
            every = here
        else:
            every = {name: math.prod(shape) for name, shape in part.shapes.items()}
        return {
            **self._built.facts,
            "num_parameters": sum(every.values()),
            "num_trainable": sum(
                every[name] for name in (trained if part is None else part.trained)
            ),
            "held_parameters": sum(here.values()),
            "held_trainable": sum(here[name] for name in trained),
            "flops_per_token": self._built.cost.per_token,
            "dtype": self._spec.dtype,
            "device": str(self._device),
            "notes": list(self.notes),
        }
