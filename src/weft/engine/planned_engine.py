"""Description of an engine before it is built, computed from config.json alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from weft.data.tokenizer import Tokenizer
from weft.engine.backends.auto import choose_backend
from weft.engine.spec import ModelSpec
from weft.topology import Mesh

# Modules with a function `planned`, by backend; each is imported when it is needed.
MODULES = {"torch": "weft.engine.backends.torch", "hf": "weft.engine.backends.hf"}


def describe_planned_engine(
    spec: ModelSpec, mesh: Mesh, device: torch.device, tokenizer: Tokenizer | None = None
) -> Mapping[str, Any]:
    """Return the `Engine.description` of the mesh's first rank without building the engine.

    No weights are read, and the device need not exist. For a user-defined backend, the description
    contains only its name. Raises the same `UserError`s as the backend.
    """
    spec = choose_backend(spec)
    if spec.backend not in MODULES:
        return {"family": spec.backend, "num_parameters": 0, "num_trainable": 0, "notes": []}
    backend = import_module(MODULES[spec.backend])
    description: Mapping[str, Any] = backend.planned(
        replace(spec, planned=True), mesh, device, tokenizer
    )
    return description
