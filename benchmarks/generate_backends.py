"""One batch of requests through weft's generator, and through `transformers`: `generate` (padded)
and continuous batching.

A request is a prompt of token ids and a number of new tokens; nobody stops early, and everybody
samples from the whole vocabulary at temperature 1. Settings: `model` (directory), `prompts`,
`new_tokens` (one number a prompt), `samples` (completions of each prompt).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from inspect import signature
from typing import Any

from benchmarks.clock import Stopwatch
from benchmarks.pairs import Pause

Settings = Mapping[str, Any]
PAGE, MAX_BATCH_TOKENS = 64, 512  # of continuous batching


def weft(settings: Settings, pause: Pause) -> dict[str, Any]:
    return generate_with(_engine(settings["model"]), settings)


def generate_with(engine: Any, settings: Settings) -> dict[str, Any]:
    """Through `Engine.generating`, as the generate call of a run does."""
    from weft.engine.base import Request
    from weft.engine.spec import GenerationSpec

    most = max(settings["new_tokens"])
    wanted = list(zip(settings["prompts"], settings["new_tokens"], strict=True))
    requests = [
        Request(id=str(i), k=k, prompt=prompt, max_new_tokens=count)
        for i, (prompt, count) in enumerate(wanted)
        for k in range(settings["samples"])
    ]

    def run() -> int:
        tokens = 0
        with engine.generating(GenerationSpec(max_new_tokens=most)) as generator:
            generator.submit(requests)
            while not generator.idle:
                tokens += len(generator.step())
        return tokens

    return _timed(run)


def padded(settings: Settings, pause: Pause) -> dict[str, Any]:
    """`generate` on prompts padded on the left; everybody goes on until the longest is done, and
    the rest is cut off.
    """
    import torch

    model, prompts = _transformers(settings["model"]), settings["prompts"]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    most = max(settings["new_tokens"])

    def run() -> int:
        with torch.no_grad():
            made = model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                top_p=1.0,
                temperature=1.0,
                eos_token_id=None,
                max_new_tokens=most,
                num_return_sequences=settings["samples"],
                pad_token_id=0,
            )
        assert made.shape == (len(prompts) * settings["samples"], width + most)
        return settings["samples"] * sum(settings["new_tokens"])  # those that were asked for

    return _timed(run)


def continuous(settings: Settings, pause: Pause) -> dict[str, Any]:
    """`transformers`' continuous batching; each request stops at its own length.

    Its own choice of sizes takes what memory the machine has; the cache is made as large as all
    requests need together.
    """
    import torch
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = _transformers(settings["model"])
    config = GenerationConfig(
        do_sample=True,
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        eos_token_id=-1,
        pad_token_id=0,
        max_new_tokens=max(settings["new_tokens"]),
    )
    wanted = (
        list(zip(settings["prompts"], settings["new_tokens"], strict=True)) * settings["samples"]
    )
    pages = sum(-(-(len(prompt) + count) // PAGE) + 1 for prompt, count in wanted)
    known = signature(ContinuousBatchingConfig).parameters
    size = "page_size" if "page_size" in known else "block_size"  # its name in transformers 5.17
    batching = ContinuousBatchingConfig(
        num_blocks=pages, max_batch_tokens=MAX_BATCH_TOKENS, **{size: PAGE}
    )

    def run() -> int:
        tokens = done = 0
        with (
            torch.no_grad(),
            model.continuous_batching_context_manager(
                generation_config=config, continuous_batching_config=batching, block=True, timeout=5
            ) as manager,
        ):
            for prompt, count in wanted:
                manager.add_request(list(prompt), max_new_tokens=count)
            while done < len(wanted):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    done, tokens = done + 1, tokens + len(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise RuntimeError("the manager ended before its requests")
        return tokens

    return _timed(run)


def _timed(run: Callable[[], int]) -> dict[str, Any]:
    watch = Stopwatch()
    tokens = run()
    return {**watch.read(), "tokens": tokens}


@cache
def _engine(path: str) -> Any:
    from weft.engine.backends.torch import torch_backend
    from weft.engine.spec import ModelSpec
    from weft.topology import Layout

    return torch_backend(ModelSpec(path=path, device="cpu"), Layout())


@cache
def _transformers(path: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model
