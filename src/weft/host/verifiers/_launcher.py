"""Launcher process, which forks isolated processes to run each program and its tests.

Usage: `python -I -B _launcher.py`, with a Unix socket as its standard input. It imports nothing
from weft and contains no secret.

The socket delivers pairs of descriptors, one to read from and one to write to. For each pair, the
launcher forks a process and replies with its process id. The new process reads two messages:
(protections, limits, folders, disk_mb, program), then (tests, prompt, entry point, word). It forks
one process for the program and one for the tests. The tests' process calls the program's functions
(`_peer.py`). After the last test, it writes the word, a random string, which proves that all tests
have passed. The program's process is started before the second message is read, so it never
contains the tests or the word.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import importlib.util
import json
import os
import signal
import socket
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Names -> modules that tests can use without importing them; they never come from the program.
MODULES = {
    "np": "numpy",
    "pd": "pandas",
    **{name: name for name in ("numpy", "pandas", "scipy", "sympy", "torch")},
}


def _import_sibling(name: str) -> Any:
    """Import a module from this file's folder, which is not on the import path."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


isolation = _import_sibling("_isolation")
peers = _import_sibling("_peer")


def main() -> None:
    """Fork a process for each program to run, until the socket on standard input closes.

    For each program, the socket delivers two descriptors, and the launcher replies with the id of
    the new process. This process reads the program and its tests from the first descriptor, and
    reports success on the second.
    """
    server = socket.socket(fileno=0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks are reaped automatically
    while True:
        message, descriptors, *_ = socket.recv_fds(server, 1, 2)
        if not message:
            return
        child = os.fork()
        if child == 0:
            try:
                os.setsid()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                server.detach()
                launch(*descriptors)
            finally:
                os._exit(1)
        for descriptor in descriptors:
            os.close(descriptor)
        server.sendall(child.to_bytes(4, "little"))


def launch(source: int, out: int) -> None:
    """Run one program and its tests, and exit when all processes that they started have ended.

    The program and its tests are read as two messages from the descriptor `source`. When the tests
    have passed, the tests' process writes to the descriptor `out`.
    """
    # Silence the standard streams, and end all processes on SIGTERM.
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    signal.signal(signal.SIGTERM, lambda *_: _end())
    if sys.platform == "linux":
        isolation.set_death_with_parent()
        isolation.adopt_orphans()
    # Start the program's process before the tests are read.
    program_message = _read(source)
    tests_end, program_end = socket.socketpair()
    settings = []
    for folder in program_message["folders"]:
        settings.append(
            isolation.IsolationSettings(
                frozenset(program_message["protections"]),
                program_message["limits"],
                folder,
                program_message["disk_mb"],
            )
        )
    _start(
        settings[0],
        program_end.fileno(),
        lambda: _run(program_message["program"], program_end.fileno()),
    )
    program_end.close()
    # Start the tests' process and wait for it.
    tests_message = _read(source)
    os.close(source)
    tests_process = _start(
        settings[1],
        tests_end.fileno(),
        lambda: _run_tests(tests_message, tests_end.fileno(), out),
        out,
    )
    tests_end.close()
    with contextlib.suppress(ChildProcessError):
        while os.wait()[0] != tests_process:
            pass
    _end()


def _read(descriptor: int) -> Any:
    """Read and return the next message, which consists of its size in 8 bytes, followed by JSON.

    Reads no byte after the end of the message, because the next message may contain the tests. This
    process must not have the tests in memory when it forks the process that runs the program;
    otherwise, the program could find them.
    """
    content = b""
    left = 8
    while left:
        part = os.read(descriptor, left)
        if not part:
            os._exit(1)
        content += part
        if len(content) >= 8:
            left = 8 + int.from_bytes(content[:8], "little") - len(content)
        else:
            left = 8 - len(content)
    return json.loads(content[8:])


def _end() -> None:
    """Kill all child processes, and exit this process when none is left.

    Orphaned descendants become children of this process, and are killed too.
    """
    with contextlib.suppress(ChildProcessError):
        while True:
            for child in isolation.list_children() or CHILDREN:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(child, signal.SIGKILL)
            os.wait()
    os._exit(0)


CHILDREN: list[int] = []  # process ids, for systems that do not list the children of a process


def _start(settings: Any, channel: int, work: Callable[[], None], *kept_descriptors: int) -> int:
    """Fork a process that applies protections and then calls `work`; return its process id.

    `settings` has the protections to apply. In the new process, all descriptors are closed except
    `channel`, `kept_descriptors` and the standard streams.
    """
    child = os.fork()
    if child:
        CHILDREN.append(child)
        return child
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if sys.platform == "linux":
            isolation.set_death_with_parent()
        for descriptor in map(int, os.listdir("/dev/fd")):
            if descriptor > 2 and descriptor not in (channel, *kept_descriptors):
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        isolation.enter(settings)
        work()
    finally:
        os._exit(1)
    raise AssertionError("the process has ended")


def _create_main_module() -> dict[str, Any]:
    """Replace the module `__main__` with a new, empty one, and return its globals."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    return vars(module)


def _run(program: str, channel: int) -> None:
    """Run the program, then answer calls of its functions until the channel closes.

    This runs in the program's process.
    """
    peer = peers.ObjectPeer(channel, guarded=False)
    sys.stdout = peer.printed
    names = _create_main_module()
    exec(compile(program, "program.py", "exec"), names)
    peer.serve(names)


def _run_tests(message: dict[str, Any], channel: int, out: int) -> None:
    """Run the tests on the program's functions; if they pass, write a secret word to `out`.

    The program does not have the word, so the word proves that the tests have passed. `message` has
    the tests, the prompt, the entry point and the word; `out` is a file descriptor. This runs in
    the tests' process, which calls the program's functions through `channel`.
    """
    # Define the helper functions of the prompt.
    isolation.hide_memory()
    tests = message["tests"]
    prompt = message["prompt"]
    entry_point = message["entry_point"]
    peer = peers.ObjectPeer(channel, guarded=True)
    names = _create_main_module()
    if entry_point is not None:
        _define_helpers(prompt, names)
        names.pop(entry_point, None)
    # Import modules, and get the program's functions.
    used = {node.id for node in ast.walk(ast.parse(tests)) if isinstance(node, ast.Name)}
    missing = sorted(used - names.keys())
    modules, builtin_names, own_names = _sort_names(tests, missing)
    for name in modules:
        with contextlib.suppress(ImportError):
            names[name] = importlib.import_module(MODULES.get(name, name))
    program_objects = peer.request("names", None, [[*own_names, *builtin_names]], {})
    if not any(name in program_objects for name in own_names):
        # If the tests use no other name of the program, they test a function that is named like a
        # built-in, such as `sum`.
        own_names = [*own_names, *builtin_names]
    names.update({name: program_objects[name] for name in own_names if name in program_objects})
    # Run the tests.
    exec(compile(tests, "tests.py", "exec"), names)
    os.write(out, message["word"].encode())


def _define_helpers(prompt: str, names: dict[str, Any]) -> None:
    """Execute the prompt if it is code, so that the tests can use the helper functions it defines.

    The functions are added to `names`, the globals of the tests. The tests must not use the
    program's versions of these functions, which could make a wrong program pass.
    """
    try:
        exec(compile(prompt, "prompt.py", "exec"), names)
    except Exception:  # plain text, or code that continues in the completion
        return


def _sort_names(tests: str, names: list[str]) -> tuple[list[str], list[str], list[str]]:
    """Divide the names that tests use into modules, built-ins and objects of the tested program.

    The name of a known module counts as a module only if the tests access an attribute of it, as in
    `math.pi`.
    """
    with_attributes = set()
    for node in ast.walk(ast.parse(tests)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            with_attributes.add(node.value.id)
    known_modules = sys.stdlib_module_names | MODULES.keys()
    modules = []
    for name in names:
        if name in known_modules and name in with_attributes:
            modules.append(name)
    builtin_names = []
    for name in names:
        if hasattr(builtins, name) and name not in modules:
            builtin_names.append(name)
    own_names = [name for name in names if name not in modules and name not in builtin_names]
    return modules, builtin_names, own_names


if __name__ == "__main__":
    main()
