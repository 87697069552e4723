"""The command `weft`: help, exit codes, and the messages and cost of invalid command lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from weft.apps.quickstart import main as quickstart_app
from weft.cli import main as weft
from weft.errors import Interrupted, RunError, UserError
from weft.experiments import SFTConfig

QUICKSTARTS = ("sft", "rw", "dpo", "online_dpo", "ppo", "grpo", "distill", "gen")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with a model directory and rows."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": 100})
    )
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(*words: str) -> list[str]:
    return ["experiment_name=e", "trial_name=t", *words]


def sft(*words: str) -> list[str]:
    own = {word.split("=")[0] for word in words}
    usual = names("model.path=model", "dataset.train_path=rows.jsonl")
    return ["quickstart", "sft", *(word for word in usual if word.split("=")[0] not in own), *words]


def test_help_and_version_are_exit_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert weft.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(
        f"\n  {command} " in shown
        for command in ("quickstart", "start", "stop", "demo", "chat", "data", "plan", "convert")
    )
    assert weft.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("weft ")


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert weft.main(["quikstart"]) == 2
    assert "did you mean quickstart" in capsys.readouterr().err


def test_an_unknown_quickstart_names_the_nearest(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert weft.main(["quickstart", "sftt", *names()]) == 2
    assert "unknown quickstart 'sftt'; did you mean sft?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--help"], ["quickstart", "ppo", "--help"], ["quickstart", "sft", "--cfg", "job"]]
)
def test_help_and_configuration_load_no_framework(words: list[str], tmp_path: Path) -> None:
    code = (
        "import sys\nfrom weft.cli.main import main\n"
        f"code = main({words!r})\n"
        "print([m for m in ('torch', 'transformers', 'ray') if m in sys.modules], code, "
        "file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.stderr.strip().splitlines()[-1] == "[] 0"


def test_a_wrong_setting_fails_before_torch_is_loaded(folder: Path) -> None:
    code = (
        "import sys\nfrom weft.cli.main import main\n"
        f"code = main({sft('mode=locl')!r})\n"
        "print([m for m in ('torch', 'transformers', 'ray') if m in sys.modules], code, "
        "file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip().splitlines()[-1] == "[] 2"


def test_cfg_job_prints_the_configuration_of_a_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = sft("learning_rate=1e-5", "trial_name=1.10", "dataset.args.k=v")
    assert weft.main([*words, "--cfg", "job"]) == 0
    captured = capsys.readouterr()
    printed = yaml.safe_load(captured.out)
    assert printed["model"]["optimizer"]["lr"] == 1e-5
    assert printed["trial_name"] == "1.10"
    assert printed["dataset"]["args"] == {"k": "v"}
    assert "note: learning_rate is read as model.optimizer.lr" in captured.err
    Path("c.yaml").write_text(captured.out)
    assert weft.main(["quickstart", "sft", "--config", "c.yaml", "--cfg", "job", "seed=9"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == {**printed, "seed": 9}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["model.optmizer.lr=1"],
            "unknown option 'model.optmizer.lr'; did you mean model.optimizer.lr",
        ),
        (
            ["model.optimizer.lr=fast"],
            "model.optimizer.lr='fast': must be a number, such as 0.1 or 1e-5",
        ),
        (["max_steps=1.5"], "max_steps=1.5: must be a whole number"),
        (["seed=-1"], "seed=-1: must be at least 0"),
        (["experiment_name=a_b"], "write experiment_name=a-b"),
        (["trial_name=.a"], "trial_name='.a': must contain only letters, digits, . and -"),
        (["trial_name=a/b"], "trial_name='a/b'"),
        (
            ["trial_name=" + "n" * 300],
            "trial_name: 300 letters; the name of a folder has at most 255",
        ),
        (["model.optimizer.lr=nan"], "model.optimizer.lr=nan: must be a number"),
        (["model.layout=d0"], "model.layout=d0: data is 0"),
        (
            ["model.path=latest"],
            "model.path='latest': no run in ./runs has a checkpoint of actor or model",
        ),
        (["model.path=."], "did you mean model?"),
        (["dataset.train_path=/"], "dataset.train_path='/': is the root of the file system"),
        (["trial_name='a b'"], "write trial_name=a-b"),
        (["mode=locl"], "must be local, ray or slurm (did you mean local?)"),
        (
            ["allocation_mode=search", "n_gpus_per_node=2"],
            "model.path=model/config.json: lacks 'hidden_size'",
        ),
        (["allocation_mode=searc"], "did you mean search"),
        (["allocation_mode=d2x1"], "'x' is unknown"),
        (
            ["model.layout=d2", "model.device_mesh=1"],
            "model.device_mesh='1': layout d2f2t1p1c1e1 needs 2 devices, and 1",
        ),
        (["model.layout=d3f2"], "f=2 does not divide d=3"),
        (["train.layout=d2x1"], "train.layout='d2x1': 'x' is unknown"),
        (
            ["train.device_mesh=3-4"],
            "train.device_mesh='3-4': layout d1f1t1p1c1e1 needs one device, and 2 were given",
        ),
        (
            ["model.device_mesh=5-3"],
            "model.device_mesh='5-3': device numbers must be in ascending order; write 3,4,5",
        ),
        (["n_nodes=2"], "n_nodes=2: mode=local is this machine"),
        (["device=gpu"], "device='gpu': must be cpu, cuda"),
        (["recover_mode=sometimes"], "must be one of auto, resume, disabled"),
        (
            ["dataset.train_path=rosw.jsonl"],
            "dataset.train_path='rosw.jsonl': there is no such file",
        ),
        (
            ["dataset.train_bs_n_seqs=4", "dataset.train_tokens_per_batch=4096"],
            "exclude each other; set one",
        ),
        (
            ["dataset.valid_bs_n_seqs=4", "dataset.valid_tokens_per_batch=4096"],
            "exclude each other; set one",
        ),
        (
            ["dataset.max_seqlen=1024", "dataset.train_tokens_per_batch=100"],
            "cannot hold the longest sequence, 1024 tokens",
        ),
        (
            ["dataset.max_seqlen=1024", "max_tokens_per_microbatch=100"],
            "max_tokens_per_microbatch=100: cannot hold the",
        ),
        (
            ["dataset.max_seqlen=1024", "train.max_tokens_per_microbatch=100"],
            "train.max_tokens_per_microbatch=100: can",
        ),
        (
            ["dataset.type=prompt_anser"],
            "unknown dataset type 'prompt_anser'; did you mean prompt_answer",
        ),
        (["eval_freq_steps=5"], "eval_freq_steps=5: there is nothing to evaluate on"),
        (["eval_at_start=true"], "eval_at_start=true: there is nothing to evaluate on"),
        (["save_best=eval/loss"], "save_best=eval/loss: there is nothing to evaluate on"),
        (["save_best=trian/loss"], "such as train/loss"),
        (["early_stop_patience=2"], "early_stop_patience=2: only used with save_best=METRIC"),
        (["train.interface=trane"], "unknown interface 'trane'; did you mean train"),
        (
            ["train.post_hooks=[offload_optimiser]"],
            "train: unknown hook 'offload_optimiser' (did you mean offload_optimizer?)",
        ),
        (
            ["model.pipeline_stages_per_rank=2"],
            "model.pipeline_schedule=1f1b has one stage per rank, and 2 were asked for",
        ),
        (["train.post_hooks=[[1]]"], "train.post_hooks=[[1]]: hook [1] is not valid"),
        (["dataset.type=prompt"], "key 'completion'"),
        (["model.path=./modle"], "did you mean model?"),
        (["model.path=rows.jsonl"], "is a file"),
        (
            ["model.optimizer.warmup_steps=1", "model.optimizer.warmup_epochs=1"],
            "exclude each other",
        ),
        (["seed=1,2"], "sweep"),
    ],
)
def test_wrong_input_is_exit_2_with_one_message(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert weft.main(sft(*words)) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert len(captured.err.strip().splitlines()) == 1
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("missing", ["model.path", "dataset.train_path"])
def test_missing_arguments_are_named(
    missing: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for word in sft() if not word.startswith(f"{missing}=")]
    assert weft.main(words) == 2
    assert f"{missing} is missing" in capsys.readouterr().err


def test_model_directories_are_looked_into(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "empty").mkdir()
    step = folder / "empty" / "step12"
    step.mkdir()
    assert weft.main(sft("model.path=./empty")) == 2
    assert "has no config.json" in capsys.readouterr().err
    (step / "config.json").write_text("{}")
    assert weft.main(sft("model.path=./empty")) == 2
    assert f"model.path='{Path('empty/step12')}'" in capsys.readouterr().err
    assert weft.main(sft("model.path=./empty/step12")) == 2
    assert "model.init_from_scratch=true" in capsys.readouterr().err
    (step / "config.json").write_text("{")
    assert weft.main(sft("model.path=./empty/step12")) == 2
    assert "is not JSON" in capsys.readouterr().err
    (folder / "none.jsonl").write_text("")
    assert weft.main(sft("dataset.train_path=none.jsonl")) == 2
    assert "the file is empty" in capsys.readouterr().err


def test_debug_shows_the_traceback(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert weft.main(sft("mode=ray", "--debug")) == 2
    assert "Traceback" in capsys.readouterr().err


def raises(error: BaseException) -> Callable[[Sequence[str]], int]:
    def command(_: Sequence[str]) -> int:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UserError("no"), 2, "error: no"),
        (RunError("the disk is full"), 1, "error: the disk is full"),
        (TypeError("oops"), 1, "error: TypeError: oops (--debug shows where)"),
        (
            KeyboardInterrupt(),
            130,
            "stopped at once; rerun the same command to start or resume the run",
        ),
        (Interrupted("stopped by SIGINT after step 3", 2), 130, "after step 3"),
        (Interrupted("stopped by SIGTERM after step 3", 15), 143, "after step 3"),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert weft.run_guarded(raises(error), ["quickstart", "sft"]) == code
    captured = capsys.readouterr().err
    assert message in captured and "Traceback" not in captured
    assert weft.run_guarded(raises(error), ["quickstart", "sft", "--debug"]) == code
    assert "Traceback" in capsys.readouterr().err


def test_unknown_flags_name_the_nearest(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert weft.main(["quickstart", "sft", "--halp"]) == 2
    assert "did you mean --help?" in capsys.readouterr().err
    assert weft.main(["quickstart", "sft", "--cfg", "all"]) == 2
    assert weft.main(["quickstart", "sft", "--import"]) == 2


def test_quickstart_without_a_name_lists_the_quickstarts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert weft.main(["quickstart"]) == 2
    assert "NAME --help" in capsys.readouterr().out
    assert weft.main(["quickstart", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in QUICKSTARTS)


def test_the_module_form_is_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert quickstart_app(["sft", *names()]) == 2
    assert "are missing" in capsys.readouterr().err
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    for module, words in (("weft.apps.main", ["--version"]), ("weft.apps.quickstart", ["--help"])):
        done = subprocess.run(
            [sys.executable, "-m", module, *words],
            capture_output=True,
            text=True,
            check=False,
            env=env,
        )
        assert done.returncode == 0, done.stderr


def test_a_call_still_at_work_does_not_change_the_exit_code(folder: Path) -> None:
    code = """
