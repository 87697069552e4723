"""Page that compares runs: the verdict, differing options, curves and answers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.observe.test_report import EVIL, Page, line, write_run
from tests.work import calls_of
from weft.errors import UserError
from weft.observe import compare
from weft.observe.charts import Chart
from weft.observe.compare import build_comparison, build_comparison_charts, list_measures
from weft.observe.differences import find_differences
from weft.observe.run_files import RunFiles
from weft.observe.verdict import NamedRun, name_runs, write_verdict


def draw(runs: Sequence[NamedRun]) -> list[Chart]:
    return build_comparison_charts(runs, list_measures(runs))


def lines(slope: float, **more: Any) -> str:
    rows = [
        line(s) | {"reward/reward": slope * s, "actor_train/kl": 0.1} | more for s in range(1, 21)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


def config(trial: str, lr: float) -> str:
    return yaml.safe_dump(
        {
            "experiment_name": "exp",
            "trial_name": trial,
            "actor": {"optimizer": {"lr": lr, "eps": 1e-8}},
        }
    )


def two(tmp_path: Path) -> list[Path]:
    return [
        write_run(
            tmp_path / "exp" / "slow", metrics__jsonl=lines(0.1), config__yaml=config("slow", 1e-5)
        ),
        write_run(
            tmp_path / "exp" / "fast", metrics__jsonl=lines(0.4), config__yaml=config("fast", 1e-4)
        ),
    ]


def test_the_page_says_which_run_was_better_and_why(tmp_path: Path) -> None:
    page = Page(build_comparison(two(tmp_path), tmp_path / "c.html").read_text())
    assert page.sections() == ["top", "settings", "metrics", "curves", "answers"]
    assert "fast ended with the higher reward: 7.2 against 1.8 (slow)." in page.text
    assert "They differ in actor.optimizer.lr (1e-05, 0.0001)." in page.text
    assert "actor.optimizer.eps" not in page.text
    assert "7.2 ✓" in page.text and "1.8 ✓" not in page.text
    assert page.text.count("q12") == 1 and page.text.count("a12") == 2


def test_a_metric_is_drawn_once_with_a_line_a_run(tmp_path: Path) -> None:
    runs = name_runs([RunFiles.read(path) for path in two(tmp_path)])
    found = draw(runs)
    assert [(chart.title, [item.label for item in chart.lines]) for chart in found[:2]] == [
        ("reward", ["slow", "fast"]),
        ("loss", ["slow", "fast"]),
    ]
    assert len({chart.title for chart in found}) == len(found)
    assert [item.run for item in found[0].lines] == [0, 1]


def test_measures_of_nodes_with_other_names_meet(tmp_path: Path) -> None:
    one, other = two(tmp_path)
    (other / "metrics.jsonl").write_text(lines(0.4).replace("reward/reward", "rew_inf/reward"))
    runs = name_runs([RunFiles.read(path) for path in (one, other)])
    assert "fast</b> ended with the higher reward" in write_verdict(runs)
    assert [item.label for item in draw(runs)[0].lines] == ["slow", "fast"]


def test_a_loss_is_better_where_it_is_lower_but_not_a_policys(tmp_path: Path) -> None:
    texts = [
        "".join(
            json.dumps({"step": s, "train/loss": value / s, "train/grad_norm": 1.0}) + "\n"
            for s in range(1, 21)
        )
        for value in (1.0, 2.0)
    ]
    runs = [
        write_run(tmp_path / name, metrics__jsonl=text)
        for name, text in zip(("a", "b"), texts, strict=True)
    ]
    page = Page(build_comparison(runs, tmp_path / "c.html").read_text())
    assert "ended with the lower loss" in page.text and "0.0559 ✓" in page.text
    rl = Page(build_comparison(two(tmp_path), tmp_path / "d.html").read_text())
    assert "0.0559 ✓" not in rl.text, "the reward decides, and a policy's loss says nothing"


def test_runs_that_share_nothing_and_runs_that_are_alike(tmp_path: Path) -> None:
    one, other = two(tmp_path)
    alike = name_runs([RunFiles.read(path) for path in (one, one)])
    assert (
        "ended alike" in write_verdict(alike)
        and find_differences([each.run for each in alike]) == {}
    )
    assert len({each.label for each in alike}) == 1, "they have the same folder"
    (other / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n')
    assert "have no common metric" in write_verdict(
        name_runs([RunFiles.read(path) for path in (one, other)])
    )
    for name in ("samples.jsonl", "config.yaml", "metrics.jsonl"):
        (other / name).unlink()
        assert "compared" in build_comparison([one, other], tmp_path / "c.html").read_text()


def rewarded(tmp_path: Path, *sources: dict[str, Any]) -> Page:
    runs = two(tmp_path)
    for run, source in zip(runs, sources, strict=True):
        (run / "config.yaml").write_text(yaml.safe_dump({"trial_name": run.name} | source))
    return Page(build_comparison(runs, tmp_path / "c.html").read_text())


def test_rewards_from_different_sources_are_not_compared(tmp_path: Path) -> None:
    model = {"reward": None, "rew": {"path": "runs/e/rw/checkpoints/model/step28"}}
    page = rewarded(tmp_path, model, {"reward": "gsm8k", "rew": {"path": None}})
    assert (
        "The rewards come from different sources and cannot be compared. They differ in"
        in page.text
    )
    assert "ended with" not in page.text and "7.2 ✓" not in page.text
    assert "runs/e/rw@step28" in page.text and "checkpoints" not in page.text
    page = rewarded(tmp_path, {"reward": "gsm8k"}, {"reward": "gsm8k"})
    assert "ended with the higher reward" in page.text and "7.2 ✓" in page.text


def test_a_curve_that_repeats_another_of_its_node_is_left_out(tmp_path: Path) -> None:
    runs = two(tmp_path)
    for slope, run in zip((0.1, 0.4), runs, strict=True):
        rows = [
            line(s) | {"critic/loss": slope / s, "critic/value_loss": slope / s}
            for s in range(1, 21)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = draw(name_runs([RunFiles.read(run) for run in runs]))
    assert [c.title for c in found if c.node == "critic"] == ["loss"]
    rows[3]["critic/value_loss"] = 5.0
    (runs[1] / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = draw(name_runs([RunFiles.read(run) for run in runs]))
    assert [c.title for c in found if c.node == "critic"] == ["loss", "value loss"], (
        "in one run it is another curve"
    )


def test_each_value_of_a_chart_is_next_to_the_name_of_its_run(tmp_path: Path) -> None:
    one, other = two(tmp_path)
    (other / "metrics.jsonl").write_text(
        '{"step": 1, "extra/thing": 7.5}\n{"step": 2, "extra/thing": 8.5}\n'
    )
    page = build_comparison([one, other], tmp_path / "c.html").read_text()
    assert page.count('<output class="readout" aria-live="off" data-step></output>') == page.count(
        "<figure"
    )
    assert "</i>fast <b>8.5</b>" in page, "also where one run alone has the metric"


def test_text_in_data_is_escaped(tmp_path: Path) -> None:
    runs = two(tmp_path)
    for run in runs:
        row = {
            "step": 1,
            "id": EVIL,
            "prompt": EVIL,
            "completion": EVIL,
            "answer": EVIL,
            "tokens": [EVIL],
            "logprobs": [-1],
        }
        (run / "samples.jsonl").write_text(json.dumps(row) + "\n")
        name = f"{run.name}{EVIL[:-2]}"
        (run / "config.yaml").write_text(
            yaml.safe_dump({"trial_name": name, "o": {EVIL[:-2]: name}})
        )
    page = Page(build_comparison(runs, tmp_path / "c.html").read_text())
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert not any(attrs.get("src") == "x" or "onerror" in attrs for _, attrs in page.tags)
    assert json.loads(page.data)["tokens"]


def noisy(slope: float, steps: int, spread: float = 0.0) -> str:
    """Return rewards that rise by `slope` per step and alternate by `spread`."""
    jumps = [0.0, 1.0, -1.0, 0.5, -0.5, 1.0, -0.5]
    rows = [
        line(s) | {"reward/reward": slope * s + spread * jumps[s % 7]} for s in range(1, steps + 1)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_runs_of_unequal_length_are_compared_at_their_common_step(tmp_path: Path) -> None:
    short, long = two(tmp_path)
    (short / "metrics.jsonl").write_text(noisy(0.2, 20))
    (long / "metrics.jsonl").write_text(noisy(0.1, 80))
    page = Page(build_comparison([short, long], tmp_path / "c.html").read_text())
    assert (
        "At step 20, the last that all runs have completed, slow has the higher reward: 3.6 against 1.8 "
        "(fast)." in page.text
    )
    assert "3.6 ✓" in page.text and "ended with" not in page.text, "the longer run ended at 7.65"


def test_a_run_in_progress_is_marked_everywhere(tmp_path: Path) -> None:
    one, other = two(tmp_path)
    (other / "status.json").write_text('{"status": "running"}')
    runs = name_runs([RunFiles.read(path) for path in (one, other)])
    told = write_verdict(runs)
    assert (
        "At step 20, the last that all runs have completed," in told
        and "fast (running)</b> has the higher reward" in told
    )
    assert [item.label for item in draw(runs)[0].lines] == [
        "slow",
        "fast (running)",
    ]
    page = Page(build_comparison([one, other], tmp_path / "c.html").read_text())
    assert ("th", {"scope": "col"}) in page.tags and page.text.count("fast (running)") >= 3


def test_differences_within_the_noise_decide_nothing(tmp_path: Path) -> None:
    one, other = two(tmp_path)
    (one / "metrics.jsonl").write_text(noisy(0.0, 40, spread=0.1))
    (other / "metrics.jsonl").write_text(noisy(0.001, 40, spread=0.1))
    told = write_verdict(name_runs([RunFiles.read(path) for path in (one, other)]))
    assert "ended alike within noise" in told and "higher" not in told
    (other / "metrics.jsonl").write_text(noisy(0.05, 40, spread=0.1))
    assert "fast</b> ended with the higher reward" in write_verdict(
        name_runs([RunFiles.read(path) for path in (one, other)])
    )


def losses(folder: Path, node: str, scale: float, **config: Any) -> Path:
    rows = [
        {"step": s, f"{node}/loss": scale / s, f"{node}/kl": 0.1 + scale / s} for s in range(1, 21)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    return write_run(
        folder,
        metrics__jsonl=text,
        config__yaml=yaml.safe_dump({"trial_name": folder.name} | config),
    )


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (
            ("train", {"sft": {}}),
            ("actor_train", {"grpo": {}}),
            "loss has a different meaning in each of these runs (sft, grpo)",
        ),
        (
            ("train", {"sft": {}}),
            ("train", {"distill": {}}),
            "loss has a different meaning in each of these runs (sft, distill)",
        ),
        (
            ("actor_train", {"grpo": {}}),
            ("actor_train", {"grpo": {}}),
            "loss has a different meaning in each of these runs (grpo",
        ),
        (
            ("t", {"dpo": {"beta": 0.1}}),
            ("t", {"dpo": {"beta": 0.5}}),
            "loss is computed in different ways (dpo.beta)",
        ),
        (
            ("train", {"sft": {}, "dataset": {"path": "a"}}),
            ("train", {"sft": {}, "dataset": {"path": "b"}}),
            "loss was measured on different rows",
        ),
    ],
)
def test_losses_that_mean_different_things_are_not_compared(
    one: tuple[str, dict[str, Any]], other: tuple[str, dict[str, Any]], told: str, tmp_path: Path
) -> None:
    paths = [
        losses(tmp_path / f"run{n}", node, n + 1.0, **config)
        for n, (node, config) in enumerate((one, other))
    ]
    for runs in (paths, paths[::-1]):
        listed = name_runs([RunFiles.read(path) for path in runs])
        said = write_verdict(listed)
        assert told.partition("(sft")[0].strip() in said
        assert "lower" not in said and "ended" not in said
        drawn = [
            [item.label for item in chart.lines] for chart in draw(listed) if chart.title == "loss"
        ]
        alike = one[1] == other[1]
        assert drawn == ([[r.label for r in listed]] if alike else [[r.label] for r in listed])
        page = build_comparison(runs, tmp_path / "c.html").read_text()
        assert 'class="better"' not in page and ("A metric has several charts" in page) is not alike


def test_validation_on_the_same_rows_compares_runs_of_different_data(tmp_path: Path) -> None:
    runs = []
    for name, value in (("a", 0.5), ("b", 0.4)):
        rows = [{"step": s, "train/loss": 1.0, "eval/loss": value} for s in range(1, 11)]
        options = {"trial_name": name, "sft": {}, "dataset": {"path": name, "valid_path": "v"}}
        text = "".join(json.dumps(row) + "\n" for row in rows)
        runs.append(
            write_run(tmp_path / name, metrics__jsonl=text, config__yaml=yaml.safe_dump(options))
        )
    assert "b</b> ended with the lower eval loss: <b>0.4</b> against 0.5 (a)" in write_verdict(
        name_runs([RunFiles.read(run) for run in runs])
    )


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (None, "b</b> ended with the higher eval accuracy: <b>0.66</b> against 0.6 (a)."),
        (
            100,
            "The runs ended alike within noise (± 0.13) in their eval accuracy: 0.6 (a), 0.66 (b).",
        ),
        (
            5_000,
            "b</b> ended with the higher eval accuracy: <b>0.66</b> against 0.6 (a), with a noise "
            "of ± 0.019.",
        ),
    ],
)
def test_evaluated_accuracies_are_compared_with_the_noise_of_so_few_rows(
    tmp_path: Path, rows: int | None, told: str
) -> None:
    runs = []
    for name, value in (("a", 0.6), ("b", 0.66)):
        counted = {} if rows is None else {"eval/num_rows": rows}
        one = {"train/accuracy": 0.7, "train/kendalltau": 0.4, "eval/accuracy": value, **counted}
        text = "".join(json.dumps({"step": s, **one}) + "\n" for s in range(1, 11))
        config = yaml.safe_dump({"trial_name": name, "rw": {}})
        runs.append(
            RunFiles.read(write_run(tmp_path / name, metrics__jsonl=text, config__yaml=config))
        )
    assert told in write_verdict(name_runs(runs))
    assert all("num rows" not in chart.title for chart in draw(name_runs(runs)))


def test_curves_of_rewards_from_different_sources_are_drawn_apart(tmp_path: Path) -> None:
    runs = two(tmp_path)
    for run, source in zip(runs, ("gsm8k", "math"), strict=True):
        (run / "config.yaml").write_text(yaml.safe_dump({"trial_name": run.name, "reward": source}))
    found = draw(name_runs([RunFiles.read(run) for run in runs]))
    assert [[item.label for item in chart.lines] for chart in found if chart.title == "reward"] == [
        ["slow"],
        ["fast"],
    ]
    assert [[item.label for item in chart.lines] for chart in found if chart.title == "KL"] == [
        ["slow", "fast"]
    ]


def test_the_number_of_runs_is_limited(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for count in (1, compare.MAX_RUNS + 1):
        with pytest.raises(
            UserError, match=f"{count} runs: a comparison takes 2 to {compare.MAX_RUNS}"
        ):
            build_comparison([run] * count, tmp_path / "c.html")


def test_a_better_number_of_a_run_that_is_out_of_range_is_doubted(tmp_path: Path) -> None:
    one, other = two(tmp_path)
    assert "But check" not in write_verdict(
        name_runs([RunFiles.read(path) for path in (one, other)])
    )
    (other / "metrics.jsonl").write_text(lines(0.4, **{"actor_train/kl": 4.0}))
    assert "(slow). But check fast: some of its metrics are out of range." in write_verdict(
        name_runs([RunFiles.read(path) for path in (one, other)])
    )


def test_the_work_of_a_comparison_grows_with_its_metrics_and_not_faster(tmp_path: Path) -> None:
    """With so few calls for each value, two runs of 1,000 metrics and 500 steps take about 3 s of
    processor time.
    """
    steps, counts = 40, []
    for metrics in (150, 200, 250, 300):  # the first imports what a comparison needs
        runs = []
        for name in ("a", "b"):
            rows = [
                {
                    "step": step,
                    **{f"n/m{i}": math.sin(step * (i + len(name))) for i in range(metrics)},
                }
                for step in range(1, steps + 1)
            ]
            written = "".join(json.dumps(row) + "\n" for row in rows)
            runs.append(write_run(tmp_path / f"{name}{metrics}", metrics__jsonl=written))
        counts.append(calls_of(partial(build_comparison, runs, tmp_path / "c.html")))
    first, second = counts[2] - counts[1], counts[3] - counts[2]
    assert second < 1.1 * first
    assert second / (2 * 50 * steps) < 15
