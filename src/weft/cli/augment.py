"""`weft data augment`: add bad replies at the end of rankings for reward-model training.

The bad replies are sampled from a weak model or made by corrupting good replies.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.cli import model_arguments
from weft.cli.parsing import CommandParser, parse_positive, split_names
from weft.data.bad_replies import KINDS
from weft.data.spec import DatasetSpec
from weft.engine.spec import GenerationSpec
from weft.errors import ConfigError
from weft.options import validate

if TYPE_CHECKING:
    from weft.evaluation.augment import WeakModel

EPILOG = """kinds of bad replies that need no model:
  shuffled   the words of the best reply in another order
  cut        the beginning of the best reply
  repeated   the first sentence of the best reply, repeated
  other      the best reply to another prompt

examples:
  weft data augment rankings.jsonl --model WEAK_DIR --out augmented.jsonl
  weft data augment trees.jsonl --model WEAK_DIR --samples 4 --reward RM_DIR --out augmented.jsonl
  weft data augment --datasets hellaswag --worse shuffled,other --share 0.5 --out augmented.jsonl
  weft quickstart rw ... dataset.train_path=augmented.jsonl dataset.type=ranking"""


def main(argv: Sequence[str]) -> int:
    """Run `weft data augment ...` and return the exit code.

    Raises `UserError` for unusable files and options.
    """
    arguments = _build_parser().parse_args(list(argv))
    from weft.evaluation import augment

    if arguments.model is None and not arguments.worse:
        raise ConfigError(
            f"--model is missing: name a weak model, or kinds of bad replies with --worse "
            f"({', '.join(KINDS)})"
        )
    if arguments.model is None and arguments.reward:
        raise ConfigError("--reward chooses among a model's answers: add --model")
    if arguments.out.exists():
        raise ConfigError(
            f"--out={arguments.out}: exists, and files are never overwritten; name another file"
        )
    rows = augment.read(_find_paths(arguments))[: arguments.n]
    options = augment.AugmentationOptions(
        arguments.worse,
        arguments.samples,
        arguments.share,
        arguments.seed,
        pairs=arguments.form == "preference",
    )
    with model_arguments.show_progress("rows") as progress:
        counts = augment.write(
            rows,
            options,
            _open_weak_model(arguments),
            arguments.out,
            _collect_settings(arguments, len(rows)),
            progress,
        )
    print(f"{arguments.out}: {counts.augmented:,} rows with bad replies, {counts.plain:,} without")
    if counts.left_out:
        print(
            f"{counts.left_out:,} rows are left out: each has a single reply, and no bad reply was "
            f"made for it"
        )
    print(f"train on it with dataset.train_path={arguments.out} dataset.type={arguments.form}")
    return 0


def _build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="weft data augment", description=__doc__, epilog=EPILOG)
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="rankings, pairs, answers, conversations or message trees",
    )
    parser.add_argument(
        "--datasets", nargs="+", metavar="NAME", help="datasets by name (docs/named-datasets.md)"
    )
    parser.add_argument(
        "--mode",
        choices=("rm", "sft"),
        default="rm",
        help="purpose for which the datasets are read (default rm)",
    )
    parser.add_argument(
        "--yes", action="store_true", help="download missing datasets without asking"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE.jsonl", help="the file to write"
    )
    parser.add_argument("--model", metavar="MODEL", help="weak model or run; its answers rank last")
    parser.add_argument(
        "--worse",
        type=_parse_kinds,
        default=(),
        metavar="KIND,...",
        help=f"bad replies made from good ones: {', '.join(KINDS)}",
    )
    parser.add_argument(
        "--reward",
        metavar="MODEL",
        help="reward model or run that chooses the best of the sampled answers",
    )
    parser.add_argument(
        "--samples",
        type=parse_positive,
        default=1,
        metavar="N",
        help="answers sampled per row, of which one is kept (default 1)",
    )
    parser.add_argument(
        "--share",
        type=_parse_share,
        default=1.0,
        metavar="X",
        help="share of the rows that get bad replies (default 1)",
    )
    parser.add_argument("-n", type=parse_positive, metavar="N", help="use only the first N rows")
    parser.add_argument(
        "--form",
        choices=("ranking", "preference"),
        default="ranking",
        help="form of the rows: {replies, augmented}, one bad reply drawn per epoch, or "
        "{chosen, rejected} (default ranking)",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=parse_positive,
        default=256,
        metavar="N",
        help="maximum per answer (default 256)",
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, metavar="X", help="of sampling (default 1)"
    )
    parser.add_argument(
        "--top-p", type=float, default=0.9, metavar="X", help="of sampling (default 0.9)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of sampling (default 1)")
    model_arguments.add_model_options(parser)
    model_arguments.add_template_option(parser)
    return parser


def _parse_share(text: str) -> float:
    number = float(text)
    if not 0.0 < number <= 1.0:
        raise argparse.ArgumentTypeError("must be above 0 and at most 1")
    return number


def _parse_kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(dict.fromkeys(split_names([text])))
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown kind {unknown[0]!r}; known: {', '.join(KINDS)}")
    return kinds


def _find_paths(arguments: argparse.Namespace) -> list[str]:
    """Return the paths of the files to augment: the given files, and those of the named datasets.

    Raises `ConfigError` if no files or datasets are named, or if none of the datasets is on this
    machine or may be downloaded.
    """
    if not arguments.datasets:
        if not arguments.paths:
            raise ConfigError("no rows are named: give a PATH or --datasets NAME")
        return list(arguments.paths)
    from weft.cli import named_data

    spec = DatasetSpec()
    permitted = named_data.select_permitted(
        named_data.resolve_sources(arguments.datasets, arguments.mode, spec), spec, arguments.yes
    )
    if not permitted:
        raise ConfigError("--datasets: none of them is on this machine; --yes downloads them")
    sources = [named_data.to_source_entry(source) for source in permitted]
    return [
        *arguments.paths,
        *named_data.list_named_files(replace(spec, sources=sources), arguments.mode),
    ]


def _open_weak_model(arguments: argparse.Namespace) -> WeakModel | None:
    if arguments.model is None:
        return None
    from weft.evaluation.answers import SamplingSettings
    from weft.evaluation.augment import WeakModel

    spec = GenerationSpec(
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )
    validate(spec)
    reward = model_arguments.load_scorer(arguments.reward, arguments) if arguments.reward else None
    return WeakModel(
        model_arguments.load_policy(arguments.model, arguments),
        SamplingSettings("weak", spec),
        reward,
    )


def _collect_settings(arguments: argparse.Namespace, num_rows: int) -> dict[str, Any]:
    """Return the command-line arguments that influence the output, keyed by name.

    An unfinished output is continued only if these settings are the same. `num_rows` is the number
    of input rows, which is added under the key `rows`.
    """
    ignored = ("out", "yes", "device", "backend")
    settings = {}
    for name, value in vars(arguments).items():
        if name not in ignored:
            settings[name] = str(value)
    return {**settings, "rows": num_rows}
