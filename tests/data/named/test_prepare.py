"""Named datasets as files of rows: splits without leaks, copies, the cache and error messages."""

from __future__ import annotations

import json
import random
import urllib.request
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest

from weft.data.loader import load_data
from weft.data.named import fetch, find_entry
from weft.data.named.fetch import format_file_name
from weft.data.named.prepare import PreparedSource, ValidationSplit, prepare
from weft.data.sources import UnreadableRow, read_rows
from weft.data.spec import DatasetSpec, SourceSpec
from weft.errors import ConfigError, DataError
from weft.testing.datasets import build_small_tokenizer


def jsonl(file: Path, rows: list[dict[str, Any]]) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def read(path: str | None) -> list[dict[str, Any]]:
    return (
        []
        if path is None
        else [dict(row) for _, row in read_rows(Path(path)) if not isinstance(row, UnreadableRow)]
    )


def rows(made: PreparedSource) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    return read(made.source.path), read(made.source.valid_path)


QUESTIONS = [{"question": f"q{i}", "answer": f"#### {i}"} for i in range(40)]


def test_a_split_is_seeded_and_the_sources_own_goes_first(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "copy" / "train.jsonl", QUESTIONS)
    source = SourceSpec(path, "gsm8k")
    train, valid = rows(prepare(source, "sft", tmp_path, ValidationSplit(0.25)))
    assert (len(train), len(valid)) == (30, 10) and len({row["id"] for row in train + valid}) == 40
    assert rows(prepare(source, "sft", tmp_path / "other", ValidationSplit(0.25))) == (train, valid)
    assert [len(part) for part in rows(prepare(source, "sft", tmp_path, ValidationSplit(0.0)))] == [
        40,
        0,
    ]
    jsonl(tmp_path / "copy" / "test.jsonl", QUESTIONS[:3])
    folder = SourceSpec(str(tmp_path / "copy"), "gsm8k")
    assert [
        len(part) for part in rows(prepare(folder, "sft", tmp_path, ValidationSplit(0.25)))
    ] == [40, 3]
    assert [
        len(part)
        for part in rows(prepare(folder, "sft", tmp_path, ValidationSplit(0.0, own=False)))
    ] == [40, 0]


@pytest.mark.parametrize("mode", ["sft", "rm", "rl"])
def test_real_trees_are_split_by_tree(data_dir: Path, tmp_path: Path, mode: str) -> None:
    file = data_dir / "oasst" / "en_100_tree.jsonl"
    train, valid = rows(
        prepare(SourceSpec(str(file), "oasst_export"), mode, tmp_path, ValidationSplit(0.2))
    )
    roots = [
        {(row.get("messages") or row["prompt"])[0]["content"] for row in part}
        for part in (train, valid)
    ]
    assert not roots[0] & roots[1] and len(roots[1]) >= 15
    assert len(train) + len(valid) == {"sft": 538, "rm": 207, "rl": 475}[mode]


def test_real_pairs_questions_and_conversations(data_dir: Path, tmp_path: Path) -> None:
    pairs = prepare(
        SourceSpec(str(data_dir / "hh_rlhf" / "harmless-base_test.jsonl.gz"), "hh-rlhf"),
        "rm",
        tmp_path,
        ValidationSplit(),
    )
    found = rows(pairs)[0]
    assert 2250 < len(found) <= 2312 and all(
        len(row["replies"]) == 2 and row["prompt"][-1]["role"] == "user" for row in found
    )
    assert pairs.notes and "left out" in pairs.notes[0]
    gsm8k = rows(
        prepare(SourceSpec(str(data_dir / "gsm8k"), "gsm8k"), "rl", tmp_path, ValidationSplit())
    )
    assert [len(part) for part in gsm8k] == [7473, 1319] and "####" in gsm8k[0][0]["answer"]
    talks = SourceSpec(str(data_dir / "fastchat" / "dummy_conversation.json"), "vicuna")
    assert len(rows(prepare(talks, "sft", tmp_path, ValidationSplit()))[0]) == 500
    alpaca = SourceSpec(str(data_dir / "llamafactory_sft" / "alpaca_en_demo.json"), "alpaca")
    made = prepare(alpaca, "sft", tmp_path, ValidationSplit())
    assert len(rows(made)[0]) == 982 and made.notes == (
        "alpaca: 17 left out (unwanted phrases: 17)",
    )
    assert (
        len(
            rows(
                prepare(
                    SourceSpec(str(data_dir / "ifeval"), "ifeval"),
                    "rl",
                    tmp_path,
                    ValidationSplit(),
                )
            )[0]
        )
        == 541
    )


