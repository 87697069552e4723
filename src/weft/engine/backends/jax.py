"""Backend `jax`, which runs the networks of weft's own families on JAX devices.

The devices can belong to several processes. Options that the engine does not support are refused by
name (`docs/support.md` lists them).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft.checkpoints import hf_io
from weft.data.tokenizer import Tokenizer
from weft.engine.backends import common
from weft.engine.backends.torch import compute_cost, save_model, uses_dropout
from weft.engine.jax.mesh_sizes import read_sizes
from weft.engine.spec import ModelSpec, ParallelSpec
from weft.engine.torch import network_source
from weft.engine.torch.engine import BuiltNetwork
from weft.engine.torch.network_source import NetworkSource
from weft.engine.torch.optimizer import list_decayed_names
from weft.errors import ConfigError
from weft.extras import install
from weft.models.network.config import TransformerConfig
from weft.models.network.linear import find_canonical_parameters
from weft.models.network.moe import choose_aux_loss_weight
from weft.models.network.transformer import Transformer
from weft.registry import register_backend
from weft.topology import Layout, Mesh

if TYPE_CHECKING:
    from weft.engine.jax.engine import JaxEngine


@register_backend("jax")
def jax_backend(
    spec: ModelSpec, layout: Layout, *, tokenizer: Tokenizer | None = None
) -> JaxEngine:
    """Build an engine that runs the model directory `spec.path` on JAX devices.

    `tokenizer` is the role's tokenizer, which is loaded if it is not given. Raises `UserError` for
    a model that cannot be read, and for options that only other backends support.
    """
    check_jax()
    path = common.check_spec(spec)
    check_options(spec)
    from weft.engine.jax import engine
    from weft.engine.jax.attention import choose_kernel
    from weft.engine.jax.decoder import DecoderSettings
    from weft.engine.jax.mesh import build_row_sharding
    from weft.engine.jax.parameters import ParameterStacks

    mesh = build_role_mesh(spec)
    platform = mesh.devices.flat[0].platform
    spec = common.with_dtype(spec, path, on_cpu=platform == "cpu")
    engine.allow_dtype(str(spec.dtype))
    # Build the network as torch modules on the meta device, which describe its parameters.
    family, config = hf_io.read_config(path, spec.type)
    if tokenizer is None:
        tokenizer = Tokenizer.load(spec.tokenizer, spec.path, spec.trust_remote_code)
    config = network_source.adapt_config(spec, config, tokenizer)
    source = NetworkSource(spec, path, config, tokenizer.added_from)
    meta_network = source.build_network(None)
    check_network(spec, meta_network)
    # Read the parameters to the JAX devices.
    parameters = find_canonical_parameters(meta_network)
    stacks = ParameterStacks(parameters)
    dtype = engine.DTYPES[str(spec.dtype)]
    trained_dtype = engine.DTYPES["float64" if spec.dtype == "float64" else "float32"]
    arrays = stacks.build_arrays(
        source.read_values, lambda name: trained_dtype if name in stacks.trained else dtype, mesh
    )
    # Build the engine.
    decoder = DecoderSettings(
        config=config,
        head=meta_network.kind,
        pooling=meta_network.pooling,
        dtype=dtype,
        adapter_scale=spec.lora.alpha / spec.lora.r if spec.lora.r else 1.0,
        policy="nothing_saveable" if spec.recomputed_layers else spec.recompute_policy,
        row_sharding=build_row_sharding(mesh) if mesh.size > 1 else None,
        attention=choose_kernel(spec.attention, platform, config, dtype),
    )
    padding = common.find_skipped_padding(tokenizer, spec)
    network = engine.JaxNetwork(decoder, stacks, arrays, padding, spec.longest)

    def save(directory: Path, tensors: Mapping[str, Tensor], tokenizer: Tokenizer) -> None:
        saved_tokenizer = common.choose_padding(tokenizer, spec, meta_network.pooling)
        saved_tokenizer.save(directory)
        save_model(directory, tensors, meta_network, spec, config, saved_tokenizer)

    built = BuiltNetwork(
        network=network,
        save=save,
        cost=compute_cost(meta_network, frozen=spec.has_adapters),
        facts={
            "family": family.name,
            "vocab_size": config.vocab_size,
            "num_layers": config.num_layers,
        },
        notes=common.list_padding_notes(tokenizer, spec, meta_network.pooling),
    )
    decayed = {stacks.places[name].array for name in list_decayed_names(meta_network)}
    return engine.JaxEngine(built, stacks, spec, layout, frozenset(decayed))


def build_role_mesh(spec: ModelSpec) -> Any:
    """Return the JAX mesh of a role's layout, built from the devices that `spec.device` names.

    Raises `ConfigError` if jax is not installed, or has no such devices or too few of them.
    """
    check_jax()
    from weft.engine.jax.engine import find_devices
    from weft.engine.jax.mesh import build_mesh

    layout = read_layout(spec)
    device = spec.device
    if layout is not None and device is not None:
        device = device.partition(":")[0]  # the layout determines the devices, not the index
    return build_mesh(layout, find_devices(device), trained=spec.trained)


def read_layout(spec: ModelSpec) -> str | None:
    """Return the mesh or layout of the options `layout` or `parallel.*`, or None for one device.

    Raises `ConfigError` if the text is neither a mesh nor a layout, and if both options are set.
    """
    sizes = spec.parallel
    text = spec.layout
    if sizes != ParallelSpec():
        if text is not None:
            raise ConfigError(f"layout={text} and parallel.* exclude each other; set one of them")
        text = (
            f"d{sizes.data_parallel_size}t{sizes.model_parallel_size}"
            f"p{sizes.pipeline_parallel_size}"
        )
    if text is not None:
        read_sizes(text)
    return text


def check_jax() -> None:
    """Raise `ConfigError` if jax or optax is not installed."""
    for name in ("jax", "optax"):
        if find_spec(name) is None:
            raise ConfigError(
                f"backend=jax: the package {name!r} is not installed; run: {install('jax')}"
            )


# Options that only other backends support, and advice for the user.
REFUSED = {
    "dtype=float16": "write bfloat16 or float32",
    "compile": "leave it out: every pass is compiled",
    "fp8": "use backend=torch",
    "quantize": "use backend=torch",
    "offload": "use backend=torch",
    "prefix.num_tokens": "use backend=torch",
    "residual_dropout": "use backend=torch",
    "recompute_every": "write gradient_checkpointing=true, or a recompute_policy",
    "optimizer.state_dtype": "use backend=torch",
    "optimizer.offload": "use backend=torch",
    "zero_stage": "write a mesh: dp has copies, fsdp parts",
    "sequence_parallel": "leave it out: mp divides products alone",
    "pipeline_schedule": "leave it out: there are no stages",
    "pipeline_stages_per_rank": "leave it out: there are no stages",
}


def check_options(spec: ModelSpec) -> None:
    """Raise `ConfigError` for an option that the engine does not support."""
    default_spec = ModelSpec()
    for option, advice in REFUSED.items():
        # Read the option's value and its default.
        name, _, refused_value = option.partition("=")
        value: Any = spec
        default: Any = default_spec
        for part in name.split("."):
            value = getattr(value, part)
            default = getattr(default, part)
        # Accept the default, other values if only one is refused, and recomputation of all layers.
        is_accepted = value == default or (refused_value and value != refused_value)
        if is_accepted or (name == "recompute_every" and value == 1):
            continue
        text = str(value).lower() if isinstance(value, bool) else value
        raise ConfigError(f"{name}={text}: backend=jax does not have it; {advice}")


# Parts of networks and of training that only backend=torch computes, and advice for the user.
REFUSED_PARTS = {
    "dropout": "write dropout=0 (and lora.dropout=0)",
    "load-balancing loss": "write router_aux_loss_coef=0, or use backend=torch",
    "experts in some layers only": "use backend=torch",
    "trained prefixes": "use backend=torch",
}


def check_network(spec: ModelSpec, network: Transformer) -> None:
    """Raise `ConfigError` for a part of the network that the engine does not compute."""
    config: TransformerConfig = network.config
    expert_layers = () if config.experts is None else config.experts.layers
    aux_loss_weight = choose_aux_loss_weight(config, spec.router_aux_loss_coef)
    has_part = {
        "dropout": spec.trained and uses_dropout(network, spec),
        "load-balancing loss": spec.trained and bool(aux_loss_weight),
        "experts in some layers only": not all(expert_layers),
        "trained prefixes": config.prefix_tokens > 0,
    }
    for part, advice in REFUSED_PARTS.items():
        if has_part[part]:
            raise ConfigError(f"{spec.path}: backend=jax does not have {part}; {advice}")


def planned(
    spec: ModelSpec, mesh: Mesh, device: torch.device, tokenizer: Tokenizer | None = None
) -> Mapping[str, Any]:
    """Return a description of the engine, computed from config.json without jax and weights.

    The description has no sizes for estimating activations, because the estimate is for the torch
    engine. Raises `UserError` for options and models that the engine does not support.
    """
    path = common.check_spec(spec)
    check_options(spec)
    read_layout(spec)
    family, config = hf_io.read_config(path, spec.type)
    if tokenizer is not None:
        config = network_source.adapt_config(spec, config, tokenizer)
    network = NetworkSource(spec, path, config).build_network(None)
    check_network(spec, network)
    parameters = find_canonical_parameters(network)
    trained = sum(p.data.numel() for p in parameters.values() if p.requires_grad)
    return {
        "family": family.name,
        "vocab_size": config.vocab_size,
        "num_layers": config.num_layers,
        "num_parameters": sum(part.data.numel() for part in parameters.values()),
        "num_trainable": trained,
        "dtype": spec.dtype,
        "notes": [],
    }
