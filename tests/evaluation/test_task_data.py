"""Published forms of data sets, and messages for rows that cannot be used."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import write_jsonl
from weft.errors import ConfigError, DataError
from weft.evaluation.task_data import find_data, read_data

IFEVAL = {"prompt": "Hi", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
MC1 = {"choices": ["yes", "no"], "labels": [1, 0]}


def write(file: Path, content: Any) -> Path:
    """Write a JSON value, or a text as it is."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


@pytest.mark.parametrize(
    ("data", "row", "item"),
    [
        ("gsm8k", {"question": "2+5?", "answer": "2+5=7\n#### 7"}, {"target": "2+5=7\n#### 7"}),
        ("math", {"problem": "p", "solution": r"so \boxed{\frac12}"}, {"target": r"\frac12"}),
        ("math", {"problem": "p", "solution": "s", "answer": "3"}, {"target": "3"}),
        ("ifeval", IFEVAL, {"kwargs": "[{}]"}),
        ("ifeval", {**IFEVAL, "kwargs": "[{}]"}, {"kwargs": "[{}]"}),
        (
            "ifbench",
            {**IFEVAL, "instruction_id_list": ["count:numbers"], "kwargs": [{"N": 2.0, "m": None}]},
            {"instruction_id_list": ["count:numbers"]},
        ),
        (
            "mbpp",
            {
                "task_id": 601,
                "text": "t",
                "code": "def f():\r\n  return 1",
                "test_setup_code": "x = 1",
                "test_list": ["assert f() == x", "assert f()"],
                "challenge_test_list": ["assert f() == 2"],
            },
            {
                "text": "t",
                "shown_tests": "assert f() == x\nassert f()",
                "tests": "x = 1\nassert f() == x\nassert f()",
                "entry_point": "f",
            },
        ),
        (
            "mbpp",
            {"text": "t", "code": "def sum(a): pass", "test_list": ["assert sum(1) == len('a')"]},
            {"entry_point": "sum"},
        ),
        (  # the hub's MBPP+
            "mbpp",
            {
                "prompt": "t",
                "test_imports": [],
                "test_list": ["assert f(1) == 1"],
                "test": "def check_all(out):\n    assert out\ncheck_all(f(1))",
            },
            {
                "shown_tests": "assert f(1) == 1",
                "tests": "def check_all(out):\n    assert out\ncheck_all(f(1))",
                "entry_point": "f",
            },
        ),
        (  # EvalPlus' MBPP+
            "mbpp",
            {
                "task_id": "Mbpp/2",
                "prompt": '"""\nWrite f.\nassert f(1) == 1\n"""\n',
                "entry_point": "f",
                "canonical_solution": "\ndef f(x): return x\n",
                "base_input": [[1]],
                "assertion": "\nassert f(1) == 1\nassert f(2) == \\\n  2\nassert f(3)\nassert f(4)",
            },
            {
                "text": "Write f.",
                "shown_tests": "assert f(1) == 1\nassert f(2) == \\\n  2\nassert f(3)",
                "target": "\ndef f(x): return x\n",
            },
        ),
        (
            "mbpp",
            {"prompt": "t", "test_imports": ["import math"], "test_list": ["assert f()"]},
            {"text": "t", "tests": "import math\nassert f()", "shown_tests": "assert f()"},
        ),
        (
            "preference",
            {"prompt": "p", "chosen": "c", "rejected": "r", "subset": "chat"},
            {"choices": ["c", "r"], "subset": "chat"},
        ),
        (
            "preference",
            {"input": "p", "output_1": "a", "output_2": "b", "label": 2},
            {"prompt": "p", "choices": ["b", "a"]},
        ),
        ("heldout", {"text": "once"}, {"text": "once"}),
        (
            "truthfulqa",
            {"question": "q", "mc1_targets": MC1, "mc2_targets": {"a": 1, "b": 0, "c": 1}},
            {"choices": ["yes", "no", "a", "b", "c"], "labels": [1, 0, 1, 0, 1], "num_single": 2},
        ),
        ("xstest", {"prompt": "p", "type": "contrast_homonyms"}, {"label": "unsafe"}),
        ("xstest", {"prompt": "p", "type": "homonyms"}, {"label": "safe"}),
        ("xstest", {"prompt": "p", "label": "unsafe"}, {"label": "unsafe"}),
        (
            "mmlu",
            {"question": "q", "choices": ["x", "y", "z"], "answer": "C", "subject": "law"},
            {"target": 2, "letters": ["A", "B", "C"], "subset": "law"},
        ),
        ("mmlu", {"question": "q", "choices": ["x", "y"], "answer": 1}, {"target": 1}),
        ("toxigen", {"prompt": "- a\n-", "group": "g"}, {"prompt": "- a\n-", "subset": "g"}),
        ("alpaca_eval", {"instruction": "i", "output": "o"}, {"prompt": "i", "reference": "o"}),
    ],
)
def test_rows_become_items(tmp_path: Path, data: str, row: dict[str, Any], item: Any) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", [row])
    (read,) = read_data(data, file).items
    assert {key: read[key] for key in item} == item


