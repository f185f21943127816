"""The operator library: one attention family a file, declared in the language."""

from .cache import PagedKVCache, PagedLeaf
from .flash_attention import DecodeDispatchMetadata, generic_flash_attention_kv_cache_ragged_sink
from .masks import MASKS
from .merge import merge_states

__all__ = [
    "MASKS",
    "DecodeDispatchMetadata",
    "PagedKVCache",
    "PagedLeaf",
    "generic_flash_attention_kv_cache_ragged_sink",
    "merge_states",
]
