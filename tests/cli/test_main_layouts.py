"""Whole runs from the command line in layouts that combine several letters, against the run of one
process.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.engine.layouts import Case, write_model
from tests.runtime.placed import timeless
from tests.tiny import make_llama, prompt_answer_rows, write_jsonl
from weft.cli.main import main
from weft.topology import Layout

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_devices")]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = tmp_path_factory.mktemp("material")
    make_llama(folder / "student")
    make_llama(folder / "teacher", seed=1, initializer_range=0.2)
    write_model(Case("mixtral"), folder / "mixture")
    write_jsonl(folder / "rows.jsonl", prompt_answer_rows(8))
    return folder


def run(material: Path, fileroot: Path, name: str, *words: str) -> list[dict[str, Any]]:
    """Return the metrics of three steps."""
    common = [
        f"fileroot={fileroot}",
        "experiment_name=e",
        "trial_name=t",
        "dataset.train_bs_n_seqs=4",
        "max_steps=3",
    ]
    common += ["total_train_epochs=2", "progress=false"]
    assert (
        main(["quickstart", name, *common, *(word.replace("@", f"{material}/") for word in words)])
        == 0
    )
    lines = timeless(fileroot / "e" / "t")
    assert [line["step"] for line in lines] == [1, 2, 3]
    return [{k: v for k, v in line.items() if isinstance(v, int | float)} for line in lines]


def log(fileroot: Path) -> str:
    return (fileroot / "e" / "t" / "log.txt").read_text()


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Compare metrics of float64 runs, whose sums may be computed in another order."""
    for ours, theirs in zip(found, expected, strict=True):
        for line in (ours, theirs):
            line.pop("train/expert_load", None)  # each rank measures its own tokens
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("layout", ["c2p2", "d2p2e2", "d4f4e2"])
def test_a_mixture_is_trained(layout: str, material: Path, tmp_path: Path) -> None:
    words = ("model.path=@mixture", "dataset.train_path=@rows.jsonl", "model.optimizer.lr=1e-3")
    words += ("model.dtype=float64",)
    words += ("model.router_aux_loss_coef=0.1", "model.pipeline_schedule=1f1b")
    expected = run(material, tmp_path / "one", "sft", *words)
    same(run(material, tmp_path / "many", "sft", *words, f"model.layout={layout}"), expected)
    assert f"model: layout {Layout.parse(layout)} on devices 0-3" in log(tmp_path / "many")


@pytest.mark.parametrize("layouts", [("t2", "t2"), ("d2t2", "t4"), ("c2t2", "d1")])
def test_a_split_student_learns_from_a_split_teacher(
    layouts: tuple[str, str], material: Path, tmp_path: Path
) -> None:
    words = (
        "actor.path=@student",
        "teacher.path=@teacher",
        "dataset.path=@rows.jsonl",
        "lmbda=0.5",
    )
    words = (*words, "distill.top_k=20", "distill.gen.max_new_tokens=6", "actor.optimizer.lr=1e-3")
    words = (*words, "actor.dtype=float64", "teacher.dtype=float64")
    expected = run(material, tmp_path / "one", "distill", *words)
    found = run(
        material,
        tmp_path / "many",
        "distill",
        *words,
        f"actor.layout={layouts[0]}",
        f"teacher.layout={layouts[1]}",
    )
    same(found, expected)
    assert f"actor: layout {Layout.parse(layouts[0], trained=True)} on" in log(tmp_path / "many")
