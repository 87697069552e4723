"""Options that EasyLM's commands are translated to: the guide's three, and single flags."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.compat.easylm import guide
from tests.compat.easylm.guide import change
from weft.compat.easylm import translation
from weft.compat.easylm.arguments import ModelConversion, TranslatedCommand, parse_flags
from weft.compat.easylm.translation import translate
from weft.errors import ConfigError
from weft.experiment import Experiment

BASE = {
    "llama_train": "--train_dataset.type=tulu_json_torch",
    "llama_train_dpo": "--train_dataset.type=preference_json_torch",
    "llama_train_rm": "--train_dataset.type=preference_json_torch",
    "llama_train_ppo": "--train_dataset.type=tulu_prompt",
    "llama_train_online_dpo": "--train_dataset.type=tulu_prompt",
}


def convert(
    name: str, words: list[str], *, backend: str = "jax", devices: int | None = None
) -> TranslatedCommand:
    return translate(parse_flags(name, words), backend=backend, num_devices=devices)


def small(name: str, *words: str, backend: str = "jax", devices: int | None = 1) -> dict[str, Any]:
    """Return the options of a command with only the required flags and these."""
    sampled = name in ("llama_train_ppo", "llama_train_online_dpo")
    models = ["_policy", "_reward"] if sampled else [""]
    paths = [f"--load_checkpoint{each}=m{each}" for each in models]
    dataset = "--train_dataset.json_torch_dataset.path=rows.jsonl"
    own = [BASE[name], dataset, *paths, *(["--ppo_epochs=1"] if sampled else [])]
    keys = {word.partition("=")[0] for word in words}
    given_words = [word for word in own if word.partition("=")[0] not in keys]
    return convert(name, [*given_words, *words], backend=backend, devices=devices).options


def refuse(message: str, name: str, *words: str, **more: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        small(name, *words, **more)


# -- the guide's commands


def test_sft_of_the_guide() -> None:
    done = convert("llama_train", guide.SFT, devices=32)
    source = {"path": "allenai/tulu-v2-sft-mixture", "split": "train"}
    assert (done.quickstart, done.passed) == ("sft", ())
    assert done.notes == [
        "--optimizer.adamw_optimizer.warmup_ratio=0.03: rounded to the nearest whole update "
        "(EasyLM rounds up)"
    ]
    assert done.streams == {
        "model": ModelConversion("params::G/llama2/7b", "7b", "", "G/llama/tokenizer.model", False)
    }
    assert done.options == {
        "seed": 42,
        "model.backend": "jax",
        "model.layout": "1,-1,8",
        "model.dtype": "bfloat16",
        "model.tokenizer.path": "G/llama/tokenizer.model",
        "model.tokenizer.chat_template": "tulu",
        "model.tokenizer.add_bos_token": True,
        "model.optimizer.type": "adamw",
        "model.optimizer.lr": 2e-5,
        "model.optimizer.end_lr": 0.0,
        "model.optimizer.lr_scheduler_type": "linear",
        "model.optimizer.warmup_steps_proportion": 0.03,
        "model.optimizer.weight_decay": 0.0,
        "model.optimizer.beta1": 0.9,
        "model.optimizer.beta2": 0.95,
        "model.optimizer.max_grad_norm": 1.0,
        "dataset.type": "chat",
        "dataset.sources": [source],
        "dataset.max_seqlen": 8192,
        "dataset.train_bs_n_seqs": 128,  # 32 x 4
        "total_train_epochs": 2,
        "log_freq_steps": 13,  # 50 / 4, rounded up
        "save_freq_steps": 250,
        "save_total_limit": 1,
        "save_milestone_freq_epochs": 1,
        "fileroot": "G/out",
        "logger.wandb.mode": "online",
        "logger.wandb.entity": "E",
        "logger.wandb.project": "P",
    }


def test_dpo_of_the_guide() -> None:
    done = convert("llama_train_dpo", guide.DPO, devices=256)
    assert done.quickstart == "dpo" and list(done.streams) == ["actor"]
    expected = {
        "dpo.beta": 0.1,
        "dpo.label_smoothing": 0.0,
        "dpo.cache_ref_logprobs": False,
        "actor.layout": "-1,16,16",
        "ref.layout": "-1,16,16",
        "actor.optimizer.lr": 5e-7,
        "actor.optimizer.warmup_steps_proportion": 0.1,
        "dataset.type": "preference_json_torch",
        "imports": ["weft.compat.easylm.data"],
        "dataset.max_seqlen": 6144,
        "dataset.train_bs_n_seqs": 32,
        "total_train_epochs": 3,
    }
    assert {key: done.options[key] for key in expected} == expected
    assert "ref.path" not in done.options and "dpo.loss_type" not in done.options


def test_ppo_of_the_guide() -> None:
    done = convert("llama_train_ppo", guide.PPO, devices=256)
    tokenizer = "G/tokenizer.model"
    policy, reward = "params::G/sft/streaming_params_20384", "params::G/rm/streaming_params_1903"
    assert done.streams == {
        "actor": ModelConversion(policy, "13b", "", tokenizer, False),
        "rew": ModelConversion(reward, "13b", "", tokenizer, True),
    }
    roles = ("actor", "critic", "ref", "rew")
    expected = {
        **{f"{role}.layout": "1,64,4" for role in roles},
        **{f"{role}.dtype": "bfloat16" for role in roles},
        **{f"{role}.tokenizer.add_bos_token": True for role in roles},
        **{f"{role}.optimizer.lr": 1e-6 for role in roles[:2]},
        **{f"{role}.optimizer.warmup_epochs": 0.1 for role in roles[:2]},
        **{f"{role}.optimizer.lr_scheduler_type": "constant" for role in roles[:2]},
        "dataset.type": "tulu_prompt",
        "dataset.train_path": "G/ultrafeedback_mean_aspects_cleaned.jsonl",
        "dataset.max_prompt_len": 1024,
        "dataset.train_bs_n_seqs": 512,
        "dataset.num_workers": 16,
        "dataset.remove_truncated_samples": True,
        "ppo.gen.max_new_tokens": 1024,
        "ppo.gen.temperature": 0.7,
        "ppo.samples_per_prompt": 1,
        "ppo.mini_batch_size": 64,
        "ppo.ppo_epochs": 1,
        "ppo.kl_ctl": 0.05,
        "ppo.critic_warmup_epochs": 0.0,
        "ppo.whiten_rewards": False,
        "ppo.vf_coef": 0.1,
        "ppo.missing_eos_reward": -10.0,
        "ppo.reward_output_scaling": 1.0,
        "ppo.reward_output_bias": 0.0,
        "ppo.max_reward_clip": None,
        "ppo.value_norm": False,
        "ppo.early_stop_imp_ratio": None,
        "ppo.critic_init": "rew",
        "save_milestone_freq_steps": 116,
        "save_milestone_freq_epochs": 1,
        "total_train_epochs": 1,
        "trial_name": "NAME",
        "logger.wandb.dir": "DIR",
        "logger.wandb.project": "P",
    }
    assert {key: done.options[key] for key in expected} == expected
    assert "ppo.gen.top_k" not in done.options and "dataset.overlong" not in done.options
    assert done.notes[0].startswith("--use_tpu is left out: jax takes the best devices")
    assert done.notes[1].startswith("--warmup_epochs=0.1: rounded to the nearest whole update")
    assert done.notes[2].startswith("512 completions a step in 8 minibatches of 64 and 1 pass: 8 ")


@pytest.mark.parametrize("name", BASE)
def test_options_are_those_of_the_quickstart(name: str) -> None:
    """The values are valid, too: the configuration is built from them."""
    from weft.cli.quickstart import build_config

    done = convert(name, parse_words(name), devices=1)
    config, _ = build_config([*done.format_words()[1:], "experiment_name=e", "trial_name=t"])
    assert config.seed == 42


def parse_words(name: str) -> list[str]:
    suffixes = ("_policy", "_reward") if name.endswith(("ppo", "online_dpo")) else ("",)
    paths = [f"--load_checkpoint{each}=m" for each in suffixes]
    even = ["--mini_batch_size=2"] if name == "llama_train_online_dpo" else []
    return [BASE[name], "--train_dataset.json_torch_dataset.path=rows.jsonl", *even, *paths]


# -- steps


def test_steps_of_accumulated_batches() -> None:
    """EasyLM counts batches, of which some make an update (its defect l)."""
    accumulated = "--optimizer.accumulate_gradient_steps=4"
    words = ["--total_steps=10", "--log_freq=50", "--save_milestone_freq=6", accumulated]
    options = small("llama_train", *words)
    assert (options["max_steps"], options["log_freq_steps"]) == (3, 13)
    assert options["save_milestone_freq_steps"] == 2
    assert options["dataset.train_bs_n_seqs"] == 32
    refuse("must be at least 1", "llama_train", "--optimizer.accumulate_gradient_steps=0")


def test_without_epochs_the_steps_count() -> None:
    """EasyLM ends with a NameError (its defect b)."""
    options = small("llama_train")
    assert options["max_steps"] == 10000 and "total_train_epochs" not in options
    assert options["model.optimizer.warmup_steps"] == 2000
    assert "save_freq_steps" not in options


def compute_rates(words: list[str], updates: int) -> list[float]:
    """Return the learning rates of a run of SFT with this number of updates."""
    from weft.engine.spec import OptimizerSpec
    from weft.engine.torch.optimizer import compute_learning_rate

    prefix = "model.optimizer."
    options = small("llama_train", *words)
    own = {key.removeprefix(prefix): options[key] for key in options if key.startswith(prefix)}
    spec = OptimizerSpec(**own)
    schedule = spec.build_schedule(updates, updates)
    return [compute_learning_rate(spec, schedule, step) for step in range(updates)]


@given(
    updates=st.integers(1, 40),
    accumulation=st.integers(1, 3),
    warmup=st.integers(1, 60),
    ratio=st.one_of(st.none(), st.floats(0.01, 1)),
)
def test_rates_are_those_of_easylms_schedule(
    updates: int, accumulation: int, warmup: int, ratio: float | None
) -> None:
    """EasyLM uses `optax.join_schedules`; weft's warm-up leaves out the first rate, 0."""
    flag = "--optimizer.adamw_optimizer."
    words = [f"--total_steps={updates * accumulation}", f"{flag}lr=0.5", f"{flag}end_lr=0.125"]
    words += [f"--optimizer.accumulate_gradient_steps={accumulation}"]
    words += [f"{flag}lr_warmup_steps={warmup}"]
    words += [] if ratio is None else [f"{flag}warmup_ratio={ratio!r}"]
    warmup = warmup if ratio is None else math.ceil(ratio * updates)
    expected = []
    for step in range(updates):
        if step < warmup:
            expected.append(0.5 * (step + 1) / warmup)
        else:
            expected.append(0.5 - 0.375 * (step - warmup) / (updates - warmup))
    assert compute_rates(words, updates) == pytest.approx(expected, rel=1e-12)


