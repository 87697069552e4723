"""Evaluations in pages: the table, the items, and hostile texts."""

from __future__ import annotations

import json
from pathlib import Path

from tests.observe.evaluations import FakeTask, write_checkpoints, write_evaluation
from tests.observe.test_report import EVIL, Page, write_run
from weft.observe.compare import build_comparison
from weft.observe.dashboard import Dashboard
from weft.observe.eval_files import ResultReader
from weft.observe.eval_html import render_evaluations
from weft.observe.report import build_report

STEPS = {10: 0.4, 20: 0.45, 30: 0.6}


def render(folder: Path) -> Page:
    return Page(render_evaluations([folder], ResultReader()))


def test_the_report_has_the_table_and_the_changes(tmp_path: Path) -> None:
    run = write_checkpoints(write_run(tmp_path / "exp" / "one"), STEPS)
    page = Page(build_report(run).read_text())
    assert "Best by average of 2 tasks: one@step30" in page.text
    assert "What changed from one@step10 to one@step30" in page.text
    assert "It is 7." in page.text and "What is 0 + 1?" in page.text
    assert page.text.count("▲") > 2


def test_a_run_without_results_has_no_such_section(tmp_path: Path) -> None:
    page = Page(build_report(write_run(tmp_path / "exp" / "one")).read_text())
    assert "Evaluations" not in page.text
    assert render_evaluations([tmp_path / "none"], ResultReader()) == ""


def test_a_comparison_of_runs_has_the_table_of_both(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "exp" / name) for name in ("one", "two")]
    for run in runs:
        write_checkpoints(run, {10: 0.5}, count=20)
    page = Page(build_comparison(runs, tmp_path / "compare.html").read_text())
    assert "one@step10" in page.text and "two@step10" in page.text


def test_the_dashboard_links_scores_to_changed_items(tmp_path: Path) -> None:
    run = write_checkpoints(write_run(tmp_path / "exp" / "one"), STEPS)
    board = Dashboard(tmp_path)
    answer = board.answer("", {})
    page = Page(answer.body)
    links = [attrs["href"] for tag, attrs in page.tags if tag == "a" and attrs.get("href")]
    assert sum(str(link).startswith("items?model=") for link in links) == 6
    query = {"model": [f"{run}@step10", f"{run}@step30"], "task": ["words"]}
    items = board.answer("items", query)
    assert items.status == 200 and "wrong → right" in items.body
    assert "words exact_match" in items.body and "sums acc" not in items.body
    assert board.answer("items", query, items.tag).status == 304
    assert "connect-src 'self'" in items.body


def test_new_results_renew_the_pages(tmp_path: Path) -> None:
    run = write_run(tmp_path / "exp" / "one")
    board = Dashboard(tmp_path)
    first = {page: board.answer(page, query) for page, query in PAGES.items()}
    write_checkpoints(run, STEPS, count=20)
    for page, query in PAGES.items():
        again = board.answer(page, query, first[page].tag)
        assert again.status == 200 and "one@step30" in again.body
        assert board.answer(page, query, again.tag).status == 304


PAGES: dict[str, dict[str, list[str]]] = {"": {}, "run": {"name": ["exp/one"]}}


def test_only_evaluated_models_are_answered(tmp_path: Path) -> None:
    run = write_checkpoints(write_run(tmp_path / "exp" / "one"), {10: 0.5}, count=20)
    board = Dashboard(tmp_path)
    for models in ([f"{run}@step10"], [f"{run}@step10", "/etc/passwd"], []):
        assert board.answer("items", {"model": models}).status == 404


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    for step, value in ((1, 1.0), (2, 0.0)):
        tasks = [FakeTask("words", [value, 0.0], "exact_match", template=EVIL + "{number}")]
        path = write_evaluation(tmp_path / str(step), tasks, model=f"{EVIL}@step{step}")
        for samples in path.parent.glob("samples*"):
            samples.write_text(samples.read_text().replace("It is", json.dumps(EVIL)[1:-1]))
        path.write_text(path.read_text().replace('"acc', f'"{EVIL[:9]}'))
    page = render(tmp_path)
    assert not any(tag == "script" for tag, _ in page.tags)
    assert not any(attrs.get("src") == "x" or "onerror" in attrs for _, attrs in page.tags)
    assert page.text.count("<script>alert('x')</script>") >= 3
