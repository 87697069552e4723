"""`prompt`: prompts to complete; every other column of a row goes along for rewards and verifiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from weft.data import dialogue
from weft.data.chat import normalise
from weft.data.datasets.base import TableDataset, prompt_keys, prompt_text
from weft.data.lengths import Encoded
from weft.data.rows import MESSAGE_KEYS, BadRow, Row, first_of, need, plain, text
from weft.data.spec import PROMPT_LEN
from weft.data.tokenizer import Tokenizer
from weft.registry import register_dataset


@dataclass(frozen=True)
class Prompt:
    """A text, or messages rendered with the template's generation prompt. `as_chat`: a text is the user's message.

    Preference rows in the `\\n\\nHuman:` form give the dialogue up to the assistant's last shared turn.
    """

    prompt_key: str | None = None
    id_key: str = "id"
    as_chat: bool = False

    def check(self, tokenizer: Tokenizer) -> None:
        if self.as_chat:
            tokenizer.require_chat_template()

    def encode(self, row: Row, tokenizer: Tokenizer) -> list[Encoded]:
        keys = prompt_keys(self.prompt_key)
        key = first_of(row, (*keys, *MESSAGE_KEYS))
        if (
            key is None
            and not self.prompt_key
            and isinstance(row.get("chosen"), str)
            and isinstance(row.get("rejected"), str)
        ):
            ids = tokenizer.encode(dialogue.shared_prompt(text(row, "chosen"), text(row, "rejected")))
            used: tuple[str, ...] = ("chosen", "rejected")
        else:
            key = key or need(row, keys, "prompt")
            ids, used = self._ids(row, key, tokenizer), (key, "input") if key == "instruction" else (key,)
        if not ids:
            raise BadRow(f"the prompt ({', '.join(map(repr, used))}) is empty")
        columns = {name: plain(value) for name, value in row.items() if name not in (*used, self.id_key)}
        return [Encoded(ids, metadata=columns)]

    def _ids(self, row: Row, key: str, tokenizer: Tokenizer) -> list[int]:
        if isinstance(row[key], str):
            prompt = prompt_text(row, key)
            if not prompt.strip():
                raise BadRow(f"{key!r} is empty")
            if not self.as_chat:
                return tokenizer.encode(prompt)
            return tokenizer.encode_chat(
                [{"role": "user", "content": prompt.removesuffix("\n")}], add_generation_prompt=True
            )
        messages = normalise(row[key])
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages:
            raise BadRow(f"{key!r} has no turn that a reply could follow")
        return tokenizer.encode_chat(messages, row.get("tools"), add_generation_prompt=True)


@register_dataset("prompt")
class PromptDataset(TableDataset):
    """Rows `{prompt, ...}` as the key `prompt`; the other columns are metadata.

    `options`: prompt_key, id_key, as_chat, max_prompt_len (256 when absent), overlong, truncate_side, max_seqlen.
    """

    form = Prompt
    usual: ClassVar[Mapping[str, Any]] = {"max_prompt_len": PROMPT_LEN}
