"""The interface `infer`: token-wise outputs on the data's own tokens, scores on the text where a
role reads another form.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from tests.tiny import make_tokenizer
from weft.data.sample import SequenceSample
from weft.data.spec import TokenizerSpec
from weft.data.tokenizer import Tokenizer
from weft.engine.base import Engine
from weft.errors import ConfigError
from weft.interfaces.base import Model
from weft.interfaces.infer import InferInterface, OutputSums, have_same_tokens
from weft.models.network.packed import TopIds


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
        self.max_tokens = 0
        self.top: TopIds | None = None

    def forward(
        self,
        batch: SequenceSample,
        want: frozenset[str],
        *,
        temperature: float,
        top: TopIds | None,
        max_tokens: int,
    ) -> SequenceSample:
        self.max_tokens = max_tokens
        self.read, self.temperature, self.top = batch, temperature, top
        counts = [[1] * len(n) for n in batch.seqlens["completion"]]
        lengths = torch.tensor(batch.lengths["completion"].tolist(), dtype=torch.float32)
        tokens = [n.tolist() for n in batch.seqlens["completion"]]
        zeros = torch.zeros(batch.num_tokens("completion"))
        keys: dict[str, Any] = {"scores": (counts, lengths), "logprobs": (tokens, zeros)}
        keys |= {
            "top_ids": (tokens, zeros[:, None].int()),
            "top_logprobs": (tokens, zeros[:, None].repeat(1, 2)),
        }
        made = {key: keys[key] for key in want}
        return SequenceSample.from_groups(
            batch.ids, {k: v[0] for k, v in made.items()}, {k: v[1] for k, v in made.items()}
        )


class ScoresOfTwoRanks(Scores):
    """The rank beside this one has scored one completion of a third id with 10."""

    def gather(self, own: OutputSums) -> list[OutputSums]:
        return [own, OutputSums(sums={}, scores=np.array([10.0]), owners=["c"], ids=1, cut=None)]


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
        {
            "prompt": [[len(p)] for p in prompts],
            "completion": [[len(c) for c in g] for g in completions],
        },
        {
            "prompt": [t for p in prompts for t in p],
            "completion": [t for g in completions for c in g for t in c],
        },
    )


def test_metrics_are_those_of_all_ranks(tokenizers: tuple[Tokenizer, Tokenizer]) -> None:
    first, _ = tokenizers
    batch = batch_of(first)
    own = [float(n) for group in batch.seqlens["completion"] for n in group]
    made = InferInterface(["scores"]).inference(model_of(ScoresOfTwoRanks(), first, first), batch)
    assert made.metrics["reward"] == pytest.approx(np.mean([*own, 10.0]))
    alone = InferInterface(["scores"]).inference(model_of(Scores(), first, first), batch)
    assert alone.metrics["reward"] == pytest.approx(np.mean(own))


def test_a_role_of_the_same_tokens_reads_the_batch_as_it_is(
    tokenizers: tuple[Tokenizer, Tokenizer],
) -> None:
    first, _ = tokenizers
    engine, batch = Scores(), batch_of(first)
    result = InferInterface(["logprobs"], temperature=0.5).inference(
        model_of(engine, first, first), batch
    )
    assert engine.read is batch
    assert engine.temperature == 0.5
    assert result.outputs is not None and result.outputs.keys == ("logprobs",)


def test_a_role_of_other_tokens_reads_the_text_in_its_own_form(
    tokenizers: tuple[Tokenizer, Tokenizer],
) -> None:
    first, second = tokenizers
    assert not have_same_tokens(first, second)
    engine = Scores()
    interface = InferInterface(["scores"], prompt_prefix="Q: ", prompt_suffix=" A:")
    result = interface.inference(model_of(engine, second, first), batch_of(first))
    assert engine.read is not None
    prompts = [second.decode(p.tolist()) for p in engine.read.sequences("prompt")]
    completions = [second.decode(c.tolist()) for c in engine.read.sequences("completion")]
    assert prompts == ["Q: What is two? A:", "Q: Once upon A:"]
    assert completions == [" The answer</s>", " Lily", " a time</s>"]
    assert result.outputs is not None
    assert [n.tolist() for n in result.outputs.seqlens["scores"]] == [[1, 1], [1]]
    assert result.outputs.data["scores"].tolist() == [
        len(c) for c in engine.read.sequences("completion")
    ]
    assert {"reward", "reward_std", "frac_reward_zero_std"} <= result.metrics.keys()


def test_the_form_alone_makes_a_role_read_text(tokenizers: tuple[Tokenizer, Tokenizer]) -> None:
    first, _ = tokenizers
    engine, batch = Scores(), batch_of(first)
    InferInterface(["scores"], prompt_prefix="Q: ").inference(model_of(engine, first, first), batch)
    assert engine.read is not None and engine.read is not batch


def test_values_a_token_are_refused_across_tokenizers(
    tokenizers: tuple[Tokenizer, Tokenizer],
) -> None:
    first, second = tokenizers
    with pytest.raises(ConfigError, match="logprobs"):
        InferInterface(["logprobs"]).inference(model_of(Scores(), second, first), batch_of(first))


def test_the_likeliest_ids_are_asked_for_of_those_that_the_tokenizer_knows(
    tokenizers: tuple[Tokenizer, Tokenizer],
) -> None:
    """All but one of them at most, so that in no network nothing is left over."""
    first, second = tokenizers
    for count, asked in ((8, 8), (100_000, first.vocab_size - 1)):
        engine = Scores()
        outputs = InferInterface(["top_ids", "top_logprobs"], top_k=count).inference(
            model_of(engine, first, first), batch_of(first)
        )
        assert engine.top == TopIds(asked, below=first.vocab_size)
        assert outputs.outputs is not None and set(outputs.outputs.keys) == {
            "top_ids",
            "top_logprobs",
        }
    interface = InferInterface(["top_ids"], top_k=8)
    with pytest.raises(ConfigError, match="cannot give top_ids for the data's tokens"):
        interface.inference(model_of(Scores(), second, first), batch_of(first))
    with pytest.raises(ConfigError, match="cannot give top_ids"):
        interface.check_tokens("teacher", second, first)
    interface.check_tokens("teacher", first, first)
    InferInterface(["scores"]).check_tokens(
        "rew", second, first
    )  # one score a completion is of any tokens


@pytest.mark.parametrize(
    ("outputs", "top_k"), [(["top_ids"], None), (["top_logprobs"], 0), (["logprobs"], 8)]
)
def test_how_many_ids_is_said_where_ids_are_asked_for(
    outputs: list[Any], top_k: int | None
) -> None:
    with pytest.raises(ConfigError, match=rf"top_k={top_k} with the outputs {outputs[0]}"):
        InferInterface(outputs, top_k=top_k)


CHATML = (
    "{{ bos_token }}{% for m in messages %}{{ '[' + m.role + ']' + m.content + '</s>' }}{% endfor "
    "%}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
QUESTION = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "What is two?"}]


def with_messages(batch: SequenceSample) -> SequenceSample:
    """The batch whose first prompt was made of messages."""
    return replace(batch, metadata={"prompt_messages": (QUESTION, None)})


def test_messages_are_rendered_in_the_roles_own_template(
    tokenizers: tuple[Tokenizer, Tokenizer],
) -> None:
    data, own = tokenizers
    own = replace(own, hf=deepcopy(own.hf))
    own.hf.chat_template = CHATML
    engine = Scores()
    batch = with_messages(batch_of(data))
    InferInterface(outputs=["scores"]).inference(model_of(engine, own, data), batch)
    assert engine.read is not None
    prompts = [own.decode(ids.tolist()) for ids in engine.read.sequences("prompt")]
    assert prompts == ["<s>[system]Be kind.</s>[user]What is two?</s>[assistant]", "Once upon"]
    said = [own.decode(ids.tolist()) for ids in engine.read.sequences("completion")]
    # the second was cut by its length: no end
    assert said == [" The answer</s>", " Lily", " a time</s>"]
    whole = own.encode_chat([*QUESTION, {"role": "assistant", "content": " The answer"}])
    first = torch.cat([engine.read.sequences("prompt")[0], engine.read.sequences("completion")[0]])
    assert first.tolist() == whole


def test_a_form_surrounds_the_text_that_the_data_kept(
    tokenizers: tuple[Tokenizer, Tokenizer],
) -> None:
    """EasyLM's hf_prompt: the prompt's tokens hold the policy's own form already."""
    data, own = tokenizers
    engine = Scores()
    batch = replace(batch_of(data), metadata={"prompt_text": ("two?", None)})
    InferInterface(
        outputs=["scores"], prompt_prefix="Human: ", prompt_suffix="\nAssistant: "
    ).inference(model_of(engine, own, data), batch)
    assert engine.read is not None
    prompts = [own.decode(ids.tolist()) for ids in engine.read.sequences("prompt")]
    assert prompts == ["Human: two?\nAssistant: ", "Human: Once upon\nAssistant: "]


