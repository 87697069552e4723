"""`kl` is one estimator everywhere, and docs/support.md says which; all others carry their name."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.algorithms.loss_cases import evaluate, make_sample
from tests.docs.test_support import PAGE
from weft import registry
from weft.algorithms.kl import ESTIMATORS, estimate_kl

SRC = registry.ROOT
NAMED = {f"kl_{name}" for name in ESTIMATORS} | {"kl_exact", "approx_kl"}
LOGPROBS, REFERENCE = np.array([-1.0, -2.0, -0.5]), np.array([-1.5, -1.0, -0.7])


@pytest.mark.parametrize("loss", ["ppo_actor", "grpo"])
def test_kl_of_a_policy_node_is_k3_to_the_reference(loss: str) -> None:
    keys = {"logprobs": LOGPROBS, "ref_logprobs": REFERENCE, "advantages": np.ones(3)}
    stats = evaluate(
        registry.losses.get(loss)(),
        make_sample([[3]], keys),
        {"logprobs": LOGPROBS, "entropy": np.ones(3)},
    ).stats
    assert stats["kl"] == pytest.approx(estimate_kl(LOGPROBS, REFERENCE, "k3").mean(), rel=1e-12)


def test_only_what_policies_measure_is_called_kl() -> None:
    makers = {
        str(path.relative_to(SRC))
        for path in SRC.rglob("*.py")
        if re.search(r'(?:record\(|stats\[|^\s+)"kl"(?:,|\]|:)', path.read_text(), re.M)
        and "observe" not in path.parts
    }
    assert makers == {"algorithms/ppo.py"}


def test_the_page_says_which_it_is_and_names_the_others() -> None:
    [said] = [line for line in PAGE.split("\n\n") if line.startswith("The metric `kl`")]
    assert "estimated by k3" in said
    assert all(f"`{name}`" in said for name in NAMED)
