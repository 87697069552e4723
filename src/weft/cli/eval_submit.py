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
from weft.cli.parsing import CommandParser, split_names
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
# default judge of the tasks
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


def run(arguments: argparse.Namespace) -> int:
    """Run `weft eval submit ...`, and return the exit code.

    If the system's client fails, its exit code is returned. All input is checked before anything is
    written. Raises `UserError` for unusable input.
    """
    system = choose_system(arguments)
    if arguments.write_template is not None:
        write_template(system, arguments.write_template)
        print(f"wrote {arguments.write_template}; use it by --system {system} --template FILE")
        return 0
    if not arguments.model_name:
        raise ConfigError("--model_name is missing: it names the job, its file and its results")
    folder = arguments.output / arguments.model_name
    export = build_export(arguments, folder)
    if export is None:
        place = locate_model_place(arguments, system)
    else:
        place = ModelPlace("folder", str(export.output))
    if not arguments.upload:
        place = refuse_upload(place, system)
    suite = parse_suite_words(arguments.words)
    shares, needs = plan_tasks(arguments)
    check_task_names(arguments.tasks, suite.include_path, system)
    job = build_job(arguments, system, place, shares, needs)
    job.check()
    record = StepRecord.read(folder)
    submission = JobSubmission(
        job, read_template(system, arguments.template), record, arguments.resubmit
    )
    submission.check()
    if export is not None:
        export.check(record)
        submission.identity = export.identify(copy=not arguments.print_only)
    if not arguments.print_only:
        check_cluster(job)
    for note in list_notes(job, needs):
        print_note(f"note: {note}")
    if arguments.print_only:
        if export is not None:
            export.print_plan(record, str(submission.identity))
        submission.print_plan()
        return 0
    if export is not None:
        export.run(record, str(submission.identity))
    return submission.run()


def choose_system(arguments: argparse.Namespace) -> str:
    """Return the system that runs the job. Raises `ConfigError` for an unknown system."""
    if arguments.system is None:
        return "beaker" if arguments.workspace else "slurm"
    if arguments.system not in SYSTEMS:
        raise build_unknown_name_error("--system", arguments.system, SYSTEMS)
    return str(arguments.system)


# -- the job


def locate_model_place(arguments: argparse.Namespace, system: str) -> ModelPlace:
    """Return the place of the model from `--location`.

    Raises `UserError` if the option is missing or the place has no model.
    """
    if arguments.location is None:
        raise ConfigError("--location is missing: name a model directory, or a Beaker dataset's id")
    return locate_place(arguments.location, system, arguments.subfolder.strip("/"))


def refuse_upload(place: ModelPlace, system: str) -> ModelPlace:
    """Return the place of a model that is not uploaded, but read by Beaker's hosts from its folder.

    Raises `ConfigError` for other systems, which never upload models.
    """
    if system != "beaker":
        raise ConfigError("--no-upload: only Beaker's models are uploaded; leave it out")
    if place.kind != "folder":
        return place
    return ModelPlace("host", str(Path(place.text).absolute()))


def build_job(
    arguments: argparse.Namespace,
    system: str,
    place: ModelPlace,
    shares: Sequence[str],
    needs: TaskNeeds,
) -> EvalJob:
    """Return the job that the command line describes. Raises `UserError` for unusable options.

    `shares` are the tasks of each GPU, and `needs` are the needs of all tasks.
    """
    suite_words = list(arguments.words)
    masked_words = mask_words(suite_words)
    if masked_words != suite_words or any(mask_environment(word) != word for word in suite_words):
        raise ConfigError(
            "the words after -- are written into the job file, and contain a secret: "
            f"{mask_environment(shlex.join(masked_words))}; name the variable by --secret NAME "
            "instead"
        )
    return EvalJob(
        model_name=arguments.model_name,
        system=system,
        place=place,
        folder=arguments.output / arguments.model_name,
        tasks=arguments.tasks,
        shares=shares,
        words=[*needs.words, *suite_words],
        subfolder=arguments.subfolder.strip("/"),
        is_tuned=arguments.is_tuned,
        data=None if arguments.data_dir is None else locate_data(arguments.data_dir, system),
        num_gpus=arguments.num_gpus,
        workspace=arguments.workspace,
        clusters=arguments.cluster,
        priority=arguments.priority,
        secrets=list(dict.fromkeys([*arguments.secret, *needs.secrets])),
        image=arguments.image,
    )


