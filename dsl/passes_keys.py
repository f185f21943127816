"""Passes over key loops: which keys are walked, how they are fetched, where they are masked."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from .algebra import (
    add,
    at_least,
    both,
    ceildiv,
    either,
    floordiv,
    less,
    lift,
    maximum,
    minimum,
    mul,
    op,
    sub,
    substitute,
    where,
)
from .context import NO_ROWS, ROW_OK, Context, seen_by
from .dtypes import Kind, f32, i32
from .errors import AxisMismatch
from .expr import ALWAYS, Const, Coord, Elem, Expr, Iota, KeyField, Tile, Var, ordered
from .loops import Fetch, For, If, Kernel, KeyLoop, KeyReach, Let, Program, Stmt
from .rewrite import map_expressions, rewrite_body
from .spec import Listed, Range
from .tile import Map, Mask, Reduce

LAST_INDEX = (1 << 31) - 1


# ---- bounds ----------------------------------------------------------------------------------------------------------


def bound_key_loops(program: Program, cx: Context) -> Program:
    """Give key loops the ranges that rows can see.

    before: for keys of part n: body
    after:  lo_n, hi_n := keys some row of the tile may see; for kt_n in tiles of lo_n .. hi_n: k0 := ..; body
            and masks only where the tile is not wholly seen. A predicate with `|` gives a loop per alternative.
    """

    def lower(s: Stmt) -> tuple[Stmt, ...]:
        if not isinstance(s, KeyLoop):
            return (s,)
        return _bounded(s, cx) if isinstance(s.part, Range) else _listed(s, s.part, cx)

    kernels = tuple(_partitioned(replace(k, body=rewrite_body(k.body, lower)), cx) for k in program.kernels)
    reach = tuple(r for n in range(len(cx.parts)) for r in _reach(n, cx))
    beside = any(isinstance(e, KeyField) and e.leaf is not None for e in cx.spec.nodes)
    unsure = beside or not all(r.exact for r in reach)  # lists that are looked at entry by entry have no reach
    return replace(program, kernels=kernels, reach=reach, checks_reads=unsure)


def _key_range(number: int, interval: int, cx: Context) -> tuple[Expr, Expr]:
    """First key and end of one interval of a part, for rows at q0..q1."""
    i = cx.intervals[number][interval]
    lo: Expr = Const(0) if i.lo is None else maximum(i.lo, 0)
    count = cx.key_count(cx.parts[number])
    hi = count if i.hi is None else minimum(add(i.hi, 1), count)
    return lo, hi


def _reach(number: int, cx: Context) -> tuple[KeyReach, ...]:
    part, leaf, intervals = cx.parts[number], cx.parts[number].leaf, cx.intervals[number]
    if isinstance(part, Listed):
        checked = part.block == 1 and part.where == ALWAYS  # entry by entry, before anything runs
        return () if checked else (KeyReach(leaf, Const(0), cx.entry_count(leaf), exact=False),)
    ranges = (_key_range(number, n, cx) for n in range(len(intervals)))
    return tuple(KeyReach(leaf, lo, hi, i.exact) for (lo, hi), i in zip(ranges, intervals, strict=True))


def _bounded(loop: KeyLoop, cx: Context) -> tuple[Stmt, ...]:
    size = cx.schedule.keys
    out: list[Stmt] = []
    tiles: list[tuple[Expr, Expr, Expr | None, Expr | None]] = []
    base = tile_base(loop.number, cx)
    for n, label in enumerate(cx.labels(loop.number)):
        i, (lo, hi) = cx.intervals[loop.number][n], _key_range(loop.number, n, cx)
        lo_v, hi_v = Var(f"lo{label}"), Var(f"hi{label}")
        out += [Let(lo_v.name, lo), Let(hi_v.name, where(NO_ROWS, lo_v, maximum(hi, lo_v)))]
        whole: tuple[Expr | None, Expr | None] = (None, None)
        if i.whole and cx.schedule.masks != "always":
            first = lo_v if i.whole_lo is None else maximum(i.whole_lo, lo_v)
            last = hi_v if i.whole_hi is None else minimum(add(i.whole_hi, 1), hi_v)
            whole = (ceildiv(sub(first, base), size), floordiv(sub(last, base), size))
        tiles.append((floordiv(sub(lo_v, base), size), ceildiv(sub(hi_v, base), size), *whole))
    for label, (lo, hi, whole_lo, whole_hi) in zip(
        cx.labels(loop.number), _disjoint(tiles, loop.number, out), strict=True
    ):
        out += _loops(loop, label, lo, hi, whole_lo, whole_hi, cx)
    return tuple(out)


def tile_base(number: int, cx: Context) -> Expr:
    """The key that tiles of a part are counted from: 0, or the first key in sight. Alternatives share one count."""
    labels = cx.labels(number)
    return Var(f"lo{labels[0]}") if cx.schedule.start == "first" and len(labels) == 1 else Const(0)


def _listed(loop: KeyLoop, part: Listed, cx: Context) -> tuple[Stmt, ...]:
    """The loop over a row's list. A slot's key is the entry it lists, -1 where the slot is unused or past the end."""
    label, count_, slot = str(loop.number), cx.key_count(part), add(Var("k0"), Iota("key"))
    end, entry = Var(f"hi{label}"), Tile(f"entry{label}", ("key",), i32)
    spots = {"row": add(Var("row0"), Var("r0")), "head": Var("head0"), "kv_head": Var("kv_head")}
    ok = less(slot, count_)
    index = (*(spots[a] for a in part.axes[:-1]), floordiv(slot, part.block))
    listed: Expr = Elem(part.indices, index, i32, ok, part.loc)
    if part.block > 1:
        held = both(at_least(listed, 0), less(listed, LAST_INDEX // part.block))  # no block further on has 32-bit keys
        listed = where(held, add(mul(listed, part.block), op("mod", slot, lift(part.block))), -1)
    body: list[Stmt] = [
        Let("k0", mul(Var(f"kt{label}"), cx.schedule.keys)),
        Map(entry, where(ok, listed, -1), part.loc),
    ]
    for s in loop.body:
        moved = map_expressions(s, lambda e: substitute(e, {Coord("key", ("key",)): entry}))
        body.append(replace(moved, loop=label) if isinstance(moved, Fetch | Mask) else moved)
    tiles = ceildiv(end, cx.schedule.keys)
    return (Let(end.name, where(NO_ROWS, Const(0), count_)), For(f"kt{label}", Const(0), tiles, tuple(body)))


def _disjoint(
    tiles: list[tuple[Expr, Expr, Expr | None, Expr | None]], number: int, out: list[Stmt]
) -> list[tuple[Expr, Expr, Expr | None, Expr | None]]:
    """Tile ranges sorted by their start (a network of compare and swap) and cut so that no tile is walked twice."""
    if len(tiles) < 2:
        return tiles
    known = all(t[2] is not None for t in tiles)
    width = 4 if known else 2
    fresh = count()

    def let(e: Expr) -> Expr:
        name = f"u{number}_{next(fresh)}"
        out.append(Let(name, e))
        return Var(name)

    table = [[let(e) for e in t[:width] if e is not None] for t in tiles]
    for end in range(len(table) - 1, 0, -1):
        for i in range(end):
            a, b = table[i], table[i + 1]
            swap = less(b[0], a[0])
            table[i] = [let(where(swap, y, x)) for x, y in zip(a, b, strict=True)]
            table[i + 1] = [let(where(swap, x, y)) for x, y in zip(a, b, strict=True)]
    done: Expr = table[0][1]
    for row in table[1:]:
        row[0] = let(maximum(row[0], done))
        done = row[1] = let(maximum(row[1], row[0]))
    return [(r[0], r[1], r[2] if known else None, r[3] if known else None) for r in table]


def _loops(
    loop: KeyLoop, label: str, lo: Expr, hi: Expr, whole_lo: Expr | None, whole_hi: Expr | None, cx: Context
) -> list[Stmt]:
    """The loop over one interval's tiles, or three: edge, middle, edge."""
    var = f"kt{label}"
    start = Let("k0", add(tile_base(loop.number, cx), mul(Var(var), cx.schedule.keys)))

    def body(masked: bool, guard: Expr | None) -> tuple[Stmt, ...]:
        made: list[Stmt] = [start]
        for s in loop.body:
            match s:
                case Fetch():
                    made.append(replace(s, loop=label, partial=masked))
                case Mask() if masked:
                    mask = replace(s, loop=label)
                    made.append(mask if guard is None else If(guard, (mask,)))
                case Mask():
                    pass
                case _:
                    made.append(s)
        return tuple(made)

    if whole_lo is None or whole_hi is None:
        return [For(var, lo, hi, body(True, None))]
    w0, w1 = Var(f"whole_lo{label}"), Var(f"whole_hi{label}")
    ends: list[Stmt] = [
        Let(w0.name, minimum(maximum(whole_lo, lo), hi)),
        Let(w1.name, minimum(maximum(whole_hi, w0), hi)),
    ]
    if cx.schedule.masks == "branch":
        edge = either(less(Var(var), w0), at_least(Var(var), w1))
        return [*ends, For(var, lo, hi, body(True, edge))]
    return [
        *ends,
        For(var, lo, w0, body(True, None)),
        For(var, w0, w1, body(False, None)),
        For(var, w1, hi, body(True, None)),
    ]


