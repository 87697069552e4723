"""Directories of runs as the runtime writes them, for tests of the commands that list, show
and remove runs.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import yaml

from weft.experiments import SFTConfig
from weft.observe.run_files import RunRecord, RunStart
from weft.options import to_mapping


def write_run(
    root: Path, name: str, *, status: str = "finished", step: int = 4, age: float = 0.0
) -> Path:
    """Write an SFT run `EXPERIMENT/TRIAL` in `root` that was last changed `age` seconds ago."""
    folder = root / name
    experiment, trial = name.split("/")
    config = replace(SFTConfig(experiment_name=experiment, trial_name=trial), max_steps=8)
    config.model.path = "data/model"
    config.launch.env = {"HF_TOKEN": "hf_123"}
    for role in ("checkpoints/model/step2", "checkpoints/model/step4", "recover/step4"):
        (folder / role).mkdir(parents=True)
        (folder / role / "weights").write_bytes(b"w" * 2000)
    (folder / "config.yaml").write_text(yaml.safe_dump(to_mapping(config), sort_keys=False))
    (folder / "status.json").write_text(json.dumps({"status": status, "step": step, "time": 0.0}))
    rows = [
        {"step": n, "train/loss": 1 / n, "train/accuracy": 0.5, "step_seconds": 0.1}
        for n in range(1, step + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["weft", "quickstart", "sft", "launch.env.HF_TOKEN=***"]
    start = RunStart(
        time.time(),
        0,
        command,
        "/work",
        "a-host",
        "cpu",
        "abc123+",
        {"weft": "0.1.0", "torch": "2.13"},
    )
    (folder / "run.json").write_text(json.dumps(RunRecord("sft", 8, [start]).to_plain()))
    for file in folder.iterdir():
        os.utime(file, (time.time() - age,) * 2)
    return folder
