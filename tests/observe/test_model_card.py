"""Model card of a checkpoint: its contents, and facts that it must not contain."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.runs import write_run
from weft.observe.jsonl import read_json
from weft.observe.model_card import (
    README,
    CardFacts,
    append_checksum,
    build_card,
    draw_curve,
    find_facts,
    find_hub_base,
    format_override,
    name_model,
    read_front_matter,
    shorten_place,
    shorten_places,
    strip_checksum,
    write_card,
)

CAUSAL = {"architectures": ["LlamaForCausalLM"]}


def write_checkpoint(root: Path, *, options: str = "", config: object = CAUSAL) -> Path:
    """Write a run `e/t` with `options` in its configuration; return its checkpoint of step 4."""
    run = write_run(root, "e/t")
    with (run / "config.yaml").open("a") as file:
        file.write(options)
    checkpoint = run / "checkpoints" / "model" / "step4"
    (checkpoint / "config.json").write_text(json.dumps(config))
    return checkpoint


def change_options(checkpoint: Path, **changes: object) -> None:
    """Set options of the run by their dotted names, with `__` in place of the dot."""
    path = checkpoint.parents[2] / "config.yaml"
    options = yaml.safe_load(path.read_text())
    for name, value in changes.items():
        *groups, last = name.split("__")
        place = options
        for group in groups:
            place = place[group]
        place[last] = value
    path.write_text(yaml.safe_dump(options, sort_keys=False))


def build(checkpoint: Path) -> str:
    return build_card(checkpoint, *find_facts(checkpoint))


def test_a_card_says_how_a_model_was_made(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path)
    change_options(checkpoint, dataset__train_path="/home/jo/rows.jsonl", dataset__valid_split=0.1)
    text = build(checkpoint)
    assert read_front_matter(text) == {
        "base_model": "data/model",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["weft", "sft"],
    }
    assert "# e/t, step 4\n" in text
    assert "with weft by supervised fine-tuning" in text
    assert "| made with | weft 0.1.0, torch 2.13 |" in text
    assert "| `rows.jsonl` |" in text
    assert "weft quickstart sft \\\n  experiment_name=e \\\n  trial_name=t \\\n" in text
    assert "  model.path=data/model \\\n" in text
    assert "| `max_steps` | `8` |" in text
    assert "| `dataset.valid_split` | `0.1` | 0.0 |" in text
    assert "| `train/loss` | █▃▂▁ | 1 | 0.25 | 1 | 0.25 |" in text
    assert "Metrics of steps 1 to 4." in text


def test_a_card_has_no_host_time_folder_or_secret(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path)
    change_options(
        checkpoint,
        dataset__path="/home/jo/with a space/rows.jsonl",
        model__path="/home/jo/runs/a/b/checkpoints/actor/step7",
        dataset__args={"api_key": "sk-123", "url": "http://host-7:8000"},
    )
    text = build(checkpoint)
    for word in ("a-host", "/work", "jo", "hf_123", "sk-123", "host-7", "step_seconds", "abc123"):
        assert word not in text, word
    assert "model.path=a/b@step7:actor" in text
    assert "'dataset.args.api_key=***'" in text and "dataset.args.url=URL" in text


def test_a_card_has_no_metrics_after_its_step(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path)
    early = checkpoint.with_name("step2")
    assert "Metrics of steps 1 to 2." in build(early)
    rows = [{"step": n, "eval/loss": 1 / n, "eval/num_rows": 5} for n in range(1, 40)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (checkpoint.parents[2] / "metrics.jsonl").write_text(lines)
    assert "## Validation\n\n| step | loss |\n|---|---|\n| 1 | 1 |\n| 2 | 0.5 |\n" in build(early)
    late = checkpoint.with_name("step39")
    table = build(late).split("## Validation\n")[1].rstrip().splitlines()
    assert table[3].startswith("| 1 |") and table[-1].startswith("| 39 |") and len(table) == 15


def test_options_that_place_a_run_change_nothing(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path)
    before = build(checkpoint)
    change_options(
        checkpoint,
        fileroot="/elsewhere",
        mode="ray",
        recover_freq_steps=3,
        model__layout="d2t2",
        train__device_mesh="1",
        train__pre_hooks=[{"function": "die", "args": {"flag": "/tmp/x"}}],
    )
    assert build(checkpoint) == before


def test_tasks_are_named_if_they_decide_which_checkpoint_is_best(tmp_path: Path) -> None:
    tasks = "eval_suite:\n  tasks: [quiz]\n  include_path: [/home/jo/tasks]\n"
    checkpoint = write_checkpoint(tmp_path, options=tasks)
    assert "eval_suite" not in build(checkpoint)
    change_options(checkpoint, save_best="eval/quiz/acc")
    card = build(checkpoint)
    assert "  'eval_suite.tasks=[quiz]' \\\n" in card and "/home/jo" not in card


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("/home/jo/rows.jsonl", "rows.jsonl"),
        ("~/rows.jsonl", "rows.jsonl"),
        ("clients/acme/rows.jsonl", "rows.jsonl"),
        ("gs://bucket/folder/rows.jsonl", "rows.jsonl"),
        ("http://host:8000", "URL"),
        ("/x/runs/e/t/checkpoints/actor/step40", "e/t@step40:actor"),
        ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B"),
        ("here/model", "model"),
        ("/home/jo/with a space/model", "model"),
        ("see /home/jo/secret/notes.txt for it", "see notes.txt for it"),
        ("rows=/home/jo/secret/rows", "rows=rows"),
        ("long" * 99 + "/x", "long" * 99 + "/x"),
        ("<s>{{ x }}</s>", "<s>{{ x }}</s>"),
        ("a/b ratio", "a/b ratio"),
        ("plain", "plain"),
    ],
)
def test_places_are_reduced_to_names(tmp_path: Path, given: str, shown: str) -> None:
    (tmp_path / "here" / "model").mkdir(parents=True)
    assert shorten_place(given, tmp_path) == shown


def test_names_of_entries_are_reduced_too(tmp_path: Path) -> None:
    given = {"/home/jo/a/x.jsonl": [{"path": "/home/jo/m"}], "/home/jo/b/x.jsonl": 2}
    assert shorten_places(given, tmp_path) == {"x.jsonl": [{"path": "m"}], "x.jsonl'": 2}


def test_the_base_of_a_local_model_is_that_of_its_card(tmp_path: Path) -> None:
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / README).write_text("---\nbase_model: o/n\nlicense: mit\n---\n# x\n")
    assert find_hub_base("sft", tmp_path) == ("o/n", "mit")
    assert find_hub_base("o/n", tmp_path) == ("o/n", None)
    assert find_hub_base("/nowhere", tmp_path) == (None, None)
    (tmp_path / "sft" / README).write_text("---\n: [\n---\n")
    assert find_hub_base("sft", tmp_path) == (None, None)


def test_an_edited_card_is_recognized() -> None:
    card = append_checksum("# x\n\ntext\n")
    assert strip_checksum(card) == "# x\n\ntext\n"
    assert strip_checksum(card.replace("text", "other")) is None
    assert strip_checksum("# x\n") is None


def test_curves() -> None:
    assert draw_curve([0.0, 1.0]) == "▁█"
    assert draw_curve([2.0, 2.0, 2.0]) == "▄▄▄"
    assert len(draw_curve([float(n) for n in range(1000)])) == 24
    assert draw_curve([0.0] * 500 + [7.0] * 500) == "▁" * 12 + "█" * 12


def test_a_model_without_a_run_has_a_short_card(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForSequenceClassification"]})
    )
    text = build(tmp_path)
    assert read_front_matter(text)["pipeline_tag"] == "text-classification"
    assert "## Use" in text and "## Command" not in text and "## Data" not in text


def test_the_configuration_of_a_model_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_checkpoint(tmp_path)
    files = Counter[str]()

    def count_and_read(path: Path) -> dict[str, Any]:
        files[path.name] += 1
        return read_json(path)

    monkeypatch.setattr("weft.observe.model_card.read_json", count_and_read)
    build(checkpoint)
    assert files == {"config.json": 1, "run.json": 1}


def test_damaged_files_of_a_run_leave_a_card(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path)
    run = checkpoint.parents[2]
    for name in ("config.yaml", "run.json", "metrics.jsonl"):
        (run / name).write_text("{[")
    write_card(checkpoint, CardFacts.read(run, 4), "model")
    assert strip_checksum((checkpoint / README).read_text()) is not None


def test_overrides_and_names(tmp_path: Path) -> None:
    assert format_override([1, {"a": None, "b": "x y"}, True]) == '[1, {a: null, b: "x y"}, true]'
    checkpoint = write_checkpoint(tmp_path)
    assert name_model(checkpoint) == "e/t@step4"
    assert name_model(tmp_path / "mine") == "mine"
