"""Table of evaluations: columns, marks, refusals and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.observe.evaluations import FakeTask, draw_answers, write_checkpoints, write_evaluation
from weft.errors import ConfigError
from weft.observe.eval_cells import BOOTSTRAP, RECORDED, WILSON, TableCell
from weft.observe.eval_files import ResultReader
from weft.observe.eval_table import (
    EvaluationTable,
    TableOptions,
    build_table,
    find_model_name,
    format_score,
    shorten_names,
)

SIX = {10: 0.40, 20: 0.42, 30: 0.55, 40: 0.60, 50: 0.61, 60: 0.30}


def read_table(folder: Path, **options: Any) -> EvaluationTable:
    reader = ResultReader()
    return build_table(reader.read([folder]), reader, TableOptions(**options))


def get_cells(table: EvaluationTable, task: str) -> dict[str, TableCell]:
    """Return the cells of a task's first column by short name."""
    column = next(column for column in table.columns if column.task == task)
    return {
        name: table.cells[model, column]
        for model, name in table.names.items()
        if (model, column) in table.cells
    }


def write_pair(folder: Path, before: Sequence[FakeTask], after: Sequence[FakeTask]) -> None:
    for name, tasks in (("before", before), ("after", after)):
        date = 1.0 if name == "before" else 2.0
        write_evaluation(folder / name, tasks, model=f"t@step{date:.0f}", date=date)


def test_six_checkpoints(tmp_path: Path) -> None:
    write_checkpoints(tmp_path / "runs/demo/ppo", SIX)
    table = read_table(tmp_path)
    assert list(table.names.values()) == [f"ppo@step{step}" for step in SIX]
    assert [column.label for column in table.columns] == [
        "average of 2 tasks",
        "sums acc",
        "words exact_match (strict-match), 5-shot",
        "stories word_perplexity",
    ]
    cells = get_cells(table, "sums")
    assert [cell.mark for cell in cells.values()] == [0, 0, 1, 1, 1, -1]
    assert cells["ppo@step10"].method == WILSON and cells["ppo@step10"].num_items == 200
    assert get_cells(table, "stories")["ppo@step10"].method == BOOTSTRAP
    assert table.verdict.startswith("Best by average of 2 tasks: ppo@step50, 0.578 [")
    assert (
        "1 of 5 others is within noise of it (ppo@step40); the other 4 are worse." in table.verdict
    )
    assert "of 10,000 resamples" in table.verdict


def test_lower_perplexities_are_better(tmp_path: Path) -> None:
    write_checkpoints(tmp_path / "t", {1: 0.4, 2: 0.9})
    table = read_table(tmp_path, by="word_perplexity")
    assert [cell.mark for cell in get_cells(table, "stories").values()] == [1, 0]
    assert list(table.names.values()) == ["t@step2", "t@step1"]
    assert "Best by stories word_perplexity: t@step2" in table.verdict
    assert "The other model is worse beyond noise." in table.verdict


def test_noise_is_not_marked(tmp_path: Path) -> None:
    pairs = [[FakeTask("sums", draw_answers(0.5, 100, seed=seed)) for _ in (0,)] for seed in (1, 2)]
    write_pair(tmp_path, *pairs)
    table = read_table(tmp_path)
    assert {cell.mark for cell in get_cells(table, "sums").values()} == {0}
    assert "is within noise of it: which is better is not known." in table.verdict


RIGHT = draw_answers(0.5, 60)
LONG = [1.0, *RIGHT]


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ({}, {"version": 2.0}, "the version differs (1.0 and 2.0)"),
        ({}, {"template": "Q: {number}?"}, "the documents differ"),
        (
            {"settings": {"generation_kwargs": {"temperature": 0}}},
            {"settings": {"generation_kwargs": {"temperature": 1}}},
            'the generation_kwargs differs ({"temperature": 0} and {"temperature": 1})',
        ),
    ],
)
def test_scores_with_different_settings_are_not_compared(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], reason: str
) -> None:
    wrong = [0.0] * 60
    write_pair(tmp_path, [FakeTask("sums", wrong, **before)], [FakeTask("sums", RIGHT, **after)])
    table = read_table(tmp_path)
    cell = get_cells(table, "sums")["t@step2"]
    assert cell.refusal == reason and cell.mark == 0 and cell.difference is None
    assert f"sums acc: t@step2 not compared with t@step1 (≠): {reason}" in table.notes
    assert table.verdict.endswith("Not comparable with it: t@step1.")


def test_other_prompts_of_the_same_documents_are_not_compared(tmp_path: Path) -> None:
    write_pair(tmp_path, [FakeTask("sums", RIGHT)], [FakeTask("sums", RIGHT)])
    (samples,) = (tmp_path / "after").glob("samples*")
    samples.write_text(samples.read_text().replace('"prompt_hash": "', '"prompt_hash": "0'))
    assert get_cells(read_table(tmp_path), "sums")["t@step2"].refusal == "the prompts differ"


def test_numbers_of_shots_have_separate_columns(tmp_path: Path) -> None:
    write_pair(
        tmp_path,
        [FakeTask("sums", RIGHT, shots=0)],
        [FakeTask("sums", RIGHT, shots=5, template="few {number}")],
    )
    table = read_table(tmp_path)
    assert [column.label for column in table.columns] == ["sums acc", "sums acc, 5-shot"]
    assert "sums with 0 and 5 shots: separate columns, which are not compared" in table.notes
    assert "Only t@step1 has a score by sums acc" in table.verdict


