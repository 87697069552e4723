"""Data of the catalogue's tasks: the paths of data sets, and readers of their published files.

A data set is a file or folder of the user, in the form in which it was published, or with rows of
JSON, JSON lines (also .gz) or Parquet. Each item is checked; an error names the file and the line,
or the row of a Parquet file.
"""

from __future__ import annotations

import ast
import builtins
import csv
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.data.rows import BadRow, read_text, read_texts
from weft.data.sources import SUFFIXES
from weft.errors import ConfigError, DataError
from weft.evaluation.task_rows import (
    Item,
    LocatedRows,
    Row,
    convert_rows,
    list_files,
    list_row_files,
    open_csv,
    read_field,
    read_file,
    read_files,
    require,
)
from weft.reading import explain_read_errors, refuse_url

FOLDER = Path("~/.cache/weft/eval")  # default; has a folder or file for each data set
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
DOCUMENT_END = "<|endoftext|>"  # separates the documents of a text file
MBPP_ROWS = (974, 427)  # number of rows of the complete MBPP, and of its sanitized version
MBPP_TEST = range(11, 511)  # tasks of the test split
MAX_SHOWN_TESTS = 3  # maximum assertions in a prompt of MBPP+


@dataclass(frozen=True)
class TaskRows:
    """Items of a data set.

    Attributes:
        items: Items to evaluate.
        shots: Examples for prompts, keyed by the items' `subset`.
    """

    items: list[Item]
    shots: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DataSet:
    """Data set of the catalogue.

    Attributes:
        form: Files, or fields of a row, for messages.
        published: Place where the data set is published, for messages.
        read: Function that reads a file or folder.
    """

    form: str
    published: str
    read: Callable[[Path], TaskRows]


def find_data(name: str, paths: Mapping[str, Path], folder: Path) -> Path | None:
    """Return the path of a data set: that in `paths`, or else NAME or a file NAME.* in `folder`.

    Returns None if there is neither. Raises `ConfigError` if the path in `paths` does not exist.
    """
    if name in paths:
        path = paths[name]
        refuse_url(path, f"--data {name}={path}", ConfigError)
        if not path.expanduser().exists():
            raise ConfigError(f"--data {name}={path}: there is no such file or folder")
        return path.expanduser()
    folder_path = folder.expanduser()
    choices = [
        folder_path / name,
        *(folder_path / f"{name}{suffix}" for suffix in (*SUFFIXES, ".csv", ".txt")),
    ]
    return next((choice for choice in choices if choice.exists()), None)


def read_data(name: str, path: Path) -> TaskRows:
    """Return the items of a data set.

    Raises `DataError` if files are missing, have no items, or have rows that cannot be used.
    """
    rows = DATA_SETS[name].read(path)
    if not rows.items:
        raise DataError(f"{path}: no items of {name} in it; {DATA_SETS[name].form}")
    return rows


def _make_reader(*patterns: str, convert: Callable[[Row], Item | None]) -> Callable[..., TaskRows]:
    """Return a reader for data sets in which each row is an item.

    `patterns` are those of `list_row_files`. `convert` returns the item of a row, or None for a row
    to leave out.
    """

    def read(path: Path) -> TaskRows:
        return TaskRows(convert_rows(read_files(list_row_files(path, *patterns)), convert))

    return read


# -- forms of rows


def _convert_gsm8k(row: Row) -> Item:
    from weft.host.verifiers.gsm8k import find_final_number

    answer = row[require(row, "answer")]
    if find_final_number(str(answer)) is None:
        raise BadRow("'answer' has no number")
    question = read_field(row, "question")
    return {"question": question, "target": str(answer)}


def _convert_math(row: Row) -> Item:
    from weft.host.verifiers._answers import extract_boxed

    target = row.get("answer")
    if target is None:
        target = extract_boxed(read_field(row, "solution"))
        if not target:
            raise BadRow(r"'solution' has no \boxed{answer}, and there is no field 'answer'")
    subset = row.get("subject") or row.get("type") or ""
    return {"problem": read_field(row, "problem"), "target": str(target), "subset": str(subset)}


