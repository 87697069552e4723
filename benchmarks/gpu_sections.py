"""The sections of `benchmarks/gpu.py`; each runs in a process of its own and needs no other."""

from __future__ import annotations

import gc
import importlib.util
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_backends, gpu_peers
from benchmarks.gpu_backends import Where
from benchmarks.gpu_run import Run, relative

ROOT = Path(__file__).resolve().parent.parent
WARM = 24  # decode steps before the timed ones
MOST, MEAN = 0.15, 0.03  # by which log-probs may differ that were computed in bfloat16
GRADIENTS = 0.1  # relative error of a gradient that was computed in bfloat16
EXACT = 1e-3  # either, in float32
GPU_TESTS = (
    "tests/kernels", "tests/engine/generation/test_graphs.py", "tests/engine/generation/test_caches_pages.py",
    "tests/engine/generation/test_generate.py", "tests/engine/test_device.py",
)  # fmt: skip
# Five parameters: weft's name, and transformers' of the llama family.
COMPARED = {
    "embed.weight": "model.embed_tokens.weight",
    "blocks.0.attention.q.weight": "model.layers.0.self_attn.q_proj.weight",
    "blocks.0.attention.k.weight": "model.layers.0.self_attn.k_proj.weight",
    "blocks.{last}.mlp.down.weight": "model.layers.{last}.mlp.down_proj.weight",
    "norm.weight": "model.norm.weight",
}


def tests(run: Run) -> None:
    """The repository's tests of kernels, graphs and generation, those that need a CUDA device among them."""
    lacking = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if lacking:
        run.note("the tests were left out", ModuleNotFoundError(f"{' and '.join(lacking)} must be installed for them"))
        run.write()
        return
    words = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-m", "not slow", *GPU_TESTS]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    run.details["tests"] = done.stdout.splitlines()[-60:] + done.stderr.splitlines()[-20:]
    print("\n".join(run.details["tests"][-12:]), flush=True)
    run.check("tests: exit code of pytest", done.returncode, 0, "")


def limits(run: Run) -> None:
    """What the device can do at most."""
    for name, what, unit in (
        ("products_per_s", "matrix products", "TFLOP/s"),
        ("bytes_per_s", "copies", "GB/s"),
    ):
        run.details[name] = run.limit(name)
        run.add(what, run.details[name] / (1e12 if unit == "TFLOP/s" else 1e9), unit)


def agreement(run: Run) -> None:
    """Whether the kernels of this device compute what the exact form does: sampled against recomputed log-probs, a shared
    prompt against repeated ones, and log-probs and gradients against `transformers` in float32 on the same weights."""
    sizes, where = run.sizes, run.where
    most, mean = (EXACT, EXACT) if where.dtype == "float32" else (MOST, MEAN)

    def differ(what: str, one: torch.Tensor, other: torch.Tensor) -> None:
        apart = (one.float() - other.float()).abs()
        run.check(f"{what}: log-probs differ at most", float(apart.max()), most, "")
        run.check(f"{what}: log-probs differ on average", float(apart.mean()), mean, "")

    made = gpu_backends.engine(sizes.config, where, trained=False)
    count, prompt, samples, new = 3, min(300, sizes.decode[-1]), 3, 40
    asked = gpu_backends.requests(count, prompt, samples, sizes.config["vocab_size"])
    with made.generating(_sampling(new)) as generator:
        generator.submit(asked)
        rows = gpu_backends.drain(generator)
        run.details["kernels"] = gpu_backends.kernels(where, gpu_backends.network_of(made).config.head_dim)
        run.details["graphs"] = _graphs(run, "agreement", generator)
    batch = gpu_backends.sample_of(asked, rows, samples)
    again = made.forward(batch, frozenset({"logprobs"})).data["logprobs"]
    differ("sampled and recomputed", again, batch.data["logprobs"])
    network = gpu_backends.network_of(made)
    shared, network.shares_prefixes = network.shares_prefixes, lambda _: False
    repeated = made.forward(batch, frozenset({"logprobs"})).data["logprobs"]
    network.shares_prefixes = shared
    differ("shared and repeated prompts", again, repeated)
    print(f"  kernels: {run.details['kernels']}; graphs: {run.details['graphs']}", flush=True)
    del made, network, generator
    free(where)
    _beside_transformers(run, differ)