def test_a_limit_compares_the_shared_items(tmp_path: Path) -> None:
    write_pair(tmp_path, [FakeTask("sums", [0.0] * 60)], [FakeTask("sums", [1.0] * 20)])
    table = read_table(tmp_path)
    cell = get_cells(table, "sums")["t@step2"]
    assert cell.mark == 1 and cell.difference is not None and cell.difference.num_items == 20
    assert "sums acc: compared on the 20 items that t@step1 and t@step2 share" in table.notes


def test_without_items_the_recorded_error_is_shown_and_nothing_is_marked(tmp_path: Path) -> None:
    write_checkpoints(tmp_path / "t", {1: 0.2, 2: 0.9}, text=False)
    for path in tmp_path.rglob("samples*"):
        path.unlink()
    for path in tmp_path.rglob("results*"):
        path.write_text(path.read_text().replace('"N/A"', "0.01"))
    table = read_table(tmp_path)
    assert [column.task for column in table.columns] == ["sums", "words"]
    cell = get_cells(table, "sums")["t@step2"]
    assert cell.method == RECORDED and cell.refusal == "there are no items to compare"
    assert cell.interval is not None
    assert cell.interval[1] - cell.value == pytest.approx(0.0196, abs=1e-4)
    assert any("no items of sums are stored" in note for note in table.notes)


def test_items_without_a_value_are_counted(tmp_path: Path) -> None:
    write_evaluation(tmp_path, [FakeTask("sums", [1.0, None, 0.0])], model="m")
    table = read_table(tmp_path)
    assert get_cells(table, "sums")["m"].num_items == 2
    assert "m: 1 of 3 items of sums have no acc" in table.notes


def test_groups_replace_their_tasks(tmp_path: Path) -> None:
    tasks = [FakeTask("a", RIGHT), FakeTask("b", LONG), FakeTask("c", RIGHT, "exact_match")]
    write_evaluation(tmp_path, tasks, groups={"all": ["a", "b"]}, model="m")
    assert [column.task for column in read_table(tmp_path).columns] == ["average", "c", "all"]
    table = read_table(tmp_path, everything=True)
    assert [column.task for column in table.columns] == ["average", "a", "b", "c", "all"]
    assert table.columns[0].measure == "of 2 tasks"
    assert [column.task for column in read_table(tmp_path, tasks=["b"]).columns] == ["b"]


def test_a_metric_can_decide(tmp_path: Path) -> None:
    for step, first, second in ((1, 0.9, 0.1), (2, 0.1, 0.9)):
        tasks = [
            FakeTask("sums", draw_answers(first, 50), "acc"),
            FakeTask("sums", draw_answers(second, 50), "acc_norm"),
        ]
        write_evaluation(tmp_path / str(step), tasks, model=f"t@step{step}", date=float(step))
        (samples,) = (tmp_path / str(step)).glob("samples*")
        lines = samples.read_text().splitlines()
        merged = [merge_metrics(*pair) for pair in zip(lines[:50], lines[50:], strict=True)]
        samples.write_text("\n".join(merged) + "\n")
    assert read_table(tmp_path).best == "t@step1"
    for by in ("acc_norm", "sums:acc_norm", "eval/sums/acc_norm", "eval/sums/none/acc_norm"):
        table = read_table(tmp_path, by=by)
        assert table.best == "t@step2" and table.columns[0].measure == "acc_norm"


def merge_metrics(line: str, other: str) -> str:
    """Return the item of a task with two metrics, which the harness writes as one line."""
    import json

    row = json.loads(line)
    more = json.loads(other)
    row["metrics"] += more["metrics"]
    return json.dumps(row | {"acc_norm": more["acc_norm"]})


def test_without_an_average_the_task_of_most_models_decides(tmp_path: Path) -> None:
    """Runs evaluated on different tasks have one task in common."""
    for step, tasks in {1: ["a", "sums"], 2: ["a", "sums"], 3: ["sums"]}.items():
        answers = [FakeTask(task, draw_answers(0.3 * step, 50)) for task in tasks]
        write_evaluation(tmp_path / f"{step}", answers, model=f"t@step{step}")
    table = read_table(tmp_path)
    assert table.verdict.startswith("Best by sums acc: t@step3")
    other = read_table(tmp_path, by="a")
    assert other.verdict.startswith("Best by a acc: ")
    assert other.verdict.endswith(" 1 model has no such score.")


def test_unknown_names_suggest_the_nearest(tmp_path: Path) -> None:
    write_checkpoints(tmp_path / "t", {1: 0.2, 2: 0.9})
    for options, message in (
        ({"tasks": ["sum"]}, "did you mean sums"),
        ({"base": "t@step3"}, "did you mean t@step"),
        ({"by": "wordz"}, "did you mean words"),
        ({"by": "nothing"}, "known: average"),
        ({"by": "average", "tasks": ["sums"]}, "no two tasks"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_table(tmp_path, **options)


def test_short_names():
    models = ["runs/a/x@step1", "runs/b/x@step1", "org/base"]
    assert shorten_names(models) == {
        "runs/a/x@step1": "a/x@step1",
        "runs/b/x@step1": "b/x@step1",
        "org/base": "org/base",
    }
    names = shorten_names(["runs/a/x@step1", "runs/a/x@step10", "runs/a/y@step10"])
    assert find_model_name("x@step1", names) == "runs/a/x@step1"
    assert find_model_name("a/x@step10", names) == "runs/a/x@step10"
    with pytest.raises(ConfigError, match="names several"):
        find_model_name("@step10", names)


@pytest.mark.parametrize(
    ("value", "text"), [(0.12345, "0.123"), (12.345, "12.35"), (123.45, "123.5"), (1e9, "1e+09")]
)
def test_scores_read_well(value, text):
    assert format_score(value) == text
