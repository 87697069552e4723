"""Convert EasyLM's weights to Hugging Face directories and back, with one tensor in memory.

EasyLM stores matrices as (in, out), and the rows of q and k in Meta's order, in which the two
elements of a rotary pair are adjacent. A reward model or critic has the scalar head `score/kernel`
instead of a language-model head. Tensors keep their dtype unless another dtype is requested.

    write_hf(source, config, folder, tokenizer="tokenizer.model")
    write_from_hf(model, path)
    write_copy(source, path, dtype=torch.float32)
    write_difference(base, target, path)
"""

from __future__ import annotations

import json
import math
import secrets
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from weft import writing
from weft.checkpoints import hf_io, weight_files
from weft.checkpoints.config_file import has_prefix, is_reward_model
from weft.checkpoints.weight_files import TensorLayout
from weft.compat.easylm.configs import (
    LLAMA_STANDARD_CONFIGS,
    EasyLMConfig,
    find_size_differences,
    from_hf_values,
    to_hf_values,
)
from weft.compat.easylm.streams import (
    StreamSource,
    StreamTensor,
    TensorStream,
    write_tensors,
)
from weft.data.spec import TokenizerSpec, read_template_text
from weft.data.tokenizer import Tokenizer
from weft.data.tokenizer_files import COMMAND
from weft.engine.backends.common import choose_padding, list_special_ids
from weft.engine.spec import ModelSpec
from weft.errors import CheckpointError, ConfigError
from weft.models.network.config import TransformerConfig
from weft.reading import make_folder
from weft.registry import families
from weft.storage.buckets import is_remote
from weft.storage.copies import copy_file, copy_model

Head = Literal["lm", "score"]

EMBEDDING = "transformer/wte/embedding"
LM_HEAD = "lm_head/kernel"
SCORE = "score/kernel"
# (name in EasyLM, in Hugging Face, in Meta's files) of the matrices and norms of a layer
LAYER_NAMES = (
    ("attention/wq", "self_attn.q_proj", "attention.wq"),
    ("attention/wk", "self_attn.k_proj", "attention.wk"),
    ("attention/wv", "self_attn.v_proj", "attention.wv"),
    ("attention/wo", "self_attn.o_proj", "attention.wo"),
    ("feed_forward/w1", "mlp.gate_proj", "feed_forward.w1"),
    ("feed_forward/w2", "mlp.down_proj", "feed_forward.w2"),
    ("feed_forward/w3", "mlp.up_proj", "feed_forward.w3"),
    ("attention_norm", "input_layernorm", "attention_norm"),
    ("ffn_norm", "post_attention_layernorm", "ffn_norm"),
)
MAX_NAMES = 4  # names of tensors in a message
LLAMA3_PADDING = 128255  # EasyLM's padding token for Llama 3, a reserved one
SETTINGS = "easylm.json"  # file with the checkpoint and settings that a directory was made from
REPORT_SECONDS = 10.0  # time between two lines of progress


@dataclass(frozen=True)
class WeightPlace:
    """Names, shape and layout of a weight in EasyLM's, Hugging Face's and Meta's files.

    Attributes:
        name: name in EasyLM's files
        hf: name in Hugging Face's files
        meta: name in Meta's files
        shape: shape in EasyLM's files
        heads: number of heads if the order of rows differs between EasyLM and Hugging Face, else 0
    """

    name: str
    hf: str
    meta: str
    shape: tuple[int, ...]
    heads: int = 0

    @property
    def is_matrix(self) -> bool:
        """True if EasyLM stores the weight as (in, out), and others as (out, in)."""
        return self.name != EMBEDDING and len(self.shape) == 2

    @property
    def hf_shape(self) -> tuple[int, ...]:
        return self.shape[::-1] if self.is_matrix else self.shape

    def to_hf(self, tensor: Tensor) -> Tensor:
        """Return the weight as Hugging Face stores it."""
        if not self.is_matrix:
            return tensor
        if not self.heads:
            return tensor.T
        return tensor.T.unflatten(0, (self.heads, -1, 2)).transpose(1, 2).flatten(0, 2)

    def from_hf(self, tensor: Tensor) -> Tensor:
        """Return the weight as EasyLM stores it."""
        if not self.is_matrix:
            return tensor
        if not self.heads:
            return tensor.T
        return tensor.unflatten(0, (self.heads, 2, -1)).transpose(1, 2).flatten(0, 2).T


