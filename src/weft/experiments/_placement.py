"""Placement of a run's calls, from its models, devices and options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from weft.checkpoints.config_file import prefix_option
from weft.engine.service_spec import NO_NETWORK
from weft.engine.spec import ModelSpec
from weft.errors import ConfigError
from weft.experiment import Experiment
from weft.experiments import checks
from weft.experiments.common import RunConfig
from weft.experiments.models import find_option_role
from weft.experiments.planned_networks import build_planned_network
from weft.experiments.plans import (
    build_run_plan,
    describe_run_facts,
    find_reason_to_plan_again,
    find_saved_plan,
    keep_plan,
    place_by_file,
    place_by_plan,
)
from weft.planner import placement
from weft.planner.cluster import DeviceCluster, find_cluster, is_mixed
from weft.planner.decoder_sizes import DecoderSizes
from weft.planner.devices import (
    GIB,
    DeviceRates,
    estimate_cpu_rates,
    find_gpu_rates,
    subtract_reserved,
)
from weft.planner.profile import ProfileMachine, find_usable_profile
from weft.topology import Layout


class UnknownRates(ConfigError):
    """Raised if nothing can be estimated because the speed of the devices is unknown."""


def place_calls(
    experiment: Experiment, config: RunConfig, user_roles: Mapping[str, ModelSpec]
) -> Experiment:
    """Return the experiment with its calls placed on devices, and with notes on the placement.

    This implements the values "search" and "heuristic" of `allocation_mode`, and plan files.
    `user_roles` has the roles as the user wrote them. A call is placed unless the layout of the
    call or of its role is set. If nothing can be estimated, calls stay on all devices and a note
    says why.

    A resumed run keeps its placement. Only if its devices have changed, it is placed again, and a note
    says so.

    Raises `ConfigError` for an unusable plan and, with "search", if the speed of the devices is
    unknown or no placement fits into memory.
    """
    mode = config.allocation_mode
    if placement.is_plan_path(mode):
        return place_by_file(experiment, config, user_roles)
    # Keep the plan of a resumed run, unless its devices have changed.
    saved = find_saved_plan(config)
    per_node = config.n_gpus_per_node or 1
    facts = replace(
        describe_run_facts(experiment, config),
        devices=config.n_nodes * per_node,
        devices_per_node=per_node,
    )
    device = _name_device(experiment, config)
    reason = "" if saved is None else find_reason_to_plan_again(saved, facts, device)
    placed = None
    if saved is not None and not reason:
        try:
            placed = place_by_plan(experiment, saved, user_roles)
        except ConfigError as error:  # with resume_from, the options can differ
            reason = f"the saved plan does not suit the options ({error})"
        else:
            note = f"allocation_mode={mode}: the run continues with its plan, {saved.source}"
            placed = placement.with_notes(placed, [note])
    if placed is None:
        placed = _place_by_estimates(experiment, config, user_roles)
    plan = replace(build_run_plan(placed, config, device), facts=facts)
    if reason:
        note = f"allocation_mode={mode}: {reason}: planned again: {plan.describe_calls()}"
        placed = replace(placed, resume_notes=[note])
    return keep_plan(placed, config, plan)


def _place_by_estimates(
    experiment: Experiment, config: RunConfig, user_roles: Mapping[str, ModelSpec]
) -> Experiment:
    """Return the experiment with its calls placed by the estimates of their time and memory."""
    # There is nothing to choose on one device, or if every role has a layout.
    per_node = config.n_gpus_per_node or 1
    count = config.n_nodes * per_node
    mode = config.allocation_mode
    graph = experiment.graph
    roles = {call.role for call in graph.list_model_calls()}
    free = {role for role in roles if not placement.is_placed(user_roles[role])}
    if count == 1 or not free:
        return experiment
    # Without sizes or speeds there is no estimate: leave every call on all devices.
    missing = _list_unread_models({role: user_roles[role] for role in roles}, mode)
    if missing:
        return placement.with_notes(experiment, missing)

    import torch

    from weft.checkpoints.hf_io import read_config
    from weft.engine.torch.network_source import check_layout

    # Read the sizes of the models.
    on_gpu = _is_on_gpu(experiment, config)
    dtype = _choose_dtype(experiment, on_gpu=on_gpu)
    device = "cuda" if on_gpu else "cpu"
    configs = {}
    networks = {}
    for role, spec in experiment.roles.items():
        if role in roles and spec.path:
            with prefix_option(f"{find_option_role(experiment.config, role, spec.path)}.path"):
                configs[role] = read_config(spec.path, spec.type)[1]
            spec = replace(spec, dtype=spec.dtype or dtype)
            networks[role] = build_planned_network(spec, configs[role], torch.device(device))

    def check(role: str, layout: Layout) -> None:
        check_layout(experiment.roles[role], layout, configs[role])

    # Find the speed of the devices, and estimate the work of each call.
    try:
        rates = _find_rates(config, on_gpu, networks, per_node)
    except UnknownRates as error:
        if mode == placement.SEARCH:
            raise
        return placement.with_notes(
            experiment, [f"{error}; until then every call is on all devices"]
        )
    rates, profile_notes = _with_profile(rates, config, on_gpu, networks)
    experiment = placement.with_notes(experiment, profile_notes)
    user_dataset = getattr(config, "dataset", experiment.dataset)
    loads = {}
    for call in graph.list_model_calls():
        loads[call.name] = placement.build_workload(experiment, config.search, user_dataset, call)
    lengths = {name: load.sequence_length for name, load in loads.items()}
    # List the candidates for each group of calls, and choose among them.
    units, start = placement.build_units(
        experiment, free, networks, count, per_node, check, lengths
    )
    num_devices = count
    for unit in units:
        for mesh in unit.meshes:
            num_devices = max(num_devices, 1 + max(mesh.ranks))
    problem = placement.build_problem(
        experiment,
        units,
        networks,
        loads,
        rates,
        num_devices=num_devices,
        shared_roles=_find_shared_references(experiment),
        cluster=_find_mixed_cluster(config, networks),
    )
    return placement.place_calls(experiment, mode, problem, start, count)


def _name_device(experiment: Experiment, config: RunConfig) -> str | None:
    """Return the type of the run's devices, such as "H100" or "cpu", or None if it is not known."""
    on_gpu = _is_on_gpu(experiment, config)
    try:
        return _find_rates(config, on_gpu, {}, config.n_gpus_per_node or 1).name
    except UnknownRates:
        return None


