"""The command `weft`: finds the command's module, turns what goes wrong into one message and an exit code.

0 done, 1 a run that failed, 2 input that cannot be used, 130 stopped by Ctrl-C, 143 by `weft stop`.
"""

from __future__ import annotations

import importlib
import os
import shlex
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from weft import __version__
from weft.errors import ConfigError, Interrupted, UserError, WeftError, unknown_name
from weft.observe.memory import growing_segments, keep_freed_memory
from weft.reading import place_problem

COMMANDS = {
    "quickstart": "train: sft, rw, dpo, online_dpo, ppo, grpo, distill; sample: gen; or a configuration of your own",
    "start": "run an experiment registered by name in user code (--list shows them)",
    "stop": "stop a run; the same start command goes on with it",
    "logs": "what a run and its workers have written, the first failure first",
    "demo": "a small model learns under SFT, PPO and GRPO on this CPU, without a download",
    "config": "named sections of settings: ls, show, cp, validate",
    "chat": "talk to a model directory",
    "sample": "answers of models to a file of prompts: report, score, best of n",
    "eval": "how well a reward model orders replies: rm",
    "serve": "a policy and a reward model behind HTTP: OpenAI's endpoints and the open inference protocol",
    "data": "look at data as a run would see them: inspect, counts, scan",
    "plan": "what a run would do: search, calls onto devices; realloc, parameters from one layout to another",
    "convert": "bring checkpoints in and out",
    "report": "build report.html of a run anew",
}
TRAINING = ("quickstart", "start", "demo")
SUPERVISED = ("quickstart", "start")
INTERRUPTED = 130
SPEAKS_SECONDS = 5.0
WORKER = "weft-worker"  # the thread in which a run's calls are made


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. Without `argv` this is the program itself, and may end the process."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("--help", "-h", "help"):
        print(usage())
        return 0 if words else 2
    if words[0] == "--version":
        print(f"weft {__version__}")
        return 0
    if argv is not None:
        return guarded(lambda: _dispatch(words), words)
    keep_freed_memory()
    os.environ.update(growing_segments(os.environ))
    from weft.runtime.supervised import Wire

    wire = Wire.begin(os.environ)
    code = guarded(lambda: _dispatch(words, supervise=not wire.supervised), words)
    wire.ends(code)
    if code:
        _end(code)
    if wire.supervised:
        raise SystemExit(code)  # what a program does after this is for the process that supervises it
    return code


def _end(code: int) -> None:
    """A failed run may leave a call at work in torch, in which the interpreter's own end would abort with code 134."""
    if any(thread.name == WORKER and thread.is_alive() for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def usage() -> str:
    lines = ["weft COMMAND ...    (weft COMMAND --help says more)", ""]
    lines += [f"  {name:12} {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [*lines, "", "  --version    the version", "  --debug      with any command: show the traceback of an error"]
    )


def guarded(command: Callable[[], int], words: Sequence[str]) -> int:
    """The exit code of `command`; what it raises is one message on the standard error, with `--debug` a traceback."""
    try:
        return command()
    except KeyboardInterrupt:
        _show(
            "stopped at once; a run goes on from its last recovery point with the same command: weft "
            + shlex.join(words),
            words,
        )
        return INTERRUPTED
    except UserError as error:
        _show(f"error: {error}", words)
        return 2
    except Interrupted as error:
        _show(str(error), words)
        return error.exit_code
    except WeftError as error:
        _show(f"error: {error}", words)
        return 1
    except BrokenPipeError:  # the reader of our output has gone (`weft ... | head`)
        sys.stderr.close()
        return 1
    except Exception as error:
        problem = place_problem(error)
        if problem is not None:
            _show(f"error: {problem}", words)
            return 2
        _show(f"error: {type(error).__name__}: {error} (--debug shows where)", words)
        return 1


def _show(message: str, words: Sequence[str]) -> None:
    if "--debug" in words:
        traceback.print_exc()
    print(message, file=sys.stderr)


def _dispatch(words: Sequence[str], *, supervise: bool = False) -> int:
    name, rest = words[0], [word for word in words[1:] if word != "--debug"]
    if name not in COMMANDS:
        raise unknown_name("command", name, COMMANDS)
    if name in TRAINING:
        from weft.launch import foreign

        started = foreign.launched(os.environ)
        if started is not None and started.rank == 0:
            raise ConfigError(started.message(words))
        if started is not None:
            time.sleep(SPEAKS_SECONDS)  # launchers end all processes with the first that ends: the first one says why
            return 2
    if name == "report":
        return _report(rest)
    module = importlib.import_module(f"weft.cli.{'start' if name == 'stop' else name}")
    command: Callable[..., int] = module.stop if name == "stop" else module.main
    return command(rest, supervise=supervise) if name in SUPERVISED else command(rest)


def _report(words: Sequence[str]) -> int:
    if len(words) != 1 or words[0].startswith("-"):
        print("weft report RUN_DIR    builds RUN_DIR/report.html anew from the files of a run")
        return 0 if words and words[0] in ("--help", "-h") else 2
    module = importlib.import_module("weft.cli.report")
    code: int = module.report(Path(words[0]))
    return code


if __name__ == "__main__":
    sys.exit(main())
