"""Check a dataset class: `check_dataset(MyDataset, path=...)` raises `AssertionError` on failure.

The built-in dataset classes pass the same check.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from weft.data.batches import BatchingOptions, BatchLoader, MapLoader, SourceSubset, StreamLoader
from weft.data.datasets.base import DatasetUtility, MapDataset, StreamDataset, is_by_index
from weft.data.mixture import SourceShare
from weft.data.sample import SequenceSample
from weft.data.token_bytes import build_byte_level
from weft.data.tokenizer import Tokenizer
from weft.data.tokenizing import skip_progress
from weft.registry import datasets

TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SAMPLES = 64  # number of samples checked, evenly spread over a large dataset
BATCHES = 12  # number of loader positions from which resuming is checked


def check_dataset(cls: type[Any] | str, *, tokenizer: Tokenizer | None = None, **args: Any) -> None:
    """Check that a dataset class, given as a class or a registered name, behaves as weft requires.

    The dataset is built as `cls(util=DatasetUtility(...), **args)`. Raises `AssertionError` if a
    check fails.

    A map-style dataset must return samples with one unique id each. It must return the same sample
    for the same index on every access, and in every dataset built with the same arguments. An
    iterable dataset must yield the same batches in every pass. Datasets of either type must have
    consistent keys and lengths, token ids within the vocabulary, and samples that can be
    serialized. A loader that is resumed at any batch must continue with the same batches.

    `tokenizer` defaults to `build_small_tokenizer()`. Prints one line that lists the checks.
    """
    words = tokenizer or build_small_tokenizer()
    make = datasets.get(cls) if isinstance(cls, str) else cls
    with tempfile.TemporaryDirectory() as folder:

        def build() -> Any:
            return make(
                util=DatasetUtility(words, cache_dir=folder, progress=skip_progress), **args
            )

        dataset = build()
        if is_by_index(dataset):
            summary = _check_map(dataset, build, words)
        else:
            assert isinstance(dataset, StreamDataset), (
                f"{make.__name__} has neither __len__ and __getitem__ (samples by index) nor "
                f"__iter__ (whole batches)"
            )
            summary = _check_stream(dataset, build, words)
    print(f"check_dataset({make.__name__}): {summary}")


def build_small_tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer with `<s>`, `</s>` and a chat template, without reading files."""
    hf = build_byte_level()
    hf.chat_template = TEMPLATE
    return Tokenizer(hf)


