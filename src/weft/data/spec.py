"""Options of tokenizers and datasets, as plain dataclasses, and the named chat templates.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from weft.errors import ConfigError, find_nearest
from weft.options import option
from weft.reading import find_url_problem
from weft.storage.buckets import find_bucket_problem

OVERLONG = ("truncate", "drop", "error")


@dataclass
class TokenizerSpec:
    path: str | None = option(
        None,
        "HF directory, tokenizer.json or sentencepiece tokenizer.model, also gs://BUCKET/FILE; absent: "
        "the model's own",
    )
    chat_template: str | None = option(
        None,
        "name of a template (oasst, oasst_v25, chatml, llama3, mistral, gemma, zephyr, tulu, "
        "vicuna, alpaca), a jinja file, or "
        "the template itself; absent: the tokenizer's own",
    )
    add_tokens: list[str] = option(
        [],
        "special tokens to add to the vocabulary; the word template adds the tokens of the "
        "named chat_template. "
        "Embeddings and output matrix grow to a multiple of 16; new rows are initialized to the "
        "mean of the old ones",
        check=lambda tokens: (
            None if all(map(str.strip, tokens)) else "holds an empty token; take it out"
        ),
    )
    per_digit_tokens: bool = option(False, "make every digit a separate token")
    bos_token: str | None = option(None, "token that begins a sequence; must be in the vocabulary")
    eos_token: str | None = option(None, "token that ends a completion; must be in the vocabulary")
    pad_token: str | None = option(
        None,
        "padding token, saved for other programs (weft does not pad); must be in the vocabulary",
    )
    sep_token: str | None = option(None, "separator token; must be in the vocabulary")
    add_bos_token: bool | None = option(
        None, "begin every sequence with bos_token; absent: the tokenizer's default"
    )


@dataclass(frozen=True)
class SourceSpec:
    """Source of training rows: one entry of `dataset.sources` or `dataset.named`.

    At most one of `fraction`, `size` and `weight` is set. If none is set, all rows are used. With
    `fraction` or `size`, every epoch draws a different subset of that size. `weight` is the
    source's share of the mixture, relative to the other weights. With weights, the length of an
    epoch is limited by the first source that runs out of rows, since no row is repeated.
    """

    path: str = ""
    # Name of a dataset in the catalogue (`weft.data.named`); `path` is then a local copy of it.
    named: str | None = None
    type: str | None = None  # dataset type; None: the type of the experiment
    name: str | None = None  # prefix of ids, and name in metrics; None: the file's stem
    fraction: float | None = None
    size: int | None = None
    weight: float | None = None
    split: str | None = None  # split whose files are read, in a directory or on the hub
    args: Mapping[str, Any] = field(default_factory=dict)
    # Column name of the dataset type -> column of the file; overrides `dataset.columns`.
    columns: Mapping[str, str] = field(default_factory=dict)
    valid_path: str | None = None
    valid_split: float | None = None  # share held out for validation; None: `dataset.valid_split`
    max_valid: int | None = None  # maximum number of rows of the validation set

    @classmethod
    def parse(cls, value: Any, where: str) -> SourceSpec:
        """Parse one source, given as a mapping or as a path.

        Raises `ConfigError` naming the option `where` for unknown keys, wrong types and invalid
        values.
        """
        if isinstance(value, str):
            value = {"path": value}
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"{where}={value!r}: each source is a mapping such as {{path: FILE, fraction: 0.5}}"
            )
        known = [spec.name for spec in fields(cls)]
        for key in value:
            if key not in known:
                close = find_nearest(str(key), known)
                if close:
                    hint = f"did you mean {' or '.join(close)}?"
                else:
                    hint = f"known: {', '.join(known)}"
                raise ConfigError(f"{where}: unknown key {key!r}; {hint}")
        if not isinstance(value.get("named") or value.get("path"), str):
            raise ConfigError(
                f"{where}: path is missing; every source names a file, a directory, a hub name, "
                f"or is `named`: a dataset "
                "known by name"
            )
        source = cls(**{key: item for key, item in value.items() if item is not None})
        source.check(where)
        return source

    def check(self, where: str) -> None:
        # Numbers of rows.
        shares = []
        for name in ("fraction", "size", "weight"):
            if getattr(self, name) is not None:
                shares.append(name)
        if len(shares) > 1:
            raise ConfigError(
                f"{where}: {' and '.join(shares)} exclude each other; set one of them"
            )
        for name in (*shares, "valid_split"):
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int | float)
            ):
                raise ConfigError(f"{where}.{name}={value!r}: must be a number")
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise ConfigError(
                f"{where}.fraction={self.fraction}: must be above 0 and at most 1; use weight "
                f"to use a source more often"
            )
        if self.size is not None and not (1 <= self.size < 2**63 and self.size == int(self.size)):
            raise ConfigError(
                f"{where}.size={self.size}: must be a whole number of rows, at least 1"
            )
        if self.weight is not None and not 0 < self.weight < float("inf"):
            raise ConfigError(
                f"{where}.weight={self.weight}: must be above 0; leave the source out to give it "
                f"none"
            )
        if self.valid_split is not None and not 0 <= self.valid_split < 1:
            raise ConfigError(
                f"{where}.valid_split={self.valid_split}: must be at least 0 and below 1"
            )
        if self.max_valid is not None and (
            isinstance(self.max_valid, bool) or not isinstance(self.max_valid, int)
        ):
            raise ConfigError(
                f"{where}.max_valid={self.max_valid!r}: must be a whole number of rows"
            )
        if self.max_valid is not None and self.max_valid < 1:
            raise ConfigError(
                f"{where}.max_valid={self.max_valid}: must be at least 1; set valid_split=0 for "
                f"no validation"
            )
        # Names, paths and mappings.
        if self.named is not None and (
            self.type is not None or self.split is not None or self.columns
        ):
            raise ConfigError(
                f"{where}: named={self.named!r} says what its rows are; leave out type, split and "
                f"columns"
            )
        for name in ("path", "valid_path"):
            problem = find_bucket_problem(str(getattr(self, name) or ""))
            if problem is not None:
                raise ConfigError(f"{where}.{name}={getattr(self, name)!r}: {problem}")
        problem = find_columns_problem(self.columns)
        if problem:
            raise ConfigError(f"{where}.columns={self.columns!r}: {problem}")
        if not isinstance(self.args, Mapping):
            raise ConfigError(
                f"{where}.args={self.args!r}: must be a mapping of arguments of the dataset class"
            )


def list_source_specs(spec: DatasetSpec) -> list[SourceSpec]:
    """Return the parsed sources of `dataset.sources` and `dataset.named`.

    Raises `ConfigError` naming the invalid source.
    """
    listed = [] if spec.sources is None else parse_sources(spec.sources)
    return check_weights([*listed, *([] if spec.named is None else parse_named(spec.named))])


def check_weights(sources: list[SourceSpec]) -> list[SourceSpec]:
    """Raise `ConfigError` if some of the sources have a weight and others do not.

    Returns `sources` unchanged.
    """
    weighted = [source.weight is not None for source in sources]
    if any(weighted) and not all(weighted):
        raise ConfigError(
            "dataset.sources: weight is relative, so all sources have one or none; set the "
            "missing ones"
        )
    return sources


def parse_sources(value: Any) -> list[SourceSpec]:
    """Parse the option `dataset.sources`. Raises `ConfigError` naming the invalid source."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ConfigError(
            f"dataset.sources={value!r}: must be a list such as [{{path: FILE, fraction: 0.5}}, "
            f"...]"
        )
    return check_weights(
        [SourceSpec.parse(entry, f"dataset.sources[{index}]") for index, entry in enumerate(value)]
    )


