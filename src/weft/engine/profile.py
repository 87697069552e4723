"""Traces of one thread's operators and GPU kernels, recorded with torch's profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from weft.writing import rename, resolve_destination


def label_work(name: str) -> AbstractContextManager[object]:
    """Return a context manager that labels the work in its block as `name` in profiler traces."""
    label: AbstractContextManager[object] = torch.profiler.record_function(name)
    return label


class DeviceTrace:
    """Recorder of one thread's operators and GPU kernels.

    Recording starts when the object is created. `end` must be called in the same thread.
    """

    def __init__(self, device: torch.device) -> None:
        activities = [
            ProfilerActivity.CPU,
            *([ProfilerActivity.CUDA] if device.type == "cuda" else []),
        ]
        self._profiler: Any = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def end(self, path: Path) -> None:
        """Stop the trace and write it to `path`, which ends in .json.gz.

        The file has Chrome's trace event format, which ui.perfetto.dev can display.
        """
        self._profiler.stop()
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name("." + path.name)
        self._profiler.export_chrome_trace(str(temporary))
        rename(temporary, resolve_destination(path))
