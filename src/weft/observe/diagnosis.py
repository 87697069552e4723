"""Diagnosis of a run from its metrics: what is out of range, the usual cause, options to try.

The bounds of each metric are defined with its description in `weft.observe.metric_help`. This
module also checks how values change over several steps: a rising loss, a falling reward, a worse
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

LEAST_STEPS = 8  # a run with fewer steps is not diagnosed
FACTS = 4  # maximum findings in the text of a diagnosis
FIXES = 2  # maximum options to try in the text of a diagnosis
# Shipped algorithms; each has a group of options of the same name.
ALGORITHMS = ("online_dpo", "distill", "ppo", "grpo", "dpo", "rw", "sft", "gen")
POLICIES = ("ppo", "grpo", "online_dpo")
GROUPED = ("grpo", "online_dpo")  # compare only completions of the same prompt
WORSE = 0.02  # relative rise of a validation loss above its best that is reported
# Pair accuracy below which nothing was learned; chance is 0.5, the margin allows for noise.
CHANCE = 0.53
SPREAD = 0.1  # fraction of the first reward spread below which rewards have collapsed
REPEATS = 4.0  # deflate compresses only repetitive text by more than this factor
TEXT = 80  # characters; shorter completions are not checked for repetition
LONG_LENGTH = 3.0  # first response length, in tokens, above which short answers are a collapse
ENDS = (1000, 3000)  # numbers of first and last lines that are used of a long run
# Last parts of the names of the metrics used: those with bounds, and those needed by the checks.
JUDGED = frozenset(one.pattern for one in HELP if (one.least, one.most) != (None, None)) | {
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
        means: usual cause of the problem
        fixes: options to try
        weak: True if the problem also occurs in healthy runs, so that it is only reported
            together with a finding that is not weak
    """

    key: str
    fact: str
    means: str
    fixes: Sequence[str] = ()
    weak: bool = False


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
        facts = "; ".join(each.fact for each in self.findings[:FACTS])
        fixes = list(dict.fromkeys(fix for each in self.findings for fix in each.fixes))[:FIXES]
        tried = f" Try {', or '.join(fixes)}." if fixes else ""
        return f"{facts}. Usually {self.findings[0].means}.{tried}"


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
        # Nearly all lines have the same metrics, maybe a thousand: select the names once per set.
        wanted: dict[tuple[str, ...], list[str]] = {}
        for line in self.lines:
            names = tuple(line)
            if names not in wanted:
                wanted[names] = [
                    name
                    for name in names
                    if get_last_part(name) in JUDGED or get_last_part(name).startswith("kl_k")
                ]
            for name in wanted[names]:
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
                n
                for n in self.columns
                if get_last_part(n) == last and not n.startswith(NOT_TRAINING)
            ),
            None,
        )

    def find_option(self, name: str, default: Any = None) -> Any:
        """Return the value of the option with this dotted name, or `default` if it is missing or
        None.
        """
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
        own = "actor" if self.kind in (*POLICIES, "dpo", "distill") else "model"
        return node.removesuffix("_train") if node.endswith("_train") else own


