"""weft on one CUDA GPU, beside `transformers` and the device's own limits. Needs torch >= 2.11, transformers, numpy and
safetensors, no network, and under eight minutes:

    python benchmarks/gpu.py                      # random weights in the shape of Llama-3.2-1B, bfloat16
    python benchmarks/gpu.py --config DIR         # another config.json
    python benchmarks/gpu.py --profile            # also which kernels take the time
    python benchmarks/gpu.py --device cpu --tiny  # the same program on tiny sizes, to see that it runs

Prints a table and writes `gpu.json` to $OUT (else to `benchmarks/results`, from a clean tree alone; with `--tiny` only where
$OUT is set).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if sys.path[0] == str(Path(__file__).resolve().parent):
    sys.path[0] = str(ROOT)  # this folder's modules are a package, whichever way the program is called
sys.path.insert(1, str(ROOT / "src"))

import torch  # noqa: E402

from benchmarks import bare, gpu_backends  # noqa: E402
from benchmarks.gpu_backends import LLAMA_3_2_1B, TINY, Sizes, Where  # noqa: E402
from benchmarks.results import require_clean, table  # noqa: E402

FULL = Sizes(
    config=LLAMA_3_2_1B, sft=(2048,) * 4, decode=(64, 1024), grpo=(64, 128, 8, 512), times=10, matmul=8192, copied=2**32
)
SMALL = Sizes(config=TINY, sft=(32,) * 2, decode=(3, 24), grpo=(2, 20, 2, 6), times=2, matmul=64, copied=2**16)
DECODES = 64  # timed decode steps
WARM = 24  # before them


@dataclass
class Run:
    """Sizes, device, and what was found: lines of the table, and everything else that is written."""

    sizes: Sizes
    where: Where
    minutes: float
    profile: Path | None
    rows: list[dict[str, Any]] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    def add(self, what: str, value: float, unit: str, goal: str = "") -> None:
        self.rows.append({"what": what, "value": float(value), "unit": unit, "goal": goal})
        print(f"  {what}: {value:.4g} {unit}", flush=True)

    @property
    def late(self) -> bool:
        return time.monotonic() - self.started > 60.0 * self.minutes

    def peak(self, what: str) -> None:
        """Most memory since the section began."""
        if self.where.device.type == "cuda":
            self.add(f"{what}: peak memory", torch.cuda.max_memory_allocated() / 2**30, "GiB")

    def profiled(self, name: str, step: Callable[[], object]) -> None:
        """A table of one step's kernels, where it was asked for."""
        if self.profile is None:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        order = "self_cpu_time_total"
        if self.where.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            order = "self_device_time_total"
        with torch.profiler.profile(activities=activities) as profile:
            step()
            self.where.wait()
        shown = profile.key_averages().table(sort_by=order, row_limit=30, max_name_column_width=90)
        self.profile.mkdir(parents=True, exist_ok=True)
        (self.profile / f"profile_{name}.txt").write_text(shown)


def limits(run: Run) -> None:
    """What the device can do at most."""
    run.details["products_per_s"] = gpu_backends.products(run.where, run.sizes.matmul, run.sizes.times)
    run.details["bytes_per_s"] = gpu_backends.bandwidth(run.where, run.sizes.copied, run.sizes.times)
    run.add("matrix products", run.details["products_per_s"] / 1e12, "TFLOP/s")
    run.add("copies", run.details["bytes_per_s"] / 1e9, "GB/s")


def agreement(run: Run) -> None:
    """Whether the kernels of this device compute what the exact form does: sampled against recomputed log-probs, and a shared
    prompt against repeated ones. In bfloat16 some hundredths are rounding."""
    made = gpu_backends.engine(run.sizes.config, run.where, trained=False)
    count, prompt, samples, new = 3, min(300, run.sizes.decode[1]), 3, 40
    asked = gpu_backends.requests(count, prompt, samples, run.sizes.config["vocab_size"])
    with made.generating(_sampling(new)) as generator:
        generator.submit(asked)
        rows = gpu_backends.drain(generator)
        graphs = gpu_backends.graphs_of(generator)
        run.details["kernels"] = gpu_backends.kernels(run.where, gpu_backends.network_of(made).config.head_dim)
        run.details["graphs"] = {"captured": 0 if graphs is None else len(graphs), "note": graphs and graphs.note}
    batch = gpu_backends.sample_of(asked, rows, samples)
    again = made.forward(batch, frozenset({"logprobs"})).data["logprobs"]
    run.add("sampled and recomputed log-probs differ", (again - batch.data["logprobs"]).abs().max(), "at most")
    network = gpu_backends.network_of(made)
    shared, network.shares_prefixes = network.shares_prefixes, lambda _: False
    repeated = made.forward(batch, frozenset({"logprobs"})).data["logprobs"]
    network.shares_prefixes = shared
    run.add("shared and repeated prompts differ", (again - repeated).abs().max(), "at most")
    print(f"  kernels: {run.details['kernels']}; graphs: {run.details['graphs']}", flush=True)
    run.add("decode graphs captured", run.details["graphs"]["captured"], "sizes")


