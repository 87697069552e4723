"""Every reader on small rows in its source's format, and the resulting examples in each mode."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from weft.data.named import find_entry, list_names
from weft.data.named.example import ReaderContext, to_row
from weft.data.named.prepare import list_reader_options
from weft.errors import ConfigError
from weft.registry import readers


def made(
    name: str, mode: str, rows: Iterable[dict[str, Any]], training: bool = True, **options: Any
) -> list[dict[str, Any]]:
    """Return the rows that a named dataset's reader makes of `rows` in a mode."""
    entry = find_entry(name)
    use = ReaderContext(entry.name, mode, training)
    examples = readers.get(entry.reader)(list(rows), use, **{**entry.options, **options})
    return [row[1] for each in examples if (row := to_row(each, mode)) is not None]


def said(row: dict[str, Any]) -> list[str]:
    """Return the texts of a conversation, after the text of its prompt."""
    return [message["content"] for message in row.get("messages", row.get("prompt"))]


def one(name: str, mode: str, *rows: dict[str, Any], **options: Any) -> dict[str, Any]:
    (row,) = made(name, mode, rows, **options)
    return row


def test_every_entry_names_a_reader_with_its_options() -> None:
    for name in list_names():
        entry = find_entry(name.format(source="zh", target="en"))
        known = list_reader_options(readers.get(entry.reader))
        assert set(entry.options) <= set(known), (name, set(entry.options) - set(known))


NO_ANSWER = str(find_entry("ua_squad").options["otherwise"])
SQUAD = {
    "context": "Ann sings.",
    "question": "Who?",
    "answers": {"text": ["Ann", "she"], "answer_start": [0, 1]},
}


@pytest.mark.parametrize(
    "name, row, expected",
    [
        ("squad_v2", SQUAD, ["Ann sings. Who?", "Ann"]),
        (
            "squad_v2",
            {**SQUAD, "answers": {"text": []}},
            ["Ann sings. Who?", "I do not have answer for that"],
        ),
        ("ua_squad", {"Context": "C", "Question": "Q", "Answer": ""}, ["C Q", NO_ANSWER]),
        (
            "trivia_qa_nocontext",
            {"question": "Q", "answer": {"aliases": ["A"], "value": "a"}},
            ["Q", "A"],
        ),
        (
            "trivia_qa_context",
            {
                "question": "Q",
                "answer": {"aliases": ["A"], "value": "a"},
                "search_results": {"search_context": ["S"]},
            },
            ["S Q", "A"],
        ),
        ("adversarial_qa", {**SQUAD, "title": "T"}, ["T. Ann sings. Who?", "Ann"]),
        (
            "gsm8k_hard",
            {"input": "I", "code": "c", "target": 3.5},
            [
                "I\nWrite a small snippet of python code to answer this",
                "Here's the code solution to the question\n```python\nc\n```\n The answer should "
                "be 3.5",
            ],
        ),
        ("gsm8k", {"question": "Q", "answer": "1+1\n#### 2"}, ["Q", "1+1\n#### 2"]),
        (
            "math",
            {"problem": "P", "solution": "\\boxed{1}", "level": "1", "type": "t"},
            ["P", "\\boxed{1}"],
        ),
        (
            "wikihow",
            {"title": "Fly", "result": "1. Jump"},
            ["Fly, explain step by step", "1. Jump"],
        ),
        ("essay_instruction", {"instructions": "I", "titles": "T", "essays": "E"}, ["I", "T\nE"]),
        ("math_qa", {"Problem": "P", "Rationale": "10 / 20 answer : a"}, ["P", "10 / 20 "]),
        (
            "reddit_eli5",
            {"title": "T", "answers": {"text": ["A", "B"], "score": [2, 1]}},
            ["T", "A"],
        ),
        ("recipes", {"INSTRUCTION": "I", "RESPONSE": "R", "SOURCE": "s"}, ["I", "R"]),
        ("minimath", {"question": "Q", "answer": "A"}, ["Q", "A"]),
        ("wizardlm_70k", {"instruction": "Q", "output": "A"}, ["Q", "A"]),
        ("megacode2", {"USER": "Q", "ASSISTANT": "A"}, ["Q", "A"]),
        ("cot_submix_original", {"inputs": "Q", "targets": "A", "task_name": "t"}, ["Q", "A"]),
        ("alpaca", {"instruction": "Sum", "input": "1 2", "output": "3"}, ["Sum\n1 2", "3"]),
        ("alpaca", {"instruction": "Sum", "input": "", "output": "3"}, ["Sum", "3"]),
        (
            "alpaca_gpt4",
            {"instruction": "Sum 1 2", "input": "1 2", "output": "3"},
            ["Sum 1 2", "3"],
        ),
        (
            "alpaca_gpt4",
            {"instruction": "Say", "input": "No Input needed", "output": "3"},
            ["Say", "3"],
        ),
        (
            "dolly15k",
            {
                "INSTRUCTION": "Who?",
                "RESPONSE": "Ann",
                "METADATA": {"CONTEXT": "Ann[1] sings[a].[citation needed]"},
            },
            ["Who?\n\nAnn sings.", "Ann"],
        ),
        (
            "gpteacher_roleplay",
            {"instruction": "Be a cat", "input": "", "response": "Meow"},
            ["Be a cat", "Meow"],
        ),
        ("joke", {"joke": "J", "explaination": "E"}, ["J", "E"]),
        ("multi-chapter-summaries", {"prompt": "P:", "context": "C", "summary": "S"}, ["P:C", "S"]),
        ("prosocial_dialogue", {"context": "C", "rots": ["R"]}, ["C", "R"]),
    ],
)
def test_questions(name: str, row: dict[str, Any], expected: list[str]) -> None:
    assert said(one(name, "sft", row)) == expected
    assert said(one(name, "rl", row)) == expected[:1]


