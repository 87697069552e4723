"""Interfaces of dataset classes, base class of built-in types, and samples that vary by epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar, Protocol, TypeGuard, get_type_hints, runtime_checkable

from weft.data import columns
from weft.data.background_table import BackgroundTokenTable
from weft.data.background_tokenizing import tokenize_in_background
from weft.data.columns import Columns, read_conversation, read_prompt_text, read_renamed_rows
from weft.data.lengths import EncodedSample, LengthLimits, RandomWindow, fit_to_limits
from weft.data.messages import CONTEXT, FACTS, REASONING, Message
from weft.data.mixture import make_generator
from weft.data.rows import BadRow, Row
from weft.data.sample import SequenceSample
from weft.data.sources import UnreadableRow
from weft.data.table import TokenizationReport, TokenTable
from weft.data.tokenizer import Tokenizer
from weft.data.tokenizing import (
    EncodingJob,
    Reporter,
    RowEncoder,
    RowSource,
    show_progress,
    tokenize,
)
from weft.data.turns import count_common_prefix, merge_omissions
from weft.errors import ConfigError, DataError, find_nearest
from weft.options import coerce

BAD_REPLIES_COLUMN = "augmented"  # column of bad replies; every epoch draws one of them


@dataclass(frozen=True)
class DatasetUtility:
    """Settings that weft passes to every dataset class as `cls(util=DatasetUtility(...), **args)`.

    One process reads the data for all devices, so `rank` is always 0 and `world_size` is always 1.

    Attributes:
        tokenizer: tokenizer for the rows
        seed: seed for all random numbers that a dataset class draws
        rank: rank of the reading process
        world_size: number of reading processes
        cache_dir: folder for the cache of tokenized rows; None means the default folder
        num_workers: number of tokenizing processes; None means one per core for large files, and
            no extra processes for small files
        progress: function that returns a context manager showing progress
        random_window: probability that a row that is too long is cut to a random window instead of
            its beginning
        columns: columns to rename, as {name in the dataset type: name in the file}
        name: name to show in messages if the source is a named dataset, otherwise empty
        max_samples: number of samples after which reading stops; None means no limit
        ahead: True if large files may be tokenized during training
    """

    tokenizer: Tokenizer
    seed: int = 1
    rank: int = 0
    world_size: int = 1
    cache_dir: str | None = None
    num_workers: int | None = None
    progress: Reporter = show_progress
    random_window: float = 0.0
    columns: Columns = field(default_factory=dict)
    name: str = ""
    max_samples: int | None = None
    ahead: bool = False

    @property
    def differs_by_epoch(self) -> bool:
        """True if random draws make the samples differ from epoch to epoch."""
        return self.random_window > 0 or self.tokenizer.additions.tags

    def build_source(self, path: str, split: str | None) -> RowSource:
        """Return a source that reads `path` with these settings."""
        return RowSource(
            path,
            split,
            cache_dir=self.cache_dir,
            num_workers=self.num_workers,
            progress=self.progress,
            columns=self.columns,
            name=self.name,
            max_samples=self.max_samples,
        )


@runtime_checkable
class MapDataset(Protocol):
    """Dataset with random access: `__getitem__` returns the sample at an index.

    Each sample is a `SequenceSample` of one id. The same index always returns the same sample.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> SequenceSample: ...


def is_by_index(dataset: Any) -> TypeGuard[MapDataset]:
    """Return whether a dataset has random access to its samples.

    The result is False for a torch `IterableDataset`. Such a dataset inherits a `__getitem__`
    method, but that method only raises an error.
    """
    bases = ((base.__module__, base.__name__) for base in type(dataset).__mro__)
    return (
        isinstance(dataset, MapDataset)
        and ("torch.utils.data.dataset", "IterableDataset") not in bases
    )


@runtime_checkable
class StreamDataset(Protocol):
    """Dataset that yields whole batches.

    Every `iter()` begins a new epoch with the same batches.
    """

    def __iter__(self) -> Iterator[SequenceSample]: ...


@runtime_checkable
class ResumableStream(Protocol):
    """Dataset that yields whole batches and can continue at any of them.

    Each `iter()` continues after the last batch. An epoch has `len(dataset)` batches with
    `num_ids` samples in total, which are known without reading them.
    """

    @property
    def num_ids(self) -> int: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[SequenceSample]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


@runtime_checkable
class TokenizedDataset(Protocol):
    """Dataset whose rows weft itself tokenizes.

    Attributes:
        form: class of the row encoder, which converts rows to samples
        table: table of all samples
    """

    form: type[RowEncoder]
    table: TokenTable | BackgroundTokenTable


