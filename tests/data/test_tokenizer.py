"""Tokenizers: the original ids, overrides, one BOS, streaming, and saving."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sentencepiece
import templates
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from weft.data import spm
from weft.data.spec import TokenizerSpec
from weft.data.tokenizer import StreamDecoder, Tokenizer
from weft.errors import ConfigError, DataError, UserError

Make = Callable[..., Tokenizer]
unicode_texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)


def real_texts(data: Path) -> Iterator[str]:
    with gzip.open(data / "hh_rlhf/harmless-base_test.jsonl.gz", "rt") as file:
        yield from (json.loads(line)["chosen"] for line, _ in zip(file, range(400), strict=False))
    for line in (data / "oasst/oasst1_validation_guanaco.jsonl").read_text().splitlines()[:300]:
        yield json.loads(line)["text"]
    for line in (data / "llamafactory_pref/dpo_zh_500.jsonl").read_text().splitlines()[:100]:
        yield json.loads(line)["chosen"]


@pytest.fixture(scope="module")
def original(data_dir: Path) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(str(data_dir / "tokenizers/llama2/tokenizer.model"))


def test_sentencepiece_ids_on_real_text(
    data_dir: Path, llama2: Tokenizer, original: sentencepiece.SentencePieceProcessor
) -> None:
    for text in real_texts(data_dir):
        ids = original.encode(text)
        assert llama2.encode(text) == ids
        assert llama2.decode(ids) == original.decode(ids)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    unicode_texts.filter(
        lambda text: not any(special in text for special in ("<s>", "</s>", "<unk>"))
    )
)
@example("")
@example(" leading and  double ")
@example("\x00 🤗日 \u0e33\n\n")
def test_sentencepiece_ids_on_any_text(
    llama2: Tokenizer, original: sentencepiece.SentencePieceProcessor, text: str
) -> None:
    assert llama2.encode(text) == original.encode(text)


def test_sentencepiece_unigram_and_no_fallback(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(
        "\n".join(f"the quick brown fox {i} jumps  over the lazy dog" for i in range(200))
    )
    for kind in ("unigram", "bpe"):
        sentencepiece.SentencePieceTrainer.train(
            input=str(corpus),
            model_prefix=str(tmp_path / kind),
            model_type=kind,
            vocab_size=60,
            pad_id=3,
            minloglevel=2,
        )
        original = sentencepiece.SentencePieceProcessor(str(tmp_path / f"{kind}.model"))
        tokenizer = Tokenizer.load(TokenizerSpec(path=str(tmp_path / f"{kind}.model")))
        for text in ("the lazy  fox", " 1234 Ω brown", "ＦＯＸ jumps"):
            assert tokenizer.encode(text) == original.encode(text), (kind, text)
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 3)


def test_broken_sentencepiece_files_are_refused(data_dir: Path, tmp_path: Path) -> None:
    whole = (data_dir / "tokenizers/llama2/tokenizer.model").read_bytes()
    cut = tmp_path / "tokenizer.model"
    cut.write_bytes(whole[:1001])
    with pytest.raises(DataError, match="cut short"):
        spm.read_model(cut)
    with pytest.raises(DataError, match="cut short"):
        Tokenizer.load(TokenizerSpec(path=str(tmp_path)))


def test_a_directory_with_a_sentencepiece_file_keeps_its_config(
    data_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(
        (data_dir / "tokenizers/llama2/tokenizer.model").read_bytes()
    )
    config = json.loads((data_dir / "tokenizers/llama2/tokenizer_config_chat.json").read_text())
    config |= {
        "chat_template": templates.INST,
        "added_tokens_decoder": {"32000": {"content": "<pad>"}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "pad_token": "<pad>"}))
    tokenizer = Tokenizer.load(TokenizerSpec(path=str(tmp_path)))
    assert tokenizer.encode(" leading") == [1, 29871, 8236]  # Llama adds BOS by default
    assert (tokenizer.pad_id, tokenizer.vocab_size, tokenizer.chat_template) == (
        32000,
        32001,
        templates.INST,
    )


@pytest.mark.parametrize(
    ("path", "ids"),
    [
        ("gpt2/tokenizer.json", [15496, 995]),
        ("gpt2", [15496, 995]),
        ("gpt_neox_pythia/20B_tokenizer.json", [12092, 1533]),
        ("llama2", [1, 15043, 3186]),
        ("llama3", [9906, 1917]),
    ],
)
def test_known_ids(data_dir: Path, path: str, ids: list[int]) -> None:
    tokenizer = Tokenizer.load(TokenizerSpec(path=str(data_dir / "tokenizers" / path)))
    assert tokenizer.encode("Hello world") == ids
    assert tokenizer.decode(tokenizer.encode("Hello world", bos=False)) == "Hello world"


def test_overrides_must_be_in_the_vocabulary(data_dir: Path) -> None:
    path = str(data_dir / "tokenizers/gpt2")
    tokenizer = Tokenizer.load(
        TokenizerSpec(
            path=path, eos_token="<|endoftext|>", pad_token="!", bos_token="<|endoftext|>"
        )
    )
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (50256, 0, 50257)
    assert tokenizer.encode("Hi") == [17250]
    with pytest.raises(
        ConfigError, match=r"tokenizer\.eos_token='</s>' is not in the vocabulary of .*50257"
    ):
        Tokenizer.load(TokenizerSpec(path=path, eos_token="</s>"))
    with pytest.raises(ConfigError, match="add_bos_token=true, but"):
        Tokenizer.load(TokenizerSpec(path=path, add_bos_token=True))
    with pytest.raises(
        UserError, match=r"no end-of-sequence token.*tokenizer\.eos_token.*endoftext"
    ):
        Tokenizer.load(TokenizerSpec(path=path)).require_eos()


def test_never_two_bos(data_dir: Path) -> None:
    llama = Tokenizer.load(
        TokenizerSpec(path=str(data_dir / "tokenizers/llama2"), chat_template=templates.HEADERS)
    )
    assert llama.encode("<s>Hi").count(1) == 1
    assert llama.encode("Hi", bos=False).count(1) == 0
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    assert llama.encode_chat(talk).count(1) == 1
    spec = TokenizerSpec(
        path=str(data_dir / "tokenizers/llama2"),
        chat_template=templates.HEADERS,
        add_bos_token=True,
    )
    assert Tokenizer.load(spec).encode_chat(talk) == llama.encode_chat(talk)
    spec.chat_template = templates.CHATML
    forced = Tokenizer.load(spec)
    conversation = forced.mask_chat(talk)
    ids, mask = conversation.ids, conversation.mask
    assert ids[0] == 1 and not mask[0] and ids.count(1) == 1
    # the template ends with no token, so EOS does
    assert forced.encode_chat(talk)[: len(ids) - 1] == ids[:-1]
    spec.add_bos_token = False
    without = Tokenizer.load(spec)
    assert without.encode("Hi").count(1) == 0 and without.encode_chat(talk).count(1) == 0
    # the saved tokenizer behaves as requested
    assert without.hf("Hi")["input_ids"].count(1) == 0


@pytest.mark.default_cases("gpt2")
@pytest.mark.parametrize("source", ["gpt2", "llama2/tokenizer.model", "llama2"])
def test_saving_keeps_ids_and_template(data_dir: Path, tmp_path: Path, source: str) -> None:
    eos = "<|endoftext|>" if source == "gpt2" else "</s>"
    spec = TokenizerSpec(
        path=str(data_dir / "tokenizers" / source), eos_token=eos, chat_template=templates.WORDS
    )
    tokenizer = Tokenizer.load(spec)
    tokenizer.save(tmp_path)
    again = Tokenizer.load(TokenizerSpec(), model_path=str(tmp_path))
    plain = AutoTokenizer.from_pretrained(str(tmp_path))
    text = " Hello 日本 <b>"
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    assert again.encode(text) == tokenizer.encode(text) == plain(text)["input_ids"]
    assert again.encode_chat(talk) == plain.apply_chat_template(
        talk, tokenize=True, return_dict=False
    )
    assert again.chat_template == templates.WORDS and again.eos_token == eos
    assert again.fingerprint == Tokenizer.load(TokenizerSpec(path=str(tmp_path))).fingerprint


def test_the_fingerprint_is_of_the_content(data_dir: Path) -> None:
    path = str(data_dir / "tokenizers/llama2/tokenizer.model")
    plain = Tokenizer.load(TokenizerSpec(path=path))
    assert plain.fingerprint == Tokenizer.load(TokenizerSpec(path=path)).fingerprint
    others = [
        TokenizerSpec(path=path, add_bos_token=True),
        TokenizerSpec(path=path, chat_template=templates.INST),
        TokenizerSpec(path=path, eos_token="<unk>"),
        TokenizerSpec(path=str(data_dir / "tokenizers/gpt2")),
    ]
    assert len({plain.fingerprint, *(Tokenizer.load(spec).fingerprint for spec in others)}) == 5
    # A tokenizer that adds BOS to texts by default adds it to conversations only if requested.
    llama = str(data_dir / "tokenizers/llama2")
    habit, asked = (
        Tokenizer.load(TokenizerSpec(path=llama, add_bos_token=bos)) for bos in (None, True)
    )
    assert habit.add_bos and asked.add_bos and habit.fingerprint != asked.fingerprint


def test_templates_are_files_or_texts(data_dir: Path, tmp_path: Path) -> None:
    path = str(data_dir / "tokenizers/llama2/tokenizer.model")
    file = tmp_path / "chat.jinja"
    file.write_text(templates.CHATML)
    assert (
        Tokenizer.load(TokenizerSpec(path=path, chat_template=str(file))).chat_template
        == templates.CHATML
    )
    with pytest.raises(ConfigError, match="nor a file, nor a jinja template; did you mean chatml"):
        Tokenizer.load(TokenizerSpec(path=path, chat_template="chat_ml"))
    with pytest.raises(ConfigError, match="does not compile, line 1"):
        Tokenizer.load(TokenizerSpec(path=path, chat_template="{% for m in %}"))


def test_a_model_whose_vocabulary_is_not_there_is_refused(tmp_path: Path) -> None:
    """From config.json and the special tokens alone, transformers builds an empty vocabulary."""
    (model := tmp_path / "m").mkdir()
    (model / "config.json").write_text('{"model_type": "gpt_neox"}')
    (model / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "GPTNeoXTokenizer", "eos_token": "<|endoftext|>"}'
    )
    with pytest.raises(
        UserError, match="it gives no tokens for a text: its vocabulary has only special tokens"
    ):
        Tokenizer.load(TokenizerSpec(), str(model), option="actor.tokenizer")


def test_what_is_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        Tokenizer.load(TokenizerSpec(path=str(tmp_path / "nothing")))
    with pytest.raises(UserError, match="no tokenizer can be read there"):
        Tokenizer.load(TokenizerSpec(path=str(tmp_path)))
    (tmp_path / "tokenizer.model").write_text("aGk= 0\n")
    with pytest.raises(UserError, match=r"must be a tokenizer\.json or a sentencepiece"):
        Tokenizer.load(TokenizerSpec(path=str(tmp_path / "tokenizer.model")))
    with pytest.raises(ConfigError, match=r"tokenizer\.path is not set"):
        Tokenizer.load(TokenizerSpec())
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=rf"^actor\.path={empty}: no tokenizer can be read there"):
        Tokenizer.load(TokenizerSpec(), str(empty), option="actor.tokenizer")
    (empty / "config.json").write_text('{"model_type": "llama", "pretraining_tp": "a"}')
    with pytest.raises(UserError, match=rf"^actor\.path={empty}/config\.json: .*pretraining_tp"):
        Tokenizer.load(TokenizerSpec(), str(empty), option="actor.tokenizer")


def test_it_travels_to_other_processes(llama2: Tokenizer) -> None:
    there = pickle.loads(pickle.dumps(llama2))
    assert there.encode("Hello world") == llama2.encode("Hello world")
    assert there.fingerprint == llama2.fingerprint


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60
)
@given(unicode_texts, st.lists(st.integers(259, 31999), max_size=12), st.booleans())
def test_a_stream_adds_up(
    llama2: Tokenizer, with_template: Make, text: str, noise: list[int], bpe: bool
) -> None:
    tokenizer = with_template(None) if bpe else llama2
    ids = tokenizer.encode(text)
    stream = StreamDecoder(tokenizer, skip_special=False)
    parts = [stream.feed([id]) for id in ids]
    assert "".join(parts) + stream.flush() == tokenizer.decode(ids)
    other = StreamDecoder(tokenizer, skip_special=False)
    assert other.feed(noise) + other.flush() == tokenizer.decode(noise)


def test_a_stream_gives_no_half_characters(llama2: Tokenizer) -> None:
    stream = StreamDecoder(llama2)
    parts = [stream.feed([id]) for id in llama2.encode("a 🤗!")]
    assert parts == ["a", " ", "", "", "", "🤗", "!"]


def test_a_completion_keeps_the_blank_it_begins_with(data_dir: Path) -> None:
    tokenizer = Tokenizer.load(TokenizerSpec(path=str(data_dir / "tokenizers" / "llama2")))
    prompt, ids = tokenizer.encode("The cat"), tokenizer.encode("and a big dog", bos=False)
    assert tokenizer.decode(ids) == "and a big dog"
    assert tokenizer.decode_after(prompt, ids) == " and a big dog"
    assert tokenizer.decode_after([], ids) == "and a big dog"
    assert tokenizer.decode_after(tokenizer.encode("é")[:-1], ids).strip() == "and a big dog"
