"""`quantize`: an engine whose frozen weights are held in few bits computes what one with the
rounded weights does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine import layouts
from tests.engine.common import Nll, batch_of, engine_of, tiny
from tests.engine.layouts import Case
from tests.engine.torch.test_engine_offload import sampled
from tests.engine.torch.test_engine_state import GROUPS, logprobs
from tests.ranks import Ranks
from tests.roundings import assert_computed
from weft.data.spec import TokenizerSpec
from weft.data.tokenizer import Tokenizer
from weft.engine.spec import LoRASpec, ModelSpec
from weft.engine.torch.adapters_off import can_share_base
from weft.engine.torch.engine import TorchEngine
from weft.errors import ConfigError
from weft.models.network import lora
from weft.models.network.quantized import count_bytes, dequantize
from weft.topology import Layout

KINDS = ["8bit", "4bit"]
LORA = LoRASpec(r=4, alpha=8.0, targets=["q", "down"])  # k and v share q's matrix, and have none


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("llama") / "m", hidden_size=64, intermediate_size=128)


def whole_values(engine: TorchEngine) -> list[Any]:
    """What an engine holds, as it is."""
    return [
        (name, where, dequantize(values).clone())
        for name, where, values in engine.read(engine.slices())
    ]


def of_rounded(held: list[Any], path: Path, **changes: Any) -> TorchEngine:
    """An engine that holds these values as they are."""
    plain = engine_of(path, **changes)
    plain.write(held, version=0)
    return plain


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_trains_scores_and_samples_as_the_rounded_weights_do(
    path: Path, kind: str, dtype: str
) -> None:
    engine = engine_of(path, quantize=kind, lora=LORA, dtype=dtype)
    held = whole_values(engine)
    assert not torch.equal(logprobs(engine), logprobs(engine_of(path, lora=LORA, dtype=dtype)))
    if dtype == "float32":
        assert sampled(engine) == sampled(of_rounded(held, path, lora=LORA, dtype=dtype))

    def compute(engine: TorchEngine) -> list[torch.Tensor]:
        """Log-probs, losses and norms of three steps, and adapters after them."""
        before = logprobs(engine)
        done = engine.train([batch_of(GROUPS, seed=step) for step in range(3)], Nll())
        numbers = [[s.metrics["loss"], s.metrics["grad_norm"]] for s in done]
        adapters = [
            v.clone() for name, _, v in engine.read(engine.slices()) if lora.is_adapter(name)
        ]
        return [before, *torch.tensor(numbers, dtype=torch.float64).T, *adapters]

    assert_computed(
        compute(engine),
        lambda: compute(of_rounded(held, path, lora=LORA, dtype="float64")),
        getattr(torch, dtype),
        draws=4,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_loads_in_transformers(path: Path, tmp_path: Path, kind: str) -> None:
    engine = engine_of(path, quantize=kind, lora=LORA)
    engine.train([batch_of(GROUPS)], Nll())
    tokenizer = Tokenizer.load(TokenizerSpec(), str(path))
    tensors = {name: values for name, _, values in engine.read(engine.slices())}
    engine._built.save(tmp_path, tensors, tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(parameter.dtype == torch.float32 for parameter in loaded.parameters())
    again = engine_of(tmp_path, trained=False)
    # Made anew each time, so that weights are rounded too, as merged ones were.
    exact = lambda: [logprobs(engine_of(tmp_path, trained=False, dtype="float64"))] * 2  # noqa: E731
    assert_computed([logprobs(again), logprobs(engine)], exact)


def test_the_network_is_a_fraction(path: Path) -> None:
    for kind, most in (("8bit", 1 + 4 / 64), ("4bit", 0.5 + 4 / 64)):
        elements, size = count_bytes(engine_of(path, quantize=kind, lora=LORA)._network)
        assert elements == 2 * (4 * 64 * 64 - 2 * 32 * 64 + 3 * 64 * 128)
        assert size <= most * elements


def test_a_restart_goes_on_bit_for_bit(path: Path, tmp_path: Path) -> None:
    straight, first, second = (engine_of(path, quantize="4bit", lora=LORA) for _ in range(3))
    batches = [batch_of(GROUPS, seed) for seed in range(4)]
    wanted = [straight.train([b], Nll())[0].metrics["loss"] for b in batches]
    for b in batches[:2]:
        first.train([b], Nll())
    first.save_state(tmp_path)
    second.load_state(tmp_path)
    assert [second.train([b], Nll())[0].metrics["loss"] for b in batches[2:]] == wanted[2:]


def test_a_frozen_role_needs_no_adapters(path: Path) -> None:
    engine = engine_of(path, quantize="8bit", trained=False)
    exact = of_rounded(whole_values(engine), path, trained=False, dtype="float64")
    assert_computed(logprobs(engine), lambda: logprobs(exact))


def test_a_reference_shares_the_rounded_base() -> None:
    trained = ModelSpec(path="m", trained=True, quantize="4bit", lora=LORA)
    assert can_share_base(ModelSpec(path="m"), trained)
    assert can_share_base(ModelSpec(path="m", quantize="4bit"), trained)
    assert not can_share_base(ModelSpec(path="m", quantize="8bit"), trained)


def test_an_average_is_refused(path: Path) -> None:
    engine, source = engine_of(path, quantize="8bit", trained=False), engine_of(path)
    with pytest.raises(ConfigError, match="a moving average needs full precision"):
        engine.write(source.read(source.slices()), version=1, eta=0.5)


def test_layouts_that_cut_the_network_are_refused(path: Path) -> None:
    from weft.engine.backends.common import check_quantized

    spec = ModelSpec(path=str(path), trained=True, quantize="8bit", lora=LORA)
    check_quantized(spec, Layout(data=2), has_experts=False)
    for layout in (Layout(data=2, fsdp=2), Layout(tensor=2), Layout(pipeline=2)):
        with pytest.raises(ConfigError, match="holds the whole quantized network"):
            check_quantized(spec, layout, has_experts=False)
    with pytest.raises(ConfigError, match="experts cannot be quantized"):
        check_quantized(spec, Layout(), has_experts=True)


@pytest.mark.slow
def test_two_copies_are_as_one(ranks: Ranks, tmp_path: Path) -> None:
    case = Case(lora=True, options={"quantize": "8bit"})
    model = layouts.write_model(case, tmp_path / "hf")
    alone = layouts.run(model, "d1", case, tmp_path / "alone")
    assert alone is not None
    many = ranks.run(layouts.run, model, "d2f1", case, tmp_path / "many")
    layouts.check(many, alone, tmp_path / "many", tmp_path / "alone")
