"""What libraries say while a model of `transformers` is imported, loaded and run, and a user can do
nothing about.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

LOGGERS = ("transformers", "torchao", "torch.utils._pytree")


@contextmanager
def unheard() -> Iterator[None]:
    """Without progress bars, warnings of what is to change, and what these loggers say below an
    error. The models of `transformers` are imported inside, too, for they bring torchao along.
    """
    from transformers.utils import logging as bars

    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    shown = bars.is_progress_bar_enabled()
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
        if shown:
            bars.enable_progress_bar()
