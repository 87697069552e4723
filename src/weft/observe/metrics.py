"""Interpretation of metric names in `metrics.jsonl`, such as titles and whether higher is better.

Names have the form `{node}/{metric}`, `time/{call}` (seconds of a call of a graph node) or
`eval/...`. A few names have no node, such as `step`, `epoch` and `step_seconds`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

TIME = "time/"
EVAL = "eval/"
ROWS = "eval/num_rows"  # number of validation rows of all sources
COUNTERS = ("step", "epoch", ROWS)
LAST_STEP = 2**53  # the largest step; floats are exact up to here
LAST_TIME = 2.0**36  # the latest time, in seconds since the epoch: the year 4147
LARGEST = 1e100  # bound of the numbers shown; their squares and sums stay finite

# Last parts of names; the first that a run has is its headline.
HEADLINES = ("reward", "loss", "accuracy")
# Headlines of reward models and DPO in place of the loss: by algorithm, or by a metric that only
# they have.
JUDGED = {"rw": "accuracy", "dpo": "accuracies"}
MARKS_OF_JUDGES = {"kendalltau": "accuracy", "accuracies": "accuracies"}
# Metrics shown at once, in this order; others are shown on a click.
TELLING = (
    "reward",
    "accuracy",
    "accuracies",
    "token_accuracy",
    "loss",
    "value_loss",
    "perplexity",
    "kl",
    "kl_exact",
    "margin",
    "margins",
    "kendalltau",
    "response_length",
    "entropy",
    "reward_std",
    "frac_reward_zero_std",
    "truncated_fraction",
    "clip_ratio",
    "explained_variance",
    "grad_norm",
    "learning_rate",
    "tokens_per_second",
)
RISING = (
    "reward",
    "accuracy",
    "accuracies",
    "margin",
    "margins",
    "kendalltau",
    "tokens_per_second",
    "explained_variance",
)
FALLING = ("loss", "perplexity")
# Titles of metrics whose title is not the name with spaces.
TITLES = {
    "kl": "KL",
    "kl_exact": "KL (exact)",
    "approx_kl": "approx. KL",
    "kl_coef": "KL coefficient",
    "mfu": "MFU",
    "accuracies": "accuracy",
    "margins": "margin",
    "kendalltau": "Kendall's tau",
    "grad_norm": "gradient norm",
    "reward_std": "reward, standard deviation",
    "frac_reward_zero_std": "groups without reward spread",
}

Line = Mapping[str, float | None]


def get_last_part(name: str) -> str:
    """Return the last part of a metric's name, such as `kl` of `actor_train/kl`."""
    return name.rsplit("/", 1)[-1]


def is_finite(value: object) -> bool:
    """Return whether a value is a number that can be shown.

    NaN, infinities, booleans and numbers that are too large do not count.
    """
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and -LARGEST < value < LARGEST
    )


def is_step(value: object) -> bool:
    """Return whether a value is a valid step: a whole number from 0 to `LAST_STEP`."""
    return is_finite(value) and 0 <= value <= LAST_STEP and value == int(value)  # type: ignore[operator,call-overload]


def get_direction(name: str) -> int:
    """Return 1 if higher values of a metric are better, -1 if lower values are, and 0 otherwise."""
    last = get_last_part(name)
    if name.startswith(TIME):
        return 0
    if any(last == word or last.endswith(f"_{word}") for word in RISING):
        return 1
    if any(last == word or last.endswith(f"_{word}") for word in FALLING):
        return -1
    return 0


def find_headline(names: Iterable[str], algorithm: str | None = None) -> str | None:
    """Return the training metric that best shows how well a run is doing, or None.

    A run's reward is preferred to all other metrics. Without a reward, the accuracy is preferred to
    the loss for reward models and DPO, and the loss to the accuracy for other algorithms. Returns
    None if the run has none of these metrics.
    """
    known = [name for name in names if not name.startswith((TIME, EVAL))]
    lasts = [get_last_part(name) for name in known]
    judged = JUDGED.get(algorithm or "")
    if algorithm is None:
        judged = next((MARKS_OF_JUDGES[last] for last in lasts if last in MARKS_OF_JUDGES), None)
    if judged is None:
        wanted: tuple[str, ...] = HEADLINES
    else:
        wanted = (HEADLINES[0], judged, *HEADLINES[1:])
    return next((known[lasts.index(word)] for word in wanted if word in lasts), None)