def _partitioned(k: Kernel, cx: Context) -> Kernel:
    """Each grid point of `part` walks an equal share of the joined tiles of all loops."""
    if not any(name == "part" for name, _ in k.grid):
        return k
    ranges = [s for s in k.body if isinstance(s, Let)]
    loops = [s for s in k.body if isinstance(s, For)]
    rest = [n for n, s in enumerate(k.body) if not isinstance(s, Let | For)]
    before = [k.body[n] for n in rest if n < k.body.index(loops[0])] if loops else list(k.body)
    after = [k.body[n] for n in rest if n > k.body.index(loops[0])] if loops else []
    joined: Expr = Const(0)
    cut: list[Stmt] = []
    for n, s in enumerate(loops):
        start, size = Var(f"start{n}"), Var(f"size{n}")
        ranges += [Let(start.name, joined), Let(size.name, maximum(sub(s.hi, s.lo), 0))]
        first, end = (minimum(maximum(sub(Var(share), start), 0), size) for share in ("share_lo", "share_hi"))
        cut.append(For(s.var, add(s.lo, first), add(s.lo, end), s.body))
        joined = add(start, size)
    share = ceildiv(joined, cx.schedule.partitions)
    ranges += [Let("share", share), Let("share_lo", op("mul", Var("part"), Var("share")))]
    ranges += [Let("share_hi", add(Var("share_lo"), Var("share")))]
    return replace(k, body=(*before, *ranges, *cut, *after))