def said(*turns: str, **more: Any) -> list[dict[str, Any]]:
    return [
        {"role": ("user", "assistant")[i % 2], "content": turn, **more}
        for i, turn in enumerate(turns)
    ]


PARTS: dict[str, tuple[str, str, list[dict[str, Any]], tuple[str, ...]]] = {
    "messages": (
        "sft",
        "",
        [
            {"messages": said("a", "b", "c"), "system": "Be brief."},
            {
                "messages": said("a", "b", mood="good"),
                "tools": [{"name": "f"}],
                "system": None,
                "source": "web",
            },
        ],
        (
            "turns after the last reply: 1",
            "column 'system': 1",
            "column 'tools': 1",
            "messages[].mood",
        ),
    ),
    "sharegpt": (
        "sft",
        "max_chars: 3",
        [
            {
                "conversations": [
                    {"from": "human", "value": "abcd"},
                    {"from": "gpt", "value": "b"},
                ],
                "system": "Be brief.",
            }
        ],
        ("the end of turns of more than 3 characters: 1", "column 'system': 1"),
    ),
    "gpt4all": (
        "sft",
        "",
        [{"conversation": [{"User": "a"}, {"Bot": "b"}, {"User": "c"}]}],
        ("turns after the last reply: 1",),
    ),
    "soda": (
        "sft",
        "input_max_length: 5",
        [{"speakers": ["A", "B"], "dialogue": ["hi", "hello you"], "narrative": "x"}],
        ("the end of turns of more than 5 characters: 1",),
    ),
    "ranked_list": (
        "rm",
        "",
        [
            {
                "prompt": "\n\nHuman: a\n\nAssistant: b",
                "answers": [{"answer": "c", "rank": 1}, {"answer": "d", "rank": 2}],
            }
        ],
        ("replies in the prompt after the last question: 1",),
    ),
    "pairs": (
        "rm",
        "",
        [
            {
                "chosen": [*said("a"), {"role": "assistant", "content": "b", "reasoning": "hm"}],
                "rejected": said("a", "c"),
            }
        ],
        ("thoughts of a reply: 1",),
    ),
}


@pytest.mark.parametrize("reader", PARTS)
def test_parts_of_conversations_that_a_reader_leaves_out_are_told(
    tmp_path: Path, reader: str
) -> None:
    mode, option, given, told = PARTS[reader]
    path, entries = jsonl(tmp_path / "rows.jsonl", given), tmp_path / "mine.yaml"
    entries.write_text(f"mine:\n  reader: {reader}\n  modes: [sft, rm]\n  {option}\n")
    for _ in range(2):  # first made, then read from the cache
        made = prepare(SourceSpec(path, "mine"), mode, tmp_path, ValidationSplit(), [str(entries)])
        assert len(rows(made)[0]) == len(given)
        notes = "; ".join(made.notes)
        assert "mine: parts of conversations left out, by the number of rows (" in notes
        assert all(part in notes for part in told) and "source" not in notes


def test_what_is_read_whole_is_told_nothing_of(tmp_path: Path) -> None:
    path, entries = (
        jsonl(tmp_path / "rows.jsonl", [{"messages": said("a", "b"), "tools": []}]),
        tmp_path / "mine.yaml",
    )
    entries.write_text("mine: {reader: messages, modes: [sft]}\n")
    assert (
        prepare(SourceSpec(path, "mine"), "sft", tmp_path, ValidationSplit(), [str(entries)]).notes
        == ()
    )


