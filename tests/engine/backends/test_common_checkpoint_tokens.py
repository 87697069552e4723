"""What a saved model says of its tokens: other programs stop where weft does, and score as weft
does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
)

from tests.engine.common import EXACT, engine_of, load_exactly
from tests.tiny import make_llama
from weft.cli.main import main
from weft.data.sample import SequenceSample
from weft.data.spec import TokenizerSpec
from weft.data.tokenizer import Tokenizer
from weft.engine.backends.common import choose_padding
from weft.engine.spec import LoRASpec, ModelSpec

CHATML = (
    "{% for m in messages %}{{ '<|user|>' + m.role + '\n' + m.content + '<|system|>\n' }}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{ '<|user|>assistant\n' }}{% endif %}"
)


def write(file: Path, **changes: Any) -> None:
    """Change values of a JSON file; None takes one out."""
    values = json.loads(file.read_text()) if file.exists() else {}
    values |= changes
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A base model with a ChatML-like template: EOS is `</s>`, turns end with `<|system|>`, the
    config names a third id.
    """
    directory = make_llama(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(directory)
    write(directory / "config.json", eos_token_id=[2, 40])
    write(
        directory / "generation_config.json",
        eos_token_id=[2, 41],
        temperature=0.6,
        top_p=0.9,
        do_sample=True,
    )
    return directory


def saved(base: Path, target: Path, **changes: Any) -> tuple[Path, Tokenizer]:
    tokenizer = Tokenizer.load(TokenizerSpec(), str(base))
    engine_of(base, **changes).save_model(target, tokenizer)
    return target, tokenizer


@pytest.mark.parametrize("backend", ["torch", "hf"])
def test_everything_that_ends_a_completion_is_saved_and_the_rest_is_kept(
    base: Path, tmp_path: Path, backend: str
) -> None:
    target, tokenizer = saved(base, tmp_path / "saved", backend=backend)
    turn_end = tokenizer.find_special_id("<|system|>")
    assert tokenizer.list_stop_ids() == [2, turn_end, 40, 41]
    values = json.loads((target / "generation_config.json").read_text())
    assert values["eos_token_id"] == [2, turn_end, 40, 41]
    assert (values["temperature"], values["top_p"], values["do_sample"]) == (0.6, 0.9, True)
    assert json.loads((target / "config.json").read_text())["eos_token_id"] == [2, turn_end, 40, 41]
    assert Tokenizer.load(TokenizerSpec(), str(target)).list_stop_ids() == [2, turn_end, 40, 41]


class Say(LogitsProcessor):
    """Makes a model say one token after three others."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, 50 if input_ids.shape[1] < 6 else self.token] = 0.0
        return forced


def test_transformers_stops_where_weft_does(base: Path, tmp_path: Path) -> None:
    target, tokenizer = saved(base, tmp_path / "saved")
    model = AutoModelForCausalLM.from_pretrained(target)
    for stop in (*tokenizer.list_stop_ids(), 42):
        out = model.generate(
            torch.tensor([[8, 9, 10]]),
            max_new_tokens=8,
            logits_processor=LogitsProcessorList([Say(stop)]),
        )
        assert out[0, 3:].tolist() == ([50, 50, 50] + [stop] * (5 if stop == 42 else 1))


def scores(directory: Path, rows: Sequence[Sequence[int]], pad: int | None) -> torch.Tensor:
    """What `transformers` makes of the sequences, in float64: in one padded batch, or one by one
    without padding.
    """
    model = load_exactly(AutoModelForSequenceClassification, directory)
    with torch.no_grad():
        if pad is None:
            return torch.cat([model(torch.tensor([list(row)])).logits[0] for row in rows])
        longest = max(map(len, rows))
        ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        found: torch.Tensor = model(ids, attention_mask=mask).logits[:, 0]
        return found


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("backend", ["torch", "hf"])
@pytest.mark.parametrize("own", ["</s>", None, "<pad>"])
def test_transformers_scores_as_weft_does(tmp_path: Path, backend: str, own: str | None) -> None:
    base = make_llama(tmp_path / "base", pad_token_id=2 if own == "</s>" else 0 if own else None)
    write(base / "tokenizer_config.json", pad_token=own)
    tokenizer = Tokenizer.load(TokenizerSpec(), str(base))
    assert tokenizer.hf.pad_token == own
    engine = engine_of(base, head="score", backend=backend, dtype="float64")
    target = tmp_path / "saved"
    engine.save_model(target, tokenizer)
    rows = [[8, 9, 10, 11, 2], [12, 13, 2], [14, 15, 16, 17, 18, 19, 2], [20, 2, 2]]
    batch = SequenceSample.from_groups(
        [str(i) for i in range(len(rows))],
        {"prompt": [[1]] * len(rows), "completion": [[len(row) - 1] for row in rows]},
        {"prompt": [row[0] for row in rows], "completion": [id for row in rows for id in row[1:]]},
    )
    expected = engine.forward(batch, frozenset({"scores"})).data["scores"]
    assert expected.std() > 0.1
    pad = AutoTokenizer.from_pretrained(target).pad_token_id
    assert pad is not None and pad not in tokenizer.list_stop_ids()
    assert json.loads((target / "config.json").read_text())["pad_token_id"] == pad
    for padding in (None, pad):
        torch.testing.assert_close(scores(target, rows, padding), expected, **EXACT)
    told = [note for note in engine.notes if "padding token" in note]
    assert bool(told) == (own != "<pad>")


@pytest.mark.usefixtures("float64_throughout")
def test_a_vocabulary_without_a_free_token_leaves_padding_out(tmp_path: Path) -> None:
    """As GPT-2's: its only special token ends texts."""
    base = make_llama(tmp_path / "base", pad_token_id=2)
    tokenizer = Tokenizer.load(TokenizerSpec(), str(base))
    hf = AutoTokenizer.from_pretrained(base)
    core = json.loads(hf.backend_tokenizer.to_str())
    core["added_tokens"] = [token for token in core["added_tokens"] if token["content"] == "</s>"]
    (base / "tokenizer.json").write_text(json.dumps(core))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "pad_token": "</s>",
    }
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    for name in ("special_tokens_map.json", "chat_template.jinja", "added_tokens.json"):
        (base / name).unlink(missing_ok=True)
    tokenizer = Tokenizer.load(TokenizerSpec(), str(base))
    assert tokenizer.pad_id == tokenizer.eos_id == 2
    engine = engine_of(base, head="score", dtype="float64")
    engine.save_model(tmp_path / "saved", tokenizer)
    assert "pad_token_id" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").pad_token_id is None
    assert any("one sequence at a time" in note for note in engine.notes)
    rows = [[8, 9, 10, 2]]
    batch = SequenceSample.from_groups(
        ["a"], {"prompt": [[1]], "completion": [[3]]}, {"prompt": [8], "completion": [9, 10, 2]}
    )
    expected = engine.forward(batch, frozenset({"scores"})).data["scores"]
    torch.testing.assert_close(scores(tmp_path / "saved", rows, None), expected, **EXACT)


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("backend", ["torch", "hf"])
def test_a_published_reward_model_that_pads_with_eos_is_read_as_transformers_reads_it(
    tmp_path: Path, backend: str
) -> None:
    """It was trained one token before the end; so are its scores read, and those of what is trained
    further from it.
    """
    base = make_llama(tmp_path / "base", pad_token_id=2)
    write(base / "tokenizer_config.json", pad_token="</s>")
    torch.manual_seed(3)
    config = AutoConfig.from_pretrained(base, num_labels=1, pad_token_id=2)
    published = AutoModelForSequenceClassification.from_config(config)
    published.save_pretrained(tmp_path / "published")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "published")
    tokenizer = Tokenizer.load(TokenizerSpec(), str(tmp_path / "published"))
    engine = engine_of(tmp_path / "published", head="score", backend=backend, dtype="float64")
    rows = [[8, 9, 10, 11, 2], [12, 13], [20, 2, 2], [14, 15, 2, 16, 2]]
    batch = SequenceSample.from_groups(
        [str(i) for i in range(len(rows))],
        {"prompt": [[1]] * len(rows), "completion": [[len(row) - 1] for row in rows]},
        {"prompt": [row[0] for row in rows], "completion": [id for row in rows for id in row[1:]]},
    )
    found = engine.forward(batch, frozenset({"scores"})).data["scores"]
    torch.testing.assert_close(found, scores(tmp_path / "published", rows, 2), **EXACT)
    engine.save_model(tmp_path / "again", tokenizer)
    torch.testing.assert_close(found, scores(tmp_path / "again", rows, 2), **EXACT)
    assert any("one token before the end" in note for note in engine.notes)


