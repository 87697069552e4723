"""Stacks of the parameters of equal blocks, and their exchange with torch and with files.

`ParameterStacks` maps weft's canonical names to places in stacks. For example,
`blocks.3.attention.q.weight` is element 3 of `blocks.0:12.attention.q.weight`. Blocks are equal if
they have the same parameters and the same of these are trained, so frozen and trained layers are in
separate stacks.
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

STOP = -1  # number that is announced when the first host reads no more tensors
LARGE_BYTES = 1 << 28  # larger stacks are read and written layer by layer


@dataclass(frozen=True)
class StackPlace:
    """Place of a parameter in the arrays."""

    array: str  # name of the array
    index: int | None  # index in the array if this is a stack, else None


@dataclass(frozen=True)
class StoredArray:
    """Tensor stored in a JAX array: the whole array, or layer `index` of a stack."""

    array: Array
    index: int | None = None

    @property
    def layout(self) -> TensorLayout:
        """dtype and shape of the tensor."""
        shape = self.array.shape if self.index is None else self.array.shape[1:]
        return getattr(torch, str(self.array.dtype)), tuple(shape)

    def select(self) -> Array:
        """Return the values as an array on the devices."""
        return self.array if self.index is None else get_layer(self.array, self.index)

    def read(self) -> Tensor:
        """Return the values in host memory; if several hosts store them, all must call this."""
        return to_torch(self.select())


class HostTensors(Mapping[str, Tensor]):
    """Mapping from names to tensors, each of which is copied to host memory when it is read.

    The last tensor is cached, because writing a file can read the same tensor several times.

    If several hosts store the arrays, the first host reads tensors in any order, and the other
    hosts must call `serve`, which returns when the first host calls `stop`.
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
            self._last = None  # free the last tensor before the next one is copied
            stored = self._stored[name]
            _announce(self._names.index(name))
            self._last = name, stored.read()
        return self._last[1]

    def stop(self) -> None:
        """Tell the other hosts that the first host reads no more tensors."""
        self._last = None
        _announce(STOP)

    def serve(self) -> None:
        """Take part in gathering each tensor that the first host reads, until it calls `stop`."""
        while (number := _announce(STOP)) != STOP:
            self._stored[self._names[number]].read()


@contextmanager
def read_on_first_host(tensors: HostTensors) -> Iterator[HostTensors | None]:
    """Yield the tensors on the first host; yield None on the others, and then serve its reads."""
    if jax.process_index() == 0:
        try:
            yield tensors
        finally:
            tensors.stop()
    else:
        yield None
        tensors.serve()


def write_on_first_host(path: Path, tensors: HostTensors) -> None:
    """Write a safetensors file on the first host; the other hosts serve its reads."""
    with read_on_first_host(tensors) as readable:
        if readable is not None:
            values = ((name, readable[name]) for name in readable)
            write_one_by_one(path, readable.layouts, values)


def write_own_shards(folder: Path, stem: str, stored: Mapping[str, StoredArray]) -> None:
    """Write the shards on each of this host's devices to `{stem}-{device}.safetensors`.

    Of equal shards on several devices, only one is written. Which one depends on the number of the
    tensor, so that hosts with the same shards share the work. Only one shard of a tensor is in host
    memory at a time. `weft.engine.checkpoint.SavedTensors` reads the files of all hosts.
    """
    # Choose the shards that each device writes.
    shards_by_device: dict[int, dict[str, Any]] = {}
    if jax.process_index() == 0:
        # Write a file even without tensors.
        shards_by_device[jax.local_devices()[0].id] = {}
    for number, (name, tensor) in enumerate(stored.items()):
        array = tensor.array
        shard_elements = math.prod(array.sharding.shard_shape(array.shape))
        num_replicas = len(array.sharding.device_set) * shard_elements // max(1, array.size)
        for shard in array.addressable_shards:
            if shard.replica_id == number % max(1, num_replicas):
                shards_by_device.setdefault(shard.device.id, {})[name] = shard
    # Write them, with their slices of the tensors.
    for device, shards in shards_by_device.items():
        layouts: dict[str, TensorLayout] = {}
        slices: dict[str, Slice] = {}
        for name, shard in shards.items():
            dtype, shape = stored[name].layout
            index = shard.index if stored[name].index is None else shard.index[1:]
            ends = [part.indices(size) for part, size in zip(index, shape, strict=True)]
            slices[name] = tuple(slice(start, stop) for start, stop, _ in ends)
            layouts[name] = dtype, tuple(stop - start for start, stop, _ in ends)
        values = (
            (name, to_torch(_select_layer(shard.data, stored[name].index)))
            for name, shard in shards.items()
        )
        path = folder / f"{stem}-{device}.safetensors"
        write_one_by_one(path, layouts, values, format_places(slices))


