"""Rollouts by other systems, where they are installed: seconds of the second of two, with the same
prompts and lengths.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Prompts = Sequence[list[int]]


def installed() -> list[str]:
    return [name for name in PEERS if importlib.util.find_spec(name) is not None]


def _second(call: Callable[[], Any]) -> float:
    call()
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def vllm(model: Path, prompts: Prompts, samples: int, new: int) -> float:
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=str(model), skip_tokenizer_init=True, dtype="bfloat16", gpu_memory_utilization=0.8
    )
    settings = SamplingParams(
        n=samples, max_tokens=new, temperature=1.0, ignore_eos=True, detokenize=False
    )
    asked = [{"prompt_token_ids": tokens} for tokens in prompts]
    return _second(lambda: engine.generate(asked, settings, use_tqdm=False))


def sglang(model: Path, prompts: Prompts, samples: int, new: int) -> float:
    import sglang as sgl

    engine = sgl.Engine(model_path=str(model), skip_tokenizer_init=True, dtype="bfloat16")
    settings = {"n": samples, "max_new_tokens": new, "temperature": 1.0, "ignore_eos": True}
    try:
        return _second(lambda: engine.generate(input_ids=list(prompts), sampling_params=settings))
    finally:
        engine.shutdown()


PEERS: Mapping[str, Callable[[Path, Prompts, int, int], float]] = {"vllm": vllm, "sglang": sglang}
