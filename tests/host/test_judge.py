"""The judge: requests, scores, failures, the cache and the key, with a small local server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.bounds import rounded
from tests.host.test_reward import batch, context, rewards
from weft.errors import ConfigError, DataError, UserError
from weft.host import http
from weft.host.http import parse_retry_after
from weft.host.reward import RewardFunction
from weft.host.spec import RewardOptions, locate, parse_reward
from weft.host.verifiers import _judge_server
from weft.host.verifiers._judge_server import SCORE, JudgeEndpoint, ScoreScale, find_cache_file
from weft.host.verifiers.judge import judge

KEY = "sk-very/secret-0123456789"
Reply = tuple[int, Mapping[str, str], Any]  # status, headers, body


def said(text: str | None, *, paid: int = 10, made: int = 3, reason: str = "stop") -> Reply:
    """Return a chat completion."""
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": reason}
    return (
        200,
        {},
        {"choices": [choice], "usage": {"prompt_tokens": paid, "completion_tokens": made}},
    )


class Stub:
    """Server that records its requests and answers them with a function.

    The function gets a request's last message and its number.
    """

    def __init__(self) -> None:
        self.reply: Callable[[str, int], Reply] = lambda text, number: said("Score: 10")
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.times: list[float] = []
        self.open = self.most = 0
        self.drip = 0.0  # seconds between the bytes of an answer
        self.lock = threading.Lock()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with stub.lock:
                    number = len(stub.bodies)
                    stub.bodies.append(body)
                    stub.headers.append(
                        {name.lower(): value for name, value in self.headers.items()}
                    )
                    stub.paths.append(self.path)
                    stub.times.append(time.monotonic())
                    stub.open += 1
                    stub.most = max(stub.most, stub.open)
                status, headers, made = stub.reply(body["messages"][-1]["content"], number)
                with stub.lock:
                    stub.open -= 1
                content = made if isinstance(made, bytes) else json.dumps(made).encode()
                with contextlib.suppress(OSError):  # the client has gone
                    self.send_response(status)
                    for name, value in {"Content-Length": str(len(content)), **headers}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    for piece in (
                        [content] if not stub.drip else [bytes([byte]) for byte in content]
                    ):
                        self.wfile.write(piece)
                        time.sleep(stub.drip)

            def log_message(self, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 64
            daemon_threads = True

            def handle_error(self, *args: Any) -> None:  # clients that have disconnected
                pass

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def stub() -> Iterator[Stub]:
    made = Stub()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove the key and the server's URL, and use a temporary cache and short waits."""
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(http, "BACKOFF_S", 0.01)


def judged(
    url: str, *completions: str, prompt_text: str = "p", columns: Any = None, **options: Any
) -> Any:
    """Return (rewards, metrics) of some completions; there is no cache unless one is given."""
    given = {"url": url, "model": "m", "cache": False, **(columns or {}), **options}
    result = judge(
        [prompt_text] * len(completions),
        completions,
        completion_ids=[[]] * len(completions),
        **given,
    )
    return result if isinstance(result, tuple) else asyncio.run(result)


def of_each(scores: Mapping[str, Any]) -> Callable[[str, int], Reply]:
    """Return answers by the text of a request's message; the answers of a list are used in turn."""
    left = {
        text: list(value) if isinstance(value, list) else value for text, value in scores.items()
    }

    def reply(text: str, number: int) -> Reply:
        value = left[text]
        value = value.pop(0) if isinstance(value, list) else value
        return value if isinstance(value, tuple) else said(f"Score: {value}")

    return reply


# -- what is asked, and how the answer is read


