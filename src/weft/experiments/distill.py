"""Distillation: the actor (the student) learns from a frozen teacher with the same vocabulary.

There are two losses. `gkd` compares the next-token distributions of both models (GKD, Agarwal et
al. 2023, arXiv 2306.13649) on completions that the student samples or that the rows contain. The
distributions cover the teacher's `top_k` most likely ids, and all other ids together as one event.
`reverse_kl` is a policy gradient ("On-Policy Distillation", Thinking Machines Lab 2025; MiniLLM, Gu
et al. 2023): the student samples completions, and the advantage of a token is the teacher's
log-prob minus the student's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

from weft.algorithms.distill import GKDLoss, TeacherAdvantages
from weft.data.spec import DatasetSpec
from weft.engine.spec import GenerationSpec, ModelSpec, OptimizerSpec
from weft.engine.spec_parts import MAX_SAMPLES
from weft.errors import ConfigError
from weft.experiment import Experiment
from weft.experiments import checks
from weft.experiments._assemble import (
    ExperimentParts,
    assemble,
    build_evaluation_nodes,
    check_config,
    choose_dataset_type,
    fill_batch_sizes,
)
from weft.experiments._rl_graph import SUPPORT_KEYS, build_pass_notes, build_sampling_args
from weft.experiments._roles import check_same_vocabulary, with_lr
from weft.experiments.common import MFCOptions, RunConfig
from weft.experiments.models import find_context
from weft.graph.mfc import HostFunction, MFCDef, Node
from weft.options import include, option, to_mapping
from weft.planner.lengths import compute_max_length, fill_row_length, fill_sample_lengths
from weft.registry import register_quickstart

# Outputs of `actor_gen` that are also its inputs; a node cannot write a key that it reads.
MIXED_NAMES = {"completion": "mixed_completion", "loss_mask": "mixed_loss_mask"}


@dataclass
class DistillOptions:
    """Options of distillation (`distill.*`): sampling by the student, the loss and minibatches."""

    gen: GenerationSpec = option(
        GenerationSpec(),
        "how the student samples; its temperature is also that of both models' distributions",
    )
    loss_type: str = option(
        "gkd",
        "compare whole distributions (gkd), or take the teacher's log-probs of sampled tokens as "
        "a reward (reverse_kl)",
        choices=("gkd", "reverse_kl"),
    )
    on_policy: float = option(
        1.0,
        "gkd: share of the prompts whose completion the student samples; the others keep that of "
        "their row",
        at_least=0.0,
        at_most=1.0,
    )
    loss: GKDLoss = include(GKDLoss)
    top_k: int = option(
        64,
        "gkd: number of the teacher's likeliest ids at each token; all others are one event, so "
        "divergences are lower bounds",
        at_least=1,
    )
    advantages: TeacherAdvantages = include(TeacherAdvantages)
    eps_clip: float = option(
        0.2,
        "reverse_kl: clip the importance ratio to 1 - eps_clip .. 1 + eps_clip",
    )
    eps_clip_high: float | None = option(
        None, "reverse_kl: upper bound 1 + eps_clip_high in place of 1 + eps_clip (clip-higher)"
    )
    samples_per_prompt: int = option(
        1, "completions that the student samples per prompt", at_least=1, at_most=MAX_SAMPLES
    )
    ppo_n_minibatches: int = option(1, "optimizer steps per pass over a batch", at_least=1)
    mini_batch_size: int | None = option(
        None, "completions per optimizer step, in place of ppo_n_minibatches", at_least=1
    )
    ppo_epochs: int = option(1, "passes over each batch of completions", at_least=1)

    @property
    def temperature(self) -> float:
        """Temperature of the distributions of both models; 1 if sampling is greedy."""
        return 1.0 if self.gen.greedy else self.gen.temperature


@register_quickstart("distill")
@dataclass
class DistillConfig(RunConfig):
    """Distillation from a teacher with the same tokenizer: GKD, or reverse KL on student samples."""

    main_role: ClassVar[str] = "actor"
    trained_roles: ClassVar[tuple[str, ...]] = ("actor",)
    host_nodes: ClassVar[tuple[str, ...]] = ("advantages",)
    algorithm: ClassVar[str] = "distill"
    generation: ClassVar[str] = "distill.gen"
    spellings: ClassVar[dict[str, str]] = {
        "lmbda": "distill.on_policy",
        "beta": "distill.divergence_beta",
        "loss_top_k": "distill.top_k",
        "num_generations": "distill.samples_per_prompt",
        "rollouts_per_prompt": "distill.samples_per_prompt",
        "max_new_tokens": "distill.gen.max_new_tokens",
        "teacher_model_name_or_path": "teacher.path",
    }

    actor: ModelSpec = option(
        ModelSpec(optimizer=OptimizerSpec(lr_scheduler_type="constant")),
        "the student, which is trained",
    )
    teacher: ModelSpec = option(
        ModelSpec(), "the frozen teacher, whose tokenizer has the student's vocabulary"
    )
    dataset: DatasetSpec = option(
        DatasetSpec(),
        "rows of type prompt; with distill.on_policy below 1, of type prompt_answer or chat",
    )
    distill: DistillOptions = option(DistillOptions(), "the algorithm")
    actor_gen: MFCOptions = option(MFCOptions(), "the call that samples completions")
    teacher_inf: MFCOptions = option(
        MFCOptions(), "the call that scores completions with the teacher"
    )
    actor_train: MFCOptions = option(MFCOptions(), "the call that trains the student")

    def build(self) -> Experiment:
        """Return the experiment, whose dataflow graph is `actor_gen -> teacher_inf -> actor_train`.

        If nothing is sampled, `actor_gen` is left out. With the loss `reverse_kl`, the node
        `advantages` runs before `actor_train`. Raises `UserError` if an option is invalid.
        """
        # Check the options and that both models have the same token ids.
        config = check_config(self)
        options = config.distill
        _check_options(options)
        _refuse(
            config.teacher,
            ("prompt_prefix", "prompt_suffix"),
            "the teacher reads the student's own tokens",
            "teacher.",
        )
        check_same_vocabulary("actor", config.actor, "teacher", config.teacher)
        plan = _DistillationGraphBuilder.from_config(config)
        # All completions are sampled in an evaluation, unless training samples none.
        evaluated = plan if options.on_policy == 0.0 else replace(plan, share=1.0)
        actor = config.actor.with_head("lm", trained=True)
        return assemble(
            config,
            ExperimentParts(
                # GKD has the default learning rate of supervised methods, reverse KL that of
                # policy gradients.
                roles={
                    "actor": with_lr(actor, 1e-6 if options.loss_type == "reverse_kl" else 1e-5),
                    "teacher": config.teacher.with_head("lm", trained=False),
                },
                nodes=plan.build_nodes(),
                dataset=plan.dataset,
                dataset_type=choose_dataset_type(
                    plan.dataset, "prompt" if options.on_policy == 1.0 else "prompt_answer"
                ),
                data_role="actor",
                steps_follow="actor_train",
                longest=plan.longest,
                evaluation=build_evaluation_nodes(evaluated.build_nodes(), plan.dataset),
                updates_per_firing={"actor_train": plan.num_minibatches * options.ppo_epochs},
                notes=plan.build_notes(),
            ),
        )


@dataclass(frozen=True)
class _DistillationGraphBuilder:
    """Builder of the nodes of a distillation experiment.

    `share` is the fraction of rows whose completion the student samples.
    """

    options: DistillOptions
    dataset: DatasetSpec
    gen: GenerationSpec
    share: float
    longest: int | None  # maximum tokens of a sequence, if the user set it

    @classmethod
    def from_config(cls, config: DistillConfig) -> _DistillationGraphBuilder:
        """Create a builder from the options.

        Raises `ConfigError` if lengths do not fit the models' context, or if batches are formed by
        token count although sampling or minibatches need a fixed number of rows.
        """
        options = config.distill
        dataset = fill_batch_sizes(config.dataset)
        share = options.on_policy
        gen = options.gen
        tokens = dataset.train_tokens_per_batch
        if tokens is not None and (
            share or options.mini_batch_size or options.ppo_n_minibatches > 1
        ):
            raise ConfigError(
                f"dataset.train_tokens_per_batch={tokens}: distill needs a fixed number of rows, "
                "unless nothing is sampled (on_policy=0) and a batch is one minibatch; set "
                "dataset.train_bs_n_seqs"
            )
        # Fill in the lengths of sampled completions and of rows with answers.
        length_limits = [config.dataset.limit] if share < 1.0 else []
        if share:
            dataset, gen = fill_sample_lengths(dataset, gen, find_context(config), "distill.gen")
            length_limits.append(compute_max_length(config.dataset, options.gen))
        if share < 1.0:
            dataset = fill_row_length(dataset, find_context(config))
        vocab = checks.read_vocab_size(config.actor)
        if vocab is not None and gen.top_k >= vocab:
            gen = replace(gen, top_k=0)
        longest = max((limit for limit in length_limits if limit is not None), default=None)
        # Only reverse KL needs the ids that truncation left: GKD compares whole distributions.
        records = options.loss_type == "reverse_kl" and gen.truncates
        return cls(options, dataset, replace(gen, record_support=records), share, longest)

    @property
    def batch_size(self) -> int:
        """Number of rows per step; 0 if batches are formed by token count."""
        return self.dataset.train_bs_n_seqs or 0

    @property
    def num_completions(self) -> int:
        """Number of completions per step."""
        return self.batch_size * self.options.samples_per_prompt

    @property
    def num_minibatches(self) -> int:
        """Number of minibatches per pass over the completions of a step."""
        options = self.options
        if not self.batch_size:
            return 1
        return checks.count_minibatches(
            self.num_completions, options.mini_batch_size, options.ppo_n_minibatches, "distill"
        )

    @property
    def _names(self) -> Mapping[str, str]:
        """Mapping from output keys of `actor_gen` to the names under which the graph stores them.

        If the student samples only some of the completions, the others are read from the dataset.
        `actor_gen` then writes all of them under new names, because it cannot write a key that it
        reads. The mapping is empty if `actor_gen` samples all completions or none.
        """
        return MIXED_NAMES if 0.0 < self.share < 1.0 else {}

    @property
    def _mask_keys(self) -> tuple[str, ...]:
        """Key of the loss mask, as a tuple; empty if `actor_gen` does not compute one."""
        return ("loss_mask",) if self.share else ()

    def build_nodes(self) -> list[Node]:
        """Return the nodes of the graph in the order of execution."""
        sampling = [self._build_generation()] if self.share else []
        if self.options.loss_type == "reverse_kl":
            return [
                *sampling,
                self._build_scoring(),
                self._build_advantages(),
                self._build_policy_gradient(),
            ]
        return [*sampling, self._build_distributions(), self._build_gkd()]

    def _build_generation(self) -> MFCDef:
        mixed = self.share < 1.0
        reverse = self.options.loss_type == "reverse_kl"
        output_keys = ["completion", "loss_mask", "sampled" if mixed else "finished"]
        output_keys += [
            *(["logprobs"] if reverse else []),
            *(SUPPORT_KEYS if self.gen.record_support else ()),
        ]
        args = build_sampling_args(self.gen)
        if mixed:
            args["share"] = self.share
        return MFCDef(
            name="actor_gen",
            role="actor",
            interface="generate",
            method="generate",
            batch_size=self.batch_size,
            input_keys=("prompt", *(("completion",) if mixed else ())),
            optional_keys=("loss_mask",) if mixed else (),
            output_keys=output_keys,
            output_key_remap=self._names,
            args={**args, "samples_per_prompt": self.options.samples_per_prompt},
        )

    def _build_distributions(self) -> MFCDef:
        outputs = {"top_ids": "teacher_ids", "top_logprobs": "teacher_logprobs"}
        return self._build_teacher(outputs, {"top_k": self.options.top_k})

    def _build_scoring(self) -> MFCDef:
        outputs = {"logprobs": "teacher_logprobs", "top1": "teacher_top1"}
        return self._build_teacher(outputs, {}, SUPPORT_KEYS if self.gen.record_support else ())

    def _build_teacher(
        self, outputs: Mapping[str, str], args: Mapping[str, Any], extra_keys: Sequence[str] = ()
    ) -> MFCDef:
        renamed = {key: name for key, name in self._names.items() if key == "completion"}
        return MFCDef(
            name="teacher_inf",
            role="teacher",
            interface="infer",
            method="inference",
            batch_size=self.batch_size,
            input_keys=("prompt", "completion", *extra_keys),
            input_key_remap=renamed,
            output_keys=tuple(outputs),
            output_key_remap=outputs,
            args={"outputs": list(outputs), "temperature": self.options.temperature, **args},
        )

    def _build_advantages(self) -> HostFunction:
        return HostFunction(
            name="advantages",
            function="teacher_advantages",
            batch_size=self.batch_size,
            input_keys=(
                "prompt",
                "completion",
                "logprobs",
                "teacher_logprobs",
                "teacher_top1",
                *self._mask_keys,
            ),
            output_keys=("advantages",),
            args=asdict(self.options.advantages),
        )

    def _build_gkd(self) -> MFCDef:
        """Return the training call for GKD.

        The loss also includes the cross-entropy of the dataset's completions, unless the student
        samples all completions.
        """
        loss = self.options.loss
        if self.share == 1.0:
            loss = replace(loss, sft_coef=0.0)
        sampled = ("sampled",) if loss.sft_coef and self.share else ()
        keys = ("given_ids", "teacher_logprobs", *sampled)
        return self._build_training("gkd", asdict(loss), keys, {"given_ids": "teacher_ids"})

    def _build_policy_gradient(self) -> MFCDef:
        """Return the training call for reverse KL.

        The teacher's log-probs replace those of a reference, so that the policy loss logs the KL to
        the teacher.
        """
        options = self.options
        loss_args = {
            "loss_type": "dapo",
            "eps_clip": options.eps_clip,
            "eps_clip_high": options.eps_clip_high,
        }
        keys = (
            "logprobs",
            "advantages",
            "ref_logprobs",
            *(SUPPORT_KEYS if self.gen.record_support else ()),
        )
        return self._build_training("grpo", loss_args, keys, {"ref_logprobs": "teacher_logprobs"})

    def _build_training(
        self, loss: str, loss_args: Mapping[str, Any], keys: Sequence[str], names: Mapping[str, str]
    ) -> MFCDef:
        return MFCDef(
            name="actor_train",
            role="actor",
            interface="train",
            method="train_step",
            batch_size=self.batch_size,
            input_keys=("prompt", "completion", *self._mask_keys, *keys),
            optional_keys=() if self.share else ("loss_mask",),
            input_key_remap={**self._names, **names},
            args={
                "loss": loss,
                "loss_args": dict(loss_args),
                "num_minibatches": self.num_minibatches,
                "epochs": self.options.ppo_epochs,
                "temperature": self.options.temperature,
            },
        )

    def build_notes(self) -> list[str]:
        """Return lines that describe a step, for the plan that is printed before the run.

        The counts in the plan's table are not repeated.
        """
        options = self.options
        lines = list[str]()
        if self.share:
            if self.share < 1.0:
                rows = f"about {self.share:.0%} of the rows, chosen at random in each step, get "
            else:
                rows = ""
            lines.append(
                f"{rows}completions of at most {self.gen.max_new_tokens} tokens from the student"
            )
        if self.batch_size:
            lines += build_pass_notes(
                options.ppo_epochs, self.num_completions, self.num_minibatches
            )
        if options.loss_type == "gkd":
            lines.append(
                f"teacher: the {options.top_k} likeliest ids of each token, and one event for all "
                f"others"
            )
        return lines


GKD_OPTIONS = ("divergence_beta", "top_k", "sft_coef")
REVERSE_KL_OPTIONS = ("discount", "eps_clip", "eps_clip_high")


def _check_options(options: DistillOptions) -> None:
    """Raise `ConfigError` for options that are mutually exclusive or have no effect."""
    reverse = options.loss_type == "reverse_kl"
    share = options.on_policy
    if reverse and share < 1.0:
        raise ConfigError(
            f"distill.on_policy={share}: distill.loss_type=reverse_kl is a policy gradient, which "
            "needs completions that the student samples itself; set it to 1, or loss_type=gkd"
        )
    _refuse(
        options,
        GKD_OPTIONS if reverse else REVERSE_KL_OPTIONS,
        f"has no effect with distill.loss_type={options.loss_type}",
    )
    if options.gen.greedy and (reverse or options.samples_per_prompt > 1):
        raise ConfigError(
            "distill.gen.greedy=true: "
            + (
                "reverse_kl is an average over what the student samples; a greedy completion is "
                "not a sample"
                if reverse
                else f"the {options.samples_per_prompt} greedy completions of a prompt are all the same; sample one"
            )
        )
    if share == 0.0:
        unused = f"has no effect with distill.on_policy={share}, since nothing is sampled"
        _refuse(options, ("samples_per_prompt",), unused)
        _refuse(
            options.gen,
            [name for name in to_mapping(options.gen) if name != "temperature"],
            unused,
            "distill.gen.",
        )
    elif share < 1.0:
        _refuse(
            options,
            ("samples_per_prompt",),
            f"is not possible with distill.on_policy={share}: rows that keep their completion "
            "have only one, and would weigh less",
        )
    else:
        _refuse(
            options,
            ("sft_coef",),
            "has no effect with distill.on_policy=1, since rows have no completions",
        )


def _refuse(options: Any, names: Sequence[str], reason: str, group: str = "distill.") -> None:
    defaults = type(options)()
    for spec in fields(options):
        value = getattr(options, spec.name)
        if spec.name in names and value != getattr(defaults, spec.name):
            raise ConfigError(f"{group}{spec.name}={value}: {reason}; leave it out")
