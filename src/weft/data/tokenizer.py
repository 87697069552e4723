"""Conversion between text and token ids, shared by training, generation, chat and rewards.

The class `Tokenizer` wraps a `transformers` tokenizer. It overrides special tokens, adds BOS at
most once, renders conversations with a mask of the assistant's text, reads a bare sentencepiece
`tokenizer.model` without changing any id, and decodes text while it is generated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from weft.data import chat, rendered, tokenizer_checks, tokenizer_files
from weft.data.messages import (
    ConversationAdditions,
    normalize_messages,
    normalize_tools,
    prepend_prefix,
)
from weft.data.spec import TEMPLATES, TokenizerSpec
from weft.data.tokenizer_checks import find_template_problem, limit_time
from weft.data.tokenizer_files import format_option
from weft.data.turns import TemplateFunctions, find_leading_token
from weft.errors import ConfigError, DataError, NoTemplate, UserError
from weft.reading import explain_read_errors
from weft.storage.copies import copy_if_remote
from weft.writing import write

NO_ADDITIONS = ConversationAdditions()


@dataclass(frozen=True)
class Tokenizer:
    """Tokenizer of a model, with weft's options. `Tokenizer.load` reads one from files.

    Attributes:
        hf: underlying `transformers` tokenizer
        add_bos: whether `encode` adds BOS by default
        chat_bos: whether BOS is added to conversations whose chat template writes none, as set by
            the option `add_bos_token`
        model_stops: ids that end a completion according to the model's configuration
        added_from: first id that the option `add_tokens` added, or None if it added none
        option: prefix of this tokenizer's options in error messages, such as "tokenizer"
        additions: system texts that are added to conversations for training
        draw: random generator for choices made during tokenization (see `with_draw`), or None
        max_tokens: maximum number of tokens of a text, or None; for a longer text,
            `encode` can raise `RowTooLong`
    """

    hf: PreTrainedTokenizerBase
    add_bos: bool = False
    chat_bos: bool = False
    model_stops: tuple[int, ...] = ()
    added_from: int | None = None
    option: str = "tokenizer"
    additions: ConversationAdditions = NO_ADDITIONS
    draw: np.random.Generator | None = None
    max_tokens: int | None = None

    @classmethod
    def load(
        cls,
        spec: TokenizerSpec,
        model_path: str | None = None,
        trust_remote_code: bool = False,
        option: str = "tokenizer",
    ) -> Tokenizer:
        """Read a tokenizer and apply the options in `spec`.

        The tokenizer is read from `spec.path` or, if it is not set, from `model_path`: a directory,
        a `tokenizer.json`, a sentencepiece file or a hub name. `option` is the prefix of the
        options in error messages. Raises `UserError` if no tokenizer can be read, if a special
        token in `spec` is not in the vocabulary, or if the chat template does not compile.
        """
        if (path := spec.path or model_path) is None:
            raise ConfigError(f"{option}.path is not set and there is no model path; set one")
        path = copy_if_remote(path)
        model_path = None if model_path is None else copy_if_remote(model_path)
        with tokenizer_files.silence_transformers():
            hf = tokenizer_files.read_tokenizer(
                path, trust_remote_code, option, own=spec.path is None
            )
        added_from = tokenizer_files.apply_spec(hf, spec, path, option)
        bos = hf.bos_token_id
        if spec.add_bos_token is None:
            add_bos = bos is not None and list(hf("a", verbose=False)["input_ids"])[:1] == [bos]
        else:
            add_bos = spec.add_bos_token
            if add_bos and bos is None:
                raise ConfigError(
                    f"{option}.add_bos_token=true, but {path} has no BOS token; set "
                    f"{option}.bos_token"
                )
            tokenizer_files.set_add_bos(hf, add_bos)
        stops = tokenizer_files.read_stop_ids(model_path or path)
        return cls(hf, add_bos, bool(spec.add_bos_token), stops, added_from, option)

    # -- ids and text

    def encode(self, text: str, *, bos: bool | None = None) -> list[int]:
        """Return the token ids of a text, without EOS.

        `bos` determines whether the ids begin with BOS; None means the tokenizer's default. BOS is
        never added twice.
        """
        ids = list(tokenizer_files.encode_text(self.hf, text, self.max_tokens)["input_ids"])
        if (
            (self.add_bos if bos is None else bos)
            and self.bos_id is not None
            and ids[:1] != [self.bos_id]
        ):
            return [self.bos_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Return the text of token ids, without the cleanup of spaces that `transformers` offers.

        With `skip_special`, special tokens are left out.
        """
        return str(
            self.hf.decode(
                list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
            )
        )

    def decode_after(
        self, before: Sequence[int], ids: Sequence[int], skip_special: bool = False
    ) -> str:
        """Return the text that `ids` add to the text of the ids `before`.

        The space before the first word is kept, although sentencepiece drops it at the beginning of
        a text.
        """
        context = list(before)[-4:]
        head = self.decode(context, skip_special)
        full_text = self.decode([*context, *ids], skip_special)
        if head and full_text.startswith(head):
            return full_text[len(head) :]
        return self.decode(ids, skip_special)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]] | None:
        """Return the ids of a text, without BOS, and the character range [start, stop) of each.

        Returns None if the tokenizer does not provide offsets.
        """
        if not self.hf.is_fast:
            return None
        encoding = tokenizer_files.encode_text(
            self.hf, text, self.max_tokens, return_offsets_mapping=True
        )
        return list(encoding["input_ids"]), [
            (int(a), int(b)) for a, b in encoding["offset_mapping"]
        ]

    def encode_with_spans(
        self, text: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[bool]]:
        """Tokenize a text and return (ids, mask); the mask is True on tokens that overlap a span.

        `spans` are character ranges [start, stop).
        """
        ids, mask = chat.mask_spans(
            lambda part: self.encode(part, bos=False), self.encode_with_offsets, text, spans
        )
        bos = self.bos_id
        if self.add_bos and bos is not None and ids[:1] != [bos]:
            return ([bos, *ids], [False, *mask])
        return (ids, mask)

    # -- chat

    @property
    def chat_template(self) -> str | None:
        """Jinja chat template, or None if the tokenizer has none.

        If the tokenizer has several templates, the one called "default" is used.
        """
        template = self.hf.chat_template
        return template.get("default") if isinstance(template, dict) else template

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Render a conversation to text with the chat template.

        Raises `DataError` if the template rejects these messages.
        """
        problem = find_template_problem(self.require_chat_template())
        if problem is not None:
            raise tokenizer_files.build_bad_template_error(self.name, problem, self.option)
        with (
            explain_read_errors(chat.REFUSAL, DataError),
            limit_time(tokenizer_checks.CONVERSATION_SECONDS),
        ):
            named = rendered.rename_reasoning_key(messages, self.hf.get_chat_template(None, tools))
            text = self.hf.apply_chat_template(
                named, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        assert isinstance(text, str)
        return text

    def render_with_additions(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any = None,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """Return the text of a conversation, including the system texts that `additions` adds.

        By default, the result is the text that `mask_chat` tokenizes for training. With
        `add_generation_prompt`, it is the text that `encode_context` tokenizes; the only addition
        is then the system text `additions.prefix`.
        """
        self.check_template()
        conversation = normalize_messages(messages)
        if not add_generation_prompt:
            conversation = self.additions.apply(conversation, self.draw)
        elif self.additions.prefix is not None:
            conversation = prepend_prefix(conversation, self.additions.prefix)
        return self.render(conversation, normalize_tools(tools), add_generation_prompt)

    def bound_tokens(self, text: str) -> int | None:
        """Return an upper bound on the number of tokens of a text, without tokenizing the text.

        BOS is not counted. Returns None if no bound is known for this tokenizer.
        """
        if self._tokens_per_byte is None:
            return None
        per_ascii_byte, per_other_byte = self._tokens_per_byte
        return len(text.encode()) * (per_ascii_byte if text.isascii() else per_other_byte)

    @cached_property
    def _tokens_per_byte(self) -> tuple[int, int] | None:
        return tokenizer_files.compute_tokens_per_byte(self.hf)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """Render a conversation and return its token ids.

        The ids begin with BOS if the template writes it. If the option `add_bos_token` is true,
        they begin with BOS in any case.
        """
        self.check_template()
        text = self.render(
            normalize_messages(messages), normalize_tools(tools), add_generation_prompt
        )
        return self.encode(text, bos=self.chat_bos)

    def encode_context(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None
    ) -> tuple[list[int], frozenset[str]]:
        """Tokenize a conversation with the generation prompt, so that a reply can be generated.

        Returns (token ids, names of the message parts that no token represents). Raises `DataError`
        if the template omits essential parts (see `weft.data.rendered`).
        """
        conversation = normalize_messages(messages)
        schemas = normalize_tools(tools)
        if self.additions.prefix is not None:
            conversation = prepend_prefix(conversation, self.additions.prefix)
        ids = self.encode_chat(conversation, schemas, add_generation_prompt=True)
        return ids, rendered.check_lost_fields(
            rendered.find_lost_fields(self.render, conversation, schemas, prompt=True),
            conversation,
            self.name,
        )

    def mask_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None
    ) -> chat.MaskedConversation:
        """Tokenize a conversation, with a mask of the assistant's text and end tokens.

        The mask is computed from spans of the rendered text (see `weft.data.chat`), never from ids.
        If the template does not end the last reply with a token, EOS is added. Raises `DataError`
        if the assistant's turns cannot be located, or if essential parts of the messages are not
        rendered.
        """
        self.check_template()
        template = TemplateFunctions(
            self.render,
            lambda text: self.encode(text, bos=False),
            self.encode_with_offsets,
            self._find_marked_spans,
            self.turn_end,
            self._added_tokens,
            self.name,
            self.option,
        )
        # Tokenize, then add BOS and EOS if the template does not write them.
        conversation = chat.mask_conversation(
            template,
            self.additions.apply(normalize_messages(messages), self.draw),
            normalize_tools(tools),
        )
        ids = conversation.ids
        mask = conversation.mask
        if self.chat_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
            mask = [False, *mask]
        if self.turn_end is None and self.eos_id is not None:
            ids, mask = chat.insert_eos(ids, mask, self.eos_id, self.decode)
        if not self.additions.label_masking:
            return replace(
                conversation,
                ids=ids,
                mask=[index > 0 for index in range(len(ids))],
                unused=conversation.unused - {chat.UNTRAINED_MESSAGES},
            )
        return replace(conversation, ids=ids, mask=mask)

    def _find_marked_spans(
        self, messages: Sequence[dict[str, Any]], tools: Any
    ) -> list[tuple[int, int]] | None:
        # Some tokenizers have another template for conversations with tools.
        template = self.hf.get_chat_template(None, tools)
        named = rendered.rename_reasoning_key(messages, template)
        return chat.find_generation_spans(template, named, tools, dict(self.hf.special_tokens_map))

    @cached_property
    def text_around_reply(self) -> tuple[str, str]:
        """Texts that the chat template renders directly before and after a reply without reasoning.

        The first text, for example an empty think block, is between the generation prompt and the
        reply. Both texts are empty if there is no template.
        """
        if self.chat_template is None:
            return ("", "")
        return rendered.find_text_around_reply(self.render)

    @cached_property
    def turn_end(self) -> str | None:
        """Token that the chat template renders right after a reply, or None if no such token
        exists.
        """
        return find_leading_token(self.text_around_reply[1].lstrip(), self._added_tokens)

    @cached_property
    def _added_tokens(self) -> list[str]:
        return [token.content for token in self.hf.added_tokens_decoder.values()]

    def list_stop_ids(self) -> list[int]:
        """Return the ids that end a completion, without duplicates.

        They are EOS, the end-of-turn token of the template, and the stop ids in the model's
        configuration.
        """
        candidates = [
            self.eos_id,
            None if self.turn_end is None else self.find_special_id(self.turn_end),
            *self.model_stops,
        ]
        return list(dict.fromkeys(id for id in candidates if isinstance(id, int)))

    def find_special_id(self, text: str) -> int | None:
        """Return the id of the added token `text`, or None if no added token has this text."""
        return next(
            (id for id, token in self.hf.added_tokens_decoder.items() if token.content == text),
            None,
        )

    def with_draw(self, draw: np.random.Generator) -> Tokenizer:
        """Return a copy of the tokenizer that draws its random choices from `draw`.

        For system tags, the choices are the order of the lines and which lines to drop. For a
        ranking row with a list of bad replies, the choice is which one to use. Cached properties
        are copied too.
        """
        tokenizer = copy(self)
        object.__setattr__(tokenizer, "draw", draw)
        return tokenizer

    def with_padding(self, token: str | None) -> Tokenizer:
        """Return a copy of the tokenizer whose padding token is `token`. None removes the token."""
        hf = deepcopy(self.hf)
        hf.pad_token = token
        return replace(self, hf=hf)

    # -- properties

    @property
    def name(self) -> str:
        """Path or hub name that the tokenizer was loaded from."""
        return str(self.hf.name_or_path or "the tokenizer")

    @property
    def eos_id(self) -> int | None:
        return self.hf.eos_token_id

    @property
    def bos_id(self) -> int | None:
        return self.hf.bos_token_id

    @property
    def pad_id(self) -> int | None:
        return self.hf.pad_token_id

    @property
    def eos_token(self) -> str | None:
        return self.hf.eos_token

    @cached_property
    def vocab_size(self) -> int:
        """Largest token id plus one, including added tokens.

        The embedding of the model must have at least this many rows.
        """
        return max(self.hf.get_vocab().values(), default=-1) + 1

    @cached_property
    def fingerprint(self) -> str:
        """Hash (sha256) of everything that affects token ids.

        This includes the vocabulary, merges, special tokens, templates, BOS settings, and the
        system texts that are added to conversations.
        """
        additions = [] if self.additions == NO_ADDITIONS else [asdict(self.additions)]
        return tokenizer_files.compute_fingerprint(self.hf, self.add_bos, self.chat_bos, *additions)

    def require_eos(self) -> int:
        """Return the id of EOS. Raises `UserError` if the tokenizer has no EOS."""
        if self.eos_id is None:
            raise UserError(
                "the tokenizer has no end-of-sequence token, and completions need one to end with; "
                f"set {self.option}.eos_token to a token of its vocabulary (its special tokens: "
                f"{', '.join(self._added_tokens[:8]) or 'none'})"
            )
        return self.eos_id

    def require_chat_template(self) -> str:
        """Return the chat template. Raises `UserError` if the tokenizer has no template."""
        if self.chat_template is None:
            raise NoTemplate(
                "the tokenizer has no chat template, and message lists need one; write "
                f"{format_option(self.option, 'chat_template')}=zephyr (or another of "
                f"{', '.join(TEMPLATES)}, or a jinja file), or use text columns"
            )
        return self.chat_template

    def check_template(self) -> None:
        """Raise `UserError` unless there is a chat template that can render text conversations."""
        self.require_chat_template()
        if fault := self._template_fault:
            raise tokenizer_files.build_bad_template_error(
                self.name, f"{fault}, and weft gives it text", self.option
            )

    @cached_property
    def _template_fault(self) -> str | None:
        return rendered.find_template_fault(self.render)

    def save(self, directory: str | Path) -> None:
        """Write the tokenizer files, including the chat template, in `transformers` format."""
        self.hf.save_pretrained(str(directory))
        config = Path(directory) / "tokenizer_config.json"
        values = json.loads(config.read_text())
        if values.get("tokenizer_class") == "TokenizersBackend":
            # Write a class name that transformers 4 knows too.
            values["tokenizer_class"] = "PreTrainedTokenizerFast"
            write(config, json.dumps(values, indent=2, ensure_ascii=False) + "\n")


class StreamDecoder:
    """Incremental decoder for a completion that is still being generated.

    `feed` returns new text as soon as further tokens cannot change it, and `flush` returns the
    rest. A character whose bytes are spread over several tokens is returned with the last of these
    tokens.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids: list[int] = []
        # Index at which decoding begins, a few tokens back: a token's text can depend on the token
        # before it.
        self._start = 0
        self._num_returned = 0  # number of tokens whose text was returned

    def feed(self, ids: Sequence[int]) -> str:
        """Add token ids and return the new text, up to the last complete character."""
        new_text = ""
        for id in ids:
            self._ids.append(id)
            before, now = self._decode_texts()
            if len(now) > len(before) and not now.endswith("\ufffd"):
                new_text += now[len(before) :]
                self._start = self._num_returned
                self._num_returned = len(self._ids)
        return new_text

    def flush(self) -> str:
        """Return the remaining text. An incomplete character becomes U+FFFD."""
        before, now = self._decode_texts()
        self._start = self._num_returned = len(self._ids)
        return now[len(before) :]

    def _decode_texts(self) -> tuple[str, str]:
        window = self._ids[self._start :]
        decode = self._tokenizer.decode
        return decode(window[: self._num_returned - self._start], self._skip_special), decode(
            window, self._skip_special
        )


