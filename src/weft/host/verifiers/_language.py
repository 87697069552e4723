"""Detection of the language of a text.

The script of the text is found first, then letters or frequent words that distinguish the languages
of the script. The method needs no model and no download. It is intended for answers of a few
sentences, not for single words.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

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
LETTERS = re.compile(r"[^\W\d_]+(?:[\u0900-\u0963\u0966-\u097F]+)?")


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
    tokens = text.split() if script == "DEVANAGARI" else LETTERS.findall(text)
    words = Counter(token.strip("।,.!?;:()\"'") for token in tokens)
    scores = {}
    for language, known in WORDS.items():
        if SCRIPT_BY_LANGUAGE.get(language, "LATIN") == script:
            own = sum(text.count(sign) for sign in LETTERS.get(language, ""))
            scores[language] = sum(words[word] for word in known.split()) + 0.5 * own
    default = SCRIPTS[script]
    best = max(scores, key=lambda language: (scores[language], language == default))
    return best if scores[best] > scores[default] else default
