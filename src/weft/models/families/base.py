"""Families of Hugging Face checkpoints: conversion of configurations, and location of parameters.

Each family has a module that registers one `Family`. Its `read_config` converts the values of a
config.json to a `TransformerConfig`, `write_config` converts this back to config.json values, and
`keys` lists where the checkpoint stores each parameter. A configuration that the decoder does not
support is rejected with an error that names the key, and never approximated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.errors import CheckpointError
from weft.models.families import LAYER_KEYS, MAX_EXPERTS, MAX_LAYERS, MAX_WEIGHTS, SIZE_LIMIT
from weft.models.families.keymap import Key, KeyMap
from weft.models.network.config import Activation, TransformerConfig
from weft.reading import explain_read_errors

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "relu": "relu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}

# Keys of config.json that describe the file and not the network; they are rewritten on saving.
REWRITTEN_KEYS = frozenset(
    {
        "architectures",
        "model_type",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "_name_or_path",
        "_commit_hash",
        "num_labels",
        "id2label",
        "label2id",
        "problem_type",
    }
)


@dataclass(frozen=True)
class Family:
    """Family of Hugging Face checkpoints with the same architecture, such as "llama".

    Attributes:
        name: Value of `model_type` in config.json.
        causal_lm: Name of the `transformers` class for a language-model head.
        classifier: Name of the `transformers` class for value and score heads, or None.
        prefix: Prefix of all tensor names except the head's. Checkpoints without a head omit it.
        read_config: Function that converts config.json values to a configuration.
        write_config: Function that converts a configuration to config.json values.
        keys: Function that returns key templates (see `Key`) for all parameters except
            `score.weight`.
        tiny: Contents of config.json for a small network that is used in tests.
        buffers: Name endings of tensors that old checkpoints contain but that are not parameters.
        score: Name of the checkpoint tensor with the weight of a value or score head.
    """

    name: str
    causal_lm: str
    classifier: str | None
    prefix: str
    read_config: Callable[[ConfigReader], TransformerConfig]
    write_config: Callable[[TransformerConfig], dict[str, Any]]
    keys: Callable[[TransformerConfig], tuple[Key, ...]]
    tiny: Mapping[str, Any]
    buffers: tuple[str, ...] = ("rotary_emb.inv_freq",)
    score: str = "score.weight"

    def config(self, raw: Mapping[str, Any]) -> TransformerConfig:
        """Convert `raw`, the contents of a config.json, to a configuration.

        Raises `CheckpointError` for values that the decoder does not support.
        """
        with explain_read_errors(f"cannot be used as that of a {self.name} model", CheckpointError):
            config = self.read_config(ConfigReader(self.name, raw))
        check_sizes(config)
        return config

    def to_hf(self, config: TransformerConfig, head: str = "lm") -> dict[str, Any]:
        """Return the contents of the config.json from which `transformers` builds the same network.

        Raises `CheckpointError` if `head` is not "lm" and `transformers` has no class for such a
        head.
        """
        if head != "lm" and self.classifier is None:
            raise CheckpointError(
                f"transformers has no sequence classifier for {self.name}, so a {head} head has "
                f"no form on disk"
            )
        values = {**config.extra, **self.write_config(config), "model_type": self.name}
        values["architectures"] = [self.causal_lm if head == "lm" else self.classifier]
        if head != "lm":
            values |= {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        return values

    def keymap(self, config: TransformerConfig, head: str = "lm") -> KeyMap:
        """Return the checkpoint locations of all parameters of a network with this head.

        Value and score heads have `score.weight` in place of the parameters of the language-model
        head.
        """
        keys = self.keys(config)
        if head != "lm":
            keys = (
                *(key for key in keys if not key.name.startswith("head.")),
                Key("score.weight", self.score, "head"),
            )
        return KeyMap.from_templates(keys, config.num_layers)


@dataclass
class ConfigReader:
    """Reader of a config.json that records which keys have been read.

    Keys that the family never reads are kept in `TransformerConfig.extra` and written back
    unchanged.
    """

    family: str
    raw: Mapping[str, Any]
    requested_keys: set[str] = field(default_factory=set)

    def __call__(self, key: str, default: Any) -> Any:
        """Return the value of `key`, or `default` if the key is absent or null.

        Raises `CheckpointError` if the value is out of range, or if its type does not match
        `default`.
        """
        self.requested_keys.add(key)
        value = self.raw.get(key)
        if value is None:
            return default
        problem = describe_problem(value, default)
        if not problem and key in LAYER_KEYS and value > MAX_LAYERS:
            problem = f"that is more than {MAX_LAYERS:,} and is treated as a mistake"
        if problem:
            raise CheckpointError(f"{key}={value!r}: {problem}")
        return value

    def need(self, key: str) -> Any:
        """Return the value of `key`, a size that every configuration of the family must have.

        Raises `CheckpointError` if the key is absent or the value is invalid.
        """
        value = self(key, 1)
        if self.raw.get(key) is None:
            raise CheckpointError(f"lacks {key!r}, which a {self.family} model has")
        return value

    def refuse(self, key: str, reason: str, *, unless: Any = None) -> None:
        """Raise `CheckpointError` if `key` is set to a value other than False or `unless`.

        Use this for settings that the decoder does not support. `reason` is part of the error
        message.
        """
        value = self(key, None)
        if value is not None and value is not False and value != unless:
            raise CheckpointError(f"{key}={value!r}: {reason}; use backend=hf for this model")

    def activation(self, key: str, default: str) -> Activation:
        """Return the activation function that config.json names under `key`.

        If the key is absent, `default` is the name. Raises `CheckpointError` if the name is
        unknown.
        """
        name = self(key, default)
        if name not in ACTIVATIONS:
            raise CheckpointError(
                f"{key}={name!r}: the decoder knows {', '.join(sorted(ACTIVATIONS))}; use "
                f"backend=hf for this model"
            )
        return ACTIVATIONS[name]

    def extra(self) -> dict[str, Any]:
        """Return the values of all keys that have not been read.

        Keys that describe the file and not the network, such as `architectures`, are left out.
        Raises `CheckpointError` if the weights are quantized, which no family supports.
        """
        self.refuse(
            "quantization_config",
            "weft trains and runs unquantized weights; load the unquantized model",
        )
        left_out = self.requested_keys | REWRITTEN_KEYS
        return {key: value for key, value in self.raw.items() if key not in left_out}


def describe_problem(value: Any, default: Any) -> str | None:
    """Return a description of the problem with a value, or None if the value is valid.

    A valid value has the type of `default`. Numbers must also be in range: integers must be
    positive and not too large, and floats must be finite and not negative.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(default, bool):
        is_valid = value in (True, False)
        rule = "true or false"
    elif isinstance(default, int):
        is_valid = isinstance(value, int) and is_number and 0 < value < SIZE_LIMIT
        rule = f"a whole number, 1 to {SIZE_LIMIT - 1:,}"
    elif isinstance(default, float):
        is_valid = is_number and 0 <= value < math.inf
        rule = "a finite number, 0 or more"
    elif isinstance(default, str):
        is_valid = isinstance(value, str)
        rule = "a text"
    elif isinstance(default, list):
        is_valid = isinstance(value, list)
        rule = "a list"
    else:
        is_valid = default is None or isinstance(value, Mapping)
        rule = "an object"
    return None if is_valid else f"it must be {rule}"


