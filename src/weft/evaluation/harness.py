"""Models of weft as models of lm-evaluation-harness.

The harness asks for log-likelihoods of texts and for greedy or sampled continuations. Both are
computed by the engine of an opened model: log-likelihoods by the packed scorer, in batches of
sequences that share the prefixes of their prompts, and continuations by the batch generator. Texts
are converted to tokens exactly as in the harness' own backend `hf`, so that results agree.

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
MAX_NEW_TOKENS = 256  # tokens of a continuation if the task gives no number, as in `hf`
# Options of generation that weft lacks, with the values that have no effect.
NEUTRAL: Mapping[str, Sequence[Any]] = {
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
        self._show = progress or (lambda kind, done, total: None)

    # -- tokens

    @property
    def eot_token_id(self) -> int:
        """Id of the end-of-sequence token. Raises `ConfigError` if the tokenizer has none."""
        return self.opened.tokenizer.require_eos()

    @property
    def prefix_token_id(self) -> int:
        """Id of the token before a text without context: BOS, or EOS if there is no BOS."""
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
        begins = self.tokenizer.decode(self.prefix_token_id)
        options: list[dict[str, bool]] = []
        for text in texts:
            if add_special_tokens is not None:
                options.append({"add_special_tokens": add_special_tokens})
            elif text.startswith(begins):
                options.append({"add_special_tokens": False})
            else:
                options.append({})
        ids = list[Ids]([[]] * len(texts))
        for option in ({}, {"add_special_tokens": False}, {"add_special_tokens": True}):
            places = [place for place, own in enumerate(options) if own == option]
            if places:
                encoded = self.tokenizer([texts[place] for place in places], **option)["input_ids"]
                for place, own in zip(places, encoded, strict=True):
                    ids[place] = list(own)
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
            rest = [message for message in chat_history if message["role"] != "system"]
        try:
            return self._render(rest, add_generation_prompt)
        except jinja2.TemplateError as error:
            raise DataError(
                f"the chat template of {self.opened.name} rejects a prompt of this task: {error}; "
                f"set another with --chat-template, or leave --apply_chat_template out"
            ) from error

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        ends = {"add_generation_prompt": add_generation_prompt}
        ends["continue_final_message"] = not add_generation_prompt
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **ends))

    # -- log-likelihoods

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Score]:
        """Return (log-probability, whether greedy decoding gives it) of each continuation.

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
        predicted once, and from as many tokens as the context has.
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
        """Return (log-probability, whether greedy) of encoded requests; see `loglikelihood`."""
        pairs = [ScoredPair(context, continuation) for _, context, continuation in requests]
        return self._score(pairs, "loglikelihood")

    def _encode_pairs(self, texts: Sequence[tuple[str, str]]) -> list[ScoredPair]:
        """Return the tokens of pairs (context, continuation).

        The tokens of a continuation are those that it adds to its context; spaces at the end of the
        context belong to the continuation. An empty context becomes BOS.
        """
        # Each text is encoded once: the choices of a question have the same context.
        heads = [context.rstrip() for context, _ in texts]
        wholes = [context + continuation for context, continuation in texts]
        unique = dict.fromkeys(
            text
            for (context, _), head, whole in zip(texts, heads, wholes, strict=True)
            if context
            for text in (head, whole)
        )
        known = dict(zip(unique, self._encode(list(unique)), strict=True))
        alone = [continuation for context, continuation in texts if not context]
        first = iter(self._encode(alone, add_special_tokens=False))
        pairs = []
        for (context, _), head, whole in zip(texts, heads, wholes, strict=True):
            if context:
                ids = known[head]
                pair = ScoredPair(ids, known[whole][len(ids) :])
            else:
                pair = ScoredPair([], next(first))
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
        """Return (log-probability, whether greedy) for each pair.

        `kind` names the requests for the progress bar. If `texts` has the texts of the pairs,
        results are written to the harness' cache as soon as they are known.
        """

        def keep(index: int, score: Score) -> None:
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts[index], score)

        return self._scorer.score(pairs, keep, lambda done, total: self._show(kind, done, total))

    def check_requests(self, requests: Sequence[Any]) -> None:
        """Raise `DataError` if the model cannot score one of these requests, of any kind."""
        texts = [each.args for each in requests if each.request_type == "loglikelihood"]
        for pair in self._encode_pairs(texts):
            self._scorer.cut(pair)

    # -- generation

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context, without the text at which it stops.

        The arguments of a request are the text of the context and options of generation. Raises
        `ConfigError` for options that weft lacks, and if they leave no room for the context.
        """
        texts = [request.args for request in requests]
        specs = [self.read_generation(options) for _, options in texts]
        prompts = self._encode_prompts([context for context, _ in texts])
        own = list[Request]()
        for index, (prompt, spec) in enumerate(zip(prompts, specs, strict=True)):
            room = self.max_length - spec.new_token_limit
            own.append(Request(str(index), 0, prompt[-room:], sampling=spec))
        if not own:
            return []
        tokens = [list[int]() for _ in own]
        results = [""] * len(own)
        done = 0
        base = replace(
            specs[0],
            max_new_tokens=max(spec.new_token_limit for spec in specs),
            tokenizer=self.opened.tokenizer,
        )
        with self.opened.engine.generating(base) as generator:
            generator.submit(own)
            while not generator.idle:
                for event in generator.step():
                    index = int(event.id)
                    tokens[index].append(event.token)
                    if event.finish is not None:
                        results[index] = self._decode(tokens[index], texts[index][1])
                        self.cache_hook.add_partial("generate_until", texts[index], results[index])
                        done += 1
                        self._show("generate_until", done, len(own))
        return results

    def read_generation(self, options: Mapping[str, Any]) -> GenerationSpec:
        """Return the settings of sampling for a task's options of generation.

        Raises `ConfigError` for an option that weft lacks, for an invalid value, and if the number
        of new tokens leaves no room for a context.
        """
        values = _normalize_options(options)
        count = values.pop("max_gen_toks")
        stops = self._list_stops(values.pop("until"))
        sampled = values.pop("do_sample")
        values = select_sampling_options(values)
        if not 0 < count < self.max_length:
            raise ConfigError(
                f"generation option max_gen_toks={count}: must be less than the {self.max_length} "
                f"tokens of the context of {self.opened.name}; set --gen_kwargs max_gen_toks=..."
            )
        if sampled and not values.get("temperature"):
            raise ConfigError(
                "generation option do_sample=true needs a temperature above 0; set it with "
                "--gen_kwargs do_sample=true,temperature=1"
            )
        how: dict[str, Any] = values if sampled else {"greedy": True}
        stop_ids = list(dict.fromkeys([self.eot_token_id, *self.opened.tokenizer.model_stops]))
        return GenerationSpec(
            max_new_tokens=count, stop=stops, stop_ids=stop_ids, seed=self._seed, **how
        )

    def _list_stops(self, until: str | list[str] | None) -> list[str]:
        """Return the texts that end a continuation: those of a task, and the end token."""
        end = self.tokenizer.decode(self.eot_token_id)
        return [text for text in handle_stop_sequences(until, end) if text]

    def _encode_prompts(self, texts: Sequence[str]) -> list[Ids]:
        """Return the token ids of prompts; BOS is not added to a text that begins with it."""
        begins = self.tokenizer.bos_token
        ids = list[Ids]()
        for text in texts:
            own = begins is not None and text.startswith(begins)
            ids += self.tokenizer([text], **({"add_special_tokens": False} if own else {}))[
                "input_ids"
            ]
        return ids

    def _decode(self, ids: Ids, options: Mapping[str, Any]) -> str:
        """Return the text of a continuation up to the first of the texts that end it."""
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

    Raises `ConfigError` for an option that weft lacks.
    """
    chosen = {}
    for name, value in options.items():
        if name in SAMPLING:
            chosen[name] = value
        elif value not in NEUTRAL.get(name, ()):
            raise ConfigError(
                f"generation option {name}={value!r}: weft does not generate with it; take it out "
                f"of the task's generation_kwargs, or override it with --gen_kwargs"
            )
    return chosen
