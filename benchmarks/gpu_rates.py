"""Estimated times of decode steps and prompts on an H100 next to published measurements.

    pip install aiconfigurator
    python -m benchmarks.gpu_rates             # the held-out cases
    python -m benchmarks.gpu_rates --fit       # the cases that the constants may be adjusted to

aiconfigurator 0.12 has tables of measured kernels and composes the latency of a step from them, here
with those of vLLM: torch's matrix products, flash attention 3 and an all-reduce of its own. Compared
are kernels and messages. What weft adds for starting kernels (`overhead`) is left out on one side, and
the tables do not have it. The package is used if it is installed; none of its data is stored here.
"""

from __future__ import annotations

import json
import logging
import statistics
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import results
from weft.planner.compute_times import ComputeTimes
from weft.planner.decoder_sizes import CHUNK_ROWS, DecoderSizes
from weft.planner.devices import DeviceRates, find_gpu_rates
from weft.planner.memory import MemorySettings, NetworkShape
from weft.planner.messages import estimate_decode_messages, list_group
from weft.topology import Layout, Mesh

BACKENDS = ("vllm", "trtllm")
SYSTEM = "h100_sxm"


class Model(NamedTuple):
    """Sizes of a dense decoder with a gated MLP."""

    layers: int
    hidden: int
    heads: int
    key_heads: int
    head: int
    inner: int
    vocab: int


MODELS = {
    "1B": Model(16, 2048, 32, 8, 64, 8192, 128256),
    "3B": Model(28, 3072, 24, 8, 128, 8192, 128256),
    "8B": Model(36, 4096, 32, 8, 128, 12288, 151936),
    "14B": Model(40, 5120, 40, 8, 128, 17408, 151936),
    "32B": Model(64, 5120, 64, 8, 128, 25600, 151936),
    "70B": Model(80, 8192, 64, 8, 128, 28672, 128256),
}


class Case(NamedTuple):
    """A decode step, or the computation of prompts, of `batch` sequences of `context` tokens."""

    phase: str
    model: str
    tensor: int
    batch: int
    context: int


FIT = [
    Case(*each)
    for each in (
        ("decode", "1B", 1, 1, 512),
        ("decode", "1B", 1, 32, 2048),
        ("decode", "1B", 2, 128, 1024),
        ("decode", "3B", 1, 8, 1024),
        ("decode", "3B", 1, 256, 512),
        ("decode", "3B", 2, 64, 4096),
        ("decode", "8B", 1, 1, 1024),
        ("decode", "8B", 1, 64, 1024),
        ("decode", "8B", 2, 16, 8192),
        ("decode", "8B", 4, 128, 2048),
        ("decode", "14B", 1, 16, 2048),
        ("decode", "14B", 2, 64, 512),
        ("decode", "14B", 4, 256, 1024),
        ("decode", "32B", 2, 8, 1024),
        ("decode", "32B", 4, 32, 4096),
        ("decode", "32B", 8, 128, 1024),
        ("decode", "70B", 4, 16, 1024),
        ("decode", "70B", 8, 64, 2048),
        ("decode", "70B", 8, 256, 512),
        ("prompts", "1B", 1, 16, 512),
        ("prompts", "3B", 1, 4, 2048),
        ("prompts", "8B", 1, 1, 4096),
        ("prompts", "8B", 2, 16, 1024),
        ("prompts", "14B", 1, 32, 256),
        ("prompts", "14B", 4, 4, 4096),
        ("prompts", "32B", 2, 8, 1024),
        ("prompts", "32B", 8, 2, 8192),
        ("prompts", "70B", 4, 4, 2048),
        ("prompts", "70B", 8, 32, 512),
        ("prompts", "70B", 8, 1, 1024),
    )
]
HELD_OUT = [
    Case(*each)
    for each in (
        ("decode", "1B", 1, 4, 4096),
        ("decode", "1B", 1, 256, 256),
        ("decode", "1B", 4, 64, 2048),
        ("decode", "3B", 1, 1, 2048),
        ("decode", "3B", 1, 64, 1024),
        ("decode", "3B", 4, 16, 512),
        ("decode", "8B", 1, 8, 512),
        ("decode", "8B", 1, 256, 512),
        ("decode", "8B", 2, 32, 4096),
        ("decode", "8B", 8, 4, 1024),
        ("decode", "14B", 1, 2, 128),
        ("decode", "14B", 2, 128, 1024),
        ("decode", "14B", 8, 32, 8192),
        ("decode", "32B", 2, 64, 1024),
        ("decode", "32B", 4, 4, 2048),
        ("decode", "32B", 4, 256, 512),
        ("decode", "32B", 8, 16, 8192),
        ("decode", "70B", 4, 64, 512),
        ("decode", "70B", 8, 1, 2048),
        ("decode", "70B", 8, 128, 4096),
        ("prompts", "1B", 1, 1, 1024),
        ("prompts", "1B", 2, 64, 256),
        ("prompts", "3B", 1, 16, 1024),
        ("prompts", "3B", 2, 2, 8192),
        ("prompts", "8B", 1, 64, 512),
        ("prompts", "8B", 4, 8, 2048),
        ("prompts", "14B", 2, 2, 4096),
        ("prompts", "32B", 4, 16, 512),
        ("prompts", "70B", 8, 16, 1024),
        ("prompts", "70B", 8, 2, 4096),
    )
]


