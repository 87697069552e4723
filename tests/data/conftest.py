"""Real tokenizers, and small ones for templates with special tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from weft.data.spec import TokenizerSpec
from weft.data.tokenizer import Tokenizer

TOKENS = [
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<think>",
    "</think>",
]
QWEN_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@pytest.fixture(scope="session")
def gpt2_core(data_dir: Path) -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer.from_file(str(data_dir / "tokenizers/gpt2/tokenizer.json"))
    core.add_special_tokens(
        [tokenizers.AddedToken(t, special=True, normalized=False) for t in TOKENS]
    )
    return core


@pytest.fixture(scope="session")
def with_template(gpt2_core: tokenizers.Tokenizer) -> Callable[..., Tokenizer]:
    """Return a tokenizer with GPT-2's vocabulary and a chat template.

    The vocabulary also has the tokens that the templates use, BOS `<s>` and EOS `</s>`.
    """

    def make(template: str | None, **spec: object) -> Tokenizer:
        hf = PreTrainedTokenizerFast(tokenizer_object=gpt2_core, bos_token="<s>", eos_token="</s>")
        hf.chat_template = template
        return Tokenizer(hf, **spec)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def llama2(data_dir: Path) -> Tokenizer:
    return Tokenizer.load(TokenizerSpec(path=str(data_dir / "tokenizers/llama2/tokenizer.model")))


@pytest.fixture(scope="session")
def qwen_dir(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen's real vocabulary, added tokens and chat template as a Hugging Face directory."""
    config = json.loads(
        (data_dir / "tokenizers/qwen/qwen3_coder_30b_tokenizer_config.json").read_text()
    )
    core = TikTokenConverter(
        str(data_dir / "tokenizers/qwen/qwen.tiktoken"), pattern=QWEN_PATTERN
    ).converted()
    added = [
        token for _, token in sorted((int(i), t) for i, t in config["added_tokens_decoder"].items())
    ]
    core.add_tokens(
        [tokenizers.AddedToken(t["content"], special=t["special"], normalized=False) for t in added]
    )
    hf = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=config["eos_token"], pad_token=config["pad_token"]
    )
    hf.chat_template = config["chat_template"]
    directory = tmp_path_factory.mktemp("qwen")
    hf.save_pretrained(str(directory))
    return directory


@pytest.fixture(scope="session")
def qwen(qwen_dir: Path) -> Tokenizer:
    return Tokenizer.load(TokenizerSpec(path=str(qwen_dir)))
