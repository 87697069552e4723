"""`weft plan run`: forecasts of time and memory from config.json, and of better options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch.test_plan import LARGE
from tests.tiny import make_llama, prompt_answer_rows, write_jsonl
from weft.cli.main import main

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forecast")
    (folder / "large").mkdir()
    (folder / "large" / "config.json").write_text(json.dumps(LARGE))
    make_llama(folder / "tiny")
    write_jsonl(folder / "rows.jsonl", prompt_answer_rows())
    return folder


@pytest.fixture(autouse=True)
def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


LARGE_WORDS = ("sft", "model.path=large", "search.gpu=H100", "dataset.max_seqlen=1024")


def report(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", "run", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.slow
def test_a_model_that_does_not_fit_and_options_that_do(capsys: pytest.CaptureFixture[str]) -> None:
    """8 billion parameters need 18 bytes each: 134.6 GiB, and activations."""
    found = report(capsys, *LARGE_WORDS, "max_steps=100")
    assert (
        not found["fits"] and found["memory_gb"] > 8.03e9 * 18 / 2**30 > found["usable_memory_gb"]
    )
    assert found["run_seconds"] == pytest.approx(100 * found["step_seconds"])
    tokens = 32 * 1024
    assert found["tokens_per_second"] == pytest.approx(tokens / found["step_seconds"])
    # Six FLOPs per token and parameter, without the embedding, at 989 TFLOP/s at most
    least = 6 * (8.03e9 - 128256 * 4096) * tokens / 989e12
    assert least <= found["step_seconds"] <= 4 * least
    assert found["bound"]["products"] > 0.5
    options = {each["options"]: each for each in found["options"]}
    assert all(each["fits"] for each in options.values())
    assert "model.gradient_checkpointing=true model.lora.r=16" in options
    assert "model.gradient_checkpointing=true model.optimizer.offload=true" in options
    rates = [each["tokens_per_second"] for each in found["options"]]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.slow
def test_each_option_can_be_typed(capsys: pytest.CaptureFixture[str]) -> None:
    """The forecast of an option is that of the run with this option."""
    options = report(capsys, *LARGE_WORDS)["options"]
    for each in options[:2] + options[-1:]:
        again = report(capsys, *LARGE_WORDS, *each["options"].split(), "--no-options")
        assert again["step_seconds"] == pytest.approx(each["step_seconds"])
        assert again["memory_gb"] == pytest.approx(each["memory_gb"])
        assert again["fits"] and again["devices"] == each["devices"]


@pytest.mark.slow
def test_a_model_that_fits_and_faster_options(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*LARGE_WORDS, "n_gpus_per_node=8", "model.layout=d8", "gradient_checkpointing=true")
    found = report(capsys, *words)
    assert found["fits"]
    options = {each["options"]: each for each in found["options"]}
    without = options["model.gradient_checkpointing=false"]
    assert without["step_seconds"] < found["step_seconds"]
    assert without["memory_gb"] > found["memory_gb"]
    for each in options.values():
        faster = each["tokens_per_second"] > 1.01 * found["tokens_per_second"]
        assert each["fits"] and (faster or each["memory_gb"] < 0.91 * found["memory_gb"])


@pytest.mark.slow
def test_models_in_float32_are_compared_with_bfloat16(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = report(capsys, *LARGE_WORDS, "model.dtype=float32")["options"]
    assert options and all(each["options"].startswith("model.dtype=bfloat16") for each in options)


@pytest.mark.slow
def test_the_page_names_times_memory_and_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "run", *LARGE_WORDS, "--steps", "1000"]) == 0
    page = capsys.readouterr().out
    assert "s per step (" in page and "for 1,000 steps" in page and "  bound by: products" in page
    assert "memory: does NOT fit: the device needs about" in page
    assert "for 32 rows per step, rows of 512 + 512 tokens" in page and "it would fit with:" in page
    assert main(["plan", "run", *LARGE_WORDS, "--no-options"]) == 0
    page = capsys.readouterr().out
    assert "set max_steps=N" in page and "options  " not in page


def test_products_in_float32_are_named_on_gpus_only(capsys: pytest.CaptureFixture[str]) -> None:
    for words, call in (
        (("model.dtype=float32",), "s, mostly products in float32\n"),
        (("model.dtype=bfloat16",), "s, mostly products\n"),
        (("model.dtype=float32", "device=cpu"), "s, mostly products\n"),
    ):
        assert main(["plan", "run", *LARGE_WORDS, *words, "--no-options"]) == 0
        assert call in capsys.readouterr().out
    found = report(capsys, *LARGE_WORDS, "model.dtype=float32", "--no-options")
    assert found["dtypes"] == {"model": "float32"}


def test_the_options_of_a_small_model(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("sft", "model.path=tiny", "search.gpu=T4", "model.dtype=bfloat16", "--no-data")
    assert main(["plan", "run", *words]) == 0
    page = capsys.readouterr().out
    assert "faster, or with less memory:" in page and "\nas set  " in page
    assert "dataset.train_bs_n_seqs=64" in page


def test_unused_devices_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("sft", "model.path=tiny", "search.gpu=H100", "--no-data", "--no-options")
    assert main(["plan", "run", *words, "n_gpus_per_node=8"]) == 0
    assert "1 of 8 devices used; allocation_mode=search" in capsys.readouterr().out
    assert main(["plan", "run", *words, "n_gpus_per_node=8", "model.layout=d8"]) == 0
    assert "devices used" not in capsys.readouterr().out


def test_a_search_on_this_cpu_is_no_plan_file(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("sft", "model.path=tiny", "search.gpu=H100", "device=cpu", "--no-data")
    search = ("allocation_mode=search", "n_gpus_per_node=2", "--no-options")
    assert main(["plan", "run", *words, *search]) == 0
    page = capsys.readouterr().out
    assert "estimated speeds of a CPU" in page and "was made for" not in page


def test_rows_give_the_lengths_and_the_steps(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("sft", "model.path=tiny", "device=cpu", "dataset.path=rows.jsonl", "--no-options")
    found = report(capsys, *words, "dataset.train_bs_n_seqs=4")
    assert found["steps"] == 4 and found["rows_per_step"] == 4 and found["epochs"] == 1
    assert main(["plan", "run", *words, "dataset.train_bs_n_seqs=4", "max_steps=6"]) == 0
    assert "  length of the run: 6 steps, 1.5 epochs" in capsys.readouterr().out
    assumed = report(capsys, *words, "dataset.train_bs_n_seqs=4", "--no-data")
    assert assumed["steps"] is None and assumed["num_tokens"] > found["num_tokens"]
    # Rows that cannot be read do not matter, but are mentioned.
    assert main(["plan", "run", *words[:2], "search.gpu=T4", *words[3:], "model.path=large"]) == 0
    assert "lengths are assumed, since no rows are read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["search.gpu=H101"], "did you mean H100"),
        (["device=cuda", "search.gpu=null"], "name a GPU, such as search.gpu=H100"),
        (["search.profile=rows.jsonl"], "rows.jsonl: the profile is damaged"),
        (["search.prompt_tokens=0"], "search.prompt_tokens=0: must be at least 1"),
        (["--steps", "0"], "a run has at least one step"),
        (["allocation_mode=none.yaml"], "allocation_mode=none.yaml: there is no such file"),
        (["model.path=nowhere/at/all"], "nowhere/at/all"),
        (["--stepz", "1"], "did you mean --steps"),
    ],
)
def test_invalid_input_has_exit_code_2(
    more: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "run", *LARGE_WORDS, *more]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("key", SIZES)
def test_a_size_that_config_json_lacks_is_named_by_every_command(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {name: value for name, value in LARGE.items() if name != key}
    (tmp_path / "config.json").write_text(json.dumps(values))
    words = ["sft", f"model.path={tmp_path}", "search.gpu=H100"]
    prices = ("--price", "H100=1", "--devices", "1")
    for command in (
        ["run", *words],
        ["search", *words, "n_gpus_per_node=2"],
        ["cost", *words, *prices],
        ["memory", str(tmp_path)],
    ):
        assert main(["plan", *command]) == 2
        assert f"{tmp_path}/config.json: lacks '{key}'" in capsys.readouterr().err


PLAN = 'weft_plan: 1\ncalls:\n  train: {layout: LAYOUT, devices: "0-3"}\nrun: {devices: 4}\n'


@pytest.mark.parametrize(
    ("layout", "more", "told"),
    [
        ("t3", ["n_gpus_per_node=4"], "calls.train.devices='0-3': layout d1f1t3p1c1e1 needs 3"),
        (
            "t4",
            ["n_gpus_per_node=8"],
            "plan.yaml:4: this plan is for 4 devices, and this run has 8",
        ),
        ("t4", ["n_gpus_per_node=4", "model.layout=d4"], "and model.layout=d4 sets d4f4t1p1c1e1"),
        ("t4", ["n_gpus_per_node=4", "train.layout=d4"], "and train.layout=d4 sets d4f4t1p1c1e1"),
        ("d2c2e1x", ["n_gpus_per_node=4"], "plan.yaml:3: calls.train.layout=d2c2e1x"),
        ("d2e2t2", ["n_gpus_per_node=4"], "plan.yaml:3: calls.train.layout=d2f1t2p1c1e2: a llama"),
    ],
)
def test_a_plan_that_does_not_fit_the_run_is_refused(
    layout: str, more: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("plan.yaml").write_text(PLAN.replace("LAYOUT", layout))
    assert main(["plan", "run", *LARGE_WORDS, "allocation_mode=plan.yaml", *more]) == 2
    assert told in capsys.readouterr().err


def test_a_plan_that_nobody_has_edited_is_as_its_file_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The rows and the model's context are shorter than what the plan of a search assumes."""
    words = ("sft", "model.path=tiny", "device=cpu", "n_gpus_per_node=2")
    assert main(["plan", "search", *words, "--output", "found.yaml"]) == 0
    more = ("dataset.path=rows.jsonl", "allocation_mode=found.yaml")
    for dry_run in ("--dry-run", "--dry-run=config"):
        capsys.readouterr()
        assert main(["quickstart", *words, *more, dry_run]) == 0
        assert "found.yaml: " not in capsys.readouterr().out


