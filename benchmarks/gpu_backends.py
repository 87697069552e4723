"""What `benchmarks/gpu.py` times: weft's engine and `transformers` on the same random weights'
shape, on one device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

LLAMA_3_2_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
TINY = {
    **LLAMA_3_2_1B,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA_3_1_8B = {
    **LLAMA_3_2_1B,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "tie_word_embeddings": False,
    "rope_scaling": {**LLAMA_3_2_1B["rope_scaling"], "factor": 8.0},
}
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
TINY_QWEN3 = {
    **QWEN3_0_6B,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@dataclass(frozen=True)
class Sizes:
    """How much of everything; `times` timed steps."""

    config: dict[str, Any]
    sft: tuple[int, ...]  # lengths of the sequences of one step
    mixed: tuple[int, ...]  # the same, of all lengths
    ragged: tuple[int, ...]  # what is compared with transformers
    # a smaller model, and lengths of the sequences of one step
    long: tuple[dict[str, Any], tuple[int, ...]]
    adapted: tuple[dict[str, Any], tuple[int, ...]]  # a larger model with adapters, and the same
    # numbers of sequences, and last the tokens of context around the timed steps
    decode: tuple[int, ...]
    compared: int  # that of them at which generate is timed
    decode_steps: int
    rollout: tuple[int, int, int]  # completions, tokens of a prompt, most tokens of a completion
    # prompts, tokens of a prompt, completions of each, tokens of a completion
    grpo: tuple[int, int, int, int]
    times: int
    matmul: int  # rows and columns of the products that stand for the peak
    copied: int  # bytes


@dataclass(frozen=True)
class Where:
    device: torch.device
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], object], times: int, warm: int = 0) -> list[float]:
        """Of `times` calls after `warm` others, until the device is done."""
        found = []
        for _ in range(warm + times):
            self.wait()
            begin = time.perf_counter()
            run()
            self.wait()
            found.append(time.perf_counter() - begin)
        return found[warm:]


def products(where: Where, size: int, times: int) -> float:
    """Operations a second of square products: the best of them."""
    one, other = (
        torch.randn(size, size, device=where.device, dtype=where.torch_dtype) for _ in range(2)
    )
    out = torch.empty_like(one)
    return 2.0 * size**3 / min(where.seconds(lambda: torch.mm(one, other, out=out), times, warm=3))


def bandwidth(where: Where, copied: int, times: int) -> float:
    """Bytes a second of copies, those read and those written: the best of them."""
    source = torch.ones(copied // 4, device=where.device)
    target = torch.empty_like(source)
    return 2.0 * copied / min(where.seconds(lambda: target.copy_(source), times, warm=3))


# -- weft


def engine(raw: dict[str, Any], where: Where, *, trained: bool, **options: Any) -> Any:
    """weft's engine with random weights, as the backend `torch` would build it from a directory
    with this config.json. `options` are those of a role, such as `compile=True`.
    """
    from weft.checkpoints import hf_io
    from weft.models.network.transformer import Transformer

    config = hf_io.find_family(raw, None).config(raw)
    dtype = torch.float32 if trained else where.torch_dtype
    network = Transformer.build_empty(config, device=where.device, dtype=dtype)
    fill(network)
    return _built(network, raw, where, trained=trained, **options)


def adapted(raw: dict[str, Any], where: Where, rank: int) -> Any:
    """The same with adapters on every linear layer; the weights beneath are frozen, in the role's
    dtype.
    """
    from weft.checkpoints import hf_io
    from weft.engine.spec_parts import LoRASpec
    from weft.models.network import lora
    from weft.models.network.transformer import Transformer

    config = hf_io.find_family(raw, None).config(raw)
    network = Transformer.build_empty(config, device=where.device, dtype=where.torch_dtype)
    fill(network)
    lora.attach(network, r=rank, alpha=2.0 * rank)
    return _built(network, raw, where, trained=True, lora=LoRASpec(r=rank, alpha=2.0 * rank))


def engine_of(path: Path, where: Where) -> Any:
    """The same with the weights of a directory, trained."""
    from weft.checkpoints import hf_io

    network = hf_io.load(path, device=where.device)
    return _built(network, hf_io.read_raw(path), where, trained=True)


def _built(
    network: Any, raw: dict[str, Any], where: Where, *, trained: bool, **options: Any
) -> Any:
    from weft.engine.backends import common
    from weft.engine.backends.torch import compute_cost
    from weft.engine.spec import ModelSpec, Schedule
    from weft.engine.torch.engine import BuiltNetwork, TorchEngine
    from weft.models.network.transformer import compile_blocks
    from weft.topology import Layout

    schedule = Schedule(10_000, 0) if trained else None
    spec = ModelSpec(
        device=str(where.device), dtype=where.dtype, trained=trained, schedule=schedule, **options
    )
    if spec.compile:
        common.check_compile(spec, Layout(), where.device)
        compile_blocks(network, fp8=common.build_fp8_product(spec, where.device))
    if not spec.has_adapters:
        network.requires_grad_(trained)
    config = network.config
    facts = {
        "family": raw["model_type"],
        "vocab_size": config.vocab_size,
        "num_layers": config.num_layers,
    }
    built = BuiltNetwork(
        network=network,
        save=refuse_saving,
        cost=compute_cost(network, frozen=spec.has_adapters),
        facts=facts,
    )
    return TorchEngine(built, spec, Layout(), where.device)


def operations(made: Any, lengths: Iterable[int]) -> float:
    """Floating-point operations of a training step on sequences as `batch_of` makes them, whose
    first token is given.
    """
    import numpy

    sizes = numpy.array(list(lengths))
    return float(made._built.cost.count_training_flops(sizes, rows=float(sizes.sum() - len(sizes))))


def gradients(made: Any, batch: Any) -> dict[str, torch.Tensor]:
    """Canonical name -> the gradient of the mean log-prob, in host memory; no step is made."""
    from weft.algorithms.sft import SFTLoss

    found: dict[str, torch.Tensor] = {}

    def keep(_: object) -> str:
        found.update(
            {
                name: value.float().cpu()
                for name, value in made._optimizer.collect_gradients().items()
            }
        )
        return "only looked at"

    made.train(
        [batch], SFTLoss(), veto=keep, max_tokens=batch.num_tokens() + batch.num_tokens("prompt")
    )
    return found


def of_length(request: Any, tokens: int) -> Any:
    from dataclasses import replace

    return replace(request, max_new_tokens=tokens)


def fill(network: torch.nn.Module) -> None:
    """Random values drawn on the device: matrices of 0.02, norms of 1."""
    generators: dict[torch.device, torch.Generator] = {}
    with torch.no_grad():
        for parameter in network.parameters():
            device = parameter.device
            generator = generators.setdefault(device, torch.Generator(device=device).manual_seed(0))
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=0.02, generator=generator)


def refuse_saving(*_: Any) -> None:
    raise NotImplementedError("a benchmark's weights are not kept")


def network_of(made: Any) -> Any:
    return made._network


def batch_of(lengths: Iterable[int], vocabulary: int) -> Any:
    """Sequences of random tokens: a prompt of one token, and a completion."""
    from weft.data.sample import SequenceSample

    sizes = list(lengths)
    random = torch.Generator().manual_seed(0)
    data = {
        "prompt": torch.ones(len(sizes), dtype=torch.int64),
        "completion": torch.randint(3, vocabulary, (sum(sizes) - len(sizes),), generator=random),
    }
    counts = {"prompt": [[1] for _ in sizes], "completion": [[size - 1] for size in sizes]}
    return SequenceSample.from_groups([str(i) for i in range(len(sizes))], counts, data)


def requests(count: int, prompt: int, samples: int, vocabulary: int) -> list[Any]:
    """`samples` completions each of `count` random prompts."""
    from weft.engine.base import Request

    random = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, vocabulary, (count, prompt), generator=random).tolist()
    return [
        Request(id=str(i), k=k, prompt=tokens)
        for i, tokens in enumerate(prompts)
        for k in range(samples)
    ]


def drain(generator: Any) -> dict[tuple[str, int], list[Any]]:
    rows: dict[tuple[str, int], list[Any]] = {}
    while not generator.idle:
        for event in generator.step():
            rows.setdefault((event.id, event.k), []).append(event)
    return rows


def kernels(where: Where, head_dim: int) -> dict[str, Any]:
    """Which of the fused kernels weft uses here."""
    from weft.kernels import flash, flex

    served = flash.serves(where.device, where.torch_dtype, head_dim)
    return {
        "flash": served,
        "flash_reads_pages": served and flash.find_features().block_table,
        "flex": flex.serves(where.device, head_dim),
    }


def training_attention(where: Where, config: Any) -> str:
    """The kernel that computes attention over a pack."""
    from weft.kernels import flash, flex

    if config.attention_softcap is not None and flex.serves(where.device, config.head_dim):
        return "FlexAttention over packs"
    if config.attention_softcap is None and flash.serves(
        where.device, where.torch_dtype, config.head_dim
    ):
        return f"flash attention {flash.find_version()} over packs"
    return "scaled_dot_product_attention" if where.device.type == "cuda" else "weft's CPU kernel"


def decoding_attention(generator: Any, where: Where) -> str:
    """The kernel that computes attention in the decode steps of a generator: torch 2.11 has no
    flash attention over pages.
    """
    from weft.engine.generation.caches import PageCaches
    from weft.kernels import flash

    if not isinstance(generator._caches, PageCaches):
        return (
            "scaled_dot_product_attention over slots"
            if where.device.type == "cuda"
            else "weft's CPU kernel"
        )
    config = generator._network.config
    plain = config.attention_softcap is None and flash.serves(
        where.device, where.torch_dtype, config.head_dim
    )
    if plain and flash.find_features().block_table:
        return f"flash attention {flash.find_version()} over pages"
    return "FlexAttention over pages"


def room(made: Any, longest: int, most: int, spec: Any) -> int:
    """How many sequences of `longest` tokens a generator holds at once, `most` at most: none of
    them is preempted.
    """
    with made.generating(spec) as generator:
        blocks, admitted = generator._caches.blocks, 0
        while admitted < most and blocks.admit(("room", admitted), longest):
            admitted += 1
        for index in range(admitted):
            blocks.release(("room", index))
    return admitted


def preempted(generator: Any) -> int:
    """How often a sequence lost its keys and values, which were computed again."""
    count: int = generator._scheduler.num_preempted
    return count


def graphs_of(generator: Any) -> Any:
    """The captured graphs of a generator, or None where its device has none."""
    return getattr(getattr(generator, "_caches", None), "graphs", None)


def sample_of(asked: list[Any], rows: dict[tuple[str, int], list[Any]], samples: int) -> Any:
    """What the generate call hands on: prompts, completions, and the log-probs as sampled."""
    from weft.data.sample import SequenceSample

    leaders = asked[::samples]
    events = [event for request in asked for event in rows[request.id, request.k]]
    sizes = [len(rows[request.id, request.k]) for request in asked]
    grouped = [sizes[i : i + samples] for i in range(0, len(sizes), samples)]
    data = {
        "prompt": torch.tensor([token for request in leaders for token in request.prompt]),
        "completion": torch.tensor([event.token for event in events]),
        "logprobs": torch.tensor([event.logprob for event in events], dtype=torch.float32),
    }
    lengths = {
        "prompt": [[len(request.prompt)] for request in leaders],
        "completion": grouped,
        "logprobs": grouped,
    }
    return SequenceSample.from_groups([request.id for request in leaders], lengths, data)


# -- transformers


def reference(raw: dict[str, Any], where: Where, attention: str, *, trained: bool) -> Any:
    """`transformers`' model with random weights: float32 under autocast where it is trained, else
    in the role's dtype.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    plain = {key: value for key, value in raw.items() if key not in ("model_type", "architectures")}
    config = AutoConfig.for_model(raw["model_type"], **plain)
    dtype = torch.float32 if trained else where.torch_dtype
    with where.device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    model.generation_config.eos_token_id = None
    return model.train(trained)


