"""What this process started, and its end."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from weft.runtime.processes import descendants, kill

CHILD = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"


def test_children_of_children_are_found_and_ended_and_later_ones_of_the_same_number_are_not():
    before = descendants()
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    below = int(child.stdout.readline())
    found = descendants() - before
    assert {process.pid for process in found} == {child.pid, below}
    kill(replace(process, began=process.began + 1) for process in found)
    assert descendants() - before == found
    kill(process for process in found if process.pid == below)
    assert child.wait(10) == 0, "the child ends when its own has"
    kill(found)  # gone already
