"""Find the directory of a model from its name.

runs/E/T                    newest checkpoint of the run, of a suitable role (`ModelQuery.roles`)
runs/E/T@step40             checkpoint of step 40; @latest means the newest
runs/E/T@best               checkpoint that is the best by the run's option `save_best`
runs/E/T@latest:critic      newest checkpoint of the role `critic`; equivalent to runs/E/T:critic
runs/E/T/checkpoints/actor  newest checkpoint of the role `actor`; equivalent to .../actor/latest
E/T                         the run runs/E/T, unless the hub's cache has a model of this name
latest                      newest checkpoint of the newest run in runs/ that has a suitable role
latest@step40               checkpoint of step 40 of that run
latest:critic               newest checkpoint of the newest run that has the role `critic`
MODEL_DIR, OWNER/NAME       Hugging Face model directory, hub name
gs://BUCKET/MODEL_DIR       model directory in a bucket, copied to this machine
gs://BUCKET/runs/E/T        newest checkpoint of a run in a bucket, of a suitable role; also with
                            @step40, @best, @latest:critic
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.errors import CheckpointError
from weft.observe.best import find_best_checkpoint
from weft.observe.jsonl import CHECKPOINTS, POLICIES, STEP
from weft.observe.run_list import list_newest_first
from weft.reading import refuse_url, suggest_sibling
from weft.storage.buckets import is_remote
from weft.storage.copies import copy_if_remote, find_checkpoint_url, find_runs_folder

SCORERS = ("rew", "model")  # roles that can be used as a reward model, best first
# roles that can be used as a critic, best first
CRITICS = ("critic", "rew", "model", "actor")
RUNS = "./runs"
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
CONFIG = "config.json"
ADAPTER = "adapter_config.json"
RUN_CONFIG = "config.yaml"
LATEST = "latest"
BEST = "best"
WORDS = {LATEST: "newest", BEST: "best"}
NOW = {LATEST: "newer", BEST: "better"}  # of another checkpoint
ACCEPTED_NAMES = "a model directory, a run such as runs/E/T, runs/E/T@step40, or a hub name"
NAME_PATTERN = re.compile(r"(?P<place>.*?)(?:@(?P<step>[^@/:]*))?(?::(?P<role>[^@/:]+))?")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# minimum similarity of a name to a suggested run; hub names are seldom above it
MIN_SIMILARITY = 0.7
MAX_RUNS = 500  # maximum number of runs searched for a hint

CheckpointSteps = Mapping[int, Path]


@dataclass(frozen=True)
class LocatedModel:
    """Result of looking up a model by name.

    `path` is a directory or a hub name. `note` is a message that tells the user which model was
    chosen, or empty.
    """

    path: str
    note: str = ""


@dataclass(frozen=True)
class ModelQuery:
    """Options for finding a model by name.

    Attributes:
        option: Command-line option with which the user names the model; shown in messages.
        roles: Roles whose checkpoints are acceptable, best first.
        fileroot: Folder of all runs.
        initial_checkpoint: For a resumed run, the checkpoint that it originally started from; None
            for a new run. Unless the name contains a step, this checkpoint is used again, even if
            there are newer ones.
        own_run: Directory of the run that will use the model. It is skipped in the search for the
            newest run.
    """

    option: str = ""
    roles: Sequence[str] = POLICIES
    fileroot: str = RUNS
    initial_checkpoint: str | None = None
    own_run: Path | None = None

    def format_option(self, given: str) -> str:
        return f"{self.option}={given!r}" if self.option else given


def locate_model(given: str, wanted: ModelQuery | None = None) -> LocatedModel:
    """Return the model that the name `given` refers to, without looking up hub names.

    `wanted` states which models are acceptable; by default, these are policies. If nothing on this
    machine matches `given`, but it could be a hub name, it is returned unchanged as the model's
    path. Raises `CheckpointError` if the name refers to no model. The message lists the accepted
    kinds of names and suggests a similar name.
    """
    wanted = wanted or ModelQuery()
    if is_remote(given):
        url = find_checkpoint_url(given, wanted.roles)
        return LocatedModel(copy_if_remote(url, wanted.format_option(url)))
    refuse_url(given, wanted.format_option(given), CheckpointError)
    folder = Path(given).expanduser()
    if folder.is_file() or is_model(folder):
        return LocatedModel(given)
    if folder.is_dir():
        return _find_in_run(given, folder, None, None, wanted)
    match = NAME_PATTERN.fullmatch(given)
    assert match is not None, "every text has this form"
    place = Path(match["place"]).expanduser()
    step = match["step"]
    role = match["role"]
    if match["place"] == LATEST:
        return _find_in_newest_run(given, step, role, wanted)
    if place.name in (LATEST, BEST) and step is None:
        step = place.name
        place = place.parent
    if match["place"] and place.is_dir() and not is_model(place):
        return _find_in_run(given, place, step, role, wanted)
    short = _find_short_run(str(place), wanted)
    if short is not None and not _is_cached(given):
        model = _find_in_run(given, short, step, role, wanted)
        return LocatedModel(
            model.path,
            f"{wanted.format_option(given)}: taken as a run, {model.path} (no model of this name is cached)",
        )
    if HUB_NAME.fullmatch(given):
        return LocatedModel(given)
    raise CheckpointError(
        f"{wanted.format_option(given)}: there is no such file or directory; name {ACCEPTED_NAMES}; "
        f"{suggest_path(str(place), wanted.fileroot)}"
    )


def find_model(given: str, wanted: ModelQuery) -> LocatedModel:
    """Return the model that `given` refers to, after checking that it exists.

    `wanted` states which models are acceptable. A hub name is looked up in the local cache first,
    and then on the hub. Raises `CheckpointError` if the model is not found.
    """
    model = locate_model(given, wanted)
    if not Path(model.path).expanduser().exists():
        from weft.data import hub  # the hub's library takes a moment to import

        hub.check_model(wanted.option, model.path, suggest_path(model.path, wanted.fileroot))
    return model


def find_newest_run(path: str) -> str:
    """Return the newest run in a folder of runs, such as `saved_model`.

    If `path` is not a folder of runs, it is returned unchanged.
    """
    folder = Path(path).expanduser()
    if is_model(folder) or (folder / CHECKPOINTS).is_dir():
        return path
    runs = [directory for directory in folder.glob(f"*/*/{CHECKPOINTS}") if directory.is_dir()]
    if runs:
        return str(max(runs, key=lambda directory: directory.stat().st_mtime).parent)
    return path


def is_model(folder: Path) -> bool:
    """Return whether a directory contains a model or an adapter."""
    return (folder / CONFIG).is_file() or (folder / ADAPTER).is_file()


def suggest_path(given: str, fileroot: str = RUNS) -> str:
    """Return a hint for a mistyped path: the most similar run, model or neighboring file."""
    place = Path(given).expanduser()
    short = "/".join(place.parts[-2:])
    runs = {"/".join(run.parts[-2:]): run for run in _list_runs(fileroot)}
    close = difflib.get_close_matches(
        short, [name for name in runs if name != given], 1, MIN_SIMILARITY
    )
    inside = []
    for run in runs.values():
        if given.rstrip("/") in (str(run.parent), run.parent.name):
            inside.append(run)
    if inside or close:
        return f"did you mean the run {(inside or [runs[close[0]]])[0]}?"
    if place.is_dir():
        models = sorted(p for p in place.iterdir() if is_model(p))
    else:
        models = []
    if models:
        return f"did you mean {models[0]}?"
    similar = suggest_sibling(place)
    return "check the spelling" if similar is None else f"did you mean {similar}?"


# -- runs


def _find_in_newest_run(
    given: str, step: str | None, role: str | None, wanted: ModelQuery
) -> LocatedModel:
    """Return a checkpoint from the newest run that has one for a suitable role.

    `step` is a step such as "step40", "best", or None or "latest" for the newest checkpoint. If a
    run that is being resumed asks for the newest or best one, the result is
    `wanted.initial_checkpoint` instead, so that the run keeps its original model. Raises
    `CheckpointError` if there is no suitable checkpoint.
    """
    if (
        wanted.initial_checkpoint is not None
        and step in (None, LATEST, BEST)
        and STEP.fullmatch(Path(wanted.initial_checkpoint).name)
    ):
        return _choose_initial(given, Path(wanted.initial_checkpoint).expanduser(), "", wanted)
    if is_remote(wanted.fileroot):
        raise CheckpointError(
            f"{wanted.format_option(given)}: the newest run is not looked up in a bucket; name a run "
            f"or checkpoint by its URL, such as {wanted.fileroot.rstrip('/')}/E/T"
        )
    root = find_runs_folder(wanted.fileroot)
    own = None if wanted.own_run is None else wanted.own_run.absolute()
    for run in list_newest_first(root):
        checkpoints = _find_checkpoints(run / CHECKPOINTS) if run.absolute() != own else {}
        if any(name in checkpoints for name in ([role] if role is not None else wanted.roles)):
            return _find_in_run(given, run, LATEST if step is None else step, role, wanted)
    roles = role or " or ".join(wanted.roles)
    raise CheckpointError(
        f"{wanted.format_option(given)}: no run in {wanted.fileroot} has a checkpoint of {roles}; weft ls "
        f"lists the runs; name {ACCEPTED_NAMES}"
    )


def _find_in_run(
    given: str, place: Path, step: str | None, role: str | None, wanted: ModelQuery
) -> LocatedModel:
    """Return the requested checkpoint of a run.

    `place` is the directory of the run, its folder of checkpoints, or the folder of one role.
    `step` is a step such as "step40", "best", or None or "latest" for the newest. Raises
    `CheckpointError` if there is no such checkpoint.
    """
    inside = (place / CHECKPOINTS).is_dir() or (place / RUN_CONFIG).is_file()
    checkpoints = _find_checkpoints(place / CHECKPOINTS if inside else place)
    if not checkpoints:
        raise _build_missing_error(given, place, wanted)
    name = _choose_role(given, str(place), checkpoints, role, wanted)
    steps = checkpoints[name]
    if step is None or step == LATEST:
        return _choose_current(given, steps[max(steps)], LATEST, name, wanted)
    if step == BEST:
        return _choose_current(given, _find_best(given, steps, wanted), BEST, name, wanted)
    number = step.removeprefix("step")
    if not number.isdigit() or int(number) not in steps:
        listed = ", ".join(f"@step{each}" for each in sorted(steps)[-12:])
        raise CheckpointError(
            f"{wanted.format_option(given)}: {place} has no such checkpoint of {name}; it has {listed}, "
            f"and @latest"
        )
    return LocatedModel(str(steps[int(number)]))


def _find_best(given: str, steps: CheckpointSteps, wanted: ModelQuery) -> Path:
    """Return the best of a role's checkpoints by the run's record, which `save_best` writes.

    Raises `CheckpointError` if the run has no such record, or if the checkpoint is missing.
    """
    folder = next(iter(steps.values())).parent
    try:
        return find_best_checkpoint(folder.parent.parent, folder.name)
    except CheckpointError as error:
        listed = ", ".join(f"@step{each}" for each in sorted(steps)[-12:])
        raise CheckpointError(
            f"{wanted.format_option(given)}: {error}; there are {listed}, and @latest"
        ) from None


def _choose_current(
    given: str, current: Path, which: str, role: str, wanted: ModelQuery
) -> LocatedModel:
    """Return the checkpoint `current` of a role, or the one that a resumed run began with.

    `current` is the newest or the best one, as `which` says, so that it can be another one later.
    `wanted.initial_checkpoint` is the checkpoint that the run began with, or None for a new run. It
    is returned if it is one of the role's checkpoints. `given` is the name that the user typed, for
    messages.
    """
    began = (
        None if wanted.initial_checkpoint is None else Path(wanted.initial_checkpoint).expanduser()
    )
    if (
        began is None
        or began.absolute().parent != current.absolute().parent
        or STEP.fullmatch(began.name) is None
    ):
        return LocatedModel(
            str(current),
            f"{wanted.format_option(given)}: the {WORDS[which]} checkpoint of {role}, {current}",
        )
    return _choose_initial(
        given,
        began,
        "" if began.name == current.name else f"; {current.name} is {NOW[which]}",
        wanted,
    )


def _choose_initial(given: str, began: Path, more: str, wanted: ModelQuery) -> LocatedModel:
    """Return the checkpoint `began`, from which the resumed run originally started.

    The result has a note for the user, which mentions `given` (the name that the user typed) and
    ends with `more`. Raises `CheckpointError` if the checkpoint has been removed.
    """
    if not began.is_dir():
        raise CheckpointError(
            f"{wanted.format_option(given)}: this run began with {began}, which is there no more{more}; "
            f"restore it, or begin a run with "
            "another trial_name"
        )
    return LocatedModel(
        str(wanted.initial_checkpoint),
        f"{wanted.format_option(given)}: the checkpoint that this run began with, {began}{more}",
    )


def _choose_role(
    given: str,
    place: str,
    checkpoints: Mapping[str, CheckpointSteps],
    requested_role: str | None,
    wanted: ModelQuery,
) -> str:
    """Return the role whose checkpoint is used.

    This is `requested_role` if given, else the first of `wanted.roles` that has a checkpoint, else
    the only role with a checkpoint. Raises `CheckpointError` if there is no such role.
    """
    if requested_role is not None:
        if requested_role in checkpoints:
            return requested_role
        raise CheckpointError(
            f"{wanted.format_option(given)}: {place} has no checkpoints of {requested_role!r}; it has those of "
            f"{_format_roles(checkpoints)}"
        )
    fitting = [role for role in wanted.roles if role in checkpoints]
    if fitting or len(checkpoints) == 1:
        return fitting[0] if fitting else next(iter(checkpoints))
    raise CheckpointError(
        f"{wanted.format_option(given)}: {place} has checkpoints of {_format_roles(checkpoints)}, and none of "
        f"{' or '.join(wanted.roles)}, which "
        f"would serve here; say which one: {place}@{LATEST}:{sorted(checkpoints)[0]}"
    )


def _format_roles(checkpoints: Mapping[str, CheckpointSteps]) -> str:
    return " and ".join(sorted(checkpoints))


def _find_checkpoints(root: Path) -> dict[str, CheckpointSteps]:
    """Return the checkpoint directories below `root` by role and step."""
    if not root.is_dir():
        return {}
    own = _find_steps(root)
    if own:
        return {root.name: own}
    folders = [p for p in root.iterdir() if p.is_dir()]
    return {folder.name: steps for folder in folders if (steps := _find_steps(folder))}


def _find_steps(folder: Path) -> CheckpointSteps:
    return {
        int(match[1]): p
        for p in folder.glob("step*")
        if (match := STEP.fullmatch(p.name)) and p.is_dir()
    }


def _build_missing_error(given: str, place: Path, wanted: ModelQuery) -> CheckpointError:
    """Return the error for a directory that contains neither a model nor checkpoints."""
    run = next((each for each in (place, *place.parents) if (each / RUN_CONFIG).is_file()), None)
    if run is not None:
        return CheckpointError(
            f"{wanted.format_option(given)}: the run {run} has saved no checkpoint yet; wait for its end, "
            f"or have it save earlier with "
            "save_freq_steps=N"
        )
    if not Path(given).expanduser().exists():
        return CheckpointError(
            f"{wanted.format_option(given)}: there is no such file or directory; name {ACCEPTED_NAMES}; "
            f"{suggest_path(str(place), wanted.fileroot)}"
        )
    return CheckpointError(
        f"{wanted.format_option(given)}: has no {CONFIG}, and no checkpoints of a run; name {ACCEPTED_NAMES}; "
        f"{suggest_path(given, wanted.fileroot)}"
    )


def _find_short_run(given: str, wanted: ModelQuery) -> Path | None:
    """Return the directory of a run that is given as EXPERIMENT/TRIAL, without `runs/` before it.

    Returns None if `given` has another form, if there is no such run, or if it is `wanted.own_run`,
    the run for which a model is being looked up.
    """
    if len(Path(given).parts) != 2 or given.startswith((".", "/", "~")):
        return None
    if is_remote(wanted.fileroot):
        return None  # a run in a bucket is named by its URL
    run = find_runs_folder(wanted.fileroot) / given
    same = wanted.own_run is not None and run.absolute() == wanted.own_run.absolute()
    if not same and ((run / RUN_CONFIG).is_file() or (run / CHECKPOINTS).is_dir()):
        return run
    return None


def _is_cached(name: str) -> bool:
    from weft.data import hub

    return HUB_NAME.fullmatch(name) is not None and hub.is_cached(name)


def _list_runs(fileroot: str) -> Iterator[Path]:
    """Yield runs that have checkpoints. At most `MAX_RUNS` runs are listed, to limit the time."""
    root = find_runs_folder(fileroot)
    if not root.is_dir():
        return
    for count, folder in enumerate(root.glob(f"*/*/{CHECKPOINTS}")):
        if count == MAX_RUNS:
            return
        yield folder.parent