def saved_reference(raw: dict[str, Any], where: Where, folder: Path) -> Any:
    """A model of random weights, saved in the role's dtype and then float32: the exact form of what
    the file holds.
    """
    torch.manual_seed(0)
    model = reference(raw, where, "sdpa", trained=False)
    model.save_pretrained(folder)
    return model.float().train()


def exact(model: Any, batch: Any, names: list[str]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(log-probs of the completions, gradients of their negative mean by name), in float32, one
    sequence after the other. `{last}` in a name is the last layer.
    """
    last = model.config.num_hidden_layers - 1
    wanted = [name.format(last=last) for name in names]
    prompts, completions = batch.sequences("prompt"), batch.sequences("completion")
    total, found = sum(len(each) for each in completions), []
    model.zero_grad()  # of a batch before, whose gradients were handed out
    tf32, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.cat([prompt, completion])[None].to(model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        logprobs = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        (-logprobs.sum() / total).backward()
        found.append(logprobs.detach().cpu())
    torch.backends.cuda.matmul.allow_tf32 = tf32
    named = dict(model.named_parameters())
    return torch.cat(found), {name: named[name].grad.float().cpu() for name in wanted}


def trainers(where: Where) -> list[tuple[str, bool]]:
    """(attention, compiled): the ways in which people train; compiling takes longer than it saves
    where there is no GPU.
    """
    ways = [(attention, False) for attention in attentions(where)]
    return [*ways, ("sdpa", True)] if where.device.type == "cuda" else ways


def caches(where: Where) -> list[str]:
    """The caches of `generate`; `transformers` compiles the steps on a static one."""
    return ["dynamic", "static"] if where.device.type == "cuda" else ["dynamic"]


def attentions(where: Where) -> list[str]:
    """The kinds that may be the best one here."""
    import importlib.util

    flash = where.device.type == "cuda" and importlib.util.find_spec("flash_attn") is not None
    return ["sdpa", "flash_attention_2"] if flash else ["sdpa"]


def train_step(
    model: Any, lengths: tuple[int, ...], vocabulary: int, where: Where, *, compiled: bool = False
) -> Callable[[], None]:
    """One optimizer step on sequences of one length, so that nothing is padded."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocabulary, (len(lengths), lengths[0]), generator=random).to(
        where.device
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    mixed = where.torch_dtype != torch.float32
    if compiled:
        model.compile()

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(where.device.type, where.torch_dtype, enabled=mixed):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def decode_seconds(
    model: Any, batch: int, prompt: int, times: int, where: Where, cache: str
) -> float:
    """Seconds of a decode step of `generate`: what `times` more new tokens take."""
    ids = torch.full((batch, prompt), 5, device=where.device)
    mask = torch.ones_like(ids)

    def generate(new: int) -> float:
        def run() -> None:
            with torch.no_grad():
                model.generate(
                    ids,
                    attention_mask=mask,
                    do_sample=True,
                    top_k=0,
                    top_p=1.0,
                    temperature=1.0,
                    pad_token_id=0,
                    max_new_tokens=new,
                    min_new_tokens=new,
                    cache_implementation=cache,
                )

        return statistics.median(where.seconds(run, 3, warm=1))

    return (generate(times + 1) - generate(1)) / times
