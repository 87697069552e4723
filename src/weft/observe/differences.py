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
SOURCES = (
    "reward",
    "reward_column",
    "rew.path",
    "rew.url",
    "rew_step",
    "rew_weight",
)  # options that define the reward
# Options of `dataset` that select the rows.
TRAINING_ROWS = ("path", "train_path", "named", "sources")
VALIDATION_ROWS = ("valid_path", "valid_split")
FREE_OF_SCALE = ("accuracies", "kendalltau")  # preference metrics that do not depend on beta
FACTS = ("commit", "host", "hardware")


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
    own = [{_match_option(name, algorithms): name for name in values} for values in flat]
    changed_options = [configuration.find_changed_options(run) for run in runs]
    for name in dict.fromkeys(name for names in own for name in names):
        real = [names.get(name) for names in own]
        values = []
        for each, key in zip(flat, real, strict=True):
            values.append(each.get(key) if key is not None else None)
        if name in configuration.NAMES or all(value == values[0] for value in values):
            continue
        # Skip options that no user set.
        left_open = []
        for value, key, run in zip(values, real, runs, strict=True):
            left_open.append(
                configuration.is_left_open(value) or key in configuration.find_chosen_options(run)
            )
        changed = any(
            key is not None
            and (
                each is None or (key in each and key not in configuration.find_chosen_options(run))
            )
            for each, key, run in zip(changed_options, real, runs, strict=True)
        )
        alike = (
            all(key in values for key, values in zip(real, flat, strict=True))
            and len(set(real)) == 1
        )
        if not all(left_open) and (changed or alike):
            differences[_format_option_name(name, real)] = values
    return differences


def _match_option(name: str, algorithms: Sequence[str | None]) -> str:
    """Return an option's name with an algorithm's prefix replaced by `algorithm.`.

    For example, `ppo.gamma` becomes `algorithm.gamma` if `algorithms` contains `ppo`. Options of
    runs with different algorithms can then be matched.
    """
    group, dot, rest = name.partition(".")
    return f"{ALGORITHM}.{rest}" if dot and group in algorithms else name


def _format_option_name(name: str, real: Sequence[str | None]) -> str:
    """Return the name under which an option is listed, such as `grpo|ppo.lr`.

    The prefixes of all algorithms that have the option are joined. `real` has the full name of the
    option in each run, or None if the run does not have the option.
    """
    groups = dict.fromkeys(each.partition(".")[0] for each in real if each is not None)
    if not name.startswith(f"{ALGORITHM}."):
        return name
    return f"{'|'.join(sorted(groups))}.{name.partition('.')[2]}"


def find_defining_options(run: RunFiles, name: str) -> dict[str, str]:
    """Return the options that determine what the metric `name` measures, with their values.

    The metric can be compared between two runs if these options are equal. A loss depends on the
    algorithm and the algorithm's options, and a reward on the source of rewards. Both also depend
    on the rows of the dataset. Metrics such as times, memory and lengths depend on none of these
    options.
    """
    about = find(name)
    last = get_last_part(name)
    group = about.group if about is not None else ""
    options = dict(configuration.flatten_options(run.config))
    algorithm = configuration.find_algorithm(run) or ""
    option_names: list[str] = []
    loss = last.endswith("loss")
    if group in (REWARD, CRITIC):
        known = any(not configuration.is_unset(options.get(option)) for option in SOURCES[:4])
        option_names += SOURCES if known else ()
    elif (
        not loss
        and group != PREFERENCES
        and last not in ("accuracy", "token_accuracy", "nll", "perplexity")
    ):
        return {ALGORITHM: algorithm} if last == "grad_norm" else {}
    if (loss or group == PREFERENCES) and last not in FREE_OF_SCALE and algorithm not in POLICIES:
        for option in options:
            if option.startswith(f"{algorithm}.") and ".gen." not in option:
                option_names.append(option)
    if name.startswith(EVAL):
        valid = [f"dataset.{option}" for option in VALIDATION_ROWS]
    else:
        valid = []
    given = valid and not configuration.is_unset(options.get(valid[0]))
    option_names += (
        valid[:1] if given else [*valid, *(f"dataset.{option}" for option in TRAINING_ROWS)]
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
    options = dict.fromkeys(option for each in defining_options for option in each)
    incomparable_options: list[str] = []
    for option in options:
        if len({each[option] for each in defining_options if option in each}) > 1:
            incomparable_options.append(option)
    return incomparable_options


def find_version_differences(runs: Sequence[RunFiles]) -> list[tuple[str, list[str]]]:
    """Return the software versions, commits, hosts and hardware that differ between the runs.

    Each item is a pair of a name and a list of values, one per run, taken from each run's last
    start.
    """
    starts = [run.record.get("starts") for run in runs]
    last = []
    for run_starts in starts:
        last.append(
            dict(run_starts[-1])
            if isinstance(run_starts, list) and run_starts and isinstance(run_starts[-1], Mapping)
            else {}
        )
    versions = []
    for one in last:
        versions.append({**(one.get("versions") or {}), **{key: one.get(key) for key in FACTS}})
    names = dict.fromkeys(name for one in versions for name in one)
    rows = []
    for name in names:
        rows.append((name, [str(one.get(name) or "") for one in versions]))
    return [(name, values) for name, values in rows if len(set(values)) > 1]
