"""Items on which two models differ."""

from __future__ import annotations

import json
from pathlib import Path

from tests.observe.evaluations import FakeTask, write_evaluation
from weft.observe.eval_files import ResultReader
from weft.observe.eval_items import ColumnChanges, find_changes
from weft.observe.eval_table import build_table


def write_pair(folder: Path, before: FakeTask, after: FakeTask) -> None:
    for step, task in ((1, before), (2, after)):
        write_evaluation(folder / str(step), [task], model=f"m@step{step}", date=float(step))


def compare(folder: Path, max_items: int | None = None) -> ColumnChanges:
    reader = ResultReader()
    table = build_table(reader.read([folder]), reader)
    (changes,) = find_changes(table, "m@step1", "m@step2", max_items)
    return changes


def test_right_and_wrong_answers_with_texts(tmp_path: Path) -> None:
    before = FakeTask("words", [1.0, 0.0, 0.0, 1.0], "exact_match", "strict-match")
    after = FakeTask("words", [0.0, 1.0, 1.0, 1.0], "exact_match", "strict-match")
    write_pair(tmp_path, before, after)
    changes = compare(tmp_path)
    assert changes.describe() == "1 right -> wrong; 2 wrong -> right; 1 of 4 items unchanged"
    assert [(each.kind, each.number) for each in changes.changes] == [
        ("right -> wrong", 0),
        ("wrong -> right", 1),
        ("wrong -> right", 2),
    ]
    first = changes.changes[0]
    assert (first.prompt, first.target) == ("What is 0 + 1?", "1")
    assert [answer.text for answer in first.answers] == ["It is 1.", "It is 7."]
    assert [answer.filtered for answer in first.answers] == ["1", "7"]
    assert len(compare(tmp_path, max_items=1).changes) == 2


def test_choices_are_shown_as_texts(tmp_path: Path) -> None:
    write_pair(tmp_path, FakeTask("sums", [1.0, 1.0]), FakeTask("sums", [1.0, 0.0]))
    (change,) = compare(tmp_path).changes
    assert change.target == "2"  # the harness stores the number of the choice, 0
    assert [answer.text for answer in change.answers] == ["2", "3"]
    assert change.answers[0].filtered == "log-likelihood -0.500"


def test_normalized_accuracy_divides_by_the_length_of_a_choice(tmp_path: Path) -> None:
    write_pair(tmp_path, FakeTask("a", [1.0], "acc_norm"), FakeTask("a", [0.0], "acc_norm"))
    for path in tmp_path.rglob("samples*"):
        row = json.loads(path.read_text())
        row["arguments"]["gen_args_1"]["arg_1"] = " a much longer choice"
        row["filtered_resps"] = [["-1.0", "False"], ["-1.5", "False"]]
        path.write_text(json.dumps(row) + "\n")
    assert compare(tmp_path).changes[0].answers[0].text == "a much longer choice"


def test_log_likelihoods_are_sorted_by_the_size_of_the_change(tmp_path: Path) -> None:
    before = FakeTask("stories", [[-4.0, 4], [-4.0, 4], [-4.0, 4]], "word_perplexity")
    after = FakeTask("stories", [[-3.0, 4], [-1.0, 4], [-8.0, 4]], "word_perplexity")
    write_pair(tmp_path, before, after)
    changes = compare(tmp_path)
    assert [(each.kind, each.number) for each in changes.changes] == [
        ("worse", 2),
        ("better", 1),
        ("better", 0),
    ]
    assert changes.changes[0].answers[1].text == "log-likelihood -8.0"


def test_other_documents_are_not_compared(tmp_path: Path) -> None:
    write_pair(tmp_path, FakeTask("a", [1.0]), FakeTask("a", [0.0], template="Other {number}"))
    changes = compare(tmp_path)
    assert changes.refusal == "the documents differ" and not changes.changes
    assert changes.describe() == "not compared: the documents differ"


def test_models_without_a_common_task_have_no_changes(tmp_path: Path) -> None:
    write_pair(tmp_path, FakeTask("a", [1.0, 0.0]), FakeTask("b", [0.0, 1.0]))
    reader = ResultReader()
    table = build_table(reader.read([tmp_path]), reader)
    assert find_changes(table, "m@step1", "m@step2") == []
