"""Upload of a model to the Hugging Face hub.

`plan_upload` chooses the files of a model directory: weights, configuration, tokenizer and card.
Everything else stays on this machine: optimizer states, results, data, logs and code. `upload`
sends the planned files in one commit.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from weft.checkpoints.hub_card import CardMetadata, complete_card
from weft.checkpoints.names import ADAPTER, CONFIG
from weft.errors import CheckpointError, ConfigError, RunError
from weft.observe.model_card import ADAPTER_FOLDER, README
from weft.observe.place_names import is_hub_name
from weft.reading import read_object
from weft.writing import write

WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
TOKENIZER_CONFIG = "tokenizer_config.json"
# Entries of configurations that can hold a path of the machine on which they were written.
PLACES = ("_name_or_path", "name_or_path", "tokenizer_file", "special_tokens_map_file")
TOKENIZER_FILES = (
    *("tokenizer.json", TOKENIZER_CONFIG, "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "*.tiktoken"),
    *("chat_template.jinja", "chat_template.json", "preprocessor_config.json"),
)
# Files that describe the weights. Those of an earlier upload are removed if the new one has none.
DESCRIPTIONS = (CONFIG, "generation_config.json", ADAPTER, *TOKENIZER_FILES)
# Files of a model directory that are uploaded, besides its card.
MODEL_FILES = (*WEIGHTS, *DESCRIPTIONS, "*.gguf", "LICENSE*", "NOTICE*")
BASE = "base_model_name_or_path"
REFUSED = {401: "does not accept the token", 403: "does not let this token write there"}


@dataclass(frozen=True)
class HubUploadPlan:
    """Files to upload to a repository.

    `files` maps names in the repository to files of this machine, and `texts` to the contents of
    files that are made for the upload. `left_out` maps names of other files in the model's folder
    to the reasons for leaving them out. `notes` are messages for the user.
    """

    repo: str
    files: Mapping[str, Path]
    texts: Mapping[str, str]
    left_out: Mapping[str, str]
    notes: Sequence[str] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """Number of bytes of each file to upload, in the order of the names."""
        sizes = {name: path.stat().st_size for name, path in self.files.items()}
        sizes |= {name: len(text.encode()) for name, text in self.texts.items()}
        return dict(sorted(sizes.items()))


def check_repository_name(repo: str) -> None:
    """Raise `ConfigError` unless `repo` has the form OWNER/NAME, with a valid name."""
    try:
        huggingface_hub.utils.validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(f"{repo}: is not a valid name of a repository: {error}") from None
    if repo.count("/") != 1:
        raise ConfigError(f"{repo}: name the repository as OWNER/NAME, such as me/{repo}")


def plan_upload(
    checkpoint: Path, repo: str, *, merged: bool, base_model: str | None, license: str | None
) -> HubUploadPlan:
    """Choose the files of a model to upload to `repo`. Nothing is sent or written.

    If the checkpoint has an adapter, the adapter is uploaded, or with `merged` the weights that
    include it. `base_model` is the hub name of the model that an adapter belongs to, or that the
    weights are derived from. Raises `ConfigError` or `CheckpointError` if the folder has no
    weights, or if the model of an adapter is not known on the hub.
    """
    has_adapter = (checkpoint / ADAPTER_FOLDER / ADAPTER).is_file()
    folder = checkpoint / ADAPTER_FOLDER if has_adapter and not merged else checkpoint
    files: dict[str, Path] = {}
    if folder != checkpoint:
        files |= _select_files(checkpoint, TOKENIZER_FILES)
    files |= _select_files(folder, MODEL_FILES)
    if not any(fnmatch(name, WEIGHTS[0]) for name in files):
        raise CheckpointError(
            f"{folder}: has no weights in safetensors files, so there is nothing to push; name a "
            f"run, a checkpoint or a model directory"
        )
    texts = {}
    if ADAPTER in files:
        texts[ADAPTER], base_model = _write_adapter_config(files.pop(ADAPTER), base_model)
    cleaned, removed = _remove_local_paths(files)
    texts |= cleaned
    files = {name: path for name, path in files.items() if name not in cleaned}
    texts[README], notes = complete_card(
        checkpoint, folder, repo, CardMetadata(base_model=base_model, license=license)
    )
    notes += removed
    if folder != checkpoint:
        notes.append("the adapter is uploaded; --merged uploads the whole model")
    chosen = {*files.values(), folder / ADAPTER, *(checkpoint / name for name in cleaned)}
    chosen |= {folder / name for name in cleaned}
    left_out = _explain_left_out(checkpoint, folder, chosen)
    return HubUploadPlan(repo, files, texts, left_out, notes)


def _remove_local_paths(files: Mapping[str, Path]) -> tuple[dict[str, str], list[str]]:
    """Return configurations without the places on this machine that some programs store, and notes.

    Only files that have such an entry are in the result.
    """
    cleaned = {}
    notes = []
    for name in (CONFIG, TOKENIZER_CONFIG):
        if name not in files:
            continue
        settings: dict[str, Any] = read_object(files[name], str(files[name]), CheckpointError)
        local = []
        for key in PLACES:
            value = settings.get(key)
            if isinstance(value, str) and "/" in value and not is_hub_name(value, Path()):
                local.append(key)
        if local:
            rest = {key: value for key, value in settings.items() if key not in local}
            cleaned[name] = json.dumps(rest, indent=2, ensure_ascii=False) + "\n"
            notes.append(f"{name} is uploaded without {', '.join(local)}: a path of this machine")
    return cleaned, notes


def _select_files(folder: Path, patterns: Sequence[str]) -> dict[str, Path]:
    chosen = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and any(fnmatch(path.name, pattern) for pattern in patterns):
            chosen[path.name] = path
    return chosen


def _explain_left_out(checkpoint: Path, folder: Path, chosen: set[Path]) -> dict[str, str]:
    """Return a reason for each file below `checkpoint` that is not uploaded.

    `folder` is the one whose weights are uploaded.
    """
    reasons = {}
    for path in sorted(checkpoint.rglob("*")):
        name = path.relative_to(checkpoint).as_posix()
        if not path.is_file() or path in chosen or name == README:
            continue
        if path.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt"):
            reasons[name] = "not in safetensors format"
        elif path.name.startswith(("results_", "samples_")):
            reasons[name] = "the card has the results"
        elif path.suffix == ".py":
            reasons[name] = "code"
        elif path.parent == checkpoint / ADAPTER_FOLDER:
            reasons[name] = "the weights include the adapter"
        elif folder != checkpoint and path.parent == checkpoint:
            reasons[name] = "the adapter needs only its base model"
        else:
            reasons[name] = "not part of the model"
    return reasons


def _write_adapter_config(path: Path, base_model: str | None) -> tuple[str, str]:
    """Return (content, hub name of the base model) of an adapter's configuration for the hub.

    Raises `ConfigError` if the base model is a folder of this machine and `base_model` is None.
    """
    settings: dict[str, Any] = read_object(path, str(path), CheckpointError)
    stored = settings.get(BASE)
    if base_model is None:
        if not isinstance(stored, str) or not is_hub_name(stored, Path()):
            raise ConfigError(
                f"{path}: the adapter belongs to {stored!r}, which is not a name on the hub; set "
                f"--base-model OWNER/NAME, or push the whole model with --merged"
            )
        base_model = stored
    content = json.dumps({**settings, BASE: base_model}, indent=2, sort_keys=True)
    return f"{content}\n", base_model


# -- the hub


@dataclass(frozen=True)
class HubRepository:
    """Repository on the hub. `is_private` is None if it does not exist yet."""

    name: str
    is_private: bool | None


def open_api(token: str | None, option: str) -> Any:
    """Return the client of the hub.

    `token` is the access token; None means the one of `hf auth login` or HF_TOKEN. `option` tells
    where the user has set it, for messages. Raises `ConfigError` if there is no token, or if the
    hub must not be used.
    """
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(
            "HF_HUB_OFFLINE=1 prevents weft from using the hub; unset it to push (--dry-run works "
            "without the hub)"
        )
    access_token = token or huggingface_hub.get_token()
    if not access_token:
        raise ConfigError(
            f"no access token for the hub{option}: run hf auth login, or set HF_TOKEN to a token "
            f"that may write"
        )
    return huggingface_hub.HfApi(token=access_token)


def find_repository(api: Any, repo: str) -> HubRepository:
    """Ask the hub whether a repository exists, and whether it is private."""
    with explain_hub_errors(repo):
        try:
            info = api.repo_info(repo, repo_type="model")
        except RepositoryNotFoundError:
            return HubRepository(repo, None)
        return HubRepository(repo, bool(info.private))


def upload(
    api: Any, plan: HubUploadPlan, *, private: bool, revision: str | None, message: str
) -> str:
    """Upload the planned files in one commit, and return its URL.

    The repository is created if it does not exist, `private` or public, and so is the branch
    `revision`. Weights, configurations and tokenizer files in the repository that the upload does
    not replace are removed, because loaders would mix them with the new ones. Raises `ConfigError`
    if the hub does not allow it, and `RunError` if it fails.
    """
    with explain_hub_errors(plan.repo), tempfile.TemporaryDirectory(prefix="weft-push-") as folder:
        for name, path in plan.files.items():
            os.symlink(path.absolute(), Path(folder, name))
        for name, text in plan.texts.items():
            write(Path(folder, name), text)
        api.create_repo(plan.repo, private=private, repo_type="model", exist_ok=True)
        if revision is not None:
            api.create_branch(plan.repo, branch=revision, repo_type="model", exist_ok=True)
        commit = api.upload_folder(
            repo_id=plan.repo,
            repo_type="model",
            folder_path=folder,
            revision=revision,
            commit_message=message,
            delete_patterns=[*WEIGHTS, *DESCRIPTIONS],
        )
    return str(commit.commit_url)


@contextmanager
def explain_hub_errors(repo: str) -> Iterator[None]:
    """Convert errors of the hub's client in the block into errors of weft that name `repo`."""
    try:
        yield
    except OfflineModeIsEnabled:
        raise ConfigError(f"{repo}: HF_HUB_OFFLINE=1 prevents weft from using the hub") from None
    except RevisionNotFoundError as error:
        raise ConfigError(f"{repo}: has no such branch: {error}") from None
    except HfHubHTTPError as error:
        status = None if error.response is None else error.response.status_code
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        if status in REFUSED:
            raise ConfigError(
                f"{repo}: the hub {REFUSED[status]} ({line}); run hf auth login with a token that "
                f"may write there"
            ) from error
        raise RunError(f"{repo}: the hub refuses the upload ({line})") from error
    except (OSError, ValueError) as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RunError(f"{repo}: the upload failed ({line})") from error
    except Exception as error:
        # the client's HTTP library is httpx or httpx2, depending on its version
        if not type(error).__module__.startswith("httpx"):
            raise
        raise RunError(f"{repo}: the hub cannot be reached ({error})") from error