def test_a_warm_up_that_differs_or_outlasts_the_run_is_noted() -> None:
    flag = "--optimizer.adamw_optimizer."
    done = convert("llama_train", [*parse_words("llama_train"), "--total_steps=100"], devices=1)
    assert done.notes == [
        f"{flag}lr_warmup_steps=2000: the run ends during warm-up, after 100 updates; its last rate "
        "is lr x 100 / 2000, as in EasyLM"
    ]
    words = [*parse_words("llama_train"), "--num_epochs=1"]
    done = convert("llama_train", words, devices=1)
    assert done.options["model.optimizer.warmup_steps"] == 2000
    assert done.notes == [
        f"{flag}lr_warmup_steps=2000: if the run has fewer updates, warm-up ends with it at lr; in "
        "EasyLM the rate is lower then"
    ]
    done = convert("llama_train", [*words, f"{flag}lr_warmup_steps=0"], devices=1)
    assert done.options["model.optimizer.warmup_steps"] == 0 and done.notes == []
    # An option of weft can set the length of the run, too.
    words = [*parse_words("llama_train"), f"{flag}warmup_ratio=0.3", "max_steps=7"]
    done = convert("llama_train", words, devices=1)
    assert done.options["model.optimizer.warmup_steps_proportion"] == 0.3
    assert "model.optimizer.warmup_steps" not in done.options
    assert any("warmup_ratio=0.3: rounded to the nearest" in note for note in done.notes)