def sft(run: Run) -> None:
    """A training step on packed tokens, and the same by `transformers` with the best attention it has here."""
    from weft.algorithms.sft import SFTLoss

    sizes, where = run.sizes, run.where
    made = gpu_backends.engine(sizes.config, where, trained=True)
    batch = gpu_backends.batch_of(sizes.sft, sizes.config["vocab_size"])
    most = sum(sizes.sft)
    stats: list[Any] = []
    seconds = where.seconds(lambda: stats.extend(made.train([batch], SFTLoss(), max_tokens=most)), sizes.times, warm=3)
    ours = statistics.median(seconds)
    operations = statistics.median([s.metrics["mfu"] * s.metrics["seconds"] for s in stats[3:]])
    rate = _rate_of_engine(made)
    run.details["sft"] = {"seconds": seconds, "operations": operations * rate}
    run.add("sft: step", 1e3 * ours, "ms")
    run.add("sft: tokens", sum(sizes.sft) / ours, "tokens/s")
    run.add("sft: MFU", operations * rate / ours / run.details["products_per_s"], "of products", ">= 0.5")
    run.peak("sft")
    run.profiled("sft", lambda: made.train([batch], SFTLoss(), max_tokens=most))
    del made
    found = {}
    for attention in gpu_backends.attentions(where):
        _free(where)
        model = gpu_backends.reference(sizes.config, where, attention, trained=True)
        step = gpu_backends.train_step(model, sizes.sft, sizes.config["vocab_size"], where)
        found[attention] = statistics.median(where.seconds(step, sizes.times, warm=3))
        del model, step
    run.details["sft"]["transformers"] = found
    run.add(f"sft: transformers ({min(found, key=lambda name: found[name])})", 1e3 * min(found.values()), "ms")
    run.add("sft: times as fast as transformers", min(found.values()) / ours, "x", ">= 1.5")


