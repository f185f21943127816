# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, index, operator, no-untyped-def"
"""The interpreter as the definition of a nest: what is not written is NaN, no access is outside, every step is seen."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from math import nan
from typing import Any

import numpy as np
import pytest
import torch
from support.batches import Content, content, place
from support.reference import assert_close
from support.running import attention, mask, of_numbers, public
from support.variants import batch

import tilewright
from tilewright.dsl import Paged, PerHead, Rows, dot, i32, op, softmax
from tilewright.dsl.algebra import add, less, mul
from tilewright.dsl.bounds import analyse
from tilewright.dsl.dtypes import f32
from tilewright.dsl.errors import NotFinite, OutOfBounds, VerifyError
from tilewright.dsl.expr import Const, Elem, Expr, Iota, Tile, Var
from tilewright.dsl.interp import Interpreter
from tilewright.dsl.interp_values import Frame
from tilewright.dsl.loops import Alloc, Arg, For, If, Kernel, Let, Program, Stmt, Store
from tilewright.dsl.lower import lower
from tilewright.dsl.schedule import Binding, LeafBinding, Schedule
from tilewright.dsl.tile import Map, Reduce
from tilewright.dsl.verify import verify
from tilewright.ops.flash_attention import flash_attention

# ---- nests made by hand ----------------------------------------------------------------------------------------------

ROWS, X, Y = 4, Tile("x", ("row",)), Tile("y", ("row",))
HERE = Iota("row")


ALWAYS, NEVER = Const(True), Const(False)


def program(*body: Stmt) -> Program:
    """A kernel over tiles x and y of 4 rows, an input `a` and an output `out` of as many."""
    args = Arg("a", f32, (ROWS,)), Arg("pages", i32, (ROWS,)), Arg("out", f32, (ROWS,))
    tiles = tuple(Alloc(n, (("row", ROWS),), t) for n, t in (("x", f32), ("y", f32), ("page", i32)))
    return Program("hand made", args, (), (Kernel("k", (("g", Const(1)),), args, tiles, body),))


def run(made: Program, on_statement: Any = None) -> torch.Tensor:
    out = torch.full((ROWS,), 7.0)
    tensors = {"a": torch.arange(1.0, 5.0), "pages": torch.arange(4, dtype=torch.int32), "out": out}
    Interpreter(made, on_statement=on_statement).run(tensors, {})
    return out


def store(e: Expr, index: Expr = HERE, ok: Expr = ALWAYS) -> Store:
    return Store("out", (index,), e, ("row",), ok)


def test_a_tile_that_is_not_written_is_nan() -> None:
    """Reading before writing is refused; a nest that does it all the same computes NaN, never what was there."""
    for made in (
        program(store(X)),
        program(Map(Y, add(X, X)), store(Y)),
        program(If(Const(False), (Map(X, Elem("a", (HERE,), f32)),)), store(X)),
        program(For("i", Const(0), Const(0), (Map(X, Elem("a", (HERE,), f32)),)), store(X)),
        program(Reduce(Tile("s", ()), X, "sum", "row"), store(Tile("s", ()))),
    ):
        with pytest.raises(VerifyError, match="tile x read before it is written"):
            verify(made, "allocate_tiles")
        assert bool(run(made).isnan().all())


def test_an_iteration_sees_nothing_of_the_one_before() -> None:
    """A tile that a loop writes late is NaN again at the start of the next iteration."""
    late = For("i", Const(0), Const(2), (Map(Y, add(X, Const(1.0))), Map(X, Elem("a", (HERE,), f32)), store(Y)))
    assert bool(run(program(late)).isnan().all())


def test_guards_leave_alone() -> None:
    """Where the guard is false a read is zero and a write is none, whatever the index."""
    read = Elem("a", (mul(HERE, 1000),), f32, NEVER)
    assert run(program(Map(X, read), store(X))).tolist() == [0, 0, 0, 0]
    first = Elem("a", (HERE,), f32)
    assert run(program(Map(X, first), store(X, mul(HERE, 1), less(HERE, 2)))).tolist() == [1, 2, 7, 7]


OUTSIDE: list[tuple[Program, str, int, int]] = [
    (program(Map(X, Elem("a", (add(HERE, 1),), f32)), store(X)), "read of a", 0, 4),
    (program(Map(X, Elem("a", (add(HERE, -2),), f32)), store(X)), "read of a", 0, -2),
    (program(Map(X, Elem("a", (Const(9),), f32)), store(X)), "read of a", 0, 9),
    (program(store(Const(0.0), add(HERE, 3))), "write to out", 0, 6),
    (program(store(Const(0.0), add(HERE, -1))), "write to out", 0, -1),
    (program(Map(X, Elem("a", (Tile("page", ("row",), i32),), f32)), store(X)), "read of a", 0, -(1 << 40)),
]


@pytest.mark.parametrize(("made", "access", "axis", "index"), OUTSIDE)
def test_accesses_outside_a_tensor(made: Program, access: str, axis: int, index: int) -> None:
    """Reads and writes outside raise and say where; a tile of page numbers that was not written is outside too."""
    with pytest.raises(OutOfBounds) as caught:
        run(made)
    fields = caught.value.fields
    assert (f"{fields['access']} {fields['tensor']}", fields["axis"], fields["index"]) == (access, axis, index)
    assert (fields["kernel"], fields["extent"]) == ("k", 4)


def test_statements_are_told_in_order() -> None:
    """The hook hears of every statement when it is done: those of a loop at each turn, then the loop."""
    told: list[str] = []
    made = program(
        Let("n", Const(2)),
        For("i", Const(0), Var("n"), (Map(X, Elem("a", (HERE,), f32)), If(Var("i"), (Map(Y, X),)))),
        store(X),
    )

    def hear(s: Stmt, f: Frame) -> None:
        told.append(f"{type(s).__name__}{f.scalars.get('i', '')}")

    run(made, hear)
    assert told == ["Let", "Map0", "If0", "Map1", "Map1", "If1", "For1", "Store1"]


# ---- how much work is done -------------------------------------------------------------------------------------------

BINDING = Binding(
    (("dim", 8), ("head", 4), ("value_dim", 8)), (("out", f32), ("q", f32)), (("kv", LeafBinding(3, 2, f32)),)
)


def counted(data: Content, where: Any, schedule: Schedule) -> Counter[str]:
    """How often statements of each kind ran."""
    found: Counter[str] = Counter()
    made = lower(flash_attention.trace(mask=where, sink=None), BINDING, schedule)
    leaf = place(data, np.random.default_rng(0), page_size=3).layer(0)
    assert leaf.values is not None
    tensors = {
        "q": data.q,
        "offsets": data.offsets,
        "kv_k": leaf.keys,
        "kv_v": leaf.values,
        "kv_table": leaf.lookup_table,
        "kv_lengths": leaf.cache_lengths,
        "out": torch.empty(data.q.shape),
    }
    runner = Interpreter(made, on_statement=lambda s, f: found.update([type(s).__name__]))
    runner.run(tensors, {"scale": 1.0})
    return found


@pytest.mark.parametrize("masks", ["branch", "split", "always"])
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (2, 4), (3, 5), (16, 128)])
def test_invisible_tiles_are_skipped(rows: int, keys: int, masks: str, rng: np.random.Generator) -> None:
    """Two products for each key tile with a visible key, and none for the rest: causal tiles end at the last row's."""
    data = content(rng, (7, 0, 0, 21), (5, 6, 0, 1), heads=4, kv_heads=2)
    tiles = 0
    for past, count in zip(data.ragged.past, data.ragged.rows, strict=True):
        ends = [past + min(first + rows, count) for first in range(0, count, rows)]
        tiles += sum(-(-end // keys) for end in ends)
    found = counted(data, mask("causal"), Schedule(rows=rows, keys=keys, masks=masks))
    assert found["Gemm"] == 2 * tiles


def test_tiles_outside_a_window_are_skipped(rng: np.random.Generator) -> None:
    """A window of 4 keys over 64 costs the tiles that it touches."""
    data = content(rng, (63,), (1,), heads=4, kv_heads=2)
    found = counted(data, mask("sliding_window_causal", 4), Schedule(rows=1, keys=4))
    assert found["Gemm"] in (2, 4)  # one tile, or two where tiles start at multiples of their size
    assert counted(data, lambda q, k: k < 0, Schedule(rows=1, keys=4))["Gemm"] == 0


def test_masks_are_left_out_where_all_is_seen(rng: np.random.Generator) -> None:
    """Of 16 key tiles of a causal decode row, one needs its mask evaluated."""
    data = content(rng, (63,), (1,), heads=4, kv_heads=2)
    maps = {m: counted(data, mask("causal"), Schedule(rows=1, keys=5, masks=m))["Map"] for m in ("split", "always")}
    assert maps["always"] - maps["split"] == 12


# ---- prints and breakpoints ------------------------------------------------------------------------------------------


@op
def printing(q: Rows["head", "dim"], kv: Paged["dim"]):
    keys = kv.keys(where=lambda query, key: key <= query)
    s = dot(q, keys)
    print("traced once")
    print(s, 2.0 * s)
    out = softmax(s) @ keys.v
    print(out)
    return out


@op
def stopping(q: Rows["head", "dim"], kv: Paged["dim"]):
    keys = kv.keys(where=lambda query, key: key <= query)
    s = dot(q, keys)
    breakpoint()
    return softmax(s) @ keys.v


def two_keys() -> tuple[Content, Any]:
    data = of_numbers([[1.0, 2.0]], [[[1.0, 0], [0, 1]]], [[[1.0, 1], [3, 3]]], past=[1], rows=[1])
    return data, place(data, np.random.default_rng(0)).layer(0)


def line_of(operator: Any, text: str) -> int:
    import inspect

    lines, first = inspect.getsourcelines(operator.fn)
    return first + next(n for n, line in enumerate(lines) if text in line)


def test_a_print_shows_values_and_the_authors_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Traced values are printed where they are computed; everything else at once."""
    data, leaf = two_keys()
    printing.trace()
    assert capsys.readouterr().out == "traced once\n"
    schedule = Schedule(rows=1, keys=2)
    tilewright.run(printing, {"q": data.q, "kv": leaf}, data.offsets, schedule=schedule)
    shown = capsys.readouterr().out
    at = "seq=0, r0=0, r1=1, q0=1, k0=0, head0=0, num_keys=2"
    first, last = line_of(printing, "print(s, 2.0 * s)"), line_of(printing, "print(out)")
    assert f"tests/test_interpreter.py:{first}:5: s[row, head, key] at {at}\ntensor([[[1., 2.]]])\n" in shown
    assert f"tests/test_interpreter.py:{first}:5: 2.0 * s[row, head, key] at {at}\ntensor([[[2., 4.]]])\n" in shown
    assert f"tests/test_interpreter.py:{last}:5: out[row, head, dim] at" in shown
    assert "tensor([[[2.4621, 2.4621]]])" in shown


def test_a_breakpoint_stops_in_the_authors_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """The debugger's frame is the author's file and line, its locals are the values there."""
    found: list[tuple[str, int, dict[str, Any]]] = []

    def hook() -> None:
        frame = sys._getframe(1)
        values = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in frame.f_locals.items()}
        found.append((frame.f_code.co_filename, frame.f_lineno, values))  # the nest goes on overwriting its tiles

    monkeypatch.setattr(sys, "breakpointhook", hook)
    data, leaf = two_keys()
    tilewright.run(stopping, {"q": data.q, "kv": leaf}, data.offsets, schedule=Schedule(rows=1, keys=2))
    ((file, line, values),) = found
    assert (file, line) == (__file__, line_of(stopping, "breakpoint()"))
    assert_close(values["s"].reshape(-1), [1.0, 2.0])
    assert values["num_keys"] == 2


# ---- checked contents, memory ----------------------------------------------------------------------------------------


@op
def window_per_head(q: Rows["head", "dim"], kv: Paged["dim"], window: PerHead[i32]):
    keys = kv.keys(where=lambda query, key: (key <= query) & (query - key < window))
    return softmax(dot(q, keys)) @ keys.v


def spoil(data: Content, rng: np.random.Generator, seq: int, key: int, value: float, values: bool = False) -> Any:
    """The batch in a cache with one key or value row that is not finite."""
    cache = place(data, rng, page_size=3)
    leaf = cache.layer(0)
    assert leaf.values is not None
    page = int(cache.lookup_table[seq, key // 3])
    (leaf.values if values else leaf.keys)[page, key % 3, 0, 2] = value
    return cache


@pytest.mark.both_targets
@pytest.mark.parametrize("value", [nan, float("inf"), float("-inf")])
@pytest.mark.parametrize("values", [False, True])
def test_checked_mode_finds_a_visible_slot(
    values: bool, value: float, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TILEWRIGHT_VALIDATE=1 names the tensor, the sequence and the key; unset and 0 compute."""
    data = batch(rng)
    cache = spoil(data, rng, 3, 10, value, values)
    for setting in ("", "0"):
        monkeypatch.setenv("TILEWRIGHT_VALIDATE", setting)
        assert not bool(public(data.q, data.offsets, cache).isfinite().all())
    monkeypatch.setenv("TILEWRIGHT_VALIDATE", "1")
    with pytest.raises(NotFinite) as caught:
        public(data.q, data.offsets, cache)
    assert {"tensor": "kv_v" if values else "kv_k", "seq": 3, "key": 10}.items() <= caught.value.fields.items()


@pytest.mark.both_targets
def test_checked_mode_finds_it_under_a_mask_per_head(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where what is read differs between heads."""
    data = batch(rng)
    leaf = spoil(data, rng, 3, 10, nan).layer(0)
    monkeypatch.setenv("TILEWRIGHT_VALIDATE", "1")
    window = torch.full((4,), 100, dtype=torch.int32)
    with pytest.raises(NotFinite) as caught:
        tilewright.run(window_per_head, {"q": data.q, "kv": leaf, "window": window}, data.offsets)
    assert {"tensor": "kv_k", "seq": 3, "key": 10}.items() <= caught.value.fields.items()


@pytest.mark.both_targets
@pytest.mark.parametrize("where", [mask("sliding_window_causal", 4), lambda q, k: (k <= q) & ((q - k) % 7 == 0)])
def test_checked_mode_ignores_what_nobody_sees(
    where: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot that no row sees holds anything; sinks and results of -inf are no contents of a cache."""
    data = batch(rng)
    cache = spoil(data, rng, 3, 4, nan)
    monkeypatch.setenv("TILEWRIGHT_VALIDATE", "1")
    sink = torch.full((4,), -torch.inf)
    for partitions in (1, 3):
        schedule = Schedule(rows=2, keys=4, partitions=partitions)
        out, _ = attention(data.q, data.offsets, cache, where=where, schedule=schedule, sink=sink)
        assert bool(out.isfinite().all())


MEMORY = """
import resource, sys, torch
from tilewright.ops import PagedKVCache, generic_flash_attention_kv_cache_ragged_sink as attention
dtype = getattr(torch, sys.argv[1])
pages = (512 << 20) // (2 * 64 * 2 * 64 * dtype.itemsize)
def run(n):
    blocks = torch.empty(n, 2, 1, 64, 2, 64, dtype=dtype)
    scales = torch.empty(n, 2, 1, 64, 2, 1) if dtype.itemsize == 1 else None
    blocks[n - 1] = torch.ones(2, 1, 64, 2, 64).to(dtype)
    if scales is not None:
        scales[n - 1] = 1.0
    cache = PagedKVCache(blocks, torch.tensor([[n - 1]]), torch.tensor([63]), scales=scales)
    return attention(torch.ones(1, 4, 64), torch.tensor([0, 1]), cache, 0, 0.125)
run(2)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert run(pages).eq(1.0).all()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.both_targets
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak in kilobytes, as Linux counts it")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_a_cache_is_never_copied(dtype: str) -> None:
    """A pool of 512 MiB of which one page is touched costs a few."""
    done = subprocess.run([sys.executable, "-c", MEMORY, dtype], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 32 << 10


def test_what_skips_tiles_is_known() -> None:
    """The masks above have exact key ranges: what is counted is what must be walked."""
    for where in (mask("causal"), mask("sliding_window_causal", 4)):
        (part,) = flash_attention.trace(mask=where, sink=None).sources[0].parts
        assert all(i.exact for i in analyse(part.where))
