"""`weft eval submit` on the command line."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest
import yaml
from lm_eval.tasks import TaskManager

from tests.job_clients import DATASET, StandInClients
from weft.cli import dialects
from weft.cli.main import main

TUNED = ["--allow_code", "--judge", "https://api.openai.com/v1", "--judge_model", "gpt-4o-mini"]


@pytest.fixture(autouse=True)
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandInClients:
    (tmp_path / "work" / "m").mkdir(parents=True)
    (tmp_path / "work" / "m" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "work")
    made = StandInClients(tmp_path / "clients", "sbatch", "beaker", "sinfo")
    monkeypatch.setenv("PATH", made.path)
    return made


@pytest.fixture(autouse=True)
def harness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace lm_eval's tasks, which take seconds to read, by a single task."""

    def open_manager(include_path: list[Path], include_defaults: bool = True) -> Any:
        own = [Path.cwd().parent / "harness"] if include_defaults else []
        return TaskManager(include_path=[*include_path, *own], include_defaults=False)

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", open_manager)
    write_task(Path.cwd().parent / "harness", "arc_easy")


def write_task(folder: Path, name: str) -> None:
    folder.mkdir()
    (folder / f"{name}.yaml").write_text(f"task: {name}\ndataset_path: json\n")


def submit(*words: str, name: str = "tulu", location: str = "m") -> int:
    return main(["eval", "submit", "--model_name", name, "--location", location, *words])


def list_files() -> list[str]:
    return sorted(str(path) for path in Path("eval-jobs").rglob("*") if path.is_file())


def read_suite(path: str) -> list[str]:
    """Return the words after `eval suite` in a script with one command."""
    words = shlex.split(Path(path).read_text().splitlines()[-1])
    return words[words.index("suite") + 1 :]


def test_the_guide_s_command(clients: StandInClients) -> None:
    words = ["--workspace", "o/w", "--num_gpus", "1", "--is_tuned"]
    assert submit(*words, "--cluster", "ai2/a", "ai2/b", "--priority", "high") == 0
    assert [call[:3] for call in clients.calls] == [
        ["beaker", "dataset", "create"],
        ["beaker", "experiment", "create"],
    ]
    (task,) = yaml.safe_load(Path("eval-jobs/tulu/tulu.beaker.yaml").read_text())["tasks"]
    assert shlex.split(task["arguments"][0]) == [
        *["weft", "eval", "suite", "/model/tulu", "--tasks", "open-instruct"],
        *["--output", "/output"],
        *["--apply_chat_template", *TUNED],
    ]
    assert task["datasets"][0]["source"] == {"beaker": DATASET}
    assert {"name": "OPENAI_API_KEY", "secret": "OPENAI_API_KEY"} in task["envVars"]
    assert task["constraints"] == {"cluster": ["ai2/a", "ai2/b"]}


