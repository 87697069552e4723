"""`weft eval suite` against lm_eval's own backend `hf`, at its fastest batch size: tasks of multiple
choice, zero-shot and 5-shot.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks import data, model, results
from benchmarks.pairs import Measured, Side, SideFailed, Spread, alternate, ratios

BATCHES = ("1", "8", "32", "auto")
TOLERANCE = 1e-4  # between the log-likelihoods of both sides
GOAL = 3.0
HOPELESS = 3.0
SHOTS = 5


@dataclass(frozen=True)
class Work:
    """A task of multiple choice over questions of real text.

    `choices` are those of the task: sentences, or letters after a list of the sentences. `sampler`
    chooses the examples: the same for all questions, or others for each.
    """

    name: str
    shots: int
    items: int
    choices: str = "sentences"
    sampler: str = "first_n"
    target: str = ""


WORKS = (
    Work("zero-shot", 0, 64, target=f"{GOAL:g}x"),
    Work("5-shot", SHOTS, 16, target=f"{GOAL:g}x"),
    Work("zero-shot, letters", 0, 128, choices="letters"),
    Work("5-shot, letters", SHOTS, 32, choices="letters"),
    Work("5-shot, drawn for each question", SHOTS, 16, sampler="default"),
)


def main(words: Sequence[str] | None = None) -> None:
    parser = results.parser("suite", str(__doc__), repeats=3)
    parser.add_argument(
        "--shape",
        choices=sorted(model.SHAPES),
        default="12.7M",
        help="model (default: %(default)s)",
    )
    parser.add_argument("--only", default="", help="works whose name contains this")
    arguments = parser.parse_args(words)
    results.start(arguments)
    shape = model.SHAPES["tiny" if arguments.quick else arguments.shape]
    works = [work for work in WORKS if arguments.only in work.name]
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder, ExitStack() as stack:
        tokenizer = arguments.data / "tokenizers" / "llama2"
        directory = model.write_model(Path(folder) / "model", shape, tokenizer)
        sides = {
            name.replace("_", " "): stack.enter_context(
                Side(f"benchmarks.suite_backends:{name}", Path(folder) / name, rest=arguments.rest)
            )
            for name in ("weft", *(f"hf_{size}" for size in BATCHES))
        }
        runs, rows = {}, []
        try:
            for number, work in enumerate(works):
                tasks = write_task(Path(folder) / str(number), work, arguments)
                runs[work.name] = measure(sides, str(directory), str(tasks), arguments.repeats)
                rows.append(row(work, runs[work.name]))
                print(results.table(rows[-1:]), flush=True)
        except SideFailed as error:
            raise SystemExit(str(error)) from error
    notes = [
        "seconds: medians of whole evaluations, without loading of model and data; ratio: the "
        "fastest batch size of hf in each round (median, least to most); apart: the largest "
        "difference of two log-likelihoods",
    ]
    settings = {"shape": asdict(shape), "works": [asdict(work) for work in works]}
    results.report(results.Results("suite", rows, settings, runs, notes), arguments)


def write_task(folder: Path, work: Work, arguments: Any) -> Path:
    """Write the file of a task called `task` and its data, and return the folder."""
    folder.mkdir()
    count = 4 if arguments.quick else work.items
    texts = [each["prompt"] for each in islice(data.questions(arguments.data), 4 * (count + SHOTS))]
    rows = []
    for index in range(count + SHOTS):
        ends = [" ".join(text.split()[1:9]) for text in texts[4 * index : 4 * index + 4]]
        listed = "".join(f"{letter}. {end}\n" for letter, end in zip("ABCD", ends, strict=True))
        question = texts[4 * index].removesuffix("Answer:")
        if work.choices == "letters":
            rows.append({"text": f"{question}{listed}Answer:", "options": list("ABCD")})
        else:
            rows.append({"text": f"{question}Answer:", "options": ends})
    for name, own in (("train", rows[:SHOTS]), ("test", rows[SHOTS:])):
        lines = [json.dumps({**each, "gold": 0}) + "\n" for each in own]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    files = {name: str(folder / f"{name}.jsonl") for name in ("train", "test")}
    (folder / "task.yaml").write_text(
        "task: task\noutput_type: multiple_choice\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {json.dumps(files)}}}\n"
        "test_split: test\ntraining_split: train\nfewshot_split: train\n"
        f"fewshot_config: {{sampler: {work.sampler}}}\nnum_fewshot: {work.shots}\n"
        "doc_to_text: '{{text}}'\ndoc_to_choice: '{{options}}'\ndoc_to_target: '{{gold}}'\n"
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    return folder


def measure(
    sides: dict[str, Side], directory: str, tasks: str, repeats: int
) -> dict[str, list[Measured]]:
    """The first run of each side warms up and is left out.

    A side that then takes more than `HOPELESS` times as long as the fastest of hf has no further
    turn: on a CPU, batch size auto tries several batches of 64 before it evaluates anything. Stops
    where log-likelihoods differ.
    """
    settings = {"model": directory, "tasks": tasks}
    first = {name: side.begin(settings) for name, side in sides.items()}
    for name, each in first.items():
        own, other = first["weft"]["logprobs"], each["logprobs"]
        apart = max(abs(a - b) for a, b in zip(own, other, strict=True))
        if apart > TOLERANCE:
            raise SystemExit(f"{name}: a log-likelihood differs by {apart} from weft's")
        each["apart"] = apart
    fastest = min(each["seconds"] for name, each in first.items() if name != "weft")
    again = {
        name: side
        for name, side in sides.items()
        if name == "weft" or first[name]["seconds"] < HOPELESS * fastest
    }
    runs = alternate(again, settings, repeats)
    measured = {name: runs.get(name, [first[name]]) for name in sides}
    for name, each in measured.items():
        for one in each:
            one["apart"] = first[name]["apart"]
            one.pop("logprobs", None)
    return measured


def row(work: Work, runs: dict[str, list[Measured]]) -> dict[str, Any]:
    seconds = {name: [run["seconds"] for run in measured] for name, measured in runs.items()}
    cpu = {name: [run["cpu_seconds"] for run in measured] for name, measured in runs.items()}
    rounds = len(runs["weft"])
    others = [name for name, own in runs.items() if name != "weft" and len(own) == rounds]
    line: dict[str, Any] = {"work": work.name}
    line |= {f"{name} s": Spread.of(each).median for name, each in seconds.items()}
    fastest = [min(each) for each in zip(*(seconds[name] for name in others), strict=True)]
    least = [min(each) for each in zip(*(cpu[name] for name in others), strict=True)]
    line["times as fast"] = str(ratios(fastest, seconds["weft"]))
    line["by CPU time"] = ratios(least, cpu["weft"]).median
    line["apart"] = max(own[0]["apart"] for own in runs.values())
    return line | {"to reach": work.target}


if __name__ == "__main__":
    main()
