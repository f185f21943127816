"""The command: what it prints at every level, what it runs, and how it ends when something is wrong."""

from __future__ import annotations

import functools
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from tilewright import __version__, references
from tilewright.cli import main
from tilewright.commands.operators import library
from tilewright.dsl.lower import PASSES

Golden = Callable[[str, str], None]
Invoke = Callable[..., Result]

AUTHOR = """
import torch

from tilewright.dsl import Paged, PerHead, Rows, Scalar, dot, f32, key, max, op, pos, softmax, to_float


@op
def small(q: Rows["dim"], kv: Paged["dim"]):
    keys = kv.keys(where=lambda query, key: key <= query)
    return max(dot(q, keys), over="key")


@op
def alibi(q: Rows["head", "dim"], kv: Paged["dim"], slopes: PerHead[f32], scale: Scalar[f32]):
    keys = kv.keys(where=lambda query, key: key <= query)
    return softmax(dot(q, keys) * scale - slopes * to_float(pos - key)) @ keys.v


def alibi_reference(q, kv, slopes, scale, pos, key):
    s = torch.einsum("rhd,hkd->hrk", q, kv.k) * scale - slopes[:, None, None] * (pos[:, None] - key)
    return torch.einsum("hrk,hkd->rhd", s.masked_fill(key > pos[:, None], -torch.inf).softmax(-1), kv.v)


@op
def branches(q: Rows["dim"], kv: Paged["dim"]):
    scores = dot(q, kv.keys())
    if scores > 0:
        scores = -scores
    return max(scores, over="key")


@op
def silent(q: Rows["dim"], kv: Paged["dim"]):
    max(dot(q, kv.keys()), over="key")


@op
def undefined(q: Rows["dim"], kv: Paged["dim"]):
    return max(dot(q, missing), over="key")


@op
def shown(q: Rows["dim"], kv: Paged["dim"]):
    scores = dot(q, kv.keys())
    print(scores)
    return max(scores, over="key")


@op
def stopped(q: Rows["dim"], kv: Paged["dim"]):
    scores = dot(q, kv.keys())
    breakpoint()
    return max(scores, over="key")


@op
def tall(q: Rows["dim"], kv: Paged["dim"]):
    return max(dot(q, kv.keys()), over="key")


def tall_reference(q, kv, nothing_like_it):
    return q


@op
def wide(q: Rows["dim"], kv: Paged["dim"]):
    return max(dot(q, kv.keys()), over="key")


def wide_reference(q, kv):
    return (q @ kv.k[0].T).amax(-1)[:-1]


@op
def falls(q: Rows["dim"], kv: Paged["dim"]):
    return max(dot(q, kv.keys()), over="key")


def falls_reference(q, kv):
    return 1 // 0


number = 3
"""


def line_of(text: str) -> int:
    """The line of the author's file that starts with `text`, from 1."""
    return next(n for n, line in enumerate(AUTHOR.splitlines(), 1) if line.strip().startswith(text))


