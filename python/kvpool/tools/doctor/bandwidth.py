"""`kvpool doctor --bandwidth`: what moving K and V costs on this machine."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpool.errors import ConfigError
from kvpool.tools.bandwidths import Bandwidth
from kvpool.tools.doctor import driver
from kvpool.tools.doctor.measure import PAGE_BYTES, Job
from kvpool.tools.doctor.process import ProcessError, answer

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE, SECONDS = 64 << 20, 1.0
LEAST_SIZE, MOST_SIZE = PAGE_BYTES, 1 << 30
MOST_SECONDS = 60.0
_PATIENCE_S = 120.0
"""Seconds for whatever a process does beside measuring, and for repetitions that take too long."""


def measure_machine(
    size: int = SIZE,
    seconds: float = SECONDS,
    directory: Path | None = None,
    on_kind: Callable[[str], None] = lambda _: None,
) -> list[Bandwidth]:
    """Measure every way of bytes that this machine has, each kind in a process of its own.

    Args:
        size: Bytes of one repetition, rounded down to whole pages of the file store.
        seconds: Time for each line.
        directory: A folder on the disk to measure; None for that of temporary files.
        on_kind: Called with the name of what is measured next.

    Raises:
        ConfigError: If the size or the time is out of range, or the directory does not exist.
    """
    if not LEAST_SIZE <= size <= MOST_SIZE:
        raise ConfigError(f"--size is {size:,} bytes; it must be between {LEAST_SIZE:,} and {MOST_SIZE:,}")
    if not 0 < seconds <= MOST_SECONDS:
        raise ConfigError(f"--seconds is {seconds:g}; it must be more than 0, and at most {MOST_SECONDS:g}")
    if directory is not None and not directory.is_dir():
        raise ConfigError(f"--directory: {directory} is not a folder")
    size = size // LEAST_SIZE * LEAST_SIZE
    _, devices = driver.examine(Path("/"))
    jobs = [
        Job("host", size, seconds),
        *(Job("cuda", size, seconds, device=number, devices=devices) for number in range(devices)),
        Job("directory", size, seconds, directory=str(directory or "")),
        Job("nixl", size, seconds),
    ]
    lines: list[Bandwidth] = []
    for job in jobs:
        on_kind(job.name)
        lines += _lines(job)
        if job.kind == "host" and not devices:
            lines.append(Bandwidth("cuda", "", problem="no GPU: kvpool doctor says more"))
    return lines


def _lines(job: Job) -> list[Bandwidth]:
    if job.kind == "nixl" and importlib.util.find_spec("nixl") is None:
        return [Bandwidth(job.name, "", problem="nixl is not installed: pip install 'kvpool[nixl]'")]
    patience = _PATIENCE_S + 10 * job.seconds
    try:
        found = answer("kvpool.tools.doctor.measure", json.dumps(asdict(job)), seconds=patience)
    except ProcessError as error:
        return [Bandwidth(job.name, "", problem=str(error))]
    return [Bandwidth(**line) for line in found]


def print_bandwidths(lines: list[Bandwidth], console: Any) -> None:  # noqa: ANN401 - `rich` may be missing
    """Print a row for each line."""
    from rich.table import Table  # noqa: PLC0415 - the rest of the doctor does without it
    from rich.text import Text  # noqa: PLC0415

    from kvpool.tools.units import bandwidth_text  # noqa: PLC0415

    table = Table(title="Bandwidths", title_justify="left")
    table.add_column("way", no_wrap=True)
    table.add_column("median", justify="right")
    table.add_column("what was measured")
    for line in lines:
        if line.bytes_per_s is None:
            table.add_row(line.name, "-", Text(line.problem))
        else:
            what = f"{line.text}, {line.repetitions} times"
            table.add_row(line.name, bandwidth_text(line.bytes_per_s), Text(what))
    console.print(table)
