"""Checks of meshes by the rules of EasyLM's guide.

The product of a mesh's sizes must be the number of devices, and a minibatch must be a multiple of
dp x fsdp. A mesh is (dp, fsdp, mp), as in `weft.engine.jax.mesh_sizes`. A size can be -1 if the
number of devices is not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from math import prod
from subprocess import run
from sys import executable

from weft.engine.jax.mesh_sizes import read_sizes
from weft.errors import ConfigError

COORDINATOR = "WEFT_JAX_COORDINATOR"  # set on each of several hosts
COUNT_DEVICES = "import jax; print(jax.device_count())"


def choose_backend(chosen: str) -> str:
    """Return the backend of all roles: `chosen` or, if that is empty, jax if installed, else torch.

    Raises `ConfigError` for another name.
    """
    if chosen not in ("", "jax", "torch"):
        raise ConfigError(f"--backend={chosen}: must be jax or torch")
    if chosen:
        return chosen
    return "jax" if find_spec("jax") and find_spec("optax") else "torch"


def count_devices(backend: str, environment: Mapping[str, str]) -> int | None:
    """Return the number of JAX devices or of GPUs, or None if it is not known before the run.

    With several hosts, devices can be counted only after all hosts have connected. On a CPU with
    torch, a layout can have any number of processes. JAX counts its devices in a child process,
    because a TPU belongs to the first process that opens it.
    """
    if backend == "torch":
        import torch

        return torch.cuda.device_count() or None
    has_several_hosts = COORDINATOR in environment or "," in environment.get(
        "TPU_WORKER_HOSTNAMES", ""
    )
    if has_several_hosts or not find_spec("jax"):
        return None
    result = run(
        [executable, "-c", COUNT_DEVICES],
        env=dict(environment),
        capture_output=True,
        text=True,
        check=False,
    )
    text = result.stdout.strip().splitlines()[-1:]
    return int(text[0]) if result.returncode == 0 and text and text[0].isdecimal() else None


def check_product(text: str, num_devices: int | None, rows: int | None = None) -> tuple[int, ...]:
    """Return the sizes of a mesh, with -1 replaced if the number of devices is known.

    `rows` is the number of completions of a minibatch, if it is known. Raises `ConfigError` if the
    text is not a mesh, or if the product of its sizes is not the number of devices. The message
    suggests a mesh whose fsdp divides `rows`.
    """
    try:
        sizes = list(read_sizes(text))
    except ConfigError as error:
        raise ConfigError(
            f"--mesh_dim={text}: must be dp,fsdp,mp such as 1,-1,8, or named sizes such as "
            f"dp:1,fsdp:-1,mp:8"
        ) from error
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ConfigError(f"--mesh_dim={text}: each size must be at least 1, and one may be -1")
    if num_devices is None:
        return tuple(sizes)
    fixed = prod(size for size in sizes if size != -1)
    if -1 in sizes and num_devices % fixed == 0:
        sizes[sizes.index(-1)] = num_devices // fixed
    if prod(sizes) != num_devices or -1 in sizes:
        raise ConfigError(
            f"--mesh_dim={text}: dp x fsdp x mp must be the number of devices, {num_devices}; "
            f"write {find_mesh(num_devices, rows or num_devices)}"
        )
    return tuple(sizes)


def check_minibatch(
    text: str,
    sizes: Sequence[int],
    rows: int,
    num_devices: int | None,
    flag: str = "mini_batch_size",
    *,
    common: int | None = None,
) -> None:
    """Raise `ConfigError` if a minibatch of `rows` completions is not a multiple of dp x fsdp.

    `common` is the greatest common divisor of the command's minibatches. The message suggests the
    mesh with the largest fsdp, and so the smallest mp, that divides `common`, or `rows` if `common`
    is not set.
    """
    dp, fsdp, _ = sizes
    if dp == -1 or fsdp == -1 or rows % (dp * fsdp) == 0:
        return
    devices = num_devices or prod(size for size in sizes if size != -1)
    raise ConfigError(
        f"--{flag}={rows}: must be a multiple of dp x fsdp = {dp * fsdp} (--mesh_dim={text}); "
        f"write --mesh_dim={find_mesh(devices, common or rows)}, or another {flag}"
    )


def find_mesh(num_devices: int, rows: int) -> str:
    """Return the mesh of all devices with dp 1 and the largest fsdp that divides `rows`."""
    fits = (n for n in range(min(num_devices, rows), 0, -1) if num_devices % n == rows % n == 0)
    fsdp = next(fits)
    return f"1,{fsdp},{num_devices // fsdp}"


def format_layout(sizes: Sequence[int]) -> str | None:
    """Return weft's layout of a mesh for backend=torch, or None for one device.

    A size of -1 counts as 1.
    """
    dp, fsdp, mp = (max(size, 1) for size in sizes)
    if dp * fsdp * mp == 1:
        return None
    return f"d{dp * fsdp}f{fsdp}t{mp}"
