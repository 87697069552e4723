"""What holds where nobody says: the table of changed defaults in CHANGELOG.md, and what is refused
beside them.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from dataclasses import MISSING, FrozenInstanceError, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.experiments.test_common_build import build, files
from weft import registry
from weft.algorithms.advantages import GAEAdvantages
from weft.algorithms.dpo import PreferenceLossOptions
from weft.algorithms.ppo import PPOActorLoss
from weft.errors import ConfigError
from weft.experiment import Control
from weft.experiments import PPOConfig, SFTConfig
from weft.graph.mfc import HostFunction, Node
from weft.host.base import ConfiguredHostFunction
from weft.host.spec import RewardOptions
from weft.options import IncludedComponent, iterate_options

__all__ = ["files"]  # the folder that `build` finds its models in


def args(name: str, node: str, **options: Any) -> Any:
    return build(name, **options).get_node(node).args


def test_rewards_are_clipped_for_ppo_alone() -> None:
    assert args("grpo", "advantages")["max_reward_clip"] is None
    assert args("ppo", "advantages")["max_reward_clip"] == 20.0
    assert args("grpo", "advantages", **{"grpo.max_reward_clip": 5.0})["max_reward_clip"] == 5.0


def test_gspo_comes_with_its_own_clip() -> None:
    loss = args("grpo", "actor_train", **{"grpo.importance_level": "sequence"})["loss_args"]
    assert (loss["eps_clip"], loss["eps_clip_high"]) == (3e-4, 4e-4)
    loss = args("grpo", "actor_train")["loss_args"]
    assert (loss["eps_clip"], loss["eps_clip_high"]) == (0.2, None), "above as below"


def test_dr_grpo_divides_by_no_deviation() -> None:
    assert args("grpo", "advantages", **{"grpo.loss_type": "dr_grpo"})["scale"] == "none"
    assert args("grpo", "advantages")["scale"] == "group"
    both = {"grpo.loss_type": "dr_grpo", "grpo.scale_rewards": "group"}
    assert args("grpo", "advantages", **both)["scale"] == "group"


@pytest.mark.parametrize("more", [{"grpo.ppo_n_minibatches": 2}, {"grpo.ppo_epochs": 2}])
def test_reinforce_takes_one_update_of_a_batch(more: dict[str, Any]) -> None:
    build("grpo", **{"grpo.surrogate": "reinforce"})
    with pytest.raises(ConfigError, match="reinforce"):
        build("grpo", **{"grpo.surrogate": "reinforce", **more})


def test_simpo_has_the_papers_numbers() -> None:
    loss = args("dpo", "actor_train", **{"dpo.loss_type": "simpo"})["loss_args"]
    assert (loss["beta"], loss["simpo_gamma"]) == (2.0, 1.0)


def test_completions_have_1024_tokens_where_the_context_allows(files: Path) -> None:
    def most(context: int) -> int:
        values = {"model_type": "llama", "vocab_size": 50, "max_position_embeddings": context}
        (files / "m" / "config.json").write_text(json.dumps(values))
        return int(args("grpo", "actor_gen")["max_new_tokens"])

    assert (most(4096), most(512)) == (1024, 256)


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_validation_samples_at_the_training_temperature(name: str, files: Path) -> None:
    options = {
        "dataset.valid_path": "rows.jsonl",
        f"{name}.gen.temperature": 0.7,
        f"{name}.eval_samples": 4,
    }
    experiment = build(name, **options)
    assert experiment.evaluation is not None
    sampling = [
        call for call in experiment.evaluation.graph.list_model_calls() if call.method == "generate"
    ]
    assert [(call.args["temperature"], call.args["samples_per_prompt"]) for call in sampling] == [
        (0.7, 4)
    ]


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_policies_learn_at_a_constant_rate_after_warm_up(name: str) -> None:
    for spec in build(name).roles.values():
        if spec.trained:
            assert spec.optimizer.lr_scheduler_type == "constant"


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_a_mask_of_the_sampling_call_reaches_advantages_and_losses(name: str) -> None:
    experiment = build(name)
    assert "loss_mask" in experiment.get_node("actor_gen").output_keys
    trained = [
        call.name for call in experiment.graph.list_model_calls() if call.method == "train_step"
    ]
    for reader in ("advantages", *trained):
        node = experiment.get_node(reader)
        assert "loss_mask" in (*node.input_keys, *node.optional_inputs), reader


# Parameters that share the name of an option, and stand for something else where no configuration
# is.
OF_THEIR_OWN = {
    "kl_coef": "without a node that scores with a reference there is no KL to weigh",
    "kl_estimator": "the option is settled by whether the KL is in the reward or in the loss",
    "samples_per_prompt": (
        "the algorithm compares completions of a prompt, generation alone does not"
    ),
    "top_k": (
        "of distillation it is how many of the teacher's tokens are kept, of inference alone "
        "no tokens are asked for"
    ),
}


# Components that each configuration includes.
COMPONENTS = {
    "dpo": "PreferenceLossOptions",
    "distill": "GKDLoss TeacherAdvantages",
    "gen": "",
    "grpo": "GRPOLoss GroupAdvantages HighCovariance PassRates RewardOptions SamplerCorrection",
    "online_dpo": "PairLossOptions PassRates PreferencesByReward RewardOptions",
    "ppo": (
        "GAEAdvantages HighCovariance PPOActorLoss PPOCriticLoss PassRates RewardOptions "
        "SamplerCorrection"
    ),
    "rw": "RewardLoss",
    "sft": "SFTLoss",
}
SHIPPED = tuple(COMPONENTS)


def components_of(group: Any) -> list[IncludedComponent]:
    """Return the components of a group of options, without those of its groups."""
    names = {name for cls in type(group).__mro__ for name in vars(cls)}
    parts = [inspect.getattr_static(type(group), name) for name in sorted(names)]
    return [part for part in parts if isinstance(part, IncludedComponent)]


def groups_of(config: Any) -> Iterator[Any]:
    """Yield the configuration and all groups of options in it."""
    yield config
    for spec in fields(config):
        if is_dataclass(value := getattr(config, spec.name)):
            yield from groups_of(value)


@pytest.mark.parametrize("name", SHIPPED)
def test_an_option_of_a_component_is_defined_there_alone(name: str) -> None:
    included = set()
    for group in groups_of(registry.quickstarts.get(name)()):
        defined: dict[str, Any] = {}
        for part in components_of(group):
            included.add(part.component.__name__)
            own = {spec.name for spec in fields(part.component)} - set(part.attributes)
            there = {spec.name for spec in fields(group)}
            assert own & there <= OF_THEIR_OWN.keys(), "an option's name with a second default"
            for option_name, spec in part.options.items():
                assert defined.setdefault(option_name, spec) is spec, "two definitions"
        for spec in fields(group):
            if spec.name in defined:
                source = defined[spec.name]
                assert (spec.default, spec.metadata) == (source.default, source.metadata)
                assert spec.default_factory is source.default_factory
    assert included == set(COMPONENTS[name].split())


def test_losses_and_host_functions_have_no_defaults_beside_the_options() -> None:
    """Each is configured by a component, or all its arguments are required."""
    configs = [registry.quickstarts.get(name)() for name in SHIPPED]
    parts = [part for each in configs for group in groups_of(each) for part in components_of(group)]
    included = {part.component for part in parts}
    for things in (registry.functions, registry.losses):
        for name in things.load_all():
            thing = things.get(name)
            if inspect.isclass(thing) and issubclass(thing, ConfiguredHostFunction):
                thing = thing.options_class
            thing = getattr(thing, "function", thing)  # a filter
            if thing in included or not thing.__module__.startswith("weft."):
                continue
            given = inspect.signature(thing).parameters.values()
            defaults = {each.name: each.default for each in given if each.default is not each.empty}
            known = {spec.name: spec.default for spec in fields(PreferenceLossOptions)}
            allowed = known if name == "dpo" else {}  # a function that reads them from there
            assert defaults.items() <= allowed.items(), name


def test_components_are_attributes_with_the_values_of_the_options() -> None:
    config = PPOConfig(reward="length", reward_timeout_s=5.0)
    config.ppo.gae_lambda = 0.9
    assert config.ppo.advantages == GAEAdvantages(gae_lambda=0.9)
    assert config.rewards == RewardOptions("length", timeout_s=5.0)
    config.ppo.loss = PPOActorLoss(eps_clip=0.1)
    assert config.ppo.eps_clip == 0.1
    config = replace(config, ppo=replace(config.ppo, kl_ctl=0.0))
    assert (config.ppo.advantages.kl_ctl, config.ppo.advantages.gae_lambda) == (0.0, 0.9)
    with pytest.raises(FrozenInstanceError):
        config.ppo.loss.eps_clip = 0.3


def own_defaults(node: Node) -> dict[str, Any]:
    """Return parameter -> default of what a node runs: its host function, or its interface and its
    loss.
    """
    if isinstance(node, HostFunction):
        function = registry.functions.get(node.function)
        things = [getattr(function, "options_class", function)]
    else:
        things = [registry.interfaces.get(node.interface)]
        things += [registry.losses.get(node.args["loss"])] if "loss" in node.args else []
    parameters = [each for thing in things for each in inspect.signature(thing).parameters.values()]
    return {
        each.name: each.default
        for each in parameters
        if each.default is not inspect.Parameter.empty
    }


@pytest.mark.parametrize("name", ["dpo", "distill", "grpo", "online_dpo", "ppo", "rw", "sft"])
def test_an_option_has_one_default_wherever_it_is_set(name: str) -> None:
    """What a node is built with where an option is left out is what it has by itself, without a
    configuration.
    """
    group = f"{registry.quickstarts.get(name).algorithm}."
    options = {
        leaf.name.removeprefix(group): leaf.default
        for leaf in iterate_options(registry.quickstarts.get(name)())
        if leaf.name.startswith(group)
    }
    for node in build(name).graph.nodes:
        own = own_defaults(node)
        shared = own.keys() & options.keys() - OF_THEIR_OWN.keys()
        assert {key: own[key] for key in shared} == {key: options[key] for key in shared}, node.name


def test_the_run_options_have_the_defaults_of_what_the_runtime_reads() -> None:
    options = {leaf.name: leaf.default for leaf in iterate_options(SFTConfig())}
    own = {spec.name: spec.default for spec in fields(Control) if spec.default is not MISSING}
    shared = own.keys() & options.keys() - {"imports"}  # none of either: a tuple there, a list here
    assert len(shared) > 20
    assert {name: own[name] for name in shared} == {name: options[name] for name in shared}
