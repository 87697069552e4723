"""`weft config`: list, show, copy and check the named sections that `--configs` applies."""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from weft import registry
from weft.cli import overrides
from weft.cli.parsing import CommandParser, add_imports, split_names
from weft.cli.sections import (
    READY,
    SHIPPED,
    SUFFIXES,
    ConfigSection,
    SectionFile,
    SectionLibrary,
    find_shipped_file,
    list_example_sections,
    list_yaml_files,
    read_file,
)
from weft.cli.stack import SectionStack, guess_quickstart, read_stack
from weft.data.spec import DatasetSpec
from weft.engine.spec import ModelSpec
from weft.errors import CheckpointError, ConfigError, build_unknown_name_error, qualify_error
from weft.experiments.checks import check_dataset, check_local, find_file_problem
from weft.experiments.common import MFCOptions, RunConfig, parse_hooks
from weft.graph.mfc import Call
from weft.host.spec import locate, parse_reward
from weft.options import validate as check
from weft.reading import explain_read_errors, make_folder
from weft.redaction import redact
from weft.writing import write

QUICKSTARTS = ("sft", "rw", "ppo", "dpo", "grpo", "online_dpo", "distill", "gen")
MAX_SHOWN_KEYS = 6  # number of keys listed per section
EPILOG = """examples:
  weft config ls grpo
  weft config show {run} learning_rate=2e-6
  weft config cp {model} configs/mine.yaml
  weft config validate configs/mine.yaml
  weft config validate {run} learning_rate=2e-6"""


def main(argv: Sequence[str]) -> int:
    """Run `weft config ...` and return the exit code. Raises `UserError` for unusable input."""
    parser = _build_parser()
    arguments = parser.parse_args(list(argv))
    if arguments.command is None:
        parser.print_help()
        return 2
    registry.import_user_folder()
    registry.import_user_code(arguments.imports)
    run: Callable[[argparse.Namespace], Iterable[str]] = arguments.run
    for line in run(arguments):
        print(line)
    return 0


def _build_parser() -> argparse.ArgumentParser:
    shipped = list_example_sections()
    epilog = EPILOG.format(run=" ".join(shipped), model=shipped[-1])
    parser = CommandParser(prog="weft config", description=__doc__, epilog=epilog)
    commands = parser.add_subparsers(dest="command", metavar="{ls,show,cp,validate}")
    listing = commands.add_parser(
        "ls", help="list the recipes with their purpose, and the sections with the keys they set"
    )
    listing.add_argument(
        "part", nargs="?", default="", help="list only names that contain this text"
    )
    showing = commands.add_parser(
        "show", help="print the merged options of sections, and where each value comes from"
    )
    showing.add_argument(
        "words",
        nargs="+",
        metavar="NAME|key=value",
        help="sections left to right, then assignments",
    )
    copying = commands.add_parser("cp", help="copy a section to a new file, to change it there")
    copying.add_argument("name")
    copying.add_argument("file", type=Path, help="a new file, such as configs/mine.yaml")
    checking = commands.add_parser(
        "validate",
        help="check each section of files, or a stack of sections: keys, types, values, names of "
        "datasets",
    )
    checking.add_argument(
        "words",
        nargs="+",
        metavar="FILE|NAME|key=value",
        help="files or folders of files; or sections left to right, then assignments, as for a "
        "quickstart",
    )
    for name, run in (
        ("ls", list_sections),
        ("show", show_stack),
        ("cp", copy_section),
        ("validate", validate_arguments),
    ):
        command = commands.choices[name]
        command.set_defaults(run=run, quickstart=None)
        command.add_argument(
            "--config-dir",
            dest="folders",
            action="append",
            default=[],
            metavar="DIR",
            help="folder of sections, searched after ./configs",
        )
        add_imports(command, "NAME", "module or FILE.py that registers names")
        if name in ("show", "validate"):
            command.add_argument(
                "--for",
                dest="quickstart",
                metavar="QUICKSTART",
                help="sft, rw, ppo, ... (default: chosen by the sections' keys)",
            )
    return parser


