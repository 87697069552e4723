"""The `weft` command: run a subcommand, and convert errors to a message and an exit code.

Exit codes: 0 success, 1 the run failed, 2 unusable input, 130 stopped by Ctrl-C, 141 the process
that reads the output has ended, 143 stopped by `weft stop`.
"""

from __future__ import annotations

import importlib
import os
import select
import shutil
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TextIO

from weft import __version__
from weft.cli import dialects
from weft.errors import ConfigError, Interrupted, UserError, WeftError, build_unknown_name_error
from weft.observe.memory import build_segment_variables, keep_freed_memory
from weft.reading import check_working_directory, find_path_problem
from weft.redaction import redact

COMMAND_GROUPS = {
    "train and sample": {
        "quickstart": (
            "train: sft, rw, dpo, online_dpo, ppo, grpo, distill; sample: gen; or a "
            "configuration of your own"
        ),
        "demo": "train a small model with SFT, PPO and GRPO on this CPU, without a download",
        "start": "run an experiment registered by name in user code (--list shows them)",
        "stop": "stop a run; the same command resumes it",
    },
    "look at runs": {
        "ls": "list the runs in a folder: status, steps, last reward or loss, size",
        "show": ("show a run: command, versions, changed options, checkpoints, last metrics"),
        "report": "build the page of a run, or a page that compares several",
        "dashboard": "show the pages of all runs in a folder, live in a browser",
        "logs": "print the logs of a run and its workers, starting with the first failure",
        "rm": "remove runs, or only their checkpoints or recovery points",
    },
    "models": {
        "chat": "talk to a model or a run",
        "sample": "sample answers to a file of prompts: report, score, best of n",
        "eval": (
            "measure models: rm (ranked replies), suite (tasks of lm-eval), table (results), "
            "submit (a job on a cluster)"
        ),
        "serve": "serve a policy and a reward model over HTTP: OpenAI's and the open protocol",
        "convert": "convert, merge, split and export checkpoints",
        "push": "upload a model to the Hugging Face hub, with its model card",
    },
    "data": {
        "examples": "write sample data and a small model, without a download: ls, write",
        "data": "inspect data as a run reads them: inspect, counts, scan",
    },
    "configuration and devices": {
        "config": "list, show, copy and check named sections: ls, show, cp, validate",
        "launch": "run weft on TPU pods: create, install, check, start, logs, stop, delete",
        "plan": (
            "show what a run would do: run forecasts its time and memory, search assigns calls to "
            "devices, cost compares GPUs"
        ),
        "completion": "complete commands and options in bash, zsh and fish",
    },
}
if dialects.list_commands():
    COMMAND_GROUPS["other programs"] = dialects.list_commands()
COMMANDS = {name: what for group in COMMAND_GROUPS.values() for name, what in group.items()}
GLOBAL_FLAGS = {
    "--version": "the version",
    "--help": "this list",
    "--debug": "with any command: show the traceback of an error",
}
# commands that refuse to run under another program's launcher, such as torchrun
TRAINING_COMMANDS = ("quickstart", "start", "demo", "easylm")
# commands that run without arguments; without arguments, the others print their help
ARGUMENT_FREE_COMMANDS = ("quickstart", "demo", "ls", "dashboard")
SUPERVISED_COMMANDS = ("quickstart", "start", "easylm")  # their `main` takes `supervise`
HELP_WORDS = ("--help", "-h", "help")
INTERRUPTED_CODE = 130
UNREAD_OUTPUT_CODE = 141  # 128 + SIGPIPE, as in other programs
FIRST_RANK_SECONDS = 5.0  # time that other ranks wait while rank 0 prints an error
WORKER_THREAD = "weft-worker"  # thread that executes a run's model function calls


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code.

    If `argv` is None, the arguments of the process are used. In this case, the function ends the
    process instead of returning if a supervisor started the process, or if the run has failed while
    one of its threads still executes a model call.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in (*HELP_WORDS, "--version"):
        return run_guarded(print_overview, words)
    if argv is not None:
        return run_guarded(run_command, words)
    drop_empty_variables(os.environ)
    keep_freed_memory()
    os.environ.update(build_segment_variables(os.environ))
    from weft.runtime.processes import SupervisorPipe

    wire = SupervisorPipe.connect(os.environ)
    code = run_guarded(partial(run_command, supervise=not wire.is_supervised), words)
    wire.report_exit_code(code)
    if code:
        _end_if_still_running(code)
    if wire.is_supervised:
        # a supervised process returns, and its supervisor handles the exit code
        raise SystemExit(code)
    return code


def drop_empty_variables(environment: MutableMapping[str, str]) -> None:
    """Remove empty OpenMP variables from `environment`.

    OpenMP would print a warning for each of them on the import of torch.
    """
    for name in [
        name for name, value in environment.items() if name.startswith("OMP_") and not value.strip()
    ]:
        del environment[name]


