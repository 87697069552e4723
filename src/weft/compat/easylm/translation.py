"""Translation of EasyLM's flags to the options of `weft quickstart`.

    parsed = parse_flags("llama_train_ppo", ["--kl_coef=0.05", ...])
    translate(parsed, backend="jax").format_words()  # ["quickstart", "ppo", "ppo.kl_ctl=0.05", ...]

Flags that the user does not set have EasyLM's defaults. This module imports neither torch nor jax.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from weft.compat.easylm import flags as tables
from weft.compat.easylm.arguments import ModelConversion, ParsedFlags, TranslatedCommand
from weft.compat.easylm.configs import EasyLMConfig, load_llama_config, parse_dictionary
from weft.compat.easylm.dataset_flags import translate_dataset
from weft.compat.easylm.meshes import (
    COORDINATOR,
    check_minibatch,
    check_product,
    format_layout,
)
from weft.errors import ConfigError

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# policies by the amount that they recompute, smallest first
REMAT = ("checkpoint_dots", "checkpoint_dots_with_no_batch_dims", "nothing_saveable")
MISSING_EOS_REWARD = -10.0  # EasyLM's score of a completion without end token
HIDDEN_TOP_K = 50  # default of Hugging Face's sampler, which EasyLM uses and does not document
# flag of `jax_distributed` -> environment variable of weft.engine.jax.hosts
HOST_VARIABLES = {
    "coordinator_address": COORDINATOR,
    "num_processes": "WEFT_JAX_PROCESSES",
    "process_id": "WEFT_JAX_PROCESS",
}
NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9.-]+")


def translate(
    parsed: ParsedFlags, *, backend: str, num_devices: int | None = None
) -> TranslatedCommand:
    """Translate flags to options of `weft quickstart`.

    `backend` is the backend of all roles, and `num_devices` the number of its devices, or None if
    it is not known. Raises `ConfigError` for flags that weft refuses, and for settings that break a
    rule of EasyLM's guide.
    """
    translated = TranslatedCommand(parsed.command.quickstart, passed=parsed.passed)
    _check_refused(parsed, translated)
    if parsed.get("easylm_compat"):
        _check_compatible(parsed)
    _translate_copies(parsed, translated)
    translate_dataset(parsed, translated)
    _translate_names(parsed, translated)
    _translate_optimizer(parsed, translated)
    _translate_models(parsed, translated)
    if parsed.command.samples:
        _translate_sampling(parsed, translated)
    else:
        _translate_steps(parsed, translated)
    _translate_saving(parsed, translated)
    _translate_mesh(parsed, translated, backend, num_devices)
    for role in parsed.command.roles if backend == "torch" else ():
        if translated.options.pop(f"{role}.recompute_policy", None) is not None:
            translated.options[f"{role}.gradient_checkpointing"] = True
    translated.environment = list_host_variables(parsed)
    if translated.environment and backend == "torch":
        flag = "jax_distributed.initialize_jax_distributed"
        flag = flag if parsed.get(flag) else "initialize_jax_distributed"
        raise ConfigError(
            f"--{flag}=True: connects processes of JAX, and the backend is torch; leave the flag "
            f"out, or write --backend=jax"
        )
    return translated


def _check_refused(parsed: ParsedFlags, translated: TranslatedCommand) -> None:
    """Raise `ConfigError` for values that weft refuses, and note flags without effect."""
    for flag, value in parsed.values.items():
        rule = parsed.command.flags[flag]
        if rule.treatment == "refuse" and value != rule.default:
            raise ConfigError(f"--{flag}={value}: {rule.note}")
        if rule.treatment == "ignore" and value != rule.default:
            translated.notes.append(f"--{flag} is left out: {rule.note}")


def list_host_variables(parsed: ParsedFlags) -> dict[str, str]:
    """Return the environment variables that JAX needs on several hosts; none for a single host.

    Raises `ConfigError` if only some of the flags `jax_distributed.*` are set.
    """
    flags = {name: f"jax_distributed.{name}" for name in HOST_VARIABLES}
    values = {name: parsed.get(flag) for name, flag in flags.items() if parsed.has(flag)}
    starts = "initialize_jax_distributed"
    has_several = parsed.get(f"jax_distributed.{starts}") or (
        starts in parsed.command.flags and parsed.get(starts)
    )
    if not has_several and values:
        raise ConfigError(
            f"--{flags[next(iter(values))]}: has no effect without --jax_distributed.{starts}=True"
        )
    if values and len(values) < len(flags):
        missing = next(flag for name, flag in flags.items() if name not in values)
        raise ConfigError(
            f"--{missing} is missing: set all of {', '.join(flags.values())}, or none"
        )
    if not has_several:
        return {}
    values = values or {"coordinator_address": "auto"}
    return {HOST_VARIABLES[name]: str(value) for name, value in values.items()}


def _check_compatible(parsed: ParsedFlags) -> None:
    """Raise `ConfigError` if weft cannot reproduce EasyLM's results with these flags."""
    samples = parsed.command.samples
    passes = parsed.get("ppo_epochs") if samples else 1
    decay = parsed.get("optimizer.adamw_optimizer.weight_decay")
    if passes > 1:
        raise ConfigError(
            f"--easylm_compat=true: with ppo_epochs={passes} EasyLM repeats an update without "
            f"clipping, which weft does not reproduce; write --ppo_epochs=1"
        )
    if samples and decay:
        raise ConfigError(
            f"--easylm_compat=true: with optimizer.adamw_optimizer.weight_decay={decay} EasyLM "
            f"decays embeddings and norms here, and weft does not; write 0.0, as the guide does"
        )
    steps = parsed.get("optimizer.accumulate_gradient_steps")
    if steps > 1 and parsed.command.quickstart in ("sft", "ppo"):
        raise ConfigError(
            f"--easylm_compat=true: with optimizer.accumulate_gradient_steps={steps} EasyLM "
            f"averages means of batches, and in weft every token weighs the same; write 1"
        )


