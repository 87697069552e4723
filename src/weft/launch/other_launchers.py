"""Detection of torchrun, accelerate and deepspeed.

weft starts its processes itself. If it has been started by one of these launchers, it fails with an
error message that contains the equivalent weft command.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.errors import ConfigError
from weft.redaction import mask_words

LAUNCHER_OPTIONS = re.compile(r"--local[-_]rank(=.*)?")  # options that these launchers add
# Options that set a model's layout, and options that choose sharding or replication independently
# of a layout.
LAYOUT = re.compile(r"(^|\.)(layout|device_mesh|allocation_mode|parallel(\..*)?)$")
SHARDING = re.compile(r"(^|\.)(zero_stage|deepspeed)$")


@dataclass(frozen=True)
class OtherLauncher:
    """Launcher other than weft, such as torchrun, that has started this process.

    `world` is the number of processes that the launcher has started. `rank` is the index of this
    process among them, counted from 0.
    """

    launcher: str
    rank: int
    world: int
    per_node: int
    sharded: bool  # ZeRO or FSDP rather than plain data parallelism
    mixed_precision: str

    @property
    def num_nodes(self) -> int:
        """Number of machines on which the launcher has started processes."""
        return max(1, self.world // self.per_node)

    def build_command(self, words: Sequence[str]) -> str:
        """Return the weft command that replaces the launcher's command.

        `words` are the command-line words after `weft`.
        """
        arguments = []
        for word in words:
            if not LAUNCHER_OPTIONS.fullmatch(word):
                arguments.append(word)
        option_names = {word.partition("=")[0].lstrip("-") for word in arguments}
        if arguments and arguments[0] != "quickstart":
            mode = ["--mode", "ray"] if self.num_nodes > 1 and "mode" not in option_names else []
            return shlex.join(mask_words(["weft", *arguments, *mode]))
        added = {}
        if self.world > 1:
            added = {"n_nodes": str(self.num_nodes), "n_gpus_per_node": str(self.per_node)}
        if self.world > 1 and not any(LAYOUT.search(name) for name in option_names):
            sharded = self.sharded or any(SHARDING.search(name) for name in option_names)
            added["allocation_mode"] = f"d{self.world}" if sharded else f"d{self.world}f1"
        if self.num_nodes > 1:
            added["mode"] = "ray"
        if self.mixed_precision in ("bf16", "fp16"):
            added[self.mixed_precision] = "true"
        options = []
        for name, value in added.items():
            if name not in option_names:
                options.append(f"{name}={value}")
        return shlex.join(mask_words(["weft", *arguments, *options]))

    def format_message(self, words: Sequence[str]) -> str:
        """Return the error message, which contains the weft command to use instead.

        `words` are the command-line words after `weft`; they are empty for a run started from
        Python.
        """
        processes = "one process" if self.world == 1 else f"{self.world} processes"
        if words:
            command = self.build_command(words)
        else:
            command = "python YOUR_SCRIPT.py, with n_gpus_per_node and a layout in its options"
        return (
            f"{self.launcher} has started {processes} of weft, which starts its processes itself, "
            f"from one command (docs/cluster.md); write: {command}"
        )


def detect_launcher(environ: Mapping[str, str]) -> OtherLauncher | None:
    """Return the launcher, such as torchrun, that started this process.

    Returns None if the environment variables `environ` show no such launcher.
    """
    accelerate = any(
        name.startswith("ACCELERATE_") and name != "ACCELERATE_CONFIG_FILE" for name in environ
    )
    ranked = all(environ.get(name, "").isdigit() for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    if accelerate:
        launcher = "accelerate launch"
    elif "TORCHELASTIC_RUN_ID" in environ:
        launcher = "torchrun"
    elif ranked:
        if "CROSS_SIZE" in environ:
            launcher = "deepspeed"
        else:
            launcher = "another launcher (RANK, LOCAL_RANK and WORLD_SIZE are set)"
    else:
        return None
    world = _read_number(environ, "WORLD_SIZE", 1)
    per_node = _read_number(environ, "LOCAL_WORLD_SIZE", _read_number(environ, "LOCAL_SIZE", world))
    zero = _read_number(environ, "ACCELERATE_DEEPSPEED_ZERO_STAGE", 0) > 0
    return OtherLauncher(
        launcher=launcher,
        rank=_read_number(environ, "RANK", 0),
        world=world,
        per_node=per_node,
        sharded=zero or environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true"),
        mixed_precision=environ.get("ACCELERATE_MIXED_PRECISION", "no"),
    )


def check_started_directly(environ: Mapping[str, str]) -> None:
    """Raise `ConfigError` if a launcher such as torchrun has started this process.

    This check is for runs that are started from Python.
    """
    launcher = detect_launcher(environ)
    if launcher is not None:
        raise ConfigError(launcher.format_message(()))


def _read_number(environ: Mapping[str, str], name: str, otherwise: int) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdigit() else otherwise
