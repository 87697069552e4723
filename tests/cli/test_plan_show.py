"""`weft plan show`: its page, timeline and JSON, and invalid input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_llama, write_jsonl
from weft.cli import main as weft
from weft.observe.shown_plan import ShownPlan
from weft.observe.timeline import read_spans


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    make_llama(folder / "model")
    write_jsonl(folder / "prompts.jsonl", [{"prompt": f"count {n}"} for n in range(8)])
    write_jsonl(folder / "sft.jsonl", [{"prompt": f"count {n}", "answer": "1 2"} for n in range(8)])
    return folder


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def sft(root: Path, *words: str) -> list[str]:
    data = f"dataset.train_path={root / 'sft.jsonl'}"
    return ["plan", "show", "sft", f"model.path={root / 'model'}", data, *words]


def ppo(root: Path, *words: str) -> list[str]:
    roles = [f"{role}.path={root / 'model'}" for role in ("actor", "critic", "rew")]
    return ["plan", "show", "ppo", *roles, f"dataset.path={root / 'prompts.jsonl'}", *words]


def simulate(capsys: pytest.CaptureFixture[str], *words: str) -> ShownPlan:
    assert weft.main([*words, "--json"]) == 0
    return ShownPlan.from_plain(json.loads(capsys.readouterr().out))


def test_one_device_has_a_page_and_a_summary(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert weft.main(sft(root, "device=cpu")) == 0
    summary, path = capsys.readouterr().out.splitlines()
    assert "per step" in summary and "on 1 x cpu" in summary and "estimated speeds" in summary
    assert path == "plan.html" and "<h1>sft</h1>" in (tmp_path / path).read_text()
    # A page of weft's is replaced. Options of the run can follow flags.
    assert weft.main(sft(root, "--output", "plan.html", "search.gpu=H100")) == 0
    assert "1 x H100" in (tmp_path / path).read_text()


def test_host_functions_take_their_times_from_a_run(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "e" / "t"
    run.mkdir(parents=True)
    seconds = [9.0, 0.5, 0.7, 0.6]
    write_jsonl(
        run / "metrics.jsonl",
        [{"step": n, "time/advantages": value} for n, value in enumerate(seconds, 1)],
    )
    without = simulate(capsys, *ppo(root, "device=cpu"))
    plan = simulate(capsys, *ppo(root, "device=cpu", "--host-times", "e/t"))
    assert plan.step_seconds == pytest.approx(without.step_seconds + 0.6)
    assert ["advantages", "0.6 s a step"] in [list(row) for row in plan.assumptions]
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    assert weft.main(ppo(root, "device=cpu", "--host-times", "e/t")) == 2
    assert "e/t: this run has no times of advantages" in capsys.readouterr().err
    assert weft.main(sft(root, "device=cpu", "--host-times", "e/t")) == 2
    assert "has no host functions" in capsys.readouterr().err


def test_neither_rows_nor_weights_are_needed(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = f"model.path={root / 'model'}"
    plan = simulate(capsys, "plan", "show", "sft", model, "device=cpu")
    assert plan.step_seconds > 0


def test_json_writes_no_page(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = simulate(capsys, *sft(root, "search.gpu=H100", "--steps", "5"))
    assert len(plan.step_ends) == 5 and plan.step_ends[-1] == pytest.approx(5 * plan.step_seconds)
    assert not (tmp_path / "plan.html").exists()


@pytest.mark.parametrize("mode", ["search", "heuristic", "d4"])
def test_calls_have_the_devices_that_allocation_gives_them(
    root: Path, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("n_gpus_per_node=4", "search.gpu=H100", f"allocation_mode={mode}")
    plan = simulate(capsys, *ppo(root, *words))
    assert plan.calls[0].name == "actor_gen" and len(plan.calls) == 6
    if mode == "d4":
        assert [group.intervals for group in plan.groups] == [[[0, 4]]]
        assert {call.layout for call in plan.calls} == {"d4f4", "d4f1"}
    fits = [group.fits for group in plan.groups]
    assert all(fits)


def test_sampling_apart_runs_ahead(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "n_gpus_per_node=2",
        "search.gpu=H100",
        "actor_gen.layout=d1",
        "actor_gen.device_mesh=1",
        "ppo.max_staleness=1",
    )
    plan = simulate(capsys, *ppo(root, *words))
    first, second = [span for span in plan.spans if span.name == "actor_gen"][1:3]
    train = next(span for span in plan.spans if span.name == "actor_train")
    assert first.groups == second.groups == [1] and train.groups == [0]
    assert second.start < train.start
    assert any(call.moved_bytes for call in plan.calls)


def test_the_timeline_is_one_that_a_run_writes(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "timeline.json"
    words = ("n_gpus_per_node=2", "search.gpu=H100", "actor_gen.layout=t2", "--steps", "2")
    assert weft.main(ppo(root, *words, "--timeline", str(path))) == 0
    spans = read_spans(path)
    lanes = {(span.name, span.group, span.lane) for span in spans}
    assert ("actor_gen", "roles", "actor") in lanes and ("rew_inf", "roles", "rew") in lanes
    assert ("weights for actor_gen", "weights", "actor") in lanes
    assert [span.step for span in spans if span.name == "actor_train"] == [1, 2]
    events: list[dict[str, Any]] = json.loads(path.read_text())
    counters = [event for event in events if event["ph"] == "C"]
    assert {event["name"] for event in counters} == {"memory of 0", "memory of 1"}
    assert [event["ts"] for event in counters] == sorted(event["ts"] for event in counters)
    # It is replaced by another one.
    assert weft.main(ppo(root, *words, "--timeline", str(path))) == 0


def test_thousands_of_devices_are_one_group(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("n_nodes=512", "n_gpus_per_node=8", "allocation_mode=d4096", "search.gpu=H100")
    plan = simulate(capsys, *ppo(root, *words, "dataset.train_bs_n_seqs=16384"))
    assert [group.name for group in plan.groups] == ["0-4095"]
    assert len(plan.spans) == 18


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--steps", "0"), "--steps=0: simulate 1 to 1,000 steps"),
        (("--steps", "9999"), "--steps=9999"),
        (("-o", "missing/plan.html"), "the folder missing does not exist"),
        (("-o", "."), "is a folder"),
        (("-o", "notes.txt"), "--output notes.txt: exists and was not written by weft plan show"),
        (("--timeline", "notes.txt"), "--timeline notes.txt: exists"),
        (("device=cuda",), "search.gpu=H100"),
        (("search.gpu=unheard-of",), "unheard-of"),
        (("device=cpu", "search.profile=notes.txt"), "notes.txt: the profile is damaged"),
    ],
)
def test_bad_input_writes_nothing(
    root: Path,
    tmp_path: Path,
    words: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "notes.txt").write_text("mine")
    assert weft.main(sft(root, *words)) == 2
    assert message in capsys.readouterr().err
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "plan.html").exists()


def test_a_model_without_config_json_is_named(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    for mode in ("manual", "search", "heuristic"):
        words = sft(root, "n_gpus_per_node=2", "search.gpu=H100", f"allocation_mode={mode}")
        assert weft.main([*words, f"model.path={tmp_path / 'empty'}"]) == 2
        assert "config.json" in capsys.readouterr().err