def test_completions_are_asked_about_and_scored(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    stub.reply = lambda text, number: said(
        "Good. Score: 10" if "right" in text else "Bad.\n**Score: 1/10**"
    )
    options = {"system": "You are fair.", "extra": {"seed": 3}, "max_tokens": 99}
    made, metrics = judged(
        stub.url + "/", "right", "false", "right too", prompt_text="2+2?", **options
    )
    assert made == [1.0, 0.0, 1.0]
    counts = {
        "calls": 3,
        "cached": 0,
        "failed": 0,
        "unreadable": 0,
        "input_tokens": 30,
        "output_tokens": 9,
    }
    assert metrics == counts
    assert set(stub.paths) == {"/v1/chat/completions"}
    assert {head["authorization"] for head in stub.headers} == {f"Bearer {KEY}"}
    body = next(b for b in stub.bodies if "<answer>\nright\n" in b["messages"][1]["content"])
    assert {name: body[name] for name in ("model", "temperature", "max_tokens", "seed")} == {
        "model": "m",
        "temperature": 0.0,
        "max_tokens": 99,
        "seed": 3,
    }
    assert body["messages"][0] == {"role": "system", "content": "You are fair."}
    assert "2+2?" in body["messages"][1]["content"]
    assert "from 1 (useless) to 10 (" in body["messages"][1]["content"]


def test_what_the_server_decides_is_not_sent(stub: Stub) -> None:
    judged(stub.url, "c", temperature=None, max_tokens=None, extra={"max_completion_tokens": 5})
    assert set(stub.bodies[0]) == {"model", "messages", "max_completion_tokens"}
    assert "authorization" not in stub.headers[0], "there is no key"


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Score: 7", 7),
        ("[[7]]", 7),
        (" 7\n", 7),
        ("7/10", 7),
        ("**7.**", 7),
        ("Score: 2, no: score: 8", 8),
        ("**Score:** 7/10", 7),
        ("Final score: [[ 9 ]]", 9),
        ("Rating (1-10): 4", 4),
        ('{"final_score": 7.5}', 7.5),
        ("_Score_ - 5", 5),
        ("the grade is 2", 2),
        ("Score:\n10", 10),
        ("<think>score: 3</think>[[6]]", 6),
        ("Score: 11", None),
        ("Score: -3", None),
        ("Score: 5. Score: 0", None),
        ("7 apples", None),
        ("", None),
        ("Score: ten", None),
        ("underscore 5", None),
    ],
)
def test_scores_are_found_in_answers(answer: str, score: float | None) -> None:
    assert ScoreScale(SCORE, 1, 10).parse_reward(answer) == (
        None if score is None else pytest.approx((score - 1) / 9)
    )


def test_scales_and_patterns_of_ones_own(stub: Stub) -> None:
    assert ScoreScale(r"<s>(.*?)</s>", -2, 2).parse_reward("<s>9</s> <s> -1 </s>") == 0.25
    assert ScoreScale(r"(?:yes|(no))", 0, 1).parse_reward("yes") is None, "the group took no part"
    assert ScoreScale(r"=(\w+)", 0, 1).parse_reward("=nan") is None
    stub.reply = lambda text, number: said("verdict=3")
    assert judged(stub.url, "c", pattern=r"verdict=(\d)", low=0, high=4)[0] == [0.75]


def test_templates_take_columns_and_leave_braces_alone(stub: Stub) -> None:
    text = (
        'Q {prompt} A {completion} R {answer} T {tags} {low}-{high} JSON {"score": 1} {{answer}} {}'
    )
    columns = {
        "answer": ["{prompt} {0}", None, "x"],
        "tags": [["ä", 1]] * 3,
        "model_name": ["z"] * 3,
    }
    made, metrics = judged(
        stub.url, "{completion}{answer}{", "b", "c", prompt_text="{x}", prompt=text, columns=columns
    )
    assert made == [1.0, None, 1.0], "the second row has no answer to be compared with"
    assert metrics["calls"] == 2
    asked = (
        'Q {x} A {completion}{answer}{ R {prompt} {0} T ["ä", 1] 1-10 JSON {"score": 1} {answer} {}'
    )
    assert asked in [body["messages"][0]["content"] for body in stub.bodies]


