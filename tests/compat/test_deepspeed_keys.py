"""DeepSpeed files of Hugging Face's and Open-Assistant's users: every key is mapped or refused."""

from __future__ import annotations

from typing import Any

import pytest

from weft.compat.deepspeed_keys import REFUSED, RULES, TUNING, map_config

ZERO3 = {  # of the Hugging Face documentation
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
WRITTEN_OUT = {
    "fp16": {"enabled": False},
    "bf16": {"enabled": True},
    "gradient_clipping": 0.5,
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 3e-5, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 3e-7},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_max_lr": 3e-5, "warmup_num_steps": 500, "warmup_min_lr": 0},
    },
    "zero_optimization": {"stage": 2, "allgather_bucket_size": 5e8},
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "tensorboard": {"enabled": True, "output_path": "a"},
    "wandb": {"enabled": True, "team": "us", "project": "p"},
}


def test_auto_is_left_to_the_command_line() -> None:
    mapped = map_config(ZERO3, ["model"])
    assert mapped.options == {
        "model.optimizer.type": "adamw",
        "model.optimizer.lr_scheduler_type": "constant",
        "model.zero_stage": 3,
        "model.optimizer.offload": True,
    }
    assert mapped.refused == [] and mapped.notes == []
    assert (
        "steps_per_print" in mapped.tuning
        and "zero_optimization.stage3_prefetch_bucket_size" in mapped.tuning
    )


def test_values_reach_every_trained_role() -> None:
    mapped = map_config(WRITTEN_OUT, ["actor", "critic"], max_seqlen=512)
    assert mapped.refused == []
    own = {
        "dtype": "bfloat16",
        "optimizer.max_grad_norm": 0.5,
        "optimizer.type": "adamw",
        "optimizer.lr": 3e-5,
        "optimizer.beta1": 0.8,
        "optimizer.beta2": 0.99,
        "optimizer.eps": 1e-7,
        "optimizer.weight_decay": 3e-7,
        "optimizer.lr_scheduler_type": "linear",
        "optimizer.warmup_steps": 500,
        "zero_stage": 2,
    }
    assert mapped.options == {
        **{f"{role}.{name}": value for role in ("actor", "critic") for name, value in own.items()},
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 8,
        "max_tokens_per_microbatch": 2048,
        "logger.tensorboard": True,
        "logger.wandb.mode": "online",
        "logger.wandb.entity": "us",
        "logger.wandb.project": "p",
    }


def test_the_whole_batch_comes_before_its_factors() -> None:
    mapped = map_config({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, ["model"])
    assert mapped.options == {"dataset.train_bs_n_seqs": 64}
    assert "packs rows into micro-batches" in mapped.notes[0]


def test_sgd_has_no_momentum_unless_it_is_written() -> None:
    assert map_config({"optimizer": {"type": "SGD"}}, ["m"]).options == {
        "m.optimizer.type": "sgd",
        "m.optimizer.beta1": 0.0,
    }
    named = map_config({"optimizer": {"type": "SGD", "params": {"momentum": 0.8}}}, ["m"])
    assert named.options["m.optimizer.beta1"] == 0.8


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"optimizer": {"type": "OneBitAdam"}},
            "optimizer.type='OneBitAdam': weft has AdamW, SGD and Lion",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
            "optimizer.params.adam_w_mode=False",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"amsgrad": True}}},
            "optimizer.params.amsgrad=True: unknown",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": "small"}}},
            "optimizer.params.lr='small': must be a number",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"betas": 1}}},
            "optimizer.params.betas=1: must be two numbers",
        ),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler.type='OneCycle': weft has WarmupLR"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "log"}}},
            "scheduler.params.warmup_type='log'",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-7}}},
            "scheduler.params.warmup_min_lr=1e-07",
        ),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}},
            "write auto, and max_steps=N",
        ),
        (
            {
                "optimizer": {"type": "Adam", "params": {"lr": 1}},
                "scheduler": {"params": {"warmup_max_lr": 2}},
            },
            "lr is 1",
        ),
        (
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
            "bf16.enabled=True: float16 is enabled too",
        ),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage=4: must be 0, 1, 2 or 3"),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme"}}},
            "offload_param.device='nvme'",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.3}}},
            "offload_optimizer.ratio=0.3",
        ),
        (
            {"zero_optimization": {"zero_quantized_weights": True}},
            "zero_optimization.zero_quantized_weights=True",
        ),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, "the f of a layout: d16f8"),
        ({"zero_optimization": {"overlap_com": True}}, "did you mean overlap_comm?"),
        (
            {"activation_checkpointing": {"cpu_checkpointing": True}},
            "MODEL.gradient_checkpointing=true",
        ),
        ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor=2.0"),
        ({"communication_data_type": "fp16"}, "write fp32"),
        ({"gradient_cliping": 1.0}, "did you mean gradient_clipping?"),
        ({"sparse_gradients": True}, "sparse_gradients=True: gradients are dense here"),
        ({"curriculum_learning": {"enabled": True}}, "curriculum_learning="),
        ({"train_batch_size": 0}, "train_batch_size=0: must be a number, at least 1"),
        ({"wandb": {"enabled": True, "group": "g"}}, "wandb.group='g'"),
        ({"bf16": True}, "bf16=True: must be a group of keys"),
    ],
)
def test_what_weft_cannot_follow_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    refused = map_config(config, ["model"]).refused
    assert len(refused) == 1 and message in refused[0]


def test_every_key_that_is_off_is_no_trouble() -> None:
    off = dict.fromkeys(REFUSED, False) | {
        "sequence_parallel_size": 1,
        "elasticity": {"enabled": False},
    }
    mapped = map_config(off, ["model"])
    assert (mapped.options, mapped.refused) == ({}, [])


def test_no_key_has_two_meanings() -> None:
    assert not set(RULES) & (TUNING | set(REFUSED)) and not TUNING & set(REFUSED)


def test_numbers_and_truths_that_are_written_as_text() -> None:
    config = {
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "2e-5", "betas": ["0.9", "0.95"], "eps": "1e-8", "weight_decay": "0"},
        },
        "fp16": {"enabled": "true"},
        "zero_optimization": {"stage": "2", "allgather_bucket_size": "2e8"},
        "gradient_accumulation_steps": "8",
        "train_micro_batch_size_per_gpu": " 4",
        "gradient_clipping": "auto",
        "steps_per_print": "inf",
    }
    done = map_config(config, ["actor"], 128)
    assert done.refused == []
    assert (
        done.options["actor.optimizer.lr"] == 2e-5 and done.options["actor.optimizer.beta2"] == 0.95
    )
    assert done.options["actor.dtype"] == "float16" and done.options["actor.zero_stage"] == 2
    assert done.batch == {"gradient_accumulation_steps": 8, "train_micro_batch_size_per_gpu": 4}
    assert map_config({"gradient_accumulation_steps": "8x"}, ["actor"]).refused