def test_the_same_options_on_slurm(
    clients: StandInClients, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit("--cluster", "gpu", "--priority", "high", "--num-gpus", "0") == 0
    assert clients.calls[-1] == ["sbatch", "--parsable", "eval-jobs/tulu/tulu.slurm.sh"]
    err = capsys.readouterr().err
    assert "note: OPENAI_API_KEY is not set in this shell" in err and "sandbox" in err


def test_the_host_reads_a_folder_that_is_not_uploaded(clients: StandInClients) -> None:
    assert submit("--workspace", "o/w", "--no-upload") == 0
    assert len(clients.calls) == 1
    (task,) = yaml.safe_load(Path("eval-jobs/tulu/tulu.beaker.yaml").read_text())["tasks"]
    assert task["datasets"][0]["source"] == {"hostPath": str(Path("m").absolute())}


@pytest.mark.parametrize(
    ("words", "suite", "secrets"),
    [
        (["--tasks", "gsm_cot,ifeval"], [], []),
        (["--tasks", "humaneval"], ["--allow_code"], []),
        (["--tasks", "arc_easy", "--secret", "HF_TOKEN"], [], ["HF_TOKEN"]),
        (
            ["--tasks", "toxigen"],
            ["--judge", "https://api.openai.com/v1", "--judge_model", "gpt-4o-mini"],
            ["OPENAI_API_KEY"],
        ),
        (
            ["--tasks", "toxigen", "--judge", "http://j:1/v1", "--judge_model", "big"],
            ["--judge", "http://j:1/v1", "--judge_model", "big"],
            [],
        ),
        (
            ["--tasks", "humaneval", "--", "--allow_code", "--limit", "5"],
            ["--allow_code", "--allow_code", "--limit", "5"],
            [],
        ),
    ],
)
def test_needs_of_tasks(words: list[str], suite: list[str], secrets: list[str]) -> None:
    assert submit(*words) == 0
    file = "eval-jobs/tulu/tulu.slurm.sh"
    results = str(Path("eval-jobs/tulu/results").absolute())
    read = read_suite(file)
    assert read == [str(Path("m").absolute()), *words[:2], "--output", results, *suite]
    text = Path(file).read_text()
    assert [name for name in ("HF_TOKEN", "OPENAI_API_KEY") if f"${{{name}:?" in text] == secrets


def test_tasks_of_one_s_own(capsys: pytest.CaptureFixture[str]) -> None:
    write_task(Path("tasks"), "sums")
    assert submit("--tasks", "sums,ifeval", "--", "--include_path", "tasks") == 0
    assert submit("--tasks", "tasks/sums.yaml") == 0
    # Jobs on Beaker have other files.
    assert submit("--workspace", "o/w", "--tasks", "sun", "--", "--include_path", "/data") == 0
    assert submit("--workspace", "o/w", "--tasks", "/data/sun.yaml") == 0
    assert submit("--workspace", "o/w", "--tasks", "sun") == 2
    assert "unknown task 'sun'" in capsys.readouterr().err


def test_a_template_of_one_s_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "submit", "--write_template", "new/job.jinja"]) == 0
    assert "use it by --system slurm --template" in capsys.readouterr().out
    file = Path("new/job.jinja")
    file.write_text(file.read_text().replace("{{ command }}", "module load cuda\n{{ command }}"))
    assert submit("--template", "new/job.jinja") == 0
    assert "\nmodule load cuda\n" in Path("eval-jobs/tulu/tulu.slurm.sh").read_text()
    assert main(["eval", "submit", "--write_template", "new/job.jinja"]) == 2
    assert "exists already" in capsys.readouterr().err


def test_a_plan_writes_nothing(clients: StandInClients, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--print", "--dry-run"):
        assert submit("--workspace", "o/w", flag) == 0
        out = capsys.readouterr().out
        assert "$ beaker dataset create m --name tulu --workspace o/w\n" in out
    assert clients.calls == [] and list_files() == []


def test_a_folder_that_is_not_here(
    clients: StandInClients, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit("--print", location="/net/m") == 0
    assert "note: /net/m is not on this machine" in capsys.readouterr().err
    assert submit(location="/net/m") == 2  # sbatch is installed, and its jobs read the same files
    assert "--location /net/m: there is no such folder" in capsys.readouterr().err
    assert submit("--workspace", "o/w", location="/net/m") == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lcoation", "m"], "unrecognized arguments: --lcoation m; did you mean --location?"),
        (["--system", "slrum"], "unknown --system 'slrum'; did you mean slurm?"),
        (["--priority", "hgih"], "--priority hgih: unknown priority; did you mean high?"),
        (["--cluster", "gup"], "unknown --cluster 'gup'; did you mean gpu?"),
        (["--workspace", "o/w", "--cluster", "gpu"], "must be ORGANIZATION/CLUSTER"),
        (["--from-easylm", "x"], "--location and --from-easylm exclude each other"),
        (["--model_size", "7b"], "--model_size: belongs to --from-easylm"),
        (["--num_gpus", "2", "--tasks", "ifeval"], "write --num_gpus 1"),
        (["--tasks", ","], "--tasks is empty"),
        (["--tasks", "gsm_cot,ifevall"], "unknown task 'ifevall'; did you mean ifeval?"),
        (["--tasks", "arc_eas"], "unknown task 'arc_eas'; did you mean arc_easy?"),
        (["--tasks", "own", "--", "--include_path", "none"], "--include_path none: there is no"),
        (["--", "--tasks", "ifeval"], "--tasks ifeval: write it before --"),
        (["--", "--output", "x"], "--output x: write it before --"),
        (["--judge", "http://j/v1"], "--judge http://j/v1: name its model too"),
        (["--tasks", "ifeval", "--judge_model", "x"], "--judge: none of the tasks has a judge"),
        (["--data_dir", "dat"], "--data_dir dat: there is no such folder"),
        (["--template", "none"], "--template none: there is no such file"),
        (["--template", "bad.jinja"], "bad.jinja:2: unknown placeholder {{ modle }}; did you mean"),
        (["--", "--limt", "5"], "unrecognized arguments: --limt 5; did you mean --limit?"),
        (["--", "--limit", "x"], "argument --limit: invalid"),
        (["--", "--use_cache=http://u:abcdef@h/"], "contain a secret: '--use_cache=http://***@h/'"),
        (["--no-upload"], "--no-upload: only Beaker's models are uploaded"),
        (["--secret", "A B"], "--secret: takes the name of a secret"),
    ],
)
def test_bad_input_is_one_message_and_nothing_is_written(
    words: list[str], message: str, clients: StandInClients, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bad.jinja").write_text("#!/bin/bash\n{{ modle }}\n")
    assert submit(*words) == 2
    err = capsys.readouterr().err
    assert message in err and "abcdef" not in err
    assert [line for line in err.splitlines() if not line.startswith("note: ")] == [
        line for line in err.splitlines() if line.startswith("error: ")
    ]
    assert list_files() == [] and [call for call in clients.calls if call[0] != "sinfo"] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--model_name is missing"),
        (["--model_name", "tulu"], "--location is missing"),
        (["--model_name", "../tulu", "--location", "m"], "must have only letters"),
        (["--model_name", "t", "--location", "mm"], "did you mean m?"),
        (["--model_name", "t", "--from-easylm", "x"], "--model_size is missing"),
        (
            ["--model_name", "t", "--from-easylm", "x", "--model_size", "7b"],
            "this folder has no tokenizer.model",
        ),
    ],
)
def test_missing_options_are_reported(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "submit", *words]) == 2
    assert message in capsys.readouterr().err and list_files() == []


