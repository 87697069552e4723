"""Reading a `transformers` module: what the host's memory holds meanwhile."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.engine.common import spec_of, tiny
from weft.engine.backends import hf
from weft.engine.hf import load

META = torch.device("meta")  # stands for a device with memory of its own


class Held(TorchDispatchMode):
    """The most bytes of tensors that the host held whenever one of its tensors was copied to the
    device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.known = set(self._alive())
        self.most, self.copies = 0, 0

    def __enter__(self) -> Held:
        gc.freeze()  # what was there before is looked at no more
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if (
            isinstance(made, Tensor)
            and made.is_meta
            and any(x.is_cpu and x.numel() > 1 for x in given)
        ):
            self.copies += 1
            alive = self._alive()
            self.most = max(self.most, sum(alive[place] for place in alive.keys() - self.known))
        return made

    @staticmethod
    def _alive() -> dict[int, int]:
        """Bytes by address."""
        every = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
        return {
            x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in every if x.is_cpu
        }


def read(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Held, int, int]:
    """(what was held, bytes of the module, bytes of its largest parameter), read in this thread
    alone.
    """
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    with Held() as held:
        module = load.load(spec_of(path), str(path), META, torch.float32)
    sizes = [p.numel() * p.element_size() for p in module.parameters()]
    assert all(p.is_meta for p in module.parameters())
    return held, sum(sizes), max(sizes)


def test_the_host_never_holds_the_whole_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny(tmp_path / "hf", num_hidden_layers=6)
    held, whole, largest = read(path, monkeypatch)
    assert held.copies > 6 and largest <= held.most <= 2 * largest < whole / 2
    assert not hf._list_reading_notes(spec_of(path), META)


def test_without_accelerate_it_does_and_the_plan_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny(tmp_path / "hf", num_hidden_layers=6)
    monkeypatch.setattr(load, "is_accelerate_available", lambda: False)
    held, whole, _ = read(path, monkeypatch)
    assert held.most >= whole
    (note,) = hf._list_reading_notes(spec_of(path), META)
    assert "[hf]'" in note
    assert not hf._list_reading_notes(spec_of(path), torch.device("cpu"))
    assert not hf._list_reading_notes(spec_of(path, init_from_scratch=True), META)
