"""Meta's releases: one file and several, split as Meta splits them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.compat.easylm.common import TINY, Arrays, arrays_of, encode_stream
from weft.compat.easylm.meta_files import write_from_meta
from weft.errors import CheckpointError

NAMES = {
    "attention/wq": "attention.wq",
    "attention/wk": "attention.wk",
    "attention/wv": "attention.wv",
    "attention/wo": "attention.wo",
    "feed_forward/w1": "feed_forward.w1",
    "feed_forward/w2": "feed_forward.w2",
    "feed_forward/w3": "feed_forward.w3",
    "attention_norm": "attention_norm",
    "ffn_norm": "ffn_norm",
}


def to_meta(arrays: Arrays) -> dict[str, torch.Tensor]:
    """Return EasyLM's weights under Meta's names, as (out, in)."""
    tensors = {}
    for name, array in arrays.items():
        parts = name.split("/")
        if name == "transformer/wte/embedding":
            meta, value = "tok_embeddings.weight", array
        elif parts[0] == "lm_head":
            meta, value = "output.weight", array.T
        elif parts[1] == "ln_f":
            meta, value = "norm.weight", array
        else:
            meta = f"layers.{parts[2]}.{NAMES['/'.join(parts[3:-1])]}.weight"
            value = array.T
        tensors[meta] = torch.from_numpy(value.astype(np.float32).copy()).bfloat16()
    return tensors


def write_release(folder: Path, arrays: Arrays, shards: int, *, by_words: bool = False) -> None:
    folder.mkdir()
    parts: list[dict[str, Any]] = [{"rope.freqs": torch.ones(4)} for _ in range(shards)]
    for name, tensor in to_meta(arrays).items():
        if tensor.dim() == 1:
            pieces = [tensor] * shards
        elif name == "tok_embeddings.weight":
            pieces = list(tensor.chunk(shards, 0 if by_words else 1))
        else:
            pieces = list(tensor.chunk(shards, 1 if ".wo." in name or ".w2." in name else 0))
        for part, piece in zip(parts, pieces, strict=True):
            part[name] = piece.clone()
    for index, part in enumerate(parts):
        torch.save(part, folder / f"consolidated.{index:02}.pth")
    params = {
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "use_scaled_rope": True,
        "vocab_size": -1,
        "multiple_of": 256,
    }
    (folder / "params.json").write_text(json.dumps(params))


@pytest.mark.parametrize(("shards", "by_words"), [(1, False), (2, False), (2, True), (4, False)])
def test_a_release_becomes_a_stream(tmp_path: Path, shards: int, by_words: bool) -> None:
    """The rows of q and k stay in order; EasyLM's own converter joins the columns of a divided
    embedding as if they were rows.
    """
    arrays = arrays_of(TINY)
    write_release(tmp_path / "release", arrays, shards, by_words=by_words)
    config = write_from_meta(tmp_path / "release", tmp_path / "weights")
    assert (tmp_path / "weights").read_bytes() == encode_stream(arrays)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (96, 32, 56)
    assert (config.num_hidden_layers, config.num_attention_heads, config.kv_heads) == (2, 4, 2)
    assert (config.rms_norm_eps, config.rope_theta) == (1e-5, 500000.0)
    assert config.use_scaled_rope and not config.tie_word_embeddings


def damage(folder: Path, what: str) -> None:
    last = folder / "consolidated.01.pth"
    tensors = torch.load(last)
    if what == "first":
        (folder / "consolidated.00.pth").unlink()
    elif what == "all":
        for file in folder.glob("*.pth"):
            file.unlink()
    elif what == "params":
        (folder / "params.json").unlink()
    elif what == "cut":
        last.write_bytes(last.read_bytes()[:-5000])
    elif what == "shape":
        tensors["layers.1.attention.wv.weight"] = torch.zeros(9, 32, dtype=torch.bfloat16)
    elif what == "dtype":
        tensors["norm.weight"] = torch.zeros(32)
    elif what == "lacks":
        del tensors["layers.0.attention.wq.weight"]
    elif what == "gate":
        del tensors["layers.0.feed_forward.w1.weight"]
    elif what == "code":
        tensors["norm.weight"] = Path("evaluated")
    elif what == "heads":
        params = json.loads((folder / "params.json").read_text()) | {"n_heads": "4"}
        (folder / "params.json").write_text(json.dumps(params))
    if what in ("shape", "dtype", "lacks", "gate", "code"):
        torch.save(tensors, last)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("first", r"consolidated\.00\.pth is missing"),
        ("all", r"has no consolidated\.00\.pth"),
        ("params", r"params\.json: there is no such file"),
        ("cut", r"consolidated\.01\.pth cannot be read"),
        ("shape", r"wv\.weight has the shapes \(8, 32\), \(9, 32\)"),
        ("dtype", r"norm\.weight has several dtypes"),
        ("lacks", r"consolidated\.01\.pth lacks layers\.0\.attention\.wq"),
        ("gate", r"w1\.weight is missing"),
        ("code", r"holds more than tensors and is not loaded"),
        ("heads", r"params\.json: num_attention_heads='4': must be of type int"),
    ],
)
def test_incomplete_releases_are_refused(tmp_path: Path, what: str, message: str) -> None:
    write_release(tmp_path / "release", arrays_of(TINY), 2)
    damage(tmp_path / "release", what)
    with pytest.raises(CheckpointError, match=message):
        write_from_meta(tmp_path / "release", tmp_path / "weights")
    assert not (tmp_path / "weights").exists()
