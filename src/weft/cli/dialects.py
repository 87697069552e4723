"""Table of the dialects: option names, file formats and commands of other programs.

`weft.compat` implements the dialects. Only this module refers to that package, which is imported
when a dialect is needed. An installation without `weft.compat` lacks only the dialects.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from weft.errors import ConfigError

PACKAGE = "weft.compat"
# dialect -> (module, description for messages)
DIALECTS = {
    "spellings": ("weft.compat.spellings", "option names of other programs"),
    "open_assistant": ("weft.compat.open_assistant.sections", "Open-Assistant's config sections"),
    "deepspeed": ("weft.compat.deepspeed", "DeepSpeed's configuration files"),
    "triton": ("weft.compat.triton_command", "model stores for NVIDIA Triton"),
    "scripts": ("weft.compat.scripts", "the command lines of other programs' scripts"),
    "easylm": ("weft.compat.easylm.commands", "EasyLM's commands and files"),
}
# dialects that add a command of their name to `weft` -> help text of the command. The function
# `main(words, supervise=...)` of the module runs it.
COMMANDS = {"easylm": "EasyLM's scripts with their flags: llama_train..., convert_..."}
# dialects that add a subcommand of their name to `weft convert`
CONVERSIONS = ("triton",)
# flags of `weft quickstart` that name a file with another program's options -> dialect of the file
FILE_FLAGS = {"--deepspeed": "deepspeed"}


@cache
def find(name: str) -> Any:
    """Return the module of a dialect, or None if `weft.compat` is not installed."""
    module = DIALECTS[name][0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):  # another module is missing
            raise
        return None


def list_commands() -> dict[str, str]:
    """Return the commands of the installed dialects, with the help text of each.

    The dialects are not imported, so that `weft --help` is fast.
    """
    installed = {}
    for name, help_text in COMMANDS.items():
        with suppress(ModuleNotFoundError):
            if find_spec(DIALECTS[name][0]) is not None:
                installed[name] = help_text
    return installed


def is_flag_available(flag: str) -> bool:
    """Return whether a flag of `weft quickstart` can be used: its dialect, if any, is installed."""
    return flag not in FILE_FLAGS or find(FILE_FLAGS[flag]) is not None


def load(name: str) -> Any:
    """Return the module of a dialect. Raises `ConfigError` if `weft.compat` is not installed."""
    module = find(name)
    if module is None:
        raise ConfigError(describe_absence(name))
    return module


def describe_absence(name: str) -> str:
    """Return an error message for a dialect that is not installed."""
    return (
        f"{DIALECTS[name][1]}: this installation of weft lacks the package {PACKAGE}, which reads "
        f"and writes what other programs use; install weft with it"
    )
