"""Generated GPU sources run on the CPU, thread by thread; faults of synchronisation are reported: see `run.emulate`."""

from .run import Emulation, emulate
from .schedules import EVERY, Schedule

__all__ = ["EVERY", "Emulation", "Schedule", "emulate"]
