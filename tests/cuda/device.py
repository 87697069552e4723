"""Two CUDA devices that are not there: tensors that say they are on one, whose values a CPU
computes.

Imported before torch, with the path of `device.cpp`'s library in WEFT_CUDA_STAND_IN. `with
StandIn():` tensors can be made on `cuda`, and what a device would refuse is refused: operations
over tensors of the host and the device, or of both devices, and numpy over a device's memory. So
code that forgets to bring a tensor to its device fails here as it does there. Whatever has kernels
of its own (flash attention, FlexAttention, captured graphs) is stood in for by what it is
documented to compute, see `kernels.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
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

from weft.kernels.formulas import compute_rms_norm_gradients  # noqa: E402

aten = torch.ops.aten
INDEXED = {
    aten.index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
    aten._index_put_impl_.default,
}
# of floats, where kernels must repeat bit for bit
UNREPEATABLE = {aten.cumsum.default, aten.cumsum_.default}


class OnDevice(Tensor):
    """`inner` are the values, a tensor of the host. Both have the same size, steps and dtype."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, index: int) -> OnDevice:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device("cuda", index),
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({self.inner!r})"

    def tolist(self) -> Any:
        _waits("tolist")
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


# -- streams: what is put on the usual one is done at once, copies on another as late as waits allow


class Stream:
    """A stream beside the usual one, or with `usual` that one."""

    every: list[Stream] = []  # noqa: RUF012
    entered: list[Stream] = []  # noqa: RUF012

    def __init__(self, device: Any = None, *, usual: bool = False) -> None:
        self.usual, self.asked, self.done = usual, list[Any](), 0
        self.memory: list[tuple[int, ...]] = []  # addresses that each copy reads and writes
        Stream.every.append(self)

    @staticmethod
    def current() -> Stream:
        return Stream.entered[-1] if Stream.entered else USUAL

    def put(self, work: Any) -> None:
        self.asked.append(work)
        if self.usual:
            self.reach(len(self.asked))

    def reach(self, number: int) -> None:
        while self.done < number:
            self.done += 1
            self.asked[self.done - 1]()
            self.asked[self.done - 1] = None

    def wait_stream(self, other: Stream) -> None:
        assert other.usual, "the usual stream alone is waited for as a whole"

    def record_event(self) -> Event:
        return Event(self, len(self.asked))

    def wait_event(self, event: Event) -> None:
        assert self.usual
        event.stream.reach(event.number)

    def synchronize(self) -> None:
        _waits("stream")
        self.reach(len(self.asked))

    @staticmethod
    @contextlib.contextmanager
    def entering(stream: Stream) -> Iterator[None]:
        Stream.entered.append(stream)
        try:
            yield
        finally:
            Stream.entered.pop()


class Event:
    def __init__(
        self, stream: Stream | None = None, number: int = 0, *, enable_timing: bool = False
    ) -> None:
        self.stream, self.number = stream or USUAL, number

    def synchronize(self) -> None:
        _waits("event")
        self.stream.reach(self.number)

    def record(self, stream: Stream) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds of the host, which computes what it is asked for at once."""
        return 1e3 * (end.seconds - self.seconds)


def synchronize(*_: Any) -> None:
    _waits("synchronize")
    for stream in Stream.every:
        stream.reach(len(stream.asked))


USUAL = Stream(usual=True)


def copy(target: Tensor, source: Tensor, *rest: Any) -> None:
    """On a stream of its own the target is spoilt until the copy is done, and the source must stay
    as it is.
    """
    if (stream := Stream.current()).usual:
        aten.copy_.default(target, source, *rest)
        return
    assert rest == (True,), "a copy beside the device's work is one that the host does not wait for"
    memory = target.untyped_storage().nbytes(), source.untyped_storage().nbytes()
    assert all(memory), "a copy from or to memory that was given up"

    def late() -> None:
        assert (target.untyped_storage().nbytes(), source.untyped_storage().nbytes()) == memory, (
            "memory was given up"
        )
        aten.copy_.default(target, source)

    addresses = target.untyped_storage().data_ptr(), source.untyped_storage().data_ptr()
    if target.dtype.is_floating_point and not any(
        addresses[0] in each for each in stream.memory[stream.done :]
    ):
        target.fill_(float("nan"))
    stream.memory.append(addresses)
    stream.put(late)


def values(x: Any) -> Any:
    return x.inner if isinstance(x, OnDevice) else x


STAND_INS = str(Path(__file__).with_name("kernels.py"))
WAITS: Counter[str] = Counter()  # by the line of weft that made the host wait for the device
ASKING = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.bincount.default,
    aten.masked_select.default,
    aten._unique2.default,
}


def _waits(name: str) -> None:
    where, frame = "elsewhere", sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if "/tests/kernels/" in code.co_filename or code.co_filename == STAND_INS:
            return  # a kernel's stand-in asks, not weft
        if where == "elsewhere" and "/src/weft/" in code.co_filename:
            where = f"{Path(code.co_filename).stem}.{code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    WAITS[f"{name} in {where}"] += 1


def _count_wait(func: Any, args: Any, kwargs: Any, of_device: list[OnDevice]) -> None:
    """Count an operation for which the host would wait until the device is done."""
    if func is aten.copy_.default:
        across, free = (
            isinstance(args[0], OnDevice) != isinstance(args[1], OnDevice),
            args[2:3] == (True,),
        )
        if across and not (free or kwargs.get("non_blocking")) and args[1].dim() > 0:
            _waits("copy")
    elif func is aten._to_copy.default:
        to = kwargs.get("device")
        across = to is not None and (torch.device(to).type == "cuda") != isinstance(
            args[0], OnDevice
        )
        if across and not kwargs.get("non_blocking"):
            _waits("copy")
    elif func in ASKING and of_device:
        _waits(func.__name__.split(".")[0])
    elif func is aten.repeat_interleave.Tensor and of_device and kwargs.get("output_size") is None:
        _waits("repeat_interleave")
    elif (
        func in INDEXED
        and of_device
        and any(x is not None and x.dtype == torch.bool for x in args[1])
    ):
        _waits("index by bool")


LAUNCHES: Counter[str] = Counter()  # operations for which the device would launch a kernel
NO_LAUNCHES = {  # besides views
    aten._unsafe_view.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty.default,
}
ADDED: Counter[str] = Counter()  # products in half precision that joined a float32 sum


def _wide_mm(
    func: Any, *given: Tensor, out_dtype: torch.dtype = torch.float32, out: Tensor | None = None
) -> Tensor:
    """Products of half precision whose sums are kept in float32, which a CPU does not have."""
    *total, left, right = given
    assert left.dtype == right.dtype and out_dtype == torch.float32, func
    made = left.float() @ right.float()
    if total:
        made = made + total[0]
        ADDED["products"] += 1
    return made if out is None else out.copy_(made)


def _rms_norm_backward(
    grad_y: Tensor, x: Tensor, shape: list[int], inverse: Tensor, weight: Tensor, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    made = compute_rms_norm_gradients(x, weight, inverse, grad_y, 0.0, *mask)
    return made


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    if func in (aten.mm.dtype, aten.mm.dtype_out):
        return _wide_mm(func, *args[:2], **kwargs)
    if func in (aten.addmm.dtype, aten.addmm.dtype_out):
        return _wide_mm(func, *args[:3], **kwargs)
    if func is aten._fused_rms_norm_backward.default:
        return _rms_norm_backward(*args)
    return func(*args, **kwargs)


@contextmanager
def uncounted() -> Iterator[None]:
    """What a kernel is stood in for by may wait, and launch kernels; the kernel would not."""
    before = [counter.copy() for counter in (WAITS, LAUNCHES)]
    yield
    for counter, old in zip((WAITS, LAUNCHES), before, strict=True):
        counter.clear()
        counter.update(old)


def _tensors(given: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors among arguments.

    Every operation asks, so this is simpler and faster than `torch.utils._pytree`.
    """
    for x in given:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from _tensors(x)
        elif isinstance(x, dict):
            yield from _tensors(x.values())