def test_messages_need_a_template_or_a_form(tokenizers: tuple[Tokenizer, Tokenizer]) -> None:
    data, own = tokenizers
    bare = replace(own, hf=deepcopy(own.hf))
    bare.hf.chat_template = None
    batch = with_messages(batch_of(data))
    with pytest.raises(
        ConfigError, match=r"role 'rew' has .* no chat template.*set rew.tokenizer.chat_template"
    ):
        InferInterface(outputs=["scores"]).inference(model_of(Scores(), bare, data), batch)
    engine = Scores()
    InferInterface(outputs=["scores"], prompt_suffix=" =").inference(
        model_of(engine, bare, data), batch
    )
    assert engine.read is not None
    assert bare.decode(engine.read.sequences("prompt")[0].tolist()) == "What is two? ="


def test_one_vocabulary_with_another_template_is_another_form(
    tokenizers: tuple[Tokenizer, Tokenizer],
) -> None:
    data, _ = tokenizers
    own = replace(data, hf=deepcopy(data.hf))
    engine, batch = Scores(), with_messages(batch_of(data))
    InferInterface(outputs=["scores"]).inference(model_of(engine, own, data), batch)
    assert engine.read is batch  # the same template
    own.hf.chat_template = CHATML
    InferInterface(outputs=["scores"]).inference(model_of(engine, own, data), batch)
    assert engine.read is not batch
    InferInterface(outputs=["logprobs"]).inference(model_of(engine, own, data), batch)
    assert engine.read is batch  # values a token are those of the batch's tokens


