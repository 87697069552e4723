"""Score replies with a reward model, each in the form that the model was trained on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from weft.algorithms.base import host_array
from weft.data.datasets.base import answered, continued, ended
from weft.data.lengths import Encoded, Lengths, fit
from weft.data.messages import Message
from weft.data.rows import BadRow
from weft.data.table import Report, TokenTable
from weft.data.tokenizer import Tokenizer
from weft.errors import DataError
from weft.evaluation.models import Opened
from weft.evaluation.prompts import Prompt

IDS_AT_ONCE = 64


def score(
    opened: Opened, prompts: Sequence[Prompt], replies: Sequence[Sequence[str]]
) -> list[npt.NDArray[np.float64]]:
    """Return the scores as `[prompt][reply]`, computed as in `weft quickstart rw` and in PPO.

    A reward model with a chat template reads messages; one without reads the prompt's text followed
    by the reply. Both end with the end token. Sequences longer than the model's context are cut
    like training rows: the prompt from its left. Raises `DataError` for a prompt that the template
    refuses, or whose replies do not fit into the context.
    """
    lengths = Lengths(max_seqlen=opened.context)
    encoded = list[Encoded]()
    for prompt, said in zip(prompts, replies, strict=True):
        whole = _encode(opened.tokenizer, prompt, said)
        short, _ = fit(whole, lengths, opened.tokenizer.bos_id)
        if short is None:
            raise DataError(
                f"prompt {prompt.id!r}: nothing of its replies fits into the {opened.context} "
                f"tokens of the model"
            )
        encoded.append(short)
    table = TokenTable.build(
        [str(index) for index in range(len(encoded))], encoded, range(len(encoded)), Report()
    )
    scores = list[npt.NDArray[np.float64]]()
    for start in range(0, len(table), IDS_AT_ONCE):
        made = opened.engine.forward(
            table.at(range(start, min(start + IDS_AT_ONCE, len(table)))), frozenset({"scores"})
        )
        flat = host_array(made.data["scores"]).astype(np.float64)
        owners = made.group_of("scores")
        scores += [flat[owners == index] for index in range(made.num_ids)]
    return scores


def _encode(tokenizer: Tokenizer, prompt: Prompt, replies: Sequence[str]) -> Encoded:
    try:
        if tokenizer.chat_template is not None:
            turns: list[list[Message]] = [
                [{"role": "assistant", "content": reply}] for reply in replies
            ]
            return continued(tokenizer, prompt.messages, turns, None, may_be_empty=True)
        sequences = [ended(tokenizer, prompt.text + reply) for reply in replies]
        return answered(tokenizer.encode(prompt.text), sequences)
    except BadRow as error:
        raise DataError(f"prompt {prompt.id!r}: {error}") from error
