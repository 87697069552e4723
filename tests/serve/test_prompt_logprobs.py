"""Log-probs of prompts: those of the network, in OpenAI's form and in vLLM's, and what is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.bounds import gamma
from tests.serve.serving import TOKEN, serving
from tests.tiny import make_llama
from weft.data.token_bytes import TokenBytes
from weft.engine.torch.engine import TorchEngine
from weft.serve import openai_api
from weft.serve.growing_text import EmittedToken
from weft.serve.prompt_logprobs import EchoedPrompt, PromptDescriber
from weft.serve.prompts import EncodedPrompt
from weft.serve.served_model import ServedModel
from weft.serve.server import Server
from weft.serve.worker import RowScores
from weft.testing.datasets import build_small_tokenizer

AUTH = {"Authorization": f"Bearer {TOKEN}"}
PROMPT = [5, 60, 70, 80, 61, 300, 301]
TEXT = "Once upon é"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("serve") / "policy")


@pytest.fixture(scope="module")
def server(policy: Path) -> Iterator[Server]:
    """Of the policy in float64, whose log-probs are stored in float32."""
    words = (str(policy), "--dtype", "float64", "--max-tokens-per-pass", "300")
    with serving(*words, grpc=False) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(
        base_url=server.urls["http"], headers=AUTH, timeout=60, trust_env=False
    ) as made:
        yield made


@pytest.fixture(scope="module")
def expected(policy: Path) -> np.ndarray[Any, Any]:
    """Log-probs [T, V] of the token after each token of `PROMPT`, by transformers in float64."""
    network = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float64)
    with torch.no_grad():
        logits = network(torch.tensor([PROMPT])).logits[0]
    return torch.log_softmax(logits, -1).numpy()


def complete(client: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "policy", "prompt": PROMPT, "max_tokens": 1, "temperature": 0, **fields}
    return client.post("/v1/completions", json=body).raise_for_status().json()["choices"]


def test_echo_has_the_network_s_log_probs(
    server: Server, client: httpx.Client, expected: np.ndarray[Any, Any]
) -> None:
    (choice,) = complete(client, echo=True, logprobs=3, return_token_ids=True)
    found = choice["logprobs"]
    likeliest = int(expected[-1].argmax())
    ids = [*PROMPT, likeliest]
    wanted = [expected[at, id] for at, id in enumerate(ids[1:])]
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    # each is stored in float32
    np.testing.assert_allclose(found["token_logprobs"][1:], wanted, rtol=gamma(2))
    for at, top in enumerate(found["top_logprobs"][1:]):
        # Tokens with a part of a character have the same text, and thus one entry.
        assert max(top.values()) == pytest.approx(expected[at].max(), rel=gamma(2))
    assert choice["prompt_token_ids"] == PROMPT and choice["token_ids"] == [likeliest]
    tokenizer = server.models[0].tokenizer
    assert choice["text"] == tokenizer.decode(PROMPT) + tokenizer.decode([likeliest])
    assert choice["finish_reason"] == "length"


def test_completions_are_load_while_their_prompt_is_scored(
    server: Server, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, many requests would be accepted before the first of them samples."""
    loads = []
    score_prompts = ServedModel.score_prompts

    async def record_and_score(self: ServedModel, *given: Any) -> list[RowScores]:
        loads.append(self.worker.load)
        return await score_prompts(self, *given)

    monkeypatch.setattr(ServedModel, "score_prompts", record_and_score)
    complete(client, echo=True, logprobs=0, n=3, temperature=1)
    complete(client, echo=True, logprobs=0, n=3)
    assert loads == [3, 0], "greedy tokens come from the pass that scores the prompt"
    assert server.models[0].worker.load == 0


def test_the_next_token_has_as_many_alternatives_as_asked(client: httpx.Client) -> None:
    """Also if it is read from the pass that scores the prompt, without alternatives."""
    messages = [{"role": "user", "content": "Hello"}]
    body = {"model": "policy", "messages": messages, "max_tokens": 1, "temperature": 0}
    found = []
    for more in ({}, {"prompt_logprobs": 0}):
        asked = body | {"logprobs": True, "top_logprobs": 5} | more
        (choice,) = client.post("/v1/chat/completions", json=asked).json()["choices"]
        (token,) = choice["logprobs"]["content"]
        found.append([(each["bytes"], each["logprob"]) for each in token["top_logprobs"]])
    assert len(found[0]) == len(found[1]) == 5
    for (piece, logprob), (same, other) in zip(*found, strict=True):
        assert piece == same and logprob == pytest.approx(other, rel=1e-6)


