"""Device sources with one synchronisation deleted or weakened, and whether the emulator notices."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tilewright.codegen_cache.device_source import DeviceSource
from tilewright.codegen_cache.emulator import EVERY
from tilewright.dsl.errors import EmulationError

SYNCHRONISATIONS = "|".join(
    [
        r"__sync(?:threads|warp)\(\);",
        r"tl::(?:__sync_thread_partial|__named_barrier_arrive)\([^;]*\);",
        r"tl::(?:fence_barrier_init|fence_proxy_async)\(\);",
        r"tl::(?:warpgroup_arrive|warpgroup_commit_batch|warpgroup_wait<\d+>)\(\);",
        r"tl::(?:tma_store_arrive|tma_store_wait<[^>]*>)\(\);",
        r"tl::(?:cp_async_commit|cp_async_wait<\d+>)\(\);",
        r"tl::mbarrier_cp_async_arrive_noinc\([^;]*\);",
        r"mbarrier\[[^;]*\]\.(?:wait|arrive|arrive_and_expect_tx|init|expect_transaction)\([^;]*\);",
    ]
)
WEAKER: list[tuple[str, Callable[[re.Match[str]], str]]] = [
    (r"(mbarrier\[[^;]*\]\.wait\()([^;]*)\);", lambda m: f"{m[1]}({m[2]}) ^ 1);"),
    (r"(mbarrier\[[^;]*\]\.init\()(\d+)\);", lambda m: f"{m[1]}{int(m[2]) - 1 or 2});"),
    (r"(arrive_and_expect_tx\()(\d+)\);", lambda m: f"{m[1]}{int(m[2]) // 2});"),
    (r"(tl::(?:cp_async|warpgroup)_wait<)(\d+)(>\(\);)", lambda m: f"{m[1]}{int(m[2]) + 1}{m[3]}"),
]


@dataclass(frozen=True)
class Mutant:
    """What was there, at which line of the kernels, and what stands there now."""

    line: int
    old: str
    new: str
    source: DeviceSource

    def __str__(self) -> str:
        return f"{self.line}: {self.old} -> {self.new or 'nothing'}"


def mutants(source: DeviceSource) -> Iterator[Mutant]:
    """Every synchronisation deleted, and every one that has a weaker form in that form."""
    start = source.text.index('extern "C" __global__')
    for m in re.finditer(SYNCHRONISATIONS, source.text):
        yield _mutant(source, start, m, "")
    for pattern, weaker in WEAKER:
        for m in re.finditer(pattern, source.text):
            yield _mutant(source, start, m, weaker(m))


def _mutant(source: DeviceSource, start: int, m: re.Match[str], new: str) -> Mutant:
    text = source.text[: m.start()] + (new or ";") + source.text[m.end() :]
    return Mutant(source.text.count("\n", start, m.start()) + 1, m[0], new, replace(source, text=text))


def verdict(mutant: Mutant, right: Callable[[DeviceSource, int], bool]) -> str:
    """The kind of fault that is reported, "wrong" for a wrong answer, "redundant" where no schedule shows anything.

    `right(source, schedule)` emulates the source and looks at its answer.
    """
    for schedule in range(EVERY):
        try:
            if not right(mutant.source, schedule):
                return "wrong"
        except EmulationError as e:
            text = re.sub(r"^.*?block \([^)]*\)(, thread \d+)?: ", "", str(e).partition("\n")[0])
            return text.partition(":")[0]
    return "redundant"
