"""Hosts of a run: all of them start the same command, and one of them writes its files."""

from __future__ import annotations

import atexit
import math
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace

from weft.checkpoints.config_file import JAX_BACKEND
from weft.engine.backends.jax import check_jax, read_layout
from weft.engine.jax.mesh_sizes import parse_mesh
from weft.engine.spec import JAX_COORDINATOR
from weft.errors import ConfigError, qualify_error
from weft.experiment import Experiment
from weft.runtime.hosts import HostGroup


def join_hosts(
    experiment: Experiment, mode: str, environ: Mapping[str, str]
) -> tuple[HostGroup | None, Experiment]:
    """Return the group of hosts that run this experiment together, and the experiment of this host.

    The variables `environ` describe the hosts of JAX (`weft.engine.jax.hosts`); the group is None
    if they name a single host. All hosts but the first write into a temporary folder, which is
    removed at the end.

    Raises `ConfigError` for an experiment that several hosts cannot run together.
    """
    if mode != "local" or experiment.num_devices != 1:
        raise ConfigError(
            f"{JAX_COORDINATOR} is set, so all hosts run the same process: mode=local with roles of "
            f"backend=jax, whose meshes have the devices of all hosts; this run has mode={mode} and "
            f"{experiment.num_devices} device processes"
        )
    for role, spec in experiment.roles.items():
        if spec.backend != JAX_BACKEND:
            raise ConfigError(
                f"{role}.backend={spec.backend}: several hosts ({JAX_COORDINATOR} is set) compute "
                f"together with JAX alone; write {role}.backend=jax"
            )
    for node in experiment.graph.list_model_calls():
        if node.cache:
            raise ConfigError(
                f"node {node.name!r} keeps its outputs on the disk, which several hosts do not "
                f"share; switch it off (cache_ref_logprobs=false, cache=False)"
            )
    check_jax()
    from weft.engine.jax.hosts import connect_hosts

    jax_hosts = connect_hosts(environ)
    if jax_hosts is None:
        return None, experiment
    for role, spec in experiment.roles.items():
        try:
            sizes = parse_mesh(read_layout(spec), jax_hosts.num_devices, trained=spec.trained)
        except ConfigError as error:
            raise qualify_error(role, error) from error
        if math.prod(sizes) != jax_hosts.num_devices:
            raise ConfigError(
                f"{role}.layout={spec.layout or 'absent'}: with several hosts, a role has all "
                f"{jax_hosts.num_devices} devices; write {role}.layout=1,-1,1"
            )
    hosts = HostGroup(jax_hosts.index, jax_hosts.count, jax_hosts.store, jax_hosts.secret)
    if hosts.is_first:
        return hosts, experiment
    folder = tempfile.mkdtemp(prefix="weft-host-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    control = replace(experiment.control, fileroot=folder, loggers={}, progress=False)
    return hosts, replace(experiment, control=control)