@pytest.mark.parametrize(
    ("data", "row", "message"),
    [
        ("gsm8k", {"question": "q"}, "lacks the field 'answer'; it has: 'question'"),
        ("gsm8k", {"question": "q", "answer": "none"}, "'answer' has no number"),
        ("math", {"problem": "p", "solution": "s"}, r"no \\boxed"),
        ("ifeval", {**IFEVAL, "instruction_id_list": ["count:words"]}, "unknown instruction"),
        ("ifeval", {**IFEVAL, "kwargs": []}, "one mapping for each of the 1 instructions"),
        (
            "ifbench",
            {**IFEVAL, "instruction_id_list": ["count:number"]},
            "unknown instruction 'count:number'; did you mean count:numbers",
        ),
        (
            "ifbench",
            {**IFEVAL, "instruction_id_list": ["count:numbers"]},
            "needs the argument 'N'",
        ),
        (
            "ifbench",
            {
                **IFEVAL,
                "instruction_id_list": ["count:word_count_range"],
                "kwargs": [{"min_words": 2}],
            },
            "needs the argument 'max_words'",
        ),
        (
            "ifeval",
            {
                **IFEVAL,
                "instruction_id_list": ["length_constraints:nth_paragraph_first_word"],
                "kwargs": [{"num_paragraphs": 2, "nth_paragraph": 1}],
            },
            "needs the argument 'first_word'",
        ),
        ("ifbench", {**IFEVAL, "kwargs": ["N"]}, "'kwargs' must have mappings, not 'N'"),
        ("ifbench", {**IFEVAL, "kwargs": "[{"}, "'kwargs' is a text that is not JSON"),
        ("mbpp", {"text": "t"}, "lacks the field 'test' or 'assertion' or 'test_list'"),
        ("mbpp", {"text": "t", "test_list": ["assert f("]}, "'test_list' is no Python code"),
        (
            "mbpp",
            {"text": "t", "test_list": ["assert f()"], "test_imports": "import math"},
            "'test_imports' must be a list of texts",
        ),
        ("humaneval", {"prompt": "p", "test": "t"}, "lacks the field 'entry_point'"),
        ("preference", {"prompt": "p", "chosen": "c", "rejected": ""}, "'rejected' is empty"),
        ("preference", {"prompt": "p", "chosen": "c", "rejected": "c"}, "are equal"),
        ("truthfulqa", {"question": "q", "mc1_targets": MC1}, "lacks the field 'mc2_targets'"),
        ("xstest", {"prompt": "p", "label": "harmless"}, "'label' must be safe or unsafe"),
        ("mmlu", {"question": "q", "choices": ["x", "y"], "answer": "C"}, "one of A, B or"),
        ("mmlu", {"question": "q", "choices": ["x", "y"], "answer": 2}, "one of A, B or"),
    ],
)
def test_an_unusable_row_is_named(
    tmp_path: Path, data: str, row: dict[str, Any], message: str
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f"\n{json.dumps(row)}\n")
    with pytest.raises(DataError, match=f"rows.jsonl:2: .*{message}"):
        read_data(data, file)


def test_all_unusable_rows_are_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "q"}\nnot JSON\n{"question": "q", "answer": "#### 1"}\n')
    with pytest.raises(DataError) as caught:
        read_data("gsm8k", file)
    assert [report.split(": ")[0].rpartition(":")[2] for report in caught.value.reports] == [
        "1",
        "2",
    ]


