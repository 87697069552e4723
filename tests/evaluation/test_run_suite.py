"""`eval_suite`: a run evaluates its model on tasks, which does not change its training."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.evaluation import stand_in_suite
from tests.evaluation.harness_tasks import write_tasks
from tests.evaluation.stand_in_suite import LOADED, OPTIONS, read_figures, use_stand_in
from tests.launch.cases import options, prepare
from weft.cli.main import main
from weft.engine.spec import ModelSpec
from weft.errors import UserError
from weft.evaluation import run_suite
from weft.evaluation.models import open_policy
from weft.evaluation.run_suite import (
    RunEngine,
    format_figures,
    name_metric,
    replace_flags,
    silence_thread,
)
from weft.evaluation.suite import TaskFigure
from weft.experiments import SFTConfig
from weft.launch import run


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("suite")
    prepare(folder)
    return folder


def small(root: Path, folder: str, **more: Any) -> SFTConfig:
    """Return options for three steps, evaluated before the first, after the second and last."""
    given = {"max_steps": 3, "eval_freq_steps": 2, "eval_at_start": True, **more}
    config = SFTConfig(**options(root, folder, **given))
    config.model.path, config.model.optimizer.lr = str(root / "model"), 1e-2
    config.model.dtype = "float64"
    config.dataset.train_path, config.dataset.train_bs_n_seqs = str(root / "sft.jsonl"), 8
    config.eval_suite.tasks = ["quiz"]
    return config


def test_figures_are_those_of_the_checkpoints(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_in(monkeypatch)
    groups = []
    build = RunEngine

    def keep_group(experiment: Any, group: Any, *others: Any) -> RunEngine:
        groups.append(group)
        return build(experiment, group, *others)

    monkeypatch.setattr("weft.launch.assemble.RunEngine", keep_group)
    result = run(small(root, "whole", save_freq_steps=1))
    for id in ("eval/suite_score/0", "eval/suite_generate/0"):
        assert id not in groups[0]._tensors._store, "recovery points would hold the requests"
    figures = read_figures(result.metrics)
    assert sorted(figures) == [0, 2, 3]
    assert figures[0] != figures[2] != figures[3], "at this rate the model has changed"
    places = {0: root / "model", 3: result.checkpoint("model")}
    for step, place in places.items():
        opened = open_policy(ModelSpec(path=str(place), dtype="float64", device="cpu"))
        found, _ = stand_in_suite.evaluate(opened, LOADED, OPTIONS, root / "direct")
        row = found["results"]["quiz"]
        assert figures[step] == {
            "eval/quiz/acc": row["acc,none"],
            "eval/quiz/logprob": pytest.approx(row["logprob,none"], rel=1e-12),
            "eval/quiz/strict/tokens": row["tokens,strict"],
        }
    folder = result.directory / "eval"
    assert sorted(each.name for each in folder.iterdir()) == ["step0", "step2", "step3"]
    assert "eval_suite, step 3: quiz acc" in (result.directory / "log.txt").read_text()
    card = (result.checkpoint("model") / "README.md").read_text()
    assert f"| `quiz` | acc | {figures[3]['eval/quiz/acc']:.4g} " in card


def test_training_is_the_same_with_and_without(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_in(monkeypatch)
    without = small(root, "without", eval_freq_steps=None, eval_at_start=None)
    without.eval_suite.tasks = []
    found = []
    for config in (small(root, "with"), without):
        metrics = run(config).metrics
        found.append([line["train/grad_norm"] for line in metrics if "train/grad_norm" in line])
    assert found[0] == found[1] and len(found[0]) == 3


def test_a_run_killed_in_an_evaluation_has_the_same_figures(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resumed run repeats the evaluation; nothing of the killed one remains."""
    use_stand_in(monkeypatch)
    whole = run(small(root, "uncut"))

    def dies(model: Any, loaded: Any, given: Any, folder: Path, *_: Any) -> Any:
        found = stand_in_suite.evaluate(model, loaded, given, folder)
        if model.name.endswith("@step2"):
            raise KeyboardInterrupt
        return found

    with monkeypatch.context() as patch:
        patch.setattr(run_suite.suite, "evaluate", dies)
        with pytest.raises(KeyboardInterrupt):
            run(small(root, "cut"))
    torn = root / "cut" / "e" / "t" / "eval"
    (torn / "step2.tmp").mkdir()  # what a killed process leaves
    (torn / "step3").mkdir()
    again = small(root, "cut")
    again.eval_suite.limit = 7  # evaluations do not change the training, so this may differ
    result = run(again)
    assert read_figures(result.metrics) == read_figures(whole.metrics)
    assert sorted(each.name for each in torn.iterdir()) == ["step0", "step2", "step3"]
    assert (torn / "step3" / "results_1.json").is_file()


