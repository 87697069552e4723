"""Read and write adapters in PEFT's format: `adapter_model.safetensors`, `adapter_config.json`.

In weft, each unfused layer has one adapter with the matrices A and B. If the checkpoint fuses
several layers (phi3's qkv, GPT-2's c_attn), their adapters are saved as one, whose rank is the sum
of their ranks: A is stacked, B is block-diagonal, and `rank_pattern` and `alpha_pattern` preserve
the scale. Writing an adapter and reading it again is exact. A stack of experts has one adapter per
expert, named like the expert's weight in the checkpoint.

PEFT unties the modules in `modules_to_save`: an embedding that is also the output matrix is stored
under both names.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.checkpoints import config_file, hf_io, weight_files
from weft.checkpoints.names import ADAPTER
from weft.errors import CheckpointError
from weft.models.families.base import Family
from weft.models.families.keymap import Key, KeyMap
from weft.models.network.config import TransformerConfig
from weft.models.network.linear import find_canonical_parameters, find_canonical_values
from weft.models.network.lora import A, B, attach_ranks, find_adapters
from weft.models.network.transformer import Head, Transformer
from weft.reading import explain_read_errors, read_object
from weft.registry import families

PREFIX = "base_model.model."
TASKS: dict[str, Head] = {"CAUSAL_LM": "lm", "SEQ_CLS": "score"}
# parameters that are trained in full after tokens were added
EMBEDDINGS = ("embed.weight", "head.weight", "head.bias")
OUTPUT = "lm_head.weight"  # the output matrix of every family's module in transformers 5
SCALE_TOLERANCE = 1e-12  # scales that differ by less are equal


def save_adapter(
    directory: str | Path,
    parameters: Mapping[str, Tensor],
    scales: Mapping[str, float],
    config: TransformerConfig,
    head: Head = "lm",
    *,
    base: str,
    dropout: float = 0.0,
    save_embeddings: bool = False,
) -> None:
    """Write the adapters among `parameters` in PEFT's format.

    `parameters` have canonical names (weft's own), including `lora_a` and `lora_b`. `scales` maps
    each adapted layer to its scale, and `base` is the name of the base model. A value or score head
    is saved in full, as one of PEFT's `modules_to_save`. If `save_embeddings` is True, the
    embedding and the output matrix are also saved in full.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    family: Family = families.get(config.family)
    keymap = family.keymap(config, head)
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, tuple[int, float]] = {}
    for module, a, b, scale in _export(keymap, parameters, scales):
        tensors[f"{PREFIX}{module}.lora_A.weight"] = a.contiguous()
        tensors[f"{PREFIX}{module}.lora_B.weight"] = b.contiguous()
        ranks[module] = (a.shape[0], scale * a.shape[0])
    full_names = _find_modules_to_save(family, config, head, save_embeddings)
    for hf, name in full_names.items():
        # Two names can share one tensor, which safetensors does not allow; so each is copied.
        tensors[f"{PREFIX}{hf}"] = parameters[name].detach().clone().contiguous()
    settings = {
        "peft_type": "LORA",
        "task_type": next(task for task, kind in TASKS.items() if (kind == "lm") == (head == "lm")),
        "base_model_name_or_path": base,
        **_build_rank_settings(ranks),
        "target_modules": _find_target_modules(list(ranks), keymap),
        "lora_dropout": dropout,
        "bias": "none",
        "fan_in_fan_out": any(key.transpose for key in keymap.keys.values()),
        "modules_to_save": sorted({hf.rpartition(".")[0] for hf in full_names}) or None,
        "inference_mode": True,
    }
    weight_files.write_safetensors(folder / config_file.ADAPTER_WEIGHTS, tensors)
    weight_files.write_text(folder / ADAPTER, json.dumps(settings, indent=2, sort_keys=True) + "\n")


