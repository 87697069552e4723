"""`weft sample`: sample answers to a file of prompts, to compare, score, or train on.

report   answers under named sampling settings, as JSON and as one HTML page that compares models
score    the mean reward that a reward model gives each model and setting in these reports
best     the best of n answers by reward, as SFT rows and preference pairs (rejection sampling)
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.cli import model_arguments
from weft.cli.parsing import CommandParser, parse_positive, split_names
from weft.engine.spec import GenerationSpec
from weft.errors import ConfigError
from weft.options import validate

if TYPE_CHECKING:
    from weft.evaluation.answers import EvaluationPrompt, SampledAnswer, SamplingSettings
    from weft.evaluation.models import OpenedModel

EPILOG = """examples:
  weft sample report runs/E/T OTHER_MODEL --prompts prompts.jsonl --settings greedy,k50 --samples 2 --out answers
  weft sample score answers/*.json --reward RM_DIR
  weft sample best runs/E/T --reward RM_DIR --prompts prompts.jsonl --samples 8 --out best
  weft quickstart sft ... dataset.path=best/selected.jsonl dataset.type=chat"""


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="weft sample", description=__doc__, epilog=EPILOG)
    commands = parser.add_subparsers(dest="command", metavar="{report,score,best}", required=True)
    subcommands: tuple[tuple[str, Callable[[argparse.Namespace], None], str], ...] = (
        (
            "report",
            write_report,
            "sample answers under named settings, as JSON and one HTML page that compares models",
        ),
        ("score", score_reports, "compute the mean reward of each model and setting of reports"),
        (
            "best",
            write_best_answers,
            "write the best of n answers by a reward model, as SFT rows and preference pairs",
        ),
    )
    for name, run, help in subcommands:
        command = commands.add_parser(name, help=help, description=help, epilog=EPILOG)
        command.set_defaults(run=run)
        model_arguments.add_model_options(command)
    report_parser, score_parser, best_parser = (commands.choices[name] for name, *_ in subcommands)
    report_parser.add_argument(
        "models", nargs="+", metavar="MODEL|REPORT.json", help="models or runs, or existing reports"
    )
    score_parser.add_argument(
        "reports",
        nargs="+",
        type=Path,
        metavar="REPORT.json",
        help="reports; scores are written into them",
    )
    score_parser.add_argument(
        "--reward", required=True, metavar="MODEL", help="reward model or run of one"
    )
    best_parser.add_argument("model", metavar="MODEL", help="policy: model or run")
    best_parser.add_argument(
        "--reward", required=True, metavar="MODEL", help="reward model or run of one"
    )
    best_parser.add_argument(
        "--least",
        type=float,
        help="lowest score of an answer to train on (default: the best of each prompt)",
    )
    best_parser.add_argument(
        "--keep-cut",
        action="store_true",
        help="also consider answers that were cut at the maximum length",
    )
    for command, samples in ((report_parser, 1), (best_parser, 4)):
        _add_sampling(command, samples)
        model_arguments.add_template_option(command)
    report_parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="prompts: JSONL rows or texts, JSON, Parquet, or .txt with one per line",
    )
    best_parser.add_argument(
        "--prompts", required=True, metavar="FILE", help="prompts, as for report"
    )
    return parser


def _add_sampling(command: argparse.ArgumentParser, samples: int) -> None:
    from weft.evaluation.answers import SHIPPED

    is_best = command.prog.endswith("best")
    command.add_argument(
        "--settings",
        default="warm" if is_best else "greedy,k50",
        metavar="NAME|FILE,...",
        help=f"sampling settings: {', '.join(SHIPPED)}, or those of a YAML or JSON file (default %(default)s)",
    )
    command.add_argument(
        "--samples",
        type=parse_positive,
        default=samples,
        metavar="N",
        help="answers per prompt (default %(default)s)",
    )
    command.add_argument(
        "-n", type=parse_positive, metavar="N", help="use only the first N prompts"
    )
    command.add_argument(
        "--max-new-tokens",
        type=parse_positive,
        default=256,
        help="maximum number of tokens per answer (default 256)",
    )
    command.add_argument(
        "--system", metavar="TEXT", help="system prompt for conversations without one"
    )
    command.add_argument(
        "--plain",
        action="store_true",
        help="continue the texts without the chat template",
    )
    command.add_argument("--seed", type=int, default=1, help="seed of sampling (default 1)")
    command.add_argument(
        "--out",
        type=Path,
        default=Path("best" if is_best else "answers"),
        metavar="DIR",
        help="output folder (default %(default)s)",
    )


def main(argv: Sequence[str]) -> int:
    """Run `weft sample ...` and return the exit code.

    Raises `UserError` for unusable input.
    """
    arguments = build_parser().parse_args(list(argv))
    out: Path | None = vars(arguments).get("out")
    if out is not None and out.exists() and not out.is_dir():  # checked before any model is loaded
        raise ConfigError(f"--out {out}: is not a folder; name another")
    run: Callable[[argparse.Namespace], None] = arguments.run
    run(arguments)
    return 0


def _read_settings(arguments: argparse.Namespace) -> list[SamplingSettings]:
    from weft.evaluation.answers import choose

    spec = GenerationSpec(max_new_tokens=arguments.max_new_tokens, seed=arguments.seed)
    validate(spec)
    settings, notes = choose(split_names([arguments.settings]), spec)
    for note in notes:
        model_arguments.print_note(note)
    return settings


def _sample(
    arguments: argparse.Namespace,
    opened: OpenedModel,
    prompts: Sequence[EvaluationPrompt],
    settings: Sequence[SamplingSettings],
    title: str,
) -> list[list[list[SampledAnswer]]]:
    """Return sampled answers by prompt, settings and sample, and show the progress bar `title`."""
    from weft.evaluation.answers import sample_answers

    with model_arguments.show_progress(title) as progress:
        return sample_answers(
            opened,
            prompts,
            settings,
            samples=arguments.samples,
            system=arguments.system,
            plain=arguments.plain,
            progress=progress,
        )


# -- report


def write_report(arguments: argparse.Namespace) -> None:
    """Answer the prompts with each model, and write `OUT/MODEL.json` and `OUT/report.html`.

    Existing reports among the models are added to the page.
    """
    from weft.evaluation import sampling_report
    from weft.evaluation.answers import read_prompts

    # Read existing reports, and check the models before any is loaded.
    report_files = [name for name in arguments.models if name.endswith(".json")]
    model_names = [name for name in arguments.models if name not in report_files]
    reports = {name: sampling_report.read(Path(name)) for name in report_files}
    if model_names and arguments.prompts is None:
        raise ConfigError(
            "--prompts is missing: name a file of prompts (existing reports need none)"
        )
    settings = _read_settings(arguments)
    model_arguments.check_policies(model_names)
    prompts = read_prompts(arguments.prompts, arguments.n) if model_names else []
    recorded = {}  # arguments to record in the reports
    for name, value in vars(arguments).items():
        if name != "run":
            recorded[name] = str(value) if isinstance(value, Path) else value
    # Sample with each model, and write its report.
    for name in model_names:
        opened = model_arguments.load_policy(name, arguments)
        label = sampling_report.shorten_name(opened.name)
        answers = _sample(arguments, opened, prompts, settings, label)
        built = sampling_report.build(opened.name, recorded, prompts, settings, answers)
        file = _find_free_path(arguments.out, label, reports)
        sampling_report.write(file, json.dumps(built, ensure_ascii=False, indent=1) + "\n")
        reports[str(file)] = built
        print(file)
    # Build the page of all reports.
    page = arguments.out / "report.html"
    sampling_report.write(
        page,
        sampling_report.render_page(
            [reports[name] for name in sorted(reports, key=list(reports).index)]
        ),
    )
    print(page)


def _find_free_path(folder: Path, name: str, taken: Sequence[str] | dict[str, Any]) -> Path:
    """Return a path in `folder` for the report of the model `name` that is not in `taken`.

    The file is named after the model; a number is added if the path of another report is the same.
    """
    base_name = re.sub(r"[^\w.-]+", "-", name).strip("-") or "model"
    numbered = [base_name, *(f"{base_name}-{number}" for number in range(2, 1000))]
    paths = (folder / f"{each}.json" for each in numbered)
    return next(path for path in paths if str(path) not in taken)


# -- score


def score_reports(arguments: argparse.Namespace) -> None:
    """Score every answer in the reports with a reward model, and write the scores into the reports.

    The mean score of each model and each sampling setting is printed.
    """
    from weft.evaluation import answers, sampling_report

    reports = [(path, sampling_report.read(path)) for path in arguments.reports]
    opened = model_arguments.load_scorer(arguments.reward, arguments)
    rows = list[tuple[str, str, float, float, int]]()
    for path, report in reports:
        prompts = sampling_report.extract_prompts(report)
        outputs = []
        for row in report["prompts"]:
            outputs.append([text for result in row["results"] for text in result["outputs"]])
        sampling_report.add_scores(report, answers.score_replies(opened, prompts, outputs))
        report["reward_model"] = opened.name
        sampling_report.write(path, json.dumps(report, ensure_ascii=False, indent=1) + "\n")
        for name, statistics in sampling_report.compute_means(report).items():
            rows.append((str(report["model_name"]), name, *statistics))
    rows.sort(key=lambda row: -row[2])
    table_rows = []
    for model, setting, mean, error, count in rows:
        table_rows.append(
            (
                sampling_report.shorten_name(model),
                setting,
                f"{mean:.4f} \u00b1 {error:.4f}",
                str(count),
            )
        )
    _print_table(("model", "setting", "mean reward", "answers"), table_rows)
    report_paths = " ".join(str(path) for path, _ in reports)
    print(f"the scores are in the reports; weft sample report {report_paths} rebuilds the page")


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for index, name in enumerate(head):
        table.add_column(name, justify="left" if index < 2 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)


# -- best


def write_best_answers(arguments: argparse.Namespace) -> None:
    """Sample several answers per prompt, score them, and write the best and the worst.

    A reward model gives the scores. Three files are written: the best answers as rows for SFT, the
    worst answers in the same format, and preference pairs of the best and the worst answer to each
    prompt.
    """
    from weft.evaluation import sampling_report
    from weft.evaluation.answers import read_prompts, score_replies

    settings = _read_settings(arguments)
    prompts = read_prompts(arguments.prompts, arguments.n)
    reward = model_arguments.load_scorer(arguments.reward, arguments)
    opened = model_arguments.load_policy(arguments.model, arguments)
    answers: list[list[SampledAnswer]] = []
    for groups in _sample(arguments, opened, prompts, settings, "answers"):
        answers.append([answer for group in groups for answer in group])
    scores = score_replies(
        reward, prompts, [[answer.text for answer in group] for group in answers]
    )
    choices = sampling_report.choose(prompts, answers, scores, finished_only=not arguments.keep_cut)
    for name, count in sampling_report.save(
        choices, arguments.out, min_score=arguments.least
    ).items():
        print(f"{arguments.out / name}  {count} rows")
    if choices:
        best_mean = sum(choice.scores[0] for choice in choices) / len(choices)
        mean = sum(sum(prompt_scores) / len(prompt_scores) for prompt_scores in scores) / len(
            scores
        )
        print(f"mean reward {mean:.4f}, of the best of each prompt {best_mean:.4f}")
