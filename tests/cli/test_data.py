"""`weft data`: what it prints for real and for small files, and exit code 2 for what cannot be
read.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from weft.cli import main as weft
from weft.cli.data import main
from weft.data.scan import iterate_answers, scan
from weft.data.sources import UnreadableRow
from weft.errors import ConfigError, DataError, NoTemplate, UserError
from weft.testing.datasets import build_small_tokenizer

ROWS = [
    {"id": "x", "prompt": "Hi ", "answer": "As an AI language model, I\u2019m fine"},
    {"prompt": "a", "answer": "b"},
    {"prompt": "a", "answer": "b"},
]


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Return a file of rows, and the options of all commands in these tests."""
    build_small_tokenizer().save(tmp_path / "tokenizer")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return [
        str(tmp_path / "rows.jsonl"),
        "--tokenizer",
        str(tmp_path / "tokenizer"),
        f"dataset.cache_dir={tmp_path / 'cache'}",
    ]


def test_inspect_marks_trained_tokens(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", *words, "-n", "2"]) == 0
    shown = capsys.readouterr().out
    assert (
        "id x  source rows\nprompt, 3 tokens\nH|i| \ncompletion 1, 36 tokens, 36 "
        "trained\n\u27e6A|s| |a|n" in shown
    )
    assert "f|i|n|e|</s>\u27e7" in shown and "id 1 " in shown and "id 2 " not in shown
    assert "\x1b[" not in shown
    main(["inspect", *words, "-n", "1", "--skip", "1", "--lines", "--color", "always"])
    coloured = capsys.readouterr().out
    assert "\x1b[1;32m     0       65 trained 'b'" in coloured and "id x" not in coloured


def test_inspect_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every byte is a token, messages use the template chatml, and a note says so."""
    turns = [("user", "Hi"), ("assistant", "\u00e9!")]
    (tmp_path / "chat.jsonl").write_text(
        json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]})
    )
    assert main(["inspect", str(tmp_path / "chat.jsonl")]) == 0
    shown = capsys.readouterr().out
    assert "<|im_start|>|u|s|e|r|\u23ce\n|H|i|<|im_end|>" in shown
    assert "completion 1, 4 tokens, 4 trained\n\u27e6<127>|\u00e9|!|<|im_end|>\u27e7" in shown
    assert (
        "note: no tokenizer was named, so every byte is a token and messages are written in the "
        "form chatml" in shown
    )
    assert main(["inspect", str(tmp_path / "chat.jsonl"), "tokenizer.chat_template=llama3"]) == 0
    shown = capsys.readouterr().out
    assert (
        "<|start_header_id|>|u|s|e|r|<|end_header_id|>" in shown and "in the form llama3" in shown
    )


@pytest.mark.parametrize("form", ["jsonl", "json"])
def test_inspect_reads_the_rows_that_it_shows(
    words: list[str], tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = '{"prompt": 3, "answer": "x"}'
    rows = [*map(json.dumps, ROWS), bad]
    # the list is not even closed
    text = "\n".join(rows) if form == "jsonl" else f"[{','.join(rows)}"
    (tmp_path / f"some.{form}").write_text(text)
    command = ["inspect", str(tmp_path / f"some.{form}"), *words[1:]]
    assert main([*command, "-n", "1", "--skip", "2"]) == 0
    shown = capsys.readouterr().out
    assert (
        "id 2  source some" in shown and "id x" not in shown and not (tmp_path / "cache").exists()
    )
    with pytest.raises(
        DataError, match=rf"some\.{form}:\d: 'prompt' must be text or a list of messages"
    ):
        main([*command, "-n", "4"])


def test_inspect_recognizes_trees(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    oasst = data_dir / "oasst"
    for mode, wanted in (("sft", "trained"), ("rm", "rank 1"), ("rl", "prompt_messages: ")):
        assert main(["inspect", str(oasst / "en_100_tree.jsonl"), "--mode", mode, "-n", "2"]) == 0
        shown = capsys.readouterr().out
        assert wanted in shown and "protect my eyes" in shown.replace("|", "")
    with pytest.raises(
        ConfigError,
        match=r"en_100_message\.jsonl:1: this row is one message .* --datasets oasst_export",
    ):
        main(["inspect", str(oasst / "en_100_message.jsonl")])


def test_inspect_masks_and_partial_characters(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [("user", "Hi"), ("assistant", "\u00e9"), ("user", "a"), ("assistant", "b")]
    (tmp_path / "chat.json").write_text(
        json.dumps([{"messages": [{"role": r, "content": c} for r, c in turns]}])
    )
    assert main(["inspect", str(tmp_path / "chat.json"), *words[1:]]) == 0
    shown = capsys.readouterr().out
    assert "8 trained" not in shown and "5 trained" in shown
    assert "|\u00e9|</s>\u27e7" in shown and shown.count("\u27e6") == 2


def test_counts(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "more.jsonl").write_text(json.dumps(ROWS[0] | {"id": "y"}))
    assert main(["counts", *words, str(tmp_path / "more.jsonl"), "dataset.max_seqlen=10"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == [
        "source",
        "type",
        "train",
        "eval",
        "epoch",
        "prompts",
        "cut",
        "answers",
        "cut",
        "dropped",
    ]
    assert table[1].split() == ["rows", "prompt_answer", "3", "0", "3", "0", "1", "0"]
    assert table[3].split() == ["total", "4", "0", "4", "0", "2", "0"]
    assert table[4].startswith(
        "note: rows: of 3 rows, 1 with the end of the answer cut (dataset.max_seqlen=10"
    )


def test_counts_without_a_tokenizer_are_rows(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["counts", words[0]]) == 0
    head = ["dataset_name", "train_counts", "eval_counts", "total_counts"]
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        head,
        ["rows", "3", "0", "3"],
    ]
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('\n{"prompt": "c", "answer": "d"}\n{')
    assert main(["counts", words[0], "dataset.valid_split=0.25"]) == 0
    said = capsys.readouterr()
    assert (
        said.out.splitlines()[1].split() == ["rows", "3", "1", "4"]
        and "note: rows: 1 rows cannot be read" in said.err
    )
    mixture = f"[{{path: {words[0]}, size: 2, valid_path: {words[0]}}}]"
    assert main(["counts", f"dataset.sources={mixture}"]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert table == [[*head, "epoch_counts"], ["rows", "4", "4", "8", "2"]]
    assert main(["counts", f"dataset.train_path={words[0]}", f"dataset.valid_path={words[0]}"]) == 0
    assert capsys.readouterr().out.splitlines()[2].split() == ["rows", "(valid)", "0", "4", "4"]


def test_counts_of_a_run(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    cache = words[-1].partition("=")[2]
    config.write_text(
        f"experiment_name: e\nseed: 3\nmodel:\n  path: {words[2]}\n  tokenizer: {{path: null, "
        f"eos_token: null}}\n"
        f"dataset:\n  type: prompt_answer\n  cache_dir: {cache}\n  train_tokens_per_batch: 99\n"
        f"  sources: [{{path: {words[0]}, fraction: 0.34, name: one, valid_split: 0.4}}]\n"
    )
    assert main(["counts", "--config", str(config)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == [
        "one",
        "prompt_answer",
        "2",
        "1",
        "1",
        "0",
        "0",
        "0",
    ]


@pytest.mark.slow
def test_lengths_without_a_chat_template(
    words: list[str], tmp_path: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Message lists are counted in a form that is named, and so in the lengths that this form has
    where it is set.
    """
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "yes"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": messages}))
    gpt2, end = str(data_dir / "tokenizers" / "gpt2"), "tokenizer.eos_token='<|endoftext|>'"
    told = {}
    for file, more in (("chat", [end]), ("chat", []), ("rows", [])):
        assert (
            main(
                ["lengths", str(tmp_path / f"{file}.jsonl"), "--tokenizer", gpt2, words[-1], *more]
            )
            == 0
        )
        told[file, len(more)] = capsys.readouterr()
    assert told["chat", 1].err.count("note: ") == 1 == told["rows", 0].err.count("note: ")
    assert "no chat template; messages are read in the form chatml" in told["chat", 1].err
    assert "names no end token (tokenizer.eos_token)" in told["rows", 0].err
    assert told["chat", 0].err.count("note: ") == 2
    own = [
        "tokenizer.chat_template=chatml",
        "tokenizer.add_tokens=[template]",
        "tokenizer.eos_token='<|im_end|>'",
    ]
    assert (
        main(["lengths", str(tmp_path / "chat.jsonl"), "--tokenizer", gpt2, words[-1], *own]) == 0
    )
    said = capsys.readouterr()
    assert said.out == told["chat", 0].out and "note: " not in said.err
    with pytest.raises(
        NoTemplate, match=r"no chat template, .* write tokenizer\.chat_template=zephyr"
    ):  # as a run says
        main(["inspect", str(tmp_path / "chat.jsonl"), "--tokenizer", gpt2, words[-1]])


def test_scan(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(map(json.dumps, ROWS)) + '\n{"prompt": "a", "answer": " "}\n{'
    )
    assert main(["scan", *words, "dataset.max_seqlen=20"]) == 0
    shown = capsys.readouterr().out
    for line in (
        "       1    'as an ai language model'",
        "rows.jsonl:1: As an AI language model, I\u2019m fine",
        "       1  repeated rows",
        "rows.jsonl:2 = ",
        "       1  rows with an empty answer",
        "       1  unreadable rows",
        "       1  samples that are too long (dataset.max_seqlen=20)",
        "       2  rows that cannot be used as prompt_answer",
    ):
        assert line in shown, line
    (tmp_path / "phrases.txt").write_text("Fine\n")
    main(["scan", words[0], "--phrases", str(tmp_path / "phrases.txt")])
    assert "       1    'fine'" in capsys.readouterr().out


def test_phrases_are_sought_in_answers_alone() -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": "As an AI model"},
                {"role": "assistant", "content": "no"},
            ]
        },
        {"conversations": [{"from": "gpt", "value": "as an ai model, yes"}]},
        {
            "chosen": "\n\nHuman: as an ai model?\n\nAssistant: ",
            "rejected": "\n\nHuman: a\n\nAssistant: b",
        },
        {"prompt": "as an ai model", "pos_answers": ["p"], "neg_answers": ["As an AI model n"]},
        {
            "prompt": {
                "role": "prompter",
                "text": "q",
                "replies": [{"role": "assistant", "text": "I'm ChatGPT"}],
            }
        },
    ]
    assert [list(iterate_answers(row)) for row in rows] == [
        ["no"],
        ["as an ai model, yes"],
        [" ", " b"],
        ["p", "As an AI model n"],
        ["I'm ChatGPT"],
    ]
    found = scan(
        [*((f"f:{i}", row) for i, row in enumerate(rows)), ("f:9", UnreadableRow("not JSON"))]
    )
    places = {phrase: [place for place, _ in hits] for phrase, hits in found.phrases.items()}
    assert places == {"as an ai model": ["f:1", "f:3"], "i'm chatgpt": ["f:4"]}
    assert found.empty == ["f:2"] and found.unreadable == ["f:9: not JSON"] and found.rows == 6


