"""Models for training: converted from streams once, under names that depend only on contents."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import sentencepiece

from tests.compat.easylm.common import TINY, arrays_of, write_stream
from tests.compat.easylm.test_checkpoints import TALK, load, train_sentencepiece
from tests.tiny import make_tokenizer
from weft.checkpoints import hf_io
from weft.compat.easylm.prepared_models import locate_model, prepare_model
from weft.data.spec import TokenizerSpec
from weft.data.tokenizer import Tokenizer
from weft.errors import CheckpointError, UserError
from weft.storage.copies import CACHE_VARIABLE, restore_urls


def prepare(
    tmp_path: Path, text: str, *, call: Callable[..., Path] = prepare_model, **more: Any
) -> Path:
    size = {
        key: getattr(TINY, key)
        for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    }
    return call(
        text, "debug", repr(size | {"num_key_value_heads": 2}), None, tmp_path / "models", **more
    )


def test_a_prepared_model_is_used_again(tmp_path: Path) -> None:
    path = write_stream(tmp_path / "out/streaming_params_20384", arrays_of(TINY))
    planned = prepare(tmp_path, f"params::{path}", call=locate_model)
    assert not planned.exists()
    first = prepare(tmp_path, f"params::{path}")
    assert first == planned
    assert first.parent == tmp_path / "models" and first.name.startswith("streaming_params_20384@")
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert prepare(tmp_path, f"params::{path.parent}") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    settings = json.loads((first / "easylm.json").read_text())
    assert settings["load_checkpoint"] == f"params::{path}" and settings["head"] == "lm"
    # another time, other contents, or other settings
    os.utime(path, ns=(0, 0))
    assert prepare(tmp_path, f"params::{path}") == first
    write_stream(path, arrays_of(TINY, seed=1))
    second = prepare(tmp_path, f"params::{path}")
    third = prepare_model(
        f"params::{path}",
        "debug",
        "{'vocab_size': 96, 'hidden_size': 32, 'intermediate_size': 56, 'rope_theta': 9}",
        None,
        tmp_path / "models",
    )
    assert len({first, second, third}) == 3
    assert hf_io.read_config(third)[1].rope.theta == 9  # type: ignore[union-attr]
    assert not list((tmp_path / "models").glob(".*"))


def test_a_name_depends_on_contents_and_not_on_places_and_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the same on two machines with different home folders and caches."""
    make_tokenizer(tmp_path / "tokenizer", chat=False)
    arrays = arrays_of(TINY)
    path = write_stream(tmp_path / "streaming_params", arrays)
    store = fsspec.filesystem("memory").store
    store.clear()

    def locate(checkpoint: str, tokenizer: Path) -> str:
        size = "{'vocab_size': 96, 'hidden_size': 32}"
        return locate_model(checkpoint, "debug", size, str(tokenizer), tmp_path / "models").name

    first = locate(f"params::{path}", tmp_path / "tokenizer")
    shutil.copytree(tmp_path / "tokenizer", tmp_path / "again")
    os.utime(tmp_path / "again" / "tokenizer.json", ns=(0, 0))
    assert locate(f"params::{path}", tmp_path / "again") == first
    for home in ("a", "b"):
        monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / home))
        fsspec.filesystem("memory").pipe("/bk/streaming_params", path.read_bytes())
        assert locate("params::memory://bk", tmp_path / "tokenizer") == first
    assert restore_urls(f"{tmp_path}/converted/{first}") == f"converted/{first}"
    # other contents, even if only one weight in the middle differs
    with (tmp_path / "again" / "tokenizer.json").open("a") as file:
        file.write(" ")
    assert locate(f"params::{path}", tmp_path / "again") != first
    for name in arrays:
        changed = {key: array.copy() for key, array in arrays.items()}
        changed[name][len(changed[name]) // 2] += 1
        write_stream(path, changed)
        assert locate(f"params::{path}", tmp_path / "tokenizer") != first, name


def test_a_sentencepiece_file_and_its_folder_have_two_names(tmp_path: Path) -> None:
    """The file adds BOS to texts, but the folder may not."""
    tokenizer = Path(train_sentencepiece(tmp_path))
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(tokenizer, folder / tokenizer.name)
    names = {locate_model("", "debug", "", str(each), tmp_path) for each in (tokenizer, folder)}
    assert len(names) == 2


def test_a_plan_needs_no_weights(tmp_path: Path) -> None:
    path = write_stream(tmp_path / "streaming_params", arrays_of(TINY))
    whole = prepare(tmp_path, f"params::{path}")
    planned = prepare(tmp_path / "plan", f"params::{path}", weights=False)
    assert planned.name == whole.name and planned.parent != whole.parent
    assert (planned / "model.safetensors").stat().st_size == 0
    assert (planned / "config.json").read_bytes() == (whole / "config.json").read_bytes()
    stream = path.read_bytes()
    path.write_bytes(stream[:-9])
    with pytest.raises(CheckpointError, match="streaming_params"):
        prepare(tmp_path / "cut", f"params::{path}", weights=False)
    write_stream(path, arrays_of(TINY, "score"))
    with pytest.raises(CheckpointError, match="has score/kernel"):
        prepare(tmp_path / "cut", f"params::{path}", weights=False)
    assert not (tmp_path / "cut").exists()


def test_a_critic_is_prepared_from_its_own_file(tmp_path: Path) -> None:
    write_stream(tmp_path / "out/streaming_params_5", arrays_of(TINY))
    write_stream(tmp_path / "out/value_streaming_params_5", arrays_of(TINY, "score"))
    folder = prepare(tmp_path, f"params::{tmp_path / 'out'}", is_reward_model=True)
    assert folder.name.startswith("value_streaming_params_5@")
    assert load(folder, "value").score.weight.shape == (1, 32)


def test_without_a_checkpoint_only_the_configuration_is_prepared(tmp_path: Path) -> None:
    tokenizer = train_sentencepiece(tmp_path)
    folder = prepare_model("", "debug", "", tokenizer, tmp_path / "models")
    assert prepare_model("", "debug", "", tokenizer, tmp_path / "models") == folder
    assert not list(folder.glob("*.safetensors"))
    _, config = hf_io.read_config(folder)
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (128, 2, 32000)
    assert Tokenizer.load(TokenizerSpec(), str(folder)).eos_id == 2


def test_a_train_state_says_that_the_optimizer_starts_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "streaming_train_state_5"
    write_stream(path, arrays_of(TINY), ("params", "params"))
    prepare(tmp_path, f"trainstate::{path}")
    assert "its optimizer state is not used" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "config", "update", "message"),
    [
        ("params::X/none", "7b", "", "there is no such file"),
        ("params::X/streaming_params", "7b", "", "the file has vocab_size=96"),
        ("", "7c", "", "load_llama_config=7c"),
        ("", "7b", "{'resid_pdrop': 0.1}", "no such dropout"),
    ],
)
def test_what_cannot_be_prepared_is_refused(
    tmp_path: Path, text: str, config: str, update: str, message: str
) -> None:
    write_stream(tmp_path / "streaming_params", arrays_of(TINY))
    with pytest.raises(UserError, match=message):
        prepare_model(text.replace("X", str(tmp_path)), config, update, None, tmp_path / "models")
    assert not list((tmp_path / "models").glob("*"))


def test_a_real_tokenizer_of_llama_2_is_copied(data_dir: Path, tmp_path: Path) -> None:
    path = str(data_dir / "tokenizers/llama2/tokenizer.model")
    folder = prepare_model("", "debug", "", path, tmp_path / "models")
    tokenizer = Tokenizer.load(TokenizerSpec(), str(folder))
    processor = sentencepiece.SentencePieceProcessor(path)
    text = "Hello world, 1234 Ω\n  def f(x):"
    assert tokenizer.encode(text) == [1, *processor.encode(text)]
    assert tokenizer.vocab_size == 32000 and tokenizer.list_stop_ids() == [2]
    conversation = tokenizer.mask_chat(TALK[:2])
    ids, mask = conversation.ids, conversation.mask
    assert ids[0] == 1 and ids[-1] == 2 and tokenizer.decode(ids[mask.index(True) :]) == "Yes</s>"
