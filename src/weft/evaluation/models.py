"""Loading of models outside of a run, for sampling or scoring.

As in weft's commands, a model is a directory, an adapter, a run or a hub name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from weft.checkpoints import config_file
from weft.checkpoints.config_file import has_prefix, read_prefix
from weft.checkpoints.names import ADAPTER
from weft.data.spec import TokenizerSpec
from weft.engine.spec import ModelSpec
from weft.errors import CheckpointError
from weft.options import validate

if TYPE_CHECKING:
    from weft.algorithms.base import Output
    from weft.data.sample import SequenceSample
    from weft.data.tokenizer import Tokenizer
    from weft.engine.base import Engine, Request
    from weft.engine.spec import GenerationSpec

# Parts of the names of architectures that compute scores instead of text.
SCORING_ARCHITECTURES = (*config_file.SCORE_ARCHITECTURES, "ForTokenClassification")


class AnsweredToken(Protocol):
    """Token of a generated continuation; `finish` is not None for the last token."""

    @property
    def id(self) -> str: ...
    @property
    def token(self) -> int: ...
    @property
    def finish(self) -> str | None: ...


class AnswerGenerator(Protocol):
    """Part of `engine.base.Generator` that evaluation tasks need."""

    def submit(self, requests: Sequence[Request]) -> None: ...
    def step(self) -> Sequence[AnsweredToken]: ...
    @property
    def idle(self) -> bool: ...


class AnsweringEngine(Protocol):
    """Part of `engine.base.Engine` that evaluation tasks need.

    Engines of this process implement it, and so does `run_suite.RunEngine`, which uses the engines
    of a run.
    """

    def forward(
        self, batch: SequenceSample, want: frozenset[Output], *, max_tokens: int = ...
    ) -> SequenceSample: ...
    def generating(self, spec: GenerationSpec) -> AbstractContextManager[AnswerGenerator]: ...
    @property
    def description(self) -> Mapping[str, Any]: ...


class EvaluatedModel(Protocol):
    """Model that can be evaluated on tasks; see `OpenedModel` for the attributes."""

    @property
    def engine(self) -> AnsweringEngine: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def path(self) -> str: ...
    @property
    def context(self) -> int | None: ...
    @property
    def adapter(self) -> Path | None: ...
    @property
    def name(self) -> str: ...


@dataclass(frozen=True)
class OpenedModel:
    """Loaded model with its tokenizer, ready for use.

    `path` is the directory or hub name. `context` is the maximum number of tokens in a sequence, or
    None if the config does not state it. `adapter` is the folder of the adapter that was merged
    into the weights. `notes` are messages for the user.
    """

    engine: Engine
    tokenizer: Tokenizer
    path: str
    context: int | None = None
    adapter: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name for display: the adapter's folder if there is one, else `path`."""
        return str(self.adapter or self.path)


def open_policy(spec: ModelSpec) -> OpenedModel:
    """Open the model at `spec.path` to sample from it.

    Raises `UserError` if the model cannot generate text.
    """
    check_generates_text(str(spec.path))
    adapter = _find_adapter(str(spec.path))
    if adapter and spec.quantize is not None:
        raise CheckpointError(
            f"{adapter} is an adapter, and quantized weights would distort it; leave "
            f"quantize={spec.quantize} out, or "
            "merge it into its model first: weft convert merge"
        )
    if adapter:
        spec = _find_base_model(adapter, spec)
    opened = _open(spec, adapter)
    if adapter:
        _add_adapter(opened.engine, adapter, str(spec.path))
    return opened


def open_scorer(spec: ModelSpec) -> OpenedModel:
    """Open the reward model at `spec.path`. Raises `UserError` if the model has no score head."""
    path = str(spec.path)
    if _find_adapter(path):
        raise CheckpointError(
            f"{path} is an adapter; merge it into its reward model first: weft convert merge"
        )
    architectures = _read_architectures(path)
    if architectures and not is_scorer(path):
        raise CheckpointError(
            f"{path} is not a reward model ({architectures[0]} has no score head); train one with weft "
            f"quickstart rw"
        )
    return _open(spec.with_head("score", trained=False), None)


def _open(spec: ModelSpec, adapter: Path | None) -> OpenedModel:
    """Open the model at `spec.path`, without merging the adapter."""
    from weft.checkpoints import hf_io
    from weft.engine.backends.auto import choose_backend
    from weft.registry import backends
    from weft.topology import Layout

    validate(spec)
    path = str(spec.path)
    spec = choose_backend(spec)
    prefix = read_prefix(path)
    spec = _find_prefix_tokenizer(spec)
    tokenizer = _load_tokenizer(spec)
    engine = backends.get(spec.backend)(spec, Layout())
    context = find_context_length(hf_io.read_raw(path))
    if context is not None and prefix is not None:
        context -= prefix.num_tokens
    return OpenedModel(engine, tokenizer, path, context, adapter, spec.notes)


