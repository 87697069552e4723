"""Count how much of weft one PPO step runs through, as a reader of the code meets it.

    python tools/trace_step.py                     # one device
    python tools/trace_step.py actor.layout=d2     # more words for `weft quickstart ppo`

Runs two steps of PPO on a small model, without a download, and prints

- the files and the lines of the functions that the second step calls, in all processes,
- the stack at `Optimizer.step`: functions of weft in the thread of the Master and in the thread that
  trains,
- through how many files the configuration passes before the first step, and how often it returns
  to a file that it left,
- the number of modules, of modules under 40 lines, and of names, operators and numbers in them.

`--files` lists the files with their lines, `--stacks` the stacks, `--configuration` the files that
the configuration passes, in order.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import subprocess
import sys
import tempfile
import threading
import tokenize
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = str(ROOT / "src" / "weft") + os.sep
OUTPUT = "WEFT_TRACE_OUTPUT"  # the folder in which each process writes what it called
CONFIGURATION_MODULES = ("weft.experiments", "weft.experiment")
TRACED_STEP = 2
STEP = "Master.step"
TRAINS = "Optimizer.step"
CALLS = "interfaces/"  # the modules with the methods in which a model function call begins
METHODS = ("generate", "inference", "train_step")
SHORT_MODULE = 40  # lines; `__init__.py` does not count

RUN = (
    "actor.path=data/model",
    "rew.path=data/model",
    "dataset.path=data/prompts.jsonl",
    "dataset.train_bs_n_seqs=8",
    "ppo.samples_per_prompt=2",
    "ppo.gen.max_new_tokens=4",
    "device=cpu",
)


class Tracer:
    """Profile function that records calls of weft's functions in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps = 0
        self.called: set[CodeType] = set()
        self.files: set[str] = set()  # with functions that were called, before the step too
        self.stacks: dict[str, list[str]] = {}  # at `Optimizer.step`, by thread
        self.entries: dict[str, list[str]] = {}  # at `Master.step` and where calls begin
        self.configuration: list[str] = []
        # A device's process has no Master: everything that it calls counts.
        self.trained = 0
        self.is_written = False  # the step has ended: what follows does not belong to it

    def install(self) -> None:
        threading.setprofile(self.record)
        sys.setprofile(self.record)
        atexit.register(self.write)

    def record(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(PACKAGE):
            return
        is_step = code.co_qualname == STEP
        if event == "return":
            if is_step and self.steps == TRACED_STEP:
                self.write()
                self.is_written = True
            return
        if is_step:
            self.steps += 1
            if self.steps == TRACED_STEP:
                self.called = set()
        if not self.is_written:
            self.called.add(code)
        path = code.co_filename.removeprefix(PACKAGE)
        self.files.add(path)
        if is_step or (path.startswith(CALLS) and code.co_name in METHODS):
            self.entries.setdefault(code.co_qualname, list_functions(frame))
        if not self.steps and _has_configuration(frame):
            self.configuration.append(path)
        if code.co_qualname == TRAINS:
            self.trained += 1
            if not self.stacks:
                self.stacks["trains"] = list_functions(frame)
                main = sys._current_frames().get(threading.main_thread().ident or 0)
                self.stacks["main"] = list_functions(main)
                self.write()

    def write(self) -> None:
        if not self.called:
            return
        functions = {
            f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_firstlineno}": sorted(
                {line for *_, line in code.co_lines() if line is not None}
            )
            for code in self.called
        }
        record = {
            "steps": self.steps,
            "trained": self.trained,
            "functions": functions,
            "files": sorted(self.files),
            "stacks": self.stacks,
            "entries": self.entries,
            "configuration": self.configuration,
        }
        (self.folder / f"{os.getpid()}.json").write_text(json.dumps(record))


def _has_configuration(frame: FrameType) -> bool:
    if threading.current_thread() is not threading.main_thread():
        return False
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]
    values = (frame.f_locals.get(name) for name in names)
    return any(
        type(value).__module__.startswith(CONFIGURATION_MODULES)
        for value in values
        if not isinstance(value, type)
    )


