"""Tables of EasyLM's flags: each flag of its code and its guide is there, and in the page."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from tests.compat.easylm import guide
from tests.docs.test_coming_from import Row, options_of, says, tables
from tests.docs.test_pages import ROOT
from weft import registry
from weft.compat.easylm.flag_rules import FlagRule
from weft.compat.easylm.flags import TRAINING

# Flags of EasyLM's last version, by script.
EVERY = """seed mesh_dim dtype load_dataset_state log_freq save_model_freq save_milestone_freq num_epochs
log_all_worker tokenizer tokenizer_pad_token_id train_dataset.type eval_dataset.type optimizer.type
optimizer.accumulate_gradient_steps checkpointer.float_dtype checkpointer.save_optimizer_state
jax_distributed.initialize_jax_distributed jax_distributed.coordinator_address
jax_distributed.num_processes jax_distributed.process_id jax_distributed.local_device_ids"""
ALONE = """initialize_jax_distributed total_steps load_llama_config update_llama_config load_checkpoint
eval_steps"""
SAMPLED = """load_llama_config_policy load_llama_config_reward update_llama_config_policy
update_llama_config_reward load_checkpoint_policy load_checkpoint_reward max_continuation_len
mini_batch_size use_tpu ppo_epochs warmup_epochs lr reward_gain reward_bias temperature
max_steps_per_epoch generate_only"""
OWN = {
    "llama_train": ALONE,
    "llama_train_dpo": ALONE
    + """ load_reference_checkpoint dpo_beta dpo_label_smoothing use_ipo
    precalculate_reference_logps""",
    "llama_train_rm": ALONE + " load_from_causal_lm use_margin",
    "llama_train_ppo": SAMPLED
    + """ rollouts_per_prompt policy_freeze_epochs kl_coef whiten_rewards gamma lam cliprange
    cliprange_value vf_coef""",
    "llama_train_online_dpo": SAMPLED + " beta",
}
GROUPS = {
    "llama": """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads max_sequence_length rms_norm_eps initializer_range use_cache bos_token_id
    eos_token_id resid_pdrop embd_pdrop attn_pdrop tie_word_embeddings remat_block remat_attention
    remat_mlp scan_attention scan_mlp scan_query_chunk_size scan_key_chunk_size
    scan_mlp_chunk_size fcm_min_ratio fcm_max_ratio rope_theta use_hf_rotary_emb use_scaled_rope""",
    "optimizer.adamw_optimizer": """init_lr end_lr lr lr_freeze_steps lr_warmup_steps lr_decay_steps
    warmup_ratio b1 b2 clip_gradient weight_decay bf16_momentum multiply_by_parameter_scale""",
    "optimizer.palm_optimizer": """lr lr_warmup_steps b1 b2 clip_gradient weight_decay
    bf16_momentum""",
    "logger": """online prefix project output_dir wandb_dir random_delay experiment_id anonymous
    notes entity prefix_to_id""",
    "tokenizer": "vocab_file add_bos_token",
}
DATASETS = {
    "text_processor": """fields_from_example fields subfield_separator add_bos_token add_eos_token
    prepend_text base64_token_dtype""",
    "huggingface_dataset": """path name split streaming seq_length batch_size
    always_start_with_bos batch_token_dtype""",
    "json_dataset": """path seq_length batch_size always_start_with_bos start_seek_loc
    example_index_at_start tokens_count_at_start tokenizer_processes tokenizer_parallel_chunk_size
    tokenizer_parallel_batch_size throughput_average_window_size""",
    "json_torch_dataset": """path hf_name hf_split seq_length batch_size num_workers
    remove_truncated_samples""",
    "tulu_prompt_dataset": """path hf_name hf_split seq_length batch_size num_workers
    remove_truncated_samples""",
    "hf_prompt_dataset": """path name split streaming seq_length num_workers batch_size
    policy_prefix_tokens policy_suffix_tokens reward_prefix_tokens reward_suffix_tokens""",
}
PAGE = ROOT / "docs" / "coming-from" / "easylm.md"
TABLES = {table.quickstart: table for table in tables(PAGE)}
LISTED_ELSEWHERE = re.compile(r"not for this command|EasyLM evaluates nothing|rows are read as")


def known_flags(name: str) -> set[str]:
    flags = set((EVERY + " " + OWN[name]).split())
    for group, names in GROUPS.items():
        flags |= {f"{group}.{each}" for each in names.split()}
    for group, names in DATASETS.items():
        for which in ("train_dataset", "eval_dataset"):
            flags |= {f"{which}.{group}.{each}" for each in names.split()}
    return flags


@pytest.mark.parametrize("name", TRAINING)
def test_every_flag_of_the_code_and_the_guide_is_in_the_table(name: str) -> None:
    assert known_flags(name) <= set(TRAINING[name].flags)
    typed = {"llama_train": guide.SFT, "llama_train_dpo": guide.DPO, "llama_train_ppo": guide.PPO}
    for word in typed.get(name, []):
        assert word.removeprefix("--").partition("=")[0] in TRAINING[name].flags


@pytest.mark.parametrize("name", TRAINING)
def test_rules_name_options_that_exist_or_give_a_reason(name: str) -> None:
    command = TRAINING[name]
    options = options_of(command.quickstart)
    for flag, rule in command.flags.items():
        if rule.treatment in ("refuse", "ignore"):
            assert rule.note and not rule.options, flag
            continue
        assert rule.options or rule.note, flag
        for option in rule.options:
            assert set(command.expand(option)) <= set(options), flag


def list_rules(config: Any, prefix: str = "") -> dict[str, Mapping[str, Any]]:
    """Return the rules of all options of a configuration, by name."""
    rules: dict[str, Mapping[str, Any]] = {}
    for spec in fields(config):
        value = getattr(config, spec.name)
        if is_dataclass(value):
            rules |= list_rules(value, f"{prefix}{spec.name}.")
        else:
            rules[f"{prefix}{spec.name}"] = spec.metadata
    return rules


@pytest.mark.parametrize("name", TRAINING)
def test_numbers_that_an_option_refuses_are_refused_by_the_flag(name: str) -> None:
    """Otherwise, the message would name an option that the user did not type."""
    command = TRAINING[name]
    rules = list_rules(registry.quickstarts.get(command.quickstart)())
    for flag, rule in command.flags.items():
        if rule.value_type not in (int, float) or rule.treatment == "refuse":
            continue
        for option in (each for name in rule.options for each in command.expand(name)):
            limits = rules[option]
            low, high = limits.get("at_least"), limits.get("at_most")
            below = limits.get("below")
            outside = [] if low is None else [min(0, low) - 1]
            outside += [low - 1] if low and rule.treatment == "copy" else []
            outside += [] if high is None else [high + 1]
            outside += [] if below is None else [below]
            for value in outside:
                assert rule.limits is not None and value not in rule.limits, (flag, value)
        default = command.get_default(flag)
        assert default == "" or rule.limits is None or default in rule.limits, flag


def find_row(quickstart: str, flag: str) -> Row | None:
    rows = [row for row in TABLES[quickstart].rows if flag in row.old]
    assert len(rows) <= 1, f"{flag} has two rows"
    return rows[0] if rows else None


def check_row(name: str, flag: str, rule: FlagRule, row: Row) -> None:
    command = TRAINING[name]
    expected = [each for option in rule.options for each in command.expand(option)]
    assert list(row.names) == expected, flag
    default = command.get_default(flag)
    if isinstance(default, str):
        text = row.old_default.strip("`").replace("\\n", "\n").replace("\\|", "|")
        assert text.strip(" ") == default.strip(" "), flag
    else:
        assert says(row.old_default, default), flag


@pytest.mark.parametrize("name", TRAINING)
def test_the_page_has_a_row_for_every_flag(name: str) -> None:
    """The row is in the command's table, or in that of SFT or PPO if the flag is the same there."""
    command = TRAINING[name]
    for flag, rule in command.flags.items():
        if LISTED_ELSEWHERE.match(rule.note) and find_row(command.quickstart, flag) is None:
            continue
        row = find_row(command.quickstart, flag)
        if row is not None:
            check_row(name, flag, rule, row)
            continue
        others = ["llama_train", *(["llama_train_ppo"] if command.samples else [])]
        same = [
            other
            for other in others
            if find_row(TRAINING[other].quickstart, flag) is not None
            and TRAINING[other].flags[flag] == rule
            and TRAINING[other].get_default(flag) == command.get_default(flag)
        ]
        assert same, f"{flag} has no row"


def test_the_page_has_no_row_for_flags_that_are_not_there() -> None:
    by_quickstart = {command.quickstart: command for command in TRAINING.values()}
    for quickstart, table in TABLES.items():
        for row in table.rows:
            assert set(row.old) <= set(by_quickstart[quickstart].flags), row