def load_policy_tokenizer(spec: ModelSpec) -> Tokenizer:
    """Return the tokenizer with which `open_policy` opens the model, without loading weights."""
    adapter = _find_adapter(str(spec.path))
    if adapter:
        spec = _find_base_model(adapter, spec)
    return _load_tokenizer(_find_prefix_tokenizer(spec))


def _find_prefix_tokenizer(spec: ModelSpec) -> ModelSpec:
    """Return the spec; a trained prefix without a tokenizer gets that of its base model."""
    prefix = read_prefix(str(spec.path))
    if prefix is None or _has_tokenizer(Path(str(spec.path))) or spec.tokenizer.path is not None:
        return spec
    return replace(spec, tokenizer=replace(spec.tokenizer, path=prefix.base))


def _load_tokenizer(spec: ModelSpec) -> Tokenizer:
    from weft.data.tokenizer import Tokenizer
    from weft.data.tokenizer_files import COMMAND

    return Tokenizer.load(spec.tokenizer, str(spec.path), option=COMMAND)


def find_context_length(values: Mapping[str, Any]) -> int | None:
    """Return a model's maximum number of positions, given the contents of its config.json.

    All the keys that models use for this number are tried. Returns None if the file has none of
    them.
    """
    lengths = (
        values.get(name)
        for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
    )
    return next((value for value in lengths if isinstance(value, int)), None)


def is_scorer(path: str) -> bool:
    """Return whether the model at `path`, a directory or hub name, has a score head."""
    return config_file.is_reward_model({"architectures": _read_architectures(path)})


def _read_architectures(path: str) -> list[str]:
    from weft.checkpoints import hf_io

    if _find_adapter(path):
        return []
    return [str(name) for name in hf_io.read_raw(path).get("architectures") or []]


def check_generates_text(path: str) -> None:
    """Raise `CheckpointError` if the model at `path` has a score head and so cannot generate text."""
    for architecture in _read_architectures(path):
        if any(part in architecture for part in SCORING_ARCHITECTURES):
            raise CheckpointError(
                f"{path} is a reward or value model ({architecture}): it gives scores, not text; name an "
                f"actor"
            )


def _find_adapter(path: str) -> Path | None:
    """Return the folder `path` if it contains LoRA adapters, else None.

    A folder with a trained prefix (from prefix tuning) does not count as an adapter, because such a
    folder is opened as a model, together with its base model.
    """
    folder = Path(path).expanduser()
    if (folder / ADAPTER).exists() and not has_prefix(folder):
        return folder
    return None


def _has_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer_config.json").exists()


def _find_base_model(adapter: Path, model: ModelSpec) -> ModelSpec:
    """Return the spec of an adapter's base model, with the adapter's tokenizer if it has one.

    All other settings are those of `model`, the spec that the user gave for the adapter. Raises
    `CheckpointError` if the adapter belongs to a reward model, or does not name its base model.
    """
    from weft.checkpoints.peft_io import read_adapter_config

    settings = read_adapter_config(adapter)
    if settings["task_type"] != "CAUSAL_LM":
        raise CheckpointError(
            f"{adapter} is the adapter of a reward or value model: it gives scores, not text"
        )
    base = settings.get("base_model_name_or_path")
    if not base:
        raise CheckpointError(
            f"{adapter / ADAPTER} does not name its base model; merge it with weft convert merge "
            f"--base"
        )
    if _has_tokenizer(adapter):
        tokenizer = TokenizerSpec(path=str(adapter))
    else:
        tokenizer = model.tokenizer
    return replace(model, path=str(base), tokenizer=tokenizer)


def _add_adapter(engine: Engine, adapter: Path, base: str) -> None:
    """Merge the adapter into the engine's weights.

    `base` is the path of the base model. Raises `CheckpointError` if the adapter changes the
    network itself: the size of the vocabulary, or whether the output matrix is tied to the
    embedding.
    """
    import torch

    from weft.checkpoints import hf_io, peft_io
    from weft.models.network import lora
    from weft.models.network.linear import find_canonical_values
    from weft.topology import build_whole_slice

    stored_dtype = hf_io.ParameterReader(hf_io.resolve(base), "lm").dtype
    network = peft_io.load_adapted(
        base, adapter, "lm", torch.promote_types(stored_dtype, torch.float32), exact=True
    )
    if network.config != hf_io.read_config(base)[1]:
        raise CheckpointError(
            f"{adapter} has another vocabulary than {base}, or an output matrix apart from the "
            f"embedding; merge it into its "
            "base first: weft convert merge"
        )
    scales = lora.collect_scales(network)
    merged = lora.merge(find_canonical_values(network), scales)
    names = {f"{layer}.weight" for layer in scales} | {
        *peft_io.find_replaced_parameters(adapter, network).values()
    }
    engine.write(
        (
            (name, build_whole_slice(tuple(merged[name].shape)), merged[name])
            for name in sorted(names)
        ),
        version=0,
    )
