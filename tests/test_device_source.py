"""Device sources as data: sizes, JSON, and what is read from TileLang's host program."""

from __future__ import annotations

import pytest
from support.device_programs import lowered

from tilewright.codegen_cache.device_source import DeviceSource, KernelArg, evaluate

NAMES = {"n": 100, "m": 7, "x": 2.5}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("n", 100),
        ("((n + 63) // 64)", 2),
        ("-m % 4", 1),
        ("max(n - 128, 0)", 0),
        ("min(n, m, 3)", 3),
        ("(n >> 2) + (m << 1) + (n & 6)", 43),
        ("(n if m == 7 and n > 3 else 0)", 100),
        ("(1 if n < m or m != 7 else 2)", 2),
        ("x * 2", 5.0),
    ],
)
def test_sizes(text: str, value: float) -> None:
    assert evaluate(text, NAMES) == value


@pytest.mark.parametrize(
    "text", ["__import__('os')", "n.real", "[n]", "n ** m", "f(n)", "max(n, key=m)", "n +", "'n'", "n < m < 3"]
)
def test_what_is_no_size(text: str) -> None:
    """Sizes come from files, too: nothing else is evaluated."""
    with pytest.raises(ValueError, match="not a size"):
        evaluate(text, NAMES)


def test_names_that_are_not_there() -> None:
    with pytest.raises(KeyError, match="rows"):
        evaluate("rows + 1", NAMES)


def test_dynamic_sizes_are_read() -> None:
    """As trailing arguments of the kernel, in TileLang's order, by the names they have in shapes."""
    source = lowered("gather", "sm_80")
    assert {t.name: t.shape for t in source.tensors}["KV"] == ("pages", "16", "64")
    (launch,) = source.launches
    assert launch.args[-2:] == (KernelArg("scalar", "pages", "int32"), KernelArg("scalar", "used", "int32"))
    assert (launch.grid, launch.block) == (("1", "1", "1"), ("128", "1", "1"))
    assert int(evaluate(launch.shared_bytes, {})) >= 64 * 64 * 2 + 16 * 64 * 2


def test_tensor_maps_are_read() -> None:
    """In the order of memory, whatever the axes of a tile; swizzled as wide as its rows."""
    source = lowered("attention", "sm_90a")
    q = {m.tensor: m for m in source.tensor_maps}["Q"]
    assert (q.dims, q.box, q.swizzle, q.dtype) == (("64", "128", "4"), ("64", "64", "1"), 3, 6)
    assert [a.kind for a in source.launches[0].args].count("map") == len(source.tensor_maps) == 3


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_json(arch: str) -> None:
    source = lowered("attention", arch)
    assert DeviceSource.from_json(source.to_json()) == source
