"""Advantages as host functions: results computed by hand, keys of the graph, and saved state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.bounds import rounded
from weft.algorithms.advantages import GAEAdvantages, GroupAdvantages, compute_gae
from weft.data.sample import SequenceSample
from weft.errors import ConfigError, DataError
from weft.host.advantages import GAEAdvantagesFunction, GroupAdvantagesFunction
from weft.host.base import HostContext, PlainFunction, make_host_function

PER_SEQUENCE = {"rewards", "finished", "scores", "baseline_rewards", "baseline_finished"}


def sample(
    completions: list[list[int]], prompts: list[int] | None = None, **keys: Any
) -> SequenceSample:
    """Return groups of completions; a key has one value per token, completion or id.

    The key `values` has one more value per completion than it has tokens.
    """
    ids = [f"p{n}" for n in range(len(completions))]
    lengths: dict[str, list[list[int]]] = {"completion": completions}
    data: dict[str, Any] = {
        "completion": torch.zeros(sum(map(sum, completions)), dtype=torch.int64)
    }
    if prompts is not None:
        lengths["prompt"] = [[n] for n in prompts]
        data["prompt"] = torch.zeros(sum(prompts), dtype=torch.int64)
    for key, values in keys.items():
        # In float64, so that results are rounded only once.
        data[key] = torch.tensor(values, dtype=torch.float64)
        if key in PER_SEQUENCE:
            one_an_id = len(values) == len(ids)
            lengths[key] = [[1] * (1 if one_an_id else len(group)) for group in completions]
        else:
            lengths[key] = [[n + (key == "values") for n in group] for group in completions]
    return SequenceSample.from_groups(ids, lengths, data)


def call(
    function: Any, batch: SequenceSample
) -> tuple[Mapping[str, list[float]], dict[str, float]]:
    context = HostContext()
    made = function(batch, context)
    return {key: made.data[key].tolist() for key in made.keys}, context.metrics


PLAIN = {"adv_norm": False, "value_norm": False}


# settings with sums that are easy to check
def gae(**options: Any) -> GAEAdvantagesFunction:
    return GAEAdvantagesFunction(GAEAdvantages(**options))


def group(**options: Any) -> GroupAdvantagesFunction:
    return GroupAdvantagesFunction(GroupAdvantages(**options))


by_hand = partial(gae, kl_ctl=0.1, gae_lambda=1.0, truncated="bootstrap")


def test_ppo_by_hand() -> None:
    # Two completions of one prompt. The first has ended with reward 1; the second was cut off with
    # V = 0.4 after it.
    batch = sample(
        [[2, 1]],
        logprobs=[-1.0, -1.0, -2.0],
        ref_logprobs=[-1.5, -1.0, -1.0],
        rewards=[1.0, 9.0],
        values=[0.2, 0.3, 7.0, 0.1, 0.4],
        finished=[1.0, 0.0],
    )
    made, metrics = call(by_hand(kl_ctl=0.1, discount=0.9, gae_lambda=0.5, **PLAIN), batch)
    # KL 0.5, 0, -1; rewards -0.05, 1 and 0.1. deltas: -.05+.27-.2=.02, 1-.3=.7; .1+.36-.1=.36
    assert made["advantages"] == rounded([0.02 + 0.45 * 0.7, 0.7, 0.36], 1)
    assert made["returns"] == rounded([0.535, 1.0, 0.46], 1)
    assert metrics["kl_k1"] == pytest.approx(-0.5 / 3)
    assert metrics["kl_k1_per_completion"] == pytest.approx(-0.25)
    assert metrics["kl_coef"] == 0.1
    assert (metrics["reward"], metrics["truncated_fraction"]) == (5.0, 0.5)
    assert metrics["reward_after_kl"] == pytest.approx((0.95 + 0.1) / 2)


def test_a_cut_completion_may_keep_its_reward() -> None:
    batch = sample([[1, 1]], rewards=[1.0, 3.0], values=[0.0, 5.0, 0.0, 5.0], finished=[1.0, 0.0])
    kept, _ = call(by_hand(kl_ctl=0.0, truncated="score", **PLAIN), batch)
    assert kept["advantages"] == [1.0, 3.0]
    bootstrapped, _ = call(by_hand(kl_ctl=0.0, missing_eos_penalty=0.5, **PLAIN), batch)
    assert bootstrapped["advantages"] == [1.0, 4.5]


def test_reward_shaping() -> None:
    batch = sample([[1], [1]], rewards=[3.0, -100.0], values=[0.0] * 4, finished=[1.0, 1.0])
    function = by_hand(
        kl_ctl=0.0, reward_output_bias=1.0, reward_output_scaling=0.5, max_reward_clip=5.0, **PLAIN
    )
    assert call(function, batch)[0]["advantages"] == [1.0, -5.0]


def test_a_reward_in_place_of_that_of_a_cut_completion() -> None:
    """EasyLM: -10 without end token, then score x gain + bias; here gain 2 and bias 3."""
    batch = sample([[1, 1]], rewards=[1.0, 8.0], values=[0.0] * 4, finished=[1.0, 0.0])
    options = {
        "missing_eos_reward": -10.0,
        "reward_output_scaling": 2.0,
        "reward_output_bias": -1.5,
        "max_reward_clip": None,
    }
    function = by_hand(kl_ctl=0.0, truncated="score", **options, **PLAIN)
    assert call(function, batch)[0]["advantages"] == [2.0 * 1.0 + 3.0, 2.0 * -10.0 + 3.0]
    with pytest.raises(ConfigError, match=r"missing_eos_reward=-10.0 and truncated=bootstrap"):
        gae(missing_eos_reward=-10.0, truncated="bootstrap")


def test_rewards_of_tokens_can_be_whitened_without_their_mean() -> None:
    # Rewards of the tokens: -0.1 x KL, and the completion's at its end: -1, 2 and 2; mean 1,
    # deviation sqrt(3); values 0, so a return is the sum of what follows.
    batch = sample(
        [[2], [1]],
        logprobs=[10.0, 0.0, 0.0],
        ref_logprobs=[0.0, 0.0, 0.0],
        rewards=[2.0, 2.0],
        values=[0.0] * 5,
        finished=[1.0, 1.0],
    )
    function = by_hand(truncated="score", whiten_rewards=True, **PLAIN)
    low, high = 1.0 - 2.0 / math.sqrt(3.0), 1.0 + 1.0 / math.sqrt(3.0)
    returns = call(function, batch)[0]["returns"]
    assert returns == pytest.approx([low + high, high, high], abs=1e-6)


def test_masked_tokens_take_no_time() -> None:
    """Tokens that the policy did not write are skipped, as if they were not there."""
    keys = {"rewards": [1.0], "finished": [1.0]}
    whole = sample(
        [[2]], logprobs=[-1.0, -2.0], ref_logprobs=[-1.2, -1.8], values=[0.1, 0.2, 0.9], **keys
    )
    gapped = sample(
        [[4]],
        logprobs=[-1.0, -5.0, -5.0, -2.0],
        ref_logprobs=[-1.2, 0.0, 0.0, -1.8],
        values=[0.1, 55.0, 55.0, 0.2, 0.9],
        loss_mask=[1.0, 0.0, 0.0, 1.0],
        **keys,
    )
    function = by_hand(discount=0.9, gae_lambda=0.8, **PLAIN)
    one, other = call(function, whole)[0], call(function, gapped)[0]
    for key in ("advantages", "returns"):
        assert [other[key][0], other[key][3]] == one[key]  # the same arithmetic
        assert other[key][1:3] == [0.0, 0.0]


def test_the_reward_goes_to_the_last_trained_token() -> None:
    batch = sample(
        [[3]], rewards=[1.0], finished=[1.0], values=[0.0] * 4, loss_mask=[1.0, 1.0, 0.0]
    )
    assert call(by_hand(kl_ctl=0.0, **PLAIN), batch)[0]["advantages"] == [1.0, 1.0, 0.0]


def test_a_token_that_nothing_precedes_is_not_trained() -> None:
    batch = sample(
        [[2], [2]], prompts=[0, 1], rewards=[1.0, 1.0], finished=[1.0, 1.0], values=[0.0] * 6
    )
    assert call(by_hand(kl_ctl=0.0, **PLAIN), batch)[0]["advantages"] == [0.0, 1.0, 1.0, 1.0]


def test_whitening_is_over_the_whole_batch() -> None:
    batch = sample([[1], [1]], rewards=[1.0, 3.0], values=[0.0] * 4, finished=[1.0, 1.0])
    made, metrics = call(by_hand(kl_ctl=0.0, value_norm=False), batch)
    # `whiten` adds 1e-8 to the variance, 2
    assert made["advantages"] == rounded([-1 / math.sqrt(2 + 1e-8), 1 / math.sqrt(2 + 1e-8)], 1)
    assert metrics["advantage_std"] == pytest.approx(1.0)


def test_values_are_normalised_and_back() -> None:
    """The critic's units are those of past returns.

    The statistics of the first batch convert the second one to the units of rewards.
    """
    rng = np.random.default_rng(0)
    function = by_hand(kl_ctl=0.0, adv_norm=False, value_norm_type="ma")
    plain = by_hand(kl_ctl=0.0, **PLAIN)
    rewards = rng.normal(5.0, 2.0, 8).tolist()
    first = sample([[1]] * 8, rewards=rewards, values=[0.0] * 16, finished=[1.0] * 8)
    made, _ = call(function, first)
    mean, std = np.mean(rewards), np.std(rewards)
    assert made["returns"] == rounded(((np.array(rewards) - mean) / std).tolist(), 1)
    assert made["advantages"] == rounded(rewards, 1)
    raw = rng.normal(0.0, 1.0, 4)
    second = {"rewards": [4.0, 6.0], "finished": [1.0, 1.0]}
    normal, _ = call(function, sample([[1], [1]], values=raw.tolist(), **second))
    direct, _ = call(plain, sample([[1], [1]], values=(raw * std + mean).tolist(), **second))
    assert normal["advantages"] == rounded(direct["advantages"], 2)  # one on each side


def random_batch(seed: int) -> SequenceSample:
    rng = np.random.default_rng(seed)
    completions = [[int(n) for n in rng.integers(1, 6, 2)] for _ in range(4)]
    tokens, sequences = sum(map(sum, completions)), 8
    logprobs = -rng.gamma(1.0, 1.0, tokens)
    return sample(
        completions,
        logprobs=logprobs.tolist(),
        ref_logprobs=(logprobs - rng.gamma(1.0, 3.0, tokens)).tolist(),
        rewards=rng.normal(size=sequences).tolist(),
        values=rng.normal(size=tokens + sequences).tolist(),
        finished=rng.integers(0, 2, sequences).astype(float).tolist(),
    )


def test_state_survives_a_restart() -> None:
    args = {
        "kl_ctl": 0.1,
        "use_adaptive_kl_ctl": True,
        "adaptive_kl_target": 1.0,
        "adaptive_kl_horizon": 20.0,
    }
    whole = make_host_function("gae_advantages", args)
    for step in range(3):
        call(whole, random_batch(step))
    again = make_host_function("gae_advantages", args)
    again.load_state_dict(whole.state_dict())
    one, other = call(whole, random_batch(3)), call(again, random_batch(3))
    assert one == other
    assert one[1]["kl_coef"] > 0.1
    assert call(make_host_function("gae_advantages", args), random_batch(3)) != other


def test_equals_gae_on_its_parts() -> None:
    """The node's advantages are those of the pure function for the shaped rewards."""
    batch = random_batch(7)
    made, _ = call(by_hand(kl_ctl=0.3, kl_estimator="k3", gae_lambda=0.9, **PLAIN), batch)
    data = {key: value.double().numpy() for key, value in batch.data.items()}
    lengths = batch.lengths["completion"].astype(np.int64)
    last = np.cumsum(lengths + 1) - 1
    ratio = data["logprobs"] - data["ref_logprobs"]
    rewards = -0.3 * np.minimum(np.exp(-ratio) - 1 + ratio, 10.0)
    ends = np.cumsum(lengths) - 1
    rewards[ends] += np.where(data["finished"] == 1, data["rewards"], 0.0)
    after = np.where(data["finished"] == 1, 0.0, data["values"][last])
    advantages, returns = compute_gae(
        rewards, np.delete(data["values"], last), after, lengths, lam=0.9
    )
    assert made["advantages"] == rounded(advantages.tolist(), 1)
    assert made["returns"] == rounded(returns.tolist(), 1)


