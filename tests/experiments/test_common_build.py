"""Shipped experiments: their nodes, keys, sizes, and what is refused before anything runs.

None of it loads torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from weft import registry
from weft.engine.spec import ModelSpec, TokenizerSpec
from weft.errors import ConfigError, GraphError, UserError
from weft.experiment import Experiment
from weft.experiments import (
    DistillConfig,
    DPOConfig,
    GenConfig,
    GRPOConfig,
    OnlineDPOConfig,
    PPOConfig,
    RWConfig,
    SFTConfig,
)
from weft.experiments.common import LoggerSpec, RunConfig, TrackioSpec, WandbSpec, parse_hooks
from weft.graph.mfc import Call, HostFunction, MFCDef, Offload, ParamSync
from weft.options import option, read, to_mapping

NODES = {
    "sft": ["train"],
    "rw": ["train"],
    "dpo": ["ref_inf", "actor_train"],
    "ppo": [
        "actor_gen",
        "rew_inf",
        "ref_inf",
        "critic_inf",
        "advantages",
        "actor_train",
        "critic_train",
    ],
    "grpo": ["actor_gen", "reward", "ref_inf", "advantages", "actor_train"],
    "online_dpo": ["actor_gen", "reward", "preferences", "ref_inf", "actor_train"],
    "distill": ["actor_gen", "teacher_inf", "actor_train"],
    "gen": ["gen"],
}


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Model directories `m` and `r` of one vocabulary, and rows."""
    for name in ("m", "r"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(
            json.dumps({"model_type": "llama", "vocab_size": 50})
        )
        (tmp_path / name / "model.safetensors").write_bytes(b"")
        tokenizer = {"model": {"vocab": {"a": 0}}, "added_tokens": [], "padding": name}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "rows.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config_of(name: str, **values: Any) -> Any:
    """The shipped configuration `name`, as small as it builds, with dotted options set."""
    base: RunConfig = registry.quickstarts.get(name)()
    own: dict[str, Any] = {
        "experiment_name": "e",
        "trial_name": "t",
        f"{base.main_role}.path": "m",
        "dataset.train_path": "rows.jsonl",
    }
    own |= {
        "ppo": {"rew.path": "r"},
        "grpo": {"reward": "json:dumps"},
        "online_dpo": {"reward": "json:dumps"},
        "distill": {"teacher.path": "r"},
    }.get(name, {})
    nested: dict[str, Any] = {}
    for dotted, value in {
        **own,
        **{key.replace("__", "."): v for key, v in values.items()},
    }.items():
        inner, (*groups, last) = nested, dotted.split(".")
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[last] = value
    return read(base, nested)


def build(name: str, **values: Any) -> Experiment:
    experiment: Experiment = config_of(name, **values).build()
    experiment.check()
    return experiment


@pytest.mark.parametrize("name", sorted(NODES))
def test_nodes_have_the_names_that_others_rely_on(name: str) -> None:
    assert list(build(name).graph.order) == NODES[name]


def test_every_shipped_configuration_builds_without_torch(files: Path) -> None:
    code = """
import sys
from weft.experiments import DistillConfig, DPOConfig, GenConfig, GRPOConfig, OnlineDPOConfig, PPOConfig, RWConfig, SFTConfig
for cls in (SFTConfig, RWConfig, DPOConfig, OnlineDPOConfig, PPOConfig, GRPOConfig, DistillConfig, GenConfig):
    config = cls(experiment_name="e", trial_name="t")
    getattr(config, config.main_role).path = "m"
    config.dataset.path = "rows.jsonl"
    if cls in (PPOConfig, GRPOConfig, OnlineDPOConfig):
        config.rew.path = "r"
    if cls is DistillConfig:
        config.teacher.path = "r"
    config.build().check()
print([m for m in ("torch", "transformers", "ray", "hydra") if m in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=files
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@pytest.mark.parametrize("name", sorted(NODES))
def test_control_and_configuration_hold_what_was_set(name: str) -> None:
    experiment = build(name, seed=5, max_steps=3, save_freq_steps=2, logger__tensorboard=True)
    control = experiment.control
    assert (control.experiment_name, control.trial_name, control.seed, control.max_steps) == (
        "e",
        "t",
        5,
        3,
    )
    assert control.save_freq_steps == 2
    assert control.loggers == {"tensorboard": {}}
    assert experiment.config["seed"] == 5
    assert (
        to_mapping(read(registry.quickstarts.get(name)(), experiment.config)) == experiment.config
    )


@pytest.mark.parametrize("name", sorted(set(NODES) - {"gen"}))
def test_every_algorithm_is_evaluated_where_there_are_validation_rows(name: str) -> None:
    assert build(name).evaluation is None
    experiment = build(
        name, dataset__valid_path="rows.jsonl", dataset__valid_bs_n_seqs=6, eval_freq_steps=1
    )
    assert experiment.evaluation is not None
    nodes = experiment.evaluation.graph.nodes
    assert {n.batch_size for n in nodes} == {6}
    assert not any(n.trains for n in nodes)
    assert {n.method for n in nodes if isinstance(n, MFCDef)} <= {
        "evaluate",
        "generate",
        "inference",
    }


def test_what_trains_is_trained_and_saved() -> None:
    experiment = build("ppo")
    assert experiment.saved_roles == ("actor", "critic")
    assert {name: (spec.trained, spec.head) for name, spec in experiment.roles.items()} == {
        "actor": (True, "lm"),
        "critic": (True, "value"),
        "ref": (False, "lm"),
        "rew": (False, "score"),
    }


# -- sizes


def test_sizes_of_a_ppo_step() -> None:
    experiment = build(
        "ppo",
        dataset__train_bs_n_seqs=8,
        ppo__samples_per_prompt=3,
        ppo__mini_batch_size=6,
        ppo__ppo_epochs=2,
    )
    # B r e / b = 8 * 3 * 2 / 6
    assert experiment.updates_per_firing == {"actor_train": 8, "critic_train": 8}
    train = experiment.get_node("actor_train")
    assert (train.args["num_minibatches"], train.args["epochs"], train.batch_size) == (4, 2, 8)
    assert experiment.plan_notes[0].startswith("completions of at most ")
    assert (
        experiment.plan_notes[1]
        == "a step's completions are trained on in minibatches of 6, for 2 epochs"
    )


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        (
            "ppo",
            {"dataset__train_bs_n_seqs": 6, "ppo__ppo_n_minibatches": 4},
            "ppo_n_minibatches=4: must divide the 6",
        ),
        (
            "ppo",
            {"dataset__train_bs_n_seqs": 6, "ppo__mini_batch_size": 4},
            "mini_batch_size=4: must divide the 6",
        ),
        (
            "grpo",
            {"dataset__train_bs_n_seqs": 3, "grpo__group_size": 3, "grpo__mini_batch_size": 2},
            "1, 3, 9 do",
        ),
        ("grpo", {"grpo__group_size": 1}, "grpo.group_size=1: a group of 1 is its own baseline"),
        # scale_rewards=group
        ("grpo", {"grpo__group_size": 1, "grpo__baseline": "none"}, "a group of 1"),
        ("grpo", {"grpo__gen__greedy": True}, "all the same"),
        (
            "ppo",
            {"dataset__train_tokens_per_batch": 4096},
            "ppo forms batches by number of prompts",
        ),
        ("ppo", {"rew__path": None}, "rew.path and reward are both missing"),
        (
            "ppo",
            {"ppo__gen__max_new_tokens": 20000},
            "cannot hold the longest sequence, 20001 tokens",
        ),
        (
            "ppo",
            {"ppo__gen__max_new_tokens": 256, "ppo__gen__min_new_tokens": 300},
            "min_new_tokens=300 exceeds",
        ),
        ("ppo", {"ppo__kl_ctl": 0.0, "ppo__ref_ema_eta": 0.1}, "kl_ctl=0 removes it"),
        (
            "ppo",
            {"ppo__kl_ctl": 0.0, "ref_inf__max_tokens_per_microbatch": 4096},
            "ref_inf.*: these options are for a call",
        ),
        (
            "ppo",
            {"rew__path": None, "reward": "json:dumps", "ppo__critic_init": "rew"},
            "there is no reward model",
        ),
        ("ppo", {"ppo__eps_clip": 2.0}, "eps_clip=2.0"),
        ("ppo", {"ppo__dual_clip": 0.5}, "dual_clip=0.5"),
        ("dpo", {"dpo__beta": 0.0}, "dpo.beta=0.0 must be above 0"),
        ("dpo", {"dpo__loss_type": "robust", "dpo__label_smoothing": 0.5}, "label_smoothing"),
        ("dpo", {"dpo__loss_type": "hinge", "dpo__label_smoothing": 0.1}, "has no meaning"),
        ("dpo", {"dpo__loss_type": "sigmod"}, "dpo.loss_type='sigmod': must be one of sigmoid"),
        ("grpo", {"reward": "gsm8"}, "reward='gsm8': unknown verifier 'gsm8'"),
        ("grpo", {"reward": []}, "no reward is given"),
        ("grpo", {"reward": "nowhere.py:fn"}, "there is no file nowhere.py"),
        (
            "grpo",
            {"rew_weight": 0.5},
            "rew_weight=0.5 weighs a reward model against a reward function",
        ),
        ("grpo", {"reward": [{"name": "json:dumps", "wieght": 1}]}, "cannot be read"),
        ("grpo", {"reward": [{"name": "json:dumps", "weight": "1"}]}, "must be a finite number"),
        ("grpo", {"reward": "json:not a name"}, "must be a function's name"),
        (
            "sft",
            {"dataset__path": "/", "dataset__train_path": None},
            "dataset.path='/': is the root of the file system",
        ),
        (
            "sft",
            {"dataset__path": "none", "dataset__train_path": None},
            "dataset.path='none': there is no such file",
        ),
        (
            "sft",
            {"dataset__valid_path": "data.jsonl"},
            "dataset.valid_path='data.jsonl': there is no such file",
        ),
        (
            "sft",
            {"model__tokenizer__path": "./none"},
            "model.tokenizer.path='./none': there is no such file",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name_and_rule(
    name: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        build(name, **values)
    assert message in str(caught.value)


# -- variants of the graphs


def test_dpo_without_a_reference_has_no_ref() -> None:
    for loss_type in ("simpo", "orpo"):
        experiment = build("dpo", dpo__loss_type=loss_type)
        assert list(experiment.graph.order) == ["actor_train"]
        assert list(experiment.roles) == ["actor"]


def test_kto_measures_its_baseline_in_the_graph() -> None:
    experiment = build("dpo", dpo__loss_type="kto")
    assert set(experiment.graph.order) == {
        "kto_mismatch",
        "kl_actor_inf",
        "kl_ref_inf",
        "kto_baseline",
        "ref_inf",
        "actor_train",
    }
    assert {"label", "kl_baseline", "ref_logprobs"} <= set(
        experiment.get_node("actor_train").inputs
    )


def test_names_of_the_hub_are_asked_for_later() -> None:
    for path in ("openai/gsm8k", "openai/gsm8k:main", "openai/gsm8k:main/train"):
        made = build("sft", dataset__path=path, dataset__train_path=None, dataset__valid_path=path)
        assert made.dataset.train_path == made.dataset.valid_path == path


@pytest.mark.parametrize("size", ["train", "valid"])
def test_kto_refuses_batches_of_one_prompt(size: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"dataset.{size}_bs_n_seqs=1: .*kto.*set it to 2 or more"
    ):
        build("dpo", dpo__loss_type="kto", **{f"dataset__{size}_bs_n_seqs": 1})
    build("dpo", dpo__loss_type="sigmoid", **{f"dataset__{size}_bs_n_seqs": 1})


def test_cached_reference_logprobs_are_a_flag_of_the_call() -> None:
    node = build("dpo", dpo__cache_ref_logprobs=True).get_node("ref_inf")
    assert isinstance(node, MFCDef) and node.cache


def test_a_function_reward_and_a_model_may_both_be_given() -> None:
    experiment = build("ppo", reward="json:dumps", reward_timeout_s=3.0)
    reward, model = experiment.get_node("reward"), experiment.get_node("rew_inf")
    assert (
        "scores" in reward.inputs
        and model.outputs == ("scores",)
        and reward.outputs == ("rewards",)
    )
    assert isinstance(reward, HostFunction) and reward.args["timeout_s"] == 3.0
    alone = build("ppo", rew__path=None, reward="json:dumps")
    assert "rew_inf" not in alone.graph.order and "rew" not in alone.roles
    assert build("grpo", reward=None, rew__path="r").graph.order[1] == "rew_inf"


def test_without_kl_there_is_no_reference() -> None:
    for name, values in (("ppo", {"ppo__kl_ctl": 0.0}), ("grpo", {"grpo__kl_coef": 0.0})):
        experiment = build(name, **values)
        assert "ref_inf" not in experiment.graph.order and "ref" not in experiment.roles


def test_the_reference_may_follow_the_actor() -> None:
    syncs = build("ppo", ppo__ref_ema_eta=0.05).graph.syncs
    assert list(syncs) == [ParamSync("actor", "ref", 0.05, "actor_train")]
    assert list(build("grpo", grpo__ref_ema_eta=1.0).graph.syncs) == [
        ParamSync("actor", "ref", 1.0, "actor_train")
    ]


def test_remax_rewards_a_greedy_completion() -> None:
    experiment = build("grpo", grpo__baseline="greedy", grpo__scale_rewards="none", rew__path="r")
    greedy = experiment.get_node("greedy_gen")
    assert greedy.args["greedy"] is True and greedy.args["samples_per_prompt"] == 1
    assert set(experiment.get_node("greedy_rew_inf").inputs) == {"prompt", "greedy_completion"}
    assert experiment.get_node("greedy_rew_inf").optional_inputs == ("greedy_finished",)
    assert experiment.get_node("rew_inf").optional_inputs == ("finished",)
    assert set(experiment.get_node("greedy_reward").inputs) == {
        "prompt",
        "greedy_completion",
        "greedy_scores",
    }
    assert {"greedy_rewards", "greedy_finished", "greedy_completion"} <= set(
        experiment.get_node("advantages").inputs
    )
    assert experiment.get_node("advantages").args["baseline"] == "given"


def test_dynamic_sampling_stands_between_reward_and_the_rest() -> None:
    experiment = build("grpo", grpo__dynamic_sampling=True)
    for waiting in ("ref_inf", "advantages"):
        assert "filter" in experiment.graph.find_producers(waiting)


def test_limits_on_the_vocabulary_are_recorded_and_read_again() -> None:
    experiment = build("ppo", ppo__gen__top_p=0.9)
    assert experiment.get_node("actor_gen").args["record_support"] is True
    for name in ("ref_inf", "actor_train"):
        assert {"support", "support_counts"} <= set(experiment.get_node(name).inputs)
    plain = build("ppo")
    assert "support" not in plain.get_node("actor_gen").outputs


def test_a_top_k_of_the_whole_vocabulary_is_no_limit() -> None:
    node = build("ppo", ppo__gen__top_k=50).get_node("actor_gen")
    assert node.args["top_k"] == 0 and node.args["record_support"] is False
    assert build("ppo", ppo__gen__top_k=49).get_node("actor_gen").args["top_k"] == 49


def test_the_temperature_is_the_samplers_everywhere() -> None:
    experiment = build("grpo", grpo__gen__temperature=0.5)
    assert {
        experiment.get_node(n).args["temperature"] for n in ("actor_gen", "ref_inf", "actor_train")
    } == {0.5}
    greedy = build("ppo", ppo__gen__temperature=0.5, ppo__gen__greedy=True)
    assert {greedy.get_node(n).args["temperature"] for n in ("ref_inf", "actor_train")} == {1.0}


def test_paths_may_begin_at_home(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(files))
    experiment = build("sft", model__path="~/m", dataset__train_path="~/rows.jsonl")
    assert (experiment.roles["model"].path, experiment.dataset.train_path) == (
        str(files / "m"),
        str(files / "rows.jsonl"),
    )


# -- roles that are not named in full


def test_the_reference_is_the_actor_as_it_starts() -> None:
    assert build("dpo").roles["ref"].path == "m"
    assert build("dpo").init_from == {}
    scratch = build("dpo", actor__init_from_scratch=True)
    assert scratch.init_from == {"ref": "actor"}  # random weights are copied, not drawn again
    assert build("dpo", ref__path="r").roles["ref"].path == "r"


def test_the_critic_is_the_reward_model_unless_that_reads_other_text(files: Path) -> None:
    assert build("ppo").roles["critic"].path == "r"
    assert build("ppo", ppo__critic_init="actor").roles["critic"].path == "m"
    assert build("ppo", rew__prompt_prefix="Q: ").roles["critic"].path == "m"
    (files / "r" / "tokenizer.json").write_text(
        '{"model": {"vocab": {"b": 0}}, "added_tokens": []}'
    )
    assert build("ppo").roles["critic"].path == "m"
    assert build("ppo", ppo__critic_init="rew").roles["critic"].path == "r"
    assert build("ppo", rew__path=None, reward="json:dumps").roles["critic"].path == "m"
    own = build("ppo", critic__path="m", critic__optimizer__lr=1.0)
    assert (own.roles["critic"].path, own.roles["critic"].optimizer.lr) == ("m", 1.0)


def test_critic_warmup_freezes_the_actor_alone() -> None:
    roles = build("ppo", ppo__critic_warmup_epochs=2).roles
    assert (roles["actor"].optimizer.frozen_epochs, roles["critic"].optimizer.frozen_epochs) == (
        2,
        0,
    )


def test_a_part_of_an_epoch_can_train_the_critic_alone() -> None:
    optimizer = build("ppo", ppo__critic_warmup_epochs=0.5).roles["actor"].optimizer
    schedule = optimizer.build_schedule(20, 8.0)
    assert (schedule.frozen_steps, schedule.total_steps) == (4, 16)


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_log_probs_of_another_temperature_are_scored_again(name: str) -> None:
    values = {
        f"{name}__gen__temperature": 0.7,
        f"{name}__gen__top_k": 2,
        f"{name}__logprob_temperature": 1.0,
    }
    experiment = build(name, **values)
    generation = experiment.get_node("actor_gen")
    assert (generation.args["temperature"], generation.args["top_k"]) == (0.7, 2)
    assert "support" not in generation.output_keys
    scoring, training = experiment.get_node("actor_inf"), experiment.get_node("actor_train")
    assert scoring.args == {"outputs": ["logprobs"], "temperature": 1.0}
    assert scoring.outputs == ("old_logprobs",)
    assert "old_logprobs" in training.inputs and training.args["temperature"] == 1.0
    assert "support" not in training.inputs
    if name == "ppo":
        assert experiment.get_node("ref_inf").args["temperature"] == 1.0
        read = experiment.get_node("advantages").inputs
        assert "old_logprobs" in read and "logprobs" not in read
    with pytest.raises(ConfigError, match=r"logprob_temperature=1.0 and .*sampler_correction="):
        build(name, **values, **{f"{name}__sampler_correction": "token_mask"})
    with pytest.raises(ConfigError, match="must be above 0"):
        build(name, **{f"{name}__logprob_temperature": 0.0})


def test_online_dpo_takes_another_temperature_for_log_probs_alone() -> None:
    experiment = build(
        "online_dpo", online_dpo__gen__temperature=0.7, online_dpo__logprob_temperature=1.0
    )
    assert "actor_inf" not in experiment.graph.order
    assert experiment.get_node("actor_gen").args["temperature"] == 0.7
    for name in ("actor_train", "ref_inf"):
        assert experiment.get_node(name).args["temperature"] == 1.0


def test_a_reward_model_with_a_prompt_form_is_called_with_it() -> None:
    node = build("ppo", rew__prompt_prefix="Q: ", rew__prompt_suffix=" A:").get_node("rew_inf")
    assert node.args == {"outputs": ["scores"], "prompt_prefix": "Q: ", "prompt_suffix": " A:"}


# -- changing a call


def test_call_options_change_the_call_also_in_the_evaluation() -> None:
    registry.interfaces.register("test_scoring", type("Scoring", (), {}))
    try:
        experiment = build(
            "ppo",
            rew_inf__interface="test_scoring",
            rew_inf__args={"classifier": "c"},
            rew_inf__post_hooks=["offload", {"function": "f", "args": {"a": 1}}],
            actor_train__max_tokens_per_microbatch=2048,
            dataset__valid_path="rows.jsonl",
        )
        node = experiment.get_node("rew_inf")
        assert isinstance(node, MFCDef)
        assert (node.interface, node.args) == ("test_scoring", {"classifier": "c"})
        assert node.post_hooks == (Offload("weights"), Call("f", {"a": 1}))
        assert node.outputs == ("rewards",)
        assert experiment.evaluation is not None
        assert experiment.evaluation.graph.get_node("rew_inf").interface == "test_scoring"  # type: ignore[union-attr]
        assert experiment.get_node("actor_train").max_tokens_per_microbatch == 2048  # type: ignore[union-attr]
    finally:
        registry.interfaces._objects.pop("test_scoring")


def test_offload_is_a_hook_that_can_be_emptied() -> None:
    assert build("dpo", ref__offload=True).get_node("ref_inf").post_hooks == (Offload("weights"),)  # type: ignore[union-attr]
    assert (
        build("dpo", ref__offload=True, ref_inf__post_hooks=[]).get_node("ref_inf").post_hooks == ()
    )  # type: ignore[union-attr]
    evaluation = build("dpo", ref__offload=True, dataset__valid_split=0.1).evaluation
    assert evaluation is not None
    hooks = {node.name: node.post_hooks for node in evaluation.graph.list_model_calls()}
    assert hooks == {"actor_train": (), "ref_inf": (Offload("weights"),)}, "after evaluation too"


def test_another_interface_begins_without_the_arguments_of_the_first() -> None:
    experiment = build("ppo").with_mfc("rew_inf", interface="x", post_hooks=[])
    assert experiment.get_node("rew_inf").args == {}
    with pytest.raises(ConfigError, match="did you mean interface"):
        build("ppo").with_mfc("rew_inf", interfase="x")
    with pytest.raises(ConfigError, match="did you mean rew_inf"):
        build("ppo").with_mfc("rew_int", interface="x")


def test_a_role_of_a_tokenizer_alone_cannot_be_trained_or_generated_with() -> None:
    with pytest.raises(GraphError, match="a tokenizer alone"):
        build("sft", model__backend="null")
    with pytest.raises(GraphError, match="a tokenizer alone"):
        build("gen", model__backend="null")
    with pytest.raises(GraphError, match="a tokenizer alone"):
        build("ppo", ref__backend="null", ref__path="m", ppo__ref_ema_eta=0.5)
    alone = {"rew__backend": "null", "rew__path": None, "rew__tokenizer__path": "m"}
    with pytest.raises(GraphError, match=r"rew_inf\.interface=NAME"):
        build("ppo", **alone)
    # one that brings its own network
    config_of("ppo", **alone).build().with_mfc("rew_inf", interface="mine").check()


def test_hooks_as_users_write_them() -> None:
    assert parse_hooks("offload_optimizer") == (Offload("optimizer"),)
    assert parse_hooks(["f"]) == (Call("f"),)
    assert parse_hooks(None) == ()
    with pytest.raises(ConfigError, match="hook 3 is not valid"):
        parse_hooks([3])


# -- configurations of one's own


def test_a_derived_configuration_changes_what_build_returns() -> None:
    @dataclass
    class MyPPOConfig(PPOConfig):
        vowels: str = option("aeiou", "letters that are rewarded")

        def build(self) -> Experiment:
            return (
                super()
                .build()
                .with_mfc(
                    "rew_inf", interface="generate", args={"vowels": self.vowels}, post_hooks=[]
                )
            )

    base = config_of("ppo")
    config = MyPPOConfig(**{name: getattr(base, name) for name in vars(base)}, vowels="ou")
    assert config.build().get_node("rew_inf").args == {"vowels": "ou"}
    assert config.build().config["vowels"] == "ou"


def test_a_configuration_made_in_code_is_checked_like_a_command_line() -> None:
    config = config_of("sft")
    config.model.optimizer.lr = "1e-5"
    with pytest.raises(
        ConfigError, match=r"model\.optimizer\.lr='1e-5': must be float or null; write 1e-05"
    ):
        config.build()
    config = config_of("sft")
    config.model.optimizer.warmup_steps, config.model.optimizer.warmup_epochs = 1, 1.0
    with pytest.raises(ConfigError, match="exclude each other"):
        config.build()


def test_groups_of_options_may_be_mappings() -> None:
    config = DPOConfig(
        "e", "t", actor={"path": "m", "lora": {"r": 4}}, dataset={"path": "rows.jsonl"}
    )  # type: ignore[arg-type]
    assert (config.actor.path, config.actor.lora.r, config.actor.optimizer.lr) == ("m", 4, None)
    assert config.build().dataset.train_path == "rows.jsonl"
    with pytest.raises(ConfigError, match=r"unknown option 'actor\.pth'"):
        DPOConfig("e", "t", actor={"pth": "m"})  # type: ignore[arg-type]


def test_imports_are_read_before_names_are_looked_up(files: Path) -> None:
    code = (
        "from weft import register_dataset\nregister_dataset('test_rows', type('Rows', (), {}))\n"
    )
    (files / "own_rows.py").write_text(code)
    try:
        assert (
            build("sft", imports=["own_rows.py"], dataset__type="test_rows").dataset_type
            == "test_rows"
        )
    finally:
        registry.datasets._objects.pop("test_rows")


def test_loggers_are_on_where_something_is_set() -> None:
    assert LoggerSpec().get_enabled() == {}
    assert LoggerSpec(wandb=WandbSpec(project="p")).get_enabled() == {"wandb": {"project": "p"}}
    assert LoggerSpec(wandb=WandbSpec(mode="offline")).get_enabled() == {
        "wandb": {"mode": "offline"}
    }
    assert LoggerSpec(wandb=WandbSpec(project="p", mode="disabled")).get_enabled() == {}
    assert LoggerSpec(trackio=TrackioSpec(project="p")).get_enabled() == {
        "trackio": {"project": "p"}
    }


def test_all_classes_are_exported() -> None:
    classes = (
        SFTConfig,
        RWConfig,
        DPOConfig,
        OnlineDPOConfig,
        PPOConfig,
        GRPOConfig,
        DistillConfig,
        GenConfig,
    )
    names = ("sft", "rw", "dpo", "online_dpo", "ppo", "grpo", "distill", "gen")
    assert [registry.quickstarts.get(name) for name in names] == list(classes)
    assert ModelSpec().tokenizer == TokenizerSpec()


@pytest.mark.parametrize(
    ("name", "options", "rate"),
    [
        ("dpo", {}, 1e-6),
        ("dpo", {"actor.lora.r": 4}, 1e-5),
        ("grpo", {}, 1e-6),
        ("ppo", {"actor.lora.r": 4}, 1e-5),
        ("sft", {}, 1e-5),
        ("dpo", {"actor.optimizer.lr": 3e-7}, 3e-7),
    ],
)
def test_a_run_writes_down_the_learning_rate_that_holds(
    name: str, options: dict[str, Any], rate: float
) -> None:
    experiment = build(name, **options)
    role = "model" if name == "sft" else "actor"
    assert experiment.roles[role].optimizer.peak_lr == rate
    assert experiment.config[role]["optimizer"]["lr"] == rate


def test_a_run_writes_down_the_lengths_that_hold(files: Path) -> None:
    values = {"model_type": "llama", "vocab_size": 50, "max_position_embeddings": 512}
    (files / "m" / "config.json").write_text(json.dumps(values))
    config = build("grpo").config
    assert (config["dataset"]["max_prompt_len"], config["grpo"]["gen"]["max_new_tokens"]) == (
        256,
        256,
    )
    with pytest.raises(ConfigError, match="max_prompt_len=512: leaves no room for a completion"):
        build("grpo", **{"dataset.max_prompt_len": 512})
    assert (
        build(
            "grpo", **{"dataset.max_prompt_len": 512, "grpo.gen.max_new_tokens": 8}
        ).dataset.max_prompt_len
        == 512
    )
