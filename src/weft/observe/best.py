"""Best checkpoint of a run: the metric that decides, and the record `checkpoints/best.json`.

A run with the option `save_best` writes the record. `runs/E/T@best` reads it, as do the report and
`weft show`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import CheckpointError, ConfigError, find_nearest
from weft.observe.jsonl import CHECKPOINTS, read_json
from weft.observe.metrics import (
    ABOUT_MACHINE,
    EVAL,
    format_number,
    get_direction,
    get_last_part,
    is_finite,
    is_step,
)

BEST = "best.json"  # file in the folder of checkpoints
MODES = {"max": 1, "min": -1}  # values of `save_best_mode`, and the direction of each
# Last parts of metrics of evaluation tasks, in addition to those in `weft.observe.metrics`.
RISING = (
    "acc",
    "acc_norm",
    "avg",
    "bleu",
    "chrf",
    "exact_match",
    "f1",
    "logps",
    "maj",
    "mc1",
    "mc2",
    "mcc",
    "pass",
    "score",
    "teacher_agreement",
    "win_rate",
)
FALLING = ("bits_per_byte", "error_rate", "ter", "wer")


@dataclass(frozen=True)
class BestRecord:
    """Step of a run's best checkpoint, and the value of the metric that decided."""

    step: int
    metric: str
    value: float

    @classmethod
    def read(cls, run: Path) -> BestRecord | None:
        """Read the record in a run's directory.

        Returns None if the run has no best checkpoint, or if the record cannot be read.
        """
        record = read_json(run / CHECKPOINTS / BEST)
        step: Any = record.get("step")
        value: Any = record.get("value")
        if not is_step(step) or not is_finite(value):
            return None
        return cls(int(step), str(record.get("metric")), float(value))

    def format_text(self) -> str:
        """Return the record in words, such as `step 40, eval/loss 1.234`."""
        return f"step {self.step}, {self.metric} {format_number(self.value)}"


def find_best_checkpoint(run: Path, role: str) -> Path:
    """Return the best checkpoint of a role in a run's directory.

    Raises `CheckpointError` if the run has no best checkpoint, or if the checkpoint is missing.
    """
    record = BestRecord.read(run)
    if record is None:
        raise CheckpointError(f"{run} has no best checkpoint; a run with save_best=METRIC has one")
    checkpoint = run / CHECKPOINTS / role / f"step{record.step}"
    if not checkpoint.is_dir():
        raise CheckpointError(f"the best checkpoint of {run}, {checkpoint}, is missing")
    return checkpoint


def find_direction(metric: str, mode: str | None = None) -> int:
    """Return 1 if higher values of a metric are better, or -1 if lower values are.

    `mode` is the value of `save_best_mode`. If it is None, the direction follows from the last part
    of the metric's name, without a suffix after `@` or `,` as in `pass@1` and `acc,none`. Raises
    `ConfigError` if no direction is known for the name.
    """
    if mode is not None:
        return MODES[mode]
    name = metric.partition(",")[0].partition("@")[0]
    last = get_last_part(name)
    if last in RISING:
        return 1
    if last in FALLING:
        return -1
    direction = get_direction(name)
    if direction == 0:
        raise ConfigError(
            f"save_best={metric}: the name does not tell whether higher or lower values are "
            f"better; check its spelling, or add save_best_mode=max or save_best_mode=min"
        )
    return direction


def check_options(
    metric: str | None, mode: str | None, patience: int | None, min_delta: float
) -> None:
    """Check `save_best`, `save_best_mode`, `early_stop_patience` and `early_stop_min_delta`.

    Raises `ConfigError` if a value is out of range, or if an option is set without another option
    that it needs.
    """
    if mode not in (None, *MODES):
        raise ConfigError(f"save_best_mode={mode!r}: must be max or min")
    if patience is not None and patience < 1:
        raise ConfigError(f"early_stop_patience={patience}: must be at least 1")
    if min_delta < 0:
        raise ConfigError(f"early_stop_min_delta={min_delta}: must be at least 0")
    if min_delta and patience is None:
        raise ConfigError(
            f"early_stop_min_delta={min_delta}: only used with early_stop_patience; set that too"
        )
    if metric is not None:
        find_direction(metric, mode)
        return
    for name, value in (("save_best_mode", mode), ("early_stop_patience", patience)):
        if value is not None:
            raise ConfigError(
                f"{name}={value}: only used with save_best=METRIC, such as eval/loss; set that too"
            )


def check_metric_name(metric: str, nodes: Collection[str], *, evaluates: bool) -> None:
    """Check the name of the metric `save_best`, before the run's metrics are known.

    `nodes` are the nodes of the graph, and `evaluates` is True if there are evaluation metrics.
    Raises `ConfigError` if the name begins with neither a node nor `eval/`.
    """
    node, _, rest = metric.partition("/")
    if metric.startswith(EVAL) and rest:
        if evaluates:
            return
        raise ConfigError(
            f"save_best={metric}: there is nothing to evaluate on; set dataset.valid_path, or "
            f"dataset.valid_split=0.05 to set training rows aside, or eval_suite.tasks, or name a "
            f"metric of a step"
        )
    if node in nodes and rest:
        return
    examples = [f"{EVAL}{metric}"] if evaluates else []
    examples += [
        f"{name}/{rest or metric}" for name in find_nearest(node, nodes) or list(nodes)[-1:]
    ]
    raise ConfigError(
        f"save_best={metric}: must be the name of a metric in metrics.jsonl, such as "
        f"{' or '.join(examples)}"
    )


def build_missing_error(metric: str, names: Collection[str]) -> ConfigError:
    """Return the error for a metric that the run lacks; `names` are the metrics that it has."""
    candidates = [name for name in names if "/" in name and not name.startswith(ABOUT_MACHINE)]
    close = find_nearest(metric, candidates)
    if close:
        hint = f"did you mean {' or '.join(close)}? "
    else:
        hint = ""
    return ConfigError(
        f"save_best={metric}: the run does not have this metric; {hint}it has "
        f"{', '.join(sorted(candidates)) or 'none'}"
    )
