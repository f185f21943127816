"""What an author and a caller read when something is wrong: the exact text of every error, at the line that made it."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.batches import content, place
from support.mistakes import BODIES, HEAD, OPERATOR, SIGNATURES, module_of
from support.reference import assert_same_bits
from support.running import attention, public
from support.variants import batch

import tilewright
from tilewright.dsl import errors
from tilewright.dsl.dtypes import f32
from tilewright.dsl.errors import TilewrightError
from tilewright.dsl.loops import For
from tilewright.dsl.lower import lower
from tilewright.dsl.schedule import Binding, LeafBinding, Schedule
from tilewright.dsl.verify import verify
from tilewright.ops.flash_attention import flash_attention

CLASSES = {c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, TilewrightError)}
BASES = {errors.TilewrightError, errors.AuthorError}  # never raised themselves
GOLDEN = Path(__file__).parent / "golden"


def raised(make: Callable[[], object]) -> TilewrightError:
    with pytest.raises(TilewrightError) as caught:
        make()
    return caught.value


def text_of(e: TilewrightError, folder: Path | None = None) -> str:
    """The message without the folder that the author's file lies in."""
    return str(e).replace(f"{folder}/", "") if folder else str(e)


def section(title: str, e: TilewrightError, folder: Path | None = None) -> str:
    return f"-- {title}\n{text_of(e, folder)}\n"


# ---- an author's mistakes --------------------------------------------------------------------------------------------


def traced(text: str, folder: Path, **constants: object) -> TilewrightError:
    load = module_of(text, folder)
    return raised(lambda: load().trace(**constants))


