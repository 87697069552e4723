"""`weft serve MODEL --reward MODEL`: serve a policy and a reward model over HTTP and gRPC.

The server runs until Ctrl-C.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import re
import secrets
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weft.checkpoints.names import SCORERS, ModelQuery, find_model
from weft.cli import model_arguments
from weft.cli.parsing import CommandParser
from weft.engine.spec import GenerationSpec, Head, ModelSpec
from weft.engine.spec_parts import find_cache_problem
from weft.errors import CheckpointError, ConfigError
from weft.evaluation.models import is_scorer, open_policy, open_scorer
from weft.observe.jsonl import build_served_name
from weft.reading import read_text

if TYPE_CHECKING:
    from weft.serve.served_model import ServedModel

TOKEN_VARIABLE = "WEFT_SERVE_TOKEN"
# Seconds between thread switches. The event loop waits this long each time another thread executes
# Python code, such as a slow template, and an answer needs several switches.
SWITCH_INTERVAL_SECONDS = 5e-4
MAX_TOKEN_BYTES = 1 << 16  # maximum bytes of a token file
NAME = re.compile(r"[A-Za-z0-9][\w.:@+\-]{0,127}", re.ASCII)
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="weft serve", description=__doc__)
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="policy: model, adapter or run directory, or hub name",
    )
    parser.add_argument(
        "--reward", metavar="MODEL", help="reward model: directory, run or hub name"
    )
    parser.add_argument(
        "--name", help="the policy's name for clients (default: that of its directory)"
    )
    parser.add_argument("--reward-name", help="the reward model's name for clients")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default 127.0.0.1: only this machine can connect)",
    )
    parser.add_argument(
        "--port",
        "--http-port",
        dest="http_port",
        metavar="PORT",
        type=int,
        default=8000,
        help="port for HTTP (default 8000; 0: a free one)",
    )
    parser.add_argument(
        "--grpc-port", type=int, help="port for the inference protocol over gRPC (default: none)"
    )
    parser.add_argument(
        "--metrics-port", type=int, help="port for Prometheus metrics at /metrics (default: none)"
    )
    model_arguments.add_model_options(parser)
    parser.add_argument(
        "--token-file", type=Path, help="file with the token that requests must carry"
    )
    parser.add_argument(
        "--token-env",
        metavar="NAME",
        help=f"environment variable with the token (default {TOKEN_VARIABLE}, if it is set)",
    )
    parser.add_argument(
        "--no-token",
        action="store_true",
        help="let any process on this machine send requests (loopback addresses only)",
    )
    _add_limits(parser)
    return parser


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """Add the options that limit a single request, and all requests together."""
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=1024,
        help="maximum tokens of a completion (default 1024)",
    )
    parser.add_argument(
        "--max-prompt-tokens",
        type=int,
        default=16384,
        help="maximum tokens of a prompt (default 16384)",
    )
    parser.add_argument(
        "--max-prompt-kb",
        type=float,
        default=512.0,
        help="maximum KiB of a request's text, before it is tokenized (default 512)",
    )
    parser.add_argument(
        "--max-tokens-per-pass",
        type=int,
        default=16384,
        help="maximum tokens scored per pass (default 16384)",
    )
    parser.add_argument(
        "--max-load",
        type=int,
        default=1024,
        help="maximum completions or rows, waiting and in progress (default 1024)",
    )
    parser.add_argument(
        "--max-body-mb", type=float, default=16.0, help="maximum MiB of a request (default 16)"
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="maximum seconds of a request (default 600)"
    )
    parser.add_argument(
        "--kv-cache-gb",
        type=float,
        help="GiB of the KV cache (default: a quarter of the memory)",
    )


def main(argv: Sequence[str]) -> int:
    """Load the models and serve them until Ctrl-C or SIGTERM, and return the exit code 0.

    Raises `UserError` (exit code 2) for models that cannot be served.
    """
    arguments = build_parser().parse_args(list(argv))
    _check_arguments(arguments)
    token, source = _find_token(arguments)
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        import uvicorn  # noqa: F401

        from weft.serve import server
        from weft.serve.exchange import ServerLimits
    except ImportError as error:
        from weft.extras import install

        raise ConfigError(
            f"weft serve needs the package {error.name}; run: {install('serve')}"
        ) from None
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    stop_requested = threading.Event()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, lambda *_: stop_requested.set())
    limits = ServerLimits(
        body_bytes=int(arguments.max_body_mb * 2**20),
        seconds=arguments.timeout,
        max_prompt_tokens=arguments.max_prompt_tokens,
        prompt_bytes=int(arguments.max_prompt_kb * 2**10),
        max_new_tokens=arguments.max_new_tokens,
        max_load=arguments.max_load,
    )
    served = load_models(arguments)
    ports = server.ServerPorts(
        arguments.host, arguments.http_port, arguments.grpc_port, arguments.metrics_port
    )
    with server.Server(served, ports, limits, token) as running:
        # Exclude the objects of modules, models and tokenizers from garbage collection: scanning
        # them takes tenths of a second, in which no thread can answer.
        gc.freeze()
        for line in _describe_server(running.urls, served, source):
            print(line, flush=True)
        stop_requested.wait()
        print("stopping", flush=True)
    return 0


def _describe_server(urls: dict[str, str], models: Sequence[ServedModel], source: str) -> list[str]:
    lines = []
    for model in models:
        lines.append(f"{model.name}: {'policy' if model.spec is not None else 'reward model'}")
    pages = {"http": "/v1 and /v2", "grpc": "", "metrics": "/metrics"}
    for name, url in urls.items():
        lines.append(f"{name} at {url} {pages[name]}".rstrip())
    return [*lines, source, "Ctrl-C ends it"]


def _check_arguments(arguments: argparse.Namespace) -> None:
    """Raise `ConfigError` if no model is named, or if a port, a name or a limit is invalid."""
    if arguments.model is None and arguments.reward is None:
        raise ConfigError(
            "nothing to serve: name a policy (weft serve MODEL), a reward model (--reward MODEL), "
            "or both"
        )
    for name in ("http_port", "grpc_port", "metrics_port"):
        value = getattr(arguments, name)
        option = "port" if name == "http_port" else name.replace("_", "-")
        if value is not None and not 0 <= value <= 65535:
            raise ConfigError(f"--{option}={value}: must be from 0 to 65535")
    for name in ("name", "reward_name"):
        value = getattr(arguments, name)
        if value is not None and not NAME.fullmatch(value):
            raise ConfigError(
                f"--{name.replace('_', '-')}={value!r}: clients put the name into URLs; write "
                "letters, digits, '.', '_', ':', '@', '+' or '-', at most 128 of them, the first "
                "a letter or digit"
            )
    token_limits = ("max_new_tokens", "max_prompt_tokens", "max_tokens_per_pass")
    for name in (*token_limits, "max_prompt_kb", "max_load", "max_body_mb", "timeout"):
        if not 0 < getattr(arguments, name) < 2**53:
            raise ConfigError(
                f"--{name.replace('_', '-')}={getattr(arguments, name)}: must be a finite number "
                f"above 0"
            )
    if arguments.kv_cache_gb is None:
        problem = None
    else:
        problem = find_cache_problem(arguments.kv_cache_gb)
    if problem is not None:
        raise ConfigError(f"--kv-cache-gb={arguments.kv_cache_gb:g}: {problem}")


def _find_token(arguments: argparse.Namespace) -> tuple[str | None, str]:
    """Return the token that clients must send, and a line that tells the user its source.

    The token is read from a file or an environment variable; without these, it is generated. With
    `--no-token`, it is None. Raises `ConfigError` for an invalid token; the message does not
    contain the token.
    """
    if arguments.no_token:
        if arguments.host not in LOOPBACK or arguments.token_file or arguments.token_env:
            raise ConfigError(
                "--no-token is allowed only with --host=127.0.0.1, and without --token-file and "
                "--token-env"
            )
        return None, "no token: any process on this machine may send requests"
    if arguments.token_file and arguments.token_env:
        raise ConfigError("--token-file and --token-env exclude each other; set one of them")
    if arguments.token_file:
        token = read_text(
            arguments.token_file,
            f"--token-file={arguments.token_file}",
            ConfigError,
            MAX_TOKEN_BYTES,
        ).strip()
        source = f"token: read from {arguments.token_file}"
    else:
        variable = arguments.token_env or TOKEN_VARIABLE
        token = os.environ.get(variable, "").strip()
        source = f"token: read from {variable}"
        if not token and arguments.token_env:
            raise ConfigError(
                "--token-env names an environment variable that is not set; export it"
            )
        if not token:
            token = secrets.token_urlsafe(24)
            return token, f"token, generated for this run: {token}"
    if not re.fullmatch(r"[\x21-\x7e]+", token):
        raise ConfigError(
            "the token must be ASCII characters without spaces; its value is not shown"
        )
    return token, source


def load_models(arguments: argparse.Namespace) -> list[ServedModel]:
    """Load the policy and the reward model that the command line names.

    Raises `UserError` for models that cannot be served.
    """
    model_requests: list[tuple[str, str, Head]] = []  # (path, name for clients, head)
    if arguments.model is not None:
        path = _find_path(arguments.model, ModelQuery("MODEL"))
        is_reward_model = is_scorer(path)
        if is_reward_model and arguments.reward is not None:
            raise CheckpointError(
                f"{path} is also a reward model; name a policy, or leave out --reward"
            )
        name = (arguments.name or arguments.reward_name) if is_reward_model else arguments.name
        model_requests.append(
            (path, name or build_served_name(path), "score" if is_reward_model else "lm")
        )
    if arguments.reward is not None:
        path = _find_path(arguments.reward, ModelQuery("--reward", SCORERS))
        if not is_scorer(path):
            raise CheckpointError(
                f"--reward={arguments.reward} has no score head; train one with weft quickstart rw"
            )
        name = arguments.reward_name or build_served_name(path)
        if [name] == [other_name for _, other_name, _ in model_requests]:
            if arguments.reward_name is not None:
                raise ConfigError(f"both models are called {name}; set --name or --reward-name")
            name = f"{name}-reward"
        model_requests.append((path, name, "score"))
    return [_load(arguments, *request) for request in model_requests]


def _find_path(name: str, query: ModelQuery) -> str:
    """Return the path of the model `name`, and print the note about how it was found."""
    model = find_model(name, query)
    if model.note:
        print(model.note, file=sys.stderr)
    return model.path


def _load(arguments: argparse.Namespace, path: str, name: str, head: Head) -> ServedModel:
    """Load the model at `path` and its tokenizer, and return them as a `ServedModel`.

    The thread that executes the model is not started. `name` is the model's name in requests.
    `head` is "lm" for a policy; with any other head, a reward model is loaded.
    """
    from weft.serve.served_model import LOGPROBS, REWARDS, ServedModel
    from weft.serve.worker import ServingWorker

    model = ModelSpec(
        path=path,
        backend=arguments.backend,
        device=arguments.device,
        dtype=arguments.dtype,
        quantize=arguments.quantize,
    )
    opened = (open_policy if head == "lm" else open_scorer)(model)
    engine = opened.engine
    tokenizer = opened.tokenizer
    spec = None
    if head == "lm":
        spec = GenerationSpec(
            max_new_tokens=arguments.max_new_tokens,
            seed=int.from_bytes(os.urandom(4), "little"),
            tokenizer=tokenizer,
            stop_ids=tokenizer.list_stop_ids(),
            kv_cache_gb=arguments.kv_cache_gb,
        )
    return ServedModel(
        name=name,
        worker=ServingWorker(engine, spec, arguments.max_tokens_per_pass),
        tokenizer=tokenizer,
        vocab_size=int(engine.description["vocab_size"]),
        output=LOGPROBS if head == "lm" else REWARDS,
        context=opened.context,
        spec=spec,
    )
