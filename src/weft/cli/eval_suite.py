"""`weft eval suite MODEL ...`: evaluate models on tasks of lm-evaluation-harness.

Tasks are files of your own, or the harness' own tasks. The results are stored in the harness' form.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.cli import model_arguments
from weft.cli.parsing import CommandParser, parse_count, parse_positive, split_names
from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.evaluation.catalogue import CatalogueOptions
    from weft.evaluation.suite import TaskFigure

HELP = "evaluate models on tasks of lm-evaluation-harness"
EPILOG = """examples:
  weft eval suite runs/E/T runs/E/T@step40 --tasks my_task --include_path tasks
  weft eval suite MODEL --tasks gsm8k,arc_easy --num_fewshot 5 --limit 200
  weft eval suite MODEL --tasks tasks/quiz.yaml --apply_chat_template --output results"""
DIGITS = 4  # decimal places in the table of results


def add_parser(commands: Any) -> None:
    """Add the command `suite` to the commands of `weft eval`."""
    parser: CommandParser = commands.add_parser("suite", help=HELP, epilog=EPILOG)
    parser.set_defaults(run=run)
    parser.add_argument(
        "models", nargs="+", metavar="MODEL", help="models, adapters, runs or their checkpoints"
    )
    parser.add_argument(
        "--tasks",
        required=True,
        metavar="A,B",
        help="tasks, groups or tags, patterns such as mmlu_*, or task files",
    )
    parser.add_argument(
        "--include_path",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="folder of task files (may be repeated)",
    )
    parser.add_argument(
        "--data_dir",
        type=Path,
        metavar="DIR",
        help="copies of data sets of the hub, in DIR/OWNER/NAME (default ~/.cache/weft/eval)",
    )
    _add_catalogue_options(parser)
    parser.add_argument(
        "--limit", type=_parse_limit, metavar="N", help="first N items of each task, or their share"
    )
    parser.add_argument(
        "--num_fewshot", type=parse_count, metavar="K", help="examples in each prompt"
    )
    _add_prompt_options(parser)
    parser.add_argument(
        "--gen_kwargs",
        metavar="KEY=VALUE,...",
        help="options of generation that override the tasks' own, or a JSON object",
    )
    parser.add_argument(
        "--use_cache", metavar="PATH", help="beginning of the files that cache answers"
    )
    parser.add_argument(
        "--batch",
        type=parse_positive,
        default=16384,
        metavar="TOKENS",
        help="maximum tokens of a forward pass (default %(default)s)",
    )
    parser.add_argument(
        "--log_samples",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="store each item's prompt, answer and score (default: on)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder of the results (default: eval in the model's directory)",
    )
    parser.add_argument(
        "--seed", type=parse_count, metavar="N", help="seed (default: the harness' own seeds)"
    )
    model_arguments.add_model_options(parser)
    model_arguments.add_template_option(parser)


def _add_catalogue_options(parser: CommandParser) -> None:
    """Add the options of weft's own tasks."""
    parser.add_argument(
        "--data",
        type=_parse_data,
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="file or folder of a data set of weft's own tasks (may be repeated)",
    )
    parser.add_argument("--judge", metavar="URL", help="OpenAI-compatible endpoint of the judge")
    parser.add_argument("--judge_model", metavar="NAME", help="name of the judge's model")
    parser.add_argument(
        "--allow_code",
        action="store_true",
        help="run programs that the model writes, in the sandbox of the code reward",
    )
    parser.add_argument(
        "--num_samples", type=parse_positive, metavar="N", help="answers per item: pass@k, maj@k"
    )


def _add_prompt_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--apply_chat_template",
        action="store_true",
        help="ask in conversations, rendered by the model's chat template",
    )
    parser.add_argument(
        "--fewshot_as_multiturn",
        action=argparse.BooleanOptionalAction,
        help="make each example a turn of its own (default: on with a chat template)",
    )
    parser.add_argument(
        "--system_instruction", metavar="TEXT", help="system message, or text before each prompt"
    )


