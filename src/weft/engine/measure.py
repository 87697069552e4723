"""Measured times of the parts of a network's calls: what `weft plan profile` stores.

The engine that is measured is a run's: the same network with fewer layers and random weights. Marks
at the first and the last block divide each call into parts, whose times add up to the call's. All
results are plain values in seconds, medians of several repetitions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from weft.algorithms.sft import SFTLoss
from weft.data.sample import SequenceSample
from weft.engine.backends.torch import compute_cost
from weft.engine.base import Request
from weft.engine.device import wait_for_device
from weft.engine.spec import GenerationSpec, LoRASpec, ModelSpec, Schedule
from weft.engine.torch.engine import BuiltNetwork, TorchEngine
from weft.engine.torch.network_source import NetworkSource
from weft.models.network.config import TransformerConfig
from weft.models.network.linear import find_canonical_parameters
from weft.models.network.transformer import Transformer
from weft.parallel.mesh import RankMesh
from weft.parallel.tensor import narrow_config
from weft.topology import Layout

ADAPTER_RANK = 16  # rank of the adapters that are measured
MAX_LAYERS = 4  # layers of the network whose passes are measured
MAX_DECODED_LAYERS = 8  # layers of the deeper network that decodes
SEQUENCE = 128  # tokens of a sequence where the number of tokens varies
LENGTHS = (512, 2048)  # further lengths of sequences, in a pack of as many tokens as the largest
BATCHES = (1, 8, 16, 32)  # sequences that are decoded together
CONTEXTS = (32, 96, 256)  # tokens of each sequence's prompt
DECODE_STEPS = 32  # steps of one measurement
MIN_REPEATS, MAX_REPEATS = 3, 10
REPEAT_SECONDS = 0.5  # a measurement is repeated for at least this long, if it is not slow
SLOW_SECONDS = 3.0  # a measurement that takes longer is not repeated
HOST_COPIES = (2**20, 2**24, 2**28)  # bytes that are copied to the host and back
MAX_STEP_SECONDS = 6.0  # packs whose step would take longer are left out

Parts = dict[str, float]


@dataclass(frozen=True)
class MeasuredNetwork:
    """Network to measure: a configuration, and how it is used.

    Attributes:
        config: Configuration of the whole model.
        device: Device of the network.
        dtype: Name of the dtype of the computation.
        tensor: Number of tensor-parallel ranks; the network is the part of the first of them.
        layers: Number of layers that are built.
    """

    config: TransformerConfig
    device: torch.device
    dtype: str
    tensor: int = 1
    layers: int = MAX_LAYERS

    def build_engine(
        self, *, trained: bool, rank: int = 0, mesh: RankMesh | None = None
    ) -> TorchEngine:
        """Build an engine with random weights; with `rank` above 0, it has adapters of that rank.

        With a `mesh`, it is this process's part of the network, joined to the others. Raises
        `UserError` for a model that cannot be built with these settings.
        """
        config = shorten(self.config, min(self.layers, self.config.num_layers))
        if self.tensor > 1 and mesh is None:
            config = narrow_config(config, self.tensor, 0)
        spec = ModelSpec(
            path="",
            dtype=self.dtype,
            device=str(self.device),
            trained=trained,
            init_from_scratch=True,
            lora=LoRASpec(r=rank),
            schedule=Schedule(1_000_000, 0),
        )
        source = NetworkSource(spec, "", config)
        network = source.build_network(mesh)
        part = None
        if mesh is None:
            network.to_empty(device=self.device)
            source.fill(find_canonical_parameters(network), {})
        else:
            from weft.engine.torch.rank_shards import build_rank_shard

            whole = source.build_network(None)
            part = build_rank_shard(source, network, whole, mesh, self.device)
        built = BuiltNetwork(
            network=network,
            save=_refuse_to_save,
            cost=compute_cost(network, frozen=spec.has_adapters),
            facts={},
            part=part,
            blocks=tuple(network.blocks),
        )
        layout = Layout() if mesh is None else mesh.layout
        return TorchEngine(built, spec, layout, self.device)


def _refuse_to_save(*_: object) -> None:
    raise AssertionError("a network that is only measured is never saved")


def shorten(config: TransformerConfig, layers: int) -> TransformerConfig:
    """Return the configuration of the model's first `layers` layers."""
    experts = config.experts
    if experts is not None and experts.layers:
        experts = replace(experts, layers=experts.layers[:layers])
    return replace(config, num_layers=layers, windows=config.windows[:layers], experts=experts)


