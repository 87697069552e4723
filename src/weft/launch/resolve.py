"""Resolution of a run's models and data, with the checks that need torch but no weights or engines.

`resolve_run` is the only place in which a run and its plan (`--dry-run`) choose backends and dtypes,
read config.json and load tokenizers; it checks calls, tokens and layouts on the way. `read_data` is
the only place in which they read rows, which determine the length of the run.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from weft.checkpoints.config_file import (
    HF_BACKEND,
    JAX_BACKEND,
    TORCH_BACKEND,
    prefix_option,
)
from weft.checkpoints.hf_io import read_config, read_raw
from weft.data.datasets.prompt import read_fixed_prompts
from weft.data.features import with_additions
from weft.data.loader import LoadedData, load_data
from weft.data.sample import SequenceSample
from weft.data.tokenizer import Tokenizer
from weft.engine.backends.auto import choose_backend
from weft.engine.backends.common import check_replicated_layout, check_spec, with_dtype
from weft.engine.backends.jax import check_options, read_layout
from weft.engine.device import GIGABYTE, resolve_device, set_deterministic, set_tf32
from weft.engine.generation.caches import compute_token_bytes
from weft.engine.service_spec import NO_NETWORK
from weft.engine.spec import AUTO, TPU
from weft.engine.torch.engine import DTYPES, choose_dtype
from weft.engine.torch.network_source import check_layout
from weft.errors import ConfigError, GraphError, UnknownName, find_nearest
from weft.evaluation.run_suite import PreparedSuite, prepare_suite
from weft.experiment import Experiment, parse_step_range
from weft.experiments.models import find_option_role, read_model_context
from weft.graph.mfc import HOOKS, Call, MFCDef
from weft.launch.cluster import get_device_kind
from weft.models.network.config import TransformerConfig
from weft.observe.metrics import EVAL
from weft.planner.lengths import RunLength
from weft.registry import backends, functions, interfaces
from weft.runtime.calls import implements_method

METHODS = ("generate", "inference", "train_step", "evaluate", "save", "state_dict")


@dataclass(frozen=True)
class ResolvedRun:
    """Experiment in which every role has a backend and a dtype, with its models' files.

    Attributes:
        experiment: The experiment, with a backend and a dtype in every role.
        configs: Configurations of the networks that weft runs itself, by role.
        tokenizers: Tokenizers of all roles; empty if they were not to be loaded.
        device: Device of this process or, if each device has a process, the type of the devices.
    """

    experiment: Experiment
    configs: Mapping[str, TransformerConfig]
    tokenizers: Mapping[str, Tokenizer]
    device: torch.device


def set_up_device(experiment: Experiment, *, in_process: bool) -> torch.device:
    """Return the device of a run, and set torch's options for it in this process.

    With `in_process`, the run computes in this process, and the result is the process's own device.
    Otherwise, it is the type of the devices that the device processes use. In a run on a TPU, torch
    computes on the CPU.
    """
    control = experiment.control
    if not in_process:
        device = torch.device(get_device_kind(experiment))
    else:
        device = resolve_device("cpu" if control.device == TPU else control.device)
    set_deterministic(control.deterministic)
    set_tf32(control.tf32, device)
    return device


def check_tpu_run(experiment: Experiment) -> None:
    """Raise `ConfigError` if a role of a run on a TPU has a network that JAX does not compute."""
    for role, spec in experiment.roles.items():
        if spec.backend != JAX_BACKEND and spec.backend not in NO_NETWORK:
            raise ConfigError(
                f"device={TPU}, {role}.backend={spec.backend}: only backend=jax computes on a TPU; "
                f"write {role}.backend=jax"
            )


def resolve_run(
    experiment: Experiment, device: torch.device, *, tokenizers: bool = True
) -> ResolvedRun:
    """Choose backends and dtypes, read configurations and tokenizers, and check calls and layouts.

    `device` is that of the data's role. Without `tokenizers`, they are neither loaded nor checked.
    Raises `UserError` if a check fails.
    """
    if experiment.control.device == TPU:
        check_tpu_run(experiment)
    # Backends are still open only for models that were not on this machine before.
    if any(spec.backend == AUTO for spec in experiment.roles.values()):
        roles = {name: choose_backend(spec) for name, spec in experiment.roles.items()}
        experiment = replace(experiment, roles=roles)
    check_calls(experiment)
    # The library that loads tokenizers also reads config.json, and would report a problem in it as
    # a problem with the tokenizer.
    configs = read_configs(experiment)
    loaded: dict[str, Tokenizer] = {}
    if tokenizers:
        loaded = load_tokenizers(experiment)
        check_tokens(experiment, loaded)
        check_stop_ids(experiment, loaded)
    experiment = with_dtypes(experiment, device)
    check_layouts(experiment, configs)
    return ResolvedRun(experiment, configs, loaded, device)


@dataclass(frozen=True)
class RunData:
    """Rows of a run, and values that depend on them.

    Attributes:
        loaded: The training and validation rows.
        horizon: Length of the run.
        fixed_prompts: The tokenized prompts of the file `eval_prompts`, or None if there is none.
        eval_suite: The tasks of the option `eval_suite`, or None if there are none.
        longest: Number of tokens of the longest sequence: the longest row of the data or of
            `eval_prompts`, with the tokens that are sampled after it. None if rows are not counted.
    """

    loaded: LoadedData
    horizon: RunLength
    fixed_prompts: SequenceSample | None
    eval_suite: PreparedSuite | None
    longest: int | None


def read_data(run: ResolvedRun, *, progress: bool | None = None, ahead: bool = False) -> RunData:
    """Read the rows of a run, and check that its calls can process them.

    If `progress` is False, no progress is shown. `ahead` allows large files to be tokenized during
    training. Raises `UserError` for rows or options that cannot be used.
    """
    experiment = run.experiment
    control = experiment.control
    loaded = load_data(
        experiment.dataset,
        experiment.dataset_type,
        run.tokenizers[experiment.data_role],
        seed=control.seed,
        progress=progress,
        ahead=ahead,
    )
    try:
        fixed_prompts = load_fixed_prompts(experiment, run.tokenizers)
        eval_suite = prepare_suite(experiment, run.tokenizers)
        check_suite_names(control.save_best, eval_suite, loaded.valid)
        loaded.check_max_seqlen(partial(check_longest_sequence, run))
        longest = loaded.max_seqlen or None
        if longest is not None:
            if fixed_prompts is not None:
                longest = max(longest, *fixed_prompts.lengths["prompt"].tolist())
            longest += find_most_sampled(experiment.calls.values())
        horizon = RunLength.from_experiment(experiment, loaded.train)
        check_steps(control.profile_steps, horizon.steps)
    except BaseException:
        loaded.close()
        raise
    return RunData(loaded, horizon, fixed_prompts, eval_suite, longest)


# -- calls


def check_calls(experiment: Experiment) -> None:
    """Check the interfaces, methods, arguments, functions and hooks of all graphs.

    Raises `UserError` if an interface lacks the method that a node calls or does not accept the
    node's arguments, or if a function or hook is unknown.
    """
    graphs = [experiment.graph]
    for evaluation in (experiment.evaluation, experiment.fixed_prompts, experiment.eval_suite):
        if evaluation is not None:
            graphs.append(evaluation.graph)
    for graph in graphs:
        for node in graph.nodes:
            if isinstance(node, MFCDef):
                _check_call(experiment, node)
            else:
                functions.get(node.function)


def _check_call(experiment: Experiment, node: MFCDef) -> None:
    cls = interfaces.get(node.interface)
    if not inspect.isclass(cls):
        raise GraphError(
            f"node {node.name!r}: the interface {node.interface!r} is not a class; register one "
            f"that has {node.method}"
        )
    if not implements_method(node.interface, node.method):
        existing_methods = []
        for method in METHODS:
            if implements_method(node.interface, method):
                existing_methods.append(method)
        raise GraphError(
            f"node {node.name!r} calls {node.method} of the interface {node.interface!r}, which "
            f"does not have it (it has {', '.join(existing_methods) or 'none of them'}); name "
            "another interface or method"
        )
    try:
        inspect.signature(cls).bind(**node.args)
    except TypeError as error:
        raise ConfigError(
            f"node {node.name!r}: the interface {node.interface!r} does not take its args: {error}"
        ) from error
    for hook in (*node.pre_hooks, *node.post_hooks):
        if isinstance(hook, Call):
            _check_hook(node, hook.function)
    if node.cache:
        _check_cache(experiment, node)


def _check_hook(node: MFCDef, name: str) -> None:
    try:
        functions.get(name)
    except UnknownName:
        close = find_nearest(name, [*HOOKS, *functions.list_names()])
        hint = f" (did you mean {' or '.join(close)}?)" if close else ""
        raise UnknownName(
            f"{node.name}: unknown hook {name!r}{hint}; a hook is {', '.join(HOOKS)} or "
            f"the name of a function registered with register_function"
        ) from None


def _check_cache(experiment: Experiment, node: MFCDef) -> None:
    changed = {trained.role for trained in experiment.trained_nodes}
    changed |= {sync.target for sync in experiment.graph.syncs}
    if node.method != "inference" or node.role in changed or not node.output_keys:
        raise GraphError(
            f"node {node.name!r}: cache=True is for inference with a frozen role only, and "
            f"this is {node.method} of "
            f"{node.role!r}{', whose weights change' if node.role in changed else ''}; leave it out"
        )


# -- models and tokenizers


def read_configs(experiment: Experiment) -> dict[str, TransformerConfig]:
    """Return the configuration of each network that weft runs itself, by role.

    Raises `CheckpointError` if a role's config.json does not describe a network. The message names
    the option and the file.
    """
    configs = {}
    for role, spec in experiment.roles.items():
        if spec.path is None or spec.backend not in (TORCH_BACKEND, HF_BACKEND, JAX_BACKEND):
            continue
        with prefix_option(f"{find_option_role(experiment.config, role, spec.path)}.path"):
            if spec.backend != HF_BACKEND:
                configs[role] = read_config(spec.path, spec.type)[1]
            else:
                read_raw(spec.path)
    return configs


def load_tokenizers(experiment: Experiment) -> dict[str, Tokenizer]:
    """Load the tokenizers of all roles, and return them by role.

    Roles with equal tokenizer options and paths share one object. Raises `ConfigError` for a role
    without a path, and `UserError` if a tokenizer cannot be loaded.
    """
    shared: dict[str, Tokenizer] = {}
    tokenizers = {}
    for role, spec in experiment.roles.items():
        if spec.path is None and spec.tokenizer.path is None:
            raise ConfigError(
                f"{role}.path is missing: give a Hugging Face directory or a hub name"
            )
        key = repr((spec.tokenizer, spec.path, spec.trust_remote_code))
        if key not in shared:
            option = f"{find_option_role(experiment.config, role, str(spec.path))}.tokenizer"
            shared[key] = Tokenizer.load(spec.tokenizer, spec.path, spec.trust_remote_code, option)
        tokenizers[role] = shared[key]
    return tokenizers


def check_tokens(experiment: Experiment, tokenizers: Mapping[str, Tokenizer]) -> None:
    """Check that the tokenizer of each role is compatible with the data's tokenizer.

    The check is done by the method `check_tokens` of the roles' interfaces. Interfaces without this
    method are skipped. `tokenizers` maps roles to tokenizers.
    """
    data = tokenizers[experiment.data_role]
    for node in experiment.calls.values():
        if implements_method(node.interface, "check_tokens"):
            interfaces.get(node.interface)(**node.args).check_tokens(
                node.role, tokenizers[node.role], data
            )


def check_stop_ids(experiment: Experiment, tokenizers: Mapping[str, Tokenizer]) -> None:
    """Raise `ConfigError` if a stop id is not in the model's vocabulary.

    The message contains the size of the vocabulary.
    """
    for call in experiment.calls.values():
        spec = experiment.roles[call.role]
        stop_ids = call.args.get("stop_ids") or []
        if not stop_ids or spec.path is None or spec.backend in NO_NETWORK:
            continue
        size = read_raw(spec.path).get("vocab_size")
        if isinstance(size, int) and max(stop_ids) >= (
            known := max(size, tokenizers[call.role].vocab_size)
        ):
            raise ConfigError(
                f"gen.stop_ids={list(stop_ids)}: {call.role} has a vocabulary of {known:,} tokens, 0 "
                f"to {known - 1:,}, and "
                f"no token {max(stop_ids):,}; take it out (gen.stop takes texts)"
            )


# -- dtypes, layouts and lengths


def with_dtypes(experiment: Experiment, device: torch.device) -> Experiment:
    """Return a copy of the experiment in which every role has a dtype.

    Roles without a dtype get the dtype of the role whose tokenizer encodes the data (`data_role`).
    A policy and its reference model therefore have equal dtypes.
    """
    main = experiment.roles[experiment.data_role]
    if main.path is None or main.backend in NO_NETWORK:
        main_with_dtype = main
    else:
        on_cpu = device.type != "cuda" and experiment.control.device != TPU
        main_with_dtype = with_dtype(main, main.path, on_cpu=on_cpu)
    dtype = main_with_dtype.dtype or "float32"
    roles = {}
    for name, spec in experiment.roles.items():
        roles[name] = replace(spec, dtype=spec.dtype or dtype)
    return replace(experiment, roles=roles)


def check_layouts(experiment: Experiment, configs: Mapping[str, TransformerConfig]) -> None:
    """Raise `ConfigError` if a backend does not support a layout that the run uses.

    A layout describes how a model is distributed over devices. Roles and their calls can each have
    one. The message names the layout's option. `configs` has the networks' configurations by role.
    """
    for role, spec in experiment.roles.items():
        if spec.backend == JAX_BACKEND:
            try:
                check_options(spec)
                read_layout(spec)
            except ConfigError as error:
                raise ConfigError(f"{role}.{error}") from None
    meshes, call_meshes = dict(experiment.role_meshes), experiment.call_meshes
    roles = {role: role for role in experiment.roles}
    for name, call in experiment.calls.items():
        roles[call.name] = call.role
        if call.layout is not None:
            meshes[call.name] = call_meshes[name]
    # Check calls before roles, so that an error names the call's option.
    for name, mesh in reversed(meshes.items()):
        spec = experiment.roles[roles[name]]
        try:
            if spec.backend == "torch":
                check_spec(spec)
                check_layout(spec, mesh.layout, configs[roles[name]])
            elif spec.backend == JAX_BACKEND and mesh.layout.num_devices > 1:
                raise ConfigError(
                    "backend=jax divides the devices of a role by the role's own layout; leave "
                    "that of the call out"
                )
            elif spec.backend == "hf":
                check_replicated_layout(mesh.layout)
            elif mesh.layout.num_devices > 1 and not _can_use_mesh(spec.backend):
                raise ConfigError(
                    f"backend={spec.backend} runs on one device; write d1, or backend=torch"
                )
        except ConfigError as error:
            rule = str(error).removeprefix("layout: ").removeprefix(f"layout={mesh.layout}: ")
            raise ConfigError(f"{name}.layout={mesh.layout}: {rule}") from None


def _can_use_mesh(backend: str) -> bool:
    """Return whether a backend can build engines on several devices.

    The third argument of such a backend is the mesh.
    """
    names = inspect.signature(backends.get(backend)).parameters
    return len(names.keys() - {"tokenizer"}) > 2


def check_longest_sequence(run: ResolvedRun, rows: int) -> None:
    """Raise `ConfigError` if a call cannot process the longest sequence.

    The longest sequence consists of the longest row of the data, which has `rows` tokens, and of
    the tokens sampled after it. It must not exceed any call's maximum number of tokens per
    micro-batch, and must fit in the KV cache.
    """
    experiment = run.experiment
    check_kv_cache(run, rows)
    calls = experiment.graph.list_model_calls()
    sampled = find_most_sampled(calls)
    for call in calls:
        limit = call.max_tokens_per_microbatch or experiment.control.max_tokens_per_microbatch
        if rows and call.method != "generate" and rows + sampled > limit:
            prefix = f"{call.name}." if call.max_tokens_per_microbatch else ""
            if sampled:
                sequence = f"a prompt of {rows:,} tokens and {sampled:,} new ones"
                fix = "gen.max_new_tokens"
            else:
                sequence = f"a row of {rows:,} tokens"
                fix = "dataset.max_seqlen, which cuts longer rows"
            raise ConfigError(
                f"{prefix}max_tokens_per_microbatch={limit}: cannot hold the longest sequence, "
                f"{sequence}; raise it, or lower {fix}"
            )


def find_most_sampled(calls: Iterable[MFCDef]) -> int:
    """Return the largest number of tokens that a call samples for a completion, or 0."""
    limits = [0]
    for call in calls:
        if call.method == "generate":
            limits.append(int(call.args.get("max_new_tokens") or 0))
    return max(limits)


def check_kv_cache(run: ResolvedRun, rows: int) -> None:
    """Raise `ConfigError` if the KV cache of a single sequence does not fit in `gen.kv_cache_gb`.

    `rows` is the number of tokens of the longest row.
    """
    experiment = run.experiment
    for name, call in experiment.calls.items():
        limit_gb = call.args.get("kv_cache_gb")
        spec = experiment.roles[call.role]
        if call.method != "generate" or limit_gb is None or spec.backend != "torch":
            continue
        layout = experiment.call_meshes[name].layout
        bytes_per_token = compute_token_bytes(
            run.configs[call.role], DTYPES[choose_dtype(spec)]
        ) / (layout.tensor * layout.pipeline)
        # If only a share of the answers is sampled, `rows` includes completions, and the length of
        # the prompts is not known.
        if "share" in call.args:
            prompt = 1
        else:
            prompt = max(rows, 1)
        needed = prompt + int(call.args.get("max_new_tokens") or 0)
        room = int(limit_gb * GIGABYTE / bytes_per_token)
        if needed > room:
            raise ConfigError(
                f"gen.kv_cache_gb={limit_gb:g}: has room for keys and values of {room:,} tokens, and "
                f"a prompt with its completion can have {needed:,}; write "
                f"{1.05 * needed * bytes_per_token / GIGABYTE:.3g} or more, or leave it out"
            )


# -- the rest of the data


def load_fixed_prompts(
    experiment: Experiment, tokenizers: Mapping[str, Tokenizer]
) -> SequenceSample | None:
    """Return the tokenized prompts of the file `eval_prompts`, or None if the run has no such file.

    Raises `DataError` if the file cannot be used.
    """
    path = experiment.control.eval_prompts
    if path is None or experiment.fixed_prompts is None:
        return None
    (call,) = experiment.fixed_prompts.graph.list_model_calls()
    context = read_model_context(experiment.roles[call.role])
    spec = experiment.dataset
    as_chat = bool(spec.args.get("as_chat", (spec.type or experiment.dataset_type) == "chat"))
    tokenizer = with_additions(
        replace(spec, system_tags=False, system_tag_length=False), tokenizers[call.role]
    )
    if context is None:
        max_tokens = None
    else:
        max_tokens = context - int(call.args["max_new_tokens"])
    return read_fixed_prompts(path, tokenizer, as_chat=as_chat, max_tokens=max_tokens)


def check_suite_names(
    metric: str | None, eval_suite: PreparedSuite | None, sources: Collection[str]
) -> None:
    """Check the names of the tasks of `eval_suite`, which are parts of the names of metrics.

    `metric` is the option `save_best`, and `sources` are the names of the validation sources.
    Raises `ConfigError` if a task has the name of a source, and if the metric is neither one of a
    task nor one of the sources.
    """
    if eval_suite is None:
        return
    names = eval_suite.list_names()
    for name in names:
        if name in sources:
            raise ConfigError(
                f"eval_suite.tasks: {name!r} is also the name of validation rows, so their metrics "
                f"would have equal names; rename one of them"
            )
    if metric is None or not metric.startswith(EVAL) or sources:
        return
    task, _, rest = metric.removeprefix(EVAL).partition("/")
    if task not in names or not rest:
        examples = [f"{EVAL}{name}/acc" for name in find_nearest(task, names) or names[:3]]
        raise ConfigError(
            f"save_best={metric}: the run evaluates on tasks only; write eval/TASK/METRIC, such as "
            f"{' or '.join(examples)}"
        )


def check_steps(steps: str | None, total: int) -> None:
    """Raise `ConfigError` if the run ends before the first step to trace.

    `steps` is the value of the option `profile_steps`, and `total` is the number of steps of the
    run.
    """
    if steps is not None and parse_step_range(steps)[0] > total:
        count = f"{total} {'step' if total == 1 else 'steps'}"
        raise ConfigError(
            f"profile_steps={steps}: the run has {count}; name one of them, or leave it out"
        )
