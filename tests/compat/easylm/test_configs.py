"""EasyLM's configurations: sizes by name, changes without evaluation, config.json and back."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.compat.easylm.common import TINY, scale_frequency
from weft.compat.easylm.configs import (
    LLAMA_STANDARD_CONFIGS,
    EasyLMConfig,
    change_config,
    check_trainable,
    describe_flags,
    find_size_differences,
    from_hf_values,
    load_llama_config,
    parse_dictionary,
    to_hf_values,
)
from weft.errors import CheckpointError, ConfigError
from weft.registry import families

# hidden, intermediate, layers, heads, key-value heads, vocabulary, context, eps, theta
SIZES = """
1b       2048  5504  22 16  16 32000  8192  1e-6 10000
3b       3200  8640  26 32  32 32000  8192  1e-6 10000
7b       4096  11008 32 32  32 32000  8192  1e-6 10000
7bcode   4096  11008 32 32  32 32016  8192  1e-6 10000
13b      5120  13824 40 40  40 32000  8192  1e-6 10000
13bcode  5120  13824 40 40  40 32016  8192  1e-6 10000
30b      6656  17920 60 52  52 32000  8192  1e-6 10000
30b2     8192  22016 48 64  8  32000  16384 1e-6 10000
30bcode  8192  22016 48 64  8  32000  16384 1e-6 10000
34byi    7168  20480 60 56  8  64000  4096  1e-5 5000000
65b      8192  22016 80 64  64 32000  8192  1e-5 10000
70b      8192  28672 80 64  8  32000  8192  1e-5 10000
70bcode  8192  28672 80 64  8  32016  16384 1e-5 10000
70bflash 8192  28672 80 64  8  32000  8192  1e-5 10000
debug    128   256   2  4   2  32000  2048  1e-6 10000
8b3      4096  14336 32 32  8  128256 8192  1e-5 500000
70b3     8192  28672 80 64  8  128256 8192  1e-5 500000
8b31     4096  14336 32 32  8  128256 8192  1e-5 500000
70b31    8192  28672 80 64  8  128256 8192  1e-5 500000
405b31   16384 53248 126 128 8 128256 8192  1e-5 500000
"""


def test_the_standard_sizes_are_those_of_easylm() -> None:
    rows = [line.split() for line in SIZES.split("\n") if line]
    assert [row[0] for row in rows] == list(LLAMA_STANDARD_CONFIGS)
    for name, *values in rows:
        config = load_llama_config(name)
        assert [
            config.hidden_size,
            config.intermediate_size,
            config.num_hidden_layers,
            config.num_attention_heads,
            config.kv_heads,
            config.vocab_size,
            config.max_sequence_length,
            config.rms_norm_eps,
            config.rope_theta,
        ] == [float(value) for value in values], name
        is_llama3 = "b3" in name
        assert (config.bos_token_id, config.eos_token_id) == (
            (128000, 128001) if is_llama3 else (1, 2)
        )
        assert config.use_scaled_rope == name.endswith("b31")
        assert config.use_hf_rotary_emb == (name == "34byi")
        assert config.scan_attention == config.scan_mlp == (name == "70bflash")
        assert not config.tie_word_embeddings


def test_an_empty_name_means_the_defaults_of_easylm() -> None:
    assert load_llama_config("") == EasyLMConfig()
    assert load_llama_config("", "{'num_hidden_layers': 3}").num_hidden_layers == 3


@pytest.mark.parametrize(
    "update",
    [
        "{'vocab_size': 32064, 'scan_attention': True, 'rope_theta': 1000000}",
        "dict(vocab_size=32064, scan_attention=True, rope_theta=1e6)",
        " {'vocab_size': 32064, 'scan_attention': True, 'rope_theta': 1000000.0} ",
    ],
)
def test_a_size_is_changed_by_a_literal(update: str) -> None:
    expected = replace(
        LLAMA_STANDARD_CONFIGS["7b"], vocab_size=32064, scan_attention=True, rope_theta=1e6
    )
    assert load_llama_config("7b", update) == expected


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('touch evaluated')",
        "dict(a=__import__('os').system('touch evaluated'))",
        "{'vocab_size': open('evaluated', 'w')}",
        "{'vocab_size': 2 ** 5}",
        "{**{}}",
        "dict([('a', 1)])",
        "dict(**{'a': 1})",
        "vocab_size=3",
        "[1]",
        "{1: 2}",
        "{",
        "(" * 5000,
        "{'a': " * 200,
        "-" * 100_000 + "1",
        "{[]: 1}",
        "\0",
    ],
)
def test_nothing_but_a_dictionary_of_values_is_accepted(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="must be a dictionary of plain values"):
        load_llama_config("7b", text)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "update", "message"),
    [
        ("7B3", "", "load_llama_config=7B3: unknown size; did you mean"),
        ("gpt2", "", "known are 1b, 3b, 7b"),
        ("pickle::x.pkl", "", "a pickle can run any program"),
        ("yaml::x", "", "known are"),
        ("json::nothing.json", "", "there is no such file"),
        ("7b", "{'vocab_sise': 3}", "unknown key 'vocab_sise'; did you mean vocab_size?"),
        ("7b", "{'zzz': 3}", "unknown key 'zzz'; known: vocab_size"),
        ("7b", "{'vocab_size': '3'}", "vocab_size='3': must be of type int"),
        ("7b", "{'vocab_size': True}", "vocab_size=True: must be of type int"),
        ("7b", "{'vocab_size': 3.0}", "must be of type int"),
        ("7b", "{'rms_norm_eps': None}", "must be of type float or int"),
        ("7b", "{'num_key_value_heads': 'a'}", "must be of type int or None"),
        ("7b", "{'scan_mlp': 1}", "must be of type bool"),
        ("7b", "{'vocab_size': 0}", "vocab_size=0: must be a finite number above 0"),
        ("7b", "{'rope_theta': 1e999}", "must be a finite number above 0"),
        ("7b", "{'num_attention_heads': 30}", "must be an even multiple"),
        ("7b", "{'num_attention_heads': 4096}", "must be an even multiple"),
        ("7b", "{'num_key_value_heads': 5}", "must divide"),
        ("7b", "{'remat_mlp': 'all'}", "must be one of everything_saveable"),
        ("34byi", "{'use_scaled_rope': True}", "excludes use_scaled_rope"),
    ],
)
def test_wrong_configurations_are_refused(name: str, update: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_llama_config(name, update)
    assert message in str(caught.value)
    assert str(caught.value).startswith(("load_llama_config=", "update_llama_config="))


def test_a_json_file_of_easylm_is_read(tmp_path: Path) -> None:
    own = {"hidden_size": 64, "num_attention_heads": 4, "use_scaled_rope": True}
    more = {"model_type": "llama", "n_rep": 1, "return_dict": True, "transformers_version": "4.43"}
    (tmp_path / "c.json").write_text(json.dumps(own | more))
    config = load_llama_config(f"json::{tmp_path / 'c.json'}", "{'vocab_size': 99}")
    assert config == change_config(EasyLMConfig(), own | {"vocab_size": 99}, "")
    (tmp_path / "c.json").write_text(json.dumps(own | {"hiden_size": 3}))
    with pytest.raises(
        ConfigError, match=r"c\.json: unknown key 'hiden_size'; did you mean hidden"
    ):
        load_llama_config(f"json::{tmp_path / 'c.json'}")
    (tmp_path / "c.json").write_text(json.dumps(to_hf_values(TINY)))
    with pytest.raises(ConfigError, match=r"is the config\.json of a Hugging Face model"):
        load_llama_config(f"json::{tmp_path / 'c.json'}")


@pytest.mark.parametrize("name", LLAMA_STANDARD_CONFIGS)
def test_sizes_become_config_json_and_return(name: str) -> None:
    """config.json is read by weft and by transformers, and converted back to weft's spelling."""
    config = LLAMA_STANDARD_CONFIGS[name]
    values = to_hf_values(config)
    family = families.get("llama")
    network = family.config(values)
    theirs = LlamaConfig.from_dict(values)
    for read in (theirs.num_key_value_heads, network.num_kv_heads):
        assert read == config.kv_heads
    assert theirs.rms_norm_eps == network.norm_eps == config.rms_norm_eps
    assert network.rope is not None and network.rope.theta == config.rope_theta
    assert network.max_positions == (
        131072 if config.use_scaled_rope else config.max_sequence_length
    )
    expected = replace(
        config,
        num_key_value_heads=config.kv_heads,
        max_sequence_length=network.max_positions,
        scan_attention=False,
        scan_mlp=False,
        use_hf_rotary_emb=False,
    )
    assert from_hf_values(values, name) == expected
    assert from_hf_values(family.to_hf(network), name) == expected
    assert from_hf_values(theirs.to_dict(), name) == expected
    assert not find_size_differences(expected, config)