@pytest.mark.parametrize("backend", ["torch", "hf"])
def test_mean_pooling_is_told_and_named(tmp_path: Path, backend: str) -> None:
    base = make_llama(tmp_path / "base")
    engine = engine_of(base, head="score", backend=backend, pooling="mean")
    assert any(
        "pooling=mean" in note and "transformers cannot express" in note for note in engine.notes
    )
    engine.save_model(tmp_path / "saved", Tokenizer.load(TokenizerSpec(), str(base)))
    values = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (values["weft_pooling"], values["architectures"]) == (
        "mean",
        ["WeftMeanPooledRewardModel"],
    )


def test_padding_is_a_token_that_the_template_does_not_write(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base", pad_token_id=2)
    tokenizer = Tokenizer.load(TokenizerSpec(), str(base))
    tokenizer.hf.pad_token = "</s>"
    specials = [
        t.content
        for t in tokenizer.hf.added_tokens_decoder.values()
        if t.special and t.content != "</s>"
    ]
    assert len(specials) > 2
    tokenizer.hf.chat_template = "".join(specials[:-1])  # all but one of them stand in every text
    spec = ModelSpec(path=str(base), head="score", trained=True)
    assert choose_padding(tokenizer, spec, "last").hf.pad_token == specials[-1]


@pytest.mark.parametrize("head", ["lm", "score"])
def test_a_merged_adapter_stops_and_pads_as_its_checkpoint_does(
    base: Path, tmp_path: Path, head: str
) -> None:
    write(base / "tokenizer_config.json", pad_token="</s>")
    target, _ = saved(base, tmp_path / "saved", head=head, lora=LoRASpec(r=2), trained=True)
    adapter = target / "adapter"
    for file in adapter.glob("*.safetensors"):
        tensors = load_file(file)
        save_file(
            {name: value + 0.5 if "lora_B" in name else value for name, value in tensors.items()},
            file,
        )
    merged = tmp_path / "merged"
    assert (
        main(
            [
                "convert",
                "merge",
                "--base",
                str(base),
                "--adapter",
                str(adapter),
                "--output",
                str(merged),
            ]
        )
        == 0
    )
    for name in ("config.json", "generation_config.json"):
        one, other = (json.loads((folder / name).read_text()) for folder in (target, merged))
        ids = ("eos_token_id", "pad_token_id", "bos_token_id", "temperature")
        assert {key: one.get(key) for key in ids} == {key: other.get(key) for key in ids}
    assert (
        AutoTokenizer.from_pretrained(merged).pad_token
        == AutoTokenizer.from_pretrained(target).pad_token
    )
    assert AutoTokenizer.from_pretrained(merged).chat_template == CHATML
