"""The fused kernels compile for a Hopper GPU, which need not be there, and keep their numbers in
registers.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.kernels import fused

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float64: "*fp64",
    torch.int64: "*i64",
}
Usage = dict[str, int]
Compile = Callable[[Callable[[], object]], Usage]


def compile_for_hopper(kernel: Any, arguments: dict[str, Any], folder: Path) -> Usage:
    """Registers per thread, and bytes of its stack and local memory, to which registers spill."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {"num_warps": arguments.pop("num_warps", 4)}
    signature, constants, attributes = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if name.isupper():
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
        else:
            signature[name] = "i32"
        if signature[name] != "constexpr" and (signature[name] != "i32" or value % 16 == 0):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    binary = folder / "kernel.cubin"
    target = GPUTarget("cuda", 90, 32)
    binary.write_bytes(triton.compile(source, target=target, options=options).asm["cubin"])
    words = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(binary)]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return {name: int(size) for name, size in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compile:
    """Compiles what a call would launch, with the constants that it chooses."""
    from weft.kernels.gpu import fused_triton

    usages: list[Usage] = []

    class Launcher:
        def __init__(self, name: str) -> None:
            self.kernel = getattr(fused_triton, name)

        def __getitem__(self, grid: object) -> Callable[..., None]:
            return self.launch

        def launch(self, *given: Any, **named: Any) -> None:
            arguments = dict(zip(self.kernel.arg_names, given, strict=False)) | named
            usages.append(compile_for_hopper(self.kernel, arguments, tmp_path))

    launchers = {name: Launcher(name) for name in ("add_rms_norm", "draw", "store")}
    sources = SimpleNamespace(tl=fused_triton.tl, **launchers)
    monkeypatch.setattr(fused, "_load_kernels", lambda: sources)

    def compile_call(call: Callable[[], object]) -> Usage:
        call()
        return usages.pop()

    return compile_call


def check(usage: Usage, threads: int) -> None:
    assert usage["STACK"] == usage["LOCAL"] == 0, "registers are spilled"
    assert 0 < usage["REG"] * threads <= 1 << 16, "more registers than a multiprocessor has"


HALF_AND_WHOLE = [
    torch.bfloat16,
    pytest.param(torch.float32, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("dtype", HALF_AND_WHOLE)
def test_writes_to_the_cache_compile(compiled: Compile, dtype: torch.dtype) -> None:
    k, cache = torch.empty(2, 8, 128, dtype=dtype), torch.empty(4, 8, 128, dtype=dtype)
    check(compiled(lambda: fused.store(k, k, cache, cache, torch.zeros(2).long())), 128)


@pytest.mark.parametrize("dtype", HALF_AND_WHOLE)
def test_sums_and_norms_compile(compiled: Compile, dtype: torch.dtype) -> None:
    for width in (4096, fused.MAX_WIDTH):
        x = torch.empty(2, width, dtype=dtype)
        usage = compiled(lambda x=x: fused.add_rms_norm(x, x, x[0], 1e-6, 0.0))
        check(usage, 32 * min(width // fused.ELEMENTS_PER_WARP, fused.MAX_WARPS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [257, 32_000, 128_256, 151_936])
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.default_cases("False-151936-dtype0")
def test_draws_compile(compiled: Compile, vocab: int, greedy: bool, dtype: torch.dtype) -> None:
    logits, numbers = torch.empty(1, vocab, dtype=dtype), torch.empty(1, dtype=torch.float64)
    usage = compiled(lambda: fused.draw(logits, numbers, None if greedy else numbers))
    check(usage, 32 * fused.MAX_WARPS)
