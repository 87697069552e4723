"""The sections of `benchmarks/gpu.py`; each runs in a process of its own and needs no other."""

from __future__ import annotations

import gc
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import (
    gpu_algorithms,
    gpu_backends,
    gpu_decode,
    gpu_jax,
    gpu_peers,
    gpu_probe,
    gpu_profile,
)
from benchmarks.gpu_backends import Where
from benchmarks.gpu_decode import graphs_found, sampling, say_preempted
from benchmarks.gpu_run import Run, relative

ROOT = Path(__file__).resolve().parent.parent
MOST, MEAN = 0.15, 0.03  # by which log-probs may differ that were computed in bfloat16
GRADIENTS = 0.1  # relative error of a gradient that was computed in bfloat16
EXACT = 1e-3  # either, in float32
RANK = 16  # of adapters
GPU_TESTS = (
    "tests/kernels",
    "tests/engine/generation/test_graphs.py",
    "tests/engine/generation/test_caches_pages.py",
    "tests/engine/generation/test_generate.py",
    "tests/engine/test_device.py",
)
# Those that are skipped where there is no CUDA device: files, and words of their names.
DEVICE_TESTS = (
    "tests/kernels/gpu/test_flash.py",
    "tests/kernels/gpu/test_fused.py",
    "tests/engine/generation/test_graphs.py",
    "tests/engine/generation/test_caches_pages.py",
    "tests/kernels/gpu/test_flex.py",  # whose kernels take the longest to compile
)
ON_THE_DEVICE = (
    "agrees_with_the_exact_form or agree_with_the_exact_form or automatic_splits or on_the_device"
)
# Five parameters: weft's name, and transformers' of the llama family.
COMPARED = {
    "embed.weight": "model.embed_tokens.weight",
    "blocks.0.attention.q.weight": "model.layers.0.self_attn.q_proj.weight",
    "blocks.0.attention.k.weight": "model.layers.0.self_attn.k_proj.weight",
    "blocks.{last}.mlp.down.weight": "model.layers.{last}.mlp.down_proj.weight",
    "norm.weight": "model.norm.weight",
}