def parse_suite_words(words: Sequence[str]) -> argparse.Namespace:
    """Return the options after --, as parsed by `weft eval suite`.

    Raises `ConfigError` for unknown options, and for options that `weft eval submit` sets itself.
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
    """Raise `UserError`, with the nearest name, for a task that the job would not find.

    Task files are checked only for Slurm, whose jobs read the files of this machine. Without
    lm_eval, nothing is checked.
    """
    from weft.evaluation.catalogue import list_names
    from weft.evaluation.suite_tasks import TaskSelection, open_manager

    if find_spec(HARNESS) is None or (include_path and system != "slurm"):
        return
    known = list_names()
    names = [name for name in split_names([tasks]) if name not in known]
    if system != "slurm":
        names = [name for name in names if "/" not in name]
    if names:
        open_manager(TaskSelection(names, include_path))


@dataclass(frozen=True)
class TaskNeeds:
    """Needs of tasks: names of data sets, arguments of `weft eval suite`, and names of secrets."""

    data: Sequence[str] = ()
    words: Sequence[str] = ()
    secrets: Sequence[str] = ()


def plan_tasks(arguments: argparse.Namespace) -> tuple[list[str], TaskNeeds]:
    """Return (tasks of each GPU, needs of the tasks in weft's catalogue).

    Raises `ConfigError` if no tasks are named, for a wrong number of GPUs, or if the judge's
    options are incomplete or unnecessary.
    """
    from weft.evaluation.catalogue import GROUPS, read_catalogue

    names = split_names([arguments.tasks])
    if not names:
        raise ConfigError(f"--tasks is empty; name tasks, or leave it out for {SUITE}")
    catalogue = read_catalogue()
    members = [member for name in names for member in GROUPS.get(name, (name,))]
    if arguments.num_gpus > 1:
        shares = split_tasks(members, arguments.num_gpus)
    else:
        shares = [",".join(names)]
    blocks = [catalogue[name][0] for name in members if name in catalogue]
    data = list(dict.fromkeys(block.data for block in blocks))
    words = ["--allow_code"] if any(block.code for block in blocks) else []
    if arguments.judge_model is None and arguments.judge not in (None, JUDGE):
        raise ConfigError(f"--judge {arguments.judge}: name its model too, by --judge_model")
    is_judged = any(block.judge for block in blocks)
    if not is_judged and (arguments.judge is not None or arguments.judge_model is not None):
        raise ConfigError("--judge: none of the tasks has a judge; leave it out")
    if not is_judged:
        return shares, TaskNeeds(data, words)
    url = arguments.judge or JUDGE
    words += ["--judge", url, "--judge_model", arguments.judge_model or JUDGE_MODEL]
    return shares, TaskNeeds(data, words, [JUDGE_KEY] if url == JUDGE else [])


def check_cluster(job: EvalJob) -> None:
    """Raise `ConfigError` if the Slurm of this machine could not run the job.

    Its jobs read the files of this machine. Without sbatch, nothing is checked.
    """
    if job.system != "slurm" or shutil.which(CLIENTS["slurm"]) is None:
        return
    if job.place.kind == "host":
        raise ConfigError(f"--location {job.place.text}: there is no such folder")
    check_partitions(job)


def list_notes(job: EvalJob, needs: TaskNeeds) -> list[str]:
    """Return notes for the user: files and settings that are missing, and effects of the job."""
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
    """Return the data sets that the job needs and that may be missing on its machine.

    For Slurm, whose jobs read the files of this machine, these are the data sets missing here.
    """
    if job.data is not None or "--data" in job.words or "--data_dir" in job.words:
        return []
    if job.system != "slurm":
        return list(needs.data)
    return [name for name in needs.data if find_data(name, {}, FOLDER) is None]
