"""`weft plan profile`: measure a model's parts on this machine, for the estimates of step times."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.engine.spec import ModelSpec
from weft.errors import ConfigError
from weft.planner import profile
from weft.planner.calibration import compute_waits
from weft.planner.decoder_sizes import build_decoder_sizes
from weft.planner.devices import estimate_cpu_rates, find_gpu_rates
from weft.planner.profile import ProfileMachine, ShapeTimes, parse_times

if TYPE_CHECKING:
    from weft.engine.measure import MeasuredNetwork
    from weft.models.network.config import TransformerConfig

SUMMARY = "the times of a model's parts on this machine, which estimates then use"
# kind of call with messages -> its name in the output
KINDS = {
    "shards": "sharded weights",
    "tensor": "tensor-parallel passes",
    "decode": "tensor-parallel decode steps",
}
DTYPES = ("bfloat16", "float16", "float32")
EPILOG = """One layer, the embedding and the output matrix are measured in passes forward and backward, for full
training and for adapters; also optimizer steps, decode steps, messages between two devices and the
start of a process. The model's weights are not read: they are random, and a few layers suffice.

The result is a file in $XDG_CACHE_HOME/weft/profiles (default ~/.cache). Plans and runs on this
machine use it for models of this shape, with this dtype and number of threads.

