"""A world small enough to run a thousand times: engines of four numbers, interfaces, a loader, and
a PPO-shaped experiment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.runtime.thread_devices import ThreadDevices
from weft import randomness, register_backend, register_function, register_interface
from weft.data.sample import SequenceSample
from weft.data.spec import DatasetSpec
from weft.engine.spec import ModelSpec
from weft.experiment import Control, Evaluation, Experiment
from weft.graph.graph import DataflowGraph
from weft.graph.mfc import Call, HostFunction, MFCDef, Offload, ParamSync
from weft.interfaces.base import MFCResult
from weft.planner.lengths import RunLength
from weft.runtime.commands import BuildWorker
from weft.runtime.device_group import DeviceGroup
from weft.runtime.directory import RunDirectory, admit
from weft.runtime.dispatch import DeviceTransport, ThreadDevice
from weft.runtime.evaluate import Evaluator
from weft.runtime.master import Master
from weft.runtime.samples import SampleReader
from weft.runtime.session import Session, SessionParts
from weft.topology import Layout, build_whole_slice

SIZE = 4


class ToyEngine:
    """Weights `w` [4], momentum `m` [4]; training moves the weights towards what it is given."""

    def __init__(self, spec: ModelSpec, layout: Layout) -> None:
        self.spec, self.layout, self.version = spec, layout, 0
        self.w = torch.full((SIZE,), float(spec.path or 0), dtype=torch.float64)
        self.m = torch.zeros(SIZE, dtype=torch.float64)
        self.moves: list[str] = []

    def step(self, towards: float) -> float:
        assert self.spec.schedule is not None, "a trained role has a schedule"
        rate = 0.3 * (1 - self.version / self.spec.schedule.total_steps)
        gradient = self.w - towards
        self.m = 0.9 * self.m + gradient
        self.w = self.w - rate * self.m
        self.version += 1
        return float(gradient.square().sum())

    def slices(self):
        return {"w": build_whole_slice((SIZE,))}

    def read(self, names) -> Iterator[Any]:
        yield from ((name, build_whole_slice((SIZE,)), self.w) for name in names)

    def write(self, parts, *, version: int, eta: float = 1.0) -> None:
        for _, _, values in parts:
            self.w = eta * values + (1 - eta) * self.w
        self.version = version

    def save_state(self, directory: Path) -> None:
        torch.save({"w": self.w, "m": self.m, "version": self.version}, directory / "state.pt")

    def load_state(self, directory: Path) -> None:
        state = torch.load(directory / "state.pt", weights_only=True)
        self.w, self.m, self.version = state["w"], state["m"], state["version"]

    def offload(self, what) -> None:
        self.moves.append(f"off {what}")

    def onload(self, what) -> None:
        self.moves.append(f"on {what}")

    def save_model(self, directory: Path, tokenizer: Any) -> None:
        (directory / "model.json").write_text(json.dumps(self.w.tolist()))

    @property
    def description(self):
        return {"family": "toy", "num_parameters": SIZE, "num_trainable": SIZE}


register_backend("toy", ToyEngine)


def one_each(ids, key: str, values) -> SequenceSample:
    return SequenceSample.from_default(
        ids, [1] * len(ids), {key: torch.as_tensor(values, dtype=torch.float64)}
    )


@register_interface("toy_generate")
class ToyGenerate:
    """Completions of 1 to 3 tokens that depend on seed, step, id and weights."""

    def generate(self, model, batch) -> MFCResult:
        draws = [
            randomness.draw_uniform(model.seed, "toy", model.step, id, 0, 0) for id in batch.ids
        ]
        lengths = [1 + int(3 * u) for u in draws]
        bias = int(1000 * float(model.engine.w.sum())) % 50
        data = torch.cat([torch.full((n,), 100 + bias + i) for i, n in enumerate(lengths)])
        outputs = SequenceSample.from_default(batch.ids, lengths, {"completion": data})
        return MFCResult(outputs, {"response_length": sum(lengths) / len(lengths)})


@register_interface("toy_infer")
class ToyInfer:
    """A number a completion that depends on the weights."""

    calls = 0

    def inference(self, model, batch) -> MFCResult:
        type(self).calls += 1
        sums = [
            float(c.sum()) / 100 + float(model.engine.w.mean())
            for c in batch.sequences("completion")
        ]
        return MFCResult(one_each(batch.ids, "scores", sums), {"mean": sum(sums) / len(sums)})


@register_interface("toy_train")
class ToyTrain:
    """Counts its calls, which is state of the interface."""

    def __init__(self, key: str = "advantages", fail_at: int | None = None) -> None:
        self.key, self.fail_at, self.calls = key, fail_at, 0

    def train_step(self, model, minibatches) -> MFCResult:
        (batch,) = minibatches
        self.calls += 1
        if self.fail_at == model.step:
            raise ValueError("out of luck")
        return MFCResult(
            metrics={
                "loss": model.engine.step(float(batch.data[self.key].mean())),
                "calls": self.calls,
            }
        )

    def evaluate(self, model, batch) -> MFCResult:
        return MFCResult(
            metrics={"loss": float((batch.data[self.key] - model.engine.w.mean()).square().mean())}
        )

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state) -> None:
        self.calls = state["calls"]


@register_function("toy_advantages")
class ToyAdvantages:
    """Scores less a running mean; the mean is state."""

    def __init__(self) -> None:
        self.mean = torch.zeros(1, dtype=torch.float64)

    def __call__(self, batch, context) -> SequenceSample:
        scores = torch.as_tensor(batch.data["scores"] - batch.data["ref"])
        self.mean = 0.9 * self.mean + 0.1 * scores.mean()
        context.record("mean", float(self.mean))
        return one_each(batch.ids, "advantages", scores - self.mean)

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state) -> None:
        self.mean = state["mean"]


@register_function("toy_filter")
def toy_filter(batch, context, drop: float = 0.0) -> SequenceSample:
    """Drops a share of the ids, at random but repeatably."""
    kept = [id for id in batch.ids if randomness.draw_uniform(1, "filter", 0, id, 0, 0) >= drop]
    return one_each(kept, "kept", [1.0] * len(kept))


@register_function("toy_hook")
def toy_hook(model, factor: float = 1.0) -> None:
    model.engine.moves.append(f"hook {factor}")


class ToyTokenizer:
    """Enough of a tokenizer to show samples."""

    fingerprint = "toy"
    bos_id = None

    def encode(self, text, *, bos=None):
        return []

    def decode_after(self, before, ids, skip_special=False):
        return self.decode(ids, skip_special)

    def decode(self, ids, skip_special: bool = False) -> str:
        return " ".join(map(str, ids))


class ToyLoader:
    """`num_ids` prompts in an order of their own each epoch."""

    def __init__(self, num_ids: int = 20, batch: int = 4, prefix: str = "") -> None:
        self.num_ids, self.batch, self.prefix = num_ids, batch, prefix
        self.epoch = self.at = 0
        self.epoch_done = False

    @property
    def batches_per_epoch(self) -> int:
        return -(-self.num_ids // self.batch)

    def num_batches(self, epochs: int) -> int:
        return epochs * self.batches_per_epoch

    def next_batch(self) -> SequenceSample:
        order = randomness.draw_permutation(self.num_ids, 7, "order", self.epoch)
        chosen = order[self.at : self.at + self.batch]
        self.at += len(chosen)
        self.epoch_done = self.at >= self.num_ids
        if self.epoch_done:
            self.epoch, self.at = self.epoch + 1, 0
        return rows(f"{self.prefix}{i}" for i in chosen)

    def state_dict(self):
        return {"epoch": self.epoch, "at": self.at, "epoch_done": self.epoch_done}

    def load_state_dict(self, state) -> None:
        self.epoch, self.at, self.epoch_done = state["epoch"], state["at"], state["epoch_done"]


def rows(ids) -> SequenceSample:
    names = list(ids)
    return SequenceSample.from_default(
        names, [2] * len(names), {"prompt": torch.arange(2 * len(names))}, {"answer": names}
    )


class ToyRows:
    """A validation source."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> SequenceSample:
        completion = torch.arange(3)
        return SequenceSample.from_default(
            [str(index)],
            {"completion": [3], "target": [1]},
            {"completion": completion, "target": torch.tensor([float(index)])},
        )


