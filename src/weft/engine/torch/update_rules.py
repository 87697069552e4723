"""Update rules as torch optimizers: AdamW, SGD, Lion, PaLM, and AdamW with narrow moments.

torch decorates optimizers for `torch.compile`, and the decorators load the compiler at the first
call, which takes a second. Optimizers are never compiled here, so the classes call the undecorated
functions.

Narrow moments are stored in bfloat16 with stochastic rounding, or in 8 bits by `bitsandbytes`.
Weight decay and clipping are left to the caller. The arithmetic is float32; only the stored moments
are narrow.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from inspect import unwrap
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from weft.engine.spec import STATE_LIBRARY
from weft.models.network.linear import StoredParameter
from weft.randomness import derive_key

State = dict[str, Tensor]  # state of one parameter, by slot
# suffix of the slot with the block scales of another slot, such as "exp_avg:scales"
SCALES = ":scales"
MOMENTS = ("exp_avg", "exp_avg_sq")
BLOCK = 256  # elements that share one scale
# minimum size of a parameter with 8-bit moments; norms and biases stay in float32
MIN_CODED = 4096
# elements updated at once, which bounds the temporary float32 memory; a multiple of BLOCK
PIECE = 2**24


def count_blocks(count: int, size: int) -> int:
    """Return the number of blocks of `size` elements that are needed for `count` elements."""
    return -(-count // size)


class EagerOptimizer(torch.optim.Optimizer):
    """Base class of optimizers that are never compiled, so that torch's compiler is not loaded."""

    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = unwrap(torch.optim.Optimizer.zero_grad)


class AdamW(EagerOptimizer, torch.optim.AdamW):
    """AdamW of torch, without the decorators for `torch.compile`."""

    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))


class SGD(EagerOptimizer, torch.optim.SGD):
    """PyTorch's SGD optimizer, without the decorators for `torch.compile`."""

    step = torch.no_grad()(unwrap(torch.optim.SGD.step))


class Lion(EagerOptimizer):
    """Optimizer that moves each element by the sign of an interpolated momentum.

    Implements algorithm 2 of Chen et al. 2023, arXiv:2302.06675.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, betas: tuple[float, float]
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters, and return the result of `closure`, if given.

        For a parameter p with gradient g, momentum m, learning rate lr and betas b1 and b2, p
        becomes p - lr sign(b1 m + (1 - b1) g), and then m becomes b2 m + (1 - b2) g.
        """
        loss = closure() if closure else None
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.add_(momentum.lerp(p.grad, 1.0 - beta1).sign_(), alpha=-group["lr"])
                momentum.lerp_(p.grad, 1.0 - beta2)
        return loss


SQUARE_EPS = 1e-30  # added to a squared gradient by PaLM's rule
MIN_SIZE = 1e-3  # least root mean square of a parameter in PaLM's rule


