"""Carries out a plan: parameters go from the engines of one layout to those of another, in messages of bounded size.

    move(source, target, transfers, rank=rank, group=group)      # every rank of both layouts, at the same time

While the messages of one round travel, those of the next are packed; a rank has two buckets each way and no more. Every message
ends with a seal: the version that the weights had when they were packed, the round, and a checksum of each piece.
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
from weft.realloc.buckets import HEAD, WORD, Message, Part, rounds
from weft.realloc.link import Link, Pending
from weft.realloc.plan import Transfer
from weft.topology import Slice

BUCKET_BYTES = 32 * 2**20
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
Dtypes = Mapping[str, torch.dtype]
Values = tuple[str, Slice, Tensor]


class Holder(Protocol):
    """Of an engine: parameters in and out, a rectangle of each, in coordinates of the whole parameter. `read` gives views, of
    the most exact form there is."""

    version: int

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Slice, Any]]: ...
    def write(self, parts: Iterable[tuple[str, Slice, Any]], *, version: int, eta: float = 1.0) -> None: ...


@dataclass(frozen=True)
class Moved:
    """What this rank did; bytes of parameters. `buffer_bytes`: the memory that it took for messages."""

    version: int
    sent: int
    received: int
    copied: int
    buffer_bytes: int
    seconds: float


def move(
    source: Holder | None, target: Holder | None, transfers: Sequence[Transfer], *, rank: int, group: ProcessGroup | None,
    eta: float = 1.0, bucket_bytes: int = BUCKET_BYTES,
) -> Moved:  # fmt: skip
    """target <- eta * source + (1 - eta) * target for what `transfers` list, and the source's version with it.

    Every rank of `group`, which spans both layouts, calls it with the same plan; `source` and `target` are this rank's engines,
    None where it has none. Without a group nothing leaves the process. A piece travels in the source's dtype, or in the
    target's where that is smaller and `eta` is 1: the target would round it in the same way.

    Raises `RunError` where a rank is lost or late (the group's time-out), was given another plan, has weights of another
    version, or a message is not what was sent. Targets then may be part old, part new, under their old version: they must
    not be used.
    """
    began = perf_counter()
    giving = dict.fromkeys(each.name for each in transfers if each.source == rank)
    taking = dict.fromkeys(each.name for each in transfers if each.target == rank)
    assert source is not None or not giving, f"rank {rank} is to send {next(iter(giving))} and has no source engine"
    assert target is not None or not taking, f"rank {rank} is to receive {next(iter(taking))} and has no target engine"
    held = {name: (where, x) for name, where, x in source.read(giving)} if source is not None else {}
    into = {name: x.dtype for name, _, x in target.read(taking)} if target is not None else {}
    call = _Call(tuple(transfers), eta, bucket_bytes)
    link = Link(rank, group)
    version, dtypes = _agree(call, link, source, {name: x.dtype for name, (_, x) in held.items()}, into)
    run = _Run(link, _Sender(source, held, dtypes), version, call.steps(dtypes, rank))
    stays = [each for each in transfers if each.source == rank and each.stays and source is not target]
    if target is not None:
        target.write(run.arrivals(stays), version=version, eta=eta)
    else:
        assert not list(run.arrivals(stays))
    return Moved(
        version, run.sent, run.received, sum(each.num_elements * held[each.name][1].itemsize for each in stays),
        run.buffer_bytes, perf_counter() - began,
    )  # fmt: skip


# -- what the ranks agree on


@dataclass(frozen=True)
class _Call:
    """What every rank must be given alike."""

    transfers: tuple[Transfer, ...]
    eta: float
    bucket_bytes: int

    @property
    def fingerprint(self) -> int:
        return zlib.crc32(repr((self.eta, self.bucket_bytes, self.transfers)).encode())

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(each.name for each in self.transfers))

    def steps(self, dtypes: Dtypes, rank: int) -> list[_Step]:
        """This rank's part in each round; rounds in which it has none are left out."""
        itemsize = {name: dtype.itemsize for name, dtype in dtypes.items()}
        steps = []
        for index, messages in enumerate(rounds(self.transfers, itemsize, self.bucket_bytes)):
            sends = [message for message in messages if message.source == rank]
            receives = [message for message in messages if message.target == rank]
            if sends or receives:
                steps.append(_Step(index, sends, receives))
        return steps


def _agree(
    call: _Call, link: Link, source: Holder | None, gives: Dtypes, takes: Dtypes
) -> tuple[int, dict[str, torch.dtype]]:
    """(the source's version, the dtype in which each parameter travels), from what the ranks tell each other: their plan,
    whether they are a source and of which version, then the dtypes that they give and take."""
    plan, names = call.fingerprint, call.names
    told = link.tell_everyone([plan, source is not None, 0 if source is None else source.version])
    for rank, (theirs, *_) in told.items():
        if theirs != plan:
            raise RunError(
                f"reallocation: rank {rank} was given another plan, eta or bucket size than rank {link.rank}; "
                "every rank of both layouts calls it with the same"
            )
    versions = {rank: version for rank, (_, has, version) in told.items() if has}
    if len(set(versions.values())) != 1:
        shown = ", ".join(f"rank {rank}: {version}" for rank, version in sorted(versions.items())) or "no rank is one"
        raise RunError(f"reallocation: the source's ranks must hold one version of the weights ({shown})")
    codes = link.tell_everyone([_code(held.get(name)) for held in (gives, takes) for name in names])
    given = _one_dtype(names, {rank: theirs[: len(names)] for rank, theirs in codes.items()}, "source")
    taken = _one_dtype(names, {rank: theirs[len(names) :] for rank, theirs in codes.items()}, "target")
    return next(iter(versions.values())), {n: _travelling(given[n], taken[n], call.eta) for n in names}


def _travelling(source: torch.dtype, target: torch.dtype, eta: float) -> torch.dtype:
    return target if eta == 1.0 and target.itemsize < source.itemsize else source


def _one_dtype(names: Sequence[str], codes: Mapping[int, Sequence[int]], side: str) -> dict[str, torch.dtype]:
    """Each parameter's dtype on the ranks that have it. Raises `RunError` where they differ."""
    found = {}
    for at, name in enumerate(names):
        theirs = {rank: DTYPES[code[at] - 1] for rank, code in codes.items() if code[at]}
        if len(set(theirs.values())) != 1:
            shown = ", ".join(f"rank {rank}: {dtype}" for rank, dtype in sorted(theirs.items()))
            raise RunError(f"reallocation: the {side}'s ranks must hold parameter {name!r} in one dtype ({shown})")
        found[name] = next(iter(theirs.values()))
    return found


def _code(dtype: torch.dtype | None) -> int:
    return 0 if dtype is None else 1 + DTYPES.index(dtype)


# -- one rank's part


@dataclass(frozen=True)
class _Step:
    """A rank's messages of one round."""

    index: int
    sends: Sequence[Message]
    receives: Sequence[Message]


@dataclass(frozen=True)
class _Sender:
    """The source's rectangles on this rank, and how they are written into messages."""

    source: Holder | None
    held: Mapping[str, tuple[Slice, Tensor]]
    dtypes: Dtypes

    def piece(self, name: str, piece: Slice) -> Tensor:
        where, values = self.held[name]
        return values[tuple(slice(p.start - w.start, p.stop - w.start) for p, w in zip(piece, where, strict=True))]

    def pack(self, message: Message, buffer: Tensor, index: int) -> None:
        assert self.source is not None
        for part in message.parts:
            buffer[part.offset + part.num_bytes : part.end].zero_()
            _seen(part, buffer, self.dtypes).copy_(self.piece(part.name, part.piece))
        seal = _seal(message, buffer)
        seal[0], seal[1] = self.source.version, index
        seal[HEAD:] = _checksums(message, buffer)


@dataclass(frozen=True)
class _Flight:
    """A step under way; what arrives lies in `mail` once all of `pending` is there."""

    step: _Step
    mail: Sequence[tuple[Message, Tensor]]
    pending: Sequence[Pending]


class _Run:
    def __init__(self, link: Link, sender: _Sender, version: int, steps: Sequence[_Step]) -> None:
        self._link, self._sender, self._version, self._steps = link, sender, version, steps
        self._out = _buffers([step.sends for step in steps], link.device)
        self._in = _buffers([step.receives for step in steps], link.device)

    @property
    def buffer_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in (*self._out, *self._in))

    @property
    def sent(self) -> int:
        return sum(part.num_bytes for step in self._steps for message in step.sends for part in message.parts)

    @property
    def received(self) -> int:
        return sum(part.num_bytes for step in self._steps for message in step.receives for part in message.parts)

    def arrivals(self, stays: Iterable[Transfer]) -> Iterator[Values]:
        """What this rank is to write: what it has itself, then what comes. Values hold until the next ones are asked for."""
        flight = self._begin(0) if self._steps else None
        for each in stays:
            yield each.name, each.piece, self._sender.piece(each.name, each.piece)
        for at in range(1, len(self._steps) + 1):
            assert flight is not None
            following = self._begin(at) if at < len(self._steps) else None
            yield from self._finish(flight)
            flight = following

    def _begin(self, at: int) -> _Flight:
        """Steps use buffers in turn, since the one before is still under way."""
        step, slot = self._steps[at], at % 2
        receives, sends = _in_places(step.receives, self._in[slot]), _in_places(step.sends, self._out[slot])
        for message, buffer in sends:
            self._sender.pack(message, buffer, step.index)
        pending = self._link.post([(m.source, buffer) for m, buffer in receives], [(m.target, x) for m, x in sends])
        return _Flight(step, receives, pending)

    def _finish(self, flight: _Flight) -> Iterator[Values]:
        for pending in flight.pending:
            pending.wait()
        for message, buffer in flight.mail:
            self._verify(message, buffer, flight.step.index)
            for part in message.parts:
                yield part.name, part.piece, _seen(part, buffer, self._sender.dtypes)

    def _verify(self, message: Message, buffer: Tensor, index: int) -> None:
        """Raises `RunError` where the message is not what was to come."""
        seal = _seal(message, buffer)
        version, told, *sums = seal.tolist()
        way = f"from rank {message.source} to rank {message.target}"
        ours = _checksums(message, buffer).tolist()
        bad = [part.name for part, own, sent in zip(message.parts, ours, sums, strict=True) if own != sent]
        if bad:
            raise RunError(
                f"reallocation: {_listed(bad)} {way}: the checksum is not the sender's; the data were damaged"
            )
        names = _listed([part.name for part in message.parts])
        if told != index:
            raise RunError(f"reallocation: {names} {way}: sent in round {told}, awaited in round {index}")
        if version != self._version:
            raise RunError(
                f"reallocation: {names} {way}: of version {version}, awaited {self._version}; "
                "the source's weights changed while they were read"
            )


