"""The Triton store: its module, loaded with torch alone, scores like weft's own network at any
length.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.evaluation.test_answers_rewards import make_scorer
from tests.roundings import assert_computed
from tests.serve.serving import make_reward
from tests.tiny import make_llama
from weft.checkpoints import hf_io
from weft.cli.main import main
from weft.compat import triton
from weft.engine.spec import ModelSpec
from weft.errors import CheckpointError, ConfigError
from weft.models.network.packed import pack
from weft.registry import backends
from weft.serve.worker import build_sample
from weft.topology import Layout

ROWS = [[5 + n % 300 for n in range(length)] for length in (600 % 500, 3, 40, 1)]


def padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=torch.int32)
    mask = torch.tensor(
        [[1] * len(row) + [0] * (longest - len(row)) for row in rows], dtype=torch.int32
    )
    return ids, mask


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("triton")
    make_llama(folder / "policy")
    make_reward(folder / "reward")
    return folder


def check_scores(path: Path, rows: list[list[int]], made: torch.Tensor, own: Any) -> None:
    """Check that both equal the scores of `rows` by weft's network, up to float32 rounding."""
    wide = hf_io.load(path, "score", dtype=torch.float64)
    whole = pack([torch.tensor(row) for row in rows])
    assert_computed(
        [made[:, 0], torch.as_tensor(own)],
        lambda: 2 * [wide(whole, frozenset({"scores"}))["scores"]],
        draws=8,
    )


def test_a_reward_model_scores_alike(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["convert", "triton", str(root / "reward"), str(root / "rm"), "--triton_mode", "rm"])
        == 0
    )
    assert not capsys.readouterr().err, "libraries are not heard"
    store = root / "rm" / "reward"
    module = torch.jit.load(str(store / "1" / "model.pt"))
    engine = backends.get("torch")(
        ModelSpec(path=str(root / "reward"), head="score", device="cpu"), Layout()
    )
    own = engine.forward(
        build_sample(ROWS, [len(row) - 1 for row in ROWS]), frozenset({"scores"})
    ).data["scores"]
    made = module(*padded(ROWS))
    assert made.shape == (4, 1)
    check_scores(root / "reward", ROWS, made, own)
    config = (store / "config.pbtxt").read_text()
    assert re.findall(r'name: "(\w+)"', config) == [
        "reward",
        "input_ids",
        "attention_mask",
        "rewards",
    ]
    assert config.count("{") == config.count("}") and config.count("dims: [ -1 ]") == 2


def test_a_policy_gives_the_same_log_probs(root: Path) -> None:
    folder = triton.write(str(root / "policy"), root / "sft", "sft", "mine")
    module = torch.jit.load(str(folder / "1" / "model.pt"))
    rows = [row for row in ROWS if len(row) > 1]
    engine = backends.get("torch")(ModelSpec(path=str(root / "policy"), device="cpu"), Layout())
    own = engine.forward(build_sample(rows, [1] * len(rows)), frozenset({"logprobs"})).sequences(
        "logprobs"
    )
    logprobs, logits = module(*padded(rows))
    wide = hf_io.load(root / "policy", dtype=torch.float64)
    whole = pack([torch.tensor(row) for row in rows])
    told = [logprobs[index, 1 : len(row)] for index, row in enumerate(rows)]
    assert_computed(
        [torch.cat(told), torch.cat([torch.as_tensor(part) for part in own])],
        lambda: 2 * [wide(whole, frozenset({"logprobs"}))["logprobs"]],
    )
    assert logits.shape == (*logprobs.shape, 320)
    for index, row in enumerate(rows):
        assert (logprobs[index, len(row) :] == 0).all() and logprobs[index, 0] == 0
    assert (folder.name, "logits" in (folder / "config.pbtxt").read_text()) == ("mine", True)


def test_the_mean_over_tokens_is_kept(root: Path) -> None:
    mean = make_reward(root / "mean", weft_pooling="mean")
    module = torch.jit.load(str(triton.write(str(mean), root / "rm-mean", "rm") / "1" / "model.pt"))
    engine = backends.get("torch")(
        ModelSpec(path=str(mean), head="score", pooling="mean", device="cpu"), Layout()
    )
    own = engine.forward(
        build_sample(ROWS, [len(row) - 1 for row in ROWS]), frozenset({"scores"})
    ).data["scores"]
    check_scores(mean, ROWS, module(*padded(ROWS)), own)


def test_padding_that_ends_texts_is_skipped_as_the_engine_skips_it(root: Path) -> None:
    odd = make_reward(root / "odd", pad_token_id=2)  # the end token
    assert main(["convert", "triton", str(odd), str(root / "rm-odd"), "--triton_mode", "rm"]) == 0
    module = torch.jit.load(str(root / "rm-odd" / "odd" / "1" / "model.pt"))
    engine = backends.get("torch")(ModelSpec(path=str(odd), head="score", device="cpu"), Layout())
    rows = [[5, 6, 7, 2], [5, 6, 7], [2, 2]]
    own = engine.forward(
        build_sample(rows, [len(row) - 1 for row in rows]), frozenset({"scores"})
    ).data["scores"]
    # a text that consists of padding gets its last token's score
    check_scores(odd, [[5, 6, 7], [5, 6, 7], [2, 2]], module(*padded(rows)), own)
    assert own[0] == own[1]


def test_what_cannot_be_converted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="is a language model; write --triton_mode sft"):
        triton.write(str(root / "policy"), root / "x", "rm")
    with pytest.raises(ConfigError, match="is a reward model; write --triton_mode rm"):
        triton.write(str(root / "reward"), root / "x", "sft")
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "mistral",
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        sliding_window=8,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(root / "window")
    with pytest.raises(ConfigError, match="sees 8 tokens in some layers"):
        triton.write(str(root / "window"), root / "x", "sft")
    monkeypatch.setattr(triton, "_measure_difference", lambda *_: 0.5)
    with pytest.raises(CheckpointError, match=r"differs from the network by 0\.5"):
        triton.write(str(root / "reward"), root / "x", "rm")
    assert not (root / "x").exists()


def test_a_reward_model_is_one_to_the_store(tmp_path: Path) -> None:
    model = make_scorer(tmp_path / "rm")
    triton.write(str(model), tmp_path / "store", "rm", "reward")
    with pytest.raises(ConfigError, match="is a reward model; write --triton_mode rm"):
        triton.write(str(model), tmp_path / "store", "sft")
