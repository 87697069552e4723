"""Which GPU a run fits, by hand."""

from __future__ import annotations

from dataclasses import replace

from weft.extras import install
from weft.planner.devices import GIB, GPU_SIZES, RESERVED_GIB
from weft.planner.forecast import (
    ADAPTER_RANK,
    EXTRAS,
    MemoryOption,
    find_install_command,
    format_fit,
    format_smaller_options,
    format_table,
    list_memory_options,
)
from weft.planner.memory import CallDemand, MemoryCase, MemorySettings, NetworkShape

BILLION = 10**9
SHAPE = NetworkShape(
    parameters=BILLION,
    trainable=BILLION,
    layers=10,
    hidden=1000,
    query=1000,
    key=500,
    inner=4000,
    vocab=1,
    embedding=10**8,
)
SETTINGS = MemorySettings(
    "bfloat16", True, "adamw", recompute=0, offload_optimizer=False, chunk_rows=1
)
CASE = MemoryCase(SHAPE, SETTINGS, (CallDemand(tokens=1, rows=1, backward=True),))
SMALL = 10**-3  # of a pass of one token, and of what an embedding's gradient takes besides


def size(case: MemoryCase, options: str) -> float:
    return next(
        way.size for way in list_memory_options({"model": case}, ()) if way.options == options
    )


def test_a_parameter_takes_18_bytes_and_each_way_what_is_left_of_them() -> None:
    """Weights 2, masters 4, gradients 4, states 8.

    Beside all gradients the look-up's own stand at the end: 4 bytes.
    """
    more = 4 * 10**8
    assert abs(size(CASE, "as set") / (18 * BILLION + more) - 1) < SMALL
    assert (
        abs(
            size(replace(CASE, settings=replace(SETTINGS, dtype="float32")), "as set")
            / (16 * BILLION + more)
            - 1
        )
        < SMALL
    )
    again = "gradient_checkpointing=true"
    narrow = 10 * BILLION + 2 * (4 * 10**8 + 9 * 10**8 * (1 + 4 / 256)) + more
    assert abs(size(CASE, f"{again} optimizer.state_dtype=8bit") / narrow - 1) < SMALL
    assert abs(size(CASE, f"{again} optimizer.offload=true") / (2 * BILLION + more) - 1) < SMALL
    adapters = ADAPTER_RANK * 10 * (2 * (1000 + 1000) + 2 * (1000 + 500) + 3 * (1000 + 4000))
    assert (
        abs(size(CASE, f"{again} lora.r={ADAPTER_RANK}") / (2 * BILLION + 18 * adapters) - 1)
        < SMALL
    )
    # the embedding, two blocks, and a block's gradient
    gathered = 2 * (10**8 + 2 * 9 * 10**7) + 4 * 9 * 10**7
    assert abs(size(CASE, f"{again} layout=d4") / (18 * BILLION / 4 + gathered + more) - 1) < SMALL


def test_the_smallest_gpu_that_leaves_the_driver_its_part() -> None:
    for sold, gib in GPU_SIZES:
        assert MemoryOption("x", (gib - RESERVED_GIB) * GIB).smallest_gpu_gb == sold
    assert (
        MemoryOption("x", (GPU_SIZES[0][1] - RESERVED_GIB + 0.1) * GIB).smallest_gpu_gb == 40
        and MemoryOption("x", 150 * GIB).smallest_gpu_gb is None
    )


def test_lines_name_what_leads_to_a_smaller_gpu_and_nothing_else() -> None:
    assert list(format_fit({"model": CASE}, "on a GPU: ", ())) == [
        "on a GPU: about 17.1 GiB, fits a GPU of 24 GB"
    ]
    large = replace(CASE, shape=replace(SHAPE, parameters=7 * BILLION, trainable=7 * BILLION))
    first, *others = format_fit({"model": large}, "", ())
    assert first == "about 117.7 GiB, fits a GPU of 141 GB"
    assert len(others) >= 4 and not any("141" in line for line in others), (
        "those that lead to a smaller one"
    )
    assert any(
        "optimizer.offload=true: about 13.4 GiB, fits a GPU of 24 GB" in line for line in others
    )
    huge = replace(CASE, shape=replace(SHAPE, parameters=2000 * BILLION, trainable=2000 * BILLION))
    assert (
        "more than a GPU of 141 GB" in next(format_fit({"model": huge}, "", ()))
        and "layout=d16" in [*format_fit({"m": huge}, "", ())][-1]
    )
    assert not list(
        format_fit({"ref": replace(CASE, settings=replace(SETTINGS, trained=False))}, "", ())
    )


def test_what_is_set_already_is_not_offered() -> None:
    options = [
        way.options
        for way in list_memory_options(
            {"m": replace(CASE, settings=replace(SETTINGS, recompute=1, optimizer="sgd"))}, ()
        )
    ]
    assert options[1:3] == ["optimizer.offload=true", "lora.r=16"], "nothing is said twice"
    experts = replace(CASE, shape=replace(SHAPE, fused=False))
    assert not any("lora" in way.options for way in list_memory_options({"m": experts}, ()))
    assert all(
        " GiB" in line and "fits" in line
        for line in format_table(list_memory_options({"m": CASE}, ()))
    )


def test_adapters_are_not_offered_with_products_of_8_bits_which_refuse_them() -> None:
    narrow = replace(CASE, settings=replace(SETTINGS, fp8=True))
    assert not any("lora" in way.options for way in list_memory_options({"m": narrow}, ()))


def test_what_an_option_needs_is_named_where_it_is_not_installed() -> None:
    missing = {package for package, _ in EXTRAS.values()}
    assert find_install_command(["optimizer.state_dtype=8bit", "fp8=true"], missing) == install(
        "8bit,fp8"
    )
    assert find_install_command(["lora.r=16"], missing) == ""
    table = format_table(list_memory_options({"m": CASE}, missing))
    narrow = next(line for line in table if "8bit" in line)
    assert narrow.endswith(f"(needs {install('8bit')})")
    assert not any("needs" in line for line in format_table(list_memory_options({"m": CASE}, ())))


def test_what_holds_it_in_less_memory_than_it_takes() -> None:
    lines = list(format_smaller_options({"m": CASE}, 8 * GIB, ()))
    assert [line.split(":")[0] for line in lines] == [
        "with gradient_checkpointing=true optimizer.offload=true",
        "with gradient_checkpointing=true lora.r=16",
        "with gradient_checkpointing=true layout=d4",
        "with gradient_checkpointing=true layout=d8",
    ]
    assert next(iter(format_smaller_options({"m": CASE}, 0.0, ()))).startswith("the least is 1.9")
