"""Helpers for HTTP requests to other servers: validation of URLs and keys, retry policy."""

from __future__ import annotations

import ipaddress
import os
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import SplitResult, urlsplit

from weft.errors import ConfigError

RETRYABLE_STATUSES = (408, 409, 425, 429)  # statuses to retry, as well as all from 500 on
BACKOFF_S = 0.5  # delay before the first retry; it doubles with each further retry
MAX_DELAY_S = 60.0  # longest delay; if a server asks for a longer one, there is no retry


@dataclass(frozen=True)
class RequestFailure:
    """Failure of a request: its cause, a way to fix it, and when to retry.

    If `is_retryable` is true, the request can be retried after at least `retry_after_s` seconds.
    """

    cause: str
    fix: str
    is_retryable: bool
    response: str = ""  # response of the server
    retry_after_s: float = 0.0


def split_base_url(
    option: str, url: Any, schemes: Sequence[str], example: str, key_variable: str
) -> SplitResult:
    """Split the base URL of a server into its components.

    `option` and `example` are the option's name and a valid value, for error messages. Raises
    `ConfigError` for an invalid URL, and for one with credentials, a query or a fragment:
    credentials belong in the environment variable `key_variable`.
    """
    if any(mark in str(url) for mark in "@?#"):
        raise ConfigError(
            f"{option} must not contain a user, password, query or fragment (its value is not "
            f"shown); put the key into the environment "
            f"variable {key_variable}"
        )
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in schemes and bool(parts.hostname) and (parts.port or 1) > 0
        is_usable = is_usable and re.search(r"[\s\x00-\x1f\x7f]", url) is None
    except (AttributeError, TypeError, ValueError):
        is_usable = False
    if not is_usable:
        raise ConfigError(f"{option}={url!r} must be a base URL such as {example}")
    return parts


def read_api_key(option: str, variable: str | None, default_variable: str) -> str | None:
    """Return the API key in the environment variable `variable`.

    Returns None if `variable` is empty, or if it is the default variable `default_variable` and is
    not set. Raises `ConfigError` if any other variable is not set, and if the variable's name or
    the key is invalid. The messages name `option`, the option that sets `variable`. They never show
    `variable` itself, because it could be a key that was written there by mistake.
    """
    if not variable:
        return None
    if not isinstance(variable, str) or not re.fullmatch(r"[A-Za-z_]\w*", variable, re.ASCII):
        raise ConfigError(
            f"{option} must be the name of an environment variable, not a key; its value is not "
            f"shown"
        )
    key = os.environ.get(variable, "").strip()
    name = option.rpartition(" ")[2]
    if not key and variable != default_variable:
        raise ConfigError(
            f"{option} names an environment variable that is not set; export it, or set {name} to "
            f"null to send no key"
        )
    if key and not re.fullmatch(r"[\x21-\x7e]+", key):
        raise ConfigError(
            f"{option.removesuffix(name)}the variable that {name} names must contain only "
            f"ASCII characters without spaces"
        )
    return key or None


def is_loopback(host: str) -> bool:
    """Return whether a host name or address refers to this machine."""
    try:
        address = ipaddress.ip_address(host)
        return address.is_loopback or address.is_unspecified  # 0.0.0.0 is this machine, too
    except ValueError:
        return host == "localhost"


def mask_key(text: str, key: str | None) -> str:
    """Return the text of a server's response with the API key replaced by "[key]"."""
    if key is None:
        return text
    # JSON may escape slashes
    return text.replace(key, "[key]").replace(key.replace("/", "\\/"), "[key]")


def is_retryable_status(status: int) -> bool:
    """Return whether a request should be retried after a response with this HTTP status."""
    return status in RETRYABLE_STATUSES or status >= 500


def compute_retry_delay(attempt: int, after: float, jitter: random.Random) -> float:
    """Return the seconds to wait before a retry, by exponential backoff with jitter.

    `attempt` is the index of the failed attempt, from 0. The delay is at least `after`, the delay
    in seconds that the server asks for.
    """
    return max(after, min(MAX_DELAY_S, BACKOFF_S * 2**attempt) * jitter.uniform(0.5, 1.0))


def parse_retry_after(retry_after: str | None) -> float:
    """Return the delay in seconds that a `Retry-After` header (seconds or a date) asks for.

    Returns 0 if there is no header or it is invalid.
    """
    if retry_after is None:
        return 0.0
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except ValueError:
        return 0.0