examples:
  weft plan profile Qwen/Qwen3-0.6B
  weft plan profile MODEL_DIR --threads 1 --tensor 2
  weft plan profile MODEL_DIR --device cuda --output h100.json"""


def add_parser(commands: Any) -> None:
    """Add the command `profile` to the commands of `weft plan`."""
    parser = commands.add_parser(
        "profile", help=SUMMARY, description=f"Measure {SUMMARY}.", epilog=EPILOG
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="model directory, run or hub name; only its config.json is read (default: a Llama of "
        "1.2 billion parameters)",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="dtype of computation (default: float32 on a CPU, bfloat16 on a GPU)",
    )
    parser.add_argument(
        "--device", metavar="NAME", help="cpu or cuda (default: a GPU if there is one)"
    )
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="threads of a process on a CPU (default: $OMP_NUM_THREADS, or the number of cores)",
    )
    parser.add_argument(
        "--tensor",
        type=int,
        default=1,
        metavar="N",
        help="measure the part of one of N tensor-parallel ranks (%(default)s)",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=2048,
        metavar="N",
        help="tokens of the largest pack that is measured (%(default)s)",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="file to write, in place of that in the cache"
    )


def run(arguments: argparse.Namespace, config: TransformerConfig) -> None:
    """Measure the network of `config`, write its profile, and print what was measured.

    Raises `UserError` for unusable arguments. Nothing is written if a measurement fails or is
    interrupted.
    """
    import torch

    from weft.engine import measure
    from weft.engine.device import count_cores, read_thread_limit, resolve_device, set_threads
    from weft.engine.measure_links import measure_links
    from weft.writing import resolve_destination, write

    # Check the arguments.
    for name, minimum in (("threads", 1), ("tensor", 1), ("max_tokens", measure.SEQUENCE)):
        value = getattr(arguments, name)
        if value is not None and value < minimum:
            raise ConfigError(f"--{name.replace('_', '-')}={value}: must be at least {minimum}")
    device = resolve_device(arguments.device)
    on_gpu = device.type == "cuda"
    if on_gpu and arguments.threads is not None:
        raise ConfigError("--threads is for CPUs: leave it out, or write --device cpu")
    dtype = arguments.dtype or ("bfloat16" if on_gpu else "float32")
    threads = 0
    if not on_gpu:
        threads = arguments.threads or read_thread_limit() or count_cores()
        set_threads(threads)
    network = measure.MeasuredNetwork(config, device, dtype, arguments.tensor)
    _check_tensor(network)
    key = build_decoder_sizes(ModelSpec(dtype=dtype), config, on_gpu=on_gpu).profile_key
    machine = find_machine(device)
    path = arguments.output
    if path is None:
        folder = profile.find_folder() / profile.name_device_folder(machine.device)
        path = folder / profile.name_file(key, dtype, arguments.tensor, threads)
    else:
        resolve_destination(path)
    # Measure.
    started = time.perf_counter()
    with _show_progress() as show:
        measured = dict(measure.measure_network(network, arguments.max_tokens, show))
        measured["links"] = measure_links(network, max(1, threads), show)
        if on_gpu:
            measured["host_copies"] = measure.measure_host_copies(device)
    held_out = measured.pop("held_out")
    measured["waits"] = {}
    contents = profile.build_contents(
        key,
        machine,
        dtype=dtype,
        tensor=arguments.tensor,
        threads=threads,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        measured=measured,
    )
    contents["waits"] = _compute_waits(network, contents)
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, profile.format_contents(contents))
    print("\n".join(_format_page(contents, held_out)))
    print(
        f"measured in {time.perf_counter() - started:.0f} s on {machine.device} (torch "
        f"{torch.__version__})"
    )
    print(f"written to {path}")


def _compute_waits(network: MeasuredNetwork, contents: Mapping[str, Any]) -> dict[str, float]:
    """Return the additional seconds of a message within a call, by kind of call.

    The result is computed from the `contents` of a profile. It is empty if no calls with messages
    were measured.
    """
    from weft.engine.device import count_cores
    from weft.engine.measure import shorten

    links = contents["links"]
    if links is None or not links["joined"]:
        return {}
    on_gpu = network.device.type == "cuda"
    layers = max(times["layers"] for times in links["joined"].values())
    spec = ModelSpec(dtype=network.dtype, trained=True)
    sizes = build_decoder_sizes(spec, shorten(network.config, layers), on_gpu=on_gpu)
    threads = contents["threads"]
    measured_profile = profile.DeviceProfile(
        {(sizes.profile_key, network.dtype, network.tensor, threads): parse_times(contents)},
        profile.parse_links(links),
    )
    if on_gpu:
        rates = find_gpu_rates("H100", network.dtype)
    else:
        rates = estimate_cpu_rates(count_cores(), 1.0, 2, threads)
    return compute_waits(
        sizes, links["joined"], rates.with_profile(measured_profile), network.tensor
    )


def _check_tensor(network: MeasuredNetwork) -> None:
    """Raise `ConfigError` if `network` cannot be split over its number of tensor-parallel ranks."""
    from weft.engine.torch.network_source import check_layout
    from weft.topology import Layout

    if network.tensor > 1:
        check_layout(ModelSpec(), Layout(tensor=network.tensor), network.config)


def find_machine(device: Any) -> ProfileMachine:
    """Return the description of a torch device, which its profiles must match."""
    from weft.engine.device import describe_profiled_device

    return ProfileMachine(*describe_profiled_device(device))


@contextmanager
def _show_progress() -> Iterator[Callable[[str], None]]:
    """Show the current measurement in a status line, if standard error is a terminal.

    Yields a function that takes the description of the next measurement.
    """
    import rich.console

    if not sys.stderr.isatty():
        yield lambda text: None
        return
    with rich.console.Console(stderr=True).status("measuring") as status:
        yield lambda text: status.update(f"measuring {text}")


def _format_page(contents: Mapping[str, Any], held_out: list[Mapping[str, Any]]) -> list[str]:
    """Return lines with the main times in a profile, and the errors of interpolated times.

    `held_out` are measurements that are not in the profile, to compare interpolated times with.
    """
    times = profile.parse_times(contents)
    lines = []
    names = {"score": "scoring", "full": "full training", "adapters": "training of adapters"}
    for kind, values in contents["passes"].items():
        largest = values["tokens"].index(max(values["tokens"]))
        tokens = values["tokens"][largest]
        forward = 1e6 * values["blocks"][largest] / tokens
        backward = 1e6 * values.get("blocks_backward", [0.0] * (largest + 1))[largest] / tokens
        output_matrix = 1e6 * values["head"][largest] / tokens
        line = f"{names[kind]}, {tokens:,} tokens: a layer {forward:.2f}"
        line += f" + {backward:.2f} backward" if backward else ""
        line += f", output matrix {output_matrix:.2f} us per token"
        if "update" in values:
            update = sorted(values["update"])[len(values["update"]) // 2]
            line += f"; optimizer step of {values['trained']:,} parameters {1e3 * update:.1f} ms"
        lines.append(line)
    for kind, values in contents["decoding"].items():
        variants = {"plain": "", "modules": ", module by module", "adapters": ", with adapters"}
        points = []
        for batch, context, block, rest in zip(
            *(values[name] for name in ("batches", "contexts", "block", "rest")), strict=True
        ):
            points.append(f"{batch} x {context}: {1e3 * block:.3f} + {1e3 * rest:.2f}")
        lines.append(
            f"decode step{variants[kind]}, ms of a layer + the rest, by sequences x tokens: "
            + "; ".join(points)
        )
    links = contents["links"]
    if links is not None:
        for name in profile.MESSAGES:
            sizes, seconds = links[name]
            lines.append(
                f"{name} between two devices: {1e6 * seconds[0]:.0f} us at least, "
                f"{sizes[-1] / seconds[-1] / 1e9:.2f} GB/s"
            )
        lines.append(
            f"two processes at once: {links['contention']:.2f} times as long; a process starts in "
            f"{links['startup_seconds']:.1f} s"
        )
    for kind, seconds in contents["waits"].items():
        lines.append(
            f"each message of {KINDS[kind]} takes {1e6 * seconds:.0f} us more within a call"
        )
    lines += _format_errors(times, held_out)
    return lines


def _format_errors(times: ShapeTimes, held_out: list[Mapping[str, Any]]) -> list[str]:
    """Return lines that compare interpolated times with measured ones."""
    lines = []
    for name, measured, interpolated in profile.compute_held_out_errors(times, held_out):
        lines.append(
            f"not interpolated from: {name}: {1e3 * measured:.1f} ms, interpolated "
            f"{1e3 * interpolated:.1f} ms ({100 * (interpolated / measured - 1):+.0f}%)"
        )
    return lines