def list_weights(config: EasyLMConfig, head: Head) -> list[WeightPlace]:
    """Return the weights of a network, in Hugging Face's order."""
    hidden = config.hidden_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.kv_heads * config.head_dim
    shapes = {
        "wq": (hidden, queries),
        "wk": (hidden, keys),
        "wv": (hidden, keys),
        "wo": (queries, hidden),
        "w1": (hidden, config.intermediate_size),
        "w2": (config.intermediate_size, hidden),
        "w3": (hidden, config.intermediate_size),
    }
    heads = {}
    if not config.use_hf_rotary_emb:
        heads = {"wq": config.num_attention_heads, "wk": config.kv_heads}
    vocabulary = (config.vocab_size, hidden)
    places = [
        WeightPlace(EMBEDDING, "model.embed_tokens.weight", "tok_embeddings.weight", vocabulary)
    ]
    for layer in range(config.num_hidden_layers):
        for name, hf, meta in LAYER_NAMES:
            last = name.rpartition("/")[2]
            places.append(
                WeightPlace(
                    f"transformer/h/{layer}/{name}/kernel",
                    f"model.layers.{layer}.{hf}.weight",
                    f"layers.{layer}.{meta}.weight",
                    shapes.get(last, (hidden,)),
                    heads.get(last, 0),
                )
            )
    places.append(
        WeightPlace("transformer/ln_f/kernel", "model.norm.weight", "norm.weight", (hidden,))
    )
    if head == "score":
        places.append(WeightPlace(SCORE, "score.weight", "", (hidden, 1)))
    elif not config.tie_word_embeddings:
        places.append(WeightPlace(LM_HEAD, "lm_head.weight", "output.weight", vocabulary[::-1]))
    return places


def sort_weights(places: Iterable[WeightPlace]) -> list[WeightPlace]:
    """Return weights in the order of EasyLM's own files, sorted by their keys."""
    return sorted(places, key=lambda place: place.name.split("/"))


# -- EasyLM to Hugging Face


def check_weights(stream: TensorStream, config: EasyLMConfig, head: Head) -> None:
    """Raise `CheckpointError` unless a file has exactly the weights of a network."""
    label = str(stream.source)
    if head == "lm" and SCORE in stream.tensors:
        raise CheckpointError(
            f"{label}: has {SCORE}, the head of a reward model or a critic; set "
            f"--is_reward_model=True"
        )
    if head == "score" and SCORE not in stream.tensors:
        raise CheckpointError(
            f"{label}: has no {SCORE}, the head of a reward model; leave out --is_reward_model"
        )
    places = {place.name: place for place in list_weights(config, head)}
    unexpected = []
    for name, stored in stream.tensors.items():
        place = places.get(name)
        if place is None or place.shape != stored.shape:
            unexpected.append(f"{name} {stored.shape}")
        elif not stored.dtype.is_floating_point:
            raise CheckpointError(f"{label}: {name} is {stored.dtype}, and weights are floats")
    missing = [
        f"{name} {place.shape}" for name, place in places.items() if name not in stream.tensors
    ]
    if not unexpected and not missing:
        return
    problems = []
    if unexpected:
        problems.append(f"has {format_names(unexpected)}")
    if missing:
        problems.append(f"lacks {format_names(missing)}")
    raise CheckpointError(
        f"{label}: {' and '.join(problems)}, unlike a model of this size; "
        f"{_describe_size(stream.tensors)}"
    )


def format_names(names: Sequence[str]) -> str:
    """Return the first names as a list for messages, with the number of the others."""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def _describe_size(tensors: Mapping[str, StreamTensor]) -> str:
    """Return a hint about the size of the network whose weights a file has."""
    embedding = tensors.get(EMBEDDING)
    inner = tensors.get("transformer/h/0/feed_forward/w1/kernel")
    if embedding is None or inner is None or len(embedding.shape) != 2 or len(inner.shape) != 2:
        return "is it the file of a LLaMA model?"
    layers = {name.split("/")[2] for name in tensors if name.startswith("transformer/h/")}
    sizes = (*embedding.shape, inner.shape[1], len(layers))
    fitting = []
    for name, config in LLAMA_STANDARD_CONFIGS.items():
        own = (config.vocab_size, config.hidden_size, config.intermediate_size)
        if sizes == (*own, config.num_hidden_layers):
            fitting.append(name)
    if fitting:
        return f"the file fits the sizes {', '.join(fitting)}"
    return (
        f"the file has vocab_size={sizes[0]}, hidden_size={sizes[1]}, "
        f"intermediate_size={sizes[2]}, num_hidden_layers={sizes[3]}; set what differs by "
        f"--update_llama_config"
    )


