"""Reading and writing of the `transformers` module that the backend `hf` runs.

Nothing is unpickled, and code in the model directory runs only with `trust_remote_code`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.utils import is_accelerate_available, logging

from weft import randomness
from weft.checkpoints import hf_io
from weft.checkpoints.weight_files import WeightFiles
from weft.engine.backends.common import check_memory
from weft.engine.hf.imported import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from weft.engine.spec import ModelSpec
from weft.errors import CheckpointError, ConfigError, RunError
from weft.reading import explain_read_errors

DROPOUTS = ("dropout", "pdrop")  # endings of the configuration keys of dropout rates
# prefixes of names that a checkpoint with another head may lack or have in addition
HEADS = ("lm_head.", "score.", "classifier.", "embed_out.")


def load(spec: ModelSpec, path: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Load a model on `device` in `dtype`, using `transformers`.

    `path` is a model directory or a hub name. With `spec.init_from_scratch`, the model is built
    from its config.json, with new weights. Raises `UserError` if the directory is incomplete, if
    the architecture is not a decoder, or if the model needs code from the directory and
    `trust_remote_code` is not set.
    """
    where = path if spec.trust_remote_code else str(hf_io.resolve(path))
    raw = hf_io.read_raw(where)
    if spec.head == "lm":
        auto: Any = AutoModelForCausalLM
    else:
        auto = AutoModelForSequenceClassification
    with silence_transformers():
        code = "it contains Python code; read the code, then set trust_remote_code=true to run it: "
        hint = code if "auto_map" in raw and not spec.trust_remote_code else ""
        with explain_read_errors(
            f"{path}: transformers cannot load it{f': {hint}' if hint else ''}", CheckpointError
        ):
            config = AutoConfig.from_pretrained(where, trust_remote_code=spec.trust_remote_code)
            _configure(config, spec)
            with _hold_seed(spec.seed):
                if spec.init_from_scratch:
                    with torch.device("meta"):
                        check_memory(auto.from_config(config, dtype=dtype), path, device)
                    module = auto.from_config(
                        config, dtype=dtype, trust_remote_code=spec.trust_remote_code
                    )
                    new = ["score.weight"]
                else:
                    _check_files(hf_io.resolve(where), raw)
                    module, report = auto.from_pretrained(
                        where,
                        config=config,
                        dtype=dtype,
                        trust_remote_code=spec.trust_remote_code,
                        output_loading_info=True,
                        **build_device_arguments(device),
                    )
                    new = _check_report(path, report)
    if spec.head != "lm" and any(name.startswith(HEADS) for name in new):
        _initialize_head(module, spec)
    return module.to(device).eval()


def build_meta_module(spec: ModelSpec, path: str) -> PreTrainedModel:
    """Build the module described by a model's config.json on the meta device, without weights.

    Raises `CheckpointError` if `transformers` cannot build the model.
    """
    if spec.head == "lm":
        auto: Any = AutoModelForCausalLM
    else:
        auto = AutoModelForSequenceClassification
    if spec.trust_remote_code:
        where = path
    else:
        where = str(hf_io.find_config_file(path).parent)
    with (
        silence_transformers(),
        torch.device("meta"),
        explain_read_errors(f"{path}: transformers cannot build it", CheckpointError),
    ):
        config = AutoConfig.from_pretrained(where, trust_remote_code=spec.trust_remote_code)
        _configure(config, spec)
        module: PreTrainedModel = auto.from_config(config, trust_remote_code=spec.trust_remote_code)
    return module.eval()


def build_device_arguments(device: torch.device) -> dict[str, Any]:
    """Return the loading arguments that make `transformers` put each tensor directly on the device.

    Host memory then never contains the whole model. The result is empty on a CPU, and without the
    package accelerate, which this requires.
    """
    if device.type == "cpu" or not is_accelerate_available():
        return {}
    return {"device_map": {"": device}}


def _check_files(directory: Path, raw: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` if a weight file is missing or truncated; the message names the file.

    The error that `transformers` raises does not contain the file's name.
    """
    if any(directory.glob("*.safetensors*")):
        files = WeightFiles(directory)
        if "quantization_config" not in raw:
            files.check_floats(name for name in files.names if name.endswith(".weight"))


def _configure(config: Any, spec: ModelSpec) -> None:
    values = config.to_dict()
    if values.get("is_encoder_decoder"):
        raise ConfigError(
            f"{spec.path}: a {values.get('model_type')} model has an encoder; backend=hf runs "
            f"decoders"
        )
    if spec.head != "lm":
        config.num_labels = 1
    if spec.dropout is not None:
        for key in read_dropout_rates(values):
            setattr(config, key, spec.dropout)


def read_dropout_rates(values: dict[str, Any]) -> dict[str, float]:
    """Return the entries of a model configuration that are dropout rates.

    These are the numbers whose keys end in "dropout" or "pdrop".
    """
    dropout_rates: dict[str, float] = {}
    for k, v in values.items():
        if k.endswith(DROPOUTS) and isinstance(v, int | float) and v is not True:
            dropout_rates[k] = v
    return dropout_rates


def _check_report(path: str, report: dict[str, Any]) -> list[str]:
    """Return the names of the newly initialized parameters, all of which belong to the head.

    `report` contains the differences between the network and the saved weights. Raises
    `CheckpointError` for any other parameter that is missing, unexpected or of another shape.
    """
    missing = sorted(report["missing_keys"])
    unexpected = sorted(report["unexpected_keys"])
    lost = [name for name in missing if not name.startswith(HEADS)]
    spare = [name for name in unexpected if not name.startswith(HEADS)]
    if lost or spare or report["mismatched_keys"]:
        wrong = ", ".join(map(str, (lost or spare or sorted(report["mismatched_keys"]))[:8]))
        if lost:
            kind = "lacks"
        elif spare:
            kind = "holds unknown"
        else:
            kind = "has other shapes than config.json says for"
        raise CheckpointError(
            f"{path} {kind} {wrong}; is config.json the one that belongs to the weights?"
        )
    if any(name.startswith("lm_head.") for name in missing):
        raise CheckpointError(f"{path} lacks lm_head; it is not a causal language model")
    return missing


def _initialize_head(module: nn.Module, spec: ModelSpec) -> None:
    """Initialize a new value head with zeros and a new score head with small random weights.

    The reasons are given in `weft.checkpoints.hf_io.initialize_parameter`, which does the same.
    """
    for child in module.children():
        if isinstance(child, nn.Linear) and child.out_features == 1:
            with torch.no_grad():
                low, high = randomness.derive_key(spec.seed, "init", id="score.weight")
                generator = torch.Generator().manual_seed(int(low) | int(high) << 32)
                drawn = torch.randn(child.weight.shape, generator=generator)
                if spec.head == "value":
                    std = 0.0
                else:
                    std = 1.0 / math.sqrt(child.in_features + 1)
                child.weight.copy_(drawn * std)
                if child.bias is not None:
                    child.bias.zero_()


def save(directory: Path, module: PreTrainedModel, state: dict[str, Tensor] | None = None) -> None:
    """Write the module to a Hugging Face directory, with `state` as its weights if given.

    Raises `RunError` if writing fails.
    """
    try:
        with silence_transformers():
            module.save_pretrained(directory, state_dict=state)
    except (OSError, SafetensorError) as failed:
        raise RunError(
            f"{directory} could not be written ({failed}); what was saved before is untouched"
        ) from failed


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Hide progress bars and log messages of `transformers`; weft checks the files itself."""
    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _hold_seed(seed: int) -> Iterator[None]:
    """Seed torch's generator, which initializes new weights, within the context.

    The generator's state is restored at the end.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
