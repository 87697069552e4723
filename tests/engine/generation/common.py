"""Networks, requests and helpers of the generator's tests."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from tests.bounds import assert_within, unit
from tests.roundings import LIKELY, exactly
from weft.engine.base import Request, TokenEvent
from weft.engine.generation import caches as caches_module
from weft.engine.generation.caches import PageCaches
from weft.engine.generation.generate import BatchGenerator, open_generator
from weft.engine.generation.scheduler import GenerationBudget
from weft.engine.spec import GenerationSpec
from weft.models.network.config import Rope, TransformerConfig
from weft.models.network.packed import Packed, SamplingSupport, pack
from weft.models.network.transformer import Transformer

CPU = torch.device("cpu")
EOS = 5
LLAMA = TransformerConfig(
    family="llama",
    vocab_size=61,
    hidden_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    intermediate_size=40,
    max_positions=512,
    rope=Rope(theta=10000.0, dim=6),
)
Key = tuple[str, int]
LOGPROBS = frozenset({"logprobs"})


def build(
    config: TransformerConfig = LLAMA, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Transformer:
    network = Transformer(config).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data = (1 + 0.1 * values if "norm" in name else 0.3 * values).to(dtype)
    return network


def opened(
    network: Transformer,
    spec: GenerationSpec,
    budget: GenerationBudget | None = None,
    eos: Iterable[int] = (EOS,),
) -> AbstractContextManager[BatchGenerator]:
    return open_generator(network, spec, device=CPU, version=7, eos_ids=eos, budget=budget)


def drain(generator: BatchGenerator) -> dict[Key, list[TokenEvent]]:
    events: dict[Key, list[TokenEvent]] = {}
    while not generator.idle:
        new = generator.step()
        assert new or generator._scheduler.prefilling, (
            "a step samples something or computes a part of a prompt"
        )
        for event in new:
            events.setdefault((event.id, event.k), []).append(event)
    return events


def generate(
    network: Transformer,
    spec: GenerationSpec,
    requests: list[Request],
    budget: GenerationBudget | None = None,
) -> dict[Key, list[TokenEvent]]:
    with opened(network, spec, budget) as generator:
        generator.submit(requests)
        return drain(generator)


def tokens(events: dict[Key, list[TokenEvent]]) -> dict[Key, list[int]]:
    return {key: [event.token for event in row] for key, row in events.items()}


def recomputed(
    network: Transformer, request: Request, row: list[TokenEvent], spec: GenerationSpec
) -> Tensor:
    """Log-probs of a completion by one packed forward pass, as training computes them."""
    completion = [event.token for event in row]
    x = pack([torch.tensor([*request.prompt, *completion])])
    support = None
    if any(event.support for event in row):
        before = [0] * (len(request.prompt) - 1)
        counts = torch.tensor([*before, *(len(event.support) for event in row)])
        support = SamplingSupport(
            torch.tensor([id for event in row for id in event.support]), counts
        )
    temperature = 1.0 if spec.greedy else spec.temperature
    with torch.no_grad():
        return network(x, frozenset({"logprobs"}), temperature, support)["logprobs"][
            len(request.prompt) - 1 :
        ]


def requests(count: int = 5, samples: int = 3, shared: int = 70) -> list[Request]:
    """Prompts that begin alike for `shared` tokens, some of them equal; one longer than a step
    computes.
    """
    common = [7 + i % 50 for i in range(shared)]
    prompts = [common + [i % 61] * (2 + 3 * (i % 4)) for i in range(count - 1)] + [
        [11 + i % 40 for i in range(150)]
    ]
    return [
        Request(id=str(i), k=k, prompt=prompt)
        for i, prompt in enumerate(prompts)
        for k in range(samples)
    ]


def use_pages(monkeypatch: pytest.MonkeyPatch, page: int = 16) -> list[PageCaches]:
    """Switch generators to pages of `page` tokens, and to graphs that a stand-in captures; the
    caches that they make from now on.
    """
    made: list[PageCaches] = []

    def caches_for(network: Any, device: torch.device, budget: GenerationBudget) -> PageCaches:
        caches = PageCaches(network, device, budget, page=page)
        caches.graphs._capture, caches.graphs._after = capture, 1
        made.append(caches)
        return caches

    # FlexAttention, unfused, is traced with sizes that vary; other tests' would make more vary
    torch._dynamo.reset()
    monkeypatch.setattr(torch_flex, "_warn_once", lambda *_, **__: None)
    monkeypatch.setattr(caches_module, "build_caches", caches_for)
    return made


def capture(run: Callable[[Tensor], Tensor], inputs: Tensor) -> tuple[Callable[[], object], Tensor]:
    """What a captured graph does: a run before it, and at each replay one that writes to the same
    output.
    """
    output = torch.empty_like(run(inputs))
    return (lambda: output.copy_(run(inputs))), output


class Spy:
    """A network that counts the tokens of each forward pass."""

    def __init__(self, network: Transformer) -> None:
        self.network, self.config, self.training = network, network.config, network.training
        self.vocab_size, self.held_layers = network.vocab_size, network.held_layers
        self.passes: list[int] = []

    def can_share_prefixes(self, longest: int) -> bool:
        return self.network.can_share_prefixes(longest)

    @property
    def prefix_tokens(self) -> int:
        return self.network.prefix_tokens

    @property
    def can_read_pages(self) -> bool:
        return self.network.can_read_pages

    def compute_hidden(self, x: Packed, rows: Tensor | None = None) -> Tensor:
        self.passes.append(len(x.tokens))
        return self.network.compute_hidden(x, rows)

    def next_token_logits(self, hidden_rows: Tensor, wide: Tensor | None = None) -> Tensor:
        return self.network.next_token_logits(hidden_rows, wide)

    @property
    def output_matrix(self) -> Tensor | None:
        return self.network.output_matrix

    def parameters(self) -> Iterator[Tensor]:
        return iter(self.network.parameters())

    def train(self, mode: bool = True) -> None:
        self.training = mode


def assert_same_rows(one: dict[Key, list[TokenEvent]], other: dict[Key, list[TokenEvent]]) -> None:
    """Equal tokens, ends and supports; log-probs to float32 of nearly equal float64."""
    assert tokens(one) == tokens(other)
    for key, row in one.items():
        for mine, theirs in zip(row, other[key], strict=True):
            assert (mine.finish, mine.support) == (theirs.finish, theirs.support)
            assert mine.logprob == near(theirs.logprob)


@functools.cache
def rotation_bound() -> float:
    """How far log-probs of `build()`, which is float64 but for its angles, may be apart where cosine
    and sine are those of another position in a vector.
    """
    network, row = build(), (7 * torch.arange(200)) % 61
    with torch.no_grad():
        (found,) = exactly(lambda: network(pack([row]), LOGPROBS)["logprobs"], torch.float64)
    return LIKELY * found.deviation


def near(logprob: float) -> Any:
    """What equals a log-prob of a float64 network that is rounded to float32 on both sides."""
    return pytest.approx(
        logprob, rel=0.0, abs=2 * unit(torch.float32) * abs(logprob) + 2 * rotation_bound()
    )


def assert_logprobs(
    network: Transformer,
    rows: dict[Key, list[TokenEvent]],
    requests: list[Request],
    spec: GenerationSpec,
) -> None:
    """Log-probs as sampled, and as training recomputes them, are those of a float64 network: none is
    further off than its roundings make likely, and all together no more than they do on average.
    """
    dtype = next(network.parameters()).dtype
    wide, pairs = copy.deepcopy(network).double(), [(r, rows[r.id, r.k]) for r in requests]
    (exact,) = exactly(lambda: torch.cat([recomputed(wide, *p, spec) for p in pairs]), dtype, 1)
    sampled = torch.tensor([event.logprob for _, row in pairs for event in row]).double()
    trained = torch.cat([recomputed(network, *pair, spec) for pair in pairs])
    rounded = unit(torch.float32) * exact.value.abs()  # events have float32
    for made in (sampled, trained):
        assert_within(made, exact.value, LIKELY * exact.deviation + rounded)
        error = (made - exact.value).square().mean().sqrt()
        assert error <= exact.deviation + rounded.max()