def test_a_placeholder_must_be_a_column(stub: Stub) -> None:
    with pytest.raises(
        DataError,
        match=r"names \{anser\}.*did you mean answer\? .*columns are: answer, id; write \{\{anser\}\}",
    ):
        judged(stub.url, "c", prompt="{completion} {anser}", columns={"id": [1], "answer": ["a"]})
    assert not stub.bodies


def test_votes_are_averaged(stub: Stub) -> None:
    answers = {"a": [1, said("none"), 10, 10], "b": [said("-")] * 4}
    stub.reply = of_each(answers)
    options = {"prompt": "{completion}", "votes": 4, "temperature": 0.7}
    made, metrics = judged(stub.url, "a", "b", on_unreadable=-1.0, **options)
    assert made == [pytest.approx(2 / 3), -1.0], (
        "a vote that cannot be read is left out where others can"
    )
    assert (metrics["calls"], metrics["unreadable"]) == (8, 5)
    stub.reply = of_each(answers)
    assert judged(stub.url, "a", **options)[0] == [pytest.approx(2 / 3)], (
        "one readable vote is enough to go on"
    )


def test_costs_are_counted(stub: Stub) -> None:
    stub.reply = lambda text, number: said("Score: 4", paid=1000, made=20)
    metrics = judged(stub.url, "a", "b", input_price=2.5, output_price=10.0)[1]
    assert metrics["cost"] == pytest.approx((2000 * 2.5 + 40 * 10) / 1e6)
    assert (metrics["input_tokens"], metrics["output_tokens"]) == (2000, 40)
    assert judged(stub.url, "a", output_price=10.0)[1]["cost"] == pytest.approx(2e-4)
    stub.reply = lambda text, number: (200, {}, {"choices": [{"message": {"content": "7"}}]})
    assert judged(stub.url, "a", input_price=1.0)[1]["cost"] == 0.0, (
        "the server does not say what was used"
    )


# -- requests that fail


def test_no_more_requests_are_in_flight_than_allowed(stub: Stub) -> None:
    together = threading.Barrier(3, timeout=120)

    def reply(text: str, number: int) -> Reply:
        together.wait()
        time.sleep(0.03)  # enough time for a fourth request
        return said("Score: 4")

    stub.reply = reply
    judged(stub.url, *(f"c{n}" for n in range(12)), concurrency=3)
    assert stub.most == 3


def test_a_busy_server_is_asked_again_when_it_says(stub: Stub) -> None:
    stub.reply = of_each({"a": [(429, {"Retry-After": "0.4"}, {}), (503, {}, b"loading"), 10]})
    made, metrics = judged(stub.url, "a", prompt="{completion}")
    assert (made, metrics["calls"], metrics["failed"]) == ([1.0], 3, 0)
    assert stub.times[1] - stub.times[0] >= 0.4
    assert stub.times[2] - stub.times[1] >= 0.01, "at least half of the second wait"


