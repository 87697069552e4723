"""Conversion of a batch for a role whose tokenizer or chat template differs from the data's.

Such a role, for example a reward model or judge, must read prompts and completions in the text
format that it was trained on, encoded with its own tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.data.datasets.prompt import MESSAGES, PLAIN_TEXT
from weft.data.sample import SequenceSample
from weft.data.tokenizer import Tokenizer
from weft.data.turns import count_common_prefix
from weft.errors import ConfigError, UserError
from weft.interfaces.base import Model

Ids = list[int]


def convert_to_own_tokens(
    model: Model, batch: SequenceSample, prefix: str = "", suffix: str = ""
) -> SequenceSample:
    """Return the batch re-encoded for the role's tokenizer and chat template.

    Sample ids and numbers of completions are unchanged; each id must have one prompt. Prompts that
    are messages are rendered with the role's chat template, and their completions as the
    assistant's turn. All other prompts, or all prompts if `prefix` or `suffix` is set, are encoded
    as plain text between `prefix` and `suffix`: the text in the metadata column `prompt_text` if
    there is one, else that of the prompt's tokens. Only completions that ended get an end token.
    The key `finished` marks these; without this key, a completion has ended if its last token is a
    stop token.

    The metadata column `left_out` lists, for each id, the parts of its messages that the role's
    template does not render. Raises `ConfigError` naming the role and the id if the role has no
    template, or if its template rejects the messages or omits a part that a reply depends on.
    """
    # Collect the completions of each id, and whether they ended.
    owner = batch.group_of("completion")
    if "finished" in batch.data:
        finished = batch.data["finished"].tolist()
    else:
        finished = [None] * len(owner)
    completions: list[list[tuple[Ids, bool]]] = [[] for _ in batch.ids]
    stop_ids = model.data_tokenizer.list_stop_ids()
    for index, sequence, flag in zip(owner, batch.sequences("completion"), finished, strict=True):
        ids = sequence.tolist()
        ended = flag > 0 if flag is not None else bool(ids) and ids[-1] in stop_ids
        completions[int(index)].append((ids, ended))
    # Encode each id's prompt and completions with the role's tokenizer.
    absent = (None,) * batch.num_ids
    columns = [batch.metadata.get(name, absent) for name in (MESSAGES, "tools", PLAIN_TEXT)]
    encoded = []
    left_out = list[list[str]]()
    for id, prompt, group, messages, tools, plain in zip(
        batch.ids, batch.sequences("prompt"), completions, *columns, strict=True
    ):
        texts = [
            (model.data_tokenizer.decode_after(prompt.tolist(), ids, True), ended)
            for ids, ended in group
        ]
        if messages is None or prefix or suffix:
            if plain is None:
                plain = model.data_tokenizer.decode(prompt.tolist(), skip_special=True)
            encoded.append(_encode_as_text(model.tokenizer, prefix + plain + suffix, texts))
            left_out.append([])
        else:
            context, missing = _render_prompt(model, id, messages, tools)
            encoded.append(_render_as_turns(model, context, messages, tools, texts))
            left_out.append(sorted(missing))
    # Pack the sequences into a new sample.
    lengths = {
        "prompt": [[len(prompt)] for prompt, _ in encoded],
        "completion": [[len(ids) for ids in group] for _, group in encoded],
    }
    flat = [ids for _, group in encoded for ids in group]
    data = {
        "prompt": _concatenate([prompt for prompt, _ in encoded]),
        "completion": _concatenate(flat),
    }
    return SequenceSample.from_groups(batch.ids, lengths, data, {"left_out": left_out})


def _encode_as_text(
    tokenizer: Tokenizer, prompt: str, completions: Sequence[tuple[str, bool]]
) -> tuple[Ids, list[Ids]]:
    """Return the token ids of a prompt and of its completions, encoded as plain text.

    `completions` has the text of each completion and whether it ended. Completions that ended get
    the tokenizer's EOS token.
    """
    completion_ids = []
    for text, ended in completions:
        ids = tokenizer.encode(text, bos=False)
        completion_ids.append([*ids, tokenizer.require_eos()] if ended else ids)
    return tokenizer.encode(prompt), completion_ids


def _render_prompt(
    model: Model, id: str, messages: Sequence[Mapping[str, Any]], tools: Any
) -> tuple[Ids, frozenset[str]]:
    """Render a prompt with the role's chat template.

    Returns its token ids and the names of the message parts that the template omits. Raises
    `ConfigError` if the role has no template or if the template rejects the messages.
    """
    if model.tokenizer.chat_template is None:
        raise ConfigError(
            f"role {model.role!r} has another tokenizer than the data and no chat template, so it "
            f"cannot read prompts that are messages; set "
            f"{model.role}.tokenizer.chat_template to a jinja file, or "
            f"{model.role}.prompt_suffix (and "
            "prompt_prefix) to the text that surrounds a prompt"
        )
    try:
        return model.tokenizer.encode_context(messages, tools)
    except UserError as error:
        raise ConfigError(
            f"role {model.role!r} cannot read the prompt of row {id!r}: {error}; set "
            f"{model.role}.tokenizer.chat_template to another template; with "
            f"{model.role}.prompt_suffix (and "
            f"prompt_prefix) it reads plain text"
        ) from error


def _render_as_turns(
    model: Model,
    prompt: Ids,
    messages: Sequence[Mapping[str, Any]],
    tools: Any,
    completions: Sequence[tuple[str, bool]],
) -> tuple[Ids, list[Ids]]:
    """Return the token ids of a prompt and of its completions, rendered with the role's template.

    Each completion is rendered as the last turn after `messages`. `completions` has (text, ended)
    for each completion; `ended` is False if the completion was truncated. `prompt` has the token
    ids of `messages` alone, in the same template.

    White space that the chat template of the data's tokenizer adds around a reply is removed from
    the text. Text that the role's template adds after the end token of the last turn is cut off.
    """
    tokenizer = model.tokenizer
    before, after = _find_template_blanks(model.data_tokenizer)
    conversations = []
    for completion, ended in completions:
        text = completion.removeprefix(before)
        text = text.removesuffix(after) if ended else text
        ids = tokenizer.encode_chat([*messages, {"role": "assistant", "content": text}], tools)
        conversations.append(
            _cut_at_end_token(tokenizer, ids, count_common_prefix(prompt, ids), ended=ended)
        )
    shared = min(
        count_common_prefix(prompt, *conversations), *(len(ids) - 1 for ids in conversations)
    )
    return conversations[0][:shared], [ids[shared:] for ids in conversations]


def _find_template_blanks(tokenizer: Tokenizer) -> tuple[str, str]:
    """Return the white space that a chat template adds before a reply and before its end token."""
    before, after = tokenizer.text_around_reply
    after = after.partition(tokenizer.turn_end)[0] if tokenizer.turn_end else ""
    return (before if before.isspace() else ""), (after if after.isspace() else "")


def _cut_at_end_token(tokenizer: Tokenizer, ids: Ids, start: int, *, ended: bool) -> Ids:
    """Return the token ids of a conversation up to the end token of its last turn.

    The end token is searched for from the index `start`. It is kept if the turn `ended`, and
    otherwise removed.
    """
    if tokenizer.turn_end is None:
        stop = None
    else:
        stop = tokenizer.find_special_id(tokenizer.turn_end)
    positions = range(len(ids) - 1, start - 1, -1)
    last = next((position for position in positions if ids[position] == stop), None)
    body = ids if last is None else ids[:last]
    if not ended:
        return body
    end = tokenizer.require_eos() if last is None else ids[last]
    return body if body and body[-1] == end else [*body, end]


def _concatenate(sequences: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    return np.array([token for ids in sequences for token in ids], dtype=np.int64)
