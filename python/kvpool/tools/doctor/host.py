"""Checks of memory, processors and limits of this machine and of its container."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from kvpool.tools.doctor.report import NOTE, OK, Finding
from kvpool.tools.output import bytes_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SECTION = "memory and limits"

# cgroup v1 reports a missing limit as the largest multiple of the page size.
_NO_LIMIT = 1 << 62


def examine(root: Path, threads: int) -> list[Finding]:
    """Check the machine.

    Args:
        root: The folder of `/proc` and `/sys`.
        threads: Number of threads that kvpool copies with.
    """
    memory = _meminfo(root)
    return [
        _memory(memory),
        *_container(root),
        *_overcommit(root),
        _address_space(),
        _locked(),
        _transparent(root),
        _reserved(memory),
        _nodes(root),
        _processors(root, threads),
    ]


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _meminfo(root: Path) -> dict[str, int]:
    """Return the entries of `/proc/meminfo`: bytes, or numbers of pages."""
    found = {}
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        match = re.fullmatch(r"(\w+):\s+(\d+)( kB)?", line.strip())
        if match:
            found[match[1]] = int(match[2]) * (1024 if match[3] else 1)
    return found


def _memory(memory: dict[str, int]) -> Finding:
    if "MemTotal" not in memory:
        return Finding(SECTION, "memory", NOTE, "unknown: there is no /proc/meminfo")
    text = f"{bytes_text(memory['MemTotal'])}, {bytes_text(memory.get('MemAvailable', 0))} available"
    return Finding(SECTION, "memory", OK, text)


def _container(root: Path) -> Iterator[Finding]:
    """Report the smallest memory limit of the control groups of this process."""
    limit, used = None, None
    for limit_name, used_name, folder in _groups(root, "memory"):
        text = _read(folder / limit_name)
        found = int(text) if text and text.isdigit() else _NO_LIMIT
        if found < min(limit or _NO_LIMIT, _NO_LIMIT):
            now = _read(folder / used_name)
            limit, used = found, int(now) if now and now.isdigit() else None
    if limit is None:
        return
    text = bytes_text(limit) if used is None else f"{bytes_text(limit)}, {bytes_text(used)} of it in use"
    advice = (
        "a pool's memory counts when it is touched: beyond the limit, the process is killed without an error"
    )
    yield Finding(SECTION, "container limit", NOTE, text, advice)


def _groups(root: Path, controller: str) -> Iterator[tuple[str, str, Path]]:
    """Yield the files of limit and usage, and the folder, of a controller's groups, innermost first."""
    names = {
        "memory": (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")),
        "cpu": (("cpu.max", ""), ("cpu.cfs_quota_us", "cpu.cfs_period_us")),
    }[controller]
    base = root / "sys/fs/cgroup"
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            (limit, used), mount = names[0], base
        elif controller in controllers.split(","):
            (limit, used), mount = names[1], base / controllers
            # Where several controllers are mounted together, each has a link of its own.
            mount = mount if mount.is_dir() else base / controller
        else:
            continue
        inner = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(inner), -1, -1):
            yield limit, used, mount.joinpath(*inner[:depth])


def _overcommit(root: Path) -> Iterator[Finding]:
    if _read(root / "proc/sys/vm/overcommit_memory") == "2":
        text = "vm.overcommit_memory is 2: memory counts when it is reserved, not when it is touched"
        advice = "large pools may be refused, even if little of them is used: sysctl vm.overcommit_memory=0"
        yield Finding(SECTION, "overcommit", NOTE, text, advice)


def _limit(name: str) -> int | None:
    """Return a soft limit of this process in bytes; None without one."""
    try:
        import resource  # noqa: PLC0415 - not available on every system
    except ImportError:
        return None
    soft: int = resource.getrlimit(getattr(resource, name))[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _address_space() -> Finding:
    limit = _limit("RLIMIT_AS")
    if limit is None:
        return Finding(SECTION, "address space", OK, "unlimited")
    advice = "pools reserve all of their size at once: ulimit -v unlimited"
    return Finding(SECTION, "address space", NOTE, f"limited to {bytes_text(limit)}", advice)


def _locked() -> Finding:
    limit = _limit("RLIMIT_MEMLOCK")
    if limit is None:
        return Finding(SECTION, "locked memory", OK, "unlimited")
    advice = (
        "the NVIDIA driver ignores this limit; transfer engines that register pools with a network card do "
        "not: ulimit -l unlimited, docker run --ulimit memlock=-1"
    )
    return Finding(SECTION, "locked memory", NOTE, f"limited to {bytes_text(limit)}", advice)


def _transparent(root: Path) -> Finding:
    name = "transparent huge pages"
    text = _read(root / "sys/kernel/mm/transparent_hugepage/enabled")
    match = re.search(r"\[(\w+)\]", text or "")
    if match is None:
        return Finding(SECTION, name, NOTE, "unknown: not supported by the kernel, or hidden")
    if match[1] == "never":
        advice = (
            "copies of large pools are slower: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        )
        return Finding(SECTION, name, NOTE, "never", advice)
    return Finding(SECTION, name, OK, f"{match[1]}: large host pools use them")


def _reserved(memory: dict[str, int]) -> Finding:
    total, free = memory.get("HugePages_Total", 0), memory.get("HugePages_Free", 0)
    if total == 0:
        text = "none, so ChunkPool(huge_pages=True) uses ordinary pages"
    else:
        text = f"{free} of {total} free, {bytes_text(memory.get('Hugepagesize', 0))} each"
    return Finding(SECTION, "reserved huge pages", OK, text)


def _nodes(root: Path) -> Finding:
    text = _read(root / "sys/devices/system/node/online")
    if text is None:
        return Finding(SECTION, "NUMA nodes", NOTE, "unknown: ChunkPool(numa_node=...) has no effect")
    count = _count(text)
    return Finding(SECTION, "NUMA nodes", OK, f"{count}" if count == 1 else f"{count}: {text}")


def _count(ranges: str) -> int:
    """Count the numbers of a list such as `0-3,8`."""
    ends = [part.split("-") for part in ranges.split(",") if part]
    return sum(int(end[-1]) - int(end[0]) + 1 for end in ends)


def _processors(root: Path, threads: int) -> Finding:
    """Return the processors that this process may use, by its affinity and its container."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for quota in (_quota(*group) for group in _groups(root, "cpu")) if quota is not None]
    text = f"{usable} usable"
    if quotas:
        text += f", {min(quotas):.1f} by the container's CPU quota"
    text += f"; kvpool copies with {threads} thread{'s' if threads > 1 else ''}"
    if threads > min([usable, *quotas]):
        return Finding(
            SECTION, "processors", NOTE, text, "call kvpool.set_num_threads(n) with at most that number"
        )
    return Finding(SECTION, "processors", OK, text)


def _quota(limit: str, period: str, folder: Path) -> float | None:
    """Return the CPU quota of a control group in processors; None without a limit."""
    text = _read(folder / limit)
    if text is None:
        return None
    parts = text.split() if not period else [text, _read(folder / period) or ""]
    if len(parts) != 2 or not all(part.isdigit() for part in parts) or int(parts[1]) == 0:  # noqa: PLR2004
        return None
    return int(parts[0]) / int(parts[1])
