"""How often a run and its plans read the config.json of a model: once, for all stages and roles."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.launch.cases import options, prepare
from weft.cli import main
from weft.experiments import PPOConfig
from weft.launch import dry_run, run

_listeners: list[list[str]] = []


def _record_open(event: str, arguments: tuple[Any, ...]) -> None:
    if _listeners and event == "open" and str(arguments[1] or "").startswith("r"):
        _listeners[-1].append(str(arguments[0]))


@pytest.fixture(scope="module")
def record_reads() -> Callable[[], Any]:
    """Return a context that yields the list of the files that this process opens for reading."""
    sys.addaudithook(_record_open)  # cannot be removed, and does nothing outside of the context

    @contextmanager
    def record() -> Iterator[list[str]]:
        _listeners.append([])
        try:
            yield _listeners[-1]
        finally:
            _listeners.pop()

    return record


def build(root: Path, **more: Any) -> PPOConfig:
    """Return a run of PPO with four roles, which have one model directory."""
    more = {"max_steps": 1, "save_freq_steps": None, "device": "cpu", **more}
    config = PPOConfig(**options(root, "runs", **more))
    config.actor.path = config.critic.path = config.rew.path = str(root / "model")
    config.dataset.path, config.dataset.train_bs_n_seqs = str(root / "prompts.jsonl"), 4
    config.ppo.gen.max_new_tokens, config.ppo.ppo_n_minibatches = 4, 2
    return config


def plan_on_the_command_line(config: PPOConfig) -> None:
    words = [
        *("actor.path", config.actor.path, "rew.path", config.rew.path),
        *("dataset.path", config.dataset.path, "device", "cpu", "n_gpus_per_node", "2"),
    ]
    pairs = zip(words[::2], words[1::2], strict=True)
    assert main.main(["plan", "run", "ppo", *(f"{name}={value}" for name, value in pairs)]) == 0


ENTRIES: dict[str, tuple[Callable[[PPOConfig], object], dict[str, Any]]] = {
    "run": (run, {}),
    "dry run": (dry_run, {}),
    "dry run without data": (lambda config: dry_run(config, data=False), {}),
    "search": (dry_run, {"allocation_mode": "search", "n_gpus_per_node": 2}),
    "weft plan run": (plan_on_the_command_line, {}),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_the_config_of_a_model_is_read_once(
    tmp_path: Path, record_reads: Callable[[], Any], name: str
) -> None:
    prepare(tmp_path)
    start, more = ENTRIES[name]
    with record_reads() as files:
        start(build(tmp_path, **more))
    assert files.count(str(tmp_path / "model" / "config.json")) == 1
    rows = files.count(str(tmp_path / "prompts.jsonl"))
    assert rows >= (name != "dry run without data"), "what is read is recorded"
