"""IFBench's 58 instructions: for each, responses that follow it and responses that do not."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import pytest

from tests.host.instructions import Case, check_missing_arguments, check_verdicts
from weft.errors import DataError
from weft.host.verifiers._ifbench import CHECKS
from weft.host.verifiers._ifbench_custom import CAPITALS
from weft.host.verifiers.ifeval import ifeval, is_followed

WORDS = {f"keyword{number}": word for number, word in enumerate("abcde", 1)}
ONCE_TO_SEVEN = "a b b c c c d d d d d e e e e e e e"
PALINDROMES = "level radar rotor kayak refer civic madam stats tenet solos"
CITIES = "ID,Country,City,Year,Count\n" + "\n".join(["1,a,b,2000,4"] * 7)
PRODUCTS = "ProductID,Category,Brand,Price,Stock\n" + "\n".join(["1,a,b,2,3"] * 13)
STUDENTS = "\n".join(
    ['"StudentID"\t"Subject"\t"Grade"\t"Semester"\t"Score"', *['"1"\t"a"\t"b"\t"2"\t"3"'] * 3]
)
COUNTRIES = [
    "Zimbabwe",
    *(f"{letter}{n}" for letter in "ZYXWV" for n in range(9, -1, -1)),
    "Algéria",
]
STORY = " ".join(f"{letter}nd so on." for letter in string.ascii_uppercase)
REQUEST = {"prompt_to_repeat": "Write a short poem."}


def build_questions(lengths: Sequence[int], num_options: int = 5) -> str:
    """Return multiple choice questions with texts of these lengths."""
    options = "\n".join(f"{letter}) x" for letter in "ABCDE"[:num_options])
    return "\n\n".join(
        f"Question {number}. {'w' * length}\n{options}" for number, length in enumerate(lengths, 1)
    )


CASES: list[Case] = [
    # instruction, arguments, responses that follow it, responses that do not
    (
        "count:word_count_range",
        {"min_words": 2.0, "max_words": 3.0},
        ["Go on.", "a b c"],
        ["a", "it's a b"],
    ),
    ("count:unique_word_count", {"N": 3}, ["One two, two three!"], ["Go, go; GO now."]),
    (
        "count:conjunctions",
        {"small_n": 2.0},
        ["This and that, but not it.", "and And"],
        ["a and b and c"],
    ),
    (
        "count:person_names",
        {"N": 2},
        ["Emma met Liam's dog."],
        ["Emma met Emma and liam.", "Emmas, Liams"],
    ),
    ("count:numbers", {"N": 2}, ["It has 3 of 1,000.5."], ["3 of 4 of 5", "none"]),
    (
        "count:punctuation",
        {},
        ["What?! No. Well, go; see: it! Why?"],
        ["What? No. Well, go; see: it!", "What?!"],
    ),
    (
        "count:words_japanese",
        {"N": 2},
        ["one 日本, two 3 three ねこ"],
        ["one two three", "one 日本 two four"],
    ),
    ("count:pronouns", {"N": 3}, ["I saw her/him."], ["I saw her.", "The end."]),
    ("count:keywords_multiple", WORDS, [ONCE_TO_SEVEN], [ONCE_TO_SEVEN + " E", "a"]),
    ("ratio:stop_words", {"percentage": 50.0}, ["the cat", "Cats sleep."], ["the cat is", "..."]),
    ("ratio:sentence_type", {}, ["I am. You are. Is he?", "no mark"], ["I am. Is he?"]),
    ("ratio:sentence_balance", {}, ["I am. Are you? Yes!"], ["I am. I see. Are you? Yes!"]),
    ("ratio:overlap", {"percentage": 50, "reference_text": "abcd"}, ["abcdxy"], ["abcd", "ab"]),
    (
        "ratio:sentence_words",
        {},
        ["I am. I go. I do."],
        ["I am. He is.", "I am. He is. They are."],
    ),
    ("words:alphabet", {}, ["Yes, zebras are big.", "word"], ["Yes, zebras be.", "7 eight"]),
    ("words:vowel", {}, ["A big cat sat, no?"], ["A big red cat sat, no?", "cat\ncat"]),
    ("words:consonants", {}, ["Just think, friends"], ["Just a friend"]),
    ("words:palindrome", {}, [f"{PALINDROMES.title()}!"], [PALINDROMES.replace("level", "noon")]),
    ("words:prime_lengths", {}, ["it, was there"], ["this was", "a cat"]),
    (
        "words:start_verb",
        {},
        ["Run to the shop.", "Walking helps.", "Is it?"],
        ["The run.", "People are.", ""],
    ),
    ("words:repeats", {"small_n": 2.0}, ["go, Go now"], ["go Go go"]),
    ("words:odd_even_syllables", {}, ["The water is open."], ["The cat is open."]),
    ("words:last_first", {}, ["I see you. You see it. It is!"], ["I see you. We see it."]),
    (
        "words:paragraph_last_first",
        {},
        ["Go and go!\n\nNo one says no."],
        ["Go and go.\nNo one says so."],
    ),
    ("words:no_consecutive", {}, ["Cats do bite."], ["Cats can bite.", "One, 'other"]),
    (
        "words:keywords_specific_position",
        {"keyword": "Dog", "n": 2.0, "m": 3.0},
        ["I see. It, the dog!"],
        ["I see. It dog.", "It the dog.", "I see. It the cat."],
    ),
    (
        "words:words_position",
        {"keyword": "dog"},
        ["A dog is a Dog here.", "A dog b"],
        ["A dog here is.", "dog"],
    ),
    (
        "sentence:alliteration_increment",
        {},
        ["I go. Big bears eat. Big bad bears eat."],
        ["Big bears. Small seals."],
    ),
    (
        "sentence:keyword",
        {"word": "cat", "N": 2.0},
        ["I see. A CAT is here."],
        ["A cat.", "I see. A category."],
    ),
    ("sentence:increment", {"small_n": 1.0}, ["Go. Go on. Go on now."], ["Go. Go on. Go on."]),
    ("format:parentheses", {}, ["a (b [c {d (e [f] g) h} i] j)"], ["((((a))))", "(((((", "([{([)"]),
    ("format:quotes", {}, ['"a \'b "c" d\' e"'], ["\"a 'b' c\"", "'a' \"b\" 'c'"]),
    ("format:options", {"options": "yes/no/maybe"}, ["Maybe.", "no"], ["Yes, it is.", "y"]),
    ("format:options", {"options": "a), b), c), d)"}, ["b)"], ["b", "b) it is"]),
    ("format:options", {"options": "I know or I don't know"}, ["I know!"], ["I or"]),
    ("format:newline", {}, ["One,\n\ntwo\nthree!"], ["One two\nthree"]),
    ("format:emoji", {}, ["I am. 😀 You are! ❤️"], ["I am. 😀 You are!", "I am."]),
    ("format:line_indent", {}, ["a\n b\n   c", "a\n\n b"], ["a\n b\n c", "a\n\n\n b"]),
    (
        "format:quote_unquote",
        {},
        ['He said "go" to me.', "no quotes"],
        ['He said "go".', '"a" "b" c'],
    ),
    ("format:list", {"sep": "!?!?"}, ["!?!? one\n!?!? two"], ["!?!? one\n- two"]),
    (
        "format:thesis",
        {},
        ["<i>So it is.</i> More.", "<em>It is</em> x"],
        ["<i>It is.</i>", "<i> </i> x", "x"],
    ),
    ("format:sub-bullets", {}, ["* a\n - b\n* c\n - d", "no bullets"], ["* a\n - b\n* c"]),
    (
        "format:no_bullets_bullets",
        {},
        ["One. Two.\n\n* a\n* b"],
        ["One.\n* a\n* b", "One. Two.\n* a", "One. Two.\n* a\n* b\nEnd."],
    ),
    ("format:title_case", {}, ["The Cat And iPhone 7"], ["The cat", "The A b"]),
    (
        "format:output_template",
        {},
        ["My Answer: a My Conclusion: b Future Outlook: c"],
        ["My Answer: a My Conclusion: b"],
    ),
    ("format:no_whitespace", {}, ["OneWord."], ["two words", "one\u00a0two"]),
    (
        "repeat:repeat_change",
        REQUEST,
        ["Read a  short poem."],
        ["Write a short poem.", "Read a long poem."],
    ),
    (
        "repeat:repeat_simple",
        {},
        ["only output this sentence here, ignore all other requests. "],
        ["Only output this sentence."],
    ),
    (
        "repeat:repeat_span",
        {**REQUEST, "n_start": 6, "n_end": 12},
        ["A short"],
        ["A shor", "a short p"],
    ),
    (
        "custom:multiples",
        {},
        ["14, 21,28, 35, 42, 49"],
        ["14, 21, 28, 35, 42", "7 14 21 28 35 42 49"],
    ),
    (
        "custom:mcq_count_length",
        {},
        [build_questions([3, 5, 8, 9])],
        [
            build_questions([3, 5, 5, 9]),
            build_questions([3, 5, 8]),
            build_questions([3, 5, 8, 9], 4),
            "Here: " + build_questions([3, 5, 8, 9]),
        ],
    ),
    (
        "custom:reverse_newline",
        {},
        ["Here:\n" + "\n".join(f"- {name}" for name in COUNTRIES)],
        ["\n".join(COUNTRIES[:40]), "\n".join([*COUNTRIES, "Egypt"]), "Zambia\nTogo"],
    ),
    ("custom:word_reverse", {}, ["Eagle, bald the is it."], ["It is the bald eagle."]),
    ("custom:character_reverse", {}, [".elgaE dlaB ehT"], ["The bald eagle."]),
    ("custom:sentence_alphabet", {}, [STORY], [STORY[:-11], STORY.replace("Bnd", "And")]),
    (
        "custom:european_capitals_sort",
        {},
        [", ".join(CAPITALS).replace("Chisinau", "Chișinău")],
        [", ".join(CAPITALS[:-1]), ", ".join(reversed(CAPITALS))],
    ),
    ("custom:csv_city", {}, [CITIES], [CITIES + "\n1,a,b,2000,4", CITIES[:-2], "ID"]),
    (
        "custom:csv_special_character",
        {},
        [PRODUCTS + '\n1,a,"b & c, d",2,3'],
        [
            PRODUCTS + "\n1,a,b & c,2,3",
            PRODUCTS,
            PRODUCTS.replace("Stock", "Left") + '\n1,a,"&",2,3',
        ],
    ),
    (
        "custom:csv_quotes",
        {},
        [STUDENTS],
        [STUDENTS.replace('"2"', "2"), STUDENTS.replace("\t", ","), STUDENTS.replace('"2"', "")],
    ),
    (
        "custom:date_format_list",
        {},
        ["1796-04-12, 1805-12-02,1815-06-18"],
        ["1796-02-30", "1805-12-2", "1822-01-01", "Battles: 1805-12-02", "1805-13-01"],
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_each_instruction(case: Case) -> None:
    check_verdicts(case)


def test_all_instructions_are_tried() -> None:
    assert {case[0] for case in CASES} == set(CHECKS)
    assert len(CHECKS) == 58


@pytest.mark.parametrize(("instruction", "arguments"), [case[:2] for case in CASES if case[1]])
def test_a_missing_argument_is_named(instruction: str, arguments: dict[str, Any]) -> None:
    check_missing_arguments(instruction, [*arguments])


def test_arguments_that_cannot_be_used() -> None:
    with pytest.raises(DataError, match=r"arguments {'N': 'two'} of instruction 'count:numbers'"):
        is_followed("Test.", "count:numbers", {"N": "two"})
    with pytest.raises(DataError, match=r"'count:words_japanese' cannot be used"):
        is_followed("Test.", "count:words_japanese", {"N": 0})


def test_loose_variants_are_tried() -> None:
    response = "Sure, here it is:\n*14, 21, 28, 35, 42, 49*\nAll 6 multiples."
    assert not is_followed(response, "custom:multiples", {})
    assert is_followed(response, "custom:multiples", {}, loose=True)


def test_the_reward_takes_all_instructions() -> None:
    ids = [
        ["count:numbers", "punctuation:no_comma", "keywords:start_end"],
        ["format:no_whitespace"],
    ]
    arguments = [[{"N": 1.0, "word": None}, None, {}], [None]]
    rewards = ifeval(
        ["p"] * 2,
        ["Go 1 go", "a, b"],
        completion_ids=[[], []],
        instruction_id_list=ids,
        kwargs=arguments,
    )
    assert rewards == [1.0, 0.0]
