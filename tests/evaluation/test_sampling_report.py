"""Sampling reports: their JSON, their scores, their page."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from weft.engine.spec import GenerationSpec
from weft.errors import DataError
from weft.evaluation import sampling_report
from weft.evaluation.answers import EvaluationPrompt, SampledAnswer, choose

PROMPTS = [
    EvaluationPrompt("0", "Who <are> you?", ({"role": "user", "content": "Who <are> you?"},))
]


def made(model: str) -> sampling_report.Report:
    settings, _ = choose(["greedy", "k50"], GenerationSpec(max_new_tokens=4))
    answers = [
        [
            [SampledAnswer("Me & you", (1,), "stop")],
            [SampledAnswer("A", (1,), "length"), SampledAnswer("B", (2,), "stop")],
        ]
    ]
    return sampling_report.build(model, {"samples": 2}, PROMPTS, settings, answers)


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    report, file = made("runs/e/t/actor/step4"), tmp_path / "a.json"
    sampling_report.write(file, json.dumps(report))
    assert sampling_report.read(file) == report
    assert sampling_report.extract_prompts(report) == PROMPTS
    assert report["prompts"][0]["results"][1]["sampling_params"]["top_k"] == 50


def test_scores_follow_outputs_and_means_are_over_prompts() -> None:
    report = made("m")
    sampling_report.add_scores(report, [np.array([3.0, 1.0, 2.0])])
    assert report["prompts"][0]["results"][1]["scores"] == [1.0, 2.0]
    assert sampling_report.compute_means(report) == {"greedy": (3.0, 0.0, 1), "k50": (1.5, 0.0, 2)}


def test_the_page_has_every_model_and_escapes_answers() -> None:
    first, second = made("runs/e/t/actor/step4"), made("other/model")
    sampling_report.add_scores(first, [np.array([3.0, 1.0, 2.0])])
    page = sampling_report.render_page([first, second, made("more/model")])
    assert (
        "actor/step4 / greedy" in page and "model (1) / k50" in page and "model (2) / k50" in page
    )
    assert "Who &lt;are&gt; you?" in page and "Me &amp; you" in page and "Who <are>" not in page
    assert "reward 3.000" in page and "1.500 &plusmn; 0.000" in page and ">cut<" in page
    assert page.count("<article>") == 1


def test_checkpoints_of_two_runs_have_two_names() -> None:
    assert (
        sampling_report.shorten_name("runs/chat/a/checkpoints/actor/step40")
        == "chat/a/actor/step40"
    )
    assert sampling_report.shorten_name("models/pythia-1b/") == "pythia-1b"


def test_a_report_of_open_assistant_is_read(tmp_path: Path) -> None:
    theirs = {
        "model_name": "pythia",
        "date": "2023",
        "args": {},
        "prompts": [
            {
                "prompt": "Hi",
                "results": [{"sampling_config": "k50", "sampling_params": {}, "outputs": ["Yo"]}],
            }
        ],
    }
    file = tmp_path / "theirs.json"
    file.write_text(json.dumps(theirs))
    assert (
        sampling_report.extract_prompts(sampling_report.read(file))[0].messages[0]["content"]
        == "Hi"
    )
    assert "Yo" in sampling_report.render_page([sampling_report.read(file)])


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"prompts": []}',
        '{"prompts": [{"prompt": "a", "results": [{}]}]}',
        '{"prompts": [3]}',
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(DataError, match="sampling report"):
        sampling_report.read(file)
