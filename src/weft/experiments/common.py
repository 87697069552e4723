"""Options of a run and of single calls, and how a configuration builds an `Experiment`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from types import FunctionType
from typing import Any, ClassVar, Protocol

from weft.data.spec import DatasetSpec
from weft.data.suite_spec import EvalSuiteSpec
from weft.engine.service_spec import NO_NETWORK
from weft.engine.spec import FLASH, ModelSpec
from weft.errors import ConfigError
from weft.experiment import Control, Experiment
from weft.experiments import checks
from weft.experiments.machines import LaunchSpec, SlurmSpec
from weft.graph.mfc import HOOKS as NAMED_HOOKS
from weft.graph.mfc import Call, Hook, Offload
from weft.options import iterate_options, option, read
from weft.planner.placement import SearchSpec
from weft.reading import find_url_problem
from weft.storage.buckets import find_bucket_problem


@dataclass
class WandbSpec:
    """Options of the logger for Weights & Biases (W&B).

    The API key is read from the environment or from the W&B login, and is never written to a file.
    """

    mode: str | None = option(
        None,
        "online, offline or disabled; absent: the value of WANDB_MODE, or online, if another "
        "logger.wandb option is set",
        choices=("online", "offline", "disabled"),
    )
    entity: str | None = option(None, "user or team")
    project: str | None = option(None, "name of the project; absent: experiment_name")
    name: str | None = option(None, "name of the run; trial_name when absent")
    prefix: str | None = option(None, "prefix of the names of all metrics")
    id: str | None = option(
        None, "id of the W&B run; absent: a new one, or a resumed run's earlier one"
    )
    dir: str | None = option(
        None, "folder for W&B's local files; absent: the run's own", check=find_url_problem
    )


@dataclass
class TrackioSpec:
    """Options of the logger for Trackio, a local tracker with W&B's interface."""

    project: str | None = option(None, "name of the project; setting it enables trackio")
    name: str | None = option(None, "name of the run; trial_name when absent")
    space_id: str | None = option(
        None, "Hugging Face Space that shows the run; absent: trackio runs on this machine"
    )


@dataclass
class LoggerSpec:
    """Options of the loggers that record metrics in addition to metrics.jsonl."""

    tensorboard: bool = option(False, "write TensorBoard files into the run's directory")
    wandb: WandbSpec = option(WandbSpec(), "Weights & Biases")
    trackio: TrackioSpec = option(TrackioSpec(), "trackio")

    def get_enabled(self) -> dict[str, dict[str, Any]]:
        """Return the options of each enabled logger, keyed by the logger's name."""
        if self.tensorboard:
            loggers: dict[str, dict[str, Any]] = {"tensorboard": {}}
        else:
            loggers = {}
        wandb = {}
        for key, value in asdict(self.wandb).items():
            if value is not None:
                wandb[key] = value
        if wandb and self.wandb.mode != "disabled":
            loggers["wandb"] = wandb
        if self.trackio.project is not None:
            loggers["trackio"] = {
                key: value for key, value in asdict(self.trackio).items() if value is not None
            }
        return loggers


HOOK_FORMS = (
    "offload, offload_optimizer, NAME of a registered function, or {function: NAME, args: {..}}"
)


def _check_hooks(hooks: Any) -> str | None:
    try:
        parse_hooks(hooks)
    except ConfigError as error:
        return str(error)
    return None


@dataclass
class MFCOptions:
    """Options of one model function call (MFC), which replace the settings of the experiment."""

    interface: str | None = option(
        None,
        "registered interface that replaces the experiment's, without the experiment's arguments",
    )
    args: dict[str, Any] = option({}, "arguments of the interface, which override the experiment's")
    max_tokens_per_microbatch: int | None = option(
        None,
        "maximum tokens of one forward pass of this call; absent: as set for the run",
        at_least=1,
    )
    pre_hooks: Any = option(
        None,
        f"hooks before the call, which replace the experiment's ([] for none): {HOOK_FORMS}",
        check=_check_hooks,
    )
    post_hooks: Any = option(
        None,
        f"hooks after the call, which replace the experiment's ([] for none): {HOOK_FORMS}",
        check=_check_hooks,
    )
    deadline_s: float | None = option(
        None,
        "maximum seconds of the call, after which the run stops; absent: 21,600 (six hours)",
        at_least=0.0,
    )
    layout: str | None = option(
        None,
        "parallel layout of this call, such as d4; absent: the layout of its role; the layout of "
        "a call that trains is also that of its role",
        check=checks.find_layout_problem,
    )
    device_mesh: str | None = option(
        None,
        "devices of this call, such as 4-7 or 0,2; absent: the first devices of its role, as many "
        "as its layout needs",
    )


