"""What a layout of several processes computes, beside what one process computes of the same.

Everything is float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.bounds import gamma, unit
from tests.engine.common import Nll, spec_of
from tests.engine.torch.test_engine_train import Broken
from tests.tiny import make_tokenizer
from weft.checkpoints import hf_io
from weft.data.sample import SequenceSample
from weft.data.tokenizer import Tokenizer
from weft.engine.backends import common
from weft.engine.backends import torch as torch_backend
from weft.engine.base import Request
from weft.engine.generation.sampling import SettingsTable
from weft.engine.spec import GenerationSpec, LoRASpec, OptimizerSpec, PrefixSpec
from weft.engine.torch.engine import TorchEngine
from weft.errors import RunError
from weft.models.network.linear import find_canonical_values
from weft.models.network.transformer import Head, compile_blocks
from weft.parallel.mesh import ProcessGroups, RankMesh
from weft.registry import backends, families
from weft.runtime.split import split_over_ranks
from weft.topology import Layout, Mesh

ADAMW = OptimizerSpec(lr=1e-2, weight_decay=0.1, lr_scheduler_type="constant", max_grad_norm=0.5)
VOCAB, MOST = 263, 30  # ids of the tiny models; tokens of a micro-batch
GROUPS = [(5, [4, 7, 1]), (2, [6]), (9, [3, 3]), (1, [12]), (6, [2])]
TOKENS = sum(sum(completions) for _, completions in GROUPS)
PROMPTS = [[9, 12, 30, 41], [50, 8], [22, 23, 24, 25, 26, 27], [77, 9, 9]]


@dataclass(frozen=True)
class Case:
    family: str = "llama"
    lora: bool = False
    prefix: int = 0  # tokens
    dropout: float = 0.0  # of the adapters
    changes: Mapping[str, Any] = field(default_factory=dict)  # of the family's tiny config.json
    options: Mapping[str, Any] = field(default_factory=dict)  # of the role


@dataclass
class Found:
    """What a rank saw."""

    logprobs: dict[str, list[float]]  # by id, of its part
    steps: list[dict[str, float]]
    tokens: dict[str, list[int]]  # generated, of its part
    evaluated: dict[str, float]
    parameters: dict[str, tuple[Any, torch.Tensor]]  # name -> (slice, values) after the steps


def write_model(case: Case, directory: Path, head: Head = "lm") -> Path:
    """A model directory of the family with random values in every parameter."""
    directory.mkdir(parents=True, exist_ok=True)
    family = families.get(case.family)
    config = family.config({**family.tiny, "vocab_size": VOCAB, **case.changes})
    network = hf_io.init_random(config, head, seed=1)
    generator = torch.Generator().manual_seed(100)
    with torch.no_grad():
        for value in find_canonical_values(network).values():
            value.add_(torch.randn(value.shape, generator=generator) * 0.1)
    make_tokenizer(directory, vocab_size=262)
    hf_io.save(directory, find_canonical_values(network), config, head)
    return directory


def batch(seed: int) -> SequenceSample:
    random = torch.Generator().manual_seed(seed)
    lengths = {"prompt": [[p] for p, _ in GROUPS], "completion": [c for _, c in GROUPS]}
    data = {
        key: torch.randint(8, VOCAB, (sum(map(sum, sizes)),), generator=random).numpy()
        for key, sizes in lengths.items()
    }
    return SequenceSample.from_groups([f"id{i}" for i in range(len(GROUPS))], lengths, data)


@contextmanager
def float64() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "choose_reading_dtype", lambda spec: torch.float64)
        patch.setattr(torch_backend, "compile_blocks", partial(compile_blocks, backend="aot_eager"))
        yield


def engine(path: Path, layout: str, case: Case) -> tuple[TorchEngine, int]:
    """This rank's engine, and its data-parallel index."""
    lora = LoRASpec(r=3, alpha=6.0, dropout=case.dropout) if case.lora else LoRASpec()
    prefix = PrefixSpec(num_tokens=case.prefix)
    spec = replace(spec_of(path, optimizer=ADAMW, lora=lora, prefix=prefix), **case.options)
    parsed = replace(spec, layout=layout).resolve_layout()
    if parsed.num_devices == 1:
        return backends.get(spec.backend)(spec, parsed), 0
    mesh = RankMesh(Mesh.on_first_devices(parsed), dist.get_rank(), ProcessGroups())
    return backends.get(spec.backend)(spec, parsed, mesh), mesh.coordinates.data


def run(path: Path, layout: str, case: Case, folder: Path) -> Found | None:
    """Score, take two steps, evaluate, save and generate on one rank; None on ranks that the layout
    does not use.
    """
    parsed = Layout.parse(layout)
    if parsed.num_devices > 1 and dist.get_rank() >= parsed.num_devices:
        return None
    with float64():
        made, index = engine(path, layout, case)
        parts = [split_over_ranks(batch(seed), parsed.data, "sequence")[index] for seed in range(3)]
        scored = made.forward(parts[2], frozenset({"logprobs"}), max_tokens=MOST)
        steps = made.train(parts[:2], Nll(), max_tokens=MOST)
        evaluated = made.evaluate(parts[2], Nll(), max_tokens=MOST)
        folder.mkdir(exist_ok=True)
        made.save_model(folder / "model", Tokenizer.load(made._spec.tokenizer, str(path)))
        (folder / "state").mkdir(exist_ok=True)
        made.save_state(folder / "state")
        tokens = generated(made, parsed.data, index)
    return Found(
        logprobs=dict(zip(scored.ids, (x.tolist() for x in by_id(scored)), strict=True)),
        steps=[dict(step.metrics) for step in steps],
        tokens=tokens,
        evaluated=evaluated,
        parameters={
            name: (where, value.clone()) for name, where, value in made.read(made.slices())
        },
    )


