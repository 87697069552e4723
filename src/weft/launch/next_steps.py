"""Last lines of a run's output: the path of its report, and commands for what to do next."""

from __future__ import annotations

import shlex
from pathlib import Path

from weft.experiment import Control, Experiment
from weft.graph.mfc import MFCDef
from weft.observe.jsonl import shorten_path

INDENT = " " * 8
REPORT = "report.html"


def build_next_lines(experiment: Experiment, run: Path) -> list[str]:
    """Return the lines for the end of a run: the path of its report, and follow-up commands.

    Returns an empty list if the run saves no model.
    """
    heads = {experiment.roles[role].head: role for role in reversed(experiment.saved_roles)}
    if "lm" in heads:
        commands = _build_policy_lines(experiment, heads["lm"], run)
    elif "score" in heads:
        commands = _build_reward_model_lines(experiment, heads["score"], run)
    else:
        return []
    first, *others = commands
    return [f"report: {run / REPORT}", f"next:   {first}", *(INDENT + each for each in others)]


def _build_policy_lines(experiment: Experiment, role: str, run: Path) -> list[str]:
    control = experiment.control
    at = shlex.quote(str(run))
    calls = []
    for n in experiment.graph.nodes:
        if isinstance(n, MFCDef) and n.role == role and n.trains:
            calls.append(n)
    if not any(call.args.get("loss") == "sft" for call in calls):
        began = experiment.roles[role].path
        if began is None:
            beside = []
        else:
            beside = [f"weft chat {shlex.quote(shorten_path(began))} {at}    # before and after"]
        return [f"weft chat {at}", *beside]
    name = _find_free_trial(control, "rw")
    reward = Path(control.fileroot) / control.experiment_name / name
    return [
        f"weft chat {at}",
        f"{_build_quickstart('rw', name, control)} model.path={at} dataset.type=preference "
        f"dataset.path=PAIRS.jsonl",
        f"{_build_quickstart('ppo', _find_free_trial(control, 'ppo'), control)} actor.path={at} "
        f"rew.path={shlex.quote(str(reward))} "
        "dataset.path=PROMPTS.jsonl",
    ]


def _build_reward_model_lines(experiment: Experiment, role: str, run: Path) -> list[str]:
    control = experiment.control
    began = experiment.roles[role].path
    at = shlex.quote(str(run))
    actor = "POLICY" if began is None else shlex.quote(shorten_path(began))
    ppo = _build_quickstart("ppo", _find_free_trial(control, "ppo"), control)
    return [
        f"{ppo} actor.path={actor} rew.path={at} dataset.path=PROMPTS.jsonl",
        f"weft eval rm {at} PAIRS.jsonl    # accuracy",
    ]


def _build_quickstart(name: str, trial: str, control: Control) -> str:
    if Path(control.fileroot) == Path("./runs"):
        root = ""
    else:
        root = f" fileroot={shlex.quote(control.fileroot)}"
    return (
        f"weft quickstart {name} experiment_name={control.experiment_name} trial_name={trial}{root}"
    )


def _find_free_trial(control: Control, name: str) -> str:
    """Return an unused trial name in the experiment's folder.

    The name is `name` itself or, if that exists, the first free one of `name-2`, `name-3` and so
    on.
    """
    folder = Path(control.fileroot).expanduser() / control.experiment_name
    return next(
        each
        for each in (name, *(f"{name}-{n}" for n in range(2, 10_000)))
        if not (folder / each).exists()
    )