def test_templates_that_end_turns_with_nothing(tokenizers: tuple[Tokenizer, Tokenizer]) -> None:
    data, own = tokenizers
    plain = replace(own, hf=deepcopy(own.hf))
    plain.hf.chat_template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    engine = Scores()
    InferInterface(outputs=["scores"]).inference(
        model_of(engine, plain, data), with_messages(batch_of(data))
    )
    assert engine.read is not None
    said = [plain.decode(ids.tolist()) for ids in engine.read.sequences("completion")]
    assert said[0].endswith("The answer\n</s>") and said[1].endswith("Lily\n")


def templated(tokenizer: Tokenizer, template: str | None) -> Tokenizer:
    """The tokenizer with another chat template."""
    own = replace(tokenizer, hf=deepcopy(tokenizer.hf))
    own.hf.chat_template = template
    return own


def read_by(
    own: Tokenizer, data: Tokenizer, batch: SequenceSample
) -> tuple[list[str], dict[str, float]]:
    """(each sequence as the role read it, the metrics)."""
    engine = Scores()
    result = InferInterface(outputs=["scores"]).inference(model_of(engine, own, data), batch)
    assert engine.read is not None
    prompts = [ids.tolist() for ids in engine.read.sequences("prompt")]
    pairs = zip(
        engine.read.group_of("completion"), engine.read.sequences("completion"), strict=True
    )
    return [own.decode([*prompts[index], *ids.tolist()]) for index, ids in pairs], dict(
        result.metrics
    )


