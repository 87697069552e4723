"""Built-in experiments, one module per algorithm.

Each turns its options into a dataflow graph without importing torch.
"""

from weft.experiments.distill import DistillConfig
from weft.experiments.dpo import DPOConfig
from weft.experiments.gen import GenConfig
from weft.experiments.grpo import GRPOConfig
from weft.experiments.online_dpo import OnlineDPOConfig
from weft.experiments.ppo import PPOConfig
from weft.experiments.rw import RWConfig
from weft.experiments.sft import SFTConfig

__all__ = [
    "DPOConfig",
    "DistillConfig",
    "GRPOConfig",
    "GenConfig",
    "OnlineDPOConfig",
    "PPOConfig",
    "RWConfig",
    "SFTConfig",
]
