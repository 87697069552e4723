"""Names of datasets: all in Open-Assistant's table, language pairs, and a user's own entries."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.data.named import find_entry, list_names
from weft.errors import ConfigError
from weft.registry import register_named_dataset

OPEN_ASSISTANT = """
squad_v2 ua_squad trivia_qa_nocontext trivia_qa_context adversarial_qa gsm8k_hard gsm8k wikihow essay_instruction math_qa
reddit_eli5 reddit_askh reddit_asks xsum cnn_dailymail samsum multi_news scitldr billsum debate_sum tldr_news hf_summary
hf_summary_pairs humaneval_mbpp_codegen_qa humaneval_mbpp_testgen_qa grade_school_math_instructions recipes
ubuntu_dialogue_qa cmu_wiki_qa youtube_subs_howto100m iapp_wiki_qa_squad zhihu-kol minimath oa_wiki_qa_bart_10000row
oa_leet10k poem_instructions oa_stackexchange tell_a_joke wizardlm_70k megacode megacode2 megacode3 evol_instruct_code
evol-codealpaca-v1 cot_submix_original multi-chapter-summaries webgpt alpaca code_alpaca alpaca_gpt4 dolly15k
dolly15k_multilingual gpteacher_roleplay vicuna wizard_evol_instruct_v2 gpt4all soda soda_dialogue joke prosocial_dialogue
explain_prosocial oa_translated private_tuning orca-chat dolphin-mix oig_file red_pajama fanfics wmt2019_zh-en
ted_trans_nl-en dive_mt oasst_export augment_oasst anthropic_rlhf shp hellaswag prompt_dialogue
"""
LATER = """
tulu-v2-sft-mixture tulu-v3-sft-mixture ultrafeedback_binarized hh-rlhf math ifeval orca_dpo_pairs helpsteer nectar shp_2
ultrafeedback_mean_aspects_cleaned ultrafeedback_overall_cleaned stack_exchange_paired
"""
RM = """
oasst_export augment_oasst anthropic_rlhf hf_summary hf_summary_pairs shp hellaswag webgpt
"""
RL = """
oasst_export webgpt private_tuning alpaca hf_summary hf_summary_pairs vicuna
"""


@pytest.mark.parametrize("name", [*OPEN_ASSISTANT.split(), *LATER.split()])
def test_every_name_is_known(name: str) -> None:
    entry = find_entry(name)
    assert entry.repo or entry.url or entry.note


def test_modes() -> None:
    assert set(RM.split()) <= set(list_names("rm")) and set(RL.split()) <= set(list_names("rl"))
    assert (
        "squad_v2" not in list_names("rm")
        and "red_pajama" not in list_names("rl")
        and "augment_oasst" not in list_names("sft")
    )
    with pytest.raises(ConfigError, match="unknown mode 'sfft'; did you mean sft"):
        list_names("sfft")


def test_pairs_of_languages() -> None:
    entry = find_entry("wmt2019_zh-en")
    assert (entry.name, entry.config, entry.options["source"], entry.options["target"]) == (
        "wmt2019_zh-en",
        "zh-en",
        "zh",
        "en",
    )
    for name in ("wmt2019_zh-xx", "ted_trans_nl", "wmt2019_en-en"):
        with pytest.raises(
            ConfigError, match="write two of ar, de, fr, en, it, nl, tr, ru, ms, ko, ja, zh"
        ):
            find_entry(name)


def test_unknown_names_hear_of_near_ones() -> None:
    with pytest.raises(ConfigError, match="unknown dataset 'webgtp'; did you mean webgpt"):
        find_entry("webgtp")


def test_entries_of_a_file_go_first(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "mine: {reader: question_answer, modes: [sft], prompt: q, answer: a}\ngsm8k: {reader: "
        "pairs, modes: rm}\n"
    )
    assert find_entry("mine", [str(file)]).options == {
        "prompt": "q",
        "answer": "a",
    } and "mine" in list_names("sft", [str(file)])
    assert (
        find_entry("gsm8k", [str(file)]).reader == "pairs"
        and find_entry("gsm8k").reader == "question_answer"
    )
    for text, wrong in (
        ("mine: {raeder: pairs, modes: [rm]}", r"mine: reader is missing; is 'raeder' meant\?"),
        ("mine: {reader: pairs, modes: [sfr]}", "must be of sft, rm, rl"),
        ("mine: {reader: pairs, modes: [rm], repo: 3}", "repo=3: must be text"),
        ("mine: {reader: pairs, modes: [rm], repo: a/b, url: 'https://x'}", "exclude each other"),
        ("mine: [", "is not YAML"),
        ("- mine", "must contain entries"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=wrong):
            find_entry("mine", [str(file)])
    with pytest.raises(ConfigError, match="there is no such file"):
        find_entry("mine", [str(tmp_path / "no.yaml")])


def test_entries_of_a_program() -> None:
    register_named_dataset(
        "riddles-of-mine",
        reader="question_answer",
        modes=["sft"],
        prompt="riddle",
        answer="solution",
    )
    assert find_entry("riddles-of-mine").options["prompt"] == "riddle"
