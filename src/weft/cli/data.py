"""`weft data`: show training data as a run reads it, count rows, and find suspicious rows."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.checkpoints.names import TOKENIZERS, ModelQuery, find_model
from weft.cli.data_options import (
    DataConfig,
    add_dataset_options,
    add_stack_options,
    read_command_line,
)
from weft.cli.parsing import CommandParser, add_imports, parse_count
from weft.cli.sections import list_example_sections
from weft.data.sources import check_available
from weft.data.spec import DatasetSpec, TokenizerSpec, list_source_specs
from weft.errors import ConfigError, DataError, NoTemplate
from weft.registry import datasets, import_user_code, import_user_folder

if TYPE_CHECKING:
    from rich.console import Console

    from weft.data.loader import LoadedData
    from weft.data.tokenizer import Tokenizer

# mode -> dataset type of a named dataset's rows
MODE_TYPES = {"sft": "chat", "rm": "ranking", "rl": "prompt"}
DEFAULT_TEMPLATE = "chatml"  # chat template for counting lengths if the tokenizer has none
TEMPLATE_TOKENS = "template"  # value of `add_tokens` that adds the tokens of the template
DEFAULT_END_TOKEN = "<|im_end|>"
MAX_SHOWN_EXAMPLES = 5  # locations listed per finding of a scan
EPILOG = """options of a run can be given, written as for a run:
  dataset.max_seqlen=512 dataset.overlong=drop dataset.args.prompt_key=q
  dataset.sources='[{path: a.jsonl, fraction: 0.5}, {path: b.jsonl}]'
  tokenizer.chat_template=chat.jinja tokenizer.eos_token='</s>'

