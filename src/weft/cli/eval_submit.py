"""`weft eval submit`: evaluate a model in a job on Slurm, Ray or Beaker.

Writes a job file from a template, uploads the model if the job cannot read it here (Beaker), and
submits the job if the system's client (sbatch, ray, beaker) is installed. A second run of the same
command skips the steps that are finished. The job runs `weft eval suite`; words after -- are added
to it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from weft.checkpoints.names import ADAPTER
from weft.cli import eval_suite
from weft.cli.eval_export import TOKENIZER, build_export
from weft.cli.model_arguments import print_note
from weft.cli.parsing import CommandParser
from weft.errors import ConfigError, build_unknown_name_error
from weft.evaluation.task_data import FOLDER, find_data
from weft.extras import install
from weft.launch.eval_job import (
    CLIENTS,
    IMAGE,
    PRIORITIES,
    EvalJob,
    ModelPlace,
    locate_data,
    locate_place,
    split_tasks,
)
from weft.launch.gcloud import mask_environment
from weft.launch.job_steps import StepRecord
from weft.launch.job_template import SYSTEMS, read_template, write_template
from weft.launch.submission import JobSubmission, check_partitions
from weft.observe.jsonl import read_json
from weft.redaction import mask_words

HELP = "evaluate a model in a job on Slurm, Ray or Beaker"
SUITE = "open-instruct"
OUTPUT = Path("eval-jobs")
# The suite's judge unless another one is named.
JUDGE = "https://api.openai.com/v1"
JUDGE_MODEL = "gpt-4o-mini"
JUDGE_KEY = "OPENAI_API_KEY"
HARNESS = "lm_eval"
TOKENIZER_SETTINGS = "tokenizer_config.json"
EPILOG = """examples:
  weft eval submit --model_name tulu-7b --location runs/E/T --is_tuned --print
  weft eval submit --model_name tulu-7b --location runs/E/T --cluster gpu --data_dir data
  weft eval submit --model_name tulu-7b --location MODEL_DIR --is_tuned --workspace ORG/WORKSPACE
  weft eval submit --model_name tulu-7b --from-easylm out/streaming_params_20384 --model_size 7b \\
      --tokenizer_path tokenizer.model --is_tuned --workspace ORG/WORKSPACE
  weft eval submit --system slurm --write_template job.slurm.jinja
  weft eval submit --model_name tulu-7b --location runs/E/T --template job.slurm.jinja \\
      -- --limit 100"""


def add_parser(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Add the command `submit` to the commands of `weft eval`."""
    parser: CommandParser = commands.add_parser(
        "submit",
        help=HELP,
        description=__doc__,
        epilog=EPILOG,
        usage="weft eval submit --model_name NAME --location PLACE [options] [-- SUITE OPTIONS]",
    )
    parser.set_defaults(run=run)
    _add_model_options(parser)
    _add_job_options(parser)
    parser.add_argument(
        "--tasks",
        default=SUITE,
        metavar="A,B",
        help="tasks of weft eval suite (default %(default)s)",
    )
    parser.add_argument(
        "--data_dir",
        metavar="DIR",
        help="data of the tasks: a folder that the job can read, or a Beaker dataset",
    )
    parser.add_argument(
        "--judge",
        metavar="URL",
        help=f"OpenAI-compatible endpoint for tasks with a judge (default {JUDGE})",
    )
    parser.add_argument(
        "--judge_model", metavar="NAME", help=f"the judge's model (default {JUDGE_MODEL})"
    )
    parser.add_argument(
        "--secret",
        action="append",
        default=[],
        metavar="NAME",
        help="secret that the job needs, such as HF_TOKEN (may be repeated)",
    )
    parser.add_argument(
        "--template", type=Path, metavar="FILE", help="template of the job file (default: weft's)"
    )
    parser.add_argument(
        "--write_template",
        type=Path,
        metavar="FILE",
        help="write the default template of the system to FILE, for editing, and stop",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=OUTPUT,
        metavar="DIR",
        help="folder of job files, in a folder for each model (default %(default)s)",
    )
    parser.add_argument(
        "--print",
        "--dry-run",
        action="store_true",
        dest="print_only",
        help="print the job file and the commands; write and run nothing",
    )
    parser.add_argument(
        "--resubmit", action="store_true", help="submit the job even if it was submitted before"
    )


