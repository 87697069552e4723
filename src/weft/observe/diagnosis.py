"""Diagnosis of a run from its metrics: problems, their usual causes, and options to try.

The bounds of each metric are defined with its description in `weft.observe.metric_help`. This
module also finds problems that develop over several steps: a rising loss, a falling reward, a worse
validation loss, repetitive text.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from weft.observe import pace
from weft.observe.metric_help import HELP, MetricHelp, find
from weft.observe.metrics import (
    EVAL,
    NOT_TRAINING,
    find_evaluation,
    find_headline,
    find_title,
    format_number,
    get_last_part,
    is_finite,
)

MIN_STEPS = 8  # a run with fewer steps is not diagnosed
MAX_FACTS = 4  # maximum findings in the text of a diagnosis
MAX_FIXES = 2  # maximum options to try in the text of a diagnosis
# Shipped algorithms; each has a group of options of the same name.
ALGORITHMS = ("online_dpo", "distill", "ppo", "grpo", "dpo", "rw", "sft", "gen")
POLICIES = ("ppo", "grpo", "online_dpo")
COMPARING_ALGORITHMS = ("grpo", "online_dpo")  # compare only completions of the same prompt
WORSE_LOSS = 0.02  # relative rise of a validation loss above its minimum from which it is reported
# Pair accuracy below which nothing was learned; chance is 0.5, the margin allows for noise.
CHANCE_ACCURACY = 0.53
COLLAPSED_SPREAD = 0.1  # fraction of the first reward spread below which rewards have collapsed
REPETITIVE_RATIO = 4.0  # deflate compresses only repetitive text by more than this factor
MIN_TEXT_LENGTH = 80  # characters; shorter completions are not checked for repetition
MIN_FIRST_LENGTH = 3.0  # tokens; if first answers are shorter, short answers are no collapse
KEPT_LINES = (1000, 3000)  # numbers of first and last lines used if a run is long
# Last parts of the names of metrics with bounds, and of metrics that the checks read.
USED_METRICS = frozenset(
    entry.pattern for entry in HELP if (entry.least, entry.most) != (None, None)
) | {
    *("loss", "nll", "grad_norm", "reward", "reward_std", "accuracy", "accuracies", "kendalltau"),
}
FINE = "nothing is out of range"

Lines = Sequence[Mapping[str, Any]]
Config = Callable[[], Mapping[str, Any]]


@dataclass(frozen=True)
class DiagnosisFinding:
    """Problem found in a run, such as a metric that is out of range.

    Attributes:
        key: identifier of the kind of problem, such as the metric's pattern in `metric_help`
        fact: description of the problem, including the measured value
        cause: usual cause of the problem
        fixes: options to try
        is_weak: True if healthy runs can have the problem too; it is only reported together with
            a finding that is not weak
    """

    key: str
    fact: str
    cause: str
    fixes: Sequence[str] = ()
    is_weak: bool = False


@dataclass(frozen=True)
class RunDiagnosis:
    """Result of diagnosing a run; `findings` is empty if nothing is out of range."""

    findings: Sequence[DiagnosisFinding] = ()

    @property
    def is_sound(self) -> bool:
        """True if the diagnosis found no problems."""
        return not self.findings

    @property
    def summary(self) -> str:
        """One-line summary: the first findings, the usual cause, and options to try."""
        if self.is_sound:
            return FINE
        facts = "; ".join(finding.fact for finding in self.findings[:MAX_FACTS])
        fixes = dict.fromkeys(fix for finding in self.findings for fix in finding.fixes)
        suggestion = f" Try {', or '.join(list(fixes)[:MAX_FIXES])}." if fixes else ""
        return f"{facts}. Usually {self.findings[0].cause}.{suggestion}"


@dataclass(frozen=True)
class DiagnosedRun:
    """Run to diagnose, with the data that the diagnostic checks read.

    `config` returns the run's options; it is called only if a check reads an option. For each
    metric that the checks use, `columns` has the finite values, as (steps, values).
    """

    lines: Lines
    algorithm: str | None
    config: Config = dict
    samples: Lines = ()
    columns: dict[str, tuple[list[float], list[float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Most lines have the same metrics, possibly a thousand: select the names once per set.
        names_used: dict[tuple[str, ...], list[str]] = {}
        for line in self.lines:
            names = tuple(line)
            if names not in names_used:
                names_used[names] = [
                    name
                    for name in names
                    if get_last_part(name) in USED_METRICS or get_last_part(name).startswith("kl_k")
                ]
            for name in names_used[names]:
                if is_finite(line[name]):
                    steps, values = self.columns.setdefault(name, ([], []))
                    steps.append(float(line["step"]))
                    values.append(float(line[name]))

    @property
    def kind(self) -> str:
        """Name of the built-in algorithm that the run uses; "" if it is unknown.

        If `algorithm` is not a built-in one, this is the first built-in algorithm whose options are
        in the configuration.
        """
        if self.algorithm in ALGORITHMS:
            return str(self.algorithm)
        return next((name for name in ALGORITHMS if name in self.config()), "")

    def find_values(self, name: str | None) -> list[float]:
        """Return the finite values of a metric; an empty list if the run does not have it."""
        return self.columns.get(name or "", ([], []))[1]

    def find_metric(self, last: str) -> str | None:
        """Return the first training metric named `NODE/{last}`, such as `sft/loss`, or None."""
        return next(
            (
                name
                for name in self.columns
                if get_last_part(name) == last and not name.startswith(NOT_TRAINING)
            ),
            None,
        )

    def find_option(self, name: str, default: Any = None) -> Any:
        """Return an option's value by its dotted name, or `default` if it is missing or None."""
        value: Any = self.config()
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return default if value is None else value

    def format_scaled_option(self, name: str, factor: float) -> str:
        """Return `NAME=VALUE`, where VALUE is the option's current value multiplied by `factor`.

        If the value is unknown or 0, returns "a higher NAME" if `factor` > 1, else "a lower NAME".
        """
        value = self.find_option(name)
        if is_finite(value) and value:
            return f"{name}={format_number(float(f'{value * factor:.2g}')).replace(',', '')}"
        return f"a {'higher' if factor > 1 else 'lower'} {name}"

    def format_scaled_rate(self, name: str | None, factor: float = 1 / 3) -> str:
        """Return a learning rate to try, formatted as in `format_scaled_option`.

        It is `factor` times the learning rate of the role trained by the node that reports the
        metric `name`.
        """
        return self.format_scaled_option(f"{self.find_role(name)}.optimizer.lr", factor)

    def find_role(self, name: str | None) -> str:
        """Return the role trained by the graph node that reports the metric `name`.

        If the node does not train a role, returns the main trained role: `actor` or `model`.
        """
        node = (name or "").partition("/")[0]
        default_role = "actor" if self.kind in (*POLICIES, "dpo", "distill") else "model"
        return node.removesuffix("_train") if node.endswith("_train") else default_role


