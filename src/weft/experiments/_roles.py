"""What a role that is not named in full is made from: the reference from the actor, the critic from
the reward model.
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


def reference(ref: ModelSpec, actor: ModelSpec) -> tuple[ModelSpec, dict[str, str]]:
    """(the frozen reference, which role's weights it begins with).

    Without a path of its own it is the actor as it starts.

    An actor with random weights is copied; one that is read from files is read once more.
    """
    own = ref if ref.path is not None else _like(ref, actor)
    copied = ref.path is None and actor.init_from_scratch and ref.backend not in NO_NETWORK
    return own.with_head("lm", trained=False), {"ref": "actor"} if copied else {}


def _like(spec: ModelSpec, source: ModelSpec) -> ModelSpec:
    """`spec` with the model of `source`: path, family, tokenizer, and how they are read."""
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
    """The role with a learning rate: its own, else `full`, or 1e-5 for adapters, and of a prefix,
    which begins near 0, 1e-2.
    """
    if spec.optimizer.lr is not None:
        return spec
    own = PREFIX_RATE if spec.prefix.num_tokens else ADAPTER_RATE
    return replace(spec, optimizer=replace(spec.optimizer, lr=own if spec.has_adapters else full))


def critic(
    spec: ModelSpec, init: str | None, actor: ModelSpec, rew: ModelSpec
) -> tuple[ModelSpec, dict[str, str]]:
    """(the critic, which role's weights it begins with). With a path of its own it is that model.

    Otherwise it is the reward model, whose score head knows already what is good, or the actor with
    a new head: it reads the actor's tokens, so a reward model that has another tokenizer or prompt
    form cannot be it.
    """
    if spec.path is not None:
        return spec.with_head("value", trained=True), {}
    shares_tokens = not rew.prompt_prefix and not rew.prompt_suffix and _same_vocabulary(actor, rew)
    usable = rew.path is not None and rew.backend not in NO_NETWORK
    if init == "rew" and not usable:
        raise ConfigError(
            "ppo.critic_init=rew: there is no reward model; set rew.path, critic.path, or "
            "critic_init=actor"
        )
    if init == "rew" or (init is None and usable and shares_tokens):
        return _like(spec, rew).with_head("value", trained=True), {}
    made = _like(spec, actor).with_head("value", trained=True)
    return made, {"critic": "actor"} if actor.init_from_scratch else {}


def _same_vocabulary(one: ModelSpec, other: ModelSpec) -> bool:
    """Whether two roles are known to read the same token ids: one path, or tokenizer files of one
    vocabulary.
    """
    places = [spec.tokenizer.path or spec.path for spec in (one, other)]
    if places[0] == places[1]:
        return True
    files = [_tokenizer_file(place) for place in places]
    if files[0] is None or files[1] is None or files[0].name != files[1].name:
        return False
    texts = [file.read_bytes() for file in files if file is not None]
    return texts[0] == texts[1] or (
        files[0].suffix == ".json" and _vocabulary(texts[0]) == _vocabulary(texts[1])
    )


def _tokenizer_file(place: str | None) -> Path | None:
    """The file that holds a local tokenizer's vocabulary, or None."""
    found = Path(place).expanduser() if place else None
    if found is None or found.is_file():
        return found
    return next(
        (
            found / name
            for name in ("tokenizer.json", "tokenizer.model")
            if (found / name).is_file()
        ),
        None,
    )


def _vocabulary(text: bytes) -> Any:
    """What a tokenizer.json says of its tokens; the rest (templates, padding) may differ."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"a tokenizer.json is not JSON: {error}") from error
    return values.get("model"), values.get("added_tokens")


def check_same_vocabulary(name: str, spec: ModelSpec, other_name: str, other: ModelSpec) -> None:
    """Refuse two roles whose tokenizer files, where both are at hand, give one id two meanings.

    Others are compared when the tokenizers have been read.
    """
    places = [each.tokenizer.path or each.path for each in (spec, other)]
    files = [_tokenizer_file(place) for place in places]
    if (
        files[0] is None
        or files[1] is None
        or any(file.suffix != ".json" for file in files if file is not None)
    ):
        return
    texts = [file.read_bytes() for file in files if file is not None]
    if texts[0] == texts[1]:
        return
    (one, added), (two, more) = (_token_ids(text) for text in texts)
    apart = sum(one.get(token) != two.get(token) for token in {*one, *two})
    # what one lacks a configuration may add
    apart += sum(added[token] != more[token] for token in {*added} & {*more})
    if apart:
        option = "tokenizer.path" if other.tokenizer.path else "path"
        raise ConfigError(
            f"{other_name}.{option}={places[1]!r}: {apart} tokens of its tokenizer are not those "
            f"of {name}.path={places[0]!r}, "
            f"and the two exchange token ids; take a {other_name} of the same vocabulary"
        )


def _token_ids(text: bytes) -> tuple[dict[str, int], dict[str, int]]:
    """Ids of the tokens in a tokenizer.json: its model's, and those added to them."""
    model, added = _vocabulary(text)
    vocab = (model or {}).get("vocab") or {}
    # Unigram lists pieces
    if isinstance(vocab, dict):
        known = vocab
    else:
        known = {token[0]: id for id, token in enumerate(vocab)}
    return known, {token["content"]: token["id"] for token in added or ()}
