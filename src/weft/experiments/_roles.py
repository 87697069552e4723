"""What a role that is not named in full is made from: the reference from the actor, the critic from the reward model."""

from __future__ import annotations

from dataclasses import replace

from weft.engine.spec import ModelSpec


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
