"""Roles that are not fully specified: the reference, the critic, and models on servers.

By default the reference is the initial actor, and the critic is initialized from the reward model
or the actor. The addresses of servers are set by the options `rew.url` and `ref.url`, or by
environment variables.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.checkpoints.config_file import TORCH_BACKEND
from weft.engine.service_spec import NO_NETWORK, SERVICE, ServedSpec, ServiceAddress
from weft.engine.spec import AUTO, GenerationSpec, ModelSpec
from weft.errors import CheckpointError, ConfigError
from weft.graph.mfc import MFCDef
from weft.host.spec import RewardOptions

ADAPTER_RATE = 1e-5
PREFIX_RATE = 1e-2
# Environment variables with host:port/model of a gRPC server
VARIABLES = {"rew": "TRITON_HOST_RM", "ref": "TRITON_HOST_REF"}


def build_reference(ref: ModelSpec, actor: ModelSpec) -> tuple[ModelSpec, dict[str, str]]:
    """Return the frozen reference's spec, and {"ref": "actor"} if its initial weights are copied.

    The mapping is empty if the weights are read from files. A reference without a path is the
    initial actor: its weights are copied if the actor has random weights, and otherwise read from
    the same files.
    """
    resolved = ref if ref.path is not None else _copy_model(ref, actor)
    copied = ref.path is None and actor.init_from_scratch and ref.backend not in NO_NETWORK
    return resolved.with_head("lm", trained=False), {"ref": "actor"} if copied else {}


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
    adapter_lr = PREFIX_RATE if spec.prefix.num_tokens else ADAPTER_RATE
    return replace(
        spec, optimizer=replace(spec.optimizer, lr=adapter_lr if spec.has_adapters else full)
    )


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
    places = [model.tokenizer.path or model.path for model in (spec, other)]
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
    (ids, added), (other_ids, other_added) = (_parse_token_ids(text) for text in texts)
    num_different = sum(ids.get(token) != other_ids.get(token) for token in {*ids, *other_ids})
    # Only added tokens of both count: the options can add a token that one of them lacks.
    num_different += sum(added[token] != other_added[token] for token in {*added} & {*other_added})
    if num_different:
        option = "tokenizer.path" if other.tokenizer.path else "path"
        raise ConfigError(
            f"{other_name}.{option}={places[1]!r}: {num_different} tokens of its tokenizer differ "
            f"from those of {name}.path={places[0]!r}, but the two roles exchange token ids; "
            f"choose a {other_name} with the same vocabulary"
        )


def _parse_token_ids(text: bytes) -> tuple[dict[str, int], dict[str, int]]:
    """Return two mappings from tokens to ids for a tokenizer.json with the content `text`.

    The first has the tokens of the model's vocabulary, the second the added tokens.
    """
    model, added = _parse_vocabulary(text)
    vocab = (model or {}).get("vocab") or {}
    # A Unigram vocabulary is a list of (piece, score), in the order of ids.
    if isinstance(vocab, dict):
        ids = vocab
    else:
        ids = {token[0]: id for id, token in enumerate(vocab)}
    return ids, {token["content"]: token["id"] for token in added or ()}


# -- reward models, and models on servers


def resolve_servers(
    rew: ServedSpec, ref: ServedSpec, actor: ModelSpec, rew_step: str | None
) -> tuple[ServedSpec, ServedSpec]:
    """Return the reward model and the reference, with the backend for servers if they are on one.

    A role is on a server if an option or an environment variable sets its URL. Raises `UserError`
    if an option is invalid or not supported by a server.
    """
    rew = _resolve_url("rew", rew)
    ref = _resolve_url("ref", ref)
    if is_served(rew) and rew.path is None and rew.tokenizer.path is None:
        # Without its own tokenizer the reward model reads the actor's tokens.
        path = actor.tokenizer.path or actor.path
        rew = replace(rew, tokenizer=replace(rew.tokenizer, path=path))
    if is_served(rew) and rew_step is not None:
        raise ConfigError(
            f"rew_step={rew_step!r} needs a score per token, which a server does not "
            "return; set rew.path, and leave rew.url out"
        )
    return rew, ref


def is_served(spec: ModelSpec) -> bool:
    """Return whether the role's model runs on a server."""
    return spec.backend == SERVICE