def _choose_dtype(experiment: Experiment, *, on_gpu: bool) -> str | None:
    """Return the dtype of roles without one, as a run chooses it, but from config.json alone."""
    from weft.engine.backends.common import with_dtype

    main = experiment.roles[experiment.data_role]
    if main.path is None or main.backend in NO_NETWORK:
        return main.dtype
    return with_dtype(replace(main, planned=True), main.path, on_cpu=not on_gpu).dtype


def _list_unread_models(roles: Mapping[str, ModelSpec], mode: str) -> list[str]:
    """Return a message for each model whose config.json is not available on this machine.

    Without this file nothing can be estimated.
    """
    missing = {}
    for role, spec in roles.items():
        if spec.path and not checks.read_model_config(spec):
            missing[role] = spec.path
    unread_models: list[str] = []
    for role, path in missing.items():
        unread_models.append(
            f"allocation_mode={mode}: the config.json of {role}.path={path} is not on this "
            f"machine, so every call is on all devices; download it with: hf download {path} "
            "config.json"
        )
    return unread_models


def _is_on_gpu(experiment: Experiment, config: RunConfig) -> bool:
    import torch

    device = experiment.control.device
    if device is None:
        return config.search.gpu is not None or torch.cuda.is_available()
    return device.startswith("cuda")


def _find_rates(
    config: RunConfig, on_gpu: bool, networks: Mapping[str, DecoderSizes], per_node: int
) -> DeviceRates:
    """Return the speeds of the devices. Raises `UnknownRates` if they are not known."""
    import torch

    from weft.engine.device import count_cores, read_memory_bytes, read_thread_limit

    # CPUs: share this machine's memory and cores.
    memory = config.search.memory_gb
    if not on_gpu:
        machine_bytes = float(read_memory_bytes(torch.device("cpu")))
        if memory is None:
            memory = machine_bytes / GIB / per_node
        rates = estimate_cpu_rates(count_cores(), memory, per_node, read_thread_limit())
        return replace(rates, memory=machine_bytes)
    # GPUs: look up the type that is set, or that of this machine.
    if config.search.gpu is None and not torch.cuda.is_available():
        raise UnknownRates(
            f"allocation_mode={config.allocation_mode}: this machine has no GPU; set search.gpu "
            "to the type of the cluster's GPUs, such as H100"
        )
    cluster = _find_mixed_cluster(config, networks)
    if cluster is not None:
        return cluster.rates
    name = config.search.gpu
    if name is None:
        name = torch.cuda.get_device_name(0)
        if memory is None:
            memory = subtract_reserved(read_memory_bytes(torch.device("cuda")) / GIB)
    try:
        return find_gpu_rates(name, _find_dtype(networks), memory, per_node)
    except ConfigError as error:
        raise UnknownRates(str(error)) from None


def _find_mixed_cluster(
    config: RunConfig, networks: Mapping[str, DecoderSizes]
) -> DeviceCluster | None:
    """Return the cluster if `search.gpu` names several groups of devices, and otherwise None.

    Raises `ConfigError` if it names other devices than the run's.
    """
    gpu = config.search.gpu
    if gpu is None or not is_mixed(gpu):
        return None
    per_node = config.n_gpus_per_node or 1
    count = config.n_nodes * per_node
    return find_cluster(gpu, _find_dtype(networks), config.search.memory_gb, count, per_node)


def _find_dtype(networks: Mapping[str, DecoderSizes]) -> str:
    """Return the dtype of the networks' matrix products."""
    is_single = all(network.settings.dtype == "float32" for network in networks.values())
    return "float32" if is_single else "bfloat16"


def _with_profile(
    rates: DeviceRates, config: RunConfig, on_gpu: bool, networks: Mapping[str, DecoderSizes]
) -> tuple[DeviceRates, tuple[str, ...]]:
    """Return the rates with the profile of these devices, and notes on one that cannot be used."""
    import torch

    from weft.engine.device import describe_profiled_device

    is_this_machine = not on_gpu or (config.search.gpu is None and torch.cuda.is_available())
    if config.search.profile is None and not is_this_machine:
        return rates, ()
    keys = {(sizes.profile_key, sizes.settings.dtype) for sizes in networks.values()}
    device = torch.device("cuda" if on_gpu and torch.cuda.is_available() else "cpu")
    machine = ProfileMachine(*describe_profiled_device(device))
    profile, notes = find_usable_profile(keys, machine, config.search.profile)
    return rates.with_profile(profile), notes


def _find_shared_references(experiment: Experiment) -> dict[str, str]:
    """Map reference roles to trained roles whose weights they can share.

    A reference can share the weights of a trained role if it equals this role with its adapters
    disabled.
    """
    from weft.engine.torch.adapters_off import can_share_base

    shared_references: dict[str, str] = {}
    for role, spec in experiment.roles.items():
        for other, trained in experiment.roles.items():
            if role != other and can_share_base(spec, trained):
                shared_references[role] = other
    return shared_references
