"""Directories, backends and context lengths of the models that users name; no model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from weft.checkpoints import config_file, names
from weft.checkpoints.config_file import prefix_option
from weft.checkpoints.names import CRITICS, SCORERS, TOKENIZERS, ModelQuery
from weft.engine import spec_parts
from weft.engine.service_spec import NO_NETWORK
from weft.engine.spec import AUTO, ModelSpec
from weft.errors import ConfigError
from weft.experiment import Control, Experiment
from weft.experiments import checks
from weft.experiments.common import RunConfig
from weft.observe.jsonl import POLICIES
from weft.storage.copies import find_runs_folder

# Roles of another run whose checkpoints a role can use; all other roles use those of a policy
ACCEPTED_ROLES = {"rew": SCORERS, "critic": CRITICS}

# The reward model's role, and the name endings of architectures without a score head
REWARD = "rew"
LM_ARCHITECTURES = ("ForCausalLM", "LMHeadModel")

# Keys of config.json for the maximum number of positions, which differ by model family.
CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
)

RunConfigT = TypeVar("RunConfigT", bound=RunConfig)
NamedRunConfig = RunConfig | Control  # both have `fileroot` and the names of the run


def resolve_models(config: RunConfigT) -> RunConfigT:
    """Return the configuration with each role's model resolved to a directory and a backend.

    If a model is given as the name of a run, the name is replaced by a checkpoint directory of that
    run. A backend is chosen only if the model's config.json is available. A resumed run keeps the
    checkpoints that it used when it first started. Raises a `CheckpointError` that names the option
    if a model cannot be found.
    """
    changed: dict[str, Any] = {}
    for spec in fields(config):
        value = getattr(config, spec.name)
        if isinstance(value, ModelSpec):
            changed[spec.name] = _resolve_role(config, spec.name, value)
    return replace(config, **changed)


def resolve_roles(experiment: Experiment) -> Experiment:
    """Find the model of each role, and return the experiment with the updated roles.

    If a model is given as the name of a run, the name is replaced by the path of a checkpoint of
    that run. If the model's config.json is available, the role also gets a backend. This is for
    experiments that user code builds; `resolve_models` does the same for configurations. Raises
    `CheckpointError` if a model cannot be found.
    """
    roles = {}
    for name, spec in experiment.roles.items():
        roles[name] = _resolve_role(experiment.control, name, spec)
    return replace(experiment, roles=roles)


def _resolve_role(control: NamedRunConfig, role: str, spec: ModelSpec) -> ModelSpec:
    located = _locate_paths(control, role, spec)
    path = None if located.backend in NO_NETWORK else located.path
    with prefix_option(f"{role}.path"):
        values = {} if path is None else config_file.read_config_values(path)
    resolved_spec = _with_backend(role, located, values)
    notes = (*resolved_spec.notes, *_build_head_warnings(role, resolved_spec, values))
    if path is not None and config_file.find_shipped_config(path) is not None:
        notes = (
            *notes,
            f"{role}.path={path}: the model is not on this machine; its config.json is the copy "
            "that weft ships",
        )
    return replace(resolved_spec, notes=tuple(dict.fromkeys(notes)))


def _build_head_warnings(role: str, spec: ModelSpec, values: Mapping[str, Any]) -> list[str]:
    """Return a list with a warning if the reward model's checkpoint has no score head.

    Such a model gets a random score head, and its rewards are noise. The list is empty if the
    checkpoint has a score head, or if the role is not a reward model or is trained. `values` are
    the contents of the checkpoint's config.json.
    """
    architectures = values.get("architectures") if role == REWARD else None
    if (
        spec.init_from_scratch
        or spec.trained
        or not isinstance(architectures, list)
        or not architectures
    ):
        return []
    if not all(str(name).endswith(LM_ARCHITECTURES) for name in architectures):
        return []
    return [
        f"{role}.path={spec.path}: is a language model without a score head, so its rewards are "
        "noise from a new, random head; train a reward model first: weft quickstart rw"
    ]


def find_option_role(config: Mapping[str, Any], role: str, path: str) -> str:
    """Return the role for which the user set the model path `path`.

    This is `role` itself, or the role from which the model of `role` was copied. For example, it is
    the actor if `role` is a reference without a path. `config` has the options as plain values.
    """

    def is_set(name: str) -> bool:
        values = config.get(name)
        return isinstance(values, Mapping) and values.get("path") == path

    if is_set(role):
        return role
    return next((name for name in config if is_set(name)), role)


def _locate_paths(config: NamedRunConfig, role: str, spec: ModelSpec) -> ModelSpec:
    tokenizer_only = spec.backend in NO_NETWORK  # `path` then names a tokenizer only
    path, note = _locate_path(
        config,
        f"{role}.path",
        spec.path,
        ACCEPTED_ROLES.get(role, POLICIES),
        tokenizer=tokenizer_only,
    )
    tokenizer_path, tokenizer_note = _locate_path(
        config, f"{role}.tokenizer.path", spec.tokenizer.path, POLICIES, tokenizer=True
    )
    if (path, tokenizer_path) == (spec.path, spec.tokenizer.path):
        return spec
    notes = tuple(filter(None, (note, tokenizer_note)))
    return replace(
        spec,
        path=path,
        tokenizer=replace(spec.tokenizer, path=tokenizer_path),
        notes=(*spec.notes, *notes),
    )


def _locate_path(
    config: NamedRunConfig,
    option: str,
    value: str | None,
    roles: tuple[str, ...],
    *,
    tokenizer: bool,
) -> tuple[str | None, str]:
    """Find the model that the user has set, and return (directory or hub name, note for the user).

    `option` is the name of the user's option, and `value` is its value. Returns None as the path if
    the value is None. If the value is the name of a run, `roles` are the roles whose checkpoints
    can be used. `tokenizer` is True if only a tokenizer is needed. The note is empty if there is
    nothing to report.
    """
    if value is None or (tokenizer and _has_tokenizer(Path(value).expanduser())):
        return value, ""
    run = find_runs_folder(config.fileroot) / config.experiment_name / config.trial_name
    query = ModelQuery(
        option, roles, config.fileroot, _find_initial_value(config, run, option), run
    )
    location = names.locate_model(value, query)
    return location.path, location.note


def _has_tokenizer(place: Path) -> bool:
    return place.is_file() or any((place / name).is_file() for name in TOKENIZERS)


def _find_initial_value(config: NamedRunConfig, run: Path, option: str) -> str | None:
    """Return the value that `option` had when the resumed run began, or None for a new run.

    The value is read from the configuration saved in the run's directory, `run`. If that directory
    has no saved configuration, the value is read from the configuration of the run that the option
    `resume_from` names.
    """
    places = [run]
    if config.resume_from is not None:
        source = Path(config.resume_from).expanduser()
        places += [source, *list(source.absolute().parents)[:3]]
    file = next(
        (place / names.RUN_CONFIG for place in places if (place / names.RUN_CONFIG).is_file()), None
    )
    if file is None:
        return None
    try:
        value: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file} is not valid YAML: {str(error).splitlines()[0]}; remove that run, or name "
            "another one"
        ) from error
    for key in option.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else None


def _with_backend(role: str, spec: ModelSpec, values: Mapping[str, Any]) -> ModelSpec:
    """Return the role with a backend that can run its model, according to the model's config.json.

    `values` are the contents of config.json. If they are empty, because the file is not available,
    the backend is unchanged. Raises `ConfigError` if the backend that the user set cannot run the
    model, if no backend can, or if the backend cannot add the tokens that the role needs.
    """
    if spec.backend not in (AUTO, config_file.TORCH_BACKEND) or spec.path is None:
        return spec
    if not values or spec.type is not None:
        return replace(spec, backend=config_file.TORCH_BACKEND) if values else spec
    if role == REWARD and values.get("model_type") in config_file.NON_DECODER_TYPES:
        raise ConfigError(
            f"{role}.path={spec.path}: a model of type {values['model_type']} is not a decoder, "
            f"so weft does not run it itself; set {role}.backend=null and score with your own "
            "interface, rew_inf.interface=NAME (docs/reward-classifier.md)"
        )
    backend = config_file.choose_backend(values)
    if spec.backend != AUTO and backend != spec.backend:
        raise ConfigError(
            f"{role}.backend={spec.backend}: weft has no family for models of type "
            f"{values.get('model_type')}; leave the option out to use backend={backend}, which "
            "runs any decoder that transformers supports"
        )
    if backend != config_file.TORCH_BACKEND and spec.tokenizer.add_tokens:
        raise ConfigError(
            f"{role}.tokenizer.add_tokens={spec.tokenizer.add_tokens!r}: backend={backend}, which "
            f"runs models of type {values.get('model_type')}, cannot extend their vocabulary; "
            "leave it out, and choose a chat template that needs no new tokens, such as zephyr"
        )
    if backend == config_file.TORCH_BACKEND:
        notes = spec.notes
    else:
        notes = (*spec.notes, f"{role}: {config_file.describe_disadvantages(values)}")
    return replace(spec, backend=backend, notes=notes)


def find_context(config: RunConfig) -> int | None:
    """Return the smallest context length of the run's models, in tokens.

    Context lengths are read from the config.json files that are available. The reward model is
    ignored, since its tokenizer can differ. Returns None if no context length is known.
    """
    contexts = []
    for spec in fields(config):
        value = getattr(config, spec.name)
        if spec.name != "rew" and isinstance(value, ModelSpec):
            context = read_model_context(value)
            if context is not None:
                contexts.append(context)
    return min(contexts, default=None)


def read_model_context(spec: ModelSpec) -> int | None:
    """Return a model's context length in tokens, or None if no available config.json states it.

    The length takes RoPE scaling and the tokens of a trained prefix into account.
    """
    values = checks.read_model_config(spec)
    for holder in (values, values.get("text_config")):
        if isinstance(holder, dict):
            lengths = []
            for key in CONTEXT_KEYS:
                if isinstance(holder.get(key), int) and holder[key] > 0:
                    lengths.append(holder[key])
            if lengths:
                return spec_parts.compute_scaled_context(
                    spec.rope_scaling, int(lengths[0])
                ) - checks.count_prefix_tokens(spec)
    return None
