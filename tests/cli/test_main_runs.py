"""Whole runs from the command line on a tiny model: the metrics and files that outside code relies
on.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tiny import make_llama, pair_rows, prompt_answer_rows, prompt_rows, write_jsonl
from weft.cli.main import main

TRAINING = {"loss", "grad_norm", "learning_rate", "num_tokens", "tokens_per_second", "mfu"}
POLICY = TRAINING | {
    "kl",
    "entropy",
    "clip_ratio",
    "approx_kl",
    "importance_ratio_max",
    "sampler_logprob_diff",
}
REWARD = {"reward", "reward_std", "frac_reward_zero_std"}
GENERATED = {"response_length", "truncated_fraction"}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("material")
    make_llama(folder / "m")
    write_jsonl(folder / "sft.jsonl", prompt_answer_rows(8))
    write_jsonl(folder / "pairs.jsonl", pair_rows(8))
    write_jsonl(folder / "prompts.jsonl", prompt_rows(8))
    return folder


def run(material: Path, tmp_path: Path, name: str, *words: str) -> tuple[Path, dict[str, Any]]:
    """Run two steps, and return (directory of the run, its last metrics)."""
    common = [
        "experiment_name=e",
        "trial_name=t",
        f"fileroot={tmp_path}",
        "dataset.train_bs_n_seqs=4",
        "max_steps=2",
    ]
    assert (
        main(
            [
                "quickstart",
                name,
                *common,
                "progress=false",
                *(w.replace("@", f"{material}/") for w in words),
            ]
        )
        == 0
    )
    directory = tmp_path / "e" / "t"
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert {"epoch", "step_seconds", "peak_memory_gb"} <= lines[-1].keys()
    return directory, lines[-1]


def under(line: dict[str, Any], node: str) -> set[str]:
    """Return the metrics of a node."""
    return {key.removeprefix(f"{node}/") for key in line if key.startswith(f"{node}/")}


def test_sft(material: Path, tmp_path: Path) -> None:
    words = (
        "model.path=@m",
        "dataset.train_path=@sft.jsonl",
        "dataset.valid_path=@sft.jsonl",
        "model.optimizer.lr=1e-3",
    )
    directory, line = run(material, tmp_path, "sft", *words)
    assert under(line, "train") >= TRAINING | {"accuracy", "perplexity"}
    assert {"eval/loss", "eval/sft/loss", "time/train"} <= line.keys()
    assert (directory / "checkpoints" / "model" / "step2" / "model.safetensors").is_file()
    assert (
        json.loads((directory / "metrics.jsonl").read_text().splitlines()[0])["train/learning_rate"]
        == 1e-3
    )


def test_reward_model_then_ppo_with_it_and_a_function(material: Path, tmp_path: Path) -> None:
    directory, line = run(
        material, tmp_path / "a", "rw", "model.path=@m", "dataset.train_path=@pairs.jsonl"
    )
    assert under(line, "train") >= TRAINING | {"accuracy", "margin", "kendalltau"}
    judge = directory / "checkpoints" / "model" / "step2"
    words = ("actor.path=@m", f"rew.path={judge}", "reward=length", "dataset.path=@prompts.jsonl")
    words += ("ppo.gen.max_new_tokens=4", "ppo.ppo_n_minibatches=2", "ppo.ppo_epochs=2")
    directory, line = run(material, tmp_path / "b", "ppo", *words)
    assert under(line, "actor_train") >= POLICY
    assert under(line, "critic_train") >= TRAINING | {"value_loss", "explained_variance"}
    assert under(line, "rew_inf") >= REWARD
    assert under(line, "reward") >= REWARD | {"reward/length", "reward/model"}
    assert under(line, "actor_gen") >= GENERATED
    assert {
        f"time/{node}"
        for node in ("actor_gen", "ref_inf", "critic_inf", "advantages", "critic_train")
    } <= line.keys()
    assert line["actor_train/sampler_logprob_diff"] <= 1e-6
    assert sorted(p.name for p in (directory / "checkpoints").iterdir()) == ["actor", "critic"]
    log = (directory / "log.txt").read_text()
    assert (
        "4 prompts x 1 = 4 completions, 4 optimizer steps per model" in log
        and "completions of at most 4 tokens" in log
    )
    assert "a step's completions are trained on in minibatches of 2, for 2 epochs" in log


def test_dpo(material: Path, tmp_path: Path) -> None:
    _, line = run(
        material, tmp_path, "dpo", "actor.path=@m", "dataset.train_path=@pairs.jsonl", "beta=0.2"
    )
    wanted = {
        "rewards/chosen",
        "rewards/rejected",
        "rewards/margins",
        "rewards/accuracies",
        "logps/chosen",
        "logps/rejected",
    }
    assert under(line, "actor_train") >= TRAINING | wanted


@pytest.mark.parametrize(
    ("loss_type", "more", "node"),
    [
        ("bco", (), "bco_shift"),
        ("aot", (), "optimal_transport"),
        ("apo_zero", ("dpo.rpo_alpha=0.5",), "ref_inf"),
    ],
)
def test_kin_of_dpo(
    material: Path, tmp_path: Path, loss_type: str, more: tuple[str, ...], node: str
) -> None:
    words = (
        "actor.path=@m",
        "dataset.train_path=@pairs.jsonl",
        "dataset.valid_split=0.25",
        f"dpo.loss_type={loss_type}",
    )
    _, line = run(material, tmp_path, "dpo", *words, *more)
    assert under(line, "actor_train") >= TRAINING | {"rewards/margins"}
    assert f"time/{node}" in line and "eval/loss" in line
    assert ("actor_train/nll" in line) == bool(more)


def test_grpo(material: Path, tmp_path: Path) -> None:
    words = (
        "actor.path=@m",
        "dataset.path=@prompts.jsonl",
        "reward=length",
        "grpo.gen.max_new_tokens=4",
    )
    _, line = run(material, tmp_path, "grpo", *words, "grpo.group_size=3", "grpo.mini_batch_size=4")
    assert under(line, "actor_train") >= POLICY
    assert under(line, "reward") >= REWARD
    assert under(line, "actor_gen") >= GENERATED


def test_gen(material: Path, tmp_path: Path) -> None:
    words = (
        "model.path=@m",
        "dataset.path=@prompts.jsonl",
        "gen.max_new_tokens=4",
        "gen.samples_per_prompt=2",
    )
    directory, _ = run(material, tmp_path, "gen", *words)
    rows = [json.loads(line) for line in (directory / "generations.jsonl").read_text().splitlines()]
    assert len(rows) == 16
    assert rows[0].keys() >= {
        "id",
        "prompt",
        "completion",
        "completion_ids",
        "logprobs",
        "finish_reason",
    }
    assert rows[0]["prompt"] == prompt_rows(1)[0]["prompt"]
    assert len(rows[0]["logprobs"]) == len(rows[0]["completion_ids"]) <= 4


def test_the_same_command_again_is_refused_and_changes_nothing(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("model.path=@m", "dataset.train_path=@sft.jsonl")
    directory, _ = run(material, tmp_path, "sft", *words)
    before = {p: p.stat().st_mtime_ns for p in directory.rglob("*") if p.is_file()}
    capsys.readouterr()
    with pytest.raises(AssertionError):
        run(material, tmp_path, "sft", *words)
    assert "contains a finished run" in capsys.readouterr().err
    assert {p: p.stat().st_mtime_ns for p in directory.rglob("*") if p.is_file()} == before


KEYED = """
def f(prompts, completions, *, api_key, url, **columns):
    assert (api_key, url) == ("sk-s3cret", "http://h/x?k=s3cret")
    return [float(len(text)) for text in completions]
