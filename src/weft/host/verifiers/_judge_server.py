"""Client of an OpenAI-compatible server for judges, with limits, retries and checks of URL and key."""

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
from weft.host.http import RequestFailure
from weft.host.verifiers._judge_text import check_integer, check_number, shorten

URL_VARIABLE = "OPENAI_BASE_URL"
KEY_VARIABLE = "OPENAI_API_KEY"
PATH = "/chat/completions"
# Status -> fix in the error message
FIXES = {
    400: "check model, max_tokens and extra",
    401: "put a valid key into the environment variable that api_key_env names",
    403: "put a key with access to this model into the environment variable that api_key_env names",
    404: "check model, and url, which usually ends in /v1",
    422: "check model, max_tokens and extra",
    429: "lower concurrency, or raise retries",
}


@dataclass(frozen=True)
class JudgeEndpoint:
    """URL of a judge's server and the API key for it.

    Create instances with `from_options`, which validates the URL and the key.
    """

    url: str  # URL of chat completions, without credentials
    key: str | None = field(repr=False)
    is_loopback: bool  # whether the server is on this machine

    @classmethod
    def from_options(
        cls, url: str | None, key_variable: str | None, insecure: bool
    ) -> JudgeEndpoint:
        """Return the endpoint that the judge's options and the environment specify.

        `key_variable` is the name of the environment variable with the API key. With `insecure`,
        the key may be sent unencrypted. Raises `ConfigError` for invalid options; no message
        contains a key or the credentials of a URL.
        """
        base = url or os.environ.get(URL_VARIABLE)
        if not base:
            raise ConfigError(
                f"judge: url is not set, and neither is the environment variable {URL_VARIABLE}; "
                f"set url to the server's base "
                "URL, such as http://127.0.0.1:8000/v1"
            )
        parts = http.split_base_url(
            "judge: url", base, ("http", "https"), "http://127.0.0.1:8000/v1", KEY_VARIABLE
        )
        key = http.read_api_key("judge: api_key_env", key_variable, KEY_VARIABLE)
        loopback = http.is_loopback(parts.hostname or "")
        if not isinstance(insecure, bool):
            raise ConfigError(f"judge: insecure={insecure!r} must be true or false")
        if key is not None and parts.scheme == "http" and not loopback and not insecure:
            raise ConfigError(
                f"judge: url={base!r} would send the key unencrypted to another machine; use "
                f"https, set api_key_env to null to "
                "send no key, or set insecure to true if the network is trusted"
            )
        return cls(base.rstrip("/").removesuffix(PATH) + PATH, key, loopback)

    def mask_key(self, text: str) -> str:
        """Return the text of a server's response with the API key replaced by "[key]"."""
        return http.mask_key(text, self.key)


@dataclass(frozen=True)
class RequestLimits:
    """Limits on the requests to a judge's server.

    `concurrency` is the maximum number of requests in flight, `timeout_s` the timeout of each
    attempt in seconds, and `retries` the maximum number of retries of a request.
    """

    concurrency: int
    timeout_s: float
    retries: int

    def __post_init__(self) -> None:
        check_integer("concurrency", self.concurrency, 1)
        check_integer("retries", self.retries, 0)
        check_number("timeout_s", self.timeout_s, "above 0 seconds", above=0)


@dataclass(frozen=True)
class JudgeAnswer:
    """Text of a judge's answer, and the numbers of input and output tokens that are billed.

    `is_truncated` is true if the text was cut off at `max_tokens`.
    """

    text: str
    input_tokens: int
    output_tokens: int
    is_truncated: bool


class UnansweredRequest(UserError):
    """Raised if all attempts of a request fail.

    The attribute `cause` is the reason for the last failure, without the server's response.
    """

    def __init__(self, message: str, what: str) -> None:
        super().__init__(message)
        self.cause = what


