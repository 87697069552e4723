"""Verdict on the best of several runs, and the values that decide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from weft.observe import configuration, pace
from weft.observe.diagnosis import POLICIES
from weft.observe.differences import (
    ALGORITHM,
    REWARD_OPTIONS,
    find_differences,
    find_incomparable_options,
)
from weft.observe.metrics import (
    EVAL,
    ROWS,
    find_evaluation,
    find_headline,
    find_title,
    format_number,
    get_direction,
    get_last_part,
)
from weft.observe.page import HUES, ColourPair
from weft.observe.run_files import RunFiles

REWARD = "reward"
CLOSE_DIFFERENCE = 0.01  # relative difference up to which two values count as equal
RUNNING = "running"  # status of a run in progress


@dataclass(frozen=True)
class NamedRun:
    """Run with its name and colour on the page."""

    run: RunFiles
    label: str
    hue: ColourPair

    @property
    def label_with_status(self) -> str:
        """Name of the run, followed by `(running)` if the run is still in progress."""
        if self.run.status == RUNNING:
            return f"{self.label} ({RUNNING})"
        return self.label


def name_runs(runs: Sequence[RunFiles]) -> list[NamedRun]:
    """Return the runs, each with a name and a colour for the page.

    The name is `TRIAL` if it differs between all runs, else `EXPERIMENT/TRIAL`, else the last two
    folders of the path, else the whole path.
    """
    titles = [run.title for run in runs]
    candidates = (
        [trial for _, trial in titles],
        [f"{experiment}/{trial}" for experiment, trial in titles],
        ["/".join(run.directory.absolute().parts[-2:]) for run in runs],
        [str(run.directory) for run in runs],
    )
    labels = next((names for names in candidates if len(set(names)) == len(runs)), candidates[-1])
    return [NamedRun(run, label, hue) for run, label, hue in zip(runs, labels, HUES, strict=False)]


def find_common_step(runs: Sequence[RunFiles]) -> float | None:
    """Return the last step that all runs have completed; None if any run has no completed step."""
    if not all(run.lines for run in runs):
        return None
    return min(float(run.lines[-1]["step"]) for run in runs)


def read_values_until(run: RunFiles, name: str, step: float | None) -> list[float]:
    """Return the values of a metric up to `step`; all of them if `step` is None."""
    steps, values = run.get_series(name)
    if step is None or not steps or max(steps) <= step:
        return list(values)
    values_until: list[float] = []
    for value_step, value in zip(steps, values, strict=True):
        if value_step <= step:
            values_until.append(value)
    return values_until


def compute_final_value(run: RunFiles, name: str, step: float | None = None) -> float | None:
    """Return a metric's value at `step`, or at the run's end; None if the run has no value.

    For an evaluation metric, this is the last value up to `step`. For a training metric, it is the
    mean over the last steps up to `step`.
    """
    values = read_values_until(run, name, step)
    if not values:
        return None
    return values[-1] if name.startswith(EVAL) else pace.compute_end_mean(values)


def is_close(value: float, other: float) -> bool:
    """Return whether the relative difference of two values is at most `CLOSE_DIFFERENCE`."""
    return abs(value - other) <= CLOSE_DIFFERENCE * max(abs(value), abs(other))


def find_deciding_metric(named_runs: Sequence[NamedRun]) -> list[str] | None:
    """Return the names, one per run, of the metric that decides which run is better.

    The names can begin with different graph nodes. Returns None if no metric can be compared.
    """
    names = _find_headline_metric(named_runs)
    runs = [named_run.run for named_run in named_runs]
    if names is None or is_policy_loss(runs, names) or find_incomparable_options(runs, names):
        return None
    return names


def _find_headline_metric(named_runs: Sequence[NamedRun]) -> list[str] | None:
    """Return the headline metric's name in each run, or None if the runs do not share one.

    Metrics of different graph nodes count as the same metric if the rest of their names is equal. A
    validation metric is chosen if all runs have it and its values are comparable.
    """
    runs = [named_run.run for named_run in named_runs]
    training_names = [find_headline(run.metric_names, run.record.get("algorithm")) for run in runs]
    validation_names = [
        find_evaluation(name, run.metric_names)
        for name, run in zip(training_names, runs, strict=True)
    ]
    for candidates in (validation_names, training_names):
        names = [name for name in candidates if name is not None]
        if (
            len(names) == len(runs)
            and len({get_last_part(name) for name in names}) == 1
            and not find_incomparable_options(runs, names)
        ):
            return names
    names = [name for name in training_names if name is not None]
    if len(names) == len(runs) and len({get_last_part(name) for name in names}) == 1:
        return names
    return None


def is_policy_loss(runs: Sequence[RunFiles], names: Sequence[str]) -> bool:
    """Return whether a metric is a policy's loss, which does not measure the model's quality.

    `names` are the metric's names, which can differ between runs.
    """
    trains_policy = any(configuration.find_algorithm(run) in POLICIES for run in runs)
    return trains_policy and any(get_last_part(name).endswith("loss") for name in names)


def write_verdict(named_runs: Sequence[NamedRun]) -> str:
    """Return one or two sentences on which run is better, or on the reason why this is unknown."""
    # Without a common headline metric that can be compared, the better run is unknown.
    runs = [named_run.run for named_run in named_runs]
    names = _find_headline_metric(named_runs)
    if names is None:
        headlines = []
        for named_run in named_runs:
            run = named_run.run
            headline = find_headline(run.metric_names, run.record.get("algorithm"))
            if headline:
                headlines.append(f"{escape(named_run.label)} has {escape(find_title(headline))}")
        text = "These runs have no common metric that decides which of them is better."
        if headlines:
            text += f" Each has a different headline metric: {', '.join(headlines)}."
        return text
    if find_deciding_metric(named_runs) is None:
        return f"{_explain_refusal(runs, names)} {_describe_differences(named_runs)}"
    # Values at the last step that all runs have completed.
    step = find_common_step(runs)
    name = names[0]
    final_values = []
    for metric, named_run in zip(names, named_runs, strict=True):
        final_values.append((compute_final_value(named_run.run, metric, step), named_run))
    values_of_runs = [(value, named_run) for value, named_run in final_values if value is not None]
    if len(values_of_runs) < len(named_runs):
        return f"Not every run has measured its {escape(find_title(name))} by step {format_number(step)}."
    # Sort by value and compare the difference with the noise.
    direction = get_direction(name) or 1
    (best_value, winner), *others = sorted(values_of_runs, key=lambda pair: -direction * pair[0])
    title = escape(find_title(name))
    step_text = format_step(named_runs, step)
    noise_width = _compute_difference_noise(runs, names, step)
    if all(
        is_close(best_value, value) or abs(best_value - value) <= noise_width for value, _ in others
    ):
        values = ", ".join(
            f"{format_number(value)} ({escape(named_run.label_with_status)})"
            for value, named_run in values_of_runs
        )
        noise = f" within noise (± {pace.format_noise(noise_width)})" if noise_width else ""
        return (
            f"{step_text} the runs are" if step_text else "The runs ended"
        ) + f" alike{noise} in their {title}: {values}."
    rest = ", ".join(
        f"{format_number(value)} ({escape(named_run.label_with_status)})"
        for value, named_run in others
    )
    comparative = "higher" if direction > 0 else "lower"
    better = f"<b>{escape(winner.label_with_status)}</b>"
    verb = f"{step_text} {better} has" if step_text else f"{better} ended with"
    noise = f", with a noise of ± {pace.format_noise(noise_width)}" if noise_width else ""
    result = f"{verb} the {comparative} {title}: <b>{format_number(best_value)}</b> against {rest}{noise}."
    return f"{result}{_write_doubts(winner)} {_describe_differences(named_runs)}"


def _write_doubts(winner: NamedRun) -> str:
    """Return a warning if the better run has a metric that is out of range; "" otherwise."""
    diagnosis = winner.run.diagnosis
    if diagnosis is None or diagnosis.is_sound:
        return ""
    return f" But check {escape(winner.label)}: some of its metrics are out of range."


def format_step(named_runs: Sequence[NamedRun], step: float | None) -> str:
    """Return a phrase with the step at which the runs are compared.

    Returns "" if all runs have ended at the same step.
    """
    last_steps = set()
    for named_run in named_runs:
        if named_run.run.lines:
            last_steps.add(named_run.run.lines[-1]["step"])
    is_running = any(named_run.run.status == RUNNING for named_run in named_runs)
    if len(last_steps) > 1 or is_running:
        return f"At step {format_number(step)}, the last that all runs have completed,"
    return ""


def _compute_difference_noise(
    runs: Sequence[RunFiles], names: Sequence[str], step: float | None
) -> float:
    """Return the noise of the difference in a metric between two runs.

    If there are more than two runs, the two with the noisiest values are taken, so that the result
    is an upper bound for any two runs. `names` has the metric's name in each run. The noise is the
    half-width of a 95% confidence interval. It is 0 if it is unknown, and for a training metric
    also if it is negligible.
    """
    if names[0].startswith(EVAL):
        sampling_noises = []
        for run, name in zip(runs, names, strict=True):
            sampling_noises.append(_compute_sampling_noise(run, name, step))
        return pace.compute_difference_noise(sampling_noises) or 0.0
    end_noises = []
    for run, name in zip(runs, names, strict=True):
        end_noises.append(pace.compute_end_noise(read_values_until(run, name, step)) or 0.0)
    noise = pace.compute_difference_noise(end_noises) or 0.0
    largest = max(
        abs(compute_final_value(run, name, step) or 0.0)
        for run, name in zip(runs, names, strict=True)
    )
    return noise if noise > pace.ROUNDING * largest else 0.0


def _compute_sampling_noise(run: RunFiles, name: str, step: float | None) -> float | None:
    """Return the noise of an evaluation metric that is due to the limited number of evaluated rows.

    The noise is the half-width of a 95% confidence interval, or None if it is unknown.
    """
    value = compute_final_value(run, name, step)
    rows = read_values_until(run, ROWS, step)
    if value is None or not rows:
        return None
    return pace.compute_sampling_noise(name, value, rows[-1])


def _explain_refusal(runs: Sequence[RunFiles], names: Sequence[str]) -> str:
    """Return a sentence on the reason why the headline metrics of the runs cannot be compared."""
    last_part = get_last_part(names[0])
    different = find_incomparable_options(runs, names)
    if last_part == REWARD and any(option in REWARD_OPTIONS for option in different):
        return "The rewards come from different sources and cannot be compared."
    title = escape(find_title(names[0]))
    if ALGORITHM in different or not different:
        algorithms = ", ".join(
            escape(configuration.find_algorithm(run) or "unknown") for run in runs
        )
        return f"The {title} has a different meaning in each of these runs ({algorithms}), so it does not show which is better."
    if any(option.startswith("dataset.") for option in different):
        return f"The {title} was measured on different rows and cannot be compared."
    return f"The {title} is computed in different ways ({', '.join(map(escape, different))}) and cannot be compared."


def _describe_differences(named_runs: Sequence[NamedRun]) -> str:
    """Return a sentence on the options that differ between the runs.

    The options are listed if there are at most three, and only counted otherwise.
    """
    different = find_differences([named_run.run for named_run in named_runs])
    if not different:
        return "Their options are the same."
    if len(different) > 3:
        return f"They differ in {len(different)} options."
    descriptions = (
        f"{escape(name)} ({', '.join(escape(configuration.format_briefly(value)) for value in values)})"
        for name, values in different.items()
    )
    return f"They differ in {', '.join(descriptions)}."