def _add_model_options(parser: CommandParser) -> None:
    parser.add_argument(
        "--model_name", metavar="NAME", help="name of the model, and of its jobs and files"
    )
    parser.add_argument(
        "--location",
        metavar="PLACE",
        help="model directory, run, URL or hub:OWNER/NAME; on Beaker also the id of a dataset, or "
        "a folder of its hosts",
    )
    parser.add_argument(
        "--from-easylm",
        metavar="PATH",
        help="instead of --location: checkpoint of EasyLM to convert, upload and evaluate",
    )
    parser.add_argument(
        "--model_size", metavar="SIZE", help="EasyLM's size of that checkpoint, such as 7b"
    )
    parser.add_argument(
        "--update_llama_config", metavar="DICT", help="changes of that size, as a dictionary"
    )
    parser.add_argument(
        "--tokenizer_path",
        metavar="PATH",
        help=f"its tokenizer (default: {TOKENIZER} in the current folder)",
    )
    parser.add_argument(
        "--subfolder", default="", metavar="DIR", help="folder of the model below its location"
    )
    parser.add_argument(
        "--is_tuned", action="store_true", help="apply the model's chat template to all prompts"
    )
    parser.add_argument(
        "--upload",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="upload a folder to Beaker; without, Beaker's hosts must have it (default: on)",
    )


def _add_job_options(parser: CommandParser) -> None:
    parser.add_argument(
        "--system",
        metavar="|".join(SYSTEMS),
        help="where the job runs (default: beaker with --workspace, else slurm)",
    )
    parser.add_argument("--workspace", metavar="NAME", help="workspace on Beaker; account on Slurm")
    parser.add_argument(
        "--cluster",
        nargs="+",
        default=[],
        metavar="NAME",
        help="clusters on Beaker, or all; partitions on Slurm; address of Ray",
    )
    parser.add_argument(
        "--priority",
        metavar="WORD",
        help=f"{', '.join(PRIORITIES)}: priority on Beaker (default {PRIORITIES[0]}), QOS on Slurm",
    )
    parser.add_argument(
        "--num_gpus",
        type=int,
        default=1,
        metavar="N",
        help="GPUs, each of which runs a part of the tasks; 0: only CPUs (default 1)",
    )
    parser.add_argument(
        "--image",
        default=IMAGE,
        metavar="NAME",
        help="image on Beaker that has weft (default %(default)s)",
    )


def run(given: argparse.Namespace) -> int:
    """Run the command, and return the exit code: that of the system's client if it fails.

    Everything is checked before anything is written. Raises `UserError` for unusable input.
    """
    system = choose_system(given)
    if given.write_template is not None:
        write_template(system, given.write_template)
        print(f"wrote {given.write_template}; use it by --system {system} --template FILE")
        return 0
    if not given.model_name:
        raise ConfigError("--model_name is missing: it names the job, its file and its results")
    folder = given.output / given.model_name
    export = build_export(given, folder)
    if export is None:
        place = locate_model_place(given, system)
    else:
        place = ModelPlace("folder", str(export.output))
    if not given.upload:
        place = refuse_upload(place, system)
    suite = parse_suite_words(given.words)
    shares, needs = plan_tasks(given)
    check_task_names(given.tasks, suite.include_path, system)
    job = build_job(given, system, place, shares, needs)
    job.check()
    record = StepRecord.read(folder)
    submission = JobSubmission(job, read_template(system, given.template), record, given.resubmit)
    submission.check()
    if export is not None:
        export.check(record)
        submission.identity = export.identify(copy=not given.print_only)
    if not given.print_only:
        check_cluster(job)
    for note in list_notes(job, needs):
        print_note(f"note: {note}")
    if given.print_only:
        if export is not None:
            export.print_plan(record, str(submission.identity))
        submission.print_plan()
        return 0
    if export is not None:
        export.run(record, str(submission.identity))
    return submission.run()


