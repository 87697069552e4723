"""An interface whose call does nothing but make one number an id."""

from __future__ import annotations

import torch

from weft.data.sample import SequenceSample
from weft.interfaces.base import MFCResult, Model
from weft.registry import register_interface

NAME = "benchmark_nothing"


class Nothing:
    def inference(self, model: Model, batch: SequenceSample) -> MFCResult:
        (key,) = batch.keys
        return MFCResult(batch.one_per(key, made=torch.zeros(batch.num_ids)).select(keys=["made"]))


register_interface(NAME)(Nothing)