def test_the_test_split_of_a_folder_is_read(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", [{"question": "train", "answer": "1"}])
    write_jsonl(tmp_path / "test.jsonl", [{"question": "test", "answer": "1"}])
    assert [item["question"] for item in read_data("gsm8k", tmp_path).items] == ["test"]
    (tmp_path / "test.jsonl").unlink()
    with pytest.raises(DataError, match="only training data"):
        read_data("gsm8k", tmp_path)


def test_parquet_rows(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"question": "q", "choices": ["x", "y"], "answer": 1, "subject": "law"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "test-0.parquet")
    assert read_data("mmlu", tmp_path).items[0]["target"] == 1


def test_mmlus_examples_are_not_questions(tmp_path: Path) -> None:
    row = {"choices": ["x", "y"], "answer": 1, "subject": "law"}
    for folder in ("all", "law"):
        (tmp_path / folder).mkdir()
        write_jsonl(tmp_path / folder / "rows.jsonl", [{"question": "q", **row}])
        write_jsonl(tmp_path / folder / "dev.jsonl", [{"question": "example", **row}])
    rows = read_data("mmlu", tmp_path)
    assert [item["question"] for item in rows.items] == ["q"]
    assert [item["question"] for item in rows.shots["law"]] == ["example"]


@pytest.mark.parametrize(
    ("data", "name"),
    [("heldout", "a.txt"), ("toxigen", "a.txt"), ("xstest", "a.csv"), ("math", "a.json")],
)
def test_a_file_that_is_not_utf_8_is_named(tmp_path: Path, data: str, name: str) -> None:
    (tmp_path / name).write_bytes(b"prompt,label\nna\xefve,safe\n")
    with pytest.raises(DataError, match=name):
        read_data(data, tmp_path / name)


def test_mmlus_folders_of_csv_files(tmp_path: Path) -> None:
    write(tmp_path / "test/high_school_law_test.csv", '"Who, me?",a,b,c,d,B\nThen?,1,2,3,4,D\n')
    write(tmp_path / "dev/high_school_law_dev.csv", "Example?,a,b,c,d,A\n")
    rows = read_data("mmlu", tmp_path)
    assert [item["target"] for item in rows.items] == [1, 3]
    assert rows.items[0]["subset"] == "high school law"
    assert [item["question"] for item in rows.shots["high school law"]] == ["Example?"]
    write(tmp_path / "test/high_school_law_test.csv", "Who?,a,b,c,d,B\nThen?,1,2,3,4,E\n")
    with pytest.raises(DataError, match=r"law_test.csv:2: 'answer' must be one of A, B, C, D"):
        read_data("mmlu", tmp_path)


def test_maths_folder_of_one_file_per_problem(tmp_path: Path) -> None:
    row = {"problem": "p", "solution": r"\boxed{3}", "type": "Algebra"}
    write(tmp_path / "test/algebra/1.json", json.dumps(row, indent=2))
    (item,) = read_data("math", tmp_path).items
    assert item == {"problem": "p", "target": "3", "subset": "Algebra"}


def test_the_complete_mbpp_is_cut_to_its_test_split(tmp_path: Path) -> None:
    rows = [{"task_id": n, "text": "t", "test_list": ["assert 1"]} for n in range(1, 975)]
    items = read_data("mbpp", write_jsonl(tmp_path / "mbpp.jsonl", rows)).items
    assert [items[0]["task_id"], items[-1]["task_id"], len(items)] == ["11", "510", 500]
    items = read_data("mbpp", write(tmp_path / "sanitized-mbpp.json", rows[100:527])).items
    assert [items[0]["task_id"], items[-1]["task_id"], len(items)] == ["101", "510", 410]
    # Any other file is read in full.
    assert len(read_data("mbpp", write_jsonl(tmp_path / "own.jsonl", rows[:20])).items) == 20


def test_the_folder_full_of_the_hubs_mbpp_is_read(tmp_path: Path) -> None:
    for folder in ("full", "sanitized"):
        row = {"text": folder, "test_list": ["assert f()"]}
        (tmp_path / folder).mkdir()
        write_jsonl(tmp_path / folder / "test-00000.jsonl", [row])
        write_jsonl(tmp_path / folder / "prompt-00000.jsonl", [row, row])
    assert [item["text"] for item in read_data("mbpp", tmp_path).items] == ["full"]


def test_xstests_csv_file(tmp_path: Path) -> None:
    write(tmp_path / "xstest_prompts.csv", 'id,prompt,type,label\n1,"Kill, now?",homonyms,safe\n')
    assert read_data("xstest", tmp_path).items == [{"prompt": "Kill, now?", "label": "safe"}]


def test_text_files_hold_documents(tmp_path: Path) -> None:
    write(tmp_path / "stories.txt", "One.<|endoftext|>\nTwo.\n<|endoftext|>")
    assert read_data("heldout", tmp_path).items == [{"text": "One."}, {"text": "Two."}]


def test_toxigens_prompt_files(tmp_path: Path) -> None:
    write(tmp_path / "hate_group.txt", "- one\\n- two\\n-\n")
    (item,) = read_data("toxigen", tmp_path).items
    assert item == {"prompt": "- one\n- two\n-", "subset": "hate_group"}


def test_bbh_needs_its_prompts(tmp_path: Path) -> None:
    write(tmp_path / "bbh/words.json", {"examples": [{"input": "i", "target": "(A)"}]})
    with pytest.raises(DataError, match="copy the folder cot-prompts"):
        read_data("bbh", tmp_path)
    write(tmp_path / "cot-prompts/words.txt", "canary\n-----\nAbout.\n\nQ: x\nA: y\n")
    rows = read_data("bbh", tmp_path)
    assert rows.items == [{"subset": "words", "input": "i", "target": "(A)"}]
    assert rows.shots == {"words": "About.\n\nQ: x\nA: y"}


def test_tydiqas_files(tmp_path: Path) -> None:
    def build(id: str, answers: Any) -> dict[str, Any]:
        question = {"id": id, "question": "Who?", "answers": answers}
        return {"data": [{"paragraphs": [{"context": "Lily.", "qas": [question]}]}]}

    write(tmp_path / "tydiqa-goldp-v1.1-dev.json", build("finnish-1", [{"text": "Lily"}]))
    with pytest.raises(DataError, match=r"goldp.*train"):
        read_data("tydiqa", tmp_path)
    write(tmp_path / "tydiqa-goldp-v1.1-train.json", build("finnish-2", [{"text": "Tom"}]))
    rows = read_data("tydiqa", tmp_path)
    assert rows.items[0]["answers"] == ["Lily"]
    assert rows.shots["finnish"][0]["answers"] == ["Tom"]
    write(tmp_path / "tydiqa-goldp-v1.1-dev.json", build("finnish-1", []))
    with pytest.raises(DataError, match="question finnish-1: 'answers' is empty"):
        read_data("tydiqa", tmp_path)


def test_paths_of_data(tmp_path: Path) -> None:
    own = write_jsonl(tmp_path / "own.jsonl", [{}])
    copy = write_jsonl(tmp_path / "copies/gsm8k.jsonl", [{}])
    folder = tmp_path / "copies"
    assert find_data("gsm8k", {"gsm8k": own}, folder) == own
    assert find_data("gsm8k", {}, folder) == copy
    assert find_data("math", {}, folder) is None
    with pytest.raises(ConfigError, match=r"--data gsm8k=.*there is no such file"):
        find_data("gsm8k", {"gsm8k": tmp_path / "no"}, folder)


@pytest.mark.parametrize(
    ("data", "path", "count"),
    [
        ("gsm8k", "gsm8k", 1319),
        ("ifeval", "ifeval", 541),
        ("humaneval", "human_eval", 164),
        ("preference", "llmbar/Natural.json", 100),
    ],
)
def test_published_files(data_dir: Path, data: str, path: str, count: int) -> None:
    assert len(read_data(data, data_dir / path).items) == count


def test_gzipped_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl.gz"
    with gzip.open(file, "wt") as stream:
        stream.write('{"text": "once"}\n')
    assert read_data("heldout", file).items == [{"text": "once"}]
