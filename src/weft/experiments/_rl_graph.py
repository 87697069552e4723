"""Graph nodes shared by the methods that train on sampled completions.

The nodes sample completions, compute rewards and log-probs, train models and evaluate them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from weft.data.spec import DatasetSpec
from weft.engine.service_spec import NO_NETWORK
from weft.engine.spec import GenerationSpec, ModelSpec
from weft.errors import ConfigError
from weft.experiment import Experiment
from weft.experiments import checks
from weft.experiments._assemble import (
    ExperimentParts,
    assemble,
    choose_dataset_type,
    fill_batch_sizes,
)
from weft.experiments._policy_options import PolicyOptions, SamplingConfig, SamplingOptions
from weft.experiments._roles import build_critic, build_reference, with_lr
from weft.experiments._services import build_service_notes, check_shared_options
from weft.experiments.models import find_context
from weft.graph.mfc import HostFunction, MFCDef, Node, ParamSync
from weft.host.spec import parse_reward
from weft.options import to_mapping
from weft.planner.lengths import compute_max_length, fill_sample_lengths

SAMPLE_KEYS = ("completion", "logprobs", "versions", "finished", "loss_mask")
SUPPORT_KEYS = ("support", "support_counts")


@dataclass(frozen=True)
class RLGraphBuilder:
    """Builder of the roles and graph nodes of an experiment that trains on sampled completions.

    `options` are the algorithm's options, and `name` is the name of their group, such as "ppo".
    `samples` is the number of completions per prompt. `gen` are the sampling options.
    """

    config: SamplingConfig
    options: SamplingOptions
    name: str  # name of the option group, for messages
    dataset: DatasetSpec
    samples: int  # completions per prompt
    gen: GenerationSpec

    @classmethod
    def from_options(
        cls, config: SamplingConfig, options: SamplingOptions, name: str, samples: int
    ) -> RLGraphBuilder:
        """Create a builder from the options of the run and of the method.

        Raises `UserError` if an option that all sampling methods share is invalid, if the lengths
        do not fit the model's context, or if there is no source of rewards.
        """
        config = check_shared_options(config, options, name)
        # Check the options.
        dataset = fill_batch_sizes(config.dataset)
        _check_rewards(config)
        _check_staleness(options, name)
        if dataset.train_tokens_per_batch is not None:
            raise ConfigError(
                f"dataset.train_tokens_per_batch={dataset.train_tokens_per_batch}: {name} forms "
                "batches by number of prompts, since the completions do not exist yet; set "
                "dataset.train_bs_n_seqs"
            )
        # Fill in lengths; a top_k of the whole vocabulary truncates nothing.
        vocab = checks.read_vocab_size(config.actor)
        dataset, gen = fill_sample_lengths(
            dataset, options.gen, find_context(config), f"{name}.gen"
        )
        if vocab is not None and gen.top_k >= vocab:
            gen = replace(gen, top_k=0)
        return cls(
            config, options, name, dataset, samples, replace(gen, record_support=gen.truncates)
        )

    @property
    def num_prompts(self) -> int:
        """Number of prompts per step."""
        return self.dataset.train_bs_n_seqs or 0

    @property
    def num_completions(self) -> int:
        """Number of completions per step."""
        return self.num_prompts * self.samples

    @property
    def num_minibatches(self) -> int:
        """Number of minibatches per pass over the completions of a step."""
        return checks.count_minibatches(
            self.num_completions,
            self.options.mini_batch_size,
            self.options.ppo_n_minibatches,
            self.name,
        )

    @property
    def num_updates(self) -> int:
        """Number of optimizer steps on each batch of completions, over all epochs."""
        return self.num_minibatches * self.options.ppo_epochs

    @property
    def temperature(self) -> float:
        """Temperature for log-probs: the sampling temperature, or 1 if sampling is greedy."""
        return 1.0 if self.gen.greedy else self.gen.temperature

    @property
    def has_model(self) -> bool:
        """True if a reward model contributes to the reward."""
        return has_reward_model(self.config)

    @property
    def token_reward_keys(self) -> tuple[str, ...]:
        """Key of the per-token rewards, as a tuple; empty if the run has no such rewards."""
        if self.config.rewards.by_token or self.config.rew_step is not None:
            return ("token_rewards",)
        return ()

    @property
    def reward_weights(self) -> list[float]:
        """Weights of the reward functions, then the weight of the reward model if there is one."""
        return [
            *(part.weight for part in parse_reward(self.config.rewards.reward)),
            *([self.config.rewards.scores_weight] * self.has_model),
        ]

    @property
    def correction_keys(self) -> tuple[str, ...]:
        """Keys that the loss needs to correct for off-policy samples; empty without correction."""
        if _has_option(self.options, "correction_method"):
            return ("old_logprobs", "sampler_weights")
        return ()

    @property
    def covariance_keys(self) -> tuple[str, ...]:
        """Key of the token mask of Clip-Cov or KL-Cov, as a tuple; empty if neither is used."""
        return ("high_covariance",) if _has_option(self.options, "covariance") else ()

    @property
    def support_keys(self) -> tuple[str, ...]:
        """Keys that record the token ids allowed by the sampling limits (top-k, top-p, min-p).

        The tuple is empty if there are no such limits.
        """
        return SUPPORT_KEYS if self.gen.record_support else ()

    def build_roles(
        self, *, reference_removed_by: str | None
    ) -> tuple[dict[str, ModelSpec], dict[str, str]]:
        """Return the roles by name, and a mapping from copied roles to the roles that they copy.

        The roles are the actor and, if the run has them, the reference and the reward model. A role
        is in the second mapping if its initial weights are copied from another role. `reference_removed_by`
        is the option setting that removes the reference, such as "ppo.kl_ctl=0", or None if the run
        has a reference.

        The actor's default learning rate is 1e-6. A reference without a path is the initial actor.
        The reward model's head returns one number per completion, or one per token if the reward
        model scores steps.
        """
        config = self.config
        roles = {"actor": with_lr(config.actor.with_head("lm", trained=True), 1e-6)}
        init_from: dict[str, str] = {}
        if reference_removed_by is None:
            roles["ref"], init_from = build_reference(config.ref, config.actor)
        elif self.options.ref_ema_eta:
            raise ConfigError(
                f"{self.name}.ref_ema_eta updates the reference, but {reference_removed_by} removes it; "
                "set only one of the two"
            )
        if self.has_model:
            roles["rew"] = config.rew.with_head(
                "score" if config.rew_step is None else "value", trained=False
            )
        return roles, init_from

    def build_critic(self, spec: ModelSpec, init: str | None) -> tuple[ModelSpec, dict[str, str]]:
        """Return the critic's spec, and {"critic": "actor"} if the actor's weights are copied.

        The mapping is empty if the weights are read from files. If `spec` has no path, the critic
        is initialized from the role `init`, "rew" or "actor". By default, this is the reward model
        if it uses the actor's tokens, and otherwise the actor. The default learning rate is 5e-6.
        """
        valued, copied = build_critic(spec, init, self.config.actor, self.config.rew)
        return with_lr(valued, 5e-6), copied

    def build_experiment(
        self,
        roles: Mapping[str, ModelSpec],
        init_from: Mapping[str, str],
        nodes: Sequence[Node],
        *notes: str,
    ) -> Experiment:
        """Return the experiment with these roles and nodes, checked without importing torch.

        A training step is one execution of the node `actor_train`; each call that trains makes
        `num_updates` optimizer steps per batch. `init_from` maps roles to the roles whose initial
        weights they copy. `notes` are lines for the plan that is printed before the run.
        """
        # Each training call makes `num_updates` optimizer steps.
        trains = []
        for node in nodes:
            if isinstance(node, MFCDef) and node.trains:
                trains.append(node)
        plan = ExperimentParts(
            roles=roles,
            nodes=[_with_staleness(node, self.options) for node in nodes],
            dataset=self.dataset,
            dataset_type=choose_dataset_type(self.dataset, "prompt"),
            data_role="actor",
            steps_follow="actor_train",
            longest=compute_max_length(self.config.dataset, self.options.gen),
            evaluation=self.build_evaluation(),
            syncs=self._build_syncs() if "ref" in roles else [],
            init_from=init_from,
            updates_per_firing={node.name: self.num_updates for node in trains},
            notes=[*_build_step_notes(self), *notes],
        )
        return assemble(self.config, plan)

    def build_generation(
        self, size: int, samples: int, *, name: str = "actor_gen", prefix: str = "", **gen: Any
    ) -> MFCDef:
        """Return the call `name`, which samples `samples` completions per prompt.

        `size` is the batch size in prompts. `prefix` is prepended to the output keys. `gen` has
        sampling options that replace those of the run.
        """
        spec = replace(self.gen, **gen)
        outputs = (*SAMPLE_KEYS, *(SUPPORT_KEYS if spec.record_support else ()))
        return MFCDef(
            name=name,
            role="actor",
            interface="generate",
            method="generate",
            batch_size=size,
            input_keys=("prompt",),
            output_keys=outputs,
            output_key_remap={key: prefix + key for key in outputs} if prefix else {},
            args={**build_sampling_args(spec), "samples_per_prompt": samples},
        )

    def build_rewards(self, size: int, *, prefix: str = "", parts: bool = False) -> list[Node]:
        """Return the nodes that compute rewards, with the reward model, reward functions or both.

        If the run has both, the node of the reward functions also adds the reward model's scores.
        With `parts`, the reward of each function is also an output. `prefix` is prepended to the
        names of the nodes, and to the keys of completions and rewards.
        """
        config = self.config
        # Add the reward model.
        nodes = list[Node]()
        if self.has_model:
            nodes.append(
                _build_reward_model(
                    config, size, prefix, "scores" if config.rewards.given else "rewards"
                )
            )
        # Add the reward function.
        if config.rewards.given:
            remap = {}
            for key in ("completion", *(("scores",) if self.has_model else ())):
                remap[key] = prefix + key
            output_keys = (
                "rewards",
                *(("token_rewards",) if config.rewards.by_token else ()),
                *(("reward_parts",) if parts else ()),
            )
            reward = HostFunction(
                name=f"{prefix}reward",
                function="reward",
                batch_size=size,
                input_keys=("prompt", *remap),
                output_keys=output_keys,
                input_key_remap=remap if prefix else {},
                output_key_remap={key: prefix + key for key in output_keys} if prefix else {},
                args=asdict(replace(config.rewards, keep_parts=parts)),
                tokenizer_role="actor",
            )
            nodes.append(reward)
        return nodes

    def build_reference(self, waits: Sequence[str] = ()) -> MFCDef:
        """Return the call that computes reference log-probs once all keys in `waits` exist."""
        return self._build_scoring("ref_inf", "ref", "ref_logprobs", waits)

    def _build_scoring(self, name: str, role: str, output_key: str, waits: Sequence[str]) -> MFCDef:
        return MFCDef(
            name=name,
            role=role,
            interface="infer",
            method="inference",
            batch_size=self.num_prompts,
            input_keys=("prompt", "completion", *self.support_keys, *waits),
            output_keys=("logprobs",),
            output_key_remap={"logprobs": output_key},
            args={"outputs": ["logprobs"], "temperature": self.temperature},
        )

    def build_corrections(self, waits: Sequence[str] = ()) -> list[Node]:
        """Return the nodes of the sampler correction, or an empty list if it is disabled.

        The first node computes the actor's log-probs before the actor is trained on the batch. It
        does not run until all keys in `waits` exist. The second node computes weights for the loss,
        which correct for the difference between these log-probs and the sampler's.
        """
        options = self.options
        if not isinstance(options, PolicyOptions) or not self.correction_keys:
            return []
        correction = HostFunction(
            name="sampler_correction",
            function="sampler_correction",
            batch_size=self.num_prompts,
            input_keys=("prompt", "completion", "logprobs", "old_logprobs"),
            optional_keys=("loss_mask",),
            output_keys=("sampler_weights",),
            args=asdict(options.correction),
        )
        return [self._build_scoring("actor_inf", "actor", "old_logprobs", waits), correction]

    def build_covariance(self) -> list[Node]:
        """Return the node that selects tokens for Clip-Cov or KL-Cov, as a list.

        The list is empty if neither method is used.
        """
        options = self.options
        if not isinstance(options, PolicyOptions) or not self.covariance_keys:
            return []
        return [
            HostFunction(
                name="high_covariance",
                function="high_covariance",
                batch_size=self.num_prompts,
                input_keys=("prompt", "completion", "logprobs", "advantages"),
                optional_keys=("loss_mask",),
                output_keys=("high_covariance",),
                args=asdict(options.high_covariance),
            )
        ]

    def build_training(
        self, node: str, role: str, loss: str, loss_args: Mapping[str, Any], keys: Sequence[str]
    ) -> MFCDef:
        """Return the training call `node`, which trains `role` on the sampled completions.

        `keys` are the inputs of the loss, in addition to prompts and completions. The loss ignores
        tokens that a sample's `loss_mask` excludes.
        """
        samples = role == "actor"  # the loss compares its log-probs with those of the sampler
        args = {
            "loss": loss,
            "loss_args": dict(loss_args),
            "num_minibatches": self.num_minibatches,
            "epochs": self.options.ppo_epochs,
        }
        if samples:
            args["temperature"] = self.temperature
        # Inputs: those of the loss, of stale weights, of truncated sampling and of corrections.
        optional = (
            "loss_mask",
            *(("ref_logprobs", *_list_age_keys(self.options)) if samples else ()),
        )
        read = (
            *keys,
            *(
                (*self.support_keys, *self.correction_keys, *self.covariance_keys)
                if samples
                else ()
            ),
        )
        return MFCDef(
            name=node,
            role=role,
            interface="train",
            method="train_step",
            batch_size=self.num_prompts,
            input_keys=("prompt", "completion", *read),
            optional_keys=tuple(key for key in optional if key not in read),
            args=args,
        )

    def build_evaluation(self) -> list[Node]:
        """Return the nodes of the evaluation graph: sampling, rewards and pass rates.

        For each validation prompt, `eval_samples` completions are sampled as in training.
        """
        size = self.dataset.valid_bs_n_seqs or 0
        rates = self.options.pass_rates
        node = HostFunction(
            name="pass_rates",
            function="pass_rates",
            batch_size=size,
            input_keys=("rewards",),
            args=asdict(rates),
        )
        return [
            self.build_generation(size, rates.count, record_support=False),
            *self.build_rewards(size),
            node,
        ]

    def _build_syncs(self) -> list[ParamSync]:
        """Return the weight updates to run after each training step.

        If `ref_ema_eta` is set, one update makes the reference a moving average of the actor.
        """
        eta = self.options.ref_ema_eta
        return [ParamSync("actor", "ref", eta, after="actor_train")] if eta else []


def _build_reward_model(config: SamplingConfig, size: int, prefix: str, scores: str) -> MFCDef:
    """Return the call in which the reward model scores completions, with the output key `scores`.

    `prefix` is prepended to the node's name and to all keys except `prompt`.
    """
    form = {"prompt_prefix": config.rew.prompt_prefix, "prompt_suffix": config.rew.prompt_suffix}
    args: dict[str, Any] = {
        "outputs": ["scores"],
        **{key: text for key, text in form.items() if text},
    }
    output_key_remap = {"scores": prefix + scores}
    if config.rew_step is not None:
        args = {"step": config.rew_step.replace("\\n", "\n")}
        output_key_remap = {**output_key_remap, "token_rewards": f"{prefix}token_rewards"}
    return MFCDef(
        name=f"{prefix}rew_inf",
        role="rew",
        interface="infer" if config.rew_step is None else "process_reward",
        method="inference",
        batch_size=size,
        input_keys=("prompt", "completion"),
        optional_keys=("finished",),
        output_keys=tuple(output_key_remap),
        output_key_remap=output_key_remap,
        input_key_remap={key: prefix + key for key in ("completion", "finished")} if prefix else {},
        args=args,
    )


def build_sampling_args(spec: GenerationSpec) -> dict[str, Any]:
    """Return the arguments of the interface `generate` that say how completions are sampled."""
    return {**to_mapping(spec), "record_support": spec.record_support}


def format_epochs(count: int) -> str:
    """Return the number of epochs as a phrase, such as "2 epochs"."""
    return f"{count} epoch" if count == 1 else f"{count} epochs"


def build_pass_notes(passes: int, completions: int, minibatches: int) -> list[str]:
    """Return a list with a note on a step's minibatches and epochs, for the printed plan.

    The list is empty if a step has one minibatch and one epoch. `passes` is the number of epochs.
    """
    if passes == minibatches == 1:
        return []
    return [
        f"a step's completions are trained on in minibatches of {completions // minibatches}, for "
        f"{format_epochs(passes)}"
    ]


def _build_step_notes(policy: RLGraphBuilder) -> list[str]:
    """Return lines that describe a step for the printed plan, such as the maximum lengths."""
    most = policy.dataset.max_prompt_len
    prompts = "" if most is None else f", prompts of at most {most}"
    return [
        f"completions of at most {policy.gen.max_new_tokens} tokens{prompts}",
        *build_pass_notes(
            policy.options.ppo_epochs, policy.num_completions, policy.num_minibatches
        ),
        *_build_staleness_notes(policy.options),
        *build_service_notes(policy.config),
    ]


def _has_option(options: SamplingOptions, name: str) -> bool:
    """Return whether a policy gradient method is used and its option `name` is not "none"."""
    return isinstance(options, PolicyOptions) and getattr(options, name) != "none"


def _list_age_keys(options: SamplingOptions) -> tuple[str, ...]:
    """Return the tuple ("versions",), or an empty tuple if sampling always uses the newest weights.

    The key `versions` has the version of the weights that sampled each completion.
    """
    if isinstance(options, PolicyOptions) and options.max_staleness:
        return ("versions",)
    return ()


def _with_staleness(node: Node, options: SamplingOptions) -> Node:
    """Return the node, with `max_staleness` and `interruptible` set if it samples completions.

    These options let it sample ahead of training. Other nodes are returned unchanged.
    """
    if (
        not isinstance(options, PolicyOptions)
        or not isinstance(node, MFCDef)
        or node.method != "generate"
    ):
        return node
    return replace(
        node, max_staleness=options.max_staleness, interruptible=options.interrupt_generation
    )


def _check_staleness(options: SamplingOptions, name: str) -> None:
    if (
        isinstance(options, PolicyOptions)
        and options.interrupt_generation
        and not options.max_staleness
    ):
        raise ConfigError(
            f"{name}.interrupt_generation=true: with max_staleness=0 no weights change while "
            f"completions are sampled; "
            f"set {name}.max_staleness=1 or more, or leave it out"
        )


def _build_staleness_notes(options: SamplingOptions) -> list[str]:
    if not isinstance(options, PolicyOptions) or not options.max_staleness:
        return []
    return [
        f"sampling: up to {options.max_staleness} steps ahead of training; the loss corrects for "
        f"older weights by {options.correction.correction}, with correction weights of at most "
        f"{options.correction.high:g}"
    ]


def has_reward_model(config: SamplingConfig) -> bool:
    """Return whether the options name a reward model."""
    return config.rew.path is not None or config.rew.backend in NO_NETWORK


def _check_rewards(config: SamplingConfig) -> None:
    """Raise `ConfigError` if there is no source of rewards, or if reward options have no effect."""
    rewards = config.rewards
    functions = rewards.given
    if not functions and not has_reward_model(config):
        raise ConfigError(
            "rew.path and reward are both missing; set a reward model (rew.path or rew.url), a "
            "reward function (or "
            "reward_column), or both"
        )
    if rewards.scores_weight != 1.0 and not (functions and has_reward_model(config)):
        raise ConfigError(
            f"rew_weight={rewards.scores_weight} weighs a reward model against a reward function; set "
            f"both, or leave it out"
        )
    if rewards.by_token and not functions:
        raise ConfigError(
            "reward_by_token=true applies to reward functions only; set reward, or leave it out"
        )
    if config.rew_step is not None and (
        not has_reward_model(config) or rewards.by_token or not config.rew_step
    ):
        raise ConfigError(
            f"rew_step={config.rew_step!r}: makes the reward model score every step that ends "
            "with this text; set rew.path, and leave out reward_by_token"
        )