def _select_layer(shard: Array, index: int | None) -> Array:
    """Return one layer of a stack's shard on one device; None selects the whole shard."""
    return shard if index is None else _get_shard_layer(shard, np.int32(index))


@jax.jit
def _get_shard_layer(shard: Array, index: Array) -> Array:
    return lax.dynamic_index_in_dim(shard, index, 0, keepdims=False)


def _announce(number: int) -> int:
    """Return the first host's `number` on all hosts; all of them must call this."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


class ParameterStacks:
    """Arrangement of a network's parameters in arrays.

    It is computed from `parameters`, which maps canonical names to the parameters of a torch
    network; their values are not used.

    Attributes:
        places: Place of each parameter in the arrays, by canonical name.
        shapes: Shape of each parameter, by canonical name.
        trained: Names of the arrays that are trained.
    """

    def __init__(self, parameters: Mapping[str, StoredParameter]) -> None:
        self.places: dict[str, StackPlace] = {}
        self.trained: set[str] = set()
        self.shapes: dict[str, tuple[int, ...]] = {}
        # Canonical names by layer and by the name within the block.
        blocks: dict[int, dict[str, str]] = {}
        for name, parameter in parameters.items():
            self.shapes[name] = tuple(parameter.data.shape)
            if name.startswith("blocks."):
                _, layer, block_name = name.split(".", 2)
                blocks.setdefault(int(layer), {})[block_name] = name
            else:
                self.places[name] = StackPlace(name, None)

        def describe(layer: int) -> list[tuple[str, bool]]:
            """Return the properties by which blocks are compared."""
            names = blocks[layer].items()
            return sorted((inner, parameters[name].requires_grad) for inner, name in names)

        # Stack consecutive equal blocks.
        for _, equal_layers in groupby(sorted(blocks), key=describe):
            layers = list(equal_layers)
            for block_name in blocks[layers[0]]:
                stack = f"blocks.{layers[0]}:{layers[-1] + 1}.{block_name}"
                for index, number in enumerate(layers):
                    self.places[blocks[number][block_name]] = StackPlace(stack, index)
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
        """Return all arrays on a mesh, by name.

        `read` returns the values of a parameter, or of a slice of it, by canonical name.
        `choose_dtype` maps the name of an array to its dtype. In host memory, there is only one
        parameter at a time, or one stack if it is small. If the mesh spans several hosts, each host
        reads only its slices, and all of a stack's slices at once.
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
            self.select(arrays, name).select()  # compile this now, and not at the first save
        return arrays

    def _build_from_slices(
        self,
        array: str,
        names: Sequence[str],
        read: Callable[[str, Slice | None], Tensor],
        dtype: Any,
        mesh: Mesh,
    ) -> Array:
        """Return one array, of which each host reads only the slices that it stores."""
        is_stack = self.places[names[0]].index is not None
        shape = self.shapes[names[0]]
        array_shape = (len(names), *shape) if is_stack else shape

        def read_shard(index: Any) -> np.ndarray[Any, Any]:
            parameter_index = index[1:] if is_stack else index
            ends = [part.indices(size) for part, size in zip(parameter_index, shape, strict=True)]
            slices = tuple(slice(start, stop) for start, stop, _ in ends)
            parts = [to_numpy(read(name, slices)).astype(dtype) for name in names]
            return np.stack(parts) if is_stack else parts[0]

        sharding = choose_sharding(mesh, array, array_shape)
        return jax.make_array_from_callback(array_shape, sharding, read_shard)

    def read(
        self, arrays: Mapping[str, Array], names: Iterable[str]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the canonical names and values of parameters, copied to host memory.

        They are sorted by name, so that all processes gather the same array at the same time.
        """
        for name in sorted(names):
            yield name, self.select(arrays, name).read()

    def select(self, arrays: Mapping[str, Array], name: str) -> StoredArray:
        """Return the stored values of a parameter in `arrays`."""
        place = self.places[name]
        return StoredArray(arrays[place.array], place.index)

    def load(
        self, arrays: dict[str, Array], keys: Mapping[str, str], read: Callable[[str], Tensor]
    ) -> None:
        """Set the parameters named in `keys` to the values `read(keys[name])`, in place.

        In host memory, there is only one tensor at a time, or one stack if it is small.
        """
        for names in self.group_names().values():
            parts = ((name, None, read(keys[name])) for name in names if name in keys)
            arrays.update(self.replace(arrays, parts, 1.0))

    def replace(
        self, arrays: Mapping[str, Array], parts: Iterable[tuple[str, Any, Tensor]], eta: float
    ) -> dict[str, Array]:
        """Return new arrays in which slices of parameters are eta * value + (1 - eta) * old value.

        Each of the `parts` is (canonical name, slice of the parameter or None for all of it,
        values). Arrays without new values are left out. A 16-bit array is converted to float32 if
        `eta` is not 1, because small steps of an average would be rounded away, and if a value is
        float32.

        Raises `ConfigError` for values of another shape than their slice.
        """
        host_arrays: dict[str, np.ndarray[Any, Any]] = {}  # small arrays
        large: dict[str, Array] = {}
        for name, where, values in parts:
            place = self.places[name]
            new = to_numpy(values)
            array = large.get(place.array, arrays[place.array])
            needs_float32 = array.dtype.itemsize == 2 and (eta != 1.0 or new.dtype == np.float32)
            # Change one layer of a large stack on the devices.
            if place.index is not None and array.nbytes > LARGE_BYTES:
                if needs_float32:
                    array = array.astype(jnp.float32)
                layer = np.array(fetch(get_layer(array, place.index)))
                _write_part(name, layer, where, new, eta)
                large[place.array] = set_layer(array, place.index, layer)
                continue
            # Change other arrays in host memory.
            if place.array not in host_arrays:
                host_arrays[place.array] = np.array(fetch(array))
            if needs_float32 and host_arrays[place.array].dtype.itemsize == 2:
                host_arrays[place.array] = host_arrays[place.array].astype(np.float32)
            target = host_arrays[place.array]
            if place.index is not None:
                target = target[place.index]
            _write_part(name, target, where, new, eta)
        small = {
            name: put_on_mesh(values, arrays[name].sharding) for name, values in host_arrays.items()
        }
        return {**small, **large}


def _write_part(
    name: str, values: np.ndarray[Any, Any], where: Any, new: np.ndarray[Any, Any], eta: float
) -> None:
    """Set the slice `where` of a parameter's `values` to eta * new + (1 - eta) * old, in place.

    If `where` is None, the whole parameter is set. Raises `ConfigError` if the shapes differ.
    """
    old = values if where is None else values[where]
    if old.shape != new.shape:
        raise ConfigError(
            f"{name}: values of shape {new.shape} do not fit a slice of shape {old.shape}"
        )
    if eta != 1.0:
        new = eta * new.astype(old.dtype) + (1.0 - eta) * old
    old[...] = new.astype(old.dtype)


def get_layer(stack: Array, index: int) -> Array:
    """Return one layer of a stack; if several hosts store it, gather it on all of them."""
    sharding = stack.sharding
    assert isinstance(sharding, NamedSharding)
    spec = sharding.spec[1:] if sharding.is_fully_addressable else ()
    layer_sharding = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    layer: Array = _build_layer_getter(layer_sharding)(stack, np.int32(index))
    return layer


@cache
def _build_layer_getter(sharding: NamedSharding) -> Any:
    return jax.jit(
        lambda stack, index: lax.dynamic_index_in_dim(stack, index, 0, keepdims=False),
        out_shardings=sharding,
    )


def set_layer(stack: Array, index: int, values: np.ndarray[Any, Any]) -> Array:
    """Return the stack with new values of one layer; the old stack can no longer be used."""
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
    """Return a tensor's values as a numpy array; bfloat16 is converted to that of `ml_dtypes`."""
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
