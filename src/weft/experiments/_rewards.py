"""How the option `reward` is written, checked without importing anything heavy."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.errors import unknown_name
from weft.registry import verifiers

FORM = "a verifier's name, module:function, FILE.py:function, {name, weight, args}, or a list of these"
PART_KEYS = {"name", "weight", "args"}


def reward_problem(reward: Any) -> str | None:
    """What is wrong with the option `reward`, or None."""
    parts = reward if isinstance(reward, (list, tuple)) else [reward]
    if not parts:
        return f"is empty; give {FORM}"
    return next((problem for problem in map(_part_problem, parts) if problem), None)


def _part_problem(part: Any) -> str | None:
    if isinstance(part, Mapping):
        unknown = sorted(set(part) - PART_KEYS)
        if unknown or "name" not in part:
            return f"{dict(part)!r} cannot be read; a part has name, and may have weight and args"
        weight = part.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            return f"weight={weight!r} of {part['name']!r} must be a number"
        if not isinstance(part.get("args") or {}, Mapping):
            return f"args={part['args']!r} of {part['name']!r} must be a mapping"
        return _name_problem(part["name"])
    return _name_problem(part)


def _name_problem(name: Any) -> str | None:
    if not isinstance(name, str) or not name:
        return f"{name!r} is no reward; give {FORM}"
    module, colon, function = name.rpartition(":")
    if not colon:
        return None if name in verifiers else str(unknown_name("verifier", name, verifiers.names()))
    if not function.isidentifier():
        return f"{name!r}: what follows the colon must be a function's name"
    if module.endswith(".py"):
        return None if Path(module).expanduser().is_file() else f"{name!r}: there is no file {module}"
    if not re.fullmatch(r"[\w.]+", module) or importlib.util.find_spec(module.split(".")[0]) is None:
        return f"{name!r}: there is no module {module}; write FILE.py:{function} for a file"
    return None
