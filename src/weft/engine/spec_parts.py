"""Parts of a role's options, and checks of their values, which `spec.py` uses.

The parts are adapters (LoRA) and prefixes on frozen weights. `rope_scaling`, such as
`{type: linear, factor: 2}`, extends a model's context beyond the positions it was trained on. The
other checks are those of sampling. The module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from weft.data.spec import TokenizerSpec
from weft.errors import ConfigError
from weft.options import option

# Values beyond these limits are treated as mistakes, or would lead to results that are not finite.
MAX_RANK = 2**16  # rank of adapters
MAX_SAMPLES = 2**16
MAX_PASSES = 10_000  # completions of a prompt, passes over a batch
MAX_CACHE_GB = 1e6
MIN_TEMPERATURE = 1e-4  # of sampling
MAX_ROPE_FACTOR = 1_000_000
# name of the number that each type of RoPE scaling needs
ROPE_NUMBERS = {"linear": "factor", "dynamic": "factor", "ntk": "alpha"}


@dataclass
class LoRASpec:
    """Options of low-rank adapters (LoRA)."""

    r: int = option(
        0,
        "rank of the adapters; 0: no adapters, train all parameters",
        at_least=0,
        at_most=MAX_RANK,
    )
    alpha: float = option(16.0, "adapters are scaled by alpha / r", at_least=0.0)
    dropout: float = option(0.0, "dropout on the adapters' input", at_least=0.0, below=1.0)
    targets: list[str] = option(
        [],
        "linear layers that get adapters, by their canonical name (q, k, v, o, gate, up, down); "
        "empty: all",
    )


@dataclass
class PrefixSpec:
    """Options of prefix tuning, which trains only the keys and values of a prefix.

    The prefix consists of virtual tokens that are put before every sequence.
    """

    num_tokens: int = option(
        0,
        "tokens whose keys and values are trained in every layer, all weights frozen; 0: no prefix",
        at_least=0,
    )


class AdaptedRoleOptions(Protocol):
    """Interface of the role options that `check_adapters` reads."""

    lora: LoRASpec
    prefix: PrefixSpec
    tokenizer: TokenizerSpec
    backend: str
    init_from_scratch: bool
    rope_scaling: Any

    @property
    def freezes(self) -> bool: ...


def check_adapters(spec: AdaptedRoleOptions) -> None:
    """Raise `ConfigError` if the role's adapters or prefix conflict with its other options."""
    if spec.freezes and spec.lora.r > 0:
        raise ConfigError(
            "freeze_layers and lora.r exclude each other: adapters leave every weight frozen; set "
            "one of them"
        )
    if spec.prefix.num_tokens:
        _check_prefix(spec)


def _check_prefix(spec: AdaptedRoleOptions) -> None:
    setting = f"prefix.num_tokens={spec.prefix.num_tokens}"
    if spec.lora.r > 0:
        raise ConfigError(f"{setting} and lora.r={spec.lora.r} exclude each other; set one of them")
    if spec.freezes:
        raise ConfigError(
            f"{setting} excludes freeze_layers and train_last_layers: a prefix leaves every weight "
            f"frozen; set one of them"
        )
    if spec.backend == "hf":
        raise ConfigError(
            f"{setting}: backend=hf runs the module as it is, which has no prefix; use "
            f"backend=torch, or lora.r in its place"
        )
    if spec.init_from_scratch:
        raise ConfigError(
            f"{setting}, init_from_scratch=true: a prefix is saved without the weights it belongs "
            f"to, and random ones are saved "
            "nowhere; leave one of them out"
        )
    for name, value in (
        ("tokenizer.add_tokens", spec.tokenizer.add_tokens),
        ("rope_scaling", spec.rope_scaling),
    ):
        if value:
            raise ConfigError(
                f"{setting}, {name}={value!r}: a prefix is saved without the weights it belongs to, "
                f"and this changes them; leave "
                "one of them out, or take lora.r"
            )


def find_stop_problem(texts: Sequence[str]) -> str | None:
    """Return an error message if the stop texts are invalid, else None."""
    if "" in texts:
        return "an empty text ends every completion at once; take it out"
    return None


def find_stop_ids_problem(ids: Sequence[int]) -> str | None:
    """Return an error message if the stop ids are invalid, else None."""
    if all(0 <= id < 2**31 for id in ids):
        return None
    return "must contain token ids, 0 or more"


def find_cache_problem(gb: float) -> str | None:
    """Return an error message if `gb` GiB is not a valid maximum size of the KV cache, else None."""
    if not gb > 0.0:
        return "keys and values need memory; write a number above 0, or leave it out"
    return None if gb <= MAX_CACHE_GB else f"must be at most {MAX_CACHE_GB:g}"


def find_rope_problem(value: Any) -> str | None:
    """Return an error message if `value` is invalid for the option `rope_scaling`, else None."""
    if value is None:
        return None
    kinds = ", ".join(f"{{type: {kind}, {number}: 2}}" for kind, number in ROPE_NUMBERS.items())
    if not isinstance(value, Mapping) or value.get("type") not in list(ROPE_NUMBERS):
        return f"rope_scaling={value!r}: must be one of {kinds}"
    name = ROPE_NUMBERS[value["type"]]
    number = value.get(name)
    if (
        set(value) != {"type", name}
        or isinstance(number, bool)
        or not isinstance(number, int | float)
        or not 1 <= number <= MAX_ROPE_FACTOR
    ):
        return (
            f"rope_scaling={value!r}: type {value['type']} takes {name}, a number from 1 to "
            f"{MAX_ROPE_FACTOR:,}, and nothing else"
        )
    return None


def read_rope_factor(value: Mapping[str, Any]) -> float:
    """Return the scaling factor in a value of the option `rope_scaling`.

    Its key is `factor` or `alpha`, depending on the type of scaling.
    """
    return float(value[ROPE_NUMBERS[value["type"]]])


def compute_scaled_context(value: Mapping[str, Any] | None, positions: int) -> int:
    """Return the context length after RoPE scaling.

    `positions` is the context length that the model was trained with. `value` is the value of the
    option `rope_scaling`, or None for no scaling.
    """
    return positions if value is None else int(positions * read_rope_factor(value))
