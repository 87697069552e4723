"""Weights, masters and optimizer state that leave the device and come back, on a lane whose copies
come as late as may be.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import layouts
from tests.engine.common import Nll, batch_of, engine_of
from tests.engine.layouts import Case
from tests.engine.torch.lanes import Late, held
from tests.engine.torch.test_engine_state import (
    GROUPS,
    LORA,
    assert_equal,
    logprobs,
    parameters,
    path,
)
from tests.ranks import Ranks
from weft.engine.base import Request
from weft.engine.spec import GenerationSpec, LoRASpec, OptimizerSpec, Schedule
from weft.engine.torch import engine as torch_engine
from weft.engine.torch import optimizer as torch_optimizer
from weft.engine.torch.engine import TorchEngine
from weft.topology import build_whole_slice

__all__ = ["path"]  # the fixture
SPEC: dict[str, Any] = {
    "optimizer": OptimizerSpec(lr=1e-2, weight_decay=0.1),
    "schedule": Schedule(8, 2),
}
KINDS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "lora": {"lora": LORA},
    "lora-bfloat16": {"lora": LORA, "dtype": "bfloat16"},
    "tied": {"init_from_scratch": True},
    "states": {"optimizer": OptimizerSpec(lr=1e-2, weight_decay=0.1, state_dtype="bfloat16")},
}


def apart(
    path: Path, patch: pytest.MonkeyPatch, *, home: bool = False, **spec: Any
) -> tuple[TorchEngine, Late]:
    """An engine of a device with memory of its own, which here is the host's too."""
    lane = Late()
    with patch.context() as patched:
        patched.setattr(torch_engine, "build_copy_queue", lambda device: lane)
        if home:
            patched.setattr(
                torch_engine, "choose_master_device", lambda spec, device: torch.device("cpu")
            )
        return engine_of(path, **spec), lane


def on_device(engine: TorchEngine) -> dict[str, int]:
    """Bytes of what lies there."""
    masters = engine._masters
    own = [master for name, master in masters._masters.items() if name not in masters._homed]
    state = [] if engine._optimizer is None else [*engine._optimizer._optimizer.state.values()]
    return {
        "weights": held([*engine._network.parameters(), *engine._network.buffers(), *own]),
        "optimizer": held([value for slots in state for value in slots.values() if value.dim()]),
    }


def sampled(engine: TorchEngine) -> list[int]:
    with engine.generating(GenerationSpec(max_new_tokens=6, seed=5)) as generator:
        generator.submit([Request("a", 0, [9, 10, 11])])
        tokens = []
        while not generator.idle:
            tokens += [event.token for event in generator.step()]
    return tokens