def by_id(sample: SequenceSample) -> list[torch.Tensor]:
    return [torch.as_tensor(sample.select(ids=[id]).data["logprobs"]) for id in sample.ids]


def generated(made: TorchEngine, ranks: int, index: int) -> dict[str, list[int]]:
    """Sampled tokens by prompt, of this rank's prompts."""
    mine = [(f"p{n}", prompt) for n, prompt in enumerate(PROMPTS) if n % ranks == index]
    tokens: dict[str, list[int]] = {id: [] for id, _ in mine}
    with made.generating(GenerationSpec(max_new_tokens=8, seed=5)) as generator:
        generator.submit([Request(id, 0, prompt) for id, prompt in mine])
        while not generator.idle:
            for event in generator.step():
                tokens[event.id].append(event.token)
    return tokens


def check(found: Sequence[Found | None], alone: Found, folder: Path, expected: Path) -> None:
    """Every rank's part equals that of one process."""
    used = [each for each in found if each is not None]
    for each in used:
        for step, wanted in zip(each.steps, alone.steps, strict=True):
            for name in ("loss", "nll", "worst", "grad_norm", "num_tokens", "learning_rate"):
                assert step[name] == pytest.approx(wanted[name], rel=1e-10), (name, step, wanted)
        # The loss is evaluated in float32: the means of log-probs, which have one sign, lose a
        # rounding a token and three more, in each of the two.
        assert each.evaluated == pytest.approx(alone.evaluated, rel=2 * gamma(TOKENS + 3))
        for name, (where, value) in each.parameters.items():
            whole = alone.parameters[name][1]
            torch.testing.assert_close(
                value, whole[where], rtol=1e-8, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}"
            )
        for id, tokens in each.tokens.items():
            assert tokens == alone.tokens[id], id
        for id, logprobs in each.logprobs.items():
            if id in alone.logprobs:
                assert logprobs == pytest.approx(alone.logprobs[id], rel=1e-8, abs=1e-9)
    assert {id for each in used for id in each.tokens} == set(alone.tokens)
    (file,) = (path.name for path in (expected / "model").glob("*.safetensors"))
    for name, value in load_file(expected / "model" / file).items():
        # Saved in float32: values as near to each other as above, each rounded once.
        near = 1e-8 + 2 * unit(torch.float32)
        torch.testing.assert_close(
            load_file(folder / "model" / file)[name], value, rtol=near, atol=1e-9
        )


def resumed(path: Path, layout: str, case: Case, state: Path) -> list[dict[str, float]] | None:
    """One step more, from a state that another layout may have saved."""
    parsed = Layout.parse(layout)
    if parsed.num_devices > 1 and dist.get_rank() >= parsed.num_devices:
        return None
    with float64():
        made, index = engine(path, layout, case)
        made.load_state(state)
        parts = [split_over_ranks(batch(seed), parsed.data, "sequence")[index] for seed in (3,)]
        return [dict(step.metrics) for step in made.train(parts, Nll(), max_tokens=MOST)]


def few(path: Path, layout: str) -> tuple[list[dict[str, float]], list[list[float]], list[str]]:
    """Two steps on one id, which leaves ranks without any; what the ranks then score, and generate."""
    with float64():
        made, index = engine(path, layout, Case())
        ranks = Layout.parse(layout).data
        one = batch(0).select(ids=["id1"])
        parts = split_over_ranks(one, ranks, "sequence")
        steps = made.train([parts[index]] * 2, Nll(), max_tokens=MOST)
        scored = made.forward(parts[index], frozenset({"logprobs"}), max_tokens=MOST)
        evaluated = made.evaluate(parts[index], Nll(), max_tokens=MOST)
        assert evaluated["loss"] > 0
    return (
        [dict(step.metrics) for step in steps],
        [x.tolist() for x in by_id(scored)],
        list(scored.ids),
    )


def broken(path: Path, layout: str) -> str:
    """A loss that is not finite on one rank."""
    with float64():
        made, index = engine(path, layout, Case())
        part = split_over_ranks(batch(0), Layout.parse(layout).data, "sequence")[index]
        with pytest.raises(RunError, match="samples: id4") as caught:
            made.train([part], Broken(bad="id4"), max_tokens=14)
    return str(caught.value)


def half(path: Path, layout: str, case: Case) -> list[float]:
    """Losses of three steps and the tokens that can be generated, of a role that computes in
    bfloat16.
    """
    made, index = engine(path, layout, case)
    ranks = Layout.parse(layout).data
    parts = [split_over_ranks(batch(seed), ranks, "sequence")[index] for seed in range(3)]
    steps = made.train(parts, Nll(), max_tokens=MOST)
    assert all(generated(made, ranks, index).values())
    return [step.metrics["loss"] for step in steps]


def parted(path: Path, layout: str) -> dict[str, list[int]]:
    """What is sampled where every process would draw tokens of its own."""
    draw = SettingsTable.sample

    def moved(*given: Any) -> Any:
        tokens, *rest = draw(*given)
        return (tokens + dist.get_rank()) % VOCAB, *rest

    with float64(), pytest.MonkeyPatch.context() as patch:
        made, _ = engine(path, layout, Case())
        patch.setattr(SettingsTable, "sample", moved)
        return generated(made, 1, 0)
