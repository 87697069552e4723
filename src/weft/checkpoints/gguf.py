"""Export language models to GGUF, the format of llama.cpp, with llama.cpp's own converter.

The file is checked before it gets its final name: its vocabulary and tensors are compared with
those of the model, and it is loaded to compare the log-probabilities of a text. It is loaded with
llama.cpp's Python package if that is installed, and otherwise with transformers.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft import extras
from weft.errors import CheckpointError, ConfigError
from weft.observe.model_card import find_architecture, name_model
from weft.reading import read_object
from weft.writing import replace_file

if TYPE_CHECKING:
    from torch import Tensor

SCRIPT = "convert_hf_to_gguf.py"
PACKAGE = "gguf"
DTYPES = ("auto", "f32", "f16", "bf16", "q8_0")
# Maximum difference of a token's log-probability between a model and its GGUF file. llama.cpp
# computes attention in 16 bits even if the weights have 32.
TOLERANCES = {"f32": 0.02, "f16": 0.05, "bf16": 0.2, "auto": 0.2, "q8_0": 0.5}
# Maximum difference of a weight, relative to the largest weight of its tensor.
WEIGHT_TOLERANCES = {"f32": 1e-6, "f16": 2e-3, "bf16": 1e-2, "auto": 1e-2, "q8_0": 2e-2}
MAX_EXTRA_SHARE = 0.005  # maximum share of the parameters that are added or left out
TEXT = "Once upon a time there was a little girl who lived near the sea. What is 17 + 25? It is 42."
LOG_LINES = 3  # number of last lines of the converter's output in an error message


@dataclass(frozen=True)
class CheckedText:
    """Text used to check files, as tokens, and the original model's log-probabilities.

    `ids` are the token ids. `logps` [tokens - 1] are the original model's log-probabilities of the
    tokens after the first, in float32.
    """

    ids: Sequence[int]
    logps: Tensor


def find_converter(location: Path | None) -> Path | None:
    """Return the path of llama.cpp's converter, or None if it is not installed.

    `location` is the script or a checkout of llama.cpp; if it is None, the PATH is searched. Raises
    `ConfigError` if `location` has no converter.
    """
    if location is not None:
        script = location / SCRIPT if location.is_dir() else location
        if not script.is_file():
            raise ConfigError(
                f"--converter {location}: there is no {SCRIPT}; name llama.cpp's folder or the "
                "script"
            )
        return script
    installed = shutil.which(SCRIPT)
    return None if installed is None else Path(installed)


def require_converter(model: str, output: Path, location: Path | None) -> Path:
    """Return the path of llama.cpp's converter.

    `location` is the value of `--converter`; `model` and `output` are those of the command line.
    Raises `ConfigError` if the converter or the Python package `gguf` is not installed; the message
    lists the commands that install them.
    """
    script = find_converter(location)
    if script is not None and importlib.util.find_spec(PACKAGE) is not None:
        return script
    commands = []
    if importlib.util.find_spec(PACKAGE) is None:
        commands.append(extras.install(PACKAGE))
    argument = location
    if script is None:
        commands.append("git clone --depth 1 https://github.com/ggml-org/llama.cpp")
        argument = Path("llama.cpp")
    option = "" if argument is None else f" --converter {argument}"
    commands.append(f"weft convert gguf {model} --output {output}{option}")
    lines = "".join(f"\n  {command}" for command in commands)
    raise ConfigError(
        f"the export to GGUF needs llama.cpp's converter, which is not installed; run{lines}"
    )


def export(model: Path, output: Path, converter: Path, dtype: str, *, check: bool) -> list[str]:
    """Write the model in the directory `model` to the file `output`, and return messages about it.

    `dtype` is one of `DTYPES`. Without `check`, the file is not loaded; only its vocabulary and
    tensors are compared. Raises `CheckpointError`, without writing `output`, if the converter fails
    or the file differs from the model.
    """
    if not find_architecture(model).endswith("ForCausalLM"):
        raise CheckpointError(
            f"{model}: is not a language model in Hugging Face's format, which the export to GGUF "
            f"needs; merge an adapter first: weft convert merge"
        )
    with replace_file(output) as partial:
        _run_converter(model, partial, converter, dtype)
        lines = [check_contents(model, partial)]
        if check:
            lines.append(check_values(model, partial, dtype))
    return lines


def _run_converter(model: Path, target: Path, converter: Path, dtype: str) -> None:
    command = [str(converter), str(model), "--outfile", str(target), "--outtype", dtype]
    command += ["--model-name", name_model(model)]
    if converter.suffix == ".py":
        command.insert(0, sys.executable)
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    if result.returncode != 0 or target.stat().st_size == 0:
        log_lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        raise CheckpointError(
            f"{model}: llama.cpp's converter failed: "
            f"{' / '.join(log_lines[-LOG_LINES:]) or 'no output'}"
        )


def check_contents(model: Path, file: Path) -> str:
    """Compare the numbers of parameters and of tokens in a GGUF file with those of the model.

    Returns a message with the numbers. Raises `CheckpointError` if one of them differs.
    """
    from gguf import GGUFReader

    from weft.checkpoints.weight_files import WeightFiles

    reader = GGUFReader(file)
    weights = WeightFiles(model)
    config = read_object(model / "config.json", str(model / "config.json"), CheckpointError)
    expected = 0
    for name in weights.names:
        size = 1
        for length in weights.get_shape(name):
            size *= length
        expected += size
    total = sum(int(tensor.n_elements) for tensor in reader.tensors)
    # The converter may add or leave out buffers, and a tied output matrix.
    width = config["hidden_size"] if "hidden_size" in config else config["n_embd"]
    output_size = int(config["vocab_size"]) * int(width)
    differences = [abs(total - expected - copies * output_size) for copies in (-1, 0, 1)]
    if min(differences) > MAX_EXTRA_SHARE * expected:
        raise CheckpointError(
            f"{model}: the GGUF file has {total:,} parameters, and the model {expected:,}"
        )
    tokens = reader.fields.get("tokenizer.ggml.tokens")
    num_tokens = 0 if tokens is None else len(tokens.data)
    if num_tokens != config["vocab_size"]:
        raise CheckpointError(
            f"{model}: the GGUF file has {num_tokens} tokens, and the model {config['vocab_size']}"
        )
    types = sorted({tensor.tensor_type.name for tensor in reader.tensors})
    return (
        f"{len(reader.tensors)} tensors ({', '.join(types)}), {total:,} parameters, "
        f"{num_tokens} tokens"
    )


def check_values(model: Path, file: Path, dtype: str) -> str:
    """Load a GGUF file, and compare its log-probabilities of a text with those of the model.

    Returns a message with the largest difference. Raises `CheckpointError` if the file cannot be
    loaded, or if a difference exceeds the tolerance of `dtype`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(TEXT)["input_ids"]
    original = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    expected = CheckedText(ids, _compute_logps(_run_model(original, ids), ids))
    del original  # two models in float32 need much memory
    if importlib.util.find_spec("llama_cpp") is not None:
        program = "llama.cpp"
        logps, warning = _score_with_llama_cpp(model, file, expected)
    else:
        program, warning = "transformers", ""
        loaded = _load_with_transformers(model, file)
        _compare_weights(model, loaded, dtype)
        logps = _compute_logps(_run_model(loaded, ids), ids)
    difference = float((logps - expected.logps).abs().max())
    if not difference <= TOLERANCES[dtype]:
        raise CheckpointError(
            f"{model}: {program} loads the GGUF file, but log-probabilities differ by "
            f"{difference:.3g} (at most {TOLERANCES[dtype]} for {dtype}): the converter does not "
            "suit this model"
        )
    return (
        f"loaded with {program}: log-probabilities of {len(logps)} tokens differ by at most "
        f"{difference:.2g}{warning}"
    )


