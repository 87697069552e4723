"""The verifier `ifeval`: checks that a completion follows the prompt's verifiable instructions.

The instructions are the 25 of IFEval (Zhou et al. 2023, "Instruction-Following Evaluation for Large
Language Models"), which are defined here, the 58 of IFBench (`_ifbench`) and its 29 for training
(`_iftrain`).

Each check returns whether a response follows an instruction, given the instruction's arguments. The
definitions are the same as in the published evaluations, except that sentences and words are split
by rules instead of nltk, and languages are detected by `detect`.
"""

from __future__ import annotations

import ast
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from weft.errors import ConfigError, DataError, build_unknown_name_error
from weft.host.verifiers import _ifbench, _iftrain
from weft.host.verifiers._instructions import Arguments, Check, satisfies_relation
from weft.reading import shorten
from weft.registry import register_verifier

# First word of the Unicode names of a script's letters -> default language of the script. For
# scripts of several languages, letters or words decide.
SCRIPTS = {
    "DEVANAGARI": "hi",
    "BENGALI": "bn",
    "GURMUKHI": "pa",
    "GUJARATI": "gu",
    "TAMIL": "ta",
    "TELUGU": "te",
    "KANNADA": "kn",
    "MALAYALAM": "ml",
    "THAI": "th",
    "HANGUL": "ko",
    "HIRAGANA": "ja",
    "KATAKANA": "ja",
    "CJK": "zh",
    "GREEK": "el",
    "HEBREW": "he",
    "ARABIC": "ar",
    "CYRILLIC": "ru",
    "LATIN": "en",
}

# Language -> letters that only this language of its script uses, or uses often
LETTERS = {
    "ur": "ٹڈڑںےہھ",
    "fa": "پچژگیک",
    "uk": "іїєґ",
    "ru": "ыэё",
    "bg": "ъ",
    "vi": "ăđơưạảấầẩẫậắằẳẵặẹẻẽếềểễệỉịọỏốồổỗộớờởỡợụủứừửữựỳỵỷỹ",
    "de": "ß",
    "es": "ñ¿¡",
    "pt": "ãõ",
    "pl": "łżźćńśęą",
    "hu": "őű",
    "tr": "ğış",
    "ro": "țșăâ",
    "cs": "řěů",
}

# Language -> its frequent words
WORDS = {
    "en": (
        "the of and to in is that it for was with on as are be this you have not but they from "
        "or an will can my your he she"
    ),
    "de": (
        "der die und das ist nicht ein eine zu den von mit auf für dem sich des auch es wir sie "
        "ich werden oder wie bei sind"
    ),
    "fr": (
        "le la les et est un une des du pas pour que qui dans sur avec ce il vous nous au sont "
        "plus ou je mais cette être"
    ),
    "es": (
        "el la los las y es un una de que en por con para no se del como más su al lo pero sus "
        "son este está ser"
    ),
    "pt": (
        "o os as e é um uma de que em por com para não se do da no na mais como dos das ao são "
        "você seu foi também muito"
    ),
    "it": (
        "il lo la gli e è un una di che in per con non si del della sono come più anche dei nel "
        "alla questo ma le mi"
    ),
    "ca": (
        "el la els les i és un una de que en per amb no es del com més al són aquest aquesta "
        "seva però també molt"
    ),
    "nl": (
        "de het een en is van dat niet te in op voor met zijn aan die er ook maar om als bij "
        "naar wordt je wij deze"
    ),
    "sv": (
        "och att det som en är på för med av den inte till ett han var jag har de om vi men kan "
        "så från eller"
    ),
    "fi": (
        "ja on ei se että oli hän mutta ovat joka kun niin tämä myös voi sen tai olla mukaan "
        "sekä ole minun kanssa kuin mitä"
    ),
    "hu": (
        "a az és hogy nem is egy van volt csak de ha már még meg mint vagy ez azt ki el lehet "
        "amely nagyon kell"
    ),
    "eu": (
        "eta da ez bat du dira zen izan dute den ere hori baina behar dela bere hau egin edo "
        "duen dago"
    ),
    "sw": (
        "na ya wa kwa ni katika za la cha kuwa hii kama au si yake hiyo lakini pia sana watu "
        "huo ambayo wao yangu moja mimi"
    ),
    "id": (
        "yang dan di itu dengan untuk tidak ini dari dalam akan pada juga saya ke karena adalah "
        "bisa mereka kami"
    ),
    "tr": (
        "ve bir bu için ile de da çok ne gibi daha olarak olan ama kadar değil ben sonra en var mı"
    ),
    "pl": "i w na z się nie do to że jest o jak ale po co tak za od przez dla tym są być czy może",
    "ro": "și de la în cu nu pe un o care este pentru din mai ce sunt că sau dar fi ca",
    "vi": "và của là có cho không một được các trong người những với để này khi đã tôi bạn như",
    "hi": "है के में की और को का से हैं पर यह था नहीं एक भी हो ने कि जो कर लिए मैं हम आप या मेरे",
    "mr": (
        "आहे आणि या च्या मध्ये आहेत नाही हे ते एक साठी होते त्या की मी तर होता पण असे तुम्ही "
        "आम्ही काही किंवा केले त्यांच्या"
    ),
    "ne": (
        "छ र को मा हो छन् पनि लाई गर्न यो भएको का तर थियो गर्ने लागि हुन् एक म हामी तपाईं भने "
        "गरेको नेपाल छैन हुन्छ"
    ),
}

