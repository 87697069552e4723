"""Readers of sentence pairs, which become translation requests in a random direction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from random import Random

from weft.data.named.example import Example, ReaderContext, make_alternating_messages, make_example
from weft.data.rows import Row
from weft.registry import register_reader

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
    for index, pair in enumerate(exchanges):
        random = use.make_random("before", index)
        first = index // RUN_LENGTH * RUN_LENGTH
        others = []
        for each in range(first, min(first + RUN_LENGTH, len(exchanges))):
            if each != index:
                others.append(each)
        if others and random.random() < mix:
            before: tuple[str, ...] = exchanges[random.choice(others)]
        else:
            before = ()
        yield make_example(
            make_alternating_messages([*before, *pair]), group=str(index // RUN_LENGTH)
        )


def _build_prompt(pair: tuple[str, str, str, str], random: Random) -> PromptAndReply:
    one, other, source, target = pair
    if random.random() > 0.5:
        return random.choice(PROMPTS[target]).format(one), other
    return random.choice(PROMPTS[source]).format(other), one