def _check_whitening(parsed: ParsedFlags, size: int, completions: int) -> None:
    """Raise `ConfigError` if EasyLM whitens over parts of a step, and weft over the whole step."""
    if not parsed.get("easylm_compat") or parsed.command.quickstart != "ppo" or size == completions:
        return
    flag = "mini_batch_size"
    if parsed.get("backward_mini_batch_size") != "":
        flag = "backward_mini_batch_size"
    whitened = "advantages and rewards" if parsed.get("whiten_rewards") else "advantages"
    raise ConfigError(
        f"--easylm_compat=true: with {flag}={size} EasyLM whitens {whitened} over each minibatch, "
        f"and weft over the {completions} completions of a step; write --{flag}={completions}, or "
        f"a batch_size of the dataset whose completions are one minibatch"
    )


def _translate_copies(parsed: ParsedFlags, translated: TranslatedCommand) -> None:
    """Set the options that have the value of a flag or, if it is not set, EasyLM's default."""
    for flag, rule in parsed.command.flags.items():
        own_dataset = flag.startswith(("train_dataset.", "eval_dataset."))
        if rule.treatment == "copy" and not own_dataset:
            for option in rule.options:
                for name in parsed.command.expand(option):
                    translated.options[name] = parsed.get(flag)


def _translate_names(parsed: ParsedFlags, translated: TranslatedCommand) -> None:
    """Set the folder and the name of the run, and the options of Weights & Biases."""
    logger = {flag.removeprefix("logger."): parsed.get(flag) for flag in tables.LOGGER}
    if logger["output_dir"]:
        translated.options["fileroot"] = logger["output_dir"]
    parts = [logger["prefix"] if logger["prefix_to_id"] else "", logger["experiment_id"]]
    name = NOT_IN_NAMES.sub("-", "--".join(filter(None, parts))).strip("-.")
    if name:
        translated.options["trial_name"] = name
    project = logger["project"]
    if logger["prefix"] and not logger["prefix_to_id"]:
        project = "--".join(filter(None, (logger["prefix"], project)))
    wandb = {"entity": logger["entity"], "project": project, "dir": logger["wandb_dir"]}
    if logger["online"]:
        translated.options["logger.wandb.mode"] = "online"
    elif any(wandb.values()) and find_spec("wandb") is None:
        translated.notes.append(
            "--logger.* of W&B are left out: logger.online is false and it is not installed"
        )
        return
    elif any(wandb.values()):
        translated.options["logger.wandb.mode"] = "offline"
    for key, value in wandb.items():
        if value:
            translated.options[f"logger.wandb.{key}"] = value