def _run_model(network: Any, ids: Sequence[int]) -> Tensor:
    """Return the logits [tokens, vocabulary] of a transformers model for the tokens `ids`."""
    import torch

    with torch.inference_mode():
        logits: Tensor = network(torch.tensor([list(ids)])).logits[0]
    return logits


def _compute_logps(logits: Tensor, ids: Sequence[int]) -> Tensor:
    """Return the log-probabilities [tokens - 1] of `ids` after the first one.

    `logits` has the shape [tokens, vocabulary].
    """
    import torch

    logps = logits.float().log_softmax(-1)
    return logps[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]


def _score_with_llama_cpp(model: Path, file: Path, text: CheckedText) -> tuple[Tensor, str]:
    """Return llama.cpp's log-probabilities [tokens - 1] of the text, and a warning or "".

    The warning says that llama.cpp splits the text into other tokens.
    """
    import torch
    from llama_cpp import Llama

    try:
        loaded = Llama(str(file), n_ctx=len(text.ids) + 8, logits_all=True, verbose=False)
    except (ValueError, RuntimeError) as error:
        raise CheckpointError(f"{model}: llama.cpp cannot load the GGUF file: {error}") from error
    ids = list(text.ids)
    loaded.eval(ids)
    logps = _compute_logps(torch.from_numpy(loaded.scores[: len(ids)].copy()), ids)
    tokens = loaded.tokenize(TEXT.encode(), add_bos=True, special=False)
    if tokens == ids:
        return logps, ""
    return logps, (
        f"; warning: llama.cpp splits this text into other tokens ({len(tokens)} instead of "
        f"{len(ids)}): the converter does not suit this tokenizer, and answers can get worse"
    )


def _load_with_transformers(model: Path, file: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"gguf_file": file.name, "dtype": torch.float32}
    try:
        return AutoModelForCausalLM.from_pretrained(file.parent, **options)
    except (ValueError, RuntimeError, OSError, NotImplementedError) as error:
        raise CheckpointError(
            f"{model}: transformers cannot load the GGUF file ({error}); install llama-cpp-python, "
            f"or leave the check out with --no-check"
        ) from error


def _compare_weights(model: Path, loaded: Any, dtype: str) -> None:
    """Raise `CheckpointError` if a weight of the loaded file differs by more than the tolerance."""
    from weft.checkpoints.weight_files import WeightFiles

    weights = WeightFiles(model)
    state = loaded.state_dict()
    for name in weights.names:
        if name not in state:
            continue
        original = weights.read(name).float()
        difference = float(
            (state[name] - original).abs().max() / original.abs().max().clamp(min=1e-30)
        )
        if not difference <= WEIGHT_TOLERANCES[dtype]:
            raise CheckpointError(
                f"{model}: {name} differs in the GGUF file by {difference:.2g} of its largest "
                f"value (at most {WEIGHT_TOLERANCES[dtype]} for {dtype}): the converter does not "
                "suit this model"
            )