examples:
  weft data inspect pairs.jsonl --type preference --tokenizer MODEL_DIR -n 2
  weft data counts a.jsonl b.parquet --type prompt_answer --tokenizer MODEL_DIR
  weft data counts --config runs/E/T/config.yaml
  weft data counts --configs {sections}
  weft data counts --datasets oasst_export data_path=trees.jsonl.gz
  weft data scan chats.json --type chat --tokenizer MODEL_DIR dataset.max_seqlen=2048"""


def main(argv: Sequence[str]) -> int:
    """Run `weft data ...` and return the exit code.

    Raises `UserError` for unusable input.
    """
    if argv[:1] in (["trees"], ["augment"]):
        code: int = importlib.import_module(f"weft.cli.{argv[0]}").main(argv[1:])
        return code
    parser = _build_parser()
    arguments, rest = parser.parse_known_args(list(argv))
    if arguments.command is None:
        parser.print_help()
        return 2
    unknown = [word for word in rest if word.startswith("-")]
    if unknown:
        parser.error(f"unknown option {unknown[0]}")
    arguments.words += rest  # paths and assignments may also follow options
    import_user_folder()
    import_user_code(arguments.imports)
    config, paths = read_command_line(arguments)
    for path in paths:
        check_available(path)
    run: Callable[[DataConfig, list[str], argparse.Namespace], int | None] = arguments.run
    return run(config, paths, arguments) or 0


def _build_parser() -> argparse.ArgumentParser:
    epilog = EPILOG.replace("{sections}", " ".join(list_example_sections()[:2]))
    parser = CommandParser(prog="weft data", description=__doc__, epilog=epilog)
    commands = parser.add_subparsers(
        dest="command", metavar="{inspect,counts,lengths,scan,trees,augment}"
    )
    subcommands: tuple[tuple[str, Callable[..., int | None], str], ...] = (
        (
            "inspect",
            print_rows,
            "print rows token by token; trained tokens are coloured and between \u27e6 and \u27e7",
        ),
        (
            "counts",
            print_counts,
            "print the number of training and evaluation rows of each source, and of those cut "
            "or left out",
        ),
        (
            "lengths",
            print_lengths,
            "print the longest row in tokens, the 99th percentile and the number of rows above a "
            "limit, for each source",
        ),
        (
            "scan",
            print_scan,
            "count phrases such as 'As an AI language model', duplicates, empty answers, bad and "
            "overlong rows",
        ),
    )
    for name, run, help in subcommands:
        command = commands.add_parser(name, help=help, description=help, epilog=epilog)
        command.set_defaults(run=run)
        _add_common_options(command)
    commands.add_parser(
        "trees", help="count, filter, split, flatten and build Open-Assistant's message trees"
    )
    commands.add_parser(
        "augment", help="write rankings that end with bad replies, for example of a weak model"
    )
    inspecting, counting, measuring, scanning = (commands.choices[name] for name, *_ in subcommands)
    counting.add_argument(
        "--output", type=Path, metavar="FILE.csv", help="also write the table as CSV"
    )
    counting.add_argument(
        "--detect-language",
        action="store_true",
        help="detect the languages of the texts (with langdetect)",
    )
    measuring.add_argument(
        "--limit",
        type=parse_count,
        default=4096,
        metavar="N",
        help="count the rows with more tokens than this (default 4096)",
    )
    inspecting.add_argument(
        "-n", type=parse_count, default=3, metavar="N", help="rows to print (default 3)"
    )
    inspecting.add_argument(
        "--skip", type=parse_count, default=0, metavar="K", help="number of rows to skip first"
    )
    inspecting.add_argument(
        "--lines", action="store_true", help="print one token per line, with its id"
    )
    scanning.add_argument(
        "--phrases", type=Path, help="a file of other phrases to look for, one per line"
    )
    return parser


def _add_common_options(command: argparse.ArgumentParser) -> None:
    """Add the options of all commands, which select the data, the tokenizer and colours."""
    command.add_argument(
        "words",
        nargs="*",
        metavar="PATH|option=value",
        help="files, directories or hub names; options",
    )
    command.add_argument(
        "--type",
        help=f"dataset type (default: guessed from the first row): {', '.join(datasets.list_names())}",
    )
    command.add_argument(
        "--tokenizer",
        help="HF directory, tokenizer.json, sentencepiece tokenizer.model, or a hub name",
    )
    command.add_argument(
        "--config", type=Path, help="a run's config.yaml, for its data and its tokenizer"
    )
    add_imports(command, None, "module or FILE.py that registers dataset types")
    command.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="default: auto"
    )
    add_dataset_options(command)
    add_stack_options(command)


def _choose_type(spec: DatasetSpec, paths: Sequence[str], mode: str = "sft") -> str:
    """Return the dataset type that the user has set, or else a guess from the first row.

    `paths` are the data paths of the command line. For named datasets and message trees, the type
    depends on the training mode `mode` (sft, rm or rl). Raises `ConfigError` if the first row fits
    no type.
    """
    from weft.data.rows import SINGLE_MESSAGE_HINT, guess_type, is_tree, is_tree_message
    from weft.data.sources import UnreadableRow, find_files, read_rows

    if spec.type is not None:
        return spec.type
    if any(source.named is not None for source in list_source_specs(spec)):
        return MODE_TYPES[mode]
    path = next(iter(paths), None) or spec.train_path or spec.path
    if path is None:
        sources = spec.sources or [{}]
        if all(isinstance(source, Mapping) and source.get("type") for source in sources):
            return str(sources[0]["type"])
        raise ConfigError("the dataset type is unknown: set --type")
    location, row = next(read_rows(find_files(path)[0]))
    if not isinstance(row, UnreadableRow) and is_tree(row):
        return MODE_TYPES[mode]
    if not isinstance(row, UnreadableRow) and is_tree_message(row):
        raise ConfigError(
            f"{location}: this row is {SINGLE_MESSAGE_HINT}, and so does weft data inspect "
            "--datasets oasst_export data_path=FILE"
        )
    type_name = None if isinstance(row, UnreadableRow) else guess_type(row)
    if type_name is None:
        if isinstance(row, UnreadableRow):
            reason = "it is not a JSON object"
        else:
            reason = f"it has {', '.join(row) or 'no keys'}"
        raise ConfigError(
            f"{location}: this row fits no dataset type ({reason}); set --type to one of "
            f"{', '.join(datasets.list_names())}"
        )
    return type_name


def _load_tokenizer(config: DataConfig) -> Tokenizer:
    from weft.data.tokenizer import Tokenizer

    if config.tokenizer.path is None:
        raise ConfigError(
            "--tokenizer is missing: name a model directory, a tokenizer file or a hub name"
        )
    return Tokenizer.load(_locate_tokenizer(config.tokenizer))


def _locate_tokenizer(spec: TokenizerSpec) -> TokenizerSpec:
    """Return the tokenizer options, with the name of a run or model replaced by its directory.

    Raises `CheckpointError` if there is no such model.
    """
    path = Path(str(spec.path)).expanduser()
    if path.is_file() or any((path / name).is_file() for name in TOKENIZERS):
        return spec
    return replace(spec, path=find_model(str(spec.path), ModelQuery("--tokenizer")).path)


def _build_console(arguments: argparse.Namespace) -> Console:
    from rich.console import Console

    terminal = {"always": True, "never": False, "auto": None}[arguments.color]
    return Console(
        force_terminal=terminal,
        no_color=arguments.color == "never",
        highlight=False,
        soft_wrap=True,
    )


def _build_spec(config: DataConfig, paths: Sequence[str]) -> DatasetSpec:
    """Return the dataset options, with `paths` as the only sources if there are any."""
    if not paths:
        return config.dataset
    if len(paths) == 1:
        return replace(config.dataset, train_path=paths[0])
    return replace(config.dataset, sources=[{"path": path} for path in paths])


# -- inspect


def print_rows(config: DataConfig, paths: list[str], arguments: argparse.Namespace) -> None:
    """Print the requested rows in file order, token by token.

    Only as many rows as needed are read, unless options such as a validation split need all rows.
    """
    from weft.cli.data_rows import format_row
    from weft.data.loader import load_data
    from weft.data.token_bytes import load_byte_tokenizer

    spec = _build_spec(config, paths)
    notes = []
    dataset_type = _choose_type(spec, paths, arguments.mode)
    # Without a tokenizer, show bytes.
    if config.tokenizer.path is None:
        tokenizer = load_byte_tokenizer(config.tokenizer)
        template = config.tokenizer.chat_template or DEFAULT_TEMPLATE
        notes.append(
            "no tokenizer was named, so every byte is a token and messages are written in the "
            f"form {template}; --tokenizer MODEL shows the rows as a run of that model reads them"
        )
    else:
        tokenizer = _load_tokenizer(config)
    # Read the skipped rows, too, so that each row has the same number in every call.
    num_rows = arguments.skip + arguments.n
    data = load_data(
        spec,
        dataset_type,
        tokenizer,
        seed=config.seed,
        max_samples=None if _needs_all_rows(spec) else max(num_rows, 1),
    )
    console = _build_console(arguments)
    for number in range(num_rows):
        batch = data.train.next_batch()
        if number >= arguments.skip:
            for sample in batch.unpack():
                console.print(format_row(sample, tokenizer, arguments.lines))
        if data.train.epoch_done:
            break
    for note in [*data.notes, *notes]:
        console.print(f"note: {note}", style="yellow", markup=False)


def _needs_all_rows(spec: DatasetSpec) -> bool:
    """Return whether all rows must be read to find the first training rows.

    This is necessary if rows are held out for validation, sampled, mixed between sources, or sorted
    by length.
    """
    sources = list_source_specs(spec)
    needs_all = spec.valid_split > 0 or spec.sort_by_length or spec.sample_mixing > 0
    return needs_all or any(
        source.valid_split or source.fraction or source.size or source.weight for source in sources
    )


# -- counts


def print_counts(config: DataConfig, paths: list[str], arguments: argparse.Namespace) -> int | None:
    """Print a table of the number of rows in each source.

    With a tokenizer, the rows are loaded as for a run, and the numbers of truncated and omitted
    rows are also printed. Returns the exit code, or None for success.
    """
    from weft.cli import named_data
    from weft.data.loader import load_data, resolve_sources

    spec = _build_spec(config, paths)
    if config.tokenizer.path is None:
        request = named_data.CountRequest(
            resolve_sources(spec), arguments.mode, spec, arguments.yes
        )
        return named_data.run(request, output=arguments.output, detect=arguments.detect_language)
    console = _build_console(arguments)
    data = load_data(
        spec, _choose_type(spec, paths, arguments.mode), _load_tokenizer(config), seed=config.seed
    )
    console.print(data.format_counts(), markup=False)
    for note in data.notes:
        console.print(f"note: {note}", style="yellow", markup=False)
    return None


# -- lengths


def print_lengths(config: DataConfig, paths: list[str], arguments: argparse.Namespace) -> None:
    """Print a table of the row lengths of each source, in tokens and without truncation.

    The columns are the longest row, the 99th percentile, and the number of rows with more tokens
    than `--limit`.
    """
    from weft.cli.named_data import format_length_table

    spec = replace(
        _build_spec(config, paths),
        max_seqlen="auto",
        valid_max_seqlen=None,
        max_prompt_len=None,
        overlong="truncate",
    )
    dataset_type = _choose_type(spec, paths, arguments.mode)
    notes = []
    tokenizer = _load_tokenizer(config)
    if tokenizer.eos_id is None:
        tokenizer = _load_changed_tokenizer(
            config,
            add_tokens=[*config.tokenizer.add_tokens, DEFAULT_END_TOKEN],
            eos_token=DEFAULT_END_TOKEN,
        )
        notes.append(
            f"the tokenizer names no end token (tokenizer.eos_token); an end counts as one token, "
            f"{DEFAULT_END_TOKEN}"
        )
    data, _, template_notes = _load_with_template(config, spec, dataset_type, tokenizer)
    print("\n".join(format_length_table(data, arguments.limit)))
    for note in [*notes, *template_notes]:
        print(f"note: {note}", file=sys.stderr)


def _load_with_template(
    config: DataConfig, spec: DatasetSpec, dataset_type: str, tokenizer: Tokenizer
) -> tuple[LoadedData, Tokenizer, list[str]]:
    """Load the data, with a default chat template if the data need one and the tokenizer has none.

    Returns the data, the tokenizer that was used, and notes about the default template.
    """
    from weft.data.loader import load_data

    try:
        return load_data(spec, dataset_type, tokenizer, seed=config.seed), tokenizer, []
    except NoTemplate:
        end_options = {} if tokenizer.eos_id is not None else {"eos_token": DEFAULT_END_TOKEN}
        tokenizer = _load_changed_tokenizer(
            config,
            add_tokens=[*config.tokenizer.add_tokens, TEMPLATE_TOKENS],
            chat_template=DEFAULT_TEMPLATE,
            **end_options,
        )
    note = (
        f"the tokenizer has no chat template; messages are read in the form {DEFAULT_TEMPLATE} "
        "(for another write, say, tokenizer.chat_template=oasst tokenizer.add_tokens=[template])"
    )
    return load_data(spec, dataset_type, tokenizer, seed=config.seed), tokenizer, [note]


def _load_changed_tokenizer(config: DataConfig, **options: Any) -> Tokenizer:
    """Update the tokenizer options in `config` with `options`, and load the tokenizer."""
    config.tokenizer = replace(config.tokenizer, **options)
    return _load_tokenizer(config)


# -- scan


def print_scan(config: DataConfig, paths: list[str], arguments: argparse.Namespace) -> None:
    """Print the number of rows in each file, and the suspicious rows.

    A row is suspicious if it cannot be read, if it repeats another row, or if one of its answers is
    empty or has an unwanted phrase, such as "as an AI language model". `--phrases` names a file of
    other phrases. With a tokenizer, invalid and overlong rows are also counted.
    """
    from weft.data.scan import PHRASES
    from weft.data.scan import scan as scan_rows
    from weft.data.sources import find_files, read_rows

    # Collect the files of the configuration: path -> title.
    phrases = _read_phrases(arguments.phrases) if arguments.phrases else PHRASES
    spec = config.dataset
    console = _build_console(arguments)
    titles = {}
    for source in list_source_specs(spec):
        if source.named is None:
            titles[source.path] = source.path
    if any(source.named for source in list_source_specs(spec)):
        from weft.cli.named_data import list_named_files

        titles |= list_named_files(spec, arguments.mode)
    for path in (spec.train_path or spec.path, spec.valid_path):
        if path:
            titles[path] = path
    # Scan the paths of the command line or, if there are none, the files of the configuration.
    for path, title in ({path: path for path in paths} or titles).items():
        located_rows = []
        for file in find_files(path):
            for located_row in read_rows(file):
                located_rows.append(located_row)
        rows = [(str(location), row) for location, row in located_rows]
        findings = scan_rows(rows, phrases)
        suffix = "" if title == path else f" of {path}"
        console.print(f"{title}: {findings.rows:,} rows{suffix}", style="bold", markup=False)
        phrases_found = sorted(findings.phrases.items(), key=lambda item: -len(item[1]))
        _print_finding(
            console, "phrases", sum(len(locations) for _, locations in phrases_found), []
        )
        for phrase, locations in phrases_found:
            _print_finding(
                console,
                f"  {phrase!r}",
                len(locations),
                [f"{location}: {context}" for location, context in locations],
            )
        _print_finding(
            console,
            "repeated rows",
            sum(len(locations_of_row) - 1 for locations_of_row in findings.duplicates),
            [" = ".join(locations_of_row[:4]) for locations_of_row in findings.duplicates],
        )
        _print_finding(console, "rows with an empty answer", len(findings.empty), findings.empty)
        _print_finding(console, "unreadable rows", len(findings.unreadable), findings.unreadable)
        if config.tokenizer.path is not None:
            _scan_tokens(console, replace(config, dataset=replace(spec, named=None)), path, rows)


def _scan_tokens(console: Console, config: DataConfig, path: str, rows: list[Any]) -> None:
    """Tokenize the rows of the file `path`, and print the numbers of overlong and invalid rows.

    `rows` are pairs (location, row).
    """
    from weft.data.datasets.base import TokenizedDataset, split_options
    from weft.data.tokenizing import EncodingJob, encode_rows

    spec = config.dataset
    type_name = _choose_type(spec, [path])
    dataset_type = datasets.get(type_name)
    if not isinstance(dataset_type, TokenizedDataset) and "form" not in vars(dataset_type):
        raise ConfigError(
            f"--type={type_name}: scan tokenizes weft's own types; leave out --tokenizer for others"
        )
    limits = {
        "max_seqlen": spec.limit,
        "max_prompt_len": spec.max_prompt_len,
        "overlong": "truncate",
        "truncate_side": spec.truncate_side,
    }
    form, lengths = split_options(dataset_type.form, {**limits, **spec.args})
    tokenizer = _load_tokenizer(config)
    form.check(tokenizer)
    _, report, problems = encode_rows(EncodingJob(form, lengths, tokenizer), rows)
    limit_texts = []
    for name in ("max_seqlen", "max_prompt_len"):
        if limits[name] is not None:
            limit_texts.append(f"dataset.{name}={limits[name]}")
    limits_text = ", ".join(limit_texts) or "no dataset.max_seqlen is set"
    _print_finding(console, f"samples that are too long ({limits_text})", report.too_long, [])
    bad_rows = [f"{rows[index][0]}: {problem}" for index, problem, _ in problems]
    _print_finding(console, f"rows that cannot be used as {type_name}", len(bad_rows), bad_rows)


def _read_phrases(file: Path) -> list[str]:
    """Return the phrases in a file with one phrase per line, in lower case."""
    if not file.is_file():
        raise DataError(f"--phrases={file}: there is no such file")
    phrases = []
    for line in file.read_text().splitlines():
        if line.strip():
            phrases.append(line.strip().lower())
    if not phrases:
        raise DataError(f"--phrases={file}: the file contains no phrases; write one per line")
    return phrases


def _print_finding(console: Console, label: str, count: int, examples: Sequence[str]) -> None:
    """Print a line with `count` and `label`, and up to `MAX_SHOWN_EXAMPLES` of the examples."""
    console.print(f"{count:>8,}  {label}", style=None if count else "dim", markup=False)
    for example in examples[:MAX_SHOWN_EXAMPLES]:
        console.print(f"            {example}", style="yellow", markup=False)
    if len(examples) > MAX_SHOWN_EXAMPLES:
        console.print(
            f"            ... and {len(examples) - MAX_SHOWN_EXAMPLES:,} more",
            style="dim",
            markup=False,
        )
