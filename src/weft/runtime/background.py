"""Work in background threads: a function, or the loading of the next batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from weft.data.batches import BatchLoader
from weft.data.sample import SequenceSample

T = TypeVar("T")


def start_in_thread(function: Callable[[], T], what: str) -> Future[T]:
    """Run `function` in a daemon thread named `what` and return a future of its result."""
    future: Future[T] = Future()

    def run_task() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # raised by future.result()
            future.set_exception(error)

    threading.Thread(target=run_task, name=what, daemon=True).start()
    return future


class PrefetchingLoader:
    """Wrapper of a data loader that loads one batch ahead in the background.

    It loads batches for at most `epochs` epochs, which may be infinite. Errors of the wrapped
    loader are raised by `next_batch`. Nothing else may use the wrapped loader. The saved state is
    the position after the last batch that `next_batch` returned.
    """

    def __init__(self, loader: BatchLoader, epochs: float) -> None:
        self._loader = loader
        self._epochs = epochs
        self._next_batch: Future[SequenceSample] | None = None
        self._read_position()

    def _read_position(self) -> None:
        """Store the wrapped loader's position.

        This must not be called while a batch is being loaded in the background.
        """
        self.epoch_done = self._loader.epoch_done
        self.num_ids = self._loader.num_ids
        self._state: Mapping[str, Any] = self._loader.state_dict()

    def next_batch(self) -> SequenceSample:
        """Return the next batch and start loading the one after it."""
        if self._next_batch is None:
            batch = self._loader.next_batch()
        else:
            batch = self._next_batch.result()
        self._next_batch = None
        self._read_position()
        if self._loader.epoch < self._epochs:
            self._next_batch = start_in_thread(self._loader.next_batch, "weft-loader")
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position after the last batch that `next_batch` returned."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved position, and discard a batch that was loaded ahead."""
        if self._next_batch is not None:
            self._next_batch.exception()  # wait: it must not advance the loader after the restore
            self._next_batch = None
        self._loader.load_state_dict(dict(state))
        self._read_position()
