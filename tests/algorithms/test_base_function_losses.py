"""A loss written as one function is the same object to the engine as one written as a class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.algorithms.loss_cases import evaluate, gradients, make_sample
from weft.algorithms.base import exp_ratio, fixed
from weft.errors import ConfigError
from weft.registry import losses, register_loss


@register_loss("test-nll", per="token", by_row=True)
def nll(logprobs: Any, scale: float = 1.0) -> Any:
    return -scale * logprobs, {"nll": -logprobs}


@register_loss("test-dft", per="token", by_row=True)
def dft(logprobs: Any, power: float = 1.0) -> Any:
    return -fixed(exp_ratio(power * logprobs)) * logprobs


@register_loss("test-weighted", per="completion")
def weighted(logprobs: Any, batch: Any, rewards: Any) -> Any:
    return -rewards * batch.sum(logprobs * batch.mask)


@register_loss("test-square", per="completion")
def square(scores: Any, rewards: Any) -> Any:
    return (scores - rewards) ** 2


MASKED = make_sample([[3], [2, 1]], {"loss_mask": [1, 1, 0, 0, 1, 0], "rewards": [1.0, -1.0, 2.0]})
LOGPROBS = np.log([0.5, 0.25, 0.1, 0.1, 0.5, 0.1])


def test_the_mean_is_over_trained_tokens_of_the_minibatch() -> None:
    result = evaluate(losses.get("test-nll")(scale=2.0), MASKED, {"logprobs": LOGPROBS})
    assert result.loss == pytest.approx(2 * 4 * np.log(2) / 3)
    assert result.stats == {"nll": pytest.approx(4 * np.log(2) / 3)}


def test_it_equals_the_shipped_class() -> None:
    own, shipped = losses.get("test-nll")(), losses.get("sft")()
    outputs = {"logprobs": LOGPROBS}
    for parts in (1, 2):
        value, _, by = gradients(own, MASKED, outputs, parts)
        wanted, _, wanted_by = gradients(shipped, MASKED, {**outputs, "top1": np.zeros(6)}, parts)
        assert value == pytest.approx(wanted)
        np.testing.assert_allclose(by["logprobs"], wanted_by["logprobs"])
    assert (own.outputs, own.unit, own.by_row) == (frozenset({"logprobs"}), "sequence", True)
    assert own.denominators(MASKED) == {"tokens": 3.0}


def test_what_is_fixed_has_no_gradient() -> None:
    two = make_sample([[2]], {})
    loss = losses.get("test-dft")()
    assert evaluate(loss, two, {"logprobs": np.log([1 / 2, 1 / 4])}).loss == pytest.approx(
        np.log(2) / 2
    )
    _, _, by = gradients(loss, two, {"logprobs": np.log([1 / 2, 1 / 4])})
    np.testing.assert_allclose(by["logprobs"], [-1 / 4, -1 / 8])


def test_completions_with_a_trained_token_count_and_keys_are_read_by_name() -> None:
    result = evaluate(losses.get("test-weighted")(), MASKED, {"logprobs": LOGPROBS})
    assert losses.get("test-weighted")().denominators(MASKED) == {"completions": 2.0}
    assert result.loss == pytest.approx((3 * np.log(2) - np.log(2)) / 2)


def test_scored_completions_all_count() -> None:
    result = evaluate(losses.get("test-square")(), MASKED, {"scores": [1.0, 1.0, 0.0]})
    assert result.loss == pytest.approx((0 + 4 + 4) / 3)


def test_a_result_of_another_shape_names_the_loss() -> None:
    def summed(logprobs: Any) -> Any:
        return logprobs.sum()

    register_loss("test-summed", summed, per="token")
    with pytest.raises(ConfigError, match=r"test-summed.*shape \(\).*one value per token, \(6,\)"):
        evaluate(losses.get("test-summed")(), MASKED, {"logprobs": LOGPROBS})


def test_options_and_readings_that_are_wrong() -> None:
    with pytest.raises(ConfigError, match="option of loss 'test-dft': 'powr'; did you mean power"):
        losses.get("test-dft")(powr=2.0)

    def blind(advantages: Any) -> Any:
        return advantages

    register_loss("test-blind", blind, per="token")
    with pytest.raises(ConfigError, match="reads no output of the network"):
        losses.get("test-blind")
    with pytest.raises(ConfigError, match="per of loss"):
        register_loss("test-odd", lambda logprobs: logprobs, per="row")
        losses.get("test-odd")


def test_a_loss_is_found_by_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "placed_loss.py"
    file.write_text(
        "from weft import register_loss\n\n\n"
        "@register_loss('placed', per='token')\ndef placed(logprobs):\n    return -logprobs\n"
    )
    for name in ("placed_loss.py:placed", "placed", "placed_loss:placed"):
        assert (
            evaluate(losses.get(name)(), make_sample([[1]], {}), {"logprobs": [-2.0]}).loss == 2.0
        )
    assert "placed_loss.py:placed" in losses
    with pytest.raises(ConfigError, match=r"loss in placed_loss\.py 'plaged'; did you mean placed"):
        losses.get("placed_loss.py:plaged")
    assert not any(":" in name for name in losses.load_all())
