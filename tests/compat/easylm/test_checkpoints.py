"""Conversion of EasyLM's weights: the network's results, exact round trips, and use of memory."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.compat.easylm.common import (
    TINY,
    Arrays,
    arrays_of,
    compute,
    decode_stream,
    encode_stream,
    encode_tree,
    write_stream,
)
from tests.models.common import logits
from tests.tiny import TEXT, make_tokenizer
from weft.checkpoints import hf_io
from weft.checkpoints.weight_files import WeightFiles
from weft.compat.easylm.checkpoints import (
    write_copy,
    write_difference,
    write_from_hf,
    write_hf,
)
from weft.compat.easylm.configs import LLAMA_STANDARD_CONFIGS, EasyLMConfig
from weft.compat.easylm.streams import StreamSource, TensorStream, find_source
from weft.data.spec import TokenizerSpec
from weft.data.tokenizer import Tokenizer
from weft.errors import CheckpointError, ConfigError, UserError
from weft.models.network.transformer import Transformer

IDS = np.array([3, 90, 17, 17, 4, 55, 1, 2, 88, 31])
CONFIGS = {
    "grouped": TINY,
    "ungrouped": replace(TINY, num_key_value_heads=None, rms_norm_eps=1e-5, rope_theta=5e5),
    "tied": replace(TINY, tie_word_embeddings=True, num_key_value_heads=1),
    "scaled": replace(TINY, use_scaled_rope=True, rope_theta=500000, hidden_size=64),
    "halves": replace(TINY, use_hf_rotary_emb=True, rope_theta=5000000),
}


def source_of(path: Path, kind: str = "params") -> StreamSource:
    return StreamSource(kind, path)


def load(folder: Path, head: Any = "lm") -> Transformer:
    return hf_io.load(folder, head, dtype=torch.float64)


def read_hf(folder: Path) -> tuple[EasyLMConfig, Arrays]:
    """Return a Hugging Face directory as a network with rotary pairs (i, i + dim / 2)."""
    values = json.loads((folder / "config.json").read_text())
    config = EasyLMConfig(
        values["vocab_size"],
        values["hidden_size"],
        values["intermediate_size"],
        values["num_hidden_layers"],
        values["num_attention_heads"],
        values["num_key_value_heads"],
        rms_norm_eps=values["rms_norm_eps"],
        rope_theta=values["rope_theta"],
        use_scaled_rope=(values["rope_scaling"] or {}).get("rope_type") == "llama3",
        use_hf_rotary_emb=True,
    )
    names = {
        "model.embed_tokens": "transformer/wte/embedding",
        "model.norm": "transformer/ln_f/kernel",
        "lm_head": "lm_head/kernel",
    }
    for layer in range(config.num_hidden_layers):
        for theirs, own in (
            ("self_attn.q_proj", "attention/wq"),
            ("self_attn.k_proj", "attention/wk"),
            ("self_attn.v_proj", "attention/wv"),
            ("self_attn.o_proj", "attention/wo"),
            ("mlp.gate_proj", "feed_forward/w1"),
            ("mlp.down_proj", "feed_forward/w2"),
            ("mlp.up_proj", "feed_forward/w3"),
            ("input_layernorm", "attention_norm"),
            ("post_attention_layernorm", "ffn_norm"),
        ):
            names[f"model.layers.{layer}.{theirs}"] = f"transformer/h/{layer}/{own}/kernel"
    arrays = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        own = names.pop(name.removesuffix(".weight"))
        arrays[own] = tensor.numpy() if own.endswith("embedding") else tensor.numpy().T
    assert set(names) <= ({"lm_head"} if values["tie_word_embeddings"] else set())
    return config, arrays


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_easylm(tmp_path: Path, name: str) -> None:
    """Compare the converted directory with EasyLM's formulas, both in numpy and float64.

    The bound of 1e-10 allows only for sums in another order: pairs of rows in the wrong order, an
    epsilon of 1e-6 instead of 1e-5, or another base change the first digits. weft's own network is
    compared to 1e-4, because its angles are computed in float32.
    """
    config = CONFIGS[name]
    arrays = arrays_of(config, dtype=np.float64)
    write_hf(source_of(write_stream(tmp_path / "weights", arrays)), config, tmp_path / "hf")
    expected = compute(config, arrays, IDS)
    np.testing.assert_allclose(compute(*read_hf(tmp_path / "hf"), IDS), expected, 1e-10, 1e-10)
    own = logits(load(tmp_path / "hf"), torch.from_numpy(IDS))
    np.testing.assert_allclose(own.numpy(), expected, 1e-4, 1e-5)
    assert np.abs(expected).mean() > 0.1


@pytest.mark.slow  # imports the network of transformers
def test_logits_are_those_of_easylm_in_transformers(tmp_path: Path) -> None:
    config = CONFIGS["scaled"]
    arrays = arrays_of(config, dtype=np.float32)
    write_hf(source_of(write_stream(tmp_path / "weights", arrays)), config, tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    with torch.no_grad():
        theirs = model(torch.from_numpy(IDS)[None]).logits[0]
    expected = torch.from_numpy(compute(config, arrays, IDS)).float()
    torch.testing.assert_close(theirs, expected, rtol=1e-4, atol=1e-4)


def test_scores_are_those_of_easylm(tmp_path: Path) -> None:
    """Scores of a reward model and a critic, by weft and by transformers' sequence classifier."""
    arrays = arrays_of(TINY, "score", np.float64)
    write_stream(tmp_path / "out/value_streaming_params_7", arrays)
    source = find_source(f"params::{tmp_path / 'out'}", value=True)
    write_hf(source, TINY, tmp_path / "hf", head="score")
    expected = compute(TINY, arrays, IDS)[:, 0]
    for head in ("score", "value"):
        network = load(tmp_path / "hf", head)
        assert torch.equal(network.score.weight[0], torch.from_numpy(arrays["score/kernel"][:, 0]))
    values = json.loads((tmp_path / "hf/config.json").read_text())
    assert values["architectures"] == ["LlamaForSequenceClassification"]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf", dtype=torch.float64)
    with torch.no_grad():
        score = model(torch.from_numpy(IDS)[None]).logits
    assert score.shape == (1, 1)
    assert float(score) == pytest.approx(float(expected[-1]), rel=1e-5)


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("head", ["lm", "score"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_bit_returns(tmp_path: Path, name: str, head: Any, streaming: bool) -> None:
    """From EasyLM to Hugging Face and back, including weights that are NaN, and mixed dtypes."""
    config = CONFIGS[name]
    arrays = arrays_of(config, head)
    arrays["transformer/ln_f/kernel"] = arrays["transformer/ln_f/kernel"].astype(np.float32)
    arrays["transformer/h/1/attention/wk/kernel"][:3, :3] = np.nan
    content = encode_stream(arrays) if streaming else encode_tree(arrays)
    (tmp_path / "weights").write_bytes(content)
    source = source_of(tmp_path / "weights", "params" if streaming else "flax_params")
    write_hf(source, config, tmp_path / "hf", head=head)
    read = write_from_hf(str(tmp_path / "hf"), tmp_path / "back", size=config, streaming=streaming)
    assert (tmp_path / "back").read_bytes() == content
    expected = replace(config, num_key_value_heads=config.kv_heads)
    if config.use_scaled_rope:
        expected = replace(expected, max_sequence_length=131072)
    assert read == expected


def test_all_forms_of_a_checkpoint_give_the_same_model(tmp_path: Path) -> None:
    arrays = arrays_of(TINY)
    write_stream(tmp_path / "params", arrays)
    state = encode_stream(arrays, ("params", "params"))
    moments = encode_stream(arrays, ("opt_state", "1", "0", "mu", "params"))
    (tmp_path / "state").write_bytes(moments + state + moments[:0])
    (tmp_path / "flax").write_bytes(encode_tree(arrays))
    write_hf(source_of(tmp_path / "params"), TINY, tmp_path / "hf")
    weights = (tmp_path / "hf/model.safetensors").read_bytes()
    for kind, file in (
        ("trainstate_params", "state"),
        ("trainstate", "state"),
        ("flax_params", "flax"),
    ):
        write_hf(source_of(tmp_path / file, kind), TINY, tmp_path / kind)
        assert (tmp_path / kind / "model.safetensors").read_bytes() == weights
    with pytest.raises(CheckpointError, match="begins with params/params/"):
        TensorStream(source_of(tmp_path / "params", "trainstate_params"))


# -- EasyLM's defects


def test_all_rows_of_the_vocabulary_are_converted(tmp_path: Path) -> None:
    """EasyLM's converter from Hugging Face drops the last 8 (its defect c)."""
    arrays = arrays_of(TINY)
    write_hf(source_of(write_stream(tmp_path / "weights", arrays)), TINY, tmp_path / "hf")
    write_from_hf(str(tmp_path / "hf"), tmp_path / "back")
    back = decode_stream(tmp_path / "back")
    assert back["transformer/wte/embedding"].shape == (96, 32)
    assert back["lm_head/kernel"].shape == (32, 96)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, "bfloat16"])
