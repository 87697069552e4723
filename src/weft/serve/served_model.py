"""Models offered by the server: policies, which sample and compute log-probs, and reward models."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.data.token_bytes import TokenBytes
from weft.data.tokenizer import Tokenizer
from weft.engine.spec import GenerationSpec
from weft.errors import DataError, NotFinite
from weft.serve.background import BackgroundWork
from weft.serve.bodies import IDS, MASK, STARTS, Tensor
from weft.serve.worker import RowScores, ScoredRows, ServingWorker

PLATFORM = "weft"
VERSION = "1"
LOGPROBS = "logprobs"
REWARDS = "rewards"


@dataclass(frozen=True)
class ServedModel:
    """A policy or reward model that the server offers.

    `output` is the name of the model's output in the open inference protocol: "logprobs" or
    "rewards". Valid token ids are 0 to `vocab_size` - 1.
    """

    name: str
    worker: ServingWorker
    tokenizer: Tokenizer
    vocab_size: int
    output: str
    context: int | None = None  # maximum sequence length, if the model has one
    # Sampling defaults of a policy; None for a reward model.
    spec: GenerationSpec | None = None

    @cached_property
    def pieces(self) -> TokenBytes:
        """Bytes of each token of the tokenizer."""
        return TokenBytes(self.tokenizer)

    def build_metadata(self) -> dict[str, Any]:
        """Return the model's metadata as defined by the open inference protocol."""
        inputs = [_describe_tensor(IDS, "INT32", -1, -1), _describe_tensor(MASK, "INT32", -1, -1)]
        if self.output == LOGPROBS:
            inputs.append(_describe_tensor(STARTS, "INT32", -1, 1))
        output = _describe_tensor(self.output, "FP32", -1, -1 if self.output == LOGPROBS else 1)
        return {
            "name": self.name,
            "versions": [VERSION],
            "platform": PLATFORM,
            "inputs": inputs,
            "outputs": [output],
        }

    def read_rows(self, inputs: Mapping[str, Tensor]) -> tuple[ScoredRows, npt.NDArray[np.int64]]:
        """Return the token sequence of each row, and the position in the row at which it begins.

        A row's sequence consists of its unmasked tokens in `input_ids` [B, T]. The positions are
        int64 [B]. Raises a `DataError` that names the invalid tensor.
        """
        input_names = [entry["name"] for entry in self.build_metadata()["inputs"]]
        for name, tensor in inputs.items():
            if name not in input_names:
                raise DataError(
                    f"model {self.name!r} has no input {name!r}; its inputs are "
                    f"{', '.join(input_names)}"
                )
            if tensor.dtype.kind not in "iu":
                raise DataError(f"input {name!r} must be INT32 or INT64")
        if IDS not in inputs:
            raise DataError(f"the input {IDS!r} is missing")
        ids = inputs[IDS].astype(np.int64)
        if ids.ndim != 2 or not ids.size:
            raise DataError(
                f"input {IDS!r} has the shape {list(ids.shape)}; it must be [rows, tokens] with "
                f"at least one of each"
            )
        starts, stops = _find_spans(inputs.get(MASK), ids.shape)
        tokens = [row[start:stop] for row, start, stop in zip(ids, starts, stops, strict=True)]
        self._check_rows(tokens)
        return ScoredRows(tokens, self._read_starts(inputs.get(STARTS), tokens)), starts

    async def infer(
        self,
        inputs: Mapping[str, Tensor],
        parameters: Mapping[str, Any],
        background: BackgroundWork,
    ) -> dict[str, Tensor]:
        """Return the model's output for the token ids `input_ids` [B, T] in `inputs`.

        Positions where `attention_mask` is 0 are ignored. A reward model returns `rewards` [B, 1].

        A policy returns `logprobs` [B, T]: the log-prob of each token given the tokens before it,
        at the sampling temperature `parameters["temperature"]` (default 1). The log-probs are 0 for
        padding and for the first `prompt_length` tokens of each row. `prompt_length` [B, 1] is an
        optional input, with 1 as the default. Raises `DataError` for invalid inputs and parameters.
        """
        rows, row_starts = await background.run(self.read_rows, inputs)
        temperature = _read_temperature(parameters, self.output)
        if self.output == REWARDS:
            scores = await self._score_rows(rows, "scores", 1.0)
            return {REWARDS: np.array([float(score[0]) for score in scores], np.float32)[:, None]}
        # Score the rows that have a token to score, and write their log-probs to the right columns.
        logprobs = np.zeros(inputs[IDS].shape, np.float32)
        indices = [i for i, start in enumerate(rows.starts) if start < len(rows.tokens[i])]
        if indices:
            scored_rows = ScoredRows(
                [rows.tokens[i] for i in indices], [rows.starts[i] for i in indices]
            )
            scores = await self._score_rows(scored_rows, "logprobs", temperature)
            for i, values in zip(indices, scores, strict=True):
                first = int(row_starts[i]) + rows.starts[i]
                logprobs[i, first : first + len(values)] = values
        return {LOGPROBS: logprobs}

    async def _score_rows(
        self, rows: ScoredRows, want: Any, temperature: float
    ) -> list[npt.NDArray[np.float32]]:
        """Return the output `want` for each of the rows."""
        scores = await asyncio.wrap_future(self.worker.score(rows, want, temperature))
        return [row_scores.values for row_scores in scores]

    async def score_prompts(self, rows: Sequence[Sequence[int]], top: int) -> list[RowScores]:
        """Return the log-probs of the tokens of each row, except the first, at temperature 1.

        They include the `top` most likely ids at the position of each token. Rows of concurrent
        requests are scored together. Raises `NotFinite` if the network computes NaN.
        """
        scores = await asyncio.gather(*(self._score_prompt(row, top) for row in rows))
        if any(np.isnan(score.values).any() for score in scores):
            raise NotFinite("a log-prob of the prompt is NaN; the model's weights are damaged")
        return scores

    async def _score_prompt(self, row: Sequence[int], top: int) -> RowScores:
        if len(row) == 1:
            return RowScores.build_without_top(np.zeros(0, np.float32))
        future = self.worker.score(ScoredRows([row], [1]), "logprobs", 1.0, top)
        (scores,) = await asyncio.wrap_future(future)
        return scores

    def _check_rows(self, tokens: Sequence[npt.NDArray[np.int64]]) -> None:
        """Raise `DataError` for a row of invalid length, or with an invalid token id."""
        max_length = self.worker.max_tokens
        if self.context:
            max_length = min(max_length, self.context)
        for index, row in enumerate(tokens):
            if not 0 < len(row) <= max_length:
                raise DataError(f"row {index} has {len(row)} tokens; 1 to {max_length} are allowed")
            if row.min() < 0 or row.max() >= self.vocab_size:
                raise DataError(
                    f"row {index} has a token id outside the model's range, 0 to "
                    f"{self.vocab_size - 1}"
                )

    def _read_starts(
        self, prompt_lengths: Tensor | None, tokens: Sequence[npt.NDArray[np.int64]]
    ) -> list[int]:
        """Return the index of the first token to score in each row.

        For a policy, this is the row's value of the input `prompt_length`, by default 1. A reward
        model scores only the last token. Raises `DataError` for invalid lengths.
        """
        if self.output == REWARDS:
            return [len(row) - 1 for row in tokens]
        if prompt_lengths is None:
            return [1] * len(tokens)
        starts: list[int] = prompt_lengths.ravel().astype(np.int64).tolist()
        pairs = zip(starts, tokens, strict=False)
        if len(starts) != len(tokens) or any(not 1 <= start <= len(row) for start, row in pairs):
            raise DataError(
                f"input {STARTS!r} must have one number per row, from 1 to the row's token count"
            )
        return starts


