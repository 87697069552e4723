"""User options of a role whose network is served at a URL (`rew.*` and `ref.*`).

The module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import unquote

from weft.engine.spec import ModelSpec
from weft.errors import ConfigError
from weft.host import http
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


EXAMPLE = "http://127.0.0.1:8000/MODEL or grpc://127.0.0.1:8001/MODEL"


@dataclass(frozen=True)
class ServiceAddress:
    """Address of a model that a server provides; create it with `parse`, which checks the URL."""

    url: str
    scheme: str
    address: str  # host:port
    model: str
    token: str | None = field(repr=False)
    loopback: bool

    @classmethod
    def parse(cls, role: str, url: str, spec: ServiceSpec) -> ServiceAddress:
        """Parse and check a URL.

        Raises `ConfigError` for a URL that does not name a model, or one to which the token would
        be sent unencrypted; the message does not contain the token.
        """
        parsed = http.split_base_url(
            f"{role}.url", url, ("http", "https", "grpc", "grpcs"), EXAMPLE, TOKEN_VARIABLE
        )
        model = parsed.path.strip("/").removeprefix("v2/models/")
        if not model or "/" in model or not parsed.port:
            raise ConfigError(
                f"{role}.url={url!r} must name host, port and model, such as {EXAMPLE}"
            )
        token = http.read_api_key(f"{role}.service.token_env", spec.token_env, TOKEN_VARIABLE)
        loopback = http.is_loopback(parsed.hostname or "")
        if (
            token is not None
            and parsed.scheme in ("http", "grpc")
            and not loopback
            and not spec.insecure
        ):
            raise ConfigError(
                f"{role}.url={url!r} would send the token unencrypted to another machine; use "
                f"https or grpcs, set "
                f"{role}.service.token_env=null to send none, or {role}.service.insecure=true "
                f"where the network is trusted"
            )
        return cls(url.rstrip("/"), parsed.scheme, parsed.netloc, unquote(model), token, loopback)
