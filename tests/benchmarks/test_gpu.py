"""`benchmarks/gpu.py` on tiny sizes, in processes that have torch, transformers, numpy and
safetensors with what they need, and nothing else that weft would use.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import indent

import array_api_compat
import pytest
import torch

from benchmarks import bare

ROOT = Path(__file__).resolve().parents[2]
ABSENT = (
    "array_api_compat",
    "jaxtyping",
    "hydra",
    "omegaconf",
    "rich",
    "ray",
    "sentencepiece",
    "pyarrow",
    "beartype",
    "trl",
    "peft",
    "accelerate",
    "datasets",
    "tiktoken",
    "pandas",
)
BLOCK = """
import importlib.machinery
finder = importlib.machinery.PathFinder
find = finder.find_spec
absent = set({absent!r})
finder.find_spec = classmethod(lambda _, name, *rest: None if {{name, name.split(".")[0]}} & absent else find(name, *rest))
"""
# The program, whose sections are processes that are forked once it has imported what they need.
FORKED = """
import importlib, multiprocessing, os, subprocess, sys, types
sys.path[:0] = [{root!r}, {root!r} + "/src"]
from benchmarks import gpu

class Forked:
    count = 0

    def __init__(self, words, **more):
        Forked.count += 1
        assert words[1:3] == [gpu.__file__, "--section"]
        for name in ("transformers.models.llama.modeling_llama", "weft.engine.backends.torch", "weft.algorithms.grpo"):
            importlib.import_module(name)
        self.process = multiprocessing.get_context("fork").Process(target=run, args=(words[2:],))
        self.process.start()
        self.pid = self.process.pid

    def wait(self, seconds=None):
        self.process.join(seconds)
        if self.process.is_alive():
            raise subprocess.TimeoutExpired("a section", seconds)
        return self.process.exitcode

    def poll(self):
        return self.process.exitcode

def run(words):
    os.setsid()
    sys.exit(gpu.main(words))

gpu.subprocess = types.SimpleNamespace(**vars(subprocess) | {{"Popen": Forked}})
code = gpu.main()
sys.exit(code if Forked.count else "no section was forked")
"""
LOGPROBS = ("sampled and recomputed", "shared and repeated prompts", "weft and transformers")


def run(
    words: list[str],
    folder: Path,
    environment: dict[str, str],
    program: Path = ROOT / "benchmarks" / "gpu.py",
) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(program), "--device", "cpu", "--tiny", *words]
    return subprocess.run(
        line, capture_output=True, text=True, cwd=folder, env=environment, check=False
    )


@pytest.mark.slow
def test_the_program_runs_with_little_installed(tmp_path: Path) -> None:
    """Python reads `sitecustomize` when the program begins; a section by itself is in the next
    test.
    """
    (tmp_path / "sitecustomize.py").write_text(BLOCK.format(absent=ABSENT))
    out, program = tmp_path / "out", tmp_path / "forked.py"
    program.write_text(FORKED.format(root=str(ROOT)))
    done = run([], tmp_path, {**os.environ, "PYTHONPATH": str(tmp_path), "OUT": str(out)}, program)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((out / "gpu.json").read_text())
    rows = {row["what"]: row["value"] for row in written["rows"]}
    assert written["stand_ins"] == ["array_api_compat", "jaxtyping"]
    assert written["failed"] == [] and written["wrong"] == []
    for what in ("sft: MFU", "sft, mixed lengths: MFU", "sft: times as fast as transformers' best"):
        assert rows[what] > 0
    for what in ("decode, 1 sequences: memory roofline", "decode, 3 sequences: times as fast"):
        assert rows[what] > 0
    for call in ("generation", "reward", "ref logprobs", "training"):
        assert rows[f"grpo: {call}"] > 0
    # Float32: a few units in the last place of log-probs of about 6.
    assert all(rows[f"{what}: log-probs differ at most"] < 1e-4 for what in LOGPROBS)
    assert max(value for what, value in rows.items() if what.startswith("gradient of ")) < 1e-4
    page = (out / "gpu.md").read_text()
    assert all(f"| {what} |" in page for what in rows) and "**wrong**" not in page
    assert "sft: times as fast as transformers' best" in done.stdout


@pytest.mark.slow
def test_a_section_that_fails_costs_no_other(tmp_path: Path) -> None:
    in_sections = 'import sys\nif "--section" in sys.orig_argv:\n' + indent(
        BLOCK.format(absent=["transformers.models.llama.modeling_llama"]), "    "
    )
    (tmp_path / "sitecustomize.py").write_text(in_sections)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OUT": str(tmp_path)}
    done = run(["--only", "agreement", "limits"], tmp_path, environment)
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert (
        done.returncode == 1
        and written["failed"] == ["agreement"]
        and written["why"]["agreement"].startswith("exit code 1, ModuleNotFoundError: ")
    )
    found = [row["what"] for row in written["rows"]]
    assert "sampled and recomputed: log-probs differ at most" in found, (
        "what a section found before it failed is kept"
    )
    assert found[-2:] == ["matrix products", "copies"]
    assert "**agreement failed**: exit code 1" in (tmp_path / "gpu.md").read_text()


@pytest.mark.slow_cases("there", "no jax")
@pytest.mark.slow
@pytest.mark.parametrize("absent", [[], ["jax"], ["optax"]], ids=["there", "no jax", "no optax"])
def test_jax_is_measured_where_it_is_installed(absent: list[str], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCK.format(absent=absent))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OUT": str(tmp_path)}
    done = run(["--only", "jax"], tmp_path, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "gpu.json").read_text())
    rows = {row["what"]: row["value"] for row in written["rows"]}
    if absent:
        (left_out,) = written["details"]["jax"]["left_out"]
        assert rows == {} and left_out == f"backend=jax: {absent[0]} is not installed"
        return
    assert rows["jax, sft: MFU"] > 0 and rows["jax, decode, 3 sequences: tokens"] > 0
    assert "| jax, sft: MFU |" in (tmp_path / "gpu.md").read_text()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_jax_on_a_gpu_tries_the_attention_of_cudnn_last(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it fails, the other figures are there, and a note says why."""
    from benchmarks import gpu_jax
    from benchmarks.gpu import SMALL
    from benchmarks.gpu_backends import Where
    from benchmarks.gpu_run import Run

    timed = []

    def train(run: Run, attention: str) -> None:
        timed.append(attention)
        if attention == "cudnn":
            raise RuntimeError("no such graph")

    monkeypatch.setattr(gpu_jax, "find_obstacle", lambda _: None)
    monkeypatch.setattr(gpu_jax, "_time_training", train)
    monkeypatch.setattr(gpu_jax, "_time_decoding", lambda _: timed.append("decoding"))
    made = Run(SMALL, Where(torch.device(device), "bfloat16"), tmp_path / "record.json")
    gpu_jax.jax_section(made)
    assert timed == ["xla", "decoding", *(["cudnn"] if device == "cuda" else [])]
    note = "jax, sft, attention=cudnn: RuntimeError: no such graph"
    assert made.details.get("notes", []) == ([note] if device == "cuda" else [])


