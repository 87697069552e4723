"""Sentences, words, syllables and emoji of English texts, for checks of instructions.

The published checks of instructions use nltk with trained models, syllapy and emoji. The functions
here need no data, and give the same results on ordinary text:

- `split_sentences` decides like nltk's English Punkt model (Kiss and Strunk 2006).
- `split_tokens` splits words like the Penn Treebank.
- `count_syllables` counts like syllapy: groups of vowels, with a list of exceptions.
- `has_verb_first` decides by a list of verbs and the second word, instead of a tagger.
"""

from __future__ import annotations

import re
import string
from functools import cache

from weft.host.verifiers._english_words import (
    ABBREVIATIONS,
    CONTRACTIONS,
    FEWER_SYLLABLES,
    FINITE_VERBS,
    LATE_STARTERS,
    MORE_SYLLABLES,
    NOT_VERBS,
    NOUN_FIRST,
    STARTERS,
    VERBS,
)

# Signs that end a word, other than the period
CLOSING = r"[)\";}\]*:@'({\[‘’“”«»!?]"
SENTENCE_MARK = re.compile(rf"[.!?](?=(?P<close>{CLOSING})|\s+(?P<next>\S+))")
# Mark inside the next word, as in `Smith!"`; Punkt then ends a sentence before this word, too
INNER_MARK = re.compile(rf"[!?](?=\S)|\.(?={CLOSING})")
QUOTES = tuple("'‘’“”«»")
# Closing quotes and brackets that belong to the sentence before them
TRAILING = re.compile(r"[\"')\]}‘’“”«»]+(?:\s+|(?=--)|$)")
NUMBER = re.compile(r"-?[.,]?\d[\d,.-]*")
WORD_START = re.compile(r"[^(\"`{\[:;&#*@)}\]\-,\s]\S*?(?=\s|$|--|\.\.|,$|" + CLOSING + ")")


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text.

    A sentence ends in . ! or ? before white space, a quote or a bracket. A period does not end one
    after an abbreviation or an initial, unless the next word usually begins a sentence; nor after a
    number or an initial, if the next word is in lower case. Line breaks alone do not end one.
    """
    marks: list[tuple[int, re.Match[str]]] = []  # with the starts of the words before them
    words = re.finditer(r"\S+", text)
    word = next(words, None)
    for mark in SENTENCE_MARK.finditer(text):
        while word is not None and word.end() <= mark.start():
            word = next(words, None)
        assert word is not None  # a mark is part of a word
        if marks and marks[-1][0] == word.start() < marks[-1][1].start():
            marks.pop()  # if there are several marks after a word, the last one decides
        marks.append((word.start(), mark))
    # Cut the text where a mark ends a sentence.
    spans = []
    begin = 0
    for start, mark in marks:
        if _is_sentence_end(text, start, mark):
            spans.append((begin, mark.end()))
            begin = mark.start("next") if mark["next"] else mark.end()
    spans.append((begin, len(text.rstrip())))
    return _move_closing_signs(text, spans)


def _move_closing_signs(text: str, spans: list[tuple[int, int]]) -> list[str]:
    """Return the texts of spans, with quotes and brackets moved to the end of the previous span.

    This applies to closing quotes and brackets at the beginning of a span.
    """
    sentences = []
    shift = 0
    for (begin, end), following in zip(spans, [*spans[1:], None], strict=True):
        begin += shift
        shift = 0
        if following is not None:
            closing = TRAILING.match(text[following[0] : following[1]])
            if closing is not None:
                end = following[0] + len(closing[0].rstrip())
                shift = closing.end()
        if begin < end:
            sentences.append(text[begin:end])
    return sentences


def _is_sentence_end(text: str, start: int, mark: re.Match[str]) -> bool:
    """Return whether a mark ends a sentence; `start` is the start of the word before the mark."""
    word = text[start : mark.start()]
    following = mark["close"] or mark["next"]
    if mark[0] != "." or "!" in word or "?" in word or INNER_MARK.search(following):
        return True
    # The word may begin with a quote that otherwise ends words.
    last = re.split(CLOSING, word)[-1]
    before = word[: len(word) - len(last)][-1:]
    last_word = (before + last if before in QUOTES else last).lower()
    first = WORD_START.match(following)
    next_word = first[0] if first is not None else following[0]
    is_capitalized = next_word[0].isupper()
    base = next_word.lower().rstrip(".")
    is_initial = len(last_word) == 1 and last_word.isalpha()
    is_abbreviation = last_word in ABBREVIATIONS or last_word.rpartition("-")[2] in ABBREVIATIONS
    if last_word.endswith("."):  # an ellipsis
        return is_capitalized and (base in STARTERS or base not in LATE_STARTERS)
    if is_abbreviation and not is_initial:
        return is_capitalized and base in STARTERS
    if is_initial:  # the first letter of a name, or a label of a list
        if is_abbreviation or next_word[0].islower():
            return False
        line = text[text.rfind("\n", 0, start) + 1 : start]
        is_label = not line.strip(" \t-*#>") and len(base) > 1  # not "J. K. Rowling"
        return not is_capitalized or is_label or base in STARTERS or base in LATE_STARTERS
    if NUMBER.fullmatch(last_word):
        return not next_word[0].islower()
    return True


# -- words

SEPARATE = re.compile(r"\.{2,}|--|``|`|[;@#$%&?!*\[\](){}<>‒–—―“”‘’«»„]")
LEADING_APOSTROPHE = re.compile(r"(?<!\w)'(?!(?:re|ve|ll|m|t|s|d|n)\b)(?=\w)", re.IGNORECASE)
FINAL_PERIOD = re.compile(r"(?<=[^.])\.(?=[\])}>\"'»”’ ]*+\s*+$)")
CLITIC = re.compile(r"(?<=[^' ])('(?:s|m|d|ll|re|ve)|n't|')(?= )", re.IGNORECASE)
JOINED = re.compile(rf"\b(?:{'|'.join(CONTRACTIONS)})\b", re.IGNORECASE)


def split_tokens(text: str) -> list[str]:
    """Return the words and signs of a text, sentence by sentence, as in the Penn Treebank.

    Clitics ("n't", "'s") and punctuation are separate tokens. Straight double quotes become
    `` or ''. Periods inside a sentence stay with their word.
    """
    tokens = []
    for sentence in split_sentences(text):
        tokens += _split_sentence_tokens(sentence)
    return tokens


def _split_sentence_tokens(sentence: str) -> list[str]:
    # Quotes first: later steps put spaces around the signs that identify opening quotes.
    spaced = re.sub(r'^"', "`` ", sentence)
    spaced = re.sub(r"(?<=[ (\[{<])(?:\"|'')", " `` ", spaced)
    spaced = LEADING_APOSTROPHE.sub("' ", spaced)
    spaced = FINAL_PERIOD.sub(" . ", spaced)
    spaced = re.sub(r"([:,])(\D|$)", r" \1 \2", spaced)
    spaced = SEPARATE.sub(r" \g<0> ", spaced)
    spaced = spaced.replace('"', " '' ").replace("''", " '' ")
    spaced = f" {' '.join(spaced.split())} "
    spaced = CLITIC.sub(r" \1", spaced)
    spaced = JOINED.sub(_cut_contraction, spaced)
    return spaced.split()


def _cut_contraction(match: re.Match[str]) -> str:
    cut = CONTRACTIONS[match[0].lower()]
    return f" {match[0][:cut]} {match[0][cut:]} "


VOWELS = re.compile(r"[aeiouy]+")


def count_syllables(word: str) -> int:
    """Return the number of syllables of an English word, or 0 for an empty word or one with digits.

    Except for words in the lists of exceptions, this is the number of groups of vowels, without a
    final e.
    """
    bare = word.strip().lower().strip(string.punctuation)
    if not bare or any(sign.isdigit() for sign in bare):
        return 0
    count = len(VOWELS.findall(bare))
    if bare.endswith("e"):
        count -= 1
    if re.search(r"[^aeiouy]le$", bare):
        count += 1
    count = max(count, 1)
    return count - (bare in FEWER_SYLLABLES) + (bare in MORE_SYLLABLES)


# -- verbs

# Endings of derived forms, and the endings of the base form that replace them
VERB_ENDINGS = (("ies", "y"), ("ied", "y"), ("es", ""), ("s", ""), ("ed", ""), ("d", ""))


def has_verb_first(text: str) -> bool:
    """Return whether the first word of a text is a verb: a known one, or a form in -ing or -ed."""
    tokens = split_tokens(text)
    if not tokens:
        return False
    word = tokens[0].lower()
    if word in FINITE_VERBS:
        return True
    if word in NOT_VERBS or not word.isalpha():
        return False
    if word in VERBS:
        second = tokens[1].lower() if len(tokens) > 1 else ""
        return second not in NOUN_FIRST
    if len(word) > 4 and word.endswith("ing"):
        return True
    return any(
        word.endswith(ending) and word[: -len(ending)] + base in VERBS
        for ending, base in VERB_ENDINGS
    )


# -- emoji

# Code points that are emoji by themselves (Unicode 17), as ranges
EMOJI = """
A9 AE 203C 2049 2122 2139 2194-2199 21A9-21AA 231A-231B 2328 23CF 23E9-23F3 23F8-23FA 24C2 25AA-25AB
25B6 25C0 25FB-25FE 2600-2604 260E 2611 2614-2615 2618 261D 2620 2622-2623 2626 262A 262E-262F
2638-263A 2640 2642 2648-2653 265F-2660 2663 2665-2666 2668 267B 267E-267F 2692-2697 2699 269B-269C
26A0-26A1 26A7 26AA-26AB 26B0-26B1 26BD-26BE 26C4-26C5 26C8 26CE-26CF 26D1 26D3-26D4 26E9-26EA
26F0-26F5 26F7-26FA 26FD 2702 2705 2708-270D 270F 2712 2714 2716 271D 2721 2728 2733-2734 2744 2747
274C 274E 2753-2755 2757 2763-2764 2795-2797 27A1 27B0 27BF 2934-2935 2B05-2B07 2B1B-2B1C 2B50 2B55
3030 303D 3297 3299 1F004 1F0CF 1F170-1F171 1F17E-1F17F 1F18E 1F191-1F19A 1F201-1F202 1F21A 1F22F
1F232-1F23A 1F250-1F251 1F300-1F321 1F324-1F393 1F396-1F397 1F399-1F39B 1F39E-1F3F0 1F3F3-1F3F5
1F3F7-1F4FD 1F4FF-1F53D 1F549-1F54E 1F550-1F567 1F56F-1F570 1F573-1F57A 1F587 1F58A-1F58D 1F590
1F595-1F596 1F5A4-1F5A5 1F5A8 1F5B1-1F5B2 1F5BC 1F5C2-1F5C4 1F5D1-1F5D3 1F5DC-1F5DE 1F5E1 1F5E3
1F5E8 1F5EF 1F5F3 1F5FA-1F64F 1F680-1F6C5 1F6CB-1F6D2 1F6D5-1F6D9 1F6DC-1F6E5 1F6E9 1F6EB-1F6EC
1F6F0 1F6F3-1F6FC 1F7E0-1F7EB 1F7F0 1F90C-1F93A 1F93C-1F945 1F947-1F9FF 1FA70-1FA7C 1FA80-1FAC6
1FAC8 1FACC-1FADD 1FADF-1FAEB 1FAEF-1FAFA
"""


@cache
def _list_emoji() -> frozenset[str]:
    signs: set[str] = set()
    for entry in EMOJI.split():
        first, _, last = entry.partition("-")
        signs.update(map(chr, range(int(first, 16), int(last or first, 16) + 1)))
    return frozenset(signs)


def is_emoji(sign: str) -> bool:
    """Return whether a single character is an emoji."""
    return sign in _list_emoji()
