"""Programs on the stand-in device.

`python -m tests.cuda.program` reads lines `[PROGRAM, FOLDER, FLASH]` and answers each with an exit
code. It imports torch once and forks a process for each program, which leaves `calls.json` and
`output.txt` in its folder.
"""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.cuda.device import ADDED, LAUNCHES, PROPERTIES, WAITS, StandIn  # before torch

# isort: split
import pytest
import torch

from benchmarks import gpu as gpu_benchmark
from tests.bounds import assert_within, gamma, product_bound
from tests.cuda import kernels
from tests.engine.common import Nll, batch_of, engine_of
from tests.launch import cases
from tests.tiny import (
    make_llama,
    make_tokenizer,
    pair_rows,
    prompt_answer_rows,
    prompt_rows,
    write_jsonl,
)
from weft.engine import device
from weft.kernels import fused
from weft.launch import run


def mixed(_: Path) -> None:
    """The stand-in refuses what a device refuses, and computes and differentiates the rest."""
    weight = torch.randn(4, 5, device="cuda", requires_grad=True)
    rows = torch.randn(3, 4)
    result = (rows.to("cuda") @ weight).relu().sum()
    result.backward()
    assert weight.grad is not None and weight.grad.device.type == "cuda"
    # A product of four terms, and a sum of fifteen numbers of one sign.
    left, right = rows, weight.detach().cpu()
    exact = (left.double() @ right.double()).relu().sum()
    lost = gamma(15) * exact + product_bound(left, right, more=15).sum()
    assert_within(torch.tensor(result.item()), exact, lost)
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
    """The sections of `benchmarks/gpu.py` on tiny sizes, one after the other in this process, with
    prompts that are long enough to be shared. Nothing is compiled for a device that is not there.
    """
    PROPERTIES.name = "NVIDIA H200"
    gpu_benchmark.SMALL = replace(gpu_benchmark.SMALL, decode=(1, 3, 300), grpo=(2, 300, 2, 6))
    record, rows = folder / "record.json", {}
    sections = ("limits", "probe", "agreement", "sft", "decode", "grpo", "lora")
    for name in (*sections, "decode_profile", "sft_profile", "ragged", "plan_profile"):
        words = ["--device", "cuda", "--tiny", "--minutes", "8"]  # as where time is short
        words += ["--section", name, "--record", str(record)]
        assert gpu_benchmark.main(words) == 0
        found = json.loads(record.read_text())
        assert not found["wrong"], found["wrong"]
        rows |= {row["what"]: row["value"] for row in found["rows"]}
    for what, promised in (("matrix products", 989.0), ("copies", 4800.0)):
        share = rows[f"{what}: share of the data sheet"]
        assert math.isclose(share, rows[what] / promised), (what, share)
    # Of log-probs of about 6, from states that bfloat16 keeps 8 bits of.
    differ = {what: value for what, value in rows.items() if what.endswith("differ at most")}
    assert len(differ) == 4 and max(differ.values()) < 0.03, differ


def algorithms(folder: Path) -> None:
    """Runs from configurations, two steps or so each: masters in float32, the network in bfloat16;
    GRPO repeats bit for bit.
    """
    prepare_cases(folder)
    for name in cases.CASES:
        config = case_of(name, folder)
        config.device, config.deterministic = "cuda", name == "grpo"
        run(config)


def prepare_cases(folder: Path) -> None:
    cases.prepare(folder)
    make_llama(folder / "wide", hidden_size=64)  # heads of 16, which FlexAttention takes
    write_jsonl(folder / "sft.jsonl", prompt_answer_rows(12))
    write_jsonl(folder / "pairs.jsonl", pair_rows(8))
    write_jsonl(folder / "prompts.jsonl", prompt_rows(8))


def case_of(name: str, folder: Path) -> Any:
    config = cases.CASES[name](folder, name)
    config.total_train_epochs = 1
    for role in ("model", "actor", "critic", "rew"):
        if hasattr(config, role):
            getattr(config, role).path, getattr(config, role).dtype = (
                str(folder / "wide"),
                "bfloat16",
            )
    return config


