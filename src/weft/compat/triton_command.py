"""`weft convert triton`: write the model store of a model, or of the model that sections name."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.checkpoints.names import SCORERS, ModelQuery, find_model
from weft.errors import ConfigError
from weft.observe.jsonl import POLICIES

# Open-Assistant's path of model stores; rm or sft is appended.
STORE_PREFIX = ".triton_models/model_store_"


def add_command(commands: Any) -> None:
    """Add the subcommand `triton` to the subparsers of `weft convert`."""
    triton = commands.add_parser(
        "triton",
        help="write a model store for NVIDIA Triton: a TorchScript module and its configuration",
    )
    triton.add_argument(
        "model", nargs="?", metavar="MODEL", help="model directory, run or hub name"
    )
    triton.add_argument(
        "--configs",
        nargs="+",
        metavar="NAME",
        help="sections that name the model, in place of MODEL",
    )
    triton.add_argument(
        "output",
        metavar="OUT",
        type=Path,
        nargs="?",
        help=f"directory to write; must not exist or be empty (default: {STORE_PREFIX}rm, or sft)",
    )
    triton.add_argument(
        "--triton_mode",
        required=True,
        choices=("rm", "sft"),
        help="rm: rewards of a reward model; sft: log-probs and logits of a policy",
    )
    triton.add_argument(
        "--name", help="the model's name in the store (default: the name of its directory)"
    )
    triton.set_defaults(complete=_complete_arguments, run=_write_store)


def _complete_arguments(arguments: argparse.Namespace) -> None:
    """Fill in the model and the output directory of `weft convert triton`.

    The positional arguments are the model and the output directory. With `--configs`, the model
    comes from config sections, and a single positional argument is the output directory. By
    default, the output directory is the path of Open-Assistant's model store. Raises `ConfigError`
    unless exactly one of the model and `--configs` is given.
    """
    if arguments.configs is not None and arguments.output is None and arguments.model is not None:
        arguments.model, arguments.output = None, Path(arguments.model)
    if (arguments.model is None) == (arguments.configs is None):
        raise ConfigError(
            "weft convert triton: name a MODEL, or --configs with sections that name it"
        )
    if arguments.output is None:
        arguments.output = Path(f"{STORE_PREFIX}{arguments.triton_mode}")


def _write_store(arguments: argparse.Namespace) -> None:
    """Write the model store. A reward model's score ignores its tokenizer's padding token."""
    from weft.compat import triton
    from weft.data.spec import TokenizerSpec
    from weft.data.tokenizer import Tokenizer
    from weft.engine.backends.common import find_skipped_padding
    from weft.engine.spec import ModelSpec

    mode = arguments.triton_mode
    model = arguments.model
    if model is None:
        names = [name for word in arguments.configs for name in word.split(",") if name]
        model = find_triton_model(names, mode)
    model = find_model(model, ModelQuery("MODEL", SCORERS if mode == "rm" else POLICIES)).path
    padding = None
    if mode == "rm":
        spec = ModelSpec(path=model, head="score")
        padding = find_skipped_padding(Tokenizer.load(TokenizerSpec(), model), spec)
    triton.write(model, arguments.output, mode, arguments.name, padding)


def find_triton_model(names: Sequence[str], mode: str, assigned: Sequence[str] = ()) -> str:
    """Return the path of the reward model or the SFT model in the given config sections.

    `mode` is "rm" for the reward model, or "sft" for the SFT model, from which PPO starts.
    `assigned` are assignments that override the sections. Raises `ConfigError` if the sections do
    not name the model.
    """
    from weft import registry
    from weft.cli import overrides
    from weft.cli.sections import SectionLibrary
    from weft.cli.stack import read_stack

    if mode not in ("rm", "sft"):
        raise ConfigError(f"--triton_mode {mode}: must be rm or sft")
    if not names:
        raise ConfigError("--configs: needs names of sections, such as --configs pythia_rlhf")
    base = registry.quickstarts.get("ppo")()
    stack = read_stack(names, SectionLibrary.from_folders(), base, overrides.parse(list(assigned)))
    option = {"rm": "rew.path", "sft": "actor.path"}[mode]
    model: Any = next((each.value for each in stack.overrides if each.name == option), None)
    if not isinstance(model, str):
        key = {"rm": "rank_config", "sft": "sft_config"}[mode]
        raise ConfigError(
            f"--configs {' '.join(names)}: no section names a model in {key}.model_name"
        )
    return model
