"""Responses of the dashboard."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.observe.test_report import EVIL, Page, line, write_run
from weft.observe.dashboard import Dashboard, format_age, format_size


def test_the_list_has_a_row_for_each_run_with_values_to_sort_by(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / "exp" / name)
    page = Page(Dashboard(tmp_path).answer("", {}).body)
    links = [
        attrs["href"]
        for tag, attrs in page.tags
        if tag == "a" and (attrs.get("href") or "").startswith("run?")
    ]
    assert sorted(map(str, links)) == ["run?name=exp%2Fone", "run?name=exp%2Ftwo"]
    assert (
        page.text.count("finished") == 2 and "12 of 12" in page.text and "reward 1.05" in page.text
    )
    assert [attrs["value"] for tag, attrs in page.tags if attrs.get("name") == "run"] != []


def test_an_empty_folder_says_what_to_do(tmp_path: Path) -> None:
    assert "weft demo" in Page(Dashboard(tmp_path / "none").answer("", {}).body).text


def test_pages_change_when_their_run_continues(tmp_path: Path) -> None:
    board = Dashboard(tmp_path)
    run = write_run(tmp_path / "exp" / "one")
    for page, query in (("", {}), ("run", {"name": ["exp/one"]})):
        first = board.answer(page, query)
        assert (
            first.status == 200
            and f'data-live="{first.tag.replace(chr(34), "&quot;")}"' in first.body
        )
        assert board.answer(page, query, first.tag).status == 304
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 99, "reward/reward": 3.0}\n')
        assert board.answer(page, query, first.tag).status == 200
        (run / "metrics.jsonl").write_text("")


def test_live_pages_connect_only_to_their_server(tmp_path: Path) -> None:
    write_run(tmp_path / "exp" / "one")
    body = Dashboard(tmp_path).answer("run", {"name": ["exp/one"]}).body
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', body)
    assert policy and "default-src 'none'" in policy[1] and "connect-src 'self'" in policy[1]


def test_names_of_folders_show_as_text(tmp_path: Path) -> None:
    name = EVIL.split("/")[-1][:20].replace("\x00", "")
    write_run(tmp_path / "exp" / f"<img src=x>{name}")
    page = Page(Dashboard(tmp_path).answer("", {}).body)
    assert not any(attrs.get("src") == "x" for _, attrs in page.tags)


def test_a_run_may_be_the_folder_itself(tmp_path: Path) -> None:
    run = write_run(tmp_path / "alone")
    board = Dashboard(run)
    assert board.answer("run", {"name": ["alone"]}).status == 200


def test_more_runs_than_colours_are_refused_in_words(tmp_path: Path) -> None:
    for index in range(8):
        write_run(tmp_path / "exp" / str(index))
    answer = Dashboard(tmp_path).answer("compare", {"run": [f"exp/{index}" for index in range(8)]})
    assert answer.status == 400 and "2 to 6" in answer.body


def test_sizes_and_ages_read_well() -> None:
    assert [format_size(n) for n in (12, 1500, 4_400_000, 23 * 10**9)] == [
        "12 B",
        "1.5 kB",
        "4.4 MB",
        "23 GB",
    ]
    assert [format_age(s) for s in (3.0, 130, 7300, 100_000, 200_000)] == [
        "3 s",
        "2 min",
        "2 h",
        "1 day",
        "2 days",
    ]


def test_a_flagged_run_is_marked_in_the_list(tmp_path: Path) -> None:
    rows = [line(step) | {"actor_train/kl": 4.0} for step in range(1, 13)]
    write_run(
        tmp_path / "exp" / "bad", metrics__jsonl="".join(json.dumps(row) + "\n" for row in rows)
    )
    write_run(tmp_path / "exp" / "good")
    page = Page(Dashboard(tmp_path).answer("", {}).body)
    assert (
        page.text.count("KL 4 nats per token (usual: at most 1)") == 1
        and page.text.count("finished !") == 1
    )
    assert "KL 4 nats" in Page(Dashboard(tmp_path).answer("run", {"name": ["exp/bad"]}).body).text
