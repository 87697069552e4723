"""Backend `hf`, which runs any decoder of `transformers` on one device."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from weft.checkpoints import hf_io
from weft.data.tokenizer import Tokenizer
from weft.engine.backends import common
from weft.engine.device import TokenCost
from weft.engine.hf import load as hf_load
from weft.engine.hf import lora as hf_lora
from weft.engine.hf.imported import GradientCheckpointingLayer, PreTrainedModel
from weft.engine.hf.network import DIGITS, HFNetwork
from weft.engine.hf.trial import DecoderTrial, try_out
from weft.engine.spec import ModelSpec
from weft.engine.torch.engine import HOST, BuiltNetwork, RankShard, TorchEngine
from weft.errors import ConfigError
from weft.extras import install
from weft.models.network.config import TransformerConfig
from weft.models.network.transformer import Head, Pooling
from weft.parallel.mesh import RankMesh
from weft.registry import register_backend
from weft.topology import Layout, Mesh

# Prefix of the network's parameter names: the module is the attribute `module` of `HFNetwork`.
PREFIX = "module."


@register_backend("hf")
def hf_backend(
    spec: ModelSpec,
    layout: Layout,
    mesh: RankMesh | None = None,
    tokenizer: Tokenizer | None = None,
) -> TorchEngine:
    """Build an engine that runs the model directory `spec.path` with `transformers`.

    `tokenizer` is the role's tokenizer, which is loaded if it is not given. Raises `UserError` for
    a model that cannot be read or run.
    """
    # Check the options, and load the module.
    path = common.check_spec(spec)
    common.check_replicated_layout(layout)
    device = common.choose_role_device(spec)
    common.check_compile(spec, layout, device)
    spec = common.with_dtype(spec, path, on_cpu=device.type != "cuda")
    module = hf_load.load(spec, path, device, common.choose_reading_dtype(spec))
    use_cache = module.config.to_dict().get("use_cache")
    module.config.use_cache = False  # passes need no cache; saved files get the original value
    # Find out how the decoder can be run.
    embedding = module.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    trial = try_out(module, cast(Head, spec.head), embedding.num_embeddings)
    config = _describe(module, trial, embedding)
    if tokenizer is None:
        tokenizer = Tokenizer.load(spec.tokenizer, spec.path, spec.trust_remote_code)
    hf_io.check_vocabulary(config, tokenizer.vocab_size, path, spec.tokenizer.path or path)
    # Count operations per token before adapters are attached.
    tied = spec.head == "lm" and module.config.tie_word_embeddings
    matrices = common.count_product_parameters(module, embedding, tied=tied)
    head = trial.head.layer.weight.numel()
    cost = TokenCost(
        matrices,
        config.num_layers * config.num_heads * config.head_dim,
        backward=1 if spec.has_adapters else 2,
        late=head,
    )
    _set_up(module, spec)
    caches = _can_cache(trial)
    network = HFNetwork(
        module,
        cast(Head, spec.head),
        trial.head,
        config,
        pooling=_choose_pooling(spec, path),
        callers=trial.callers,
        caches=caches,
    )
    network.padding = common.find_skipped_padding(tokenizer, spec)

    def save(directory: Path, tensors: Mapping[str, Tensor], tokenizer: Tokenizer) -> None:
        saved_tokenizer = common.choose_padding(tokenizer, spec, network.pooling)
        saved_tokenizer.save(directory)
        module.config.use_cache = use_cache
        _save(directory, tensors, network, spec, saved_tokenizer)
        module.config.use_cache = False

    rates = hf_load.read_dropout_rates(module.config.to_dict())
    built = BuiltNetwork(
        network=network,
        save=save,
        cost=cost,
        facts={
            "family": config.family,
            "vocab_size": config.vocab_size,
            "num_layers": module.config.num_hidden_layers,
        },
        dropout=any(rates.values()) or (spec.has_adapters and spec.lora.dropout > 0.0),
        adapters_off=(lambda: hf_lora.disable_adapters(module)) if spec.has_adapters else None,
        notes=(
            *_list_notes(module, trial, caches),
            *_list_reading_notes(spec, device),
            *common.list_padding_notes(tokenizer, spec, network.pooling),
        ),
        part=None if mesh is None else _build_copy_shard(network, mesh, device),
    )
    return TorchEngine(built, spec, layout, device)


def planned(
    spec: ModelSpec, mesh: Mesh, device: torch.device, tokenizer: Tokenizer | None = None
) -> Mapping[str, Any]:
    """Return a description of the engine on one rank, computed from config.json without weights.

    Raises `UserError` for options or models that `hf_backend` rejects before it reads weights.
    """
    path = common.check_spec(spec)
    common.check_replicated_layout(mesh.layout)
    common.check_compilable(spec, mesh.layout)
    module = hf_load.build_meta_module(spec, path)
    embedding = module.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    _set_up(module, spec)
    parameters = {id(parameter): parameter for parameter in module.parameters()}.values()
    return {
        "family": module.config.model_type,
        "vocab_size": embedding.num_embeddings,
        "num_layers": module.config.num_hidden_layers,
        "num_parameters": sum(p.numel() for p in parameters),
        "num_trainable": sum(p.numel() for p in parameters if p.requires_grad),
        "dtype": spec.dtype,
        "notes": [],
    }


def _build_copy_shard(network: HFNetwork, mesh: RankMesh, device: torch.device) -> RankShard:
    from weft.engine.torch import rank_shards  # FSDP2 takes a second to import

    return rank_shards.build_copy_shard(network, mesh, device)


def _set_up(module: PreTrainedModel, spec: ModelSpec) -> None:
    """Apply the role's settings to the module: trained parameters, adapters and recomputation."""
    module.requires_grad_(spec.trained)
    if spec.has_adapters:
        hf_lora.attach(module, spec.lora, seed=spec.seed)
        if spec.mirrors:
            module.requires_grad_(False)
    _recompute(module, spec)


