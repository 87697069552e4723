"""Page of a run: complete, self-contained, and safe for any contents of the run's files."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import random
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from weft.errors import UserError
from weft.observe import charts, report, timing
from weft.observe.metrics import LARGEST
from weft.observe.page import embed_json
from weft.observe.report import build_page as report_page
from weft.observe.report import build_report, render_lede
from weft.observe.run_files import RunFiles
from weft.observe.timeline import Timeline, TimelineSpan

EVIL = "</script><script>alert('x')</script><img src=x onerror=alert(1)>\"'&\x00\ud800"
VOID = {"meta", "input", "img", "br", "link", "source"}


class Page(HTMLParser):
    """Parser that checks the nesting of elements, and stores the parts that tests read."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.data = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"] and self.tags[-1][1].get("id") == "data":
            self.data += data
        elif self.open[-1:] not in (["script"], ["style"]):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def sections(self) -> list[str]:
        return [str(attrs["id"]) for tag, attrs in self.tags if tag == "section" and "id" in attrs]


def line(step: int, **more: Any) -> dict[str, Any]:
    seconds = {
        "time/actor_gen": 0.5,
        "time/actor_train": 0.25,
        "time/reward": 0.05,
        "step_seconds": 1.0,
    }
    return {
        "step": step,
        "epoch": step / 10,
        **seconds,
        "actor_train/loss": 1.0 / step,
        "reward/reward": step / 10.0,
        **more,
    }


