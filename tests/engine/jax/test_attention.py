"""Splash attention and cuDNN's function beside XLA's, with values and gradients of packed rows.

On a CPU, JAX interprets splash attention, and computes what cuDNN would compute by XLA.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.engine.generation.common import LLAMA
from weft.engine.jax import attention
from weft.engine.jax.attention import LayerWindow, attend_to_rows, choose_kernel
from weft.engine.jax.decoder import DecoderSettings, Kernel, TokenRows
from weft.engine.jax.mesh import build_mesh, build_row_sharding
from weft.engine.jax.packing import check_single_sequences
from weft.errors import ConfigError
from weft.models.network.config import TransformerConfig

PACKED = [[100, 1, 131], [256]]  # lengths of the sequences in each row; the rest is padding
APART = [[100], [256]]
LENGTH = 256
# Sums of float32 in another order: some roundings of 6e-8 of values near 1.
BOUNDS = {"rtol": 1e-5, "atol": 2e-6}


@pytest.fixture(autouse=True)
def narrow() -> Iterator[None]:
    """Switch float64 off, which other tests switch on for the process."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", False)
    yield
    jax.config.update("jax_enable_x64", before)


def attend(kernel: Kernel, lengths: list[list[int]], index: int = 0, **options: Any) -> list[Any]:
    """Attention of the tokens that are no padding, and its gradients by q, k and v."""
    sizes, softcap, mesh = options.get("sizes", [None]), options.get("softcap"), options.get("mesh")
    config = replace(LLAMA, num_heads=4, num_kv_heads=2, head_dim=16, attention_softcap=softcap)
    sharding = None
    if mesh is not None:
        sharding = build_row_sharding(build_mesh(mesh, jax.devices(), trained=True))
    decoder = DecoderSettings(
        config, "lm", "last", jnp.float32, row_sharding=sharding, attention=kernel
    )
    random = np.random.default_rng(0)
    shapes = ((2, LENGTH, 2, 2, 16), (2, LENGTH, 2, 16), (2, LENGTH, 2, 16))
    q, k, v = (random.standard_normal(shape, np.float32) for shape in shapes)
    segments, positions = np.zeros((2, 2, LENGTH), np.int32)
    for row, sequences in enumerate(lengths):
        start = 0
        for number, size in enumerate(sequences):
            segments[row, start : start + size] = number + 1
            positions[row, start : start + size] = np.arange(size)
            start += size
    rows = TokenRows(None, positions, segments, None, None)
    weights = random.standard_normal(shapes[0], np.float32) * (segments > 0)[:, :, None, None, None]

    def read(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        window = LayerWindow(sizes, jnp.asarray(index))
        mixed = attend_to_rows(q, k, v, window, jnp.float32(0.3), rows, decoder)
        return (mixed * weights).sum(), mixed * (weights != 0)

    gradients, mixed = jax.jit(jax.grad(read, (0, 1, 2), has_aux=True))(q, k, v)
    return [mixed, *gradients]


def assert_equal(kernel: Kernel, lengths: list[list[int]], index: int = 0, **options: Any) -> None:
    wanted = attend("xla", lengths, index, **{**options, "mesh": None})
    for own, want in zip(attend(kernel, lengths, index, **options), wanted, strict=True):
        np.testing.assert_allclose(own, want, **BOUNDS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sizes": [None, 40], "index": 0},
        {"sizes": [None, 40], "index": 1},
        {"softcap": 2.0},
        {"mesh": "d2f1t2"},
        {"mesh": "!1,2,4"},
    ],
    ids=["causal", "whole", "window", "softcap", "heads divided", "heads whole"],
)
def test_splash_attention_is_that_of_xla(options: dict[str, Any]) -> None:
    assert_equal("splash", PACKED, **options)


@pytest.mark.slow
def test_splash_attention_sees_segments() -> None:
    mixed = attend("splash", PACKED)[0]
    other = attend("splash", [[232], [256]])[0]
    assert np.allclose(mixed[0, :100], other[0, :100], **BOUNDS)
    assert not np.allclose(mixed[0, 101:232], other[0, 101:232], atol=0.01)


@pytest.mark.parametrize("index", [0, 1])
def test_cudnns_function_is_xlas_on_rows_of_one_sequence(index: int) -> None:
    assert_equal("cudnn", APART, index, sizes=[None, 40])


