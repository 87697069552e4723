"""Sharding of a network's parameters over data-parallel ranks by FSDP2.

    shard([network], rank_mesh, device, dtype)     # the network can be on the meta device
    shards = LocalShards(network)                  # after memory was allocated
    shards.stored["blocks.0.mlp.down.weight"]      # this rank's rows, for the optimizer

Each block of a network is sharded separately, then the network's other parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from weft.models.network.linear import StoredParameter, find_canonical_parameters
from weft.models.network.moe import ExpertMLP
from weft.models.network.transformer import Transformer
from weft.parallel.mesh import RankMesh


def shard(
    networks: Iterable[Transformer],
    mesh: RankMesh,
    device: torch.device,
    dtype: torch.dtype,
    *,
    reshard: bool = True,
) -> None:
    """Shard the networks' parameters by rows over the ranks, with FSDP2.

    During a pass, FSDP2 gathers the parameters of one block at a time. The parameters outside of
    blocks are gathered as one more unit. A parameter that several networks share is sharded with
    the first of them. With expert parallelism, experts are sharded over the ranks that hold the
    same experts.

    `dtype` is the dtype of computations. Gradients are summed over the ranks in at least float32.
    If `reshard` is False, gathered parameters are kept from the forward to the backward pass. This
    needs more memory, but parameters are gathered once instead of twice.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if half else None,
        reduce_dtype=torch.float32 if half else None,
        cast_forward_inputs=False,
    )
    shards = mesh.build_shard_mesh(device)
    if mesh.layout.expert > 1:
        apart = mesh.build_shard_mesh(device, experts=True)
    else:
        apart = None
    for network in networks:
        parts: list[tuple[list[nn.Module], DeviceMesh]] = []
        lent: set[nn.Parameter] = set()
        for parameter in network.parameters():
            if isinstance(parameter, DTensor):
                lent.add(parameter)
        # FSDP2 wants inner modules first: experts, then blocks, then the rest of the network.
        if apart is not None:
            stacks = []
            for module in network.modules():
                if isinstance(module, ExpertMLP):
                    stacks.append(module)
            for experts in stacks:
                parts.append((list(experts.children()), apart))
        for part in (*network.blocks, network):
            parts.append(([part], shards))
        for modules, within in parts:
            wrapped, *_ = fully_shard(
                modules,
                mesh=within,
                mp_policy=policy,
                reshard_after_forward=reshard,
                ignored_params=lent,
            )
            # Sum gradients over the ranks instead of averaging them.
            wrapped.set_gradient_divide_factor(1.0)
            wrapped.set_force_sum_reduction_for_comms(True)


class LocalShards:
    """This rank's shards of a network's parameters, each as a plain `nn.Parameter`.

    A plain parameter shares memory with the shard of the network's FSDP2 parameter. `stored` maps
    canonical names to locations in the plain parameters. A canonical parameter is left out if this
    rank has none of its rows. Backward passes add gradients to the FSDP2 parameters, and
    `take_gradients` moves them to the plain parameters.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._pairs: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self.stored: dict[str, StoredParameter] = {}
        for module in network.modules():
            if isinstance(module, FSDPModule):
                _refresh_memory(module)
        for name, part in find_canonical_parameters(network).items():
            sharded, own = self._pair_with_local(part.parameter)
            rows = part.rows or slice(0, sharded.shape[0])
            first, count = _find_local_rows(sharded)
            low = max(rows.start - first, 0)
            high = min(rows.stop - first, count)
            if low < high:
                self.stored[name] = StoredParameter(part.name, own, slice(low, high))

    def take_gradients(self) -> None:
        """Move the gradients of the network's parameters to the parameters in `stored`."""
        for sharded, own in self._pairs.values():
            own.grad = None if sharded.grad is None else _to_local(sharded.grad)
            sharded.grad = None

    def get_local_rows(self, sharded: nn.Parameter) -> nn.Parameter:
        """Return this rank's rows of `sharded`, a parameter of the network.

        On the last ranks, the result can have fewer rows or none.
        """
        return self._pairs[id(sharded)][1]

    def get_local_gradient(self, sharded: Tensor) -> Tensor:
        """Return the gradient of this rank's rows of `sharded`, a parameter of the network."""
        assert sharded.grad is not None
        return _to_local(sharded.grad)

    def reshard(self) -> None:
        """Free the gathered parameters that are left after a forward pass without a backward pass.

        Must be called before the parameters' values change, because the gathered copies would be
        stale.
        """
        for module in self._network.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _pair_with_local(self, sharded: nn.Parameter) -> tuple[nn.Parameter, nn.Parameter]:
        if id(sharded) not in self._pairs:
            own = nn.Parameter(_to_local(sharded.detach()), requires_grad=sharded.requires_grad)
            self._pairs[id(sharded)] = sharded, own
        return self._pairs[id(sharded)]


def _refresh_memory(module: FSDPModule) -> None:
    """Make FSDP2 look up the memory of the module's parameters again.

    This is needed for parameters that are shared with another network: their memory can be
    allocated after FSDP2 first looked it up. If the rows of such a parameter do not divide evenly
    among the ranks, FSDP2 would otherwise allocate separate memory for it in the first pass. The
    parameters in `LocalShards` would then not share memory with the network.
    """
    for group in list_parameter_groups(module):
        for parameter in group.fsdp_params:
            parameter.reset_sharded_param()


