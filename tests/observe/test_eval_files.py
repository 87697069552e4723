"""Result files of lm-evaluation-harness: names, scores, items and damaged files."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest

from tests.observe.evaluations import FakeTask, draw_answers, write_checkpoints, write_evaluation
from weft.errors import DataError
from weft.observe.eval_files import (
    EvaluationScore,
    ResultReader,
    count_result_bytes,
    name_model,
    sort_models,
    split_model_name,
)
from weft.observe.eval_statistics import BITS, MEAN, PERPLEXITY


def read_scores(folder: Path) -> tuple[dict[tuple[str, str], EvaluationScore], list[str]]:
    found = ResultReader().read([folder])
    return {(score.task, score.measure): score for score in found.scores}, list(found.notes)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_results_below_a_checkpoint_are_named_after_it(tmp_path: Path) -> None:
    write_checkpoints(tmp_path / "runs/demo/ppo", {10: 0.5, 20: 0.6})
    found = ResultReader().read([tmp_path / "runs"])
    names = sort_models(found.scores)
    assert names == [f"{tmp_path}/runs/demo/ppo@step10", f"{tmp_path}/runs/demo/ppo@step20"]
    assert len({score.path for score in found.scores}) == 2 and not found.notes


@pytest.mark.parametrize(
    ("path", "recorded", "name"),
    [
        ("runs/e/t/checkpoints/actor/step4/eval/results_1.json", "other", "runs/e/t@step4"),
        ("runs/e/t/checkpoints/critic/step4/results_1.json", "", "runs/e/t@step4:critic"),
        ("out/results_1.json", "runs/e/t/checkpoints/actor/step4", "runs/e/t@step4"),
        ("out/results_1.json", "runs/e/t@step4", "runs/e/t@step4"),
        ("out/results_1.json", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("out/step4/results_1.json", "", "out/step4"),
    ],
)
def test_names_of_models(path, recorded, name):
    assert name_model(Path(path), recorded) == name


def test_results_of_a_step_of_a_run_are_named_after_it(tmp_path: Path) -> None:
    (tmp_path / "e/t").mkdir(parents=True)
    (tmp_path / "e/t/metrics.jsonl").touch()
    path = tmp_path / "e/t/eval/step7/results_1.json"
    assert name_model(path, "live") == f"{tmp_path}/e/t@step7"


def test_runs_are_ordered_by_their_oldest_evaluation_and_step(tmp_path: Path) -> None:
    task = [FakeTask("sums", [1.0, 0.0])]
    for model, date in (("z@step9", 1.0), ("a@step1", 2.0), ("z@step10", 3.0), ("base", 4.0)):
        write_evaluation(tmp_path / model, task, model=model, date=date)
    scores = ResultReader().read([tmp_path]).scores
    assert sort_models(scores) == ["base", "z@step9", "z@step10", "a@step1"]
    assert split_model_name("a/b@step3:critic") == ("a/b:critic", 3)


def test_items_give_the_recorded_score(tmp_path: Path) -> None:
    pairs = [[-3.0, 4], [-5.0, 5], [-1.0, 2]]
    tasks = [
        FakeTask("sums", draw_answers(0.5, 30)),
        FakeTask("words", [0.25, None, 0.75, 0.5], "score"),
        FakeTask("stories", pairs, "word_perplexity"),
    ]
    write_evaluation(tmp_path, tasks)
    scores, _ = read_scores(tmp_path)
    reader = ResultReader()
    forms = {}
    for (task, _), score in scores.items():
        items, problem = reader.load_items(score)
        assert items is not None, problem
        forms[task] = (items.scored.form, items.scored.num_items)
    assert forms == {"sums": (MEAN, 30), "words": (MEAN, 3), "stories": (PERPLEXITY, 3)}
    assert not scores["stories", "word_perplexity"].rises and scores["sums", "acc"].rises


def test_groups_are_pooled_or_means_of_their_tasks(tmp_path: Path) -> None:
    tasks = [FakeTask("a", [1.0, 0.0, 0.0, 0.0]), FakeTask("b", [1.0, 1.0])]
    path = write_evaluation(tmp_path, tasks, groups={"all": ["a", "b"]})
    scores, _ = read_scores(tmp_path)
    items, _ = ResultReader().load_items(scores["all", "acc"])
    assert items is not None and items.scored.num_items == 6
    assert items.scored.shares.tolist() == [1.0]
    results = json.loads(path.read_text())["results"]
    results["all"]["acc,none"] = (0.25 + 1.0) / 2
    edit(path, results=results)
    scores, _ = read_scores(tmp_path)
    items, _ = ResultReader().load_items(scores["all", "acc"])
    assert items is not None and items.scored.shares.tolist() == [0.5, 0.5]


def test_intervals_are_not_read_as_scores(tmp_path: Path) -> None:
    path = write_evaluation(tmp_path, [FakeTask("sums", [1.0, 0.0])])
    results = json.loads(path.read_text())["results"]
    results["sums"]["acc_ci95,none"] = [0.1, 0.9]
    edit(path, results=results)
    scores, notes = read_scores(tmp_path)
    assert list(scores) == [("sums", "acc")] and not notes


@pytest.mark.parametrize("value", [math.nan, math.inf, "nan", "N/A", None, [1.0]])
def test_values_that_are_not_numbers_are_no_scores(tmp_path: Path, value: Any) -> None:
    path = write_evaluation(tmp_path, [FakeTask("sums", [1.0, 0.0]), FakeTask("words", [1.0])])
    results = json.loads(path.read_text())["results"]
    results["sums"]["acc,none"] = value
    edit(path, results=results)
    scores, notes = read_scores(tmp_path)
    assert list(scores) == [("words", "acc")]
    assert "acc of sums is" in notes[0] and "not a score" in notes[0]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not JSON"),
        ("[]", "contains no JSON object"),
        ("{}", "has no `results`"),
        ('{"results": {"a": 3}}', "results of a are no object"),
        ("[" * 5000, "nested too deeply"),
    ],
)
def test_damaged_result_files_are_noted(tmp_path: Path, text: str, problem: str) -> None:
    write_evaluation(tmp_path, [FakeTask("sums", [1.0, 0.0])])
    (tmp_path / "results_bad.json").write_text(text)
    scores, notes = read_scores(tmp_path)
    assert list(scores) == [("sums", "acc")]
    (note,) = notes
    assert problem in note and "results_bad.json" in note


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda text: text[:-20], "samples_sums_2026-11-28T20-00-01.000000.jsonl:4: is not JSON"),
        (lambda text: text + text, ":5: repeats item 0"),
        (lambda text: text.replace('"doc_id": 2', '"doc_id": "x"'), "no whole number"),
        (lambda text: "3\n", ":1: contains no JSON object"),
        (lambda text: text.splitlines()[0] + "\n", "items are missing"),
        (lambda text: "", "no finite values of acc"),
        (lambda text: None, "no items of sums are stored"),
    ],
)
def test_damaged_items_give_no_interval(tmp_path: Path, change: Any, problem: str) -> None:
    write_evaluation(tmp_path, [FakeTask("sums", [1.0, 0.0, 1.0, 0.0])])
    (samples,) = tmp_path.glob("samples_*")
    text = change(samples.read_text())
    if text is None:
        samples.unlink()
    else:
        samples.write_text(text)
    scores, _ = read_scores(tmp_path)
    items, reason = ResultReader().load_items(scores["sums", "acc"])
    assert items is None and problem in reason


def test_of_several_results_the_fullest_counts_and_then_the_newest(tmp_path: Path) -> None:
    for date, values in ((1.0, [1.0] * 9), (2.0, [0.0] * 9), (3.0, [1.0] * 2)):
        write_evaluation(tmp_path, [FakeTask("sums", values)], model="m", date=date)
    found = ResultReader().read([tmp_path])
    (score,) = found.scores
    assert score.value == 0.0 and score.num_items == 9
    assert "several results of sums of m" in found.notes[0]


def test_files_are_read_again_after_a_change(tmp_path: Path) -> None:
    path = write_evaluation(tmp_path, [FakeTask("sums", [1.0, 0.0])])
    reader = ResultReader()
    assert reader.read([tmp_path]).scores[0].value == 0.5
    edit(path, results={"sums": {"acc,none": 0.123456}})
    assert reader.read([tmp_path, tmp_path]).scores[0].value == 0.123456


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such folder"):
        ResultReader().read([tmp_path / "none"])


def test_hostile_names_and_numbers_end_in_notes(tmp_path: Path) -> None:
    names = ["../../etc/passwd", "a" * 400, "nul\0", "line\n"]
    (tmp_path / "results_1.json").write_text(
        json.dumps(
            {
                "results": {
                    name: {"acc,none": 10**400 if name == "nul\0" else 0.5} for name in names
                },
                "group_subtasks": {names[0]: [names[0]], "loop": ["loop"]},
                "model_name": f"m@step{'9' * 5000}",
            }
        )
    )
    scores, notes = read_scores(tmp_path)
    assert len(scores) == 3 and len(notes) == 1
    for score in scores.values():
        assert split_model_name(score.model)[1] == -1
        assert score.get_samples_path(score.task).parent == tmp_path
        items, problem = ResultReader().load_items(score)
        assert items is None and "no items of" in problem


TASKS = {
    "local_mc": """
