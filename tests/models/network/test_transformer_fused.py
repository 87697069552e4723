"""With fused sums, norms compute the additions before them, and nothing else changes.

The kernel needs a GPU. Here its formula takes its place, and every tensor is one that it supports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.models.common import adapted, sequences, tiny, tiny_config
from weft import kernels
from weft.models.kv.pages import PagedCache, PagePool
from weft.models.kv.slots import KVCache
from weft.models.network.packed import pack
from weft.models.network.transformer import Transformer

Sums = Counter[str]


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Sums:
    """Fuses sums; counts the calls of the kernel."""
    calls: Sums = Counter()

    def add_rms_norm(
        x: Tensor, delta: Tensor, weight: Tensor, eps: float, offset: float
    ) -> tuple[Tensor, Tensor]:
        calls["sums"] += 1
        return x + delta, kernels.rms_norm(x + delta, weight, eps, offset=offset)

    def serves(name: str, *tensors: Tensor) -> bool:
        return name == "add_norm" and not torch.is_grad_enabled()

    monkeypatch.setattr(kernels.fused, "serves", serves)
    monkeypatch.setattr(kernels.fused, "add_rms_norm", add_rms_norm)
    return calls


def run_cached(network: Transformer, states: Tensor | None = None) -> list[Tensor]:
    """Hidden states of two prompts' last tokens and of a decode step, over pages and over slots."""
    dtype = next(network.parameters()).dtype
    pages = PagedCache(PagePool(network.config, "cpu", dtype, page=16))
    slots = KVCache(network.config, "cpu", dtype)
    results = []
    for cache in (pages, slots):
        rows = cache.allocate(2)
        for tokens in (sequences([7, 3]), sequences([2])[0]):
            packed = cache.extend(rows, tokens)
            own = None if states is None else states[: len(packed.tokens)]
            results.append(network.compute_hidden(packed, packed.rows, own))
    return results


def count_sums(
    network: Transformer, sums: Sums, run: Callable[[Transformer], list[Tensor]] = run_cached
) -> float:
    """Sums that a pass fused; it must compute what it computes without."""
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels.fused, "serves", lambda *_: False)
        expected = run(network)
    sums.clear()
    with torch.no_grad():
        results = run(network)
    for result, wanted in zip(results, expected, strict=True):
        assert torch.equal(result, wanted)
    return sums["sums"] / len(results)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3", "mixtral"])
def test_all_sums_of_a_cached_pass_are_fused(name: str, sums: Sums) -> None:
    """Two a layer, of which the last one is computed by the network's last norm."""
    network = tiny(name, dtype=torch.float64)
    assert count_sums(network, sums) == 2 * network.config.num_layers


def test_adapters_and_parallel_residuals_are_fused(sums: Sums) -> None:
    network = adapted("llama")
    assert count_sums(network, sums) == 2 * network.config.num_layers
    for block in network.blocks:
        block.parallel = True  # of each layer one sum comes before a norm
    assert count_sums(network, sums) == network.config.num_layers


@pytest.mark.parametrize("name", ["gpt2", "olmo2"])
def test_other_norms_and_places_are_not_fused(name: str, sums: Sums) -> None:
    assert count_sums(tiny(name), sums) == 0


def test_hooks_see_what_they_see_without(sums: Sums) -> None:
    for find in (
        lambda network: network.blocks[1],
        lambda network: network.blocks[0].norm2,
        lambda network: network.norm,
    ):
        network = tiny()
        find(network).register_forward_pre_hook(lambda module, given: None)
        assert count_sums(network, sums) == 0


def test_training_and_packs_are_not_fused(sums: Sums) -> None:
    packed = pack(sequences([4, 3]))
    tiny().compute_hidden(packed)
    with torch.no_grad():
        tiny().compute_hidden(packed)
    assert not sums


@pytest.mark.parametrize("layers", [range(1), range(2, 3)])
def test_a_pipeline_stage_returns_a_tensor(layers: range, sums: Sums) -> None:
    """The first stage adds up itself what its last block leaves; the last stage has the last norm."""
    stage = Transformer(tiny_config(), layers=layers)
    with torch.no_grad():
        for value in stage.parameters():
            value.normal_()
    states = None if stage.is_first_stage else torch.randn(10, stage.config.hidden_size)
    count = count_sums(stage, sums, lambda network: run_cached(network, states))
    assert count == (2 if stage.is_last_stage else 1)
