"""The section `plan_profile` of `benchmarks/gpu.py`: a profile of this GPU for `weft plan`, and how
right forecasts of a training step are with it and without.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks import gpu_backends
from benchmarks.gpu_run import Run

ROOT = Path(__file__).resolve().parent.parent
FILE = "profile.json"


def plan_profile(run: Run) -> None:
    """Run `weft plan profile`, then time the step of `sft` and compare it with its forecasts."""
    path = run.record.parent / FILE
    with tempfile.TemporaryDirectory(prefix="weft-gpu-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(run.sizes.config))
        words = [sys.executable, "-m", "weft.cli.main", "plan", "profile", folder]
        words += ["--device", run.where.device.type, "--dtype", run.where.dtype]
        words += ["--output", str(path)]
        if run.quick:
            words += ["--max-tokens", "256"]
        # weft need not be installed: the command finds it by the path.
        search = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(
            words,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": search},
        )
    said = [*done.stdout.splitlines(), *done.stderr.splitlines()[-20:]]
    run.details["said"] = said
    for line in said:
        print(f"  {line}", flush=True)
    run.check("plan profile: exit code", done.returncode, 0, "")
    if done.returncode == 0:
        _compare_step(run, path)


def _compare_step(run: Run, path: Path) -> None:
    """Time the training step of `sft`, and add the errors of its forecasts."""
    from weft.algorithms.sft import SFTLoss
    from weft.cli.plan_profile import find_machine
    from weft.engine.spec import ModelSpec
    from weft.planner.cost import CallWorkload, estimate_call
    from weft.planner.decoder_sizes import build_decoder_sizes
    from weft.planner.devices import estimate_cpu_rates, find_gpu_rates
    from weft.planner.profile import find_usable_profile
    from weft.topology import Layout, Mesh

    where, lengths = run.where, run.sizes.sft
    made = gpu_backends.engine(run.sizes.config, where, trained=True)
    config = gpu_backends.network_of(made).config
    batch, most = gpu_backends.batch_of(lengths, config.vocab_size), sum(lengths)

    def step() -> None:
        made.train([batch], SFTLoss(), max_tokens=most)

    measured = statistics.median(where.seconds(step, run.sizes.times, warm=3))
    run.add("plan: the step of sft, measured", 1e3 * measured, "ms")
    on_gpu = where.device.type == "cuda"
    sizes = build_decoder_sizes(ModelSpec(dtype=where.dtype, trained=True), config, on_gpu=on_gpu)
    load = CallWorkload(
        "train_step",
        num_sequences=len(lengths),
        prompt_tokens=1,
        new_tokens=most // len(lengths) - 1,
        microbatch=most,
    )
    if on_gpu:
        rates = find_gpu_rates(torch.cuda.get_device_name(where.device), where.dtype)
    else:
        threads = torch.get_num_threads()
        rates = estimate_cpu_rates(threads, 1.0, 1, threads).share_cores(1, 1)
    key = (sizes.profile_key, sizes.settings.dtype)
    profile, notes = find_usable_profile({key}, find_machine(where.device), str(path))
    run.details["notes"] = list(notes)
    for name, known in (("the data sheet", rates), ("the profile", rates.with_profile(profile))):
        expected = estimate_call(sizes, load, Mesh(Layout(), (0,)), known).seconds
        run.add(f"plan: forecast from {name}", 1e3 * expected, "ms")
        run.add(f"plan: error of the forecast from {name}", 100 * (expected / measured - 1), "%")
