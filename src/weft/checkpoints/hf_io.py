"""Read and write Hugging Face model directories.

    family, config = read_config(path)                  # config.json; a hub name is downloaded
    network = load(path, "lm", device=..., dtype=...)   # missing value and score heads are new
    network = init_random(config, "lm", seed=1)         # depends only on seed and parameter names
    save(directory, find_canonical_values(network), config, "lm")   # weights and configuration
    reader = ParameterReader(path)
    reader.read("blocks.3.attention.q.weight", where)   # reads only the bytes of `where`

A value or score head is saved as `transformers` saves it for `AutoModelForSequenceClassification`
with `num_labels=1`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft import randomness
from weft.checkpoints import weight_files
from weft.checkpoints.config_file import (
    MEAN_POOLED,
    find_family,
    find_shipped_config,
    prefix_errors,
    read_config_file,
    read_prefix,
)
from weft.checkpoints.prefix_io import PrefixReader
from weft.checkpoints.weight_files import SHARD_BYTES, TensorLayout, WeightFiles
from weft.errors import CheckpointError, find_nearest
from weft.models.families.base import Family
from weft.models.families.keymap import CheckpointRectangle, Key, list_rectangles
from weft.models.network.config import TransformerConfig
from weft.models.network.linear import find_canonical_values as canonical_values
from weft.models.network.transformer import Head, Pooling, Transformer
from weft.reading import check_folder, refuse_url
from weft.registry import families
from weft.storage.copies import complete, copy_if_remote, find_url
from weft.topology import Slice, build_whole_slice

CONFIG = "config.json"
GENERATION = "generation_config.json"
# config.json key for score heads on the mean over tokens; transformers has none
POOLING = "weft_pooling"
GENERATION_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
MAX_LISTED = 8  # maximum number of names in a message
# By repr, because a user's family can put lists into a configuration, which have no hash.
_shapes: dict[tuple[str, str], Mapping[str, tuple[int, ...]]] = {}


# -- configuration


def resolve(path: str | Path) -> Path:
    """Return the directory of a model: `path` itself, or the downloaded snapshot of a hub name.

    Downloads the snapshot if it is not in the cache. Raises `CheckpointError` if `path` is neither
    a directory nor a hub name that can be downloaded.
    """
    path = copy_if_remote(str(path))
    directory = Path(path).expanduser()
    complete(directory)  # copies the weights if this is an incomplete copy from a bucket
    if directory.is_dir():
        check_folder(directory, str(path), CheckpointError)
        return directory
    refuse_url(path, str(path), CheckpointError)
    if directory.exists() or str(path).startswith((".", "/", "~")) or str(path).count("/") > 1:
        raise CheckpointError(f"{path} is not a directory with a model in it")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        snapshot = Path(
            snapshot_download(
                str(path), allow_patterns=patterns, ignore_patterns=["*/*", "consolidated*"]
            )
        )
        if not any(snapshot.glob("*.safetensors")):
            snapshot_download(
                str(path), allow_patterns=["*.bin", "*.bin.index.json"], ignore_patterns=["*/*"]
            )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(_explain_failed_download(path, error)) from error
    return snapshot


def find_weights(path: str | Path) -> Path:
    """Return the directory with a model's weights.

    For a trained prefix (from prefix tuning), this is the directory of the base model.
    """
    directory = resolve(path)
    prefix = read_prefix(directory)
    return directory if prefix is None else resolve(prefix.base)


def find_config_file(path: str | Path) -> Path:
    """Return the path of a model's config.json.

    For a trained prefix, this is the file of the base model. For a hub name, only this file is
    downloaded. Raises `CheckpointError` if `path` is neither a directory nor a hub name that can be
    downloaded.
    """
    if find_url(path) is not None and (Path(path) / CONFIG).is_file():
        return Path(path) / CONFIG  # the weights need not be copied
    if (
        Path(path).expanduser().exists()
        or str(path).startswith((".", "/", "~"))
        or str(path).count("/") > 1
    ):
        directory = resolve(path)
        return (directory if (directory / CONFIG).is_file() else find_weights(directory)) / CONFIG
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    try:
        return Path(hf_hub_download(str(path), CONFIG))
    except EntryNotFoundError as error:
        if isinstance(error, LocalEntryNotFoundError):  # the hub does not answer
            raise CheckpointError(_explain_failed_download(path, error)) from error
        return resolve(path) / CONFIG  # a missing file is reported by the caller
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise CheckpointError(_explain_failed_download(path, error)) from error


def _explain_failed_download(path: str | Path, error: Exception) -> str:
    return f"{path} is neither a directory nor a model that the hub hands out: {error}"


def read_raw(path: str | Path) -> dict[str, Any]:
    """Return the values of a model's config.json.

    For a trained prefix, these are the values of the base model. Raises `CheckpointError` if there
    is no config.json.
    """
    shipped = find_shipped_config(str(path))
    if shipped is not None:
        return shipped
    file = find_config_file(path)
    if not file.exists():
        raise CheckpointError(
            f"{path} has no {CONFIG}; a model directory holds {CONFIG}, weights and tokenizer files"
        )
    return read_config_file(file, _format_config_path(path))


def _format_config_path(path: str | Path) -> str:
    """Return the path of a model's config.json for messages.

    It starts with the path that the user typed or, for a trained prefix (from prefix tuning), with
    the path of the base model.
    """
    prefix = read_prefix(path)
    return str(Path(path if prefix is None else prefix.base) / CONFIG)


def read_config(path: str | Path, type: str | None = None) -> tuple[Family, TransformerConfig]:
    """Return the model family and the configuration of a model directory or hub name.

    `type` is the name of the family, if it differs from the `model_type` in config.json. Raises
    `CheckpointError` if config.json is missing or invalid, or if there is no such family.
    """
    raw = read_raw(path)
    prefix = read_prefix(path)
    with prefix_errors(_format_config_path(path)):
        family = find_family(raw, type)
        config = family.config(raw)
    return family, replace(config, prefix_tokens=0 if prefix is None else prefix.num_tokens)


def check_vocabulary(
    config: TransformerConfig, tokenizer_size: int, model: str, tokenizer: str
) -> None:
    """Raise `CheckpointError` if the model has no embedding for some of the tokenizer's ids.

    `model` and `tokenizer` are the paths or names to show in the message.
    """
    if tokenizer_size > config.vocab_size:
        raise CheckpointError(
            f"{model} has a vocabulary of {config.vocab_size}, its tokenizer {tokenizer} one of "
            f"{tokenizer_size}: some token ids have no embedding; take the tokenizer that belongs "
            "to the model"
        )


# -- reading


class ParameterReader:
    """Reader of the parameters in a model directory, by canonical name.

    Canonical names, such as `blocks.3.attention.q.weight`, are the same for all model families. The
    constructor checks that the names and shapes of all tensors match the model's configuration.
    Reading a slice of a parameter reads only the bytes of that slice; `bytes_read` counts the bytes
    read so far.
    """

    def __init__(self, path: str | Path, head: Head = "lm", type: str | None = None) -> None:
        self.directory = resolve(path)
        raw = read_raw(self.directory)
        self.family, self.config = read_config(self.directory, type)
        self.pooling: Pooling = "mean" if raw.get(POOLING) == "mean" else "last"
        self.files = WeightFiles(find_weights(self.directory))
        self._names = frozenset(self.files.names)
        if self.config.num_layers > len(self._names):
            raise CheckpointError(
                f"{self.directory}: config.json says {self.config.num_layers:,} layers, and the "
                f"files hold {len(self._names)} tensors; is config.json the one that belongs to "
                "the weights?"
            )
        self.shapes = compute_parameter_shapes(self.config, head)
        self.keymap = self.family.keymap(self.config, head)
        prefix = self.family.prefix
        self._lacks_prefix = bool(prefix) and not any(
            stored.startswith(prefix) for stored in self.files.names
        )
        _check_names(self)
        settings = read_prefix(self.directory)
        if settings is None:
            prefix_reader: PrefixReader | tuple[()] = ()
        else:
            prefix_reader = PrefixReader(self.directory, settings, self.config, self.family.score)
        self._prefix_reader = prefix_reader
        self.missing_names = []
        for name, key in self.keymap.keys.items():
            is_missing = any(hf not in self for hf in key.list_hf_names())
            if is_missing and name not in prefix_reader:
                self.missing_names.append(name)

    def __contains__(self, hf: object) -> bool:
        return isinstance(hf, str) and self.to_stored_name(hf) in self._names

    @property
    def bytes_read(self) -> int:
        return self.files.bytes_read

    @property
    def dtype(self) -> torch.dtype:
        """Most common dtype of the weights, by number of elements."""
        return self.files.dtype

    def to_stored_name(self, hf: str) -> str:
        """Return the name of the Hugging Face parameter `hf` in the weight files.

        The two names differ if the checkpoint was saved without a head: the names in the weight
        files then lack the family's prefix, such as `model.`.
        """
        return hf.removeprefix(self.family.prefix) if self._lacks_prefix else hf

    def read(self, name: str, where: Slice | None = None) -> Tensor:
        """Return the slice `where` of a parameter, in the dtype of the files.

        `where` has a `slice` for each dimension; None means the whole parameter. Raises
        `CheckpointError` if the parameter is unknown or missing.
        """
        if self._prefix_reader and name in self._prefix_reader:
            return self._prefix_reader.read(name, where)
        if name not in self.keymap.keys or name in self.missing_names:
            similar = find_nearest(name, self.keymap.keys)
            raise CheckpointError(
                f"{self.directory} holds no parameter {name!r}; nearest: {', '.join(similar)}"
            )
        key = self.keymap.keys[name]
        shape = self.shapes[name]
        where = build_whole_slice(shape) if where is None else where
        sliced_shape = tuple(each.stop - each.start for each in where)
        parameter: Tensor | None = None
        for piece in list_rectangles(key, shape, where):
            part = self.files.read(self.to_stored_name(piece.hf), piece.source)
            part = part.T if key.transpose and part.dim() == 2 else part
            part = part[None] if piece.expert is not None else part
            if part.shape == sliced_shape:
                return part
            if parameter is None:
                parameter = torch.empty(sliced_shape, dtype=part.dtype)
            # `piece.target` is relative to the whole parameter, `parameter` is only its slice.
            target = tuple(
                slice(each.start - sliced.start, each.stop - sliced.start)
                for each, sliced in zip(piece.target, where, strict=True)
            )
            parameter[target] = part
        assert parameter is not None, "a parameter has at least one piece"
        return parameter


def _check_names(reader: ParameterReader) -> None:
    """Raise `CheckpointError` unless the files have exactly the model's tensors and shapes.

    Heads are exempt: a missing score head is initialized later, and a head that is not needed is
    ignored. The dtypes must be floating-point.
    """
    family = reader.family
    config = reader.config
    directory = reader.directory
    required = reader.keymap.group_by_hf_name()
    heads = set[str]()
    for head in ("lm", "score"):
        heads.update(family.keymap(config, head).group_by_hf_name())
    heads |= {"lm_head.weight", "embed_out.weight"} if config.tied else set()
    known_names = {reader.to_stored_name(name) for name in {*required, *heads}}
    # Find tensors of the files that the model does not have.
    unknown = []
    for name in reader.files.names:
        if name not in known_names and not name.endswith(family.buffers):
            unknown.append(name)
    if unknown:
        raise CheckpointError(
            f"{directory} holds {_format_names(unknown)}, which a {family.name} model with this "
            "config.json does not have; is config.json the one that belongs to the weights?"
        )
    # Find tensors of the model that the files do not have.
    missing = [name for name in required if name not in reader and name != family.score]
    if missing:
        raise CheckpointError(
            f"{directory} lacks {_format_names(missing)}, which a {family.name} model with this "
            "config.json has"
        )
    # Check the dtypes and shapes of the other tensors.
    reader.files.check_floats(reader.to_stored_name(name) for name in required if name in reader)
    for name, keys in required.items():
        expected = keys[0].compute_hf_shape(reader.shapes[keys[0].name])
        if name in reader and reader.files.get_shape(reader.to_stored_name(name)) != expected:
            raise CheckpointError(
                f"{directory}: {name} is {reader.files.get_shape(reader.to_stored_name(name))}, "
                f"config.json asks for {expected}"
            )


def _format_names(names: list[str]) -> str:
    remainder = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + remainder


def load(
    path: str | Path,
    head: Head = "lm",
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    pooling: Pooling | None = None,
    type: str | None = None,
    seed: int = 0,
) -> Transformer:
    """Load the network from a model directory or hub name, in `dtype`.

    If the checkpoint lacks a value or score head, `initialize_parameter` initializes the head,
    using `seed`. `pooling` defaults to the setting in config.json, or to the last token.
    """
    reader = ParameterReader(path, head, type)
    network = Transformer.build_empty(
        reader.config, head, pooling or reader.pooling, device=device, dtype=dtype
    )
    for name, values in canonical_values(network).items():
        if name in reader.missing_names:
            initialize_parameter(name, values, reader.config, head, seed)
        else:
            values.copy_(reader.read(name))
    return network


# -- new weights


def init_random(
    config: TransformerConfig,
    head: Head = "lm",
    *,
    seed: int,
    pooling: Pooling = "last",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Transformer:
    """Return a network with random weights.

    In one configuration, the values of a parameter depend only on `seed` and the parameter's name,
    so an actor and its reference start with the same weights.
    """
    network = Transformer.build_empty(config, head, pooling, device=device, dtype=dtype)
    for name, values in canonical_values(network).items():
        initialize_parameter(name, values, config, head, seed)
    return network


def initialize_parameter(
    name: str, parameter: Tensor, config: TransformerConfig, head: Head, seed: int
) -> None:
    """Initialize a parameter in place.

    Random values are drawn in float32 on the CPU, so that they are the same on every device.

    Matrices and embeddings are normal with standard deviation `initializer_range`. For matrices
    that write into the residual stream (o, down), this value is divided by sqrt(2 layers) (Radford
    et al. 2019, section 2.3). Norms start as the identity, and biases at 0. A score head is normal
    with standard deviation 1/sqrt(hidden + 1) (Stiennon et al. 2020, appendix B), so that scores
    have about unit variance. A value head starts at 0, so that an untrained critic adds no noise to
    the first advantages.
    """
    with torch.no_grad():
        parameter.copy_(compute_initial_values(name, tuple(parameter.shape), config, head, seed))


def compute_initial_values(
    name: str, shape: tuple[int, ...], config: TransformerConfig, head: Head, seed: int
) -> Tensor:
    """Return the values that `initialize_parameter` assigns, in float32 on the CPU."""
    if name.endswith(".bias") or (head == "value" and name == "score.weight"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.full(shape, 0.0 if config.norm == "rms_plus_one" else 1.0)
    low, high = randomness.derive_key(seed, "init", id=name)
    generator = torch.Generator().manual_seed(int(low) | int(high) << 32)
    std = config.initializer_range
    if name == "score.weight":
        std = 1.0 / math.sqrt(shape[1] + 1)
    elif name.endswith((".attention.o.weight", ".down.weight")):
        std /= math.sqrt(2 * config.num_layers)
    return torch.randn(shape, generator=generator, dtype=torch.float32) * std


def compute_parameter_shapes(
    config: TransformerConfig, head: Head = "lm"
) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of every parameter, by canonical name, without allocating the parameters."""
    key = repr(config), head
    if key not in _shapes:
        with torch.device("meta"):
            parameters = canonical_values(Transformer(config, head))
        _shapes[key] = {name: tuple(values.shape) for name, values in parameters.items()}
    return _shapes[key]


