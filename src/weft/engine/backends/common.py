"""Functions shared by all backends that build a network.

They check options, choose dtypes, and choose the special tokens of checkpoints, such as padding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from weft import kernels
from weft.checkpoints import hf_io
from weft.checkpoints.config_file import has_prefix
from weft.checkpoints.weight_files import WeightFiles
from weft.data.tokenizer import Tokenizer
from weft.data.tokenizer_files import read_model_values
from weft.engine.device import choose_flash, read_memory_bytes, resolve_device
from weft.engine.spec import AUTO, ModelSpec
from weft.engine.spec_checks import check_jax_options, check_quantize
from weft.engine.torch.engine import DTYPES, choose_dtype
from weft.errors import CheckpointError, ConfigError
from weft.extras import install
from weft.models.network import quantized
from weft.parallel.schedule import SPLIT_BACKWARD_KINDS
from weft.topology import Layout


def choose_role_device(spec: ModelSpec) -> torch.device:
    """Return the role's device, and select the flash attention version that the role requests.

    Must be called before weights are read. Raises `ConfigError` if the device or the flash
    attention version is not available, or if `WEFT_GPU_KERNELS` names an unknown kernel.
    """
    kernels.fused.read_switches()
    device = resolve_device(spec.device)
    choose_flash(device, spec.flash_attention)
    return device


def check_spec(spec: ModelSpec) -> str:
    """Check that the spec's options do not conflict, and return the model's path.

    Raises `ConfigError` for conflicts and for a spec without a path.
    """
    if spec.path is None:
        raise ConfigError("path is not set: name a Hugging Face directory or hub model")
    if spec.backend == "hf" and spec.router_aux_loss_coef:
        raise ConfigError(
            f"router_aux_loss_coef={spec.router_aux_loss_coef}: backend=hf adds no loss to the "
            f"model's own; use backend=torch, or leave it out"
        )
    check_quantize(spec)
    check_jax_options(spec)
    if spec.backend == "hf":
        _check_native_options(spec)
    return spec.path


def _check_native_options(spec: ModelSpec) -> None:
    """Raise `ConfigError` for an option that `backend=hf` does not support."""
    for name in ("residual_dropout", "freeze_layers", "train_last_layers", "rope_scaling"):
        value = getattr(spec, name)
        if value not in (None, 0.0) or (value == 0 and name != "residual_dropout"):
            raise ConfigError(
                f"{name}={value!r}: backend=hf runs the module as it is; use backend=torch, or "
                f"leave it out"
            )
    if has_prefix(spec.path):
        raise ConfigError(
            f"{spec.path} is a prefix, which backend=hf does not compute; use backend=torch, or "
            f"name the model it belongs to"
        )
    if spec.tokenizer.add_tokens:
        raise ConfigError(
            f"tokenizer.add_tokens={spec.tokenizer.add_tokens!r}: backend=hf keeps the module's "
            f"vocabulary; use backend=torch, "
            "or add the tokens to the model directory"
        )


def check_replicated_layout(layout: Layout) -> None:
    """Raise `ConfigError` for a layout that splits the network.

    With `backend=hf`, every rank must have a copy of the whole network.
    """
    if layout.num_devices != layout.data or layout.fsdp > 1:
        raise ConfigError(
            f"layout={layout}: backend=hf runs copies of the whole module, such as "
            f"d{layout.num_devices}f1; write that, or "
            "backend=torch"
        )


def check_recomputation(spec: ModelSpec, layers: int) -> None:
    """Raise `ConfigError` if the recomputation interval exceeds `layers`, the number of layers."""
    if spec.recomputed_layers > layers:
        raise ConfigError(
            f"recompute_every={spec.recompute_every}: the network has {layers} layers, and every "
            f"n-th of them is recomputed; "
            f"write 1 to {layers}, or leave it out"
        )


def check_compile(spec: ModelSpec, layout: Layout, device: torch.device) -> None:
    """Raise `ConfigError` if `compile` or `fp8` cannot be used.

    They can conflict with other options, with the layout, and with the device.
    """
    check_compilable(spec, layout)
    obstacle = kernels.compiling_obstacle(device) if spec.compile else None
    if obstacle is not None:
        raise ConfigError(
            f"compile=true: torch cannot compile for {device} here: {obstacle}; install it, or "
            f"leave it out"
        )


def check_compilable(spec: ModelSpec, layout: Layout) -> None:
    """Raise `ConfigError` if `compile` or `fp8` conflicts with other options or the layout.

    These are the checks of `check_compile` that do not depend on the device.
    """
    if spec.fp8 and not spec.compile:
        raise ConfigError(
            "fp8=true: without compile=true scaling costs more than products save; set it, or "
            "leave fp8 out"
        )
    if not spec.compile:
        return
    if spec.backend not in (AUTO, "torch"):
        raise ConfigError(
            f"compile=true: backend={spec.backend} runs modules of others, which weft does not "
            f"compile; use backend=torch, or "
            "leave it out"
        )
    if spec.fp8 and layout.tensor > 1:
        raise ConfigError(
            f"fp8=true, layout={layout}: tensor-parallel ranks would scale their parts of a "
            f"matrix apart; write t1 (f shards "
            "parameters too), or leave fp8 out"
        )
    if layout.pipeline > 1 and spec.pipeline_schedule in SPLIT_BACKWARD_KINDS:
        raise ConfigError(
            f"compile=true: pipeline_schedule={spec.pipeline_schedule} halves backward passes, "
            f"which compiled blocks do not; "
            "write 1f1b or interleaved_1f1b, or leave it out"
        )


def build_fp8_product(spec: ModelSpec, device: torch.device) -> kernels.Fp8Product | None:
    """Return the 8-bit matrix product that compiled blocks use.

    Returns None if the spec does not request 8-bit products; torch's own product is then used.
    Raises `ConfigError` if they are requested but not available on the device.
    """
    if not spec.fp8:
        return None
    check_fp8(spec)
    obstacle = kernels.fp8_obstacle(device)
    if obstacle is not None:
        raise ConfigError(f"fp8=true: {obstacle}; leave it out")
    try:
        return kernels.Fp8Product(spec.fp8_recipe)
    except ImportError as error:
        raise ConfigError(
            f"fp8=true: torchao cannot be imported ({error}); run: {install('fp8')}, or leave "
            f"it out"
        ) from error


def check_quantized(spec: ModelSpec, layout: Layout, *, has_experts: bool) -> None:
    """Raise `ConfigError` if the option `quantize` does not support the network or the layout."""
    if spec.quantize is None:
        return
    setting = f"quantize={spec.quantize}"
    if has_experts:
        raise ConfigError(
            f"{setting}: experts cannot be quantized yet, and are most of this model; leave it out"
        )
    if layout.num_devices != layout.data or layout.fsdp > 1:
        raise ConfigError(
            f"{setting}, layout={layout}: every device holds the whole quantized network; write "
            f"d{layout.num_devices}f1, or "
            "leave it out and share the network by f, t or p"
        )


def check_fp8(spec: ModelSpec) -> None:
    """Raise `ConfigError` if the spec has options that conflict with 8-bit matrix products."""
    if not spec.fp8:
        return
    if spec.has_adapters:
        raise ConfigError(
            f"fp8=true, {'lora.r' if spec.lora.r else 'prefix.num_tokens'} above 0: what adapters "
            f"correct would be rounded "
            "weights, which are not the ones saved; leave one of them out"
        )
    if spec.dtype != "bfloat16":
        raise ConfigError(
            f"fp8=true, dtype={spec.dtype}: products of 8 bits are made in bfloat16; set "
            f"dtype=bfloat16"
        )


def with_dtype(spec: ModelSpec, path: str, *, on_cpu: bool) -> ModelSpec:
    """Return the spec with its dtype set.

    A dtype that is already set is kept. Otherwise, the dtype is float32 on a CPU, and the dtype of
    the checkpoint on a GPU or TPU; `backend=jax` replaces float16 by bfloat16. Newly initialized
    weights are float32 if config.json does not name a dtype.
    """
    if spec.dtype is not None:
        return spec
    dtype = "float32"
    if not on_cpu:
        raw = hf_io.read_raw(path)
        if spec.init_from_scratch or spec.planned:
            stored = raw.get("dtype") or raw.get("torch_dtype")
        else:
            stored = str(WeightFiles(hf_io.find_weights(path)).dtype)
        for name in DTYPES:
            if name != "float64" and stored in (name, f"torch.{name}"):
                dtype = name
                break
    if spec.backend == "jax" and dtype == "float16":
        dtype = "bfloat16"
    return replace(spec, dtype=dtype)


def choose_reading_dtype(spec: ModelSpec) -> torch.dtype:
    """Return the dtype to which weights are converted when they are read.

    A trained role without adapters or a prefix uses at least float32, because the weights become
    the master weights. Any other role uses its own dtype.
    """
    dtype = DTYPES[choose_dtype(spec)]
    if spec.trained and not spec.has_adapters:
        return torch.promote_types(dtype, torch.float32)
    return dtype


def check_memory(network: nn.Module, path: str, device: torch.device) -> None:
    """Raise `CheckpointError` if the weights alone exceed the device's memory.

    `network` is on the meta device, so that the check needs no memory.
    """
    _, quantized_bytes = quantized.count_bytes(network)
    other_bytes = sum(
        parameter.numel() * parameter.element_size()
        for parameter in network.parameters()
        if not isinstance(parameter, quantized.Quantized)
    )
    needed = other_bytes + quantized_bytes
    available = read_memory_bytes(device)
    if needed > available:
        raise CheckpointError(
            f"{path}: its weights take {needed / 2**30:,.1f} GiB as config.json describes them, "
            f"and {device} has "
            f"{available / 2**30:,.1f} GiB; take a smaller model, or spread it over devices "
            f"(layout=f8, say)"
        )


def count_product_parameters(network: nn.Module, embedding: nn.Module, *, tied: bool) -> int:
    """Return the number of parameters used in matrix products, including those of all experts.

    A tied embedding is included, because it is also the head's matrix.
    """
    num_parameters = sum(p.numel() for p in network.parameters() if p.dim() >= 2)
    for module in network.modules():
        if isinstance(module, nn.Embedding):
            num_parameters -= sum(p.numel() for p in module.parameters(recurse=False))
    if tied:
        num_parameters += sum(p.numel() for p in embedding.parameters())
    return num_parameters


def list_special_ids(tokenizer: Tokenizer, head: str) -> dict[str, Any]:
    """Return the ids of special tokens, keyed as in config.json and generation_config.json.

    `eos_token_id` is the id of the token that ends a completion, or a list if there are several, so
    that other programs stop at the same tokens as weft. Tokens that the tokenizer lacks are left
    out or, for a reward model, have the id None.
    """
    stops = tokenizer.list_stop_ids()
    ids: dict[str, Any] = {"bos_token_id": tokenizer.bos_id, "pad_token_id": tokenizer.pad_id}
    ids["eos_token_id"] = stops[0] if len(stops) == 1 else stops or None
    if head == "score":
        return ids
    return {key: id for key, id in ids.items() if id is not None}


def read_generation_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the values of generation_config.json in the role's model directory."""
    return dict(read_model_values(str(spec.path), "generation_config.json"))


