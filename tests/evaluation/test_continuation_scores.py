"""Scores of continuations do not depend on the batch, also with shared prefixes of contexts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import make_llama, make_tokenizer
from weft.engine.spec import ModelSpec
from weft.evaluation.continuation_scores import (
    ContinuationScorer,
    Score,
    ScoredPair,
    count_common,
    split_by_shared_tokens,
)
from weft.evaluation.models import OpenedModel, open_policy

CONTEXT = 64


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    directory = make_llama(
        tmp_path_factory.mktemp("scores") / "model", max_position_embeddings=CONTEXT
    )
    return open_policy(ModelSpec(path=str(directory), dtype="float64", device="cpu"))


def test_batches_count_shared_prompts_once() -> None:
    first = ((1, 2, 3, 4), 3)
    second = ((1, 2, 3, 5), 3)
    third = ((9, 9, 9), 1)
    assert count_common(first, second) == 3 and count_common(second, third) == 0
    assert list(split_by_shared_tokens([first, second, third], 5)) == [[first, second], [third]]
    assert list(split_by_shared_tokens([first, second, third], 8)) == [[first, second, third]]
    assert list(split_by_shared_tokens([first], 2)) == [[first]], "a long one is alone"


def score(scorer: ContinuationScorer, pairs: list[ScoredPair]) -> list[Score]:
    finished = dict[int, Score]()
    counts = list[tuple[int, int]]()
    scores = scorer.score(pairs, finished.__setitem__, lambda *count: counts.append(count))
    assert [finished[index] for index in range(len(pairs))] == scores
    assert counts[-1][0] == counts[-1][1]
    return scores


def test_shared_prefixes_change_nothing(opened: OpenedModel) -> None:
    examples = [7 + token % 40 for token in range(24)]
    pairs = []
    for question in range(6):
        context = [*examples, 50 + question, 9]
        for answer in range(3):
            pairs.append(ScoredPair(context, [60 + answer] * (answer + 1)))
    pairs += [pairs[0], ScoredPair([1], [5] * CONTEXT)]
    scorer = ContinuationScorer(opened, CONTEXT, 4096)
    together = score(scorer, pairs)
    for pair, (logprob, greedy) in zip(pairs, together, strict=True):
        ((alone, also),) = score(scorer, [pair])
        assert logprob == pytest.approx(alone, abs=1e-9) and greedy == also


def test_a_table_of_positions_is_not_exceeded(tmp_path: Path) -> None:
    """A full context with its label has one token more than GPT-2 has positions."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    vocabulary = len(make_tokenizer(tmp_path))
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=vocabulary, n_positions=CONTEXT, n_embd=16, n_layer=1, n_head=2)
    network = GPT2LMHeadModel(config).double().eval()
    network.save_pretrained(tmp_path)
    opened = open_policy(ModelSpec(path=str(tmp_path), dtype="float64", device="cpu"))
    tokens = [7 + token % 40 for token in range(CONTEXT + 1)]
    ((logprob, _),) = score(
        ContinuationScorer(opened, CONTEXT, 4096), [ScoredPair(tokens[:10], tokens[10:])]
    )
    with torch.no_grad():
        rows = network(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
    expected = sum(float(rows[at - 1, tokens[at]]) for at in range(10, CONTEXT + 1))
    assert logprob == pytest.approx(expected, abs=1e-9)