"""


def test_no_secret_is_written_and_the_same_command_resumes(
    material: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "keyed.py").write_text(KEYED)
    part = (
        f"name: '{tmp_path}/keyed.py:f', args: {{api_key: sk-s3cret, url: 'http://h/x?k=s3cret'}}"
    )
    words = [
        "actor.path=@m",
        "dataset.path=@prompts.jsonl",
        f"reward=[{{{part}}}]",
        "grpo.gen.max_new_tokens=4",
        "grpo.group_size=2",
    ]
    monkeypatch.setattr(sys, "argv", ["weft", "quickstart", "grpo", *words])
    directory, _ = run(material, tmp_path, "grpo", *words)
    written = [
        path for path in directory.rglob("*") if path.is_file() and b"s3cret" in path.read_bytes()
    ]
    assert not written
    stored = yaml.safe_load((directory / "config.yaml").read_text())["reward"][0]["args"]
    assert stored == {"api_key": "***", "url": "http://h/x?k=***"}
    with pytest.raises(AssertionError):  # exit code 2
        run(material, tmp_path, "grpo", *words)
    assert "contains a finished run of this configuration" in capsys.readouterr().err
    for command in (
        ["show", str(directory)],
        ["report", str(directory)],
        ["show", str(directory), "--config"],
    ):
        assert main(command) == 0
        assert "s3cret" not in "".join(capsys.readouterr())
    assert (
        main(["quickstart", "grpo", "--config", str(directory / "config.yaml"), "trial_name=other"])
        == 2
    )
    said = capsys.readouterr().err
    assert (
        "reward[0].args.api_key, reward[0].args.url: the value is ***" in said
        and "${oc.env:NAME}" in said
    )
    monkeypatch.setenv("WEFT_TEST_KEY", "sk-s3cret")
    monkeypatch.setenv("WEFT_TEST_URL", "http://h/x?k=s3cret")
    again = "args: {api_key: '${oc.env:WEFT_TEST_KEY}', url: '${oc.env:WEFT_TEST_URL}'}"
    words[2] = f"reward=[{{name: '{tmp_path}/keyed.py:f', {again}}}]"
    with pytest.raises(AssertionError):
        run(material, tmp_path, "grpo", *words)
    assert "contains a finished run of this configuration" in capsys.readouterr().err


@pytest.mark.parametrize(
    "url",
    ["http://me:s3cret@127.0.0.1:9/v1", "http://127.0.0.1:9/v1?key=s3cret", "me:s3cret@h:1/v1"],
)
def test_no_message_shows_a_secret(
    url: str, material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [
        "quickstart",
        "grpo",
        "experiment_name=e",
        "trial_name=t",
        f"fileroot={tmp_path}",
        f"actor.path={material}/m",
        f"dataset.path={material}/prompts.jsonl",
    ]
    for words in (
        [f"reward={{name: judge, args: {{url: '{url}', model: m}}}}"],
        [f"reward=[{{name: judge, args: {{url: '{url}', model: m, api_key: s3cret}}}}]"],
        [f"rew.url={url}"],
        [f"ref.url={url}", "reward=length"],
        [f"reward=length:{url}"],
        ["reward=[{name: length, args: {token: s3cret, password: s3cret}}]"],
    ):
        assert main([*common, *words]) == 2
        assert "s3cret" not in "".join(capsys.readouterr())
