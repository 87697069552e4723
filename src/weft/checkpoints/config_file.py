"""Read and check settings of models and trained prefixes, and choose the backend, without torch.

Values that no model can have, such as a negative width, are refused.

    values = read_config_file(directory / "config.json", "critic.path=DIR/config.json")
    with prefix_errors("critic.path=DIR/config.json"): ...   # errors raised inside start with this
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import weft
from weft.checkpoints.names import ADAPTER, CONFIG, HUB_NAME
from weft.errors import CheckpointError, find_nearest
from weft.models.families import LAYER_KEYS, MAX_LAYERS, SIZE_LIMIT
from weft.reading import read_model_object, read_object, shorten
from weft.registry import families

if TYPE_CHECKING:
    from weft.models.families.base import Family

WIDTHS = ("hidden_size", "vocab_size", "n_embd")
FLAGS = ("tie_word_embeddings", "use_cache")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
DTYPE = ("torch_dtype", "dtype")
DTYPES = frozenset(
    {
        "auto",
        "float16",
        "half",
        "bfloat16",
        "float32",
        "float",
        "float64",
        "double",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn_x2",
    }
)
MAX_SHOWN = 60  # maximum number of characters of a value in a message


def read_config_file(file: Path, where: str) -> dict[str, Any]:
    """Return the values of a config.json, after checking them.

    `where` names the option and the file as the user typed them. Raises `CheckpointError` if the
    file is unreadable or a value is invalid; the message starts with `where`.
    """
    values = read_model_object(file, where, CheckpointError)
    for key, value in values.items():
        rule = find_problem(key, value)
        if rule is not None:
            raise CheckpointError(
                f"{where}: {key}={shorten(repr(value), MAX_SHOWN)}: it must be {rule}"
            )
    return values


@contextmanager
def prefix_errors(where: str) -> Iterator[None]:
    """Prefix the message of any `CheckpointError` raised in the `with` block with `where`."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error


@contextmanager
def prefix_option(option: str) -> Iterator[None]:
    """Prefix the message of any `CheckpointError` raised in the `with` block with `OPTION=`.

    `option` is the name of the option that set the path. For `critic.path`, the message becomes
    `critic.path=DIR/config.json: ...`.
    """
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{option}={error}") from error


def find_family(raw: Mapping[str, Any], type: str | None = None) -> Family:
    """Return the model family that a config.json names, or the family `type` if given.

    Raises `CheckpointError` for an unknown family; the message suggests similar names.
    """
    name = type or raw.get("model_type")
    if name is None:
        raise CheckpointError("names no model_type; set type to the model's family")
    if not isinstance(name, str):
        raise CheckpointError(f"model_type={name!r}: it must be a text, the model's family")
    if name not in families.load_all():
        similar = find_nearest(name, families.list_names())
        if similar:
            hint = f"nearest: {', '.join(similar)}"
        else:
            hint = f"weft's own: {', '.join(families.list_names())}"
        raise CheckpointError(
            f"no family for models of type {name!r} ({hint}); backend=hf runs any decoder that "
            f"transformers knows"
        )
    return families.get(name)


def find_problem(key: str, value: Any) -> str | None:
    """Return a phrase that describes the valid values of `key`, or None if `value` is valid.

    For example, the phrase is "a finite number" if `value` is infinite. Only keys that most models
    have are checked.
    """
    if value is None:
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number"
    if key in LAYER_KEYS or key in WIDTHS:
        return _find_size_problem(value, MAX_LAYERS if key in LAYER_KEYS else SIZE_LIMIT - 1)
    if key in TOKEN_IDS:
        can_be_list = key == "eos_token_id"
        ids = value if can_be_list and isinstance(value, list) else [value]
        if all(type(each) is int for each in ids):
            return None
        return "a whole number, or a list of them" if can_be_list else "a whole number"
    if key in FLAGS:
        return None if isinstance(value, bool) else "true or false"
    if key in DTYPE:
        is_valid = isinstance(value, Mapping) or (
            isinstance(value, str) and value.removeprefix("torch.") in DTYPES
        )
        if is_valid:
            return None
        return "a floating dtype of torch, such as bfloat16, or absent"
    if key == "architectures":
        is_valid = isinstance(value, list) and all(isinstance(each, str) for each in value)
        return None if is_valid else "a list of names of classes"
    return None


def _find_size_problem(value: Any, maximum: int) -> str | None:
    """Return a phrase that describes valid sizes, or None if `value` is from 1 to `maximum`."""
    if type(value) is int and 0 < value <= maximum:
        return None
    return f"a whole number, 1 to {maximum:,}"


HF_BACKEND = "hf"  # backend for model types without a weft family
TORCH_BACKEND = "torch"
JAX_BACKEND = "jax"  # the networks of weft's families on JAX
# Architecture of reward models that score the mean over tokens. transformers does not know it, so
# other programs refuse the model instead of reading the score at the last token.
MEAN_POOLED = "WeftMeanPooledRewardModel"
SCORE_ARCHITECTURES = ("ForSequenceClassification", MEAN_POOLED)  # architectures of reward models
# types of bidirectional and encoder-decoder models, which no backend of weft runs
NON_DECODER_TYPES = frozenset(
    (
        "albert",
        "bart",
        "bert",
        "bigbird",
        "camembert",
        "canine",
        "convbert",
        "deberta",
        "deberta-v2",
        "distilbert",
        "electra",
        "ernie",
        "eurobert",
        "funnel",
        "ibert",
        "layoutlm",
        "longformer",
        "luke",
        "mbart",
        "megatron-bert",
        "mobilebert",
        "modernbert",
        "mpnet",
        "mt5",
        "nezha",
        "nystromformer",
        "roberta",
        "roberta-prelayernorm",
        "roformer",
        "squeezebert",
        "t5",
        "umt5",
        "xlm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xlnet",
        "xmod",
        "yoso",
    )
)


