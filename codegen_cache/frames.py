"""Memory for the arguments of native code, laid out once for all calls of one shape."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from struct import Struct
from typing import Final

from tilewright.dsl.scalars import Number

from .native import Arguments
from .native_checks import Look, Plan, fill_function, look_function
from .native_program import FAULT_WORDS, NativeProgram
from .workspaces import Room

# Multiplications. One core takes 5 us or so for as many, and as long passes until another has woken up.
WORTH_A_THREAD: Final = 1 << 18


class Layout:
    """Where the words of a frame are, in this order, and those that stay as they are: strides and sizes.

    Each call packs the first of them, as far as the addresses of the program's arguments. Those of workspaces follow.
    """

    def __init__(
        self,
        runner: NativeProgram,
        plan: Plan,
        numbers: Sequence[str],
        sizes: Mapping[str, Number],
        beside: int,
        strides: Sequence[Sequence[int]],
    ) -> None:
        """numbers: of the call, by name. beside: how many addresses are looked at beside those the program takes.

        strides: of the program's arguments. Those of workspaces come when these are made.
        """
        source = runner.source
        self.look = look_function(runner.compiler)
        self.plan = plan
        self.fill = fill_function(runner.compiler)
        self.strides = [s for each in strides for s in each]
        self.sizes = [int(sizes.get(n, 0)) for n in source.sizes]

        self.scalars = len(source.numbers)  # after the program's numbers, the plan's scalars
        self.looked = self.scalars + len(plan.scalars)  # addresses
        self.data = self.looked + beside  # of which the program takes those from here on
        self.work = self.data + len(strides)  # and those of its workspaces, and one for its fault
        self.strides_at = self.data + len(source.tensors) + 1
        self.work_strides = self.strides_at + len(self.strides)
        self.sizes_at = self.strides_at + sum(len(a.shape) for a in source.tensors)
        self.columns = self.sizes_at + len(self.sizes)  # what the look finds
        self.pairs = self.columns + len(plan.columns) + 1
        self.fault = self.pairs + 1
        self.words = self.fault + FAULT_WORDS

        at = {n: i for i, n in enumerate(numbers)}
        order = [at[n] for n in (*source.numbers, *plan.scalars)]
        self.order = None if order == list(range(len(numbers))) else order  # None: all numbers, as they come
        form = f"={self.scalars}d{len(plan.scalars)}q{beside + len(strides)}Q"
        self.pack = Struct(form).pack_into
        self.scalar_sizes = [(self.sizes_at + i, at[n]) for i, n in enumerate(source.sizes) if n in at]
        column = {n: i for i, n in enumerate(plan.columns)}
        self.column_sizes = [(self.sizes_at + i, column[n]) for i, n in enumerate(source.sizes) if n in column]


class Frame:
    """Memory for one call at a time."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._words = words = (ctypes.c_int64 * layout.words)()
        words[layout.strides_at : layout.work_strides] = layout.strides  # type: ignore[assignment]  # integers do
        words[layout.sizes_at : layout.columns] = layout.sizes  # type: ignore[assignment]

        def address(at: int) -> int:
            return ctypes.addressof(words) + 8 * at

        words[layout.strides_at - 1] = address(layout.fault)
        self._look = Look(layout.plan.address, address(layout.looked), address(layout.scalars), address(layout.columns))
        self._look_address = ctypes.addressof(self._look)
        starts = (layout.data, layout.strides_at, layout.sizes_at, 0)
        self._arguments = Arguments(*map(address, starts))
        self.arguments = ctypes.addressof(self._arguments)
        self._room: Room | None = None
        self._base = 0

    def fine(self, values: list[object], addresses: Sequence[int]) -> bool:
        """Take a call's numbers and addresses; whether these, and the values there, are as they must be."""
        layout = self._layout
        ordered = values if layout.order is None else [values[i] for i in layout.order]
        layout.pack(self._words, 0, *ordered, *addresses)
        for at, i in layout.scalar_sizes:
            self._words[at] = values[i]  # type: ignore[call-overload]  # an integer
        return not layout.look(self._look_address)

    def columns(self) -> list[int]:
        """What `fine` has found: the columns, then the bytes of a row."""
        return self._words[self._layout.columns : self._layout.pairs]

    def threads(self, most: int) -> int:
        """How many are worth their waking, which takes longer than all of a small call. At least one."""
        cost = self._layout.plan.pair_cost
        return min(most, 1 + self._words[self._layout.pairs] * cost // WORTH_A_THREAD) if cost else most

    def place(self, room: Room, base: int) -> None:
        """Workspaces in a block of memory at `base`, as kernels find them; their sizes are of the columns found."""
        if room is not self._room or base != self._base:  # the same as in the last call, most times
            words, layout = self._words, self._layout
            for at, column in layout.column_sizes:
                words[at] = words[layout.columns + column]
            for at, start in enumerate(room.starts, layout.work):
                words[at] = base + start
            for at, stride in enumerate(room.strides, layout.work_strides):
                words[at] = stride
            self._room, self._base = room, base
        for start, count, value in room.fills:
            self._layout.fill(base + start, count, value)

    def fault(self) -> list[int] | None:
        """The fault that the program has met, if any; none is left."""
        words, at = self._words, self._layout.fault
        if not words[at]:
            return None
        found = words[at : at + FAULT_WORDS]
        words[at] = 0
        return found
