"""What a device is asked: which one, how fast, how full, whether it repeats itself."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from weft.engine import device
from weft.engine.device import read_cgroup_limits
from weft.errors import ConfigError
from weft.kernels import fused


def test_devices() -> None:
    assert device.resolve_device("cpu") == torch.device("cpu")
    assert device.resolve_device(None) == device.choose_device()
    for name in ("toaster", "cuda:99"):
        with pytest.raises(ConfigError, match=f"device='{name}'"):
            device.resolve_device(name)
    here = torch.device("cpu")
    assert device.measure_peak_memory_gib(here) > 0.01
    assert device.describe_numerics(here)["threads"] == torch.get_num_threads()
    rate = device.measure_matmul_rate(here, torch.float32)
    assert rate > 1e8 and device.measure_matmul_rate(here, torch.float32) == rate


def test_the_rate_is_of_random_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of equal numbers are multiplied at a higher clock on a GPU.

    The draw leaves the program's own draws alone.
    """
    multiplied: list[torch.Tensor] = []
    monkeypatch.setattr(device, "product", lambda *both: multiplied.extend(both))
    before = torch.get_rng_state()
    device._measure_rate(32, torch.device("cpu"), torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), before)
    for matrix in multiplied:
        assert matrix.dtype == torch.bfloat16 and 0.8 < matrix.float().std() < 1.2
    assert not torch.equal(*multiplied[:2])


class Gpu:
    """What torch says of a GPU that is not here."""

    name, total_memory = "NVIDIA A100-SXM4-80GB", 85_095_874_560


def test_what_a_gpu_is_in_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    version = tmp_path / "version"
    version.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build\nGCC "
        "version: 12.3.0\n"
    )
    read = device._read_driver_version
    monkeypatch.setattr(device, "_read_driver_version", lambda: read(version))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Gpu)
    gpu = torch.device("cuda", 0)
    facts = device.describe_hardware(gpu)
    assert facts["driver"] == "550.54.15" and read(tmp_path / "none") is None
    assert device.format_hardware(facts, Gpu.name) == (
        "NVIDIA A100-SXM4-80GB (driver 550.54.15, 79.25 GiB, at most 312 bfloat16 TFLOP/s and "
        "2,039 GB/s)"
    )
    monkeypatch.setattr(Gpu, "name", "A card of tomorrow")
    assert device.format_hardware({**device.describe_hardware(gpu)}, "A card of tomorrow").endswith(
        "(driver 550.54.15, 79.25 GiB)"
    )


def test_what_a_processor_is_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: A Processor 9354\nflags\t: avx2\n" * 2)
    read = device._read_processor_name
    assert read(info) == "A Processor 9354" and read(tmp_path / "none")
    monkeypatch.setattr(device, "_read_processor_name", lambda: read(info))
    monkeypatch.setattr(device, "count_cores", lambda: 1)
    line = device.format_hardware(device.describe_hardware(torch.device("cpu")), "cpu")
    assert line.startswith("cpu (A Processor 9354, 1 core, ") and line.endswith(" GiB)")


def test_tf32_is_a_gpus_and_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)
    device.set_tf32(False, torch.device("cuda"))
    device.set_tf32(True, torch.device("cpu"))
    assert asked == []
    device.set_tf32(True, torch.device("cuda"))
    assert asked == ["high"]
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    assert device.describe_numerics(torch.device("cuda"))[
        "tf32"
    ] and "tf32" not in device.describe_numerics(torch.device("cpu"))


def test_flash_attention_that_cannot_be_had_is_refused() -> None:
    cpu = torch.device("cpu")
    assert device.choose_flash(cpu, "auto") == device.choose_flash(cpu, "fa2") == ()
    with pytest.raises(
        ConfigError,
        match=r"flash_attention=fa3: cpu is not a GPU of compute capability 9\.x; leave it out",
    ):
        device.choose_flash(cpu, "fa3")


def test_fused_kernels_are_part_of_what_a_gpu_computes_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    plain = device.describe_numerics(gpu)
    monkeypatch.setattr(fused, "read_switches", lambda: frozenset({"store", "draw"}))
    assert device.describe_numerics(gpu) == plain | {"gpu_kernels": ["draw", "store"]}
    assert "gpu_kernels" not in {*plain, *device.describe_numerics(cpu)}


def test_determinism_is_switched_on_and_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    device.set_deterministic(True)
    assert device.describe_numerics(torch.device("cpu"))["deterministic"]
    device.set_deterministic(False)
    assert not device.describe_numerics(torch.device("cpu"))["deterministic"]