class PalmOptimizer(EagerOptimizer):
    """Adafactor with whole second moments, and steps scaled by the size of each parameter.

    Implements section 5 of Chowdhery et al. 2022, arXiv:2204.02311, with a momentum of the steps,
    as EasyLM has it. The size of a parameter is its root mean square, so weight decay is part of
    the step: it would change the size. `trained` has the canonical parameters, which may be rows of
    stored ones, and `decayed` the stored parameters with weight decay.
    """

    def __init__(
        self,
        trained: Iterable[StoredParameter],
        decayed: Collection[nn.Parameter],
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        self._parts: dict[nn.Parameter, list[StoredParameter]] = {}
        for part in trained:
            self._parts.setdefault(part.parameter, []).append(part)
        self._decayed = {id(parameter) for parameter in decayed}
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__([*self._parts], defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters, and return the result of `closure`, if given.

        For a parameter p with gradient g, moments m and v, learning rate lr and betas b1 and b2, in
        step n, which begins with 1: v becomes d v + (1 - d) (g^2 + 1e-30) with d = 1 - n^-b2, then
        m becomes b1 m + (1 - b1) lr max(rms(p), 1e-3) g / sqrt(v), and p becomes
        (1 - lr^2 weight_decay) p - m.
        """
        loss = closure() if closure else None
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(PlainMoments().create_state(p), step=torch.zeros(()))
                state["step"] += 1
                square, mean = state["exp_avg_sq"], state["exp_avg"]
                square.lerp_(p.grad.square() + SQUARE_EPS, float(state["step"]) ** -beta2)
                step = p.grad * square.rsqrt() * lr
                for part in self._parts[p]:
                    size = part.data.square().mean().sqrt().clamp(min=MIN_SIZE)
                    part.select_rows(step).mul_(size)
                if id(p) in self._decayed:
                    p.mul_(1.0 - lr**2 * group["weight_decay"])
                p.sub_(mean.lerp_(step, 1.0 - beta1))
        return loss


@dataclass(frozen=True)
class AdamUpdate:
    """Adam update of step `number`, where the first step is 1.

    Source: Kingma & Ba 2015, arXiv:1412.6980, algorithm 1.
    """

    number: int
    lr: float
    beta1: float
    beta2: float
    eps: float

    def update(self, values: Tensor, gradient: Tensor, mean: Tensor, square: Tensor) -> None:
        """Update the moments and then the values in place; all tensors have the same dtype."""
        mean.lerp_(gradient, 1.0 - self.beta1)
        square.mul_(self.beta2).addcmul_(gradient, gradient, value=1.0 - self.beta2)
        divisor = square.sqrt().div_(math.sqrt(1.0 - self.beta2**self.number)).add_(self.eps)
        values.addcdiv_(mean, divisor, value=-self.lr / (1.0 - self.beta1**self.number))


class MomentFormat(Protocol):
    """Interface of formats in which a parameter's two Adam moments are stored and updated."""

    def create_state(self, parameter: nn.Parameter) -> State:
        """Return a state in which all moments are zero."""
        ...

    def update(self, parameter: nn.Parameter, state: State, rule: AdamUpdate) -> None: ...

    def encode_state(self, state: State) -> State:
        """Return the state in its saved form.

        It contains the moments in the parameter's shape, and any data needed to restore them
        exactly.
        """
        ...

    def decode_state(self, parameter: nn.Parameter, saved: State) -> State:
        """Convert a saved state, which may come from any format, to a state in this format."""
        ...


class PlainMoments:
    """Format that stores moments in the parameter's dtype."""

    def create_state(self, parameter: nn.Parameter) -> State:
        return {name: torch.zeros_like(parameter, requires_grad=False) for name in MOMENTS}

    def update(self, parameter: nn.Parameter, state: State, rule: AdamUpdate) -> None:
        for piece in _iterate_pieces(parameter, *(state[name] for name in MOMENTS)):
            rule.update(*piece)

    def encode_state(self, state: State) -> State:
        return dict(state)

    def decode_state(self, parameter: nn.Parameter, saved: State) -> State:
        return {name: saved[name].to(parameter.device, parameter.dtype) for name in MOMENTS}


class BFloat16Moments:
    """Format that stores the moments of an optimizer in bfloat16 with stochastic rounding.

    Stochastic rounding is exact on average (Gupta et al. 2015, arXiv:1502.02551). Rounding to
    nearest would not work: with beta2 = 0.999, one step moves an average by a thousandth of its
    distance to the new value. This is usually less than half of bfloat16's last bit, so the average
    would hardly ever change. A compensated sum would need a second tensor, which would cost as much
    memory as bfloat16 saves.

    Random numbers are seeded by the parameter's name and the step. Copies of a parameter on several
    ranks therefore stay equal, and a resumed run draws the same numbers.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names  # by id(parameter)
        self._generators: dict[torch.device, torch.Generator] = {}

    def create_state(self, parameter: nn.Parameter) -> State:
        result = {}
        for name in MOMENTS:
            result[name] = torch.zeros_like(parameter, dtype=torch.bfloat16, requires_grad=False)
        return result

    def update(self, parameter: nn.Parameter, state: State, rule: AdamUpdate) -> None:
        device = parameter.device
        generator = self._generators.setdefault(device, torch.Generator(device))
        low, high = derive_key(0, "round optimizer states", rule.number, self._names[id(parameter)])
        generator.manual_seed(int(low) | (int(high) & 0x7FFFFFFF) << 32)
        for values, gradient, *moments in _iterate_pieces(
            parameter, *(state[name] for name in MOMENTS)
        ):
            exact = [each.to(values.dtype) for each in moments]
            rule.update(values, gradient, *exact)
            for each, value in zip(moments, exact, strict=True):
                each.copy_(round_stochastically(value, generator))

    def encode_state(self, state: State) -> State:
        return dict(state)

    def decode_state(self, parameter: nn.Parameter, saved: State) -> State:
        return {name: saved[name].to(parameter.device, torch.bfloat16) for name in MOMENTS}


class EightBitMoments:
    """Format that stores moments in 8 bits, as `bitsandbytes` stores and updates them.

    Each element is stored as a code, and each block of elements has a float32 scale (Dettmers et
    al. 2022, arXiv:2110.02861). A saved state contains the moments as float32 values, so it can be
    loaded into any format or sharding. It also contains the scales. With them, exactly the same
    codes are restored if the blocks consist of the same elements as before.
    """

    def __init__(self) -> None:
        # hide its warnings about kernels that are not used here
        logging.getLogger(STATE_LIBRARY).setLevel(logging.ERROR)
        self._library: Any = importlib.import_module(f"{STATE_LIBRARY}.functional")
        self._levels: dict[tuple[str, torch.device], Tensor] = {}

    def create_state(self, parameter: nn.Parameter) -> State:
        state: State = {}
        for name in MOMENTS:
            state[name] = torch.zeros_like(parameter, dtype=torch.uint8, requires_grad=False)
            state[name + SCALES] = parameter.new_zeros(
                count_blocks(parameter.numel(), BLOCK), requires_grad=False
            )
        return state

    def update(self, parameter: nn.Parameter, state: State, rule: AdamUpdate) -> None:
        assert parameter.grad is not None
        mean, square = (self.get_levels(name, parameter.device) for name in MOMENTS)
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

    def get_levels(self, name: str, device: torch.device) -> Tensor:
        """Return the values of the 256 codes at scale 1, `[256]`, in ascending order."""
        if (name, device) not in self._levels:
            levels = self._library.create_dynamic_map(signed=name == MOMENTS[0])
            self._levels[name, device] = levels.to(device=device, dtype=torch.float32)
        return self._levels[name, device]

    def encode_state(self, state: State) -> State:
        encoded: State = {}
        for name in MOMENTS:
            codes = state[name].cpu()
            scales = state[name + SCALES].cpu()
            encoded[name] = decode_values(codes, scales, self.get_levels(name, codes.device))
            encoded[name + SCALES] = scales
        return encoded

    def decode_state(self, parameter: nn.Parameter, saved: State) -> State:
        decoded: State = {}
        for name in MOMENTS:
            values = saved[name].to(parameter.device, torch.float32)
            scales = saved.get(name + SCALES)
            known = None if scales is None else scales.to(values.device)
            decoded[name], decoded[name + SCALES] = encode_values(
                values, known, self.get_levels(name, values.device)
            )
        return decoded


class NarrowAdamW(EagerOptimizer):
    """AdamW whose moments are stored in a format that is chosen for each parameter.

    `moments_of` returns the storage format of a parameter's moments. Weight decay is not part of
    `step`: `weft.engine.torch.optimizer` applies it in the same way for all update rules.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        moments_of: Callable[[nn.Parameter], MomentFormat],
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
                    # the step is kept on the host, so that reading it doesn't synchronise
                    state.update(moments.create_state(parameter), step=torch.zeros(()))
                state["step"] += 1
                beta1, beta2 = group["betas"]
                moments.update(
                    parameter,
                    state,
                    AdamUpdate(int(state["step"]), group["lr"], beta1, beta2, group["eps"]),
                )
        return loss

    def encode_state(self, parameter: nn.Parameter, state: State) -> State:
        """Return a parameter's state in its saved form; `state` may be on another device."""
        return {**self._moments[id(parameter)].encode_state(state), "step": state["step"]}

    def decode_state(self, parameter: nn.Parameter, saved: State) -> State:
        """Return the state of a parameter from its saved form."""
        return {
            **self._moments[id(parameter)].decode_state(parameter, saved),
            "step": saved["step"].cpu().clone(),
        }


def build_narrow_adamw(
    state_dtype: str,
    parameters: Mapping[nn.Parameter, str],
    embeddings: Collection[nn.Parameter],
    lr: float,
    betas: tuple[float, float],
    eps: float,
) -> NarrowAdamW:
    """Return an AdamW optimizer with moments in `state_dtype` (`bfloat16` or `8bit`).

    `parameters` maps each parameter to its name. With `8bit`, moments of `embeddings` stay in
    float32, because the gradient of a rare token's row can differ greatly from the gradients of
    neighbouring rows. Moments of parameters with fewer than `MIN_CODED` elements stay in the
    parameter's dtype.
    """
    if state_dtype == "bfloat16":
        narrow: MomentFormat = BFloat16Moments(
            {id(parameter): name for parameter, name in parameters.items()}
        )
        wide: set[int] = set()
    else:
        narrow = EightBitMoments()
        wide = {id(each) for each in embeddings}
        wide |= {
            id(each)
            for each in parameters
            if each.numel() < MIN_CODED or each.dtype != torch.float32
        }
    plain = PlainMoments()
    return NarrowAdamW(
        [*parameters], lr, betas, eps, lambda each: plain if id(each) in wide else narrow
    )


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round to bfloat16 stochastically.

    A value is rounded up with a probability equal to the discarded fraction of the last bit. Values
    that are not float32 are cast to float32 first.
    """
    bits = values.float().view(torch.int32)
    noise = torch.empty_like(bits).random_(0, 2**16, generator=generator)
    return (bits + noise).bitwise_and_(-(2**16)).view(torch.float32).to(torch.bfloat16)


def decode_values(codes: Tensor, scales: Tensor, levels: Tensor) -> Tensor:
    """Return the values of `codes` in float32, in the shape of `codes`.

    The value of a code is its level times the scale of its block.
    """
    values = torch.empty(codes.numel(), dtype=torch.float32, device=codes.device)
    per_piece = zip(
        values.split(PIECE), codes.view(-1).split(PIECE), scales.split(PIECE // BLOCK), strict=True
    )
    for to, code, scale in per_piece:
        scale_of_each = scale[:, None].expand(-1, BLOCK).reshape(-1)[: len(to)]
        torch.mul(levels[code.int()], scale_of_each, out=to)
    return values.view(codes.shape)


def encode_values(values: Tensor, scales: Tensor | None, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes nearest to the values, and the scales of the blocks.

    If a scale is given and reproduces the values of its block exactly, the block keeps it.
    Otherwise the scale is the largest magnitude in the block.
    """
    flat = values.reshape(-1)
    codes = torch.empty(flat.numel(), dtype=torch.uint8, device=values.device)
    own = values.new_empty(count_blocks(flat.numel(), BLOCK))
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
            nearest_codes = _find_nearest(rows, known, between)
            same = (levels[nearest_codes.int()] * known[:, None] == rows).all(1)
            most = torch.where(same, known, most)
        scale.copy_(most)
        to.copy_(_find_nearest(rows, most, between).view(-1)[: len(value)])
    return codes.view(values.shape), own


def _find_nearest(rows: Tensor, scales: Tensor, between: Tensor) -> Tensor:
    shares = rows / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    return torch.bucketize(shares, between).to(torch.uint8)


def _iterate_pieces(parameter: nn.Parameter, *states: Tensor) -> Iterator[list[Tensor]]:
    """Iterate over pieces of a parameter, its gradient and its states.

    Each item is [values, gradient, *states], flat tensors of at most `PIECE` elements each.
    """
    assert parameter.grad is not None
    whole = [parameter.view(-1), parameter.grad.reshape(-1), *(each.view(-1) for each in states)]
    for piece in zip(*(each.split(PIECE) for each in whole), strict=True):
        yield list(piece)