def choose_system(given: argparse.Namespace) -> str:
    """Return the system of the job. Raises `ConfigError` for an unknown one."""
    if given.system is None:
        return "beaker" if given.workspace else "slurm"
    if given.system not in SYSTEMS:
        raise build_unknown_name_error("--system", given.system, SYSTEMS)
    return str(given.system)


# -- the job


def locate_model_place(given: argparse.Namespace, system: str) -> ModelPlace:
    """Return the place of `--location`. Raises `UserError` if it is missing or has no model."""
    if given.location is None:
        raise ConfigError("--location is missing: name a model directory, or a Beaker dataset's id")
    return locate_place(given.location, system, given.subfolder.strip("/"))


def refuse_upload(place: ModelPlace, system: str) -> ModelPlace:
    """Return the place of a model that Beaker's hosts read where it is.

    Raises `ConfigError` on another system, which uploads no models.
    """
    if system != "beaker":
        raise ConfigError("--no-upload: only Beaker's models are uploaded; leave it out")
    if place.kind != "folder":
        return place
    return ModelPlace("host", str(Path(place.text).absolute()))


def build_job(
    given: argparse.Namespace,
    system: str,
    place: ModelPlace,
    shares: Sequence[str],
    needs: TaskNeeds,
) -> EvalJob:
    """Return the job for the command line. Raises `UserError` for unusable options."""
    extra = list(given.words)
    masked = mask_words(extra)
    if masked != extra or any(mask_environment(word) != word for word in extra):
        raise ConfigError(
            f"the words after -- are written into the job file, and contain a secret: "
            f"{mask_environment(shlex.join(masked))}; name the variable by --secret NAME instead"
        )
    return EvalJob(
        model_name=given.model_name,
        system=system,
        place=place,
        folder=given.output / given.model_name,
        tasks=given.tasks,
        shares=shares,
        words=[*needs.words, *extra],
        subfolder=given.subfolder.strip("/"),
        is_tuned=given.is_tuned,
        data=None if given.data_dir is None else locate_data(given.data_dir, system),
        num_gpus=given.num_gpus,
        workspace=given.workspace,
        clusters=given.cluster,
        priority=given.priority,
        secrets=list(dict.fromkeys([*given.secret, *needs.secrets])),
        image=given.image,
    )


def parse_suite_words(words: Sequence[str]) -> argparse.Namespace:
    """Return the options after --, as `weft eval suite` reads them.

    Raises `ConfigError` for unknown options, and for those that `weft eval submit` sets itself.
    """
    parser = CommandParser(prog="weft eval")
    eval_suite.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["suite", "MODEL", "--tasks", "", *words])
    if parsed.tasks:
        raise ConfigError(f"--tasks {parsed.tasks}: write it before --")
    if parsed.output is not None:
        raise ConfigError(
            f"--output {parsed.output}: write it before --, as the folder of all jobs"
        )
    return parsed


def check_task_names(tasks: str, include_path: Sequence[Path], system: str) -> None:
    """Raise `UserError` for a task that the job would not find, with the nearest name.

    Task files are on this machine only for Slurm's jobs. Without lm_eval, nothing is checked.
    """
    from weft.evaluation.catalogue import list_names
    from weft.evaluation.suite_tasks import TaskSelection, open_manager

    if find_spec(HARNESS) is None or (include_path and system != "slurm"):
        return
    known = list_names()
    names = [name for name in tasks.split(",") if name and name not in known]
    if system != "slurm":
        names = [name for name in names if "/" not in name]
    if names:
        open_manager(TaskSelection(names, include_path))


@dataclass(frozen=True)
class TaskNeeds:
    """Needs of tasks: data sets by name, words of `weft eval suite`, and names of secrets."""

    data: Sequence[str] = ()
    words: Sequence[str] = ()
    secrets: Sequence[str] = ()


