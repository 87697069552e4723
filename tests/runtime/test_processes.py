"""What this process started, and its end."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from weft.runtime.processes import find_descendants, kill_processes

CHILD = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"


def test_children_of_children_are_found_and_ended_and_later_ones_of_the_same_number_are_not():
    before = find_descendants()
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    below = int(child.stdout.readline())
    found = find_descendants() - before
    assert {process.pid for process in found} == {child.pid, below}
    kill_processes(replace(process, start_time=process.start_time + 1) for process in found)
    assert find_descendants() - before == found
    kill_processes(process for process in found if process.pid == below)
    assert child.wait(10) == 0, "the child ends when its own has"
    kill_processes(found)  # gone already
