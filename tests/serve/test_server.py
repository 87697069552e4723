"""The server over its ports: real clients, 64 at once, and requests that nobody should send."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.bounds import gamma, rounded
from tests.serve.serving import TOKEN, make_reward, serving
from tests.tiny import make_llama
from weft.engine.generation.generate import BatchGenerator
from weft.engine.spec import ModelSpec
from weft.errors import ConfigError
from weft.registry import backends
from weft.serve.exchange import ServerLimits
from weft.serve.server import Server, ServerPorts
from weft.serve.worker import build_sample
from weft.topology import Layout

AUTH = {"Authorization": f"Bearer {TOKEN}"}
HELLO = [{"role": "user", "content": "Hello there"}]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve")
    make_llama(folder / "policy")
    make_reward(folder / "reward")
    return folder


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Server]:
    words = (str(root / "policy"), "--reward", str(root / "reward"), "--max-new-tokens", "200")
    with serving(*words, body_bytes=200_000, body_seconds=4.0) as running:
        yield running


@pytest.fixture(scope="module")
def wide(root: Path) -> Iterator[httpx.Client]:
    """Of a server of the policy in float64, whose log-probs are stored in float32."""
    with (
        serving(str(root / "policy"), "--dtype", "float64", grpc=False) as running,
        httpx.Client(
            base_url=running.urls["http"], headers=AUTH, timeout=60, trust_env=False
        ) as made,
    ):
        yield made


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(
        base_url=server.urls["http"], headers=AUTH, timeout=60, trust_env=False
    ) as made:
        yield made


def chat(client: httpx.Client, **more: Any) -> dict[str, Any]:
    body = {"model": "policy", "messages": HELLO, "max_tokens": 12, "seed": 3, **more}
    return client.post("/v1/chat/completions", json=body).raise_for_status().json()


def streamed(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream; its last says that it is done."""
    with client.stream("POST", path, json={**body, "stream": True}) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def eventually(true: Any, seconds: float = 120.0) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(true())


