"""Models named on the command line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.models.network.test_prefix import COUNT, with_prefix
from tests.tiny import make_llama
from weft.checkpoints import hf_io, prefix_io
from weft.engine.spec import ModelSpec
from weft.errors import CheckpointError
from weft.evaluation.models import find_context_length, is_scorer, open_policy, open_scorer
from weft.models.network.linear import find_canonical_values
from weft.models.network.transformer import Pooling
from weft.registry import families


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("policy") / "model")


def test_a_policy_is_no_scorer(policy: Path) -> None:
    with pytest.raises(CheckpointError, match="not a reward model"):
        open_scorer(ModelSpec(path=str(policy)))


def test_the_context_is_what_the_config_says(policy: Path) -> None:
    assert open_policy(ModelSpec(path=str(policy))).context == 512
    assert find_context_length({"n_positions": 64}) == 64
    assert find_context_length({}) is None


def test_a_prefix_is_opened_with_the_model_and_the_tokenizer_it_belongs_to(
    policy: Path, tmp_path: Path
) -> None:
    network = with_prefix(hf_io.load(policy))
    prefix_io.save_prefix(
        tmp_path,
        find_canonical_values(network),
        network.config,
        "lm",
        base=str(policy),
        score=families.get("llama").score,
    )
    opened = open_policy(ModelSpec(path=str(tmp_path), device="cpu"))
    assert opened.name == str(tmp_path) and opened.adapter is None and opened.context == 512 - COUNT
    assert (
        opened.tokenizer.vocab_size
        == open_policy(ModelSpec(path=str(policy), device="cpu")).tokenizer.vocab_size
    )
    names = {name for name, *_ in opened.engine.read(opened.engine.slices())}
    assert "blocks.0.attention.prefix.k" in names


def test_a_broken_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        open_policy(ModelSpec(path=str(tmp_path)))


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_reward_model_scores_and_generates_no_text(
    pooling: Pooling, policy: Path, tmp_path: Path
) -> None:
    network = hf_io.load(policy, "score", pooling=pooling)
    hf_io.save(tmp_path, find_canonical_values(network), network.config, "score", pooling=pooling)
    for file in policy.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    assert (
        is_scorer(str(tmp_path))
        and open_scorer(ModelSpec(path=str(tmp_path), device="cpu")).context == 512
    )
    with pytest.raises(CheckpointError, match="it gives scores, not text"):
        open_policy(ModelSpec(path=str(tmp_path)))
