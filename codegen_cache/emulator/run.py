"""Launches of a device source, emulated on CPU tensors."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from tilewright.codegen_cache.device_source import ARCHS, DeviceSource, KernelArg, Launch, Number, evaluate
from tilewright.dsl.errors import EmulationError

from .build import build
from .library import Dim3, EmulationLibrary, LaunchRecord, library_at
from .lines import line_of
from .schedules import Policy, Schedule
from .tensor_maps import EncodedMap, encode
from .tensors import DeviceTensors, bound_names
from .translate import Translation, translate

_LOCK = threading.Lock()  # a library has one block running at a time


@dataclass(frozen=True)
class Emulation:
    """What a run showed that is no fault.

    overtaken_waits: waits that two phases of their mbarrier had passed by; the hardware would hang there, if a thread
    stood still for that long. written: the tensors that were written to.
    """

    overtaken_waits: int
    written: frozenset[str]


def emulate(
    source: DeviceSource,
    tensors: Mapping[str, Tensor],
    scalars: Mapping[str, Number] | None = None,
    *,
    schedule: int | Schedule = 0,
    races: bool = True,
    proxies: bool = True,
) -> Emulation:
    """Run every launch of `source`; what it writes is written to the tensors.

    tensors: by parameter name, on the CPU, any strides the source takes. Device memory holds each tensor alone, so an
    access outside it is found and named. scalars: what is neither a tensor nor one of its sizes or strides.
    schedule: the order of threads and of asynchronous operations, by number or in full. Run several: 12 are good.
    races: report accesses that nothing orders. proxies: report generic writes to shared memory that wgmma or TMA reads
    without fence.proxy.async.

    Raises EmulationError for any fault; the tensors are as they were then. CompileError and MissingToolkit as `build`.
    """
    how = Schedule.number(schedule) if isinstance(schedule, int) else schedule
    name = source.launches[0].kernel if source.launches else source.arch
    try:
        translation = translate(source)
        names = bound_names(source, tensors, scalars or {})
    except ValueError as e:
        raise EmulationError(kernel=name, schedule=how.seed, problem=str(e)) from None
    library = library_at(build(translation.text, name, source.arch))
    policy = Policy.of(how, races=races, proxies=proxies)
    with _LOCK, DeviceTensors(library, source, tensors) as device:
        waits = sum(_launch(library, source, translation, launch, device, names, policy) for launch in source.launches)
        return Emulation(waits, device.copy_back())


def _launch(
    library: EmulationLibrary,
    source: DeviceSource,
    translation: Translation,
    launch: Launch,
    device: DeviceTensors,
    names: Mapping[str, Number],
    policy: Policy,
) -> int:
    """Returns the number of overtaken waits."""

    def failed(problem: str) -> EmulationError:
        return EmulationError(kernel=launch.kernel, schedule=policy.seed, problem=problem)

    grid, block = ([int(evaluate(e, names)) for e in sizes] for sizes in (launch.grid, launch.block))
    if 0 in grid:
        return 0
    gpu, shared = ARCHS[source.arch], int(evaluate(launch.shared_bytes, names))
    if shared > gpu.shared_bytes:
        raise failed(f"{shared} bytes of shared memory; {gpu.name} has {gpu.shared_bytes}")
    threads = block[0] * block[1] * block[2]
    if threads % gpu.warp or threads > gpu.threads:
        raise failed(f"{threads} threads a block, not a multiple of {gpu.warp} up to {gpu.threads}")
    try:
        cells = [_cell(a, device, source, names) for a in launch.args]
    except ValueError as e:
        raise failed(str(e)) from None
    if len(cells) != len(translation.parameters[launch.kernel]):
        raise failed(f"{len(cells)} arguments for {len(translation.parameters[launch.kernel])} parameters")
    arguments = (ctypes.c_void_p * len(cells))(*(ctypes.addressof(c) for c in cells))
    record = LaunchRecord(launch.kernel.encode(), arguments, Dim3(*grid), Dim3(*block), shared, policy)
    if library.launch(record):
        raise failed(record.error.decode(errors="replace") + _place(library.path, source.text, record))
    return int(record.overtaken_waits)


def _place(path: Path, text: str, record: LaunchRecord) -> str:
    """The line of the source that a fault is in, to be added to its message; nothing where that cannot be found."""
    number = line_of(path, list(record.stack[: record.depth]))
    lines = text.splitlines()
    if number is None or number > len(lines):
        return ""
    shown = lines[number - 1].strip()
    return f"\n  line {number}: {shown if len(shown) <= 160 else shown[:157] + '...'}"


Cell = ctypes.c_void_p | ctypes.c_int64 | ctypes.c_float | ctypes.c_double | EncodedMap


def _cell(arg: KernelArg, device: DeviceTensors, source: DeviceSource, names: Mapping[str, Number]) -> Cell:
    """Memory that holds one argument."""
    match arg.kind:
        case "pointer":
            return ctypes.c_void_p(device.address(arg.value))
        case "map":
            (spec,) = (m for m in source.tensor_maps if m.name == arg.value)
            return encode(spec, device.address(spec.tensor), names)
    value = evaluate(arg.value, names)
    match arg.dtype:
        case "float32":
            return ctypes.c_float(value)
        case "float64":
            return ctypes.c_double(value)
    return ctypes.c_int64(int(value))  # the low bytes, where the parameter is smaller


def _new_lock() -> None:
    """A forked child may find the lock held by a thread that it does not have."""
    global _LOCK
    _LOCK = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)
