"""Export to GGUF. A script stands in for llama.cpp's converter, which no package registry has: it
writes Llamas as that one does, or wrongly if the variable BREAK says so.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.tiny import make_llama
from weft.checkpoints import gguf as export
from weft.cli.main import main
from weft.errors import CheckpointError, ConfigError

CONVERTER = """
import json, os, sys
import gguf
import numpy as np
from safetensors.numpy import load_file

model, target = sys.argv[1], sys.argv[sys.argv.index("--outfile") + 1]
assert os.environ["HF_HUB_OFFLINE"] == "1"
wrong = os.environ.get("BREAK")
if wrong == "exit":
    sys.exit("I do not know this tokenizer")
config = json.load(open(model + "/config.json"))
heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
writer = gguf.GGUFWriter(target, "llama")
writer.add_name(sys.argv[sys.argv.index("--model-name") + 1])
writer.add_block_count(layers)
writer.add_context_length(config["max_position_embeddings"])
writer.add_embedding_length(config["hidden_size"])
writer.add_feed_forward_length(config["intermediate_size"])
writer.add_head_count(heads)
writer.add_head_count_kv(config["num_key_value_heads"])
writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
writer.add_vocab_size(config["vocab_size"])
tokens = json.load(open(model + "/tokenizer.json"))["model"]["vocab"]
known = sorted(tokens, key=tokens.get)
count = config["vocab_size"] - (wrong == "tokens")
writer.add_tokenizer_model("gpt2")
writer.add_token_list((known + [f"[PAD{n}]" for n in range(len(known), count)])[:count])
names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
for name, value in load_file(model + "/model.safetensors").items():
    if wrong == "tensors" and ".1." in name:
        continue
    for kind, rows in (("q_proj", heads), ("k_proj", config["num_key_value_heads"])):
        if kind in name and wrong != "values":
            halves = value.reshape(rows, 2, value.shape[0] // rows // 2, value.shape[1])
            value = halves.swapaxes(1, 2).reshape(value.shape)
    writer.add_tensor(
        names.get_name(name, try_suffixes=(".weight",)), np.ascontiguousarray(value)
    )
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("gguf")
    return make_llama(tmp_path_factory.mktemp("gguf") / "model", num_hidden_layers=2)


@pytest.fixture
def converter(tmp_path: Path) -> Path:
    (tmp_path / "llama.cpp").mkdir()
    script = tmp_path / "llama.cpp" / export.SCRIPT
    script.write_text(CONVERTER)
    return script


def test_the_message_for_a_missing_converter_lists_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["convert", "gguf", "runs/e/t", "--output", f"{tmp_path}/m.gguf"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0].endswith("llama.cpp's converter, which is not installed; run")
    assert "pip install" in said[1] and "[gguf]" in said[1]
    assert said[2] == "  git clone --depth 1 https://github.com/ggml-org/llama.cpp"
    assert said[3] == (
        f"  weft convert gguf runs/e/t --output {tmp_path}/m.gguf --converter llama.cpp"
    )
    assert list(tmp_path.iterdir()) == []


def test_the_converter_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert export.find_converter(None) is None
    script = tmp_path / export.SCRIPT
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    assert export.find_converter(None) == export.find_converter(tmp_path) == script
    assert export.find_converter(script) == script
    with pytest.raises(ConfigError, match=r"there is no convert_hf_to_gguf\.py"):
        export.find_converter(tmp_path / "other")


def test_models_that_give_scores_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForSequenceClassification"]})
    )
    with pytest.raises(CheckpointError, match="is not a language model in Hugging Face's format"):
        export.export(tmp_path, tmp_path / "m.gguf", tmp_path / "c.py", "f32", check=False)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("exit", r"converter failed: I do not know this tokenizer"),
        ("tokens", r"the GGUF file has 319 tokens, and the model 320"),
        ("tensors", r"the GGUF file has [\d,]+ parameters, and the model [\d,]+"),
    ],
)
def test_a_bad_file_is_not_kept(
    model: Path,
    converter: Path,
    tmp_path: Path,
    wrong: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BREAK", wrong)
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(CheckpointError, match=message):
        export.export(model, out / "m.gguf", converter, "f32", check=False)
    assert list(out.iterdir()) == []


def test_a_file_is_written(
    model: Path, converter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "m.gguf"
    words = ["convert", "gguf", str(model), "--output", str(out), "--dtype", "f32", "--no-check"]
    assert main([*words, "--converter", str(converter.parent)]) == 0
    said = capsys.readouterr().out
    assert "21 tensors (F32), " in said and ", 320 tokens\n" in said and f"wrote {out}" in said
    assert out.read_bytes()[:4] == b"GGUF"
    assert main([*words, "--converter", str(converter.parent)]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err


@pytest.mark.slow
def test_the_file_is_loaded_and_compared(
    model: Path, converter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "llama_cpp" else find_spec(name)
    )
    lines = export.export(model, tmp_path / "m.gguf", converter, "f32", check=True)
    assert lines[1].startswith("loaded with transformers: log-probabilities of ")
    monkeypatch.setenv("BREAK", "values")
    with pytest.raises(CheckpointError, match=r"self_attn.._proj.weight differs in the GGUF"):
        export.export(model, tmp_path / "bad.gguf", converter, "f32", check=True)
    assert not (tmp_path / "bad.gguf").exists()
