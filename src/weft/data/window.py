"""Random window of a token sequence that is too long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from weft.data.lengths import EncodedSample
from weft.data.prefix import count_common_prefix


@dataclass(frozen=True)
class RandomWindow:
    """Random cropper for token sequences that are too long.

    The common prefix of the sequence and `head` is kept in front of the window. If they have no
    common prefix, a BOS at the beginning of the sequence is kept instead.

    Attributes:
        size: number of tokens to keep, including those in front of the window
        probability: probability that a long sequence is cropped to a random window
        head: ids with which sequences usually begin
        bos_id: id of BOS; None if the tokenizer has no BOS
    """

    size: int
    probability: float
    head: Sequence[int] = ()
    bos_id: int | None = None

    def apply(self, encoded: EncodedSample, draw: np.random.Generator) -> EncodedSample:
        """Crop a sample longer than `size` to a random window, with the given `probability`.

        The sample is returned unchanged if it has several completions or cannot be cropped. The
        window is drawn uniformly from all windows that contain a token with a loss. The first token
        of the cropped sample has no loss, since no token precedes it.
        """
        if len(encoded.completions) != 1:
            return encoded
        ids = np.asarray([*encoded.prompt, *encoded.completions[0]], dtype=np.int64)
        mask = np.asarray([False] * len(encoded.prompt) + list(encoded.masks[0]))
        if len(ids) <= self.size or draw.random() >= self.probability:
            return encoded
        head = self._count_head(ids)
        room = self.size - head
        if room < 2:
            return encoded
        counts = np.concatenate([[0], np.cumsum(mask[head:])])
        starts = np.arange(len(ids) - head - room + 1)
        usable = starts[counts[starts + room] - counts[starts + (head == 0)] > 0]
        if not len(usable):
            return encoded
        start = head + int(usable[draw.integers(len(usable))])
        ids = np.concatenate([ids[:head], ids[start : start + room]])
        mask = np.concatenate([np.zeros(head, dtype=np.bool_), mask[start : start + room]])
        mask[0] = False
        first = int(np.argmax(mask))
        last = len(mask) - int(np.argmax(mask[::-1]))
        return replace(
            encoded,
            prompt=ids[:first].tolist(),
            completions=[ids[first:last].tolist()],
            masks=[mask[first:last].tolist()],
        )

    def _count_head(self, ids: np.ndarray) -> int:
        """Return the number of leading ids to keep in front of the window.

        These are the leading ids that the sequence has in common with `self.head`. If there are
        none, only a leading BOS is kept.
        """
        return count_common_prefix(self.head, ids.tolist()) or int(
            self.bos_id is not None and ids[0] == self.bos_id
        )
