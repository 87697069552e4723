"""`weft plan`: show what a run would do, without running it.

`search` shows the devices that `allocation_mode=search` assigns to each call of an experiment, and
the estimated times. `run` says how long a run takes, whether it fits, and which options would make it
fit or run faster. `show` writes a page with simulated steps. `cost` compares GPUs by time and price.
`realloc` shows the transfers that move parameters between two layouts. `memory` shows which GPUs have
enough memory to train a model. `profile` measures a model's parts on this machine, so that estimated
times are right.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from weft.checkpoints.names import ModelQuery, find_model
from weft.cli import overrides, plan_profile, plan_run, plan_search, plan_show
from weft.cli.parsing import CommandParser
from weft.cli.plan_run import WORDS, build_planned_config, name_run
from weft.engine.spec import ModelSpec
from weft.errors import ConfigError
from weft.options import read, to_mapping, validate
from weft.planner.forecast import find_install_command, format_table, list_memory_options
from weft.planner.memory import BYTES, CallDemand
from weft.topology import Layout, Mesh, parse_mesh

if TYPE_CHECKING:
    from weft.models.network.config import TransformerConfig
    from weft.realloc.plan import ReallocationTraffic

MAX_LISTED_PARAMETERS = 5  # maximum number of parameters listed
SIDES = {"source": "FROM", "target": "TO"}  # side of a reallocation -> argument with its layout
# config.json of the default model, a Llama with 1.2 billion parameters
SMALL_LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}

MEMORY_SUMMARY = "the GPUs that fit the training of a model, and how to fit it on a smaller one"
MEMORY_EPILOG = """examples:
  weft plan memory Qwen/Qwen3-0.6B
  weft plan memory meta-llama/Llama-3.1-8B lora.r=16 gradient_checkpointing=true --tokens 4096
  weft plan memory meta-llama/Llama-3.1-8B layout=d8 optimizer.state_dtype=8bit"""

DEFAULT_DEVICES = (1, 2, 4, 8)
COST_SUMMARY = "which GPUs a run fits, how long it takes on them, and for how much"
COST_EPILOG = """Times are estimates; search.prompt_tokens and search.answer_tokens set the lengths. Calls are placed
by search on each number of GPUs, or by allocation_mode=heuristic; a layout or plan file in
allocation_mode is used for the number of GPUs that it names. More GPUs than a machine has
(n_gpus_per_node, or 8) are whole machines.

examples:
  weft plan cost sft model.path=Qwen/Qwen3-8B dataset.train_path=sft.jsonl --price H100=2.5 --price A100=1.4 --steps 1000
  weft plan cost ppo actor.path=MODEL critic.path=MODEL rew.path=REWARDS dataset.path=prompts.jsonl max_steps=500"""

EPILOG = """layouts: letters d f t p c e, each followed by its degree, such as d2f2t2; the degree of a
missing letter is 1. A trained role is sharded over its data-parallel ranks by default: for d4t2
of a trained actor write d4f4t2 here.

columns, in bytes of one rank's parameters:
  sent, received   between ranks
  kept             shards that are the same before and after
  copied           parts of new shards that are copied from the rank's old shards

