"""The eleven instructions of IFBench that are whole tasks, such as a list of capitals or a table.

Only the form of an answer is checked, except that the capitals are compared with a list.
"""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections.abc import Mapping, Sequence

from weft.host.verifiers._english import split_sentences
from weft.host.verifiers._instructions import (
    Arguments,
    Check,
    remove_punctuation,
    strip_punctuation,
)

MULTIPLES = [str(number) for number in range(14, 50, 7)]
QUESTION = re.compile(r"Question \d+[.|):;]?\s*")
OPTION = re.compile(r"[A-Ea-e][.|)]\s*\w")
NUM_QUESTIONS = 4
NUM_OPTIONS = 5
MIN_COUNTRIES = 52  # minimum number of lines from Zimbabwe on
CAPITALS = re.findall(
    r"\w+",
    """
    Reykjavik Helsinki Oslo Tallinn Stockholm Riga Moscow Copenhagen Vilnius Minsk Dublin Berlin
    Amsterdam Warsaw London Brussels Prague Luxembourg Paris Vienna Bratislava Budapest Vaduz Chisinau
    Bern Ljubljana Zagreb
    """,
)
CITY_HEADER = ["ID", "Country", "City", "Year", "Count"]
PRODUCT_HEADER = ("ProductID", "Category", "Brand", "Price", "Stock")
STUDENT_HEADER = ("StudentID", "Subject", "Grade", "Semester", "Score")
DATE = re.compile(r"(\d{4})-(\d{2})-(\d{2})")
NAPOLEON = range(1769, 1822)  # years of his life
DAYS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def _check_multiples(text: str, a: Arguments) -> bool:
    return re.findall(r"\d+", text) == MULTIPLES


def _check_questions(text: str, a: Arguments) -> bool:
    """Return whether there are four questions of growing length with five options each."""
    if not text.startswith("Question"):
        return False
    lengths = []
    for question in filter(str.strip, QUESTION.split(text)):
        lines = [line.strip() for line in question.strip().split("\n")]
        are_options = [OPTION.match(line) is not None for line in lines]
        if sum(are_options) != NUM_OPTIONS:
            return False
        lengths.append(len(" ".join(lines[: are_options.index(True)]).strip()))
    return len(lengths) == NUM_QUESTIONS and lengths == sorted(set(lengths))


def _check_countries(text: str, a: Arguments) -> bool:
    """Return whether the lines from Zimbabwe on are in reverse alphabetical order."""
    lines = [strip_punctuation(line) for line in text.split("\n")]
    lines = [line for line in lines if line]
    first = next((n for n, line in enumerate(lines) if "Zimbabwe" in line), len(lines))
    names = [_remove_accents(line) for line in lines[first:]]
    return len(names) >= MIN_COUNTRIES and names == sorted(names, reverse=True)


def _remove_accents(text: str) -> str:
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def _check_reversed_words(text: str, a: Arguments) -> bool:
    words = remove_punctuation(text.lower()).split()
    return "bald eagle" in " ".join(reversed(words))


def _check_alphabet_story(text: str, a: Arguments) -> bool:
    letters = [sentence.lstrip()[:1].lower() for sentence in split_sentences(text)]
    return "".join(letters) == "abcdefghijklmnopqrstuvwxyz"


def _check_capitals(text: str, a: Arguments) -> bool:
    names = [name.strip() for name in _remove_accents(text).split(",")]
    return [name for name in names if name] == CAPITALS


def _check_cities(text: str, a: Arguments) -> bool:
    rows = _read_table(text, ",")
    return len(rows) == 8 and rows[0] == CITY_HEADER and all(len(row) == 5 for row in rows)


def _read_table(text: str, delimiter: str) -> list[list[str]]:
    """Return the rows of a table, or an empty list if the text is not a table."""
    try:
        return list(csv.reader(io.StringIO(text), delimiter=delimiter))
    except csv.Error:
        return []


def _read_quoted_table(text: str, delimiter: str) -> list[list[str]]:
    """Return the rows of a table whose fields keep their double quotes."""
    return _read_table(text.replace('"', '"""'), delimiter)


def _has_header(text: str, names: Sequence[str], separator: str) -> bool:
    """Return whether the first line consists of these names, each with or without quotes."""
    fields = [f'(?:{name}|"{name}")' for name in names]
    return re.fullmatch(separator.join(fields), text.split("\n")[0].strip()) is not None


def _check_products(text: str, a: Arguments) -> bool:
    """Return whether there are 14 rows, and a quoted field with a special character.

    Rows after the first one with such a field may be of any length.
    """
    rows = _read_quoted_table(text, ",")
    if not _has_header(text, PRODUCT_HEADER, r",[ \t]*") or len(rows) != 15:
        return False
    for row in rows[1:]:
        if len(row) != 5:
            return False
        if any(re.match(r'".*[^\d\w\s].*"', field) for field in row):
            return True
    return False


def _check_students(text: str, a: Arguments) -> bool:
    rows = _read_quoted_table(text, "\t")
    if not _has_header(text, STUDENT_HEADER, r"\t *") or len(rows) != 4:
        return False
    return all(
        len(row) == 5 and all(field.strip()[:1] == field.strip()[-1:] == '"' for field in row)
        for row in rows
    )


def _check_dates(text: str, a: Arguments) -> bool:
    for part in text.strip().split(","):
        date = DATE.fullmatch(part.strip())
        if date is None:
            return False
        year, month, day = map(int, date.groups())
        # The published check accepts month 0 and day 0.
        if year not in NAPOLEON or month > 12 or (month and day > DAYS[month - 1]):
            return False
    return True


# Name of an instruction -> check of a response
CUSTOM_CHECKS: Mapping[str, Check] = {
    "custom:multiples": _check_multiples,
    "custom:mcq_count_length": _check_questions,
    "custom:reverse_newline": _check_countries,
    "custom:word_reverse": _check_reversed_words,
    "custom:character_reverse": lambda t, a: "elgae dlab" in t.lower(),
    "custom:sentence_alphabet": _check_alphabet_story,
    "custom:european_capitals_sort": _check_capitals,
    "custom:csv_city": _check_cities,
    "custom:csv_special_character": _check_products,
    "custom:csv_quotes": _check_students,
    "custom:date_format_list": _check_dates,
}
