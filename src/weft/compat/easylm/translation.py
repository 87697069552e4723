"""Translation of EasyLM's flags to the options of `weft quickstart`.

    given = parse_flags("llama_train_ppo", ["--kl_coef=0.05", ...])
    translate(given, backend="jax").format_words()    # ["quickstart", "ppo", "ppo.kl_ctl=0.05", ...]

Options are those that the user set, and otherwise EasyLM's defaults. This module imports neither
torch nor jax.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from weft.compat.easylm import flags as tables
from weft.compat.easylm.arguments import GivenFlags, ModelConversion, TranslatedCommand
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
# from the policy that recomputes least to the one that recomputes most
REMAT = ("checkpoint_dots", "checkpoint_dots_with_no_batch_dims", "nothing_saveable")
MISSING_EOS_REWARD = -10.0  # EasyLM's score of a completion without end token
HIDDEN_TOP_K = 50  # of Hugging Face's sampler, which EasyLM uses without saying so
# flag of `jax_distributed` -> environment variable of weft.engine.jax.hosts
HOST_VARIABLES = {
    "coordinator_address": COORDINATOR,
    "num_processes": "WEFT_JAX_PROCESSES",
    "process_id": "WEFT_JAX_PROCESS",
}
NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9.-]+")


def translate(
    given: GivenFlags, *, backend: str, num_devices: int | None = None
) -> TranslatedCommand:
    """Translate flags to options of `weft quickstart`.

    `backend` is that of all roles, and `num_devices` the number of its devices, or None if it is
    not known. Raises `ConfigError` for flags that weft refuses, and for settings that break a rule
    of EasyLM's guide.
    """
    done = TranslatedCommand(given.command.quickstart, passed=given.passed)
    _check_refused(given, done)
    if given.get("easylm_compat"):
        _check_compatible(given)
    _translate_copies(given, done)
    translate_dataset(given, done)
    _translate_names(given, done)
    _translate_optimizer(given, done)
    _translate_models(given, done)
    if given.command.samples:
        _translate_sampling(given, done)
    else:
        _translate_steps(given, done)
    _translate_saving(given, done)
    _translate_mesh(given, done, backend, num_devices)
    for role in given.command.roles if backend == "torch" else ():
        if done.options.pop(f"{role}.recompute_policy", None) is not None:
            done.options[f"{role}.gradient_checkpointing"] = True
    done.environment = list_host_variables(given)
    if done.environment and backend == "torch":
        flag = "jax_distributed.initialize_jax_distributed"
        flag = flag if given.get(flag) else "initialize_jax_distributed"
        raise ConfigError(
            f"--{flag}=True: connects processes of JAX, and the backend is torch; leave the flag "
            f"out, or write --backend=jax"
        )
    return done


def _check_refused(given: GivenFlags, done: TranslatedCommand) -> None:
    """Raise `ConfigError` for values that weft refuses, and note flags without effect."""
    for flag, value in given.values.items():
        rule = given.command.flags[flag]
        if rule.treatment == "refuse" and value != rule.default:
            raise ConfigError(f"--{flag}={value}: {rule.note}")
        if rule.treatment == "ignore" and value != rule.default:
            done.notes.append(f"--{flag} is left out: {rule.note}")


def list_host_variables(given: GivenFlags) -> dict[str, str]:
    """Return the environment variables with which JAX starts on several hosts; empty for one.

    Raises `ConfigError` if only some of the flags `jax_distributed.*` are set.
    """
    flags = {name: f"jax_distributed.{name}" for name in HOST_VARIABLES}
    values = {name: given.get(flag) for name, flag in flags.items() if given.has(flag)}
    starts = "initialize_jax_distributed"
    has_several = given.get(f"jax_distributed.{starts}") or (
        starts in given.command.flags and given.get(starts)
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


def _check_compatible(given: GivenFlags) -> None:
    """Raise `ConfigError` if weft cannot reproduce what EasyLM does with these flags."""
    samples = given.command.samples
    passes = given.get("ppo_epochs") if samples else 1
    decay = given.get("optimizer.adamw_optimizer.weight_decay")
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
    steps = given.get("optimizer.accumulate_gradient_steps")
    if steps > 1 and given.command.quickstart in ("sft", "ppo"):
        raise ConfigError(
            f"--easylm_compat=true: with optimizer.accumulate_gradient_steps={steps} EasyLM "
            f"averages means of batches, and in weft every token weighs the same; write 1"
        )


def _check_whitening(given: GivenFlags, size: int, completions: int) -> None:
    """Raise `ConfigError` if EasyLM whitens over less than a step, which weft does not."""
    if not given.get("easylm_compat") or given.command.quickstart != "ppo" or size == completions:
        return
    flag = "mini_batch_size"
    if given.get("backward_mini_batch_size") != "":
        flag = "backward_mini_batch_size"
    what = "advantages and rewards" if given.get("whiten_rewards") else "advantages"
    raise ConfigError(
        f"--easylm_compat=true: with {flag}={size} EasyLM whitens {what} over each minibatch, and "
        f"weft over the {completions} completions of a step; write --{flag}={completions}, or a "
        f"batch_size of the dataset whose completions are one minibatch"
    )


def _translate_copies(given: GivenFlags, done: TranslatedCommand) -> None:
    """Set the options whose values are those of flags, including EasyLM's defaults."""
    for flag, rule in given.command.flags.items():
        own_dataset = flag.startswith(("train_dataset.", "eval_dataset."))
        if rule.treatment == "copy" and not own_dataset:
            for option in rule.options:
                for name in given.command.expand(option):
                    done.options[name] = given.get(flag)


