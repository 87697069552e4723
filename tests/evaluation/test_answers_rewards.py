"""Scores of replies are equal to those of transformers for the same model directory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.bounds import gamma
from tests.tiny import make_tokenizer
from tests.wide import in_float64
from weft.engine.spec import ModelSpec
from weft.evaluation.answers import EvaluationPrompt, score_replies
from weft.evaluation.models import OpenedModel, open_scorer


def make_scorer(folder: Path, *, chat: bool = True) -> Path:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(folder, chat=chat)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[True, False], ids=["chat", "plain"])
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    folder = make_scorer(tmp_path_factory.mktemp("scorer") / "model", chat=request.param)
    return open_scorer(ModelSpec(path=str(folder), dtype="float64"))


def test_scores_are_those_of_transformers(opened: OpenedModel) -> None:
    from transformers import AutoModelForSequenceClassification
    from transformers.models.llama import modeling_llama

    theirs = AutoModelForSequenceClassification.from_pretrained(opened.path).double()
    prompts = [
        EvaluationPrompt(str(n), text, ({"role": "user", "content": text},))
        for n, text in enumerate(("Who?", "What is two?"))
    ]
    replies = [["A bear.", "Nobody at all."], ["Two."]]
    found = score_replies(opened, prompts, replies)
    assert [len(each) for each in found] == [2, 1]
    tokenizer = opened.tokenizer
    for prompt, said, scores in zip(prompts, replies, found, strict=True):
        for reply, value in zip(said, scores, strict=True):
            if tokenizer.chat_template is None:
                ids = [*tokenizer.encode(prompt.text + reply), tokenizer.require_eos()]
            else:
                ids = tokenizer.encode_chat(
                    [*prompt.messages, {"role": "assistant", "content": reply}]
                )
            with in_float64(modeling_llama):
                expected = theirs(torch.tensor([ids])).logits.item()
            # Weft's rotations are float32: an angle, its sine and cosine, three roundings of some
            # part of the score, and one of their product.
            np.testing.assert_allclose(value, expected, rtol=gamma(4))


def test_sequences_longer_than_the_context_are_cut(opened: OpenedModel) -> None:
    text = "Who are you? " * 60
    (scores,) = score_replies(
        opened,
        [EvaluationPrompt("0", text, ({"role": "user", "content": text},))],
        [["Me.", "A bear."]],
    )
    assert np.isfinite(scores).all() and scores[0] != scores[1]
