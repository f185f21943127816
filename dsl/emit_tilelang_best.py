"""Selection on a GPU: the best of a row by radix digits, then a sorting network. No ties, so no order of threads shows.

A column's key is its order key and, among equal ones, its index counted down: two 32-bit words, all different. Digit by
digit a histogram says which digit the last key that is taken has. What lies above is collected in any order and sorted.
Barriers are of the whole block, where all threads come: machines without barriers for some warps run it as well.
"""

from __future__ import annotations

from .emit_tilelang_values import Values
from .errors import IllegalSchedule
from .legal_gpu import BINS, selection_slots
from .loops import Best, Kernel

PREFIX, NEED, TIED, TAKEN, WORD = range(5)  # of `best_state`: what the threads agree on


def best_lines(s: Best, values: Values, kernel: Kernel) -> list[str]:
    """The statement for a tile of one point. Raises IllegalSchedule where a tile holds more."""
    *outer, rank = s.dst.axes
    for axis in outer:
        if values.layout.sizes.get(axis, 1) != 1:
            problem = "a selection on a GPU is of one row and head at a time"
            raise IllegalSchedule(field="rows", value=values.layout.sizes[axis], problem=problem)
    k, threads = values.layout.sizes[rank], kernel.threads
    slots = selection_slots(k)
    row = ", ".join(values.text(i) for i in s.index)
    return [
        f'best_histogram = T.alloc_shared(({BINS},), "int32")',
        'best_state = T.alloc_shared((5,), "uint32")',
        f'best_keys = T.alloc_shared(({slots},), "uint32")',
        f'best_columns = T.alloc_shared(({slots},), "int32")',
        *(f'best_{n} = T.alloc_var("uint32")' for n in ("key", "word", "need", "above", "other")),
        *(f'best_{n} = T.alloc_var("int32")' for n in ("count", "digits", "slot", "column", "second")),
        "best_thread = T.get_thread_binding()",
        f"best_count = {values.text(s.count)}",
        *_strided("best_i", str(slots), threads, ["best_keys[best_i] = T.uint32(0)", "best_columns[best_i] = -1"]),
        "if best_thread == 0:",
        f"    best_state[{PREFIX}] = T.uint32(0)",
        f"    best_state[{NEED}] = T.uint32({k})",
        f"    best_state[{TIED}] = T.uint32(0)",
        f"    best_state[{TAKEN}] = T.uint32(0)",
        "T.sync_threads()",
        "# the order key of the last one taken",
        *_digits("4", s.window, row, threads, first=True),
        "if best_thread == 0:",
        f"    best_state[{WORD}] = best_state[{PREFIX}]",
        f"    best_state[{PREFIX}] = T.uint32(0)",
        "T.sync_threads()",
        "# more keys are equal to it than are taken: its index, counted down",
        f"best_digits = T.if_then_else(best_state[{TIED}] != T.uint32(0), 4, 0)",
        *_digits("best_digits", s.window, row, threads, first=False),
        "# what lies above, in any order",
        *_strided("best_i", "best_count", threads, _collected(s.window, row)),
        "T.sync_threads()",
        *_sorted(slots, threads),
        *_strided("best_i", str(k), threads, [
            f"t_{s.dst.name}[{_first(values, s)}best_i] = "
            "T.if_then_else(best_keys[best_i] != T.uint32(0), best_columns[best_i], -1)"
        ]),
        "T.sync_threads()",
    ]  # fmt: skip


def _first(values: Values, s: Best) -> str:
    return "0, " * (len(values.layout.dims(s.dst.axes)) - 1)


def _strided(var: str, count: str, threads: int, body: list[str]) -> list[str]:
    """`body` for each of `count` values of `var`, by all threads."""
    return [
        f"for {var}_turn in T.serial(T.ceildiv({count}, {threads})):",
        f"    {var} = {var}_turn * {threads} + best_thread",
        f"    if {var} < {count}:",
        *("        " + line for line in body),
    ]


def _key(window: str, row: str, column: str) -> str:
    """An order key as a number that compares unsigned; 0: not a candidate."""
    return f'T.reinterpret({window}[{row}, {column}], "uint32") ^ T.uint32(0x80000000)'


