"""Adapter that lets lm-evaluation-harness evaluate models of weft.

The harness requests log-likelihoods of texts, and greedy or sampled continuations. The engine of an
opened model computes both: log-likelihoods with the packed scorer, in batches of sequences with
shared prefixes, and continuations with the batch generator. Texts are converted to tokens exactly
as in the harness' own backend `hf`, so that results agree.

This module imports lm_eval, which is part of the extra `eval`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jinja2
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
    resolve_max_length,
)

from weft.engine.base import Request
from weft.engine.spec import GenerationSpec
from weft.errors import ConfigError, DataError
from weft.evaluation.continuation_scores import ContinuationScorer, Ids, Score, ScoredPair
from weft.evaluation.models import EvaluatedModel

# Default limit on the tokens of one forward pass, in which shared prefixes count once.
MAX_TOKENS = 16384
MAX_NEW_TOKENS = 256  # default maximum of tokens of a continuation, as in `hf`
# Options of generation that weft does not support, with the values that disable them.
UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "repetition_penalty": (1, 1.0),
    "length_penalty": (1, 1.0),
    "no_repeat_ngram_size": (0,),
    "typical_p": (1, 1.0),
    "early_stopping": (False,),
    "use_cache": (True,),
    "return_full_text": (False,),
}
SAMPLING = ("temperature", "top_p", "top_k", "min_p")


class WeftLM(TemplateLM):
    """Model of weft that answers the requests of lm-evaluation-harness.

    `max_tokens` limits the tokens of one forward pass. `seed` is the seed of sampling. `progress`
    is called with the kind of requests, the number of finished ones and their total.
    """

    backend = "causal"

    def __init__(
        self,
        opened: EvaluatedModel,
        *,
        max_tokens: int = MAX_TOKENS,
        seed: int = 0,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        super().__init__()
        self.opened = opened
        self.tokenizer: Any = opened.tokenizer.hf
        self.max_length = opened.context or resolve_max_length(None, self.tokenizer)
        self._scorer = ContinuationScorer(opened, self.max_length, max_tokens)
        self._seed = seed
        self._report_progress = progress or (lambda kind, done, total: None)

    # -- tokens

    @property
    def eot_token_id(self) -> int:
        """Id of the end-of-sequence token. Raises `ConfigError` if the tokenizer has none."""
        return self.opened.tokenizer.require_eos()

    @property
    def prefix_token_id(self) -> int:
        """Id of the token used as context if a text has none: BOS, or EOS if there is no BOS."""
        bos = self.opened.tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> Ids:
        """Return the token ids of a text.

        By default, the tokenizer adds its special tokens, except to a text that begins with BOS.
        """
        return self._encode([string], add_special_tokens)[0]

    def _encode(self, texts: Sequence[str], add_special_tokens: bool | None = None) -> list[Ids]:
        """Return the token ids of each text, as `tok_encode` does."""
        prefix = self.tokenizer.decode(self.prefix_token_id)
        options: list[dict[str, bool]] = []
        for text in texts:
            if add_special_tokens is not None:
                options.append({"add_special_tokens": add_special_tokens})
            elif text.startswith(prefix):
                options.append({"add_special_tokens": False})
            else:
                options.append({})
        ids = list[Ids]([[]] * len(texts))
        for option in ({}, {"add_special_tokens": False}, {"add_special_tokens": True}):
            indices = [index for index in range(len(texts)) if options[index] == option]
            if indices:
                encoded = self.tokenizer([texts[index] for index in indices], **option)["input_ids"]
                for index, text_ids in zip(indices, encoded, strict=True):
                    ids[index] = list(text_ids)
        return ids

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the text of a conversation.

        If the template rejects the conversation, it is rendered without its system message, as in
        `hf`. Raises `DataError` if the template rejects that too.
        """
        try:
            return self._render(chat_history, add_generation_prompt)
        except jinja2.TemplateError:
            messages = [message for message in chat_history if message["role"] != "system"]
        try:
            return self._render(messages, add_generation_prompt)
        except jinja2.TemplateError as error:
            raise DataError(
                f"the chat template of {self.opened.name} rejects a prompt of this task: {error}; "
                f"set another with --chat-template, or leave --apply_chat_template out"
            ) from error

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        options = {"add_generation_prompt": add_generation_prompt}
        options["continue_final_message"] = not add_generation_prompt
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **options))

    # -- log-likelihoods

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Score]:
        """Return the score of each continuation; see `continuation_scores.Score`.

        The arguments of a request are the texts of the context and of the continuation. Raises
        `DataError` for a continuation without tokens, or one that exceeds the model's context.
        """
        texts = [request.args for request in requests]
        return self._score(self._encode_pairs(texts), "loglikelihood", texts)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of each text, whose only context is BOS.

        A text that exceeds the model's context is divided into windows, so that each token is
        predicted once, with as much context as possible.
        """
        texts = [request.args for request in requests]
        pairs = list[ScoredPair]()
        owners = list[int]()
        for owner, ids in enumerate(self._encode([text for (text,) in texts])):
            windows = utils.get_rolling_token_windows(
                token_list=ids,
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for window in windows:
                pairs.append(ScoredPair(*utils.make_disjoint_window(window)))
                owners.append(owner)
        totals = [0.0] * len(texts)
        for owner, (logprob, _) in zip(owners, self._score(pairs, "rolling"), strict=True):
            totals[owner] += logprob
        for arguments, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", arguments, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], Ids, Ids]], **kwargs: Any
    ) -> list[Score]:
        """Return the scores of encoded requests; see `loglikelihood`."""
        pairs = [ScoredPair(context, continuation) for _, context, continuation in requests]
        return self._score(pairs, "loglikelihood")

    def _encode_pairs(self, texts: Sequence[tuple[str, str]]) -> list[ScoredPair]:
        """Return the tokens of pairs (context, continuation).

        The context is encoded without spaces at its end. The continuation has the other tokens of
        the whole text, so such spaces belong to the continuation. An empty context becomes BOS.
        """
        # Each text is encoded once: the choices of a question have the same context.
        contexts = [context.rstrip() for context, _ in texts]
        full_texts = [context + continuation for context, continuation in texts]
        unique_texts = dict.fromkeys(
            text
            for (context, _), stripped, full_text in zip(texts, contexts, full_texts, strict=True)
            if context
            for text in (stripped, full_text)
        )
        ids_by_text = dict(zip(unique_texts, self._encode(list(unique_texts)), strict=True))
        without_context = [continuation for context, continuation in texts if not context]
        ids_without_context = iter(self._encode(without_context, add_special_tokens=False))
        pairs = []
        for (context, _), stripped, full_text in zip(texts, contexts, full_texts, strict=True):
            if context:
                ids = ids_by_text[stripped]
                pair = ScoredPair(ids, ids_by_text[full_text][len(ids) :])
            else:
                pair = ScoredPair([], next(ids_without_context))
            if not pair.context:
                pair = self._add_prefix(pair.continuation)
            pairs.append(pair)
        return pairs

    def _add_prefix(self, ids: Ids) -> ScoredPair:
        """Return the pair of a continuation without context: BOS is the context."""
        if ids[:1] == [self.prefix_token_id]:
            return ScoredPair(ids[:1], ids[1:])
        return ScoredPair([self.prefix_token_id], ids)

    def _score(
        self,
        pairs: Sequence[ScoredPair],
        kind: str,
        texts: Sequence[tuple[str, str]] | None = None,
    ) -> list[Score]:
        """Return the score of each pair.

        `kind` names the requests for the progress bar. If `texts` has the texts of the pairs,
        results are written to the harness' cache as soon as they are known.
        """

        def store_score(index: int, score: Score) -> None:
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts[index], score)

        return self._scorer.score(
            pairs, store_score, lambda done, total: self._report_progress(kind, done, total)
        )

    def check_requests(self, requests: Sequence[Any]) -> None:
        """Raise `DataError` if the model cannot score one of these requests, of any kind."""
        texts = [request.args for request in requests if request.request_type == "loglikelihood"]
        for pair in self._encode_pairs(texts):
            self._scorer.cut(pair)

    # -- generation

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context, without the text at which it stops.

        The arguments of a request are the text of the context and options of generation. Raises
        `ConfigError` for options that weft does not support, and if they leave no room for the
        context.
        """
        texts = [request.args for request in requests]
        specs = [self.read_generation(options) for _, options in texts]
        prompts = self._encode_prompts([context for context, _ in texts])
        generation_requests = list[Request]()
        for index, (prompt, spec) in enumerate(zip(prompts, specs, strict=True)):
            max_prompt = self.max_length - spec.new_token_limit
            generation_requests.append(Request(str(index), 0, prompt[-max_prompt:], sampling=spec))
        if not generation_requests:
            return []
        tokens = [list[int]() for _ in generation_requests]
        results = [""] * len(generation_requests)
        done = 0
        base = replace(
            specs[0],
            max_new_tokens=max(spec.new_token_limit for spec in specs),
            tokenizer=self.opened.tokenizer,
        )
        with self.opened.engine.generating(base) as generator:
            generator.submit(generation_requests)
            while not generator.idle:
                for event in generator.step():
                    index = int(event.id)
                    tokens[index].append(event.token)
                    if event.finish is not None:
                        results[index] = self._decode(tokens[index], texts[index][1])
                        self.cache_hook.add_partial("generate_until", texts[index], results[index])
                        done += 1
                        self._report_progress("generate_until", done, len(generation_requests))
        return results

    def read_generation(self, options: Mapping[str, Any]) -> GenerationSpec:
        """Return the settings of sampling for a task's options of generation.

        Raises `ConfigError` for an option that weft does not support, for an invalid value, and if
        the number of new tokens leaves no room for a context.
        """
        values = _normalize_options(options)
        count = values.pop("max_gen_toks")
        stops = self._list_stops(values.pop("until"))
        is_sampled = values.pop("do_sample")
        values = select_sampling_options(values)
        if not 0 < count < self.max_length:
            raise ConfigError(
                f"generation option max_gen_toks={count}: must be less than the {self.max_length} "
                f"tokens of the context of {self.opened.name}; set --gen_kwargs max_gen_toks=..."
            )
        if is_sampled and not values.get("temperature"):
            raise ConfigError(
                "generation option do_sample=true needs a temperature above 0; set it with "
                "--gen_kwargs do_sample=true,temperature=1"
            )
        sampling: dict[str, Any] = values if is_sampled else {"greedy": True}
        stop_ids = list(dict.fromkeys([self.eot_token_id, *self.opened.tokenizer.model_stops]))
        return GenerationSpec(
            max_new_tokens=count, stop=stops, stop_ids=stop_ids, seed=self._seed, **sampling
        )

    def _list_stops(self, until: str | list[str] | None) -> list[str]:
        """Return the stop texts of a continuation: those of the task, and the end token."""
        end = self.tokenizer.decode(self.eot_token_id)
        return [text for text in handle_stop_sequences(until, end) if text]

    def _encode_prompts(self, texts: Sequence[str]) -> list[Ids]:
        """Return the token ids of prompts; BOS is not added to a text that begins with it."""
        bos = self.tokenizer.bos_token
        ids = list[Ids]()
        for text in texts:
            has_bos = bos is not None and text.startswith(bos)
            options = {"add_special_tokens": False} if has_bos else {}
            ids += self.tokenizer([text], **options)["input_ids"]
        return ids

    def _decode(self, ids: Ids, options: Mapping[str, Any]) -> str:
        """Return the text of a continuation up to the first stop text."""
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        until = options.get("until")
        stops = self._list_stops(list(until) if isinstance(until, list) else until)
        return str(postprocess_generated_text(text, stops, None))

    # -- facts for result files

    def get_model_info(self) -> dict[str, Any]:
        """Return facts about the model for the result file."""
        return {
            "model_num_parameters": self.opened.engine.description["num_parameters"],
            "model_revision": "",
            "model_sha": "",
        }


def _normalize_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of generation with the harness' own names and defaults."""
    try:
        return dict(normalize_gen_kwargs(dict(options), MAX_NEW_TOKENS))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"generation options: max_gen_toks and temperature must be numbers ({error}); set "
            f"them with --gen_kwargs"
        ) from error


def select_sampling_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of sampling, without options that have no effect.

    Raises `ConfigError` for an option that weft does not support.
    """
    chosen = {}
    for name, value in options.items():
        if name in SAMPLING:
            chosen[name] = value
        elif value not in UNSUPPORTED.get(name, ()):
            raise ConfigError(
                f"generation option {name}={value!r}: weft does not generate with it; take it out "
                f"of the task's generation_kwargs, or override it with --gen_kwargs"
            )
    return chosen
