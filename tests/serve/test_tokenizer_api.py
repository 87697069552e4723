"""Endpoints of a model's tokenizer: as vLLM's, for the policy and the reward model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.serving import TOKEN, make_reward, serving
from tests.tiny import CHAT_TEMPLATE, make_llama
from weft.serve.server import Server

AUTH = {"Authorization": f"Bearer {TOKEN}"}
HELLO = [{"role": "user", "content": "Hello there"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root: Path = tmp_path_factory.mktemp("serve")
    words = (str(make_llama(root / "policy")), "--reward", str(make_reward(root / "reward")))
    with serving(*words, grpc=False, max_prompt_tokens=2000, prompt_bytes=5000) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(
        base_url=server.urls["http"], headers=AUTH, timeout=60, trust_env=False
    ) as made:
        yield made


def post(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    return client.post(path, json=body).raise_for_status().json()


def test_a_text_and_back(client: httpx.Client, server: Server) -> None:
    text = "Once upon a time: é€😀 </s>"
    tokenizer = server.models[0].tokenizer
    found = post(client, "/tokenize", prompt=text)
    ids = tokenizer.encode(text)
    assert found == {"count": len(ids), "max_model_len": 512, "tokens": ids, "token_strs": None}
    assert post(client, "/detokenize", tokens=ids, model="reward") == {"prompt": text}
    long = ids * 40  # a body that another process parses
    assert post(client, "/detokenize", tokens=long, model="policy") == {"prompt": text * 40}
    assert post(client, "/detokenize", tokens=[]) == {"prompt": ""}
    strings = post(client, "/tokenize", prompt="Once", return_token_strs=True)["token_strs"]
    assert strings == tokenizer.hf.convert_ids_to_tokens(tokenizer.encode("Once"))


def test_special_tokens_are_added_as_asked(tmp_path: Path) -> None:
    """A tokenizer that begins texts with a token, which its chat template writes too."""
    from tokenizers import processors
    from transformers import AutoTokenizer

    path = make_llama(tmp_path / "policy")
    hf = AutoTokenizer.from_pretrained(path)
    hf.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", hf.bos_token_id)]
    )
    hf.chat_template = "{{ bos_token }}" + CHAT_TEMPLATE
    hf.save_pretrained(path)
    with (
        serving(str(path), grpc=False, token=None) as own,
        httpx.Client(base_url=own.urls["http"], timeout=60) as client,
    ):
        for more, begins in (({}, True), ({"add_special_tokens": False}, False)):
            tokens = post(client, "/tokenize", prompt="Once", **more)["tokens"]
            assert (tokens[0] == hf.bos_token_id) is begins
        for more in ({}, {"add_special_tokens": True}):
            tokens = post(client, "/tokenize", messages=HELLO, **more)["tokens"]
            assert tokens[0] == hf.bos_token_id != tokens[1]


def test_a_conversation(client: httpx.Client, server: Server) -> None:
    tokenizer = server.models[0].tokenizer
    found = post(client, "/tokenize", messages=HELLO)["tokens"]
    assert found == tokenizer.encode_chat(HELLO, add_generation_prompt=True)
    found = post(client, "/tokenize", messages=HELLO, add_generation_prompt=False)["tokens"]
    assert found == tokenizer.encode_chat(HELLO)


def test_the_tokenizer_is_described(client: httpx.Client) -> None:
    found = client.get("/tokenizer_info").json()
    assert (found["bos_token"], found["eos_token"], found["pad_token"]) == ("<s>", "</s>", "<pad>")
    assert found["chat_template"] == CHAT_TEMPLATE and found["add_bos_token"] is False


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/tokenize", {}, "prompt must be a string"),
        ("/tokenize", {"prompt": ["a"]}, "prompt must be a string"),
        ("/tokenize", {"prompt": "x" * 5001}, "the limit is 5000, the server's --max-prompt-kb"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": 1}, "must be true or false"),
        ("/tokenize", {"prompt": "x", "promt": "x"}, "did you mean prompt"),
        ("/tokenize", {"messages": HELLO, "chat_template": "x"}, "chat_template is not supported"),
        ("/tokenize", {"messages": "Hi"}, "list"),
        ("/detokenize", {}, "tokens must be a list of token ids"),
        ("/detokenize", {"tokens": "x"}, "tokens must be a list of token ids"),
        ("/detokenize", {"tokens": [1.5]}, "tokens must be a list of token ids"),
        ("/detokenize", {"tokens": [320]}, "token ids must be 0 to 319"),
        ("/detokenize", {"tokens": [5] * 2001}, "2001 tokens; the limit is 2000"),
    ],
)
def test_what_cannot_be_is_refused(
    client: httpx.Client, path: str, body: dict[str, Any], says: str
) -> None:
    reply = client.post(path, json=body)
    assert reply.status_code == 400 and says in reply.json()["error"]["message"], reply.text


def test_half_a_character_is_refused(client: httpx.Client) -> None:
    reply = client.post("/tokenize", content=b'{"prompt": "\\ud800"}')
    assert reply.status_code == 400 and "half of a character" in reply.text


def test_models_methods_and_the_token(client: httpx.Client, server: Server) -> None:
    for name in ("nobody", 5):
        reply = client.post("/tokenize", json={"prompt": "x", "model": name})
        assert reply.status_code == 404 and reply.json()["error"]["code"] == "model_not_found"
    assert client.get("/tokenize").status_code == client.post("/tokenizer_info").status_code == 405
    for path in ("/tokenize", "/detokenize", "/tokenizer_info"):
        assert httpx.get(server.urls["http"] + path).status_code == 401
    page = httpx.get(server.urls["metrics"] + "/metrics").text
    assert 'weft_requests_total{endpoint="/tokenize",status="404"} 2' in page
