"""`check_interface` passes what weft ships and finds what is wrong with others."""

from __future__ import annotations

import pytest
import torch

from weft.data.sample import SequenceSample
from weft.interfaces.base import MFCResult
from weft.interfaces.generate import GenerateInterface
from weft.interfaces.infer import InferInterface
from weft.interfaces.train import TrainInterface
from weft.testing import check_interface


@pytest.mark.parametrize(
    ("cls", "head", "args"),
    [
        (GenerateInterface, "lm", {"max_new_tokens": 4, "samples_per_prompt": 2}),
        (InferInterface, "lm", {"outputs": ["logprobs", "entropy"]}),
        (InferInterface, "score", {"outputs": ["scores"]}),
        (InferInterface, "value", {"outputs": ["values"]}),
        (TrainInterface, "lm", {"loss": "sft"}),
        (TrainInterface, "lm", {"loss": "dpo", "loss_args": {"beta": 0.1}}),
    ],
)
def test_what_weft_ships_passes(cls, head, args):
    check_interface(cls, head=head, **args)


def scores(batch: SequenceSample, values) -> SequenceSample:
    counts = [[1] * len(n) for n in batch.seqlens["completion"]]
    return SequenceSample.from_groups(
        batch.ids, {"scores": counts}, {"scores": torch.as_tensor(values)}
    )


class Base:
    def inference(self, model, batch):
        lengths = [float(len(c)) for c in batch.sequences("completion")]
        return MFCResult(scores(batch, self.change(lengths)), {"mean": self.metric(lengths)})

    def change(self, lengths):
        return lengths

    def metric(self, lengths):
        return sum(lengths) / len(lengths)


class NoMethod:
    def run(self): ...


class NotFinite(Base):
    def metric(self, lengths):
        return float("nan")


class Centred(Base):
    """Depends on who else is in the batch."""

    def change(self, lengths):
        return [n - sum(lengths) / len(lengths) for n in lengths]


class Random(Base):
    def change(self, lengths):
        return torch.rand(len(lengths)).tolist()


class LosesIds(Base):
    def inference(self, model, batch):
        return super().inference(model, batch.select(ids=batch.ids[:1]))


class HalfState(Base):
    def state_dict(self):
        return {}


class Forgets(Base):
    calls = 0

    def inference(self, model, batch):
        self.calls += 1
        return super().inference(model, batch)

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state): ...


class SavesNothing(Base):
    def save(self, model, directory): ...


class Writes(Base):
    def inference(self, model, batch):
        batch.data["completion"].add_(1)
        return super().inference(model, batch)


class DoesNotTrain:
    def train_step(self, model, minibatches):
        return MFCResult()


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (NoMethod, "implements none of"),
        (NotFinite, "'mean' is nan"),
        (Centred, "on 'a' alone"),
        (Random, "called again"),
        (LosesIds, r"outputs have the ids \['a'\]"),
        (HalfState, "only one of"),
        (Forgets, "does not restore"),
        (SavesNothing, "leaves its directory empty"),
        (Writes, "modifies its input batch"),
        (DoesNotTrain, "version is 0, not 1"),
    ],
)
def test_what_is_wrong_is_found(cls, words):
    with pytest.raises(AssertionError, match=words):
        check_interface(cls)


def test_a_sound_interface_of_a_users_own_passes():
    check_interface(Base)