def test_weights_do_not_pass_through_half_precision(tmp_path: Path, dtype: Any) -> None:
    """EasyLM's converter does (its defect c): large weights become infinite, small ones 0."""
    dtype = np.dtype(dtype)
    arrays = arrays_of(TINY, dtype=dtype)
    extreme = np.array([1e-30, 1e30, 70000.0, 1.0009765625])
    arrays["lm_head/kernel"][0, :4] = extreme.astype(dtype)
    write_hf(source_of(write_stream(tmp_path / "weights", arrays)), TINY, tmp_path / "hf")
    write_from_hf(str(tmp_path / "hf"), tmp_path / "back")
    back = decode_stream(tmp_path / "back")["lm_head/kernel"]
    assert back.dtype == dtype and np.array_equal(back, arrays["lm_head/kernel"])


def test_config_json_has_the_base_and_epsilon_of_training(tmp_path: Path) -> None:
    """EasyLM's converter writes base 100000 for Llama 2 and eps 1e-6 for Llama 3 (its defect d)."""
    for name, theta, eps in (("7b", 10000.0, 1e-6), ("8b3", 500000.0, 1e-5), ("405b31", 5e5, 1e-5)):
        standard = LLAMA_STANDARD_CONFIGS[name]
        config = replace(
            TINY,
            rope_theta=standard.rope_theta,
            rms_norm_eps=standard.rms_norm_eps,
            use_scaled_rope=standard.use_scaled_rope,
        )
        write_stream(tmp_path / "weights", arrays_of(config))
        write_hf(source_of(tmp_path / "weights"), config, tmp_path / name)
        values = json.loads((tmp_path / name / "config.json").read_text())
        assert (values["rope_theta"], values["rms_norm_eps"]) == (theta, eps)
        scaling = values["rope_scaling"]
        assert (scaling is not None and scaling["factor"] == 8.0) == (name == "405b31")


