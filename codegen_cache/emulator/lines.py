"""Which line of a source an address of its library belongs to, by binutils' addr2line."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .build import SOURCE


def line_of(library: Path, return_addresses: Sequence[int]) -> int | None:
    """The line of the innermost call that is in the source, not in a header. None without addr2line."""
    program = shutil.which("addr2line")
    if program is None or not return_addresses:
        return None
    before = [hex(a - 1) for a in return_addresses]  # the calls that would have returned there
    done = subprocess.run([program, "-i", "-e", library, *before], capture_output=True, text=True)
    lines = re.findall(rf"(?:^|/){re.escape(SOURCE)}:(\d+)", done.stdout, re.M)
    return int(lines[0]) if lines else None
