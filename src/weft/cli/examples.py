"""Write sample data and a small model, enough to try every command of the README.

Nothing is downloaded.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft import writing
from weft.cli.help import EXAMPLES
from weft.cli.ls import format_size
from weft.cli.parsing import CommandParser, print_help_if_empty
from weft.errors import ConfigError

CHARACTERS = "0123456789+="
SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>")
TEXT_SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>")
# share of correct SFT answers; below 1, so that training with a reward can improve the model
CORRECT_SHARE = 0.7
ROWS_PER_SUM = 8  # SFT rows per sum
SEED = 1
# The template renders only the last question and its answer, so each sum is answered separately.
CHAT_TEMPLATE = (
    "{% set last = namespace(at=0) %}"
    "{% for m in messages %}"
    "{% if m['role'] == 'user' %}{% set last.at = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for m in messages[last.at:] %}"
    "{% if m['role'] == 'user' %}{{ m['content'] | replace(' ', '') }}="
    "{% elif m['role'] == 'assistant' %}{{ m['content'] }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a Llama model: widths, numbers of layers and heads, and maximum length in tokens.

    `tied` is True if the output matrix is the embedding.
    """

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    context: int
    tied: bool


SUMS_SHAPE = LlamaShape(hidden=96, inner=288, layers=3, heads=4, kv_heads=4, context=64, tied=True)
TEXT_SHAPE = LlamaShape(hidden=32, inner=64, layers=2, heads=4, kv_heads=2, context=512, tied=False)
TEXT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_files() -> dict[str, bytes]:
    """Return the contents of all example files, keyed by path relative to the output folder."""
    sums = []
    for left in range(10):
        for right in range(10):
            sums.append((left, right))
    generator = random.Random(SEED)
    generator.shuffle(sums)
    lessons = []
    for digits in sums * ROWS_PER_SUM:
        is_correct = generator.random() < CORRECT_SHARE
        answer = _format_answer(digits) if is_correct else _draw_wrong_answer(digits, generator)
        lessons.append((digits, answer))
    generator.shuffle(lessons)
    wrong_answers = sorted({(digits, _draw_wrong_answer(digits, generator)) for digits in sums * 6})
    generator.shuffle(wrong_answers)
    rows: dict[str, list[dict[str, Any]]] = {
        "sft.jsonl": [
            {"prompt": _format_prompt(digits), "answer": answer} for digits, answer in lessons
        ],
        "chat.jsonl": [
            {
                "messages": [
                    {"role": "user", "content": _format_prompt(digits).rstrip("=")},
                    {"role": "assistant", "content": answer},
                ]
            }
            for digits, answer in lessons[:100]
        ],
        "pairs.jsonl": [
            {"prompt": _format_prompt(digits), "chosen": _format_answer(digits), "rejected": wrong}
            for digits, wrong in wrong_answers
        ],
        "prompts.jsonl": [
            {"prompt": _format_prompt(digits), "answer": _format_answer(digits)} for digits in sums
        ],
    }
    contents = {}
    for name, file_rows in rows.items():
        contents[name] = "".join(json.dumps(row) + "\n" for row in file_rows).encode()
    models = {"model": _build_sums_model(), "text-model": _build_text_model()}
    for folder, model_files in models.items():
        for name, content in model_files.items():
            contents[f"{folder}/{name}"] = content
    return contents


def _format_prompt(digits: tuple[int, int]) -> str:
    return f"{digits[0]}+{digits[1]}="


def _format_answer(digits: tuple[int, int]) -> str:
    return str(sum(digits))


def _draw_wrong_answer(digits: tuple[int, int], generator: random.Random) -> str:
    """Return a random wrong answer to the sum of `digits`, which differs by at most 3."""
    return str(
        generator.choice(
            [
                number
                for number in range(max(0, sum(digits) - 3), sum(digits) + 4)
                if number != sum(digits)
            ]
        )
    )