def diagnose_run(
    lines: Lines, algorithm: str | None = None, config: Config = dict, samples: Lines = ()
) -> RunDiagnosis | None:
    """Diagnose a run. Returns None if the run has fewer than `MIN_STEPS` steps.

    `lines` are the rows of metrics.jsonl, oldest first; for a long run, the first and the last rows
    suffice. `samples` are rows of samples.jsonl. `config` is a function that returns the run's
    options.
    """
    if len(lines) > sum(KEPT_LINES):
        lines = [*lines[: KEPT_LINES[0]], *lines[-KEPT_LINES[1] :]]
    run = DiagnosedRun(
        [line for line in lines if is_finite(line.get("step"))], algorithm, config, samples
    )
    if len(run.lines) < MIN_STEPS:
        return None
    findings = [finding for check in CHECKS for finding in check(run)]
    # Findings on the KL come first. Weak findings alone do not count.
    strong = [finding for finding in findings if not finding.is_weak]
    strong.sort(key=lambda finding: not finding.key.startswith("kl"))
    if not strong:
        return RunDiagnosis()
    # Several signs together mean an exploited reward, which replaces the first finding.
    exploited = _check_exploited(run, [finding.key for finding in findings])
    ordered = strong + [finding for finding in findings if finding.is_weak]
    if exploited is not None:
        first = DiagnosisFinding(exploited.key, ordered[0].fact, exploited.cause, exploited.fixes)
        ordered = [first, *ordered[1:]]
    return RunDiagnosis(ordered)