def _beside_transformers(run: Run, differ: Callable[[str, torch.Tensor, torch.Tensor], None]) -> None:
    sizes, where = run.sizes, run.where
    lengths = sizes.ragged
    with tempfile.TemporaryDirectory(prefix="weft-gpu-") as folder:
        model = gpu_backends.saved_reference(sizes.config, where, Path(folder))
        batch = gpu_backends.batch_of(lengths, sizes.config["vocab_size"])
        theirs, gradients = gpu_backends.exact(model, batch, list(COMPARED.values()))
        del model
        free(where)
        made = gpu_backends.engine_of(Path(folder), where)
        ours = made.forward(batch, frozenset({"logprobs"})).data["logprobs"]
        differ("weft and transformers", ours, theirs.to(ours.device))
        found = gpu_backends.gradients(made, batch)
    last = gpu_backends.network_of(made).config.num_layers - 1
    most = EXACT if where.dtype == "float32" else GRADIENTS
    for name, hf in COMPARED.items():
        wanted = gradients[hf.format(last=last)]
        run.check(
            f"gradient of {name.format(last=last)}",
            relative(found[name.format(last=last)], wanted),
            most,
            "relative error",
        )
    run.peak("agreement")


def sft(run: Run) -> None:
    """A training step on packed tokens, equal lengths and a mixed pack, and the same by `transformers` at its best here."""
    from weft.algorithms.sft import SFTLoss

    sizes, where = run.sizes, run.where
    made = gpu_backends.engine(sizes.config, where, trained=True)
    rate, seconds = _rate_of_engine(made), {}
    for name, lengths in (("sft", sizes.sft), ("sft, mixed lengths", sizes.mixed)):
        batch = gpu_backends.batch_of(lengths, sizes.config["vocab_size"])
        most = sum(lengths)
        stats: list[Any] = []

        def step(batch: Any = batch, most: int = most, stats: list[Any] = stats) -> None:
            stats.extend(made.train([batch], SFTLoss(), max_tokens=most))

        timed = where.seconds(step, sizes.times, warm=3)
        seconds[name] = statistics.median(timed)
        operations = rate * statistics.median([s.metrics["mfu"] * s.metrics["seconds"] for s in stats[3:]])
        run.details[name] = {"seconds": timed, "operations": operations}
        run.add(f"{name}: step of {most} tokens", 1e3 * seconds[name], "ms")
        run.add(f"{name}: tokens", most / seconds[name], "tokens/s")
        run.add(f"{name}: MFU", operations / seconds[name] / run.limit("products_per_s"), "of products", ">= 0.5")
    run.peak("sft")
    run.compilations("sft")
    run.profiled("sft", step)
    del made, step
    found = {}
    for attention, compiled in gpu_backends.trainers(where):
        free(where)
        name = attention + (", compiled" if compiled else "")
        try:
            model = gpu_backends.reference(sizes.config, where, attention, trained=True)
            theirs = gpu_backends.train_step(model, sizes.sft, sizes.config["vocab_size"], where, compiled=compiled)
            found[name] = statistics.median(where.seconds(theirs, sizes.times, warm=3))
            run.add(f"sft: transformers, {name}", 1e3 * found[name], "ms")
            del model, theirs
        except Exception as error:
            run.note(f"sft by transformers, {name}", error)
    run.details["sft"]["transformers"] = found
    run.add("sft: times as fast as transformers' best", min(found.values()) / seconds["sft"], "x", ">= 1.5")


def options(run: Run) -> None:
    """The step of `sft` with each thing that can be switched on: what nobody knows of a GPU before it has run there. What one
    lacks here (an extra, a kernel) is a line, and the next goes on."""
    from weft.algorithms.sft import SFTLoss
    from weft.engine.device import choose_flash
    from weft.engine.spec import OptimizerSpec

    sizes, where = run.sizes, run.where
    batch, most = gpu_backends.batch_of(sizes.sft, sizes.config["vocab_size"]), sum(sizes.sft)
    cases: Mapping[str, tuple[str, Mapping[str, Any]]] = {
        "as it is": ("auto", {}),
        "flash_attention=fa2": ("fa2", {}),
        "flash_attention=fa3": ("fa3", {}),
        "compile=true": ("auto", {"compile": True}),
        "compile=true fp8=true": ("auto", {"compile": True, "fp8": True}),
        "state_dtype=bfloat16": ("auto", {"optimizer": OptimizerSpec(state_dtype="bfloat16")}),
        "state_dtype=8bit": ("auto", {"optimizer": OptimizerSpec(state_dtype="8bit")}),
    }
    for name, (attention, changes) in cases.items():
        free(where)
        try:
            choose_flash(where.device, attention)
            made = gpu_backends.engine(sizes.config, where, trained=True, **changes)
            losses: list[float] = []

            def step(made: Any = made, losses: list[float] = losses) -> None:
                losses.extend(s.metrics["loss"] for s in made.train([batch], SFTLoss(), max_tokens=most))

            seconds = statistics.median(where.seconds(step, sizes.times, warm=3))
            run.details[name] = {"losses": losses}
            run.add(f"sft, {name}: step", 1e3 * seconds, "ms")
            run.peak(f"sft, {name}")
            del made, step
        except Exception as error:
            run.note(f"sft, {name}", error)


