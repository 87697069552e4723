"""Limits on each request and on the server's load."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerLimits:
    """Limits on each request and on the load of each model.

    Attributes:
        body_bytes: Maximum size of a request's body in bytes, also after decompression.
        body_seconds: Maximum time in seconds for a body to arrive.
        seconds: Maximum time in seconds from the arrival of a request to the end of its answer.
        most_prompt: Maximum length of a prompt in tokens.
        prompt_bytes: Maximum size of a request's text in bytes, before it is tokenized.
        most_new: Maximum length of a completion in tokens.
        most_load: Maximum load of a model: its waiting and running completions, plus the
            sequences that it has to score.
    """

    body_bytes: int = 16 * 2**20
    body_seconds: float = 30.0
    seconds: float = 600.0  # time from a request's arrival to the end of its answer
    most_prompt: int = 16384
    prompt_bytes: int = 512 * 2**10  # size of a request's text, before tokenizing
    most_new: int = 1024
    most_load: int = 1024  # waiting and running completions and rows per model
