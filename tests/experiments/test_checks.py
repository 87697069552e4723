"""A trained prefix as a role's model: what is found wrong in the first second, and what it takes of
the context.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_llama, prompt_answer_rows, write_jsonl
from weft.checkpoints.names import ADAPTER
from weft.data.spec import DatasetSpec
from weft.engine.spec import ModelSpec, PrefixSpec
from weft.errors import CheckpointError, ConfigError
from weft.experiments import SFTConfig
from weft.experiments.models import find_context


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model") / "base")


def prefix_of(directory: Path, base: Path) -> Path:
    settings = {"peft_type": "PREFIX_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
    (directory / ADAPTER).write_text(json.dumps(settings | {"base_model_name_or_path": str(base)}))
    return directory


def config(tmp_path: Path, **model: Any) -> SFTConfig:
    rows = write_jsonl(tmp_path / "rows.jsonl", prompt_answer_rows(4))
    dataset = DatasetSpec(train_path=str(rows), train_bs_n_seqs=2)
    return SFTConfig(experiment_name="e", trial_name="t", model=ModelSpec(**model), dataset=dataset)


def test_a_prefix_takes_a_part_of_the_context_and_a_rate_of_its_own(
    base: Path, tmp_path: Path
) -> None:
    plain = config(tmp_path, path=str(base)).build()
    own = config(tmp_path, path=str(base), prefix=PrefixSpec(12)).build()
    assert (plain.dataset.max_seqlen, own.dataset.max_seqlen) == (512, 500)
    assert (plain.roles["model"].optimizer.peak_lr, own.roles["model"].optimizer.peak_lr) == (
        1e-5,
        1e-2,
    )


def test_a_directory_with_a_prefix(base: Path, tmp_path: Path) -> None:
    where = str(prefix_of(tmp_path, base))
    further = config(tmp_path, path=where, prefix=PrefixSpec(4))
    assert further.build().roles["model"].path == where
    assert find_context(further) == 508
    with pytest.raises(
        ConfigError, match=r"is a prefix of 4 tokens, but model\.prefix\.num_tokens=0; write model"
    ):
        config(tmp_path, path=where).build()
    with pytest.raises(ConfigError, match=r"is a prefix, which model\.backend=hf does not support"):
        config(tmp_path, path=where, backend="hf").build()


def test_a_prefix_whose_model_is_gone(base: Path, tmp_path: Path) -> None:
    where = str(prefix_of(tmp_path, base / "gone"))
    with pytest.raises(
        CheckpointError,
        match=r"base_model_name_or_path='.*gone': there is no such file or directory",
    ):
        config(tmp_path, path=where, prefix=PrefixSpec(4)).build()
