"""Special tokens and generation settings in checkpoints, such as the padding token."""

from __future__ import annotations

from typing import Any

from weft.data.tokenizer import Tokenizer
from weft.data.tokenizer_files import read_model_values
from weft.engine.spec import ModelSpec


def list_special_ids(tokenizer: Tokenizer, head: str) -> dict[str, Any]:
    """Return the ids of special tokens, keyed as in config.json and generation_config.json.

    `eos_token_id` is the id of the token that ends a completion, or a list if there are several, so
    that other programs stop at the same tokens as weft. Tokens that the tokenizer lacks are left
    out or, for a reward model, have the id None.
    """
    stops = tokenizer.list_stop_ids()
    ids: dict[str, Any] = {"bos_token_id": tokenizer.bos_id, "pad_token_id": tokenizer.pad_id}
    ids["eos_token_id"] = stops[0] if len(stops) == 1 else stops or None
    if head == "score":
        unknown = []
    else:
        unknown = [key for key, id in ids.items() if id is None]
    return {key: id for key, id in ids.items() if key not in unknown}


def read_generation_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the contents of generation_config.json in the role's model directory."""
    return dict(read_model_values(str(spec.path), "generation_config.json"))


def find_skipped_padding(tokenizer: Tokenizer, spec: ModelSpec) -> int | None:
    """Return the id of the padding token that is skipped when a score is read, or None.

    For most models, this is None. The exception is a reward model that was trained with
    `transformers` and whose padding token is also an end token, such as EOS. `transformers` then
    takes the final EOS for padding and reads the score at the token before it, so weft does the
    same. For reward models that weft trains from a language model, `choose_padding` prevents this.
    """
    if spec.head != "score" or spec.path is None or spec.init_from_scratch:
        return None
    raw = read_model_values(spec.path, "config.json")
    pad = raw.get("pad_token_id")
    names = raw.get("architectures") or []
    trained = any("SequenceClassification" in str(name) for name in names)
    return pad if trained and pad in tokenizer.list_stop_ids() else None


def choose_padding(tokenizer: Tokenizer, spec: ModelSpec, pooling: str) -> Tokenizer:
    """Return the tokenizer for a role's checkpoints, with a suitable padding token.

    In a reward model, `transformers` reads the score at the last token that is not padding. If the
    padding token is also a stop token (usually EOS), the score is read one token too early. The
    checkpoint of a reward model then uses a different special token for padding, which must not be
    a stop token. If the vocabulary has none, the checkpoint has no padding token, and
    `transformers` scores one sequence at a time.
    """
    stops = set(tokenizer.list_stop_ids())
    free = tokenizer.pad_id is not None and tokenizer.pad_id not in stops
    if (
        spec.head != "score"
        or pooling != "last"
        or free
        or find_skipped_padding(tokenizer, spec) is not None
    ):
        return tokenizer
    hf = tokenizer.hf
    special = {}
    for id, added in hf.added_tokens_decoder.items():
        if added.special:
            special[added.content] = id
    ending_nothing = []
    for token, id in special.items():
        if id not in stops:
            ending_nothing.append(token)
    named = [token for token in ending_nothing if "pad" in token.lower()]
    usual = []
    for token in (hf.unk_token, hf.bos_token):
        if token in ending_nothing:
            usual.append(token)
    template = (
        tokenizer.chat_template or ""
    )  # tokens in the template occur in every text, so they come last
    best = sorted((*named, *usual, *ending_nothing), key=template.__contains__)
    return tokenizer.with_padding(next(iter(best), None))


def list_padding_notes(tokenizer: Tokenizer, spec: ModelSpec, pooling: str) -> tuple[str, ...]:
    """Return notes for the user on how scores depend on the padding token and the pooling."""
    if spec.head == "score" and spec.trained and pooling == "mean":
        return (
            "pooling=mean: scores are read from the mean over all tokens, which transformers "
            "cannot express; its classes would "
            "read the last token of this checkpoint, so score with weft (rew.path), or train with "
            "pooling=last",
        )
    if (skipped := find_skipped_padding(tokenizer, spec)) is not None:
        return (
            f"this reward model pads with token {skipped}, which ends texts too: its scores are "
            f"read one token before the end, "
            "as transformers reads them",
        )
    saved = choose_padding(tokenizer, spec, pooling) if spec.trained else tokenizer
    if saved is tokenizer:
        return ()
    if tokenizer.pad_id is None:
        own = "none"
    else:
        own = f"{tokenizer.hf.pad_token!r}, which ends texts too"
    if saved.pad_id is not None:
        return (
            f"checkpoints have the padding token {saved.hf.pad_token!r} (the tokenizer's own: "
            f"{own}), so that transformers "
            "scores them as weft does",
        )
    return (
        f"checkpoints have no padding token (the tokenizer's own: {own}): every special token of "
        f"the vocabulary ends texts, so "
        "transformers scores them one sequence at a time; for batches add a token to the "
        "vocabulary and name it in "
        "model.tokenizer.pad_token",
    )
