"""Training equals the plain loop, however a minibatch is cut; nothing steps where something speaks
against it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, get_linear_schedule_with_warmup

from tests.bounds import Float64Throughout, gamma
from tests.engine.common import (
    EXACT,
    Nll,
    batch_of,
    engine_of,
    load_exactly,
    plain_logprobs,
    sequences,
    spec_of,
    tiny,
)
from tests.roundings import assert_computed
from weft.algorithms.base import Sum
from weft.checkpoints import hf_io
from weft.data.sample import SequenceSample
from weft.engine.spec import OptimizerSpec, Schedule
from weft.engine.torch.engine import TorchEngine
from weft.errors import ConfigError, RunError
from weft.models.network import token_outputs
from weft.models.network.linear import find_canonical_values
from weft.models.network.packed import pack
from weft.registry import backends, losses
from weft.topology import Layout

GROUPS = [(5, [4, 7, 1]), (2, [6]), (9, [3, 3]), (1, [12])]
TOKENS = sum(sum(c) for _, c in GROUPS)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("llama") / "m")


def parameters(engine: TorchEngine) -> dict[str, torch.Tensor]:
    return {name: values.clone() for name, _, values in engine.read(engine.slices())}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Of parameters in float64."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(
            value, other[name], **EXACT, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_unchanged(before: dict[str, torch.Tensor], engine: TorchEngine) -> None:
    after = parameters(engine)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


ADAMW = OptimizerSpec(
    lr=1e-3, weight_decay=0.1, beta2=0.99, lr_scheduler_type="linear", max_grad_norm=0.5
)
SGD = OptimizerSpec(type="sgd", lr=0.1, beta1=0.5, lr_scheduler_type="constant", max_grad_norm=0.0)


@pytest.mark.usefixtures("float64_throughout")
def test_three_steps_equal_the_plain_loop_over_transformers(path: Path) -> None:
    engine = engine_of(path, optimizer=SGD, dtype="float64")
    model = load_exactly(AutoModelForCausalLM, path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for step in range(3):
        batch = batch_of(GROUPS, seed=step)
        [stats] = engine.train([batch], Nll(), max_tokens=20)
        loss = -torch.cat(plain_logprobs(model, batch)).sum() / TOKENS
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        assert stats.metrics["loss"] == pytest.approx(loss.item(), rel=1e-11)
        assert stats.metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-11)
        optimizer.step()
        optimizer.zero_grad()
    assert engine.version == 3
    trained, held = model.state_dict(), parameters(engine)
    theirs = {
        "embed.weight": "model.embed_tokens.weight",
        "blocks.1.mlp.down.weight": "model.layers.1.mlp.down_proj.weight",
        "blocks.0.attention.k.weight": "model.layers.0.self_attn.k_proj.weight",
        "blocks.0.norm1.weight": "model.layers.0.input_layernorm.weight",
        "head.weight": "lm_head.weight",
    }
    assert_same(
        {name: held[name] for name in theirs}, {name: trained[theirs[name]] for name in theirs}
    )


@pytest.mark.usefixtures("float64_throughout")
def test_clipping_decay_and_schedule_equal_torch_and_transformers(path: Path) -> None:
    """In float64, because Adam divides by the gradient's size: where a gradient is 0 but for
    rounding, so is its sign.
    """
    engine = engine_of(path, optimizer=ADAMW, schedule=Schedule(10, 0), dtype="float64")
    model = hf_io.load(path, "lm", dtype=torch.float64)
    matrices = [p for n, p in model.named_parameters() if p.dim() >= 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.dim() < 2 or "embed" in n]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))
    schedule = get_linear_schedule_with_warmup(optimizer, 0, 10)
    for step in range(3):
        batch = batch_of(GROUPS, seed=step)
        [stats] = engine.train([batch], Nll(), max_tokens=20)
        loss = torch.zeros((), dtype=torch.float64)
        for tokens, prompt in sequences(batch):
            out = model(pack([tokens]), frozenset({"logprobs"}))["logprobs"]
            loss = loss - out[prompt - 1 :].sum() / TOKENS
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert stats.metrics["learning_rate"] == pytest.approx(schedule.get_last_lr()[0], rel=1e-12)
        assert stats.metrics["loss"] == pytest.approx(loss.item(), rel=1e-12)
        assert stats.metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-12)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert_same(parameters(engine), find_canonical_values(model))


@pytest.mark.usefixtures("float64_throughout")
def test_rows_outside_the_loss_mask_never_meet_the_head(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = [float(i % 3 == 0) for i in range(TOKENS)]
    batch, seen = batch_of(GROUPS, loss_mask=mask), []
    project = token_outputs.compute_token_outputs

    def watch(hidden: torch.Tensor, *args: Any, **settings: Any) -> Any:
        seen.append(len(hidden))
        return project(hidden, *args, **settings)

    monkeypatch.setattr(token_outputs, "compute_token_outputs", watch)
    engine = engine_of(path, dtype="float64")
    [stats] = engine.train([batch], Nll())
    assert seen == [sum(mask)]
    model = load_exactly(AutoModelForCausalLM, path)
    plain = torch.cat(plain_logprobs(model, batch)) * torch.tensor(mask)
    assert stats.metrics["loss"] == pytest.approx(-plain.sum().item() / sum(mask), rel=1e-11)


def test_first_float32_loss_is_that_of_transformers(path: Path) -> None:
    """weft's kernels are for float32; how much of it the network may lose is found in float64."""
    batch = batch_of(GROUPS)
    model = load_exactly(AutoModelForCausalLM, path)
    [stats] = engine_of(path).train([batch], Nll())

    def compute() -> torch.Tensor:
        with Float64Throughout(), torch.no_grad():
            return -torch.cat(plain_logprobs(model, batch)).sum() / TOKENS

    loss = torch.tensor(stats.metrics["loss"], dtype=torch.float64)
    assert_computed(loss, compute, draws=8)


