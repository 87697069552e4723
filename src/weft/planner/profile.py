"""Profiles: measured times of a network's parts on this machine, which estimates interpolate.

`weft plan profile` writes one JSON file for each shape of a network, dtype, tensor-parallel degree
and number of threads, in the user's cache. This module names, reads, checks and interpolates them;
`weft.engine.measure` makes the measurements. It does not import torch.
"""

from __future__ import annotations

import json
import math
import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from weft.errors import ConfigError

FORMAT = 2  # version of the files
VARIABLE = "XDG_CACHE_HOME"
REMEDY = "make it again with weft plan profile, or delete the file"
# Beginning and end of notes on profiles that cannot be used
NOTE = "profile: "
UNTIL_THEN = "; until then times are estimated without it"
MESSAGES = ("sum", "gather", "scatter", "send")


@dataclass(frozen=True)
class ShapeKey:
    """Sizes of a network's layers and ends that its times depend on.

    The number of layers is not one of them. The widths are those of the whole network, also if a
    profile is that of one tensor-parallel rank.
    """

    hidden: int
    query: int
    key: int
    inner: int
    embedding: int
    gated: bool
    experts: bool

    @property
    def name(self) -> str:
        """Text form for the names of files."""
        more = ("-gated" if self.gated else "") + ("-experts" if self.experts else "")
        return f"h{self.hidden}-q{self.query}-k{self.key}-i{self.inner}-e{self.embedding}{more}"


@dataclass(frozen=True)
class ProfileMachine:
    """Facts about a machine and its software that must match those of a profile.

    Attributes:
        device: Name of the device, such as that of the processor.
        torch: Version of torch.
    """

    device: str
    torch: str


# -- interpolation


class MeasuredCurve:
    """Piecewise linear function through measured points, which never decreases.

    Beyond the last point, the last segment continues. Below the first point, the function is linear
    down to x = 0, where it has the value of the extended first segment, or 0 if that is negative.
    """

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        points = sorted(zip(xs, ys, strict=True))
        self.xs = [float(x) for x, _ in points]
        self.ys: list[float] = []
        for _, y in points:
            # Noise must not make more work look cheaper.
            self.ys.append(max(float(y), self.ys[-1] if self.ys else 0.0))
        if len(self.xs) > 1:
            slope = (self.ys[1] - self.ys[0]) / (self.xs[1] - self.xs[0])
            start = max(0.0, self.ys[0] - slope * self.xs[0])
        else:
            start = 0.0
        if self.xs[0] > 0:
            self.xs.insert(0, 0.0)
            self.ys.insert(0, start)

    def __call__(self, x: float) -> float:
        index = min(max(1, bisect_right(self.xs, x)), len(self.xs) - 1)
        if index == 0:
            return self.ys[0]
        low, high = self.xs[index - 1], self.xs[index]
        below, above = self.ys[index - 1], self.ys[index]
        return below + (above - below) * (x - low) / (high - low)


class MeasuredSurface:
    """Bilinear interpolation of points on a grid, with a `MeasuredCurve` over `y` at each value of `x`."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], values: Sequence[float]) -> None:
        self._columns: dict[float, MeasuredCurve] = {}
        for x in sorted(set(xs)):
            chosen = [
                (y, value) for column, y, value in zip(xs, ys, values, strict=True) if column == x
            ]
            self._columns[x] = _OpenCurve(*zip(*chosen, strict=True))

    def __call__(self, x: float, y: float) -> float:
        return max(
            0.0, MeasuredCurve(list(self._columns), [c(y) for c in self._columns.values()])(x)
        )


class _OpenCurve(MeasuredCurve):
    """MeasuredCurve whose first segment also continues below its first point."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        super().__init__(xs, ys)
        if len(xs) > 1 and self.xs[0] == 0.0 and min(xs) > 0:
            del self.xs[0], self.ys[0]


# -- the times of one shape


@dataclass(frozen=True)
class PassSeconds:
    """Times of the parts of one micro-batch's pass, in seconds; those of blocks are per layer."""

    begin: float
    block: float
    head: float
    block_backward: float = 0.0
    embedding_backward: float = 0.0