def plan_tasks(given: argparse.Namespace) -> tuple[list[str], TaskNeeds]:
    """Return the tasks of each GPU, and what the tasks of weft's catalogue need.

    Raises `ConfigError` for an empty list, a wrong number of GPUs, and half a judge.
    """
    from weft.evaluation.catalogue import GROUPS, read_catalogue

    names = [name for name in given.tasks.split(",") if name]
    if not names:
        raise ConfigError(f"--tasks is empty; name tasks, or leave it out for {SUITE}")
    catalogue = read_catalogue()
    members = [member for name in names for member in GROUPS.get(name, (name,))]
    if given.num_gpus > 1:
        shares = split_tasks(members, given.num_gpus)
    else:
        shares = [",".join(names)]
    blocks = [catalogue[name][0] for name in members if name in catalogue]
    data = list(dict.fromkeys(block.data for block in blocks))
    words = ["--allow_code"] if any(block.code for block in blocks) else []
    if given.judge_model is None and given.judge not in (None, JUDGE):
        raise ConfigError(f"--judge {given.judge}: name its model too, by --judge_model")
    is_judged = any(block.judge for block in blocks)
    if not is_judged and (given.judge is not None or given.judge_model is not None):
        raise ConfigError("--judge: none of the tasks has a judge; leave it out")
    if not is_judged:
        return shares, TaskNeeds(data, words)
    url = given.judge or JUDGE
    words += ["--judge", url, "--judge_model", given.judge_model or JUDGE_MODEL]
    return shares, TaskNeeds(data, words, [JUDGE_KEY] if url == JUDGE else [])


def check_cluster(job: EvalJob) -> None:
    """Raise `ConfigError` if sbatch is installed and could not run the job.

    The jobs of this machine's Slurm read this machine's files.
    """
    if job.system != "slurm" or shutil.which(CLIENTS["slurm"]) is None:
        return
    if job.place.kind == "host":
        raise ConfigError(f"--location {job.place.text}: there is no such folder")
    check_partitions(job)


def list_notes(job: EvalJob, needs: TaskNeeds) -> list[str]:
    """Return what the user may not expect of the job, or may have forgotten."""
    notes = [job.place.note] if job.place.note else []
    place = Path(job.place.text)
    if job.place.kind == "host" and not place.exists():
        notes.append(f"{place} is not on this machine; the machine of the job must have it")
    if job.needs_upload and (place / ADAPTER).is_file():
        notes.append(
            f"{place} is an adapter, and the job needs its base model too: use a base model on the "
            f"hub, or upload a merged model (weft convert merge)"
        )
    if job.is_tuned and "--chat-template" not in job.words and not has_template(place):
        notes.append(
            f"{place} has no chat template, and --is_tuned needs one; add -- --chat-template NAME"
        )
    missing = list_missing_data(job, needs)
    if missing:
        notes.append(
            f"the job looks for {', '.join(missing)} in {FOLDER}; name the folder of the tasks' "
            f"data by --data_dir"
        )
    if "--allow_code" in needs.words:
        notes.append("some tasks run programs that the model writes, in weft's sandbox")
    if job.system == "slurm":
        for name in job.secrets:
            if name not in os.environ:
                notes.append(f"{name} is not set in this shell, from which sbatch passes it on")
        if find_spec(HARNESS) is None:
            notes.append(f"the job needs {HARNESS}, which is not installed: {install('eval')}")
    return notes


def has_template(folder: Path) -> bool:
    """Return whether a model directory has a chat template; True if it has no tokenizer."""
    settings = folder / TOKENIZER_SETTINGS
    if not settings.is_file() or any(folder.glob("chat_template*")):
        return True
    return bool(read_json(settings).get("chat_template"))


def list_missing_data(job: EvalJob, needs: TaskNeeds) -> list[str]:
    """Return the data sets that the job would look up in a folder of its machine.

    Of Slurm's jobs, which have this machine's files, only those that are not there.
    """
    if job.data is not None or "--data" in job.words or "--data_dir" in job.words:
        return []
    if job.system != "slurm":
        return list(needs.data)
    return [name for name in needs.data if find_data(name, {}, FOLDER) is None]
