"""Data of the catalogue's tasks: where it is, and how its published files become items.

Data sets are read from a file or folder of the user, in the form in which they are published, or
as rows of JSON, JSON lines (.gz too) and Parquet. Each item is checked; an error names the file
and the line, or the row in Parquet files.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.data.rows import BadRow, find_first_key, read_text, read_texts
from weft.data.sources import SUFFIXES, UnreadableRow, read_rows
from weft.errors import ConfigError, DataError
from weft.reading import explain_read_errors, refuse_url

Row = Mapping[str, Any]
Item = dict[str, Any]
Located = Iterator[tuple[str, Row | UnreadableRow]]

FOLDER = Path("~/.cache/weft/eval")  # default folder with a folder or file for each data set
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
STORY_END = "<|endoftext|>"  # separates the documents of a text file
MBPP_ROWS = 974  # rows of the complete MBPP, of which 11 to 510 are the test split
MBPP_TEST = range(11, 511)


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
        form: Fields of a row, for messages.
        published: Where the data set is published.
        read: Function that reads a file or folder.
    """

    form: str
    published: str
    read: Callable[[Path], TaskRows]


def find_data(name: str, given: Mapping[str, Path], folder: Path) -> Path | None:
    """Return the path of a data set: the one that is given, or NAME or a file NAME.* in `folder`.

    Returns None if there is none. Raises `ConfigError` if the given path does not exist.
    """
    if name in given:
        path = given[name]
        refuse_url(path, f"--data {name}={path}", ConfigError)
        if not path.expanduser().exists():
            raise ConfigError(f"--data {name}={path}: there is no such file or folder")
        return path.expanduser()
    place = folder.expanduser()
    choices = [place / name, *(place / f"{name}{suffix}" for suffix in (*SUFFIXES, ".csv", ".txt"))]
    return next((each for each in choices if each.exists()), None)


def read_data(name: str, path: Path) -> TaskRows:
    """Return the items of a data set.

    Raises `DataError` if files are missing, have no items, or have rows that cannot be used.
    """
    rows = DATA_SETS[name].read(path)
    if not rows.items:
        raise DataError(f"{path}: no items of {name} in it; {DATA_SETS[name].form}")
    return rows


# -- files and rows


def _list_files(path: Path, *patterns: str) -> list[Path]:
    """Return the file, or the files in a folder that match the first pattern with any match."""
    if path.is_file():
        return [path]
    for pattern in patterns:
        files = sorted(each for each in path.glob(pattern) if each.is_file())
        if files:
            return files
    raise DataError(f"{path}: no file such as {' or '.join(patterns)} in it; name the file itself")


def _list_row_files(path: Path, *patterns: str) -> list[Path]:
    """Return files with rows: those of a folder's test split, or all that are not training data."""
    splits = [f"**/*{split}*{suffix}" for split in ("test", "validation") for suffix in SUFFIXES]
    files = _list_files(path, *patterns, *splits, *(f"**/*{suffix}" for suffix in SUFFIXES))
    others = [each for each in files if path.is_file() or "train" not in each.stem]
    if not others:
        raise DataError(f"{path}: only training data in it; name the file itself to use it anyway")
    return others


def _read_all(files: Sequence[Path]) -> Located:
    """Yield (FILE:LINE, row) of JSON, JSON lines, Parquet and CSV files."""
    for file in files:
        if file.suffix == ".csv":
            yield from _read_csv(file)
            continue
        whole = _read_single(file)
        if whole is not None:
            yield str(file), whole
            continue
        for location, row in read_rows(file):
            yield str(location), row


def _read_single(file: Path) -> Row | None:
    """Return the row of a JSON file that is a single object on several lines, else None."""
    if file.suffix != ".json":
        return None
    text = _read_file(file).removeprefix("\ufeff").strip()
    if not text.startswith("{") or "\n" not in text:
        return None
    try:
        return dict(json.loads(text))
    except ValueError:
        return None  # JSON lines, or an error that the reader of rows explains


