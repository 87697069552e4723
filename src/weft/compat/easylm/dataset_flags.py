"""Translation of `train_dataset.*` and `eval_dataset.*` to weft's dataset options."""

from __future__ import annotations

from typing import Any

from weft.compat.easylm import flags as tables
from weft.compat.easylm.arguments import ParsedFlags, TranslatedCommand
from weft.errors import ConfigError, find_nearest

READERS = "weft.compat.easylm.data"  # registers EasyLM's dataset types
ESCAPES = {r"\n": "\n", r"\t": "\t"}


def translate_dataset(parsed: ParsedFlags, translated: TranslatedCommand) -> None:
    """Set the options of the data: sources, dataset type, lengths, batch size and validation."""
    kind = parsed.get("train_dataset.type")
    types = parsed.command.types
    if kind not in types:
        near = find_nearest(kind, types)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"--train_dataset.type={kind}: {hint}{parsed.name} reads {', '.join(types)}"
        )
    group, dataset_type = tables.DATASET_TYPES[kind]
    prefix = f"train_dataset.{group}."
    if kind == "tulu_prompt" and not any(flag.startswith(prefix) for flag in parsed.values):
        # EasyLM read the flags of json_torch_dataset here before it had tulu_prompt_dataset.
        prefix = "train_dataset.json_torch_dataset."
    _check_groups(parsed, kind, prefix)
    translated.options["dataset.type"] = dataset_type
    if dataset_type not in ("chat", "prompt_answer"):
        translated.options["imports"] = [READERS]
    _translate_source(parsed, translated, prefix)
    # Lengths and batches.
    prompts = parsed.command.samples
    limit = "dataset.max_prompt_len" if prompts else "dataset.max_seqlen"
    translated.options[limit] = parsed.get(f"{prefix}seq_length")
    if prompts:
        translated.options["dataset.overlong"] = "truncate"
    size = parsed.get(f"{prefix}batch_size")
    steps = 1 if prompts else parsed.accumulation
    translated.options["dataset.train_bs_n_seqs"] = size * steps
    for name in ("num_workers", "tokenizer_processes"):
        if parsed.has(f"{prefix}{name}"):
            translated.options["dataset.num_workers"] = parsed.get(f"{prefix}{name}")
    if f"{prefix}remove_truncated_samples" in parsed.command.flags and parsed.get(
        f"{prefix}remove_truncated_samples"
    ):
        translated.options["dataset.remove_truncated_samples"] = True
        translated.options.pop("dataset.overlong", None)
    # Arguments of the dataset type.
    arguments: dict[str, Any] = {}
    if dataset_type == "text_fields":
        processor = "train_dataset.text_processor."
        for name in tables.TEXT_FIELDS:
            if parsed.has(f"{processor}{name}"):
                arguments[name] = _read_text(parsed, f"{processor}{name}")
        if not arguments.get("fields") and not arguments.get("fields_from_example"):
            arguments.pop("fields", None)  # empty: not set, unless a column names them
    elif kind == "hf_prompt":
        arguments["prefix"] = _read_text(parsed, f"{prefix}policy_prefix_tokens")
        arguments["suffix"] = _read_text(parsed, f"{prefix}policy_suffix_tokens")
        reward_prefix = _read_text(parsed, f"{prefix}reward_prefix_tokens")
        reward_suffix = _read_text(parsed, f"{prefix}reward_suffix_tokens")
        if (reward_prefix, reward_suffix) != (arguments["prefix"], arguments["suffix"]):
            translated.options["rew.prompt_prefix"] = reward_prefix
            translated.options["rew.prompt_suffix"] = reward_suffix
    elif parsed.command.quickstart == "rw" and parsed.get("use_margin"):
        arguments["use_margin"] = True
    for name, value in arguments.items():
        translated.options[f"dataset.args.{name}"] = value
    _translate_evaluation(parsed, translated, kind)


