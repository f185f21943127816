"""The loop nest: statements over tiles inside loops over a grid. What the interpreter runs and the emitters print."""

from __future__ import annotations

from dataclasses import dataclass, field

from .dtypes import DType
from .expr import ALWAYS, Axes, Expr, KeyField, Tile
from .source import Loc
from .spec import Part
from .tile import TileStmt


@dataclass(frozen=True)
class Let:
    """name := a scalar, for the rest of the enclosing body."""

    name: str
    expr: Expr


@dataclass(frozen=True)
class Search:
    """name := the last index in lo..hi, hi excluded, for which `cond` holds; how a flat tile index finds its sequence.

    `cond` reads the name, is true at lo, and once false stays false.
    """

    name: str
    lo: Expr
    hi: Expr
    cond: Expr


@dataclass(frozen=True)
class For:
    """Serial loop over lo..hi, hi excluded.

    `stages`: tiles loaded from memory are kept that many times more, so that what later iterations load overlaps with
    what earlier ones compute. It changes when loads happen, and nothing else.
    """

    var: str
    lo: Expr
    hi: Expr
    body: tuple[Stmt, ...]
    stages: int = 0


@dataclass(frozen=True)
class If:
    """Uniform branch: the condition has no tile axis."""

    cond: Expr
    body: tuple[Stmt, ...]


@dataclass(frozen=True)
class Strip:
    """`body` for every (row, head) point of the tile, `points` of them at a time; where the cuts fall changes nothing.

    `first` and `last` name a strip's first and last row, counted in the tile. `columns` names two scalars that the body
    sets: no row of the strip sees a key of the key tile before the one or from the other on, so what statements over
    keys do there reaches nothing, and need not be done.
    """

    first: str
    last: str
    points: int
    columns: tuple[str, str] | None
    body: tuple[Stmt, ...]


@dataclass(frozen=True)
class Store:
    """tensor[index] = expr at every point of `axes` where `ok`, rounded once to the tensor's dtype."""

    tensor: str
    index: tuple[Expr, ...]
    expr: Expr
    axes: Axes
    ok: Expr = ALWAYS
    loc: Loc | None = field(default=None, compare=False)


@dataclass(frozen=True)
class KeyLoop:
    """Every key tile of one part of a source. Lowered to `For` loops once key ranges are known."""

    number: int  # of the part, over all passes
    part: Part
    body: tuple[Stmt, ...]


@dataclass(frozen=True)
class Fetch:
    """The named fields of this tile's key rows, each into its tile. Becomes page look-ups and guarded loads."""

    leaf: str
    fields: tuple[tuple[KeyField, Tile], ...]
    loop: str = ""
    partial: bool = True  # the tile may hold keys that some row does not see
    loc: Loc | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Best:
    """dst[.., rank] = columns of the largest integers among the first `count` of window[index, :].

    Descending, equal ones by ascending column, candidates only; then -1.
    """

    dst: Tile
    window: str
    index: tuple[Expr, ...]
    count: Expr
    loc: Loc | None = field(default=None, compare=False)


Stmt = TileStmt | Let | Search | For | If | Strip | Store | KeyLoop | Fetch | Best


@dataclass(frozen=True)
class Alloc:
    """A tile's storage: its axes with their sizes, and the dtype it holds.

    `scope` is where a GPU keeps it: "shared", where any thread reads any element, or "fragment", in registers of the
    threads that compute them.
    """

    name: str
    axes: tuple[tuple[str, int], ...]
    dtype: DType
    scope: str = ""


@dataclass(frozen=True)
class Arg:
    """A tensor (or, with shape (), scalar) argument. A str in the shape is a run-time size."""

    name: str
    dtype: DType
    shape: tuple[int | str, ...]
    fill: int | None = None  # what a workspace starts as; None: NaN
    pages_of: str | None = None  # of a lookup table: the tensor whose pages it holds


@dataclass(frozen=True)
class Kernel:
    """`body`, once for every point of the grid; points are independent.

    rows, heads: of a tile, where they are not the schedule's.
    threads, points: on a GPU, the threads that share a grid point, and how many (row, head) points storage is given,
        a multiple of what its matrix units take. Points past rows * heads reach no output.
    """

    name: str
    grid: tuple[tuple[str, Expr], ...]
    args: tuple[Arg, ...]
    tiles: tuple[Alloc, ...]
    body: tuple[Stmt, ...]
    rows: int | None = None
    heads: int | None = None
    threads: int = 0
    points: int = 0


@dataclass(frozen=True)
class Program:
    """Kernels run in order; workspaces live for one call."""

    name: str
    args: tuple[Arg, ...]
    workspaces: tuple[Arg, ...]
    kernels: tuple[Kernel, ...]
    reach: tuple[KeyReach, ...] = ()
    checks_reads: bool = False  # what is read is known only while the nest runs, which then may refuse a page
    columns: tuple[tuple[str, Expr], ...] = ()  # run-time sizes: the largest value of a closed form over sequences
    lengths: str | None = None  # the argument whose lengths define num_keys
    row_bytes: Expr | None = None  # workspace bytes of one row: the kernels run for a window of rows at a time


@dataclass(frozen=True)
class KeyReach:
    """Keys of a leaf that rows at positions q0..q1 can see, in closed form: what checked mode needs to look at."""

    leaf: str
    lo: Expr
    hi: Expr  # excluded
    exact: bool  # every key of the range is seen by some row; False: some may not be
