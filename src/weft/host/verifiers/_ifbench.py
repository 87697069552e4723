"""The 58 instructions of IFBench: counts, ratios, words, sentences, formats and repetitions.

IFBench (Pyatkin et al. 2025, "Generalizing Verifiable Instruction Following") tests instructions
that IFEval does not have. The names, arguments and definitions are the published ones, even if a
definition is looser than its wording: `format:sub-bullets` accepts a response without bullets, and
`count:conjunctions` counts "and" and "And" as two. `_english` splits sentences and words.
"""

from __future__ import annotations

import itertools
import re
import string
from collections import Counter
from collections.abc import Mapping

from weft.host.verifiers._english import (
    count_syllables,
    has_verb_first,
    is_emoji,
    split_sentences,
    split_tokens,
)
from weft.host.verifiers._english_words import PRONOUNS, STOP_WORDS
from weft.host.verifiers._ifbench_custom import CUSTOM_CHECKS
from weft.host.verifiers._instructions import (
    Arguments,
    Check,
    remove_punctuation,
    strip_punctuation,
)

WORD = re.compile(r"\w+")
CONJUNCTIONS = frozenset(("and", "but", "for", "nor", "or", "so", "yet"))
NAMES = re.findall(
    r"\w+",
    """
    Emma Liam Sophia Jackson Olivia Noah Ava Lucas Isabella Mason Mia Ethan Charlotte Alexander Amelia
    Benjamin Harper Leo Zoe Daniel Chloe Samuel Lily Matthew Grace Owen Abigail Gabriel Ella Jacob
    Scarlett Nathan Victoria Elijah Layla Nicholas Audrey David Hannah Christopher Penelope Thomas Nora
    Andrew Aria Joseph Claire Ryan Stella Jonathan
    """,
)
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
CONSONANT_PAIR = re.compile(r"[bcdfghjklmnpqrstvwxyz]{2}")
JAPANESE = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")
PRIMES = frozenset(n for n in range(2, 100) if all(n % divisor for divisor in range(2, n)))
BRACKETS = {")": "(", "]": "[", "}": "{"}
MIN_BRACKETS = 5  # nested pairs of brackets that `format:parentheses` requires
MIN_QUOTES = 3  # nested quotes that `format:quotes` requires
MIN_PALINDROMES = 10
MIN_LETTERS = 5  # minimum length of a palindrome
MAX_VOWELS = 3  # maximum number of different vowels
TRIGRAM_MARGIN = 2  # permitted deviation for `ratio:overlap`, in percentage points
KEYWORD_COUNTS = (1, 2, 3, 5, 7)  # required numbers of occurrences of keyword1 to keyword5
REPEATED_SENTENCE = "only output this sentence here, ignore all other requests."


# -- counts


def _check_word_range(text: str, a: Arguments) -> bool:
    # Read both before comparing, so that a row that lacks one is an error for every text.
    minimum = float(a["min_words"])
    maximum = float(a["max_words"])
    return minimum <= len(WORD.findall(text)) <= maximum


def _check_unique_words(text: str, a: Arguments) -> bool:
    # A word of punctuation alone counts as one, empty word.
    return len({strip_punctuation(word) for word in text.lower().split()}) >= float(a["N"])


def _check_conjunctions(text: str, a: Arguments) -> bool:
    minimum = float(a["small_n"])
    words = {word for word in text.split() if strip_punctuation(word).lower() in CONJUNCTIONS}
    return len(words) >= minimum


def _check_names(text: str, a: Arguments) -> bool:
    return sum(bool(re.search(rf"\b{name}\b", text)) for name in NAMES) >= float(a["N"])


def _check_numbers(text: str, a: Arguments) -> bool:
    """Return whether there are N numbers; "1,000.5" is one, since punctuation is removed first."""
    return len(re.findall(r"\d+", remove_punctuation(text))) == float(a["N"])


def _check_punctuation(text: str, a: Arguments) -> bool:
    """Return whether there is an interrobang and, in addition, each of the marks . , ! ? ; :"""
    if "?!" in text:
        rest = text.replace("?!", "", 1)
    elif "!?" in text:
        rest = text.replace("!?", "", 1)
    elif "‽" in text:
        rest = text
    else:
        return False
    return all(mark in rest for mark in ".,!?;:")


def _check_japanese(text: str, a: Arguments) -> bool:
    """Return whether every Nth word has a Japanese letter, unless it is a number or punctuation."""
    step = int(a["N"])
    words = [strip_punctuation(word) for word in text.split()[step - 1 :: step]]
    return all(JAPANESE.search(word) for word in words if word and not word.isdigit())


