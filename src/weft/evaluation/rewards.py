"""Scoring of replies with a reward model, in the format in which it was trained."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from weft.algorithms.base import to_host_array
from weft.data.datasets.base import build_answer_group, encode_continuations, encode_with_eos
from weft.data.lengths import EncodedSample, LengthLimits, fit_to_limits
from weft.data.messages import Message
from weft.data.rows import BadRow
from weft.data.table import TokenizationReport, TokenTable
from weft.data.tokenizer import Tokenizer
from weft.errors import DataError
from weft.evaluation.answers import EvaluationPrompt
from weft.evaluation.models import OpenedModel

IDS_AT_ONCE = 64


def score_replies(
    opened: OpenedModel, prompts: Sequence[EvaluationPrompt], replies: Sequence[Sequence[str]]
) -> list[npt.NDArray[np.float64]]:
    """Return scores as `[prompt][reply]`, computed as in `weft quickstart rw` and in PPO.

    A reward model with a chat template reads messages. Without a template, it reads the prompt's
    text followed by the reply. In both cases, the end token comes last. Sequences longer than the
    model's context are cut at the start of the prompt, like training rows. Raises `DataError` for a
    prompt that the chat template rejects, or whose replies do not fit in the context.
    """
    lengths = LengthLimits(max_seqlen=opened.context)
    encoded = list[EncodedSample]()
    for prompt, texts in zip(prompts, replies, strict=True):
        whole = _encode(opened.tokenizer, prompt, texts)
        short, _ = fit_to_limits(whole, lengths, opened.tokenizer.bos_id)
        if short is None:
            raise DataError(
                f"prompt {prompt.id!r}: its replies do not fit into the {opened.context} "
                f"tokens of the model's context"
            )
        encoded.append(short)
    table = TokenTable.from_rows(
        [str(index) for index in range(len(encoded))],
        encoded,
        range(len(encoded)),
        TokenizationReport(),
    )
    scores = list[npt.NDArray[np.float64]]()
    for start in range(0, len(table), IDS_AT_ONCE):
        output = opened.engine.forward(
            table.take(range(start, min(start + IDS_AT_ONCE, len(table)))), frozenset({"scores"})
        )
        flat = to_host_array(output.data["scores"]).astype(np.float64)
        owners = output.group_of("scores")
        for index in range(output.num_ids):
            scores.append(flat[owners == index])
    return scores


def _encode(
    tokenizer: Tokenizer, prompt: EvaluationPrompt, replies: Sequence[str]
) -> EncodedSample:
    try:
        if tokenizer.chat_template is not None:
            turns: list[list[Message]] = []
            for reply in replies:
                turns.append([{"role": "assistant", "content": reply}])
            return encode_continuations(tokenizer, prompt.messages, turns, None, may_be_empty=True)
        sequences = [encode_with_eos(tokenizer, prompt.text + reply) for reply in replies]
        return build_answer_group(tokenizer.encode(prompt.text), sequences)
    except BadRow as error:
        raise DataError(f"prompt {prompt.id!r}: {error}") from error
