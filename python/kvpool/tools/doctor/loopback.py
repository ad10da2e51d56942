"""Two processes on this machine that read each other's slots over NIXL."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

LAYERS, HEADS, DIM = 16, 8, 64
TOKEN_BYTES = 2 * LAYERS * HEADS * DIM * 2
"""K and V of a token in all layers, in bfloat16: pieces of 1 KiB where slots are scattered."""
PAGE = 16
_LEASE_S, _PATIENCE_S = 600.0, 60.0


def slots_of(tokens: int, page: int, seed: int) -> list[int]:
    """Return the slots of `tokens` tokens, in pages that are chosen at random from twice as many."""
    pages = list(range(1, 2 * tokens // page))
    random.Random(seed).shuffle(pages)  # noqa: S311 - no secrets
    return [slot for first in pages[: tokens // page] for slot in range(first * page, (first + 1) * page)]


def reads(size: int) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """Yield the name of a way to read slots of another process, how it is done, and a function that does.

    Args:
        size: Bytes of one call, a multiple of `PAGE * TOKEN_BYTES`.

    Raises:
        ConfigError: If NIXL cannot be imported.
        EOFError: If the other process ended.
    """
    from kvpool.integrations.nixl import Endpoint  # noqa: PLC0415 - only processes for it import it

    tokens = size // TOKEN_BYTES
    run = list(range(PAGE, PAGE + tokens))
    kinds = {
        "contiguous": ("in one run of slots", run, run),
        "pages": (f"in pages of {PAGE} slots", slots_of(tokens, PAGE, 1), slots_of(tokens, PAGE, 2)),
        "scattered": ("in scattered slots", slots_of(tokens, 1, 1), slots_of(tokens, 1, 2)),
    }
    network = os.environ.get("UCX_TLS")
    way = f"UCX_TLS={network}" if network else "as NIXL chooses"
    context = multiprocessing.get_context("spawn")
    with Endpoint("kvpool-doctor-reader", _pool(tokens)) as endpoint:
        questions, answers = context.Pipe()
        other = context.Process(target=lend, args=(answers, tokens), daemon=True)
        other.start()
        answers.close()
        try:
            peer = endpoint.connect(_receive(questions))
            for name, (text, there, here) in kinds.items():
                questions.send(there)
                ticket = _receive(questions)

                def read(ticket: bytes = ticket, here: list[int] = here) -> None:
                    peer.read(peer.slots(ticket), here, keep=True).wait(_PATIENCE_S)

                yield name, f"{text} of another process, {way}", read
        finally:
            other.kill()
            other.join()


def lend(questions: Connection, tokens: int) -> None:
    """Lend the slots that are asked for, in the other process, until it is ended."""
    sys.modules["torch"] = None  # type: ignore[assignment]
    from kvpool.integrations.nixl import Endpoint  # noqa: PLC0415 - as above

    with Endpoint("kvpool-doctor-lender", _pool(tokens)) as endpoint, suppress(EOFError):
        questions.send(endpoint.metadata())
        while True:
            if questions.poll(0.0002):
                questions.send(endpoint.lend(questions.recv(), lease_s=_LEASE_S).ticket)
            endpoint.poll()


def _receive(questions: Connection) -> bytes:
    """Return the next message of the other process."""
    if not questions.poll(_PATIENCE_S):
        raise TimeoutError(f"the other process has not answered for {_PATIENCE_S:.0f} s")
    try:
        found: bytes = questions.recv()
    except EOFError:
        raise EOFError("the other process ended") from None
    return found


def _pool(tokens: int) -> Any:  # noqa: ANN401 - a `KVPool`
    """Return the K and V with room for twice the tokens, every byte written once."""
    import kvpool  # noqa: PLC0415 - as above

    kv = kvpool.KVPool(2 * tokens + PAGE, LAYERS, HEADS, DIM, "cpu", "bfloat16", page_size=PAGE)
    addresses, sizes, _ = kv.get_contiguous_buf_infos()
    for address, size in zip(addresses, sizes, strict=True):
        ctypes.memset(address, 1, size)
    return kv
