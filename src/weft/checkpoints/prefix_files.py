"""Read the settings of a trained prefix (prefix tuning) in PEFT's format, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weft.checkpoints.names import ADAPTER
from weft.errors import CheckpointError
from weft.reading import read_object


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
            f"still to be projected; save it "
            "with PEFT's save_pretrained, which projects them"
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
