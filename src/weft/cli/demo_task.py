"""Data of the demo: small sums, answers of an unreliable teacher, a tokenizer, a small model."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.writing import write

CHARACTERS = "0123456789+="
TEACHER_ACCURACY = 0.55  # share of the teacher's answers that are correct
# Each problem is answered on its own: the template renders only the messages from the last question
# on.
CHAT_TEMPLATE = (
    "{% set last = namespace(at=0) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set last.at = loop.index0 %}{% endif "
    "%}{% endfor %}"
    "{% for m in messages[last.at:] %}{% if m['role'] == 'user' %}{{ m['content'] | replace(' ', "
    "'') }}="
    "{% elif m['role'] == 'assistant' %}{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class AdditionProblem:
    """Problem of adding a two-digit number, `left`, and a one-digit number, `right`."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        return str(self.left + self.right)


def draw_problems(seed: int, held_out: int) -> tuple[list[AdditionProblem], list[AdditionProblem]]:
    """Split all 810 addition problems at random into training problems and held-out problems.

    `held_out` is the number of held-out problems.
    """
    every = []
    for left in range(10, 100):
        for right in range(1, 10):
            every.append(AdditionProblem(left, right))
    random.Random(seed).shuffle(every)
    return every[held_out:], every[:held_out]


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write one JSON object per line, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def build_prompt_rows(chosen: Iterable[AdditionProblem], times: int = 1) -> list[dict[str, Any]]:
    """Return `times` rows per problem, each with the prompt and the answer for the verifier."""
    return [{"prompt": p.prompt, "answer": p.answer} for p in chosen for _ in range(times)]


def build_lesson_rows(
    chosen: Iterable[AdditionProblem], seed: int, times: int
) -> list[dict[str, Any]]:
    """Return `times` rows per problem, each with a prompt and an answer that may be wrong.

    The answers are those of an unreliable teacher: each is correct with probability
    `TEACHER_ACCURACY`.
    """
    draw = random.Random(seed)
    result: list[dict[str, Any]] = []
    for p in chosen:
        for _ in range(times):
            result.append(
                {
                    "prompt": p.prompt,
                    "answer": p.answer
                    if draw.random() < TEACHER_ACCURACY
                    else change_digit(p.answer, draw),
                }
            )
    return result


def change_digit(answer: str, draw: random.Random) -> str:
    """Return the answer with one random digit replaced by another."""
    at = draw.randrange(len(answer))
    wrong = draw.choice([digit for digit in "0123456789" if digit != answer[at]])
    return answer[:at] + wrong + answer[at + 1 :]


def write_model(directory: Path) -> Path:
    """Write the tokenizer and the configuration of a Llama with 1.3 million parameters.

    The weights are initialized by the first run. Returns the directory.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "</s>", "<unk>", *CHARACTERS])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=160,
        intermediate_size=480,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=vocabulary["</s>"],
        pad_token_id=vocabulary["<pad>"],
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(directory)
    return directory


def compute_accuracy(generations: Path) -> float:
    """Return the fraction of completions in a `generations.jsonl` file that are the correct sum."""
    rows = [json.loads(line) for line in generations.read_text().splitlines()]
    return sum(is_correct(row["prompt"], row["completion"]) for row in rows) / len(rows)


def is_correct(prompt: str, completion: str) -> bool:
    """Return whether `completion` is the correct answer to `prompt`, ignoring end tokens."""
    return completion.replace("</s>", "").strip() == compute_sum(prompt)


def compute_sum(prompt: str) -> str:
    """Return the correct answer to a prompt such as `47+8=`."""
    left, right = prompt.rstrip("=").split("+")
    return str(int(left) + int(right))


def build_preference_rows(
    generations: Path, chosen: Iterable[AdditionProblem], seed: int, times: int
) -> list[dict[str, Any]]:
    """Return preference pairs in which a correct sum is preferred to a wrong one.

    There are two kinds of wrong sums: the model's own mistakes in `generations`, and sums made by
    replacing a random digit of the correct one. `times` is the number of replacements for each
    problem in `chosen`. Duplicates are dropped.

    The model's mistakes alone would be too few and too similar: a reward model would memorize them
    instead of learning to add, and PPO would find wrong answers that the reward model never saw.
    """
    draw = random.Random(seed)
    rows = [json.loads(line) for line in generations.read_text().splitlines()]
    answers = [(row["prompt"], row["completion"].replace("</s>", "").strip()) for row in rows]
    for p in chosen:
        for _ in range(times):
            answers.append((p.prompt, change_digit(p.answer, draw)))
    mistakes = dict.fromkeys(
        (prompt, answer) for prompt, answer in answers if answer and not is_correct(prompt, answer)
    )
    result: list[dict[str, Any]] = []
    for p, wrong in mistakes:
        result.append({"prompt": p, "pos_answers": [compute_sum(p)], "neg_answers": [wrong]})
    return result
