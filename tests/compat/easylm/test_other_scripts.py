"""Scripts of EasyLM's that other commands replace: their flags are named, and the page has them."""

from __future__ import annotations

import re

import pytest

from tests.docs.test_coming_from import CELL, says
from tests.docs.test_pages import ROOT
from weft.cli.main import main
from weft.compat.easylm.other_scripts import OTHER_SCRIPTS, SERVE

# Flags of EasyLM's last version, by script.
CLIENT = "lm_client.url lm_client.batch_size lm_client.wait_for_ready lm_client.dummy"
KNOWN = {
    "llama_serve": """mesh_dim dtype input_length seq_length top_k top_p do_sample num_beams
    add_bos_token load_llama_config load_checkpoint lm_server.host lm_server.port
    lm_server.batch_size lm_server.logging lm_server.pre_compile lm_server.default_temperature
    lm_server.greedy_until_max_length lm_server.prepend_to_prefix lm_server.append_to_prefix
    lm_server.prepend_to_text lm_server.append_to_text lm_server.chat_prepend_text
    lm_server.chat_user_prefix lm_server.chat_user_suffix lm_server.chat_lm_prefix
    lm_server.chat_lm_suffix lm_server.notes""",
    "lm_eval_harness": f"tasks shots limit write_out {CLIENT}",
    "lm_eval_json": f"""input_file output_file prefix_field text_field until_field eval_type
    {CLIENT}""",
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_page_has_a_row_for_every_flag(name: str) -> None:
    flags = OTHER_SCRIPTS[name].flags
    assert set(KNOWN[name].split()) <= set(flags)
    page = (ROOT / "docs" / "coming-from" / "easylm.md").read_text()
    table = page.partition(f"| `{name}` | default | instead |\n|---|---|---|\n")[2]
    rows = {}
    for line in table.partition("\n\n")[0].splitlines():
        flag, default, instead = (cell.strip() for cell in CELL.split(line.strip("|")))
        rows[flag.strip("`")] = default, instead
    assert list(rows) == list(flags)
    for flag, (default, instead) in flags.items():
        assert rows[flag][1] == instead and says(rows[flag][0], default), flag


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["llama_serve", "--lm_server.port=1"],
            "weft serve MODEL.*; --lm_server.port: --port, 8000",
        ),
        (["llama_serve", "--lm_server.prot=1"], "unknown flag '--lm_server.prot'; did you mean"),
        (["lm_eval_harness", "--shots=5"], "weft eval suite .*; --shots: --num_fewshot"),
        (["lm_eval_json"], "weft sample report"),
        (["olmo_train_dpo", "--seed=1"], "only streams of Llama"),
    ],
)
def test_a_script_is_refused_with_what_replaces_it(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["easylm", *words]) == 2
    printed = capsys.readouterr()
    assert re.search(message, printed.err) and printed.err.count("\n") == 1 and not printed.out


def test_the_options_named_for_llama_serve_are_those_of_weft_serve() -> None:
    from weft.cli.serve import build_parser

    known = set(build_parser()._option_string_actions)
    for _, instead in SERVE.values():
        if "convert_easylm_to_hf" not in instead:
            assert set(re.findall(r"`(--[\w-]+)`", instead)) <= known
