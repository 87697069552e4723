"""Nodes of a dataflow graph: model function calls with their hooks, and host functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Method = Literal["generate", "inference", "train_step", "evaluate"]


@dataclass(frozen=True)
class Offload:
    """Hook that moves weights or optimizer state (`what`) to host memory after a call.

    In a call's `pre_hooks`, the hook has the opposite effect: before the call, it moves the weights
    or optimizer state back to the device.
    """

    what: Literal["weights", "optimizer"] = "weights"


@dataclass(frozen=True)
class Call:
    """Hook that calls a registered function with the role's model.

    Attributes:
        function: Name under which the function was registered with `register_function`.
        args: Additional keyword arguments for the function.
    """

    function: str
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ParamSync:
    """Rule that updates one role's parameters from another role's after each firing of a node.

    The parameters become target = eta * source + (1 - eta) * target.

    Attributes:
        source: Role whose parameters are read.
        target: Role whose parameters are updated.
        eta: Weight of the source, above 0 and at most 1. With 1, the parameters are copied.
        after: Name of the node after which the update runs. If empty, it runs after the node that
            trains `source`.
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
    """Base class of nodes whose keys can have other names on the edges of the graph.

    Fields such as `input_keys` contain the names that the node itself uses. `input_key_remap` and
    `output_key_remap` map the names that differ to the names on the edges.
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
        """Input keys that are read only if they exist, as named on the graph's edges."""
        return _rename_keys(self.optional_keys, self.input_key_remap)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Output keys, as named on the graph's edges."""
        return _rename_keys(self.output_keys, self.output_key_remap)


@dataclass(frozen=True)
class MFCDef(EdgeKeyNames):
    """Model function call: a node that calls one method of a role's model interface.

    Keys have the names that the interface uses. A remap maps them to the names on the graph's
    edges, for example `{"logprobs": "ref_logprobs"}`.

    Attributes:
        name: Name of the node.
        role: Role whose model is called.
        interface: Name of the registered interface, which is constructed with `args`.
        method: Method of the interface that is called.
        batch_size: Number of sample ids per firing (execution of the node). If it is 0, a firing
            processes one whole batch of the data loader, whatever its size.
        input_keys: Keys that the method requires.
        output_keys: Keys that the method returns.
        optional_keys: Keys that are read if the dataset or another node provides them.
        args: Keyword arguments of the interface's constructor.
        input_key_remap: Mapping from input keys to their names on the edges, if the two differ.
        output_key_remap: Mapping from output keys to their names on the edges, if the two differ.
        max_tokens_per_microbatch: Maximum number of tokens in one forward pass; None for the
            default of the run.
        max_staleness: Maximum number of train steps by which the weights may be outdated.
        interruptible: True if the call may switch to newer weights while it runs.
        pre_hooks: Hooks that run before the call.
        post_hooks: Hooks that run after the call.
        deadline_s: Maximum duration of the call in seconds; None for the default deadline.
        cache: True to store the outputs on disk, so that each id is computed once per run, or
            once for all runs that share `dataset.cache_dir`. Only for inference with a frozen role.
        layout: Parallel layout of the call, if it differs from that of the role. A call that trains
            always uses the role's layout (`Experiment.get_mesh`).
        device_mesh: Devices of the call, if they differ from those of the role.
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
    """Node that runs a function on the CPU, on a whole batch and without a role.

    A function that returns fewer ids than it received is a filter; the loader then provides more
    rows.

    Attributes:
        name: Name of the node.
        function: Registered name of the function (see `docs/host-functions.md`).
        batch_size: Number of sample ids per firing (execution of the node). With 0, a firing
            processes one batch of the data loader as it is.
        input_keys: Keys that the function requires.
        output_keys: Keys that the function returns.
        optional_keys: Keys that are read if the dataset or another node provides them.
        args: Arguments of the function.
        input_key_remap: Renaming of input keys, as {name in the function: name in the graph}.
        output_key_remap: Renaming of output keys, as {name in the function: name in the graph}.
        tokenizer_role: Role whose tokenizer the function gets as `context.tokenizer`. By default,
            it gets the tokenizer of the data.
        deadline_s: Maximum duration of a firing in seconds; None for the default deadline.
        refill_rounds: For a filter, the maximum number of sampling rounds per step, or 0 for no
            limit. After the first round, further rounds replace the ids that were removed, until
            the training node has a full batch. If there is a limit, each further round samples at
            least a whole batch; otherwise, only the missing ids are sampled. The option only has an
            effect if the filter is between a call and the node that trains this call's weights.
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
