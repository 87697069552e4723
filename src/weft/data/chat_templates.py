"""Chat templates by name (`tokenizer.chat_template=oasst`), with the special tokens they need.

The text of each template is a file in the folder `templates`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).with_name("templates")
OPEN_ASSISTANT = (
    "<|prompter|>",
    "<|assistant|>",
    "<|system|>",
    "<|prefix_begin|>",
    "<|prefix_end|>",
)


@dataclass(frozen=True)
class ChatTemplate:
    """Chat template that weft provides by name, with its requirements.

    Attributes:
        tokens: special tokens that the vocabulary must contain; empty if the template marks turns
            with plain text
        needs: attributes of the tokenizer that must be set, such as `eos_token`
    """

    tokens: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


TEMPLATES: Mapping[str, ChatTemplate] = {
    "oasst": ChatTemplate(OPEN_ASSISTANT, ("eos_token",)),
    "oasst_v25": ChatTemplate(OPEN_ASSISTANT, ("eos_token",)),
    "chatml": ChatTemplate(("<|im_start|>", "<|im_end|>")),
    "llama3": ChatTemplate(("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "mistral": ChatTemplate(needs=("eos_token",)),
    "gemma": ChatTemplate(("<start_of_turn>", "<end_of_turn>")),
    "zephyr": ChatTemplate(needs=("eos_token",)),
    "tulu": ChatTemplate(needs=("eos_token",)),
    "vicuna": ChatTemplate(needs=("eos_token",)),
    "alpaca": ChatTemplate(needs=("eos_token",)),
}


def read_template_text(name: str) -> str:
    """Return the Jinja source of the template `name`."""
    return (FOLDER / f"{name}.jinja").read_text().removesuffix("\n")