# -- groups


def test_grpo_by_hand() -> None:
    batch = sample([[2, 1], [1, 1]], rewards=[1.0, 0.0, 2.0, 2.0], finished=[1.0] * 4)
    made, metrics = call(group(), batch)
    unit = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert made["advantages"] == rounded([unit, unit, -unit, 0.0, 0.0], 1)
    assert metrics["reward"] == 1.25
    dr_grpo, _ = call(group(scale="none"), batch)
    assert dr_grpo["advantages"] == [0.5, 0.5, -0.5, 0.0, 0.0]
    rloo, _ = call(group(baseline="leave_one_out", scale="none"), batch)
    assert rloo["advantages"] == [1.0, 1.0, -1.0, 0.0, 0.0]


def with_greedy(batch: SequenceSample, lengths: list[int]) -> SequenceSample:
    """Return the batch with a greedy completion for each prompt."""
    tokens = {"baseline_completion": torch.zeros(sum(lengths), dtype=torch.int64)}
    return batch.update(SequenceSample.from_default(batch.ids, lengths, tokens))


def test_remax_by_hand() -> None:
    given = {"baseline_rewards": [0.5, 3.0], "baseline_finished": [1.0, 1.0]}
    batch = with_greedy(
        sample([[2, 1], [1, 1]], rewards=[1.0, 0.0, 2.0, 2.0], finished=[1.0] * 4, **given), [2, 1]
    )
    made, metrics = call(group(baseline="given", scale="none"), batch)
    assert made["advantages"] == [0.5, 0.5, -0.5, -1.0, -1.0]
    assert metrics["baseline_reward"] == pytest.approx(1.75)