output_type: multiple_choice
doc_to_text: "{{question}} Answer:"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list: [{metric: acc}, {metric: acc_norm}]""",
    "local_gen": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: answer
generation_kwargs: {until: ["\\n"], max_gen_toks: 8}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
filter_list:
 - {name: strict-match, filter: [{function: regex, regex_pattern: "(lo)"}, {function: take_first}]}
 - {name: flexible, filter: [{function: take_first}]}""",
    "local_ppl": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: question
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]""",
}


@pytest.mark.slow
def test_results_of_the_harness_have_the_expected_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    # it looks for a tokenizer of that name, and would try again for a minute
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf/datasets"))
    from lm_eval import simple_evaluate
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.models.dummy import DummyLM
    from lm_eval.tasks import TaskManager

    rows = [
        {
            "question": f"{n}+1?",
            "answer": "lol" if n % 3 else "no",
            "choices": ["a", "bc"],
            "gold": 0,
        }
        for n in range(9)
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, text in {**TASKS, "local_mc2": TASKS["local_mc"]}.items():
        source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}"
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\n{source}\ntest_split: test{text}\nmetadata: {{version: 1.0}}\n"
        )
    (folder / "group.yaml").write_text(
        "group: local_group\ntask: [local_mc, local_mc2]\n"
        "aggregate_metric_list: [{metric: acc, aggregation: mean, weight_by_size: true}]\n"
    )
    tracker = EvaluationTracker(output_path=str(tmp_path / "out"))
    results = simple_evaluate(
        model=DummyLM(),
        model_args="pretrained=runs/e/t/checkpoints/actor/step4",
        tasks=["local_group", "local_gen", "local_ppl"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        evaluation_tracker=tracker,
        bootstrap_iters=10,
    )
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    for name in samples:
        tracker.save_results_samples(task_name=name, samples=samples[name])
    found = ResultReader().read([tmp_path / "out"])
    assert not found.notes and {score.model for score in found.scores} == {"runs/e/t@step4"}
    reader = ResultReader()
    forms = {}
    for score in found.scores:
        items, problem = reader.load_items(score)
        assert items is not None, problem
        forms[score.task, score.measure] = (items.scored.form, items.scored.num_items)
    assert forms == {
        ("local_group", "acc"): (MEAN, 18),
        **{(task, m): (MEAN, 9) for task in ("local_mc", "local_mc2") for m in ("acc", "acc_norm")},
        ("local_gen", "exact_match (strict-match)"): (MEAN, 9),
        ("local_gen", "exact_match (flexible)"): (MEAN, 9),
        ("local_ppl", "word_perplexity"): (PERPLEXITY, 9),
        ("local_ppl", "byte_perplexity"): (PERPLEXITY, 9),
        ("local_ppl", "bits_per_byte"): (BITS, 9),
    }
    compare_forms(tmp_path)


def compare_forms(tmp_path: Path) -> None:
    """Check that the files of `write_evaluation` have only keys that the harness writes."""
    task = FakeTask("local_mc", [1.0, 0.0])
    other = FakeTask("local_gen", [1.0, 0.0], "exact_match", "flexible")
    own = write_evaluation(tmp_path / "own", [task, other])
    (real,) = (tmp_path / "out").rglob("results_*.json")
    contents = [json.loads(path.read_text()) for path in (own, real)]
    assert contents[0].keys() <= contents[1].keys()
    for name in ("local_mc", "local_gen"):
        assert contents[0]["results"][name].keys() <= contents[1]["results"][name].keys()
        rows = []
        for path in (own, real):
            (samples,) = path.parent.glob(f"samples_{name}_*")
            rows.append(json.loads(samples.read_text().splitlines()[0]))
        assert rows[0].keys() <= rows[1].keys()
        shapes = [np.array(row["filtered_resps"]).ndim for row in rows]
        assert shapes[0] == shapes[1]
    assert os.path.exists(real)


def test_items_next_to_several_results_are_counted_once(tmp_path: Path) -> None:
    for name, size in (("results_1.json", 10), ("results_2.json", 10), ("samples_a_1.jsonl", 100)):
        (tmp_path / name).write_text("x" * size)
    assert count_result_bytes(tmp_path) == 120
