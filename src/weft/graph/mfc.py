"""Nodes of a dataflow graph: model function calls with their hooks, and host functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Method = Literal["generate", "inference", "train_step", "evaluate"]


@dataclass(frozen=True)
class Offload:
    """Hook that offloads weights or optimizer state to host memory, or loads them before the call."""

    what: Literal["weights", "optimizer"] = "weights"


@dataclass(frozen=True)
class Call:
    """Hook that calls a registered function (`register_function`) as `fn(model, **args)`."""

    function: str
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ParamSync:
    """Update of a role's parameters after each firing of the node `after`.

    target = eta * source + (1 - eta) * target.
    """

    source: str
    target: str
    eta: float = 1.0
    after: str = ""

    @property
    def name(self) -> str:
        return f"sync {self.source} -> {self.target}"


Hook = Offload | Call
# Built-in hooks by name; other names are registered functions.
HOOKS: Mapping[str, Offload] = {
    "offload": Offload("weights"),
    "offload_optimizer": Offload("optimizer"),
}


def _rename_keys(keys: Sequence[str], remap: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(remap.get(key, key) for key in keys)


class EdgeKeyNames:
    """Key names of a node on the graph's edges; the node's fields have its own key names."""

    input_keys: Sequence[str]
    output_keys: Sequence[str]
    optional_keys: Sequence[str]
    input_key_remap: Mapping[str, str]
    output_key_remap: Mapping[str, str]

    @property
    def inputs(self) -> tuple[str, ...]:
        """Required input keys, as named on the graph's edges."""
        return _rename_keys(self.input_keys, self.input_key_remap)

    @property
    def optional_inputs(self) -> tuple[str, ...]:
        """Optional input keys, as named on the graph's edges; read if they exist."""
        return _rename_keys(self.optional_keys, self.input_key_remap)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Output keys, as named on the graph's edges."""
        return _rename_keys(self.output_keys, self.output_key_remap)


@dataclass(frozen=True)
class MFCDef(EdgeKeyNames):
    """Model function call: one method of a role, its keys, and its number of ids per firing.

    `input_keys` and `output_keys` are the interface's names; a remap gives the name on the graph's
    edge (`{"logprobs": "ref_logprobs"}`). `optional_keys` are read if a node or the dataset makes
    them. `batch_size` 0 takes the loader's batches as they are (batches laid out by a token
    budget). `cache` stores the outputs of a frozen role's inference on disk, so that an id is
    computed once per run (or once for all runs that share `dataset.cache_dir`). `layout` and
    `device_mesh` override the role's for this call; a call that trains uses the role's
    (`Experiment.get_mesh`). `max_staleness` is the number of train steps by which its weights may
    be outdated; an `interruptible` call may get newer weights while it runs.
    """

    name: str
    role: str
    interface: str
    method: Method
    batch_size: int
    input_keys: Sequence[str] = ()
    output_keys: Sequence[str] = ()
    optional_keys: Sequence[str] = ()
    args: Mapping[str, Any] = field(default_factory=dict)
    input_key_remap: Mapping[str, str] = field(default_factory=dict)
    output_key_remap: Mapping[str, str] = field(default_factory=dict)
    max_tokens_per_microbatch: int | None = None
    max_staleness: int = 0
    interruptible: bool = False
    pre_hooks: Sequence[Hook] = ()
    post_hooks: Sequence[Hook] = ()
    deadline_s: float | None = None
    cache: bool = False
    layout: str | None = None
    device_mesh: str | None = None

    @property
    def trains(self) -> bool:
        return self.method == "train_step"


@dataclass(frozen=True)
class HostFunction(EdgeKeyNames):
    """Node without a role: CPU code on a whole batch.

    `function` is a registered name (see `docs/host-functions.md`).

    It may return fewer ids than it received (a filter); the loader then provides more.
    `refill_rounds` applies to calls before a filter that wait for new weights. Above 0, they take
    whole batches until the training node has a full one, in at most `refill_rounds` rounds per
    step. With 0, they take only as many ids as are missing, in ever smaller rounds.
    `tokenizer_role` names the role whose tokenizer is `context.tokenizer`, for functions that read
    text.
    """

    name: str
    function: str
    batch_size: int
    input_keys: Sequence[str] = ()
    output_keys: Sequence[str] = ()
    optional_keys: Sequence[str] = ()
    args: Mapping[str, Any] = field(default_factory=dict)
    input_key_remap: Mapping[str, str] = field(default_factory=dict)
    output_key_remap: Mapping[str, str] = field(default_factory=dict)
    tokenizer_role: str | None = None
    deadline_s: float | None = None
    refill_rounds: int = 0

    trains = False


Node = MFCDef | HostFunction