def test_prompt_logprobs_are_those_of_vllm_s_form(
    client: httpx.Client, expected: np.ndarray[Any, Any]
) -> None:
    (choice,) = complete(client, prompt_logprobs=2, max_tokens=0)
    first, *rows = choice["prompt_logprobs"]
    assert first is None and choice["text"] == "" and len(rows) == len(PROMPT) - 1
    for at, row in enumerate(rows):
        best = np.argsort(-expected[at])[:2].tolist()
        assert set(row) == {str(id) for id in (*best, PROMPT[at + 1])}
        assert [row[str(id)]["rank"] for id in best] == [1, 2]
        for id, entry in row.items():
            assert entry["logprob"] == pytest.approx(expected[at, int(id)], rel=gamma(2))
    messages = [{"role": "user", "content": "Hello"}]
    body = {"model": "policy", "messages": messages, "max_tokens": 2}
    more = {"prompt_logprobs": 0, "return_token_ids": True}
    answer = client.post("/v1/chat/completions", json=body | more).json()
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"])
    assert len(answer["choices"][0]["token_ids"]) == answer["usage"]["completion_tokens"]


def test_the_likeliest_token_has_the_same_log_prob_twice(client: httpx.Client) -> None:
    """lm_eval compares the two for equality. The network computes them separately."""
    (choice,) = complete(client, max_tokens=40)
    (echo,) = complete(client, prompt=choice["text"], echo=True, logprobs=1, max_tokens=0)
    found = echo["logprobs"]
    greedy = [
        own == max(top.values())
        for own, top in zip(found["token_logprobs"][1:], found["top_logprobs"][1:], strict=True)
    ]
    assert any(greedy) or len(greedy) < 2


def test_scores_of_the_top_replace_those_of_the_token() -> None:
    tokenizer = build_small_tokenizer()
    ids = tokenizer.encode("abc", bos=False)
    top_ids = np.array([[ids[1], 9], [9, 8]], np.int32)
    top = np.array([[-1.0, -2.0], [-1.5, -np.inf]], np.float32)
    scores = RowScores(np.array([-1.0000001, -np.inf], np.float32), top_ids, top)
    echo = PromptDescriber(tokenizer, TokenBytes(tokenizer)).build_echo(
        EncodedPrompt(ids, "abc"), scores, 2
    )
    assert [token.logprob for token in echo.tokens] == [None, -1.0, -9999.0]
    assert [value for _, value in echo.tokens[2].top] == [-1.5, -9999.0]