def list_sections(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield lines that list the recipes with their purposes, and then the other sections.

    The last lines name the sections and files that cannot be used, with the reasons. Raises
    `ConfigError` if no section has a name that contains `arguments.part`.
    """
    problems: list[str] = []
    library = SectionLibrary.from_folders(arguments.folders, problems)
    sections = []
    for name in library.list_names():
        try:
            sections += [library.get(name)] if arguments.part in name else []
        except ConfigError as error:
            problems.append(str(error))
    for _, contents in library.contents:
        problems.extend(contents.problems)
    recipes = {}
    for section in sections:
        purpose = _describe_recipe(section)
        if purpose is not None:
            recipes[section.name] = purpose
    other_sections = [section for section in sections if section.name not in recipes]
    if recipes:
        yield (
            "recipes: complete runs on real models (weft quickstart ALGORITHM --config "
            "recipes/NAME.yaml)"
        )
        width = max(map(len, recipes))
        yield from (f"  {name:{width}}  {purpose}" for name, purpose in sorted(recipes.items()))
    if recipes and other_sections:
        yield ""
        yield "sections: named groups of settings (weft quickstart ALGORITHM --configs NAME NAME)"
    yield from _format_sections(other_sections)
    yield from (f"cannot be used: {problem}" for problem in dict.fromkeys(problems))
    if not sections:
        raise ConfigError(f"weft config ls {arguments.part}: no section's name contains this")


def _format_sections(sections: Sequence[ConfigSection]) -> Iterator[str]:
    """Yield a line per section with its name, its location, and the first few keys that it sets."""
    name_width = max((len(section.name) for section in sections), default=0)
    location_width = max((len(section.find_location()) for section in sections), default=0)
    for section in sections:
        keys = list(section.values)
        remainder = f", and {len(keys) - MAX_SHOWN_KEYS} more" if len(keys) > MAX_SHOWN_KEYS else ""
        listed_keys = f"{', '.join(keys[:MAX_SHOWN_KEYS])}{remainder}"
        location = section.find_location()
        yield f"{section.name:{name_width}}  {location:{location_width}}  {listed_keys}"


def _describe_recipe(section: ConfigSection) -> str | None:
    """Return a recipe's purpose and the GPU it fits, read from the first comment in its file.

    Returns None for a section that is not a recipe.
    """
    if not section.shipped or not section.file.startswith(f"{SHIPPED}:{READY}/"):
        return None
    lines = find_shipped_file(section.file).read_text(encoding="utf-8").splitlines()
    comments = [
        line.lstrip("# ").rstrip()
        for line in itertools.takewhile(lambda line: line.startswith("#"), lines)
    ]
    gpu = next((line.partition(": ")[2] for line in comments if line.startswith("GPU: ")), "")
    return f"{comments[0].rstrip('.')}; {gpu}" if gpu else comments[0]


def show_stack(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield lines with the options of the merged sections and assignments, each with its origin.

    The first line is the command to run, and the last lines are notes.
    """
    names = split_names(word for word in arguments.words if "=" not in word)
    assignments = overrides.parse([word for word in arguments.words if "=" in word])
    library = SectionLibrary.from_folders(arguments.folders)
    quickstart = arguments.quickstart or guess_quickstart([library.get(name) for name in names])
    stack = _read_checked_stack(names, library, quickstart, assignments)
    yield f"weft quickstart {quickstart} --configs {' '.join(names)}"
    yield from map(redact, stack.format_lines())
    yield from (redact(f"note: {note}") for note in stack.notes)


def copy_section(arguments: argparse.Namespace) -> Iterator[str]:
    """Copy one section with its comments to a new file, and yield a line of confirmation."""
    section = SectionLibrary.from_folders(arguments.folders).get(arguments.name)
    if arguments.file.exists():
        raise ConfigError(f"weft config cp: {arguments.file} exists; name another file")
    make_folder(arguments.file.parent, f"weft config cp: {arguments.file.parent}", ConfigError)
    with explain_read_errors(f"weft config cp: {arguments.file}", ConfigError, "name another file"):
        write(arguments.file, _read_section_text(section))
    yield f"{section.name}: copied from {section.find_location()} to {arguments.file}"


def _read_section_text(section: ConfigSection) -> str:
    """Return the source text of a section with its comments.

    If the section uses a YAML anchor that is defined outside it, the result is YAML of its values,
    without anchors and comments.
    """
    import yaml

    file = find_shipped_file(section.file) if section.shipped else Path(section.file)
    lines = file.read_text(encoding="utf-8").splitlines()
    if section.foreign or section.name not in _find_top_keys(lines):
        return "\n".join(lines) + "\n"
    start = section.line - 1
    end = next(
        (index for index in range(start + 1, len(lines)) if re.match(r"[^\s#]", lines[index])),
        len(lines),
    )
    while end > start + 1 and (not lines[end - 1].strip() or lines[end - 1].startswith("#")):
        end -= 1
    text = "\n".join(lines[start:end]) + "\n"
    try:
        parsed = yaml.safe_load(text)
    except yaml.YAMLError:  # the section has an alias of an anchor elsewhere in its file
        parsed = None
    if isinstance(parsed, dict) and section.name in parsed:
        return text
    return yaml.safe_dump({section.name: dict(section.values)}, sort_keys=False, allow_unicode=True)


def _find_top_keys(lines: Sequence[str]) -> set[str]:
    """Return the top-level keys of a YAML file, given its lines."""
    matches = (re.match(r"""(["']?)([^\s#"'][^:"']*)\1\s*:""", line) for line in lines)
    return {match[2].strip() for match in matches if match}


def validate_arguments(arguments: argparse.Namespace) -> Iterator[str]:
    """Check the files, folders and sections that are arguments of `weft config validate`.

    Each section in the files is checked separately. Sections that are given by name are merged with
    each other and with the assignments on the command line, and the result is checked. Yields a
    line for each valid section of a file, and a line for the merged sections if they are valid. At
    the end, raises a `ConfigError` that lists all problems, if there are any.
    """
    problems: list[str] = []
    names: list[str] = []
    # Check files and folders one by one, and collect the names of sections.
    for word in (word for word in arguments.words if "=" not in word):
        path = Path(word)
        if path.is_file() or path.is_dir():
            if path.is_file():
                files = [path]
            else:
                files = list_yaml_files(path, f"weft config validate {word}")
            for file in files:
                yield from _check_file(file, arguments, problems)
        elif path.suffix in SUFFIXES or "/" in word:
            raise ConfigError(f"weft config validate {word}: there is no such file")
        else:
            names += split_names([word])
    # Merge the named sections and the assignments, and check the result.
    assignments = [word for word in arguments.words if "=" in word]
    if assignments and not names:
        raise ConfigError(
            f"weft config validate {assignments[0]}: overrides sections; name them before it"
        )
    if names:
        quickstart, problem = _find_problem(
            names,
            SectionLibrary.from_folders(arguments.folders),
            arguments.quickstart,
            overrides.parse(assignments),
        )
        if problem:
            problems.append(problem)
        else:
            yield f"{' '.join(names)}: valid for {quickstart}"
    if problems:
        raise ConfigError("\n".join(problems))


def _check_file(file: Path, arguments: argparse.Namespace, problems: list[str]) -> Iterator[str]:
    """Check each section of a file, and yield a line for each valid section.

    The problems of invalid sections are appended to `problems`.
    """
    try:
        contents = read_file(file)
    except ConfigError as error:
        problems.append(str(error))
        return
    problems += contents.problems
    others = SectionLibrary.from_folders(arguments.folders, problems=[]).contents
    library = SectionLibrary(((str(file.parent), SectionFile(contents.sections)), *others))
    for section in contents.sections:
        quickstart, problem = _find_problem([section.name], library, arguments.quickstart)
        if problem:
            problems.append(problem)
        else:
            yield f"{section.find_location()}: {section.name} is valid for {quickstart}"


def _find_problem(
    names: Sequence[str],
    library: SectionLibrary,
    quickstart: str | None,
    assignments: Sequence[overrides.Override] = (),
) -> tuple[str, str]:
    """Merge and check sections, and return (quickstart name, error message).

    `names` are the names of the sections, and `assignments` override them. Quickstarts are tried
    one after the other, beginning with the likeliest, until one accepts all keys. If none does, the
    likeliest and its error are returned. If `quickstart` is not None, only this one is tried. The
    message is empty if the options are valid.
    """
    likeliest = quickstart or guess_quickstart([library.get(name) for name in names])
    problem = ""
    for name in (likeliest,) if quickstart else dict.fromkeys((likeliest, *QUICKSTARTS)):
        try:
            _read_checked_stack(names, library, name, assignments)
        except ConfigError as error:
            problem = problem or str(error)
            if "unknown key" not in str(error):
                return name, str(error)
        else:
            return name, ""
    return likeliest, problem


def _read_checked_stack(
    names: Sequence[str],
    library: SectionLibrary,
    quickstart: str,
    assignments: Iterable[overrides.Override],
) -> SectionStack:
    """Merge the named sections, and check that the result is valid for a quickstart.

    `quickstart` is the name of the quickstart. `assignments` are options that the user sets in
    addition to the sections. Raises a `ConfigError` that states where an invalid option is set.
    """
    from weft.cli.quickstart import apply_overrides

    base = registry.quickstarts.get(quickstart)()
    if not isinstance(base, RunConfig):
        raise ConfigError(f"--for {quickstart}: it has no options that a section can set")
    stack = read_stack(names, library, base, assignments)
    try:
        config, _ = apply_overrides(base, stack.overrides)
        check(config)
        _check_named_objects(config)
    except ConfigError as error:
        raise stack.add_origin(error) from error
    except CheckpointError as error:
        raise stack.add_origin(ConfigError(str(error))) from error
    if "dataset.sources" in stack.origins:
        _check_sources(config, stack)
    return stack


def _check_named_objects(config: RunConfig) -> None:
    """Check that the files, models, interfaces and functions named in the options exist.

    Raises `UserError` for the first of them that is missing.
    """
    registry.import_user_code(config.imports)
    for spec in fields(config):
        value = getattr(config, spec.name)
        if isinstance(value, ModelSpec):
            for option, path in (
                (f"{spec.name}.path", value.path),
                (f"{spec.name}.tokenizer.path", value.tokenizer.path),
            ):
                if path is not None:
                    check_local(option, path)
        elif isinstance(value, MFCOptions):
            _check_call(spec.name, value)
        elif isinstance(value, DatasetSpec):
            if value.type is not None and value.type not in registry.datasets:
                raise qualify_error(
                    f"{spec.name}.type",
                    build_unknown_name_error(
                        "dataset type", value.type, registry.datasets.list_names()
                    ),
                )
            if value.path is not None or value.train_path is not None:
                check_dataset(value)
    if config.eval_prompts is not None:
        problem = find_file_problem(config.eval_prompts)
        if problem:
            raise ConfigError(f"eval_prompts={config.eval_prompts!r}: {problem}")
    for folder in config.eval_suite.include_path:
        if not Path(folder).expanduser().is_dir():
            raise ConfigError(f"eval_suite.include_path=[{folder}]: there is no such folder")
    reward = getattr(config, "reward", None)
    for function in parse_reward(reward) if reward is not None else ():
        locate(function)


def _check_call(name: str, call: MFCOptions) -> None:
    """Raise `ConfigError` if the interface or a hook of the model call `name` does not exist."""
    if call.interface is not None and call.interface not in registry.interfaces:
        raise qualify_error(
            f"{name}.interface",
            build_unknown_name_error("interface", call.interface, registry.interfaces.list_names()),
        )
    for group in ("pre_hooks", "post_hooks"):
        for hook in parse_hooks(getattr(call, group)):
            if isinstance(hook, Call) and hook.function not in registry.functions:
                raise qualify_error(
                    f"{name}.{group}",
                    build_unknown_name_error(
                        "host function", hook.function, registry.functions.list_names()
                    ),
                )


def _check_sources(config: RunConfig, stack: SectionStack) -> None:
    """Raise `ConfigError` for an invalid dataset in `dataset.sources`.

    The message begins with the file and line that set `dataset.sources`.
    """
    dataset = next(
        (getattr(config, spec.name) for spec in fields(config) if spec.name == "dataset"), None
    )
    if isinstance(dataset, DatasetSpec):
        try:
            check_dataset(dataset)
        except ConfigError as error:
            raise ConfigError(f"{stack.origins['dataset.sources'][1].place}: {error}") from error
