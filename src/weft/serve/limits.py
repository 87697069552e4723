"""What the server takes of one request, and of all of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    body_bytes: int = 16 * 2**20
    body_seconds: float = 30.0
    seconds: float = 600.0  # from a request's arrival to the end of its answer
    most_prompt: int = 16384
    prompt_bytes: int = 512 * 2**10  # of a request's text, before it is tokenized
    most_new: int = 1024
    most_load: int = 1024  # completions and rows, waiting and under way, of one model
