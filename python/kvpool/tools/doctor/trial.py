"""Tries the pools on a device, in a separate process: `python -m kvpool.tools.doctor.trial DEVICE`.

A device stays in use for the lifetime of a process, and a broken library may crash it. PyTorch is hidden, so
that the trial tests the pools only.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any, NamedTuple

from kvpool.tools.doctor.process import ProcessError, answer

_SECONDS = 120
_SLOTS = 64


class TrialError(Exception):
    """A pool returned a wrong result."""


class Outcome(NamedTuple):
    """The result of a trial."""

    works: bool
    text: str


def trial(device: str) -> str:
    """Allocate slots, write them to the table, read them back and move rows of K and V.

    Args:
        device: A device in PyTorch's notation.

    Returns:
        A description of the trial.

    Raises:
        TrialError: If a result is wrong.
        KvPoolError: If a pool cannot be created, or a call failed.
    """
    import kvpool  # noqa: PLC0415 - this file must load even if kvpool does not

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
        raise TrialError("a moved row holds different bytes")
    allocator.free(slots)
    allocator.verify()
    if allocator.available_size() != _SLOTS:
        raise TrialError(f"{allocator.available_size()} of {_SLOTS} slots are free after all were freed")
    return "allocated slots, wrote and read the table, moved rows, freed everything"


def run_trial(device: str) -> Outcome:
    """Try a device in a separate process."""
    try:
        works, text = answer(__name__, device, seconds=_SECONDS)
    except ProcessError as error:
        return Outcome(False, str(error))
    return Outcome(bool(works), str(text))


def _numbers(tensor: Any) -> list[int]:  # noqa: ANN401 - of kvpool, or of PyTorch
    host = tensor.cpu()
    return list((ctypes.c_int32 * len(host)).from_address(host.data_ptr()))


def _places(pool: Any, row: int) -> list[tuple[int, int]]:  # noqa: ANN401 - a `KVPool`
    """Return the address and bytes of a row in every buffer."""
    addresses, _, row_bytes = pool.get_contiguous_buf_infos()
    return [(address + row * size, size) for address, size in zip(addresses, row_bytes, strict=True)]


def _fill(pool: Any, row: int) -> None:  # noqa: ANN401 - a `KVPool`
    for number, (address, size) in enumerate(_places(pool, row), 1):
        ctypes.memset(address, number, size)


def _row(pool: Any, row: int) -> list[bytes]:  # noqa: ANN401 - a `KVPool`
    return [ctypes.string_at(address, size) for address, size in _places(pool, row)]


def main(device: str) -> None:
    """Try a device, and print as JSON whether it works, with a description."""
    try:
        outcome = Outcome(True, trial(device))
    except Exception as error:  # noqa: BLE001 - any error is the result
        outcome = Outcome(False, str(error) or type(error).__name__)
    sys.stdout.write(json.dumps(outcome))


if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]
    main(sys.argv[1])