def call(name: str, role: str, interface: str, method: Any, size: int, **more: Any) -> MFCDef:
    return MFCDef(name, role, interface, method, size, **more)


@dataclass(frozen=True)
class Toy:
    """One toy run: options that tests vary."""

    root: Path
    size: int = 4
    num_ids: int = 18
    drop: float = 0.0
    staleness: int = 0
    interruptible: bool = False
    ema: float | None = 0.25
    cache: bool = False
    train_args: Any = None
    control: Any = None
    device_mesh: str | None = None  # of the completions: on a device of their own

    def experiment(self) -> Experiment:
        made = self._experiment()
        return made.with_mfc("gen", device_mesh=self.device_mesh) if self.device_mesh else made

    def _experiment(self) -> Experiment:
        size = self.size
        hooks = [Call("toy_hook", {"factor": 2.0}), Offload("weights")]
        nodes = [
            call(
                "gen",
                "actor",
                "toy_generate",
                "generate",
                size,
                input_keys=["prompt"],
                output_keys=["completion"],
                max_staleness=self.staleness,
                interruptible=self.interruptible,
            ),
            call(
                "rew",
                "reward",
                "toy_infer",
                "inference",
                size,
                input_keys=["completion"],
                output_keys=["scores"],
                cache=self.cache,
                pre_hooks=[Offload("weights")],
                post_hooks=hooks,
            ),
            HostFunction(
                "filter", "toy_filter", size, ["scores"], ["kept"], args={"drop": self.drop}
            ),
            call(
                "ref_inf",
                "ref",
                "toy_infer",
                "inference",
                size,
                input_keys=["completion", "kept"],
                output_keys=["scores"],
                output_key_remap={"scores": "ref"},
            ),
            HostFunction("advantages", "toy_advantages", size, ["scores", "ref"], ["advantages"]),
            call(
                "train",
                "actor",
                "toy_train",
                "train_step",
                size,
                input_keys=["advantages"],
                args=self.train_args or {},
            ),
        ]
        syncs = [ParamSync("actor", "ref", self.ema)] if self.ema else []
        evaluate = [
            call(
                "train",
                "actor",
                "toy_train",
                "evaluate",
                0,
                input_keys=["target"],
                args={"key": "target"},
            ),
        ]
        specs = {
            "actor": ModelSpec(backend="toy", trained=True),
            "ref": ModelSpec(backend="toy"),
            "reward": ModelSpec(backend="toy", path="0.5"),
        }
        control = Control(
            "toy",
            "run",
            fileroot=str(self.root),
            total_train_epochs=2,
            progress=False,
            device="cpu",
        )
        return Experiment(
            control=replace(control, **(self.control or {})),
            roles=specs,
            graph=DataflowGraph(nodes, ["prompt"], syncs),
            dataset=DatasetSpec(),
            dataset_type="prompt",
            data_role="actor",
            evaluation=Evaluation(DataflowGraph(evaluate, ["target"]), batch_size=2),
            saved_roles=["actor"],
            steps_follow="train",
            updates_per_firing={"train": 1},
        )

    def session(self, sources: Any = None) -> Session:
        experiment = self.experiment()
        experiment.check()
        loader = ToyLoader(self.num_ids, self.size)
        directory = RunDirectory.from_control(experiment.control)
        horizon = RunLength.from_experiment(experiment, loader)
        specs, tokenizers = (
            horizon.build_specs(experiment),
            dict.fromkeys(experiment.roles, ToyTokenizer()),
        )
        build = BuildWorker(experiment, specs, tokenizers, directory.path / "cache", "cpu")
        devices: DeviceTransport
        if experiment.num_devices > 1:
            devices = ThreadDevices(experiment.num_devices)
        else:
            devices = ThreadDevice(torch.device("cpu"))
        group = DeviceGroup(devices, experiment, build)
        evaluator = Evaluator(
            experiment, experiment.evaluation, group, sources or {"held": ToyRows()}, tokenizers
        )
        return Session(
            SessionParts(
                experiment=experiment,
                directory=directory,
                group=group,
                master=Master(experiment, group, loader, tokenizers),
                evaluator=evaluator,
                samples=SampleReader(experiment.graph, group, ToyTokenizer()),
                horizon=horizon,
            )
        )

    def run(self) -> Session:
        """Begin, or go on with, the run, as `launch.run` does."""
        session = self.session()
        experiment = self.experiment()
        directory = RunDirectory.from_control(experiment.control)
        session.open(resumes=admit(directory, experiment.control, experiment.resolve()))
        try:
            session.run()
        except BaseException as error:
            session.close("failed", error)
            raise
        session.close("finished")
        return session

    @property
    def path(self) -> Path:
        return RunDirectory.from_control(self.experiment().control).path

    def weights(self) -> list[float]:
        steps = sorted(
            (self.path / "checkpoints" / "actor").glob("step*"), key=lambda p: int(p.name[4:])
        )
        return json.loads((steps[-1] / "model.json").read_text())


TIMES = ("step_seconds", "peak_memory_gb", "peak_bytes", "num_weight_bytes")


def timeless(lines) -> list[dict[str, Any]]:
    """Metrics without what a clock or the memory says."""
    return [
        {
            k: v
            for k, v in line.items()
            if k.rsplit("/", 1)[-1] not in TIMES and not k.startswith("time/")
        }
        for line in lines
    ]