@pytest.fixture
def author(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an author's file, which is where the command runs."""
    (tmp_path / "mine.py").write_text(AUTHOR)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def invoke(author: Path) -> Invoke:
    """Run the command in this process; a Python exception that it lets out is a failure."""

    def run(*args: str, **env: str) -> Result:
        result = CliRunner().invoke(main, args, env={"COLUMNS": "100", **env})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


# ---- help and versions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["", "demo", "emit", "run", "show", "verify"])
def test_help(verb: str, invoke: Invoke, golden: Golden) -> None:
    """Every verb says what it does, with an example."""
    result = invoke(*([verb] if verb else []), "--help")
    assert result.exit_code == 0
    golden(f"cli_help_{verb or 'main'}", result.stdout)
    assert not verb or f"  tilewright {verb}" in result.stdout


def test_version(invoke: Invoke) -> None:
    """The package's own."""
    assert invoke("--version").stdout == f"tilewright, version {__version__}\n"


def test_help_needs_no_heavy_library(tmp_path: Path) -> None:
    """Asking for help imports neither torch nor sympy."""
    program = "import sys, tilewright.cli; print(*sorted(set(sys.modules) & {'numpy', 'sympy', 'torch', 'rich'}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [], "")


# ---- show ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["spec", "tiles", "loops"])
def test_show_level(level: str, invoke: Invoke, golden: Golden) -> None:
    """Piped text is the level's own, the same every time."""
    result = invoke("show", "mine.py:small", "--level", level, "--schedule", "rows=4,keys=32")
    assert (result.exit_code, result.stderr) == (0, "")
    golden(f"cli_show_{level}", result.stdout)
    assert "\x1b" not in result.stdout


def test_show_after_each_pass(invoke: Invoke) -> None:
    """The loops after a pass, by name, and after the last what is shown without one."""
    first = invoke("show", "mine.py:small", "--after", "form_kernel").stdout
    assert "for keys of part 0" in first
    last = invoke("show", "mine.py:small", "--after", PASSES[-1].__name__).stdout
    assert last == invoke("show", "mine.py:small").stdout
    every = invoke("show", "mine.py:small", "--after", "all").stdout
    headings = re.findall(r"^-- after (\w+)( \(unchanged\))?$", every, re.M)
    assert [name for name, _ in headings] == [p.__name__ for p in PASSES]
    assert "-- after partition_keys (unchanged)\n-- after" in every  # one partition, so nothing to do, and no text
    assert every.endswith(last)


def test_show_json(invoke: Invoke) -> None:
    """One document, with the text of every stage."""
    shown = json.loads(invoke("show", "mine.py:small", "--after", "all", "--json").stdout)
    assert [s["name"] for s in shown["stages"]] == [p.__name__ for p in PASSES]
    assert shown["stages"][0]["changed"]
    assert shown["schedule"]["keys"] > 0
    spec = json.loads(invoke("show", "mine.py:small", "--level", "spec", "--json").stdout)
    assert spec["stages"][0]["text"].startswith("operator small\n")


def test_show_library(invoke: Invoke) -> None:
    """An operator by its name or by its public function, sizes, masks by name, an operand left out."""
    by_name = invoke("show", "flash_attention", "--level", "spec", "--set", "mask=sliding_window_causal:128")
    assert "((pos - key) < 128)" in by_name.stdout
    function = "generic_flash_attention_kv_cache_ragged_sink"
    assert (
        invoke("show", function, "--level", "spec").stdout
        == invoke("show", "flash_attention", "--level", "spec").stdout
    )
    loops = invoke(
        "show", "flash_attention", "--set", "sink=none", "--set", "with_lse=true", "--set", "mask=null", "--heads", "6",
        "--kv-heads", "3", "--dim", "dim=24", "--page-size", "7", "--dtype", "bfloat16",
        "--cache-dtype", "float8_e4m3fn", "--schedule", "heads=1,partitions=2,masks=split",
    ).stdout  # fmt: skip
    for text in (
        "arg q: bfloat16[total_rows, 6, 24]",
        "arg kv_k: float8_e4m3fn[kv_pages, 7, 3, 24]",
        "arg kv_k_scale: float32[kv_pages, 7, 3, 1]",
        "arg lse: float32[total_rows, 6]",
        "workspace part_m",
    ):
        assert text in loops
    assert "sink" not in loops


@pytest.mark.slow
def test_show_in_colour_on_a_terminal(author: Path) -> None:
    """A terminal gets colour, and still every character of every line."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "tilewright.cli", "show", "mine.py:small"]
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "40"}
    process = subprocess.Popen(command, stdout=theirs, cwd=author, env=env, close_fds=True)
    os.close(theirs)
    text = b""
    try:
        while chunk := os.read(ours, 1 << 16):
            text += chunk
    except OSError:  # the other end is gone
        pass
    assert process.wait(60) == 0
    assert b"\x1b[" in text
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text.decode()).replace("\r", "")
    piped = subprocess.run(command, capture_output=True, text=True, cwd=author, timeout=60).stdout
    assert plain.rstrip("\n") == piped.rstrip("\n")


# ---- run -------------------------------------------------------------------------------------------------------------


def test_run_compares_with_the_reference_beside_the_operator(invoke: Invoke) -> None:
    """Statistics, the schedule, the time and the check."""
    result = invoke("run", "mine.py:alibi", "--schedule", "rows=4,keys=32", "--repeat", "2", "--check")
    assert (result.exit_code, result.stderr) == (0, "")
    text = result.stdout
    assert re.search(r"^schedule +rows=4,heads=none,keys=32,", text, re.M)
    assert re.search(r"^out +float32 \[22, 8, 64\]  min -?\d.*  non-finite 0$", text, re.M)
    assert re.search(r"^time +\d+\.\d+ ms  \(median of 2 runs\)$", text, re.M)
    assert re.search(
        r"^check +out: worst error \d.*against alibi_reference in float64, tolerance 1e-05: ok$", text, re.M
    )


def test_run_fails_beyond_the_tolerance(invoke: Invoke) -> None:
    """A comparison that does not hold is exit status 1."""
    result = invoke("run", "mine.py:alibi", "--tolerance", "1e-12", "--json")
    assert result.exit_code == 1
    (compared,) = json.loads(result.stdout)["comparisons"]
    assert compared["error"] > compared["tolerance"] == 1e-12
    assert not compared["ok"]


def test_run_json(invoke: Invoke) -> None:
    """One document, the same for the same seed but for the time."""
    args = ("run", "mine.py:alibi", "--random", "7", "--rows", "2,0,3", "--cached", "5,4,0", "--json", "--heads", "4")
    one, two = (json.loads(invoke(*args).stdout) for _ in range(2))
    assert one.pop("milliseconds") > 0 < two.pop("milliseconds")
    assert one == two
    assert one["ok"]
    assert one["outputs"]["out"]["shape"] == [5, 4, 64]
    other = json.loads(invoke(*args, "--random", "8").stdout)
    assert other["outputs"] != one["outputs"]


def test_run_arguments(invoke: Invoke) -> None:
    """Scalars and tensors by value: with steep slopes the output is one value row, with flat ones their mean."""
    steep = json.loads(invoke("run", "mine.py:alibi", "--arg", "slopes=1e6", "--arg", "scale=0", "--json").stdout)
    flat = json.loads(invoke("run", "mine.py:alibi", "--arg", "slopes=0", "--arg", "scale=0", "--json").stdout)
    assert steep["ok"]
    assert flat["ok"]
    assert steep["outputs"]["out"]["max"] > flat["outputs"]["out"]["max"]


@pytest.mark.parametrize(
    "options",
    [
        ["--set", "mask=chunked:8", "--set", "with_lse=true"],
        ["--set", "sink=none", "--heads", "7", "--kv-heads", "1"],
        ["--cache-dtype", "float8_e4m3fn", "--page-size", "7"],
        ["--dtype", "bfloat16", "--dim", "dim=24", "--dim", "value_dim=40"],
        ["--rows", "0,0", "--cached", "3,0"],
        ["--rows", "0,1,0", "--cached", "0,0,5", "--schedule", "partitions=3,keys=4,masks=always"],
    ],
)
def test_run_library(options: list[str], invoke: Invoke) -> None:
    """The library's operator against its dense reference."""
    result = invoke("run", "generic_flash_attention_kv_cache_ragged_sink", "--check", "--repeat", "1", *options)
    assert result.exit_code == 0, result.output
    assert "FAILED" not in result.stdout


LIBRARY_OPERATORS = sorted(library())


def test_every_library_operator_has_a_reference() -> None:
    """The table of references is the library."""
    assert sorted(references.LIBRARY) == LIBRARY_OPERATORS
    assert set(references.SAMPLES) <= set(LIBRARY_OPERATORS)


@pytest.mark.parametrize("name", LIBRARY_OPERATORS)
def test_run_every_library_operator(name: str, invoke: Invoke) -> None:
    """By its name alone, every output is compared, in text and in one document; `show` takes the same constants."""
    args = ("run", name, "--random", "7", "--rows", "5,0,3", "--cached", "3,20,0", "--repeat", "1")
    text = invoke(*args, "--check")
    assert (text.exit_code, text.stderr) == (0, "")
    document = json.loads(invoke(*args, "--json").stdout)
    assert document["reference"] == f"{name} in float64"
    assert [c["output"] for c in document["comparisons"]] == list(document["outputs"])
    assert all(c["ok"] for c in document["comparisons"])
    assert len(re.findall(r"^check .*: ok$", text.stdout, re.M)) == len(document["outputs"])
    assert invoke("show", name).exit_code == 0


def perturbed(value: object) -> object:
    """A reference's result that is slightly another one: numbers moved, scores turned round."""
    if isinstance(value, Mapping):
        return {n: perturbed(v) for n, v in value.items()}
    if isinstance(value, references.Candidates):
        return replace(value, scores=torch.where(value.scores.isfinite(), -value.scores, value.scores))
    assert isinstance(value, torch.Tensor)
    return value + 1e-3


@pytest.mark.parametrize("name", LIBRARY_OPERATORS)
def test_a_perturbed_library_reference_is_noticed(name: str, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit status 1, and the output that is off."""
    right = references.LIBRARY[name]

    @functools.wraps(right)
    def wrong(**given: object) -> object:
        return perturbed(right(**given))

    monkeypatch.setitem(references.LIBRARY, name, wrong)
    result = invoke("run", name, "--rows", "5,3", "--cached", "30,2", "--repeat", "1")
    assert result.exit_code == 1, result.output
    assert re.search(r"^check .*: FAILED$", result.stdout, re.M)


def test_run_says_the_constants(invoke: Invoke) -> None:
    """Those chosen for an operator whose constants have no default, and those given."""
    assert "\nconstants block=4 top_k=3 local=1\n" in invoke("run", "choose_pages", "--repeat", "1").stdout
    given = invoke("run", "choose_pages", "--repeat", "1", "--set", "top_k=5", "--json").stdout
    assert json.loads(given)["constants"] == {"block": 4, "top_k": 5, "local": 1}


def test_run_without_rows(invoke: Invoke) -> None:
    """A batch may be empty; nothing was compared then, and that is said."""
    for name in ("softcap_attention", "indexer", "compress_windows"):
        result = invoke("run", name, "--rows", "0,0", "--cached", "3,0")
        assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "check     no rows to compare")


@pytest.mark.both_targets
def test_run_trace(invoke: Invoke) -> None:
    """Executed statements with the author's line and the numbers they made, as many as asked for."""
    line = line_of("return max(dot(q, keys)")
    args = ("run", "mine.py:small", "--rows", "1", "--cached", "2", "--trace")
    text = invoke(*args).stdout
    found = re.search(rf"^mine\.py:{line}:16: g0\[row, key\] = gemm\(.*\)   min \S+ max \S+ nan 0$", text, re.M)
    assert found, text
    assert re.search(r"^-: num_keys := .*   3$", text, re.M)
    assert "for kt" not in text
    limited = invoke(*args, "--trace-limit", "3").stdout.splitlines()
    assert limited[3].startswith("... ")
    document = json.loads(invoke(*args, "--trace-limit", "3", "--json").stdout)
    assert (len(document["trace"]), document["trace"]) == (3, limited[:3])
    assert document["statements"] == 3 + int(limited[3].split()[1])


# ---- print and breakpoint in the author's file -----------------------------------------------------------------------

ONE_ROW = ("--rows", "1", "--cached", "2", "--schedule", "keys=4")


def test_run_print(invoke: Invoke) -> None:
    """`print` shows its tile once, with the author's line; a document on stdout stays a document."""
    result = invoke("run", "mine.py:shown", *ONE_ROW)
    assert result.exit_code == 0
    heading = f"mine.py:{line_of('print(scores)')}:5: scores[row, key] at "
    assert result.stdout.count(heading) == 1
    assert "one run, compiling included" in result.stdout
    piped = invoke("run", "mine.py:shown", *ONE_ROW, "--json")
    assert json.loads(piped.stdout)["ok"]
    assert heading in piped.stderr


RECORDER = """
import json, sys

def stop():
    frame = sys._getframe(1)
    names = sorted(n for n in frame.f_locals if not n.startswith("__"))
    with open("stops.jsonl", "a") as f:
        print(json.dumps([frame.f_code.co_filename, frame.f_lineno, names]), file=f)
"""


@pytest.mark.slow
def test_run_breakpoint_stops_in_the_authors_file(author: Path) -> None:
    """`breakpoint()` calls what PYTHONBREAKPOINT names, from the author's file and line, with the values as locals."""
    (author / "recorder.py").write_text(RECORDER)
    done = command(author, "run", "mine.py:stopped", *ONE_ROW, PYTHONBREAKPOINT="recorder.stop", PYTHONPATH=str(author))
    assert (done.returncode, done.stderr) == (0, "")
    ((file, line, names),) = map(json.loads, (author / "stops.jsonl").read_text().splitlines())
    assert Path(file).resolve() == (author / "mine.py").resolve()
    assert line == line_of("breakpoint()")
    assert {"q", "scores", "seq", "num_keys"} <= set(names)


@pytest.mark.slow
@pytest.mark.parametrize(("typed", "status"), [("where\np scores.shape\nc\n", 0), ("where\nq\n", 1)])
def test_run_under_pdb(author: Path, typed: str, status: int) -> None:
    """The debugger shows the author's file and line; `c` goes on, `q` ends the command without a traceback."""
    done = command(author, "run", "mine.py:stopped", *ONE_ROW, stdin=typed)
    assert f"mine.py({line_of('breakpoint()')})" in done.stdout
    assert "-> breakpoint()" in done.stdout
    assert done.returncode == status
    if status:
        assert done.stderr == "error: stopped in the debugger\n"
    else:
        assert "torch.Size([1, 3])" in done.stdout  # the keys there are, not the tile
        assert re.search(r"^out +float32 \[1\]", done.stdout, re.M)


def command(folder: Path, *args: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """The installed command, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "tilewright.cli", *args],
        cwd=folder, input=stdin, capture_output=True, text=True, timeout=120, env={**os.environ, **env},
    )  # fmt: skip


# ---- what can be wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        (["show", "nope"], 2, "OP 'nope': no such operator; known: .*flash_attention.*; or FILE.py:NAME"),
        (["show", "mine.py:nope"], 2, "mine.py has no 'nope'; operators there: small, alibi"),
        (["show", "mine.py:number"], 2, "'number' is not an operator but of type int: is @op missing"),
        (["show", "mine.py"], 2, "say which operator, mine.py:NAME; operators there: small, alibi"),
        (["show", "gone.py:x"], 2, "'gone.py': there is no such file"),
        (["show", "mine.py:small", "--level", "c"], 2, "no such level; known: spec, tiles, loops"),
        (["show", "mine.py:small", "--after", "nope"], 2, "no such pass; known: form_kernel, .*, all"),
        (["show", "mine.py:small", "--level", "spec", "--after", "form_kernel"], 2, "passes make the loops level"),
        (["show", "mine.py:small", "--schedule", "rows"], 2, "--schedule 'rows': write NAME=VALUE"),
        (["show", "mine.py:small", "--schedule", "rows=many"], 2, "'rows=many': expected an integer"),
        (["show", "mine.py:small", "--schedule", "row=4"], 2, "no such field; known: rows, heads, keys"),
        (["show", "mine.py:small", "--schedule", "rows=0"], 2, "schedule field rows=0: must be .*at least 1"),
        (["show", "flash_attention", "--schedule", "heads=3"], 2, "heads=3: does not divide the group of 4"),
        (["show", "flash_attention", "--set", "mask=nope"], 2, "'mask=nope': expected one of causal, null"),
        (["show", "flash_attention", "--set", "mask=chunked"], 2, "write mask=chunked:WINDOW"),
        (["show", "flash_attention", "--set", "mask=chunked:x"], 2, "expected an integer"),
        (["show", "flash_attention", "--set", "mask=causal:4"], 2, "'mask=causal:4': expected -1 or None"),
        (["show", "flash_attention", "--set", "size=4"], 2, "has no such constant; known: sink, mask, with_lse"),
        (["show", "flash_attention", "--set", "sink=4"], 2, "sink is an operand: .* sink=none"),
        (["show", "mine.py:small", "--dim", "depth=4"], 2, "small: dims is depth; expected axes out of dim"),
        (["show", "mine.py:small", "--page-size", "0"], 2, "Invalid value for '--page-size'"),
        (["run", "flash_attention", "--heads", "7", "--kv-heads", "2"], 2, "kv_heads is 2; expected a divisor"),
        (["run", "mine.py:small", "--rows", "1,2"], 2, "3 sequences, but --rows 1,2 has 2"),
        (["run", "mine.py:small", "--rows", "1,-2,1"], 2, "--rows '-2': expected at least 0"),
        (["run", "mine.py:small", "--target", "abacus"], 2, "unknown target 'abacus'; known: cpu, interpret"),
        (["run", "mine.py:small", "--arg", "scale=1"], 2, "has no such scalar or tensor; known: q"),
        (["run", "mine.py:alibi", "--arg", "scale=x"], 2, "'scale=x': expected a number"),
        (["run", "softcap"], 2, "OP 'softcap': no such operator; known: .*softcap_attention"),
        (["run", "softcap_attention", "--rows", ""], 2, "--rows '': expected an integer"),
        (["run", "softcap_attention", "--set", "cap=high"], 2, "--set 'cap=high': expected a number"),
        (["run", "softcap_attention", "--set", "with_lse=2"], 2, "--set 'with_lse=2': expected true or false"),
        (["run", "softcap_attention", "--tolerance", "nan"], 2, "--tolerance 'nan': expected a number, at least 0"),
        (["run", "softcap_attention", "--random", "x"], 2, "'x' is not a valid integer"),
        (["run", "indexer", "--set", "top_k=0"], 2, "OP 'indexer': with top_k=0: topk: expected k, a whole number, .*"),
        (["run", "mla_attention", "--dim", "dim=9"], 2, "OP 'mla_attention': .* cache rows, which are 9 wide"),
        (["run", "compress_windows", "--set", "rate=0"], 2, "rate is 0; expected a whole number, at least 1"),
        (["run", "mine.py:small", "--check"], 2, "no reference: define small_reference beside it"),
        (["run", "mine.py:tall"], 1, r"mine\.py:\d+:1: reference 'tall_reference': takes nothing_like_it; it can have"),
        (["run", "mine.py:wide"], 1, "'wide_reference': output 'out' has shape .* for a sequence of 5 rows"),
        (["run", "mine.py:falls"], 1, r"mine\.py:\d+:12: ZeroDivisionError: .*, while running falls_reference"),
        (["run", "mine.py:silent"], 1, "operator 'silent' returned nothing"),
        (["show", "mine.py:silent"], 1, "operator 'silent' returned nothing"),
    ],
)  # fmt: skip
def test_errors(args: list[str], status: int, message: str, invoke: Invoke) -> None:
    """One message on stderr, nothing on stdout, and the status of whoever is at fault."""
    result = invoke(*args)
    assert result.exit_code == status, result.output
    assert result.stdout == ""
    assert re.search(message, result.stderr), result.stderr
    assert "Traceback" not in result.stderr


def test_branch_on_a_traced_value(invoke: Invoke) -> None:
    """File, line and column, with carets under the condition."""
    result = invoke("run", "mine.py:branches")
    assert result.exit_code == 1
    first, *_, source, carets = result.stderr.splitlines()
    assert first.startswith(f"error: mine.py:{line_of('if scores')}:8: a traced value has no truth value")
    assert source.strip() == "if scores > 0:"
    assert source[carets.index("^") : carets.rindex("^") + 1] == "scores > 0"


def test_exception_in_an_operator(invoke: Invoke) -> None:
    """An exception of Python's own gets the author's line too."""
    result = invoke("show", "mine.py:undefined")
    assert result.exit_code == 1
    place = rf"mine\.py:{line_of('return max(dot(q, missing)')}:23: NameError: .*'missing'.*, while tracing undefined"
    assert re.search(place, result.stderr)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(:\n    pass\n", r"broken\.py:1:7: SyntaxError: .*, while importing broken.py\n    def f\(:"),
        ("x = 1\ny = [1][x]\n", r"broken\.py:2:5: IndexError: .*\n    y = \[1\]\[x\]\n        \^{6}\n"),
        ("import nowhere_at_all\n", r"broken\.py:1:1: ModuleNotFoundError: "),
        ("raise SystemExit(3)\n", r"broken\.py:1:1: SystemExit: 3"),
        ("from tilewright import op\n@op\ndef f(q):\n    pass\n", r"broken\.py:3:5: operator 'f': parameter 'q' needs"),
    ],
)  # fmt: skip
def test_broken_file(text: str, message: str, invoke: Invoke, author: Path) -> None:
    """A file that cannot be imported is its author's error, at its line."""
    (author / "broken.py").write_text(text)
    result = invoke("show", "broken.py:f")
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.search(message, result.stderr), result.stderr


def test_file_imports_its_neighbours(invoke: Invoke, author: Path) -> None:
    """As with `python FILE.py`; and afterwards the search path is what it was."""
    (author / "below").mkdir()
    (author / "below" / "neighbour_of_it.py").write_text("WINDOW = 6\n")
    (author / "below" / "it.py").write_text(AUTHOR + "\nfrom neighbour_of_it import WINDOW\n")
    before = list(sys.path)
    assert invoke("show", "below/it.py:small", "--level", "spec").exit_code == 0
    assert sys.path == before


def test_traceback_on_request(invoke: Invoke) -> None:
    """TILEWRIGHT_DEBUG=1 shows where an error was raised, and changes nothing else."""
    result = invoke("show", "nope", TILEWRIGHT_DEBUG="1")
    assert result.exit_code == 2
    assert result.stderr.startswith("Traceback")
    assert result.stderr.splitlines()[-1].startswith("error: OP 'nope'")


def test_bad_environment(invoke: Invoke) -> None:
    """A variable that makes no sense is refused by name."""
    result = invoke("run", "mine.py:small", TILEWRIGHT_DEBUG="loud")
    assert (result.exit_code, result.stderr) == (
        2, "error: environment variable TILEWRIGHT_DEBUG='loud'; expected 0 to 5\n",
    )  # fmt: skip


@pytest.mark.slow
def test_statuses_of_the_process(author: Path) -> None:
    """What a shell sees: 0, 1 and 2, results on stdout, errors on stderr."""
    for args, status in [
        (["show", "mine.py:small"], 0),
        (["run", "mine.py:branches"], 1),
        (["show", "mine.py:small", "--after", "nope"], 2),
        (["show"], 2),
    ]:
        done = command(author, *args)
        assert done.returncode == status, done.stderr
        assert bool(done.stdout) == (status == 0) != bool(done.stderr)


# ---- programs for GPUs -----------------------------------------------------------------------------------------------


def test_emit_writes_a_program_in_all_its_forms(invoke: Invoke, tmp_path: Path) -> None:
    """The nest, the TileLang program, a source for each kernel, and what the host does with them."""
    made = tmp_path / "made"
    result = invoke("emit", "flash_attention", "--target", "cuda:sm_80", "--dtype", "bfloat16", "-o", str(made))
    assert result.exit_code == 0, result.output
    ends = [".fold.cu", ".launch.json", ".loops.txt", ".tilelang.py"]
    assert sorted(p.name for p in made.iterdir()) == [f"flash_attention{end}" for end in ends]
    compile((made / "flash_attention.tilelang.py").read_text(), "program", "exec")
    assert "__global__" in (made / "flash_attention.fold.cu").read_text()
    assert json.loads((made / "flash_attention.launch.json").read_text())


def test_verify_says_what_a_kernel_takes(invoke: Invoke) -> None:
    result = invoke("verify", "flash_attention", "--target", "cuda:sm_80", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    assert "bytes of shared memory" in result.stdout


@pytest.mark.parametrize("verb", ["emit", "verify"])
def test_a_target_that_is_none(verb: str, invoke: Invoke, tmp_path: Path) -> None:
    more = ["-o", str(tmp_path)] if verb == "emit" else []
    result = invoke(verb, "flash_attention", "--target", "cuda:sm_75", *more)
    assert result.exit_code == 2
    assert "unknown target 'cuda:sm_75'" in result.output
