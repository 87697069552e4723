"""What is recomputed and which rows a kernel gets changes how a network is computed, not what."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

from tests.engine import layouts
from tests.engine.common import engine_of
from tests.engine.layouts import Case
from weft.engine.jax.decoder import DecoderSettings
from weft.engine.jax.engine import JaxNetwork
from weft.engine.jax.network import compute_outputs
from weft.engine.jax.packing import BlockShapes, RowBlock, pack_blocks
from weft.engine.spec import RECOMPUTE_POLICIES
from weft.errors import ConfigError
from weft.models.network.packed import pack

LENGTHS = (7, 30, 4, 11)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> JaxNetwork:
    path = layouts.write_model(Case(), tmp_path_factory.mktemp("jax") / "hf")
    engine: Any = engine_of(path, backend="jax", trained=False, dtype="float32")
    assert isinstance(engine._network, JaxNetwork)
    return engine._network


def pack_some(decoder: DecoderSettings) -> RowBlock:
    random = torch.Generator().manual_seed(0)
    tokens = [torch.randint(8, 60, (length,), generator=random) for length in LENGTHS]
    (block,) = pack_blocks(pack(tokens), decoder, None, BlockShapes(None, decoder))
    return block


def compute(network: JaxNetwork, decoder: DecoderSettings, arrays: Any) -> Any:
    """Log-probs of all tokens but the first of each sequence."""
    given = pack_some(decoder)
    want = frozenset({"logprobs"})
    one = np.float32(1.0)
    outputs = compute_outputs(arrays, given.rows, given.reads, one, decoder=decoder, want=want)
    return outputs["logprobs"][: len(given.outputs)]


@pytest.mark.slow
def test_a_policy_changes_what_is_recomputed_and_no_gradient(network: JaxNetwork) -> None:
    products = {}
    gradients = {}
    for policy in (None, *RECOMPUTE_POLICIES):
        decoder = replace(network.decoder, policy=policy)

        def read(arrays: Any, decoder: DecoderSettings = decoder) -> Any:
            return compute(network, decoder, arrays).sum()

        products[policy] = str(jax.make_jaxpr(jax.grad(read))(network.arrays)).count("dot_general")
        gradients[policy] = jax.jit(jax.grad(read))(network.arrays)
    for policy in RECOMPUTE_POLICIES:
        for name, want in gradients[None].items():
            np.testing.assert_allclose(gradients[policy][name], want, rtol=1e-5, atol=1e-6)
    # Recomputed are all products, none, or those of attention, which have batch dimensions.
    fewest = products["everything_saveable"]
    assert products["checkpoint_dots"] == fewest <= products[None]
    assert fewest < products["checkpoint_dots_with_no_batch_dims"] < fewest + 6
    assert products["nothing_saveable"] >= products["checkpoint_dots_with_no_batch_dims"] + 6


@pytest.mark.slow
def test_cudnn_gets_rows_of_one_sequence_and_the_results_are_the_same(network: JaxNetwork) -> None:
    xla, cudnn = (replace(network.decoder, attention=each) for each in ("xla", "cudnn"))
    assert pack_some(xla).rows.segments.max(axis=1).tolist() != [1, 2, 3, 4]
    segments = pack_some(cudnn).rows.segments
    assert [sorted({*row} - {0}) for row in segments.tolist()] == [[1], [2], [3], [4]]
    want = compute(network, xla, network.arrays)
    found = compute(network, cudnn, network.arrays)
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"recompute_policy": "checkpoint_dots"},
            "recompute_policy=checkpoint_dots: backend=torch",
        ),
        ({"attention": "splash"}, "attention=splash: backend=torch chooses its own kernels"),
    ],
)
def test_options_of_jax_alone_are_refused_by_torch(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = layouts.write_model(Case(), tmp_path / "hf")
    with pytest.raises(ConfigError, match=message):
        engine_of(path, **options, backend="torch")


def test_a_label_that_repeats_a_position_is_not_seen(network: JaxNetwork) -> None:
    """The last token of a sequence that is scored once has no position (`groups.SCORED_ONCE`)."""
    packed = pack([torch.arange(8, 20), torch.arange(30, 37)])
    positions = packed.positions.clone()
    positions[[11, 18]] -= 1
    want = frozenset({"logprobs"})
    whole = network(packed, want)["logprobs"]
    once = network(replace(packed, positions=positions), want)["logprobs"]
    torch.testing.assert_close(once, whole, rtol=0.0, atol=1e-6)
