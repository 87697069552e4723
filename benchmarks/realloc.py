"""Parameters from one layout to another on gloo ranks of this machine, against plain messages of as
many bytes.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import model, pairs, results
from weft.checkpoints.hf_io import compute_parameter_shapes, find_family
from weft.models.network.config import TransformerConfig
from weft.realloc.execute import Reallocation
from weft.realloc.plan import ParameterTransfer, holdings_of, plan
from weft.topology import Layout, Mesh, Slice

MIB = 2**20
BYTES = 4  # float32
SHAPES = ("12.7M", "40M")  # those with heads for four tensor ranks
GOAL = 70  # percent of the rate of plain messages


@dataclass(frozen=True)
class Case:
    """`target` begins at rank `start`."""

    ranks: int
    source: str
    target: str
    start: int = 0


CASES = (
    Case(2, "d1", "d1", start=1),
    Case(2, "t2", "d2"),
    Case(2, "d2f2", "t2"),
    Case(2, "p2", "t2"),
    Case(4, "t2", "t2", start=2),
    Case(4, "d4f4", "t4"),
    Case(4, "t2p2", "d4"),
    Case(4, "d2f2t2", "t2p2"),
)


class Parameters:
    """What one rank holds; the part of an engine that reallocation speaks to."""

    version = 1

    def __init__(self, parts: Mapping[str, Slice]) -> None:
        self._parts = parts
        self._values = {
            name: torch.ones([p.stop - p.start for p in part]) for name, part in parts.items()
        }

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Slice, Tensor]]:
        for name in names:
            yield name, self._parts[name], self._values[name]

    def write(
        self, parts: Iterable[tuple[str, Slice, Tensor]], *, version: int, eta: float = 1.0
    ) -> None:
        for name, piece, values in parts:
            at = tuple(
                slice(a.start - p.start, a.stop - p.start)
                for a, p in zip(piece, self._parts[name], strict=True)
            )
            self._values[name][at].copy_(values)


def main(words: Sequence[str] | None = None) -> None:
    parser = results.parser("realloc", str(__doc__), repeats=7)
    parser.set_defaults(threads=1)  # a rank of a run has its share of the cores
    parser.add_argument(
        "--shape", choices=SHAPES, default="40M", help="the model (default: %(default)s)"
    )
    parser.add_argument(
        "--bucket",
        type=int,
        default=32,
        metavar="MIB",
        help="a bucket's size (default: %(default)s)",
    )
    arguments = parser.parse_args(words)
    results.start(arguments)
    shape = SHAPES[0] if arguments.quick else arguments.shape
    rows, runs = [], {}
    for ranks in sorted({case.ranks for case in CASES}):
        cases = [case for case in CASES if case.ranks == ranks]
        timed = together(ranks, cases, shape, arguments)
        for case, times in zip(cases, timed, strict=True):
            rows.append(row(case, times))
            runs[str(case)] = times
    settings = {"repeats": arguments.repeats, "shape": shape, "bucket_mib": arguments.bucket}
    notes = [
        "copied: on their own rank, which takes time too",
        "plain: messages of as many bytes, and copies of as many within a rank, one for each "
        "parameter, before the messages",
        "each time is that of the slowest rank; messages: one for each pair of ranks, all at "
        "once, in turn with reallocation",
    ]
    results.report(results.Results("realloc", rows, settings, runs, notes), arguments)


def row(case: Case, times: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    bare, share = (
        100 * median(each[name] / each["move"] for each in times) for name in ("messages", "plain")
    )
    moved, sending, plain = (
        1e3 * median(each[name] for each in times) for name in ("move", "messages", "plain")
    )
    sent, copied = (times[0][name] / MIB for name in ("sent", "copied"))
    what = f"{case.source} -> {case.target}" + (f" from rank {case.start} on" if case.start else "")
    return {
        "what": what,
        "ranks": case.ranks,
        "MiB sent": sent,
        "copied": copied,
        "ms": moved,
        "ms, messages": sending,
        "ms, plain": plain,
        "% of messages": bare,
        "% of plain": share,
        "to reach": f"{GOAL}%",
    }


def together(
    ranks: int, cases: Sequence[Case], shape: str, arguments: Any
) -> list[list[dict[str, float]]]:
    """The times of each case, measured by so many processes."""
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        ours, theirs = pairs.CONTEXT.Pipe()
        settings = {
            "cases": list(cases),
            "shape": shape,
            "repeats": arguments.repeats,
            "bucket": arguments.bucket * MIB,
            "threads": arguments.threads,
        }
        given = [
            (rank, ranks, str(Path(folder) / "store"), settings, theirs) for rank in range(ranks)
        ]
        processes = [
            pairs.CONTEXT.Process(target=measure, args=each, daemon=True) for each in given
        ]
        for process in processes:
            process.start()
        while not ours.poll(1):
            if any(process.exitcode for process in processes):
                raise SystemExit("a rank has failed; its error stands above")
        timed: list[list[dict[str, float]]] = ours.recv()
        for process in processes:
            process.join()
    return timed


def measure(
    rank: int, ranks: int, store: str, settings: Mapping[str, Any], pipe: Connection
) -> None:
    """One process. Rank 0 tells the times."""
    torch.set_num_threads(settings["threads"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    config = config_of(model.SHAPES[settings["shape"]])
    timed = [measure_case(case, config, settings, rank) for case in settings["cases"]]
    if rank == 0:
        pipe.send(timed)
    dist.barrier()
    dist.destroy_process_group()


def measure_case(
    case: Case, config: TransformerConfig, settings: Mapping[str, Any], rank: int
) -> list[dict[str, float]]:
    layouts = Layout.parse(case.source), Layout.parse(case.target)
    meshes = [
        Mesh(layout, tuple(range(start, start + layout.num_devices)))
        for layout, start in zip(layouts, (0, case.start), strict=True)
    ]
    source, target = (
        holdings_of(compute_parameter_shapes(config), config, mesh, tied=config.tied)
        for mesh in meshes
    )
    transfers = plan(source, target, node_of=lambda _: 0)
    ends = [Parameters(held[rank]) if rank in held else None for held in (source, target)]
    flat, staying = buffers(transfers, rank), doubles(transfers, rank)
    reallocation = Reallocation(
        transfers, rank=rank, group=dist.group.WORLD, bucket_bytes=settings["bucket"]
    )
    sent, stays = (
        BYTES * sum(each.num_elements for each in transfers if each.is_local is way)
        for way in (False, True)
    )
    times = []
    for _ in range(settings["repeats"] + 1):
        messages = slowest(lambda: exchange(flat, rank))
        plain = slowest(lambda: (copy(staying), exchange(flat, rank)))
        moved = slowest(lambda: reallocation.move(*ends))
        times.append(
            {
                "messages": messages,
                "plain": plain,
                "move": moved,
                "sent": float(sent),
                "copied": float(stays),
            }
        )
    return times[1:]  # connections are made in the first


def buffers(transfers: Sequence[ParameterTransfer], rank: int) -> dict[tuple[int, int], Tensor]:
    """(source, target) -> all bytes that go between the two, of this rank's pairs."""
    sizes = Counter[tuple[int, int]]()
    for each in transfers:
        if not each.is_local and rank in (each.source, each.target):
            sizes[each.source, each.target] += each.num_elements * BYTES
    return {pair: torch.ones(size, dtype=torch.uint8) for pair, size in sizes.items()}


def doubles(transfers: Sequence[ParameterTransfer], rank: int) -> list[tuple[Tensor, Tensor]]:
    """(from, to) of each piece that stays on this rank."""
    sizes = [each.num_elements for each in transfers if each.is_local and rank == each.source]
    return [(torch.ones(size), torch.ones(size)) for size in sizes]


def copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    for source, target in pairs:
        target.copy_(source)


def exchange(flat: Mapping[tuple[int, int], Tensor], rank: int) -> None:
    works = [
        dist.isend(buffer, target) if rank == source else dist.irecv(buffer, source)
        for (source, target), buffer in flat.items()
    ]
    for work in works:
        assert work is not None
        work.wait()


def slowest(call: Callable[[], object]) -> float:
    """Seconds until the last rank is through; all begin at the same time."""
    dist.barrier()
    began = perf_counter()
    call()
    seconds = torch.tensor(perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def config_of(shape: model.Shape) -> TransformerConfig:
    raw = {
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.positions,
        "tie_word_embeddings": True,
    }
    config: TransformerConfig = find_family(raw).config(raw)
    return config


if __name__ == "__main__":
    main()
