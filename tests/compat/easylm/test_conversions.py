"""EasyLM's commands for weight files, by their flags."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.compat.easylm.common import (
    BF16,
    TINY,
    arrays_of,
    decode_stream,
    encode_stream,
    encode_tree,
    write_stream,
)
from tests.compat.easylm.test_meta_files import write_release
from tests.tiny import make_tokenizer
from weft.compat.easylm.conversions import COMMANDS
from weft.errors import CheckpointError, ConfigError


def run(name: str, *argv: str) -> int:
    return COMMANDS[name](list(argv))


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """A folder of EasyLM's output, a tokenizer, and the model's configuration as JSON."""
    config = asdict(TINY) | {"vocab_size": 320}
    (tmp_path / "config.json").write_text(json.dumps(config))
    size = type(TINY)(**config)
    write_stream(tmp_path / "out/streaming_params_10", arrays_of(size, seed=1))
    write_stream(tmp_path / "out/streaming_params_200", arrays_of(size, seed=2))
    write_stream(tmp_path / "out/value_streaming_params_200", arrays_of(size, "score", seed=3))
    (tmp_path / "tokenizer").mkdir()
    make_tokenizer(tmp_path / "tokenizer")
    return tmp_path


def export(places: Path, *more: str) -> int:
    return run(
        "convert_easylm_to_hf",
        f"--load_checkpoint=params::{places / 'out'}",
        "--tokenizer_path",
        str(places / "tokenizer"),
        f"--model_size=json::{places / 'config.json'}",
        f"--output_dir={places / 'hf'}",
        *more,
    )


def test_a_folder_is_exported_and_returns(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(places, "--is_reward_model=False", "--float_dtype=") == 0
    said = capsys.readouterr().out
    assert "streaming_params_200" in said and f"wrote {places / 'hf'}" in said
    assert (
        run(
            "convert_hf_to_easylm",
            "--checkpoint_dir",
            str(places / "hf"),
            "--output_file",
            str(places / "back"),
            f"--model_size=json::{places / 'config.json'}",
            "--streaming",
            "--use_safetensors",
        )
        == 0
    )
    said = capsys.readouterr().out
    assert f"--load_checkpoint=params::{places / 'back'} --load_llama_config=" in said
    assert (places / "back").read_bytes() == (places / "out/streaming_params_200").read_bytes()
    with pytest.raises(ConfigError, match="exists already; nothing is overwritten"):
        export(places)


def test_a_critic_is_exported(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(places, "--is_reward_model") == 0
    assert "value_streaming_params_200" in capsys.readouterr().out
    values = json.loads((places / "hf/config.json").read_text())
    assert values["architectures"] == ["LlamaForSequenceClassification"]


def test_a_standard_size_is_changed_by_a_flag(places: Path) -> None:
    changes = json.loads((places / "config.json").read_text())
    update = {key: changes[key] for key in ("vocab_size", "hidden_size", "intermediate_size")}
    assert export(places, "--model_size", "debug", f"--update_llama_config={update}") == 0
    assert json.loads((places / "hf/config.json").read_text())["hidden_size"] == 32


def test_a_release_of_meta_is_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_release(tmp_path / "release", arrays_of(TINY), 2)
    folder = f"--checkpoint_dir={tmp_path / 'release'}"
    for streaming, encode in (("True", encode_stream), ("False", encode_tree)):
        output = tmp_path / streaming
        flags = (folder, f"--output_file={output}", f"--streaming={streaming}")
        assert run("convert_torch_to_easylm", *flags) == 0
        assert output.read_bytes() == encode(arrays_of(TINY))
    assert f"--load_checkpoint=flax_params::{tmp_path / 'False'}" in capsys.readouterr().out


def test_a_checkpoint_is_written_in_another_form(places: Path) -> None:
    source = f"--load_checkpoint=params::{places / 'out/streaming_params_10'}"
    assert run("convert_checkpoint", source, f"--output_file={places / 'flax'}") == 0
    arrays = decode_stream(places / "out/streaming_params_10")
    assert (places / "flax").read_bytes() == encode_tree(arrays)
    source = f"--load_checkpoint=flax_params::{places / 'flax'}"
    flags = (source, "--streaming=True", "--float_dtype=fp32", f"--output_file={places / 'wide'}")
    assert run("convert_checkpoint", *flags) == 0
    for name, array in decode_stream(places / "wide").items():
        assert array.dtype == np.float32 and np.array_equal(array, arrays[name].astype(np.float32))


def test_a_difference_is_recovered(places: Path) -> None:
    base = f"--load_base_checkpoint=params::{places / 'out/streaming_params_10'}"
    target = f"--load_target_checkpoint=params::{places / 'out/streaming_params_200'}"
    diff = places / "diff"
    flags = (base, target, f"--output_file={diff}", "--float_dtype=fp32")
    assert run("diff_checkpoint", *flags) == 0
    target = f"--load_target_checkpoint=params::{diff}"
    flags = (base, target, "--recover_diff=True", f"--output_file={places / 'back'}")
    assert run("diff_checkpoint", *flags) == 0
    assert all(array.dtype == BF16 for array in decode_stream(places / "back").values())
    assert (places / "back").read_bytes() == (places / "out/streaming_params_200").read_bytes()


def damage(places: Path, how: str) -> Path:
    """Write a file that is valid msgpack, but not all of a model, and return its path."""
    arrays = decode_stream(places / "out/streaming_params_10")
    size = json.loads((places / "config.json").read_text())
    assert len(arrays) == 3 + 9 * size["num_hidden_layers"] == 21
    if how.startswith("the first"):
        arrays = dict(list(arrays.items())[: int(how.split()[-1])])
    elif how.startswith("without"):
        del arrays[how.split()[-1]]
    elif how == "a gap":
        arrays = {name.replace("/h/1/", "/h/2/"): array for name, array in arrays.items()}
    elif how == "another name":
        arrays["transformer/ln/kernel"] = arrays.pop("transformer/ln_f/kernel")
    else:
        arrays[how] = arrays["transformer/ln_f/kernel"]
    return write_stream(places / "damaged", arrays)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        *((f"the first {count}", "lacks transformer") for count in (1, 2, 9, 10, 11, 19, 20)),
        ("without transformer/wte/embedding", "lacks transformer/wte/embedding, unlike"),
        ("without lm_head/kernel", "set --tie_word_embeddings=True if the model has no head"),
        ("without transformer/h/0/ffn_norm/kernel", "lacks transformer/h/0/ffn_norm/kernel"),
        ("a gap", "lacks transformer/h/1/attention/wq/kernel"),
        ("another name", "lacks transformer/ln_f/kernel and has transformer/ln/kernel, unlike"),
        ("score/kernel", "has lm_head/kernel, unlike a LLaMA model with 2 layers; copy it"),
        ("transformer/h/999999999/x/kernel", "unlike a LLaMA model with 3 layers"),
        ("transformer/h/x", "has transformer/h/x"),
    ],
)
@pytest.mark.parametrize("command", ["convert_checkpoint", "diff_checkpoint"])
def test_files_without_all_weights_of_a_model_are_refused(
    places: Path, command: str, how: str, message: str
) -> None:
    source = f"params::{damage(places, how)}"
    flags = [f"--load_checkpoint={source}"]
    if command == "diff_checkpoint":
        flags = [f"--load_base_checkpoint={source}", f"--load_target_checkpoint={source}"]
    with pytest.raises(CheckpointError) as caught:
        run(command, *flags, f"--output_file={places / 'c'}")
    assert message in str(caught.value) and str(caught.value).startswith(f"{source}: ")
    assert not (places / "c").exists()


def test_whole_files_of_every_kind_are_copied(places: Path) -> None:
    """A critic, a train state, and a model without a head of its own."""
    size = type(TINY)(**json.loads((places / "config.json").read_text()))
    critic = places / "out/value_streaming_params_200"
    state = places / "streaming_train_state"
    state.write_bytes(
        encode_stream(arrays_of(size), ("params", "params"))
        + encode_stream({"step": np.asarray(7, dtype=np.int32)})
    )
    tied = write_stream(places / "tied", arrays_of(replace(size, tie_word_embeddings=True)))
    for number, (source, *more) in enumerate(
        (
            (f"params::{critic}",),
            (f"trainstate_params::{state}",),
            (f"params::{tied}", "--tie_word_embeddings"),
        )
    ):
        output = places / str(number)
        flags = (f"--load_checkpoint={source}", f"--output_file={output}", "--streaming", *more)
        assert run("convert_checkpoint", *flags) == 0
    assert (places / "0").read_bytes() == critic.read_bytes()
    assert decode_stream(places / "1").keys() == arrays_of(size).keys()
    assert (places / "2").read_bytes() == tied.read_bytes()
    flags = (
        f"--load_base_checkpoint=params::{tied}",
        f"--load_target_checkpoint=params::{tied}",
        f"--output_file={places / 'd'}",
    )
    assert run("diff_checkpoint", *flags, "--tie_word_embeddings") == 0
    source = f"--load_checkpoint=params::{places / 'out/streaming_params_10'}"
    with pytest.raises(CheckpointError, match=r"has lm_head/kernel.*leave out --tie_word"):
        run("convert_checkpoint", source, "--tie_word_embeddings", f"--output_file={places / 'e'}")


HF = "convert_easylm_to_hf --load_checkpoint=a --tokenizer_path=b"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("convert_easylm_to_hf --load_checkpont=a", "did you mean --load_checkpoint?"),
        ("convert_easylm_to_hf --zzz=a", "known: --load_checkpoint, --tokenizer_path"),
        ("convert_easylm_to_hf --load=a", "unknown flag --load=a"),
        ("convert_easylm_to_hf a", "unknown flag a; write --flag=value"),
        ("convert_easylm_to_hf", "--load_checkpoint is missing"),
        ("convert_easylm_to_hf --load_checkpoint=", "--load_checkpoint is missing"),
        ("convert_easylm_to_hf --load_checkpoint", "expected one argument"),
        (f"{HF} --output_dir=X/c", "load_checkpoint=a: there is no such file"),
        (f"{HF} --output_dir=X/c --model_size=7c", "model_size=7c: unknown size; known are 1b, 3b"),
        (f"{HF} --output_dir=X", "exists already"),
        (f"{HF} --output_dir=gs://b/c", "--output_dir=gs://b/c: is a URL"),
        (
            "convert_hf_to_easylm --checkpoint_dir=./a --output_file=X/c --streaming=maybe",
            "--streaming=maybe: must be True or False",
        ),
        (
            "convert_checkpoint --load_checkpoint=X/f --output_file=X/c --float_dtype=int8",
            "--float_dtype=int8: must be one of bf16",
        ),
        (
            "diff_checkpoint --load_base_checkpoint=par::a --load_target_checkpoint=b "
            "--output_file=X/c",
            "load_base_checkpoint=par::a: unknown prefix",
        ),
        ("diff_checkpoint --load_base_checkpoint=a", "--load_target_checkpoint is missing"),
        ("convert_torch_to_easylm --checkpoint_dir=a --output_file=X/c", "has no consolidated"),
    ],
)
def test_wrong_flags_are_refused(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "f").write_bytes(encode_stream(arrays_of(TINY)))
    name, *argv = line.replace("X", str(tmp_path)).split()
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        run(name, *argv)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert [each.name for each in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(name, "--help")
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: weft easylm {name}") and "(default: " in said


def test_pickled_directories_are_read_unless_safetensors_are_asked_for(places: Path) -> None:
    export(places)
    torch.save(load_file(places / "hf/model.safetensors"), places / "hf/pytorch_model.bin")
    (places / "hf/model.safetensors").unlink()
    flags = (f"--checkpoint_dir={places / 'hf'}", f"--output_file={places / 'back'}")
    with pytest.raises(CheckpointError, match="has no safetensors files"):
        run("convert_hf_to_easylm", *flags, "--use_safetensors")
    assert run("convert_hf_to_easylm", *flags) == 0
    assert (places / "back").read_bytes() == (places / "out/streaming_params_200").read_bytes()


def test_the_commands_are_imported_without_torch() -> None:
    code = "import sys, weft.compat.easylm.conversions; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
