"""A backward pass in two halves: the gradient of what came in now, those of the weights later.

groups = half_of_input(roots, gradients, states)       # states.grad
half_of_weights(network, groups, sums=False)           # adds to the gradients of the network's parameters

Between the two a gradient waits at each node by which weights enter the graph. Of a sharded network
the first half runs FSDP2's hooks, and the second one what they would do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from weft.parallel.shard import with_whole_parameters

# of weights, as torch makes them: the nodes that they enter by, and the gradients there
Group = dict[str, Any]


def half_of_input(
    roots: Sequence[Tensor], gradients: Sequence[Tensor | None], states: Tensor
) -> list[Group]:
    """`gradients` of the roots; None of a scalar is 1. The roots can be used no more."""
    if not roots:
        return []
    from torch.distributed.pipelining._backward import stage_backward_input  # slow to import

    # What torch does to the roots in the end it cannot do to views.
    own = [root.clone() if root.dim() == 0 else root for root in roots]
    weights = [leaf for leaf in _leaves(own) if leaf is not states]
    starts = cast(list[Tensor], list(gradients))
    _, groups = stage_backward_input(own, starts, [states], iter(cast(list[nn.Parameter], weights)))
    return groups


def half_of_weights(network: nn.Module, groups: Sequence[Group], *, sums: bool) -> None:
    """Add the gradients of groups of weights.

    With `sums` those of all passes of a sharded network are then summed over the ranks.
    """
    left = list(groups)
    for part in with_whole_parameters(network, sums=sums):
        own = set(part.parameters())
        rest = []
        for group in left:
            if any(node.variable in own for node in group["params"]):
                _accumulate(group)
            else:
                rest.append(group)
        left = rest
    assert not left, "each group of weights is of one part"


def _leaves(roots: Sequence[Tensor]) -> Iterator[Tensor]:
    """What a graph begins with: states that came in, and weights, of a sharded network the whole
    ones, which its modules do not have now.
    """
    nodes: list[Any] = [root.grad_fn for root in roots]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        if node.name() == "torch::autograd::AccumulateGrad":
            yield node.variable
        for before, _ in node.next_functions:
            if before not in seen:
                seen.add(before)
                nodes.append(before)


def _accumulate(group: Group) -> None:
    """Add the gradients of one group of weights, of those that wait at its nodes (the second half
    of a backward pass).

    As `stage_backward_weight` of torch, which sets gradients itself; here hooks on parameters see
    them too.
    """
    edges = []
    gradients = []
    nodes = group["intermediates"]
    for node, waiting in zip(nodes, group["grads"], strict=True):
        for index, gradient in enumerate(waiting):
            if gradient is not None:
                edges.append(GradientEdge(node, index))
                gradients.append(gradient)
    # A node may lie before another: it gets what waits there, and not that and what the other
    # sends.
    clamps = [
        node.register_prehook(lambda _, own=waiting: own)
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
