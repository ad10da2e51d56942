"""The distribution of requests to the workers of a cluster, by their cached prefixes."""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Literal

from kvpool._addresses import check_endpoint, parse_address
from kvpool._closing import Closing
from kvpool._limits import MAX_INT, MAX_S, MIN_S, check_ints, check_seconds
from kvpool.cluster import messages
from kvpool.cluster.channel import DEFAULTS, ChannelError, Listener, drain
from kvpool.cluster.members import Members
from kvpool.cluster.messages import Abort, Connect, Disconnect, Join, Refused, Report
from kvpool.cluster.requests import ClusterRequest, as_work
from kvpool.errors import ConfigError, KvPoolError
from kvpool.integrations.kv_events import EventSubscriber, PrefixIndex
from kvpool.serving.sampling import Sampling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvpool.cluster.channel import Channel, ChannelOptions
    from kvpool.cluster.members import Member, WorkerStatus
    from kvpool.cluster.messages import ToRouter, ToWorker
    from kvpool.typing import Namespace

_logger = logging.getLogger("kvpool")


class Router(Closing):
    """A router, which sends requests to the workers that have joined it.

    A prompt goes to the worker with the least load. The load is the number of tokens that the worker still
    has to compute: the tokens of the prompt that its cache lacks, and those of its other requests. After the
    prompt, a request goes to the decoding worker whose requests have the fewest tokens. If a worker is lost,
    its requests go to other workers with the tokens that they have: the answers are the same. Without workers
    for prompts, the decoding workers also compute prompts. Requests wait while there are no decoding workers.

    Use it from one thread. Threads of the router receive messages from workers.

    Args:
        secret: The shared secret: see `kvpool.cluster.read_secret`.
        address: Host and port to listen at; port 0 for any free one.
        allow_remote: Whether workers may be on other machines, which connect to this one and publish events
            that the router receives. Messages are not encrypted.
        model: Properties that workers must have in common; by default those of the first one.
        lost_after_s: Seconds without a report after which a worker counts as lost. Workers report between
            steps, so that no step may take that long.
        max_losses: The number of lost workers after which a request that they had fails: the request itself
            may have ended them.
        channels: Limits of the connections.

    Raises:
        ConfigError: If the address cannot be bound, or a number is out of its range.
    """

    def __init__(  # noqa: PLR0913
        self,
        secret: bytes,
        address: str = "127.0.0.1:0",
        *,
        allow_remote: bool = False,
        model: dict[str, str | int] | None = None,
        lost_after_s: float = 20.0,
        max_losses: int = 3,
        channels: ChannelOptions = DEFAULTS,
    ) -> None:
        check_seconds(MIN_S, MAX_S, lost_after_s=lost_after_s)
        check_ints(1, MAX_INT, max_losses=max_losses)
        self._max_losses = max_losses
        self._model = model
        self._lost_after_s = lost_after_s
        self._allow_remote = allow_remote
        self._index = PrefixIndex()
        self._subscriber = EventSubscriber(self._index, secret=secret)
        self._members = Members()
        self._waiting: deque[ClusterRequest] = deque()
        self._lent: deque[tuple[ClusterRequest, bytes | None]] = deque()
        self._undelivered: deque[tuple[ClusterRequest, int]] = deque()
        self._numbers = count(1)
        self._counts = dict.fromkeys(
            ("submitted", "finished", "failed", "aborted", "handed_over", "lost_workers", "repeated"), 0
        )
        self._received: queue.SimpleQueue[tuple[Channel, ToRouter | ChannelError]] = queue.SimpleQueue()
        try:
            where = parse_address("address", address, allow_remote=allow_remote)
            self._listener = Listener(where, secret, self._listen, channels)
        except BaseException:
            self._subscriber.close()
            raise

    @property
    def address(self) -> str:
        """Host and port to which workers connect."""
        host, port = self._listener.address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def submit(  # noqa: PLR0913 - the options of a request
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        stop_tokens: Iterable[int] = (),
        sampling: Sampling | None = None,
        on_token: Callable[[ClusterRequest, int], object] | None = None,
        namespace: Namespace = None,
    ) -> ClusterRequest:
        """Queue a request. Its arguments are those of `Engine.submit`.

        Returns:
            The request. It fails if no worker can serve it, such as for its length.

        Raises:
            ConfigError: If the prompt is empty or too long, no token is asked for, or more than 1,048,576, or
                the request cannot be sent to workers: a token is outside of [0, 2**31), there are more than
                4,096 stop tokens, a seed or a namespace is beyond 64 bits, or a namespace has more than 1,000
                characters or bytes.
        """
        tokens = [int(token) for token in prompt]
        if not 0 < len(tokens) <= messages.MAX_TOKENS or max_new_tokens < 1:
            raise ConfigError(
                f"{len(tokens)} prompt and {max_new_tokens} new tokens; at least one of each is needed, "
                f"and at most {messages.MAX_TOKENS} of a prompt"
            )
        request = ClusterRequest(
            tokens,
            max_new_tokens,
            frozenset(stop_tokens),
            sampling or Sampling(),
            namespace,
            on_token=on_token,
        )
        messages.check(as_work(0, request))
        self._counts["submitted"] += 1
        self._waiting.append(request)
        return request

    def step(self, timeout: float = 0.01) -> bool:
        """Receive the messages of workers, and send them requests.

        Args:
            timeout: Seconds to wait if no message arrives, at most a day.

        Returns:
            Whether requests are not over.

        Raises:
            ConfigError: If `timeout` is not in [0, 86400].
            Exception: Any exception of a callback. The next step calls the remaining callbacks.
        """
        check_seconds(0.0, MAX_S, timeout=timeout)
        self._deliver()
        self._subscriber.poll()
        self._assign()
        for channel, message in drain(self._received, timeout):
            self._handle(channel, message)
        for worker, age_s in self._members.silent(self._lost_after_s):
            self._lose(worker, f"it sent no message for {age_s:.1f} s")
        self._assign()
        self._deliver()
        return bool(self._waiting or self._lent or self._members.running)

    def run(self) -> None:
        """Step until every request is over."""
        while self.step():
            pass

    def abort(self, request: ClusterRequest) -> None:
        """Abort a request. A request that is over does not change."""
        if request.is_over:
            return
        worker = self._release(request)
        if worker is not None:
            self._send(worker, Abort(request.attempt))
        self._end_lease(request)
        self._end(request, "aborted")

    def workers(self) -> list[WorkerStatus]:
        """Return the states of the workers that have joined, by name, with the last 64 lost ones."""
        return self._members.status()

    def stats(self) -> dict[str, int]:
        """Return current and cumulative statistics.

        Requests: `submitted`, `waiting` for a worker, `running` on one, `finished`, `failed`, `aborted`,
        `handed_over` from one worker to the next, and `repeated` because a worker was lost. Workers:
        `workers` that are connected, and `lost_workers`. Callers that were `refused`.
        """
        return self._counts | {
            "waiting": len(self._waiting) + len(self._lent),
            "running": self._members.running,
            "workers": len(self._members.alive()),
            "refused": self._listener.refused,
        }

    def close(self) -> None:
        """Disconnect all workers. They wait for another router."""
        self._listener.close()
        self._subscriber.close()

    # Receiving

    def _listen(self, channel: Channel) -> None:
        """Receive the messages of a worker, in a thread of the channel."""
        try:
            while True:
                self._received.put((channel, messages.from_worker(channel.receive())))
        except ChannelError as error:
            self._received.put((channel, error))

    def _handle(self, channel: Channel, message: ToRouter | ChannelError) -> None:
        worker = self._members.at(channel)
        if isinstance(message, Join):
            if worker is None:
                self._admit(channel, message)
            else:
                self._lose(worker, "it joins twice")
        elif worker is None:
            channel.close()
        elif isinstance(message, ChannelError):
            self._lose(worker, str(message))
        else:
            worker.last_seen = time.monotonic()
            self._handle_report(worker, message)

    def _admit(self, channel: Channel, join: Join) -> None:
        model = self._model = self._model or join.model
        for name in {**model, **join.model}:
            if model.get(name) != join.model.get(name):
                reason = f"its {name} is {join.model.get(name)!r}, and that of others is {model.get(name)!r}"
                _logger.warning("%s is refused: %s", join.name, reason)
                with suppress(ChannelError):
                    channel.finish(messages.encode(Refused(reason[: messages.MAX_TEXT])))
                return
        before = self._members.named(join.name)
        if before is not None and before.is_alive:
            self._lose(before, "another of its name has joined")
        worker = self._members.add(join, channel)
        if join.events is not None:
            try:
                self._check_endpoints(join)
                self._subscriber.connect(join.name, join.events, join.replay)
            except KvPoolError as error:
                _logger.warning("the events of %s cannot be received: %s", join.name, error)
        for one in self._members.alive():
            for lender, reader in ((worker, one), (one, worker)):
                if (lender.join.role, reader.join.role) == ("prefill", "decode"):
                    self._send(reader, Connect(lender.name, lender.join.metadata))

    def _check_endpoints(self, join: Join) -> None:
        """Raise `ConfigError` unless the router may connect to the endpoints of a worker."""
        for name, endpoint in (("events", join.events), ("replay", join.replay)):
            if endpoint is None:
                continue
            if not endpoint.startswith("tcp://"):
                raise ConfigError(f"{name} is {endpoint!r}, which is not 'tcp://' and an address")
            check_endpoint(name, endpoint, allow_remote=self._allow_remote)

    def _handle_report(self, worker: Member, report: Report) -> None:
        if report.stats is not None:
            worker.stats = report.stats
            worker.reported = time.monotonic()
        for number, tokens in report.tokens:
            request = worker.attempts.get(number)
            if request is not None:
                self._extend(worker, request, tokens)
        for number, ticket in report.lent:
            request = worker.attempts.get(number)
            if request is not None and request.state == "prefill":
                self._release(request)
                request.lent, request.lender = number, worker.name
                self._lent.append((request, ticket))
        for number in report.unread:
            request = worker.attempts.get(number)
            if request is not None:
                self._end_lease(request)
        for number, reason in report.failed:
            request = worker.attempts.get(number)
            if request is not None:
                self._release(request)
                self._end_lease(request)
                request.error = reason
                self._end(request, "failed")

    def _extend(self, worker: Member, request: ClusterRequest, tokens: list[int]) -> None:
        if len(request.tokens) + len(tokens) > request.max_new_tokens:
            self._lose(worker, "it sends more tokens than were asked for")
            return
        request.tokens += tokens
        if request.is_complete:
            self._release(request)
            self._end(request, "finished")
        self._undelivered.extend((request, token) for token in tokens)

    def _deliver(self) -> None:
        while self._undelivered:
            request, token = self._undelivered.popleft()
            if request.on_token is not None and request.state != "aborted":
                request.on_token(request, token)

    # Assigning

    def _assign(self) -> None:
        """Send requests to workers, those that are handed over first, since their leases are limited."""
        prefill, decode = self._members.alive("prefill"), self._members.alive("decode")
        if not decode:
            return
        while self._lent:
            request, ticket = self._lent.popleft()
            worker, _ = self._best(decode, request)
            self._counts["handed_over"] += 1
            self._send_work(worker, request, request.seq_len, ticket=ticket)
        while self._waiting:
            request = self._waiting.popleft()
            worker, found = self._best(prefill or decode, request)
            load = request.seq_len - (found if prefill else 0)
            self._send_work(worker, request, load, is_handed_over=bool(prefill))

    def _best(self, workers: list[Member], request: ClusterRequest) -> tuple[Member, int]:
        """Return the worker with the least load including a request, and its cached tokens of it."""
        found = self._index.match(request.prompt + request.tokens, request.namespace)
        needed = len(request.prompt) + request.max_new_tokens - 1  # the last token has no slot
        # If no pool is large enough, a worker refuses the request, and its report has the reason.
        large = [one for one in workers if one.join.capacity >= needed]

        def cost(worker: Member) -> int:
            return worker.load - found.get(worker.name, 0)

        best = min(large or workers, key=cost)
        return best, found.get(best.name, 0)

    def _send_work(
        self,
        worker: Member,
        request: ClusterRequest,
        load: int,
        *,
        is_handed_over: bool = False,
        ticket: bytes | None = None,
    ) -> None:
        number = request.attempt = next(self._numbers)
        request.state = "prefill" if is_handed_over else "decode"
        request.workers.append(worker.name)
        request.load = load
        worker.attempts[number] = request
        work = as_work(number, request)
        work.is_handed_over = is_handed_over
        if ticket is not None:
            work.peer, work.ticket = request.lender, ticket
        self._send(worker, work)

    def _send(self, worker: Member, message: ToWorker) -> None:
        try:
            worker.channel.send(messages.encode(message))
        except ChannelError as error:
            # The router handles the loss when it receives this error, not now, in the middle of a change.
            self._received.put((worker.channel, error))

    # Ending

    def _release(self, request: ClusterRequest) -> Member | None:
        """Remove a request from its worker, and return this worker, or remove it from the queues."""
        worker = self._members.release(request)
        if worker is not None:
            return worker
        self._lent = deque(lent for lent in self._lent if lent[0] is not request)
        if request in self._waiting:
            self._waiting.remove(request)
        return None

    def _end_lease(self, request: ClusterRequest) -> None:
        """End the lease of a request's rows, if they are lent."""
        lender, request.lender = self._members.named(request.lender or ""), None
        if lender is not None and lender.is_alive:
            self._send(lender, Abort(request.lent))

    def _end(self, request: ClusterRequest, state: Literal["finished", "failed", "aborted"]) -> None:
        request.state = state
        self._counts[state] += 1

    def _lose(self, worker: Member, why: str) -> None:
        """Record that a worker is lost, and queue its requests again."""
        if not worker.is_alive:
            return
        self._members.lose(worker)
        if worker.join.events is not None:
            with suppress(KvPoolError):
                self._subscriber.disconnect(worker.name)
        self._counts["lost_workers"] += 1
        _logger.warning("%s is lost with %d requests: %s", worker.name, len(worker.attempts), why)
        # The rows that it has lent can no longer be read.
        self._lent = deque((one, None if one.lender == worker.name else ticket) for one, ticket in self._lent)
        if worker.join.role == "prefill":
            for one in self._members.alive("decode"):
                self._send(one, Disconnect(worker.name))
        for request in reversed([*worker.attempts.values()]):
            self._release(request)
            self._end_lease(request)
            request.losses += 1
            if request.losses >= self._max_losses:
                request.error = f"{request.losses} workers were lost with it: {', '.join(request.workers)}"
                self._end(request, "failed")
                continue
            self._counts["repeated"] += 1
            request.state = "waiting"
            self._waiting.appendleft(request)
