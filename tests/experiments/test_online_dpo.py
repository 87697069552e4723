"""Online DPO: its graph and keys, what it refuses, and short real runs in which it learns."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.bounds import gamma
from tests.tiny import make_llama, prompt_rows, write_jsonl
from weft import registry
from weft.algorithms.dpo import find_default_beta
from weft.algorithms.preferences import KINDS, PAIRS
from weft.cli import overrides
from weft.cli.quickstart import apply_overrides
from weft.errors import ConfigError, UserError
from weft.experiment import Experiment
from weft.experiments.dpo import DPOOptions
from weft.experiments.online_dpo import OnlineDPOConfig, OnlineDPOOptions
from weft.graph.mfc import HostFunction, ParamSync
from weft.launch import RunResult, run
from weft.options import iterate_options

# up to 20 characters, the more the better
LONG = "reward=[{name: length, args: {unit: chars, min: 20, slack: 20}}]"


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("material")
    make_llama(folder / "m")
    write_jsonl(folder / "prompts.jsonl", prompt_rows(16))
    return folder


def config(material: Path, *words: str) -> OnlineDPOConfig:
    """The configuration as the command line makes it; `@` is the folder of the model and the rows."""
    common = (
        "experiment_name=e",
        "trial_name=t",
        "progress=false",
        "actor.path=@m",
        "dataset.path=@prompts.jsonl",
    )
    if not any(word.startswith(("reward=", "rew.path=")) for word in words):
        common += (LONG,)
    spelled = [word.replace("@", f"{material}/") for word in (*common, *words)]
    return apply_overrides(OnlineDPOConfig(), overrides.parse(spelled))[0]


def build(material: Path, *words: str) -> Experiment:
    experiment = config(material, *words).build()
    experiment.check()
    return experiment


# -- the graph


def test_nodes_and_keys(material: Path) -> None:
    experiment = build(material, "dataset.train_bs_n_seqs=4")
    assert experiment.graph.order == (
        "actor_gen",
        "reward",
        "preferences",
        "ref_inf",
        "actor_train",
    )
    preferences, train = experiment.get_node("preferences"), experiment.get_node("actor_train")
    assert isinstance(preferences, HostFunction) and preferences.function == "preferences_by_reward"
    assert (preferences.inputs, preferences.outputs) == (
        ("completion", "rewards", "finished"),
        ("rank", "comparison"),
    )
    assert set(train.inputs) == {"prompt", "completion", "rank", "comparison", "ref_logprobs"}
    assert train.args["loss"] == "dpo"
    assert (train.args["loss_args"]["loss_type"], train.args["loss_args"]["beta"]) == (
        "sigmoid",
        0.1,
    )
    assert experiment.get_node("actor_gen").args["samples_per_prompt"] == 2
    assert {node.batch_size for node in experiment.graph.nodes} == {4}
    assert experiment.saved_roles == ("actor",)


def test_what_makes_the_pairs_and_what_reads_them_get_their_options(material: Path) -> None:
    shape = (
        "max_reward_clip=5.0",
        "reward_output_scaling=2.0",
        "reward_output_bias=0.5",
        "missing_eos_penalty=1.0",
    )
    loss = ("label_smoothing=0.1", "beta=0.3", "rpo_alpha=0.2", "f_divergence=alpha", "f_alpha=0.7")
    experiment = build(material, *(f"online_dpo.{word}" for word in ("pairs=all", *shape, *loss)))
    preferences = experiment.get_node("preferences")
    assert isinstance(preferences, HostFunction)
    assert preferences.args == {
        "pairs": "all",
        "max_reward_clip": 5.0,
        "reward_output_scaling": 2.0,
        "reward_output_bias": 0.5,
        "missing_eos_penalty": 1.0,
        "missing_eos_reward": None,
    }
    given = experiment.get_node("actor_train").args["loss_args"]
    assert (given["label_smoothing"], given["beta"], given["rpo_alpha"]) == (0.1, 0.3, 0.2)
    assert (given["f_divergence"], given["f_alpha"]) == ("alpha", 0.7)


def test_a_reward_model_alone_or_with_a_function(material: Path) -> None:
    alone = build(material, "reward_model_path=@m", "reward=null")
    assert alone.graph.order == ("actor_gen", "rew_inf", "preferences", "ref_inf", "actor_train")
    both = build(material, "rew.path=@m", LONG)
    assert both.graph.order[:4] == ("actor_gen", "rew_inf", "reward", "preferences")
    assert both.roles["rew"].head == "score"


def test_a_loss_without_a_reference_has_none(material: Path) -> None:
    for kind in ("simpo", "orpo"):
        experiment = build(material, f"loss_type={kind}")
        assert experiment.graph.order == ("actor_gen", "reward", "preferences", "actor_train")
        assert list(experiment.roles) == ["actor"]
    assert (
        build(material, "loss_type=simpo").get_node("actor_train").args["loss_args"]["beta"] == 2.0
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_loss_of_pairs_builds(material: Path, kind: str) -> None:
    more = ("label_smoothing=0.1",) if kind == "robust" else ()
    assert (
        build(material, f"loss_type={kind}", *more)
        .get_node("actor_train")
        .args["loss_args"]["loss_type"]
        == kind
    )


def test_the_actor_is_trained_as_the_policies_of_other_methods_are(material: Path) -> None:
    rates = [
        build(material, *words).roles["actor"].optimizer.lr
        for words in ((), ("actor.lora.r=4",), ("learning_rate=2e-6",))
    ]
    assert rates == [1e-6, 1e-5, 2e-6]
    assert build(material).roles["actor"].optimizer.lr_scheduler_type == "constant"
    assert build(material).roles["ref"].path == build(material).roles["actor"].path
    syncs = build(material, "online_dpo.ref_ema_eta=0.1").graph.syncs
    assert list(syncs) == [ParamSync("actor", "ref", 0.1, after="actor_train")]


def test_actor_and_reference_score_at_the_temperature_and_on_the_tokens_of_the_sampler(
    material: Path,
) -> None:
    experiment = build(material, "temperature=0.7", "top_k=5")
    for name in ("ref_inf", "actor_train"):
        node = experiment.get_node(name)
        assert node.args["temperature"] == 0.7
        assert {"support", "support_counts"} <= set(node.inputs)


def test_what_a_step_does_is_counted_and_said(material: Path) -> None:
    words = (
        "dataset.train_bs_n_seqs=8",
        "online_dpo.samples_per_prompt=4",
        "online_dpo.ppo_epochs=2",
    )
    experiment = build(material, *words, "online_dpo.mini_batch_size=8", "max_new_tokens=6")
    assert experiment.updates_per_firing == {"actor_train": 8}
    assert experiment.get_node("actor_train").args["num_minibatches"] == 4
    assert experiment.plan_notes == (
        "completions of at most 6 tokens, prompts of at most 506",
        "a step's completions are trained on in minibatches of 8, for 2 epochs",
        "preferences: one pair per prompt, the best and the worst of its 4 completions, if their "
        "rewards differ",
    )
    every = build(material, *words, "online_dpo.pairs=all")
    assert every.plan_notes[-1] == "preferences: 6 pairs per prompt, without those of equal rewards"
    assert build(material).updates_per_firing == {"actor_train": 1}


def test_validation_samples_and_rewards(material: Path) -> None:
    assert build(material).evaluation is None
    evaluation = build(material, "dataset.valid_split=0.25", "online_dpo.eval_samples=3").evaluation
    assert evaluation is not None
    assert evaluation.graph.order == ("actor_gen", "reward", "pass_rates")
    assert evaluation.graph.get_node("actor_gen").args["samples_per_prompt"] == 3


# -- options


def test_options_that_are_dpos_have_its_defaults_and_words() -> None:
    dpo = {spec.name: spec for spec in fields(DPOOptions)}
    shared = [
        spec for spec in fields(OnlineDPOOptions) if spec.name in dpo and spec.name != "loss_type"
    ]
    assert len(shared) == 7
    for spec in shared:
        assert (spec.default, spec.metadata) == (dpo[spec.name].default, dpo[spec.name].metadata)
    own = {spec.name: spec for spec in fields(OnlineDPOOptions)}
    assert own["pairs"].metadata["choices"] == PAIRS


def test_options_without_a_meaning_here_do_not_exist() -> None:
    names = {leaf.name for leaf in iterate_options(OnlineDPOConfig())}
    there = {name.removeprefix("online_dpo.") for name in names}
    policy = {
        leaf.name.removeprefix("grpo.")
        for leaf in iterate_options(registry.quickstarts.get("grpo")())
    }
    assert "sampler_correction" in policy and "actor_inf.deadline_s" in policy
    gone = (
        "sampler_correction",
        "covariance",
        "entropy_coef",
        "dual_clip",
        "early_stop_kl",
        "kl_coef",
    )
    assert not there & {*gone, "actor_inf.deadline_s", "desirable_weight", "cache_ref_logprobs"}


@pytest.mark.parametrize(
    ("word", "option", "value"),
    [
        ("beta=0.3", "beta", 0.3),
        ("loss_type=ipo", "loss_type", "ipo"),
        ("missing_eos_penalty=1.0", "missing_eos_penalty", 1.0),
        ("max_new_tokens=9", "gen.max_new_tokens", 9),
        ("temperature=0.9", "gen.temperature", 0.9),
        ("num_generations=4", "samples_per_prompt", 4),
    ],
)
def test_names_of_other_libraries(material: Path, word: str, option: str, value: Any) -> None:
    read = {leaf.name: leaf.default for leaf in iterate_options(config(material, word))}
    assert read[f"online_dpo.{option}"] == value
    assert config(material, "reward_model_path=@m").rew.path == f"{material}/m"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("online_dpo.samples_per_prompt=1", "online_dpo.samples_per_prompt=1: must be at least 2"),
        ("online_dpo.gen.greedy=true", "greedy completions of one prompt are all the same"),
        ("online_dpo.pairs=some", "online_dpo.pairs='some': must be one of best_worst, all"),
        (
            "loss_type=kto",
            "online_dpo.loss_type='kto': needs answers labelled good or bad",
        ),
        ("loss_type=bco", "bco_pair is bco's loss of a pair"),
        ("loss_type=aot", "online_dpo.loss_type='aot': sorts the scores of a whole batch"),
        ("loss_type=sigmod", "online_dpo.loss_type='sigmod': must be one of sigmoid"),
        ("beta=0", "online_dpo.beta=0.0 must be above 0"),
        (
            "loss_type=hinge label_smoothing=0.1",
            "online_dpo.label_smoothing=0.1 has no meaning for online_dpo.loss_type=hinge",
        ),
        ("loss_type=orpo online_dpo.ref_ema_eta=0.1", "online_dpo.loss_type=orpo has none"),
        ("online_dpo.mini_batch_size=3", "must be a multiple of online_dpo.samples_per_prompt=2"),
        ("online_dpo.mini_batch_size=6", "must divide the 16 completions"),
        ("online_dpo.ppo_n_minibatches=16", "must divide the 8 prompts of a step"),
        ("reward=null", "rew.path and reward are both missing"),
        (
            "loss_type=simpo ref_inf.deadline_s=9",
            "ref_inf.*: these options are for a call that is not in this graph",
        ),
        ("actor_inf.deadline_s=9", "unknown option 'actor_inf.deadline_s'"),
        ("preferences.deadline_s=9", "'preferences' is a host function"),
    ],
)
def test_what_cannot_be_is_refused_by_name_and_rule(
    material: Path, words: str, message: str
) -> None:
    with pytest.raises(UserError) as caught:
        build(material, "dataset.train_bs_n_seqs=8", *words.split())
    assert message in str(caught.value)


def test_a_loss_that_is_set_in_code_is_refused_too(material: Path) -> None:
    made = config(material)
    made.online_dpo.loss_type = "aot_unpaired"
    with pytest.raises(ConfigError, match="loss_type='aot_unpaired': sorts the scores"):
        made.build()


# -- real runs


def trained(material: Path, folder: Path, *words: str) -> RunResult:
    return run(config(material, f"fileroot={folder}", "max_new_tokens=6", *words))


@pytest.mark.slow
def test_it_learns_from_a_reward(material: Path, tmp_path: Path) -> None:
    words = (
        "dataset.train_bs_n_seqs=12",
        "online_dpo.samples_per_prompt=4",
        "actor.optimizer.lr=1e-2",
        "actor.dtype=float64",
    )
    more = (
        "total_train_epochs=24",
        "dataset.valid_split=0.25",
        "eval_freq_epochs=12",
        "online_dpo.eval_samples=4",
    )
    steps = trained(material, tmp_path, *words, *more).metrics
    first, last = steps[0], steps[-1]
    assert len(steps) == 24
    # The actor is the reference: every pair's loss is -log sigmoid(0), whatever was sampled. It is
    # float64, and the reference's log-probs are stored in float32.
    logps = [first[f"actor_train/logps/{side}"] for side in ("chosen", "rejected")]
    stored = find_default_beta("sigmoid") * gamma(1) * -sum(logps)
    assert first["actor_train/loss"] == pytest.approx(math.log(2.0), abs=stored / 2 + 1e-12)
    assert first["actor_train/rewards/margins"] == pytest.approx(0.0, abs=stored + 1e-12)
    assert last["actor_train/rewards/margins"] > 0.3
    assert last["actor_train/loss"] < 0.6
    assert first["preferences/reward"] < 0.45 and last["preferences/reward"] > 0.9
    assert first["preferences/reward"] == pytest.approx(first["reward/reward"])
    assert {
        "preferences/tied_fraction",
        "preferences/reward_margin",
        "actor_train/logps/chosen",
    } <= first.keys()
    evaluated = [step["eval/avg@4"] for step in steps if "eval/avg@4" in step]
    assert len(evaluated) == 2 and evaluated[0] < evaluated[1] and evaluated[1] > 0.9


def test_a_batch_of_equal_rewards_changes_nothing(material: Path, tmp_path: Path) -> None:
    done = trained(
        material, tmp_path, "reward=length", "dataset.train_bs_n_seqs=8", "actor.optimizer.lr=1e-2"
    )
    assert [step["preferences/tied_fraction"] for step in done.metrics] == [1.0, 1.0]
    assert all(step["actor_train/skipped_updates"] == 1.0 for step in done.metrics)
    assert not any("actor_train/rewards/margins" in step for step in done.metrics)
    before, after = (
        load_file(folder / "model.safetensors")
        for folder in (material / "m", done.checkpoint("actor"))
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_reward_model_a_moving_reference_minibatches_and_all_pairs(
    material: Path, tmp_path: Path
) -> None:
    words = (
        "rew.path=@m",
        LONG,
        "rew_weight=0.1",
        "online_dpo.pairs=all",
        "num_generations=3",
        "top_k=40",
        "loss_type=ipo",
    )
    more = ("online_dpo.mini_batch_size=6", "online_dpo.ppo_epochs=2", "online_dpo.ref_ema_eta=0.5")
    done = trained(
        material, tmp_path, *words, *more, "dataset.train_bs_n_seqs=4", "learning_rate=1e-3"
    )
    assert len(done.metrics) == 4
    for step in done.metrics:
        assert {"rew_inf/reward", "reward/reward", "actor_train/rewards/accuracies"} <= step.keys()
        # no two scores of the reward model are equal
        assert step["preferences/tied_fraction"] == 0.0
        assert step["actor_train/num_tokens"] > 0
    log = (done.directory / "log.txt").read_text()
    assert "in minibatches of 6, for 2 epochs" in log and "12 completions, 4 optimizer steps" in log
