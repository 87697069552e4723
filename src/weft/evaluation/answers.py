"""Sampling of a model's answers to prompts, with several sampling settings at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from weft.engine.base import Request
from weft.errors import DataError
from weft.evaluation.models import OpenedModel
from weft.evaluation.prompts import EvaluationPrompt
from weft.evaluation.settings import SamplingSettings

Progress = Callable[[int, int], None]  # (finished answers, all answers)


@dataclass(frozen=True)
class SampledAnswer:
    """Answer that a model sampled for a prompt.

    `text` does not contain end tokens. `finish_reason` is "stop" if the model ended the answer, or
    "length" if the answer was cut off at the length limit.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str


def sample_answers(
    opened: OpenedModel,
    prompts: Sequence[EvaluationPrompt],
    settings: Sequence[SamplingSettings],
    *,
    samples: int = 1,
    system: str | None = None,
    plain: bool = False,
    progress: Progress | None = None,
) -> list[list[list[SampledAnswer]]]:
    """Sample answers to the prompts and return them as `[prompt][setting][sample]`.

    `samples` is the number of answers per prompt and setting. Greedy settings produce only one
    answer per prompt, since all answers would be equal. All requests are sent to one generator, so
    that a slow answer does not delay the others. `system` is the system message; `plain` disables
    the chat template. Raises `DataError` for a prompt that leaves no room for an answer in the
    model's context.
    """
    # Build one request per prompt, setting and sample.
    tokenizer = opened.tokenizer
    prompt_ids = [prompt.tokenize(tokenizer, system=system, plain=plain) for prompt in prompts]
    specs = []
    for each in settings:
        specs.append(replace(each.spec, stop_ids=[*each.spec.stop_ids, *tokenizer.list_stop_ids()]))
    requests = [
        Request(
            f"{index}/{kind}",
            k,
            ids,
            k,
            max_new_tokens=_compute_max_new_tokens(
                opened, prompts[index], ids, spec.new_token_limit
            ),
            sampling=spec,
        )
        for index, ids in enumerate(prompt_ids)
        for kind, spec in enumerate(specs)
        for k in range(1 if spec.greedy else samples)
    ]
    # Generate until all requests are finished.
    tokens: dict[tuple[str, int], list[int]] = {(request.id, request.k): [] for request in requests}
    ends: dict[tuple[str, int], str] = {}
    most = max(spec.new_token_limit for spec in specs)
    with opened.engine.generating(
        replace(specs[0], max_new_tokens=most, min_new_tokens=0, tokenizer=tokenizer)
    ) as generator:
        generator.submit(requests)
        while not generator.idle:
            for event in generator.step():
                tokens[event.id, event.k].append(event.token)
                if event.finish is not None:
                    ends[event.id, event.k] = event.finish
                    if progress is not None:
                        progress(len(ends), len(requests))
    # Decode the tokens.
    answers: list[list[list[SampledAnswer]]] = []
    for _ in prompts:
        answers.append([[] for _ in settings])
    for request in requests:
        index, kind = map(int, request.id.split("/"))
        ids = tokens[request.id, request.k]
        text = tokenizer.decode_after(list(request.prompt), ids, skip_special=True)
        answers[index][kind].append(
            SampledAnswer(text.strip(), tuple(ids), ends[request.id, request.k])
        )
    return answers


def _compute_max_new_tokens(
    opened: OpenedModel, prompt: EvaluationPrompt, ids: Sequence[int], most: int
) -> int:
    """Return the maximum number of new tokens: `most`, or fewer if the context has less room.

    `ids` are the prompt's token ids. Raises `DataError` if they fill the model's context.
    """
    if opened.context is None:
        return most
    if len(ids) >= opened.context:
        raise DataError(
            f"prompt {prompt.id!r} has {len(ids)} tokens, and {opened.name} takes "
            f"{opened.context} with its answer; shorten it"
        )
    return min(most, opened.context - len(ids))
