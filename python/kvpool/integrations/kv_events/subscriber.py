"""The subscriber that keeps an index of several workers up to date."""

from __future__ import annotations

import time
import weakref
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, TypedDict

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvpool._addresses import check_endpoint
from kvpool._closing import Closing
from kvpool._limits import MAX_OPTION_BYTES, MAX_S, MIN_S, check_ints, check_seconds
from kvpool.errors import ArgumentError, StateError
from kvpool.integrations.kv_events.feed import Feed
from kvpool.integrations.kv_events.messages import MAX_BYTES
from kvpool.integrations.kv_events.publisher import END, SEQUENCE_BYTES
from kvpool.integrations.kv_events.sockets import connect, curve_options, open_socket

if TYPE_CHECKING:
    from kvpool.integrations.kv_events.index import PrefixIndex

_AT_ONCE: Final = 1000  # messages of one worker that are read before those of another
_RECONNECT_MS: Final = 100
_RECONNECT_MOST_MS: Final = 5000
_MESSAGE_PARTS: Final = 3
_REPLAY_PARTS: Final = (3, 4)  # vLLM once left the topic out


class SubscriberStats(TypedDict):
    """Statistics of an `EventSubscriber`."""

    workers: int
    connected: int
    batches: int
    refused: int
    replays: int
    restarts: int
    drops: int


