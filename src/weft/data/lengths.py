"""Token ids of encoded rows, limits on their length, and random windows of overlong rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from weft.data.rows import RowTooLong
from weft.data.spec import OVERLONG
from weft.data.turns import TemplateOmission, count_common_prefix
from weft.errors import ConfigError


@dataclass(frozen=True)
class EncodedSample:
    """Token ids of one sample: a prompt with any number of completions.

    Attributes:
        prompt: token ids of the prompt
        completions: token ids of each completion; empty if the sample is only a prompt
        masks: mask of each completion, True on trained tokens
        values: one number per completion, by key
        metadata: metadata of the sample, by name
        part: suffix of the sample's id if the row has several samples, otherwise empty
        unused: names of the row's fields that are not used, such as `messages[].name`
        cut: parts of trained turns that the chat template omits, for example their reasoning
    """

    prompt: list[int]
    completions: list[list[int]] = field(default_factory=list)
    masks: list[list[bool]] = field(default_factory=list)
    values: Mapping[str, list[float]] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    part: str = ""
    unused: frozenset[str] = frozenset()
    cut: tuple[TemplateOmission, ...] = ()


@dataclass(frozen=True)
class LengthLimits:
    """Limits on the length of a row, and the treatment of rows that exceed them.

    Attributes:
        max_seqlen: maximum number of tokens of the prompt with one completion, or None
        max_prompt_len: maximum number of tokens of the prompt, or None
        overlong: treatment of rows that are too long: "truncate", "drop" or "error"
        truncate_side: end at which a long prompt is cut: "left" or "right"
    """

    max_seqlen: int | None = None
    max_prompt_len: int | None = None
    overlong: str = "truncate"
    truncate_side: str = "left"

    def __post_init__(self) -> None:
        if self.overlong not in OVERLONG:
            raise ConfigError(
                f"dataset.overlong={self.overlong!r}: must be one of {', '.join(OVERLONG)}"
            )
        if self.truncate_side not in ("left", "right"):
            raise ConfigError(
                f"dataset.truncate_side={self.truncate_side!r}: must be left or right"
            )
        if self.max_seqlen is not None and self.max_seqlen < 2:
            raise ConfigError(
                f"dataset.max_seqlen={self.max_seqlen}: must be at least 2: one token of the "
                f"prompt and one of the answer"
            )


def fit_to_limits(
    encoded: EncodedSample, lengths: LengthLimits, bos_id: int | None
) -> tuple[EncodedSample | None, frozenset[str]]:
    """Truncate or drop a sample that exceeds its length limits, depending on `overlong`.

    Returns (sample, actions). `actions` contains "prompt" if the prompt was truncated, and "answer"
    if a completion was truncated. For a sample that is dropped, the result is (None, {"dropped"}).
    Raises `RowTooLong` if `overlong` is "error".

    When truncating, the prompt is cut to `max_prompt_len`. If the prompt and the longest completion
    together exceed `max_seqlen`, the ends of the completions are cut. If the prompt leaves no room
    for completions, the prompt is cut too, but not below half of `max_seqlen`. A prompt cut on the
    left keeps its BOS. The sample is dropped if a completion has no trained token left.
    """
    # Compute the number of prompt tokens (`limit`) and of completion tokens (`room`) to keep.
    num_prompt = len(encoded.prompt)
    longest = max(map(len, encoded.completions), default=0)
    limit = min(num_prompt, lengths.max_prompt_len or num_prompt)
    room = longest
    if lengths.max_seqlen is not None:
        if limit + min(longest, 1) > lengths.max_seqlen:
            limit = max(lengths.max_seqlen // 2, lengths.max_seqlen - longest)
        room = lengths.max_seqlen - limit
    if limit == num_prompt and longest <= room:
        return encoded, frozenset()
    # The row is too long: raise, drop it, or truncate it.
    if lengths.overlong == "error":
        raise _build_too_long_error(num_prompt, longest, lengths)
    if lengths.overlong == "drop":
        return None, frozenset({"dropped"})
    short = replace(
        encoded,
        prompt=_truncate_prompt(encoded.prompt, limit, lengths.truncate_side, bos_id),
        completions=[completion[:room] for completion in encoded.completions],
        masks=[mask[:room] for mask in encoded.masks],
    )
    if not all(any(mask) for mask in short.masks):
        return None, frozenset({"dropped"})
    cut = {"prompt": num_prompt > limit, "answer": longest > room}
    return short, frozenset(part for part, is_cut in cut.items() if is_cut)


def _build_too_long_error(num_prompt: int, longest: int, lengths: LengthLimits) -> RowTooLong:
    if lengths.max_prompt_len is not None and num_prompt > lengths.max_prompt_len:
        return RowTooLong("prompt", num_prompt, "dataset.max_prompt_len", lengths.max_prompt_len)
    assert lengths.max_seqlen is not None, "without limits nothing is too long"
    return RowTooLong("row", num_prompt + longest, "dataset.max_seqlen", lengths.max_seqlen)


def _truncate_prompt(prompt: list[int], limit: int, side: str, bos_id: int | None) -> list[int]:
    if len(prompt) <= limit:
        return prompt
    if side == "right":
        return prompt[:limit]
    if limit > 1 and prompt[0] == bos_id:
        return [prompt[0], *prompt[len(prompt) - limit + 1 :]]
    return prompt[len(prompt) - limit :]


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
        # Keep the leading ids that are also in `self.head`, else a leading BOS, before the window.
        head = count_common_prefix(self.head, ids.tolist()) or int(
            self.bos_id is not None and ids[0] == self.bos_id
        )
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
