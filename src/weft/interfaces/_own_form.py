"""A batch in a role's own form: prompts and completions as the text that its model was trained on, in its own tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weft.data.chat import common_prefix
from weft.data.datasets.prompt import MESSAGES
from weft.data.sample import SequenceSample
from weft.data.tokenizer import Tokenizer
from weft.errors import ConfigError
from weft.interfaces.base import Model

Ids = list[int]


def same_tokens(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether the same ids mean the same tokens; chat templates and habits may differ."""
    return one is other or one.fingerprint == other.fingerprint or one.hf.get_vocab() == other.hf.get_vocab()


def has_own_form(model: Model, batch: SequenceSample) -> bool:
    """Whether a role reads another text than the batch's tokens: it has another vocabulary, or the prompts are messages and its
    chat template is another one."""
    if not same_tokens(model.tokenizer, model.data_tokenizer):
        return True
    template = model.tokenizer.chat_template
    return MESSAGES in batch.metadata and template is not None and template != model.data_tokenizer.chat_template


def in_own_form(model: Model, batch: SequenceSample, prefix: str = "", suffix: str = "") -> SequenceSample:
    """The batch in the role's own tokens: same ids, one prompt an id, as many completions.

    Prompts of messages are rendered with the role's chat template, a completion as the assistant's turn. Others are text, with
    `prefix` and `suffix` around the prompt; where one of these is set, so are messages. A completion that was cut by its length
    has no end token. Raises `ConfigError` for messages where the role has no template.
    """
    owner = batch.group_of("completion")
    completions: list[list[Ids]] = [[] for _ in batch.ids]
    for index, ids in zip(owner, batch.sequences("completion"), strict=True):
        completions[int(index)].append(ids.tolist())
    nothing = (None,) * batch.num_ids
    given = batch.metadata.get(MESSAGES, nothing), batch.metadata.get("tools", nothing)
    made = []
    for prompt, group, messages, tools in zip(batch.sequences("prompt"), completions, *given, strict=True):
        said = [_said(model, prompt.tolist(), ids) for ids in group]
        if messages is None or prefix or suffix:
            text = prefix + model.data_tokenizer.decode(prompt.tolist(), skip_special=True) + suffix
            made.append(_as_text(model.tokenizer, text, said))
        else:
            made.append(_as_turns(model, messages, tools, said))
    lengths = {
        "prompt": [[len(prompt)] for prompt, _ in made],
        "completion": [[len(ids) for ids in group] for _, group in made],
    }
    flat = [ids for _, group in made for ids in group]
    data = {"prompt": _packed([prompt for prompt, _ in made]), "completion": _packed(flat)}
    return SequenceSample.from_groups(batch.ids, lengths, data)


def _said(model: Model, prompt: Ids, ids: Ids) -> tuple[str, bool]:
    """(text of a completion, whether it was ended)."""
    ended = len(ids) > 0 and ids[-1] in model.data_tokenizer.stop_ids()
    return model.data_tokenizer.decode_after(prompt, ids, skip_special=True), ended


def _as_text(tokenizer: Tokenizer, prompt: str, said: Sequence[tuple[str, bool]]) -> tuple[Ids, list[Ids]]:
    """Prompt and completions as plain text; a completion that was ended gets the role's own EOS."""
    made = []
    for text, ended in said:
        own = tokenizer.encode(text, bos=False)
        made.append([*own, tokenizer.require_eos()] if ended else own)
    return tokenizer.encode(prompt), made


def _as_turns(
    model: Model, messages: Sequence[Mapping[str, Any]], tools: Any, said: Sequence[tuple[str, bool]]
) -> tuple[Ids, list[Ids]]:
    """Prompt and completions as the role's template renders them, up to the end of the assistant's turn."""
    tokenizer = model.tokenizer
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"role {model.role!r} has another tokenizer than the data and no chat template, so it cannot be shown prompts that "
            f"are messages; set {model.role}.tokenizer.chat_template to a jinja file, or {model.role}.prompt_suffix (and "
            "prompt_prefix) to the text that stands around a prompt"
        )
    prompt = tokenizer.encode_chat(messages, tools, add_generation_prompt=True)
    wholes = []
    for text, ended in said:
        ids = tokenizer.encode_chat([*messages, {"role": "assistant", "content": text}], tools)
        wholes.append(_up_to_end(tokenizer, ids, common_prefix(prompt, ids), ended=ended))
    shared = min(common_prefix(prompt, *wholes), *(len(ids) - 1 for ids in wholes))
    return wholes[0][:shared], [ids[shared:] for ids in wholes]


def _up_to_end(tokenizer: Tokenizer, ids: Ids, start: int, *, ended: bool) -> Ids:
    """The conversation up to the token that ends its last turn, with it where the turn was ended."""
    stop = None if tokenizer.turn_end is None else tokenizer.special_id(tokenizer.turn_end)
    last = next((at for at in range(len(ids) - 1, start - 1, -1) if ids[at] == stop), None)
    kept = ids if last is None else ids[:last]
    if not ended:
        return kept
    end = tokenizer.require_eos() if last is None else ids[last]
    return kept if kept and kept[-1] == end else [*kept, end]


def _packed(sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.tensor([token for ids in sequences for token in ids], dtype=torch.int64)