# -- weft's estimate


def build_sizes(model: Model) -> DecoderSizes:
    """Return the sizes of a frozen decoder in bfloat16."""
    query, key = model.heads * model.head, model.key_heads * model.head
    layer = 2 * model.hidden * (query + key) + 3 * model.hidden * model.inner
    embedding = model.vocab * model.hidden
    total = model.layers * layer + 2 * embedding
    shape = NetworkShape(
        parameters=total,
        trainable=total,
        layers=model.layers,
        hidden=model.hidden,
        query=query,
        key=key,
        inner=model.inner,
        vocab=model.vocab,
        embedding=embedding,
    )
    settings = MemorySettings("bfloat16", False, "adamw", 0, False, CHUNK_ROWS, keeps_cache=True)
    return DecoderSizes(shape, settings, layer, embedding)


def estimate_case(case: Case, rates: DeviceRates) -> float:
    """Return the estimated milliseconds of a case, without overhead."""
    network = build_sizes(MODELS[case.model])
    mesh = Mesh.on_first_devices(Layout(tensor=case.tensor))
    times = ComputeTimes(network, rates, mesh.layout)
    layers = network.shape.layers
    if case.phase == "decode":
        block, rest = times.compute_decode(case.batch, case.context)
        messages = estimate_decode_messages(network, case.batch, mesh, rates, 0.0)
    else:
        tokens = case.batch * case.context
        block, rest = times.compute_prefill(tokens, case.context, case.batch)
        messages = 0.0
        if case.tensor > 1:
            states = tokens * network.shape.hidden * network.element_bytes
            group = list_group(mesh, "tensor")
            messages = 2 * layers * rates.time_sum(states, group, case.tensor)
    cost = block.multiply(layers).add(rest)
    return 1000 * (cost.seconds - cost.overhead + messages)


# -- the published tables


def write_model(folder: Path, model: Model) -> Path:
    """Write the config.json of a Llama with these sizes, and return its directory."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.key_heads,
        "head_dim": model.head,
        "intermediate_size": model.inner,
        "vocab_size": model.vocab,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def read_case(case: Case, path: Path, backend: str) -> float:
    """Return the milliseconds of a case that the package composes from its tables."""
    from aiconfigurator.cli.api import cli_estimate

    decodes = case.phase == "decode"
    found = cli_estimate(
        str(path),
        SYSTEM,
        mode="static_gen" if decodes else "static_ctx",
        backend_name=backend,
        isl=case.context,
        osl=2,
        batch_size=case.batch,
        tp_size=case.tensor,
        gemm_quant_mode="bfloat16",
        kvcache_quant_mode="bfloat16",
        fmha_quant_mode="bfloat16",
    )
    return float(found.tpot if decodes else found.ttft)


def main(words: Sequence[str] | None = None) -> None:
    """Compare the cases, and print and write the table and its median errors."""
    parser = results.parser("gpu_rates", str(__doc__), repeats=1)
    parser.add_argument("--fit", action="store_true", help="the cases of the fit; writes no file")
    arguments = parser.parse_args(words)
    arguments.dry = arguments.dry or arguments.fit
    results.start(arguments)
    cases = FIT if arguments.fit else HELD_OUT
    logging.disable(logging.CRITICAL)
    warnings.filterwarnings("ignore")
    rates = find_gpu_rates("H100", "bfloat16")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: write_model(Path(folder) / name, model) for name, model in MODELS.items()}
        for case in cases[:2] if arguments.quick else cases:
            rows.append(compare_case(case, paths[case.model], rates))
    notes = []
    for backend in BACKENDS:
        errors = [abs(row[f"{backend} error, %"]) for row in rows]
        notes.append(
            f"{backend}: median error {statistics.median(errors):.1f}%, largest {max(errors):.0f}%"
        )
    report = results.Results("gpu_rates", rows, {"system": SYSTEM}, notes=notes)
    results.report(report, arguments)


def compare_case(case: Case, path: Path, rates: DeviceRates) -> dict[str, Any]:
    """Return the row of a case, whose model has its config.json in `path`."""
    estimate = estimate_case(case, rates)
    row: dict[str, Any] = {
        "case": f"{case.phase} {case.model} t{case.tensor} {case.batch} x {case.context}",
        "weft, ms": estimate,
    }
    for backend in BACKENDS:
        published = read_case(case, path, backend)
        row[f"{backend}, ms"] = published
        row[f"{backend} error, %"] = 100 * (estimate / published - 1)
    return row


if __name__ == "__main__":
    main()