def _mapped(change: Callable[[Any], Any], x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        made = [_mapped(change, each) for each in x]
        return made if isinstance(x, list) else tuple(made)
    if isinstance(x, dict):
        return {name: _mapped(change, each) for name, each in x.items()}
    return change(x)


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """One operation of torch on the values, if the device would do it."""
    asked = kwargs.get("device")
    given = [*_tensors(args), *_tensors(kwargs.values())]
    of_device = [x for x in given if isinstance(x, OnDevice)]
    _count_wait(func, args, kwargs, of_device)
    if of_device and not func.is_view and func not in NO_LAUNCHES:
        LAUNCHES[str(func)] += 1
    if func is aten.copy_.default:
        copy(values(args[0]), values(args[1]), *args[2:])
        return args[0]
    if of_device and func is not aten._to_copy.default:
        _refuse_mixed(func, args, given)
        if (
            func in UNREPEATABLE
            and args[0].is_floating_point()
            and torch.are_deterministic_algorithms_enabled()
        ):
            raise RuntimeError(f"{func} does not have a deterministic implementation on CUDA")
    named = _mapped(values, kwargs)
    if asked is not None:
        named["device"] = torch.device("cpu")
    if named.get("pin_memory"):
        named["pin_memory"] = False
    out = _computed(func, _mapped(values, args) if of_device else args, named)
    if func in (aten.equal.default, aten._local_scalar_dense.default):
        return out
    if not (bool(of_device) if asked is None else torch.device(asked).type == "cuda"):
        return out
    index = torch.device(asked).index if asked is not None else of_device[0].device.index
    if index is None:
        index = current_device()
    # an operation in place gives back what it was given
    known = {id(x.inner): x for x in of_device}

    def brought(x: Any) -> Any:
        if not isinstance(x, Tensor) or isinstance(x, OnDevice):
            return x
        return known[id(x)] if id(x) in known else OnDevice(x, index)

    return _mapped(brought, out)


def _refuse_mixed(func: Any, args: Any, given: list[Tensor]) -> None:
    """A number of the host may go with tensors of the device, and so may whole numbers that index
    one.
    """
    if (
        len(places := {x.device.index for x in given if isinstance(x, OnDevice) and x.dim() > 0})
        > 1
    ):
        raise RuntimeError(f"{func}: tensors are on devices {places}")
    indices = (
        {id(x) for x in args[1]} if func in INDEXED and isinstance(args[0], OnDevice) else set()
    )
    others = [
        x for x in given if not isinstance(x, OnDevice) and x.dim() > 0 and id(x) not in indices
    ]
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


PROPERTIES = SimpleNamespace(
    name="stand-in", major=9, minor=0, multi_processor_count=1, total_memory=1 << 34
)
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
    "synchronize": synchronize,
    "Stream": Stream,
    "Event": Event,
    "stream": Stream.entering,
    "current_stream": lambda *_: Stream.current(),
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
torch.accelerator.synchronize = synchronize  # type: ignore[assignment]
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