def read_clock(device: torch.device) -> float:
    """Return a time in seconds, of which only differences count.

    With one thread on a CPU, it is the thread's processor time, which other work on the machine
    hardly lengthens; otherwise it is the time of the wall clock.
    """
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return time.thread_time()
    return time.perf_counter()


# -- passes


@dataclass
class PassMarks:
    """Times at which a pass reaches the first and the last block, forward and backward.

    On a CUDA device, the times are those of the device's stream, not of the host.
    """

    network: nn.Module
    device: torch.device
    reached: dict[str, Any] = field(default_factory=dict)

    def mark(self, name: str) -> None:
        """Record the time at which the device reaches this place."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
            self.reached[name] = event
        else:
            self.reached[name] = read_clock(self.device)

    def compute_seconds(self, first: str, last: str) -> float:
        """Return the time between two marks, or 0 if the pass did not reach one of them."""
        if first not in self.reached or last not in self.reached:
            return 0.0
        begin, end = self.reached[first], self.reached[last]
        if self.device.type == "cuda":
            return 1e-3 * float(begin.elapsed_time(end))
        return float(end - begin)

    @contextmanager
    def attach(self) -> Iterator[None]:
        """Attach the marks to the network's first and last block, until the context ends."""
        blocks = cast("nn.ModuleList", self.network.blocks)
        hooks = [
            blocks[0].register_forward_pre_hook(self._enter),
            blocks[-1].register_forward_hook(self._leave),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, block: nn.Module, given: tuple[Any, ...]) -> None:
        self.mark("blocks begin")
        states: Tensor = given[0]
        if torch.is_grad_enabled() and states.requires_grad:
            states.register_hook(lambda gradient: self.mark("blocks backward end"))

    def _leave(self, block: nn.Module, given: tuple[Any, ...], states: Tensor) -> None:
        self.mark("blocks end")
        if torch.is_grad_enabled() and states.requires_grad:
            states.register_hook(self._begin_backward)

    def _begin_backward(self, gradient: Tensor) -> None:
        self.mark("blocks backward begin")
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: self.mark("backward end"))


def get_vocab_size(engine: TorchEngine) -> int:
    """Return the number of ids of the network that is measured."""
    return cast(Transformer, engine._network).config.vocab_size


def build_batch(lengths: Sequence[int], vocab_size: int) -> SequenceSample:
    """Return sequences of random tokens: a prompt of one token, and a completion to train on."""
    random = torch.Generator().manual_seed(0)
    data = {
        "prompt": torch.ones(len(lengths), dtype=torch.int64),
        "completion": torch.randint(vocab_size, (sum(lengths) - len(lengths),), generator=random),
    }
    sizes = {"prompt": [[1] for _ in lengths], "completion": [[length - 1] for length in lengths]}
    return SequenceSample.from_groups([str(i) for i in range(len(lengths))], sizes, data)


def measure_pass(engine: TorchEngine, batch: SequenceSample, *, trains: bool) -> Parts:
    """Return the medians of the parts of one call of the engine, by name.

    The parts are `begin` (packing, the embedding), `blocks`, `head` (and its gradient),
    `blocks_backward`, `embedding_backward` and `update` (the optimizer step, and reading results).
    """
    marks = PassMarks(engine._network, engine._device)
    limit = 1 << 30

    def run() -> Parts:
        marks.reached.clear()
        wait_for_device(marks.device)
        marks.mark("start")
        if trains:
            engine.train([batch], SFTLoss(), max_tokens=limit)
        else:
            engine.forward(batch, frozenset({"logprobs"}), max_tokens=limit)
        marks.mark("end")
        wait_for_device(marks.device)
        return _divide(marks, trains=trains)

    with marks.attach():
        runs = repeat(run)
    return {name: statistics.median(each[name] for each in runs) for name in runs[0]}


def _divide(marks: PassMarks, *, trains: bool) -> Parts:
    """Return the parts of the call that the marks have recorded."""
    between = marks.compute_seconds
    if not trains:
        return {
            "begin": between("start", "blocks begin"),
            "blocks": between("blocks begin", "blocks end"),
            "head": between("blocks end", "end"),
        }
    # Frozen embeddings need no gradient: the backward pass ends with the blocks.
    has_end = "blocks backward end" in marks.reached
    last = "blocks backward end" if has_end else "backward end"
    return {
        "begin": between("start", "blocks begin"),
        "blocks": between("blocks begin", "blocks end"),
        "head": between("blocks end", "blocks backward begin"),
        "blocks_backward": between("blocks backward begin", last),
        "embedding_backward": between(last, "backward end"),
        "update": between("backward end", "end"),
    }