class PassTimes:
    """Times of one kind of pass: scoring, full training, or training of adapters."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        tokens = [float(each) for each in values["tokens"]]
        lengths = [float(each) for each in values["lengths"]]
        self._base = lengths[0]
        self._curves: dict[str, MeasuredCurve] = {}
        self._longer: dict[str, MeasuredCurve] = {}
        most = max(tokens)
        for name in ("begin", "blocks", "head", "blocks_backward", "embedding_backward"):
            seconds = values.get(name) or [0.0] * len(tokens)
            points = list(zip(tokens, lengths, seconds, strict=True))
            usual = [(t, s) for t, length, s in points if length == self._base]
            self._curves[name] = MeasuredCurve(*zip(*usual, strict=True))
            if name.startswith("blocks"):
                # Time per token that longer sequences add, from packs of the same size.
                longest = self._curves[name](most)
                longer = {self._base: 0.0}
                for t, length, s in points:
                    if t == most and length != self._base:
                        longer[length] = max(0.0, s - longest) / most
                self._longer[name] = _OpenCurve(list(longer), list(longer.values()))
        updates = values.get("update") or [0.0]
        self.update = sorted(updates)[len(updates) // 2]
        self.trained = int(values["trained"])

    def compute_seconds(self, tokens: float, length: float, rows: float) -> PassSeconds:
        """Return the times of a pack of `tokens` in sequences of `length`, of which `rows` are read.

        `length` is the mean over tokens, since the time of attention grows with its square.
        """
        blocks = {}
        for name, longer in self._longer.items():
            # Shorter sequences than measured save as much per token as longer ones add.
            extra = longer(length) * tokens
            blocks[name] = max(
                0.25 * self._curves[name](tokens), self._curves[name](tokens) + extra
            )
        return PassSeconds(
            begin=self._curves["begin"](tokens),
            block=blocks["blocks"],
            head=self._curves["head"](rows),
            block_backward=blocks["blocks_backward"],
            embedding_backward=self._curves["embedding_backward"](tokens),
        )


class DecodeTimes:
    """Times of decode steps and of prefills, for a layer and for the rest of the network."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        batches = values["batches"]
        contexts = values["contexts"]
        self._block = MeasuredSurface(batches, contexts, values["block"])
        self._rest = MeasuredSurface(batches, contexts, values["rest"])
        tokens: dict[float, list[tuple[float, float]]] = {}
        for batch, context, block, rest in zip(
            batches, contexts, values["prefill_block"], values["prefill_rest"], strict=True
        ):
            tokens.setdefault(float(batch * context), []).append((block, rest))
        means = []
        for measured in tokens.values():
            means.append([sum(part) / len(measured) for part in zip(*measured, strict=True)])
        self._prefill = [
            MeasuredCurve(list(tokens), list(part)) for part in zip(*means, strict=True)
        ]

    def compute_step(self, batch: float, context: float) -> tuple[float, float]:
        """Return the times of a decode step of a layer, and of all else, in seconds."""
        return self._block(batch, context), self._rest(batch, context)

    def compute_prefill(self, tokens: float) -> tuple[float, float]:
        """Return the times to compute prompts in a layer, and in all else, in seconds."""
        block, rest = self._prefill
        return block(tokens), rest(tokens)


@dataclass(frozen=True, eq=False)
class ShapeTimes:
    """Measured times of one shape, dtype, tensor-parallel degree and number of threads.

    `waits` are the extra seconds of each message within a call, by kind
    (`weft.planner.calibration`).
    """

    passes: Mapping[str, PassTimes]
    decoding: Mapping[str, DecodeTimes]
    waits: Mapping[str, float] = field(default_factory=dict)

    def compute_update(self, trained: float) -> float:
        """Return the time of an optimizer step with `trained` trained parameters, in seconds."""
        full, adapters = self.passes["full"], self.passes["adapters"]
        difference = full.trained - adapters.trained
        per_parameter = (
            max(0.0, full.update - adapters.update) / difference if difference > 0 else 0.0
        )
        fixed = max(0.0, adapters.update - per_parameter * adapters.trained)
        return fixed + per_parameter * trained


@dataclass(frozen=True, eq=False)
class LinkTimes:
    """Times of messages between two processes of a machine, and their effect on each other.

    Attributes:
        messages: Seconds by bytes; of "gather" and "scatter", the bytes of the whole tensor.
        contention: Time of a block while another process computes, relative to that alone.
        startup_seconds: Time until a new process can build a network.
    """

    messages: Mapping[str, MeasuredCurve]
    contention: float
    startup_seconds: float


