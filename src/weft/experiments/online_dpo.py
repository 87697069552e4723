"""Online DPO: the actor samples completions, rewards rank them, and DPO trains on the pairs.

Guo et al. 2024, "Direct Language Model Alignment from Online AI Feedback", arXiv 2402.04792. The
paper samples two completions of a prompt and asks a language model which is better. In weft,
rewards decide, as in PPO and GRPO: from a reward model, from reward functions (the verifier `judge`
asks a language model), or from both.

There are three differences from TRL's OnlineDPOTrainer. TRL computes log-probs at temperature 1;
weft computes those of actor and reference at the sampler's temperature, as in PPO and GRPO. The
`ipo` loss compares sums over tokens in TRL, and means in weft, as in `dpo`. TRL treats the first of
two completions with equal rewards as the better one; in weft they form no pair.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from weft.algorithms.dpo import (
    LABELLED,
    REFERENCE_FREE,
    TRANSPORTED,
    PairLossOptions,
    build_preference_loss,
)
from weft.algorithms.preferences import PreferencesByReward
from weft.engine.spec_parts import MAX_SAMPLES
from weft.errors import ConfigError
from weft.experiment import Experiment
from weft.experiments._rl_graph import RLGraphBuilder
from weft.experiments._rl_options import SamplingConfig, SamplingOptions
from weft.graph.mfc import HostFunction, Node
from weft.options import include, option
from weft.registry import register_quickstart

# Losses of `dpo` that are not losses of a single pair, with the reason why they are refused.
REFUSED_OPTIONS = {
    **dict.fromkeys(
        LABELLED,
        "needs answers labelled good or bad, and here rewards only say which of two is better; "
        "bco_pair is bco's loss of a pair",
    ),
    **dict.fromkeys(
        TRANSPORTED,
        "sorts the scores of a whole batch and needs every completion in one pair, but "
        "completions of equal reward are in none; sigmoid is the default loss",
    ),
}


@dataclass
class OnlineDPOOptions(SamplingOptions):
    """Options of online DPO (`online_dpo.*`): sampling, the choice of pairs and the loss."""

    ppo_n_minibatches: int = option(
        1,
        "optimizer steps per pass over a batch; the completions of a prompt stay together",
        at_least=1,
    )
    samples_per_prompt: int = option(
        2,
        "completions per prompt, which are compared with each other",
        at_least=2,
        at_most=MAX_SAMPLES,
    )
    preferences: PreferencesByReward = include(PreferencesByReward)
    loss: PairLossOptions = include(PairLossOptions)

    def __post_init__(self) -> None:
        kind = self.loss.loss_type
        if kind in REFUSED_OPTIONS:
            raise ConfigError(f"online_dpo.loss_type={kind!r}: {REFUSED_OPTIONS[kind]}")

    def build_loss_args(self) -> dict[str, Any]:
        """Return the arguments of the loss `dpo`.

        Raises `ConfigError` if options are mutually exclusive.
        """
        args = self.loss.build_args()
        try:
            build_preference_loss(**args)
        except ConfigError as error:
            raise ConfigError(str(error).replace("dpo.", "online_dpo.")) from None
        return args


@register_quickstart("online_dpo")
@dataclass
class OnlineDPOConfig(SamplingConfig):
    """DPO on pairs of completions that the actor samples and that rewards rank.

    Rewards come from a reward model, reward functions, or both.
    """

    host_nodes: ClassVar[tuple[str, ...]] = (*SamplingConfig.host_nodes, "preferences")
    algorithm: ClassVar[str] = "online_dpo"
    generation: ClassVar[str] = "online_dpo.gen"
    spellings: ClassVar[dict[str, str]] = {
        "rollouts_per_prompt": "online_dpo.samples_per_prompt",
        "num_generations": "online_dpo.samples_per_prompt",
        "beta": "online_dpo.beta",
        "loss_type": "online_dpo.loss_type",
        "label_smoothing": "online_dpo.label_smoothing",
        "missing_eos_penalty": "online_dpo.missing_eos_penalty",
        "max_new_tokens": "online_dpo.gen.max_new_tokens",
        "response_length": "online_dpo.gen.max_new_tokens",
        "reward_funcs": "reward",
        "reward_model_path": "rew.path",
        "ref_model_name_or_path": "ref.path",
    }

    online_dpo: OnlineDPOOptions = option(OnlineDPOOptions(), "the algorithm")

    def build(self) -> Experiment:
        """Return the experiment, which samples completions, ranks them and trains on the pairs.

        The nodes of the dataflow graph are `actor_gen`, the nodes that compute rewards,
        `preferences`, `ref_inf` (unless the loss needs no reference) and `actor_train`. Raises
        `UserError` if an option is invalid.
        """
        options = self.online_dpo
        policy = RLGraphBuilder.from_options(
            self, options, "online_dpo", options.samples_per_prompt
        )
        _check_options(options, policy)
        loss = f"online_dpo.loss_type={options.loss.loss_type}"
        roles, copied = policy.build_roles(reference_removed_by=None if self._has_ref else loss)
        return policy.build_experiment(
            roles, copied, self._build_nodes(policy), _build_note(options)
        )

    @property
    def _has_ref(self) -> bool:
        return self.online_dpo.loss.loss_type not in REFERENCE_FREE

    def _build_nodes(self, policy: RLGraphBuilder) -> list[Node]:
        options = self.online_dpo
        size = policy.num_prompts
        preferences = HostFunction(
            name="preferences",
            function="preferences_by_reward",
            batch_size=size,
            input_keys=("completion", "rewards", "finished"),
            output_keys=("rank", "comparison"),
            args=asdict(options.preferences),
        )
        references = [policy.build_reference()] if self._has_ref else []
        keys = ("rank", "comparison", *(("ref_logprobs",) if self._has_ref else ()))
        return [
            policy.build_generation(size, options.samples_per_prompt),
            *policy.build_rewards(size),
            preferences,
            *references,
            policy.build_training("actor_train", "actor", "dpo", options.build_loss_args(), keys),
        ]


def _check_options(options: OnlineDPOOptions, policy: RLGraphBuilder) -> None:
    """Raise `ConfigError` for options that are mutually exclusive."""
    if options.gen.greedy:
        raise ConfigError(
            "online_dpo.gen.greedy=true: greedy completions of one prompt are all the same, so "
            "none is better than another; "
            "leave it out"
        )
    if options.loss.loss_type in REFERENCE_FREE and options.ref_ema_eta:
        raise ConfigError(
            "online_dpo.ref_ema_eta updates the reference, but "
            f"online_dpo.loss_type={options.loss.loss_type} has none; leave the first out or choose "
            "another loss"
        )
    size = options.mini_batch_size
    samples = options.samples_per_prompt
    together = "the completions of a prompt are compared with each other and stay in one minibatch"
    if size is not None and size % samples:
        raise ConfigError(
            f"online_dpo.mini_batch_size={size}: must be a multiple of "
            f"online_dpo.samples_per_prompt={samples}; {together}"
        )
    if size is None and policy.num_prompts % options.ppo_n_minibatches:
        raise ConfigError(
            f"online_dpo.ppo_n_minibatches={options.ppo_n_minibatches}: must divide the "
            f"{policy.num_prompts} prompts of a step "
            f"(dataset.train_bs_n_seqs); {together}"
        )


def _build_note(options: OnlineDPOOptions) -> str:
    """Return a line about the pairs, for the plan that is printed before the run."""
    count = options.samples_per_prompt
    if options.preferences.pairs == "all":
        return (
            f"preferences: {count * (count - 1) // 2} pairs per prompt, without those of equal "
            f"rewards"
        )
    return f"preferences: one pair per prompt, the best and the worst of its {count} completions, if their rewards differ"