def parse_named(value: Any) -> list[SourceSpec]:
    """Parse the option `dataset.named`.

    `value` is a name, a mapping `{name: {fraction: .., ...}}`, or a list of both. Raises
    `ConfigError` naming the invalid entry.
    """
    entries = [value] if isinstance(value, str | Mapping) else value
    if not isinstance(entries, Sequence) or not entries:
        raise ConfigError(
            f"dataset.named={value!r}: must be a list such as [webgpt, {{oasst_export: "
            f"{{fraction: 0.5}}}}]"
        )
    result: list[SourceSpec] = []
    for index, entry in enumerate(entries):
        result.append(_parse_named_source(entry, f"dataset.named[{index}]"))
    return result


def _parse_named_source(entry: Any, where: str) -> SourceSpec:
    """Parse one entry of `dataset.named`.

    Keys that are not fields of `SourceSpec` are options of the dataset's reader.
    """
    if isinstance(entry, str):
        return SourceSpec.parse({"named": entry}, where)
    if not isinstance(entry, Mapping) or len(entry) != 1:
        if entry:
            keys = ", ".join(map(str, entry))
            names = f"; one entry is one dataset, and this one has the keys {keys}"
        else:
            names = ""
        raise ConfigError(
            f"{where}={entry!r}: must be a name, or {{name: {{fraction: 0.5, ...}}}}{names}"
        )
    ((name, options),) = entry.items()
    if not isinstance(options or {}, Mapping):
        raise ConfigError(
            f"{where}: {name}={options!r}: must be a mapping such as {{fraction: 0.5}}"
        )
    field_names = {spec.name for spec in fields(SourceSpec)} - {"named", "type", "split"}
    source_fields = {}
    for key, item in (options or {}).items():
        if key in field_names:
            source_fields[key] = item
    args = {}
    for key, item in (options or {}).items():
        if key not in field_names:
            args[key] = item
    return SourceSpec.parse(
        {
            **source_fields,
            "named": str(name),
            "args": {**args, **(source_fields.get("args") or {})},
        },
        where,
    )


