"""`weft eval submit --from-easylm`: convert, upload and submit, each step once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.compat.easylm.test_conversions import places  # noqa: F401
from tests.job_clients import DATASET, StandInClients
from weft.cli.main import main
from weft.launch.job_steps import RECORD

FOLDER = Path("eval-jobs/tulu")
MODEL = FOLDER / "model" / "tulu"
BEAKER = ["--workspace", "o/w"]
UPLOAD = ["beaker", "dataset", "create", str(MODEL), "--name", "tulu", *BEAKER]


@pytest.fixture
def clients(places: Path, monkeypatch: pytest.MonkeyPatch) -> StandInClients:  # noqa: F811
    monkeypatch.chdir(places)
    made = StandInClients(places / "clients", "beaker", "sbatch")
    monkeypatch.setenv("PATH", made.path)
    return made


def submit(*words: str, checkpoint: str = "params::out", size: str = "json::config.json") -> int:
    given = ["--model_name", "tulu", "--from-easylm", checkpoint, "--model_size", size]
    more = words or BEAKER
    return main(["eval", "submit", *given, "--tokenizer_path", "tokenizer", *more])


def list_verbs(clients: StandInClients) -> list[str]:
    return [call[1] for call in clients.calls]


def test_three_steps_and_a_second_run(
    clients: StandInClients, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(*BEAKER, "--print") == 0
    plan = [line for line in capsys.readouterr().out.splitlines() if line.startswith("$ ")]
    assert not FOLDER.exists() and clients.calls == []
    assert submit() == 0
    assert clients.calls[0] == UPLOAD and list_verbs(clients) == ["dataset", "experiment"]
    assert (MODEL / "model.safetensors").is_file()
    assert DATASET in (FOLDER / "tulu.beaker.yaml").read_text()
    out = capsys.readouterr().out
    assert len(plan) == 3 and all(f"{line}\n" in out for line in plan)
    assert submit() == 0
    out = capsys.readouterr().out
    assert [line.split(",")[0] for line in out.splitlines()] == [
        "convert: skipped",
        "upload: skipped",
        "submit: skipped",
    ]
    assert len(clients.calls) == 2
    assert submit(*BEAKER, "--print") == 0
    out = capsys.readouterr().out
    assert "convert: finished" in out and f"upload: finished, dataset {DATASET}" in out


def test_on_slurm_nothing_is_uploaded(clients: StandInClients, places: Path) -> None:  # noqa: F811
    assert submit("--system", "slurm") == 0
    assert [call[0] for call in clients.calls] == ["sbatch"]
    assert f"suite {places / MODEL} " in (FOLDER / "tulu.slurm.sh").read_text()


def test_a_run_continues_after_a_failed_upload(clients: StandInClients) -> None:
    clients.answer("beaker-dataset", "error: conflict\n", code=4)
    assert submit() == 4
    before = (MODEL / "model.safetensors").stat()
    clients.answer("beaker-dataset", f"Uploading tulu to {DATASET}\n")
    assert submit() == 0
    assert (MODEL / "model.safetensors").stat().st_mtime_ns == before.st_mtime_ns
    assert list_verbs(clients) == ["dataset", "dataset", "experiment"]


def append_to_weights() -> None:
    with (MODEL / "model.safetensors").open("ab") as file:
        file.write(b"x")


@pytest.mark.parametrize(
    "damage",
    [
        append_to_weights,
        (MODEL / "config.json").unlink,
        lambda: shutil.rmtree(MODEL),
        lambda: (FOLDER / RECORD).write_text("{"),
    ],
)
def test_a_damaged_step_is_repeated(
    damage: Callable[[], object], clients: StandInClients, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit() == 0
    whole = (MODEL / "model.safetensors").read_bytes()
    damage()
    (MODEL.parent / ".tulu.0123abcd.tmp").mkdir()  # of a conversion that was killed
    capsys.readouterr()
    assert submit() == 0
    assert "$ weft easylm convert_easylm_to_hf" in capsys.readouterr().out
    assert (MODEL / "model.safetensors").read_bytes() == whole
    assert not (MODEL.parent / ".tulu.0123abcd.tmp").exists()


def test_a_conversion_that_was_interrupted_is_repeated(
    clients: StandInClients, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(words: object) -> int:
        MODEL.mkdir(parents=True)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("weft.compat.easylm.commands.main", interrupt)
        assert submit() == 130
    assert clients.calls == []
    assert submit() == 0
    assert f"convert: repeated, {MODEL} is incomplete" in capsys.readouterr().out
    assert list_verbs(clients) == ["dataset", "experiment"]


def test_the_same_model_is_uploaded_once(clients: StandInClients) -> None:
    assert submit() == 0
    append_to_weights()
    assert submit() == 0
    assert list_verbs(clients) == ["dataset", "experiment"]


def test_another_checkpoint_is_another_model(
    clients: StandInClients, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit() == 0
    clients.answer("beaker-dataset", "Uploading tulu to 01OTHER\n")
    assert submit(checkpoint="out/streaming_params_10") == 0
    assert "convert: repeated" in capsys.readouterr().out
    assert list_verbs(clients) == ["dataset", "experiment"] * 2
    assert "01OTHER" in (FOLDER / "tulu-2.beaker.yaml").read_text()


def test_a_folder_of_somebody_else_is_left_alone(
    clients: StandInClients, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "submit", "--model_name", "tulu", "--location", "01A", *BEAKER]) == 0
    MODEL.mkdir(parents=True)
    (MODEL / "mine").write_text("x")
    assert submit() == 2
    assert "exists already, and was not made by this command" in capsys.readouterr().err
    assert (MODEL / "mine").read_text() == "x" and list_verbs(clients) == ["experiment"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": "7c"}, "--model_size=7c: unknown size; known are 1b, 3b, 7b"),
        ({"size": "7c"}, "did you mean 7b or 7bcode?"),
        ({"size": "7B"}, "--model_size=7B: unknown size; did you mean 7b"),
        ({"size": "debug"}, "unlike a model of this size"),
        ({"checkpoint": "params::otu"}, "--from-easylm=params::otu: there is no such file"),
        ({"checkpoint": "prams::out"}, "did you mean params::?"),
    ],
)
def test_a_checkpoint_that_cannot_be_converted(
    changes: dict[str, str],
    message: str,
    clients: StandInClients,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in ([], [*BEAKER, "--print"]):
        assert submit(*words, **changes) == 2
        assert message in capsys.readouterr().err
    assert not Path("eval-jobs").exists() and clients.calls == []


def test_a_tokenizer_that_is_not_there(
    clients: StandInClients, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(*BEAKER, "--tokenizer_path", "tokenizer.model") == 2
    assert "--tokenizer_path tokenizer.model: there is no such file" in capsys.readouterr().err
    Path("tokenizer.model").write_bytes(b"damaged")
    assert submit(*BEAKER, "--tokenizer_path", "tokenizer.model") == 2
    assert "error: tokenizer.model: " in capsys.readouterr().err
    assert not Path("eval-jobs").exists()


def test_changes_of_a_size(clients: StandInClients) -> None:
    update = ["--update_llama_config", "{'rope_theta': 5e5}"]
    assert submit(*BEAKER, *update) == 0
    assert "500000" in (MODEL / "config.json").read_text()
    clients.answer("beaker-dataset", "Uploading tulu to 01OTHER\n")
    assert submit() == 0, "without the change it is another model"
    assert list_verbs(clients) == ["dataset", "experiment"] * 2
