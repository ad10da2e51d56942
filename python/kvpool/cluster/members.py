"""The workers that have joined a router."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvpool.cluster.channel import Channel
    from kvpool.cluster.messages import Join, Role
    from kvpool.cluster.requests import ClusterRequest

MAX_LOST: Final = 64
"""The most lost workers that are still listed."""


class WorkerStatus(NamedTuple):
    """The state of a worker, as its router sees it.

    Attributes:
        name: The name of the worker.
        role: "prefill" or "decode".
        is_alive: Whether it is connected.
        requests: The number of requests that the worker has.
        age_s: Seconds since the worker last reported `stats`.
        stats: `Engine.stats()` in its last report, and `read_bytes`, the bytes of rows that it has read.
    """

    name: str
    role: Role
    is_alive: bool
    requests: int
    age_s: float
    stats: Mapping[str, int]


@dataclass(eq=False)
class Member:
    """A worker that has joined.

    Attributes:
        join: The message with which the worker has joined.
        channel: The connection to the worker.
        last_seen: The time of its last message.
        attempts: Its requests by attempt.
        stats: The statistics of its last report.
        reported: The time of that report; before the first report, the time at which the worker joined.
        is_alive: Whether it is connected.
    """

    join: Join
    channel: Channel
    last_seen: float
    attempts: dict[int, ClusterRequest] = field(default_factory=dict)
    stats: dict[str, int] = field(default_factory=dict)
    reported: float = field(default_factory=time.monotonic)
    is_alive: bool = True

    @property
    def name(self) -> str:
        """The name of the worker."""
        return self.join.name

    @property
    def load(self) -> int:
        """The tokens that the worker still has to compute."""
        return sum(request.load for request in self.attempts.values())


class Members:
    """The workers that have joined, by name and by channel: those that are connected, and some lost ones."""

    def __init__(self) -> None:
        self._by_name: dict[str, Member] = {}
        self._by_channel: dict[Channel, Member] = {}

    def named(self, name: str) -> Member | None:
        """Return the worker with this name, which may be lost; `None` if there is none."""
        return self._by_name.get(name)

    def at(self, channel: Channel) -> Member | None:
        """Return the connected worker at the other end of a channel; `None` if there is none."""
        return self._by_channel.get(channel)

    def alive(self, role: Role | None = None) -> list[Member]:
        """Return the connected workers of one role, or of both."""
        return [one for one in self._by_name.values() if one.is_alive and role in {None, one.join.role}]

    def add(self, join: Join, channel: Channel) -> Member:
        """Add a worker, in place of a lost one with its name.

        If too many lost workers are listed, drop the oldest.
        """
        lost = [name for name, one in self._by_name.items() if not one.is_alive and name != join.name]
        for name in lost[:-MAX_LOST]:
            del self._by_name[name]
        worker = Member(join, channel, time.monotonic())
        self._by_name[join.name] = self._by_channel[channel] = worker
        return worker

    def lose(self, worker: Member) -> None:
        """Disconnect a worker. The worker keeps its attempts, and stays listed."""
        worker.is_alive = False
        worker.channel.close()
        self._by_channel.pop(worker.channel, None)

    def silent(self, seconds: float) -> Iterator[tuple[Member, float]]:
        """Yield each connected worker that has sent nothing for more than `seconds`, with that time."""
        now = time.monotonic()
        for worker in self.alive():
            age_s = now - worker.last_seen
            if age_s > seconds:
                yield worker, age_s

    def release(self, request: ClusterRequest) -> Member | None:
        """Remove a request from the worker that has it, and return this worker."""
        for worker in self._by_name.values():
            if worker.attempts.pop(request.attempt, None) is not None:
                return worker
        return None

    @property
    def running(self) -> int:
        """The number of requests that workers have."""
        return sum(len(worker.attempts) for worker in self._by_name.values())

    def status(self) -> list[WorkerStatus]:
        """Return the states of all workers, by name."""
        now = time.monotonic()
        return [
            WorkerStatus(name, one.join.role, one.is_alive, len(one.attempts), now - one.reported, one.stats)
            for name, one in sorted(self._by_name.items())
        ]
