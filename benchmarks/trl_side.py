"""TRL's side of the training benchmarks.

Settings that differ from its defaults make it alike to weft's run:

float32 in place of bfloat16 autocasting, no gradient checkpointing, rows in the order of the file,
one line of log a step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.clock import Clock
from benchmarks.pairs import Pause

Settings = Mapping[str, Any]


def train(settings: Settings, pause: Pause) -> dict[str, Any]:
    """One run; a callback is the clock."""
    _import_what_a_run_loads(settings)
    clock, trainer = TRAINERS[settings["name"]](settings, pause)
    trainer.add_callback(_ticking(clock))
    trainer.train()
    # the last step's; the very last line sums up the run
    return dict(trainer.state.log_history[-2])


def _import_what_a_run_loads(settings: Settings) -> None:
    """What `transformers`, TRL and torch import when they are first used, so that it does not count
    as memory of the run.
    """
    import accelerate
    import datasets  # noqa: F401
    import torch._dynamo  # noqa: F401 - by the first step of an optimizer
    import transformers
    import trl
    from accelerate import data_loader, optimizer, scheduler  # noqa: F401
    from torch.optim import AdamW  # noqa: F401

    config = transformers.AutoConfig.from_pretrained(_path(settings))
    for mapping in (
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    ):
        mapping[type(config)]  # finding the class imports it
    transformers.AutoTokenizer.from_pretrained(_path(settings))
    for name in ("Trainer", "TrainerCallback", "get_scheduler"):
        getattr(transformers, name)
    if settings["name"] in (kinds := {"sft": "SFT", "rw": "Reward", "dpo": "DPO", "grpo": "GRPO"}):
        getattr(trl, f"{kinds[settings['name']]}Trainer")
    assert accelerate.Accelerator is not None


def sft(settings: Settings, pause: Pause) -> tuple[Clock, Any]:
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    clock = Clock(pause)
    rows = [{"prompt": row["prompt"], "completion": row["answer"]} for row in _rows(settings)]
    args = SFTConfig(**_arguments(settings), max_length=settings["longest"])
    return clock, SFTTrainer(
        _model(settings, AutoModelForCausalLM), args, train_dataset=_dataset(rows)
    )


def rw(settings: Settings, pause: Pause) -> tuple[Clock, Any]:
    from transformers import AutoModelForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    clock = Clock(pause)
    model = _model(settings, AutoModelForSequenceClassification, num_labels=1)
    args = RewardConfig(**_arguments(settings), max_length=settings["longest"])
    return clock, RewardTrainer(model, args, train_dataset=_dataset(_pairs(settings)))


def dpo(settings: Settings, pause: Pause) -> tuple[Clock, Any]:
    from transformers import AutoModelForCausalLM
    from trl import DPOConfig, DPOTrainer

    clock = Clock(pause)
    args = DPOConfig(**_arguments(settings), max_length=settings["longest"])
    model, reference = (
        _model(settings, AutoModelForCausalLM),
        _model(settings, AutoModelForCausalLM),
    )
    return clock, DPOTrainer(model, reference, args, train_dataset=_dataset(_pairs(settings)))


def grpo(settings: Settings, pause: Pause) -> tuple[Clock, Any]:
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    from benchmarks.rewards import distinct

    clock = Clock(pause)
    arguments = _arguments(settings) | {
        "per_device_train_batch_size": settings["batch"] * settings["completions"]
    }
    del arguments["train_sampling_strategy"]
    args = GRPOConfig(
        **arguments,
        shuffle_dataset=False,
        num_generations=settings["completions"],
        max_completion_length=settings["new_tokens"],
        generation_kwargs={"min_new_tokens": settings["new_tokens"]},
    )
    return clock, GRPOTrainer(
        _model(settings, AutoModelForCausalLM),
        distinct,
        args=args,
        train_dataset=_dataset(_rows(settings)),
    )


def ppo(settings: Settings, pause: Pause) -> tuple[Clock, Any]:
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    clock = Clock(pause)
    tokenizer = AutoTokenizer.from_pretrained(_path(settings), padding_side="left")
    arguments = _arguments(settings)
    del arguments["max_steps"], arguments["train_sampling_strategy"]
    args = PPOConfig(
        **arguments,
        total_episodes=settings["all_steps"] * settings["batch"],
        num_sample_generations=0,
        response_length=settings["new_tokens"],
        temperature=1.0,
        num_ppo_epochs=settings["passes"],
    )
    prompts = [{"input_ids": tokenizer(row["prompt"])["input_ids"]} for row in _rows(settings)]
    policy, reference = (_model(settings, AutoModelForCausalLM) for _ in range(2))
    reward, value = (
        _model(settings, AutoModelForSequenceClassification, "reward") for _ in range(2)
    )
    return clock, PPOTrainer(
        args,
        tokenizer,
        policy,
        reference,
        reward_model=reward,
        value_model=value,
        train_dataset=_dataset(prompts),
        eval_dataset=_dataset(prompts[:1]),
    )


TRAINERS: dict[str, Callable[[Settings, Pause], tuple[Clock, Any]]] = {
    "sft": sft,
    "rw": rw,
    "dpo": dpo,
    "grpo": grpo,
    "ppo": ppo,
}


def _arguments(settings: Settings) -> dict[str, Any]:
    return {
        "output_dir": settings["work"],
        "per_device_train_batch_size": settings["batch"],
        "max_steps": settings["all_steps"],
        "learning_rate": 1e-6,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "fp16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "train_sampling_strategy": "sequential",
        "disable_tqdm": True,
    }


def _path(settings: Settings, which: str = "model") -> Path:
    return Path(settings["work"]).parent / which


def _model(settings: Settings, kind: Any, which: str = "model", **more: Any) -> Any:
    import torch

    return kind.from_pretrained(_path(settings, which), dtype=torch.float32, **more)


def _rows(settings: Settings) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(settings["rows"]).read_text().splitlines()]


def _pairs(settings: Settings) -> list[dict[str, Any]]:
    return [
        {
            "prompt": row["prompt"],
            "chosen": row["pos_answers"][0],
            "rejected": row["neg_answers"][0],
        }
        for row in _rows(settings)
    ]


def _dataset(rows: list[dict[str, Any]]) -> Any:
    from datasets import Dataset

    return Dataset.from_list(rows)


def _ticking(clock: Clock) -> Any:
    from transformers import TrainerCallback

    class Ticking(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.tick()

    return Ticking()
