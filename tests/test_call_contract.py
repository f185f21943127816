# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, index, operator, no-untyped-def"
"""What a call promises beyond values: outputs that fit, memory kept apart, keys nobody sees left out of everything."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewright import PagedKVCache, run
from tilewright.codegen_cache.compilers import find_compiler
from tilewright.dsl import Const, Paged, Rows, dot, f32, i32, log, op, pos, softmax, sqrt, sum, topk
from tilewright.dsl import Tensor as Captured
from tilewright.dsl import key as key_position
from tilewright.dsl.errors import (
    ArgumentDTypeError,
    ArgumentError,
    ArgumentLayoutError,
    ArgumentValueError,
    AxisMismatch,
    OutOfBounds,
)
from tilewright.dsl.expr import Const as Number
from tilewright.dsl.schedule import Schedule
from tilewright.ops import generic_flash_attention_kv_cache_ragged_sink
from tilewright.ops.cache import PagedLeaf

pytestmark = pytest.mark.both_targets

ROWS, HEADS, DIM = 5, 2, 4
OFFSETS = torch.tensor([0, 2, 5], dtype=torch.int32)


def cache() -> PagedKVCache:
    """Two sequences of 5 and 3 keys, every other slot NaN."""
    blocks = torch.full((6, 2, 1, 4, 1, DIM), torch.nan)
    table = torch.tensor([[4, 1], [2, 0]], dtype=torch.int32)
    made = PagedKVCache(blocks, table, torch.tensor([3, 0], dtype=torch.int32))
    whole = made.with_lengths(torch.zeros(2, dtype=torch.int32))
    gen = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(8, 1, DIM, generator=gen) for _ in range(2))
    whole.append(0, keys, values, torch.tensor([0, 5, 8], dtype=torch.int32))
    return made


def query() -> Tensor:
    return torch.randn(ROWS, HEADS, DIM, generator=torch.Generator().manual_seed(1))


@op
def normalised(q: Rows["head", "dim"], kv: Paged["dim"]):
    keys = kv.keys(where=lambda query, key: key <= query)
    return softmax(dot(q, keys)) @ (keys.v / sqrt(sum(keys.v * keys.v, over="dim")))


@op
def by_distance(q: Rows["head", "dim"], kv: Paged["dim"]):
    keys = kv.keys(where=lambda query, key: key <= query)
    return softmax(dot(q, keys)) @ (keys.v * log(1.0 + pos - key_position))


@op
def weighted(q: Rows["head", "dim"], kv: Paged["dim"], w: Captured["seq", "key", f32]):
    keys = kv.keys(where=lambda query, key: key <= query)
    return softmax(dot(q, keys)) @ (keys.v * w)


@pytest.mark.parametrize(
    "schedule",
    [Schedule(), Schedule(rows=1, keys=1), Schedule(rows=2, keys=3, masks="split"), Schedule(keys=2, partitions=3)],
    ids=str,
)
@pytest.mark.parametrize("name", ["normalised", "by_distance", "weighted"])
def test_what_is_computed_from_unseen_keys_never_matters(name: str, schedule: Schedule) -> None:
    """Values may be any function of keys, also one that is NaN or infinite where no key is, or where none is seen."""
    arguments: dict[str, object] = {"q": query(), "kv": cache().layer(0)}
    if name == "weighted":
        arguments["w"] = torch.full((2, 9), torch.nan)
        arguments["w"][0, :5], arguments["w"][1, :3] = 2.0, 2.0
    out = run(globals()[name], arguments, OFFSETS, schedule=schedule)["out"]
    assert out.isfinite().all()
    if name == "weighted":
        plain = generic_flash_attention_kv_cache_ragged_sink(query(), OFFSETS, cache(), 0, 1.0)
        assert isinstance(plain, Tensor)
        torch.testing.assert_close(out, 2 * plain, rtol=1e-5, atol=1e-6)


@op
def plain(q: Rows["head", "dim"], kv: Paged["dim"]):
    keys = kv.keys(where=lambda query, key: key <= query)
    return softmax(dot(q, keys)) @ keys.v


@op
def best(q: Rows["head", "dim"], kv: Paged["dim"]):
    keys = kv.keys(where=lambda query, key: key <= query)
    return topk(sum(dot(q, keys), over="head"), 2)


def call(operator: object, **options: object) -> dict[str, Tensor]:
    return run(operator, {"q": query(), "kv": cache().layer(0)}, OFFSETS, **options)  # type: ignore[arg-type]


def test_unknown_outputs_are_refused() -> None:
    """A buffer under a name that the operator does not have would stay unwritten."""
    with pytest.raises(ArgumentError, match="output is not an output; expected one of out"):
        call(plain, outputs={"output": torch.zeros(ROWS, HEADS, DIM)})
    with pytest.raises(ArgumentError, match="lse is not an output; expected one of out"):
        call(plain, output_dtypes={"lse": f32})


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float64, torch.uint8])
def test_results_are_rounded_to_their_own_kind_only(dtype: torch.dtype) -> None:
    """A buffer that cannot hold the result is refused and stays as it was."""
    buffer = torch.ones(ROWS, HEADS, DIM).to(dtype)
    with pytest.raises(ArgumentDTypeError, match="expected float32, float16 or bfloat16"):
        call(plain, outputs={"out": buffer})
    assert (buffer == 1).all()
    with pytest.raises(ArgumentDTypeError, match="expected int32 or int64"):
        call(best, outputs={"out": torch.zeros(ROWS, 2).to(torch.float32 if dtype is torch.int32 else dtype)})


def test_outputs_share_no_memory_with_inputs_or_themselves() -> None:
    """The very same view is written in place; any other overlap is refused."""
    buffer = torch.randn(ROWS + 1, HEADS, DIM)
    arguments = {"q": buffer[:ROWS], "kv": cache().layer(0)}
    with pytest.raises(ArgumentLayoutError, match="memory that q does not share"):
        run(plain, arguments, OFFSETS, outputs={"out": buffer[1:]})
    with pytest.raises(ArgumentLayoutError, match="elements that do not overlap"):
        call(plain, outputs={"out": torch.zeros(100).as_strided((ROWS, HEADS, DIM), (1, 1, 1))})
    want = run(plain, arguments, OFFSETS)["out"]
    assert torch.equal(run(plain, arguments, OFFSETS, outputs={"out": buffer[:ROWS]})["out"], want)


def test_a_window_must_fit_a_position() -> None:
    """Sums of positions and windows do not wrap: a window past 31 bits is refused."""
    with pytest.raises(ArgumentValueError, match="local_window_size is 9223372036854775807; expected below 2147483648"):
        generic_flash_attention_kv_cache_ragged_sink(
            query(), OFFSETS, cache(), 0, 1.0, mask_str="sliding_window_noncausal", local_window_size=2**63 - 1
        )


def test_slices_of_one_axis_have_one_size() -> None:
    """Two sizes under one name would be read as one."""

    @op
    def two_sizes(q: Rows["head", "dim"], kv: Paged["dim"]):
        keys = kv.keys()
        scores = sum(keys.k.slice("x", 0, 1), over="x") + sum(keys.k.slice("x", 1, 3), over="x")
        return softmax(scores + dot(q, keys)) @ keys.v

    with pytest.raises(AxisMismatch, match=r"slice: axis 'x' has \d elements in one slice and \d in another"):
        two_sizes.trace()


def test_constants_are_told_apart() -> None:
    """1, 1.0 and True are three, 0.0 and -0.0 two, inside any object; NaN is itself."""

    @dataclasses.dataclass(frozen=True)
    class Box:
        factor: float

    @op
    def scaled(q: Rows["head", "dim"], kv: Paged["dim"], *, box: Const):
        keys = kv.keys()
        return softmax(dot(q, keys) * box.factor) @ keys.v

    prints = {scaled.trace(box=Box(x)).fingerprint for x in (1, 1.0, 0.0, -0.0)}
    assert len(prints) == 4
    assert len({Number(x) for x in (1, 1.0, True, 0.0, -0.0)}) == 5
    assert Number(float("nan")) == Number(float("nan"))


def test_unchecked_calls_leave_buffers_alone_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """With checks of values off, the nest itself refuses a page outside the pool, and the buffer stays as it was."""
    monkeypatch.setenv("TILEWRIGHT_VALIDATE", "0")
    leaf = cache().layer(0)
    leaf.lookup_table[1, 0] = 99  # of the second sequence: the first has been computed by then
    buffer = torch.full((ROWS, HEADS, DIM), 7.0)
    with pytest.raises(OutOfBounds):
        run(plain, {"q": query(), "kv": leaf}, OFFSETS, outputs={"out": buffer})
    assert (buffer == 7.0).all()


def test_a_captured_tensor_may_look_like_a_lookup_table() -> None:
    """What is a table is known from the declaration, not guessed from names: negative elements of others are values."""

    @op
    def shifted(q: Rows["head", "dim"], kv: Paged["dim"], foo: Captured["seq", "max_pages", i32]):
        keys = kv.keys(where=lambda query, key: key <= query)
        return softmax(dot(q, keys) + foo[key_position // 4]) @ keys.v

    foo = torch.full((2, 2), -3, dtype=torch.int32)
    out = run(shifted, {"q": query(), "kv": cache().layer(0), "foo": foo}, OFFSETS)["out"]
    torch.testing.assert_close(out, call(plain)["out"], rtol=1e-5, atol=1e-6)


def stored(dtype: torch.dtype = torch.float8_e4m3fn) -> PagedLeaf:
    """Two sequences of 3 and 0 cached keys; float8 with a scale per row."""
    scales = torch.ones(6, 2, 1, 4, 1, 1) if dtype is torch.float8_e4m3fn else None
    table, lengths = torch.tensor([[4, 1], [2, 0]], dtype=torch.int32), torch.tensor([3, 0], dtype=torch.int32)
    return PagedKVCache(torch.ones(6, 2, 1, 4, 1, DIM).to(dtype), table, lengths, scales=scales).layer(0)


# What a leaf made by hand may get wrong, and the words of its refusal.
UNLIKE_KEYS: dict[str, tuple[Callable[[Any], dict[str, Any]], str]] = {
    "fewer pages of values": (lambda x: {"values": x.values[:4]}, r"kv.values has shape \[4, 4, 1, 4\]; expected"),
    "shorter pages of values": (lambda x: {"values": x.values[:, :2]}, r"kv.values has shape \[6, 2, 1, 4\]"),
    "fewer heads of values": (lambda x: {"keys": x.keys.expand(-1, -1, 2, -1)}, r"expected .*kv_heads=2, value_dim"),
    "other values": (lambda x: {"values": x.values.float()}, r"kv.values has dtype float32; .*, as its keys"),
    "fewer scales": (lambda x: {"key_scales": x.key_scales[:4]}, r"kv.key_scales has shape \[4, 4, 1, 1\]"),
    "shorter scales": (lambda x: {"value_scales": x.value_scales[:, :2]}, r"kv.value_scales has shape \[6, 2, 1, 1\]"),
    "more granules": (lambda x: {"quantization_granularity": 2}, r"kv.key_scales has shape .* expected .*granules=2"),
    "wide scales": (lambda x: {"key_scales": x.key_scales.double()}, r"kv.key_scales has dtype float64"),
    "no scales of values": (lambda x: {"value_scales": None}, r"kv.value_scales is None; expected scales, as its keys"),
    "a table of floats": (lambda x: {"lookup_table": x.lookup_table.float()}, r"kv.lookup_table has dtype float32"),
    "lengths of floats": (lambda x: {"cache_lengths": x.cache_lengths.float()}, r"kv.cache_lengths has dtype float32"),
    "a flat table": (lambda x: {"lookup_table": x.lookup_table[0]}, r"kv.lookup_table has rank 1; expected 2"),
    "flat keys": (lambda x: {"keys": x.keys[0]}, r"kv.keys has rank 3; expected 4"),
    "values elsewhere": (
        lambda x: {"values": x.values.to("meta")},
        r"kv.values is on meta; expected cpu, where kv.keys",
    ),
}


@pytest.mark.parametrize("target", ["interpret", "cpu"])
@pytest.mark.parametrize("mistake", UNLIKE_KEYS)
def test_a_leaf_is_of_one_piece(mistake: str, target: str) -> None:
    """One page number is read from keys, values and scales: all have that page, slot and head, or nothing is read."""
    if target == "cpu" and find_compiler() is None:
        pytest.skip("needs a C compiler")
    change, message = UNLIKE_KEYS[mistake]
    leaf = dataclasses.replace(stored(), **change(stored()))
    buffer = torch.full((ROWS, HEADS, DIM), 7.0)
    with pytest.raises(ArgumentError, match=message):
        run(plain, {"q": query(), "kv": leaf}, OFFSETS, outputs={"out": buffer}, target=target)
    assert (buffer == 7.0).all()
