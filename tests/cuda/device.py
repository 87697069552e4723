"""Two CUDA devices that are not there: tensors that say they are on one, whose values a CPU computes.

Imported before torch, with the path of `device.cpp`'s library in WEFT_CUDA_STAND_IN. `with StandIn():` tensors can be made on
`cuda`, and what a device would refuse is refused: operations over tensors of the host and the device, or of both devices, and
numpy over a device's memory. So code that forgets to bring a tensor to its device fails here as it does there. Whatever has
kernels of its own (flash attention, FlexAttention, captured graphs) is stood in for by what it is documented to compute, see
`kernels.py`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

found = importlib.util.find_spec("torch")
assert found is not None and found.origin is not None
for name in ("libc10.so", "libtorch_cpu.so"):
    ctypes.CDLL(str(Path(found.origin).parent / "lib" / name))
library = ctypes.CDLL(os.environ["WEFT_CUDA_STAND_IN"])  # torch asks once, while it is imported

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402

aten = torch.ops.aten
INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
UNREPEATABLE = {aten.cumsum.default, aten.cumsum_.default}  # of floats, where kernels must repeat bit for bit


class OnDevice(Tensor):
    """`inner` are the values, a tensor of the host. Both have the same size, steps and dtype."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, index: int) -> OnDevice:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=torch.device("cuda", index),
        )  # fmt: skip
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({self.inner!r})"

    def tolist(self) -> Any:
        return self.inner.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    __array__ = numpy

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def pin_memory(self, *_: Any) -> Tensor:
        raise RuntimeError("only the host's memory can be pinned")

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, other: OnDevice) -> None:
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.inner = other.inner