# -- memory and files


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[torch.UntypedStorage]] = []
    most = 0

    def count(read: Any) -> Any:
        def read_and_count(*args: Any) -> torch.Tensor:
            nonlocal most
            most = max(most, sum(each() is not None for each in alive))
            tensor: torch.Tensor = read(*args)
            alive.append(weakref.ref(tensor.untyped_storage()))
            return tensor

        return read_and_count

    arrays = arrays_of(TINY)
    source = source_of(write_stream(tmp_path / "weights", arrays))
    monkeypatch.setattr(TensorStream, "read", count(TensorStream.read))
    monkeypatch.setattr(WeightFiles, "read", count(WeightFiles.read))
    write_hf(source, TINY, tmp_path / "hf", dtype=torch.float32)
    write_from_hf(str(tmp_path / "hf"), tmp_path / "back", dtype=torch.bfloat16)
    write_copy(source, tmp_path / "copy", dtype=None, streaming=False)
    assert len(alive) == 3 * len(arrays)
    assert most == 0  # all earlier tensors have been freed when a tensor is read
    write_stream(tmp_path / "weights", arrays_of(TINY, dtype=np.float32))
    write_difference(source, source, tmp_path / "diff")
    assert most == 1  # the tensor to which the base is added


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path) -> None:
    arrays = arrays_of(TINY)
    stream = write_stream(tmp_path / "weights", arrays)
    source = source_of(stream)
    with pytest.raises(CheckpointError, match="vocabulary of 96"):
        make_tokenizer(tmp_path / "tokenizer")
        write_hf(source, TINY, tmp_path / "hf", tokenizer=str(tmp_path / "tokenizer"))
    with pytest.raises(UserError):
        write_hf(source, TINY, tmp_path / "hf", tokenizer=str(tmp_path / "nothing"))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["tokenizer", "weights"]


