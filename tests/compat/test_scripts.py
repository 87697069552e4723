"""Open-Assistant's commands with the arguments of its guide, and ReaL's script for pipelines."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.checkpoints.test_stages import contents, llama
from tests.tiny import make_llama
from weft.cli.conversation import Conversation
from weft.cli.main import main
from weft.compat.scripts import COMMANDS, build_command, run
from weft.compat.triton_command import find_triton_model
from weft.errors import ConfigError
from weft.scripts import transform_to_pipe_ckpt

RLHF = ["defaults", "defaults_rlhf", "pythia_rlhf", "oasst_export_latin_cyrillic_rlhf"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made(script: str, arguments: str, **environment: str) -> str:
    return " ".join(build_command(script, arguments.split(), environment))


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        (
            "trainer_sft",
            "--configs galactica-125m",
            "quickstart sft --configs defaults galactica-125m",
        ),
        (
            "trainer_sft",
            "--configs defaults galactica-125m --deepspeed",
            "quickstart sft --configs defaults galactica-125m --deepspeed",
        ),
        (
            "trainer_sft",
            "--configs oasst_export_eu,galactica-125m --learning_rate 2e-6 --log_wandb false",
            "quickstart sft --configs defaults oasst_export_eu galactica-125m learning_rate=2e-6 "
            "log_wandb=false",
        ),
        (
            "trainer_sft",
            "--configs pythia-1b --resume_from_checkpoint --rng_seed 3 --local_rank 0 "
            "--show_dataset_stats",
            "quickstart sft --configs defaults pythia-1b rng_seed=3 --verbose "
            "--resume_from_checkpoint",
        ),
        (
            "trainer_sft",
            "--configs pythia-1b --no-eval_size --no-deepspeed --wandb-entity me",
            "quickstart sft --configs defaults pythia-1b eval_size=null logger.wandb.entity=me",
        ),
        (
            "trainer_sft",
            "--configs a --dry-run max_steps=3",
            "quickstart sft --configs defaults a --dry-run max_steps=3",
        ),
        (
            "trainer_rm",
            "--configs defaults_rm oasst-rm-1-pythia-1b",
            "quickstart rw --configs defaults_rm oasst-rm-1-pythia-1b",
        ),
        (
            "trainer_rl",
            f"--configs {' '.join(RLHF)} --batch_size 2",
            f"quickstart ppo --configs {' '.join(RLHF)} batch_size=2",
        ),
        (
            "model_cli",
            "--model_path m",
            "chat m --max-new-tokens 200 --top-p 0.9 --temperature 0.8",
        ),
        (
            "model_cli",
            "--model_path m --top_k 5 --do-sample false --format v2.5",
            "chat m --max-new-tokens 200 --top-p 0.9 --temperature 0 --top-k 5 --format v2.5",
        ),
        (
            "model_chat",
            "--model_path m --bot_name Joi --format v2.5",
            "chat m --max-new-tokens 200 --top-k 40 --temperature 1.0 --format v2.5",
        ),
        (
            "model_cli",
            "--model_path m --no-history",
            "chat m --max-new-tokens 200 --top-p 0.9 --temperature 0.8 --no-history",
        ),
        (
            "check_dataset_counts",
            "--datasets all --mode sft",
            "data counts --datasets all --mode sft dataset.valid_split=0.2 --output "
            "dataset_counts.csv",
        ),
        (
            "check_dataset_counts",
            "--datasets webgpt squad_v2 --mode rm --output_path c.csv --detect_language",
            "data counts --datasets webgpt squad_v2 --mode rm dataset.valid_split=0.2 --output "
            "c.csv --detect-language",
        ),
        (
            "to_triton",
            "--configs pythia_rlhf --triton_mode rm",
            "convert triton andreaskoepf/oasst-rm-2-pythia-1.4b-10000 --triton_mode rm",
        ),
        (
            "to_triton",
            "--configs pythia_rlhf --triton_mode sft",
            "convert triton andreaskoepf/oasst-sft-4-pythia-12b-epoch-3.5 --triton_mode sft",
        ),
    ],
)
def test_the_weft_command(script: str, arguments: str, words: str) -> None:
    assert made(script, arguments) == words


def test_the_servers_of_the_environment_go_over_those_of_the_sections() -> None:
    words = made(
        "trainer_rl", "--configs pythia_rlhf", TRITON_HOST_RM="h:1/rm", TRITON_HOST_REF="h:2/sft"
    )
    assert (
        words
        == "quickstart ppo --configs pythia_rlhf triton_host_rm=h:1/rm triton_host_sft=h:2/sft"
    )


def test_a_value_with_blanks_is_quoted() -> None:
    words = build_command(
        "trainer_sft", ["--configs", "a", "--system_prefix", "You're Joi, a bot."], {}
    )
    assert words[-1] == "system_prefix='You\\'re Joi, a bot.'"
    assert build_command("model_cli", ["--model_path", "m", "--system_prefix", "Be kind."], {})[
        -2:
    ] == [
        "--system",
        "Be kind.",
    ]


def test_flags_that_change_nothing_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    made("model_chat", "--model_path m --bot_name Joi --cache_dir c --per-digit-tokens")
    said = capsys.readouterr().err.splitlines()
    assert [line.split(" is left out: ")[0] for line in said] == [
        "--cache_dir",
        "--bot_name",
        "--per-digit-tokens",
    ]


def test_the_newest_run_of_an_output_dir_is_talked_to(here: Path) -> None:
    for index, trial in enumerate(("a", "b")):
        folder = here / "saved_model" / "sft" / trial / "checkpoints"
        folder.mkdir(parents=True)
        import os

        os.utime(folder, (index, index))
    assert made("model_cli", "--model_path saved_model").split()[1] == "saved_model/sft/b"


@pytest.mark.parametrize(
    ("script", "arguments", "wrong"),
    [
        ("trainer_sft", "", "--configs: needs names of sections"),
        ("trainer_sft", "defaults", "'defaults': is not an argument; arguments are --configs"),
        ("trainer_sft", "--configs a --learning_rate", "--learning_rate: needs a value"),
        ("model_cli", "--max_new_tokens 3", "--model_path is missing"),
        ("model_cli", "--model_path m --load_checkpoint x.pt", "reads a pickled file"),
        ("model_chat", "--model_path m --format legacy", "--format legacy: must be v2 or v2.5"),
        (
            "model_chat",
            "--model_path m --temprature 3",
            "unknown argument '--temprature'; did you mean --temperature?",
        ),
        (
            "to_triton",
            "--configs pythia_rlhf --triton_mode rf",
            "--triton_mode rf: must be rm or sft",
        ),
        (
            "to_triton",
            "--configs defaults_rlhf --triton_mode rm",
            "no section names a model in rank_config.model_name",
        ),
    ],
)
def test_what_is_wrong_is_said(script: str, arguments: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(wrong)):
        made(script, arguments)


def test_a_model_of_the_command_line() -> None:
    assert find_triton_model(["pythia_rlhf"], "rm", ["rank_config.model_name=mine"]) == "mine"


def test_a_script_prints_its_command_and_runs_it(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("trainer_sft", ["--configs", "unheard-of", "--rng_seed", "3"]) == 2
    captured = capsys.readouterr()
    assert captured.out.startswith(
        "$ weft quickstart sft --configs defaults unheard-of rng_seed=3\n"
    )
    assert "unknown section 'unheard-of'" in captured.err
    assert run("trainer_sft", []) == 2


@pytest.mark.parametrize("script", sorted(COMMANDS))
def test_every_script_is_among_the_examples(
    script: str, repo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = repo / "examples" / "open_assistant" / f"{script}.py"
    assert len(file.read_text().splitlines()) <= 10
    monkeypatch.setattr(sys, "argv", [str(file), "--no-such-argument"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(file), run_name="__main__")
    assert ended.value.code == 2 and capsys.readouterr().err.startswith("error: ")


def test_reals_script_writes_a_file_for_each_stage(here: Path) -> None:
    source = str(llama(here / "m"))
    words = ["--model_dir", source, "--model_type", "llama", "--num_stages", "3", "--output_dir"]
    assert transform_to_pipe_ckpt.main([*words, str(here / "b")]) == 0
    assert contents(here / "b") == contents(here / "m")
    assert len(list((here / "b").glob("model-*.safetensors"))) == 3


def test_open_assistants_form_of_a_model_that_was_trained_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = make_llama(tmp_path / "model", chat=False)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|prompter|>", "<|prefix_begin|>", "<|prefix_end|>"]}
    )
    tokenizer.save_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model)
    network.resize_token_embeddings(len(tokenizer))
    network.save_pretrained(model)
    seen: list[str | None] = []
    monkeypatch.setattr(
        Conversation,
        "run_until_end",
        lambda chat: seen.append(
            chat.tokenizer.render([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
        ),
    )
    assert main(["chat", "--model_path", str(model), "--format", "v2"]) == 0
    assert seen == ["<|prompter|>Hi</s><|assistant|>"]