def find_skipped_padding(tokenizer: Tokenizer, spec: ModelSpec) -> int | None:
    """Return the id of the padding token that is skipped when a score is read, or None.

    For most models, this is None. The exception is a reward model that was trained with
    `transformers` and whose padding token is also an end token, such as EOS. `transformers` then
    takes the final EOS for padding and reads the score at the token before it, so weft does the
    same. For reward models that weft trains from a language model, `choose_padding` prevents this.
    """
    if spec.head != "score" or spec.path is None or spec.init_from_scratch:
        return None
    raw = read_model_values(spec.path, "config.json")
    padding = raw.get("pad_token_id")
    names = raw.get("architectures") or []
    is_reward_model = any("SequenceClassification" in str(name) for name in names)
    return padding if is_reward_model and padding in tokenizer.list_stop_ids() else None


def choose_padding(tokenizer: Tokenizer, spec: ModelSpec, pooling: str) -> Tokenizer:
    """Return the tokenizer for a role's checkpoints, with a suitable padding token.

    In a reward model, `transformers` reads the score at the last token that is not padding. If the
    padding token is also a stop token (usually EOS), the score is read one token too early. The
    checkpoint of a reward model then uses a different special token for padding, which must not be
    a stop token. If the vocabulary has none, the checkpoint has no padding token, and
    `transformers` scores one sequence at a time.
    """
    stops = set(tokenizer.list_stop_ids())
    is_suitable = tokenizer.pad_id is not None and tokenizer.pad_id not in stops
    if (
        spec.head != "score"
        or pooling != "last"
        or is_suitable
        or find_skipped_padding(tokenizer, spec) is not None
    ):
        return tokenizer
    # List the special tokens that are not stop tokens.
    hf = tokenizer.hf
    special = {token.content: id for id, token in hf.added_tokens_decoder.items() if token.special}
    candidates = [token for token, id in special.items() if id not in stops]
    # Prefer tokens named "pad", then the unknown and BOS tokens. Tokens in the chat template come
    # last, because they occur in every text.
    named = [token for token in candidates if "pad" in token.lower()]
    usual = [token for token in (hf.unk_token, hf.bos_token) if token in candidates]
    template = tokenizer.chat_template or ""
    best = sorted((*named, *usual, *candidates), key=template.__contains__)
    return tokenizer.with_padding(best[0] if best else None)


