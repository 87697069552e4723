"""The generator on a tiny network, against recomputation and against itself in other company."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.engine.generation.common import (
    CPU,
    EOS,
    LLAMA,
    Key,
    Spy,
    assert_logprobs,
    assert_same_rows,
    build,
    drain,
    generate,
    opened,
    tokens,
)
from weft.data.tokenizer import Tokenizer
from weft.engine.base import Partial, Request, TokenEvent
from weft.engine.generation.caches import choose_default_budget
from weft.engine.generation.generate import StopTextDetector, open_generator
from weft.engine.generation.scheduler import GenerationBudget
from weft.engine.spec import GenerationSpec
from weft.errors import ConfigError, DataError, RunError
from weft.models.network.config import TransformerConfig
from weft.models.network.packed import pack
from weft.models.network.transformer import Transformer
from weft.randomness import draw_uniform


def prompts(count: int = 5, samples: int = 3) -> list[Request]:
    random = np.random.default_rng(1)
    made = [random.integers(6, 61, size=random.integers(1, 70)).tolist() for _ in range(count)]
    return [
        Request(f"p{i}", k, prompt, step=2) for i, prompt in enumerate(made) for k in range(samples)
    ]


def test_draws_are_the_documented_hash_on_the_recomputed_distribution() -> None:
    network, spec = build(), GenerationSpec(max_new_tokens=20, temperature=0.8, seed=11)
    request = Request("a", 3, [9, 8, 7], step=4)
    [row] = generate(network, spec, [request]).values()
    for position, event in enumerate(row):
        known = [*request.prompt, *(e.token for e in row[:position])]
        with torch.no_grad():
            logits = network.next_token_logits(
                network.compute_hidden(pack([torch.tensor([*known, 0])]))[len(known) - 1][None]
            )
        cdf = (logits[0] / 0.8).softmax(-1).cumsum(-1)
        number = draw_uniform(11, "sample", 4, "a", 3, position)
        assert event.token == int((cdf <= number).sum())
        assert event.version == 7


def test_greedy_is_the_argmax_of_a_full_forward_pass() -> None:
    network = build()
    rows = generate(network, GenerationSpec(max_new_tokens=25, greedy=True), prompts(4, 1))
    for request in prompts(4, 1):
        known = list(request.prompt)
        for event in rows[request.id, 0]:
            with torch.no_grad():
                states = network.compute_hidden(pack([torch.tensor([*known, 0])]))[len(known) - 1]
            assert event.token == int(network.next_token_logits(states[None]).argmax())
            known.append(event.token)


@pytest.mark.parametrize(
    "budget",
    [
        GenerationBudget(max_sequences=1),
        GenerationBudget(max_sequences=4),
        GenerationBudget(max_prefill_tokens=30),
        GenerationBudget(max_tokens=500),
    ],
    ids=["alone", "four", "little prefill", "short memory"],
)
def test_a_completion_does_not_depend_on_its_company(budget: GenerationBudget) -> None:
    network, spec = (
        build(),
        GenerationSpec(max_new_tokens=60, seed=3, top_p=0.9, record_support=True),
    )
    together = generate(network, spec, prompts())
    apart = generate(network, spec, prompts()[::-1], budget)
    assert_same_rows(together, apart)


def test_samples_differ_by_k_step_and_seed() -> None:
    network, spec = build(), GenerationSpec(max_new_tokens=30, seed=1)
    base = Request("a", 0, [9, 8, 7])
    others = [
        dataclasses.replace(base, k=1),
        dataclasses.replace(base, id="b"),
        dataclasses.replace(base, step=1),
    ]
    drawn = [next(iter(tokens(generate(network, spec, [r])).values())) for r in (base, *others)]
    drawn.append(
        next(iter(tokens(generate(network, dataclasses.replace(spec, seed=2), [base])).values()))
    )
    assert len({tuple(row) for row in drawn}) == 5


@pytest.mark.parametrize(
    "spec",
    [
        GenerationSpec(max_new_tokens=80),
        GenerationSpec(max_new_tokens=80, temperature=0.6, min_new_tokens=40),
        GenerationSpec(
            max_new_tokens=80, temperature=1.4, top_k=12, top_p=0.9, record_support=True
        ),
        GenerationSpec(max_new_tokens=80, greedy=True),
    ],
    ids=["plain", "warm and long", "limited", "greedy"],
)
def test_log_probs_as_sampled_are_those_that_training_recomputes(spec: GenerationSpec) -> None:
    network = build(dtype=torch.float32)
    rows = generate(network, spec, prompts())
    assert sum(map(len, rows.values())) > 200
    assert_logprobs(network, rows, prompts(), spec)


@pytest.mark.parametrize(
    "spec", [GenerationSpec(max_new_tokens=40, seed=2, top_k=9, record_support=True)]
)
def test_what_was_aborted_goes_on_exactly(spec: GenerationSpec) -> None:
    network, requests = build(), prompts(3, 2)
    expected = generate(network, spec, requests)
    seen: dict[Key, list[TokenEvent]] = {}
    with opened(network, spec) as generator:
        generator.submit(requests)
        for _ in range(4):
            for event in generator.step():
                seen.setdefault((event.id, event.k), []).append(event)
        partials = generator.abort(["p0", "p2", "unknown"])
        for partial in partials:
            row = seen[partial.id, partial.k]
            assert list(partial.tokens) == [event.token for event in row]
            assert list(partial.logprobs) == [event.logprob for event in row]
            assert list(partial.versions) == [7] * len(row)
            assert [tuple(support) for support in partial.supports] == [
                event.support for event in row
            ]
        rest = drain(generator)
        assert all(key[0] == "p1" for key in rest)
        generator.submit([again(requests, partial) for partial in partials])
        rest |= drain(generator)
    joined = {key: seen.get(key, []) + rest.get(key, []) for key in expected}
    assert tokens(joined) == tokens(expected)
    assert [row[-1].finish for row in joined.values()] == [
        row[-1].finish for row in expected.values()
    ]


def again(requests: list[Request], partial: Partial) -> Request:
    [request] = [r for r in requests if (r.id, r.k) == (partial.id, partial.k)]
    return dataclasses.replace(request, generated=partial)


@pytest.mark.parametrize(
    ("done", "message"),
    [
        (
            Partial("a", 0, [9] * 3, [0.0] * 3, [1] * 3),
            "completion 0 of 'a': generated has 3 tokens and at most 3 are",
        ),
        (
            Partial("a", 0, [9] * 30, [0.0] * 30, [1] * 30),
            "generated has 30 tokens and at most 3 are",
        ),
        (
            Partial("a", 1, [9], [0.0], [1]),
            "completion 0 of 'a': generated is a part of completion 1 of 'a'",
        ),
        (
            Partial("b", 0, [9], [0.0], [1]),
            "completion 0 of 'a': generated is a part of completion 0 of 'b'",
        ),
        (
            Partial("a", 0, [9, 8], [0.0], [1, 1]),
            "generated has 2 tokens, 1 log-probs and 2 versions",
        ),
    ],
)
def test_what_cannot_go_on_is_refused(done: Partial, message: str) -> None:
    with opened(
        build(), GenerationSpec(max_new_tokens=10), GenerationBudget(max_tokens=20)
    ) as generator:
        with pytest.raises(DataError, match=re.escape(message)):
            generator.submit([Request("a", 0, [9, 8], generated=done, max_new_tokens=3)])
        assert generator.idle


def test_one_prompt_is_prefilled_once_and_decodes_go_together() -> None:
    spy = Spy(build())
    spec = GenerationSpec(max_new_tokens=3, min_new_tokens=3)
    with open_generator(spy, spec, device=CPU, version=0, eos_ids=[EOS]) as generator:
        generator.submit(
            [Request("a", k, [9] * 50) for k in range(18)] + [Request("b", 0, [8] * 20)]
        )
        drain(generator)
    assert spy.passes == [70, 19, 19]


def test_changed_weights_are_computed_again_and_versions_say_so() -> None:
    spec, requests = GenerationSpec(max_new_tokens=30, min_new_tokens=30, seed=4), prompts(3, 2)
    before, after = build(seed=0), build(seed=1)
    with opened(before, spec) as generator:
        generator.submit(requests)
        for _ in range(5):
            generator.step()
        partials = generator.abort([request.id for request in requests])
    expected = generate(after, spec, [again(requests, partial) for partial in partials])

    changing = build(seed=0)
    with opened(changing, spec) as generator:
        generator.submit(requests)
        for _ in range(5):
            generator.step()
        changing.load_state_dict(after.state_dict())
        generator.weights_changed(8, keep_kv=False)
        rest = drain(generator)
    assert tokens(rest) == tokens(expected)
    assert {event.version for row in rest.values() for event in row} == {8}


@pytest.mark.parametrize("count", [1, 3, 16, 40])
def test_passes_have_the_rows_that_a_cpus_usual_kernels_need(count: int) -> None:
    spy = Spy(build())
    with open_generator(
        spy, GenerationSpec(max_new_tokens=4), device=CPU, version=0, eos_ids=[]
    ) as generator:
        generator.submit([Request(f"p{i}", 0, [6 + i]) for i in range(count)])
        drain(generator)
    assert spy.passes == [max(count, 4)] * 4


def test_kept_keys_and_values_are_not_computed_again() -> None:
    spy = Spy(build())
    with open_generator(
        spy, GenerationSpec(max_new_tokens=9), device=CPU, version=0, eos_ids=[]
    ) as generator:
        generator.submit([Request("a", 0, [9] * 30)])
        generator.step()
        generator.weights_changed(1, keep_kv=True)
        [event] = generator.step()
        assert (event.version, spy.passes) == (1, [30, 4])
        generator.weights_changed(2, keep_kv=False)
        generator.step()
        assert spy.passes == [30, 4, 32]


def test_ends_by_end_token_by_stop_id_or_by_length() -> None:
    network = build()
    spec = GenerationSpec(max_new_tokens=200, stop_ids=[6], seed=5)
    rows = generate(network, spec, prompts(6, 4))
    assert {row[-1].token for row in rows.values() if row[-1].finish == "stop"} == {EOS, 6}
    for row in rows.values():
        assert [event.finish for event in row[:-1]] == [None] * (len(row) - 1)
        assert not {EOS, 6} & {event.token for event in row[:-1]}, "nothing comes after an end"
    short = generate(network, dataclasses.replace(spec, max_new_tokens=2), prompts(6, 4))
    assert {
        row[-1].finish for row in short.values() if len(row) == 2 and row[-1].token not in (EOS, 6)
    } == {"length"}


def test_no_end_before_min_new_tokens() -> None:
    network = build()
    spec = GenerationSpec(max_new_tokens=200, min_new_tokens=30, seed=5)
    rows = generate(network, spec, prompts(6, 4))
    assert min(len(row) for row in rows.values()) >= 31, "thirty tokens and then the end token"
    assert any(row[-1].finish == "stop" for row in rows.values())


def test_a_request_may_want_fewer_tokens() -> None:
    requests = [Request("a", 0, [9], max_new_tokens=3), Request("b", 0, [9], max_new_tokens=50)]
    rows = generate(build(), GenerationSpec(max_new_tokens=10, min_new_tokens=10), requests)
    assert {key: len(row) for key, row in rows.items()} == {("a", 0): 3, ("b", 0): 10}


def learned() -> TransformerConfig:
    return dataclasses.replace(LLAMA, rope=None, learned_positions=22, position_offset=2)


def test_completions_end_where_learned_positions_end() -> None:
    rows = generate(
        build(learned()),
        GenerationSpec(max_new_tokens=50, min_new_tokens=50),
        [Request("a", 0, [9] * 15)],
    )
    assert [(len(row), row[-1].finish) for row in rows.values()] == [(5, "length")]


def test_prompts_that_cannot_go_on_are_refused() -> None:
    with opened(build(learned()), GenerationSpec()) as generator:
        with pytest.raises(
            DataError, match=r"'long': a prompt of 20 tokens leaves no room in the 20 positions"
        ):
            generator.submit([Request("long", 0, [9] * 20)])
        with pytest.raises(
            DataError, match=r"'none': the prompt is empty.*tokenizer\.add_bos_token"
        ):
            generator.submit([Request("none", 0, [])])
        with pytest.raises(
            DataError, match=r"'nothing': max_new_tokens=0; a completion has at least 1 token"
        ):
            generator.submit([Request("nothing", 0, [9], max_new_tokens=0)])
        for unknown in (-1, 61, 1 << 40):
            with pytest.raises(
                DataError,
                match=rf"'odd': the prompt holds token {unknown}, and the model knows 0 to 60",
            ):
                generator.submit([Request("odd", 0, [5, unknown, 7])])
        assert generator.idle


def test_logits_that_are_not_finite_name_the_completion() -> None:
    network = build()
    network.norm.weight.data[0] = float("nan")
    with pytest.raises(
        RunError, match=r"not finite for completion 1 of 'a' at token 0 \(weight version 7\)"
    ):
        generate(network, GenerationSpec(), [Request("a", 1, [9, 8])])


def test_no_more_support_is_recorded_than_training_takes() -> None:
    spec = GenerationSpec(top_p=0.99, max_support=2, record_support=True, max_new_tokens=3)
    events = [event for row in generate(build(), spec, prompts()).values() for event in row]
    assert max(len(event.support) for event in events) == 2
    assert all(event.token in event.support for event in events)


def test_the_network_is_in_its_old_mode_afterwards_and_has_no_gradients() -> None:
    network = build()
    with opened(network, GenerationSpec(max_new_tokens=2)) as generator:
        assert not network.training
        generator.submit([Request("a", 0, [9])])
        generator.step()
    assert network.training
    assert all(parameter.grad is None for parameter in network.parameters())


def test_the_default_budget_is_a_share_of_memory() -> None:
    small = choose_default_budget(LLAMA, CPU, torch.float32)
    large = choose_default_budget(dataclasses.replace(LLAMA, num_layers=4), CPU, torch.float32)
    assert small.max_tokens // 2 == large.max_tokens


# -- stop texts


def letters(*special: str) -> Tokenizer:
    """Byte-level, one token a byte; its ids are the 61 that the tiny network can say."""
    said = b"abcdefghijklmnopqrstuvwxyz .,!?\n0123456789ABCDEFGH" + "é€".encode()
    vocab = {f"<{i}>": i for i in range(6)} | {
        printable(byte): 6 + i for i, byte in enumerate(said)
    }
    assert len(vocab) == LLAMA.vocab_size
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer, raw.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    return Tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=raw, additional_special_tokens=list(special))
    )


def printable(byte: int) -> str:
    """GPT-2's stand-in for a byte: itself where it prints, else the next free character from U+0100
    on.
    """
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return (
        chr(byte)
        if byte in kept
        else chr(256 + [b for b in range(256) if b not in kept].index(byte))
    )


def say(network: Transformer, tokenizer: Tokenizer, spec: GenerationSpec) -> list[TokenEvent]:
    with open_generator(
        network, dataclasses.replace(spec, tokenizer=tokenizer), device=CPU, version=0, eos_ids=[]
    ) as generator:
        generator.submit([Request("a", 0, tokenizer.encode("once"))])
        return drain(generator)["a", 0]


def test_a_special_token_can_be_a_stop_text() -> None:
    """Such as `<|im_end|>`, which the text that people see leaves out."""
    tokenizer = letters("<3>")
    assert tokenizer.decode([3, 7], skip_special=True) == tokenizer.decode([7])
    stop = StopTextDetector(["<3>"], tokenizer)
    assert [stop.feed(token) for token in (7, 8, 3)] == [False, False, True]


def test_a_stop_text_ends_the_completion_where_it_is_complete() -> None:
    network, tokenizer = build(), letters()
    free = [
        event.token for event in say(network, tokenizer, GenerationSpec(max_new_tokens=40, seed=1))
    ]
    text = tokenizer.decode(free[20:23])
    assert len(text) >= 3 and "\ufffd" not in text
    row = say(
        network, tokenizer, GenerationSpec(max_new_tokens=40, seed=1, stop=["never said", text])
    )
    said = tokenizer.decode([event.token for event in row])
    assert row[-1].finish == "stop"
    assert said.endswith(text) and said.count(text) == 1, "the stop text is part of the completion"
    late = say(
        network,
        tokenizer,
        GenerationSpec(max_new_tokens=40, min_new_tokens=24, seed=1, stop=[text]),
    )
    assert len(late) > 23


def test_a_character_that_spans_tokens_is_found() -> None:
    tokenizer = letters()
    ids = tokenizer.encode("ab€é")
    assert len(ids) == 7
    found = StopTextDetector(["€"], tokenizer)
    assert [found.feed(id) for id in ids] == [False] * 4 + [True] + [False] * 2
    across = StopTextDetector(["b€é"], tokenizer)
    assert [across.feed(id) for id in ids] == [False] * 6 + [True]


def test_an_aborted_completion_remembers_its_text() -> None:
    network, tokenizer = build(), letters()
    free = [
        event.token for event in say(network, tokenizer, GenerationSpec(max_new_tokens=40, seed=1))
    ]
    spec = GenerationSpec(max_new_tokens=40, seed=1, stop=[tokenizer.decode(free[20:23])])
    expected = say(network, tokenizer, spec)
    request = Request("a", 0, tokenizer.encode("once"))
    with open_generator(
        network, dataclasses.replace(spec, tokenizer=tokenizer), device=CPU, version=0, eos_ids=[]
    ) as generator:
        generator.submit([request])
        seen = [event for _ in range(len(expected) - 1) for event in generator.step()]
        generator.submit([again([request], partial) for partial in generator.abort(["a"])])
        seen += generator.step()
    assert [event.token for event in seen] == [event.token for event in expected]
    assert seen[-1].finish == "stop"


def test_stop_texts_without_a_tokenizer_are_refused() -> None:
    with (
        pytest.raises(ConfigError, match=r"gen\.stop=.*need a tokenizer"),
        opened(build(), GenerationSpec(stop=["x"])),
    ):
        pass
