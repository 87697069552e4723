"""Implementation of `weft.engine.collectives.Collectives` for several devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from weft.data.sample import SequenceSample
from weft.engine.collectives import MicrobatchProcessor, Outputs, PreparedPass, run_microbatch
from weft.models.network.linear import StoredParameter
from weft.parallel import shard, tensor
from weft.parallel.collectives import find_max_over_ranks, sum_over_ranks
from weft.parallel.mesh import RankMesh
from weft.parallel.pipeline import Pipeline, sum_tied_gradients
from weft.parallel.shard import LocalShards
from weft.topology import Slice, is_expert_weight

T = TypeVar("T")
BUCKET = 2**23  # gradient elements in one all-reduce
Holdings = Mapping[int, Mapping[str, Slice]]  # rank -> canonical name -> slice on that rank


@dataclass(frozen=True)
class MeshCollectives:
    """Implementation of `Collectives` for one rank of `mesh`.

    Attributes:
        mesh: Position of this rank in the mesh of its role, with the process groups.
        network: This rank's part of the network.
        holdings: Slices of the parameters that each rank holds, by rank and canonical name.
        shapes: Shapes of the whole parameters, by canonical name.
        stored: Function that returns this rank's parameters by canonical name.
        config: Configuration of the whole network, or None if the network isn't split.
        shards: Parameters that FSDP2 shards, or None without FSDP2.
        pipeline: Pipeline of the network, or None if the layout has only one pipeline stage.
        tied: True if the embedding is also the output matrix.
        shares_rows: True if the tensor-parallel ranks use sequence parallelism.
        sums_once: True if sharded gradients are reduced only after the last micro-batch, instead of
            after each.
    """

    mesh: RankMesh
    network: nn.Module
    holdings: Holdings
    shapes: Mapping[str, tuple[int, ...]]
    stored: Callable[[], Mapping[str, StoredParameter]]
    config: Any = None
    shards: LocalShards | None = None
    pipeline: Pipeline | None = None
    tied: bool = False  # the embedding is also the output matrix
    shares_rows: bool = False  # tensor ranks share the rows between attention and MLP
    # reduce sharded gradients after the last micro-batch only, not after each
    sums_once: bool = False

    # -- a training step

    def reduce_denominators(self, own: Mapping[str, float]) -> dict[str, float]:
        names = sorted(own)
        total = self._sum_over_ranks([own[name] for name in names], "data")
        return dict(zip(names, total, strict=True))

    def run(
        self,
        network: nn.Module,
        parts: Sequence[SequenceSample],
        work: MicrobatchProcessor[T],
        *,
        trains: bool,
    ) -> list[T]:
        in_step = self.shards is not None or self.mesh.layout.expert > 1
        count = self._find_max(len(parts)) if in_step else len(parts)
        prepared = (
            work.prepare(parts[n]) if n < len(parts) else work.build_filler() for n in range(count)
        )
        if self.pipeline is not None:
            return self._run_stages(self.pipeline, list(prepared), work, trains=trains)
        done = []
        for number, each in enumerate(prepared):
            if self.shards is not None and trains:
                shard.sync_gradients(network, not self.sums_once or number == count - 1)
            done.append(
                run_microbatch(network, each, work, trains=trains, always=self.shards is not None)
            )
        return done

    def _run_stages(
        self,
        pipeline: Pipeline,
        prepared: list[PreparedPass],
        work: MicrobatchProcessor[T],
        *,
        trains: bool,
    ) -> list[T]:
        """Run the micro-batches through the stages of a pipeline, and return their results."""
        if not prepared:
            return []
        given = [each.given for each in prepared]
        done: list[T] = []

        def compute_loss(number: int, out: Outputs) -> Tensor:
            done.append(work.finish(prepared[number], prepared[number].scatter_outputs(out)))
            assert isinstance(done[-1], Tensor)
            return done[-1]

        if trains:
            last = pipeline.placement.num_stages - 1
            pipeline.train(
                given,
                compute_loss,
                lambda stage, n: None if stage == last else work.compute_stage_loss(prepared[n]),
            )
            return done
        outputs = pipeline.share_outputs(pipeline.forward(given))
        return [
            work.finish(each, each.scatter_outputs(out))
            for each, out in zip(prepared, outputs, strict=True)
        ]

    def reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        # Sum over the ranks that have copies of a parameter; FSDP2 summed over data ranks already.
        axes: tuple[str, ...] = ("data", "context")
        if self.shards is not None:
            self.shards.take_gradients()
            axes = ("context",)
        if self.mesh.count_ranks(*axes) > 1:
            apart = self._find_separate_experts()
            self._sum_gradients(
                [p for p in parameters if id(p) not in apart], self.mesh.get_group(*axes)
            )
            if apart and (same := self.mesh.expert_copies_group) is not None:
                self._sum_gradients([p for p in parameters if id(p) in apart], same)
        # A tied embedding has a copy on the first and on the last pipeline stage.
        two_copies = (
            self.tied and self.pipeline is not None and self.pipeline.placement.last_rank > 0
        )
        if two_copies and self.mesh.ends_group is not None:
            if "embed.weight" in self.holdings[self.mesh.rank]:
                copies = [self.stored()["embed.weight"].parameter]
            else:
                copies = []
            sum_tied_gradients(
                [copy for copy in copies if copy.requires_grad], self.mesh.ends_group, self._device
            )
        # Each tensor rank has a part of the gradients of parameters that are not split.
        if self.mesh.count_ranks("tensor") > 1:
            group = self.mesh.get_group("tensor")
            tensor.sum_gradients(
                self.stored(), self.config, group, self._device, shares_rows=self.shares_rows
            )

    def _find_separate_experts(self) -> set[int]:
        """Return the Python ids of the expert parameters whose gradients are summed separately.

        The data-parallel ranks that have copies of an expert differ from those that have copies of
        other parameters. The set is empty if all ranks have the same experts, or if FSDP2 already
        sums the gradients.
        """
        if self.mesh.layout.expert == 1 or self.shards is not None:
            return set()
        separate_experts: set[int] = set()
        for name, part in self.stored().items():
            if is_expert_weight(name):
                separate_experts.add(id(part.parameter))
        return separate_experts

    def _sum_gradients(self, parameters: Sequence[nn.Parameter], group: ProcessGroup) -> None:
        self._agree(parameters, group)
        for bucket in _group_buckets(
            [cast(Tensor, p.grad) for p in parameters if p.grad is not None]
        ):
            # offloaded gradients are in host memory
            flat = torch.cat([gradient.flatten() for gradient in bucket]).to(self._device)
            sum_over_ranks(flat, group)
            tensor.put_back(flat, bucket)

    def compute_gradient_norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        own = 0.0
        dtype = torch.float32
        if gradients:
            values = list(gradients.values())
            norms = torch.stack(torch._foreach_norm(values, 2, torch.float64))
            copies = torch.tensor(
                [self._count_holders(name) for name in gradients], dtype=torch.float64
            )
            own = float((norms.cpu().square() / copies).sum())
            dtype = torch.promote_types(values[0].dtype, torch.float32)
        (total,) = self._sum_over_ranks([own])
        return torch.tensor(total, dtype=torch.float64, device=self._device).sqrt().to(dtype)

    def gather_values(self, own: T, *, stages: bool = False) -> list[T]:
        axes = ("data", "pipeline") if stages else ("data",)
        if self.mesh.count_ranks(*axes) == 1:
            return [own]
        every: list[Any] = [None] * self.mesh.count_ranks(*axes)
        dist.all_gather_object(every, own, group=self.mesh.get_group(*axes))
        return every

    # -- parameters

    def gather_parameters(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        """Gather whole parameters into host memory of the mesh's first rank, one tensor at a time.

        Only slices that the first rank lacks are sent.
        """
        first = self.mesh.mesh.ranks[0]
        group = self.mesh.all_ranks_group
        dtypes: list[dict[str, torch.dtype]] = [{} for _ in self.mesh.mesh.ranks]
        dist.all_gather_object(
            dtypes, {name: value.dtype for name, value in own.items()}, group=group
        )
        dtype = {}
        for each in dtypes:
            for name, kind in each.items():
                dtype[name] = kind
        whole: dict[str, Tensor] = {}
        for name in (name for name in self.shapes if name in dtype):
            for rank, where in self._iterate_slices(name, first):
                if self.mesh.rank == first:
                    target = whole.setdefault(
                        name, torch.empty(self.shapes[name], dtype=dtype[name])
                    )
                    target[where] = (
                        own[name] if rank == first else self._receive(where, dtype[name], rank)
                    )
                elif self.mesh.rank == rank:
                    dist.send(own[name].detach().to(self._device).contiguous(), first, group=group)
        return whole if self.mesh.rank == first else None

    def select_saved_names(self, names: Iterable[str]) -> list[str]:
        saved_names: list[str] = []
        for name in names:
            # Of the ranks with the same slice, the first one saves it.
            own = self.holdings[self.mesh.rank][name]
            holders = (r for r in self.mesh.mesh.ranks if self.holdings[r].get(name) == own)
            if next(holders) == self.mesh.rank:
                saved_names.append(name)
        return saved_names

    def name_file(self, stem: str) -> str:
        return f"{stem}-{self.mesh.mesh.ranks.index(self.mesh.rank):05d}.safetensors"

    def _receive(self, where: Slice, dtype: torch.dtype, rank: int) -> Tensor:
        shape = [part.stop - part.start for part in where]
        buffer = torch.empty(shape, dtype=dtype, device=next(self.network.parameters()).device)
        dist.recv(buffer, rank, group=self.mesh.all_ranks_group)
        return buffer.cpu()

    def _iterate_slices(self, name: str, first: int) -> Iterator[tuple[int, Slice]]:
        """Iterate over (rank, slice) for each distinct slice of the parameter `name`.

        A slice that several ranks have is listed once, with the rank `first` if that rank has the
        slice, else with the first rank of the mesh that has it.
        """
        slices: dict[tuple[tuple[int, int], ...], tuple[int, Slice]] = {}
        for rank in (first, *self.mesh.mesh.ranks):
            if name in self.holdings[rank]:
                where = self.holdings[rank][name]
                slices.setdefault(tuple((part.start, part.stop) for part in where), (rank, where))
        return iter(slices.values())

    def _count_holders(self, name: str) -> int:
        own = self.holdings[self.mesh.rank][name]
        return sum(held.get(name) == own for held in self.holdings.values())

    # -- numbers

    def _sum_over_ranks(self, own: Sequence[float], *axes: str) -> list[float]:
        """Return the sums of `own` over the ranks along `axes`, by default over all ranks."""
        size = self.mesh.count_ranks(*axes) if axes else len(self.mesh.mesh.ranks)
        if size == 1:
            return list(own)
        numbers = torch.tensor(own, dtype=torch.float64, device=self._device)
        group = self.mesh.get_group(*axes) if axes else self.mesh.all_ranks_group
        sum_over_ranks(numbers, group)
        return [float(each) for each in numbers.tolist()]

    def _find_max(self, own: int) -> int:
        number = torch.tensor(own, device=self._device)
        find_max_over_ranks(number, self.mesh.get_group("data"))
        return int(number)

    def _agree(self, parameters: Sequence[nn.Parameter], group: ProcessGroup) -> None:
        """Set a missing gradient to zeros if another rank of `group` has that parameter's gradient.

        All ranks of the group then sum the gradients of the same parameters.
        """
        flags = torch.tensor(
            [p.grad is not None for p in parameters], dtype=torch.int32, device=self._device
        )
        find_max_over_ranks(flags, group)
        for parameter, some in zip(parameters, flags.tolist(), strict=True):
            if some and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    @property
    def _device(self) -> torch.device:
        return next(self.network.parameters()).device


def _group_buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Group consecutive tensors of one dtype into buckets, which are all-reduced one by one.

    A bucket has at most `BUCKET` elements. A larger tensor is in a bucket by itself.
    """
    bucket: list[Tensor] = []
    for each in tensors:
        if bucket and (
            each.dtype != bucket[0].dtype or sum(t.numel() for t in bucket) + each.numel() > BUCKET
        ):
            yield bucket
            bucket = []
        bucket.append(each)
    if bucket:
        yield bucket