def tests(run: Run) -> None:
    """The repository's tests of kernels, graphs and generation, those that need a CUDA device among
    them; where time is short those alone.
    """
    lacking = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if lacking:
        run.leave_out(f"the tests need {' and '.join(lacking)}, which are not installed")
        return
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "--tb=short",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
    ]
    words += [*DEVICE_TESTS, "-k", ON_THE_DEVICE] if run.quick else GPU_TESTS
    # weft need not be installed: tests, and the processes that they start, find it by the path.
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    if "WEFT_NATIVE" in os.environ:  # tests drop all variables that are not asked for
        asked = [
            os.environ.get("WEFT_TEST_ENVIRONMENT"),
            f"WEFT_NATIVE={os.environ['WEFT_NATIVE']}",
        ]
        environment["WEFT_TEST_ENVIRONMENT"] = " ".join(filter(None, asked))
    said = run.details.setdefault("tests", [])
    pytest = subprocess.Popen(
        words,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    assert pytest.stdout is not None
    for line in pytest.stdout:
        said.append(line.rstrip())
        print(f"  {line}", end="", flush=True)
        run.details["tests"] = said[-200:]
        _count_tests(run, said)  # a section that is ended leaves what it had
    run.check("tests: exit code of pytest", pytest.wait(), 0, "")
    if run.where.device.type == "cuda" and not any(" PASSED " in f"{line} " for line in said):
        run.wrong.append("tests: none ran on the device")
        run.write()


def _count_tests(run: Run, said: Sequence[str]) -> None:
    """Lines of the table from those of pytest, and a note of each test that failed."""
    for outcome in ("PASSED", "FAILED", "ERROR", "SKIPPED"):
        # the summary at the end has the outcome before the name
        found = [line for line in said if f" {outcome} " in f"{line} " and "::" in line]
        what = f"tests: {outcome.lower()}"
        run.rows = [row for row in run.rows if row["what"] != what]
        run.rows.append({"what": what, "value": len(found), "unit": "tests", "goal": "", "by": ""})
    failed = [line for line in said if line.startswith(("FAILED ", "ERROR "))]
    run.details["notes"] = [*failed[:20]]
    run.write()


def limits(run: Run) -> None:
    """What the device can do at most."""
    for name, what, unit in (
        ("products_per_s", "matrix products", "TFLOP/s"),
        ("bytes_per_s", "copies", "GB/s"),
    ):
        run.details[name] = run.limit(name)
        run.add(what, run.details[name] / (1e12 if unit == "TFLOP/s" else 1e9), unit)
        promised = run.promised(name)
        if promised is not None:
            run.add(f"{what}: share of the data sheet", run.details[name] / promised, "")


def agreement(run: Run) -> None:
    """Whether the kernels of this device compute what the exact form does: sampled against
    recomputed log-probs, a shared prompt against repeated ones, and log-probs and gradients against
    `transformers` in float32 on the same weights.
    """
    sizes, where = run.sizes, run.where
    most, mean = (EXACT, EXACT) if where.dtype == "float32" else (MOST, MEAN)

    def differ(what: str, one: torch.Tensor, other: torch.Tensor) -> None:
        apart = (one.float() - other.float()).abs()
        run.check(f"{what}: log-probs differ at most", float(apart.max()), most, "")
        run.check(f"{what}: log-probs differ on average", float(apart.mean()), mean, "")

    made = gpu_backends.engine(sizes.config, where, trained=False)
    count, prompt, samples, new = 3, min(300, sizes.decode[-1]), 3, 40
    asked = gpu_backends.requests(count, prompt, samples, sizes.config["vocab_size"])
    with made.generating(sampling(new)) as generator:
        generator.submit(asked)
        rows = gpu_backends.drain(generator)
        run.details["kernels"] = gpu_backends.kernels(
            where, gpu_backends.network_of(made).config.head_dim
        )
        run.details["graphs"] = graphs_found(run, "agreement", generator)
        run.details["attention"] = gpu_backends.decoding_attention(generator, where)
    batch = gpu_backends.sample_of(asked, rows, samples)
    again = made.forward(batch, frozenset({"logprobs"})).data["logprobs"]
    differ("sampled and recomputed", again, batch.data["logprobs"])
    gap = float((again.float() - batch.data["logprobs"].float().to(again.device)).abs().mean())
    run.add("sampled and recomputed: mean gap", gap, "", by=run.details["attention"])
    network = gpu_backends.network_of(made)
    shared, network.can_share_prefixes = network.can_share_prefixes, lambda _: False
    repeated = made.forward(batch, frozenset({"logprobs"})).data["logprobs"]
    network.can_share_prefixes = shared
    differ("shared and repeated prompts", again, repeated)
    print(f"  kernels: {run.details['kernels']}; graphs: {run.details['graphs']}", flush=True)
    del made, network, generator
    free(where)
    _beside_transformers(run, differ)


def _beside_transformers(
    run: Run, differ: Callable[[str, torch.Tensor, torch.Tensor], None]
) -> None:
    sizes, where = run.sizes, run.where
    vocabulary, none = sizes.config["vocab_size"], list[str]()
    with tempfile.TemporaryDirectory(prefix="weft-gpu-") as folder:
        model = gpu_backends.saved_reference(sizes.config, where, Path(folder))
        batch = gpu_backends.batch_of(sizes.ragged, vocabulary)
        theirs, gradients = gpu_backends.exact(model, batch, list(COMPARED.values()))
        made = gpu_backends.engine_of(Path(folder), where)
    ours = made.forward(batch, frozenset({"logprobs"})).data["logprobs"]
    differ("weft and transformers", ours, theirs.to(ours.device))
    asked = gpu_backends.requests(3, min(100, sizes.decode[-1]), 1, vocabulary)
    with made.generating(sampling(20)) as generator:
        generator.submit(asked)
        sampled = gpu_backends.sample_of(asked, gpu_backends.drain(generator), 1)
    forced, _ = gpu_backends.exact(model, sampled, none)
    differ("sampled by weft and scored by transformers", sampled.data["logprobs"], forced)
    del model
    free(where)
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


def sft_steps(run: Run) -> Mapping[str, tuple[dict[str, Any], tuple[int, ...]]]:
    """Name -> (configuration, lengths of the sequences) of every training step that is timed."""
    sizes = run.sizes
    return {
        "sft": (sizes.config, sizes.sft),
        "sft, mixed lengths": (sizes.config, sizes.mixed),
        "sft, one sequence of a 0.6B model": sizes.long,
    }


def sft(run: Run) -> None:
    """A training step on packed tokens: equal lengths, a mixed pack, one long sequence of a smaller
    model; the first by `transformers` at its best here.
    """
    seconds: dict[str, float] = {}
    made: Any = None
    for name, (config, lengths) in sft_steps(run).items():
        if name != "sft, mixed lengths":  # which trains the model before it
            made = None
            free(run.where)
            made = gpu_backends.engine(config, run.where, trained=True)
        seconds[name], step = timed_step(run, made, name, lengths)
        if name == "sft":
            run.profiled("sft", step)
            run.peak("sft")
            run.compilations("sft")
        del step
    made = None
    _sft_of_transformers(run, seconds["sft"])


def timed_step(
    run: Run, made: Any, name: str, lengths: tuple[int, ...]
) -> tuple[float, Callable[[], None]]:
    """Time training steps of an engine on one pack, with their rate as a share of what the device
    can do; the median seconds, and the step.
    """
    from weft.algorithms.sft import SFTLoss

    where, config = run.where, gpu_backends.network_of(made).config
    by = gpu_backends.training_attention(where, config)
    batch, most = gpu_backends.batch_of(lengths, config.vocab_size), sum(lengths)

    def step() -> None:
        made.train([batch], SFTLoss(), max_tokens=most)

    timed = where.seconds(step, run.sizes.times, warm=3)
    seconds, operations = statistics.median(timed), gpu_backends.operations(made, lengths)
    run.details[name] = {"seconds": timed, "operations": operations, "attention": by}
    run.add(f"{name}: step of {most} tokens", 1e3 * seconds, "ms", by=by)
    run.add(f"{name}: tokens", most / seconds, "tokens/s", by=by)
    rate = operations / seconds
    run.add(f"{name}: MFU", rate / run.limit("products_per_s"), "of random products", by=by)
    promised = run.promised("products_per_s")
    if promised is not None:
        run.add(f"{name}: MFU by the data sheet", rate / promised, "of the data sheet", by=by)
    return seconds, step


def _sft_of_transformers(run: Run, ours: float) -> None:
    """The step of `sft` by `transformers`, in each way that people train; weft's takes `ours`
    seconds here.
    """
    sizes, where = run.sizes, run.where
    found = {}
    for attention, compiled in gpu_backends.trainers(where):
        free(where)
        name = attention + (", compiled" if compiled else "")
        if compiled and run.quick:
            run.leave_out(f"the step of transformers, {name}, since compiling takes a minute")
            continue
        try:
            model = gpu_backends.reference(sizes.config, where, attention, trained=True)
            theirs = gpu_backends.train_step(
                model, sizes.sft, sizes.config["vocab_size"], where, compiled=compiled
            )
            found[name] = statistics.median(where.seconds(theirs, sizes.times, warm=3))
            run.add(f"sft: transformers, {name}", 1e3 * found[name], "ms", by=attention)
            del model, theirs
        except Exception as error:
            run.note(f"sft by transformers, {name}", error)
    run.details["sft"]["transformers"] = found
    if found:
        run.add("sft: times as fast as transformers' best", min(found.values()) / ours, "x")


def lora(run: Run) -> None:
    """A training step of adapters on every linear layer of a frozen 8B model."""
    config, lengths = run.sizes.adapted
    made = gpu_backends.adapted(config, run.where, RANK)
    timed_step(run, made, "adapters of an 8B model", lengths)
    run.peak("adapters of an 8B model")


def sft_profile(run: Run) -> None:
    """Where the time of the slowest training step of `sft` goes."""
    from weft.algorithms.sft import SFTLoss

    steps = sft_steps(run)
    name = str(run.known.get("slowest", "sft"))
    config, lengths = steps.get(name, steps["sft"])
    made = gpu_backends.engine(config, run.where, trained=True)
    batch, most = gpu_backends.batch_of(lengths, config["vocab_size"]), sum(lengths)

    def step() -> None:
        made.train([batch], SFTLoss(), max_tokens=most)

    seconds = statistics.median(run.where.seconds(step, 3, warm=3))
    by = gpu_backends.training_attention(run.where, gpu_backends.network_of(made).config)
    run.add(f"{name}: the profiled step", 1e3 * seconds, "ms", by=by)
    run.profiled("sft", step)


def options(run: Run) -> None:
    """The step of `sft` with each thing that can be switched on: what nobody knows of a GPU before
    it has run there. What one lacks here (an extra, a kernel) is a line, and the next goes on.
    """
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
                losses.extend(
                    s.metrics["loss"] for s in made.train([batch], SFTLoss(), max_tokens=most)
                )

            seconds = statistics.median(where.seconds(step, sizes.times, warm=3))
            run.details[name] = {"losses": losses}
            run.add(f"sft, {name}: step", 1e3 * seconds, "ms")
            run.peak(f"sft, {name}")
            del made, step
        except Exception as error:
            run.note(f"sft, {name}", error)


def ragged(run: Run) -> None:
    """Completions of all lengths, so that the batch shrinks: tokens a second, and how many steps
    ran without a graph.
    """
    where, (rows, prompt, longest) = run.where, run.sizes.rollout
    made = gpu_backends.engine(run.sizes.config, where, trained=False)
    asked = gpu_backends.requests(rows, prompt, 1, run.sizes.config["vocab_size"])
    lengths = [1 + (7919 * index) % longest for index in range(rows)]
    asked = [
        gpu_backends.of_length(request, length)
        for request, length in zip(asked, lengths, strict=True)
    ]

    def roll() -> None:
        with made.generating(sampling(longest)) as generator:
            generator.submit(asked)
            gpu_backends.drain(generator)
            run.details["graphs"] = graphs_found(run, "", generator)
            run.details["attention"] = gpu_backends.decoding_attention(generator, where)
            say_preempted(run, "ragged rollout", generator)

    for turn in ("first", "second"):  # captures and compilations are of the first
        (seconds,) = where.seconds(roll, 1)
        run.add(
            f"ragged rollout, {turn} time: {rows} of 1 to {longest} tokens",
            sum(lengths) / seconds,
            "tokens/s",
            by=run.details["attention"],
        )
        for what, value in run.details["graphs"].get("counts", {}).items():
            run.add(f"ragged rollout, {turn} time: {what}", value, "so far")
    run.compilations("ragged rollout")
    run.peak("ragged rollout")


def grpo(run: Run) -> None:
    """Two GRPO steps, their time split by the calls of their graph. Nothing is compiled in the
    second, whose figures count; those of the first are there where time ends within the second.
    """
    from weft.algorithms.grpo import GRPOLoss

    sizes, where = run.sizes, run.where
    prompts, prompt, samples, new = sizes.grpo
    actor = gpu_backends.engine(sizes.config, where, trained=True)
    ref = gpu_backends.engine(sizes.config, where, trained=False)
    asked = gpu_backends.requests(prompts, prompt, samples, sizes.config["vocab_size"])
    split: dict[str, float] = {}  # of the step that runs

    def timed(name: str, call: Callable[[], Any]) -> Any:
        where.wait()
        begin = time.perf_counter()
        result = call()
        where.wait()
        split[name] = time.perf_counter() - begin
        return result

    def generate() -> Any:
        with actor.generating(sampling(new)) as generator:
            generator.submit(asked)
            rows = gpu_backends.drain(generator)
            run.details["attention"] = gpu_backends.decoding_attention(generator, where)
            say_preempted(run, "grpo", generator)
            return gpu_backends.sample_of(asked, rows, samples)

    def step() -> Mapping[str, float]:
        batch = timed("generation", generate)
        advantages = timed("reward", lambda: _advantages(batch, samples))
        scored = timed("ref logprobs", lambda: ref.forward(batch, frozenset({"logprobs"})))
        whole = _joined(batch, advantages, scored.data["logprobs"])
        (stats,) = timed("training", lambda: actor.train([whole], GRPOLoss(kl_coef=0.04)))
        metrics: Mapping[str, float] = stats.metrics
        return metrics

    for what in ("grpo, first step", "grpo"):
        run.details[f"metrics of {what}"] = step()
        for name, seconds in split.items():
            run.add(f"{what}: {name}", seconds, "s")
        run.add(f"{what}: step of {prompts} x {samples} x {new}", sum(split.values()), "s")
        rate = prompts * samples * new / split["generation"]
        run.add(f"{what}: generated", rate, "tokens/s", by=run.details["attention"])
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
                seconds = gpu_peers.PEERS[name](
                    Path(folder), [list(each.prompt) for each in asked], samples, new
                )
                run.add(f"{name}: generated", prompts * samples * new / seconds, "tokens/s")
            except Exception as error:
                run.note(name, error)


def _advantages(batch: Any, samples: int) -> torch.Tensor:
    """A reward (the share of even tokens), less its group's mean and in units of its deviation; one
    value a token.
    """
    tokens, lengths = batch.data["completion"], torch.tensor(batch.lengths["completion"].tolist())
    even = torch.segment_reduce((tokens % 2 == 0).float(), "mean", lengths=lengths).view(
        -1, samples
    )
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
    "tests": (tests, 360),
    "limits": (limits, 60),
    "agreement": (agreement, 240),
    "sft": (sft, 300),
    "decode": (gpu_decode.decode, 240),
    "ragged": (ragged, 120),
    "grpo": (grpo, 150),
    "options": (options, 180),
    "peers": (peers, 150),
}
# With those that run with `--minutes`, or where they are asked for.
RUNS: Mapping[str, tuple[Callable[[Run], None], int]] = {
    **SECTIONS,
    "probe": (gpu_probe.probe, 120),
    "algorithms": (gpu_algorithms.algorithms, 240),
    "lora": (lora, 120),
    "decode_profile": (gpu_decode.decode_profile, 120),
    "sft_profile": (sft_profile, 120),
    "jax": (gpu_jax.jax_section, 120),
    "plan_profile": (gpu_profile.plan_profile, 240),
}
