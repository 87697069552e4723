"""What a section of `benchmarks/gpu.py` finds, written down line by line: one that is cut off leaves what it had."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_backends
from benchmarks.gpu_backends import Sizes, Where


@dataclass
class Run:
    """Sizes, device, and what was found: lines of the table, everything else that is written, and figures that are `wrong`.

    `known` is what `limits` found, where it ran before.
    """

    sizes: Sizes
    where: Where
    record: Path
    profile: Path | None = None
    known: Mapping[str, float] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def add(self, what: str, value: float, unit: str, goal: str = "") -> None:
        self.rows.append({"what": what, "value": float(value), "unit": unit, "goal": goal})
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
        reason = (str(error).splitlines() or [""])[0]
        self.details.setdefault("notes", []).append(f"{what}: {type(error).__name__}: {reason}")
        print(f"  {self.details['notes'][-1]}", flush=True)

    def write(self) -> None:
        found = {"rows": self.rows, "details": self.details, "wrong": self.wrong}
        self.record.write_text(json.dumps(found, indent=2, default=str) + "\n")

    def limit(self, name: str) -> float:
        """`products_per_s` or `bytes_per_s`: from `limits`, else measured now."""
        if name not in self.known:
            measured = {"products_per_s": gpu_backends.products, "bytes_per_s": gpu_backends.bandwidth}[name]
            size = self.sizes.matmul if name == "products_per_s" else self.sizes.copied
            self.known = {**self.known, name: measured(self.where, size, self.sizes.times)}
        return self.known[name]

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
        self.profile.mkdir(parents=True, exist_ok=True)
        (self.profile / f"profile_{name}.txt").write_text(shown)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the difference in units of what is wanted; infinite where that is 0."""
    size = float(wanted.double().norm())
    return float((found.double() - wanted.double()).norm()) / size if size else math.inf
