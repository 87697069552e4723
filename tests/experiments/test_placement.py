"""`allocation_mode=search` of whole experiments: what is placed, what stays where it is, what is
reckoned with.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.launch.cases import prepare
from tests.runtime.placed import run_forked
from weft.checkpoints.hf_io import read_config
from weft.engine.spec import LoRASpec, ModelSpec
from weft.errors import ConfigError
from weft.experiment import Experiment
from weft.experiments import DPOConfig, GRPOConfig, PPOConfig, SFTConfig
from weft.experiments.planned_networks import describe_planned_engine
from weft.graph.mfc import MFCDef
from weft.planner import search
from weft.planner.cost import CallWorkload
from weft.planner.decoder_sizes import DecoderSizes, build_decoder_sizes
from weft.planner.devices import RESERVED_GIB
from weft.planner.placement import build_workload
from weft.topology import Layout, Mesh

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Annealing, whose own tests are elsewhere."""
    monkeypatch.setattr(search, "ANNEALING_STEPS", 200)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "pairs.jsonl").write_text(
        '{"prompt": "a", "pos_answers": ["b"], "neg_answers": ["c"]}\n'
    )
    return tmp_path


def config(kind: type[Any], folder: Path, rows: str, *roles: str) -> Any:
    made = kind(experiment_name="e", trial_name="t", n_gpus_per_node=8, allocation_mode="search")
    made.search.gpu = "H100"
    for role in roles:
        getattr(made, role).path, getattr(made, role).init_from_scratch = str(folder), True
    made.dataset.path, made.dataset.train_bs_n_seqs = str(folder / rows), 64
    return made


def sizes(spec: ModelSpec) -> DecoderSizes:
    assert spec.path is not None
    return build_decoder_sizes(spec, read_config(spec.path)[1])


def load(experiment: Experiment, config: Any, call: MFCDef) -> CallWorkload:
    return build_workload(experiment, config.search, config.dataset, call)


def test_large_models_are_spread_and_fit(folder: Path) -> None:
    ppo = config(PPOConfig, folder, "prompts.jsonl", "actor", "critic", "ref", "rew")
    ppo.dataset.max_prompt_len, ppo.ppo.gen.max_new_tokens, ppo.search.memory_gb = 512, 1024, 60.0
    made = ppo.build()
    found, first = made.search["search"], made.search["heuristic"]
    assert found["fits"] and not first["fits"] and found["memory_gb"] <= 60.0
    assert found["step_seconds"] < first["step_seconds"]
    for name, call in found["calls"].items():
        mesh = made.call_meshes[name]
        assert (str(mesh.layout), list(mesh.ranks)) == (call["layout"], call["devices"])
    assert made.role_meshes["actor"] == made.call_meshes["actor_train"]
    assert made.num_devices <= 8
    assert made.search == ppo.build().search


def test_times_are_those_of_the_dtype_that_a_run_chooses(folder: Path) -> None:
    def find_seconds(**changes: object) -> float:
        (folder / "config.json").write_text(json.dumps(LLAMA_8B | changes))
        sft = config(SFTConfig, folder, "pairs.jsonl", "model")
        sft.max_tokens_per_microbatch, sft.dataset.max_seqlen = 4096, 2048
        sft.search.memory_gb = 500.0
        return float(sft.build().search["search"]["step_seconds"])

    half = find_seconds()
    assert find_seconds(torch_dtype="float16") == half
    assert find_seconds(torch_dtype="float32") == find_seconds(torch_dtype=None) > 5 * half


def test_what_names_a_layout_stays_there(folder: Path) -> None:
    dpo = config(DPOConfig, folder, "pairs.jsonl", "actor", "ref")
    dpo.max_tokens_per_microbatch, dpo.dataset.max_seqlen = 4096, 2048
    dpo.ref.layout, dpo.ref.device_mesh = "t2", "6-7"
    made = dpo.build()
    assert str(made.role_meshes["ref"]) == "d1f1t2p1c1e1 (devices 6, 7)"
    assert made.search["search"]["calls"]["ref_inf"]["devices"] == [6, 7]
    dpo.ref.layout = dpo.ref.device_mesh = None
    dpo.actor_train.layout = "d8"
    assert str(dpo.build().call_meshes["actor_train"].layout) == "d8f8t1p1c1e1"


