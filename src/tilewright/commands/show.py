"""`tilewright show`: any level of an operator as text, after any pass."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.dsl.build import build
from tilewright.dsl.gpu import Gpu
from tilewright.dsl.loops import Program
from tilewright.dsl.lower import lower, passes_for
from tilewright.dsl.printer import show_program, show_spec, show_tile_program
from tilewright.dsl.schedule import Binding, Schedule
from tilewright.dsl.spec import Spec

from .errors import BadOption

LEVELS = ("spec", "tiles", "loops")


@dataclass(frozen=True)
class Stage:
    """The text of one level, or of the loops after one pass; `changed` where it differs from the stage before."""

    name: str
    text: str
    changed: bool = True


def passes(gpu: Gpu | None = None) -> tuple[str, ...]:
    return tuple(p.__name__ for p in passes_for(gpu))


def stages(
    spec: Spec, binding: Binding, schedule: Schedule, level: str, after: str | None, gpu: Gpu | None = None
) -> list[Stage]:
    """What to print: one stage, or with after="all" the loops after every pass, those for a GPU included.

    Raises BadOption for an unknown level or pass, IllegalSchedule as lowering does.
    """
    if level not in LEVELS:
        raise BadOption(option="--level", value=level, problem=f"no such level; known: {', '.join(LEVELS)}")
    if after is not None and level != "loops":
        raise BadOption(option="--after", value=after, problem=f"passes make the loops level, not {level}")
    if after is not None and after not in (*passes(gpu), "all"):
        raise BadOption(option="--after", value=after, problem=f"no such pass; known: {', '.join(passes(gpu))}, all")
    if level == "spec":
        return [Stage("spec", show_spec(spec))]
    if level == "tiles":
        return [Stage("tiles", show_tile_program(build(spec)))]
    every = _every_pass(spec, binding, schedule, gpu)
    if after == "all":
        return every
    return [next(s for s in every if s.name == (after or every[-1].name))]


def _every_pass(spec: Spec, binding: Binding, schedule: Schedule, gpu: Gpu | None) -> list[Stage]:
    out: list[Stage] = []

    def watch(name: str, program: Program) -> None:
        text = show_program(program)
        out.append(Stage(name, text, not out or text != out[-1].text))

    lower(spec, binding, schedule, gpu=gpu, watch=watch)
    return out
