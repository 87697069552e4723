"""Worker of one device, which runs model function calls with their hooks.

It reads the inputs of a call from its tensor store, and stores the outputs there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from weft.data.sample import SequenceSample
from weft.data.tokenizer import Tokenizer
from weft.engine.device import PeakMemoryMeter, label_work
from weft.engine.spec import ModelSpec
from weft.errors import NotFinite, RunError
from weft.experiment import Experiment
from weft.graph.mfc import Hook, MFCDef, Offload
from weft.interfaces.base import MFCResult, Model, PendingUpdates
from weft.parallel.mesh import ProcessGroups
from weft.registry import functions, interfaces
from weft.runtime.cache import OutputCache, compute_fingerprint
from weft.runtime.calls import (
    PEAK_BYTES,
    SECONDS,
    STARTED,
    OutputsAnnounced,
    SampleMeta,
    implements_method,
    make_empty_sample,
    read_inputs,
    to_edge_outputs,
)
from weft.runtime.checkpoints import (
    ENGINES_FOLDER,
    INTERFACES_FILE,
    read_interfaces,
    read_samples,
    write_samples,
    write_state,
)
from weft.runtime.roles import RoleEngines
from weft.runtime.split import collect_owners, take_samples
from weft.runtime.store import TensorStore
from weft.topology import Mesh


class Worker:
    """Worker that runs the model function calls of one device.

    `specs` maps roles to their model specs, which include the learning rate schedules. `cache` is
    the folder for cached outputs, and `rank` is the rank of the device. `groups` are the process
    groups of this rank, which are required if an engine runs on several devices. Inputs are read
    from `store`, and outputs are added to it.
    """

    def __init__(
        self,
        experiment: Experiment,
        specs: Mapping[str, ModelSpec],
        tokenizers: Mapping[str, Tokenizer],
        device: str,
        cache: Path,
        store: TensorStore,
        rank: int = 0,
        groups: ProcessGroups | None = None,
    ) -> None:
        self._experiment = experiment
        self._specs = specs
        self._tokenizers = tokenizers
        self._device = device
        self._cache = cache
        self._store = store
        self.calls = experiment.calls
        self._interfaces = {
            name: interfaces.get(node.interface)(**node.args) for name, node in self.calls.items()
        }
        self._caches: dict[str, OutputCache] = {}
        self.roles = RoleEngines(experiment, specs, rank, groups, tokenizers)
        self._meshes = experiment.call_meshes
        self._rank = rank
        self._memory = PeakMemoryMeter(device)

    def run_call(
        self,
        name: str,
        step: int,
        minibatches: Sequence[SampleMeta],
        early: Callable[[OutputsAnnounced], None] | None = None,
        weights: int | None = None,
        updates: PendingUpdates | None = None,
    ) -> MFCResult:
        """Run the call `name` on these minibatches.

        The outputs are stored, and the result contains only their metadata. `step` is the index of
        the call's firing (execution). `early` is called with outputs that are ready before the end of
        the call. If the call uses a copy of the role, `weights` is the number of weight updates that
        the copy must have received. `updates` are requests, such as transfers of new weights, that
        the call may run between its steps.

        If the call raises a `RunError`, the node, role and ids are added to its message; for any
        other error, they are added as a note.
        """
        node = self.calls[name]
        mesh = self._meshes[name]
        ids = collect_owners(minibatches)
        first_ids = ", ".join(ids[:4]) + (", ..." if len(ids) > 4 else "")
        description = f"node {name!r} (role {node.role!r}, {len(ids)} ids: {first_ids})"
        started = time.time()
        clock = time.perf_counter()
        try:
            model = self.build_model(node.role, step, mesh, weights, or_newer=node.interruptible)
            model = replace(
                model,
                announce=self._make_announce(name, early),
                updates=updates,
                max_tokens=node.max_tokens_per_microbatch
                or self._experiment.control.max_tokens_per_microbatch,
            )
            with label_work(name), self._memory.measure() as peak:
                if ids:
                    batch = read_inputs(self._store, node, ids)
                else:
                    batch = make_empty_sample(minibatches[0])
                self._run_hooks(node.pre_hooks, model, mesh, before=True)
                if node.cache:
                    result = self._call_with_cache(node, name, model, batch)
                else:
                    inputs = take_samples(batch, minibatches) if node.trains else batch
                    result = getattr(self._interfaces[name], node.method)(model, inputs)
                self._run_hooks(node.post_hooks, model, mesh, before=False)
                outputs = to_edge_outputs(node, result.outputs, ids)
        except RunError as error:
            kind = NotFinite if isinstance(error, NotFinite) else RunError
            raise kind(f"{description}: {error}") from error
        except Exception as error:
            error.add_note(f"in {description}")
            raise
        measured = {STARTED: started, SECONDS: time.perf_counter() - clock}
        # Neither torch nor the process knows the memory of accelerators that JAX uses.
        spec = self._specs[node.role]
        if peak.num_bytes is not None and (spec.backend != "jax" or spec.device == "cpu"):
            measured[PEAK_BYTES] = float(peak.num_bytes)
        metadata = self._store.put(outputs) if outputs else None
        return MFCResult(metadata, {**result.metrics, **measured}, result.seen)

    def _make_announce(
        self, name: str, early: Callable[[OutputsAnnounced], None] | None
    ) -> Callable[[SequenceSample], None] | None:
        if early is None:
            return None

        def announce(sample: SequenceSample) -> None:
            outputs = to_edge_outputs(self.calls[name], sample, sample.ids)
            assert outputs is not None
            early(OutputsAnnounced(name, self._store.put(outputs)))

        return announce

    def build_model(
        self,
        role: str,
        step: int,
        mesh: Mesh | None = None,
        weights: int | None = None,
        *,
        or_newer: bool = False,
    ) -> Model:
        """Return the handle through which interfaces use the role's engine on `mesh`.

        By default, `mesh` is the role's own mesh. `step` is the index of the call's firing
        (execution). For `weights` and `or_newer`, see `RoleEngines.engine`.
        """
        control = self._experiment.control
        tokenizers = self._tokenizers
        return Model(
            role=role,
            engine=self.roles.engine(role, mesh, weights, or_newer=or_newer),
            tokenizer=tokenizers[role],
            data_tokenizer=tokenizers[self._experiment.data_role],
            device=self._device,
            dtype=self._specs[role].dtype or "float32",
            step=step,
            seed=control.seed,
            schedule=self._specs[role].schedule,
        )

    def get_mesh(self, name: str) -> Mesh:
        """Return the mesh on which the call `name` runs."""
        return self._meshes[name]

    def save(self, role: str, directory: Path) -> None:
        """Write a role's model to `directory` in the Hugging Face format.

        The model is written by the method `save` of the interface that trains the role, if there is
        one; otherwise by the engine.
        """
        for name, node in self.calls.items():
            if node.role == role and node.trains and implements_method(node.interface, "save"):
                self._interfaces[name].save(self.build_model(role, 0), directory)
                return
        self.roles.engine(role).save_model(directory, self._tokenizers[role])

    def save_state(self, point: Path, own: Path | None = None) -> None:
        """Save the state of engines and interfaces, and all stored tensors.

        The state of engines is written to `point`, the directory of the recovery point. The state
        of interfaces and the tensors are written to `own`, the folder of this device (default:
        `point`).
        """
        own = own or point
        self.roles.save_state(point / ENGINES_FOLDER)
        stateful = {}
        for name, node in self.calls.items():
            has_state = implements_method(node.interface, "state_dict")
            if has_state and self._rank in self._meshes[name].ranks:
                stateful[name] = self._interfaces[name].state_dict()
        write_state(own / INTERFACES_FILE, stateful)
        write_samples(own, self._store)

    def load_state(self, point: Path, folders: Sequence[Path]) -> None:
        """Load the recovery point in the directory `point`, written by any number of devices.

        The tensors in `folders` are added to the tensor store.
        """
        self.roles.load_state(point / ENGINES_FOLDER)
        for name, state in read_interfaces(point).items():
            if self._rank in self._meshes[name].ranks:
                self._interfaces[name].load_state_dict(state)
        for sample in read_samples(folders):
            self._store.put(sample)

    def _run_hooks(self, hooks: Iterable[Hook], model: Model, mesh: Mesh, *, before: bool) -> None:
        for hook in hooks:
            if not isinstance(hook, Offload):
                functions.get(hook.function)(model, **hook.args)
            elif before:
                self.roles.onload(model.role, hook.what, mesh)
            else:
                self.roles.offload(model.role, hook.what, mesh)

    def _call_with_cache(
        self, node: MFCDef, name: str, model: Model, batch: SequenceSample
    ) -> MFCResult:
        """Return the result of a call on `batch`, computing only outputs that are not cached.

        The metrics are those of the computed samples and `cached_fraction`, the fraction of ids
        that were in the cache.
        """
        if name not in self._caches:
            folder = f"{name.replace('/', '-')}-{compute_fingerprint(node, model.engine)}"
            self._caches[name] = OutputCache(self._cache / folder)
        metrics: dict[str, float] = {}

        def compute(missing: SequenceSample) -> SequenceSample:
            result: MFCResult = getattr(self._interfaces[name], node.method)(model, missing)
            metrics.update(result.metrics)
            assert result.outputs is not None, f"node {name!r} has no outputs to cache"
            return result.outputs.select(ids=missing.ids, keys=node.output_keys)

        outputs, known = self._caches[name].get_or_compute(batch, compute)
        return MFCResult(outputs, {**metrics, "cached_fraction": known / max(1, batch.num_ids)})
