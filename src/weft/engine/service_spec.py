"""User options of a role whose network is served at a URL (`rew.*` and `ref.*`).

The module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.engine.spec import ModelSpec
from weft.options import option

TOKEN_VARIABLE = "WEFT_SERVE_TOKEN"
SERVICE = "service"  # backend of a role whose network is behind a URL
NO_NETWORK = ("null", SERVICE)  # backends without a network in this process


@dataclass
class ServiceSpec:
    """Options for requests to a server."""

    timeout_s: float = option(60.0, "maximum seconds of one request", at_least=0.001)
    retries: int = option(
        6, "how often a failed request is sent again, with growing delays", at_least=0
    )
    concurrency: int = option(4, "requests in flight", at_least=1)
    rows: int = option(
        16,
        "completions of one request; a server that answers with whole logits gets at most 8",
        at_least=1,
    )
    token_env: str | None = option(
        TOKEN_VARIABLE,
        "environment variable with the token that the server asks for; null to send none",
    )
    insecure: bool = option(
        False, "send the token unencrypted to another machine, in a network that is trusted"
    )


@dataclass
class ServedSpec(ModelSpec):
    """Options of a frozen role whose network runs either in this process or on a server."""

    url: str | None = option(
        None,
        "server that has this network, such as http://127.0.0.1:8000/MODEL or "
        "grpc://HOST:8001/MODEL (weft serve, Triton); "
        "path then names the tokenizer alone",
    )
    service: ServiceSpec = option(ServiceSpec(), "requests to the server at url")
