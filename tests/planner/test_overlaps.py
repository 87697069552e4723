"""Weights that devices lack, against the transfers that a run executes."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest

from tests.planner.decoders import decoder, with_settings
from weft.errors import ConfigError
from weft.planner.cost import estimate_transfers
from weft.planner.decoder_sizes import DecoderSizes
from weft.planner.devices import GIB, DeviceRates, estimate_cpu_rates
from weft.planner.overlaps import compute_lacked_elements
from weft.realloc.plan import count_traffic, holdings_of, plan
from weft.topology import Layout, Mesh

HIDDEN, QUERY, KEY, INNER, IDS, LAYERS, EXPERTS = 48, 48, 24, 96, 480, 7, 4
ATTENTION = 2 * HIDDEN * (QUERY + KEY)
RATES = DeviceRates("hand", 1e9, 1e9, 1e9, 1e8, 0.0, 0.0, 64 * GIB, 128, per_node=4)


@dataclass(frozen=True)
class Sizes:
    """Heads and layers of the same network."""

    head_layers: float
    num_layers: int = LAYERS
    num_heads: int = 12
    num_kv_heads: int = 6
    head_dim: int = 4


def build(*, tied: bool = False, experts: int = 0) -> tuple[DecoderSizes, Sizes, dict[str, tuple]]:
    """Return the planner's sizes of a network, and the shapes of its matrices."""
    active = ATTENTION + 3 * HIDDEN * INNER
    network = decoder(
        layers=LAYERS,
        hidden=HIDDEN,
        query=QUERY,
        key=KEY,
        inner=INNER,
        vocab=IDS,
        active=ATTENTION + 3 * HIDDEN * INNER * max(1, experts),
        embedding=IDS * HIDDEN,
        outputs=0 if tied else IDS * HIDDEN,
    )
    shape = replace(network.shape, tied=tied)
    network = replace(network, shape=shape, active=active, outputs=IDS * HIDDEN, experts=experts)
    every = {"embed.weight": (IDS, HIDDEN)}
    for layer in range(LAYERS):
        block = {
            "attention.q.weight": (QUERY, HIDDEN),
            "attention.k.weight": (KEY, HIDDEN),
            "attention.v.weight": (KEY, HIDDEN),
            "attention.o.weight": (HIDDEN, QUERY),
        }
        for name in ("gate", "up", "down"):
            own = (HIDDEN, INNER) if name == "down" else (INNER, HIDDEN)
            if experts:
                block[f"mlp.experts.{name}.weight"] = (experts, *own)
            else:
                block[f"mlp.{name}.weight"] = own
        every |= {f"blocks.{layer}.{name}": size for name, size in block.items()}
    if not tied:
        every["head.weight"] = (IDS, HIDDEN)
    sizes = Sizes(head_layers=IDS * HIDDEN / active)
    return with_settings(network, trained=True), sizes, every


def draw_mesh(random_: random.Random, experts: int, sizes: Sizes, every: dict) -> Mesh:
    """Return a random mesh on which the network fits, on some of 12 devices."""
    while True:
        degrees = {name: random_.choice((1, 1, 2, 3)) for name in ("tensor", "pipeline")}
        data = random_.choice((1, 2, 4))
        shards = random_.choice([f for f in (1, 2, 4) if data % f == 0])
        expert = random_.choice((1, 2)) if experts and data % 2 == 0 else 1
        try:
            layout = Layout(data=data, fsdp=shards, expert=expert, **degrees)
            layout = replace(layout, stages_per_rank=random_.choice((1, 2)))
            layout = replace(layout, turns=random_.random() < 0.3)
            if layout.num_devices > 12 or layout.placement.num_stages > LAYERS:
                continue
            first = random_.randrange(13 - layout.num_devices)
            mesh = Mesh(layout, tuple(range(first, first + layout.num_devices)))
            holdings_of(every, sizes, mesh)
        except ConfigError:
            continue
        return mesh


@pytest.mark.parametrize(
    ("tied", "experts"), [(False, 0), (True, 0), (False, EXPERTS)], ids=["plain", "tied", "experts"]
)
def test_what_devices_lack_is_what_the_executed_plan_moves(tied: bool, experts: int) -> None:
    """The received bytes of random pairs of layouts, on each device and between machines.

    Shards of several matrices that are stored together are cut elsewhere, so that with tensor
    parallelism in one of two sharded layouts the overlaps differ a little.
    """
    network, sizes, every = build(tied=tied, experts=experts)
    total = sum(int(np.prod(shape)) for shape in every.values())
    assert network.shape.parameters == total
    random_ = random.Random(tied + 2 * experts)
    offs, crossing = [], []
    for _ in range(80):
        source, target = (draw_mesh(random_, experts, sizes, every) for _ in range(2))
        here = holdings_of(every, sizes, source, tied=tied)
        there = holdings_of(every, sizes, target, tied=tied)
        node_of = lambda rank: rank // RATES.per_node  # noqa: E731
        moved = count_traffic(
            plan(here, there, node_of=node_of),
            here,
            there,
            itemsize=dict.fromkeys(every, 1),
            node_of=node_of,
        )
        lacked = compute_lacked_elements(network, source, [target], RATES.per_node)
        received = np.array([moved.received[rank] for rank in target.ranks], float)
        offs.append(np.abs(lacked.missing[0] - received).max() / total)
        crossing.append((float(lacked.crossing.sum()) - moved.across) / total)
    off = np.array(offs)
    assert np.mean(off < 1e-3) >= 0.75 and off.mean() < 0.015 and off.max() < 0.15
    assert abs(np.mean(crossing)) < 0.05 and np.median(np.abs(crossing)) < 0.01