def test_scaled_positions_are_those_of_easylm() -> None:
    """The frequencies of transformers equal those of EasyLM's function in common.py."""
    theirs = LlamaConfig.from_dict(to_hf_values(LLAMA_STANDARD_CONFIGS["8b31"]))
    frequencies, factor = ROPE_INIT_FUNCTIONS["llama3"](theirs, torch.device("cpu"))
    expected = [scale_frequency(500000 ** (-i / 128)) for i in range(0, 128, 2)]
    assert factor == 1.0
    torch.testing.assert_close(frequencies, torch.tensor(expected), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mistral"},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"hidden_act": "gelu"},
        {"head_dim": 16},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0}},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    ],
)
def test_networks_that_easylm_cannot_compute_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(CheckpointError) as caught:
        from_hf_values(to_hf_values(TINY) | changes, "DIR")
    assert str(caught.value).startswith(f"DIR: {next(iter(changes))}=")


def test_a_list_of_eos_ids_becomes_the_first() -> None:
    assert from_hf_values(to_hf_values(TINY) | {"eos_token_id": [7, 8]}, "").eos_token_id == 7


def test_flags_name_the_nearest_size_and_its_changes() -> None:
    assert describe_flags(LLAMA_STANDARD_CONFIGS["13b"]) == "--load_llama_config=13b"
    config = replace(LLAMA_STANDARD_CONFIGS["7b"], rms_norm_eps=1e-5, vocab_size=32008)
    flags = describe_flags(config)
    name, update = flags.removeprefix("--load_llama_config=").split(" --update_llama_config=")
    assert name == "7b" and load_llama_config(name, update.strip('"')) == config


@pytest.mark.parametrize("key", ["resid_pdrop", "embd_pdrop", "fcm_min_ratio", "fcm_max_ratio"])
def test_training_refuses_what_weft_lacks(key: str) -> None:
    check_trainable(replace(TINY, attn_pdrop=0.1, scan_mlp=True), "")
    with pytest.raises(ConfigError, match=f"update=X: {key}=0.1: weft's Llama has no such"):
        check_trainable(change_config(TINY, {key: 0.1}, ""), "update=X")


def test_a_dictionary_is_parsed_without_evaluation() -> None:
    assert parse_dictionary("{'a': [1, -2.5], 'b': (None, True)}", "") == {
        "a": [1, -2.5],
        "b": (None, True),
    }


def test_the_module_needs_no_torch() -> None:
    code = "import sys, weft.compat.easylm.configs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
