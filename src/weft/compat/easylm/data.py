"""EasyLM's dataset types that weft does not have otherwise.

| type | rows |
|---|---|
| `preference_json_torch` | `chosen` and `rejected` conversations; their last messages are trained |
| `tulu_prompt` | prompts in any of EasyLM's five columns |
| `hf_prompt` | `instruction` between a prefix and a suffix, which can differ for the reward model |
| `text_fields` | texts and tokens of columns, in order, with and without loss (`TextProcessor`) |

`imports=[weft.compat.easylm.data]` registers them in a run.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.data.columns import read_message_list
from weft.data.datasets.base import TableDataset, build_group
from weft.data.datasets.preference import PAIR
from weft.data.datasets.prompt import MESSAGES, PLAIN_TEXT
from weft.data.lengths import EncodedSample
from weft.data.messages import Message
from weft.data.rows import BadRow, Row, find_first_key, read_number, read_text, to_json_value
from weft.data.tokenizer import Tokenizer
from weft.data.turns import merge_omissions
from weft.errors import ConfigError
from weft.registry import register_dataset

REPLIES = ("chosen", "rejected")
# Columns of `tulu_prompt`, in the order in which EasyLM looks for them.
PROMPT_COLUMNS = ("instruction", "history_messages", "messages", "conversation", "chosen")
BASE64_TYPES = ("i2", "i4", "i8", "u2", "u4", "u8")


def copy_columns(row: Row, used: Sequence[str]) -> dict[str, Any]:
    """Return the row's columns except those in `used`, with values as in JSON."""
    return {name: to_json_value(value) for name, value in row.items() if name not in used}


# -- preferences


@dataclass(frozen=True)
class ConversationPairEncoder:
    """Row encoder for a chosen and a rejected conversation, each a list of messages.

    Only the last message of each conversation is trained; it must be the assistant's. The margin of
    the pair is read from the column `margin` with `use_margin`, and is 0 otherwise.
    """

    use_margin: bool = False
    id_key: str = "id"

    def check(self, tokenizer: Tokenizer) -> None:
        tokenizer.check_template()

    def encode(self, row: Row, tokenizer: Tokenizer) -> list[EncodedSample]:
        margin = 0.0
        if self.use_margin and row.get("margin") is not None:
            margin = read_number(row["margin"], "margin")
        conversations = []
        for key in REPLIES:
            if row.get(key) is None:
                raise BadRow(f"lacks the key {key!r}, a list of messages")
            messages = read_message_list(row, key)
            if messages[-1]["role"] != "assistant":
                raise BadRow(f"{key!r} must end with a message of the assistant")
            before = [{**message, "train": False} for message in messages[:-1]]
            conversations.append(tokenizer.mask_chat([*before, messages[-1]], row.get("tools")))
        sample = build_group(
            [each.ids for each in conversations],
            [each.mask for each in conversations],
            values={**PAIR, "margin": [margin] * 2},
            unused=frozenset().union(*(each.unused for each in conversations)),
            cut=merge_omissions(cut for each in conversations for cut in each.cut),
        )
        return [sample]


@register_dataset("preference_json_torch")
class ConversationPairDataset(TableDataset):
    """Dataset of rows `{chosen[{role, content}], rejected[{role, content}], margin?}`.

    The options are use_margin, id_key, max_seqlen, max_prompt_len, overlong and truncate_side.
    """

    form = ConversationPairEncoder


# -- prompts


