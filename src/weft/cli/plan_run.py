"""`weft plan run`: forecast the time and memory of a run, and of the run with other options."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from weft.cli import overrides
from weft.errors import ConfigError, UserError
from weft.options import read, to_mapping
from weft.planner.devices import GIB

if TYPE_CHECKING:
    from weft.experiments.common import RunConfig
    from weft.launch.plan_run import OptionForecast, RunForecast, RunRows

# settings of the argument that names a run, for all commands that plan one
WORDS: dict[str, Any] = {
    "nargs": "+",
    "metavar": "WORD",
    "help": "arguments of weft quickstart: NAME key=value ...",
}
SUMMARY = "how long a run takes, whether it fits, and what would make it fit or run faster"
EPILOG = """Only options and each model's config.json are needed. Rows are read if the run names some that are
here; otherwise search.prompt_tokens and search.answer_tokens set the lengths.

examples:
  weft plan run sft model.path=Qwen/Qwen3-8B search.gpu=H100 max_steps=1000
  weft plan run ppo actor.path=MODEL critic.path=MODEL rew.path=REWARDS n_gpus_per_node=8 search.gpu=H100 \\
      allocation_mode=plan.yaml"""


def add_parser(commands: Any) -> None:
    """Add the command `run` to the commands of `weft plan`."""
    parser = commands.add_parser(
        "run", help=SUMMARY, description=f"Print {SUMMARY}.", epilog=EPILOG
    )
    parser.add_argument("words", **WORDS)
    parser.add_argument("--steps", type=int, metavar="N", help="steps of the run; else max_steps")
    parser.add_argument("--no-data", action="store_true", help="do not read the run's rows")
    parser.add_argument("--no-options", action="store_true", help="try no other options")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def name_run(words: Sequence[str]) -> list[str]:
    """Return the arguments of `weft quickstart`, with the name "plan" where a name is missing."""
    set_names = {word.partition("=")[0] for word in words}
    names = ("experiment_name", "trial_name")
    return [*words, *(f"{name}=plan" for name in names if name not in set_names)]


def build_planned_config(words: Sequence[str]) -> RunConfig:
    """Return the configuration of a run that is only planned, and print the notes about it.

    Recovery is disabled, so that plans of earlier runs with the same name are not used.
    """
    from weft.cli.quickstart import build_config

    config, notes = build_config(name_run(words))
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return replace(config, recover_mode="disabled")


def print_forecast(arguments: argparse.Namespace) -> None:
    """Print the forecast of a run. Raises `UserError` for unusable options."""
    from weft.launch.plan import compare_with_plan
    from weft.launch.plan_run import forecast_run, format_options, select_options

    if arguments.steps is not None and arguments.steps < 1:
        raise ConfigError(f"--steps={arguments.steps}: a run has at least one step")
    config = build_planned_config(arguments.words)
    if arguments.steps is not None:
        config = replace(config, max_steps=arguments.steps)
    # Forecast with assumed lengths first, which reports unusable options before rows are read.
    assumed_forecast = base = forecast_run(config)
    rows = None if arguments.no_data else _read_rows(config)
    if rows is not None:
        base = forecast_run(config, rows)
    selected = []
    if not arguments.no_options:
        selected = select_options(base, _try_options(base, config, rows))
    if arguments.json:
        print(json.dumps(_build_report(base, selected), indent=2))
        return
    lines = _format_forecast(base)
    available = config.n_nodes * (config.n_gpus_per_node or 1)
    if available > base.experiment.num_devices:
        lines.append(
            f"{base.experiment.num_devices:,} of {available:,} devices used; "
            "allocation_mode=search chooses among all of them"
        )
    lines += compare_with_plan(
        assumed_forecast.experiment, assumed_forecast.step, assumed_forecast.target
    )
    if selected:
        lines += ["", _describe_options(base, selected), *format_options(base, selected)]
    elif not arguments.no_options:
        lines += ["", "no option that was tried makes it faster or smaller"]
    print("\n".join(lines))


def _read_rows(config: RunConfig) -> RunRows | None:
    """Return the rows of the run, or None if it names no data or the data cannot be read here."""
    from weft.data.spec import DatasetSpec
    from weft.launch.plan_run import read_run_rows

    data = getattr(config, "dataset", None)
    if not isinstance(data, DatasetSpec):
        return None
    if not (data.train_path or data.path or data.sources or data.named or data.args):
        return None
    try:
        return read_run_rows(config)
    except UserError as error:
        print(f"note: lengths are assumed, since no rows are read: {error}", file=sys.stderr)
        return None


def _try_options(
    base: RunForecast, config: RunConfig, rows: RunRows | None
) -> list[OptionForecast]:
    """Return a forecast of the run for each of the options that it allows."""
    from weft.experiments.planned_networks import reuse_descriptions
    from weft.launch.plan_run import OptionForecast, forecast_run, list_run_options

    forecasts = []
    with reuse_descriptions():
        for option in list_run_options(base, config):
            try:
                nested: dict[str, Any] = {}
                for assignment in overrides.parse(option.words):
                    overrides.merge(nested, assignment)
                changed = read(config, overrides.resolve(nested, to_mapping(config)))
                forecasts.append(OptionForecast.from_run(option, forecast_run(changed, rows)))
            except UserError:
                continue  # the run does not allow this option
    return forecasts


def _format_forecast(base: RunForecast) -> list[str]:
    from weft.observe.memory import format_size

    lines = base.step.format_lines(base.steps)
    shares = []
    for name, share in base.compute_shares().items():
        if share >= 0.01:
            shares.append(f"{name} {share:.0%}")
    lines.append(f"  bound by: {', '.join(shares)}")
    if base.steps is None:
        lines.append("  length of the run: not known; name data, or set max_steps=N (or --steps N)")
    elif base.epochs is not None:
        unit = "epoch" if base.epochs == 1 else "epochs"
        lines.append(f"  length of the run: {base.steps:,} steps, {base.epochs:.3g} {unit}")
    scope = ""
    if base.worst.incomplete:
        scope = f" without activations of {', '.join(base.worst.incomplete)}"
    lines.append(f"memory: {base.target.format_verdict(base.needed, scope)}")
    peaks = sorted(base.compute_call_peaks().items(), key=lambda item: -item[1])
    if len(peaks) > 1:
        for name, peak in peaks:
            lines.append(f"  {name}: {format_size(peak, 1)}")
    size = f"{base.rows:,} rows per step"
    if base.lengths:
        lines.append(
            f"for {size}, {base.lengths}; search.prompt_tokens and search.answer_tokens set other "
            "lengths"
        )
    else:
        lines.append(f"for {size}, with the lengths of the run's rows")
    return lines


def _describe_options(base: RunForecast, selected: Sequence[OptionForecast]) -> str:
    if base.fits:
        return "faster, or with less memory:"
    if any(each.fits for each in selected):
        return "it would fit with:"
    return "nothing that was tried fits; the least memory have:"


def _build_report(base: RunForecast, selected: Sequence[OptionForecast]) -> dict[str, Any]:
    """Return the forecast, and those with the selected options, as values for JSON."""
    steps = base.steps
    peaks = base.compute_call_peaks()
    return {
        **base.step.to_dict(),
        "tokens_per_second": base.tokens_per_second,
        "steps": steps,
        "epochs": base.epochs,
        "run_seconds": None if steps is None else base.step.compute_run_seconds(steps),
        "bound": base.compute_shares(),
        "rows_per_step": base.rows,
        "dtypes": {
            role: network.settings.dtype for role, network in base.step.problem.networks.items()
        },
        "device": base.device,
        "devices": base.experiment.num_devices,
        "memory_gb": base.needed / GIB,
        "usable_memory_gb": base.usable / GIB,
        "memory_by_call_gb": {name: peak / GIB for name, peak in peaks.items()},
        "fits": base.fits,
        "options": [each.to_dict() for each in selected],
    }
