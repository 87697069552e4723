"""Roles and graph nodes of the methods that train on sampled completions.

The nodes sample, compute rewards and log-probs, train and evaluate. The options that they follow
are in `_rl_options.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from weft.algorithms.advantages import PassRates
from weft.algorithms.ppo import HighCovariance, SamplerCorrection
from weft.data.spec import DatasetSpec
from weft.engine.spec import GenerationSpec, ModelSpec
from weft.errors import ConfigError
from weft.experiment import Experiment
from weft.experiments import checks
from weft.experiments._assemble import (
    ExperimentParts,
    assemble,
    check_config,
    choose_dataset_type,
    fill_batch_sizes,
)
from weft.experiments._rl_options import PolicyOptions, SamplingConfig, SamplingOptions
from weft.experiments._roles import (
    build_critic,
    build_reference,
    build_reward_model,
    build_service_notes,
    check_rewards,
    check_served_reference,
    has_reward_model,
    resolve_servers,
    with_lr,
)
from weft.experiments.models import find_context
from weft.graph.mfc import HostFunction, MFCDef, Node, ParamSync
from weft.host.spec import RewardOptions
from weft.options import to_mapping
from weft.planner.lengths import compute_max_length, fill_sample_lengths

SAMPLE_KEYS = ("completion", "logprobs", "versions", "finished", "loss_mask")
SUPPORT_KEYS = ("support", "support_counts")


@dataclass(frozen=True)
class RLGraphBuilder:
    """Roles and graph nodes of an experiment that trains on sampled completions.

    The fields are the options of the run and of the method, as `from_options` has resolved them.
    The methods return the nodes of a step, in the order of an algorithm's graph.
    """

    config: SamplingConfig
    options: SamplingOptions
    name: str  # name of the option group, such as "ppo", for messages
    dataset: DatasetSpec
    samples: int  # completions per prompt
    gen: GenerationSpec
    rewards: RewardOptions
    pass_rates: PassRates
    has_model: bool  # whether a reward model contributes to the reward
    max_staleness: int = 0
    interruptible: bool = False
    correction: SamplerCorrection | None = None  # for log-probs of the sampler that differ
    covariance: HighCovariance | None = None  # Clip-Cov or KL-Cov

    @classmethod
    def from_options(
        cls, config: SamplingConfig, options: SamplingOptions, name: str, samples: int
    ) -> RLGraphBuilder:
        """Check the options that all sampling methods share, and create a builder from them.

        Raises `UserError` if one is invalid, or if nothing gives rewards.
        """
        config = check_config(config)
        rew, ref = resolve_servers(config.rew, config.ref, config.actor, config.rew_step)
        check_served_reference(ref, options.gen, options.ref_ema_eta, name)
        config = replace(config, rew=rew, ref=ref)
        dataset = fill_batch_sizes(config.dataset)
        rewards, pass_rates = config.rewards, options.pass_rates
        check_rewards(rew, rewards, config.rew_step)
        stale: dict[str, Any] = {}
        if isinstance(options, PolicyOptions):
            if options.interrupt_generation and not options.max_staleness:
                raise ConfigError(
                    f"{name}.interrupt_generation=true: with max_staleness=0 no weights change "
                    f"while completions are sampled; set {name}.max_staleness=1 or more, or leave "
                    "it out"
                )
            corrects = options.correction_method != "none"
            if corrects and options.logprob_temperature is not None:
                raise ConfigError(
                    f"{name}.logprob_temperature={options.logprob_temperature} and "
                    f"{name}.sampler_correction={options.correction_method}: the correction "
                    f"compares log-probs of one temperature; set one of the two"
                )
            covariance = options.high_covariance
            stale = {
                "max_staleness": options.max_staleness,
                "interruptible": options.interrupt_generation,
                "correction": options.correction if corrects else None,
                "covariance": covariance if covariance.method != "none" else None,
            }
        if dataset.train_tokens_per_batch is not None:
            raise ConfigError(
                f"dataset.train_tokens_per_batch={dataset.train_tokens_per_batch}: {name} forms "
                "batches by number of prompts, since the completions do not exist yet; set "
                "dataset.train_bs_n_seqs"
            )
        # A top_k of the whole vocabulary truncates nothing.
        vocab = checks.read_vocab_size(config.actor)
        dataset, gen = fill_sample_lengths(
            dataset, options.gen, find_context(config), f"{name}.gen"
        )
        if vocab is not None and gen.top_k >= vocab:
            gen = replace(gen, top_k=0)
        return cls(
            config,
            options,
            name,
            dataset,
            samples,
            replace(gen, record_support=gen.truncates and options.logprob_temperature is None),
            rewards,
            pass_rates,
            has_reward_model(rew),
            **stale,
        )

    @property
    def num_prompts(self) -> int:
        """Number of prompts per step."""
        return self.dataset.train_bs_n_seqs or 0

    @cached_property
    def num_minibatches(self) -> int:
        """Number of minibatches per pass over the completions of a step."""
        return checks.count_minibatches(
            self.num_prompts * self.samples,
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
        """Temperature for log-probs: `logprob_temperature` if it is set, else that of sampling.

        For greedy sampling, the temperature is 1.
        """
        if self.options.logprob_temperature is not None:
            return self.options.logprob_temperature
        return 1.0 if self.gen.greedy else self.gen.temperature

    @property
    def rescores(self) -> bool:
        """True if the actor scores completions again because `logprob_temperature` is set."""
        return self.options.logprob_temperature is not None

    @property
    def logprob_remap(self) -> dict[str, str]:
        """Mapping from the key `logprobs` of a host function to the log-probs that it reads."""
        return {"logprobs": "old_logprobs"} if self.rescores else {}

    @property
    def token_reward_keys(self) -> tuple[str, ...]:
        """Key of the per-token rewards, as a tuple; empty if the run has no such rewards."""
        by_token = self.rewards.by_token or self.config.rew_step is not None
        return ("token_rewards",) if by_token else ()

    @property
    def support_keys(self) -> tuple[str, ...]:
        """Keys that record the token ids that top-k, top-p and min-p allow; empty without them."""
        return SUPPORT_KEYS if self.gen.record_support else ()

    def build_roles(
        self,
        *,
        reference_removed_by: str | None,
        critic: ModelSpec | None = None,
        critic_init: str | None = None,
    ) -> tuple[dict[str, ModelSpec], dict[str, str]]:
        """Return the roles by name, and a mapping from copied roles to the roles that they copy.

        The roles are the actor and, if the run has them, the critic, the reference and the reward
        model. A role is in the second mapping if its initial weights are copied from another role.
        `reference_removed_by` is the option setting that removes the reference, such as
        "ppo.kl_ctl=0", or None if the run has a reference. `critic_init` is the role from which a
        critic without a path is initialized, see `build_critic`.

        The default learning rates are 1e-6 for the actor and 5e-6 for the critic. A reference
        without a path is the initial actor. The reward model's head returns one number per
        completion, or one per token if the reward model scores steps.
        """
        config = self.config
        roles = {"actor": with_lr(config.actor.with_head("lm", trained=True), 1e-6)}
        init_from: dict[str, str] = {}
        if critic is not None:
            valued, init_from = build_critic(critic, critic_init, config.actor, config.rew)
            roles["critic"] = with_lr(valued, 5e-6)
        if reference_removed_by is None:
            roles["ref"], copied = build_reference(config.ref, config.actor)
            init_from = init_from | copied
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
        # With `max_staleness`, sampling runs ahead of training.
        placed: list[Node] = []
        updates = {}
        for node in nodes:
            if isinstance(node, MFCDef) and node.method == "generate":
                node = replace(
                    node, max_staleness=self.max_staleness, interruptible=self.interruptible
                )
            if isinstance(node, MFCDef) and node.trains:
                updates[node.name] = self.num_updates
            placed.append(node)
        # With `ref_ema_eta`, the reference is a moving average of the actor.
        eta = self.options.ref_ema_eta
        moves = [ParamSync("actor", "ref", eta, after="actor_train")] if eta else []
        # For each validation prompt, `eval_samples` completions are sampled as in training.
        size = self.dataset.valid_bs_n_seqs or 0
        evaluation = [
            self.build_generation(size, self.pass_rates.count, record_support=False),
            *self.build_rewards(size),
            HostFunction(
                name="pass_rates",
                function="pass_rates",
                batch_size=size,
                input_keys=("rewards",),
                args=asdict(self.pass_rates),
            ),
        ]
        plan = ExperimentParts(
            roles=roles,
            nodes=placed,
            dataset=self.dataset,
            dataset_type=choose_dataset_type(self.dataset, "prompt"),
            data_role="actor",
            steps_follow="actor_train",
            longest=compute_max_length(self.config.dataset, self.options.gen),
            evaluation=evaluation,
            syncs=moves if "ref" in roles else [],
            init_from=init_from,
            updates_per_firing=updates,
            notes=[*self._build_notes(), *notes],
        )
        return assemble(self.config, plan)

    def _build_notes(self) -> list[str]:
        """Return lines that describe a step for the printed plan, such as the maximum lengths."""
        most = self.dataset.max_prompt_len
        prompts = "" if most is None else f", prompts of at most {most}"
        notes = [
            f"completions of at most {self.gen.max_new_tokens} tokens{prompts}",
            *build_pass_notes(
                self.options.ppo_epochs, self.num_prompts * self.samples, self.num_minibatches
            ),
        ]
        if self.max_staleness and self.correction is not None:
            notes.append(
                f"sampling: up to {self.max_staleness} steps ahead of training; the loss corrects "
                f"for older weights by {self.correction.correction}, with correction weights of at "
                f"most {self.correction.high:g}"
            )
        return [*notes, *build_service_notes(self.config.rew, self.config.ref)]

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
        config, rewards = self.config, self.rewards
        nodes = list[Node]()
        if self.has_model:
            scores = "scores" if rewards.has_functions else "rewards"
            nodes.append(build_reward_model(config.rew, config.rew_step, size, prefix, scores))
        if rewards.has_functions:
            remap = {}
            for key in ("completion", *(("scores",) if self.has_model else ())):
                remap[key] = prefix + key
            output_keys = (
                "rewards",
                *(("token_rewards",) if rewards.by_token else ()),
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
                args=asdict(replace(rewards, keep_parts=parts)),
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
        """Return the nodes that replace or correct the sampler's log-probs; empty without them.

        The first node computes the actor's log-probs before its update, once all keys in `waits`
        exist. The second one, of `sampler_correction`, computes weights that correct the loss for
        their difference from the sampler's.
        """
        if self.rescores:
            return [self._build_scoring("actor_inf", "actor", "old_logprobs", waits)]
        if self.correction is None:
            return []
        correction = HostFunction(
            name="sampler_correction",
            function="sampler_correction",
            batch_size=self.num_prompts,
            input_keys=("prompt", "completion", "logprobs", "old_logprobs"),
            optional_keys=("loss_mask",),
            output_keys=("sampler_weights",),
            args=asdict(self.correction),
        )
        return [self._build_scoring("actor_inf", "actor", "old_logprobs", waits), correction]

    def build_covariance(self) -> list[Node]:
        """Return a list with the node that selects tokens for Clip-Cov or KL-Cov, if one is used."""
        if self.covariance is None:
            return []
        return [
            HostFunction(
                name="high_covariance",
                function="high_covariance",
                batch_size=self.num_prompts,
                input_keys=("prompt", "completion", "logprobs", "advantages"),
                optional_keys=("loss_mask",),
                output_keys=("high_covariance",),
                input_key_remap=self.logprob_remap,
                args=asdict(self.covariance),
            )
        ]

    def build_training(
        self, node: str, role: str, loss: str, loss_args: Mapping[str, Any], keys: Sequence[str]
    ) -> MFCDef:
        """Return the training call `node`, which trains `role` on the sampled completions.

        `keys` are the inputs of the loss, in addition to prompts and completions. The loss ignores
        tokens that a sample's `loss_mask` excludes.
        """
        is_actor = role == "actor"  # its loss compares log-probs with those of the sampler
        args = {
            "loss": loss,
            "loss_args": dict(loss_args),
            "num_minibatches": self.num_minibatches,
            "epochs": self.options.ppo_epochs,
        }
        if is_actor:
            args["temperature"] = self.temperature
        # Inputs: those of the loss, of stale weights, of truncated sampling and of corrections.
        required, optional = [*keys], ["loss_mask"]
        if is_actor:
            optional += ["ref_logprobs", *(["versions"] if self.max_staleness else [])]
            required += self.support_keys
            if loss != "dpo" and self.rescores:
                required.append("old_logprobs")
            required += ["old_logprobs", "sampler_weights"] if self.correction is not None else []
            required += ["high_covariance"] if self.covariance is not None else []
        return MFCDef(
            name=node,
            role=role,
            interface="train",
            method="train_step",
            batch_size=self.num_prompts,
            input_keys=("prompt", "completion", *required),
            optional_keys=tuple(key for key in optional if key not in required),
            args=args,
        )


def build_sampling_args(spec: GenerationSpec) -> dict[str, Any]:
    """Return the arguments of the interface `generate` that say how completions are sampled."""
    return {**to_mapping(spec), "record_support": spec.record_support}


def build_pass_notes(passes: int, completions: int, minibatches: int) -> list[str]:
    """Return a list with a note on a step's minibatches and epochs, for the printed plan.

    The list is empty if a step has one minibatch and one epoch. `passes` is the number of epochs.
    """
    if passes == minibatches == 1:
        return []
    return [
        f"a step's completions are trained on in minibatches of {completions // minibatches}, for "
        f"{passes} epoch{'' if passes == 1 else 's'}"
    ]
