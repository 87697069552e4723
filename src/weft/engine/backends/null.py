"""Backend for roles that run no network in this process.

Such a role needs only a tokenizer, or gets its outputs from elsewhere, such as a server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, NoReturn

from weft.algorithms.base import Array, Loss, Output
from weft.data.sample import SequenceSample
from weft.engine.base import DEFAULT_MAX_TOKENS, Generator, StepStats
from weft.engine.spec import GenerationSpec, ModelSpec
from weft.errors import ConfigError
from weft.models.network.packed import TopIds
from weft.parallel.mesh import RankMesh
from weft.registry import register_backend
from weft.topology import Layout, Slice

Compute = Callable[[SequenceSample, frozenset[Output], float], SequenceSample]


class NullEngine:
    """Engine of a role that runs no network in this process.

    `forward` returns the result of `compute(batch, want, temperature)`, which can for example send
    a request to a server. `forward` raises `ConfigError` if `compute` is None, or if the argument
    `top` requests the most likely ids. Methods that need weights always raise `ConfigError`.
    `family` is the name of the engine in reports.
    """

    def __init__(
        self, layout: Layout, compute: Compute | None = None, family: str = "null"
    ) -> None:
        self.layout = layout
        self.version = 0
        self._compute = compute
        self._family = family

    def forward(
        self,
        batch: SequenceSample,
        want: frozenset[Output],
        *,
        temperature: float = 1.0,
        top: TopIds | None = None,
        max_tokens: int = DEFAULT_MAX_TOKENS,
    ) -> SequenceSample:
        if self._compute is None or top is not None:
            _refuse(f"compute {', '.join(sorted(want))}")
        return self._compute(batch, want, temperature)

    def train(
        self,
        minibatches: Sequence[SequenceSample],
        loss: Loss,
        *,
        veto: Any = None,
        temperature: float = 1.0,
        max_tokens: int = DEFAULT_MAX_TOKENS,
    ) -> list[StepStats]:
        _refuse("be trained")

    def evaluate(
        self,
        batch: SequenceSample,
        loss: Loss,
        *,
        temperature: float = 1.0,
        max_tokens: int = DEFAULT_MAX_TOKENS,
    ) -> dict[str, float]:
        _refuse("be evaluated")

    def generating(self, spec: GenerationSpec) -> AbstractContextManager[Generator]:
        _refuse("generate")

    def slices(self) -> Mapping[str, Slice]:
        return {}

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Slice, Array]]:
        _refuse("give parameters")

    def write(
        self, parts: Iterable[tuple[str, Slice, Array]], *, version: int, eta: float = 1.0
    ) -> None:
        _refuse("take parameters")

    def save_state(self, directory: Path) -> None:
        """Do nothing: there is no state."""

    def load_state(self, directory: Path) -> None:
        """Do nothing: there is no state."""

    def offload(self, what: Literal["weights", "optimizer"]) -> None:
        """Do nothing: there are no weights."""

    def onload(self, what: Literal["weights", "optimizer"]) -> None:
        """Do nothing: there are no weights."""

    def save_model(self, directory: Path, tokenizer: Any) -> None:
        _refuse("be saved")

    @property
    def description(self) -> Mapping[str, Any]:
        return {"family": self._family, "num_parameters": 0, "num_trainable": 0}


def _refuse(action: str) -> NoReturn:
    """Raise the `ConfigError` for an action that needs a network."""
    raise ConfigError(
        f"a role without a network here (backend=null, or a url) cannot {action}; give the role a "
        f"network with backend=torch"
    )


@register_backend("null")
def null(spec: ModelSpec, layout: Layout, mesh: RankMesh | None = None) -> NullEngine:
    """Build an engine without a network.

    Raises `ConfigError` for a trained role.
    """
    if spec.trained:
        _refuse("be trained")
    return NullEngine(layout)
