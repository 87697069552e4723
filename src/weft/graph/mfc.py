"""The nodes of a dataflow graph: model function calls and host functions, and the hooks around a
call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Method = Literal["generate", "inference", "train_step", "evaluate"]


@dataclass(frozen=True)
class Offload:
    """Hook: move the role's weights (or optimizer state) to host memory, or back before the call."""

    what: Literal["weights", "optimizer"] = "weights"


@dataclass(frozen=True)
class Call:
    """Hook: call a user's function by registered name (`register_function`) as `fn(model, **args)`."""

    function: str
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ParamSync:
    """Move parameters between roles: target = eta * source + (1 - eta) * target, after each firing
    of the node `after`.
    """

    source: str
    target: str
    eta: float = 1.0
    after: str = ""

    @property
    def name(self) -> str:
        return f"sync {self.source} -> {self.target}"


Hook = Offload | Call
# The hooks that have a name of their own; any other is a user's function.
HOOKS: Mapping[str, Offload] = {
    "offload": Offload("weights"),
    "offload_optimizer": Offload("optimizer"),
}


def _on_edges(keys: Sequence[str], remap: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(remap.get(key, key) for key in keys)


class OnEdges:
    """The keys of a node as they are called on the graph's edges.

    The node's own fields hold the names it uses itself.
    """

    input_keys: Sequence[str]
    output_keys: Sequence[str]
    optional_keys: Sequence[str]
    input_key_remap: Mapping[str, str]
    output_key_remap: Mapping[str, str]

    @property
    def inputs(self) -> tuple[str, ...]:
        """Keys on the graph's edges that this node needs."""
        return _on_edges(self.input_keys, self.input_key_remap)

    @property
    def optional_inputs(self) -> tuple[str, ...]:
        """Keys on the graph's edges that it reads where there are any."""
        return _on_edges(self.optional_keys, self.input_key_remap)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Keys on the graph's edges that this node makes."""
        return _on_edges(self.output_keys, self.output_key_remap)


@dataclass(frozen=True)
class MFCDef(OnEdges):
    """One model function call: which role does what, with which keys, on how many ids at a time.

    `input_keys` and `output_keys` are the interface's names; a remap gives the name on the graph's
    edge (`{"logprobs": "ref_logprobs"}`). `optional_keys` are read where some node or the dataset
    makes them. `batch_size` 0 takes the loader's batches as they come (batches laid out by a token
    budget). `cache` keeps the outputs of a frozen role's inference on disk, so that an id is
    computed once a run (or once for all runs that share `dataset.cache_dir`). `layout` and
    `device_mesh` are as those of a role, for this call alone; where a call trains they are the
    role's (`Experiment.mesh_of`). `max_staleness` is how many train steps its weights may be
    behind; an `interruptible` call may be given newer ones in its middle.
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
class HostFunction(OnEdges):
    """A node without a role: CPU code on a whole batch.

    `function` is a registered name (see `docs/host-functions.md`).

    It may return fewer ids than it got (a filter); the loader refills. `refill_rounds` lets calls
    before a filter that wait for new weights take whole batches until the training node has a full
    one, so many rounds a step at most; 0 lets them take as many ids as are missing, in rounds that
    get smaller and smaller. `tokenizer_role` names the role whose tokenizer `context.tokenizer` is,
    for functions that read text.
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
