"""SFT, GRPO, DPO and PPO end to end on a tiny model with random weights: on the CPU in float32, on
the device in float32 and in bfloat16, with losses side by side.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import gpu_tokenizer
from benchmarks.gpu_run import Run, describe

ROOT = Path(__file__).resolve().parent.parent
CARRIED = ROOT / "build" / "gpu-carry" / "tokenizer"
STEPS = 3  # that are compared
# Relative differences from the CPU in float32. SFT and DPO draw nothing, so their losses follow it;
# a drawn token may flip where two kernels' logits differ in the last digit, and GRPO's and PPO's
# losses then differ as those of two completions do.
FLOAT32, BFLOAT16 = 1e-3, 0.05
COMPARED = ("sft", "dpo")
SHAPE = {
    "vocab_size": gpu_tokenizer.VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": gpu_tokenizer.PAD,
    "bos_token_id": gpu_tokenizer.BEGIN,
    "eos_token_id": gpu_tokenizer.END,
}


def algorithms(run: Run) -> None:
    """A short run of each algorithm in each form; one that fails is wrong, and the next goes on."""
    device = run.where.device.type
    forms = (("cpu", "float32"), (device, "float32"), (device, "bfloat16"))
    with tempfile.TemporaryDirectory(prefix="weft-gpu-") as folder:
        root = Path(folder)
        _prepare(root)
        for name in CONFIGURATIONS:
            found: list[list[Mapping[str, float]]] = []
            for number, (place, dtype) in enumerate(forms):
                begin = time.monotonic()
                try:
                    found.append(_run(root, name, number, place, dtype))
                except Exception as error:
                    run.wrong.append(f"{name} on {place} in {dtype}: {describe(error)}")
                    run.write()
                    break
                run.add(
                    f"{name} on {place} in {dtype}: {STEPS} steps", time.monotonic() - begin, "s"
                )
            run.details[name] = {
                " ".join(form): steps for form, steps in zip(forms, found, strict=False)
            }
            _compare(run, name, found)


def _compare(run: Run, name: str, found: list[list[Mapping[str, float]]]) -> None:
    """Losses of the device beside those of the CPU."""
    if not found:
        return
    exact = _losses(found[0])
    for dtype, most, steps in zip(
        ("float32", "bfloat16"), (FLOAT32, BFLOAT16), found[1:], strict=False
    ):
        losses = _losses(steps)
        apart = max(
            (abs(a - b) / max(abs(b), 0.1) for a, b in zip(losses, exact, strict=False)),
            default=math.inf,
        )
        what = f"{name} in {dtype}: losses of {len(losses)} steps differ from the CPU's by at most"
        if name in COMPARED:
            run.check(what, apart, most, "relative")
        else:
            run.add(what, apart, "relative")
            run.check(
                f"{name} in {dtype}: losses that are no number",
                sum(not math.isfinite(x) for x in losses),
                0,
                "",
            )


def _losses(steps: list[Mapping[str, float]]) -> list[float]:
    """Loss and gradient norm of every trained role and step."""
    ends = ("/loss", "/grad_norm")
    return [
        value
        for step in steps
        for name, value in sorted(step.items())
        if name.endswith(ends) and "eval" not in name
    ]


def _run(root: Path, name: str, number: int, device: str, dtype: str) -> list[Mapping[str, float]]:
    from weft.launch import run as launch

    folder = root / f"{name}-{number}"
    config = CONFIGURATIONS[name](root, folder)
    config.device = device
    for role in ("model", "actor", "critic", "rew"):
        held = getattr(config, role, None)
        if held is not None and held.path:
            held.dtype = dtype
    # a run tells people much that is of no use here
    with contextlib.redirect_stdout(io.StringIO()):
        launch(config)
    (written,) = folder.rglob("metrics.jsonl")
    steps = [json.loads(line) for line in written.read_text().splitlines()]
    return [{name: x for name, x in step.items() if isinstance(x, float)} for step in steps[:STEPS]]


def _prepare(root: Path) -> None:
    """The model with its tokenizer, and rows to train on."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(root / "model")
    if CARRIED.is_dir():
        for path in CARRIED.iterdir():
            shutil.copy(path, root / "model")
    else:
        gpu_tokenizer.write(root / "model")
    sums = [
        (f"What is {n} plus {n}?", f" The answer is {2 * n}.", f" I will not add {n}.")
        for n in range(4 * STEPS)
    ]
    rows = {
        "sft": [
            {"id": str(n), "prompt": asked, "answer": right}
            for n, (asked, right, _) in enumerate(sums)
        ],
        "dpo": [
            {"prompt": asked, "pos_answers": [right], "neg_answers": [other]}
            for asked, right, other in sums
        ],
        "prompts": [{"prompt": asked, "answer": right} for asked, right, _ in sums],
    }
    for name, kept in rows.items():
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))


def _options(folder: Path) -> dict[str, Any]:
    return {
        "experiment_name": "gpu",
        "trial_name": "t",
        "fileroot": str(folder),
        "progress": False,
        "total_train_epochs": 1,
        "seed": 1,
    }


def _sft(root: Path, folder: Path) -> Any:
    from weft.experiments import SFTConfig

    config = SFTConfig(**_options(folder))
    config.model.path, config.model.optimizer.lr = str(root / "model"), 1e-3
    config.dataset.train_path, config.dataset.train_bs_n_seqs = str(root / "sft.jsonl"), 4
    return config


def _dpo(root: Path, folder: Path) -> Any:
    from weft.experiments import DPOConfig

    config = DPOConfig(**_options(folder))
    config.actor.path, config.actor.optimizer.lr, config.actor.lora.r = str(root / "model"), 1e-3, 4
    config.dataset.train_path, config.dataset.train_bs_n_seqs = str(root / "dpo.jsonl"), 4
    return config


def _grpo(root: Path, folder: Path) -> Any:
    from weft.experiments import GRPOConfig

    config = GRPOConfig(**_options(folder), reward="benchmarks.gpu_algorithms:even")
    config.actor.path, config.actor.optimizer.lr = str(root / "model"), 1e-3
    config.dataset.path, config.dataset.train_bs_n_seqs = str(root / "prompts.jsonl"), 4
    config.grpo.group_size, config.grpo.gen.max_new_tokens = 4, 8
    return config


def even(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """A reward that differs within a group: the share of bytes that are even."""
    found = [completion.encode() for completion in completions]
    return [sum(byte % 2 == 0 for byte in text) / max(1, len(text)) for text in found]


def _ppo(root: Path, folder: Path) -> Any:
    from weft.experiments import PPOConfig

    config = PPOConfig(**_options(folder))
    config.actor.path = config.critic.path = config.rew.path = str(root / "model")
    config.actor.optimizer.lr = config.critic.optimizer.lr = 1e-3
    config.dataset.path, config.dataset.train_bs_n_seqs = str(root / "prompts.jsonl"), 4
    config.ppo.gen.max_new_tokens, config.ppo.ppo_n_minibatches = 8, 2
    return config


CONFIGURATIONS: Mapping[str, Callable[[Path, Path], Any]] = {
    "sft": _sft,
    "grpo": _grpo,
    "dpo": _dpo,
    "ppo": _ppo,
}
