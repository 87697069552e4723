"""Clusters whose machines have different kinds of GPU.

A call that uses several kinds runs at the speed of the slowest, and has to fit the smallest memory.
The functions are pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.errors import ConfigError, find_nearest
from weft.planner.devices import GPUS, DeviceRates, find_gpu_rates, get_usable_memory

# What devices of several kinds have in common: the slowest links and the smallest memory
SMALLEST = (
    "link_bandwidth",
    "network_bandwidth",
    "host_bandwidth",
    "capacity",
    "memory",
    "most_sequences",
)
LARGEST = ("latency", "dispatch", "call")
RULE = "write GPU:NUMBER for each kind, in the order of the devices, such as H100:8,A100:8"


@dataclass(frozen=True)
class ClusterGroup:
    """Devices of one kind with consecutive ranks: their rates, their first rank and their number."""

    rates: DeviceRates
    first: int
    count: int


@dataclass(frozen=True)
class DeviceCluster:
    """Devices of a run, which may be of several kinds; each machine has one kind."""

    groups: tuple[ClusterGroup, ...]

    @classmethod
    def build_from_one_kind(cls, rates: DeviceRates, num_devices: int) -> DeviceCluster:
        """Return the cluster of `num_devices` equal devices."""
        return cls((ClusterGroup(rates, 0, num_devices),))

    def find_kinds(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the indices of the groups to which devices belong.

        Devices beyond the last group count as part of it.
        """
        if len(self.groups) == 1:
            return (0,)
        kinds = set()
        last = len(self.groups) - 1
        for number, group in enumerate(self.groups):
            stop = group.first + group.count
            for rank in ranks:
                if group.first <= rank < stop or (number == last and rank >= stop):
                    kinds.add(number)
                    break
        return tuple(sorted(kinds))

    def list_rates(self, kinds: Iterable[int]) -> tuple[DeviceRates, ...]:
        """Return the rates of each of several groups whose devices work together.

        Only the speed of computation differs: all have the slowest links, the smallest memory, and
        a name that lists all kinds.
        """
        chosen = [self.groups[kind].rates for kind in kinds]
        if all(each == chosen[0] for each in chosen):
            return (chosen[0],)
        common: dict[str, Any] = {}
        for choose, names in ((min, SMALLEST), (max, LARGEST)):
            for name in names:
                common[name] = choose(getattr(each, name) for each in chosen)
        for name in ("name", "basis"):
            common[name] = " and ".join(dict.fromkeys(getattr(each, name) for each in chosen))
        return tuple(replace(each, **common) for each in chosen)

    @property
    def name(self) -> str:
        """Kinds and numbers of the devices, as `search.gpu` takes them."""
        if len(self.groups) == 1:
            return self.groups[0].rates.name
        return ",".join(f"{group.rates.name}:{group.count}" for group in self.groups)

    @property
    def rates(self) -> DeviceRates:
        """Rates of the slowest group, with the links and the memory that all have in common."""
        slowest = min(self.list_rates(range(len(self.groups))), key=lambda rates: rates.flops)
        return replace(slowest, name=self.name)


def is_mixed(gpu: str | None) -> bool:
    """Return whether a value of `search.gpu` names several groups of devices."""
    return gpu is not None and re.search(r"[:,]", gpu) is not None


def parse_gpus(gpu: str, num_devices: int, per_node: int) -> list[tuple[str, int]]:
    """Return the (name, number of devices) of each group in a value of `search.gpu`.

    A value without numbers, such as `H100`, is one group of all devices. Raises `ConfigError` if a
    number is missing, if the numbers do not add up to `num_devices`, or if a group is not made of
    whole machines of `per_node` devices.
    """
    if not is_mixed(gpu):
        return [(gpu, num_devices)]
    groups = []
    for word in gpu.split(","):
        match = re.fullmatch(r"\s*([^:,]*[^:,\s])\s*:\s*([1-9]\d{0,6})\s*", word)
        if match is None:
            raise ConfigError(f"search.gpu={gpu!r}: {word.strip()!r} cannot be read; {RULE}")
        groups.append((match[1], int(match[2])))
    total = sum(count for _, count in groups)
    if total != num_devices:
        raise ConfigError(
            f"search.gpu={gpu!r} names {total:,} devices, and the run has {num_devices:,} "
            f"(n_nodes x n_gpus_per_node); name as many"
        )
    for name, count in groups:
        if count % per_node:
            raise ConfigError(
                f"search.gpu={gpu!r}: {count:,} x {name} are not whole machines of {per_node:,} "
                f"devices (n_gpus_per_node); a machine has one kind of GPU"
            )
    return groups


def build_cluster(groups: Sequence[tuple[DeviceRates, int]]) -> DeviceCluster:
    """Return the cluster of consecutive groups of devices, each with its rates and its number."""
    built = []
    first = 0
    for rates, count in groups:
        built.append(ClusterGroup(rates, first, count))
        first += count
    return DeviceCluster(tuple(built))


def find_cluster(
    gpu: str, dtype: str, memory_gb: float | None, num_devices: int, per_node: int
) -> DeviceCluster:
    """Return the cluster that a value of `search.gpu` names, such as `H100:8,A100:8`.

    `dtype` and `memory_gb` are those of `find_gpu_rates`. Raises `ConfigError` for an unknown GPU,
    and for numbers as `parse_gpus` does.
    """
    groups = []
    for name, count in parse_gpus(gpu, num_devices, per_node):
        if is_mixed(gpu) and name.lower() not in {known.lower() for known in GPUS}:
            close = find_nearest(name, GPUS, 1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(GPUS)}"
            raise ConfigError(
                f"search.gpu={gpu!r}: the speed of {name} is not known; give the GPU that is most "
                f"like it ({hint})"
            )
        groups.append((find_gpu_rates(name, dtype, memory_gb, per_node), count))
    return build_cluster(groups)


def find_least_memory(cluster: DeviceCluster) -> float:
    """Return the memory that a run can use on every GPU of a cluster, in GiB."""
    return min(get_usable_memory(group.rates.name) for group in cluster.groups)
