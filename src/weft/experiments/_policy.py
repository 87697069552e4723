"""What PPO and GRPO share: their options, and the calls that sample, reward and score completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from weft.data.spec import DatasetSpec
from weft.engine.spec import GenerationSpec, ModelSpec, OptimizerSpec
from weft.errors import ConfigError
from weft.experiments import _checks as checks
from weft.experiments.common import MFCOptions, RunConfig
from weft.graph.mfc import HostFunction, MFCDef, Node, ParamSync
from weft.host.spec import locate, parse_reward
from weft.options import option

SAMPLED = ("completion", "logprobs", "versions", "finished")
SUPPORT = ("support", "support_counts")


def _reward_problem(reward: Any) -> str | None:
    try:
        for part in parse_reward(reward):
            locate(part)
    except ConfigError as error:
        return str(error).removeprefix("reward: ")
    return None


@dataclass
class PolicyOptions:
    """What every policy gradient method has; the defaults are PPO's."""

    gen: GenerationSpec = option(GenerationSpec(), "how completions are sampled")
    ppo_n_minibatches: int = option(4, "optimizer steps of one pass over a batch", at_least=1)
    mini_batch_size: int | None = option(
        None, "completions of one optimizer step, in place of ppo_n_minibatches", at_least=1
    )
    ppo_epochs: int = option(1, "passes over a batch", at_least=1)
    eps_clip: float = option(0.2, "the importance ratio stops pulling below 1 - eps_clip and above 1 + eps_clip")
    eps_clip_high: float | None = option(None, "above 1 + eps_clip_high instead (clip-higher)")
    dual_clip: float | None = option(None, "bound on the loss of tokens with a negative advantage, above 1 (dual clip)")
    entropy_coef: float = option(0.0, "weight of the entropy bonus")
    early_stop_imp_ratio: float | None = option(
        5.0, "a minibatch whose mean importance ratio is above takes no step; null for no bound"
    )
    early_stop_kl: float | None = option(None, "a minibatch whose approx_kl is above takes no step; null for no bound")
    max_reward_clip: float = option(20.0, "rewards are clipped to +- this, after scale and bias", at_least=0.0)
    reward_output_scaling: float = option(1.0, "rewards are multiplied by it, after the bias is taken off")
    reward_output_bias: float = option(0.0, "taken off rewards first")
    missing_eos_penalty: float = option(0.0, "taken off the reward of a completion that was cut by its length")
    ref_ema_eta: float | None = option(
        None,
        "after every step the reference moves this share of the way to the actor; null keeps it fixed",
        at_least=0.0,
        at_most=1.0,
    )

    def clip_args(self) -> dict[str, Any]:
        """The arguments that the two policy losses share."""
        names = ("eps_clip", "eps_clip_high", "dual_clip", "entropy_coef", "early_stop_imp_ratio", "early_stop_kl")
        return {name: getattr(self, name) for name in names}


@dataclass
class PolicyConfig(RunConfig):
    """Options of PPO and GRPO alike."""

    main_role: ClassVar[str] = "actor"
    trained_roles: ClassVar[tuple[str, ...]] = ("actor",)
    host_nodes: ClassVar[tuple[str, ...]] = ("advantages", "reward")

    actor: ModelSpec = option(ModelSpec(optimizer=OptimizerSpec(lr=1e-6)), "the policy that is trained")
    ref: ModelSpec = option(ModelSpec(), "the frozen reference of the KL; the actor's own path when absent")
    rew: ModelSpec = option(ModelSpec(), "reward model; none when rew.path is absent")
    reward: Any = option(
        None,
        "reward function: a verifier (gsm8k, math, format, ifeval, length, code), module:function, FILE.py:function, weights "
        "by name as {gsm8k: 1.0, length: 0.1}, or a list of names, of [name, weight] or of {name, weight, args}; added to "
        "the reward model's score where both are given",
        check=_reward_problem,
    )
    reward_timeout_s: float = option(60.0, "seconds that a reward function has for a batch", at_least=0.001)
    reward_on_timeout: float | None = option(
        None, "reward of completions whose function has not come back by then; the run stops when absent"
    )
    rew_weight: float = option(1.0, "weight of the reward model's score where a reward function is given too")
    dataset: DatasetSpec = option(DatasetSpec(), "rows of the form prompt, with columns for the reward function")
    actor_gen: MFCOptions = option(MFCOptions(), "the call that samples completions")
    rew_inf: MFCOptions = option(MFCOptions(), "the call of the reward model")
    ref_inf: MFCOptions = option(MFCOptions(), "the call that scores completions with the reference")
    actor_train: MFCOptions = option(MFCOptions(), "the call that trains the actor")


