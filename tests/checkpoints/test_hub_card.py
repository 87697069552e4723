"""Model cards for uploads: results of evaluations, and the name of the repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from tests.cli.runs import write_run
from weft.checkpoints.hub_card import (
    CardMetadata,
    TaskResult,
    complete_card,
    describe_results,
    read_task_results,
    write_card_results,
)
from weft.observe.model_card import README, find_facts, strip_checksum, write_card

NOTHING = CardMetadata()


def write_results(folder: Path, name: str, date: float, acc: float, effective: int = 64) -> None:
    """A result file of lm-evaluation-harness, of the tasks `quiz` and `gsm8k`."""
    folder.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {
        "results": {
            "quiz": {
                "alias": "quiz",
                "acc,none": acc,
                "acc_stderr,none": 0.05,
                "acc_norm,none": 0.5,
                "acc_norm_stderr,none": "N/A",
            },
            "gsm8k": {"exact_match,strict-match": 0.25},
        },
        "n-shot": {"quiz": 0, "gsm8k": 5},
        "n-samples": {
            "quiz": {"original": 64, "effective": effective},
            "gsm8k": {"original": 1319, "effective": 1319},
        },
        "configs": {
            "gsm8k": {"dataset_path": "openai/gsm8k"},
            "quiz": {"dataset_path": "/home/jo/quiz"},
        },
        "date": date,
    }
    (folder / name).write_text(json.dumps(content))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = write_run(tmp_path, "e/t") / "checkpoints" / "model" / "step4"
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    write_card(folder, *find_facts(folder))
    return folder


def test_the_newest_results_of_a_task_count(tmp_path: Path) -> None:
    write_results(tmp_path / "b", "results_1.json", 2.0, acc=0.75)
    write_results(tmp_path / "a", "results_2.json", 1.0, acc=0.25)
    (tmp_path / "results_broken.json").write_text("[1")
    (tmp_path / "results_odd.json").write_text('{"results": {"t": 3, "u": {"acc,none": "high"}}}')
    assert read_task_results(tmp_path) == [
        TaskResult(
            "gsm8k", "exact_match", "strict-match", 0.25, None, 5, 1319, 1319, "openai/gsm8k"
        ),
        TaskResult("quiz", "acc", "none", 0.75, 0.05, 0, 64, 64, "quiz"),
        TaskResult("quiz", "acc_norm", "none", 0.5, None, 0, 64, 64, "quiz"),
    ]


def test_results_of_a_run_belong_to_its_policy(tmp_path: Path) -> None:
    run = tmp_path / "E" / "T"
    write_results(run / "eval" / "step4", "results_1.json", 1.0, acc=0.75)
    write_results(run / "eval" / "step8", "results_1.json", 1.0, acc=0.25)
    found = {}
    for place in ("actor/step4", "actor/step8", "actor/step9", "critic/step4"):
        (run / "checkpoints" / place).mkdir(parents=True)
        results = read_task_results(run / "checkpoints" / place)
        found[place] = [each.value for each in results if each.metric == "acc"]
    assert found == {
        "actor/step4": [0.75],
        "actor/step8": [0.25],
        "actor/step9": [],
        "critic/step4": [],
    }


def test_a_card_gets_results_and_the_name_of_the_repository(checkpoint: Path) -> None:
    write_results(checkpoint / "eval", "results_1.json", 1.0, acc=0.4375)
    text, notes = complete_card(checkpoint, checkpoint, "me/mine", CardMetadata("o/n", "mit"))
    assert notes == []
    assert 'model="me/mine"' in text and "PATH_OF_THIS_FOLDER" not in text
    assert "| `quiz` | acc | 0.4375 ± 0.05 | 0 | 64 |" in text
    assert "| `gsm8k` | exact_match (strict-match) | 0.25 | 5 | 1,319 |" in text
    assert "/home/jo" not in text and "checksum" not in text
    data = ModelCard(text).data
    assert data.base_model == "o/n" and data.license == "mit" and data.model_name == "mine"
    assert [
        (each.dataset_type, each.metric_type, each.metric_value) for each in data.eval_results
    ] == [
        ("openai/gsm8k", "exact_match", 0.25),
        ("quiz", "acc", 0.4375),
        ("quiz", "acc_norm", 0.5),
    ]


def test_results_stand_in_the_card_once_and_an_edited_card_stays(checkpoint: Path) -> None:
    plain = (checkpoint / README).read_text()
    write_card_results(checkpoint)
    assert (checkpoint / README).read_text() == plain
    run = checkpoint.parents[2]
    write_results(run / "eval" / "step4", "results_1.json", 1.0, acc=0.75)
    write_card_results(checkpoint)
    write_results(checkpoint / "eval", "results_2.json", 2.0, acc=0.25)
    write_card_results(checkpoint)
    text = (checkpoint / README).read_text()
    assert text.count("## Results") == 1 and "| `quiz` | acc | 0.25 ± 0.05 | 0 | 64 |" in text
    assert "0.75" not in text and strip_checksum(text) is not None
    uploaded, _ = complete_card(checkpoint, checkpoint, "me/mine", NOTHING)
    assert uploaded.count("## Results") == 1
    (checkpoint / README).write_text(text + "mine")
    write_results(checkpoint / "eval", "results_3.json", 3.0, acc=0.5)
    write_card_results(checkpoint)
    assert (checkpoint / README).read_text() == text + "mine"


def test_results_of_a_part_of_the_items_are_marked(checkpoint: Path) -> None:
    write_results(checkpoint, "results_1.json", 1.0, acc=0.5, effective=8)
    text, notes = complete_card(checkpoint, checkpoint, "me/mine", NOTHING)
    assert "| `quiz` | acc | 0.5 ± 0.05 | 0 | 8 of 64 |" in text
    assert len(notes) == 1 and "part of a task's items" in notes[0]
    assert {each.dataset_type for each in ModelCard(text).data.eval_results} == {"openai/gsm8k"}


def test_an_edited_card_keeps_its_text(checkpoint: Path) -> None:
    write_results(checkpoint, "results_1.json", 1.0, acc=0.5)
    card = checkpoint / README
    card.write_text(card.read_text().replace("# e/t, step 4", "# My model"))
    text, notes = complete_card(checkpoint, checkpoint, "me/mine", CardMetadata(license="mit"))
    assert "# My model" in text and "## Results" not in text and "edited" in notes[0]
    assert ModelCard(text).data.license == "mit"


def test_a_checkpoint_without_a_card_gets_one(checkpoint: Path) -> None:
    expected, _ = complete_card(checkpoint, checkpoint, "me/mine", NOTHING)
    (checkpoint / README).unlink()
    assert complete_card(checkpoint, checkpoint, "me/mine", NOTHING) == (expected, [])


def test_a_table_of_results() -> None:
    assert describe_results([TaskResult("t", "acc", "none", 1 / 3)]).endswith(
        "| `t` | acc | 0.3333 |  |  |\n"
    )