def parse_hooks(hooks: Any) -> tuple[Hook, ...]:
    """Return the hooks in an option's value, which is one hook or a list of hooks.

    Hooks run before or after a call. A hook is `offload`, `offload_optimizer`, a function's name,
    or `{function: NAME, args: {..}}`. Raises `ConfigError` for anything else.
    """
    if hooks is None:
        return ()
    if not isinstance(hooks, (list, tuple)):
        hooks = [hooks]
    return tuple(_parse_hook(hook) for hook in hooks)


def _parse_hook(hook: Any) -> Hook:
    if isinstance(hook, (Offload, Call)):
        return hook
    if isinstance(hook, str) and hook:
        return NAMED_HOOKS.get(hook) or Call(hook)
    if isinstance(hook, Mapping) and "function" in hook and set(hook) <= {"function", "args"}:
        return Call(str(hook["function"]), dict(hook.get("args") or {}))
    raise ConfigError(f"hook {hook!r} is not valid; write {HOOK_FORMS}")


@dataclass
class RunConfig(ABC):
    """Options that all experiments share, such as those for devices, checkpoints and logging."""

    # Other spellings of options (cli/aliases.py) are resolved with these: `learning_rate` sets an
    # option of all trained roles, `beta` an option of the algorithm.
    main_role: ClassVar[str] = "model"
    trained_roles: ClassVar[tuple[str, ...]] = ()
    # Host functions of the graph; they have no `{mfc}.*` options.
    host_nodes: ClassVar[tuple[str, ...]] = ()
    algorithm: ClassVar[str] = ""  # the option group of the algorithm, such as "ppo"
    generation: ClassVar[str] = ""  # the option group of sampling, such as "ppo.gen"
    spellings: ClassVar[Mapping[str, str]] = {}

    experiment_name: str = option(
        "",
        "name of the run's first folder: letters, digits, . and -; absent on the command line: "
        "the name of the recipe or algorithm",
    )
    trial_name: str = option(
        "",
        "name of the run's second folder: letters, digits, . and -; absent on the command line: "
        "the number of the newest unfinished run with the same configuration, or the next free "
        "number",
    )
    fileroot: str = option(
        "./runs",
        "folder of all runs, also gs://BUCKET/DIR; a run is in fileroot/experiment_name/trial_name",
        check=lambda path: (
            find_bucket_problem(path) if path.strip() else "is empty; write a folder such as ./runs"
        ),
    )
    mode: str = option(
        "local",
        "where to run: local (this machine, one process per device), ray (a running Ray cluster), "
        "slurm (a job on a cluster)",
        check=checks.find_mode_problem,
    )
    seed: int = option(1, "seed of initial weights, data order and sampling", at_least=0)
    device: str | None = option(
        None,
        "cpu, cuda, cuda:1, mps or (with backend=jax) tpu; absent: the best device available",
        check=checks.find_device_problem,
    )
    ray_address: str | None = option(
        None,
        "address of the Ray cluster (mode=ray), such as auto or 10.0.0.1:6379; absent: "
        "RAY_ADDRESS, or else the cluster on this machine",
    )
    n_nodes: int = option(
        1,
        "number of machines: of the job (mode=slurm), or of the cluster if n_gpus_per_node is set "
        "(mode=ray); 1 with mode=local",
        at_least=1,
    )
    n_gpus_per_node: int | None = option(
        None,
        "devices per machine that the run may use, with mode=slurm the GPUs to request; absent: "
        "all devices, with mode=slurm as many as the layouts need; layouts that need more than "
        "n_nodes x n_gpus_per_node devices are refused",
        at_least=1,
    )
    allocation_mode: str = option(
        "manual",
        "placement of roles without a layout on n_nodes x n_gpus_per_node devices: manual (the "
        "first device), heuristic (data-parallel over all devices or fewer, with sharded or whole "
        "weights, whichever is estimated to be fastest), search (the placement of each call that "
        "is estimated to be fastest), a layout such as d4t2, or a plan file that weft plan search "
        "--output has written, such as plan.yaml",
        check=checks.find_allocation_problem,
    )
    search: SearchSpec = option(SearchSpec(), "assumptions of allocation_mode=search and --dry-run")
    total_train_epochs: int = option(
        1, "passes over the training data, if max_steps is absent", at_least=1
    )
    max_steps: int | None = option(
        None,
        "number of steps, in place of total_train_epochs; gen ends earlier if it runs out of "
        "prompts",
        at_least=1,
    )
    save_freq_steps: int | None = option(
        None, "steps between checkpoints; the last step is always saved", at_least=1
    )
    save_freq_epochs: int | None = option(None, "epochs between checkpoints", at_least=1)
    save_freq_secs: float | None = option(None, "seconds between checkpoints", at_least=0.0)
    save_total_limit: int | None = option(
        None,
        "number of newest checkpoints to keep; one that a restart needs is always kept",
        at_least=1,
    )
    save_best: str | None = option(
        None,
        "metric such as eval/loss, compared at every evaluation, and without validation data at "
        "the intervals eval_freq_*: the best checkpoint is saved, named runs/E/T@best, and not "
        "removed while it is the best",
    )
    save_best_mode: str | None = option(
        None,
        "whether higher (max) or lower (min) values of save_best are better; absent: as its name "
        "tells",
        choices=("max", "min"),
    )
    early_stop_patience: int | None = option(
        None,
        "end the run after this many comparisons of save_best in a row without an improvement",
        at_least=1,
    )
    early_stop_min_delta: float = option(
        0.0,
        "smallest change of save_best that early_stop_patience counts as an improvement",
        at_least=0.0,
    )
    save_milestone_freq_steps: int | None = option(
        None, "steps between checkpoints that are never removed", at_least=1
    )
    save_milestone_freq_epochs: int | None = option(
        None, "epochs between checkpoints that are never removed", at_least=1
    )
    eval_freq_steps: int | None = option(
        None,
        "steps between evaluations; with validation data or tasks the last step is evaluated too",
        at_least=1,
    )
    eval_freq_epochs: int | None = option(None, "epochs between evaluations", at_least=1)
    eval_freq_secs: float | None = option(None, "seconds between evaluations", at_least=0.0)
    eval_at_start: bool | None = option(
        None,
        "whether to evaluate before the first step too; metrics.jsonl has the result as step 0; "
        "absent: if save_best is set",
    )
    eval_prompts: str | None = option(
        None,
        "file with a few prompts (JSON, JSONL, Parquet, or .txt with one per line); the trained "
        "model answers them greedily before the first step, at every evaluation and at the end, "
        "and the report shows how the answers change",
        check=checks.find_file_problem,
    )
    eval_prompts_max_new_tokens: int | None = option(
        None,
        "maximum tokens of each of these answers; absent: the algorithm's gen.max_new_tokens, or "
        "if it samples nothing 128, but at most half of the model's context",
        at_least=1,
    )
    eval_suite: EvalSuiteSpec = option(
        EvalSuiteSpec(), "tasks on which the trained model is evaluated at every evaluation"
    )
    log_freq_steps: int = option(
        1,
        "steps between entries in the log and the loggers; metrics.jsonl contains every step",
        at_least=1,
    )
    recover_mode: str = option(
        "auto",
        "what to do with an unfinished run of the same configuration: resume it if it exists "
        "(auto), require that it exists (resume), or ignore it (disabled)",
        choices=("auto", "resume", "disabled"),
    )
    recover_freq_steps: int | None = option(
        None,
        "steps between recovery points; one is also written with every checkpoint and every ten "
        "minutes",
        at_least=1,
    )
    resume_from: str | None = option(
        None,
        "recovery point, checkpoint or run directory to resume from, in place of this run's last "
        "recovery point",
        check=find_url_problem,
    )
    max_tokens_per_microbatch: int = option(
        16384, "maximum tokens of one forward pass, for every call", at_least=1
    )
    deterministic: bool = option(
        False, "use only kernels whose results are reproducible bit for bit (CUDA; on CPU all are)"
    )
    tf32: bool = option(
        False,
        "round the factors of float32 products on GPUs to 10 bits of mantissa (TF32): several "
        "times as fast, less exact; bfloat16 products and CPUs are not affected",
    )
    profile_steps: str | None = option(
        None,
        "steps to trace with torch's profiler, such as 5 or 5:8 (inclusive); one file per device "
        "in the run's profile/",
        check=checks.find_profile_problem,
    )
    flash_attention: str = option(
        "auto",
        "flash attention on NVIDIA GPUs: fa2 (torch's), fa3 (the package flash_attn_interface, on "
        "Hopper), or auto (fa3 if it is installed)",
        choices=FLASH,
    )
    on_nonfinite: str = option(
        "stop",
        "what to do if a loss is NaN or infinite: stop the run, or skip the update and count it",
        choices=("stop", "skip"),
    )
    progress: bool = option(True, "show the live view if the output is a terminal")
    imports: list[str] = option(
        [], "modules or FILE.py to import; they register datasets, rewards, interfaces, experiments"
    )
    logger: LoggerSpec = option(LoggerSpec(), "loggers in addition to metrics.jsonl")
    launch: LaunchSpec = option(LaunchSpec(), "how processes are started")
    slurm: SlurmSpec = option(SlurmSpec(), "resources that mode=slurm requests from the cluster")

    def __post_init__(self) -> None:
        """Convert option groups that are given as mappings, such as `actor={"path": ...}`."""
        for spec in fields(self):
            value = getattr(self, spec.name)
            if isinstance(value, Mapping) and callable(spec.default_factory):
                base = spec.default_factory()
                if is_dataclass(base):
                    setattr(self, spec.name, read(base, value, f"{spec.name}."))

    @abstractmethod
    def build(self) -> Experiment:
        """Return the experiment, after all checks that do not need torch.

        Raises `UserError` if an option is invalid. The message names the option, its value and the
        rule that it breaks.

        A run does not call this method directly: `build_experiment(config)` calls `initial_setup`
        instead if a subclass overrides it.
        """

    def initial_setup(self) -> Experiment:
        """Return the experiment, as `build` does.

        Configurations written for ReaL use this name instead of `build`. A subclass can override
        either method, but not both.
        """
        return self.build()

    def missing(self) -> list[str]:
        """Return a description of each required option that is not set."""
        # A run needs names, a model and data.
        names = []
        for name in ("experiment_name", "trial_name"):
            if not getattr(self, name):
                names.append(f"{name}=NAME (a folder's name)")
        model = getattr(self, self.main_role, None)
        if isinstance(model, ModelSpec) and model.path is None and model.backend not in NO_NETWORK:
            names.append(
                f"{self.main_role}.path=MODEL (a Hugging Face directory, a hub name, or a run)"
            )
        data = getattr(self, "dataset", None)
        if isinstance(data, DatasetSpec) and not (
            data.train_path or data.path or data.sources or data.named or data.args or data.planned
        ):
            names.append(
                "dataset.path=ROWS (a JSON, JSONL or Parquet file, a directory, or a hub name)"
            )
        return names

    def control(self) -> Control:
        """Return the run options as a `Control` object, which the runtime reads."""
        # Copy the options that have the same name in both classes.
        names = {spec.name for spec in fields(self)}
        shared = {}
        for spec in fields(Control):
            if spec.name in names:
                shared[spec.name] = getattr(self, spec.name)
        return Control(**shared, loggers=self.logger.get_enabled(), env=self.launch.env)


