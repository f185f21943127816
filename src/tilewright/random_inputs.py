"""Random ragged, paged inputs for any operator, made by kind from its declaration.

Page tables, offsets and scales are structurally valid, and what an operator must not touch is made to show when it is
touched: pages lie in random order, unused slots hold NaN, unused table entries hold junk. What was stored can be read
back dense, sequence by sequence in float64, for a reference to compute with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tilewright.dsl.dtypes import DTYPES, DType
from tilewright.dsl.errors import ArgumentValueError
from tilewright.dsl.expr import Expr, KeyField, Reduction, walk
from tilewright.dsl.lang import Operator
from tilewright.dsl.schedule import Binding, LeafBinding
from tilewright.dsl.spec import Declared, Listed, ParamKind, Range, Spec
from tilewright.ops.cache import PagedKVCache, PagedLeaf

SPARE_PAGES = 3  # pages of a pool that no sequence owns: all NaN, and what stale table entries point to
FEATURE = 64  # default extent of a feature axis
JUNK = (-1, 2**31 - 1)
AXES_OF_THE_BATCH = frozenset({"row", "seq", "head", "kv_head", "key"})


@dataclass(frozen=True)
class Sizes:
    """Every size of a generated call. `rows` and `cached` have one entry a sequence."""

    rows: tuple[int, ...] = (5, 1, 16)  # query rows of this call
    cached: tuple[int, ...] = (3, 70, 0)  # tokens cached before it
    heads: int = 8
    kv_heads: int | None = None  # None: 2, or 1 for an operator that reduces over all heads
    dims: Mapping[str, int] = field(default_factory=dict)  # extents of other axes, by name
    page_size: int = 16
    dtype: str = "float32"  # of tensors whose declaration leaves it open
    cache_dtype: str | None = None  # of caches; None: dtype. float8_e4m3fn caches get scales
    granularity: int | None = None  # elements per scale; None: a whole row
    per_position: Mapping[str, int] = field(default_factory=dict)  # tokens a cache holds for each position, if not one

    @property
    def num_keys(self) -> tuple[int, ...]:
        return tuple(r + c for r, c in zip(self.rows, self.cached, strict=True))


@dataclass(frozen=True, eq=False)
class DenseLeaf:
    """One sequence's rows of a paged cache, in float64, as the operator reads them.

    k: [heads, keys, dim], v: [heads, keys, value_dim], None in a cache of keys alone. Per query head: the rows of a
    key-value head stand once for each head of its group. Stored values times their scales; in a cache declared by its
    stored dtype, `Paged["dim", f8e4m3]`, what is stored, and scale [heads, keys] is that of the key rows.
    """

    k: Tensor
    v: Tensor | None
    scale: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Inputs:
    """A generated call of an operator: what `tilewright.run` takes, and the same numbers dense.

    arguments: a value per run-time parameter, None for an optional operand left out
    input_row_offsets: [batch + 1] int32
    """

    operator: Operator
    spec: Spec
    constants: Mapping[str, object]
    sizes: Sizes
    arguments: Mapping[str, object]
    input_row_offsets: Tensor

    def dense(self, seq: int) -> dict[str, object]:
        """One sequence's arguments by parameter name, floats in float64, for a reference.

        tensor   its rows of this sequence where it has a row axis, its entry where it has a seq axis, else all of it
        scalar   the number
        paged    a DenseLeaf of every key it holds: `.k` [heads, keys, dim] and `.v` [heads, keys, value_dim]
        also     pos [rows] and key [keys], int64 positions; num_keys and seq, int; the constants as they are
        """
        first, count = int(self.input_row_offsets[seq]), self.sizes.rows[seq]
        keys = self.sizes.num_keys[seq]
        out: dict[str, object] = {
            **self.constants,
            "pos": torch.arange(self.sizes.cached[seq], keys), "key": torch.arange(keys), "num_keys": keys, "seq": seq,
        }  # fmt: skip
        heads = extents(self.spec, self.sizes)["head"]
        declared = {p.name: p for p in self.spec.params}
        for name, value in self.arguments.items():
            if isinstance(value, Tensor):
                out[name] = _of_sequence(value, declared[name].axes, seq, first, count)
            elif isinstance(value, PagedLeaf):
                out[name] = _dense_leaf(value, declared[name], seq, stored(self.spec, self.sizes, name)[seq], heads)
            else:
                out[name] = value
        return out


def random_inputs(
    operator: Operator,
    constants: Mapping[str, object],
    sizes: Sizes,
    seed: int = 0,
    given: Mapping[str, object] | None = None,
) -> Inputs:
    """Inputs that depend on the operator's declaration, the constants, the sizes and the seed alone.

    constants: compile-time constants, and None for each optional operand to leave out.
    given: values to use instead: a number for a scalar; a tensor, or a number that fills it, for a tensor.

    Scalars are 1, but for `scale`, which is (key width) ** -0.5. Floats are normal. Lists of entries name stored ones,
    with unused slots anywhere; other integers lie below the smallest extent of any feature axis, so that they can be
    positions in one. Raises ArgumentValueError for sizes that do not fit together.
    """
    spec = operator.trace(**constants)
    gen, size = torch.Generator().manual_seed(seed), extents(spec, sizes)
    arguments: dict[str, object] = {n: None for n in constants if operator.parameters[n][0].kind is not None}
    for p in spec.params:
        value = (given or {}).get(p.name)
        match p.kind:
            case ParamKind.SCALAR:
                arguments[p.name] = _scalar(p, spec, size) if value is None else value
            case ParamKind.TENSOR:
                t = _tensor(p, spec, sizes, size, gen)  # in any case, so that the other tensors do not change
                arguments[p.name] = t if value is None else value if isinstance(value, Tensor) else _filled(t, value)
            case ParamKind.PAGED:
                arguments[p.name] = _leaf(p, spec, sizes, size, gen)
    own = {n: constants.get(n, default) for n, (a, default) in operator.parameters.items() if a.kind is None}
    offsets = torch.tensor([0, *sizes.rows], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Inputs(operator, spec, own, sizes, arguments, offsets)


# ---- sizes -----------------------------------------------------------------------------------------------------------


def extents(spec: Spec, sizes: Sizes) -> dict[str, int]:
    """The extent of every axis that a parameter has. Raises ArgumentValueError for sizes that do not fit together."""
    paged = [p for p in spec.params if p.kind is ParamKind.PAGED]
    tensors = [p for p in spec.params if p.kind is ParamKind.TENSOR]
    has_heads = any("head" in p.axes for p in tensors)
    heads = sizes.heads if has_heads else 1
    kv_heads = sizes.kv_heads or (2 if heads % 2 == 0 and not _reduces_heads(spec) else 1)
    kv_heads = kv_heads if has_heads else 1
    if heads % kv_heads:
        raise ArgumentValueError(
            op=spec.name, argument="kv_heads", got=kv_heads, expected=f"a divisor of heads={heads}"
        )
    longest = max(sizes.num_keys, default=0)
    out = {
        "row": sum(sizes.rows), "seq": len(sizes.rows), "head": heads, "kv_head": kv_heads, "key": longest,
    }  # fmt: skip
    for axis, n in spec.fixed_sizes.items():
        out[axis] = n  # of slices of rows, which the rows then have room for
    for p in paged:
        ends = [e.start + (e.size or 0) for e in spec.nodes if isinstance(e, KeyField) and p.name in _leaves(spec, e)]
        if (end := max(ends, default=0)) and p.axes[0] not in sizes.dims:
            out.setdefault(p.axes[0], end)
    features = {a for p in paged for a in (*p.axes, *p.value_axes)} | spec.tile_axes
    for axis in (a for p in (*paged, *tensors) for a in (*p.axes, *p.value_axes)):
        # An axis that no tile has is addressed by expressions, most often by positions or distances.
        out.setdefault(axis, sizes.dims.get(axis, FEATURE if axis in features else max(1, longest)))
    if unknown := set(sizes.dims) - (set(out) - AXES_OF_THE_BATCH):
        known = ", ".join(sorted(set(out) - AXES_OF_THE_BATCH)) or "none"
        raise ArgumentValueError(
            op=spec.name, argument="dims", got=", ".join(sorted(unknown)), expected=f"axes out of {known}"
        )
    return out


def _leaves(spec: Spec, e: KeyField) -> set[str]:
    """The paged caches whose key rows this is a field of."""
    if e.name != "k":
        return set()
    return {e.leaf} if e.leaf is not None else {part.leaf for part in spec.sources[e.source].parts}


def binding_of(spec: Spec, sizes: Sizes) -> Binding:
    """The Binding that a call with inputs of these sizes has; outputs have the dtype they are computed in."""
    size = extents(spec, sizes)
    dtypes = {p.name: _dtype(p, sizes) for p in spec.params if p.kind is ParamKind.TENSOR}
    dtypes |= {n: e.dtype for n, e in spec.outputs}
    leaves = {p.name: _leaf_binding(p, spec, sizes, size) for p in spec.params if p.kind is ParamKind.PAGED}
    static = {a: n for a, n in size.items() if a in spec.static_axes} | {"head": size["head"], **spec.fixed_sizes}
    ordered = sorted(dtypes.items(), key=lambda d: d[0])
    return Binding(tuple(sorted(static.items())), tuple(ordered), tuple(leaves.items()))


def _leaf_binding(p: Declared, spec: Spec, sizes: Sizes, size: Mapping[str, int]) -> LeafBinding:
    dtype, values = _cache_dtype(p, sizes), reads_values(spec, p)
    granularity = None
    if dtype.name == "float8_e4m3fn":
        widths = [size[p.axes[0]], *([size[p.value_axes[0]]] if values else [])]
        whole_row = p.dtype is not None or sizes.granularity is None  # an operator that reads scales reads one a row
        granularity = max(widths) if whole_row else sizes.granularity
    return LeafBinding(sizes.page_size, size["kv_head"], dtype, values, granularity)


def _dtype(p: Declared, sizes: Sizes) -> DType:
    return p.dtype or DTYPES[sizes.dtype]


def _cache_dtype(p: Declared, sizes: Sizes) -> DType:
    return p.dtype or DTYPES[sizes.cache_dtype or sizes.dtype]


def _expressions(spec: Spec) -> Iterable[Expr]:
    for _, e in spec.outputs:
        yield from walk(e)
    for f in spec.folds:
        for e in f.expressions:
            yield from walk(e)


def _reduces_heads(spec: Spec) -> bool:
    return any(isinstance(e, Reduction) and e.over == "head" for e in _expressions(spec))


def stored(spec: Spec, sizes: Sizes, leaf: str) -> tuple[int, ...]:
    """Keys that a leaf holds for each sequence: one a token, a window each, or one a pool whose tokens are there."""
    parts = [part for s in spec.sources for part in s.parts if part.leaf == leaf]
    pool = min((part.pool for part in parts if isinstance(part, Range)), default=1)
    return tuple(n * sizes.per_position.get(leaf, 1) // pool for n in sizes.num_keys)


def _lengths(spec: Spec, sizes: Sizes, leaf: str) -> tuple[int, ...]:
    """A leaf's cache_lengths: tokens before this call where they define positions, else every entry it holds."""
    return sizes.cached if leaf == spec.positions else stored(spec, sizes, leaf)


