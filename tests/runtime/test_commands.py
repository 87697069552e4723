"""Calls that are interrupted for a training step on the same devices: every layout goes on as one
process does.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from tests.engine import layouts
from tests.engine.common import Nll
from tests.engine.layouts import Case
from tests.ranks import Ranks
from tests.runtime.thread_devices import Peers
from weft.data.sample import SequenceSample
from weft.data.tokenizer import Tokenizer
from weft.interfaces.base import MFCResult, Model
from weft.interfaces.generate import GenerateInterface
from weft.parallel.mesh import ProcessGroups
from weft.runtime.commands import DiscardSamples, PendingCommands, RunCall
from weft.runtime.device_process import DeviceProcess
from weft.runtime.split import split_over_ranks
from weft.runtime.store import TensorStore
from weft.topology import Layout, Mesh

IDS = [f"p{n}" for n in range(len(layouts.PROMPTS))]
K = 2
STOPS = list(range(10, 30))  # ends most completions early, each at a token of its own
Completion = tuple[list[int], list[int]]  # tokens, and the version of the weights that made each


@dataclass(frozen=True)
class Train:
    """A training step of the engine that generates."""

    def run(self, process: DeviceProcess, number: int) -> None:
        worker: Any = process.worker
        worker.engine.train([worker.part], Nll(), max_tokens=layouts.MOST)


@dataclass
class Sampling:
    """The worker of a device that samples."""

    engine: Any
    part: SequenceSample
    mesh: Mesh
    after: list[int]  # how many steps `Train` is sent
    prompts: SequenceSample
    tokenizer: Tokenizer
    store: TensorStore = field(default_factory=TensorStore)
    calls: dict[str, Any] = field(
        default_factory=lambda: {"gen": SimpleNamespace(interruptible=True, method="generate")}
    )

    def get_mesh(self, name: str) -> Mesh:
        return self.mesh

    def run_call(
        self, name: str, step: int, minibatches: Any, early: Any, weights: Any, updates: Any
    ) -> MFCResult:
        sent = Sent(updates, self.after)
        handle = Model(
            "actor",
            self.engine,
            self.tokenizer,
            self.tokenizer,
            "cpu",
            "float64",
            seed=5,
            updates=sent,
        )
        found = GenerateInterface(max_new_tokens=12, samples_per_prompt=K, stop_ids=STOPS).generate(
            handle, self.prompts
        )
        while sent.sent < len(self.after):
            sent.send()
        return found


class Sent:
    """`PendingCommands`, with what the driver sends at moments of this test: to the first rank after so
    many steps, to the second one first too late, then too early.
    """

    def __init__(self, updates: PendingCommands, after: list[int]) -> None:
        self.updates, self.after, self.asked, self.sent, self.fresh = updates, after, 0, 0, False
        self.process = updates._process
        self.ranks = self.process.worker.get_mesh("gen").ranks
        self.late = self.ranks.index(self.process.rank) % 2

    def are_waiting(self) -> bool:
        self.asked += 1
        if (
            self.sent < len(self.after)
            and self.asked >= self.after[self.sent] + (-1) ** self.sent * self.late
        ):
            self.send()
        return self.updates.are_waiting()

    def take(self, *, left: bool) -> bool:
        if not self.fresh and self.sent < len(self.after):
            self.send(seconds=0.2 * self.late)
        self.fresh = False
        return self.updates.take(left=left)

    def send(self, seconds: float = 0.0) -> None:
        self.sent, self.fresh = self.sent + 1, True
        threading.Timer(seconds, self._send, [self.sent]).start() if seconds else self._send(
            self.sent
        )

    def _send(self, number: int) -> None:
        self.process.receive(
            2 * number - 1, 90 + number, DiscardSamples(()), [self.process.rank], (), ()
        )
        self.process.receive(2 * number, number, Train(), self.ranks, (), ())


def ended(process: DeviceProcess, numbers: set[int]) -> dict[int, Any]:
    """What these commands returned."""
    found, end = dict[int, Any](), time.monotonic() + 60.0
    while not numbers <= found.keys():
        assert time.monotonic() < end, f"only {sorted(found)} have ended"
        for report in process.next_reports(1.0):
            if report.kind == "failed":
                raise report.value
            if report.kind == "finished":
                found[report.number] = report.value
    return found


def sampled(
    path: Path, layout: str, case: Case, after: list[int]
) -> dict[tuple[str, int], Completion] | None:
    """The completions of this rank's prompts, with training steps in their middle; None on ranks of
    no use.
    """
    parsed = Layout.parse(layout)
    rank = dist.get_rank() if parsed.num_devices > 1 else 0
    if rank >= parsed.num_devices:
        return None
    with layouts.float64():
        made, index = layouts.engine(path, layout, case)
        process = DeviceProcess(rank, Peers([]))
        process.groups = ProcessGroups()
        # the first part is done early
        mine = [n for n in range(len(IDS)) if min(n, parsed.data - 1) == index]
        prompts = SequenceSample.from_groups(
            [IDS[n] for n in mine],
            {"prompt": [[len(layouts.PROMPTS[n])] for n in mine]},
            {"prompt": np.array([token for n in mine for token in layouts.PROMPTS[n]])},
        )
        part = split_over_ranks(layouts.batch(0), parsed.data, "sequence")[index]
        tokenizer = Tokenizer.load(made._spec.tokenizer, str(path))
        worker = Sampling(made, part, Mesh.on_first_devices(made.layout), after, prompts, tokenizer)
        process.worker = worker  # type: ignore[assignment]
        nothing = SequenceSample((), {}, {}, {}, {})
        process.receive(
            0, 0, RunCall("gen", 0, (), nothing, announces=False), worker.mesh.ranks, (), ()
        )
        outputs = ended(process, set(range(len(after) + 1)))[0].outputs
    keys = [(id, k) for id in outputs.ids for k in range(K)]
    rows = zip(outputs.sequences("completion"), outputs.sequences("versions"), strict=True)
    return {
        key: (tokens.tolist(), versions.tolist())
        for key, (tokens, versions) in zip(keys, rows, strict=True)
    }


def check(case: Case, layout: str, ranks: Ranks, folder: Path, after: list[int]) -> None:
    """Each completion is what one process makes that takes up new weights after the same tokens of
    it.
    """
    path = layouts.write_model(case, folder / "hf")
    alone = dict[tuple[int, ...], Any]()
    found: dict[tuple[str, int], Completion] = {}
    for own in ranks.run(sampled, path, layout, case, after):
        for key, completion in (own or {}).items():
            assert found.setdefault(key, completion) == completion, "ranks of one part do the same"
    assert found.keys() == {(id, k) for id in IDS for k in range(K)}
    for key, (tokens, versions) in found.items():
        changes = tuple(n for n in range(1, len(versions)) if versions[n] != versions[n - 1])
        if changes not in alone:
            alone[changes] = sampled(path, "d1", case, list(changes))
        assert (tokens, versions) == alone[changes][key], (key, changes)
    assert {version for _, versions in found.values() for version in versions} == set(
        range(len(after) + 1)
    )
    assert len({len(tokens) for tokens, _ in found.values()}) > 2, "they end at different steps"


@pytest.mark.default_cases("d2f1", "p2")
@pytest.mark.parametrize("layout", ["t2", "p2", "c2", "d2f1", "d2"])
def test_new_weights_in_the_middle_on_two_devices(
    layout: str, ranks: Ranks, tmp_path: Path
) -> None:
    check(Case(), layout, ranks, tmp_path, [3, 9])


def test_new_weights_of_experts(ranks: Ranks, tmp_path: Path) -> None:
    check(Case("mixtral"), "d2e2", ranks, tmp_path, [3, 9])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "family"),
    [
        ("d2t2", "llama"),
        ("d2f1t2", "llama"),
        ("t2p2", "llama"),
        ("d2p2", "llama"),
        ("d2c2", "llama"),
        ("d2t2e2", "mixtral"),
    ],
)
def test_new_weights_in_the_middle_on_four_devices(
    layout: str, family: str, four_ranks: Ranks, tmp_path: Path
) -> None:
    check(Case(family), layout, four_ranks, tmp_path, [3, 9])
