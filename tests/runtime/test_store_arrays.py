"""The runtime holds arrays of numpy or torch without asking which."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.runtime.test_session import lines
from tests.runtime.toy import (
    Toy,
    ToyAdvantages,
    ToyGenerate,
    ToyInfer,
    ToyLoader,
    ToyTrain,
    timeless,
)
from weft.interfaces.infer import InferInterface
from weft.interfaces.train import TrainInterface
from weft.testing.interfaces import InterfaceBench, build_small_batch


def as_numpy(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """What this method makes, as numpy arrays."""
    plain = getattr(owner, name)

    def made(self: Any, *args: Any) -> Any:
        result = plain(self, *args)
        if hasattr(result, "outputs"):
            return type(result)(result.outputs and result.outputs.numpy(), result.metrics)
        return result.numpy()

    monkeypatch.setattr(owner, name, made)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [
        {"loader", "generate", "infer"},
        {"generate"},
        {"infer", "advantages"},
    ],
    ids=lambda names: " ".join(sorted(names)),
)
def test_a_run_in_numpy_is_the_run_in_torch(tmp_path, monkeypatch, changed):
    """Whole or in part; with outputs on disk, and going on after a recovery point that holds rows."""
    Toy(tmp_path / "torch", drop=0.3, cache=True, staleness=1).run()
    owners = {
        "loader": (ToyLoader, "next_batch"),
        "generate": (ToyGenerate, "generate"),
        "infer": (ToyInfer, "inference"),
        "advantages": (ToyAdvantages, "__call__"),
    }
    for name in changed:
        as_numpy(monkeypatch, *owners[name])
    kinds = set[type]()
    train = ToyTrain.train_step

    def look(self: Any, model: Any, minibatches: Any) -> Any:
        kinds.update(type(part.data["advantages"]) for part in minibatches)
        return train(self, model, minibatches)

    monkeypatch.setattr(ToyTrain, "train_step", look)
    toy = Toy(
        tmp_path / "numpy", drop=0.3, cache=True, staleness=1, control={"recover_freq_steps": 1}
    )
    toy.run()
    assert (np.ndarray in kinds) == ("advantages" in changed)
    expected = timeless(lines(Toy(tmp_path / "torch").path))
    for line, other in zip(timeless(lines(toy.path)), expected, strict=True):
        assert line == pytest.approx(other, rel=1e-12)


@pytest.mark.parametrize(
    ("cls", "method", "args", "head"),
    [
        (InferInterface, "inference", {"outputs": ["logprobs", "entropy"]}, "lm"),
        (TrainInterface, "train_step", {"loss": "sft"}, "lm"),
        (TrainInterface, "train_step", {"loss": "rw"}, "score"),
        (TrainInterface, "evaluate", {"loss": "sft"}, "lm"),
    ],
)
def test_an_engine_takes_numpy_arrays(tmp_path, cls, method, args, head):
    batch = build_small_batch()
    bench = InterfaceBench(cls, args, batch, head, tmp_path)
    plain, other = bench.call(method), bench.call(method, batch.numpy())
    clocks = {"seconds", "tokens_per_second", "mfu"}
    assert {k: v for k, v in plain.metrics.items() if k not in clocks} == {
        k: v for k, v in other.metrics.items() if k not in clocks
    }
    if plain.outputs is not None:
        for key in plain.outputs.keys:
            np.testing.assert_array_equal(
                np.asarray(plain.outputs.data[key]), np.asarray(other.outputs.data[key])
            )
