"""The 29 training instructions of IFBench (IFTrain): keywords, paragraphs, positions and copies.

Names, arguments and definitions are the published ones (Pyatkin et al. 2025), except that keywords
and phrases are taken literally, not as regular expressions.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

from weft.host.verifiers._english import split_tokens
from weft.host.verifiers._instructions import Arguments, Check, satisfies_relation

PERIOD = "\ue000"  # placeholder for a period that does not end a sentence
STOP = "\ue001"  # placeholder for the end of a sentence without a mark
BEGINNINGS = (
    r"(Mr|Mrs|Ms|Dr|Prof|Capt|Cpt|Lt|He\s|She\s|It\s|They\s|Their\s|Our\s|We\s|But\s|However\s"
    r"|That\s|This\s|Wherever)"
)
# Periods that do not end a sentence, and periods that do, in the order in which they are replaced
RULES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(Mr|St|Mrs|Ms|Dr)\.", rf"\1{PERIOD}"),
        (r"\.(com|net|org|io|gov|edu|me)", rf"{PERIOD}\1"),
        (r"([0-9])\.([0-9])", rf"\1{PERIOD}\2"),
        (r"Ph\.D\.", f"Ph{PERIOD}D{PERIOD}"),
        (r"\s([A-Za-z])\. ", rf" \1{PERIOD} "),
        (rf"((?:[A-Z]\.){{2,3}}) {BEGINNINGS}", rf"\1{STOP} \2"),
        (r"([A-Za-z])\.([A-Za-z])\.([A-Za-z])\.", rf"\1{PERIOD}\2{PERIOD}\3{PERIOD}"),
        (r"([A-Za-z])\.([A-Za-z])\.", rf"\1{PERIOD}\2{PERIOD}"),
        (rf" (Inc|Ltd|Jr|Sr|Co)\. {BEGINNINGS}", rf" \1{STOP} \2"),
        (r" (Inc|Ltd|Jr|Sr|Co|[A-Za-z])\.", rf" \1{PERIOD}"),
    )
)
ELLIPSIS = re.compile(r"\.{2,}")


def split_at_marks(text: str) -> list[str]:
    """Return the sentences of a text by the rules of IFTrain.

    Each . ? and ! ends a sentence, even inside a word, except a period in a title, an initial, a
    number or a web address. A closing quote is moved before the mark.
    """
    text = f" {text}  ".replace("\n", " ")
    for pattern, replacement in RULES[:3]:
        text = pattern.sub(replacement, text)
    text = ELLIPSIS.sub(lambda match: PERIOD * len(match[0]) + STOP, text)
    for pattern, replacement in RULES[3:]:
        text = pattern.sub(replacement, text)
    text = re.sub(r'\.([”"])|([!?])"', _move_quote, text)
    parts = re.split(rf"(?<=[.!?])|{STOP}", text)
    sentences = [part.replace(PERIOD, ".").strip() for part in parts]
    return sentences if sentences[-1] else sentences[:-1]


def _move_quote(match: re.Match[str]) -> str:
    return match[0][1] + match[0][0]


def _count(keyword: Any, text: str) -> int:
    return len(re.findall(re.escape(str(keyword).strip()), text, re.IGNORECASE))


def _read_word(value: Any) -> str:
    """Return a word in lower case; some published rows have a list with one word."""
    return str(value if isinstance(value, str) else value[0]).strip().lower()


def _is_copy(text: str, request: Any) -> bool:
    return text.strip().lower() == str(request).strip().lower()


def _check_phrase(text: str, a: Arguments) -> bool:
    """Return whether the phrase occurs small_n times, each time with one word replaced."""
    phrase = str(a["phrase"]).split()
    number = int(a["small_n"])
    first = re.escape(phrase[0])
    last = re.escape(phrase[-1])
    phrases = [occurrence.split() for occurrence in re.findall(rf"{first} .*? {last}", text)]
    return len(phrases) == number and all(
        len(words) == len(phrase)
        and sum(word != original for word, original in zip(words, phrase, strict=True)) == 1
        for words in phrases
    )


def _check_span(text: str, a: Arguments) -> bool:
    """Return whether the text is the request from n_start up to, but not including, n_end."""
    return _is_copy(text, str(a["prompt_to_repeat"])[int(a["n_start"]) : int(a["n_end"])])


def _check_hyphens(text: str, a: Arguments) -> bool:
    parts = text.split("-")
    sentences = split_at_marks(text.replace("-", " "))
    return all(
        part == part.strip() == sentence for part, sentence in zip(parts, sentences, strict=False)
    )


def _check_neighbors(text: str, a: Arguments) -> bool:
    letters = [word[0].lower() for word in text.split()]
    return all(
        len(letter) == len(following) == 1 and ord(following) - ord(letter) != 1
        for letter, following in itertools.pairwise(letters)
    )


def _count_paragraphs(text: str, divider: str) -> int:
    """Return the number of paragraphs, or 0 if one other than the first and the last is empty."""
    parts = [part.strip() for part in re.split(divider, text)]
    return sum(map(bool, parts)) if all(parts[1:-1]) else 0


def _check_first_words(text: str, a: Arguments) -> bool:
    word = _read_word(a["first_word"])
    return all(sentence.lower().split()[:1] == [word] for sentence in split_at_marks(text))


def _check_last_words(text: str, a: Arguments) -> bool:
    word = _read_word(a["last_word"])
    return all(sentence and _read_last_word(sentence) == word for sentence in split_at_marks(text))


def _read_last_word(text: str) -> str:
    """Return the last word in lower case, without punctuation."""
    return re.sub(r"[^\w\s]", "", text.split()[-1]).lower()


def _check_bigrams(text: str, a: Arguments) -> bool:
    words = text.split()
    pairs = zip(words[::2], words[1::2], strict=False)
    return all(first.startswith("<<") and second.endswith(">>") for first, second in pairs)


def _check_copies(text: str, a: Arguments) -> bool:
    request = a["prompt_to_repeat"]
    number = int(a["N"])
    parts = text.split("******")
    return len(parts) == number and all(_is_copy(part, request) for part in parts)


def _check_composition(text: str, a: Arguments) -> bool:
    """Return whether there are three paragraphs of n_sent sentences of n_words tokens each."""
    num_sentences = int(a["n_sent"])
    num_words = int(a["n_words"])
    paragraphs = re.split(r"\s?\*\*\*\s?", text)
    if len(paragraphs) != 3:
        return False
    for paragraph in paragraphs:
        sentences = split_at_marks(paragraph)
        if len(sentences) != num_sentences:
            return False
        if any(len(split_tokens(sentence)) != num_words for sentence in sentences):
            return False
    return True


def _check_unique(text: str, a: Arguments) -> bool:
    tokens = split_tokens(text)
    return len(tokens) == len(set(tokens))


def _check_position(text: str, a: Arguments) -> bool:
    """Return whether the keyword is token m of sentence n; punctuation marks are tokens."""
    keyword = a["keyword"]
    n = int(a["n"])
    m = int(a["m"])
    keyword = str(keyword if isinstance(keyword, str) else keyword[0]).strip()
    sentences = split_at_marks(text)
    return len(sentences) >= n and split_tokens(sentences[n - 1])[m - 1 : m] == [keyword]


def _check_ends(text: str, a: Arguments) -> bool:
    tokens = split_tokens(text)
    return len(tokens) >= 2 and tokens[0].lower() == tokens[-1].lower()


# Name of an instruction -> check of a response
CHECKS: Mapping[str, Check] = {
    "copy:repeat_phrase": _check_phrase,
    "copy:copy": lambda t, a: _is_copy(t, a["prompt_to_repeat"]),
    "copy:copying_simple": lambda t, a: _is_copy(t, a["prompt_to_repeat"]),
    "copy:copying_multiple": _check_copies,
    "new:copy_span_idx": _check_span,
    "detectable_format:sentence_hyphens": _check_hyphens,
    "detectable_format:square_brackets": lambda t, a: all(
        word.startswith("[") and word.endswith("]") for word in t.split()
    ),
    "detectable_format:bigram_wrapping": _check_bigrams,
    "keywords:no_adjacent_consecutive": _check_neighbors,
    "keywords:word_once": lambda t, a: _count(a["keyword"], t) == 1,
    "keywords:word_count_different_numbers": lambda t, a: satisfies_relation(
        _count(a["keyword"], t), a["relation"], a["frequency"]
    ),
    "keywords:exclude_word_harder": lambda t, a: f" {str(a['keyword']).strip()} " not in t,
    "keywords:palindrome": lambda t, a: any(word == word[::-1] for word in t.split()),
    "keywords:keyword_specific_position": _check_position,
    "keywords:start_end": _check_ends,
    "paragraphs:paragraphs": lambda t, a: _count_paragraphs(t, r"\s?\*\*\*\s?") == 2,
    "paragraphs:paragraphs2": lambda t, a: _count_paragraphs(t, r"\n\n") == 2,
    "first_word:first_word_sent": _check_first_words,
    "first_word:first_word_answer": lambda t, a: (
        t.lower().split()[:1] == [_read_word(a["first_word"])]
    ),
    "last_word:last_word_sent": _check_last_words,
    "last_word:last_word_answer": lambda t, a: _read_last_word(t) == _read_word(a["last_word"]),
    "punctuation:punctuation_dot": lambda t, a: "." not in t,
    "punctuation:punctuation_exclamation": lambda t, a: "!" not in t,
    "count:lowercase_counting": lambda t, a: len(re.findall(r"\b[a-z]+\b", t)) <= int(a["N"]),
    "count:counting_composition": _check_composition,
    "count:count_unique": _check_unique,
    "count:count_increment_word": lambda t, a: (
        (_count(a["keyword1"], t), _count(a["keyword2"], t)) == (1, 2)
    ),
    "letters:letter_counting": lambda t, a: satisfies_relation(
        len(re.findall(r"[a-zA-Z]", t)), a["relation"], a["N"]
    ),
    "letters:letter_counting2": lambda t, a: satisfies_relation(
        t.lower().count(str(a["letter"]).strip().lower()), a["let_relation"], a["let_frequency"]
    ),
}