def test_epochs_of_ppo_that_are_rounded_are_noted() -> None:
    words = [*parse_words("llama_train_ppo"), "--warmup_epochs=0.1", "--policy_freeze_epochs=0.5"]
    notes = convert("llama_train_ppo", words, devices=1).notes
    assert notes[0].startswith("--warmup_epochs=0.1: rounded to the nearest")
    assert notes[1].startswith("--policy_freeze_epochs=0.5: rounded to the nearest")


@pytest.mark.parametrize("name", ["llama_train_ppo", "llama_train_online_dpo"])
def test_an_epoch_of_samples_ends_with_a_milestone(name: str) -> None:
    options = small(name, "--mini_batch_size=2")
    assert options["save_milestone_freq_epochs"] == 1 and "save_freq_steps" not in options
    assert "save_milestone_freq_epochs" not in small("llama_train")


def test_a_run_has_steps() -> None:
    refuse(
        "--total_steps=0: must be at least 1, unless --num_epochs", "llama_train", "--total_steps=0"
    )
    words = ["--total_steps=0", "--num_epochs=2"]
    assert small("llama_train", *words)["total_train_epochs"] == 2


def test_validation_rows() -> None:
    path = "--eval_dataset.json_torch_dataset.path=valid.jsonl"
    options = small(
        "llama_train", "--eval_steps=3", "--log_freq=5", path, "--eval_dataset.type=tulu_json_torch"
    )
    assert (options["dataset.valid_path"], options["eval_freq_steps"]) == ("valid.jsonl", 5)
    assert "dataset.valid_path" not in small("llama_train", path)
    refuse("--eval_dataset.json_torch_dataset.path is missing", "llama_train", "--eval_steps=3")
    refuse(
        "must be the type of train_dataset",
        "llama_train",
        "--eval_steps=3",
        "--eval_dataset.type=json",
    )


# -- losses


def test_a_path_of_rows_counts_before_a_dataset_of_the_hub() -> None:
    rows = "--train_dataset.json_torch_dataset."
    done = convert("llama_train", [*parse_words("llama_train"), f"{rows}hf_name=a/b"])
    assert done.options["dataset.train_path"] == "rows.jsonl"
    assert f"{rows}hf_name is left out: {rows}path names the rows" in done.notes


