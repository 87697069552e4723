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
from typing import Any

import torch

from benchmarks import gpu_backends
from benchmarks.gpu_run import Run

ROOT = Path(__file__).resolve().parent.parent
FILE = "profile.json"
MOST_TOKENS = 2048  # of a pack that is measured, as in `weft plan profile`


def plan_profile(run: Run) -> None:
    """Run `weft plan profile`, then time the step of `sft` and compare it with its forecasts.

    Where time is short, passes alone are measured: the command's decode steps take minutes, most of
    which are compilations, and no forecast of a training step needs them.
    """
    from weft.checkpoints import hf_io
    from weft.engine.spec import ModelSpec
    from weft.planner.decoder_sizes import build_decoder_sizes

    raw, where = run.sizes.config, run.where
    config = hf_io.find_family(raw, None).config(raw)
    spec = ModelSpec(dtype=where.dtype, trained=True)
    sizes = build_decoder_sizes(spec, config, on_gpu=where.device.type == "cuda")
    if run.quick:
        run.leave_out("the command weft plan profile, whose decode steps take minutes")
        _compare_step(run, sizes, _measure_passes(run, sizes, config))
        return
    path = run.record.parent / FILE
    if _call_command(run, path):
        _compare_step(run, sizes, _read_profile(run, sizes, path))


def _measure_passes(run: Run, sizes: Any, config: Any) -> Any:
    """The passes that `weft plan profile` measures, as a profile."""
    from weft.engine import measure
    from weft.planner.profile import DeviceProfile, PassTimes, ShapeTimes

    where = run.where
    network = measure.MeasuredNetwork(config, where.device, where.dtype)
    measured = {}
    for kind in ("full", "adapters", "score"):
        measured[kind] = measure.measure_passes(
            network, kind, MOST_TOKENS, lambda text: print(f"  {text}", flush=True)
        )
    run.details["passes"] = measured
    times = ShapeTimes({kind: PassTimes(values) for kind, values in measured.items()}, {})
    threads = 0 if where.device.type == "cuda" else torch.get_num_threads()
    return DeviceProfile({(sizes.profile_key, where.dtype, 1, threads): times})


def _read_profile(run: Run, sizes: Any, path: Path) -> Any:
    """The profile that `weft plan profile` has written."""
    from weft.cli.plan_profile import find_machine
    from weft.planner.profile import find_usable_profile

    keys = {(sizes.profile_key, run.where.dtype)}
    profile, notes = find_usable_profile(keys, find_machine(run.where.device), str(path))
    run.details["notes"] = list(notes)
    return profile


def _call_command(run: Run, path: Path) -> bool:
    """Have `weft plan profile` write a profile; whether it did."""
    with tempfile.TemporaryDirectory(prefix="weft-gpu-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(run.sizes.config))
        words = [sys.executable, "-m", "weft.cli.main", "plan", "profile", folder]
        words += ["--device", run.where.device.type, "--dtype", run.where.dtype]
        words += ["--output", str(path)]
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
    return done.returncode == 0


def _compare_step(run: Run, sizes: Any, profile: Any) -> None:
    """Time the training step of `sft`, and add the errors of its forecasts."""
    from weft.algorithms.sft import SFTLoss
    from weft.planner.cost import CallWorkload, estimate_call
    from weft.planner.devices import estimate_cpu_rates, find_gpu_rates
    from weft.topology import Layout, Mesh

    where, lengths = run.where, run.sizes.sft
    made = gpu_backends.engine(run.sizes.config, where, trained=True)
    vocabulary = gpu_backends.network_of(made).config.vocab_size
    batch, most = gpu_backends.batch_of(lengths, vocabulary), sum(lengths)

    def step() -> None:
        made.train([batch], SFTLoss(), max_tokens=most)

    measured = statistics.median(where.seconds(step, run.sizes.times, warm=3))
    run.add("plan: the step of sft, measured", 1e3 * measured, "ms")
    load = CallWorkload(
        "train_step",
        num_sequences=len(lengths),
        prompt_tokens=1,
        new_tokens=most // len(lengths) - 1,
        microbatch=most,
    )
    if where.device.type == "cuda":
        rates = find_gpu_rates(torch.cuda.get_device_name(where.device), where.dtype)
    else:
        threads = torch.get_num_threads()
        rates = estimate_cpu_rates(threads, 1.0, 1, threads).share_cores(1, 1)
    for name, known in (("the data sheet", rates), ("the profile", rates.with_profile(profile))):
        expected = estimate_call(sizes, load, Mesh(Layout(), (0,)), known).seconds
        run.add(f"plan: forecast from {name}", 1e3 * expected, "ms")
        run.add(f"plan: error of the forecast from {name}", 100 * (expected / measured - 1), "%")