def _seen(part: Part, buffer: Tensor, dtypes: Dtypes) -> Tensor:
    """The part of a message as the rectangle that it is."""
    flat = buffer[part.offset : part.offset + part.num_bytes].view(dtypes[part.name])
    return flat.view([each.stop - each.start for each in part.piece])


def _listed(names: Iterable[str]) -> str:
    each = list(dict.fromkeys(names))
    more = f" and {len(each) - 3} more" if len(each) > 3 else ""
    return ", ".join(each[:3]) + more


def _buffers(messages: Sequence[Sequence[Message]], device: torch.device) -> list[Tensor]:
    """Two, each as large as the largest of the steps that use it in turn."""
    sizes = [sum(message.num_bytes for message in each) for each in messages]
    return [torch.empty(max(sizes[slot::2], default=0), dtype=torch.uint8, device=device) for slot in (0, 1)]


def _in_places(messages: Sequence[Message], buffer: Tensor) -> list[tuple[Message, Tensor]]:
    """Each message with its part of the buffer, one after the other."""
    ends = [0]
    for message in messages:
        ends.append(ends[-1] + message.num_bytes)
    return [(message, buffer[ends[at] : ends[at + 1]]) for at, message in enumerate(messages)]


def _seal(message: Message, buffer: Tensor) -> Tensor:
    return buffer[message.seal : message.seal + WORD * (HEAD + len(message.parts))].view(torch.int64)


def _checksums(message: Message, buffer: Tensor) -> Tensor:
    """Of each piece the sum of its words of 8 bytes, modulo 2 ** 64."""
    words = buffer[: message.seal].view(torch.int64)
    return torch.stack([words[part.offset // WORD : part.end // WORD].sum() for part in message.parts])
