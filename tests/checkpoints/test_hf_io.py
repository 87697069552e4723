"""Model directories: reading, error messages, and writing."""

from __future__ import annotations

import json
import pickle
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.checkpoints.test_peft_io import check
from tests.models.common import sequences, tiny
from weft.checkpoints import hf_io
from weft.errors import CheckpointError, RunError
from weft.models.network.linear import find_canonical_values
from weft.models.network.transformer import Transformer


def write(directory: Path, network: Transformer, **more: Any) -> Path:
    hf_io.save(directory, find_canonical_values(network), network.config, network.kind, **more)
    return directory


def change(directory: Path, **values: Any) -> None:
    file = directory / "config.json"
    raw = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))


def change_weights(directory: Path, **tensors: torch.Tensor | None) -> None:
    held = {**load_file(directory / "model.safetensors"), **tensors}
    save_file(
        {k: v for k, v in held.items() if v is not None},
        directory / "model.safetensors",
        {"format": "pt"},
    )


def equal(one: Transformer, other: Transformer) -> None:
    theirs = find_canonical_values(other)
    assert theirs.keys() == find_canonical_values(one).keys()
    for name, value in find_canonical_values(one).items():
        assert torch.equal(value, theirs[name]), name


# -- round trips


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "mixtral"])
def test_shards_with_an_index(name: str, tmp_path: Path) -> None:
    network = tiny(name)
    write(tmp_path, network, shard_bytes=20_000)
    shards = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(shards)
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in network.parameters())
    equal(hf_io.load(tmp_path), network)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    check(network, theirs, sequences([12])[0])


def test_writing_again_leaves_nothing_of_the_first_time(tmp_path: Path) -> None:
    one, other = tiny(seed=1), tiny(seed=2)
    write(tmp_path, one, shard_bytes=20_000)
    equal(hf_io.load(write(tmp_path, other)), other)
    equal(hf_io.load(write(tmp_path, one, shard_bytes=30_000)), one)


def test_a_part_of_a_shard(tmp_path: Path) -> None:
    network = tiny("gpt_neox")
    reader = hf_io.ParameterReader(write(tmp_path, network, shard_bytes=20_000))
    name, where = "blocks.1.attention.k.weight", (slice(3, 20), slice(8, 24))
    assert torch.equal(reader.read(name, where), find_canonical_values(network)[name][where])
    assert reader.bytes_read == 17 * 16 * 4


def test_a_directory_in_another_dtype(tmp_path: Path) -> None:
    network = tiny()
    write(tmp_path, network, dtype=torch.bfloat16)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert hf_io.ParameterReader(tmp_path).dtype == torch.bfloat16
    loaded = hf_io.load(tmp_path)
    assert loaded.embed.weight.dtype == torch.float32
    assert torch.equal(loaded.embed.weight, network.embed.weight.bfloat16().float())