def find_step_ends(text: str, mark: str) -> list[int]:
    """Return the character offset at which each reasoning step of a text ends.

    A step ends after each `mark`, and at the end of the text if more than white space follows the
    last mark. A step that is only white space is joined to the next one.
    """
    ends: list[int] = []
    start = 0
    while (position := text.find(mark, start)) >= 0:
        start = position + len(mark)
        if text[ends[-1] if ends else 0 : position].strip():
            ends.append(start)
    if text[ends[-1] if ends else 0 :].strip():
        ends.append(len(text))
    return ends


def find_step_tokens(
    tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], ends: Sequence[int]
) -> list[int]:
    """Return the index of the token at which each reasoning step of a completion ends.

    This token contains the last character of the step. `ids` are the tokens of the completion.
    `ends` are the character offsets at which the steps end, as returned by `find_step_ends`.
    """

    def build_predicate(end: int) -> Callable[[int], bool]:
        return lambda n: len(tokenizer.decode_after(prompt, ids[: n + 1], True)) >= end

    return [_find_first(build_predicate(end), len(ids)) for end in ends]


def _find_first(holds: Callable[[int], bool], count: int) -> int:
    """Return the first index below `count` at which `holds` is true, by binary search.

    Once `holds` is true, it must be true for all larger indices. Returns the last index if it is
    never true.
    """
    low = 0
    high = count - 1
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
