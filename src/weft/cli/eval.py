"""`weft eval`: measure models: a reward model on ranked replies, or policies on tasks.

rm      accuracy of a reward model on replies ranked by people, overall and by category
suite   models on tasks of lm-evaluation-harness, with its own result files
table   results of checkpoints on tasks, side by side, with what differs beyond noise
submit  a model on tasks, in a job on Slurm, Ray or Beaker
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from weft.cli import eval_submit, eval_suite, eval_table, model_arguments
from weft.cli.data_options import COPY_PREFIX, add_dataset_options, take_assignments
from weft.cli.parsing import CommandParser
from weft.errors import ConfigError
from weft.writing import resolve_destination

EPILOG = """examples:
  weft eval rm runs/E/T pairs.jsonl
  weft eval rm RM_DIR rewardbench.parquet --type preference --category subset --out scores.json
  weft eval rm RM_DIR trees.jsonl.gz --type ranking max_replies=5
  weft eval rm runs/E/T --datasets oasst_export data_path=trees.jsonl.gz
  weft eval rm runs/E/T --datasets hh-rlhf --split valid
  weft eval suite runs/E/T --tasks my_task --include_path tasks
  weft eval table runs
  weft eval submit --model_name NAME --location runs/E/T --print"""


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="weft eval", description=__doc__, epilog=EPILOG)
    commands = parser.add_subparsers(
        dest="command", metavar="{rm,suite,table,submit}", required=True
    )
    rm = commands.add_parser(
        "rm",
        help="evaluate a reward model on pairs and rankings",
        epilog=EPILOG,
    )
    rm.add_argument("model", metavar="MODEL", help="reward model, or run that trained one")
    rm.add_argument(
        "data",
        nargs="*",
        metavar="DATA|argument=value",
        help="files, folders or hub names; then assignments of dataset.args",
    )
    rm.add_argument(
        "--type",
        help="preference, paired_comparison or ranking (default: guessed from the first row)",
    )
    rm.add_argument(
        "--split",
        help="split of the data; for named datasets train or valid (default: both)",
    )
    add_dataset_options(rm, modes=False)
    rm.add_argument("--category", metavar="COLUMN", help="column that groups the rows")
    rm.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON")
    model_arguments.add_model_options(rm)
    rm.set_defaults(run=evaluate_reward_model)
    eval_suite.add_parser(commands)
    eval_table.add_parser(commands)
    eval_submit.add_parser(commands)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run `weft eval ...` and return the exit code.

    Raises `UserError` for unusable input.
    """
    command_words = list(argv)
    suite_words: list[str] = []
    if command_words[:1] == ["submit"] and "--" in command_words:
        suite_words = command_words[command_words.index("--") + 1 :]
        command_words = command_words[: command_words.index("--")]
    arguments = build_parser().parse_args(command_words)
    arguments.words = suite_words
    return int(arguments.run(arguments))


def evaluate_reward_model(arguments: argparse.Namespace) -> int:
    """Evaluate a reward model on files and named datasets, print tables, and return 0.

    Raises `UserError` for unusable input.
    """
    from weft.evaluation.reward_model import evaluate, summarize_by_category

    if arguments.out is not None:
        resolve_destination(arguments.out)  # raises before the model is loaded
    datasets = _find_data(arguments)
    opened = model_arguments.load_scorer(arguments.model, arguments, "MODEL")
    figures: dict[str, Any] = {}
    for data in datasets:
        row_name = data.name if data.name != data.path else ""
        options = {
            "category": arguments.category,
            "split": data.split,
            "args": data.args,
            "name": row_name,
        }
        with model_arguments.show_progress(data.name) as progress:
            groups = evaluate(opened, data.path, data.kind, **options, progress=progress)
        summaries = summarize_by_category(groups)
        overall = summarize_by_category([replace(group, category="") for group in groups])[""]
        categories = {name: asdict(summary) for name, summary in summaries.items()}
        figures[data.name] = {"type": data.kind, "all": asdict(overall)}
        figures[data.name] |= {"categories": categories} if arguments.category else {}
        _print_table(data.name, {**(summaries if arguments.category else {}), "all": overall})
    if arguments.out is not None:
        from weft.evaluation.sampling_report import write

        write(arguments.out, json.dumps({"model": opened.name, "data": figures}, indent=1) + "\n")
        print(arguments.out)
    return 0


@dataclass(frozen=True)
class _EvaluationData:
    """File or dataset on which a reward model is evaluated.

    `kind` is the format of the rows: preference, paired_comparison or ranking. `split` is the split
    to read, or None for all rows. `args` are arguments of the dataset type.
    """

    name: str
    path: str
    kind: str
    split: str | None
    args: Mapping[str, Any]


