"""EasyLM's commands for its weight files.

`COMMANDS[NAME](argv)` runs a command and returns its exit code. Flags and defaults are EasyLM's, as
are both spellings `--flag=value` and `--flag value`. An empty value means that the flag is not set.
Help texts mark the flags that EasyLM does not have. The commands need neither an accelerator nor
jax, and have one tensor in memory at a time.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from weft.cli.parsing import CommandParser
from weft.compat.easylm.configs import (
    LLAMA_STANDARD_CONFIGS,
    EasyLMConfig,
    describe_flags,
    load_llama_config,
)
from weft.errors import CheckpointError, ConfigError, find_nearest
from weft.reading import refuse_url

if TYPE_CHECKING:
    from weft.compat.easylm.streams import StreamSource

FLOAT_DTYPES = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "fp32": "float32",
    "float32": "float32",
    "fp64": "float64",
    "float64": "float64",
}
TRUE = ("true", "t", "yes", "y", "1")
FALSE = ("false", "f", "no", "n", "0")
CHECKPOINT = (
    "params::FILE, trainstate_params::FILE, trainstate::FILE or flax_params::FILE; of a folder, "
    "the file of the highest step"
)
OWN_FLAG = " (not in EasyLM)"
TIED = f"the embedding is the model's head too, so that the file has none{OWN_FLAG}"


def convert_easylm_to_hf(argv: Sequence[str]) -> int:
    """Convert a checkpoint of EasyLM to a Hugging Face directory.

    Weights keep their dtype. The base of the positions, the epsilon of the norms and Llama 3.1's
    scaling are those with which EasyLM trains the size.
    """
    from weft.compat.easylm.checkpoints import write_hf
    from weft.compat.easylm.streams import find_source

    parser = _build_parser("convert_easylm_to_hf", convert_easylm_to_hf)
    _add(parser, "load_checkpoint", "", CHECKPOINT)
    _add(parser, "tokenizer_path", "", "tokenizer.model, Hugging Face directory or hub name")
    _add(parser, "model_size", "13b", f"{', '.join(LLAMA_STANDARD_CONFIGS)}, or json::FILE")
    _add(parser, "output_dir", "", "directory to write; must be absent or empty")
    _add_switch(parser, "is_reward_model", False, "the weights have a scalar head")
    _add(parser, "update_llama_config", "", f"dictionary of changes of the size{OWN_FLAG}")
    _add(parser, "float_dtype", "", f"bf16, fp16, fp32 or fp64; default: as stored{OWN_FLAG}")
    flags = _parse(parser, argv, required=("load_checkpoint", "tokenizer_path", "output_dir"))
    config = load_llama_config(flags.model_size, flags.update_llama_config, "model_size")
    output = _check_output(flags.output_dir, "output_dir")
    source = find_source(flags.load_checkpoint, value=flags.is_reward_model)
    print(f"reading {source}")
    write_hf(
        source,
        config,
        output,
        head="score" if flags.is_reward_model else "lm",
        dtype=_get_dtype(flags.float_dtype),
        tokenizer=flags.tokenizer_path,
    )
    print(f"wrote {output}")
    return 0


def convert_hf_to_easylm(argv: Sequence[str]) -> int:
    """Convert a Hugging Face directory to a weight file of EasyLM.

    Weights keep their dtype. A reward model is written with its scalar head.
    """
    from weft.compat.easylm.checkpoints import write_from_hf

    parser = _build_parser("convert_hf_to_easylm", convert_hf_to_easylm)
    _add(parser, "checkpoint_dir", "", "directory, or hub name, with safetensors or .bin files")
    _add(parser, "output_file", "", "file to write; must not exist")
    _add(
        parser,
        "model_size",
        "",
        "size to check the model against; default: config.json alone says it",
    )
    _add_switch(parser, "streaming", True, "write a stream; False: a single msgpack value")
    _add_switch(parser, "use_safetensors", False, "refuse a directory with .bin files only")
    _add(parser, "float_dtype", "", f"bf16, fp16, fp32 or fp64; default: as stored{OWN_FLAG}")
    flags = _parse(parser, argv, required=("checkpoint_dir", "output_file"))
    size = load_llama_config(flags.model_size, "", "model_size") if flags.model_size else None
    output = _check_output(flags.output_file, "output_file")
    config = write_from_hf(
        flags.checkpoint_dir,
        output,
        size=size,
        dtype=_get_dtype(flags.float_dtype),
        streaming=flags.streaming,
        safetensors_only=flags.use_safetensors,
    )
    return _report(output, flags.streaming, config)


def convert_torch_to_easylm(argv: Sequence[str]) -> int:
    """Convert a release of Meta (consolidated.NN.pth and params.json) to a file of EasyLM.

    Weights keep their dtype.
    """
    from weft.compat.easylm.meta_files import write_from_meta

    parser = _build_parser("convert_torch_to_easylm", convert_torch_to_easylm)
    _add(parser, "checkpoint_dir", "", "folder of the release")
    _add(parser, "output_file", "", "file to write; must not exist")
    _add_switch(parser, "streaming", True, "write a stream; False: a single msgpack value")
    _add(parser, "float_dtype", "", f"bf16, fp16, fp32 or fp64; default: as stored{OWN_FLAG}")
    flags = _parse(parser, argv, required=("checkpoint_dir", "output_file"))
    output = _check_output(flags.output_file, "output_file")
    folder = Path(flags.checkpoint_dir).expanduser()
    config = write_from_meta(
        folder, output, dtype=_get_dtype(flags.float_dtype), streaming=flags.streaming
    )
    return _report(output, flags.streaming, config)


def convert_checkpoint(argv: Sequence[str]) -> int:
    """Copy the weights of a checkpoint, as a single msgpack value or in another dtype.

    A file that lacks a weight of a LLaMA model, or has an additional one, is refused.
    """
    from weft.compat.easylm.checkpoints import write_copy
    from weft.compat.easylm.streams import find_source

    parser = _build_parser("convert_checkpoint", convert_checkpoint)
    _add(parser, "load_checkpoint", "", CHECKPOINT)
    _add(parser, "output_file", "", "file to write; must not exist")
    _add_switch(parser, "streaming", False, "write a stream; False: a single msgpack value")
    _add(parser, "float_dtype", "bf16", "bf16, fp16, fp32 or fp64")
    _add_switch(parser, "tie_word_embeddings", False, TIED)
    flags = _parse(parser, argv, required=("load_checkpoint", "output_file"))
    output = _check_output(flags.output_file, "output_file")
    source = find_source(flags.load_checkpoint)
    print(f"reading {source}")
    _check_complete(source, tied=flags.tie_word_embeddings)
    write_copy(source, output, dtype=_get_dtype(flags.float_dtype), streaming=flags.streaming)
    return _report(output, flags.streaming)


def compare_checkpoints(argv: Sequence[str]) -> int:
    """Write the difference of two checkpoints (target - base), or add it to the base again.

    Differences are computed in float32 and rounded to float_dtype. Of weights in bf16, the
    difference in fp32 gives the target back exactly, except for weights that differ from the base
    by a factor of more than 2**16. A file that lacks a weight of a LLaMA model, or has an
    additional one, is refused.
    """
    from weft.compat.easylm.checkpoints import write_difference
    from weft.compat.easylm.streams import find_source

    parser = _build_parser("diff_checkpoint", compare_checkpoints)
    _add_switch(parser, "recover_diff", False, "write base + target, where target is a difference")
    _add(parser, "load_base_checkpoint", "", CHECKPOINT)
    _add(parser, "load_target_checkpoint", "", CHECKPOINT)
    _add(parser, "output_file", "", "file to write; must not exist")
    _add_switch(parser, "streaming", True, "write a stream; False: a single msgpack value")
    _add(parser, "float_dtype", "bf16", "bf16, fp16, fp32 or fp64")
    _add_switch(parser, "tie_word_embeddings", False, TIED)
    required = ("load_base_checkpoint", "load_target_checkpoint", "output_file")
    flags = _parse(parser, argv, required=required)
    output = _check_output(flags.output_file, "output_file")
    base = find_source(flags.load_base_checkpoint, "load_base_checkpoint")
    target = find_source(flags.load_target_checkpoint, "load_target_checkpoint")
    print(f"reading {base} and {target}")
    for source in (base, target):
        _check_complete(source, tied=flags.tie_word_embeddings)
    write_difference(
        base,
        target,
        output,
        recover=flags.recover_diff,
        dtype=_get_dtype(flags.float_dtype),
        streaming=flags.streaming,
    )
    return _report(output, flags.streaming)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "convert_easylm_to_hf": convert_easylm_to_hf,
    "convert_hf_to_easylm": convert_hf_to_easylm,
    "convert_torch_to_easylm": convert_torch_to_easylm,
    "convert_checkpoint": convert_checkpoint,
    "diff_checkpoint": compare_checkpoints,
}


def _check_complete(source: StreamSource, *, tied: bool) -> None:
    """Raise `CheckpointError` unless a file has exactly the weights of a LLaMA model of some size.

    A stream that was cut short between two tensors is still valid msgpack, so the names are
    compared: the layers must be numbered 0, 1, ... without gaps, and there must be a head unless
    the embedding is `tied`.
    """
    from weft.compat.easylm.checkpoints import LM_HEAD, SCORE, format_names, list_weights
    from weft.compat.easylm.streams import TensorStream

    names = list(TensorStream(source).tensors)
    layers = {name.split("/")[2] for name in names if name.startswith("transformer/h/")}
    size = replace(
        LLAMA_STANDARD_CONFIGS["debug"],
        num_hidden_layers=max(1, len(layers)),
        tie_word_embeddings=tied,
    )
    head: Literal["lm", "score"] = "score" if SCORE in names else "lm"
    expected = [place.name for place in list_weights(size, head)]
    missing = [name for name in expected if name not in names]
    extra = [name for name in names if name not in expected]
    problems = []
    if missing:
        problems.append(f"lacks {format_names(missing)}")
    if extra:
        problems.append(f"has {format_names(extra)}")
    if not problems:
        return
    fix = "copy it again if it was cut short"
    if missing == [LM_HEAD] and not extra:
        fix = "copy it again, or set --tie_word_embeddings=True if the model has no head of its own"
    elif tied and extra == [LM_HEAD] and not missing:
        fix = "leave out --tie_word_embeddings"
    raise CheckpointError(
        f"{source}: {' and '.join(problems)}, unlike a LLaMA model with {len(layers)} "
        f"layer{'' if len(layers) == 1 else 's'}; {fix}"
    )


# -- flags


def _build_parser(name: str, command: Callable[[Sequence[str]], int]) -> CommandParser:
    return CommandParser(
        prog=f"weft easylm {name}", description=inspect.getdoc(command), allow_abbrev=False
    )


def _add(parser: CommandParser, name: str, default: str, text: str) -> None:
    """Add a flag with a text as its value. `default` also replaces an empty value."""
    ending = f" (default: {default})" if default else ""
    help_text = f"{text}{ending}".replace("%", "%%")
    parser.add_argument(f"--{name}", default=default, metavar="VALUE", help=help_text)


def _add_switch(parser: CommandParser, name: str, default: bool, text: str) -> None:
    """Add a flag that is true or false; the flag alone means true."""
    parser.add_argument(
        f"--{name}",
        nargs="?",
        const="True",
        default=str(default),
        metavar="True|False",
        help=f"{text} (default: {default})",
    )


def _parse(
    parser: CommandParser, argv: Sequence[str], required: Sequence[str]
) -> argparse.Namespace:
    """Return the values of the flags, with defaults for flags that are not set.

    Raises `ConfigError` for an unknown flag, an invalid value, or a flag in `required` without a
    value.
    """
    flags, rest = parser.parse_known_args(argv)
    defaults: dict[str, Any] = vars(parser.parse_known_args([])[0])
    if rest:
        name = rest[0].lstrip("-").partition("=")[0]
        near = find_nearest(name, defaults)
        hint = f"did you mean --{near[0]}?" if near else f"known: --{', --'.join(defaults)}"
        if not rest[0].startswith("--"):
            hint = "write --flag=value"
        raise ConfigError(f"{parser.prog}: unknown flag {rest[0]}; {hint}")
    for name, value in vars(flags).items():
        text = value or defaults[name]
        if defaults[name] in ("True", "False"):
            setattr(flags, name, _parse_switch(name, text))
        else:
            setattr(flags, name, text)
    for name in required:
        if not getattr(flags, name):
            raise ConfigError(f"{parser.prog}: --{name} is missing; see {parser.prog} --help")
    return flags


def _parse_switch(name: str, text: str) -> bool:
    if text.lower() not in (*TRUE, *FALSE):
        raise ConfigError(f"--{name}={text}: must be True or False")
    return text.lower() in TRUE


def _get_dtype(name: str) -> Any:
    """Return the dtype of torch that EasyLM calls `name`, or None for an empty name."""
    if not name:
        return None
    if name not in FLOAT_DTYPES:
        raise ConfigError(f"--float_dtype={name}: must be one of {', '.join(FLOAT_DTYPES)}")
    import torch

    return getattr(torch, FLOAT_DTYPES[name])


def _check_output(text: str, flag: str) -> Path:
    """Return the path to write to. Raises `ConfigError` if it exists and isn't an empty folder."""
    refuse_url(text, f"--{flag}={text}", ConfigError)
    path = Path(text).expanduser()
    if flag == "output_dir" and path.is_dir() and not any(path.iterdir()):
        return path
    if path.exists():
        raise ConfigError(
            f"--{flag}={text}: exists already; nothing is overwritten: name another path"
        )
    return path


def _report(output: Path, streaming: bool, config: EasyLMConfig | None = None) -> int:
    """Print the path of the written file and the flags with which EasyLM loads it.

    Returns 0, the exit code.
    """
    prefix = "params" if streaming else "flax_params"
    flags = "" if config is None else f" {describe_flags(config)}"
    print(f"wrote {output}; load it with --load_checkpoint={prefix}::{output}{flags}")
    return 0
