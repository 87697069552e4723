"""Rejection sampling: write the best of several answers to each prompt as training data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.evaluation.answers import EvaluationPrompt, SampledAnswer
from weft.evaluation.sampling_report import write


@dataclass(frozen=True)
class RankedAnswers:
    """Answers to one prompt with their scores, best first."""

    prompt: EvaluationPrompt
    answers: tuple[SampledAnswer, ...]
    scores: tuple[float, ...]


def choose(
    prompts: Sequence[EvaluationPrompt],
    answers: Sequence[Sequence[SampledAnswer]],
    scores: Sequence[npt.NDArray[np.float64]],
    *,
    finished_only: bool = True,
) -> list[RankedAnswers]:
    """Return each prompt's distinct non-empty answers, sorted by score, best first.

    Prompts without a non-empty answer are dropped. With `finished_only`, answers that were cut off
    at the length limit are dropped if the prompt has an answer that was not cut off.
    """
    rankings = []
    for prompt, candidates, candidate_scores in zip(prompts, answers, scores, strict=True):
        distinct = {}
        for answer, value in zip(candidates, candidate_scores, strict=True):
            if answer.text:
                distinct[answer.text] = (answer, float(value))
        selected = list(distinct.values())
        whole = [pair for pair in selected if pair[0].finish_reason == "stop"]
        selected = whole if finished_only and whole else selected
        if selected:
            selected.sort(key=lambda pair: -pair[1])
            rankings.append(
                RankedAnswers(
                    prompt,
                    tuple(answer for answer, _ in selected),
                    tuple(value for _, value in selected),
                )
            )
    return rankings


def save(
    choices: Sequence[RankedAnswers], folder: Path, *, least: float | None = None
) -> dict[str, int]:
    """Write the best and the worst answers to three files, and return the number of rows in each.

    `selected.jsonl` has the best answers as rows of the dataset type `chat`, for SFT; with `least`,
    only answers whose score is at least `least`. `rejected.jsonl` has the worst answers as `chat`
    rows. `comparison.jsonl` has the best and the worst answer of each prompt as `preference` rows,
    for a reward model or DPO. The last two files omit prompts whose answers have equal scores. All
    rows include the scores.
    """
    good = []
    for choice in choices:
        if least is None or choice.scores[0] >= least:
            good.append(choice)
    several = []
    for choice in choices:
        if choice.scores[0] > choice.scores[-1]:
            several.append(choice)
    files = {
        "selected.jsonl": [_build_chat_row(choice, 0) for choice in good],
        "rejected.jsonl": [_build_chat_row(choice, -1) for choice in several],
        "comparison.jsonl": [_build_pair_row(choice) for choice in several],
    }
    for name, rows in files.items():
        write(folder / name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return {name: len(rows) for name, rows in files.items()}


def _build_chat_row(choice: RankedAnswers, index: int) -> dict[str, Any]:
    reply = {"role": "assistant", "content": choice.answers[index].text}
    messages: Iterable[Mapping[str, Any]] = [*choice.prompt.messages, reply]
    return {"id": choice.prompt.id, "messages": list(messages), "score": choice.scores[index]}


def _build_pair_row(choice: RankedAnswers) -> dict[str, Any]:
    return {
        "id": choice.prompt.id,
        "prompt": list(choice.prompt.messages),
        "chosen": choice.answers[0].text,
        "rejected": choice.answers[-1].text,
        "score_chosen": choice.scores[0],
        "score_rejected": choice.scores[-1],
    }