def _translate_names(given: GivenFlags, done: TranslatedCommand) -> None:
    """Set the folder and the name of the run, and the options of Weights & Biases."""
    logger = {flag.removeprefix("logger."): given.get(flag) for flag in tables.LOGGER}
    if logger["output_dir"]:
        done.options["fileroot"] = logger["output_dir"]
    parts = [logger["prefix"] if logger["prefix_to_id"] else "", logger["experiment_id"]]
    name = NOT_IN_NAMES.sub("-", "--".join(filter(None, parts))).strip("-.")
    if name:
        done.options["trial_name"] = name
    project = logger["project"]
    if logger["prefix"] and not logger["prefix_to_id"]:
        project = "--".join(filter(None, (logger["prefix"], project)))
    wandb = {"entity": logger["entity"], "project": project, "dir": logger["wandb_dir"]}
    if logger["online"]:
        done.options["logger.wandb.mode"] = "online"
    elif any(wandb.values()) and find_spec("wandb") is None:
        done.notes.append(
            "--logger.* of W&B are left out: logger.online is false and it is not installed"
        )
        return
    elif any(wandb.values()):
        done.options["logger.wandb.mode"] = "offline"
    for key, value in wandb.items():
        if value:
            done.options[f"logger.wandb.{key}"] = value


def _translate_optimizer(given: GivenFlags, done: TranslatedCommand) -> None:
    kind = given.get("optimizer.type")
    if kind not in ("adamw", "lion", "palm"):
        raise ConfigError(f"--optimizer.type={kind}: must be adamw, palm or lion")
    palm, adamw = "optimizer.palm_optimizer.", "optimizer.adamw_optimizer."
    if kind == "palm" and given.command.samples:
        raise ConfigError(
            "--optimizer.type=palm: the rate of this command, --lr, is that of adamw; write adamw"
        )
    other = adamw if kind == "palm" else palm
    for flag in given.values:
        if flag.startswith(other):
            done.notes.append(f"--{flag} has no effect with --optimizer.type={kind}")
    for role in given.command.trained:
        at = f"{role}.optimizer"
        done.options[f"{at}.type"] = kind
        if kind == "palm":
            warmup = max(1, given.get(f"{palm}lr_warmup_steps"))
            done.options |= {
                f"{at}.lr": 100 * given.get(f"{palm}lr") / math.sqrt(warmup),
                f"{at}.end_lr": 0.0,
                f"{at}.lr_scheduler_type": "rsqrt",
                f"{at}.warmup_steps": warmup,
                f"{at}.beta1": given.get(f"{palm}b1"),
                f"{at}.beta2": given.get(f"{palm}b2"),
                f"{at}.max_grad_norm": given.get(f"{palm}clip_gradient"),
                f"{at}.weight_decay": 10_000 * given.get(f"{palm}weight_decay"),
            }
            continue
        if given.get(f"{adamw}bf16_momentum"):
            done.options[f"{at}.state_dtype"] = "bfloat16"
        if given.command.samples:
            done.options[f"{at}.lr_scheduler_type"] = "constant"
            continue
        done.options[f"{at}.lr_scheduler_type"] = "linear"
        _translate_warmup(given, done, at)
    if given.command.samples and given.get("warmup_epochs") > 0:
        _note_rounding(given, done, "warmup_epochs")
    if given.command.quickstart == "ppo" and given.get("policy_freeze_epochs") > 0:
        _note_rounding(given, done, "policy_freeze_epochs")


