"""Check that the Hugging Face hub has a model or dataset, and download a model's small files."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from weft.errors import CheckpointError, DataError

TIMEOUT_SECONDS = 4.0  # timeout of a query to the hub
MODEL_FILES = ("config.json", "tokenizer_config.json", "tokenizer.json")
SMALL = ["*.json", "*.model", "*.txt", "*.jinja"]  # files of a model without weights
FAILURES = (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError)

Kind = Literal["model", "dataset"]
Found = TypeVar("Found")


def is_cached(name: str, files: Iterable[str] = MODEL_FILES) -> bool:
    """Return whether the hub's local cache has at least one of `files` of the model `name`."""
    try:
        return any(
            isinstance(huggingface_hub.try_to_load_from_cache(name, file), str) for file in files
        )
    except HFValidationError:
        return False


def check_model(option: str, name: str, hint: str = "") -> None:
    """Check that a model is in the local cache or on the hub.

    `option` is the option that the user set. Raises `CheckpointError`, with a message that ends
    with `hint`, if the model is in neither of them.
    """
    if not is_cached(name):
        _query_hub(option, name, name, "model", hint)


def check_dataset(option: str, path: str, hint: str = "") -> None:
    """Check that a dataset, OWNER/NAME or OWNER/NAME:FOLDER, is in the local cache or on the hub.

    `option` is the option that the user set. Raises `DataError`, with a message that ends with
    `hint`, if the dataset is in neither of them.
    """
    name = path.partition(":")[0]
    if not _has_dataset_folder(name):
        _query_hub(option, path, name, "dataset", hint)


@functools.cache
def find_model_folder(name: str) -> Path:
    """Return the local directory with the configuration and tokenizer of a hub model.

    Queries the hub once and falls back to the cache. If both fail, raises one of the exceptions in
    `FAILURES`.
    """
    return Path(
        huggingface_hub.snapshot_download(name, allow_patterns=SMALL, ignore_patterns=["*/*"])
    )


def _has_dataset_folder(name: str) -> bool:
    try:
        huggingface_hub.snapshot_download(name, repo_type="dataset", local_files_only=True)
    except FAILURES:
        return False
    return True


def call_with_timeout(seconds: float, ask: Callable[[], Found]) -> Found:
    """Call `ask` in a thread and return its result.

    Raises `TimeoutError` if the call takes longer than `seconds`. Errors of `ask` are raised
    unchanged. The timeout is needed because a failing name lookup would block for minutes.
    """
    answers = list[Found]()
    errors = list[Exception]()

    def run() -> None:
        try:
            answers.append(ask())
        except Exception as error:  # handed to the caller below
            errors.append(error)

    thread = threading.Thread(target=run, name="weft-hub", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer in {seconds:g} seconds")
    return answers[0]


def _query_hub(option: str, value: str, name: str, kind: Kind, hint: str) -> None:
    """Raise an error unless the hub confirms that it has the model or dataset `name`.

    `value` is the name as the user wrote it, the value of `option`. The timeout covers the DNS
    lookup, the connection and the response.
    """
    api = huggingface_hub.HfApi()
    if kind == "model":
        info: Callable[..., Any] = api.model_info
    else:
        info = api.dataset_info
    try:
        call_with_timeout(TIMEOUT_SECONDS, lambda: info(name, timeout=TIMEOUT_SECONDS))
    # For any error of the HTTP library, the hub has not confirmed that it has `name`.
    except Exception as failed:
        label = f"{option}={value!r}" if option else value
        local_kind = "directory" if kind == "model" else "file or directory"
        raise (CheckpointError if kind == "model" else DataError)(
            f"{label}: there is no such {local_kind}, and "
            f"{_explain_failure(failed, kind)}{'; ' if hint else ''}{hint}"
        ) from failed


def _explain_failure(failed: Exception, kind: Kind) -> str:
    """Describe in words why a query to the hub failed."""
    if isinstance(failed, OfflineModeIsEnabled):
        value = os.environ.get("HF_HUB_OFFLINE", "1")
        return f"HF_HUB_OFFLINE={value} prevents weft from asking the hub"
    if isinstance(failed, GatedRepoError):
        return (
            f"access to this {kind} has to be requested: request it on its page of the hub, then "
            f"run hf auth login"
        )
    if isinstance(failed, RepositoryNotFoundError):
        return f"the hub has no {kind} of this name (a private one needs hf auth login)"
    if isinstance(failed, HFValidationError):
        return "it is not a valid name on the hub"
    lines = (str(failed).strip() or type(failed).__name__).splitlines()
    if isinstance(failed, HfHubHTTPError):
        return f"the hub refuses it ({lines[0]})"
    return f"the hub cannot be reached ({lines[0]})"