def _build_sums_model() -> dict[str, bytes]:
    """Return the files of a random Llama with about 400,000 weights and a character tokenizer."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS])}
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    pattern = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    tokenizer = _build_tokenizer(vocabulary, SPECIAL_TOKENS, pattern, {"type": "Fuse"}, model)
    return _build_model_files(
        SUMS_SHAPE, vocabulary, tokenizer, {**special, "chat_template": CHAT_TEMPLATE}
    )


def _build_text_model() -> dict[str, bytes]:
    """Return the files of a random Llama with about 40,000 weights and a byte tokenizer.

    The tokenizer has a chat template.
    """
    vocabulary = {
        token: i for i, token in enumerate([*TEXT_SPECIAL_TOKENS, *_list_byte_characters()])
    }
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    tokenizer = _build_tokenizer(vocabulary, TEXT_SPECIAL_TOKENS, byte_level, byte_level, model)
    return _build_model_files(
        TEXT_SHAPE, vocabulary, tokenizer, {**special, "chat_template": TEXT_TEMPLATE}
    )


def _list_byte_characters() -> list[str]:
    """Return the character that represents each byte in byte-level vocabularies.

    Printable bytes represent themselves. Other bytes are represented by characters from U+0100 on
    (Radford et al. 2019, GPT-2).
    """
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = itertools.count(0x100)
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _build_model_files(
    shape: LlamaShape, vocabulary: dict[str, int], tokenizer: bytes, settings: dict[str, str]
) -> dict[str, bytes]:
    """Return the files of a Llama with random weights, keyed by file name.

    `tokenizer` is the content of tokenizer.json. `settings` are the special tokens and the chat
    template, by their keys in tokenizer_config.json.
    """
    from safetensors.numpy import save

    ids = {}
    for name in ("bos", "eos", "pad"):
        ids[f"{name}_token_id"] = vocabulary.get(settings.get(f"{name}_token", ""))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(vocabulary),
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.hidden // shape.heads,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": shape.tied,
        **ids,
        "dtype": "float32",
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **settings,
        "model_max_length": shape.context,
    }
    return {
        "config.json": _encode_json(config),
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": _encode_json(tokenizer_config),
        "model.safetensors": save(_draw_weights(shape, len(vocabulary)), metadata={"format": "pt"}),
    }


def _encode_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _build_tokenizer(
    vocabulary: dict[str, int],
    special: Iterable[str],
    pre_tokenizer: Any,
    decoder: Any,
    model: dict[str, Any],
) -> bytes:
    """Return the content of tokenizer.json.

    `pre_tokenizer`, `decoder` and `model` are sections of the file. `special` are the special
    tokens in `vocabulary`.
    """
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    return _encode_json(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {"id": vocabulary[token], "content": token, **flags} for token in special
            ],
            "normalizer": None,
            "pre_tokenizer": pre_tokenizer,
            "post_processor": None,
            "decoder": decoder,
            "model": model,
        }
    )


def _draw_weights(shape: LlamaShape, vocabulary: int) -> dict[str, Any]:
    """Return random float32 weights for a Llama, keyed by parameter name.

    They are drawn with `RandomState`, which gives the same numbers in every version of numpy.
    """
    import numpy as np

    generator = np.random.RandomState(SEED)
    bound = 0.02 * 3**0.5

    def draw_matrix(rows: int, columns: int) -> Any:
        return generator.uniform(-bound, bound, (rows, columns)).astype(np.float32)

    hidden, kv_width = shape.hidden, shape.hidden // shape.heads * shape.kv_heads
    weights = {"model.embed_tokens.weight": draw_matrix(vocabulary, hidden)}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q", hidden), ("k", kv_width), ("v", kv_width), ("o", hidden)):
            weights[f"{prefix}.self_attn.{name}_proj.weight"] = draw_matrix(rows, hidden)
        for name in ("gate", "up"):
            weights[f"{prefix}.mlp.{name}_proj.weight"] = draw_matrix(shape.inner, hidden)
        weights[f"{prefix}.mlp.down_proj.weight"] = draw_matrix(hidden, shape.inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{name}.weight"] = np.ones(hidden, np.float32)
    weights["model.norm.weight"] = np.ones(hidden, np.float32)
    if shape.tied:
        return weights
    return {**weights, "lm_head.weight": draw_matrix(vocabulary, hidden)}


FIRST_COMMAND = f"weft quickstart sft experiment_name=first trial_name=sft {EXAMPLES['sft']}"
DESCRIPTIONS = {
    "sft.jsonl": "prompts with answers, three of ten wrong: sft",
    "chat.jsonl": "the same rows as conversations: sft with dataset.type=chat",
    "pairs.jsonl": "a correct and a wrong answer to each prompt: rw, dpo",
    "prompts.jsonl": "prompts with the correct answer, for a verifier: ppo, grpo, gen",
    "model": "a Llama with 400,000 random weights that reads digits, + and =",
    "text-model": (
        "a Llama with 40,000 random weights that reads any text, byte by byte: for the tutorials"
    ),
}


def main(argv: Sequence[str]) -> int:
    """Run `weft examples ...` and return the exit code.

    Raises `ConfigError` if writing would overwrite a file that has different content.
    """
    parser = CommandParser(prog="weft examples", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="{ls,write}", required=True)
    commands.add_parser("ls", help="list the files")
    writing = commands.add_parser("write", help="write the files to a folder")
    writing.add_argument("folder", type=Path, metavar="DIR", help="a new folder, such as data")
    if print_help_if_empty(parser, argv):
        return 2
    arguments = parser.parse_args(list(argv))

    file_contents = build_files()
    if arguments.command == "write":
        write_files(arguments.folder, file_contents)
        print(f"written to {arguments.folder}:")
    for name, description in DESCRIPTIONS.items():
        contents = []
        for path, content in file_contents.items():
            if path.split("/")[0] == name:
                contents.append(content)
        print(f"  {name:15}{format_size(sum(map(len, contents))):>8}  {description}")
    print(
        "\nBegin with:"
        if arguments.command == "write"
        else "\nweft examples write data writes the files; then begin with:"
    )
    print(
        "  "
        + FIRST_COMMAND.replace(
            "=data/", f"={arguments.folder if arguments.command == 'write' else 'data'}/"
        )
    )
    return 0


def write_files(folder: Path, file_contents: dict[str, bytes]) -> None:
    """Write the files that do not exist; `file_contents` maps paths in `folder` to contents.

    Raises `ConfigError`, before anything is written, if a file exists with other content.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; name a folder")
    conflicting = []
    for name, content in file_contents.items():
        if not _can_write(folder / name, content):
            conflicting.append(name)
    if conflicting:
        raise ConfigError(
            f"{folder} contains files that weft would overwrite ({', '.join(conflicting[:4])}); "
            "name another folder, or remove them"
        )
    try:
        for name, content in file_contents.items():
            if not (folder / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                writing.write(folder / name, content)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or folder} cannot be written: {error.strerror or error}"
        ) from error


def _can_write(path: Path, content: bytes) -> bool:
    """Return whether `path` does not exist or is a file with this content; a link is neither."""
    if path.is_symlink() or not path.exists():
        return not path.is_symlink()
    return path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content