def _translate_warmup(given: GivenFlags, done: TranslatedCommand, at: str) -> None:
    """Set the warm-up of the optimizer options `at`.

    It has the updates that it has in EasyLM if the length of the run is known. EasyLM's warm-up may
    be longer than the run, weft's may not: the run then ends at the rate that EasyLM's ends with.
    Otherwise a note says what differs.
    """
    flag = "optimizer.adamw_optimizer."
    ratio, warmup = given.get(f"{flag}warmup_ratio"), given.get(f"{flag}lr_warmup_steps")
    updates = _count_updates(given)
    if updates is None and ratio > 0:
        done.options[f"{at}.warmup_steps_proportion"] = ratio
        _note_rounding(given, done, f"{flag}warmup_ratio")
        return
    if ratio > 0:
        warmup = math.ceil(ratio * updates)
    elif updates is None and warmup > 0:
        done.notes.append(
            f"--{flag}lr_warmup_steps={warmup}: if the run has fewer updates, warm-up ends with it "
            f"at lr; in EasyLM the rate is lower then"
        )
    elif updates is not None and warmup > updates:
        done.options[f"{at}.lr"] = given.get(f"{flag}lr") * updates / warmup
        done.notes.append(
            f"--{flag}lr_warmup_steps={warmup}: the run ends during warm-up, after {updates} "
            f"updates; its last rate is lr x {updates} / {warmup}, as in EasyLM"
        )
        warmup = updates
    done.options[f"{at}.warmup_steps"] = warmup


def _note_rounding(given: GivenFlags, done: TranslatedCommand, flag: str) -> None:
    done.notes.append(
        f"--{flag}={given.get(flag)}: rounded to the nearest whole update (EasyLM rounds up)"
    )


def _count_updates(given: GivenFlags) -> int | None:
    """Return the updates of a run whose length is set in steps, else None.

    Options of weft on the command line can set another length, so that it is not known either.
    """
    names = {word.lstrip("+").partition("=")[0] for word in given.passed}
    if given.get("num_epochs") > 0 or names & {"max_steps", "total_train_epochs"}:
        return None
    return given.count_updates(given.get("total_steps"))


def _translate_models(given: GivenFlags, done: TranslatedCommand) -> None:
    """Set the options of checkpoints, tokenizers and dtypes of all roles."""
    command = given.command
    if command.samples:
        sources = {"actor": "_policy", "rew": "_reward"}
    else:
        sources = {command.model: ""}
    tokenizer = _choose_tokenizer(given)
    is_reward_model = command.quickstart == "rw" and not given.get("load_from_causal_lm")
    for role, suffix in sources.items():
        scored = is_reward_model or suffix == "_reward"
        _translate_checkpoint(given, done, (role, suffix), tokenizer, is_reward_model=scored)
    if command.quickstart == "dpo" and given.has("load_reference_checkpoint"):
        reference = given.get("load_reference_checkpoint")
        _set_source(given, done, ("ref", ""), reference, tokenizer)
    # Options of all roles.
    dtype = given.get("dtype")
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype={dtype}: must be one of {', '.join(DTYPES)}")
    chat = done.options["dataset.type"] in ("chat", "preference_json_torch", "tulu_prompt")
    bos = given.get("tokenizer.add_bos_token")
    if bos == "":
        # The last EasyLM begins every sequence with BOS, but prompts of PPO.
        bos = not (command.samples and given.get("easylm_compat"))
    for role in command.roles:
        done.options[f"{role}.dtype"] = DTYPES[dtype]
        if tokenizer:
            done.options[f"{role}.tokenizer.path"] = tokenizer
        if chat:
            done.options[f"{role}.tokenizer.chat_template"] = "tulu"
        done.options[f"{role}.tokenizer.add_bos_token"] = bos


def _choose_tokenizer(given: GivenFlags) -> str | None:
    named, file = given.get("tokenizer"), given.get("tokenizer.vocab_file")
    if named and file and named != file:
        raise ConfigError(
            f"--tokenizer={named} and --tokenizer.vocab_file={file} both name the tokenizer; set one"
        )
    return named or file or None


def _translate_checkpoint(
    given: GivenFlags,
    done: TranslatedCommand,
    source: tuple[str, str],
    tokenizer: str | None,
    *,
    is_reward_model: bool,
) -> None:
    """Set the path of a role; `source` is the role and the suffix of the flags that describe it."""
    flag = f"load_checkpoint{source[1]}"
    checkpoint = given.get(flag)
    if not checkpoint and not tokenizer:
        raise ConfigError(
            f"--{flag} is missing: name a stream such as params::FILE, or a Hugging Face directory; "
            f"for random weights, name a --tokenizer"
        )
    if not checkpoint:
        done.notes.append(f"--{flag} is not set: the weights begin at random")
        done.options[f"{source[0]}.init_from_scratch"] = True
    _set_source(given, done, source, checkpoint, tokenizer, is_reward_model=is_reward_model)


