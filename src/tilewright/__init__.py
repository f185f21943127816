"""A declarative tile language for attention kernels, and its compiler. Nothing is loaded before it is asked for."""

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["PagedKVCache", "__version__", "op", "run"]

if TYPE_CHECKING:
    from .codegen_cache.launch import run
    from .dsl.lang import op
    from .ops.cache import PagedKVCache
else:
    _HOME = {
        "op": "tilewright.dsl.lang",
        "run": "tilewright.codegen_cache.launch",
        "PagedKVCache": "tilewright.ops.cache",
    }

    def __getattr__(name):
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        globals()[name] = value = getattr(import_module(_HOME[name]), name)
        return value

    def __dir__():
        return sorted({*globals(), *_HOME})
