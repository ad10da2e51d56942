"""The publisher of a prefix cache's events, in the format of vLLM."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from contextlib import ExitStack, suppress
from itertools import chain, count
from operator import methodcaller
from typing import TYPE_CHECKING, Final, TypedDict

import zmq

from kvpool._addresses import check_endpoint
from kvpool._closing import Closing
from kvpool._kvpool import ArenaPrefixCache
from kvpool._limits import MAX_INT, MAX_OPTION_BYTES, check_ints
from kvpool.errors import StateError
from kvpool.integrations.kv_events.guard import Guard, guard
from kvpool.integrations.kv_events.messages import BlockGroup, EventBatch, batches, encode, groups_of
from kvpool.integrations.kv_events.sockets import bind, connect, curve_options, open_socket

if TYPE_CHECKING:
    from kvpool._kvpool import PrefixCache

SEQUENCE_BYTES: Final = 8
END: Final = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
"""The sequence number that ends a replay."""

_MOST_ASKED_BYTES: Final = 4096  # of a request
_MOST_SUBSCRIBED_BYTES: Final = 1024  # of a subscription, and of a message of a handshake
_MOST_WAITING: Final = 16  # subscriptions of a connection, until `publish` reads them
_RECEIVED_BYTES: Final = 1 << 14  # that the system keeps of them
_REQUEST_PARTS: Final = 3

# A connection ends that does not complete its handshake, or whose other end is gone without a word.
_ENDS: Final = (
    (zmq.HANDSHAKE_IVL, 5000),
    (zmq.TCP_KEEPALIVE, 1),
    (zmq.TCP_KEEPALIVE_IDLE, 60),
    (zmq.TCP_KEEPALIVE_INTVL, 10),
    (zmq.TCP_KEEPALIVE_CNT, 6),
)

_numbers = count()
_take_events = methodcaller("events")


class PublisherStats(TypedDict):
    """Statistics of an `EventPublisher`."""

    batches: int
    events: int
    bytes: int
    stalls: int
    buffered: int
    buffered_bytes: int
    replays: int
    refused: int


class EventPublisher(Closing):
    """Publishes the events of a prefix cache to all subscribers: which pages it stores and removes.

    Of an `ArenaPrefixCache` these are the units of each group of its layout.

    Each batch is a message of three parts: the topic, its number as 8 bytes in big endian, counted from 0,
    and an `EventBatch` in MessagePack. Subscribers request missed batches at the replay endpoint, a ROUTER
    socket. A request is an empty part and a number. The answers are all kept batches from this number on, and
    then an end mark with the number -1, each behind an empty part.

    Batches contain the tokens of prompts, and ZeroMQ does not authenticate subscribers. So only processes of
    this machine can subscribe, unless `allow_remote` or `secret` is given.

    Calls are thread-safe. A publisher has sockets, and a thread that answers requests for replays and, on
    Linux and for "tcp://", ends connections of subscribers who send too much. They end with `close`, with the
    publisher, and with the program.

    Args:
        cache: A cache with `events=True`. Nothing else may read its events.
        endpoint: The address to publish at: "tcp://127.0.0.1:5557", "ipc://..." or "inproc://...". Port 0
            means any free port, which the property `endpoint` has. Each engine on a machine needs its own
            address.
        replay_endpoint: The address at which subscribers can request batches again. By default there is none.
        topic: The first part of each message.
        data_parallel_rank: The rank of this engine, which is a part of each batch.
        buffer_steps: The most batches that are kept for replays.
        buffer_bytes: The most bytes of these batches.
        hwm: The most batches queued for a slow subscriber; further ones are dropped for it.
        int_hashes: Whether keys of pages are sent as ints of 64 bits, for older routers that do not support
            bytes. Two pages may then have the same key.
        allow_remote: Whether an endpoint may have an address that other machines can reach.
        secret: A secret of at least 16 bytes that subscribers must know. With one, messages are encrypted
            (CurveZMQ), and endpoints may have any address. Only an `EventSubscriber` can read them.

    Raises:
        ConfigError: If the cache was made without `events=True`; if other machines can reach an endpoint and
            neither `allow_remote` nor `secret` is given; if an endpoint cannot be bound; if the secret has
            less than 16 bytes; if a number is negative, or `hwm` is 0.
        TypeError: If the secret is not `bytes`.
    """

    def __init__(  # noqa: PLR0913
        self,
        cache: PrefixCache | ArenaPrefixCache,
        *,
        endpoint: str = "tcp://127.0.0.1:5557",
        replay_endpoint: str | None = None,
        topic: str = "",
        data_parallel_rank: int = 0,
        buffer_steps: int = 10_000,
        buffer_bytes: int = 256 << 20,
        hwm: int = 100_000,
        int_hashes: bool = False,
        allow_remote: bool = False,
        secret: bytes | None = None,
    ) -> None:
        keys = curve_options(secret, is_server=True)
        allow_remote = allow_remote or secret is not None
        check_endpoint("endpoint", endpoint, allow_remote=allow_remote)
        if replay_endpoint is not None:
            check_endpoint("replay_endpoint", replay_endpoint, allow_remote=allow_remote)
        check_ints(0, MAX_INT, data_parallel_rank=data_parallel_rank, buffer_steps=buffer_steps)
        check_ints(0, MAX_OPTION_BYTES, buffer_bytes=buffer_bytes)
        check_ints(1, MAX_INT, hwm=hwm)
        self._cache = cache
        self._groups: list[BlockGroup] = []
        if isinstance(cache, ArenaPrefixCache):
            self._page_size = cache.arena.layout.page_size
            self._groups = groups_of(cache)
        else:
            self._page_size = cache.allocator.page_size
        self._topic = topic.encode()
        self._rank = data_parallel_rank
        self._int_hashes = int_hashes
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._closed = False
        self._next = self._events = self._bytes = self._stalls = 0
        self._buffer = _Buffer(buffer_steps, buffer_bytes)
        self._service: _Service | None = None
        with ExitStack() as opened:
            limits = [
                (zmq.SNDHWM, hwm),
                (zmq.XPUB_NODROP, 1),
                (zmq.MAXMSGSIZE, _MOST_SUBSCRIBED_BYTES),
                (zmq.RCVHWM, _MOST_WAITING),
                (zmq.RCVBUF, _RECEIVED_BYTES),
            ]
            self._pub = opened.enter_context(open_socket(zmq.PUB, [*limits, *_ENDS, *keys]))
            self._endpoint = bind(self._pub, "endpoint", endpoint)
            self._guard = guard(self._pub, self._endpoint)
            if self._guard is not None:
                opened.callback(self._guard.close)
            self._replay_endpoint = router = None
            if replay_endpoint is not None:
                # A peer has at most this much of a replay on its way, and of another before it.
                limits = [
                    (zmq.SNDHWM, 2 * (buffer_steps + 1)),
                    (zmq.ROUTER_MANDATORY, 1),
                    (zmq.MAXMSGSIZE, _MOST_ASKED_BYTES),
                ]
                router = opened.enter_context(open_socket(zmq.ROUTER, [*limits, *_ENDS, *keys]))
                self._replay_endpoint = bind(router, "replay_endpoint", replay_endpoint)
            if router is not None or self._guard is not None:
                self._service = _Service(router, self._guard, self._buffer, self._topic)
                opened.callback(self._service.close)
            # The events that are not sent yet; at first, the cached pages. Taken last, when nothing can fail.
            self._unsent = cache.events()
            self._end = weakref.finalize(self, _close, opened.pop_all(), self._process)

    @property
    def endpoint(self) -> str:
        """The address at which the publisher sends batches, with the port."""
        return self._endpoint

    @property
    def replay_endpoint(self) -> str | None:
        """The address at which subscribers request batches again, with the port; `None` without one."""
        return self._replay_endpoint

    def publish(self) -> int:
        """Send the events since the last call, if there are any.

        Call this method once in each step of the engine.

        The call does not wait for subscribers. Events beyond 65,536 tokens are sent as several batches. If an
        exception ends a call early, such as the `KeyboardInterrupt` of Ctrl-C, the next call sends its events
        again.

        Returns:
            The number of batches.

        Raises:
            StateError: If the publisher is closed, or belongs to the process that this one was forked from.
        """
        with self._lock:
            self._check_open()
            # No interrupt comes between the two calls: events are either in the cache or here.
            self._unsent.extend(chain.from_iterable(map(_take_events, [self._cache])))
            first = self._next
            for batch in batches(
                self._unsent, self._page_size, int_hashes=self._int_hashes, groups=self._groups
            ):
                self._send(encode(EventBatch(time.time(), batch, self._rank)))
                self._events += len(batch)
            self._unsent.clear()
            return self._next - first

    def _send(self, payload: bytes) -> None:
        number = self._next
        self._next += 1
        self._bytes += len(payload)
        self._buffer.append(number, payload)
        parts = (self._topic, number.to_bytes(SEQUENCE_BYTES, "big"), payload)
        try:
            self._pub.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:  # a queue is full: other subscribers still get the message
            self._stalls += 1
            self._pub.setsockopt(zmq.XPUB_NODROP, 0)
            try:
                self._pub.send_multipart(parts, zmq.NOBLOCK)
            finally:
                self._pub.setsockopt(zmq.XPUB_NODROP, 1)

    def stats(self) -> PublisherStats:
        """Return statistics.

        These are the number of `batches`, `events` and `bytes` that were sent; `stalls`, how often a
        subscriber with a full queue began to lose batches (ZeroMQ does not count the lost ones, but
        subscribers notice them); `buffered` batches and `buffered_bytes` that can be replayed; `replays`; and
        `refused`: requests, and connections that were ended because of what they have sent.
        """
        with self._lock:
            buffered, buffered_bytes = self._buffer.size()
            return {
                "batches": self._next,
                "events": self._events,
                "bytes": self._bytes,
                "stalls": self._stalls,
                "buffered": buffered,
                "buffered_bytes": buffered_bytes,
                "replays": self._service.served if self._service else 0,
                "refused": sum(each.refused for each in (self._service, self._guard) if each is not None),
            }

    @property
    def closed(self) -> bool:
        """Whether the publisher is closed."""
        return self._closed

    def close(self) -> None:
        """Close the sockets, and end the thread.

        Batches that were not sent yet are lost. Further calls do nothing.

        Raises:
            StateError: If the publisher belongs to the process that this one was forked from.
        """
        self._check_process()
        with self._lock:
            self._closed = True
            self._end()

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise StateError(
                f"the publisher belongs to process {self._process}, from which this one was forked"
            )

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise StateError("the publisher is closed")


class _Buffer:
    """The last batches, for replays."""

    def __init__(self, steps: int, size: int) -> None:
        self._steps = steps
        self._most = size
        self._batches: deque[tuple[int, bytes]] = deque()
        self._bytes = 0
        self._lock = threading.Lock()

    def append(self, number: int, payload: bytes) -> None:
        with self._lock:
            self._batches.append((number, payload))
            self._bytes += len(payload)
            while len(self._batches) > self._steps or self._bytes > self._most:
                self._bytes -= len(self._batches.popleft()[1])

    def since(self, number: int) -> list[tuple[int, bytes]]:
        with self._lock:
            return [batch for batch in self._batches if batch[0] >= number]

    def size(self) -> tuple[int, int]:
        with self._lock:
            return len(self._batches), self._bytes


class _Service:
    """The thread that answers requests for replays and watches subscribers, also while the engine is idle."""

    def __init__(
        self, router: zmq.Socket[bytes] | None, watch: Guard | None, buffer: _Buffer, topic: bytes
    ) -> None:
        self.served = 0
        self.refused = 0
        self._router = router
        self._guard = watch
        self._buffer = buffer
        self._topic = topic
        name = f"inproc://kvpool-replays-{next(_numbers)}"
        with ExitStack() as opened:
            end = opened.enter_context(open_socket(zmq.PAIR, ()))
            self._stop = opened.enter_context(open_socket(zmq.PAIR, ()))
            bind(end, "replay_endpoint", name)
            connect(self._stop, "replay_endpoint", name)
            self._thread = threading.Thread(target=self._run, args=(end,), name="kvpool-replays", daemon=True)
            self._thread.start()
            self._sockets = opened.pop_all()

    def close(self) -> None:
        """End the thread, and close the sockets except the router."""
        self._stop.send(b"")
        if threading.current_thread() is not self._thread:  # the thread may collect this object
            self._thread.join()
        self._sockets.close()

    def _run(self, end: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        for each in (self._router, None if self._guard is None else self._guard.monitor, end):
            if each is not None:
                poller.register(each, zmq.POLLIN)
        while not end.closed:
            if end in dict(poller.poll(None if self._guard is None else self._guard.wait_ms)):
                break
            if self._guard is not None:
                self._guard.step()
            if self._router is not None:
                with suppress(zmq.ZMQError):  # the peer is gone, or asks without reading
                    self._answer(self._router, self._router.recv_multipart(zmq.NOBLOCK))

    def _answer(self, router: zmq.Socket[bytes], request: list[bytes]) -> None:
        if len(request) != _REQUEST_PARTS or request[1] or len(request[2]) != SEQUENCE_BYTES:
            self.refused += 1
            return
        peer, empty, start = request
        for number, payload in self._buffer.since(int.from_bytes(start, "big")):
            parts = (peer, empty, self._topic, number.to_bytes(SEQUENCE_BYTES, "big"), payload)
            router.send_multipart(parts, zmq.NOBLOCK)
        self.served += 1
        router.send_multipart((peer, empty, b"", END, b""), zmq.NOBLOCK)


def _close(sockets: ExitStack, process: int) -> None:
    if os.getpid() == process:
        sockets.close()
