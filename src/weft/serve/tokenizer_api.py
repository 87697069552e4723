"""Endpoints of a model's tokenizer: `/tokenize`, `/detokenize` and `/tokenizer_info`.

They are compatible with vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from weft.serve.exchange import RequestRefused
from weft.serve.openai_fields import check_names, read_flag
from weft.serve.prompts import PromptReader, is_ids

TEXT = ("model", "prompt", "add_special_tokens", "return_token_strs")
CHAT = ("model", "messages", "add_generation_prompt", "add_special_tokens", "return_token_strs")
TOKENS = ("model", "tokens")
# vLLM's fields that weft does not support -> values without an effect, which are accepted.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "tools": ([],),
}


@dataclass(frozen=True)
class TokenizerEndpoints:
    """Endpoints of one model's tokenizer. The methods must be called in a worker thread."""

    reader: PromptReader

    def tokenize(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the token ids of a text (`prompt`) or of a conversation (`messages`).

        Raises `RequestRefused` if the request is invalid.
        """
        chat = body.get("messages") is not None
        check_names(body, CHAT if chat else TEXT, UNSUPPORTED, (*TEXT, *CHAT))
        # Like vLLM, by default add special tokens to a text, but not to a conversation, because the
        # chat template writes them.
        add_special = _read_flag(body, "add_special_tokens", not chat)
        if chat:
            ids = self.reader.encode_chat(
                body["messages"],
                add_generation_prompt=_read_flag(body, "add_generation_prompt", True),
                bos=self.reader.model.tokenizer.add_bos if add_special else None,
            )
        else:
            ids = self._encode_text(body.get("prompt"), add_special)
        model = self.reader.model
        strings = None
        if read_flag(body, "return_token_strs"):
            strings = [str(token) for token in model.tokenizer.hf.convert_ids_to_tokens(ids)]
        max_length = model.context or self.reader.limits.max_prompt_tokens
        return {
            "count": len(ids),
            "max_model_len": max_length,
            "tokens": ids,
            "token_strs": strings,
        }

    def _encode_text(self, prompt: Any, add_special: bool) -> list[int]:
        """Return the token ids of a text; raise `RequestRefused` if it is not a valid text."""
        if not isinstance(prompt, str):
            raise RequestRefused(
                400, "prompt must be a string; or send a conversation as messages", param="prompt"
            )
        self.reader.check_bytes(len(prompt.encode(errors="surrogatepass")), "prompt")
        bos = None if add_special else False
        return self.reader.background.encode(self.reader.model.tokenizer, prompt, bos)

    def decode_tokens(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the text of the ids `tokens`, including special tokens.

        Raises `RequestRefused` if the request is invalid.
        """
        check_names(body, TOKENS, UNSUPPORTED)
        tokens = body.get("tokens")
        if isinstance(tokens, list) and not tokens:
            return {"prompt": ""}
        if not is_ids(tokens):
            raise RequestRefused(400, "tokens must be a list of token ids", param="tokens")
        ids = self.reader.read_ids(tokens)
        self.reader.check_ids(ids, "tokens")
        tokenizer = self.reader.background.get_tokenizer(self.reader.model.tokenizer)
        return {"prompt": tokenizer.decode(ids)}

    def describe(self) -> dict[str, Any]:
        """Return the tokenizer's class, special tokens and chat template."""
        tokenizer = self.reader.model.tokenizer
        special_tokens = {
            name: getattr(tokenizer.hf, name)
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        }
        return {
            "tokenizer_class": type(tokenizer.hf).__name__,
            **special_tokens,
            "add_bos_token": tokenizer.add_bos,
            "chat_template": tokenizer.chat_template,
            "model_max_length": self.reader.model.context,
        }


ANSWERS: Mapping[str, Callable[[TokenizerEndpoints, Mapping[str, Any]], dict[str, Any]]] = {
    "/tokenize": TokenizerEndpoints.tokenize,
    "/detokenize": TokenizerEndpoints.decode_tokens,
}


def _read_flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return the value of a Boolean field, or `default` if the field is absent."""
    return default if body.get(name) is None else read_flag(body, name)