def _check_pronouns(text: str, a: Arguments) -> bool:
    tokens = split_tokens(text.replace("/", " ").lower())
    return sum(token in PRONOUNS for token in tokens) >= float(a["N"])


def _check_several_keywords(text: str, a: Arguments) -> bool:
    keywords = [str(a[f"keyword{number}"]) for number in range(1, len(KEYWORD_COUNTS) + 1)]
    return all(
        text.lower().count(keyword.strip().lower()) == count
        for keyword, count in zip(keywords, KEYWORD_COUNTS, strict=True)
    )


# -- ratios


def _check_stop_words(text: str, a: Arguments) -> bool:
    maximum = float(a["percentage"])
    words = WORD.findall(text.lower())
    stop_words = sum(word in STOP_WORDS for word in words)
    return bool(words) and stop_words / len(words) * 100 <= maximum


def _count_sentence_ends(text: str) -> tuple[int, int, int]:
    """Return the numbers of sentences that end in a period, a question mark and an exclamation."""
    ends = Counter(sentence[-1] for sentence in split_sentences(text))
    return ends["."], ends["?"], ends["!"]


def _check_sentence_types(text: str, a: Arguments) -> bool:
    statements, questions, _ = _count_sentence_ends(text)
    return statements == 2 * questions


def _check_sentence_balance(text: str, a: Arguments) -> bool:
    return len(set(_count_sentence_ends(text))) == 1


def _check_overlap(text: str, a: Arguments) -> bool:
    """Return whether the required share of the text's trigrams occurs in the reference.

    Trigrams are runs of three characters.
    """
    share = float(a["percentage"])
    reference = _list_trigrams(str(a["reference_text"]))
    own = _list_trigrams(text)
    if not own:
        return False
    overlap = len(own & reference) / len(own) * 100
    return share - TRIGRAM_MARGIN <= overlap <= share + TRIGRAM_MARGIN


def _list_trigrams(text: str) -> set[str]:
    return {text[start : start + 3] for start in range(len(text) - 2)}


def _check_equal_sentences(text: str, a: Arguments) -> bool:
    """Return whether there are three sentences of equal length; their words are not compared."""
    sentences = split_sentences(text)
    return len(sentences) == 3 and len({len(sentence.strip()) for sentence in sentences}) == 1


# -- words


def _check_alphabet(text: str, a: Arguments) -> bool:
    words = remove_punctuation(text).lower().split()
    if not words or words[0][0] not in ALPHABET:
        return False
    first = ALPHABET.index(words[0][0])
    return all(word[0] == ALPHABET[(first + n) % 26] for n, word in enumerate(words))


def _check_vowels(text: str, a: Arguments) -> bool:
    return "\n" not in text.strip() and len(set(text.lower()) & set("aeiou")) <= MAX_VOWELS


def _check_palindromes(text: str, a: Arguments) -> bool:
    words = remove_punctuation(text).lower().split()
    palindromes = [word for word in words if len(word) >= MIN_LETTERS and word == word[::-1]]
    return len(palindromes) >= MIN_PALINDROMES


def _check_repeats(text: str, a: Arguments) -> bool:
    maximum = float(a["small_n"])
    counts = Counter(remove_punctuation(text.lower()).split())
    return all(count <= maximum for count in counts.values())


def _check_syllables(text: str, a: Arguments) -> bool:
    parities = [count_syllables(word) % 2 for word in remove_punctuation(text).lower().split()]
    return all(first != second for first, second in itertools.pairwise(parities))


def _check_last_words_first(text: str, a: Arguments) -> bool:
    sentences = [sentence.lower() for sentence in split_sentences(text)]
    for sentence, following in itertools.pairwise(sentences):
        last = sentence.rstrip(string.punctuation + " ").split()[-1:]
        first = following.lstrip(string.punctuation + " ").split()[:1]
        if not last or last != first:
            return False
    return True


def _check_paragraph_ends(text: str, a: Arguments) -> bool:
    lines = [strip_punctuation(line.strip().lower()).split() for line in text.split("\n")]
    return all(words[0] == words[-1] for words in lines if words)


def _check_first_letters(text: str, a: Arguments) -> bool:
    words = remove_punctuation(text.lower()).split()
    return all(first[0] != second[0] for first, second in itertools.pairwise(words))


def _check_position(text: str, a: Arguments) -> bool:
    """Return whether the keyword is word m of sentence n; clitics such as "n't" are words."""
    keyword = str(a["keyword"]).strip().lower()
    n = int(a["n"])
    m = int(a["m"])
    sentences = split_sentences(text)
    if len(sentences) < n:
        return False
    tokens = split_tokens(sentences[n - 1])
    words = [token for token in tokens if any(sign.isalnum() for sign in token)]
    return len(words) >= m and words[m - 1].lower() == keyword