def write_run(folder: Path, steps: int = 12, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    timeline = Timeline(folder / "timeline.json")
    for step in range(1, steps + 1):
        timeline.add("actor_gen", "roles/actor", 1000.0 + step, 0.5, step=step)
        timeline.add("actor_train", "roles/actor", 1000.5 + step, 0.25, step=step)
        timeline.add("reward", "host/reward", 1000.75 + step, 0.05, step=step)
    rows = [
        {"step": s, "id": str(s), "prompt": f"q{s}", "completion": f"a{s}", "reward": s / 10}
        for s in range(1, steps + 1)
    ]
    contents = {
        "metrics.jsonl": "".join(json.dumps(line(step)) + "\n" for step in range(1, steps + 1)),
        "samples.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "graph.svg": '<svg xmlns="http://www.w3.org/2000/svg"/>',
        "config.yaml": yaml.safe_dump(
            {"experiment_name": "exp", "trial_name": "one", "actor": {"optimizer": {"lr": 1e-5}}}
        ),
        "log.txt": "2026-01-01 00:00:00  step 1\n",
        "status.json": '{"status": "finished"}',
        **{name.replace("__", "."): text for name, text in files.items()},
    }
    for name, text in contents.items():
        (folder / name).write_text(text, encoding="utf-8", errors="surrogatepass")
    return folder


def read(folder: Path) -> Page:
    return Page(build_report(folder).read_text(encoding="utf-8"))


def test_a_whole_run_has_every_part(tmp_path: Path) -> None:
    page = read(write_run(tmp_path / "run"))
    assert page.sections() == [
        "top",
        "curves",
        "completions",
        "time",
        "graph",
        "configuration",
        "log",
    ]
    for part in (
        "exp",
        "one",
        "finished",
        "12 steps",
        "Reward went from 0.25 to 1.05 (+0.8); best 1.05 at step 12.",
        ["actor", "optimizer"][1] + ".lr",
        "1e-05",
    ):
        assert part in page.text
    assert "best 1.05" in page.text and "a12" in page.text and "q1" in page.text
    assert [h for h, _ in page.tags if h == "h1"] == ["h1"]


def test_the_report_names_the_best_checkpoint_and_draws_step_0(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    (folder / "checkpoints").mkdir()
    record = {"step": 4, "metric": "eval/loss", "value": 1.25}
    (folder / "checkpoints" / "best.json").write_text(json.dumps(record))
    metrics = folder / "metrics.jsonl"
    metrics.write_text('{"step": 0, "epoch": 0.0, "eval/loss": 6.5}\n' + metrics.read_text())
    run = RunFiles.read(folder)
    assert "The best checkpoint is <b>step 4, eval/loss 1.25</b>." in render_lede(run)
    steps, values = run.get_series("eval/loss")
    assert (steps[0], values[0]) == (0.0, 6.5)


def test_pages_use_no_network_and_allow_only_their_script(tmp_path: Path) -> None:
    path = build_report(write_run(tmp_path / "run"))
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    for tag, attrs in page.tags:
        for name in ("src", "href", "srcset", "action"):
            target = attrs.get(name) or ""
            if tag != "a":
                assert target == "" or target.startswith("data:")
            elif target:
                assert target.startswith(("#", "https://ui.perfetto.dev"))
        assert not any(name.startswith("on") for name in attrs)
    assert "@import" not in text and "url(" not in text
    policy = next(
        attrs["content"]
        for _, attrs in page.tags
        if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    script = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)[-1]
    assert (
        policy
        and f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        in policy
    )
    assert "default-src 'none'" in policy


def test_the_graph_has_the_colours_of_the_page(tmp_path: Path) -> None:
    svg = '<svg xmlns="http://www.w3.org/2000/svg"><style>@media (prefers-color-scheme:dark){a{}}</style></svg>'
    page = read(write_run(tmp_path / "run", graph__svg=svg))
    dark = next(attrs for tag, attrs in page.tags if tag == "source")
    light = next(attrs for tag, attrs in page.tags if tag == "img")
    assert dark["media"] == "(prefers-color-scheme: dark)"
    for url, kind in ((dark["srcset"], "@media all{"), (light["src"], "@media not all{")):
        text = base64.b64decode((url or "").partition("base64,")[2]).decode()
        assert kind in text and ".ground{fill:none}" in text


def test_text_in_data_is_escaped(tmp_path: Path) -> None:
    row = {"step": 1, "id": EVIL, "prompt": EVIL, "completion": EVIL, "note": EVIL[:30], EVIL: 1.0}
    folder = write_run(
        tmp_path / "run",
        metrics__jsonl=json.dumps(line(1) | {f"{EVIL}/loss": 1.0, f"time/{EVIL}": 1.0}) + "\n",
        samples__jsonl=json.dumps(row) + "\n",
        graph__svg="<svg><script>alert(1)</script></svg>",
        config__yaml=yaml.safe_dump({"experiment_name": EVIL[:-2], "a<b>": {EVIL[:-2]: EVIL[:-2]}}),
        log__txt=EVIL,
        status__json=json.dumps({"status": EVIL}),
    )
    Timeline(folder / "timeline.json").add(EVIL, f"roles/{EVIL}", 1.0, 1.0)
    page = read(folder)
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert not any(attrs.get("src") == "x" or "onerror" in attrs for _, attrs in page.tags)
    assert page.text.count("<script>alert('x')</script>") >= 5
    assert isinstance(json.loads(page.data)["charts"], list)


def test_no_text_can_end_its_script_element() -> None:
    text = embed_json([{"label": "</script><!--"}])
    assert "<" not in text and json.loads(text) == [{"label": "</script><!--"}]


ALONE = ["metrics.jsonl", "samples.jsonl", "timeline.json", "graph.svg", "config.yaml", "log.txt"]


@pytest.mark.parametrize("kept", [*([name] for name in ALONE), ["config.yaml", "metrics.jsonl"]])
def test_some_of_the_files_are_enough(tmp_path: Path, kept: list[str]) -> None:
    folder = write_run(tmp_path / "exp" / "two")
    for path in folder.iterdir():
        if path.name not in kept:
            path.unlink()
    page = read(folder)
    assert "unfinished" in page.text
    parts = {
        "metrics.jsonl": "curves",
        "samples.jsonl": "completions",
        "graph.svg": "graph",
        "log.txt": "log",
    }
    assert set(page.sections()) == {
        "top",
        *(part for file, part in parts.items() if file in kept),
    } | ({"time"} if {"metrics.jsonl", "timeline.json"} & set(kept) else set()) | (
        {"configuration"} if "config.yaml" in kept else set()
    )


def test_a_run_that_was_killed_while_writing(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3)
    for name in ("metrics.jsonl", "samples.jsonl", "timeline.json"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-9])
    (folder / "config.yaml").write_text("a: [1, ")
    (folder / "status.json").write_text('{"status": "run')
    page = read(folder)
    assert "2 steps" in page.text and "unfinished" in page.text


def test_empty_files_and_a_first_step_of_nothing_but_nan(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("")
    assert "No step has been written yet" in read(folder).text
    (folder / "metrics.jsonl").write_text('{"step": 1, "train/loss": null}\n')
    assert "1 step." in read(folder).text


def test_a_folder_without_a_run_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "outer" / "trial").mkdir(parents=True)
    (tmp_path / "outer" / "trial" / "config.yaml").write_text("a: 1")
    for name, told in (
        ("none", "no such directory"),
        ("file", "no such"),
        ("empty", "contains no run"),
        ("outer", "outer/trial"),
    ):
        with pytest.raises(UserError, match=told):
            build_report(tmp_path / name)
    assert not list((tmp_path / "empty").iterdir())


def test_evaluations_are_shown_by_the_headline_metric() -> None:
    lines = [
        {"step": s, "train/loss": 2.0, "eval/accuracy": 0.25, "eval/loss": 3.0 + s} for s in (1, 2)
    ]
    tiles = report.render_tiles(run_of(*lines))
    assert "<dt>eval loss</dt><dd>5<small>best 4</small>" in tiles


# -- what is on the charts


def run_of(*lines: dict[str, Any]) -> RunFiles:
    return RunFiles(Path("run"), lines)


def test_training_and_evaluation_share_a_chart_with_every_source_and_no_repeats() -> None:
    lines = [
        {"step": s, "train/loss": 2.0, "eval/a/loss": 3.0, "eval/b/loss": 4.0, "eval/loss": 3.5}
        for s in (1, 2)
    ]
    (chart,) = charts.build_charts(run_of(*lines))
    assert [item.label for item in chart.lines] == ["training", "eval", "eval a", "eval b"]
    assert len({item.hue for item in chart.lines}) == 4
    (one,) = charts.build_charts(
        run_of(
            *({"step": s, "train/loss": 2.0, "eval/a/loss": 3.0, "eval/loss": 3.0} for s in (1, 2))
        )
    )
    assert [item.label for item in one.lines] == ["training", "eval"]


def test_chosen_and_rejected_share_a_chart() -> None:
    lines = [
        {"step": s, "t/rewards/chosen": s, "t/rewards/rejected": -s, "t/rewards/margins": 2 * s}
        for s in (1, 2)
    ]
    found = {
        chart.title: [item.label for item in chart.lines]
        for chart in charts.build_charts(run_of(*lines))
    }
    assert found == {"margins": ["t"], "rewards": ["chosen", "rejected"]} or found["rewards"] == [
        "chosen",
        "rejected",
    ]


def test_gaps_are_counted_and_left_out() -> None:
    (chart,) = charts.build_charts(
        run_of({"step": 1, "a/loss": 1.0}, {"step": 2, "a/loss": None}, {"step": 3, "a/loss": 2.0})
    )
    assert (list(chart.lines[0].x), chart.missing) == ([1.0, 3.0], 1)
    assert "1 not finite" in charts.render_chart(chart, 0)


def test_thinning_keeps_ends_and_spikes() -> None:
    x = [float(i) for i in range(10_000)]
    y = [0.0] * 10_000
    y[4321], y[9000] = 5.0, -5.0
    a, b = charts.thin_series(x, y)
    assert len(a) <= charts.FIRST_VIEW_POINTS + 2 and a == sorted(a)
    assert (a[0], a[-1], max(b), min(b)) == (0.0, 9999.0, 5.0, -5.0)


@pytest.mark.parametrize(
    ("low", "high", "most", "wanted"),
    [
        (0, 1, 5, [0, 0.25, 0.5, 0.75, 1]),
        (1, 60, 5, [20, 40, 60]),
        (-0.25, 0.83, 6, [-0.2, 0, 0.2, 0.4, 0.6, 0.8]),
    ],
)
def test_ticks_are_round(low: float, high: float, most: int, wanted: list[float]) -> None:
    assert charts.choose_ticks(low, high, most) == pytest.approx(wanted)


@pytest.mark.parametrize("value", [0.0, 1e-12, -3e9, 5.0])
def test_a_flat_line_or_a_single_point_can_be_drawn(value: float) -> None:
    for lines in ([{"step": 4, "a/x": value}], [{"step": s, "a/x": value} for s in (1, 2, 3)]):
        (chart,) = charts.build_charts(run_of(*lines))
        assert "nan" not in charts.render_chart(chart, 0)


def test_shares_of_a_step_add_up() -> None:
    rows = timing.compute_shares(run_of(*(line(step) for step in (1, 2, 3))))
    assert [name for name, _, _ in rows] == [
        "actor_gen",
        "actor_train",
        "reward",
        "between the calls",
    ]
    assert sum(share for _, _, share in rows) == pytest.approx(1.0)
    assert rows[0][1:] == pytest.approx((0.5, 0.5))


def test_the_gantt_shows_the_last_steps(tmp_path: Path) -> None:
    spans = timing.SpansByStep.from_spans(RunFiles.read(write_run(tmp_path / "run", steps=9)).spans)
    assert {span.step for span in spans.get_last()} == {7, 8, 9}
    text = timing.render_gantt(spans)
    assert "Steps 7 to 9" in text and text.count('class="lane"') == 2


def test_any_step_can_be_chosen_on_the_timeline(tmp_path: Path) -> None:
    data = timing.SpansByStep.from_spans(
        RunFiles.read(write_run(tmp_path / "run", steps=9)).spans
    ).build_data()
    assert [each["step"] for each in data["steps"]] == list(range(1, 10))
    assert (data["names"], data["lanes"]) == (
        ["actor_gen", "actor_train", "reward"],
        ["actor", "reward"],
    )
    assert data["steps"][3]["spans"] == [[0, 0, 0.0, 0.5], [1, 0, 0.5, 0.25], [2, 1, 0.75, 0.05]]


def test_a_very_long_timeline_is_thinned_but_keeps_its_longest_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timing, "MAX_SPANS", 100)
    spans = [
        TimelineSpan("train", "roles", "actor", float(s), 9.0 if s == 777 else 0.5, s)
        for s in range(1, 1001)
    ]
    kept = timing.SpansByStep.from_spans(spans)
    assert (
        len(kept.steps) <= 100
        and {1, 777, 999, 1000} <= set(kept.steps)
        and kept.left_out == 1000 - len(kept.steps)
    )
    assert "left out" in timing.render_gantt(kept)