def decode(run: Run) -> None:
    """Steady decode steps at several batch sizes, against the bytes that they must read, and against `generate`."""
    sizes, where = run.sizes, run.where
    *batches, context = sizes.decode
    steps = min(sizes.decode_steps, max(1, context // 2))
    prompt = max(1, context - steps // 2 - WARM)
    made = gpu_backends.engine(sizes.config, where, trained=False)
    ours = {batch: _decode_step(run, made, batch, prompt, context, steps) for batch in batches}
    run.peak("decode")
    run.compilations("decode")
    del made
    free(where)
    compared = sizes.compared
    model = gpu_backends.reference(sizes.config, where, gpu_backends.attentions(where)[-1], trained=False)
    found = {}
    for cache in gpu_backends.caches(where):
        try:
            found[cache] = gpu_backends.decode_seconds(model, compared, prompt, steps, where, cache)
            run.add(f"decode, {compared} sequences: transformers generate, {cache} cache", 1e3 * found[cache], "ms")
        except Exception as error:
            run.note(f"generate with a {cache} cache", error)
    run.details["decode by transformers"] = found
    run.add(f"decode, {compared} sequences: times as fast", min(found.values()) / ours[compared], "x", ">= 10")


def _decode_step(run: Run, made: Any, batch: int, prompt: int, context: int, steps: int) -> float:
    """The median seconds of a step of `batch` sequences."""
    where, what = run.where, f"decode, {batch} sequences"
    with made.generating(_sampling(steps + WARM + 32)) as generator:
        generator.submit(gpu_backends.requests(batch, prompt, 1, run.sizes.config["vocab_size"]))
        produced = 0
        while produced < WARM * batch:  # the prompts, then steps after which this size is captured
            produced += len(generator.step())
        turn = min(8, steps)
        taken = where.seconds(lambda: [generator.step() for _ in range(turn)], max(1, steps // turn))
        seconds = [turn_seconds / turn for turn_seconds in taken]
        if batch == run.sizes.compared:
            run.profiled("decode", lambda: [generator.step() for _ in range(8)])
        found = _graphs(run, what, generator)
        generator.abort([str(i) for i in range(batch)])
    config, network = gpu_backends.network_of(made).config, gpu_backends.network_of(made)
    weights = sum(p.numel() * p.element_size() for p in network.parameters())
    keys = 2 * config.num_layers * config.num_kv_heads * config.head_dim * where.torch_dtype.itemsize
    least, median = (weights + batch * context * keys) / run.limit("bytes_per_s"), statistics.median(seconds)
    run.details[what] = {"seconds": seconds, "least_seconds": least, "graphs": found}
    run.add(f"{what}: step", 1e3 * median, "ms")
    run.add(f"{what}: tokens", batch / median, "tokens/s")
    goal = ">= 0.7" if batch == run.sizes.compared else ""
    run.add(f"{what}: memory roofline", least / median, "of copies", goal)
    return median


def ragged(run: Run) -> None:
    """Completions of all lengths, so that the batch shrinks: tokens a second, and how many steps ran without a graph."""
    where, (rows, prompt, longest) = run.where, run.sizes.rollout
    made = gpu_backends.engine(run.sizes.config, where, trained=False)
    asked = gpu_backends.requests(rows, prompt, 1, run.sizes.config["vocab_size"])
    lengths = [1 + (7919 * index) % longest for index in range(rows)]
    asked = [gpu_backends.of_length(request, length) for request, length in zip(asked, lengths, strict=True)]

    def roll() -> None:
        with made.generating(_sampling(longest)) as generator:
            generator.submit(asked)
            gpu_backends.drain(generator)
            run.details["graphs"] = _graphs(run, "", generator)

    for turn in ("first", "second"):  # captures and compilations are of the first
        (seconds,) = where.seconds(roll, 1)
        run.add(f"ragged rollout, {turn} time: {rows} of 1 to {longest} tokens", sum(lengths) / seconds, "tokens/s")
        for what, value in run.details["graphs"].get("counts", {}).items():
            run.add(f"ragged rollout, {turn} time: {what}", value, "so far")
    run.compilations("ragged rollout")
    run.peak("ragged rollout")


def grpo(run: Run) -> None:
    """One GRPO step, its time split by the calls of its graph; the second of two, so that nothing is compiled in it."""
    from weft.algorithms.grpo import GRPOLoss

    sizes, where = run.sizes, run.where
    prompts, prompt, samples, new = sizes.grpo
    actor = gpu_backends.engine(sizes.config, where, trained=True)
    ref = gpu_backends.engine(sizes.config, where, trained=False)
    asked = gpu_backends.requests(prompts, prompt, samples, sizes.config["vocab_size"])
    split: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        where.wait()
        begin = time.perf_counter()
        result = call()
        where.wait()
        split.setdefault(name, []).append(time.perf_counter() - begin)
        return result

    def generate() -> Any:
        with actor.generating(_sampling(new)) as generator:
            generator.submit(asked)
            return gpu_backends.sample_of(asked, gpu_backends.drain(generator), samples)

    def step() -> Mapping[str, float]:
        batch = timed("generation", generate)
        advantages = timed("reward", lambda: _advantages(batch, samples))
        scored = timed("ref logprobs", lambda: ref.forward(batch, frozenset({"logprobs"})))
        whole = _joined(batch, advantages, scored.data["logprobs"])
        (stats,) = timed("training", lambda: actor.train([whole], GRPOLoss(kl_coef=0.04)))
        metrics: Mapping[str, float] = stats.metrics
        return metrics

    for _ in range(2):
        run.details["metrics"] = step()
        run.details["seconds"] = split
    for name, seconds in split.items():
        run.add(f"grpo: {name}", seconds[-1], "s")
    total = sum(seconds[-1] for seconds in split.values())
    run.add(f"grpo: step of {prompts} x {samples} x {new}", total, "s")
    run.add("grpo: generated", prompts * samples * new / split["generation"][-1], "tokens/s")
    run.compilations("grpo")
    run.peak("grpo")


def peers(run: Run) -> None:
    """The rollout of `grpo` by vLLM and SGLang, where they are installed."""
    found = gpu_peers.installed()
    run.details["installed"] = found
    if not found:
        print("  neither vLLM nor SGLang is installed here", flush=True)
        run.write()
        return
    prompts, prompt, samples, new = run.sizes.grpo
    asked = gpu_backends.requests(prompts, prompt, 1, run.sizes.config["vocab_size"])
    with tempfile.TemporaryDirectory(prefix="weft-gpu-") as folder:
        del gpu_backends.saved_reference(run.sizes.config, run.where, Path(folder)).config
        free(run.where)
        for name in found:
            try:
                seconds = gpu_peers.PEERS[name](Path(folder), [list(each.prompt) for each in asked], samples, new)
                run.add(f"{name}: generated", prompts * samples * new / seconds, "tokens/s")
            except Exception as error:
                run.note(name, error)


def _graphs(run: Run, what: str, generator: Any) -> dict[str, Any]:
    """Captured sizes, steps with and without a graph, and why there are none."""
    graphs = gpu_backends.graphs_of(generator)
    if graphs is None:
        return {"captured": 0, "note": "this device has none"}
    found = {"captured": len(graphs), "note": graphs.note, "counts": dict(getattr(graphs, "counts", {}))}
    if what:
        run.add(f"{what}: decode graphs captured", len(graphs), "sizes")
    return found


def _sampling(new: int) -> Any:
    from weft.engine.spec import GenerationSpec

    return GenerationSpec(max_new_tokens=new, seed=1)


def _rate_of_engine(made: Any) -> float:
    """What the engine's own `mfu` is a share of."""
    from weft.engine.device import matmul_rate

    first = next(gpu_backends.network_of(made).parameters())
    return matmul_rate(first.device, first.dtype)


def _advantages(batch: Any, samples: int) -> torch.Tensor:
    """A reward (the share of even tokens), less its group's mean and in units of its deviation; one value a token."""
    tokens, lengths = batch.data["completion"], torch.tensor(batch.lengths["completion"].tolist())
    even = torch.segment_reduce((tokens % 2 == 0).float(), "mean", lengths=lengths).view(-1, samples)
    better = (even - even.mean(1, keepdim=True)) / (even.std(1, keepdim=True) + 1e-4)
    return better.flatten().repeat_interleave(lengths)


def _joined(batch: Any, advantages: torch.Tensor, ref_logprobs: torch.Tensor) -> Any:
    from weft.data.sample import SequenceSample

    data = {**batch.data, "advantages": advantages, "ref_logprobs": ref_logprobs}
    sizes = {key: [x.tolist() for x in batch.seqlens[key]] for key in batch.data}
    same = dict.fromkeys(("advantages", "ref_logprobs"), sizes["completion"])
    return SequenceSample.from_groups(batch.ids, {**sizes, **same}, data)


def free(where: Where) -> None:
    gc.collect()
    if where.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# Seconds after which a section is ended, half an hour together; in the order of a first half hour.
SECTIONS: Mapping[str, tuple[Callable[[Run], None], int]] = {
    "tests": (tests, 360), "limits": (limits, 60), "agreement": (agreement, 240), "sft": (sft, 300), "decode": (decode, 240),
    "ragged": (ragged, 120), "grpo": (grpo, 150), "options": (options, 180), "peers": (peers, 150),
}  # fmt: skip
