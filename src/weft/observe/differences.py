"""Differences between runs: options, algorithms, reward sources and software versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.observe import configuration
from weft.observe.diagnosis import POLICIES
from weft.observe.metric_help import CRITIC, PREFERENCES, REWARD, find
from weft.observe.metrics import EVAL, get_last_part
from weft.observe.run_files import RunFiles

ALGORITHM = "algorithm"
# Options that define the reward; the first four name a source of rewards.
REWARD_OPTIONS = ("reward", "reward_column", "rew.path", "rew.url", "rew_step", "rew_weight")
# Options of `dataset` that select the rows.
TRAINING_ROWS = ("path", "train_path", "named", "sources")
VALIDATION_ROWS = ("valid_path", "valid_split")
SCALE_FREE_METRICS = ("accuracies", "kendalltau")  # preference metrics that do not depend on beta
START_FACTS = ("commit", "host", "hardware")  # recorded at each start, next to the versions


def find_differences(runs: Sequence[RunFiles]) -> dict[str, list[Any]]:
    """Return the options that differ between the runs, each with a list of its values, one per run.

    If the algorithms differ, the algorithm comes first. Options of different algorithms are matched
    if their names differ only in the algorithm's prefix. Matched options get a common name, such as
    `grpo|ppo.gen.max_new_tokens`.

    An option is left out if weft chose its value in all runs. An option that some runs do not have,
    or that is matched across algorithms, is included only if the user set it in at least one run.
    """
    # The algorithm itself.
    algorithms = [configuration.find_algorithm(run) for run in runs]
    if len(set(algorithms)) > 1 and all(algorithms):
        differences: dict[str, list[Any]] = {ALGORITHM: list(algorithms)}
    else:
        differences = {}
    # Match options under names without the algorithm's group.
    flat = [dict(configuration.flatten_options(run.config)) for run in runs]
    matched = [{_match_option(name, algorithms): name for name in values} for values in flat]
    changed_options = [configuration.find_changed_options(run) for run in runs]
    for name in dict.fromkeys(name for names in matched for name in names):
        full_names = [names.get(name) for names in matched]
        values = []
        for options, key in zip(flat, full_names, strict=True):
            values.append(options.get(key) if key is not None else None)
        if name in configuration.IDENTITY_OPTIONS or all(value == values[0] for value in values):
            continue
        # Skip options that no user set.
        left_open = []
        for value, key, run in zip(values, full_names, runs, strict=True):
            left_open.append(
                configuration.is_left_open(value) or key in configuration.find_chosen_options(run)
            )
        is_changed = any(
            key is not None
            and (
                options is None
                or (key in options and key not in configuration.find_chosen_options(run))
            )
            for options, key, run in zip(changed_options, full_names, runs, strict=True)
        )
        is_in_all = (
            all(key in values for key, values in zip(full_names, flat, strict=True))
            and len(set(full_names)) == 1
        )
        if not all(left_open) and (is_changed or is_in_all):
            differences[_format_option_name(name, full_names)] = values
    return differences


def _match_option(name: str, algorithms: Sequence[str | None]) -> str:
    """Return an option's name with an algorithm's prefix replaced by `algorithm.`.

    For example, `ppo.gamma` becomes `algorithm.gamma` if `algorithms` contains `ppo`. Options of
    runs with different algorithms can then be matched.
    """
    group, dot, rest = name.partition(".")
    return f"{ALGORITHM}.{rest}" if dot and group in algorithms else name


def _format_option_name(name: str, full_names: Sequence[str | None]) -> str:
    """Return the name under which an option is listed, such as `grpo|ppo.lr`.

    The prefixes of all algorithms that have the option are joined. `full_names` has the full
    name of the option in each run, or None if the run does not have the option.
    """
    groups = dict.fromkeys(
        full_name.partition(".")[0] for full_name in full_names if full_name is not None
    )
    if not name.startswith(f"{ALGORITHM}."):
        return name
    return f"{'|'.join(sorted(groups))}.{name.partition('.')[2]}"


def find_defining_options(run: RunFiles, name: str) -> dict[str, str]:
    """Return the options that determine the meaning of the metric `name`, with their values.

    The metric can be compared between two runs if these options are equal. A loss depends on the
    algorithm and the algorithm's options, and a reward on the source of rewards. Both also depend
    on the rows of the dataset. Metrics such as times, memory and lengths depend on none of these
    options.
    """
    metric_help = find(name)
    last = get_last_part(name)
    group = metric_help.group if metric_help is not None else ""
    options = dict(configuration.flatten_options(run.config))
    algorithm = configuration.find_algorithm(run) or ""
    option_names: list[str] = []
    is_loss = last.endswith("loss")
    if group in (REWARD, CRITIC):
        has_source = any(
            not configuration.is_unset(options.get(option)) for option in REWARD_OPTIONS[:4]
        )
        option_names += REWARD_OPTIONS if has_source else ()
    elif (
        not is_loss
        and group != PREFERENCES
        and last not in ("accuracy", "token_accuracy", "nll", "perplexity")
    ):
        return {ALGORITHM: algorithm} if last == "grad_norm" else {}
    if (
        (is_loss or group == PREFERENCES)
        and last not in SCALE_FREE_METRICS
        and algorithm not in POLICIES
    ):
        for option in options:
            if option.startswith(f"{algorithm}.") and ".gen." not in option:
                option_names.append(option)
    if name.startswith(EVAL):
        validation_names = [f"dataset.{option}" for option in VALIDATION_ROWS]
    else:
        validation_names = []
    has_validation_path = validation_names and not configuration.is_unset(
        options.get(validation_names[0])
    )
    option_names += (
        validation_names[:1]
        if has_validation_path
        else [*validation_names, *(f"dataset.{option}" for option in TRAINING_ROWS)]
    )
    kind = {ALGORITHM: algorithm} if group not in (REWARD, CRITIC) else {}
    return kind | {
        option: configuration.format_value(options.get(option)) for option in option_names
    }


def find_incomparable_options(runs: Sequence[RunFiles], names: Sequence[str]) -> list[str]:
    """Return the options whose differences make a metric incomparable between the runs.

    `names` has the name of the metric in each run. Runs with unknown configuration are ignored.
    """
    defining_options = []
    for run, name in zip(runs, names, strict=True):
        if run.config:
            defining_options.append(find_defining_options(run, name))
    options = dict.fromkeys(option for values in defining_options for option in values)
    incomparable_options: list[str] = []
    for option in options:
        if len({values[option] for values in defining_options if option in values}) > 1:
            incomparable_options.append(option)
    return incomparable_options


def find_version_differences(runs: Sequence[RunFiles]) -> list[tuple[str, list[str]]]:
    """Return the software versions, commits, hosts and hardware that differ between the runs.

    Each item is a pair of a name and a list of values, one per run, taken from each run's last
    start.
    """
    starts = [run.record.get("starts") for run in runs]
    last_starts = []
    for run_starts in starts:
        last_starts.append(
            dict(run_starts[-1])
            if isinstance(run_starts, list) and run_starts and isinstance(run_starts[-1], Mapping)
            else {}
        )
    versions = []
    for start in last_starts:
        facts = {key: start.get(key) for key in START_FACTS}
        versions.append({**(start.get("versions") or {}), **facts})
    differences = []
    for name in dict.fromkeys(name for facts in versions for name in facts):
        values = [str(facts.get(name) or "") for facts in versions]
        if len(set(values)) > 1:
            differences.append((name, values))
    return differences
