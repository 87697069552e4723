"""Option names and values of ReaL's example scripts, one command for each, are read as weft's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cli.test_aliases import made, value
from weft.cli.start import _parse_allocation_mode
from weft.errors import ConfigError
from weft.experiments import DPOConfig, GenConfig, PPOConfig, RWConfig, SFTConfig
from weft.experiments.common import RunConfig

RUN = ("experiment_name=e", "trial_name=t", "mode=local", "allocation_mode=manual")
GENERATION = (
    "gen.max_new_tokens=20",
    "gen.min_new_tokens=5",
    "gen.top_p=0.8",
    "gen.top_k=40",
    "gen.use_cuda_graph=True",
)
ROLES = [
    f"{role}.{option}"
    for role in ("actor", "critic", "ref", "rew")
    for option in (
        "type._class=llama",
        "path=MODEL",
        *(["type.is_critic=True"] if role in ("critic", "rew") else []),
    )
]
PPO = (
    *RUN,
    "exp_ctrl.total_train_epochs=3",
    "exp_ctrl.save_freq_steps=null",
    *ROLES,
    "actor.optimizer.lr=2e-6",
    "actor.optimizer.lr_scheduler_type=constant",
    "actor.optimizer.warmup_steps_proportion=0.0",
    "dataset.path=P.jsonl",
    "dataset.max_prompt_len=64",
    "dataset.train_bs_n_seqs=16",
    *(f"ppo.{word}" for word in GENERATION),
    "ppo.ppo_n_minibatches=2",
    "ppo.kl_ctl=0.2",
    "ppo.value_eps_clip=0.3",
    "ppo.reward_output_scaling=5.0",
    "ppo.adv_norm=True",
    "ppo.value_norm=True",
)


def degrees(call: str, data: int, tensor: int, pipeline: int) -> list[str]:
    sizes = {"pipeline": pipeline, "model": tensor, "data": data}
    return [f"{call}.parallel.{kind}_parallel_size={size}" for kind, size in sizes.items()]


SCRIPTS: dict[str, tuple[type[RunConfig], tuple[str, ...], dict[str, Any]]] = {
    "sft": (
        SFTConfig,
        (
            *RUN,
            "exp_ctrl.total_train_epochs=5",
            "exp_ctrl.save_freq_steps=40",
            "exp_ctrl.eval_freq_epochs=1",
            "model.optimizer.type=adam",
            "model.optimizer.lr_scheduler_type=cosine",
            "model.optimizer.lr=3e-5",
            "model.optimizer.warmup_steps_proportion=0.05",
            "model.type._class=llama",
            "model.path=MODEL",
            "dataset.train_path=A.jsonl",
            "dataset.valid_path=B.jsonl",
            "dataset.max_seqlen=128",
            "dataset.train_bs_n_seqs=32",
            "dataset.valid_bs_n_seqs=16",
            "n_nodes=1",
            *degrees("allocation", 1, 2, 4),
            "allocation.parallel.use_sequence_parallel=True",
        ),
        {
            "total_train_epochs": 5,
            "save_freq_steps": 40,
            "eval_freq_epochs": 1,
            "model.optimizer.type": "adamw",
            "model.type": "llama",
            "model.parallel.model_parallel_size": 2,
            "model.parallel.pipeline_parallel_size": 4,
            "model.sequence_parallel": True,
            "dataset.valid_bs_n_seqs": 16,
        },
    ),
    "rw": (
        RWConfig,
        (
            *RUN,
            "exp_ctrl.total_train_epochs=2",
            "exp_ctrl.save_freq_steps=10",
            "model.optimizer.type=adam",
            "model.type._class=qwen2",
            "model.type.is_critic=True",
            "model.path=MODEL",
            "dataset.train_path=A.jsonl",
            "dataset.max_pairs_per_prompt=2",
            "dataset.max_seqlen=128",
            *degrees("allocation", 4, 1, 2),
            "allocation.parallel.use_sequence_parallel=False",
        ),
        {
            "model.type": "qwen2",
            "dataset.args": {"max_pairs_per_prompt": 2},
            "model.sequence_parallel": False,
            "model.parallel.data_parallel_size": 4,
        },
    ),
    "dpo": (
        DPOConfig,
        (
            *RUN,
            "exp_ctrl.total_train_epochs=2",
            "actor.type._class=gpt2",
            "actor.path=MODEL",
            "ref.type._class=gpt2",
            "ref.path=MODEL",
            *degrees("actor_train", 2, 2, 2),
            "actor_train.parallel.use_sequence_parallel=True",
            *degrees("ref_inf", 2, 1, 4),
            "ref_inf.parallel.use_sequence_parallel=True",
            "dataset.train_path=A.jsonl",
            "dataset.max_pairs_per_prompt=3",
        ),
        {
            "actor_train.layout": "d2t2p2",
            "ref_inf.layout": "d2p4",
            "dataset.args": {"max_pairs_per_prompt": 3},
        },
    ),
    "gen": (
        GenConfig,
        (
            *RUN,
            "exp_ctrl.total_train_epochs=1",
            "exp_ctrl.save_freq_steps=null",
            "n_nodes=1",
            "model.type._class=llama",
            "model.path=MODEL",
            "dataset.path=P.jsonl",
            "dataset.max_prompt_len=64",
            "dataset.train_bs_n_seqs=8",
            *degrees("allocation", 4, 2, 1),
            *GENERATION,
        ),
        {"model.parallel.data_parallel_size": 4, "gen.top_k": 40, "gen.max_new_tokens": 20},
    ),
    "ppo": (
        PPOConfig,
        (*PPO, "n_nodes=1", "allocation_mode=heuristic"),
        {
            "allocation_mode": "heuristic",
            "ppo.gen.top_p": 0.8,
            "critic.type": "llama",
            "rew.path": "MODEL",
        },
    ),
    "ppo by hand": (
        PPOConfig,
        (
            *PPO,
            "n_nodes=1",
            r"nodelist=\'NODE01\'",
            r"actor_train.device_mesh=\'NODE01:0,1,2,3\'",
            *degrees("actor_train", 2, 1, 2),
            r"critic_inf.device_mesh=\'NODE01:6,7\'",
            *degrees("critic_inf", 2, 1, 1),
            r"actor_gen.device_mesh=\'NODE01\'",
            *degrees("actor_gen", 4, 1, 2),
            r"rew_inf.device_mesh=\'NODE01:2,3\'",
            *degrees("rew_inf", 1, 1, 2),
            "actor_train.n_mbs=4",
        ),
        {
            "actor_train.device_mesh": "0,1,2,3",
            "actor_train.layout": "d2p2",
            "critic_inf.device_mesh": "6,7",
            "critic_inf.layout": "d2",
            "actor_gen.device_mesh": "0,1,2,3,4,5,6,7",
            "actor_gen.layout": "d4p2",
            "rew_inf.layout": "p2",
        },
    ),
    "benchmark": (
        SFTConfig,
        (
            *RUN,
            "exp_ctrl.benchmark_steps=7",
            "exp_ctrl.eval_freq_steps=null",
            "wandb_mode=disabled",
            "debug=True",
            "partition=dev",
            "image_name=IMAGE",
            "recover_mode=save",
            "recover_retries=2",
            "model.enable_bf16=True",
            "model.enable_fp16=False",
            "dataset.pad_to_max_length=False",
            "allocation_mode=pipe_model",
        ),
        {
            "max_steps": 7,
            "logger.wandb.mode": "disabled",
            "slurm.partition": "dev",
            "slurm.container": "IMAGE",
            "recover_mode": "auto",
            "model.dtype": "bfloat16",
            "allocation_mode": "heuristic",
        },
    ),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_options_of_a_script_are_read(script: str) -> None:
    base, words, expected = SCRIPTS[script]
    config, _ = made(base(), *(word.replace("\\", "") for word in words))
    assert {name: value(config, name) for name in expected} == expected


def test_each_other_name_has_a_note_that_says_what_became_of_it() -> None:
    _, notes = made(
        SFTConfig(), "exp_ctrl.total_train_epochs=2", "gen.use_cuda_graph=true", "debug=false"
    )
    assert notes[0] == "exp_ctrl.total_train_epochs is read as total_train_epochs"
    assert notes[1].startswith("gen.use_cuda_graph is left out: ")
    assert notes[2].startswith("debug is left out: ")
    _, notes = made(PPOConfig(), *degrees("actor_gen", 4, 1, 2))
    assert notes == ["actor_gen.parallel.* is read as actor_gen.layout=d4p2"]


@pytest.mark.parametrize(
    "name", ["rew_inf.args.debug", "dataset.args.n_mbs", "launch.env.use_cuda_graph"]
)
def test_entries_of_a_mapping_are_nobody_elses_options(name: str) -> None:
    """The user chooses their names."""
    config, notes = made(PPOConfig(), f"{name}='3'")
    group, _, key = name.rpartition(".")
    assert value(config, group) == {key: "3"} and notes == []


@pytest.mark.parametrize(
    ("nodes", "mesh", "expected"),
    [
        ("nodelist='NODE[01-02]'", "NODE02:0,1", "8,9"),
        ("nodelist='NODE[01-02]'", "NODE[01-02]", ",".join(map(str, range(16)))),
        ("nodelist='n2,n1'", "n1:3", "11"),
        ("n_gpus_per_node=4 nodelist='n[08-10]'", "n10:0-1", "8,9"),
        ("n_nodes=1", "ANY:5", "5"),
        ("n_nodes=1", "4-5", "4-5"),
    ],
)
def test_nodes_number_their_devices_in_the_order_of_the_list(
    nodes: str, mesh: str, expected: str
) -> None:
    config, _ = made(PPOConfig(), *nodes.split(), f"ref_inf.device_mesh='{mesh}'")
    assert config.ref_inf.device_mesh == expected


def test_slurm_is_given_the_list_of_nodes() -> None:
    assert made(SFTConfig(), "mode=slurm", "nodelist='n[01-02]'")[0].slurm.nodelist == "n[01-02]"


@pytest.mark.parametrize(
    ("base", "words", "message"),
    [
        (
            PPOConfig,
            ["nodelist=n1", "ref_inf.device_mesh='n2:0'"],
            "there is no node 'n2'; nodelist has n1",
        ),
        (
            PPOConfig,
            ["n_nodes=2", "ref_inf.device_mesh='n2:0'"],
            "nodelist is not set. Write the devices' numbers",
        ),
        (
            PPOConfig,
            ["ref_inf.device_mesh='n2:9'"],
            "a node has 8 devices, numbered from 0, so there is no 9",
        ),
        (
            PPOConfig,
            ["actor.type.is_critic=true"],
            "'actor' is a language model in this experiment; leave the option out",
        ),
        (
            RWConfig,
            ["model.type.is_critic=false"],
            "'model' gives each sequence or token one value",
        ),
        (
            PPOConfig,
            ["ref_inf.parallel.data_parallel_size=x"],
            "must be a whole number, at least 1",
        ),
        (
            PPOConfig,
            ["ref_inf.layout=d2", "ref_inf.parallel.data_parallel_size=2"],
            "unknown option 'ref_inf.parallel",
        ),
        (SFTConfig, ["exp_ctrl.no_such=1"], "unknown option 'no_such'"),
        (PPOConfig, ["nodelist='n[-]'"], "nodelist"),
        (
            PPOConfig,
            ["ref_inf.device_mesh='n1:0,'"],
            "must be devices such as 0-7, or ReaL's NODE01:0,1",
        ),
        (PPOConfig, ["ref_inf.device_mesh='n1:0-9999999999'"], "must be devices such as 0-7"),
        (
            PPOConfig,
            ["n_gpus_per_node=many", "ref_inf.device_mesh='n1:0'"],
            "n_gpus_per_node='many': must be a whole number",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(
    base: type[RunConfig], words: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        made(base(), *words)
    assert message in str(caught.value)


def test_weft_start_knows_reals_modes_of_allocation() -> None:
    assert _parse_allocation_mode("pipe_model") == _parse_allocation_mode("heuristic")
    with pytest.raises(ConfigError, match="--allocation_mode pipe_mode: must be manual"):
        _parse_allocation_mode("pipe_mode")
