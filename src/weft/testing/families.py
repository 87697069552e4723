"""Check a model family: `check_family(MY_FAMILY)` raises `AssertionError` on failure.

The built-in families pass the same check. weft's network is compared with a tiny random
`transformers` model (float32, CPU): the logits, log-probs, gradients of all parameters and
classifier scores must agree. `transformers` must also load the directory that weft saves as the
same model.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.testing import assert_close

from weft.checkpoints import hf_io
from weft.models.families.base import Family
from weft.models.kv.slots import KVCache
from weft.models.network.linear import find_canonical_parameters, find_canonical_values
from weft.models.network.packed import pack
from weft.models.network.transformer import Transformer
from weft.registry import families

LENGTHS = (5, 17, 1, 12, 30, 17)
LOGPROBS = frozenset({"logprobs"})
SCORES = frozenset({"scores"})


def check_family(family: Family, *, seed: int = 0, **overrides: Any) -> None:
    """Check that a model family agrees with the corresponding model of `transformers`.

    The family must be registered, and `transformers` must know its `model_type`. `overrides`
    replace values of the family's `tiny` config.json. No network access is needed. Prints one line
    that lists the checks. Raises `AssertionError` if a check fails.
    """
    assert families.get(family.name) is family, (
        f"{family.name} is not registered; call register_hf_family"
    )
    with _disable_progress_bars(), tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        reference = build_reference_model(family, "lm", seed, overrides)
        reference.save_pretrained(directory / "theirs")
        check_config(family, reference)
        check_language_model(family, reference, directory, seed)
        check_parts(directory / "theirs")
        if family.classifier is not None:
            check_classifier(family, directory, seed, overrides)
        count = sum(parameter.numel() for parameter in reference.parameters())
    if family.classifier is not None:
        scored = "scores of classifiers saved by both"
    else:
        scored = "no classifier (the family has none)"
    print(
        f"check_family({family.name}), a random model of {count:,} parameters compared with "
        f"transformers {transformers.__version__}: config.json both ways; logits, log-probs and the gradient "
        f"of every parameter; packed, "
        f"one by one and cached passes; a saved model read back; partial reads; {scored}"
    )


@contextmanager
def _disable_progress_bars() -> Iterator[None]:
    """Disable the progress bars of `transformers` while the context is open."""
    was_enabled = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers.utils.logging.enable_progress_bar()


def build_reference_model(
    family: Family, head: str, seed: int, overrides: Mapping[str, Any]
) -> Any:
    """Return a tiny `transformers` model to compare with, on the CPU.

    Random noise is added to all parameters, including biases and norms, so that none keeps a
    trivial value. `head` is "lm", or "score" for a reward model.
    """
    values = {**family.tiny, "pad_token_id": 0, **overrides}
    config = transformers.AutoConfig.for_model(family.name, **values)
    config._attn_implementation = "eager"
    if head == "lm":
        model = transformers.AutoModelForCausalLM.from_config(config)
    else:
        config.num_labels = 1
        model = transformers.AutoModelForSequenceClassification.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()


def check_config(family: Family, reference: Any) -> None:
    """Check that writing and reading config.json preserves the family's configuration.

    `transformers` must also understand the written values in the same way.
    """
    config = family.config(reference.config.to_dict())
    written = family.to_hf(config)
    assert family.config(written) == config, (
        "the configuration differs after writing and reading it"
    )
    theirs = transformers.AutoConfig.for_model(**written).to_dict()
    assert family.config(theirs) == config, (
        "transformers reads the written configuration differently"
    )


def check_language_model(family: Family, reference: Any, directory: Path, seed: int) -> None:
    """Compare logits, log-probs and gradients with the `transformers` model `reference`.

    Packed, single-sequence and cached passes must agree. The model saved by weft is then loaded in
    `transformers` and compared again.
    """
    network = hf_io.load(directory / "theirs")
    sequences = _make_sequences(network.config.vocab_size, seed)
    _check_values(network, reference, sequences)
    check_gradients(family, network, reference, sequences)
    check_cache(network, sequences)
    hf_io.save(directory / "ours", find_canonical_values(network), network.config)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        directory / "ours", attn_implementation="eager"
    )
    _check_values(network, again.eval(), sequences)
    if network.config.tied:
        assert again.get_input_embeddings().weight is again.get_output_embeddings().weight, (
            "tied embeddings came apart"
        )
    for name, value in reference.state_dict().items():
        assert_close(
            again.state_dict()[name], value, rtol=0, atol=0, msg=f"{name} differs after saving"
        )


@torch.no_grad()
def _check_values(network: Transformer, reference: Any, sequences: list[Tensor]) -> None:
    packed = pack(sequences)
    logprobs = network(packed, LOGPROBS)["logprobs"]
    logits = network.next_token_logits(network.compute_hidden(packed))
    theirs = [reference(s[None]).logits[0].float() for s in sequences]
    assert_close(logits, torch.cat(theirs), msg=lambda m: f"logits: {m}")
    assert_close(
        logprobs, _compute_naive_logprobs(theirs, sequences), msg=lambda m: f"log-probs: {m}"
    )
    alone = torch.cat([network(pack([s]), LOGPROBS)["logprobs"] for s in sequences])
    assert_close(logprobs, alone, msg=lambda m: f"packed and one by one: {m}")


def check_gradients(
    family: Family, network: Transformer, reference: Any, sequences: list[Tensor]
) -> None:
    """Compare the gradient of every parameter with that in `reference`.

    The loss is a weighted mean of log-probs. Parameters are matched by their names in the
    checkpoint.
    """
    reference = copy.deepcopy(reference)
    weights = torch.cos(torch.arange(sum(len(s) - 1 for s in sequences)))
    network.zero_grad()
    reference.zero_grad()
    (network(pack(sequences), LOGPROBS)["logprobs"] * weights).mean().backward()
    theirs = [reference(s[None]).logits[0].float() for s in sequences]
    (_compute_naive_logprobs(theirs, sequences) * weights).mean().backward()
    with tempfile.TemporaryDirectory() as folder:
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.copy_(
                    torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                )
        reference.save_pretrained(folder)
        reader = hf_io.ParameterReader(folder)
        for name, stored in find_canonical_parameters(network).items():
            assert stored.grad is not None, f"{name} has no gradient"
            assert_close(stored.grad, reader.read(name), msg=f"gradients of {name} differ")
            assert stored.grad.abs().max() > 0, f"the gradient of {name} is zero"


@torch.no_grad()
def check_cache(network: Transformer, sequences: list[Tensor]) -> None:
    """Check that decoding with a KV cache yields the hidden states of a pass without a cache.

    The prompt is prefilled in two chunks, and the remaining tokens are decoded one at a time.
    """
    long = [s[:12] for s in sequences if len(s) >= 12]
    whole = [network.compute_hidden(pack([s])) for s in long]
    cache = KVCache(network.config, "cpu", torch.float32, slots=1, room=4)
    slots = cache.allocate(len(long))
    network.compute_hidden(cache.extend(slots, [s[: 4 + i] for i, s in enumerate(long)]))
    network.compute_hidden(cache.extend(slots, [s[4 + i : 9] for i, s in enumerate(long)]))
    for place in range(9, 12):
        states = network.compute_hidden(cache.extend(slots, torch.stack([s[place] for s in long])))
        assert_close(
            states, torch.stack([w[place] for w in whole]), msg=lambda m: f"with a cache: {m}"
        )


def check_parts(directory: Path) -> None:
    """Check that each parameter, or a slice of it, can be read without reading other bytes.

    Only the parameters of layer 1 of the checkpoint in `directory` are read. Also checks that the
    embedding, the layers and the head together have all parameters of the checkpoint.
    """
    reader = hf_io.ParameterReader(directory)
    names = reader.keymap.list_names("block", layer=1)
    assert names, "the key map has no block 1"
    for name in names:
        before = reader.bytes_read
        value = reader.read(name)
        assert reader.bytes_read - before == value.numel() * value.element_size(), (
            f"reading {name} reads more than its bytes"
        )
        half = tuple(slice(n // 2, n) for n in value.shape)
        before = reader.bytes_read
        part = reader.read(name, half)
        assert torch.equal(part, value[half]), f"reading half of {name} returns other values"
        assert reader.bytes_read - before == part.numel() * part.element_size(), (
            f"reading half of {name} reads more than its bytes"
        )
    parts = [n for part in ("embedding", "block", "head") for n in reader.keymap.list_names(part)]
    assert sorted(parts) == sorted(reader.keymap.keys), (
        "the parts (embedding, blocks, head) are not the whole checkpoint"
    )


@torch.no_grad()
def check_classifier(
    family: Family, directory: Path, seed: int, overrides: Mapping[str, Any]
) -> None:
    """Check that weft and `transformers` compute the same scores for a reward model.

    The model is saved by `transformers` and loaded by weft, and the other way round.
    """
    reference = build_reference_model(family, "score", seed, overrides)
    reference.save_pretrained(directory / "reward")
    network = hf_io.load(directory / "reward", "score")
    sequences = [
        s.clamp_min(1) for s in _make_sequences(network.config.vocab_size, seed)
    ]  # transformers treats id 0 as padding
    scores = network(pack(sequences), SCORES)["scores"]
    assert_close(
        scores,
        torch.cat([reference(s[None]).logits[0] for s in sequences]),
        msg=lambda m: f"scores: {m}",
    )
    hf_io.save(directory / "ours-reward", find_canonical_values(network), network.config, "score")
    again = transformers.AutoModelForSequenceClassification.from_pretrained(
        directory / "ours-reward", attn_implementation="eager"
    )
    assert again.config.num_labels == 1
    assert_close(
        scores,
        torch.cat([again.eval()(s[None]).logits[0] for s in sequences]),
        msg=lambda m: f"saved: {m}",
    )


def _make_sequences(vocab_size: int, seed: int) -> list[Tensor]:
    """Return random sequences of token ids, without the id 0.

    Id 0 is the padding token of the reference model, and `transformers` gives its embedding no
    gradient.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    return [torch.randint(1, vocab_size, (n,), generator=generator) for n in LENGTHS]


def _compute_naive_logprobs(logits: list[Tensor], sequences: list[Tensor]) -> Tensor:
    pairs = zip(logits, sequences, strict=True)
    return torch.cat([x[:-1].log_softmax(-1).gather(1, s[1:, None])[:, 0] for x, s in pairs])