def find_named_problem(value: Any) -> str | None:
    """Return a description of the problem with a value of `dataset.named`, or None if valid."""
    try:
        parse_named(value)
    except ConfigError as error:
        return str(error)
    return None


def find_columns_problem(value: Any) -> str | None:
    """Return an error message if `value` is invalid for the option `columns`, else None.

    A valid value maps names of columns in weft to their names in the file.
    """
    if not isinstance(value, Mapping) or not all(
        isinstance(column, str) and column for column in value.values()
    ):
        return "must map names to columns, such as {prompt: question, answer: solution}"
    return None


def find_sources_problem(value: Any) -> str | None:
    """Return a description of the problem with a value of `dataset.sources`, or None if valid."""
    try:
        parse_sources(value)
    except ConfigError as error:
        return str(error)
    return None


@dataclass
class DatasetSpec:
    """Options under `dataset.*`.

    `sources` is a list of mappings with the keys path, type, split, name and args, and at most one
    of fraction, size and weight.
    """

    train_path: str | None = option(None, "the same as path", check=find_bucket_problem)
    valid_path: str | None = option(
        None, "validation rows; evaluated every eval_freq_*", check=find_bucket_problem
    )
    path: str | None = option(
        None,
        "training rows, or prompts: JSON, JSONL(.gz), Parquet, Arrow, a hub name, or a directory "
        "of them, also in a bucket: gs://BUCKET/FILE",
    )
    type: str | None = option(None, "dataset type: a form in docs/datasets.md or a registered name")
    args: dict[str, Any] = option({}, "arguments of the dataset class")
    columns: dict[str, str] = option(
        {},
        "columns to rename, as {NAME_IN_WEFT: NAME_IN_FILE}, such as {prompt: question, answer: "
        "solution}; a.b is key b of the "
        "mapping in column a",
        check=find_columns_problem,
    )
    sources: Any = option(
        None,
        "a mixture: list of {path | named, type, fraction | size | weight, split, name, args, "
        "columns, valid_path, "
        "valid_split, max_valid}",
        check=find_sources_problem,
    )
    named: Any = option(
        None,
        "datasets by name, added to the mixture: [webgpt, {oasst_export: {fraction: 0.5, lang: "
        "en}}] (docs/named-datasets.md)",
        check=find_named_problem,
    )
    named_file: list[str] = option([], "YAML files with further entries for dataset.named")
    max_seqlen: int | Literal["auto"] | None = option(
        None,
        "maximum tokens of prompt and answer together; absent: the model's context; auto: the "
        "length of the longest row",
        at_least=2,
    )
    valid_max_seqlen: int | None = option(
        None, "max_seqlen for validation rows; absent: max_seqlen", at_least=2
    )
    max_prompt_len: int | None = option(
        None,
        "maximum tokens of a prompt; absent: for generation, what gen.max_new_tokens leaves of "
        "the model's context; for rows "
        "with answers, max_seqlen",
        at_least=1,
    )
    overlong: str | None = option(
        None,
        "treatment of longer rows: truncate, drop (both counted per source and printed), "
        "error; absent: error for prompts "
        "to complete, truncate for rows with answers",
        choices=OVERLONG,
    )
    remove_truncated_samples: bool = option(False, "the same as overlong=drop")
    truncate_side: str = option(
        "left", "end at which a long prompt is cut", choices=("left", "right")
    )
    train_bs_n_seqs: int | None = option(
        None,
        "prompts or rows per training batch; absent: 32, unless train_tokens_per_batch is set",
        at_least=1,
    )
    valid_bs_n_seqs: int | None = option(None, "prompts or rows per evaluation batch", at_least=1)
    train_tokens_per_batch: int | None = option(
        None, "maximum tokens of a training batch; excludes train_bs_n_seqs", at_least=1
    )
    valid_tokens_per_batch: int | None = option(
        None, "maximum tokens of an evaluation batch", at_least=1
    )
    shuffle: bool = option(True, "shuffle the rows again in every epoch")
    valid_split: float = option(
        0.0,
        "share of the training rows set aside for validation when valid_path is absent",
        at_least=0.0,
        at_most=1.0,
    )
    sort_by_length: bool = option(
        False, "sort each epoch by length, shortest first; equal lengths are in random order"
    )
    sample_mixing: float = option(
        0.0,
        "probability that a short sample is paired with another one: the pair counts as one of "
        "train_bs_n_seqs; neither attends to the other",
        at_least=0.0,
        at_most=1.0,
    )
    planned: bool = option(False, "", hidden=True)  # only for a plan: rows need not be named
    sample_mixing_below: int = option(256, "samples with fewer tokens are short", at_least=2)
    label_masking: bool = option(
        True, "train only the assistant's text; false: every token, of rows with one answer"
    )
    random_window: float = option(
        0.0,
        "probability that a row longer than max_seqlen is cut to a random window of that length, "
        "another one in every epoch, instead of its "
        "beginning",
        at_least=0.0,
        at_most=1.0,
    )
    system_prefix: str | None = option(
        None, "system text put before every conversation's own system message"
    )
    system_tags: bool = option(
        False,
        "put a system message before each reply with the reply's lang, quality, "
        "humor, creativity and context, in "
        "another random order in every epoch",
    )
    system_tag_dropout: float = option(
        0.5, "probability that a line of system_tags is left out", at_least=0.0, at_most=1.0
    )
    system_tag_length: bool = option(
        False, "add the reply's length to system_tags: number of words / 5 + 1"
    )
    num_workers: int | None = option(
        None,
        "number of tokenizing processes; 0: tokenize all rows in the main process before the first "
        "step; absent: for large "
        "files one per core, and one less during training",
        at_least=0,
    )
    cache_dir: str | None = option(
        None, "folder of the cache of tokenized rows; absent: ~/.cache/weft", check=find_url_problem
    )

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens of a row, or None if `max_seqlen` is unset or "auto"."""
        return self.max_seqlen if isinstance(self.max_seqlen, int) else None


FOLDER = Path(__file__).with_name("templates")
OPEN_ASSISTANT = (
    "<|prompter|>",
    "<|assistant|>",
    "<|system|>",
    "<|prefix_begin|>",
    "<|prefix_end|>",
)


@dataclass(frozen=True)
class ChatTemplate:
    """Chat template that weft provides by name, with its requirements.

    Attributes:
        tokens: special tokens that the vocabulary must contain; empty if the template marks turns
            with plain text
        needs: attributes of the tokenizer that must be set, such as `eos_token`
    """

    tokens: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


TEMPLATES: Mapping[str, ChatTemplate] = {
    "oasst": ChatTemplate(OPEN_ASSISTANT, ("eos_token",)),
    "oasst_v25": ChatTemplate(OPEN_ASSISTANT, ("eos_token",)),
    "chatml": ChatTemplate(("<|im_start|>", "<|im_end|>")),
    "llama3": ChatTemplate(("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "mistral": ChatTemplate(needs=("eos_token",)),
    "gemma": ChatTemplate(("<start_of_turn>", "<end_of_turn>")),
    "zephyr": ChatTemplate(needs=("eos_token",)),
    "tulu": ChatTemplate(needs=("eos_token",)),
    "vicuna": ChatTemplate(needs=("eos_token",)),
    "alpaca": ChatTemplate(needs=("eos_token",)),
}


def read_template_text(name: str) -> str:
    """Return the Jinja source of the template `name`."""
    return (FOLDER / f"{name}.jinja").read_text().removesuffix("\n")