def test_zero_stage_is_heeded(folder: Path) -> None:
    sft = config(SFTConfig, folder, "pairs.jsonl", "model")
    sft.model.zero_stage, sft.model.lora.r = 0, 8
    layout = sft.build().role_meshes["model"].layout
    assert layout.fsdp == 1


def test_where_nothing_fits_the_error_says_what_the_least_is(folder: Path) -> None:
    sft = config(SFTConfig, folder, "pairs.jsonl", "model")
    sft.search.memory_gb = 1.0
    with pytest.raises(
        ConfigError,
        match=r"no placement on 8 devices fits into memory; the smallest needs \d+\.\d GiB of a device's 1\.0",
    ):
        sft.build()


def test_of_this_machines_gpus_the_same_is_left_free(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SimpleNamespace(total_memory=39 * 2**30)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda *_: "NVIDIA A100-SXM4-40GB")
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda *_: gpu)
    sft = config(SFTConfig, folder, "pairs.jsonl", "model")
    sft.max_tokens_per_microbatch, sft.dataset.max_seqlen = 4096, 2048
    sft.search.gpu, sft.device = None, "cuda"
    assert sft.build().search["device_memory_gb"] == 39 - RESERVED_GIB


def test_a_cluster_of_gpus_is_named_where_this_machine_has_none(folder: Path) -> None:
    sft = config(SFTConfig, folder, "pairs.jsonl", "model")
    sft.search.gpu, sft.device = None, "cuda"
    with pytest.raises(ConfigError, match=r"this machine has no GPU; set search.gpu"):
        sft.build()


def test_a_call_has_the_faster_of_two_kinds_of_gpu(folder: Path) -> None:
    sft = config(SFTConfig, folder, "pairs.jsonl", "model")
    sft.n_nodes, sft.search.gpu, sft.model.gradient_checkpointing = 2, "V100:8,H100:8", True
    made = sft.build()
    assert made.search["device"] == "V100:8,H100:8"
    assert made.search["search"]["calls"]["train"]["devices"] == list(range(8, 16))
    sft.search.gpu = "V100:8,H100:4"
    with pytest.raises(ConfigError, match="names 12 devices, and the run has 16"):
        sft.build()


def test_only_long_sequences_are_divided_over_ranks(folder: Path) -> None:
    """Four rows, on eight devices."""
    sft = config(SFTConfig, folder, "pairs.jsonl", "model")
    sft.dataset.train_bs_n_seqs, sft.dataset.max_seqlen = 4, 32768
    sft.max_tokens_per_microbatch, sft.model.gradient_checkpointing = 32768, True
    sft.search.prompt_tokens, sft.search.answer_tokens = 1000, 31000
    assert sft.build().role_meshes["model"].layout.context > 1
    sft.search.answer_tokens = 500
    assert sft.build().role_meshes["model"].layout.context == 1


def test_sizes_of_a_network_and_loads_of_its_calls(folder: Path) -> None:
    grpo = config(GRPOConfig, folder, "prompts.jsonl", "actor", "ref")
    grpo.reward, grpo.grpo.group_size, grpo.grpo.gen.max_new_tokens = "length", 4, 256
    made = grpo.build()
    network = sizes(made.roles["actor"])
    # all of Llama 3 8B but its norms
    assert network.shape.parameters == 8_030_261_248 - (2 * 32 + 1) * 4096
    loads = {call.name: load(made, grpo, call) for call in made.graph.list_model_calls()}
    assert {
        (each.num_sequences, each.prompt_tokens, each.new_tokens) for each in loads.values()
    } == {(256, 512, 256)}
    assert loads["actor_train"].num_updates == made.updates_per_firing.get("actor_train", 1)
    grpo.search.prompt_tokens, grpo.search.answer_tokens = 100, 50
    assert load(made, grpo, made.graph.list_model_calls()[0]).sequence_length == 150
    dpo = config(DPOConfig, folder, "pairs.jsonl", "actor", "ref")
    dpo.dataset.max_seqlen = 300
    assert (
        load(dpo.build(), dpo, dpo.build().graph.list_model_calls()[0]).num_tokens == 64 * 2 * 300
    )


EXPERTS = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 256,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
}


