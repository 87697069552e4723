"""What a run imports: each package costs every run its time, so a plain run loads none that it does
not use.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from packaging.version import Version

from tests.tiny import make_llama, prompt_answer_rows, write_jsonl

MOST_MODULES = (
    # of a plain SFT run on one device; of 2,110 that it loads, 770 are torch's and 400 weft's
    2150
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


OLD = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.21"),
    reason="transformers before 5.21 itself imports accelerate and torch's compiler",
)


@OLD
@pytest.mark.parametrize("package", HEAVY)
def test_a_plain_run_does_not_load(loaded: list[str], package: str) -> None:
    assert [name for name in loaded if name == package or name.startswith(f"{package}.")] == []


@OLD
def test_a_plain_run_loads_no_more_modules_than_its_budget(loaded: list[str]) -> None:
    assert "weft.runtime.master" in loaded and "torch" in loaded, "this was a run"
    assert len(loaded) <= MOST_MODULES


# Prints whether torch is there where the first line is printed, and ends there.
FIRST_LINE = """
import sys
from weft.cli import quickstart

def stop(*args, **more):
    print("torch" in sys.modules)
    raise SystemExit(0)

quickstart.print_start = stop
from weft.cli.main import main
main(sys.argv[1:])
"""


def test_the_first_line_comes_before_torch_is_loaded(tmp_path: Path) -> None:
    """Loading torch takes seconds, in which the screen would be empty."""
    words = ["quickstart", "sft", "experiment_name=e", "trial_name=t", f"fileroot={tmp_path}"]
    model, rows = make_llama(tmp_path / "model"), tmp_path / "rows.jsonl"
    words += [f"model.path={model}", f"dataset.path={write_jsonl(rows, prompt_answer_rows())}"]
    done = subprocess.run(
        [sys.executable, "-c", FIRST_LINE, *words], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, ["False"]), done.stderr


def test_help_loads_neither_torch_nor_numpy() -> None:
    code = "import sys; from weft.cli.main import main; main(['--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1].split()
    assert "weft.cli.main" in loaded and not {"torch", "numpy", "transformers"} & set(loaded)
