"""The language and the compiler: declaration -> tile program -> loop nest -> backends.

What an author needs is here: `from tilewright.dsl import op, Rows, Paged, dot, softmax`. The passes, levels and
backends are modules of their own.
"""

from .annotations import Const, Paged, PerHead, Rows, Scalar, Tensor
from .dtypes import bf16, boolean, f8e4m3, f16, f32, i32, i64, u8, u32
from .lang import Operator, op
from .reducers import Reducer, StateOf, fold, logsumexp, lse, max, softmax, sum, weights
from .value import (
    Value,
    dot,
    exp,
    head,
    key,
    kv_head,
    log,
    maximum,
    minimum,
    num_keys,
    pos,
    relu,
    seq,
    sigmoid,
    sqrt,
    tanh,
    to_float,
    to_int,
    where,
)

__all__ = [
    "Const",
    "Operator",
    "Paged",
    "PerHead",
    "Reducer",
    "Rows",
    "Scalar",
    "StateOf",
    "Tensor",
    "Value",
    "bf16",
    "boolean",
    "dot",
    "exp",
    "f8e4m3",
    "f16",
    "f32",
    "fold",
    "head",
    "i32",
    "i64",
    "key",
    "kv_head",
    "log",
    "logsumexp",
    "lse",
    "max",
    "maximum",
    "minimum",
    "num_keys",
    "op",
    "pos",
    "relu",
    "seq",
    "sigmoid",
    "softmax",
    "sqrt",
    "sum",
    "tanh",
    "to_float",
    "to_int",
    "u8",
    "u32",
    "weights",
    "where",
]