def test_losses_of_pairs() -> None:
    options = small("llama_train_dpo", "--dpo_label_smoothing=0.1", "--dpo_beta=0.3")
    assert (options["dpo.label_smoothing"], options["dpo.beta"]) == (0.1, 0.3)
    options = small("llama_train_dpo", "--use_ipo", "--precalculate_reference_logps=True")
    assert (options["dpo.loss_type"], options["dpo.cache_ref_logprobs"]) == ("ipo_sum", True)
    options = small("llama_train_dpo", "--load_reference_checkpoint=params::r")
    assert "ref.path" not in options  # converted first
    assert small("llama_train_dpo", "--load_reference_checkpoint=r")["ref.path"] == "r"


def test_margins_of_reward_models_are_read_if_they_are_asked_for() -> None:
    assert "dataset.args.use_margin" not in small("llama_train_rm")
    assert small("llama_train_rm", "--use_margin=True")["dataset.args.use_margin"] is True


def test_a_reward_model_can_begin_from_one() -> None:
    words = [*parse_words("llama_train_rm")[:-1], "--load_checkpoint=params::f"]
    assert not convert("llama_train_rm", words).streams["model"].is_reward_model
    words.append("--load_from_causal_lm=False")
    assert convert("llama_train_rm", words).streams["model"].is_reward_model


numbers = st.floats(-100, 100).filter(lambda x: abs(x) > 1e-3)


@given(score=st.floats(-50, 50), gain=numbers, bias=st.floats(-50, 50))
def test_rewards_are_those_of_easylms_formula(score: float, gain: float, bias: float) -> None:
    options = small("llama_train_ppo", f"--reward_gain={gain!r}", f"--reward_bias={bias!r}")
    scaling, shift = options["ppo.reward_output_scaling"], options["ppo.reward_output_bias"]
    bound = 1e-300 + 1e-15 * (  # at most four roundings of each side
        abs(score * gain) + abs(bias) + abs(gain * shift)
    )
    assert abs((score - shift) * scaling - (score * gain + bias)) <= bound


def test_a_gain_of_0() -> None:
    options = small("llama_train_ppo", "--reward_gain=0")
    assert options["ppo.reward_output_scaling"] == 0 == options["ppo.reward_output_bias"]
    refuse(
        "every completion has the same reward",
        "llama_train_ppo",
        "--reward_gain=0",
        "--reward_bias=1",
    )


def test_options_of_ppo() -> None:
    words = "--whiten_rewards=True --policy_freeze_epochs=0.5 --gamma=0.9 --lam=0.8 --vf_coef=0.2"
    options = small("llama_train_ppo", *words.split(), "--cliprange=0.3", "--cliprange_value=0.4")
    expected = {
        "ppo.whiten_rewards": True,
        "ppo.critic_warmup_epochs": 0.5,
        "ppo.discount": 0.9,
        "ppo.gae_lambda": 0.8,
        "ppo.vf_coef": 0.2,
        "ppo.eps_clip": 0.3,
        "ppo.value_eps_clip": 0.4,
    }
    assert {key: options[key] for key in expected} == expected


# -- the guide's rules


def test_minibatches_divide_the_completions() -> None:
    words = ["--train_dataset.json_torch_dataset.batch_size=6", "--rollouts_per_prompt=2"]
    options = small("llama_train_ppo", *words, "--mini_batch_size=4")
    assert options["ppo.mini_batch_size"] == 4
    refuse(
        "--mini_batch_size=5: must divide the 12 completions",
        "llama_train_ppo",
        *words,
        "--mini_batch_size=5",
    )
    refuse("--mini_batch_size=0: must be at least 1", "llama_train_ppo", "--mini_batch_size=0")
    steps = "--optimizer.accumulate_gradient_steps="
    assert (
        small("llama_train_ppo", *words, "--mini_batch_size=2", f"{steps}3")["ppo.mini_batch_size"]
        == 6
    )
    refuse(
        "x mini_batch_size=2 is 10, which must divide",
        "llama_train_ppo",
        *words,
        "--mini_batch_size=2",
        f"{steps}5",
    )
    refuse(
        "must divide the 12 completions", "llama_train_ppo", *words, "--forward_mini_batch_size=7"
    )


def test_minibatches_of_the_guide_before_3_2() -> None:
    words = ["--forward_mini_batch_size=4", "--backward_mini_batch_size=2"]
    assert small("llama_train_ppo", *words)["ppo.mini_batch_size"] == 2
    refuse("are the same setting", "llama_train_ppo", *words, "--mini_batch_size=4")


def test_minibatches_and_meshes() -> None:
    words = ["--mesh_dim=1,8,1", "--mini_batch_size=4"]
    refuse("write --mesh_dim=1,4,2", "llama_train_ppo", *words, devices=8)
    refuse("write --mesh_dim=1,4,2", "llama_train_online_dpo", *words, devices=8)
    refuse("the number of devices, 8; write 1,8,1", "llama_train", "--mesh_dim=1,64,4", devices=8)
    more = [*words[1:], "--mesh_dim=2,2,2", "--forward_mini_batch_size=2"]
    refuse("--forward_mini_batch_size=2: must be a multiple", "llama_train_ppo", *more, devices=8)


minibatch_words = st.sampled_from([1, 2, 4, 6, 8, 12, 24])