def continued(engine: Any, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """(tokens, log-probs) of the likeliest continuation, each token by a pass of its own over
    everything before it.
    """
    tokens, logprobs = [], []
    for _ in range(count):
        ids = [*prompt, *tokens]
        every = [[*ids, token] for token in range(320)]
        scored = (
            engine.forward(build_sample(every, [len(ids)] * 320), frozenset({"logprobs"}))
            .data["logprobs"]
            .tolist()
        )
        tokens.append(int(np.argmax(scored)))
        logprobs.append(max(scored))
    return tokens, logprobs


def in_float64(root: Path) -> Any:
    """The policy's engine in float64."""
    spec = ModelSpec(path=str(root / "policy"), device="cpu", dtype="float64")
    return backends.get("torch")(spec, Layout())


# -- OpenAI's endpoints


def test_an_answer_has_openai_s_form(server: Server, client: httpx.Client) -> None:
    answer = chat(client, temperature=0)
    (choice,) = answer["choices"]
    assert answer["object"] == "chat.completion" and answer["model"] == "policy"
    policy = server.models[0]
    prompt = policy.tokenizer.encode_chat(HELLO, add_generation_prompt=True)
    assert choice["finish_reason"] in ("stop", "length") and answer["usage"][
        "prompt_tokens"
    ] == len(prompt)
    assert answer["usage"]["total_tokens"] == len(prompt) + answer["usage"]["completion_tokens"]


def test_greedy_tokens_and_their_log_probs_are_the_model_s(
    root: Path, wide: httpx.Client, server: Server
) -> None:
    body = {
        "model": "policy",
        "prompt": [5, 6, 7, 8],
        "max_tokens": 4,
        "temperature": 0,
        "logprobs": 0,
    }
    (choice,) = wide.post("/v1/completions", json=body).json()["choices"]
    engine = in_float64(root)
    tokens, logprobs = continued(engine, [5, 6, 7, 8], 4)
    assert choice["text"] == server.models[0].tokenizer.decode(tokens)
    # each is stored once
    np.testing.assert_allclose(choice["logprobs"]["token_logprobs"], logprobs, rtol=gamma(2))


def test_the_likeliest_tokens_are_those_of_the_softmax(
    root: Path, client: httpx.Client, wide: httpx.Client, server: Server
) -> None:
    prompt, decode = [5, 6, 7, 8], server.models[0].tokenizer.decode
    engine = in_float64(root)
    every = [[*prompt, id] for id in range(320)]
    scored = (
        engine.forward(build_sample(every, [4] * 320), frozenset({"logprobs"}))
        .data["logprobs"]
        .tolist()
    )
    best = sorted(range(320), key=lambda id: -scored[id])
    body = {"model": "policy", "prompt": prompt, "max_tokens": 1, "seed": 3, "logprobs": 5}
    (choice,) = wide.post("/v1/completions", json=body).json()["choices"]
    found, sampled = choice["logprobs"]["top_logprobs"][0], choice["logprobs"]["tokens"][0]
    expected = {decode([id]): scored[id] for id in reversed(best[:5])}
    expected |= {sampled: choice["logprobs"]["token_logprobs"][0]}
    assert found == rounded(expected, 2)
    assert client.post("/v1/completions", json=body | {"logprobs": 6}).status_code == 400

    tokens = chat(client, temperature=0, logprobs=True, top_logprobs=20)["choices"][0]["logprobs"][
        "content"
    ]
    for token in tokens:
        likely = token["top_logprobs"]
        assert len(likely) == 20 and likely[0] == {
            key: token[key] for key in ("token", "logprob", "bytes")
        }
        assert [each["logprob"] for each in likely] == sorted(
            (each["logprob"] for each in likely), reverse=True
        )
    without = chat(client, temperature=0, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [(t["token"], t["top_logprobs"]) for t in without] == [(t["token"], []) for t in tokens]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_is_the_whole_in_parts(client: httpx.Client, path: str) -> None:
    own = (
        {"messages": HELLO, "logprobs": True}
        if "chat" in path
        else {"prompt": ["Once upon", "What is"], "logprobs": 0}
    )
    body = {"model": "policy", "max_tokens": 30, "seed": 5, "n": 2, "stop": ["a", "xyz"], **own}
    whole = client.post(path, json=body).json()["choices"]
    events = streamed(client, path, {**body, "stream_options": {"include_usage": True}})
    assert events[-1]["usage"]["completion_tokens"] > 0 and events[-1]["choices"] == []
    for choice in whole:
        parts = [
            each
            for event in events
            for each in event["choices"]
            if each["index"] == choice["index"]
        ]
        if "chat" in path:
            text = "".join(part["delta"].get("content", "") for part in parts)
            tokens = [
                token for part in parts if part["logprobs"] for token in part["logprobs"]["content"]
            ]
            assert (text, tokens) == (choice["message"]["content"], choice["logprobs"]["content"])
            assert parts[0]["delta"]["role"] == "assistant"
        else:
            assert "".join(part["text"] for part in parts) == choice["text"]
            tokens = [
                token for part in parts if part["logprobs"] for token in part["logprobs"]["tokens"]
            ]
            assert tokens == choice["logprobs"]["tokens"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [
            choice["finish_reason"]
        ]
    texts = [choice["message"]["content"] if "chat" in path else choice["text"] for choice in whole]
    assert len(texts) == (2 if "chat" in path else 4) and not any("a" in text for text in texts)


def test_choices_come_prompt_by_prompt(client: httpx.Client) -> None:
    prompts = ["Once upon", "What is"]
    body = {"model": "policy", "max_tokens": 8, "temperature": 0}

    def complete(**more: Any) -> list[dict[str, Any]]:
        return client.post("/v1/completions", json={**body, **more}).json()["choices"]

    first, second = (complete(prompt=prompt)[0]["text"] for prompt in prompts)
    assert first != second
    choices = complete(prompt=prompts, n=2)
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["text"] for choice in choices] == [first, first, second, second]


def test_options_of_sampling_are_heeded(client: httpx.Client) -> None:
    text = {
        name: chat(client, **more)["choices"][0]["message"]["content"]
        for name, more in {
            "one": {},
            "same": {},
            "other": {"seed": 4},
            "greedy": {"temperature": 0},
            "greedy too": {"temperature": 0, "seed": 9},
            "top_p": {"top_p": 1e-6},
            "top_k": {"top_k": 1},
        }.items()
    }
    assert text["one"] == text["same"] != text["other"]
    assert text["greedy"] == text["greedy too"] == text["top_p"] == text["top_k"] != text["one"]
    free = [chat(client, seed=None)["choices"][0]["message"]["content"] for _ in range(2)]
    assert free[0] != free[1]
    many = chat(client, n=3)["choices"]
    assert (
        len({choice["message"]["content"] for choice in many}) == 3
        and many[0]["message"]["content"] == text["one"]
    )
    short = chat(client, max_completion_tokens=2, max_tokens=None)
    assert (
        short["usage"]["completion_tokens"] == 2
        and short["choices"][0]["finish_reason"] == "length"
    )
    first = text["one"][:1]
    stopped = chat(client, stop=first)
    assert (
        stopped["choices"][0]["message"]["content"] == ""
        and stopped["choices"][0]["finish_reason"] == "stop"
    )
    low, high = (
        chat(client, temperature=t, logprobs=True, max_tokens=40)["choices"][0]["logprobs"][
            "content"
        ]
        for t in (0.05, 2.0)
    )
    assert (
        np.mean([token["logprob"] for token in low])
        > np.mean([token["logprob"] for token in high]) + 0.5
    )


@pytest.mark.parametrize(
    ("more", "param", "says"),
    [
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"top_logprobs": 3}, "top_logprobs", "requires logprobs=true"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "from 0 to 20"),
        ({"temprature": 1}, "temprature", "did you mean temperature"),
        ({"temperature": "hot"}, "temperature", "must be a number"),
        ({"temperature": 3}, "temperature", "0 to 2"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"n": 0}, "n", "from 1"),
        ({"n": 1.5}, "n", "whole number"),
        ({"n": True}, "n", "whole number"),
        ({"max_tokens": 10_000}, "max_tokens", "from 1 to 200"),
        ({"stop": [""]}, "stop", "empty"),
        ({"stop": [str(n) for n in range(99)]}, "stop", "up to 16"),
        ({"seed": "x"}, "seed", "whole number"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "requires stream=true"),
        ({"messages": "Hi"}, "messages", "list"),
        ({"messages": []}, "messages", "empty"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages", "unknown role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages", "must be text"),
        ({"messages": None}, "messages", "missing"),
        ({"model": None}, "model", "missing"),
    ],
)
def test_what_is_not_heeded_is_refused_by_name(
    client: httpx.Client, more: dict[str, Any], param: str, says: str
) -> None:
    body = {"model": "policy", "messages": HELLO, "max_tokens": 2, **more}
    reply = client.post("/v1/chat/completions", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["type"]) == (
        400,
        param,
        "invalid_request_error",
    ), error
    assert says in error["message"]


