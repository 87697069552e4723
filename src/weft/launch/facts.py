"""Descriptions of engines before they are built, from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from weft.data.tokenizer import Tokenizer
from weft.engine.planned import planned_facts
from weft.engine.torch.adapters_off import shares_base
from weft.experiment import Experiment


def facts_of(
    experiment: Experiment, device: torch.device, tokenizers: Mapping[str, Tokenizer]
) -> dict[str, Mapping[str, Any]]:
    """Return the predicted engine descriptions of every role and its copies."""
    meshes = experiment.meshes()
    found = dict[str, Mapping[str, Any]]()
    for role, spec in experiment.roles.items():
        tokenizer = tokenizers.get(role)
        copies = {
            mesh: planned_facts(spec.mirror(), mesh, device, tokenizer)
            for name, mesh in experiment.copies()
            if name == role
        }
        shared = next(
            (
                r
                for r, s in experiment.roles.items()
                if shares_base(spec, s) and meshes[role].parts_as(meshes[r])
            ),
            None,
        )
        own = dict(planned_facts(spec, meshes[role], device, tokenizer))
        if shared is not None:
            own["notes"] = [*own["notes"], f"the same weights as {shared}'s, with adapters off"]
        found[role] = {**own, "copies": copies}
    return found
