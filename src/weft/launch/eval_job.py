"""Jobs that evaluate a model on a cluster: what `weft eval submit` asks Slurm, Ray or Beaker for.

    job = EvalJob("tulu-7b", "slurm", locate_place("runs/E/T", "slurm"), Path("eval-jobs/tulu-7b"))
    read_template("slurm", None).render(job.build_values())

This module writes and runs nothing; `weft.launch.submission` does.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weft.checkpoints.names import ModelQuery, is_model, locate_model
from weft.errors import ConfigError, find_nearest
from weft.reading import suggest_sibling
from weft.storage.buckets import is_remote

PREEMPTIBLE = "preemptible"
PRIORITIES = (PREEMPTIBLE, "low", "normal", "high", "urgent", "immediate")
CLIENTS = {"slurm": "sbatch", "ray": "ray", "beaker": "beaker"}
MODULE = "weft.cli.main"
IMAGE = "weft"
# Folders in Beaker's containers. The model is below its own, in a folder with the name that its
# results get, so that results of several jobs can be told apart.
MODEL_MOUNT = "/model"
DATA_MOUNT = "/data"
RESULT_MOUNT = "/output"
HUB = "hub:"  # before the name of a model on the hub
# Placeholder in a spec for the id that an upload prints.
UNKNOWN_DATASET = "MODEL_DATASET_ID"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
DATASET = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# system -> pattern of its clusters' names, and the message about a name that does not match
CLUSTERS = {
    "slurm": (r"[\w.-]+", "must be the name of a partition, such as gpu"),
    "ray": (r"(?:https?|ray)://\S+|auto", "must be an address, such as http://127.0.0.1:8265"),
    "beaker": (
        r"[\w.-]+/[\w.-]+|all",
        "must be ORGANIZATION/CLUSTER, such as ai2/allennlp-cirrascale, or all",
    ),
}


@dataclass(frozen=True)
class ModelPlace:
    """Place of a model: `kind` is folder, host, url or dataset.

    A folder is on this machine, a host folder on the cluster's, and a dataset on Beaker. A url is
    a folder in a bucket, or the name of a model on the hub. `note` tells the user which checkpoint
    of a run it is, or is "".
    """

    kind: str
    text: str
    note: str = field(default="", compare=False)


@dataclass(frozen=True)
class EvalJob:
    """Evaluation of one model: names, resources, and the words of `weft eval suite`.

    Attributes:
        model_name: Name that the user gave the model.
        system: slurm, ray or beaker.
        place: Place of the model.
        folder: Folder of the job files.
        tasks: Value of --tasks.
        shares: Tasks of each GPU, or of the only process.
        words: Further words of `weft eval suite`.
        subfolder: Folder of the model below its place, or "".
        is_tuned: True if the model is prompted in the form of conversations.
        data: Folder of the tasks' data, or a Beaker dataset; None for the suite's default.
        num_gpus: GPUs of the job; 0 for a job on CPUs.
        workspace: Workspace on Beaker, account on Slurm.
        clusters: Clusters on Beaker, partitions on Slurm, the address of Ray.
        priority: One of `PRIORITIES`, or None for the system's default.
        secrets: Names of secrets, which are variables on Slurm and Ray.
        image: Image on Beaker.
    """

    model_name: str
    system: str
    place: ModelPlace
    folder: Path
    tasks: str = "open-instruct"
    shares: Sequence[str] = ("open-instruct",)
    words: Sequence[str] = ()
    subfolder: str = ""
    is_tuned: bool = False
    data: ModelPlace | None = None
    num_gpus: int = 1
    workspace: str | None = None
    clusters: Sequence[str] = ()
    priority: str | None = None
    secrets: Sequence[str] = field(default_factory=tuple)
    image: str = IMAGE

    @property
    def name(self) -> str:
        """Name of the job on the cluster."""
        return f"weft-eval-{self.model_name}"

    @property
    def results(self) -> str:
        """Folder of the result files where the job runs."""
        return RESULT_MOUNT if self.system == "beaker" else str(self.folder.absolute() / "results")

    @property
    def needs_upload(self) -> bool:
        """Return whether the model must be uploaded before the job can read it."""
        return self.system == "beaker" and self.place.kind == "folder"

    def with_dataset(self, dataset: str) -> EvalJob:
        """Return the job with the model in a Beaker dataset."""
        return replace(self, place=ModelPlace("dataset", dataset))

    def check(self) -> None:
        """Raise `ConfigError` for a value that the system cannot have."""
        if not NAME.fullmatch(self.model_name):
            raise ConfigError(
                f"--model_name {self.model_name!r}: must have only letters, digits, '.', '_' and "
                f"'-', and begin with a letter or digit, such as tulu-7b"
            )
        if self.num_gpus < 0:
            raise ConfigError(f"--num_gpus {self.num_gpus}: must be 0 (only CPUs) or more")
        for name in self.secrets:
            if not VARIABLE.fullmatch(name):
                raise ConfigError(
                    "--secret: takes the name of a secret, such as HF_TOKEN, and never its value"
                )
        if self.subfolder and self.place.kind == "url" and not is_remote(self.place.text):
            raise ConfigError(f"--subfolder {self.subfolder}: a model on the hub has no subfolders")
        _check_priority(self.priority)
        rule, explanation = CLUSTERS[self.system]
        for cluster in self.clusters:
            if not re.fullmatch(rule, cluster):
                raise ConfigError(f"--cluster {cluster}: {explanation}")
        self._check_system()

    def _check_system(self) -> None:
        """Raise `ConfigError` for options that are missing on the system, or that it lacks."""
        if self.system == "beaker":
            if not self.workspace:
                raise ConfigError("--workspace is missing: Beaker runs every job in a workspace")
            return
        if self.image != IMAGE:
            raise ConfigError(
                f"--image {self.image}: only Beaker's jobs have an image; leave it out, or add "
                "--system beaker"
            )
        if self.system == "slurm":
            return
        if len(self.clusters) > 1:
            raise ConfigError("--cluster: a Ray job has one address; name one")
        for option in ("workspace", "priority"):
            if getattr(self, option) is not None:
                raise ConfigError(
                    f"--{option} {getattr(self, option)}: Ray has nothing of this kind; leave it "
                    f"out"
                )

    def build_values(self) -> dict[str, Any]:
        """Return the values of the placeholders of `weft.launch.job_template`."""
        mounts = self._list_mounts()
        is_preemptible = self.priority == PREEMPTIBLE
        priority = self.priority
        if self.system == "beaker":
            is_preemptible = self.priority in (None, PREEMPTIBLE)
            priority = "low" if is_preemptible else self.priority
        return {
            "command": self._build_command(mounts),
            "name": self.name,
            "model_name": self.model_name,
            "model": self._locate_model(mounts),
            "tasks": self.tasks,
            "results": self.results,
            "folder": str(self.folder.absolute()),
            "num_gpus": self.num_gpus,
            "clusters": [] if list(self.clusters) == ["all"] else list(self.clusters),
            "workspace": self.workspace,
            "priority": priority,
            "preemptible": is_preemptible,
            "secrets": list(self.secrets),
            "image": self.image,
            "mounts": list(mounts.values()),
        }

    def _list_mounts(self) -> dict[str, dict[str, str]]:
        """Return Beaker's mounts of the model and the data; no other system has any."""
        mounts: dict[str, dict[str, str]] = {}
        if self.system != "beaker":
            return mounts
        for name, place, target in (
            ("model", self.place, f"{MODEL_MOUNT}/{self.model_name}"),
            ("data", self.data, DATA_MOUNT),
        ):
            if place is None or place.kind == "url":
                continue
            if place.kind == "folder":  # not uploaded yet
                mounts[name] = {"path": target, "kind": "beaker", "source": UNKNOWN_DATASET}
            else:
                kind = "beaker" if place.kind == "dataset" else "hostPath"
                mounts[name] = {"path": target, "kind": kind, "source": place.text}
        return mounts

    def _locate_model(self, mounts: dict[str, dict[str, str]]) -> str:
        """Return the path or URL of the model where the job runs."""
        if "model" in mounts:
            place = mounts["model"]["path"]
        elif self.place.kind == "folder":
            place = str(Path(self.place.text).absolute())
        else:
            place = self.place.text
        return f"{place.rstrip('/')}/{self.subfolder}" if self.subfolder else place

    def _build_command(self, mounts: dict[str, dict[str, str]]) -> str:
        """Return the shell text of the job: one `weft eval suite`, or one on each of its GPUs."""
        # A Slurm job has the files of this machine; other jobs use the weft that they have
        # installed.
        program = [sys.executable, "-m", MODULE] if self.system == "slurm" else ["weft"]
        begin = [*program, "eval", "suite", self._locate_model(mounts)]
        end = ["--output", self.results]
        if self.is_tuned:
            end.append("--apply_chat_template")
        if self.data is not None:
            end += ["--data_dir", mounts["data"]["path"] if "data" in mounts else self.data.text]
        end += self.words
        if len(self.shares) == 1:
            return shlex.join([*begin, "--tasks", self.shares[0], *end])
        lines = ["pids="]
        for index, tasks in enumerate(self.shares):
            command = [*begin, "--tasks", tasks, *end, "--device", f"cuda:{index}"]
            lines += [f"{shlex.join(command)} &", 'pids="$pids $!"']
        lines += ["code=0", 'for pid in $pids; do wait "$pid" || code=$?; done', 'exit "$code"']
        return "\n".join(lines)