def test_a_secret_in_the_environment_is_not_passed_on_as_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-abcdef")
    assert submit("--", "--system_instruction", "sk-abcdef") == 2
    assert "sk-abcdef" not in capsys.readouterr().err and list_files() == []


def test_the_checkpoint_of_a_run_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    step = Path("runs/e/t/checkpoints/actor/step4")
    step.mkdir(parents=True)
    (step / "config.json").write_text("{}")
    assert submit("--tasks", "arc_easy", "--print", location="runs/e/t") == 0
    read = capsys.readouterr()
    assert f"the newest checkpoint of actor, {step}" in read.err
    assert f"eval suite {step.absolute()} --tasks arc_easy" in read.out


def test_notes_name_data_and_settings_that_a_job_may_lack(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(Path.cwd()))
    monkeypatch.setattr("weft.cli.eval_submit.find_spec", lambda name: None)
    tasks = ["--tasks", "gsm_cot,gsm_direct,ifeval", "--print"]
    assert submit(*tasks) == 0
    err = capsys.readouterr().err
    assert "the job looks for gsm8k, ifeval in ~/.cache/weft/eval; name the folder" in err
    assert "the job needs lm_eval, which is not installed: python -m pip install" in err
    Path(".cache/weft/eval/gsm8k").mkdir(parents=True)
    assert submit(*tasks) == 0
    assert "the job looks for ifeval in" in capsys.readouterr().err
    assert submit("--system", "ray", *tasks) == 0
    assert "the job looks for gsm8k, ifeval in" in capsys.readouterr().err
    for more in (["--data_dir", "m"], ["--", "--data", "gsm8k=m"]):
        assert submit(*tasks, *more) == 0
        assert "the job looks for" not in capsys.readouterr().err
    Path("m/tokenizer_config.json").write_text("{}")
    for more, noted in (([], True), (["--", "--chat-template", "tulu"], False)):
        assert submit(*tasks, "--is_tuned", *more) == 0
        assert ("m has no chat template" in capsys.readouterr().err) == noted
    Path("m/adapter_config.json").write_text("{}")
    assert submit("--workspace", "o/w", "--print") == 0
    assert "m is an adapter, and the job needs its base model too" in capsys.readouterr().err


def test_without_the_dialect_no_checkpoint_is_converted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dialects, "find", lambda name: None)
    words = ["--model_name", "t", "--from-easylm", "x", "--model_size", "7b"]
    assert main(["eval", "submit", *words, "--tokenizer_path", "m"]) == 2
    assert "this installation of weft lacks the package" in capsys.readouterr().err
    assert list_files() == []


def test_the_exit_code_is_the_client_s(clients: StandInClients) -> None:
    clients.answer("sbatch", "sbatch: error: no\n", code=13)
    assert submit() == 13
