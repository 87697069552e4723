"""Dataset type `prompt`: prompts to complete, and fixed prompts for evaluation.

All other columns of a row are kept for rewards and verifiers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from weft.data import columns, trees
from weft.data.columns import (
    INPUT,
    list_prompt_keys,
    read_conversation,
    read_messages,
    require_prompt_key,
)
from weft.data.datasets.base import TableDataset, read_plain_prompt
from weft.data.lengths import EncodedSample
from weft.data.messages import normalize_messages
from weft.data.rows import (
    MESSAGE_KEYS,
    BadRow,
    Row,
    find_first_key,
    is_tree,
    read_text,
    to_json_value,
)
from weft.data.sample import SequenceSample
from weft.data.sources import UnreadableRow, find_files, read_rows
from weft.data.tokenizer import Tokenizer
from weft.errors import DataError
from weft.reading import check_file, explain_read_errors
from weft.registry import register_dataset
from weft.storage.buckets import is_remote
from weft.storage.copies import copy_file

# metadata: a prompt's messages, for roles that render them differently
MESSAGES = "prompt_messages"
# metadata: a prompt's text without the form of the actor, for roles with `prompt_prefix` or
# `prompt_suffix`
PLAIN_TEXT = "prompt_text"


@dataclass(frozen=True)
class PromptEncoder:
    r"""Row encoder for prompts that the model completes by generation.

    A prompt is a text, or a list of messages that is rendered with the template's generation
    prompt. With `as_chat`, a text is rendered as the user's message. The messages of a rendered
    prompt are saved in the metadata as `prompt_messages`.

    In a preference row in the `\n\nHuman:` format, the prompt is the common prefix of the two
    dialogues, up to the last `\n\nAssistant:`. An Open-Assistant tree gives one prompt for each
    message of a prompter (a human user).
    """

    prompt_key: str | None = None
    id_key: str = "id"
    as_chat: bool = False

    def check(self, tokenizer: Tokenizer) -> None:
        if self.as_chat:
            tokenizer.check_template()

    def render_text(self, row: Row, tokenizer: Tokenizer) -> str:
        key, row, _ = self._find_prompt(row)
        if isinstance(row[key], str) and not self.as_chat:
            return read_plain_prompt(tokenizer, row, key)
        return tokenizer.render_with_additions(
            read_conversation(row, key), row.get("tools"), add_generation_prompt=True
        )

    def _find_prompt(self, row: Row) -> tuple[str, Row, tuple[str, ...]]:
        """Return (prompt column, row, names of the columns that the prompt is read from).

        If the prompt is the common prefix of the columns `chosen` and `rejected`, it is added to
        the returned row as the column `prompt`. Otherwise the row is returned unchanged.
        """
        key = find_first_key(row, (*list_prompt_keys(self.prompt_key), *MESSAGE_KEYS))
        used: tuple[str, ...] = ("chosen", "rejected")
        if (
            key is None
            and not self.prompt_key
            and all(isinstance(row.get(name), str) for name in used)
        ):
            key = "prompt"
            row = {**row, "prompt": _find_shared_prompt(row)}
        else:
            key = key or require_prompt_key(row, self.prompt_key, "prompt")
            used = (key, INPUT) if key == "instruction" else (key,)
        return key, row, used

    def encode(self, row: Row, tokenizer: Tokenizer) -> list[EncodedSample]:
        if is_tree(row):
            result: list[EncodedSample] = []
            for path in trees.iterate_prompts(row):
                result.append(self._encode_branch(row, path, tokenizer))
            return result
        key, row, used = self._find_prompt(row)
        columns = {}
        for name, value in row.items():
            if name not in (key, *used, self.id_key):
                columns[name] = to_json_value(value)
        if isinstance(row[key], str) and not self.as_chat:
            if not row[key].strip():
                raise BadRow(f"{key!r} is empty")
            return [
                EncodedSample(
                    tokenizer.encode(read_plain_prompt(tokenizer, row, key)), metadata=columns
                )
            ]
        messages = read_conversation(row, key)
        ids, unused = tokenizer.encode_context(messages, row.get("tools"))
        if not ids:
            raise BadRow(f"the chat template renders {key!r} as nothing")
        if (
            not isinstance(row[key], str)
            and read_messages(row, key, "user")[-1]["role"] == "assistant"
        ):
            unused |= {f"{key}[] of the last reply"}
        return [EncodedSample(ids, metadata={**columns, MESSAGES: messages}, unused=unused)]

    def _encode_branch(
        self, row: Row, path: Sequence[trees.Node], tokenizer: Tokenizer
    ) -> EncodedSample:
        """Encode the messages along `path` in a message tree as a prompt.

        The path begins at the root and ends with a message of a prompter (a human user).
        """
        columns = {}
        for name, value in row.items():
            if name not in ("prompt", self.id_key):
                columns[name] = to_json_value(value)
        messages = normalize_messages(trees.to_messages(path))
        ids, unused = tokenizer.encode_context(messages)
        return EncodedSample(
            ids,
            metadata={**columns, MESSAGES: messages},
            part=path[-1]["message_id"],
            unused=unused,
        )


def _find_shared_prompt(row: Row) -> str:
    """Return the common prefix of a row's two dialogues, which ends with `\\n\\nAssistant:`.

    Raises `BadRow` if the dialogues have no common prefix.
    """
    shared = columns.find_shared_prompt(read_text(row, "chosen"), read_text(row, "rejected"))
    if not shared.strip():
        raise BadRow(
            "'chosen' and 'rejected' share no beginning that ends with the assistant's turn"
        )
    return shared


@register_dataset("prompt")
class PromptDataset(TableDataset):
    """Dataset of rows `{prompt, ...}`. All columns except the prompt become metadata.

    A sample has the key `prompt`. The options are prompt_key, id_key, as_chat, max_prompt_len,
    overlong (default: error), truncate_side and max_seqlen.
    """

    form = PromptEncoder
    default_options: ClassVar[Mapping[str, Any]] = {"overlong": "error"}


MAX_REPORTED = 20  # maximum number of invalid rows in an error message
TEXT = (".txt", ".text")


def read_prompt_rows(path: str) -> Iterator[tuple[str, Any]]:
    """Yield (location, row) for each prompt in a file.

    The file is JSON, JSONL(.gz) or Parquet. A JSON row can be a single string, which is the prompt.
    In a .txt file, each line is a prompt.
    """
    if path.endswith(TEXT):
        yield from _read_texts(path)
        return
    for file in find_files(path):
        for place, row in read_rows(file, texts_as="prompt"):
            yield str(place), row


def _read_texts(path: str) -> Iterator[tuple[str, Any]]:
    file = copy_file(path, kind=DataError) if is_remote(path) else Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"{path}: no such file")
    check_file(file, path, DataError)
    with explain_read_errors(path, DataError, "name a file of text"):
        lines = file.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield f"{path}:{number}", {"prompt": line}


def read_fixed_prompts(
    path: str,
    tokenizer: Tokenizer,
    *,
    as_chat: bool,
    max_tokens: int | None,
) -> SequenceSample:
    """Return the tokenized prompts of a file as one `SequenceSample` with the key `prompt`.

    The ids are 0, 1, 2, ... in file order. A prompt is a text or a list of messages. Messages are
    rendered with the chat template. A text is rendered as a user message if `as_chat` is True, and
    not rendered otherwise. `max_tokens` is the limit for each prompt (None: no limit).

    Raises `DataError` if a prompt is invalid or too long. The message names the option
    `eval_prompts`.
    """
    tokens: list[list[int]] = []
    problems: list[str] = []
    for place, row in read_prompt_rows(path):
        try:
            ids = _encode_prompt(row, tokenizer, as_chat=as_chat)
            if max_tokens is not None and len(ids) > max_tokens:
                raise BadRow(
                    f"the prompt has {len(ids):,} tokens, and the model's context leaves "
                    f"{max_tokens:,} for it"
                )
            tokens.append(ids)
        except (BadRow, DataError) as error:
            problems.append(f"{place}: {error}")
            if len(problems) == MAX_REPORTED:
                break
    if problems:
        raise DataError(
            "\n".join([f"eval_prompts={path}: these rows are not valid prompts:", *problems])
        )
    if not tokens:
        raise DataError(f"eval_prompts={path}: there are no prompts in it")
    lengths = [len(ids) for ids in tokens]
    flat = np.array([id for ids in tokens for id in ids], dtype=np.int64)
    names = [str(number) for number in range(len(tokens))]
    return SequenceSample.from_default(names, {"prompt": lengths}, {"prompt": flat})


def _encode_prompt(row: Any, tokenizer: Tokenizer, *, as_chat: bool) -> list[int]:
    if isinstance(row, UnreadableRow):
        raise BadRow(row.reason)
    if not isinstance(row, Mapping):
        raise BadRow("it is not a JSON object")
    (encoded,) = PromptEncoder(as_chat=as_chat).encode(row, tokenizer)
    return list(encoded.prompt)
