"""Names that the benchmark's modules share. Loads no peer: what starting costs is measured as well."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Method = Callable[[], Tensor]

OURS = "tilewright"

# Kinds of workloads, which goals go by.
DECODE, PREFILL, MIXED, SINKS, WINDOW = "decode", "prefill", "mixed", "mixed, sinks", "window"
LATENT, LATENT_BYTES = "latent", "latent, float8 rows"
INDEXER, SCORES, TOPK = "indexer", "indexer scores, 64 rows", "top-k"
ATTENTION = (DECODE, PREFILL, MIXED, SINKS, WINDOW)
KINDS = (*ATTENTION, LATENT, LATENT_BYTES, INDEXER, SCORES, TOPK)
