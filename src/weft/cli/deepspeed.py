"""`--deepspeed [FILE]`: a DeepSpeed JSON on weft's command line, as assignments that the command line goes over."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weft.cli.help import shown as shown_value
from weft.cli.overrides import Override
from weft.errors import ConfigError
from weft.experiments._deepspeed import map_config
from weft.experiments.common import RunConfig
from weft.options import plain
from weft.reading import read_json

BARE = {"zero_optimization": {"stage": 2}}  # what programs that take the flag alone come with
_CPU = {"device": "cpu"}
# The files that Open-Assistant's sections name: what they decide, where there is no file of that name.
KNOWN: dict[str, dict[str, object]] = {
    "zero_config.json": {"stage": 2},
    "zero_config_pretrain.json": {"stage": 2},
    "zero_config_sft_65b.json": {"stage": 3, "offload_optimizer": _CPU, "offload_param": _CPU},
    "zero3_config.json": {"stage": 3},
    "zero3_config_sft.json": {"stage": 3},
    "zero3_config_pretrain.json": {"stage": 3},
    "zero3_config_falcon.json": {"stage": 3, "offload_optimizer": _CPU, "offload_param": _CPU},
    "deepspeed_rl.json": {"stage": 2, "offload_optimizer": _CPU},
}
LENGTHS = ("dataset.max_seqlen", "max_seqlen", "max_length", "max_seq_length")


def overrides(file: str, base: RunConfig, given: Sequence[Override]) -> tuple[list[Override], list[str]]:
    """(assignments, notes) of a DeepSpeed file; "" is the flag alone. `given` is the rest of the command line.

    Raises `ConfigError` naming every key that weft cannot follow.
    """
    known = KNOWN.get(Path(file).name) if file and not Path(file).is_file() else None
    config = {"zero_optimization": known} if known else _read(Path(file)) if file else BARE
    if not base.trained_roles:
        raise ConfigError("--deepspeed: nothing is trained here; leave it out")
    lengths = [plain(each.value) for each in given if each.name in LENGTHS]
    longest = lengths[-1] if lengths and isinstance(lengths[-1], int) else None
    mapped = map_config(config, base.trained_roles, longest)
    if mapped.refused:
        raise ConfigError(f"--deepspeed {file}: {'; '.join(mapped.refused)}")
    shown = " ".join(f"{name}={shown_value(value)}" for name, value in mapped.options.items())
    notes = [f"--deepspeed{f' {file}' if file else ''} is read as {shown or 'nothing'}", *mapped.notes]
    if mapped.tuning:
        notes.append(f"--deepspeed: these keys only tune DeepSpeed: {', '.join(mapped.tuning)}")
    return [Override(name, value) for name, value in mapped.options.items()], notes


def _read(path: Path) -> dict[str, object]:
    config = read_json(path, f"--deepspeed {path}", ConfigError)
    if not isinstance(config, dict):
        raise ConfigError(f"--deepspeed {path}: must hold a JSON object, but holds {type(config).__name__}")
    return config