@pytest.mark.parametrize("first", [True, False])
def test_wrong_numbers_end_the_first_half_hour(
    first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import gpu

    def section(name: str, chosen: object, report: gpu.Report, folder: Path) -> None:
        row = {"what": name, "value": 1.0, "unit": "", "goal": "<= 0.15"}
        report.take(
            name, {"rows": [row], "wrong": [f"{name}: 1"] if name == "agreement" else []}, 1.0, None
        )

    monkeypatch.setattr(gpu, "_apart", section)
    monkeypatch.setenv("OUT", str(tmp_path))
    assert gpu.main(["--device", "cpu", "--tiny", *(["--first"] if first else [])]) == 1
    found = [row["what"] for row in json.loads((tmp_path / "gpu.json").read_text())["rows"]]
    assert found == (
        ["tests", "limits", "agreement"] if first else [n for n in gpu.SECTIONS if n != "tests"]
    )
    page = (tmp_path / "gpu.md").read_text()
    assert (
        "- **wrong**: agreement: 1" in page
        and "| agreement | 1 |  | <= 0.15 | **missed** |" in page
    )
    assert ("mean nothing" in capsys.readouterr().err) is first


def test_a_figure_that_is_no_number_is_wrong(tmp_path: Path) -> None:
    from benchmarks.gpu import SMALL
    from benchmarks.gpu_backends import Where
    from benchmarks.gpu_run import Run

    made = Run(SMALL, Where(torch.device("cpu"), "float32"), tmp_path / "record.json")
    for value in (0.1, float("nan"), 0.2):
        made.check("apart", value, 0.15, "")
    assert made.wrong == ["apart: nan, at most 0.15", "apart: 0.2, at most 0.15"]
    assert json.loads((tmp_path / "record.json").read_text())["wrong"] == made.wrong


@pytest.mark.slow
def test_a_section_beyond_its_time_is_ended(tmp_path: Path) -> None:
    done = run(["--only", "limits", "--limit", "1"], tmp_path, {**os.environ, "OUT": str(tmp_path)})
    assert done.returncode == 1 and "did not end within 1 s" in done.stdout + done.stderr


def test_without_a_gpu_it_says_what_to_give() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "--device cpu --tiny" in done.stderr


def test_results_of_a_dirty_tree_go_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import gpu

    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.delenv("OUT", raising=False)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    assert (
        gpu._folder(tiny=False) == tmp_path / "benchmarks" / "results"
        and gpu._folder(tiny=True) is None
    )
    (tmp_path / "new.py").write_text("x = 1\n")
    for out in (None, tmp_path / "benchmarks" / ".." / "benchmarks" / "results"):
        if out is not None:
            monkeypatch.setenv("OUT", str(out))
        with pytest.raises(SystemExit) as raised:
            gpu._folder(tiny=False)
        assert raised.value.code == 2
        said = capsys.readouterr().err
        assert "new.py" in said and "set OUT to another folder" in said
    monkeypatch.setenv("OUT", str(tmp_path / "elsewhere"))
    assert gpu._folder(tiny=False) == tmp_path / "elsewhere"


def test_installed_packages_are_left_alone() -> None:
    before = dict(sys.modules)
    assert bare.stand_in() == []
    assert sys.modules["array_api_compat"] is before["array_api_compat"] is array_api_compat


@pytest.mark.parametrize(
    "name", ["exp", "where", "zeros_like", "maximum", "sum", "square", "clip", "abs"]
)
def test_the_stand_in_is_torch(name: str) -> None:
    assert getattr(bare.Namespace(), name) is getattr(torch, name)
    assert bare.Namespace().astype(torch.ones(2), torch.float64).dtype == torch.float64
