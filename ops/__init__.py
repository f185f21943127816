"""The operator library: one attention family a file, declared in the language."""

from .cache import PagedKVCache, PagedLeaf
from .cache_append import quantize
from .flash_attention import DecodeDispatchMetadata, generic_flash_attention_kv_cache_ragged_sink
from .indexer import mla_indexer_ragged_float8_paged
from .latent_attention import latent_sparse_attention_ragged_paged
from .masks import MASKS
from .merge import merge_states

__all__ = [
    "MASKS",
    "DecodeDispatchMetadata",
    "PagedKVCache",
    "PagedLeaf",
    "generic_flash_attention_kv_cache_ragged_sink",
    "latent_sparse_attention_ragged_paged",
    "merge_states",
    "mla_indexer_ragged_float8_paged",
    "quantize",
]
