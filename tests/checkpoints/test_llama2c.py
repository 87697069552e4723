"""`weft convert`: the pretrained model stories260K, and adapters merged into their base."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
import transformers

from tests.models.common import adapted
from tests.roundings import assert_computed
from weft.checkpoints import hf_io, peft_io
from weft.cli.main import main
from weft.models.kv.slots import KVCache
from weft.models.network import lora
from weft.models.network.linear import find_canonical_values
from weft.models.network.packed import pack
from weft.models.network.transformer import Transformer

from .test_peft_io import ROW, logits, save_both

GOLDEN = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big, "
    "red ball. She wanted to play with it, but it was too high.\nLily's mom said, \"Lily, let's "
    'go to the park."'
)


def convert(data_dir: Path, output: Path, name: str = "stories260K.bin") -> Path:
    source = data_dir / "weights" / "stories260K"
    words = [
        "convert",
        "llama2c",
        str(source / name),
        "--tokenizer",
        str(source / "tok512.bin"),
        "--output",
        str(output),
    ]
    assert main(words) == 0
    return output


@pytest.fixture(scope="module")
def stories(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(data_dir, tmp_path_factory.mktemp("stories") / "hf")


@torch.no_grad()
def greedy(network: Transformer, prompt: list[int], count: int) -> list[int]:
    cache = KVCache(network.config, "cpu", torch.float32)
    slots, tokens = cache.allocate(), torch.tensor(prompt)
    packed, found = cache.extend(slots, [tokens]), list[int]()
    for _ in range(count):
        token = network.next_token_logits(network.compute_hidden(packed)[packed.rows]).argmax(-1)
        found.append(int(token))
        packed = cache.extend(slots, token)
    return found


def test_the_golden_text(stories: Path) -> None:
    """weights/SOURCE.md: greedy from "Once upon a time", by weft and by transformers from the same
    directory.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(stories)
    prompt = tokenizer("Once upon a time").input_ids
    assert prompt[0] == tokenizer.bos_token_id == 1
    ids = greedy(hf_io.load(stories), prompt, 100)
    assert tokenizer.decode([*prompt, *ids], skip_special_tokens=True).startswith(GOLDEN)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(stories)
    out = theirs.generate(torch.tensor([prompt]), max_new_tokens=100, do_sample=False)
    assert out[0].tolist() == [*prompt, *ids]


def test_the_documented_loss(stories: Path, data_dir: Path) -> None:
    """weights/SOURCE.md: 1.2878 nats a token over the 321 predicted tokens of the first story."""
    text = (data_dir / "tinystories" / "tiny_stories.txt").read_text()
    story = text[: text.index("\nOnce upon", 1)]
    ids = transformers.AutoTokenizer.from_pretrained(stories)(story).input_ids
    assert len(ids) == 322
    logprobs = hf_io.load(stories)(pack([torch.tensor(ids)]), frozenset({"logprobs"}))["logprobs"]
    assert len(logprobs) == 321 and round(-float(logprobs.detach().mean()), 4) == 1.2878


def test_text_comes_back_with_bytes_that_have_no_piece(stories: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(stories)
    for text in (
        "Ж is a byte or two: é, 漢字.",
        "  two blanks\n\nand lines\t.",
        'Lily\'s mom said, "Hi!"',
    ):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == text
    assert tokenizer("Ж", add_special_tokens=False).input_ids[-2:] == [0xD0 + 3, 0x96 + 3]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (2, 0, 512)


def test_both_exports_hold_the_same_model(stories: Path, data_dir: Path, tmp_path: Path) -> None:
    other = convert(data_dir, tmp_path / "v1", "checkpoint_v1.bin")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (other / name).read_bytes() == (stories / name).read_bytes()


def test_bad_llama2c_files_are_exit_2(
    stories: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = data_dir / "weights" / "stories260K"
    broken = tmp_path / "broken.bin"
    tokenizer, output = str(source / "tok512.bin"), str(tmp_path / "out")
    raw = (source / "stories260K.bin").read_bytes()
    for content, said in (
        (raw[:-4], "truncated"),
        (raw[:10], "not a llama2.c"),
        (b"\xff" * 999, "not a llama2.c"),
    ):
        broken.write_bytes(content)
        assert (
            main(["convert", "llama2c", str(broken), "--tokenizer", tokenizer, "--output", output])
            == 2
        )
        assert said in capsys.readouterr().err
    checkpoint = str(source / "stories260K.bin")
    assert (
        main(["convert", "llama2c", checkpoint, "--tokenizer", str(broken), "--output", output])
        == 2
    )
    assert (
        main(
            [
                "convert",
                "llama2c",
                checkpoint,
                "--tokenizer",
                str(tmp_path / "no"),
                "--output",
                output,
            ]
        )
        == 2
    )
    assert (
        main(["convert", "llama2c", checkpoint, "--tokenizer", tokenizer, "--output", str(stories)])
        == 2
    )
    assert "not empty" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# -- adapters


def merge(base: Path, adapter: Path, output: Path) -> int:
    return main(
        [
            "convert",
            "merge",
            "--base",
            str(base),
            "--adapter",
            str(adapter),
            "--output",
            str(output),
        ]
    )


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_merged_is_adapted_and_not_the_base(name: str, tmp_path: Path) -> None:
    network = adapted(name)
    base, adapter = save_both(network, tmp_path)
    assert merge(base, adapter, tmp_path / "merged") == 0
    merged = hf_io.load(tmp_path / "merged")
    assert not torch.allclose(logits(merged), logits(hf_io.load(base)), atol=0.1)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", attn_implementation="eager"
    )
    # Rounding the sums of weights adds an error like one more term in each product.
    wide = copy.deepcopy(network).double()
    found = [logits(network), logits(merged), theirs(ROW[None]).logits[0]]
    assert_computed(found, lambda: 3 * [logits(wide)])


def test_the_tokenizer_comes_along(stories: Path, tmp_path: Path) -> None:
    network = hf_io.load(stories)
    lora.attach(network, r=2)
    with torch.no_grad():
        find_canonical_values(network)["blocks.0.mlp.up.lora_b"].fill_(0.5)
    parameters = find_canonical_values(network)
    peft_io.save_adapter(
        tmp_path / "a", parameters, lora.collect_scales(network), network.config, base=str(stories)
    )
    assert merge(stories, tmp_path / "a", tmp_path / "merged") == 0
    assert (tmp_path / "merged" / "tokenizer.json").read_bytes() == (
        stories / "tokenizer.json"
    ).read_bytes()
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["eos_token_id"] == 2


def test_an_adapter_that_changes_nothing_is_refused(
    stories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network = hf_io.load(stories)
    lora.attach(network, r=2)
    parameters = find_canonical_values(network)
    peft_io.save_adapter(
        tmp_path / "a", parameters, lora.collect_scales(network), network.config, base=str(stories)
    )
    assert merge(stories, tmp_path / "a", tmp_path / "merged") == 2
    assert "changes nothing" in capsys.readouterr().err and not (tmp_path / "merged").exists()
