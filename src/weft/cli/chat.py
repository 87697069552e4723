"""`weft chat MODEL`: talk in the terminal with a model or the newest checkpoint of a run.

`weft chat A B` talks with two models at once.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from weft.checkpoints.names import ModelQuery, find_model, find_newest_run
from weft.cli import model_arguments
from weft.cli.conversation import LABELS, Conversation
from weft.cli.parsing import CommandParser
from weft.data.spec import TokenizerSpec
from weft.engine.spec import GenerationSpec, ModelSpec
from weft.errors import ConfigError
from weft.evaluation.models import open_policy
from weft.options import validate

if TYPE_CHECKING:
    from weft.cli.conversation import ChatView

FORMATS: Mapping[str, str | None] = {"v2": "oasst", "v2.5": "oasst_v25", "template": None}


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="weft chat", description=__doc__)
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL_DIR",
        help="a model: directory, adapter, run (runs/E/T, runs/E/T@step40) or hub name; two models answer side by side",
    )
    parser.add_argument("--model-path", metavar="MODEL_DIR", help="the same as MODEL_DIR")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        help="logits are divided by it (default 1); 0 is greedy",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="sample from the likeliest tokens that sum to this probability (default 1: all)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=0,
        help="sample from this many of the likeliest tokens (default 0: all)",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=512,
        help="maximum number of tokens per answer (default 512)",
    )
    parser.add_argument(
        "--seed", type=int, help="seed of sampling (default: a different one each time)"
    )
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument(
        "--chat-template",
        metavar="NAME",
        help="name of a template or a jinja file (default: the model's own)",
    )
    forms.add_argument(
        "--format",
        choices=FORMATS,
        help="Open-Assistant's formats v2 and v2.5, or the model's own template (the default)",
    )
    parser.add_argument(
        "--plain", action="store_true", help="continue the text without the chat template"
    )
    parser.add_argument(
        "--no-history", action="store_true", help="answer each message without the earlier ones"
    )
    model_arguments.add_model_options(parser)
    parser.add_argument(
        "--8bit",
        dest="quantize",
        action="store_const",
        const="8bit",
        help="the same as --quantize 8bit",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Parse the command line, load the models, and run the conversation.

    Raises `UserError` (exit code 2) for an unusable model or option.
    """
    given = build_parser().parse_args(list(argv))
    named = given.models or [each for each in (given.model_path,) if each is not None]
    if len(named) not in (1, 2) or (given.models and given.model_path is not None):
        raise ConfigError(
            "name one model: weft chat MODEL_DIR (or --model_path MODEL_DIR, which is the same); "
            "or two: weft chat A B"
        )
    spec = _build_generation_spec(given)
    located_models = [find_model(find_newest_run(name), ModelQuery("MODEL_DIR")) for name in named]
    models = [_build_model_spec(each.path, given) for each in located_models]

    from weft.cli.conversation import ChatView

    view = ChatView()
    chats = []
    for label, each, model in zip(LABELS, located_models, models, strict=False):
        if each.note:
            view.show_note(each.note)
        chats.append(
            _open_conversation(
                model, spec, view, plain=given.plain, label=label if len(models) > 1 else ""
            )
        )
        chats[-1].system, chats[-1].history = given.system, not given.no_history
    if len(chats) == 1:
        view.show_note("/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves")
        chats[0].run_until_end()
        return 0
    view.show_note("/help lists the commands, /a and /b address one model, Ctrl-D leaves")
    from weft.cli.side_by_side import SideBySide

    SideBySide(chats, view).converse()
    return 0


def _build_model_spec(path: str, given: argparse.Namespace) -> ModelSpec:
    template = given.chat_template or FORMATS[given.format or "template"]
    model = ModelSpec(
        path=path,
        backend=given.backend,
        device=given.device,
        dtype=given.dtype,
        quantize=given.quantize,
        tokenizer=TokenizerSpec(chat_template=template),
    )
    validate(model)
    return model


def _build_generation_spec(given: argparse.Namespace) -> GenerationSpec:
    greedy = given.temperature == 0
    spec = GenerationSpec(
        max_new_tokens=given.max_new_tokens,
        temperature=1.0 if greedy else given.temperature,
        greedy=greedy,
        top_p=given.top_p,
        top_k=given.top_k,
        seed=int.from_bytes(os.urandom(4), "little") if given.seed is None else given.seed,
    )
    validate(spec)
    return spec


def _open_conversation(
    model: ModelSpec, spec: GenerationSpec, view: ChatView, *, plain: bool, label: str
) -> Conversation:
    """Load the model and its tokenizer, print a header, and return the conversation.

    With `plain`, the model continues each line as plain text, without a chat template. `label` is
    "A" or "B" if the user chats with two models, and otherwise "". Raises `UserError` for a model
    that cannot chat.
    """
    opened = open_policy(model)
    tokenizer = opened.tokenizer
    facts = opened.engine.description
    chat = Conversation(
        opened.engine, tokenizer, replace(spec, stop_ids=tokenizer.list_stop_ids()), view
    )
    chat.plain = plain or tokenizer.chat_template is None
    chat.context = opened.context
    if label:
        chat.name = opened.name
    view.show_title(f"{label or 'weft chat'}  {opened.name}")
    for note in opened.notes:
        view.show_note(note)
    if opened.adapter:
        view.show_note(f"adapter of {opened.path}")
    device = facts.get("device", model.device or "")
    view.show_note(
        f"{facts['family']}, {_format_amount(facts['num_parameters'])} parameters, {facts.get('dtype', '')} {device}".rstrip()
    )
    view.show_note(chat.describe_settings())
    if chat.plain:
        if plain:
            why = "--plain"
        else:
            why = "this tokenizer has no chat template, so the model is not a chat model"
        view.show_note(
            f"plain text: each line is continued on its own, without a chat template ({why})"
        )
    if tokenizer.eos_id is None:
        view.show_note("the tokenizer has no end-of-sequence token: answers end at max_new_tokens")
    return chat


def _format_amount(count: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
