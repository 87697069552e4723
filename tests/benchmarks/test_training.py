"""What weft and TRL train on is the same."""

from __future__ import annotations

import pytest

from benchmarks.training import check_tokens

SETTINGS = {"warm_tokens": [10], "tokens": [20, 30], "new_tokens": 0, "rows": "rows.jsonl"}


def test_rows_that_trl_cuts_or_leaves_out_end_the_benchmark() -> None:
    check_tokens(SETTINGS, {"num_tokens": 60.0})
    with pytest.raises(
        SystemExit, match=r"^TRL trained on 59 tokens, not on the 60 of rows\.jsonl: it cut rows"
    ):
        check_tokens(SETTINGS, {"num_tokens": 59.0})


def test_sampled_completions_are_not_counted_by_trl_as_rows_are() -> None:
    check_tokens({**SETTINGS, "new_tokens": 4}, {"num_tokens": 1.0})
