"""Short names of checkpoints."""

from __future__ import annotations

import pytest

from weft.observe.jsonl import build_served_name, shorten_path


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("runs/e/sft/checkpoints/model/step9", "runs/e/sft@step9"),
        ("runs/e/ppo/checkpoints/actor/step4", "runs/e/ppo@step4"),
        ("runs/e/ppo/checkpoints/critic/step4", "runs/e/ppo@step4:critic"),
        ("runs/e/ppo/checkpoints/actor/last", "runs/e/ppo/checkpoints/actor/last"),
        ("owner/name", "owner/name"),
    ],
)
def test_a_checkpoint_of_a_run_is_called_by_run_and_step(path: str, said: str) -> None:
    assert shorten_path(path) == said


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("runs/e/t/checkpoints/model/step10", "t"),
        ("runs/e/two words/checkpoints/model/step10", "two-words"),
        ("org/Name 1", "Name-1"),
        ("models/mine/step3", "mine"),
    ],
)
def test_a_server_calls_a_checkpoint_by_its_trial(path: str, name: str) -> None:
    assert build_served_name(path) == name
