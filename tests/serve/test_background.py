"""What happens to a request before the network: health answers meanwhile, large and compressed
bodies, limits.
"""

from __future__ import annotations

import gzip
import json
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.serve.serving import TOKEN, make_reward, serving
from tests.tiny import make_llama
from weft.data.spec import TokenizerSpec
from weft.data.tokenizer import Tokenizer
from weft.serve import prompts
from weft.serve.background import LARGE_SIZE, BackgroundWork
from weft.serve.exchange import RequestRefused
from weft.serve.openai_api import CompletionEndpoints
from weft.serve.openai_fields import read_settings
from weft.serve.served_model import ServedModel
from weft.serve.server import Server

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
    with serving(*words, body_bytes=200_000) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(
        base_url=server.urls["http"], headers=AUTH, timeout=60, trust_env=False
    ) as made:
        yield made


def tensor(rows: list[list[int]]) -> dict[str, Any]:
    return {
        "name": "input_ids",
        "datatype": "INT32",
        "shape": [len(rows), len(rows[0])],
        "data": rows,
    }


# -- compression


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [("http", "gzip"), ("http", "deflate"), ("grpc", "gzip"), ("grpc", "deflate")],
)
def test_the_triton_client_compresses(server: Server, kind: str, algorithm: str) -> None:
    module = pytest.importorskip(f"tritonclient.{kind}", reason="tritonclient is not installed")
    client = module.InferenceServerClient(server.urls[kind].partition("://")[2])
    headers = {"Authorization" if kind == "http" else "authorization": f"Bearer {TOKEN}"}
    ids = np.tile(np.arange(5, 69, dtype=np.int32), (16, 2))
    entry = module.InferInput("input_ids", list(ids.shape), "INT32")
    entry.set_data_from_numpy(ids)
    plain = client.infer("policy", [entry], headers=headers).as_numpy("logprobs")
    if kind == "http":
        how = {
            "request_compression_algorithm": algorithm,
            "response_compression_algorithm": algorithm,
        }
    else:
        how = {"compression_algorithm": algorithm}
    assert (
        client.infer("policy", [entry], headers=headers, **how).as_numpy("logprobs").tolist()
        == plain.tolist()
    )
    client.close()


def test_compressed_bodies(client: httpx.Client) -> None:
    raw = json.dumps(
        {"model": "policy", "prompt": "Once", "max_tokens": 3, "temperature": 0}
    ).encode()
    usual = client.post("/v1/completions", content=raw).json()["choices"]
    bodies = [
        ("gzip", gzip.compress(raw)),
        ("deflate", zlib.compress(raw)),
        ("identity", raw),
        ("GZIP", gzip.compress(raw)),
    ]
    for encoding, body in bodies:
        reply = client.post("/v1/completions", content=body, headers={"Content-Encoding": encoding})
        assert reply.status_code == 200 and reply.json()["choices"] == usual, encoding
    bomb = zlib.compress(bytes(1 << 25), 9)
    for encoding, body, status, says in (
        ("br", raw, 415, "send gzip, deflate"),
        ("gzip", raw, 400, "is not valid gzip"),
        ("gzip", gzip.compress(raw)[:-9], 400, "truncated"),
        ("gzip", gzip.compress(raw) + b"x", 400, "followed by other data"),
        ("deflate", bomb, 413, "once decompressed"),
    ):
        reply = client.post("/v1/completions", content=body, headers={"Content-Encoding": encoding})
        assert reply.status_code == status and says in reply.json()["error"]["message"], (
            encoding,
            reply.text,
        )


def test_large_replies_are_compressed_for_those_who_take_it(client: httpx.Client) -> None:
    body = {"model": "policy", "prompt": "Once", "max_tokens": 100, "logprobs": 5, "temperature": 0}
    replies = {
        taken: client.post("/v1/completions", json=body, headers={"Accept-Encoding": taken})
        for taken in ("gzip", "deflate", "identity", "gzip;q=0, br")
    }
    assert [reply.headers.get("content-encoding") for reply in replies.values()] == [
        "gzip",
        "deflate",
        None,
        None,
    ]
    assert len({json.dumps(reply.json()["choices"]) for reply in replies.values()}) == 1


