"""Client of an OpenAI-compatible server: validated URL and key, limits and retries."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from weft.errors import ConfigError, UserError
from weft.host import http
from weft.host.http import Trouble
from weft.host.verifiers._judge_text import number, shortened, whole

URL_VARIABLE = "OPENAI_BASE_URL"
KEY_VARIABLE = "OPENAI_API_KEY"
PATH = "/chat/completions"
FIXES = {
    400: "check model, max_tokens and extra",
    401: "put a valid key into the environment variable that api_key_env names",
    403: "put a key that may use this model into the environment variable that api_key_env names",
    404: "check model, and url, which usually ends in /v1",
    422: "check model, max_tokens and extra",
    429: "lower concurrency, or raise retries",
}


@dataclass(frozen=True)
class Endpoint:
    """Server and API key. Construct it with `of`, which validates both."""

    url: str  # without credentials
    key: str | None = field(repr=False)
    loopback: bool

    @classmethod
    def of(cls, url: str | None, key_variable: str | None, insecure: bool) -> Endpoint:
        """Return the endpoint given by `url`, `api_key_env`, `insecure` and the environment.

        Raises `ConfigError`; no message contains a key or the credentials of a URL.
        """
        base = url or os.environ.get(URL_VARIABLE)
        if not base:
            raise ConfigError(
                f"judge: url is not set, and neither is the environment variable {URL_VARIABLE}; "
                f"set url to the server's base "
                "URL, such as http://127.0.0.1:8000/v1"
            )
        parts = http.parts(
            "judge: url", base, ("http", "https"), "http://127.0.0.1:8000/v1", KEY_VARIABLE
        )
        key = http.secret("judge: api_key_env", key_variable, KEY_VARIABLE)
        loopback = http.is_loopback(parts.hostname or "")
        if not isinstance(insecure, bool):
            raise ConfigError(f"judge: insecure={insecure!r} must be true or false")
        if key is not None and parts.scheme == "http" and not loopback and not insecure:
            raise ConfigError(
                f"judge: url={base!r} would send the key unencrypted to another machine; use "
                f"https, set api_key_env to null to "
                "send no key, or set insecure to true where the network is trusted"
            )
        return cls(base.rstrip("/").removesuffix(PATH) + PATH, key, loopback)

    def without_key(self, text: str) -> str:
        """Return a server's response with the key masked."""
        return http.without(text, self.key)


@dataclass(frozen=True)
class Policy:
    """Limits of requests: number in flight, timeout, and number of retries."""

    concurrency: int
    timeout_s: float
    retries: int

    def __post_init__(self) -> None:
        whole("concurrency", self.concurrency, 1)
        whole("retries", self.retries, 0)
        number("timeout_s", self.timeout_s, "above 0 seconds", above=0)


@dataclass(frozen=True)
class Answer:
    """Judge's text and the numbers of billed tokens. `cut`: truncated at `max_tokens`."""

    text: str
    input_tokens: int
    output_tokens: int
    cut: bool


class Unanswered(UserError):
    """Request that got no answer in any of its attempts.

    `what` is the cause, without the server's response.
    """

    def __init__(self, message: str, what: str) -> None:
        super().__init__(message)
        self.what = what


class Session:
    """Open connections to a server, used as an async context manager.

    Usage:

        async with Session(endpoint, policy) as session:
            answer = await session.ask(body)
    """

    def __init__(self, endpoint: Endpoint, policy: Policy) -> None:
        self.endpoint = endpoint
        self.policy = policy
        self.sent = 0  # number of requests
        self._slots = asyncio.Semaphore(policy.concurrency)
        self._jitter = random.Random()
        headers = {"Content-Type": "application/json"}
        if endpoint.key is not None:
            headers["Authorization"] = f"Bearer {endpoint.key}"
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=policy.timeout_s,
            # The number of requests in flight is limited by `_slots`
            limits=httpx.Limits(max_keepalive_connections=policy.concurrency),
            follow_redirects=False,  # a redirect would send the key to another host
            trust_env=not endpoint.loopback,  # a proxy cannot reach this machine's own ports
        )

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.aclose()

    async def ask(self, body: Mapping[str, Any]) -> Answer:
        """Return the answer to a chat completion request.

        Raises `Unanswered` with the URL, the response and the fix.
        """
        content = json.dumps(body).encode()
        attempt = 0
        # The slot is kept during the waits, so that a busy server gets no further requests
        async with self._slots:
            while isinstance(came := await self._send(content), Trouble):
                if not came.again or came.after > http.LONGEST_S or attempt == self.policy.retries:
                    times = f" (asked {attempt + 1} times)" if attempt else ""
                    said = f": {shortened(came.said)!r}" if came.said.strip() else ""
                    raise Unanswered(
                        f"judge: url={self.endpoint.url}: {came.what}{times}{said}; {came.fix}",
                        came.what,
                    )
                await asyncio.sleep(http.pause(attempt, came.after, self._jitter))
                attempt += 1
        return came

    async def _send(self, content: bytes) -> Answer | Trouble:
        self.sent += 1
        try:
            async with asyncio.timeout(self.policy.timeout_s):
                response = await self._client.post(self.endpoint.url, content=content)
        except (TimeoutError, httpx.TimeoutException):
            fix = "raise timeout_s, lower max_tokens or concurrency, or check that the server works"
            return Trouble(
                f"no answer within timeout_s={self.policy.timeout_s:g} seconds", fix, True
            )
        except httpx.HTTPError as error:
            said = self.endpoint.without_key(str(error))
            return Trouble(type(error).__name__, "start the server, or correct url", True, said)
        said = self.endpoint.without_key(response.text)
        if response.status_code != 200:
            return _refusal(response.status_code, said, response.headers.get("Retry-After"))
        came = _answer(said)
        if isinstance(came, Answer):
            return replace(came, text=self.endpoint.without_key(came.text))
        return came


def _answer(said: str) -> Answer | Trouble:
    """Parse the JSON of a chat completion."""
    try:
        answer = json.loads(said)
        choice = answer["choices"][0]
        text = choice["message"]["content"] or ""  # null if the model only reasoned, or refused
        usage = answer.get("usage") or {}
        paid = int(usage.get("prompt_tokens") or 0)
        made = int(usage.get("completion_tokens") or 0)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        fix = "check that url is the base URL of an OpenAI-compatible server"
        return Trouble("the answer is not a chat completion", fix, True, said)
    text = str(text).encode(errors="replace").decode()  # lone surrogates are valid JSON
    return Answer(text, paid, made, cut=choice.get("finish_reason") == "length")


def _refusal(status: int, said: str, retry_after: str | None) -> Trouble:
    """Return the cause and the fix of a status other than 200.

    The response to 401 and 403 is not shown: it may contain a part of the key.
    """
    shown = "" if status in (401, 403) else said
    if 300 <= status < 400:
        return Trouble(
            f"status {status}", "redirects are not followed; set url to where the server is", False
        )
    after = http.seconds(retry_after)
    if after > http.LONGEST_S:
        wait = f", to be asked again in {after:g} seconds"
    else:
        wait = ""
    fix = FIXES.get(
        status, "look at the server's log" if status >= 500 else "check url, model and extra"
    )
    return Trouble(f"status {status}{wait}", fix, http.may_repeat(status), shown, after)