def check_served_reference(
    ref: ServedSpec, gen: GenerationSpec, ref_ema_eta: float | None, name: str
) -> None:
    """Raise `ConfigError` for options that do not work if the reference model is on a server.

    `name` is the option group of `gen` and `ref_ema_eta`, for messages.
    """
    if not is_served(ref):
        return
    if ref_ema_eta:
        raise ConfigError(
            f"{name}.ref_ema_eta updates the reference, but that of ref.url is on a server; set "
            "only one of the two"
        )
    if gen.truncates:
        raise ConfigError(
            f"ref.url: a server does not know which tokens {name}.gen.top_k, top_p and min_p "
            "exclude; "
            f"write "
            f"{name}.gen.top_p=1, and no top_k or min_p"
        )


def build_service_notes(rew: ServedSpec, ref: ServedSpec) -> list[str]:
    """Return a line for each role whose model runs on a server, for the printed plan.

    The line says that scores or log-probs come from the server and that no weights are loaded.
    """
    notes = []
    for role, spec, outputs in (("rew", rew, "scores"), ("ref", ref, "log-probs")):
        if is_served(spec):
            if spec.path is not None:
                files = f"; only the tokenizer of {role}.path is read"
            else:
                files = ""
            notes.append(
                f"{role}: {outputs} come from {spec.url}, no weights are loaded here{files}"
            )
    return notes


def _resolve_url(role: str, spec: ServedSpec) -> ServedSpec:
    url = spec.url
    if url is None and (address := os.environ.get(VARIABLES[role], "").strip()):
        url = address if "://" in address else f"grpc://{address}"
    if url is None:
        if is_served(spec):
            raise ConfigError(f"{role}.backend=service: the role needs {role}.url")
        return spec
    if spec.backend not in (AUTO, TORCH_BACKEND, SERVICE):
        raise ConfigError(
            f"{role}.backend={spec.backend} and {role}.url exclude each other; set only one of them"
        )
    if spec.offload:
        raise ConfigError(
            f"{role}.offload=true moves weights, but those of {role}.url are on a server; set "
            "only one of the two"
        )
    ServiceAddress.parse(role, url, spec.service)
    return replace(spec, url=url, backend=SERVICE)


def has_reward_model(rew: ModelSpec) -> bool:
    """Return whether the options of the role `rew` name a reward model."""
    return rew.path is not None or rew.backend in NO_NETWORK


def build_reward_model(
    rew: ServedSpec, rew_step: str | None, size: int, prefix: str, scores: str
) -> MFCDef:
    """Return the call in which the reward model scores completions, with the output key `scores`.

    With `rew_step`, it scores the steps that end with this text. `prefix` is prepended to the node's
    name and to all keys except `prompt`.
    """
    form = {"prompt_prefix": rew.prompt_prefix, "prompt_suffix": rew.prompt_suffix}
    args: dict[str, Any] = {
        "outputs": ["scores"],
        **{key: text for key, text in form.items() if text},
    }
    output_key_remap = {"scores": prefix + scores}
    if rew_step is not None:
        args = {"step": rew_step.replace("\\n", "\n")}
        output_key_remap = {**output_key_remap, "token_rewards": f"{prefix}token_rewards"}
    return MFCDef(
        name=f"{prefix}rew_inf",
        role="rew",
        interface="infer" if rew_step is None else "process_reward",
        method="inference",
        batch_size=size,
        input_keys=("prompt", "completion"),
        optional_keys=("finished",),
        output_keys=tuple(output_key_remap),
        output_key_remap=output_key_remap,
        input_key_remap={key: prefix + key for key in ("completion", "finished")} if prefix else {},
        args=args,
    )


def check_rewards(rew: ModelSpec, rewards: RewardOptions, rew_step: str | None) -> None:
    """Raise `ConfigError` if there is no source of rewards, or if reward options have no effect."""
    functions = rewards.has_functions
    if not functions and not has_reward_model(rew):
        raise ConfigError(
            "rew.path and reward are both missing; set a reward model (rew.path or rew.url), a "
            "reward function (or "
            "reward_column), or both"
        )
    if rewards.scores_weight != 1.0 and not (functions and has_reward_model(rew)):
        raise ConfigError(
            f"rew_weight={rewards.scores_weight} weighs a reward model against a reward function; set "
            f"both, or leave it out"
        )
    if rewards.by_token and not functions:
        raise ConfigError(
            "reward_by_token=true applies to reward functions only; set reward, or leave it out"
        )
    if rew_step is not None and (not has_reward_model(rew) or rewards.by_token or not rew_step):
        raise ConfigError(
            f"rew_step={rew_step!r}: makes the reward model score every step that ends "
            "with this text; set rew.path, and leave out reward_by_token"
        )
