"""Routers and workers: tokens, prefixes, workers that are lost, and those that say what no worker says."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import direct_network
import pytest
from cluster_checks import SAMPLES, check_payload
from hypothesis import given
from hypothesis import strategies as st
from pool_reader import VOCAB, PoolReader, alone, is_whole

from kvpool import ConfigError, PrefixCache
from kvpool.cluster import ChannelError, ClusterRequest, Router, Worker, members, messages, parse_address
from kvpool.cluster import channel as channels
from kvpool.cluster.messages import Join, Report
from kvpool.cluster.worker import REPORT_S
from kvpool.integrations.kv_events import EventPublisher
from kvpool.remote import Endpoint, TransferError
from kvpool.sampling import Sampling
from kvpool.serving import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvpool.cluster import Role
    from kvpool.cluster.channel import Channel
    from kvpool.remote import Peer

SECRET = b"an open secret for tests"
MODEL: dict[str, str | int] = {"model": "pool reader", "vocab_size": VOCAB}


RETRY_S = 0.2


class ClusterWorker:
    """A worker in a thread of its own."""

    def __init__(self, router: Router, name: str, role: Role, **sizes: Any) -> None:  # noqa: ANN401
        model, report_s = sizes.pop("model", MODEL), sizes.pop("report_s", REPORT_S)
        self.model = PoolReader(**{"size": 256, "page_size": 4} | sizes)
        cache = PrefixCache(self.model.allocator, events=True)
        self.engine = Engine(self.model, 32, prefix_cache=cache)
        self.endpoint = direct_network.endpoint(name, self.model.pool)
        where = "tcp://127.0.0.1:*"
        self.publisher = EventPublisher(cache, endpoint=where, replay_endpoint=where, secret=SECRET)
        self.worker = Worker(
            self.engine,
            self.endpoint,
            name=name,
            role=role,
            model=model,
            publisher=self.publisher,
            lease_s=2,
            report_s=report_s,
            retry_s=RETRY_S,
        )
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self._address = parse_address("router", router.address, allow_remote=False)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.worker.run(self._address, SECRET, self.stop)
        except (ConfigError, RuntimeError) as error:
            self.error = error

    def end(self) -> None:
        self.stop.set()
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.publisher.close()

    def check(self) -> None:
        """Nothing is left of any request."""
        self.end()
        deadline = time.monotonic() + 10
        while self.engine.step():
            assert time.monotonic() < deadline
        assert is_whole(self.engine)
        self.endpoint.close()


@contextmanager
def cluster(prefill: int, decode: int, **sizes: Any) -> Iterator[tuple[Router, dict[str, ClusterWorker]]]:  # noqa: ANN401
    members: dict[str, ClusterWorker] = {}
    with Router(SECRET, model=MODEL) as router:
        for role, many in (("prefill", prefill), ("decode", decode)):
            for number in range(many):
                name = f"{role}-{number}"
                members[name] = ClusterWorker(router, name, role, **sizes)  # type: ignore[arg-type]
        try:
            wait_until(router, lambda: router.stats()["workers"] == prefill + decode)
            yield router, members
        finally:
            for member in members.values():
                member.end()


def wait_until(router: Router, is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        router.step(0.002)


def is_idle(router: Router, since: float) -> bool:
    """Whether each worker has said since then that it has nothing to do: what it said before may be old."""
    elapsed = time.monotonic() - since
    workers = router.workers()
    return all(one.age_s < elapsed and one.stats["running"] + one.stats["moving"] == 0 for one in workers)


def expected(request: ClusterRequest) -> list[int]:
    return alone(request)  # type: ignore[arg-type]


def submit(router: Router, chance: Random, n: int, delivered: dict[Any, list[int]]) -> list[ClusterRequest]:
    """Requests, some of which begin alike."""
    common = [chance.randrange(VOCAB) for _ in range(40)]
    requests = []
    for number in range(n):
        prompt = common[: chance.choice([0, 20, 40])]
        prompt = prompt + [chance.randrange(VOCAB) for _ in range(chance.randint(1, 30))]
        sampling = Sampling(0.7, seed=number) if number % 2 else None
        request = router.submit(
            prompt,
            chance.randint(1, 25),
            stop_tokens=[3],
            sampling=sampling,
            namespace=chance.choice([None, "a", b"b", 3]),
            on_token=lambda request, token: delivered.setdefault(request, []).append(token),
        )
        requests.append(request)
    return requests


def test_answers_are_those_of_one_process() -> None:
    delivered: dict[Any, list[int]] = {}
    with cluster(2, 2) as (router, members):
        requests = submit(router, Random(1), 40, delivered)  # noqa: S311
        router.run()
        stats = router.stats()
        for request in requests:
            assert request.state == "finished"
            assert request.tokens == expected(request) == delivered[request]
        assert stats["finished"] == stats["submitted"] == 40
        assert stats["waiting"] == stats["running"] == stats["repeated"] == 0
        handed = [request for request in requests if len(request.workers) > 1]
        assert stats["handed_over"] == len(handed) > 20
        assert {request.workers[0] for request in requests} == {"prefill-0", "prefill-1"}
        assert {request.workers[1] for request in handed} == {"decode-0", "decode-1"}
        over = time.monotonic()
        wait_until(router, lambda: is_idle(router, over))
        read = {one.name: one.stats["read_bytes"] for one in router.workers()}
        assert read["decode-0"] + read["decode-1"] > 0
        for member in members.values():
            member.check()


def test_a_prompt_goes_to_where_its_prefix_is() -> None:
    with cluster(3, 1) as (router, _members):
        chance = Random(2)  # noqa: S311
        systems = [[chance.randrange(VOCAB) for _ in range(60)] for _ in range(6)]
        first = [router.submit(system, 2) for system in systems]
        router.run()
        homes = [request.workers[0] for request in first]
        assert {*homes} == {"prefill-0", "prefill-1", "prefill-2"}
        wait_until(router, lambda: all(max(router._index.match(system).values()) >= 56 for system in systems))
        for system, home in zip(systems, homes, strict=True):
            again = router.submit([*system, 1, 2, 3], 2)
            router.run()
            assert again.workers[0] == home
            assert again.tokens == expected(again)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_requests_of_a_worker_that_is_lost_go_to_others(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster(2, 2) as (router, members):
        lost = f"{role}-0"
        if role == "prefill":  # it computes no prompt to its end before it is lost
            stop, step = members[lost].stop, members[lost].engine.step
            monkeypatch.setattr(members[lost].engine, "step", lambda: not stop.is_set() or step())
        requests = [router.submit([number] * 30, 40) for number in range(12)]
        wait_until(router, lambda: any(one.workers[-1:] == [lost] and one.state == role for one in requests))
        members[lost].stop.set()
        router.run()
        for request in requests:
            assert request.state == "finished"
            assert request.tokens == expected(request)
        stats = router.stats()
        assert stats["lost_workers"] == 1
        assert stats["repeated"] == sum(request.losses for request in requests) > 0
        [gone] = [one for one in router.workers() if not one.is_alive]
        assert (gone.name, gone.requests) == (lost, 0)
        members[lost].check()


def test_without_workers_for_prompts_the_others_compute_them() -> None:
    with cluster(0, 1) as (router, members):
        request = router.submit([1, 2, 3], 5)
        router.run()
        assert request.workers == ["decode-0"]
        assert request.tokens == expected(request)
        assert router.stats()["handed_over"] == 0
        members["decode-0"].check()


def test_requests_wait_for_workers() -> None:
    with Router(SECRET) as router:
        request = router.submit([1, 2, 3], 5)
        early = ClusterWorker(router, "prefill-0", "prefill")
        wait_until(router, lambda: router.stats()["workers"] == 1)
        for _ in range(5):
            assert router.step()
        assert request.state == "waiting"
        late = ClusterWorker(router, "decode-0", "decode")
        router.run()
        assert request.tokens == expected(request)
        assert request.workers == ["prefill-0", "decode-0"]
        early.check()
        late.check()


def test_a_worker_waits_for_a_router_and_for_the_next_one() -> None:
    first = Router(SECRET, model=MODEL)
    member = ClusterWorker(first, "decode-0", "decode")
    request = first.submit([5] * 20, 60)
    wait_until(first, lambda: bool(request.tokens))
    first.close()
    with Router(SECRET, first.address, model=MODEL) as second:
        wait_until(second, lambda: second.stats()["workers"] == 1)
        again = second.submit([5] * 20, 60)
        second.run()
        assert again.tokens == expected(again)
    member.check()


def test_a_worker_without_a_router_lets_go_of_its_peers() -> None:
    """They may die meanwhile, and none but a router says so."""
    with cluster(1, 1) as (first, members):
        reader = members["decode-0"].endpoint
        first.submit([5] * 20, 3)
        first.run()
        assert reader.stats()["peers"] == len(reader._core.reads._reached) == 1
        first.close()
        deadline = time.monotonic() + 20
        while reader.stats()["peers"]:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        assert not reader._core.reads._reached
        with Router(SECRET, first.address, model=MODEL) as second:
            wait_until(second, lambda: second.stats()["workers"] == 2)
            again = second.submit([6] * 20, 30)
            second.run()
            assert again.workers == ["prefill-0", "decode-0"]
            assert again.tokens == expected(again)
            assert reader.stats()["peers"] == 1


def test_a_worker_that_cannot_let_go_of_a_peer_lets_go_of_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Endpoint, peer: Peer) -> None:
        disconnect(self, peer)
        if peer.name == "prefill-0":
            raise TransferError("of the network")

    disconnect = Endpoint.disconnect
    with cluster(2, 1) as (router, members):
        monkeypatch.setattr(Endpoint, "disconnect", fail)
        reader = members["decode-0"].endpoint
        wait_until(router, lambda: reader.stats()["peers"] == 2)
        members["decode-0"].end()
        assert reader.stats()["peers"] == 0
        assert members["decode-0"].error is None
    assert "decode-0 cannot disconnect prefill-0: of the network" in caplog.text


def test_a_worker_of_the_same_name_takes_the_place_of_the_first() -> None:
    with cluster(0, 1) as (router, members):
        request = router.submit([1] * 9, 60)
        wait_until(router, lambda: bool(request.tokens))
        other = ClusterWorker(router, "decode-0", "decode")
        members["decode-0"].stop.set()  # otherwise it would take its place back
        router.run()
        assert request.tokens == expected(request)
        other.check()


def test_a_worker_with_another_model_is_refused() -> None:
    with cluster(0, 1) as (router, _members):
        other = ClusterWorker(router, "decode-1", "decode", model={**MODEL, "seed": 7})
        wait_until(router, lambda: other.error is not None)
        assert isinstance(other.error, ConfigError)
        assert "refuses decode-1: its seed is 7, and that of others is None" in str(other.error)
        assert router.stats()["workers"] == 1
        other.check()


def test_a_worker_whose_name_routers_do_not_take_is_refused() -> None:
    """The router would leave it, and it would come back, for ever."""
    with Router(SECRET) as router, pytest.raises(ConfigError, match=r"this cannot be sent: .* at `\$\.name`"):
        ClusterWorker(router, "a#b", "decode")


@pytest.mark.parametrize("seconds", [0, 0.0009, 100_000, math.inf, math.nan])
@pytest.mark.parametrize("name", ["lease_s", "report_s", "retry_s"])
def test_a_worker_whose_times_are_outside_of_their_range_is_refused(name: str, seconds: float) -> None:
    model = PoolReader(64)
    with direct_network.endpoint("a", model.pool) as endpoint:
        times: dict[str, Any] = {name: seconds}
        with pytest.raises(ConfigError, match=rf"{name} is {seconds}; it must be in \[0.001, 86400\]"):
            Worker(Engine(model, 32), endpoint, name="a", role="decode", model=MODEL, **times)


def test_a_worker_reports_as_often_as_it_was_told() -> None:
    with cluster(0, 1) as (router, members):
        members["rare"] = ClusterWorker(router, "rare", "decode", report_s=60.0)
        wait_until(router, lambda: router.stats()["workers"] == 2)
        wait_until(router, lambda: all(one.stats for one in router.workers()))
        ends = time.monotonic() + 1.0
        while time.monotonic() < ends:
            router.step()
        ages = {one.name: one.age_s for one in router.workers()}
        assert ages["rare"] > 0.9 > ages["decode-0"]


def test_workers_of_one_name_do_not_wear_out_the_router(caplog: pytest.LogCaptureFixture) -> None:
    """Each takes the place of the other, a few times a second."""
    with cluster(0, 1) as (router, members):
        members["other"] = ClusterWorker(router, "decode-0", "decode")
        wait_until(router, lambda: router.stats()["lost_workers"] > 0)
        before, begun = router.stats()["lost_workers"], time.monotonic()
        while time.monotonic() < begun + 0.5:
            router.step(0.002)
        # Each of the two comes back at most once in this time, and may do so at its begin.
        turns = (time.monotonic() - begun) / RETRY_S + 1
        assert router.stats()["lost_workers"] - before <= 2 * turns
    assert "another of its name has joined" in caplog.text


def test_a_request_that_is_refused_after_its_prompt_gives_the_slots_back() -> None:
    with Router(SECRET, model=MODEL) as router:
        lender = ClusterWorker(router, "prefill-0", "prefill")
        reader = ClusterWorker(router, "decode-0", "decode", size=64)
        try:
            wait_until(router, lambda: router.stats()["workers"] == 2)
            request = router.submit([1] * 40, 60)
            wait_until(router, lambda: request.state == "failed")
            assert "need 99 slots" in str(request.error)
            assert router.stats()["handed_over"] == 1
            wait_until(router, lambda: lender.endpoint.stats()["leases"] == 0)
            assert lender.endpoint.stats()["expired"] == 0
            with pytest.raises(ConfigError, match="timeout is -1"):
                router.step(-1)
        finally:
            lender.check()
            reader.check()


def test_rows_that_the_next_worker_cannot_read_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "_incoming", lambda *_: None)
    with cluster(1, 1) as (router, members):
        request = router.submit([1] * 40, 10)
        router.run()
        assert request.tokens == expected(request)
        lender = members["prefill-0"].endpoint
        wait_until(router, lambda: lender.stats()["leases"] == 0)
        assert (router.stats()["handed_over"], lender.stats()["expired"]) == (1, 0)
    for member in members.values():
        member.check()


def test_a_request_that_nobody_can_serve_fails() -> None:
    with cluster(1, 1) as (router, _members):
        request = router.submit([1] * 100, 100)
        unknown = router.submit([VOCAB], 2)
        router.run()
        assert request.state == unknown.state == "failed"
        assert "need 199 slots" in str(request.error)
        assert "token 50" in str(unknown.error)
        assert router.stats()["failed"] == 2
        with pytest.raises(ConfigError, match="0 prompt and 3 new tokens"):
            router.submit([], 3)
        with pytest.raises(ConfigError, match="1 prompt and 0 new tokens"):
            router.submit([1], 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": [-1]}, "`int` >= 0"),
        ({"prompt": [1 << 31]}, "`int` <= 2147483647"),
        ({"max_new_tokens": (1 << 20) + 1}, "`int` <= 1048576"),
        ({"max_new_tokens": 2.5}, "got `float`"),
        ({"stop_tokens": [-1]}, "`int` >= 0"),
        ({"stop_tokens": range(4097)}, "length <= 4096"),
        ({"sampling": Sampling(0.5, seed=1 << 64)}, "can't serialize ints"),
        ({"namespace": 1 << 64}, "can't serialize ints"),
        ({"namespace": "x" * 1001}, "length <= 1000"),
        ({"namespace": bytes(1001)}, "length <= 1000"),
        ({"namespace": "\udcff"}, "surrogates not allowed"),
        ({"namespace": 1.5}, "got `float`"),
        ({"namespace": object()}, "Encoding objects of type object"),
    ],
)
def test_what_workers_cannot_be_told_is_refused(options: dict[str, Any], message: str) -> None:
    """Such a request would stay first in the queue forever, or end one connection after the other."""
    request: dict[str, Any] = {"prompt": [1], "max_new_tokens": 3} | options
    with Router(SECRET) as router:
        with pytest.raises(ConfigError, match=f"this cannot be sent: .*{message}"):
            router.submit(**request)
        assert not router.step(0.0)
        assert router.stats()["submitted"] == 0


def test_what_is_too_large_altogether_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_BYTES", 100)
    with Router(SECRET) as router, pytest.raises(ConfigError, match=r"its \d+ bytes are more than 100"):
        router.submit([1] * 100, 3)


def test_seeds_and_namespaces_may_be_negative() -> None:
    with cluster(1, 1) as (router, _members):
        request = router.submit([1, 2, 3], 5, sampling=Sampling(0.7, seed=-1), namespace=-(1 << 63))
        router.run()
        assert request.tokens == expected(request)
        assert request.losses == 0


def test_a_request_goes_to_a_worker_that_is_large_enough() -> None:
    with cluster(1, 1, size=32) as (router, members):
        members |= {f"{role}-1": ClusterWorker(router, f"{role}-1", role) for role in ("prefill", "decode")}
        wait_until(router, lambda: router.stats()["workers"] == 4)
        # They have nothing in common: where one has been served would draw the others.
        lengths = enumerate((24, 23, 300), 1)
        large, fits, too_large = (router.submit([token] * length, 10) for token, length in lengths)
        router.run()
        assert large.workers == ["prefill-1", "decode-1"]
        assert large.tokens == expected(large)
        assert fits.workers == ["prefill-0", "decode-0"]
        assert "need 309 slots" in str(too_large.error)


@pytest.mark.parametrize("at", [0, 1, 3, 10])
def test_requests_are_aborted_wherever_they_are(at: int) -> None:
    with cluster(1, 1) as (router, members):
        requests = [router.submit([number] * 30, 60) for number in range(4)]
        for _ in range(at):
            router.step()
        for request in requests[:3]:
            router.abort(request)
            router.abort(request)
        router.run()
        assert [request.state for request in requests] == ["aborted"] * 3 + ["finished"]
        assert requests[3].tokens == expected(requests[3])
        assert router.stats()["aborted"] == 3
        for member in members.values():
            member.check()


def test_a_callback_that_raises_loses_nothing() -> None:
    delivered: list[int] = []

    def fail(_request: ClusterRequest, token: int) -> None:
        delivered.append(token)
        if len(delivered) == 2:
            raise ValueError("of the callback")

    with cluster(0, 1) as (router, _members):
        first, second = (router.submit([number], 5, on_token=fail) for number in (1, 2))
        with pytest.raises(ValueError, match="of the callback"):
            router.run()
        router.run()
        assert first.tokens == expected(first)
        assert second.tokens == expected(second)
        assert len(delivered) == 10


def test_a_worker_whose_model_fails_is_left() -> None:
    with cluster(1, 2) as (router, members):
        requests = [router.submit([number] * 20, 30) for number in range(6)]
        wait_until(router, lambda: any(one.workers[-1:] == ["decode-0"] for one in requests))
        members["decode-0"].model.fails_in = 2
        router.run()
        for request in requests:
            assert request.tokens == expected(request)
        assert isinstance(members["decode-0"].error, RuntimeError)


@pytest.mark.parametrize("seed", range(3))
def test_random_histories(seed: int) -> None:
    """Workers come and go; requests come and are aborted; what ends well is right."""
    chance = Random(seed)  # noqa: S311 - no secrets
    delivered: dict[Any, list[int]] = {}
    requests: list[ClusterRequest] = []
    gone: list[ClusterWorker] = []
    with cluster(2, 2, size=160, max_reqs=4) as (router, members):
        for step in range(60):
            what = chance.random()
            if what < 0.4:
                requests += submit(router, chance, 2, delivered)
            elif what < 0.5 and requests:
                router.abort(chance.choice(requests))
            elif what < 0.6:
                name = chance.choice([*members])
                member = members.pop(name)
                member.stop.set()
                gone.append(member)
                role: Role = "prefill" if name.startswith("prefill") else "decode"
                members[f"{role}-{step}"] = ClusterWorker(
                    router, f"{role}-{step}", role, size=160, max_reqs=4
                )
            for _ in range(chance.randint(1, 6)):
                router.step(0.001)
        router.run()
        for request in requests:
            assert request.is_over
            if request.state == "finished":
                assert request.tokens == expected(request) == delivered[request]
            elif request.state == "failed":
                assert request.losses == 3
        assert sum(request.state == "finished" for request in requests) > len(requests) / 2
        for member in [*gone, *members.values()]:
            member.check()


# Callers that are not workers


@contextmanager
def authenticated_channel(router: Router) -> Iterator[Channel]:
    """A connection that knows the secret, and may send anything."""
    channel = channels.connect(parse_address("a", router.address, allow_remote=False), SECRET)
    with suppress(ChannelError):
        yield channel
    channel.close()


def joined(name: str = "false", role: Role = "decode") -> bytes:
    return messages.encode(Join(name, role, MODEL, b"no metadata", 64))


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x80",
        b"\x91" * 5000,
        messages.encode(Report(tokens=[(1, [1])])),  # before it has joined
        messages.encode(Join("", "decode", MODEL, b"", 1)),
        messages.encode(Join("a/b", "decode", MODEL, b"", 1)),
        messages.encode(messages.Abort(1)),  # what routers say
        messages.encode(Report(tokens=[(1, [])] * (messages.MAX_LISTED + 1))),
        messages.encode(Report(lent=[(1, None)] * (messages.MAX_LISTED + 1))),
        messages.encode(Report(failed=[(1, "")] * (messages.MAX_LISTED + 1))),
        messages.encode(Report(unread=[1] * (messages.MAX_LISTED + 1))),
    ],
)
def test_who_says_what_no_worker_says_is_left(message: bytes) -> None:
    with ThreadPoolExecutor(1) as threads, Router(SECRET) as router, authenticated_channel(router) as channel:
        channel.send(message)
        answer = threads.submit(channel.receive)
        wait_until(router, answer.done)
        with pytest.raises(ChannelError, match="ended"):
            answer.result()
        assert router.stats()["workers"] == 0


def test_reports_that_make_no_sense_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with Router(SECRET, model=MODEL) as router, authenticated_channel(router) as channel:
        channel.send(joined())
        wait_until(router, lambda: router.stats()["workers"] == 1)
        request = router.submit([1, 2, 3], 4)
        wait_until(router, lambda: request.state == "decode")
        for report in (
            Report(tokens=[(99, [1])], lent=[(99, b"x")], failed=[(99, "no")]),
            Report(lent=[(request.attempt, b"x")]),  # it was not to be handed over
            Report(tokens=[(request.attempt, [7])]),
        ):
            channel.send(messages.encode(report))
        wait_until(router, lambda: request.tokens == [7])
        assert request.state == "decode"
        channel.send(messages.encode(Report(tokens=[(request.attempt, [7, 7, 7, 7])])))
        wait_until(router, lambda: router.stats()["workers"] == 0)
        assert (request.tokens, request.state) == ([7], "waiting")
        assert "it sends more tokens than were asked for" in caplog.text


@pytest.mark.parametrize("where", ["inproc://kvpool-replays-0", "ipc:///tmp/any", "tcp://192.0.2.1:1"])
@pytest.mark.parametrize("what", ["events", "replay"])
def test_a_worker_cannot_name_endpoints_elsewhere(
    what: str, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The router asks nobody beyond this machine, and no socket within its own process."""
    here = {"events": "tcp://127.0.0.1:1", "replay": "tcp://127.0.0.1:1"}
    with Router(SECRET) as router, authenticated_channel(router) as channel:
        channel.send(messages.encode(Join("false", "decode", MODEL, b"", 64, **(here | {what: where}))))
        wait_until(router, lambda: router.stats()["workers"] == 1)
        assert router._subscriber.stats()["workers"] == 0
        assert f"the events of false cannot be received: {what} is '{where}'" in caplog.text