def _read_csv(file: Path) -> Located:
    """Yield (FILE:LINE, row) of a CSV file whose first line names the columns."""
    with explain_read_errors(str(file), DataError), _open_csv(file) as stream:
        reader = csv.DictReader(stream)
        for row in reader:
            yield f"{file}:{reader.line_num}", {key: value for key, value in row.items() if key}


def _read_file(file: Path) -> str:
    """Return the text of a file. Raises `DataError` if it cannot be read, or is not UTF-8."""
    with explain_read_errors(str(file), DataError):
        return file.read_text(encoding="utf-8")


def _open_csv(file: Path) -> Any:
    return file.open(encoding="utf-8-sig", newline="")


def _convert(rows: Located, convert: Callable[[Row], Item | None]) -> list[Item]:
    """Return the items that `convert` makes of rows; None leaves a row out.

    Raises `DataError` with FILE:LINE of each row that `convert` refuses by `BadRow`.
    """
    items, problems = [], []
    for place, row in rows:
        if isinstance(row, UnreadableRow):
            problems.append(f"{place}: {row.reason}")
            continue
        try:
            item = convert(row)
        except (BadRow, DataError) as error:
            problems.append(f"{place}: {error}")
            continue
        if item is not None:
            items.append(item)
    if problems:
        raise DataError(problems)
    return items


def _read_simple(*patterns: str, convert: Callable[[Row], Item | None]) -> Callable[..., TaskRows]:
    """Return a reader of files whose rows are items."""

    def read(path: Path) -> TaskRows:
        return TaskRows(_convert(_read_all(_list_row_files(path, *patterns)), convert))

    return read


def _require(row: Row, *keys: str) -> str:
    """Return the first of the keys that the row has. Raises `BadRow` if it has none."""
    key = find_first_key(row, keys)
    if key is None:
        has = ", ".join(map(repr, row)) or "none"
        raise BadRow(f"lacks the field {' or '.join(map(repr, keys))}; it has: {has}")
    return key


def _read(row: Row, *keys: str) -> str:
    return read_text(row, _require(row, *keys))


# -- forms of rows


def _convert_gsm8k(row: Row) -> Item:
    from weft.host.verifiers.gsm8k import find_final_number

    answer = row[_require(row, "answer")]
    if find_final_number(str(answer)) is None:
        raise BadRow("'answer' has no number")
    question = _read(row, "question")
    return {"question": question, "target": str(answer)}


def _convert_math(row: Row) -> Item:
    from weft.host.verifiers._answers import extract_boxed

    target = row.get("answer")
    if target is None:
        target = extract_boxed(_read(row, "solution"))
        if not target:
            raise BadRow(r"'solution' has no \boxed{answer}, and there is no field 'answer'")
    subset = row.get("subject") or row.get("type") or ""
    return {"problem": _read(row, "problem"), "target": str(target), "subset": str(subset)}


def _convert_ifeval(row: Row) -> Item:
    from weft.host.verifiers.ifeval import is_followed

    ids = read_texts(row, _require(row, "instruction_id_list"))
    arguments = row[_require(row, "kwargs")]
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise BadRow(f"'kwargs' is a text that is not JSON: {error}") from error
    if not isinstance(arguments, list) or len(arguments) != len(ids):
        raise BadRow(f"'kwargs' must have one mapping for each of the {len(ids)} instructions")
    for id, own in zip(ids, arguments, strict=True):
        if not isinstance(own, Mapping | None):
            raise BadRow(f"'kwargs' must have mappings, not {own!r}")
        is_followed("Test.", id, own or {})  # raises DataError for an unknown id or arguments
    prompt = _read(row, "prompt")
    return {"prompt": prompt, "instruction_id_list": ids, "kwargs": json.dumps(arguments)}


def _convert_humaneval(row: Row) -> Item:
    return {
        "task_id": str(row.get("task_id", "")),
        "prompt": _read(row, "prompt"),
        "program_prompt": _read(row, "prompt"),
        "tests": _read(row, "test"),
        "entry_point": _read(row, "entry_point"),
        "target": str(row.get("canonical_solution") or ""),
    }


