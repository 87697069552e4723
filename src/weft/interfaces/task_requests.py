"""Interface `task_requests`: answers the requests of evaluation tasks (option `eval_suite`).

A request asks for the log-probabilities of a given continuation, or for a continuation that is
generated with the task's own settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from weft.algorithms.base import Output
from weft.data.sample import SequenceSample
from weft.engine.base import Request
from weft.engine.spec import GenerationSpec
from weft.interfaces.base import MFCResult, Model
from weft.options import to_mapping
from weft.registry import register_interface

SCORES: frozenset[Output] = frozenset({"logprobs", "top1"})
SAMPLING = "sampling"  # metadata of a request: its settings of generation and its random draws


def describe_sampling(request: Request, base: GenerationSpec) -> dict[str, Any]:
    """Return the settings of a request as JSON values, for the metadata `SAMPLING`.

    `base` has the generator's settings; its seed applies to all requests.
    """
    spec = request.sampling or base
    return {
        "options": to_mapping(spec),
        "seed": base.seed,
        "draws_as": request.draws_as or request.id,
    }


@register_interface("task_requests")
class TaskRequestsInterface:
    """Interface that answers the requests of evaluation tasks.

    Batches come from the evaluation itself, with sequences of any length up to the model's context.
    Sampled continuations do not depend on the step of the run or on the batch. `kv_cache_gb` is the
    maximum GiB of keys and values, as in `GenerationSpec`.
    """

    def __init__(self, kv_cache_gb: float | None = None) -> None:
        self.kv_cache_gb = kv_cache_gb

    def inference(self, model: Model, batch: SequenceSample) -> MFCResult:
        """Return `logprobs` and `top1` of each completion's tokens, as the interface `infer` does.

        Each rank computes its part in one pass; the sender of the batch limits its tokens.
        """
        tokens = batch.num_tokens("prompt") + batch.num_tokens("completion")
        outputs = model.engine.forward(batch, SCORES, max_tokens=max(1, tokens))
        return MFCResult(outputs.select(keys=sorted(SCORES)))

    def generate(self, model: Model, batch: SequenceSample) -> MFCResult:
        """Generate one continuation of each id's `prompt`, in the key `answer` (int64).

        The metadata `SAMPLING` has the settings of each id (see `describe_sampling`).
        """
        requests = []
        seed = 0
        for id, prompt, settings in zip(
            batch.ids, batch.sequences("prompt"), batch.metadata[SAMPLING], strict=True
        ):
            requests.append(_build_request(id, prompt.tolist(), settings))
            seed = settings["seed"]
        # a rank without requests takes part, too: other ranks may need its weights
        limits = [request.sampling.new_token_limit for request in requests if request.sampling]
        base = GenerationSpec(
            max_new_tokens=max(limits, default=1),
            greedy=True,
            seed=seed,
            kv_cache_gb=self.kv_cache_gb,
            tokenizer=model.tokenizer,
        )
        tokens: dict[str, list[int]] = {id: [] for id in batch.ids}
        with model.engine.generating(base) as generator:
            generator.submit(requests)
            while not generator.idle:
                for event in generator.step():
                    tokens[event.id].append(event.token)
        answers = list(tokens.values())
        flat = [token for answer in answers for token in answer]
        outputs = SequenceSample.from_groups(
            batch.ids,
            {"answer": [[len(answer)] for answer in answers]},
            {"answer": np.array(flat, dtype=np.int64)},
        )
        return MFCResult(outputs)


def _build_request(id: str, prompt: list[int], settings: Mapping[str, Any]) -> Request:
    spec = GenerationSpec(**settings["options"])
    return Request(id, 0, prompt, sampling=spec, draws_as=str(settings["draws_as"]))
