"""Parameters of one network in two forms: float32 masters and a copy in the compute dtype.

If the network computes in float32, the two are the same tensors. Otherwise the copy is cast once
per step, the gradient of each micro-batch is added to the master's gradient in float32, and frozen
tensors exist in the compute dtype only. Masters may be kept in host memory (`home`). Gradients are
then moved to the host as they are computed, and the optimizer updates the masters there. All
parameters on the device can be offloaded (`offload`) and fetched back block by block (`fetch`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from weft.engine.torch.host_memory import (
    BlockFetcher,
    HostGradientAccumulator,
    HostMemory,
    MasterUploader,
)
from weft.errors import CheckpointError, ConfigError
from weft.kernels import CopyQueue
from weft.models.network import quantized
from weft.models.network.linear import StoredParameter, find_canonical_parameters
from weft.models.network.quantized import Quantized
from weft.topology import Slice, build_whole_slice

if TYPE_CHECKING:
    from weft.parallel.shard import LocalShards

HALF = (torch.bfloat16, torch.float16)


class MasterWeights:
    """Master weights and compute copies of a network's parameters.

    Parameters that require gradients are trained. They must be float32 or wider. In a network with
    adapters, they can also be in the compute dtype. Unless noted otherwise, methods identify
    parameters by canonical name (`weft.models.network.linear`).

    Args:
        network: Network on the device. Its parameters become the compute copies.
        dtype: Dtype of the compute copies.
        lane: Queue that performs the copies between device and host.
        home: Device of the masters, such as the CPU (Ren et al. 2021, "ZeRO-Offload",
            arXiv:2101.06840). If it is set, every trained parameter has a separate master, even
            in float32. If it is None, the masters are on the network's device.
        places: Slice of each parameter that this rank has (default: the whole parameter).
        shards: This rank's rows of the parameters that FSDP2 shards, or None without FSDP2. With
            FSDP2, masters and copies have only these rows. Trained rows stay in float32 or wider,
            because FSDP2 casts them when it gathers them.
        blocks: Modules of the forward pass in order. Their offloaded parameters are fetched back
            in this order during the pass.
    """

    def __init__(
        self,
        network: nn.Module,
        dtype: torch.dtype,
        lane: CopyQueue,
        home: torch.device | None = None,
        places: Mapping[str, Slice] | None = None,
        shards: LocalShards | None = None,
        blocks: Sequence[nn.Module] = (),
    ) -> None:
        self._network = network
        self._shards = shards
        self._lane = lane
        self._blocks = blocks
        self._masters: dict[str, nn.Parameter] = {}  # by stored name
        for name, parameter in network.named_parameters():
            if parameter.requires_grad and (dtype in HALF or home is not None):
                rank_rows = self._select_rank_rows(parameter)
                wide = torch.promote_types(rank_rows.dtype, torch.float32)
                self._masters[name] = nn.Parameter(rank_rows.detach().to(home, wide, copy=True))
        if home is not None:
            self._homed = frozenset(self._masters)
        else:
            self._homed = frozenset[str]()
        _cast(network, dtype, self._masters if dtype in HALF else ())
        self._copies = {
            name: self._select_rank_rows(parameter)
            for name, parameter in network.named_parameters()
        }
        self._canonical = find_canonical_parameters(network) if shards is None else shards.stored
        self._places = places or {
            name: build_whole_slice(tuple(part.data.shape))
            for name, part in self._canonical.items()
        }
        self._written: set[str] = set()
        self._sums: dict[str, Tensor] = {}  # gradient sums in host memory, if masters have a `home`
        self._gradients = HostGradientAccumulator(lane)
        self._values = MasterUploader(lane)
        # masters whose new values are already being copied to the device
        self._sent: set[str] = set()
        self._mover: BlockFetcher | None = None  # set by the first `offload`
        for name, parameter in network.named_parameters():
            if name in self._masters:
                if home is None:
                    hook = self._build_move_hook(name)
                else:
                    hook = self._build_accumulate_hook(name)
                parameter.register_post_accumulate_grad_hook(hook)

    def _select_rank_rows(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return this rank's rows of a parameter of the network."""
        if self._shards is None:
            return parameter
        return self._shards.get_local_rows(parameter)

    def _build_move_hook(self, name: str) -> Callable[[Tensor], None]:
        def move(copy: Tensor) -> None:
            master = self._masters[name]
            if copy.grad is None:  # the matrix kernel already added it to the master's gradient
                return
            gradient = copy.grad.to(master)
            if master.grad is None:
                master.grad = gradient
            else:
                master.grad = master.grad.add_(gradient)
            copy.grad = None

        return move

    def _build_accumulate_hook(self, name: str) -> Callable[[Tensor], None]:
        """Return a hook that adds a compute copy's gradient to its master's gradient on the host.

        For a sharded parameter, FSDP2 calls the hook after it has reduced the gradient of this
        rank's rows.
        """

        def bring(copy: Tensor) -> None:
            master = self._masters[name]
            assert copy.grad is not None
            if self._shards is None:
                gradient = copy.grad
            else:
                gradient = self._shards.get_local_gradient(copy)
            fresh = master.grad is None
            if name not in self._sums:
                self._sums[name] = torch.empty_like(master, requires_grad=False)
            master.grad = self._sums[name]
            self._gradients.add(gradient, master.grad, fresh=fresh)
            copy.grad = None

        return bring

    @property
    def masters(self) -> Mapping[str, nn.Parameter]:
        """Master weights that are stored separately from the network's parameters, by name."""
        return self._masters

    @property
    def trained_parameters(self) -> dict[str, StoredParameter]:
        """Trained parameters on this rank by canonical name.

        For a parameter with a master weight, the value is the master weight.
        """
        parameters: dict[str, StoredParameter] = {}
        for name, part in self._iterate_exact():
            if self._is_trained(part):
                parameters[name] = part
        return parameters

    @property
    def changed_tensors(self) -> dict[str, Tensor]:
        """Tensors whose values may differ from those in the model directory.

        These are the trained tensors and the tensors that `write` has changed.
        """
        parts = self._iterate_exact()
        written = self._written
        tensors: dict[str, Tensor] = {}
        for name, part in parts:
            if name in written or self._is_trained(part):
                tensors[name] = part.data
        return tensors

    @property
    def exact_tensors(self) -> dict[str, Tensor]:
        """Values of this rank's parameters in the highest precision available, by canonical name.

        The tensors are views without gradients.
        """
        return {name: part.data for name, part in self._iterate_exact()}

    def _is_trained(self, part: StoredParameter) -> bool:
        return self._copies[part.name].requires_grad

    @property
    def stored_parameters(self) -> Mapping[str, StoredParameter]:
        """Stored parameters of this rank in the highest precision available, by canonical name."""
        return dict(self._iterate_exact())

    def _iterate_exact(self) -> Iterator[tuple[str, StoredParameter]]:
        """Iterate over (canonical name, parameter) for all parameters of this rank.

        If a parameter has a separate master, the master is yielded instead. Offloaded parameters
        are read from host memory.
        """
        self.wait_for_copies()
        for name, part in self._canonical.items():
            parameter = self._masters.get(part.name, part.parameter)
            yield name, StoredParameter(part.name, self._resolve_parameter(parameter), part.rows)

    def _resolve_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter or, while it is offloaded, its copy in host memory."""
        if self._mover is None:
            values = None
        else:
            values = self._mover.memory.on_host(parameter)
        if values is None:
            return parameter
        return nn.Parameter(values, requires_grad=parameter.requires_grad)

    @property
    def _is_offloaded(self) -> bool:
        return self._mover is not None and self._mover.memory.is_offloaded

    def refresh(self) -> None:
        """Copy the masters to the compute copies, cast to the compute dtype.

        Must be called after masters change.
        """
        self.wait_for_copies()
        if self._shards is not None:
            self._shards.reshard()
        is_offloaded = self._is_offloaded
        with torch.no_grad():
            for name, master in self._masters.items():
                if is_offloaded or name not in self._homed:
                    self._resolve_parameter(self._copies[name]).copy_(
                        self._resolve_parameter(master)
                    )
                elif name not in self._sent:
                    self._values.put(self._copies[name].detach(), master.detach())
        self._sent.clear()
        if self._homed:
            self._values.make_device_wait()

    def start_device_copies(self, masters: Iterable[nn.Parameter]) -> None:
        """Start copying the new values of `masters` to the compute copies on the device.

        If the masters are not on the device, the optimizer calls this each time it has updated some
        of them. The values are transferred while the optimizer updates other masters. After the
        last update, `refresh` must be called.
        """
        names = {id(master): name for name, master in self._masters.items()}
        for name in (names[id(master)] for master in masters):
            self._values.put(self._copies[name].detach(), self._masters[name].detach())
            self._sent.add(name)

    # -- device and host

    def offload(self) -> None:
        """Move all parameters from the device to host memory and free the device memory.

        If master weights are kept on a separate device (`home`), they stay there. Does nothing if
        the device has no separate memory.
        """
        if not self._lane.has_separate_memory:
            return
        self.wait_for_copies()
        if self._mover is None:
            constant = []
            for name, copy in self._copies.items():
                if not copy.requires_grad and name not in self._masters:
                    constant.append(copy)
            memory = HostMemory(self._group_tensors(), self._lane, constant)
            self._mover = BlockFetcher(memory, self._blocks, gathered=self._shards is not None)
        if self._shards is not None:
            self._shards.reshard()
        self._mover.memory.offload()

    def fetch(self) -> None:
        """Start fetching all parameters back to the device.

        Forward passes wait for the blocks they need. All other code must call `wait_for_copies`
        before it uses the parameters.
        """
        if self._mover is not None:
            self._mover.fetch()

    def wait_for_copies(self) -> None:
        """Wait for all pending copies: parameters to the device and gradients to the host."""
        if self._homed:
            self._gradients.finish()
        if self._mover is not None:
            self._mover.wait_for_all()

    def _group_tensors(self) -> list[list[Tensor]]:
        """Return the tensors in groups, in the order in which they are fetched.

        The groups are the tensors outside all blocks, those of each block, and the masters.
        """
        groups = []
        for block in self._blocks:
            groups.append([*map(self._select_rank_rows, block.parameters()), *block.buffers()])
        of_blocks = set()
        for group in groups:
            of_blocks.update({id(tensor) for tensor in group})
        outside = []
        for tensor in (*self._copies.values(), *self._network.buffers()):
            if id(tensor) not in of_blocks:
                outside.append(tensor)
        masters: list[Tensor] = []
        for name, master in self._masters.items():
            if name not in self._homed:
                masters.append(master)
        return [outside, *groups, masters]

    # -- in and out

    def list_slices(self) -> dict[str, Slice]:
        return {name: self._places[name] for name in self._canonical}

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Slice, Tensor]]:
        """Iterate over (name, slice of the whole parameter, values) of the parameters `names`.

        The next training step may change the values in place.
        """
        tensors = self.exact_tensors
        for name in names:
            _check_known(name, self._canonical)
            yield name, self._places[name], quantized.dequantize(tensors[name])

    @torch.no_grad()
    def write(self, parts: Iterable[tuple[str, Slice, Tensor]], eta: float) -> None:
        """Set each parameter to eta * value + (1 - eta) * parameter, computed in float32.

        If eta is not 1, a half-precision parameter first gets a float32 master: a moving average in
        bfloat16 would never change, because a small update is less than half of the last bit.
        Raises `ConfigError` for unknown names and wrong shapes.
        """
        stored = self.stored_parameters
        for name, where, values in parts:
            _check_known(name, self._canonical)
            if eta != 1.0:
                if isinstance(stored[name].data, Quantized):
                    raise ConfigError(
                        f"parameter {name!r} is quantized; a moving average needs full precision: "
                        f"leave quantize out"
                    )
                if self._ensure_master(name):
                    stored = self.stored_parameters
            place = self._places[name]
            # `where` is a slice of the whole parameter, of which this rank has the slice `place`.
            local = tuple(
                slice(part.start - own.start, part.stop - own.start)
                for part, own in zip(where, place, strict=True)
            )
            target = stored[name].data[local]
            if target.shape != values.shape:
                raise ConfigError(
                    f"parameter {name!r} is {tuple(target.shape)} here and {tuple(values.shape)} "
                    f"at the source; "
                    "parameters are copied between networks of one shape only"
                )
            source = values.to(device=target.device, dtype=target.dtype)
            target.copy_(source if eta == 1.0 else target.lerp(source, eta))
            self._written.add(name)
        if self._mover is not None:
            self._mover.memory.mark_changed()
        self.refresh()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the saved values of `changed_tensors` exactly.

        `tensors` has this rank's part of each tensor. A half-precision parameter gets a master if
        its saved values are float32. Raises `CheckpointError` if `tensors` lacks a parameter that
        has changed since the model was read, because its original value is lost.
        """
        missing_names = sorted(set(self.changed_tensors) - set(tensors))
        if missing_names:
            raise CheckpointError(
                f"the saved state lacks {', '.join(missing_names[:5])}, which was changed since it was read"
            )
        for name, values in tensors.items():
            _check_known(name, self._canonical)
            if values.dtype == torch.float32:
                self._ensure_master(name)
        self.write(((name, self._places[name], v) for name, v in tensors.items()), eta=1.0)

    def _ensure_master(self, name: str) -> bool:
        """Create a float32 master for a half-precision parameter that has none.

        Returns True if a master was created.
        """
        part = self._canonical[name]
        if part.parameter.dtype not in HALF or part.name in self._masters:
            return False
        was_offloaded = self._is_offloaded
        self.fetch()
        self.wait_for_copies()
        self._masters[part.name] = nn.Parameter(
            part.parameter.detach().float(), requires_grad=False
        )
        self._mover = None  # the set of tensors to offload has changed
        if was_offloaded:
            self.offload()
        return True


def _check_known(name: str, parameters: Mapping[str, StoredParameter]) -> None:
    if name not in parameters:
        raise ConfigError(
            f"this network has no parameter {name!r}; the two networks are of different kinds"
        )


def _cast(network: nn.Module, dtype: torch.dtype, names: Iterable[str]) -> None:
    """Replace the parameters with the given names by copies in `dtype`. Ties are kept."""
    chosen = set(names)
    replacements = dict[nn.Parameter, nn.Parameter]()
    for name, parameter in network.named_parameters():
        if name in chosen and parameter.dtype != dtype:
            replacements[parameter] = nn.Parameter(parameter.detach().to(dtype))
    for module in network.modules():
        for attribute, parameter in list(module.named_parameters(recurse=False)):
            if parameter in replacements:
                setattr(module, attribute, replacements[parameter])
