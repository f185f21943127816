"""What `tilewright run` says: the outputs of a run as numbers, as lines of text and as one document."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from tilewright.references import Comparison

from .options import settable, show_constants, show_schedule
from .run import Plan, Ran


@dataclass(frozen=True)
class Statistics:
    """A tensor in a few numbers: those of its finite elements, None without any."""

    dtype: str
    shape: list[int]
    min: float | None
    max: float | None
    mean: float | None
    non_finite: int

    @classmethod
    def of(cls, t: Tensor) -> Statistics:
        x = t.to(torch.float64)
        finite = x[x.isfinite()]
        least, most, mean = (
            (float(finite.min()), float(finite.max()), float(finite.mean())) if finite.numel() else (None,) * 3
        )
        name = str(t.dtype).removeprefix("torch.")
        return cls(name, list(t.shape), least, most, mean, x.numel() - finite.numel())

    def __str__(self) -> str:
        numbers = (
            f"min {self.min:.6g}  max {self.max:.6g}  mean {self.mean:.6g}"
            if self.min is not None
            else "no finite element"
        )
        return f"{self.dtype} {self.shape}  {numbers}  non-finite {self.non_finite}"


@dataclass(frozen=True)
class Report:
    """One run. `trace` has the statements not yet printed, `comparisons` is None where there is no reference."""

    plan: Plan
    seed: int
    ran: Ran
    reference: str | None
    comparisons: list[Comparison] | None
    trace: list[str]
    executed: int | None

    @property
    def ok(self) -> bool:
        return all(c.ok for c in self.comparisons or ())

    def document(self) -> dict[str, object]:
        sizes = self.plan.inputs.sizes
        traced = {} if self.executed is None else {"trace": self.trace, "statements": self.executed}
        return {
            "operator": self.plan.inputs.operator.name,
            "target": self.plan.target.name,
            "schedule": asdict(self.plan.schedule),
            "constants": settable(self.plan.inputs.constants),
            "seed": self.seed,
            "rows": list(sizes.rows),
            "cached": list(sizes.cached),
            "outputs": {n: asdict(Statistics.of(t)) for n, t in self.ran.outputs.items()},
            "milliseconds": self.ran.milliseconds,
            "timing": self.ran.timing,
            "reference": self.reference,
            "comparisons": None if self.comparisons is None else [_comparison(c) for c in self.comparisons],
            "ok": self.ok,
            **traced,
        }

    def lines(self) -> list[str]:
        inputs, sizes = self.plan.inputs, self.plan.inputs.sizes
        shape = f"rows {_list(sizes.rows)}, cached {_list(sizes.cached)}, seed {self.seed}"
        out = [f"{inputs.operator.name} on {self.plan.target.name}: {shape}"]
        if constants := settable(inputs.constants):
            out += [f"constants {show_constants(constants)}"]
        out += [f"schedule  {show_schedule(self.plan.schedule)}"]
        out += [f"{n:8}  {Statistics.of(t)}" for n, t in self.ran.outputs.items()]
        out += [f"time      {self.ran.milliseconds:.3f} ms  ({self.ran.timing})"]
        if self.comparisons is None:
            return [*out, "check     no reference to compare with"]
        if not sum(sizes.rows):
            return [*out, "check     no rows to compare"]
        return out + [
            f"check     {c.output}: worst error {c.error:.2e} against {self.reference}, tolerance {c.tolerance:g}: "
            + ("ok" if c.ok else "FAILED")
            for c in self.comparisons
        ]


def _list(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


def _comparison(c: Comparison) -> dict[str, object]:
    finite = c.error < float("inf")
    return {"output": c.output, "error": c.error if finite else None, "tolerance": c.tolerance, "ok": c.ok}