class ExperimentConfig(Protocol):
    """Protocol of configurations that build an experiment, such as `RunConfig`."""

    def build(self) -> Experiment: ...


# Methods that subclasses of ReaL's configurations override, and what replaces them in weft.
UNSUPPORTED_METHODS = {
    "rpcs": "change a call with experiment.with_mfc(NAME, ...) in build()",
    "models": (
        "set the options of the roles, such as rew.backend, or change experiment.roles in build()"
    ),
    "datasets": "set dataset.type and dataset.args, or change experiment.dataset in build()",
    "eval_datasets": "set dataset.valid_path, or change experiment.evaluation in build()",
    "allocations": "set {call}.layout and {call}.device_mesh",
    "search_kwargs": "set search.*",
    "scheduling_setup": (
        "set n_nodes, n_gpus_per_node and slurm.*; only register_experiment's "
        "classes have this method"
    ),
}
MIGRATION_HINT = """Write the edits of ReaL's guide as
    return super().initial_setup().with_mfc("rew_inf", interface="NAME", args={...}, post_hooks=[])
and set rew.backend=null instead of a model_worker that loads only a tokenizer"""


def build_experiment(config: ExperimentConfig) -> Experiment:
    """Return the experiment that a configuration describes.

    Calls `initial_setup` if a user's class overrides it, and otherwise `build`. Raises
    `ConfigError` if required options are missing, if a class overrides both methods, or if it
    defines methods of ReaL's configurations that weft never calls.
    """
    if not isinstance(config, RunConfig):
        return config.build()
    missing = config.missing()
    if len(missing) > 1:  # a single missing option is reported later, with a more specific message
        raise ConfigError(f"these options are missing: {'; '.join(missing)}")
    return replace(_build(config), left_at_default=_find_default_options(config))


