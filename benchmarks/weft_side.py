"""weft's side of the training benchmarks: the configurations that a user writes, run as the command
line runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.clock import Clock
from benchmarks.pairs import Pause

Settings = Mapping[str, Any]
HOOK = "benchmark_clock"


def train(settings: Settings, pause: Pause) -> dict[str, Any]:
    """One run; a hook after the training call is the clock."""
    import weft.engine.backends.torch
    import weft.launch.assemble  # noqa: F401 - what a run loads, so that it does not count as memory of the run
    from weft import register_function
    from weft.launch import run
    from weft.observe.memory import keep_freed_memory

    keep_freed_memory()
    clock = Clock(pause)
    register_function(HOOK, lambda model: clock.tick())
    lines = run(CONFIGS[settings["name"]](settings)).metrics
    return lines[-1]


def sft(settings: Settings) -> Any:
    from weft.experiments import SFTConfig

    config = SFTConfig(**_options(settings))
    config.model.path = _model(settings)
    config.train.post_hooks = [HOOK]
    return _data(config, settings)


def rw(settings: Settings) -> Any:
    from weft.experiments import RWConfig

    config = RWConfig(**_options(settings))
    config.model.path = _model(settings)
    config.train.post_hooks = [HOOK]
    return _data(config, settings)


def dpo(settings: Settings) -> Any:
    from weft.experiments import DPOConfig

    config = DPOConfig(**_options(settings))
    config.actor.path = _model(settings)
    config.actor_train.post_hooks = [HOOK]
    return _data(config, settings)


def grpo(settings: Settings) -> Any:
    """Without a reference, as TRL's defaults have it."""
    from weft.experiments import GRPOConfig

    config = GRPOConfig(**_options(settings), reward="benchmarks.rewards:distinct")
    config.actor.path = _model(settings)
    config.actor_train.post_hooks = [HOOK]
    config.grpo.group_size, config.grpo.kl_coef = settings["completions"], 0.0
    return _sampling(config, config.grpo, settings)


def ppo(settings: Settings) -> Any:
    """Some passes over a batch as one minibatch, as TRL's defaults have it."""
    from weft.experiments import PPOConfig

    config = PPOConfig(**_options(settings))
    config.actor.path, config.rew.path = _model(settings), _model(settings, "reward")
    config.actor_train.post_hooks = [HOOK]
    config.ppo.ppo_epochs, config.ppo.ppo_n_minibatches = settings["passes"], 1
    return _sampling(config, config.ppo, settings)


CONFIGS: dict[str, Callable[[Settings], Any]] = {
    "sft": sft,
    "rw": rw,
    "dpo": dpo,
    "grpo": grpo,
    "ppo": ppo,
}


def _options(settings: Settings) -> dict[str, Any]:
    return {
        "experiment_name": "bench",
        "trial_name": settings["name"],
        "fileroot": settings["work"],
        "progress": False,
        "device": "cpu",
        "recover_mode": "disabled",
        "max_steps": settings["all_steps"],
    }


def _model(settings: Settings, which: str = "model") -> str:
    return str(Path(settings["work"]).parent / which)


def _data(config: Any, settings: Settings) -> Any:
    dataset = config.dataset
    dataset.train_path, dataset.train_bs_n_seqs = settings["rows"], settings["batch"]
    dataset.shuffle, dataset.cache_dir = False, settings["work"]
    dataset.max_seqlen = settings["longest"]
    return config


def _sampling(config: Any, options: Any, settings: Settings) -> Any:
    """Completions of a fixed length, so that both sides sample the same number of tokens."""
    _data(config, settings)
    config.dataset.max_prompt_len = settings["longest"]
    config.dataset.max_seqlen = settings["longest"] + settings["new_tokens"]
    options.gen.max_new_tokens = options.gen.min_new_tokens = settings["new_tokens"]
    return config
