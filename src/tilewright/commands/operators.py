"""Finding an operator: in the library by its name or by the public function that runs it, or in an author's file."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module, util
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import TYPE_CHECKING

from tilewright.dsl.errors import AuthorError, TilewrightError
from tilewright.dsl.lang import Operator
from tilewright.dsl.source import Loc
from tilewright.references import (
    LIBRARY,
    SAMPLES,
    Comparison,
    Reference,
    Sample,
    compare,
    name_of,
    place_of,
    reference_outputs,
)

from .errors import BadOption, BrokenFile
from .options import settable, show_constants

if TYPE_CHECKING:
    from torch import Tensor

    from tilewright.random_inputs import Inputs


@dataclass(frozen=True)
class Found:
    """An operator, the reference it can be compared with, where there is one, and what its inputs need.

    in_library: not of an author's file, so that what goes wrong is not the operator's fault but that of its constants.
    """

    operator: Operator
    reference: Reference | None
    sample: Sample
    in_library: bool

    @property
    def reference_name(self) -> str | None:
        return None if self.reference is None else f"{name_of(self.reference)} in float64"

    @contextmanager
    def given(self, constants: Mapping[str, object]) -> Iterator[None]:
        """Errors in an operator of the library become BadOption: they are those of the values it was given."""
        try:
            yield
        except AuthorError as e:
            if not self.in_library:
                raise
            problem = f"with {show_constants(settable(constants)) or 'these sizes'}: {e.template.format(**e.fields)}"
            raise BadOption(option="OP", value=self.operator.name, problem=problem) from e

    def compare(
        self, inputs: Inputs, outputs: Mapping[str, Tensor], tolerance: float | None
    ) -> list[Comparison] | None:
        """Each output against the reference; None without one. Raises BrokenFile where the reference raises."""
        if self.reference is None:
            return None
        place = place_of(self.reference)
        with authors_errors(place.file if place else "", f"running {name_of(self.reference)}"):
            return compare(outputs, reference_outputs(self.reference, inputs), tolerance)


def find(text: str, *, need_reference: bool = False) -> Found:
    """The operator that OP on the command line means: a name of the library, or FILE.py:NAME.

    Raises BadOption where there is none, or no reference that is needed; BrokenFile (with the author's line) for a file
    that cannot be imported.
    """
    found = _in_file(text) if ".py" in text else _in_library(text)
    if need_reference and found.reference is None:
        name = found.operator.name
        problem = f"{name} has no reference: define {name}_reference beside it, see tilewright.references"
        raise BadOption(option="--check", value=text, problem=problem)
    return found


def _in_library(text: str) -> Found:
    operators = library()
    name = text if text in operators else _public_functions(operators).get(text)
    if name is None:
        known = ", ".join([*operators, *_public_functions(operators)])
        raise BadOption(option="OP", value=text, problem=f"no such operator; known: {known}; or FILE.py:NAME")
    return Found(operators[name], LIBRARY.get(name), SAMPLES.get(name, Sample()), in_library=True)


def library() -> dict[str, Operator]:
    """Every operator declared in `tilewright.ops`, by name."""
    import tilewright.ops as ops

    modules = [import_module(f"{ops.__name__}.{m.name}") for m in iter_modules(ops.__path__)]
    return {x.name: x for m in modules for x in vars(m).values() if isinstance(x, Operator)}


def _public_functions(operators: dict[str, Operator]) -> dict[str, str]:
    """Public functions of the library -> the operator each runs: the one it names, else the only one of its module."""
    import tilewright.ops as ops

    out: dict[str, str] = {}
    for name in ops.__all__:
        fn = getattr(ops, name)
        if not hasattr(fn, "__code__"):
            continue
        named = [n for n in fn.__code__.co_names if n in operators]
        declared = [n for n, o in operators.items() if o.fn.__module__ == fn.__module__]
        if named or len(declared) == 1:
            out[name] = (named or declared)[0]
    return out


# ---- an author's file ------------------------------------------------------------------------------------------------


def _in_file(text: str) -> Found:
    path, _, name = text.rpartition(":") if not text.endswith(".py") else (text, "", "")
    if not path:
        raise BadOption(option="OP", value=text, problem="write FILE.py:NAME")
    module = load(Path(path))
    operators = {n: x for n, x in vars(module).items() if isinstance(x, Operator)}
    declared = f"operators there: {', '.join(operators) or 'none'}"
    if not name:
        raise BadOption(option="OP", value=text, problem=f"say which operator, {path}:NAME; {declared}")
    if not hasattr(module, name):
        raise BadOption(option="OP", value=text, problem=f"{path} has no {name!r}; {declared}")
    if name not in operators:
        kind = type(getattr(module, name)).__name__
        problem = f"{name!r} is not an operator but of type {kind}: is @op missing? {declared}"
        raise BadOption(option="OP", value=text, problem=problem)
    reference = getattr(module, f"{name}_reference", None) or getattr(module, "reference", None)
    return Found(operators[name], reference if callable(reference) else None, Sample(), in_library=False)


def load(path: Path) -> ModuleType:
    """Import an author's file, its own folder first on the path as `python FILE.py` has it.

    Raises BadOption for a file that is not there, BrokenFile for one that raises.
    """
    if not path.is_file():
        raise BadOption(option="OP", value=str(path), problem="there is no such file")
    name = f"author_{path.stem}"
    spec = util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise BadOption(option="OP", value=str(path), problem="not a Python file")
    module = util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and annotations look their module up there
    sys.path.insert(0, str(path.resolve().parent))
    try:
        with authors_errors(str(path.resolve()), f"importing {path}"):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.pop(0)
    return module


@contextmanager
def authors_errors(file: str, doing: str) -> Iterator[None]:
    """Turn an exception out of an author's file into a BrokenFile at the innermost line of that file.

    Errors raised on purpose pass: they say where themselves.
    """
    try:
        yield
    except TilewrightError:
        raise
    except SyntaxError as e:
        start, end = (e.offset or 1) - 1, (e.end_offset or 0) - 1
        at = Loc(e.filename or file, e.lineno or 1, start, max(end, start + 1))
        raise BrokenFile(loc=at, error=f"{type(e).__name__}: {e.msg}", doing=doing) from e
    except (Exception, SystemExit) as e:
        loc = _innermost(e, file)
        if loc is None:
            raise
        raise BrokenFile(loc=loc, error=f"{type(e).__name__}: {e}", doing=doing) from e


def _innermost(e: BaseException, file: str) -> Loc | None:
    frames = [f for f in traceback.extract_tb(e.__traceback__) if f.filename == file]
    if not frames:
        return None
    f = frames[-1]
    whole_line = f.end_lineno != f.lineno or f.colno is None or f.end_colno is None
    return (
        Loc(file, f.lineno or 1, 0, 1 << 20) if whole_line else Loc(file, f.lineno or 1, f.colno or 0, f.end_colno or 1)
    )
