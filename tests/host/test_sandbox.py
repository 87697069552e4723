"""The code reward's sandbox: what tests can use, and programs that cheat or attack."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.host import programs
from tests.host.programs import ADD, TESTS
from weft.host.reward import RewardFunction
from weft.host.spec import RewardOptions
from weft.host.verifiers import _sandbox
from weft.host.verifiers._sandbox import (
    SandboxLimits,
    SandboxTask,
    describe_protections,
    find_protections,
    run_tests,
)
from weft.host.verifiers.code import code

# long, since a busy machine is slow; programs that end by themselves end much earlier
LIMITS = SandboxLimits(seconds=30.0, memory_mb=512)
linux = pytest.mark.skipif(sys.platform != "linux", reason="the protections are Linux's")


def verdict(program: str, tests: str = TESTS, **options: object) -> bool:
    return run_tests(
        SandboxTask(program, tests), SandboxLimits(**{"seconds": 30.0, "memory_mb": 512, **options})
    )  # type: ignore[arg-type]


# -- what tests may use


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        (ADD, TESTS),
        (
            "def f(x): return (1, [2.5, {'a': {3}}], None, b'x', 10**5000, 1j)",
            "assert f(0) == (1, [2.5, {'a': {3}}], None, b'x', 10**5000, 1j) and type(f(0)) is "
            "tuple",
        ),
        ("def f(x): x.sort()", "a = [3, 1, 2]\nf(a)\nassert a == [1, 2, 3]"),
        (
            "def f():\n    yield 1\n    yield 2",
            "assert list(f()) == [1, 2] and 2 in f() and 3 not in f()",
        ),
        ("def f(g, x): return g(g(x))", "assert f(lambda x: x + 3, 1) == 7"),
        (
            "def f(x):\n    raise ValueError('bad')",
            "try:\n    f(1)\nexcept ValueError as e:\n    assert str(e) == 'bad'\nelse:\n    "
            "assert 0",
        ),
        (
            "class Own(Exception): pass\ndef f():\n    raise Own",
            "try:\n    f()\nexcept Own:\n    pass\nelse:\n    assert 0",
        ),
        (
            "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): "
            "self.items.append(x)\n"
            "    def pop(self): return self.items.pop()\n    def __len__(self): return "
            "len(self.items)",
            "s = Stack()\ns.push(4)\nassert len(s) == 1 and s.items == [4] and isinstance(s, "
            "Stack)\n"
            "assert s.pop() == 4 and not s",
        ),
        (
            "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\ndef f(): return "
            "P(3)",
            "assert f() == P(3) and f() != P(4)",
        ),
        (
            "def total(node): return node.value + (total(node.next) if node.next else 0)",
            "class Node:\n    def __init__(self, value, next=None): self.value, self.next = "
            "value, next\n"
            "assert total(Node(1, Node(2))) == 3",
        ),
        ("def sum(a, b): return a * b", "assert sum(3, 4) == 12"),
        (
            "def f(target, operation, remote): return target + operation + remote",
            "assert f(target=1, operation=2, remote=3) == 6",
        ),
        (
            "from collections import Counter, namedtuple, deque\nfrom fractions import "
            "Fraction\nfrom datetime import date\n"
            "P = namedtuple('P', 'x y')\ndef f(): return Counter('aab'), P(1, 2), deque([1]), "
            "Fraction(1, 3), date(2020, 1, 2)",
            "import datetime\nc, p, d, q, t = f()\nassert c.most_common(1) == [('a', 2)] and p.y "
            "== 2 and p == (1, 2)\n"
            "assert d.popleft() == 1 and q * 3 == 1 and t == datetime.date(2020, 1, 2)",
        ),
        (
            "import numpy\ndef f(x): return numpy.asarray(x) * 2",
            "import numpy as np\nassert np.array_equal(f(np.arange(3)), [0, 2, 4])",
        ),
        (
            "def f(): print('hello')",
            "import io, contextlib\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n  "
            "  f()\n"
            "assert out.getvalue() == 'hello\\n'",
        ),
        (
            "import math\ndef f(x): return math.sqrt(x)",
            "assert math.isclose(f(2), 1.41421356, rel_tol=1e-6)",
        ),
        ("x = 1\nprint('a' * 10**6)\nassert input is not None", ""),
        ("if __name__ == '__main__':\n    import math\n    assert math.pi > 3", ""),
    ],
)
def test_tests_use_a_program_as_if_it_were_theirs(program: str, tests: str) -> None:
    assert verdict(program, tests, memory_mb=2048)


def test_helpers_come_from_the_prompt_and_not_from_the_program() -> None:
    prompt = "def double(x):\n    return 2 * x\n\ndef f(x):\n    '''Four times x.'''\n"
    tests = "def check(candidate):\n    assert candidate(3) == double(double(3))\n"
    run = {"test": [tests], "entry_point": ["f"], "completion_ids": [[]], "seconds": 30.0}
    assert code([prompt], ["    return 4 * x"], **run) == [1.0]
    assert code([prompt], ["def double(x): return 0\ndef f(x): return 0"], **run) == [0.0]


# -- programs that cheat


@pytest.mark.parametrize("name", programs.CHEATS)
def test_a_program_that_cheats_gets_nothing(name: str) -> None:
    assert not verdict(programs.CHEATS[name])


def test_an_object_of_the_program_does_not_answer_for_a_plain_value() -> None:
    for tests in (
        "assert f(1).startswith('abc')",
        "assert f(1).issubset({2})",
        "assert abs(f(1) - 3.5) < 1e-6",
        "assert 3 in f(1)",
        "import math\nassert math.isclose(f(1), 3.0)",
        "assert isinstance(f(1), str)",
        "assert f(1) in [1, 2]",
    ):
        assert not verdict(programs.YES, tests), tests


def test_a_program_does_not_replace_the_modules_and_builtins_of_the_tests() -> None:
    for tests in (
        "assert math.isclose(f(1), 3.0)",
        "assert np.allclose(f(1), 3.0)",
        "assert abs(f(1) - 3) < 1e-6",
        "assert len(str(f(1))) == 3 and f(1) == 3",
        "assert sorted([f(1)]) == [1]",
    ):
        assert not verdict(programs.REPLACES_NAMES, tests, memory_mb=2048), tests


def test_a_program_reaches_nothing_through_what_the_tests_hand_it() -> None:
    program = "def f(g):\n    return g.__globals__['__builtins__']"
    assert not verdict(program, "def own(): pass\nassert f(own) is not None")
    assert verdict("def f(node): return node.x", "class A: x = 3\nassert f(A()) == 3")


# -- programs that attack the machine


WAYS = ["best", "without namespaces"]


@pytest.fixture(params=WAYS)
def active(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The protections of this system, and those of a system without namespaces."""
    if sys.platform != "linux":
        pytest.skip("the protections are Linux's")
    if request.param == "best":
        if "files" not in find_protections():
            pytest.skip("this system allows no file tree of its own")
        return find_protections()
    fallback = tuple(name for name in ("landlock", "seccomp") if _sandbox._can_protect((name,)))
    if "landlock" not in fallback:
        pytest.skip("this kernel has no Landlock")
    return fallback