def build_table(
    form: type[RowEncoder],
    util: DatasetUtility,
    path: str,
    split: str | None,
    options: dict[str, Any],
) -> tuple[TokenTable | BackgroundTokenTable, EpochSamples | None]:
    """Tokenize the rows of a built-in dataset type and return (table, epoch samples).

    The second value is an `EpochSamples` if the samples differ between epochs, else None. `options`
    are fields of `form` and of `LengthLimits`. Raises `ConfigError` for an unknown option, and
    `DataError` for rows that cannot be used.
    """
    source = util.build_source(path, split)
    job = EncodingJob(*split_options(form, options), util.tokenizer)
    if util.ahead and not util.differs_by_epoch:
        ahead = tokenize_in_background(job.form, job.lengths, job.tokenizer, source)
        if isinstance(ahead, BackgroundTokenTable):
            return ahead, None
        table = ahead
    else:
        table = tokenize(job.form, job.lengths, job.tokenizer, source)
    if not (util.differs_by_epoch or BAD_REPLIES_COLUMN in table.report.read):
        return table, None
    return table, EpochSamples(job, source, table, util.seed, _build_window(util, job.lengths))


def _build_window(util: DatasetUtility, lengths: LengthLimits) -> RandomWindow | None:
    """Return the random window for rows that are too long, or None if random windows are disabled.

    Raises `ConfigError` if `dataset.system_prefix` cannot be kept in front of a window because the
    chat template does not render a conversation that has only a system message.
    """
    if not util.random_window or lengths.max_seqlen is None:
        return None
    tokenizer = util.tokenizer
    head = list[int]()
    if tokenizer.additions.prefix is not None:
        system_only = [{"role": "system", "content": tokenizer.additions.prefix}]
        try:
            is_rendered = tokenizer.additions.prefix.strip() in tokenizer.render(system_only)
        except DataError:
            is_rendered = False
        if not is_rendered:
            raise ConfigError(
                f"dataset.random_window keeps dataset.system_prefix in front, and the chat "
                f"template of {tokenizer.name} writes "
                f"no system message by itself; use one that does "
                f"({tokenizer.option}.chat_template=chatml), or leave one out"
            )
        head = tokenizer.encode_chat(system_only)
    return RandomWindow(lengths.max_seqlen, util.random_window, head, tokenizer.bos_id)


def split_options(
    form: type[RowEncoder], options: dict[str, Any]
) -> tuple[RowEncoder, LengthLimits]:
    """Build a row encoder of the class `form` and its length limits from `options`.

    Raises `ConfigError` for options that neither of them has, and for values of the wrong type.
    """
    form_options = {spec.name for spec in fields(form)}
    length_options = {spec.name for spec in fields(LengthLimits)}
    for name in options:
        if name not in form_options | length_options:
            close = find_nearest(name, form_options | length_options)
            if close:
                hint = f"did you mean {' or '.join(close)}?"
            else:
                hint = f"known: {', '.join(sorted(form_options))}"
            raise ConfigError(f"dataset.args.{name}={options[name]!r}: no such argument; {hint}")
    hints = {**get_type_hints(LengthLimits), **get_type_hints(form)}
    values = {}
    for name, value in options.items():
        values[name] = coerce(value, hints[name], f"dataset.args.{name}")
    encoder = form(**{name: value for name, value in values.items() if name in form_options})
    return encoder, LengthLimits(
        **{name: value for name, value in values.items() if name in length_options}
    )


class TableDataset:
    """Base class of the built-in dataset types, whose samples have one id each.

    A subclass sets `form` to the class of its row encoder. The constructor's `options` set fields
    of this class and of `LengthLimits`. A subclass can change the defaults of these fields in
    `default_options`.
    """

    form: ClassVar[type[RowEncoder]]
    default_options: ClassVar[Mapping[str, Any]] = {}

    def __init__(
        self, util: DatasetUtility, path: str, split: str | None = None, **options: Any
    ) -> None:
        set_options = {}
        for name, value in options.items():
            if value is not None or name not in self.default_options:
                set_options[name] = value
        self.table: TokenTable | BackgroundTokenTable
        self.table, self.epoch_samples = build_table(
            self.form, util, path, split, {**self.default_options, **set_options}
        )

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> SequenceSample:
        return self.table[index]


# -- encoding of texts and conversations


def check_form(tokenizer: Tokenizer, *, as_chat: bool) -> None:
    """Raise `UserError` if the tokenizer has no EOS or, with `as_chat`, no chat template."""
    tokenizer.require_eos()
    if as_chat:
        tokenizer.require_chat_template()


def encode_with_eos(tokenizer: Tokenizer, content: str) -> list[int]:
    """Return the token ids of a text, with exactly one EOS at the end."""
    ids = tokenizer.encode(content)
    eos = tokenizer.require_eos()
    return ids if ids and ids[-1] == eos else [*ids, eos]