def _check_groups(parsed: ParsedFlags, kind: str, prefix: str) -> None:
    """Raise `ConfigError` if flags of another dataset type are set, which EasyLM would ignore."""
    read = [prefix, "train_dataset.type"]
    if tables.DATASET_TYPES[kind][1] == "text_fields":
        read.append("train_dataset.text_processor.")
    for flag in parsed.values:
        if flag.startswith("train_dataset.") and not flag.startswith(tuple(read)):
            raise ConfigError(
                f"--{flag}: train_dataset.type={kind} reads --{prefix}* only; set "
                f"--train_dataset.type, or leave the flag out"
            )


def _read_text(parsed: ParsedFlags, flag: str) -> Any:
    r"""Return the value of a flag, with `\n` and `\t` in texts replaced by line break and tab."""
    value = parsed.get(flag)
    if isinstance(value, str):
        for escape, character in ESCAPES.items():
            value = value.replace(escape, character)
    return value


def _translate_source(parsed: ParsedFlags, translated: TranslatedCommand, prefix: str) -> None:
    """Set the option that names the training rows, `dataset.train_path` or `dataset.sources`."""
    path = parsed.get(f"{prefix}path")
    split = None
    if f"{prefix}hf_name" in parsed.command.flags and path:
        for name in ("hf_name", "hf_split"):
            if parsed.has(f"{prefix}{name}"):
                translated.notes.append(
                    f"--{prefix}{name} is left out: --{prefix}path names the rows"
                )
    elif f"{prefix}hf_name" in parsed.command.flags:
        path = parsed.get(f"{prefix}hf_name")
        split = parsed.get(f"{prefix}hf_split") or None
    elif f"{prefix}split" in parsed.command.flags:
        split = parsed.get(f"{prefix}split") or None
        folder = parsed.get(f"{prefix}name")
        path = {"c4": "allenai/c4"}.get(path, path) + (f":{folder}" if folder else "")
    if not path:
        raise ConfigError(
            f"--{prefix}path is missing: name the training rows, a file or a dataset of the hub"
        )
    max_batches = parsed.get("max_steps_per_epoch") if parsed.command.samples else 0
    if split is None and not max_batches:
        translated.options["dataset.train_path"] = path
        return
    source: dict[str, Any] = {"path": path}
    if split is not None:
        source["split"] = split
    if max_batches:
        source["size"] = max_batches * parsed.get(f"{prefix}batch_size")
    translated.options["dataset.sources"] = [source]


def _translate_evaluation(parsed: ParsedFlags, translated: TranslatedCommand, kind: str) -> None:
    """Set the options of the validation rows. EasyLM reads them if `eval_steps` is above 0."""
    steps = 0 if parsed.command.samples else parsed.get("eval_steps")
    set_flags = [flag for flag in parsed.values if flag.startswith("eval_dataset.")]
    if not steps:
        if set_flags:
            translated.notes.append(f"--{set_flags[0]} is left out: eval_steps is 0")
        return
    group = "json_dataset" if kind in ("json", "huggingface") else "json_torch_dataset"
    if parsed.get("eval_dataset.type") not in ("", kind):
        raise ConfigError(
            f"--eval_dataset.type={parsed.get('eval_dataset.type')}: must be the type of "
            f"train_dataset, {kind}"
        )
    path = parsed.get(f"eval_dataset.{group}.path")
    if not path:
        raise ConfigError(f"--eval_steps={steps}: --eval_dataset.{group}.path is missing")
    translated.options["dataset.valid_path"] = path
    translated.options["eval_freq_steps"] = parsed.count_updates(parsed.get("log_freq"))
    for name, option in (("seq_length", "valid_max_seqlen"), ("batch_size", "valid_bs_n_seqs")):
        if parsed.has(f"eval_dataset.{group}.{name}"):
            translated.options[f"dataset.{option}"] = parsed.get(f"eval_dataset.{group}.{name}")