def _find_default_options(config: RunConfig) -> frozenset[str]:
    """Return the dotted names of the options that have their default values.

    The set is empty if the class of `config` cannot be instantiated without arguments, because the
    defaults are then unknown.
    """
    try:
        defaults = {leaf.name: leaf.default for leaf in iterate_options(type(config)())}
    except TypeError:
        return frozenset()
    return frozenset(
        leaf.name
        for leaf in iterate_options(config)
        if leaf.name in defaults and defaults[leaf.name] == leaf.default
    )


def _build(config: RunConfig) -> Experiment:
    """Build the experiment of a configuration.

    Calls `initial_setup` if a user's class overrides that method, and otherwise `build`. Raises
    `ConfigError` if user classes override both, or if they define a method of ReaL's configurations
    that weft never calls.
    """
    # Find the methods of user classes.
    user_classes = []
    for cls in type(config).__mro__:
        if not cls.__module__.startswith("weft."):
            user_classes.append(cls)
    # Refuse methods that only ReaL's runtime calls.
    overridden = {name for cls in user_classes for name in vars(cls)}
    name = type(config).__name__
    for method, instead in UNSUPPORTED_METHODS.items():
        if any(isinstance(vars(cls).get(method), FunctionType | property) for cls in user_classes):
            raise ConfigError(f"{name} defines {method}, which weft never calls; {instead}")
    if "initial_setup" not in overridden:
        return config.build()
    if "build" in overridden:
        raise ConfigError(
            f"{name} overrides build() and initial_setup(), but a run calls only one of them; "
            "remove the other"
        )
    try:
        return config.initial_setup()
    except AttributeError as error:
        if type(error.obj).__module__.startswith("weft."):
            raise ConfigError(_explain_attribute(name, error)) from error
        raise


def _explain_attribute(name: str, error: AttributeError) -> str:
    """Return an error message for user code that uses an attribute that exists only in ReaL.

    The message says what to write instead, or where to read about it. `name` is the name of the
    configuration's class.
    """
    if isinstance(error.obj, Experiment):
        return f"{name}.initial_setup: weft's Experiment has no {error.name}. {MIGRATION_HINT}"
    return f"{name}.initial_setup: weft's {type(error.obj).__name__} has no {error.name}; see docs/coming-from/real.md"
