"""Accuracy and Kendall's tau of a reward model, by hand and on real pairs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.evaluation.test_answers_rewards import make_scorer
from tests.tiny import write_jsonl
from weft.engine.spec import ModelSpec
from weft.errors import ConfigError, DataError
from weft.evaluation.answers import EvaluationPrompt, score_replies
from weft.evaluation.models import OpenedModel, open_scorer
from weft.evaluation.reward_model import (
    AgreementSummary,
    PairCounts,
    _count_pairs,
    evaluate,
    summarize_by_category,
)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    return open_scorer(
        ModelSpec(
            path=str(make_scorer(tmp_path_factory.mktemp("scorer") / "model")), dtype="float64"
        )
    )


def test_pairs_of_a_ranking_by_hand() -> None:
    """Ranks 0, 1, 1, 2 make five pairs; scores 3, 4, 1, 1 order 3 > 1, 3 > 1 and 4 > 1 right, 3 < 4
    wrong, 1 and 1 tie.
    """
    (group,) = _count_pairs(
        "x", np.array([3.0, 4.0, 1.0, 1.0]), np.array([0, 1, 1, 2]), np.zeros(4, dtype=np.int64)
    )
    assert (group.right, group.wrong, group.tied, group.gap) == (3, 1, 1, 2.0)
    assert _count_pairs("x", np.array([3.0, 4.0]), np.array([0, 1]), np.array([0, 1])) == []


def test_a_summary_by_hand() -> None:
    found = AgreementSummary.from_counts(
        [PairCounts("", 3, 1, 1, 2.0), PairCounts("", 0, 1, 0, -1.0)]
    )
    assert (found.rows, found.pairs, found.accuracy, found.best_accuracy, found.margin) == (
        2,
        6,
        0.5,
        0.5,
        0.5,
    )
    np.testing.assert_allclose(found.kendalltau, (0.4 - 1.0) / 2)


def test_rows_by_category_agree_with_scores_one_by_one(opened: OpenedModel, tmp_path: Path) -> None:
    kinds = ("talk", "math")
    rows = [
        {
            "prompt": f"What is {n}?",
            "chosen": f"It is {n}.",
            "rejected": "No.",
            "kind": kinds[n % 2],
        }
        for n in range(6)
    ]
    groups = evaluate(
        opened,
        str(write_jsonl(tmp_path / "pairs.jsonl", rows)),
        "preference",
        category="kind",
        args={"as_chat": True},
    )
    assert [group.category for group in groups] == [row["kind"] for row in rows]
    prompts = [
        EvaluationPrompt("", row["prompt"], ({"role": "user", "content": row["prompt"]},))
        for row in rows
    ]
    scores = score_replies(opened, prompts, [[row["chosen"], row["rejected"]] for row in rows])
    expected = [one[0] - one[1] for one in scores]
    np.testing.assert_allclose([group.gap for group in groups], expected, rtol=0, atol=1e-9)
    assert sorted(summarize_by_category(groups)) == ["math", "talk"]


def test_unusable_rows_and_options_are_named(opened: OpenedModel, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    with pytest.raises(ConfigError, match="a reward model is evaluated on ordered replies"):
        evaluate(opened, str(file), "chat")
    with pytest.raises(DataError, match="no row has a column 'kind'"):
        evaluate(opened, str(file), "preference", category="kind")