def _translate_optimizer(parsed: ParsedFlags, translated: TranslatedCommand) -> None:
    kind = parsed.get("optimizer.type")
    if kind not in ("adamw", "lion", "palm"):
        raise ConfigError(f"--optimizer.type={kind}: must be adamw, palm or lion")
    palm, adamw = "optimizer.palm_optimizer.", "optimizer.adamw_optimizer."
    if kind == "palm" and parsed.command.samples:
        raise ConfigError(
            "--optimizer.type=palm: the rate of this command, --lr, is that of adamw; write adamw"
        )
    other = adamw if kind == "palm" else palm
    for flag in parsed.values:
        if flag.startswith(other):
            translated.notes.append(f"--{flag} has no effect with --optimizer.type={kind}")
    for role in parsed.command.trained:
        group = f"{role}.optimizer"
        translated.options[f"{group}.type"] = kind
        if kind == "palm":
            warmup = max(1, parsed.get(f"{palm}lr_warmup_steps"))
            translated.options |= {
                f"{group}.lr": 100 * parsed.get(f"{palm}lr") / math.sqrt(warmup),
                f"{group}.end_lr": 0.0,
                f"{group}.lr_scheduler_type": "rsqrt",
                f"{group}.warmup_steps": warmup,
                f"{group}.beta1": parsed.get(f"{palm}b1"),
                f"{group}.beta2": parsed.get(f"{palm}b2"),
                f"{group}.max_grad_norm": parsed.get(f"{palm}clip_gradient"),
                f"{group}.weight_decay": 10_000 * parsed.get(f"{palm}weight_decay"),
            }
            continue
        if parsed.get(f"{adamw}bf16_momentum"):
            translated.options[f"{group}.state_dtype"] = "bfloat16"
        if parsed.command.samples:
            translated.options[f"{group}.lr_scheduler_type"] = "constant"
            continue
        translated.options[f"{group}.lr_scheduler_type"] = "linear"
        _translate_warmup(parsed, translated, group)
    if parsed.command.samples and parsed.get("warmup_epochs") > 0:
        _note_rounding(parsed, translated, "warmup_epochs")
    if parsed.command.quickstart == "ppo" and parsed.get("policy_freeze_epochs") > 0:
        _note_rounding(parsed, translated, "policy_freeze_epochs")