def _check_map(dataset: MapDataset, build: Callable[[], Any], words: Tokenizer) -> str:
    """Check a map-style dataset and return a one-line summary of the checks.

    `build` builds the dataset again with the same arguments. `words` is the dataset's tokenizer.
    """
    count = len(dataset)
    assert count > 0, "the dataset is empty: len() is 0"
    indices = sorted({int(i) for i in np.linspace(0, count - 1, min(count, SAMPLES))})
    # Each sample alone, then all together.
    samples = [dataset[index] for index in indices]
    for index, sample in zip(indices, samples, strict=True):
        assert isinstance(sample, SequenceSample), (
            f"[{index}] is a {type(sample).__name__}, not a SequenceSample"
        )
        assert sample.num_ids == 1, f"[{index}] has {sample.num_ids} ids; a sample must have one id"
        check_sample(sample, words, f"[{index}]")
    _check_keys(samples)
    ids = [sample.ids[0] for sample in samples]
    assert len(set(ids)) == len(ids), (
        f"ids are not unique: {sorted({i for i in ids if ids.count(i) > 1})[:5]}"
    )
    SequenceSample.gather(samples)
    # The same samples on a second access and from a second object.
    for other, what in ((dataset, "a second access"), (build(), "a second build")):
        assert len(other) == count, f"{what} has {len(other)} samples, the first {count}"
        for index, sample in zip(indices, samples, strict=True):
            _check_same_sample(sample, other[index], f"[{index}] in {what}")

    def make_loader() -> BatchLoader:
        part = SourceSubset("data", build(), np.arange(count))
        return MapLoader(
            [part], [SourceShare("data", count)], BatchingOptions(max(1, count // BATCHES)), seed=1
        )

    resumed = _check_resume(make_loader)
    keys = ", ".join(samples[0].keys)
    return (
        f"{len(samples)} of {count} samples by index, with the keys {keys}: one id each and no id "
        f"twice, tokens within the "
        f"vocabulary, the same in a second access and a second build; {resumed}"
    )


def _check_stream(dataset: StreamDataset, build: Callable[[], Any], words: Tokenizer) -> str:
    """Check an iterable dataset and return a one-line summary of the checks.

    `build` builds the dataset again with the same arguments. `words` is the dataset's tokenizer.
    """
    first = list(islice(iter(dataset), SAMPLES))
    assert first, "the dataset is empty: iter() yields no batch"
    for number, batch in enumerate(first):
        assert isinstance(batch, SequenceSample), (
            f"batch {number} is a {type(batch).__name__}, not a SequenceSample"
        )
        assert batch.num_ids > 0, f"batch {number} has no ids"
        check_sample(batch, words, f"batch {number}")
    _check_keys(first)
    for other, what in ((dataset, "a second pass"), (build(), "a second build")):
        again = list(islice(iter(other), SAMPLES))
        assert len(again) == len(first), f"{what} has {len(again)} batches, the first {len(first)}"
        for number, (one, two) in enumerate(zip(first, again, strict=True)):
            _check_same_sample(one, two, f"batch {number} in {what}")
    resumed = _check_resume(lambda: StreamLoader(build(), "data"))
    return (
        f"{len(first)} batches of an iterable dataset, with the keys {', '.join(first[0].keys)}: "
        f"tokens within the vocabulary, "
        f"the same in a second pass and a second build; {resumed}"
    )


def check_sample(sample: SequenceSample, tokenizer: Tokenizer, where: str) -> None:
    """Check that the tensors and lengths of a sample are consistent and survive serialization.

    Raises `AssertionError` if they are not; `where` describes the sample in the message.
    """
    # Every key has data, and token ids are in the vocabulary.
    for key in sample.keys:
        assert key in sample.data, f"{where}: key {key!r} has lengths but no tensor"
        if key in ("prompt", "completion"):
            tokens = sample.data[key]
            assert tokens.dtype == torch.int64, (
                f"{where}: {key!r} is {tokens.dtype}; token ids must be int64"
            )
            outside = ((tokens < 0) | (tokens >= tokenizer.vocab_size)).any()
            assert not outside, (
                f"{where}: {key!r} has ids outside the vocabulary of {tokenizer.vocab_size}"
            )
    # Numbers of sequences and lengths match.
    if "prompt" in sample.keys:
        assert (np.diff(sample.offsets["prompt"]) == 1).all(), (
            f"{where}: 'prompt' must have one sequence per id"
        )
    if "completion" in sample.keys:
        groups = np.diff(sample.offsets["completion"])
        assert (groups >= 1).all(), f"{where}: an id has no completion"
        for key in sample.keys:
            counts = np.diff(sample.offsets[key])
            fits = (counts == groups) | (counts == 1)
            assert fits.all(), (
                f"{where}: {key!r} has {counts.tolist()} sequences for {groups.tolist()} "
                f"completions"
            )
    if "loss_mask" in sample.keys:
        same = np.array_equal(sample.lengths["loss_mask"], sample.lengths["completion"])
        assert same, f"{where}: 'loss_mask' and 'completion' differ in length"
    _check_same_sample(
        sample,
        SequenceSample.from_bytes(sample.to_bytes()),
        f"{where} after to_bytes and from_bytes",
    )


def _check_keys(samples: Sequence[SequenceSample]) -> None:
    keys = {frozenset(sample.keys) for sample in samples}
    assert len(keys) == 1, f"samples differ in their keys: {[sorted(key_set) for key_set in keys]}"


def _check_same_sample(one: SequenceSample, other: SequenceSample, where: str) -> None:
    assert one.ids == other.ids, f"{where}: ids {other.ids[:3]} instead of {one.ids[:3]}"
    assert set(one.keys) == set(other.keys), f"{where}: keys differ"
    assert dict(one.metadata) == dict(other.metadata), f"{where}: metadata differ"
    for key in one.keys:
        assert np.array_equal(one.lengths[key], other.lengths[key]), (
            f"{where}: lengths of {key!r} differ"
        )
        assert torch.equal(one.data[key], other.data[key]), f"{where}: values of {key!r} differ"


def _check_resume(make: Callable[[], BatchLoader]) -> str:
    """Check that a resumed loader continues with the same batches; return a summary of the check.

    For each of the first `BATCHES` batches, a new loader made by `make` is resumed from the state
    before the batch.
    """
    loader = make()
    states = [loader.state_dict()]
    batches = []
    for _ in range(BATCHES):
        batches.append(loader.next_batch())
        states.append(loader.state_dict())
    for position, state in enumerate(states[:-1]):
        again = make()
        again.load_state_dict(state)
        _check_same_sample(
            batches[position],
            again.next_batch(),
            f"the batch at position {position} after a restart",
        )
    return f"the same batches after a restart at each of {BATCHES} positions"
