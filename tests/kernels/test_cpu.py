"""The CPU's kernels keep to themselves: other tensors take torch's way, the process stays as it is,
addresses stay inside.
"""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import weft
from tests.bounds import assert_within, sum_gamma
from weft import kernels
from weft.kernels.cpu import library


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that were called."""
    if library.load_library() is None:
        pytest.skip("needs g++")
    names: list[str] = []
    call = library.call
    monkeypatch.setattr(
        library, "call", lambda name, *given: names.append(name) or call(name, *given)
    )
    return names


class Wrapped(Tensor):
    """Has no memory of its own, as a DTensor; computes by torch's plain operators alone."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        made = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype
        )
        made.inner = inner.detach()
        return made.requires_grad_(inner.requires_grad)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.namespace == "aten", f"{func} is no operator that every tensor has"
        given = tree_map(lambda x: x.inner if isinstance(x, Wrapped) else x, (args, kwargs or {}))
        found = func(*given[0], **given[1])
        if func._schema.is_mutable:
            return (kwargs or {}).get("out", args[0])
        return tree_map(lambda x: Wrapped(x) if isinstance(x, Tensor) else x, found)


def plain(x: Tensor) -> Tensor:
    return x.inner if isinstance(x, Wrapped) else x


def to_gradients(x: Tensor, grad: Tensor) -> Tensor:
    made = x * 1.0
    found = kernels.statistics(x, entropy=True)
    kernels.to_gradients(made, found, torch.arange(len(x)), grad[0, : len(x)], None)
    return made


def added(x: Tensor, weight: Tensor) -> Tensor:
    total = x @ weight.T
    kernels.add_product(total, x, weight)
    return total


# Each of x [6, 8] and y [8, 8].
FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, y: kernels.linear(x, y),
    "a bias": lambda x, y: kernels.linear(x, torch.ones(3, 8, dtype=y.dtype), y[0, :3]),
    "product": lambda x, y: kernels.product(x, y),
    "add_product": added,
    "rms_norm": lambda x, y: kernels.rms_norm(x, y[0].detach(), 1e-5),
    "weights of a norm": lambda x, y: kernels.rms_norm(x.detach(), y[0], 1e-5),
    "activated": lambda x, y: kernels.activated(x, True, "silu") * y[0, :4],
    "activated_linear": lambda x, y: kernels.activated_linear(x, True, y[:, :4], None, "silu"),
    "rotate": lambda x, y: kernels.rotate(x.view(3, 2, 8), y[:3, None, :3], y[3:6, None, :3]),
    "statistics": lambda x, y: kernels.statistics(x + y[0], entropy=True).lse,
    "to_gradients": to_gradients,
}
FORWARD_ONLY = ("product", "add_product", "statistics", "to_gradients")


def drawn() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 8, generator=generator), torch.randn(8, 8, generator=generator)


def results(
    of: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor, backward: bool
) -> list[Tensor]:
    if not backward:
        with torch.no_grad():
            return [of(x, y)]
    leaves = [x.detach().requires_grad_(), y.detach().requires_grad_()]
    out = of(*leaves)
    grads = torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)
    return [out.detach(), *(grad for grad in grads if grad is not None)]


ROUNDINGS = 2 * (7 * 8 + 4 + 12)


@functools.cache
def exact_results(name: str, backward: bool) -> list[tuple[Tensor, Tensor]]:
    """Each result in float64, and the largest error of one that is computed in float32.

    To first order, n roundings move a result by no more than n u times what it moves by where every
    input and every term is off by its own size: its componentwise condition (Higham 2002, 1.6), by
    central differences here. What rounds on the way is of the size of the results, or of an
    exponential, at most 1. A result meets the sum of 8 products, of up to 7 roundings a term and 4
    (see `kernel_product_bound`), and a dozen others on its way there, and as many on its way back.
    """

    def compute(given: Tensor) -> list[Tensor]:
        x, y = given.split([48, 64])
        return results(FUNCTIONS[name], x.view(6, 8), y.view(8, 8), backward)

    given = torch.cat([x.double().flatten() for x in drawn()])
    exact = compute(given)
    sizes = [value.abs() + 1 for value in exact]
    step = 2.0**-20  # wrong by the square of that, and by 2^-53 divided by it
    for at in range(len(given)):
        less, further = given.clone(), given.clone()
        less[at] *= 1 - step
        further[at] *= 1 + step
        moved = zip(compute(further), compute(less), strict=True)
        for size, (one, other) in zip(sizes, moved, strict=True):
            size += (one - other).abs() / (2 * step)
    return [(value, sum_gamma(ROUNDINGS) * size) for value, size in zip(exact, sizes, strict=True)]


def strided(x: Tensor) -> Tensor:
    return torch.stack([x, x], dim=-1)[..., 0]


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "subclass": Wrapped,
    "float64": Tensor.double,
    "strided": strided,
}


def cases() -> Iterator[tuple[str, str, str, bool]]:
    for name, kind, which, backward in product(
        FUNCTIONS, CHANGES, ("both", "first", "second"), (False, True)
    ):
        one_dtype = kind != "float64" or (which == "both" and name != "a bias")
        # Of the weights' gradient torch squeezes a product in its place, which `Wrapped` does not
        # see.
        seen = (
            not backward or (name, kind) != ("weights of a norm", "subclass") or which == "second"
        )
        if one_dtype and seen and not (backward and name in FORWARD_ONLY):
            yield name, kind, which, backward


