"""Record of the steps of `weft eval submit`, so that a second run begins where the first one ended.

The record is `steps.json` in the folder of a model's jobs. A step is finished if it is recorded as
finished for the same inputs and the files that it wrote are as it left them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.errors import ConfigError
from weft.observe.jsonl import read_json
from weft.reading import iterate_files, make_folder
from weft.writing import write

RECORD = "steps.json"
STEPS = "steps"
SUBMISSIONS = "submissions"


@dataclass
class StepRecord:
    """Steps and submissions of the jobs in `folder`, as `steps.json` holds them.

    A missing or damaged file counts as an empty one.
    """

    folder: Path
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    submissions: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> StepRecord:
        """Return the record of a folder, which need not exist."""
        values = read_json(folder / RECORD)
        steps = values.get(STEPS)
        submissions = values.get(SUBMISSIONS)
        return cls(
            folder,
            steps if isinstance(steps, dict) else {},
            submissions if isinstance(submissions, list) else [],
        )

    @property
    def is_damaged(self) -> bool:
        """True if the folder has a record without steps and submissions."""
        return (self.folder / RECORD).is_file() and not self.steps and not self.submissions

    def find_finished(self, name: str, inputs: object) -> Mapping[str, Any] | None:
        """Return the record of the step `name` if it is finished for these inputs, else None."""
        step = self.steps.get(name)
        if not isinstance(step, dict) or step.get("inputs") != inputs or not step.get("finished"):
            return None
        return step

    def was_begun(self, name: str) -> bool:
        """Return whether the step was begun at any time, with any inputs."""
        return name in self.steps

    def begin(self, name: str, inputs: object) -> None:
        """Record that a step runs. Its earlier result is void from now on."""
        self.steps[name] = {"inputs": inputs, "finished": None}
        self._write()

    def finish(self, name: str, **result: object) -> None:
        """Record the result of the step that `begin` has recorded."""
        self.steps[name] |= {"finished": format_now(), **result}
        self._write()

    def find_submission(self, file: Path, digest: str) -> Mapping[str, Any] | None:
        """Return the submission of a job file with these contents, or None."""
        key = (file.name, digest)
        for submission in self.submissions:
            if (
                isinstance(submission, dict)
                and (submission.get("file"), submission.get("sha256")) == key
            ):
                return submission
        return None

    def add_submission(self, file: Path, digest: str, job: str) -> None:
        """Record that a job file was submitted; `job` is the system's id of the job, or ""."""
        self.submissions.append(
            {"file": file.name, "sha256": digest, "job": job, "time": format_now()}
        )
        self._write()

    def _write(self) -> None:
        make_folder(self.folder, f"--output {self.folder.parent}", ConfigError)
        values = {STEPS: self.steps, SUBMISSIONS: self.submissions}
        write(self.folder / RECORD, json.dumps(values, indent=1) + "\n")


def describe_files(folder: Path) -> dict[str, list[int]]:
    """Return [size in bytes, time of the last change in ns] of each file below a folder.

    Any change of a file changes this, and weights of many GB need not be read.
    """
    described = {}
    for file in sorted(iterate_files(folder, str(folder), ConfigError)):
        status = file.stat()
        described[str(file.relative_to(folder))] = [status.st_size, status.st_mtime_ns]
    return described


def format_now() -> str:
    """Return the current time in UTC, such as 2026-11-29 04:05:06."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
