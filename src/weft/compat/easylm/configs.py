"""Configurations of EasyLM's LLaMA: standard sizes, and conversion from and to config.json.

    config = load_llama_config("8b31", "{'max_sequence_length': 4096}")
    to_hf_values(config)                    # config.json of the same network
    from_hf_values(values, label)           # the inverse

This module does not import torch.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args, get_type_hints

from weft.errors import CheckpointError, ConfigError, find_nearest
from weft.reading import read_object, shorten

REMAT_POLICIES = (
    "",
    "everything_saveable",
    "nothing_saveable",
    "checkpoint_dots",
    "checkpoint_dots_with_no_batch_dims",
)


@dataclass(frozen=True)
class EasyLMConfig:
    """EasyLM's `LLaMAConfig`: its fields and defaults.

    The ids of BOS and EOS are those of Llama 2 here. EasyLM's defaults (0 and 1) are the ids of the
    unknown token and BOS; EasyLM never uses them.
    """

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None  # None: as many as attention heads
    max_sequence_length: int = 2048
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    use_cache: bool = True
    bos_token_id: int = 1
    eos_token_id: int = 2
    resid_pdrop: float = 0.0
    embd_pdrop: float = 0.0
    attn_pdrop: float = 0.0
    tie_word_embeddings: bool = False
    # recomputation in the backward pass: one of `REMAT_POLICIES` for each part
    remat_block: str = ""
    remat_attention: str = ""
    remat_mlp: str = ""
    # computation in blocks of tokens, with the same results
    scan_attention: bool = False
    scan_mlp: bool = False
    scan_query_chunk_size: int = 1024
    scan_key_chunk_size: int = 1024
    scan_mlp_chunk_size: int = 1024
    # forgetful causal masking
    fcm_min_ratio: float = 0.0
    fcm_max_ratio: float = 0.0
    rope_theta: float = 10000
    use_hf_rotary_emb: bool = False  # rotary pairs are (i, i + dim / 2), not (2 i, 2 i + 1)
    use_scaled_rope: bool = False  # Llama 3.1, with factor 8

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


def _build_sizes() -> dict[str, EasyLMConfig]:
    """Return EasyLM's `LLAMA_STANDARD_CONFIGS`.

    One value differs: 405b31 has 8 key-value heads, as in the released model. EasyLM has 16, which
    only fits the copy of the weights that Meta made for 16 devices, with each of these heads twice.
    """

    def build(hidden: int, inner: int, layers: int, heads: int, **more: Any) -> EasyLMConfig:
        values: dict[str, Any] = {"max_sequence_length": 8192} | more
        return EasyLMConfig(32000, hidden, inner, layers, heads, **values)

    # CodeLlama 34B
    code34 = build(8192, 22016, 48, 64, num_key_value_heads=8, max_sequence_length=16384)
    llama70 = build(8192, 28672, 80, 64, num_key_value_heads=8, rms_norm_eps=1e-5)
    llama3: dict[str, Any] = {
        "vocab_size": 128256,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    }
    llama3_8 = replace(build(4096, 14336, 32, 32), **llama3)
    llama3_70 = replace(llama70, **llama3)
    llama3_405 = replace(build(16384, 53248, 126, 128), **llama3)
    llama7 = build(4096, 11008, 32, 32)
    llama13 = build(5120, 13824, 40, 40)
    return {
        "1b": build(2048, 5504, 22, 16),
        "3b": build(3200, 8640, 26, 32),
        "7b": llama7,
        "7bcode": replace(llama7, vocab_size=32016),
        "13b": llama13,
        "13bcode": replace(llama13, vocab_size=32016),
        "30b": build(6656, 17920, 60, 52),
        "30b2": code34,
        "30bcode": code34,
        "34byi": EasyLMConfig(
            64000,
            7168,
            20480,
            60,
            56,
            8,
            max_sequence_length=4096,
            rms_norm_eps=1e-5,
            rope_theta=5000000,
            use_hf_rotary_emb=True,
        ),
        "65b": build(8192, 22016, 80, 64, rms_norm_eps=1e-5),
        "70b": llama70,
        "70bcode": replace(llama70, vocab_size=32016, max_sequence_length=16384),
        "70bflash": replace(llama70, scan_attention=True, scan_mlp=True),
        "debug": build(128, 256, 2, 4, num_key_value_heads=2, max_sequence_length=2048),
        "8b3": llama3_8,
        "70b3": llama3_70,
        "8b31": replace(llama3_8, use_scaled_rope=True),
        "70b31": replace(llama3_70, use_scaled_rope=True),
        "405b31": replace(llama3_405, use_scaled_rope=True),
    }


LLAMA_STANDARD_CONFIGS = _build_sizes()
# fields that the shapes of the weights depend on
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "kv_heads",
    "tie_word_embeddings",
)
# fields that the results depend on
NETWORK_FIELDS = (*SIZES, "rms_norm_eps", "rope_theta", "use_hf_rotary_emb", "use_scaled_rope")
# Keys that `transformers` adds when it writes a configuration to JSON, with no effect in EasyLM.
TRANSFORMERS_KEYS = """
_name_or_path add_cross_attention architectures bad_words_ids begin_suppress_tokens
chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty
do_sample early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
finetuning_task forced_bos_token_id forced_eos_token_id id2label is_decoder is_encoder_decoder
label2id length_penalty max_length min_length model_type n_rep no_repeat_ngram_size
num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states output_scores
pad_token_id prefix problem_type pruned_heads remove_invalid_values repetition_penalty return_dict
return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature
tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript
transformers_version typical_p use_bfloat16
"""
# `rope_scaling` of Llama 3.1 in a Hugging Face config.json
SCALED_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SCALED_POSITIONS = 131072  # context of Llama 3.1
MAX_SHOWN = 60  # characters of a value in a message


# -- loading


def load_llama_config(
    text: str, update: str = "", option: str = "load_llama_config"
) -> EasyLMConfig:
    """Return the configuration of a standard size or of `json::FILE`, with the changes in `update`.

    An empty text means EasyLM's defaults, which are the sizes of 7B. `update` is a dictionary as a
    Python literal, such as `{'vocab_size': 32064}`, or empty. `option` is the name of the flag that
    has the value `text`, for messages. Raises `ConfigError` for an unknown name, key or value.
    """
    kind, separator, path = text.partition("::")
    if not text:
        config = EasyLMConfig()
    elif text in LLAMA_STANDARD_CONFIGS:
        config = LLAMA_STANDARD_CONFIGS[text]
    elif separator and kind == "json":
        config = _read_json(path, f"{option}={text}")
    elif separator and kind == "pickle":
        raise ConfigError(
            f"{option}={text}: a pickle can run any program when it is loaded, so weft loads none; "
            f"write the llama_config in it as JSON, and json:: before its path"
        )
    else:
        near = find_nearest(text, LLAMA_STANDARD_CONFIGS)
        if near:
            hint = f"did you mean {' or '.join(near)}?"
        else:
            hint = f"known are {', '.join(LLAMA_STANDARD_CONFIGS)}, and json::FILE"
            same_number = _find_same_number(text)
            if same_number:
                hint = f"{hint}; did you mean {' or '.join(same_number)}?"
        raise ConfigError(f"{option}={text}: unknown size; {hint}")
    config = _check_config(config, f"{option}={text}")
    if not update:
        return config
    updating = option.replace("load_", "update_") if "load_" in option else "update_llama_config"
    label = f"{updating}={shorten(update, MAX_SHOWN)}"
    return change_config(config, parse_dictionary(update, label), label)


def _find_same_number(text: str) -> list[str]:
    """Return the three shortest names of sizes with the number that `text` begins with."""
    number = re.match(r"\d+", text)
    if number is None:
        return []
    same = re.compile(rf"{number[0]}(?!\d)")
    return sorted(filter(same.match, LLAMA_STANDARD_CONFIGS), key=len)[:3]


def parse_dictionary(text: str, label: str) -> dict[str, Any]:
    """Parse a dictionary written as a Python literal, without evaluating the text.

    `dict(key=value)` is accepted too. `label` begins error messages.
    """
    problem = ConfigError(
        f"{label}: must be a dictionary of plain values, such as {{'vocab_size': 32064}}"
    )
    try:
        node = ast.parse(text.strip(), mode="eval").body
        if isinstance(node, ast.Call):
            is_dict = isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args
            if not is_dict or any(keyword.arg is None for keyword in node.keywords):
                raise problem
            return {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise problem from None
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise problem
    return value


def change_config(config: EasyLMConfig, changes: Mapping[str, Any], label: str) -> EasyLMConfig:
    """Return a copy of a configuration with the values in `changes`.

    Raises `ConfigError` for a key or a value that EasyLM's configuration does not have; the message
    begins with `label`.
    """
    types = get_type_hints(EasyLMConfig)
    for key, value in changes.items():
        if key not in types:
            near = find_nearest(key, types)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(types)}"
            raise ConfigError(f"{label}: unknown key {key!r}; {hint}")
        accepted = get_args(types[key]) or (types[key],)
        if float in accepted:
            accepted = (float, int)
        if type(value) not in accepted:
            names = " or ".join(each.__name__ for each in accepted).replace("NoneType", "None")
            text = shorten(repr(value), MAX_SHOWN)
            raise ConfigError(f"{label}: {key}={text}: must be of type {names}")
    return _check_config(replace(config, **changes), label)


def _read_json(path: str, label: str) -> EasyLMConfig:
    """Read a configuration that EasyLM or `transformers` wrote as JSON."""
    values = read_object(path, label, ConfigError)
    if "max_position_embeddings" in values:
        raise ConfigError(
            f"{label}: is the config.json of a Hugging Face model, not a configuration of EasyLM; "
            f"name its size, such as 7b"
        )
    own = {key: value for key, value in values.items() if key not in TRANSFORMERS_KEYS.split()}
    return change_config(EasyLMConfig(), own, label)


def _check_config(config: EasyLMConfig, label: str) -> EasyLMConfig:
    """Raise `ConfigError` if the values cannot describe a network. Returns `config`."""
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "kv_heads",
        "max_sequence_length",
        "rms_norm_eps",
        "rope_theta",
    ):
        value = getattr(config, name)
        if not 0 < value < math.inf:
            raise ConfigError(f"{label}: {name}={value}: must be a finite number above 0")
    if config.hidden_size % config.num_attention_heads or config.head_dim % 2:
        raise ConfigError(
            f"{label}: hidden_size={config.hidden_size}: must be an even multiple of "
            f"num_attention_heads={config.num_attention_heads}"
        )
    if config.num_attention_heads % config.kv_heads:
        raise ConfigError(
            f"{label}: num_key_value_heads={config.kv_heads}: must divide "
            f"num_attention_heads={config.num_attention_heads}"
        )
    for name in ("remat_block", "remat_attention", "remat_mlp"):
        if getattr(config, name) not in REMAT_POLICIES:
            raise ConfigError(
                f"{label}: {name}={getattr(config, name)!r}: must be one of "
                f"{', '.join(filter(None, REMAT_POLICIES))}, or empty"
            )
    if config.use_hf_rotary_emb and config.use_scaled_rope:
        raise ConfigError(
            f"{label}: use_hf_rotary_emb=True: excludes use_scaled_rope=True, which EasyLM then "
            f"ignores"
        )
    return config


def check_trainable(config: EasyLMConfig, label: str) -> None:
    """Raise `ConfigError` for a training setting that weft's Llama does not have."""
    for name in ("resid_pdrop", "embd_pdrop", "fcm_min_ratio", "fcm_max_ratio"):
        if getattr(config, name):
            raise ConfigError(
                f"{label}: {name}={getattr(config, name)}: weft's Llama has no such dropout; leave "
                f"it at 0 (attn_pdrop is supported)"
            )


