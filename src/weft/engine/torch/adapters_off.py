"""Reference engine that runs the actor's network with adapters disabled.

The reference shares the memory of the actor's base weights instead of loading a second copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from weft.algorithms.base import Array, Loss, Output
from weft.checkpoints.config_file import has_prefix
from weft.data.sample import SequenceSample
from weft.engine.base import DEFAULT_MAX_TOKENS, Engine, Generator, StepStats
from weft.engine.spec import GenerationSpec, ModelSpec
from weft.errors import ConfigError
from weft.models.network.packed import TopIds
from weft.topology import Layout, Slice

T = TypeVar("T")


class BaseWeightsEngine:
    """Engine that runs the network of another `engine` with its adapters disabled.

    It serves as a reference model without a second copy of the base weights. The base weights
    cannot be trained or written to through this object, and only `engine` offloads them. `off()`
    returns a context manager that disables the adapters, and `names` are the parameters of the base
    model.
    """

    def __init__(
        self, engine: Engine, off: Callable[[], AbstractContextManager[None]], names: Sequence[str]
    ) -> None:
        self.layout: Layout = engine.layout
        self.version = 0
        self._engine = engine
        self._off = off
        self._names = tuple(names)

    def forward(
        self,
        batch: SequenceSample,
        want: frozenset[Output],
        *,
        temperature: float = 1.0,
        top: TopIds | None = None,
        max_tokens: int = DEFAULT_MAX_TOKENS,
    ) -> SequenceSample:
        with self._off():
            return self._engine.forward(
                batch, want, temperature=temperature, top=top, max_tokens=max_tokens
            )

    def train(
        self,
        minibatches: Sequence[SequenceSample],
        loss: Loss,
        *,
        veto: Any = None,
        temperature: float = 1.0,
        max_tokens: int = DEFAULT_MAX_TOKENS,
    ) -> list[StepStats]:
        _refuse("trained")

    def evaluate(
        self,
        batch: SequenceSample,
        loss: Loss,
        *,
        temperature: float = 1.0,
        max_tokens: int = DEFAULT_MAX_TOKENS,
    ) -> dict[str, float]:
        with self._off():
            return self._engine.evaluate(
                batch, loss, temperature=temperature, max_tokens=max_tokens
            )

    @contextmanager
    def generating(self, spec: GenerationSpec) -> Iterator[Generator]:
        with self._off(), self._engine.generating(spec) as generator:
            yield generator

    def gather(self, own: T) -> list[T]:
        gathered: list[T] = getattr(self._engine, "gather", lambda value: [value])(own)
        return gathered

    def slices(self) -> Mapping[str, Slice]:
        slices = self._engine.slices()
        return {name: slices[name] for name in self._names}

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Slice, Array]]:
        return self._engine.read(names)

    def write(
        self, parts: Iterable[tuple[str, Slice, Array]], *, version: int, eta: float = 1.0
    ) -> None:
        _refuse("written to")

    def save_state(self, directory: Path) -> None:
        """Do nothing: the base weights never change."""

    def load_state(self, directory: Path) -> None:
        """Do nothing: the base weights never change."""

    def offload(self, what: Literal["weights", "optimizer"]) -> None:
        """Do nothing: the weights belong to the engine of the trained role."""

    def onload(self, what: Literal["weights", "optimizer"]) -> None:
        """Do nothing: the engine of the trained role loads the weights when they are needed."""

    def save_model(self, directory: Path, tokenizer: Any) -> None:
        _refuse("saved")

    @property
    def description(self) -> Mapping[str, Any]:
        return {
            **self._engine.description,
            "num_trainable": 0,
            "held_trainable": 0,
            "notes": ["the same weights with adapters off"],
        }


def can_share_base(reference: ModelSpec, trained: ModelSpec) -> bool:
    """Return whether `trained` with its adapters disabled computes the same as `reference`.

    The reference role then needs no separate engine on devices that it shares with the trained
    role.
    """
    names = (
        "path",
        "type",
        "head",
        "dtype",
        "backend",
        "pooling",
        "init_from_scratch",
        "seed",
        "trust_remote_code",
        "rope_scaling",
        "device",
    )
    is_equal = all(getattr(reference, name) == getattr(trained, name) for name in names)
    is_equal &= trained.backend != "jax"  # JAX compiles the adapters into the network
    # Without `quantize`, the reference uses the trained role's weights.
    is_equal &= reference.quantize in (None, trained.quantize)
    if trained.prefix.num_tokens and has_prefix(trained.path):
        return False  # the reference needs the prefix before training
    return (
        trained.has_adapters
        and not trained.trains_embeddings
        and not reference.trained
        and is_equal
    )


def _refuse(what: str) -> NoReturn:
    raise ConfigError(
        f"a reference that is its actor with the adapters off cannot be {what}; give it another path or "
        f"dtype"
    )
