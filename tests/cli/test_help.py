"""`--help`: the common options, all options, groups of options, and suggestions."""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest

from weft import registry
from weft.cli import main as weft
from weft.cli.aliases import map_spellings
from weft.cli.help import EXAMPLES, find_common_options, format_quickstart_help, split_command
from weft.cli.quickstart import build_config
from weft.cli.reference import SHIPPED
from weft.errors import ConfigError
from weft.experiments import PPOConfig
from weft.options import iterate_options, option


def page(name: str, group: str = "", width: int = 80) -> str:
    return format_quickstart_help(name, registry.quickstarts.get(name)(), group, width)


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("width", [80, 160])
def test_the_first_page_is_short_and_fits(name, width):
    text = page(name, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert len(text.splitlines()) < 110
    assert f"weft quickstart {name} --help all" in text


@pytest.mark.parametrize("name", SHIPPED)
def test_the_options_shown_first_are_about_twenty(name):
    names = [
        each
        for group in find_common_options(registry.quickstarts.get(name)()).values()
        for each in group
    ]
    assert 15 <= len(names) <= 26 and len(names) == len(set(names))
    assert all(f"\n  {each} " in page(name) or f"\n  {each}\n" in page(name) for each in names)


@pytest.mark.parametrize("name", SHIPPED)
def test_the_example_is_a_configuration(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = page(name)
    pasted = text[text.index("\n  weft quickstart") : text.index("\nmore")].replace("\\\n", " ")
    config, _ = build_config(shlex.split(pasted)[2:])
    assert config.experiment_name == "first" and EXAMPLES[name].split()[0] in pasted


@pytest.mark.parametrize("name", SHIPPED)
def test_all_has_every_option_that_does_something(name):
    config, text = registry.quickstarts.get(name)(), page(name, "all")
    shown = {
        line.split()[0] for line in text.splitlines() if line.startswith("  ") and line[2:3].strip()
    }
    frozen = {leaf.name for leaf in iterate_options(config) if ".optimizer." in leaf.name} - shown
    assert {leaf.name for leaf in iterate_options(config)} <= shown | frozen
    assert not any(each.startswith(role) for each in frozen for role in config.trained_roles)
    assert all(leaf.help for leaf in iterate_options(config)), "every option has a meaning"
    assert max(map(len, text.splitlines())) <= 80


def test_frozen_roles_have_no_optimizer():
    text = page("ppo", "all")
    assert "actor.optimizer.lr" in text and "critic.optimizer.lr" in text
    assert "ref.optimizer" not in text and "rew.optimizer" not in text
    with pytest.raises(ConfigError, match="ref is not trained in ppo"):
        page("ppo", "ref.optimizer")


def test_groups_and_words():
    text = page("ppo", "ppo.gen")
    assert "ppo.gen.top_p" in text and "actor.path" not in text
    with pytest.raises(ConfigError, match=r"did you mean .*ppo.gen"):
        page("ppo", "ppo.gn")
    with pytest.raises(
        ConfigError, match=r"(?s)no such group; options with this.*actor\.optimizer\.lr: peak"
    ):
        page("ppo", "lr")
    with pytest.raises(ConfigError, match=r"actor\.optimizer\.lr"):
        page("ppo", "learning_rate")
    with pytest.raises(ConfigError, match=r"groups: .*dataset"):
        page("ppo", "zzzz")


def test_other_spellings_are_listed_with_the_options():
    assert "also: learning_rate" in " ".join(page("sft").split())
    spelled = map_spellings(PPOConfig())
    assert spelled["actor.optimizer.lr"] == spelled["critic.optimizer.lr"] == ["learning_rate"]
    assert "kl_coef" in spelled["ppo.kl_ctl"]


def test_every_spelling_shown_is_one_that_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = {
        "bf16": "true",
        "use_cpu": "true",
        "use_peft": "true",
        "save_strategy": "epoch",
        "eval_strategy": "epoch",
        "report_to": "wandb",
        "resume_from_checkpoint": "a/b",
        "per_device_train_batch_size": "4",
    }
    for name in SHIPPED:
        config = registry.quickstarts.get(name)()
        for target, spellings in map_spellings(config).items():
            for spelling in set(spellings) & values.keys():
                changed, _ = build_config([name, f"{spelling}={values[spelling]}"])
                now = {leaf.name: leaf.default for leaf in iterate_options(changed)}
                before = {leaf.name: leaf.default for leaf in iterate_options(config)}
                assert now[target] != before[target], f"{spelling} of {name} does not set {target}"


@dataclass
class Mine:
    speed: int = option(3, "how fast")


@dataclass
class MyConfig(PPOConfig):
    """PPO of my own."""

    trained_roles: ClassVar[tuple[str, ...]] = ("actor", "critic")
    mine: Mine = option(Mine(), "my options")
    extra: list[str] = field(default_factory=list)


def test_a_configuration_of_the_users_shows_its_own_options_first():
    chosen = find_common_options(MyConfig())
    assert next(iter(chosen.items())) == ("of this configuration", ("extra", "mine.speed"))
    text = format_quickstart_help("my-ppo", MyConfig())
    assert (
        "PPO of my own." in text
        and "mine.speed" in text
        and "weft quickstart my-ppo --help all" in text
    )


def test_weft_alone_groups_its_commands(capsys):
    assert weft.main([]) == 2
    shown = capsys.readouterr().out
    assert weft.main(["--help"]) == 0
    assert capsys.readouterr().out == shown
    assert max(map(len, shown.splitlines())) <= 80
    for name in weft.COMMANDS:
        assert f"\n  {name} " in shown
    assert (
        shown.index("\ntrain and sample") < shown.index("\nlook at runs") < shown.index("\nmodels")
    )


# these two begin to work
@pytest.mark.parametrize("name", sorted({*weft.COMMANDS} - {"demo", "dashboard"}))
def test_every_command_alone_says_how_it_is_used(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    alone = {"ls"}  # commands that need no arguments
    code = _exit_code([name])
    assert code == 2 or name in alone
    shown = "".join(capsys.readouterr())
    assert f"weft {name}" in shown or name in alone


def _exit_code(words: list[str]) -> int:
    try:
        return weft.main(words)
    except SystemExit as error:
        return int(error.code or 0)


def test_help_loads_no_framework(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom weft.cli.main import main\n"
        "for w in (['--help'], ['quickstart', 'grpo', '--help', 'all'], ['ls', '.'], ['examples', "
        "'ls']): main(w)\n"
        "print([m for m in ('torch', 'transformers', 'ray') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.stderr.strip().splitlines()[-1] == "[]"


def test_a_command_is_broken_between_words_only():
    words = [
        "weft",
        "quickstart",
        "sft",
        "dataset.columns={prompt: a, answer: b}",
        "x=" + "y" * 90,
        "z=1",
    ]
    lines = list(split_command(words, 60))
    assert len(lines) == 4 and all(len(line) <= 60 for line in (*lines[:2], lines[3]))
    assert shlex.split(" ".join(line.rstrip("\\") for line in lines)) == words
