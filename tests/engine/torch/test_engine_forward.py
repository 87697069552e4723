"""What the engine computes equals what `transformers` computes for each sequence alone, however the
batch is cut.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.engine.common import (
    EXACT,
    batch_of,
    engine_of,
    load_exactly,
    plain_logprobs,
    sequences,
    tiny,
)
from tests.roundings import assert_computed
from weft.data.sample import SequenceSample
from weft.errors import ConfigError, DataError

GROUPS = [(5, [4, 7, 1]), (0, [6]), (9, [3, 3]), (1, [12])]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("llama") / "m")


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("budget", [13, 20, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_each_sequence_alone(
    path: Path, budget: int, temperature: float
) -> None:
    engine, batch = engine_of(path, dtype="float64"), batch_of(GROUPS)
    out = engine.forward(
        batch, frozenset({"logprobs", "entropy"}), temperature=temperature, max_tokens=budget
    )
    model = load_exactly(AutoModelForCausalLM, path)
    with torch.no_grad():
        wanted = plain_logprobs(model, batch, temperature)
    assert out.ids == batch.ids
    assert [n.tolist() for n in out.seqlens["logprobs"]] == [
        n.tolist() for n in batch.seqlens["completion"]
    ]
    for got, want in zip(out.sequences("logprobs"), wanted, strict=True):
        torch.testing.assert_close(got, want, **EXACT)
    first = out.sequences("entropy")[0]
    tokens, prompt = sequences(batch)[0]
    with torch.no_grad():
        logp = torch.log_softmax(
            model(tokens[None]).logits[0, prompt - 1 : -1] / temperature, dim=-1
        )
    torch.testing.assert_close(first, -(logp.exp() * logp).sum(-1), **EXACT)


def test_a_first_token_without_a_prompt_has_logprob_entropy_and_value_zero(path: Path) -> None:
    batch = batch_of([(0, [3]), (2, [2])])
    out = engine_of(path).forward(batch, frozenset({"logprobs", "entropy"}))
    assert out.sequences("logprobs")[0][0] == 0.0 and out.sequences("entropy")[0][0] == 0.0
    assert (out.sequences("logprobs")[0][1:] < 0).all() and (out.sequences("logprobs")[1] < 0).all()
    values = engine_of(path, head="value")
    values.write([("score.weight", (slice(0, 1), slice(0, 32)), torch.ones(1, 32))], version=0)
    assert values.forward(batch, frozenset({"values"})).sequences("values")[0][0] == 0.0


@pytest.mark.usefixtures("float64_throughout")
def test_values_have_one_row_more_than_the_completion(path: Path, tmp_path: Path) -> None:
    classifier = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
    classifier.double().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((path / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_bytes((path / "tokenizer_config.json").read_bytes())
    batch = batch_of(GROUPS)
    engine = engine_of(tmp_path, head="value", dtype="float64")
    out = engine.forward(batch, frozenset({"values"}), max_tokens=20)
    for got, (tokens, prompt) in zip(out.sequences("values"), sequences(batch), strict=True):
        with torch.no_grad():
            states = classifier.model(tokens[None]).last_hidden_state
            want = torch.cat([states.new_zeros(1), classifier.score(states)[0, :, 0]])
        torch.testing.assert_close(got, want[prompt:], **EXACT)
    scored = engine_of(tmp_path, head="score", dtype="float64").forward(
        batch, frozenset({"scores"})
    )
    assert [n.tolist() for n in scored.seqlens["scores"]] == [[1] * len(c) for _, c in GROUPS]
    for got, (tokens, _) in zip(scored.sequences("scores"), sequences(batch), strict=True):
        with torch.no_grad():
            torch.testing.assert_close(got, classifier(tokens[None]).logits[0], **EXACT)


@pytest.mark.usefixtures("float64_throughout")
def test_mean_pooling_averages_the_tokens(path: Path) -> None:
    batch = batch_of([(3, [4]), (2, [1])])
    weight = torch.randn(1, 32, dtype=torch.float64)
    last, mean = (
        engine_of(path, head="score", pooling=pooling, dtype="float64")
        for pooling in ("last", "mean")
    )
    values = engine_of(path, head="value", dtype="float64")
    for engine in (last, mean, values):
        engine.write([("score.weight", (slice(0, 1), slice(0, 32)), weight)], version=0)
    tokens = [t for t, _ in sequences(batch)]
    whole = SequenceSample.from_groups(
        batch.ids,
        {"prompt": [[1], [1]], "completion": [[6], [2]]},
        {
            "prompt": torch.stack([t[0] for t in tokens]),
            "completion": torch.cat([t[1:] for t in tokens]),
        },
    )
    each = values.forward(whole, frozenset({"values"})).sequences("values")
    scores = mean.forward(batch, frozenset({"scores"})).data["scores"]
    torch.testing.assert_close(scores, torch.stack([v.mean() for v in each]), **EXACT)
    torch.testing.assert_close(
        last.forward(batch, frozenset({"scores"})).data["scores"],
        torch.stack([v[-1] for v in each]),
        **EXACT,
    )


@pytest.mark.usefixtures("float64_throughout")
def test_logprobs_are_normalised_over_the_recorded_support(path: Path) -> None:
    batch = batch_of([(4, [2]), (3, [1])])
    tokens = batch.data["completion"].tolist()
    support = [[tokens[0], 7], [tokens[1]], [tokens[2], 4, 5]]
    keys = {"support": [[3], [3]], "support_counts": [[2], [1]]}
    data = {
        "support": torch.tensor([id for ids in support for id in ids]),
        "support_counts": torch.tensor([2, 1, 3]),
    }
    batch = batch.update(SequenceSample.from_groups(batch.ids, keys, data))
    engine = engine_of(path, dtype="float64")
    got = engine.forward(batch, frozenset({"logprobs"}), temperature=2.0).data["logprobs"]
    model = load_exactly(AutoModelForCausalLM, path)
    want = []
    with torch.no_grad():
        for s, (ids, prompt) in enumerate(sequences(batch)):
            logits = model(ids[None]).logits[0] / 2.0
            for j in range(len(ids) - prompt):
                kept = torch.tensor(support[2 * s + j])
                want.append(torch.log_softmax(logits[prompt - 1 + j, kept], dim=-1)[0])
    torch.testing.assert_close(got, torch.stack(want), **EXACT)
    cut = engine.forward(batch, frozenset({"logprobs"}), temperature=2.0, max_tokens=6)
    torch.testing.assert_close(cut.data["logprobs"], got, **EXACT)


def test_what_cannot_be_computed_is_refused(path: Path) -> None:
    engine = engine_of(path)
    with pytest.raises(ConfigError, match="lm head gives"):
        engine.forward(batch_of([(2, [2])]), frozenset({"values"}))
    with pytest.raises(ConfigError, match="max_tokens_per_microbatch=5"):
        engine.forward(batch_of([(2, [4])]), frozenset({"logprobs"}), max_tokens=5)
    with pytest.raises(DataError, match="without any token"):
        engine.forward(batch_of([(0, [0]), (1, [1])]), frozenset({"logprobs"}))
    with pytest.raises(DataError, match="completion"):
        engine.forward(batch_of([(1, [1])]).select(keys=["prompt"]), frozenset({"logprobs"}))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_frozen_roles_hold_their_dtype_alone(path: Path, dtype: str) -> None:
    engine = engine_of(path, trained=False, dtype=dtype)
    assert {str(v.dtype) for _, _, v in engine.read(engine.slices())} == {f"torch.{dtype}"}
    out = engine.forward(batch_of(GROUPS), frozenset({"logprobs"})).data["logprobs"]
    assert out.dtype == torch.float32

    def compute() -> torch.Tensor:
        # made anew each time, so that its weights are rounded too
        exact = engine_of(path, trained=False, dtype="float64")
        return exact.forward(batch_of(GROUPS), frozenset({"logprobs"})).data["logprobs"]

    assert_computed(out, compute, getattr(torch, dtype))
