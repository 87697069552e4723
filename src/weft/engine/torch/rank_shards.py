"""Setup of one rank's part of a distributed network: sharding, parameters and communication."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from weft.engine.base import Generator
from weft.engine.collectives import Collectives
from weft.engine.generation.caches import ReusablePageCaches, choose_default_budget
from weft.engine.generation.generate import open_generator
from weft.engine.generation.interleaved import open_interleaved
from weft.engine.generation.passes import Decoder
from weft.engine.generation.sampling import SampledRows, TokenAgreement, sample_locally
from weft.engine.generation.scheduler import GenerationBudget
from weft.engine.mesh_collectives import MeshCollectives
from weft.engine.spec import GenerationSpec
from weft.engine.torch.engine import DTYPES, RankShard, choose_dtype
from weft.engine.torch.master_weights import HALF
from weft.engine.torch.network_source import NetworkSource
from weft.models.network import lora, quantized
from weft.models.network.linear import StoredParameter, find_canonical_parameters
from weft.models.network.prefix import list_prefixes
from weft.models.network.transformer import Transformer
from weft.parallel import context, shard, tensor
from weft.parallel.mesh import RankMesh
from weft.parallel.pipeline import Pipeline, split_network
from weft.parallel.pipeline_decoder import StagedDecoder
from weft.parallel.schedule import Kind
from weft.parallel.shard import LocalShards
from weft.topology import build_whole_slice, compute_holdings


def build_rank_shard(
    source: NetworkSource,
    network: Transformer,
    whole: Transformer,
    mesh: RankMesh,
    device: torch.device,
) -> RankShard:
    """Allocate and fill this rank's part of a network, and return its `RankShard`.

    `network` is the part of this rank, and `whole` is the whole network. All ranks of the
    mesh must call this function.
    """
    # Shard the network; trained parameters that are not in float32 yet are cast first.
    shards = None
    stages = _list_stages(source, network, mesh)
    if mesh.layout.fsdp > 1:
        dtype = DTYPES[choose_dtype(source.spec)]
        if dtype in HALF and source.spec.trained:
            _widen_trained(network, with_embeddings=source.spec.trains_embeddings)
        shard.shard(
            stages.values(), mesh, device, dtype, reshard=source.spec.zero_stage not in (1, 2)
        )
    # Allocate memory, and fill this rank's slices with values.
    quantized.allocate_memory(network, device)
    if mesh.layout.fsdp > 1:
        shards = LocalShards(network)
    holdings = {}
    for rank in mesh.mesh.ranks:
        place = mesh.mesh.get_coordinates(rank)
        holdings[rank] = compute_holdings(
            source.shapes, source.config, mesh.layout, place, tied=source.is_tied
        )
    stored = find_canonical_parameters(network) if shards is None else shards.stored
    assert stored.keys() == holdings[mesh.rank].keys(), (
        f"parameters and topology differ: {stored.keys() ^ holdings[mesh.rank].keys()}"
    )
    source.fill(stored, holdings[mesh.rank])
    sums_once = source.spec.zero_stage == 1

    def build_collectives(list_stored: Callable[[], Mapping[str, StoredParameter]]) -> Collectives:
        staged = None
        if mesh.layout.pipeline > 1:
            dtype = DTYPES[choose_dtype(source.spec)]
            casts = shards is not None and dtype in HALF
            kind = cast(Kind, source.spec.pipeline_schedule)
            staged = Pipeline(
                stages,
                kind,
                mesh.get_group("pipeline"),
                dtype if casts else None,
                partial(_count_rows, mesh, source.spec.sequence_parallel),
                sums_once=sums_once,
            )
        return MeshCollectives(
            mesh,
            network,
            holdings,
            source.shapes,
            list_stored,
            source.config,
            shards,
            staged,
            source.is_tied,
            shares_rows=source.spec.sequence_parallel,
            sums_once=sums_once,
        )

    return RankShard(
        shapes=source.shapes,
        trained=frozenset(
            name for name, part in find_canonical_parameters(whole).items() if part.requires_grad
        ),
        places=holdings[mesh.rank],
        make_collectives=build_collectives,
        shards=shards,
        generating=lambda spec, version, caches: _open_generator(
            source, network, stages, mesh, device, spec, version, caches
        ),
    )


def _widen_trained(network: Transformer, *, with_embeddings: bool) -> None:
    """Cast adapters, prefixes and, with `with_embeddings`, embedding and output matrix to float32."""
    for adapter in (*lora.find_adapters(network).values(), *list_prefixes(network)):
        adapter.float()
    if with_embeddings:
        for module in (getattr(network, name, None) for name in ("embed", "head")):
            if isinstance(module, nn.Module):
                module.float()


def _list_stages(
    source: NetworkSource, network: Transformer, mesh: RankMesh
) -> dict[int, Transformer]:
    """Return the pipeline stages on this rank, by stage index.

    If this rank has several stages, `network` is split into them; otherwise `network` is the only
    stage.
    """
    runs = source.list_stages(mesh)
    if len(runs) == 1:
        return dict.fromkeys(runs, network)
    return dict(zip(runs, split_network(network, list(runs.values())), strict=True))


def _count_rows(mesh: RankMesh, shares_rows: bool, length: int) -> int:
    """Return the number of rows of hidden states that this rank has in a pack of `length` tokens.

    Outside of attention and MLP, context-parallel ranks and, with `shares_rows`, tensor-parallel
    ranks divide the rows.
    """
    if mesh.count_ranks("context") > 1:
        length = context.count_tokens(length, mesh.get_group("context"))
    if shares_rows and mesh.count_ranks("tensor") > 1:
        length = tensor.count_rows(length, mesh.get_group("tensor"))
    return length


def build_copy_shard(network: nn.Module, mesh: RankMesh, device: torch.device) -> RankShard:
    """Return the shard of a data-parallel rank that has a copy of the whole network.

    The network need not be one of weft's own.
    """
    stored = find_canonical_parameters(network)
    shapes = {name: tuple(part.data.shape) for name, part in stored.items()}
    places = {name: build_whole_slice(shape) for name, shape in shapes.items()}
    return RankShard(
        shapes=shapes,
        trained=frozenset(name for name, part in stored.items() if part.requires_grad),
        places=places,
        make_collectives=lambda now: MeshCollectives(
            mesh, network, dict.fromkeys(mesh.mesh.ranks, places), shapes, now
        ),
        shards=None,
        generating=lambda spec, version, caches: open_generator(
            cast(Decoder, network),
            spec,
            device=device,
            version=version,
            eos_ids=(),
            reusable_caches=caches,
        ),
    )


@contextmanager
def _open_generator(
    source: NetworkSource,
    network: Transformer,
    own_stages: Mapping[int, Transformer],
    mesh: RankMesh,
    device: torch.device,
    spec: GenerationSpec,
    version: int,
    reusable_caches: ReusablePageCaches,
) -> Iterator[Generator]:
    """Open a generator on this rank's part of the network.

    Ranks of one data-parallel replica generate in lockstep; different replicas generate
    independently. `own_stages` contains this rank's pipeline stages by index. If parameters are
    gathered for generation, `reusable_caches` is not used, because each generator gathers the
    weights into new memory.
    """
    is_divided = mesh.layout.fsdp > 1 or mesh.layout.expert > 1
    # Gather sharded parameters and experts, and agree on the size of the KV cache.
    generating_network = _gather_network(source, network, mesh, device) if is_divided else network
    dtype = next(generating_network.parameters()).dtype
    layers = replace(generating_network.config, num_layers=len(generating_network.blocks))
    budget = _agree_on_budget(
        choose_default_budget(layers, device, dtype, spec.kv_cache_gb, reusable_caches.num_bytes),
        mesh,
    )
    # Context-parallel ranks use the tokens that the first of them draws.
    if mesh.count_ranks("context") > 1:
        draw_together = partial(context.draw_on_first_rank, group=mesh.get_host_group("context"))
    else:
        draw_together = None
    if mesh.count_ranks("pipeline") == 1:
        agree_on_tokens: TokenAgreement = sample_locally if draw_together is None else draw_together
        with open_generator(
            generating_network,
            spec,
            device=device,
            version=version,
            eos_ids=(),
            budget=budget,
            agree_on_tokens=agree_on_tokens,
            reusable_caches=None if is_divided else reusable_caches,
        ) as generator:
            yield generator
        return
    # Pipeline stages generate for several groups of sequences in turn.
    count = mesh.count_ranks("pipeline")
    stages = _list_stages(source, generating_network, mesh) if is_divided else own_stages
    with (
        StagedDecoder(
            generating_network,
            stages,
            mesh.layout.placement,
            mesh.get_group("pipeline"),
            mesh.get_host_group("pipeline"),
        ) as decoder,
        open_interleaved(
            decoder,
            spec,
            count,
            device=device,
            version=version,
            eos_ids=(),
            budget=budget,
            agree_on_tokens=partial(_agree_on_draws, decoder, draw_together),
        ) as interleaved,
    ):
        yield interleaved


def _agree_on_draws(
    decoder: StagedDecoder,
    draw_together: TokenAgreement | None,
    draw: Callable[[], SampledRows],
    rows: int,
) -> Callable[[], SampledRows]:
    """Return a function that waits for the tokens of a step, and returns the same on all ranks.

    `draw` samples a token for each of the `rows` rows. `decoder.agree_on_tokens` sends the tokens
    to all ranks of a pipeline. With context parallelism, several pipelines generate the same
    sequences. In that case, `draw_together` makes all of them use the tokens that the first one
    draws.
    """
    return decoder.agree_on_tokens(
        draw if draw_together is None else lambda: draw_together(draw, rows)(), rows
    )


def _agree_on_budget(own: GenerationBudget, mesh: RankMesh) -> GenerationBudget:
    """Return the budget `own` with a KV cache limit that all cooperating ranks can keep.

    This is the smallest limit of the ranks that generate the same sequences together.
    """
    axes = ("tensor", "context", "pipeline")
    if mesh.count_ranks(*axes) == 1:
        return own
    all_budgets: list[GenerationBudget | None] = [None] * mesh.count_ranks(*axes)
    dist.all_gather_object(all_budgets, own, group=mesh.get_group(*axes))
    budgets = [budget for budget in all_budgets if budget is not None]
    return replace(own, max_tokens=min(budget.max_tokens for budget in budgets))


def _gather_network(
    source: NetworkSource, network: Transformer, mesh: RankMesh, device: torch.device
) -> Transformer:
    """Return a copy of the network for generation, in the compute dtype.

    Sharded parameters and the experts of other ranks are gathered once, so that they cause no
    communication while tokens are generated.
    """
    whole = source.build_network(mesh, experts_apart=False)
    if (dtype := DTYPES[choose_dtype(source.spec)]) in HALF:
        whole.to(dtype)
    whole.to_empty(device=device)
    shard.gather(network, whole, mesh.experts_group if mesh.layout.expert > 1 else None)
    for name, adapter in lora.find_adapters(whole).items():
        adapter.active = lora.find_adapters(network)[name].active
    for prefix, copy in zip(list_prefixes(network), list_prefixes(whole), strict=True):
        copy.active = prefix.active
    return whole