# -- bounds of single metrics


def _check_bounds(run: DiagnosedRun) -> Iterator[DiagnosisFinding]:
    """Yield a finding for each metric whose recent values are outside the metric's bounds.

    Of several metrics with the same description in `metric_help`, only the first is reported. At
    most one KL metric is reported.
    """
    seen: set[str] = set()
    for name, (_, values) in run.columns.items():
        metric_help = find(name)
        if metric_help is None or name.startswith(NOT_TRAINING) or name.endswith(("_max", "_min")):
            continue
        least = metric_help.least
        most = metric_help.most
        if (
            (least is None and most is None)
            or metric_help.pattern.partition("_")[0] in seen & {"kl"}
            or metric_help.pattern in seen
        ):
            continue
        value = median(values[-pace.count_last(len(values)) :])
        if (least is None or value >= least) and (most is None or value <= most):
            continue
        if not _may_judge(run, metric_help.pattern, values):
            continue
        seen |= {metric_help.pattern, metric_help.pattern.partition("_")[0]}
        yield _describe_out_of_bounds(run, name, metric_help, value)


def _may_judge(run: DiagnosedRun, pattern: str, values: Sequence[float]) -> bool:
    """Return whether to warn about a metric that is outside its bounds.

    `pattern` is the metric's name pattern in `metric_help`, and `values` are its values. For
    example, KL metrics are judged only in runs that train a policy with rewards, and in runs of
    unknown algorithms.
    """
    kind = run.kind
    if pattern.startswith("kl"):
        return kind in (*POLICIES, "")
    if pattern == "truncated_fraction":
        min_new_tokens = run.find_option(f"{kind}.gen.min_new_tokens", 0)
        max_new_tokens = run.find_option(f"{kind}.gen.max_new_tokens", 1)
        return kind != "gen" and min_new_tokens < max_new_tokens
    if pattern == "clip_ratio":
        return run.find_option(f"{kind}.importance_level") != "sequence"
    if pattern == "sampler_logprob_diff":
        return not run.find_option(f"{kind}.max_staleness", 0)
    if pattern == "frac_reward_zero_std":
        reward = run.find_values(run.find_metric("reward"))
        change = pace.compute_change(reward) if reward else None
        # On a solved task all rewards are equal, which is fine.
        has_learned = change is not None and change.delta > (change.noise or 0.0)
        has_groups = kind in COMPARING_ALGORITHMS and run.find_option(f"{kind}.group_size", 2) > 1
        return has_groups and not has_learned
    if pattern == "response_length":
        return values[0] > MIN_FIRST_LENGTH
    return True


def _describe_out_of_bounds(
    run: DiagnosedRun, name: str, metric_help: MetricHelp, value: float
) -> DiagnosisFinding:
    if metric_help.least is not None and value < metric_help.least:
        usual = f"above {format_number(metric_help.least)}"
    elif metric_help.most:
        usual = f"at most {format_number(metric_help.most)}"
    else:
        usual = "0"
    unit = f" {metric_help.unit}" if metric_help.unit and metric_help.unit != "share" else ""
    if metric_help.pattern == "truncated_fraction":
        fact = f"{value:.0%} of the answers are cut by length"
    else:
        fact = f"{find_title(name)} {format_number(value)}{unit} (usual: {usual})"
    problem = _find_cause(run, name, metric_help.pattern)
    return DiagnosisFinding(metric_help.pattern, fact, problem.text, problem.fixes, problem.is_weak)


@dataclass(frozen=True)
class ProblemCause:
    """Usual cause of a metric that is out of range.

    `text` is a clause that completes `Usually ...`. `fixes` are options to try, with placeholders
    that `_find_cause` fills. `is_weak` is True if healthy runs can have the problem too.
    """

    text: str
    fixes: tuple[str, ...] = ()
    is_weak: bool = False