def find_evaluation(name: str | None, names: Iterable[str]) -> str | None:
    """Return the name of the validation metric that matches the training metric `name`.

    The metric covers all validation sources. If no metric matches, the validation reward, accuracy
    or loss is returned, in this order of preference. Returns None if `names` contains none of
    these.
    """
    known = set(names)
    own = () if name is None else (name.partition("/")[2], get_last_part(name))
    return next(
        (
            f"{EVAL}{word}"
            for word in (*own, "reward", "accuracy", "loss")
            if f"{EVAL}{word}" in known
        ),
        None,
    )


def find_leading(names: Iterable[str], algorithm: str | None = None) -> str | None:
    """Return the metric to show if there is room for only one, or None.

    This is the validation metric if the run has one, else the headline metric. Returns None if the
    run has neither.
    """
    known = list(names)
    name = find_headline(known, algorithm)
    return find_evaluation(name, known) or name


def compute_rank(name: str) -> tuple[int, int]:
    """Return a sort key that puts informative metrics first, and evaluation before training."""
    last = get_last_part(name)
    if last in TELLING and not name.startswith(TIME):
        place = TELLING.index(last)
    else:
        place = len(TELLING)
    return place, 0 if name.startswith(EVAL) else 1


def find_title(name: str) -> str:
    """Return the title of a metric for display.

    For example, the title of `rew_inf/reward` is `reward`, that of `actor_train/clip_ratio` is
    `clip ratio`, and that of `eval/reward` is `eval reward`.
    """
    last = get_last_part(name)
    title = TITLES.get(last) or last.replace("_", " ")
    return f"eval {title}" if name.startswith(EVAL) else title


def compute_tokens_per_second(line: Line) -> float | None:
    """Return the training speed of one step in tokens per second, or None if it is unknown.

    This is the largest number of tokens counted by a node, divided by the duration of the whole
    step. If one of these numbers is missing, returns the highest speed that a node reports.
    """
    seconds = line.get("step_seconds")
    counts = []
    for name, value in line.items():
        if get_last_part(name) == "num_tokens" and value is not None:
            counts.append(value)
    if counts and seconds:
        return max(counts) / seconds
    rates = []
    for name, value in line.items():
        if get_last_part(name) == "tokens_per_second" and value is not None:
            rates.append(value)
    return max(rates) if rates else None


def read_call_seconds(line: Line) -> dict[str, float]:
    """Return the duration in seconds of each call in one step, keyed by the name of the call.

    A call is one execution of a graph node. `line` has the metrics of the step. The calls are in
    the order in which `line` lists them.
    """
    call_seconds: dict[str, float] = {}
    for name, value in line.items():
        if name.startswith(TIME) and value is not None:
            call_seconds[name.removeprefix(TIME)] = value
    return call_seconds


def format_number(value: float | None) -> str:
    """Format a number with four significant digits, such as `0.0213`, `1,234` or `3.1e-5`."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    size = abs(value)
    if 10000 <= size < 1e15:
        return f"{value:,.0f}"
    if size < 1e-4 or size >= 1e15:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    text = f"{value:,.{max(0, 3 - math.floor(math.log10(size)))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_duration(seconds: float) -> str:
    """Format a duration, such as `12.3 s`, `4:05`, `1:02:03` or `2 d 3 h`."""
    if seconds < 60 or seconds >= 1e12:
        return f"{seconds:.1f} s" if seconds < 1e12 else f"{format_number(seconds)} s"
    whole = round(seconds)
    minutes = whole // 60
    hours = whole // 3600
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    if hours:
        return f"{hours}:{minutes % 60:02}:{whole % 60:02}"
    return f"{minutes}:{whole % 60:02}"