def _describe_tensor(name: str, datatype: str, *shape: int) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape)}


def _find_spans(
    mask: Tensor | None, shape: tuple[int, ...]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the start and the exclusive end of the unmasked tokens of each row, both int64 [B].

    Raises `DataError` if the unmasked tokens of a row are not consecutive.
    """
    if mask is None:
        return np.zeros(shape[0], np.int64), np.full(shape[0], shape[1], np.int64)
    if mask.shape != shape:
        raise DataError(
            f"input {MASK!r} has the shape {list(mask.shape)}, but {IDS!r} has {list(shape)}; "
            f"they must be equal"
        )
    is_unmasked = mask != 0
    starts = is_unmasked.argmax(axis=1)
    stops = starts + is_unmasked.sum(axis=1)
    columns = np.arange(shape[1])
    is_inside = (columns >= starts[:, None]) & (columns < stops[:, None])
    if not np.array_equal(is_inside, is_unmasked):
        raise DataError(
            f"input {MASK!r} must be 1 for consecutive tokens in each row, and 0 elsewhere"
        )
    return starts, stops


def _read_temperature(parameters: Mapping[str, Any], output: str) -> float:
    """Return the parameter `temperature`, by default 1; raise `DataError` for an invalid value."""
    value = parameters.get("temperature", 1.0)
    if type(value) not in (int, float) or not math.isfinite(value) or not value > 0:
        raise DataError(f"the parameter temperature={value!r} must be a number above 0")
    if output == REWARDS and value != 1.0:
        raise DataError("a reward model has no temperature; leave the parameter out")
    return float(value)