def build_answer_group(
    prompt: Sequence[int], sequences: Sequence[list[int]], **more: Any
) -> EncodedSample:
    """Build a sample from token sequences that each consist of a prompt and an answer.

    Only the answer is trained on: the tokens after the longest common prefix of the sequence and
    `prompt`. A token that spans the end of the prompt and the beginning of the answer is therefore
    part of the answer. `more` are other fields of `EncodedSample`.
    """
    bounds = [count_common_prefix(prompt, sequence) for sequence in sequences]
    masks = []
    for ids, bound in zip(sequences, bounds, strict=True):
        masks.append([index >= bound for index in range(len(ids))])
    return build_group(sequences, masks, **more)


def encode_replies(
    tokenizer: Tokenizer,
    row: Row,
    key: str,
    replies: Sequence[str],
    *,
    as_chat: bool = False,
    **more: Any,
) -> EncodedSample:
    r"""Encode replies to the prompt in column `key` as one sample with a completion per reply.

    Each sequence consists of the prompt, a reply and EOS. A prompt of messages is rendered by the
    chat template, with the reply as the assistant's turn. With `as_chat`, a text prompt is also
    rendered, as a user message. A text in the `\n\nHuman:` format is then split into several
    messages, and whitespace around these messages and the reply is removed. `more` are other fields
    of `EncodedSample`.
    """
    if as_chat or not isinstance(row[key], str):
        turns = [[_build_turn(tokenizer, row, key, reply)] for reply in replies]
        return encode_continuations(
            tokenizer, read_conversation(row, key), turns, row.get("tools"), **more
        )
    prompt = read_plain_prompt(tokenizer, row, key)
    if tokenizer.additions.label_masking:
        before = tokenizer.encode(prompt)
    else:
        before = tokenizer.encode(prompt)[:1]
    return build_answer_group(
        before, [encode_with_eos(tokenizer, prompt + reply) for reply in replies], **more
    )


def render_reply(
    tokenizer: Tokenizer, row: Row, key: str, reply: str, *, as_chat: bool = False
) -> str:
    """Return the text of the prompt in column `key`, followed by a reply.

    This is the text that `encode_replies` tokenizes for the reply. The chat template renders
    prompts that are messages and, with `as_chat`, also those that are text.
    """
    if as_chat or not isinstance(row[key], str):
        return tokenizer.render_with_additions(
            [*read_conversation(row, key), _build_turn(tokenizer, row, key, reply)],
            row.get("tools"),
        )
    return read_plain_prompt(tokenizer, row, key) + reply


def _build_turn(tokenizer: Tokenizer, row: Row, key: str, reply: str) -> Message:
    """Build the assistant's message for a reply to the prompt in column `key`."""
    if isinstance(row[key], str) and columns.HUMAN in row[key]:
        reply = reply.strip()
    if tokenizer.additions.tags:
        facts = {}
        for name in (*FACTS, CONTEXT):
            if row.get(name) is not None:
                facts[name] = row[name]
    else:
        facts = {}
    return {"role": "assistant", "content": reply, **facts}


def read_plain_prompt(tokenizer: Tokenizer, row: Row, key: str) -> str:
    """Return the prompt in column `key` as plain text.

    Raises `BadRow` if an option adds a system message, which only a conversation can have.
    """
    for option, value in (
        ("system_prefix", tokenizer.additions.prefix),
        ("system_tags", tokenizer.additions.tags),
    ):
        if value:
            raise BadRow(
                f"{key!r} is plain text, and dataset.{option} belongs to conversations; set "
                f"dataset.args.as_chat=true, or "
                f"leave {option} out"
            )
    return read_prompt_text(row, key)


def build_group(
    sequences: Sequence[list[int]], masks: Sequence[list[bool]], **more: Any
) -> EncodedSample:
    """Build a sample from whole sequences and their masks, which are True on trained tokens.

    The prompt of the sample is the longest common prefix of the sequences that contains no trained
    token. Tokens after the last trained token of a sequence are left out. `more` are other fields
    of `EncodedSample`. Raises `BadRow` if a sequence has no trained token.
    """
    if not all(any(mask) for mask in masks):
        raise BadRow("nothing in it is to be learned: no turn of the assistant, or an empty one")
    if sequences:
        shared = min(count_common_prefix(*sequences), *(mask.index(True) for mask in masks))
    else:
        shared = 0
    stops = [len(mask) - mask[::-1].index(True) for mask in masks]
    return EncodedSample(
        list(sequences[0][:shared]),
        [sequence[shared:stop] for sequence, stop in zip(sequences, stops, strict=True)],
        [mask[shared:stop] for mask, stop in zip(masks, stops, strict=True)],
        **more,
    )


