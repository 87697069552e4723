"""Blocks of rows of one shape."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from weft.engine.jax.decoder import DecoderSettings
from weft.engine.jax.packing import BlockShapes, pack_blocks, place_sequences
from weft.models.network.config import TransformerConfig
from weft.models.network.packed import SamplingSupport, pack

CONFIG = TransformerConfig(
    family="llama",
    vocab_size=20,
    hidden_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=8,
    max_positions=2048,
)


def settings(head: str = "lm", pooling: str = "last") -> DecoderSettings:
    return DecoderSettings(CONFIG, head, pooling, jnp.float32)  # type: ignore[arg-type]


def shapes_of(*batches: list[int], longest: int | None = None) -> list[tuple[int, int]]:
    """The shape that each batch of sequences of these lengths gets."""
    shapes = BlockShapes(longest, settings())
    return [shapes.choose(np.array(lengths))[0] for lengths in batches]


def test_sequences_are_put_into_rows_with_room() -> None:
    places, count = place_sequences(np.array([5, 6, 3, 2, 8]), 8)
    assert (places.tolist(), count) == ([0, 8, 5, 14, 16], 3)


def test_a_batch_of_any_size_has_the_shape_of_the_first() -> None:
    first = [100] * 20
    assert shapes_of(first, [7], [128] * 600, first) == [(20, 128)] * 4
    assert shapes_of(first, [128] * 700) == [(20, 128), (175, 128)], "more than 32 blocks"
    assert shapes_of([100] * 4, [300]) == [(4, 128), (1, 384)], "longer than known before"
    assert shapes_of([100] * 4, [300], longest=300) == [(2, 384)] * 2
    # Rows of the longest sequence would be mostly padding for short ones.
    assert shapes_of([20] * 40, [64], [65], [900], longest=900) == [(14, 64)] * 2 + [(1, 1024)] * 2


def test_the_long_shape_has_an_empty_block_at_first() -> None:
    tokens = [torch.arange(length) % 20 for length in (20, 30)]
    shapes = BlockShapes(900, settings())
    blocks = pack_blocks(pack(tokens), settings(), None, shapes)
    assert [block.rows.tokens.shape for block in blocks] == [(1, 64), (1, 1024)]
    assert [int(block.reads.count) for block in blocks] == [48, 0]
    assert len(pack_blocks(pack(tokens), settings(), None, shapes)) == 1


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_blocks_have_all_tokens_once(pooling: str) -> None:
    """And what a head reads is where the tokens are."""
    lengths = [700, 900, 1000, 300, 500, 800, 64]
    tokens = [torch.arange(length) % 20 for length in lengths]
    for decoder in (settings(), settings("score", pooling)):
        blocks = pack_blocks(pack(tokens), decoder, None, BlockShapes(None, decoder))
        assert len(blocks) > 1 and len({block.rows.tokens.shape for block in blocks}) == 1
        outputs = np.concatenate([block.outputs for block in blocks])
        total = sum(lengths) - len(lengths) if decoder.head == "lm" else len(lengths)
        assert sorted(outputs.tolist()) == list(range(total))
        for block in blocks:
            segments = block.rows.segments.reshape(-1)
            held = np.bincount(segments[segments > 0] - 1)
            assert held.tolist() == [lengths[number] for number in block.sequences]
            count = int(block.reads.count)
            if decoder.head == "lm":
                following = block.rows.tokens.reshape(-1)[block.reads.rows[:count] + 1]
                assert np.array_equal(following, block.reads.labels[:count])
            elif pooling == "mean":
                assert np.bincount(block.reads.labels[:count]).tolist() == held.tolist()
                assert (block.reads.labels[count:] == len(segments)).all()


def test_ids_that_sampling_kept_are_bits() -> None:
    counts = np.array([2, 0, 1])
    support = SamplingSupport(torch.tensor([3, 19, 8]), torch.from_numpy(counts), counts)
    tokens = pack([torch.arange(4)])
    (block,) = pack_blocks(tokens, settings(), None, BlockShapes(None, settings()), support)
    bits = np.unpackbits(block.reads.support[:3], axis=1, bitorder="little")[:, :20]
    assert [np.flatnonzero(row).tolist() for row in bits] == [[3, 19], list(range(20)), [8]]
