"""Check `dataset.*` options against each other and against the dataset type."""

from __future__ import annotations

from dataclasses import replace

from weft.data.messages import ConversationAdditions
from weft.data.spec import DatasetSpec
from weft.data.tokenizer import Tokenizer
from weft.errors import ConfigError, DataError

SINGLE_ANSWER_TYPES = ("chat", "prompt_answer", "text")  # dataset types with one completion per row
MARK = "weft-looks-for-this-system-text"  # probe text that a template either writes or omits


def with_additions(spec: DatasetSpec, tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy of the tokenizer that adds the system texts set in `spec` to conversations.

    The system texts are the system prefix and the system tags (see `ConversationAdditions`). Raises
    `ConfigError` if options conflict, or if the chat template does not render the added system
    messages.
    """
    if spec.sample_mixing and spec.train_tokens_per_batch is not None:
        raise ConfigError(
            "dataset.sample_mixing pairs short samples within dataset.train_bs_n_seqs; "
            "dataset.train_tokens_per_batch fills "
            "batches with short samples anyway, so leave sample_mixing out"
        )
    if spec.system_tag_length and not spec.system_tags:
        raise ConfigError(
            "dataset.system_tag_length=true adds to dataset.system_tags, which is false; set both"
        )
    # Check that the chat template writes the additional system messages.
    additions = ConversationAdditions(
        spec.system_prefix,
        spec.system_tags,
        spec.system_tag_length,
        spec.system_tag_dropout,
        spec.label_masking,
    )
    user_message = {"role": "user", "content": "Hi"}
    system_messages = [{"role": "system", "content": MARK}]
    if additions.prefix is not None and not _is_system_rendered(
        tokenizer, [*system_messages, user_message]
    ):
        raise ConfigError(
            f"dataset.system_prefix: the chat template of {tokenizer.name} does not write a "
            f"system message; name one that does "
            f"with {tokenizer.option}.chat_template=chatml"
        )
    if additions.tags and not _is_system_rendered(
        tokenizer, [user_message, *system_messages, {"role": "assistant", "content": "Hello"}]
    ):
        raise ConfigError(
            f"dataset.system_tags=true: the chat template of {tokenizer.name} does not write a "
            f"system message before a reply; "
            f"name one that does with {tokenizer.option}.chat_template=oasst_v25"
        )
    if additions == replace(tokenizer.additions, dropout=additions.dropout):
        return tokenizer
    return replace(tokenizer, additions=additions)


def check_type_options(spec: DatasetSpec, type: str) -> None:
    """Raise `ConfigError` for an option that the dataset type does not support."""
    defaults = DatasetSpec()
    for name in ("label_masking", "random_window", "sample_mixing"):
        if getattr(spec, name) != getattr(defaults, name) and type not in SINGLE_ANSWER_TYPES:
            raise ConfigError(
                f"dataset.{name}={getattr(spec, name)!r}: for rows of one answer "
                f"({', '.join(SINGLE_ANSWER_TYPES)}), not for {type}; "
                "leave it out"
            )
    if spec.system_tags and type == "prompt":
        raise ConfigError(
            "dataset.system_tags describes replies, and prompts to complete have none; leave it out"
        )
    if spec.valid_max_seqlen is not None and type == "prompt":
        raise ConfigError(
            f"dataset.valid_max_seqlen={spec.valid_max_seqlen}: for rows with answers; prompts "
            f"are cut to "
            "dataset.max_prompt_len, so leave it out"
        )
    if spec.random_window and spec.max_seqlen is None:
        raise ConfigError(
            "dataset.random_window cuts rows to dataset.max_seqlen, which is not known; set it"
        )


def check_custom_options(spec: DatasetSpec, type: str, *, by_index: bool) -> None:
    """Raise `ConfigError` if `spec` sets an option that has no effect on a user's dataset class.

    These options are `system_prefix`, `system_tags` and, unless the dataset has random access
    (`by_index`), `sort_by_length`. `type` is the name of the dataset type.
    """
    names = ["system_prefix", "system_tags"]
    if not by_index:
        names.append("sort_by_length")
    for name in names:
        if getattr(spec, name) != getattr(DatasetSpec(), name):
            raise ConfigError(
                f"dataset.{name}: dataset type {type!r} makes its samples itself; leave it out"
            )


def _is_system_rendered(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> bool:
    try:
        return MARK in tokenizer.render(messages)
    except DataError:
        return False
