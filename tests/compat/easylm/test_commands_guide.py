"""The guide's three training commands, from streams, on the `debug` model and 8 simulated devices.

Only paths and sizes differ from those in the guide.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.compat.easylm import guide
from tests.compat.easylm.guide import change
from tests.tiny import make_llama, make_tokenizer, write_jsonl
from weft.cli.main import main

pytestmark = pytest.mark.slow
pytest.importorskip("jax")
pytest.importorskip("weft.compat.easylm.conversions")

DEBUG = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}
UPDATE = "{'vocab_size': 320}"
SIZE = {"load_llama_config": "debug", "update_llama_config": UPDATE}


def talk(number: int, answer: str) -> list[dict[str, str]]:
    question = {"role": "user", "content": f"What is {number} plus {number}?"}
    return [question, {"role": "assistant", "content": answer}]


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows and with streams of a policy and a reward model of the `debug` size."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    folder = tmp_path_factory.mktemp("bucket")
    tokenizer = make_tokenizer(folder / "tokenizer", chat=False)
    make_llama(folder / "policy", chat=False, **DEBUG)
    config = LlamaConfig(vocab_size=len(tokenizer), num_labels=1, pad_token_id=0, **DEBUG)
    LlamaForSequenceClassification(config).save_pretrained(folder / "reward")
    tokenizer.save_pretrained(folder / "reward")
    for name in ("policy", "reward"):
        words = [f"--checkpoint_dir={folder / name}", f"--output_file={folder}/{name}.stream"]
        assert main(["easylm", "convert_hf_to_easylm", *words, "--model_size="]) == 0
    write_jsonl(folder / "sft.jsonl", [{"messages": talk(i, f"It is {2 * i}.")} for i in range(64)])
    pairs = [{"chosen": talk(i, f"It is {2 * i}."), "rejected": talk(i, "No.")} for i in range(64)]
    write_jsonl(folder / "pairs.jsonl", pairs)
    return folder


# Replaces the package, which requires an account.
WANDB = """
class Error(Exception): pass
class Session:
    step = 0
    def log(self, values, step=None): pass
    def finish(self, *arguments, **values): pass
def init(**values): return Session()
def login(*arguments, **values): return True
def Table(**values): return values
"""


def run(script: str, words: list[str], repo: Path, folder: Path) -> list[dict[str, Any]]:
    """Run the script as in the guide, and return the metrics of its run."""
    (folder / "packages").mkdir()
    (folder / "packages" / "wandb.py").write_text(WANDB)
    paths = f"{repo / 'src'}:{folder / 'packages'}"
    environment = {**os.environ, "PYTHONPATH": paths, "WANDB_API_KEY": "0" * 40}
    command = [sys.executable, "-m", f"EasyLM.models.llama.{script}", *words]
    where = repo / "examples" / "easylm"
    done = subprocess.run(
        command, cwd=where, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (metrics,) = folder.glob("*/*/metrics.jsonl")
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def read_values(rows: list[dict[str, Any]], name: str) -> list[float]:
    """Return the values of the metrics whose names have this ending, over all steps."""
    return [value for row in rows for key, value in row.items() if key.endswith(name)]


def own_paths(bucket: Path, output: Path, vocab: str = "tokenizer__vocab_file") -> dict[str, Any]:
    return {
        vocab: bucket / "tokenizer",
        "logger__output_dir": output,
        "log_freq": 1,
    }


def test_sft(bucket: Path, repo: Path, tmp_path: Path) -> None:
    words = change(
        guide.SFT,
        load_checkpoint=f"params::{bucket / 'policy.stream'}",
        **SIZE,
        train_dataset__json_torch_dataset__hf_name=None,
        train_dataset__json_torch_dataset__path=bucket / "sft.jsonl",
        train_dataset__json_torch_dataset__seq_length=128,
        train_dataset__json_torch_dataset__batch_size=4,
        optimizer__adamw_optimizer__lr=1e-2,
        **own_paths(bucket, tmp_path),
    )
    rows = run("llama_train", words, repo, tmp_path)
    losses = read_values(rows, "train/loss")
    assert len(losses) == 8  # 2 epochs of 64 rows, 4 x 4 a step
    assert losses[0] == pytest.approx(math.log(320), rel=0.05) and losses[-1] < losses[0] - 0.5


def test_dpo(bucket: Path, repo: Path, tmp_path: Path) -> None:
    words = change(
        guide.DPO,
        mesh_dim="-1,2,2",
        load_checkpoint=f"params::{bucket / 'policy.stream'}",
        **SIZE,
        num_epochs=1,
        train_dataset__json_torch_dataset__hf_name=None,
        train_dataset__json_torch_dataset__path=bucket / "pairs.jsonl",
        train_dataset__json_torch_dataset__seq_length=128,
        optimizer__adamw_optimizer__lr=1e-3,
        **own_paths(bucket, tmp_path),
    )
    rows = run("llama_train_dpo", words, repo, tmp_path)
    losses = read_values(rows, "train/loss")
    assert len(losses) == 2 and losses[0] == pytest.approx(math.log(2), rel=1e-3)
    assert losses[1] < losses[0]


def write_ppo(bucket: Path, output: Path, **more: Any) -> list[str]:
    own = own_paths(bucket, output)
    sizes = {
        f"{key}_{model}": value for key, value in SIZE.items() for model in ("policy", "reward")
    }
    return change(
        guide.PPO,
        load_checkpoint_policy=f"params::{bucket / 'policy.stream'}",
        load_checkpoint_reward=f"params::{bucket / 'reward.stream'}",
        **sizes,
        train_dataset__tulu_prompt_dataset__path=bucket / "pairs.jsonl",
        train_dataset__tulu_prompt_dataset__seq_length=64,
        train_dataset__tulu_prompt_dataset__batch_size=32,
        train_dataset__tulu_prompt_dataset__num_workers=0,
        max_continuation_len=8,
        mini_batch_size=16,
        **{**own, "logger__wandb_dir": output / "wandb"},
        **more,
    )


# also with dp above 1, which EasyLM does not support for PPO
@pytest.mark.slow_cases("4,2,1")
@pytest.mark.parametrize("mesh", ["1,4,2", "4,2,1"])
def test_ppo(mesh: str, bucket: Path, repo: Path, tmp_path: Path) -> None:
    words = write_ppo(bucket, tmp_path, mesh_dim=mesh, backend="jax")
    rows = run("llama_train_ppo", words, repo, tmp_path)
    check_ppo(rows, tmp_path)


def test_ppo_with_torch(bucket: Path, repo: Path, tmp_path: Path) -> None:
    words = write_ppo(bucket, tmp_path, mesh_dim="1,1,1", backend="torch")
    check_ppo(run("llama_train_ppo", words, repo, tmp_path), tmp_path)


def check_ppo(rows: list[dict[str, Any]], output: Path) -> None:
    assert len(rows) == 2  # 64 prompts, 32 a step
    assert (output / "ppo" / "NAME" / "metrics.jsonl").is_file()
    rewards = read_values(rows, "advantages/reward_after_kl")
    truncated = read_values(rows, "advantages/truncated_fraction")
    # nearly all completions of 8 random tokens lack an end token, which scores -10
    for reward, share in zip(rewards, truncated, strict=True):
        assert share > 0.8 and reward == pytest.approx(-10.0 * share, abs=1.0)