@pytest.mark.parametrize("targets", [[], ["q", "down"]])
@pytest.mark.parametrize("shape", [LLAMA_8B, EXPERTS], ids=["dense", "experts"])
def test_adapters_are_as_many_as_the_network_has(
    tmp_path: Path, shape: dict[str, Any], targets: list[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(shape))
    spec = ModelSpec(
        path=str(tmp_path), trained=True, dtype="bfloat16", lora=LoRASpec(r=4, targets=targets)
    )
    facts = describe_planned_engine(spec, Mesh.on_first_devices(Layout()), torch.device("cpu"))
    assert sizes(spec).num_trained == facts["num_trainable"]


def test_a_model_that_is_not_here_is_named_in_place_of_a_placement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    sft = config(SFTConfig, tmp_path, "rows.jsonl")
    sft.model.path = "org/model"
    made = sft.build()
    assert not made.search and made.plan_notes[-1].startswith(
        "allocation_mode=search: the config.json of model.path=org/model is not on this machine"
    )


SMALL = LLAMA_8B | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "head_dim": 2,
}


def heuristic(folder: Path, shape: dict[str, Any]) -> Any:
    ppo = config(PPOConfig, folder, "prompts.jsonl", "actor", "critic", "ref", "rew")
    (folder / "config.json").write_text(json.dumps(shape))
    ppo.allocation_mode, ppo.dataset.max_prompt_len, ppo.ppo.gen.max_new_tokens = (
        "heuristic",
        64,
        64,
    )
    return ppo


@pytest.mark.parametrize("devices", [2, 4])
def test_the_heuristic_has_a_small_model_in_one_process_where_processes_share_the_cores(
    folder: Path, monkeypatch: pytest.MonkeyPatch, devices: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    ppo = heuristic(folder, SMALL)
    ppo.search.gpu, ppo.device, ppo.n_gpus_per_node = None, "cpu", devices
    made = ppo.build()
    assert made.num_devices == 1
    notes = [note for note in made.plan_notes if "allocation_mode=heuristic" in note]
    assert (
        len(notes) == 1
        and "per step on cpu as estimated" in notes[0]
        and "  actor_gen: d1 on 0" in made.plan_notes
    )
    ppo.actor.layout = "d2f2"
    assert str(ppo.build().role_meshes["actor"].layout) == "d2f2t1p1c1e1"


def test_the_heuristic_has_a_large_model_on_all_gpus(folder: Path) -> None:
    ppo = heuristic(folder, LLAMA_8B)
    ppo.dataset.train_bs_n_seqs, ppo.search.memory_gb = 256, 400
    made = ppo.build()
    assert made.num_devices == 8
    assert made.call_meshes["actor_train"].layout.fsdp == 8
    assert str(made.call_meshes["actor_gen"].layout) == "d8f1t1p1c1e1"
    assert not made.search


@pytest.mark.parametrize(
    ("gpu", "told"),
    [
        (None, "this machine has no GPU; set search.gpu"),
        ("H101", "search.gpu='H101': the speed of this GPU is not known"),
    ],
)
def test_where_nothing_is_known_of_the_devices_the_heuristic_takes_all(
    folder: Path, gpu: str | None, told: str
) -> None:
    ppo = heuristic(folder, SMALL)
    ppo.search.gpu, ppo.device = gpu, "cuda"
    made = ppo.build()
    assert made.num_devices == 8 and str(made.role_meshes["actor"].layout) == "d8f8t1p1c1e1"
    assert told in made.plan_notes[-1] and made.plan_notes[-1].endswith(
        "until then every call is on all devices"
    )


@pytest.mark.slow
def test_a_run_on_two_devices_that_the_search_has_placed(tmp_path: Path) -> None:
    prepare(tmp_path)
    code, out = run_forked(
        "ppo",
        "experiment_name=e",
        "trial_name=t",
        f"fileroot={tmp_path}/runs",
        f"actor.path={tmp_path}/model",
        f"critic.path={tmp_path}/model",
        f"rew.path={tmp_path}/model",
        f"dataset.path={tmp_path}/prompts.jsonl",
        "dataset.train_bs_n_seqs=4",
        "ppo.gen.max_new_tokens=6",
        "max_steps=2",
        "allocation_mode=search",
        "n_gpus_per_node=2",
        "device=cpu",
        cwd=tmp_path,
    )
    assert code == 0 and "allocation_mode=search:" in " ".join(out.split()), out
    assert "actor_train: d" in (tmp_path / "runs" / "e" / "t" / "log.txt").read_text()