def reads_values(spec: Spec, p: Declared) -> bool:
    """Whether a paged leaf has values, not keys alone: the operator reads them, or declares them of another width."""
    if p.value_axes != p.axes:
        return True
    sources = {n for n, s in enumerate(spec.sources) if any(part.leaf == p.name for part in s.parts)}
    return any(isinstance(e, KeyField) and e.source in sources and e.name == "v" for e in _expressions(spec))


# ---- values ----------------------------------------------------------------------------------------------------------


def _scalar(p: Declared, spec: Spec, size: Mapping[str, int]) -> int | float:
    if p.name == "scale" and (leaf := next((d for d in spec.params if d.kind is ParamKind.PAGED), None)):
        return float(size[leaf.axes[0]] ** -0.5)
    return 1 if p.dtype is not None and p.dtype.compute.name == "int32" else 1.0


def _tensor(p: Declared, spec: Spec, sizes: Sizes, size: Mapping[str, int], gen: torch.Generator) -> Tensor:
    for part in (part for s in spec.sources for part in s.parts):
        if isinstance(part, Listed) and part.indices == p.name:
            blocks = tuple(-(-n // part.block) for n in stored(spec, sizes, part.leaf))
            return _lists(blocks, sizes, [size[a] for a in p.axes[1:]], gen).to(torch_dtype(_dtype(p, sizes)))
    shape, dtype = [size[a] for a in p.axes], torch_dtype(_dtype(p, sizes))
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=gen).to(torch.bool)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=gen).to(dtype)
    features = [n for a, n in size.items() if a not in AXES_OF_THE_BATCH]
    return torch.randint(0, max(1, min(features, default=1)), shape, generator=gen).to(dtype)