# -- writing


def save(
    directory: str | Path,
    parameters: Mapping[str, Tensor],
    config: TransformerConfig,
    head: Head = "lm",
    *,
    dtype: torch.dtype | None = None,
    pooling: Pooling = "last",
    family: Family | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model directory that `transformers` can load: weights and configuration files.

    `parameters` have canonical names (weft's own). They are written in `dtype`, or in their own
    dtypes if it is None. The mapping may load each parameter on access: only the parameters of one
    checkpoint tensor are held at a time.

    In an existing generation_config.json, only the special tokens are updated. Each file has a
    temporary name until it is complete, and config.json is written last, so a directory with a
    config.json is complete. Raises `RunError` if writing fails.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    family = family or families.get(config.family)
    values = family.to_hf(config, head)
    shapes = compute_parameter_shapes(config, head)
    keymap = family.keymap(config, head)
    assert set(parameters) == set(keymap.keys), (
        f"parameters differ from the key map: {set(parameters) ^ set(keymap.keys)}"
    )
    # Write the tensors of the same parameter, such as the matrices of experts, one after another.
    keys_by_tensor = keymap.group_by_hf_name()
    positions = {name: number for number, name in enumerate(keymap.keys)}
    keys_by_tensor = dict(
        sorted(keys_by_tensor.items(), key=lambda each: positions[each[1][0].name])
    )
    layouts: dict[str, TensorLayout] = {}
    for name, keys in keys_by_tensor.items():
        shape = keys[0].compute_hf_shape(shapes[keys[0].name])
        layouts[name] = (dtype or parameters[keys[0].name].dtype, shape)

    def convert_tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in assemble(keys_by_tensor, parameters, shapes):
            yield name, tensor.to(layouts[name][0])
            del tensor  # free it before the next one is assembled

    weight_files.write(folder, convert_tensors(), layouts, shard_bytes=shard_bytes)
    _write_config(folder, values, head, next(iter(layouts.values()))[0], pooling)


def save_config(
    directory: str | Path,
    config: TransformerConfig,
    head: Head,
    *,
    dtype: torch.dtype,
    pooling: Pooling = "last",
) -> None:
    """Write config.json and generation_config.json, but no weights.

    They equal the files that `save` writes.
    """
    _write_config(
        Path(directory), families.get(config.family).to_hf(config, head), head, dtype, pooling
    )


def _write_config(
    folder: Path, values: dict[str, Any], head: Head, dtype: torch.dtype, pooling: Pooling
) -> None:
    values["dtype"] = str(dtype).removeprefix("torch.")
    values.pop(POOLING, None)
    if pooling == "mean" and head == "score":
        values |= {POOLING: "mean", "architectures": [MEAN_POOLED]}
    token_ids = {}
    for key in GENERATION_KEYS:
        if values.get(key) is not None:
            token_ids[key] = values[key]
    file = folder / GENERATION
    stored = json.loads(file.read_text()) if file.is_file() else {}
    write_generation(folder, {**stored, **token_ids})
    _write_json(folder / CONFIG, values)


def write_mean_pooled_architecture(directory: Path) -> None:
    """Set `architectures` in a saved config.json to weft's class of mean-pooled reward models.

    This replaces a class of `transformers` that would read the score at the last token.
    """
    _write_json(directory / CONFIG, read_raw(directory) | {"architectures": [MEAN_POOLED]})


def write_generation(directory: str | Path, values: Mapping[str, Any]) -> None:
    """Write generation_config.json atomically. Raises `RunError` if writing fails."""
    _write_json(Path(directory) / GENERATION, values)


def _write_json(file: Path, values: Mapping[str, Any]) -> None:
    weight_files.write_text(file, json.dumps(values, indent=2, sort_keys=True) + "\n")


def assemble(
    keys_by_tensor: Mapping[str, list[Key]],
    parameters: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for each checkpoint tensor, assembled from `parameters`.

    `keys_by_tensor` maps the name of each checkpoint tensor to the keys of the parameters in it. A
    `Key` names a parameter and describes its place in the checkpoint. `shapes` are the shapes of
    the parameters. One tensor is held at a time.
    """
    pieces_by_tensor: dict[str, list[tuple[Key, CheckpointRectangle]]] = {
        name: [] for name in keys_by_tensor
    }
    for key in {key.name: key for keys in keys_by_tensor.values() for key in keys}.values():
        for piece in list_rectangles(key, shapes[key.name]):
            pieces_by_tensor[piece.hf].append((key, piece))
    for name, parts in pieces_by_tensor.items():
        whole_tensor: Tensor | None = None
        for key, piece in parts:
            parameter = parameters[key.name].detach()
            part = parameter[piece.target]
            part = part[0] if piece.expert is not None else part
            part = part.T if key.transpose and part.dim() == 2 else part
            shape = key.compute_hf_shape(tuple(parameter.shape))
            if tuple(part.shape) == shape:
                whole_tensor = part
                break
            if whole_tensor is None:
                whole_tensor = part.new_empty(shape)
            whole_tensor[piece.source] = part
        assert whole_tensor is not None, name
        yield name, whole_tensor
        del parameter, part, whole_tensor  # free them before the next ones are read


def with_ids(config: TransformerConfig, **ids: Any) -> TransformerConfig:
    """Return a copy of the configuration with other special token ids.

    `ids` can have the keys `bos_token_id`, `eos_token_id` and `pad_token_id`. An id of None removes
    the token.
    """
    unknown = set(ids) - set(GENERATION_KEYS)
    assert not unknown, f"no token ids: {unknown}"
    extra = dict(config.extra)
    for key, value in ids.items():
        if value is None:
            extra.pop(key, None)
        else:
            extra[key] = value
    return replace(config, extra=extra)
