"""Tries the pools on a device: `python -m kvpool.tools.doctor.trial DEVICE`, in a process of its own.

A device that was tried stays in use for the life of a process, and a broken library may end it. Nothing but
kvpool is imported: PyTorch is hidden, so that this says something about the pools alone.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from typing import Any, NamedTuple

_SECONDS = 120
_SLOTS = 64


class TrialError(Exception):
    """The pools answered, but not what they must."""


class Outcome(NamedTuple):
    """How a trial ended."""

    works: bool
    text: str


def trial(device: str) -> str:
    """Takes slots, writes them to the table, reads them back and moves rows of K and V.

    Args:
        device: As PyTorch writes it.

    Returns:
        What was done.

    Raises:
        TrialError: An answer was wrong.
        KvPoolError: A pool could not be made, or a call failed.
    """
    import kvpool  # noqa: PLC0415 - where this is imported it may be broken

    pool, allocator = kvpool.make_full_attention_net_mem_pool(_SLOTS, 2, 1, 16, 1, 16, device, "uint8")
    table = kvpool.make_req_to_token_pool(2, _SLOTS, device)
    slots, rows = allocator.alloc(3), table.alloc(1)
    if slots is None or rows is None:
        raise TrialError("an empty pool has no slots")
    table.write((rows[0], slice(0, 3)), slots)
    found = _numbers(table.read(rows[0], 3))
    if found != [1, 2, 3]:
        raise TrialError(f"slots 1, 2, 3 were written to the table, and {found} read from it")
    if device == "cpu":
        _fill(pool, 1)
    pool.move_kv([2], [1])
    pool.check()
    if device == "cpu" and _row(pool, 2) != _row(pool, 1):
        raise TrialError("a row that was moved holds other bytes")
    allocator.free(slots)
    allocator.verify()
    if allocator.available_size() != _SLOTS:
        raise TrialError(f"{allocator.available_size()} of {_SLOTS} slots are free after all were given back")
    return "took slots, wrote and read the table, moved rows, gave all back"


def run_trial(device: str) -> Outcome:
    """Tries a device in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "kvpool.tools.doctor.trial", device]
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Outcome(False, f"it could not be tried: {error}")
    try:
        works, text = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        return Outcome(False, f"the trial ended with status {done.returncode}: {last}")
    return Outcome(bool(works), str(text))


def _numbers(tensor: Any) -> list[int]:  # noqa: ANN401 - of kvpool, or of PyTorch
    host = tensor.cpu()
    return list((ctypes.c_int32 * len(host)).from_address(host.data_ptr()))


def _places(pool: Any, row: int) -> list[tuple[int, int]]:  # noqa: ANN401 - a `KVPool`
    """Address and bytes of a row in every buffer."""
    addresses, _, row_bytes = pool.get_contiguous_buf_infos()
    return [(address + row * size, size) for address, size in zip(addresses, row_bytes, strict=True)]


def _fill(pool: Any, row: int) -> None:  # noqa: ANN401 - a `KVPool`
    for number, (address, size) in enumerate(_places(pool, row), 1):
        ctypes.memset(address, number, size)


def _row(pool: Any, row: int) -> list[bytes]:  # noqa: ANN401 - a `KVPool`
    return [ctypes.string_at(address, size) for address, size in _places(pool, row)]


def main(device: str) -> None:
    """Tries a device and prints whether it works, and what was done or is wrong, as JSON."""
    try:
        outcome = Outcome(True, trial(device))
    except Exception as error:  # noqa: BLE001 - whatever it is is the answer
        outcome = Outcome(False, str(error) or type(error).__name__)
    sys.stdout.write(json.dumps(outcome))


if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]
    main(sys.argv[1])