def hold(size: int) -> None:
    """Hold `size` bytes for a moment, and give them back to the system."""
    with mmap.mmap(-1, size) as pages:
        for at in range(0, size, mmap.PAGESIZE):
            pages[at] = 1


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone starts the measurement again")
def test_the_peak_of_a_call_in_another_one_counts_for_both() -> None:
    meter = device.PeakMemoryMeter(torch.device("cpu"))
    with meter.measure() as outer:
        with meter.measure() as inner:
            hold(2**28)
        with meter.measure() as small:
            assert small.num_bytes is None
    with meter.measure() as later:
        pass
    assert inner.num_bytes and outer.num_bytes and small.num_bytes and later.num_bytes
    assert outer.num_bytes >= inner.num_bytes > small.num_bytes + 2**27
    assert later.num_bytes < outer.num_bytes - 2**27
    whole = device.measure_peak_memory_gib(torch.device("cpu")) * device.GIGABYTE
    assert whole >= outer.num_bytes - 1


def test_the_peak_of_a_call_that_fails_is_forgotten() -> None:
    meter = device.PeakMemoryMeter(torch.device("cpu"))
    with pytest.raises(ValueError, match="out of luck"), meter.measure():
        raise ValueError("out of luck")
    assert meter._open == []


def test_a_gpu_s_peak_is_the_largest_of_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: torch counts from the last reset."""
    peak, here = [3.0], torch.device("cuda", 0)
    monkeypatch.setattr(device, "_earlier_peaks", {})
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: peak[0] * device.GIGABYTE)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: peak.__setitem__(0, 1.0))
    with device.PeakMemoryMeter(here).measure() as reading:
        peak[0] = 2.0
    assert reading.num_bytes == 2 * device.GIGABYTE
    assert device.measure_peak_memory_gib(here) == 3.0
    device.reset_peak_memory(here)
    assert device.measure_peak_memory_gib(here) == 1.0


def test_a_call_s_peak_is_left_out_where_it_cannot_be_measured() -> None:
    with device.PeakMemoryMeter(torch.device("meta")).measure() as reading:
        pass
    assert reading.num_bytes is None


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux", reason="a child begins at its parent's peak on Linux alone"
)
def test_peak_memory_is_this_process_s_own() -> None:
    held = torch.ones(200_000_000)  # 800 MB, which a child's ru_maxrss would begin with
    code = (
        "import torch; from weft.engine.device import measure_peak_memory_gib; "
        "print(measure_peak_memory_gib(torch.device('cpu')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert float(done.stdout) < device.measure_peak_memory_gib(held.device) - 0.4


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        (
            "0::/a/b\n",
            {"a/b/memory.max": "700", "a/memory.max": "500", "memory.max": "max"},
            [700, 500],
        ),
        ("0::/\n", {"memory.max": "300\n"}, [300]),  # as a container sees its own group
        ("0::/elsewhere\n", {"memory.max": "300\n", "memory/memory.limit_in_bytes": "1"}, [300]),
        (
            "3:cpu,cpuacct:/x\n5:memory:/x\n",
            {"memory/x/memory.limit_in_bytes": "90", "cpu/x/memory.max": "1"},
            [90],
        ),
        ("0::/a\n", {}, []),
    ],
)
def test_limits_of_control_groups(
    tmp_path: Path, groups: str, files: dict[str, str], expected: list[int]
) -> None:
    (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text)
    assert read_cgroup_limits(tmp_path / "fs", tmp_path / "groups") == expected
    assert read_cgroup_limits(tmp_path / "fs", tmp_path / "none") == []


def test_products_of_half_precision_add_in_float32_on_a_gpu() -> None:
    flags = torch.backends.cuda.matmul
    was = flags.allow_bf16_reduced_precision_reduction, flags.allow_fp16_reduced_precision_reduction
    try:
        flags.allow_bf16_reduced_precision_reduction = True
        device.keep_sums_wide(torch.device("cpu"))
        assert flags.allow_bf16_reduced_precision_reduction
        device.keep_sums_wide(torch.device("cuda"))
        assert (
            not flags.allow_bf16_reduced_precision_reduction
            and not flags.allow_fp16_reduced_precision_reduction
        )
    finally:
        (
            flags.allow_bf16_reduced_precision_reduction,
            flags.allow_fp16_reduced_precision_reduction,
        ) = was
