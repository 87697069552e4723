"""The recipes as they are planned: `python -m tests.recipes` writes their memory into them, and the table of their README.

Where the data of the tests are, the config.json of a model is the real one; of the others the published values stand here.
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

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 128,
    "hidden_act": "silu", "max_position_embeddings": 40960, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "vocab_size": 151936, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}  # fmt: skip
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "max_position_embeddings": 131072,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "vocab_size": 128256, "torch_dtype": "bfloat16",
}  # fmt: skip
_ONE_SCORE = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}

# huggingface.co/MODEL/blob/main/config.json, what sizes depend on.
QWEN3_06B = {**_QWEN3, "hidden_size": 1024, "intermediate_size": 3072}
QWEN3_17B = {**_QWEN3, "hidden_size": 2048, "intermediate_size": 6144}
QWEN3_8B = {
    **_QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_1B = {
    **_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA_8B = {
    **_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "tie_word_embeddings": False,
}  # fmt: skip
GEMMA2_2B = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attention_bias": False, "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304,
    "intermediate_size": 9216, "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 26,
    "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 4096,
    "vocab_size": 256000, "torch_dtype": "float32",
}  # fmt: skip
PYTHIA_1B = {
    "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "hidden_act": "gelu", "hidden_size": 2048,
    "intermediate_size": 8192, "layer_norm_eps": 1e-5, "max_position_embeddings": 2048, "num_attention_heads": 8,
    "num_hidden_layers": 16, "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
    "use_parallel_residual": True, "vocab_size": 50304, "torch_dtype": "float16",
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """`parameters` as the model's page says; `real`: the folder of the tests' data with the real file."""

    config: Mapping[str, Any]
    parameters: int
    real: str | None = None


MODELS = {
    "Qwen/Qwen3-0.6B": Model(QWEN3_06B, 596_049_920, "qwen3-0.6b"),
    "Skywork/Skywork-Reward-V2-Qwen3-0.6B": Model(
        {**QWEN3_06B, **_ONE_SCORE, "architectures": ["Qwen3ForSequenceClassification"]}, 596_049_920
    ),
    "Qwen/Qwen3-1.7B": Model(QWEN3_17B, 1_720_574_976),
    "Qwen/Qwen3-1.7B-Base": Model(QWEN3_17B, 1_720_574_976),
    "Qwen/Qwen3-8B": Model(QWEN3_8B, 8_190_735_360),
    "meta-llama/Llama-3.2-1B": Model(LLAMA_1B, 1_235_814_400),
    "meta-llama/Llama-3.2-1B-Instruct": Model(LLAMA_1B, 1_235_814_400, "llama3.2-1b-instruct"),
    "meta-llama/Llama-3.1-8B": Model(LLAMA_8B, 8_030_261_248, "llama3.1-8b"),
    "meta-llama/Llama-3.1-8B-Instruct": Model(LLAMA_8B, 8_030_261_248, "llama3.1-8b"),
    "allenai/Llama-3.1-Tulu-3-8B-SFT": Model({**LLAMA_8B, "vocab_size": 128264}, 8_030_261_248 + 2 * 8 * 4096),
    "google/gemma-2-2b": Model(GEMMA2_2B, 2_614_341_888),
    "EleutherAI/pythia-1b-deduped": Model(PYTHIA_1B, 1_011_781_632),
    "cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr": Model(PYTHIA_1B, 1_011_781_632),
    "cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr": Model(
        {**PYTHIA_1B, **_ONE_SCORE, "architectures": ["GPTNeoXForSequenceClassification"]}, 1_011_781_632
    ),
}


@dataclass(frozen=True)
class Planned:
    """What a plan says: `needed` GiB of a device of a GPU of this `name`, and whether that is there."""

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
        text = file.read_text() if file.is_file() else json.dumps(dict(model.config))
        (found[name] / "config.json").write_text(text)
    return found


def words(recipe: Path, models: Mapping[str, Path]) -> list[str]:
    """The command line of a recipe's plan: its models' names become directories."""
    roles = {role: value for role, value in values_of(recipe).items() if isinstance(value, dict)}
    paths = [f"{role}.path={models[value['path']]}" for role, value in roles.items() if value.get("path") in models]
    return [kind_of(recipe), "--config", str(recipe), "experiment_name=e", "trial_name=t", *paths]


def plan(recipe: Path, models: Mapping[str, Path]) -> Planned:
    from weft.cli.quickstart import configured
    from weft.launch import dry_run

    lines = dry_run(configured(words(recipe, models))[0], data=False)
    verdict = next(line for line in lines if re.match(r"fits: |does NOT fit: ", line))
    number, unit = re.search(r"about ([\d.]+) ([GM])iB", verdict).groups()  # type: ignore[union-attr]
    gpu = verdict.rpartition(": ")[2]
    return Planned(tuple(lines), float(number) / (1 if unit == "G" else 1024), gpu, verdict.startswith("fits"))


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
                    f"| [{recipe.stem}]({recipe.name}) | {head(recipe, 'Model').split(';')[0]} | {head(recipe, 'GPU')} | "
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
        text = re.sub(r"^# Memory: .*$", f"# Memory: {said(planned, count)}", recipe.read_text(), flags=re.M)
        recipe.write_text(text)
        print(f"{recipe.stem:40} {planned.needed:6.1f} GiB of {planned.gpu}{'' if planned.fits else '  DOES NOT FIT'}")
    if README.is_file():
        begin, end = "<!-- table -->\n", "<!-- end -->"
        before, _, rest = README.read_text().partition(begin)
        README.write_text(f"{before}{begin}{table(plans)}{end}{rest.partition(end)[2]}")


if __name__ == "__main__":
    main()
