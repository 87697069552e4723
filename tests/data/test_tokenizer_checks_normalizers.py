"""Tokenizers whose normalizer or decoder can make texts grow without bound are refused.

Known normalizers and decoders are accepted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers

from tests.tiny import make_tokenizer
from weft.data import tokenizer_files
from weft.data.tokenizer_checks import MAX_GROWTH, check_growth, compute_growth
from weft.errors import UserError

DOUBLE = normalizers.Replace(" ", "  ")
BOMBS = {
    "spaces": normalizers.Sequence([DOUBLE] * 40),
    "nested": normalizers.Sequence([normalizers.Sequence([DOUBLE] * 5)] * 8),
    "one long replacement": normalizers.Replace("a", "b" * 200),
    "an empty match": normalizers.Replace(Regex("x*"), "y" * 120),
    "a rule": normalizers.Sequence([normalizers.Replace(Regex(r"\p{L}"), "aaaa")] * 6),
    "bytes": normalizers.Sequence([normalizers.ByteLevel()] * 10),
    "a beginning": normalizers.Prepend("x" * 2000),
}
HARMLESS = {
    "llama": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    "t5": normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), "▁")]),
    "xlnet": normalizers.Sequence(
        [normalizers.Replace("``", '"'), normalizers.NFKD(), normalizers.StripAccents()] * 4
    ),
    "bert": normalizers.BertNormalizer(),
}


def state(part: Any) -> Any:
    return json.loads(part.__getstate__())


@pytest.mark.parametrize("name", BOMBS)
def test_a_normalizer_that_makes_texts_explode_is_refused_before_it_is_loaded(
    tmp_path: Path, name: str
) -> None:
    make_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    values = json.loads(file.read_text()) | {"normalizer": state(BOMBS[name])}
    file.write_text(json.dumps(values))
    for path in (tmp_path, file):
        with pytest.raises(
            UserError, match=r"its normalizer makes a text up to \S+ times longer, and at most 100"
        ):
            tokenizer_files.read_tokenizer(str(path), False)


def test_a_decoder_is_looked_at_too(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.Sequence([decoders.Replace("a", "aaa")] * 20)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"its decoder makes a text up to 3.49e[+]09 times longer"):
        check_growth(tmp_path / "tokenizer.json", "MODEL")


@pytest.mark.parametrize("name", HARMLESS)
def test_known_normalizers_are_taken(name: str) -> None:
    assert compute_growth(state(HARMLESS[name])) <= MAX_GROWTH


def test_a_word_of_the_vocabulary_is_no_normalizer(tmp_path: Path) -> None:
    text = json.dumps(
        {
            "normalizer": None,
            "model": {"vocab": {"normalizer": 1, '"normalizer":{': 2}, "decoder": []},
        }
    )
    (tmp_path / "tokenizer.json").write_text(text)
    check_growth(tmp_path / "tokenizer.json", "MODEL")


def test_real_tokenizers_are_taken(data_dir: Path) -> None:
    found = list((data_dir / "tokenizers").rglob("tokenizer.json"))
    for file in found:
        check_growth(file, str(file))
