"""Small tasks of lm-evaluation-harness, one for each kind of request, and their data."""

from __future__ import annotations

import random
from pathlib import Path

from tests.tiny import write_jsonl

TEXT = "once upon a time there was a little girl named Lily who saw a red ball and went home"
WORDS = sorted({*TEXT.split()})
FEW_SHOT = """
fewshot_split: train
training_split: train
fewshot_config:
  sampler: first_n
"""
TASKS = {
    "last_word": """
output_type: loglikelihood
doc_to_text: "{{text}}"
doc_to_target: " {{word}}"
num_fewshot: 0
metric_list:
  - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
  - {metric: acc, aggregation: mean, higher_is_better: true}
""",
    "choices": f"""
output_type: multiple_choice
doc_to_text: "Question: {{{{text}}}}\\nAnswer:"
doc_to_choice: "{{{{options}}}}"
doc_to_target: "{{{{gold}}}}"
num_fewshot: 3
{FEW_SHOT}
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
""",
    "stories": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{story}}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
  - {metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
""",
    "continued": """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{word}}"
num_fewshot: 0
generation_kwargs: {until: ["\\n", "e"], max_gen_toks: 12}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
""",
    "talk": f"""
output_type: generate_until
doc_to_text: "What comes after {{{{text}}}}?"
doc_to_target: "{{{{word}}}}"
description: "You complete sentences."
num_fewshot: 2
{FEW_SHOT}
generation_kwargs: {{until: ["<|user|>"], max_gen_toks: 10}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true, ignore_case: true}}
""",
}


def write_tasks(folder: Path, count: int = 12) -> Path:
    """Write the task files with `count` items of data each, and return their folder."""
    draw = random.Random(0)
    rows = []
    for _ in range(2 * count):
        options = [f" {' '.join(draw.choices(WORDS, k=draw.randint(1, 3)))}" for _ in range(4)]
        rows.append(
            {
                "text": " ".join(draw.choices(WORDS, k=draw.randint(4, 12))),
                "word": draw.choice(WORDS),
                "options": options,
                "gold": draw.randrange(4),
                "story": " ".join(draw.choices(WORDS, k=draw.randint(20, 160))),
            }
        )
    write_jsonl(folder / "train.jsonl", rows[:count])
    write_jsonl(folder / "test.jsonl", rows[count:])
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\n"
            "dataset_path: json\n"
            "dataset_kwargs:\n"
            "  data_files: {train: train.jsonl, test: test.jsonl}\n"
            "test_split: test\n"
            f"metadata: {{version: 1}}\n{text}"
        )
    return folder
