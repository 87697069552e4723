"""docs/support.md lists what the code has, no more and no less."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import pytest

from tests.docs.test_pages import ROOT
from weft import registry
from weft.algorithms.dpo import LOSS_TYPES, REFERENCE_FREE, list_options
from weft.algorithms.kl import ESTIMATORS
from weft.algorithms.ppo import CORRECTIONS, METHODS
from weft.algorithms.preferences import DIVERGENCES
from weft.engine.backends.jax import REFUSED, REFUSED_PARTS
from weft.engine.spec import ATTENTION_KERNELS
from weft.experiments import DistillConfig, GRPOConfig, PPOConfig
from weft.experiments.common import RunConfig
from weft.options import iterate_options
from weft.topology import LETTERS

PAGE = (ROOT / "docs" / "support.md").read_text()
TABLE = re.compile(r"^\|(?P<head>[^\n]*)\|\n\|[-| ]+\|\n(?P<rows>(?:\|[^\n]*\|\n)+)", re.M)


def tables() -> Mapping[str, list[list[str]]]:
    """First cell of the heading -> the rows' cells, for every table of the page."""
    found = {}
    for table in TABLE.finditer(PAGE):
        head = table["head"].split("|")[0].strip().strip("`")
        assert head not in found, f"two tables are called {head!r}"
        found[head] = [
            [cell.strip() for cell in row.strip("|").split("|")]
            for row in table["rows"].splitlines()
        ]
    return found


def choices(option: str, config: RunConfig | None = None) -> tuple[str, ...]:
    return tuple(
        next(
            leaf.type for leaf in iterate_options(config or GRPOConfig()) if leaf.name == option
        ).split("|")
    )


MORE = (
    "grpo.kl_in",
    "grpo.pass_k",
    "grpo.rescale_informative",
    "grpo.normalize_each_reward",
    "grpo.dynamic_sampling",
    "grpo.overlong_buffer",
    "grpo.mask_truncated",
    "reward_by_token",
    "rew_step",
    "reward_column",
    "grpo.ref_ema_eta",
    "ppo.use_adaptive_kl_ctl",
    "ppo.value_norm",
    "ppo.truncated",
)
CHOICES = ("surrogate", "importance_level", "loss_type", "baseline", "scale_rewards")
OFFLOADS = ("offload", "offload_optimizer", "optimizer.offload")
EXPECTED: Mapping[str, Iterable[str]] = {
    "weft quickstart": registry.quickstarts.load_all(),
    "algorithm": registry.quickstarts.load_all(),
    # what auto chooses is one of the others
    "backend by algorithm": set(registry.backends.load_all()) - {"auto"},
    "value": LOSS_TYPES,
    "dpo.f_divergence": DIVERGENCES,
    **{f"grpo.{name}": choices(f"grpo.{name}") for name in CHOICES},
    "distill.loss_type": choices("distill.loss_type", DistillConfig()),
    "sampler_correction": CORRECTIONS,
    "covariance": METHODS,
    "kl_estimator": ESTIMATORS,
    "more options of policies": MORE,
    "verifier": registry.verifiers.load_all(),
    "loss": registry.losses.load_all(),
    "host function": registry.functions.load_all(),
    "dataset form": registry.datasets.load_all(),
    "backend": registry.backends.load_all(),
    "torch only": (*REFUSED, *REFUSED_PARTS, "layout letters `p`, `c`, `e"),
    "attention": set(ATTENTION_KERNELS) - {"auto"},
    "family": registry.families.load_all(),
    "layout letter": LETTERS,
    "to host memory by": OFFLOADS,
    "on a GPU, by option": ("compile", "quantize", "fp8", "flash_attention=fa3"),
}


def test_every_table_is_held_against_the_code() -> None:
    assert set(tables()) == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_table_names_what_there_is(name: str) -> None:
    listed = [row[0].strip("`") for row in tables()[name]]
    own = {n for n in EXPECTED[name] if not _of_a_test(name, n)}
    assert len(listed) == len(set(listed))
    assert set(listed) == own


def test_options_of_policies_exist() -> None:
    names = {
        leaf.name for config in (GRPOConfig(), PPOConfig()) for leaf in iterate_options(config)
    }
    assert set(MORE) <= names | {name.rpartition(".")[0] for name in names}


def _of_a_test(kind: str, name: str) -> bool:
    """Whether a test of this process registered it, or a dialect, which has a page of its own."""
    if name.startswith("test-"):
        return True
    held = {
        "verifier": registry.verifiers,
        "loss": registry.losses,
        "host function": registry.functions,
    }
    held |= {"algorithm": registry.quickstarts, "backend by algorithm": registry.backends}
    held |= {
        "weft quickstart": registry.quickstarts,
        "dataset form": registry.datasets,
        "backend": registry.backends,
    }
    if kind not in held:
        return False
    module = held[kind].get(name).__module__
    return not module.startswith("weft.") or module.startswith("weft.compat.")


def test_the_preference_losses_say_what_they_read() -> None:
    for value, _, reference, divergences, *_ in tables()["value"]:
        assert (reference == "no") == (value.strip("`") in REFERENCE_FREE), value
        assert (divergences == "yes") == ("f_divergence" in list_options(value.strip("`"))), value
