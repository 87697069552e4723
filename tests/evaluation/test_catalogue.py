"""Tasks of the catalogue: their requirements, and their metrics in lm_eval's results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.host.test_judge import Stub, said
from tests.tiny import write_jsonl
from weft.errors import ConfigError, DataError, UserError
from weft.evaluation import catalogue
from weft.evaluation.catalogue import CatalogueOptions, resolve_tasks
from weft.evaluation.sampling import add_intervals
from weft.evaluation.task_data import DATA_SETS
from weft.evaluation.task_judge import QUESTIONS, JudgeSettings
from weft.evaluation.task_prompts import PROMPTS
from weft.evaluation.task_scoring import SCORERS

GUIDE = (
    "mmlu",
    "gsm",
    "bbh",
    "tydiqa",
    "codex",
    "ifeval",
    "truthfulqa",
    "toxigen",
    "xstest",
    "alpaca",
)
ROWS: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [{"question": "2+5?", "answer": "#### 7"}, {"question": "1+1?", "answer": "#### 2"}],
    "math": [{"problem": "p", "solution": r"\boxed{7}"}],
    "ifeval": [
        {"prompt": "p", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
        {
            "prompt": "q",
            "instruction_id_list": ["length_constraints:number_words", "punctuation:no_comma"],
            "kwargs": [{"relation": "at least", "num_words": 3}, {}],
        },
    ],
    "ifbench": [
        {
            "key": "0",
            "prompt": "p",
            "instruction_id_list": ["count:numbers", "format:no_whitespace"],
            "kwargs": [{"N": 2.0, "sep": None}, {"N": None, "sep": None}],
        }
    ],
    "humaneval": [
        {
            "prompt": "def double(x):\n",
            "entry_point": "double",
            "test": "def check(f):\n    assert f(2) == 4\n",
            "canonical_solution": "    return 2 * x\n",
        }
    ],
    "mbpp": [{"text": "Write double.", "code": "", "test_list": ["assert double(2) == 4"]}],
    "preference": [
        {"prompt": "p", "chosen": "yes", "rejected": "never", "subset": "chat"},
        {"prompt": "p", "chosen": "certainly", "rejected": "no", "subset": "hard"},
    ],
    "heldout": [{"text": "once upon a time"}],
    "truthfulqa": [
        {
            "question": "q",
            "mc1_targets": {"a": 1, "bbb": 0},
            "mc2_targets": {"a": 1, "b": 0, "c": 0},
        }
    ],
    "xstest": [{"prompt": "p", "label": "safe"}, {"prompt": "q", "label": "unsafe"}],
    "mmlu": [{"question": "q", "choices": ["x", "y"], "answer": "A", "subject": "law"}],
    "toxigen": [{"prompt": "- a\n-"}],
    "alpaca_eval": [{"instruction": "p", "output": "reference"}],
}


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Path]:
    """Files of a few rows for each data set; MMLU's has examples, too."""
    paths = {}
    for name, rows in ROWS.items():
        paths[name] = write_jsonl(tmp_path / name / "test.jsonl", rows).parent
    write_jsonl(tmp_path / "mmlu/dev.jsonl", ROWS["mmlu"] * 5)
    bbh = {"examples": [{"input": "i", "target": "(A)"}]}
    (tmp_path / "bbh/bbh").mkdir(parents=True)
    (tmp_path / "bbh/bbh/words.json").write_text(json.dumps(bbh))
    (tmp_path / "bbh/cot-prompts").mkdir()
    (tmp_path / "bbh/cot-prompts/words.txt").write_text("canary\n-\nQ: x\nA: So the answer is y.")
    question = {"id": "finnish-1", "question": "Who?", "answers": [{"text": "Lily"}]}
    tydiqa = {"data": [{"paragraphs": [{"context": "Lily.", "qas": [question]}]}]}
    (tmp_path / "tydiqa").mkdir()
    for part in ("dev", "train"):
        (tmp_path / f"tydiqa/tydiqa-goldp-v1.1-{part}.json").write_text(json.dumps(tydiqa))
    return paths | {"bbh": tmp_path / "bbh", "tydiqa": tmp_path / "tydiqa"}


