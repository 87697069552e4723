"""weft trains language models after pretraining: SFT, reward models, DPO, PPO, GRPO.

Each algorithm is a dataflow graph of model function calls.
"""

from weft.registry import (
    register_advantage,
    register_backend,
    register_dataset,
    register_experiment,
    register_filter,
    register_function,
    register_hf_family,
    register_interface,
    register_loss,
    register_named_dataset,
    register_quickstart,
    register_reader,
    register_verifier,
)

__version__ = "0.1.0"

__all__ = [
    "register_advantage",
    "register_backend",
    "register_dataset",
    "register_experiment",
    "register_filter",
    "register_function",
    "register_hf_family",
    "register_interface",
    "register_loss",
    "register_named_dataset",
    "register_quickstart",
    "register_reader",
    "register_verifier",
]
