"""What a step of training or of generation should take on a GPU, without one: its kernels run on
tensors without memory, each timed by the bytes it moves and the operations it does.

    python -m benchmarks.estimate               # SFT of Llama-3.2-1B, four sequences of 2,048 tokens, bfloat16, on an H100
    python -m benchmarks.estimate --eager       # where nothing can be compiled
    python -m benchmarks.estimate --decode      # a token each of 64 sequences of 1,024

Assumed (`Device`): rates that an H100 SXM reaches, not its data sheet's. Nothing here has been
measured.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.gpu_backends import LLAMA_3_2_1B
from weft.checkpoints import hf_io
from weft.engine.generation.caches import SAMPLING_COLUMNS, PageCaches
from weft.engine.generation.scheduler import GenerationBudget
from weft.engine.spec import OptimizerSpec, Schedule
from weft.engine.torch.master_weights import MasterWeights
from weft.engine.torch.optimizer import Optimizer, list_decayed_names
from weft.kernels import build_copy_queue, compiling, flash
from weft.models.attention.contexts import Dense
from weft.models.kv.pages import PAGE, TABLE
from weft.models.network import transformer
from weft.models.network.packed import Packed
from weft.models.network.transformer import Transformer

aten = torch.ops.aten
DECODE = 64, 1024  # sequences, and tokens that each has
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addmm_"}
GATHERS = {"embedding", "index_select", "gather", "index"}
# Views, and memory that nothing is written to.
FREE = {
    "view",
    "_unsafe_view",
    "t",
    "transpose",
    "permute",
    "expand",
    "slice",
    "select",
    "split",
    "split_with_sizes",
    "unsqueeze",
    "squeeze",
    "detach",
    "alias",
    "as_strided",
    "unbind",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "unfold",
    "narrow",
    "_reshape_alias",
    "diagonal",
    "lift_fresh",
    "new_empty_strided",
    "chunk",
    "resize_",
    "set_",
}


@dataclass(frozen=True)
class Device:
    """Rates that are reached."""

    products: float = 660e12  # operations a second, bfloat16
    attention: tuple[float, float] = (400e12, 300e12)  # forward and backward
    bytes: float = 2.8e12  # a second
    most_bytes: float = 3.35e12  # by the data sheet, of which the roofline of a decode step is made
    least: float = 3e-6  # seconds of a kernel
    peak: float = 800e12  # of the largest products; what MFU is a share of


@dataclass
class Counted(TorchDispatchMode):
    """Counts kernels, bytes and operations of what runs under it."""

    device: Device
    kernels: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    bytes: float = 0.0
    operations: float = 0.0
    inside: bool = False  # a kernel that stands for several functions

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name == "addmm" and "out" in (kwargs or {}):
            out = kwargs["out"]  # torch 2.12 cannot compute its shape on the meta device
        else:
            out = func(*args, **(kwargs or {}))
        if self.inside or name in FREE:
            return out
        operations = 0.0
        if name in PRODUCTS:
            left, right = [x for x in args if isinstance(x, Tensor)][-2:]
            operations = 2.0 * left.numel() * right.shape[-1]
        if name in GATHERS:
            # of what it looks up it reads what it gives
            self.add(name, (args[1:], torch.empty_like(out)), out)
        elif name == "index_copy_":
            self.add(name, args[2:], args[3])
        else:
            self.add(name, (args, kwargs), out, operations, self.device.products)
        return out

    def add(
        self, name: str, given: Any, made: Any, operations: float = 0.0, rate: float = 1.0
    ) -> None:
        """A kernel that reads what is given and writes what it made; lists are read and written in
        place.
        """
        tensors = {id(x): x for x in tree_leaves((given, made)) if isinstance(x, Tensor)}
        moved = float(sum(x.numel() * x.element_size() for x in tensors.values()))
        if name.endswith("_"):
            moved += sum(
                x.numel() * x.element_size() for x in tree_leaves(made) if isinstance(x, Tensor)
            )
        self.kernels[name] += 1
        self.bytes += moved
        self.operations += operations
        self.seconds[name] += max(operations / rate, moved / self.device.bytes, self.device.least)

    def as_one(
        self, name: str, function: Callable[..., Any], operations: float = 0.0, rate: float = 1.0
    ) -> Any:
        """The function as one kernel."""

        def call(*given: Any, **named: Any) -> Any:
            self.inside = True
            try:
                made = function(*given, **named)
            finally:
                self.inside = False
            self.add(name, (given, named), made, operations, rate)
            return made

        return call


class Norm(torch.autograd.Function):
    """torch's RMS norm: a kernel forward, and backward one for each of its two gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counted: Counted) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counted = counted
        return counted.as_one("rms_norm", lambda x, weight: torch.empty_like(x))(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (x, weight), counted = ctx.saved_tensors, ctx.counted
        by_x = counted.as_one("rms_norm backward", lambda by, x: torch.empty_like(x))(
            gradients[0], x
        )
        by_weight = counted.as_one("rms_norm backward", lambda by, x: torch.empty_like(weight))(
            gradients[0], x
        )
        return by_x, by_weight, None


class Attention(torch.autograd.Function):
    """Flash attention's sizes."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, counted: Counted, operations: float
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.counted, ctx.operations = counted, operations
        return counted.as_one(
            "attention",
            lambda q, k, v: torch.empty_like(q),
            operations,
            counted.device.attention[0],
        )(q, k, v)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        q, k, v = ctx.saved_tensors
        rate = ctx.counted.device.attention[1]
        made = ctx.counted.as_one(
            "attention backward",
            lambda _, *given: [torch.empty_like(x) for x in given],
            2.5 * ctx.operations,
            rate,
        )
        return *made(gradients[0].contiguous(), q, k, v), None, None


def install(counted: Counted, lengths: list[int], *, fused: bool) -> None:
    """Count flash attention as the kernels it has, and each compiled function as one."""
    pairs = sum(n * (n + 1) / 2.0 for n in lengths)

    def varlen(q: Tensor, k: Tensor, v: Tensor, *_: Any, **named: Any) -> Tensor:
        return Attention.apply(q, k, v, counted, 4.0 * pairs * q.shape[1] * q.shape[2])

    flash.serves = lambda *_: True  # type: ignore[assignment]
    flash.load_kernel = lambda: varlen  # type: ignore[assignment]
    flash.find_features = lambda: flash.FlashFeatures(True, True)  # type: ignore[assignment]
    torch.nn.functional.rms_norm = lambda x, _, weight, eps: Norm.apply(x, weight, counted)  # type: ignore[assignment]
    compiling.serves = lambda *_: fused  # type: ignore[assignment]
    compiling.compile_as_one_kernel = lambda f: counted.as_one(f.__name__, f)  # type: ignore[assignment]


def update(counted: Counted, masters: list[Tensor], *, clips: bool) -> None:
    """Fused AdamW in float32: it reads and writes parameters, both moments, and gradients; before
    it a pass that `clips`.
    """
    size = float(sum(master.numel() * master.element_size() for master in masters))
    for name, moved in (
        ("clipping", 2.0 * size if clips else 0.0),
        ("fused AdamW", 7.0 * size if clips else 8.0 * size),
    ):
        counted.kernels[name] += 1 if moved else 0
        counted.bytes += moved
        counted.seconds[name] += moved / counted.device.bytes


def step(raw: dict[str, Any], lengths: list[int], counted: Counted) -> float:
    """A step of SFT, counted; how many operations the model's products alone are (6 a parameter and
    token).
    """
    config = hf_io.find_family(raw, None).config(raw)
    network = Transformer.build_empty(config, device="meta").train()
    masters = MasterWeights(network, torch.bfloat16, build_copy_queue(torch.device("meta")))
    transformer.add_gradients_to(network, masters.masters)
    trained = masters.trained_parameters
    optimizer = Optimizer(
        OptimizerSpec(lr=1e-5, max_grad_norm=1.0),
        Schedule(10, 0),
        trained,
        list_decayed_names(network),
    )
    total = sum(lengths)
    ints = torch.zeros(total, dtype=torch.int64, device="meta")
    ends = torch.zeros(len(lengths) + 1, dtype=torch.int32, device="meta")
    weights = torch.empty(total, device="meta")
    x = Packed(
        ints,
        ints,
        Dense(ends, max(lengths)),
        ints,
        ints,
        row_gradient=lambda out: {"logprobs": torch.neg(weights)},
    )
    with counted:
        out = network(x, frozenset({"logprobs", "top1"}))
        (-(out["logprobs"] * weights).sum()).backward()
        torch.nn.utils.get_total_norm(list(optimizer.collect_gradients().values()))
        masters.refresh()
    update(counted, list(optimizer.parameters), clips=not hasattr(optimizer, "_clip"))
    products = sum(p.numel() for p in network.parameters() if p.dim() == 2)
    pairs = sum(n * (n + 1) / 2.0 for n in lengths)
    return (
        6.0 * products * total
        + 12.0 * pairs * config.num_layers * config.num_heads * config.head_dim
    )


def pages(counted: Counted, rows: int, length: int) -> None:
    """Count flash attention over pages: of the pool it reads what the rows hold, once a key head."""

    def varlen(q: Tensor, keys: Tensor, values: Tensor, *_: Any, **named: Any) -> Tensor:
        held = keys.new_empty(2, rows * length, *keys.shape[2:])
        operations = 4.0 * rows * length * q.shape[1] * q.shape[2]
        return counted.as_one(
            "attention",
            lambda q, held: torch.empty_like(q),
            operations,
            counted.device.attention[0],
        )(q, held)

    flash.load_kernel = lambda: varlen  # type: ignore[assignment]


def decode(raw: dict[str, Any], rows: int, length: int, counted: Counted) -> float:
    """A decode step of `rows` sequences of `length` tokens, the draw included, counted; the least
    bytes that it can move: weights and the sequences' keys and values, once.
    """
    config, meta = hf_io.find_family(raw, None).config(raw), torch.device("meta")
    network = Transformer.build_empty(config, device=meta, dtype=torch.bfloat16).eval()
    caches = PageCaches(network, meta, GenerationBudget(rows, 2 * rows * length))
    step = torch.zeros(
        rows, SAMPLING_COLUMNS + TABLE + length // PAGE + 1, dtype=torch.int32, device=meta
    )
    pages(counted, rows, length)
    with counted, torch.no_grad():
        caches._sample_tokens(step)
    weights = sum(p.numel() * p.element_size() for p in network.parameters())
    return weights + 4.0 * rows * length * config.num_layers * config.num_kv_heads * config.head_dim


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.estimate", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--tokens", type=int, default=2048, help="of each sequence (default: %(default)s)"
    )
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument(
        "--decode", action="store_true", help="a step of generation, 64 sequences of 1,024 tokens"
    )
    parser.add_argument("--eager", action="store_true", help="nothing is compiled")
    parser.add_argument("--kernels", action="store_true", help="print every kernel")
    chosen = parser.parse_args(words)
    device, lengths = Device(), [chosen.tokens] * chosen.sequences
    counted = Counted(device)
    install(counted, lengths, fused=not chosen.eager)
    if chosen.decode:
        rows, length = DECODE
        least = decode(LLAMA_3_2_1B, rows, length, counted) / device.most_bytes
        seconds = sum(counted.seconds.values())
        print(
            f"{rows} tokens after {length}: {1e3 * seconds:.2f} ms, {least / seconds:.0%} of the "
            f"roofline"
        )
    else:
        operations = step(LLAMA_3_2_1B, lengths, counted)
        seconds = sum(counted.seconds.values())
        print(
            f"{sum(lengths)} tokens: {1e3 * seconds:.1f} ms, MFU "
            f"{operations / seconds / device.peak:.1%}"
        )
    print(
        f"{sum(counted.kernels.values())} kernels, {counted.bytes / 1e9:.1f} GB, "
        f"{counted.operations / 1e12:.1f} TFLOP"
    )
    if chosen.kernels:
        for name, taken in sorted(counted.seconds.items(), key=lambda item: -item[1]):
            print(f"  {name:32} {counted.kernels[name]:5} {1e3 * taken:8.2f} ms")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