OTHER_PROMPTS = "easier or harder prompts"
TOO_LARGE = ProblemCause("the updates are too large", ("{rate}", "fewer {kind}.ppo_epochs"))
SAMPLER_DIFFERS = ProblemCause(
    "the sampling policy differs too much from the trained policy",
    ("a lower {kind}.max_staleness",),
)
DIVERGES = ProblemCause("training diverges", ("{rate}", "{role}.optimizer.max_grad_norm=1"))
REWARD_FAILS = ProblemCause(
    "the reward function is slow or fails", ("a higher reward_timeout_s", "a look at weft logs")
)
UNKNOWN_CAUSE = ProblemCause("the run has a problem that weft does not recognize")
# pattern in `metric_help` -> cause; `kl` covers all patterns that begin with it
CAUSES = {
    "kl": ProblemCause(
        "the policy has moved far from its reference and exploits the reward",
        ("{more_kl}", "{rate}"),
    ),
    "truncated_fraction": ProblemCause(
        "answers are longer than allowed, or no longer end",
        ("{longer}", "a look at the completions"),
    ),
    "frac_reward_zero_std": ProblemCause(
        "the prompts are all too easy or too hard, or the reward is always the same",
        (OTHER_PROMPTS,),
    ),
    "entropy": ProblemCause(
        "the policy always writes the same and no longer learns",
        ("{more_kl}", "{rate}"),
        is_weak=True,
    ),
    "response_length": ProblemCause(
        "the policy has learned to end its answers at once", ("another reward", "{more_kl}")
    ),
    "clip_ratio": TOO_LARGE,
    "approx_kl": TOO_LARGE,
    "importance_ratio": TOO_LARGE,
    "explained_variance": ProblemCause(
        "the critic predicts worse than a constant",
        ("{critic_rate}", "{kind}.critic_warmup_epochs=1"),
    ),
    "value_clip_ratio": ProblemCause(
        "the critic changes faster than its clip range allows",
        ("a higher {kind}.value_eps_clip", "{rate}"),
    ),
    "sampler_logprob_diff": ProblemCause(
        "sampling and training compute different log-probs",
        ("{kind}.sampler_correction=token_truncate",),
    ),
    "bounded_fraction": SAMPLER_DIFFERS,
    "effective_fraction": SAMPLER_DIFFERS,
    "reward_clipped_fraction": ProblemCause(
        "all rewards beyond the limit count the same", ("a higher {kind}.max_reward_clip",)
    ),
    "skipped_updates": DIVERGES,
    "nonfinite": DIVERGES,
    "timeouts": REWARD_FAILS,
    "died": REWARD_FAILS,
    "unreadable": ProblemCause(
        "the judge does not answer in the required format", ("another judge prompt",)
    ),
    "kept_fraction": ProblemCause("the filter drops nearly all prompts", (OTHER_PROMPTS,)),
    "tied_fraction": ProblemCause(
        "most pairs have equal rewards and do not contribute to learning",
        ("a finer reward", OTHER_PROMPTS),
    ),
    "balance_loss": ProblemCause(
        "a few experts get most of the tokens", ("a higher {role}.router_aux_loss_coef",)
    ),
    "prompts_in_part": ProblemCause(
        "prompts exceed the maximum length of the model", ("a lower dataset.max_prompt_len",)
    ),
}


def _find_cause(run: DiagnosedRun, name: str, pattern: str) -> ProblemCause:
    """Return the usual cause of a problem, with options to try in this run.

    `name` is the metric that is out of range, and `pattern` is the metric's name pattern in
    `metric_help`.
    """
    cause = CAUSES.get(
        pattern.partition("_")[0] if pattern.startswith("kl") else pattern, UNKNOWN_CAUSE
    )
    kind = run.kind or "grpo"
    weight = {"ppo": "ppo.kl_ctl", "online_dpo": "online_dpo.beta"}.get(kind, f"{kind}.kl_coef")
    values = {
        "kind": kind,
        "role": run.find_role(name),
        "rate": run.format_scaled_rate(name),
        "critic_rate": run.format_scaled_option("critic.optimizer.lr", 3),
        "more_kl": run.format_scaled_option(weight, 10 if weight.endswith("kl_coef") else 3),
        "longer": run.format_scaled_option(f"{kind}.gen.max_new_tokens", 2),
    }
    fixes = tuple(fix.format_map(values) for fix in cause.fixes)
    if pattern == "frac_reward_zero_std" and kind == "grpo":
        fixes += ("grpo.dynamic_sampling=true",)
    return replace(cause, fixes=fixes)


