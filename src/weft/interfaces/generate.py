"""The generic generation call: samples completions of the prompts, with their log-probs as sampled and weight versions.

Several nodes may generate with one role: ReMax's greedy baseline is a second node with `greedy=true`, `samples_per_prompt=1`
and its outputs remapped to names of their own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from weft.data.sample import SequenceSample
from weft.engine.base import Request, TokenEvent
from weft.engine.spec import GenerationSpec
from weft.errors import ConfigError
from weft.interfaces._own_form import same_tokens
from weft.interfaces.base import MFCResult, Model
from weft.options import read, validate
from weft.registry import register_interface


@register_interface("generate")
class Generate:
    """`samples_per_prompt` completions of every prompt; the other arguments are those of `GenerationSpec` (`gen.*`).

    Draws depend on the run's seed, the firing's index, the id and the completion's index alone.
    """

    def __init__(self, *, samples_per_prompt: int = 1, record_support: bool = False, **gen: Any) -> None:
        if samples_per_prompt < 1:
            raise ConfigError(f"samples_per_prompt={samples_per_prompt}: must be at least 1")
        self.samples_per_prompt = samples_per_prompt
        spec = read(GenerationSpec(), gen, "gen.")
        validate(spec, "gen.")
        self.spec = replace(spec, record_support=record_support)

    def generate(self, model: Model, batch: SequenceSample) -> MFCResult:
        """Reads `prompt`. Makes K completions an id.

        One value a token, the end token included: `completion` int64, `logprobs` float32, `versions` int64. One a completion:
        `finished` float32 (1 ended by itself, 0 cut by length). With `record_support` also `support` int64 (the ids that a
        limit kept, all tokens of a completion together) and `support_counts` int64 (how many at each token; 0 where nothing
        was left out). Announces ids as soon as their completions have all ended.

        Raises `ConfigError` where the role reads other token ids than the batch holds.
        """
        if not same_tokens(model.tokenizer, model.data_tokenizer):
            raise ConfigError(
                f"role {model.role!r} generates with another tokenizer than the one that made the prompts; "
                "use one tokenizer for both"
            )
        stop_ids = [*self.spec.stop_ids, *model.tokenizer.stop_ids()]
        spec = replace(self.spec, seed=model.seed, stop_ids=stop_ids, tokenizer=model.tokenizer)
        requests = [
            Request(id, k, prompt.tolist(), step=model.step)
            for id, prompt in zip(batch.ids, batch.sequences("prompt"), strict=True)
            for k in range(self.samples_per_prompt)
        ]
        rows: dict[tuple[str, int], list[TokenEvent]] = {(request.id, request.k): [] for request in requests}
        missing = dict.fromkeys(batch.ids, self.samples_per_prompt)
        started = time.perf_counter()
        with model.engine.generating(spec) as generator:
            generator.submit(requests)
            while not generator.idle:
                complete = []
                for event in generator.step():
                    rows[event.id, event.k].append(event)
                    if event.finish is not None:
                        missing[event.id] -= 1
                        if not missing[event.id]:
                            complete.append(event.id)
                if complete and model.announce is not None:
                    made = [rows[id, k] for id in complete for k in range(self.samples_per_prompt)]
                    model.announce(self._outputs(complete, made))
        seconds = time.perf_counter() - started
        completions = list(rows.values())
        return MFCResult(self._outputs(batch.ids, completions), _metrics(completions, seconds))

    def _outputs(self, ids: Sequence[str], rows: Sequence[Sequence[TokenEvent]]) -> SequenceSample:
        """The completions, K by K in order of `ids`, as keys of a sample."""
        events = [event for row in rows for event in row]
        tokens, single = [len(row) for row in rows], [1] * len(rows)
        made: dict[str, tuple[list[int], list[Any], torch.dtype]] = {
            "completion": (tokens, [event.token for event in events], torch.int64),
            "logprobs": (tokens, [event.logprob for event in events], torch.float32),
            "versions": (tokens, [event.version for event in events], torch.int64),
            "finished": (single, [float(row[-1].finish == "stop") for row in rows], torch.float32),
        }
        if self.spec.record_support:
            kept = [sum(len(event.support) for event in row) for row in rows]
            made["support"] = (kept, [id for event in events for id in event.support], torch.int64)
            made["support_counts"] = (tokens, [len(event.support) for event in events], torch.int64)
        count = self.samples_per_prompt
        lengths = {
            key: [sizes[i : i + count] for i in range(0, len(rows), count)] for key, (sizes, _, _) in made.items()
        }
        data = {key: torch.tensor(values, dtype=dtype) for key, (_, values, dtype) in made.items()}
        return SequenceSample.from_groups(ids, lengths, data)


def _metrics(rows: Sequence[Sequence[TokenEvent]], seconds: float) -> Mapping[str, float]:
    """`response_length` and `response_length_max` in tokens, `truncated_fraction` (cut by length), `tokens_per_second`."""
    lengths = [len(row) for row in rows]
    return {
        "response_length": sum(lengths) / len(lengths),
        "response_length_max": float(max(lengths)),
        "truncated_fraction": sum(row[-1].finish == "length" for row in rows) / len(rows),
        "tokens_per_second": sum(lengths) / seconds,
    }
