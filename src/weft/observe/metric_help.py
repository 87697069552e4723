"""Descriptions of metrics: meaning, unit, healthy range, and bounds for warnings.

`python -m weft.observe.metric_help` prints them as Markdown tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache


@dataclass(frozen=True)
class MetricHelp:
    """Description of a metric, or of all metrics whose names match a pattern.

    Attributes:
        pattern: glob pattern of the metric's name without the node
        group: heading under which the metric is listed
        unit: unit of the values, such as "s" or "share"; "" if there is none
        what: meaning of the metric
        healthy: description of the healthy range; "" if there is none
        least: values below this bound are reported as a problem of the run
        most: values above this bound are reported as a problem of the run

    To avoid false reports, the bounds are wider than the healthy range.
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
        "Completed steps. In one step, every node of the graph runs on a batch.",
        "Grows by 1.",
    ),
    MetricHelp("epoch", RUN, "epochs", "Number of passes over the training data so far.", ""),
    MetricHelp(
        "step_seconds",
        SPEED,
        "s",
        "Wall time of the whole step, including the time between its calls.",
        "About the same in every step. If it grows, completions get longer or other programs use the "
        "machine.",
    ),
    MetricHelp(
        "time/*",
        SPEED,
        "s",
        "Wall time of one call in this step. Concurrent calls add up to more than the step.",
        "Generation takes most of a PPO or GRPO step.",
    ),
    MetricHelp(
        "peak_memory_gb",
        SPEED,
        "GiB",
        "Peak memory since the run began, on the device that used the most.",
        "Constant after the first steps, and below the memory of the device.",
    ),
    MetricHelp(
        "predicted/step_seconds",
        SPEED,
        "s",
        "Predicted wall time of a step with rows of average length; `step_seconds` is the measured value. "
        "From the second step on with host functions, as long as they took so far (median).",
        "Near `step_seconds`. Missing if the speed of the device or of the models is not known.",
    ),
    MetricHelp(
        "predicted/peak_memory_gb",
        SPEED,
        "GiB",
        "Predicted peak memory of the run with its largest batches; next to `peak_memory_gb`.",
        "At least `peak_memory_gb`.",
    ),
    MetricHelp(
        "predicted/*/peak_bytes",
        SPEED,
        "bytes",
        "Predicted peak memory during one call with the largest batches; next to `{call}/peak_bytes`.",
        "At least the measured value.",
    ),
    MetricHelp(
        "predicted/*/num_weight_bytes",
        SPEED,
        "bytes",
        "Predicted bytes of new weights that the devices of one call receive; next to "
        "`{call}/num_weight_bytes`.",
        "The measured value.",
    ),
    MetricHelp(
        "predicted/*",
        SPEED,
        "s",
        "Predicted wall time of one call with rows of average length, or of a host function: its median in "
        "past steps. Next to `time/{call}`.",
        "Near the measured value.",
    ),
    MetricHelp(
        "eval/num_rows",
        RUN,
        "rows",
        "Number of validation rows over which the metrics of `eval/` are averaged.",
        "The same at every evaluation. With fewer rows, an evaluated accuracy is noisier.",
    ),
    # -- learning
    MetricHelp(
        "loss",
        LEARNING,
        "",
        "The value that the optimizer minimizes. For SFT in nats per token. For a policy, its sign "
        "has no meaning.",
        "SFT, reward models and DPO: falls, fast at first; DPO and reward models start near 0.693. "
        "PPO and GRPO: near 0 without a trend; watch the reward instead.",
    ),
    MetricHelp(
        "nll",
        LEARNING,
        "nats per token",
        "Mean negative log-probability of the trained tokens (cross-entropy).",
        "Falls. If it rises in evaluation while it falls in training, the model overfits: stop "
        "earlier or use more data.",
    ),
    MetricHelp(
        "perplexity",
        LEARNING,
        "",
        "exp(nll): the number of equally likely tokens that would give the same uncertainty.",
        "Falls towards a minimum that depends on the data; 1 means that the text is memorized.",
    ),
    MetricHelp(
        "token_accuracy",
        LEARNING,
        "share",
        "Trained tokens to which the model gives the highest probability.",
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
        "Stable after the warm-up. Spikes indicate bad rows or a learning rate that is too high.",
    ),
    MetricHelp(
        "learning_rate",
        LEARNING,
        "",
        "Learning rate of this step, according to the schedule.",
        "Follows the schedule.",
    ),
    MetricHelp(
        "num_tokens",
        LEARNING,
        "tokens",
        "Number of tokens trained on in this step, including prompts.",
        "",
    ),
    MetricHelp(
        "skipped_updates",
        LEARNING,
        "updates",
        "Optimizer steps that were skipped because of a veto or a loss that was not finite.",
        "0 or rare.",
        most=0.2,
    ),
    MetricHelp(
        "nonfinite",
        LEARNING,
        "",
        "1 if a loss or gradient was not finite and the update was skipped.",
        "Absent.",
        most=0.0,
    ),
    MetricHelp(
        "frozen",
        LEARNING,
        "",
        "1 while the role is not trained because the critic is still warming up.",
        "Only at the start.",
    ),
    MetricHelp(
        "balance_loss",
        LEARNING,
        "",
        "Imbalance of the tokens per expert; 1 means that all experts get equally many.",
        "Near 1.",
        most=3.0,
    ),
    MetricHelp(
        "expert_load",
        SPEED,
        "",
        "Tokens of the busiest expert relative to the mean of all, averaged over layers and "
        "micro-batches; with expert parallelism all ranks wait for the busiest.",
        "Near 1; of few tokens somewhat more.",
    ),
    # -- rewards
    MetricHelp(
        "reward",
        REWARD,
        "",
        "Mean reward of the step's completions, before any KL penalty is subtracted.",
        "Rises, ever more slowly. After a jump to the maximum, read the completions: often the "
        "policy exploits a loophole of the reward.",
    ),
    MetricHelp(
        "reward/*",
        REWARD,
        "",
        "Mean value of one reward function, before it is multiplied by its weight.",
        "Rises.",
    ),
    MetricHelp(
        "reward_std",
        REWARD,
        "",
        "Standard deviation of the rewards of one prompt's completions, averaged over prompts.",
        "Above 0; the policy learns from these differences.",
    ),
    MetricHelp(
        "frac_reward_zero_std",
        REWARD,
        "share",
        "Prompts whose completions all got the same reward. They do not contribute to learning.",
        "Below 0.5. If near 1, the prompts are all too easy or too hard.",
        most=0.9,
    ),
    MetricHelp(
        "reward_after_kl",
        REWARD,
        "",
        "Mean reward minus the KL penalty, which PPO maximizes.",
        "Rises with reward.",
    ),
    MetricHelp(
        "reward_clipped_fraction",
        REWARD,
        "share",
        "Rewards that exceeded max_reward_clip and were clipped.",
        "Near 0; otherwise raise the limit.",
        most=0.2,
    ),
    MetricHelp(
        "return",
        REWARD,
        "",
        "Mean discounted sum of the rewards from each token on, the critic's target.",
        "Like reward.",
    ),
    MetricHelp(
        "advantage_std",
        REWARD,
        "",
        "Standard deviation of the advantages before whitening.",
        "Above 0, without jumps.",
    ),
    MetricHelp(
        "pass@*",
        REWARD,
        "share",
        "Prompts for which at least one of k completions passes.",
        "Rises, above avg@k.",
    ),
    MetricHelp(
        "avg@*", REWARD, "share", "Completions that pass, averaged over k per prompt.", "Rises."
    ),
    MetricHelp(
        "kept_fraction",
        REWARD,
        "share",
        "Prompts that the filter kept.",
        "Above 0.3.",
        least=0.1,
    ),
    MetricHelp(
        "overlong_penalty", REWARD, "", "Mean penalty for the length of completions.", "Near 0."
    ),
    MetricHelp(
        "baseline_reward",
        REWARD,
        "",
        "Mean reward of the greedy completions, used as the baseline.",
        "Rises with reward.",
    ),
    MetricHelp(
        "steps",
        REWARD,
        "steps",
        "Mean number of reasoning steps per completion that were judged.",
        "",
    ),
    MetricHelp("requests", REWARD, "requests", "Requests sent to a judge.", ""),
    MetricHelp(
        "unreadable",
        REWARD,
        "completions",
        "Completions for which the judge's verdict could not be parsed.",
        "Near 0.",
        most=0.5,
    ),
    MetricHelp(
        "*put_tokens",
        REWARD,
        "tokens",
        "Tokens that a judge read (input) or wrote (output) in this step.",
        "",
    ),
    MetricHelp(
        "cost",
        REWARD,
        "",
        "Cost of the judge in this step, computed from the configured prices.",
        "",
    ),
    MetricHelp(
        "timeouts",
        REWARD,
        "completions",
        "Completions whose reward function exceeded its time limit.",
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
        "Mean score of the reward model. Only differences between scores are meaningful.",
        "Stays bounded.",
    ),
    # -- policy
    MetricHelp(
        "kl",
        POLICY,
        "nats per token",
        "KL divergence of the policy from its reference.",
        "Grows slowly; usual final values are 0.01 to 0.5 per token. If it exceeds 1 or grows fast, "
        "raise the KL weight or lower the learning rate.",
        most=1.0,
    ),
    MetricHelp(
        "kl_exact",
        POLICY,
        "nats per token",
        "KL divergence from the reference, computed over the whole vocabulary.",
        "As kl.",
        most=1.0,
    ),
    MetricHelp(
        "kl_k?_per_completion",
        POLICY,
        "nats",
        "KL divergence from the reference, summed over a completion.",
        "Grows slowly.",
    ),
    MetricHelp(
        "kl_k?",
        POLICY,
        "nats per token",
        "KL divergence from the reference, as subtracted from the reward.",
        "As kl.",
        most=1.0,
    ),
    MetricHelp(
        "kl_coef",
        POLICY,
        "",
        "Weight of the KL penalty.",
        "Constant, or changed by the adaptive controller to reach its target KL.",
    ),
    MetricHelp(
        "entropy",
        POLICY,
        "nats per token",
        "Entropy of the policy's next-token distribution.",
        "Falls slowly. If near 0, the policy always writes the same and no longer learns.",
        least=0.01,
    ),
    MetricHelp(
        "clip_ratio",
        POLICY,
        "share",
        "Tokens whose importance ratio was clipped.",
        "0 to 0.2, and 0 with one update per batch. If above 0.3, the updates are too large.",
        most=0.4,
    ),
    MetricHelp(
        "approx_kl",
        POLICY,
        "nats per token",
        "Approximate KL divergence between the updated policy and the policy that sampled.",
        "Below about 0.02.",
        most=0.2,
    ),
    MetricHelp(
        "importance_ratio",
        POLICY,
        "",
        "Mean ratio of a token's probability now to its probability when sampled.",
        "Close to 1.",
        least=0.5,
        most=2.0,
    ),
    MetricHelp(
        "sampler_logprob_diff",
        POLICY,
        "nats",
        "Mean difference between the log-probs from sampling and those recomputed for training, "
        "before the first update.",
        "Below 1e-3 in bfloat16, below 1e-5 in float32. If larger, sampling and training compute "
        "different values.",
        most=0.05,
    ),
    MetricHelp("policy_loss", POLICY, "", "Part of the loss that trains the policy.", "Near 0."),
    MetricHelp(
        "staleness",
        POLICY,
        "train steps",
        "Number of train steps between the weights that sampled and the weights being trained.",
        "Low.",
    ),
    MetricHelp(
        "weight",
        POLICY,
        "",
        "Mean importance weight of a token, which corrects for differences between sampler and "
        "trained policy.",
        "Close to 1.",
    ),
    MetricHelp(
        "bounded_fraction",
        POLICY,
        "share",
        "Tokens whose importance weight reached its bound.",
        "Near 0.",
        most=0.3,
    ),
    MetricHelp(
        "effective_fraction",
        POLICY,
        "share",
        "Effective sample size of the weighted tokens.",
        "Above 0.9.",
        least=0.5,
    ),
    MetricHelp(
        "covariance", POLICY, "", "Mean covariance of the tokens' log-probs and advantages.", ""
    ),
    MetricHelp(
        "chosen_fraction",
        POLICY,
        "share",
        "Tokens with the highest covariance, which are clipped or penalized.",
        "Small.",
    ),
    # -- critic
    MetricHelp(
        "value_loss",
        CRITIC,
        "",
        "Squared error of the critic's predicted returns.",
        "Falls in the first steps, then changes with the rewards.",
    ),
    MetricHelp(
        "explained_variance",
        CRITIC,
        "share",
        "Fraction of the returns' variance that the critic predicts.",
        "Rises above 0.3. If below 0, the critic is worse than a constant: warm it up or raise its "
        "learning rate.",
        least=-0.2,
    ),
    MetricHelp(
        "value_clip_ratio",
        CRITIC,
        "share",
        "Tokens whose value prediction was clipped.",
        "Below 0.3.",
        most=0.5,
    ),
    MetricHelp("value", CRITIC, "", "Mean value that the critic predicts.", "Close to return."),
    MetricHelp(
        "values",
        CRITIC,
        "",
        "Mean value that the critic predicts before the update.",
        "Close to return.",
    ),
    # -- preferences
    MetricHelp(
        "margin",
        PREFERENCES,
        "",
        "Mean score of the better answer minus that of the worse.",
        "Rises from 0.",
    ),
    MetricHelp(
        "kendalltau",
        PREFERENCES,
        "-1 to 1",
        "(correctly ordered - wrongly ordered pairs) / pairs, within a group of answers.",
        "Rises from 0.",
    ),
    MetricHelp(
        "rewards/accuracies",
        PREFERENCES,
        "share",
        "Pairs whose chosen answer has the higher implicit reward. Differences due to rounding do "
        "not count.",
        "Starts at 0, since both rewards are 0, and rises to 0.6 to 0.9.",
    ),
    MetricHelp(
        "rewards/margins",
        PREFERENCES,
        "",
        "Implicit reward of the chosen answer minus that of the rejected answer.",
        "Rises.",
    ),
    MetricHelp(
        "rewards/*",
        PREFERENCES,
        "",
        "Implicit reward: beta times (log-prob minus the reference's log-prob).",
        "The difference between chosen and rejected grows. If both fall fast, lower the learning "
        "rate or raise beta.",
    ),
    MetricHelp(
        "logps/*",
        PREFERENCES,
        "nats",
        "Mean log-prob of whole answers.",
        "Chosen should not fall much; if it does, the model unlearns the chosen answers.",
    ),
    MetricHelp(
        "kl_baseline",
        PREFERENCES,
        "nats",
        "KTO's reference point: KL divergence from the reference.",
        "Small, at least 0.",
    ),
    MetricHelp(
        "reward_shift",
        PREFERENCES,
        "",
        "BCO's running mean of implicit rewards.",
        "Changes slowly.",
    ),
    MetricHelp(
        "tied_fraction",
        PREFERENCES,
        "share",
        "Pairs of completions with the same reward. They do not contribute to learning.",
        "Low.",
        most=0.9,
    ),
    MetricHelp(
        "reward_margin",
        PREFERENCES,
        "",
        "Reward of the better completion minus that of the worse.",
        "Above 0.",
    ),
    # -- distillation
    MetricHelp(
        "forward_kl",
        DISTILLATION,
        "nats per token",
        "Forward KL divergence from teacher to student.",
        "Falls.",
    ),
    MetricHelp(
        "teacher_agreement",
        DISTILLATION,
        "share",
        "Tokens for which student and teacher have the same most likely token.",
        "Rises.",
    ),
    MetricHelp(
        "teacher_mass",
        DISTILLATION,
        "share",
        "Total teacher probability of the compared token ids.",
        "Near 1.",
    ),
    MetricHelp(
        "entropy_bound",
        DISTILLATION,
        "nats per token",
        "Entropy of the student over the compared token ids.",
        "Near the teacher's.",
    ),
    MetricHelp(
        "teacher_entropy_bound",
        DISTILLATION,
        "nats per token",
        "Entropy of the teacher over the compared token ids.",
        "Constant.",
    ),
    # -- generation
    MetricHelp(
        "response_length",
        GENERATION,
        "tokens",
        "Mean length of completions.",
        "Changes slowly. After a jump to the limit or to 1, read the completions.",
        least=1.5,
    ),
    MetricHelp(
        "truncated_fraction",
        GENERATION,
        "share",
        "Completions that reached gen.max_new_tokens before they ended.",
        "Below 0.1; otherwise raise gen.max_new_tokens.",
        most=0.3,
    ),
    MetricHelp(
        "interruptions",
        GENERATION,
        "",
        "Number of times that sampling paused to load new weights.",
        "",
    ),
    MetricHelp(
        "sampled_fraction",
        GENERATION,
        "share",
        "Prompts for which the model sampled completions; the others use the dataset's answers.",
        "Near the configured share.",
    ),
    MetricHelp(
        "rounds/*",
        GENERATION,
        "rounds",
        "Number of sampling rounds needed to fill the batch of this step.",
        "1 to 3.",
    ),
    # -- speed
    MetricHelp(
        "tokens_per_second",
        SPEED,
        "tokens/s",
        "Tokens that this call processes per second, including prompts.",
        "Constant.",
    ),
    MetricHelp(
        "mfu",
        SPEED,
        "share",
        "Model FLOPs utilization: arithmetic per second, relative to the device's rate measured at "
        "the start.",
        "0.3 to 0.6 on a GPU with long batches; lower for small models.",
    ),
    MetricHelp(
        "num_bytes_moved",
        SPEED,
        "bytes",
        "Bytes of tensors that were copied from other devices for this call.",
        "Constant.",
    ),
    MetricHelp(
        "num_weight_bytes",
        SPEED,
        "bytes",
        "Bytes of newly trained weights that the call's devices received, for calls on a copy of a "
        "role.",
        "Constant, and 0 if the role has not been trained since the last call.",
    ),
    MetricHelp(
        "peak_bytes",
        SPEED,
        "bytes",
        "Peak memory during this call, on the device that used the most. On a CPU, it is that of the "
        "process, which keeps memory that earlier calls have freed.",
        "Constant after the first steps.",
    ),
    MetricHelp(
        "prompts_in_part",
        GENERATION,
        "share",
        "Prompts that exceeded the model's maximum length and were cut.",
        "Near 0.",
        most=0.3,
    ),
    MetricHelp(
        "cached_fraction",
        SPEED,
        "share",
        "Outputs that were read from the cache on disk instead of computed.",
        "1 from the second epoch on.",
    ),
)

ENDS = {"_max": "largest", "_min": "smallest"}  # suffix -> which value of the step


@cache
def find(name: str) -> MetricHelp | None:
    """Return the description of a metric of metrics.jsonl; None if the metric has no description."""
    if name.startswith(("time/", "predicted/")):
        return next((one for one in HELP if fnmatchcase(name, one.pattern)), None)
    if "/" not in name:
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


def render_markdown() -> str:
    """Return all descriptions as Markdown, with one table per group."""
    groups = list(dict.fromkeys(one.group for one in HELP))
    parts = []
    for group in groups:
        rows = [one for one in HELP if one.group == group]
        lines = [f"## {group}", "", "| metric | unit | what it is | healthy |", "|---|---|---|---|"]
        for one in rows:
            lines.append(f"| `{one.pattern}` | {one.unit} | {one.what} | {one.healthy} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    print(render_markdown(), end="")