def _convert_mbpp(row: Row) -> Item:
    tests = read_texts(row, _require(row, "test_list"))
    imports = read_texts(row, "test_imports", at_least=0) if row.get("test_imports") else []
    setup = read_text(row, "test_setup_code") if row.get("test_setup_code") else ""
    return {
        "task_id": str(row.get("task_id", "")),
        "text": _read(row, "text", "prompt"),
        "shown_tests": "\n".join(tests),
        "tests": "\n".join([*imports, setup, *tests]),
        "target": str(row.get("code") or ""),
    }


def _read_mbpp(path: Path) -> TaskRows:
    files = _list_row_files(path, "mbpp.jsonl", "sanitized-mbpp.json")
    items = _convert(_read_all(files), _convert_mbpp)
    if len(items) == MBPP_ROWS:
        numbers = {str(number) for number in MBPP_TEST}
        items = [each for each in items if each["task_id"] in numbers]
    return TaskRows(items)


def _convert_preference(row: Row) -> Item:
    if "label" in row and "output_1" in row:  # LLMBar's form
        pair = [_read(row, "output_1"), _read(row, "output_2")]
        if row["label"] not in (1, 2):
            raise BadRow(f"'label' must be 1 or 2, not {row['label']!r}")
        chosen, rejected = pair if row["label"] == 1 else pair[::-1]
        return {"prompt": _read(row, "input"), "choices": [chosen, rejected], "subset": ""}
    choices = [_read(row, "chosen"), _read(row, "rejected")]
    if choices[0] == choices[1]:
        raise BadRow("'chosen' and 'rejected' are equal")
    subset = str(row.get("subset") or "")
    return {"prompt": _read(row, "prompt"), "choices": choices, "subset": subset}


def _read_texts(path: Path) -> TaskRows:
    """Read rows with `text`, or text files, whose documents are separated by <|endoftext|>."""
    files = _list_files(path, "**/*.txt", *(f"**/*{suffix}" for suffix in SUFFIXES))
    items = []
    for file in files:
        if file.suffix == ".txt":
            parts = _read_file(file).split(STORY_END)
            items += [{"text": part.strip()} for part in parts if part.strip()]
        else:
            items += _convert(_read_all([file]), lambda row: {"text": _read(row, "text")})
    return TaskRows(items)


def _convert_truthfulqa(row: Row) -> Item:
    texts: list[str] = []
    marks: list[int] = []
    counts = []
    for key in ("mc1_targets", "mc2_targets"):
        targets = row[_require(row, key)]
        if isinstance(targets, Mapping) and "choices" in targets:  # the hub's form
            choices, labels = list(targets["choices"]), list(targets["labels"])
        elif isinstance(targets, Mapping):
            choices, labels = list(targets), list(targets.values())
        else:
            raise BadRow(f"{key!r} must map choices to 0 or 1")
        if len(choices) != len(labels) or not all(choices) or 1 not in labels or 0 not in labels:
            raise BadRow(f"{key!r} needs at least one true and one false choice, none empty")
        texts += choices
        marks += labels
        counts.append(len(choices))
    question = _read(row, "question")
    return {"question": question, "choices": texts, "labels": marks, "num_single": counts[0]}


def _convert_xstest(row: Row) -> Item:
    if row.get("label"):
        kind = _read(row, "label").strip().lower()
        if kind not in ("safe", "unsafe"):
            raise BadRow(f"'label' must be safe or unsafe, not {row['label']!r}")
    else:
        # The types of unsafe prompts are those of safe ones with this prefix.
        kind = "unsafe" if _read(row, "type", "label").startswith("contrast_") else "safe"
    return {"prompt": _read(row, "prompt"), "label": kind}


def _read_xstest(path: Path) -> TaskRows:
    files = _list_files(path, "*xstest*prompts*.csv", "*.csv", *(f"*{s}" for s in SUFFIXES))
    return TaskRows(_convert(_read_all(files), _convert_xstest))