@given(
    name=st.sampled_from(["llama_train_ppo", "llama_train_online_dpo"]),
    mesh=st.tuples(*[st.sampled_from([1, 2, 3, 4, 8, 64])] * 3),
    rows=minibatch_words.filter(lambda n: n % 2 == 0),
    forward=st.one_of(st.none(), minibatch_words),
)
def test_the_mesh_that_a_message_names_is_accepted(
    name: str, mesh: tuple[int, ...], rows: int, forward: int | None
) -> None:
    words = [f"--mini_batch_size={rows}", "--train_dataset.json_torch_dataset.batch_size=24"]
    words += [] if forward is None else [f"--forward_mini_batch_size={forward}"]
    try:
        small(name, *words, f"--mesh_dim={','.join(map(str, mesh))}", devices=8)
    except ConfigError as error:
        named = re.search(r"write (?:--mesh_dim=)?([\d,]*\d)", str(error))
        assert named is not None
        small(name, *words, f"--mesh_dim={named[1]}", devices=8)


def test_copies_of_the_model_are_fine_for_ppo() -> None:
    """EasyLM needs dp=1 for PPO."""
    options = small("llama_train_ppo", "--mesh_dim=4,2,1", "--mini_batch_size=8", devices=8)
    assert options["actor.layout"] == options["rew.layout"] == "4,2,1"
    torch = small(
        "llama_train_ppo", "--mesh_dim=4,2,1", "--mini_batch_size=8", backend="torch", devices=None
    )
    assert torch["actor.layout"] == "d8f2t1" and torch["critic.backend"] == "torch"


def test_pairs_of_completions_stay_together() -> None:
    options = small("llama_train_online_dpo", "--mini_batch_size=4")
    assert options["online_dpo.mini_batch_size"] == 4
    assert "online_dpo.samples_per_prompt" not in options  # 2 by default
    refuse("must be even", "llama_train_online_dpo", "--mini_batch_size=1")


def test_an_epoch_of_some_batches() -> None:
    options = small("llama_train_ppo", "--max_steps_per_epoch=3")
    assert options["dataset.sources"] == [{"path": "rows.jsonl", "size": 24}]


def test_several_hosts() -> None:
    words = parse_words("llama_train")
    assert convert("llama_train", words).environment == {}
    automatic = {"WEFT_JAX_COORDINATOR": "auto"}
    for flag in ("initialize_jax_distributed", "jax_distributed.initialize_jax_distributed"):
        assert convert("llama_train", [*words, f"--{flag}=True"]).environment == automatic
    group = "--jax_distributed."
    more = [f"{group}coordinator_address=h:1", f"{group}num_processes=2", f"{group}process_id=0"]
    started = f"{group}initialize_jax_distributed"
    assert convert("llama_train", [*words, started, *more]).environment == {
        "WEFT_JAX_COORDINATOR": "h:1",
        "WEFT_JAX_PROCESSES": "2",
        "WEFT_JAX_PROCESS": "0",
    }
    refuse("has no effect without", "llama_train", *more)
    for flag in (f"{group}initialize_jax_distributed", "--initialize_jax_distributed"):
        message = f"{flag}=True: connects processes of JAX, and the backend is torch"
        refuse(message, "llama_train", f"{flag}=True", backend="torch")
    refuse(f"{group}process_id is missing: set all of", "llama_train", started, *more[:2])
    refuse("all devices of its host", "llama_train", f"{group}local_device_ids=0,1")


# -- what a published result needs


def test_easylm_compat() -> None:
    decay = "--optimizer.adamw_optimizer.weight_decay=0"
    words = ["--easylm_compat=true", decay, "--mini_batch_size=8"]
    options = small("llama_train_ppo", *words)
    assert options["ppo.gen.top_k"] == 50 and options["ppo.logprob_temperature"] == 1.0
    assert options["actor.tokenizer.add_bos_token"] is False  # its defect g
    assert small("llama_train_ppo")["actor.tokenizer.add_bos_token"] is True
    bos = "--tokenizer.add_bos_token=True"
    assert small("llama_train_ppo", *words, bos)["actor.tokenizer.add_bos_token"] is True
    assert "ppo.logprob_temperature" not in small("llama_train_ppo")
    words[-1] = "--mini_batch_size=2"  # below 16, but nothing is whitened
    assert small("llama_train_online_dpo", *words)["online_dpo.gen.top_k"] == 50


@pytest.mark.parametrize(
    ("name", "word", "message"),
    [
        ("llama_train_ppo", "--ppo_epochs=4", "EasyLM repeats an update"),
        ("llama_train_ppo", "--optimizer.adamw_optimizer.weight_decay=0.1", "write 0.0"),
        ("llama_train", "--optimizer.accumulate_gradient_steps=4", "averages means of batches"),
        (
            "llama_train_ppo",
            "--mini_batch_size=4",
            "with mini_batch_size=4 EasyLM whitens advantages over each minibatch, and weft over "
            "the 8 completions of a step; write --mini_batch_size=8, or a batch_size",
        ),
        (
            "llama_train_ppo",
            "--backward_mini_batch_size=2",
            "with backward_mini_batch_size=2 EasyLM whitens advantages over each minibatch, and "
            "weft over the 8 completions of a step; write --backward_mini_batch_size=8",
        ),
    ],
)
def test_what_easylm_compat_does_not_reproduce(name: str, word: str, message: str) -> None:
    decay = "--optimizer.adamw_optimizer.weight_decay=0"
    words = [*(w for w in (decay,) if w.partition("=")[0] != word.partition("=")[0]), word]
    refuse(message, name, "--easylm_compat=true", *words)


