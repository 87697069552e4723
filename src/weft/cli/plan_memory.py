"""`weft plan memory`: show which GPUs have enough memory to train a model, and what saves memory.

Only config.json of the model is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from weft.checkpoints.names import ModelQuery, find_model
from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.planner.memory_options import MemoryCase

SUMMARY = "the GPUs that fit the training of a model, and how to fit it on a smaller one"
EPILOG = """examples:
  weft plan memory Qwen/Qwen3-0.6B
  weft plan memory meta-llama/Llama-3.1-8B lora.r=16 gradient_checkpointing=true --tokens 4096
  weft plan memory meta-llama/Llama-3.1-8B layout=d8 optimizer.state_dtype=8bit"""


def add(commands: Any) -> None:
    """Add the subcommand `memory` to the subparsers `commands` of `weft plan`."""
    parser = commands.add_parser(
        "memory",
        help=SUMMARY,
        description=f"Print {SUMMARY}. Only its config.json is read.",
        epilog=EPILOG,
    )
    parser.add_argument("model", metavar="MODEL", help="model directory, run or hub name")
    parser.add_argument(
        "options",
        nargs="*",
        metavar="key=value",
        help="options of the model, as below model. in quickstarts: lora.r, "
        "gradient_checkpointing, layout, ...",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=16384,
        metavar="N",
        help="tokens per micro-batch, all trained (%(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="dtype of computation (%(default)s)",
    )


def print_memory_plan(arguments: argparse.Namespace) -> int:
    """Print the memory plan and return the exit code 0.

    Raises `UserError` for a model without a readable config.json, or for invalid options.
    """
    from weft.planner import memory_options

    if arguments.tokens < 1:
        raise ConfigError(f"--tokens={arguments.tokens}: a micro-batch has at least one token")
    path = find_model(arguments.model, ModelQuery("MODEL")).path
    case, parameters, trained, layout = build_training_case(
        path, arguments.options, arguments.tokens, arguments.dtype
    )
    # Print what is trained, then the GPUs that fit it.
    settings = case.settings
    part = "" if trained == parameters else f", {trained:,} trained"
    if settings.state_dtype == "float32":
        narrow = ""
    else:
        narrow = f" with states in {settings.state_dtype}"
    print(
        f"{path}: {parameters:,} parameters{part}, {OPTIMIZER_NAMES[settings.optimizer]}{narrow}, "
        f"{settings.dtype}, "
        f"{arguments.tokens:,} tokens{'' if layout == 'd1' else f', each of {layout}'}"
    )
    lacks = memory_options.find_install_command(
        *(["fp8=true"] if settings.fp8 else []), f"optimizer.state_dtype={settings.state_dtype}"
    )
    print(
        "\n".join(
            [
                *memory_options.format_table(memory_options.list_memory_options({"model": case})),
                *([f"these settings need {lacks}"] if lacks else []),
            ]
        )
    )
    return 0


OPTIMIZER_NAMES = {"adamw": "AdamW", "sgd": "SGD", "lion": "Lion"}


def build_training_case(
    model: str, words: Sequence[str], tokens: int, dtype: str = "bfloat16"
) -> tuple[MemoryCase, int, int, str]:
    """Return (case, number of parameters, number of trained parameters, layout) for the memory
    plan.

    The case describes training on one GPU, or on one of the GPUs of the layout that the user set.
    `model` is the path of the model, and `words` are assignments to its options. Each micro-batch
    has `tokens` tokens, and each minibatch has several micro-batches. The layout is a string, such
    as `d1` for one GPU. Raises `ConfigError` for invalid options.
    """
    import torch

    from weft.cli import overrides
    from weft.engine.planned_engine import describe_planned_engine
    from weft.engine.spec import ModelSpec
    from weft.launch.memory import build_case as case
    from weft.options import read, to_mapping, validate
    from weft.planner.memory import CallDemand
    from weft.topology import Mesh

    base = ModelSpec(path=model, dtype=dtype)
    nested: dict[str, Any] = {}
    for assignment in overrides.parse(words):
        overrides.merge(nested, assignment)
    spec = read(base, overrides.resolve(nested, to_mapping(base)))
    validate(spec)
    spec.planned = True
    spec.trained = True
    layout = spec.resolve_layout()
    gpu = torch.device("cuda")
    facts = describe_planned_engine(spec, Mesh.on_first_devices(layout), gpu)
    if facts.get("sizes") is None:
        raise ConfigError(
            f"backend={spec.backend}: its memory cannot be estimated before it runs; leave it out"
        )
    work = CallDemand(tokens=tokens, rows=tokens, backward=True, parts=2)
    layout_name = "d1" if layout.num_devices == 1 else str(layout)
    return (
        case(spec, facts, [work], gpu),
        facts["num_parameters"],
        facts["num_trainable"],
        layout_name,
    )
