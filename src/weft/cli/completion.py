"""Shell completion: the script for a shell, and the candidates for a `weft` command line.

This module does not import torch, so that a completion takes only half a second.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from weft import registry
from weft.cli.help import list_nested_groups, shorten_to_clause
from weft.cli.main import COMMANDS, GLOBAL_FLAGS, run_command
from weft.cli.parsing import CommandParser, print_help_if_empty
from weft.cli.quickstart import list_flags
from weft.data.spec import TEMPLATES
from weft.errors import UserError
from weft.observe.run_list import find_runs
from weft.options import OptionDescription, iterate_options

Word = tuple[str, str]  # (candidate, description or "")

RUNS_FOLDER = "runs"
EXPERIMENT_FLAGS = ("-e", "--experiment")
TRIAL_FLAGS = ("-f", "--trial")
# commands whose arguments are runs or paths
RUN_COMMANDS = (
    "show",
    "rm",
    "report",
    "chat",
    "sample",
    "serve",
    "eval",
    "push",
    "dashboard",
)
BOOLS = (("true", ""), ("false", ""))
QUICKSTART_REGISTRATION = re.compile(r"register_quickstart\(\s*[\"']([\w.-]+)[\"']")
HEAVY_IMPORT = re.compile(r"^\s*(?:import|from)\s+(?:torch|transformers|ray)\b", re.MULTILINE)
SUBCOMMAND_LINE = re.compile(
    r"^    (?:\{([\w,-]+)\}|([a-z][\w-]*)(?: \([^)]*\))?(?:$| {2,}))", re.MULTILINE
)
LONG_FLAG = re.compile(r"(?<![\w-])(--[a-z][\w-]*)")
# Last part of a text option's name -> its values. Other options state their values in their types.
VALUE_SOURCES: dict[str, Callable[[], Iterable[str]]] = {
    "mode": lambda: ("local", "ray", "slurm"),
    "device": lambda: ("cpu", "cuda", "mps"),
    "allocation_mode": lambda: ("manual", "heuristic", "search"),
    "reward": registry.verifiers.list_names,
    "backend": registry.backends.list_names,
    "interface": registry.interfaces.list_names,
    "chat_template": lambda: TEMPLATES,
}
PATH_OPTIONS = (
    "path",
    "train_path",
    "valid_path",
    "fileroot",
    "resume_from",
    "dir",
    "cache_dir",
    "named_file",
    "imports",
    "container",
)
MODEL_OPTIONS = ("path", "resume_from")  # options of `PATH_OPTIONS` that also accept a run
# subcommands of `weft plan` with the arguments of `weft quickstart`
PLANNING = ("search", "run", "cost")


def find_candidates(words: Sequence[str], current: str) -> list[Word]:
    """Return the completions of `current`, the partial word after the complete `words`.

    `words[0]` is the command. The list is empty if nothing matches, or if `words` are invalid.
    """
    try:
        result: list[Word] = []
        for word in dict(_propose_words(list(words), current)).items():
            if word[0].startswith(current):
                result.append(word)
        return result
    except (UserError, OSError):
        return []  # an invalid command reports its error when it is run


def _propose_words(words: list[str], current: str) -> Iterator[Word]:
    if not words:
        yield from (_list_flags(GLOBAL_FLAGS) if current.startswith("-") else COMMANDS.items())
    elif words[0] == "quickstart":
        yield from _complete_quickstart(words[1:], current)
    elif words[:3] == ["launch", "tpu", "start"] and "--" in words:
        yield from _propose_words(words[words.index("--") + 1 :], current)
    elif words[:3] == ["launch", "tpu", "run"] and "--" in words:
        program_words = words[words.index("--") + 1 :]
        if not program_words:
            yield "weft", ""
        elif program_words[0] == "weft":
            yield from _propose_words(program_words[1:], current)
    elif words[0] == "plan" and _is_planned_run(words[1:], current):
        yield from _complete_quickstart(words[2:], current)
    elif words[0] == "completion":
        yield from ((shell, "") for shell in ("bash", "zsh", "fish"))
    else:
        yield from _complete_command(words[0], words[1:], current)


def _is_planned_run(words: list[str], current: str) -> bool:
    """Return whether the word after `weft plan WORDS` is an argument of `weft quickstart`."""
    if not words or words[0] not in PLANNING or current.startswith("-"):
        return False
    return not words[-1].startswith("--")  # the value of a flag


# -- weft quickstart


def _complete_quickstart(words: list[str], current: str) -> Iterator[Word]:
    previous = words[-1] if words else ""
    names = []
    for word in words:
        if not word.startswith("-") and "=" not in word:
            names.append(word)
    name = next((word for word in names if word in _list_quickstart_names(words)), None)
    if previous in ("--config", "--import", "--config-dir") or current.startswith("-"):
        yield from (
            list_paths(current) if not current.startswith("-") else _list_flags(list_flags())
        )
    elif previous == "--cfg":
        yield "job", "print the configuration"
    elif name is None:
        yield from ((each, "") for each in _list_quickstart_names(words))
    elif previous == "--help":
        yield from _list_help_groups(name, words)
    elif (
        "--configs" in words
        and "=" not in current
        and not any("=" in word for word in words[words.index("--configs") :])
    ):
        yield from _list_sections(words)
        yield from _complete_options(name, words, current)
    elif "=" in current:
        yield from _complete_values(name, words, current)
    else:
        yield from _complete_options(name, words, current)


def _list_quickstart_names(words: Sequence[str]) -> list[str]:
    """Return the names of the built-in quickstarts and of quickstarts in user code.

    User code is not executed, only searched for calls of `register_quickstart`.
    """
    user_names = []
    for file in _find_user_files(words):
        user_names.extend(QUICKSTART_REGISTRATION.findall(file.read_text(errors="replace")))
    return sorted({*registry.quickstarts.list_names(), *user_names})


def _find_user_files(words: Sequence[str]) -> list[Path]:
    """Return the files of user code: those named by `--import`, and those in the user folder."""
    named_files = []
    for previous, word in pairwise(words):
        if previous == "--import" and word.endswith(".py"):
            named_files.append(Path(word))
    folder = Path(registry.USER_FOLDER)
    files: list[Path] = []
    for file in (*named_files, *sorted(folder.glob("*.py"))):
        if file.is_file():
            files.append(file)
    return files


def _build_config(name: str, words: Sequence[str]) -> Any:
    """Return the default configuration of the quickstart `name`.

    If user code registers the quickstart, its file is imported, unless it imports a slow package
    such as torch.
    """
    if name not in registry.quickstarts.list_names():
        for file in _find_user_files(words):
            text = file.read_text(errors="replace")
            if name in QUICKSTART_REGISTRATION.findall(text) and not HEAVY_IMPORT.search(text):
                with contextlib.redirect_stdout(io.StringIO()):
                    registry.import_user_code([str(file)])
    return registry.quickstarts.get(name)()


def _complete_options(name: str, words: Sequence[str], current: str) -> Iterator[Word]:
    """Iterate over completions of option names, one level at a time.

    For example, `act` is completed to `actor.`, and `actor.` to the names of all options and groups
    of the actor. Options that are already set in `words` are left out.
    """
    set_names = {word.partition("=")[0] for word in words}
    unset_options = []
    for leaf in iterate_options(_build_config(name, words)):
        if leaf.name not in set_names and leaf.name.startswith(current):
            unset_options.append(leaf)
    yield from list_next_parts(unset_options, current)


def list_next_parts(options: Sequence[OptionDescription], current: str) -> Iterator[Word]:
    """Yield (name, description) for each way to extend the option name `current` by one level.

    For example, if `current` is "actor.", the option `actor.optimizer.lr` gives the name
    `actor.optimizer.`. If this is the only result, the names in the group are yielded instead.
    """
    start = current.rfind(".") + 1
    descriptions: dict[str, str] = {}
    for leaf in options:
        part, dot, _ = leaf.name[start:].partition(".")
        word = leaf.name[:start] + part + (dot or "=")
        descriptions.setdefault(
            word, f"options of {leaf.name[:start]}{part}" if dot else shorten_to_clause(leaf.help)
        )
    only_word = next(iter(descriptions), "")
    if len(descriptions) == 1 and only_word.endswith(".") and only_word != current:
        yield from list_next_parts(options, only_word)
    else:
        yield from descriptions.items()


def _complete_values(name: str, words: Sequence[str], current: str) -> Iterator[Word]:
    """Yield a completion `OPTION=VALUE` for each known value of an option.

    `name` is the quickstart, `words` are the complete words, and `current` is the word to complete,
    which begins with `OPTION=`. Yields nothing if the quickstart lacks the option.
    """
    option, _, partial = current.partition("=")
    leaf = next(
        (leaf for leaf in iterate_options(_build_config(name, words)) if leaf.name == option), None
    )
    if leaf is None:
        return
    last_part = option.rsplit(".", 1)[-1]
    suggestions: list[Word] = []
    if "|" in leaf.type:
        suggestions = [(value, "") for value in leaf.type.split("|")]
    elif leaf.type.startswith("bool"):
        suggestions = list(BOOLS)
    elif option == "dataset.type":
        suggestions = [(value, "") for value in registry.datasets.list_names()]
    elif option == "dataset.named":
        from weft.data.named.catalogue import list_names

        suggestions = [(value, "") for value in list_names()]
    elif last_part in VALUE_SOURCES:
        suggestions = [(value, "") for value in VALUE_SOURCES[last_part]()]
        if option == "allocation_mode":  # or a plan file
            suggestions += list_paths(partial)
    elif last_part in PATH_OPTIONS:
        is_model = last_part in MODEL_OPTIONS and not option.startswith("dataset.")
        suggestions = list(list_runs_and_paths(partial) if is_model else list_paths(partial))
    yield from ((f"{option}={value}", description) for value, description in suggestions)


def _list_help_groups(name: str, words: Sequence[str]) -> Iterator[Word]:
    yield "all", "every option"
    for group in list_nested_groups(
        leaf.name for leaf in iterate_options(_build_config(name, words))
    ):
        yield group, f"options of {group}"


def _list_sections(words: Sequence[str]) -> Iterator[Word]:
    from weft.cli.sections import SectionLibrary

    folders = []
    for previous, word in pairwise(words):
        if previous == "--config-dir":
            folders.append(word)
    for section in SectionLibrary.from_folders(folders).iterate_sections():
        yield section.name, section.find_location()


# -- other commands


def _complete_command(name: str, words: list[str], current: str) -> Iterator[Word]:
    """Iterate over completions for a command other than `quickstart`.

    Subcommands and flags are read from the help of the command. Other arguments are completed with
    the names of runs, sections or files.
    """
    if name not in COMMANDS:
        return
    previous = words[-1] if words else ""
    if previous in EXPERIMENT_FLAGS + TRIAL_FLAGS:
        yield from _list_run_names(words, previous)
        return
    subcommands, flags = parse_command_help(name)
    path: list[str] = []
    for word in words:
        if word in subcommands:
            path.append(word)
            subcommands, flags = parse_command_help(name, *path)
    subcommand = path[0] if path else None
    if current.startswith("-"):
        yield from _list_flags(flags)
    elif subcommands:
        yield from ((word, "") for word in subcommands)
    else:
        yield from ([("latest", "the newest run")] if name == "show" else [])
        if (name, subcommand) in (("config", "show"), ("config", "cp")):
            yield from _list_sections([])
        else:
            yield from (
                list_runs_and_paths(current) if name in RUN_COMMANDS else list_paths(current)
            )


def _list_run_names(words: Sequence[str], flag: str) -> Iterator[Word]:
    """Yield completions for the value of `flag`: experiments for `-e`, or trials for `-f`.

    If the preceding `words` of the command name an experiment, only its trials are yielded.
    """
    experiments = []
    for previous, word in pairwise(words):
        if previous in EXPERIMENT_FLAGS:
            experiments.append(word)
    for run in find_runs(Path(RUNS_FOLDER)):
        if flag in EXPERIMENT_FLAGS:
            yield run.parent.name, ""
        elif not experiments or run.parent.name == experiments[-1]:
            yield run.name, ""


def parse_command_help(name: str, *path: str) -> tuple[list[str], list[str]]:
    """Return the subcommands and the flags of a command, as parsed from its `--help` output.

    `path` are the names of nested subcommands, such as "tpu" and "check" for `launch tpu check`.
    """
    text = io.StringIO()
    with (
        contextlib.redirect_stdout(text),
        contextlib.redirect_stderr(text),
        contextlib.suppress(SystemExit),
    ):
        run_command([name, *path, "--help"])
    help_text = text.getvalue()
    return _parse_subcommands(help_text), sorted(
        {"--help", *LONG_FLAG.findall(help_text.split("\nexamples:")[0])}
    )


def _parse_subcommands(text: str) -> list[str]:
    """Return the subcommands that a help text lists under `positional arguments`."""
    if "positional arguments:" not in text or " ..." not in text.split("\n\n")[0]:
        return []
    listing = text.split("positional arguments:")[1].split("\noptions:")[0]
    return [name for _, name in SUBCOMMAND_LINE.findall(listing) if name]


def _list_flags(names: Iterable[str]) -> Iterator[Word]:
    return ((name, "") for name in names)


# -- runs and files


def list_runs_and_paths(partial: str) -> Iterator[Word]:
    """Yield the paths that begin with `partial`: runs in ./runs, then other files and folders.

    Parent folders of the yielded runs are left out.
    """
    runs = []
    for run in find_runs(Path(RUNS_FOLDER)):
        if str(run).startswith(partial):
            runs.append(str(run))
    yield from ((run, "a run") for run in runs)
    yield from (
        word
        for word in list_paths(partial)
        if not any(f"{run}/".startswith(word[0]) for run in runs)
    )


def list_paths(partial: str) -> Iterator[Word]:
    """Iterate over files and folders whose paths begin with `partial`; folders end with a slash."""
    folder, _, partial_name = partial.rpartition("/")
    directory = Path(f"{folder}/" if folder or partial.startswith("/") else ".").expanduser()
    if not directory.is_dir():
        return
    for entry in sorted(directory.iterdir()):
        if entry.name.startswith(partial_name) and (
            partial_name.startswith(".") or not entry.name.startswith(".")
        ):
            parent = f"{folder}/" if "/" in partial else ""
            yield f"{parent}{entry.name}{'/' if entry.is_dir() else ''}", ""


SCRIPTS = Path(__file__).with_name("shells")
SHELLS = ("bash", "zsh", "fish")
# subcommand that the scripts call with the words of a command line, the last of which is partial
WORDS_SUBCOMMAND = "words"
EPILOG = """examples:
  source <(weft completion bash)                                     in ~/.bashrc
  source <(weft completion zsh)                                      in ~/.zshrc, after compinit
  weft completion fish > ~/.config/fish/completions/weft.fish        once"""


def main(argv: Sequence[str]) -> int:
    """Print a shell's completion script, or candidates for a command line; return the exit code."""
    if argv and argv[0] == WORDS_SUBCOMMAND:
        return _print_candidates(list(argv[1:]))
    parser = CommandParser(prog="weft completion", description=__doc__, epilog=EPILOG)
    parser.add_argument("shell", choices=SHELLS)
    if print_help_if_empty(parser, argv):
        return 2
    arguments = parser.parse_args(list(argv))
    print((SCRIPTS / f"weft.{arguments.shell}").read_text(encoding="utf-8"), end="")
    return 0


def _print_candidates(words: list[str]) -> int:
    """Print the completions of the last word, one per line, and return the exit code 0.

    Each line has a candidate, followed by a tab and a description if there is one.
    """

    words = words[1:] if words[:1] == ["--"] else words
    current = words.pop() if words else ""
    for word, description in find_candidates(words, current):
        print(f"{word}\t{description}" if description else word)
    return 0