def test_who_joins_twice_is_left() -> None:
    with Router(SECRET) as router, authenticated_channel(router) as channel:
        channel.send(joined())
        channel.send(joined())
        wait_until(router, lambda: router.stats()["lost_workers"] == 1)


def test_who_says_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with Router(SECRET) as router:
        request = router.submit([1, 2, 3], 4)
        for number, name in enumerate(("false", "false-2", "false-3"), 1):
            with authenticated_channel(router) as channel, monkeypatch.context() as patch:
                channel.send(joined(name))
                wait_until(router, lambda: request.state == "decode")
                # Not before: a busy machine takes longer for that.
                patch.setattr(router, "_lost_after_s", 0.1)
                wait_until(router, lambda: request.losses == number)  # noqa: B023 - called at once
            assert router.stats()["lost_workers"] == number
            assert (request.state == "waiting") is not request.is_over
        assert request.error is not None
        assert "3 workers were lost with it: false, false-2, false-3" in request.error
        assert request.is_over
        assert not router.step(0.0)


def test_workers_that_are_lost_are_not_listed_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "MAX_LOST", 2)
    with Router(SECRET) as router:
        for number in range(6):
            with authenticated_channel(router) as channel:
                channel.send(joined(f"false-{number}"))
                wait_until(router, lambda: router.stats()["workers"] == 1)
            wait_until(router, lambda: router.stats()["workers"] == 0)
        assert [one.name for one in router.workers()] == ["false-3", "false-4", "false-5"]


