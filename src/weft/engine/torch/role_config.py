"""Network configuration of a role: its config.json, changed by the role's options."""

from __future__ import annotations

from dataclasses import replace

from weft.checkpoints import hf_io
from weft.data.tokenizer import Tokenizer
from weft.engine.spec import ModelSpec
from weft.engine.spec_parts import compute_scaled_context, read_rope_factor
from weft.errors import ConfigError
from weft.models.network.config import TransformerConfig

NO_PREFIX = ("gpt_bigcode",)  # families whose KV cache has a special layout in PEFT
MULTIPLE = 16  # an extended vocabulary is padded to a multiple of this


def adapt_config(
    spec: ModelSpec, config: TransformerConfig, tokenizer: Tokenizer
) -> TransformerConfig:
    """Return the configuration with the vocabulary, prefix and `rope_scaling` of the role.

    The vocabulary is extended by the tokens that `tokenizer.add_tokens` created. Raises
    `CheckpointError` if the tokenizer already had ids without an embedding. Raises `ConfigError` if
    the prefix doesn't fit or `rope_scaling` can't be applied.
    """
    if tokenizer.added_from is None:
        before = tokenizer.vocab_size
    else:
        before = tokenizer.added_from
    hf_io.check_vocabulary(config, before, str(spec.path), spec.tokenizer.path or str(spec.path))
    if tokenizer.vocab_size > config.vocab_size:
        config = replace(config, vocab_size=-(-tokenizer.vocab_size // MULTIPLE) * MULTIPLE)
    config = _with_prefix(spec, config)
    return config if spec.rope_scaling is None else _apply_rope_scaling(spec, config)


def _with_prefix(spec: ModelSpec, config: TransformerConfig) -> TransformerConfig:
    """Return the configuration with `prefix_tokens` set to the length of the role's trained prefix.

    If the role does not train a prefix (prefix tuning), the configuration is returned unchanged.
    Raises `ConfigError` if the role's prefix conflicts with that of the model directory or does not
    fit the model.
    """
    there = config.prefix_tokens
    num_tokens = spec.prefix.num_tokens
    trains = spec.trained or spec.mirrors
    if num_tokens and config.family in NO_PREFIX:
        raise ConfigError(
            f"prefix.num_tokens={num_tokens}: PEFT cannot save a prefix of a {config.family} "
            f"model in; use lora.r"
        )
    if there and trains and num_tokens != there:
        raise ConfigError(
            f"{spec.path} is a prefix of {there} tokens, and prefix.num_tokens={num_tokens}; write "
            f"prefix.num_tokens={there} to "
            "train it further, or give the path of the model it belongs to"
        )
    if num_tokens and trains and config.learned_positions is not None:
        places = config.learned_positions - config.position_offset
        if num_tokens >= places:
            raise ConfigError(
                f"prefix.num_tokens={num_tokens}: leaves no room in the {places} positions of "
                f"{spec.path}"
            )
    return replace(config, prefix_tokens=num_tokens) if trains and num_tokens else config


def _apply_rope_scaling(spec: ModelSpec, config: TransformerConfig) -> TransformerConfig:
    """Return the configuration with `rope_scaling` applied.

    `linear` divides positions by the factor (Chen et al. 2023, "Position interpolation"). `ntk`
    multiplies the rotary base by alpha^(d / (d - 2)), where alpha is the factor and d is the number
    of rotated dimensions of a head. `dynamic` increases the base only for sequences that are longer
    than those in training, depending on their length (bloc97 2023).
    """
    rope = config.rope
    value = spec.rope_scaling
    if rope is None or rope.scaling != "none":
        if rope is None:
            has = "positions that are not rotated"
        else:
            has = f"rope_scaling of type {rope.scaling} already"
        raise ConfigError(f"rope_scaling={value!r}: {spec.path} has {has}; leave the option out")
    number = read_rope_factor(value)
    positions = config.max_positions
    match value["type"]:
        case "linear":
            rope = replace(rope, scaling="linear", values={"factor": number})
        # max_positions of config.json is the trained length, so it doesn't change
        case "dynamic":
            return replace(
                config,
                rope=replace(
                    rope, scaling="dynamic", values={"factor": number, "original": positions}
                ),
            )
        case _:
            rope = replace(rope, theta=rope.theta * number ** (rope.dim / (rope.dim - 2)))
    return replace(config, rope=rope, max_positions=compute_scaled_context(value, positions))
