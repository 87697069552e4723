"""Devices for which a plan is made: those of this machine, or GPUs that the options name."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from weft.engine.device import describe_hardware, format_hardware, read_memory_bytes, resolve_device
from weft.experiment import Experiment
from weft.launch.cluster import check_processes, get_device_kind
from weft.launch.memory import format_size
from weft.planner import memory_options
from weft.planner.devices import GPUS, find_gpu_rates

GIB = 2.0**30
GPU_OPTION_HINT = "name one with search.gpu=H100"


@dataclass(frozen=True)
class TargetDevices:
    """Devices for which a plan is made: `count` devices with `usable` bytes of memory each.

    `usable` is None for GPUs of unknown type.
    """

    device: torch.device
    name: str
    count: int
    usable: float | None
    description: str

    @classmethod
    def from_experiment(cls, experiment: Experiment, mode: str) -> TargetDevices:
        """Return the devices that the options name, or else those of this machine.

        The option `search.gpu` is the name of a GPU, which does not have to be on this machine. The
        option is ignored with `device=cpu`. If the run needs a GPU, but `search.gpu` is not set and
        this machine has no GPU, the GPU's type is unknown. Raises `ConfigError` for an unknown
        name.
        """
        device_option = experiment.control.device
        count = experiment.num_devices
        search = experiment.config.get("search") or {}
        named = search.get("gpu")
        memory_gb = search.get("memory_gb")
        on_gpu = named is not None if device_option is None else device_option.startswith("cuda")
        # A GPU named by an option; it need not be on this machine.
        if named is not None and on_gpu:
            name = find_gpu_rates(named, "bfloat16").name
            usable = memory_gb if memory_gb is not None else get_usable_memory(name)
            return cls(
                torch.device("cuda"),
                name,
                count,
                usable * GIB,
                f"{name}, {usable:.1f} GiB of it (search.gpu)",
            )
        # A GPU of unknown type.
        if on_gpu and not torch.cuda.is_available():
            return cls(torch.device("cuda"), "GPU", count, None, "")
        # A device of this machine; devices on CPUs share its memory.
        alone = mode == "local" and count == 1
        device = resolve_device(device_option if alone else get_device_kind(experiment))
        if mode == "local" and device.type == "cpu":
            check_processes(count)
        share = read_memory_bytes(device) / (1 if alone or device.type != "cpu" else count)
        taken = memory_options.RESERVED_GIB * GIB if device.type == "cuda" else 0.0
        usable = memory_gb * GIB if memory_gb is not None else share - taken
        line = format_hardware(
            describe_hardware(device),
            torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        )
        return cls(device, line, count, usable, line)

    def list_candidates(self) -> list[TargetDevices]:
        """Return the targets to try in a plan, from the smallest to the largest.

        If the type of the GPU is unknown, there is one target for each common GPU size. Otherwise
        this target is the only one.
        """
        if self.usable is not None:
            return [self]
        template = (
            "GPU of {gb} GB, the smallest that suffices: this machine has no GPU and none is named "
            "({option})"
        )
        candidates: list[TargetDevices] = []
        for gb, gib in memory_options.GPUS:
            candidates.append(
                replace(
                    self,
                    name=f"GPU of {gb} GB",
                    usable=(gib - memory_options.RESERVED_GIB) * GIB,
                    description=template.format(gb=gb, option=GPU_OPTION_HINT),
                )
            )
        return candidates

    def format_verdict(self, needed: float, scope: str = "") -> str:
        """Return a line that says whether the needed memory fits in a device's memory.

        `needed` is in bytes per device. `scope` is a phrase that follows the needed memory in the
        line.
        """
        assert self.usable is not None
        many = f"each of {self.count} devices" if self.count > 1 else "the device"
        holds = "fits" if needed <= self.usable else "does NOT fit"
        name = self.name.replace(f", {format_size(self.usable)}", "")  # already shown
        return f"{holds}: {many} needs about {format_size(needed)}{scope} of {format_size(self.usable)}: {name}"


def get_usable_memory(gpu: str) -> float:
    """Return the memory of a GPU that a run can use, in GiB.

    This is the GPU's memory without the part that the driver and torch use. `gpu` is the name of a
    known GPU.
    """
    sold = GPUS[gpu][3]
    return (
        next((gib for gb, gib in memory_options.GPUS if gb == sold), 0.97 * sold)
        - memory_options.RESERVED_GIB
    )