def test_a_context_may_be_the_replys_own() -> None:
    row = {"INSTRUCTION": "Who?", "RESPONSE": "Ann", "METADATA": {"CONTEXT": "Ann sings."}}
    messages = one("dolly15k", "sft", row, context_as="tag")["messages"]
    assert messages[0]["content"] == "Who?" and messages[1] == {
        "role": "assistant",
        "content": "Ann",
        "lang": "en",
        "context": "Ann sings.",
    }
    with pytest.raises(ConfigError, match="context_as='x': must be prompt or tag"):
        made("dolly15k", "sft", [row], context_as="x")


def test_rows_with_unwanted_phrases_or_nothing_in_them_are_left_out() -> None:
    entry, use = find_entry("alpaca"), ReaderContext("alpaca", "sft")
    rows = [
        {"instruction": "a", "input": "", "output": "As an AI language model, I cannot"},
        {"instruction": "a", "input": "", "output": " "},
        {"instruction": "a", "input": "", "output": "b"},
    ]
    assert len(list(readers.get(entry.reader)(rows, use, **entry.options))) == 1
    assert use.left_out == {"unwanted phrases": 1, "an empty question or answer": 1}


def test_fill_min_length_joins_pairs() -> None:
    rows = [{"INSTRUCTION": f"question {i}", "RESPONSE": "x" * 30} for i in range(10)]
    found = made("oa_leet10k", "sft", rows, fill_min_length=100)
    assert [len(row["messages"]) for row in found] == [6, 6, 6, 2]
    assert sorted(text for row in found for text in said(row)[::2]) == [
        f"question {i}" for i in range(10)
    ]
    assert said(found[0])[0] != "question 0" or said(found[0])[2] != "question 1"


def test_columns_for_verifiers_go_along_with_prompts() -> None:
    assert one("gsm8k", "rl", {"question": "Q", "answer": "#### 2"})["answer"] == "#### 2"
    row = one(
        "ifeval",
        "rl",
        {"key": 1, "prompt": "P", "instruction_id_list": ["a:b"], "kwargs": [{"n": 3}]},
    )
    assert (
        row["instruction_id_list"] == ["a:b"] and row["kwargs"] == [{"n": 3}] and said(row) == ["P"]
    )