def test_idle_fields_are_taken(client: httpx.Client) -> None:
    assert chat(
        client,
        presence_penalty=0,
        tools=[],
        user="u",
        logit_bias={},
        response_format={"type": "text"},
    )["choices"]


def test_unknown_models_paths_methods_and_tokens(server: Server, client: httpx.Client) -> None:
    for model in ("nobody", "reward"):
        reply = client.post("/v1/chat/completions", json={"model": model, "messages": HELLO})
        assert reply.status_code == 404 and reply.json()["error"]["code"] == "model_not_found"
    assert client.get("/v1/models/nobody").status_code == client.get("/v3").status_code == 404
    assert client.get("/v1/models/policy").json()["id"] == "policy"
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["policy", "reward"]
    assert client.get("/v1/completions").status_code == 405
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": TOKEN},
        {"Authorization": f"Basic {TOKEN}"},
    ):
        reply = httpx.get(server.urls["http"] + "/v1/models", headers=headers)
        assert (
            reply.status_code == 401
            and reply.json()["error"]["code"] == "invalid_api_key"
            and TOKEN not in reply.text
        )
    assert httpx.get(server.urls["http"] + "/v2/health/ready").status_code == 200


def test_prompts_that_do_not_fit(client: httpx.Client) -> None:
    for prompt, more in (([5] * 600, {}), ([5] * 500, {"max_tokens": 100})):  # the context is 512
        reply = client.post("/v1/completions", json={"model": "policy", "prompt": prompt, **more})
        assert (reply.status_code, reply.json()["error"]["code"]) == (
            400,
            "context_length_exceeded",
        )
    for length, status in ((511, 200), (512, 400)):
        reply = client.post(
            "/v1/completions", json={"model": "policy", "prompt": [5] * length, "max_tokens": 1}
        )
        assert reply.status_code == status, (
            "the last token of the context can be sampled, and no further one"
        )
    for prompt in (None, 5, [], [5, "x"], [[]], [10**6], [-1], [1.5], {"a": 1}, [5, None]):
        assert (
            client.post("/v1/completions", json={"model": "policy", "prompt": prompt}).status_code
            == 400
        ), prompt


