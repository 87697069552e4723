"""Prefix tuning: the same log-probs and gradients as PEFT's, packed as one by one, with beginnings
shared or not, and off.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor
from torch.testing import assert_close

from tests.models.common import sequences, tiny, tiny_config
from tests.roundings import assert_computed
from weft.checkpoints import hf_io
from weft.models.attention.contexts import Dense, PrefixContinuation, Prefixed
from weft.models.network import lora, prefix
from weft.models.network.dropout import DropoutKeys
from weft.models.network.linear import find_canonical_parameters, find_canonical_values
from weft.models.network.packed import Packed, pack
from weft.models.network.transformer import Head, Transformer

COUNT = 5
LOGPROBS = frozenset({"logprobs"})


def with_prefix(network: Transformer, head: Head = "lm") -> Transformer:
    """The same weights, and a prefix that is not zero."""
    dtype = next(network.parameters()).dtype
    made = Transformer.build_empty(replace(network.config, prefix_tokens=COUNT), head, dtype=dtype)
    held, generator = find_canonical_values(network), torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, value in find_canonical_values(made).items():
            drawn = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            value.copy_(drawn if prefix.is_prefix(name) else held[name])
    prefix.freeze_all_but_prefix(made)
    return made


def gradients(network: Transformer) -> dict[str, Tensor]:
    return {
        name: part.grad.clone()
        for name, part in find_canonical_parameters(network).items()
        if part.grad is not None
    }


# Windows of which the prefix takes a part, soft-capping, learned positions, heads that share keys.
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("gpt2", {}),
    ("mistral", {"sliding_window": 8}),
    ("gemma2", {}),
    ("gpt_neox", {}),
    ("opt", {}),
    ("phi3", {}),
    ("qwen3", {}),
]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("name", "changes"), FAMILIES, ids=[name for name, _ in FAMILIES])
def test_log_probs_and_gradients_are_those_of_peft(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    network = tiny(name, dtype=torch.float64, **changes)
    hf_io.save(tmp_path, find_canonical_values(network), network.config)
    module = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float64
    )
    settings = peft.PrefixTuningConfig(
        task_type="CAUSAL_LM",
        num_virtual_tokens=COUNT,
        num_attention_heads=network.config.num_kv_heads,
        token_dim=network.config.num_kv_heads * network.config.head_dim,
    )
    theirs = peft.get_peft_model(module, settings).double().eval()
    embedding = theirs.prompt_encoder["default"].embedding.weight
    ours = with_prefix(network)
    split = embedding.unflatten(1, (network.config.num_layers, 2, -1))
    with torch.no_grad():
        for layer, block in enumerate(ours.blocks):
            split[:, layer, 0], split[:, layer, 1] = (
                block.attention.prefix.k,
                block.attention.prefix.v,
            )
    rows = [row.clamp_min(3) for row in sequences([7, 19, 2, 19])]
    wanted = torch.cat(
        [
            theirs(row[None]).logits[0].double().log_softmax(-1)[:-1].gather(1, row[1:, None])[:, 0]
            for row in rows
        ]
    )
    weights = torch.linspace(-1.0, 1.0, len(wanted), dtype=torch.float64)
    (wanted * weights).sum().backward()
    expected = embedding.grad.unflatten(1, (network.config.num_layers, 2, -1))

    def exact() -> list[Tensor]:
        found = ours(pack(rows), LOGPROBS)["logprobs"]
        ours.zero_grad()
        (found * weights).sum().backward()
        held = [block.attention.prefix for block in ours.blocks]
        return [
            found,
            torch.stack([torch.stack([part.k.grad, part.v.grad], 1) for part in held], 1),
        ]

    # Of most families, norms, softmax and rotations of transformers are float32 even in float64.
    assert_computed([wanted, expected], exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernels", "torch"])
@pytest.mark.parametrize("dropped", [False, True], ids=["plain", "dropout"])
def test_a_pack_is_as_its_sequences_one_by_one(dropped: bool, dtype: torch.dtype) -> None:
    changes = {"attn_pdrop": 0.2} if dropped else {}
    network = with_prefix(tiny("gpt2", dtype=dtype, **changes))
    rows = sequences([7, 12, 3])
    keys = DropoutKeys.from_sequences(1, 2, [("a", 0), ("b", 0), ("c", 0)]) if dropped else None

    def keyed(x: Packed, keys: DropoutKeys | None) -> Packed:
        return replace(x, dropout=keys)

    found = network(keyed(pack(rows), keys), LOGPROBS)["logprobs"]
    apart = [
        network(
            keyed(pack([row]), None if keys is None else DropoutKeys(keys.keys[i : i + 1])),
            LOGPROBS,
        )["logprobs"]
        for i, row in enumerate(rows)
    ]
    wide = copy.deepcopy(network).double()
    for each in (found, torch.cat(apart)):
        assert_computed(each, lambda: wide(keyed(pack(rows), keys), LOGPROBS)["logprobs"], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernels", "torch"])
def test_a_beginning_that_is_shared_is_as_one_that_is_repeated(dtype: torch.dtype) -> None:
    network = with_prefix(tiny(dtype=dtype))
    one, two, three, alone = sequences([6, 4, 1, 8])
    apart = [torch.cat([one, two]), torch.cat([one, three]), alone]
    bounds = torch.tensor([0, 6, 10, 11, 19], dtype=torch.int32)
    positions = torch.cat([torch.arange(10), torch.arange(6, 7), torch.arange(8)])
    context = Prefixed(
        Dense(bounds, 8), (PrefixContinuation((0, 6), (6, 11)),), torch.tensor([9, 10, 18])
    )
    rows, labels = torch.tensor([5, 6, 7, 8, 5, *range(11, 18)]), torch.cat([two, three, alone[1:]])
    shared = Packed(torch.cat([one, two, three, alone]), positions, context, rows, labels)
    repeated = pack(apart)
    read = torch.tensor([*range(5, 9), 14, *range(15, 22)])
    weights = torch.linspace(-1.0, 1.0, len(rows))

    def computed(network: Transformer, x: Packed) -> list[Tensor]:
        network.zero_grad()
        out = network(x, LOGPROBS)["logprobs"]
        (out * weights).sum().backward()
        own = gradients(network)
        assert own and all(map(prefix.is_prefix, own))
        return [out, *own.values()]

    wide, whole = copy.deepcopy(network).double(), repeated.select_rows(read)
    for x in (shared, whole):
        assert_computed(computed(network, x), lambda: computed(wide, whole), dtype)


def test_a_prefix_that_is_off_leaves_the_network_as_it_was() -> None:
    plain = tiny()
    network, x = with_prefix(plain), pack(sequences([5, 9]))
    with_it = network(x, LOGPROBS)["logprobs"]
    with lora.disable_adapters(network):
        assert network.prefix_tokens == 0
        assert_close(
            network(x, LOGPROBS)["logprobs"], plain(x, LOGPROBS)["logprobs"], rtol=0.0, atol=0.0
        )
    assert network.prefix_tokens == COUNT
    assert_close(network(x, LOGPROBS)["logprobs"], with_it, rtol=0.0, atol=0.0)
    assert (with_it - plain(x, LOGPROBS)["logprobs"]).abs().max() > 0.01


def test_a_window_ends_the_sharing_of_beginnings_earlier() -> None:
    config = replace(tiny_config("mistral", sliding_window=20), prefix_tokens=COUNT)
    network = Transformer.build_empty(config)
    assert network.can_share_prefixes(15) and not network.can_share_prefixes(16)