examples:
  weft plan realloc d4t2 t4p2
  weft plan realloc d4f4t2 d8 --model MODEL_DIR --source-mesh 0-7 --target-mesh 8-15 --devices-per-node 8
  weft plan realloc p4 t4 --source-schedule zbv
  weft plan realloc d2f2 t2 --dtype float32 --json"""


def main(argv: Sequence[str]) -> int:
    """Run `weft plan ...` and return the exit code.

    Raises `UserError` for unusable input, such as layouts that do not fit the model or the devices.
    """
    parser, realloc_parser = _build_parsers()
    arguments, rest = parser.parse_known_args(list(argv))
    # Arguments of weft quickstart may also follow flags.
    if arguments.command in ("search", "run", "show", "cost") and not any(
        word.startswith("--") for word in rest
    ):
        arguments.words += rest
    elif rest:
        parser.parse_args(list(argv))  # raises an error that names the unknown arguments
    if arguments.command is None:
        parser.print_help()
        return 2
    if arguments.command == "search":
        plan_search.print_search(arguments)
        return 0
    if arguments.command == "run":
        plan_run.print_forecast(arguments)
        return 0
    if arguments.command == "memory":
        print_memory_plan(arguments)
        return 0
    if arguments.command == "cost":
        print_cost(arguments)
        return 0
    if arguments.command == "show":
        plan_show.run(arguments, name_run(arguments.words))
        return 0
    if arguments.command == "profile":
        plan_profile.run(arguments, _read_model_config(arguments.model, "MODEL"))
        return 0
    if arguments.devices_per_node < 1:
        realloc_parser.error(
            f"--devices-per-node={arguments.devices_per_node}: a node has at least one device"
        )
    print_reallocation(arguments)
    return 0


def _build_parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    parser = CommandParser(prog="weft plan", description=__doc__)
    commands = parser.add_subparsers(
        dest="command", metavar="{search,run,show,cost,realloc,memory,profile}"
    )
    plan_search.add_parser(commands)
    plan_run.add_parser(commands)
    plan_show.add_parser(commands, WORDS)
    _add_cost_parser(commands)
    summary = "the transfers that move a role's parameters from one layout to another"
    realloc_parser = commands.add_parser(
        "realloc", help=summary, description=f"Print {summary}.", epilog=EPILOG
    )
    realloc_parser.add_argument(
        "source", metavar="FROM", help="layout before the reallocation, such as d4f4t2"
    )
    realloc_parser.add_argument("target", metavar="TO", help="layout after, such as t4p2")
    realloc_parser.add_argument(
        "--model",
        metavar="DIR",
        help="model directory, run or hub name; only its config.json is read",
    )
    realloc_parser.add_argument(
        "--dtype",
        choices=sorted(BYTES),
        default="bfloat16",
        help="dtype of the parameters sent (%(default)s)",
    )
    realloc_parser.add_argument(
        "--source-mesh",
        metavar="LIST",
        help="devices of FROM, such as 0-7 or 0,2 (default: the first ones)",
    )
    realloc_parser.add_argument(
        "--target-mesh", metavar="LIST", help="devices of TO (default: the first ones)"
    )
    for side, name in SIDES.items():
        realloc_parser.add_argument(
            f"--{side}-schedule",
            default="1f1b",
            metavar="KIND",
            help=f"pipeline_schedule of {name}; determines each rank's stages (%(default)s)",
        )
        realloc_parser.add_argument(
            f"--{side}-stages", type=int, metavar="N", help=f"pipeline_stages_per_rank of {name}"
        )
    realloc_parser.add_argument(
        "--devices-per-node",
        type=int,
        default=8,
        metavar="N",
        help="number of devices per node (%(default)s)",
    )
    realloc_parser.add_argument(
        "--json", action="store_true", help="print everything as one JSON object"
    )
    _add_memory_parser(commands)
    plan_profile.add_parser(commands)
    return parser, realloc_parser


def _add_cost_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "cost",
        help=COST_SUMMARY,
        description=f"Print {COST_SUMMARY}. Only options and config.json are read.",
        epilog=COST_EPILOG,
    )
    parser.add_argument("words", **WORDS)
    parser.add_argument(
        "--price",
        action="append",
        default=[],
        metavar="GPU=PRICE",
        help="a GPU and its price for an hour, such as H100=2.5; several times for several GPUs; "
        "without it, all known GPUs are compared by time",
    )
    parser.add_argument(
        "--devices",
        default=",".join(map(str, DEFAULT_DEVICES)),
        metavar="N,N",
        help="numbers of GPUs to compare (%(default)s)",
    )
    parser.add_argument("--steps", type=int, metavar="N", help="steps of the run; else max_steps")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def _add_memory_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "memory",
        help=MEMORY_SUMMARY,
        description=f"Print {MEMORY_SUMMARY}. Only its config.json is read.",
        epilog=MEMORY_EPILOG,
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


def print_cost(arguments: argparse.Namespace) -> None:
    """Print a table of GPUs with the time and cost of a run on them.

    Raises `ConfigError` for invalid prices or numbers, and if the run can be planned on no GPU.
    """
    from weft.launch.plan_cost import (
        compare_devices,
        describe_assumptions,
        format_cost_table,
        parse_prices,
    )

    prices = parse_prices(arguments.price)
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", arguments.devices):
        raise ConfigError(f"--devices={arguments.devices}: write numbers of GPUs, such as 1,2,8")
    counts = list(dict.fromkeys(int(word) for word in arguments.devices.split(",")))
    if arguments.steps is not None and arguments.steps < 1:
        raise ConfigError(f"--steps={arguments.steps}: a run has at least one step")
    config = build_planned_config(arguments.words)
    steps = arguments.steps or config.max_steps
    options = compare_devices(config, prices, counts)
    if not arguments.json:
        notes = describe_assumptions(config, options)
        print("\n".join([*format_cost_table(options, steps), *notes]))
        return
    rows = []
    for option in options:
        cost = None if steps is None else option.compute_cost(steps)
        rows.append({**asdict(option), "cost": cost})
    print(json.dumps({"steps": steps, "options": rows}, indent=2))


def print_reallocation(arguments: argparse.Namespace) -> None:
    """Plan the transfers of parameters between two layouts, and print the number of bytes sent.

    Raises `UserError` for layouts that do not fit the model or the devices.
    """
    from weft.checkpoints.hf_io import compute_parameter_shapes
    from weft.engine.torch.network_source import check_layout
    from weft.realloc.plan import count_least_bytes, count_traffic, holdings_of, plan

    # Check the layouts.
    meshes = [_build_mesh(arguments, side) for side in SIDES]
    config = _read_model_config(arguments.model)
    devices_per_node = arguments.devices_per_node
    for side, mesh in zip(SIDES, meshes, strict=True):
        with _prefix_errors(arguments, side):
            check_layout(
                ModelSpec(pipeline_schedule=getattr(arguments, f"{side}_schedule")),
                mesh.layout,
                config,
            )

    def get_node(rank: int) -> int:
        return rank // devices_per_node

    # Plan the transfers and count their bytes.
    shapes = compute_parameter_shapes(config)
    source, target = (holdings_of(shapes, config, mesh, tied=config.tied) for mesh in meshes)
    itemsize = dict.fromkeys(shapes, BYTES[arguments.dtype])
    transfers = plan(source, target, node_of=get_node)
    traffic = count_traffic(transfers, source, target, itemsize=itemsize, node_of=get_node)
    report = {
        "model": arguments.model or "a Llama of 1.2 billion parameters",
        "dtype": arguments.dtype,
        "source": _describe_mesh(meshes[0]),
        "target": _describe_mesh(meshes[1]),
        "ranks": [
            _describe_traffic(rank, traffic, get_node(rank)) for rank in sorted({*source, *target})
        ],
        "sent": traffic.moved_bytes,
        "sent_inside_nodes": traffic.inside,
        "sent_between_nodes": traffic.across,
        "least": count_least_bytes(source, target, itemsize=itemsize),
        "transfers": sum(not transfer.is_local for transfer in transfers),
        "largest": [
            {"name": name, "sent": size}
            for name, size in traffic.names.most_common(MAX_LISTED_PARAMETERS)
        ],
    }
    print(json.dumps(report, indent=2) if arguments.json else _format_page(report))


OPTIMIZER_NAMES = {"adamw": "AdamW", "sgd": "SGD", "lion": "Lion", "palm": "PaLM"}


def print_memory_plan(arguments: argparse.Namespace) -> None:
    """Print the memory that training needs on one GPU, or on each GPU of the option `layout`.

    Only config.json of the model is read. Minibatches are assumed to have several micro-batches of
    `--tokens` tokens. Raises `UserError` for a model without a readable config.json, or for invalid
    options.
    """
    import torch

    from weft.experiments.planned_networks import describe_planned_engine
    from weft.launch.facts import build_case, find_missing_packages

    # Describe the engine that the options ask for.
    tokens = arguments.tokens
    if tokens < 1:
        raise ConfigError(f"--tokens={tokens}: a micro-batch has at least one token")
    path = find_model(arguments.model, ModelQuery("MODEL")).path
    spec = _read_model_options(path, arguments)
    layout = spec.resolve_layout()
    gpu = torch.device("cuda")
    facts = describe_planned_engine(spec, Mesh.on_first_devices(layout), gpu)
    if facts.get("sizes") is None:
        raise ConfigError(
            f"backend={spec.backend}: its memory cannot be estimated before it runs; leave it out"
        )
    # Print the model and its settings, then the GPUs with enough memory.
    total = facts["num_parameters"]
    trained = facts["num_trainable"]
    trained_note = "" if trained == total else f", {trained:,} trained"
    per_device_note = "" if layout.num_devices == 1 else f", each of {layout}"
    state_dtype = spec.optimizer.state_dtype
    dtype_note = "" if state_dtype == "float32" else f" with states in {state_dtype}"
    print(
        f"{path}: {total:,} parameters{trained_note}, "
        f"{OPTIMIZER_NAMES[spec.optimizer.type]}{dtype_note}, {spec.dtype}, {tokens:,} "
        f"tokens{per_device_note}"
    )
    demand = CallDemand(tokens=tokens, rows=tokens, backward=True, parts=2)
    cases = {"model": build_case(spec, facts, [demand], gpu)}
    missing = find_missing_packages()
    print("\n".join(format_table(list_memory_options(cases, missing))))
    settings = [*(["fp8=true"] if spec.fp8 else []), f"optimizer.state_dtype={state_dtype}"]
    command = find_install_command(settings, missing)
    if command:
        print(f"these settings need {command}")


def _read_model_options(path: str, arguments: argparse.Namespace) -> ModelSpec:
    """Return the options of a trained model that the arguments of `weft plan memory` set."""
    base = ModelSpec(path=path, dtype=arguments.dtype)
    nested: dict[str, Any] = {}
    for assignment in overrides.parse(arguments.options):
        overrides.merge(nested, assignment)
    spec = read(base, overrides.resolve(nested, to_mapping(base)))
    validate(spec)
    spec.planned = True
    spec.trained = True
    return spec


def _build_mesh(arguments: argparse.Namespace, side: str) -> Mesh:
    def get_argument(name: str) -> Any:
        return getattr(arguments, f"{side}_{name}")

    with _prefix_errors(arguments, side):
        layout = Layout.parse(getattr(arguments, side))
        spec = ModelSpec(
            pipeline_schedule=get_argument("schedule"),
            pipeline_stages_per_rank=get_argument("stages"),
        )
        return parse_mesh(get_argument("mesh"), spec.with_virtual_stages(layout))


@contextmanager
def _prefix_errors(arguments: argparse.Namespace, side: str) -> Iterator[None]:
    """Prefix any `ConfigError` raised in the `with` block with the argument that caused it.

    `side` is "source" or "target". Examples of prefixes are `FROM p4: ...` and `--source-mesh ...`.
    """
    try:
        yield
    except ConfigError as error:
        problem = re.sub(r"^layout(=\w+)?: ", "", str(error))
        for option, flag in (("device_mesh", "mesh"), ("pipeline_schedule", "schedule")):
            if problem.startswith(f"{option}="):
                raise ConfigError(problem.replace(f"{option}=", f"--{side}-{flag} ", 1)) from None
        raise ConfigError(f"{SIDES[side]} {getattr(arguments, side)}: {problem}") from None


def _read_model_config(model: str | None, option: str = "--model") -> TransformerConfig:
    """Return the configuration of `model`, or of the default model if it is None.

    `option` names the argument in error messages.
    """
    from weft.checkpoints.config_file import find_family
    from weft.checkpoints.hf_io import read_config

    if model:
        return read_config(find_model(model, ModelQuery(option)).path)[1]
    return find_family(SMALL_LLAMA).config(SMALL_LLAMA)


def _describe_mesh(mesh: Mesh) -> dict[str, Any]:
    return {"layout": str(mesh.layout), "devices": list(mesh.ranks)}


def _describe_traffic(rank: int, traffic: ReallocationTraffic, node: int) -> dict[str, int]:
    return {
        "rank": rank,
        "node": node,
        "sent": traffic.sent[rank],
        "received": traffic.received[rank],
        "kept": traffic.in_place[rank],
        "copied": traffic.copied[rank],
    }


def _format_page(report: dict[str, Any]) -> str:
    """Return the text for a reallocation: a table of bytes by rank, totals, and parameters."""
    columns = ("sent", "received", "kept", "copied")
    lines = [
        f"{report['model']}, sent as {report['dtype']}",
        f"from {_format_mesh(report['source'])}",
        f"to   {_format_mesh(report['target'])}",
        "",
        f"{'rank':>5} {'node':>5} " + " ".join(f"{name:>11}" for name in columns),
    ]
    for row in report["ranks"]:
        lines.append(
            f"{row['rank']:>5} {row['node']:>5} "
            + " ".join(f"{_format_size(row[name]):>11}" for name in columns)
        )
    totals = []
    for name in columns:
        totals.append(sum(row[name] for row in report["ranks"]))
    lines.append(f"{'total':>11} " + " ".join(f"{_format_size(total):>11}" for total in totals))
    lines += [
        "",
        f"inside nodes   {_format_size(report['sent_inside_nodes']):>11}",
        f"between nodes  {_format_size(report['sent_between_nodes']):>11}",
        f"least possible {_format_size(report['least']):>11}    "
        "bytes of new shards that ranks lack",
        "",
        f"{report['transfers']:,} transfers; the largest parameters sent:",
        *(f"  {_format_size(each['sent']):>11}  {each['name']}" for each in report["largest"]),
    ]
    return "\n".join(lines if report["largest"] else [*lines[:-1], "nothing is sent"])


def _format_mesh(mesh: dict[str, Any]) -> str:
    return f"{mesh['layout']} on {', '.join(map(str, mesh['devices']))}"


def _format_size(num_bytes: int) -> str:
    size = float(num_bytes)
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size = size / 1024
        units = units[1:]
    if units[0] == "B":
        return f"{size:.0f} {units[0]}"
    return f"{size:.1f} {units[0]}"