def _convert_ifeval(row: Row) -> Item:
    """Convert a row of IFEval or IFBench; unknown instructions and arguments are refused."""
    from weft.host.verifiers.ifeval import is_followed

    ids = read_texts(row, require(row, "instruction_id_list"))
    arguments = row[require(row, "kwargs")]
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise BadRow(f"'kwargs' is a text that is not JSON: {error}") from error
    if not isinstance(arguments, list) or len(arguments) != len(ids):
        raise BadRow(f"'kwargs' must have one mapping for each of the {len(ids)} instructions")
    for id, instruction_arguments in zip(ids, arguments, strict=True):
        if not isinstance(instruction_arguments, Mapping | None):
            raise BadRow(f"'kwargs' must have mappings, not {instruction_arguments!r}")
        # Raises DataError for an unknown id or arguments.
        is_followed("Test.", id, instruction_arguments or {})
    prompt = read_field(row, "prompt")
    return {"prompt": prompt, "instruction_id_list": ids, "kwargs": json.dumps(arguments)}


def _convert_humaneval(row: Row) -> Item:
    return {
        "task_id": str(row.get("task_id", "")),
        "prompt": read_field(row, "prompt"),
        "program_prompt": read_field(row, "prompt"),
        "tests": read_field(row, "test"),
        "entry_point": read_field(row, "entry_point"),
        "target": str(row.get("canonical_solution") or ""),
    }


def _convert_mbpp(row: Row) -> Item:
    """Convert a row of MBPP or MBPP+.

    In MBPP, the assertions in `test_list` are shown and run. In MBPP+, the program in `test` or
    `assertion` is run, and some of its assertions are shown.
    """
    key = require(row, "test", "assertion", "test_list")
    text = read_field(row, "text", "prompt")
    program = "\n".join(read_texts(row, key)) if key == "test_list" else read_text(row, key)
    assertions = _list_assertions(program, key)
    if row.get("test_list") is not None:
        examples = read_texts(row, "test_list")
    else:
        text, prompt_assertions = _split_docstring(text)
        examples = (assertions or prompt_assertions)[:MAX_SHOWN_TESTS]
    # Join the imports and the setup code with the tests.
    imports = read_texts(row, "test_imports", at_least=0) if row.get("test_imports") else []
    setup = [read_text(row, "test_setup_code")] if row.get("test_setup_code") else []
    tests = "\n".join([*imports, *setup, program])
    target = str(row.get("code") or row.get("canonical_solution") or "")
    return {
        "task_id": str(row.get("task_id", "")),
        "text": text,
        "shown_tests": "\n".join(examples),
        "tests": tests,
        "entry_point": str(row.get("entry_point") or _find_tested_function(program, target)),
        "target": target,
    }


def _list_assertions(program: str, key: str) -> list[str]:
    """Return the source of each assertion in a program. Raises `BadRow` if it is no Python code."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            statements = ast.parse(program).body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise BadRow(f"{key!r} is no Python code: {error}") from error
    assertions = []
    for statement in statements:
        if isinstance(statement, ast.Assert):
            assertions.append(ast.get_source_segment(program, statement) or "")
    return assertions


def _split_docstring(text: str) -> tuple[str, list[str]]:
    """Return (description, assertions) of a prompt of EvalPlus, which is a docstring."""
    lines = text.strip().removeprefix('"""').removesuffix('"""').strip().splitlines()
    assertions = [line for line in lines if line.startswith("assert ")]
    return "\n".join(line for line in lines if line not in assertions), assertions


def _find_tested_function(tests: str, solution: str) -> str:
    """Return the name of the function that a program of tests calls, or "" if it calls none.

    Functions of the reference solution are preferred. Next are functions that are neither built in
    nor defined by the tests, then all others (MBPP has a task for a function `sum`).
    """
    names = []
    for node in ast.walk(ast.parse(tests)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names.append(node.func.id)
    in_solution = [name for name in names if re.search(rf"^def {name}\b", solution, re.MULTILINE)]
    in_tests = re.findall(r"^(?:def|class|from .* import) (\w+)", tests, re.MULTILINE)
    others = [name for name in names if name not in in_tests and not hasattr(builtins, name)]
    return next(iter([*in_solution, *others, *names]), "")


def _read_mbpp(path: Path) -> TaskRows:
    """Read MBPP or MBPP+; in a copy of the hub's data set, the folder `full` is read.

    Of MBPP's complete file, and of its complete sanitized file, only the test split is returned.
    """
    if (path / "full").is_dir():
        path = path / "full"
    files = list_row_files(path, "mbpp.jsonl", "sanitized-mbpp.json", "MbppPlus*.jsonl*")
    items = convert_rows(read_files(files), _convert_mbpp)
    if len(items) in MBPP_ROWS:
        numbers = {str(number) for number in MBPP_TEST}
        items = [item for item in items if item["task_id"] in numbers]
    return TaskRows(items)


def _convert_preference(row: Row) -> Item:
    """Convert a row with two replies; the first of the item's `choices` is the preferred one."""
    if "label" in row and "output_1" in row:  # LLMBar's form
        pair = [read_field(row, "output_1"), read_field(row, "output_2")]
        if row["label"] not in (1, 2):
            raise BadRow(f"'label' must be 1 or 2, not {row['label']!r}")
        chosen, rejected = pair if row["label"] == 1 else pair[::-1]
        return {"prompt": read_field(row, "input"), "choices": [chosen, rejected], "subset": ""}
    choices = [read_field(row, "chosen"), read_field(row, "rejected")]
    if choices[0] == choices[1]:
        raise BadRow("'chosen' and 'rejected' are equal")
    subset = str(row.get("subset") or "")
    return {"prompt": read_field(row, "prompt"), "choices": choices, "subset": subset}