@dataclass(frozen=True)
class Policy:
    """The sizes and sampling of one policy experiment, and the calls made from them."""

    config: PolicyConfig
    options: PolicyOptions
    name: str  # the group of options, for messages
    dataset: DatasetSpec
    samples: int
    gen: GenerationSpec

    @classmethod
    def of(cls, config: PolicyConfig, options: PolicyOptions, name: str, dataset: DatasetSpec, samples: int) -> Policy:
        """Raises `ConfigError` for sizes that do not divide, and where nothing gives a reward."""
        if config.rew.path is None and config.reward is None and config.rew.backend != "null":
            raise ConfigError("rew.path and reward are both missing; set a reward model, a reward function, or both")
        if config.rew_weight != 1.0 and (
            config.reward is None or (config.rew.path is None and config.rew.backend != "null")
        ):
            raise ConfigError(
                f"rew_weight={config.rew_weight} weighs a reward model against a reward function; set both, or leave it out"
            )
        if dataset.train_tokens_per_batch is not None:
            raise ConfigError(
                f"dataset.train_tokens_per_batch={dataset.train_tokens_per_batch}: {name} counts prompts, since completions "
                "are not written yet; set dataset.train_bs_n_seqs"
            )
        vocab = checks.vocab_size("actor", config.actor)
        gen = options.gen
        if vocab is not None and gen.top_k >= vocab:
            gen = replace(gen, top_k=0)
        return cls(config, options, name, dataset, samples, replace(gen, record_support=gen.truncates))

    @property
    def batch(self) -> int:
        return self.dataset.train_bs_n_seqs or 0

    @property
    def completions(self) -> int:
        return self.batch * self.samples

    @property
    def minibatches(self) -> int:
        return checks.minibatches(
            self.completions, self.options.mini_batch_size, self.options.ppo_n_minibatches, self.name
        )

    @property
    def updates(self) -> int:
        """Optimizer steps of one batch."""
        return self.minibatches * self.options.ppo_epochs

    @property
    def temperature(self) -> float:
        """What log-probs were sampled at; those of greedy completions are the model's own."""
        return 1.0 if self.gen.greedy else self.gen.temperature

    @property
    def longest(self) -> int:
        return self.dataset.longest_prompt + self.gen.max_new_tokens

    @property
    def has_model(self) -> bool:
        """Whether a reward model gives the reward, or a part of it."""
        return self.config.rew.path is not None or self.config.rew.backend == "null"

    @property
    def rescored(self) -> tuple[str, ...]:
        """Keys that calls on sampled tokens read where sampling was limited to some ids."""
        return SUPPORT if self.gen.record_support else ()

    def generate(self, size: int, samples: int, *, name: str = "actor_gen", prefix: str = "", **gen: Any) -> MFCDef:
        """Samples completions; with a prefix its outputs get names of their own."""
        spec = replace(self.gen, **gen)
        args = {f.name: getattr(spec, f.name) for f in fields(spec) if f.name in SAMPLING}
        outputs = (*SAMPLED, *(SUPPORT if spec.record_support else ()))
        return MFCDef(
            name=name, role="actor", interface="generate", method="generate", batch_size=size,
            input_keys=("prompt",), output_keys=outputs,
            output_key_remap={key: prefix + key for key in outputs} if prefix else {},
            args={**args, "samples_per_prompt": samples},
        )  # fmt: skip

    def rewards(self, size: int, *, prefix: str = "") -> list[Node]:
        """The reward model's call, the reward function's node, or both: then the second adds the first's scores."""
        config, nodes = self.config, list[Node]()
        made = f"{prefix}rewards"
        if self.has_model:
            nodes.append(self._reward_model(size, prefix, made if config.reward is None else f"{prefix}scores"))
        if config.reward is not None:
            remap = {key: prefix + key for key in ("completion", *(("scores",) if self.has_model else ()))}
            reward = HostFunction(
                name=f"{prefix}reward", function="reward", batch_size=size,
                input_keys=("prompt", *remap), output_keys=("rewards",),
                input_key_remap=remap if prefix else {}, output_key_remap={"rewards": made} if prefix else {},
                args=self._reward_args(), tokenizer_role="actor",
            )  # fmt: skip
            nodes.append(reward)
        return nodes

    def _reward_args(self) -> dict[str, Any]:
        config = self.config
        args = {"reward": config.reward, "timeout_s": config.reward_timeout_s, "on_timeout": config.reward_on_timeout}
        return {**args, "scores_weight": config.rew_weight} if self.has_model else args

    def _reward_model(self, size: int, prefix: str, scores: str) -> MFCDef:
        form = {"prompt_prefix": self.config.rew.prompt_prefix, "prompt_suffix": self.config.rew.prompt_suffix}
        return MFCDef(
            name=f"{prefix}rew_inf", role="rew", interface="infer", method="inference", batch_size=size,
            input_keys=("prompt", "completion"), output_keys=("scores",),
            input_key_remap={"completion": f"{prefix}completion"} if prefix else {}, output_key_remap={"scores": scores},
            args={"outputs": ["scores"], **{key: text for key, text in form.items() if text}},
        )  # fmt: skip

    def reference(self, waits: Sequence[str] = ()) -> MFCDef:
        """Scores the completions with the reference; `waits` are keys of nodes that it lets go first."""
        return MFCDef(
            name="ref_inf", role="ref", interface="infer", method="inference", batch_size=self.batch,
            input_keys=("prompt", "completion", *self.rescored, *waits),
            output_keys=("logprobs",), output_key_remap={"logprobs": "ref_logprobs"},
            args={"outputs": ["logprobs"], "temperature": self.temperature},
        )  # fmt: skip

    def train(self, node: str, role: str, loss: str, loss_args: Mapping[str, Any], keys: Sequence[str]) -> MFCDef:
        """A call that trains on the sampled completions; `keys` are what its loss reads."""
        samples = role == "actor"  # its log-probs are compared with those of the sampler
        args = {
            "loss": loss, "loss_args": dict(loss_args),
            "num_minibatches": self.minibatches, "epochs": self.options.ppo_epochs,
        }  # fmt: skip
        return MFCDef(
            name=node, role=role, interface="train", method="train_step", batch_size=self.batch,
            input_keys=("prompt", "completion", *keys, *(self.rescored if samples else ())),
            optional_keys=("ref_logprobs",) if samples and "ref_logprobs" not in keys else (),
            args={**args, "temperature": self.temperature} if samples else args,
        )  # fmt: skip

    def evaluation(self) -> list[Node]:
        """One completion for each validation prompt and its reward."""
        size = self.dataset.valid_bs_n_seqs or 0
        return [self.generate(size, 1, record_support=False), *self.rewards(size)]

    def syncs(self) -> list[ParamSync]:
        """The reference as a moving average of the actor, where that is asked for."""
        eta = self.options.ref_ema_eta
        return [ParamSync("actor", "ref", eta, after="actor_train")] if eta else []

    def notes(self, trained: Sequence[str]) -> list[str]:
        """What one step does, for the plan that is printed before the run."""
        size = self.completions // self.minibatches
        return [
            f"a step: {self.batch} prompts x {self.samples} = {self.completions} completions of at most "
            f"{self.gen.max_new_tokens} tokens",
            f"a step: {self.completions} completions x {self.options.ppo_epochs} epochs / {size} a minibatch = "
            f"{self.updates} optimizer steps of {' and of '.join(trained)}",
        ]


SAMPLING = tuple(
    spec.name for spec in fields(GenerationSpec) if spec.name == "record_support" or not spec.metadata.get("hidden")
)
