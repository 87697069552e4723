"""AdamW whose moments take less memory than float32: in bfloat16, rounded at random, or in 8 bits
by `bitsandbytes`.

Weight decay and clipping are the caller's. The arithmetic is float32; only what is kept from one
step to the next is narrow.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from weft.engine.spec import STATE_LIBRARY
from weft.engine.torch.states import SCALES, State, blocks
from weft.engine.torch.update_rules import Eager
from weft.randomness import key

MOMENTS = ("exp_avg", "exp_avg_sq")
BLOCK = 256  # elements that have one scale
# elements of a parameter whose moments are coded; norms and biases stay in float32
LEAST_CODED = 4096
# elements updated at once, which bounds what they take in float32 meanwhile; a multiple of BLOCK
PIECE = 2**24


@dataclass(frozen=True)
class Rule:
    """One step of Adam (Kingma & Ba 2015, arXiv:1412.6980, algorithm 1), the `number`-th of a
    parameter, from 1.
    """

    number: int
    lr: float
    beta1: float
    beta2: float
    eps: float

    def update(self, values: Tensor, gradient: Tensor, mean: Tensor, square: Tensor) -> None:
        """All of one dtype, in place: moments first, then values."""
        mean.lerp_(gradient, 1.0 - self.beta1)
        square.mul_(self.beta2).addcmul_(gradient, gradient, value=1.0 - self.beta2)
        divisor = square.sqrt().div_(math.sqrt(1.0 - self.beta2**self.number)).add_(self.eps)
        values.addcdiv_(mean, divisor, value=-self.lr / (1.0 - self.beta1**self.number))


class Moments(Protocol):
    """How the moments of a parameter are kept, and updated so."""

    def new(self, parameter: nn.Parameter) -> State:
        """Zeros."""
        ...

    def update(self, parameter: nn.Parameter, state: State, rule: Rule) -> None: ...

    def saved(self, state: State) -> State:
        """Values of the parameter's shape, and what makes them exactly what they were when they
        come back.
        """
        ...

    def taken(self, parameter: nn.Parameter, saved: State) -> State:
        """A state of these values, in whatever form they were saved."""
        ...


class PlainMoments:
    """As they are, in the parameter's own dtype."""

    def new(self, parameter: nn.Parameter) -> State:
        return {name: torch.zeros_like(parameter, requires_grad=False) for name in MOMENTS}

    def update(self, parameter: nn.Parameter, state: State, rule: Rule) -> None:
        for piece in _pieces(parameter, *(state[name] for name in MOMENTS)):
            rule.update(*piece)

    def saved(self, state: State) -> State:
        return dict(state)

    def taken(self, parameter: nn.Parameter, saved: State) -> State:
        return {name: saved[name].to(parameter.device, parameter.dtype) for name in MOMENTS}