def repeat(run: Callable[[], Parts]) -> list[Parts]:
    """Run a measurement once to warm up, then several times; return the results of the latter.

    A slow measurement is not repeated.
    """
    started = time.perf_counter()
    run()
    slow = time.perf_counter() - started > SLOW_SECONDS
    runs: list[Parts] = []
    started = time.perf_counter()
    while len(runs) < (1 if slow else MIN_REPEATS) or (
        len(runs) < MAX_REPEATS and time.perf_counter() - started < REPEAT_SECONDS
    ):
        runs.append(run())
    return runs


def list_packs(max_tokens: int) -> list[tuple[int, int]]:
    """Return the packs that are measured, as (tokens, tokens of each sequence), small ones first."""
    packs = []
    tokens = SEQUENCE
    while tokens <= max_tokens:
        packs.append((tokens, SEQUENCE))
        tokens *= 4
    largest = packs[-1][0]
    return packs + [(largest, length) for length in LENGTHS if length <= largest]


def measure_passes(
    network: MeasuredNetwork, kind: str, max_tokens: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Return the measured passes of one kind: "score", "full" or "adapters".

    The result has the lists `tokens`, `lengths` and one list for each part of a call, with one
    entry per pack; times of blocks are per layer. `trained` is the number of trained parameters.
    """
    trains = kind != "score"
    engine = network.build_engine(trained=trains, rank=ADAPTER_RANK if kind == "adapters" else 0)
    depth = len(engine._built.blocks)
    vocab = get_vocab_size(engine)
    result: dict[str, Any] = {"tokens": [], "lengths": []}
    slowest = 0.0
    for tokens, length in list_packs(max_tokens):
        # The next pack takes four times as long as the last.
        if 4 * slowest > MAX_STEP_SECONDS and tokens > max(result["tokens"]):
            break
        tell(f"{kind}: {tokens:,} tokens in sequences of {length:,}")
        parts = measure_pass(
            engine, build_batch([length] * (tokens // length), vocab), trains=trains
        )
        slowest = max(slowest, sum(parts.values()))
        result["tokens"].append(tokens)
        result["lengths"].append(length)
        for name, seconds in parts.items():
            share = depth if name.startswith("blocks") else 1
            result.setdefault(name, []).append(seconds / share)
    result["trained"] = sum(p.numel() for p in engine._network.parameters() if p.requires_grad)
    return result


# -- decoding


def measure_decoding(
    network: MeasuredNetwork, kind: str, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Return the times of decode steps and of prefills.

    The kinds are "plain" and "adapters", and "modules": a network whose modules have hooks, as
    those that join tensor-parallel ranks, which no kernel computes as a whole.

    The lists `batches`, `contexts`, `block`, `rest`, `prefill_block` and `prefill_rest` have one
    entry per measurement: times of a layer, and of all else. They follow from two networks that
    differ in their number of layers; all else does not depend on the tokens before.
    """
    most = min(MAX_DECODED_LAYERS, network.config.num_layers)
    rank = ADAPTER_RANK if kind == "adapters" else 0
    timed: list[dict[tuple[int, int], DecodeSeconds]] = []
    for depth, contexts in ((1, CONTEXTS[:1]), (most, CONTEXTS)):
        engine = replace(network, layers=depth).build_engine(trained=rank > 0, rank=rank)
        if kind == "modules":
            engine._built.blocks[0].register_forward_pre_hook(lambda block, given: None)
        steps = {}
        for batch in BATCHES:
            for context in contexts:
                tell(f"decoding, {kind}: {batch} sequences of {context} tokens, {depth} layers")
                steps[batch, context] = measure_decoding_of(engine, batch, context)
        timed.append(steps)
    names = ("batches", "contexts", "block", "rest", "prefill_block", "prefill_rest")
    result: dict[str, Any] = {name: [] for name in names}
    for (batch, _), deep in timed[1].items():
        shallow, same = timed[0][batch, CONTEXTS[0]], timed[1][batch, CONTEXTS[0]]
        result["batches"].append(batch)
        result["contexts"].append(deep.context)
        rest = _compute_rest(shallow.step, same.step, most)
        result["rest"].append(min(rest, deep.step))
        result["block"].append(max(0.0, deep.step - rest) / most)
        rest = _compute_rest(shallow.prefill, same.prefill, most)
        result["prefill_rest"].append(min(rest, deep.prefill))
        result["prefill_block"].append(max(0.0, deep.prefill - rest) / most)
    return result


def _compute_rest(shallow: float, deep: float, layers: int) -> float:
    """Return the time of all but the layers, from those of networks with one and many layers."""
    if layers == 1:
        return shallow / 2
    block = max(0.0, (deep - shallow) / (layers - 1))
    return max(0.0, shallow - block)


@dataclass(frozen=True)
class DecodeSeconds:
    """Times of decoding: of one step, and of computing the prompts.

    `context` is the mean number of tokens before the new ones.
    """

    step: float
    prefill: float
    context: int


def measure_decoding_of(
    engine: TorchEngine, batch: int, context: int, clock: Callable[[], float] | None = None
) -> DecodeSeconds:
    """Return the times of decoding `batch` sequences with prompts of `context` tokens.

    `clock` replaces the clock of other measurements. A generator may compute several steps in one
    call, so whole generations are measured.
    """
    vocab = get_vocab_size(engine)
    steps = DECODE_STEPS
    clock = clock or partial(read_clock, engine._device)
    for number in range(2):  # the first one warms up
        spec = GenerationSpec(max_new_tokens=1 + (steps if number else 1))
        requests = []
        for row in range(batch):
            # Prompts that begin with other tokens share nothing.
            prompt = [(row + 7 * number + 5 * i) % vocab for i in range(context)]
            prompt[0] = row % vocab
            requests.append(Request(id=str(row), k=0, prompt=prompt))
        with engine.generating(spec) as generator:
            started = clock()
            generator.submit(requests)
            produced = 0
            while produced < batch:
                produced += len(generator.step())
            filled = clock()
            while not generator.idle:
                generator.step()
            wait_for_device(engine._device)
            ended = clock()
    return DecodeSeconds((ended - filled) / steps, filled - started, context + steps // 2)


def measure_held_out(network: MeasuredNetwork, max_tokens: int) -> list[dict[str, Any]]:
    """Return measured calls that lie between the other measurements, to see how right these are."""
    tokens, length = max_tokens // 3 // 96 * 96, 96
    points: list[dict[str, Any]] = []
    for kind in ("score", "full"):
        if not tokens:
            continue
        trains = kind == "full"
        engine = network.build_engine(trained=trains)
        vocab = get_vocab_size(engine)
        parts = measure_pass(
            engine, build_batch([length] * (tokens // length), vocab), trains=trains
        )
        points.append(
            {
                "kind": kind,
                "tokens": tokens,
                "length": length,
                "layers": len(engine._built.blocks),
                "seconds": sum(parts.values()),
            }
        )
    batch, context = 12, 160
    engine = network.build_engine(trained=False)
    decoding = measure_decoding_of(engine, batch, context)
    points.append(
        {
            "kind": "plain",
            "batch": batch,
            "context": decoding.context,
            "layers": len(engine._built.blocks),
            "seconds": decoding.step,
        }
    )
    return points


def measure_host_copies(device: torch.device) -> dict[str, list[list[float]]]:
    """Return bytes and seconds of copies to pinned host memory ("out") and from there ("back")."""
    result: dict[str, list[list[float]]] = {}
    for name in ("out", "back"):
        seconds = []
        for size in HOST_COPIES:
            there = torch.empty(size, dtype=torch.uint8, device=device)
            host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
            target, source = (host, there) if name == "out" else (there, host)
            times = []
            for _ in range(1 + MIN_REPEATS):
                wait_for_device(device)
                started = time.perf_counter()
                target.copy_(source, non_blocking=True)
                wait_for_device(device)
                times.append(time.perf_counter() - started)
            seconds.append(statistics.median(times[1:]))
        result[name] = [list(map(float, HOST_COPIES)), seconds]
    return result


def measure_network(
    network: MeasuredNetwork, max_tokens: int, tell: Callable[[str], None]
) -> Mapping[str, Any]:
    """Return all measurements of a network: `passes` by kind, `decoding`, and `held_out`."""
    passes = {}
    # Training comes first: its memory is then there for scoring, as in a run.
    for kind in ("full", "adapters", "score"):
        passes[kind] = measure_passes(network, kind, max_tokens, tell)
    decoding = {}
    for kind in ("plain", "modules", "adapters"):
        decoding[kind] = measure_decoding(network, kind, tell)
    tell("points between the others")
    held_out = measure_held_out(network, max(passes["full"]["tokens"]))
    return {"passes": passes, "decoding": decoding, "held_out": held_out}