def offload(folder: Path) -> None:
    """Weights, masters and optimizer state that leave after every call change no bit, and nothing
    of them stays.
    """
    from tests.engine.torch.lanes import held
    from weft.engine.spec import OptimizerSpec

    path = make_llama(folder / "wide", hidden_size=64)
    batches = [batch_of([(5, [4, 7]), (2, [6])], seed=seed) for seed in range(3)]

    def run(*, leaves: bool, home: bool) -> list[float]:
        optimizer = OptimizerSpec(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5, offload=home)
        engine = engine_of(
            path, dtype="bfloat16", device="cuda", offload=leaves, optimizer=optimizer
        )
        found = []
        for batch in batches:
            found += engine.forward(batch, frozenset({"logprobs"})).data["logprobs"].tolist()
            found += [
                x
                for [stats] in [engine.train([batch], Nll())]
                for x in (stats.metrics["loss"], stats.metrics["nll"])
            ]
            if leaves:
                engine.offload("weights")
                engine.offload("optimizer")
                kept = engine._optimizer
                assert kept is not None
                state = [
                    x
                    for slots in kept._optimizer.state.values()
                    for x in slots.values()
                    if x.dim() and x.is_cuda
                ]
                assert held([*engine._network.parameters(), *state]) == 0
                assert home or held([*engine._masters._masters.values(), *kept.parameters]) == 0
        return [
            *found,
            *(
                float(x)
                for _, _, value in engine.read(engine.slices())
                for x in value.flatten()[:5]
            ),
        ]

    for home in (False, True):
        assert run(leaves=True, home=home) == run(leaves=False, home=home)


def second(folder: Path) -> None:
    """A run on the second device, whose thread and kernels have to be told so."""
    prepare_cases(folder)
    config = case_of("grpo", folder)
    config.device = "cuda:1"
    run(config)


def decode_waits(folder: Path) -> None:
    """A decode step waits for the device once, for its tokens; where ids are left out, once more at
    most for each such kind of settings.
    """
    from weft.engine.base import Request
    from weft.engine.spec import GenerationSpec, ModelSpec
    from weft.registry import backends
    from weft.topology import Layout

    path = make_llama(folder / "wide", hidden_size=64)
    engine = backends.get("torch")(
        ModelSpec(path=str(path), dtype="bfloat16", device="cuda:0"), Layout()
    )
    most = {"temperature": 1, "greedy": 1, "top_k": 1}
    settings = {
        "temperature": {"temperature": 0.7},
        "greedy": {"greedy": True},
        "top_k": {"top_k": 5},
    }
    for name, own in settings.items():
        with engine.generating(GenerationSpec(max_new_tokens=8, **own)) as generator:  # type: ignore[arg-type]
            generator.submit([Request(id=str(i), k=0, prompt=[3, 4, 5 + i]) for i in range(3)])
            for _ in range(3):  # the prompts, and a capture
                generator.step()
            WAITS.clear()
            for _ in range(4):
                assert len(generator.step()) == 3
        assert sum(WAITS.values()) == 4 * most[name], (name, +WAITS)
    assert engine._reusable_caches.num_bytes > 0
    engine.offload("weights")
    assert engine._reusable_caches.num_bytes == 0, "what generators keep goes with the weights"


def fused_kernels(folder: Path) -> None:
    """Each fused kernel that is switched on is called in generation and changes no token. Counts the
    kernels that a decode step launches in one layer, and elsewhere.
    """
    for layers in (2, 3):
        make_llama(folder / f"{layers} layers", hidden_size=64, num_hidden_layers=layers)
    plain = [_decode(folder / f"{layers} layers", "") for layers in (2, 3)]
    per_layer = plain[1][1] - plain[0][1]
    kernels.CALLS.clear()
    counts = {"launches per layer": per_layer, "other launches": plain[0][1] - 2 * per_layer}
    for name in (*fused.KERNELS, "all"):
        found = [_decode(folder / f"{layers} layers", name) for layers in (2, 3)]
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in plain], name
        saved = [old - new for (_, old), (_, new) in zip(plain, found, strict=True)]
        counts[f"{name}: saved per layer"] = saved[1] - saved[0]
        counts[f"{name}: saved elsewhere"] = saved[0] - 2 * (saved[1] - saved[0])
    kernels.CALLS.update(counts)


