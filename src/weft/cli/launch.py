"""`weft launch ...`: run weft on machines that have to be set up first.

`weft launch tpu` does this for TPU pods, with gcloud.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from weft.cli.parsing import CommandParser
from weft.errors import ConfigError, build_unknown_name_error
from weft.launch import tpu
from weft.launch.gcloud import PYTHON, TpuPod
from weft.launch.tpu_host import LIBTPU_SETTINGS

DEFAULT_RETRIES = 60  # retries of `--retry` without a number, about ten hours
SUBCOMMANDS = {
    "create": "create a pod, and with --retry wait for capacity",
    "ssh": "open a shell on a host, or pass a text to the shell of one or all",
    "run": "run a program on all hosts in the foreground, each line with its host's number",
    "install": "install weft[jax] for TPU on the hosts",
    "check": "show each host's devices, and name the host that differs",
    "clean": "remove lock files and logs that libtpu has left in the temporary folder",
    "start": "start the same weft command on all hosts, in the background",
    "logs": "show the end of each host's log",
    "stop": "end the run's processes, and show what still holds the devices",
    "delete": "delete a pod and all files on its hosts",
}
WITH_WORDS = ("run", "start")  # subcommands that take a command after --
EPILOG = """examples, with POD="--name tulu --zone us-central2-b":
  weft launch tpu create $POD --accelerator-type v4-32 --version tpu-ubuntu2204-base --retry
  weft launch tpu install $POD
  weft launch tpu check $POD
  weft launch tpu run $POD -- weft --version
  weft launch tpu start $POD --libtpu guide -- quickstart sft experiment_name=e trial_name=t \\
      model.path=MODEL model.backend=jax device=tpu fileroot=gs://BUCKET/runs ...
  weft launch tpu logs $POD --follow
  weft launch tpu stop $POD
  weft launch tpu delete $POD"""

RUN_EPILOG = """The words after -- reach the program as they are, and the exit code is that of the
first host that fails. weft and python are those of install. For pipes, variables of the host or a
shell, use ssh, or run ... -- sh -c TEXT. What start begins goes on without this machine."""


def main(argv: Sequence[str]) -> int:
    """Run `weft launch ...` and return the exit code.

    Raises `ConfigError` for wrong arguments, and if gcloud or a host fails.
    """
    all_words = list(argv)
    command_line = all_words[: all_words.index("--")] if "--" in all_words else all_words
    run_words = all_words[len(command_line) + 1 :]
    parser = CommandParser(prog="weft launch", description=__doc__)
    subcommands = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    pods = subcommands.add_parser(
        "tpu",
        help="TPU pods: create, install, check, run, start, logs, stop, delete",
        description="Create TPU pods with gcloud and run weft on all of their hosts.",
        epilog=EPILOG,
    )
    commands = pods.add_subparsers(dest="command", metavar="COMMAND")
    _add_subcommands(commands)
    # Check the names first: for a misspelled one, argparse lists all names, not the nearest.
    _check_name(command_line, 0, "kind of machine", ["tpu"])
    _check_name(command_line, 1, "command of weft launch tpu", SUBCOMMANDS)
    arguments = parser.parse_args(command_line)
    if arguments.command is None:
        pods.print_help()
        return 2
    if arguments.command in WITH_WORDS:
        arguments.words = run_words
    elif "--" in all_words:
        raise ConfigError(
            f"weft launch tpu {arguments.command}: only {' and '.join(WITH_WORDS)} take a command "
            "after --"
        )
    pod = TpuPod(
        arguments.name,
        arguments.zone or None,
        arguments.project or None,
        arguments.print_only,
        getattr(arguments, "python", PYTHON),
    )
    run: Callable[[TpuPod, argparse.Namespace], str | int] = arguments.run
    result = run(pod, arguments)
    if isinstance(result, int):
        return result
    if result:
        print(result)
    return 0


def _check_name(
    words: Sequence[str], index: int, kind: str, known_names: Sequence[str] | dict[str, str]
) -> None:
    """Raise `ConfigError`, with the nearest name, if the word at `index` is not in `known_names`.

    `kind` describes the names in the message. Flags and missing words are not checked.
    """
    if len(words) > index and not words[index].startswith("-") and words[index] not in known_names:
        raise build_unknown_name_error(kind, words[index], known_names)


def _add_subcommands(commands: argparse._SubParsersAction[CommandParser]) -> None:
    parsers = {}
    for name, description in SUBCOMMANDS.items():
        parsers[name] = commands.add_parser(
            name, help=description, description=f"{description[0].upper()}{description[1:]}."
        )
        parsers[name].set_defaults(run=RUNNERS[name])
        _add_pod(parsers[name])
    create_parser = parsers["create"]
    create_parser.add_argument(
        "--accelerator-type", required=True, metavar="TYPE", help="type and size, such as v4-32"
    )
    create_parser.add_argument(
        "--version", required=True, help="software of the hosts, such as tpu-ubuntu2204-base"
    )
    create_parser.add_argument(
        "--retry",
        type=int,
        nargs="?",
        const=DEFAULT_RETRIES,
        default=0,
        metavar="N",
        help="try again up to N times if the zone has no capacity (--retry alone: "
        f"{DEFAULT_RETRIES} times)",
    )
    create_parser.add_argument(
        "--retry-wait",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="wait before the first retry, doubled each time up to 600 (default 30)",
    )
    for name in ("ssh", "run", "install", "check", "clean", "logs", "stop"):
        default = "0" if name == "ssh" else tpu.ALL
        parsers[name].add_argument(
            "--worker",
            type=_parse_worker,
            default=default,
            metavar="N|all",
            help=f"number of a host, or all (default {default})",
        )
    parsers["ssh"].add_argument(
        "--command",
        dest="text",
        metavar="TEXT",
        help="text for the host's shell, with its own pipes and variables; run takes a program",
    )
    parsers["run"].usage = "weft launch tpu run --name NAME [options] -- PROGRAM [ARGUMENT ...]"
    parsers["run"].epilog = RUN_EPILOG
    parsers["install"].add_argument(
        "--source",
        metavar="REQUIREMENT",
        help="git+https://... or weft==VERSION for the hosts to fetch (default: copy the sources of "
        "this weft)",
    )
    parsers["install"].add_argument(
        "--extras", default="", metavar="A,B", help="other extras of weft, such as wandb"
    )
    parsers["delete"].add_argument("--yes", action="store_true", help="do not ask for confirmation")
    _add_run_options(parsers)


def _add_run_options(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the options of the commands for the devices of the hosts, and for a run on them."""
    parsers["check"].add_argument(
        "--timeout",
        type=_parse_seconds,
        default=180.0,
        metavar="SECONDS",
        help="for JAX (default 180)",
    )
    start_parser = parsers["start"]
    start_parser.usage = (
        f"weft launch tpu start --name NAME [options] -- {'|'.join(tpu.RUN_COMMANDS)} ..."
    )
    start_parser.add_argument(
        "--libtpu",
        choices=tuple(LIBTPU_SETTINGS),
        help="named LIBTPU_INIT_ARGS; guide: those of EasyLM's guide (default: none)",
    )
    start_parser.add_argument(
        "--env-file",
        type=Path,
        metavar="FILE",
        help="lines NAME=VALUE to set for the run, such as HF_TOKEN; copied to the hosts",
    )
    parsers["logs"].add_argument(
        "--lines", type=int, default=20, metavar="N", help="last lines of each log (default 20)"
    )
    parsers["logs"].add_argument(
        "--follow", action="store_true", help="show new lines until the run ends"
    )
    parsers["stop"].add_argument(
        "--timeout",
        type=_parse_seconds,
        default=600.0,
        metavar="SECONDS",
        help="for the current step to finish (default 600)",
    )
    parsers["stop"].add_argument(
        "--now", action="store_true", help="kill the processes, and lose the current step"
    )
    for name in ("run", "check", "clean", "start", "logs", "stop"):
        parsers[name].add_argument(
            "--python",
            default=PYTHON,
            metavar="PATH",
            help=f"Python of the hosts that has weft (default ~/{PYTHON}, made by install)",
        )