def _digits(count: str, window: str, row: str, threads: int, first: bool) -> list[str]:
    """Digits of one word of the key, most significant first."""
    same = "(best_word >> best_shift) >> 8 == best_state[0]"
    belongs = f"T.And(best_key != T.uint32(0), {same})" if first else f"T.And(best_key == best_state[{WORD}], {same})"
    word = "best_key" if first else 'T.uint32(0xFFFFFFFF) - T.cast(best_i, "uint32")'
    counting = [
        f"best_key = {_key(window, row, 'best_i')}",
        f"best_word = {word}",
        f"if {belongs}:",
        '    T.atomic_add(best_histogram[T.cast((best_word >> best_shift) & T.uint32(255), "int32")], 1)',
    ]
    return [
        f"for best_digit in T.serial({count}):",
        '    best_shift = T.cast(24 - 8 * best_digit, "uint32")',
        *_inside(_strided("best_bin", str(BINS), threads, ["best_histogram[best_bin] = 0"])),
        "    T.sync_threads()",
        *_inside(_strided("best_i", "best_count", threads, counting)),
        "    T.sync_threads()",
        "    best_above = T.uint32(0)  # of all bins, then of those above a thread's own",
        f"    for best_bin in T.serial({BINS}):",
        '        best_above = best_above + T.cast(best_histogram[best_bin], "uint32")',
        f"    best_need = T.min(best_state[{NEED}], best_above)",
        f"    best_word = best_state[{PREFIX}]",
        "    T.sync_threads()",
        *_inside(_strided("best_bin", str(BINS), threads, [
            "best_above = T.uint32(0)",
            f"for best_higher in T.serial({BINS - 1} - best_bin):",
            f'    best_above = best_above + T.cast(best_histogram[{BINS - 1} - best_higher], "uint32")',
            'best_key = T.cast(best_histogram[best_bin], "uint32")',
            "if T.And(best_above < best_need, best_need <= best_above + best_key):",
            f'    best_state[{PREFIX}] = best_word << T.uint32(8) | T.cast(best_bin, "uint32")',
            f"    best_state[{NEED}] = best_need - best_above",
            f'    best_state[{TIED}] = T.cast(best_need - best_above != best_key, "uint32")',
        ])),
        "    T.sync_threads()",
    ]  # fmt: skip


def _collected(window: str, row: str) -> list[str]:
    equal = f"T.And(best_key == best_state[{WORD}], best_word >= best_state[{PREFIX}])"
    return [
        f"best_key = {_key(window, row, 'best_i')}",
        'best_word = T.uint32(0xFFFFFFFF) - T.cast(best_i, "uint32")',
        f"if T.And(best_key != T.uint32(0), T.Or(best_key > best_state[{WORD}], {equal})):",
        f'    best_slot = T.cast(T.atomic_add(best_state[{TAKEN}], T.uint32(1), return_prev=True), "int32")',
        "    best_keys[best_slot] = best_key",
        "    best_columns[best_slot] = best_i",
    ]


def _sorted(slots: int, threads: int) -> list[str]:
    """A bitonic network: descending keys, equal ones by ascending column."""
    if slots == 1:
        return []
    exchange = [
        "best_low = ((best_pair >> best_step) << (best_step + 1)) | (best_pair & ((1 << best_step) - 1))",
        "best_high = best_low + (1 << best_step)",
        "best_key = best_keys[best_low]",
        "best_other = best_keys[best_high]",
        "best_column = best_columns[best_low]",
        "best_second = best_columns[best_high]",
        "best_after = T.Or(best_key < best_other, T.And(best_key == best_other, best_second < best_column))",
        "if best_after == ((best_low & (2 << best_size)) == 0):",
        "    best_keys[best_low] = best_other",
        "    best_keys[best_high] = best_key",
        "    best_columns[best_low] = best_second",
        "    best_columns[best_high] = best_column",
    ]
    return [
        f"for best_size in T.serial({slots.bit_length() - 1}):",
        "    for best_back in T.serial(best_size + 1):",
        "        best_step = best_size - best_back",
        *_inside(_inside(_strided("best_pair", str(slots // 2), threads, exchange))),
        "        T.sync_threads()",
    ]


def _inside(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines]