def diagnose_run(
    lines: Lines, algorithm: str | None = None, config: Config = dict, samples: Lines = ()
) -> RunDiagnosis | None:
    """Diagnose a run. Returns None if the run has too few steps.

    `lines` are the rows of metrics.jsonl, oldest first; for a long run, the first and the last rows
    suffice. `samples` are rows of samples.jsonl. `config` is a function that returns the run's
    options.
    """
    if len(lines) > sum(ENDS):
        lines = [*lines[: ENDS[0]], *lines[-ENDS[1] :]]
    run = DiagnosedRun(
        [line for line in lines if is_finite(line.get("step"))], algorithm, config, samples
    )
    if len(run.lines) < LEAST_STEPS:
        return None
    findings = []
    for check in CHECKS:
        for finding in check(run):
            findings.append(finding)
    # Findings on the KL come first. Weak findings alone do not count.
    strong = sorted(
        (each for each in findings if not each.weak), key=lambda each: not each.key.startswith("kl")
    )
    if not strong:
        return RunDiagnosis()
    # Several signs together mean an exploited reward, which replaces the first finding.
    hacked = _check_exploited(run, [finding.key for finding in findings])
    ordered = strong + [finding for finding in findings if finding.weak]
    if hacked is not None:
        first = DiagnosisFinding(hacked.key, ordered[0].fact, hacked.means, hacked.fixes)
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
        about = find(name)
        if about is None or name.startswith(NOT_TRAINING) or name.endswith(("_max", "_min")):
            continue
        least = about.least
        most = about.most
        if (
            (least is None and most is None)
            or about.pattern.partition("_")[0] in seen & {"kl"}
            or about.pattern in seen
        ):
            continue
        value = median(values[-pace.count_last(len(values)) :])
        if (least is None or value >= least) and (most is None or value <= most):
            continue
        if not _may_judge(run, about.pattern, values):
            continue
        seen |= {about.pattern, about.pattern.partition("_")[0]}
        yield _describe_out_of_bounds(run, name, about, value)


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
        gen = f"{kind}.gen"
        fixed = run.find_option(f"{gen}.min_new_tokens", 0) >= run.find_option(
            f"{gen}.max_new_tokens", 1
        )
        return kind != "gen" and not fixed
    if pattern == "clip_ratio":
        return run.find_option(f"{kind}.importance_level") != "sequence"
    if pattern == "sampler_logprob_diff":
        return not run.find_option(f"{kind}.max_staleness", 0)
    if pattern == "frac_reward_zero_std":
        reward = run.find_values(run.find_metric("reward"))
        moved = pace.compute_change(reward) if reward else None
        # On a solved task all rewards are equal, which is fine.
        learned = moved is not None and moved.delta > (moved.noise or 0.0)
        return kind in GROUPED and run.find_option(f"{kind}.group_size", 2) > 1 and not learned
    if pattern == "response_length":
        return values[0] > LONG_LENGTH
    return True


def _describe_out_of_bounds(
    run: DiagnosedRun, name: str, about: MetricHelp, value: float
) -> DiagnosisFinding:
    if about.least is not None and value < about.least:
        bound = f"above {format_number(about.least)}"
    else:
        bound = None
    usual = bound or (f"at most {format_number(about.most)}" if about.most else "0")
    unit = f" {about.unit}" if about.unit and about.unit != "share" else ""
    if about.pattern == "truncated_fraction":
        fact = f"{value:.0%} of the answers are cut by length"
    else:
        fact = f"{find_title(name)} {format_number(value)}{unit} (usual: {usual})"
    cause = _find_cause(run, name, about.pattern)
    return DiagnosisFinding(about.pattern, fact, cause.means, cause.fixes, cause.weak)


@dataclass(frozen=True)
class ProblemCause:
    """Usual cause of a metric that is out of range.

    `fixes` are options to try, with placeholders that `_find_cause` fills. `weak` is True if healthy
    runs also have the problem.
    """

    means: str
    fixes: tuple[str, ...] = ()
    weak: bool = False


