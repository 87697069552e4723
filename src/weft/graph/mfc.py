"""Nodes of a dataflow graph: model function calls with their hooks, and host functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Method = Literal["generate", "inference", "train_step", "evaluate"]


@dataclass(frozen=True)
class Offload:
    """Hook that moves weights or optimizer state (`what`) to host memory after a call.

    If the hook runs before a call, it loads them back to the device instead.
    """

    what: Literal["weights", "optimizer"] = "weights"


@dataclass(frozen=True)
class Call:
    """Hook that calls a function with the role's model and the keyword arguments `args`.

    `function` is the name under which the function was registered by `register_function`.
    """

    function: str
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ParamSync:
    """Update of the parameters of role `target` after each firing of the node `after`.

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
    """Names that a node's keys have on the edges of the graph, after the node's remaps.

    The node's fields, such as `input_keys`, have the names before remapping.
    """

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
        """Optional input keys, which are read if they exist, as named on the graph's edges."""
        return _rename_keys(self.optional_keys, self.input_key_remap)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Output keys, as named on the graph's edges."""
        return _rename_keys(self.output_keys, self.output_key_remap)


@dataclass(frozen=True)
class MFCDef(EdgeKeyNames):
    """Node that calls one method of a role's interface: a model function call.

    `input_keys` and `output_keys` are the names that the interface uses; a remap maps them to names
    on the graph's edges (`{"logprobs": "ref_logprobs"}`). `optional_keys` are read if the dataset
    or another node provides them. `batch_size` is the number of ids per firing; with 0, a firing
    processes one batch of the loader as it is (used for batches laid out by a token budget).

    `cache` stores the outputs of a frozen role's inference on disk, so that each id is computed
    once per run, or once for all runs that share `dataset.cache_dir`. `layout` and `device_mesh`
    override those of the role for this call; a call that trains uses those of the role
    (`Experiment.get_mesh`). `max_staleness` is the maximum number of train steps by which the
    weights may be outdated. An `interruptible` call may get newer weights while it runs.
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
    """Node that runs a CPU function on a whole batch, without a role.

    `function` is a registered name (see `docs/host-functions.md`). A function that returns fewer
    ids than it received is a filter; the loader then provides more rows. `tokenizer_role` names the
    role whose tokenizer is `context.tokenizer`, for functions that read text.

    `refill_rounds` concerns filters whose preceding calls must sample with the weights of the
    current step. Such a step runs in rounds until the training node has a full batch. If
    `refill_rounds` is 0, each round processes only as many ids as are still missing. If it is above
    0, each round processes a whole batch, and a step has at most `refill_rounds` rounds.
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
