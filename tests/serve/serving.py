"""A server of a small policy and a small reward model in this process, as `weft serve` makes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.tiny import make_llama
from weft.cli import serve
from weft.serve.exchange import ServerLimits
from weft.serve.server import Server, ServerPorts

TOKEN = "token-of-the-tests"


def make_reward(directory: Path, seed: int = 1, **changes: Any) -> Path:
    """A random reward model of the same vocabulary as `make_llama`'s."""
    import torch
    from transformers import AutoConfig, LlamaForSequenceClassification

    make_llama(directory, seed=seed, **changes)
    config = AutoConfig.from_pretrained(directory, num_labels=1)
    torch.manual_seed(seed)
    LlamaForSequenceClassification(config).save_pretrained(directory)
    return directory


@contextmanager
def serving(
    *words: str, grpc: bool = True, token: str | None = TOKEN, **limits: Any
) -> Iterator[Server]:
    """A server of what `weft serve` would serve with these arguments, on free ports; its draws are
    the same each time.
    """
    given = serve.build_parser().parse_args([*words, "--device", "cpu"])
    with patch("weft.cli.serve.os.urandom", bytes):
        models = serve.load_models(given)
    ports = ServerPorts(http=0, grpc=0 if grpc else None, metrics=0)
    with Server(
        models, ports, ServerLimits(max_new_tokens=given.max_new_tokens, **limits), token
    ) as server:
        yield server