def _read_texts(path: Path) -> TaskRows:
    """Read rows with `text`, or text files, whose documents are separated by <|endoftext|>."""
    files = list_files(path, "**/*.txt", *(f"**/*{suffix}" for suffix in SUFFIXES))
    items = []
    for file in files:
        if file.suffix == ".txt":
            documents = read_file(file).split(DOCUMENT_END)
            items += [{"text": document.strip()} for document in documents if document.strip()]
        else:
            items += convert_rows(read_files([file]), lambda row: {"text": read_field(row, "text")})
    return TaskRows(items)


def _convert_truthfulqa(row: Row) -> Item:
    """Convert a row of TruthfulQA: the choices of MC1 come first, followed by those of MC2."""
    all_choices: list[str] = []
    all_labels: list[int] = []
    counts = []
    for key in ("mc1_targets", "mc2_targets"):
        targets = row[require(row, key)]
        if isinstance(targets, Mapping) and "choices" in targets:  # the hub's form
            choices, labels = list(targets["choices"]), list(targets["labels"])
        elif isinstance(targets, Mapping):
            choices, labels = list(targets), list(targets.values())
        else:
            raise BadRow(f"{key!r} must map choices to 0 or 1")
        if len(choices) != len(labels) or not all(choices) or 1 not in labels or 0 not in labels:
            raise BadRow(f"{key!r} needs at least one true and one false choice, none empty")
        all_choices += choices
        all_labels += labels
        counts.append(len(choices))
    question = read_field(row, "question")
    return {
        "question": question,
        "choices": all_choices,
        "labels": all_labels,
        "num_single": counts[0],
    }


def _convert_xstest(row: Row) -> Item:
    if row.get("label"):
        label = read_field(row, "label").strip().lower()
        if label not in ("safe", "unsafe"):
            raise BadRow(f"'label' must be safe or unsafe, not {row['label']!r}")
    else:
        # The types of unsafe prompts are those of safe ones with this prefix.
        label = "unsafe" if read_field(row, "type", "label").startswith("contrast_") else "safe"
    return {"prompt": read_field(row, "prompt"), "label": label}


def _read_xstest(path: Path) -> TaskRows:
    files = list_files(
        path, "*xstest*prompts*.csv", "*.csv", *(f"*{suffix}" for suffix in SUFFIXES)
    )
    return TaskRows(convert_rows(read_files(files), _convert_xstest))


def _read_toxigen(path: Path) -> TaskRows:
    """Read ToxiGen's prompt files, one prompt per line, or rows with `prompt`."""
    files = list_files(path, "*.txt", *(f"**/*{suffix}" for suffix in SUFFIXES))
    items = []
    for file in files:
        if file.suffix != ".txt":
            items += convert_rows(read_files([file]), _convert_toxigen)
            continue
        for line in read_file(file).splitlines():
            if line.strip():
                prompt = line.strip().replace("\\\\", "\\").replace("\\n", "\n")
                items.append({"prompt": prompt, "subset": file.stem})
    return TaskRows(items)


def _convert_toxigen(row: Row) -> Item:
    return {"prompt": read_field(row, "prompt", "text"), "subset": str(row.get("group") or "")}


def _convert_alpaca(row: Row) -> Item:
    return {
        "prompt": read_field(row, "instruction", "prompt"),
        "reference": read_field(row, "output"),
    }


# -- MMLU's form


