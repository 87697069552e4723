"""Model function calls as the runtime sees them: their settings, inputs and outputs.

Keys of inputs and outputs are renamed between the names that a node uses and those on the graph's
edges.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from weft.data.sample import SequenceSample
from weft.errors import RunError
from weft.graph.mfc import MFCDef, Node
from weft.interfaces.base import Minibatches, ModelInterface
from weft.registry import interfaces


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
