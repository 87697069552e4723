"""A network's parameters by canonical name, independent of how they are stored.

Families, checkpoints, engines and reallocation use names like `blocks.3.attention.q.weight`. The
network stores this parameter as rows of `blocks.3.attention.qkv.weight`. Each canonical parameter
consists of consecutive whole rows of a stored one, so a rectangle of a canonical parameter is also
a rectangle of the stored parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from weft.models.network.linear import Adapter, Linear


@dataclass(frozen=True)
class StoredParameter:
    """Location of a canonical parameter in the network.

    Canonical parameters do not depend on how the network stores them: it can store several as one.
    For example, the canonical parameters `q.weight`, `k.weight` and `v.weight` of an attention
    layer are rows of the stored parameter `qkv.weight`.

    Attributes:
        name: Name of the stored parameter in the network.
        parameter: The stored parameter.
        rows: Rows of the stored parameter that are the canonical parameter; None means all rows.
    """

    name: str  # name of the stored parameter in the network
    parameter: nn.Parameter
    rows: slice | None = None

    @property
    def data(self) -> Tensor:
        """Values of the canonical parameter, as a view without a gradient."""
        return self.select_rows(self.parameter.detach())

    @property
    def grad(self) -> Tensor | None:
        """Gradient of the canonical parameter, as a view, or None if it has not been computed."""
        return None if self.parameter.grad is None else self.select_rows(self.parameter.grad)

    @property
    def requires_grad(self) -> bool:
        return self.parameter.requires_grad

    def select_rows(self, whole: Tensor) -> Tensor:
        """Return the part of `whole` that corresponds to `rows`, or all of it if `rows` is None.

        `whole` has the shape of the stored parameter; it can be, for example, the gradient.
        """
        return whole if self.rows is None else whole[self.rows]


def find_canonical_parameters(network: nn.Module) -> dict[str, StoredParameter]:
    """Return the location of every parameter by canonical name; tied parameters are listed once.

    Parameters of modules that are not weft's keep the names that they have in the module.
    """
    parameters: dict[str, StoredParameter] = {}
    seen: set[tuple[int, int]] = set()
    for path, module in network.named_modules():
        for name, stored in _iterate_module(path, module):
            key = id(stored.parameter), 0 if stored.rows is None else stored.rows.start
            if key not in seen:
                seen.add(key)
                parameters[name] = stored
    layers = getattr(network, "held_layers", None)
    if layers is None:
        return parameters
    return {number_block(name, layers): stored for name, stored in parameters.items()}


def find_canonical_values(network: nn.Module) -> dict[str, Tensor]:
    """Return the values of every parameter by canonical name, as views without gradients."""
    return {name: stored.data for name, stored in find_canonical_parameters(network).items()}


def _iterate_module(path: str, module: nn.Module) -> Iterator[tuple[str, StoredParameter]]:
    if isinstance(module, Adapter):
        return  # its layer yields its parameters
    if isinstance(module, Linear):
        parent = path.rpartition(".")[0]
        for part in module.parts:
            yield from _iterate_part(f"{parent}.{part}".lstrip("."), path, module, part)
        return
    for own, parameter in module.named_parameters(recurse=False):
        name = f"{path}.{own}".lstrip(".")
        yield name, StoredParameter(name, parameter)
    adapter = getattr(module, "adapter", None)
    if isinstance(adapter, Adapter):
        yield from _iterate_adapter(path, f"{path}.adapter", adapter)


def _iterate_part(
    name: str, path: str, module: Linear, part: str
) -> Iterator[tuple[str, StoredParameter]]:
    rows = module.find_rows(part) if len(module.parts) > 1 else None
    yield f"{name}.weight", StoredParameter(f"{path}.weight", module.weight, rows)
    if module.bias is not None:
        yield f"{name}.bias", StoredParameter(f"{path}.bias", module.bias, rows)
    if (adapter := module.find_adapter(part)) is not None:
        yield from _iterate_adapter(name, f"{path}.adapters.{part}", adapter)


def _iterate_adapter(
    name: str, path: str, adapter: Adapter
) -> Iterator[tuple[str, StoredParameter]]:
    for own in ("lora_a", "lora_b"):
        yield f"{name}.{own}", StoredParameter(f"{path}.{own}", getattr(adapter, own))


def number_block(name: str, layers: Sequence[int] | None) -> str:
    """Return `name` with the local index of its block replaced by the index in the whole network.

    `layers` are the indices of the local blocks in the whole network; None leaves the name
    unchanged.
    """
    parts = name.split(".")
    if layers is not None and parts[0] == "blocks" and len(parts) > 1:
        parts[1] = str(layers[int(parts[1])])
    return ".".join(parts)
