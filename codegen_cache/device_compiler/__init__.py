"""Generated GPU sources compiled to device code without a GPU, and what the code needs: see `compile_device`."""

from .compile import compile_device
from .report import DeviceCode, KernelResources

__all__ = ["DeviceCode", "KernelResources", "compile_device"]