def _translate_warmup(parsed: ParsedFlags, translated: TranslatedCommand, group: str) -> None:
    """Set the warm-up in the group of optimizer options `group`, such as `actor.optimizer`.

    If the length of the run is known, the warm-up has as many updates as in EasyLM. EasyLM's
    warm-up may be longer than the run. In weft, it then has the length of the run, and a lower
    `lr`, so that the run ends at the same learning rate. If the length is not known, notes describe
    the differences.
    """
    flag = "optimizer.adamw_optimizer."
    ratio, warmup = parsed.get(f"{flag}warmup_ratio"), parsed.get(f"{flag}lr_warmup_steps")
    updates = _count_updates(parsed)
    if updates is None and ratio > 0:
        translated.options[f"{group}.warmup_steps_proportion"] = ratio
        _note_rounding(parsed, translated, f"{flag}warmup_ratio")
        return
    if ratio > 0:
        warmup = math.ceil(ratio * updates)
    elif updates is None and warmup > 0:
        translated.notes.append(
            f"--{flag}lr_warmup_steps={warmup}: if the run has fewer updates, warm-up ends with it "
            f"at lr; in EasyLM the rate is lower then"
        )
    elif updates is not None and warmup > updates:
        translated.options[f"{group}.lr"] = parsed.get(f"{flag}lr") * updates / warmup
        translated.notes.append(
            f"--{flag}lr_warmup_steps={warmup}: the run ends during warm-up, after {updates} "
            f"updates; its last rate is lr x {updates} / {warmup}, as in EasyLM"
        )
        warmup = updates
    translated.options[f"{group}.warmup_steps"] = warmup


def _note_rounding(parsed: ParsedFlags, translated: TranslatedCommand, flag: str) -> None:
    translated.notes.append(
        f"--{flag}={parsed.get(flag)}: rounded to the nearest whole update (EasyLM rounds up)"
    )


def _count_updates(parsed: ParsedFlags) -> int | None:
    """Return the number of updates of a run, or None if it is not known.

    It is known only if the length of the run is set in steps, and if no option of weft on the
    command line sets another length.
    """
    names = {word.lstrip("+").partition("=")[0] for word in parsed.passed}
    if parsed.get("num_epochs") > 0 or names & {"max_steps", "total_train_epochs"}:
        return None
    return parsed.count_updates(parsed.get("total_steps"))


def _translate_models(parsed: ParsedFlags, translated: TranslatedCommand) -> None:
    """Set the options of checkpoints, tokenizers and dtypes of all roles."""
    command = parsed.command
    if command.samples:
        sources = {"actor": "_policy", "rew": "_reward"}
    else:
        sources = {command.model: ""}
    tokenizer = _choose_tokenizer(parsed)
    is_reward_model = command.quickstart == "rw" and not parsed.get("load_from_causal_lm")
    for role, suffix in sources.items():
        scored = is_reward_model or suffix == "_reward"
        _translate_checkpoint(parsed, translated, (role, suffix), tokenizer, is_reward_model=scored)
    if command.quickstart == "dpo" and parsed.has("load_reference_checkpoint"):
        reference = parsed.get("load_reference_checkpoint")
        _set_source(parsed, translated, ("ref", ""), reference, tokenizer)
    # Options of all roles.
    dtype = parsed.get("dtype")
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype={dtype}: must be one of {', '.join(DTYPES)}")
    chat = translated.options["dataset.type"] in ("chat", "preference_json_torch", "tulu_prompt")
    bos = parsed.get("tokenizer.add_bos_token")
    if bos == "":
        # The last version of EasyLM begins every sequence with BOS, except prompts of PPO.
        bos = not (command.samples and parsed.get("easylm_compat"))
    for role in command.roles:
        translated.options[f"{role}.dtype"] = DTYPES[dtype]
        if tokenizer:
            translated.options[f"{role}.tokenizer.path"] = tokenizer
        if chat:
            translated.options[f"{role}.tokenizer.chat_template"] = "tulu"
        translated.options[f"{role}.tokenizer.add_bos_token"] = bos


def _choose_tokenizer(parsed: ParsedFlags) -> str | None:
    named, file = parsed.get("tokenizer"), parsed.get("tokenizer.vocab_file")
    if named and file and named != file:
        raise ConfigError(
            f"--tokenizer={named} and --tokenizer.vocab_file={file} both name the tokenizer; set "
            f"one"
        )
    return named or file or None