# -- the course of a run


def _check_finite(run: DiagnosedRun) -> Iterator[DiagnosisFinding]:
    """Yield a finding if a loss or gradient norm is not finite in over half of the last steps."""
    last = run.lines[-pace.count_last(len(run.lines)) :]
    names = dict.fromkeys(name for line in last for name in line)
    for name in names:
        if get_last_part(name) not in ("loss", "grad_norm"):
            continue
        if sum(line.get(name, 0.0) is None for line in last) * 2 > len(last):
            yield DiagnosisFinding(
                "nonfinite",
                f"{find_title(name)} is not finite",
                "training diverged",
                (run.format_scaled_rate(name),),
            )
            return


def _check_supervised(run: DiagnosedRun) -> Iterator[DiagnosisFinding]:
    """Yield findings on runs with supervised losses.

    Checks whether the loss rises, whether pair accuracy is no better than chance, and whether the
    validation loss gets worse.
    """
    if run.kind in (*POLICIES, "distill", "gen") or run.find_metric("reward") is not None:
        return
    name = run.find_metric("loss")
    loss = pace.compute_change(run.find_values(name)) if name else None
    if loss is not None and loss.delta > max(loss.noise or 0.0, 0.05 * abs(loss.first)):
        fact = f"loss rose from {format_number(loss.first)} to {format_number(loss.last)}"
        yield DiagnosisFinding(
            "loss",
            fact,
            "the learning rate is too high",
            (run.format_scaled_rate(name), "a longer warm-up"),
        )
    headline = find_headline(run.columns, run.algorithm)
    if (
        headline is not None
        and get_last_part(headline) in ("accuracy", "accuracies")
        and run.kind != "sft"
    ):
        yield from _check_chance(run, headline)
    yield from _check_overfitting(run, loss)


def _check_chance(run: DiagnosedRun, name: str) -> Iterator[DiagnosisFinding]:
    """Yield a finding if the pair accuracy `name` is no better than chance at the end of the run.

    The accuracy on validation rows is used if the run has one.
    """
    values = run.find_values(find_evaluation(name, run.columns)) or run.find_values(name)
    accuracy = pace.compute_end_mean(values)
    if accuracy < CHANCE_ACCURACY and len(run.lines) >= 3 * MIN_STEPS:
        fact = f"{find_title(name)} {format_number(accuracy)} (chance: 0.5)"
        fixes = (run.format_scaled_rate(name, 3), "more epochs", "a look at the pairs")
        yield DiagnosisFinding(
            "accuracy",
            fact,
            "the model has learned too little, or chosen and rejected are swapped",
            fixes,
        )


def _check_overfitting(
    run: DiagnosedRun, training: pace.MetricChange | None
) -> Iterator[DiagnosisFinding]:
    """Yield a finding if the validation loss rises above its minimum while the training loss falls."""
    losses = [name for name in (f"{EVAL}loss", f"{EVAL}nll") if name in run.columns]
    if not losses or training is None or training.delta >= 0:
        return
    name = losses[0]
    steps, values = run.columns[name]
    lowest = min(values)
    if (
        len(values) >= 3
        and values[-1] - lowest > WORSE_LOSS * abs(lowest)
        and values.index(lowest) < len(values) - 1
    ):
        best_step = steps[values.index(lowest)]
        fact = (
            f"{find_title(name)} rose to {format_number(values[-1])} from {format_number(lowest)} at "
            f"step {format_number(best_step)}, while training loss fell"
        )
        yield DiagnosisFinding(
            "memorizes",
            fact,
            "the model memorizes the training rows",
            (f"max_steps={best_step:g}", "more rows or fewer epochs"),
        )