# -- Hugging Face's config.json


def to_hf_values(config: EasyLMConfig) -> dict[str, Any]:
    """Return the config.json of the same network, as a causal language model.

    `max_position_embeddings` is `max_sequence_length` or, with the scaled positions of Llama 3.1,
    at least the 131,072 tokens of its context.
    """
    positions = config.max_sequence_length
    if config.use_scaled_rope:
        positions = max(positions, SCALED_POSITIONS)
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.kv_heads,
        "max_position_embeddings": positions,
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "attention_dropout": config.attn_pdrop,
        "hidden_act": "silu",
        "use_cache": config.use_cache,
        "tie_word_embeddings": config.tie_word_embeddings,
        "rope_theta": float(config.rope_theta),
        "rope_scaling": dict(SCALED_ROPE) if config.use_scaled_rope else None,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
    }


def from_hf_values(values: Mapping[str, Any], label: str) -> EasyLMConfig:
    """Return the configuration of EasyLM for the network that a config.json describes.

    Raises `CheckpointError` for a network that EasyLM's LLaMA cannot compute; the message begins
    with `label`.
    """

    def require(key: str, accepted: tuple[Any, ...]) -> None:
        if values.get(key) not in accepted:
            raise CheckpointError(
                f"{label}: {key}={values.get(key)!r}: EasyLM's LLaMA has {key}={accepted[-1]!r} "
                f"only"
            )

    require("model_type", ("llama",))
    require("attention_bias", (None, False))
    require("mlp_bias", (None, False))
    require("hidden_act", (None, "silu"))
    heads = values["num_attention_heads"]
    require("head_dim", (None, values["hidden_size"] // heads))
    # transformers 5 writes rope_parameters, earlier versions rope_theta and rope_scaling
    rope: Mapping[str, Any] = values.get("rope_scaling") or values.get("rope_parameters") or {}
    theta = rope.get("rope_theta") or values.get("rope_theta") or 10000
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    kind = scaling.get("rope_type") or scaling.pop("type", None) or "default"
    if kind != "default" and scaling != SCALED_ROPE:
        raise CheckpointError(
            f"{label}: rope_scaling={dict(rope)}: EasyLM's LLaMA has unscaled positions, and those "
            f"of Llama 3.1 with factor 8"
        )
    eos = values.get("eos_token_id")
    changes: dict[str, Any] = {
        "vocab_size": values["vocab_size"],
        "hidden_size": values["hidden_size"],
        "intermediate_size": values["intermediate_size"],
        "num_hidden_layers": values["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": values.get("num_key_value_heads") or heads,
        "max_sequence_length": values.get("max_position_embeddings") or 2048,
        "rms_norm_eps": values.get("rms_norm_eps") or 1e-6,
        "initializer_range": values.get("initializer_range") or 0.02,
        "attn_pdrop": values.get("attention_dropout") or 0.0,
        "tie_word_embeddings": values.get("tie_word_embeddings") or False,
        "rope_theta": theta,
        "use_scaled_rope": kind != "default",
        "bos_token_id": values.get("bos_token_id"),
        "eos_token_id": eos[0] if isinstance(eos, list) and eos else eos,
    }
    present = {key: value for key, value in changes.items() if value is not None}
    try:
        return change_config(EasyLMConfig(), present, label)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error


def find_size_differences(config: EasyLMConfig, other: EasyLMConfig) -> list[str]:
    """Return the differing sizes of two configurations, such as `hidden_size=4096, not 5120`."""
    differing = []
    for key in SIZES:
        if getattr(config, key) != getattr(other, key):
            differing.append(f"{key}={getattr(config, key)}, not {getattr(other, key)}")
    return differing


def describe_flags(config: EasyLMConfig) -> str:
    """Return the flags with which EasyLM loads weights of this configuration.

    They name the standard size with the fewest differences.
    """

    def find_changes(name: str) -> dict[str, Any]:
        standard = LLAMA_STANDARD_CONFIGS[name]
        changes = {}
        for key in NETWORK_FIELDS:
            if getattr(standard, key) != getattr(config, key):
                own = "num_key_value_heads" if key == "kv_heads" else key
                changes[own] = getattr(config, key)
        return changes

    name = min(LLAMA_STANDARD_CONFIGS, key=lambda name: len(find_changes(name)))
    changes = find_changes(name)
    flags = f"--load_llama_config={name}"
    return f'{flags} --update_llama_config="{changes}"' if changes else flags