groups = st.lists(
    st.tuples(st.integers(0, 6), st.lists(st.integers(1, 7), min_size=1, max_size=3)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=12, deadline=None)
@given(shape=groups, budget=st.integers(13, 60), seed=st.integers(0, 1000))
def test_gradient_does_not_depend_on_the_cut(
    path: Path, shape: Any, budget: int, seed: int
) -> None:
    whole, cut = (engine_of(path, optimizer=SGD, dtype="float64") for _ in range(2))
    batch = batch_of(shape, seed=seed)
    with Float64Throughout():
        [one], [other] = whole.train([batch], Nll()), cut.train([batch], Nll(), max_tokens=budget)
    if one.skipped:
        assert other.skipped == one.skipped
        return
    assert one.metrics["nll"] == pytest.approx(other.metrics["nll"], rel=1e-11)
    assert one.metrics["worst"] == pytest.approx(other.metrics["worst"], rel=1e-11)
    assert_same(parameters(whole), parameters(cut))


@pytest.mark.usefixtures("float64_throughout")
def test_dropout_masks_do_not_depend_on_the_cut(path: Path) -> None:
    whole, cut, none = (
        engine_of(path, optimizer=SGD, dtype="float64", dropout=rate) for rate in (0.2, 0.2, 0.0)
    )
    batches = [batch_of(GROUPS), batch_of(GROUPS)]
    one, other = whole.train(batches, Nll()), cut.train(batches, Nll(), max_tokens=13)
    assert [s.metrics["loss"] for s in one] == pytest.approx(
        [s.metrics["loss"] for s in other], rel=1e-11
    )
    assert_same(parameters(whole), parameters(cut))
    assert one[0].metrics["loss"] != pytest.approx(none.train(batches, Nll())[0].metrics["loss"])
    assert torch.equal(
        *(whole.forward(batches[0], frozenset({"logprobs"})).data["logprobs"] for _ in range(2))
    )


def test_bfloat16_computes_and_float32_masters_learn(path: Path) -> None:
    tiny_rate = OptimizerSpec(
        type="sgd", lr=1e-4, beta1=0.0, lr_scheduler_type="constant", max_grad_norm=0.0
    )
    engine = engine_of(path, dtype="bfloat16", optimizer=tiny_rate)
    before = parameters(engine)
    assert {v.dtype for v in before.values()} == {torch.float32}
    assert {p.dtype for p in engine._network.parameters()} == {torch.bfloat16}

    def train(engine: TorchEngine) -> torch.Tensor:
        found = engine.train([batch_of(GROUPS, step) for step in range(3)], Nll())
        return torch.tensor([stats.metrics["loss"] for stats in found], dtype=torch.float64)

    # The engine is made anew each time, so that its weights are rounded too.
    assert_computed(
        train(engine),
        lambda: train(engine_of(path, dtype="float64", optimizer=tiny_rate)),
        torch.bfloat16,
        draws=4,
    )
    after = parameters(engine)
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(moved) == len(before), "steps far below bfloat16's last digit must not be lost"
    for name, copy in find_canonical_values(engine._network).items():
        assert torch.equal(copy, after[name].to(torch.bfloat16))


def test_float16_scales_the_loss_and_lowers_the_scale_on_overflow(path: Path) -> None:
    engine = engine_of(path, dtype="float16", optimizer=SGD)
    [stats] = engine.train([batch_of(GROUPS)], Nll())
    assert stats.skipped is None

    def compute() -> torch.Tensor:
        exact = engine_of(path, dtype="float64", optimizer=SGD)
        [wanted] = exact.train([batch_of(GROUPS)], Nll())
        return torch.tensor(wanted.metrics["grad_norm"], dtype=torch.float64)

    norm = torch.tensor(stats.metrics["grad_norm"], dtype=torch.float64)
    assert_computed(norm, compute, torch.float16, draws=8)
    engine._optimizer.loss_scale = 2.0**40
    before = parameters(engine)
    [stats] = engine.train([batch_of(GROUPS)], Nll())
    assert stats.skipped is not None and "overflow" in stats.skipped
    assert engine._optimizer.loss_scale == 2.0**39
    assert_unchanged(before, engine)


@dataclass(frozen=True)
class Broken(Nll):
    """NaN for the id `bad`."""

    bad: str = "id2"

    def __call__(self, out: Any, batch: Any, total: Any) -> Any:
        loss, stats = super().__call__(out, batch, total)
        return (loss * math.nan if self.bad in batch._sample.ids[0] else loss), stats


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_samples(path: Path) -> None:
    engine = engine_of(path)
    with pytest.raises(RunError, match="loss is not finite at optimizer step 1; samples: id2;"):
        engine.train([batch_of(GROUPS)], Broken(), max_tokens=17)


def test_a_loss_that_is_not_finite_is_skipped_and_counted_on_request(path: Path) -> None:
    engine = engine_of(path, on_nonfinite="skip")
    before = parameters(engine)
    [stats] = engine.train([batch_of(GROUPS)], Broken(), max_tokens=17)
    assert stats.skipped is not None and "id2" in stats.skipped
    assert stats.metrics["nonfinite"] == 1.0
    assert all(math.isfinite(value) for value in stats.metrics.values())
    assert_unchanged(before, engine)
    [stats] = engine.train([batch_of(GROUPS)], Nll(), max_tokens=17)
    assert stats.skipped is None


def test_a_veto_sees_reduced_statistics_and_keeps_the_optimizer_from_stepping(path: Path) -> None:
    engine = engine_of(path, dtype="float64")
    before, seen = parameters(engine), []

    def veto(stats: Any) -> str | None:
        seen.append(dict(stats))
        return "ratio too large" if len(seen) == 1 else None

    first, second = engine.train(
        [batch_of(GROUPS), batch_of(GROUPS)], Nll(), veto=veto, max_tokens=20
    )
    assert (first.skipped, second.skipped) == ("ratio too large", None)
    # The loss is the statistic, but for where it is divided by the number of tokens.
    assert seen[0]["nll"] == pytest.approx(first.metrics["loss"], rel=1e-11)
    # the first one changed nothing
    assert second.metrics["loss"] == pytest.approx(first.metrics["loss"], rel=1e-11)
    assert any(not torch.equal(before[name], values) for name, values in parameters(engine).items())
    assert engine.version == 1


def test_a_minibatch_without_trained_tokens_is_skipped(path: Path) -> None:
    engine = engine_of(path)
    before = parameters(engine)
    [stats] = engine.train([batch_of([(2, [2])], loss_mask=[0.0, 0.0])], Nll())
    assert stats.skipped == "no trained token: every loss mask of the minibatch is 0"
    assert_unchanged(before, engine)


def test_a_minibatch_of_grpo_without_trained_tokens_is_skipped(path: Path) -> None:
    engine = engine_of(path)
    before = parameters(engine)
    keys = {"loss_mask": [0.0, 0.0], "logprobs": [-1.0, -1.0], "advantages": [1.0, 1.0]}
    [stats] = engine.train([batch_of([(2, [2])], **keys)], losses.get("grpo")())
    assert stats.skipped == "no trained token: every loss mask of the minibatch is 0"
    assert_unchanged(before, engine)


def test_metrics_of_a_step(path: Path) -> None:
    engine = engine_of(path, schedule=Schedule(10, 2), optimizer=OptimizerSpec(lr=1.0))
    [stats] = engine.train([batch_of(GROUPS)], Nll())
    metrics = stats.metrics
    assert metrics["learning_rate"] == 0.5
    assert metrics["num_tokens"] == TOKENS + sum(p * len(c) for p, c in GROUPS)
    assert metrics["tokens_per_second"] == pytest.approx(
        metrics["num_tokens"] / metrics["seconds"], rel=1e-12
    )
    assert 0.0 < metrics["mfu"] < 1.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mfu_is_a_share_of_the_rate_of_the_role_s_dtype(
    dtype: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters to train are float32 when they are handed to the engine; passes compute in another
    dtype.
    """
    asked: list[torch.dtype] = []
    monkeypatch.setattr(
        "weft.engine.torch.engine.measure_matmul_rate", lambda _, of: asked.append(of) or 1e15
    )
    [stats] = engine_of(path, dtype=dtype).train([batch_of(GROUPS)], Nll())
    assert asked == [getattr(torch, dtype)] and 0.0 < stats.metrics["mfu"] < 1e-3


@pytest.mark.parametrize("budget", [17, 1000])
@pytest.mark.usefixtures("float64_throughout")
def test_evaluate_gives_the_loss_and_its_statistics_without_a_step(path: Path, budget: int) -> None:
    engine, mask = engine_of(path, dtype="float64"), [float(i % 3 != 0) for i in range(TOKENS)]
    before, batch = parameters(engine), batch_of(GROUPS, loss_mask=mask)
    metrics = engine.evaluate(batch, losses.get("sft")(), temperature=0.7, max_tokens=budget)
    model = load_exactly(AutoModelForCausalLM, path)
    with torch.no_grad():
        nll = -(
            torch.cat(plain_logprobs(model, batch, 0.7)) * torch.tensor(mask)
        ).sum().item() / sum(mask)
    # Where a loss is evaluated the mask is float32, and so is each token's weight, 1 / n: the same
    # for all.
    assert metrics["loss"] == pytest.approx(nll, rel=gamma(3))
    assert metrics["perplexity"] == pytest.approx(math.exp(nll), rel=1e-11)
    assert 0.0 <= metrics["accuracy"] <= 1.0
    assert engine.version == 0
    assert_unchanged(before, engine)


def test_gradient_checkpointing_changes_no_number(path: Path) -> None:
    plain, recomputed = (
        engine_of(path, dtype="float64", gradient_checkpointing=again) for again in (False, True)
    )
    [one], [other] = (
        plain.train([batch_of(GROUPS)], Nll()),
        recomputed.train([batch_of(GROUPS)], Nll()),
    )
    assert one.metrics["grad_norm"] == pytest.approx(other.metrics["grad_norm"], rel=1e-11)
    assert_same(parameters(plain), parameters(recomputed))


@pytest.mark.parametrize("backend", ["torch", "hf"])
def test_layers_to_recompute_that_there_are_not_are_refused(path: Path, backend: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"recompute_every=3: the network has 2 layers.* write 1 to 2, or leave it out",
    ):
        engine_of(path, backend=backend, recompute_every=3)
    engine_of(path, backend=backend, recompute_every=2)


def test_two_words_on_recomputation_are_refused(path: Path) -> None:
    with pytest.raises(
        ConfigError, match="recompute_every=2 and gradient_checkpointing=true exclude each other"
    ):
        spec_of(path, gradient_checkpointing=True, recompute_every=2)


@pytest.mark.usefixtures("float64_throughout")
def test_temperature_divides_the_logits_in_training(path: Path) -> None:
    batch = batch_of(GROUPS)
    [stats] = engine_of(path, dtype="float64").train([batch], Nll(), temperature=0.5)
    model = load_exactly(AutoModelForCausalLM, path)
    wanted = -torch.cat(plain_logprobs(model, batch, 0.5)).sum() / TOKENS
    assert stats.metrics["loss"] == pytest.approx(wanted.item(), rel=1e-11)


@dataclass(frozen=True)
class Pairwise(Nll):
    """Counts pairs; a group must arrive whole."""

    unit = "group"

    def denominators(self, minibatch: Any) -> dict[str, float]:
        return {"pairs": 1.0}

    def __call__(self, out: Any, batch: Any, total: Any) -> Any:
        better, worse = batch.pairs()
        logp = batch.sum(out["logprobs"])
        return (logp[worse] - logp[better]).sum(), {"pairs": Sum(float(len(better)), 0.25)}


def test_groups_stay_whole_where_the_loss_asks(path: Path) -> None:
    ranks = [0.0, 1.0, 2.0, 0.0, 0.0, 1.0, 0.0]
    batch = batch_of(GROUPS, rank=ranks)
    engine = engine_of(path)
    [stats] = engine.train([batch], Pairwise(), max_tokens=28)
    micro_batches = 4  # 27, 8, 24, 13 tokens: the weight of 0.25 each says how many there were
    assert stats.metrics["pairs"] * 0.25 * micro_batches == 4.0
    with pytest.raises(ConfigError, match="max_tokens_per_microbatch=26"):
        engine.train([batch], Pairwise(), max_tokens=26)


def test_untrained_roles_are_not_trained(path: Path) -> None:
    engine = engine_of(path, trained=False)
    with pytest.raises(ConfigError, match="not trained"):
        engine.train([batch_of(GROUPS)], Nll())


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(path: Path, tmp_path: Path) -> None:
    small = tiny(tmp_path / "small")
    model = AutoModelForCausalLM.from_pretrained(small)
    model.resize_token_embeddings(100)
    model.save_pretrained(small)
    with pytest.raises(ValueError, match="vocabulary of 100"):
        engine_of(small)


def test_layouts_that_the_network_cannot_have_are_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="t=3 does not divide the model's 4 attention heads"):
        backends.get("torch")(spec_of(path), Layout(tensor=3))
    with pytest.raises(ConfigError, match="p=3 stages of a model with 2 layers"):
        backends.get("torch")(spec_of(path), Layout(pipeline=3))
    with pytest.raises(ConfigError, match="path is not set"):
        backends.get("torch")(replace(spec_of(path), path=None), Layout())


def test_the_sample_keeps_its_order(path: Path) -> None:
    batch = batch_of(GROUPS)
    out = engine_of(path).forward(batch, frozenset({"logprobs"}))
    assert isinstance(out, SequenceSample) and batch.update(out).ids == batch.ids