class EventSubscriber(Closing):
    """Keeps a `PrefixIndex` up to date with the events of workers, each with an `EventPublisher`.

    The subscriber closes gaps with replays, notices restarted workers, and reconnects to lost ones. If a gap
    cannot be closed, it drops the pages of the worker, so that the index has no page that the worker lacks.

    Use a subscriber from one thread. Other threads may read the index.

    Args:
        index: The index. Nothing else may change it.
        topic: The beginning of the first part of messages. Other messages are ignored.
        replay_timeout_s: Seconds without an answer after which a replay is given up. The entries of the
            worker are then dropped.
        check_s: Seconds without a message after which the subscriber asks a worker whether it has sent one.
        max_bytes: The largest batch. The subscriber ignores a worker that has sent a larger one.
        secret: The secret of the publishers, if they have one.

    Raises:
        ConfigError: If a time is not in [0.001, 86400], `max_bytes` is below 1, or the secret has less than
            16 bytes.
        TypeError: If the secret is not `bytes`.
    """

    def __init__(  # noqa: PLR0913
        self,
        index: PrefixIndex,
        *,
        topic: str = "",
        replay_timeout_s: float = 5.0,
        check_s: float = 10.0,
        max_bytes: int = MAX_BYTES,
        secret: bytes | None = None,
    ) -> None:
        check_seconds(MIN_S, MAX_S, replay_timeout_s=replay_timeout_s, check_s=check_s)
        check_ints(1, MAX_OPTION_BYTES, max_bytes=max_bytes)
        self._index = index
        self._topic = topic.encode()
        self._times_s = replay_timeout_s, check_s
        self._max_bytes = max_bytes
        self._keys = curve_options(secret, is_server=False)
        self._workers: dict[str, _Worker] = {}
        self._closed = False
        weakref.finalize(self, _close, self._workers)

    def connect(self, worker: str, endpoint: str, replay_endpoint: str | None = None) -> None:
        """Subscribe to a worker, which need not run yet. Its entries in the index are cleared.

        Args:
            worker: The name of the worker in the index.
            endpoint: The address at which the worker publishes.
            replay_endpoint: The address at which the worker answers requests for replays.

        Raises:
            ConfigError: If an endpoint is not valid.
            StateError: If the worker is connected already, or the subscriber is closed.
        """
        self._check_open()
        if worker in self._workers:
            raise StateError(f"the worker {worker!r} is connected already")
        check_endpoint("endpoint", endpoint, allow_remote=True)
        if replay_endpoint is not None:
            check_endpoint("replay_endpoint", replay_endpoint, allow_remote=True)
        sockets = _Sockets(endpoint, replay_endpoint, self._topic, self._max_bytes, self._keys)
        feed = Feed(self._index, worker, can_replay=replay_endpoint is not None, max_bytes=self._max_bytes)
        self._workers[worker] = _Worker(feed, sockets, *self._times_s)

    def disconnect(self, worker: str) -> None:
        """Disconnect a worker, and remove it from the index.

        Raises:
            ArgumentError: If the worker is not connected.
        """
        if worker not in self._workers:
            raise ArgumentError(f"the worker {worker!r} is not connected")
        self._workers.pop(worker).sockets.close()
        self._index.remove(worker)

    def poll(self, timeout: float = 0.0) -> int:
        """Apply the received messages. If there are none, wait for some.

        Args:
            timeout: The most seconds to wait, at most a day.

        Returns:
            The number of applied batches: 0 after a time-out.

        Raises:
            ConfigError: If `timeout` is not in [0, 86400].
            StateError: If the subscriber is closed.
        """
        self._check_open()
        check_seconds(0.0, MAX_S, timeout=timeout)
        ends = time.monotonic() + timeout
        while True:
            applied = sum(worker.step() for worker in self._workers.values())
            left = ends - time.monotonic()
            if applied or left <= 0:
                return applied
            self._wait(left)

    def _wait(self, timeout: float) -> None:
        poller = zmq.Poller()
        for worker in self._workers.values():
            for socket in worker.awaited():
                poller.register(socket, zmq.POLLIN)
            timeout = min(timeout, worker.left_s())
        poller.poll(max(0, int(timeout * 1000)) + 1)

    def is_connected(self, worker: str) -> bool:
        """Return whether a worker was connected at the last `poll`.

        For "inproc://" this is unknown, and `False`.

        Raises:
            ArgumentError: If there is no such worker.
        """
        if worker not in self._workers:
            raise ArgumentError(f"the worker {worker!r} is not connected")
        return self._workers[worker].is_connected

    def stats(self) -> SubscriberStats:
        """Return statistics of the current workers.

        These are the number of `workers`, and of the `connected` ones; of applied `batches`, and of those
        `refused` for their content; of `replays`; of `restarts` of workers; and of `drops`: how often the
        entries of a worker were dropped because missing batches were not available.
        """
        workers = self._workers.values()
        return {
            "workers": len(workers),
            "connected": sum(worker.is_connected for worker in workers),
            "batches": sum(worker.feed.applied for worker in workers),
            "refused": sum(worker.feed.refused for worker in workers),
            "replays": sum(worker.replays for worker in workers),
            "restarts": sum(worker.feed.restarts for worker in workers),
            "drops": sum(worker.feed.drops for worker in workers),
        }

    @property
    def closed(self) -> bool:
        """Whether the subscriber is closed."""
        return self._closed

    def close(self) -> None:
        """Close the sockets. The index does not change. Further calls do nothing."""
        self._closed = True
        _close(self._workers)

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("the subscriber is closed")


def _close(workers: dict[str, _Worker]) -> None:
    while workers:
        workers.popitem()[1].sockets.close()