class JudgeSession:
    """HTTP client for a judge's server, used as an async context manager.

    The connections stay open until the context ends. Usage:

        async with JudgeSession(endpoint, policy) as session:
            answer = await session.ask(body)
    """

    def __init__(self, endpoint: JudgeEndpoint, policy: RequestLimits) -> None:
        self.endpoint = endpoint
        self.policy = policy
        self.num_requests = 0  # number of requests sent, retries included
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
            trust_env=not endpoint.is_loopback,  # a proxy cannot reach this machine's own ports
        )

    async def __aenter__(self) -> JudgeSession:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.aclose()

    async def ask(self, body: Mapping[str, Any]) -> JudgeAnswer:
        """Send a chat completion request, with retries, and return the answer.

        Raises `UnansweredRequest` if no attempt is answered. The message has the URL, the last
        response, and a way to fix the problem.
        """
        content = json.dumps(body).encode()
        attempt = 0
        # The slot is kept during the waits, so that a busy server gets no further requests
        async with self._slots:
            while isinstance(came := await self._send(content), RequestFailure):
                if (
                    not came.is_retryable
                    or came.retry_after_s > http.MAX_DELAY_S
                    or attempt == self.policy.retries
                ):
                    times = f" (asked {attempt + 1} times)" if attempt else ""
                    detail = f": {shorten(came.response)!r}" if came.response.strip() else ""
                    raise UnansweredRequest(
                        f"judge: url={self.endpoint.url}: {came.cause}{times}{detail}; {came.fix}",
                        came.cause,
                    )
                await asyncio.sleep(
                    http.compute_retry_delay(attempt, came.retry_after_s, self._jitter)
                )
                attempt += 1
        return came

    async def _send(self, content: bytes) -> JudgeAnswer | RequestFailure:
        self.num_requests += 1
        try:
            async with asyncio.timeout(self.policy.timeout_s):
                response = await self._client.post(self.endpoint.url, content=content)
        except (TimeoutError, httpx.TimeoutException):
            fix = "raise timeout_s, lower max_tokens or concurrency, or check that the server works"
            return RequestFailure(
                f"no answer within timeout_s={self.policy.timeout_s:g} seconds", fix, True
            )
        except httpx.HTTPError as error:
            response_text = self.endpoint.mask_key(str(error))
            return RequestFailure(
                type(error).__name__, "start the server, or correct url", True, response_text
            )
        response_text = self.endpoint.mask_key(response.text)
        if response.status_code != 200:
            return _explain_status(
                response.status_code, response_text, response.headers.get("Retry-After")
            )
        came = _parse_answer(response_text)
        if isinstance(came, JudgeAnswer):
            return replace(came, text=self.endpoint.mask_key(came.text))
        return came


def _parse_answer(response_text: str) -> JudgeAnswer | RequestFailure:
    """Parse the JSON of a chat completion.

    Returns the answer, or a failure if the text is not a chat completion.
    """
    try:
        answer = json.loads(response_text)
        choice = answer["choices"][0]
        text = choice["message"]["content"] or ""  # null if the model only reasoned, or refused
        usage = answer.get("usage") or {}
        paid = int(usage.get("prompt_tokens") or 0)
        output_tokens = int(usage.get("completion_tokens") or 0)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        fix = "check that url is the base URL of an OpenAI-compatible server"
        return RequestFailure("the answer is not a chat completion", fix, True, response_text)
    text = str(text).encode(errors="replace").decode()  # lone surrogates are valid JSON
    return JudgeAnswer(
        text, paid, output_tokens, is_truncated=choice.get("finish_reason") == "length"
    )


def _explain_status(status: int, response_text: str, retry_after: str | None) -> RequestFailure:
    """Return the failure, with its cause and fix, for a response with a status other than 200.

    The response text is left out for 401 and 403, because it may contain a part of the key.
    """
    safe_text = "" if status in (401, 403) else response_text
    if 300 <= status < 400:
        return RequestFailure(
            f"status {status}",
            "redirects are not followed; set url to the redirect's target",
            False,
        )
    after = http.parse_retry_after(retry_after)
    if after > http.MAX_DELAY_S:
        wait = f", retry after {after:g} seconds"
    else:
        wait = ""
    fix = FIXES.get(
        status, "look at the server's log" if status >= 500 else "check url, model and extra"
    )
    return RequestFailure(
        f"status {status}{wait}", fix, http.is_retryable_status(status), safe_text, after
    )