def _lists(entries: tuple[int, ...], sizes: Sizes, inner: list[int], gen: torch.Generator) -> Tensor:
    """A list of entries for every row [rows, .., slots]: any that its sequence has, some twice, a quarter unused."""
    rows: list[Tensor] = [torch.empty(0, *inner, dtype=torch.int64)]
    for held, count in zip(entries, sizes.rows, strict=True):
        listed = torch.randint(0, max(1, held), (count, *inner), generator=gen)
        unused = torch.rand(count, *inner, generator=gen) < (0.25 if held else 2)
        rows.append(torch.where(unused, -1 - listed, listed))  # any negative index is unused
    return torch.cat(rows)


def _filled(like: Tensor, value: object) -> Tensor:
    return torch.full(like.shape, float(str(value))).to(like.dtype)


def _leaf(p: Declared, spec: Spec, sizes: Sizes, size: Mapping[str, int], gen: torch.Generator) -> PagedLeaf:
    """A leaf that holds random rows for every key of every sequence, stored through `PagedKVCache.append`."""
    bound = _leaf_binding(p, spec, sizes, size)
    dtype, kv_heads, page = torch_dtype(bound.dtype), bound.kv_heads, bound.page_size
    held = stored(spec, sizes, p.name)
    table, pages = _table(held, page, gen)
    widths = [size[p.axes[0]], *([size[p.value_axes[0]]] if bound.values else [])]
    pools = [torch.full((pages, page, kv_heads, n), torch.nan).to(dtype) for n in widths]
    rows = [torch.randn(sum(held), kv_heads, n, generator=gen) for n in widths]
    scales: list[Tensor | None] = [None] * len(widths)
    if bound.granularity is not None:
        scales = [torch.full((pages, page, kv_heads, -(-n // bound.granularity)), torch.nan) for n in widths]

    def cache(lengths: tuple[int, ...]) -> PagedKVCache:
        return PagedKVCache.from_block_table(
            pools[0],
            pools[1] if bound.values else None,
            table,
            torch.tensor(lengths, dtype=torch.int32),
            k_scales=scales[0],
            v_scales=scales[1] if bound.values else None,
            quantization_granularity=bound.granularity,
        )

    offsets = torch.tensor([0, *held]).cumsum(0)
    empty = cache((0,) * len(sizes.rows))
    empty.append(0, rows[0], rows[1] if bound.values else None, offsets)
    return cache(_lengths(spec, sizes, p.name)).layer(0)


def _table(keys: tuple[int, ...], page_size: int, gen: torch.Generator) -> tuple[Tensor, int]:
    """A lookup table [batch, max_pages] over pages in random order, and the number of pages in the pool.

    Entries past a sequence's keys hold what must never be followed: -1, 2**31 - 1, and pages of others.
    """
    counts = [-(-n // page_size) for n in keys]
    pages, width = sum(counts) + SPARE_PAGES, max(counts, default=0) + 2
    order = torch.randperm(pages, generator=gen).tolist()
    table = torch.empty(len(counts), width, dtype=torch.int32)
    for b, n in enumerate(counts):
        owned, order = order[:n], order[n:]
        unused = [(*JUNK, order[-1])[(b + i) % 3] for i in range(width - n)]
        table[b] = torch.tensor(owned + unused, dtype=torch.int32)
    return table, pages


def torch_dtype(dtype: DType) -> torch.dtype:
    found = getattr(torch, dtype.name)
    assert isinstance(found, torch.dtype)
    return found


# ---- dense -----------------------------------------------------------------------------------------------------------


def _of_sequence(t: Tensor, axes: tuple[str, ...], seq: int, first: int, count: int) -> Tensor:
    if "row" in axes:
        t = t.narrow(axes.index("row"), first, count)
    if "seq" in axes:
        t = t.select(axes.index("seq"), seq)
    if t.dtype == torch.bool:
        return t
    return t.to(torch.float64 if t.dtype.is_floating_point else torch.int64)


def _dense_leaf(leaf: PagedLeaf, p: Declared, seq: int, keys: int, heads: int) -> DenseLeaf:
    as_stored = p.dtype is not None
    k = gather(leaf, leaf.keys, None if as_stored else leaf.key_scales, seq, keys, heads)
    v = scale = None
    if leaf.values is not None:
        v = gather(leaf, leaf.values, None if as_stored else leaf.value_scales, seq, keys, heads)
    if as_stored and leaf.key_scales is not None:
        scale = gather(leaf, leaf.key_scales, None, seq, keys, heads)[..., 0]
    return DenseLeaf(k, v, scale)


def gather(leaf: PagedLeaf, pages: Tensor, scales: Tensor | None, seq: int, keys: int, heads: int) -> Tensor:
    """One sequence's rows of keys or values, dense: [heads, keys, width], each key-value head once per query head."""
    used = leaf.lookup_table[seq, : -(-keys // leaf.page_size)].long()
    rows = pages[used].flatten(0, 1)[:keys].to(torch.float64)
    if scales is not None and leaf.quantization_granularity is not None:
        each = scales[used].flatten(0, 1)[:keys].to(torch.float64)
        rows = rows * each.repeat_interleave(leaf.quantization_granularity, -1)[..., : rows.shape[-1]]
    return rows.transpose(0, 1).repeat_interleave(heads // rows.shape[1], 0)