import sys, threading
import torch
from weft.cli import main as weft
from weft.errors import RunError

def fails():
    work = lambda: [torch.ones(600, 600) @ torch.ones(600, 600) for _ in range(100_000)]
    threading.Thread(target=work, name=weft.WORKER_THREAD, daemon=True).start()
    raise RunError("the run failed")

weft.run_command = lambda words, **more: fails()
sys.argv = ["weft", "quickstart"]
sys.exit(weft.main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (1, "error: the run failed")


def test_the_run_gets_the_configuration(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[Any] = []
    monkeypatch.setattr("weft.launch.run", lambda config, **_: ran.append(config))
    assert weft.main(sft("seed=7", "model.optimizer.lr=1e-5")) == 0
    (config,) = ran
    assert isinstance(config, SFTConfig)
    assert (config.seed, config.model.optimizer.lr, config.dataset.train_path) == (
        7,
        1e-5,
        "rows.jsonl",
    )


def test_openmp_settings_that_are_empty_are_taken_out() -> None:
    environment = {"OMP_NUM_THREADS": " ", "OMP_SCHEDULE": "", "OMP_DYNAMIC": "true", "HOME": ""}
    weft.drop_empty_variables(environment)
    assert environment == {"OMP_DYNAMIC": "true", "HOME": ""}


def test_a_line_about_a_stop_is_broken_between_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(_: Sequence[str]) -> int:
        raise Interrupted(
            "stopped by Ctrl-C after step 12; rerun the same command to resume from there", 2
        )

    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(weft.sys.stderr, "isatty", lambda: True)
    weft.run_guarded(stopped, [])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and max(map(len, lines)) <= 60
    assert " ".join(line.strip() for line in lines).endswith("resume from there")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--learning_rate", "1e-3"],
            "unknown flag '--learning_rate'; options are written key=value: learning_rate=1e-3",
        ),
        (["--model.path", "m", "seed=1"], "options are written key=value: model.path=m"),
        (["--bf16"], "options are written key=value: bf16=true"),
        (["--dry-rn"], "unknown flag '--dry-rn'; did you mean --dry-run?"),
        (["learning_rat=3"], "unknown option 'learning_rat'; did you mean learning_rate?"),
        (["per_device_train_batchsize=3"], "did you mean per_device_train_batch_size"),
    ],
)
def test_common_mistakes_get_the_right_hint(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert weft.main(["quickstart", "sft", *words]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("buffered", ["", "1"])
@pytest.mark.parametrize("words", [["--help"], ["config", "ls"], ["nothing"]], ids=" ".join)
def test_output_that_nobody_reads_is_no_error(
    words: list[str], buffered: str, tmp_path: Path
) -> None:
    """Output is piped as in `weft ... | head -0`, with and without standard error."""
    code = f"from weft.cli.main import main\nraise SystemExit(main({words!r}))"
    for errors in (subprocess.PIPE, subprocess.STDOUT):
        reader, writer = os.pipe()
        os.close(reader)
        environment = {**os.environ, "PYTHONUNBUFFERED": buffered}
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=writer,
            stderr=errors,
            check=False,
            cwd=tmp_path,
            env=environment,
            text=True,
        )
        os.close(writer)
        assert done.returncode in (0, 2, 141)
        if errors == subprocess.PIPE:
            assert (
                "Traceback" not in done.stderr
                and "Broken" not in done.stderr
                and "ignored" not in done.stderr
            )


def test_a_broken_connection_is_reported_if_the_output_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_words: object) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("weft.cli.ls.main", broken)
    assert weft.main(["ls"]) == 1
    assert "BrokenPipeError" in capsys.readouterr().err


def test_a_working_directory_that_was_removed_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for words in (
        ["ls"],
        ["quickstart", "sft", *names()],
        ["show", "latest"],
        ["demo"],
        ["data", "inspect", "a.jsonl"],
    ):
        assert weft.main(words) == 2
        assert capsys.readouterr().err.startswith(
            "error: the working directory was removed; change to another one"
        )
    assert weft.main(["--help"]) == 0