def _check_priority(priority: str | None) -> None:
    if priority is None or priority in PRIORITIES:
        return
    near = find_nearest(priority, PRIORITIES, 1)
    hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(PRIORITIES)}"
    raise ConfigError(f"--priority {priority}: unknown priority; {hint}")


def split_tasks(tasks: Sequence[str], num_gpus: int) -> list[str]:
    """Return the tasks of each GPU, in turn, joined by commas.

    Raises `ConfigError` if there are more GPUs than tasks.
    """
    if num_gpus > max(1, len(tasks)):
        raise ConfigError(
            f"--num_gpus {num_gpus}: each GPU runs tasks of its own, and there "
            f"{'is 1' if len(tasks) == 1 else f'are {len(tasks)}'}; write --num_gpus {len(tasks)}"
        )
    return [",".join(tasks[start :: max(1, num_gpus)]) for start in range(max(1, num_gpus))]


# -- places


def locate_place(text: str, system: str, subfolder: str = "") -> ModelPlace:
    """Return the place of --location: a path, a run, a URL, `hub:NAME`, or a Beaker dataset.

    An absolute path that is not on this machine is taken as one of the cluster's. Raises
    `UserError` for other paths that do not exist, and for folders without a model in `subfolder`.
    """
    option = "--location"
    if not text.strip():
        raise ConfigError(f"{option} is empty; name a model directory, a run or a Beaker dataset")
    if text.startswith(HUB):
        if not DATASET.fullmatch(text.removeprefix(HUB)):
            raise ConfigError(f"{option} {text}: write {HUB}OWNER/NAME, a model on the hub")
        return ModelPlace("url", text.removeprefix(HUB))
    if is_remote(text):
        return ModelPlace("url", text)
    path = Path(text).expanduser()
    if path.is_absolute() and not path.exists() and "@" not in path.name:
        return ModelPlace("host", str(path))
    if path.is_dir() and subfolder:
        if not is_model(path / subfolder):
            raise ConfigError(
                f"--subfolder {subfolder}: {path / subfolder} is no model directory"
                f"{_suggest(path / subfolder)}"
            )
        return ModelPlace("folder", str(path))
    if path.exists() or "@" in text:
        model = locate_model(text, ModelQuery(option))
        folder = Path(model.path).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"{option} {text}: is no model directory{_suggest(path)}")
        return ModelPlace("folder", str(folder), model.note)
    if system == "beaker" and DATASET.fullmatch(text) and not Path(path.parts[0]).is_dir():
        return ModelPlace("dataset", text)
    raise ConfigError(
        f"{option} {text}: there is no such path on this machine{_suggest(path)}; ids of Beaker's "
        f"datasets are for --system beaker"
    )


def locate_data(text: str, system: str) -> ModelPlace:
    """Return the place of the tasks' data: a folder, or on Beaker a dataset or a host's folder.

    Raises `ConfigError` for a folder that a job on Beaker could not read, or that does not exist.
    """
    option = "--data_dir"
    path = Path(text).expanduser()
    if system == "beaker":
        if path.is_absolute():
            return ModelPlace("host", str(path))
        if DATASET.fullmatch(text) and not path.exists():
            return ModelPlace("dataset", text)
        raise ConfigError(
            f"{option} {text}: must be a Beaker dataset, or the absolute path of a folder on the "
            f"cluster's hosts"
        )
    if path.is_absolute() and not path.exists():
        return ModelPlace("host", str(path))
    if not path.is_dir():
        raise ConfigError(f"{option} {text}: there is no such folder{_suggest(path)}")
    return ModelPlace("folder", str(path.absolute()))


def _suggest(path: Path) -> str:
    similar = suggest_sibling(path)
    return "" if similar is None else f"; did you mean {similar}?"