def test_whitened_rewards_need_one_minibatch() -> None:
    words = ["--easylm_compat=true", "--optimizer.adamw_optimizer.weight_decay=0"]
    words += ["--whiten_rewards=True", "--rollouts_per_prompt=2"]
    refuse("whitens advantages and rewards", "llama_train_ppo", *words, "--mini_batch_size=8")
    assert small("llama_train_ppo", *words, "--mini_batch_size=16")["ppo.whiten_rewards"] is True


# -- models and tokenizers


def test_streams_and_their_configuration() -> None:
    words = [*parse_words("llama_train")[:-1], "--load_checkpoint=trainstate_params::f"]
    done = convert("llama_train", words)
    assert done.streams["model"] == ModelConversion("trainstate_params::f", "", "", None, False)
    assert "model.path" not in done.options
    update = "--update_llama_config=dict(max_sequence_length=4096, remat_block='nothing_saveable')"
    done = convert("llama_train", [*words, "--load_llama_config=debug", update])
    assert done.streams["model"].update == "{'max_sequence_length': 4096}"
    assert done.streams["model"].config == "debug"
    assert done.options["model.recompute_policy"] == "nothing_saveable"
    policies = ["--llama.remat_mlp=checkpoint_dots", "--llama.remat_attention=nothing_saveable"]
    done = convert("llama_train", [*words, *policies])
    assert done.options["model.recompute_policy"] == "nothing_saveable"
    done = convert("llama_train", [*words, policies[0]])
    assert done.options["model.recompute_policy"] == "checkpoint_dots"
    done = convert("llama_train", [*words, policies[0]], backend="torch")
    assert done.options["model.gradient_checkpointing"] is True
    assert "model.recompute_policy" not in done.options
    done = convert("llama_train", [*words, "--llama.hidden_size=64", "--llama.resid_pdrop=0.1"])
    assert done.streams["model"].update == "{'hidden_size': 64}"
    assert done.options["model.residual_dropout"] == 0.1


def test_fields_of_a_json_file_are_those_of_an_update(tmp_path: Path) -> None:
    from weft.compat.easylm.configs import check_trainable, load_llama_config

    values = {"resid_pdrop": 0.1, "remat_mlp": "nothing_saveable", "scan_mlp": True}
    (tmp_path / "own.json").write_text(json.dumps({**values, "hidden_size": 64}))
    file = f"json::{tmp_path / 'own.json'}"
    words = [*parse_words("llama_train")[:-1], "--load_checkpoint=params::f"]
    done = convert("llama_train", [*words, f"--load_llama_config={file}"], devices=1)
    update = f"--update_llama_config={values!r}"
    same = convert("llama_train", [*words, update], devices=1)
    assert done.options == same.options and done.notes == same.notes
    assert done.options["model.residual_dropout"] == 0.1
    assert done.options["model.recompute_policy"] == "nothing_saveable"
    assert sum(note.startswith("scan_mlp is left out") for note in done.notes) == 1
    # The stream is converted to a model without dropout; the role then sets the dropout.
    stream = done.streams["model"]
    converted = load_llama_config(stream.config, stream.update)
    check_trainable(converted, "")
    assert (converted.hidden_size, converted.resid_pdrop) == (64, 0.0)
    back = "--update_llama_config=dict(resid_pdrop=0.0)"
    done = convert("llama_train", [*words, f"--load_llama_config={file}", back], devices=1)
    assert "model.residual_dropout" not in done.options
    # Also with a Hugging Face model.
    options = small("llama_train", f"--load_llama_config={file}")
    assert (options["model.path"], options["model.residual_dropout"]) == ("m", 0.1)


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("embd_pdrop", 0.1, "weft has no dropout of embeddings alone"),
        ("fcm_max_ratio", 0.1, "weft has no forgetful causal mask"),
        ("resid_pdrop", 1.5, "must be at least 0 and below 1"),
    ],
)
def test_fields_that_weft_lacks_are_refused_from_both(
    key: str, value: float, rule: str, tmp_path: Path
) -> None:
    (tmp_path / "own.json").write_text(json.dumps({key: value}))
    file = f"--load_llama_config=json::{tmp_path / 'own.json'}"
    refuse(f"{file}: {key}={value}: {rule}", "llama_train", file)
    update = f"--update_llama_config={{'{key}': {value}}}"
    refuse(f"--update_llama_config: {key}={value}: {rule}", "llama_train", update)


