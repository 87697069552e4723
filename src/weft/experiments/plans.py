"""Placement of calls by a plan, either from a file that the user names or of a resumed run.

A run whose calls are placed by a search or by a plan file keeps its plan in its folder (`plan.yaml`).
When it is resumed, it reads the plan there, so that nothing depends on the user's file or on a new
search.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import yaml

from weft.checkpoints.config_file import prefix_option
from weft.checkpoints.names import RUN_CONFIG
from weft.engine.service_spec import NO_NETWORK
from weft.engine.spec import ModelSpec, ParallelSpec
from weft.errors import ConfigError
from weft.experiment import Experiment
from weft.experiments import checks
from weft.experiments.common import RunConfig
from weft.experiments.models import find_option_role
from weft.graph.mfc import MFCDef
from weft.planner import placement, plan_file
from weft.planner.plan_file import PlacementPlan, PlanFacts
from weft.reading import read_text
from weft.storage.buckets import is_remote
from weft.storage.copies import find_runs_folder
from weft.storage.views import view_runs
from weft.topology import Mesh


def list_planned_calls(experiment: Experiment) -> list[MFCDef]:
    """Return the calls that a plan places: those of roles with a network."""
    calls = []
    for call in experiment.graph.list_model_calls():
        if experiment.roles[call.role].backend not in NO_NETWORK:
            calls.append(call)
    return calls


def describe_run_facts(experiment: Experiment, config: RunConfig) -> PlanFacts:
    """Return the facts that a plan for the experiment assumes: devices, batch size and models.

    Models without a readable config.json, or without a network of weft's, are left out. If
    `n_gpus_per_node` is not set, neither is the number of devices.
    """
    from weft.checkpoints.hf_io import compute_parameter_shapes, read_config

    models = {}
    for role in dict.fromkeys(call.role for call in list_planned_calls(experiment)):
        spec = experiment.roles[role]
        if spec.path and spec.backend != "hf" and checks.read_model_config(spec):
            with prefix_option(f"{find_option_role(experiment.config, role, spec.path)}.path"):
                sizes = read_config(spec.path, spec.type)[1]
            models[role] = {
                "layers": sizes.num_layers,
                "hidden": sizes.hidden_size,
                "heads": sizes.num_heads,
                "kv_heads": sizes.num_kv_heads,
                "inner": sizes.intermediate_size,
                "vocab": sizes.vocab_size,
            }
            if sizes.experts is not None:
                models[role] |= {
                    "experts": sizes.experts.num,
                    "inner": sizes.experts.intermediate_size,
                }
            shapes = compute_parameter_shapes(sizes).values()
            models[role]["parameters"] = sum(math.prod(shape) for shape in shapes)
    per_node = config.n_gpus_per_node
    rows = experiment.graph.get_node(experiment.steps_follow).batch_size or None
    return PlanFacts(
        devices=None if per_node is None else config.n_nodes * per_node,
        devices_per_node=per_node,
        rows_per_step=rows,
        tokens_per_step=None if rows else experiment.dataset.train_tokens_per_batch,
        models=models,
    )


def build_run_plan(
    experiment: Experiment, config: RunConfig, device: str | None = None
) -> PlacementPlan:
    """Return the plan of an experiment whose calls are placed; `device` is the type of its devices."""
    calls = {}
    for call in list_planned_calls(experiment):
        calls[call.name] = plan_file.plan_call(experiment.call_meshes[call.name])
    estimates = {} if device is None else {"device": device}
    return PlacementPlan(calls, describe_run_facts(experiment, config), estimates)


def keep_plan(experiment: Experiment, config: RunConfig, plan: PlacementPlan) -> Experiment:
    """Return the experiment with the plan that the run writes into its folder."""
    text = plan_file.format_plan(replace(plan, source=plan_file.PLAN), config.algorithm or "NAME")
    return replace(experiment, plan=text)


# -- plans of files and of resumed runs


def place_by_file(
    experiment: Experiment, config: RunConfig, user_roles: Mapping[str, ModelSpec]
) -> Experiment:
    """Return the experiment with its calls placed by the plan file `allocation_mode`.

    A resumed run uses the copy in its folder. Raises `ConfigError` for a plan that is not for this
    run, and for one that has changed since the run was started.
    """
    path = config.allocation_mode
    option = f"allocation_mode={path}"
    saved = find_saved_plan(config)
    exists = Path(path).expanduser().exists()
    notes = []
    if saved is None or (config.resume_from is not None and exists):
        plan = plan_file.read_plan(path, "allocation_mode")
    elif not exists:
        plan = saved
        notes.append(f"{option}: there is no such file; the run continues with {saved.source}")
    else:
        plan = plan_file.read_plan(path, "allocation_mode")
        changed = plan_file.find_differing_calls(saved, plan)
        if changed:
            raise ConfigError(
                f"{option}: the plan has changed since the run was started ({'; '.join(changed)}; "
                f"{saved.source}); restore it, or resume the run with the new plan: "
                f"resume_from={Path(saved.source).parent}"
            )
    facts = describe_run_facts(experiment, config)
    plan.check_facts(facts)
    experiment = place_by_plan(experiment, plan, user_roles)
    experiment = keep_plan(experiment, config, replace(plan, facts=_fill(facts, plan.facts)))
    return replace(experiment, resume_notes=notes)


def place_by_plan(
    experiment: Experiment, plan: PlacementPlan, user_roles: Mapping[str, ModelSpec]
) -> Experiment:
    """Return the experiment with the layouts and devices of a plan.

    `user_roles` has the roles as the user wrote them. Raises `ConfigError`, with the line, for a
    layout that cannot be read, that the model does not allow, or that contradicts the user's
    options.
    """
    from weft.checkpoints.hf_io import read_config
    from weft.engine.torch.network_source import check_layout

    calls = list_planned_calls(experiment)
    plan.check_calls([call.name for call in calls])
    meshes = experiment.call_meshes
    placed = experiment
    for call in calls:
        spec = experiment.roles[call.role]
        place = f"{plan.locate(f'calls.{call.name}.layout')}: calls.{call.name}"
        sharded = call.trains and spec.zero_stage != 0
        mesh = plan_file.parse_call_mesh(plan, call.name, sharded=sharded)
        try:
            mesh = Mesh(spec.with_virtual_stages(mesh.layout), mesh.ranks)
            if spec.path and spec.backend != "hf" and checks.read_model_config(spec):
                check_layout(spec, mesh.layout, read_config(spec.path, spec.type)[1])
        except ConfigError as error:
            raise ConfigError(f"{place}.{error}") from None
        option = _name_fixing_option(call, user_roles[call.role])
        if option is not None and mesh != meshes[call.name]:
            raise ConfigError(
                f"{place} is {plan.calls[call.name]}, and {option} sets {meshes[call.name]}; "
                f"change one of them, or leave {option.partition('=')[0]} out"
            )
        if option is None:
            ranks = ",".join(map(str, mesh.ranks))
            placed = placed.with_mfc(call.name, layout=str(mesh.layout), device_mesh=ranks)
    try:
        _ = placed.call_meshes
    except ConfigError as error:
        raise ConfigError(f"{plan.locate('calls')}: {error}") from None
    return placed


def _name_fixing_option(call: MFCDef, user_spec: ModelSpec) -> str | None:
    """Return the option by which the user has placed a call, with its value, or None."""
    for name in ("layout", "device_mesh"):
        if getattr(call, name) is not None:
            return f"{call.name}.{name}={getattr(call, name)}"
    if user_spec.layout is not None:
        return f"{call.role}.layout={user_spec.layout}"
    if user_spec.parallel != ParallelSpec():
        return f"{call.role}.parallel"
    if placement.is_placed(user_spec):
        return f"{call.role}.backend={user_spec.backend}"
    return None


def _fill(facts: PlanFacts, planned: PlanFacts) -> PlanFacts:
    """Return the facts of a run, with the devices of its plan if the options do not set them."""
    if facts.devices is not None:
        return facts
    return replace(facts, devices=planned.devices, devices_per_node=planned.devices_per_node)


def find_saved_plan(config: RunConfig) -> PlacementPlan | None:
    """Return the plan that a resumed run has in its folder, or None if it has none.

    With `resume_from`, this is the plan of the run that is named there, unless the run's own folder
    has one. The plan of a run with another `allocation_mode` is ignored.
    """
    if config.recover_mode == "disabled" or not (config.experiment_name and config.trial_name):
        return None
    if is_remote(config.fileroot):
        url = f"{config.fileroot.rstrip('/')}/{config.experiment_name}/{config.trial_name}"
        places = [view_runs(url, missing_ok=True)]
    else:
        root = find_runs_folder(config.fileroot)
        places = [root / config.experiment_name / config.trial_name]
    if config.resume_from is not None and not is_remote(config.resume_from):
        source = Path(config.resume_from).expanduser().absolute()
        places += [source, *list(source.parents)[:3]]
    run = next((place for place in places if (place / RUN_CONFIG).is_file()), None)
    if run is None or not (run / plan_file.PLAN).is_file():
        return None
    try:
        options = yaml.safe_load((run / RUN_CONFIG).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError):
        return None  # reported when the run is resumed
    if not isinstance(options, dict) or options.get("allocation_mode") != config.allocation_mode:
        return None
    path = run / plan_file.PLAN
    return plan_file.parse_plan(read_text(path, str(path), ConfigError), str(path))


def find_reason_to_plan_again(saved: PlacementPlan, facts: PlanFacts, device: str | None) -> str:
    """Return why a saved plan does not fit a resumed run, or "" if it does.

    `facts` and `device` describe the run now.
    """
    saved_facts = saved.facts
    if saved_facts.devices is not None and saved_facts.devices != facts.devices:
        return (
            f"saved on {saved_facts.devices:,} device{'s' * (saved_facts.devices > 1)} with "
            f"{saved.describe_calls()}, now {facts.devices:,}"
        )
    kind = saved.estimates.get("device")
    if None not in (kind, device) and kind != device:
        return f"saved on {kind} with {saved.describe_calls()}, now {device}"
    differences = saved_facts.list_differences(facts)
    return f"saved for {differences[0][1]}" if differences else ""
