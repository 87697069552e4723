"""Requests that bring their own settings, side by side in one generator."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tests.engine.generation.common import EOS, Key, build, drain, generate, near, opened, tokens
from weft.engine.base import Request, TokenEvent
from weft.engine.generation.sampling import SettingsTable
from weft.engine.spec import GenerationSpec
from weft.errors import ConfigError

OWN = GenerationSpec(max_new_tokens=30, seed=4)
KINDS = {
    "plain": OWN,
    "cool": GenerationSpec(max_new_tokens=30, temperature=0.4),
    "greedy": GenerationSpec(max_new_tokens=25, greedy=True),
    "top-k": GenerationSpec(max_new_tokens=30, top_k=4),
    "top-p": GenerationSpec(max_new_tokens=30, top_p=0.5),
    "min-p": GenerationSpec(max_new_tokens=30, min_p=0.3),
    "long": GenerationSpec(max_new_tokens=40, min_new_tokens=35),
    "ends": GenerationSpec(max_new_tokens=40, stop_ids=[7, 8, 9, 10, 11, 12]),
}


def requests(*, own: bool) -> list[Request]:
    return [
        Request(name, k, [9, 20 + i, 33], sampling=spec if own else None)
        for i, (name, spec) in enumerate(KINDS.items())
        for k in range(3)
    ]


@pytest.mark.parametrize("record", [False, True])
def test_each_request_is_sampled_as_if_the_generator_had_its_settings(record: bool) -> None:
    network = build()
    expected: dict[Key, list[TokenEvent]] = {}
    for name, spec in KINDS.items():
        alone = dataclasses.replace(spec, seed=OWN.seed, record_support=record)
        expected |= generate(network, alone, [r for r in requests(own=False) if r.id == name])
    mixed = generate(network, dataclasses.replace(OWN, record_support=record), requests(own=True))
    assert tokens(mixed) == tokens(expected)
    for key, row in expected.items():
        assert [(e.finish, e.support) for e in mixed[key]] == [(e.finish, e.support) for e in row]
        assert [e.logprob for e in mixed[key]] == [near(e.logprob) for e in row]
    assert any(event.support for event in mixed["top-k", 0]) is record
    assert not any(event.support for event in mixed["plain", 0])


def test_likely_ids_are_told_to_those_who_ask_and_change_no_draw() -> None:
    network = build()
    asked = [
        dataclasses.replace(
            r, sampling=dataclasses.replace(r.sampling or OWN, top_logprobs=3 if r.k else 0)
        )
        for r in requests(own=True)
    ]
    plain, told = generate(network, OWN, requests(own=True)), generate(network, OWN, asked)
    assert tokens(plain) == tokens(told)
    for (name, k), row in told.items():
        for event in row:
            assert bool(event.top) == bool(k)
            values = [logprob for _, logprob in event.top]
            assert values == sorted(values, reverse=True) and len(values) <= 3
            if k and name == "greedy":
                assert event.top[0] == (event.token, event.logprob)
            known = dict(event.top).get(event.token)
            assert known is None or known == near(event.logprob)
            assert known is not None or not k or event.logprob <= values[-1] + near(values[-1]).abs
    assert any(len(event.top) < 3 for event in told["min-p", 1]) and all(
        len(e.top) == 3 for e in told["plain", 1]
    )
    assert all(event.top == () for row in plain.values() for event in row)


def test_steps_with_likely_ids_are_in_no_graph_and_none_is_computed_ahead() -> None:
    table = SettingsTable(OWN, frozenset([EOS]), 50)
    asked, kinds = table.find_index(dataclasses.replace(OWN, top_logprobs=2)), np.zeros(3, np.int64)
    assert asked == 1 and table.build_graph_sampling(kinds, kinds) is not None
    assert table.build_graph_sampling(np.array([0, asked, 0]), kinds) is None
    alike = [Request("a", k, [9], sampling=table.specs[asked]) for k in range(4)]
    rows = generate(build(dtype=torch.float32), OWN, alike)
    assert max(map(len, rows.values())) > 5 and all(
        len(event.top) == 2 for row in rows.values() for event in row
    )


def test_ends_of_a_request_add_to_those_of_the_generator() -> None:
    own = GenerationSpec(max_new_tokens=200, stop_ids=[7])
    with opened(build(), GenerationSpec(max_new_tokens=5, stop_ids=[8], seed=1)) as generator:
        generator.submit([Request("a", k, [9], sampling=own) for k in range(20)])
        rows = drain(generator)
    assert {row[-1].token for row in rows.values()} == {EOS, 7, 8}


def test_settings_that_cannot_be_are_refused() -> None:
    with opened(build(), GenerationSpec()) as generator:
        with pytest.raises(ConfigError, match=r"sampling\.top_p=1\.5"):
            generator.submit([Request("a", 0, [9], sampling=GenerationSpec(top_p=1.5))])
        with pytest.raises(ConfigError, match=r"sampling\.stop=.*need a tokenizer"):
            generator.submit([Request("a", 0, [9], sampling=GenerationSpec(stop=["x"]))])
        assert generator.idle
