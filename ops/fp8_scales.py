# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, no-untyped-def, operator"
# Axis names stand in subscripts of annotations, which type checkers take for types.
"""float8 caches whose scales are coarser than a scale a row: per token, per head, per sequence and head, one in all."""

import torch
from torch import Tensor as TorchTensor

from tilewright.codegen_cache.checks import Array, as_tensor, expect_dtype, expect_same_device, expect_shape
from tilewright.dsl.annotations import Paged, Rows, Scalar, Tensor
from tilewright.dsl.dtypes import f8e4m3, f32
from tilewright.dsl.errors import ArgumentRankError
from tilewright.dsl.lang import op
from tilewright.dsl.reducers import softmax
from tilewright.dsl.value import dot


@op
def descaled_attention(
    q: Rows["head", "dim"],
    cache: Paged["dim", "value_dim", f8e4m3],
    k_descale: Tensor["seq", "kv_head"],
    v_descale: Tensor["seq", "kv_head"],
    scale: Scalar[f32],
):
    """Causal attention to float8 rows scaled per sequence and head (descale of FlashAttention-3, vLLM).

    q           [rows, heads, dim]
    cache       float8_e4m3fn keys [.., kv_heads, dim] and values [.., kv_heads, value_dim], read as stored: scales that
                the cache has are not used, see `scales_of` for a number to give it
    k_descale   [batch, kv_heads]: a key element means stored * k_descale; v_descale: the same of values
    scale       on scores
    Returns out [rows, heads, value_dim]. A scale is applied once a score and once a sum, not to every element.
    Raises ArgumentShapeError where widths, heads or batches differ.
    """
    keys = cache.keys(where=lambda query, key: key <= query)
    return softmax(dot(q, keys) * (scale * k_descale)) @ keys.v * v_descale


def scales_of(pages: Array, scales: Array | float) -> TorchTensor:
    """Scales as a paged cache takes them, one a row, from coarser ones. A view of them: nothing is copied.

    pages   [pages, page_size, kv_heads, width]: the keys or values that are scaled
    scales  float32: a number for the whole pool; [kv_heads] per head; [pages, page_size] per token;
            [pages, page_size, kv_heads] per token and head
    Returns [pages, page_size, kv_heads, 1], for PagedKVCache.from_block_table and its default granularity. Any operator
    reads such a cache; where a scale is shared it cannot be appended to.
    Raises the `Argument*` errors: scales of another rank, shape, dtype or device.
    """
    name = "scales_of"
    of = as_tensor(name, "pages", pages)
    expect_shape(name, "pages", of, pages=None, page_size=None, kv_heads=None, width=None)
    given = as_tensor(name, "scales", scales if not isinstance(scales, (int, float)) else torch.tensor(float(scales)))
    expect_dtype(name, "scales", given, (torch.float32,))
    size = dict(zip(("pages", "page_size", "kv_heads"), of.shape[:3], strict=True))
    ranks = {0: (), 1: ("kv_heads",), 2: ("pages", "page_size"), 3: tuple(size)}
    if given.dim() not in ranks:
        raise ArgumentRankError(op=name, argument="scales", got=given.dim(), expected="0, 1, 2 or 3")
    expect_shape(name, "scales", given, **{a: size[a] for a in ranks[given.dim()]})
    expect_same_device(name, "scales", given, "pages", of)
    return (given[:, :, None] if given.dim() == 2 else given).expand(*of.shape[:3])[..., None]
