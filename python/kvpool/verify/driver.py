"""Drivers, which have bytes moved by what is to be verified, and the proof that all of them arrive."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvpool.errors import ArgumentError
from kvpool.verify.pattern import Pattern
from kvpool.verify.requests import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Self

    from kvpool._kvpool import CacheLayout
    from kvpool.verify.finding import Finding
    from kvpool.verify.pattern import Array
    from kvpool.verify.requests import Request

STEPS = 9
"""Steps of a proof, for a progress bar."""


class LeftOutError(Exception):
    """What a driver drives is not here, or does not take the layout; the text is the reason."""


class Driver(ABC):
    """What moves bytes, as a proof drives it: requests are written, moved, read, and dropped.

    A subclass for a connector of your own has `write` and `read`, and `move` for what the connector does in
    between. Bytes are uint8 arrays `[pages, entries, entry_bytes]`; of a state `[1, 1, entry_bytes]`.

    Args:
        layout: The layout whose bytes are moved.

    Attributes:
        layout: The same.
        notes: What the result says beside it, such as groups that are left out.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self.notes: list[str] = []

    @abstractmethod
    def write(self, request: Request, data: Mapping[Array, NDArray[np.uint8]]) -> None:
        """Keep the bytes of a request as an engine would write them.

        Args:
            request: The request, with its tokens, and the numbers of its pages in each group.
            data: The bytes of each array, computed when they are asked for.
        """

    def move(self) -> None:  # noqa: B027 - pools move nothing
        """Move everything that was written: to where `read` finds it, or there and back."""

    @abstractmethod
    def read(self, request: Request) -> Iterable[tuple[Array, NDArray[np.uint8]]]:
        """Return the bytes of a request, each array once, as `write` got them.

        Pages that are missing at the end are a finding.
        """

    def drop(self, request: Request) -> None:  # noqa: B027 - caches evict by themselves
        """Give up a request: others may have its places."""

    def close(self) -> None:  # noqa: B027 - most have nothing
        """Give everything back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Proof:
    """The result of a proof.

    Attributes:
        finding: The first wrong byte; None if there is none.
        requests: Requests whose bytes were moved.
        tokens: Tokens of all of them.
        checked_bytes: Bytes that were compared.
        seconds: Time that it took.
        notes: Notes of the driver.
    """

    finding: Finding | None
    requests: int
    tokens: int
    checked_bytes: int
    seconds: float
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "finding": None if self.finding is None else self.finding.as_json(),
            "requests": self.requests,
            "tokens": self.tokens,
            "checked_bytes": self.checked_bytes,
            "seconds": self.seconds,
            "notes": list(self.notes),
        }


class _Data(Mapping["Array", "NDArray[np.uint8]"]):
    """The bytes of a request's arrays, computed when they are asked for."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def __getitem__(self, array: Array) -> NDArray[np.uint8]:
        if array not in self._request.arrays:
            raise KeyError(array)
        return self._request.data(array)

    def __iter__(self) -> Iterator[Array]:
        return iter(self._request.arrays)

    def __len__(self) -> int:
        return len(self._request.arrays)


def prove(
    driver: Driver,
    *,
    tokens: int | None = None,
    seed: int = 0,
    on_step: Callable[[], None] = lambda: None,
) -> Proof:
    """Write requests through a driver, move them, read them back, and compare every byte.

    Four requests are written, moved and read; two of them share a prefix. Two are dropped, others take their
    places, and all that live are moved and read twice, the second time in reverse.

    Args:
        driver: The driver; it is not closed.
        tokens: Tokens of all requests together, as in `Workload`.
        seed: Seed of the token ids.
        on_step: Called after each of `STEPS` steps.

    Returns:
        The proof, or the first finding; nothing is moved after it.

    Raises:
        ArgumentError: If the driver returns an array twice, one that the layout does not have, or of another
            shape.
    """
    began = time.monotonic()
    load = Workload(Pattern(driver.layout), tokens, seed)
    progress = _Progress(driver)

    def result() -> Proof:
        seconds, live = time.monotonic() - began, progress.requests
        total = sum(len(request.tokens) for request in live)
        return Proof(progress.finding, len(live), total, progress.checked_bytes, seconds, tuple(driver.notes))

    rounds = [
        (load.first, [], load.first),
        (load.second, load.dropped, load.live),
        ([], [], load.live[::-1]),
    ]
    for written, dropped, read in rounds:
        for step in (
            lambda written=written, dropped=dropped: progress.write(written, dropped),
            driver.move,
            lambda read=read: progress.read(read),
        ):
            step()
            on_step()
            if progress.finding is not None:
                return result()
    return result()


class _Progress:
    """What a proof has done so far."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.requests: list[Request] = []
        self._live: list[Request] = []
        self.checked_bytes = 0
        self.finding: Finding | None = None

    def write(self, requests: Iterable[Request], dropped: Iterable[Request]) -> None:
        for request in dropped:
            self._driver.drop(request)
            self._live.remove(request)
        for request in requests:
            self._driver.write(request, _Data(request))
            self.requests.append(request)
            self._live.append(request)

    def read(self, requests: Iterable[Request]) -> None:
        for request in requests:
            finding = self._read(request)
            if finding is not None:
                holds = finding.holds
                was_dropped = holds is not None and not any(live.has(holds) for live in self._live)
                self.finding = replace(finding, was_dropped=was_dropped)
                return

    def _read(self, request: Request) -> Finding | None:
        left = dict.fromkeys(request.arrays)
        for array, found in self._driver.read(request):
            if array not in left:
                again = "again" if array in request.arrays else "which the layout does not have"
                raise ArgumentError(f"read returns {array}, {again}")
            del left[array]
            finding = request.check(array, found)
            if finding is not None:
                return finding
            self.checked_bytes += found.nbytes
        for array in left:
            finding = request.check(array, request.data(array)[:0])
            if finding is not None:
                return finding
        return None