def test_a_plan_of_longer_prompts_than_the_run_has_is_no_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("sft", "model.path=large", "search.gpu=H100", "n_gpus_per_node=8")
    assert main(["plan", "search", *words, "--output", "long.yaml"]) == 0
    more = ("dataset.path=rows.jsonl", "dataset.max_prompt_len=16", "allocation_mode=long.yaml")
    assert main(["quickstart", *words, *more, "--dry-run=config"]) == 0


def test_an_edited_plan_is_priced_and_compared(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*LARGE_WORDS, "n_gpus_per_node=4", "allocation_mode=plan.yaml", "--no-options")
    estimated = 'devices: "0-3", estimated: {seconds: 9.0}'
    Path("plan.yaml").write_text(
        PLAN.replace("LAYOUT", "d2t2").replace('devices: "0-3"', estimated)
        + "estimates: {device: A100}\n"
    )
    assert main(["plan", "run", *words]) == 0
    page = capsys.readouterr().out
    assert "plan.yaml: was made for A100, and this run is on H100" in page
    assert "plan.yaml: other estimates than in the file" in page and "train 9 s there" in page
    assert main(["quickstart", *words[:-1], "dataset.path=rows.jsonl", "--dry-run=config"]) == 0
    page = capsys.readouterr().out
    assert "train 9 s there" in page and "layout d2f2t2p1c1e1 on devices 0-3" in page