class BFloat16Moments:
    """In bfloat16, rounded up or down at random so that the expected value is the exact one (Gupta
    et al. 2015, arXiv:1502.02551).

    A moving average with beta2 = 0.999 moves by a thousandth of the difference, less than half of
    bfloat16's last bit: rounded to the nearest it would stand still. A compensated sum would not,
    but what it keeps besides takes the memory that is to be saved. Numbers are drawn from the
    parameter's name and the step, so that copies of a parameter on several ranks stay equal, and a
    run that goes on draws what it would have drawn.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names  # by the parameter's identity
        self._generators: dict[torch.device, torch.Generator] = {}

    def new(self, parameter: nn.Parameter) -> State:
        return {
            name: torch.zeros_like(parameter, dtype=torch.bfloat16, requires_grad=False)
            for name in MOMENTS
        }

    def update(self, parameter: nn.Parameter, state: State, rule: Rule) -> None:
        device = parameter.device
        generator = self._generators.setdefault(device, torch.Generator(device))
        low, high = key(0, "round optimizer states", rule.number, self._names[id(parameter)])
        generator.manual_seed(int(low) | (int(high) & 0x7FFFFFFF) << 32)
        for values, gradient, *kept in _pieces(parameter, *(state[name] for name in MOMENTS)):
            exact = [each.to(values.dtype) for each in kept]
            rule.update(values, gradient, *exact)
            for each, value in zip(kept, exact, strict=True):
                each.copy_(rounded_at_random(value, generator))

    def saved(self, state: State) -> State:
        return dict(state)

    def taken(self, parameter: nn.Parameter, saved: State) -> State:
        return {name: saved[name].to(parameter.device, torch.bfloat16) for name in MOMENTS}


class CodedMoments:
    """In 8 bits: a code an element and a float32 scale a block (Dettmers et al. 2022,
    arXiv:2110.02861), as `bitsandbytes` keeps and updates them.

    What is saved are their values in float32, which fit any layout. The scales go with them: where
    blocks begin at the same places, codes come out as they were.
    """

    def __init__(self) -> None:
        # it warns of kernels that nobody asked for
        logging.getLogger(STATE_LIBRARY).setLevel(logging.ERROR)
        self._library: Any = importlib.import_module(f"{STATE_LIBRARY}.functional")
        self._levels: dict[tuple[str, torch.device], Tensor] = {}

    def new(self, parameter: nn.Parameter) -> State:
        state: State = {}
        for name in MOMENTS:
            state[name] = torch.zeros_like(parameter, dtype=torch.uint8, requires_grad=False)
            state[name + SCALES] = parameter.new_zeros(
                blocks(parameter.numel(), BLOCK), requires_grad=False
            )
        return state

    def update(self, parameter: nn.Parameter, state: State, rule: Rule) -> None:
        assert parameter.grad is not None
        mean, square = (self.levels(name, parameter.device) for name in MOMENTS)
        codes = [state[name].view(-1).split(PIECE) for name in MOMENTS]
        scales = [state[name + SCALES].split(PIECE // BLOCK) for name in MOMENTS]
        values = parameter.view(-1).split(PIECE)
        gradients = parameter.grad.reshape(-1).split(PIECE)
        for value, gradient, m, v, of_m, of_v in zip(
            values, gradients, *codes, *scales, strict=True
        ):
            self._library.optimizer_update_8bit_blockwise(
                "adam",
                gradient,
                value,
                m,
                v,
                rule.beta1,
                rule.beta2,
                0.0,
                0.0,
                rule.eps,
                rule.number,
                rule.lr,
                mean,
                square,
                of_m,
                of_v,
            )

    def levels(self, name: str, device: torch.device) -> Tensor:
        """[256], rising: the values of the codes of blocks whose scale is 1."""
        if (name, device) not in self._levels:
            made = self._library.create_dynamic_map(signed=name == MOMENTS[0])
            self._levels[name, device] = made.to(device=device, dtype=torch.float32)
        return self._levels[name, device]

    def saved(self, state: State) -> State:
        made: State = {}
        for name in MOMENTS:
            codes = state[name].cpu()
            scales = state[name + SCALES].cpu()
            made[name] = decoded(codes, scales, self.levels(name, codes.device))
            made[name + SCALES] = scales
        return made

    def taken(self, parameter: nn.Parameter, saved: State) -> State:
        made: State = {}
        for name in MOMENTS:
            values = saved[name].to(parameter.device, torch.float32)
            scales = saved.get(name + SCALES)
            known = None if scales is None else scales.to(values.device)
            made[name], made[name + SCALES] = coded(values, known, self.levels(name, values.device))
        return made


class NarrowAdamW(Eager):
    """AdamW without weight decay; `moments_of` says how those of each parameter are kept."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        moments_of: Callable[[nn.Parameter], Moments],
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps})
        self._moments = {id(parameter): moments_of(parameter) for parameter in parameters}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = closure() if closure else None
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                moments = self._moments[id(parameter)]
                if not state:
                    # on the host: read without waiting
                    state.update(moments.new(parameter), step=torch.zeros(()))
                state["step"] += 1
                beta1, beta2 = group["betas"]
                moments.update(
                    parameter,
                    state,
                    Rule(int(state["step"]), group["lr"], beta1, beta2, group["eps"]),
                )
        return loss

    def saved(self, parameter: nn.Parameter, state: State) -> State:
        """What is written of a parameter's state, which may lie elsewhere than the parameter."""
        return {**self._moments[id(parameter)].saved(state), "step": state["step"]}

    def taken(self, parameter: nn.Parameter, saved: State) -> State:
        return {
            **self._moments[id(parameter)].taken(parameter, saved),
            "step": saved["step"].cpu().clone(),
        }


