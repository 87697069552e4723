"""The engine on one torch device: scores, trains and samples from one role's network, and hands its parameters in and out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from weft.algorithms.base import Loss, Output, reduce_stats
from weft.data.sample import SequenceSample
from weft.engine import checkpoint, microbatches
from weft.engine.base import DEFAULT_MAX_TOKENS, Generator, StepStats
from weft.engine.device import matmul_rate
from weft.engine.flops import Cost, ProductRate
from weft.engine.generation.generate import Decoder, open_generator
from weft.engine.rows import PackLayout, SampleRows, as_sample
from weft.engine.spec import GenerationSpec, ModelSpec
from weft.engine.spread import OneDevice, Spread
from weft.engine.torch.adapters_off import AdaptersOff
from weft.engine.torch.master_weights import MasterWeights
from weft.engine.torch.optimizer import Optimizer, decayed
from weft.engine.torch.step import Accumulated, Pass, Step, Veto, compute, plain
from weft.errors import CheckpointError, ConfigError
from weft.models.network.packed import TopIds
from weft.topology import Layout, Slice

What = Literal["weights", "optimizer"]
HOST = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PARAMETERS, OPTIMIZER, STATE = "parameters.safetensors", "optimizer.safetensors", "state.json"


def dtype_of(spec: ModelSpec) -> str:
    """The role's dtype, which a backend has settled before it builds anything."""
    assert spec.dtype is not None, "a backend settles the dtype first"
    return spec.dtype


@dataclass(frozen=True)
class BuiltNetwork:
    """What a backend makes of a spec.

    `network` is called as `network(x: Packed, want, temperature, support) -> {output: tensor}` and has `hidden` and
    `next_token_logits` for generation. It lies on the device; where the role is trained it is float32 and the parameters to
    train require gradients, elsewhere it has the role's dtype. `save` writes a Hugging Face directory.
    """

    network: nn.Module
    save: Callable[[Path, Mapping[str, Tensor], Any], None]  # (directory, parameters by name, tokenizer)
    cost: Cost
    facts: Mapping[str, Any]  # family, vocab_size, num_layers
    dropout: bool = False  # whether anything in it drops
    aux_loss_weight: float = 0.0  # weight of the loss that balances experts
    adapters_off: Callable[[], AbstractContextManager[None]] | None = None  # of a network with adapters
    notes: tuple[str, ...] = ()  # what the user should know about how this network runs


def home_of_masters(spec: ModelSpec, device: torch.device) -> torch.device | None:
    """Where masters and optimizer state live when that is not where the network is; on a CPU it is the same memory."""
    return HOST if spec.optimizer.offload and device.type != HOST.type else None


def _notes(spec: ModelSpec, device: torch.device) -> tuple[str, ...]:
    """What the user asked for and this device has no use for."""
    if spec.trained and spec.optimizer.offload and device.type == HOST.type:
        return (
            "optimizer.offload=true: on a CPU masters and optimizer state are in host memory already; nothing changes",
        )
    return ()


