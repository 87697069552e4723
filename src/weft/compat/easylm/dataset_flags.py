"""Translation of `train_dataset.*` and `eval_dataset.*` to weft's options of data."""

from __future__ import annotations

from typing import Any

from weft.compat.easylm import flags as tables
from weft.compat.easylm.arguments import GivenFlags, TranslatedCommand
from weft.errors import ConfigError, find_nearest

READERS = "weft.compat.easylm.data"  # registers EasyLM's dataset types
BLANKS = {r"\n": "\n", r"\t": "\t"}


def translate_dataset(given: GivenFlags, done: TranslatedCommand) -> None:
    """Set the options of the training rows: where they are, their form, and their lengths."""
    kind = given.get("train_dataset.type")
    types = given.command.types
    if kind not in types:
        near = find_nearest(kind, types)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"--train_dataset.type={kind}: {hint}{given.name} reads {', '.join(types)}"
        )
    group, dataset_type = tables.DATASET_TYPES[kind]
    prefix = f"train_dataset.{group}."
    if kind == "tulu_prompt" and not any(flag.startswith(prefix) for flag in given.values):
        # EasyLM read the flags of json_torch_dataset here before it had tulu_prompt_dataset.
        prefix = "train_dataset.json_torch_dataset."
    _check_groups(given, kind, prefix)
    done.options["dataset.type"] = dataset_type
    if dataset_type not in ("chat", "prompt_answer"):
        done.options["imports"] = [READERS]
    _translate_source(given, done, prefix)
    # Lengths and batches.
    prompts = given.command.samples
    limit = "dataset.max_prompt_len" if prompts else "dataset.max_seqlen"
    done.options[limit] = given.get(f"{prefix}seq_length")
    if prompts:
        done.options["dataset.overlong"] = "truncate"
    size = given.get(f"{prefix}batch_size")
    steps = 1 if prompts else given.accumulation
    done.options["dataset.train_bs_n_seqs"] = size * steps
    for name in ("num_workers", "tokenizer_processes"):
        if given.has(f"{prefix}{name}"):
            done.options["dataset.num_workers"] = given.get(f"{prefix}{name}")
    if f"{prefix}remove_truncated_samples" in given.command.flags and given.get(
        f"{prefix}remove_truncated_samples"
    ):
        done.options["dataset.remove_truncated_samples"] = True
        done.options.pop("dataset.overlong", None)
    # Arguments of the form.
    arguments: dict[str, Any] = {}
    if dataset_type == "text_fields":
        processor = "train_dataset.text_processor."
        for name in tables.TEXT_FIELDS:
            if given.has(f"{processor}{name}"):
                arguments[name] = _read_text(given, f"{processor}{name}")
        if not arguments.get("fields") and not arguments.get("fields_from_example"):
            arguments.pop("fields", None)  # empty: not set, unless a column names them
    elif kind == "hf_prompt":
        arguments["prefix"] = _read_text(given, f"{prefix}policy_prefix_tokens")
        arguments["suffix"] = _read_text(given, f"{prefix}policy_suffix_tokens")
        own = [_read_text(given, f"{prefix}reward_{part}_tokens") for part in ("prefix", "suffix")]
        if own != list(arguments.values()):
            done.options["rew.prompt_prefix"], done.options["rew.prompt_suffix"] = own
    elif given.command.quickstart == "rw" and given.get("use_margin"):
        arguments["use_margin"] = True
    for name, value in arguments.items():
        done.options[f"dataset.args.{name}"] = value
    _translate_evaluation(given, done, kind)


def _check_groups(given: GivenFlags, kind: str, prefix: str) -> None:
    """Raise `ConfigError` if flags of another dataset type are set, which EasyLM would ignore."""
    read = [prefix, "train_dataset.type"]
    if tables.DATASET_TYPES[kind][1] == "text_fields":
        read.append("train_dataset.text_processor.")
    for flag in given.values:
        if flag.startswith("train_dataset.") and not flag.startswith(tuple(read)):
            raise ConfigError(
                f"--{flag}: train_dataset.type={kind} reads --{prefix}* only; set "
                f"--train_dataset.type, or leave the flag out"
            )


def _read_text(given: GivenFlags, flag: str) -> Any:
    r"""Return the value of a flag; in a text, `\n` and `\t` are line break and tab."""
    value = given.get(flag)
    if isinstance(value, str):
        for written, blank in BLANKS.items():
            value = value.replace(written, blank)
    return value


def _translate_source(given: GivenFlags, done: TranslatedCommand, prefix: str) -> None:
    """Set the option that names the training rows."""
    path = given.get(f"{prefix}path")
    split = None
    if f"{prefix}hf_name" in given.command.flags and path:
        for name in ("hf_name", "hf_split"):
            if given.has(f"{prefix}{name}"):
                done.notes.append(f"--{prefix}{name} is left out: --{prefix}path names the rows")
    elif f"{prefix}hf_name" in given.command.flags:
        path = given.get(f"{prefix}hf_name")
        split = given.get(f"{prefix}hf_split") or None
    elif f"{prefix}split" in given.command.flags:
        split = given.get(f"{prefix}split") or None
        folder = given.get(f"{prefix}name")
        path = {"c4": "allenai/c4"}.get(path, path) + (f":{folder}" if folder else "")
    if not path:
        raise ConfigError(
            f"--{prefix}path is missing: name the training rows, a file or a dataset of the hub"
        )
    most = given.get("max_steps_per_epoch") if given.command.samples else 0
    if split is None and not most:
        done.options["dataset.train_path"] = path
        return
    source: dict[str, Any] = {"path": path}
    if split is not None:
        source["split"] = split
    if most:
        source["size"] = most * given.get(f"{prefix}batch_size")
    done.options["dataset.sources"] = [source]


def _translate_evaluation(given: GivenFlags, done: TranslatedCommand, kind: str) -> None:
    """Set the options of the validation rows, which EasyLM reads if `eval_steps` is above 0."""
    steps = 0 if given.command.samples else given.get("eval_steps")
    set_flags = [flag for flag in given.values if flag.startswith("eval_dataset.")]
    if not steps:
        if set_flags:
            done.notes.append(f"--{set_flags[0]} is left out: eval_steps is 0")
        return
    group = "json_dataset" if kind in ("json", "huggingface") else "json_torch_dataset"
    if given.get("eval_dataset.type") not in ("", kind):
        raise ConfigError(
            f"--eval_dataset.type={given.get('eval_dataset.type')}: must be the type of "
            f"train_dataset, {kind}"
        )
    path = given.get(f"eval_dataset.{group}.path")
    if not path:
        raise ConfigError(f"--eval_steps={steps}: --eval_dataset.{group}.path is missing")
    done.options["dataset.valid_path"] = path
    done.options["eval_freq_steps"] = given.count_updates(given.get("log_freq"))
    for name, option in (("seq_length", "valid_max_seqlen"), ("batch_size", "valid_bs_n_seqs")):
        if given.has(f"eval_dataset.{group}.{name}"):
            done.options[f"dataset.{option}"] = given.get(f"eval_dataset.{group}.{name}")