def _convert_choices(row: Row) -> Item:
    """Convert a row of MMLU; the item's `target` is the index of the right choice."""
    choices = read_texts(row, require(row, "choices"), at_least=2)
    if len(choices) > len(LETTERS):
        raise BadRow(f"'choices' has {len(choices)} entries; at most {len(LETTERS)} have letters")
    answer = row[require(row, "answer")]
    letters = list(LETTERS[: len(choices)])
    if isinstance(answer, str) and answer.strip().upper() in letters:
        answer = letters.index(answer.strip().upper())
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise BadRow(
            f"'answer' must be one of {', '.join(letters)} or its number from 0, not "
            f"{row['answer']!r}"
        )
    return {
        "subset": str(row.get("subject") or ""),
        "question": read_field(row, "question"),
        "choices": choices,
        "letters": letters,
        "target": answer,
    }


def _read_choice_csv(file: Path) -> LocatedRows:
    """Yield (FILE:LINE, row) of one of MMLU's CSV files: question, choices, letter; no header."""
    subject = file.stem.removesuffix("_test").removesuffix("_dev").replace("_", " ")
    with explain_read_errors(str(file), DataError), open_csv(file) as stream:
        reader = csv.reader(stream)
        for cells in reader:
            row: dict[str, Any] = {"subject": subject, "question": cells[0] if cells else ""}
            if len(cells) >= 4:
                row |= {"choices": cells[1:-1], "answer": cells[-1]}
            yield f"{file}:{reader.line_num}", row


def _read_mmlu(path: Path) -> TaskRows:
    """Read MMLU's folders `test` and `dev`, or rows; files with `dev` in their name are examples.

    In a copy of the hub's data set, which has each subject twice, the folder `all` is read.
    """
    if (path / "test").is_dir() and any((path / "test").glob("*.csv")):
        shots = convert_rows(_read_choice_folder(path / "dev"), _convert_choices)
        items = convert_rows(_read_choice_folder(path / "test"), _convert_choices)
        return TaskRows(items, _group_by_subset(shots))
    if (path / "all").is_dir():
        path = path / "all"
    dev_files = [] if path.is_file() else sorted(path.glob("**/*dev*"))
    example_files = [file for file in dev_files if file.name.endswith(SUFFIXES)]
    files = [file for file in list_row_files(path) if file not in example_files]
    if not files:
        raise DataError(f"{path}: only examples (dev) in it; add a file with the questions")
    items = convert_rows(read_files(files), _convert_choices)
    shots = convert_rows(read_files(example_files), _convert_choices)
    return TaskRows(items, _group_by_subset(shots))


def _read_choice_folder(folder: Path) -> LocatedRows:
    """Yield (FILE:LINE, row) of all CSV files in one of MMLU's folders."""
    for file in sorted(folder.glob("*.csv")):
        yield from _read_choice_csv(file)


def _group_by_subset(items: Sequence[Item]) -> dict[str, list[Item]]:
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(item["subset"], []).append(item)
    return groups


# -- BBH and TyDiQA


def _read_bbh(path: Path) -> TaskRows:
    """Read the folder of BIG-Bench Hard: `bbh/TASK.json` and `cot-prompts/TASK.txt`."""
    items: list[Item] = []
    shots: dict[str, str] = {}
    for file in list_files(path, "bbh/*.json", "*.json"):
        content = _read_json(file)
        subset = file.stem
        for number, row in enumerate(content.get("examples") or [], 1):
            place = f"{file}: example {number}"
            items += convert_rows(
                iter([(place, row)]),
                lambda row: {
                    "subset": subset,  # noqa: B023
                    "input": read_field(row, "input"),
                    "target": read_field(row, "target"),
                },
            )
        prompt = file.parent.parent / "cot-prompts" / f"{subset}.txt"
        if not prompt.is_file():
            raise DataError(
                f"{prompt}: no such file, and the task needs its examples; copy the folder "
                f"cot-prompts of BIG-Bench Hard, next to its folder bbh"
            )
        # The first two lines are a warning to people who collect training data.
        shots[subset] = "\n".join(read_file(prompt).split("\n")[2:]).strip()
    return TaskRows(items, shots)


def _read_tydiqa(path: Path) -> TaskRows:
    """Read tydiqa-goldp: items from the dev file, and examples from the training file."""
    items = _read_tydiqa_file(list_files(path, "*goldp*dev*.json", "*dev*.json")[0])
    folder = path if path.is_dir() else path.parent
    training_files = sorted(folder.glob("*goldp*train*.json"))
    if not training_files:
        raise DataError(
            f"{folder}: no file *goldp*train*.json in it, from which examples are taken; put it "
            f"there"
        )
    return TaskRows(items, _group_by_subset(_read_tydiqa_file(training_files[0])))