def test_rows_are_made_once_and_anew_where_anything_differs(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "train.jsonl", QUESTIONS)
    first = prepare(SourceSpec(path, "gsm8k"), "sft", tmp_path, ValidationSplit()).source.path
    Path(first).write_text('{"kept": true}\n')
    assert read(
        prepare(SourceSpec(path, "gsm8k"), "sft", tmp_path, ValidationSplit()).source.path
    ) == [{"kept": True}]
    for source, mode, split in (
        (SourceSpec(path, "gsm8k", args={"lang": "de"}), "sft", ValidationSplit()),
        (SourceSpec(path, "gsm8k"), "rl", ValidationSplit()),
        (SourceSpec(path, "gsm8k"), "sft", ValidationSplit(0.1)),
    ):
        assert prepare(source, mode, tmp_path, split).source.path != first
    jsonl(tmp_path / "train.jsonl", QUESTIONS[:5])
    assert (
        len(
            read(prepare(SourceSpec(path, "gsm8k"), "sft", tmp_path, ValidationSplit()).source.path)
        )
        == 5
    )


def test_the_random_numbers_of_others_are_left_alone(tmp_path: Path) -> None:
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    texts = [{"document": f"d{i}", "summary": "s"} for i in range(20)]
    made = rows(
        prepare(
            SourceSpec(jsonl(tmp_path / "t.jsonl", texts), "xsum"),
            "sft",
            tmp_path,
            ValidationSplit(0.5),
        )
    )
    assert before == (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index, union-attr]
    random.seed(3)
    assert made == rows(
        prepare(
            SourceSpec(str(tmp_path / "t.jsonl"), "xsum"),
            "sft",
            tmp_path / "b",
            ValidationSplit(0.5),
        )
    )


def test_arguments_are_the_readers_or_the_types(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "train.jsonl", QUESTIONS)
    made = prepare(
        SourceSpec(path, "gsm8k", args={"lang": "de", "train_on": "last"}),
        "sft",
        tmp_path,
        ValidationSplit(),
    )
    assert (
        made.source.args == {"train_on": "last"} and rows(made)[0][0]["messages"][0]["lang"] == "de"
    )
    with pytest.raises(
        ConfigError, match=r"gsm8k: langg='de': no such argument; did you mean lang"
    ):
        prepare(SourceSpec(path, "gsm8k", args={"langg": "de"}), "sft", tmp_path, ValidationSplit())
    with pytest.raises(ConfigError, match=r"gsm8k: is of no use in mode rm; it is for sft, rl"):
        prepare(SourceSpec(path, "gsm8k"), "rm", tmp_path, ValidationSplit())


def test_bad_rows_are_said_with_their_place(tmp_path: Path) -> None:
    for row, wrong in (
        ({"frage": 1}, r"train.jsonl:1: lacks the key 'question' \(it has: 'frage'\)"),
        ({"question": {"a": 1}, "answer": "b"}, "train.jsonl:1: a text was expected, not dict"),
    ):
        with pytest.raises(DataError, match=wrong):
            prepare(
                SourceSpec(jsonl(tmp_path / "train.jsonl", [row]), "gsm8k"),
                "sft",
                tmp_path,
                ValidationSplit(),
            )
    with pytest.raises(
        DataError, match=r"vicuna.*no row is left for mode sft \(1 begun by the bot"
    ):
        prepare(
            SourceSpec(jsonl(tmp_path / "v.jsonl", [{"conversations": []}]), "vicuna"),
            "sft",
            tmp_path,
            ValidationSplit(),
        )
    with pytest.raises(
        DataError, match=r"lacks the key 'conversations', which reader sharegpt reads"
    ):
        prepare(
            SourceSpec(jsonl(tmp_path / "v.jsonl", [{"x": []}]), "vicuna"),
            "sft",
            tmp_path,
            ValidationSplit(),
        )