def test_a_grpc_bomb_is_refused(server: Server) -> None:
    module = pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed")
    client = module.InferenceServerClient(server.urls["grpc"].partition("://")[2])
    entry = module.InferInput("input_ids", [1, 1_000_000], "INT32")
    entry.set_data_from_numpy(np.zeros((1, 1_000_000), np.int32))
    error = pytest.importorskip("tritonclient.utils").InferenceServerException
    with pytest.raises(error, match=r"larger than max|RESOURCE_EXHAUSTED"):
        client.infer(
            "reward",
            [entry],
            headers={"authorization": f"Bearer {TOKEN}"},
            compression_algorithm="gzip",
        )
    client.close()


# -- health, whatever else is going on


def healthy(server: Server) -> None:
    """Both health calls come back, and at once."""
    url = server.urls["http"]
    grpc_client = pytest.importorskip("tritonclient.grpc").InferenceServerClient(
        server.urls["grpc"].partition("://")[2]
    )
    for _ in range(3):
        assert httpx.get(f"{url}/v2/health/live", timeout=20, trust_env=False).status_code == 200
        assert httpx.get(f"{url}/v2/health/ready", timeout=20, trust_env=False).status_code == 200
        assert grpc_client.is_server_live() and grpc_client.is_server_ready()
    grpc_client.close()