def test_cudnn_gets_no_rows_of_several_sequences() -> None:
    check_single_sequences(np.array([[1, 1, 0], [2, 2, 2], [0, 0, 0]], np.int32))
    with pytest.raises(ValueError, match="row 1 has several sequences, which cuDNN"):
        check_single_sequences(np.array([[1, 1, 0], [2, 3, 0]], np.int32))
    # It could not tell: nothing but the number of tokens reaches it.
    assert "segment" not in str(inspect.signature(jax.nn.dot_product_attention))


def test_a_role_of_float64_in_the_process_leaves_xla_to_the_others() -> None:
    jax.config.update("jax_enable_x64", True)
    assert choose_kernel("auto", "tpu", LLAMA, jnp.bfloat16) == "xla"


def test_the_kernel_is_that_of_the_platform() -> None:
    config = replace(LLAMA, head_dim=64)
    assert choose_kernel("auto", "tpu", config, jnp.bfloat16) == "splash"
    assert choose_kernel("auto", "tpu", config, np.float64) == "xla"
    assert choose_kernel("auto", "gpu", config, jnp.bfloat16) == "xla"
    assert choose_kernel("auto", "cpu", config, jnp.float32) == "xla"
    assert choose_kernel("xla", "tpu", config, jnp.bfloat16) == "xla"
    assert choose_kernel("cudnn", "gpu", config, jnp.bfloat16) == "cudnn"


@pytest.mark.parametrize(
    ("option", "platform", "changes", "dtype", "message"),
    [
        ("splash", "gpu", {}, "bfloat16", "is for a TPU, and jax computes on gpu"),
        ("splash", "tpu", {}, "float64", "does not work in a process with float64"),
        ("cudnn", "cpu", {}, "bfloat16", "is for a GPU, and jax computes on cpu"),
        ("cudnn", "gpu", {}, "float32", "no float32; write dtype=bfloat16"),
        ("cudnn", "gpu", {"attention_softcap": 50.0}, "bfloat16", "no soft cap"),
        ("cudnn", "gpu", {"head_dim": 256}, "bfloat16", "up to 128, and this model has 256"),
    ],
)
def test_a_kernel_that_cannot_serve_is_refused(
    option: str, platform: str, changes: dict[str, Any], dtype: str, message: str
) -> None:
    config: TransformerConfig = replace(LLAMA, **changes)
    with pytest.raises(ConfigError, match=rf"attention={option}: .*{message}"):
        choose_kernel(option, platform, config, jnp.dtype(dtype))


def test_scores_and_masks_of_all_pairs_of_tokens_are_never_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = attend("xla", PACKED)
    monkeypatch.setattr(
        attention, "MAX_SCORES", 2 * 4 * LENGTH * 32
    )  # those of 32 queries of a row
    for own, want in zip(attend("xla", PACKED), wanted, strict=True):
        np.testing.assert_allclose(own, want, **BOUNDS)
    config = replace(LLAMA, num_heads=4, num_kv_heads=2, head_dim=16)
    decoder = DecoderSettings(config, "lm", "last", jnp.float32, attention="xla")
    window = LayerWindow([None], jnp.asarray(0))
    number = jnp.zeros((2, LENGTH), jnp.int32)
    rows = TokenRows(None, number, number, None, None)

    def read(q: Any, k: Any, v: Any) -> Any:
        return attend_to_rows(q, k, v, window, jnp.float32(0.3), rows, decoder).sum()

    shapes = ((2, LENGTH, 2, 2, 16), (2, LENGTH, 2, 16), (2, LENGTH, 2, 16))
    traced = jax.make_jaxpr(jax.grad(read, (0, 1, 2)))(*map(jnp.zeros, shapes))
    found = list_shapes(traced.jaxpr)
    assert any(shape[-2:] == (32, LENGTH) for shape in found), "scores are there, in parts"
    assert not [shape for shape in found if shape[-2:] == (LENGTH, LENGTH)]


def list_shapes(jaxpr: Any) -> list[tuple[int, ...]]:
    """Return the shapes of all values that a traced function computes, those of loops included."""
    shapes = []
    for equation in jaxpr.eqns:
        shapes += [value.aval.shape for value in equation.outvars]
        for part in jax.tree.leaves(equation.params, is_leaf=lambda each: hasattr(each, "eqns")):
            inner = getattr(part, "jaxpr", part)
            if hasattr(inner, "eqns"):
                shapes += list_shapes(inner)
    return shapes
