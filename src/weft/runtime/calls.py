"""Model function calls as the runtime sees them: their names, settings, checks, inputs and outputs.

A run checks its calls, host functions and hooks before it starts. Keys of inputs and outputs are
renamed between the names that a node uses and those on the graph's edges.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch

from weft.data.sample import SequenceSample
from weft.data.tokenizer import Tokenizer
from weft.errors import ConfigError, GraphError, RunError, UnknownName, find_nearest
from weft.experiment import Experiment
from weft.graph.mfc import HOOKS, Call, MFCDef, Node
from weft.interfaces.base import Minibatches, ModelInterface
from weft.registry import functions, interfaces

METHODS = ("generate", "inference", "train_step", "evaluate", "save", "state_dict")


def implements_method(interface: str, method: str) -> bool:
    """Return whether the class registered under the name `interface` implements `method`.

    A method inherited from `ModelInterface` does not count.
    """
    cls = interfaces.get(interface)
    return any(method in vars(base) for base in inspect.getmro(cls) if base is not ModelInterface)


def get_minibatches(node: MFCDef) -> Minibatches:
    """Return the settings by which the node's interface splits a batch into minibatches.

    By default, the whole batch is one minibatch.
    """
    if not node.trains or not implements_method(node.interface, "minibatches"):
        return Minibatches()
    wanted: Minibatches = interfaces.get(node.interface)(**node.args).minibatches()
    return wanted


# -- checks before a run starts


def check_calls(experiment: Experiment) -> None:
    """Check the interfaces, methods, arguments, functions and hooks of all graphs.

    Raises `UserError` if an interface lacks the method that a node calls or does not accept the
    node's arguments, or if a function or hook is unknown.
    """
    beside = []
    for each in (experiment.evaluation, experiment.fixed_prompts):
        if each is not None:
            beside.append(each.graph)
    for graph in (experiment.graph, *beside):
        for node in graph.nodes:
            if isinstance(node, MFCDef):
                _check_call(experiment, node)
            else:
                functions.get(node.function)


def check_tokens(experiment: Experiment, tokenizers: Mapping[str, Tokenizer]) -> None:
    """Check that the tokenizer of each role is compatible with the data's tokenizer.

    The check is done by the method `check_tokens` of the roles' interfaces. Interfaces without this
    method are skipped. `tokenizers` maps roles to tokenizers.
    """
    data = tokenizers[experiment.data_role]
    for node in experiment.calls.values():
        if implements_method(node.interface, "check_tokens"):
            interfaces.get(node.interface)(**node.args).check_tokens(
                node.role, tokenizers[node.role], data
            )


def _check_call(experiment: Experiment, node: MFCDef) -> None:
    cls = interfaces.get(node.interface)
    if not inspect.isclass(cls):
        raise GraphError(
            f"node {node.name!r}: the interface {node.interface!r} is not a class; register one "
            f"that has {node.method}"
        )
    if not implements_method(node.interface, node.method):
        there = []
        for method in METHODS:
            if implements_method(node.interface, method):
                there.append(method)
        raise GraphError(
            f"node {node.name!r} calls {node.method} of the interface {node.interface!r}, which "
            f"does not have it "
            f"(it has {', '.join(there) or 'none of them'}); name another interface or method"
        )
    try:
        inspect.signature(cls).bind(**node.args)
    except TypeError as error:
        raise ConfigError(
            f"node {node.name!r}: the interface {node.interface!r} does not take its args: {error}"
        ) from error
    for hook in (*node.pre_hooks, *node.post_hooks):
        if isinstance(hook, Call):
            _check_hook(node, hook.function)
    if node.cache:
        _check_cache(experiment, node)


def _check_hook(node: MFCDef, name: str) -> None:
    try:
        functions.get(name)
    except UnknownName:
        close = find_nearest(name, [*HOOKS, *functions.list_names()])
        hint = f" (did you mean {' or '.join(close)}?)" if close else ""
        raise UnknownName(
            f"{node.name}: unknown hook {name!r}{hint}; a hook is {', '.join(HOOKS)} or "
            f"the name of a function registered with register_function"
        ) from None


def _check_cache(experiment: Experiment, node: MFCDef) -> None:
    changed = {n.role for n in experiment.trained_nodes} | {
        s.target for s in experiment.graph.syncs
    }
    if node.method != "inference" or node.role in changed or not node.output_keys:
        raise GraphError(
            f"node {node.name!r}: cache=True is for inference with a frozen role only, and "
            f"this is {node.method} of "
            f"{node.role!r}{', whose weights change' if node.role in changed else ''}; leave it out"
        )


# -- inputs and outputs


class TensorSource(Protocol):
    """Object that returns tensors by sample id, such as a tensor store or a worker group."""

    def fetch(
        self, ids: Sequence[str], keys: Iterable[str], optional: Iterable[str] = ()
    ) -> SequenceSample: ...


def read_inputs(shelf: TensorSource, node: Node, ids: Sequence[str]) -> SequenceSample:
    """Return a node's inputs for these ids, with the key names that the node itself uses.

    An optional input is included if all ids have it. `shelf` is the source of the tensors.
    """
    batch = shelf.fetch(ids, node.inputs, node.optional_inputs)
    return batch.remap_keys(
        {edge: own for own, edge in node.input_key_remap.items() if edge in batch.keys}
    )


def make_empty_sample(description: SequenceSample) -> SequenceSample:
    """Return a sample with the keys and metadata of `description` and empty tensors.

    It serves as the input of a rank that gets no ids of a batch but still has to take part in
    collective operations.
    """
    # empty integers can be concatenated with values of any dtype
    nothing = {key: torch.empty(0, dtype=torch.int64) for key in description.keys}
    return SequenceSample(
        description.ids, description.lengths, description.offsets, nothing, description.metadata
    )


def to_edge_outputs(
    node: Node, outputs: SequenceSample | None, ids: Sequence[str], *, filters: bool = False
) -> SequenceSample | None:
    """Return a node's outputs in the order of `ids`, with the key names of the graph's edges.

    Raises `RunError` if a key is missing, or if an id is unknown or missing. If `filters` is True,
    the node is a filter, and ids may be missing.
    """
    if not node.output_keys and (outputs is None or not filters):
        return None
    if outputs is None:
        raise RunError(f"returned no outputs; its output keys are {', '.join(node.output_keys)}")
    absent = [key for key in node.output_keys if key not in outputs.data]
    if absent:
        raise RunError(
            f"produced no {', '.join(absent)}; its outputs are {', '.join(outputs.data) or 'none'}"
        )
    unknown = set(outputs.ids) - set(ids)
    lost = set(ids) - set(outputs.ids)
    if unknown or (lost and not filters):
        raise RunError(
            f"returned ids that it was not given ({sorted(unknown)[:5]}) or lost some "
            f"({sorted(lost)[:5]})"
        )
    chosen = outputs.select(keys=node.output_keys)
    if outputs.ids != tuple(ids):
        output_ids = set(outputs.ids)
        chosen = chosen.select(ids=[id for id in ids if id in output_ids])
    return chosen.remap_keys(node.output_key_remap)
