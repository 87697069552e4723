"""Descriptions of metrics: meaning, unit, healthy range and bounds for warnings.

`python -m weft.observe.metric_help` prints the table as Markdown.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache


@dataclass(frozen=True)
class MetricHelp:
    """Description of one kind of metric.

    `pattern` matches the name without its node, or the whole name if it has none; `healthy` can be
    empty if no range is meaningful. A run is reported if the metric is below `least` or above
    `most`; these bounds are wider than the healthy range, to avoid false reports.
    """

    pattern: str
    group: str
    unit: str
    what: str
    healthy: str = ""
    least: float | None = None
    most: float | None = None


LEARNING = "Learning"
POLICY = "Policy"
REWARD = "Rewards"
CRITIC = "Critic"
PREFERENCES = "Preferences"
DISTILLATION = "Distillation"
GENERATION = "Generation"
SPEED = "Speed"
RUN = "Run"

# The first pattern that matches is used. A name ending in one of `ENDS` is also tried without it.
HELP = (
    MetricHelp(
        "step",
        RUN,
        "",
        "Steps that are over. A step is one round through the whole graph.",
        "Grows by 1.",
    ),
    MetricHelp("epoch", RUN, "epochs", "How often the data have been gone through.", ""),
    MetricHelp(
        "step_seconds",
        SPEED,
        "s",
        "Wall time of the whole step, with everything between its calls.",
        "About the same in every step. Growing: completions get longer, or the machine is shared.",
    ),
    MetricHelp(
        "time/*",
        SPEED,
        "s",
        "Wall time of one call in this step. Calls that overlap add up to more than the step.",
        "Generation is most of a PPO or GRPO step.",
    ),
    MetricHelp(
        "peak_memory_gb",
        SPEED,
        "GiB",
        "The most memory that was held at once since the run began, on the fullest device.",
        "Level after the first steps, and below what the device has.",
    ),
    MetricHelp(
        "eval/num_rows",
        RUN,
        "rows",
        "Validation rows over which the metrics of `eval/` are means.",
        "The same at every evaluation. The noise of an evaluated accuracy is that of drawing so "
        "many rows.",
    ),
    # -- learning
    MetricHelp(
        "loss",
        LEARNING,
        "",
        "What the optimizer makes small. For SFT: nats per token. For a policy its sign means "
        "nothing.",
        "SFT, reward models and DPO: falls, fast at first. DPO and reward models begin near "
        "0.693. PPO and GRPO: near 0 "
        "without a trend; watch the reward.",
    ),
    MetricHelp(
        "nll",
        LEARNING,
        "nats per token",
        "Mean of -log p of the trained tokens: cross-entropy.",
        "Falls. If it rises in evaluation while it falls in training, the model memorizes: stop "
        "earlier or use more data.",
    ),
    MetricHelp(
        "perplexity",
        LEARNING,
        "",
        "exp(nll): among how many equally likely tokens the model seems to choose.",
        "Falls towards a floor that depends on the data; 1 means memorized.",
    ),
    MetricHelp(
        "token_accuracy",
        LEARNING,
        "share",
        "Trained tokens that are the model's first choice.",
        "Rises.",
    ),
    MetricHelp(
        "accuracy",
        LEARNING,
        "share",
        "SFT: trained tokens that are the model's first choice. Reward models: pairs in the right "
        "order.",
        "Rises. A reward model begins near 0.5; 0.65 to 0.8 is usual for human preferences.",
    ),
    MetricHelp(
        "grad_norm",
        LEARNING,
        "",
        "Length of the gradient before it is clipped.",
        "Settles after the warm-up. Spikes mean bad rows or a learning rate that is too high.",
    ),
    MetricHelp(
        "learning_rate",
        LEARNING,
        "",
        "What the schedule says at this step.",
        "Follows the schedule.",
    ),
    MetricHelp(
        "num_tokens",
        LEARNING,
        "tokens",
        "Tokens that were trained on in this step, prompts included.",
        "",
    ),
    MetricHelp(
        "skipped_updates",
        LEARNING,
        "updates",
        "Optimizer steps that were left out: a veto, or a loss that was not finite.",
        "0 or rare.",
        most=0.2,
    ),
    MetricHelp(
        "nonfinite",
        LEARNING,
        "",
        "1 where a loss or gradient was not finite and the update was left out.",
        "Absent.",
        most=0.0,
    ),
    MetricHelp(
        "frozen",
        LEARNING,
        "",
        "1 while the role's weights wait for the critic's warm-up.",
        "Only at the start.",
    ),
    MetricHelp(
        "balance_loss",
        LEARNING,
        "",
        "How unevenly the tokens are spread over experts; 1 is even.",
        "Near 1.",
        most=3.0,
    ),
    # -- rewards
    MetricHelp(
        "reward",
        REWARD,
        "",
        "Mean reward of the step's completions, before any KL is taken off.",
        "Rises, and slows down. A jump to the maximum is often a loophole: read the completions.",
    ),
    MetricHelp(
        "reward/*", REWARD, "", "Mean of one of the reward functions, before its weight.", "Rises."
    ),
    MetricHelp(
        "reward_std",
        REWARD,
        "",
        "Spread of rewards among completions of one prompt, a mean over prompts.",
        "Above 0: it is what the policy learns from.",
    ),
    MetricHelp(
        "frac_reward_zero_std",
        REWARD,
        "share",
        "Prompts whose completions all got the same reward. They teach nothing.",
        "Below 0.5. Near 1: the prompts are all too easy or too hard.",
        most=0.9,
    ),
    MetricHelp(
        "reward_after_kl",
        REWARD,
        "",
        "Mean reward with the KL penalty taken off: what PPO makes large.",
        "Rises with reward.",
    ),
    MetricHelp(
        "reward_clipped_fraction",
        REWARD,
        "share",
        "Rewards outside max_reward_clip.",
        "Near 0; otherwise raise the limit.",
        most=0.2,
    ),
    MetricHelp(
        "return",
        REWARD,
        "",
        "Mean discounted sum of rewards from a token on: the critic's target.",
        "As reward.",
    ),
    MetricHelp(
        "advantage_std",
        REWARD,
        "",
        "Spread of advantages before whitening.",
        "Above 0, without jumps.",
    ),
    MetricHelp(
        "pass@*",
        REWARD,
        "share",
        "Prompts of which one of k completions passes.",
        "Rises, above avg@k.",
    ),
    MetricHelp("avg@*", REWARD, "share", "Completions that pass.", "Rises."),
    MetricHelp(
        "kept_fraction",
        REWARD,
        "share",
        "Prompts that the filter let pass.",
        "Above 0.3.",
        least=0.1,
    ),
    MetricHelp(
        "overlong_penalty", REWARD, "", "What completions lose by their length, a mean.", "Near 0."
    ),
    MetricHelp(
        "baseline_reward", REWARD, "", "Reward of the greedy completion.", "Rises with reward."
    ),
    MetricHelp(
        "steps",
        REWARD,
        "steps",
        "Steps of reasoning that were judged, a mean over completions.",
        "",
    ),
    MetricHelp("requests", REWARD, "requests", "What was asked of a judge.", ""),
    MetricHelp(
        "unreadable",
        REWARD,
        "completions",
        "Completions whose verdict could not be read.",
        "Near 0.",
        most=0.5,
    ),
    MetricHelp("*put_tokens", REWARD, "tokens", "What a judge read or wrote in this step.", ""),
    MetricHelp(
        "cost", REWARD, "", "What a judge cost in this step, at the price that was set.", ""
    ),
    MetricHelp(
        "timeouts",
        REWARD,
        "completions",
        "Completions whose reward function did not end in time.",
        "0.",
        most=0.5,
    ),
    MetricHelp(
        "died", REWARD, "completions", "Completions whose reward process died.", "0.", most=0.5
    ),
    MetricHelp(
        "score",
        REWARD,
        "",
        "Mean score of the reward model. Only differences mean something.",
        "Stays bounded.",
    ),
    # -- policy
    MetricHelp(
        "kl",
        POLICY,
        "nats per token",
        "How far the policy is from its reference.",
        "Grows slowly; usual ends are 0.01 to 0.5 per token. Above 1, or fast growth: raise the "
        "KL weight or lower the "
        "learning rate.",
        most=1.0,
    ),
    MetricHelp(
        "kl_exact",
        POLICY,
        "nats per token",
        "KL to the reference over the whole vocabulary.",
        "As kl.",
        most=1.0,
    ),
    MetricHelp(
        "kl_k?_per_completion",
        POLICY,
        "nats",
        "KL to the reference, summed over a completion.",
        "Grows slowly.",
    ),
    MetricHelp(
        "kl_k?",
        POLICY,
        "nats per token",
        "KL to the reference as it is taken off the reward.",
        "As kl.",
        most=1.0,
    ),
    MetricHelp(
        "kl_coef",
        POLICY,
        "",
        "Weight of the KL.",
        "Constant, or moved by the adaptive controller towards its target.",
    ),
    MetricHelp(
        "entropy",
        POLICY,
        "nats per token",
        "How undecided the policy is.",
        "Falls slowly. Near 0: the policy always says the same and no longer learns.",
        least=0.01,
    ),
    MetricHelp(
        "clip_ratio",
        POLICY,
        "share",
        "Tokens whose importance ratio was clipped.",
        "0 to 0.2. 0 with one update per batch. Above 0.3: the updates are too large.",
        most=0.4,
    ),
    MetricHelp(
        "approx_kl",
        POLICY,
        "nats per token",
        "How far an update moved the policy from the one that sampled.",
        "Below about 0.02.",
        most=0.2,
    ),
    MetricHelp(
        "importance_ratio",
        POLICY,
        "",
        "Mean of p(new) / p(sampled) over tokens.",
        "Close to 1.",
        least=0.5,
        most=2.0,
    ),
    MetricHelp(
        "sampler_logprob_diff",
        POLICY,
        "nats",
        "Gap between log-probs as sampled and as recomputed for training, before the first update.",
        "Below 1e-3 in bfloat16, below 1e-5 in float32. More: sampling and training do not "
        "compute the same.",
        most=0.05,
    ),
    MetricHelp("policy_loss", POLICY, "", "The policy's part of the loss.", "Near 0."),
    MetricHelp(
        "staleness",
        POLICY,
        "train steps",
        "How much newer the trained weights are than those that sampled.",
        "Low.",
    ),
    MetricHelp(
        "weight",
        POLICY,
        "",
        "Weight of a token that makes up for a sampler that computes otherwise.",
        "Close to 1.",
    ),
    MetricHelp(
        "bounded_fraction", POLICY, "share", "Tokens whose weight was bounded.", "Near 0.", most=0.3
    ),
    MetricHelp(
        "effective_fraction",
        POLICY,
        "share",
        "Tokens that the weighted ones are worth.",
        "Above 0.9.",
        least=0.5,
    ),
    MetricHelp("covariance", POLICY, "", "Mean covariance of log-probs and advantages.", ""),
    MetricHelp(
        "chosen_fraction",
        POLICY,
        "share",
        "Tokens of the highest covariance, which are treated apart.",
        "Small.",
    ),
    # -- critic
    MetricHelp(
        "value_loss",
        CRITIC,
        "",
        "Squared error of the critic.",
        "Falls in the first steps, then follows the rewards.",
    ),
    MetricHelp(
        "explained_variance",
        CRITIC,
        "share",
        "How much of the returns' spread the critic predicts.",
        "Rises above 0.3. Below 0: worse than a constant; warm the critic up or raise its "
        "learning rate.",
        least=-0.2,
    ),
    MetricHelp(
        "value_clip_ratio",
        CRITIC,
        "share",
        "Tokens whose value was clipped.",
        "Below 0.3.",
        most=0.5,
    ),
    MetricHelp("value", CRITIC, "", "Mean of the critic's values.", "Close to return."),
    MetricHelp(
        "values", CRITIC, "", "Mean of the critic's values before the update.", "Close to return."
    ),
    # -- preferences
    MetricHelp(
        "margin",
        PREFERENCES,
        "",
        "Mean score of the better answer less that of the worse.",
        "Rises from 0.",
    ),
    MetricHelp(
        "kendalltau",
        PREFERENCES,
        "-1 to 1",
        "(right - wrong) / pairs, within a group of answers.",
        "Rises from 0.",
    ),
    MetricHelp(
        "rewards/accuracies",
        PREFERENCES,
        "share",
        "Pairs whose chosen answer has the higher implicit reward; a difference of rounding is "
        "none.",
        "Begins at 0, since both rewards are 0, and rises to 0.6 to 0.9.",
    ),
    MetricHelp(
        "rewards/margins",
        PREFERENCES,
        "",
        "Implicit reward of the chosen answer less the rejected one's.",
        "Rises.",
    ),
    MetricHelp(
        "rewards/*",
        PREFERENCES,
        "",
        "Implicit reward: beta times (log-prob minus the reference's).",
        "The gap between chosen and rejected grows. Both falling fast: lower the learning rate or "
        "raise beta.",
    ),
    MetricHelp(
        "logps/*",
        PREFERENCES,
        "nats",
        "Log-prob of whole answers.",
        "Chosen should not fall much; if it does, the model forgets what it should say.",
    ),
    MetricHelp(
        "kl_baseline",
        PREFERENCES,
        "nats",
        "KTO's reference point: KL to the reference.",
        "Small, at least 0.",
    ),
    MetricHelp(
        "reward_shift", PREFERENCES, "", "BCO's running mean of implicit rewards.", "Moves slowly."
    ),
    MetricHelp(
        "tied_fraction",
        PREFERENCES,
        "share",
        "Pairs of completions with the same reward. They teach nothing.",
        "Low.",
        most=0.9,
    ),
    MetricHelp(
        "reward_margin",
        PREFERENCES,
        "",
        "Reward of the better completion less that of the worse.",
        "Above 0.",
    ),
    # -- distillation
    MetricHelp(
        "forward_kl",
        DISTILLATION,
        "nats per token",
        "KL from the teacher to the student.",
        "Falls.",
    ),
    MetricHelp(
        "teacher_agreement",
        DISTILLATION,
        "share",
        "Tokens that are the teacher's first choice too.",
        "Rises.",
    ),
    MetricHelp(
        "teacher_mass",
        DISTILLATION,
        "share",
        "The teacher's probability on the ids that are compared.",
        "Near 1.",
    ),
    MetricHelp(
        "entropy_bound",
        DISTILLATION,
        "nats per token",
        "The student's entropy over these ids.",
        "Near the teacher's.",
    ),
    MetricHelp(
        "teacher_entropy_bound",
        DISTILLATION,
        "nats per token",
        "Entropy of the teacher over these ids.",
        "Level.",
    ),
    # -- generation
    MetricHelp(
        "response_length",
        GENERATION,
        "tokens",
        "Mean length of completions.",
        "Moves slowly. A jump to the limit or to 1: read the completions.",
        least=1.5,
    ),
    MetricHelp(
        "truncated_fraction",
        GENERATION,
        "share",
        "Completions that were cut by gen.max_new_tokens.",
        "Below 0.1; otherwise raise gen.max_new_tokens.",
        most=0.3,
    ),
    MetricHelp(
        "interruptions", GENERATION, "", "How often sampling stopped to take up new weights.", ""
    ),
    MetricHelp(
        "sampled_fraction",
        GENERATION,
        "share",
        "Prompts that the model answered itself; others kept their answers.",
        "Near the share that was asked for.",
    ),
    MetricHelp(
        "rounds/*",
        GENERATION,
        "rounds",
        "How often was sampled for this step to fill the batch.",
        "1 to 3.",
    ),
    # -- speed
    MetricHelp(
        "tokens_per_second",
        SPEED,
        "tokens/s",
        "Tokens through this call per second, prompts included.",
        "Level.",
    ),
    MetricHelp(
        "mfu",
        SPEED,
        "share",
        "Arithmetic done as a share of what the device measured at the start.",
        "0.3 to 0.6 on a GPU with long batches; lower for small models.",
    ),
    MetricHelp(
        "num_bytes_moved",
        SPEED,
        "bytes",
        "Tensors that came from other devices for this call.",
        "Level.",
    ),
    MetricHelp(
        "prompts_in_part",
        GENERATION,
        "share",
        "Prompts that were longer than the model reads, and cut.",
        "Near 0.",
        most=0.3,
    ),
    MetricHelp(
        "cached_fraction",
        SPEED,
        "share",
        "Outputs that came from the cache on disk.",
        "1 from the second epoch on.",
    ),
)

ENDS = {"_max": "largest", "_min": "smallest"}  # suffix -> which value of the step


@cache
def find(name: str) -> MetricHelp | None:
    """Return the description of a metric in metrics.jsonl; None if there is none."""
    if name.startswith("time/") or "/" not in name:
        rest = name
    else:
        rest = name.partition("/")[2]
    parts = rest.split("/")
    if name.startswith("eval/"):  # eval/{source}/{metric}, eval/{metric}
        if parts[-2:-1] in (["rewards"], ["logps"]):
            parts = parts[-2:]
        else:
            parts = parts[-1:]
    for tried in ("/".join(parts), parts[-1]):
        ends = [tried, *(tried.removesuffix(end) for end in ENDS if tried.endswith(end))]
        for each in ends:
            known = next((one for one in HELP if fnmatchcase(each, one.pattern)), None)
            if known is not None:
                return known
    return None


def undescribed(names: Iterable[str]) -> list[str]:
    """Return the names that have no description."""
    return [name for name in names if find(name) is None]


def markdown() -> str:
    """Return all descriptions as Markdown, a table for each group."""
    groups = list(dict.fromkeys(one.group for one in HELP))
    parts = []
    for group in groups:
        rows = [one for one in HELP if one.group == group]
        lines = [f"## {group}", "", "| metric | unit | what it is | healthy |", "|---|---|---|---|"]
        lines += [f"| `{one.pattern}` | {one.unit} | {one.what} | {one.healthy} |" for one in rows]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
