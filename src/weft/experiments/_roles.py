"""What a role that is not named in full is made from: the reference from the actor, the critic from the reward model."""

from __future__ import annotations

from dataclasses import replace

from weft.engine.spec import ModelSpec
from weft.errors import ConfigError


def reference(ref: ModelSpec, actor: ModelSpec) -> tuple[ModelSpec, dict[str, str]]:
    """(the frozen reference, which role's weights it begins with). Without a path of its own it is the actor as it starts.

    An actor with random weights is copied; one that is read from files is read once more.
    """
    own = ref if ref.path is not None else _like(ref, actor)
    copied = ref.path is None and actor.init_from_scratch
    return own.with_head("lm", trained=False), {"ref": "actor"} if copied else {}


def _like(spec: ModelSpec, source: ModelSpec) -> ModelSpec:
    """`spec` with the model of `source`: path, family, tokenizer, and how they are read."""
    return replace(
        spec,
        path=source.path,
        type=spec.type or source.type,
        init_from_scratch=source.init_from_scratch,
        backend=source.backend if spec.backend == ModelSpec().backend else spec.backend,
        trust_remote_code=source.trust_remote_code,
        tokenizer=source.tokenizer,
    )


def critic(spec: ModelSpec, init: str | None, actor: ModelSpec, rew: ModelSpec) -> tuple[ModelSpec, dict[str, str]]:
    """(the critic, which role's weights it begins with). With a path of its own it is that model.

    Otherwise it is the reward model, whose score head predicts well what is to come, or the actor with a new head: it reads
    the actor's tokens, so a reward model that reads text in its own form cannot be it.
    """
    if spec.path is not None:
        return spec.with_head("value", trained=True), {}
    shares_tokens = rew.tokenizer.path is None and not rew.prompt_prefix and not rew.prompt_suffix
    usable = rew.path is not None and rew.backend != "null"
    if init == "rew" and not usable:
        raise ConfigError(
            "ppo.critic_init=rew: there is no reward model; set rew.path, critic.path, or critic_init=actor"
        )
    if init == "rew" or (init is None and usable and shares_tokens):
        return _like(spec, rew).with_head("value", trained=True), {}
    made = _like(spec, actor).with_head("value", trained=True)
    return made, {"critic": "actor"} if actor.init_from_scratch else {}