@pytest.mark.parametrize(
    "name, row, text, answer",
    [
        ("xsum", {"document": "a\n\nb", "summary": "S"}, "a\nb", "S"),
        ("cnn_dailymail", {"article": "a", "highlights": "S", "id": "1"}, "a", "S"),
        ("samsum", {"dialogue": "a", "summary": "S"}, "a", "S"),
        ("scitldr", {"source": ["a", "b"], "target": ["S", "T"]}, "a b", "S T"),
        ("billsum", {"text": "w " * 600, "summary": "S"}, " ".join(["w"] * 512), "S"),
        ("debate_sum", {"Full-Document": "a", "Extract": "S"}, "a", "S"),
        ("tldr_news", {"content": "a", "headline": "S", "category": 1}, "a", "S"),
    ],
)
def test_summaries(name: str, row: dict[str, Any], text: str, answer: str) -> None:
    asked, found = said(one(name, "sft", row))
    assert found == answer and asked.startswith(text)
    assert asked[len(text) :] in ("TL;DR:", "Summarize this", "Give me the summary")


def test_explain_prosocial_pairs_reasons_with_annotations() -> None:
    row = {
        "context": "I lie",
        "safety_annotations": ["wrong"],
        "safety_annotation_reasons": ["it hurts"],
    }
    asked, answer = said(one("explain_prosocial", "sft", row))
    assert (
        "I lie" in asked
        and "wrong" in asked
        and answer.endswith("because it hurts")
        and "wrong" in answer
    )


# -- conversations


def test_vicuna_joins_unescapes_and_drops() -> None:
    def talk(*turns: tuple[str, str | None]) -> dict[str, Any]:
        return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in turns]}

    good = talk(("human", "a\\_b"), ("human", "c [1]"), ("gpt", "2\\*3"), ("gpt", "six"))
    assert said(one("vicuna", "sft", good)) == ["a_b\nc", "2*3\nsix"]
    assert made("vicuna", "sft", [talk(("gpt", "x"), ("human", "y"))]) == []
    assert made("vicuna", "sft", [talk(("human", "x"), ("gpt", ""))]) == []
    assert made("vicuna", "sft", [talk(("human", "x"))]) == []
    assert said(one("wizard_evol_instruct_v2", "sft", good, max_chars=3)) == ["a_b", "2*3"]
    filled = one("vicuna", "sft", talk(("human", ""), ("gpt", "well")))
    assert said(filled)[0] in ("...", "Please continue", "Go on")


def test_gpt4all_in_both_shapes() -> None:
    rounds = [
        {"User": "a", "Bot": None},
        {"User": "b", "Bot": None},
        {"User": None, "Bot": "c"},
        {"User": "d", "Bot": None},
    ]
    assert said(one("gpt4all", "sft", {"prompt": "p", "response": "r"})) == ["p", "r"]
    assert said(one("gpt4all", "sft", {"conversation": rounds})) == ["a\nb", "c"]
    assert made("gpt4all", "sft", [{"conversation": [{"User": None, "Bot": "c"}, *rounds]}]) == []


def test_soda_plays_the_second_speaker() -> None:
    row = {
        "narrative": "Two meet.",
        "speakers": ["Ann", "Bob"] * 2,
        "dialogue": ["Hi", "Ho", "So", "No"],
    }
    assert said(one("soda", "sft", row)) == ["Two meet. You are Bob. Hi", "Ho", "So", "No"]
    assert made("soda", "sft", [{**row, "speakers": ["Ann", "Ann", "Bob", "Bob"]}]) == []
    assert said(
        one(
            "soda_dialogue",
            "sft",
            {"conversation": "User: Hi\nAssistant: Ho\nUser: So\nAssistant: No"},
        )
    ) == [
        "Hi",
        "Ho",
        "So",
        "No",
    ]