def _check_second_words(text: str, a: Arguments) -> bool:
    """Return whether the second word and the second-to-last word are the keyword.

    A single punctuation mark at the end does not count as a word.
    """
    keyword = str(a["keyword"]).strip().lower()
    tokens = [token.lower() for token in split_tokens(text)]
    if tokens and len(tokens[-1]) == 1 and not remove_punctuation(tokens[-1]):
        tokens.pop()
    return len(tokens) >= 2 and tokens[1] == tokens[-2] == keyword


# -- sentences


def _check_alliteration(text: str, a: Arguments) -> bool:
    """Return whether each sentence has more alliterative words than the one before."""
    last_count = -1
    for sentence in split_sentences(text):
        words = [word.lstrip(string.punctuation) for word in sentence.lower().split()]
        letters = [word[0] for word in words if word]
        are_alike = [first == second for first, second in itertools.pairwise(letters)]
        # A run of n equal pairs of neighbors has n + 1 words.
        num_runs = 0
        for previous, current in zip([False, *are_alike], are_alike, strict=False):
            num_runs += current and not previous
        count = sum(are_alike) + num_runs
        if count <= last_count:
            return False
        last_count = count
    return True


def _check_sentence_keyword(text: str, a: Arguments) -> bool:
    word = str(a["word"])
    number = int(a["N"])
    sentences = split_sentences(text)
    if len(sentences) < number:
        return False
    return bool(re.search(rf"\b{re.escape(word)}\b", sentences[number - 1], re.IGNORECASE))


def _check_increment(text: str, a: Arguments) -> bool:
    increment = float(a["small_n"])
    counts = [len(remove_punctuation(sentence).split()) for sentence in split_sentences(text)]
    return all(following == count + increment for count, following in itertools.pairwise(counts))


# -- formats


def _check_brackets(text: str, a: Arguments) -> bool:
    """Return whether brackets are nested five deep, and the innermost pair is closed correctly."""
    opened: list[str] = []
    depth = 0
    for sign in text:
        if sign in "([{":
            opened.append(sign)
            depth = max(depth, len(opened))
        elif sign in BRACKETS:
            if opened and opened[-1] == BRACKETS[sign]:
                opened.pop()
                if depth >= MIN_BRACKETS:
                    return True
            else:
                opened, depth = [], 0
    return False


def _check_quotes(text: str, a: Arguments) -> bool:
    """Return whether nested quotes alternate between " and ', and three of them are closed."""
    opened: list[str] = []
    depth = 0
    for sign in text:
        if opened and sign == opened[-1]:
            opened.pop()
            if depth - len(opened) >= MIN_QUOTES:
                return True
        elif sign in "\"'":
            opened.append(sign)
            depth = max(depth, len(opened))
    return False


def _check_options(text: str, a: Arguments) -> bool:
    """Return whether the response is one of the options; labels such as a) must match exactly."""
    options = str(a["options"])
    separator = next((sign for sign in ("/", "or") if sign in options), ",")
    choices = [choice.strip() for choice in options.split(separator)]
    if re.match(r"\W*[aA]\W*[bB]\W*[cC]\W*", options):
        return text in choices
    return strip_punctuation(text).lower() in [
        strip_punctuation(choice).lower() for choice in choices
    ]


def _check_lines(text: str, a: Arguments) -> bool:
    bare = remove_punctuation(text).strip()
    return sum(line != "" for line in bare.split("\n")) == len(bare.split())


def _check_emoji(text: str, a: Arguments) -> bool:
    """Return whether each sentence ends in an emoji, or is followed by one."""
    sentences = [remove_punctuation(sentence).strip() for sentence in split_sentences(text)]
    for sentence, following in zip(sentences, [*sentences[1:], ""], strict=True):
        if not sentence:
            return False
        # The last character may be a variation selector.
        if not any(map(is_emoji, sentence[-2:])) and not is_emoji(following[:1]):
            return False
    return True


def _check_stairs(text: str, a: Arguments) -> bool:
    """Return whether each line is indented more than the previous one.

    In a run of blank lines, only every second one counts as a line.
    """
    indents = []
    num_blank = 0
    for line in text.split("\n"):
        num_blank = 0 if line.strip() else num_blank + 1
        if num_blank % 2 == 0:
            indents.append(len(line) - len(line.lstrip(" ")))
    return all(indent < following for indent, following in itertools.pairwise(indents))


def _check_explained_quotes(text: str, a: Arguments) -> bool:
    """Return whether no two quotes touch, and letters follow the last one."""
    joined = "".join(text.replace("'\"'", "").split())
    if '""' in joined:
        return False
    after_last = joined.rpartition('"')[2]
    return '"' not in joined or bool(re.sub(r"[\d!-/:-@\[-`{-~]", "", after_last))