@dataclass(frozen=True, eq=False)
class DeviceProfile:
    """Profiles that apply to a run, by shape, dtype, tensor-parallel degree and number of threads."""

    times: Mapping[tuple[ShapeKey, str, int, int], ShapeTimes]
    links: LinkTimes | None = None
    paths: tuple[str, ...] = ()
    created: str = ""
    # bytes per second of copies between a GPU and host memory, or None if they were not measured
    host_bandwidth: float | None = None
    memo: dict[Any, Any] = field(default_factory=dict)  # results of interpolations

    @cached_property
    def basis(self) -> str:
        """Phrase that says what the estimates are based on."""
        return f"a profile of {self.created[:10]}" if self.created else "a profile"

    def find(self, key: ShapeKey, dtype: str, tensor: int, threads: int) -> ShapeTimes | None:
        """Return the times of a shape, or None if it was not measured."""
        return self.times.get((key, dtype, tensor, threads))


# -- files


def find_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Return the folder of profiles in the user's cache: $XDG_CACHE_HOME or ~/.cache."""
    environment = os.environ if environment is None else environment
    cache = environment.get(VARIABLE) or ""
    # The specification of XDG ignores relative paths.
    base = Path(cache) if Path(cache).is_absolute() else Path.home() / ".cache"
    return base / "weft" / "profiles"


def name_file(key: ShapeKey, dtype: str, tensor: int, threads: int) -> str:
    """Return the name of a profile's file; `threads` is 0 for a GPU."""
    on = f"threads{threads}" if threads else "gpu"
    return f"{key.name}.{dtype}.t{tensor}.{on}.json"


def name_device_folder(device: str) -> str:
    """Return the name of the folder that holds the profiles of a device."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "device"


def find_profile(
    keys: Iterable[tuple[ShapeKey, str]], machine: ProfileMachine, given: str | None = None
) -> DeviceProfile | None:
    """Return the profile of networks with these shapes and dtypes, or None if no file has one.

    The profiles are searched in the user's cache, among those of this machine. If `given` is set,
    only this file or the files of this folder are searched. Raises `ConfigError` for a file that is
    damaged or that belongs to another device, version of torch or version of weft, and if `given`
    has no profile of these networks.
    """
    wanted_keys = set(keys)
    if given is None:
        folder = find_folder() / name_device_folder(machine.device)
        paths: list[Path] = []
        for key, dtype in wanted_keys:
            paths += folder.glob(f"{key.name}.{dtype}.*.json")
    else:
        place = Path(given)
        paths = list(place.glob("*.json")) if place.is_dir() else [place]
        if not paths or not paths[0].is_file():
            raise ConfigError(
                f"search.profile={given}: there is no profile; write one with weft plan profile "
                "MODEL --output FILE"
            )
    times = {}
    newest: tuple[str, LinkTimes | None] = ("", None)
    host_bandwidth = None
    used = []
    for path in sorted(paths):
        values = read_file(path, machine if given is None else None)
        key, dtype = ShapeKey(**values["shape"]), values["dtype"]
        if (key, dtype) not in wanted_keys:
            continue
        times[key, dtype, values["tensor"], values["threads"]] = parse_times(values)
        links = parse_links(values["links"])
        if values["created"] >= newest[0]:
            newest = (values["created"], links or newest[1])
            host_bandwidth = parse_host_bandwidth(values.get("host_copies")) or host_bandwidth
        used.append(str(path))
    if not times:
        if given is not None:
            names = ", ".join(sorted(f"{key.name}.{dtype}" for key, dtype in wanted_keys))
            raise ConfigError(
                f"search.profile={given}: has no profile of this run's models ({names}); write one "
                "with weft plan profile MODEL --output FILE, or leave the option out"
            )
        return None
    return DeviceProfile(times, newest[1], tuple(used), newest[0], host_bandwidth)


def find_usable_profile(
    keys: Iterable[tuple[ShapeKey, str]], machine: ProfileMachine, given: str | None = None
) -> tuple[DeviceProfile | None, tuple[str, ...]]:
    """Return the profile that `find_profile` finds, and notes on a profile that cannot be used.

    A run falls back to estimated speeds then, while `weft plan` treats a note as an error
    (`refuse_unusable_profiles`).
    """
    try:
        return find_profile(keys, machine, given), ()
    except ConfigError as error:
        return None, (f"{NOTE}{error}{UNTIL_THEN}",)


def refuse_unusable_profiles(notes: Iterable[str]) -> None:
    """Raise `ConfigError` if some of a plan's notes are on a profile that cannot be used."""
    refused = [note.removesuffix(UNTIL_THEN) for note in notes if note.startswith(NOTE)]
    if refused:
        raise ConfigError("\n".join(refused))