def test_figures_decide_about_the_best_checkpoint(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_stand_in(monkeypatch)
    given = {"save_best": "eval/quiz/logprob", "save_best_mode": "max", "early_stop_patience": 1}
    result = run(small(root, "best", eval_freq_steps=1, max_steps=6, **given))
    values = {step: own["eval/quiz/logprob"] for step, own in read_figures(result.metrics).items()}
    best = json.loads((result.directory / "checkpoints" / "best.json").read_text())
    assert best["value"] == max(value for step, value in values.items() if step)


def test_names_of_other_metrics_and_sources_are_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_stand_in(monkeypatch)
    with pytest.raises(UserError, match=r"save_best=eval/quizz/acc: .*such as eval/quiz/acc"):
        run(small(root, "named", save_best="eval/quizz/acc"))
    config = small(root, "named")
    rows = root / "sft.jsonl"
    config.dataset.train_path = None
    config.dataset.sources = [{"path": str(rows), "valid_split": 0.2, "name": "quiz"}]
    with pytest.raises(UserError, match="'quiz' is also the name of validation rows"):
        run(config)
    assert not (root / "named").exists()


def test_without_lm_eval_the_extra_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = SimpleNamespace(find_spec=lambda name: None)
    monkeypatch.setattr("weft.evaluation.suite_tasks.importlib", SimpleNamespace(util=absent))
    with pytest.raises(
        UserError, match=r"eval_suite needs lm_eval .* is not installed; .*\[eval\]"
    ):
        run(small(root, "absent"))
    assert not (root / "absent").exists()


# -- parts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "unknown task 'a'; did you mean b?",
            "eval_suite.tasks: unknown task 'a'; did you mean b?",
        ),
        ("name one, as in --tasks a,b", "name one, as in eval_suite.tasks=[a,b]"),
        ("--include_path x/y: there is none", "eval_suite.include_path=[x/y]: there is none"),
        ("--num_fewshot 5: too many", "eval_suite.num_fewshot=5: too many"),
        ("allow it with --allow_code, or", "allow it with eval_suite.allow_code=true, or"),
        (
            "give --judge URL and --judge_model NAME, or",
            "give eval_suite.judge=URL and eval_suite.judge_model=NAME, or",
        ),
        ("give --data gsm8k=PATH, or", "give eval_suite.data.gsm8k=PATH, or"),
        (
            "set --gen_kwargs do_sample=true,temperature=1",
            "set eval_suite.gen_kwargs.do_sample=true eval_suite.gen_kwargs.temperature=1",
        ),
        ("another folder with --data_dir", "another folder with eval_suite.data_dir"),
        (
            "with --chat-template, or leave --apply_chat_template out",
            "with actor.tokenizer.chat_template, or leave eval_suite.apply_chat_template=true out",
        ),
    ],
)
def test_messages_name_the_options_of_the_run(text: str, expected: str) -> None:
    assert replace_flags(text, "actor") == expected


def test_names_and_the_line_of_figures() -> None:
    plain = TaskFigure("quiz", "none", "acc", 0.5, 0.1, 4)
    filtered = TaskFigure("sums", "strict-match", "exact_match", 0.25, None, 4)
    assert [name_metric(plain), name_metric(filtered)] == [
        "eval/quiz/acc",
        "eval/sums/strict-match/exact_match",
    ]
    assert format_figures([plain, filtered]) == (
        "quiz acc 0.5 ± 0.1, sums exact_match (strict-match) 0.25"
    )
    assert format_figures([plain] * 8).endswith("quiz acc 0.5 ± 0.1, and 2 others in metrics.jsonl")


def test_only_this_thread_is_muted(capsys: pytest.CaptureFixture[str]) -> None:
    """Another thread draws the terminal view."""
    with silence_thread():
        print("bar"), print("bar", file=sys.stderr)
        view = threading.Thread(target=lambda: print("view"))
        view.start()
        view.join()
    print("after")
    assert capsys.readouterr() == ("view\nafter\n", "")


# -- with lm_eval


@pytest.mark.slow
def test_tasks_of_the_harness_equal_the_command(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if each prompt has randomly drawn examples. Mistakes are found before the run."""
    tasks = write_tasks(tmp_path)
    shots = (tasks / "choices.yaml").read_text().replace("sampler: first_n", "sampler: default")
    (tasks / "choices.yaml").write_text(shots)
    names = ["choices", "continued", "stories"]
    config = small(root, "harness")
    config.eval_suite.tasks, config.eval_suite.include_path = names, [str(tasks)]
    config.eval_suite.limit, config.eval_suite.num_fewshot = 4, 2
    wrong = small(root, "wrong")
    for tasks_named, shots_asked, message in (
        (["choises"], None, r"eval_suite\.tasks: unknown task 'choises'; did you mean choices\?"),
        (names, 20, r"eval_suite\.num_fewshot=20: task 'choices' has 12 examples"),
        (["long"], None, "task 'long': the continuation .* scores 1 to 512"),
    ):
        text = (tasks / "stories.yaml").read_text().replace("task: stories", "task: long")
        text = text.replace("_rolling", "").replace('doc_to_text: ""', "doc_to_text: a")
        text = text[: text.index("metric_list")] + "metric_list:\n  - {metric: acc}\n"
        (tasks / "long.yaml").write_text(text.replace("{{story}}", "{{story * 40}}"))
        wrong.eval_suite.tasks, wrong.eval_suite.include_path = tasks_named, [str(tasks)]
        wrong.eval_suite.num_fewshot = shots_asked
        with pytest.raises(UserError, match=message):
            run(wrong)
    assert not (root / "wrong").exists()
    result = run(config)
    words = ["--tasks", ",".join(names), "--include_path", str(tasks), "--limit", "4"]
    words += ["--num_fewshot", "2", "--dtype", "float64", "--device", "cpu"]
    assert main(["eval", "suite", f"{result.directory}@step3", *words]) == 0
    found = []
    for folder in (result.directory, result.directory / "checkpoints" / "model"):
        (file,) = folder.glob("eval/step3/results_*.json" if not found else "step3/eval/results_*")
        found.append(json.loads(file.read_text())["results"])
    for name in names:
        for key, value in found[1][name].items():
            if isinstance(value, float) and "stderr" not in key:
                assert found[0][name][key] == pytest.approx(value, rel=1e-9), (name, key)
    figures = read_figures(result.metrics)[3]
    assert figures["eval/stories/byte_perplexity"] == found[0]["stories"]["byte_perplexity,none"]
    capsys.readouterr()
    assert main(["eval", "table", str(result.directory)]) == 0
    assert "t@step2" in capsys.readouterr().out
