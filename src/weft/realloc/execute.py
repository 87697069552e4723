"""Execution of a plan: parameters are moved between the engines of two layouts in bounded messages.

    reallocation = Reallocation(transfers, rank=rank, group=group)      # once
    reallocation.move(source, target)                                   # every rank of both layouts, at the same time

The ranks first exchange versions and dtypes. `messages.py` then sends and receives the parameters.
A snapshot in host memory lets an engine change before its parameters are sent.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from weft.errors import RunError
from weft.realloc.messages import (
    MessageExchange,
    ReallocationLink,
    ReallocationStep,
    SourcePieces,
    Values,
)
from weft.realloc.plan import ParameterTransfer, plan_rounds
from weft.topology import Slice

BUCKET_BYTES = 32 * 2**20
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
Dtypes = dict[str, torch.dtype]


class ParameterSource(Protocol):
    """Object from which parameters are read, such as an engine.

    `version` is the version number of its weights. `read` yields (name, slices, values) for each
    parameter. `slices` is the part of the whole parameter that this object holds, with one slice
    per dimension, and `values` are the values of this part.
    """

    version: int

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Slice, Any]]: ...


class ParameterStore(ParameterSource, Protocol):
    """Object whose parameters can be read and written, such as an engine.

    `read` yields views of the parameters in the highest precision available. `write` sets the
    parameters to eta * new + (1 - eta) * old.
    """

    def write(
        self, parts: Iterable[tuple[str, Slice, Any]], *, version: int, eta: float = 1.0
    ) -> None: ...


@dataclass(frozen=True)
class ReallocationStatistics:
    """Statistics of one reallocation on this rank.

    Attributes:
        version: Version of the weights that were moved.
        sent: Number of bytes of parameters sent to other ranks.
        received: Number of bytes of parameters received from other ranks.
        copied: Number of bytes of parameters copied within this rank.
        buffer_bytes: Memory allocated for messages, in bytes.
        seconds: Duration of the reallocation.
    """

    version: int
    sent: int
    received: int
    copied: int
    buffer_bytes: int
    seconds: float


def move(
    source: ParameterStore | None,
    target: ParameterStore | None,
    transfers: Sequence[ParameterTransfer],
    *,
    rank: int,
    group: ProcessGroup | None,
    eta: float = 1.0,
    bucket_bytes: int = BUCKET_BYTES,
) -> ReallocationStatistics:
    """Create a `Reallocation` and run it once; see `Reallocation.move`."""
    return Reallocation(transfers, rank=rank, group=group, bucket_bytes=bucket_bytes).move(
        source, target, eta=eta
    )


class Reallocation:
    """Executor of a reallocation plan on one rank.

    `move` can be called repeatedly, and reuses the schedule of messages. `group` includes all ranks
    of the source and target engines, and every rank of the group must have the same plan and bucket
    size. Without a group, only this process takes part. If messages between ranks on the same host
    are passed in shared memory, a shared buffer with the size of two buckets stays allocated for
    the lifetime of this object.
    """

    def __init__(
        self,
        transfers: Sequence[ParameterTransfer],
        *,
        rank: int,
        group: ProcessGroup | None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._transfers = list(transfers)
        self._rank = rank
        self._bucket_bytes = bucket_bytes
        self._link = ReallocationLink(rank, group)
        self._names = list(dict.fromkeys(transfer.name for transfer in transfers))
        # names of the parameters that this rank sends, also to its own target engine
        self.sent_names = list(
            dict.fromkeys(transfer.name for transfer in transfers if transfer.source == rank)
        )
        self._received_names = list(
            dict.fromkeys(transfer.name for transfer in transfers if transfer.target == rank)
        )
        self._local_transfers = [
            transfer for transfer in transfers if transfer.is_local and transfer.source == rank
        ]
        self._fingerprint = zlib.crc32(repr((bucket_bytes, self._transfers)).encode())
        # by the dtypes in which parameters are sent
        self._steps: dict[tuple[torch.dtype, ...], list[ReallocationStep]] = {}

    def move(
        self, source: ParameterSource | None, target: ParameterStore | None, *, eta: float = 1.0
    ) -> ReallocationStatistics:
        """Set target = eta * source + (1 - eta) * target for the parameters in the plan.

        The target gets the source's version. Every rank of the group must call this method.
        `source` and `target` are this rank's engines; either is None if this rank has no such
        engine. Parameters are sent in the source's dtype. If the target's dtype is smaller and
        `eta` is 1, they are rounded to the target's dtype before they are sent, which gives the
        same result.

        Raises `RunError` if a rank is lost, exceeds the group's timeout, or has a different plan or
        a different version of the weights, or if a message is corrupted. The targets must not be
        used after such an error: they may contain both old and new values under their old version.
        """
        start = perf_counter()
        rectangles = {
            name: (where, values) for name, where, values in _read(source, self.sent_names)
        }
        target_dtypes = {
            name: values.dtype for name, _, values in _read(target, self._received_names)
        }
        version, dtypes = self._agree(
            source,
            {name: values.dtype for name, (_, values) in rectangles.items()},
            target_dtypes,
            eta,
        )
        steps = self._plan_steps(dtypes)
        stays = [] if source is target else self._local_transfers
        self._link.share_memory(2 * self._bucket_bytes)
        run = MessageExchange(self._link, SourcePieces(source, rectangles), dtypes, version, steps)
        arrivals = run.iterate_arrivals(stays)
        if target is not None:
            target.write(arrivals, version=version, eta=eta)
        else:
            assert not list(arrivals)
        return ReallocationStatistics(
            version,
            sum(
                part.num_bytes for step in steps for message in step.sends for part in message.parts
            ),
            sum(
                part.num_bytes
                for step in steps
                for message in step.receives
                for part in message.parts
            ),
            sum(part.num_elements * rectangles[part.name][1].itemsize for part in stays),
            run.buffer_bytes,
            perf_counter() - start,
        )

    def _agree(
        self, source: ParameterSource | None, gives: Dtypes, takes: Dtypes, eta: float
    ) -> tuple[int, Dtypes]:
        """Agree with the other ranks on the version of the source and on the dtypes for sending.

        Returns the version, and the dtype in which each parameter is sent. The dtype depends on
        `eta`, the weight of the source in the result, and on `gives` and `takes`, the dtypes of the
        parameters in this rank's source and target. Raises `RunError` if the ranks do not agree on
        the plan, `eta`, the source's version or the dtypes.
        """
        # Same plan, one source version.
        call = zlib.crc32(repr((self._fingerprint, eta)).encode())
        facts_by_rank = self._link.all_gather(
            [call, source is not None, 0 if source is None else source.version]
        )
        for rank, (theirs, *_) in facts_by_rank.items():
            if theirs != call:
                raise RunError(
                    f"reallocation: rank {rank} was given another plan, eta or bucket size than "
                    f"rank {self._rank}; "
                    "all ranks of both layouts must be given the same ones"
                )
        versions = {}
        for rank, (_, has, version) in facts_by_rank.items():
            if has:
                versions[rank] = version
        if len(set(versions.values())) != 1:
            listing = ", ".join(
                f"rank {rank}: {version}" for rank, version in sorted(versions.items())
            )
            raise RunError(
                f"reallocation: the source's ranks must have one version of the weights "
                f"({listing or 'no rank is a source'})"
            )
        # Each parameter is sent in one dtype, whatever the ranks hold.
        codes = self._link.all_gather(
            [_encode_dtype(dtypes.get(name)) for dtypes in (gives, takes) for name in self._names]
        )
        count = len(self._names)
        source_dtypes = _find_dtypes(
            self._names, {rank: theirs[:count] for rank, theirs in codes.items()}, "source"
        )
        target_dtypes = _find_dtypes(
            self._names, {rank: theirs[count:] for rank, theirs in codes.items()}, "target"
        )
        return next(iter(versions.values())), {
            name: _choose_dtype(source_dtypes[name], target_dtypes[name], eta)
            for name in self._names
        }

    def _plan_steps(self, dtypes: Dtypes) -> list[ReallocationStep]:
        """Return the messages of this rank by round.

        Rounds in which this rank neither sends nor receives are left out.
        """
        key = tuple(dtypes.values())
        if key not in self._steps:
            itemsize = {name: dtype.itemsize for name, dtype in dtypes.items()}
            steps = []
            for index, messages in enumerate(
                plan_rounds(self._transfers, itemsize, self._bucket_bytes)
            ):
                sends = []
                for message in messages:
                    if message.source == self._rank:
                        sends.append(message)
                receives = []
                for message in messages:
                    if message.target == self._rank:
                        receives.append(message)
                if sends or receives:
                    steps.append(ReallocationStep(index, sends, receives))
            self._steps[key] = steps
        return self._steps[key]


def _read(holder: ParameterSource | None, names: Sequence[str]) -> Iterator[Values]:
    if holder is not None:
        yield from holder.read(names)
    else:
        assert not names, f"this rank has no engine and the plan says that it has {names[0]}"


def _choose_dtype(source: torch.dtype, target: torch.dtype, eta: float) -> torch.dtype:
    if eta == 1.0 and target.itemsize < source.itemsize:
        return target
    return source


def _find_dtypes(names: Sequence[str], codes: Mapping[int, Sequence[int]], side: str) -> Dtypes:
    """Return the dtype of each parameter, decoded from the codes that the ranks have exchanged.

    `codes` maps each rank to one dtype code per parameter, which is 0 if the rank does not hold the
    parameter. Raises `RunError` if a parameter has different dtypes on different ranks; `side`
    ("source" or "target") is used in the message.
    """
    dtypes = {}
    for index, name in enumerate(names):
        dtype_of_rank = {}
        for rank, code in codes.items():
            if code[index]:
                dtype_of_rank[rank] = DTYPES[code[index] - 1]
        if len(set(dtype_of_rank.values())) != 1:
            listing = ", ".join(
                f"rank {rank}: {dtype}" for rank, dtype in sorted(dtype_of_rank.items())
            )
            raise RunError(
                f"reallocation: the {side}'s ranks must have parameter {name!r} in one dtype "
                f"({listing})"
            )
        dtypes[name] = next(iter(dtype_of_rank.values()))
    return dtypes


def _encode_dtype(dtype: torch.dtype | None) -> int:
    return 0 if dtype is None else 1 + DTYPES.index(dtype)


@dataclass
class ParameterSnapshot:
    """Copy of parameters in host memory, which implements `ParameterSource`.

    Attributes:
        version: Version of the weights that were copied.
        parts: For each parameter name, the slices of the whole parameter that were copied (one
            slice per dimension), and the copied values.
    """

    version: int
    parts: dict[str, tuple[Slice, Tensor]]

    @classmethod
    def from_source(
        cls, source: ParameterSource, names: Iterable[str], others: Iterable[ParameterSnapshot] = ()
    ) -> ParameterSnapshot:
        """Copy the parameters `names` of `source` to host memory.

        The parameters are copied one after another, so that no extra device memory is needed.
        `others` are earlier snapshots of the same weights. Their parameters are not copied again:
        the new snapshot shares their memory, which is freed when the last snapshot that uses it is
        deleted.
        """
        copied: dict[str, tuple[Slice, Tensor]] = {}
        for other in others:
            copied.update(other.parts)
        names = list(names)
        parts = {name: copied[name] for name in names if name in copied}
        for name, where, values in source.read([name for name in names if name not in copied]):
            parts[name] = where, _copy_to_host(values.detach())
        return cls(source.version, parts)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Slice, Tensor]]:
        """Yield (name, slices, values) for each of the given parameter names.

        The slices, one per dimension, say which part of the whole parameter the values are.
        """
        yield from ((name, *self.parts[name]) for name in names)


def _copy_to_host(values: Tensor) -> Tensor:
    """Return a copy of `values` in host memory, which is pinned if `values` are on a GPU."""
    return torch.empty(
        values.shape, dtype=values.dtype, pin_memory=values.device.type == "cuda"
    ).copy_(values)
