"""Programs on the stand-in device: `python -m tests.cuda.program PROGRAM FOLDER`; prints what was called as JSON at the end."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tests.cuda.device import StandIn  # before torch

# isort: split
import pytest
import torch

from tests.cuda import kernels
from weft.engine import device


def mixed(_: Path) -> None:
    """The stand-in refuses what a device refuses, and computes and differentiates the rest."""
    weight = torch.randn(4, 5, device="cuda", requires_grad=True)
    rows = torch.randn(3, 4)
    result = (rows.to("cuda") @ weight).relu().sum()
    result.backward()
    assert weight.grad is not None and weight.grad.device.type == "cuda"
    torch.testing.assert_close(result.item(), (rows @ weight.detach().cpu()).relu().sum().item())
    indexed = weight.detach()[torch.tensor([1, 2])]  # whole numbers of the host may index
    assert indexed.device.type == "cuda" and 2.0 * torch.tensor(3.0) * indexed is not None
    for refused in (
        lambda: rows @ weight,
        lambda: weight + torch.ones(5),
        lambda: torch.cat([rows, weight.detach().T]),
        lambda: rows[torch.tensor([1], device="cuda")],
        lambda: weight.detach().index_put_((torch.tensor([1, 2]),), torch.ones(2, 5)),
        lambda: weight.detach().numpy(),
        lambda: weight.detach() + torch.ones(5, device="cuda:1"),
    ):
        try:
            refused()
        except (RuntimeError, TypeError):
            continue
        raise AssertionError("tensors of two devices went together")


def gpu(folder: Path) -> None:
    """`benchmarks/gpu.py`, all sections on tiny sizes, with prompts that are long enough to be shared."""
    from benchmarks import gpu as program

    os.environ["OUT"] = str(folder)
    program.SMALL = replace(program.SMALL, decode=(3, 300), grpo=(2, 300, 2, 6))
    assert program.main(["--device", "cuda", "--tiny"]) == 0
    differ = [row for row in json.loads((folder / "gpu.json").read_text())["rows"] if row["what"].endswith("differ")]
    # Of log-probs of about 6, from states that bfloat16 keeps 8 bits of.
    assert len(differ) == 2 and all(row["value"] < 0.02 for row in differ), differ


def algorithms(folder: Path) -> None:
    """Runs from configurations: masters in float32, the network in bfloat16; GRPO repeats bit for bit."""
    from tests.launch import cases
    from tests.tiny import make_llama
    from weft.launch import run

    cases.prepare(folder)
    make_llama(folder / "wide", hidden_size=64)  # heads of 16, which FlexAttention takes
    for name, make in cases.CASES.items():
        config = make(folder, name)
        config.device, config.deterministic = "cuda", name == "grpo"
        for role in ("model", "actor", "critic", "rew"):
            if hasattr(config, role):
                getattr(config, role).path, getattr(config, role).dtype = str(folder / "wide"), "bfloat16"
        run(config)


def second(folder: Path) -> None:
    """A run on the second device, whose thread and kernels have to be told so."""
    from tests.launch import cases
    from tests.tiny import make_llama
    from weft.launch import run

    cases.prepare(folder)
    make_llama(folder / "wide", hidden_size=64)
    config = cases.CASES["grpo"](folder, "second")
    config.device = "cuda:1"
    for role in ("model", "actor", "critic", "rew"):
        if hasattr(config, role):
            getattr(config, role).path, getattr(config, role).dtype = str(folder / "wide"), "bfloat16"
    run(config)


def waits(folder: Path) -> None:
    """A decode step waits for the device once, for its tokens; where ids are left out, once more at most for each such kind of
    settings."""
    from tests.cuda.device import WAITS
    from tests.tiny import make_llama
    from weft.engine.base import Request
    from weft.engine.spec import GenerationSpec, ModelSpec
    from weft.registry import backends
    from weft.topology import Layout

    path = make_llama(folder / "wide", hidden_size=64)
    engine = backends.get("torch")(ModelSpec(path=str(path), dtype="bfloat16", device="cuda:0"), Layout())
    most = {"temperature": 1, "greedy": 1, "top_k": 1}
    settings = {"temperature": {"temperature": 0.7}, "greedy": {"greedy": True}, "top_k": {"top_k": 5}}
    for name, own in settings.items():
        with engine.generating(GenerationSpec(max_new_tokens=8, **own)) as generator:  # type: ignore[arg-type]
            generator.submit([Request(id=str(i), k=0, prompt=[3, 4, 5 + i]) for i in range(3)])
            for _ in range(3):  # the prompts, and a capture
                generator.step()
            WAITS.clear()
            for _ in range(4):
                assert len(generator.step()) == 3
        assert sum(WAITS.values()) == 4 * most[name], (name, +WAITS)
    assert engine._kept.num_bytes > 0
    engine.offload("weights")
    assert engine._kept.num_bytes == 0, "what generators keep goes with the weights"


def marked(folder: Path) -> None:
    """The tests that ask for a CUDA device."""
    files = [f"tests/kernels/gpu/test_{name}.py" for name in ("flash", "flex")]
    files += [f"tests/engine/generation/test_{name}.py" for name in ("graphs", "caches_pages")]
    names = "agree_with or agrees_with_the_exact_form or on_the_device"
    settings = ["-p", "no:cacheprovider", "-p", "no:xdist", "--basetemp", str(folder / "tests")]
    assert pytest.main(["-q", "-k", names, *settings, *files]) == 0


PROGRAMS: dict[str, Callable[[Path], None]] = {
    "mixed": mixed, "gpu": gpu, "algorithms": algorithms, "second": second, "waits": waits, "marked": marked
}  # fmt: skip


def main(name: str, folder: Path, reads_pages: bool) -> None:
    device.MATMUL_SIZES["cuda"] = (64,)  # the rate of products, which means nothing here
    kernels.install(reads_pages=reads_pages)
    with StandIn():
        PROGRAMS[name](folder)
    print(json.dumps(kernels.CALLS))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "pages")
    sys.stdout.flush()
    # The thread of a backward pass may still hold the stand-in, a Python object, when it is done: to let go of it while the
    # interpreter ends would end the process by a signal.
    os._exit(0)
