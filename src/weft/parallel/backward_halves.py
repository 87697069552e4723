"""Backward pass in two halves, as required by zero-bubble pipeline schedules.

    groups = compute_input_half(roots, gradients, states)      # sets states.grad
    compute_weight_half(network, groups, sums=False)           # adds to the parameters' gradients

The first half computes the gradient of a stage's input, and the second half computes the gradients
of its weights. In between, `groups` holds the autograd nodes where the weights enter the graph, and
the gradients at these nodes. The hooks of FSDP2 run only in the first half. For a sharded network,
the second half therefore gathers the weights and sums their gradients itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from weft.parallel.shard import iterate_unsharded

# A group of weights, as torch returns it: the nodes where they enter the graph, and the gradients
# there.
Group = dict[str, Any]


def compute_input_half(
    roots: Sequence[Tensor], gradients: Sequence[Tensor | None], states: Tensor
) -> list[Group]:
    """Compute the gradient of a stage's input `states`, and prepare the gradients of its weights.

    The input's gradient is stored in `states.grad`. `roots` are the tensors at which the backward
    pass starts, and `gradients` are their gradients; None means the gradient 1 of a scalar.
    Roots with dimensions cannot be used afterwards, because torch detaches them.

    Returns groups of weights for `compute_weight_half`. Each group has the autograd nodes at which
    its weights enter the graph, and the gradients at these nodes.
    """
    if not roots:
        return []
    from torch.distributed.pipelining._backward import stage_backward_input  # slow to import

    # torch detaches the roots in place at the end, which fails for views.
    detachable_roots = [root.clone() if root.dim() == 0 else root for root in roots]
    weights = [leaf for leaf in _iterate_leaves(detachable_roots) if leaf is not states]
    starts = cast(list[Tensor], list(gradients))
    _, groups = stage_backward_input(
        detachable_roots, starts, [states], iter(cast(list[nn.Parameter], weights))
    )
    return groups


def compute_weight_half(network: nn.Module, groups: Sequence[Group], *, sums: bool) -> None:
    """Compute the gradients of a stage's weights, and add them to the parameters' gradients.

    `groups` are the groups of weights that `compute_input_half` returned. With `sums`, the
    accumulated gradients of a sharded network are afterwards summed over the ranks.
    """
    remaining = list(groups)
    for part in iterate_unsharded(network, sums=sums):
        parameters = set(part.parameters())
        others = []
        for group in remaining:
            if any(node.variable in parameters for node in group["params"]):
                _accumulate(group)
            else:
                others.append(group)
        remaining = others
    assert not remaining, "each group of weights is of one part"


def _iterate_leaves(roots: Sequence[Tensor]) -> Iterator[Tensor]:
    """Iterate over the leaves of the autograd graph of `roots`: the stage's input and its weights.

    The weights cannot be listed from the network. If it is sharded, the weights in the graph are
    gathered tensors, which are not parameters of the network's modules at this point.
    """
    nodes: list[Any] = [root.grad_fn for root in roots]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        if node.name() == "torch::autograd::AccumulateGrad":
            yield node.variable
        for next_node, _ in node.next_functions:
            if next_node not in seen:
                seen.add(next_node)
                nodes.append(next_node)


def _accumulate(group: Group) -> None:
    """Compute the gradients of one group of weights, and add them to the parameters' gradients.

    The computation starts from the gradients that are stored at the group's autograd nodes. Unlike
    torch's `stage_backward_weight`, which sets the gradients itself, this function also runs the
    hooks of parameters.
    """
    edges = []
    gradients = []
    nodes = group["intermediates"]
    for node, waiting in zip(nodes, group["grads"], strict=True):
        for index, gradient in enumerate(waiting):
            if gradient is not None:
                edges.append(GradientEdge(node, index))
                gradients.append(gradient)
    # A node can be downstream of another node of the group. Its stored gradient is complete, so it
    # replaces the gradient that arrives from the other node.
    clamps = [
        node.register_prehook(lambda _, stored=waiting: stored)
        for node, waiting in zip(nodes, group["grads"], strict=True)
        if len(nodes) > 1
    ]
    try:
        torch.autograd.backward(
            edges, gradients, inputs=[node.variable for node in group["params"]]
        )
    finally:
        for clamp in clamps:
            clamp.remove()