def _translate_checkpoint(
    parsed: ParsedFlags,
    translated: TranslatedCommand,
    source: tuple[str, str],
    tokenizer: str | None,
    *,
    is_reward_model: bool,
) -> None:
    """Set the path of a role; `source` is (role, suffix of the flags that describe its model)."""
    flag = f"load_checkpoint{source[1]}"
    checkpoint = parsed.get(flag)
    if not checkpoint and not tokenizer:
        raise ConfigError(
            f"--{flag} is missing: name a stream such as params::FILE, or a Hugging Face "
            f"directory; for random weights, name a --tokenizer"
        )
    if not checkpoint:
        translated.notes.append(f"--{flag} is not set: the weights begin at random")
        translated.options[f"{source[0]}.init_from_scratch"] = True
    _set_source(parsed, translated, source, checkpoint, tokenizer, is_reward_model=is_reward_model)


def _set_source(
    parsed: ParsedFlags,
    translated: TranslatedCommand,
    source: tuple[str, str],
    checkpoint: str,
    tokenizer: str | None,
    *,
    is_reward_model: bool = False,
) -> None:
    """Set the path of a role to a Hugging Face directory, or store the stream to convert."""
    role, suffix = source
    config, changes, training = _read_llama_config(parsed, suffix)
    _translate_training(parsed, translated, role, training)
    network = {key: value for key, value in changes.items() if not _is_for_training(key)}
    if "::" in checkpoint or not checkpoint:
        for key in _list_training_values(load_llama_config(config)) if config else ():
            rule = tables.LLAMA[f"llama.{key}"]
            if rule.treatment != "ignore":  # the value is set as an option of the role instead
                network[key] = rule.default
        update = repr(network) if network else ""
        stream = ModelConversion(checkpoint, config, update, tokenizer, is_reward_model)
        translated.streams[role] = stream
        return
    if network:
        raise ConfigError(
            f"--update_llama_config{suffix}, --llama.{next(iter(network))}: {checkpoint} is a "
            f"Hugging Face model, whose config.json says what it is; leave the flag out"
        )
    if config:
        translated.notes.append(
            f"--load_llama_config{suffix}={config} is left out: config.json of {checkpoint} says "
            f"what the model is"
        )
    translated.options[f"{role}.path"] = checkpoint