def make(
    state_dtype: str,
    parameters: Mapping[nn.Parameter, str],
    embeddings: Collection[nn.Parameter],
    lr: float,
    betas: tuple[float, float],
    eps: float,
) -> NarrowAdamW:
    """With states in `state_dtype` (`bfloat16`, `8bit`) of parameters that have these names.

    In 8 bits embeddings keep float32: rows of rare tokens have gradients much unlike their
    neighbours'.
    """
    if state_dtype == "bfloat16":
        narrow: Moments = BFloat16Moments(
            {id(parameter): name for parameter, name in parameters.items()}
        )
        wide: set[int] = set()
    else:
        narrow = CodedMoments()
        wide = {id(each) for each in embeddings}
        wide |= {
            id(each)
            for each in parameters
            if each.numel() < LEAST_CODED or each.dtype != torch.float32
        }
    plain = PlainMoments()
    return NarrowAdamW(
        [*parameters], lr, betas, eps, lambda each: plain if id(each) in wide else narrow
    )


def rounded_at_random(values: Tensor, generator: torch.Generator) -> Tensor:
    """float32 to bfloat16, up with the probability of what is cut off as a share of the last bit.

    Others are float32 first.
    """
    bits = values.float().view(torch.int32)
    noise = torch.empty_like(bits).random_(0, 2**16, generator=generator)
    return (bits + noise).bitwise_and_(-(2**16)).view(torch.float32).to(torch.bfloat16)


def decoded(codes: Tensor, scales: Tensor, levels: Tensor) -> Tensor:
    """float32, of the shape of `codes`: level times scale."""
    made = torch.empty(codes.numel(), dtype=torch.float32, device=codes.device)
    per_piece = zip(
        made.split(PIECE), codes.view(-1).split(PIECE), scales.split(PIECE // BLOCK), strict=True
    )
    for to, code, scale in per_piece:
        torch.mul(levels[code.int()], _spread(scale, len(to)), out=to)
    return made.view(codes.shape)


def coded(values: Tensor, scales: Tensor | None, levels: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scales) nearest to the values.

    A block keeps its given scale where the values come of it exactly, and has otherwise its largest
    magnitude.
    """
    flat = values.reshape(-1)
    codes = torch.empty(flat.numel(), dtype=torch.uint8, device=values.device)
    own = values.new_empty(blocks(flat.numel(), BLOCK))
    between = (levels[1:] + levels[:-1]) / 2
    if scales is None:
        given = own.split(PIECE // BLOCK)
    else:
        given = scales.split(PIECE // BLOCK)
    for to, scale, value, known in zip(
        codes.split(PIECE), own.split(PIECE // BLOCK), flat.split(PIECE), given, strict=True
    ):
        rows = nn.functional.pad(value, (0, -len(value) % BLOCK)).view(-1, BLOCK)
        most = rows.abs().amax(1)
        if scales is not None:
            made = _nearest(rows, known, between)
            same = (levels[made.int()] * known[:, None] == rows).all(1)
            most = torch.where(same, known, most)
        scale.copy_(most)
        to.copy_(_nearest(rows, most, between).view(-1)[: len(value)])
    return codes.view(values.shape), own


def _nearest(rows: Tensor, scales: Tensor, between: Tensor) -> Tensor:
    shares = rows / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    return torch.bucketize(shares, between).to(torch.uint8)


def _spread(scales: Tensor, count: int) -> Tensor:
    """A scale for each of `count` elements."""
    return scales[:, None].expand(-1, BLOCK).reshape(-1)[:count]


def _pieces(parameter: nn.Parameter, *kept: Tensor) -> Iterator[list[Tensor]]:
    """(values, gradient, what is kept), flat, a bounded number of elements at once."""
    assert parameter.grad is not None
    whole = [parameter.view(-1), parameter.grad.reshape(-1), *(each.view(-1) for each in kept)]
    for piece in zip(*(each.split(PIECE) for each in whole), strict=True):
        yield list(piece)