def attacked(program: str, active: tuple[str, ...], tests: str = "assert attack()") -> bool:
    """Return whether the attack, a function that returns true on success, succeeded."""
    assert run_tests(SandboxTask("def attack(): return True", tests), LIMITS, active), (
        "one that needs nothing does"
    )
    return run_tests(SandboxTask(program, tests), LIMITS, active)


def test_a_program_reads_no_environment_of_other_processes(
    active: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_TEST_KEY", "s3cret")
    own = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    program = programs.READS_PROC.format(pids=[os.getpid(), os.getppid(), own.pid])
    try:
        assert not attacked(program, active)
    finally:
        own.communicate(b"\n")


def test_a_program_opens_no_socket(active: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = programs.CONNECTS.format(port=server.getsockname()[1])
        assert not attacked(program, active)


def test_a_program_reads_no_file_of_the_user(active: tuple[str, ...], tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    tmp_path.chmod(0o755)
    assert not attacked(programs.READS_FILES.format(folder=tmp_path), active)
    assert secret.read_text() == "s3cret"


def test_a_program_signals_and_traces_no_other_process(active: tuple[str, ...]) -> None:
    own = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert not attacked(programs.SIGNALS.format(pid=own.pid), active)
    assert own.poll() is None
    own.communicate(b"\n")


def descendants() -> set[int]:
    """Return the ids of the launcher's descendant processes."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, queue = set[int](), [launcher.process.pid for launcher in _sandbox._launchers]
    while queue:
        new = children.get(queue.pop(), [])
        found.update(new)
        queue += new
    return found


@linux
@pytest.mark.parametrize("names", ["best", "none"])
@pytest.mark.parametrize("end", ["", "\nos._exit(0)", "\nraise ValueError", "\nwhile True: pass"])
def test_no_process_is_left_behind(names: str, end: str) -> None:
    """This holds even without protections.

    A daemon that has left its session becomes a child of the launcher's fork.
    """
    before = set(os.listdir("/proc"))
    limits = SandboxLimits(seconds=1.0 if "while" in end else 30.0, processes=10_000)
    run_tests(
        SandboxTask(programs.LEAVES + end, "assert True"), limits, None if names == "best" else ()
    )
    # Killed processes exist until the launcher has waited for them.
    deadline = time.monotonic() + 30.0
    while descendants() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not descendants(), "it never ends by itself"
    new = [pid for pid in set(os.listdir("/proc")) - before if pid.isdigit()]
    launcher = str(_sandbox._launchers[0].process.pid)
    # launchers of other test processes have other ancestors
    above = {launcher, str(os.getpid()), *_ancestors(str(os.getpid()))}
    forked = [pid for pid in new if "_launcher" in _command(pid) and pid != launcher]
    assert not [pid for pid in forked if (found := _ancestors(pid)) and found <= above]


def _ancestors(pid: str) -> set[str]:
    """Return the ancestors of a process, or an empty set if it has ended."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        while pid != "0":
            pid = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
            found.add(pid)
    return found


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@linux
def test_no_process_outlives_the_one_that_asked(tmp_path: Path) -> None:
    """A reward's process is killed at its deadline, in the middle of a program."""
    script = (
        "import sys; from weft.host.verifiers._sandbox import *\nfrom weft.host.verifiers import "
        "_sandbox\n"
        "_sandbox._get_launcher(); print(_sandbox._launchers[0].process.pid, flush=True)\n"
        "run_tests(SandboxTask('import time\\nprint(1)\\ntime.sleep(600)', ''), "
        "SandboxLimits(seconds=600.0))"
    )
    asks = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert asks.stdout is not None
    launcher = int(asks.stdout.readline())
    while not Path(f"/proc/{launcher}/task/{launcher}/children").read_text():
        time.sleep(0.01)
    forked = int(Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()[0])
    asks.kill()
    asks.communicate()
    end = time.monotonic() + 300.0
    while (
        Path(f"/proc/{launcher}").exists() or Path(f"/proc/{forked}").exists()
    ) and time.monotonic() < end:
        time.sleep(0.02)
    assert not Path(f"/proc/{launcher}").exists() and not Path(f"/proc/{forked}").exists()


@pytest.mark.parametrize(
    "program",
    [
        "x = bytearray(2 * 10**9)",
        "x = []\nwhile True: x.append(bytearray(1 << 20))",
        "open('f', 'wb').write(bytes(1 << 25))",
        "def f(): f()\nf()",
        "import os; os.kill(os.getpid(), 9)",
        "import os\nwhile True: os.open('/dev/null', 0)",
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, "
        "args=(9,)).start()",
    ],
)
def test_a_program_that_takes_too_much_fails(program: str) -> None:
    assert not verdict(program, "")


@linux
def test_a_program_fills_no_disk() -> None:
    if "files" not in find_protections():
        pytest.skip("this system allows no file tree of its own")
    limits = SandboxLimits(seconds=30.0, disk_mb=8)
    assert run_tests(
        SandboxTask(programs.FILLS_THE_DISK, "assert 6 << 20 <= attack() <= 8 << 20"), limits
    )


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(60)"])
def test_endless_programs_are_ended(program: str) -> None:
    began = time.monotonic()
    assert not run_tests(SandboxTask(program, ""), SandboxLimits(seconds=0.3)), (
        "by itself it would end well, or never"
    )
    assert time.monotonic() - began < 30.0


def test_endless_tests_are_ended() -> None:
    assert not run_tests(SandboxTask(ADD, "while add(1, 1) == 2: pass"), SandboxLimits(seconds=0.5))


def test_many_at_a_time() -> None:
    results: list[bool] = []
    threads = [
        threading.Thread(
            target=lambda n=n: results.append(verdict(ADD, f"assert add({n}, 1) == {n + 1}"))
        )
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4


# -- what is said


def test_what_holds_and_what_does_not_is_said() -> None:
    (line,) = describe_protections(("namespaces", "files", "user", "seccomp"))
    assert "no network" in line and "seccomp" in line and "another user" in line
    first, second = describe_protections(("seccomp",))
    assert "namespaces" not in first and "NOT protected by own process, mount, network" in second
    assert "NOT" in describe_protections(())[1]


def test_a_run_says_it_at_its_start() -> None:
    function = RewardFunction(RewardOptions("code", num_workers=1))
    assert list(function.notes) == describe_protections(find_protections())
    assert not RewardFunction(RewardOptions("length", num_workers=1)).notes


def test_protections_that_are_refused_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = {"namespaces", "user"}
    monkeypatch.setattr(_sandbox, "_can_protect", lambda names: not refused & set(names))
    monkeypatch.setattr(sys, "platform", "linux")
    assert find_protections.__wrapped__() == ("landlock", "seccomp")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert find_protections.__wrapped__() == ()