def test_curves_can_be_drawn_over_tokens_and_time() -> None:
    lines = [
        {"step": s, "a/num_tokens": 10.0, "b/num_tokens": 4.0, "step_seconds": 0.5}
        for s in (1, 2, 3)
    ]
    assert charts.read_axes(run_of(*lines)) == {
        "step": [1, 2, 3],
        "tokens": [10, 20, 30],
        "time": [0.5, 1.0, 1.5],
    }


def test_a_chart_explains_its_metric(tmp_path: Path) -> None:
    page = read(write_run(tmp_path / "run"))
    assert (
        "Higher is better. Mean reward of the step's completions" in page.text
        and "Healthy:" in page.text
    )


def test_nouns_are_singular_or_plural() -> None:
    assert report.render_lede(run_of({"step": 1, "epoch": 1.0})).startswith(
        "1 step, 1 epoch of data"
    )
    assert "2 epochs" in report.render_tiles(run_of({"step": 2, "epoch": 2.0}))


def test_a_long_run_makes_a_page_that_opens_fast() -> None:
    lines = [{"step": s, **{f"n/m{i}": (s * i) % 97 for i in range(20)}} for s in range(1, 5001)]
    text = report_page(run_of(*lines)).render()
    assert len(text) < 1_000_000


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "metrics"), [(50_000, 8), (100, 1_000), (20, 3_000)])
def test_long_runs_and_many_metrics_take_seconds_of_processor_time(
    tmp_path: Path, steps: int, metrics: int
) -> None:
    names = [f"node{number % 7}/metric_{number}" for number in range(metrics)]
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            values = {name: math.sin(step * (number + 1)) for number, name in enumerate(names)}
            file.write(
                json.dumps({"step": step, "train/loss": 1 / step, "step_seconds": 1.0, **values})
                + "\n"
            )
    began = time.process_time()
    build_report(tmp_path)
    assert time.process_time() - began < 3.0


