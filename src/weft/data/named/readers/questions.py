"""Readers of questions with answers, of sentence pairs to translate, and of plain text.

The formats are tables of instructions, question-answer pairs, texts with summaries, and rows with a
list of answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Any, TypedDict, Unpack

from weft.data.messages import Message
from weft.data.named.example import (
    Example,
    ReaderContext,
    fill_template,
    make_alternating_messages,
    make_assistant_message,
    make_example,
    make_user_message,
    pick_value,
)
from weft.data.rows import BadRow, Row, to_json_value
from weft.errors import ConfigError
from weft.registry import register_reader

REFERENCE = re.compile(r"\[\d+(?:,\s*\d+)*?\]|\[citation needed\]|\[[a-zA-Z]\]")
SUMMARIES = ("TL;DR:", "Summarize this", "Give me the summary")
MAX_WORDS = 512  # maximum number of words of a text to summarize


class PairOptions(TypedDict, total=False):
    """Options for converting a row to a question with its answer.

    Column names can be paths or templates (see `weft.data.named.example`).
    """

    prompt: str  # column of the question; default "INSTRUCTION"
    answer: str  # column of the answer; default "RESPONSE"
    lang: str  # language of all rows
    lang_column: str  # column with the language
    system: str  # column of the system message
    input: str  # column that is appended to the question
    join: list[str]  # separators before `input`, one of which is drawn at random
    no_input: list[str]  # texts by which `input` states that there is no input
    input_once: bool  # do not append `input` if the question contains it already
    context: str  # column with the text on which the answer is based
    # Place of `context`: "prompt" (at the end of the question) or "tag" (the reply's `context`).
    context_as: str
    otherwise: str  # answer of rows without one
    cut: str  # text at which the answer is cut off
    filter_words: bool  # leave out rows with phrases that reveal another model
    keep: dict[str, str] | list[str]  # columns kept for a verifier (mode rl), as {new name: column}
    prompt_only: bool  # the rows have no answers


@register_reader("question_answer")
def question_answer(
    rows: Iterable[Row],
    use: ReaderContext,
    *,
    fill_min_length: int | None = None,
    **options: Unpack[PairOptions],
) -> Iterator[Example]:
    """Read rows that each have one question and its answer.

    With `fill_min_length`, the pairs are shuffled and joined into conversations of more than that
    number of characters.
    """
    pairs = PairReader(use, options)
    examples = (
        example
        for index, row in enumerate(rows)
        if (example := pairs.read(row, use.make_random(index))) is not None
    )
    yield from (
        examples
        if fill_min_length is None
        else _fill_conversations(list(examples), int(fill_min_length), use)
    )


@dataclass(frozen=True)
class PairReader:
    """Reader that converts each row of a dataset to a question with its answer.

    `use` is the context of the reader, which counts the rows that are left out.
    """

    use: ReaderContext
    options: PairOptions

    def __post_init__(self) -> None:
        placement = self.options.get("context_as", "prompt")
        if placement not in ("prompt", "tag"):
            raise ConfigError(f"{self.use.name}: context_as={placement!r}: must be prompt or tag")

    def read(self, row: Row, random: Random) -> Example | None:
        """Convert a row to an example, or count it as left out and return None.

        A row is left out if its question or answer is empty or, with the option `filter_words`,
        contains an unwanted phrase.
        """
        options = self.options
        # Fill in the question and the answer.
        question = self._with_input(
            fill_template(options.get("prompt", "INSTRUCTION"), row, random), row, random
        )
        answer = "" if options.get("prompt_only") else self._build_answer(row, random)
        if not question.strip() or not (answer.strip() or options.get("prompt_only")):
            self.use.skip("an empty question or answer")
            return None
        if options.get("filter_words") and not self.use.accept_texts(question, answer):
            return None
        # Add language, context and system message.
        if "lang_column" in options:
            lang: str | None = str(row[options["lang_column"]])
        else:
            lang = options.get("lang")
        if "context" in options:
            context = REFERENCE.sub("", fill_template(options["context"], row, random)).strip()
        else:
            context = ""
        tag = {"context": context} if options.get("context_as") == "tag" else {}
        prompt = f"{question}\n\n{context}" if context and not tag else question
        turns = make_alternating_messages(
            [prompt],
            fill_template(options["system"], row, random) if "system" in options else None,
            lang=lang,
        )
        columns = {}
        keep = options.get("keep", {})
        if not isinstance(keep, dict):
            keep = {name: name for name in keep}
        for name, path in keep.items():
            columns[name] = to_json_value(pick_value(path, row, random))
        return Example(
            turns,
            [make_assistant_message(answer, lang=lang, **tag)] if answer.strip() else [],
            columns=columns,
        )

    def _build_answer(self, row: Row, random: Random) -> str:
        answer = fill_template(
            self.options.get("answer", "RESPONSE"), row, random
        ) or self.options.get("otherwise", "")
        if "cut" in self.options:
            return answer.split(self.options["cut"], 1)[0]
        return answer

    def _with_input(self, question: str, row: Row, random: Random) -> str:
        options = self.options
        appended = fill_template(options["input"], row, random) if "input" in options else ""
        low = appended.lower()
        is_none = any(phrase in low for phrase in options.get("no_input", []))
        is_repeated = options.get("input_once") and low in question.lower()
        if not appended or is_none or is_repeated:
            return question
        return question + random.choice(options.get("join", ["\n"])) + appended


def _fill_conversations(
    examples: list[Example], min_length: int, use: ReaderContext
) -> Iterator[Example]:
    """Shuffle the examples and join them into conversations of more than `min_length` characters.

    The last conversation can be shorter.
    """
    use.make_random("order").shuffle(examples)
    messages: list[Message] = []
    for example in examples:
        messages += [*example.context, *example.replies[:1]]
        if sum(len(message["content"]) for message in messages) > min_length:
            yield make_example(messages)
            messages = []
    if messages:
        yield make_example(messages)


@register_reader("summary")
def summary(
    rows: Iterable[Row],
    use: ReaderContext,
    *,
    text: str,
    summary: str,
    max_words: int = MAX_WORDS,
    prompts: Sequence[str] = SUMMARIES,
) -> Iterator[Example]:
    """Turn each text into a request for a summary, with the text's summary as the reply.

    `text` and `summary` are the columns. The request consists of the first `max_words` words of the
    text, followed by a random item of `prompts`.
    """
    for index, row in enumerate(rows):
        random = use.make_random(index)
        words = fill_template(text, row, random).replace("\n\n", "\n").split(" ")[:max_words]
        answer = fill_template(summary, row, random)
        if not "".join(words).strip() or not answer.strip():
            use.skip("an empty text or summary")
            continue
        yield Example(
            [make_user_message(" ".join(words) + random.choice(prompts))],
            [make_assistant_message(answer)],
        )


@register_reader("each")
def each(
    rows: Iterable[Row],
    use: ReaderContext,
    *,
    prompt: str,
    answers: str,
    labels: str | None = None,
    templates: Any = (),
) -> Iterator[Example]:
    """Read one example for each entry of the list in the column `answers`.

    `templates` are pairs (template of the question, template of the answer), one of which is drawn
    at random for each example. In the question template, {0} is replaced by the prompt; in the
    answer template, {0} is replaced by the entry. In both, {1} is replaced by the entry of the
    column `labels` with the same index.
    """
    for index, row in enumerate(rows):
        random = use.make_random(index)
        question = fill_template(prompt, row, random)
        entries = pick_value(answers, row, random) or []
        entry_labels = (pick_value(labels, row, random) or []) if labels else [""] * len(entries)
        if isinstance(entries, str) or len(entries) != len(entry_labels):
            raise BadRow(f"{answers!r} and {labels!r} must be lists of one length")
        for entry, label in zip(entries, entry_labels, strict=True):
            user_text = question
            answer = entry
            if templates:
                form = random.choice(templates)
                user_text = form[0].format(question, label)
                answer = form[1].format(entry, label)
            if user_text.strip() and answer.strip():
                yield Example(
                    [make_user_message(user_text)], [make_assistant_message(answer)], group=question
                )
            else:
                use.skip("an empty question or answer")


CHUNK = 64 * 1024


@register_reader("plain_text")
def plain_text(
    rows: Iterable[Row], use: ReaderContext, *, column: str = "text", max_chunk_size: int = CHUNK
) -> Iterator[Example]:
    """Read a column of plain text, cut into pieces of at most `max_chunk_size` characters.

    The pieces of a row are never split between training and validation.
    """
    for index, row in enumerate(rows):
        text = str(row[column] or "")
        if not text.strip():
            use.skip("an empty text")
            continue
        for start in range(0, len(text), max_chunk_size):
            yield Example(text=text[start : start + max_chunk_size], group=str(index))


PROMPTS = {
    "ar": (
        "{}. translate to arabic",
        "{} write in arabic",
        "arabic translation: '{}'",
    ),
    "de": (
        "{}: translate to german",
        "give me the german translation {}",
        "{}, ins Deutsche \xfcbersetzen",
    ),
    "en": (
        "{}. translate to english",
        "{} write in english",
        "english translation: '{}'",
    ),
    "fr": (
        "{}. translate to french",
        "{} write in french",
        "{} french translation",
        "{}, donnez-moi la traduction fran\xe7aise",
    ),
    "it": (
        "{}. translate to italian",
        "{} write in italian",
        "italian translation: '{}'",
    ),
    "ja": (
        "{}: help me translate to japanese",
        "Need japanese translation: {}",
        "{}: \u65e5\u672c\u8a9e\u306b\u7ffb\u8a33\u3057\u3066\u304f\u3060\u3055\u3044",
    ),
    "ko": (
        "{}. translate to Korean",
        "how do we write in korean: {}",
        "{}, \ud55c\uad6d\uc5b4 \ubc88\uc5ed\uc744 \ud574\uc8fc\uc138\uc694",
    ),
    "ms": (
        "{} translate to malay",
        "{} how do we write in Malay",
        "{}, berikan saya terjemahan dalam bahasa melayu",
    ),
    "nl": (
        "{}. translate to dutch",
        "{} write in dutch",
        "dutch translation: '{}'",
    ),
    "ru": (
        "{} \u043f\u0435\u0440\u0435\u0432\u0435\u0441\u0442\u0438 \u043d\u0430 "
        "\u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u044f\u0437\u044b\u043a",
        "russian translation: '{}'",
    ),
    "tr": (
        "{}. t\xfcrk\xe7eye \xe7evirin",
        "{} write in turkish",
        "turkish translation: '{}'",
    ),
    "zh": (
        "Translate to chinese simplified: {}",
        "{} give me the chinese translation",
        "\u7ffb\u8bd1\u6210\u4e2d\u6587: {}",
    ),
}
# Language codes of divemt's subjects, for languages with prompts.
ISO = {"tur": "tr", "ita": "it", "nld": "nl", "ara": "ar"}
RUN_LENGTH = 20  # number of consecutive pairs that are combined and stay in one split
MAX_PAIRS = 100_000  # maximum number of pairs of a dataset

PromptAndReply = tuple[str, str]


@register_reader("translation")
def translation(
    rows: Iterable[Row],
    use: ReaderContext,
    *,
    source: str,
    target: str,
    mix_probability: float = 0.2,
    maximum_size: int = MAX_PAIRS,
) -> Iterator[Example]:
    """Read translation pairs from rows `{translation: {de: .., en: ..}}`.

    `source` and `target` are the language codes of the pair. Each pair makes one conversation. With
    probability `mix_probability`, the conversation begins with another pair from nearby rows. At
    most `maximum_size` pairs are read.
    """
    pairs = (
        (row["translation"][source], row["translation"][target], source, target) for row in rows
    )
    yield from _build_examples(list(islice(pairs, maximum_size)), use, mix_probability)


@register_reader("divemt")
def divemt(
    rows: Iterable[Row], use: ReaderContext, *, mix_probability: float = 0.2
) -> Iterator[Example]:
    """Read translations of English sentences.

    The rows have the columns `src_text` (English), `tgt_text` and `subject_id`. The language of
    `tgt_text` is given by the beginning of `subject_id`, such as "tur" in `tur_t1`. Rows in a
    language that has no translation prompts are left out. `mix_probability` is described in
    `translation`.
    """
    pairs = []
    for row in rows:
        language = ISO.get(str(row["subject_id"]).split("_")[0])
        if language is None:
            use.skip("languages without prompts")
        else:
            pairs.append((row["src_text"], row["tgt_text"], "en", language))
    yield from _build_examples(pairs, use, mix_probability)


def _build_examples(
    pairs: list[tuple[str, str, str, str]], use: ReaderContext, mix: float
) -> Iterator[Example]:
    exchanges = [_build_prompt(pair, use.make_random(index)) for index, pair in enumerate(pairs)]
    for index, exchange in enumerate(exchanges):
        random = use.make_random("before", index)
        first = index // RUN_LENGTH * RUN_LENGTH
        others = []
        for other in range(first, min(first + RUN_LENGTH, len(exchanges))):
            if other != index:
                others.append(other)
        previous: tuple[str, ...] = ()
        if others and random.random() < mix:
            previous = exchanges[random.choice(others)]
        yield make_example(
            make_alternating_messages([*previous, *exchange]), group=str(index // RUN_LENGTH)
        )


def _build_prompt(pair: tuple[str, str, str, str], random: Random) -> PromptAndReply:
    source_text, target_text, source, target = pair
    if random.random() > 0.5:
        return random.choice(PROMPTS[target]).format(source_text), target_text
    return random.choice(PROMPTS[source]).format(target_text), source_text
