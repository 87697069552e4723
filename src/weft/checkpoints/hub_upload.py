"""Upload a model to the Hugging Face hub.

`plan_upload` chooses the files of a model directory: weights, configuration, tokenizer and card.
All other files stay on this machine: optimizer states, results, data, logs and code. `upload` sends
the planned files in one commit.
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
# keys of configurations whose value may be a path on the machine that wrote them
LOCAL_PATH_KEYS = ("_name_or_path", "name_or_path", "tokenizer_file", "special_tokens_map_file")
TOKENIZER_FILES = (
    *("tokenizer.json", TOKENIZER_CONFIG, "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "*.tiktoken"),
    *("chat_template.jinja", "chat_template.json", "preprocessor_config.json"),
)
# Files that describe the weights. An upload removes earlier ones that it does not replace.
DESCRIPTIONS = (CONFIG, "generation_config.json", ADAPTER, *TOKENIZER_FILES)
# files of a model directory that are uploaded, in addition to its card
MODEL_FILES = (*WEIGHTS, *DESCRIPTIONS, "*.gguf", "LICENSE*", "NOTICE*")
BASE = "base_model_name_or_path"
REFUSALS = {401: "does not accept the token", 403: "does not let this token write there"}


@dataclass(frozen=True)
class HubUploadPlan:
    """Files to upload to a repository.

    `files` maps names in the repository to files on this machine, and `texts` maps names to the
    contents of files that are generated for the upload. `left_out` maps the names of other files in
    the model's folder to the reasons for leaving them out. `notes` are messages for the user.
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
    """Raise `ConfigError` unless `repo` is a valid name of the form OWNER/NAME."""
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

    If the checkpoint has an adapter, the adapter is uploaded or, with `merged`, the weights that
    include it. `base_model` is the hub name of the adapter's base model, or of the model from which
    the weights are derived. `license` is written into the card. Raises `CheckpointError` if the
    folder has no weights, and `ConfigError` if an adapter's base model has no known name on the
    hub.
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
    used_files = {*files.values(), folder / ADAPTER, *(checkpoint / name for name in cleaned)}
    used_files |= {folder / name for name in cleaned}
    left_out = _explain_left_out(checkpoint, folder, used_files)
    return HubUploadPlan(repo, files, texts, left_out, notes)


def _remove_local_paths(files: Mapping[str, Path]) -> tuple[dict[str, str], list[str]]:
    """Return (configurations without paths of this machine, notes about the removed entries).

    Some programs store such paths. The configurations are the new contents of the files that have
    such paths, by file name.
    """
    cleaned = {}
    notes = []
    for name in (CONFIG, TOKENIZER_CONFIG):
        if name not in files:
            continue
        settings: dict[str, Any] = read_object(files[name], str(files[name]), CheckpointError)
        local = []
        for key in LOCAL_PATH_KEYS:
            value = settings.get(key)
            if isinstance(value, str) and "/" in value and not is_hub_name(value, Path()):
                local.append(key)
        if local:
            kept_settings = {key: value for key, value in settings.items() if key not in local}
            cleaned[name] = json.dumps(kept_settings, indent=2, ensure_ascii=False) + "\n"
            notes.append(f"{name} is uploaded without {', '.join(local)}: a path of this machine")
    return cleaned, notes


def _select_files(folder: Path, patterns: Sequence[str]) -> dict[str, Path]:
    selected = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and any(fnmatch(path.name, pattern) for pattern in patterns):
            selected[path.name] = path
    return selected


def _explain_left_out(checkpoint: Path, folder: Path, used_files: set[Path]) -> dict[str, str]:
    """Return the reason for each file below `checkpoint` that is not uploaded, by name.

    `folder` is the folder with the uploaded weights, and `used_files` are all files of the upload.
    """
    reasons = {}
    for path in sorted(checkpoint.rglob("*")):
        name = path.relative_to(checkpoint).as_posix()
        if not path.is_file() or path in used_files or name == README:
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
    """Return (content, base model) of the adapter configuration `path`, changed for the hub.

    The content names `base_model` or, if that is None, the stored base model. Raises `ConfigError`
    if `base_model` is None and the stored base model is not a name on the hub.
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
    """Return a client of the hub.

    `token` is the access token; if it is None, the token of `hf auth login` or HF_TOKEN is used.
    `option` is a phrase for messages that names the source of the token, such as " in VARIABLE".
    Raises `ConfigError` if there is no token, or if HF_HUB_OFFLINE is set.
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
    """Look up a repository on the hub, and whether it is private.

    Raises `ConfigError` or `RunError` if the hub refuses the request or cannot be reached.
    """
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

    If the repository does not exist, it is created, private or public as `private` says. A missing
    branch `revision` is also created. Weights, configurations and tokenizer files in the repository
    that the upload does not replace are removed, because loaders would mix them with the new ones.
    Raises `ConfigError` if the hub does not allow the upload, and `RunError` if the upload fails.
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
    """Convert errors of the hub's client in the `with` block to errors of weft that name `repo`."""
    try:
        yield
    except OfflineModeIsEnabled:
        raise ConfigError(f"{repo}: HF_HUB_OFFLINE=1 prevents weft from using the hub") from None
    except RevisionNotFoundError as error:
        raise ConfigError(f"{repo}: has no such branch: {error}") from None
    except HfHubHTTPError as error:
        status = None if error.response is None else error.response.status_code
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        if status in REFUSALS:
            raise ConfigError(
                f"{repo}: the hub {REFUSALS[status]} ({line}); run hf auth login with a token that "
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