def test_remax_penalises_the_greedy_completion_as_it_does_samples() -> None:
    """A policy that always decodes greedily has no advantage, at any length, truncated or not."""
    given = {"baseline_rewards": [1.0, 1.0], "baseline_finished": [1.0, 0.0]}
    batch = with_greedy(
        sample([[8, 3], [10, 3]], rewards=[1.0] * 4, finished=[1.0, 1.0, 0.0, 1.0], **given),
        [8, 10],
    )
    penalties = {
        "overlong_buffer": 4,
        "max_new_tokens": 10,
        "overlong_penalty": 2.0,
        "missing_eos_penalty": 0.5,
    }
    made, metrics = call(group(baseline="given", scale="none", **penalties), batch)
    assert [made["advantages"][start] for start in (0, 8, 11, 21)] == pytest.approx(
        [0.0, 1.0, 0.0, 2.5]
    )
    assert metrics["baseline_reward"] == 1.0, "as the reward gave it"


def test_reinforce_plus_plus_whitens_tokens() -> None:
    batch = sample([[3], [1]], rewards=[1.0, 0.0], finished=[1.0, 1.0])
    made, _ = call(group(baseline="none", scale="none", whiten=True), batch)
    std = math.sqrt(0.25 + 1e-8)  # of 1, 1, 1, 0 with n - 1, and the epsilon of `whiten`
    assert made["advantages"] == rounded([0.25 / std] * 3 + [-0.75 / std], 1)