@pytest.mark.parametrize(("name", "kind", "which", "backward"), list(cases()))
def test_what_is_not_plain_and_contiguous_is_the_same(
    name: str, kind: str, which: str, backward: bool, called: list[str]
) -> None:
    """No kernel reads the memory of another kind of tensor; what lies otherwise gives the numbers
    that it shows.
    """
    x, y = drawn()
    expected = results(FUNCTIONS[name], x, y, backward)
    assert called, "plain tensors take the kernel"
    called.clear()
    change = CHANGES[kind]
    x, y = change(x) if which != "second" else x, change(y) if which != "first" else y
    found = results(FUNCTIONS[name], x, y, backward)
    exact = exact_results(name, backward)
    assert len(found) == len(expected) == len(exact)
    for one, other, (value, bound) in zip(found, expected, exact, strict=True):
        assert other.dtype == torch.float32
        assert_within(other, value, bound)
        assert_within(plain(one), value, bound)
    if kind == "float64":
        assert not called
    if kind == "subclass" and which == "both":
        assert not called and isinstance(found[0], Wrapped)


@pytest.mark.parametrize("kind", [Tensor.bfloat16, Tensor.double, lambda x: x.to("meta"), Wrapped])
def test_what_is_served_is_plain_float32_of_a_cpu(
    kind: Callable[[Tensor], Tensor], called: list[str]
) -> None:
    x = torch.ones(3, 4, 8)
    other = kind(x)
    assert (
        kernels.serves(x) and kernels.serves(nn.Parameter(x)) and kernels.serves_attention(x, x, x)
    )
    assert not kernels.serves(other)
    for given in ((other, x, x), (x, other, x), (x, x, other)):
        assert not kernels.serves_attention(*given)


# -- the process

COUNTING = """
#include <stdio.h>
int mallopt_calls = 0;
extern "C" int mallopt(int, int) { mallopt_calls++; return 1; }
"""
STATE = """
import ctypes, os, resource, signal, sys, torch
def state():
    limits = [resource.getrlimit(kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_NOFILE)]
    flags = torch.get_default_dtype(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()
    flags += torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled, torch.is_inference_mode_enabled()
    calls = ctypes.c_int.in_dll(ctypes.CDLL(None), "mallopt_calls").value
    hooks = [signal.getsignal(kind) for kind in signal.valid_signals()], sys.excepthook, os.getcwd(), sys.path[:]
    random = torch.get_rng_state().tolist(), os.umask(0o22)
    set_by_torch = "TORCHINDUCTOR_CACHE_DIR"  # by 2.11, once something (transformers) imports its compiler
    environment = {name: value for name, value in os.environ.items() if name != set_by_torch}
    return environment, torch.get_num_threads(), torch.get_num_interop_threads(), limits, flags, calls, hooks, random
before = state()
"""
CALLS = """
from weft import kernels
x, weight = torch.arange(48.0).view(6, 8).requires_grad_(), torch.eye(8).requires_grad_()
y = kernels.rms_norm(kernels.linear(x, weight), weight[0], 1e-5)
kernels.activated_linear(y, True, weight[:, :4], None, "silu").sum().backward()
kernels.statistics(y.detach(), entropy=True, best=True)
own = torch.tensor([[0, 6, 0, 6]])
kernels.attend_segments(y.detach().view(6, 4, 2), 1, None, kernels.VarlenSegments(own), 1.0)
"""


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that stands before the C library's and counts who asks for another heap."""
    if library.load_library() is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("counter")
    (folder / "counter.cpp").write_text(COUNTING)
    command = [
        "g++",
        "-shared",
        "-fPIC",
        str(folder / "counter.cpp"),
        "-o",
        str(folder / "counter.so"),
    ]
    subprocess.run(command, check=True)
    return folder / "counter.so"


@pytest.mark.default_cases("kernels")
@pytest.mark.parametrize(
    ("code", "changes"),
    [
        (CALLS, False),
        (
            "import weft.models.network.transformer, weft.engine.torch.engine, "
            "weft.engine.generation.generate",
            False,
        ),
        ("from weft.observe.memory import keep_freed_memory; keep_freed_memory()", True),
    ],
    ids=["kernels", "imports", "a heap"],
)
def test_the_process_stays_as_it_is(code: str, changes: bool, counter: Path) -> None:
    """But for what the command line alone calls, which shows that a change would be seen."""
    after = (
        f"assert (state() == before) != {changes}, [a for a, b in zip(state(), before) if a != b]"
    )
    passed_on = (
        "PATH",
        "HOME",
        "XDG_CACHE_HOME",
        "PYTHONPATH",
        "LD_LIBRARY_PATH",
    )  # nothing that this process may have set
    environment = {
        "LD_PRELOAD": str(counter),
        **{key: os.environ[key] for key in passed_on if key in os.environ},
    }
    command = [sys.executable, "-c", "\n".join([STATE, code, after])]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


# -- addresses


def test_nobody_else_reads_addresses_or_replaces_what_a_parameter_holds() -> None:
    """A parameter of a sharded network has no address of its own, and what replaces its data cuts
    it from its shard.
    """
    root, found = Path(weft.__file__).parent, []
    for file in sorted(root.rglob("*.py")):
        if file.is_relative_to(root / "kernels"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute):
                reads = node.attr in ("data_ptr", "untyped_storage", "set_")
                if reads or (node.attr == "data" and not isinstance(node.ctx, ast.Load)):
                    found.append(f"{file.relative_to(root)}:{node.lineno}: {ast.unparse(node)}")
    assert not found
