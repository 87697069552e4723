"""Checks of a role's options against each other and against installed packages, without torch."""

from __future__ import annotations

import importlib.util

from weft.engine.spec import AUTO, STATE_LIBRARY, ModelSpec
from weft.errors import ConfigError
from weft.extras import install


def check_jax_options(spec: ModelSpec) -> None:
    """Raise `ConfigError` for options of `backend=jax` with another backend."""
    if spec.backend == "jax":
        return
    if spec.attention != "auto":
        raise ConfigError(
            f"attention={spec.attention}: backend={spec.backend} chooses its own kernels; leave it "
            f"out, or use backend=jax"
        )
    if spec.recompute_policy is not None:
        raise ConfigError(
            f"recompute_policy={spec.recompute_policy}: backend={spec.backend} recomputes whole "
            f"layers; write gradient_checkpointing=true or recompute_every, or use backend=jax"
        )


def check_quantize(spec: ModelSpec, role: str = "") -> None:
    """Raise `ConfigError` if `quantize` conflicts with other options or its library is missing.

    `role` is the name of the role in the error message.
    """
    if spec.quantize is None:
        return
    dot = f"{role}." if role else ""
    setting = f"{dot}quantize={spec.quantize}"
    if spec.trained and spec.lora.r == 0:
        raise ConfigError(
            f"{setting}: quantized weights cannot be trained; train adapters on top of them "
            f"({dot}lora.r=16), or leave it out"
        )
    others = {
        "backend": spec.backend if spec.backend not in (AUTO, "torch") else None,
        "compile": spec.compile,
        "fp8": spec.fp8,
        "offload": spec.offload,
    }
    for name, value in others.items():
        if value:
            raise ConfigError(
                f"{setting} and {dot}{name}={str(value).lower()} exclude each other; set one of them"
            )
    if spec.quantize == "4bit" and importlib.util.find_spec(STATE_LIBRARY) is None:
        raise ConfigError(
            f"{setting}: the package {STATE_LIBRARY!r} is not installed; run: {install('8bit')}"
        )