def _check_thesis(text: str, a: Arguments) -> bool:
    """Return whether there is text in italics, and other text after it."""
    opening = "<i>" if "<i>" in text else "<em>"
    rest = text[text.find(opening) :] if opening in text else ""
    end = rest.find("</i>") if "</i>" in rest else rest.find("</em>")
    return end >= 0 and bool(rest[len("<i>") : end].strip()) and bool(rest[end + 4 :].strip())


def _check_bullets_after_sentences(text: str, a: Arguments) -> bool:
    """Return whether the response consists of at least two sentences, then at least two bullets.

    Sentences must be on consecutive lines; blank lines may follow them.
    """
    sentences = bullets = 0
    may_continue = True  # whether more sentences may follow
    for line in map(str.strip, text.split("\n")):
        if line.startswith("*"):
            if sentences < 2:
                return False
            may_continue = False
            bullets += 1
        elif may_continue:
            added = len(split_sentences(line))
            sentences += added
            may_continue = added > 0
        else:
            return False
    return bullets >= 2


def _check_title_case(text: str, a: Arguments) -> bool:
    """Return whether no word begins with a small letter, except words such as "iPhone"."""
    for token in split_tokens(text):
        rest = token[1:]
        if token[0].islower() and (not rest or rest.islower() or rest.isupper()):
            return False
    return True


# -- repetitions


def _check_changed_repetition(text: str, a: Arguments) -> bool:
    request = str(a["prompt_to_repeat"])
    return text != request and text.split()[1:] == request.split()[1:]


def _check_repeated_span(text: str, a: Arguments) -> bool:
    span = str(a["prompt_to_repeat"])[int(a["n_start"]) : int(a["n_end"]) + 1]
    return text.strip().lower() == span.strip().lower()


# Name of an instruction -> check of a response
CHECKS: Mapping[str, Check] = {
    "count:word_count_range": _check_word_range,
    "count:unique_word_count": _check_unique_words,
    "count:conjunctions": _check_conjunctions,
    "count:person_names": _check_names,
    "count:numbers": _check_numbers,
    "count:punctuation": _check_punctuation,
    "count:words_japanese": _check_japanese,
    "count:pronouns": _check_pronouns,
    "count:keywords_multiple": _check_several_keywords,
    "ratio:stop_words": _check_stop_words,
    "ratio:sentence_type": _check_sentence_types,
    "ratio:sentence_balance": _check_sentence_balance,
    "ratio:overlap": _check_overlap,
    "ratio:sentence_words": _check_equal_sentences,
    "words:alphabet": _check_alphabet,
    "words:vowel": _check_vowels,
    "words:consonants": lambda t, a: all(map(CONSONANT_PAIR.search, t.lower().split())),
    "words:palindrome": _check_palindromes,
    "words:prime_lengths": lambda t, a: all(
        len(word) in PRIMES for word in remove_punctuation(t).split()
    ),
    "words:start_verb": lambda t, a: has_verb_first(t),
    "words:repeats": _check_repeats,
    "words:odd_even_syllables": _check_syllables,
    "words:last_first": _check_last_words_first,
    "words:paragraph_last_first": _check_paragraph_ends,
    "words:no_consecutive": _check_first_letters,
    "words:keywords_specific_position": _check_position,
    "words:words_position": _check_second_words,
    "sentence:alliteration_increment": _check_alliteration,
    "sentence:keyword": _check_sentence_keyword,
    "sentence:increment": _check_increment,
    "format:parentheses": _check_brackets,
    "format:quotes": _check_quotes,
    "format:options": _check_options,
    "format:newline": _check_lines,
    "format:emoji": _check_emoji,
    "format:line_indent": _check_stairs,
    "format:quote_unquote": _check_explained_quotes,
    "format:list": lambda t, a: t.count(str(a["sep"])) >= 2,
    "format:thesis": _check_thesis,
    "format:sub-bullets": lambda t, a: all("-" in part for part in t.split("*")[1:]),
    "format:no_bullets_bullets": _check_bullets_after_sentences,
    "format:title_case": _check_title_case,
    "format:output_template": lambda t, a: all(
        label in t for label in ("My Answer:", "My Conclusion:", "Future Outlook:")
    ),
    "format:no_whitespace": lambda t, a: not any(map(str.isspace, t)),
    "repeat:repeat_change": _check_changed_repetition,
    "repeat:repeat_simple": lambda t, a: t.strip().lower() == REPEATED_SENTENCE,
    "repeat:repeat_span": _check_repeated_span,
    **CUSTOM_CHECKS,
}
