"""`eval_prompts`: which runs take it, and the call that it makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.cases import grpo, options, prepare, sft
from weft.errors import ConfigError
from weft.experiments import GenConfig, RWConfig


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fixed")
    prepare(folder)
    (folder / "asked.txt").write_text("1+1=\n")
    return folder


def test_the_call_is_greedy_and_as_long_as_the_runs_own_completions(root: Path) -> None:
    for make, tokens in ((grpo, 6), (sft, 128)):
        config = make(root, "out")
        config.eval_prompts = str(root / "asked.txt")
        made = config.build().fixed_prompts
        assert made is not None
        (call,) = made.graph.list_model_calls()
        assert (
            call.role == config.main_role
            and call.args["greedy"]
            and call.args["samples_per_prompt"] == 1
        )
        assert call.args["max_new_tokens"] == tokens, "of grpo.gen; else 128"
        assert [*config.build().calls.values()][-1] == call
    assert sft(root, "out").build().fixed_prompts is None


def test_models_that_write_no_text_are_refused(root: Path) -> None:
    asked = str(root / "asked.txt")
    rw = RWConfig(**options(root, "rw", eval_prompts=asked))
    rw.model.path, rw.dataset.train_path = str(root / "model"), str(root / "pairs.jsonl")
    with pytest.raises(
        ConfigError,
        match=r"eval_prompts=.*: rw trains a model that scores texts but cannot generate any",
    ):
        rw.build()
    gen = GenConfig(**options(root, "gen", eval_prompts=asked))
    gen.model.path, gen.dataset.path = str(root / "model"), str(root / "prompts.jsonl")
    with pytest.raises(
        ConfigError, match=r"this run trains no model; give the prompts as dataset\.path"
    ):
        gen.build()


def test_files_that_are_not_there_and_lengths_that_do_not_fit_are_refused(root: Path) -> None:
    config = sft(root, "out")
    config.eval_prompts = str(root / "nowhere.txt")
    with pytest.raises(ConfigError, match=r"eval_prompts=.*there is no such file"):
        config.build()
    config.eval_prompts, config.eval_prompts_max_new_tokens = str(root / "asked.txt"), 512
    with pytest.raises(
        ConfigError, match="leaves no room for a prompt in the model's context of 512 tokens"
    ):
        config.build()
    config.eval_prompts = None
    with pytest.raises(ConfigError, match="eval_prompts is not set"):
        config.build()
