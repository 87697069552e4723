"""The interface `infer`: token-wise outputs on the data's own tokens, scores on the text where a role reads another form."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from tests.tiny import make_tokenizer
from weft.data.sample import SequenceSample
from weft.data.spec import TokenizerSpec
from weft.data.tokenizer import Tokenizer
from weft.engine.base import Engine
from weft.errors import ConfigError
from weft.interfaces.base import Model
from weft.interfaces.infer import Infer, same_tokens


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    """Two byte-level tokenizers whose ids mean different things: the second has no merges."""
    made = []
    for name, size in (("first", 320), ("second", 262)):
        folder = tmp_path_factory.mktemp(name)
        make_tokenizer(folder, vocab_size=size)
        made.append(Tokenizer.load(TokenizerSpec(), str(folder)))
    return made[0], made[1]


class Scores:
    """An engine that remembers what it read; scores a sequence by its number of completion tokens."""

    def __init__(self) -> None:
        self.read: SequenceSample | None = None
        self.temperature = 0.0

    def forward(self, batch: SequenceSample, want: frozenset[str], *, temperature: float) -> SequenceSample:
        self.read, self.temperature = batch, temperature
        counts = [[1] * len(n) for n in batch.seqlens["completion"]]
        lengths = torch.tensor(batch.lengths["completion"].tolist(), dtype=torch.float32)
        tokens = [n.tolist() for n in batch.seqlens["completion"]]
        zeros = torch.zeros(batch.num_tokens("completion"))
        keys: dict[str, Any] = {"scores": (counts, lengths), "logprobs": (tokens, zeros)}
        made = {key: keys[key] for key in want}
        return SequenceSample.from_groups(
            batch.ids, {k: v[0] for k, v in made.items()}, {k: v[1] for k, v in made.items()}
        )


def model_of(engine: Scores, own: Tokenizer, data: Tokenizer) -> Model:
    return Model("rew", cast(Engine, engine), own, data, "cpu", "float32")


def batch_of(tokenizer: Tokenizer) -> SequenceSample:
    """One prompt with an ended and a cut completion, another prompt with one that is ended."""
    eos = tokenizer.require_eos()
    prompts = [tokenizer.encode("What is two?"), tokenizer.encode("Once upon")]
    completions = [
        [[*tokenizer.encode(" The answer"), eos], tokenizer.encode(" Lily")],
        [[*tokenizer.encode(" a time"), eos]],
    ]
    return SequenceSample.from_groups(
        ["a", "b"],
        {"prompt": [[len(p)] for p in prompts], "completion": [[len(c) for c in g] for g in completions]},
        {"prompt": [t for p in prompts for t in p], "completion": [t for g in completions for c in g for t in c]},
    )


def test_a_role_of_the_same_tokens_reads_the_batch_as_it_is(tokenizers: tuple[Tokenizer, Tokenizer]) -> None:
    first, _ = tokenizers
    engine, batch = Scores(), batch_of(first)
    result = Infer(["logprobs"], temperature=0.5).inference(model_of(engine, first, first), batch)
    assert engine.read is batch
    assert engine.temperature == 0.5
    assert result.outputs is not None and result.outputs.keys == ("logprobs",)


def test_a_role_of_other_tokens_reads_the_text_in_its_own_form(tokenizers: tuple[Tokenizer, Tokenizer]) -> None:
    first, second = tokenizers
    assert not same_tokens(first, second)
    engine = Scores()
    interface = Infer(["scores"], prompt_prefix="Q: ", prompt_suffix=" A:")
    result = interface.inference(model_of(engine, second, first), batch_of(first))
    assert engine.read is not None
    prompts = [second.decode(p.tolist()) for p in engine.read.sequences("prompt")]
    completions = [second.decode(c.tolist()) for c in engine.read.sequences("completion")]
    assert prompts == ["Q: What is two? A:", "Q: Once upon A:"]
    assert completions == [" The answer</s>", " Lily", " a time</s>"]
    assert result.outputs is not None
    assert [n.tolist() for n in result.outputs.seqlens["scores"]] == [[1, 1], [1]]
    assert result.outputs.data["scores"].tolist() == [len(c) for c in engine.read.sequences("completion")]
    assert {"reward", "reward_std", "frac_reward_zero_std"} <= result.metrics.keys()


def test_the_form_alone_makes_a_role_read_text(tokenizers: tuple[Tokenizer, Tokenizer]) -> None:
    first, _ = tokenizers
    engine, batch = Scores(), batch_of(first)
    Infer(["scores"], prompt_prefix="Q: ").inference(model_of(engine, first, first), batch)
    assert engine.read is not None and engine.read is not batch


def test_values_a_token_are_refused_across_tokenizers(tokenizers: tuple[Tokenizer, Tokenizer]) -> None:
    first, second = tokenizers
    with pytest.raises(ConfigError, match="logprobs"):
        Infer(["logprobs"]).inference(model_of(Scores(), second, first), batch_of(first))
