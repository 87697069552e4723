"""A process reward model: one reward a step, at the token that ends it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.bounds import rounded
from tests.tiny import make_tokenizer
from weft.data.sample import SequenceSample
from weft.data.spec import TokenizerSpec
from weft.data.tokenizer import Tokenizer, find_step_ends, find_step_tokens
from weft.engine.base import Engine
from weft.errors import ConfigError
from weft.interfaces.base import Model
from weft.interfaces.process_reward import ProcessRewardInterface


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    make_tokenizer(tmp_path)
    return Tokenizer.load(TokenizerSpec(), str(tmp_path))


class Values:
    """An engine whose value at each position is the number of completion tokens before it, and a
    tenth for each prompt.
    """

    def forward(
        self, batch: SequenceSample, want: frozenset[str], *, max_tokens: int
    ) -> SequenceSample:
        assert want == {"values"}
        lengths = [[int(n) + 1 for n in group] for group in batch.seqlens["completion"]]
        flat = [i + 0.1 * g for g, group in enumerate(lengths) for n in group for i in range(n)]
        return SequenceSample.from_groups(
            batch.ids, {"values": lengths}, {"values": torch.tensor(flat, dtype=torch.float64)}
        )


def batch_of(tokenizer: Tokenizer, groups: list[list[str]]) -> SequenceSample:
    prompts = [tokenizer.encode("What is two?") for _ in groups]
    made = [
        [[*tokenizer.encode(text, bos=False), tokenizer.require_eos()] for text in group]
        for group in groups
    ]
    return SequenceSample.from_groups(
        [f"p{n}" for n in range(len(groups))],
        {"prompt": [[len(p)] for p in prompts], "completion": [[len(c) for c in g] for g in made]},
        {
            "prompt": [t for p in prompts for t in p],
            "completion": [t for g in made for c in g for t in c],
        },
    )


ENDS = [[6, 16, 21], [3], [], [6]]  # characters after which the steps of the test's completions end


def test_each_step_is_scored_where_it_ends(tokenizer: Tokenizer) -> None:
    texts = [["One.\n\nTwo two.\n\nThree", "One"], ["\n\n", "Six.\n\n"]]
    batch = batch_of(tokenizer, texts)
    model = Model("rew", cast(Engine, Values()), tokenizer, tokenizer, "cpu", "float32")
    result = ProcessRewardInterface("\n\n").inference(model, batch)
    made = result.outputs
    assert (
        made is not None
        and made.lengths["token_rewards"].tolist() == batch.lengths["completion"].tolist()
    )
    own = torch.split(made.data["token_rewards"], batch.lengths["completion"].tolist())
    sums = []
    for n, (ids, rewards) in enumerate(zip(batch.sequences("completion"), own, strict=True)):
        said = [
            len(tokenizer.decode(ids[: k + 1].tolist(), skip_special=True)) for k in range(len(ids))
        ]
        at = [next(k for k, length in enumerate(said) if length >= end) for end in ENDS[n]]
        expected = {k: k + 1 + 0.1 * (n // 2) for k in at}
        found = {k: float(v) for k, v in enumerate(rewards) if not v.isnan()}
        assert found == rounded(expected, 1)  # stored in float32, as scores are
        sums.append(sum(expected.values()))
    assert made.data["scores"].tolist() == rounded(sums, 1)
    assert sums[2] == 0.0, "nothing but blanks has no step"
    assert result.metrics["steps"] == (3 + 1 + 0 + 1) / 4
    assert result.metrics["reward"] == rounded(sum(sums) / 4, 1)


def test_steps_of_a_text(tokenizer: Tokenizer) -> None:
    assert find_step_ends("ab\n\ncd\n\n\n\n", "\n\n") == [4, 8]
    assert find_step_ends("", "\n\n") == []
    assert find_step_ends("x", "\n\n") == [1]
    ids = tokenizer.encode("ab cd", bos=False)
    places = find_step_tokens(tokenizer, [], ids, [1, 2, 5])
    texts = [tokenizer.decode(ids[: n + 1]) for n in places]
    assert [len(text) >= end for text, end in zip(texts, [1, 2, 5], strict=True)] == [True] * 3
    assert places[-1] == len(ids) - 1


def test_other_tokens_and_no_step_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "other", vocab_size=262)
    other = Tokenizer.load(TokenizerSpec(), str(tmp_path / "other"))
    model = Model("rew", cast(Engine, Values()), other, tokenizer, "cpu", "float32")
    with pytest.raises(
        ConfigError, match=r"role 'rew' has another tokenizer .* leave out rew_step"
    ):
        ProcessRewardInterface("\n").inference(model, batch_of(tokenizer, [["a"]]))
    with pytest.raises(ConfigError, match="step must not be empty"):
        cast(Any, ProcessRewardInterface)("")