def _export(
    keymap: KeyMap, parameters: Mapping[str, Tensor], scales: Mapping[str, float]
) -> Iterator[tuple[str, Tensor, Tensor, float]]:
    """Yield (module name in the checkpoint, A [r, in], B [out, r], scale) for every adapter."""
    for hf, keys in keymap.group_by_hf_name().items():
        adapted_keys = []
        for key in keys:
            if key.name.removesuffix(".weight") in scales and key.name.endswith(".weight"):
                adapted_keys.append(key)
        if not adapted_keys:
            continue
        layers = [key.name.removesuffix(".weight") for key in adapted_keys]
        scale = scales[layers[0]]
        assert all(abs(scales[layer] - scale) < SCALE_TOLERANCE for layer in layers), (
            f"{hf}: adapters of several scales"
        )
        pairs = []
        for layer in layers:
            pairs.append((parameters[f"{layer}.{A}"].detach(), parameters[f"{layer}.{B}"].detach()))
        if adapted_keys[0].experts:
            expert = adapted_keys[0].list_hf_names().index(hf)
            pairs = [(a[expert], b[expert]) for a, b in pairs]
        module = hf.removesuffix(".weight")
        if adapted_keys[0].fused is None:
            yield module, *pairs[0], scale
        else:
            yield (
                module,
                torch.cat([a for a, _ in pairs]),
                _fuse(adapted_keys, [b for _, b in pairs]),
                scale,
            )


def _find_modules_to_save(
    family: Family, config: TransformerConfig, head: Head, save_embeddings: bool
) -> dict[str, str]:
    """Return the parameters that are saved in full next to the adapters.

    The result maps checkpoint names to canonical names (weft's own). It contains a value or score
    head and, if `save_embeddings` is True, the embedding and the output matrix. An embedding that
    is also the output matrix is saved under both names.

    The output matrix is also saved as `lm_head`, because PEFT looks for the name of the module. In
    transformers 5, this name is `lm_head` for every family, even if checkpoints use another name.
    """
    full_names = {} if head == "lm" else {family.score: "score.weight"}
    if not save_embeddings:
        return full_names
    names = family.keymap(config, head).group_by_hf_name()
    for hf, keys in names.items():
        if keys[0].name in EMBEDDINGS:
            full_names[hf] = keys[0].name
    if head == "lm":
        full_names |= dict.fromkeys(
            _find_output_names(config), "embed.weight" if config.tied else "head.weight"
        )
    return full_names


def _find_output_names(config: TransformerConfig) -> tuple[str, str]:
    """Return the names of the output matrix in the family's checkpoints and in transformers 5.

    The names do not depend on whether the matrix is tied to the embedding.
    """
    family: Family = families.get(config.family)
    names = family.keymap(replace(config, tied=False)).group_by_hf_name()
    return next(hf for hf, keys in names.items() if keys[0].name == "head.weight"), OUTPUT


def _fuse(keys: list[Key], parts: list[Tensor]) -> Tensor:
    """Return the B matrix of a fused adapter, combined from those of layers such as q, k and v.

    `parts` are the B matrices of the separate layers, which `keys` describe. Each part is copied to
    the rows that its layer has in the checkpoint's fused weight, and to columns that no other layer
    uses. All other elements are 0.
    """
    first = keys[0].fused
    assert first is not None
    fused = parts[0].new_zeros(
        first.blocks * sum(first.sizes), sum(part.shape[1] for part in parts)
    )
    column = 0
    for key, part in zip(keys, parts, strict=True):
        assert key.fused is not None
        for fused_rows, layer_rows in key.fused.split_runs(slice(0, part.shape[0])):
            fused[fused_rows, column : column + part.shape[1]] = part[layer_rows]
        column += part.shape[1]
    return fused


def _build_rank_settings(ranks: Mapping[str, tuple[int, float]]) -> dict[str, Any]:
    """Return the PEFT settings for the (rank, alpha) of each module in `ranks`.

    `r` and `lora_alpha` are the most common values; `rank_pattern` and `alpha_pattern` list the
    modules with other values.
    """
    most_common = Counter(ranks.values()).most_common(1)[0][0]
    others = {}
    for module, setting in ranks.items():
        if setting != most_common:
            others[module] = setting
    return {
        "r": most_common[0],
        "lora_alpha": most_common[1],
        "rank_pattern": {module: r for module, (r, _) in others.items()},
        "alpha_pattern": {module: alpha for module, (_, alpha) in others.items()},
    }


def _find_target_modules(modules: list[str], keymap: KeyMap) -> list[str]:
    """Return the shortest name suffixes that match all `modules` and no other module.

    `modules` are the names of modules with adapters in the checkpoint.
    """
    others = {
        hf.removesuffix(".weight") for hf in keymap.group_by_hf_name() if hf.endswith(".weight")
    } - set(modules)
    targets = set()
    for module in modules:
        parts = module.split(".")
        endings = (".".join(parts[-n:]) for n in range(1, len(parts) + 1))
        targets.add(
            next(
                ending
                for ending in endings
                if not any(other == ending or other.endswith(f".{ending}") for other in others)
            )
        )
    return sorted(targets)


