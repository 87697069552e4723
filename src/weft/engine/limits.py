"""Limits on options of models and of sampling.

Values beyond a limit are treated as mistakes, or would lead to results that are not finite.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.errors import ConfigError

MOST_RANK = 2**16  # rank of adapters
MOST_SAMPLES = 2**16
MOST_PASSES = 10_000  # completions of a prompt, passes over a batch
MOST_CACHE_GB = 1e6
LEAST_TEMPERATURE = 1e-4


def find_stop_problem(texts: Sequence[str]) -> str | None:
    """Return an error message if the stop texts are invalid, else None."""
    if "" in texts:
        return "an empty text ends every completion at once; take it out"
    return None


def find_stop_ids_problem(ids: Sequence[int]) -> str | None:
    """Return an error message if the stop ids are invalid, else None."""
    if all(0 <= id < 2**31 for id in ids):
        return None
    return "must contain token ids, 0 or more"


def find_cache_problem(gb: float) -> str | None:
    """Return an error message if `gb` GiB is not a valid maximum size of the KV cache, else None."""
    if not gb > 0.0:
        return "keys and values need memory; write a number above 0, or leave it out"
    return None if gb <= MOST_CACHE_GB else f"must be at most {MOST_CACHE_GB:g}"


def check_temperature(temperature: float, greedy: bool) -> None:
    """Raise `ConfigError` if logits cannot be divided by the temperature, because it is too small.

    With `greedy`, every temperature is accepted.
    """
    if temperature == 0.0 and not greedy:
        raise ConfigError(
            "gen.temperature=0: sampling divides by it; set gen.greedy=true for the likeliest token"
        )
    if 0.0 < temperature < LEAST_TEMPERATURE and not greedy:
        raise ConfigError(
            f"gen.temperature={temperature:g}: logits divided by it are not finite; write "
            f"{LEAST_TEMPERATURE:g} or more, or "
            "set gen.greedy=true for the likeliest token"
        )