def list_padding_notes(tokenizer: Tokenizer, spec: ModelSpec, pooling: str) -> tuple[str, ...]:
    """Return notes for the user on how scores depend on the padding token and the pooling."""
    if spec.head == "score" and spec.trained and pooling == "mean":
        return (
            "pooling=mean: scores are read from the mean over all tokens, which transformers "
            "cannot express; its classes would "
            "read the last token of this checkpoint, so score with weft (rew.path), or train with "
            "pooling=last",
        )
    skipped = find_skipped_padding(tokenizer, spec)
    if skipped is not None:
        return (
            f"this reward model pads with token {skipped}, which ends texts too: its scores are "
            f"read one token before the end, "
            "as transformers reads them",
        )
    saved = choose_padding(tokenizer, spec, pooling) if spec.trained else tokenizer
    if saved is tokenizer:
        return ()
    if tokenizer.pad_id is None:
        original = "none"
    else:
        original = f"{tokenizer.hf.pad_token!r}, which ends texts too"
    if saved.pad_id is not None:
        return (
            f"checkpoints have the padding token {saved.hf.pad_token!r} (the tokenizer's own: "
            f"{original}), so that transformers "
            "scores them as weft does",
        )
    return (
        f"checkpoints have no padding token (the tokenizer's own: {original}): every special token "
        f"of the vocabulary ends texts, so transformers scores them one sequence at a time; for "
        f"batches add a token to the vocabulary and name it in model.tokenizer.pad_token",
    )