# -- reading


def read_adapter_config(directory: str | Path) -> dict[str, Any]:
    """Return the settings of the adapter in `directory`.

    Raises `CheckpointError` if there is no adapter, or if weft does not support its kind.
    """
    file = Path(directory) / ADAPTER
    if not file.exists():
        raise CheckpointError(
            f"{directory} has no {ADAPTER}; an adapter directory holds {ADAPTER} and "
            f"{config_file.ADAPTER_WEIGHTS}"
        )
    settings = read_object(file, str(file), CheckpointError)
    if settings.get("peft_type") == config_file.PREFIX_KIND:
        raise CheckpointError(
            f"{file} is a prefix: keys and values, which no weights can take in; name {directory} "
            f"itself as the model"
        )
    if settings.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{file} is of type {settings.get('peft_type')!r}; weft reads LORA adapters"
        )
    for key in (
        "use_dora",
        "use_qalora",
        "lora_bias",
        "target_parameters",
        "layer_replication",
        "alora_invocation_tokens",
    ):
        if settings.get(key):
            raise CheckpointError(
                f"{file} has {key}={settings[key]!r}, which weft does not compute; merge it with "
                f"PEFT"
            )
    if settings.get("bias", "none") != "none":
        raise CheckpointError(
            f"{file} has bias={settings['bias']!r}: trained biases; merge it with PEFT"
        )
    if str(settings.get("task_type")) not in TASKS:
        raise CheckpointError(
            f"{file} is for {settings.get('task_type')!r}; weft reads {' and '.join(TASKS)}"
        )
    _check_numbers(file, settings)
    return settings


