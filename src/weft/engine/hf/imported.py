"""Imports from `transformers`, with the warnings of these imports hidden.

`transformers` imports torchao if it is installed, and torchao warns of missing libraries and
deprecated names of torch. A user can do nothing about these warnings.
"""

from __future__ import annotations

from weft.checkpoints.library_output import hide_library_output

with hide_library_output():
    from transformers import (
        AttentionInterface,
        AttentionMaskInterface,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        PreTrainedModel,
    )
    from transformers.modeling_layers import GradientCheckpointingLayer
    from transformers.pytorch_utils import Conv1D

__all__ = [
    "AttentionInterface",
    "AttentionMaskInterface",
    "AutoConfig",
    "AutoModelForCausalLM",
    "AutoModelForSequenceClassification",
    "Conv1D",
    "GradientCheckpointingLayer",
    "PreTrainedModel",
]