def _read_tydiqa_file(file: Path) -> list[Item]:
    def list_questions() -> LocatedRows:
        for article in _read_json(file).get("data") or []:
            for paragraph in article.get("paragraphs") or []:
                for question in paragraph.get("qas") or []:
                    place = f"{file}: question {question.get('id')}"
                    yield place, {**question, "context": paragraph.get("context")}

    return convert_rows(list_questions(), _convert_tydiqa)


def _convert_tydiqa(row: Row) -> Item:
    answers = [read_text(answer, "text") for answer in row[require(row, "answers")]]
    if not answers:
        raise BadRow("'answers' is empty")
    return {
        "subset": read_field(row, "id").split("-")[0],
        "context": read_field(row, "context"),
        "question": read_field(row, "question"),
        "answers": answers,
    }


def _read_json(file: Path) -> dict[str, Any]:
    from weft.reading import read_object

    return read_object(file, str(file), DataError)


DATA_SETS = {
    "gsm8k": DataSet(
        "rows {question, answer}; the answer ends in '#### NUMBER'",
        "github.com/openai/grade-school-math (test.jsonl)",
        _make_reader("test.jsonl", convert=_convert_gsm8k),
    ),
    "math": DataSet(
        r"rows {problem, solution with \boxed{}, or answer}",
        "github.com/hendrycks/math (test/SUBJECT/N.json) or hub HuggingFaceH4/MATH-500",
        _make_reader("test/*/*.json", "test.jsonl", convert=_convert_math),
    ),
    "ifeval": DataSet(
        "rows {prompt, instruction_id_list, kwargs}",
        "github.com/google-research/google-research, instruction_following_eval/data",
        _make_reader("input_data.jsonl", convert=_convert_ifeval),
    ),
    "ifbench": DataSet(
        "rows {prompt, instruction_id_list, kwargs}",
        "github.com/allenai/IFBench (data/IFBench_test.jsonl)",
        _make_reader("IFBench_test.jsonl", "data/IFBench_test.jsonl", convert=_convert_ifeval),
    ),
    "humaneval": DataSet(
        "rows {prompt, test, entry_point}",
        "github.com/openai/human-eval (HumanEval.jsonl.gz)",
        _make_reader("HumanEval.jsonl*", convert=_convert_humaneval),
    ),
    "mbpp": DataSet(
        "rows {text or prompt, test_list}, or MBPP+'s {prompt, test or assertion}",
        "github.com/google-research/google-research, mbpp (mbpp.jsonl, sanitized-mbpp.json); MBPP+: "
        "hub evalplus/mbppplus, or EvalPlus' MbppPlus.jsonl",
        _read_mbpp,
    ),
    "preference": DataSet(
        "rows {prompt, chosen, rejected[, subset]}, or LLMBar's {input, output_1, output_2, label}",
        "hub allenai/reward-bench (filtered), github.com/princeton-nlp/LLMBar",
        _make_reader(convert=_convert_preference),
    ),
    "heldout": DataSet("rows {text}, or .txt files", "your own text", _read_texts),
    "truthfulqa": DataSet(
        "rows {question, mc1_targets, mc2_targets}",
        "github.com/sylinrl/TruthfulQA (data/mc_task.json)",
        _make_reader("mc_task.json", "data/mc_task.json", convert=_convert_truthfulqa),
    ),
    "xstest": DataSet(
        "rows {prompt, label: safe or unsafe}, or {prompt, type}",
        "github.com/paul-rottger/exaggerated-safety (xstest_prompts.csv)",
        _read_xstest,
    ),
    "mmlu": DataSet(
        "rows {question, choices, answer[, subject]}, or folders test and dev of CSV files",
        "github.com/hendrycks/test (data.tar)",
        _read_mmlu,
    ),
    "bbh": DataSet(
        "folders bbh (TASK.json) and cot-prompts (TASK.txt)",
        "github.com/suzgunmirac/BIG-Bench-Hard",
        _read_bbh,
    ),
    "tydiqa": DataSet(
        "tydiqa-goldp-v1.1-dev.json and tydiqa-goldp-v1.1-train.json",
        "github.com/google-research-datasets/tydiqa",
        _read_tydiqa,
    ),
    "toxigen": DataSet(
        "text files with a prompt per line, or rows {prompt[, group]}",
        "github.com/microsoft/TOXIGEN (prompts)",
        _read_toxigen,
    ),
    "alpaca_eval": DataSet(
        "rows {instruction, output}; output is the reference's answer",
        "hub tatsu-lab/alpaca_eval (alpaca_eval.json)",
        _make_reader("alpaca_eval.json", convert=_convert_alpaca),
    ),
}
