"""Convert checkpoints of other programs, merge adapters, split files by stage, export to GGUF."""

from __future__ import annotations

import argparse
import re
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from weft.checkpoints import gguf
from weft.checkpoints.names import ADAPTER, ModelQuery, find_model
from weft.cli import dialects
from weft.cli.parsing import CommandParser
from weft.data import spm
from weft.errors import CheckpointError, ConfigError
from weft.reading import make_folder

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")

NORMAL_PIECE = 1
# id of a special piece -> its kind
SPECIAL_PIECES = {
    0: spm.UNKNOWN,
    1: spm.CONTROL,
    2: spm.CONTROL,
}


def main(argv: Sequence[str]) -> int:
    """Run `weft convert ...` and return the exit code.

    Raises `UserError` if the input cannot be converted.
    """
    parser = CommandParser(prog="weft convert", description=__doc__)
    parser.set_defaults(complete=None)  # fills in arguments that depend on others
    subcommands = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    # One subcommand per conversion.
    llama = subcommands.add_parser(
        "llama2c", help="convert a llama2.c checkpoint and its vocabulary to a Llama directory"
    )
    llama.add_argument("checkpoint", type=Path, help="model file, legacy or export version 1")
    llama.add_argument(
        "--tokenizer", required=True, type=Path, help="vocabulary file such as tok512.bin"
    )
    llama.add_argument(
        "--output", required=True, type=Path, help="directory to write; must not exist or be empty"
    )
    llama.set_defaults(run=_convert_llama2c)
    merge = subcommands.add_parser(
        "merge", help="add an adapter in PEFT's layout to the weights of its base model"
    )
    merge.add_argument(
        "--base", required=True, help="model directory, run or hub name that the adapter belongs to"
    )
    merge.add_argument(
        "--adapter",
        required=True,
        type=Path,
        help="directory with adapter_config.json, or a run that trained one",
    )
    merge.add_argument(
        "--output", required=True, type=Path, help="directory to write; must not exist or be empty"
    )
    merge.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype to write (default: that of the base model)",
    )
    merge.set_defaults(run=_merge)
    stages = subcommands.add_parser(
        "partition", help="write a model with one weight file per pipeline stage"
    )
    stages.add_argument("--model_dir", required=True, help="model directory, run or hub name")
    stages.add_argument("--model_type", help="model family (default: read from config.json)")
    stages.add_argument("--num_stages", required=True, type=int, help="pipeline stages")
    stages.add_argument(
        "--output_dir",
        required=True,
        type=Path,
        dest="output",
        help="directory to write; must not exist or be empty",
    )
    stages.set_defaults(run=_partition)
    _add_gguf(subcommands)
    for name in dialects.CONVERSIONS:
        dialect = dialects.load(name) if argv[:1] == [name] else dialects.find(name)
        if dialect is not None:
            dialect.add_command(subcommands)
    # Refuse a full output directory before any model is read.
    arguments = parser.parse_args(argv)
    if arguments.complete is not None:
        arguments.complete(arguments)
    run: Callable[[argparse.Namespace], None] = arguments.run
    _check_empty(arguments.output)
    run(arguments)
    print(f"wrote {arguments.output}")
    return 0


def _add_gguf(subcommands: Any) -> None:
    """Add the command `gguf` to the subcommands of `weft convert`."""
    export = subcommands.add_parser("gguf", help="export a language model to llama.cpp's format")
    export.add_argument("model", metavar="MODEL", help="model directory, run or hub name")
    export.add_argument(
        "--output", required=True, type=Path, help="file to write, such as model.gguf"
    )
    export.add_argument(
        "--dtype",
        choices=gguf.DTYPES,
        default="auto",
        help="dtype of the weights (default auto: 16 bits)",
    )
    export.add_argument(
        "--converter",
        metavar="PATH",
        type=Path,
        help=f"llama.cpp's folder, or its {gguf.SCRIPT} (default: the one in PATH)",
    )
    export.add_argument(
        "--no-check", action="store_true", help="do not load the file to compare it with the model"
    )
    export.set_defaults(run=_export_gguf)


def _check_empty(output: Path) -> None:
    """Create the parent of `output`; raise `ConfigError` if `output` is a file or has content."""
    make_folder(output.parent, f"--output {output}", ConfigError)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(
            f"{output} exists and is not empty; nothing is overwritten: name another directory"
        )


# -- llama2.c


def _convert_llama2c(arguments: argparse.Namespace) -> None:
    from weft.checkpoints import hf_io, llama2c

    for file in (arguments.checkpoint, arguments.tokenizer):
        if not file.is_file():
            raise CheckpointError(f"{file}: there is no such file")
    config, parameters = llama2c.read(arguments.checkpoint)
    vocabulary = _read_vocabulary(arguments.tokenizer, config.vocab_size)
    _save_tokenizer(vocabulary, config.max_positions, arguments.output)
    hf_io.save(arguments.output, parameters, config)