def write_hf(
    source: StreamSource,
    config: EasyLMConfig,
    folder: Path,
    *,
    head: Head = "lm",
    dtype: torch.dtype | None = None,
    tokenizer: str | None = None,
    settings: Mapping[str, object] | None = None,
) -> None:
    """Convert a checkpoint of EasyLM to a Hugging Face directory.

    `folder` must be absent or empty, and is created only once it is complete. `tokenizer` is a
    directory, a file or a hub name; its chat template becomes Tulu's. `settings` are written to the
    directory as `easylm.json`. Raises `CheckpointError` if the weights do not fit the
    configuration.
    """
    stream = TensorStream(source)
    check_weights(stream, config, head)
    places = list_weights(config, head)
    layouts: dict[str, TensorLayout] = {}
    for place in places:
        layouts[place.hf] = (dtype or stream.tensors[place.name].dtype, place.hf_shape)

    def convert() -> Iterator[tuple[str, Tensor]]:
        for place in places:
            yield place.hf, place.to_hf(stream.read(place.name)).to(layouts[place.hf][0])

    with replace_folder(folder) as partial:
        network = write_tokenizer(tokenizer, config, head, partial)
        weight_files.write(partial, report_progress(convert(), layouts, folder), layouts)
        stored = weight_files.WeightFiles(partial).dtype
        hf_io.save_config(partial, network, head, dtype=stored)
        if settings is not None:
            write_settings(partial, settings)


def write_tokenizer(
    path: str | None, config: EasyLMConfig, head: Head, folder: Path
) -> TransformerConfig:
    """Write the tokenizer of a model, and return the configuration with its special tokens.

    The chat template is Tulu's, preceded by BOS as in EasyLM's training. With a bare sentencepiece
    model, other texts begin with BOS too, as for Llama 2. Llama 3 gets EasyLM's padding token.
    """
    network = families.get("llama").config(to_hf_values(config))
    if not path:
        return network
    path = copy_tokenizer(path)
    adds_bos = True if path.endswith(".model") else None
    spec = TokenizerSpec(path=path, chat_template="tulu", add_bos_token=adds_bos)
    tokenizer = Tokenizer.load(spec, option=COMMAND)
    hf_io.check_vocabulary(network, tokenizer.vocab_size, "the checkpoint", path)
    if tokenizer.bos_id is not None:
        tokenizer.hf.chat_template = "{{ bos_token }}" + read_template_text("tulu")
    if tokenizer.pad_id is None and tokenizer.vocab_size > LLAMA3_PADDING:
        tokenizer = tokenizer.with_padding(str(tokenizer.hf.convert_ids_to_tokens(LLAMA3_PADDING)))
    tokenizer = choose_padding(tokenizer, ModelSpec(head=head, trained=True), "last")
    tokenizer.save(folder)
    return hf_io.with_ids(network, **list_special_ids(tokenizer, head))


def copy_tokenizer(path: str) -> str:
    """Return the path or hub name of a tokenizer. If it is in a bucket, copy it to this machine."""
    if not is_remote(path):
        return path
    label = f"tokenizer={path}"
    if path.endswith(".model"):
        return str(copy_file(path, label, CheckpointError))
    return str(copy_model(path, label))


def write_settings(folder: Path, settings: Mapping[str, object]) -> None:
    """Write `easylm.json` to a model's directory: the checkpoint and settings it was made from."""
    writing.write(folder / SETTINGS, json.dumps(settings, indent=2) + "\n")


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder that becomes `folder` at the end of the context, or is removed.

    `folder` must be absent or empty.
    """
    make_folder(folder.parent, str(folder), ConfigError)
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}{writing.TEMPORARY}")
    partial.mkdir()
    try:
        yield partial
        writing.rename(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def report_progress(
    tensors: Iterable[tuple[str, Tensor]], layouts: Mapping[str, TensorLayout], target: Path
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors, and print the number of bytes so far to stderr every few seconds."""
    total = sum(math.prod(shape) * dtype.itemsize for dtype, shape in layouts.values())
    num_bytes = 0
    last = time.monotonic()
    for name, tensor in tensors:
        num_bytes += tensor.nbytes
        yield name, tensor
        del tensor  # before the next one is read
        if time.monotonic() - last > REPORT_SECONDS:
            last = time.monotonic()
            share = f"{num_bytes / 1e9:,.1f} of {total / 1e9:,.1f} GB"
            print(f"{target}: {share}", file=sys.stderr, flush=True)


# -- to EasyLM


