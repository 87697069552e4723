"""Address of a model that is served at a URL, and the token that is sent to its server."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import unquote

from weft.engine.service_spec import TOKEN_VARIABLE, ServiceSpec
from weft.errors import ConfigError
from weft.host import http

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
