"""MAX's operators on a CPU: a graph for each operator, dtype, mask and set of extents, compiled at its first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from max.driver import CPU, Buffer  # type: ignore[import-not-found]
from max.dtype import DType  # type: ignore[import-not-found]
from max.engine import InferenceSession  # type: ignore[import-not-found]
from max.graph import BufferType, DeviceRef, Graph, TensorType, ops  # type: ignore[import-not-found]

from .peer_calls import Bits, Option, serve

Ready: TypeAlias = Callable[[], Any]  # an operator on operands of its own: may be called again and again

HOST = DeviceRef.CPU()
SESSION = InferenceSession(devices=[CPU()])
DTYPES = {
    "float32": DType.float32,
    "int16": DType.bfloat16,
    "int32": DType.int32,
    "int64": DType.int64,
    "uint32": DType.uint32,
}


def attention(
    q: Bits, offsets: Bits, blocks: Bits, table: Bits, lengths: Bits, sinks: Bits | None = None, *, layer: int,
    scale: float, mask: str, window: int,
) -> Ready:  # fmt: skip
    """generic_flash_attention_kv_cache_ragged_sink, or the operator without sinks."""
    rows = int(np.diff(offsets).max())
    operands = [
        q,
        offsets,
        *leaf(blocks, table, lengths, rows),
        np.array(layer, np.uint32),
        np.array(scale, np.float32),
    ]
    name = "mo.mha.ragged.paged"
    if sinks is not None:
        name, operands = f"{name}.sink_weights", [*operands, sinks]
    plan = np.array([len(lengths), rows, 1], np.int64)  # batch, longest prompt, key partitions
    return ready(name, [*operands, plan], {"mask_str": mask, "local_window_size": window})


def latent(
    q: Bits, offsets: Bits, indices: Bits, sinks: Bits, recent: Bits, recent_table: Bits, recent_lengths: Bits,
    entries: Bits, entries_table: Bits, entries_lengths: Bits, *, scale: float, window: int,
) -> Ready:  # fmt: skip
    """latent_sparse_attention_ragged_paged"""
    rows, zero = int(np.diff(offsets).max()), np.array(0, np.uint32)
    near, far = leaf(recent, recent_table, recent_lengths, rows), leaf(entries, entries_table, entries_lengths, rows)
    operands = [q, offsets, indices, sinks, *near, *far, zero, zero, np.array(scale, np.float32)]
    constants = {"window": window, "split_k": True, "portable_p_bf16": False}
    return ready("mo.latent_sparse_attention.ragged.paged", operands, constants)


def scores(
    q: Bits, weights: Bits, offsets: Bits, closed: Bits, visible: Bits, blocks: Bits, table: Bits, lengths: Bits, *,
    width: int,
) -> Ready:  # fmt: skip
    """Of DeepSeek-V4's indexer, [rows, width]: entries closed before the call, then those closed by it."""
    cached = leaf(blocks, table, lengths, int(np.diff(offsets).max()))
    operands = [q, weights, offsets, closed, visible, *cached, np.array(0, np.uint32)]
    return ready("mo.indexer_score.ragged.paged", operands, {"num_heads": q.shape[1]}, width)


def leaf(blocks: Bits, table: Bits, lengths: Bits, rows: int) -> list[Bits]:
    """A cache as six operands: blocks, page stride (-1: packed), lengths, table, longest prompt, longest cache."""
    return [blocks, np.array([-1]), lengths, table, np.array([rows], np.uint32), np.array([lengths.max()], np.uint32)]


# ---- graphs ----------------------------------------------------------------------------------------------------------


def ready(name: str, operands: Sequence[Bits], constants: Mapping[str, Option], width: int | None = None) -> Ready:
    """A call with a result of float32 [rows, width], or like q, the first operand. Caches are operands of six axes."""
    kinds = tuple((a.dtype.name, extents(n, a)) for n, a in enumerate(operands))
    model, given = compiled(name, kinds, tuple(constants.items()), width), list(map(buffer, operands))
    return lambda: model.execute(*given)


def result(call: Ready) -> Bits:
    """What a call returns, as it travels."""
    (out,) = call()
    found: Bits = (out.view(DType.int16) if out.dtype == DType.bfloat16 else out).to_numpy()
    return found


def extents(n: int, a: Bits) -> tuple[int | str, ...]:
    """Those that are compiled in, heads and features among them, and a name for each other one."""
    if a.shape == (1,):
        return a.shape
    free = a.ndim if a.ndim < 3 else 1
    return *(f"extent_{n}_{axis}" for axis in range(free)), *a.shape[free:]


@cache
def compiled(
    name: str, kinds: tuple[tuple[str, tuple[int | str, ...]], ...], constants: tuple[tuple[str, Option], ...],
    width: int | None,
) -> Any:  # fmt: skip
    types = [(BufferType if len(e) == 6 else TensorType)(DTYPES[dtype], e, HOST) for dtype, e in kinds]
    with Graph("call", input_types=types) as graph:
        values = [x.buffer if isinstance(t, BufferType) else x.tensor for x, t in zip(graph.inputs, types, strict=True)]
        q = values[0]
        made = (
            TensorType(q.dtype, q.shape, HOST)
            if width is None
            else TensorType(DType.float32, [q.shape[0], width], HOST)
        )
        found = ops.inplace_custom(name, device=HOST, values=values, out_types=[made], parameters=dict(constants))
        graph.output(found[0].tensor)
    return SESSION.load(graph)


def buffer(a: Bits) -> Any:
    made = Buffer.from_numpy(a.copy())
    return made.view(DType.bfloat16) if a.dtype == np.int16 else made


FUNCTIONS: dict[str, Callable[..., Ready]] = {f.__name__: f for f in (attention, latent, scores)}


def answering(function: Callable[..., Ready]) -> Callable[..., Bits]:
    return lambda **given: result(function(**given))


if __name__ == "__main__":
    serve({name: answering(f) for name, f in FUNCTIONS.items()})
