"""What a section of `benchmarks/gpu.py` finds, written down line by line: one that is cut off
leaves what it had.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType

from benchmarks import gpu_backends
from benchmarks.gpu_backends import Sizes, Where
from benchmarks.gpu_plan import BARS
from weft.engine.device import find_peak_rates


@dataclass
class Run:
    """Sizes, device, and what was found: lines of the table, everything else that is written, and
    figures that are `wrong`.

    `known` is what `limits` found, where it ran before.
    """

    sizes: Sizes
    where: Where
    record: Path
    profile: Path | None = None
    known: Mapping[str, Any] = field(default_factory=dict)
    quick: bool = False  # leave out what takes long to compile
    rows: list[dict[str, Any]] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def add(self, what: str, value: float, unit: str, goal: str = "", by: str = "") -> None:
        """A line of the table, whose goal is its bar where it has one; `by` names the kernel that
        computes attention.
        """
        goal = goal or BARS.get(what, "")
        self.rows.append(
            {"what": what, "value": float(value), "unit": unit, "goal": goal, "by": by}
        )
        print(f"  {what}: {float(value):.4g} {unit}", flush=True)
        self.write()

    def check(self, what: str, value: float, most: float, unit: str) -> None:
        """A figure above `most`, or one that is no number, is wrong, and with it all that follows."""
        self.add(what, value, unit, f"<= {most:g}")
        if not float(value) <= most:
            self.wrong.append(f"{what}: {float(value):.4g}, at most {most:g}")
            self.write()

    def note(self, what: str, error: Exception) -> None:
        """Another system's part that failed: a line in the file, and the section goes on."""
        self.details.setdefault("notes", []).append(f"{what}: {describe(error)}")
        print(f"  {self.details['notes'][-1]}", flush=True)

    def leave_out(self, part: str) -> None:
        """A part of the section that does not run, with the reason: the page lists it."""
        self.details.setdefault("left_out", []).append(part)
        print(f"  left out: {part}", flush=True)
        self.write()

    def write(self) -> None:
        found = {"rows": self.rows, "details": self.details, "wrong": self.wrong}
        fresh = self.record.with_suffix(".part")
        fresh.write_text(json.dumps(found, indent=2, default=str) + "\n")
        fresh.replace(self.record)  # a process that is ended here leaves what it had

    def limit(self, name: str) -> float:
        """`products_per_s` or `bytes_per_s`: from `limits`, else measured now."""
        if name not in self.known:
            measured = {
                "products_per_s": gpu_backends.products,
                "bytes_per_s": gpu_backends.bandwidth,
            }[name]
            size = self.sizes.matmul if name == "products_per_s" else self.sizes.copied
            self.known = {**self.known, name: measured(self.where, size, self.sizes.times)}
        return float(self.known[name])

    def promised(self, name: str) -> float | None:
        """The same by the GPU's data sheet; None of a device that has none."""
        if self.where.device.type != "cuda":
            return None
        peak = find_peak_rates(torch.cuda.get_device_name(self.where.device))
        if peak is None:
            return None
        return {"products_per_s": 1e12 * peak.tflops, "bytes_per_s": 1e9 * peak.gb_per_s}[name]

    def peak(self, what: str) -> None:
        """Most memory since the section began."""
        if self.where.device.type == "cuda":
            self.add(f"{what}: peak memory", torch.cuda.max_memory_allocated() / 2**30, "GiB")

    def compilations(self, what: str) -> None:
        """How many graphs torch has compiled in this process."""
        from torch._dynamo.utils import counters

        self.add(f"{what}: compilations", counters["stats"]["unique_graphs"], "graphs")

    def profiled(self, name: str, step: Callable[[], object]) -> None:
        """A table of one step's kernels, where it was asked for."""
        if self.profile is None:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        order = "self_cpu_time_total"
        if self.where.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            order = "self_device_time_total"
        with torch.profiler.profile(activities=activities) as profile:
            step()
            self.where.wait()
        shown = profile.key_averages().table(sort_by=order, row_limit=30, max_name_column_width=90)
        self.details.setdefault("profiles", {})[name] = _kernels(profile, self.where.device.type)
        self.write()
        self.profile.mkdir(parents=True, exist_ok=True)
        (self.profile / f"profile_{name}.txt").write_text(shown)


def _kernels(profile: Any, device: str) -> list[dict[str, Any]]:
    """What took the most time on the device, the longest first."""
    time_of = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    events = list(profile.key_averages())
    kernels = [
        each for each in events if each.device_type == DeviceType.CUDA
    ]  # an operation counts its kernels' time too
    timed = kernels if device == "cuda" and kernels else events
    found = [(getattr(each, time_of) / 1e3, each.count, each.key) for each in timed]
    named = [
        {"ms": ms, "calls": calls, "kernel": key}
        for ms, calls, key in sorted(found, reverse=True)
        if ms > 0
    ]
    return named[:40]


def describe(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the difference in units of what is wanted; infinite where that is 0."""
    size = float(wanted.double().norm())
    return float((found.double() - wanted.double()).norm()) / size if size else math.inf