def _decode(path: Path, switches: str) -> tuple[Any, int]:
    """The tokens and log-probs of a few prompts, and the kernels that a decode step launched."""
    from weft.engine.base import Request
    from weft.engine.spec import GenerationSpec, ModelSpec
    from weft.registry import backends
    from weft.topology import Layout

    os.environ[fused.VARIABLE] = switches
    fused.read_switches.cache_clear()
    spec = ModelSpec(path=str(path), dtype="bfloat16", device="cuda:0")
    engine = backends.get("torch")(spec, Layout())
    found: list[Any] = []
    with engine.generating(GenerationSpec(max_new_tokens=8, temperature=0.7)) as generator:
        generator.submit([Request(id=str(i), k=0, prompt=[3, 4, 5 + i]) for i in range(3)])
        for _ in range(3):  # the prompts, and a capture
            found.append(generator.step())
        before = LAUNCHES.total() + kernels.CALLS.total()
        found.append(generator.step())
        launches = LAUNCHES.total() + kernels.CALLS.total() - before
        found += [generator.step() for _ in range(3)]
    return [[(e.id, e.token, e.logprob) for e in events] for events in found], launches


def marked(folder: Path) -> None:
    """The tests that ask for a CUDA device."""
    files = [f"tests/kernels/gpu/test_{name}.py" for name in ("flash", "flex")]
    files += [f"tests/engine/generation/test_{name}.py" for name in ("graphs", "caches_pages")]
    names = "agree_with or agrees_with_the_exact_form or on_the_device"
    settings = ["-p", "no:cacheprovider", "-p", "no:xdist", "--basetemp", str(folder / "tests")]
    assert pytest.main(["-q", "-k", names, *settings, *files]) == 0


def waits(folder: Path) -> None:
    """How often the host waits for the device in a training step: of SFT, and of GRPO with
    supports, in several micro-batches; of a mixture of experts. After a first one, in which a loss
    is checked and a rate measured.
    """
    from weft.algorithms.grpo import GRPOLoss
    from weft.algorithms.sft import SFTLoss

    groups = [(4, [5, 3]), (2, [7]), (6, [9, 2])]
    rows = sum(sum(lengths) for _, lengths in groups)
    extra = {
        name: [0.1 * (i % 7) for i in range(rows)]
        for name in ("advantages", "ref_logprobs", "logprobs")
    }
    mask = [float(i % 3 > 0) for i in range(rows)]
    make_llama(folder / "dense", hidden_size=64)
    save_experts(folder / "experts")
    for name, path, loss, most in (
        ("sft", "dense", SFTLoss(), 100),
        ("sft in parts", "dense", SFTLoss(), 16),
        ("grpo", "dense", GRPOLoss(kl_coef=0.1), 100),
        ("experts", "experts", SFTLoss(), 100),
    ):
        engine = engine_of(folder / path, dtype="bfloat16", device="cuda")
        batch = batch_of(groups, loss_mask=mask, **(extra if name == "grpo" else {}))
        engine.train([batch], loss, max_tokens=most)
        WAITS.clear()
        ADDED.clear()
        engine.train([batch], loss, max_tokens=most)
        kernels.CALLS.update({f"{name}: {where}": count for where, count in WAITS.items()})
        kernels.CALLS[f"added in {name}"] = ADDED["products"]


def save_experts(path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    make_tokenizer(path)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = AutoConfig.for_model(
        "mixtral",
        **sizes,
        num_key_value_heads=2,
        vocab_size=320,
        num_local_experts=4,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)


# What programs import while they run, here once for all of them.
PRELOADED = (
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "weft.data.loader",
    "weft.engine.backends.torch",
)

PROGRAMS: dict[str, Callable[[Path], None]] = {
    "mixed": mixed,
    "gpu": gpu,
    "algorithms": algorithms,
    "offload": offload,
    "marked": marked,
    "waits": waits,
    "decode_waits": decode_waits,
    "fused_kernels": fused_kernels,
    "second": second,
}


def main(name: str, folder: Path, flash: str) -> None:
    device.MATMUL_SIZES["cuda"] = (64,)  # the rate of products, which means nothing here
    kernels.install(reads_pages=flash == "pages")
    with StandIn():
        PROGRAMS[name](folder)
    (folder / "calls.json").write_text(json.dumps(kernels.CALLS))


def fork(name: str, folder: Path, flash: str) -> int:
    """Run a program in a forked process; its exit code."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        with (folder / "output.txt").open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        main(name, folder, flash)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # The thread of a backward pass may still hold the stand-in, a Python object, when it is
        # done: to let go of it while the interpreter ends would end the process by a signal.
        os._exit(code)


if __name__ == "__main__":
    for module in PRELOADED:
        importlib.import_module(module)
    # programs look for what is not needed any more among what they made, not among all modules
    gc.freeze()
    for line in sys.stdin:
        program, folder, flash = json.loads(line)
        print(fork(program, Path(folder), flash), flush=True)