def test_sixty_four_clients_at_once_get_what_one_gets_alone(
    server: Server, client: httpx.Client
) -> None:
    def body(number: int) -> dict[str, Any]:
        return {
            "model": "policy",
            "prompt": f"Client {number % 8}",
            "max_tokens": 16,
            "seed": number % 8,
        }

    alone = [
        client.post("/v1/completions", json=body(number)).json()["choices"][0]["text"]
        for number in range(8)
    ]
    ids = np.arange(5, 11, dtype=np.int32)[None]
    wanted = asyncio.run(server.models[1].infer({"input_ids": ids}, {}, server.background))[
        "rewards"
    ].tolist()

    async def one(asking: httpx.AsyncClient, number: int) -> tuple[str, Any]:
        made = await asking.post("/v1/completions", json=body(number))
        scored = await asking.post("/v2/models/reward/infer", json=infer_body(ids.tolist()))
        return made.json()["choices"][0]["text"], scored.json()["outputs"][0]["data"]

    async def all_of_them() -> list[tuple[str, Any]]:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(
            base_url=server.urls["http"], headers=AUTH, timeout=120, limits=limits
        ) as asking:
            return await asyncio.gather(*(one(asking, number) for number in range(64)))

    made = asyncio.run(all_of_them())
    assert [text for text, _ in made] == [alone[number % 8] for number in range(64)]
    assert all(scores == wanted[0] for _, scores in made)
    assert all(model.worker.load == 0 for model in server.models)


# -- bad manners


def infer_body(ids: Any, **more: Any) -> dict[str, Any]:
    shape = [len(ids), len(ids[0])]
    return {
        "inputs": [{"name": "input_ids", "datatype": "INT32", "shape": shape, "data": ids, **more}]
    }


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v2/models/reward/infer"])
def test_malformed_and_oversized_bodies(client: httpx.Client, path: str) -> None:
    bodies = [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"model": NaN}',
        b'{"inputs": 5}',
        b'{"inputs": [5]}',
    ]
    for raw in bodies:
        reply = client.post(path, content=raw)
        assert reply.status_code == 400 and reply.json()["error"], raw[:20]
    reply = client.post(path, content=b"x" * 600_000)
    assert reply.status_code == 413
    assert chat(client)["choices"]