@pytest.mark.parametrize(
    ("changes", "head", "message"),
    [
        ({"num_hidden_layers": 3}, "lm", "lacks transformer/h/2/attention/wq/kernel (32, 32)"),
        ({"num_hidden_layers": 1}, "lm", "has transformer/h/1/attention/wk/kernel (32, 16)"),
        ({"vocab_size": 97}, "lm", "the file has vocab_size=96, hidden_size=32"),
        ({"tie_word_embeddings": True}, "lm", "has lm_head/kernel (32, 96)"),
        ({"num_key_value_heads": 4}, "lm", "attention/wk/kernel (32, 16)"),
        ({}, "score", "has no score/kernel, the head of a reward model"),
    ],
)
def test_weights_of_another_size_are_refused(
    tmp_path: Path, changes: dict[str, Any], head: Any, message: str
) -> None:
    source = source_of(write_stream(tmp_path / "weights", arrays_of(TINY)))
    with pytest.raises(CheckpointError) as caught:
        write_hf(source, replace(TINY, **changes), tmp_path / "hf", head=head)
    assert message in str(caught.value)
    assert not (tmp_path / "hf").exists()


def test_a_wrong_size_is_answered_with_the_right_one(tmp_path: Path) -> None:
    debug = LLAMA_STANDARD_CONFIGS["debug"]
    source = source_of(write_stream(tmp_path / "weights", arrays_of(debug, "score")))
    with pytest.raises(CheckpointError, match="the file fits the sizes debug"):
        write_hf(source, LLAMA_STANDARD_CONFIGS["7b"], tmp_path / "hf", head="score")
    with pytest.raises(CheckpointError, match="is_reward_model=True"):
        write_hf(source, debug, tmp_path / "hf")


# -- from Hugging Face