def _add_pod(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", required=True, help="name of the pod")
    parser.add_argument("--zone", help="its zone (default: gcloud's)")
    parser.add_argument("--project", help="its project (default: gcloud's)")
    parser.add_argument(
        "--print", action="store_true", dest="print_only", help="print the gcloud commands and stop"
    )


def _parse_worker(text: str) -> str:
    if text != tpu.ALL and not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text}: must be a number, such as 0, or all")
    return text if text == tpu.ALL else str(int(text))


def _parse_seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be a number of seconds, such as 60")
    return value


def _create(pod: TpuPod, arguments: argparse.Namespace) -> str:
    retry = tpu.RetryPlan(arguments.retry, arguments.retry_wait)
    return tpu.create(pod, arguments.accelerator_type, arguments.version, retry)


def _show_logs(pod: TpuPod, arguments: argparse.Namespace) -> str:
    if arguments.lines < 0:
        raise ConfigError(f"--lines {arguments.lines}: must be at least 0 (no lines)")
    return tpu.show_logs(pod, arguments.worker, arguments.lines, follow=arguments.follow)


def _delete(pod: TpuPod, arguments: argparse.Namespace) -> str:
    if not arguments.yes and not pod.print_only:
        if not sys.stdin.isatty():
            raise ConfigError(f"delete: nobody can be asked here; add --yes to delete {pod.name}")
        answer = input(f"delete pod {pod.name} and all files on its hosts? [y/N] ")
        if answer.strip().lower() not in ("y", "yes"):
            return f"{pod.name} was not deleted"
    return tpu.delete(pod)


# subcommand -> function that runs it and returns the text to print, or the exit code
RUNNERS: dict[str, Callable[[TpuPod, argparse.Namespace], str | int]] = {
    "create": _create,
    "ssh": lambda pod, arguments: tpu.open_ssh(pod, arguments.worker, arguments.text),
    "run": lambda pod, arguments: tpu.run_command(pod, arguments.worker, arguments.words),
    "install": lambda pod, arguments: tpu.install(
        pod, arguments.worker, arguments.source, arguments.extras
    ),
    "check": lambda pod, arguments: tpu.check(pod, arguments.worker, arguments.timeout),
    "clean": lambda pod, arguments: tpu.clean(pod, arguments.worker),
    "start": lambda pod, arguments: tpu.start(
        pod, tpu.PodRun(arguments.words, arguments.libtpu, arguments.env_file)
    ),
    "logs": _show_logs,
    "stop": lambda pod, arguments: tpu.stop(
        pod, arguments.worker, arguments.timeout, now=arguments.now
    ),
    "delete": _delete,
}
