"""EasyLM's scripts without a `weft easylm` command, with the replacement of each of their flags.

`weft easylm llama_serve ...` is refused with these texts. docs/coming-from/easylm.md has them too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.errors import ConfigError, find_nearest

CONVERTED = "of `convert_easylm_to_hf`"
REQUEST = "field `{}` of a request"
PROMPT = "write it into the texts of a request"
TEMPLATE = "the chat template of the model"
# flags of the client with which EasyLM's evaluation scripts call `llama_serve`
CLIENT: Mapping[str, tuple[Any, str]] = {
    "lm_client.url": ("http://localhost:5007", "the model is named in place of a server"),
    "lm_client.batch_size": (1, "`--batch`, in tokens"),
    "lm_client.wait_for_ready": (True, "there is no server to wait for"),
    "lm_client.dummy": (False, "refused: there is no stand-in for a model"),
}


@dataclass(frozen=True)
class OtherScript:
    """Script of EasyLM that another command of weft replaces.

    Attributes:
        replacement: The command to write instead, as a phrase for messages.
        flags: (EasyLM's default, replacement) of each flag.
    """

    replacement: str
    flags: Mapping[str, tuple[Any, str]] = field(default_factory=dict)


SERVE: Mapping[str, tuple[Any, str]] = {
    "seed": (42, REQUEST.format("seed")),
    "mesh_dim": ("1,-1,1", "refused: a server has one device, `--device`"),
    "dtype": ("bf16", "`--dtype`: float32, bfloat16 or float16"),
    "input_length": (1024, "`--max-prompt-tokens`, 16,384"),
    "seq_length": (2048, "`--max-new-tokens`, 1,024, which does not count the prompt"),
    "top_k": (50, f"{REQUEST.format('top_k')}; without it there is no limit"),
    "top_p": (1.0, REQUEST.format("top_p")),
    "do_sample": (True, f"{REQUEST.format('temperature')}: 0 takes the likeliest token"),
    "num_beams": (1, "refused: there is no beam search"),
    "add_bos_token": (True, "`add_bos_token` in the model's tokenizer_config.json"),
    "load_llama_config": ("", f"`--model_size` {CONVERTED}"),
    "update_llama_config": ("", f"the same {CONVERTED}"),
    "load_checkpoint": ("", f"the same {CONVERTED}"),
    "tokenizer.vocab_file": ("", f"`--tokenizer_path` {CONVERTED}"),
    "lm_server.host": ("0.0.0.0", "`--host`, 127.0.0.1"),
    "lm_server.port": (5007, "`--port`, 8000"),
    "lm_server.batch_size": (1, "no flag: a request joins the running batch at the next token"),
    "lm_server.logging": (False, "refused: requests are not logged"),
    "lm_server.pre_compile": ("loglikelihood", "no flag: nothing is compiled"),
    "lm_server.default_temperature": (1.0, REQUEST.format("temperature")),
    "lm_server.greedy_until_max_length": (5000, REQUEST.format("max_tokens")),
    **{
        f"lm_server.{name}": ("", PROMPT)
        for name in ("prepend_to_prefix", "append_to_prefix", "prepend_to_text", "append_to_text")
    },
    **{
        f"lm_server.{name}": ("", TEMPLATE)
        for name in (
            "chat_prepend_text",
            "chat_user_prefix",
            "chat_user_suffix",
            "chat_lm_prefix",
            "chat_lm_suffix",
        )
    },
    "lm_server.notes": ("", "refused: there is no page for notes"),
}

OTHER_SCRIPTS: Mapping[str, OtherScript] = {
    "llama_serve": OtherScript(
        "convert the checkpoint with `weft easylm convert_easylm_to_hf`, then write `weft serve "
        "MODEL`, or `weft chat MODEL` for a chat in a terminal",
        SERVE,
    ),
    "lm_eval_harness": OtherScript(
        "write `weft eval suite MODEL --tasks A,B`",
        {
            "tasks": ("wsc,piqa,winogrande,openbookqa,logiqa", "`--tasks`"),
            "shots": (0, "`--num_fewshot`"),
            "limit": (0, "`--limit`; without it all items"),
            "write_out": (False, "`--log_samples`"),
            **CLIENT,
        },
    ),
    "lm_eval_json": OtherScript(
        "write `weft sample report MODEL --prompts FILE` for answers; `weft serve MODEL` has "
        "log-likelihoods",
        {
            "input_file": ("", "`--prompts` of `weft sample report`"),
            "output_file": ("", "`--out` of `weft sample report`"),
            "prefix_field": ("prefix", "rows as in docs/datasets.md"),
            "text_field": ("text", "field `prompt` of a request, with `echo` and `logprobs`"),
            "until_field": ("until", REQUEST.format("stop")),
            "eval_type": (
                "loglikelihood",
                "`echo`, `logprobs` and `max_tokens: 0` of a request; generate: `weft sample report`",
            ),
            **CLIENT,
        },
    ),
}
FAMILY = OtherScript(
    "write `weft quickstart` with a Hugging Face model; only streams of Llama are read"
)
OTHER_FAMILIES = ("olmo_", "gptj_", "roberta_")


def find_other_script(name: str) -> OtherScript | None:
    """Return a script of EasyLM's that another command replaces, or None for other names."""
    return FAMILY if name.startswith(OTHER_FAMILIES) else OTHER_SCRIPTS.get(name)


def build_replaced_error(name: str, script: OtherScript, words: Sequence[str]) -> ConfigError:
    """Return the error that names the replacements of a script and of its flags in `words`."""
    replaced = []
    for word in words:
        flag = word.partition("=")[0].removeprefix("--")
        if not word.startswith("--") or not script.flags:
            continue
        if flag not in script.flags:
            close = find_nearest(flag, script.flags)
            hint = f"; did you mean --{close[0]}?" if close else ""
            return ConfigError(f"{name}: unknown flag '--{flag}'{hint}")
        replaced.append(f"--{flag}: {script.flags[flag][1]}")
    text = "; ".join([f"{name}: not a command of weft; {script.replacement}", *replaced])
    return ConfigError(text.replace("`", ""))
