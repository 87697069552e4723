"""What a user sets for tokenizers and datasets: plain values, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft.options import option

OVERLONG = ("truncate", "drop", "error")


@dataclass
class TokenizerSpec:
    path: str | None = option(
        None, "HF directory, tokenizer.json or sentencepiece tokenizer.model; the model's own when absent"
    )
    chat_template: str | None = option(None, "a jinja file, or the template itself; the tokenizer's own when absent")
    bos_token: str | None = option(None, "token that begins a sequence; must be in the vocabulary")
    eos_token: str | None = option(None, "token that ends a completion; must be in the vocabulary")
    pad_token: str | None = option(
        None, "padding token; weft pads nothing, saved for others; must be in the vocabulary"
    )
    sep_token: str | None = option(None, "separator token; must be in the vocabulary")
    add_bos_token: bool | None = option(
        None, "begin every sequence with bos_token; the tokenizer's own habit when absent"
    )


@dataclass
class DatasetSpec:
    """The `dataset.*` options. `sources` is a list of mappings: path, type, fraction | size | weight, split, name, args."""

    train_path: str | None = option(
        None, "training rows: JSON, JSONL(.gz), Parquet, a hub name, or a directory of them"
    )
    valid_path: str | None = option(None, "validation rows; evaluated every eval_freq_*")
    path: str | None = option(None, "the same as train_path")
    type: str | None = option(None, "dataset type: a form in docs/datasets.md or a registered name")
    args: dict[str, Any] = option({}, "arguments of the dataset class")
    sources: Any = option(None, "a mixture: list of {path, type, fraction | size | weight, split, name, args}")
    max_seqlen: int = option(1024, "most tokens of a sequence", at_least=2)
    max_prompt_len: int = option(256, "most tokens of a prompt", at_least=1)
    overlong: str = option("truncate", "what happens to longer rows; counted per source and printed", choices=OVERLONG)
    remove_truncated_samples: bool = option(False, "the same as overlong=drop")
    truncate_side: str = option("left", "which end of a prompt is cut", choices=("left", "right"))
    train_bs_n_seqs: int | None = option(None, "ids a training batch holds", at_least=1)
    valid_bs_n_seqs: int | None = option(None, "ids an evaluation batch holds", at_least=1)
    train_tokens_per_batch: int | None = option(
        None, "tokens a training batch holds at most; excludes train_bs_n_seqs", at_least=1
    )
    valid_tokens_per_batch: int | None = option(None, "tokens an evaluation batch holds at most", at_least=1)
    shuffle: bool = option(True, "a new order every epoch")
    valid_split: float = option(
        0.0, "share of the training rows set aside for validation when valid_path is absent", at_least=0.0, at_most=1.0
    )
    num_workers: int | None = option(None, "processes that tokenize; as many as cores when absent", at_least=0)
    cache_dir: str | None = option(None, "where tokenized rows are kept; ~/.cache/weft when absent")
