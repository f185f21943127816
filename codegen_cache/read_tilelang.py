"""What TileLang made of a program, read into a `DeviceSource`: the text, and what the host side does with it.

The host module makes tensor maps and launches kernels through packed calls, in order:

    __tvm_tensormap_create_tiled(map, dtype, rank, tensor, dims[rank], byte strides[rank], box[rank],
                                 element strides[rank], interleave, swizzle, l2 promotion, out-of-bounds fill)
    <kernel>(arguments..., launch parameters in the order of the kernel's attribute "tirx.kernel_launch_params")
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from .device_source import DeviceSource, KernelArg, Launch, TensorMap, TensorParam

Tir = Any  # nodes of TVM's program representation; TVM has no types

_CREATE_MAP: Final = "__tvm_tensormap_create_tiled"
_SHARED: Final = "tirx.use_dyn_shared_memory"
_BINARY: Final = {
    "Add": "+",
    "Sub": "-",
    "Mul": "*",
    "FloorDiv": "//",
    "Div": "//",  # of sizes, which are not negative
    "FloorMod": "%",
    "Mod": "%",
    "LT": "<",
    "LE": "<=",
    "GT": ">",
    "GE": ">=",
    "EQ": "==",
    "NE": "!=",
    "And": "and",
    "Or": "or",
}
_CALLS: Final = {"shift_right": ">>", "shift_left": "<<", "bitwise_and": "&"}


def read_tilelang(prim_func: Tir, artifact: Tir, arch: str) -> DeviceSource:
    """`artifact` is what `tilelang.lower(prim_func, target=...)` returned for `arch`.

    Raises ValueError for a host program that does something else than make tensor maps and launch kernels.
    """
    kernels = {str(f.attrs["global_symbol"]): f for f in artifact.device_mod.functions.values()}
    maps: list[TensorMap] = []
    launches: list[Launch] = []
    for call in _packed_calls(artifact.host_mod):
        name = str(call.args[0].value)
        if name == _CREATE_MAP:
            maps.append(_tensor_map(call.args[1:]))
        elif name in kernels:
            launches.append(_launch(name, kernels[name], call.args[1:]))
        elif "tensormap" in name:
            raise ValueError(f"the host program calls {name}, which is not known here")
    buffers = [prim_func.buffer_map[p] for p in prim_func.params if p in prim_func.buffer_map]
    return DeviceSource(
        text=artifact.kernel_source,
        arch=arch,
        tensors=tuple(_tensor(b) for b in buffers),
        launches=tuple(launches),
        tensor_maps=tuple(maps),
    )


def _packed_calls(module: Tir) -> Iterator[Tir]:
    from tilelang import tvm

    found: list[Tir] = []

    def visit(node: Tir) -> None:
        if type(node).__name__ != "Call" or not str(getattr(node.op, "name", "")).endswith("call_packed"):
            return
        if node.args and isinstance(getattr(node.args[0], "value", None), str):
            found.append(node)

    for function in module.functions.values():
        if hasattr(function, "body"):
            tvm.tirx.stmt_functor.post_order_visit(function.body, visit)
    yield from found


def _tensor(buffer: Tir) -> TensorParam:
    return TensorParam(
        name=str(buffer.name),
        dtype=str(buffer.dtype),
        shape=tuple(_expression(e) for e in buffer.shape),
        strides=tuple(_expression(e) for e in buffer.strides),
    )


def _tensor_map(args: Tir) -> TensorMap:
    name, dtype, rank, tensor = str(args[0].name), int(args[1]), int(args[2]), str(args[3].name)
    dims, strides, box, steps = (
        tuple(_expression(e) for e in args[4 + i * rank : 4 + (i + 1) * rank]) for i in range(4)
    )
    modes = [int(e) for e in args[4 + 4 * rank :]]  # interleave, swizzle, l2_promotion, oob_fill
    return TensorMap(name, tensor, dtype, dims, strides, box, steps, *modes)


def _launch(name: str, kernel: Tir, args: Tir) -> Launch:
    tags = [str(t) for t in kernel.attrs["tirx.kernel_launch_params"]]
    count = len(args) - len(tags)
    extents = {tag: _expression(e) for tag, e in zip(tags, args[count:], strict=True)}
    sizes = {kind: tuple(extents.get(f"{kind}.{c}", "1") for c in "xyz") for kind in ("blockIdx", "threadIdx")}
    parameters = zip(kernel.params, args[:count], strict=True)
    return Launch(
        kernel=name,
        args=tuple(_argument(p, e) for p, e in parameters),
        grid=_three(sizes["blockIdx"]),
        block=_three(sizes["threadIdx"]),
        shared_bytes=extents.get(_SHARED, "0"),
    )


def _three(sizes: tuple[str, ...]) -> tuple[str, str, str]:
    x, y, z = sizes
    return x, y, z


def _argument(param: Tir, value: Tir) -> KernelArg:
    pointee = getattr(getattr(param, "type_annotation", None), "element_type", None)
    if pointee is None:
        return KernelArg("scalar", _expression(value), str(param.dtype))
    dtype = str(pointee.dtype)
    return KernelArg("map", value.name, "") if dtype == "uint8x128" else KernelArg("pointer", value.name, dtype)


def _expression(e: Tir) -> str:
    """A TIR expression of sizes as text, as `device_source.evaluate` takes it."""
    kind = type(e).__name__
    if isinstance(e, int | str):
        return str(e)
    match kind:
        case "IntImm" | "FloatImm":
            return repr(e.value)
        case "Var":
            return str(e.name)
        case "Max" | "Min":
            return f"{kind.lower()}({_expression(e.a)}, {_expression(e.b)})"
        case "Cast":
            return _expression(e.value)
        case "Select":
            return _choice(e.condition, e.true_value, e.false_value)
        case "Call":
            return _call(str(getattr(e.op, "name", e.op)).rpartition(".")[2], e.args)
    if kind in _BINARY:
        return f"({_expression(e.a)} {_BINARY[kind]} {_expression(e.b)})"
    raise ValueError(f"not a size: {kind} {e}")


def _call(name: str, args: Tir) -> str:
    if name == "if_then_else":
        return _choice(*args)
    if name not in _CALLS:
        raise ValueError(f"not a size: {name}")
    return f"({_expression(args[0])} {_CALLS[name]} {_expression(args[1])})"


def _choice(condition: Tir, yes: Tir, no: Tir) -> str:
    return f"({_expression(yes)} if {_expression(condition)} else {_expression(no)})"
