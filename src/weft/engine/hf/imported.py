"""What is used of the models of `transformers`. Their import brings torchao along where it is installed, which then tells of
libraries that it has not and of names that torch is to drop: nothing that a user could mend."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

TALKERS = ("torchao", "torch.utils._pytree")  # loggers


@contextmanager
def unheard() -> Iterator[None]:
    """Without what these loggers say below an error."""
    loggers = [logging.getLogger(name) for name in TALKERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


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