@pytest.mark.default_cases("lora", "states", "tied")
@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_a_role_that_leaves_after_each_call_computes_the_same_bits(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    plain = engine_of(path, **{**SPEC, **changes})
    engine, lane = apart(path, monkeypatch, **{**SPEC, **changes, "offload": True})
    assert on_device(engine)["weights"] == 0, "it begins in host memory"

    def leave() -> None:
        engine.offload("weights")
        engine.offload("optimizer")
        assert on_device(engine) == {"weights": 0, "optimizer": 0}

    for step in range(3):
        batches = [batch_of(GROUPS, seed=2 * step + n) for n in (0, 1)]
        assert torch.equal(logprobs(engine), logprobs(plain))
        leave()
        one, other = (
            [stats.metrics["loss"] for stats in each.train(batches, Nll(), max_tokens=20)]
            for each in (engine, plain)
        )
        assert one == other
        leave()
        assert sampled(engine) == sampled(plain)
        leave()
        if not step:
            taken = lane.pinned
    assert lane.pinned == taken, "host memory is taken once"
    assert_equal(parameters(engine), parameters(plain))
    for each, name in ((engine, "away"), (plain, "plain")):
        (tmp_path / name).mkdir()
        each.save_state(tmp_path / name)
    assert on_device(engine) == {"weights": 0, "optimizer": 0}
    for file in ("parameters.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "away" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()
    engine.load_state(tmp_path / "plain")
    batch = [batch_of(GROUPS, seed=9)]
    assert (
        engine.train(batch, Nll())[0].metrics["loss"]
        == plain.train(batch, Nll())[0].metrics["loss"]
    )
    assert_equal(parameters(engine), parameters(plain))


def test_blocks_begin_when_their_own_weights_are_there(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, lane = apart(path, monkeypatch, trained=False)
    before = logprobs(engine)
    engine.offload("weights")
    blocks = engine._built.blocks
    assert len(blocks) > 1
    begun: list[int] = []
    for block in blocks:
        block.register_forward_pre_hook(lambda *_: begun.append(lane._read))
    for _ in range(2):
        done, start = len(lane._asked), len(lane.log)
        assert torch.equal(logprobs(engine), before)
        counts = [
            len(engine._masters._mover.memory._groups[number]) for number in range(len(blocks) + 1)
        ]
        expected = [done + sum(counts[: number + 2]) for number in range(len(blocks))]
        assert begun == expected, "of the copies those of the blocks before and its own"
        asked = lane.log[start:]
        assert asked[0] == "follow" and asked.index("hold") == 1 + sum(counts), (
            "all copies are asked for at once"
        )
        assert asked.count("hold") == 1 + len(blocks) and "wait" not in asked
        assert torch.equal(logprobs(engine), before) and len(lane.log) == start + len(asked), (
            "later passes wait for nothing"
        )
        engine.offload("weights")
        begun.clear()
        assert lane.log[-2:] == ["follow", "hold"], "frozen weights are in host memory already"


def test_what_is_away_is_read_and_written_there(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for changes in ({"trained": False, "dtype": "bfloat16"}, {"dtype": "bfloat16"}, {}):
        plain = engine_of(path, **{**SPEC, **changes})
        engine, _ = apart(path, monkeypatch, **{**SPEC, **changes})
        other, more = (
            parameters(engine_of(path, init_from_scratch=True, seed=seed)) for seed in (8, 9)
        )
        for eta in (1.0, 0.25):
            engine.offload("weights")
            for each in (engine, plain):
                each.write(
                    ((n, build_whole_slice(tuple(v.shape)), v) for n, v in other.items()),
                    version=3,
                    eta=eta,
                )
            assert on_device(engine)["weights"] == 0
            assert_equal(parameters(engine), parameters(plain))
            assert on_device(engine)["weights"] == 0
            assert torch.equal(logprobs(engine), logprobs(plain))
            engine.onload("weights")
            for each in (engine, plain):
                each.write(
                    ((n, build_whole_slice(tuple(v.shape)), v) for n, v in more.items()),
                    version=4,
                    eta=eta,
                )
            engine.offload("weights")
            assert torch.equal(logprobs(engine), logprobs(plain))


def test_weights_are_written_to_while_they_come(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = apart(path, monkeypatch)
    other = parameters(engine_of(path, init_from_scratch=True, seed=8))
    engine.offload("weights")
    engine.onload("weights")
    engine.write(((n, build_whole_slice(tuple(v.shape)), v) for n, v in other.items()), version=1)
    assert_equal(parameters(engine), other)


@pytest.mark.parametrize("kind", ["adamw", "lion", "sgd"])
def test_optimizer_state_comes_by_bucket_ahead_of_the_update(
    path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(torch_optimizer, "BUCKET", 3000)
    spec = {**SPEC, "optimizer": OptimizerSpec(type=kind, lr=1e-3)}
    plain = engine_of(path, **spec)
    engine, lane = apart(path, monkeypatch, **spec)
    optimizer = engine._optimizer
    assert optimizer is not None
    buckets = optimizer._buckets
    assert len(buckets) > 3 and [p for bucket in buckets for p in bucket] == optimizer.parameters
    assert all(len(bucket) == 1 or sum(p.numel() for p in bucket) <= 3000 for bucket in buckets)
    for each in (engine, plain):
        each.train([batch_of(GROUPS)], Nll())
    engine.offload("optimizer")
    assert on_device(engine)["optimizer"] == 0 and not any("wait" in word for word in lane.log)
    seen: list[tuple[int, int]] = []  # at each bucket's update: groups asked for, and groups there
    step = optimizer._optimizer.step

    def watched() -> None:
        memory = optimizer._memory
        seen.append(
            (
                len(buckets) - len(memory._away),
                len(buckets) - len(memory._away) - len(memory._arriving),
            )
        )
        step()

    monkeypatch.setattr(optimizer._optimizer, "step", watched)
    for each in (engine, plain):
        each.train([batch_of(GROUPS, seed=1)], Nll())
    assert seen == [(min(n + 2, len(buckets)), n + 1) for n in range(len(buckets))]
    for each in (engine, plain):
        each.train([batch_of(GROUPS, seed=2)], Nll())
    assert len(seen) == len(buckets) + 1, "what is there is updated at once"
    assert_equal(parameters(engine), parameters(plain))
    engine.offload("optimizer")
    engine.onload("optimizer")
    assert not optimizer._memory.is_offloaded and not optimizer._memory._arriving


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_masters_in_host_memory_are_sent_while_others_are_updated(
    path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    monkeypatch.setattr(torch_optimizer, "BUCKET", 3000)
    spec = {**SPEC, **changes, "optimizer": OptimizerSpec(lr=1e-2, offload=True, weight_decay=0.1)}
    plain = engine_of(path, **spec)
    engine, lane = apart(path, monkeypatch, home=True, **spec)
    for step in range(2):
        batches = [batch_of(GROUPS, seed=2 * step + n) for n in (0, 1)]
        one, other = (
            [stats.metrics["loss"] for stats in each.train(batches, Nll(), max_tokens=20)]
            for each in (engine, plain)
        )
        assert one == other
        engine.offload("weights")
        engine.offload("optimizer")
        assert on_device(engine)["weights"] == 0
        assert torch.equal(logprobs(engine), logprobs(plain))
    assert_equal(parameters(engine), parameters(plain))
    lane.log.clear()
    done: list[int] = []
    optimizer = engine._optimizer
    assert optimizer is not None
    step_ = optimizer._optimizer.step

    def watched() -> None:
        done.append(sum(word.startswith("up") for word in lane.log))
        step_()

    monkeypatch.setattr(optimizer._optimizer, "step", watched)
    engine.train([batch_of(GROUPS, seed=7)], Nll())
    counts = [len(bucket) for bucket in optimizer._buckets]
    assert done == [sum(counts[:n]) for n in range(len(counts))], (
        "each bucket is on its way before the next is updated"
    )
    assert sum(word.startswith("up") for word in lane.log) == sum(counts), "and is sent once"
    assert sum(word.startswith("down") for word in lane.log) == sum(counts), "one gradient each"


def test_nothing_moves_on_a_device_that_works_in_the_host_s_memory(path: Path) -> None:
    engine = engine_of(path, offload=True)
    [note] = engine.notes
    assert note == "offload=true: on a CPU weights are in host memory already; nothing changes"
    held_before = on_device(engine)["weights"]
    before = logprobs(engine)
    engine.train([batch_of(GROUPS)], Nll())
    assert on_device(engine)["weights"] == held_before > 0 and not torch.equal(
        logprobs(engine), before
    )


# -- on several ranks


def moved(
    path: Path, layout: str, case: Case, home: bool, leaves: bool
) -> tuple[list[float], list[Any], list[Any]]:
    """(losses and norms, this rank's parameters, what it samples) of three steps; with `leaves`
    weights and optimizer state go to host memory after every call.
    """
    with layouts.float64(), pytest.MonkeyPatch.context() as patch:
        lane = Late()
        if home or leaves:
            patch.setattr(torch_engine, "build_copy_queue", lambda device: lane)
        if home:
            patch.setattr(
                torch_engine, "choose_master_device", lambda spec, device: torch.device("cpu")
            )
        made, index = layouts.engine(path, layout, case)
        ranks = layouts.Layout.parse(layout).data

        def leave() -> None:
            if leaves:
                made.offload("weights")
                made.offload("optimizer")
                assert on_device_locally(made) == 0

        leave()
        figures: list[float] = []
        for seed in range(3):
            part = layouts.split_over_ranks(layouts.batch(seed), ranks, "sequence")[index]
            start = len(lane.log)
            scored = made.forward(part, frozenset({"logprobs"}), max_tokens=layouts.MOST)
            if leaves:  # what FSDP2 gathers on its own stream the host waits for
                waits = sum(
                    word == ("wait" if made._masters._shards is not None else "hold")
                    for word in lane.log[start:]
                )
                assert waits == 1 + len(made._built.blocks)
            leave()
            [stats] = made.train([part], Nll(), max_tokens=layouts.MOST)
            figures += [
                stats.metrics["loss"],
                stats.metrics["grad_norm"],
                float(scored.data["logprobs"].sum()),
            ]
            leave()
        tokens = layouts.generated(made, ranks, index)
        leave()
        return (
            figures,
            [value.clone() for _, _, value in made.read(made.slices())],
            sorted(tokens.items()),
        )


def on_device_locally(made: TorchEngine) -> int:
    """Bytes of this rank's rows, and of whole parameters that a pass has left gathered."""
    masters, found = made._masters, 0
    found += held(
        [
            *masters._copies.values(),
            *(m for n, m in masters._masters.items() if n not in masters._homed),
        ]
    )
    for parameter in made._network.parameters():
        here = (
            parameter.to_local()
            if isinstance(parameter, torch.distributed.tensor.DTensor)
            else parameter
        )
        found += here.untyped_storage().nbytes()
    return found


@pytest.mark.default_cases("sharded", "replicated", "stages")
@pytest.mark.parametrize(
    ("layout", "home", "options"),
    [
        ("d2f2", True, {}),
        ("d2f2", False, {}),
        ("d2f2", True, {"zero_stage": 2}),
        ("d2f1", True, {}),
        ("t2", True, {}),
        ("p2", True, {"pipeline_schedule": "zero_bubble"}),
        ("d2f2", True, {"lora": LoRASpec(r=3, alpha=6.0)}),
    ],
    ids=["masters-sharded", "sharded", "gathered", "replicated", "tensor", "stages", "lora"],
)
def test_two_ranks_that_leave_compute_as_those_that_stay(
    layout: str, home: bool, options: dict[str, Any], ranks: Ranks, tmp_path: Path
) -> None:
    case = Case(lora="lora" in options, options={k: v for k, v in options.items() if k != "lora"})
    model = layouts.write_model(case, tmp_path / "hf")
    stayed = ranks.run(moved, model, layout, case, False, False)
    left = ranks.run(moved, model, layout, case, home, True)
    for one, other in zip(stayed, left, strict=True):
        assert other[0] == pytest.approx(one[0], rel=1e-10) and other[2] == one[2]
        for was, now in zip(one[1], other[1], strict=True):
            torch.testing.assert_close(now, was, rtol=1e-10, atol=1e-12)
