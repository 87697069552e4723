"""Backend `auto`, which selects the backend `torch` or `hf` by the model type in config.json.

The selected backend is `torch` if weft has its own implementation of the model type, else `hf`.
"""

from __future__ import annotations

from dataclasses import replace

from weft.checkpoints import config_file, hf_io
from weft.engine.base import Engine
from weft.engine.spec import AUTO, ModelSpec
from weft.errors import ConfigError
from weft.parallel.mesh import RankMesh
from weft.registry import backends, register_backend
from weft.topology import Layout


def choose_backend(spec: ModelSpec) -> ModelSpec:
    """Return the spec with `backend="auto"` replaced by a backend that can run the model.

    A spec with another backend, or without a path, is returned unchanged. Raises `UserError` for a
    model that cannot be read.
    """
    if spec.backend != AUTO or spec.path is None:
        return spec
    if spec.type is not None:
        return replace(spec, backend=config_file.TORCH_BACKEND)
    values = hf_io.read_raw(spec.path)
    backend = config_file.choose_backend(values)
    if backend == config_file.TORCH_BACKEND:
        notes = spec.notes
    else:
        notes = (*spec.notes, config_file.describe_disadvantages(values))
    return replace(spec, backend=backend, notes=notes)


@register_backend(AUTO)
def auto_backend(spec: ModelSpec, layout: Layout, mesh: RankMesh | None = None) -> Engine:
    """Build the role's engine with a backend that can run its model.

    Raises `UserError` for a role without a path, and for a model that the backend cannot read or
    run.
    """
    resolved_spec = choose_backend(spec)
    if resolved_spec.backend == AUTO:
        raise ConfigError("path is not set: name a Hugging Face directory or hub model")
    build_engine = backends.get(resolved_spec.backend)
    engine: Engine
    if mesh is None:
        engine = build_engine(resolved_spec, layout)
    else:
        engine = build_engine(resolved_spec, layout, mesh)
    return engine