def test_palm_has_a_rate_that_falls_with_the_root_of_the_step() -> None:
    """Rate: lr / 0.01 / sqrt(max(step, warm-up)); weight decay: weight_decay / 1e-4 rate^2."""
    words = [
        *parse_words("llama_train"),
        "--optimizer.type=palm",
        "--optimizer.adamw_optimizer.lr=1",
    ]
    words += [
        "--optimizer.palm_optimizer.lr_warmup_steps=400",
        "--optimizer.palm_optimizer.lr=0.02",
    ]
    done = convert("llama_train", words)
    wanted = {
        "type": "palm",
        "lr": 0.02 / 0.01 / 400**0.5,
        "end_lr": 0.0,
        "lr_scheduler_type": "rsqrt",
        "warmup_steps": 400,
        "beta1": 0.9,
        "beta2": 0.99,
        "max_grad_norm": 1.0,
        "weight_decay": 1.0,
    }
    for name, value in wanted.items():
        assert done.options[f"model.optimizer.{name}"] == pytest.approx(value)
    assert any("adamw_optimizer.lr has no effect" in note for note in done.notes)
    with pytest.raises(ConfigError, match="the rate of this command"):
        convert("llama_train_ppo", [*parse_words("llama_train_ppo"), "--optimizer.type=palm"])


def test_without_a_checkpoint_weights_begin_at_random() -> None:
    words = [*parse_words("llama_train")[:-1], "--load_llama_config=debug", "--tokenizer=t"]
    done = convert("llama_train", words)
    assert done.streams["model"] == ModelConversion("", "debug", "", "t", False)
    assert done.options["model.init_from_scratch"] is True
    assert done.notes == ["--load_checkpoint is not set: the weights begin at random"]


def test_configurations_are_literals() -> None:
    """EasyLM evaluates them (its defect m)."""
    refuse(
        "must be a dictionary of plain values",
        "llama_train",
        "--load_checkpoint=params::f",
        "--update_llama_config=__import__('os').system('true')",
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--load_checkpoint="], "--load_checkpoint is missing: name a stream"),
        (["--update_llama_config=dict(vocab_size=8)"], "config.json says what it is"),
        (["--llama.vocab_size=8"], "config.json says what it is"),
        (
            ["--load_checkpoint=params::f", "--load_llama_config=7b", "--llama.vocab_size=8"],
            'has no effect in EasyLM with --load_llama_config=7b; write --update_llama_config="dict(',
        ),
        (["--load_checkpoint=params::f", "--load_llama_config=7c"], "nown are 1b, 3b"),
        (["--llama.fcm_max_ratio=0.1"], "forgetful causal mask"),
        (["--tokenizer=a", "--tokenizer.vocab_file=b"], "both name the tokenizer; set one"),
        (["--dtype=fp8"], "--dtype=fp8: must be one of fp32, bf16, fp16"),
        (["--optimizer.type=sgd"], "must be adamw, palm or lion"),
        (["--optimizer.type=palm", "--optimizer.palm_optimizer.bf16_momentum=True"], "float32"),
        (["--load_dataset_state=x"], "a run resumes exactly"),
        (["--train_dataset.type=tulu"], "did you mean tulu_json_torch?"),
        (["--train_dataset.type=tulu_prompt"], "llama_train reads tulu_json_torch, json_torch"),
        (
            ["--train_dataset.json_dataset.path=x"],
            "reads --train_dataset.json_torch_dataset.* only",
        ),
        (["--train_dataset.hf_prompt_dataset.path=x"], "not for this command"),
        (["--train_dataset.text_processor.fields=a"], "reads --train_dataset.json_torch_dataset.*"),
        (["--train_dataset.json_torch_dataset.path="], "path is missing: name the training rows"),
    ],
)
def test_what_is_refused(words: list[str], message: str) -> None:
    refuse(message, "llama_train", *words)


def test_defaults_of_refused_flags_are_accepted_without_a_word() -> None:
    words = [
        *parse_words("llama_train"),
        "--llama.fcm_max_ratio=0.0",
        "--tokenizer_pad_token_id=128255",
    ]
    assert convert("llama_train", words, devices=1).notes == []
    words.append("--tokenizer_pad_token_id=0")
    assert convert("llama_train", words, devices=1).notes == [
        "--tokenizer_pad_token_id is left out: rows are packed, not padded"
    ]


# -- rows


def test_prompts_between_texts_of_policy_and_reward_model() -> None:
    group = "--train_dataset.hf_prompt_dataset."
    words = ["--train_dataset.type=hf_prompt", f"{group}path=a/b", "--load_checkpoint_policy=m"]
    words.append("--load_checkpoint_reward=r")
    options = convert("llama_train_ppo", words, devices=1).options
    assert options["dataset.args.prefix"] == "<|user|>\n"
    assert options["dataset.sources"] == [{"path": "a/b", "split": "train"}]
    assert "rew.prompt_prefix" not in options
    own = [f"{group}reward_prefix_tokens=Human: ", f"{group}reward_suffix_tokens=\\nAssistant: "]
    options = convert("llama_train_ppo", [*words, *own, f"{group}name=f"], devices=1).options
    assert options["rew.prompt_prefix"] == "Human: "
    assert options["rew.prompt_suffix"] == "\nAssistant: "
    assert options["dataset.sources"] == [{"path": "a/b:f", "split": "train"}]