def _read_toxigen(path: Path) -> TaskRows:
    """Read ToxiGen's prompt files, one prompt per line, or rows with `prompt`."""
    files = _list_files(path, "*.txt", *(f"**/*{suffix}" for suffix in SUFFIXES))
    items = []
    for file in files:
        if file.suffix != ".txt":
            items += _convert(_read_all([file]), _convert_toxigen)
            continue
        for line in _read_file(file).splitlines():
            if line.strip():
                prompt = line.strip().replace("\\\\", "\\").replace("\\n", "\n")
                items.append({"prompt": prompt, "subset": file.stem})
    return TaskRows(items)


def _convert_toxigen(row: Row) -> Item:
    return {"prompt": _read(row, "prompt", "text"), "subset": str(row.get("group") or "")}


def _convert_alpaca(row: Row) -> Item:
    return {"prompt": _read(row, "instruction", "prompt"), "reference": _read(row, "output")}


# -- MMLU's form


def _convert_choices(row: Row) -> Item:
    choices = read_texts(row, _require(row, "choices"), at_least=2)
    if len(choices) > len(LETTERS):
        raise BadRow(f"'choices' has {len(choices)} entries; at most {len(LETTERS)} have letters")
    answer = row[_require(row, "answer")]
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
        "question": _read(row, "question"),
        "choices": choices,
        "letters": letters,
        "target": answer,
    }


def _read_choice_csv(file: Path) -> Located:
    """Yield (FILE:LINE, row) of one of MMLU's CSV files: question, choices, letter; no header."""
    subject = file.stem.removesuffix("_test").removesuffix("_dev").replace("_", " ")
    with explain_read_errors(str(file), DataError), _open_csv(file) as stream:
        reader = csv.reader(stream)
        for cells in reader:
            row: dict[str, Any] = {"subject": subject, "question": cells[0] if cells else ""}
            if len(cells) >= 4:
                row |= {"choices": cells[1:-1], "answer": cells[-1]}
            yield f"{file}:{reader.line_num}", row


def _read_mmlu(path: Path) -> TaskRows:
    """Read MMLU's folders `test` and `dev`, or rows; files with `dev` in their name are examples.

    Of a copy of the hub's data set, which holds each subject twice, the folder `all` is read.
    """
    if (path / "test").is_dir() and any((path / "test").glob("*.csv")):
        tests = [
            row for file in sorted((path / "test").glob("*.csv")) for row in _read_choice_csv(file)
        ]
        examples = [
            row for file in sorted((path / "dev").glob("*.csv")) for row in _read_choice_csv(file)
        ]
        shots = _convert(iter(examples), _convert_choices)
        return TaskRows(_convert(iter(tests), _convert_choices), _group(shots))
    if (path / "all").is_dir():
        path = path / "all"
    dev = [] if path.is_file() else sorted(path.glob("**/*dev*"))
    example_files = [each for each in dev if each.name.endswith(SUFFIXES)]
    files = [each for each in _list_row_files(path) if each not in example_files]
    if not files:
        raise DataError(f"{path}: only examples (dev) in it; add a file with the questions")
    items = _convert(_read_all(files), _convert_choices)
    return TaskRows(items, _group(_convert(_read_all(example_files), _convert_choices)))


def _group(items: Sequence[Item]) -> dict[str, list[Item]]:
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(item["subset"], []).append(item)
    return groups


# -- BBH and TyDiQA


def _read_bbh(path: Path) -> TaskRows:
    """Read the folder of BIG-Bench Hard: `bbh/TASK.json` and `cot-prompts/TASK.txt`."""
    items: list[Item] = []
    shots: dict[str, str] = {}
    for file in _list_files(path, "bbh/*.json", "*.json"):
        content = _read_json(file)
        subset = file.stem
        for number, row in enumerate(content.get("examples") or [], 1):
            place = f"{file}: example {number}"
            items += _convert(
                iter([(place, row)]),
                lambda row: {
                    "subset": subset,  # noqa: B023
                    "input": _read(row, "input"),
                    "target": _read(row, "target"),
                },
            )
        prompt = file.parent.parent / "cot-prompts" / f"{subset}.txt"
        if not prompt.is_file():
            raise DataError(
                f"{prompt}: no such file, and the task needs its examples; copy the folder "
                f"cot-prompts of BIG-Bench Hard, next to its folder bbh"
            )
        # The first two lines are a warning to those who collect training data.
        shots[subset] = "\n".join(_read_file(prompt).split("\n")[2:]).strip()
    return TaskRows(items, shots)