def _end_if_still_running(code: int) -> None:
    """End the process with the exit code `code` if a worker thread is still running.

    A normal exit during a model call would abort the interpreter with code 134.
    """
    if any(thread.name == WORKER_THREAD and thread.is_alive() for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def print_overview(words: Sequence[str]) -> int:
    """Print the list of commands, or the version for `--version`, and return the exit code."""
    print(f"weft {__version__}" if words[:1] == ["--version"] else format_usage())
    return 0 if words else 2


def format_usage() -> str:
    """Return the list of commands, grouped by purpose, wrapped to the terminal's width."""
    width = max(60, shutil.get_terminal_size().columns)
    lines = ["weft COMMAND ...    (weft COMMAND --help says more)"]
    for group, commands in COMMAND_GROUPS.items():
        lines += ["", group]
        for name, description in commands.items():
            lines += textwrap.wrap(
                description, width, initial_indent=f"  {name:12} ", subsequent_indent=" " * 15
            )
    return "\n".join(
        [*lines, "", *(f"  {flag:12} {description}" for flag, description in GLOBAL_FLAGS.items())]
    )


def run_guarded(command: Callable[[Sequence[str]], int], words: Sequence[str]) -> int:
    """Run `command` on `words` and return its exit code.

    If it fails, a message is printed to standard error; with `--debug` in `words`, the traceback is
    also printed. If the process that reads the output has ended, as in `weft ... | head`, nothing
    is printed.
    """
    try:
        return command(words)
    except (KeyboardInterrupt, Exception) as error:
        if isinstance(error, BrokenPipeError) and _is_reader_gone(sys.stdout):
            return UNREAD_OUTPUT_CODE
        code, message = _explain_failure(error, words)
        try:
            if "--debug" in words:
                print(redact(traceback.format_exc()), file=sys.stderr)
            print(redact(message), file=sys.stderr)
        except BrokenPipeError:
            return UNREAD_OUTPUT_CODE
        return code
    finally:
        for stream in (sys.stdout, sys.stderr):
            # Redirect closed streams, because flushing them fails when the interpreter exits.
            if _is_reader_gone(stream):
                with suppress(OSError, ValueError):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _is_reader_gone(stream: TextIO) -> bool:
    """Return whether the process that reads `stream` has closed its end of the pipe."""
    try:
        stream.flush()
        pipe = select.poll()
        pipe.register(stream.fileno(), select.POLLOUT)
        return any(event & select.POLLERR for _, event in pipe.poll(0))
    except BrokenPipeError:
        return True
    except (OSError, ValueError):  # a full disk, a closed stream, a stream of a test
        return False


def _explain_failure(error: KeyboardInterrupt | Exception, words: Sequence[str]) -> tuple[int, str]:
    """Return (exit code, message) for an exception raised by the command `words`."""
    if isinstance(error, KeyboardInterrupt):
        if words[:1] and words[0] in SUPERVISED_COMMANDS:
            hint = "; rerun the same command to start or resume the run"
        else:
            hint = ""
        return INTERRUPTED_CODE, _wrap_text(f"stopped at once{hint}")
    if isinstance(error, UserError):
        return 2, f"error: {error}"
    if isinstance(error, Interrupted):
        return error.exit_code, _wrap_text(str(error))
    if isinstance(error, WeftError):
        return 1, f"error: {error}"
    problem = find_path_problem(error)
    if problem is not None:
        return 2, f"error: {problem}"
    return 1, f"error: {type(error).__name__}: {error} (--debug shows where)"


def _wrap_text(text: str) -> str:
    """Wrap text at the terminal's width, or return it unchanged if stderr is not a terminal."""
    if not sys.stderr.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(
        textwrap.wrap(
            text, width, break_long_words=False, break_on_hyphens=False, subsequent_indent="  "
        )
    )


def run_command(words: Sequence[str], *, supervise: bool = False) -> int:
    """Run the command named by the first of `words`, and return the exit code.

    If `supervise` is True, a command that starts a run may start it in a child process and
    supervise that process.
    """
    name = words[0]
    arguments = [word for word in words[1:] if word != "--debug"]
    if name not in {*COMMANDS, *dialects.COMMANDS}:
        raise build_unknown_name_error("command", name, COMMANDS)
    check_working_directory()
    if name in TRAINING_COMMANDS:
        from weft.launch import other_launchers

        launched_process = other_launchers.detect_launcher(os.environ)
        if launched_process is not None and launched_process.rank == 0:
            raise ConfigError(launched_process.format_message(words))
        if launched_process is not None:
            # Launchers kill all processes when one ends: wait until rank 0 has printed the error.
            time.sleep(FIRST_RANK_SECONDS)
            return 2
    if name in dialects.COMMANDS:
        module = dialects.load(name)
    else:
        module = importlib.import_module(f"weft.cli.{'start' if name == 'stop' else name}")
    command: Callable[..., int] = module.stop if name == "stop" else module.main
    if not arguments and name not in ARGUMENT_FREE_COMMANDS:
        with suppress(SystemExit):
            command(["--help"])
        return 2
    if name in SUPERVISED_COMMANDS:
        return command(arguments, supervise=supervise)
    return command(arguments)


if __name__ == "__main__":
    sys.exit(main())
