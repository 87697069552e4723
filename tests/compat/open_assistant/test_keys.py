"""Every key of Open-Assistant's configs is an option of weft, noted, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft.compat.open_assistant.key_mapping import IMPLIED, RL, RM, SFT, KeyMapping
from weft.compat.open_assistant.keys import KEYS, OPEN_ASSISTANT_KEYS, TRLX, TURN_TOKENS, map_keys
from weft.experiments import DPOConfig, GRPOConfig, PPOConfig, RWConfig, SFTConfig
from weft.experiments.common import RunConfig

# Every key of `defaults`, `defaults_rm` and `defaults_rlhf`, and those that only other sections
# have.
NAMES = """
rng_seed learning_rate gradient_checkpointing int8_training gradient_accumulation_steps per_device_train_batch_size
per_device_eval_batch_size adam_beta1 adam_beta2 adam_epsilon weight_decay warmup_steps eval_steps save_strategy
save_steps max_length val_max_length num_train_epochs logging_steps max_grad_norm save_total_limit dtype
eval_accumulation_steps freeze_layer datasets datasets_extra cache_dir loss_fn eval_size log_dir quantization
seq2seqmodel poly_eps fuse_gelu log_wandb samples_mixing verbose output_dir use_custom_sampler random_offset_probability
label_masking residual_dropout use_flash_attention sort_by_length use_system_prefix system_prefix use_system_tag
system_property_dropout system_add_length per_digit_tokens is_reward_model residual_dropout_lima deepspeed_config
peft_model peft_type superhot model_name peft_config superhot_config pooling score_l2_reg metrics max_replies batch_size
chunk_size num_rollouts total_steps num_eval_prompts rank_config sft_config debug triton_host_rm triton_host_sft
rank_model sft_model
"""
THEIRS = NAMES.split()


def mapped(base: RunConfig, given: dict[str, Any] | None = None, **values: Any) -> KeyMapping:
    done = KeyMapping(base, values, dict.fromkeys(values, 0), given or {})
    return map_keys(done)


def options(base: RunConfig, **values: Any) -> dict[str, Any]:
    """Return the options for the keys, without those for built-in behavior of the trainers."""
    done = mapped(base, **values)
    assert done.rejections == []
    return {name: option.value for name, option in done.options.items() if option.key != IMPLIED}


def test_every_key_is_in_the_table() -> None:
    assert set(THEIRS) <= set(KEYS)
    assert {"learning_rate", "dtype", "model_name", "save_steps"}.isdisjoint(
        OPEN_ASSISTANT_KEYS
    ) and {
        "datasets",
        "loss_fn",
    } <= OPEN_ASSISTANT_KEYS


@pytest.mark.parametrize(
    ("values", "made"),
    [
        ({"learning_rate": 1e-5}, {"model.optimizer.lr": 1e-5}),
        (
            {"adam_beta2": 0.95, "adam_epsilon": 1e-12},
            {"model.optimizer.beta2": 0.95, "model.optimizer.eps": 1e-12},
        ),
        ({"rng_seed": 0xA1221F97}, {"seed": 2703368087}),
        ({"dtype": "fp16"}, {"model.dtype": "float16"}),
        ({"dtype": "fp32"}, {"model.dtype": "float32"}),
        ({"dtype": "bfloat16"}, {"model.dtype": "bfloat16"}),
        ({"save_strategy": "epoch", "save_steps": 1000}, {"save_freq_epochs": 1}),
        ({"save_strategy": "steps", "save_steps": 1000}, {"save_freq_steps": 1000}),
        ({"save_strategy": "no", "save_steps": 1000}, {}),
        ({"save_steps": 7}, {"save_freq_steps": 7}),
        ({"num_train_epochs": 3}, {"total_train_epochs": 3}),
        ({"num_train_epochs": 3.0}, {"total_train_epochs": 3}),
        ({"max_length": 9, "val_max_length": 9}, {"dataset.max_seqlen": 9}),
        (
            {"max_length": 9, "val_max_length": 99},
            {"dataset.max_seqlen": 9, "dataset.valid_max_seqlen": 99},
        ),
        ({"output_dir": "saved_model"}, {"fileroot": "saved_model"}),
        (
            {"residual_dropout": 0.3, "residual_dropout_lima": True},
            {"model.residual_dropout": 0.3, "model.residual_dropout_lima": True},
        ),
        ({"residual_dropout": 0.0, "residual_dropout_lima": True}, {"model.residual_dropout": 0.0}),
        ({"random_offset_probability": 0.8}, {"dataset.random_window": 0.8}),
        ({"label_masking": False}, {"dataset.label_masking": False}),
        (
            {
                "label_masking": True,
                "samples_mixing": False,
                "sort_by_length": False,
                "use_system_tag": False,
            },
            {
                "dataset.label_masking": True,
                "dataset.sample_mixing": 0.0,
                "dataset.sort_by_length": False,
                "dataset.system_tags": False,
            },
        ),
        ({"samples_mixing": True}, {"dataset.sample_mixing": 0.4}),
        ({"sort_by_length": True}, {"dataset.sort_by_length": True}),
        (
            {"use_system_prefix": True, "system_prefix": "You are Joi."},
            {"dataset.system_prefix": "You are Joi."},
        ),
        ({"use_system_prefix": False, "system_prefix": "You are Joi."}, {}),
        (
            {"use_system_tag": True, "system_property_dropout": 0.3, "system_add_length": True},
            {
                "dataset.system_tags": True,
                "dataset.system_tag_dropout": 0.3,
                "dataset.system_tag_length": True,
            },
        ),
        ({"per_digit_tokens": True}, {"model.tokenizer.per_digit_tokens": True}),
        ({"freeze_layer": 12}, {"model.freeze_layers": 12}),
        ({"quantization": True}, {"model.optimizer.state_dtype": "8bit"}),
        ({"int8_training": False}, {}),
        ({"int8_training": True}, {"model.quantize": "8bit"}),
        ({"loss_fn": "PolyLoss", "poly_eps": 0.5}, {"sft.loss_type": "poly", "sft.poly_eps": 0.5}),
        ({"loss_fn": "Poly"}, {"sft.loss_type": "poly"}),
        ({"loss_fn": "CrossEntropyLoss", "poly_eps": 1.0}, {"sft.loss_type": "cross_entropy"}),
        (
            {"peft_model": True},
            {"model.lora.r": 16, "model.lora.alpha": 32, "model.lora.dropout": 0.05},
        ),
        (
            {
                "peft_model": True,
                "peft_config": {"r": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"},
            },
            {
                "model.lora.r": 8,
                "model.lora.alpha": 32,
                "model.lora.dropout": 0.05,
                "model.lora.targets": ["q", "v"],
            },
        ),
        ({"peft_model": False, "peft_type": "lora"}, {}),
        ({"peft_model": True, "peft_type": "prefix-tuning"}, {"model.prefix.num_tokens": 30}),
        (
            {
                "peft_model": True,
                "peft_config": {
                    "peft_type": "prefix-tuning",
                    "num_virtual_tokens": 8,
                    "prefix_projection": True,
                },
            },
            {"model.prefix.num_tokens": 8},
        ),
        (
            {"superhot": True, "superhot_config": {"type": "linear", "scaling_factor": 2}},
            {"model.rope_scaling": {"type": "linear", "factor": 2}},
        ),
        (
            {"superhot": True, "superhot_config": {"type": "ntk", "alpha": 2}},
            {"model.rope_scaling": {"type": "ntk", "alpha": 2}},
        ),
        ({"superhot": False}, {}),
    ],
)
def test_sft(values: dict[str, Any], made: dict[str, Any]) -> None:
    assert options(SFTConfig(), **values) == made


@pytest.mark.parametrize(
    ("values", "made"),
    [
        (
            {"score_l2_reg": 0.001, "loss_fn": "RMLoss"},
            {"rw.score_l2": 0.001, "rw.loss_type": "ranking"},
        ),
        ({"loss_fn": "RMCLSLoss"}, {"rw.loss_type": "classification"}),
        ({"max_replies": 5}, {"dataset.args.max_replies": 5}),
        ({"pooling": "mean", "is_reward_model": True}, {"model.pooling": "mean"}),
        ({"metrics": ["accuracy", "kendalltau"]}, {}),
    ],
)
def test_rm(values: dict[str, Any], made: dict[str, Any]) -> None:
    assert options(RWConfig(), **values) == made


@pytest.mark.parametrize(
    ("base", "values", "wrong"),
    [
        (SFTConfig, {"dtype": "int8"}, "dtype=int8: must be one of fp16"),
        (SFTConfig, {"seq2seqmodel": True}, "seq2seqmodel=true: weft trains decoders"),
        (SFTConfig, {"save_strategy": "often"}, "save_strategy=often: must be no, steps or epoch"),
        (
            SFTConfig,
            {"num_train_epochs": 1.5},
            "num_train_epochs=1.5: epochs are whole above 1; write 1 or 2",
        ),
        (SFTConfig, {"num_train_epochs": 0}, "num_train_epochs=0: must be above 0"),
        (SFTConfig, {"max_length": 9, "val_max_length": "x"}, "val_max_length=x: must be a number"),
        (SFTConfig, {"is_reward_model": True}, "is_reward_model=true: .*weft quickstart rw"),
        (
            SFTConfig,
            {"loss_fn": "RMLoss"},
            "loss_fn=RMLoss: is not a loss of weft quickstart sft; write CrossEntropyLoss",
        ),
        (SFTConfig, {"loss_fn": "Focal"}, "loss_fn=Focal: must be one of CrossEntropyLoss"),
        (SFTConfig, {"use_system_prefix": True}, "use_system_prefix=true: needs a system_prefix"),
        (
            SFTConfig,
            {"samples_mixing": "yes please"},
            "samples_mixing=yes please: must be true or false",
        ),
        (SFTConfig, {"superhot": True}, "superhot=true: needs superhot_config"),
        (
            SFTConfig,
            {"peft_model": True, "peft_type": "ia3"},
            "peft_type=ia3: .* write lora or prefix-tuning",
        ),
        (
            SFTConfig,
            {"peft_model": True, "peft_config": {"peft_type": "prefix-tuning", "r": 4}},
            "peft_config.r=4: weft's prefix-tuning has no such setting",
        ),
        (SFTConfig, {"peft_model": True, "peft_config": {"bias": "all"}}, "peft_config.bias=all"),
        (
            SFTConfig,
            {"peft_model": True, "peft_config": {"rank": 4}},
            "peft_config.rank=4: weft's lora has no such setting",
        ),
        (SFTConfig, {"datasets": ["a", {"b": 3}]}, r"datasets\[1\]: b: 3 is not a parameter"),
        (RWConfig, {"metrics": ["bleu"]}, "weft measures accuracy and kendalltau"),
        (
            RWConfig,
            {"loss_fn": "CrossEntropyLoss"},
            "is not a loss of weft quickstart rw; write RMLoss or RMCLSLoss",
        ),
    ],
)
def test_what_weft_cannot_follow_is_refused_by_name(
    base: type[RunConfig], values: dict[str, Any], wrong: str
) -> None:
    done = mapped(base(), **values)
    assert len(done.rejections) == 1
    with pytest.raises(ValueError, match=wrong):
        raise ValueError(done.rejections[0][1])


@pytest.mark.parametrize(
    "key",
    ["cache_dir", "fuse_gelu", "use_flash_attention", "use_custom_sampler", "log_dir", "verbose"],
)
def test_what_weft_does_anyway_is_noted(key: str) -> None:
    done = mapped(SFTConfig(), **{key: True})
    assert list(done.notes.values()) == [[key]] and not done.rejections


def test_datasets_are_one_list_with_bounded_validation() -> None:
    lists = {
        "datasets": ["webgpt"],
        "datasets_extra": [{"minimath": {"max_val_set": 7}}],
        "eval_size": 20,
    }
    assert options(SFTConfig(), **lists)["dataset.sources"] == [
        {"named": "webgpt", "max_valid": 20},
        {"named": "minimath", "max_valid": 7},
    ]


def test_a_fifth_of_an_epoch_is_a_fifth_of_every_set() -> None:
    made = options(SFTConfig(), num_train_epochs=0.2, datasets=["webgpt"])
    assert made == {
        "total_train_epochs": 1,
        "dataset.sources": [{"named": "webgpt", "fraction": 0.2}],
    }


def test_what_their_trainer_does_by_itself() -> None:
    done = mapped(SFTConfig(), datasets=["webgpt"], model_name="facebook/galactica-125m")
    made = {name: option.value for name, option in done.options.items()}
    assert (
        made["model.optimizer.lr_scheduler_type"] == "linear" and made["dataset.valid_split"] == 0.2
    )
    assert (
        made["model.tokenizer.chat_template"] == "oasst"
        and made["model.tokenizer.add_tokens"] == TURN_TOKENS
    )
    assert made["model.tokenizer.eos_token"] == "</s>"
    tagged = mapped(
        SFTConfig(), datasets=["webgpt"], use_system_tag=True, model_name="EleutherAI/pythia-70m"
    )
    assert tagged.options["model.tokenizer.chat_template"].value == "oasst_v25"
    assert "model.tokenizer.eos_token" not in tagged.options
    assert (
        "model.optimizer.lr_scheduler_type" not in mapped(SFTConfig(), learning_rate=1e-5).options
    )
    policy = mapped(
        PPOConfig(), datasets=["oasst_export"], rank_config={"model_name": "rm"}
    ).options
    assert (
        policy["actor.tokenizer.chat_template"].value
        == policy["rew.tokenizer.chat_template"].value
        == "oasst"
    )
    assert "actor.tokenizer.add_tokens" not in policy
    prefix = mapped(
        SFTConfig(), datasets=["webgpt"], peft_model=True, peft_type="prefix-tuning", model_name="m"
    )
    assert prefix.options["model.tokenizer.chat_template"].value == "zephyr"
    assert "model.tokenizer.add_tokens" not in prefix.options and any(
        "zephyr's form" in note for note in prefix.notes
    )


def test_keys_that_another_trainer_reads_are_noted() -> None:
    done = mapped(RWConfig(), random_offset_probability=0.8, num_rollouts=16)
    assert done.notes == {
        "only weft quickstart sft reads it": ["random_offset_probability"],
        "only weft quickstart ppo reads it": ["num_rollouts"],
    }
    assert mapped(PPOConfig(), learning_rate=1e-5).options == {}


def test_other_losses_of_pairs_keep_their_own() -> None:
    done = mapped(DPOConfig(), loss_fn="RMLoss", datasets=["webgpt"], learning_rate=1e-6)
    assert not done.rejections and done.options["actor.optimizer.lr"].value == 1e-6
    assert "the loss is that of dpo" in done.notes


def test_wandb_is_turned_on_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    made = options(RWConfig(), log_wandb=True)
    assert made == {"logger.wandb.mode": "online", "logger.wandb.project": "reward-model"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert options(RWConfig(), log_wandb=True) == {}


def test_a_later_key_goes_over_an_earlier_one() -> None:
    values = {"sft_config": {"dtype": "fp16"}, "dtype": "fp32"}
    for ranks, dtype in (
        ({"sft_config": 1, "dtype": 0}, "float16"),
        ({"sft_config": 0, "dtype": 1}, "float32"),
    ):
        done = map_keys(KeyMapping(PPOConfig(), values, ranks))
        assert done.options["actor.dtype"].value == dtype


def test_grpo_takes_what_it_has() -> None:
    done = mapped(GRPOConfig(), num_rollouts=16, batch_size=4, rank_config={"model_name": "rm"})
    assert not done.rejections
    assert (
        done.options["grpo.mini_batch_size"].value == 4 and done.options["rew.path"].value == "rm"
    )


def key_table() -> str:
    """Return the Markdown table of Open-Assistant's keys and the options that they are mapped to."""
    names = {SFT: "sft", RM: "rw", RL: "ppo"}
    lines = ["| key | read by | in weft |", "|---|---|---|"]
    for name, key in {**KEYS, **TRLX}.items():
        if name != "implied":
            description = key.description.replace("|", "\\|")
            lines.append(
                f"| `{name.removeprefix('trlx.')}` | "
                f"{', '.join(names[mode] for mode in key.modes)} | {description} |"
            )
    return "\n".join(lines) + "\n"


def test_the_page_has_the_table(repo: Path) -> None:
    page = (repo / "docs" / "open-assistant.md").read_text()
    assert key_table() in page, "put key_table() of this file into docs/open-assistant.md"
    assert all(f"| `{name}` |" in page for name in THEIRS)
    assert all(f"| `{name.removeprefix('trlx.')}` |" in page for name in TRLX if name != "implied")
