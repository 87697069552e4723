"""Roles behind a URL: what PPO and GRPO compute with them is what they compute with the same models
here.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bounds import gamma
from tests.launch.cases import options, prepare
from tests.serve.serving import TOKEN, make_reward, serving
from weft.engine.service_spec import ServiceAddress, ServiceSpec
from weft.errors import ConfigError, RunError
from weft.experiments import GRPOConfig, PPOConfig
from weft.host import http
from weft.launch import run
from weft.serve.bodies import LENGTH_HEADER, pack, unpack
from weft.serve.client import ServiceClient
from weft.serve.server import Server
from weft.serve.worker import build_sample


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("service")
    prepare(folder)
    make_reward(folder / "reward")
    return folder


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Server]:
    with serving(str(root / "model"), "--reward", str(root / "reward")) as running:
        yield running


@pytest.fixture(scope="module")
def expected(root: Path) -> list[dict[str, Any]]:
    """What PPO computes with the reward model and the reference here."""
    config = ppo(root, "here")
    config.rew.path = str(root / "reward")
    return run(config).metrics


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_SERVE_TOKEN", TOKEN)


def ppo(root: Path, folder: str) -> PPOConfig:
    config = PPOConfig(
        **options(root, folder, max_steps=2, save_freq_steps=None, recover_freq_steps=None)
    )
    config.actor.path = config.critic.path = str(root / "model")
    config.actor.optimizer.lr = config.critic.optimizer.lr = 1e-3
    config.dataset.path, config.dataset.train_bs_n_seqs = str(root / "prompts.jsonl"), 4
    config.ppo.gen.max_new_tokens, config.ppo.gen.temperature = 6, 0.8
    return config


def grpo(root: Path, folder: str) -> GRPOConfig:
    config = GRPOConfig(
        **options(root, folder, max_steps=2, save_freq_steps=None, recover_freq_steps=None)
    )
    config.actor.path, config.actor.optimizer.lr = str(root / "model"), 1e-3
    config.dataset.path, config.dataset.train_bs_n_seqs = str(root / "prompts.jsonl"), 4
    config.grpo.group_size, config.grpo.gen.max_new_tokens = 3, 6
    return config


def numbers(metrics: list[dict[str, Any]]) -> list[dict[str, float]]:
    """What is computed; not how long it took."""
    own = ("actor_train/", "critic_train/", "rew_inf/", "advantages/")
    timed = ("second", "flops", "mfu", "memory", "peak", "tokens_per")
    return [
        {
            key: value
            for key, value in line.items()
            if key.startswith(own) and not any(word in key for word in timed)
        }
        for line in metrics
    ]


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_ppo_with_urls_is_ppo_with_paths(
    root: Path, server: Server, expected: list[dict[str, Any]], token: None, kind: str
) -> None:
    there = ppo(root, f"there-{kind}")
    there.rew.url, there.ref.url = f"{server.urls[kind]}/reward", f"{server.urls[kind]}/model"
    there.rew.service.rows = there.ref.service.rows = 3
    made = run(there)
    assert numbers(made.metrics) == numbers(expected)
    assert any(key.startswith("rew_inf/") for key in numbers(made.metrics)[0])
    log = (made.directory / "log.txt").read_text()
    assert f"rew: scores come from {server.urls[kind]}/reward, no weights are loaded here" in log
    assert TOKEN not in log and TOKEN not in (made.directory / "config.yaml").read_text()


def test_grpo_with_urls_of_the_environment(
    root: Path, server: Server, token: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = grpo(root, "grpo-here")
    here.rew.path = str(root / "reward")
    expected = run(here)
    address = server.urls["grpc"].removeprefix("grpc://")
    monkeypatch.setenv("TRITON_HOST_RM", f"{address}/reward")
    monkeypatch.setenv("TRITON_HOST_REF", f"{address}/model")
    made = run(grpo(root, "grpo-there"))
    assert "no weights are loaded here" in (made.directory / "log.txt").read_text()
    for one, other in zip(numbers(made.metrics), numbers(expected.metrics), strict=True):
        assert one.keys() == other.keys()
        # The reference computes shared prompts once here and for each completion there. Its
        # log-probs then round differently by up to 2^-24 times logits of 16, 1e-6. Metrics are
        # means of them; the smallest, a KL of 5e-3, has a relative error of 2e-4.
        np.testing.assert_allclose(list(one.values()), list(other.values()), rtol=2e-4, atol=1e-6)


def test_a_server_that_is_gone_ends_the_run_and_says_who(
    root: Path, token: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "BACKOFF_S", 0.01)
    config = ppo(root, "gone")
    config.rew.url, config.rew.service.retries = "http://127.0.0.1:9/reward", 2
    with pytest.raises(
        RunError,
        match=r"(?s)rew_inf.*rew\.url=http://127\.0\.0\.1:9/reward: ConnectError \(asked 3 times\)",
    ):
        run(config)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rew.url": "127.0.0.1:8000/rm"}, r"rew\.url='127"),
        ({"rew.url": "http://127.0.0.1:8000"}, "host, port and model"),
        ({"rew.url": "http://user:secret@127.0.0.1:8000/rm"}, "must not contain a user, password"),
        ({"rew.url": "http://10.1.2.3:8000/rm"}, "unencrypted"),
        ({"rew.url": "http://127.0.0.1:8000/rm", "rew_step": "x"}, "rew_step"),
        ({"rew.url": "http://127.0.0.1:8000/rm", "rew.backend": "hf"}, "exclude each other"),
        ({"rew.url": "http://127.0.0.1:8000/rm", "rew.offload": True}, "offload=true moves"),
        ({"ref.url": "http://127.0.0.1:8000/p", "ppo.gen.top_k": 5, "rew.path": "reward"}, "top_k"),
        (
            {"ref.url": "http://127.0.0.1:8000/p", "ppo.ref_ema_eta": 0.1, "rew.path": "reward"},
            "ref_ema_eta",
        ),
        ({"rew.backend": "service"}, r"needs rew\.url"),
    ],
)
def test_what_cannot_be_is_refused_before_the_run(
    root: Path, token: None, change: dict[str, Any], says: str
) -> None:
    config = ppo(root, "refused")
    for name, value in change.items():
        at: Any = config
        *groups, last = name.split(".")
        for group in groups:
            at = getattr(at, group)
        setattr(at, last, str(root / value) if name == "rew.path" else value)
    with pytest.raises(ConfigError, match=says) as refused:
        config.build()
    assert "secret" not in str(refused.value) and TOKEN not in str(refused.value)


# -- other servers

ROWS = [[5, 6, 7, 8, 9], [10, 11, 12]]


@contextmanager
def answering(
    answer: Callable[[str, bytes, Any], tuple[int, bytes, dict[str, str]]],
) -> Iterator[str]:
    """The URL of a server that answers with `answer(path, body, headers)`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, body, headers = answer(self.path, raw, self.headers)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{made.server_port}/other"
        made.shutdown()