def _recompute(module: PreTrainedModel, spec: ModelSpec) -> None:
    """Configure the module to recompute every n-th layer in the backward pass.

    n is `spec.recomputed_layers`. Raises `ConfigError` if the module can only recompute all layers
    or none, or has fewer than n layers.
    """
    if not spec.recomputed_layers:
        return
    interval = spec.recomputed_layers
    # The call is deprecated, but older supported versions lack its replacement.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers = [m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)]
    if interval > 1 and not layers:
        raise ConfigError(
            f"recompute_every={interval}: backend=hf recomputes all layers of "
            f"{module.config.model_type} or none; "
            "write gradient_checkpointing=true, or backend=torch"
        )
    if layers:
        common.check_recomputation(spec, len(layers))
    for number, layer in enumerate(layers, 1):
        layer.gradient_checkpointing = number % interval == 0


def _describe(
    module: PreTrainedModel, trial: DecoderTrial, embedding: nn.Embedding
) -> TransformerConfig:
    """Return the configuration that the generator needs: vocabulary, positions and cache shapes.

    If weft's cache cannot store the decoder's keys and values, it stores the token ids instead.
    Each id is stored as a vector of `DIGITS` numbers, which takes the place of a key. The
    configuration therefore has one layer, one head and the head size `DIGITS`.
    """
    values = module.config.to_dict()
    heads = 1
    kv_heads = 1
    head_dim = DIGITS
    layers = 1
    if _can_cache(trial):
        heads, kv_heads, head_dim, _ = trial.shapes[0]
        layers = len(trial.shapes)
    # Another embedding with a row for each position is a table of learned positions.
    positions = values.get("max_position_embeddings") or values.get("n_positions") or 0
    has_learned_positions = any(
        other.num_embeddings >= positions > 0
        for other in module.modules()
        if isinstance(other, nn.Embedding) and other is not embedding
    )
    return TransformerConfig(
        family=values["model_type"],
        vocab_size=embedding.num_embeddings,
        hidden_size=trial.hidden_size,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=0,
        max_positions=positions,
        learned_positions=positions if has_learned_positions else None,
    )


def _can_cache(trial: DecoderTrial) -> bool:
    """Return whether weft's cache can store the decoder's keys and values.

    The shapes must be equal in all layers, and keys must be as wide as values.
    """
    return len(set(trial.shapes)) == 1 and trial.shapes[0][2] == trial.shapes[0][3]


def _choose_pooling(spec: ModelSpec, path: str) -> Pooling:
    """Return "mean" if the spec or the model directory asks for mean pooling, else "last"."""
    stored = hf_io.read_raw(path).get(hf_io.POOLING)
    return "mean" if "mean" in (spec.pooling, stored) else "last"


def _list_notes(module: PreTrainedModel, trial: DecoderTrial, caches: bool) -> tuple[str, ...]:
    """Return notes for the user on operations that are slow with this model, and the reasons.

    `caches` is True if weft's cache can store the decoder's keys and values.
    """
    kind = module.config.model_type
    notes = []
    if trial.reason is not None:
        notes.append(
            f"backend=hf: {kind} runs the sequences of one length at a time, without packing "
            f"({trial.reason})"
        )
    if not caches:
        notes.append(
            f"backend=hf: {kind} generates without a cache, computing all tokens again for each "
            f"new one"
        )
    return tuple(notes)


def _list_reading_notes(spec: ModelSpec, device: torch.device) -> tuple[str, ...]:
    """Return one note if reading the weights needs host memory for the whole model, else no notes."""
    if device.type == HOST.type or spec.init_from_scratch or hf_load.build_device_arguments(device):
        return ()
    return (
        "backend=hf: weights are read into host memory as a whole before they go to the device; "
        "with accelerate each goes "
        f"there by itself: {install('hf')}",
    )


def _save(
    directory: Path,
    tensors: Mapping[str, Tensor],
    network: HFNetwork,
    spec: ModelSpec,
    tokenizer: Tokenizer,
) -> None:
    """Write the model with merged adapters, and the adapters alone to the subdirectory `adapter/`.

    The adapter's files contain the name of the base model.
    """
    module = network.module
    for key, id in common.list_special_ids(tokenizer, network.kind).items():
        setattr(module.config, key, id)
        if network.kind == "lm" and module.generation_config is not None:
            setattr(module.generation_config, key, id)
    if network.kind == "score" and network.pooling == "mean":
        setattr(module.config, hf_io.POOLING, "mean")
    state = None
    if spec.has_adapters:
        module_tensors = {name.removeprefix(PREFIX): value for name, value in tensors.items()}
        hf_lora.save_adapter(
            directory / "adapter", module, module_tensors, spec.lora, str(spec.path)
        )
        state = hf_lora.merge_state(module, module_tensors)
    hf_load.save(directory, module, state)
    if network.kind == "score" and network.pooling == "mean":
        hf_io.write_mean_pooled_architecture(directory)
