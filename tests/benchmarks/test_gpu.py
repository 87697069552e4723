"""`benchmarks/gpu.py` on tiny sizes, in a process that has torch, transformers, numpy and safetensors with what they need, and
nothing else that weft would use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import array_api_compat
import pytest
import torch

from benchmarks import bare

ROOT = Path(__file__).resolve().parents[2]
ABSENT = (
    "array_api_compat", "jaxtyping", "hydra", "omegaconf", "rich", "ray", "sentencepiece", "pyarrow", "beartype", "trl",
    "peft", "accelerate", "datasets", "tiktoken", "pandas",
)  # fmt: skip
RUN = """
import importlib.machinery, runpy, sys
finder = importlib.machinery.PathFinder
find = finder.find_spec
absent = set({absent!r})
finder.find_spec = classmethod(lambda _, name, *rest: None if name.split(".")[0] in absent else find(name, *rest))
sys.argv = ["benchmarks/gpu.py", "--device", "cpu", "--tiny", *sys.argv[1:]]
sys.path[0] = {folder!r}
runpy.run_path({path!r}, run_name="__main__")
"""


def test_the_program_runs_with_little_installed(tmp_path: Path) -> None:
    path = ROOT / "benchmarks" / "gpu.py"
    code = RUN.format(absent=ABSENT, folder=str(path.parent), path=str(path))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OUT": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "gpu.json").read_text())
    rows = {row["what"]: row["value"] for row in written["rows"]}
    assert written["stand_ins"] == ["array_api_compat", "jaxtyping"] and written["failed"] == []
    for what in ("sft: MFU", "sft: times as fast as transformers", "decode: memory roofline"):
        assert rows[what] > 0
    for call in ("generation", "reward", "ref logprobs", "training"):
        assert rows[f"grpo: {call}"] > 0
    # Float32: a few units in the last place of log-probs of about 6.
    assert rows["sampled and recomputed log-probs differ"] < 1e-4
    assert rows["shared and repeated prompts differ"] < 1e-4
    assert "sft: times as fast as transformers" in done.stdout


def test_without_a_gpu_it_says_what_to_give() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu.py")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "--device cpu --tiny" in done.stderr


def test_results_of_a_dirty_tree_go_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import gpu

    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.delenv("OUT", raising=False)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    assert gpu._folder(tiny=False) == tmp_path / "benchmarks" / "results" and gpu._folder(tiny=True) is None
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


@pytest.mark.parametrize("name", ["exp", "where", "zeros_like", "maximum", "sum", "square", "clip", "abs"])
def test_the_stand_in_is_torch(name: str) -> None:
    assert getattr(bare.Namespace(), name) is getattr(torch, name)
    assert bare.Namespace().astype(torch.ones(2), torch.float64).dtype == torch.float64
