"""Outputs of several ids at each token: a teacher's scores, and a student's training on them,
against `transformers`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.common import EXACT, batch_of, engine_of, load_exactly, sequences, tiny
from weft.algorithms.distill import GKDLoss, compute_generalised_jsd
from weft.data.sample import SequenceSample
from weft.data.spec import TokenizerSpec
from weft.data.tokenizer import Tokenizer
from weft.engine.spec import LoRASpec, OptimizerSpec
from weft.engine.torch.engine import TorchEngine
from weft.errors import ConfigError, DataError
from weft.interfaces.base import Model
from weft.interfaces.train import TrainInterface
from weft.models.network.packed import TopIds

# a prompt that is computed once, and none at all
GROUPS = [(5, [4, 7, 1]), (0, [6]), (40, [3, 3]), (1, [12])]
TOKENS = sum(sum(lengths) for _, lengths in GROUPS)
SGD = OptimizerSpec(type="sgd", lr=1.0, beta1=0.0, lr_scheduler_type="constant", max_grad_norm=0.0)
TOP = frozenset({"top_ids", "top_logprobs"})
K = 5


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("student"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("teacher"), seed=1, initializer_range=0.2)


def log_softmax(
    model: torch.nn.Module, batch: SequenceSample, temperature: float
) -> list[torch.Tensor]:
    """[L, V] of every completion, each by itself; NaN where nothing precedes a token."""
    found = []
    for tokens, prompt in sequences(batch):
        logp = (model(tokens[None]).logits[0, :-1] / temperature).log_softmax(-1)
        found.append(torch.cat([torch.full_like(logp[:1], torch.nan), logp])[prompt:])
    return found


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("budget", [45, 1000])
@pytest.mark.parametrize("backend", ["torch", "hf"])
def test_the_likeliest_ids_are_those_of_each_sequence_alone(
    teacher: Path, budget: int, backend: str
) -> None:
    engine = engine_of(teacher, backend=backend, dtype="float64")
    batch = batch_of(GROUPS)
    out = engine.forward(batch, TOP, temperature=0.7, top=TopIds(K, below=300), max_tokens=budget)
    assert out.ids == batch.ids and set(out.data) == TOP
    assert (out.data["top_ids"].dtype, out.data["top_logprobs"].dtype) == (
        torch.int32,
        torch.float64,
    )
    model = load_exactly(AutoModelForCausalLM, teacher)
    with torch.no_grad():
        wanted = log_softmax(model, batch, 0.7)
    for ids, logprobs, logp in zip(
        out.sequences("top_ids"), out.sequences("top_logprobs"), wanted, strict=True
    ):
        assert (ids.shape, logprobs.shape) == ((len(logp), K), (len(logp), K + 1))
        there = ~logp[:, 0].isnan()
        best = logp[there, :300].topk(K)
        assert ids[there].tolist() == best.indices.tolist()
        torch.testing.assert_close(logprobs[there, :K], best.values, **EXACT)
        ones = torch.ones(int(there.sum()), dtype=torch.float64)
        torch.testing.assert_close(logprobs[there].exp().sum(-1), ones, **EXACT)
        assert (logprobs[~there] == 0).all()  # as other outputs, where nothing precedes the token


def taught(teacher: Path, *, temperature: float = 1.0) -> SequenceSample:
    """A batch with a mask, and what the teacher says of it under the names of the training call."""
    mask = (np.random.default_rng(0).random(TOKENS) > 0.3).astype(float).tolist()
    batch = batch_of(GROUPS, loss_mask=mask)
    made = engine_of(teacher, dtype="float64").forward(
        batch, TOP, temperature=temperature, top=TopIds(K)
    )
    return batch.update(
        made.remap_keys({"top_ids": "given_ids", "top_logprobs": "teacher_logprobs"})
    )


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("backend", ["torch", "hf"])
@pytest.mark.parametrize("budget", [45, 1000])
def test_a_training_step_is_that_of_transformers(
    path: Path, teacher: Path, beta: float, backend: str, budget: int
) -> None:
    batch, loss = taught(teacher, temperature=0.8), GKDLoss(divergence_beta=beta, sft_coef=0.1)
    engine = engine_of(path, backend=backend, optimizer=SGD, dtype="float64")
    [stats] = engine.train([batch], loss, temperature=0.8, max_tokens=budget)

    model = load_exactly(AutoModelForCausalLM, path)
    parts = zip(
        log_softmax(model, batch, 0.8),
        *(
            batch.sequences(key)
            for key in ("completion", "loss_mask", "given_ids", "teacher_logprobs")
        ),
        strict=True,
    )
    total = torch.zeros((), dtype=torch.float64)
    count = 0
    for logp, labels, mask, ids, theirs in parts:
        rows = (mask != 0) & ~logp[:, 0].isnan()
        logp, labels, ids, theirs = logp[rows], labels[rows], ids[rows].long(), theirs[rows]
        own = logp.gather(1, ids)
        rest = logp.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
        total = total + compute_generalised_jsd(torch.cat([own, rest], 1), theirs, beta).sum()
        total = total - 0.1 * logp.gather(1, labels[:, None]).sum()
        count += int(rows.sum())
    (total / count).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert stats.metrics["loss"] == pytest.approx(float(total.detach()) / count, rel=1e-10)
    assert stats.metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-10)


def parameters(engine: TorchEngine) -> dict[str, torch.Tensor]:
    return {name: values.clone() for name, _, values in engine.read(engine.slices())}


@pytest.mark.parametrize("sft_coef", [0.0, 0.2])
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_made_at_once_are_those_of_a_second_pass(
    tmp_path: Path, teacher: Path, sft_coef: float, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    student = tiny(tmp_path / "student", tie_word_embeddings=tied)
    made = []
    for by_row in (True, False):
        monkeypatch.setattr(GKDLoss, "by_row", by_row)
        engine = engine_of(student, optimizer=SGD)
        engine.train([taught(teacher)], GKDLoss(sft_coef=sft_coef))
        made.append(parameters(engine))
    before = parameters(engine_of(student))
    for name, values in made[0].items():
        assert torch.equal(values, made[1][name]), name
        assert not torch.equal(values, before[name]), name


@pytest.mark.usefixtures("float64_throughout")
def test_evaluation_says_what_training_says(path: Path, teacher: Path) -> None:
    batch, engine = taught(teacher), engine_of(path, dtype="float64")
    interface = TrainInterface(loss="gkd", loss_args={"divergence_beta": 0.5, "sft_coef": 0.1})
    tokenizer = Tokenizer.load(TokenizerSpec(), str(path))
    evaluated = interface.evaluate(
        Model("actor", engine, tokenizer, tokenizer, "cpu", "float32"), batch
    ).metrics
    trained = engine.train([batch], interface.loss)[0].metrics
    assert {
        "kl_exact",
        "forward_kl",
        "teacher_mass",
        "teacher_agreement",
        "nll",
    } <= evaluated.keys()
    for name, value in evaluated.items():
        assert trained[name] == pytest.approx(value, rel=1e-10), name


def test_a_teacher_that_is_its_student_without_adapters(path: Path) -> None:
    engine = engine_of(path, lora=LoRASpec(r=4))
    base = engine.without_adapters()
    assert base is not None
    batch = batch_of(GROUPS)
    for key, value in base.forward(batch, TOP, top=TopIds(K)).data.items():
        assert torch.equal(value, engine.forward(batch, TOP, top=TopIds(K)).data[key])


def test_ids_that_are_not_there(path: Path) -> None:
    with pytest.raises(DataError, match="given_logprobs need the key 'given_ids'"):
        engine_of(path).train([batch_of(GROUPS)], GKDLoss())
    with pytest.raises(
        ConfigError, match="a network with a value head gives values, not top_ids, top_logprobs"
    ):
        engine_of(path, head="value").forward(batch_of(GROUPS), TOP, top=TopIds(K))
