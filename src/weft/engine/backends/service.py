"""Backend for roles that get scores or log-probs from a service at a URL."""

from __future__ import annotations

from weft.engine.backends.null import NullEngine
from weft.engine.service_address import ServiceAddress
from weft.engine.service_client import ServiceClient
from weft.engine.service_spec import ServedSpec
from weft.engine.spec import ModelSpec
from weft.errors import ConfigError
from weft.registry import register_backend
from weft.topology import Layout

ROLES = {"score": "rew", "lm": "ref"}  # name of the role by its head


@register_backend("service")
def service(spec: ModelSpec, layout: Layout) -> NullEngine:
    """Build an engine that gets its outputs from a service.

    Raises `ConfigError` for a role without a URL, and for a trained role.
    """
    if not isinstance(spec, ServedSpec) or spec.url is None:
        raise ConfigError(
            "backend=service: the role needs a url; leave backend out and set rew.url or ref.url"
        )
    if spec.trained:
        raise ConfigError(
            f"url={spec.url!r}: a role that is trained has its network here; set path"
        )
    client = ServiceClient(
        ROLES[spec.head],
        ServiceAddress.parse(ROLES[spec.head], spec.url, spec.service),
        spec.service,
    )
    return NullEngine(layout, client.compute, f"served by {spec.url}")
