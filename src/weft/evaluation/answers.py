"""Sampling settings, prompts from files, a model's answers to them, and scores of the answers.

The prompts are plain texts or conversations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.algorithms.base import to_host_array
from weft.data.columns import read_conversation, read_prompt_text, require_prompt_key
from weft.data.datasets.base import build_answer_group, encode_continuations, encode_with_eos
from weft.data.datasets.prompt import MAX_REPORTED, read_prompt_rows
from weft.data.lengths import EncodedSample, LengthLimits, fit_to_limits
from weft.data.messages import Message
from weft.data.rows import BadRow
from weft.data.sources import UnreadableRow
from weft.data.table import TokenizationReport, TokenTable
from weft.data.tokenizer import Tokenizer
from weft.engine.base import Request
from weft.engine.spec import GenerationSpec
from weft.errors import ConfigError, DataError, build_unknown_name_error, find_nearest
from weft.evaluation.models import OpenedModel
from weft.options import iterate_options, read, validate
from weft.reading import read_yaml

# Built-in settings, named as in Open-Assistant's sampling reports.
SHIPPED: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"greedy": True},
    "k50": {"top_k": 50, "top_p": 0.95},
    "magic_numbers": {"top_k": 9607, "top_p": 0.242},
    "nucleus9": {"top_p": 0.9, "temperature": 0.8},
    "warm": {"temperature": 0.7, "top_p": 0.9},
    "free": {},
}
# Options of `transformers` that weft's sampler does not support, with the values that disable them.
UNSUPPORTED: Mapping[str, Any] = {
    "num_beams": 1,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "penalty_alpha": 0.0,
    "no_repeat_ngram_size": 0,
    "diversity_penalty": 0.0,
    "length_penalty": 1.0,
    "early_stopping": False,
}


@dataclass(frozen=True)
class SamplingSettings:
    """Named set of sampling options, either built into weft or read from a file.

    `spec` has the values of all options.
    """

    name: str
    spec: GenerationSpec


def build_shipped(name: str, base: GenerationSpec) -> SamplingSettings:
    """Return the built-in settings called `name`; options that they do not set come from `base`.

    Raises `ConfigError`, which suggests similar names, if the name is unknown.
    """
    if name not in SHIPPED:
        raise build_unknown_name_error("sampling setting", name, SHIPPED)
    return _parse_settings(name, SHIPPED[name], base, name)


def choose(words: Sequence[str], base: GenerationSpec) -> tuple[list[SamplingSettings], list[str]]:
    """Return the sampling settings that `words` select, and notes on settings that are left out.

    Each word is the name of built-in settings, or the path of a YAML or JSON file with settings.
    The result is in the order of `words`. Settings in a file are left out if they need an option
    that weft does not support. Raises `ConfigError` for unknown names and for duplicate names, and
    if no settings remain.
    """
    chosen = list[SamplingSettings]()
    notes = list[str]()
    for word in words:
        if word.endswith((".yaml", ".yml", ".json")):
            file_settings, file_notes = read_file(word, base)
            chosen += file_settings
            notes += file_notes
        else:
            chosen.append(build_shipped(word, base))
    names = [settings.name for settings in chosen]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise ConfigError(
            f"two sampling settings are called {duplicate!r}; give one of them another name"
        )
    if not chosen:
        raise ConfigError("\n".join(["no sampling setting is left", *notes]))
    return chosen, notes


def read_file(path: str, base: GenerationSpec) -> tuple[list[SamplingSettings], list[str]]:
    """Return the settings in a file, and notes on settings that are left out.

    The file has the form `{NAME: {top_k: 50, ...}}`, or Open-Assistant's form `{default:
    {generate_args}, configurations: [{name, generate_args}]}`. Options that the file does not set
    come from `base`. Settings are left out if they need an option that weft does not support, such
    as beam search or a repetition penalty. Raises `ConfigError` for unknown options and invalid
    values.
    """
    values = read_yaml(Path(path).expanduser(), f"--settings {path}", ConfigError)
    if not isinstance(values, Mapping) or not values:
        raise ConfigError(
            f"{path}: must contain settings by name, such as {{warm: {{temperature: 0.7}}}}"
        )
    settings = list[SamplingSettings]()
    notes = list[str]()
    for name, options in _list_entries(path, values):
        unsupported = []
        for key, value in UNSUPPORTED.items():
            if key in options and options[key] != value:
                unsupported.append(f"{key}={options[key]}")
        if unsupported:
            notes.append(
                f"{path}: {name} is left out: weft does not sample with {', '.join(unsupported)}"
            )
            continue
        settings.append(_parse_settings(name, options, base, f"{path}: {name}"))
    return settings, notes


def _list_entries(path: str, values: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the name and the options of each entry of a settings file, in either form."""
    if "configurations" not in values:
        return [
            (str(name), _check_mapping(path, str(name), value)) for name, value in values.items()
        ]
    # Open-Assistant's form: all configurations share the options in `default`.
    default = _check_mapping(path, "default", values.get("default"))
    common = _check_mapping(path, "default", default.get("generate_args"))
    configurations = values["configurations"]
    if not isinstance(configurations, Sequence) or not all(
        isinstance(entry, Mapping) and "name" in entry for entry in configurations
    ):
        raise ConfigError(f"{path}: configurations must be a list of {{name, generate_args}}")
    entries: list[tuple[str, Mapping[str, Any]]] = []
    for entry in configurations:
        name = str(entry["name"])
        entries.append((name, {**common, **_check_mapping(path, name, entry.get("generate_args"))}))
    return entries


def _check_mapping(path: str, name: str, value: Any) -> Mapping[str, Any]:
    """Return `value`, or an empty mapping for None. Raises `ConfigError` for any other type."""
    if not isinstance(value, Mapping | None):
        raise ConfigError(f"{path}: {name} must be a mapping of sampling options, not {value!r}")
    return value or {}


def _parse_settings(
    name: str, options: Mapping[str, Any], base: GenerationSpec, place: str
) -> SamplingSettings:
    """Return settings with these options of `transformers` or weft; others come from `base`.

    `place` begins the message of the `ConfigError` for an unknown option or an invalid value.
    """
    values = {}
    for key, value in options.items():
        if key not in UNSUPPORTED and value is not None:
            values[key] = value
    do_sample = values.pop("do_sample", None)
    if do_sample is not None and "greedy" not in values:
        values["greedy"] = not do_sample
    if values.get("temperature") == 0:
        values |= {"temperature": 1.0, "greedy": True}
    option_names = [option.name for option in iterate_options(base)]
    for key in values:
        if key not in option_names:
            close = find_nearest(key, option_names)
            raise ConfigError(
                f"{place}: no sampling option {key!r}; "
                f"{f'did you mean {close[0]}?' if close else ', '.join(option_names)}"
            )
    try:
        spec = read(replace(base), values)
        validate(spec)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error
    return SamplingSettings(name, spec)


@dataclass(frozen=True)
class EvaluationPrompt:
    """Prompt on which a model is evaluated.

    `text` is the prompt as plain text, and `messages` is the conversation for a chat model.
    """

    id: str
    text: str
    messages: tuple[Message, ...]

    def tokenize(
        self, tokenizer: Tokenizer, *, system: str | None = None, plain: bool = False
    ) -> list[int]:
        """Return the token ids of the prompt, formatted with the chat template if there is one.

        With `plain`, or without a chat template, the text of the prompt is encoded unchanged; if
        `system` is given, it precedes the text. With a template, a system message in the prompt
        takes precedence over `system`.
        """
        if plain or tokenizer.chat_template is None:
            return tokenizer.encode(f"{system}\n\n{self.text}" if system else self.text)
        has_system_message = any(message["role"] == "system" for message in self.messages)
        messages = list(self.messages)
        if system and not has_system_message:
            messages.insert(0, {"role": "system", "content": system})
        return tokenizer.encode_chat(messages, add_generation_prompt=True)


def read_prompts(path: str, limit: int | None = None) -> list[EvaluationPrompt]:
    """Read up to `limit` prompts from a JSON, JSONL(.gz), Parquet or .txt file.

    Each line of a .txt file is a prompt. In the other formats, a row has a prompt or messages, in
    the same columns as a dataset; a row of a JSONL file can also be just a quoted text. Raises
    `DataError` if a row has no prompt (the message lists such rows), or if the file contains no
    prompts.
    """
    prompts = list[EvaluationPrompt]()
    problems = list[str]()
    for place, row in read_prompt_rows(path):
        if limit is not None and len(prompts) >= limit:
            break
        try:
            prompts.append(_parse_prompt(row, str(len(prompts))))
        except BadRow as error:
            problems.append(f"{place}: {error}")
            if len(problems) == MAX_REPORTED:
                break
    if problems:
        raise DataError("\n".join(["these rows are not prompts:", *problems]))
    if not prompts:
        raise DataError(f"{path}: there are no prompts in it")
    return prompts


def _parse_prompt(row: Any, number: str) -> EvaluationPrompt:
    """Return the prompt in a row; `number` is its id if the row has none. Raises `BadRow`."""
    if isinstance(row, UnreadableRow):
        raise BadRow(row.reason)
    if not isinstance(row, Mapping):
        raise BadRow("it is not a JSON object")
    key = require_prompt_key(row, None, "prompt")
    messages = tuple(read_conversation(row, key))
    if isinstance(row[key], str):
        text = read_prompt_text(row, key)
    else:
        text = str(messages[-1]["content"])
    return EvaluationPrompt(str(row.get("id", number)), text, messages)


Progress = Callable[[int, int], None]  # (finished answers, all answers)


@dataclass(frozen=True)
class SampledAnswer:
    """Answer that a model sampled for a prompt.

    `text` does not contain end tokens. `finish_reason` is "stop" if the model ended the answer, or
    "length" if the answer was cut off at the length limit.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str


def sample_answers(
    opened: OpenedModel,
    prompts: Sequence[EvaluationPrompt],
    settings: Sequence[SamplingSettings],
    *,
    samples: int = 1,
    system: str | None = None,
    plain: bool = False,
    progress: Progress | None = None,
) -> list[list[list[SampledAnswer]]]:
    """Sample answers to the prompts and return them as `[prompt][setting][sample]`.

    `samples` is the number of answers per prompt and setting. Greedy settings produce only one
    answer per prompt, since all answers would be equal. All requests are sent to one generator, so
    that a slow answer does not delay the others. `system` is the system message; `plain` disables
    the chat template. Raises `DataError` for a prompt that leaves no room for an answer in the
    model's context.
    """
    # Build one request per prompt, setting and sample.
    tokenizer = opened.tokenizer
    prompt_ids = [prompt.tokenize(tokenizer, system=system, plain=plain) for prompt in prompts]
    specs = []
    for setting in settings:
        stop_ids = [*setting.spec.stop_ids, *tokenizer.list_stop_ids()]
        specs.append(replace(setting.spec, stop_ids=stop_ids))
    requests = []
    for index, (prompt, ids) in enumerate(zip(prompts, prompt_ids, strict=True)):
        for setting_index, spec in enumerate(specs):
            limit = _compute_max_new_tokens(opened, prompt, ids, spec.new_token_limit)
            request_id = f"{index}/{setting_index}"
            for k in range(1 if spec.greedy else samples):
                requests.append(Request(request_id, k, ids, k, max_new_tokens=limit, sampling=spec))
    # Generate until all requests are finished.
    tokens: dict[tuple[str, int], list[int]] = {(request.id, request.k): [] for request in requests}
    finish_reasons: dict[tuple[str, int], str] = {}
    max_new_tokens = max(spec.new_token_limit for spec in specs)
    with opened.engine.generating(
        replace(specs[0], max_new_tokens=max_new_tokens, min_new_tokens=0, tokenizer=tokenizer)
    ) as generator:
        generator.submit(requests)
        while not generator.idle:
            for event in generator.step():
                tokens[event.id, event.k].append(event.token)
                if event.finish is not None:
                    finish_reasons[event.id, event.k] = event.finish
                    if progress is not None:
                        progress(len(finish_reasons), len(requests))
    # Decode the tokens.
    answers: list[list[list[SampledAnswer]]] = []
    for _ in prompts:
        answers.append([[] for _ in settings])
    for request in requests:
        index, setting_index = map(int, request.id.split("/"))
        ids = tokens[request.id, request.k]
        text = tokenizer.decode_after(list(request.prompt), ids, skip_special=True)
        answers[index][setting_index].append(
            SampledAnswer(text.strip(), tuple(ids), finish_reasons[request.id, request.k])
        )
    return answers


def _compute_max_new_tokens(
    opened: OpenedModel, prompt: EvaluationPrompt, ids: Sequence[int], limit: int
) -> int:
    """Return the maximum number of new tokens: `limit`, or fewer if the context has less room.

    `ids` are the prompt's token ids. Raises `DataError` if they fill the model's context.
    """
    if opened.context is None:
        return limit
    if len(ids) >= opened.context:
        raise DataError(
            f"prompt {prompt.id!r} has {len(ids)} tokens, and {opened.name} takes "
            f"{opened.context} with its answer; shorten it"
        )
    return min(limit, opened.context - len(ids))


MAX_IDS_PER_PASS = 64


def score_replies(
    opened: OpenedModel, prompts: Sequence[EvaluationPrompt], replies: Sequence[Sequence[str]]
) -> list[npt.NDArray[np.float64]]:
    """Return scores as `[prompt][reply]` (float64), as `weft quickstart rw` and PPO compute them.

    A reward model with a chat template reads messages. Without a template, it reads the prompt's
    text followed by the reply. In both cases, the end token comes last. Sequences longer than the
    model's context are cut at the start of the prompt, like training rows. Raises `DataError` for a
    prompt that the chat template rejects, or whose replies do not fit in the context.
    """
    lengths = LengthLimits(max_seqlen=opened.context)
    encoded = list[EncodedSample]()
    for prompt, texts in zip(prompts, replies, strict=True):
        sample = _encode(opened.tokenizer, prompt, texts)
        shortened, _ = fit_to_limits(sample, lengths, opened.tokenizer.bos_id)
        if shortened is None:
            raise DataError(
                f"prompt {prompt.id!r}: its replies do not fit into the {opened.context} "
                f"tokens of the model's context"
            )
        encoded.append(shortened)
    table = TokenTable.from_rows(
        [str(index) for index in range(len(encoded))],
        encoded,
        range(len(encoded)),
        TokenizationReport(),
    )
    scores = list[npt.NDArray[np.float64]]()
    for start in range(0, len(table), MAX_IDS_PER_PASS):
        output = opened.engine.forward(
            table.take(range(start, min(start + MAX_IDS_PER_PASS, len(table)))),
            frozenset({"scores"}),
        )
        flat_scores = to_host_array(output.data["scores"]).astype(np.float64)
        prompt_indices = output.group_of("scores")
        for index in range(output.num_ids):
            scores.append(flat_scores[prompt_indices == index])
    return scores


def _encode(
    tokenizer: Tokenizer, prompt: EvaluationPrompt, replies: Sequence[str]
) -> EncodedSample:
    """Return the token ids of a prompt with all replies. Raises `DataError` for invalid ones."""
    try:
        if tokenizer.chat_template is not None:
            turns: list[list[Message]] = []
            for reply in replies:
                turns.append([{"role": "assistant", "content": reply}])
            return encode_continuations(tokenizer, prompt.messages, turns, None, may_be_empty=True)
        sequences = [encode_with_eos(tokenizer, prompt.text + reply) for reply in replies]
        return build_answer_group(tokenizer.encode(prompt.text), sequences)
    except BadRow as error:
        raise DataError(f"prompt {prompt.id!r}: {error}") from error