@dataclass(frozen=True)
class TuluPromptEncoder:
    """Row encoder for prompts that the chat template renders, in any of EasyLM's five forms.

    The prompt is read from the first of these columns that the row has:

        instruction             a text
        history_messages        messages that end with the user's
        messages, conversation  messages; a reply at the end is left out
        chosen                  messages without the last one; the row must also have `rejected`
    """

    id_key: str = "id"

    def check(self, tokenizer: Tokenizer) -> None:
        tokenizer.check_template()

    def encode(self, row: Row, tokenizer: Tokenizer) -> list[EncodedSample]:
        key = find_first_key(row, PROMPT_COLUMNS)
        if key is None or (key == "chosen" and row.get("rejected") is None):
            names = ", ".join(PROMPT_COLUMNS[:-1])
            raise BadRow(f"has no prompt; its columns can be {names}, or chosen and rejected")
        messages = self._read_prompt(row, key)
        if not messages or messages[-1]["role"] != "user":
            raise BadRow(f"the prompt in {key!r} must end with a message of the user")
        ids, unused = tokenizer.encode_context(messages, row.get("tools"))
        columns = copy_columns(row, (key, self.id_key, *REPLIES))
        return [EncodedSample(ids, metadata={**columns, MESSAGES: messages}, unused=unused)]

    def _read_prompt(self, row: Row, key: str) -> list[Message]:
        """Return the messages of the prompt in column `key`, without a reply at the end."""
        if key == "instruction":
            return [{"role": "user", "content": read_text(row, key)}]
        messages = read_message_list(row, key)
        if key == "chosen":
            return messages[:-1]
        if key != "history_messages" and messages[-1]["role"] == "assistant":
            return messages[:-1]
        return messages


@register_dataset("tulu_prompt")
class TuluPromptDataset(TableDataset):
    """Dataset of EasyLM's prompts. All columns except the prompt become metadata.

    The options are id_key, max_prompt_len, overlong (default: truncate), truncate_side and
    max_seqlen.
    """

    form = TuluPromptEncoder


@dataclass(frozen=True)
class InstructionEncoder:
    """Row encoder for the text `instruction`, which the policy reads between `prefix` and `suffix`.

    The metadata has the text without them, for a reward model with another `prompt_prefix` or
    `prompt_suffix`.
    """

    prefix: str = "<|user|>\n"
    suffix: str = "\n<|assistant|>\n"
    id_key: str = "id"

    def check(self, tokenizer: Tokenizer) -> None:
        tokenizer.require_eos()

    def encode(self, row: Row, tokenizer: Tokenizer) -> list[EncodedSample]:
        if row.get("instruction") is None:
            raise BadRow("lacks the key 'instruction'")
        text = read_text(row, "instruction")
        ids = tokenizer.encode(self.prefix + text + self.suffix)
        columns = copy_columns(row, ("instruction", self.id_key))
        return [EncodedSample(ids, metadata={**columns, PLAIN_TEXT: text})]


@register_dataset("hf_prompt")
class InstructionDataset(TableDataset):
    """Dataset of rows `{instruction}`. All other columns become metadata.

    The options are prefix, suffix, id_key, max_prompt_len, overlong (default: truncate),
    truncate_side and max_seqlen.
    """

    form = InstructionEncoder


# -- text fields