def test_overlong_penalty_by_hand() -> None:
    batch = sample([[4, 7, 8, 10]], rewards=[0.0] * 4, finished=[1.0, 1.0, 1.0, 0.0])
    function = group(
        baseline="none", scale="none", overlong_buffer=4, max_new_tokens=10, overlong_penalty=2.0
    )
    made, metrics = call(function, batch)
    starts = [0, 4, 11, 19]
    assert [made["advantages"][start] for start in starts] == [0.0, -0.5, -1.0, -2.0]
    assert metrics["overlong_penalty"] == pytest.approx(3.5 / 4)


def test_truncated_completions_can_be_left_out() -> None:
    batch = sample([[2, 1]], rewards=[1.0, 0.0], finished=[0.0, 1.0])
    made, _ = call(group(scale="none", mask_truncated=True), batch)
    assert made["loss_mask"] == [0.0, 0.0, 1.0]
    assert made["advantages"] == [0.0, 0.0, -0.5]


def test_masks_hold_for_groups_too() -> None:
    batch = sample(
        [[2, 2]], rewards=[1.0, 0.0], finished=[1.0, 1.0], loss_mask=[1.0, 0.0, 1.0, 1.0]
    )
    assert call(group(scale="none"), batch)[0]["advantages"] == [0.5, 0.0, -0.5, -0.5]