@pytest.mark.parametrize("sampled", [{"temperature": 1, "seed": 3}, {"max_tokens": 4}])
def test_echo_comes_before_a_completion(client: httpx.Client, sampled: dict[str, Any]) -> None:
    """A completion is the same with and without the prompt before it."""
    fields = {"prompt": [TEXT, "Once"], "logprobs": 1, "n": 2, **sampled}
    plain = complete(client, **fields)
    echoed = complete(client, **fields, echo=True)
    for index, (alone, whole) in enumerate(zip(plain, echoed, strict=True)):
        text = fields["prompt"][index // 2]
        assert whole["text"] == text + alone["text"] and whole["index"] == index
        found, rest = whole["logprobs"], alone["logprobs"]
        count = len(rest["tokens"])
        assert found["tokens"][-count:] == rest["tokens"]
        np.testing.assert_allclose(
            found["token_logprobs"][-count:], rest["token_logprobs"], rtol=gamma(4)
        )
        assert found["text_offset"][-count:] == [len(text) + at for at in rest["text_offset"]]


def test_offsets_are_positions_in_the_text(client: httpx.Client) -> None:
    (choice,) = complete(client, prompt=TEXT, echo=True, logprobs=0, max_tokens=0)
    found = choice["logprobs"]
    assert choice["text"] == TEXT and choice["finish_reason"] == "length"
    for token, at in zip(found["tokens"], found["text_offset"], strict=True):
        assert "\ufffd" in token or TEXT[at:].startswith(token)
    assert found["text_offset"][-2:] == [len(TEXT) - 1] * 2  # both bytes of é


def test_a_stream_begins_with_the_prompt(client: httpx.Client) -> None:
    body = {"model": "policy", "prompt": TEXT, "seed": 3, "echo": True, "logprobs": 2}
    body |= {"max_tokens": 6, "return_token_ids": True}
    whole = client.post("/v1/completions", json=body).json()["choices"][0]
    reply = client.post("/v1/completions", json={**body, "stream": True})
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    parts = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert parts[0]["text"] == TEXT and parts[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert "".join(part["text"] for part in parts) == whole["text"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [each for part in parts if part["logprobs"] for each in part["logprobs"][name]]
        assert joined == whole["logprobs"][name]
    assert [id for part in parts for id in part.get("token_ids", ())] == whole["token_ids"]
    assert lines[-1] == "[DONE]" and parts[-1]["finish_reason"] == whole["finish_reason"]
    nothing = client.post("/v1/completions", json={**body, "stream": True, "max_tokens": 0})
    assert '"finish_reason": "length"' in nothing.text and "[DONE]" in nothing.text


@pytest.mark.parametrize("fields", [{}, {"top_k": 1}, {"stop": ["\ufffd"]}])
def test_an_end_token_has_a_log_prob(
    server: Server, client: httpx.Client, fields: dict[str, Any]
) -> None:
    """lm_eval leaves out the last log-prob as the completion's: without one, it would be the
    prompt's.
    """
    likeliest = complete(client, return_token_ids=True)[0]["token_ids"][0]
    spec = server.models[0].spec
    assert spec is not None
    spec.stop_ids.append(likeliest)
    try:
        (choice,) = complete(client, echo=True, logprobs=1, **fields)
    finally:
        spec.stop_ids.remove(likeliest)
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["token_logprobs"]) == len(PROMPT) + 1


def test_one_token_has_no_log_prob(client: httpx.Client) -> None:
    for new in (0, 1):
        (choice,) = complete(client, prompt=[7], echo=True, logprobs=1, max_tokens=new)
        found = choice["logprobs"]["token_logprobs"]
        assert found[0] is None and len(found) == 1 + new


def test_the_longest_prompts(client: httpx.Client, server: Server) -> None:
    """Up to the size of a pass (300 tokens here), also where the next token does not fit into it."""
    for length, new in ((300, 0), (300, 1), (299, 1)):
        (choice,) = complete(client, prompt=[9] * length, echo=True, logprobs=1, max_tokens=new)
        assert len(choice["logprobs"]["token_logprobs"]) == length + new
    assert server.models[0].worker.load == 0


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": 0}, "max_tokens=0: requires echo=true or prompt_logprobs"),
        ({"echo": 1}, "echo=1: must be true or false"),
        ({"prompt_logprobs": -1}, "prompt_logprobs=-1: must be a whole number from 0 to 20"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs=1: cannot be streamed"),
        ({"return_token_ids": "yes"}, "return_token_ids='yes': must be true or false"),
        ({"echo": True, "logprobs": 6}, "logprobs=6: must be a whole number from 0 to 5"),
        ({"echo": True, "logprobs": 1, "prompt": [5] * 301}, "--max-tokens-per-pass"),
        ({"echo": True, "logprobs": 1, "prompt": [5, 400]}, "token ids must be 0 to"),
        ({"echo": True, "logprobs": 1, "prompt": [[5] * 200] * 2, "n": 2}, "limit is 1000"),
        ({"return_token_ids": True, "prompt": [[5] * 200] * 6}, "send fewer prompts"),
    ],
)
def test_what_cannot_be_is_refused(
    client: httpx.Client, fields: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_api, "MAX_PROMPT_VALUES", 1000)
    body = {"model": "policy", "prompt": PROMPT, "max_tokens": 1, **fields}
    reply = client.post("/v1/completions", json=body)
    assert reply.status_code == 400 and says in reply.json()["error"]["message"], reply.text
    chat = {"model": "policy", "messages": [{"role": "user", "content": "x"}], "echo": True}
    assert "echo is not supported" in client.post("/v1/chat/completions", json=chat).text


def test_health_answers_during_a_pass_and_rows_that_wait_share_the_next(
    server: Server, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = TorchEngine.forward
    begun, answered = threading.Event(), threading.Event()
    passes: list[int] = []

    def waiting(engine: TorchEngine, batch: Any, *args: Any, **kwargs: Any) -> Any:
        passes.append(batch.num_ids)
        begun.set()
        assert answered.wait(60)
        return forward(engine, batch, *args, **kwargs)

    monkeypatch.setattr(TorchEngine, "forward", waiting)
    body = {"model": "policy", "echo": True, "logprobs": 1, "max_tokens": 0}
    worker = server.models[0].worker

    def ask(length: int) -> list[float]:
        reply = client.post("/v1/completions", json={**body, "prompt": PROMPT * length})
        return reply.raise_for_status().json()["choices"][0]["logprobs"]["token_logprobs"]

    with ThreadPoolExecutor(9) as clients:
        first = clients.submit(ask, 1)
        assert begun.wait(60)
        # 8 x 70 tokens: passes of at most 300 take 4 rows each.
        others = [clients.submit(ask, 10) for _ in range(8)]
        while worker.load < 9:
            for path in ("live", "ready"):
                assert httpx.get(f"{server.urls['http']}/v2/health/{path}").status_code == 200
        answered.set()
        assert len(first.result(60)) == len(PROMPT)
        results = [each.result(60) for each in others]
    assert passes == [1, 4, 4] and worker.load == 0
    monkeypatch.undo()
    for result in results:
        np.testing.assert_allclose(result[1:], ask(10)[1:], rtol=gamma(2))


def test_the_blank_that_a_tokenizer_adds_takes_no_room(data_dir: Path) -> None:
    from weft.data.spec import TokenizerSpec
    from weft.data.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(TokenizerSpec(), str(data_dir / "tokenizers" / "llama2"))
    describer = PromptDescriber(tokenizer, TokenBytes(tokenizer))
    for prompt in (
        EncodedPrompt(tokenizer.encode("Once upon"), "Once upon"),
        EncodedPrompt(tokenizer.encode("Once upon", bos=False)),
        EncodedPrompt(tokenizer.encode("Once upon", bos=True)),
    ):
        count = len(prompt.ids) - 1
        none = RowScores.build_without_top(np.zeros(count, np.float32))
        echo: EchoedPrompt = describer.build_echo(prompt, none, 0)
        shown: list[EmittedToken] = [token for token in echo.tokens if token.piece != b"<s>"]
        assert [echo.text[token.offset :].strip() for token in shown] == ["Once upon", "upon"]
