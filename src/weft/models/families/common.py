"""Functions shared by several families: Llama-like models, rotary positions and windows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from weft.errors import CheckpointError
from weft.models.families.base import ConfigReader, to_hf_activation
from weft.models.families.keymap import FusedLayout, Key, NetworkPart
from weft.models.network.config import Rope, TransformerConfig

TINY_LLAMA: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


# -- configuration


def llama_fields(
    read: ConfigReader,
    *,
    tied: bool = False,
    theta: float = 10000.0,
    act: tuple[str, str] = ("hidden_act", "silu"),
) -> dict[str, Any]:
    """Return the `TransformerConfig` fields that all Llama-like families store under the same keys.

    `tied` and `theta` are the default values for tied embeddings and for the base of the rotary
    frequencies. `act` is a pair: the key of the activation function in config.json, and the name of
    the function if the key is absent. The field `extra` is not included, because the family may
    still read other keys.
    """
    hidden = read.need("hidden_size")
    heads = read.need("num_attention_heads")
    head_dim = read("head_dim", hidden // heads)
    positions = read("max_position_embeddings", 2048)
    return {
        "family": read.family,
        "vocab_size": read.need("vocab_size"),
        "hidden_size": hidden,
        "num_layers": read.need("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": read("num_key_value_heads", heads),
        "head_dim": head_dim,
        "intermediate_size": read.need("intermediate_size"),
        "max_positions": positions,
        "norm_eps": read("rms_norm_eps", 1e-6),
        "activation": read.activation(*act),
        "rope": read_rope(read, head_dim, positions, theta=theta),
        "tied": read("tie_word_embeddings", tied),
        "initializer_range": read("initializer_range", 0.02),
        "attention_dropout": read("attention_dropout", 0.0),
    }


def llama_values(config: TransformerConfig, *, act: str = "hidden_act") -> dict[str, Any]:
    """Return the config.json values whose keys are the same in all Llama-like families.

    `act` is the key of the activation function.
    """
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        act: to_hf_activation(config),
        "tie_word_embeddings": config.tied,
        "initializer_range": config.initializer_range,
        "attention_dropout": config.attention_dropout,
        **rope_values(config),
    }


def read_rope(
    read: ConfigReader,
    head_dim: int,
    positions: int,
    *,
    theta: float = 10000.0,
    partial: float = 1.0,
) -> Rope:
    """Return the settings for rotary position embeddings from config.json.

    transformers 5 stores these settings as `rope_parameters`, and earlier versions as `rope_theta`
    and `rope_scaling`. `positions` is the maximum number of positions. `theta`, the base of the
    frequencies, and `partial`, the share of each head's dimensions that is rotated, are used if
    config.json does not set them. Raises `CheckpointError` for settings that the decoder does not
    support.
    """
    settings: Mapping[str, Any] = read("rope_scaling", {}) or read("rope_parameters", {})
    read("rope_parameters", {})  # record the key as read, also if `rope_scaling` is set
    if settings.get("rope_theta"):
        base = _read_number(settings, "rope_theta")
    else:
        base = float(read("rope_theta", theta))
    if settings.get("partial_rotary_factor"):
        share = _read_number(settings, "partial_rotary_factor")
    else:
        share = read("partial_rotary_factor", partial)
    dim = int(head_dim * share)
    kind = settings.get("rope_type") or settings.get("type") or "default"
    original = read("original_max_position_embeddings", positions)
    if (
        settings.get("original_max_position_embeddings")
        and "original_max_position_embeddings" not in read.raw
    ):
        original = int(_read_number(settings, "original_max_position_embeddings"))
    if any(isinstance(value, Mapping) for value in settings.values()):
        raise CheckpointError(
            "has different rotary settings for different types of layers; use backend=hf"
        )
    try:
        scaling, values = _read_scaling(kind, settings, original, positions)
    except KeyError as error:
        raise CheckpointError(f"rope_scaling of type {kind!r} lacks {error}") from None
    return Rope(base, dim, scaling, values)


def _read_number(settings: Mapping[str, Any], name: str) -> float:
    """Return the value of a setting, which must be a finite number above 0.

    Raises `CheckpointError` for other values, and `KeyError` if the setting is missing.
    """
    value = settings[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CheckpointError(
            f"{name}={value!r} in its rotary settings: it must be a finite number above 0"
        )
    return float(value)


def _read_scaling(
    kind: str, settings: Mapping[str, Any], original: int, positions: int
) -> tuple[str, dict[str, Any]]:
    """Return the scaling scheme and its values, as in `Rope`, for a `rope_type` of transformers.

    `original` is the number of positions in the original training, and `positions` is the maximum
    number of positions. Raises `CheckpointError` for an unknown type, and `KeyError` if a setting
    is missing.
    """
    if kind == "default":
        return "none", {}
    if kind == "linear":
        return "linear", {"factor": _read_number(settings, "factor")}
    if kind == "dynamic":
        return "dynamic", {"factor": _read_number(settings, "factor"), "original": positions}
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        return "llama3", {
            **{name: _read_number(settings, name) for name in names},
            "original": original,
        }
    if kind in ("yarn", "longrope"):
        if settings.get("factor"):
            factor = _read_number(settings, "factor")
        else:
            factor = positions / original
    if kind == "yarn":
        return "yarn", {
            "factor": factor,
            "original": original,
            "beta_fast": settings.get("beta_fast") or 32,
            "beta_slow": settings.get("beta_slow") or 1,
            "truncate": settings.get("truncate", True),
            "attention_factor": settings.get("attention_factor")
            or _compute_yarn_attention(factor, settings),
        }
    if kind == "longrope":
        if factor > 1:
            default_factor = math.sqrt(1 + math.log(factor) / math.log(original))
        else:
            default_factor = 1.0
        return "longrope", {
            "short_factor": list(settings["short_factor"]),
            "long_factor": list(settings["long_factor"]),
            "original": original,
            "attention_factor": settings.get("attention_factor") or default_factor,
        }
    known = "default, linear, dynamic, llama3, yarn, longrope"
    raise CheckpointError(
        f"rope_scaling of type {kind!r}: the decoder knows {known}; use backend=hf"
    )


def _compute_yarn_attention(factor: float, settings: Mapping[str, Any]) -> float:
    """Return YaRN's attention factor for a context that is extended `factor` times.

    This is sqrt(1/t) in equation 15 of the paper (Peng et al. 2023), where t is the softmax
    temperature. DeepSeek's two multipliers (`mscale` and `mscale_all_dim`) are applied if
    `settings` has them.
    """

    def compute_scale(multiplier: float) -> float:
        return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1 else 1.0

    if settings.get("mscale") and settings.get("mscale_all_dim"):
        return compute_scale(settings["mscale"]) / compute_scale(settings["mscale_all_dim"])
    return compute_scale(1.0)


def rope_values(config: TransformerConfig) -> dict[str, Any]:
    """Return the rotary settings for config.json, under the keys `rope_theta` and `rope_scaling`.

    Every version of `transformers` can read these two keys, unlike `rope_parameters`.
    """
    rope = config.rope
    assert rope is not None
    if rope.scaling == "none":
        return {"rope_theta": rope.theta, "rope_scaling": None}
    values = {k: v for k, v in rope.values.items() if k != "original"}
    if rope.scaling != "dynamic" and "original" in rope.values:
        values["original_max_position_embeddings"] = rope.values["original"]
    return {"rope_theta": rope.theta, "rope_scaling": {"rope_type": rope.scaling, **values}}


def layer_windows(
    read: ConfigReader, layers: int, window: int | None, sliding: list[bool]
) -> tuple[int | None, ...]:
    """Return the attention window of each layer, or an empty tuple if no layer has a window.

    `window` is the size of the windows. `layer_types` in config.json decides which layers have one.
    If it is absent, layer i has a window if `sliding[i]` is True. Raises `CheckpointError` if
    `layer_types` has an unknown type or the wrong length.
    """
    types = read("layer_types", None)
    if types is not None:
        unknown = sorted(set(types) - {"sliding_attention", "full_attention"})
        if unknown or len(types) != layers:
            raise CheckpointError(
                f"layer_types contains {unknown or len(types)}; use backend=hf for this model"
            )
        sliding = [layer_type == "sliding_attention" for layer_type in types]
    windows = tuple(window if has_window else None for has_window in sliding)
    return windows if any(size is not None for size in windows) else ()


def one_window(config: TransformerConfig) -> int | None:
    """Return the window size shared by all layers with a window, or None if no layer has a window."""
    sizes = {size for size in config.windows if size is not None}
    assert len(sizes) <= 1, "the layers have several window sizes"
    return sizes.pop() if sizes else None


def layer_types(config: TransformerConfig) -> list[str]:
    """Return the attention type of each layer, as stored under `layer_types` in config.json."""
    types: list[str] = []
    for i in range(config.num_layers):
        types.append("full_attention" if config.window(i) is None else "sliding_attention")
    return types


# -- keys


def tensor(name: str, hf: str, part: NetworkPart = "block") -> Key:
    """Return the checkpoint location of a parameter that is stored unchanged in the tensor `hf`.

    `name` is the canonical name of the parameter, and `part` is the part of the network that has
    it.
    """
    return Key(name, hf, part)


def linear(
    name: str, hf: str, *, bias: bool = False, transpose: bool = False, part: NetworkPart = "block"
) -> tuple[Key, ...]:
    """Return the checkpoint locations of a linear layer's weight and, with `bias`, of its bias.

    `name` is the canonical name of the layer, `hf` is the layer's name in the checkpoint, and
    `part` is the part of the network that has the layer. `transpose` is for checkpoints that store
    matrices as [in, out].
    """
    keys = (Key(f"{name}.weight", f"{hf}.weight", part, transpose),)
    return (*keys, Key(f"{name}.bias", f"{hf}.bias", part)) if bias else keys


def fused(
    names: tuple[str, ...],
    hf: str,
    sizes: tuple[int, ...],
    *,
    blocks: int = 1,
    bias: bool = False,
    transpose: bool = False,
) -> tuple[Key, ...]:
    """Return the checkpoint locations of linear layers that are stored as one fused layer.

    `names` are the canonical names of the layers, and `hf` is the name of the fused layer in the
    checkpoint. `sizes` and `blocks` are explained in `weft.models.families.keymap.FusedLayout`.
    `transpose` is for checkpoints that store matrices as [in, out].
    """
    keys: list[Key] = []
    for index, name in enumerate(names):
        layout = FusedLayout(blocks, sizes, index)
        keys.append(Key(f"{name}.weight", f"{hf}.weight", transpose=transpose, fused=layout))
        if bias:
            keys.append(Key(f"{name}.bias", f"{hf}.bias", fused=layout))
    return tuple(keys)


def norm(
    name: str, hf: str, config: TransformerConfig, part: NetworkPart = "block"
) -> tuple[Key, ...]:
    """Return the checkpoint locations of a norm's parameters.

    `name` is the canonical name of the norm, `hf` is the norm's name in the checkpoint, and `part`
    is the part of the network that has the norm. `config` decides whether the norm has a weight and
    a bias.
    """
    if config.norm_weight:
        keys: tuple[Key, ...] = (Key(f"{name}.weight", f"{hf}.weight", part),)
    else:
        keys = ()
    if config.norm_bias:
        return (*keys, Key(f"{name}.bias", f"{hf}.bias", part))
    return keys


BLOCK = "blocks.{i}"
HF_BLOCK = "model.layers.{i}"


def llama_ends(config: TransformerConfig) -> tuple[Key, ...]:
    """Return the locations of the embedding, last norm and output layer in a Llama checkpoint."""
    embed = tensor("embed.weight", "model.embed_tokens.weight", "embedding")
    keys = (embed, *norm("norm", "model.norm", config, "head"))
    if config.tied:
        return keys
    return (*keys, *linear("head", "lm_head", bias=config.head_bias, part="head"))


def llama_attention(config: TransformerConfig) -> tuple[Key, ...]:
    """Return the locations of the attention parameters in a Llama checkpoint."""
    ours = f"{BLOCK}.attention"
    theirs = f"{HF_BLOCK}.self_attn"
    keys: tuple[Key, ...] = ()
    for letter in "qkv":
        keys += linear(f"{ours}.{letter}", f"{theirs}.{letter}_proj", bias=config.qkv_bias)
    keys += linear(f"{ours}.o", f"{theirs}.o_proj", bias=config.o_bias)
    if config.qk_norm is not None:
        keys += tuple(
            tensor(f"{ours}.{name}.weight", f"{theirs}.{name}.weight")
            for name in ("q_norm", "k_norm")
        )
    return keys


def llama_mlp(config: TransformerConfig) -> tuple[Key, ...]:
    """Return the locations of the MLP's parameters in a Llama checkpoint."""
    keys: tuple[Key, ...] = ()
    for name in ("gate", "up", "down"):
        keys += linear(f"{BLOCK}.mlp.{name}", f"{HF_BLOCK}.mlp.{name}_proj", bias=config.mlp_bias)
    return keys


def llama_norms(config: TransformerConfig) -> tuple[Key, ...]:
    """Return the locations of the norms of each block in a Llama checkpoint."""
    return (
        *norm(f"{BLOCK}.norm1", f"{HF_BLOCK}.input_layernorm", config),
        *norm(f"{BLOCK}.norm2", f"{HF_BLOCK}.post_attention_layernorm", config),
    )


def llama_keys(config: TransformerConfig) -> tuple[Key, ...]:
    """Return the locations of all parameters in a Llama-like checkpoint."""
    return (*llama_ends(config), *llama_attention(config), *llama_mlp(config), *llama_norms(config))


def build_keys_with_norms(config: TransformerConfig, norms: Mapping[str, str]) -> tuple[Key, ...]:
    """Return the locations of all parameters in a checkpoint that differs from Llama in its norms.

    `norms` maps the name of each norm of a block in weft, such as "norm1", to its name in the
    checkpoint.
    """
    norm_keys = (
        tensor(f"{BLOCK}.{name}.weight", f"{HF_BLOCK}.{hf_name}.weight")
        for name, hf_name in norms.items()
    )
    return (*llama_ends(config), *llama_attention(config), *llama_mlp(config), *norm_keys)