# Language in `WORDS` -> its script, if that is not Latin
SCRIPT_BY_LANGUAGE = {"hi": "DEVANAGARI", "mr": "DEVANAGARI", "ne": "DEVANAGARI"}
WORD_OF_LETTERS = re.compile(r"[^\W\d_]+(?:[\u0900-\u0963\u0966-\u097F]+)?")


def detect(text: str) -> str:
    """Return the ISO 639-1 code of a text's language.

    Returns "en" for Latin letters without evidence of another language, and "" for a text without
    letters.
    """
    folded = text.casefold()
    scripts = Counter(_find_script(sign) for sign in folded if sign.isalpha())
    del scripts[""]
    if not scripts:
        return ""
    if scripts["HIRAGANA"] + scripts["KATAKANA"] > 0.1 * scripts.total():
        return "ja"
    script = scripts.most_common(1)[0][0]
    if script in ("LATIN", "DEVANAGARI"):
        return _detect_by_words(folded, script)
    if script == "ARABIC":
        return _detect_by_letters(folded, ("ur", "fa"), "ar")
    if script == "CYRILLIC":
        return _detect_by_letters(folded, ("uk", "ru", "bg"), "ru")
    return SCRIPTS[script]


def _find_script(sign: str) -> str:
    name = unicodedata.name(sign, "").split(" ")[0].split("-")[0]
    return name if name in SCRIPTS else ""


def _detect_by_letters(text: str, candidates: tuple[str, ...], default: str) -> str:
    """Return the first candidate whose typical letters make up at least 1% of the text's letters.

    `LETTERS` has the typical letters of each language. Returns `default` if there is no such
    candidate.
    """
    letters = sum(sign.isalpha() for sign in text)
    for language in candidates:
        if sum(text.count(sign) for sign in LETTERS[language]) >= 0.01 * letters:
            return language
    return default


def _detect_by_words(text: str, script: str) -> str:
    """Return the most likely language of a text, judged by typical words and letters.

    Only languages that are written in `script` are considered. If none of them scores higher than
    the script's default language, the default is returned.
    """
    tokens = text.split() if script == "DEVANAGARI" else WORD_OF_LETTERS.findall(text)
    words = Counter(token.strip("।,.!?;:()\"'") for token in tokens)
    scores = {}
    for language, typical_words in WORDS.items():
        if SCRIPT_BY_LANGUAGE.get(language, "LATIN") == script:
            num_letters = sum(text.count(sign) for sign in LETTERS.get(language, ""))
            scores[language] = (
                sum(words[word] for word in typical_words.split()) + 0.5 * num_letters
            )
    default = SCRIPTS[script]
    best = max(scores, key=lambda language: (scores[language], language == default))
    return best if scores[best] > scores[default] else default


