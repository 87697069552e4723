"""What a name on the command line stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import make_llama
from weft.engine.spec import ModelSpec
from weft.errors import CheckpointError
from weft.evaluation.models import context_length, open_policy, open_scorer


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("policy") / "model")


def test_a_policy_is_no_scorer(policy: Path) -> None:
    with pytest.raises(CheckpointError, match="no reward model"):
        open_scorer(ModelSpec(path=str(policy)))


def test_the_context_is_what_the_config_says(policy: Path) -> None:
    assert open_policy(ModelSpec(path=str(policy))).context == 512
    assert context_length({"n_positions": 64}) == 64
    assert context_length({}) is None


def test_a_broken_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        open_policy(ModelSpec(path=str(tmp_path)))