@pytest.mark.parametrize(
    ("argv", "wrong"),
    [
        (["inspect"], "no data are named"),
        (["inspect", "nowhere.jsonl"], "no such file"),
        (["lengths", "nowhere.jsonl", "--type", "chat"], "--tokenizer is missing"),
        (
            ["inspect", "nowhere.jsonl", "--tokenizer", "nowhere/at/all"],
            "no such file or directory",
        ),
        (["counts", "nowhere.jsonl"], "no such file"),
        (["counts", "a.jsonl", "dataset.max_seqln=3"], "max_seqln.*did you mean.*max_seqlen"),
        (["counts", "a.jsonl", "dataset.max_seqlen=x"], "max_seqlen"),
        (["scan", "a.jsonl", "--phrases", "nowhere.txt"], "there is no such file"),
        (["counts", "--config", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_invalid_input_is_refused(argv: list[str], wrong: str) -> None:
    with pytest.raises(UserError, match=wrong):
        main(argv)


def test_a_file_that_tells_no_type(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "odd.jsonl").write_text('{"x": 1}')
    with pytest.raises(
        ConfigError,
        match=r"odd.jsonl:1: this row fits no dataset type \(it has x\); set --type to one of chat",
    ):
        main(["inspect", str(tmp_path / "odd.jsonl"), *words[1:]])


def test_help_is_quick_and_wrong_flags_are_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    for argv in (["--help"], ["inspect", "--help"]):
        with pytest.raises(SystemExit) as stopped:
            main(argv)
        assert stopped.value.code == 0
    capsys.readouterr()
    for argv, message in (
        (["scan", "--bogus"], "weft data: unknown option --bogus; see weft data --help"),
        (["look"], "invalid choice: 'look'"),
    ):
        assert weft.main(["data", *argv]) == 2
        assert message in capsys.readouterr().err
    code_text = "import sys\nfrom weft.cli.data import main\ntry: main(['inspect', '--help'])\nexcept SystemExit: pass\n"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{code_text}print('torch' in sys.modules, 'transformers' in sys.modules)",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "False False"
