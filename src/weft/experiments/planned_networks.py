"""Networks as their backends would build them, from which a plan estimates time and memory.

No weights are read, and the devices need not exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from weft.engine.spec import ModelSpec, ParallelSpec
from weft.planner.decoder_sizes import DecoderSizes, build_decoder_sizes
from weft.planner.memory import MemorySettings, NetworkShape, build_settings
from weft.topology import Layout, Mesh

if TYPE_CHECKING:
    import torch

    from weft.data.tokenizer import Tokenizer
    from weft.models.network.config import TransformerConfig

# Modules with a function `planned`, by backend; each is imported when it is needed.
MODULES = {name: f"weft.engine.backends.{name}" for name in ("torch", "hf", "jax")}
# Descriptions by mesh, device and spec within `reuse_descriptions`, else None
_descriptions: ContextVar[dict[tuple[Mesh, str, str], Mapping[str, Any]] | None] = ContextVar(
    "descriptions", default=None
)


@contextmanager
def reuse_descriptions() -> Iterator[None]:
    """Describe equal engines only once within the context, in which no file may change.

    A comparison of many devices describes the same few networks hundreds of times.
    """
    token = _descriptions.set({})
    try:
        yield
    finally:
        _descriptions.reset(token)


def describe_planned_engine(
    spec: ModelSpec, mesh: Mesh, device: torch.device, tokenizer: Tokenizer | None = None
) -> Mapping[str, Any]:
    """Return the `Engine.description` of the mesh's first rank without building the engine.

    No weights are read, and the device need not exist. For a user-defined backend, the description
    contains only its name. Raises the same `UserError`s as the backend.
    """
    from weft.engine.backends.auto import choose_backend

    spec = choose_backend(spec)
    if spec.backend not in MODULES:
        return {"family": spec.backend, "num_parameters": 0, "num_trainable": 0, "notes": []}
    spec = replace(spec, planned=True)
    known = _descriptions.get()
    key = (mesh, str(device), repr(spec))
    if known is not None and tokenizer is None and key in known:
        return known[key]
    backend = import_module(MODULES[spec.backend])
    description: Mapping[str, Any] = backend.planned(spec, mesh, device, tokenizer)
    if known is not None and tokenizer is None:
        known[key] = description
    return description


def build_memory_settings(spec: ModelSpec, device: torch.device) -> MemorySettings:
    """Return the memory settings of a role of which nothing is offloaded between calls.

    What tensors a CPU allocates also depends on weft's kernels.
    """
    from weft import kernels
    from weft.engine.torch.engine import choose_dtype
    from weft.models.network.output_projection import MIN_CHUNK_ROWS, get_chunk_cells

    dtype = choose_dtype(spec)
    on_cpu = device.type == "cpu"
    plain = on_cpu and dtype == "float32"
    has_kernels = plain and kernels.cpu_library() is not None
    return replace(
        build_settings(spec, dtype, device.type, MIN_CHUNK_ROWS),
        chunk_cells=get_chunk_cells(device),
        packs=plain and not has_kernels,
        in_place=has_kernels,
        adds_rows=plain,
        widens=on_cpu and dtype in ("bfloat16", "float16"),
    )


def build_planned_network(
    spec: ModelSpec, config: TransformerConfig, device: torch.device
) -> DecoderSizes:
    """Return the sizes of a role's decoder, with those of the network that its backend would build.

    `config` describes the decoder. Raises the same `UserError`s as the backend.
    """
    network = build_decoder_sizes(spec, config, on_gpu=device.type != "cpu")
    spec = replace(spec, dtype=network.settings.dtype)
    if spec.backend != "jax":  # which reads its layout from the spec
        # The whole network is the same for all layouts; without them, more specs are equal.
        spec = replace(spec, layout=None, device_mesh=None, parallel=ParallelSpec())
    facts = describe_planned_engine(spec, Mesh.on_first_devices(Layout()), device)
    sizes = facts.get("sizes")
    if sizes is None:
        return network
    total = facts["num_parameters"]
    held = NetworkShape(total, facts["num_trainable"] or total, **sizes)
    settings = build_memory_settings(spec, device)
    leaves = network.settings.weights_leave
    return replace(network, held=held, settings=replace(settings, weights_leave=leaves))
