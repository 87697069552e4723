"""What the machine can do at most, and what a training and a decode step take, all in one process
so that they compare.

Each function returns seconds of one step (or of one product, copy) as a list, in the order of time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from statistics import fmean
from typing import Any

from benchmarks.engines import batch_of, each, frozen, trained
from benchmarks.pairs import Pause

Settings = Mapping[str, Any]
SIZE = 2048  # rows and columns of the product that stands for the peak
COPIED = 2**28  # bytes
STEPS = 8  # decode steps of a turn


def products(settings: Settings, pause: Pause) -> dict[str, Any]:
    """Square float32 products of both threads; `rate` in operations a second is the best of them by
    any kernel at hand, `torch_rate` the best of `torch.mm`.
    """
    import torch

    from weft.kernels.products import product

    one, other = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    out = torch.empty(SIZE, SIZE)
    seconds = each(lambda: torch.mm(one, other, out=out), settings["times"])
    fastest = min(seconds + each(lambda: product(one, other), settings["times"]))
    return {
        "seconds": seconds,
        "rate": 2.0 * SIZE**3 / fastest,
        "torch_rate": 2.0 * SIZE**3 / min(seconds),
    }


def copies(settings: Settings, pause: Pause) -> dict[str, Any]:
    """Copies of 256 MiB; `rate` counts bytes read and bytes written, and is the best of them."""
    import torch

    source = torch.ones(COPIED // 4)
    target = torch.empty_like(source)
    seconds = each(lambda: target.copy_(source), settings["times"])
    return {"seconds": seconds, "rate": 2.0 * COPIED / min(seconds)}


def train_weft(settings: Settings, pause: Pause) -> dict[str, Any]:
    """One optimizer step of weft's engine on packed tokens, all of them trained but each sequence's
    first.
    """
    from weft.algorithms.sft import SFTLoss

    engine, batch = trained(settings["model"]), batch_of(settings["lengths"])
    return {"seconds": each(lambda: engine.train([batch], SFTLoss()), settings["times"])}


def train_transformers(settings: Settings, pause: Pause) -> dict[str, Any]:
    """The same by `transformers` and `torch.optim.AdamW`; the sequences have one length, so nothing
    is padded.
    """
    import torch

    model, optimizer = _model(settings["model"])
    ids = torch.randint(3, 1000, (len(settings["lengths"]), settings["lengths"][0]))

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return {"seconds": each(step, settings["times"])}


def decode(settings: Settings, pause: Pause) -> dict[str, Any]:
    """Steady decode steps of `batch` sequences around `context` tokens, and the same steps' parts
    timed bare, in turn: means, since a generator computes some steps in one call.
    """
    from weft.engine.base import Request
    from weft.engine.spec import GenerationSpec

    engine, times = frozen(settings["model"]), settings["times"]
    prompt = [5 + i % 1000 for i in range(settings["context"] - times * STEPS // 2)]
    requests = [
        Request(id=str(i), k=0, prompt=[3 + i, *prompt[1:]]) for i in range(settings["batch"])
    ]
    parts = bare_parts(engine, settings["batch"], settings["context"])
    steps: list[float] = []
    bare: dict[str, list[float]] = {name: [] for name in parts}
    with engine.generating(GenerationSpec(max_new_tokens=times * STEPS + 100)) as generator:
        generator.submit(requests)
        produced = 0
        while produced < 2 * len(requests):  # the prompts, and a first decode step
            produced += len(generator.step())
        for _ in range(times):
            steps += each(lambda: [generator.step() for _ in range(STEPS)], 1, warm=0)
            for name, run in parts.items():
                bare[name] += each(run, 1, warm=0)
        generator.abort([request.id for request in requests])
    return {
        "seconds": [fmean(steps) / STEPS],
        "bare": {name: [fmean(seconds)] for name, seconds in bare.items()},
    }


def bare_parts(engine: Any, batch: int, context: int) -> dict[str, Callable[[], object]]:
    """The matrix products, attention and sampling of one decode step on tensors of the network's
    shapes, and nothing between.

    Products and attention are taken by the fastest kernel and orientation at hand, weft's own
    included; rows are those that the engine computes (at least 4).
    """
    import torch

    from weft.engine.generation import sampling
    from weft.engine.spec import GenerationSpec
    from weft.kernels.cpu import attention

    network = engine._network
    config, rows = network.config, max(4, batch)
    weights = [p.detach() for p in network.parameters() if p.ndim == 2]
    inputs = {weight.shape[1]: torch.randn(rows, weight.shape[1]) for weight in weights}
    best = [_faster(weight, inputs[weight.shape[1]]) for weight in weights]
    shape = (batch, config.num_kv_heads, context, config.head_dim)
    layers = [(torch.randn(shape), torch.randn(shape)) for _ in range(config.num_layers)]
    query = torch.randn(batch, config.num_heads, 1, config.head_dim)
    grouped = config.num_heads != config.num_kv_heads
    logits, uniforms = torch.randn(batch, config.vocab_size), torch.rand(batch, dtype=torch.float64)
    spec = GenerationSpec()

    step = config.num_kv_heads * context
    segments = torch.tensor([(row, 1, row * step, context) for row in range(batch)])

    def by_torch() -> None:
        for keys, values in layers:
            torch.nn.functional.scaled_dot_product_attention(
                query, keys, values, enable_gqa=grouped
            )

    def by_weft() -> None:
        for keys, values in layers:
            k, v = (stored[0].transpose(0, 1) for stored in (keys, values))
            attention.attend_to(query[:, :, 0], k, v, segments, 1.0, causal=True)

    ways = (
        [by_torch, by_weft]
        if attention.serves(query[:, :, 0], *(x[:, :, 0] for x in layers[0]))
        else [by_torch]
    )

    parts: dict[str, Callable[[], object]] = {
        "products": lambda: [run() for run in best],
        "attention": min(ways, key=lambda way: min(each(way, 5))),
        "sampling": lambda: sampling.sample(logits, uniforms, spec),
    }
    return {name: _no_grad(run) for name, run in parts.items()}


def _faster(weight: Any, x: Any) -> Callable[[], object]:
    """`x @ weight.T` as torch's `linear`, as weft's, or as `(weight @ x.T).T`."""
    import torch

    from weft.kernels.products import product

    ways: list[Callable[[], object]] = [
        lambda: product(x, weight),
        lambda: torch.nn.functional.linear(x, weight),
        lambda: torch.mm(weight, x.T).T,
    ]
    return min(ways, key=lambda way: min(each(way, 5)))


def _no_grad(run: Callable[[], object]) -> Callable[[], object]:
    import torch

    def quiet() -> object:
        with torch.no_grad():
            return run()

    return quiet


@cache
def _model(path: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
