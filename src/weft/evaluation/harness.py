"""Models of weft as models of lm-evaluation-harness.

The harness asks for log-likelihoods of texts and for greedy or sampled continuations. Both are
computed by the engine of an opened model: log-likelihoods by the packed scorer, in batches of
sequences that share the prefixes of their prompts, and continuations by the batch generator. Texts
are converted to tokens exactly as in the harness' own backend `hf`, so that results agree.

This module imports lm_eval, which is part of the extra `eval`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
    resolve_max_length,
)

from weft.algorithms.base import to_host_array
from weft.checkpoints import hf_io
from weft.data.groups import SHARES_PREFIXES
from weft.data.sample import SequenceSample
from weft.engine.base import Request
from weft.engine.spec import GenerationSpec
from weft.errors import ConfigError, DataError
from weft.evaluation.models import OpenedModel

# Default limit on the tokens of one forward pass, in which shared prefixes count once.
MAX_TOKENS = 16384
# Limit on the tokens of one forward pass if shared prefixes count every time, as a multiple.
MAX_REPEATS = 16
MAX_NEW_TOKENS = 256  # tokens of a continuation if the task gives no number, as in `hf`
# Families with a table of positions; they cannot read a token after the last position.
POSITION_TABLES = ("gpt2", "gpt_bigcode", "gpt_neo", "opt", "xglm", "biogpt", "openai-gpt")
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

Ids = list[int]


@dataclass(frozen=True)
class ScoredPair:
    """Tokens of a context and of the continuation whose log-probability is wanted."""

    context: Ids
    continuation: Ids


class WeftLM(TemplateLM):
    """Model of weft that answers the requests of lm-evaluation-harness.

    `max_tokens` limits the tokens of one forward pass. `seed` is the seed of sampling. `progress`
    is called with the kind of requests, the number of finished ones and their total.
    """

    backend = "causal"

    def __init__(
        self,
        opened: OpenedModel,
        *,
        max_tokens: int = MAX_TOKENS,
        seed: int = 0,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        super().__init__()
        self.opened = opened
        self.tokenizer: Any = opened.tokenizer.hf
        self.max_length = opened.context or resolve_max_length(None, self.tokenizer)
        self._max_tokens = max(max_tokens, self.max_length + 1)
        self._seed = seed
        self._progress = progress
        family = hf_io.read_raw(opened.path).get("model_type")
        # The last token of a sequence is only a label, but the engine reads it too.
        self._longest = self.max_length + (0 if family in POSITION_TABLES else 1)

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
        text = self.tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return str(text)

    # -- log-likelihoods

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
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
    ) -> list[tuple[float, bool]]:
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
    ) -> list[tuple[float, bool]]:
        """Return (log-probability, whether greedy) for each pair.

        `kind` names the requests for the progress bar. If `texts` has the texts of the pairs,
        results are written to the harness' cache as soon as they are known.
        """
        sequences = dict[tuple[tuple[int, ...], int], list[int]]()  # (tokens, start) -> pairs
        missing = [0] * len(pairs)
        for index, pair in enumerate(pairs):
            for piece in self._cut(pair):
                tokens = tuple(piece.context + piece.continuation)
                sequences.setdefault((tokens, len(piece.context)), []).append(index)
                missing[index] += 1
        results = [(0.0, True)] * len(pairs)
        done = 0
        for batch in split_by_shared_tokens(sorted(sequences), self._max_tokens):
            for sequence, (logprob, greedy) in zip(batch, self._forward(batch), strict=True):
                for index in sequences[sequence]:
                    results[index] = (results[index][0] + logprob, results[index][1] and greedy)
                    missing[index] -= 1
                    if missing[index] == 0 and texts is not None:
                        self.cache_hook.add_partial("loglikelihood", texts[index], results[index])
            done += len(batch)
            self._show(kind, done, len(sequences))
        return results

    def _cut(self, pair: ScoredPair) -> list[ScoredPair]:
        """Return the pair without the tokens at its start for which the model has no context.

        A network with a table of positions cannot read the last token, which is only a label. The
        pair is then divided: its last token is predicted from one token less. Raises `DataError`
        for a continuation without tokens, or one that exceeds the model's context.
        """
        count = len(pair.continuation)
        if not 1 <= count <= self.max_length:
            text = self.tokenizer.decode(pair.continuation[:20])
            raise DataError(
                f"the continuation {text!r} has {count} tokens, and {self.opened.name} scores "
                f"1 to {self.max_length}; change the task"
            )
        whole = (pair.context + pair.continuation)[-(self.max_length + 1) :]
        if len(whole) <= self._longest:
            return [ScoredPair(whole[:-count], whole[-count:])]
        last = ScoredPair(whole[1:-1], whole[-1:])
        if count == 1:
            return [last]
        return [ScoredPair(whole[:-count], whole[-count:-1]), last]

    def _forward(self, batch: Sequence[tuple[tuple[int, ...], int]]) -> list[tuple[float, bool]]:
        """Return (log-probability, whether greedy) for the sequences (tokens, start) of a batch."""
        ids = [str(index) for index in range(len(batch))]
        lengths = {
            "prompt": [[start] for _, start in batch],
            "completion": [[len(tokens) - start] for tokens, start in batch],
        }
        data = {
            "prompt": join_ids(tokens[:start] for tokens, start in batch),
            "completion": join_ids(tokens[start:] for tokens, start in batch),
        }
        sample = SequenceSample.from_groups(
            ids, lengths, data, {SHARES_PREFIXES: [True] * len(batch)}
        )
        output = self.opened.engine.forward(
            sample,
            frozenset({"logprobs", "top1"}),
            max_tokens=sum(len(tokens) for tokens, _ in batch),
        )
        logprobs = [to_host_array(values) for values in output.sequences("logprobs")]
        top1 = [to_host_array(values) for values in output.sequences("top1")]
        return [
            (float(own.astype(np.float64).sum()), bool(best.all()))
            for own, best in zip(logprobs, top1, strict=True)
        ]

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
        values = dict(normalize_gen_kwargs(dict(options), MAX_NEW_TOKENS))
        count = values.pop("max_gen_toks")
        stops = self._list_stops(values.pop("until"))
        sampled = values.pop("do_sample")
        for name, value in list(values.items()):
            if name in NEUTRAL and value in NEUTRAL[name]:
                del values[name]
            elif name not in SAMPLING:
                raise ConfigError(
                    f"generation option {name}={value!r}: weft does not generate with it; take it "
                    f"out of the task's generation_kwargs, or override it with --gen_kwargs"
                )
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

    def _show(self, kind: str, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(kind, done, total)


def split_by_shared_tokens(
    sequences: Sequence[tuple[tuple[int, ...], int]], max_tokens: int
) -> Iterator[list[tuple[tuple[int, ...], int]]]:
    """Yield batches of sequences (tokens, start), which must be sorted.

    Tokens that a sequence shares with its predecessor count once. A batch has at most `max_tokens`
    such tokens, and at most `MAX_REPEATS` times as many tokens in total, unless a single sequence
    has more.
    """
    batch = list[tuple[tuple[int, ...], int]]()
    own = 0
    total = 0
    for sequence in sequences:
        size = len(sequence[0])
        shared = count_common(batch[-1], sequence) if batch else 0
        full = own + size - shared > max_tokens or total + size > MAX_REPEATS * max_tokens
        if batch and full:
            yield batch
            batch = []
            own = total = shared = 0
        batch.append(sequence)
        own += size - shared
        total += size
    if batch:
        yield batch


def count_common(one: tuple[tuple[int, ...], int], other: tuple[tuple[int, ...], int]) -> int:
    """Return the number of tokens with which the prompts of two sequences both begin."""
    most = min(one[1], other[1])
    for index in range(most):
        if one[0][index] != other[0][index]:
            return index
    return most


def join_ids(parts: Iterable[Sequence[int]]) -> npt.NDArray[np.int64]:
    """Return the ids of all parts in one array."""
    return np.concatenate([np.asarray(part, np.int64) for part in parts])
