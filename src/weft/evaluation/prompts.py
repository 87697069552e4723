"""Prompts for evaluation, read from files as plain texts or conversations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.data.columns import read_conversation, read_prompt_text, require_prompt_key
from weft.data.fixed_prompts import MAX_REPORTED, read_prompt_rows
from weft.data.messages import Message
from weft.data.rows import BadRow
from weft.data.sources import UnreadableRow
from weft.data.tokenizer import Tokenizer
from weft.errors import DataError


@dataclass(frozen=True)
class EvaluationPrompt:
    """Prompt on which a model is evaluated.

    `text` is the prompt as plain text, and `messages` is the conversation for a chat model.
    """

    id: str
    text: str
    messages: tuple[Message, ...]

    def tokenize(
        self, tokenizer: Tokenizer, *, system: str | None = None, plain: bool = False
    ) -> list[int]:
        """Return the token ids of the prompt, formatted with the chat template if there is one.

        With `plain`, or without a chat template, the text of the prompt is encoded unchanged; if
        `system` is given, it precedes the text. With a template, a system message in the prompt
        takes precedence over `system`.
        """
        if plain or tokenizer.chat_template is None:
            return tokenizer.encode(f"{system}\n\n{self.text}" if system else self.text)
        own = any(message["role"] == "system" for message in self.messages)
        if system and not own:
            first: list[Message] = [{"role": "system", "content": system}]
        else:
            first = []
        return tokenizer.encode_chat([*first, *self.messages], add_generation_prompt=True)


def read_prompts(path: str, limit: int | None = None) -> list[EvaluationPrompt]:
    """Read up to `limit` prompts from a JSON, JSONL(.gz), Parquet or .txt file.

    Each line of a .txt file is a prompt. In the other formats, a row has a prompt or messages, in
    the same columns as a dataset; a row of a JSONL file can also be just a quoted text. Raises
    `DataError` if a row has no prompt (the message lists such rows), or if the file contains no
    prompts.
    """
    prompts = list[EvaluationPrompt]()
    wrong = list[str]()
    for place, row in read_prompt_rows(path):
        if limit is not None and len(prompts) >= limit:
            break
        try:
            prompts.append(_parse_prompt(row, str(len(prompts))))
        except BadRow as error:
            wrong.append(f"{place}: {error}")
            if len(wrong) == MAX_REPORTED:
                break
    if wrong:
        raise DataError("\n".join(["these rows are not prompts:", *wrong]))
    if not prompts:
        raise DataError(f"{path}: there are no prompts in it")
    return prompts


def _parse_prompt(row: Any, number: str) -> EvaluationPrompt:
    if isinstance(row, UnreadableRow):
        raise BadRow(row.reason)
    if not isinstance(row, Mapping):
        raise BadRow("it is not a JSON object")
    key = require_prompt_key(row, None, "prompt")
    messages = tuple(read_conversation(row, key))
    if isinstance(row[key], str):
        text = read_prompt_text(row, key)
    else:
        text = str(messages[-1]["content"])
    return EvaluationPrompt(str(row.get("id", number)), text, messages)