@pytest.mark.parametrize("kind", BODIES)
def test_mistakes_in_a_declaration(kind: str, tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    """Each names what is wrong and stands at the author's file, line and column, carets under the expression."""
    found = []
    cases = {name: f"{HEAD}    {body}\n" for name, body in BODIES[kind].items()}
    for name, text in (cases | (SIGNATURES if kind == "BadDeclaration" else {})).items():
        e = traced(text, tmp_path)
        assert type(e).__name__ == kind, f"{name}: {e}"
        assert isinstance(e, TypeError)
        assert e.loc is not None
        assert e.loc.file == str(tmp_path / "author.py")
        found.append(section(name, e, tmp_path))
    golden(f"errors_{kind}", "\n".join(found))


def test_unknown_constants(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    """One that is not declared, and one left out; the known are listed."""
    needed = OPERATOR.replace("window: Const = 4", "window: Const")
    without = OPERATOR.replace("    *,\n    window: Const = 4,\n", "")
    found = [
        section("unknown", traced(OPERATOR, tmp_path, windows=3, masks="causal"), tmp_path),
        section("left out", traced(needed, tmp_path), tmp_path),
        section("unknown, where there are none", traced(without, tmp_path, windows=3), tmp_path),
    ]
    golden("errors_UnknownConstant", "\n".join(found))


def test_carets_count_characters(tmp_path: Path) -> None:
    """Python's columns count bytes; the carets stand under the expression all the same."""
    e = traced(f"{HEAD}    {BODIES['NotTraceable']['columns after the name']}\n", tmp_path)
    assert e.loc is not None
    line, carets = e.loc.excerpt().splitlines()
    assert line[carets.index("^") : carets.rindex("^") + 1] == "größe + 'ä'"
    assert str(e.loc).endswith(f":{len(HEAD.splitlines()) + 1}:{line.index('größe +') - 4 + 1}")


def test_an_operator_is_not_called() -> None:
    """A declaration says how it is run."""
    with pytest.raises(TypeError, match=r"run it with tilewright.run\(flash_attention, \.\.\.\)"):
        flash_attention(1, 2)


# ---- schedules, targets, the environment, values found while running -------------------------------------------------


SMALL = """\
from __future__ import annotations

from tilewright.dsl import *


@op
def attention(q: Rows["head", "dim"], kv: Paged["dim"]):
    keys = kv.keys(where=lambda query, k: k <= query)
    s = dot(q, keys)
"""


def elsewhere(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, folder: Path
) -> dict[str, Callable[[], object]]:
    """By the names of their classes, then what is wrong."""
    data = batch(rng)
    cache = place(data, rng, page_size=3)

    def scheduled(**fields: object) -> Callable[[], object]:
        schedule = replace(Schedule(), **fields)  # type: ignore[arg-type]  # wrong on purpose
        return lambda: attention(data.q, data.offsets, cache, schedule=schedule)

    def environment(name: str, value: str) -> Callable[[], object]:
        def call() -> object:
            with monkeypatch.context() as m:
                m.setenv(name, value)
                return public(data.q, data.offsets, cache)

        return call

    def spoilt(page: int) -> Callable[[], object]:
        def call() -> object:
            table = cache.lookup_table.clone()
            table[0, 1] = page
            leaf = cache.layer(0)
            assert leaf.values is not None
            bad = tilewright.PagedKVCache.from_block_table(leaf.keys, leaf.values, table, cache.cache_lengths)
            return attention(data.q, data.offsets, bad, where=lambda q, k: (k % 3 == 0) & (k <= q))

        return call

    def not_finite() -> object:
        leaf = cache.layer(0)
        leaf.keys[int(cache.lookup_table[0, 1]), 2] = torch.nan
        return environment("TILEWRIGHT_VALIDATE", "1")()

    def on_target(line: str) -> object:
        load = module_of(f"{SMALL}    {line}\n    return softmax(s) @ keys.v\n", folder)
        return tilewright.run(load(), {"q": data.q, "kv": cache.layer(0)}, data.offsets, target="cpu")

    def no_compiler() -> object:
        with monkeypatch.context() as m:
            m.setattr("tilewright.codegen_cache.programs.find_compiler", lambda: None)
            return public(data.q, data.offsets, cache, mask_str="null", target="cpu")

    def ill_formed() -> None:
        program = lower(flash_attention.trace(mask=None, sink=None), BINDING, Schedule())
        kernel = program.kernels[0]
        body = tuple(s for s in kernel.body if not isinstance(s, For))
        verify(replace(program, kernels=(replace(kernel, body=body[1:]),)), "allocate_tiles")

    return {
        "IllegalSchedule: no rows": scheduled(rows=0),
        "IllegalSchedule: a float": scheduled(keys=4.0),
        "IllegalSchedule: heads across groups": scheduled(heads=4),
        "IllegalSchedule: no partitions": scheduled(partitions=-1),
        "IllegalSchedule: an unknown way to mask": scheduled(masks="never"),
        "UnknownTarget: by argument": lambda: public(data.q, data.offsets, cache, target="cuda:sm_1"),
        "UnknownTarget: by environment": environment("TILEWRIGHT_TARGET", "abacus"),
        "NotOnTarget: print": lambda: on_target("print(s)"),
        "NotOnTarget: breakpoint": lambda: on_target("breakpoint()"),
        "NoCompiler: nowhere": no_compiler,
        "BadEnvironment: validate": environment("TILEWRIGHT_VALIDATE", "yes"),
        "BadEnvironment: threads": environment("TILEWRIGHT_THREADS", "0"),
        "OutOfBounds: a page outside the pool": spoilt(99),
        "VerifyError: a body without its beginning": ill_formed,
        "NotFinite: a visible slot": not_finite,
    }


BINDING = Binding(
    (("dim", 8), ("head", 2), ("value_dim", 8)), (("out", f32), ("q", f32)), (("kv", LeafBinding(4, 1, f32)),)
)


def test_elsewhere(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    """Schedules by field, targets with those known, variables with what they take, slots by sequence and key."""
    found = []
    for title, make in elsewhere(monkeypatch, rng, tmp_path).items():
        e = raised(make)
        assert type(e).__name__ == title.split(":")[0], f"{title}: {e}"
        found.append(section(title, e, tmp_path))
    root = Path(tilewright.__file__).parent
    golden("errors_elsewhere", "\n".join(found).replace(f"{root}/", "").replace("src/tilewright/", ""))


def test_a_visible_page_of_minus_one_is_an_error(rng: np.random.Generator) -> None:
    """An entry that a visible key needs, under a predicate that only the running nest can decide."""
    data = content(rng, [8], [2])
    cache = place(data, rng, page_size=3)
    cache.lookup_table[0, 1] = -1
    e = raised(lambda: attention(data.q, data.offsets, cache, where=lambda q, k: (k % 3 == 0) & (k <= q)))
    assert isinstance(e, errors.OutOfBounds | errors.ArgumentValueError)


# ---- the classes themselves ------------------------------------------------------------------------------------------


def test_every_class_has_a_golden_message() -> None:
    """A new error comes with a text that somebody has read."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in GOLDEN.glob("errors_*.txt")}
    shown = {name.removeprefix("errors_") for name in texts}
    shown |= {line[3:].split(":")[0] for text in texts.values() for line in text.splitlines() if line.startswith("-- ")}
    assert {c.__name__ for c in CLASSES - BASES} - shown == set()


@pytest.mark.parametrize("kind", sorted(CLASSES, key=str))
def test_errors_cross_processes(kind: type[TilewrightError], tmp_path: Path) -> None:
    """Each can be pickled, and says the same afterwards."""
    names = "message what problem got expected op argument field value target known name kernel access tensor"
    more = "axis index extent after seq key path command compiler needed advice schedule arch taken most tiles"
    located = traced(f"{HEAD}    return s\n", tmp_path).loc
    for loc in (None, located):
        e = kind(loc=loc, **{n: f"<{n}>" for n in f"{names} {more}".split()})
        again = pickle.loads(pickle.dumps(e))
        assert type(again) is kind
        assert (str(again), again.loc, again.fields) == (str(e), loc, e.fields)
        assert str(e)


def test_results_survive_an_error(rng: np.random.Generator) -> None:
    """A buffer is untouched by a call that fails while it runs."""
    data = content(rng, [8, 8, 8], [2, 2, 2])
    cache = place(data, rng, page_size=3)
    cache.lookup_table[2, 1] = 1000
    buffer = torch.full_like(data.q, torch.nan)
    before = buffer.clone()
    raised(lambda: attention(data.q, data.offsets, cache, where=lambda q, k: (k % 3 == 0) & (k <= q), out=buffer))
    assert_same_bits(buffer, before)
