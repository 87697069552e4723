"""Reward models and references that run on servers.

Their addresses are set by the options `rew.url` and `ref.url`, or by environment variables.
"""

from __future__ import annotations

import os
from dataclasses import replace

from weft.checkpoints.config_file import TORCH_BACKEND
from weft.engine.service_spec import SERVICE, ServedSpec, ServiceAddress
from weft.engine.spec import AUTO, ModelSpec
from weft.errors import ConfigError
from weft.experiments._assemble import check_config
from weft.experiments._policy_options import REWARD_VARIABLE, SamplingConfig, SamplingOptions

# Environment variables with host:port/model of a gRPC server
VARIABLES = {"rew": REWARD_VARIABLE, "ref": "TRITON_HOST_REF"}


def check_shared_options(
    config: SamplingConfig, options: SamplingOptions, name: str
) -> SamplingConfig:
    """Check the options that sampling methods share, and resolve the roles that run on servers.

    A role runs on a server if an option or an environment variable sets its URL. In the returned
    configuration, these roles have the backend for servers. `name` is the option group of
    `options`. Raises `UserError` if an option is invalid.
    """
    # Find the roles that are on a server.
    config = check_config(config)
    rew = _resolve_url("rew", config.rew)
    ref = _resolve_url("ref", config.ref)
    if is_served(rew) and rew.path is None and rew.tokenizer.path is None:
        # Without its own tokenizer the reward model reads the actor's tokens.
        own = config.actor.tokenizer.path or config.actor.path
        rew = replace(rew, tokenizer=replace(rew.tokenizer, path=own))
    # Refuse options that a server does not support.
    if is_served(rew) and config.rew_step is not None:
        raise ConfigError(
            f"rew_step={config.rew_step!r} needs a score per token, which a server does not "
            "return; set rew.path, and leave rew.url out"
        )
    if is_served(ref):
        _check_reference(options, name)
    return replace(config, rew=rew, ref=ref)


def is_served(spec: ModelSpec) -> bool:
    """Return whether the role's model runs on a server."""
    return spec.backend == SERVICE


def _check_reference(options: SamplingOptions, name: str) -> None:
    """Raise `ConfigError` for options that do not work if the reference model is on a server."""
    if options.ref_ema_eta:
        raise ConfigError(
            f"{name}.ref_ema_eta updates the reference, but that of ref.url is on a server; set "
            "only one of the two"
        )
    if options.gen.truncates:
        raise ConfigError(
            f"ref.url: a server does not know which tokens {name}.gen.top_k, top_p and min_p "
            "exclude; "
            f"write "
            f"{name}.gen.top_p=1, and no top_k or min_p"
        )


def build_service_notes(config: SamplingConfig) -> list[str]:
    """Return a line for each role whose model runs on a server, for the printed plan.

    The line says that scores or log-probs come from the server and that no weights are loaded.
    """
    notes = []
    for role, spec, what in (("rew", config.rew, "scores"), ("ref", config.ref, "log-probs")):
        if is_served(spec):
            if spec.path is not None:
                files = f"; only the tokenizer of {role}.path is read"
            else:
                files = ""
            notes.append(f"{role}: {what} come from {spec.url}, no weights are loaded here{files}")
    return notes


def _resolve_url(role: str, spec: ServedSpec) -> ServedSpec:
    url = spec.url
    if url is None and (named := os.environ.get(VARIABLES[role], "").strip()):
        url = named if "://" in named else f"grpc://{named}"
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
