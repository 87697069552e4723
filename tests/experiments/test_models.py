"""Names of models in a configuration: what they become, what a run that goes on makes of them, and
which backend runs them.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from weft.errors import CheckpointError, ConfigError
from weft.experiments import DPOConfig, PPOConfig, SFTConfig
from weft.experiments.models import find_option_role, resolve_models, resolve_roles
from weft.options import to_mapping


def checkpoint(run: Path, name: str, **values: Any) -> Path:
    """A model directory as far as its configuration goes."""
    folder = run / "checkpoints" / name
    folder.mkdir(parents=True)
    llama = {"model_type": "llama", "max_position_embeddings": 64, "vocab_size": 300}
    (folder / "config.json").write_text(json.dumps(llama | values))
    (folder / "model.safetensors").touch()
    (folder / "tokenizer.json").write_text("{}")
    (run / "config.yaml").write_text("{}\n")
    return folder


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    checkpoint(tmp_path / "runs" / "e" / "sft", "model/step2")
    checkpoint(
        tmp_path / "runs" / "e" / "rm",
        "model/step3",
        architectures=["LlamaForSequenceClassification"],
    )
    for role in ("actor", "critic"):
        checkpoint(tmp_path / "runs" / "e" / "ppo", f"{role}/step4")
    return tmp_path / "runs"


def config(cls: type[Any], **more: Any) -> Any:
    return cls(
        **{"experiment_name": "e", "trial_name": "new", "dataset": {"path": "rows.jsonl"}, **more}
    )


def test_every_role_takes_what_serves_as_it(runs: Path) -> None:
    paths = {
        "actor": "runs/e/ppo",
        "critic": "runs/e/ppo",
        "ref": "runs/e/sft@step2",
        "rew": "e/rm",
    }
    experiment = config(PPOConfig, **{role: {"path": path} for role, path in paths.items()}).build()
    found = {role: spec.path for role, spec in experiment.roles.items()}
    assert found == {
        "actor": "runs/e/ppo/checkpoints/actor/step4",
        "critic": "runs/e/ppo/checkpoints/critic/step4",
        "ref": "runs/e/sft/checkpoints/model/step2",
        "rew": "runs/e/rm/checkpoints/model/step3",
    }
    assert {role: experiment.config[role]["path"] for role in found} == found, (
        "config.yaml says what was taken"
    )
    notes = " ".join(experiment.plan_notes)
    assert (
        "actor.path='runs/e/ppo': the newest checkpoint of actor" in notes
        and "rew.path='e/rm': taken as a run" in notes
    )


def test_the_configuration_itself_stays_as_it_was(runs: Path) -> None:
    given = config(SFTConfig, model={"path": "runs/e/sft"})
    before = to_mapping(given)
    given.build()
    assert to_mapping(given) == before


def test_a_tokenizer_may_be_that_of_a_run(runs: Path) -> None:
    path = "runs/e/sft"
    found = resolve_models(
        config(SFTConfig, model={"path": "runs/e/sft@step2", "tokenizer": {"path": path}})
    )
    assert found.model.tokenizer.path == "runs/e/sft/checkpoints/model/step2"
    (runs / "tok").mkdir()
    (runs / "tok" / "tokenizer.json").write_text("{}")
    found = resolve_models(
        config(SFTConfig, model={"path": path, "tokenizer": {"path": "runs/tok"}})
    )
    assert found.model.tokenizer.path == "runs/tok"


def test_a_run_that_goes_on_keeps_the_model_it_began_with(runs: Path) -> None:
    given = config(SFTConfig, model={"path": "runs/e/sft"})
    first = given.build().config
    (runs / "e" / "new").mkdir()
    (runs / "e" / "new" / "config.yaml").write_text(yaml.safe_dump(first))
    checkpoint(runs / "e" / "sft", "model/step9")
    assert given.build().config == first, "the same command is the same configuration"
    other = config(SFTConfig, trial_name="other", model={"path": "runs/e/sft"})
    assert other.build().config["model"]["path"].endswith("step9")
    resumed = config(
        SFTConfig,
        trial_name="other",
        model={"path": "runs/e/sft"},
        resume_from="runs/e/new/recover/step4",
    )
    assert resumed.build().config["model"]["path"].endswith("step2")
    (runs / "e" / "new" / "config.yaml").write_text("a: [\n")
    with pytest.raises(ConfigError, match=r"config\.yaml is not valid YAML"):
        given.build()


def test_errors_name_the_option_that_was_set(runs: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^rew\.path='runs/e/ppo': .* say which one"):
        config(PPOConfig, actor={"path": "runs/e/sft"}, rew={"path": "runs/e/ppo"}).build()
    with pytest.raises(
        CheckpointError,
        match=r"^actor\.path='.*rm/checkpoints/model/step3': is a reward or value model",
    ):
        config(DPOConfig, actor={"path": "runs/e/rm"}).build()
    (runs / "e" / "rm" / "checkpoints" / "model" / "step3" / "model.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"^rew\.path=.* has no weights"
    ):  # and not the critic's, which is made from it
        config(PPOConfig, actor={"path": "runs/e/sft"}, rew={"path": "runs/e/rm"}).build()
    folder = runs / "e" / "ppo" / "checkpoints" / "critic" / "step4"
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"eos_token_id": "a"}))
    said = r"^critic\.path=runs/e/ppo/checkpoints/critic/step4/config\.json: eos_token_id='a': it must be a whole number"
    for backend in ("auto", "hf"):
        critic = {"path": "runs/e/ppo", "backend": backend}
        with pytest.raises(CheckpointError, match=said):
            config(
                PPOConfig, actor={"path": "runs/e/sft"}, rew={"path": "runs/e/sft"}, critic=critic
            ).build()
    assert find_option_role({"actor": {"path": "x"}, "ref": {"path": None}}, "ref", "x") == "actor"
    assert find_option_role({"actor": {"path": "x"}, "ref": {"path": "x"}}, "ref", "x") == "ref"
    assert find_option_role({}, "ref", "x") == "ref"


def test_types_without_a_family_go_to_transformers(runs: Path) -> None:
    checkpoint(runs / "e" / "bloom", "model/step1", model_type="bloom")
    experiment = config(DPOConfig, actor={"path": "runs/e/bloom"}).build()
    assert {spec.backend for spec in experiment.roles.values()} == {"hf"}
    assert (
        [n for n in experiment.plan_notes if "no family" in n]
        == [n for n in experiment.plan_notes if "actor: weft" in n]
        != []
    )
    assert config(SFTConfig, model={"path": "runs/e/sft"}).build().roles["model"].backend == "torch"
    with pytest.raises(
        ConfigError,
        match=r"^model\.backend=torch: .* type bloom; leave the option out to use backend=hf",
    ):
        config(SFTConfig, model={"path": "runs/e/bloom", "backend": "torch"}).build()
    with pytest.raises(
        ConfigError, match=r"^model\.tokenizer\.add_tokens=.* cannot extend their vocabulary"
    ):
        config(
            SFTConfig, model={"path": "runs/e/bloom", "tokenizer": {"add_tokens": ["<x>"]}}
        ).build()


def test_a_reward_model_without_a_score_head_is_told_and_one_from_scratch_is_not(
    runs: Path,
) -> None:
    plain = checkpoint(runs / "e" / "plain", "model/step1", architectures=["LlamaForCausalLM"])
    notes = "are noise|is a language model without a score head"

    def told(**rew: Any) -> list[str]:
        roles = {"actor": {"path": str(plain)}, "critic": {"path": str(plain)}, "rew": rew}
        built = config(PPOConfig, **roles).build()
        assert resolve_roles(built).roles == built.roles, "once more changes nothing"
        return [
            note for spec in built.roles.values() for note in spec.notes if re.search(notes, note)
        ]

    (note,) = told(path=str(plain))
    assert note.startswith(f"rew.path={plain}: is a language model without a score head")
    assert told(path="runs/e/rm") == [] == told(path="runs/e/sft"), (
        "the second does not say what it is"
    )
    assert told(path=str(plain), init_from_scratch=True) == []


def test_an_experiment_of_a_users_code_names_runs_too(runs: Path) -> None:
    built = config(SFTConfig, model={"path": "runs/e/sft"}).build()
    raw = replace(
        built, roles={"model": replace(built.roles["model"], path="runs/e/sft", notes=())}
    )
    found = resolve_roles(raw).roles["model"]
    assert found.path == "runs/e/sft/checkpoints/model/step2"
    assert any("the newest checkpoint of model" in note for note in found.notes)
    strange = checkpoint(runs / "e" / "strange", "model/step1", model_type="nobodys")
    other = replace(
        raw, roles={"model": replace(raw.roles["model"], path=str(strange), backend="auto")}
    )
    assert (
        resolve_roles(other).roles["model"].backend,
        "slower" in resolve_roles(other).roles["model"].notes[0],
    ) == (
        "hf",
        True,
    )


def test_a_reward_model_that_is_no_decoder_is_refused_with_what_to_set(runs: Path) -> None:
    checkpoint(
        runs / "e" / "bert",
        "rew/step1",
        model_type="bert",
        architectures=["BertForSequenceClassification"],
    )
    config = PPOConfig(experiment_name="e", trial_name="t")
    config.actor.path, config.dataset.path = str(runs / "e" / "sft"), "rows.jsonl"
    config.rew.path = str(runs / "e" / "bert" / "checkpoints" / "rew" / "step1")
    with pytest.raises(
        ConfigError,
        match=r"a model of type bert is not a decoder.*set rew.backend=null and score with your own",
    ):
        config.build()
    config.rew.backend, config.rew_inf.interface = "null", "infer"
    assert config.build().get_node("rew_inf").interface == "infer"  # type: ignore[union-attr]