class TorchEngine:
    """Implements `weft.engine.base.Engine` for one rank of a layout; `spread` is what it asks where the other ranks matter."""

    def __init__(
        self, built: BuiltNetwork, spec: ModelSpec, layout: Layout, device: torch.device, spread: Spread | None = None
    ) -> None:
        self.layout, self.version = layout, 0
        self._spread = spread or OneDevice()
        self.notes = (*built.notes, *_notes(spec, device))
        self._built, self._spec, self._device = built, spec, device
        self._checked: list[Loss] = []  # losses whose `by_row` is known to be true
        self._network = built.network.eval()
        dtype = next(built.network.parameters()).dtype
        self._rate = ProductRate(lambda: matmul_rate(device, dtype))
        self._home = home_of_masters(spec, device)
        self._masters = MasterWeights(self._network, DTYPES[dtype_of(spec)], self._home)
        self._optimizer: Optimizer | None = None
        if spec.trained:
            trained = self._masters.trained
            assert spec.schedule is not None, "the runtime gives every trained role a schedule"
            decay, scaled = decayed(self._network), spec.dtype == "float16"
            self._optimizer = Optimizer(spec.optimizer, spec.schedule, trained, decay, scaled=scaled)

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
        """`want` by id, on the CPU in float32: `[L]` logprobs, entropy and top1, `[L + 1]` values, `[1]` scores a completion,
        `[L, K]` top_ids in int32, `[L, K + 1]` top_logprobs, and given_logprobs of the key `given_ids` [L, K].

        Log-probs are of softmax(logits / temperature); those of labels over the ids of the key `support` where the batch
        holds it. `top` says which ids the `top_` outputs are of.
        Raises `ConfigError` for an output that the head lacks, or a sequence longer than a micro-batch may be.
        """
        self.onload("weights")
        how, parts = Pass(want, temperature, extra=1 if "values" in want else 0, top=top), []
        for part in microbatches.cut(batch, max_tokens, "sequence"):
            layout, out = compute(self._network, part, how, self._device)
            parts.append(as_sample(part, layout, out))
        return microbatches.join(parts, batch.ids)

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

        A minibatch is skipped, with the reason, where nothing in it is trained, where `veto` objects, or where its loss is not
        finite and the role's spec says to go on; otherwise such a loss raises `RunError` with the ids of its samples.
        """
        if self._optimizer is None:
            raise ConfigError("this role is not trained: its weights are frozen and it has no optimizer")
        self.onload("weights")
        self.onload("optimizer")
        step = Step(
            self._network, self._optimizer, self._spread, self._device, self._built.cost,
            max_tokens, self._spec.on_nonfinite, temperature,
            self._spec.seed if self._built.dropout else None, self._built.aux_loss_weight, self._rate, self._checked,
        )  # fmt: skip
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
        """`loss` and the loss's summary of a batch, in float32 on the CPU. Raises what `forward` raises."""
        total = self._spread.reduce_denominators(loss.denominators(batch))
        made = self.forward(batch, loss.outputs, temperature=temperature, max_tokens=max_tokens)
        layout = PackLayout.of(batch)
        text = [key for key in ("prompt", "completion", "loss_mask") if key in batch.data]
        network = SampleRows(batch.select(keys=text).update(made), layout, HOST, torch.float32)
        out: dict[str, Any] = {name: network[name] for name in loss.outputs}
        value, stats = loss(out, SampleRows(batch, layout, HOST, torch.float32), total)
        own = Accumulated(float(value), plain([stats]))
        done = Accumulated.join(self._spread.gather_values(own))
        return {"loss": done.loss, **loss.summary(reduce_stats(done.stats))}

    def generating(self, spec: GenerationSpec) -> AbstractContextManager[Generator]:
        """Continuous batching on these weights; `spec.tokenizer` and `spec.stop_ids` are the caller's to fill in."""
        self.onload("weights")
        return open_generator(
            cast(Decoder, self._network),
            spec,
            device=self._device,
            version=self.version,
            eos_ids=(),
            tokenizer=spec.tokenizer,
        )

    # -- parameters

    def slices(self) -> Mapping[str, Slice]:
        return self._masters.slices()

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Slice, Tensor]]:
        """(name, slice, values) in the most exact form there is: the float32 master of what is trained."""
        return self._masters.read(names)

    def write(self, parts: Iterable[tuple[str, Slice, Tensor]], *, version: int, eta: float = 1.0) -> None:
        """parameter <- eta * value + (1 - eta) * parameter, in float32. Raises `ConfigError` for what does not fit."""
        self._masters.write(parts, eta)
        self.version = version

    # -- memory

    def offload(self, what: What) -> None:
        """Move weights (masters and gradients with them) or optimizer state to host memory."""
        if what == "weights":
            self._masters.to(HOST)
        elif self._optimizer is not None:
            self._optimizer.move(HOST)

    def onload(self, what: What) -> None:
        """The way back; `forward`, `train` and `generating` take it by themselves."""
        if what == "weights":
            self._masters.to(self._device)
        elif self._optimizer is not None:
            self._optimizer.move(self._home or self._device)

    # -- on disk

    def save_state(self, d: Path) -> None:
        """Everything that the role goes on from, exactly. Frozen weights that nobody wrote to are left out: the backend reads
        them again."""
        values: dict[str, Any] = {"version": self.version}
        checkpoint.write_tensors(d / PARAMETERS, self._spread.gather_parameters(self._masters.changeable))
        if self._optimizer is not None:
            checkpoint.write_tensors(d / OPTIMIZER, self._spread.gather_parameters(self._optimizer.tensors()))
            values["optimizer"] = self._optimizer.values()
        checkpoint.write_values(d / STATE, values)

    def load_state(self, d: Path) -> None:
        """Go on from what `save_state` wrote. Raises `CheckpointError` where it is of another kind of role, or broken."""
        values = checkpoint.read_values(d / STATE)
        if ("optimizer" in values) != (self._optimizer is not None):
            raise CheckpointError(
                f"{d}: the state is of a role that is {'' if self._optimizer is None else 'not '}trained"
            )
        self.onload("weights")
        self._masters.load(checkpoint.read_tensors(d / PARAMETERS))
        if self._optimizer is not None:
            self._optimizer.load(checkpoint.read_tensors(d / OPTIMIZER), values["optimizer"])
        self.version = values["version"]

    def save_model(self, d: Path, tokenizer: Any) -> None:
        """A Hugging Face directory that `transformers` loads, in the role's dtype. With adapters it holds the merged model,
        and `adapter/` the adapters alone in PEFT's layout."""
        self._built.save(d, self._spread.gather_parameters(self._masters.all), tokenizer)

    def without_adapters(self) -> AdaptersOff | None:
        """This engine's frozen base as an engine of its own, for a reference role; None where there are no adapters."""
        if self._built.adapters_off is None:
            return None
        base = [name for name in self._masters.all if name not in self._masters.trained]
        return AdaptersOff(self, self._built.adapters_off, base)

    @property
    def description(self) -> Mapping[str, Any]:
        """family, vocab_size, num_layers, num_parameters, num_trainable, flops_per_token, dtype, notes."""
        return {
            **self._built.facts,
            "num_parameters": sum(p.numel() for p in self._masters.all.values()),
            "num_trainable": sum(p.data.numel() for p in self._masters.trained.values()),
            "flops_per_token": self._built.cost.per_token,
            "dtype": self._spec.dtype,
            "device": str(self._device),
            "notes": list(self.notes),
        }