def _check_policy(run: DiagnosedRun) -> Iterator[DiagnosisFinding]:
    """Yield findings if the reward falls, or if the rewards of different answers become equal."""
    reward = run.find_metric("reward")
    spread = run.find_values(run.find_metric("reward_std"))
    change = pace.compute_change(run.find_values(reward)) if reward else None
    if change is not None and change.noise is not None and change.delta < -change.noise:
        first_reward = format_number(change.first)
        last_reward = format_number(change.last)
        rate = run.format_scaled_rate(
            next((name for name in run.columns if name.startswith("actor_train/")), "actor_train/")
        )
        yield DiagnosisFinding(
            "reward",
            f"reward fell from {first_reward} to {last_reward}",
            "the updates are too large",
            (rate,),
        )
    if spread and run.kind in (*COMPARING_ALGORITHMS, "ppo", ""):
        first = pace.compute_mean(spread[: pace.count_first(len(spread))])
        last = pace.compute_end_mean(spread)
        level = abs(pace.compute_end_mean(run.find_values(reward))) if reward else 0.0
        has_collapsed = last < COLLAPSED_SPREAD * first
        if has_collapsed or 0 < last < 0.02 * level:
            cause = "all answers get the same reward, so there is nothing left to learn"
            comparison = f" ({format_number(first)} at first)" if has_collapsed else ""
            yield DiagnosisFinding(
                "reward_std",
                f"reward spread {format_number(last)}{comparison}",
                cause,
                ("a look at the completions",),
                is_weak=True,
            )


def _check_text(run: DiagnosedRun) -> Iterator[DiagnosisFinding]:
    """Yield a finding if at least half of the last step's completions are repetitive.

    There is no finding if at least half of the first step's completions were repetitive too.
    """
    texts_by_step: dict[float, list[str]] = {}
    for row in run.samples:
        text = row.get("completion")
        is_answer = "reward" in row or "finished" in row
        if is_answer and isinstance(text, str) and is_finite(row.get("step")):
            texts_by_step.setdefault(float(row["step"]), []).append(text)
    if not texts_by_step:
        return
    first, last = min(texts_by_step), max(texts_by_step)
    before = _compute_repetitive_share(texts_by_step[first]) if first < last else 0.0
    share = _compute_repetitive_share(texts_by_step[last])
    if share >= 0.5 and before < 0.5:
        yield DiagnosisFinding(
            "text",
            f"{share:.0%} of the last answers repeat themselves",
            "the text has collapsed",
            ("a look at the completions",),
        )


def _compute_repetitive_share(texts: Sequence[str]) -> float:
    return sum(map(_is_repetitive, texts)) / len(texts)


def _is_repetitive(text: str) -> bool:
    """Return whether a text is long enough to be checked, and compresses well."""
    if len(text) < MIN_TEXT_LENGTH:
        return False
    encoded = text.encode(errors="replace")
    return len(encoded) > REPETITIVE_RATIO * len(zlib.compress(encoded, 9))


def _check_exploited(run: DiagnosedRun, keys: Sequence[str]) -> DiagnosisFinding | None:
    """Return a finding if other findings together show that the policy exploits the reward.

    `keys` are the keys of the findings so far. The `fact` of the returned finding is empty; the
    caller fills it in. Returns None if the reward does not seem to be exploited.
    """
    has_high_kl = any(key.startswith("kl") for key in keys)
    collapsed = []
    for key in keys:
        if key in ("truncated_fraction", "reward_std", "text", "entropy", "response_length"):
            collapsed.append(key)
    if len(collapsed) + 2 * has_high_kl < 3:
        return None
    fixes = _find_cause(run, run.find_metric("kl") or "actor_train/kl", "kl").fixes
    if run.find_metric("kl") is None and run.find_option(f"{run.kind}.kl_coef") == 0:
        fixes = (f"{run.kind}.kl_coef=0.01", *fixes[1:])
    cause = "the policy exploits the reward instead of solving the task: read the completions"
    return DiagnosisFinding("exploited", "", cause, fixes)


CHECKS = (_check_finite, _check_bounds, _check_policy, _check_supervised, _check_text)