def read_file(path: Path, machine: ProfileMachine | None) -> dict[str, Any]:
    """Return the contents of a profile, checked against `machine` if it is given.

    Raises `ConfigError` if it is damaged, of another version of weft's format, or stale.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        version = values["format"]
        if version != FORMAT:
            raise ConfigError(
                f"{path}: the profile has format {version}, and this version of weft reads "
                f"{FORMAT}; {REMEDY}"
            )
        # Parsing finds missing and wrong values.
        parse_times(values)
        parse_links(values["links"])
        parse_host_bandwidth(values.get("host_copies"))
        ShapeKey(**values["shape"])
        source = ProfileMachine(values["device"], values["torch"])
        assert isinstance(values["tensor"], int) and isinstance(values["threads"], int)
        assert isinstance(values["created"], str) and isinstance(values["dtype"], str)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{path}: the profile cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, AssertionError) as error:
        raise ConfigError(
            f"{path}: the profile is damaged ({type(error).__name__}: {error}); {REMEDY}"
        ) from error
    if machine is not None and source != machine:
        name = "device" if source.device != machine.device else "torch"
        raise ConfigError(
            f"{path}: the profile was made with {name} {getattr(source, name)!r}, and this machine "
            f"has {getattr(machine, name)!r}; {REMEDY}"
        )
    return dict(values)


def parse_times(values: Mapping[str, Any]) -> ShapeTimes:
    """Return the times in a profile's contents."""
    _check_numbers(values["passes"])
    _check_numbers(values["decoding"])
    _check_numbers(values["waits"])
    return ShapeTimes(
        {kind: PassTimes(values["passes"][kind]) for kind in ("score", "full", "adapters")},
        {kind: DecodeTimes(values["decoding"][kind]) for kind in ("plain", "modules", "adapters")},
        dict(values["waits"]),
    )


def _check_numbers(values: Any) -> None:
    """Raise `ValueError` if a number is negative or not finite."""
    if isinstance(values, Mapping):
        for each in values.values():
            _check_numbers(each)
    elif isinstance(values, list):
        for each in values:
            _check_numbers(each)
    elif not isinstance(values, int | float) or not 0 <= values < math.inf:
        raise ValueError(f"{values!r} is no time or size")


def parse_links(values: Mapping[str, Any] | None) -> LinkTimes | None:
    """Return the times of messages in a profile's contents, or None if they were not measured."""
    if values is None:
        return None
    _check_numbers(values)
    messages = {name: MeasuredCurve(*values[name]) for name in MESSAGES}
    return LinkTimes(messages, values["contention"], values["startup_seconds"])


def parse_host_bandwidth(values: Mapping[str, Any] | None) -> float | None:
    """Return the bandwidth of large copies to host memory or back, whichever is slower, in bytes/s.

    `values` are the copies in a profile's contents, or None if they were not measured.
    """
    if values is None:
        return None
    _check_numbers(values)
    rates = []
    for name in ("out", "back"):
        sizes, seconds = values[name]
        if not seconds[-1]:
            raise ValueError("a copy of 0 s")
        rates.append(float(sizes[-1]) / float(seconds[-1]))
    return min(rates)


def build_contents(
    key: ShapeKey,
    machine: ProfileMachine,
    *,
    dtype: str,
    tensor: int,
    threads: int,
    created: str,
    measured: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the contents of a profile's file; `measured` has its passes, decoding and links."""
    return {
        "format": FORMAT,
        "created": created,
        **asdict(machine),
        "dtype": dtype,
        "tensor": tensor,
        "threads": threads,
        "shape": asdict(key),
        **measured,
    }


def format_contents(contents: Mapping[str, Any]) -> str:
    """Return the text of a profile's file."""
    return json.dumps(contents, indent=1) + "\n"


def compute_held_out_errors(
    times: ShapeTimes, held_out: Iterable[Mapping[str, Any]]
) -> list[tuple[str, float, float]]:
    """Return (description, measured seconds, interpolated seconds) of each held-out measurement.

    `held_out` are measurements of whole calls of a network; `layers` is its number of layers.
    """
    errors = []
    for point in held_out:
        layers = point["layers"]
        if "batch" in point:
            block, rest = times.decoding[point["kind"]].compute_step(
                point["batch"], point["context"]
            )
            name = f"decode step, {point['batch']} sequences of {point['context']} tokens"
            interpolated = layers * block + rest
        else:
            kind = times.passes[point["kind"]]
            parts = kind.compute_seconds(point["tokens"], point["length"], point["tokens"])
            interpolated = (
                parts.begin
                + layers * (parts.block + parts.block_backward)
                + parts.head
                + parts.embedding_backward
                + kind.update
            )
            name = f"{point['kind']}, {point['tokens']:,} tokens in sequences of {point['length']}"
        errors.append((name, point["seconds"], interpolated))
    return errors
