"""What the runtime costs: the Master's time for a call that does nothing, and the bytes that a PPO
step moves.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import model, nothing, results
from weft.data.loader import load_data
from weft.data.tokenizer import Tokenizer
from weft.experiment import Experiment
from weft.experiments import GenConfig, PPOConfig
from weft.graph.graph import DataflowGraph
from weft.graph.mfc import MFCDef
from weft.launch.cluster import launch_devices
from weft.launch.resolve import load_tokenizers
from weft.launch.run import prepare
from weft.planner.lengths import RunLength
from weft.runtime.calls import WorkerGroup
from weft.runtime.commands import BuildWorker
from weft.runtime.device_group import BYTES_MOVED, DeviceGroup
from weft.runtime.directory import RunDirectory
from weft.runtime.dispatch import DeviceTransport, ThreadDevice
from weft.runtime.firings import FiringOutcome
from weft.runtime.master import Master

CALLS = 8  # of a step, each of which reads what the one before it made
SAMPLES = (1, 100, 1_000, 10_000)
GROUPS = {"this process": 0, "d1": 1, "d2": 2}  # device processes; 0 is a thread of this process
LOCAL_MS, RAY_MS, SAMPLE_US, FREE_SAMPLES = 3.0, 15.0, 1.0, 1_000
BATCHES = ((8, 16), (64, 128))  # (prompts, new tokens) of a PPO step


def main(words: Sequence[str] | None = None) -> None:
    parser = results.parser("runtime", str(__doc__), repeats=20)
    arguments = parser.parse_args(words)
    results.start(arguments)
    sizes = [size for size in SAMPLES if size <= (100 if arguments.quick else SAMPLES[-1])]
    rows, runs = [], {}
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as name:
        folder = Path(name)
        model.write_model(
            folder / "model", model.SHAPES["tiny"], arguments.data / "tokenizers" / "llama2"
        )
        groups = {
            name: devices for name, devices in GROUPS.items() if devices != 1 or not arguments.quick
        }
        for group, devices in groups.items():
            for size, times in overheads(folder, devices, sizes, arguments.repeats).items():
                rows.append(row(group, devices, size, times))
                runs[f"{group}, {size}"] = times
        batches = BATCHES[:1] if arguments.quick else BATCHES
        moved = [
            line for prompts, new in batches for line in bytes_of_a_step(folder, 2, prompts, new)
        ]
    notes = [
        f"a call: a step of {CALLS} calls that do nothing, without the time in them, divided by "
        f"{CALLS}; loading included",
        "bytes of a PPO step: critic and reference on device 1, reward model on 2; lengths and "
        "keys of what is moved included,",
        "which the least has not:",
        *(f"  {line}" for line in moved),
    ]
    results.report(
        results.Results(
            "runtime", rows, {"repeats": arguments.repeats, "calls": CALLS}, runs, notes
        ),
        arguments,
    )


def row(group: str, devices: int, size: int, times: Sequence[float]) -> dict[str, Any]:
    goal = (RAY_MS if devices else LOCAL_MS) + max(0, size - FREE_SAMPLES) * SAMPLE_US / 1e3
    each = [1e3 * seconds for seconds in times]
    return {
        "group": group,
        "samples": size,
        "ms a call": median(each),
        "least": min(each),
        "most": max(each),
        "goal": f"{goal:.3g}",
    }


# -- a call that does nothing


def chain(folder: Path, devices: int, size: int, steps: int) -> Experiment:
    """An epoch is a step, and a step `CALLS` calls, one after the other, on `size` ids."""
    path = folder / f"rows{size}.jsonl"
    path.write_text(
        "".join(json.dumps({"id": f"row{i}", "prompt": f"number {i}"}) + "\n" for i in range(size))
    )
    config = GenConfig(
        experiment_name="bench",
        trial_name="runtime",
        fileroot=str(folder),
        device="cpu",
        imports=["benchmarks.nothing"],
        total_train_epochs=steps,
    )
    config.model.path, config.dataset.path = str(folder / "model"), str(path)
    config.dataset.train_bs_n_seqs = size
    built = config.build()
    keys = ["prompt", *(f"made{index}" for index in range(CALLS))]
    nodes = [
        MFCDef(
            f"call{index}",
            "model",
            nothing.NAME,
            "inference",
            size,
            input_keys=(keys[index],),
            output_keys=("made",),
            output_key_remap={"made": keys[index + 1]},
        )
        for index in range(CALLS)
    ]
    role = replace(
        built.roles["model"], backend="null", layout=f"d{max(1, devices)}", dtype="float32"
    )
    graph = DataflowGraph(nodes, ("prompt",))
    return replace(
        built, roles={"model": role}, graph=graph, steps_follow=nodes[-1].name, evaluation=None
    )


def overheads(
    folder: Path, devices: int, sizes: Sequence[int], repeats: int
) -> dict[int, list[float]]:
    """Samples -> the Master's seconds for a call, once a step."""
    group, found = None, {}
    try:
        for size in sizes:
            experiment = chain(folder, devices, size, repeats + 1)
            tokenizers = load_tokenizers(experiment)
            data = load_data(
                experiment.dataset, experiment.dataset_type, tokenizers["model"], seed=1
            )
            if group is None:
                group = make_group(
                    experiment,
                    devices,
                    tokenizers,
                    RunLength.from_experiment(experiment, data.train),
                    folder,
                )
            found[size] = overhead(Master(experiment, group, data.train, tokenizers), repeats)
    finally:
        if group is not None:
            group.close(0.0)
    return found


