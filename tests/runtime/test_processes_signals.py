"""The first signal lets the step end, the second one ends at once; both say what follows."""

from __future__ import annotations

import os
import signal

import pytest

from weft.errors import DevicesLost
from weft.runtime.processes import SignalHandlers


@pytest.mark.parametrize(
    ("number", "again", "name"),
    [
        (signal.SIGINT, "Ctrl-C again", "Ctrl-C"),
        (signal.SIGTERM, "once more", "SIGTERM"),
    ],
)
def test_the_second_signal_ends_at_once(number: signal.Signals, again: str, name: str) -> None:
    signals, told = SignalHandlers(), list[str]()
    before = signal.getsignal(number)
    assert signals.build_immediate_interruption(1, "") is None, "nobody has asked for anything"
    with signals.handle_signals(lambda: 7, told.append):
        os.kill(os.getpid(), number)
        assert (
            told == [f"finishing step 7, then stopping; {again} stops now"]
            and signals.number == number
        )
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert len(told) == 1 and signal.getsignal(number) is before
    ended = signals.build_interruption(7, "rerun it")
    assert (
        str(ended) == f"stopped by {name} after step 7; rerun it"
        and ended.exit_code == 128 + number
    )
    lost = signals.build_interruption(7, "rerun it", DevicesLost("device 1 is gone"))
    assert (
        str(lost) == f"stopped by {name} after step 7; in the next one device 1 is gone; rerun it"
    )
    assert (
        str(signals.build_immediate_interruption(8, "rerun it"))
        == "stopped at once in step 8; rerun it"
    )
