"""The verifier `ifeval`: checks that a completion follows the prompt's verifiable instructions.

The 25 instructions are those of IFEval (Zhou et al. 2023, "Instruction-Following Evaluation for
Large Language Models").

Each check returns whether a response follows an instruction, given the instruction's arguments. The
definitions are those of the published evaluation, except that sentences and words are split by
rules instead of nltk, and languages are detected by `_language`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weft.errors import ConfigError, DataError, build_unknown_name_error
from weft.host.verifiers._language import detect
from weft.registry import register_verifier

Arguments = Mapping[str, Any]
Check = Callable[[str, Arguments], bool]

ABBREVIATIONS = re.compile(
    r"\b(?:mr|mrs|ms|dr|prof|sr|jr|st|vs|etc|inc|ltd|co|no|fig|e\.g|i\.e|[a-z](?:\.[a-z])+|[a-z])\.(?=\s)",
    re.IGNORECASE,
)
SENTENCE_END = re.compile(r"[.!?。！？।]+[\"'”’)\]*]*(?=\s|$)")
WORD = re.compile(r"\w+")
TOKEN = re.compile(r"\w+(?:[-'.]\w+)*")


def count_sentences(text: str) -> int:
    """Return the number of sentences in a text.

    A sentence ends in . ! or ? before white space, unless the dot belongs to an abbreviation. Text
    after the last complete sentence counts as a sentence, too.
    """
    protected = ABBREVIATIONS.sub(lambda match: match.group().replace(".", "·"), text)
    parts = SENTENCE_END.split(protected)
    return sum(1 for part in parts if re.search(r"\w", part))


def count_words(text: str) -> int:
    """Return the number of words in a text. A word is a run of letters, digits and underscores."""
    return len(WORD.findall(text))


def satisfies_relation(count: int, relation: str, bound: Any) -> bool:
    """Return whether `count` is "at least" or "less than" `bound`, as `relation` specifies.

    Raises `ValueError` for any other relation.
    """
    if relation == "at least":
        return count >= int(bound)
    if relation == "less than":
        return count < int(bound)
    raise ValueError(f"relation {relation!r} must be 'at least' or 'less than'")


def _check_paragraphs(text: str, a: Arguments) -> bool:
    """Return whether a text has the required number of paragraphs, separated by *** dividers.

    Only the first and the last paragraph may be empty; an empty paragraph is not counted.
    """
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    if any(not part for part in parts[1:-1]):
        return False
    return sum(map(bool, parts)) == int(a["num_paragraphs"])


def _check_nth_paragraph(text: str, a: Arguments) -> bool:
    """Return whether a text has the required number of paragraphs and the nth begins as required.

    Paragraphs are separated by blank lines. The nth paragraph must begin with the required word.
    """
    parts = re.split(r"\n\n", text)
    count = sum(bool(part.strip()) for part in parts)
    nth = int(a["nth_paragraph"])
    if count != int(a["num_paragraphs"]) or nth > len(parts) or not parts[nth - 1].strip():
        return False
    first = parts[nth - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", first)[0].lower() == str(a["first_word"]).lower()


def _check_postscript(text: str, a: Arguments) -> bool:
    marker = str(a["postscript_marker"])
    known = {"P.P.S": r"\s*p\.\s?p\.\s?s.*$", "P.S.": r"\s*p\.\s?s\..*$"}
    pattern = known.get(marker, r"\s*" + re.escape(marker.lower()) + r".*$")
    return re.search(pattern, text.lower(), re.MULTILINE) is not None


def _check_highlights(text: str, a: Arguments) -> bool:
    single = [part.strip("*").strip() for part in re.findall(r"\*[^\n*]*\*", text)]
    double = []
    for part in re.findall(r"\*\*[^\n*]*\*\*", text):
        double.append(part.removeprefix("**").removesuffix("**").strip())
    return sum(map(bool, single + double)) >= int(a["num_highlights"])


def _check_bullets(text: str, a: Arguments) -> bool:
    stars = re.findall(r"^\s*\*[^*].*$", text, re.MULTILINE)
    dashes = re.findall(r"^\s*-.*$", text, re.MULTILINE)
    return len(stars) + len(dashes) == int(a["num_bullets"])


def _check_sections(text: str, a: Arguments) -> bool:
    parts = re.split(r"\s?" + re.escape(str(a["section_spliter"])) + r"\s?\d+\s?", text)
    return len(parts) - 1 >= int(a["num_sections"])


def _check_json(text: str, a: Arguments) -> bool:
    inside = re.sub(r"^```(?:json)?|```$", "", text.strip(), flags=re.IGNORECASE).strip()
    try:
        json.loads(inside)
    except ValueError:
        return False
    return True


def _check_two_responses(text: str, a: Arguments) -> bool:
    parts = [part.strip() for part in text.split("******")]
    if any(not part for part in parts[1:-1]):
        return False
    filled = [part for part in parts if part]
    return len(filled) == 2 and filled[0] != filled[1]


def _check_capital_words(text: str, a: Arguments) -> bool:
    count = sum(token.isupper() for token in TOKEN.findall(text))
    return satisfies_relation(count, a["capital_relation"], a["capital_frequency"])


def _check_quoted(text: str, a: Arguments) -> bool:
    bare = text.strip()
    return len(bare) > 1 and bare[0] == bare[-1] == '"'


def _count_occurrences(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text, re.IGNORECASE))


def _build_word_pattern(word: str) -> str:
    return rf"\b{re.escape(word)}\b"


# Responses of which `constrained_response` requires one
CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")

# Name of an instruction -> check of a response
CHECKS: Mapping[str, Check] = {
    "keywords:existence": lambda t, a: all(
        _count_occurrences(re.escape(word), t) for word in a["keywords"]
    ),
    "keywords:frequency": lambda t, a: satisfies_relation(
        _count_occurrences(re.escape(a["keyword"]), t), a["relation"], a["frequency"]
    ),
    "keywords:forbidden_words": lambda t, a: (
        not any(_count_occurrences(_build_word_pattern(word), t) for word in a["forbidden_words"])
    ),
    "keywords:letter_frequency": lambda t, a: satisfies_relation(
        t.lower().count(str(a["letter"]).lower()), a["let_relation"], a["let_frequency"]
    ),
    "language:response_language": lambda t, a: detect(t) == a["language"],
    "length_constraints:number_sentences": lambda t, a: satisfies_relation(
        count_sentences(t), a["relation"], a["num_sentences"]
    ),
    "length_constraints:number_paragraphs": _check_paragraphs,
    "length_constraints:number_words": lambda t, a: satisfies_relation(
        count_words(t), a["relation"], a["num_words"]
    ),
    "length_constraints:nth_paragraph_first_word": _check_nth_paragraph,
    "detectable_content:number_placeholders": lambda t, a: (
        len(re.findall(r"\[.*?\]", t)) >= int(a["num_placeholders"])
    ),
    "detectable_content:postscript": _check_postscript,
    "detectable_format:number_bullet_lists": _check_bullets,
    "detectable_format:constrained_response": lambda t, a: any(
        choice in t for choice in CONSTRAINED
    ),
    "detectable_format:number_highlighted_sections": _check_highlights,
    "detectable_format:multiple_sections": _check_sections,
    "detectable_format:json_format": _check_json,
    "detectable_format:title": lambda t, a: any(
        title.strip("<> ") for title in re.findall(r"<<[^\n]+>>", t)
    ),
    "combination:two_responses": _check_two_responses,
    "combination:repeat_prompt": lambda t, a: (
        t.strip().lower().startswith(str(a["prompt_to_repeat"]).strip().lower())
    ),
    "startend:end_checker": lambda t, a: (
        t.strip().strip('"').lower().endswith(str(a["end_phrase"]).strip().lower())
    ),
    "startend:quotation": _check_quoted,
    "change_case:capital_word_frequency": _check_capital_words,
    "change_case:english_capital": lambda t, a: t.isupper() and detect(t) == "en",
    "change_case:english_lowercase": lambda t, a: t.islower() and detect(t) == "en",
    "punctuation:no_comma": lambda t, a: "," not in t,
}


SCORES = ("share", "all")


def is_followed(
    response: str, instruction: str, arguments: Mapping[str, Any], *, loose: bool = False
) -> bool:
    """Return whether a response follows one instruction with the given arguments.

    An empty response follows no instruction. With `loose`, it is enough that one of eight variants
    follows the instruction (the loose accuracy of the IFEval paper): the response, its copies
    without the first line, the last line or both, and each of these four texts without asterisks.
    Raises `DataError` for an unknown instruction or missing arguments.
    """
    if instruction not in CHECKS:
        raise DataError(str(build_unknown_name_error("instruction", instruction, CHECKS)))
    check = CHECKS[instruction]
    given = {}
    for name, value in arguments.items():
        if value is not None:
            given[name] = value
    try:
        return any(
            variant.strip() and check(variant, given)
            for variant in (build_variants(response) if loose else [response])
        )
    except KeyError as error:
        raise DataError(
            f"instruction {instruction!r} needs the argument {error}; it has {sorted(given)}"
        ) from error


def build_variants(response: str) -> list[str]:
    """Return the eight variants of a response that `is_followed` tries with `loose`."""
    lines = response.split("\n")
    cuts = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    variants = [response, *cuts]
    return [*variants, *(text.replace("*", "") for text in variants)]


@register_verifier("ifeval")
def ifeval(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    completion_ids: Sequence[Sequence[int]],
    instruction_id_list: Sequence[Sequence[str] | None],
    kwargs: Sequence[Sequence[Mapping[str, Any]] | None],
    score: str = "share",
    loose: bool = False,
    **columns: Sequence[Any],
) -> list[float | None]:
    """Return, for each completion, the fraction of its row's instructions that it follows.

    With `score` "all", the reward is instead 1 if the completion follows all instructions, else 0.
    The reward is None for rows without instructions.

    Reads the columns `instruction_id_list` and `kwargs` (one mapping per instruction), as in the
    IFEval data. With `loose`, slight variations of the completion are tried as well. Raises
    `DataError` for an unknown instruction or missing arguments.
    """
    if score not in SCORES:
        raise ConfigError(f"ifeval: score={score!r} must be share or all")
    rewards: list[float | None] = []
    for completion, ids, arguments in zip(completions, instruction_id_list, kwargs, strict=True):
        if not ids:
            rewards.append(None)
            continue
        if arguments is None or len(arguments) != len(ids):
            raise DataError(
                f"ifeval: kwargs must contain one mapping for each of the {len(ids)} instructions "
                f"{list(ids)}"
            )
        done = []
        for id, given in zip(ids, arguments, strict=True):
            done.append(is_followed(completion, id, given or {}, loose=loose))
        rewards.append(float(all(done)) if score == "all" else sum(done) / len(done))
    return rewards
