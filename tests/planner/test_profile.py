"""Profiles: interpolation, files that fit, and files that do not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.planner.profiles import KEY, MACHINE, contents
from weft.errors import ConfigError
from weft.planner.devices import find_gpu_rates
from weft.planner.profile import (
    MeasuredCurve,
    MeasuredSurface,
    compute_held_out_errors,
    find_folder,
    find_profile,
    find_usable_profile,
    format_contents,
    name_device_folder,
    name_file,
    parse_times,
    read_file,
)

WANTED = [(KEY, "float32")]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this machine's profiles in an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = find_folder() / name_device_folder(MACHINE.device)
    folder.mkdir(parents=True)
    return folder


def write(cache: Path, **changes: Any) -> Path:
    path = cache / name_file(KEY, "float32", 1, 1)
    path.write_text(format_contents(contents(**changes)))
    return path


def test_a_curve_goes_through_its_points_and_on() -> None:
    curve = MeasuredCurve([100, 200, 400], [3.0, 4.0, 8.0])
    assert [curve(x) for x in (100, 150, 200, 300, 400)] == [3.0, 3.5, 4.0, 6.0, 8.0]
    assert curve(500) == pytest.approx(10.0)  # as steep as the last segment
    assert curve(0) == 2.0 and curve(50) == 2.5  # where the first segment would begin
    assert MeasuredCurve([100, 200], [1.0, 4.0])(0) == 0.0  # but never below 0
    assert MeasuredCurve([100], [5.0])(50) == 2.5  # one point: in proportion


def test_noise_never_makes_more_work_cheaper() -> None:
    curve = MeasuredCurve([1, 2, 3, 4], [1.0, 3.0, 2.0, 5.0])
    values = [curve(x / 10) for x in range(60)]
    assert values == sorted(values)


def test_a_surface_is_bilinear() -> None:
    grid = [(x, y) for x in (1, 10) for y in (100, 200)]
    surface = MeasuredSurface(
        [x for x, _ in grid], [y for _, y in grid], [1 + x * (2 + y / 100) for x, y in grid]
    )
    for x, y in ((1, 100), (4, 150), (10, 200), (20, 400), (5, 50)):
        assert surface(x, y) == pytest.approx(1 + x * (2 + y / 100), rel=1e-12)


def test_times_of_a_pass_depend_on_tokens_length_and_rows() -> None:
    times = parse_times(contents()).passes["score"]
    usual = times.compute_seconds(250, 100, 100)
    assert usual.block == pytest.approx(2.5e-4) and usual.head == pytest.approx(2e-3)
    assert usual.begin == pytest.approx(1e-3) and usual.block_backward == 0.0
    # Sequences of 400 tokens take as much again, and those of 250 half of that.
    assert times.compute_seconds(400, 400, 400).block == pytest.approx(8e-4)
    assert times.compute_seconds(400, 250, 400).block == pytest.approx(6e-4)
    assert times.compute_seconds(800, 400, 400).block == pytest.approx(16e-4)
    full = parse_times(contents()).passes["full"].compute_seconds(400, 100, 200)
    assert full.block_backward == pytest.approx(12e-4)
    assert full.embedding_backward == pytest.approx(3e-3)


def test_an_optimizer_step_has_a_fixed_part_and_one_by_parameters() -> None:
    times = parse_times(contents())
    assert times.compute_update(0) == pytest.approx(1e-3)
    assert times.compute_update(5_000_000) == pytest.approx(1e-3 + 5e-2)


def test_decode_steps_and_prefills_are_interpolated() -> None:
    times = parse_times(contents()).decoding["plain"]
    block, rest = times.compute_step(4, 150)
    assert block == pytest.approx(1e-3 + 4 * 2.5e-4) and rest == pytest.approx(2e-3)
    block, rest = times.compute_prefill(1500)
    assert block == pytest.approx(1.5e-3) and rest == pytest.approx(1e-3)


def test_the_cache_follows_the_specification_of_xdg() -> None:
    assert find_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/weft/profiles")
    home = Path.home() / ".cache" / "weft" / "profiles"
    assert find_folder({}) == find_folder({"XDG_CACHE_HOME": "relative"}) == home


def test_a_profile_of_this_machine_and_shape_is_found(cache: Path) -> None:
    assert find_profile(WANTED, MACHINE) is None
    path = write(cache)
    found = find_profile(WANTED, MACHINE)
    assert found is not None and found.paths == (str(path),)
    assert found.basis == "a profile of 2026-01-02"
    assert found.find(KEY, "float32", 1, 1) is not None
    assert found.find(KEY, "float32", 1, 2) is None  # another number of threads
    assert found.find(KEY, "float32", 2, 1) is None
    assert found.links is not None and found.links.contention == 1.25
    assert find_profile([(KEY, "bfloat16")], MACHINE) is None
    assert find_profile([(replace(KEY, hidden=64), "float32")], MACHINE) is None


def test_measured_copies_to_the_host_replace_the_data_sheet(cache: Path) -> None:
    """The slower direction counts, at the largest size."""
    copies = {"out": [[1e6, 1e9], [1e-3, 0.1]], "back": [[1e6, 1e9], [1e-3, 0.05]]}
    write(cache, host_copies=copies)
    found = find_profile(WANTED, MACHINE)
    assert found is not None and found.host_bandwidth == pytest.approx(1e10)
    assert (
        find_gpu_rates("H100", "float32").with_profile(found).host_bandwidth == found.host_bandwidth
    )
    copies["back"][1][1] = 0.0
    path = write(cache, host_copies=copies)
    with pytest.raises(ConfigError, match=r"damaged .*a copy of 0 s"):
        read_file(path, None)
    write(cache)
    found = find_profile(WANTED, MACHINE)
    assert found is not None and found.host_bandwidth is None
    assert find_gpu_rates("H100", "float32").with_profile(found).host_bandwidth == 0.8 * 64e9


def test_a_file_of_another_machine_is_used_where_it_is_named(tmp_path: Path) -> None:
    path = tmp_path / "there.json"
    path.write_text(format_contents(contents(device="H100")))
    for given in (str(path), str(tmp_path)):
        found = find_profile(WANTED, MACHINE, given)
        assert found is not None and found.find(KEY, "float32", 1, 1) is not None
    with pytest.raises(ConfigError, match=r"search.profile=.*: there is no profile; write one"):
        find_profile(WANTED, MACHINE, str(tmp_path / "absent.json"))
    with pytest.raises(ConfigError, match=r"search.profile=.*there.json: has no profile of this"):
        find_profile([(replace(KEY, hidden=64), "float32")], MACHINE, str(path))


def remove_passes(values: dict[str, Any]) -> None:
    del values["passes"]["full"]


def make_negative(values: dict[str, Any]) -> None:
    values["passes"]["score"]["head"][0] = -1.0


def make_uneven(values: dict[str, Any]) -> None:
    values["decoding"]["plain"]["block"].pop()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (remove_passes, r"the profile is damaged \(KeyError: 'full'\)"),
        (make_negative, r"the profile is damaged \(ValueError: -1.0 is no time or size\)"),
        (make_uneven, r"the profile is damaged \(ValueError: "),
        (lambda values: values.pop("format"), r"the profile is damaged \(KeyError: 'format'\)"),
        (lambda values: values.update(shape={}), r"the profile is damaged \(TypeError: "),
        (
            lambda values: values.update(format=0),
            r"^[^(]*has format 0, and this version of weft reads 2",
        ),
        (
            lambda values: values.update(torch="1.0"),
            r"was made with torch '1.0', and this machine has '2.13.0'",
        ),
        (
            lambda values: values.update(device="other"),
            r"was made with device 'other', and this machine has 'hand, 2 cores'",
        ),
    ],
)
def test_a_file_that_cannot_be_used_says_why(
    cache: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    values = json.loads(format_contents(contents()))
    change(values)
    path = cache / name_file(KEY, "float32", 1, 1)
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=said) as raised:
        find_profile(WANTED, MACHINE)
    assert str(raised.value).startswith(str(path))
    assert "make it again with weft plan profile, or delete the file" in str(raised.value)
    found, notes = find_usable_profile(WANTED, MACHINE)
    assert found is None and notes[0].startswith(f"profile: {path}")


@pytest.mark.parametrize("text", ["", "[1]", '{"format": 2}', "{", "null"])
def test_any_other_text_is_damaged(cache: Path, text: str) -> None:
    (cache / name_file(KEY, "float32", 1, 1)).write_text(text)
    with pytest.raises(ConfigError, match="the profile is damaged"):
        find_profile(WANTED, MACHINE)


def test_errors_of_points_that_are_not_interpolated() -> None:
    points = [
        {"kind": "score", "tokens": 250, "length": 100, "layers": 4, "seconds": 1e-2},
        {"kind": "plain", "batch": 4, "context": 150, "layers": 4, "seconds": 1e-2},
    ]
    (_, _, scored), (_, _, decoded) = compute_held_out_errors(parse_times(contents()), points)
    assert scored == pytest.approx(1e-3 + 4 * 2.5e-4 + 5e-3)
    assert decoded == pytest.approx(4 * 2e-3 + 2e-3)