# ---- fetching --------------------------------------------------------------------------------------------------------


def fetch_keys(program: Program, cx: Context) -> Program:
    """Fetch key rows through the page table.

    before: keys = fetch leaf.k
    after:  page[key] = table[key // page_size] where some row of the tile sees the key, else -1
            keys = leaf.k[page, key % page_size] where page >= 0, else 0
    or:     keys = leaf.k[table[k0 // page_size], k0 % page_size + i_key]
            under fetch="pages", where every row sees the whole tile
    A key that no row of the tile sees is never touched, and its row is zero: zero times a weight of zero stays zero.
    """

    def lower(s: Stmt) -> tuple[Stmt, ...]:
        return _fetched(s, cx) if isinstance(s, Fetch) else (s,)

    return replace(program, kernels=tuple(replace(k, body=rewrite_body(k.body, lower)) for k in program.kernels))


def _fetched(s: Fetch, cx: Context) -> tuple[Stmt, ...]:
    number, leaf = cx.part_of(s.loop), cx.binding.leaf(s.leaf)
    if cx.schedule.fetch == "pages" and not s.partial and leaf.page_size % cx.schedule.keys == 0:
        return tuple(Map(dst, _key_row(s, f, *_within_page(s, cx), cx), s.loc) for f, dst in s.fields)
    key, ok = _keys_and_guard(s, cx)
    out: list[Stmt] = []
    part = cx.parts[number]
    unproven = not all(i.exact for i in cx.intervals[number]) if isinstance(part, Range) else part.where != ALWAYS
    if s.partial and unproven:
        scrub, seen = _seen_by_some_row(number, s.loop, cx)
        out += scrub
        ok = both(ok, op("lt", lift(0.0), seen))
    page = page_tile(number, s.leaf, cx)
    entry = Elem(f"{s.leaf}_table", (Var("seq"), floordiv(key, leaf.page_size)), i32, ok, s.loc)
    out.append(Map(page, where(ok, entry, -1), s.loc))
    slot = op("mod", key, lift(leaf.page_size))
    return (*out, *(Map(dst, _key_row(s, f, page, slot, at_least(page, 0), cx), s.loc) for f, dst in s.fields))


def _within_page(s: Fetch, cx: Context) -> tuple[Expr, Expr, Expr]:
    """Page, slots and guard of a key tile that lies in one page, and every key of which each row sees."""
    size, k0 = cx.binding.leaf(s.leaf).page_size, Var("k0")
    page = Elem(f"{s.leaf}_table", (Var("seq"), floordiv(k0, size)), i32, ALWAYS, s.loc)
    return page, add(op("mod", k0, lift(size)), Iota("key")), ALWAYS


def page_tile(number: int, leaf: str, cx: Context) -> Tile:
    """Physical pages of a key tile, -1 where the key is not read."""
    own = leaf == cx.parts[number].leaf
    return Tile(f"page{number}" if own else f"page{number}_{leaf}", ("key",), i32)