def judge(server: Stub) -> JudgeSettings:
    return JudgeSettings(server.url, "judge", cache=False)


# -- what tasks need


def test_task_files_name_what_exists() -> None:
    for block, config in catalogue.read_catalogue().values():
        assert block.data in DATA_SETS
        assert block.scorer is None or block.scorer in SCORERS
        assert block.prompt is None or block.prompt in PROMPTS
        assert block.judge is None or block.judge in QUESTIONS
        assert config["metadata"]["version"] >= 1
        assert config.get("num_fewshot") == len(config.get("fewshot_config", {}).get("samples", []))
    for members in catalogue.GROUPS.values():
        assert set(members) <= set(catalogue.read_catalogue())


def test_the_suite_has_the_tasks_of_the_guide() -> None:
    members = catalogue.GROUPS["open-instruct"]
    for word in GUIDE:
        assert any(member.startswith(word) for member in members), word


def test_other_names_are_left_to_the_harness(tmp_path: Path) -> None:
    options = CatalogueOptions(folder=tmp_path)
    assert resolve_tasks(["arc_easy", "own"], options) == ([], ["arc_easy", "own"])


@pytest.mark.slow
def test_a_users_task_file_comes_first(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("task: mbpp\ndataset_path: json\n")
    options = CatalogueOptions(folder=tmp_path, include_path=[tmp_path])
    assert resolve_tasks(["mbpp"], options) == ([], ["mbpp"])


def test_missing_data_are_reported_with_a_fix(tmp_path: Path) -> None:
    options = CatalogueOptions(folder=tmp_path)
    with pytest.raises(ConfigError) as caught:
        resolve_tasks(["gsm_cot", "gsm_direct", "truthfulqa"], options)
    message = str(caught.value)
    assert "gsm_cot, gsm_direct: there is no data; give --data gsm8k=PATH" in message
    assert f"put a copy in {tmp_path / 'truthfulqa'}" in message
    assert "github.com/openai/grade-school-math" in message


def test_code_does_not_run_without_permission(data: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"mbpp: programs that the model writes.*--allow_code"):
        resolve_tasks(["mbpp"], CatalogueOptions(data))


def test_a_judge_is_needed_before_anything_runs(data: dict[str, Path]) -> None:
    with pytest.raises(
        ConfigError, match=r"alpaca_eval: answers are graded by a judge.*--judge URL"
    ):
        resolve_tasks(["alpaca_eval"], CatalogueOptions(data))


def test_one_message_names_everything_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_tasks(["open-instruct"], CatalogueOptions(folder=tmp_path))
    message = str(caught.value)
    assert "--allow_code" in message and "--judge URL" in message
    for name in sorted(set(DATA_SETS) - {"ifbench", "math", "mbpp", "preference", "heldout"}):
        assert f"--data {name}=PATH" in message


def test_unknown_data_sets_and_numbers(data: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="there is no data set 'gsm'; known: alpaca_eval"):
        resolve_tasks(["gsm_cot"], CatalogueOptions({"gsm": data["gsm8k"]}))
    for name in ("preference", "own"):
        with pytest.raises(ConfigError, match="--num_samples 4: none of the tasks"):
            resolve_tasks([name], CatalogueOptions(data, num_samples=4))
    with pytest.raises(ConfigError, match="--num_samples 0: must be at least 1"):
        resolve_tasks(["gsm_cot"], CatalogueOptions(data, num_samples=0))


def test_unusable_rows_are_found_before_the_run(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "gsm8k.jsonl", [{"question": "q"}])
    with pytest.raises(DataError, match=f"{file}:1: lacks the field 'answer'"):
        resolve_tasks(["gsm_cot"], CatalogueOptions(folder=tmp_path))


# -- results of lm_eval

Answer = Callable[[dict[str, Any], int], str]


def evaluate(tasks: list[Any], answer: Answer | None = None) -> dict[str, Any]:
    """Run lm_eval with a model that answers from a table; short texts are likelier."""
    from lm_eval import evaluator
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    class TableModel(LM):
        def loglikelihood(self, requests: Any) -> list[tuple[float, bool]]:
            return [(-float(len(request.args[1])), False) for request in requests]

        def loglikelihood_rolling(self, requests: Any) -> list[float]:
            return [-float(len(request.args[0])) for request in requests]

        def generate_until(self, requests: Any) -> list[str]:
            assert answer is not None
            return [answer(request.doc, index) for index, request in enumerate(requests)]

    results = evaluator.simple_evaluate(
        model=TableModel(),
        tasks=tasks,
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=10,
    )
    assert results is not None
    add_intervals(results)
    json.dumps(results, default=str)
    return dict(results)


@pytest.mark.slow
def test_tasks_of_likelihoods(data: dict[str, Path]) -> None:
    names = ["preference", "heldout_perplexity", "truthfulqa", "mmlu_0shot", "mmlu_5shot"]
    tasks, others = resolve_tasks(names, CatalogueOptions(data))
    assert others == []
    results = evaluate(tasks)
    row = results["results"]["preference"]
    assert (row["acc,none"], row["acc_chat,none"], row["acc_hard,none"]) == (0.5, 1.0, 0.0)
    assert row["acc_ci95,none"][0] < 0.5 < row["acc_ci95,none"][1]
    assert results["results"]["heldout_perplexity"]["byte_perplexity,none"] == pytest.approx(
        2.718281828
    )
    assert results["results"]["truthfulqa"]["mc1,none"] == 1.0
    assert results["results"]["truthfulqa"]["mc2,none"] == pytest.approx(1 / 3)
    # Equal log-likelihoods: the harness takes the first choice.
    assert results["results"]["mmlu_5shot"]["acc,none"] == 1.0
    prompt, continuation = results["samples"]["mmlu_5shot"][0]["arguments"][0]
    assert prompt.count("Answer: A\n\n") == 5 and prompt.endswith("B. y\nAnswer:")
    assert continuation == " A"


@pytest.mark.slow
def test_tasks_of_answers(data: dict[str, Path]) -> None:
    names = ["gsm_cot", "gsm_direct", "math_cot", "ifeval", "bbh_cot", "bbh_direct", "xstest"]
    names += ["ifbench", "tydiqa_goldp_1shot", "tydiqa_no_context_1shot"]
    tasks, _ = resolve_tasks(names, CatalogueOptions(data))
    results = evaluate(tasks, lambda item, index: r"Lily has \boxed{7}, so the answer is 7.")
    scores = results["results"]
    assert scores["gsm_cot"]["exact_match,none"] == 0.5
    assert scores["math_cot"]["exact_match,none"] == 1.0
    assert scores["ifeval"]["prompt_level_strict_acc,none"] == 0.0
    assert scores["ifeval"]["inst_level_strict_acc,none"] == pytest.approx(1 / 3)
    assert scores["ifbench"]["prompt_level_loose_acc,none"] == 0.0
    assert scores["ifbench"]["inst_level_strict_acc,none"] == 0.5
    assert scores["bbh_cot"]["exact_match_words,none"] == 0.0
    assert scores["tydiqa_goldp_1shot"]["recall,none"] == 1.0
    assert scores["xstest"]["acc,none"] == 0.5
    assert (scores["xstest"]["refusal_safe,none"], scores["xstest"]["refusal_unsafe,none"]) == (
        0,
        0,
    )
    prompt, options = results["samples"]["gsm_cot"][0]["arguments"][0]
    assert prompt.startswith("Answer the following questions.\n\nQuestion: There are 15 trees")
    assert prompt.count("So the answer is") == 8 and prompt.endswith("Question: 2+5?\nAnswer:")
    assert options["do_sample"] is False


@pytest.mark.slow
def test_several_samples_per_item(data: dict[str, Path]) -> None:
    tasks, _ = resolve_tasks(["gsm_cot"], CatalogueOptions(data, num_samples=4))
    # Right for the first item with samples 0 and 1, for the second with 6.
    results = evaluate(
        tasks, lambda item, index: str({0: 7, 1: 7, 2: 3, 6: 2}.get(index, "unknown"))
    )
    row = results["results"]["gsm_cot"]
    assert row["pass@1,none"] == row["avg@4,none"] == pytest.approx((0.5 + 0.25) / 2)
    assert row["pass@2,none"] == pytest.approx((5 / 6 + 0.5) / 2)
    assert row["pass@4,none"] == row["maj@4,none"] == 1.0
    assert row["pass@2_stderr,none"] > 0
    low, high = row["pass@2_ci95,none"]
    assert low <= row["pass@2,none"] <= high
    config = results["configs"]["gsm_cot"]
    assert config["repeats"] == 4 and config["generation_kwargs"]["do_sample"] is True


@pytest.mark.slow
def test_programs_run_with_permission(data: dict[str, Path]) -> None:
    def write(item: dict[str, Any], index: int) -> str:
        right = "```python\ndef double(x):\n    return 2 * x\n```"
        return right if index % 2 == 0 else "def double(x): return x"

    options = CatalogueOptions(data, allow_code=True)
    tasks, _ = resolve_tasks(["mbpp", "humaneval", "codex_eval_temp_0.8"], options)
    rows = evaluate(tasks, write)["results"]
    assert rows["mbpp"]["pass@1,none"] == 1.0
    assert rows["codex_eval_temp_0.8"]["pass@1,none"] == 0.5
    assert rows["codex_eval_temp_0.8"]["pass@10,none"] == pytest.approx(1 - 1 / 184756, abs=1e-9)


@pytest.mark.slow
def test_judged_tasks(data: dict[str, Path], server: Stub) -> None:
    server.reply = lambda text, number: said("Verdict: 1" if number % 2 else "Verdict: 3")
    names = ["alpaca_eval", "toxigen", "xstest_judge"]
    tasks, _ = resolve_tasks(names, CatalogueOptions(data, judge=judge(server)))
    server.reply = lambda text, number: said(
        "Verdict: 3" if "# Answer 1\nmine" in text else "Verdict: 1"
    )
    rows = evaluate(tasks, lambda item, index: "mine")["results"]
    assert rows["alpaca_eval"]["win_rate,none"] == 1.0
    assert rows["toxigen"]["toxic,none"] == 0.0
    assert rows["xstest_judge"]["acc,none"] == 0.5
    assert rows["alpaca_eval"]["judge_failed,none"] == 0.0


@pytest.mark.slow
def test_a_judge_that_answers_garbage_gives_no_score(data: dict[str, Path], server: Stub) -> None:
    server.reply = lambda text, number: said("Hm.")
    tasks, _ = resolve_tasks(
        ["alpaca_eval", "xstest_judge"], CatalogueOptions(data, judge=judge(server))
    )
    rows = evaluate(tasks, lambda item, index: "mine")["results"]
    for name in ("alpaca_eval", "xstest_judge"):
        assert rows[name]["judge_failed,none"] == 1.0
    assert "win_rate,none" not in rows["alpaca_eval"]
    assert "acc,none" not in rows["xstest_judge"]


@pytest.mark.slow
def test_a_judge_that_is_down_is_found_before_the_run(data: dict[str, Path]) -> None:
    options = CatalogueOptions(data, judge=JudgeSettings("http://127.0.0.1:9/v1", "judge"))
    with pytest.raises(UserError, match="the judge does not answer"):
        resolve_tasks(["toxigen"], options)