@pytest.mark.parametrize("slow", ["encode", "render", "rows", "json"])
def test_health_answers_while_a_request_is_prepared(
    slow: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes long waits here until health has answered: on the event loop it would wait for
    ever.
    """
    begun, answered = threading.Event(), threading.Event()

    def waits(original: Any) -> Any:
        def waiting(*args: Any, **kwargs: Any) -> Any:
            begun.set()
            assert answered.wait(60)
            return original(*args, **kwargs)

        return waiting

    with (
        serving(str(root / "policy")) as server,
        httpx.Client(base_url=server.urls["http"], headers=AUTH, timeout=60) as client,
    ):
        owner = {
            "encode": Tokenizer,
            "render": Tokenizer,
            "rows": ServedModel,
            "json": BackgroundWork,
        }[slow]
        name = {"json": "_parse_in_child", "rows": "read_rows"}.get(slow, slow)
        monkeypatch.setattr(owner, name, waits(getattr(owner, name)))
        bodies = {
            "encode": ("/v1/completions", {"model": "policy", "prompt": "Once", "max_tokens": 1}),
            "render": (
                "/v1/chat/completions",
                {"model": "policy", "messages": HELLO, "max_tokens": 1},
            ),
            "rows": ("/v2/models/policy/infer", {"inputs": [tensor([[5, 6]])]}),
            "json": ("/v1/completions", {"model": "policy", "prompt": [5] * 50_000}),
        }
        path, body = bodies[slow]
        with ThreadPoolExecutor(1) as other:
            reply = other.submit(client.post, path, json=body)
            try:
                assert begun.wait(60)
                healthy(server)
            finally:
                answered.set()
            assert reply.result().status_code == (400 if slow == "json" else 200)


def test_tokenizers_are_copied_before_there_are_requests(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of a large vocabulary keeps the interpreter, and with it health, waiting."""
    with (
        serving(str(root / "policy"), grpc=False) as server,
        httpx.Client(base_url=server.urls["http"], headers=AUTH, timeout=60) as client,
    ):
        monkeypatch.setattr("weft.serve.background.copy.deepcopy", None)
        body = {"model": "policy", "messages": HELLO, "max_tokens": 1}
        with ThreadPoolExecutor(8) as others:
            replies = list(
                others.map(lambda _: client.post("/v1/chat/completions", json=body), range(16))
            )
        assert {reply.status_code for reply in replies} == {200}


def test_a_prompt_of_too_many_tokens_is_not_looked_at_on_the_event_loop(root: Path) -> None:
    class Long(list[int]):
        def __len__(self) -> int:
            return 10**6

        def __iter__(self) -> Any:
            raise AssertionError("all tokens are looked at")

    with serving(str(root / "policy"), grpc=False) as server:
        app = CompletionEndpoints(
            server.models[0], server.metrics, server.limits, server.background
        )
        with pytest.raises(RequestRefused, match="the prompt has 1000000 tokens; the limit is"):
            app.compute_limit(Long([1]), read_settings({"max_tokens": 1}, 1, (), chat=False))


@pytest.mark.parametrize(("letters", "most"), [(LARGE_SIZE + 1, 1), (10, 4)])
def test_long_texts_are_tokenized_one_at_a_time(
    letters: int, most: int, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several at once would keep the interpreter, one after another, for as long as all of them
    take.
    """
    tokenizer, background = Tokenizer.load(TokenizerSpec(), str(root / "policy")), BackgroundWork()
    background.prepare(tokenizer)
    together, now, met = threading.Barrier(most), [0], []

    def counted(*_: Any, **__: Any) -> list[int]:
        now[0] += 1
        together.wait(20)
        met.append(now[0])
        now[0] -= 1
        return []

    monkeypatch.setattr(Tokenizer, "encode", counted)
    with ThreadPoolExecutor(4) as threads:
        made = [threads.submit(background.encode, tokenizer, "x" * letters) for _ in range(4)]
        assert [each.result(30) for each in made] == [[]] * 4
    background.close()
    assert max(met) == most


def test_a_prompt_of_too_many_bytes_is_not_tokenized(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        serving(str(root / "policy"), grpc=False, prompt_bytes=1000) as server,
        httpx.Client(base_url=server.urls["http"], headers=AUTH, timeout=60) as client,
    ):
        monkeypatch.setattr(Tokenizer, "encode", None)
        for text in ("x" * 1001, "é" * 501):
            for path, part in (
                ("/v1/completions", {"prompt": text}),
                ("/v1/completions", {"prompt": ["a", text]}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
            ):
                reply = client.post(path, json={"model": "policy", **part})
                assert (
                    reply.status_code == 400
                    and reply.json()["error"]["code"] == "context_length_exceeded"
                )
                assert (
                    "bytes; the limit is 1000, the server's --max-prompt-kb"
                    in reply.json()["error"]["message"]
                )


def test_large_json_is_read_as_small_json_is(root: Path) -> None:
    words = (str(root / "policy"), "--max-new-tokens", "20")
    with (
        serving(*words, grpc=False) as server,
        httpx.Client(base_url=server.urls["http"], headers=AUTH, timeout=60) as client,
    ):
        blanks = " " * (1 << 17)  # too many bytes to be read in this process
        body = json.dumps(
            {
                "model": "policy",
                "prompt": [[5, 6] * 40, [7] * 100],
                "max_tokens": 3,
                "temperature": 0,
            }
        )
        alike = [
            client.post("/v1/completions", content=each).json()["choices"]
            for each in (body, body + blanks)
        ]
        assert alike[0] == alike[1] and len(alike[0]) == 2
        rows = np.random.default_rng(0).integers(5, 300, (3, 70))
        infer = json.dumps({"inputs": [tensor(rows.tolist())]})
        made = [
            client.post("/v2/models/policy/infer", content=each).json()["outputs"]
            for each in (infer, infer + blanks)
        ]
        assert made[0] == made[1] and made[0][0]["shape"] == [3, 70]
        prompt = '{"model": "policy", "prompt": ['
        for wrong in (
            "{",
            "[]",
            prompt + "[], " * 300_000 + "[]]}",
            prompt + "1.5" + ", 1" * 100 + "]}",
        ):
            reply = client.post("/v1/completions", content=wrong + blanks)
            assert reply.status_code == 400 and reply.json()["error"]["message"], wrong[:40]


SLOW = """{% for m in messages %}
{% for i in range(99999 if m.content == 'slow' else 1) %}{% for j in range(999) %}{{ j }}{% endfor %}{% endfor %}
{{ m.content }}
{% endfor %}"""


def test_a_template_without_end_is_stopped(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "TEMPLATE_SECONDS", 0.3)
    make_llama(root / "slow")
    (root / "slow" / "chat_template.jinja").write_text(SLOW)
    with (
        serving(str(root / "slow"), "--name", "policy") as server,
        httpx.Client(base_url=server.urls["http"], headers=AUTH, timeout=60) as client,
    ):
        with ThreadPoolExecutor(1) as other:
            messages = [{"role": "user", "content": "slow"}]
            reply = other.submit(
                client.post, "/v1/chat/completions", json={"model": "policy", "messages": messages}
            )
            healthy(server)
        assert reply.result().status_code == 400
        assert (
            "the chat template takes longer than 0.3 s" in reply.result().json()["error"]["message"]
        )
