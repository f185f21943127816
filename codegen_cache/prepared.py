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
from tilewright.dsl.windows import bare_workspace, sizes_named

from .bind import Bound
from .calls import Facts, Key, names_of
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


def prepare(facts: Facts, spec: Spec, runner: object, bound: Bound, results: Mapping[str, Tensor]) -> None:
    """Remember a call that has just been found in order, where calls like it can be made the fast way.

    results: the outputs, by name, the caller's buffers among them.
    """
    checked = knobs.VALIDATE.get()
    if not isinstance(runner, NativeProgram) or not bound.rows or checked is True or knobs.DEBUG.get():
        return
    if not {*names_of(facts[3])[0]} >= bound.tensors.keys():
        return  # a layer under another number than a plain one
    try:
        call = PreparedCall(facts, spec, runner, bound, results, checked=checked is None)
    except NotPlanned:
        return
    if len(_CALLS) >= MOST:
        _CALLS.clear()
    _CALLS[facts[0]] = call


class PreparedCall:
    """All of a call but its values. Several threads may run it at once: each has a frame of its own.

    It makes, in this order: outputs without a buffer; copies of buffers, where the program may yet refuse a value;
    index tensors in the integer type that the program was compiled for; workspaces.
    """

    def __init__(
        self,
        facts: Facts,
        spec: Spec,
        runner: NativeProgram,
        bound: Bound,
        results: Mapping[str, Tensor],
        *,
        checked: bool,
    ) -> None:
        names, numbers = names_of(facts[3])
        tensors = dict(zip(names, facts[1], strict=True))
        args, program = {a.name: a for a in runner.source.tensors}, runner.program
        own = {n: i for i, n in enumerate(tensors)}
        buffers = [n for n in results if n in own]

        fresh = {n: _without_memory(t) for n, t in results.items() if n not in own}
        copies = {n: tensors[n].clone() for n in buffers if program.checks_reads or not checked}
        listed = {n: x for n, t in tensors.items() if n in args and (x := as_listed(t, args[n])) is not t}
        made = {**fresh, **copies, **listed}
        self._fresh = tuple(fresh.values())
        self._copies = tuple(own[n] for n in copies)
        self._listed = tuple((own[n], args[n]) for n in listed)
        self._workspaces = program.workspaces
        self._more = bool(copies or listed or program.workspaces)
        self._results = tuple(results)
        self._places = [own[n] if n in own else len(own) + list(fresh).index(n) for n in results]

        self._runner, self._rows, self._threads = runner, bound.rows, knobs.THREADS.get()
        self._integers = [isinstance(bound.scalars[n], int) for n in numbers]
        self._plain = all(type(v) is float for v in facts[2]) and not any(self._integers)
        self._columns = [n for n, _ in program.columns]
        self._sizes: dict[str, Number] = {}
        for a in program.args:
            self._sizes.update(sizes_named(a, {**tensors, **results}))

        # A frame's addresses: what is only looked at, then what the program takes, where what is made is put in later.
        beside = [n for n in own if n not in args or n in made]
        places = {n: len(beside) + i for i, n in enumerate(args)} | {n: i for i, n in enumerate(beside)}
        plan = plan_of(spec, program, bound, tensors, places, buffers, checked=checked)
        self._addresses = itemgetter(*(own[n] for n in beside), *(own.get(n, 0) for n in args))
        strides = [
            t.stride() if (t := made.get(n, tensors.get(n))) is not None else (0,) * len(a.shape)
            for n, a in args.items()
        ]
        self._layout = Layout(runner, plan, numbers, self._sizes, len(beside), strides)
        taken = list(args)
        self._made = [len(beside) + taken.index(n) for n in (*made, *(w.name for w in program.workspaces))]
        self._starts = [sum(map(len, strides[: taken.index(w.name)])) for w in program.workspaces]
        self._frames: list[Frame] = []

    def run(self, own: list[Tensor], numbers: list[object], budget_bytes: int) -> dict[str, Tensor] | None:
        """The outputs; or None, and nothing is done."""
        values = numbers if self._plain else self._values(numbers)
        if values is None:
            return None
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = Frame(self._layout)
        try:
            if not frame.fine(values, self._addresses([*map(Tensor.data_ptr, own)])):
                return None
            if self._columns and not self._set_window(frame, budget_bytes):
                return None
            return self._call(frame, own)
        finally:
            self._frames.append(frame)

    def _values(self, numbers: list[object]) -> list[object] | None:
        """As `bind` reads them: their types are in the key, so that only the range of integers is left to look at."""
        values: list[object] = []
        for v, integer in zip(numbers, self._integers, strict=True):
            number = int(v) if integer else float(v)  # type: ignore[call-overload, arg-type]  # as their types say
            if integer and not -(1 << 31) <= number < 1 << 31:
                return None
            values.append(number)
        return values

    def _set_window(self, frame: Frame, budget_bytes: int) -> bool:
        """The first window, as `row_windows` has it, if it is the only one."""
        *columns, cost = frame.columns()
        frame.sizes = dict(zip(self._columns, columns, strict=True))
        frame.sizes.update(row_lo=0, row_hi=self._rows, window_rows=self._rows)
        return max(1, budget_bytes // max(1, cost)) >= self._rows

    def _call(self, frame: Frame, own: list[Tensor]) -> dict[str, Tensor]:
        made = [*map(torch.empty_like, self._fresh)]
        if self._more:
            self._make_more(frame, own, made)
        frame.fill(self._made, made)
        self._runner.native.call(frame.arguments, self._threads or torch.get_num_threads())
        if (fault := frame.fault()) is not None:
            raise self._runner.out_of_bounds(fault)
        for i, at in enumerate(self._copies, len(self._fresh)):
            with torch.inference_mode():
                own[at].copy_(made[i])
        tensors = own + made
        return dict(zip(self._results, map(tensors.__getitem__, self._places), strict=True))

    def _make_more(self, frame: Frame, own: list[Tensor], made: list[Tensor]) -> None:
        made += [own[at].clone() for at in self._copies]
        made += [as_listed(own[at], a) for at, a in self._listed]
        if self._workspaces:
            made += frame.kept(self._workspaces) or self._make_workspaces(frame)

    def _make_workspaces(self, frame: Frame) -> list[Tensor]:
        with torch.inference_mode(False):  # kept ones may be filled again outside of it
            made = [bare_workspace(w, {**self._sizes, **frame.sizes}) for w in self._workspaces]
        for t, start in zip(made, self._starts, strict=True):
            frame.set_strides(start, t.stride())
        frame.keep(made)
        return made


def _without_memory(t: Tensor) -> Tensor:
    """A tensor that others are made like, which is three times as fast as saying shape and dtype."""
    with torch.inference_mode(False):
        made = torch.empty(t.shape, dtype=t.dtype)
        made.untyped_storage().resize_(0)
        return made