def test_pickled_weights_are_read_as_tensors_only(tmp_path: Path) -> None:
    network = tiny("opt")
    write(tmp_path, network)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    equal(hf_io.load(tmp_path), network)

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"x": Evil()}))
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin"):
        hf_io.load(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_old_buffers_are_no_parameters(tmp_path: Path) -> None:
    write(tmp_path, tiny())
    change_weights(tmp_path, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    hf_io.load(tmp_path)


def test_tied_embeddings_stay_one_matrix(tmp_path: Path) -> None:
    network = tiny(tie_word_embeddings=True)
    assert "head.weight" not in find_canonical_values(network)
    write(tmp_path, network)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    # some checkpoints have both
    change_weights(tmp_path, **{"lm_head.weight": network.embed.weight.detach().clone()})
    loaded = hf_io.load(tmp_path)
    assert loaded.projection.weight is loaded.embed.weight


def test_the_verl_fixture_loads(data_dir: Path) -> None:
    directory = data_dir / "weights" / "verl_arithmetic_llama_random"
    network = hf_io.load(directory)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    check(network, theirs, sequences([20], vocab=16)[0])


# -- heads


@pytest.mark.parametrize("head", ["value", "score"])
def test_a_reward_model_from_a_language_model(head: Any, tmp_path: Path) -> None:
    base = tiny("gpt2")
    write(tmp_path / "lm", base)
    network = hf_io.load(tmp_path / "lm", head, seed=3)
    assert torch.equal(network.embed.weight, base.embed.weight)
    new = network.score.weight
    assert not new.any() if head == "value" else 0.5 < new.std() * (32 + 1) ** 0.5 < 2
    equal(hf_io.load(tmp_path / "lm", head, seed=3), network)
    with torch.no_grad():
        new.add_(0.25)
    write(tmp_path / head, network)
    equal(hf_io.load(tmp_path / head, head), network)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / head)
    assert theirs.config.num_labels == 1 and torch.equal(theirs.score.weight, new)
    equal(hf_io.load(tmp_path / head, "lm"), base)  # its head is tied, so nothing is missing


def test_a_classifier_has_no_language_head(tmp_path: Path) -> None:
    write(tmp_path, tiny(head="score"))
    with pytest.raises(CheckpointError, match=r"lacks lm_head.weight"):
        hf_io.load(tmp_path)


def test_a_classifier_of_three_labels_is_no_reward_model(tmp_path: Path) -> None:
    write(tmp_path, tiny(head="score"))
    change_weights(tmp_path, **{"score.weight": torch.zeros(3, 32)})
    with pytest.raises(CheckpointError, match=r"score.weight is \(3, 32\).*\(1, 32\)"):
        hf_io.load(tmp_path, "score")


def test_mean_pooling_is_remembered(tmp_path: Path) -> None:
    network = tiny(head="score")
    write(tmp_path, network, pooling="mean")
    assert hf_io.load(tmp_path, "score").pooling == "mean"
    assert hf_io.load(tmp_path, "score", pooling="last").pooling == "last"
    write(tmp_path / "again", hf_io.load(tmp_path, "score"), pooling="last")
    assert hf_io.load(tmp_path / "again", "score").pooling == "last"


# -- random initialization


def test_new_weights_depend_on_seed_and_name_alone() -> None:
    config = tiny("llama").config
    one, other = (hf_io.init_random(config, seed=1) for _ in range(2))
    torch.manual_seed(5)
    equal(one, other)
    critic, first = hf_io.init_random(config, "value", seed=1), find_canonical_values(one)
    assert torch.equal(
        find_canonical_values(critic)["blocks.2.mlp.up.weight"], first["blocks.2.mlp.up.weight"]
    )
    assert not torch.equal(hf_io.init_random(config, seed=2).embed.weight, one.embed.weight)
    assert not torch.equal(first["blocks.0.mlp.up.weight"], first["blocks.1.mlp.up.weight"])
    assert abs(one.embed.weight.std() - 0.02) < 2e-3
    assert abs(one.blocks[0].mlp.down.weight.std() - 0.02 / 6**0.5) < 2e-3
    assert (one.norm.weight == 1).all() and not hf_io.init_random(
        tiny("gemma").config, seed=1
    ).norm.weight.any()
    assert all(
        bool(p.isfinite().all()) for p in hf_io.init_random(tiny("opt").config, seed=1).parameters()
    )


def test_shapes_take_no_memory_and_no_random_numbers() -> None:
    state = torch.get_rng_state()
    shapes = hf_io.compute_parameter_shapes(tiny().config, "score")
    assert shapes["score.weight"] == (1, 32) and "head.weight" not in shapes
    assert torch.equal(torch.get_rng_state(), state)


def test_shapes_of_a_configuration_with_a_list() -> None:
    """A user's family may give its windows so; equal configurations share their shapes."""
    config = tiny().config
    listed = replace(config, windows=[8] * config.num_layers)
    assert hf_io.compute_parameter_shapes(listed) == hf_io.compute_parameter_shapes(config)
    assert hf_io.compute_parameter_shapes(replace(listed)) is hf_io.compute_parameter_shapes(listed)


# -- errors


def test_directories_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a directory"):
        hf_io.read_config(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"has no config.json"):
        hf_io.read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        hf_io.read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="no JSON object"):
        hf_io.read_config(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="model_type"):
        hf_io.read_config(tmp_path)


def test_directories_without_weights(tmp_path: Path) -> None:
    write(tmp_path, tiny(), shard_bytes=20_000)
    next(iter(tmp_path.glob("model-00002*"))).unlink()
    with pytest.raises(CheckpointError, match=r"model-00002.*is missing"):
        hf_io.load(tmp_path)
    for file in tmp_path.glob("model*"):
        file.unlink()
    with pytest.raises(CheckpointError, match="holds no weights"):
        hf_io.load(tmp_path)


@pytest.mark.parametrize("kept", [0, 5, 40, 2000, -1])
def test_truncated_files_are_named(kept: int, tmp_path: Path) -> None:
    write(tmp_path, tiny())
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model.safetensors is"):
        hf_io.load(tmp_path)


