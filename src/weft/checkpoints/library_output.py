"""Hide the output of libraries while a `transformers` model is imported, loaded or run.

Users cannot act on this output.
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
