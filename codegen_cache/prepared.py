"""Calls made again: what a call's facts decide is done once, and what values decide is done each time.

A hit skips the checks of dtypes, shapes, strides and devices, the trace, the binding, the choice of target and schedule
and the look-up of the program: these read nothing but what the call's key holds (calls.py). It looks at values and at
addresses (native_checks.py), makes outputs and calls. Where the look does not find all well, or rows do not fit one
window, it does nothing and the ordinary way is taken, from which every refusal comes, in the same words.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Final

import torch
from torch import Tensor

from tilewright.dsl import knobs
from tilewright.dsl.scalars import Number
from tilewright.dsl.spec import Spec
from tilewright.dsl.windows import sizes_named

from . import workspaces
from .bind import Bound
from .calls import Facts, Key, may_be_kept, names_of
from .frames import Frame, Layout
from .native_checks import NotPlanned, plan_of
from .native_program import NativeProgram, as_listed

MOST: Final = 1024  # calls remembered; a few KiB each, and no tensor of the caller's
_CALLS: dict[Key, PreparedCall] = {}


def again(facts: Facts | None, budget_bytes: int) -> dict[str, Tensor] | None:
    """The outputs, if such a call was prepared and this one is found to be in order; else None, and nothing is done."""
    if facts is None or (call := _CALLS.get(facts[0])) is None:
        return None
    return call.run(facts[1], facts[2], budget_bytes)


def first(
    facts: Facts | None, spec: Spec, runner: object, bound: Bound, results: Mapping[str, Tensor], budget_bytes: int
) -> dict[str, Tensor] | None:
    """Make a call whose shapes, dtypes, strides and devices are in order the fast way, and remember it for the next.

    results: tensors like the outputs, by name; of a buffer, the buffer.

    None, and nothing is done, for a call that cannot be made so; and where its values may not be in order, or rows do
    not fit one window. The ordinary way is for all of these.
    """
    if facts is None or (call := _prepared(facts, spec, runner, bound, results)) is None:
        return None
    if len(_CALLS) >= MOST:
        _CALLS.clear()
    _CALLS[facts[0]] = call
    return call.run(facts[1], facts[2], budget_bytes)


def _prepared(
    facts: Facts, spec: Spec, runner: object, bound: Bound, results: Mapping[str, Tensor]
) -> PreparedCall | None:
    checked = knobs.VALIDATE.get()
    if not isinstance(runner, NativeProgram) or not bound.rows or checked is True or knobs.DEBUG.get():
        return None
    if not may_be_kept(facts) or not {*names_of(facts[3])[0]} >= bound.tensors.keys():
        return None  # a layer under another number than a plain one
    sure = not runner.program.checks_reads  # values that were looked at are all that the program could refuse
    try:
        if checked is None or not sure:
            return PreparedCall(facts, spec, runner, bound, results, looks=checked is None, copies=not sure)
        unseen = PreparedCall(facts, spec, runner, bound, results, looks=False, copies=True)
        if not unseen.buffers:
            return unseen
        return PreparedCall(facts, spec, runner, bound, results, looks=True, copies=False, otherwise=unseen)
    except NotPlanned:
        return None


class PreparedCall:
    """All of a call but its values. Several threads may run it at once: each has a frame of its own.

    It makes, in this order: outputs without a buffer; copies of buffers, where the program may yet refuse a value;
    index tensors in the integer type that the program was compiled for; workspaces.

    Without copies, the program writes into the caller's buffers. They are untouched when a call is refused, because
    nothing is left to refuse once the program runs: what may be wrong with a call are its key, which is that of a call
    found in order, and values, of which it reads offsets, lengths, and tables and lists where a row sees something.
    The look has found all of these in range, unless `checks_reads` says that only the nest knows where it reads.
    """

    def __init__(
        self,
        facts: Facts,
        spec: Spec,
        runner: NativeProgram,
        bound: Bound,
        results: Mapping[str, Tensor],
        *,
        looks: bool,
        copies: bool,
        otherwise: PreparedCall | None = None,
    ) -> None:
        """looks: at values, before anything is written. copies: buffers are written once the program has finished.

        otherwise: what is run where the look does not find all well; by default, the ordinary way is taken.
        """
        names, numbers = names_of(facts[3])
        tensors = dict(zip(names, facts[1], strict=True))
        program = runner.program
        own = {n: i for i, n in enumerate(tensors)}
        self.buffers = [n for n in results if n in own]

        args = {a.name: a for a in program.args if a.shape}
        fresh = {n: _without_memory(t) for n, t in results.items() if n not in own}
        copied = {n: tensors[n].clone() for n in self.buffers} if copies else {}
        listed = {n: x for n, t in tensors.items() if n in args and (x := as_listed(t, args[n])) is not t}
        made = {**fresh, **copied, **listed}
        self._fresh = tuple(fresh.values())
        self._copied = tuple(own[n] for n in copied)
        self._listed = tuple((own[n], args[n]) for n in listed)
        self._workspaces = program.workspaces
        places = own | {n: len(own) + i for i, n in enumerate(made)}
        self._results = [(n, own[n] if n in own else places[n]) for n in results]

        self._native, self._rows, self._threads = runner.native, bound.rows, knobs.THREADS.get()
        self._out_of_bounds, self._otherwise = runner.out_of_bounds, otherwise
        self._integers = [isinstance(bound.scalars[n], int) for n in numbers]
        self._plain = all(type(v) is float for v in facts[2]) and not any(self._integers)
        self._columns = [n for n, _ in program.columns]
        self._sizes: dict[str, Number] = {"row_lo": 0, "row_hi": bound.rows, "window_rows": bound.rows}
        everything = {**tensors, **results, **made}
        for a in program.args:
            self._sizes.update(sizes_named(a, everything))

        # A frame's addresses: of what is only looked at, then what the program takes.
        beside = [n for n in own if n not in args or n in made]
        self._addresses = itemgetter(*(own[n] for n in beside), *(places[n] for n in args))
        at = {n: len(beside) + i for i, n in enumerate(args)} | {n: i for i, n in enumerate(beside)}
        plan = plan_of(spec, program, bound, tensors, at, self.buffers, checked=looks)
        strides = [everything[n].stride() for n in args]
        self._layout = Layout(runner, plan, numbers, self._sizes, len(beside), strides)
        self._frames: list[Frame] = []
        nothing: list[int] = []
        self._room = nothing, workspaces.room_of([] if self._columns else self._workspaces, self._sizes)

    def run(self, own: list[Tensor], numbers: list[object], budget_bytes: int) -> dict[str, Tensor] | None:
        """The outputs; or None, and nothing is done."""
        values = numbers if self._plain else self._values(numbers)
        if values is None:
            return None
        tensors = [*own, *map(torch.empty_like, self._fresh)]
        if self._copied or self._listed:
            tensors += [own[at].clone() for at in self._copied]
            tensors += [as_listed(own[at], a) for at, a in self._listed]
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = Frame(self._layout)
        try:
            if not frame.fine(values, self._addresses([*map(Tensor.data_ptr, tensors)])):
                return None if self._otherwise is None else self._otherwise.run(own, numbers, budget_bytes)
            if self._workspaces:
                room = self._room_of(frame, budget_bytes)
                if room is None:
                    return None
                block = workspaces.take(room.size)
                try:
                    frame.place(room, block.data_ptr())
                    self._call(frame)
                finally:
                    workspaces.give_back(block)
            else:
                self._call(frame)
        finally:
            self._frames.append(frame)
        for i, at in enumerate(self._copied, len(own) + len(self._fresh)):
            with torch.inference_mode():
                own[at].copy_(tensors[i])
        return {n: tensors[at] for n, at in self._results}

    def _values(self, numbers: list[object]) -> list[object] | None:
        """As `bind` reads them: their types are in the key, so that only the range of integers is left to look at."""
        values: list[object] = []
        for v, integer in zip(numbers, self._integers, strict=True):
            number = int(v) if integer else float(v)  # type: ignore[call-overload, arg-type]  # as their types say
            if integer and not -(1 << 31) <= number < 1 << 31:
                return None
            values.append(number)
        return values

    def _room_of(self, frame: Frame, budget_bytes: int) -> workspaces.Room | None:
        """Of workspaces for all rows; None if rows do not fit one window, as `row_windows` has it."""
        columns = frame.columns() if self._columns else []
        if columns and max(1, budget_bytes // max(1, columns[-1])) < self._rows:
            return None
        known, room = self._room
        if known != columns:
            sizes = {**self._sizes, **dict(zip(self._columns, columns, strict=False))}  # less the bytes of a row
            room = workspaces.room_of(self._workspaces, sizes)
            self._room = columns, room
        return room

    def _call(self, frame: Frame) -> None:
        threads = self._threads or torch.get_num_threads()
        self._native.call(frame.arguments, threads if threads == 1 else frame.threads(threads))
        if (fault := frame.fault()) is not None:
            raise self._out_of_bounds(fault)


def _without_memory(t: Tensor) -> Tensor:
    """A tensor that others are made like, which is three times as fast as saying shape and dtype."""
    with torch.inference_mode(False):
        made = torch.empty(t.shape, dtype=t.dtype)
        made.untyped_storage().resize_(0)
        return made