def _read_tydiqa(path: Path) -> TaskRows:
    """Read tydiqa-goldp's files: the dev file, and the training file for examples."""
    items = _read_tydiqa_file(_list_files(path, "*goldp*dev*.json", "*dev*.json")[0])
    folder = path if path.is_dir() else path.parent
    train = sorted(folder.glob("*goldp*train*.json"))
    if not train:
        raise DataError(
            f"{folder}: no file *goldp*train*.json in it, from which examples are taken; put it "
            f"there"
        )
    return TaskRows(items, _group(_read_tydiqa_file(train[0])))


def _read_tydiqa_file(file: Path) -> list[Item]:
    def list_questions() -> Located:
        for article in _read_json(file).get("data") or []:
            for paragraph in article.get("paragraphs") or []:
                for question in paragraph.get("qas") or []:
                    place = f"{file}: question {question.get('id')}"
                    yield place, {**question, "context": paragraph.get("context")}

    return _convert(list_questions(), _convert_tydiqa)


def _convert_tydiqa(row: Row) -> Item:
    answers = [read_text(each, "text") for each in row[_require(row, "answers")]]
    if not answers:
        raise BadRow("'answers' is empty")
    return {
        "subset": _read(row, "id").split("-")[0],
        "context": _read(row, "context"),
        "question": _read(row, "question"),
        "answers": answers,
    }


def _read_json(file: Path) -> dict[str, Any]:
    from weft.reading import read_object

    return read_object(file, str(file), DataError)


DATA_SETS = {
    "gsm8k": DataSet(
        "rows {question, answer}; the answer ends in '#### NUMBER'",
        "github.com/openai/grade-school-math (test.jsonl)",
        _read_simple("test.jsonl", convert=_convert_gsm8k),
    ),
    "math": DataSet(
        r"rows {problem, solution with \boxed{}, or answer}",
        "github.com/hendrycks/math (test/SUBJECT/N.json) or hub HuggingFaceH4/MATH-500",
        _read_simple("test/*/*.json", "test.jsonl", convert=_convert_math),
    ),
    "ifeval": DataSet(
        "rows {prompt, instruction_id_list, kwargs}",
        "github.com/google-research/google-research, instruction_following_eval/data",
        _read_simple("input_data.jsonl", convert=_convert_ifeval),
    ),
    "ifbench": DataSet(
        "rows {prompt, instruction_id_list, kwargs}",
        "github.com/allenai/IFBench (data/IFBench_test.jsonl)",
        _read_simple("IFBench_test.jsonl", "data/IFBench_test.jsonl", convert=_convert_ifeval),
    ),
    "humaneval": DataSet(
        "rows {prompt, test, entry_point}",
        "github.com/openai/human-eval (HumanEval.jsonl.gz)",
        _read_simple("HumanEval.jsonl*", convert=_convert_humaneval),
    ),
    "mbpp": DataSet(
        "rows {text or prompt, test_list}",
        "github.com/google-research/google-research, mbpp (mbpp.jsonl, sanitized-mbpp.json)",
        _read_mbpp,
    ),
    "preference": DataSet(
        "rows {prompt, chosen, rejected[, subset]}, or LLMBar's {input, output_1, output_2, label}",
        "hub allenai/reward-bench (filtered), github.com/princeton-nlp/LLMBar",
        _read_simple(convert=_convert_preference),
    ),
    "heldout": DataSet("rows {text}, or .txt files", "your own text", _read_texts),
    "truthfulqa": DataSet(
        "rows {question, mc1_targets, mc2_targets}",
        "github.com/sylinrl/TruthfulQA (data/mc_task.json)",
        _read_simple("mc_task.json", "data/mc_task.json", convert=_convert_truthfulqa),
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
        _read_simple("alpaca_eval.json", convert=_convert_alpaca),
    ),
}
