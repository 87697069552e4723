"""Check an interface class: `check_interface(Mine, scale=2.0)` raises `AssertionError` on failure.

The built-in interfaces pass the same check.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.data.sample import SequenceSample
from weft.engine.spec import Head, ModelSpec, Schedule
from weft.interfaces.base import MFCResult, Minibatches, Model, ModelInterface
from weft.registry import backends
from weft.runtime.checkpoints import read_state, write_state
from weft.runtime.split import split
from weft.testing.datasets import build_small_tokenizer
from weft.topology import Layout

CALLS = ("generate", "inference", "evaluate", "train_step")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
TEXTS = {
    "What is 1+1?": ["2", "It is 3."],
    "Say hello.": ["Hello!", "No."],
    "Once": [" upon", " a time"],
}


def check_interface(
    cls: type[Any], *, batch: SequenceSample | None = None, head: Head = "lm", **args: Any
) -> None:
    """Check that an interface class behaves as weft requires.

    The interface is built as `cls(**args)` and called on a small random Llama. Raises
    `AssertionError` if a check fails.

    Each implemented method must return an `MFCResult` with finite metrics and with outputs for
    exactly the ids of the batch and a matching number of sequences. It must not modify the batch,
    and must return the same result when it is called again with the same weights. `generate` and
    `inference` must return the same outputs for an id alone as within a batch. A train step must
    increase the version of the weights by one. `load_state_dict` must restore the state that
    `state_dict` returned, after it was written to disk and read again. `save` must write at least
    one file.

    `batch` defaults to `build_small_batch()`. `head` is the network's head: lm, value or score.
    """
    assert isinstance(cls, type), f"{cls!r} is not a class; an interface is built as cls(**args)"
    methods = [name for name in CALLS if _has_method(cls, name)]
    assert methods, f"{cls.__name__} implements none of {', '.join(CALLS)}, so no node can call it"
    with tempfile.TemporaryDirectory() as folder:
        bench = InterfaceBench(
            cls, args, build_small_batch() if batch is None else batch, head, Path(folder)
        )
        for name in methods:
            _check_call(bench, name)
        if _has_method(cls, "state_dict") or _has_method(cls, "load_state_dict"):
            _check_state(bench, methods)
        if _has_method(cls, "save"):
            _check_save(bench)


@dataclass(frozen=True)
class InterfaceBench:
    """Interface class to check, together with the inputs that its methods are called with."""

    cls: type[Any]
    args: Mapping[str, Any]
    batch: SequenceSample
    head: Head
    folder: Path

    def build(self) -> Any:
        return self.cls(**self.args)

    def build_model(self) -> Model:
        """Return a random Llama with an optimizer and a byte-level tokenizer.

        The initial weights are the same in every call.
        """
        tokenizer = build_small_tokenizer()
        directory = self.folder / "model"
        if not directory.exists():
            directory.mkdir()
            (directory / "config.json").write_text(
                json.dumps({**CONFIG, "vocab_size": tokenizer.vocab_size})
            )
            tokenizer.save(directory)
        schedule = Schedule(total_steps=100, warmup_steps=0)
        spec = ModelSpec(
            path=str(directory),
            init_from_scratch=True,
            head=self.head,
            trained=True,
            schedule=schedule,
            device="cpu",
        )
        engine = backends.get("torch")(spec, Layout())
        return Model(
            "actor",
            engine,
            tokenizer,
            tokenizer,
            "cpu",
            "float32",
            step=1,
            seed=1,
            schedule=schedule,
        )

    def call(self, name: str, batch: SequenceSample | None = None) -> MFCResult:
        """Return the result of one call of the method `name`, on a new interface and a new model.

        `batch` defaults to the bench's batch.
        """
        return _call(self.build(), name, self.build_model(), self.batch if batch is None else batch)


def build_small_batch() -> SequenceSample:
    """Return a batch of three ids (prompts) with two completions each.

    The batch has all keys that the built-in datasets and nodes produce, except `support`.
    """
    tokenizer = build_small_tokenizer()
    prompts = [tokenizer.encode(text, bos=False) for text in TEXTS]
    groups = []
    for texts in TEXTS.values():
        groups.append([tokenizer.encode(text, bos=False) for text in texts])
    # Lengths of the completions; number of tokens, of completions and of ids.
    lengths = []
    for group in groups:
        lengths.append([len(c) for c in group])
    rows = sum(map(sum, lengths))
    count = sum(map(len, lengths))
    single = [[1] * len(group) for group in groups]
    pairs = len(groups)
    per_token = torch.linspace(-1.0, -0.1, rows)
    per_sequence = torch.linspace(-1.0, 1.0, count)
    keys: dict[str, tuple[Any, torch.Tensor]] = {
        "prompt": ([[len(p)] for p in prompts], _concatenate_sequences(prompts)),
        "completion": (lengths, _concatenate_sequences([c for group in groups for c in group])),
        "loss_mask": (lengths, torch.ones(rows)),
        "rank": (single, torch.tensor([0, 1] * pairs)),
        "comparison": (single, torch.zeros(count, dtype=torch.int64)),
        "margin": (single, torch.zeros(count)),
        "label": (single, torch.tensor([1.0, 0.0] * pairs)),
        "versions": (lengths, torch.zeros(rows, dtype=torch.int64)),
        "finished": (single, torch.ones(count)),
        "values": ([[n + 1 for n in group] for group in lengths], torch.zeros(rows + count)),
        "rewards": (single, per_sequence),
        "scores": (single, per_sequence),
    }
    keys |= dict.fromkeys(
        ("logprobs", "ref_logprobs", "advantages", "returns"), (lengths, per_token)
    )
    metadata = {"answer": ["2", "Hello!", "a time"], "source": ["small"] * pairs}
    return SequenceSample.from_groups(
        ["a", "b", "c"],
        {k: n for k, (n, _) in keys.items()},
        {k: v for k, (_, v) in keys.items()},
        metadata,
    )


def _has_method(cls: type[Any], method: str) -> bool:
    return any(method in vars(base) for base in cls.__mro__ if base is not ModelInterface)


def _call(interface: Any, name: str, model: Model, batch: SequenceSample) -> MFCResult:
    method: Callable[..., MFCResult] = getattr(interface, name)
    if name != "train_step":
        return method(model, batch)
    if _has_method(type(interface), "minibatches"):
        wanted = interface.minibatches()
    else:
        wanted = Minibatches()
    return method(
        model,
        [
            part
            for (part,) in split(
                batch, wanted, 1, seed=model.seed, role=model.role, step=model.step
            )
        ],
    )


def _check_call(bench: InterfaceBench, name: str) -> None:
    where = f"{bench.cls.__name__}.{name}"
    before = bench.batch.to_bytes()
    model = bench.build_model()
    result = _call(bench.build(), name, model, bench.batch)
    assert isinstance(result, MFCResult), (
        f"{where} returns a {type(result).__name__}, not an MFCResult"
    )
    assert bench.batch.to_bytes() == before, (
        f"{where} modifies its input batch; samples are immutable"
    )
    for metric, value in result.metrics.items():
        assert isinstance(value, int | float), (
            f"{where}: metric {metric!r} is a {type(value).__name__}, not a number"
        )
        assert math.isfinite(value), f"{where}: metric {metric!r} is {value}"
    trained = 1 if name == "train_step" else 0
    assert model.engine.version == trained, (
        f"{where}: the engine's version is {model.engine.version}, not {trained}"
    )
    if result.outputs is not None:
        _check_outputs(result.outputs, bench.batch, where)
    again = bench.call(name)
    _check_same(result.outputs, again.outputs, f"{where}, called again on the same weights")
    if name in ("generate", "inference") and result.outputs is not None:
        for id in bench.batch.ids:
            alone = bench.call(name, bench.batch.select(ids=[id]))
            _check_same(result.outputs.select(ids=[id]), alone.outputs, f"{where} on {id!r} alone")


def _check_outputs(outputs: SequenceSample, batch: SequenceSample, where: str) -> None:
    assert set(outputs.ids) == set(batch.ids), (
        f"{where}: outputs have the ids {sorted(outputs.ids)}, not {sorted(batch.ids)}"
    )
    assert outputs.keys, f"{where}: outputs have no key; return None if the call has no outputs"
    for key in outputs.keys:
        assert key in outputs.data, f"{where}: key {key!r} has lengths but no tensor"
    if "completion" in outputs.keys:
        return
    for key in outputs.keys:
        counts = [len(n) for n in outputs.select(ids=batch.ids).seqlens[key]]
        if "completion" in batch.keys:
            groups = [len(n) for n in batch.seqlens["completion"]]
        else:
            groups = counts
        fits = all(count in (1, group) for count, group in zip(counts, groups, strict=True))
        assert fits, f"{where}: key {key!r} has {counts} sequences for {groups} completions"


def _check_same(one: SequenceSample | None, other: SequenceSample | None, where: str) -> None:
    assert (one is None) == (other is None), f"{where}: only one of the two calls returned outputs"
    if one is None or other is None:
        return
    assert set(one.keys) == set(other.keys), (
        f"{where}: keys {sorted(one.keys)} and {sorted(other.keys)} differ"
    )
    other = other.select(ids=one.ids)
    for key in one.keys:
        same = one.lengths[key].tolist() == other.lengths[key].tolist()
        assert same, f"{where}: lengths of key {key!r} differ"
        try:
            torch.testing.assert_close(one.data[key], other.data[key])
        except AssertionError as error:
            raise AssertionError(f"{where}: key {key!r}: {error}") from error


def _check_state(bench: InterfaceBench, methods: Sequence[str]) -> None:
    for name in ("state_dict", "load_state_dict"):
        assert _has_method(bench.cls, name), (
            f"{bench.cls.__name__} has only one of state_dict and load_state_dict"
        )
    used = bench.build()
    fresh = bench.build()
    _call(used, methods[-1], bench.build_model(), bench.batch)
    for name, interface in (("one", used), ("two", fresh)):
        write_state(bench.folder / name, interface.state_dict())
    fresh.load_state_dict(read_state(bench.folder / "one"))
    write_state(bench.folder / "two", fresh.state_dict())
    same = (bench.folder / "one").read_bytes() == (bench.folder / "two").read_bytes()
    assert same, (
        f"{bench.cls.__name__}: load_state_dict does not restore the state that state_dict returned"
    )


def _check_save(bench: InterfaceBench) -> None:
    directory = bench.folder / "saved"
    directory.mkdir()
    bench.build().save(bench.build_model(), directory)
    assert any(directory.iterdir()), f"{bench.cls.__name__}.save leaves its directory empty"


def _concatenate_sequences(sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.tensor([token for ids in sequences for token in ids], dtype=torch.int64)
