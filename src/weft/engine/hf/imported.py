"""Imports from `transformers`, with the output of libraries hidden.

`transformers` imports torchao if it is installed, and torchao warns of missing libraries and
deprecated names of torch. A user can do nothing about these warnings.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

LOGGERS = ("transformers", "torchao", "torch.utils._pytree")


@contextmanager
def hide_library_output() -> Iterator[None]:
    """Hide progress bars, warnings of future changes, and log records below the level ERROR.

    Model classes of `transformers` should also be imported in this context, because the import
    loads torchao, which writes log records.
    """
    from transformers.utils import logging as bars

    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    was_enabled = bars.is_progress_bar_enabled()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    bars.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if was_enabled:
            bars.enable_progress_bar()


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