def test_later_faults_are_said_with_the_place_of_the_row_that_was_read(tmp_path: Path) -> None:
    """The message does not name the place in the cached file that weft makes of the rows."""
    long = {"question": "q " * 50, "answer": "#### 1"}
    options: dict[str, Any] = {
        "train_bs_n_seqs": 1,
        "max_seqlen": 40,
        "overlong": "error",
        "cache_dir": str(tmp_path / "c"),
    }
    for name in ("one", "two"):  # the same rows in another file: the message names that file
        (tmp_path / name).mkdir()
        file = jsonl(tmp_path / name / "train.jsonl", [*QUESTIONS[:2], long])
        named = DatasetSpec(named=[{"gsm8k": {"path": file}}], **options)
        with pytest.raises(DataError, match=rf"gsm8k: {file}:3: 1 of 3 rows are too long") as error:
            load_data(named, "prompt_answer", build_small_tokenizer(), seed=1, progress=False)
        assert "/c/" not in str(error.value)


def test_rows_that_were_gathered_are_said_with_their_file(tmp_path: Path) -> None:
    nodes = [
        {
            "message_id": id,
            "role": role,
            "text": "t " * 50,
            "lang": "en",
            "review_result": True,
            "parent_id": parent,
        }
        for id, role, parent in (("a", "prompter", None), ("b", "assistant", "a"))
    ]
    file = jsonl(tmp_path / "messages.jsonl", nodes)
    made = prepare(SourceSpec(file, "oasst_export"), "sft", tmp_path, ValidationSplit())
    assert [str(place) for place, _ in read_rows(Path(made.source.path))] == [
        f"oasst_export: {file}"
    ]


def test_files_of_the_hub_have_their_names_there() -> None:
    entry = find_entry("oasst_export")
    held = Path(
        "/home/me/.cache/huggingface/hub/datasets--OpenAssistant--oasst1/snapshots/0f/data/train.parquet"
    )
    assert format_file_name(entry, held) == "oasst_export: OpenAssistant/oasst1/data/train.parquet"


def test_copies_are_found_in_their_folder(tmp_path: Path) -> None:
    jsonl(tmp_path / "datasets" / "gsm8k" / "main" / "train.jsonl", QUESTIONS)
    jsonl(tmp_path / "datasets" / "gsm8k" / "socratic" / "train.jsonl", QUESTIONS[:1])
    assert (
        len(rows(prepare(SourceSpec(named="gsm8k"), "sft", tmp_path, ValidationSplit()))[0]) == 40
    )
    # a folder with copies of several, by their names
    both = SourceSpec(str(tmp_path / "datasets"), "gsm8k")
    jsonl(tmp_path / "datasets" / "alpaca" / "train.jsonl", [{"x": 1}])
    assert len(rows(prepare(both, "sft", tmp_path / "datasets", ValidationSplit()))[0]) == 40
    flat = SourceSpec(
        jsonl(tmp_path / "flat" / "train.jsonl", QUESTIONS[:7]).rsplit("/", 1)[0], "gsm8k"
    )
    for _ in range(2):  # the cache lies in the same folder
        assert len(rows(prepare(flat, "sft", tmp_path / "flat", ValidationSplit()))[0]) == 7
    (tmp_path / "datasets" / "prompt_dialogue").mkdir()
    (tmp_path / "datasets" / "prompt_dialogue" / "chat_dialogue_v2_c.txt").write_text(
        "User: Hi?\n\nRosey: Ho.\n<|endoftext|>\nUser: So?\n\nRosey: No.\n<|endoftext|>\n"
    )
    found = rows(prepare(SourceSpec(named="prompt_dialogue"), "sft", tmp_path, ValidationSplit()))[
        0
    ]
    assert [[m["content"] for m in row["messages"]] for row in found] == [
        ["Hi?", "Ho."],
        ["So?", "No."],
    ]
    (tmp_path / "squad.json").write_text(
        json.dumps({"version": 1, "data": [{"Context": "C", "Question": "Q", "Answer": "A"}]})
    )
    assert (
        len(
            rows(
                prepare(
                    SourceSpec(str(tmp_path / "squad.json"), "ua_squad"),
                    "sft",
                    tmp_path,
                    ValidationSplit(),
                )
            )[0]
        )
        == 1
    )
    with pytest.raises(
        DataError,
        match=r"has no files 'train.json' \(it has train.jsonl\); give the file itself as data_path",
    ):
        prepare(
            SourceSpec(str(tmp_path / "datasets/gsm8k/main"), "prosocial_dialogue"),
            "sft",
            tmp_path,
            ValidationSplit(),
        )
    for name, hub in (
        ("oasst_export", r", or take the hub's with datasets.oasst_export.input_file_path=null$"),
        ("augment_oasst", "$"),
    ):
        with pytest.raises(
            DataError, match=rf"path=2023-trees.gz: .*datasets.{name}.data_path=FILE{hub}"
        ):
            prepare(SourceSpec("2023-trees.gz", name), "rm", tmp_path, ValidationSplit())
    with pytest.raises(DataError, match=r"no such file or directory; did you mean .*squad.json"):
        prepare(
            SourceSpec(str(tmp_path / "sqad.json"), "ua_squad"), "sft", tmp_path, ValidationSplit()
        )