def check_sizes(config: TransformerConfig) -> None:
    """Raise `CheckpointError` if sizes are inconsistent or too large, before memory is allocated."""
    experts = config.experts
    rope = config.rope
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{config.num_heads} query heads do not divide evenly among {config.num_kv_heads} "
            "key and value heads"
        )
    if config.head_dim < 1 or (
        rope is not None and (rope.dim < 2 or rope.dim % 2 or rope.dim > config.head_dim)
    ):
        raise CheckpointError(
            f"a head of {config.head_dim} dimensions ({config.hidden_size} over "
            f"{config.num_heads} heads, or head_dim) "
            "cannot be rotated in pairs"
        )
    if rope is not None and not 0 < rope.theta < math.inf:
        raise CheckpointError(f"rope_theta={rope.theta}: it must be a finite number above 0")
    for rate in (config.embed_dropout, config.hidden_dropout, config.attention_dropout):
        if not 0 <= rate < 1:
            raise CheckpointError(f"a dropout of {rate}: it must be at least 0 and less than 1")
    if experts is not None and not 1 <= experts.top_k <= experts.num <= MAX_EXPERTS:
        raise CheckpointError(
            f"sends a token to {experts.top_k} of {experts.num} experts: the first number must be 1 "
            f"or more and not exceed the second, which must not exceed {MAX_EXPERTS:,}"
        )
    if config.num_weights > MAX_WEIGHTS:
        raise CheckpointError(
            f"describes {config.num_weights:.1e} weights; more than {MAX_WEIGHTS:.0e} are treated "
            f"as a mistake"
        )


def to_hf_activation(config: TransformerConfig, tanh: str = "gelu_pytorch_tanh") -> str:
    """Return the Hugging Face name of the configuration's activation function.

    `tanh` is the name to use for GELU in the tanh approximation.
    """
    return {"silu": "silu", "gelu": "gelu", "relu": "relu", "gelu_tanh": tanh}[config.activation]
