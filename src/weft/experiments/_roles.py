"""Defaults of roles that are not fully specified: the reference and the critic.

By default the reference is the initial actor, and the critic is initialized from the reward model
or the actor.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.engine.service_spec import NO_NETWORK
from weft.engine.spec import AUTO, ModelSpec
from weft.errors import CheckpointError, ConfigError

ADAPTER_RATE = 1e-5
PREFIX_RATE = 1e-2


def build_reference(ref: ModelSpec, actor: ModelSpec) -> tuple[ModelSpec, dict[str, str]]:
    """Return the frozen reference's spec, and {"ref": "actor"} if its initial weights are copied.

    The mapping is empty if the weights are read from files. A reference without a path is the
    initial actor: its weights are copied if the actor has random weights, and otherwise read from
    the same files.
    """
    own = ref if ref.path is not None else _copy_model(ref, actor)
    copied = ref.path is None and actor.init_from_scratch and ref.backend not in NO_NETWORK
    return own.with_head("lm", trained=False), {"ref": "actor"} if copied else {}


def _copy_model(spec: ModelSpec, source: ModelSpec) -> ModelSpec:
    """Return `spec` with the model of `source`: path, family, tokenizer and loading options."""
    return replace(
        spec,
        path=source.path,
        type=spec.type or source.type,
        init_from_scratch=source.init_from_scratch,
        backend=source.backend if spec.backend == AUTO else spec.backend,
        planned=source.planned,
        trust_remote_code=source.trust_remote_code,
        tokenizer=source.tokenizer,
        rope_scaling=source.rope_scaling if spec.rope_scaling is None else spec.rope_scaling,
    )


def with_lr(spec: ModelSpec, full: float) -> ModelSpec:
    """Return the role's spec, with a default learning rate if none is set.

    The default is `full` for full training, 1e-5 for LoRA, and 1e-2 for a prefix, whose elements
    are initialized near 0.
    """
    if spec.optimizer.lr is not None:
        return spec
    own = PREFIX_RATE if spec.prefix.num_tokens else ADAPTER_RATE
    return replace(spec, optimizer=replace(spec.optimizer, lr=own if spec.has_adapters else full))


def build_critic(
    spec: ModelSpec, init: str | None, actor: ModelSpec, rew: ModelSpec
) -> tuple[ModelSpec, dict[str, str]]:
    """Return the critic's spec, and {"critic": "actor"} if its initial weights are copied.

    The mapping is empty if the weights are read from files.

    If `spec` has a path, the critic is loaded from this path. Otherwise, `init` selects the initial
    model: "rew" is the reward model, whose score head is already trained, and "actor" is the actor
    with a new head. If `init` is None, the reward model is used if there is one that has the
    actor's tokenizer and adds no text to the prompt, and the actor otherwise. Raises `ConfigError`
    if `init` is "rew" and there is no reward model.
    """
    if spec.path is not None:
        return spec.with_head("value", trained=True), {}
    shares_tokens = (
        not rew.prompt_prefix and not rew.prompt_suffix and _has_same_vocabulary(actor, rew)
    )
    usable = rew.path is not None and rew.backend not in NO_NETWORK
    if init == "rew" and not usable:
        raise ConfigError(
            "ppo.critic_init=rew: there is no reward model; set rew.path, critic.path, or "
            "critic_init=actor"
        )
    if init == "rew" or (init is None and usable and shares_tokens):
        return _copy_model(spec, rew).with_head("value", trained=True), {}
    critic = _copy_model(spec, actor).with_head("value", trained=True)
    return critic, {"critic": "actor"} if actor.init_from_scratch else {}


def _has_same_vocabulary(one: ModelSpec, other: ModelSpec) -> bool:
    """Return whether two roles have the same tokenizer path, or equal local vocabularies.

    If a role has no path for its tokenizer, the path of its model is used.
    """
    places = [spec.tokenizer.path or spec.path for spec in (one, other)]
    if places[0] == places[1]:
        return True
    files = [_find_tokenizer_file(place) for place in places]
    if files[0] is None or files[1] is None or files[0].name != files[1].name:
        return False
    texts = [file.read_bytes() for file in files if file is not None]
    return texts[0] == texts[1] or (
        files[0].suffix == ".json" and _parse_vocabulary(texts[0]) == _parse_vocabulary(texts[1])
    )


def _find_tokenizer_file(place: str | None) -> Path | None:
    """Return the vocabulary file of the tokenizer at `place`, or None if it has no such file.

    `place` is a file, a directory or a hub name. For a hub name, the result is None.
    """
    path = Path(place).expanduser() if place else None
    if path is None or path.is_file():
        return path
    return next(
        (path / name for name in ("tokenizer.json", "tokenizer.model") if (path / name).is_file()),
        None,
    )


def _parse_vocabulary(text: bytes) -> Any:
    """Return the values of `model` and `added_tokens` in a tokenizer.json with the content `text`.

    These values define the vocabulary. Templates and padding do not affect it, and are left out.
    Raises `CheckpointError` if `text` is not JSON.
    """
    try:
        values = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"a tokenizer.json is not JSON: {error}") from error
    return values.get("model"), values.get("added_tokens")


def check_same_vocabulary(name: str, spec: ModelSpec, other_name: str, other: ModelSpec) -> None:
    """Raise `ConfigError` if the tokenizer files of two roles map an id to different tokens.

    `name` and `other_name` are the names of the roles. Tokenizers without local files are compared
    later, once they are loaded.
    """
    places = [each.tokenizer.path or each.path for each in (spec, other)]
    files = [_find_tokenizer_file(place) for place in places]
    if (
        files[0] is None
        or files[1] is None
        or any(file.suffix != ".json" for file in files if file is not None)
    ):
        return
    texts = [file.read_bytes() for file in files if file is not None]
    if texts[0] == texts[1]:
        return
    (one, added), (two, more) = (_parse_token_ids(text) for text in texts)
    apart = sum(one.get(token) != two.get(token) for token in {*one, *two})
    # Only added tokens of both count: the options can add a token that one of them lacks.
    apart += sum(added[token] != more[token] for token in {*added} & {*more})
    if apart:
        option = "tokenizer.path" if other.tokenizer.path else "path"
        raise ConfigError(
            f"{other_name}.{option}={places[1]!r}: {apart} tokens of its tokenizer differ from "
            f"those of {name}.path={places[0]!r}, but the two roles exchange token ids; choose a "
            f"{other_name} with the same vocabulary"
        )


def _parse_token_ids(text: bytes) -> tuple[dict[str, int], dict[str, int]]:
    """Return two mappings from tokens to ids for a tokenizer.json with the content `text`.

    The first has the tokens of the model's vocabulary, the second the added tokens.
    """
    model, added = _parse_vocabulary(text)
    vocab = (model or {}).get("vocab") or {}
    # A Unigram vocabulary is a list of (piece, score), in the order of ids.
    if isinstance(vocab, dict):
        known = vocab
    else:
        known = {token[0]: id for id, token in enumerate(vocab)}
    return known, {token["content"]: token["id"] for token in added or ()}