HARDER = "easier or harder prompts"
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
# pattern in `metric_help` -> cause; `kl` stands for all patterns that begin with it
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
        "the prompts are all too easy or too hard, or the reward is always the same", (HARDER,)
    ),
    "entropy": ProblemCause(
        "the policy always writes the same and no longer learns", ("{more_kl}", "{rate}"), weak=True
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
    "kept_fraction": ProblemCause("the filter drops nearly all prompts", (HARDER,)),
    "tied_fraction": ProblemCause(
        "most pairs have equal rewards and do not contribute to learning",
        ("a finer reward", HARDER),
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
    last = run.lines[-pace.count_last(len(run.lines)) :]
    for name in dict.fromkeys(
        name for line in last for name in line if get_last_part(name) in ("loss", "grad_norm")
    ):
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
    leads = find_headline(run.columns, run.algorithm)
    if (
        leads is not None
        and get_last_part(leads) in ("accuracy", "accuracies")
        and run.kind != "sft"
    ):
        yield from _check_chance(run, leads)
    yield from _check_overfitting(run, loss)


def _check_chance(run: DiagnosedRun, name: str) -> Iterator[DiagnosisFinding]:
    values = run.find_values(find_evaluation(name, run.columns)) or run.find_values(name)
    reached = pace.compute_end_mean(values)
    if reached < CHANCE and len(run.lines) >= 3 * LEAST_STEPS:
        fact = f"{find_title(name)} {format_number(reached)} (chance: 0.5)"
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
    name = next((n for n in (f"{EVAL}loss", f"{EVAL}nll") if n in run.columns), None)
    if name is None or training is None or training.delta >= 0:
        return
    steps, values = run.columns[name]
    low = min(values)
    if (
        len(values) >= 3
        and values[-1] - low > WORSE * abs(low)
        and values.index(low) < len(values) - 1
    ):
        at = steps[values.index(low)]
        fact = (
            f"{find_title(name)} rose to {format_number(values[-1])} from {format_number(low)} at "
            f"step {format_number(at)}, while training loss fell"
        )
        yield DiagnosisFinding(
            "memorizes",
            fact,
            "the model memorizes the training rows",
            (f"max_steps={at:g}", "more rows or fewer epochs"),
        )


def _check_policy(run: DiagnosedRun) -> Iterator[DiagnosisFinding]:
    """Yield findings if the reward falls, or if the rewards of different answers become equal."""
    reward = run.find_metric("reward")
    spread = run.find_values(run.find_metric("reward_std"))
    moved = pace.compute_change(run.find_values(reward)) if reward else None
    if moved is not None and moved.noise is not None and moved.delta < -moved.noise:
        at = format_number(moved.first)
        to = format_number(moved.last)
        rate = run.format_scaled_rate(
            next((n for n in run.columns if n.startswith("actor_train/")), "actor_train/")
        )
        yield DiagnosisFinding(
            "reward", f"reward fell from {at} to {to}", "the updates are too large", (rate,)
        )
    if spread and run.kind in (*GROUPED, "ppo", ""):
        first = pace.compute_mean(spread[: pace.count_first(len(spread))])
        last = pace.compute_end_mean(spread)
        level = abs(pace.compute_end_mean(run.find_values(reward))) if reward else 0.0
        if last < SPREAD * first or 0 < last < 0.02 * level:
            means = "all answers get the same reward, so there is nothing left to learn"
            before = f" ({format_number(first)} at first)" if last < SPREAD * first else ""
            yield DiagnosisFinding(
                "reward_std",
                f"reward spread {format_number(last)}{before}",
                means,
                ("a look at the completions",),
                weak=True,
            )


def _check_text(run: DiagnosedRun) -> Iterator[DiagnosisFinding]:
    """Yield a finding if at least half of the last step's completions are repetitive.

    There is no finding if at least half of the first step's completions were repetitive too.
    """
    answers = (row for row in run.samples if "reward" in row or "finished" in row)
    written = []
    for row in answers:
        if isinstance(row.get("completion"), str):
            written.append(row)
    steps = []
    for row in written:
        if is_finite(row.get("step")):
            steps.append(float(row["step"]))
    if not steps:
        return
    last = []
    for row in written:
        if row.get("step") == max(steps):
            last.append(str(row["completion"]))
    if min(steps) < max(steps):
        first = []
        for row in written:
            if row.get("step") == min(steps):
                first.append(str(row["completion"]))
    else:
        first = []
    shares = []
    for texts in (first, last):
        shares.append(sum(map(_is_repetitive, texts)) / len(texts) if texts else 0.0)
    if shares[1] >= 0.5 and shares[0] < 0.5:
        means = "the text has collapsed"
        yield DiagnosisFinding(
            "text",
            f"{shares[1]:.0%} of the last answers repeat themselves",
            means,
            ("a look at the completions",),
        )


def _is_repetitive(text: str) -> bool:
    raw = text.encode(errors="replace")
    return len(text) >= TEXT and len(raw) > REPEATS * len(zlib.compress(raw, 9))


def _check_exploited(run: DiagnosedRun, keys: Sequence[str]) -> DiagnosisFinding | None:
    """Return a finding if other findings together show that the policy exploits the reward.

    `keys` are the keys of the findings so far. The `fact` of the returned finding is empty; the
    caller fills it in. Returns None if the reward does not seem to be exploited.
    """
    far = any(key.startswith("kl") for key in keys)
    collapsed = []
    for key in keys:
        if key in ("truncated_fraction", "reward_std", "text", "entropy", "response_length"):
            collapsed.append(key)
    if len(collapsed) + 2 * far < 3:
        return None
    fixes = _find_cause(run, run.find_metric("kl") or "actor_train/kl", "kl").fixes
    if run.find_metric("kl") is None and run.find_option(f"{run.kind}.kl_coef") == 0:
        fixes = (f"{run.kind}.kl_coef=0.01", *fixes[1:])
    means = "the policy exploits the reward instead of solving the task: read the completions"
    return DiagnosisFinding("exploited", "", means, fixes)


CHECKS = (_check_finite, _check_bounds, _check_policy, _check_supervised, _check_text)
