"""Clusters whose machines have different kinds of GPU.

A call that uses several kinds runs at the speed of the slowest, and has to fit the smallest memory.
The functions are pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from weft.errors import ConfigError
from weft.planner.devices import DeviceRates

# Speeds and sizes of `DeviceRates`: of several kinds of device the smallest counts, or the largest
SMALLEST = (
    "flops",
    "memory_bandwidth",
    "link_bandwidth",
    "network_bandwidth",
    "capacity",
    "most_sequences",
    "attention_share",
)
LARGEST = ("latency", "launch", "dispatch", "call", "elementwise")
RULE = "write GPU:NUMBER for each kind, in the order of the devices, such as H100:8,A100:8"


@dataclass(frozen=True)
class DeviceGroup:
    """Devices of one kind with consecutive ranks: their rates, their first rank and their number."""

    rates: DeviceRates
    first: int
    count: int


@dataclass(frozen=True)
class Cluster:
    """Devices of a run, which may be of several kinds; each machine has one kind."""

    groups: tuple[DeviceGroup, ...]

    @classmethod
    def of_one_kind(cls, rates: DeviceRates, num_devices: int) -> Cluster:
        """Return the cluster of `num_devices` equal devices."""
        return cls((DeviceGroup(rates, 0, num_devices),))

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

    def combine_rates(self, kinds: Iterable[int]) -> DeviceRates:
        """Return the rates at which devices of several groups work together."""
        return combine_rates([self.groups[kind].rates for kind in kinds])

    @property
    def rates(self) -> DeviceRates:
        """Rates of all devices together, with the names of all kinds."""
        return self.combine_rates(range(len(self.groups)))


def combine_rates(rates: Sequence[DeviceRates]) -> DeviceRates:
    """Return the rates at which devices of different kinds work together.

    Speeds, links and memory are those of the slowest and smallest. A profile is used only if it is
    that of all of them.
    """
    first = rates[0]
    if all(each == first for each in rates):
        return first
    combined = {}
    for choose, names in ((min, SMALLEST), (max, LARGEST)):
        for name in names:
            combined[name] = choose(getattr(each, name) for each in rates)
    names = list(dict.fromkeys(each.name for each in rates))
    bases = list(dict.fromkeys(each.basis for each in rates))
    return replace(
        first, **combined, name=" and ".join(names), basis=" and ".join(bases), profile=None
    )


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


def build_cluster(groups: Sequence[tuple[DeviceRates, int]]) -> Cluster:
    """Return the cluster of consecutive groups of devices, each with its rates and its number."""
    built = []
    first = 0
    for rates, count in groups:
        built.append(DeviceGroup(rates, first, count))
        first += count
    return Cluster(tuple(built))
