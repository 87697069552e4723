"""The guide's rules on meshes."""

from __future__ import annotations

import re
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.compat.easylm import meshes
from weft.compat.easylm.meshes import (
    check_minibatch,
    check_product,
    choose_backend,
    count_devices,
    find_mesh,
    format_layout,
)
from weft.errors import ConfigError


def test_the_product_is_the_number_of_devices() -> None:
    assert check_product("1,-1,8", 32) == (1, 4, 8)
    assert check_product("!dp:2,fsdp:-1", 8) == (2, 4, 1)
    assert check_product("1,-1,8", None) == (1, -1, 8)
    for text in ("1,64,4", "1,3,1", "1,-1,3"):
        with pytest.raises(ConfigError, match=re.escape(f"{text}: dp x fsdp x mp must be")) as told:
            check_product(text, 8)
        assert str(told.value).endswith("the number of devices, 8; write 1,8,1")
    for text in ("-1,-1,1", "0,1,1"):
        with pytest.raises(ConfigError, match="each size must be at least 1, and one may be -1"):
            check_product(text, 8)


def test_a_mesh_of_all_devices_fits_the_minibatch() -> None:
    with pytest.raises(ConfigError, match="the number of devices, 8; write 1,4,2"):
        check_product("1,64,4", 8, 4)
    with pytest.raises(ConfigError, match="write --mesh_dim=1,2,4, or another mini_batch_size"):
        check_minibatch("1,8,1", (1, 8, 1), 4, 8, common=2)


def test_a_minibatch_is_a_multiple_of_dp_and_fsdp() -> None:
    check_minibatch("1,64,4", (1, 64, 4), 64, 256)
    check_minibatch("1,-1,4", (1, -1, 4), 3, None)
    with pytest.raises(ConfigError) as told:
        check_minibatch("1,8,1", (1, 8, 1), 4, 8)
    assert str(told.value) == (
        "--mini_batch_size=4: must be a multiple of dp x fsdp = 8 (--mesh_dim=1,8,1); write "
        "--mesh_dim=1,4,2, or another mini_batch_size"
    )


@given(st.integers(1, 512), st.integers(1, 512))
def test_the_nearest_mesh_has_the_largest_fsdp_that_fits(devices: int, rows: int) -> None:
    dp, fsdp, mp = map(int, find_mesh(devices, rows).split(","))
    assert dp == 1 and prod((dp, fsdp, mp)) == devices and rows % fsdp == 0
    larger = (n for n in range(fsdp + 1, devices + 1) if devices % n == 0)
    assert all(rows % n for n in larger)


def test_layouts_for_torch() -> None:
    assert format_layout((2, 4, 8)) == "d8f4t8"
    assert format_layout((1, 1, 1)) is None and format_layout((1, -1, 1)) is None


def test_the_backend_is_jax_if_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_backend("torch") == "torch" and choose_backend("jax") == "jax"
    monkeypatch.setattr(meshes, "find_spec", lambda name: None)
    assert choose_backend("") == "torch"
    monkeypatch.setattr(meshes, "find_spec", lambda name: object())
    assert choose_backend("") == "jax"
    with pytest.raises(ConfigError, match="--backend=tpu: must be jax or torch"):
        choose_backend("tpu")


def test_devices_of_one_host_of_several_are_not_counted() -> None:
    assert count_devices("jax", {"TPU_WORKER_HOSTNAMES": "a,b"}) is None
    assert count_devices("jax", {"WEFT_JAX_COORDINATOR": "auto"}) is None


@pytest.mark.slow  # imports jax in a process
def test_devices_of_jax_are_counted_in_another_process() -> None:
    import os

    pytest.importorskip("jax")
    assert count_devices("jax", os.environ) == 8
