"""Assemble a checked `Experiment` from an algorithm's plan and the run options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from weft.data.named import find_entry
from weft.data.spec import DatasetSpec, list_source_specs
from weft.engine.spec import GenerationSpec, ModelSpec
from weft.errors import ConfigError, build_unknown_name_error
from weft.experiment import Control, Evaluation, Experiment
from weft.experiments import checks
from weft.experiments._placement import place_calls
from weft.experiments.common import MFCOptions, RunConfig, parse_hooks
from weft.experiments.models import (
    RunConfigT,
    find_option_role,
    read_model_context,
    resolve_models,
)
from weft.graph.graph import DataflowGraph
from weft.graph.mfc import MFCDef, Node, Offload, ParamSync
from weft.options import to_mapping, validate
from weft.planner.placement import HEURISTIC, SEARCH, allocate_layouts, is_plan_path
from weft.registry import datasets, import_user_code

DEFAULT_BATCH = 32

# The only call of the graph for the option `eval_prompts`, which answers these prompts
PROMPTS_NODE = "eval_prompts"
# The calls of the graph for the option `eval_suite`
SUITE_SCORE = "suite_score"
SUITE_GENERATE = "suite_generate"
NEW_TOKENS = 128  # default answer length in a run that samples nothing else
# copied from the run's own sampling
COPIED_OPTIONS = ("stop", "stop_ids", "kv_cache_gb", "decode_ahead")

# Keys in the rows of each shipped dataset type; a registered type can provide any of them.
ANSWER_KEYS = ("prompt", "completion", "loss_mask")
RANKING_KEYS = (*ANSWER_KEYS, "rank", "comparison", "margin")
COMPARISON_KEYS = (*RANKING_KEYS, "label")
ROW_KEYS = {
    "prompt_answer": ANSWER_KEYS,
    "chat": ANSWER_KEYS,
    "text": ANSWER_KEYS,
    "prompt": ("prompt",),
    "paired_comparison": COMPARISON_KEYS,
    "preference": COMPARISON_KEYS,
    "ranking": RANKING_KEYS,
}


@dataclass(frozen=True)
class ExperimentParts:
    """Roles, graph nodes and data that an algorithm derives from its options.

    `nodes` and `evaluation` are the nodes of the main graph and of the evaluation graph. `notes`
    are lines for the plan that is printed before the run. `longest` is the maximum number of tokens
    per sequence, or None if no option sets it. The other fields have the same meaning as in
    `Experiment`.
    """

    roles: Mapping[str, ModelSpec]
    nodes: Sequence[Node]
    dataset: DatasetSpec
    dataset_type: str
    data_role: str
    steps_follow: str
    longest: int | None  # maximum tokens of one sequence, if the options set it
    evaluation: Sequence[Node] = ()
    syncs: Sequence[ParamSync] = ()
    init_from: Mapping[str, str] = field(default_factory=dict)
    updates_per_firing: Mapping[str, int] = field(default_factory=dict)
    notes: Sequence[str] = ()


def assemble(config: RunConfig, plan: ExperimentParts) -> Experiment:
    """Build the experiment that `plan` describes, and check all that can be checked without torch.

    Raises `UserError` if an option is invalid. The message names the option, its value and the rule
    that it breaks.
    """
    # Give every role a layout, and check its model.
    _check_sizes(config, plan)
    trained = set()
    for node in plan.nodes:
        if isinstance(node, MFCDef) and node.trains:
            trained.add(node.role)
    specs = allocate_layouts(
        plan.roles, config.allocation_mode, config.n_nodes * (config.n_gpus_per_node or 1)
    )
    roles = {}
    for name, spec in specs.items():
        roles[name] = replace(_expand_paths(spec), trained=name in trained)
    options = _collect_options(config, plan)
    for name, spec in roles.items():
        checks.check_model(find_option_role(options, name, str(spec.path)), spec)
    # Build the experiment and apply the options of calls.
    keys = ROW_KEYS.get(plan.dataset_type, COMPARISON_KEYS)
    model_notes = dict.fromkeys(note for spec in roles.values() for note in spec.notes)
    experiment = Experiment(
        control=_build_control(config, plan.dataset),
        roles=roles,
        graph=DataflowGraph([_with_offload(node, roles) for node in plan.nodes], keys, plan.syncs),
        dataset=plan.dataset,
        dataset_type=plan.dataset_type,
        data_role=plan.data_role,
        evaluation=_build_evaluation(plan, keys),
        init_from=plan.init_from,
        saved_roles=tuple(name for name in roles if name in trained),
        config=options,
        steps_follow=plan.steps_follow,
        updates_per_firing=plan.updates_per_firing,
        plan_notes=(
            *model_notes,
            *plan.notes,
            *_build_allocation_notes(config),
            *config.eval_suite.describe(),
        ),
    )
    experiment = _with_options(experiment, config)
    # Place the calls on devices.
    if config.allocation_mode in (HEURISTIC, SEARCH) or is_plan_path(config.allocation_mode):
        experiment = place_calls(experiment, config, plan.roles)
    experiment = replace(
        experiment,
        fixed_prompts=_build_fixed_prompts(config, experiment),
        eval_suite=_build_suite(config, experiment),
    )
    placement = {}
    for node in experiment.graph.list_model_calls():
        placement[node.name] = experiment.call_meshes[node.name].layout
    checks.check_losses(experiment.graph)
    return replace(experiment, placement=placement)


def _build_allocation_notes(config: RunConfig) -> list[str]:
    if config.allocation_mode in (HEURISTIC, SEARCH) and config.n_gpus_per_node is None:
        return [
            f"allocation_mode={config.allocation_mode}: n_gpus_per_node is not set, so one device "
            f"of each machine is used"
        ]
    return []


def check_config(config: RunConfigT) -> RunConfigT:
    """Check the options that all experiments share, and resolve the models of the roles.

    In the returned configuration, each role's model is resolved to a directory and a backend
    (`weft.experiments.models`). Each algorithm's `build` method calls this function before it
    checks the algorithm's own options.
    """
    validate(config)
    import_user_code(config.imports)  # registers names that the options can refer to
    checks.check_names(experiment_name=config.experiment_name, trial_name=config.trial_name)
    checks.check_flash(config.flash_attention, config.mode)
    data = getattr(config, "dataset", None)
    if isinstance(data, DatasetSpec) and data.sample_mixing and config.algorithm != "sft":
        raise ConfigError(
            f"dataset.sample_mixing={data.sample_mixing}: only sft mixes samples, since "
            f"{config.algorithm} counts the ids of its batches; leave it out"
        )
    return resolve_models(config)


def fill_batch_sizes(dataset: DatasetSpec) -> DatasetSpec:
    """Return the dataset options with default batch sizes, and with `path` moved to `train_path`.

    Raises `ConfigError` if there are no training data, or if options are mutually exclusive.
    """
    checks.check_dataset(dataset)
    size = dataset.train_bs_n_seqs
    if size is None and dataset.train_tokens_per_batch is None:
        size = DEFAULT_BATCH
    valid = dataset.valid_bs_n_seqs
    if valid is None and dataset.valid_tokens_per_batch is None:
        valid = size or DEFAULT_BATCH
    train_path = checks.expand_home(dataset.train_path or dataset.path)
    valid_path = checks.expand_home(dataset.valid_path)
    sized = replace(dataset, train_bs_n_seqs=size, valid_bs_n_seqs=valid)
    return replace(sized, train_path=train_path, valid_path=valid_path, path=None)


def _expand_paths(spec: ModelSpec) -> ModelSpec:
    """Return the role's spec with `~` expanded in the paths of the model and the tokenizer.

    A shell does not expand `~` in an argument such as `actor.path=~/model`.
    """
    tokenizer = replace(spec.tokenizer, path=checks.expand_home(spec.tokenizer.path))
    return replace(spec, path=checks.expand_home(spec.path), tokenizer=tokenizer)


def get_batch_size(dataset: DatasetSpec) -> int:
    """Return the number of dataset rows that a node processes per step.

    Returns 0 if the number varies. It varies if batches are formed by token count, or if pairs of
    short rows count as one row (`sample_mixing`).
    """
    return 0 if dataset.sample_mixing else dataset.train_bs_n_seqs or 0


def choose_dataset_type(dataset: DatasetSpec, default: str) -> str:
    """Return the dataset type that the options set, or else `default`, that of the algorithm.

    Raises `ConfigError` if the type is unknown.
    """
    name = dataset.type or default
    if name not in datasets:
        raise build_unknown_name_error("dataset type", name, datasets.list_names())
    return name


def build_evaluation_nodes(nodes: Sequence[Node], dataset: DatasetSpec) -> list[Node]:
    """Return the nodes of the evaluation graph, which processes validation rows.

    They are copies of `nodes` with the batch size for validation. Training calls are replaced by
    calls of the method `evaluate`, which computes the loss without an optimizer step.
    """
    size = dataset.valid_bs_n_seqs or 0
    resized = [replace(node, batch_size=size) for node in nodes]
    evaluation_nodes: list[Node] = []
    for node in resized:
        if isinstance(node, MFCDef) and node.trains:
            node = replace(node, method="evaluate")
        evaluation_nodes.append(node)
    return evaluation_nodes


def has_validation(dataset: DatasetSpec) -> bool:
    """Return whether validation rows are configured, for the dataset or for one of its sources."""
    # Look for validation rows of the sources, then of the named datasets.
    sources = list_source_specs(dataset)
    if any(source.valid_path is not None or source.valid_split for source in sources):
        return True
    for source in sources:
        has_named_rows = source.named is not None and source.valid_split is None
        if has_named_rows and find_entry(source.named or "", dataset.named_file).valid is not None:
            return True
    return dataset.valid_path is not None or dataset.valid_split > 0


def _collect_options(config: RunConfig, plan: ExperimentParts) -> dict[str, Any]:
    """Return all options as nested dicts, with default learning rates and lengths filled in."""
    # Fill in the learning rates of trained roles.
    values = to_mapping(config)
    for name, spec in plan.roles.items():
        role_values = values.get(name)
        if spec.trained and isinstance(role_values, dict):
            role_values["optimizer"]["lr"] = spec.optimizer.peak_lr
    # Fill in the lengths of rows and of sampled completions.
    lengths = {name: getattr(plan.dataset, name) for name in ("max_seqlen", "max_prompt_len")}
    values["dataset"] |= {name: length for name, length in lengths.items() if length is not None}
    samplers = []
    for node in plan.nodes:
        if isinstance(node, MFCDef) and node.method == "generate":
            samplers.append(node)
    if samplers and config.generation:
        group, _, name = config.generation.rpartition(".")
        gen = values[group][name] if group else values[name]
        gen["max_new_tokens"] = samplers[0].args["max_new_tokens"]
    return values


def _check_sizes(config: RunConfig, plan: ExperimentParts) -> None:
    if plan.longest is None:
        return  # the lengths of the rows are checked when they are read
    of_what = "dataset.max_seqlen, or dataset.max_prompt_len + gen.max_new_tokens"
    checks.check_fits(
        "max_tokens_per_microbatch", config.max_tokens_per_microbatch, plan.longest, of_what
    )
    for name in ("train_tokens_per_batch", "valid_tokens_per_batch"):
        if name == "valid_tokens_per_batch":
            longest = plan.dataset.valid_max_seqlen
        else:
            longest = None
        checks.check_fits(
            f"dataset.{name}", getattr(plan.dataset, name), longest or plan.longest, of_what
        )
    for spec in fields(config):
        value = getattr(config, spec.name)
        if isinstance(value, MFCOptions):
            option = f"{spec.name}.max_tokens_per_microbatch"
            checks.check_fits(option, value.max_tokens_per_microbatch, plan.longest, of_what)


def _build_control(config: RunConfig, dataset: DatasetSpec) -> Control:
    """Return the run options as a `Control` object, which the runtime reads.

    Raises `ConfigError` if evaluation is requested, but there are no validation rows, no tasks, no
    `eval_prompts` and no metric `save_best`.
    """
    has_data = has_validation(dataset) or bool(config.eval_suite.tasks)
    options = []
    for name in ("eval_freq_steps", "eval_freq_epochs", "eval_freq_secs"):
        if getattr(config, name) is not None:
            options.append(name)
    needed = (
        "set dataset.valid_path, dataset.valid_split=0.05 to set training rows aside, or "
        "eval_suite.tasks"
    )
    if options and config.eval_prompts is None and config.save_best is None and not has_data:
        raise ConfigError(
            f"{options[0]}={getattr(config, options[0])}: there is nothing to evaluate on; "
            f"{needed}, or eval_prompts"
        )
    if config.eval_at_start and not has_data:
        raise ConfigError(f"eval_at_start=true: there is nothing to evaluate on; {needed}")
    return config.control()


def _build_evaluation(plan: ExperimentParts, keys: Sequence[str]) -> Evaluation | None:
    if not plan.evaluation or not has_validation(plan.dataset):
        return None
    nodes = [_with_offload(node, plan.roles) for node in plan.evaluation]
    return Evaluation(DataflowGraph(nodes, keys), plan.dataset.valid_bs_n_seqs or 0)


def _with_offload(node: Node, roles: Mapping[str, ModelSpec]) -> Node:
    """Return the node with an offload hook if it is a call whose role has the option `offload`.

    After the call, the hook moves the role's weights to host memory. The hook is part of the graph,
    so that users can see and remove it. Host functions, and calls of roles without this option, are
    returned unchanged.
    """
    if isinstance(node, MFCDef) and roles[node.role].offload:
        return replace(node, post_hooks=(*node.post_hooks, Offload("weights")))
    return node


def _with_options(experiment: Experiment, config: RunConfig) -> Experiment:
    """Return the experiment with the options of individual calls applied.

    An example of such an option is `actor_train.layout`. Raises `ConfigError` if options are set
    for a call that is not in the graph.
    """
    nodes = {node.name: node for node in experiment.graph.nodes}
    changes = {}
    for spec in fields(config):
        call_options: Any = getattr(config, spec.name)
        if not isinstance(call_options, MFCOptions):
            continue
        if spec.name in nodes:
            node = nodes[spec.name]
            assert isinstance(node, MFCDef), (
                f"{spec.name} is a host function and has no call options"
            )
            changes[spec.name] = _list_changes(call_options, node)
        elif call_options != type(call_options)():
            raise ConfigError(
                f"{spec.name}.*: these options are for a call that is not in this graph; its "
                f"nodes are {', '.join(experiment.graph.order)}"
            )
    for name, changed in changes.items():
        if changed:
            experiment = experiment.with_mfc(name, **changed)
    return experiment


def _list_changes(options: MFCOptions, node: MFCDef) -> dict[str, Any]:
    """Return the fields of `node` that `options` change, mapped to their new values."""
    changes: dict[str, Any] = {}
    for name in ("interface", "max_tokens_per_microbatch", "deadline_s", "layout", "device_mesh"):
        if getattr(options, name) is not None:
            changes[name] = getattr(options, name)
    if options.args:
        base = {} if options.interface is not None else node.args
        changes["args"] = {**base, **options.args}
    for name in ("pre_hooks", "post_hooks"):
        if getattr(options, name) is not None:
            changes[name] = parse_hooks(getattr(options, name))
    return changes


def _build_fixed_prompts(config: RunConfig, experiment: Experiment) -> Evaluation | None:
    """Return the graph in which the trained model answers the prompts of the option `eval_prompts`.

    Returns None if the option is not set. If the run samples completions with the trained model,
    the same layout and devices are used for the answers. Raises `ConfigError` if the run trains no
    model that generates text.
    """
    path = config.eval_prompts
    most = config.eval_prompts_max_new_tokens
    if path is None:
        if most is not None:
            raise ConfigError(
                f"eval_prompts_max_new_tokens={most}: eval_prompts is not set; set it, or leave "
                "this out"
            )
        return None
    # Choose the length of answers.
    instead = "give the prompts as dataset.path"
    sampler, role = _find_sampler(config, experiment, f"eval_prompts={path}", instead)
    sampling_args = dict(sampler.args) if sampler is not None else {}
    spec = experiment.roles[role]
    context = read_model_context(spec)
    default = int(sampling_args.get("max_new_tokens") or NEW_TOKENS)
    if most is None:
        if sampler is not None or context is None:
            most = default
        else:
            most = max(1, min(default, context // 2))
    if context is not None and most >= context:
        raise ConfigError(
            f"eval_prompts_max_new_tokens={most}: leaves no room for a prompt in the model's "
            f"context of {context} tokens; "
            "lower it"
        )
    # Sample greedily, with default options except for COPIED_OPTIONS.
    args = to_mapping(GenerationSpec())
    args |= {name: sampling_args[name] for name in COPIED_OPTIONS if name in sampling_args}
    call = MFCDef(
        PROMPTS_NODE,
        role,
        "generate",
        "generate",
        0,
        input_keys=("prompt",),
        output_keys=("completion", "logprobs", "versions", "finished"),
        args={**args, "max_new_tokens": most, "greedy": True, "samples_per_prompt": 1},
        layout=None if sampler is None else sampler.layout,
        device_mesh=None if sampler is None else sampler.device_mesh,
        post_hooks=(Offload("weights"),) if spec.offload else (),
    )
    return Evaluation(DataflowGraph([call], ("prompt",)), 0)


def _build_suite(config: RunConfig, experiment: Experiment) -> Evaluation | None:
    """Return the graph whose calls answer the requests of the tasks in `eval_suite`.

    One call scores given texts with the role's own layout. The other one generates, with the layout
    and devices of the run's own sampling if there is one. Returns None if the option is not set.
    Raises `ConfigError` if the run trains no model that generates text.
    """
    spec = config.eval_suite
    spec.check()
    if not spec.tasks:
        return None
    option_text = f"eval_suite.tasks=[{','.join(spec.tasks)}]"
    sampler, role = _find_sampler(config, experiment, option_text, "use weft eval suite")
    hooks = (Offload("weights"),) if experiment.roles[role].offload else ()
    score = MFCDef(
        SUITE_SCORE,
        role,
        "task_requests",
        "inference",
        0,
        input_keys=("prompt", "completion"),
        output_keys=("logprobs", "top1"),
        post_hooks=hooks,
    )
    generate = MFCDef(
        SUITE_GENERATE,
        role,
        "task_requests",
        "generate",
        0,
        input_keys=("prompt",),
        output_keys=("answer",),
        args={} if sampler is None else {"kv_cache_gb": sampler.args.get("kv_cache_gb")},
        layout=None if sampler is None else sampler.layout,
        device_mesh=None if sampler is None else sampler.device_mesh,
        post_hooks=hooks,
    )
    return Evaluation(DataflowGraph([score, generate], ("prompt", "completion")), 0)


def _find_sampler(
    config: RunConfig, experiment: Experiment, option_text: str, instead: str
) -> tuple[MFCDef | None, str]:
    """Return the run's call that samples with the trained policy, and the policy's role.

    The call is None if the run does not sample. `option_text` is the option that needs the policy,
    with its value, and `instead` what to do in a run that trains no model, for messages. Raises
    `ConfigError` if the run trains no model that generates text.
    """
    calls = experiment.graph.list_model_calls()
    trained = []
    for call in calls:
        if call.trains and experiment.roles[call.role].head == "lm":
            trained.append(call.role)
    if not trained and any(call.trains for call in calls):
        raise ConfigError(
            f"{option_text}: {config.algorithm or 'this run'} trains a model that scores "
            "texts but cannot generate any; leave it out, or set it in a run that trains a policy "
            "(sft, dpo, ppo, grpo, ...)"
        )
    if not trained:
        raise ConfigError(f"{option_text}: this run trains no model; {instead}")
    sampler = next(
        (call for call in calls if call.role == trained[0] and call.method == "generate"), None
    )
    return sampler, trained[0]
