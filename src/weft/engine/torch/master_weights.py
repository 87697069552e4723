"""One network's parameters in their two forms: float32 masters that are trained, and the compute copy that the network runs.

Where the network computes in float32 the two are the same tensors. Otherwise the copy is cast once a step, each micro-batch's
gradient is added to its master in float32, and tensors that nobody trains exist in the compute dtype alone. Masters may live
in host memory (`home`): gradients go there as they are made, and with them the optimizer's state and its work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from weft.errors import CheckpointError, ConfigError
from weft.models.network.parameters import StoredParameter, canonical
from weft.topology import Slice, whole

if TYPE_CHECKING:
    from weft.parallel.shard import Shards

HALF = (torch.bfloat16, torch.float16)


class MasterWeights:
    """Those parameters of `network` that require gradients are trained; they come in float32, or in `dtype` where adapters
    were made beside frozen weights.

    What goes in and out has canonical names (`weft.models.network.parameters`); the optimizer sees parameters as they are
    stored. With a `home` every trained parameter has a master there, whatever the dtype and wherever the network goes (Ren et
    al. 2021, "ZeRO-Offload", arXiv:2101.06840).

    `places` say what part of each whole parameter lies here; without them all of it does. Of a sharded network (`shards`) the
    parameters are this rank's rows, float32 where they are trained; FSDP2 casts what it gathers.
    """

    def __init__(
        self,
        network: nn.Module,
        dtype: torch.dtype,
        home: torch.device | None = None,
        places: Mapping[str, Slice] | None = None,
        shards: Shards | None = None,
    ) -> None:
        self._network, self._home, self._shards = network, home, shards
        self._masters: dict[str, nn.Parameter] = {}  # by the stored name
        for name, parameter in network.named_parameters():
            if parameter.requires_grad and (dtype in HALF or home is not None):
                wide = torch.promote_types(parameter.dtype, torch.float32)
                self._masters[name] = nn.Parameter(parameter.detach().to(home, wide, copy=True))
        _cast(network, dtype, self._masters)
        self._copies = dict(network.named_parameters())
        self._canonical = canonical(network) if shards is None else shards.stored
        self._places = places or {name: whole(tuple(part.data.shape)) for name, part in self._canonical.items()}
        self._written: set[str] = set()
        for name in self._masters:
            self._copies[name].register_post_accumulate_grad_hook(self._moves_gradient_to(name))

    def _moves_gradient_to(self, name: str) -> Callable[[Tensor], None]:
        def move(copy: Tensor) -> None:
            master = self._masters[name]
            if copy.grad is None:  # a product has added it to the master's
                return
            gradient = copy.grad.to(master)
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            copy.grad = None

        return move

    @property
    def masters(self) -> Mapping[str, nn.Parameter]:
        """Those apart from the network's parameters, by the names of these."""
        return self._masters

    @property
    def trained(self) -> dict[str, StoredParameter]:
        """Canonical name -> where the parameter that the optimizer updates lies, and its gradient."""
        return {name: part for name, part in self._most_exact() if self._trains(part)}

    @property
    def changeable(self) -> dict[str, Tensor]:
        """What need not be as it was read: trained or written to since."""
        parts, written = self._most_exact(), self._written
        return {name: p.data for name, p in parts if name in written or self._trains(p)}

    @property
    def all(self) -> dict[str, Tensor]:
        """Every parameter in its most exact form: views without a gradient."""
        return {name: part.data for name, part in self._most_exact()}

    def _trains(self, part: StoredParameter) -> bool:
        return self._copies[part.name].requires_grad

    @property
    def stored(self) -> Mapping[str, StoredParameter]:
        """Canonical name -> where this rank's part lies, in its most exact form."""
        return dict(self._most_exact())

    def _most_exact(self) -> Iterator[tuple[str, StoredParameter]]:
        for name, part in self._canonical.items():
            master = self._masters.get(part.name)
            yield name, part if master is None else StoredParameter(part.name, master, part.rows)

    def refresh(self) -> None:
        """Cast the masters into the compute copy; called after every change of the masters."""
        with torch.no_grad():
            for name, master in self._masters.items():
                self._copies[name].copy_(master)

    def to(self, device: torch.device) -> None:
        """Move every form of every parameter but masters with a home; nothing happens to what is there already."""
        self._network.to(device)
        if self._shards is not None:
            self._shards.relink()
        if self._home is None:
            nn.ParameterList(self._masters.values()).to(device)

    # -- in and out

    def slices(self) -> dict[str, Slice]:
        return {name: self._places[name] for name in self._canonical}

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Slice, Tensor]]:
        """(name, where in the whole tensor, the values): views that the next step changes."""
        held = self.all
        for name in names:
            self._known(name)
            yield name, self._places[name], held[name]

    @torch.no_grad()
    def write(self, parts: Iterable[tuple[str, Slice, Tensor]], eta: float) -> None:
        """target <- eta * source + (1 - eta) * target, in float32.

        A tensor of half precision that gets a share gets a float32 master too: a moving average in bfloat16 would stand
        still, because a small share is less than half its last digit. Raises `ConfigError` for unknown names and shapes.
        """
        for name, where, values in parts:
            self._known(name)
            if eta != 1.0:
                self._have_master(name)
            part, place = self._canonical[name], self._places[name]
            here = tuple(slice(w.start - p.start, w.stop - p.start) for w, p in zip(where, place, strict=True))
            target = part.of(self._masters.get(part.name, part.parameter).detach())[here]
            if target.shape != values.shape:
                raise ConfigError(
                    f"parameter {name!r} is {tuple(target.shape)} here and {tuple(values.shape)} at the source; "
                    "parameters are copied between networks of one shape only"
                )
            source = values.to(device=target.device, dtype=target.dtype)
            target.copy_(source if eta == 1.0 else target.lerp(source, eta))
            self._written.add(name)
        self.refresh()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what was `changeable`, bit for bit, this rank's part of each; half-precision parameters
        that come as float32 get a master.

        Raises `CheckpointError` where others were written to since, whose values are then gone.
        """
        gone = sorted(set(self.changeable) - set(tensors))
        if gone:
            raise CheckpointError(f"the saved state has no {', '.join(gone[:5])}, which was changed since it was read")
        for name, values in tensors.items():
            self._known(name)
            if values.dtype == torch.float32:
                self._have_master(name)
        self.write(((name, self._places[name], v) for name, v in tensors.items()), eta=1.0)

    def _have_master(self, name: str) -> None:
        """Give a parameter of half precision a float32 master."""
        part = self._canonical[name]
        if part.parameter.dtype in HALF and part.name not in self._masters:
            self._masters[part.name] = nn.Parameter(part.parameter.detach().float(), requires_grad=False)

    def _known(self, name: str) -> None:
        if name not in self._canonical:
            raise ConfigError(f"this network has no parameter {name!r}; the two networks are of different kinds")


def _cast(network: nn.Module, dtype: torch.dtype, names: Iterable[str]) -> None:
    """Replace these parameters by ones of `dtype`; a tensor that is tied stays tied."""
    chosen, made = set(names), dict[nn.Parameter, nn.Parameter]()
    for name, parameter in network.named_parameters():
        if name in chosen and parameter.dtype != dtype:
            made[parameter] = nn.Parameter(parameter.detach().to(dtype))
    for module in network.modules():
        for own, parameter in list(module.named_parameters(recurse=False)):
            if parameter in made:
                setattr(module, own, made[parameter])
