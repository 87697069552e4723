"""Runs of two processes that stand for two hosts, each with four devices of JAX."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.environment import build_xla_flags
from tests.launch.cases import grpo, prepare
from tests.launch.test_run_jax import ROUNDED, numbers
from weft.engine.jax import hosts as jax_hosts
from weft.engine.spec import JAX_COORDINATOR
from weft.errors import ConfigError
from weft.launch import run
from weft.observe.jsonl import read_rows

REWARD = '''
import os

def reward(prompts, completions, **columns):
    """Differs from host to host."""
    return [float(os.environ["WEFT_JAX_PROCESS"]) * 100 + len(c) % 5 for c in completions]
'''


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hosts")
    prepare(folder)
    return folder


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def start(root: Path, folder: str, *words: str) -> list[subprocess.Popen[str]]:
    """Two processes that run one command line."""
    port = free_port()
    command = [sys.executable, "-m", "weft.cli.main", "quickstart", "grpo", "experiment_name=e"]
    command += ["trial_name=t", f"fileroot={root / folder}", f"actor.path={root / 'model'}"]
    command += [f"dataset.path={root / 'prompts.jsonl'}", "dataset.train_bs_n_seqs=4"]
    command += ["grpo.group_size=3", "grpo.gen.max_new_tokens=6", "actor.optimizer.lr=1e-3"]
    for role in ("actor", "ref"):
        command += [f"{role}.backend=jax", f"{role}.layout=1,-1,2", f"{role}.dtype=float64"]
    started = []
    for index in range(2):
        variables = {
            **os.environ,
            "XLA_FLAGS": build_xla_flags(4),
            "JAX_PLATFORMS": "cpu",
            jax_hosts.COORDINATOR: f"127.0.0.1:{port}",
            jax_hosts.PROCESSES: "2",
            jax_hosts.PROCESS: str(index),
        }
        log = (root / f"{folder}-{index}.log").open("a")
        started.append(
            subprocess.Popen([*command, *words], env=variables, stdout=log, stderr=log, text=True)
        )
    return started


def wait(processes: list[subprocess.Popen[str]]) -> list[int]:
    return [process.wait(timeout=300) for process in processes]


def metrics(root: Path, folder: str) -> list[dict[str, Any]]:
    return numbers(list(read_rows(root / folder / "e" / "t" / "metrics.jsonl")))


@pytest.mark.slow
def test_two_hosts_are_as_one_and_go_on_after_a_signal(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewards differ from host to host, and those of the first count."""
    (root / "own.py").write_text(REWARD)
    reward = f"{root / 'own.py'}:reward"
    monkeypatch.setenv(jax_hosts.PROCESS, "0")
    config = grpo(root, "one")
    config.actor.backend = config.ref.backend = "jax"
    config.actor.dtype = config.ref.dtype = "float64"
    config.grpo.gen.top_k, config.total_train_epochs, config.reward = 0, 1, reward
    # The first host gets a signal after a step, and all stop.
    often = (f"reward={reward}", "recover_freq_steps=1", "total_train_epochs=1")
    first, second = start(root, "two", *often)
    file = root / "two" / "e" / "t" / "metrics.jsonl"
    end = time.monotonic() + 200
    while not (file.exists() and file.read_text().count("\n") >= 1):
        assert time.monotonic() < end and first.poll() is None, (root / "two-0.log").read_text()
        time.sleep(0.05)
    first.send_signal(signal.SIGTERM)
    codes = wait([first, second])
    assert codes == [143, 143], (root / "two-0.log").read_text()[-3000:]
    done = len(metrics(root, "two"))
    # The same command goes on, on both hosts, with what the first has written.
    again = start(root, "two", *often)
    wanted = numbers(run(config).metrics)  # while they compile
    assert 1 <= done < len(wanted)
    assert wait(again) == [0, 0], (root / "two-0.log").read_text()[-3000:]
    found = metrics(root, "two")
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=ROUNDED, abs=ROUNDED)
    for index in range(2):
        assert f"resuming after step {done}" in (root / f"two-{index}.log").read_text()


@pytest.mark.parametrize(
    ("variables", "change", "message"),
    [
        ({JAX_COORDINATOR: "here"}, {}, r"WEFT_JAX_PROCESSES=: must be a whole number"),
        (
            {JAX_COORDINATOR: "here", jax_hosts.PROCESSES: "2", jax_hosts.PROCESS: "2"},
            {},
            "WEFT_JAX_PROCESS=2: must be from 0 to WEFT_JAX_PROCESSES - 1 = 1",
        ),
        (
            {JAX_COORDINATOR: "here", jax_hosts.PROCESSES: "2", jax_hosts.PROCESS: "1"},
            {},
            "WEFT_JAX_COORDINATOR=here: write host:port",
        ),
        ({JAX_COORDINATOR: "auto"}, {"layout": "d2"}, "all hosts run the same process"),
        ({JAX_COORDINATOR: "auto"}, {"backend": "torch"}, "actor.backend=torch: several hosts"),
    ],
)
def test_variables_that_do_not_fit_are_refused(
    root: Path, variables: Any, change: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = grpo(root, "refused")
    config.actor.backend = config.ref.backend = "torch" if "layout" in change else "jax"
    for name, value in change.items():
        setattr(config.actor, name, value)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        run(config)
    assert not (root / "refused").exists()
