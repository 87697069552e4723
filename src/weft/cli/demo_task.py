"""The demo's world, made on the spot: small sums, a careless teacher, a character tokenizer, a
small model.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.writing import write

CHARACTERS = "0123456789+="
RIGHT = 0.55  # share of the teacher's answers that are right
# A problem is answered on its own: the template shows the model what follows the last question, not
# the talk before it.
CHAT_TEMPLATE = (
    "{% set last = namespace(at=0) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set last.at = loop.index0 %}{% endif "
    "%}{% endfor %}"
    "{% for m in messages[last.at:] %}{% if m['role'] == 'user' %}{{ m['content'] | replace(' ', "
    "'') }}="
    "{% elif m['role'] == 'assistant' %}{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Problem:
    """`left` + `right`: two digits and one."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        return str(self.left + self.right)


def problems(seed: int, held_out: int) -> tuple[list[Problem], list[Problem]]:
    """All 810 problems in random order: (for training, `held_out` of them never trained on)."""
    every = [Problem(left, right) for left in range(10, 100) for right in range(1, 10)]
    random.Random(seed).shuffle(every)
    return every[held_out:], every[:held_out]


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def prompt_rows(chosen: Iterable[Problem], times: int = 1) -> list[dict[str, Any]]:
    """Rows of the `prompt` form with the answer for the verifier, each problem `times` times."""
    return [{"prompt": p.prompt, "answer": p.answer} for p in chosen for _ in range(times)]


def lesson_rows(chosen: Iterable[Problem], seed: int, times: int) -> list[dict[str, Any]]:
    """Rows of the `prompt_answer` form from a careless teacher: each problem `times` times, `RIGHT`
    of the answers right.
    """
    draw = random.Random(seed)
    return [
        {"prompt": p.prompt, "answer": p.answer if draw.random() < RIGHT else slip(p.answer, draw)}
        for p in chosen
        for _ in range(times)
    ]


def slip(answer: str, draw: random.Random) -> str:
    """The answer with one digit wrong."""
    at = draw.randrange(len(answer))
    wrong = draw.choice([digit for digit in "0123456789" if digit != answer[at]])
    return answer[:at] + wrong + answer[at + 1 :]


def write_model(directory: Path) -> Path:
    """The tokenizer and the configuration of a Llama of 1.3 million parameters; its weights are
    drawn by the first run.
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


def share_right(generations: Path) -> float:
    """Accuracy of a `generations.jsonl`: the share of completions that are the sum, exactly."""
    rows = [json.loads(line) for line in generations.read_text().splitlines()]
    return sum(is_right(row["prompt"], row["completion"]) for row in rows) / len(rows)


def is_right(prompt: str, completion: str) -> bool:
    """Whether `completion` (with or without its end token) is the sum that `prompt` asks for."""
    return completion.replace("</s>", "").strip() == right_sum(prompt)


def right_sum(prompt: str) -> str:
    """The right answer to `47+8=`."""
    left, right = prompt.rstrip("=").split("+")
    return str(int(left) + int(right))


def pair_rows(
    generations: Path, chosen: Iterable[Problem], seed: int, times: int
) -> list[dict[str, Any]]:
    """Preference pairs: the right sum over what the model itself got wrong, and over `times` drawn
    slips a problem.

    Pairs of the model's own mistakes alone are few and repeat the same answers: a reward model
    remembers them in place of adding, and PPO then finds the wrong answers that it never saw.
    """
    draw = random.Random(seed)
    rows = [json.loads(line) for line in generations.read_text().splitlines()]
    answers = [(row["prompt"], row["completion"].replace("</s>", "").strip()) for row in rows]
    answers += [(p.prompt, slip(p.answer, draw)) for p in chosen for _ in range(times)]
    mistakes = dict.fromkeys(
        (prompt, answer) for prompt, answer in answers if answer and not is_right(prompt, answer)
    )
    return [
        {"prompt": p, "pos_answers": [right_sum(p)], "neg_answers": [wrong]}
        for p, wrong in mistakes
    ]