def test_layers_are_those_of_the_stages() -> None:
    """Of four layers, a head as costly as two makes the last of two stages have one."""
    network, _, _ = build()
    network = replace(
        network,
        shape=replace(network.shape, layers=4, parameters=1000, trainable=1000, embedding=100),
        outputs=200,
        active=100,
    )
    lacked = compute_lacked_elements(
        network, Mesh(Layout(), (0,)), [Mesh(Layout(pipeline=2), (0, 1))], 4
    )
    # 800 elements in four layers: three of them and the embedding, one of them and the head
    assert lacked.missing[0].tolist() == [0.0, 200 + 100]


def test_shards_are_parts_of_what_a_tensor_rank_has() -> None:
    """Two tensor ranks keep half of what they have; two devices that have nothing get the rest."""
    network, _, _ = build()
    tensor, shards = Mesh(Layout(tensor=2), (0, 1)), Mesh(Layout(2, 2, 2), (0, 1, 2, 3))
    lacked = compute_lacked_elements(network, tensor, [shards], 4)
    quarter = network.shape.parameters / 4
    assert lacked.missing[0].tolist() == pytest.approx([0.0, 0.0, quarter, quarter])


def test_the_busiest_link_sets_the_time() -> None:
    network, _, _ = build()
    whole = network.shape.parameters * 4
    one, four = Mesh(Layout(), (0,)), Mesh(Layout(data=4, fsdp=1), (0, 1, 2, 3))
    # Three copies leave one device.
    assert estimate_transfers(network, one, [four], RATES)[0] == pytest.approx(3 * whole / 1e9)
    assert estimate_transfers(network, four, [one], RATES)[0] == 0.0
    # Devices of another machine receive over the network, from four devices or from one.
    away = Mesh(Layout(data=2, fsdp=1), (4, 5))
    assert estimate_transfers(network, four, [away], RATES)[0] == pytest.approx(whole / 1e8)
    assert estimate_transfers(network, one, [away], RATES)[0] == pytest.approx(2 * whole / 1e8)
    # The first has half of the network, and a device of its machine the other half.
    halves, mixed = Mesh(Layout(tensor=2), (2, 3)), Mesh(Layout(data=2, fsdp=1), (3, 4))
    lacked = compute_lacked_elements(network, halves, [mixed], 4)
    assert lacked.missing[0].tolist() == pytest.approx([whole / 8, whole / 4])
    assert lacked.crossing[0].tolist() == pytest.approx([0.0, whole / 4])


def test_several_targets_are_estimated_as_each_one() -> None:
    """Targets have one size and any layout."""
    network, _, _ = build()
    random_ = random.Random(5)
    layouts = (
        Layout(tensor=2, pipeline=2),
        Layout(data=4, fsdp=2),
        Layout(pipeline=4),
        Layout(data=2, fsdp=2, pipeline=2),
    )
    seen = set()
    for _ in range(20):
        source = Mesh(Layout(data=2, fsdp=2, tensor=2), tuple(range(4, 8)))
        targets = []
        for _ in range(5):
            ranks = tuple(sorted(random_.sample(range(16), 4)))
            targets.append(Mesh(random_.choice(layouts), ranks))
        together = estimate_transfers(network, source, targets, RATES)
        alone = [estimate_transfers(network, source, [target], RATES)[0] for target in targets]
        assert together == alone
        seen |= set(together)
    assert len(seen) > 3


def test_a_cpu_packs_messages_besides_sending_them() -> None:
    network, _, _ = build()
    whole = network.shape.parameters * 4
    one, other = Mesh(Layout(), (0,)), Mesh(Layout(), (1,))
    cpu = estimate_cpu_rates(2, 4.0, 2, 1)
    (seconds,) = estimate_transfers(network, one, [other], cpu)
    packing = (2 + 1 + 1 + 2) * whole / cpu.memory_bandwidth
    assert seconds == pytest.approx(cpu.time_send(whole, (0,)) + packing)
