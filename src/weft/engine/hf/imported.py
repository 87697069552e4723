"""What is used of the models of `transformers`.

Their import brings torchao along where it is installed, which then tells of libraries that it has
not and of names that torch is to drop: nothing that a user could mend.
"""

from __future__ import annotations

from weft.checkpoints.unheard import unheard

with unheard():
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
