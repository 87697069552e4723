"""Verifiers on real data, and on answers that look alike or different."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import ConfigError
from weft.host.verifiers._answers import find_numbers
from weft.host.verifiers.code import code, extract_program
from weft.host.verifiers.exact import exact
from weft.host.verifiers.format import format_match
from weft.host.verifiers.gsm8k import find_final_number, gsm8k
from weft.host.verifiers.ifeval import detect
from weft.host.verifiers.length import length


def rows(path: Path) -> list[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    return [json.loads(line) for line in text.splitlines()]


def one(
    verifier: Any, completion: str, *, ids: list[int] | None = None, **columns: Any
) -> float | None:
    """Return the reward of one completion."""
    made = verifier(["p"], [completion], completion_ids=[ids or []], **columns)
    assert len(made) == 1
    return made[0]


# -- gsm8k


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_gsm8k_reference_verifies(data_dir: Path, split: str) -> None:
    answers = [row["answer"] for row in rows(data_dir / "gsm8k" / f"{split}.jsonl")]
    finals = [answer.split("####")[1].strip() for answer in answers]
    blanks = [""] * len(answers)
    assert set(gsm8k(blanks, answers, completion_ids=[], answer=finals)) == {1.0}
    assert set(gsm8k(blanks, finals, completion_ids=[], ground_truth=answers)) == {1.0}
    others = [str(find_final_number(a) + 1) for a in answers]  # type: ignore[operator]
    assert set(gsm8k(blanks, others, completion_ids=[], answer=answers)) == {0.0}


@pytest.mark.slow
def test_model_solutions_agree_with_their_flags(data_dir: Path) -> None:
    disagree = [
        (solution["solution"][-40:], row["ground_truth"][-20:])
        for row in rows(data_dir / "gsm8k" / "example_model_solutions.jsonl")
        for solution in (row[kind] for kind in row if kind.endswith(("finetuning", "verification")))
        if one(gsm8k, solution["solution"], ground_truth=[row["ground_truth"]])
        != float(solution["is_correct"])
    ]
    assert disagree == []


def test_svamp_answers_verify(data_dir: Path) -> None:
    for row in rows(data_dir / "svamp" / "svamp_test.jsonl"):
        said = f"First {row['Equation']}, so the answer is {row['Answer']:,} in all."
        assert one(gsm8k, said, column="Answer", Answer=[row["Answer"]]) == 1.0


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("She has 1,234.50 dollars.", ["2469/2"]),
        ("5-3=2", ["5", "3", "2"]),
        ("-7 and $-5 and -$5, 3/4 or .5", ["-7", "-5", "-5", "3/4", "1/2"]),
        ("3, 4", ["3", "4"]),
        ("1,2345", ["1", "2345"]),
        ("1/0", ["None"]),
        ("none", []),
        ("5e-05", ["1/20000"]),
        ("1e6 or 1E+6", ["1000000", "1000000"]),
        ("10^3, 10^{-3}, 10**2, 10⁻²", ["1000", "1/1000", "100", "1/100"]),
        (r"2.5 x 10^3 and 2.5 \times 10^{-3}", ["2500", "1/400"]),
        ("1 000 and 1\u202f000\u202f000 and 1'000", ["1000", "1000000", "1000"]),
        (r"1{,}000 and 1\,000", ["1000", "1000"]),
        ("1 1/2, 3½, \\frac{1}{2}, 3\\frac12", ["3/2", "7/2", "1/2", "7/2"]),
        ("12 cm^2", ["12"]),
        ("5 million", ["5000000"]),
        (r"√16, \sqrt{16}, 10^{99999}, 1e99999", ["None"] * 4),
    ],
)
def test_numbers(text: str, found: list[str]) -> None:
    assert [str(number) for number in find_numbers(text)] == found


@given(st.integers(-(10**9), 10**9))
def test_numbers_survive_their_spellings(n: int) -> None:
    for text in (
        str(n),
        f"{n:,}",
        f"{n:,}".replace(",", " "),
        f"{n}.00",
        f"it is {n} apples.",
        f"{n}e0",
    ):
        assert find_numbers(text)[-1] == n


def test_gsm8k_by_hand() -> None:
    assert one(gsm8k, "It is \u22125.", answer=["#### -5"]) == 1.0
    assert one(gsm8k, "It is \u22125.", answer=["#### 5"]) == 0.0
    assert one(gsm8k, "12 + 3 = 15 #### 15 apples", answer=["15"]) == 1.0
    assert one(gsm8k, "#### 15 (and not 16)", answer=["15"]) == 1.0
    assert one(gsm8k, "it is 15", answer=["15"], strict=True) == 0.0
    assert one(gsm8k, "no idea", answer=["15"]) == 0.0
    assert one(gsm8k, "15", answer=[None]) is None
    assert one(gsm8k, "15") is None
    assert one(gsm8k, "15", answer=[15]) == 1.0


@pytest.mark.parametrize("verifier", [gsm8k, exact])
@pytest.mark.parametrize(
    ("reference", "same", "apart"),
    [
        (0.00005, "0.00005", "5"),
        (1e-7, "0.0000001", "1"),
        (1e22, "10000000000000000000000", "22"),
        (2.0, "2", "0"),
        ("1e6", "1000000", "6"),
        ("10^3", "1000", "3"),
        ("10^{3}", "1,000", "10"),
        (1000, "1 000", "0"),
        (10**6, "1 000 000", "000"),
        ("2e-3", "0.002", "-3"),
    ],
)
def test_exponents_and_blanks_between_digits(
    verifier: Any, reference: Any, same: str, apart: str
) -> None:
    assert one(verifier, same, answer=[reference]) == 1.0
    assert one(verifier, apart, answer=[reference]) == 0.0


def test_a_number_that_cannot_be_read_is_no_other_number() -> None:
    assert one(gsm8k, "First 16, and then √16", answer=["16"]) == 0.0
    assert one(gsm8k, r"It is \frac{1}{2}", answer=["2"]) == 0.0
    assert one(gsm8k, "5 million", answer=["5"]) == 0.0


# -- format, length, exact


def test_format() -> None:
    good = "<think>a\nb</think>\n<answer>1</answer>"
    assert one(format_match, good) == 1.0
    assert one(format_match, f"x {good}") == 0.0
    assert one(format_match, "abc 12", pattern=r"\d+", match="search") == 1.0
    assert one(format_match, "abc 12", pattern=r"\d+") == 0.0
    with pytest.raises(ConfigError, match="pattern"):
        one(format_match, "", pattern="(")
    with pytest.raises(ConfigError, match="match"):
        one(format_match, "", match="part")


def test_length() -> None:
    assert one(length, "", ids=[1] * 10, max=10) == 1.0
    assert one(length, "", ids=[1] * 11, max=10) == 0.0
    assert one(length, "", ids=[1] * 12, max=10, slack=8) == 0.75
    assert one(length, "", ids=[1] * 4, min=8, slack=8) == 0.5
    assert one(length, "", ids=[1] * 40, max=10, slack=8) == 0.0
    assert one(length, "two words", unit="words", max=2) == 1.0
    assert one(length, "two words", unit="chars", max=8) == 0.0
    for wrong in ({"unit": "lines"}, {"min": 5, "max": 3}, {"slack": -1}):
        with pytest.raises(ConfigError, match="length"):
            one(length, "", **wrong)


def test_exact() -> None:
    assert one(exact, " New\nYork ", answer=["new york"]) == 1.0
    assert one(exact, "New York", answer=["new york"], case=True) == 0.0
    assert one(exact, "x") is None
    assert one(exact, "1.0", answer=["1"]) == 0.0, "references that are texts are compared as texts"
    assert one(exact, "007", answer=["7"]) == 0.0


# -- languages


def test_languages_of_real_replies(data_dir: Path) -> None:
    """Replies of Open-Assistant's volunteers, each marked with its language.

    The exceptions are code, lists of names and drawings.
    """
    seen = right = 0
    for row in rows(data_dir / "oasst" / "oasst1_validation_guanaco.jsonl"):
        if len(row["output"]) >= 100 and "```" not in row["output"]:
            seen += 1
            right += detect(row["output"]) == row["lang"].split("-")[0]
    assert seen > 800
    assert right / seen > 0.98


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("hi", "यह एक छोटा सा वाक्य है और मैं इसे हिंदी में लिख रहा हूँ।"),
        ("mr", "हे एक छोटे वाक्य आहे आणि मी ते मराठी मध्ये लिहित आहे."),
        ("ne", "यो एउटा सानो वाक्य हो र म यो नेपाली भाषामा लेख्दै छु, तर यो राम्रो छ।"),
        ("bn", "এটি একটি ছোট বাক্য।"),
        ("pa", "ਇਹ ਇੱਕ ਛੋਟਾ ਵਾਕ ਹੈ।"),
        ("gu", "આ એક નાનું વાક્ય છે."),
        ("ta", "இது ஒரு சிறிய வாக்கியம்."),
        ("te", "ఇది ఒక చిన్న వాక్యం."),
        ("kn", "ಇದು ಒಂದು ಸಣ್ಣ ವಾಕ್ಯ."),
        ("th", "นี่คือประโยคสั้น ๆ"),
        ("ko", "이것은 짧은 문장입니다."),
        ("ar", "هذه جملة قصيرة باللغة العربية."),
        ("fa", "این یک جملهٔ کوتاه به زبان فارسی است که می‌نویسم."),
        ("ur", "یہ اردو زبان میں ایک چھوٹا سا جملہ ہے۔"),
        ("ru", "Это короткое предложение, и мы его читаем."),
        (
            "bg",
            "Това е кратко изречение, което съм написал на български език и въпросът е дали е "
            "вярно.",
        ),
        ("vi", "Đây là một câu ngắn được viết bằng tiếng Việt."),
        ("sw", "Hii ni sentensi fupi kwa lugha ya Kiswahili."),
        ("fi", "Tämä on lyhyt lause, joka on kirjoitettu suomeksi."),
        ("de", "Das ist ein kurzer Satz, der auf Deutsch ist."),
        ("it", "Questa è una frase breve che non è in inglese."),
        ("pt", "Esta é uma frase curta que não está em inglês."),
        ("en", "hello world"),
        ("en", "THIS IS A SHORT SENTENCE."),
        ("", "123 ..."),
    ],
)
def test_languages_that_ifeval_asks_for(language: str, text: str) -> None:
    assert detect(text) == language


# -- code


def test_canonical_solutions_pass(data_dir: Path) -> None:
    problems = rows(data_dir / "human_eval" / "HumanEval.jsonl.gz")[:6]
    columns = {
        "test": [p["test"] for p in problems],
        "entry_point": [p["entry_point"] for p in problems],
    }
    prompts, bodies = [p["prompt"] for p in problems], [p["canonical_solution"] for p in problems]
    fenced = [
        f"Here it is:\n```python\n{p}{b}```\nDone." for p, b in zip(prompts, bodies, strict=True)
    ]
    assert code(prompts, bodies, completion_ids=[], **columns) == [1.0] * 6
    assert code(["Solve it."] * 6, fenced, completion_ids=[], **columns) == [1.0] * 6
    assert code(prompts, ["    return None\n"] * 6, completion_ids=[], **columns) == [0.0] * 6


@pytest.mark.slow
def test_all_canonical_solutions_pass(data_dir: Path) -> None:
    problems = rows(data_dir / "human_eval" / "HumanEval.jsonl.gz")
    columns = {
        "test": [p["test"] for p in problems],
        "entry_point": [p["entry_point"] for p in problems],
    }
    prompts, bodies = [p["prompt"] for p in problems], [p["canonical_solution"] for p in problems]
    assert code(prompts, bodies, completion_ids=[], **columns) == [1.0] * len(problems)


def test_lists_of_tests() -> None:
    statements = ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]
    assert one(code, "def add(a, b):\n    return a + b", test_list=[statements]) == 1.0
    assert one(code, "def add(a, b):\n    return a - b", tests=[statements]) == 0.0
    assert one(code, "x = 1") is None


def test_which_code_a_completion_means() -> None:
    assert extract_program("p", "```python\nx = 1\n```\ntext\n```py\ny = 2\n```", None) == "y = 2\n"
    assert extract_program("def f():\n", "    return 1", "f") == "def f():\n    return 1"
    assert extract_program("p", "def f(): return 1", "f") == "def f(): return 1"
    blocks = "```python\ndef f(): return 1\n```\nUse it:\n```python\nf()\n```"
    assert extract_program("p", blocks, "f") == "def f(): return 1\n"
    assert extract_program("p", blocks, None) == "f()\n"
    shell = "```bash\npip install x\n```\nThen:\n```python3\ny = 2\n```\n```sh\nrun\n```"
    assert extract_program("p", shell, None) == "y = 2\n"


def test_the_markers_of_mbpp_enclose_a_program() -> None:
    for text in (
        "x = 1\n[DONE]\nNext: y = 2",
        "Here:\n[BEGIN]\nx = 1\n[DONE]",
        "[BEGIN]\n```python\nx = 1\n```\n[DONE]\n```\ny = 2\n```",
    ):
        assert extract_program("", text, None).strip() == "x = 1"
    assert extract_program("", "x = ['[DONE]']", None) == "x = ['[DONE]']"
