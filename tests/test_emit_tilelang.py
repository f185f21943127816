"""TileLang programs: their text for the published operators, what is in them and what never is. TileLang reads none."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.gpu import bound_call, fitted, nest_for, spread
from support.mistakes import module_of
from support.native import OPERATORS, inputs_of

from tilewright.dsl.emit_tilelang import TileLangSource, emit_tilelang
from tilewright.dsl.errors import NotOnTarget
from tilewright.dsl.gpu import GPUS
from tilewright.dsl.lang import Operator
from tilewright.dsl.lower import lower
from tilewright.dsl.schedule import Schedule
from tilewright.dsl.targets import TARGETS, default_schedule
from tilewright.random_inputs import Inputs, Sizes, binding_of

PUBLISHED = {
    "flash_attention": {"heads": 8, "dims": {"dim": 64, "value_dim": 64}, "page_size": 64},
    "latent_sparse_attention": {"heads": 16, "kv_heads": 1, "dims": {"dim": 64}, "page_size": 16},
    "mla_indexer": {"heads": 16, "dims": {"depth": 64}, "page_size": 16},
}
SCHEDULES = {
    "cuda:sm_90a": {
        "flash_attention": Schedule(rows=16, keys=64, masks="split", fetch="pages", stages=2, products="bfloat16"),
        "latent_sparse_attention": Schedule(rows=1, keys=64, stages=1, products="bfloat16"),
        "mla_indexer": Schedule(rows=4, keys=64, products="float16"),
    },
    "hip:gfx942": {
        "flash_attention": Schedule(rows=1, keys=64, partitions=4, products="bfloat16"),
        "latent_sparse_attention": Schedule(rows=1, keys=32, partitions=2, products="bfloat16"),
        "mla_indexer": Schedule(rows=1, keys=32, products="float16"),
    },
}


def published(name: str, seed: int = 0, **sizes: object) -> Inputs:
    dtype = {} if name == "mla_indexer" else {"cache_dtype": "bfloat16", "dtype": "bfloat16"}
    return inputs_of(name, seed, **{**PUBLISHED[name], **dtype, **sizes})


def emitted(inputs: Inputs, schedule: Schedule, target: str) -> TileLangSource:
    bound, _ = bound_call(inputs)
    return emit_tilelang(nest_for(inputs, bound, schedule, target), GPUS[target])


@pytest.mark.parametrize("target", SCHEDULES)
@pytest.mark.parametrize("name", PUBLISHED)
def test_text(name: str, target: str, golden: Callable[[str, str], None]) -> None:
    """The whole program: page copies and gathers, loads ahead, split keys and their merge, scores and selection."""
    source = emitted(published(name), SCHEDULES[target][name], target)
    golden(f"emit_tilelang_{name}_{target.partition(':')[2]}", source.text)


@pytest.mark.parametrize("name", PUBLISHED)
def test_text_depends_on_nothing_of_a_call(name: str) -> None:
    """Other lengths, tables, numbers of rows and pages: the same text, and so nothing is lowered again."""
    schedule = SCHEDULES["cuda:sm_90a"][name]
    texts = {
        emitted(published(name, seed, rows=rows, cached=cached), schedule, "cuda:sm_90a").text
        for seed, (rows, cached) in enumerate([((5, 1, 0, 18), (3, 70, 9, 0)), ((1,), (200,)), ((7, 7), (0, 1))])
    }
    assert len(texts) == 1


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_every_operator_has_a_text_that_parses(name: str) -> None:
    """For all architectures in turn, under a schedule of its own. Names are defined before they are read."""
    n = sorted(OPERATORS).index(name)
    target = tuple(GPUS)[n % len(GPUS)]
    inputs = inputs_of(name, n, cache_dtype="bfloat16", dtype="bfloat16", page_size=(5, 64)[n % 2])
    bound, _ = bound_call(inputs)
    schedule = fitted(inputs, bound, spread(n), GPUS[target])
    source = emit_tilelang(nest_for(inputs, bound, schedule, target), GPUS[target])
    tree = ast.parse(source.text)
    assert [f.name for f in tree.body if isinstance(f, ast.FunctionDef)][-len(source.kernels) :] == [
        k.name for k in source.kernels
    ]
    assert not {x.id for x in ast.walk(tree) if isinstance(x, ast.Name)} & {"k0", "Ellipsis"}
    assert max(len(line) for line in source.text.splitlines() if not line.strip().startswith("#")) < 4000


AUTHORED = """
from tilewright.dsl import Paged, Rows, Scalar, dot, f32, op, softmax