def _parse_limit(text: str) -> float:
    value = float(text)
    if not (0 < value < 1 or (value >= 1 and value.is_integer())):
        raise argparse.ArgumentTypeError("must be a number of items, or a share below 1")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Evaluate the models, write the results and print a table of them.

    Tasks, models, templates and folders are checked before the first model is loaded. Raises
    `UserError` for unusable input.
    """
    # Hide the progress bars of other libraries. This must be set before tqdm is imported.
    os.environ.setdefault("TQDM_DISABLE", "1")
    from weft.evaluation import suite, suite_tasks

    suite_tasks.require_harness()
    multiturn = arguments.fewshot_as_multiturn
    if multiturn and not arguments.apply_chat_template:
        raise ConfigError("--fewshot_as_multiturn needs --apply_chat_template; add it")
    options = suite.SuiteOptions(
        limit=arguments.limit,
        num_fewshot=arguments.num_fewshot,
        apply_chat_template=arguments.apply_chat_template,
        fewshot_as_multiturn=arguments.apply_chat_template if multiturn is None else multiturn,
        system_instruction=arguments.system_instruction,
        gen_kwargs=parse_generation_options(arguments.gen_kwargs),
        use_cache=arguments.use_cache,
        log_samples=arguments.log_samples,
        seed=arguments.seed,
        max_tokens=arguments.batch,
        model_arguments=_describe_model_options(arguments),
    )
    # Check everything before a model is loaded.
    model_arguments.check_policies(arguments.models)
    folders = _choose_folders(arguments.models, arguments.output)
    names = list(folders)
    if arguments.apply_chat_template:
        model_arguments.check_chat_templates(names, arguments)
    for folder in folders.values():
        suite.check_folder(folder)
    copies = arguments.data_dir or Path(suite_tasks.COPIES).expanduser()
    task_names = split_names([arguments.tasks])
    tasks = suite_tasks.load_named_tasks(task_names, _build_catalogue_options(arguments, copies))
    # Evaluate one model after the other.
    figures: dict[str, list[TaskFigure]] = {}
    for name in names:
        opened = model_arguments.load_policy(name, arguments)
        # The harness prints messages to standard output, which is for results only.
        with redirect_stdout(sys.stderr), _show_kinds(name) as progress:
            results, files = suite.evaluate(opened, tasks, options, folders[name], progress)
        del opened  # free its memory before the next model is loaded
        figures[name] = suite.list_figures(results)
        for file in files:
            print(file)
    _print_table(figures)
    return 0


def _build_catalogue_options(arguments: argparse.Namespace, copies: Path) -> CatalogueOptions:
    """Return the options of the catalogue's tasks. Raises `ConfigError` for incomplete options.

    `copies` is the folder of local copies of datasets.
    """
    from weft.evaluation.catalogue import CatalogueOptions
    from weft.evaluation.task_judge import JudgeSettings

    if (arguments.judge is None) != (arguments.judge_model is None):
        raise ConfigError("--judge URL and --judge_model NAME belong together; give both")
    judge = (
        None if arguments.judge is None else JudgeSettings(arguments.judge, arguments.judge_model)
    )
    return CatalogueOptions(
        data=dict(arguments.data),
        folder=copies,
        judge=judge,
        allow_code=arguments.allow_code,
        num_samples=arguments.num_samples,
        include_path=arguments.include_path,
    )


def _parse_data(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not name or not equals or not path:
        raise argparse.ArgumentTypeError("write NAME=PATH, such as gsm8k=data/gsm8k")
    return name, Path(path)


def parse_generation_options(text: str | None) -> dict[str, Any]:
    """Return the options of generation from the text `KEY=VALUE,...` or from a JSON object.

    Raises `ConfigError` if the text has another form.
    """
    import yaml

    if not text:
        return {}
    if text.lstrip().startswith("{"):
        try:
            return dict(json.loads(text))
        except ValueError as error:
            raise ConfigError(f"--gen_kwargs {text}: is not valid JSON ({error})") from error
    options = {}
    for word in text.split(","):
        key, equals, value = word.partition("=")
        if not equals or not key.strip():
            raise ConfigError(
                f"--gen_kwargs {word!r}: write KEY=VALUE,KEY=VALUE, such as "
                f"temperature=0.7,do_sample=true, or a JSON object"
            )
        try:
            options[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(
                f"--gen_kwargs {word!r}: the value cannot be read; write a list, or a text with "
                f"special characters, in a JSON object"
            ) from error
    return options


def _describe_model_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of loading models that are set, to record them in the results."""
    options = {}
    for name in ("backend", "device", "dtype", "quantize", "chat_template"):
        value = getattr(arguments, name)
        if value is not None:
            options[name] = value
    return options


def _choose_folders(names: Sequence[str], output: Path | None) -> dict[str, Path]:
    """Return the folder for the results of each model, by the name of the model.

    Folders in `output` are named after the models. If several names refer to the same model, only
    the first of them is in the result.
    """
    from weft.checkpoints.names import ModelQuery, find_model
    from weft.evaluation.sampling_report import shorten_name
    from weft.evaluation.suite import choose_folder
    from weft.observe.jsonl import POLICIES

    folders: dict[str, Path] = {}
    paths: set[str] = set()
    for name in names:
        path = find_model(name, ModelQuery("MODEL", POLICIES)).path
        if path in paths:
            continue
        paths.add(path)
        base_name = re.sub(r"[^\w.-]+", "-", shorten_name(path)).strip("-") or "model"
        numbered = [base_name, *(f"{base_name}-{number}" for number in range(2, len(names) + 1))]
        candidates = (choose_folder(path, output, candidate) for candidate in numbered)
        folders[name] = next(
            candidate for candidate in candidates if candidate not in folders.values()
        )
    return folders


@contextmanager
def _show_kinds(name: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar, and yield a function (kind of requests, done, total) that updates it."""
    with model_arguments.show_progress(name) as update:
        yield lambda kind, done, total: update(done, total)


def _print_table(figures: Mapping[str, Sequence[TaskFigure]]) -> None:
    """Print a row for each metric of each task, with a column for each model."""
    from rich.console import Console
    from rich.table import Table

    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    items: dict[str, int | None] = {}
    for model, model_figures in figures.items():
        for figure in model_figures:
            error_text = "" if figure.error is None else f" \u00b1 {figure.error:.{DIGITS}f}"
            row = cells.setdefault((figure.task, figure.metric, figure.filter), {})
            row[model] = f"{figure.value:.{DIGITS}f}{error_text}"
            items[figure.task] = figure.items
    table = Table(box=None, pad_edge=False)
    for title in ("task", "metric", "filter"):
        table.add_column(title, overflow="fold")
    for title in ("items", *figures):
        table.add_column(title, justify="right", overflow="fold")
    for (task, metric, filter_name), row in cells.items():
        count = "" if items[task] is None else str(items[task])
        values = [row.get(model, "") for model in figures]
        table.add_row(task, metric, filter_name, count, *values)
    Console(highlight=False).print(table)
