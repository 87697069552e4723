"""Most common options of each algorithm, which `--help` shows first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass

from weft.experiments.common import RunConfig
from weft.options import iterate_options

NAMES = ("experiment_name", "trial_name")
DATA_OPTIONS = ("dataset.path", "dataset.valid_path", "dataset.type", "dataset.columns")
LEARNING_OPTIONS = (
    "optimizer.lr",
    "optimizer.lr_scheduler_type",
    "optimizer.warmup_steps_proportion",
)
LENGTH = ("total_train_epochs", "max_steps")
RUN = ("device", "seed", "save_freq_steps", "logger.wandb.mode")


def _list_model_options(role: str) -> tuple[str, ...]:
    return tuple(
        f"{role}.{name}"
        for name in ("dtype", "lora.r", "gradient_checkpointing", "tokenizer.chat_template")
    )


def _list_learning_options(role: str) -> tuple[str, ...]:
    return tuple(f"{role}.{name}" for name in LEARNING_OPTIONS)


def _list_sampling_options(algorithm: str, *others: str) -> tuple[str, ...]:
    """Return the full names of the sampling options that `--help` shows for an algorithm.

    `others` are the names of additional options without the algorithm's prefix, such as "kl_ctl"
    for `ppo.kl_ctl`.
    """
    return tuple(
        f"{algorithm}.{name}" for name in ("gen.max_new_tokens", "gen.temperature", *others)
    )


TRAINING_DATA_OPTIONS = (*DATA_OPTIONS, "dataset.max_seqlen", "dataset.train_bs_n_seqs")
SAMPLING_DATA_OPTIONS = (
    "dataset.path",
    "dataset.columns",
    "dataset.max_prompt_len",
    "dataset.train_bs_n_seqs",
)
POLICY = ("actor.dtype", "actor.lora.r", "actor.layout")

COMMON: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "sft": {
        "what": (*NAMES, "model.path"),
        "data": TRAINING_DATA_OPTIONS,
        "model": _list_model_options("model"),
        "optimization": (*_list_learning_options("model"), *LENGTH),
        "run": (*RUN, "eval_freq_steps"),
    },
    "rw": {
        "what": (*NAMES, "model.path"),
        "data": TRAINING_DATA_OPTIONS,
        "model": _list_model_options("model"),
        "optimization": (*_list_learning_options("model"), *LENGTH),
        "reward model": ("rw.center", "rw.loss_type"),
        "run": RUN,
    },
    "dpo": {
        "what": (*NAMES, "actor.path", "ref.path"),
        "data": TRAINING_DATA_OPTIONS,
        "model": _list_model_options("actor"),
        "optimization": (*_list_learning_options("actor"), *LENGTH),
        "DPO": ("dpo.beta", "dpo.loss_type"),
        "run": RUN,
    },
    "ppo": {
        "what": (*NAMES, "actor.path", "rew.path", "reward"),
        "data": SAMPLING_DATA_OPTIONS,
        "model": POLICY,
        "optimization": (
            "actor.optimizer.lr",
            "critic.optimizer.lr",
            "ppo.ppo_n_minibatches",
            "ppo.ppo_epochs",
            *LENGTH,
        ),
        "generation and PPO": _list_sampling_options("ppo", "samples_per_prompt", "kl_ctl"),
        "run": RUN,
    },
    "grpo": {
        "what": (*NAMES, "actor.path", "reward", "rew.path"),
        "data": SAMPLING_DATA_OPTIONS,
        "model": POLICY,
        "optimization": ("actor.optimizer.lr", "grpo.ppo_n_minibatches", *LENGTH),
        "generation and GRPO": _list_sampling_options("grpo", "group_size", "kl_coef", "loss_type"),
        "run": RUN,
    },
    "online_dpo": {
        "what": (*NAMES, "actor.path", "rew.path", "reward"),
        "data": SAMPLING_DATA_OPTIONS,
        "model": POLICY,
        "optimization": ("actor.optimizer.lr", "online_dpo.ppo_n_minibatches", *LENGTH),
        "generation and DPO": _list_sampling_options(
            "online_dpo", "samples_per_prompt", "beta", "loss_type"
        ),
        "run": RUN,
    },
    "distill": {
        "what": (*NAMES, "actor.path", "teacher.path"),
        "data": SAMPLING_DATA_OPTIONS,
        "model": POLICY,
        "optimization": ("actor.optimizer.lr", *LENGTH),
        "generation and distillation": _list_sampling_options(
            "distill", "loss_type", "on_policy", "divergence_beta"
        ),
        "run": RUN,
    },
    "gen": {
        "what": (*NAMES, "model.path"),
        "data": (*SAMPLING_DATA_OPTIONS, "dataset.train_bs_n_seqs"),
        "model": ("model.dtype", "model.tokenizer.chat_template"),
        "generation": _list_sampling_options(
            "gen", "samples_per_prompt", "top_p", "top_k", "greedy", "stop"
        ),
        "run": ("device", "seed"),
    },
}

DATA = "dataset.path=data/{}.jsonl dataset.train_bs_n_seqs={}"
EXAMPLES: Mapping[str, str] = {
    "sft": (
        f"model.path=data/model {DATA.format('sft', 64)} model.optimizer.lr=4e-3 "
        f"total_train_epochs=10"
    ),
    "rw": (
        f"model.path=runs/first/sft dataset.type=preference {DATA.format('pairs', 64)} "
        f"model.optimizer.lr=2e-3"
    ),
    "dpo": (
        f"actor.path=runs/first/sft dataset.type=preference {DATA.format('pairs', 64)} "
        f"actor.optimizer.lr=1e-4"
    ),
    "ppo": (
        f"actor.path=runs/first/sft rew.path=runs/first/rw {DATA.format('prompts', 50)} "
        f"ppo.gen.max_new_tokens=4"
    ),
    "grpo": (
        f"actor.path=runs/first/sft reward=gsm8k {DATA.format('prompts', 50)} "
        f"grpo.gen.max_new_tokens=4"
    ),
    "online_dpo": (
        f"actor.path=runs/first/sft reward=gsm8k {DATA.format('prompts', 50)} "
        f"online_dpo.gen.max_new_tokens=4"
    ),
    "distill": (
        f"actor.path=data/model teacher.path=runs/first/sft {DATA.format('prompts', 50)} "
        f"distill.gen.max_new_tokens=4"
    ),
    "gen": f"model.path=runs/first/sft {DATA.format('prompts', 50)} gen.max_new_tokens=4",
}


def find_common_options(config: RunConfig) -> dict[str, tuple[str, ...]]:
    """Return the most common options of `config`, grouped as in `--help`.

    The result maps the title of each group to option names. If the class of `config` is defined by
    a user, the first group lists the options that this class adds.
    """
    known = {leaf.name for leaf in iterate_options(config)}
    chosen = {}
    for group, names in COMMON.get(config.algorithm, {}).items():
        chosen[group] = tuple(dict.fromkeys(name for name in names if name in known))
    # Options that no class of weft defines are the user's own.
    kin = []
    for cls in type(config).__mro__:
        if cls.__module__.startswith("weft.") and is_dataclass(cls):
            kin.append(cls)
    shipped = set()
    for cls in kin:
        for spec in fields(cls):
            shipped.add(spec.name)
    own = tuple(name for name in known if name.split(".")[0] not in shipped)
    return ({"of this configuration": tuple(sorted(own))} if own else {}) | chosen
