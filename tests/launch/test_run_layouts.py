"""Whole runs of every algorithm on several devices: the numbers, and the tokens, of one process."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.launch.cases import options, prepare
from tests.runtime.placed import timeless
from weft.engine.spec import ModelSpec
from weft.experiments import DPOConfig, GenConfig, OnlineDPOConfig, RWConfig, SFTConfig
from weft.experiments.common import RunConfig
from weft.launch import run

pytestmark = pytest.mark.usefixtures("forked_devices")
STEPS = 2


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    prepare(folder)
    return folder


def fixed(root: Path, folder: str) -> dict[str, Any]:
    return options(root, folder, recover_freq_steps=None, save_freq_steps=None, max_steps=STEPS)


def on_rows(
    kind: type[RWConfig | DPOConfig | SFTConfig], rows: str, root: Path, folder: str
) -> RunConfig:
    config = kind(**fixed(root, folder))
    config.dataset.train_path, config.dataset.train_bs_n_seqs = str(root / rows), 4
    return config


def gen(root: Path, folder: str) -> GenConfig:
    config = GenConfig(**fixed(root, folder))
    config.dataset.path, config.dataset.train_bs_n_seqs, config.gen.max_new_tokens = (
        str(root / "prompts.jsonl"),
        4,
        6,
    )
    return config


def online_dpo(root: Path, folder: str) -> OnlineDPOConfig:
    config = OnlineDPOConfig(**fixed(root, folder), reward="length")
    config.dataset.path, config.dataset.train_bs_n_seqs = str(root / "prompts.jsonl"), 4
    config.online_dpo.gen.max_new_tokens = 6
    return config


MAKE = {
    "sft": partial(on_rows, SFTConfig, "sft.jsonl"),
    "rw": partial(on_rows, RWConfig, "pairs.jsonl"),
    "dpo": partial(on_rows, DPOConfig, "pairs.jsonl"),
    "gen": gen,
    "online_dpo": online_dpo,
}
ONE: dict[str, Path] = {}  # by algorithm, its run of one process


def made(root: Path, name: str, folder: str, layouts: dict[str, str]) -> Path:
    config = MAKE[name](root, folder)
    for role in ("model", "actor", "ref"):
        spec = getattr(config, role, None)
        if isinstance(spec, ModelSpec):
            spec.path = str(root / "model") if role != "ref" else None
            spec.dtype, spec.layout = "float64", layouts.get(role)
            spec.optimizer.lr = 1e-3
    return run(config).directory


def tokens(directory: Path) -> list[Any]:
    found = []
    for file in ("samples.jsonl", "generations.jsonl"):
        if (directory / file).is_file():
            found += [json.loads(line) for line in (directory / file).read_text().splitlines()]
    return [
        (line["id"], line.get("prompt"), line.get("completion"), line.get("completions"))
        for line in found
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("sft", {"model": "d2"}),
        ("sft", {"model": "t2"}),
        ("rw", {"model": "d2"}),
        ("dpo", {"actor": "t2", "ref": "p2"}),
        ("gen", {"model": "d2"}),
        ("online_dpo", {"actor": "d2"}),
    ],
)
def test_the_numbers_and_tokens_of_one_process(
    root: Path, name: str, layouts: dict[str, str]
) -> None:
    if name not in ONE:
        ONE[name] = made(root, name, f"{name}-one", {})
    found = made(root, name, f"{name}-{'-'.join(layouts.values())}", layouts)
    assert tokens(found) == tokens(ONE[name]) and tokens(found)
    ours, theirs = timeless(found), timeless(ONE[name])
    assert len(ours) == STEPS
    for line, wanted in zip(ours, theirs, strict=True):
        numbers = {key: value for key, value in wanted.items() if isinstance(value, int | float)}
        assert {key: line[key] for key in numbers} == pytest.approx(numbers, rel=1e-9, abs=1e-9)
    for log in found.glob("logs/worker-*.log"):
        assert "returned a view tensor" not in log.read_text()
