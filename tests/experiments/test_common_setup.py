"""`initial_setup`, ReaL's name for what builds an experiment: a subclass may override it in place
of `build`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.tiny import make_llama, prompt_rows, write_jsonl
from weft.errors import ConfigError
from weft.experiment import Experiment
from weft.experiments import PPOConfig
from weft.experiments.common import build_experiment
from weft.launch import run


@dataclass
class OwnSetup(PPOConfig):
    bonus: float = 2.0

    def initial_setup(self) -> Experiment:
        return (
            super()
            .initial_setup()
            .with_mfc("rew_inf", interface="mine", args={"bonus": self.bonus}, post_hooks=[])
        )


class OwnSetupOfAnother(OwnSetup):
    pass


class OwnBuild(PPOConfig):
    def build(self) -> Experiment:
        return super().build().with_mfc("rew_inf", interface="mine")


class Both(OwnBuild):
    def initial_setup(self) -> Experiment:
        return super().initial_setup()


class EditsRPCs(PPOConfig):
    def initial_setup(self) -> Any:
        experiment: Any = super().initial_setup()
        for rpc in experiment.model_rpcs:
            rpc.post_hooks = []
        return experiment


class ReadsDegrees(PPOConfig):
    def initial_setup(self) -> Any:
        call: Any = self.rew_inf
        assert call.parallel.model_parallel_size == 1


class OwnMistake(PPOConfig):
    def initial_setup(self) -> Any:
        nothing: Any = None
        return nothing.models


class OwnCalls(PPOConfig):
    @property
    def rpcs(self) -> dict[str, Any]:
        return {}


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("setup")
    model = {"path": str(make_llama(folder / "model"))}
    prompts = str(write_jsonl(folder / "prompts.jsonl", prompt_rows()))
    roles = dict.fromkeys(("actor", "critic", "ref", "rew"), model)
    return {"experiment_name": "e", "trial_name": "t", "dataset": {"path": prompts}, **roles}


@pytest.mark.parametrize("config", [OwnSetup, OwnSetupOfAnother, OwnBuild])
def test_what_a_subclass_overrides_is_what_runs(
    config: type[PPOConfig], options: dict[str, Any]
) -> None:
    made = build_experiment(config(**options))
    assert made.get_node("rew_inf").interface == "mine"  # type: ignore[union-attr]
    assert build_experiment(PPOConfig(**options)).get_node("rew_inf").interface != "mine"  # type: ignore[union-attr]


def test_a_shipped_configuration_has_both_names_for_one_experiment(options: dict[str, Any]) -> None:
    config = PPOConfig(**options)
    assert config.initial_setup() == config.build()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            Both,
            "Both overrides build() and initial_setup(), but a run calls only one of them; remove the other",
        ),
        (
            EditsRPCs,
            'return super().initial_setup().with_mfc("rew_inf", interface="NAME", args={...}, post_hooks=[])',
        ),
        (ReadsDegrees, "ReadsDegrees.initial_setup: weft's MFCOptions has no parallel"),
        (
            OwnCalls,
            "OwnCalls defines rpcs, which weft never calls; change a call with "
            "experiment.with_mfc(NAME, ...)",
        ),
    ],
)
def test_what_weft_would_not_follow_is_refused(
    config: type[PPOConfig], message: str, options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as caught:
        build_experiment(config(**options))
    assert message in str(caught.value)
    with pytest.raises(ConfigError):
        run(config(**options))


def test_mistakes_in_the_users_own_code_are_shown_as_they_are(options: dict[str, Any]) -> None:
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'models'"):
        build_experiment(OwnMistake(**options))


def test_options_that_nobody_sets_are_known(options: dict[str, Any]) -> None:
    config = OwnSetup(**options)
    config.ppo.kl_ctl = 0.3
    left = build_experiment(config).left_at_default
    assert {"seed", "bonus", "ppo.gae_lambda", "critic.optimizer.lr"} <= left
    assert not {"ppo.kl_ctl", "actor.path", "experiment_name"} & left
