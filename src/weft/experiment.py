"""The `Experiment` dataclass: roles, graph, placement, datasets and options of a run.

An experiment is the only input of the runtime.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from weft.data.spec import DatasetSpec
from weft.data.suite_spec import EvalSuiteSpec
from weft.engine.service_spec import NO_NETWORK
from weft.engine.spec import ModelSpec
from weft.errors import ConfigError, GraphError, build_unknown_name_error, qualify_error
from weft.graph.graph import DataflowGraph
from weft.graph.mfc import MFCDef, Node, Offload
from weft.observe.best import check_metric_name, check_options
from weft.registry import interfaces
from weft.storage.copies import read_versions, restore_urls
from weft.topology import Layout, Mesh, parse_mesh

EVALUATION = "eval/"  # prefix of the names of calls outside the main graph


@dataclass(frozen=True)
class Evaluation:
    """Dataflow graph that evaluates the models during a run, on the validation set (`valid_path`).

    The graph runs at the intervals set by the `eval_freq_*` options. Metrics come from calls of the
    method `evaluate`, or from host functions that read the outputs of `generate` or `inference`
    calls. Metrics are averaged over ids (one per dataset row), and logged as
    `eval/{source}/{metric}` for each validation source and as `eval/{metric}` over all sources.
    `batch_size` is the number of ids per batch.

    A second `Evaluation`, `Experiment.fixed_prompts`, generates the trained model's answers to the
    prompts of the option `eval_prompts`. A third one, `Experiment.eval_suite`, answers the requests
    of the tasks of the option `eval_suite`.
    """

    graph: DataflowGraph
    batch_size: int


@dataclass(frozen=True)
class Control:
    """Options of a run that do not depend on the algorithm, such as its name and its devices."""

    experiment_name: str
    trial_name: str
    fileroot: str = "./runs"
    seed: int = 1
    device: str | None = None
    ray_address: str | None = None  # address of the Ray cluster; mode=ray only
    n_nodes: int = 1
    n_gpus_per_node: int | None = None  # devices per machine; None: all available
    total_train_epochs: int = 1
    max_steps: int | None = None
    save_freq_steps: int | None = None
    save_freq_epochs: int | None = None
    save_freq_secs: float | None = None
    eval_freq_steps: int | None = None
    eval_freq_epochs: int | None = None
    eval_freq_secs: float | None = None
    eval_at_start: bool | None = None
    eval_prompts: str | None = None
    eval_suite: EvalSuiteSpec = field(default_factory=EvalSuiteSpec)
    save_best: str | None = None
    save_best_mode: str | None = None
    early_stop_patience: int | None = None
    early_stop_min_delta: float = 0.0
    log_freq_steps: int = 1
    save_total_limit: int | None = None
    save_milestone_freq_steps: int | None = None
    save_milestone_freq_epochs: int | None = None
    recover_mode: str = "auto"
    recover_freq_steps: int | None = None
    resume_from: str | None = None
    max_tokens_per_microbatch: int = 16384
    deterministic: bool = False
    tf32: bool = False
    profile_steps: str | None = None
    flash_attention: str = "auto"
    on_nonfinite: str = "stop"
    loggers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    imports: Sequence[str] = ()
    progress: bool = True
    # environment variables of the run and its workers; they override inherited ones
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def evaluates_at_start(self) -> bool:
        """True if the run is evaluated before step 1: by default, if evaluations are compared."""
        return self.save_best is not None if self.eval_at_start is None else self.eval_at_start


STEPS = re.compile(r"(\d+)(?::(\d+))?")


def parse_step_range(text: str) -> range:
    """Return the steps in a string such as `5:8` (5 to 8, both included) or `5`.

    Steps are counted from 1. Raises `ConfigError` for any other string.
    """
    match = STEPS.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"must be steps such as 5:8 or 5, not {text!r}")
    first = int(match[1])
    last = int(match[2] or match[1])
    if not 1 <= first <= last:
        raise ConfigError(
            f"must name steps from 1 on, the first one first, such as 5:8, not {text!r}"
        )
    return range(first, last + 1)


@dataclass(frozen=True)
class Experiment:
    """Complete description of a run: its roles, dataflow graph, devices, datasets and options.

    `steps_follow` names the graph node that defines a training step, for example the node that
    trains the policy: each execution of this node counts as one step.

    Values derived from the fields, such as the device meshes, are computed once, at their first
    use, and stored in the object.
    """

    control: Control
    roles: Mapping[str, ModelSpec]
    graph: DataflowGraph
    dataset: DatasetSpec
    dataset_type: str
    data_role: str  # the role whose tokenizer makes the token ids
    placement: Mapping[str, Layout] = field(default_factory=dict)
    evaluation: Evaluation | None = None
    fixed_prompts: Evaluation | None = None  # graph that answers `control.eval_prompts`
    eval_suite: Evaluation | None = None  # graph that answers the tasks of `control.eval_suite`
    # role -> role whose weights it is initialized from
    init_from: Mapping[str, str] = field(default_factory=dict)
    saved_roles: Sequence[str] = ()
    # the resolved options, written to config.yaml
    config: Mapping[str, Any] = field(default_factory=dict)
    # options that the user's configuration does not set
    left_at_default: frozenset[str] = frozenset()
    chosen: Sequence[str] = ()  # options not set by the user for which weft chose a value
    steps_follow: str = ""
    # trained node -> optimizer steps per firing
    updates_per_firing: Mapping[str, int] = field(default_factory=dict)
    plan_notes: Sequence[str] = ()  # lines logged before the run: sizes and counts
    resume_notes: Sequence[str] = ()  # lines that are always shown: what a resumed run changes
    # estimates of allocation_mode=search, as plain values
    search: Mapping[str, Any] = field(default_factory=dict)
    plan: str = ""  # the run's plan.yaml, kept when it is resumed; empty: no plan sets layouts

    def get_node(self, name: str) -> Node:
        for node in self.graph.nodes:
            if node.name == name:
                return node
        raise build_unknown_name_error("node", name, [n.name for n in self.graph.nodes])

    def with_mfc(self, name: str, **changes: Any) -> Experiment:
        """Return a copy of the experiment in which fields of the graph node `name` are changed.

        Example: `with_mfc("rew_inf", interface="x", post_hooks=[])`. An evaluation node with this
        name gets the same changes, except those of `method` and `batch_size`. If the interface or
        host function changes, the node's `args` are cleared unless they are given, too.
        """
        changed = _change_node(self.graph, name, changes)
        evaluation = self.evaluation
        if evaluation is not None and any(n.name == name for n in evaluation.graph.nodes):
            evaluation_changes = {}
            for key, value in changes.items():
                if key not in ("method", "batch_size"):
                    evaluation_changes[key] = value
            evaluation = replace(
                evaluation, graph=_change_node(evaluation.graph, name, evaluation_changes)
            )
        return replace(self, graph=changed, evaluation=evaluation)

    @cached_property
    def most_epochs(self) -> float:
        """Maximum number of epochs.

        Infinite if the run trains a model and `max_steps` is set, because the run then ends after
        that number of steps. Otherwise `total_train_epochs`.
        """
        lasts_by_steps = self.control.max_steps is not None and bool(self.trained_nodes)
        return math.inf if lasts_by_steps else self.control.total_train_epochs

    @cached_property
    def trained_nodes(self) -> list[MFCDef]:
        """Calls of the main graph that train."""
        return [call for call in self.graph.list_model_calls() if call.trains]

    def resolve(self) -> dict[str, Any]:
        """Return the contents of the run's config.yaml.

        These are the options of the run or, if the experiment has none, a description of its parts.
        Copies of files in buckets appear under their URLs, and converted models under their names.
        When a run is restarted, the contents are compared with those of the stored file to detect
        changed options.
        """
        options: dict[str, Any] = restore_urls(dict(self.config) or _describe_experiment(self))
        return options

    def read_copy_versions(self) -> dict[str, str]:
        """Return the versions of the models and tokenizers in buckets, by URL."""
        paths = []
        for spec in self.roles.values():
            paths += [spec.path, spec.tokenizer.path]
        return read_versions(paths)

    def check(self) -> None:
        """Check everything that can be checked without torch.

        Raises `UserError`; the message names the field, its value, the rule and the fix.
        """
        _check_control(self.control)
        _check_roles(self)
        _check_best(self)
        _ = self.call_meshes  # raises ConfigError if the devices of a mesh do not fit its layout

    @cached_property
    def calls(self) -> dict[str, MFCDef]:
        """All model function calls of the run, by name.

        The calls of the main graph come first, then those of the evaluation graph, then those of
        the graphs for the options `eval_prompts` and `eval_suite`. All names but those of the main
        graph have the prefix `eval/`.
        """
        calls = {call.name: call for call in self.graph.list_model_calls()}
        for beside in (self.evaluation, self.fixed_prompts, self.eval_suite):
            if beside is not None:
                calls |= {EVALUATION + call.name: call for call in beside.graph.list_model_calls()}
        return calls

    @cached_property
    def role_meshes(self) -> dict[str, Mesh]:
        """Device mesh of each role's primary weights, by role name.

        A trained role has its primary weights on the mesh of the call that trains it. An untrained
        role has them on the mesh of its first call if all its calls specify meshes. If not, they
        are on the mesh that the role specifies. Raises `ConfigError` if the devices of a mesh do
        not fit its layout, or if two calls train the same role on different meshes.
        """
        meshes = {}
        for role, spec in self.roles.items():
            try:
                named = spec.resolve_mesh()
            except ConfigError as error:
                raise qualify_error(role, error) from None
            calls = []
            for call in self.graph.list_model_calls():
                if call.role == role:
                    calls.append(call)
            own = {call.name: self._choose_mesh(call, named) for call in calls}
            trained = {}
            for call in calls:
                if call.trains:
                    trained[call.name] = own[call.name] or named
            if len(set(trained.values())) > 1:
                placements = ", ".join(f"{name} on {mesh}" for name, mesh in trained.items())
                raise ConfigError(
                    f"{role}: its weights can be trained on one mesh only, and {placements}; give these "
                    f"calls one layout"
                )
            first = next(iter(own.values()), None) if all(own.values()) else None
            meshes[role] = next(iter(trained.values()), first or named)
        return meshes

    @cached_property
    def call_meshes(self) -> dict[str, Mesh]:
        """Device mesh of each call, by its name in `calls`.

        This is the mesh that the call specifies or, if it specifies none, the mesh of its role's
        primary weights. Raises `ConfigError` if the devices of a mesh do not fit its layout.
        """
        meshes = {}
        for name, call in self.calls.items():
            primary = self.role_meshes[call.role]
            named = self.roles[call.role].resolve_mesh()
            meshes[name] = self._choose_mesh(call, primary, named) or primary
        return meshes

    @cached_property
    def copies(self) -> list[tuple[str, Mesh]]:
        """Role and mesh of every additional copy of a role's weights, in call order.

        A role needs a copy of its weights on each mesh that its calls run on, except the mesh of
        its primary weights.
        """
        used = dict.fromkeys(
            (call.role, self.call_meshes[name]) for name, call in self.calls.items()
        )
        return [(role, mesh) for role, mesh in used if mesh != self.role_meshes[role]]

    def _choose_mesh(self, call: MFCDef, *role: Mesh) -> Mesh | None:
        """Return the mesh of a call, or None if the call specifies neither a layout nor devices.

        `role` lists meshes of the call's role, in order of preference. If the call specifies only
        devices, its layout is that of `role[0]`.

        If the call specifies only a layout, it uses the first devices of the first mesh in `role`
        that is large enough. If none is, it uses the first devices of the run, but only if
        `role[0]` also consists of the first devices of the run.

        Raises `ConfigError` if the devices do not fit the layout, or if they cannot be chosen by
        these rules and must be named by the user.
        """
        if call.layout is None and call.device_mesh is None:
            return None
        spec = self.roles[call.role]
        # an evaluation call is laid out like the training call of the same name
        names = [node.name for node in self.trained_nodes]
        sharded = spec.zero_stage != 0 and (call.trains or call.name in names)
        try:
            layout = role[0].layout
            if call.layout is not None:
                layout = spec.with_virtual_stages(Layout.parse(call.layout, trained=sharded))
            if call.device_mesh is not None:
                return parse_mesh(call.device_mesh, layout)
            enough = next(
                (mesh.ranks for mesh in role if layout.num_devices <= len(mesh.ranks)), None
            )
            if enough is not None:
                return Mesh(layout, enough[: layout.num_devices])
            if role[0].ranks != tuple(range(len(role[0].ranks))):
                raise ConfigError(
                    f"layout {layout} needs {layout.num_devices} devices and {call.role} has "
                    f"{len(role[0].ranks)}; say which "
                    f"by {call.name}.device_mesh"
                )
            return Mesh.on_first_devices(layout)
        except ConfigError as error:
            raise qualify_error(call.name, error) from None

    @cached_property
    def num_devices(self) -> int:
        """Number of devices that the run uses, each of which has one process."""
        meshes = [*self.role_meshes.values(), *self.call_meshes.values()]
        return 1 + max(rank for mesh in meshes for rank in mesh.ranks)


def _change_node(graph: DataflowGraph, name: str, changes: Mapping[str, Any]) -> DataflowGraph:
    node = graph.get_node(name)
    what = "interface" if isinstance(node, MFCDef) else "function"
    if changes.get(what, getattr(node, what)) != getattr(node, what):
        changes = {"args": {}, **changes}
    unknown = sorted(set(changes) - {spec.name for spec in fields(node)})
    if unknown:
        raise build_unknown_name_error(
            f"field of node {name!r}", unknown[0], [spec.name for spec in fields(node)]
        )
    new = replace(node, **changes)
    return replace(graph, nodes=[new if n.name == name else n for n in graph.nodes])


RUN_NAME = re.compile(r"[A-Za-z0-9-][A-Za-z0-9.-]*")


def _check_control(control: Control) -> None:
    for option in ("experiment_name", "trial_name"):
        value = getattr(control, option)
        if not RUN_NAME.fullmatch(value):
            raise ConfigError(
                f"{option}={value!r}: must contain letters, digits, . and - only, and not begin with "
                f"a dot"
            )
    if control.recover_mode not in ("auto", "resume", "disabled"):
        raise ConfigError(
            f"recover_mode={control.recover_mode!r}: must be one of auto, resume, disabled"
        )
    if control.profile_steps is not None:
        try:
            parse_step_range(control.profile_steps)
        except ConfigError as error:
            raise ConfigError(f"profile_steps: {error}") from None
    for spec in fields(control):
        value = getattr(control, spec.name)
        if (
            ("_freq_" in spec.name or spec.name in ("max_steps", "total_train_epochs"))
            and value is not None
            and value <= 0
        ):
            raise ConfigError(f"{spec.name}={value!r}: must be above 0; leave it out for none")


def _check_best(experiment: Experiment) -> None:
    control = experiment.control
    check_options(
        control.save_best,
        control.save_best_mode,
        control.early_stop_patience,
        control.early_stop_min_delta,
    )
    if control.save_best is None:
        return
    if not experiment.saved_roles:
        raise ConfigError(f"save_best={control.save_best}: this run saves no model; leave it out")
    evaluates = experiment.evaluation is not None or experiment.eval_suite is not None
    check_metric_name(control.save_best, experiment.graph.order, evaluates=evaluates)


def _check_roles(experiment: Experiment) -> None:
    roles = experiment.roles
    graph = experiment.graph
    # Check that every role that the experiment refers to exists.
    if experiment.evaluation:
        evaluated = experiment.evaluation.graph.list_model_calls()
    else:
        evaluated = ()
    named = {f"node {n.name!r}": n.role for n in (*graph.list_model_calls(), *evaluated)}
    for s in graph.syncs:
        for role in (s.source, s.target):
            if role not in roles:
                named[f"sync {s.source} -> {s.target}"] = role
    for a, b in experiment.init_from.items():
        for r in (a, b):
            if r not in roles:
                named[f"init_from {a} <- {b}"] = r
    for role in experiment.saved_roles:
        named[f"saved role {role!r}"] = role
    for place, role in {**named, "data_role": experiment.data_role}.items():
        if role not in roles:
            raise GraphError(f"{place}: there is no role {role!r}; roles: {', '.join(roles)}")
    if experiment.steps_follow not in graph.order:
        raise GraphError(
            f"steps_follow={experiment.steps_follow!r} is not a node; nodes: {', '.join(graph.order)}"
        )
    # Check that the calls of a role fit its spec and its backend.
    for node in (*graph.list_model_calls(), *evaluated):
        if node.trains and not roles[node.role].trained:
            raise GraphError(
                f"node {node.name!r} trains {node.role!r}, whose spec has trained=False; set it"
            )
        backend = roles[node.role].backend
        shipped = (
            backend == "null" and node.interface in interfaces.list_shipped()
        )  # shipped interfaces use the engine
        if backend in NO_NETWORK and (
            node.method in ("generate", "train_step") or _has_offload_hook(node) or shipped
        ):
            raise GraphError(
                f"node {node.name!r} calls {node.method} on {node.role!r}, which has "
                f"{node.role}.backend={backend}, a "
                "tokenizer alone: it cannot be trained, generated with or moved; give the role a "
                "network, or the node an "
                f"interface with its own ({node.name}.interface=NAME)"
            )
    # Check that roles without a network are neither moved nor saved.
    moved = {r for s in graph.syncs for r in (s.source, s.target)} | set(
        experiment.init_from.values()
    )
    for role in sorted(moved | set(experiment.init_from) | set(experiment.saved_roles)):
        if roles[role].backend in NO_NETWORK:
            raise GraphError(
                f"role {role!r} has {role}.backend={roles[role].backend}, a tokenizer alone; "
                f"there are no "
                "parameters to move or save"
            )


def _has_offload_hook(node: MFCDef) -> bool:
    return any(isinstance(hook, Offload) for hook in (*node.pre_hooks, *node.post_hooks))


def _describe_experiment(experiment: Experiment) -> dict[str, Any]:
    """Return the main parts of the experiment as nested dictionaries of plain values."""
    return {
        **_to_plain(asdict(experiment.control)),
        "roles": {name: _to_plain(asdict(spec)) for name, spec in experiment.roles.items()},
        "nodes": {node.name: _to_plain(asdict(node)) for node in experiment.graph.nodes},
        "syncs": {
            f"{sync.source} -> {sync.target}": _to_plain(asdict(sync))
            for sync in experiment.graph.syncs
        },
        "dataset": {"type": experiment.dataset_type, **_to_plain(asdict(experiment.dataset))},
        "init_from": dict(experiment.init_from),
    }


def _to_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _to_plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(each) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return repr(value)


@dataclass(frozen=True)
class Workers:
    """Group of identical processes, one per device, with the resources of each process."""

    count: int = 1
    gpus: int = 1  # per process; 0: CPU only
    cpus: int | None = None  # per process
    memory_gb: float | None = None  # per process
    nodelist: str | None = None
    exclude: str | None = None
    container: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in (("count", 1), ("gpus", 0), ("cpus", 1), ("memory_gb", 0.0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"Workers: {name}={value!r}: must be at least {least:g}")


@dataclass(frozen=True)
class Scheduling:
    """Machine resources that a registered experiment requests, as returned by `scheduling_setup()`.

    `workers` maps the name of each process group to its resources, for example {"actor":
    Workers(count=8, cpus=8), "reward": Workers(count=2, gpus=0)}. `memory_gb` is per machine.

    With `mode=slurm`, the resources of all groups are requested as one job, and a role can run on
    the machines of any group. In other modes, only the counts, GPUs and `env` have an effect.
    """

    n_nodes: int = 1
    n_gpus_per_node: int = 0
    memory_gb: float | None = None
    workers: Mapping[str, Workers] = field(default_factory=dict)

    @property
    def num_devices(self) -> int:
        """Number of devices, each of which has one process."""
        if self.workers:
            return sum(group.count for group in self.workers.values())
        return self.n_nodes * max(1, self.n_gpus_per_node)

    @property
    def gpus_per_node(self) -> int:
        requested_gpus = sum(group.count * group.gpus for group in self.workers.values())
        return max(self.n_gpus_per_node, -(-requested_gpus // self.n_nodes))

    @property
    def cpus_per_node(self) -> int | None:
        """Number of CPUs requested per machine, rounded up, or None if no group sets `cpus`."""
        requested_cpus = sum(group.count * (group.cpus or 0) for group in self.workers.values())
        return -(-requested_cpus // self.n_nodes) or None

    @property
    def memory_per_node_gb(self) -> float | None:
        requested_gb = (
            sum(group.count * (group.memory_gb or 0.0) for group in self.workers.values())
            / self.n_nodes
        )
        return max(self.memory_gb or 0.0, requested_gb) or None

    def get_common_value(self, name: str) -> Any:
        """Return the value of the field `name`, which must be equal in all groups that set it.

        Returns None if no group sets the field. Raises `ConfigError` if the values differ, since
        all groups share one job.
        """
        values = {}
        for group, w in self.workers.items():
            if getattr(w, name) is not None:
                values[group] = getattr(w, name)
        if len(set(values.values())) > 1:
            listing = ", ".join(f"{group}: {value!r}" for group, value in values.items())
            raise ConfigError(
                f"Scheduling: the groups differ in {name} ({listing}), and all of them are one job; "
                f"give one"
            )
        return next(iter(values.values()), None)

    @property
    def env(self) -> dict[str, str]:
        """Merged environment variables of all groups.

        Raises `ConfigError` if groups set the same variable to different values.
        """
        variables: dict[str, str] = {}
        for group, workers in self.workers.items():
            for name, value in workers.env.items():
                if variables.setdefault(name, value) != value:
                    raise ConfigError(
                        f"Scheduling: {group} sets {name}={value!r}, another group "
                        f"{variables[name]!r}; give one"
                    )
        return variables

    def list_ignored_fields(self) -> list[str]:
        """Return the names of the fields that are set but have no effect without a Slurm job."""
        names = ("cpus", "memory_gb", "nodelist", "exclude", "container")
        field_names = []
        for group, w in self.workers.items():
            for name in names:
                if getattr(w, name) is not None:
                    field_names.append(f"{group}.{name}")
        return [*(["memory_gb"] if self.memory_gb is not None else []), *field_names]
