"""A worker of a cluster: a process that computes prompts, or generates the tokens that follow."""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING, Final

from kvpool._limits import MAX_S, MIN_S, check_seconds
from kvpool.cluster import messages
from kvpool.cluster.channel import DEFAULTS, ChannelError, connect, drain
from kvpool.cluster.handover import Incoming, Outgoing
from kvpool.cluster.messages import Abort, Connect, Disconnect, Join, Refused, Report, Work
from kvpool.errors import ConfigError, KvPoolError

if TYPE_CHECKING:
    from kvpool.cluster.channel import Channel, ChannelOptions
    from kvpool.cluster.messages import Role, ToWorker
    from kvpool.integrations.kv_events import EventPublisher
    from kvpool.remote import Endpoint, Peer
    from kvpool.serving import Engine, Request

_logger = logging.getLogger("kvpool")

REPORT_S: Final = 0.25
"""Seconds between two reports of a worker, by default."""

_IDLE_S: Final = 0.01
"""Seconds for which a worker without requests waits for messages of the router, between two answers to
peers."""


class Worker:
    """Serves the requests that a router sends, with an engine of its own.

    Use a worker from one thread. An error of the engine ends `serve`, and the router sends the requests to
    other workers.

    Args:
        engine: The engine.
        endpoint: The endpoint of the pools of its model.
        name: The name of the worker in the cluster: up to 200 characters without "/" and "#".
        role: "prefill" to compute prompts, "decode" to generate the tokens that follow. A "decode" worker
            computes prompts, too, while there is no "prefill" worker. Without a "decode" worker requests
            wait.
        model: Properties that must be equal in all processes for equal tokens, such as a revision.
        publisher: Publishes the events of the engine's prefix cache: the router learns from them which
            prefixes are cached here.
        lease_s: Seconds for which rows are lent to the next worker.
        report_s: Seconds between two reports of its statistics. A router that receives none for
            `lost_after_s` counts it as lost.
        retry_s: Seconds between two attempts to reach a router, when none is there or it has disconnected the
            worker.
        channels: Limits of the connection to a router.

    Raises:
        ConfigError: If the name or the model cannot be sent to a router, or a time is not in [0.001, 86400].
    """

    def __init__(  # noqa: PLR0913 - the parts of a worker
        self,
        engine: Engine,
        endpoint: Endpoint,
        *,
        name: str,
        role: Role,
        model: dict[str, str | int],
        publisher: EventPublisher | None = None,
        lease_s: float = 30.0,
        report_s: float = REPORT_S,
        retry_s: float = 0.2,
        channels: ChannelOptions = DEFAULTS,
    ) -> None:
        check_seconds(MIN_S, MAX_S, lease_s=lease_s, report_s=report_s, retry_s=retry_s)
        self._engine = engine
        self._endpoint = endpoint
        self._publisher = publisher
        self._lease_s, self._report_s, self._retry_s = lease_s, report_s, retry_s
        self._channels = channels
        self._join = Join(
            name,
            role,
            model,
            endpoint.metadata(),
            min(engine.model.allocator.stats()["capacity"], engine.model.table.max_context_len),
            None if publisher is None else publisher.endpoint,
            None if publisher is None else publisher.replay_endpoint,
        )
        messages.check(self._join)
        self._peers: dict[str, Peer] = {}
        self._requests: dict[int, Request] = {}
        self._report = Report()
        self._reported = 0.0

    def run(self, address: tuple[str, int], secret: bytes, stop: threading.Event) -> None:
        """Serve a router until `stop` is set. When the connection is lost, connect again.

        Args:
            address: Host and port of the router.
            secret: The shared secret.
            stop: Ends the call when it is set.

        Raises:
            ConfigError: If the router refuses this worker.
        """
        is_reported = False
        while not stop.is_set():
            try:
                channel = connect(address, secret, self._channels)
            except ChannelError as error:
                if not is_reported:
                    _logger.warning("%s waits for a router: %s", self._join.name, error)
                is_reported = True
                stop.wait(self._retry_s)
                continue
            is_reported = False
            try:
                self.serve(channel, stop)
            except ChannelError as error:
                _logger.warning("%s has lost its router: %s", self._join.name, error)
                stop.wait(self._retry_s)  # a router that disconnects this worker may do so at once again

    def serve(self, channel: Channel, stop: threading.Event) -> None:
        """Serve a router until the connection is lost, or `stop` is set.

        Raises:
            ChannelError: If the connection is lost.
            ConfigError: If the router refuses this worker.
        """
        received: queue.SimpleQueue[ToWorker | ChannelError] = queue.SimpleQueue()
        listener = threading.Thread(target=_listen, args=(channel, received), daemon=True)
        try:
            listener.start()
        except RuntimeError as error:
            channel.close()
            raise ChannelError(f"no thread can be started for a connection: {error}") from error
        try:
            _send(channel, self._join)
            is_busy = False
            while not stop.is_set():
                for message in drain(received, 0.0 if is_busy else _IDLE_S):
                    self._handle(message)
                is_busy = self._engine.step()
                self._endpoint.poll()
                if self._publisher is not None:
                    self._publisher.publish()
                self._send_report(channel)
        finally:
            channel.close()
            listener.join()
            self._reset()

    def _handle(self, message: ToWorker | ChannelError) -> None:
        if isinstance(message, ChannelError):
            raise message
        if isinstance(message, Refused):
            raise ConfigError(f"the router refuses {self._join.name}: {message.reason}")
        if isinstance(message, Work):
            try:
                self._requests[message.number] = self._submit(message)
            except KvPoolError as error:
                self._report.failed.append((message.number, str(error)[: messages.MAX_TEXT]))
        elif isinstance(message, Abort):
            request = self._requests.pop(message.number, None)
            if request is not None:
                self._engine.abort(request)
        elif isinstance(message, Disconnect):
            self._disconnect(message.name)
        else:
            self._connect(message)

    def _connect(self, message: Connect) -> None:
        try:
            self._peers[message.name] = self._endpoint.connect(message.metadata)
        except KvPoolError as error:
            self._disconnect(message.name)
            _logger.warning("%s cannot read from %s: %s", self._join.name, message.name, error)

    def _disconnect(self, name: str) -> None:
        """Disconnect the peer of this name, if there is one."""
        peer = self._peers.pop(name, None)
        if peer is None:
            return
        try:
            self._endpoint.disconnect(peer)
        except KvPoolError as error:
            _logger.warning("%s cannot disconnect %s: %s", self._join.name, name, error)

    def _submit(self, work: Work) -> Request:
        number = work.number

        def on_token(_request: Request, token: int) -> None:
            self._report.tokens.append((number, [token]))

        move: Outgoing | Incoming | None = None
        if work.is_handed_over:
            move = Outgoing(
                self._endpoint, self._lease_s, lambda ticket: self._report.lent.append((number, ticket))
            )
        elif work.ticket is not None:
            move = self._incoming(work.peer, work.ticket) if work.peer in self._peers else None
            if move is None:
                self._report.unread.append(number)
        return self._engine.submit(
            work.prompt,
            work.max_new_tokens,
            stop_tokens=work.stop_tokens,
            sampling=work.sampling(),
            on_token=on_token,
            owner=number,
            namespace=work.namespace if work.namespace_bytes is None else work.namespace_bytes,
            tokens=work.tokens,
            move=move,
        )

    def _incoming(self, peer: str, ticket: bytes) -> Incoming | None:
        try:
            return Incoming(self._endpoint, self._peers[peer], ticket)
        except (ConfigError, IndexError) as error:
            _logger.warning("%s cannot use a ticket of %s: %s", self._join.name, peer, error)
            return None

    def _send_report(self, channel: Channel) -> None:
        """Send the events since the last report, and each `report_s` the statistics of the engine."""
        report, now = self._report, time.monotonic()
        is_due = now - self._reported >= self._report_s
        if not (is_due or report.tokens or report.lent or report.failed or report.unread):
            return
        self._report = Report()
        if is_due:
            self._reported = now
            report.stats = self._engine.stats() | {"read_bytes": self._endpoint.stats()["bytes"]}
            self._requests = {number: one for number, one in self._requests.items() if not one.is_over}
        _send(channel, report)

    def _reset(self) -> None:
        """Abort all requests, which a router sends to other workers, and disconnect all peers.

        Without a router, the worker does not learn which peers are lost. The next router names those that are
        alive.
        """
        for request in self._requests.values():
            self._engine.abort(request)
        self._requests.clear()
        for name in [*self._peers]:
            self._disconnect(name)
        self._report = Report()


def _send(channel: Channel, message: Join | Report) -> None:
    """Send a message, unless the connection has ended.

    The listener then raises the error of the connection, after the messages that came before it: one of them
    may be `Refused`, which gives the reason.
    """
    try:
        channel.send(messages.encode(message))
    except ChannelError:
        if not channel.is_over:
            raise


def _listen(channel: Channel, received: queue.SimpleQueue[ToWorker | ChannelError]) -> None:
    try:
        while True:
            received.put(messages.from_router(channel.receive()))
    except ChannelError as error:
        received.put(error)