def _set_source(
    given: GivenFlags,
    done: TranslatedCommand,
    source: tuple[str, str],
    checkpoint: str,
    tokenizer: str | None,
    *,
    is_reward_model: bool = False,
) -> None:
    """Set the path of a role to a Hugging Face directory, or note the stream to convert."""
    role, suffix = source
    config, changes, training = _read_llama_config(given, suffix)
    _translate_training(given, done, role, training)
    network = {key: value for key, value in changes.items() if not _is_for_training(key)}
    if "::" in checkpoint or not checkpoint:
        for key in _list_training_values(load_llama_config(config)) if config else ():
            rule = tables.LLAMA[f"llama.{key}"]
            if rule.treatment != "ignore":  # it is set as an option of the role
                network[key] = rule.default
        update = repr(network) if network else ""
        stream = ModelConversion(checkpoint, config, update, tokenizer, is_reward_model)
        done.streams[role] = stream
        return
    if network:
        raise ConfigError(
            f"--update_llama_config{suffix}, --llama.{next(iter(network))}: {checkpoint} is a "
            f"Hugging Face model, whose config.json says what it is; leave the flag out"
        )
    if config:
        done.notes.append(
            f"--load_llama_config{suffix}={config} is left out: config.json of {checkpoint} says "
            f"what the model is"
        )
    done.options[f"{role}.path"] = checkpoint


