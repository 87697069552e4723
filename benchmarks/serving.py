"""How soon `weft serve` answers health while it is kept busy: large bodies, slow templates, long
texts, many clients, many evaluation requests.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

from benchmarks import model, results

GOAL = 100.0  # ms that health may take
EVERY = 0.02  # seconds between two questions
TOKEN = "token-of-the-benchmark"
STARTED, LONGEST = 300.0, 120.0  # seconds that the server may take to start, and one request
SLOW = (
    "{% for m in messages %}{% for i in range(99999 if m.content == 'slow' else 0) %}{% for j in "
    "range(999) %}{{ j }}"
    "{% endfor %}{% endfor %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
)
Request = tuple[str, bytes]


def requests() -> dict[str, tuple[int, Request]]:
    """Case -> (clients, what each of them sends again and again)."""
    draw = random.Random(1)
    words = [
        "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randrange(2, 9)))
        for _ in range(90_000)
    ]

    def complete(prompt: Any, new: int = 1) -> Request:
        return "/v1/completions", json.dumps(
            {"model": "policy", "prompt": prompt, "max_tokens": new}
        ).encode()

    def score(counts: Sequence[int]) -> Request:
        """As lm_eval's `local-completions` asks for the log-likelihoods of prompts of these many
        tokens.
        """
        rows = [[draw.randrange(3, 30_000) for _ in range(count)] for count in counts]
        fields = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
        body = {"model": "policy", "prompt": rows, **fields}
        return "/v1/completions", json.dumps(body).encode()

    slow = {"model": "policy", "messages": [{"role": "user", "content": "slow"}], "max_tokens": 1}
    return {
        "4 MB of JSON": (4, complete([7] * 1_330_000)),
        "15 MB of JSON": (4, complete([7] * 5_000_000)),
        "4 MB of text": (4, complete("a few words " * 333_000)),
        "slow template": (8, ("/v1/chat/completions", json.dumps(slow).encode())),
        "500 KB of text": (8, complete(" ".join(words)[:500_000])),
        "64 clients": (64, complete("Once upon a time", new=32)),
        "64 evaluations": (64, score([200])),
        "64 evaluations of 8 prompts": (64, score([200] * 8)),
        "64 long evaluations": (64, score([2000])),
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = results.parser("serving", str(__doc__), repeats=3)
    parser.add_argument(
        "--seconds", type=results.seconds, default=10.0, help="of each turn (default: %(default)s)"
    )
    parser.add_argument(
        "--case", action="append", choices=list(requests()), help="this load alone; may be repeated"
    )
    arguments = parser.parse_args(words)
    results.start(arguments)
    seconds = 2.0 if arguments.quick else arguments.seconds
    cases = {
        name: made for name, made in requests().items() if name in (arguments.case or requests())
    }
    runs: dict[str, list[dict[str, list[float]]]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as name:
        policy = model.write_model(
            Path(name) / "policy", model.SHAPES["tiny"], arguments.data / "tokenizers" / "llama2"
        )
        (policy / "chat_template.jinja").write_text(SLOW)
        with Server(policy) as server:
            for _ in range(arguments.repeats):
                # idle before each, so that both meet the same machine
                for case, (clients, request) in cases.items():
                    time.sleep(arguments.rest)
                    idle = probed(server.port, seconds / 4)
                    with Load(server.port, clients, request):
                        busy = probed(server.port, seconds)
                    runs[case].append(
                        {**busy, "idle": idle["health"], "answered": [float(server.is_up())]}
                    )
    rows = [row(case, cases[case][0], measured) for case, measured in runs.items()]
    notes = [
        "ms that /v2/health/live takes on a connection of its own, asked every 20 ms; idle: "
        "before, without a load;",
        "machine: ms by which a pause of 1 ms in the asking process is late meanwhile, which no "
        "server can be blamed for",
    ]
    settings = {"repeats": arguments.repeats, "seconds": seconds}
    results.report(results.Results("serving", rows, settings, runs, notes), arguments)


def row(case: str, clients: int, measured: Sequence[dict[str, list[float]]]) -> dict[str, Any]:
    health, idle, late = (
        [each for one in measured for each in one[name]] for name in ("health", "idle", "machine")
    )
    return {
        "case": case,
        "clients": clients,
        "asked": len(health),
        "idle": median(idle),
        "idle, most": max(idle),
        "health": median(health),
        "health, 95%": sorted(health)[int(0.95 * len(health))],
        "health, most": max(health),
        "machine, most": max(late),
        "goal": GOAL,
    }


def probed(port: int, seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each answer of health, and by which each pause was late."""
    found: dict[str, list[float]] = {"health": [], "machine": []}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.perf_counter()
        if send(port, "GET", "/v2/health/live") != 200:
            raise RuntimeError("health did not answer 200")
        found["health"].append(1e3 * (time.perf_counter() - began))
        began = time.perf_counter()
        time.sleep(1e-3)
        found["machine"].append(1e3 * (time.perf_counter() - began) - 1.0)
        time.sleep(EVERY)
    return found


def send(port: int, method: str, path: str, body: bytes | None = None) -> int:
    """The status of an answer; 0 where the connection breaks off, as it does after a body that is
    refused.
    """
    connection = HTTPConnection("127.0.0.1", port, timeout=LONGEST)
    try:
        connection.request(
            method, path, body, {"Authorization": f"Bearer {TOKEN}", "Connection": "close"}
        )
        reply = connection.getresponse()
        reply.read()
        return reply.status
    except (OSError, HTTPException):
        return 0
    finally:
        connection.close()


class Server:
    """`weft serve` in a process of its own."""

    def __init__(self, policy: Path) -> None:
        words = [
            "serve",
            str(policy),
            "--name",
            "policy",
            "--port",
            "0",
            "--device",
            "cpu",
            "--max-prompt-tokens",
            "400000",
        ]
        self._log = policy.with_name("serve.txt")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "weft.cli.main", *words],
                env={**os.environ, "WEFT_SERVE_TOKEN": TOKEN},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Server:
        end = time.monotonic() + STARTED
        while (port := self._announced()) is None:
            if self._process.poll() is not None or time.monotonic() > end:
                self.__exit__()
                raise RuntimeError(f"weft serve did not start:\n{self._log.read_text()}")
            time.sleep(0.1)
        self.port = port
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def is_up(self) -> bool:
        return send(self.port, "GET", "/v2/health/ready") == 200

    def _announced(self) -> int | None:
        """The port that the server says it listens on."""
        _, found, rest = self._log.read_text(errors="replace").partition("http://127.0.0.1:")
        digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
        return int(digits) if found and digits and len(digits) < len(rest) else None


class Load:
    """Clients that send a request again and again, in a process of their own, whose work must not
    delay who measures.
    """

    def __init__(self, port: int, clients: int, request: Request) -> None:
        context = multiprocessing.get_context("spawn")
        self._stop, self._begun = context.Event(), context.Event()
        self._process = context.Process(
            target=_clients, args=(port, clients, request, self._begun, self._stop)
        )

    def __enter__(self) -> None:
        self._process.start()
        self._begun.wait(STARTED)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._process.join(LONGEST)
        self._process.kill()


def _clients(port: int, clients: int, request: Request, begun: Event, stop: Event) -> None:
    def client() -> None:
        while not stop.is_set():
            send(port, "POST", *request)

    threads = [Thread(target=client, daemon=True) for _ in range(clients)]
    for each in threads:
        each.start()
    begun.set()
    for each in threads:
        each.join()  # to the end of its request, so that the next case meets an idle server


if __name__ == "__main__":
    main()
