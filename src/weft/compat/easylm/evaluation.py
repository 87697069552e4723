"""Translation of EasyLM's script `submit_open_instruct_eval.py` to `weft eval submit` on Beaker.

    weft easylm submit_open_instruct_eval --workspace W --model_name M --location PLACE --is_tuned

The job is based on `beaker_configs/default_eval.yaml` in the current folder or, if there is no such
file, on weft's template. Options of `weft eval submit`, such as --print, may be added.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from weft.cli.parsing import CommandParser
from weft.errors import ConfigError, build_unknown_name_error
from weft.evaluation.catalogue import GROUPS
from weft.launch.eval_job import HUB
from weft.redaction import mask_words

TEMPLATE = Path("beaker_configs/default_eval.yaml")
SUITE = GROUPS["open-instruct"]
# experiments of EasyLM -> tasks of weft (EasyLM misspells truthfulqa)
RENAMED = {"trutufulqa": "truthfulqa", "xstest": "xstest_judge"}
OWN_TEMPLATE = "the model's own chat template is used"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of EasyLM's flags that `weft eval submit` does not have."""
    parser = CommandParser(
        prog="weft easylm submit_open_instruct_eval",
        description=__doc__,
        allow_abbrev=False,
        epilog="further options: weft eval submit --help",
    )
    parser.add_argument("--model_name", metavar="NAME", help="name; hf-...: a model of the hub")
    parser.add_argument("--location", metavar="PLACE", help="Beaker dataset, path or hub name")
    parser.add_argument("--workspace", metavar="NAME", help="Beaker workspace, ORG/NAME")
    parser.add_argument("--beaker_image", metavar="NAME", help="image of the job: --image")
    parser.add_argument(
        "--beaker_subfolder", metavar="DIR", help="folder of the model: --subfolder"
    )
    parser.add_argument(
        "--experiments", nargs="+", metavar="NAME", help=f"--tasks: {', '.join(SUITE)}"
    )
    parser.add_argument(
        "--use_hf_tokenizer_template", action="store_true", help=f"without effect: {OWN_TEMPLATE}"
    )
    parser.add_argument("--olmo", action="store_true", help=f"without effect: {OWN_TEMPLATE}")
    parser.add_argument(
        "--gsm_stop_at_double_newline",
        action="store_true",
        help="refused: tasks end their answers by their own rules",
    )
    return parser


def main(words: Sequence[str]) -> int:
    """Run `weft eval submit` for EasyLM's flags, and return its exit code.

    Raises `UserError` for unusable flags.
    """
    from weft.cli import eval as evaluate

    if not words:
        build_parser().print_help()
        return 2
    translated = ["submit", *translate(words)]
    print(f"$ weft eval {shlex.join(mask_words(translated))}", flush=True)
    return evaluate.main(translated)


def translate(words: Sequence[str]) -> list[str]:
    """Return the arguments of `weft eval submit` for a command line of EasyLM.

    Raises `ConfigError` for an unknown experiment and for a flag that weft lacks.
    """
    end = list(words).index("--") if "--" in words else len(words)
    parsed, rest = build_parser().parse_known_args(list(words[:end]))
    if parsed.gsm_stop_at_double_newline:
        raise ConfigError(
            "--gsm_stop_at_double_newline: weft's GSM8K tasks end their answers by their own "
            "rules; leave it out"
        )
    if not parsed.workspace:
        raise ConfigError("--workspace is missing: name the Beaker workspace of the job")
    translated = ["--system", "beaker", "--workspace", parsed.workspace]
    if parsed.model_name:
        translated += ["--model_name", parsed.model_name]
    if parsed.location:
        on_hub = (parsed.model_name or "").startswith("hf-")  # as in EasyLM
        translated += ["--location", f"{HUB}{parsed.location}" if on_hub else parsed.location]
    flags = {word.partition("=")[0] for word in rest}
    if "--template" not in flags and TEMPLATE.is_file():
        translated += ["--template", str(TEMPLATE)]
    if parsed.beaker_image:
        translated += ["--image", parsed.beaker_image]
    if parsed.beaker_subfolder:
        translated += ["--subfolder", parsed.beaker_subfolder]
    if parsed.experiments:
        tasks = [RENAMED.get(name, name) for name in parsed.experiments]
        for name in tasks:
            if name not in SUITE:
                raise build_unknown_name_error("experiment", name, SUITE)
        translated += ["--tasks", ",".join(tasks)]
    return [*translated, *rest, *words[end:]]