# -- what is refused


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("gae_advantage", {}, "did you mean gae_advantages"),
        ("gae_advantages", {"gae_lamda": 0.9}, "did you mean gae_lambda"),
        ("gae_advantages", {"kl_estimator": "k4"}, "k1"),
        ("gae_advantages", {"truncated": "drop"}, "bootstrap or score"),
        ("gae_advantages", {"value_norm_type": "popart"}, "exp"),
        ("group_advantages", {"baseline": "groups"}, "did you mean group"),
        ("group_advantages", {"scale": "std"}, "scale"),
        ("group_advantages", {"overlong_buffer": 5}, "max_new_tokens"),
        (
            "group_advantages",
            {"overlong_buffer": 5, "max_new_tokens": 4},
            "must be at most max_new_tokens",
        ),
    ],
)
def test_wrong_arguments_are_refused(name: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_host_function(name, args)


def test_groups_of_one_are_refused() -> None:
    batch = sample([[2], [1]], rewards=[1.0, 0.0], finished=[1.0, 1.0])
    for args in (
        {},
        {"baseline": "leave_one_out", "scale": "none"},
        {"baseline": "none", "scale": "group"},
    ):
        with pytest.raises(ConfigError, match="group_size"):
            call(group(**args), batch)
    assert call(group(baseline="none", scale="none"), batch)[0]["advantages"] == [
        1.0,
        1.0,
        0.0,
    ]


def test_missing_and_misshapen_keys_are_named() -> None:
    batch = sample([[2]], rewards=[1.0], values=[0.0] * 3, finished=[1.0])
    with pytest.raises(DataError, match="ref_logprobs"):
        call(by_hand(), batch)
    short = batch.update(
        SequenceSample.from_groups(["p0"], {"values": [[2]]}, {"values": torch.zeros(2)})
    )
    with pytest.raises(DataError, match="'values'"):
        call(by_hand(kl_ctl=0.0), short)


def test_plain_functions_become_host_functions() -> None:
    from weft.registry import functions

    def shift(batch: SequenceSample, context: HostContext, by: float = 1.0) -> SequenceSample:
        context.record("by", by)
        return batch.select(keys=["rewards"])

    functions.register("test-shift", shift)
    made = make_host_function("test-shift", {"by": 2.0})
    assert isinstance(made, PlainFunction)
    assert made.state_dict() == {}
    _, metrics = call(made, sample([[1]], rewards=[1.0]))
    assert metrics == {"by": 2.0}
    with pytest.raises(ConfigError, match="did you mean by"):
        make_host_function("test-shift", {"bye": 2.0})

    class Stateful:
        def __call__(self, batch: SequenceSample, context: HostContext) -> None: ...

    functions.register("test-no-state", Stateful)
    with pytest.raises(ConfigError, match="state_dict"):
        make_host_function("test-no-state", {})


# -- clips, KL in the reward, parts, steps


def test_no_clip_unless_asked_and_what_is_clipped_is_told() -> None:
    batch = sample([[1, 1], [1, 1]], rewards=[100.0, 0.0, 60.0, 10.0], finished=[1.0] * 4)
    made, metrics = call(group(scale="none"), batch)
    assert (
        made["advantages"] == pytest.approx([50.0, -50.0, 25.0, -25.0])
        and "reward_clipped_fraction" not in metrics
    )
    made, metrics = call(group(scale="none", max_reward_clip=20.0), batch)
    assert (
        made["advantages"] == pytest.approx([10.0, -10.0, 5.0, -5.0])
        and metrics["reward_clipped_fraction"] == 0.5
    )
    values = sample([[1, 1]], rewards=[100.0, 1.0], values=[0.0] * 4, finished=[1.0, 1.0])
    _, metrics = call(by_hand(kl_ctl=0.0, **PLAIN), values)
    assert metrics["reward_clipped_fraction"] == 0.5


def test_kl_in_the_reward_by_hand() -> None:
    # KL (k1) 0.5, 0.5 in the first completion, 0 in the second; coefficient 2.
    keys = {
        "logprobs": [-1.0] * 3,
        "ref_logprobs": [-1.5, -1.5, -1.0],
        "rewards": [3.0, 0.0],
        "finished": [1.0, 1.0],
    }
    batch = sample([[2, 1]], **keys)
    made, metrics = call(group(scale="none", kl_coef=2.0), batch)
    assert made["advantages"] == pytest.approx([0.5, 0.5, -0.5]), "3 - 2 against 0, mean 0.5"
    assert metrics["kl_k1"] == pytest.approx(1 / 3) and metrics[
        "kl_k1_per_completion"
    ] == pytest.approx(0.5)
    made, _ = call(group(baseline="leave_one_out", scale="none", kl_coef=2.0), batch)
    assert made["advantages"] == pytest.approx([1.0, 1.0, -1.0])
    made, _ = call(group(baseline="none", scale="none", kl_coef=2.0), batch)
    assert made["advantages"] == pytest.approx([1.0, 2.0, 0.0]), (
        "a token feels its own penalty and those after it"
    )


def test_opo_pass_k_and_gpg_as_nodes() -> None:
    batch = sample([[1, 3], [2, 2]], rewards=[1.0, 0.0, 1.0, 1.0], finished=[1.0] * 4)
    made, _ = call(group(baseline="opo", scale="none"), batch)
    assert made["advantages"] == pytest.approx([0.75, -0.25, -0.25, -0.25, 0.0, 0.0, 0.0, 0.0])
    made, _ = call(group(scale="none", rescale_informative=True), batch)
    assert made["advantages"][:4] == pytest.approx([1.0, -1.0, -1.0, -1.0]), (
        "twice 0.5: one group of two teaches nothing"
    )
    made, metrics = call(group(pass_k=1), batch)
    assert made["advantages"] == pytest.approx([1.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0])
    assert metrics["pass@1"] == 0.75


def test_parts_are_normalised_one_by_one() -> None:
    batch = sample([[1, 1], [1, 1]], rewards=[0.0] * 4, finished=[1.0] * 4)
    parts = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 9.0], [0.0, 3.0]])
    with_parts = batch.update(
        SequenceSample.from_groups(
            batch.ids, {"reward_parts": [[1, 1]] * 2}, {"reward_parts": parts}
        )
    )
    made, _ = call(group(part_weights=[1.0, 1.0]), with_parts)
    # Of two rewards, 1 and 0 and 9 and 3, each is half their difference from the mean; 1e-4 is
    # added to every deviation.
    first, second = 0.5 / (math.sqrt(0.5) + 1e-4), 3 / (math.sqrt(18) + 1e-4)
    total = np.array([first, -first, first + second, -first - second])
    assert made["advantages"] == rounded((total / (total.std(ddof=1) + 1e-4)).tolist(), 1)


