"""Rankings with bad replies: the rows written, their order, and continued files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_llama, write_jsonl
from weft.data.bad_replies import PromptReplies
from weft.engine.spec import GenerationSpec, ModelSpec
from weft.errors import ConfigError, DataError
from weft.evaluation import augment
from weft.evaluation.answers import SamplingSettings
from weft.evaluation.augment import AugmentationOptions, WeakModel, read, write
from weft.evaluation.models import open_policy

ROWS = [
    {
        "id": f"r{n}",
        "prompt": f"What is {n}?",
        "replies": [f" It is {n}, as one more than {n - 1} is.", " I do not know."],
    }
    for n in range(6)
]
SAID: dict[str, Any] = {"seed": 1}


@pytest.fixture
def rows(tmp_path: Path) -> list[PromptReplies]:
    return read([str(write_jsonl(tmp_path / "rows.jsonl", ROWS))])


@pytest.fixture(scope="module")
def weak(tmp_path_factory: pytest.TempPathFactory) -> WeakModel:
    path = make_llama(tmp_path_factory.mktemp("weak"), chat=False, max_position_embeddings=64)
    spec = GenerationSpec(max_new_tokens=6, seed=1)
    return WeakModel(
        open_policy(ModelSpec(path=str(path), device="cpu")), SamplingSettings("weak", spec)
    )


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_bad_replies_are_added_to_rankings(
    rows: list[PromptReplies], weak: WeakModel, tmp_path: Path
) -> None:
    made = write(rows, AugmentationOptions(("cut",)), weak, tmp_path / "out.jsonl", SAID)
    found = lines(tmp_path / "out.jsonl")
    assert (made.augmented, made.plain, made.left_out) == (6, 0, 0)
    for row, given in zip(found, ROWS, strict=True):
        assert {key: row[key] for key in given} == given
        cut, answer = row["augmented"]
        assert (
            given["replies"][0].startswith(cut)
            and answer not in given["replies"]
            and answer.startswith(" ")
        )
    assert not list(tmp_path.glob("out.jsonl.*"))


def test_pairs(rows: list[PromptReplies], tmp_path: Path) -> None:
    write(
        rows, AugmentationOptions(("cut", "other"), pairs=True), None, tmp_path / "out.jsonl", SAID
    )
    found = lines(tmp_path / "out.jsonl")
    assert len(found) == 12 and [row["id"] for row in found[:3]] == ["r0/0", "r0/1", "r1/0"]
    assert all(
        row["chosen"] == ROWS[n // 2]["replies"][0] != row["rejected"]
        for n, row in enumerate(found)
    )


def test_a_share_of_the_rows(tmp_path: Path) -> None:
    rows = [
        PromptReplies(str(n), f"Q{n}", ({"role": "user", "content": "Q"},), (f"a b c d {n}", "e"))
        for n in range(400)
    ]
    single = PromptReplies("single", "Q", ({"role": "user", "content": "Q"},), ("yes",))
    made = write(
        [*rows, single],
        AugmentationOptions(("cut",), share=0.25),
        None,
        tmp_path / "out.jsonl",
        SAID,
    )
    assert 70 < made.augmented < 130 and made.augmented + made.plain == 400
    assert made.left_out == 1  # it has one reply, too short to cut


def test_an_interrupted_file_is_continued(
    weak: WeakModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(augment, "ROWS_PER_PART", 2)
    rows, out = read([str(write_jsonl(tmp_path / "rows.jsonl", ROWS))]), tmp_path / "out.jsonl"
    write(rows, AugmentationOptions(), weak, tmp_path / "whole.jsonl", SAID)

    def stop(done: int, total: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(rows, AugmentationOptions(), weak, out, SAID, stop)
    part = tmp_path / "out.jsonl.part"
    with part.open("a") as stream:
        stream.write('{"left_out": 0, "ro')  # a line that was cut
    with pytest.raises(ConfigError, match="was started with other options or rows"):
        write(rows, AugmentationOptions(), weak, out, {"seed": 2})
    sampled, sample = list[int](), augment.sample_answers
    monkeypatch.setattr(
        augment,
        "sample_answers",
        lambda *given, **how: sampled.append(len(given[1])) or sample(*given, **how),
    )
    write(rows, AugmentationOptions(), weak, out, SAID)
    assert sampled == [2]
    assert out.read_text() == (tmp_path / "whole.jsonl").read_text()
    with pytest.raises(ConfigError, match="already exists and is not overwritten"):
        write(rows, AugmentationOptions(), weak, out, SAID)


def test_prompts_too_long_for_the_weak_model_get_no_reply(weak: WeakModel, tmp_path: Path) -> None:
    rows = [
        PromptReplies("long", "word " * 80, ({"role": "user", "content": "x"},), ("a b c d e", "f"))
    ]
    assert write(rows, AugmentationOptions(), weak, tmp_path / "out.jsonl", SAID).plain == 1


def test_ids_are_unique_and_bad_rows_are_named(tmp_path: Path) -> None:
    twice = write_jsonl(tmp_path / "twice.jsonl", [ROWS[0], ROWS[0]])
    assert [row.id for row in read([str(twice)])] == ["r0", "r0-2"]
    bad = write_jsonl(tmp_path / "bad.jsonl", [ROWS[0], {"prompt": "Q"}])
    with pytest.raises(DataError, match=r"bad.jsonl:2: it has no reply"):
        read([str(bad)])