def test_one_file_of_two_splits(tmp_path: Path) -> None:
    whole = [
        {"prefixes": ["Q"], "responses": ["a", "b"], "augmented": ["x"], "split": split}
        for split in ("train", "val")
    ]
    made = prepare(
        SourceSpec(jsonl(tmp_path / "a.jsonl", whole), "augment_oasst"),
        "rm",
        tmp_path,
        ValidationSplit(),
    )
    assert [[row["replies"] for row in part] for part in rows(made)] == [
        [["a", "b", "x"]],
        [["a", "b"]],
    ]


def test_without_a_network_one_message_says_what_and_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[str] = []

    def refuse(*args: Any, **options: Any) -> Any:
        attempts.append("asked")
        raise OSError("Network is unreachable")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", refuse)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    with pytest.raises(DataError) as caught:
        prepare(SourceSpec(named="shp"), "rm", tmp_path, ValidationSplit())
    assert "https://huggingface.co/datasets/stanfordnlp/SHP" in str(caught.value)
    assert (
        f"Network is unreachable; put its files in {tmp_path}/datasets/shp, or name them with path"
        in str(caught.value)
    )
    assert len(attempts) == 2  # one attempt with the hub's cache, one with the network
    with pytest.raises(
        DataError,
        match=r"gpteacher_roleplay: .*raw.githubusercontent.com.*licence: mit.*put its files in",
    ):
        prepare(SourceSpec(named="gpteacher_roleplay"), "sft", tmp_path, ValidationSplit())
    with pytest.raises(
        DataError,
        match=r"private_tuning: .*it can be fetched from no public place; put its files in",
    ):
        prepare(SourceSpec(named="private_tuning"), "sft", tmp_path, ValidationSplit())
    with pytest.raises(DataError, match=r"must begin with https://"):
        prepare(
            SourceSpec(named="oig_file", args={"source_url": "http://x/a.jsonl"}),
            "sft",
            tmp_path,
            ValidationSplit(),
        )


def test_a_server_that_does_not_answer_holds_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    never = threading.Event()
    monkeypatch.setattr(fetch.hub, "TIMEOUT_SECONDS", 0.05)
    monkeypatch.setattr(urllib.request, "urlopen", lambda *args, **options: never.wait(60))
    with pytest.raises(DataError, match=r"no answer in 0.05 seconds"):
        prepare(SourceSpec(named="joke"), "sft", tmp_path, ValidationSplit())
    never.set()


def test_a_file_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    asked: list[str] = []

    def answer(url: str, timeout: float) -> io.BytesIO:
        asked.append(url)
        return io.BytesIO(b'{"text": "<human>: q\\n<bot>: a"}\n')

    monkeypatch.setattr(urllib.request, "urlopen", answer)
    source = SourceSpec(
        named="oig_file", args={"source_url": "https://x/unified_other.jsonl", "min_length": None}
    )
    for _ in range(2):
        assert len(rows(prepare(source, "sft", tmp_path, ValidationSplit()))[0]) == 1
    assert asked == ["https://x/unified_other.jsonl"]