class StandIn(TorchDispatchMode):
    """In force in the thread that enters it, and in threads that are started meanwhile."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def values(x: Any) -> Any:
    return x.inner if isinstance(x, OnDevice) else x


WAITS: Counter[str] = Counter()  # of the host for the device, by what waited


@contextmanager
def uncounted() -> Iterator[None]:
    """What a kernel is stood in for by may wait; the kernel would not."""
    before = WAITS.copy()
    yield
    WAITS.clear()
    WAITS.update(before)


def _count_waits(func: Any, args: Any, kwargs: Any) -> None:
    """Numbers that are read on the host, sizes that the device finds out, and copies that are not told to go by themselves."""
    name = str(func)
    from_device = any(isinstance(x, OnDevice) for x in tree_leaves((args, kwargs)))
    if func is aten._to_copy.default:
        asked = torch.device(kwargs.get("device") or args[0].device)
        moves = from_device != (asked.type == "cuda")
    elif func is aten.copy_.default:
        moves = isinstance(args[0], OnDevice) != isinstance(args[1], OnDevice)
    else:
        sized = any(
            word in name for word in ("_local_scalar_dense", "nonzero", "masked_select", "unique", "aten.equal")
        )
        sized |= "repeat_interleave" in name and kwargs.get("output_size") is None
        WAITS[name] += from_device and sized
        return
    goes = bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
    WAITS[name] += moves and not goes


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """One operation of torch on the values, if the device would do it."""
    _count_waits(func, args, kwargs)
    asked = kwargs.get("device")
    if func is aten.copy_.default:
        func(values(args[0]), values(args[1]), *args[2:])
        return args[0]
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    of_device = [x for x in given if isinstance(x, OnDevice)]
    if of_device and func is not aten._to_copy.default:
        _refuse_mixed(func, args, given)
        if func in UNREPEATABLE and args[0].is_floating_point() and torch.are_deterministic_algorithms_enabled():
            raise RuntimeError(f"{func} does not have a deterministic implementation on CUDA")
    named = {**tree_map(values, kwargs), **({"device": torch.device("cpu")} if asked is not None else {})}
    if named.get("pin_memory"):
        named["pin_memory"] = False
    out = func(*tree_map(values, args), **named)
    if func in (aten.equal.default, aten._local_scalar_dense.default):
        return out
    if not (bool(of_device) if asked is None else torch.device(asked).type == "cuda"):
        return out
    index = torch.device(asked).index if asked is not None else of_device[0].device.index
    if index is None:
        index = current_device()
    known = {id(x.inner): x for x in of_device}  # an operation in place gives back what it was given

    def brought(x: Any) -> Any:
        if not isinstance(x, Tensor) or isinstance(x, OnDevice):
            return x
        return known[id(x)] if id(x) in known else OnDevice(x, index)

    return tree_map(brought, out)


def _refuse_mixed(func: Any, args: Any, given: list[Tensor]) -> None:
    """A number of the host may go with tensors of the device, and so may whole numbers that index one."""
    if len(places := {x.device.index for x in given if isinstance(x, OnDevice) and x.dim() > 0}) > 1:
        raise RuntimeError(f"{func}: tensors are on devices {places}")
    indices = {id(x) for x in args[1]} if func in INDEXED and isinstance(args[0], OnDevice) else set()
    others = [x for x in given if not isinstance(x, OnDevice) and x.dim() > 0 and id(x) not in indices]
    if from_host := [tuple(x.shape) for x in others]:
        raise RuntimeError(f"{func}: tensors are on cuda:0 and cpu, of the host {from_host}")


# -- what torch says of the device, and does below its dispatcher


def current_device() -> int:
    return int(library.stand_in_current())


class using:
    """The device that this thread computes on meanwhile."""

    def __init__(self, device: Any) -> None:
        self.index = device if isinstance(device, int) else torch.device(device).index

    def __enter__(self) -> None:
        self.before = current_device()
        if self.index is not None:
            library.stand_in_set(self.index)

    def __exit__(self, *_: object) -> None:
        library.stand_in_set(self.before)


PROPERTIES = SimpleNamespace(name="stand-in", major=9, minor=0, multi_processor_count=1, total_memory=1 << 34)
SAID: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: 2,
    "current_device": current_device,
    "device": using,
    "get_device_name": lambda *_: PROPERTIES.name,
    "get_device_properties": lambda *_: PROPERTIES,
    "get_device_capability": lambda *_: (PROPERTIES.major, PROPERTIES.minor),
    "is_bf16_supported": lambda *_, **__: True,
    "synchronize": lambda *_: None,
    "current_stream": lambda *_: SimpleNamespace(synchronize=lambda: WAITS.update(["stream"])),
    "mem_get_info": lambda *_: (PROPERTIES.total_memory, PROPERTIES.total_memory),
    "memory_reserved": lambda *_: 0,
    "memory_allocated": lambda *_: 0,
    "empty_cache": lambda: None,
    "reset_peak_memory_stats": lambda *_: None,
    "max_memory_allocated": lambda *_: 0,
    "manual_seed_all": lambda *_: None,
    "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
    "set_rng_state": lambda *_, **__: None,
    "_lazy_init": lambda: None,
}
for said, value in SAID.items():
    setattr(torch.cuda, said, value)
    if hasattr(torch.cuda.random, said):
        setattr(torch.cuda.random, said, value)
torch.accelerator.synchronize = lambda *_: None
torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[assignment]
torch.__future__.set_swap_module_params_on_conversion(True)
make_tensor, run_thread = torch.tensor, threading.Thread.run


def tensor(data: Any, *, device: Any = None, **settings: Any) -> Tensor:
    return make_tensor(data, **settings).to(device)


class Generator(torch.Generator):
    """The device's draws are the host's."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        return super().__new__(cls)


def _run_in_thread(self: threading.Thread) -> None:
    with StandIn():
        run_thread(self)


torch.tensor = tensor  # type: ignore[assignment]
torch.Generator = Generator  # type: ignore[misc]
threading.Thread.run = _run_in_thread  # type: ignore[method-assign]
