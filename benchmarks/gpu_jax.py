"""The section `jax` of `benchmarks/gpu.py`: `backend=jax` on the same GPU, where jax has CUDA."""

from __future__ import annotations

import importlib.util
import statistics
from typing import Any

from benchmarks import gpu_backends
from benchmarks.gpu_backends import Where
from benchmarks.gpu_decode import SPARE, WARM, sampling
from benchmarks.gpu_run import Run


def jax_section(run: Run) -> None:
    """A training step and decode steps by JAX, on random weights in the shape of `sft`; on a GPU the
    training step with cuDNN's attention too.
    """
    obstacle = find_obstacle(run.where)
    if obstacle is not None:
        run.leave_out(f"backend=jax: {obstacle}")
        return
    _time_training(run, "xla")
    _time_decoding(run)
    if run.where.device.type == "cuda":
        try:
            _time_training(run, "cudnn")
        except Exception as error:  # a kernel that has to be asked for
            run.note("jax, sft, attention=cudnn", error)


def find_obstacle(where: Where) -> str | None:
    """Return why JAX cannot compute on the device, or None if it can."""
    for package in ("jax", "optax"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    from weft.engine.jax.engine import find_devices
    from weft.errors import ConfigError

    try:
        find_devices(where.device.type)
    except ConfigError as error:
        return str(error)
    return None


def _time_training(run: Run, attention: str) -> None:
    """Time the step with one of the implementations of attention; `xla` is the usual one."""
    import jax

    from weft.algorithms.sft import SFTLoss

    lengths = run.sizes.sft
    made, vocabulary = _build_engine(run, trained=True, attention=attention)
    batch, most = gpu_backends.batch_of(lengths, vocabulary), sum(lengths)

    def step() -> None:
        made.train([batch], SFTLoss(), max_tokens=most)
        jax.block_until_ready(made._network.arrays)  # torch waits for its own kernels alone

    timed = run.where.seconds(step, run.sizes.times, warm=2)
    operations = gpu_backends.operations(made, lengths)
    rate = operations / statistics.median(timed)
    what = "jax, sft" if attention == "xla" else f"jax, sft, attention={attention}"
    by = {"xla": "XLA", "cudnn": "cuDNN"}[attention]
    run.details[what] = {"seconds": timed, "operations": operations}
    run.add(f"{what}: step of {most} tokens", 1e3 * statistics.median(timed), "ms", by=by)
    run.add(f"{what}: tokens", most / statistics.median(timed), "tokens/s", by=by)
    run.add(f"{what}: MFU", rate / run.limit("products_per_s"), "of random products", by=by)
    promised = run.promised("products_per_s")
    if promised is not None:
        run.add(f"{what}: MFU by the data sheet", rate / promised, "of the data sheet", by=by)


def _time_decoding(run: Run) -> None:
    *_, prompt, _ = run.sizes.decode
    batch, steps = run.sizes.compared, run.sizes.decode_steps
    made, vocabulary = _build_engine(run, trained=False)
    with made.generating(sampling(steps + WARM + SPARE)) as generator:
        generator.submit(gpu_backends.requests(batch, prompt, 1, vocabulary))
        produced = 0
        while produced < WARM * batch:
            produced += len(generator.step())
        timed = run.where.seconds(generator.step, steps)
        generator.abort([str(number) for number in range(batch)])
    run.details["jax, decode"] = {"seconds": timed}
    run.add(f"jax, decode, {batch} sequences: step", 1e3 * statistics.median(timed), "ms")
    run.add(f"jax, decode, {batch} sequences: tokens", batch / statistics.median(timed), "tokens/s")


def _build_engine(run: Run, *, trained: bool, attention: str = "xla") -> tuple[Any, int]:
    """Return a JAX engine with random weights, and the size of its vocabulary."""
    from weft.checkpoints import hf_io
    from weft.engine.backends.torch import compute_cost
    from weft.engine.jax import engine
    from weft.engine.jax.attention import choose_kernel
    from weft.engine.jax.decoder import DecoderSettings
    from weft.engine.jax.mesh import build_mesh
    from weft.engine.jax.parameters import ParameterStacks
    from weft.engine.spec import ModelSpec, Schedule
    from weft.engine.torch.engine import BuiltNetwork
    from weft.models.network.linear import find_canonical_parameters
    from weft.models.network.transformer import Transformer
    from weft.topology import Layout

    raw, where = run.sizes.config, run.where
    config = hf_io.find_family(raw, None).config(raw)
    network = Transformer.build_empty(config, device=where.device, dtype=where.torch_dtype)
    gpu_backends.fill(network)
    network.requires_grad_(trained)
    parameters = find_canonical_parameters(network)
    stacks = ParameterStacks(parameters)
    dtype = engine.DTYPES[where.dtype]
    mesh = build_mesh(None, engine.find_devices(where.device.type), trained=trained)
    wide = engine.DTYPES["float32"] if trained else dtype
    kernel = choose_kernel(attention, mesh.devices.flat[0].platform, config, dtype)
    settings = DecoderSettings(config, "lm", "last", dtype, attention=kernel)
    arrays = stacks.build_arrays(lambda name, _: parameters[name].data, lambda name: wide, mesh)
    facts = {"family": raw["model_type"], "vocab_size": config.vocab_size}
    built = BuiltNetwork(
        network=engine.JaxNetwork(settings, stacks, arrays, None),
        save=gpu_backends.refuse_saving,
        cost=compute_cost(network, frozen=False),
        facts=facts,
    )
    schedule = Schedule(10_000, 0) if trained else None
    spec = ModelSpec(dtype=where.dtype, backend="jax", trained=trained, schedule=schedule)
    return engine.JaxEngine(built, stacks, spec, Layout(), frozenset()), config.vocab_size
