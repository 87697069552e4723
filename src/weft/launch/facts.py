"""Predicted descriptions of engines, from config.json, for use before the engines are built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from weft.data.tokenizer import Tokenizer
from weft.engine.planned_engine import describe_planned_engine
from weft.engine.torch.adapters_off import can_share_base
from weft.experiment import Experiment


def predict_facts(
    experiment: Experiment, device: torch.device, tokenizers: Mapping[str, Tokenizer]
) -> dict[str, Mapping[str, Any]]:
    """Return the predicted description of each role's engine.

    Each description also has the key `copies`, with the descriptions of the role's copies on other
    meshes (groups of devices), keyed by mesh.
    """
    meshes = experiment.build_meshes()
    facts_by_role = dict[str, Mapping[str, Any]]()
    for role, spec in experiment.roles.items():
        tokenizer = tokenizers.get(role)
        copies = {}
        for name, mesh in experiment.list_copies():
            if name == role:
                copies[mesh] = describe_planned_engine(spec.mirror(), mesh, device, tokenizer)
        shared = next(
            (
                r
                for r, s in experiment.roles.items()
                if can_share_base(spec, s) and meshes[role].has_same_parts(meshes[r])
            ),
            None,
        )
        own = dict(describe_planned_engine(spec, meshes[role], device, tokenizer))
        if shared is not None:
            own["notes"] = [*own["notes"], f"the same weights as {shared}'s, with adapters off"]
        facts_by_role[role] = {**own, "copies": copies}
    return facts_by_role
