"""Upload a run's model to the Hugging Face hub, with its model card.

Weights, configuration, tokenizer and README.md are uploaded; optimizer states, data, logs and
results are not. Of a run with adapters, the adapter is uploaded. A new repository is private.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weft.checkpoints.names import ModelQuery, is_model, locate_model
from weft.cli.ls import format_size
from weft.cli.parsing import CommandParser, print_help_if_empty
from weft.errors import CheckpointError, ConfigError
from weft.observe.model_card import README, name_model

if TYPE_CHECKING:
    from weft.checkpoints.hub_upload import HubRepository, HubUploadPlan

EPILOG = """examples:
  weft push runs/first/sft me/my-model --dry-run      list the files; nothing is sent
  weft push runs/first/sft me/my-model                a private repository
  weft push runs/first/ppo@step40 me/my-model --public --license apache-2.0
  weft push runs/lora/sft me/my-adapter --base-model meta-llama/Llama-3.2-1B"""


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="weft push", description=__doc__, epilog=EPILOG, url_arguments=("model",)
    )
    parser.add_argument(
        "model", metavar="MODEL", help="run, checkpoint such as runs/E/T@step40, or model directory"
    )
    parser.add_argument("repo", metavar="OWNER/NAME", help="repository on the hub")
    visibility = parser.add_mutually_exclusive_group()
    visibility.add_argument(
        "--private", action="store_true", help="create a private repository (default)"
    )
    visibility.add_argument("--public", action="store_true", help="create a public repository")
    parser.add_argument("--revision", metavar="BRANCH", help="branch to write (default: main)")
    parser.add_argument(
        "--merged", action="store_true", help="upload the merged model instead of its adapter"
    )
    parser.add_argument(
        "--base-model",
        metavar="OWNER/NAME",
        help="model on the hub that the adapter belongs to, or that the model is derived from",
    )
    parser.add_argument(
        "--license", metavar="ID", help="license for the card, such as apache-2.0 (default: none)"
    )
    parser.add_argument("--message", help="message of the commit (default: names the checkpoint)")
    parser.add_argument(
        "--token-env",
        metavar="NAME",
        help="environment variable with the access token (default: HF_TOKEN or hf auth login)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list the files and show the card; send nothing"
    )
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run `weft push ...` and return the exit code, which is 1 if the user declines.

    Raises `UserError` if the model or the repository cannot be used.
    """
    parser = build_parser()
    if print_help_if_empty(parser, argv):
        return 2
    arguments = parser.parse_args(list(argv))
    model = locate_model(arguments.model, ModelQuery("MODEL"))
    checkpoint = Path(model.path).expanduser()
    if not checkpoint.is_dir() or not is_model(checkpoint):
        raise CheckpointError(
            f"MODEL={arguments.model!r}: is no model on this machine; name a run, a checkpoint "
            "such as runs/E/T@step40, or a model directory"
        )
    if model.note:
        print(model.note)
    from weft.checkpoints import hub_upload  # imports the hub's client

    hub_upload.check_repository_name(arguments.repo)
    if arguments.base_model is not None:
        hub_upload.check_repository_name(arguments.base_model)
    plan = hub_upload.plan_upload(
        checkpoint,
        arguments.repo,
        merged=arguments.merged,
        base_model=arguments.base_model,
        license=arguments.license,
    )
    print("\n".join(describe_plan(plan)))
    if arguments.dry_run:
        print(f"\n{README}:\n\n{plan.texts[README]}")
        print("dry run: nothing was sent")
        return 0
    api = hub_upload.open_api(*_read_token(arguments.token_env))
    repository = hub_upload.find_repository(api, arguments.repo)
    _check_visibility(repository, private=arguments.private, public=arguments.public)
    if not arguments.yes and not _confirm(repository, public=arguments.public):
        print("nothing was sent")
        return 1
    url = hub_upload.upload(
        api,
        plan,
        private=not arguments.public,
        revision=arguments.revision,
        message=arguments.message or f"Upload {name_model(checkpoint)}",
    )
    print(f"uploaded {url}")
    return 0


def describe_plan(plan: HubUploadPlan) -> list[str]:
    """Return lines with the files of an upload, their sizes, the files left out, and notes."""
    sizes = plan.sizes
    lines = [f"{plan.repo}: {len(sizes)} files, {format_size(sum(sizes.values()))}"]
    width = max(map(len, sizes))
    lines += [f"  {name:{width}}  {format_size(size):>9}" for name, size in sizes.items()]
    if plan.left_out:
        lines.append("not uploaded")
        width = max(map(len, plan.left_out))
        lines += [f"  {name:{width}}  {reason}" for name, reason in plan.left_out.items()]
    lines += [f"note: {note}" for note in plan.notes]
    return lines


def _read_token(variable: str | None) -> tuple[str | None, str]:
    """Return the access token in an environment variable, and a phrase that names the variable.

    If `variable` is None, the token is None and the phrase is "". Raises `ConfigError` if the
    variable is not set.
    """
    if variable is None:
        return None, ""
    token = os.environ.get(variable, "").strip()
    if not token:
        raise ConfigError(f"--token-env {variable}: this environment variable is not set")
    return token, f" in {variable}"


def _check_visibility(repository: HubRepository, *, private: bool, public: bool) -> None:
    """Raise `ConfigError` if an existing repository does not have the requested visibility."""
    if repository.is_private is None or not (private or public):
        return
    if repository.is_private != private:
        visibility = "private" if repository.is_private else "public"
        raise ConfigError(
            f"{repository.name}: is {visibility} already, and a push does not change that; leave "
            f"--{'private' if private else 'public'} out, or change it on its page first"
        )


def _confirm(repository: HubRepository, *, public: bool) -> bool:
    """Ask the user for confirmation, and return whether the user agrees.

    Raises `ConfigError` if the input is not a terminal.
    """
    if not sys.stdin.isatty():
        raise ConfigError("weft push asks for confirmation, which needs a terminal; add --yes")
    if repository.is_private is None:
        target = f"a new {'public' if public else 'private'} repository"
    else:
        target = f"the {'private' if repository.is_private else 'public'} repository"
    try:
        answer = input(f"upload this to {target} {repository.name}? [y/N] ")
    except EOFError:
        return False
    return answer.strip().lower() in ("y", "yes")
