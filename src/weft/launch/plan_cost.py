"""Comparison of devices for a run: which GPU, how many, how long, and for how much.

Only options and config.json are read. The devices need not exist.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weft.errors import ConfigError, find_nearest
from weft.experiments.common import RunConfig
from weft.experiments.planned_networks import reuse_descriptions
from weft.launch.plan import build_assumed_batch
from weft.launch.plan_run import forecast_run, with_assumed_lengths
from weft.launch.run import mark_as_planned, set_up_experiment
from weft.observe.memory import format_size
from weft.observe.metrics import format_duration, format_three_digits
from weft.planner.cluster import is_mixed
from weft.planner.devices import GPUS
from weft.planner.placement import (
    HEURISTIC,
    MANUAL,
    MODES,
    SEARCH,
    NoPlacementFits,
    is_plan_path,
)
from weft.planner.plan_file import parse_call_mesh, read_plan
from weft.topology import Layout

NO_FIT = "does not fit"
MACHINE = 8  # GPUs of a machine, unless n_gpus_per_node says how many
PRICE = re.compile(r"([A-Za-z0-9]+)=(\d+(?:\.\d+)?|\.\d+)")


@dataclass(frozen=True)
class DeviceOption:
    """Number of devices of one type, with the time, memory and price of a run on them.

    Attributes:
        gpu: Name of the GPU.
        count: Number of GPUs.
        step_seconds: Duration of a step, or None if the run does not fit.
        needed_bytes: Memory that the fullest GPU needs.
        usable_bytes: Memory of a GPU that a run can use.
        price: Price of one GPU for an hour, or None if it is not known.
        why: Why the run does not fit or cannot run on these devices, or "".
        startup_seconds: Duration of the run's start-up, or None if it is not known.
    """

    gpu: str
    count: int
    step_seconds: float | None
    needed_bytes: float
    usable_bytes: float
    price: float | None
    why: str = ""
    startup_seconds: float | None = None

    def compute_run_seconds(self, steps: int) -> float | None:
        """Return the duration of a run of `steps` steps, with its start-up if that is known."""
        if self.step_seconds is None:
            return None
        return steps * self.step_seconds + (self.startup_seconds or 0.0)

    def compute_cost(self, steps: int) -> float | None:
        """Return the price of `steps` steps, or None if the price or the time is not known."""
        seconds = self.compute_run_seconds(steps)
        if self.price is None or seconds is None:
            return None
        return self.price * self.count * seconds / 3600


def parse_prices(words: Sequence[str]) -> dict[str, float]:
    """Return the price per hour of each GPU in words such as `H100=2.5`.

    Raises `ConfigError` for other words and for a GPU whose speed is not known.
    """
    prices = {}
    for word in words:
        match = PRICE.fullmatch(word)
        if match is None or not float(match[2]):
            raise ConfigError(
                f"--price {word}: write a GPU and its price for an hour, such as --price H100=2.5"
            )
        name = next((known for known in GPUS if known.lower() == match[1].lower()), None)
        if name is None:
            near = find_nearest(match[1], GPUS, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(GPUS)}"
            raise ConfigError(f"--price {word}: the speed of this GPU is not known ({hint})")
        if name in prices:
            raise ConfigError(f"--price {word}: the price of {name} is given twice; give it once")
        prices[name] = float(match[2])
    return prices


def compare_devices(
    config: RunConfig, prices: Mapping[str, float], counts: Sequence[int]
) -> list[DeviceOption]:
    """Return the time, memory and price of a run on each number of GPUs of each type.

    The types are those of `prices`, or all known ones if it is empty. With several GPUs, the calls
    are placed as `choose_mode` says, unless layouts are set. Raises `UserError` if the
    configuration cannot be run on any device.
    """
    if config.search.gpu is not None and is_mixed(config.search.gpu):
        raise ConfigError(
            f"search.gpu={config.search.gpu}: plan cost compares clusters of one kind of GPU; leave "
            f"search.gpu out, and name the kinds with --price"
        )
    machine = config.n_gpus_per_node or MACHINE
    fixed = count_fixed_devices(config)
    if fixed is not None:
        counts = sorted({*counts, fixed})
    for count in counts:
        if count > machine and count % machine:
            raise ConfigError(
                f"--devices={count}: is no number of whole machines of {machine} GPUs; name a "
                f"multiple of {machine}, or set n_gpus_per_node"
            )
    options = []
    with reuse_descriptions():
        for gpu in prices or GPUS:
            for count in counts:
                options.append(_try_devices(config, gpu, count, prices.get(gpu)))
    if all(option.why not in ("", NO_FIT) for option in options):
        raise ConfigError(options[0].why)
    return options


def count_fixed_devices(config: RunConfig) -> int | None:
    """Return the number of devices that `allocation_mode` fixes, or None if it leaves it open.

    Layouts and plan files fix it.
    """
    mode = config.allocation_mode
    if mode in MODES:
        return None
    if not is_plan_path(mode):
        return Layout.parse(mode).num_devices
    plan = read_plan(mode, "allocation_mode")
    meshes = [parse_call_mesh(plan, name, sharded=False) for name in plan.calls]
    return plan.facts.devices or 1 + max(mesh.ranks[-1] for mesh in meshes)


def choose_mode(config: RunConfig, count: int) -> str:
    """Return the `allocation_mode` by which a run is placed on `count` GPUs.

    This is the user's value if it places the calls on `count` GPUs. Otherwise, a search places
    them.
    """
    fixed = count_fixed_devices(config)
    if fixed == count:
        return config.allocation_mode
    if count == 1:
        return MANUAL
    return HEURISTIC if config.allocation_mode == HEURISTIC else SEARCH


def _try_devices(config: RunConfig, gpu: str, count: int, price: float | None) -> DeviceOption:
    per_node = min(count, config.n_gpus_per_node or MACHINE)
    tried_config = replace(
        config,
        device="cuda",
        n_nodes=count // per_node,
        n_gpus_per_node=per_node,
        allocation_mode=choose_mode(config, count),
        recover_mode="disabled",
        search=replace(config.search, gpu=gpu),
    )
    try:
        run = forecast_run(tried_config)
    except NoPlacementFits:
        return DeviceOption(gpu, count, None, 0.0, 0.0, price, NO_FIT)
    except ConfigError as error:
        return DeviceOption(gpu, count, None, 0.0, 0.0, price, str(error))
    if not run.fits:
        return DeviceOption(gpu, count, None, run.needed, run.usable, price, NO_FIT)
    return DeviceOption(
        gpu,
        count,
        run.step.step_seconds,
        run.needed,
        run.usable,
        price,
        startup_seconds=run.step.startup_seconds,
    )


def describe_assumptions(config: RunConfig, options: Sequence[DeviceOption]) -> list[str]:
    """Return lines about the lengths, placements and durations that the comparison assumes."""
    manual = with_assumed_lengths(replace(config, allocation_mode=MANUAL))
    experiment, _ = set_up_experiment(mark_as_planned(manual, needs_data=False), None)
    _, lengths = build_assumed_batch(experiment)
    lines = [f"for {lengths}; search.prompt_tokens and search.answer_tokens set other lengths"]
    mode = HEURISTIC if config.allocation_mode == HEURISTIC else SEARCH
    placed = f"several GPUs: by allocation_mode={mode}, unless layouts are set"
    fixed = count_fixed_devices(config)
    if fixed is not None:
        placed += f"; {fixed:,} as allocation_mode={config.allocation_mode} says"
    left_out = "runs are without start-up, saving and evaluation"
    startups = [each.startup_seconds for each in options if each.startup_seconds is not None]
    if startups:
        left_out = (
            f"runs have up to {max(startups):.3g} s of start-up, and neither save nor evaluate"
        )
    return [*lines, placed, left_out]


def format_cost_table(options: Sequence[DeviceOption], steps: int | None) -> list[str]:
    """Return a line per option: seconds per step, the run's hours and cost, and memory.

    `steps` is the number of steps of the run; without it there are no hours, and the cost is that
    of 1,000 steps. The cheapest, or else the fastest, is marked.
    """
    unit = steps or 1000
    fitting = [option for option in options if option.step_seconds is not None]
    priced = [option for option in fitting if option.price is not None]
    if priced:
        best = min(priced, key=lambda option: option.compute_cost(unit) or 0.0)
    elif fitting:
        best = min(fitting, key=lambda option: option.step_seconds or 0.0)
    else:
        best = None
    amount = "cost" if steps else "cost of 1,000 steps"
    length = f"run of {steps:,} steps" if steps else "1,000 steps"
    header = ["GPUs", "s per step", length, *([amount] if priced else []), "memory of a GPU"]
    rows = []
    for option in options:
        memory = option.why
        if option.needed_bytes:
            sizes = (
                f"{format_size(option.needed_bytes, 1)} of {format_size(option.usable_bytes, 1)}"
            )
            memory = sizes if not option.why else f"{sizes}: {option.why}"
        row = [f"{option.count} x {option.gpu}"]
        seconds = option.compute_run_seconds(unit)
        if option.step_seconds is None or seconds is None:
            row += ["-", "-", *(["-"] if priced else [])]
        else:
            row += [format_three_digits(option.step_seconds), format_duration(seconds)]
            if priced:
                cost = option.compute_cost(unit)
                row.append("-" if cost is None else f"{cost:,.2f}")
        mark = ""
        if option is best:
            mark = "  <- cheapest" if priced else "  <- fastest"
        rows.append([*row, memory + mark])
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header) - 1)]
    lines = []
    for row in [header, *rows]:
        cells = [f"{row[0]:<{widths[0]}}"]
        cells += [f"{cell:>{width}}" for cell, width in zip(row[1:-1], widths[1:], strict=True)]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    return lines