class _Sockets:
    """The sockets of a worker, for its messages, the events of their connection, and its replays."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        topic: bytes,
        max_bytes: int,
        keys: list[tuple[int, int | bytes]],
    ) -> None:
        self._replay_endpoint = replay_endpoint
        self._options: list[tuple[int, int | bytes]] = [
            *keys,
            (zmq.MAXMSGSIZE, max_bytes),
            (zmq.RECONNECT_IVL, _RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, _RECONNECT_MOST_MS),
        ]
        self._replay: zmq.Socket[bytes] | None = None
        self._replays = ExitStack()
        self._opened = ExitStack()
        with ExitStack() as opened:
            socket = opened.enter_context(open_socket(zmq.SUB, [*self._options, (zmq.SUBSCRIBE, topic)]))
            self.monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            opened.callback(self.monitor.close)
            opened.callback(socket.disable_monitor)
            connect(socket, "endpoint", endpoint)
            self.messages = socket
            if replay_endpoint is not None:
                self.replay()
            self._opened = opened.pop_all()

    def replay(self) -> zmq.Socket[bytes]:
        """Return the socket for replays."""
        if self._replay is None:
            assert self._replay_endpoint is not None  # noqa: S101 - for the type checker
            self._replay = self._replays.enter_context(open_socket(zmq.DEALER, self._options))
            connect(self._replay, "replay_endpoint", self._replay_endpoint)
        return self._replay

    def drop_replay(self) -> None:
        """Close the socket for replays. Batches of a replay that have not arrived are dropped."""
        self._replays.close()
        self._replay = None

    def close(self) -> None:
        self.drop_replay()
        self._opened.close()


class _Worker:
    """A worker, with its sockets and the state of its batches."""

    def __init__(self, feed: Feed, sockets: _Sockets, timeout_s: float, check_s: float) -> None:
        self.feed = feed
        self.sockets = sockets
        self.is_connected = False
        self.replays = 0
        self._timeout_s = timeout_s
        self._check_s = check_s
        self._heard = time.monotonic()
        self._ends: float | None = None  # the time limit of the current replay

    def awaited(self) -> list[zmq.Socket[bytes]]:
        """Return the sockets from which messages are read now."""
        now = self.sockets.messages if self._ends is None else self.sockets.replay()
        return [self.sockets.monitor, now]

    def left_s(self) -> float:
        """Return the seconds until the next time limit, which needs an action without a message."""
        ends = self._heard + self._check_s if self._ends is None else self._ends
        return ends - time.monotonic()

    def step(self) -> int:
        """Apply the received messages, and return the number of applied batches."""
        before = self.feed.applied
        self._watch()
        if self._ends is None and self.left_s() <= 0:
            self._heard = time.monotonic()
            self.feed.check()
        for _ in range(_AT_ONCE):
            if self._ends is None and self.feed.needs_replay:
                self._ask()
            if not (self._take_message() if self._ends is None else self._take_replay()):
                break
        return self.feed.applied - before

    def _watch(self) -> None:
        """Record the events of the connection."""
        while self.sockets.monitor.poll(0):
            event = recv_monitor_message(self.sockets.monitor)["event"]
            self.is_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if self.is_connected:
                self.feed.reconnected()
                # A request on the way to a worker that has ended would not be answered.
                self.sockets.drop_replay()
                self._ends = None

    def _ask(self) -> None:
        self.replays += 1
        start = self.feed.begin_replay().to_bytes(SEQUENCE_BYTES, "big")
        self._ends = time.monotonic() + self._timeout_s
        try:
            self.sockets.replay().send_multipart((b"", start), zmq.NOBLOCK)
        except zmq.Again:
            self._ends = time.monotonic()

    def _take_message(self) -> bool:
        try:
            parts = self.sockets.messages.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._watch()  # changes of the connection come before its messages
        if self.feed.needs_replay:  # the replay has this message, too
            return True
        if len(parts) != _MESSAGE_PARTS or len(parts[1]) != SEQUENCE_BYTES:
            self.feed.refused += 1
        else:
            self._heard = time.monotonic()
            self.feed.message(int.from_bytes(parts[1], "big"), parts[2])
        return True

    def _take_replay(self) -> bool:
        try:
            parts = self.sockets.replay().recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            if self.left_s() > 0:
                return False
            self._end_replay(is_whole=False)
            return True
        if len(parts) not in _REPLAY_PARTS or len(parts[-2]) != SEQUENCE_BYTES:
            self.feed.refused += 1
        elif parts[-2] == END:
            self._end_replay(is_whole=True)
        else:
            self._ends = time.monotonic() + self._timeout_s
            self.feed.replayed(int.from_bytes(parts[-2], "big"), parts[-1])
        return True

    def _end_replay(self, *, is_whole: bool) -> None:
        self._ends = None
        self._heard = time.monotonic()
        if not is_whole:
            self.sockets.drop_replay()
        self.feed.replay_ended(is_whole=is_whole)
