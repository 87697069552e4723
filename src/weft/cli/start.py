"""`weft start` runs a registered experiment; `weft stop` ends a run so that it can be resumed.

`find_config` lists the registered experiments that match a pattern, as ReaL's `python -m
realhf.apps.main find_config` does.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace

from weft import registry
from weft.cli import dialects
from weft.cli.named_run import add_run, find_given_run
from weft.cli.parsing import CommandParser, add_imports
from weft.cli.quickstart import print_notes, print_start
from weft.errors import ConfigError
from weft.experiment import Experiment
from weft.experiments import checks


def main(argv: Sequence[str], *, supervise: bool = False) -> int:
    """Run `weft start ...` and return the exit code.

    With `supervise`, a run that needs Ray is started in a child process, because Ray can kill the
    process that uses it. Raises `UserError` for unusable input.
    """
    # Import the user's code, which registers the experiments.
    arguments = _build_start_parser().parse_args(argv)
    registry.import_user_folder()
    registry.import_user_code(arguments.imports)
    if arguments.list:
        print(
            "\n".join(registry.experiments.list_names())
            or "no experiments are registered (--import FILE.py, or experiments/)"
        )
        return 0
    _check_arguments(arguments, "start")
    from weft.launch import build_registered, build_scheduling, check_machines, dry_run, run, slurm
    from weft.launch.supervisor import Supervisor, needs_ray
    from weft.observe.progress import DisplayOptions, find_terminal_width

    # Build the experiment, and plan or submit a Slurm job.
    experiment = _apply_arguments(
        build_registered(
            arguments.experiment,
            arguments.trial,
            allocation_mode=_parse_allocation_mode(arguments.allocation_mode),
            fileroot=arguments.fileroot,
        ),
        arguments,
    )
    if arguments.print_script and arguments.mode != "slurm":
        raise ConfigError("--print-script prints the script of a Slurm job; add --mode slurm")
    reads_data = arguments.dry_run != "config"
    scheduling = build_scheduling(arguments.experiment)
    if arguments.mode == "slurm" and arguments.dry_run is not None:
        print(
            "\n".join(
                slurm.plan_job(experiment, scheduling, data=reads_data, width=find_terminal_width())
            )
        )
        return 0
    if arguments.mode == "slurm":
        command = ["start", *(word for word in argv if word != "--print-script"), "--mode", "ray"]
        print(slurm.start_job(experiment, command, scheduling, print_only=arguments.print_script))
        return 0
    print_notes(check_machines(arguments.experiment, arguments.mode))
    if arguments.dry_run is not None:
        print(
            "\n".join(
                dry_run(
                    experiment, mode=arguments.mode, data=reads_data, width=find_terminal_width()
                )
            )
        )
        return 0
    # Run the experiment, in a child process if it uses Ray, which can kill the process.
    uses_ray = needs_ray(experiment, arguments.mode)
    print_start(experiment, uses_ray=uses_ray)
    if supervise and uses_ray:
        return Supervisor(experiment).run()
    run(experiment, mode=arguments.mode, show=DisplayOptions(verbose=arguments.verbose))
    return 0


def _build_start_parser() -> argparse.ArgumentParser:
    parser = build_run_parser(
        "weft start", "Run an experiment registered with register_experiment(name), or list them."
    )
    parser.add_argument(
        "--list", action="store_true", help="list the registered experiments and stop"
    )
    add_imports(
        parser, "MODULE_OR_FILE.py", "user code that registers experiments (can be repeated)"
    )
    parser.add_argument(
        "--recover_mode",
        choices=("auto", "resume", "disabled"),
        help="replaces the experiment's setting",
    )
    parser.add_argument(
        "--allocation_mode",
        help="layout of roles without one, or a plan file; replaces the experiment's setting",
    )
    parser.add_argument(
        "--partition", help="with --mode slurm: partition; replaces the experiment's setting"
    )
    parser.add_argument(
        "--wandb_mode",
        choices=("online", "offline", "disabled"),
        help="mode of Weights & Biases; replaces the experiment's setting",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="show the whole plan")
    parser.add_argument(
        "--dry-run",
        nargs="?",
        const="",
        choices=("", "config"),
        metavar="config",
        help="print the plan and the memory it needs, and stop; config: without reading the data",
    )
    parser.add_argument(
        "--print-script",
        action="store_true",
        help="with --mode slurm: print the job's script and stop",
    )
    return parser


def _apply_arguments(experiment: Experiment, arguments: argparse.Namespace) -> Experiment:
    """Return the experiment with the settings of the command line applied."""
    settings = {}
    for name in ("fileroot", "recover_mode"):
        if getattr(arguments, name) is not None:
            settings[name] = getattr(arguments, name)
    new_imports = []
    for name in arguments.imports:
        if name not in experiment.control.imports:
            new_imports.append(name)
    loggers = dict(experiment.control.loggers)
    if arguments.wandb_mode == "disabled":
        loggers.pop("wandb", None)
    elif arguments.wandb_mode is not None:
        loggers["wandb"] = {**loggers.get("wandb", {}), "mode": arguments.wandb_mode}
    control = replace(
        experiment.control,
        **settings,
        imports=[*experiment.control.imports, *new_imports],
        loggers=loggers,
    )
    config = {
        **experiment.config,
        **{name: value for name, value in settings.items() if name in experiment.config},
    }
    if arguments.partition is not None:
        config["slurm"] = {**config.get("slurm", {}), "partition": arguments.partition}
    return replace(experiment, control=control, config=config)


def _parse_allocation_mode(text: str | None) -> str | None:
    """Return the value of `--allocation_mode`, with ReaL's names translated to weft's.

    Raises `ConfigError` for an unknown mode.
    """
    if text is None:
        return None
    spellings = dialects.find("spellings")
    mode = text if spellings is None else spellings.ALLOCATIONS.get(text, text)
    problem = checks.find_allocation_problem(mode)
    if problem:
        raise ConfigError(f"--allocation_mode {text}: {problem}")
    return mode


def find_config(argv: Sequence[str]) -> int:
    """Print the registered experiments whose names match a regular expression.

    The expression only has to match the beginning of a name. Returns the exit code.
    """
    parser = CommandParser(
        prog="weft.apps.main find_config", description="List registered experiments by a pattern."
    )
    parser.add_argument(
        "-r", "--regex", required=True, help="regular expression that a name begins with"
    )
    add_imports(
        parser, "MODULE_OR_FILE.py", "user code that registers experiments (can be repeated)"
    )
    arguments = parser.parse_args(argv)
    try:
        pattern = re.compile(arguments.regex)
    except re.error as error:
        raise ConfigError(
            f"--regex {arguments.regex!r}: is not a regular expression: {error}"
        ) from error
    registry.import_user_folder()
    registry.import_user_code(arguments.imports)
    names = []
    for name in registry.experiments.list_names():
        if pattern.match(name):
            names.append(name)
    print("\n".join(names) or "no registered experiment has such a name")
    return 0


def stop(argv: Sequence[str]) -> int:
    """Run `weft stop`: ask a run to end after its current step, and wait until it has ended.

    Prints the result and returns the exit code 0.
    """
    parser = CommandParser(
        prog="weft stop", description="End a run after its step; the same command resumes it."
    )
    add_run(parser)
    parser.add_argument(
        "--mode",
        default="local",
        help="how the run was started; not needed, weft finds its process or job",
    )
    arguments = parser.parse_args(argv)
    _check_mode(arguments.mode)
    run = find_given_run(arguments, "stop")
    from weft.launch.stop import stop_run

    print(stop_run(run))
    return 0


def build_run_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that select a run and its launch mode."""
    parser = CommandParser(prog=prog, description=description)
    parser.add_argument(
        "-e", "--experiment", "--experiment_name", metavar="EXPERIMENT", help="experiment_name"
    )
    parser.add_argument("-f", "--trial", "--trial_name", metavar="TRIAL", help="trial_name")
    parser.add_argument(
        "--mode",
        default="local",
        help="local: this machine; ray: an existing Ray cluster; slurm: a job on a cluster",
    )
    parser.add_argument("--fileroot", help="folder of runs (the experiment's own, usually ./runs)")
    return parser


def _check_mode(mode: str) -> None:
    problem = checks.find_mode_problem(mode)
    if problem:
        raise ConfigError(f"--mode {mode}: {problem}")


def _check_arguments(arguments: argparse.Namespace, command: str) -> None:
    for flag, value in (("-e EXPERIMENT", arguments.experiment), ("-f TRIAL", arguments.trial)):
        if value is None:
            raise ConfigError(
                f"{flag} is missing; write weft {command} -e EXPERIMENT -f TRIAL (weft start "
                f"--list shows experiments)"
            )
    _check_mode(arguments.mode)
    checks.check_names(experiment_name=arguments.experiment, trial_name=arguments.trial)
