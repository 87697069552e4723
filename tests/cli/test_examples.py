"""`weft examples write`: the files are of the forms that they are for, and nothing of the user's is
touched.
"""

from __future__ import annotations

import shlex

import pytest

from weft.cli.examples import DESCRIPTIONS, build_files, main
from weft.cli.quickstart import build_config
from weft.data.counts import render_table
from weft.data.loader import load_data
from weft.data.spec import DatasetSpec, TokenizerSpec
from weft.data.tokenizer import Tokenizer
from weft.errors import ConfigError


def test_the_listed_files_are_written_and_the_command_is_valid(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["write", "data"]) == 0
    out = capsys.readouterr().out
    assert {path.name for path in (tmp_path / "data").iterdir()} == set(DESCRIPTIONS) and all(
        name in out for name in DESCRIPTIONS
    )
    words = shlex.split(out.splitlines()[-1])
    assert words[:3] == ["weft", "quickstart", "sft"]
    config, notes = build_config(words[2:])
    assert config.model.path == "data/model" and not notes
    assert main(["ls"]) == 0 and "sft.jsonl" in capsys.readouterr().out


def test_twice_is_fine_and_nothing_else_is_overwritten(tmp_path, capsys):
    folder = tmp_path / "data"
    main(["write", str(folder)])
    (folder / "mine.txt").write_text("mine")
    (folder / "pairs.jsonl").unlink()
    assert main(["write", str(folder)]) == 0
    assert (folder / "pairs.jsonl").read_bytes() == build_files()["pairs.jsonl"]
    (folder / "sft.jsonl").write_text("mine\n")
    (folder / "pairs.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"would overwrite \(sft.jsonl\)"):
        main(["write", str(folder)])
    assert (folder / "sft.jsonl").read_text() == "mine\n" and not (folder / "pairs.jsonl").exists()
    with pytest.raises(ConfigError, match="is a file"):
        main(["write", str(folder / "mine.txt")])


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("sft.jsonl", "prompt_answer"),
        ("chat.jsonl", "chat"),
        ("pairs.jsonl", "preference"),
        ("prompts.jsonl", "prompt"),
    ],
)
def test_rows_are_of_their_form_and_fit_the_model(file, kind, tmp_path):
    main(["write", str(tmp_path)])
    tokenizer = Tokenizer.load(TokenizerSpec(), str(tmp_path / "model"))
    spec = DatasetSpec(
        train_path=str(tmp_path / file), train_bs_n_seqs=8, cache_dir=str(tmp_path / "cache")
    )
    data = load_data(spec, kind, tokenizer, seed=1, progress=False)
    assert 0 < data.max_seqlen < 20, render_table(data.counts)
    unknown = tokenizer.encode("?")[0]
    assert not any(unknown in tokenizer.encode(str(row)) for row in ["1+2=3", "9+9=18"])


def test_the_model_is_one_that_transformers_loads(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    main(["write", str(tmp_path)])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    talk = [{"role": "user", "content": "4 + 7"}]
    assert tokenizer.apply_chat_template(talk, tokenize=False) == "4+7="
    assert tokenizer.decode(tokenizer("4+7=")["input_ids"]) == "4+7="
    assert 3e5 < sum(p.numel() for p in model.parameters()) < 5e5


def test_the_bytes_are_the_same_every_time():
    import hashlib

    assert build_files() == build_files()
    assert (
        hashlib.sha256(build_files()["model/model.safetensors"])
        .hexdigest()
        .startswith("e32bda4488be")
    )
