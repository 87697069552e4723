"""Options for training LoRA adapters or a prefix on frozen weights.

The module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from weft.data.spec import TokenizerSpec
from weft.engine.limits import MOST_RANK
from weft.errors import ConfigError
from weft.options import option


@dataclass
class LoRASpec:
    """Options of low-rank adapters (LoRA)."""

    r: int = option(
        0,
        "rank of the adapters; 0: no adapters, train all parameters",
        at_least=0,
        at_most=MOST_RANK,
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
