"""What samples.jsonl holds: whole groups in some steps, values by token, pairs with their scores;
and how much of it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tiny import make_tokenizer
from weft.data.sample import SequenceSample
from weft.data.tokenizer import Tokenizer, TokenizerSpec
from weft.graph.graph import DataflowGraph
from weft.graph.mfc import HostFunction, MFCDef
from weft.runtime import samples
from weft.runtime.samples import SampleReader, is_detailed_step


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return Tokenizer.load(TokenizerSpec(path=str(folder)))


class Shelf:
    """As much of a worker group as samples are read from."""

    def __init__(self, batch: SequenceSample) -> None:
        self.batch = batch

    def fetch(self, ids: Any, keys: Any, optional: Any = ()) -> SequenceSample:
        names = [
            *keys,
            *(key for key in dict.fromkeys(optional) if key in self.batch.keys and key not in keys),
        ]
        return self.batch.select(ids=ids, keys=names)


GENERATES = DataflowGraph(
    [
        MFCDef(
            "gen",
            "actor",
            "generate",
            "generate",
            4,
            ["prompt"],
            ["completion", "logprobs", "finished"],
        ),
        HostFunction("reward", "f", 4, ["completion"], ["rewards"]),
        HostFunction("advantages", "g", 4, ["rewards"], ["advantages"]),
    ],
    ["prompt"],
    [],
)
TRAINS = DataflowGraph(
    [MFCDef("train", "model", "train", "train_step", 4, ["prompt", "completion"])],
    ["prompt", "completion"],
    [],
)


def sampled(
    tokenizer: Tokenizer, ids: int = 4, k: int = 10, *, differ: bool = False
) -> SequenceSample:
    prompt, said = (
        tokenizer.encode("What is two plus two?", bos=False),
        tokenizer.encode("It is four.", bos=False),
    )
    said = [*said, tokenizer.eos_id]
    lengths = {
        "prompt": [[len(prompt)]] * ids,
        "finished": [[1] * k] * ids,
        "rewards": [[1] * k] * ids,
    }
    lengths |= {key: [[len(said)] * k] * ids for key in ("completion", "logprobs", "advantages")}
    count = ids * k
    data = {
        "prompt": torch.tensor(prompt * ids),
        "completion": torch.tensor(said * count),
        "logprobs": torch.full((len(said) * count,), -0.5),
        "advantages": torch.arange(len(said)).repeat(count).float()
        if differ
        else torch.ones(len(said) * count),
        "finished": torch.tensor([1.0, 0.0] * (count // 2)),
        "rewards": torch.arange(count).float(),
    }
    return SequenceSample.from_groups(
        [str(i) for i in range(ids)], lengths, data, {"answer": ["4"] * ids}
    )


def test_a_detailed_step_has_whole_groups_with_values_by_token(tokenizer: Tokenizer) -> None:
    batch = sampled(tokenizer)
    rows = SampleReader(GENERATES, Shelf(batch), tokenizer).read_rows(batch.ids, 1)  # type: ignore[arg-type]
    assert [(row["id"], row["k"]) for row in rows] == [
        (str(i), k) for i in range(3) for k in range(8)
    ]
    first, second = rows[:2]
    assert (first["prompt"], first["completion"]) == ("What is two plus two?", "It is four.")
    assert "".join(first["tokens"]) == "It is four.</s>" and len(first["logprobs"]) == len(
        first["tokens"]
    )
    assert (first["answer"], first["advantage"], first["reward"], second["reward"]) == (
        "4",
        1.0,
        0.0,
        1.0,
    )
    assert (first["finish_reason"], second["finish_reason"]) == ("stop", "length")
    assert "advantages" not in first and "trained" not in first


def test_advantages_that_differ_are_told_by_token(tokenizer: Tokenizer) -> None:
    batch = sampled(tokenizer, 1, 2, differ=True)
    row = SampleReader(GENERATES, Shelf(batch), tokenizer).read_rows(batch.ids, 1)[0]  # type: ignore[arg-type]
    assert row["advantages"] == list(range(len(row["tokens"])))
    assert row["advantage"] == pytest.approx(sum(row["advantages"]) / len(row["tokens"]))


def test_between_detailed_steps_the_first_completions_are_enough(tokenizer: Tokenizer) -> None:
    batch = sampled(tokenizer, 6, 2)
    assert not is_detailed_step(101)
    rows = SampleReader(GENERATES, Shelf(batch), tokenizer).read_rows(batch.ids, 101)  # type: ignore[arg-type]
    assert [(row["id"], row["k"]) for row in rows] == [(str(i), 0) for i in range(4)]
    assert "tokens" not in rows[0] and rows[0]["reward"] == 0.0


def test_long_completions_and_texts_are_cut(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "TOKENS", 3)
    monkeypatch.setattr(samples, "TEXT", 8)
    batch = sampled(tokenizer, 1, 2)
    row = SampleReader(GENERATES, Shelf(batch), tokenizer).read_rows(batch.ids, 1)[0]  # type: ignore[arg-type]
    assert len(row["tokens"]) == len(row["logprobs"]) == 3
    assert row["prompt"] == "What [...] two?"


def pair(tokenizer: Tokenizer) -> SequenceSample:
    prompt, good, bad = (
        tokenizer.encode(text, bos=False) for text in ("Two plus two?", "Four.", "Five, or so.")
    )
    lengths = {"prompt": [[len(prompt)]], "completion": [[len(good), len(bad)]], "rank": [[1, 1]]}
    lengths |= {"comparison": [[1, 1]], "ref_logprobs": [[len(good), len(bad)]]}
    data = {
        "prompt": torch.tensor(prompt),
        "completion": torch.tensor(good + bad),
        "rank": torch.tensor([0, 1]),
        "comparison": torch.tensor([0, 0]),
        "ref_logprobs": torch.full((len(good) + len(bad),), -2.0),
    }
    return SequenceSample.from_groups(["7"], lengths, data)


def test_pairs_have_their_scores_or_their_log_ratios(tokenizer: Tokenizer) -> None:
    batch = pair(tokenizer)
    scores = SequenceSample.from_groups(
        ["7"], {"scores": [[1, 1]]}, {"scores": torch.tensor([0.5, -0.25])}
    )
    reader = SampleReader(TRAINS, Shelf(batch), tokenizer)  # type: ignore[arg-type]
    rows = reader.read_rows(["1", "7"], 1, scores)
    assert [(row["completion"], row["rank"], row["score"]) for row in rows] == [
        ("Four.", 0, 0.5),
        ("Five, or so.", 1, -0.25),
    ]
    sizes = batch.seqlens["completion"]
    given = {"logprobs": torch.full((int(batch.num_tokens()),), -1.0)}
    logprobs = SequenceSample.from_groups(["7"], {"logprobs": [sizes[0].tolist()]}, given)
    dpo = DataflowGraph(
        [
            MFCDef(
                "ref_inf",
                "ref",
                "infer",
                "inference",
                4,
                ["prompt", "completion"],
                ["ref_logprobs"],
            ),
            MFCDef(
                "train", "actor", "train", "train_step", 4, ["prompt", "completion", "ref_logprobs"]
            ),
        ],
        ["prompt", "completion"],
        [],
    )
    rows = SampleReader(dpo, Shelf(batch), tokenizer).read_rows(["7"], 1, logprobs)  # type: ignore[arg-type]
    assert [row["log_ratio"] for row in rows] == [float(size) for size in sizes[0]]


def test_rows_that_were_trained_on_tell_their_loss_and_which_tokens_count(
    tokenizer: Tokenizer,
) -> None:
    text = tokenizer.encode("Lily plays.", bos=False)
    count = len(text)
    mask = torch.tensor([0.0] + [1.0] * (count - 1))
    batch = SequenceSample.from_groups(
        ["a"],
        {"completion": [[count]], "loss_mask": [[count]]},
        {"completion": torch.tensor(text), "loss_mask": mask},
    )
    seen = SequenceSample.from_groups(
        ["a"], {"logprobs": [[count]]}, {"logprobs": -torch.arange(float(count)).clamp(min=0.0)}
    )
    reader = SampleReader(TRAINS, Shelf(batch), tokenizer)  # type: ignore[arg-type]
    (row,) = reader.read_rows(["a", "b"], 5, seen)
    assert row["trained"] == [0] + [1] * (count - 1) and "".join(row["tokens"]) == "Lily plays."
    assert row["loss"] == pytest.approx(sum(range(1, count)) / (count - 1)) and row["prompt"] == ""
    assert reader.read_rows(["a"], 101, seen) == [], "between two steps that are shown"
    ends = SampleReader(TRAINS, Shelf(batch), tokenizer, last=101)  # type: ignore[arg-type]
    assert len(ends.read_rows(["a"], 101, seen)) == 1, "the run's last step is always shown"


def test_rows_of_which_training_told_nothing_are_shown_without_values(tokenizer: Tokenizer) -> None:
    text = tokenizer.encode("Lily plays.", bos=False)
    batch = SequenceSample.from_groups(
        ["a"], {"completion": [[len(text)]]}, {"completion": torch.tensor(text)}
    )
    other = SequenceSample.from_groups(["b"], {"logprobs": [[1]]}, {"logprobs": torch.zeros(1)})
    reader = SampleReader(TRAINS, Shelf(batch), tokenizer)  # type: ignore[arg-type]
    for seen in (None, other):
        (row,) = reader.read_rows(["a"], 5, seen)
        assert row["completion"] == "Lily plays." and not {"logprobs", "loss"} & row.keys()
    without = batch.remap_keys({"completion": "prompt"})
    assert SampleReader(TRAINS, Shelf(without), tokenizer).read_rows(["a"], 5) == []  # type: ignore[arg-type]


def test_a_completion_that_a_graph_renames_is_shown_in_place_of_the_rows_own(
    tokenizer: Tokenizer,
) -> None:
    names = {"completion": "mixed_completion", "loss_mask": "mixed_loss_mask"}
    generate = MFCDef(
        "gen",
        "actor",
        "generate",
        "generate",
        4,
        ["prompt", "completion"],
        ["completion", "loss_mask", "sampled"],
        output_key_remap=names,
    )
    graph = DataflowGraph([generate], ["prompt", "completion"], [])
    own, made = (tokenizer.encode(text, bos=False) for text in ("It is four.", "Lily plays."))
    batch = SequenceSample.from_groups(
        ["a"],
        {
            "prompt": [[1]],
            "completion": [[len(own)]],
            "mixed_completion": [[len(made)]],
            "sampled": [[1]],
        },
        {
            "prompt": torch.ones(1).long(),
            "completion": torch.tensor(own),
            "mixed_completion": torch.tensor(made),
            "sampled": torch.ones(1),
        },
    )
    for step in (5, 101):
        (row,) = SampleReader(graph, Shelf(batch), tokenizer).read_rows(["a"], step)  # type: ignore[arg-type]
        assert (row["completion"], row["sampled"]) == ("Lily plays.", 1.0)


def test_few_steps_are_detailed_in_a_long_run() -> None:
    found = [step for step in range(1, 10_001) if is_detailed_step(step)]
    assert found[:12] == [*range(1, 11), 12, 14] and 100 < len(found) < 160
    assert all(step in found for step in (30, 100, 500, 1000, 10_000))
