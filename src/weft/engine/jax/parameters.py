"""Parameters of equal blocks as stacks, and their exchange with torch and with files.

`ParameterStacks` maps weft's canonical names to places in stacks: `blocks.3.attention.q.weight` is
element 3 of `blocks.0:12.attention.q.weight`. Blocks are equal if they have the same parameters and
train the same ones, so frozen layers have stacks of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch import Tensor

from weft.checkpoints.weight_files import TensorLayout, write_one_by_one
from weft.engine.checkpoint import format_places
from weft.engine.jax.mesh import choose_sharding, fetch, put_on_mesh
from weft.errors import ConfigError
from weft.models.network.linear import StoredParameter
from weft.topology import Slice

STOP = -1
LARGE_BYTES = 1 << 28  # stacks above this are read and written layer by layer


@dataclass(frozen=True)
class StackPlace:
    """Place of a parameter: the name of its array, and its index if the array is a stack."""

    array: str
    index: int | None


@dataclass(frozen=True)
class StoredArray:
    """Values of one tensor in an array of JAX: all of it, or one layer of a stack."""

    array: Array
    index: int | None = None

    @property
    def layout(self) -> TensorLayout:
        """dtype and shape of the tensor."""
        shape = self.array.shape if self.index is None else self.array.shape[1:]
        return getattr(torch, str(self.array.dtype)), tuple(shape)

    def select(self) -> Array:
        return self.array if self.index is None else get_layer(self.array, self.index)

    def read(self) -> Tensor:
        """Copy the values to host memory; if several hosts have them, all must call this."""
        return to_torch(self.select())


class HostTensors(Mapping[str, Tensor]):
    """Tensors by name, each of which is copied to host memory when it is read.

    The last one is kept until another is read: what is written together is often read together.

    If several hosts have the arrays, the first one reads, in any order, and the others take part in
    `serve` until it calls `stop`.
    """

    def __init__(self, stored: Mapping[str, StoredArray]) -> None:
        self._stored = stored
        self._names = list(stored)
        self._last: tuple[str, Tensor] | None = None

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def layouts(self) -> dict[str, TensorLayout]:
        """dtype and shape of each tensor."""
        return {name: stored.layout for name, stored in self._stored.items()}

    def __getitem__(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None  # before the next one is copied
            stored = self._stored[name]
            _announce(self._names.index(name))
            self._last = name, stored.read()
        return self._last[1]

    def stop(self) -> None:
        """Tell the other hosts that the first one reads no more."""
        self._last = None
        _announce(STOP)

    def serve(self) -> None:
        """Take part in what the first host reads; nothing is kept here."""
        while (number := _announce(STOP)) != STOP:
            self._stored[self._names[number]].read()


@contextmanager
def read_on_first_host(tensors: HostTensors) -> Iterator[HostTensors | None]:
    """Give tensors to the first process; the others get None, and then serve its reads."""
    if jax.process_index() == 0:
        try:
            yield tensors
        finally:
            tensors.stop()
    else:
        yield None
        tensors.serve()


def write_on_first_host(path: Path, tensors: HostTensors) -> None:
    """Write a safetensors file on the first process; the others serve its reads."""
    with read_on_first_host(tensors) as own:
        if own is not None:
            write_one_by_one(path, own.layouts, ((name, own[name]) for name in own))


def write_own_shards(folder: Path, stem: str, stored: Mapping[str, StoredArray]) -> None:
    """Write the shards on this host's devices, each device's into `{stem}-{device}.safetensors`.

    Of equal shards, one is written: which one depends on the tensor's number, so that hosts with the
    same shards share the work. One shard of a tensor is in host memory at a time.
    `weft.engine.checkpoint.SavedTensors` reads the files of all hosts together.
    """
    owned: dict[int, dict[str, Any]] = {}  # shards by device and name
    if jax.process_index() == 0:
        owned[jax.local_devices()[0].id] = {}  # a file also if there are no tensors
    for number, (name, tensor) in enumerate(stored.items()):
        array = tensor.array
        shard_elements = math.prod(array.sharding.shard_shape(array.shape))
        replicas = len(array.sharding.device_set) * shard_elements // max(1, array.size)
        for shard in array.addressable_shards:
            if shard.replica_id == number % max(1, replicas):
                owned.setdefault(shard.device.id, {})[name] = shard
    for device, shards in owned.items():
        layouts: dict[str, TensorLayout] = {}
        places: dict[str, Slice] = {}
        for name, shard in shards.items():
            dtype, shape = stored[name].layout
            where = shard.index if stored[name].index is None else shard.index[1:]
            ends = [part.indices(size) for part, size in zip(where, shape, strict=True)]
            places[name] = tuple(slice(start, stop) for start, stop, _ in ends)
            layouts[name] = dtype, tuple(stop - start for start, stop, _ in ends)
        values = (
            (name, to_torch(_select_layer(shard.data, stored[name].index)))
            for name, shard in shards.items()
        )
        path = folder / f"{stem}-{device}.safetensors"
        write_one_by_one(path, layouts, values, format_places(places))


def _select_layer(shard: Array, index: int | None) -> Array:
    """Return one layer of a stack's shard on one device, or all of it if it is no stack."""
    return shard if index is None else _get_shard_layer(shard, np.int32(index))