ABBREVIATIONS = re.compile(
    r"\b(?:mr|mrs|ms|dr|prof|sr|jr|st|vs|etc|inc|ltd|co|no|fig|[a-z])\.(?=\s)",
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
    # Read all arguments first, so that a row that lacks one is an error for every text.
    nth = int(a["nth_paragraph"])
    required = int(a["num_paragraphs"])
    word = str(a["first_word"]).lower()
    parts = re.split(r"\n\n", text)
    count = sum(bool(part.strip()) for part in parts)
    if count != required or nth > len(parts) or not parts[nth - 1].strip():
        return False
    first = parts[nth - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", first)[0].lower() == word


def _check_postscript(text: str, a: Arguments) -> bool:
    marker = str(a["postscript_marker"])
    patterns = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return re.search(patterns.get(marker, re.escape(marker.lower())), text.lower()) is not None


def _count_placeholders(text: str) -> int:
    """Return the number of texts in square brackets, in time linear in the length of the text."""
    count = 0
    for line in text.split("\n"):
        start = line.find("[")
        while start >= 0 and (end := line.find("]", start)) >= 0:
            count += 1
            start = line.find("[", end)
    return count


def _check_highlights(text: str, a: Arguments) -> bool:
    single = [part.strip("*").strip() for part in re.findall(r"\*[^\n*]*\*", text)]
    double = []
    for part in re.findall(r"\*\*[^\n*]*\*\*", text):
        double.append(part.removeprefix("**").removesuffix("**").strip())
    return sum(map(bool, single + double)) >= int(a["num_highlights"])


def _check_bullets(text: str, a: Arguments) -> bool:
    stars = re.findall(r"^[^\S\n]*\*[^*].*$", text, re.MULTILINE)
    dashes = re.findall(r"^[^\S\n]*-.*$", text, re.MULTILINE)
    return len(stars) + len(dashes) == int(a["num_bullets"])


def _check_sections(text: str, a: Arguments) -> bool:
    parts = re.split(r"\s?" + re.escape(str(a["section_spliter"])) + r"\s?\d+\s?", text)
    return len(parts) - 1 >= int(a["num_sections"])


def _check_json(text: str, a: Arguments) -> bool:
    content = re.sub(r"^```(?:json)?|```$", "", text.strip(), flags=re.IGNORECASE).strip()
    return _is_json(content)


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
        not any(_count_occurrences(rf"\b{re.escape(word)}\b", t) for word in a["forbidden_words"])
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
        len(WORD.findall(t)), a["relation"], a["num_words"]
    ),
    "length_constraints:nth_paragraph_first_word": _check_nth_paragraph,
    "detectable_content:number_placeholders": lambda t, a: (
        _count_placeholders(t) >= int(a["num_placeholders"])
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


# All instructions that `is_followed` knows
INSTRUCTIONS: Mapping[str, Check] = {**CHECKS, **_ifbench.CHECKS, **_iftrain.CHECKS}

SCORES = ("share", "all")


def is_followed(
    response: str, instruction: str, arguments: Mapping[str, Any], *, loose: bool = False
) -> bool:
    """Return whether a response follows one instruction with the given arguments.

    An empty response follows no instruction. With `loose`, it is enough that one of eight variants
    follows the instruction (the loose accuracy of the IFEval paper): the response, its copies
    without the first line, the last line or both, and each of these four texts without asterisks.
    Raises `DataError` for an unknown instruction, and for missing or unusable arguments.
    """
    if instruction not in INSTRUCTIONS:
        raise DataError(str(build_unknown_name_error("instruction", instruction, INSTRUCTIONS)))
    check = INSTRUCTIONS[instruction]
    set_arguments = {}
    for name, value in arguments.items():
        if value is not None:
            set_arguments[name] = value
    try:
        return any(
            variant.strip() and check(variant, set_arguments)
            for variant in (build_variants(response) if loose else [response])
        )
    except KeyError as error:
        raise DataError(
            f"instruction {instruction!r} needs the argument {error}; it has "
            f"{sorted(set_arguments)}"
        ) from error
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise DataError(
            f"the arguments {set_arguments} of instruction {instruction!r} cannot be used: {error}"
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
    score: str = "share",
    loose: bool = False,
    **columns: Sequence[Any],
) -> list[float | None]:
    """Return, for each completion, the fraction of its row's instructions that it follows.

    With `score` "all", the reward is instead 1 if the completion follows all instructions, else 0.
    The reward is None for rows without instructions.

    Reads the columns `instruction_id_list` and `kwargs` (one mapping per instruction), as in the
    data of IFEval and IFBench, or the column `ground_truth`, as in IFBench's training data: a text
    with `[{"instruction_id": [...], "kwargs": [...]}]`. With `loose`, slight variations of the
    completion are tried as well. Raises `DataError` for an unknown instruction, and for missing or
    unusable arguments.
    """
    if score not in SCORES:
        raise ConfigError(f"ifeval: score={score!r} must be share or all")
    rewards: list[float | None] = []
    for completion, row in zip(
        completions, _read_instructions(columns, len(completions)), strict=True
    ):
        followed = [
            is_followed(completion, id, arguments or {}, loose=loose) for id, arguments in row
        ]
        if not followed:
            rewards.append(None)
        else:
            rewards.append(
                float(all(followed)) if score == "all" else sum(followed) / len(followed)
            )
    return rewards


Instructions = list[tuple[str, Mapping[str, Any] | None]]  # names with their arguments


def _read_instructions(columns: Mapping[str, Sequence[Any]], count: int) -> list[Instructions]:
    """Return the instructions of `count` rows; the list of a row without instructions is empty."""
    has_lists = "instruction_id_list" in columns and "kwargs" in columns
    if count and not has_lists and "ground_truth" not in columns:
        raise DataError(
            "ifeval: the data needs the columns 'instruction_id_list' and 'kwargs', or "
            f"'ground_truth'; it has: {', '.join(sorted(columns)) or 'none'}"
        )
    absent = [None] * count
    lists = [
        columns.get(name, absent) for name in ("instruction_id_list", "kwargs", "ground_truth")
    ]
    rows = []
    for ids, arguments, truth in zip(*lists, strict=True):
        if not ids and truth is not None:
            ids, arguments = _parse_ground_truth(truth)
        if ids and (arguments is None or len(arguments) != len(ids)):
            raise DataError(
                f"ifeval: kwargs must contain one mapping for each of the {len(ids)} instructions "
                f"{list(ids)}"
            )
        rows.append(list(zip(ids, arguments, strict=True)) if ids else [])
    return rows


def _parse_ground_truth(truth: Any) -> tuple[Sequence[str], Sequence[Mapping[str, Any]] | None]:
    """Return the instructions and arguments in a value of `ground_truth`, or ([], None).

    The value is JSON or a Python literal, in which the mapping may again be such a text.
    """
    if "instruction_id" not in str(truth):
        return [], None  # the reference answer of another verifier
    value = truth
    try:
        while not isinstance(value, Mapping):
            if isinstance(value, str):
                value = json.loads(value) if _is_json(value) else ast.literal_eval(value)
            else:
                (value,) = value
        return value["instruction_id"], value["kwargs"]
    except (TypeError, ValueError, KeyError, SyntaxError, RecursionError) as error:
        raise DataError(
            f"ifeval: ground_truth must be [{{'instruction_id': [...], 'kwargs': [...]}}], not "
            f"{shorten(str(truth))}"
        ) from error


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
