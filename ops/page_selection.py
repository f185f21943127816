# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, no-untyped-def"
# Axis names stand in subscripts of annotations, which type checkers take for types.
"""Attention to the pages that may hold large scores: Quest, by the least and the greatest key of a page, elementwise.

`page_bounds` summarises pages as they fill, `choose_pages` picks and `attend_by_head` attends, which
`page_selected_attention` runs in order. A page is a block of any number of tokens, whatever the cache's page size.
"""

from tilewright.codegen_cache.checks import Array
from tilewright.codegen_cache.launch import run
from tilewright.dsl.annotations import Const, Paged, Rows
from tilewright.dsl.dtypes import f32
from tilewright.dsl.lang import op
from tilewright.dsl.reducers import max, topk
from tilewright.dsl.value import dot, maximum, minimum

from .cache import PagedLeaf
from .selected_blocks import Selected, attend_by_head, attend_to_choice, queries, sizes_of


@op(positions="pages")
def page_bounds(one: Rows["head", f32], pages: Paged["dim"], kv: Paged["dim"], *, block: Const[int]):
    """The greatest and the least key of pages as they fill, elementwise (Quest, arXiv 2406.10774, algorithm 1).

    one         [pages, kv_heads], all 1: says how many there are. Rows are pages, see `compressor`
    pages       where they will be stored, kv_heads of dim: only its lengths (pages before this call) are read
    kv          keys of tokens; its lengths count all tokens, this call's among them
    block       tokens of a page
    Returns greatest and least [pages, kv_heads, dim].
    Raises ArgumentShapeError where widths or batches differ, ArgumentError where kv's heads do not divide one's.
    """
    keys = kv.keys(where=lambda page, token: token // block == page)
    return {"greatest": max(keys.k * one, over="key"), "least": -max(-keys.k * one, over="key")}


@op
def choose_pages(
    q: Rows["head", "dim"], bounds: Paged["dim"], *, block: Const[int], top_k: Const[int], local: Const[int] = 1
):
    """Quest's choice: the pages with the largest bound on a key's product with the query, by head.

    q           [rows, heads, dim]
    bounds      for every full page, its greatest key as key row and its least as value row (`page_bounds`); its
                lengths count tokens before this call
    block       tokens of a page
    top_k       pages listed: best first, equal ones by position, then -1
    local       pages at the end that are no candidates, as they are attended in any case
    Returns out [rows, heads, top_k] int32.
    Raises ArgumentShapeError where widths or batches differ, ArgumentError where kv heads do not divide heads.
    """
    page = bounds.keys(where=lambda query, key: key // block <= query // block - local, pool=block)
    return topk(dot(maximum(q, 0.0), page.k) + dot(minimum(q, 0.0), page.v), top_k)


def page_selected_attention(
    q: Array,
    input_row_offsets: Array,
    kv: PagedLeaf,
    bounds: PagedLeaf,
    scale: float,
    *,
    block: int,
    top_k: int,
    local: int = 1,
    target: str | None = None,
) -> Selected:
    """Quest: every head of a row attends to its last page and to the `top_k` before it that may matter most.

    q           [rows, heads, dim], float32, float16 or bfloat16
    input_row_offsets   [batch + 1], int32, int64 or uint32
    kv, bounds, scale, block, top_k, local      as in `attend_by_head` and `choose_pages`, at least 1 each

    Raises the `Argument*` errors.
    """
    name = "page_selected_attention"
    q, sizes = queries(name, q), sizes_of(name, block=block, top_k=top_k, local=local)
    found = run(choose_pages, {"q": q, "bounds": bounds}, input_row_offsets, constants=sizes, target=target, op=name)
    return attend_to_choice(name, attend_by_head, q, found["out"], input_row_offsets, kv, scale, sizes, target)
