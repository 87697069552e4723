"""What a run imports: each package costs every run its time, so a plain run loads none that it does
not use.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.tiny import make_llama, prompt_answer_rows, write_jsonl

MOST_MODULES = (
    # of a plain SFT run on one device; about 900 are torch's and weft's own, 400 the library's of
    # Python
    2200
)
HEAVY = (
    "accelerate",
    "datasets",
    "math_verify",
    "pandas",
    "peft",
    "pyarrow",
    "ray",
    "scipy",
    "sympy",
    "torchao",
    "triton",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes",
    "torch.onnx",
    "transformers.models.llama",
    "transformers.modeling_utils",
)
# Prints the modules after the run has ended: what the end of a run imports counts too.
CODE = "import json, sys; from weft.cli.main import main; code = main(sys.argv[1:]); print(json.dumps([code, *sys.modules]))"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The modules of a plain SFT run on one device."""
    folder = tmp_path_factory.mktemp("imports")
    model = make_llama(folder / "model")
    rows = write_jsonl(folder / "rows.jsonl", prompt_answer_rows())
    words = [
        "quickstart",
        "sft",
        "experiment_name=e",
        "trial_name=t",
        f"fileroot={folder}",
        f"model.path={model}",
        f"dataset.path={rows}",
        "dataset.train_bs_n_seqs=4",
        "max_steps=1",
        "device=cpu",
    ]
    done = subprocess.run(
        [sys.executable, "-c", CODE, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    code, *modules = json.loads(done.stdout.splitlines()[-1])
    assert code == 0, done.stderr
    return modules


@pytest.mark.parametrize("package", HEAVY)
def test_a_plain_run_does_not_load(loaded: list[str], package: str) -> None:
    assert [name for name in loaded if name == package or name.startswith(f"{package}.")] == []


def test_a_plain_run_loads_no_more_modules_than_its_budget(loaded: list[str]) -> None:
    assert "weft.runtime.master" in loaded and "torch" in loaded, "this was a run"
    assert len(loaded) <= MOST_MODULES