def write_from_hf(
    model: str,
    path: Path,
    *,
    size: EasyLMConfig | None = None,
    dtype: torch.dtype | None = None,
    streaming: bool = True,
    safetensors_only: bool = False,
) -> EasyLMConfig:
    """Write the weights of a model directory or hub name, and return EasyLM's configuration.

    `size` is the configuration with which EasyLM will load the file, if it is known. A reward model
    is written with its score head. Raises `CheckpointError` for a model that EasyLM cannot run, and
    `ConfigError` if `size` is another network.
    """
    values = hf_io.read_raw(model)
    if has_prefix(model):
        raise CheckpointError(f"{model}: is a trained prefix, and EasyLM has none")
    config = from_hf_values(values, model)
    if size is not None:
        differing = find_size_differences(config, size)
        if differing:
            raise ConfigError(f"{model}: has {', '.join(differing)}, unlike --model_size")
        config = replace(config, use_hf_rotary_emb=size.use_hf_rotary_emb)
    head: Head = "score" if is_reward_model(values) else "lm"
    reader = hf_io.ParameterReader(model, head)
    if safetensors_only and not reader.files.tensors:
        raise CheckpointError(f"{model}: has no safetensors files; leave out --use_safetensors")
    if reader.missing_names:
        raise CheckpointError(f"{model}: has no score.weight, the head of a reward model")
    if reader.pooling == "mean":
        raise CheckpointError(f"{model}: scores the mean of all tokens, and EasyLM the last one")
    places = sort_weights(list_weights(config, head))

    def convert() -> Iterator[tuple[str, Tensor]]:
        for place in places:
            yield place.name, place.from_hf(reader.files.read(reader.to_stored_name(place.hf)))

    dtypes = {}
    for place in places:
        dtypes[place.name] = reader.files.get_dtype(reader.to_stored_name(place.hf))
    shapes = {place.name: place.shape for place in places}
    write_weights(path, shapes, dtypes, convert(), dtype, streaming=streaming)
    return config


# -- copies and differences


def write_copy(
    source: StreamSource, path: Path, *, dtype: torch.dtype | None, streaming: bool
) -> None:
    """Copy the weights of a file, in another dtype or file format.

    Tensors that are not floats keep their dtype.
    """
    stream = TensorStream(source)
    names = sorted(stream.tensors, key=lambda name: name.split("/"))
    dtypes = {name: stream.tensors[name].dtype for name in names}
    shapes = {name: stream.tensors[name].shape for name in names}
    tensors = ((name, stream.read(name)) for name in names)
    write_weights(path, shapes, dtypes, tensors, dtype, streaming=streaming)


def write_difference(
    base: StreamSource,
    target: StreamSource,
    path: Path,
    *,
    recover: bool = False,
    dtype: torch.dtype | None = None,
    streaming: bool = True,
) -> None:
    """Write target - base, or base + target with `recover`, computed in float32 or float64.

    Raises `CheckpointError` unless both files have the same weights.
    """
    first = TensorStream(base)
    second = TensorStream(target)
    names = sorted(second.tensors, key=lambda name: name.split("/"))
    differing = sorted(set(names) ^ set(first.tensors))
    for name in names:
        tensor = first.tensors.get(name)
        if tensor is not None and tensor.shape != second.tensors[name].shape:
            differing.append(name)
    if differing:
        raise CheckpointError(
            f"{base} and {target} differ in names or shapes: {format_names(differing)}"
        )
    dtypes = {}
    for name in names:
        dtypes[name] = torch.promote_types(first.tensors[name].dtype, second.tensors[name].dtype)
        if not dtypes[name].is_floating_point:
            raise CheckpointError(f"{target}: {name} is {dtypes[name]}, and weights are floats")

    def compute() -> Iterator[tuple[str, Tensor]]:
        for name in names:
            wide = torch.promote_types(dtypes[name], torch.float32)
            weight = second.read(name).to(wide)
            weight.add_(first.read(name), alpha=1 if recover else -1)
            yield name, weight
            del weight  # before the next one is read

    shapes = {name: second.tensors[name].shape for name in names}
    write_weights(path, shapes, dtypes, compute(), dtype, streaming=streaming)


def write_weights(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype | None,
    *,
    streaming: bool,
) -> None:
    """Write the weights as floats of `dtype`, or in `dtypes` if it is None.

    Tensors that are not floats are always written in their dtype in `dtypes`. `tensors` may yield
    tensors of other dtypes; they are cast.
    """
    layouts: dict[str, TensorLayout] = {}
    for name, shape in shapes.items():
        stored = dtypes[name]
        if dtype is not None and stored.is_floating_point:
            stored = dtype
        layouts[name] = (stored, shape)

    def cast() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            yield name, tensor.to(layouts[name][0])
            del tensor  # before the next one is read

    make_folder(path.parent, str(path), ConfigError)
    write_tensors(path, layouts, report_progress(cast(), layouts, path), streaming=streaming)