def _read_vocabulary(path: Path, size: int) -> spm.SentencePieceModel:
    """Read a vocabulary file of llama2.c with `size` pieces.

    The file has the length of the longest piece (4 bytes), then the score, length and bytes of each
    piece. Raises `CheckpointError` if the file has another format or number of pieces.
    """
    raw = path.read_bytes()
    pieces = list[tuple[str, float, int]]()
    position = 4
    try:
        for index in range(size):
            score, length = struct.unpack_from("<fi", raw, position)
            text = raw[position + 8 : position + 8 + length].decode()
            position += 8 + length
            if index in SPECIAL_PIECES:
                # llama2.c writes line breaks around the names of BOS and EOS
                pieces.append((text.strip("\n"), score, SPECIAL_PIECES[index]))
            else:
                kind = spm.BYTE if BYTE_PIECE.fullmatch(text) else NORMAL_PIECE
                pieces.append((text.replace(" ", spm.SPACE), score, kind))
    except (struct.error, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path} is not a llama2.c vocabulary of {size} pieces: {error}"
        ) from None
    if position != len(raw):
        raise CheckpointError(
            f"{path} contains more than the {size} pieces of the checkpoint; it belongs to another "
            f"model"
        )
    return spm.SentencePieceModel(
        tuple(pieces),
        unigram=False,
        charsmap=b"",
        add_dummy_prefix=True,
        remove_extra_whitespaces=False,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
    )


def _save_tokenizer(vocabulary: spm.SentencePieceModel, length: int, output: Path) -> None:
    """Save a fast tokenizer that adds BOS at the start of each sequence to the directory `output`.

    `length` is the maximum number of tokens. The token for unknown text is also used for padding,
    because it never occurs in encoded text.
    """
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    core = spm.convert(vocabulary)
    unk, bos, eos = (
        vocabulary.pieces[i][0] for i in (vocabulary.unk_id, vocabulary.bos_id, vocabulary.eos_id)
    )
    core.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocabulary.bos_id)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=bos,
        eos_token=eos,
        unk_token=unk,
        pad_token=unk,
        model_max_length=length,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(str(output))


def _partition(arguments: argparse.Namespace) -> None:
    from weft.checkpoints import stages

    model = find_model(arguments.model_dir, ModelQuery("--model_dir")).path
    sizes = stages.partition(model, arguments.output, arguments.num_stages, arguments.model_type)
    print(stages.describe(sizes))


def _export_gguf(arguments: argparse.Namespace) -> None:
    output: Path = arguments.output
    if output.is_dir():
        raise ConfigError(f"--output {output}: is a folder; name a file, such as model.gguf")
    converter = gguf.require_converter(arguments.model, output, arguments.converter)
    path = find_model(arguments.model, ModelQuery("MODEL")).path
    from weft.checkpoints import hf_io

    model = hf_io.resolve(path)
    check = not arguments.no_check
    for line in gguf.export(model, output, converter, arguments.dtype, check=check):
        print(line)


# -- adapters


def _merge(arguments: argparse.Namespace) -> None:
    import torch

    from weft.checkpoints import hf_io, peft_io
    from weft.data.spec import TokenizerSpec
    from weft.data.tokenizer import Tokenizer
    from weft.engine.backends.common import (
        choose_padding,
        list_special_ids,
        read_generation_config,
    )
    from weft.engine.spec import ModelSpec
    from weft.models.network import lora
    from weft.models.network.linear import find_canonical_values

    # Load the base model with the adapter.
    adapter = _find_adapter(arguments.adapter)
    settings = peft_io.read_adapter_config(adapter)
    head = peft_io.TASKS[settings["task_type"]]
    base = hf_io.resolve(find_model(arguments.base, ModelQuery("--base")).path)
    stored_dtype = hf_io.ParameterReader(base, head).dtype
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else stored_dtype
    network = peft_io.load_adapted(
        base, adapter, head, torch.promote_types(stored_dtype, dtype), exact=True
    )
    # Merge, unless the adapter has no effect.
    parameters = find_canonical_values(network)
    if not any(bool(value.any()) for name, value in parameters.items() if name.endswith(lora.B)):
        raise CheckpointError(
            f"{adapter} changes nothing: it has no adapter, or every lora_B is 0; was it trained?"
        )
    merged = lora.merge(parameters, lora.collect_scales(network))
    config = network.config
    # Write the tokenizer, the generation settings and the weights.
    source = _find_tokenizer(adapter, base)
    make_folder(arguments.output, f"--output {arguments.output}", ConfigError)
    if source is not None:
        spec = ModelSpec(path=str(source), head=head, trained=True)
        tokenizer = choose_padding(
            Tokenizer.load(TokenizerSpec(), spec.path), spec, network.pooling
        )
        tokenizer.save(arguments.output)
        config = hf_io.with_ids(config, **list_special_ids(tokenizer, head))
        hf_io.write_generation(arguments.output, read_generation_config(spec))
    hf_io.save(arguments.output, merged, config, head, dtype=dtype, pooling=network.pooling)


def _find_adapter(path: Path) -> Path:
    """Return the directory of the adapter: `path`, or the one in the newest checkpoint of a run."""
    model = Path(find_model(str(path), ModelQuery("--adapter")).path)
    if (model / "adapter" / ADAPTER).is_file():
        return model / "adapter"
    return model


def _find_tokenizer(adapter: Path, base: Path) -> Path | None:
    """Return the directory with the tokenizer, chat template and stop tokens of the merged model.

    The directory is the first of these that has a tokenizer: the adapter's directory, the
    checkpoint that contains the adapter, and the base model. Returns None if no tokenizer is found.
    """
    for folder in (adapter, adapter.resolve().parent, base):
        if any((folder / name).is_file() for name in TOKENIZER_FILES):
            return folder
    return None
