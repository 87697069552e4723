"""Open-Assistant's recipes end to end on real samples with a small model: fine-tuning, a reward
model of it, RLHF with both.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.tiny import make_llama
from weft.cli.main import main

pytestmark = pytest.mark.slow

SMALL = {
    "small": {
        "dtype": "fp32",
        "max_length": 256,
        "gradient_accumulation_steps": 1,
        "per_device_train_batch_size": 4,
        "log_wandb": False,
        "warmup_steps": 1,
        "logging_steps": 1,
        "dataset.num_workers": 0,
        "max_steps": 3,
        "progress": False,
    }
}


@pytest.fixture(scope="module")
def folder(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with a section for small runs and the first 40 of the real pairs."""
    made = tmp_path_factory.mktemp("recipes")
    (made / "configs").mkdir()
    (made / "configs" / "small.yaml").write_text(yaml.safe_dump(SMALL))
    make_llama(made / "m")
    with gzip.open(data_dir / "hh_rlhf" / "harmless-base_test.jsonl.gz", "rt") as lines:
        (made / "pairs.jsonl").write_text(
            "".join(line for line, _ in zip(lines, range(40), strict=False))
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        yield made


def steps(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def tuned(folder: Path, data_dir: Path) -> Path:
    """The checkpoint of `reference-data`."""
    words = [
        f"datasets.oasst_export.input_file_path={data_dir}/oasst/en_100_tree.jsonl",
        f"datasets.alpaca.data_path={data_dir}/llamafactory_sft/alpaca_en_demo.json",
        "model_name=m",
    ]
    assert (
        main(["quickstart", "sft", "--configs", "defaults", "reference-data", "small", *words]) == 0
    )
    run = folder / "saved_model" / "sft" / "defaults-reference-data-small"
    lines = steps(run)
    assert [line["step"] for line in lines] == [1, 2, 3] and lines[-1]["train/loss"] > 0
    assert {"eval/oasst_export/loss", "eval/alpaca/loss"} <= lines[-1].keys()
    return run / "checkpoints" / "model" / "step3"


@pytest.fixture(scope="module")
def reward_model(folder: Path, data_dir: Path, tuned: Path) -> Path:
    """The checkpoint of `oasst-rm-1-pythia-1b` on what of its data is at hand."""
    trees = f"{data_dir}/oasst/en_100_tree.jsonl"
    sets = f"datasets=[{{oasst_export: {{input_file_path: {trees}, val_split: 0.1}}}},"
    sets += "{anthropic_rlhf: {data_path: pairs.jsonl, fraction: 0.5}}]"
    words = [
        "quickstart",
        "rw",
        "--configs",
        "defaults_rm",
        "oasst-rm-1-pythia-1b",
        "small",
        f"model_name={tuned}",
        sets,
    ]
    assert main(words) == 0
    run = folder / ".saved_models_rm" / "rw" / "defaults-rm-oasst-rm-1-pythia-1b-small"
    assert {"train/accuracy", "train/kendalltau"} <= steps(run)[-1].keys()
    return run / "checkpoints" / "model" / "step3"


def test_rlhf_with_both(folder: Path, data_dir: Path, tuned: Path, reward_model: Path) -> None:
    names = ["defaults", "defaults_rlhf", "pythia_rlhf", "oasst_export_latin_cyrillic_rlhf"]
    words = [
        "triton_host_rm=null",
        "triton_host_sft=null",
        f"sft_config.model_name={tuned}",
        f"rank_config.model_name={reward_model}",
        f"datasets.oasst_export.input_file_path={data_dir}/oasst/en_100_tree.jsonl",
        "num_rollouts=4",
        "batch_size=2",
        "total_steps=16",
        "dtype=fp32",
        "rew.dtype=float32",
        "log_wandb=false",
        "train.seq_length=128",
        "method.gen_kwargs.max_new_tokens=16",
        "T_max=16",
        "progress=false",
        "trial_name=rlhf",
    ]
    assert main(["quickstart", "ppo", "--configs", *names, *words]) == 0
    lines = steps(folder / "model_rl" / "ppo" / "rlhf")
    assert [line["step"] for line in lines] == [1, 2]
    assert {"actor_train/kl", "critic_train/value_loss", "rew_inf/reward"} & lines[-1].keys()