def list_functions(frame: FrameType | None) -> list[str]:
    """Return weft's functions on the stack, outermost first, as `path:function`."""
    found = []
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE):
            found.append(f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_qualname}")
        frame = frame.f_back
    return found[::-1]


def run_ppo(words: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """Run two steps of PPO in `folder` and return the records of its processes.

    Raises `RuntimeError` with the run's output if it fails.
    """
    hook, records = folder / "hook", folder / "records"
    for made in (hook, records):
        made.mkdir()
    (hook / "sitecustomize.py").write_text(
        f"import sys\nsys.path.append({str(Path(__file__).parent)!r})\n"
        "import trace_step\ntrace_step.install()\n"
    )
    path = os.pathsep.join([str(hook), str(ROOT / "src")])
    environment = {**os.environ, "PYTHONPATH": path, OUTPUT: str(records)}
    weft = [sys.executable, "-m", "weft.cli.main"]
    plain = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    run = [*weft, "quickstart", "ppo", "experiment_name=trace", "trial_name=ppo", "max_steps=2"]
    for command, variables in (
        ([*weft, "examples", "write", "data"], plain),
        ([*run, *RUN, *words], environment),
    ):
        done = subprocess.run(
            command, cwd=folder, env=variables, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
    return [json.loads(each.read_text()) for each in sorted(records.iterdir())]


def install() -> None:
    """Trace this process, if it was started by `run_ppo`."""
    if folder := os.environ.get(OUTPUT):
        Tracer(Path(folder)).install()


def count_lines(records: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the number of lines of the functions that a step calls, by file."""
    lines: dict[str, set[int]] = {}
    for record in records:
        if record["steps"] or record["trained"]:
            for function, numbers in record["functions"].items():
                path = function.rpartition(":")[0]
                lines.setdefault(path, set()).update(numbers)
    return {path: len(numbers) for path, numbers in sorted(lines.items())}


def find_entry_files(records: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the files with functions on the stack at `Master.step`, where a call begins, and at
    `Optimizer.step`.
    """
    found = set()
    for record in records:
        for stack in (*record["stacks"].values(), *record["entries"].values()):
            found.update(function.rpartition(":")[0] for function in stack)
    return found


def find_returns(way: Sequence[str]) -> tuple[int, int]:
    """Return the number of files on the way, and how often it returns to a file that it left."""
    seen: set[str] = set()
    returns, last = 0, None
    for path in way:
        if path != last and path in seen:
            returns += 1
        seen.add(path)
        last = path
    return len(seen), returns


def measure_size() -> str:
    """Return the numbers of modules and code tokens of weft, as a sentence."""
    modules = sorted(Path(PACKAGE).rglob("*.py"))
    tokens = short = 0
    for path in modules:
        short += path.name != "__init__.py" and path.read_text().count("\n") < SHORT_MODULE
        with path.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                tokens += token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER)
    return f"{len(modules)} modules, {short} under {SHORT_MODULE} lines, {tokens:,} code tokens"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("files", "stacks", "configuration"):
        parser.add_argument(f"--{name}", action="store_true")
    arguments, words = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="weft-trace-") as folder:
        records = run_ppo(words, Path(folder))
    lines = count_lines(records)
    print(f"a step calls functions in {len(lines)} files, {sum(lines.values())} lines of code")
    if arguments.files:
        print(*(f"  {path}: {number}" for path, number in lines.items()), sep="\n")
    driver = next(record for record in records if record["steps"])
    for record in records:
        for thread, stack in record["stacks"].items():
            if not stack or (thread == "main" and record is not driver):
                continue
            where = "in the Master's thread" if thread == "main" else "in the thread that trains"
            print(f"{len(stack)} functions on the stack at {TRAINS} {where}")
            if arguments.stacks:
                print(*(f"  {function}" for function in stack), sep="\n")
    print(measure_size())
    files, returns = find_returns(driver["configuration"])
    print(
        f"before the first step the configuration passes through {files} files, and returns "
        f"{returns} times to one that it left"
    )
    if arguments.configuration:
        print(*(f"  {path}" for path in driver["configuration"]), sep="\n")


if __name__ == "__main__":
    main()
