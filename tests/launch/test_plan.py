"""`--dry-run`: a plan without weights and without devices, which a run then keeps to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_llama, pair_rows, prompt_answer_rows, write_jsonl
from weft.checkpoints.weight_files import WeightFiles
from weft.cli.main import main
from weft.errors import CheckpointError, ConfigError
from weft.experiments import DPOConfig, GRPOConfig, SFTConfig
from weft.launch import dry_run, run

LARGE = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planned")
    make_llama(folder / "model")
    (folder / "large").mkdir()
    (folder / "large" / "config.json").write_text(json.dumps(LARGE))
    write_jsonl(folder / "rows.jsonl", prompt_answer_rows())
    write_jsonl(folder / "pairs.jsonl", pair_rows())
    write_jsonl(folder / "prompts.jsonl", [{"prompt": f"count {n}"} for n in range(8)])
    return folder


def config(
    kind: type[Any], folder: Path, model: str, rows: str, role: str = "model", **options: Any
) -> Any:
    made = kind(
        **{"experiment_name": "e", "trial_name": "t", "fileroot": str(folder / "runs"), **options}
    )
    getattr(made, role).path = str(folder / model)
    made.dataset.path, made.dataset.train_bs_n_seqs = str(folder / rows), 4
    return made


def test_rows_have_completions_where_only_some_are_sampled(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"actor.path={folder / 'model'}", f"teacher.path={folder / 'model'}", "device=cpu"]
    words += [f"dataset.path={folder / 'rows.jsonl'}", "dataset.train_bs_n_seqs=4"]
    words += [
        "dataset.max_seqlen=96",
        "dataset.max_prompt_len=40",
        "distill.on_policy=0.5",
        "distill.gen.max_new_tokens=16",
    ]
    assert main(["quickstart", "distill", *words, "--dry-run=config"]) == 0
    said = capsys.readouterr().out
    assert "memory is that of rows of 40 + 56 tokens" in said and "fits: the device" in said


def test_the_lines_are_those_of_the_run_and_no_weights_are_read(folder: Path) -> None:
    sft = config(
        SFTConfig,
        folder,
        "model",
        "rows.jsonl",
        device="cpu",
        progress=False,
        fileroot=str(folder / "own"),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightFiles, "__init__", lambda *_: pytest.fail("weights are read"))
        *lines, verdict = dry_run(sft)
    assert not (folder / "own").exists()
    assert verdict.startswith("fits: the device needs about ") and verdict.count("cpu") == 1
    sft.max_steps = 1
    run(sft)
    shown = (folder / "own" / "e" / "t" / "log.txt").read_text()
    for line in lines:
        if line.startswith(("nodes", "model:", "memory of")):
            assert line in shown, line


def test_more_devices_than_were_asked_for_are_refused(folder: Path) -> None:
    words = {"n_gpus_per_node": 2, "device": "cuda"}
    sft = config(SFTConfig, folder, "model", "rows.jsonl", **words, allocation_mode="d2")
    assert dry_run(sft, data=False)[-1].startswith("fits: each of 2 devices")
    sft.model.device_mesh = "8-9"
    with pytest.raises(
        ConfigError, match="the layouts need 10 devices, and n_nodes=1 x n_gpus_per_node=2 are 2"
    ):
        dry_run(sft, data=False)
    sft.n_nodes, sft.mode = 5, "ray"
    assert dry_run(sft, data=False)[-1].startswith("fits: each of 10 devices")
    many = config(SFTConfig, folder, "model", "rows.jsonl", device="cpu", allocation_mode="d65536")
    with pytest.raises(ConfigError, match="needs 65,536 devices, each a process"):
        dry_run(many, data=False)


def test_eight_gpus_that_nobody_has(folder: Path) -> None:
    options = {"device": "cuda", "n_gpus_per_node": 8, "allocation_mode": "d8"}
    sft = config(SFTConfig, folder, "large", "rows.jsonl", **options)
    sft.dataset.max_seqlen, sft.model.gradient_checkpointing, sft.search.gpu = 2048, True, "A100"
    lines = dry_run(sft, data=False)
    assert any(line.endswith("not read, so the number of steps is not known") for line in lines)
    assert any(
        line.startswith("data: not read; memory is that of rows of 512 + 1,536 tokens")
        for line in lines
    )
    assert "model: layout d8f8t1p1c1e1 on devices 0-7" in lines
    assert lines[-1].startswith("fits: each of 8 devices needs about 2") and lines[-1].endswith(
        "of 77.60 GiB: A100"
    )


def test_what_does_not_fit_is_said_with_what_would(folder: Path) -> None:
    sft = config(SFTConfig, folder, "large", "rows.jsonl")
    sft.search.gpu, sft.dataset.max_seqlen = "H100", 1024
    lines = dry_run(sft, data=False)
    verdict = next(
        n
        for n, line in enumerate(lines)
        if line.startswith("does NOT fit: the device needs about 1")
    )
    assert any(
        line.startswith("  with gradient_checkpointing=true lora.r=16: about ")
        for line in lines[verdict:]
    )


def test_without_a_gpu_and_without_its_name_the_smallest_that_serves(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    sft = config(SFTConfig, folder, "large", "rows.jsonl", device="cuda")
    sft.dataset.max_seqlen, sft.model.lora.r, sft.model.gradient_checkpointing = 1024, 16, True
    lines = dry_run(sft, data=False)
    assert any(
        "GPU of 24 GB, the smallest that suffices: this machine has no GPU" in line
        for line in lines
    )
    assert lines[-1].startswith("fits: ") and lines[-1].endswith(": GPU of 24 GB")


def test_keys_and_values_take_a_quarter_of_the_gpu_at_most(folder: Path) -> None:
    grpo = config(GRPOConfig, folder, "large", "prompts.jsonl", "actor")
    grpo.reward, grpo.search.gpu, grpo.actor.lora.r, grpo.actor.gradient_checkpointing = (
        "length",
        "H100",
        16,
        True,
    )
    grpo.grpo.gen.max_new_tokens, grpo.dataset.max_prompt_len, grpo.dataset.train_bs_n_seqs = (
        2048,
        512,
        64,
    )
    lines = dry_run(grpo, data=False)
    assert "memory of actor_gen: keys and values in at most 19.77 GiB (gen.kv_cache_gb)" in lines
    assert any(line.startswith("ref: ") for line in lines) and any(
        "with adapters off" in line for line in lines
    )
    assert lines[-1].startswith("fits: ")


def test_each_of_a_pair_is_a_row(folder: Path) -> None:
    def needed(**options: Any) -> float:
        dpo = config(
            DPOConfig,
            folder,
            "large",
            "pairs.jsonl",
            "actor",
            max_tokens_per_microbatch=10**6,
            **options,
        )
        dpo.search.gpu, dpo.dataset.max_seqlen, dpo.actor.lora.r = "H200", 1024, 8
        last = next(line for line in dry_run(dpo, data=False) if "device needs" in line)
        return float(last.split("about ")[1].split()[0])

    assert needed() > 20


def test_mistakes_are_those_of_a_run(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="has no config"):
        dry_run(config(SFTConfig, folder, ".", "rows.jsonl"))
    wide = config(SFTConfig, folder, "model", "rows.jsonl")
    wide.model.layout = "t3"
    with pytest.raises(ConfigError, match="layout"):
        dry_run(wide, data=False)
    with pytest.raises(CheckpointError, match="has no weights"):
        run(config(SFTConfig, folder, "large", "rows.jsonl"))


def test_a_name_that_is_in_use_or_none_at_all_is_no_hindrance(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sft = config(SFTConfig, folder, "model", "rows.jsonl", fileroot=str(tmp_path))
    (tmp_path / "e" / "t").mkdir(parents=True)
    (tmp_path / "e" / "t" / "mine.txt").touch()
    *_, verdict, note = dry_run(sft, data=False)
    assert verdict.startswith("fits") and note.startswith("note: the run itself would be refused: ")
    words = [
        f"model.path={folder / 'model'}",
        f"dataset.path={folder / 'rows.jsonl'}",
        "device=cpu",
    ]
    assert main(["quickstart", "sft", *words, "--dry-run=config"]) == 0
    assert "fits: the device needs about " in capsys.readouterr().out


def test_each_number_is_printed_once(folder: Path) -> None:
    lines = dry_run(config(SFTConfig, folder, "model", "rows.jsonl", device="cpu"))
    text = "\n".join(lines)
    assert not any(line.startswith("memory: ") for line in lines) and text.count("fits: ") == 1
    needed = lines[-1].split("needs about ")[1].split(" of ")[0]
    assert (
        text.count(needed) == 1
        and text.count("16 samples") == 1
        and text.count("parameters, ") == 1
    )
    assert text.count(lines[-1].split(" of ")[1].split(":")[0]) == 2, (
        "the device's own row, and the verdict"
    )
