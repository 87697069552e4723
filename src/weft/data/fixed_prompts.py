"""Fixed prompts for evaluation, read from a file and tokenized like the rows of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from weft.data.datasets.prompt import PromptEncoder
from weft.data.rows import BadRow
from weft.data.sample import SequenceSample
from weft.data.sources import UnreadableRow, find_files, read_rows
from weft.data.tokenizer import Tokenizer
from weft.errors import DataError
from weft.reading import check_file, explain_read_errors

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
    file = Path(path).expanduser()
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
    most: int | None,
    option: str = "eval_prompts",
) -> SequenceSample:
    """Return the tokenized prompts of a file as one `SequenceSample` with the key `prompt`.

    The ids are 0, 1, 2, ... in file order. A prompt is a text or a list of messages. Messages are
    rendered with the chat template. A text is rendered as a user message if `as_chat` is True, and
    not rendered otherwise. `most` is the maximum number of tokens of a prompt.

    Raises `DataError` if a prompt is invalid or too long. The message names the option `option`.
    """
    tokens: list[list[int]] = []
    wrong: list[str] = []
    for place, row in read_prompt_rows(path):
        try:
            ids = _encode_prompt(row, tokenizer, as_chat=as_chat)
            if most is not None and len(ids) > most:
                raise BadRow(
                    f"the prompt has {len(ids):,} tokens, and the model's context leaves {most:,} "
                    f"for it"
                )
            tokens.append(ids)
        except (BadRow, DataError) as error:
            wrong.append(f"{place}: {error}")
            if len(wrong) == MAX_REPORTED:
                break
    if wrong:
        raise DataError("\n".join([f"{option}={path}: these rows are not valid prompts:", *wrong]))
    if not tokens:
        raise DataError(f"{option}={path}: there are no prompts in it")
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
