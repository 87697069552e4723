"""`weft plan realloc` (table, JSON and invalid layouts), `search`, and invalid input."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.models.common import tiny_config
from tests.planner.profiles import contents
from weft.checkpoints.hf_io import compute_parameter_shapes, read_config
from weft.cli import main as weft
from weft.engine.spec import ModelSpec
from weft.planner.decoder_sizes import build_decoder_sizes
from weft.planner.profile import format_contents
from weft.registry import families


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a directory with a config.json and no weights."""
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", **families.get("llama").tiny})
    )
    return tmp_path


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert weft.main(["plan", "realloc", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def size_of_tiny(itemsize: int) -> int:
    total = 0
    for shape in compute_parameter_shapes(tiny_config("llama")).values():
        size = itemsize
        for each in shape:
            size *= each
        total += size
    return total


def test_of_a_model_directory(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From d1 on device 0 to d2 on devices 4 and 5 of another node, two copies are sent."""
    words = (
        "d1",
        "d2",
        "--model",
        str(model),
        "--target-mesh",
        "4-5",
        "--devices-per-node",
        "4",
        "--dtype",
        "float32",
    )
    found, whole = planned(capsys, *words), size_of_tiny(4)
    assert (found["sent"], found["sent_between_nodes"], found["sent_inside_nodes"]) == (
        2 * whole,
        2 * whole,
        0,
    )
    assert found["least"] == 2 * whole
    empty = {"kept": 0, "copied": 0}
    assert found["ranks"] == [
        {"rank": 0, "node": 0, "sent": 2 * whole, "received": 0, **empty},
        {"rank": 4, "node": 1, "sent": 0, "received": whole, **empty},
        {"rank": 5, "node": 1, "sent": 0, "received": whole, **empty},
    ]


def test_present_shards_are_kept_or_copied(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "d2", "d2", "--model", str(model))
    assert [row["kept"] for row in found["ranks"]] == [size_of_tiny(2)] * 2 and found["sent"] == 0
    found = planned(capsys, "d2f2", "d2", "--model", str(model))
    assert all(
        row["kept"] + row["copied"] + row["received"] == size_of_tiny(2) for row in found["ranks"]
    )
    # q of q, k, v is all of one rank's rows
    assert all(row["copied"] > row["kept"] > 0 for row in found["ranks"])


def test_the_table_of_the_default_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert weft.main(["plan", "realloc", "d4t2", "t4p2", "--devices-per-node", "4"]) == 0
    shown = capsys.readouterr().out
    assert "a Llama of 1.2 billion parameters, sent as bfloat16" in shown
    assert "from d4f1t2p1c1e1 on 0, 1, 2, 3, 4, 5, 6, 7" in shown
    rows = [line.split() for line in shown.splitlines() if line.split()[:1] == ["1"]]
    assert rows == [["1", "0", "204.2", "MiB", "415.2", "MiB", "80.0", "KiB", "0", "B"]]
    assert "  501.0 MiB  embed.weight" in shown and "least possible     1.4 GiB" in shown
    assert weft.main(["plan", "realloc", "d2", "d2"]) == 0
    assert "nothing is sent" in capsys.readouterr().out


def test_the_schedule_determines_the_places_of_stages(capsys: pytest.CaptureFixture[str]) -> None:
    """From p2 to p2: nothing, half of every rank's blocks, or a third and a half."""
    sent = []
    for more in (
        [],
        ["--target-schedule", "zbv"],
        ["--target-schedule", "interleaved_1f1b", "--target-stages", "4"],
    ):
        assert weft.main(["plan", "realloc", "p2", "p2", "--json", *more]) == 0
        sent.append(json.loads(capsys.readouterr().out)["sent"])
    assert sent[0] == 0 < sent[1] and sent[2] not in sent[:2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["p2", "t2", "--source-schedule", "dualpipe"],
            "--source-schedule 'dualpipe' is unknown; known: gpipe",
        ),
        (
            ["p2", "t2", "--source-stages", "2"],
            "--source-schedule 1f1b has one stage per rank, and 2 were asked for",
        ),
        (["d2x2", "t2"], "FROM d2x2: 'x' is unknown"),
        (["d2", "t3"], "TO t3: t=3 does not divide the model's 32 attention heads"),
        (["d2", "p17"], "TO p17: p=17 stages of a model with 16 layers"),
        (
            ["d2", "t2", "--target-mesh", "4"],
            "--target-mesh '4': layout d1f1t2p1c1e1 needs 2 devices",
        ),
        (["p17", "d2"], "FROM p17: p=17 stages of a model with 16 layers"),
        (["d2e2", "t2"], "FROM d2e2: a llama model has no experts to share; write e1"),
        (["d2", "t2", "--model", "nowhere/at/all"], "nowhere/at/all"),
    ],
)
def test_invalid_input_has_exit_code_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert weft.main(["plan", "realloc", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["realloc", "d2", "t2", "--devices-per-node", "0"], ["realloc", "d2"], ["sft"]]
)
def test_a_wrong_command_line_is_exit_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert weft.main(["plan", *words]) == 2
    assert re.search(r"error: weft plan.*; see weft plan.* --help", capsys.readouterr().err)


def searched(model: Path, *more: str) -> list[str]:
    rows = model / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n')
    paths = [f"{role}.path={model}" for role in ("actor", "critic", "ref", "rew")]
    scratch = [f"{role}.init_from_scratch=true" for role in ("actor", "critic", "ref", "rew")]
    return [
        "plan",
        "search",
        "ppo",
        *paths,
        *scratch,
        f"dataset.path={rows}",
        "dataset.train_bs_n_seqs=8",
        *more,
    ]


def test_search_shows_each_call_and_the_time_of_the_heuristic(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = searched(
        model,
        "n_gpus_per_node=2",
        "device=cpu",
        "dataset.max_prompt_len=16",
        "ppo.gen.max_new_tokens=8",
    )
    assert weft.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        found["search"]["step_seconds"] <= found["heuristic"]["step_seconds"]
        and found["search"]["fits"]
    )
    calls = {"actor_gen", "rew_inf", "ref_inf", "critic_inf", "actor_train", "critic_train"}
    assert set(found["search"]["calls"]) == set(found["heuristic"]["calls"]) == calls
    assert found["heuristic"]["calls"]["actor_train"]["layout"] in (
        "d1f1t1p1c1e1",
        "d2f1t1p1c1e1",
        "d2f2t1p1c1e1",
    )
    assert weft.main(words) == 0
    page = capsys.readouterr().out
    assert "allocation_mode=search:" in page and "per step on cpu as estimated" in page
    for call in calls:
        assert f"  {call}: d" in page
    assert "(8 x (16 + 8) tokens)" in page


def test_search_of_a_gpu_that_is_not_here(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        weft.main([*searched(model, "n_nodes=2", "n_gpus_per_node=2", "search.gpu=H100"), "--json"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["device"] == "H100"
    assert weft.main(searched(model, "n_gpus_per_node=2", "search.gpu=H101")) == 2
    assert "did you mean H100" in capsys.readouterr().err


def test_search_uses_a_profile_and_refuses_a_damaged_one(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = read_config(model)[1]
    key = build_decoder_sizes(ModelSpec(), config, on_gpu=False).profile_key
    path = tmp_path / "profile.json"
    path.write_text(format_contents(contents(shape=asdict(key))))
    words = searched(model, "n_gpus_per_node=2", "device=cpu", f"search.profile={path}")
    assert weft.main(words) == 0
    assert "as estimated from a profile of 2026-01-02" in capsys.readouterr().out
    assert weft.main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["basis"] == "a profile of 2026-01-02"
    path.write_text(format_contents(contents(shape=asdict(key), format=0)))
    assert weft.main(words) == 2
    err = capsys.readouterr().err
    assert f"{path}: the profile has format 0" in err and "make it again" in err
    assert "until then" not in err
    path.write_text(format_contents(contents(shape=asdict(replace(key, hidden=8)))))
    assert weft.main(words) == 2
    assert f"search.profile={path}: has no profile of this run's models" in capsys.readouterr().err


def test_search_of_one_device_shows_the_time_of_a_step(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert weft.main(searched(model)) == 0
    page = capsys.readouterr().out
    assert re.match(r"time: about [\d.]+ s per step \([\d,]+ tokens/s\); from estimated", page)
    assert "nothing to choose" in page
    assert weft.main([*searched(model), "--json"]) == 0
    step = json.loads(capsys.readouterr().out)
    assert step["step_seconds"] == pytest.approx(sum(c["seconds"] for c in step["calls"].values()))
    assert weft.main(searched(model, "device=cuda")) == 2
    assert "name a GPU" in capsys.readouterr().err
