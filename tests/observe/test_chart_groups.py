"""Every metric is on one chart, and what only repeats another is on none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.observe.chart_groups import grouped, without_repeats
from weft.observe.metrics import rank


def groups(columns: Mapping[str, Sequence[float]]) -> dict[str, list[str]]:
    def series(name: str) -> tuple[Sequence[float], Sequence[float]]:
        return list(range(len(columns[name]))), columns[name]

    found = without_repeats(grouped(list(columns)), series, rank)
    return {f"{group.measure} of {', '.join(group.nodes)}": group.names for group in found}


def test_one_measure_of_several_nodes_is_one_chart_but_a_loss_is_each_nodes_own() -> None:
    found = groups(
        {
            "actor_train/grad_norm": [1, 2], "critic_train/grad_norm": [2, 3], "actor_train/loss": [0, 1],
            "critic_train/loss": [5, 6], "time/gen": [1, 1], "time/train": [2, 2], "peak_memory_gb": [1, 1],
        }
    )  # fmt: skip
    assert found == {
        "loss of actor_train": ["actor_train/loss"],
        "loss of critic_train": ["critic_train/loss"],
        "grad_norm of actor_train, critic_train": ["actor_train/grad_norm", "critic_train/grad_norm"],
        "seconds by call of run": ["time/gen", "time/train"],
        "peak_memory_gb of run": ["peak_memory_gb"],
    }


def test_repeats_are_left_out() -> None:
    found = groups(
        {
            "rew_inf/reward": [1, 2], "advantages/reward": [1, 2], "actor_train/loss": [0.5, 0.25],
            "actor_train/policy_loss": [0.5, 0.25 + 1e-9], "reward/reward/mine": [3, 4],
        }
    )  # fmt: skip
    assert found == {
        "reward of rew_inf": ["rew_inf/reward"],
        "loss of actor_train": ["actor_train/loss"],
        "reward/mine of reward": ["reward/reward/mine"],
    }


def test_constants_are_no_repeats_of_each_other() -> None:
    found = groups({"t/clip_ratio": [0, 0], "t/skipped": [0, 0]})
    assert len(found) == 2


def test_evaluation_pairs_and_largest_values_join_what_they_belong_to() -> None:
    found = groups(
        {
            "train/loss": [2, 1], "eval/a/loss": [3, 2], "eval/loss": [4, 3], "t/rewards/chosen": [1, 2],
            "t/rewards/rejected": [0, 1], "eval/rewards/chosen": [2, 5], "g/length": [1, 2], "g/length_max": [2, 3],
        }
    )  # fmt: skip
    assert found["loss of train, eval"] == ["train/loss", "eval/loss", "eval/a/loss"]
    assert found["rewards/chosen|rejected of t, eval"] == [
        "t/rewards/chosen",
        "t/rewards/rejected",
        "eval/rewards/chosen",
    ]
    assert found["length of g"] == ["g/length", "g/length_max"]