def test_a_prefill_worker_with_false_rows_costs_time_only() -> None:
    """Neither its metadata nor its ticket is valid: the other worker computes the prompt."""
    with cluster(0, 1) as (router, members), authenticated_channel(router) as channel:
        channel.send(joined("false", "prefill"))
        wait_until(router, lambda: router.stats()["workers"] == 2)
        request = router.submit([1, 2, 3], 6)
        wait_until(router, lambda: request.state == "prefill")
        first = expected(request)[0]
        channel.send(messages.encode(Report([(request.attempt, [first])], [(request.attempt, b"ticket")])))
        router.run()
        assert request.tokens == expected(request)
        members["decode-0"].check()


def test_a_router_refuses_what_it_cannot_be() -> None:
    with pytest.raises(ConfigError, match="not a loopback address"):
        Router(SECRET, "0.0.0.0:0")
    with pytest.raises(ConfigError, match=r"lost_after_s is 0; it must be in \[0.001, 86400\]"):
        Router(SECRET, lost_after_s=0)
    with pytest.raises(ConfigError, match="lost_after_s is inf"):
        Router(SECRET, lost_after_s=math.inf)
    with pytest.raises(ConfigError, match="max_losses is 0; it must be in"):
        Router(SECRET, max_losses=0)
    with Router(SECRET) as router, pytest.raises(ConfigError, match="timeout is inf"):
        router.step(math.inf)
    with Router(SECRET) as router, pytest.raises(ConfigError, match="cannot listen"):
        Router(SECRET, router.address)


# Messages

FUZZ = Path(__file__).parent.parent / "fuzz"
KEPT = sorted(FUZZ.glob("corpus/cluster_messages/*")) + sorted(FUZZ.glob("findings/cluster_messages/*"))


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_seeds_and_findings_are_messages_or_errors(path: Path) -> None:
    check_payload(path.read_bytes())


def test_every_message_is_read_as_it_was_sent() -> None:
    for message in SAMPLES:
        payload = messages.encode(message)
        assert check_payload(payload) == 1
        for end in range(len(payload)):
            assert check_payload(payload[:end]) == 0


@given(
    sample=st.sampled_from(SAMPLES),
    changes=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 3), st.binary(max_size=4)), max_size=4),
)
def test_changed_messages_are_messages_or_errors(sample: Any, changes: list[tuple[int, int, bytes]]) -> None:  # noqa: ANN401
    payload = messages.encode(sample)
    for at, gone, new in changes:
        start = at % (len(payload) + 1)
        payload = payload[:start] + new + payload[start + gone :]
    check_payload(payload)