def _check_numbers(file: Path, settings: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` if `r`, `lora_alpha`, `alpha_pattern` or `lora_dropout` is invalid.

    `settings` are the values in the adapter's configuration `file`.
    """
    patterns = settings.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise CheckpointError(
            f"{file} has alpha_pattern={patterns!r}: it must be an object of names and numbers"
        )
    for pattern in patterns:
        with explain_read_errors(
            f"{file}: alpha_pattern {pattern!r} is not a pattern of names", CheckpointError
        ):
            re.compile(pattern)
    numbers = {
        "lora_alpha": settings.get("lora_alpha"),
        **{f"alpha_pattern of {pattern}": alpha for pattern, alpha in patterns.items()},
    }
    for name, value in numbers.items():
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise CheckpointError(f"{file} has {name}={value!r}: it must be a finite number")
    rank = settings.get("r")
    if rank is not None and (type(rank) is not int or rank < 1):
        raise CheckpointError(f"{file} has r={rank!r}: it must be a whole number, 1 or more")
    rate = settings.get("lora_dropout")
    if rate is not None and (not isinstance(rate, int | float) or not 0 <= rate < 1):
        raise CheckpointError(
            f"{file} has lora_dropout={rate!r}: it must be from 0 up to, and without, 1"
        )


def load_adapted(
    base: str | Path, adapter: str | Path, head: Head, dtype: torch.dtype, *, exact: bool = False
) -> Transformer:
    """Load `base` with the adapters in the directory `adapter`, as PEFT would.

    The vocabulary is resized to that of the saved embedding. If the base model ties its output
    matrix to the embedding, the two stay tied only if the adapter's files contain neither of them,
    or equal values for both. With `exact`, the adapters keep the dtype of their file; otherwise
    they are converted to `dtype`.
    """
    network = hf_io.load(base, head, dtype=dtype)
    files = weight_files.WeightFiles(Path(adapter), single=config_file.ADAPTER_WEIGHTS)
    config = _adjust_config(files, network.config, head)
    if config != network.config:
        network = _rebuild(network, config)
    load_adapter(adapter, network, exact=exact)
    return network


def _adjust_config(
    files: weight_files.WeightFiles, config: TransformerConfig, head: Head
) -> TransformerConfig:
    """Return the base model's configuration, adjusted to the tensors in an adapter's files.

    `vocab_size` changes if the files contain a resized embedding. `tied` becomes False if they
    contain only one of embedding and output matrix, or different values for the two.
    """
    family: Family = families.get(config.family)
    full_names = _find_modules_to_save(family, replace(config, tied=False), head, True)
    stored = {}
    for hf, name in full_names.items():
        if f"{PREFIX}{hf}" in files.names:
            stored[name] = f"{PREFIX}{hf}"
    embed = stored.get("embed.weight")
    output = stored.get("head.weight")
    if embed and (output or head != "lm") and len(files.get_shape(embed)) == 2:
        config = replace(config, vocab_size=files.get_shape(embed)[0])
    if config.tied and head == "lm" and (embed or output):
        shared = embed and output and torch.equal(files.read(embed), files.read(output))
        config = replace(config, tied=bool(shared))
    return config


def _rebuild(network: Transformer, config: TransformerConfig) -> Transformer:
    """Return a network with the configuration `config` and the parameter values of `network`.

    The two can differ in vocabulary size, and the new output matrix can be untied from the
    embedding. Vocabulary rows that `network` lacks are not initialized, since the adapter's tensors
    replace them.
    """
    values_by_name = find_canonical_values(network)
    embed = values_by_name["embed.weight"]
    values_by_name = {
        "head.weight": embed,
        "head.bias": embed.new_zeros(len(embed)),
        **values_by_name,
    }
    rebuilt = Transformer.build_empty(
        config, network.kind, network.pooling, device="cpu", dtype=embed.dtype
    )
    with torch.no_grad():
        for name, value in find_canonical_values(rebuilt).items():
            rows = min(len(value), len(values_by_name[name]))
            value[:rows].copy_(values_by_name[name][:rows])
    return rebuilt


def find_replaced_parameters(directory: str | Path, network: Transformer) -> dict[str, str]:
    """Return a mapping from tensors in an adapter directory to the parameters that they replace.

    These tensors, for example a score head or an embedding, are saved in full instead of as
    adapters.
    """
    family: Family = families.get(network.config.family)
    names = weight_files.WeightFiles(Path(directory), single=config_file.ADAPTER_WEIGHTS).names
    full_names = _find_modules_to_save(family, network.config, network.kind, True)
    replaced_parameters: dict[str, str] = {}
    for hf, name in full_names.items():
        if f"{PREFIX}{hf}" in names:
            replaced_parameters[f"{PREFIX}{hf}"] = name
    return replaced_parameters


def load_adapter(directory: str | Path, network: Transformer, *, exact: bool = False) -> None:
    """Attach the adapters of a PEFT directory to `network`, and load tensors saved in full.

    With `exact`, the adapters keep the dtype of their file, which is needed for merging. Without
    it, they have the dtype of the weights. Raises `CheckpointError` for tensors that the network
    does not have.
    """
    folder = Path(directory)
    file = folder / config_file.ADAPTER_WEIGHTS
    settings = read_adapter_config(folder)
    files = weight_files.WeightFiles(folder, single=config_file.ADAPTER_WEIGHTS)
    family: Family = families.get(network.config.family)
    keymap = family.keymap(network.config, network.kind)
    # Read A and B of every adapted module, and split the matrices of fused modules by layer.
    parts_by_layer: dict[str, dict[str, tuple[Tensor, Tensor, float]]] = {}
    read_names = set()
    for hf, keys in keymap.group_by_hf_name().items():
        module = hf.removesuffix(".weight")
        names = [f"{PREFIX}{module}.lora_{letter}.weight" for letter in "AB"]
        if names[0] not in files.names:
            continue
        if names[1] not in files.names:
            raise CheckpointError(
                f"{file} holds {names[0]} without its {names[1]}; copy the files again"
            )
        read_names |= set(names)
        a = files.read(names[0])
        b = files.read(names[1])
        scale = _compute_scale(settings, module, a.shape[0])
        for key in keys:
            layer = key.name.removesuffix(".weight")
            parts_by_layer.setdefault(layer, {})[hf] = (*_unfuse(key, a, b), scale)
    # Refuse tensors that no layer uses, before the network is changed.
    replaced = find_replaced_parameters(folder, network)
    unknown = sorted(set(files.names) - read_names - set(replaced))
    if unknown:
        raise CheckpointError(
            f"{file} holds {unknown[0]} and others like it, for which the model has no layer"
        )
    files.check_floats(files.names)
    _check_tied(file, files, network)
    # Attach adapters with the ranks of the file, then copy the values.
    attach_ranks(
        network,
        {layer: _find_rank(layer, parts) for layer, parts in parts_by_layer.items()},
        settings.get("lora_dropout") or 0.0,
    )
    attached = find_adapters(network)
    with torch.no_grad():
        for layer, parts in parts_by_layer.items():
            adapter = attached[layer]
            if exact:
                adapter.to(next(iter(parts.values()))[0].dtype)
            key = keymap.keys[f"{layer}.weight"]
            ordered = [parts[hf] for hf in key.list_hf_names() if hf in parts]
            if key.experts and len(ordered) != key.experts:
                raise CheckpointError(f"{file} has adapters on some experts of {layer} only")
            a_matrices = [part[0] for part in ordered]
            b_matrices = [part[1] for part in ordered]
            with explain_read_errors(
                f"{file}: the adapter of {layer} does not fit the model",
                CheckpointError,
            ):
                adapter.lora_a.copy_(torch.stack(a_matrices) if key.experts else a_matrices[0])
                adapter.lora_b.copy_(torch.stack(b_matrices) if key.experts else b_matrices[0])
        # Load parameters that the file has in full.
        parameters_by_name = find_canonical_parameters(network)
        for hf in sorted(replaced):
            values = files.read(hf)
            stored = parameters_by_name[replaced[hf]]
            if values.shape != stored.data.shape:
                raise CheckpointError(
                    f"{file}: {hf} is {tuple(values.shape)}, the model's "
                    f"{tuple(stored.data.shape)}: its vocabulary is another one; add the same "
                    "tokens first"
                )
            stored.data.copy_(values)


def _check_tied(file: Path, files: weight_files.WeightFiles, network: Transformer) -> None:
    """Raise `CheckpointError` if an adapter's files would untie a tied embedding.

    They would if they contain only the embedding, only the output matrix, or different values for
    the two. `file` is the path of the adapter's weights.
    """
    if not network.config.tied or network.kind != "lm":
        return
    replaced = find_replaced_parameters(file.parent, network)
    names = sorted(hf for hf, name in replaced.items() if name == "embed.weight")
    if not names:
        return
    embedding = []
    for name in names:
        if not name.endswith(_find_output_names(network.config)):
            embedding.append(name)
    first_values = files.read(names[0])
    if (
        len(embedding) == 1
        and len(names) > 1
        and all(torch.equal(files.read(name), first_values) for name in names[1:])
    ):
        return
    raise CheckpointError(
        f"{file}: the embedding and the output matrix differ, and the model ties them "
        f"({', '.join(names)}); merge the adapter into its base, which unties them: weft convert "
        "merge"
    )


def _compute_scale(settings: Mapping[str, Any], module: str, rank: int) -> float:
    """Return alpha / r, or alpha / sqrt(r) for rsLoRA (Kalajdzievski 2023).

    Alpha is the setting `lora_alpha`, unless an entry of `alpha_pattern` matches the name of the
    module. `rank` is r.
    """
    alpha = settings["lora_alpha"]
    for pattern, value in (settings.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = value
    return alpha / (rank**0.5 if settings.get("use_rslora") else rank)


def _find_rank(layer: str, parts: Mapping[str, tuple[Tensor, Tensor, float]]) -> tuple[int, float]:
    """Return (rank, scale) of the adapter of a layer.

    `parts` maps the names of the layer's tensors, several for experts, to (A, B, scale). Raises
    `CheckpointError` if they differ in rank or scale.
    """
    pairs = {(a.shape[0], scale) for a, _, scale in parts.values()}
    if len(pairs) > 1:
        raise CheckpointError(
            f"the experts of {layer} have adapters of several ranks; weft keeps one rank a layer"
        )
    return pairs.pop()


def _unfuse(key: Key, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the matrices (A, B) of one layer, extracted from those of a fused adapter.

    `a` [rank, in] and `b` [out, rank] are the matrices of the fused adapter. Only the layer's rows
    of B are kept. A column of B that is zero in all of these rows is dropped together with the
    corresponding row of A, unless all columns are zero. If the layer is not fused, `a` and `b` are
    returned unchanged.
    """
    if key.fused is None:
        return a, b
    size = key.fused.blocks * key.fused.sizes[key.fused.index]
    rows = torch.cat([b[fused_rows] for fused_rows, _ in key.fused.split_runs(slice(0, size))])
    is_used = rows.abs().sum(0) > 0
    return (a[is_used], rows[:, is_used]) if bool(is_used.any()) else (a, rows)