def _read_llama_config(
    parsed: ParsedFlags, suffix: str
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the name of a model configuration, the changes to it, and its training values.

    As in EasyLM, the flags `llama.*` describe a model if `load_llama_config` is not set. Raises
    `ConfigError` if both are set, and for values that weft does not support.
    """
    name = parsed.get(f"load_llama_config{suffix}")
    own = {
        flag.removeprefix("llama."): parsed.get(flag) for flag in tables.LLAMA if parsed.has(flag)
    }
    own.pop("use_cache", None)
    if name and own:
        key = next(iter(own))
        raise ConfigError(
            f"--llama.{key}: has no effect in EasyLM with --load_llama_config{suffix}={name}; "
            f'write --update_llama_config{suffix}="dict({key}={own[key]!r})"'
        )
    flag = f"update_llama_config{suffix}"
    text = parsed.get(flag)
    changes = {**own, **(parse_dictionary(text, f"--{flag}={text}") if text else {})}
    update = repr(changes) if changes else ""
    config = load_llama_config(name, update, f"load_llama_config{suffix}")
    training = _list_training_values(config)
    for key, value in training.items():
        rule = tables.LLAMA[f"llama.{key}"]
        origin = f"--{flag}" if key in changes else f"--load_llama_config{suffix}={name}"
        if rule.treatment == "refuse":
            raise ConfigError(f"{origin}: {key}={value}: {rule.note}")
        if rule.limits is not None and value not in rule.limits:
            raise ConfigError(f"{origin}: {key}={value}: must be {rule.limits}")
    return name, changes, training


def _is_for_training(key: str) -> bool:
    rule = tables.LLAMA.get(f"llama.{key}")
    return rule is not None and key not in tables.ARCHITECTURE and key != "attn_pdrop"


def _list_training_values(config: EasyLMConfig) -> dict[str, Any]:
    """Return the training values of a configuration that differ from EasyLM's defaults."""
    return {
        key: value
        for key, value in vars(config).items()
        if _is_for_training(key) and value != tables.LLAMA[f"llama.{key}"].default
    }


def _translate_training(
    parsed: ParsedFlags, translated: TranslatedCommand, role: str, training: Mapping[str, Any]
) -> None:
    """Set dropout and recomputation of trained roles from training values of a configuration."""
    roles = [role] if role in parsed.command.trained else []
    if role == "rew" and "critic" in parsed.command.trained:
        roles = ["critic"]  # the critic begins with the weights of the reward model
    for key, value in training.items():
        rule = tables.LLAMA[f"llama.{key}"]
        if rule.treatment == "ignore":
            note = f"{key} is left out: {rule.note}"
            if not parsed.has(f"llama.{key}") and note not in translated.notes:
                translated.notes.append(note)
            continue
        for each in roles:
            if key == "resid_pdrop":
                translated.options[f"{each}.residual_dropout"] = value
            elif value in REMAT:
                policies = [value, translated.options.get(f"{each}.recompute_policy", REMAT[0])]
                translated.options[f"{each}.recompute_policy"] = max(policies, key=REMAT.index)


# -- steps, minibatches, devices


def _translate_steps(parsed: ParsedFlags, translated: TranslatedCommand) -> None:
    """Set the length of the run, the logging interval and the loss of DPO."""
    epochs = parsed.get("num_epochs")
    if epochs > 0:
        translated.options["total_train_epochs"] = epochs
    elif parsed.get("total_steps") < 1:
        raise ConfigError("--total_steps=0: must be at least 1, unless --num_epochs is above 0")
    else:
        translated.options["max_steps"] = parsed.count_updates(parsed.get("total_steps"))
    translated.options["log_freq_steps"] = parsed.count_updates(parsed.get("log_freq"))
    if parsed.command.quickstart != "dpo":
        return
    if parsed.get("use_ipo"):
        translated.options["dpo.loss_type"] = "ipo_sum"
        if parsed.get("dpo_label_smoothing"):
            translated.notes.append("--dpo_label_smoothing is left out: use_ipo has none")
    else:
        translated.options["dpo.label_smoothing"] = parsed.get("dpo_label_smoothing")


def _translate_saving(parsed: ParsedFlags, translated: TranslatedCommand) -> None:
    """Set which checkpoints are saved: the newest one, one of each epoch, and milestones."""
    if parsed.command.samples:
        translated.options["save_milestone_freq_epochs"] = 1
    every = parsed.get("save_model_freq")
    if every > 0:
        translated.options["save_freq_steps"] = parsed.count_updates(every)
        translated.options["save_total_limit"] = 1
        translated.options["save_milestone_freq_epochs"] = 1
    milestone = parsed.get("save_milestone_freq")
    if milestone > 0:
        translated.options["save_milestone_freq_steps"] = parsed.count_updates(milestone)


def _count_completions(parsed: ParsedFlags, translated: TranslatedCommand) -> tuple[int, int]:
    """Return the number of completions of a prompt, and of a step."""
    ppo = parsed.command.quickstart == "ppo"
    samples: int = parsed.get("rollouts_per_prompt") if ppo else 2
    return samples, samples * int(translated.options["dataset.train_bs_n_seqs"])


def _read_minibatch(parsed: ParsedFlags) -> int:
    """Return the number of completions of one backward pass in EasyLM."""
    size: int = parsed.get("mini_batch_size")
    backward = parsed.get("backward_mini_batch_size")
    if backward != "":
        if parsed.has("mini_batch_size") and backward != size:
            raise ConfigError(
                f"--backward_mini_batch_size={backward} and --mini_batch_size={size} are the same "
                f"setting; leave one out"
            )
        size = backward
    return size


def _translate_sampling(parsed: ParsedFlags, translated: TranslatedCommand) -> None:
    """Set the options of PPO or online DPO for minibatches, rewards and sampling."""
    algorithm = parsed.command.quickstart
    size = _read_minibatch(parsed)
    samples, completions = _count_completions(parsed, translated)
    update = size * parsed.accumulation
    forward = parsed.get("forward_mini_batch_size")
    for flag, each in (("mini_batch_size", size), ("forward_mini_batch_size", forward or size)):
        if completions % each:
            raise ConfigError(
                f"--{flag}={each}: must divide the {completions} completions of a step (batch_size "
                f"x {samples} of each prompt)"
            )
    if completions % update:
        raise ConfigError(
            f"--optimizer.accumulate_gradient_steps={update // size}: x mini_batch_size={size} is "
            f"{update}, which must divide the {completions} completions of a step"
        )
    if algorithm == "online_dpo" and update % samples:
        raise ConfigError(
            f"--mini_batch_size={size}: must be even; the two completions of a prompt stay together"
        )
    _check_whitening(parsed, update, completions)
    passes = parsed.get("ppo_epochs")
    translated.options[f"{algorithm}.mini_batch_size"] = update
    translated.notes.append(
        f"{completions} completions a step in {completions // update} minibatches of {update} and "
        f"{passes} pass{'' if passes == 1 else 'es'}: {completions * passes // update} updates a "
        f"step; an epoch of D prompts has D x {samples * passes} / {update} updates"
    )
    _translate_reward(parsed, translated)
    if algorithm == "ppo":
        translated.options["ppo.max_reward_clip"] = None
        translated.options["ppo.value_norm"] = False
        translated.options["ppo.early_stop_imp_ratio"] = None
        translated.options["ppo.critic_init"] = "rew"
    if parsed.get("easylm_compat"):
        translated.options[f"{algorithm}.gen.top_k"] = HIDDEN_TOP_K
        translated.options[f"{algorithm}.logprob_temperature"] = 1.0


def _translate_reward(parsed: ParsedFlags, translated: TranslatedCommand) -> None:
    """Set the scaling of rewards, and the reward of completions without end token.

    EasyLM computes score x gain + bias, and weft computes (score - bias) x scaling.
    """
    gain, bias = parsed.get("reward_gain"), parsed.get("reward_bias")
    if gain == 0 and bias != 0:
        raise ConfigError(
            f"--reward_gain=0 with --reward_bias={bias}: every completion has the same reward; "
            f"write --reward_bias=0, which teaches the same"
        )
    algorithm = parsed.command.quickstart
    translated.options[f"{algorithm}.reward_output_scaling"] = gain
    translated.options[f"{algorithm}.reward_output_bias"] = -bias / gain if bias else 0.0
    translated.options[f"{algorithm}.missing_eos_reward"] = MISSING_EOS_REWARD


def _translate_mesh(
    parsed: ParsedFlags, translated: TranslatedCommand, backend: str, num_devices: int | None
) -> None:
    """Check the mesh by the guide's rules, and set the backend and layout of all roles."""
    text = parsed.get("mesh_dim")
    minibatches = {}
    if parsed.command.samples:
        minibatches["mini_batch_size"] = _read_minibatch(parsed)
    if parsed.command.samples and parsed.has("forward_mini_batch_size"):
        minibatches["forward_mini_batch_size"] = parsed.get("forward_mini_batch_size")
    common = math.gcd(*minibatches.values()) or None
    sizes = check_product(text, num_devices, common)
    for flag, rows in minibatches.items():
        check_minibatch(text, sizes, rows, num_devices, flag, common=common)
    layout = text if backend == "jax" else format_layout(sizes)
    for role in parsed.command.roles:
        translated.options[f"{role}.backend"] = backend
        if layout is not None:
            translated.options[f"{role}.layout"] = layout
