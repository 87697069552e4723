"""`weft quickstart NAME key=value ...`: build and check a configuration, and run it."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft import registry
from weft.cli import dialects, overrides
from weft.cli.aliases import list_spellings, translate
from weft.cli.help import (
    NAMES,
    describe_config,
    format_quickstart_help,
    get_terminal_width,
    print_page,
)
from weft.cli.parsing import split_names
from weft.errors import ConfigError, find_nearest
from weft.experiments.common import RunConfig
from weft.options import Config, coerce, iterate_options, read, to_mapping, validate
from weft.redaction import mask_values, redact
from weft.runtime.processes import SupervisorPipe

if TYPE_CHECKING:
    from weft.cli.stack import OptionFile, SectionStack
    from weft.experiment import Experiment

CONFIG = "config"  # value of `--dry-run` that does not read the data
RUN_NAME_VARIABLE = "WEFT_RUN"  # environment variable with EXPERIMENT/TRIAL, set by a supervisor
FLAGS = (
    "--help",
    "--dry-run",
    "--verbose",
    "--cfg",
    "--config",
    "--configs",
    "--config-dir",
    "--import",
    "--debug",
    "--resume_from_checkpoint",
    "--print-script",
)


@dataclass
class QuickstartCommandLine:
    """Parsed command line of `weft quickstart`.

    `name` is the first argument without `=`. `assignments` are the arguments of the form
    `key=value`. The other attributes are set by flags.
    """

    name: str = ""
    assignments: list[str] = field(default_factory=list)
    imports: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    configs: list[str] = field(default_factory=list)  # names of sections
    config_dirs: list[str] = field(default_factory=list)
    print_config: bool = False
    verbose: bool = False
    dry_run: str | None = None  # "": read the data; "config": do not; None: no dry run
    print_script: bool = False
    # (dialect, path) of another program's file of options; the path is "" for a flag without a file
    option_file: tuple[str, str] | None = None
    help: str | None = None  # a group of options or "all"; "" for common options


def main(argv: Sequence[str], *, supervise: bool = False) -> int:
    """Run `weft quickstart ...` and return the exit code.

    With `supervise`, a run that needs Ray is started in a child process, because Ray can kill the
    process that uses it. Raises `UserError` for unusable input.
    """
    words = parse_command_line(argv)
    registry.import_user_folder()
    registry.import_user_code(words.imports)
    if not words.name:
        print(format_overview())
        return 0 if words.help is not None else 2
    base, values = _read_assignments(words)
    if words.help is not None:
        print_page(format_quickstart_help(words.name, base, words.help, get_terminal_width()))
        return 0
    if words.config_dirs and not words.configs:
        raise ConfigError(
            "--config-dir: is a folder of sections, and none is named; add --configs NAME"
        )
    if not words.configs:
        option_file: OptionFile | None = None
        if words.option_file is not None and isinstance(base, RunConfig):
            dialect, path = words.option_file
            option_file = dialects.load(dialect).read_overrides(path, base, values)
            print_notes(option_file.notes)
            values = [*option_file.assignments, *values]
        return _run(words, base, values, argv, option_file, supervise=supervise)
    stack, option_file = read_section_stack(words, base, values)
    if not words.print_config and not words.print_script and is_reporting():
        print("\n".join(stack.format_lines()))
    print_notes(stack.notes)
    registry.import_user_code(_list_imports(stack.overrides))
    try:
        return _run(words, base, stack.overrides, argv, option_file, supervise=supervise)
    except ConfigError as error:
        raise stack.add_origin(error) from error


def read_section_stack(
    words: QuickstartCommandLine, base: Config, values: Sequence[overrides.Override]
) -> tuple[SectionStack, OptionFile | None]:
    """Merge the config sections, the command line and another program's file of options.

    `base` is the default configuration, and `values` are the assignments on the command line. The
    command line overrides the sections, and the sections override the file. Returns (merged
    options, options of the file); the latter are None without a flag such as `--deepspeed`.
    """
    from weft.cli.sections import SectionLibrary
    from weft.cli.stack import read_stack

    if not isinstance(base, RunConfig):
        raise ConfigError(
            f"--configs: {words.name} has no options that a section can set; leave it out"
        )
    library = SectionLibrary.from_folders(words.config_dirs)
    stack = read_stack(words.configs, library, base, values)
    if words.option_file is None:
        return stack, None
    dialect, path = words.option_file
    option_file: OptionFile = dialects.load(dialect).read_overrides(
        path or stack.option_file or "", base, stack.overrides
    )
    stack = read_stack(words.configs, library, base, values, option_file)
    stack.notes = [*option_file.notes, *stack.notes]
    return stack, option_file


def _run(
    words: QuickstartCommandLine,
    base: Any,
    values: Sequence[overrides.Override],
    argv: Sequence[str],
    option_file: OptionFile | None,
    *,
    supervise: bool,
) -> int:
    """Build the configuration, run it or execute the action of a flag, and return the exit code.

    The run is started or, with `mode=slurm`, submitted as a job. With flags such as `--dry-run`,
    the configuration, the plan of the run or the script of the job is printed instead. `values` are
    all assignments, in order, and `option_file` are the options of another program's file.
    """
    config, notes = apply_overrides(base, values, words.imports)
    print_notes([*(option_file.describe_autos(config) if option_file is not None else ()), *notes])
    if words.print_config:
        import yaml

        validate(config)
        print(
            yaml.safe_dump(mask_values(to_mapping(config)), sort_keys=False, allow_unicode=True),
            end="",
        )
        return 0
    if words.print_script and config.mode != "slurm":
        raise ConfigError("--print-script prints the script of a Slurm job; add mode=slurm")
    given_names = (config.experiment_name, config.trial_name)
    if words.dry_run is None and isinstance(config, RunConfig):
        config = _assign_run_names(config, words)
    # These modules do not import torch: it is loaded after all checks have passed.
    from weft.launch import dry_run, run, slurm
    from weft.launch.run import build_with_choices
    from weft.launch.supervisor import Supervisor, needs_ray
    from weft.observe.progress import DisplayOptions, find_terminal_width

    if words.dry_run is not None:
        plan = slurm.plan_job if config.mode == "slurm" else dry_run
        print("\n".join(plan(config, data=words.dry_run != CONFIG, width=find_terminal_width())))
        return 0
    if config.mode == "slurm":
        script_words = ("--print-script", "mode=slurm", "--mode=slurm")
        names = []
        for name, set_name in zip(NAMES, given_names, strict=True):
            if not set_name:
                names.append(f"{name}={getattr(config, name)}")
        command = [
            "quickstart",
            *(word for word in argv if word not in script_words),
            *names,
            "mode=ray",
        ]
        print(slurm.start_job(config, command, print_only=words.print_script))
        return 0
    experiment = build_with_choices(config)
    uses_ray = needs_ray(experiment, config.mode)
    print_start(experiment, uses_ray=uses_ray)
    if supervise and uses_ray:
        os.environ[RUN_NAME_VARIABLE] = f"{config.experiment_name}/{config.trial_name}"
        return Supervisor(experiment).run()
    run(config, show=DisplayOptions(verbose=words.verbose), built=experiment)
    return 0


def _assign_run_names(config: RunConfig, words: QuickstartCommandLine) -> RunConfig:
    """Return the configuration with `experiment_name` and `trial_name` filled in.

    A supervised process uses the names that its supervisor has chosen.
    """
    from weft.cli.named_run import with_names

    if not is_reporting() and RUN_NAME_VARIABLE in os.environ:
        experiment, _, trial = os.environ[RUN_NAME_VARIABLE].partition("/")
        return replace(config, experiment_name=experiment, trial_name=trial)
    config, note = with_names(config, Path(words.files[-1]).stem if words.files else words.name)
    print_notes([note] if note is not None else [])
    return config


def is_reporting() -> bool:
    """Return whether this process prints the notes and the plan before a run.

    A supervised process does not print them, because its supervisor has already done so.
    """
    return not SupervisorPipe.from_environment(os.environ).is_supervised


def print_start(experiment: Experiment, *, uses_ray: bool) -> None:
    """Print a note that the run is starting, before the import of torch, which takes seconds.

    If `uses_ray` is True, the note also mentions Ray and the number of devices.
    """
    from weft.observe.progress import make_view

    if is_reporting():
        ray = f" and Ray, for {experiment.num_devices} devices" if uses_ray else ""
        name = f"{experiment.control.experiment_name}/{experiment.control.trial_name}"
        make_view("", progress=False).print_note(
            f"starting {name}: loading torch{ray}, then reading rows"
        )


def print_notes(notes: Sequence[str]) -> None:
    """Print notes for the user to standard error, unless a supervisor has already printed them."""
    for note in notes if is_reporting() else ():
        print(redact(f"note: {note}"), file=sys.stderr)


def build_config(argv: Sequence[str]) -> tuple[RunConfig, list[str]]:
    """Return the configuration that `weft quickstart` builds from `argv`, and notes for the user.

    Raises `UserError` for unusable input, and for a configuration that is not a `RunConfig`.
    """
    words = parse_command_line(argv)
    registry.import_user_folder()
    registry.import_user_code(words.imports)
    base, values = _read_assignments(words)
    if words.configs:
        values = read_section_stack(words, base, values)[0].overrides
    config, notes = apply_overrides(base, values, words.imports)
    if not isinstance(config, RunConfig):
        raise ConfigError(
            f"{words.name}: its configuration is not a weft.experiments.RunConfig and has no "
            f"placement to search"
        )
    return config, notes


def _read_assignments(words: QuickstartCommandLine) -> tuple[Any, list[overrides.Override]]:
    """Return (default configuration of the quickstart, all assignments in order).

    The assignments of config files come before those of the command line, which override them.
    """
    from weft.cli import sections

    values: list[overrides.Override] = []
    for file in words.files:
        values += overrides.flatten(overrides.read_file(sections.find_recipe_file(file)))
    values += overrides.parse(words.assignments)
    if words.dry_run is not None:  # a dry run needs no name
        set_names = {each.name for each in values}
        values += overrides.parse([f"{name}=plan" for name in NAMES if name not in set_names])
    registry.import_user_code(_list_imports(values))
    return registry.quickstarts.get(words.name)(), values


def apply_overrides(
    base: Config, values: Sequence[overrides.Override], imports: Sequence[str] = ()
) -> tuple[Config, list[str]]:
    """Return `base` with the assignments applied, and notes for the user.

    The notes name options that are set several times, and spellings that were translated.
    `imports` are modules to add to the option `imports`. Raises `ConfigError` for invalid
    assignments.
    """
    assignments, notes, spellings = list(values), list[str](), list[str]()
    if isinstance(base, RunConfig):
        assignments, notes = translate(values, base)
        spellings = list_spellings(base)
    notes = [*overrides.describe_repeated(values), *notes]
    nested: dict[str, Any] = {}
    for assignment in assignments:
        _check_group(base, assignment)
        overrides.merge(nested, assignment)
    known = [*(leaf.name for leaf in iterate_options(base)), *spellings]
    config = read(base, overrides.resolve(nested, to_mapping(base)), known=known)
    if imports and isinstance(config, RunConfig):
        config = replace(
            config,
            imports=[*config.imports, *(name for name in imports if name not in config.imports)],
        )
    return config, notes


def _check_group(base: Any, assignment: overrides.Override) -> None:
    """Raise `ConfigError` if a string, number or list is assigned to a group of options.

    This is checked before the assignments are merged, because a later assignment to an option of
    the group would hide the error.
    """
    if assignment.name.isidentifier():
        group = getattr(base, assignment.name, None)
    else:
        group = None
    if (
        is_dataclass(group)
        and not assignment.removed
        and not isinstance(assignment.value, Mapping | type(None))
    ):
        read(base, {assignment.name: assignment.value})


def parse_command_line(argv: Sequence[str]) -> QuickstartCommandLine:
    """Parse the flags and assignments of a command line; `--key=value` is read as `key=value`.

    Raises `ConfigError` for unknown flags.
    """
    words = QuickstartCommandLine()
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        flag, _, attached = word.partition("=")
        if word in ("--help", "-h"):
            has_group = rest and "=" not in rest[0] and not rest[0].startswith("-") and words.name
            words.help = rest.pop(0) if has_group else ""
        elif word == "--debug":
            continue  # read by weft.cli.main
        elif word in ("-v", "--verbose"):
            words.verbose = True
        elif flag == "--dry-run":
            # `--dry-run config`, as in `weft start`
            is_separate = word == flag and bool(words.name) and rest[:1] == [CONFIG]
            words.dry_run = _check_dry_run(word, rest.pop(0) if is_separate else attached)
        elif word == "--print-script":
            words.print_script = True
        elif flag == "--resume_from_checkpoint":
            has_path = not attached and rest and "=" not in rest[0] and not rest[0].startswith("-")
            words.assignments.append(
                f"resume_from_checkpoint={attached or (rest.pop(0) if has_path else 'true')}"
            )
        elif (name := f"--{flag.removeprefix('--')}") in dialects.FILE_FLAGS and word != name[2:]:
            # Without dashes, the flag is accepted only in the form FLAG=PATH.
            path = attached or (rest.pop(0) if rest and rest[0].endswith(".json") else "")
            words.option_file = (dialects.FILE_FLAGS[name], path)
        elif flag == "--configs":
            words.configs += _take_section_names(attached, rest)
        elif flag in ("--import", "--config", "--cfg", "--config-dir"):
            _store_flag(words, flag, attached or (rest.pop(0) if rest else ""))
        elif word.startswith("--") and attached:
            words.assignments.append(word[2:])
        elif word.startswith("-"):
            raise _build_unknown_flag_error(word, rest)
        elif not words.name and "=" not in word:
            words.name = word
        else:
            words.assignments.append(word)
    return words


def list_flags() -> list[str]:
    """Return the flags of `weft quickstart`, including the flags of installed dialects."""
    return [*FLAGS, *filter(dialects.is_flag_available, dialects.FILE_FLAGS)]


def _build_unknown_flag_error(word: str, rest: Sequence[str]) -> ConfigError:
    """Return the error for an unknown flag.

    If the flag could be an option, the message shows it in the form `key=value`.
    """
    similar = find_nearest(word, list_flags())
    if similar:
        return ConfigError(f"unknown flag {word!r}; did you mean {similar[0]}?")
    name = word.lstrip("-").replace("-", "_")
    if rest and "=" not in rest[0] and not rest[0].startswith("--"):
        value = rest[0]
    else:
        value = "true"
    if name.replace(".", "_").isidentifier():
        return ConfigError(f"unknown flag {word!r}; options are written key=value: {name}={value}")
    return ConfigError(
        f"unknown flag {word!r}; options are written key=value; flags: {', '.join(list_flags())}"
    )


def _check_dry_run(word: str, value: str) -> str:
    if value not in ("", CONFIG):
        raise ConfigError(
            f"{word}: write --dry-run, or --dry-run={CONFIG} to read config.json only, no data"
        )
    return value


def _store_flag(words: QuickstartCommandLine, flag: str, value: str) -> None:
    if not value:
        raise ConfigError(
            f"{flag}: needs a value; write {flag} {'job' if flag == '--cfg' else 'FILE'}"
        )
    if flag == "--import":
        words.imports.append(value)
    elif flag == "--config":
        words.files.append(value)
    elif flag == "--config-dir":
        words.config_dirs.append(value)
    elif value == "job":
        words.print_config = True
    else:
        raise ConfigError(f"--cfg {value}: must be job, which prints the resolved configuration")


def _take_section_names(attached: str, rest: list[str]) -> list[str]:
    """Return the section names of `--configs`, and remove their words from `rest`.

    `attached` is the text after `--configs=`. If it is empty, the names are the words of `rest` up
    to the next flag or assignment. Commas also separate names.
    """
    words_with_names = [attached] if attached else []
    while not attached and rest and "=" not in rest[0] and not rest[0].startswith(("-", "~")):
        words_with_names.append(rest.pop(0))
    names = split_names(words_with_names)
    if not names:
        from weft.cli.sections import list_example_sections

        sections = list_example_sections()
        example = " ".join(dict.fromkeys((sections[0], sections[-1])))
        raise ConfigError(
            f"--configs: needs names of sections, such as --configs {example}; weft config ls "
            "lists them"
        )
    return names


def _list_imports(values: Sequence[overrides.Override]) -> list[str]:
    """Return the modules in the last assignment to `imports`.

    They are imported before other assignments are read, because they may register the quickstart.
    """
    module_lists = []
    for override in values:
        if override.name == "imports" and not override.removed:
            module_lists.append(override.value)
    modules = module_lists[-1] if module_lists else []
    return list(coerce(modules, list[str], "imports"))


def format_overview() -> str:
    """Return a text that lists the quickstarts with their descriptions."""
    lines = [
        "weft quickstart NAME experiment_name=E trial_name=T key=value ...    (NAME --help shows "
        "the options)",
        "",
    ]
    for name in registry.quickstarts.load_all():
        lines += textwrap.wrap(
            " ".join(describe_config(registry.quickstarts.get(name))[:1]),
            get_terminal_width(),
            initial_indent=f"  {name:12} ",
            subsequent_indent=" " * 15,
            break_on_hyphens=False,
        ) or [f"  {name}"]
    return "\n".join(lines)
