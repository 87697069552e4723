"""Every shipped family against `transformers`: logits, log-probs, gradients, scores, files both
ways.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.version import Version

from tests.models.common import tiny
from weft.checkpoints import hf_io
from weft.errors import CheckpointError
from weft.models.families.base import Family
from weft.models.network.linear import find_canonical_values
from weft.registry import families
from weft.testing import check_family
from weft.testing.families import build_reference_model

SHIPPED = [
    "gemma",
    "gemma2",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "opt",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
]

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 8.0,
}
ODD_OPT = {"do_layer_norm_before": False, "word_embed_proj_dim": 12}  # OPT-350m
GALACTICA = {
    "enable_bias": False,
    "layer_norm_elementwise_affine": False,
    "activation_function": "gelu",
}

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_scaling": LLAMA3, "tie_word_embeddings": True}),
    (
        "llama",
        {
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    ("llama", {"head_dim": 12, "num_key_value_heads": 1, "rope_theta": 500000.0}),
    ("mistral", {"sliding_window": None, "head_dim": 16}),
    ("qwen2", {"rope_scaling": YARN, "use_sliding_window": False}),
    ("qwen3", {"attention_bias": True, "tie_word_embeddings": False}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("phi3", {"rope_scaling": None, "sliding_window": None, "partial_rotary_factor": 1.0}),
    (
        "gpt2",
        {"scale_attn_by_inverse_layer_idx": True, "n_inner": 40, "activation_function": "gelu"},
    ),
    ("gpt_bigcode", {"multi_query": False}),
    ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 1.0}),
    ("opt", ODD_OPT),
    ("opt", GALACTICA),
    ("mixtral", {"sliding_window": 8, "num_experts_per_tok": 1}),
    ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": [], "decoder_sparse_step": 2}),
]


def test_all_families_are_shipped() -> None:
    assert set(families.list_shipped()) == set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_family(name: str) -> None:
    changes = {}
    if name == "gemma" and Version(transformers.__version__) < Version("5.18"):
        # before, transformers took the "gelu" of the first release's configurations at its word
        changes = {"hidden_act": "gelu_pytorch_tanh"}
    check_family(families.get(name), **changes)


@pytest.mark.parametrize(
    ("name", "changes"), VARIANTS, ids=lambda v: v if isinstance(v, str) else "-".join(v)
)
def test_variant(name: str, changes: dict[str, Any]) -> None:
    check_family(families.get(name), seed=1, **changes)


def test_dynamic_rope_depends_on_each_sequence_alone() -> None:
    """transformers grows the base with the longest sequence it has seen; on one sequence at a time
    both agree.
    """
    check_family(
        families.get("llama"),
        rope_scaling={"type": "dynamic", "factor": 2.0},
        max_position_embeddings=20,
    )


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "opt"])
def test_checkpoints_of_the_bare_trunk_load(name: str, tmp_path: Path) -> None:
    """Files of `AutoModel` (hub GPT-2 among them) lack the trunk's prefix; with a tied head they
    hold the whole model.
    """
    family: Family = families.get(name)
    reference = build_reference_model(family, "lm", 0, {"tie_word_embeddings": True})
    reference.base_model.save_pretrained(tmp_path)
    network = hf_io.load(tmp_path)
    for ours, value in find_canonical_values(network).items():
        assert value.shape == hf_io.ParameterReader(tmp_path).read(ours).shape


def test_every_family_has_a_tiny_network() -> None:
    for name in families.load_all():
        assert sum(p.numel() for p in tiny(name).parameters()) < 200_000


# -- config.json


def real_configs(data_dir: Path) -> list[Path]:
    return sorted((data_dir / "hf_configs").iterdir())


def test_real_configs_parse_or_are_refused_by_name(data_dir: Path) -> None:
    refused = {}
    for directory in real_configs(data_dir):
        try:
            family, config = hf_io.read_config(directory)
        except CheckpointError as error:
            refused[directory.name] = str(error)
            continue
        written = family.to_hf(config)
        assert family.config(written) == config, directory.name
        theirs = transformers.AutoConfig.from_pretrained(directory)
        assert family.config(theirs.to_dict()) == config, (
            f"{directory.name}: transformers reads it differently"
        )
        assert (
            transformers.AutoConfig.for_model(**written).num_hidden_layers
            == theirs.num_hidden_layers
        )
    assert list(refused) == ["gpt2"]  # a GPTQ export
    assert "quantization_config" in refused["gpt2"] and "unquantized" in refused["gpt2"]


def test_real_configs_say_what_they_should(data_dir: Path) -> None:
    def config(name: str) -> Any:
        return hf_io.read_config(data_dir / "hf_configs" / name)[1]

    llama = config("llama3.1-8b")
    assert (
        llama.rope.scaling == "llama3"
        and llama.rope.values["original"] == 8192
        and llama.num_kv_heads == 8
    )
    assert config("llama3.2-1b-instruct").tied and config("llama2-7b").rope.theta == 10000.0
    gemma = config("gemma2-9b-it")
    assert (
        gemma.windows[:3] == (4096, None, 4096)
        and gemma.attention_softcap == 50.0
        and gemma.scale == 224**-0.5
    )
    assert gemma.tied and gemma.placement == "both" and gemma.norm == "rms_plus_one"
    assert (
        config("mistral-7b-instruct-v0.3").windows == () and config("mixtral-8x7b").experts.num == 8
    )
    qwen = config("qwen3-30b-a3b")
    assert (
        qwen.experts.num == 128
        and qwen.experts.top_k == 8
        and qwen.experts.normalize
        and qwen.qk_norm == "head"
    )
    assert config("qwen2.5-7b-instruct").windows == () and config("qwen2.5-7b-instruct").qkv_bias
    pythia = config("pythia-410m-seqcls")
    assert pythia.rope.dim == 16 and pythia.parallel_residual
    assert (
        config("reduced-gptbigcode").num_kv_heads == 1
        and config("reduced-gptbigcode").intermediate_size == 24576
    )
    assert config("reduced-gptneox").activation == "gelu_tanh"
    assert config("opt-125m").learned_positions == 2050 and config("gpt2-large").num_layers == 36


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("llama", {"hidden_act": "xielu"}, "xielu"),
        ("llama", {"rope_scaling": {"rope_type": "mrope"}}, "mrope"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ("opt", {"layerdrop": 0.1}, "layerdrop"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ("qwen3_moe", {"num_hidden_layers": 2, "mlp_only_layers": [0, 1]}, "qwen3"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ("phi3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "linear"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_by_name(
    name: str, changes: dict[str, Any], said: str
) -> None:
    family: Family = families.get(name)
    with pytest.raises(CheckpointError, match=said):
        family.config({**family.tiny, **changes})


def test_an_unknown_architecture_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen4"}))
    with pytest.raises(CheckpointError, match=r"'qwen4'.*qwen3.*backend=hf"):
        hf_io.read_config(tmp_path)


def test_a_type_overrides_what_config_json_says(tmp_path: Path) -> None:
    family: Family = families.get("llama")
    (tmp_path / "config.json").write_text(json.dumps({**family.tiny, "model_type": "my_llama"}))
    assert hf_io.read_config(tmp_path, "llama")[0] is family


def test_keys_that_nobody_reads_survive() -> None:
    family: Family = families.get("llama")
    config = family.config(
        {**family.tiny, "eos_token_id": [2, 7], "my_note": "kept", "torch_dtype": "bfloat16"}
    )
    written = family.to_hf(config)
    assert (
        written["eos_token_id"] == [2, 7]
        and written["my_note"] == "kept"
        and "torch_dtype" not in written
    )
