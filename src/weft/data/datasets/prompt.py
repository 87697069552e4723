"""Dataset type `prompt`: prompts to complete.

All other columns of a row are kept for rewards and verifiers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from weft.data import dialogue, trees
from weft.data.asked import INPUT, as_messages, conversation, need_prompt, prompt_keys
from weft.data.datasets.base import TableDataset, plain_prompt
from weft.data.lengths import Encoded
from weft.data.messages import normalise
from weft.data.rows import MESSAGE_KEYS, BadRow, Row, first_of, is_tree, plain, text
from weft.data.tokenizer import Tokenizer
from weft.registry import register_dataset

# metadata: a prompt's messages, for roles that read the text in a form of their own
MESSAGES = "prompt_messages"


@dataclass(frozen=True)
class Prompt:
    """Form of prompts: a text, or messages rendered with the template's generation prompt.

    `as_chat`: a text is the user's message.

    The prompt of a preference row in the `\\n\\nHuman:` form is the shared part of its dialogues,
    up to the last `\\n\\nAssistant:`. The messages of a rendered prompt are saved in the metadata
    as `prompt_messages`. In an Open-Assistant tree, every message of the prompter is a prompt.
    """

    prompt_key: str | None = None
    id_key: str = "id"
    as_chat: bool = False

    def check(self, tokenizer: Tokenizer) -> None:
        if self.as_chat:
            tokenizer.check_template()

    def render_text(self, row: Row, tokenizer: Tokenizer) -> str:
        key, row, _ = self._asked(row)
        if isinstance(row[key], str) and not self.as_chat:
            return plain_prompt(tokenizer, row, key)
        return tokenizer.dressed_text(
            conversation(row, key), row.get("tools"), add_generation_prompt=True
        )

    def _asked(self, row: Row) -> tuple[str, Row, tuple[str, ...]]:
        """Return (prompt column, row with that column, columns that the prompt consists of)."""
        key = first_of(row, (*prompt_keys(self.prompt_key), *MESSAGE_KEYS))
        used: tuple[str, ...] = ("chosen", "rejected")
        if (
            key is None
            and not self.prompt_key
            and all(isinstance(row.get(name), str) for name in used)
        ):
            key = "prompt"
            row = {**row, "prompt": _shared(row)}
        else:
            key = key or need_prompt(row, self.prompt_key, "prompt")
            used = (key, INPUT) if key == "instruction" else (key,)
        return key, row, used

    def encode(self, row: Row, tokenizer: Tokenizer) -> list[Encoded]:
        if is_tree(row):
            return [self._branch(row, path, tokenizer) for path in trees.prompts(row)]
        key, row, used = self._asked(row)
        columns = {
            name: plain(value)
            for name, value in row.items()
            if name not in (key, *used, self.id_key)
        }
        if isinstance(row[key], str) and not self.as_chat:
            if not row[key].strip():
                raise BadRow(f"{key!r} is empty")
            return [Encoded(tokenizer.encode(plain_prompt(tokenizer, row, key)), metadata=columns)]
        messages = conversation(row, key)
        ids, unused = tokenizer.encode_context(messages, row.get("tools"))
        if not ids:
            raise BadRow(f"the chat template renders {key!r} as nothing")
        if (
            not isinstance(row[key], str)
            and as_messages(row, key, "user")[-1]["role"] == "assistant"
        ):
            unused |= {f"{key}[] of the last reply"}
        return [Encoded(ids, metadata={**columns, MESSAGES: messages}, unused=unused)]

    def _branch(self, row: Row, path: Sequence[trees.Node], tokenizer: Tokenizer) -> Encoded:
        """Encode a path of a tree that ends with a prompter's message."""
        columns = {
            name: plain(value) for name, value in row.items() if name not in ("prompt", self.id_key)
        }
        messages = normalise(trees.messages(path))
        ids, unused = tokenizer.encode_context(messages)
        return Encoded(
            ids,
            metadata={**columns, MESSAGES: messages},
            part=path[-1]["message_id"],
            unused=unused,
        )


def _shared(row: Row) -> str:
    """Return the common beginning of two dialogues, up to and including the assistant's mark.

    Raises `BadRow` if they have none.
    """
    shared = dialogue.shared_prompt(text(row, "chosen"), text(row, "rejected"))
    if not shared.strip():
        raise BadRow(
            "'chosen' and 'rejected' share no beginning that ends with the assistant's turn"
        )
    return shared


@register_dataset("prompt")
class PromptDataset(TableDataset):
    """Rows `{prompt, ...}` as the key `prompt`; the other columns are metadata.

    `options`: prompt_key, id_key, as_chat, max_prompt_len, overlong (error when absent),
    truncate_side, max_seqlen.
    """

    form = Prompt
    usual: ClassVar[Mapping[str, Any]] = {"overlong": "error"}