def test_text_fields() -> None:
    fields = "--train_dataset.text_processor.fields=[a+b],c"
    path = "--train_dataset.json_dataset.path=x.jsonl"
    words = ["--train_dataset.type=json", fields, path, "--load_checkpoint=m"]
    options = convert("llama_train", words, devices=1).options
    assert options["dataset.type"] == "text_fields" and options["dataset.train_path"] == "x.jsonl"
    assert options["dataset.args.fields"] == "[a+b],c"
    words[1] = "--train_dataset.text_processor.fields="
    options = convert("llama_train", words, devices=1).options
    assert "dataset.args.fields" not in options  # empty: not set
    column = "--train_dataset.text_processor.fields_from_example=which"
    options = convert("llama_train", [*words, column], devices=1).options
    assert options["dataset.args.fields"] == ""
    assert options["dataset.args.fields_from_example"] == "which"
    assert "model.tokenizer.chat_template" not in options
    hub = convert("llama_train", ["--load_checkpoint=m"], devices=1).options
    assert hub["dataset.sources"] == [{"path": "allenai/c4:en", "split": "train"}]


def test_long_prompts_lose_their_left_end() -> None:
    """EasyLM cuts off the right end, which includes the assistant's turn (its defect i)."""
    options = small("llama_train_ppo")
    assert options["dataset.overlong"] == "truncate" and "dataset.truncate_side" not in options


def test_names_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translation, "find_spec", lambda name: object())
    words = ["--logger.prefix=a b", "--logger.project=p"]
    options = small("llama_train", *words)
    assert options["logger.wandb.project"] == "a b--p" and "trial_name" not in options
    assert options["logger.wandb.mode"] == "offline"
    words += ["--logger.prefix_to_id=True", "--logger.experiment_id=x_1"]
    options = small("llama_train", *words)
    assert (options["trial_name"], options["logger.wandb.project"]) == ("a-b--x-1", "p")
    assert not any(key.startswith("logger.") for key in small("llama_train"))


def test_an_offline_log_needs_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translation, "find_spec", lambda name: None)
    assert not any(key.startswith("logger.") for key in small("llama_train", "--logger.project=p"))
    online = small("llama_train", "--logger.project=p", "--logger.online=True")
    assert online["logger.wandb.mode"] == "online"  # refused when the run starts


def test_other_values_of_the_guides_commands() -> None:
    words = change(guide.SFT, num_epochs=1, logger__online=None)
    assert "--num_epochs=1" in words and not any("online" in word for word in words)


# -- defects of EasyLM that the runs do not have


def build(name: str, *words: str) -> Experiment:
    from weft.cli.quickstart import build_config

    done = convert(name, [*parse_words(name), *words], backend="torch", devices=1)
    config, _ = build_config([*done.format_words()[1:], "experiment_name=e", "trial_name=t"])
    return config.build()


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.tiny import make_llama

    monkeypatch.chdir(tmp_path)
    make_llama(tmp_path / "m")
    (tmp_path / "rows.jsonl").write_text("{}\n")


@pytest.mark.usefixtures("models")
def test_what_an_update_compares_with_is_computed_once() -> None:
    """EasyLM recomputes it in every minibatch, so its clips have no effect (its defect a)."""
    experiment = build("llama_train_ppo", "--ppo_epochs=4")
    actor, critic = experiment.get_node("actor_train"), experiment.get_node("critic_train")
    assert actor.args["epochs"] == critic.args["epochs"] == 4
    producers = {key: node.name for node in experiment.graph.nodes for key in node.outputs}
    assert producers["logprobs"] == "actor_gen" and producers["values"] == "critic_inf"
    assert producers["advantages"] == producers["returns"] == "advantages"
    assert {"logprobs", "advantages"} <= set(actor.inputs)
    assert {"values", "returns"} <= set(critic.inputs)


@pytest.mark.usefixtures("models")
def test_online_dpo_compares_whole_completions() -> None:
    """EasyLM compares single tokens, including those after the end (its defect e)."""
    from weft.algorithms.preferences import KINDS

    training = build("llama_train_online_dpo").get_node("actor_train")
    loss = training.args["loss_args"]
    assert (loss["loss_type"], loss["beta"]) == ("sigmoid", 0.1)
    assert KINDS["sigmoid"].score == "sum" and "loss_mask" in training.optional_inputs


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("name", ["llama_train_dpo", "llama_train_ppo"])
def test_the_reference_has_no_optimizer(name: str) -> None:
    """EasyLM's has one (its defect f)."""
    roles = build(name).roles
    assert not roles["ref"].trained and roles["actor"].trained


def test_a_run_is_continued_where_it_stopped() -> None:
    """EasyLM restarts the epoch (its defect n)."""
    from weft.experiments import SFTConfig

    assert "recover_mode" not in small("llama_train") and SFTConfig().recover_mode == "auto"