def test_names_and_shapes_that_do_not_fit(tmp_path: Path) -> None:
    network = tiny()
    write(tmp_path, network)
    change_weights(tmp_path, **{"model.layers.0.surprise.weight": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"holds model.layers.0.surprise.weight"):
        hf_io.load(tmp_path)
    write(tmp_path, network)
    change_weights(tmp_path, **{"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(CheckpointError, match=r"lacks model.layers.1.mlp.up_proj.weight"):
        hf_io.load(tmp_path)
    write(tmp_path, network)
    change(tmp_path, num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=r"model.layers.2.*and 1 more, which"):
        hf_io.load(tmp_path)
    write(tmp_path, network)
    change(tmp_path, intermediate_size=48)
    with pytest.raises(CheckpointError, match=r"\(56, 32\), config.json asks for \(48, 32\)"):
        hf_io.load(tmp_path)
    write(tmp_path, network)
    change(tmp_path, vocab_size=...)
    with pytest.raises(CheckpointError, match="lacks 'vocab_size'"):
        hf_io.load(tmp_path)


def test_unknown_parameters_name_the_nearest(tmp_path: Path) -> None:
    reader = hf_io.ParameterReader(write(tmp_path, tiny()))
    with pytest.raises(CheckpointError, match=r"blocks.0.attention.q.weight"):
        reader.read("blocks.0.attention.w_q.weight")


def test_a_vocabulary_smaller_than_the_tokenizer() -> None:
    config = tiny().config
    hf_io.check_vocabulary(config, 131, "model", "tokenizer")
    with pytest.raises(CheckpointError, match=r"vocabulary of 131.*one of 140"):
        hf_io.check_vocabulary(config, 140, "model", "tokenizer")


def test_a_write_that_fails_leaves_no_file_that_looks_whole(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(RunError, match="File too large"):
            write(tmp_path, tiny())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_says_what_it_is(tmp_path: Path) -> None:
    network = tiny()
    network.config = hf_io.with_ids(network.config, eos_token_id=7, pad_token_id=None)
    write(tmp_path, network)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["architectures"] == ["LlamaForCausalLM"] and values["eos_token_id"] == 7
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": 7,
    }
    assert all(
        file.stat().st_mode & 0o777 == (tmp_path / "config.json").stat().st_mode & 0o777
        for file in tmp_path.iterdir()
    )
    assert not list(tmp_path.glob(".*"))


def edited(directory: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Change the header of the weight file in a directory, and return the directory."""
    file = directory / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    return directory


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda h: h[NORM].update(dtype="I32"), "norm.weight is int32, and weights are floats"),
        (lambda h: h[NORM].update(dtype="Q4"), "norm.weight is Q4"),
        (lambda h: h[NORM].update(shape=[8]), "takes 32 bytes, and the header gives it 128"),
        (lambda h: h[NORM].update(shape=[-1]), "the header is damaged"),
        (lambda h: h[NORM].update(data_offsets=[4, 2]), "the header is damaged"),
        (lambda h: h[NORM].update(data_offsets="x"), "the header is damaged"),
        (lambda h: h.update({NORM: 3}), "norm.weight is None"),
        (lambda h: h[NORM].update(data_offsets=[0, 128]), "lie in the same bytes"),
        (lambda h: h[NORM].update(data_offsets=[10**9, 10**9 + 128]), "is truncated"),
    ],
)
def test_headers_whose_parts_do_not_fit_are_refused(
    change: Callable[[Any], None], said: str, tmp_path: Path
) -> None:
    write(tmp_path, tiny())
    with pytest.raises(CheckpointError, match=said):
        hf_io.load(edited(tmp_path, change))


@pytest.mark.parametrize(
    "places", [{}, [], {NORM: 3}, {NORM: "../x.safetensors"}, {NORM: "/etc/passwd"}, {NORM: ""}]
)
def test_an_index_names_files_in_its_folder(places: Any, tmp_path: Path) -> None:
    write(tmp_path, tiny())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(CheckpointError, match=r"index.json"):
        hf_io.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers=1000000000: it must be a whole number, 1 to 16,384",
        ),
        ({"num_hidden_layers": 9000}, "says 9,000 layers, and the files hold"),
        ({"hidden_size": "x"}, "hidden_size='x': it must be a whole number"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"num_key_value_heads": 3}, "do not divide evenly among 3"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan: it must be a finite number"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": "x"}},
            "factor='x' in its rotary settings",
        ),
        ({"rope_scaling": "x"}, "rope_scaling='x': it must be an object"),
        ({"model_type": 3}, "model_type=3: it must be a text"),
        ({"hidden_size": 2**30, "vocab_size": 2**30}, "are treated as a mistake"),
    ],
)
def test_sizes_that_no_machine_has_are_refused_before_anything_is_made(
    changes: Any, said: str, tmp_path: Path
) -> None:
    write(tmp_path, tiny())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError, match=said):
        hf_io.load(tmp_path)
