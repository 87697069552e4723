"""`weft plan memory`: which GPU holds the training of a model, and what makes it fit a smaller one; config.json is enough."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from weft.checkpoints.names import Wanted, find
from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.engine.fits import Case

TOLD = "which GPU holds the training of a model, and what makes it fit a smaller one"


def add(commands: Any) -> None:
    """The command's arguments."""
    made = commands.add_parser("memory", help=TOLD, description=f"Print {TOLD}. Only its config.json is read.")
    made.add_argument("model", metavar="MODEL", help="model directory, run or hub name")
    made.add_argument(
        "--tokens", type=int, default=16384, metavar="N", help="of a micro-batch, all trained (%(default)s)"
    )
    made.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of computation (%(default)s)"
    )


def main(arguments: argparse.Namespace) -> int:
    """Exit code 0. Raises `UserError` for a model without a readable config.json."""
    from weft.engine import fits

    if arguments.tokens < 1:
        raise ConfigError(f"--tokens={arguments.tokens}: a micro-batch has at least one token")
    found = find(arguments.model, Wanted("MODEL"))
    case = case_of(found.path, arguments.tokens, arguments.dtype)
    print(
        f"{found.path}: {case.shape.parameters:,} parameters, AdamW, {case.settings.dtype}, {arguments.tokens:,} tokens"
    )
    print("\n".join(fits.table(fits.ways({"model": case}))))
    return 0


def case_of(model: str, tokens: int, dtype: str) -> Case:
    """Full fine-tuning on one GPU, a minibatch of several micro-batches."""
    import torch

    from weft.checkpoints.hf_io import read_config
    from weft.engine.backends.torch import sizes_of
    from weft.engine.fits import Case
    from weft.engine.memory import NetworkShape, Settings, Work
    from weft.models.network.token_outputs import chunk_rows
    from weft.models.network.transformer import Transformer

    config = read_config(model)[1]
    with torch.device("meta"):
        network = Transformer(config, "lm")
    count = sum(parameter.numel() for parameter in network.parameters())
    settings = Settings(
        dtype, True, "adamw", recompute=0, offload_optimizer=False,
        chunk_rows=chunk_rows(config.vocab_size, torch.device("cuda")), keeps_cache=True,
    )  # fmt: skip
    work = Work(tokens=tokens, rows=tokens, backward=True, parts=2)
    sizes: dict[str, Any] = dict(sizes_of(network))
    return Case(NetworkShape(count, count, **sizes), settings, (work,))