def test_what_was_finished_has_an_end_whatever_ended_it(
    tokenizers: tuple[Tokenizer, Tokenizer],
) -> None:
    """A stop text or another stop id ends a completion as EOS does; an end token at the length
    limit does, too.
    """
    data, own = tokenizers
    batch = with_messages(batch_of(data))
    counts = [n.tolist() for n in batch.seqlens["completion"]]
    flags = SequenceSample.from_groups(
        batch.ids,
        {"finished": [[1] * len(n) for n in counts]},
        {"finished": torch.tensor([1.0, 1.0, 0.0])},
    )
    said, _ = read_by(templated(own, CHATML), data, batch.update(flags))
    assert [text.endswith("</s>") for text in said] == [True, True, False]
    assert said[1].endswith("[assistant] Lily</s>")
    plain = replace(batch, metadata={}).update(flags)
    said, _ = read_by(own, data, plain)
    assert said == ["What is two? The answer</s>", "What is two? Lily</s>", "Once upon a time"]


SPACED = CHATML.replace(
    "m.content + '</s>'", "(' ' + m.content + ' ' if m.role == 'assistant' else m.content) + '</s>'"
)


def test_blanks_around_a_reply_are_the_policys_own(tokenizers: tuple[Tokenizer, Tokenizer]) -> None:
    first, second = tokenizers
    data, own = templated(first, SPACED), templated(second, CHATML)
    talk = [*QUESTION, {"role": "assistant", "content": "It is 2."}]
    prompt = data.encode_chat(QUESTION, add_generation_prompt=True)
    completions = [
        data.encode_chat(talk)[len(prompt) :],
        data.encode(" It is "),
        data.encode("\nIt"),
    ]
    batch = SequenceSample.from_groups(
        ["a"],
        {"prompt": [[len(prompt)]], "completion": [[len(ids) for ids in completions]]},
        {"prompt": prompt, "completion": [id for ids in completions for id in ids]},
        {"prompt_messages": (QUESTION,)},
    )
    said, _ = read_by(own, data, batch)
    asked = own.render(QUESTION, add_generation_prompt=True)
    # what was cut keeps its last blank
    assert said == [own.render(talk), f"{asked}It is ", f"{asked}\nIt"]
    kept, _ = read_by(own, templated(first, CHATML), batch)
    assert kept[0] == f"{asked} It is 2. </s>"  # another policy wrote them itself


CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "look_up", "arguments": {}}]}


@pytest.mark.parametrize(
    ("template", "messages", "wrong"),
    [
        (
            CHATML.replace(
                "'[' + m.role",
                "raise_exception('no system') if m.role == 'system' else '[' + m.role",
            ),
            QUESTION,
            "refuses these messages: no system",
        ),
        (
            CHATML,
            [QUESTION[1], CALL, {"role": "tool", "content": "2"}],
            "not render the assistant's tool_calls",
        ),
        (CHATML.replace("m.content", "m.content[0].text"), QUESTION, "as a list of parts"),
    ],
)
def test_prompts_that_a_roles_template_cannot_show_name_role_and_row(
    tokenizers: tuple[Tokenizer, Tokenizer],
    template: str,
    messages: list[dict[str, Any]],
    wrong: str,
) -> None:
    data, own = tokenizers
    batch = replace(batch_of(data), metadata={"prompt_messages": (None, messages)})
    with pytest.raises(
        ConfigError,
        match=rf"role 'rew' .* row 'b': .*{wrong}.*rew.tokenizer.chat_template.*rew.prompt_suffix",
    ):
        read_by(templated(own, template), data, batch)


def test_parts_of_a_prompt_that_a_role_does_not_read_are_counted(
    tokenizers: tuple[Tokenizer, Tokenizer],
) -> None:
    data, own = tokenizers
    batch = with_messages(batch_of(data))
    _, metrics = read_by(templated(own, CHATML), data, batch)
    assert "prompts_in_part" not in metrics
    deaf = templated(
        own, CHATML.replace("for m in messages", "for m in messages if m.role != 'system'")
    )
    assert read_by(deaf, data, batch)[1]["prompts_in_part"] == 0.5
    tools = [{"type": "function", "function": {"name": "f"}}]
    with_tools = replace(
        batch, metadata={"prompt_messages": (QUESTION, QUESTION), "tools": (None, tools)}
    )
    assert read_by(templated(own, CHATML), data, with_tools)[1]["prompts_in_part"] == 0.5
