"""Find the directory of a model from its name.

runs/E/T                    newest checkpoint of a suitable role (`ModelQuery.roles`) of the run
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
# words for messages about the checkpoint of a keyword, and about another one in its place
SUPERLATIVES = {LATEST: "newest", BEST: "best"}
COMPARATIVES = {LATEST: "newer", BEST: "better"}
ACCEPTED_NAMES = "a model directory, a run such as runs/E/T, runs/E/T@step40, or a hub name"
NAME_PATTERN = re.compile(r"(?P<place>.*?)(?:@(?P<step>[^@/:]*))?(?::(?P<role>[^@/:]+))?")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# minimum similarity of a name to a suggested run; hub names are seldom above it
MIN_SIMILARITY = 0.7
MAX_RUNS = 500  # maximum number of runs searched for a hint

CheckpointSteps = Mapping[int, Path]  # step -> directory of a role's checkpoint


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

    def format_option(self, name: str) -> str:
        """Return the beginning of messages about `name`, the name that the user typed."""
        return f"{self.option}={name!r}" if self.option else name


def locate_model(name: str, query: ModelQuery | None = None) -> LocatedModel:
    """Return the model that `name` refers to, without looking up hub names.

    `query` states which models are acceptable; the default is policies. If nothing on this machine
    matches `name`, but it could be a hub name, the model's path is `name` itself. Raises
    `CheckpointError` if `name` refers to no model; the message lists the accepted forms of names
    and suggests a similar name.
    """
    query = query or ModelQuery()
    if is_remote(name):
        url = find_checkpoint_url(name, query.roles)
        return LocatedModel(copy_if_remote(url, query.format_option(url)))
    refuse_url(name, query.format_option(name), CheckpointError)
    folder = Path(name).expanduser()
    if folder.is_file() or is_model(folder):
        return LocatedModel(name)
    if folder.is_dir():
        return _find_in_run(name, folder, None, None, query)
    match = NAME_PATTERN.fullmatch(name)
    assert match is not None, "every text has this form"
    path = Path(match["place"]).expanduser()
    step = match["step"]
    role = match["role"]
    if match["place"] == LATEST:
        return _find_in_newest_run(name, step, role, query)
    if path.name in (LATEST, BEST) and step is None:
        step = path.name
        path = path.parent
    if match["place"] and path.is_dir() and not is_model(path):
        return _find_in_run(name, path, step, role, query)
    run = _find_short_run(str(path), query)
    if run is not None and not _is_cached(name):
        model = _find_in_run(name, run, step, role, query)
        return LocatedModel(
            model.path,
            f"{query.format_option(name)}: taken as a run, {model.path} (no model of this name is "
            f"cached)",
        )
    if HUB_NAME.fullmatch(name):
        return LocatedModel(name)
    raise CheckpointError(
        f"{query.format_option(name)}: there is no such file or directory; name {ACCEPTED_NAMES}; "
        f"{suggest_path(str(path), query.fileroot)}"
    )


def find_model(name: str, query: ModelQuery) -> LocatedModel:
    """Return the model that `name` refers to, after checking that it exists.

    `query` states which models are acceptable. A hub name is looked up first in the local cache,
    then on the hub. Raises `CheckpointError` if the model is not found.
    """
    model = locate_model(name, query)
    if not Path(model.path).expanduser().exists():
        from weft.data import hub  # the hub's library takes a moment to import

        hub.check_model(query.option, model.path, suggest_path(model.path, query.fileroot))
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


def suggest_path(typed_path: str, fileroot: str = RUNS) -> str:
    """Return a hint for a mistyped path: the most similar run, model or neighboring file."""
    path = Path(typed_path).expanduser()
    short_name = "/".join(path.parts[-2:])
    runs = {"/".join(run.parts[-2:]): run for run in _list_runs(fileroot)}
    similar_names = difflib.get_close_matches(
        short_name, [name for name in runs if name != typed_path], 1, MIN_SIMILARITY
    )
    contained_runs = []
    for run in runs.values():
        if typed_path.rstrip("/") in (str(run.parent), run.parent.name):
            contained_runs.append(run)
    if contained_runs or similar_names:
        return f"did you mean the run {(contained_runs or [runs[similar_names[0]]])[0]}?"
    if path.is_dir():
        models = sorted(child for child in path.iterdir() if is_model(child))
    else:
        models = []
    if models:
        return f"did you mean {models[0]}?"
    similar = suggest_sibling(path)
    return "check the spelling" if similar is None else f"did you mean {similar}?"


# -- runs


def _find_in_newest_run(
    typed_name: str, step: str | None, role: str | None, query: ModelQuery
) -> LocatedModel:
    """Return a checkpoint from the newest run that has one for a suitable role.

    `step` is a step such as "step40", "best", or None or "latest" for the newest checkpoint. For a
    resumed run, "best" and "latest" mean `query.initial_checkpoint`, so that the run keeps its
    original model. Raises `CheckpointError` if there is no suitable checkpoint.
    """
    if (
        query.initial_checkpoint is not None
        and step in (None, LATEST, BEST)
        and STEP.fullmatch(Path(query.initial_checkpoint).name)
    ):
        return _choose_initial(typed_name, Path(query.initial_checkpoint).expanduser(), "", query)
    if is_remote(query.fileroot):
        raise CheckpointError(
            f"{query.format_option(typed_name)}: the newest run is not looked up in a bucket; name "
            f"a run or checkpoint by its URL, such as {query.fileroot.rstrip('/')}/E/T"
        )
    root = find_runs_folder(query.fileroot)
    own_run = None if query.own_run is None else query.own_run.absolute()
    for run in list_newest_first(root):
        checkpoints = _find_checkpoints(run / CHECKPOINTS) if run.absolute() != own_run else {}
        if any(name in checkpoints for name in ([role] if role is not None else query.roles)):
            return _find_in_run(typed_name, run, LATEST if step is None else step, role, query)
    roles = role or " or ".join(query.roles)
    raise CheckpointError(
        f"{query.format_option(typed_name)}: no run in {query.fileroot} has a checkpoint of "
        f"{roles}; weft ls lists the runs; name {ACCEPTED_NAMES}"
    )


def _find_in_run(
    typed_name: str, folder: Path, step: str | None, role: str | None, query: ModelQuery
) -> LocatedModel:
    """Return the requested checkpoint of a run.

    `folder` is the directory of the run, its folder of checkpoints, or the folder of one role.
    `step` is a step such as "step40", "best", or None or "latest" for the newest. Raises
    `CheckpointError` if there is no such checkpoint.
    """
    is_run = (folder / CHECKPOINTS).is_dir() or (folder / RUN_CONFIG).is_file()
    checkpoints = _find_checkpoints(folder / CHECKPOINTS if is_run else folder)
    if not checkpoints:
        raise _build_missing_error(typed_name, folder, query)
    chosen_role = _choose_role(typed_name, str(folder), checkpoints, role, query)
    steps = checkpoints[chosen_role]
    if step is None or step == LATEST:
        return _choose_current(typed_name, steps[max(steps)], LATEST, chosen_role, query)
    if step == BEST:
        return _choose_current(
            typed_name, _find_best(typed_name, steps, query), BEST, chosen_role, query
        )
    number = step.removeprefix("step")
    if not number.isdigit() or int(number) not in steps:
        listed = ", ".join(f"@step{each}" for each in sorted(steps)[-12:])
        raise CheckpointError(
            f"{query.format_option(typed_name)}: {folder} has no such checkpoint of {chosen_role}; "
            f"it has {listed}, and @latest"
        )
    return LocatedModel(str(steps[int(number)]))


def _find_best(typed_name: str, steps: CheckpointSteps, query: ModelQuery) -> Path:
    """Return the best checkpoint of a role, according to the record that `save_best` writes.

    `steps` are the checkpoints of the role. Raises `CheckpointError` if the run has no such record,
    or if the best checkpoint is missing.
    """
    folder = next(iter(steps.values())).parent
    try:
        return find_best_checkpoint(folder.parent.parent, folder.name)
    except CheckpointError as error:
        listed = ", ".join(f"@step{each}" for each in sorted(steps)[-12:])
        raise CheckpointError(
            f"{query.format_option(typed_name)}: {error}; there are {listed}, and @latest"
        ) from None


def _choose_current(
    typed_name: str, current: Path, keyword: str, role: str, query: ModelQuery
) -> LocatedModel:
    """Return the checkpoint `current` of a role, or the initial checkpoint of a resumed run.

    `current` is the role's checkpoint for `keyword` ("latest" or "best"), which may change during a
    run. So a resumed run uses its initial checkpoint again, if that belongs to the same role.
    `typed_name` is the name that the user typed, for messages.
    """
    initial = None
    if query.initial_checkpoint is not None:
        initial = Path(query.initial_checkpoint).expanduser()
    if (
        initial is None
        or initial.absolute().parent != current.absolute().parent
        or STEP.fullmatch(initial.name) is None
    ):
        return LocatedModel(
            str(current),
            f"{query.format_option(typed_name)}: the {SUPERLATIVES[keyword]} checkpoint of {role}, "
            f"{current}",
        )
    remark = ""
    if initial.name != current.name:
        remark = f"; {current.name} is {COMPARATIVES[keyword]}"
    return _choose_initial(typed_name, initial, remark, query)


def _choose_initial(typed_name: str, initial: Path, remark: str, query: ModelQuery) -> LocatedModel:
    """Return the checkpoint `initial`, from which a resumed run originally started.

    The result has a note for the user, which mentions `typed_name` (the name that the user typed)
    and ends with `remark`. Raises `CheckpointError` if the checkpoint has been removed.
    """
    if not initial.is_dir():
        raise CheckpointError(
            f"{query.format_option(typed_name)}: this run began with {initial}, which no "
            f"longer exists{remark}; restore it, or begin a run with another trial_name"
        )
    return LocatedModel(
        str(query.initial_checkpoint),
        f"{query.format_option(typed_name)}: the checkpoint that this run began with, "
        f"{initial}{remark}",
    )


def _choose_role(
    typed_name: str,
    place: str,
    checkpoints: Mapping[str, CheckpointSteps],
    requested_role: str | None,
    query: ModelQuery,
) -> str:
    """Return the role whose checkpoint is used.

    This is `requested_role` if it is not None, else the first of `query.roles` that has a
    checkpoint, else the only role with a checkpoint. `checkpoints` maps roles to their checkpoints,
    and `place` is their folder, for messages. Raises `CheckpointError` if there is no such role.
    """
    if requested_role is not None:
        if requested_role in checkpoints:
            return requested_role
        raise CheckpointError(
            f"{query.format_option(typed_name)}: {place} has no checkpoints of {requested_role!r}; "
            f"it has those of {_format_roles(checkpoints)}"
        )
    for role in query.roles:
        if role in checkpoints:
            return role
    if len(checkpoints) == 1:
        return next(iter(checkpoints))
    raise CheckpointError(
        f"{query.format_option(typed_name)}: {place} has checkpoints of "
        f"{_format_roles(checkpoints)}, and none of {' or '.join(query.roles)}, which would serve "
        f"here; say which one: {place}@{LATEST}:{sorted(checkpoints)[0]}"
    )


def _format_roles(checkpoints: Mapping[str, CheckpointSteps]) -> str:
    return " and ".join(sorted(checkpoints))


def _find_checkpoints(root: Path) -> dict[str, CheckpointSteps]:
    """Return the checkpoint directories below `root` by role and step."""
    if not root.is_dir():
        return {}
    own_steps = _find_steps(root)
    if own_steps:
        return {root.name: own_steps}
    checkpoints = {}
    for child in root.iterdir():
        steps = _find_steps(child) if child.is_dir() else {}
        if steps:
            checkpoints[child.name] = steps
    return checkpoints


def _find_steps(folder: Path) -> CheckpointSteps:
    steps = {}
    for path in folder.glob("step*"):
        match = STEP.fullmatch(path.name)
        if match is not None and path.is_dir():
            steps[int(match[1])] = path
    return steps


def _build_missing_error(typed_name: str, folder: Path, query: ModelQuery) -> CheckpointError:
    """Return the error for a directory that contains neither a model nor checkpoints."""
    run = next((each for each in (folder, *folder.parents) if (each / RUN_CONFIG).is_file()), None)
    if run is not None:
        return CheckpointError(
            f"{query.format_option(typed_name)}: the run {run} has saved no checkpoint yet; wait "
            "for its end, or have it save earlier with save_freq_steps=N"
        )
    if not Path(typed_name).expanduser().exists():
        return CheckpointError(
            f"{query.format_option(typed_name)}: there is no such file or directory; name "
            f"{ACCEPTED_NAMES}; {suggest_path(str(folder), query.fileroot)}"
        )
    return CheckpointError(
        f"{query.format_option(typed_name)}: has no {CONFIG}, and no checkpoints of a run; name "
        f"{ACCEPTED_NAMES}; {suggest_path(typed_name, query.fileroot)}"
    )


def _find_short_run(name: str, query: ModelQuery) -> Path | None:
    """Return the directory of the run `name`, written as EXPERIMENT/TRIAL without its root folder.

    Returns None if `name` has another form, if there is no such run, or if it is `query.own_run`,
    the run for which a model is being looked up.
    """
    if len(Path(name).parts) != 2 or name.startswith((".", "/", "~")):
        return None
    if is_remote(query.fileroot):
        return None  # runs in buckets are named by their URLs
    run = find_runs_folder(query.fileroot) / name
    is_own_run = query.own_run is not None and run.absolute() == query.own_run.absolute()
    if not is_own_run and ((run / RUN_CONFIG).is_file() or (run / CHECKPOINTS).is_dir()):
        return run
    return None


def _is_cached(name: str) -> bool:
    from weft.data import hub

    return HUB_NAME.fullmatch(name) is not None and hub.is_cached(name)


def _list_runs(fileroot: str) -> Iterator[Path]:
    """Yield runs that have checkpoints, at most `MAX_RUNS` of them to limit the time."""
    root = find_runs_folder(fileroot)
    if not root.is_dir():
        return
    for count, folder in enumerate(root.glob(f"*/*/{CHECKPOINTS}")):
        if count == MAX_RUNS:
            return
        yield folder.parent
