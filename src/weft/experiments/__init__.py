"""Shipped experiments: one file an algorithm, options -> graph. Nothing here loads torch."""

from weft.experiments.dpo import DPOConfig
from weft.experiments.gen import GenConfig
from weft.experiments.grpo import GRPOConfig
from weft.experiments.ppo import PPOConfig
from weft.experiments.rw import RWConfig
from weft.experiments.sft import SFTConfig

__all__ = ["DPOConfig", "GRPOConfig", "GenConfig", "PPOConfig", "RWConfig", "SFTConfig"]