@dataclass(frozen=True)
class TextFieldEncoder:
    """Row encoder for texts and tokens from several columns, like EasyLM's `TextProcessor`.

    `fields` names the parts of a sequence in order, separated by commas:

        name        the text in this column
        a+b         the texts in the columns a and b, joined by `subfield_separator`
        {name}      token ids in this column: base64 of numbers of the type `base64_token_dtype`
        <|bos|>     the beginning-of-sequence token
        <|eos|>     the end-of-sequence token
        <|123|>     the token with this id
        [part]      any of these, without loss

    A text after the first part is stripped and gets a leading space, unless the previous text ends
    with white space. With `fields_from_example`, this column has the names of the parts instead of
    `fields`. `prepend_text` comes before the text of the first part. `add_bos_token` and
    `add_eos_token` add these tokens to the sequence if it does not already begin or end with them.
    EOS is trained.
    """

    fields: str = "[prompt],completion"
    fields_from_example: str = ""
    subfield_separator: str = " "
    prepend_text: str = ""
    add_bos_token: bool = True
    add_eos_token: bool = True
    base64_token_dtype: str = "i4"
    id_key: str = "id"

    def __post_init__(self) -> None:
        if not self.fields and not self.fields_from_example:
            raise ConfigError(
                "dataset.args.fields: is empty; name columns, such as [prompt],answer"
            )
        if self.base64_token_dtype not in BASE64_TYPES:
            raise ConfigError(
                f"dataset.args.base64_token_dtype={self.base64_token_dtype!r}: must be one of "
                f"{', '.join(BASE64_TYPES)}"
            )

    def check(self, tokenizer: Tokenizer) -> None:
        tokenizer.require_eos()

    def encode(self, row: Row, tokenizer: Tokenizer) -> list[EncodedSample]:
        fields = self.fields
        if self.fields_from_example:
            fields = self._read_column(row, self.fields_from_example)
        ids: list[int] = []
        mask: list[bool] = []
        text_before = ""
        for index, field in enumerate(fields.split(",")):
            is_trained = not (field.startswith("[") and field.endswith("]"))
            name = field if is_trained else field[1:-1]
            if name.startswith("<|") and name.endswith("|>"):
                tokens = [self._read_token(name[2:-2], tokenizer)]
            elif name.startswith("{") and name.endswith("}"):
                tokens = self._decode_tokens(row, name[1:-1], tokenizer)
            else:
                parts = [self._read_column(row, part) for part in name.split("+")]
                text = self.subfield_separator.join(parts)
                if index == 0:
                    text = self.prepend_text + text
                elif not text_before.endswith((" ", "\n", "\t")):
                    text = " " + text.strip()
                tokens = tokenizer.encode(text, bos=False)
                text_before = text
            ids += tokens
            mask += [is_trained] * len(tokens)
        bos, eos = tokenizer.bos_id, tokenizer.require_eos()
        if self.add_bos_token and bos is not None and ids[:1] != [bos]:
            ids, mask = [bos, *ids], [False, *mask]
        if self.add_eos_token and ids[-1:] != [eos]:
            ids, mask = [*ids, eos], [*mask, True]
        return [build_group([ids], [mask])]

    def _read_column(self, row: Row, name: str) -> str:
        if row.get(name) is None:
            raise BadRow(f"lacks the key {name!r}, which dataset.args.fields names")
        return read_text(row, name, may_be_empty=True)

    def _read_token(self, name: str, tokenizer: Tokenizer) -> int:
        """Return the id of the token `bos` or `eos`, or the id that `name` is as a number."""
        if name == "eos":
            return tokenizer.require_eos()
        if name == "bos":
            if tokenizer.bos_id is None:
                raise BadRow("<|bos|>: the tokenizer has no beginning-of-sequence token")
            return tokenizer.bos_id
        if not name.isdecimal() or int(name) >= tokenizer.vocab_size:
            raise BadRow(
                f"<|{name}|>: must be <|bos|>, <|eos|>, or an id below {tokenizer.vocab_size}"
            )
        return int(name)

    def _decode_tokens(self, row: Row, name: str, tokenizer: Tokenizer) -> list[int]:
        """Return the token ids that a column has as base64."""
        try:
            data = base64.b64decode(self._read_column(row, name), validate=True)
            tokens = np.frombuffer(data, dtype=f"<{self.base64_token_dtype}").tolist()
        except (binascii.Error, ValueError) as error:
            raise BadRow(
                f"{name!r} is not base64 of {self.base64_token_dtype} numbers: {error}"
            ) from error
        if any(not 0 <= token < tokenizer.vocab_size for token in tokens):
            raise BadRow(f"{name!r} holds ids that the tokenizer does not have")
        return [int(token) for token in tokens]


@register_dataset("text_fields")
class TextFieldDataset(TableDataset):
    """Dataset of rows whose columns `fields` names.

    The options are those of `TextFieldEncoder`, max_seqlen, max_prompt_len, overlong and
    truncate_side.
    """

    form = TextFieldEncoder
