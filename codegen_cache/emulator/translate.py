"""Device source text to host C++ that the emulation runtime can run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from tilewright.codegen_cache.device_source import DeviceSource

_QUALIFIER: Final = r"extern \"C\" __global__ void (?:__launch_bounds__\([^)]*\) )?"
_KERNEL: Final = re.compile(_QUALIFIER + r"(\w+)\(([^)]*)\) \{")
_DECLARATION: Final = re.compile(_QUALIFIER + r"\w+\([^)]*\);")
_MAP: Final = re.compile(r"__grid_constant__ const CUtensorMap (\w+)")
_DYNAMIC: Final = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?([\w ]+?) (\w+)\[\];")
_UNHOOKED: Final = '__attribute__((no_sanitize("thread")))'  # the arguments are no device memory
_STATIC: Final = re.compile(r"__shared__ (?:__align__\(\d+\) )?([\w ]+?) (\w+)\[(\d+)\];")


@dataclass(frozen=True)
class Translation:
    """C++ text, and the C types of each kernel's parameters."""

    text: str
    parameters: dict[str, tuple[str, ...]]


def translate(source: DeviceSource) -> Translation:
    """Directives go, shared memory comes from the runtime, and each kernel gets an entry that unpacks its arguments.

    Raises ValueError where a launched kernel is not in the text.
    """
    body = re.sub(r"^[ \t]*#.*$", "", source.text, flags=re.M)  # lines stay, so that messages name the right ones
    body = _DECLARATION.sub("", body).replace("__restrict__", "")
    body = _MAP.sub(r"const CUtensorMap &\1", body)  # arguments outlive the launch
    body = _DYNAMIC.sub(r"\1 *\2 = (\1 *)tw::dynamic_shared();", body)
    body = _STATIC.sub(
        r"static char \2_declared; \1 *\2 = (\1 *)tw::static_shared(&\2_declared, sizeof(\1) * \3);",
        body,
    )
    parameters = {name: _types(text) for name, text in _KERNEL.findall(body)}
    for launch in source.launches:
        if launch.kernel not in parameters:
            raise ValueError(f"the source has no kernel {launch.kernel}")
    return Translation(f'#include "device.hpp"\n#line 1\n{body}\n{_entries(parameters)}', parameters)


def _types(parameters: str) -> tuple[str, ...]:
    return tuple(re.sub(r"\s*\b\w+$", "", p.strip()) for p in parameters.split(",") if p.strip())


def _entries(parameters: dict[str, tuple[str, ...]]) -> str:
    lines = []
    for name, types in parameters.items():
        call = ", ".join(_argument(t, i) for i, t in enumerate(types))
        lines.append(f"{_UNHOOKED} static void entry_{name}(void **a) {{ {name}({call}); }}")
    table = ", ".join(f'{{"{name}", entry_{name}}}' for name in parameters)
    lines.append(
        f"namespace tw {{\nconst Kernel kernels[] = {{{table}}};\nconst int kernel_count = {len(parameters)};\n}}"
    )
    return "\n".join(lines) + "\n"


def _argument(type_: str, index: int) -> str:
    plain = type_.rstrip("& ").removeprefix("const ") if "CUtensorMap" in type_ else type_
    return f"*({plain} *)a[{index}]"
