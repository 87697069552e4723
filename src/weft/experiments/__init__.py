"""Shipped experiments: one file an algorithm, options -> graph. Nothing here loads torch."""

from weft.experiments.dpo import DPOConfig
from weft.experiments.rw import RWConfig
from weft.experiments.sft import SFTConfig

__all__ = ["DPOConfig", "RWConfig", "SFTConfig"]