def list_parameter_groups(module: FSDPModule) -> list[Any]:
    """Return FSDP2's groups of the module's parameters; those of a group are gathered together."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    # torch 2.11 has at most one group per module
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _to_local(x: Tensor) -> Tensor:
    assert isinstance(x, DTensor), "a parameter of a sharded network"
    return x.to_local()


def _find_local_rows(sharded: Tensor) -> tuple[int, int]:
    """Return the index of this rank's first row of a sharded parameter, and its number of rows.

    All ranks have the same number of rows, except the last ones, which may have fewer or none.
    """
    assert isinstance(sharded, DTensor)
    place = sharded.device_mesh.get_coordinate()
    assert place is not None
    chunk = -(-sharded.shape[0] // sharded.device_mesh.size(sharded.device_mesh.ndim - 1))
    first = min(place[-1] * chunk, sharded.shape[0])
    return first, min(first + chunk, sharded.shape[0]) - first


def gather(network: nn.Module, into: nn.Module, experts: ProcessGroup | None) -> None:
    """Copy the parameters of `network`, which is split over ranks, to the whole network `into`.

    `network` may be sharded, and each rank of the group `experts` may hold only some of the
    experts. `into` has the same parameters in full size, and is filled on every rank. All ranks
    must call this.
    """
    with torch.no_grad():
        for (name, held), (other, whole) in zip(
            network.named_parameters(), into.named_parameters(), strict=True
        ):
            assert name == other, f"networks of different forms: {name} and {other}"
            own = held.full_tensor() if isinstance(held, DTensor) else held
            if own.shape == whole.shape:
                whole.copy_(own)
                continue
            assert experts is not None, f"{name} is only a part of the whole parameter"
            every = [torch.empty_like(own) for _ in range(experts.size())]
            dist.all_gather(every, own.contiguous(), group=experts)
            whole.copy_(torch.cat(every))


def is_sharded(network: nn.Module) -> bool:
    return isinstance(network, FSDPModule)


def sync_gradients(network: nn.Module, on: bool) -> None:
    """Set whether later backward passes sum the gradients over the ranks.

    If `on` is False, gradients are accumulated on each rank. Does nothing if the network is not
    sharded.
    """
    if isinstance(network, FSDPModule):
        network.set_requires_gradient_sync(on)


def iterate_unsharded(network: nn.Module, *, sums: bool) -> Iterator[nn.Module]:
    """Iterate over the parts of a sharded network, with each part's parameters gathered.

    The parts are the blocks, and then the network itself for its other parameters. Zero-bubble
    pipelines compute the gradients of weights separately from those of inputs. They use this
    function for the weights, because FSDP2's hooks run only for the inputs. When the caller is done
    with a part, its gathered parameters are freed. Their gradients are accumulated on this rank;
    with `sums`, the accumulated gradients are also summed over the ranks. A network that is not
    sharded is yielded as a single part.
    """
    if not isinstance(network, FSDPModule):
        yield network
        return
    for part, modules in _iterate_parts(network):
        for module in modules:  # hooks that do run in this half must not reshard or sum
            _set_backward_behavior(module, reshards=False, sums=False)
            module.unshard()
        yield part
        _finish_backward(modules, sums=sums)
    network._get_fsdp_state()._root_post_backward_final_callback()


def finish_backward(network: nn.Module, *, sums: bool) -> None:
    """Finish a backward pass for which FSDP2's hooks did not run.

    Adds the new gradients to those accumulated on this rank. With `sums`, the accumulated gradients
    are then summed over all ranks. Frees the gathered parameters. Does nothing if the network is
    not sharded.

    For example, a pipeline's last stage can share the embedding matrix of the first stage. When the
    last stage computes a gradient of this matrix, the hooks of the first stage do not run.
    """
    if isinstance(network, FSDPModule):
        for _, modules in _iterate_parts(network):
            _finish_backward(modules, sums=sums)
        network._get_fsdp_state()._root_post_backward_final_callback()


def unshard(network: nn.Module) -> None:
    """Gather the parameters of a sharded network, except those in its blocks.

    Used by a rank that has both the first and the last stage of a pipeline whose embeddings are
    tied. The last stage reads the embedding matrix of the first stage. FSDP2 would not gather the
    matrix, because it gathers only before the `forward` of the network that owns it. Does nothing
    if the network is not sharded.
    """
    if isinstance(network, FSDPModule):
        network.unshard()


def _iterate_parts(network: nn.Module) -> Iterator[tuple[nn.Module, list[FSDPModule]]]:
    """Iterate over the parts of a network, each with the FSDP modules that hold its parameters.

    The parts are the blocks, from the last to the first as in a backward pass, and then the network
    itself for all other parameters.
    """
    assert isinstance(network, Transformer)
    for part in (*reversed(network.blocks), network):
        within = [part] if part is network else part.modules()
        yield part, [module for module in within if isinstance(module, FSDPModule)]


def _finish_backward(modules: Sequence[FSDPModule], *, sums: bool) -> None:
    for module in reversed(modules):
        _set_backward_behavior(module, reshards=True, sums=sums)
        # The same call as in `torch.distributed.pipelining.stage`.
        for group in list_parameter_groups(module):
            group.post_backward()


def _set_backward_behavior(module: FSDPModule, *, reshards: bool, sums: bool) -> None:
    module.set_reshard_after_backward(reshards, recurse=False)
    module.set_requires_gradient_sync(sums, recurse=False)