def test_models_that_easylm_lacks_are_refused(tmp_path: Path) -> None:
    source = source_of(write_stream(tmp_path / "weights", arrays_of(TINY, "score")))
    write_hf(source, TINY, tmp_path / "hf", head="score")
    config = tmp_path / "hf/config.json"
    values = json.loads(config.read_text())

    def refuse(message: str, kind: type[Exception] = CheckpointError, **more: Any) -> None:
        with pytest.raises(kind, match=message):
            write_from_hf(str(tmp_path / "hf"), tmp_path / "back", **more)
        assert not (tmp_path / "back").exists()

    for changes, message in (
        ({"weft_pooling": "mean"}, "scores the mean of all tokens"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"model_type": "qwen2"}, "model_type='qwen2'"),
    ):
        config.write_text(json.dumps(values | changes))
        refuse(message)
    config.write_text(json.dumps(values))
    refuse("has vocab_size=96, not 32000", ConfigError, size=LLAMA_STANDARD_CONFIGS["7b"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        write_from_hf(str(tmp_path / "empty"), tmp_path / "back")


# -- differences


def test_differences_give_the_target_back(tmp_path: Path) -> None:
    base = arrays_of(TINY, seed=1)
    target = arrays_of(TINY, seed=2)
    sources = []
    for name, arrays in (("base", base), ("target", target)):
        sources.append(source_of(write_stream(tmp_path / name, arrays)))
    write_difference(*sources, tmp_path / "diff", dtype=torch.float32)
    difference = decode_stream(tmp_path / "diff")
    for name in base:
        wide = target[name].astype(np.float32) - base[name].astype(np.float32)
        assert np.array_equal(difference[name], wide)
    write_difference(
        sources[0],
        source_of(tmp_path / "diff"),
        tmp_path / "back",
        recover=True,
        dtype=torch.bfloat16,
    )
    assert (tmp_path / "back").read_bytes() == (tmp_path / "target").read_bytes()


def test_differences_of_other_models_are_refused(tmp_path: Path) -> None:
    base = source_of(write_stream(tmp_path / "base", arrays_of(TINY)))
    other = arrays_of(replace(TINY, vocab_size=97))
    target = source_of(write_stream(tmp_path / "target", other))
    with pytest.raises(CheckpointError, match="differ in names or shapes: lm_head/kernel"):
        write_difference(base, target, tmp_path / "diff")
    assert not (tmp_path / "diff").exists()


# -- tokenizers


def train_sentencepiece(folder: Path) -> str:
    (folder / "corpus.txt").write_text("\n".join(TEXT * 50))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=90,
        minloglevel=2,
    )
    return str(folder / "tokenizer.model")


TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes"},
    {"role": "user", "content": "Why"},
]


def test_the_directory_has_tulus_chat_template(tmp_path: Path) -> None:
    """The prompt ends with a line break, which EasyLM's own template lacks (its defect j)."""
    source = source_of(write_stream(tmp_path / "weights", arrays_of(TINY)))
    write_hf(source, TINY, tmp_path / "hf", tokenizer=train_sentencepiece(tmp_path))
    expected = "<s><|user|>\nHi\n<|assistant|>\nYes</s>\n<|user|>\nWhy\n<|assistant|>\n"
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = theirs.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    assert text == expected
    processor = sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model"))
    sentence = "the quick brown fox"
    assert theirs(sentence)["input_ids"] == [1, *processor.encode(sentence)]
    own = Tokenizer.load(TokenizerSpec(), str(tmp_path / "hf"))
    ids, _ = own.encode_context(TALK)
    assert ids[0] == 1 and ids.count(1) == 1 and ids.count(2) == 1
    assert theirs.apply_chat_template(TALK, add_generation_prompt=True)["input_ids"] == ids
    values = json.loads((tmp_path / "hf/config.json").read_text())
    assert (values["bos_token_id"], values["eos_token_id"]) == (1, 2)


def test_a_directory_of_a_tokenizer_is_copied(tmp_path: Path) -> None:
    config = replace(TINY, vocab_size=320)
    source = source_of(write_stream(tmp_path / "weights", arrays_of(config, "score")))
    (tmp_path / "tokenizer").mkdir()
    fast = make_tokenizer(tmp_path / "tokenizer")
    write_hf(source, config, tmp_path / "hf", head="score", tokenizer=str(tmp_path / "tokenizer"))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert theirs.get_vocab() == fast.get_vocab()
    assert theirs.apply_chat_template(TALK[:1], tokenize=False) == "<s><|user|>\nHi\n"
    assert (
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").config.pad_token_id == 0
    )


def test_defaults_are_those_of_the_dataclass() -> None:
    assert EasyLMConfig().head_dim == 128 and EasyLMConfig().kv_heads == 32
