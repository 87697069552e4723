"""Models for training: Hugging Face directories that are converted from streams once and reused.

    prepare_model("params::FILE", "7b", "", tokenizer, folder)       # folder/FILE@0123456789ab

The name of a directory depends only on the contents of the stream and the tokenizer and on the
settings. If the stream is copied again or read on another machine, the name stays the same. The
configuration of a run records this name without the path (`weft.storage.copies`), so that the run
can be resumed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

import torch

from weft.checkpoints import hf_io
from weft.compat.easylm.checkpoints import (
    Head,
    check_weights,
    copy_tokenizer,
    replace_folder,
    write_hf,
    write_settings,
    write_tokenizer,
)
from weft.compat.easylm.configs import EasyLMConfig, check_trainable, load_llama_config
from weft.compat.easylm.streams import TensorStream, find_source, open_stream
from weft.errors import CheckpointError
from weft.reading import explain_read_errors
from weft.storage.copies import VERSION_DIGITS
from weft.writing import write

# bytes that identify a file, at the beginning, middle and end of each part of a tensor
BLOCK_BYTES = 1 << 14
TOKENIZER_SUFFIXES = (".json", ".model", ".txt", ".jinja")
STAND_IN = "model.safetensors"  # empty file in place of the weights, which plans do not read


@dataclass(frozen=True)
class ModelPlan:
    """Plan of the directory `name` that `prepare_model` writes.

    `stream` is None for a model without weights. `settings` are written to the directory.
    """

    stream: TensorStream | None
    config: EasyLMConfig
    head: Head
    settings: Mapping[str, object]
    name: str


def locate_model(
    load_checkpoint: str,
    config: str,
    update: str,
    tokenizer: str | None,
    folder: Path,
    *,
    is_reward_model: bool = False,
) -> Path:
    """Return the directory that `prepare_model` returns for the same arguments, without writing."""
    head: Head = "score" if is_reward_model else "lm"
    return folder / _plan_model(load_checkpoint, config, update, tokenizer, head).name


def prepare_model(
    load_checkpoint: str,
    config: str,
    update: str,
    tokenizer: str | None,
    folder: Path,
    *,
    is_reward_model: bool = False,
    weights: bool = True,
) -> Path:
    """Return a Hugging Face directory below `folder` with the model that EasyLM's flags describe.

    `load_checkpoint`, `config` and `update` are the values of the flags `load_checkpoint`,
    `load_llama_config` and `update_llama_config`. The weights of a train state are used, but not
    its optimizer. Without a checkpoint, the directory has only a configuration and a tokenizer, for
    `init_from_scratch`. Without `weights`, an empty file replaces them, which is enough for a plan.
    An existing directory is reused if the contents of the checkpoint and the tokenizer and the
    settings are the same. Raises `UserError` for a checkpoint or settings that cannot be used.
    """
    head: Head = "score" if is_reward_model else "lm"
    plan = _plan_model(load_checkpoint, config, update, tokenizer, head)
    target = folder / plan.name
    if (target / hf_io.CONFIG).is_file():
        return target
    try:
        if plan.stream is None or not weights:
            _write_without_weights(plan, tokenizer, target)
        else:
            source = plan.stream.source
            if source.kind == "trainstate":
                print(f"load_checkpoint={source}: its optimizer state is not used", file=sys.stderr)
            write_hf(
                source,
                plan.config,
                target,
                head=head,
                tokenizer=tokenizer or None,
                settings=plan.settings,
            )
    except OSError:
        if not (target / hf_io.CONFIG).is_file():  # another process may have been faster
            raise
    return target


def _write_without_weights(plan: ModelPlan, tokenizer: str | None, target: Path) -> None:
    """Check the shapes in the stream, and write the configuration, tokenizer and settings."""
    dtype = torch.float32
    if plan.stream is not None:
        check_weights(plan.stream, plan.config, plan.head)
        dtypes: Counter[torch.dtype] = Counter()
        for tensor in plan.stream.tensors.values():
            dtypes[tensor.dtype] += prod(tensor.shape)
        dtype = dtypes.most_common(1)[0][0]
    with replace_folder(target) as partial:
        network = write_tokenizer(tokenizer or None, plan.config, plan.head, partial)
        if plan.stream is not None:
            write(partial / STAND_IN, "")
        hf_io.save_config(partial, network, plan.head, dtype=dtype)
        write_settings(partial, plan.settings)


def _plan_model(
    load_checkpoint: str, config: str, update: str, tokenizer: str | None, head: Head
) -> ModelPlan:
    network = load_llama_config(config, update)
    check_trainable(network, f"load_llama_config={config} update_llama_config={update}")
    stream = None
    if load_checkpoint:
        stream = TensorStream(find_source(load_checkpoint, value=head == "score"))
    content: dict[str, object] = {
        "checkpoint": _compute_digest(stream) if stream is not None else "",
        "config": asdict(network),
        "tokenizer_files": _describe_tokenizer(tokenizer or ""),
        "head": head,
    }
    text = json.dumps(content, sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()[:VERSION_DIGITS]
    stem = "random" if stream is None else stream.source.path.name
    settings = {
        "load_checkpoint": str(stream.source if stream is not None else ""),
        "tokenizer": tokenizer or "",
        **content,
    }
    return ModelPlan(stream, network, head, settings, f"{stem}@{key}")


def _compute_digest(stream: TensorStream) -> str:
    """Return a hash that identifies a weight file.

    It covers the size of the file, the name, dtype and shape of each tensor, and three blocks of
    each part of a tensor. Blocks are enough to tell files apart, because training changes values
    everywhere in a tensor. Hashing all bytes of a file of 26 GB would take minutes at each start.
    """
    digest = hashlib.sha256()
    source = stream.source
    with explain_read_errors(str(source), CheckpointError), open_stream(source.path) as file:
        digest.update(str(file.seek(0, 2)).encode())
        for name, tensor in stream.tensors.items():
            digest.update(f"\n{name} {tensor.dtype} {tensor.shape}\n".encode())
            for start, size in tensor.parts:
                for offset in (0, size // 2, max(0, size - BLOCK_BYTES)):
                    file.seek(start + offset)
                    digest.update(file.read(min(BLOCK_BYTES, size - offset)))
    return digest.hexdigest()


def _describe_tokenizer(tokenizer: str) -> dict[str, str]:
    """Return the kind of a tokenizer (file, folder) and the hash of each file, or its hub name."""
    if not tokenizer:
        return {}
    place = Path(copy_tokenizer(tokenizer)).expanduser()
    if not place.exists():
        return {"hub": tokenizer}
    # With a bare sentencepiece file, texts begin with BOS. A folder has its own setting for that.
    described = {"kind": "file" if place.is_file() else "folder"}
    for file in [place] if place.is_file() else sorted(place.iterdir()):
        is_read = file.suffix in TOKENIZER_SUFFIXES and not file.name.startswith(".")
        if place.is_file() or (is_read and file.is_file()):
            with explain_read_errors(f"tokenizer={tokenizer}", CheckpointError):
                described[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return described