@jax.jit
def _get_shard_layer(shard: Array, index: Array) -> Array:
    return lax.dynamic_index_in_dim(shard, index, 0, keepdims=False)


def _announce(number: int) -> int:
    """Return the first host's number on all hosts."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


class ParameterStacks:
    """Arrays in which a network's parameters are stored.

    `parameters` maps canonical names to the parameters of a torch network, whose values are not
    used. `places` maps the names to their places, `shapes` to their shapes, and `trained` has the
    arrays that are trained.
    """

    def __init__(self, parameters: Mapping[str, StoredParameter]) -> None:
        self.places: dict[str, StackPlace] = {}
        self.trained: set[str] = set()
        blocks: dict[int, dict[str, str]] = {}  # name within the block -> canonical name, by layer
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, parameter in parameters.items():
            self.shapes[name] = tuple(parameter.data.shape)
            if name.startswith("blocks."):
                _, layer, own = name.split(".", 2)
                blocks.setdefault(int(layer), {})[own] = name
            else:
                self.places[name] = StackPlace(name, None)

        def describe(layer: int) -> list[tuple[str, bool]]:
            names = blocks[layer]
            return sorted((own, parameters[name].requires_grad) for own, name in names.items())

        for _, equal in groupby(sorted(blocks), key=describe):
            run = list(equal)
            for own in blocks[run[0]]:
                stack = f"blocks.{run[0]}:{run[-1] + 1}.{own}"
                for index, number in enumerate(run):
                    self.places[blocks[number][own]] = StackPlace(stack, index)
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                self.trained.add(self.places[name].array)

    def group_names(self) -> dict[str, list[str]]:
        """Return the canonical names of each array's parameters, in the order of the stack."""
        groups: dict[str, list[str]] = {}
        for name, place in self.places.items():
            groups.setdefault(place.array, []).append(name)
        return groups

    def build_arrays(
        self,
        read: Callable[[str, Slice | None], Tensor],
        choose_dtype: Callable[[str], Any],
        mesh: Mesh,
    ) -> dict[str, Array]:
        """Return all arrays on a mesh, with the values that `read` returns by canonical name.

        `choose_dtype` maps the name of an array to its dtype. One parameter is in host memory at a
        time, or one stack if it is small. If several hosts have the devices, each reads its own
        slices, those of a stack together.
        """
        arrays = {}
        for array, names in self.group_names().items():
            dtype = choose_dtype(array)
            if jax.process_count() > 1:
                arrays[array] = self._build_from_slices(array, names, read, dtype, mesh)
                continue
            first = to_numpy(read(names[0], None)).astype(dtype)
            if self.places[names[0]].index is None:
                arrays[array] = put_on_mesh(first, choose_sharding(mesh, array, first.shape))
                continue
            shape = (len(names), *first.shape)
            sharding = choose_sharding(mesh, array, shape)
            if first.nbytes * len(names) <= LARGE_BYTES:
                rest = [to_numpy(read(name, None)).astype(dtype) for name in names[1:]]
                arrays[array] = put_on_mesh(np.stack([first, *rest]), sharding)
                continue
            stack = _build_zeros(shape, jnp.dtype(dtype), sharding)()
            stack = set_layer(stack, 0, first)
            for index, name in enumerate(names[1:], 1):
                stack = set_layer(stack, index, to_numpy(read(name, None)).astype(dtype))
            arrays[array] = stack
        for name in self.places:
            self.select(arrays, name).select()  # compiles now, so that a save during a run does not
        return arrays

    def _build_from_slices(
        self,
        array: str,
        names: Sequence[str],
        read: Callable[[str, Slice | None], Tensor],
        dtype: Any,
        mesh: Mesh,
    ) -> Array:
        is_stack = self.places[names[0]].index is not None
        shape = self.shapes[names[0]]
        whole = (len(names), *shape) if is_stack else shape

        def read_part(where: Any) -> np.ndarray[Any, Any]:
            own = where[1:] if is_stack else where
            ends = [part.indices(size) for part, size in zip(own, shape, strict=True)]
            slices = tuple(slice(start, stop) for start, stop, _ in ends)
            parts = [to_numpy(read(name, slices)).astype(dtype) for name in names]
            return np.stack(parts) if is_stack else parts[0]

        return jax.make_array_from_callback(whole, choose_sharding(mesh, array, whole), read_part)

    def read(
        self, arrays: Mapping[str, Array], names: Iterable[str]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the canonical names and values of parameters, copied to host memory.

        The order is that of the names, so that all processes gather the same array together.
        """
        for name in sorted(names):
            yield name, self.select(arrays, name).read()

    def select(self, arrays: Mapping[str, Array], name: str) -> StoredArray:
        """Return where the values of a parameter are in `arrays`."""
        place = self.places[name]
        return StoredArray(arrays[place.array], place.index)

    def load(
        self, arrays: dict[str, Array], keys: Mapping[str, str], read: Callable[[str], Tensor]
    ) -> None:
        """Set parameters to what `read` returns for their keys; `keys` maps their names to these.

        One tensor is in host memory at a time, or one stack if it is small.
        """
        for own in self.group_names().values():
            parts = ((name, None, read(keys[name])) for name in own if name in keys)
            arrays.update(self.replace(arrays, parts, 1.0))

    def replace(
        self, arrays: Mapping[str, Array], parts: Iterable[tuple[str, Any, Tensor]], eta: float
    ) -> dict[str, Array]:
        """Return new arrays in which slices of parameters are eta * value + (1 - eta) * old value.

        `parts` has the canonical name, the slice of the parameter (None for all of it) and the
        values. Arrays without new values are left out. An array of 16 bits becomes float32 if it is
        averaged or if a value is float32: small steps of an average would be rounded away.

        Raises `ConfigError` for values of another shape.
        """
        host: dict[str, np.ndarray[Any, Any]] = {}  # small arrays
        large: dict[str, Array] = {}
        for name, where, values in parts:
            at = self.places[name]
            new = to_numpy(values)
            array = large.get(at.array, arrays[at.array])
            narrow = array.dtype.itemsize == 2 and (eta != 1.0 or new.dtype == np.float32)
            if at.index is not None and array.nbytes > LARGE_BYTES:
                if narrow:
                    array = array.astype(jnp.float32)
                own = np.array(fetch(get_layer(array, at.index)))
                _write_part(name, own, where, new, eta)
                large[at.array] = set_layer(array, at.index, own)
                continue
            if at.array not in host:
                host[at.array] = np.array(fetch(array))
            if narrow and host[at.array].dtype.itemsize == 2:
                host[at.array] = host[at.array].astype(np.float32)
            whole = host[at.array]
            _write_part(name, whole if at.index is None else whole[at.index], where, new, eta)
        small = {
            array: put_on_mesh(values, arrays[array].sharding) for array, values in host.items()
        }
        return {**small, **large}


def _write_part(
    name: str, own: np.ndarray[Any, Any], where: Any, new: np.ndarray[Any, Any], eta: float
) -> None:
    """Set a slice of a parameter's values to eta * new + (1 - eta) * old."""
    own = own if where is None else own[where]
    if own.shape != new.shape:
        raise ConfigError(
            f"{name}: values of shape {new.shape} do not fit a slice of shape {own.shape}"
        )
    if eta != 1.0:
        new = eta * new.astype(own.dtype) + (1.0 - eta) * own
    own[...] = new.astype(own.dtype)


def get_layer(stack: Array, index: int) -> Array:
    """Return one layer of a stack: whole on all hosts if it is divided over several."""
    sharding = stack.sharding
    assert isinstance(sharding, NamedSharding)
    spec = sharding.spec[1:] if sharding.is_fully_addressable else ()
    place = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    layer: Array = _build_layer_getter(place)(stack, np.int32(index))
    return layer


@cache
def _build_layer_getter(sharding: NamedSharding) -> Any:
    return jax.jit(
        lambda stack, index: lax.dynamic_index_in_dim(stack, index, 0, keepdims=False),
        out_shardings=sharding,
    )


def set_layer(stack: Array, index: int, values: np.ndarray[Any, Any]) -> Array:
    """Return a stack with other values of one layer; the old stack cannot be used any more."""
    sharding = stack.sharding
    assert isinstance(sharding, NamedSharding)
    layer = put_on_mesh(values, NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:])))
    updated: Array = _build_layer_setter(sharding)(stack, np.int32(index), layer)
    return updated


@cache
def _build_layer_setter(sharding: NamedSharding) -> Any:
    return jax.jit(
        lambda stack, index, layer: lax.dynamic_update_index_in_dim(stack, layer, index, 0),
        donate_argnums=0,
        out_shardings=sharding,
    )


@cache
def _build_zeros(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Any:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


def to_numpy(values: Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor's values as a numpy array; bfloat16 becomes that of `ml_dtypes`."""
    values = values.detach().cpu().contiguous()
    if values.dtype == torch.bfloat16:
        return values.view(torch.uint16).numpy().view(jnp.bfloat16)
    return values.numpy()


def to_torch(values: Any) -> Tensor:
    """Copy the values of a JAX or numpy array into a new tensor in host memory."""
    array = fetch(values)
    if array.dtype == jnp.bfloat16:
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())