@op
def attention(q: Rows["head", "dim"], kv: Paged["dim"], {name}: Scalar[f32]):
    keys = kv.keys(where=lambda query, key: key <= query)
    s = dot(q, keys) * {name}
    {line}
    return softmax(s) @ keys.v
"""


def authored(folder: Path, name: str = "scale", line: str = "s = s + 1.0") -> TileLangSource:
    operator = module_of(AUTHORED.format(name=name, line=line), folder)()
    assert isinstance(operator, Operator)
    spec = operator.trace()
    binding = binding_of(spec, Sizes(dtype="bfloat16"))
    target = TARGETS["cuda:sm_80"]
    assert target.gpu is not None
    schedule = default_schedule(target, spec, binding, 64, 4)
    return emit_tilelang(lower(spec, binding, schedule, gpu=target.gpu), target.gpu)


def test_lines_of_the_author_stand_beside_what_they_became(tmp_path: Path) -> None:
    """As comments: file and line, without the folder."""
    text = authored(tmp_path).text
    lines = AUTHORED.format(name="scale", line="s = s + 1.0").split("\n")
    for code in ("dot(q, keys)", "s + 1.0"):
        number = next(n for n, line in enumerate(lines, 1) if code in line)
        assert f"# author.py:{number}" in text or f".py:{number}" in text
    assert str(tmp_path) not in text


def test_prints_of_the_author_are_refused(tmp_path: Path) -> None:
    """By name, at the author's line."""
    with pytest.raises(NotOnTarget, match=r"'cuda:sm_80' has no print\(\)"):
        authored(tmp_path, line="print(s)")


def test_names_that_the_program_needs_itself_are_refused(tmp_path: Path) -> None:
    """A parameter `i_key` would be hidden by a loop's variable."""
    with pytest.raises(NotOnTarget, match="parameter named 'i_key'"):
        authored(tmp_path, name="i_key")


def test_unaligned_rows_are_a_program_of_their_own() -> None:
    """Strides are told to be multiples of a vector; a caller whose rows lie anywhere asks for a text without."""
    inputs = published("flash_attention")
    bound, _ = bound_call(inputs)
    gpu = GPUS["cuda:sm_80"]
    program = lower(inputs.spec, bound.binding, Schedule(rows=4, keys=32, products="bfloat16"), gpu=gpu)
    aligned, anywhere = emit_tilelang(program, gpu), emit_tilelang(program, gpu, aligned=False)
    assert "T.assume(kv_k_stride0 % 8 == 0)" in aligned.text
    assert "T.assume" not in anywhere.text
    assert {n: unit for n, _, unit in aligned.strides}["kv_k"] == 8
    assert {unit for _, _, unit in anywhere.strides} == {1}


def test_a_nest_with_loads_ahead_says_so() -> None:
    """Gathers are staged by hand, with the page numbers they need; copies out of pages by TileLang."""
    inputs = published("flash_attention")
    schedule = SCHEDULES["cuda:sm_90a"]["flash_attention"]
    text = emitted(inputs, schedule, "cuda:sm_90a").text
    assert text.count("num_stages=2") == 1
    gathered = emitted(inputs, replace(schedule, fetch="rows", stages=1), "cuda:sm_90a").text
    assert "num_stages" not in gathered
    assert gathered.count("stage=[0, 0, 0, 1") == 3