def make_group(
    experiment: Experiment,
    devices: int,
    tokenizers: Mapping[str, Tokenizer],
    horizon: RunLength,
    folder: Path,
) -> WorkerGroup:
    import torch

    transport: DeviceTransport
    if devices:
        transport = launch_devices(experiment, "local").wait_for_devices()
    else:
        transport = ThreadDevice(torch.device("cpu"))
    specs = horizon.build_specs(experiment)
    build = BuildWorker(experiment, specs, tokenizers, folder / "cache", "cpu")
    return DeviceGroup(transport, experiment, build)


class Times:
    """Hears of every call, and sums up what was spent in them."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def on_firing_finished(self, outcome: FiringOutcome, step: int) -> None:
        self.seconds += outcome.seconds

    def on_step_finished(self, ids: Sequence[str], step: int) -> None:
        """Nothing."""


def overhead(master: Master, repeats: int) -> list[float]:
    times = []
    for _ in range(repeats + 1):
        master.listener = heard = Times()
        result = master.step()
        assert result is not None, "an epoch is a step"
        times.append((result.seconds - heard.seconds) / CALLS)
    return times[1:]  # the first waits for the loader


# -- bytes of a step


def bytes_of_a_step(folder: Path, steps: int, prompts: int, new: int) -> list[str]:
    """One line a step: what was moved, and the least that had to be."""
    path = folder / "prompts.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(prompts * steps))
    )
    config = PPOConfig(
        experiment_name="bench",
        trial_name="bytes",
        fileroot=str(folder),
        device="cpu",
        max_steps=steps,
    )
    config.actor.path = config.critic.path = config.rew.path = str(folder / "model")
    config.dataset.path, config.dataset.train_bs_n_seqs = str(path), prompts
    config.ppo.gen.max_new_tokens = config.ppo.gen.min_new_tokens = new
    config.critic.device_mesh = config.ref.device_mesh = "1"
    config.rew.device_mesh = "2"
    experiment = config.build()
    parts = prepare(experiment, RunDirectory.from_control(experiment.control), "local")
    lines = []
    try:
        for _ in range(steps):
            parts.master.listener = seen = Sizes(experiment, parts.group)
            result = parts.master.step()
            assert result is not None, "there are rows for every step"
            moved = sum(
                value for name, value in result.metrics.items() if name.endswith(f"/{BYTES_MOVED}")
            )
            share = f"{moved / seen.least:.3g} times" if seen.least else "no"
            lines.append(
                f"{prompts} x {new} tokens: {moved:,.0f} moved, {share} the least, "
                f"{seen.least:,.0f}"
            )
    finally:
        parts.group.close(0.0)
    return lines


class Sizes:
    """`least`: the bytes of every key that a device's calls read and none of them made, once a
    device.
    """

    def __init__(self, experiment: Experiment, group: WorkerGroup) -> None:
        self._experiment, self._group, self.least = experiment, group, 0

    def on_firing_finished(self, outcome: FiringOutcome, step: int) -> None:
        """Nothing."""

    def on_step_finished(self, ids: Sequence[str], step: int) -> None:
        graph, meshes = self._experiment.graph, self._experiment.role_meshes
        reads: dict[tuple[int, ...], set[str]] = {}
        makes: dict[tuple[int, ...], set[str]] = {}
        for node in graph.list_model_calls():
            ranks = tuple(meshes[node.role].ranks)
            reads.setdefault(ranks, set()).update(node.inputs, node.optional_inputs)
            makes.setdefault(ranks, set()).update(node.outputs)
        wanted = sorted(set().union(*reads.values()))
        batch = self._group.fetch(ids, (), wanted)
        for ranks, keys in reads.items():
            self.least += sum(
                int(batch.data[key].nbytes) for key in keys - makes[ranks] if key in batch.data
            )


if __name__ == "__main__":
    main()
