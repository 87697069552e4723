"""Measured times between two devices of this machine: what `weft plan profile` stores of links.

Two new processes exchange messages, by gloo on CPUs and by NCCL on GPUs, and compute at the same
time to see how much they slow each other down.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft.algorithms.sft import SFTLoss
from weft.engine.device import set_threads, wait_for_device
from weft.engine.measure import (
    MeasuredNetwork,
    build_batch,
    get_vocab_size,
    measure_decoding_of,
    measure_pass,
)
from weft.engine.spec import ModelSpec
from weft.engine.torch.engine import TorchEngine
from weft.engine.torch.network_source import check_layout
from weft.errors import ConfigError, RunError
from weft.observe.memory import prepare_heaps
from weft.parallel.collectives import sum_over_ranks
from weft.parallel.mesh import ProcessGroups, RankMesh, choose_backend
from weft.topology import Layout, Mesh

SIZES = (2**10, 2**14, 2**18, 2**20, 2**22, 2**24)  # bytes of messages
REPEATS = 9  # measurements of a message, of which the least counts
JOINED_SEQUENCES, JOINED_LENGTH = 8, 64  # on each of two ranks that hold a network together
JOINED_REPEATS = 7
WIDTH = 4  # bytes of a float32
DEADLINE = 300.0  # seconds that the two processes may take together
CONTENTION_TOKENS = 256  # tokens of the passes that both processes compute
CONTENTION_ROUNDS = 3  # of passes alone and together, of which the least count
LOOPBACK = "lo"
# What FSDP2 calls, under the names of torch 2.13 or of earlier versions
GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
SCATTER: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def measure_links(
    network: MeasuredNetwork, threads: int, tell: Callable[[str], None]
) -> dict[str, Any] | None:
    """Return times of messages between two devices, or None if there is only one GPU.

    With a CPU, the devices are two processes of `threads` threads each.

    `sum`, `gather`, `scatter` and `send` are pairs of lists: bytes and seconds. `contention` is the
    time of a pass while the other process computes too, relative to that alone. `startup_seconds`
    is the time until a new process has built a network. `joined` is that of `measure_joined`.
    Raises `RunError` if a process fails.
    """
    if network.device.type == "cuda" and torch.cuda.device_count() < 2:
        return None
    tell("messages between two processes")
    context = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    with tempfile.TemporaryDirectory(prefix="weft-profile-") as folder:
        store = Path(folder) / "store"
        try:
            for rank in range(2):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_run_rank, args=(rank, network, threads, str(store), theirs), daemon=True
                )
                with prepare_heaps():
                    process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            started = time.perf_counter()
            results = [_receive(pipe) for pipe in pipes]
            startup = time.perf_counter() - started
            results = [_receive(pipe) for pipe in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join()
    result: dict[str, Any] = {**results[0], "startup_seconds": startup}
    result["contention"] = statistics.mean(each["contention"] for each in results)
    for name, values in result["joined"].items():
        values["seconds"] = max(each["joined"][name]["seconds"] for each in results)
    return result


def _receive(pipe: Connection) -> Any:
    """Return the next result of a process. Raises `RunError` if it has failed or does not answer."""
    try:
        if not pipe.poll(DEADLINE):
            raise RunError(f"a process that measures messages gave no answer in {DEADLINE:.0f} s")
        good, result = pipe.recv()
    except EOFError:
        raise RunError("a process that measures messages ended early") from None
    if not good:
        raise RunError(f"a process that measures messages failed:\n{result}")
    return result


def _run_rank(
    rank: int, network: MeasuredNetwork, threads: int, store: str, pipe: Connection
) -> None:
    """Run one of the two processes, and send its readiness and its results through `pipe`."""
    try:
        device = network.device
        if device.type == "cuda":
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
        else:
            set_threads(threads)
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        engine = network.build_engine(trained=True)
        pipe.send((True, None))
        dist.init_process_group(
            choose_backend(device),
            init_method=f"file://{store}",
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=DEADLINE),
        )
        result = measure_with_other(engine, device)
        result["joined"] = measure_joined(replace(network, device=device, tensor=1), rank)
        pipe.send((True, result))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def measure_with_other(engine: TorchEngine, device: torch.device) -> dict[str, Any]:
    """Return the times of messages, and `contention`; both processes call this function."""
    result: dict[str, Any] = {}
    for name, exchange in EXCHANGES.items():
        seconds = [_measure_exchange(exchange, size // WIDTH, device) for size in SIZES]
        result[name] = [list(SIZES), seconds]
    result["contention"] = _measure_contention(engine, device)
    return result


def _measure_contention(engine: TorchEngine, device: torch.device) -> float:
    """Return the time of a pass while the other process computes too, divided by its time alone.

    The least of several rounds counts, so that a short disturbance has no effect: forecasts for
    several processes are multiplied by the result.
    """
    batch = build_batch([CONTENTION_TOKENS], get_vocab_size(engine))
    alone, together = [], []
    for _ in range(CONTENTION_ROUNDS):
        for turn in range(2):
            if turn == dist.get_rank():
                alone.append(sum(measure_pass(engine, batch, trains=True).values()))
            _wait_for_other(device)
        together.append(sum(measure_pass(engine, batch, trains=True).values()))
        _wait_for_other(device)
    return max(1.0, min(together) / min(alone))


def measure_joined(network: MeasuredNetwork, rank: int) -> dict[str, Any]:
    """Return times of calls of a network that two processes hold together.

    These are a training step with sharded weights (`shards`) and, if the network can be split, one
    of two tensor-parallel ranks (`tensor`) and a decode step of these (`decode`). They contain the
    time in which a rank waits for the other one.
    """
    groups = ProcessGroups(DEADLINE)
    layouts = {"shards": Layout(data=2, fsdp=2), "tensor": Layout(tensor=2)}
    result: dict[str, Any] = {}
    for name, layout in layouts.items():
        try:
            check_layout(ModelSpec(), layout, network.config)
        except ConfigError:
            continue  # an odd number of heads
        mesh = RankMesh(Mesh(layout, (0, 1)), rank, groups)
        engine = network.build_engine(trained=True, mesh=mesh)
        batch = build_batch([JOINED_LENGTH] * JOINED_SEQUENCES, network.config.vocab_size)
        seconds = []
        for _ in range(1 + JOINED_REPEATS):
            _wait_for_other(network.device)
            started = time.perf_counter()
            engine.train([batch], SFTLoss(), max_tokens=1 << 30)
            wait_for_device(network.device)
            seconds.append(time.perf_counter() - started)
        result[name] = {
            "sequences": JOINED_SEQUENCES,
            "length": JOINED_LENGTH,
            "layers": len(engine._built.blocks),
            "seconds": statistics.median(seconds[1:]),
        }
        if name == "tensor":
            clock = time.perf_counter
            decoding = measure_decoding_of(engine, JOINED_SEQUENCES, JOINED_LENGTH, clock)
            result["decode"] = {
                **result[name],
                "length": decoding.context,
                "seconds": decoding.step,
            }
    return result


def _wait_for_other(device: torch.device) -> None:
    """Wait until both processes have come here."""
    dist.all_reduce(torch.zeros(1, device=device))
    wait_for_device(device)


def _sum(x: torch.Tensor) -> None:
    group = dist.group.WORLD
    assert group is not None
    sum_over_ranks(x, group)


def _gather(x: torch.Tensor) -> None:
    GATHER(x, x.chunk(2)[dist.get_rank()].clone())


def _scatter(x: torch.Tensor) -> None:
    SCATTER(torch.empty_like(x.chunk(2)[0]), x)


def _send(x: torch.Tensor) -> None:
    """Send the tensor there and back; `_measure_exchange` takes half of the time."""
    if dist.get_rank() == 0:
        dist.send(x, 1)
        dist.recv(x, 1)
    else:
        dist.recv(x, 0)
        dist.send(x, 0)


EXCHANGES = {"sum": _sum, "gather": _gather, "scatter": _scatter, "send": _send}


def _measure_exchange(
    exchange: Callable[[torch.Tensor], None], elements: int, device: torch.device
) -> float:
    """Return the least time of a message of `elements` float32 elements, in seconds."""
    x = torch.zeros(elements, device=device)
    seconds = []
    for number in range(1 + REPEATS):
        _wait_for_other(device)
        started = time.perf_counter()
        exchange(x)
        wait_for_device(device)
        if number:
            seconds.append(time.perf_counter() - started)
    # What others do on the machine lengthens many of them.
    return min(seconds) / (2 if exchange is _send else 1)