@pytest.mark.slow
def test_a_body_that_never_comes_and_a_client_that_says_nothing(
    server: Server, client: httpx.Client
) -> None:
    host, port = server.urls["http"].removeprefix("http://").split(":")
    with (
        socket.create_connection((host, int(port))) as silent,
        socket.create_connection((host, int(port))) as slow,
    ):
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 100\r\n\r\n{{"
        slow.sendall(head.encode())
        silent.sendall(b"POST /v1/com")
        slow.settimeout(20)
        assert b" 408 " in slow.recv(100)
        assert chat(client)["choices"]
    with socket.create_connection((host, int(port))) as noise:
        noise.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
        noise.settimeout(20)
        assert b" 400 " in noise.recv(200)
    assert chat(client)["choices"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_generation(
    server: Server, client: httpx.Client, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, step, left = [], BatchGenerator.step, threading.Event()

    def stepped(own: BatchGenerator) -> object:
        """Few steps before the client has left; after them, time for the server to see it."""
        steps.append(left.wait(120) if len(steps) == 3 else time.sleep(0.05))
        return step(own)

    monkeypatch.setattr(BatchGenerator, "step", stepped)
    worker = server.models[0].worker
    body = {"model": "policy", "prompt": "Once", "max_tokens": 200, "n": 64, "stream": stream}
    host, port = server.urls["http"].removeprefix("http://").split(":")
    raw = json.dumps(body).encode()
    before = server.metrics.counts["weft_abandoned_total"]
    with socket.create_connection((host, int(port))) as leaving:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        head += f"Content-Length: {len(raw)}\r\n\r\n"
        leaving.sendall(head.encode() + raw)
        if stream:
            assert leaving.recv(20)
        assert eventually(lambda: worker.load > 0)
    left.set()
    assert eventually(lambda: worker.load == 0)
    assert eventually(lambda: server.metrics.counts["weft_abandoned_total"] == before + 1)
    assert len(steps) < 150  # of the 200 that all tokens take
    monkeypatch.undo()
    assert chat(client)["choices"]


def test_too_much_to_do_and_too_little_time(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = BatchGenerator.step
    monkeypatch.setattr(
        BatchGenerator, "step", lambda generator: (time.sleep(0.01), step(generator))[1]
    )
    with (
        serving(
            str(root / "policy"),
            "--max-new-tokens",
            "400",
            grpc=False,
            token=None,
            max_load=4,
            seconds=0.3,
        ) as server,
        httpx.Client(base_url=server.urls["http"], timeout=60) as client,
    ):
        body = {"model": "policy", "prompt": "Once", "max_tokens": 400, "n": 5}
        reply = client.post("/v1/completions", json=body)
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
        slow = client.post("/v1/completions", json={**body, "n": 4})
        assert slow.status_code == 504 and "--timeout" in slow.json()["error"]["message"]
        assert eventually(lambda: server.models[0].worker.load == 0)
        with client.stream(
            "POST", "/v1/completions", json={**body, "n": 4, "stream": True}
        ) as stream:
            last = [line for line in stream.iter_lines() if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
        reply = client.get("/v1/models", headers={"Origin": "http://somewhere"})
        assert reply.status_code == 403


def test_a_failing_network_fails_requests_and_not_the_server(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        serving(str(root / "policy"), grpc=False) as server,
        httpx.Client(headers=AUTH, timeout=60) as client,
    ):
        url = server.urls["http"] + "/v1/completions"
        body = {"model": "policy", "prompt": "Once", "max_tokens": 3}
        assert client.post(url, json=body).status_code == 200
        network = server.models[0].worker.engine._network
        monkeypatch.setattr(
            network,
            "next_token_logits",
            lambda states, wide=None: states.new_full((len(states), 320), float("nan")),
        )
        monkeypatch.setattr(network, "forward", None)
        reply = client.post(url, json={**body, "max_tokens": 2})
        assert reply.status_code == 500 and "NotFinite" in reply.json()["error"]["message"]
        monkeypatch.undo()
        assert client.post(url, json=body).status_code == 200


# -- the inference protocol


def test_health_and_metadata(client: httpx.Client) -> None:
    for path in (
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/reward/ready",
        "/v2/models/reward/versions/1/ready",
    ):
        assert client.get(path).status_code == 200
    said = client.get("/v2/models/reward").json()
    assert said["name"] == "reward" and said["outputs"] == [
        {"name": "rewards", "datatype": "FP32", "shape": [-1, 1]}
    ]
    assert client.get("/v2").json()["name"] == "weft"
    assert (
        client.get("/v2/models/nobody").status_code
        == client.get("/v2/models/reward/versions/7").status_code
        == 404
    )


def test_rows_are_scored_as_the_engine_scores_them(
    root: Path, server: Server, client: httpx.Client
) -> None:
    rows = [[5, 6, 7, 8, 9], [10, 11, 12], [40]]
    padded = [[*row, *[0] * (5 - len(row))] for row in rows]
    left = [[*[0] * (5 - len(row)), *row] for row in rows]
    engine = backends.get("torch")(
        ModelSpec(path=str(root / "reward"), head="score", device="cpu"), Layout()
    )
    own = (
        engine.forward(build_sample(rows, [len(row) - 1 for row in rows]), frozenset({"scores"}))
        .data["scores"]
        .tolist()
    )
    for ids in (padded, left):
        mask = [[int(token != 0) for token in row] for row in ids]
        body = infer_body(ids)
        body["inputs"].append(
            {"name": "attention_mask", "datatype": "INT32", "shape": [3, 5], "data": mask}
        )
        assert client.post("/v2/models/reward/infer", json=body).json()["outputs"][0]["data"] == own


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": "ids"}, "no input 'ids'"),
        ({"datatype": "FP32"}, "must be INT32"),
        ({"datatype": "X"}, "datatype"),
        ({"shape": [2, 2]}, "data must be"),
        ({"shape": [-1, 3]}, "shape"),
        ({"shape": [3]}, "[rows, tokens]"),
        ({"data": [[1.5, 2, 3]]}, "data must be"),
        ({"data": [["a", "b", "c"]]}, "data must be"),
        ({"data": [[1, 2, 400]]}, "outside"),
        ({"data": [[1, 2, -1]]}, "outside"),
        ({"data": [[1, 2, 2**40]]}, "data must be"),
        ({"data": None}, "neither"),
        ({"parameters": {"binary_data_size": 4}}, "bytes, but"),
        ({"parameters": {"binary_data_size": "4"}}, "whole number"),
    ],
)
def test_tensors_that_cannot_be(client: httpx.Client, change: dict[str, Any], says: str) -> None:
    reply = client.post("/v2/models/reward/infer", json=infer_body([[1, 2, 3]], **change))
    assert reply.status_code == 400 and says in reply.json()["error"], reply.text


def test_a_mask_with_a_hole_an_unknown_output_a_temperature(client: httpx.Client) -> None:
    hole = infer_body([[1, 2, 3]])
    hole["inputs"].append(
        {"name": "attention_mask", "datatype": "INT64", "shape": [1, 3], "data": [1, 0, 1]}
    )
    other = {**infer_body([[1, 2, 3]]), "outputs": [{"name": "logits"}]}
    cold = {**infer_body([[1, 2, 3]]), "parameters": {"temperature": 0}}
    for body, model, says in (
        (hole, "reward", "consecutive"),
        (other, "policy", "no output 'logits'"),
        (cold, "policy", "above 0"),
    ):
        reply = client.post(f"/v2/models/{model}/infer", json=body)
        assert reply.status_code == 400 and says in reply.json()["error"]


def test_metrics(server: Server, client: httpx.Client) -> None:
    chat(client)
    page = httpx.get(server.urls["metrics"] + "/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = dict(line.rsplit(" ", 1) for line in page.text.splitlines() if not line.startswith("#"))
    assert float(lines['weft_requests_total{endpoint="/v1/chat/completions",status="200"}']) >= 1
    assert (
        float(lines["weft_generated_tokens_total"]) > 0
        and lines['weft_load{model="policy"}'] == "0"
    )
    assert float(lines['weft_request_seconds_bucket{le="+Inf"}']) == float(
        lines["weft_request_seconds_count"]
    )


# -- real clients


def test_the_openai_client(server: Server) -> None:
    openai = pytest.importorskip("openai", reason="the openai client is not installed")
    with openai.OpenAI(base_url=server.urls["http"] + "/v1", api_key=TOKEN, timeout=60) as client:
        assert [model.id for model in client.models.list()] == ["policy", "reward"]
        asked = {
            "model": "policy",
            "messages": HELLO,
            "max_tokens": 20,
            "seed": 1,
            "n": 2,
            "logprobs": True,
            "top_logprobs": 2,
        }
        whole = client.chat.completions.create(**asked)
        parts = list(client.chat.completions.create(**asked, stream=True))
        for choice in whole.choices:
            own = [part.choices[0] for part in parts if part.choices[0].index == choice.index]
            assert "".join(part.delta.content or "" for part in own) == choice.message.content
            assert own[-1].finish_reason == choice.finish_reason
        first = whole.choices[0].logprobs.content[0]
        assert (
            first.logprob < 0 and len(first.top_logprobs) == 2 and first.top_logprobs[0].logprob < 0
        )
        text = client.completions.create(
            model="policy", prompt="Once", max_tokens=5, seed=1, logprobs=3
        )
        assert (
            text.usage.completion_tokens == 5 and len(text.choices[0].logprobs.top_logprobs[0]) >= 3
        )
        with pytest.raises(openai.BadRequestError, match="tools is not supported"):
            client.chat.completions.create(
                model="policy", messages=HELLO, tools=[{"type": "function"}]
            )
        with pytest.raises(openai.NotFoundError, match="unknown model"):
            client.chat.completions.create(model="nobody", messages=HELLO)
    wrong = openai.OpenAI(base_url=server.urls["http"] + "/v1", api_key="wrong", max_retries=0)
    with wrong as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_the_triton_client(server: Server, kind: str) -> None:
    module = pytest.importorskip(f"tritonclient.{kind}", reason="tritonclient is not installed")
    client = module.InferenceServerClient(server.urls[kind].partition("://")[2])
    headers = {"Authorization" if kind == "http" else "authorization": f"Bearer {TOKEN}"}
    assert (
        client.is_server_live()
        and client.is_server_ready()
        and client.is_model_ready("reward", headers=headers)
    )
    said = client.get_model_metadata("policy", headers=headers)
    assert (said["name"] if kind == "http" else said.name) == "policy"
    ids = np.array([[5, 6, 7, 8], [9, 10, 0, 0]], np.int32)
    mask = np.array([[1, 1, 1, 1], [1, 1, 0, 0]], np.int32)
    inputs = [module.InferInput(name, [2, 4], "INT32") for name in ("input_ids", "attention_mask")]
    for entry, values in zip(inputs, (ids, mask), strict=True):
        entry.set_data_from_numpy(values)
    wanted = asyncio.run(
        server.models[1].infer({"input_ids": ids, "attention_mask": mask}, {}, server.background)
    )["rewards"]
    made = client.infer(
        "reward", inputs, outputs=[module.InferRequestedOutput("rewards")], headers=headers
    )
    assert made.as_numpy("rewards").tolist() == wanted.tolist()
    logprobs = client.infer("policy", inputs, headers=headers).as_numpy("logprobs")
    assert (
        logprobs.shape == (2, 4)
        and (logprobs[:, 0] == 0).all()
        and logprobs[1, 2:].tolist() == [0, 0]
    )
    assert (logprobs[0, 1:] < 0).all()
    inputs[0].set_data_from_numpy(ids + 1000)
    error = pytest.importorskip("tritonclient.utils").InferenceServerException
    with pytest.raises(error, match="token id"):
        client.infer("reward", inputs, headers=headers)
    with pytest.raises(error, match=r"unknown model|not found"):
        client.infer("nobody", inputs, headers=headers)
    with pytest.raises(error, match="token"):
        client.infer("reward", inputs)
    client.close()


# -- the ports


def test_a_port_that_is_taken_and_a_clean_end(root: Path, server: Server) -> None:
    port = int(server.urls["http"].rsplit(":", 1)[1])
    with (
        pytest.raises(ConfigError, match=f"--port={port}"),
        Server([], ServerPorts(http=port), ServerLimits(), None),
    ):
        pass
    with serving(str(root / "policy"), grpc=True) as own:
        urls = dict(own.urls)
    assert set(urls) == {"http", "grpc", "metrics"} and not own.models[0].worker.is_alive
    with pytest.raises(httpx.ConnectError):
        httpx.get(urls["http"] + "/v2/health/live")
