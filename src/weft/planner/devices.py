"""Speeds and memory of devices, on which the estimates are based.

They are constants, so that the estimates are the same each time a run starts. The functions
are pure.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from weft.errors import ConfigError, find_nearest
from weft.planner.gpu_kernels import PRODUCT_SHARE, READ_SHARE, GpuKernels, time_message
from weft.planner.profile import DeviceProfile, LinkTimes

GIB = 2.0**30


@dataclass(frozen=True)
class DeviceRates:
    """Speed of one device and of its links to other devices.

    Attributes:
        name: Name of the device, such as "H100" or "cpu".
        flops: Floating-point operations per second that a run reaches in the model's dtype.
        memory_bandwidth: Bandwidth of the device memory, in bytes per second.
        link_bandwidth: Bandwidth between devices of one machine, in bytes per second.
        network_bandwidth: Bandwidth between machines, in bytes per second: of each GPU, which has
            its own port, or of each CPU process.
        latency: Duration of one exchange of messages, in seconds.
        launch: Fixed overhead of running one layer, in seconds. A GPU's host starts kernels
            ahead of time, so only the part that exceeds the time of the kernels counts.
        capacity: Device memory that a run can use, in bytes.
        most_sequences: Maximum number of sequences that are decoded together.
        per_node: Number of devices per machine.
        dispatch: Overhead of a call to another process, in seconds.
        call: Overhead of any call, in seconds: reading its batch, statistics, writing its results.
        cores: Number of CPU cores that the devices of a machine share, or None for GPUs.
        threads: Maximum number of cores that each process uses, if the user set it.
        basis: Where the speeds come from, as a phrase.
        kernels: Times of the kernels of a GPU by kind and size, which take precedence over `flops`
            and `memory_bandwidth`; None for CPUs.
        host_bandwidth: Bandwidth of copies to host memory and back, in bytes per second; infinite if
            the device computes in host memory.
        profile: Measured times, which take precedence over the speeds where they fit.
        threads_used: Number of threads of each process, by which measured times are found; 0 for
            GPUs.
        crowding: Threads of the processes that work at the same time, for each core; at least 1.
            Messages take that much longer.
        slowdown: Time of a computation relative to the measured one, since other processes compute
            on the same cores: `crowding`, times the measured contention of the processes.
        memory: Whole memory of the device in bytes, of which a run gives a share to the KV cache;
            0 if only `capacity` is known.
    """

    name: str
    flops: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    latency: float
    launch: float
    capacity: float
    most_sequences: int  # maximum number of sequences decoded together
    per_node: int = 8
    dispatch: float = 0.0
    call: float = 0.0
    cores: float | None = None
    threads: int | None = None
    basis: str = "estimated speeds"
    kernels: GpuKernels | None = None
    host_bandwidth: float = math.inf
    profile: DeviceProfile | None = None
    threads_used: int = 0
    crowding: float = 1.0
    slowdown: float = 1.0
    memory: float = 0.0

    def share_cores(self, working: float, started: int) -> DeviceRates:
        """Return the rates of one process while several processes compute on the same machine.

        `working` is the mean number of processes that compute at the same time, and `started` is
        the number of all processes on the machine. The rates are unchanged for devices that do not
        share CPU cores.
        """
        if self.cores is None:
            return self
        products, memory, launch = _estimate_core_rates(self.compute_cores_each(working, started))
        threads = self._count_threads(started)
        crowding = max(1.0, threads * working / self.cores)
        slowdown = crowding
        if working > 1 and self.links is not None:
            slowdown *= self.links.contention
        return replace(
            self,
            flops=products,
            memory_bandwidth=memory,
            launch=launch,
            threads_used=threads,
            crowding=crowding,
            slowdown=slowdown,
        )

    def compute_cores_each(self, working: float, started: int) -> float:
        """Return the number of cores that each process uses while several processes compute.

        `working` is the number of processes of the machine that compute at the same time. `started`
        is the number of all its processes, which determines the default number of threads. A
        process uses as many cores as it has threads, or an equal share of the machine's cores if
        there are not enough for all threads. Returns 0 for GPUs.
        """
        if self.cores is None:
            return 0.0
        return min(self._count_threads(started), self.cores / working)

    def _count_threads(self, started: int) -> int:
        """Return the number of threads of each process if a machine has `started` processes."""
        assert self.cores is not None
        return self.threads or max(1, int(self.cores / started))

    @property
    def links(self) -> LinkTimes | None:
        """Measured times of messages, or None if they were not measured."""
        return None if self.profile is None else self.profile.links

    def with_profile(self, profile: DeviceProfile | None) -> DeviceRates:
        """Return the rates with measured times, and with a basis that names them."""
        if profile is None:
            return self
        bandwidth = profile.host_bandwidth or self.host_bandwidth
        return replace(self, profile=profile, basis=profile.basis, host_bandwidth=bandwidth)

    # -- messages

    def time_sum(self, num_bytes: float, ranks: Iterable[int], size: int) -> float:
        """Return the time to sum a tensor over groups of `size` ranks, so that all have the sum.

        `ranks` are the ranks of such a group.
        """
        return self._time_message("sum", num_bytes * 2 * (size - 1) / size, ranks, size, 2)

    def time_gather(self, num_bytes: float, ranks: Iterable[int], size: int) -> float:
        """Return the time to gather a tensor of `num_bytes` from its `size` shards on every rank."""
        return self._time_message("gather", num_bytes * (size - 1) / size, ranks, size, 1)

    def time_scatter(self, num_bytes: float, ranks: Iterable[int], size: int) -> float:
        """Return the time to sum a tensor of `num_bytes` so that each rank has one of the shards."""
        return self._time_message("scatter", num_bytes * (size - 1) / size, ranks, size, 1)

    def time_exchange(self, num_bytes: float, ranks: Iterable[int], size: int) -> float:
        """Return the time in which each of `size` ranks sends the others equal parts of a tensor."""
        return self._time_message("exchange", num_bytes * (size - 1) / size, ranks, size, 1)

    def time_send(self, num_bytes: float, ranks: Iterable[int]) -> float:
        """Return the time to send a tensor from one rank to another."""
        return self._time_message("send", num_bytes, ranks, 2, 1)

    def _time_message(
        self, kind: str, sent: float, ranks: Iterable[int], size: int, rounds: int
    ) -> float:
        """Return the time of a message of which each rank sends `sent` bytes, in seconds.

        `rounds` is the number of exchanges of which it consists.
        """
        counts = Counter(rank // self.per_node for rank in ranks)
        if self.links is not None and len(counts) == 1:
            # Measured with two ranks, of which each sends half of a tensor, or all of it.
            curve = self.links.messages["scatter" if kind == "exchange" else kind]
            return self.crowding * curve(sent * {"send": 1.0, "sum": 1.0}.get(kind, 2.0))
        bandwidth = self._compute_bandwidth(counts, size)
        if self.kernels is None:
            return self.crowding * (sent / bandwidth + rounds * self.latency)
        return time_message(kind, sent, bandwidth, size, len(counts))

    def _compute_bandwidth(self, counts: Mapping[int, int], size: int) -> float:
        """Return the bandwidth of a message's slowest link, in bytes per second.

        `counts` maps machines to the numbers of their ranks. If a group of `size` GPUs has several of
        a machine, its messages between machines are divided over the ports of these.
        """
        if len(counts) == 1:
            return self.link_bandwidth
        ports = 1 if self.kernels is None else max(1, min(min(counts.values()), size // 2))
        return min(self.link_bandwidth, ports * self.network_bandwidth)


# Dense products in bfloat16 (or float16) and float32 in TFLOP/s, memory in TB/s and GiB, links in
# GB/s in each direction, from the vendors' data sheets; for the SXM version if it exists.
GPUS: dict[str, tuple[float, float, float, float, float]] = {
    "B200": (2250, 75, 7.7, 180, 900),
    "H200": (989, 67, 4.8, 141, 450),
    "H100": (989, 67, 3.35, 80, 450),
    "H800": (989, 67, 3.35, 80, 200),
    "A100": (312, 19.5, 2.0, 80, 300),
    "A800": (312, 19.5, 2.0, 80, 200),
    "V100": (125, 15.7, 0.9, 32, 150),
    "L40S": (362, 91.6, 0.864, 48, 32),
    "L40": (181, 90.5, 0.864, 48, 32),
    "A40": (150, 37.4, 0.696, 48, 32),
    "A10": (125, 31.2, 0.6, 24, 32),
    "L4": (121, 30.3, 0.3, 24, 32),
    "T4": (65, 8.1, 0.3, 16, 16),
    "4090": (165, 82.6, 1.0, 24, 32),
    "3090": (71, 35.6, 0.936, 24, 32),
}
# Sizes of GPUs: (nominal GB, smallest GiB of cards sold with that size). The GiB include the part
# that driver and torch take (`RESERVED_GIB`).
GPU_SIZES = ((24, 22.0), (40, 39.4), (48, 44.4), (80, 79.1), (141, 139.8))
# GiB of a GPU that no tensor can use: about 0.5 for the context of CUDA, the rest for libraries and
# the buffers of NCCL. Nothing is added for fragmentation, since weft's runs have expandable segments
# (`weft.observe.memory`), in which freed memory can be used for tensors of any size.
RESERVED_GIB = 1.5
# One 400 Gb/s port for each device, of which large messages reach this share
NETWORK_BANDWIDTH = 50e9
# GB/s of a device's link to its host in each direction (PCIe 5, 3, or else 4, with 16 lanes), of
# which copies from pinned memory reach this share
HOST_LINKS = {"B200": 64, "H200": 64, "H100": 64, "H800": 64, "V100": 16, "T4": 16}
PCIE_4 = 32
HOST_SHARE = 0.8
GPU_LAUNCH = 1e-4  # host time to start the kernels of a layer, 15 of them with 6 or 7 us each

# A core reaches 30 to 60 GFLOP/s in float32 with wide vector instructions. Four cores share half
# of a socket's memory bandwidth. gloo on one machine copies through the kernel's loopback:
# about 1 GB/s and 0.3 ms per exchange.
CORE_PRODUCTS = 40e9
CORE_MEMORY = 8e9
LOOPBACK = 1e9
LOOPBACK_LATENCY = 3e-4
ETHERNET = 1e9
CPU_LAUNCH = 2e-4  # interpreter overhead per layer


# Overhead of the scheduler and Ray for one call to two processes; a call within the same process
# takes half a millisecond (benchmarks/results/runtime.json).
DISPATCH = 4e-3
# Overhead of any call besides its engine's work, measured as the processor time of SFT, DPO and PPO
# steps on one device beyond that of their passes (benchmarks.plan).
CALL = 4e-3


def estimate_cpu_rates(
    cores: float, memory_gb: float, per_node: int, threads: int | None = None
) -> DeviceRates:
    """Return the estimated speed of a process that computes on the CPU.

    `per_node` processes share the `cores` cores of a machine, and each has `memory_gb` GiB of
    memory. `threads` is the number of threads per process, if the user set it (`OMP_NUM_THREADS`).
    """
    products, memory, launch = _estimate_core_rates(max(1.0, cores / per_node))
    return DeviceRates(
        name="cpu",
        flops=products,
        memory_bandwidth=memory,
        launch=launch,
        link_bandwidth=LOOPBACK,
        network_bandwidth=ETHERNET,
        latency=LOOPBACK_LATENCY,
        capacity=memory_gb * GIB,
        most_sequences=128,
        per_node=per_node,
        dispatch=DISPATCH,
        call=CALL,
        cores=cores,
        threads=threads,
        basis="estimated speeds of a CPU",
    )


def _estimate_core_rates(cores: float) -> tuple[float, float, float]:
    """Return `flops`, `memory_bandwidth` and `launch` for a process that uses `cores` cores.

    They have the same meaning as in `DeviceRates`. `cores` is below 1 if there are more processes
    than cores.
    """
    return CORE_PRODUCTS * cores, CORE_MEMORY * cores, CPU_LAUNCH / min(1.0, cores)


def find_gpu_rates(
    name: str, dtype: str, memory_gb: float | None = None, per_node: int = 8
) -> DeviceRates:
    """Return the rates of a GPU, such as "H100" or the name that the GPU's driver reports.

    `dtype` is the dtype of the matrix products. `memory_gb` is the usable memory in GiB, by default
    that of `get_usable_memory`. Raises `ConfigError` for an unknown GPU.
    """
    gpu = next((known for known in GPUS if is_named(known, name)), None)
    if gpu is None:
        close = find_nearest(name, GPUS, 1)
        if close:
            hint = f"did you mean {close[0]}?"
        else:
            hint = f"known are {', '.join(GPUS)}"
        raise ConfigError(
            f"search.gpu={name!r}: the speed of this GPU is not known; give the GPU that is most "
            f"like it ({hint})"
        )
    half, single, memory, _, link = GPUS[gpu]
    usable = get_usable_memory(gpu) if memory_gb is None else memory_gb
    peak = 1e12 * (half if dtype in ("bfloat16", "float16") else single)
    return DeviceRates(
        name=gpu,
        flops=PRODUCT_SHARE * peak,
        memory_bandwidth=1e12 * READ_SHARE * memory,
        link_bandwidth=1e9 * link,
        network_bandwidth=min(NETWORK_BANDWIDTH, 1e9 * link),
        latency=2e-5,
        launch=GPU_LAUNCH,
        capacity=usable * GIB,
        memory=(usable + RESERVED_GIB) * GIB,
        most_sequences=512,
        per_node=per_node,
        dispatch=DISPATCH,
        call=CALL,
        basis=f"the data sheet of {gpu}",
        kernels=GpuKernels(peak, 1e12 * memory),
        host_bandwidth=1e9 * HOST_SHARE * HOST_LINKS.get(gpu, PCIE_4),
    )


def is_named(gpu: str, name: str) -> bool:
    """Return whether a name such as "NVIDIA H100 80GB HBM3" has `gpu`, such as "H100", as a word.

    Letters and digits belong to a word: `XH100Y` and `H1000` are other GPUs, and `RTX4090` alone is
    read as two words.
    """
    word = rf"(?<![A-Za-z0-9])(?:RTX)?{re.escape(gpu)}(?![A-Za-z0-9])"
    return re.search(word, name, re.IGNORECASE) is not None


def subtract_reserved(gib: float) -> float:
    """Return the memory that a run can use of a GPU with `gib` GiB, in GiB.

    All forecasts and searches leave the same part of a GPU free.
    """
    return gib - RESERVED_GIB


def get_usable_memory(gpu: str) -> float:
    """Return the memory that a run can use of a known GPU, in GiB; `gpu` is its name."""
    sold = GPUS[gpu][3]
    return subtract_reserved(next((gib for gb, gib in GPU_SIZES if gb == sold), 0.97 * sold))