def encode_continuations(
    tokenizer: Tokenizer,
    context: Sequence[Message],
    replies: Sequence[Sequence[Message]],
    tools: Any,
    *,
    may_be_empty: bool = False,
    **more: Any,
) -> EncodedSample:
    """Encode several continuations of the conversation `context` as one sample.

    Only the continuations in `replies` are trained; each of them is a completion. With
    `may_be_empty`, the last turn may have no content, and its end token is trained. `more` are
    other fields of `EncodedSample`. Raises `BadRow` if a continuation has no assistant turn, or if
    an assistant turn that must have content is empty.
    """
    conversations = []
    for number, reply in enumerate(replies, 1):
        label = f" of continuation {number}" if len(replies) > 1 else ""
        check_replies(reply, label, may_be_empty=may_be_empty)
        before = [{**message, "train": False} for message in context]
        conversations.append(tokenizer.mask_chat([*before, *reply], tools))
    unused = frozenset().union(*(conversation.unused for conversation in conversations))
    cut = merge_omissions(cut for conversation in conversations for cut in conversation.cut)
    return build_group(
        [conversation.ids for conversation in conversations],
        [conversation.mask for conversation in conversations],
        unused=unused,
        cut=cut,
        **more,
    )


def check_replies(
    messages: Sequence[Message], where: str = "", *, may_be_empty: bool = False
) -> None:
    """Raise `BadRow` if there is no assistant turn, or if an assistant turn has no content.

    With `may_be_empty`, the last turn may have no content. `where` is added to the error message.
    """
    turns = [m for m in messages if m["role"] == "assistant"]
    if not turns:
        raise BadRow(f"there is no turn of the assistant{where}")
    for number, message in enumerate(messages, 1):
        content = message["content"].strip() or message.get("tool_calls") or message.get(REASONING)
        if (
            message["role"] == "assistant"
            and not content
            and not (may_be_empty and number == len(messages))
        ):
            raise BadRow(f"message {number}{where}: the assistant's content is empty")


@runtime_checkable
class PartEncoder(Protocol):
    """Row encoder that can make several samples from a row and encode each of them separately."""

    def encode_part(self, row: Row, tokenizer: Tokenizer, id: str) -> EncodedSample: ...


@dataclass(frozen=True)
class EpochSamples:
    """Samples that are encoded again in each epoch, because their encoding is partly random.

    For example, a long row can be cropped to a different window in each epoch.

    Attributes:
        job: encoder, length limits and tokenizer for the rows
        source: source of the rows
        table: the same samples, encoded without random choices; their token counts are upper bounds
            of the counts in all epochs
        seed: seed of the random choices
        window: random cropper for rows that are too long, or None
    """

    job: EncodingJob
    source: RowSource
    table: TokenTable
    seed: int
    window: RandomWindow | None

    def take(self, indices: Sequence[int], epoch: int, name: str) -> SequenceSample:
        """Return the samples at `indices`, encoded for `epoch`, as one `SequenceSample`.

        The random draws for a sample depend on the seed, the epoch, the sample id and `name`, the
        name of the source.
        """
        encoded = [self._encode(index, epoch, name) for index in indices]
        ids = [self.table.sample.ids[index] for index in indices]
        return TokenTable.from_rows(ids, encoded, [0] * len(ids), TokenizationReport()).take(
            range(len(ids))
        )

    def _encode(self, index: int, epoch: int, name: str) -> EncodedSample:
        id = self.table.sample.ids[index]
        row = self._source_rows[int(self.table.rows[index])]
        draw = make_generator(self.seed, f"sample|{name}|{id}", epoch)
        encoded = self._encode_sample(row, id, self.job.tokenizer.with_draw(draw))
        if self.window is not None:
            encoded = self.window.apply(encoded, draw)
        sample, _ = fit_to_limits(encoded, self.job.lengths, self.job.tokenizer.bos_id)
        return self.table.get_encoded(index) if sample is None else sample

    def _encode_sample(self, row: Row, id: str, tokenizer: Tokenizer) -> EncodedSample:
        form = self.job.form
        if isinstance(form, PartEncoder):
            return form.encode_part(row, tokenizer, id)
        samples: list[EncodedSample] = form.encode(row, tokenizer)
        return next(
            sample for sample in samples if not sample.part or id.endswith(f"/{sample.part}")
        )

    @cached_property
    def _source_rows(self) -> list[Row]:
        source = self.source
        rows: list[Any] = []
        for _, row in read_renamed_rows(source.path, source.split, source.columns):
            rows.append(row)
        return [{} if isinstance(row, UnreadableRow) else row for row in rows]
