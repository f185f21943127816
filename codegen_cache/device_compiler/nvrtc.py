"""NVRTC as a command: python -m ... LIBRARY SOURCE -o CUBIN OPTION... Its log goes to standard output."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Final

_PRELUDE: Final = "#include <tl_templates/cuda/nvrtc_std.h>\n"  # stands for the C++ standard library


def main(library: str, source: str, dash_o: str, output: str, *options: str) -> int:
    """The exit status."""
    nvrtc = ctypes.CDLL(library)
    program = ctypes.c_void_p()
    text = _PRELUDE + Path(source).read_text(encoding="utf-8")
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), source.encode(), 0, None, None):
        print("error: NVRTC makes no program")
        return 1
    arguments = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    status = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
    print(_answer(nvrtc, "ProgramLog", program).rstrip(b"\0").decode(errors="replace"))
    if not status:
        Path(output).write_bytes(_answer(nvrtc, "CUBIN", program))
    return int(status != 0)


def _answer(nvrtc: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