def _read_llama_config(
    given: GivenFlags, suffix: str
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the name of the configuration, the changes to it, and its values for training.

    As in EasyLM, the flags `llama.*` describe a model if `load_llama_config` is not set. Raises
    `ConfigError` if both are, and for values that weft lacks.
    """
    name = given.get(f"load_llama_config{suffix}")
    own = {flag.removeprefix("llama."): given.get(flag) for flag in tables.LLAMA if given.has(flag)}
    own = {key: value for key, value in own.items() if key not in ("use_cache",)}
    if name and own:
        key = next(iter(own))
        raise ConfigError(
            f"--llama.{key}: has no effect in EasyLM beside --load_llama_config{suffix}={name}; "
            f'write --update_llama_config{suffix}="dict({key}={own[key]!r})"'
        )
    flag = f"update_llama_config{suffix}"
    text = given.get(flag)
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
    """Return the values of a configuration that say how to train and are not EasyLM's defaults."""
    return {
        key: value
        for key, value in vars(config).items()
        if _is_for_training(key) and value != tables.LLAMA[f"llama.{key}"].default
    }


def _translate_training(
    given: GivenFlags, done: TranslatedCommand, role: str, training: Mapping[str, Any]
) -> None:
    """Set dropout and recomputation of trained roles from values of a llama configuration."""
    roles = [role] if role in given.command.trained else []
    if role == "rew" and "critic" in given.command.trained:
        roles = ["critic"]  # which begins as the reward model
    for key, value in training.items():
        rule = tables.LLAMA[f"llama.{key}"]
        if rule.treatment == "ignore":
            note = f"{key} is left out: {rule.note}"
            if not given.has(f"llama.{key}") and note not in done.notes:
                done.notes.append(note)
            continue
        for each in roles:
            if key == "resid_pdrop":
                done.options[f"{each}.residual_dropout"] = value
            elif value in REMAT:
                policies = [value, done.options.get(f"{each}.recompute_policy", REMAT[0])]
                done.options[f"{each}.recompute_policy"] = max(policies, key=REMAT.index)


# -- steps, minibatches, devices


def _translate_steps(given: GivenFlags, done: TranslatedCommand) -> None:
    """Set the length of the run and how often it is logged, and the loss of DPO."""
    epochs = given.get("num_epochs")
    if epochs > 0:
        done.options["total_train_epochs"] = epochs
    elif given.get("total_steps") < 1:
        raise ConfigError("--total_steps=0: must be at least 1, unless --num_epochs is above 0")
    else:
        done.options["max_steps"] = given.count_updates(given.get("total_steps"))
    done.options["log_freq_steps"] = given.count_updates(given.get("log_freq"))
    if given.command.quickstart != "dpo":
        return
    if given.get("use_ipo"):
        done.options["dpo.loss_type"] = "ipo_sum"
        if given.get("dpo_label_smoothing"):
            done.notes.append("--dpo_label_smoothing is left out: use_ipo has none")
    else:
        done.options["dpo.label_smoothing"] = given.get("dpo_label_smoothing")


def _translate_saving(given: GivenFlags, done: TranslatedCommand) -> None:
    """Set when checkpoints are written: the newest, one of each epoch, and milestones."""
    if given.command.samples:
        done.options["save_milestone_freq_epochs"] = 1
    every = given.get("save_model_freq")
    if every > 0:
        done.options["save_freq_steps"] = given.count_updates(every)
        done.options["save_total_limit"] = 1
        done.options["save_milestone_freq_epochs"] = 1
    milestone = given.get("save_milestone_freq")
    if milestone > 0:
        done.options["save_milestone_freq_steps"] = given.count_updates(milestone)


def _count_completions(given: GivenFlags, done: TranslatedCommand) -> tuple[int, int]:
    """Return the completions of a prompt, and those of a step."""
    ppo = given.command.quickstart == "ppo"
    samples: int = given.get("rollouts_per_prompt") if ppo else 2
    return samples, samples * int(done.options["dataset.train_bs_n_seqs"])


def _read_minibatch(given: GivenFlags) -> int:
    """Return the completions of one backward pass in EasyLM."""
    size: int = given.get("mini_batch_size")
    backward = given.get("backward_mini_batch_size")
    if backward != "":
        if given.has("mini_batch_size") and backward != size:
            raise ConfigError(
                f"--backward_mini_batch_size={backward} and --mini_batch_size={size} are the same "
                f"setting; leave one out"
            )
        size = backward
    return size


def _translate_sampling(given: GivenFlags, done: TranslatedCommand) -> None:
    """Set minibatches, rewards and the algorithm of PPO or online DPO."""
    algorithm = given.command.quickstart
    size = _read_minibatch(given)
    samples, completions = _count_completions(given, done)
    update = size * given.accumulation
    forward = given.get("forward_mini_batch_size")
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
    _check_whitening(given, update, completions)
    passes = given.get("ppo_epochs")
    done.options[f"{algorithm}.mini_batch_size"] = update
    done.notes.append(
        f"{completions} completions a step in {completions // update} minibatches of {update} and "
        f"{passes} pass{'' if passes == 1 else 'es'}: {completions * passes // update} updates a "
        f"step; an epoch of D prompts has D x {samples * passes} / {update} updates"
    )
    _translate_reward(given, done)
    if algorithm == "ppo":
        done.options["ppo.max_reward_clip"] = None
        done.options["ppo.value_norm"] = False
        done.options["ppo.early_stop_imp_ratio"] = None
        done.options["ppo.critic_init"] = "rew"
    if given.get("easylm_compat"):
        done.options[f"{algorithm}.gen.top_k"] = HIDDEN_TOP_K
        done.options[f"{algorithm}.logprob_temperature"] = 1.0


def _translate_reward(given: GivenFlags, done: TranslatedCommand) -> None:
    """Set the scaling of rewards, and the reward of completions without end token.

    EasyLM: score x gain + bias; weft: (score - bias) x scaling.
    """
    gain, bias = given.get("reward_gain"), given.get("reward_bias")
    if gain == 0 and bias != 0:
        raise ConfigError(
            f"--reward_gain=0 with --reward_bias={bias}: every completion has the same reward; "
            f"write --reward_bias=0, which teaches the same"
        )
    algorithm = given.command.quickstart
    done.options[f"{algorithm}.reward_output_scaling"] = gain
    done.options[f"{algorithm}.reward_output_bias"] = -bias / gain if bias else 0.0
    done.options[f"{algorithm}.missing_eos_reward"] = MISSING_EOS_REWARD


def _translate_mesh(
    given: GivenFlags, done: TranslatedCommand, backend: str, num_devices: int | None
) -> None:
    """Set backend and layout of all roles, after checks of the guide's rules on meshes."""
    text = given.get("mesh_dim")
    minibatches = {}
    if given.command.samples:
        minibatches["mini_batch_size"] = _read_minibatch(given)
    if given.command.samples and given.has("forward_mini_batch_size"):
        minibatches["forward_mini_batch_size"] = given.get("forward_mini_batch_size")
    common = math.gcd(*minibatches.values()) or None
    sizes = check_product(text, num_devices, common)
    for flag, rows in minibatches.items():
        check_minibatch(text, sizes, rows, num_devices, flag, common=common)
    layout = text if backend == "jax" else format_layout(sizes)
    for role in given.command.roles:
        done.options[f"{role}.backend"] = backend
        if layout is not None:
            done.options[f"{role}.layout"] = layout
