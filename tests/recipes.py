"""The recipes as they are planned: `python -m tests.recipes` writes their memory into them, and the
table of their README.

Where the data of the tests are, the config.json of a model is the real one; of the others it is the
one that weft ships.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.checkpoints.config_file import read_shipped_configs

RECIPES = Path(__file__).parents[1] / "recipes"
README = RECIPES / "README.md"
TABLE = "| recipe | model | GPU | memory of each |"
KINDS = {
    "sft": "Supervised fine-tuning",
    "rw": "Reward models",
    "dpo": "Preferences (DPO)",
    "grpo": "GRPO",
    "ppo": "PPO",
}


@dataclass(frozen=True)
class Model:
    """`parameters` as the model's page says; `real`: the folder of the tests' data with the real
    file.
    """

    parameters: int
    real: str | None = None


MODELS = {
    "Qwen/Qwen3-0.6B": Model(596_049_920, "qwen3-0.6b"),
    "Skywork/Skywork-Reward-V2-Qwen3-0.6B": Model(596_049_920),
    "Qwen/Qwen3-1.7B": Model(1_720_574_976),
    "Qwen/Qwen3-1.7B-Base": Model(1_720_574_976),
    "Qwen/Qwen3-8B": Model(8_190_735_360),
    "meta-llama/Llama-3.2-1B": Model(1_235_814_400),
    "meta-llama/Llama-3.2-1B-Instruct": Model(1_235_814_400, "llama3.2-1b-instruct"),
    "meta-llama/Llama-3.1-8B": Model(8_030_261_248, "llama3.1-8b"),
    "meta-llama/Llama-3.1-8B-Instruct": Model(8_030_261_248, "llama3.1-8b"),
    "allenai/Llama-3.1-Tulu-3-8B-SFT": Model(8_030_326_784),
    "google/gemma-2-2b": Model(2_614_341_888),
    "EleutherAI/pythia-1b-deduped": Model(1_011_781_632),
    "cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr": Model(1_011_781_632),
    "cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr": Model(1_011_781_632),
}


@dataclass(frozen=True)
class Planned:
    """What a plan says: `needed` GiB of a device of a GPU of this `name`, and whether that is
    there.
    """

    lines: tuple[str, ...]
    needed: float
    gpu: str
    fits: bool


def files() -> list[Path]:
    return sorted(RECIPES.glob("*.yaml"))


def kind_of(recipe: Path) -> str:
    return recipe.stem.split("-")[0]


def values_of(recipe: Path) -> dict[str, Any]:
    import yaml

    found: dict[str, Any] = yaml.safe_load(recipe.read_text())
    return found


def write_models(folder: Path) -> dict[str, Path]:
    """A directory for each model with its config.json alone: the real one where it is at hand."""
    real = Path(os.environ.get("WEFT_TEST_DATA", "/nowhere")) / "hf_configs"
    found = {}
    for name, model in MODELS.items():
        found[name] = folder / name
        found[name].mkdir(parents=True, exist_ok=True)
        file = real / str(model.real) / "config.json"
        text = file.read_text() if file.is_file() else json.dumps(read_shipped_configs()[name])
        (found[name] / "config.json").write_text(text)
    return found


def words(recipe: Path, models: Mapping[str, Path]) -> list[str]:
    """The command line of a recipe's plan: its models' names become directories."""
    roles = {role: value for role, value in values_of(recipe).items() if isinstance(value, dict)}
    paths = [
        f"{role}.path={models[value['path']]}"
        for role, value in roles.items()
        if value.get("path") in models
    ]
    return [kind_of(recipe), "--config", str(recipe), "experiment_name=e", "trial_name=t", *paths]


def plan(recipe: Path, models: Mapping[str, Path]) -> Planned:
    from weft.cli.quickstart import build_config
    from weft.launch import dry_run

    lines = dry_run(build_config(words(recipe, models))[0], data=False)
    verdict = next(line for line in lines if re.match(r"fits: |does NOT fit: ", line))
    number, unit = re.search(r"about ([\d.]+) ([GM])iB", verdict).groups()  # type: ignore[union-attr]
    gpu = verdict.rpartition(": ")[2]
    return Planned(
        tuple(lines), float(number) / (1 if unit == "G" else 1024), gpu, verdict.startswith("fits")
    )


def said(planned: Planned, count: int) -> str:
    """What a recipe's head says of memory."""
    return f"about {planned.needed:.0f} GiB{' of each' if count > 1 else ''}, as planned"


def head(recipe: Path, name: str) -> str:
    """A line of a recipe's head."""
    return re.search(rf"^# {name}: (.+)$", recipe.read_text(), re.M)[1]  # type: ignore[index]


def table(plans: Mapping[Path, Planned]) -> str:
    lines = []
    for kind, title in KINDS.items():
        lines += [f"**{title}** (`weft quickstart {kind}`)", "", TABLE, "|---|---|---|---|"]
        for recipe, planned in plans.items():
            if kind_of(recipe) == kind:
                lines.append(
                    f"| [{recipe.stem}]({recipe.name}) | {head(recipe, 'Model').split(';')[0]} | "
                    f"{head(recipe, 'GPU')} | "
                    f"{planned.needed:.0f} GiB |"
                )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        models = write_models(Path(folder))
        plans = {recipe: plan(recipe, models) for recipe in files()}
    for recipe, planned in plans.items():
        count = values_of(recipe).get("n_gpus_per_node", 1)
        text = re.sub(
            r"^# Memory: .*$", f"# Memory: {said(planned, count)}", recipe.read_text(), flags=re.M
        )
        recipe.write_text(text)
        print(
            f"{recipe.stem:40} {planned.needed:6.1f} GiB of "
            f"{planned.gpu}{'' if planned.fits else '  DOES NOT FIT'}"
        )
    if README.is_file():
        begin, end = "<!-- table -->\n", "<!-- end -->"
        before, _, rest = README.read_text().partition(begin)
        README.write_text(f"{before}{begin}{table(plans)}{end}{rest.partition(end)[2]}")


if __name__ == "__main__":
    main()