def _keys_and_guard(s: Fetch, cx: Context) -> tuple[Expr, Expr]:
    """The positions a tile fetches, and which of them may be read."""
    number = cx.part_of(s.loop)
    if isinstance(cx.parts[number], Range):
        key: Expr = Coord("key", ("key",))
        ranges = [both(at_least(key, Var(f"lo{n}")), less(key, Var(f"hi{n}"))) for n in cx.labels(number)]
        return key, either(*ranges)
    entry = Tile(f"entry{number}", ("key",), i32)
    in_table = less(floordiv(entry, cx.binding.leaf(s.leaf).page_size), Var(f"{s.leaf}_max_pages"))
    return entry, both(at_least(entry, 0), less(entry, cx.entry_count(cx.parts[number].leaf)), in_table)


def _seen_by_some_row(number: int, loop: str, cx: Context) -> tuple[list[Stmt], Expr]:
    """For predicates not proven to hold of all that is walked: which keys of the tile any row sees."""
    part = cx.parts[number]
    if isinstance(part, Range):
        where_seen = seen_by(part)
    else:
        entry = Tile(f"entry{number}", ("key",), i32)
        where_seen = substitute(part.where, {Coord("key", ("key",)): entry})
    axes = ordered((*where_seen.axes, "row", "key"))
    sees = Tile(f"sees{loop}", axes)
    out: list[Stmt] = [Map(sees, where(both(where_seen, ROW_OK), lift(1.0), 0.0))]
    for axis in axes:
        if axis != "key":
            narrow = Tile(
                f"seen{loop}" + ("" if axis == "row" else "_" + axis), tuple(a for a in sees.axes if a != axis)
            )
            out.append(Reduce(narrow, sees, "max", axis))
            sees = narrow
    return out, sees


def _key_row(s: Fetch, f: KeyField, page: Expr, slot: Expr, ok: Expr, cx: Context) -> Expr:
    """Values of a field: what is stored, times its scale unless the declaration asks for what is stored."""
    leaf = cx.binding.leaf(s.leaf)
    if f.name == "scale":
        return Elem(f"{s.leaf}_k_scale", (page, slot, Var("kv_head"), Const(0)), f32, ok, s.loc)
    stored = f.name if leaf.values or f.name == "k" else "k"
    (feature,) = (a for a in f.axes if a != "key")
    element, width = add(Iota(feature), f.start), f.start + cx.binding.size(feature)
    _check_width(s, f, width, cx)
    value: Expr = Elem(f"{s.leaf}_{stored}", (page, slot, Var("kv_head"), element), leaf.dtype.compute, ok, s.loc)
    if leaf.granularity is None or cx.spec.param(s.leaf).dtype is not None:
        return value
    block = Const(0) if leaf.granularity >= width else floordiv(element, leaf.granularity)
    scale = Elem(f"{s.leaf}_{stored}_scale", (page, slot, Var("kv_head"), block), leaf.dtype.compute, ok, s.loc)
    return op("mul", value, scale)


def _check_width(s: Fetch, f: KeyField, width: int, cx: Context) -> None:
    declared = cx.spec.param(s.leaf)
    (row,) = declared.axes if f.name == "k" else declared.value_axes
    if width > cx.binding.size(row):
        problem = f"elements {f.start}..{width - 1} of {s.leaf} rows, which are {cx.binding.size(row)} wide"
        raise AxisMismatch(loc=cx.parts[cx.part_of(s.loop)].loc, what="slice", problem=problem)


# ---- masks -----------------------------------------------------------------------------------------------------------


def apply_masks(program: Program, cx: Context) -> Program:
    """Replace what unseen keys hold, by select.

    before: scores = -inf where unseen
    after:  scores = where(predicate and key < num_keys, scores, -inf)
    By select, so that what an unseen key holds can never matter.
    """

    def lower(s: Stmt) -> tuple[Stmt, ...]:
        if not isinstance(s, Mask):
            return (s,)
        part = cx.parts[cx.part_of(s.loop)]
        if isinstance(part, Range):
            seen = both(seen_by(part), less(Coord("key", ("key",)), cx.key_count(part)))
        else:
            number = cx.part_of(s.loop)
            entry = Tile(f"entry{number}", ("key",), i32)
            where_seen = substitute(part.where, {Coord("key", ("key",)): entry})
            seen = both(at_least(page_tile(number, part.leaf, cx), 0), where_seen)
        if not set(seen.axes) <= set(s.dst.axes):  # a tile per key alone: of keys that no row sees
            number = cx.part_of(s.loop)
            seen = at_least(page_tile(number, cx.parts[number].leaf, cx), 0)
        absent = int(s.absent) if s.dst.dtype.kind is Kind.INT else s.absent
        return (Map(s.dst, where(seen, s.dst, absent), s.loc),)

    return replace(program, kernels=tuple(replace(k, body=rewrite_body(k.body, lower)) for k in program.kernels))