@cache
def read_shipped_configs() -> dict[str, dict[str, Any]]:
    """Return the built-in config.json values of the models in weft's recipes, by hub name."""
    models: dict[str, dict[str, Any]] = json.loads(
        (Path(weft.__file__).parent / "recipes" / "models.json").read_text()
    )
    return models


def find_shipped_config(path: str) -> dict[str, Any] | None:
    """Return the built-in config.json values of a recipe's model, or None for other models.

    They are used to plan a run before the model is downloaded. The result is also None if the
    model's own config.json is on this machine.
    """
    if path not in read_shipped_configs() or Path(path).exists():
        return None
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(path, CONFIG), str):
        return None
    return dict(read_shipped_configs()[path])


def read_config_values(path: str) -> Mapping[str, Any]:
    """Return the values of a model's config.json, without downloading anything.

    `path` is a model directory or a hub name. The values are read from the directory, from the
    hub's local cache, or from weft's built-in configurations. For a trained prefix (from prefix
    tuning), they are those of the base model. Returns an empty mapping if no values are found.
    Raises `CheckpointError` if the file is invalid; the message starts with its path.
    """
    directory = Path(path).expanduser()
    if not directory.is_dir() and HUB_NAME.fullmatch(path):
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(path, CONFIG)
        directory = Path(cached).parent if isinstance(cached, str) else directory
    if (directory / CONFIG).is_file():
        return read_config_file(directory / CONFIG, str(Path(path) / CONFIG))
    prefix = read_prefix(directory)
    if prefix is None:
        return find_shipped_config(path) or {}
    return read_config_values(prefix.base)


def is_reward_model(values: Mapping[str, Any]) -> bool:
    """Return whether the `values` of a config.json describe a reward model."""
    architectures = values.get("architectures") or []
    return any(
        score_architecture in str(architecture)
        for architecture in architectures
        for score_architecture in SCORE_ARCHITECTURES
    )


def choose_backend(values: Mapping[str, Any]) -> str:
    """Return the backend for a model: `torch`, or `hf` if weft does not implement its type."""
    model_type = values.get("model_type")
    return (
        TORCH_BACKEND if model_type is None or model_type in families.list_names() else HF_BACKEND
    )


def describe_disadvantages(values: Mapping[str, Any]) -> str:
    """Return a one-line warning for a model type that weft does not implement itself.

    The warning names the disadvantages of the backend `hf`, which runs such models.
    """
    return (
        f"weft has no family for models of type {values.get('model_type')}, so backend=hf runs it: "
        "slower, and on several devices only as whole copies (no f, t, p, c or e in a layout)"
    )


ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX_KIND = "PREFIX_TUNING"
PREFIX_TASKS = {"CAUSAL_LM": "lm", "SEQ_CLS": "score"}


@dataclass(frozen=True)
class PrefixSettings:
    """Settings of a trained prefix (prefix tuning).

    The prefix consists of attention keys and values for `num_tokens` tokens, which precede every
    sequence. `base` is the directory or hub name of the model that the prefix belongs to.
    """

    num_tokens: int
    base: str


def has_prefix(path: str | Path | None) -> bool:
    """Return whether `path` is a directory that contains a trained prefix.

    Raises `CheckpointError` if the directory's settings cannot be read.
    """
    return path is not None and read_prefix(path) is not None


def read_prefix(path: str | Path) -> PrefixSettings | None:
    """Return the settings of the trained prefix in a directory, or None if it contains none.

    Raises `CheckpointError` for a prefix that weft does not support.
    """
    file = Path(path).expanduser() / ADAPTER
    if not file.is_file():
        return None
    settings = read_object(file, str(file), CheckpointError)
    if settings.get("peft_type") != PREFIX_KIND:
        return None
    if settings.get("prefix_projection") and not settings.get("inference_mode"):
        raise CheckpointError(
            f"{file} has prefix_projection=true and inference_mode=false: keys and values are "
            "still to be projected; save it with PEFT's save_pretrained, which projects them"
        )
    if settings.get("task_type") not in PREFIX_TASKS:
        raise CheckpointError(
            f"{file} is for {settings.get('task_type')!r}; weft reads {' and '.join(PREFIX_TASKS)}"
        )
    count = settings.get("num_virtual_tokens")
    base = settings.get("base_model_name_or_path")
    if not isinstance(count, int) or count < 1:
        raise CheckpointError(f"{file} has num_virtual_tokens={count!r}; a prefix has 1 at least")
    if not isinstance(base, str) or not base:
        raise CheckpointError(
            f"{file} does not name its model; write the directory in base_model_name_or_path"
        )
    return PrefixSettings(count, base)
