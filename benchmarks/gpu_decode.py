"""Decoding in `benchmarks/gpu.py`: steady steps at several numbers of sequences, and where their
time goes.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable
from typing import Any

from benchmarks import gpu_backends
from benchmarks.gpu_run import Run
from weft.kernels import fused

WARM = 24  # decode steps before the timed ones
SPARE = 32  # tokens that a sequence may get beyond the timed steps


def decode(run: Run) -> None:
    """Steady decode steps, against the bytes that they must read, and against `generate`."""
    sizes, where = run.sizes, run.where
    *batches, context = sizes.decode
    steps = min(sizes.decode_steps, max(1, context // 2))
    prompt = max(1, context - steps // 2 - WARM)
    made = gpu_backends.engine(sizes.config, where, trained=False)
    longest = prompt + WARM + steps + SPARE
    room = gpu_backends.room(made, longest, max(batches), sampling(steps + WARM + SPARE))
    fitting = those_that_fit(batches, room)
    for batch in (batch for batch in batches if batch not in fitting):
        run.leave_out(f"{batch} sequences of {longest} tokens: keys and values of {room} have room")
    for batch in fitting:
        seconds = _decode_step(run, made, batch, prompt, context, steps)
        if batch == sizes.compared:  # before larger ones, for which time may be short
            _decode_step(run, made, batch, prompt, context, steps, ahead=False)
            run.peak(f"decode, {batch} sequences")
            run.compilations(f"decode, {batch} sequences")  # before those of `generate`
            _beside_generate(run, seconds, prompt, steps)


def those_that_fit(wanted: Iterable[int], room: int) -> list[int]:
    """Numbers of sequences for which there is room, in the order wanted; in the place of the first
    for which there is none the largest multiple of 64 that fits.
    """
    found: list[int] = []
    for count in wanted:
        fits = count if count <= room else room // 64 * 64
        if fits and fits not in found:
            found.append(fits)
    return found


def _beside_generate(run: Run, ours: float, prompt: int, steps: int) -> None:
    """The same step by `generate`, which takes `ours` seconds here."""
    from benchmarks.gpu_sections import free

    sizes, where, compared = run.sizes, run.where, run.sizes.compared
    free(where)
    attention = gpu_backends.attentions(where)[-1]
    model = gpu_backends.reference(sizes.config, where, attention, trained=False)
    found = {}
    for cache in gpu_backends.caches(where):
        if cache == "static" and run.quick:
            run.leave_out("generate with a static cache: compiling its steps takes a minute")
            continue
        try:
            found[cache] = gpu_backends.decode_seconds(model, compared, prompt, steps, where, cache)
            what = f"decode, {compared} sequences: transformers generate, {cache} cache"
            run.add(what, 1e3 * found[cache], "ms", by=attention)
        except Exception as error:
            run.note(f"generate with a {cache} cache", error)
    run.details["decode by transformers"] = found
    if found:
        run.add(f"decode, {compared} sequences: times as fast", min(found.values()) / ours, "x")


def _decode_step(
    run: Run,
    made: Any,
    batch: int,
    prompt: int,
    context: int,
    steps: int,
    *,
    ahead: bool = True,
) -> float:
    """The median seconds of a step of `batch` sequences; without `ahead`, each step is launched
    after the tokens of the last one are read.
    """
    where, what = run.where, f"decode, {batch} sequences" + (", not ahead" if not ahead else "")
    spec = sampling(steps + WARM + SPARE, ahead)
    with made.generating(spec) as generator:
        _begin(run, generator, batch, prompt)
        by = gpu_backends.decoding_attention(generator, where)
        turn = min(8, steps)
        taken = where.seconds(
            lambda: [generator.step() for _ in range(turn)], max(1, steps // turn)
        )
        seconds = [turn_seconds / turn for turn_seconds in taken]
        if batch == run.sizes.compared and ahead:
            run.profiled("decode", lambda: [generator.step() for _ in range(8)])
        found = graphs_found(run, what, generator)
        say_preempted(run, what, generator)
        generator.abort([str(i) for i in range(batch)])
    config, network = gpu_backends.network_of(made).config, gpu_backends.network_of(made)
    weights = sum(p.numel() * p.element_size() for p in network.parameters())
    keys = (
        2 * config.num_layers * config.num_kv_heads * config.head_dim * where.torch_dtype.itemsize
    )
    bytes_read, median = weights + batch * context * keys, statistics.median(seconds)
    run.details[what] = {
        "seconds": seconds,
        "bytes_read": bytes_read,
        "graphs": found,
        "attention": by,
    }
    run.add(f"{what}: step", 1e3 * median, "ms", by=by)
    run.add(f"{what}: tokens", batch / median, "tokens/s", by=by)
    run.add(
        f"{what}: memory roofline",
        bytes_read / median / run.limit("bytes_per_s"),
        "of copies",
        by=by,
    )
    promised = run.promised("bytes_per_s")
    if promised is not None:
        rate = bytes_read / median
        run.add(
            f"{what}: memory roofline by the data sheet",
            rate / promised,
            "of the data sheet",
            by=by,
        )
    return median


def _begin(run: Run, generator: Any, batch: int, prompt: int) -> None:
    """Submit the prompts, and make steps until this number of sequences is captured."""
    generator.submit(gpu_backends.requests(batch, prompt, 1, run.sizes.config["vocab_size"]))
    produced = 0
    while produced < WARM * batch:
        produced += len(generator.step())


def say_preempted(run: Run, what: str, generator: Any) -> None:
    """A run that preempts computes keys and values again, so its figures are of another thing."""
    count = gpu_backends.preempted(generator)
    if count:
        run.add(f"{what}: sequences preempted", count, "times")
        run.details.setdefault("notes", []).append(
            f"{what}: memory was short, so {count} times a sequence lost its keys and values and "
            f"had them computed again; the "
            "figures include that"
        )


def decode_profile(run: Run) -> None:
    """Which kernels take the time of eight decode steps at the number of sequences that is compared
    with `generate`: first torch's, then weft's where it has any.
    """
    _profile_steps(run, "decode", "")
    # In this process alone; the networks and graphs of the steps before are gone.
    os.environ[fused.VARIABLE] = "all"
    fused.read_switches.cache_clear()
    _profile_steps(run, "decode_fused", ", fused kernels")


def _profile_steps(run: Run, profile: str, which: str) -> None:
    """Profile decode steps, and compare their log-probs with recomputed ones."""
    from benchmarks.gpu_sections import free

    sizes, count = run.sizes, run.sizes.compared
    free(run.where)
    made = gpu_backends.engine(sizes.config, run.where, trained=False)
    prompt = max(1, sizes.decode[-1] - WARM)
    with made.generating(sampling(WARM + SPARE)) as generator:
        _begin(run, generator, count, prompt)
        by = gpu_backends.decoding_attention(generator, run.where)
        (seconds,) = run.where.seconds(lambda: [generator.step() for _ in range(8)], 1)
        what = f"decode, {count} sequences{which}: the profiled step"
        run.add(what, 1e3 * seconds / 8, "ms", by=by)
        run.profiled(profile, lambda: [generator.step() for _ in range(8)])
        generator.abort([str(i) for i in range(count)])
    asked = gpu_backends.requests(4, 50, 1, sizes.config["vocab_size"])
    with made.generating(sampling(40)) as generator:
        generator.submit(asked)
        batch = gpu_backends.sample_of(asked, gpu_backends.drain(generator), 1)
    again = made.forward(batch, frozenset({"logprobs"})).data["logprobs"].float()
    gap = (again - batch.data["logprobs"].float().to(again.device)).abs().mean()
    run.add(f"sampled and recomputed{which}: mean gap of the profile", float(gap), "", by=by)


def graphs_found(run: Run, what: str, generator: Any) -> dict[str, Any]:
    """Captured sizes, steps with and without a graph, and why there are none."""
    graphs = gpu_backends.graphs_of(generator)
    if graphs is None:
        return {"captured": 0, "note": "this device has none"}
    found = {
        "captured": len(graphs),
        "note": graphs.note,
        "counts": dict(getattr(graphs, "counts", {})),
    }
    if what:
        run.add(f"{what}: decode graphs captured", len(graphs), "sizes")
    return found


def sampling(new: int, ahead: bool = True) -> Any:
    from weft.engine.spec import GenerationSpec

    return GenerationSpec(max_new_tokens=new, seed=1, decode_ahead=ahead)
