"""Log files of a run: their order, the failures in them, and new lines."""

from __future__ import annotations

import os
from pathlib import Path

from weft.observe.logs import LogFollower, find_failure, find_failures, find_log_files

TRACE = """INFO loads
Traceback (most recent call last):
  File "a.py", line 1, in f
    g()
RuntimeError: no memory is left
INFO after
"""


def write(path: Path, text: str, when: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (when, when))
    return path


def test_files_in_order(tmp_path: Path) -> None:
    for name in (
        "log.txt",
        "logs/worker-10.log",
        "logs/worker-2.log",
        "logs/reward.log",
        "slurm/12.log",
        "slurm/9.log",
        "slurm/9-ray-0.log",
        "slurm/job.sh",
        "metrics.jsonl",
    ):
        write(tmp_path / name, "", 1)
    names = [file.name for file in find_log_files(tmp_path)]
    assert names == [
        "run",
        "worker-2",
        "worker-10",
        "reward",
        "slurm/9-ray-0",
        "slurm/9",
        "slurm/12",
    ]
    assert [file.worker for file in find_log_files(tmp_path)] == [
        None,
        2,
        10,
        None,
        None,
        None,
        None,
    ]
    assert find_log_files(tmp_path / "absent") == []


def test_the_first_failure_is_first(tmp_path: Path) -> None:
    write(
        tmp_path / "log.txt",
        "2026-01-01 10:00:00  step 1\n2026-01-01 10:00:09  error: worker 1 is gone\n",
        1e12,
    )
    write(tmp_path / "logs/worker-0.log", "fine\nerror: the others have gone\n", 3e9)
    write(tmp_path / "logs/worker-1.log", f"2026-01-01 10:00:05 begins\n{TRACE}", 4e9)
    write(tmp_path / "logs/worker-2.log", "terror: none\nan errors: 0 line\nfine\n", 1)
    found = find_failures(find_log_files(tmp_path))
    assert [each.file.name for each in found] == ["worker-1", "run", "worker-0"]
    assert found[0].line == 3 and found[0].text == tuple(TRACE.splitlines()[1:5])
    assert found[0].summary == "RuntimeError: no memory is left"
    assert found[1].text == ("2026-01-01 10:00:09  error: worker 1 is gone",)


def test_without_time_stamps_the_log_that_ends_first_comes_first(tmp_path: Path) -> None:
    write(tmp_path / "logs/worker-0.log", TRACE, 200)
    write(tmp_path / "logs/worker-1.log", TRACE.replace("no memory", "another"), 100)
    assert [each.file.worker for each in find_failures(find_log_files(tmp_path))] == [1, 0]


def test_lost_connections_come_after_their_cause(tmp_path: Path) -> None:
    gloo = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:1"
    died = "error: device 1 (n1, process 7) died in actor_train: its process ended (killed)"
    write(
        tmp_path / "logs/worker-0.log", TRACE.replace("RuntimeError: no memory is left", gloo), 100
    )
    write(tmp_path / "log.txt", f"2026-01-01 10:00:09  {died}\n", 1e12)
    found = find_failures(find_log_files(tmp_path))
    assert [each.file.name for each in found] == ["run", "worker-0"]
    assert found[0].summary.endswith(died)
    assert [each.file.name for each in find_failures(find_log_files(tmp_path)[1:])] == ["worker-0"]


def test_long_tracebacks_are_cut_in_the_middle(tmp_path: Path) -> None:
    frames = "".join(f'  File "{n}.py"\n' for n in range(500))
    write(
        tmp_path / "log.txt", f"Traceback (most recent call last):\n{frames}ValueError: deep\n", 1
    )
    found = find_failure(find_log_files(tmp_path)[0])
    assert found is not None and len(found.text) == 61 and found.summary == "ValueError: deep"


def test_new_lines_are_yielded_once_when_complete(tmp_path: Path) -> None:
    log = write(tmp_path / "log.txt", "old\n", 1)
    follower = LogFollower(find_log_files(tmp_path))
    with log.open("a") as file:
        file.write("new\nhal")
    assert [line for _, line in follower.read_new_lines(find_log_files(tmp_path))] == ["new"]
    with log.open("a") as file:
        file.write("f\n")
    write(tmp_path / "logs/worker-0.log", "here\n", 1)
    assert [
        (file.name, line) for file, line in follower.read_new_lines(find_log_files(tmp_path))
    ] == [
        ("run", "half"),
        ("worker-0", "here"),
    ]
    assert list(follower.read_new_lines(find_log_files(tmp_path))) == []


def test_only_failures_in_messages_of_slurm_count(tmp_path: Path) -> None:
    ended = "slurmstepd-n1: error: *** STEP 7.1 ON n1 CANCELLED AT 2026-01-01T00:00:01 ***\n"
    write(tmp_path / "slurm/7-ray-0.log", ended, 1)
    write(tmp_path / "slurm/7.log", ended.replace(" ***\n", " DUE TO TIME LIMIT ***\n"), 1)
    assert [each.file.name for each in find_failures(find_log_files(tmp_path))] == ["slurm/7"]