def metadata(*outputs: str) -> bytes:
    inputs = [
        {"name": name, "datatype": "INT32", "shape": [-1, -1]}
        for name in ("input_ids", "attention_mask")
    ]
    said = [{"name": name, "datatype": "FP32", "shape": [-1]} for name in outputs]
    return json.dumps({"name": "other", "inputs": inputs, "outputs": said}).encode()


def client(url: str, **more: Any) -> ServiceClient:
    spec = ServiceSpec(token_env=None, **more)
    return ServiceClient("ref", ServiceAddress.parse("ref", url, spec), spec)


def test_logits_are_reduced_in_small_requests() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(20, 5, 30)).astype(np.float32)
    seen = []

    def answer(path: str, raw: bytes, headers: Any) -> tuple[int, bytes, dict[str, str]]:
        if not path.endswith("/infer"):
            return 200, metadata("logits"), {}
        _, inputs = unpack(raw, int(headers[LENGTH_HEADER]), "inputs")
        seen.append(inputs["input_ids"].shape)
        body, length = pack(
            {},
            "outputs",
            {"logits": logits[: len(inputs["input_ids"]), : inputs["input_ids"].shape[1]]},
            {"logits"},
        )
        return 200, body, {LENGTH_HEADER: str(length)}

    batch = build_sample(ROWS * 10, [2, 1] * 10)
    with answering(answer) as url:
        made = (
            client(url, concurrency=1)
            .compute(batch, frozenset({"logprobs"}), 0.5)
            .sequences("logprobs")
        )
    assert [shape[0] for shape in seen] == [8, 8, 4]
    for index in range(8):
        ids, start = (ROWS * 10)[index], [2, 1][index % 2]
        scaled = logits[index].astype(np.float64) / 0.5
        expected = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
        wanted = [expected[at - 1, ids[at]] for at in range(start, len(ids))]
        # Log-probs are rounded to float32 after they were computed in float64.
        np.testing.assert_allclose(np.asarray(made[index]), wanted, rtol=gamma(1.01))


def test_a_busy_server_is_asked_again_and_a_wrong_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "BACKOFF_S", 0.01)
    statuses = [503, 429, 200]

    def busy(path: str, raw: bytes, headers: Any) -> tuple[int, bytes, dict[str, str]]:
        if not path.endswith("/infer"):
            return statuses.pop(0), metadata("rewards"), {}
        return (
            200,
            json.dumps(
                {
                    "outputs": [
                        {"name": "rewards", "datatype": "FP32", "shape": [2], "data": [1.0, 2.0]}
                    ]
                }
            ).encode(),
            {},
        )

    batch = build_sample(ROWS, [2, 1])
    with answering(busy) as url:
        assert client(url).compute(batch, frozenset({"scores"}), 1.0).data["scores"].tolist() == [
            1.0,
            2.0,
        ]
    cases = [
        ((404, b"no", {}), RunError, "status 404: 'no'; check the model's name"),
        ((200, b"<html>", {}), RunError, "does not follow the inference protocol"),
        (
            (200, metadata("embedding"), {}),
            ConfigError,
            "it must take input_ids and give rewards or scores",
        ),
    ]
    for came, error, says in cases:
        with answering(lambda *_, came=came: came) as url, pytest.raises(error, match=says):
            client(url).compute(batch, frozenset({"scores"}), 1.0)


def test_a_server_that_gives_too_few_scores() -> None:
    def short(path: str, raw: bytes, headers: Any) -> tuple[int, bytes, dict[str, str]]:
        if not path.endswith("/infer"):
            return 200, metadata("rewards"), {}
        return (
            200,
            json.dumps(
                {"outputs": [{"name": "rewards", "datatype": "FP32", "shape": [1], "data": [1.0]}]}
            ).encode(),
            {},
        )

    with answering(short) as url, pytest.raises(RunError, match="has the shape"):
        client(url).compute(build_sample(ROWS, [2, 1]), frozenset({"scores"}), 1.0)


def test_log_probs_at_another_temperature_need_a_server_that_has_one() -> None:
    with (
        answering(lambda *_: (200, metadata("logprobs"), {})) as url,
        pytest.raises(ConfigError, match="temperature 1"),
    ):
        client(url).compute(build_sample(ROWS, [2, 1]), frozenset({"logprobs"}), 0.7)
