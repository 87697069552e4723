"""Small real runs, one an algorithm, with everything switched on that a restart must bring back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.tiny import make_llama, pair_rows, prompt_answer_rows, prompt_rows, write_jsonl
from weft.experiments import DistillConfig, DPOConfig, GRPOConfig, PPOConfig, SFTConfig


def prepare(root: Path) -> None:
    """The model and the rows that all cases read."""
    make_llama(root / "model")
    write_jsonl(root / "sft.jsonl", prompt_answer_rows(24))
    write_jsonl(
        root / "more.jsonl", [row | {"id": f"m{i}"} for i, row in enumerate(prompt_answer_rows(20))]
    )
    write_jsonl(root / "pairs.jsonl", pair_rows(20))
    write_jsonl(root / "prompts.jsonl", prompt_rows(14))


def options(root: Path, folder: str, **more: Any) -> dict[str, Any]:
    fixed = {
        "experiment_name": "e",
        "trial_name": "t",
        "fileroot": folder if "://" in folder else str(root / folder),
        "progress": False,
    }
    often = {
        "total_train_epochs": 2,
        "recover_freq_steps": 1,
        "save_freq_steps": 2,
        "save_total_limit": 2,
    }
    return {**fixed, **often, **more}


def sft(root: Path, folder: str) -> SFTConfig:
    """A mixture that draws another part of each source every epoch, batches by tokens, evaluation."""
    config = SFTConfig(**options(root, folder, eval_freq_steps=2))
    config.model.path, config.model.optimizer.lr = str(root / "model"), 1e-3
    config.dataset.sources = [
        {"path": str(root / "sft.jsonl"), "fraction": 0.6, "valid_split": 0.2},
        {"path": str(root / "more.jsonl"), "size": 8},
    ]
    config.dataset.train_tokens_per_batch, config.dataset.max_seqlen = 120, 60
    return config


def dpo(root: Path, folder: str) -> DPOConfig:
    """Adapters with dropout, and reference log-probs kept on disk."""
    config = DPOConfig(**options(root, folder))
    config.actor.path, config.actor.optimizer.lr = str(root / "model"), 1e-3
    config.actor.lora.r, config.actor.lora.dropout = 4, 0.1
    config.dataset.train_path, config.dataset.train_bs_n_seqs = str(root / "pairs.jsonl"), 4
    config.dpo.cache_ref_logprobs = True
    return config


def ppo(root: Path, folder: str) -> PPOConfig:
    """A critic, adaptive KL, value normalisation, and a reference that follows."""
    config = PPOConfig(**options(root, folder))
    config.actor.path = config.critic.path = config.rew.path = str(root / "model")
    config.actor.optimizer.lr = config.critic.optimizer.lr = 1e-3
    config.dataset.path, config.dataset.train_bs_n_seqs = str(root / "prompts.jsonl"), 4
    config.ppo.gen.max_new_tokens, config.ppo.ppo_n_minibatches = 6, 2
    config.ppo.use_adaptive_kl_ctl, config.ppo.value_norm, config.ppo.ref_ema_eta = True, True, 0.1
    return config


def grpo(root: Path, folder: str) -> GRPOConfig:
    """A reward function in processes of its own, and a sampler that leaves tokens out."""
    config = GRPOConfig(**options(root, folder, reward="length"))
    config.actor.path, config.actor.optimizer.lr = str(root / "model"), 1e-3
    config.dataset.path, config.dataset.train_bs_n_seqs = str(root / "prompts.jsonl"), 4
    config.grpo.group_size, config.grpo.gen.max_new_tokens, config.grpo.gen.top_k = 3, 6, 20
    return config


def distill(root: Path, folder: str) -> DistillConfig:
    """A student that samples half of the completions, and a teacher's distributions at each token."""
    config = DistillConfig(**options(root, folder))
    config.actor.path = config.teacher.path = str(root / "model")
    config.actor.init_from_scratch, config.actor.optimizer.lr = True, 1e-3
    config.dataset.path, config.dataset.train_bs_n_seqs = str(root / "sft.jsonl"), 6
    config.distill.on_policy, config.distill.gen.max_new_tokens = 0.5, 6
    config.distill.sft_coef, config.distill.ppo_n_minibatches = 0.1, 2
    return config


CASES = {"sft": sft, "dpo": dpo, "ppo": ppo, "grpo": grpo, "distill": distill}