def decode(run: Run) -> None:
    """Steady decode steps, against the bytes that they must read, and against `generate`."""
    sizes, where = run.sizes, run.where
    batch, context = sizes.decode
    timed = DECODES if sizes is FULL or context >= DECODES else sizes.times
    prompt = max(1, context - timed // 2 - WARM)
    made = gpu_backends.engine(sizes.config, where, trained=False)
    with made.generating(_sampling(timed + WARM + 32)) as generator:
        generator.submit(gpu_backends.requests(batch, prompt, 1, sizes.config["vocab_size"]))
        produced = 0
        while produced < WARM * batch:  # the prompts, then steps after which this size is captured
            produced += len(generator.step())
        turn = min(8, timed)
        taken = where.seconds(lambda: [generator.step() for _ in range(turn)], timed // turn)
        seconds = [turn_seconds / turn for turn_seconds in taken]
        run.profiled("decode", lambda: [generator.step() for _ in range(8)])
        graphs = gpu_backends.graphs_of(generator)
        note = "none" if graphs is None else graphs.note or f"{len(graphs)} sizes"
        for captured in list(graphs._captured.values())[-1:] if graphs is not None else ():
            alone = statistics.median(where.seconds(captured.replay, timed))  # writes what it wrote before
            run.add("decode: captured graph alone", 1e3 * alone, "ms")
        generator.abort([str(i) for i in range(batch)])
    ours, config = statistics.median(seconds), gpu_backends.network_of(made).config
    weights = sum(p.numel() * p.element_size() for p in gpu_backends.network_of(made).parameters())
    keys = 2 * config.num_layers * config.num_kv_heads * config.head_dim * where.torch_dtype.itemsize
    least = (weights + batch * context * keys) / run.details["bytes_per_s"]
    run.details["decode"] = {"seconds": seconds, "least_seconds": least, "graphs": note}
    run.add("decode: step", 1e3 * ours, "ms")
    run.add("decode: tokens", batch / ours, "tokens/s")
    run.add("decode: memory roofline", least / ours, "of copies", ">= 0.7")
    run.peak("decode")
    captured = None  # the loop left a graph in it
    del made, generator, graphs
    _free(where)
    model = gpu_backends.reference(sizes.config, where, gpu_backends.attentions(where)[-1], trained=False)
    theirs = gpu_backends.decode_seconds(model, batch, prompt, timed, where)
    run.details["decode"]["transformers"] = theirs
    run.add("decode: transformers generate", 1e3 * theirs, "ms")
    run.add("decode: times as fast as transformers", theirs / ours, "x", ">= 10")


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

    def step() -> dict[str, float]:
        batch = timed("generation", generate)
        advantages = timed("reward", lambda: _advantages(batch, samples))
        scored = timed("ref logprobs", lambda: ref.forward(batch, frozenset({"logprobs"})))
        whole = _joined(batch, advantages, scored.data["logprobs"])
        (stats,) = timed("training", lambda: actor.train([whole], GRPOLoss(kl_coef=0.04)))
        return dict(stats.metrics)

    metrics = step()
    if not run.late:
        metrics = step()
    run.details["grpo"] = {"seconds": split, "metrics": metrics}
    for name, seconds in split.items():
        run.add(f"grpo: {name}", seconds[-1], "s")
    total = sum(seconds[-1] for seconds in split.values())
    run.add(f"grpo: step of {prompts} x {samples} x {new}", total, "s")
    run.add("grpo: generated", prompts * samples * new / split["generation"][-1], "tokens/s")
    run.peak("grpo")


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


def _free(where: Where) -> None:
    gc.collect()
    if where.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


SECTIONS = {"limits": limits, "agreement": agreement, "sft": sft, "decode": decode, "grpo": grpo}


def main(words: list[str] | None = None) -> int:
    """0, or 1 where a section failed (the others are reported all the same)."""
    chosen = _arguments(words)
    missing = bare.stand_in()
    sizes = SMALL if chosen.tiny else FULL
    if chosen.config is not None:
        raw = json.loads((chosen.config / "config.json").read_text())
        sizes = Sizes(**{**sizes.__dict__, "config": raw})
    device = torch.device(chosen.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cpu" and not chosen.tiny:
        print("there is no CUDA device here: give --device cpu --tiny to see that the program runs", file=sys.stderr)
        return 2
    where = Where(device, "float32" if device.type == "cpu" else "bfloat16")
    out = _folder(chosen.tiny)
    run = Run(sizes, where, chosen.minutes, (out or Path(".")) / "gpu_profile" if chosen.profile else None)
    failed = []
    for name in chosen.only or SECTIONS:
        if run.late:
            print(f"{name}: left out, {chosen.minutes} minutes are over", flush=True)
            failed.append(name)
            continue
        print(name, flush=True)
        _free(where)
        try:
            SECTIONS[name](run)
        except Exception:
            traceback.print_exc()
            failed.append(name)
        run.details.setdefault("section_ends_s", {})[name] = time.monotonic() - run.started
    print(f"\n{table(run.rows)}")
    written = {**_provenance(where, missing), "failed": failed, "rows": run.rows, "details": run.details}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "gpu.json").write_text(json.dumps(written, indent=2, default=str) + "\n")
        print(f"written to {out / 'gpu.json'}")
    for name in failed:
        print(f"{name} failed or was left out", file=sys.stderr)
    return 1 if failed else 0


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python benchmarks/gpu.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", help="cuda or cpu (default: cuda where there is one)")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--config", type=Path, help="folder with a config.json (default: Llama-3.2-1B's shape)")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, help="these sections; limits comes first where used")
    parser.add_argument("--minutes", type=float, default=7.5, help="no section begins later (default: %(default)s)")
    parser.add_argument("--profile", action="store_true", help="write which kernels take the time, to gpu_profile/")
    chosen = parser.parse_args(words)
    if chosen.only and "limits" not in chosen.only:
        chosen.only = ["limits", *chosen.only]
    return chosen


def _folder(tiny: bool) -> Path | None:
    """Where the result goes. Exits with code 2 where that is among the repository's results and the tree is dirty."""
    results = ROOT / "benchmarks" / "results"
    given = os.environ.get("OUT")
    folder = Path(given) if given else None if tiny else results
    if folder is not None and folder.resolve() == results.resolve():
        require_clean(ROOT, "set OUT to another folder")
    return folder


def _provenance(where: Where, missing: list[str]) -> dict[str, Any]:
    """How the figures came about."""
    import numpy
    import transformers

    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    state = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "command": " ".join(["python", "benchmarks/gpu.py", *sys.argv[1:]]),
        "commit": git.stdout.strip() or None,
        "dirty": bool(state.stdout.strip()),
        "device": torch.cuda.get_device_name() if where.device.type == "cuda" else platform.processor(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "transformers": transformers.__version__,
            "numpy": numpy.__version__,
        },
        "stand_ins": missing,
    }


if __name__ == "__main__":
    sys.exit(main())