def test_waits_grow(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BACKOFF_S", 0.1)
    stub.reply = lambda text, number: (500, {}, b"")
    with pytest.raises(
        UserError,
        match=r"status 500 \(asked 4 times\); look at the server's log, or set on_failure",
    ):
        judged(stub.url, "a", retries=3)
    gaps = [after - before for before, after in zip(stub.times, stub.times[1:], strict=False)]
    assert len(gaps) == 3
    for gap, least in zip(gaps, (0.05, 0.1, 0.2), strict=True):
        assert gap >= least


def test_retry_after_may_be_a_date_or_too_far_away(stub: Stub) -> None:
    assert parse_retry_after(
        format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    ) == pytest.approx(30, abs=2)
    assert (
        parse_retry_after("Wed, 21 Oct 2015 07:28:00 GMT")
        == parse_retry_after("soon")
        == parse_retry_after("-1")
        == parse_retry_after(None)
        == 0.0
    )
    stub.reply = lambda text, number: (429, {"Retry-After": "3600"}, {})
    with pytest.raises(
        UserError, match=r"status 429, retry after 3600 seconds: '\{\}'; lower concurrency"
    ):
        judged(stub.url, "a")
    assert len(stub.bodies) == 1


@pytest.mark.parametrize(
    ("reply", "message", "times"),
    [
        (
            (401, {}, {"error": f"wrong key {KEY[:7]}"}),
            "status 401; put a valid key into the environment variable",
            1,
        ),
        (
            (404, {}, {"error": "no model m"}),
            r"status 404: .*no model m.*; check model, and url",
            1,
        ),
        ((400, {}, {"error": KEY}), r"status 400: '\{\"error\": \"\[key\]\"\}'; check model", 1),
        (
            (307, {"Location": "/v1/elsewhere"}, {}),
            "status 307; redirects are not followed; set url",
            1,
        ),
        (
            (200, {}, b"<html>hello</html>"),
            r"not a chat completion \(asked 2 times\): '<html>hello</html>'; check that url",
            2,
        ),
        ((200, {}, {"error": "overloaded"}), "not a chat completion .*overloaded", 2),
        (
            (500, {}, KEY.replace("/", "\\/").encode()),
            r"status 500 \(asked 2 times\): .*\[key\].*server's log",
            2,
        ),
    ],
)
def test_failures_name_url_status_and_fix(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, reply: Reply, message: str, times: int
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    stub.reply = lambda text, number: reply
    with pytest.raises(UserError, match=message) as failure:
        judged(stub.url, "a", retries=1)
    assert str(failure.value).startswith(f"judge: url={stub.url}/chat/completions: ")
    assert "or set on_failure to the reward" in str(failure.value)
    assert "secret" not in str(failure.value)
    assert len(stub.bodies) == times
    assert set(stub.paths) == {"/v1/chat/completions"}, "the key goes nowhere else"
    with pytest.warns(RuntimeWarning, match=r"the reward is on_failure=-0\.5"):
        made, metrics = judged(stub.url, "a", "b", retries=0, on_failure=-0.5)
    assert made == [-0.5, -0.5]
    assert (metrics["failed"], metrics["calls"], metrics["input_tokens"]) == (2, 2, 0)


def test_one_failure_ends_what_is_still_asked(stub: Stub) -> None:
    """The error is raised without waiting for requests that hang."""
    gone, answered = threading.Event(), []

    def reply(text: str, number: int) -> Reply:
        if text == "a":
            return 400, {}, {}
        gone.wait(120)
        answered.append(text)
        return said("5")

    stub.reply = reply
    with pytest.raises(UserError, match="status 400"):
        judged(stub.url, "b", "c", "a", prompt="{completion}")
    assert not answered
    gone.set()


def test_a_server_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(
        UserError,
        match=rf"127.0.0.1:{port}/v1/chat/completions: ConnectError \(asked 3 times\).*; start",
    ):
        judged(f"http://127.0.0.1:{port}/v1", "a", retries=2)


def test_a_server_that_does_not_answer(stub: Stub) -> None:
    gone = threading.Event()
    stub.reply = lambda text, number: (gone.wait(5), said("5"))[1]
    with pytest.raises(
        UserError,
        match=r"no answer within timeout_s=0.2 seconds \(asked 2 times\); raise timeout_s",
    ):
        judged(stub.url, "a", timeout_s=0.2, retries=1)
    gone.set()
    stub.reply, stub.drip = lambda text, number: said("5"), 0.02
    with pytest.raises(
        UserError, match=r"no answer within timeout_s=0\.2 seconds; raise timeout_s"
    ):
        judged(stub.url, "a", timeout_s=0.2, retries=0)


def test_answers_without_a_score(stub: Stub) -> None:
    stub.reply = lambda text, number: (
        said("It is hard " * 40 + "to say.") if number else said(None, reason="length")
    )
    with pytest.raises(
        UserError,
        match="no score from 0 to 5 in the answer '', which was cut at max_tokens=512; change",
    ):
        judged(stub.url, "a", low=0, high=5)
    with pytest.raises(
        UserError,
        match=r"in the answer '\.\.\..*hard to say\.'; change prompt, pattern or max_tokens, or set",
    ):
        judged(stub.url, "a")
    made, metrics = judged(stub.url, "a", "b", on_unreadable=0.25)
    assert made == [0.25, 0.25]
    assert (metrics["unreadable"], metrics["failed"], metrics["output_tokens"]) == (2, 0, 6), (
        "it was paid for"
    )


# -- the cache


def test_answers_are_kept(stub: Stub, tmp_path: Path) -> None:
    folder = str(tmp_path / "kept")
    stub.reply = lambda text, number: said("Score: 4") if "b" not in text else said("?")
    options = {"cache": folder, "prompt": "{completion}", "on_unreadable": 0.0, "input_price": 1.0}
    made, metrics = judged(stub.url, "a", "a", "b", **options)
    assert made == [pytest.approx(1 / 3)] * 2 + [0.0]
    assert (metrics["calls"], metrics["cached"], metrics["unreadable"]) == (2, 1, 1), (
        "one request for equal completions"
    )
    made, metrics = judged(stub.url, "a", "b", **options)
    assert made == [pytest.approx(1 / 3), 0.0]
    assert (metrics["calls"], metrics["cached"]) == (1, 1), (
        "what could not be read is asked for again"
    )
    made, metrics = judged(stub.url, "a", **options)
    assert (metrics["calls"], metrics["cached"], metrics["cost"], metrics["output_tokens"]) == (
        0,
        1,
        0.0,
        0,
    )
    for other in (
        {"model": "n"},
        {"max_tokens": 7},
        {"system": "s"},
        {"extra": {"seed": 1}},
        {"temperature": 0.5},
    ):
        assert judged(stub.url, "a", **options | other)[1]["calls"] == 1, other
    made, metrics = judged(stub.url, "a", **options | {"high": 7})
    assert (made, metrics["calls"]) == ([0.5], 0), "the scale is the reader's"
    assert judged(stub.url, "a", **options | {"high": 3})[1]["calls"] == 1, (
        "what was read then cannot be read now"
    )
    assert judged(stub.url, "a", "a", **options | {"cache": False})[1]["calls"] == 2


def test_each_vote_is_kept(stub: Stub, tmp_path: Path) -> None:
    stub.reply = lambda text, number: said(str(number + 1))
    options = {"cache": str(tmp_path / "votes.sqlite"), "temperature": 1.0}
    first = judged(stub.url, "a", votes=3, **options)
    second = judged(stub.url, "a", votes=4, **options)
    assert first[0] == [pytest.approx(1 / 9)]
    assert second[0] == [pytest.approx(1.5 / 9)]
    assert (second[1]["calls"], second[1]["cached"]) == (1, 3)


def test_failures_are_not_kept(stub: Stub, tmp_path: Path) -> None:
    stub.reply = lambda text, number: said("5") if number else (400, {}, {})
    with pytest.warns(RuntimeWarning):
        assert judged(stub.url, "a", cache=str(tmp_path), on_failure=0.0)[0] == [0.0]
    assert judged(stub.url, "a", cache=str(tmp_path), on_failure=0.0)[0] == [pytest.approx(4 / 9)]


def test_where_the_cache_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_cache_file(False) is find_cache_file("") is None
    assert (
        find_cache_file(None)
        == find_cache_file(True)
        == tmp_path / "cache" / "weft" / "judge" / "answers.sqlite"
    )
    assert find_cache_file("some/folder.v2") == Path("some/folder.v2/answers.sqlite")
    assert find_cache_file("~/a.db") == Path.home() / "a.db"
    (tmp_path / "file").touch()
    assert find_cache_file(str(tmp_path / "file")) == tmp_path / "file"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert find_cache_file(None) == Path.home() / ".cache" / "weft" / "judge" / "answers.sqlite"


PROCESS = """
import asyncio, sys
from weft.host.verifiers.judge import judge
texts = [f"c{n}" for n in range(int(sys.argv[3]), int(sys.argv[4]))]
options = {"url": sys.argv[1], "model": "m", "cache": sys.argv[2]}
print(asyncio.run(judge(["p"] * len(texts), texts, completion_ids=[[]] * len(texts), **options)))
"""


def test_processes_share_the_cache(stub: Stub, tmp_path: Path) -> None:
    """They create the file and write to it at the same time; nothing is lost and nothing fails."""
    given = [sys.executable, "-c", PROCESS, stub.url, str(tmp_path)]
    running = [
        subprocess.Popen(
            [*given, str(20 * n), str(20 * n + 20)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(2)
    ]
    for process in running:
        out, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, ""), err
        assert "'calls': 20" in out
    metrics = judged(stub.url, *(f"c{n}" for n in range(40)), cache=str(tmp_path))[1]
    assert (metrics["calls"], metrics["cached"]) == (0, 40)
    assert oct((tmp_path / "answers.sqlite").stat().st_mode)[-3:] == "600"


def test_many_open_a_new_cache_at_once(tmp_path: Path) -> None:
    failures: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(10):
            file = tmp_path / str(n) / "x.sqlite"

            def use(index: int, file: Path = file) -> None:
                try:
                    _judge_server.JudgeCache(file).put(str(index), "text")
                except RuntimeWarning as error:
                    failures.append(str(error))

            threads = [threading.Thread(target=use, args=(index,)) for index in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert [_judge_server.JudgeCache(file).get(str(index)) for index in range(8)] == [
                "text"
            ] * 8
    assert not failures


def test_a_broken_cache_is_told_of_once_and_left(stub: Stub, tmp_path: Path) -> None:
    file = tmp_path / "broken.sqlite"
    file.write_bytes(b"this is no database" * 100)
    with pytest.warns(
        RuntimeWarning,
        match=r"broken\.sqlite' cannot be used .*; this process continues without it",
    ) as told:
        for _ in range(3):
            assert judged(stub.url, "a", cache=str(file))[0] == [1.0]
    assert len(told) == 1
    assert len(stub.bodies) == 3
    (tmp_path / "plain").touch()
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        assert judged(stub.url, "a", cache=str(tmp_path / "plain" / "folder"))[0] == [1.0]


def test_a_locked_cache_is_left(
    stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_judge_server, "BUSY_S", 0.05)
    judged(stub.url, "a", cache=str(tmp_path))
    held = sqlite3.connect(tmp_path / "answers.sqlite", isolation_level=None)
    held.execute("BEGIN EXCLUSIVE")
    with pytest.warns(RuntimeWarning, match="database is locked"):
        made, metrics = judged(stub.url, "a", "b", "c", cache=str(tmp_path))
    assert made == [1.0] * 3
    assert metrics["cached"] == 1, "reading needs no lock"
    held.close()


# -- the key


def test_the_key_is_written_nowhere(
    stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if a server repeats it."""
    monkeypatch.setenv("MY_KEY", f" {KEY}\n")
    hidden = "".join(f"\\u{ord(letter):04x}" for letter in KEY)
    escaped = (
        json.dumps({"choices": [{"message": {"content": "KEY Score: 7"}}]})
        .replace("KEY", hidden)
        .encode()
    )
    stub.reply = lambda text, number: (200, {}, escaped)
    options = {"cache": str(tmp_path), "api_key_env": "MY_KEY"}
    assert judged(stub.url, "a", **options)[1]["calls"] == 1
    assert stub.headers[0]["authorization"] == f"Bearer {KEY}"
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"[key] Score: 7" in written
    assert b"secret" not in written
    with pytest.raises(UserError) as failure:
        judged(stub.url, "b", pattern="x(y)", **options)
    assert "[key] Score: 7" in str(failure.value)
    assert "secret" not in str(failure.value)
    assert "secret" not in repr(JudgeEndpoint.from_options(stub.url, "MY_KEY", False))


@pytest.mark.parametrize(
    ("url", "variable", "insecure", "message"),
    [
        (
            "http://judge.example/v1",
            "MY_KEY",
            False,
            "url='http://judge.example/v1' would send the key unencrypted",
        ),
        (
            "http://10.0.0.5:8000/v1",
            "MY_KEY",
            False,
            "use https, set api_key_env to null .* or set insecure to true",
        ),
        ("http://127.0.0.1.example/v1", "MY_KEY", False, "unencrypted"),
        ("http://judge.example/v1", "MY_KEY", True, None),
        ("http://judge.example/v1", None, False, None),
        ("https://judge.example/v1", "MY_KEY", False, None),
        ("http://localhost:1/v1", "MY_KEY", False, None),
        ("http://[::1]:1/v1", "MY_KEY", False, None),
        ("http://0.0.0.0:8000/v1/chat/completions", "MY_KEY", False, None),
        (
            "https://me:pass-secret@judge.example/v1",
            None,
            False,
            "url must not contain a user, password, query or fragment",
        ),
        ("me:pass-secret@judge.example/v1", None, False, "url must not contain a user"),
        ("https://judge.example/v1?key=secret", None, False, "url must not contain a user"),
        ("judge.example/v1", None, False, "url='judge.example/v1' must be a base URL such as http"),
        ("ftp://judge.example", None, False, "must be a base URL"),
        ("http://x:y/v1", None, False, "must be a base URL"),
        (
            "https://x/v1",
            "sk-secret",
            False,
            "api_key_env must be the name of an environment variable, not a key",
        ),
        (
            "https://x/v1",
            "sk_secret",
            False,
            "api_key_env names an environment variable that is not set",
        ),
        ("https://x/v1", "TWO_LINES", False, "must contain only ASCII characters without spaces"),
        ("https://x/v1", "MY_KEY", "no", "insecure='no' must be true or false"),
    ],
)
def test_where_a_key_may_go(
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    variable: str | None,
    insecure: Any,
    message: str | None,
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    monkeypatch.setenv("TWO_LINES", "sk-secret\nsk-secret")
    if message is None:
        made = JudgeEndpoint.from_options(url, variable, insecure)
        assert made.url == url.removesuffix("/chat/completions") + "/chat/completions"
        assert made.key == (None if variable is None else KEY)
        return
    with pytest.raises(ConfigError, match=message) as refusal:
        JudgeEndpoint.from_options(url, variable, insecure)
    assert "secret" not in str(refusal.value)


def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert judged(stub.url, "a", retries=0)[0] == [1.0]


# -- as a run uses it


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": None}, "url is not set, and neither is the environment variable OPENAI_BASE_URL"),
        ({"model": None}, "model=None must be the name of the model on the server"),
        ({"modle": "m"}, "has no option 'modle'; did you mean model"),
        ({"api_key": "sk-secret"}, "has no option 'api_key'; did you mean api_key_env"),
        ({"prompt": "Score {prompt}"}, "must contain {completion}"),
        ({"prompt": "Score {{completion}}"}, "must contain {completion}"),
        ({"system": 5}, "system=5 must be a text"),
        ({"pattern": "(a)(b)"}, "has 2 groups; it must have one"),
        ({"pattern": "("}, "must be a regular expression"),
        ({"low": 5, "high": 5}, "high=5 must be a finite number above low=5"),
        ({"low": True}, "low=True must be"),
        ({"temperature": -1}, "temperature=-1 must be 0 or more"),
        ({"max_tokens": 0}, "max_tokens=0 must be a whole number of at least 1"),
        ({"votes": 2}, "votes=2 at temperature=0 would give equal votes"),
        ({"concurrency": 0}, "concurrency=0 must be"),
        ({"retries": 1.5}, "retries=1.5 must be"),
        ({"timeout_s": 0}, "timeout_s=0 must be above 0 seconds"),
        ({"on_failure": "zero"}, "on_failure='zero' must be a finite number, or null"),
        ({"on_unreadable": float("nan")}, "on_unreadable=nan must be"),
        ({"cache": 7}, "cache=7 must be the path"),
        ({"input_price": -1}, "input_price=-1 must be 0 or more"),
        ({"extra": {"stream": True}}, "extra must not contain 'stream'; streaming is"),
        ({"extra": {"api_key": "sk-secret"}}, "extra must not contain 'api_key'; use api_key_env"),
        ({"extra": {"max_tokens": 3}}, "'max_tokens'; use the option max_tokens"),
        ({"extra": {"x": float("inf")}}, "extra must contain only plain JSON values"),
        ({"extra": [1]}, "extra must be a mapping"),
    ],
)
def test_wrong_options_are_refused_before_the_run(options: Mapping[str, Any], message: str) -> None:
    args = {"url": "http://127.0.0.1:1/v1", "model": "m", **options}
    with pytest.raises(ConfigError, match=message) as refusal:
        locate(parse_reward([{"name": "judge", "args": args}])[0])
    assert "secret" not in str(refusal.value)


def test_right_options_ask_nobody() -> None:
    args = {"url": "http://127.0.0.1:1/v1", "model": "m", "votes": 3, "temperature": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a coroutine that nobody awaits
        assert locate(parse_reward([{"name": "judge", "args": args}])[0]).verifier
    assert judged(str(args["url"])) == ([], {})


def test_it_runs_in_the_reward_processes(
    stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have the key and the URL from the environment."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_BASE_URL", stub.url)
    stub.reply = of_each(
        {"2+2? a": 1, "2+2? ab": 10, "2+2? c": 4, "1+1? a": 7, "1+1? b": 1, "1+1? c": 1}
    )
    args = {"model": "m", "prompt": "{question} {completion}", "cache": str(tmp_path)}
    function = RewardFunction(
        RewardOptions([{"name": "judge", "weight": 2.0, "args": args}], num_workers=2)
    )
    told, again = context(), context()
    whole = batch(
        [["a", "ab", "c"], ["a", "b", "c"]], question=["2+2?", "1+1?"], model=["gpt", "gpt"]
    )
    try:
        function.begin(whole.select(ids=["p1"]), context())
        expected = rounded([0, 2, 2 / 3, 4 / 3, 0, 0], 1)  # stored in float32
        assert rewards(function(whole, told)) == expected
        assert rewards(function(whole, again)) == expected
    finally:
        function.pool.close()
    assert told.metrics["reward/judge/calls"] == 6
    assert told.metrics["reward/judge/input_tokens"] == 60
    assert (again.metrics["reward/judge/calls"], again.metrics["reward/judge/cached"]) == (0, 6)
    assert {head["authorization"] for head in stub.headers} == {f"Bearer {KEY}"}
    assert {body["model"] for body in stub.bodies} == {"m"}, "a column does not set an option"


def test_what_stops_a_run_names_the_samples(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    gone = threading.Event()

    def reply(text: str, number: int) -> Reply:
        if "b" in text:
            gone.wait(300)
        return 403, {}, {"error": KEY}

    stub.reply = reply
    args = {"url": stub.url, "model": "m", "prompt": "{completion}"}
    function = RewardFunction(
        RewardOptions([{"name": "judge", "args": args}], num_workers=1, timeout_s=300.0)
    )
    try:
        with pytest.raises(
            UserError,
            match=r"reward 'judge' failed on p0\[0\]: judge: url=.* status 403; put a key",
        ) as told:
            function(batch([["a"]]), context())
        assert "secret" not in str(told.value)
    finally:
        function.pool.close()
    function = RewardFunction(
        RewardOptions([{"name": "judge", "args": args}], num_workers=1, timeout_s=2.0)
    )
    try:
        with pytest.raises(
            UserError, match=r"did not finish within reward_timeout_s=2 seconds on p0\[0\]"
        ):
            function(batch([["b"]]), context())
    finally:
        gone.set()
        function.pool.close()