def _find_data(arguments: argparse.Namespace) -> list[_EvaluationData]:
    """Return the data to evaluate on: the given files, and the files of the named datasets.

    A named dataset that is not on this machine is included only if the user allows its download.
    Raises `ConfigError` if the command line names no data.
    """
    words = [*arguments.data, *take_assignments(arguments, "datasets")]
    dataset_words = []
    for word in words:
        if word.startswith((COPY_PREFIX, "datasets.")):
            dataset_words.append(word)
    type_arguments = _parse_arguments(
        [word for word in words if "=" in word and word not in dataset_words]
    )
    paths = [word for word in words if "=" not in word]
    datasets = []
    for path in paths:
        datasets.append(
            _EvaluationData(
                path,
                path,
                arguments.type or _guess_form(path, arguments.split),
                arguments.split,
                type_arguments,
            )
        )
    if arguments.datasets or dataset_words:
        datasets += _prepare_named_data(arguments, dataset_words, type_arguments)
    if not datasets:
        raise ConfigError(
            "weft eval rm: no data are named; name a file, a folder or a hub name, or --datasets "
            "NAME"
        )
    return datasets


def _prepare_named_data(
    arguments: argparse.Namespace, words: Sequence[str], type_arguments: Mapping[str, Any]
) -> list[_EvaluationData]:
    """Convert the named datasets to files of preference data, and return these files.

    `words` are assignments from the command line that set parameters of the datasets or the path of
    a local copy. `type_arguments` are arguments of the dataset type that reads the files.
    """
    from weft.cli import named_data, overrides
    from weft.cli.stacked_data import NamedDataSettings, group_by_dataset
    from weft.data.named.prepare import ValidationSplit, find_cache_root, prepare
    from weft.data.spec import DatasetSpec

    copies = []
    for word in words:
        if word.startswith(COPY_PREFIX):
            copies.append(word.removeprefix(COPY_PREFIX))
    parameters, _ = group_by_dataset(
        overrides.parse([word for word in words if not word.startswith(COPY_PREFIX)])
    )
    settings = NamedDataSettings((), copies[-1] if copies else None, parameters)
    spec = DatasetSpec()
    if arguments.split not in (None, "train", "valid"):
        raise ConfigError(f"--split {arguments.split}: must be train or valid for named datasets")
    datasets = []
    for source in named_data.select_permitted(
        named_data.resolve_sources(arguments.datasets or [], "rm", spec, settings),
        spec,
        arguments.yes,
    ):
        source_with_arguments = replace(source, args={**type_arguments, **source.args})
        prepared_source = prepare(
            source_with_arguments, "rm", find_cache_root(None), ValidationSplit()
        ).source
        for split, path in (("train", prepared_source.path), ("valid", prepared_source.valid_path)):
            if path and arguments.split in (None, split):
                name = str(source.named) if split == "train" else f"{source.named} (valid)"
                datasets.append(
                    _EvaluationData(
                        name, path, str(prepared_source.type), None, prepared_source.args
                    )
                )
    return datasets


def _parse_arguments(words: Sequence[str]) -> dict[str, Any]:
    """Return the values in words `NAME=VALUE`, parsed as YAML, by name."""
    import yaml

    result: dict[str, Any] = {}
    for name, _, value in (word.partition("=") for word in words):
        result[name] = yaml.safe_load(value)
    return result


def _guess_form(path: str, split: str | None) -> str:
    """Return the format of the rows in `path`, guessed from the first row.

    Raises `ConfigError` if the first row has no known format.
    """
    from weft.data.rows import guess_type, is_tree
    from weft.data.sources import UnreadableRow, find_files, read_rows

    location, row = next(read_rows(find_files(path, split)[0]))
    if isinstance(row, UnreadableRow):
        form = None
    elif is_tree(row):
        form = "ranking"
    else:
        form = guess_type(row)
    if form is None:
        raise ConfigError(
            f"{location}: this row fits no form; set --type to preference, paired_comparison or "
            f"ranking"
        )
    return form


def _print_table(path: str, summaries: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=path, title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for name in ("rows", "pairs", "accuracy", "best over worst", "kendalltau", "margin"):
        table.add_column(name, justify="right")
    for name, summary in summaries.items():
        shares = (
            f"{summary.accuracy:.3f} \u00b1 {summary.error:.3f}",
            f"{summary.best_accuracy:.3f}",
            f"{summary.kendalltau:.3f}",
        )
        table.add_row(name, str(summary.rows), str(summary.pairs), *shares, f"{summary.margin:.3f}")
    Console(highlight=False).print(table)
