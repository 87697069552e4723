"""Adapters in PEFT's files: PEFT and weft compute the same logits, in both directions."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor

from tests.models import common
from tests.models.common import adapted, sequences, tiny
from tests.roundings import assert_computed
from weft.checkpoints import hf_io, peft_io
from weft.cli.convert import main as convert
from weft.errors import CheckpointError
from weft.evaluation.models import _add_adapter
from weft.models.network import lora
from weft.models.network.linear import find_canonical_values
from weft.models.network.packed import pack
from weft.models.network.transformer import Transformer

ROW = sequences([18])[0].clamp_min(1)


def logits(network: Transformer) -> Tensor:
    return common.logits(network, ROW)


def check(network: Transformer, theirs: Any, row: Tensor = ROW) -> None:
    """That both compute the network's logits, as far as float32 goes: norms, softmax and rotations
    of transformers are float32 whatever a model's dtype is.
    """
    wide = copy.deepcopy(network).double()
    found = [theirs(row[None]).logits[0], common.logits(network, row)]
    assert_computed(found, lambda: 2 * [common.logits(wide, row)])


def save_both(network: Transformer, directory: Path, whole: bool = False) -> tuple[Path, Path]:
    parameters = find_canonical_values(network)
    base = {n: p for n, p in parameters.items() if not lora.is_adapter(n)}
    hf_io.save(directory / "base", base, network.config, network.kind)
    peft_io.save_adapter(
        directory / "adapter",
        parameters,
        lora.collect_scales(network),
        network.config,
        network.kind,
        base=str(directory / "base"),
        save_embeddings=whole,
    )
    return directory / "base", directory / "adapter"


FAMILIES = [
    ("llama", {}),
    ("gpt2", {}),
    ("phi3", {}),
    ("gpt_neox", {}),
    ("gpt_bigcode", {}),
    ("opt", {}),
    ("gemma2", {}),
    ("mixtral", {}),
    ("qwen3_moe", {"mlp_only_layers": []}),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(("name", "changes"), FAMILIES, ids=[name for name, _ in FAMILIES])
def test_peft_computes_what_weft_saved(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    network = adapted(name, **changes)
    base, adapter = save_both(network, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    assert not torch.allclose(theirs(ROW[None]).logits[0], logits(network), atol=0.1)
    wrapped = peft.PeftModel.from_pretrained(theirs, adapter).eval()
    check(network, wrapped)
    again = hf_io.load(base)
    peft_io.load_adapter(adapter, again)
    assert torch.equal(logits(again), logits(network))
    ours, read = find_canonical_values(network), find_canonical_values(again)
    assert ours.keys() == read.keys()
    for n, value in ours.items():
        assert torch.equal(read[n], value), n


@pytest.mark.filterwarnings(
    "ignore::RuntimeWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("llama", ["q_proj", "v_proj", "down_proj"]),
        ("gpt2", ["c_attn", "mlp.c_proj"]),
        ("phi3", ["qkv_proj", "gate_up_proj"]),
        ("gpt_neox", ["query_key_value", "dense"]),
    ],
)
@pytest.mark.parametrize("rank_stabilised", [False, True])
def test_weft_computes_what_peft_saved(
    name: str, targets: list[str], rank_stabilised: bool, tmp_path: Path
) -> None:
    base = tiny(name)
    hf_io.save(tmp_path / "base", find_canonical_values(base), base.config)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", attn_implementation="eager"
    )
    settings = peft.LoraConfig(
        r=4,
        lora_alpha=7,
        target_modules=targets,
        task_type="CAUSAL_LM",
        init_lora_weights=False,
        use_rslora=rank_stabilised,
        alpha_pattern={targets[0]: 3},
        fan_in_fan_out=name == "gpt2",
    )
    wrapped = peft.get_peft_model(model, settings).eval()
    wrapped.save_pretrained(tmp_path / "adapter")
    network = hf_io.load(tmp_path / "base")
    peft_io.load_adapter(tmp_path / "adapter", network)
    check(network, wrapped)
    assert not torch.allclose(logits(network), logits(base), atol=1e-2)


TIED = [
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma",
    "gemma2",
    "olmo2",
    "phi3",
    "gpt2",
    "gpt_neox",
    "gpt_bigcode",
    "opt",
    "mixtral",
    "qwen3_moe",
]


def with_more_tokens(network: Transformer, rows: int) -> Transformer:
    """Return the network with adapters, `rows` more tokens, and a trained embedding."""
    config = replace(network.config, vocab_size=network.config.vocab_size + rows)
    grown = hf_io.init_random(config, network.kind, seed=3)
    lora.attach_ranks(
        grown,
        {name: (a.lora_a.shape[-2], a.scale) for name, a in lora.find_adapters(network).items()},
        0.0,
    )
    held = find_canonical_values(network)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, value in find_canonical_values(grown).items():
            if value.shape == held[name].shape:
                value.copy_(held[name])
            else:
                value.copy_(torch.randn(value.shape, generator=generator) * 0.1)
    return grown


@pytest.mark.filterwarnings(
    "ignore::RuntimeWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
@pytest.mark.parametrize("name", TIED)
def test_every_saved_form_of_added_tokens_with_tied_embeddings(name: str, tmp_path: Path) -> None:
    """PEFT reads the adapter, transformers the merged model, weft both."""
    changes = {"mlp_only_layers": []} if name == "qwen3_moe" else {}
    network = adapted(name, tie_word_embeddings=True, **changes)
    base, _ = save_both(network, tmp_path)
    grown = with_more_tokens(network, 13)
    _, adapter = save_both(grown, tmp_path / "grown", whole=True)
    row = torch.cat([ROW[:5], torch.arange(131, 144)])
    wanted = common.logits(grown, row)

    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    theirs.resize_token_embeddings(144)
    wrapped = peft.PeftModel.from_pretrained(theirs, adapter).eval()
    check(grown, wrapped, row)

    again = peft_io.load_adapted(base, adapter, "lm", torch.float32)
    assert again.config.tied and again.config.vocab_size == 144
    assert torch.equal(common.logits(again, row), wanted)

    merged = lora.merge(find_canonical_values(again), lora.collect_scales(again))
    hf_io.save(tmp_path / "merged", merged, again.config)
    whole = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", attn_implementation="eager"
    )
    check(hf_io.load(tmp_path / "merged"), whole, row)


@pytest.mark.filterwarnings(
    "ignore::RuntimeWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
@pytest.mark.parametrize("saved", [["embed_tokens"], ["embed_tokens", "lm_head"], ["lm_head"]])
def test_an_adapter_of_peft_that_unties_the_output_matrix(saved: list[str], tmp_path: Path) -> None:
    base = tiny(tie_word_embeddings=True)
    hf_io.save(tmp_path / "base", find_canonical_values(base), base.config)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", attn_implementation="eager"
    )
    settings = peft.LoraConfig(
        r=4,
        target_modules=["q_proj"],
        task_type="CAUSAL_LM",
        init_lora_weights=False,
        modules_to_save=saved,
    )
    wrapped = peft.get_peft_model(model, settings).eval()
    with torch.no_grad():
        for number, (name, parameter) in enumerate(wrapped.named_parameters()):
            if "modules_to_save" in name:
                parameter.add_(0.1 * (number + 1))
    wrapped.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    network = peft_io.load_adapted(tmp_path / "base", tmp_path / "adapter", "lm", torch.float32)
    assert not network.config.tied
    check(network, wrapped)
    with pytest.raises(CheckpointError, match="weft convert merge"):
        peft_io.load_adapter(tmp_path / "adapter", hf_io.load(tmp_path / "base"))


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::FutureWarning")
def test_a_reward_model_with_adapters(tmp_path: Path) -> None:
    network = adapted(head="score")
    base, adapter = save_both(network, tmp_path)
    with torch.no_grad():
        network.score.weight.add_(1.0)  # trained after the base was written
    save = find_canonical_values(network)
    peft_io.save_adapter(
        adapter, save, lora.collect_scales(network), network.config, "score", base=str(base)
    )
    scores = network(pack([ROW]), frozenset({"scores"}))["scores"]
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
        base, attn_implementation="eager"
    )
    wrapped = peft.PeftModel.from_pretrained(theirs, adapter).eval()
    wide = copy.deepcopy(network).double()
    found = wrapped(ROW[None]).logits[0]
    assert_computed(
        [found, scores], lambda: 2 * [wide(pack([ROW]), frozenset({"scores"}))["scores"]], draws=8
    )
    again = hf_io.load(base, "score")
    peft_io.load_adapter(adapter, again)
    # The same parameters go through the same operations, so the results are equal.
    assert torch.equal(again(pack([ROW]), frozenset({"scores"}))["scores"], scores)


def test_adapters_that_weft_does_not_compute_are_refused(tmp_path: Path) -> None:
    network = adapted()
    base, adapter = save_both(network, tmp_path)
    with pytest.raises(CheckpointError, match=r"no adapter_config.json"):
        peft_io.load_adapter(base, hf_io.load(base))
    file = adapter / "adapter_config.json"
    settings = json.loads(file.read_text())
    for key, value, said in (
        ("use_dora", True, "use_dora"),
        ("bias", "all", "bias"),
        ("peft_type", "IA3", "IA3"),
        ("task_type", "SEQ_2_SEQ_LM", "SEQ_2_SEQ_LM"),
    ):
        file.write_text(json.dumps({**settings, key: value}))
        with pytest.raises(CheckpointError, match=said):
            peft_io.load_adapter(adapter, hf_io.load(base))
    file.write_text(json.dumps(settings))
    fewer = tiny(num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=r"layers\.2.*no layer"):
        peft_io.load_adapter(adapter, fewer)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize(
    ("stored", "asked", "adapter_dtype"),
    [
        (torch.float64, None, torch.float64),
        (torch.float64, None, torch.float32),
        (torch.float32, None, torch.float64),
        (torch.bfloat16, "float32", torch.float32),
        (torch.bfloat16, None, torch.float32),
        (torch.float32, "bfloat16", torch.float32),
    ],
)
def test_merging_rounds_once_and_to_the_dtype_that_is_written(
    name: str, stored: torch.dtype, asked: str | None, adapter_dtype: torch.dtype, tmp_path: Path
) -> None:
    network = adapted(name)
    parameters = {n: p.double() * (1 + 2.0**-40) for n, p in find_canonical_values(network).items()}
    base = {n: p.to(stored) for n, p in parameters.items() if not lora.is_adapter(n)}
    matrices = {n: p.to(adapter_dtype) for n, p in parameters.items() if lora.is_adapter(n)}
    scales, config = lora.collect_scales(network), network.config
    hf_io.save(tmp_path / "base", base, config)
    peft_io.save_adapter(
        tmp_path / "adapter", base | matrices, scales, config, "lm", base=str(tmp_path / "base")
    )

    words = ["merge", "--base", str(tmp_path / "base"), "--adapter", str(tmp_path / "adapter")]
    assert (
        convert([*words, "--output", str(tmp_path / "out"), *(["--dtype", asked] if asked else [])])
        == 0
    )
    reader = hf_io.ParameterReader(tmp_path / "out", "lm")
    written = getattr(torch, asked) if asked else stored
    assert reader.dtype == written
    read = find_canonical_values(hf_io.load(tmp_path / "out", dtype=written))
    wide = torch.float64 if torch.float64 in (stored, adapter_dtype) else torch.float32
    for layer, scale in scales.items():
        weight, a, b = (
            base[f"{layer}.weight"],
            matrices[f"{layer}.{lora.A}"],
            matrices[f"{layer}.{lora.B}"],
        )
        wanted = weight.double() + scale * (b.double() @ a.double())
        # Error bound: gamma(r + 2) for a sum of r products and an addition, and half a unit in the
        # last place for rounding to the saved dtype.
        size = weight.double().abs() + abs(scale) * (b.double().abs() @ a.double().abs())
        bound = (
            size * (a.shape[-2] + 4) * torch.finfo(wide).eps
            + wanted.abs() * torch.finfo(written).eps / 2
        )
        assert bool(((read[f"{layer}.weight"].double() - wanted).abs() <= bound * 1.01).all()), (
            layer
        )


@pytest.mark.parametrize("stored", [torch.float64, torch.float32])
def test_a_model_opened_with_an_adapter_has_the_merged_weights_of_its_dtype(
    stored: torch.dtype, tmp_path: Path
) -> None:
    network = adapted("llama")
    parameters = {
        n: (p.double() * (1 + 2.0**-40)).to(stored)
        for n, p in find_canonical_values(network).items()
    }
    base = {n: p for n, p in parameters.items() if not lora.is_adapter(n)}
    hf_io.save(tmp_path / "base", base, network.config)
    peft_io.save_adapter(
        tmp_path / "adapter",
        parameters,
        lora.collect_scales(network),
        network.config,
        "lm",
        base=str(tmp_path / "base"),
    )
    written: dict[str, Tensor] = {}

    class Engine:
        def write(self, parts: Any, version: int) -> None:
            written.update({name: value for name, _, value in parts})

    _add_adapter(Engine(), tmp_path / "adapter", str(tmp_path / "base"))  # type: ignore[arg-type]
    merged = lora.merge(parameters, lora.collect_scales(network))
    assert written and all(torch.equal(value, merged[name]) for name, value in written.items())
    assert {value.dtype for value in written.values()} == {stored}