def test_marked_dialogues_are_merged_and_counted() -> None:
    rows = [{"text": f"<human>: q{i}\n<bot>: {'a' * 10}"} for i in range(7)]
    assert said(one("oig_file", "sft", rows[0])) == ["q0", "a" * 10]
    found = made("oig_file", "sft", rows, min_length=24)
    assert [len(row["messages"]) for row in found] == [4, 4, 4, 2]
    assert len(made("oig_file", "sft", rows, min_length=24, max_count=2)) == 2
    assert made("oig_file", "sft", [{"text": "<bot>: a\n<human>: q"}, {"text": "no marks"}]) == []
    assert said(one("prompt_dialogue", "sft", {"text": "User: Hi?\n\nRosey: Ho.\n"})) == [
        "Hi?",
        "Ho.",
    ]


def test_rounds_and_system_messages() -> None:
    row = {
        "instruction": "Be kind",
        "conversation": [{"input": "a", "output": "b"}, {"input": "c", "output": "d"}],
    }
    messages = one("orca-chat", "sft", row)["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert said({"messages": messages}) == ["Be kind", "a", "b", "c", "d"]
    translated = {"text": "User: x", "translate": [{"round": 1, "human": "a", "answer": "b"}]}
    assert said(one("oa_translated", "sft", translated)) == ["a", "b"]
    assert made("oa_translated", "sft", [{**translated, "text": "Python code"}]) == []


def test_dolphin_groups_by_system_message() -> None:
    rows = [{"instruction": f"s{i % 2}", "input": f"q{i}", "output": "a" * 8} for i in range(8)]
    found = made("dolphin-mix", "sft", rows, max_char_len=20)
    assert [len(row["messages"]) for row in found] == [5] * 4
    for row in found:
        system, *turns = said(row)
        assert {int(turn[1:]) % 2 for turn in turns[::2]} == {int(system[1:])}
    assert (
        sum(len(row["messages"]) // 2 for row in made("dolphin-mix", "sft", rows, num_samples=3))
        == 3
    )


def test_tulu_messages_end_with_the_assistant() -> None:
    turns = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c")]
    row = {
        "id": "1",
        "messages": [{"role": role, "content": text} for role, text in turns],
        "dataset": "d",
    }
    assert said(one("tulu-v3-sft-mixture", "sft", row)) == ["s", "a", "b"]
    assert said(one("tulu-v3-sft-mixture", "rl", row)) == ["s", "a"]
    shared = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    assert said(one("private_tuning", "sft", {"conversations": shared})) == ["a", "b"]


# -- comparisons


def test_webgpt_groups_sorts_and_takes_references_out() -> None:
    def row(question: str, one: str, two: str, score: float) -> dict[str, Any]:
        return {
            "question": {"full_text": question},
            "answer_0": one,
            "answer_1": two,
            "score_0": score,
            "score_1": -score,
        }

    rows = [
        row("Q", "a [1]", "b [2, 3]", 0.5),
        row("Q", "c", "d", 1.0),
        row("Q", "same [1]", "same [2]", 1.0),
        row("R", "x", "y", -1),
    ]
    found = made("webgpt", "rm", rows)
    assert [(said(each), each["replies"]) for each in found] == [
        (["Q"], ["c", "a ", "b ", "d"]),
        (["R"], ["y", "x"]),
    ]
    assert said(made("webgpt", "sft", rows)[0]) == ["Q", "c"] and said(
        made("webgpt", "rl", rows)[1]
    ) == ["R"]
    assert len(made("webgpt", "rm", rows, max_answers=3)[0]["replies"]) == 3


def test_shp_and_helpsteer() -> None:
    rows = [
        {
            "post_id": "p",
            "history": "Q",
            "human_ref_A": "a",
            "human_ref_B": "b",
            "score_A": 1,
            "score_B": 5,
        },
        {
            "post_id": "p",
            "history": "Q",
            "human_ref_A": "c",
            "human_ref_B": "b",
            "score_A": 9,
            "score_B": 5,
        },
    ]
    assert (
        one("shp", "rm", *rows)["replies"]
        == one("shp_2", "rm", *rows)["replies"]
        == ["c", "b", "a"]
    )
    marks = {"helpfulness": 4, "correctness": 4, "coherence": 4, "complexity": 1, "verbosity": 1}
    steer = [
        {"prompt": "Q", "response": name, **{k: v - i for k, v in marks.items()}}
        for i, name in enumerate("abc")
    ]
    assert one("helpsteer", "rm", *steer)["replies"] == ["a", "b", "c"]
    # all are alike, so there is nothing to learn
    assert made("helpsteer", "rm", [{**each, **marks} for each in steer]) == []


def test_summaries_compared() -> None:
    def row(one: str, two: str, choice: int, confidence: float | None = None) -> dict[str, Any]:
        info = {"id": "1", "post": "The post.", "article": None}
        return {
            "info": info,
            "summaries": [{"text": one}, {"text": two}],
            "choice": choice,
            "extra": {"confidence": confidence},
        }

    rows = [row(" a", "b", 0), row("a", "c", 0), row("b", "c", 1, 2.0)]
    assert one("hf_summary", "rm", *rows)["replies"] == ["a", "c", "b"]
    assert [each["replies"] for each in made("hf_summary_pairs", "rm", rows)] == [
        ["a", "b"],
        ["a", "c"],
        ["c", "b"],
    ]
    assert "The post." in said(one("hf_summary", "rl", *rows))[0]
    assert len(made("hf_summary_pairs", "rm", rows, least_confidence=3)) == 2


def test_hh_pairs_differ_in_the_last_turn() -> None:
    row = {
        "chosen": "\n\nHuman: Hi\n\nAssistant: Ho\n\nHuman: So?\n\nAssistant: Good",
        "rejected": "\n\nHuman: Hi\n\nAssistant: Ho\n\nHuman: So?\n\nAssistant: Bad",
    }
    found = one("hh-rlhf", "rm", row)
    assert said(found) == ["Hi", "Ho", "So?"] and found["replies"] == ["Good", "Bad"]
    assert made("hh-rlhf", "rm", [{**row, "rejected": "\n\nHuman: Hi\n\nAssistant: Bad"}]) == []


def test_pairs_of_texts_and_of_messages() -> None:
    orca = one(
        "orca_dpo_pairs", "rm", {"system": "S", "question": "Q", "chosen": "a", "rejected": "b"}
    )
    assert said(orca) == ["S", "Q"] and orca["replies"] == ["a", "b"]
    entry = find_entry("orca_dpo_pairs")
    rows = [{"system": "S", "question": f"Q{i}", "chosen": "a", "rejected": "b"} for i in range(3)]
    groups = {
        each.group
        for each in readers.get(entry.reader)(rows, ReaderContext("x", "rm"), **entry.options)
    }
    assert groups == {"Q0", "Q1", "Q2"}  # a system message that all rows share does not group them
    stack = one(
        "stack_exchange_paired",
        "rm",
        {"qid": 1, "question": "Q", "response_j": "a", "response_k": "b"},
    )
    assert said(stack) == ["Q"] and stack["replies"] == ["a", "b"]
    talks = {
        kind: [{"role": "user", "content": "Q"}, {"role": "assistant", "content": kind}]
        for kind in ("chosen", "rejected")
    }
    for name in (
        "ultrafeedback_binarized",
        "ultrafeedback_mean_aspects_cleaned",
        "ultrafeedback_overall_cleaned",
    ):
        found = one(name, "rm", {"prompt": "Q", **talks})
        assert said(found) == ["Q"] and found["replies"] == ["chosen", "rejected"]


def test_nectar_is_ranked_by_its_ranks() -> None:
    answers = [
        {"answer": "b", "rank": 2.0, "model": "m"},
        {"answer": "a", "rank": 1.0, "model": "n"},
    ]
    row = one("nectar", "rm", {"prompt": "\n\nHuman: Q\n\nAssistant: ", "answers": answers})
    assert said(row) == ["Q"] and row["replies"] == ["a", "b"]


def test_hellaswag_is_plain_text() -> None:
    row = one("hellaswag", "rm", {"ctx": "A man", "endings": ["0", "1", "2", "3"], "label": 2})
    assert row["prompt"] == "A man" and row["replies"][0] == "2" and row["replies"][1] in "013"
    assert made("hellaswag", "rm", [{"ctx": "A man", "endings": ["0", "1"], "label": ""}]) == []


def test_a_bad_reply_comes_last_in_training_alone() -> None:
    rows = [
        {"prefixes": ["Q"], "responses": ["a", "b"], "augmented": ["bad"], "split": "train"},
        {"prefixes": ["R"], "responses": ["c", "d"], "augmented": ["bad"], "split": "val"},
    ]
    assert [each["replies"] for each in made("augment_oasst", "rm", rows)] == [["a", "b", "bad"]]
    assert [each["replies"] for each in made("augment_oasst", "rm", rows, training=False)] == [
        ["c", "d"]
    ]


# -- plain text, translations, trees


def test_long_texts_are_cut_into_pieces() -> None:
    assert [
        row["text"]
        for row in made("red_pajama", "sft", [{"text": "abcdefgh", "meta": "{}"}], max_chunk_size=3)
    ] == [
        "abc",
        "def",
        "gh",
    ]
    assert made("fanfics", "sft", [{"TEXT": "once"}]) == [{"text": "once"}]


def test_translations_go_both_ways_and_neighbours_may_come_before() -> None:
    rows = [{"translation": {"zh": f"zh{i}", "en": f"en{i}"}} for i in range(200)]
    found = made("wmt2019_zh-en", "sft", rows)
    assert len(found) == 200 and len(made("wmt2019_zh-en", "sft", rows, maximum_size=7)) == 7
    ways = {said(row)[-1][:2] for row in found}
    assert ways == {"zh", "en"}
    lengths = [len(row["messages"]) for row in found]
    assert set(lengths) == {2, 4} and 20 < lengths.count(4) < 60  # a fifth of them
    for number, row in enumerate(found):
        question, answer = said(row)[-2:]
        other = "en" if answer.startswith("zh") else "zh"
        assert answer[2:] == str(number) and f"{other}{number}" in question
    subject = {"subject_id": "tur_t1", "src_text": "S", "tgt_text": "T"}
    assert len(made("dive_mt", "sft", [subject, {**subject, "subject_id": "vie_t1"}])) == 1


def test_trees_in_each_mode() -> None:
    def node(name: str, *replies: dict[str, Any], **more: Any) -> dict[str, Any]:
        role = "prompter" if name[0] == "p" else "assistant"
        return {
            "message_id": name,
            "text": name,
            "role": role,
            "lang": "de",
            "review_result": True,
            "replies": replies,
            **more,
        }

    tree = {
        "message_tree_id": "p0",
        "tree_state": "ready_for_export",
        "prompt": node(
            "p0",
            node("a1", rank=1),
            node("a2", rank=0, labels={"quality": {"value": 0.5, "count": 1}}),
        ),
    }
    assert made("oasst_export", "sft", [tree]) == []  # English by default
    assert [said(row) for row in made("oasst_export", "sft", [tree], lang="en,de")] == [
        ["p0", "a1"],
        ["p0", "a2"],
    ]
    assert one("oasst_export", "sft", tree, lang="de", top_k=1)["messages"][1]["quality"] == 0.5
    assert one("oasst_export", "rm", tree, lang="de")["replies"] == ["a2", "a1"]
    assert said(
        one("oasst_export", "rl", {**tree, "tree_state": "prompt_lottery_waiting"}, lang="de")
    ) == ["p0"]
    with pytest.raises(ConfigError, match="top_k=0: must be at least 1"):
        made("oasst_export", "sft", [tree], top_k=0)
