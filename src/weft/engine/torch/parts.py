"""One rank's part of a network: its parameters sharded and filled, and the other ranks within reach."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from weft.engine.many_devices import ManyDevices
from weft.engine.spread import Spread
from weft.engine.torch.engine import DTYPES, Part, dtype_of
from weft.engine.torch.master_weights import HALF
from weft.engine.torch.source import Source
from weft.models.network import lora
from weft.models.network.parameters import StoredParameter, canonical
from weft.models.network.transformer import Transformer
from weft.parallel import shard
from weft.parallel.mesh import RankMesh
from weft.parallel.shard import Shards
from weft.topology import holdings


def spread(source: Source, network: Transformer, whole: Transformer, mesh: RankMesh, device: torch.device) -> Part:
    """Give `network`, this rank's part of `whole`, its memory and its values. Every rank of the mesh calls it."""
    shards = None
    if mesh.layout.fsdp > 1:
        dtype = DTYPES[dtype_of(source.spec)]
        if dtype in HALF:  # what is frozen stays in it
            for adapter in lora.adapters(network).values():
                adapter.float()
        shard.shard(network, network.blocks, mesh, device, dtype)
    network.to_empty(device=device)
    if mesh.layout.fsdp > 1:
        shards = Shards(network)
    held = {
        rank: holdings(source.shapes, source.config, mesh.layout, mesh.mesh.coordinates(rank), tied=source.tied)
        for rank in mesh.mesh.ranks
    }
    stored = canonical(network) if shards is None else shards.stored
    assert stored.keys() == held[mesh.rank].keys(), (
        f"parameters and topology differ: {stored.keys() ^ held[mesh.rank].keys()}"
    )
    source.fill(stored, held[mesh.rank])

    def ranks(now: Callable[[], Mapping[str, StoredParameter]]) -> Spread:
        return ManyDevices(mesh, network, held, source.shapes, now, source.config, shards)

    return Part(
        shapes=source.shapes,
        trained=frozenset(name for name, part in canonical(whole).items() if part.requires_grad),
        places=held[mesh.rank],
        spread=ranks,
        shards=shards,
        generating=lambda: _generating(source, network, mesh, device, sharded=shards is not None),
    )


def _generating(
    source: Source, network: Transformer, mesh: RankMesh, device: torch.device, *, sharded: bool
) -> AbstractContextManager[nn.Module]:
    return _gathered(source, network, mesh, device) if sharded else _as_it_is(network)


@contextmanager
def _as_it_is(network: nn.Module) -> Iterator[nn.Module]:
    yield network


@contextmanager
def _gathered(source: Source, network: Transformer, mesh: RankMesh, device: torch.device) -> Iterator[nn.Module]:
    """The network with whole parameters, in the dtype it computes in, as long as it generates: no rank then waits for another
    at every layer of every token."""
    whole = source.network(mesh)
    if (dtype := DTYPES[dtype_of(source.spec)]) in HALF:
        whole.to(dtype)
    whole.to_empty(device=device)
    shard.gather(network, whole)
    for name, adapter in lora.adapters(whole).items():
        adapter.active = lora.adapters(network)[name].active
    yield whole
