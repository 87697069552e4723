"""Read files of prompts, given as texts or conversations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.data.asked import conversation, need_prompt, prompt_text
from weft.data.fixed_prompts import MOST_REPORTED, prompt_rows
from weft.data.messages import Message
from weft.data.rows import BadRow
from weft.data.sources import Unreadable
from weft.data.tokenizer import Tokenizer
from weft.errors import DataError


@dataclass(frozen=True)
class Prompt:
    """A prompt: `text` as in the file, and the `messages` for a chat model."""

    id: str
    text: str
    messages: tuple[Message, ...]

    def token_ids(
        self, tokenizer: Tokenizer, *, system: str | None = None, plain: bool = False
    ) -> list[int]:
        """Return the token ids of the prompt, in the chat template's form if there is one.

        With `plain`, or without a chat template, the text is encoded unchanged, after `system` if
        given. A prompt's own system message takes precedence over `system`.
        """
        if plain or tokenizer.chat_template is None:
            return tokenizer.encode(f"{system}\n\n{self.text}" if system else self.text)
        own = any(message["role"] == "system" for message in self.messages)
        if system and not own:
            first: list[Message] = [{"role": "system", "content": system}]
        else:
            first = []
        return tokenizer.encode_chat([*first, *self.messages], add_generation_prompt=True)


def read_prompts(path: str, limit: int | None = None) -> list[Prompt]:
    """Read the prompts of a JSON, JSONL(.gz), Parquet or .txt file.

    A .txt file has one prompt per line, a JSONL file can have one quoted text per line. Rows have a
    prompt or messages in the columns that datasets use. Raises `DataError` with each row that has
    none.
    """
    prompts = list[Prompt]()
    wrong = list[str]()
    for place, row in prompt_rows(path):
        if limit is not None and len(prompts) >= limit:
            break
        try:
            prompts.append(_prompt(row, str(len(prompts))))
        except BadRow as error:
            wrong.append(f"{place}: {error}")
            if len(wrong) == MOST_REPORTED:
                break
    if wrong:
        raise DataError("\n".join(["these rows are no prompts:", *wrong]))
    if not prompts:
        raise DataError(f"{path}: there are no prompts in it")
    return prompts


def _prompt(row: Any, number: str) -> Prompt:
    if isinstance(row, Unreadable):
        raise BadRow(row.wrong)
    if not isinstance(row, Mapping):
        raise BadRow("it is no JSON object")
    key = need_prompt(row, None, "prompt")
    asked = tuple(conversation(row, key))
    if isinstance(row[key], str):
        text = prompt_text(row, key)
    else:
        text = str(asked[-1]["content"])
    return Prompt(str(row.get("id", number)), text, asked)