def test_rewards_of_steps_have_advantages_of_their_own() -> None:
    nan = math.nan
    batch = sample(
        [[2, 2]], rewards=[3.0, 1.0], token_rewards=[1.0, 0.0, nan, 1.0], finished=[1.0, 1.0]
    )
    made, _ = call(group(scale="none"), batch)
    # Rewards outside of steps: 2 and 0, so 1 and -1. Rewards of steps: 1, 0 and 1 minus their mean
    # 2/3, summed to the end.
    assert made["advantages"] == rounded([1 + 1 / 3 - 2 / 3, 1 - 2 / 3, -1 + 1 / 3, -1 + 1 / 3], 1)
    values = batch.update(
        SequenceSample.from_groups(batch.ids, {"values": [[3, 3]]}, {"values": torch.zeros(6)})
    )
    made, _ = call(by_hand(kl_ctl=0.0, gae_lambda=1.0, **PLAIN), values)
    assert made["returns"] == pytest.approx([3.0, 2.0, 1.0, 1.0]), (
        "1, then 0 and the outcome 2; 0, then 1 and the outcome 0"
    )


def test_a_loss_mask_reaches_ppos_advantages() -> None:
    batch = sample(
        [[3]], rewards=[1.0], values=[0.0] * 4, finished=[1.0], loss_mask=[1.0, 0.0, 1.0]
    )
    made, _ = call(by_hand(kl_ctl=0.0, discount=0.5, **PLAIN), batch)
    assert made["advantages"] == pytest.approx([0.5, 0.0, 1.0]), (
        "what is not trained takes no time and gets no reward"
    )


@pytest.mark.parametrize("large", [3e38, -1e19])
@pytest.mark.parametrize("function", [gae(kl_ctl=0.0, **PLAIN), group()])
def test_a_reward_with_which_the_loss_is_not_finite_is_named(function: Any, large: float) -> None:
    keys = {"values": [0.0] * 8} if isinstance(function, GAEAdvantagesFunction) else {}
    batch = sample(
        [[1, 1], [1, 1]],
        rewards=[1.0, 2.0, 1.0, large],
        finished=[1.0] * 4,
        logprobs=[-1.0] * 4,
        **keys,
    )
    with pytest.raises(
        DataError,
        match=r"p1: a completion's reward is .*e\+\d\d; the absolute value of a reward must",
    ):
        function(batch, HostContext())
