"""The loader's next batch, made while the one before it is at work.

Its state is the position of what was given out.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from weft.data.batches import Loader
from weft.data.sample import SequenceSample
from weft.runtime import background


class Prefetched:
    """`loader`, one batch ahead, up to the end of the last of `epochs` (infinite: there is none).

    An error of the loader is raised by the call that asks for the batch. While a batch is being
    made nobody else may use the loader.
    """

    def __init__(self, loader: Loader, epochs: float) -> None:
        self._loader = loader
        self._epochs = epochs
        self._ahead: Future[SequenceSample] | None = None
        self._look()

    def _look(self) -> None:
        """Where the loader stands, with all that was made given out."""
        self.epoch_done = self._loader.epoch_done
        self.num_ids = self._loader.num_ids
        self._state: Mapping[str, Any] = self._loader.state_dict()

    def next_batch(self) -> SequenceSample:
        """The next batch; the one after it is begun."""
        if self._ahead is None:
            batch = self._loader.next_batch()
        else:
            batch = self._ahead.result()
        self._ahead = None
        self._look()
        if self._loader.epoch < self._epochs:
            self._ahead = background.begin(self._loader.next_batch, "weft-loader")
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position after the batch that was given out last."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position; a batch on its way is let go."""
        if self._ahead is not None:
            self._ahead.exception()  # it must not move the loader any more
            self._ahead = None
        self._loader.load_state_dict(dict(state))
        self._look()