def test_metrics_are_read_the_same_alone_and_together() -> None:
    """Lines of plain numbers are read at once, others one by one: what is drawn and what is missing
    is the same.
    """
    odd: list[Any] = [
        1,
        2.5,
        None,
        math.nan,
        math.inf,
        -math.inf,
        1e101,
        10**400,
        -(10**400),
        True,
        "3",
        [],
        0,
        -0.0,
    ]
    draws = random.Random(1)
    for _ in range(50):
        some = draws.choice((odd, odd[:5], [1, 2.5], [1.5]))
        names = draws.sample("abcdef", draws.randrange(1, 6))
        lines = [
            {
                "step": step,
                **{
                    name: draws.choice(some)
                    for name in (names if draws.random() < 0.9 else names[:1])
                },
            }
            for step in range(1, 21)
        ]
        run = run_of(*lines)
        drawn = {
            name: [
                (float(line["step"]), float(line[name]))
                for line in lines
                if name in line and type(line[name]) in (int, float) and abs(line[name]) < LARGEST
            ]
            for name in ("step", *names)
        }
        for name in ("step", *names):
            missing = [
                line[name]
                for line in lines
                if name in line and type(line[name]) in (int, float, type(None))
            ]
            assert list(zip(*run.get_series(name), strict=True)) == drawn[name]
            assert run.count_not_finite(name) == len(missing) - len(drawn[name])
        assert set(run.metric_names) == {name for name, points in drawn.items() if points}
