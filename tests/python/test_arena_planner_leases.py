"""ArenaPlanner over an ArenaPrefixCache: requests begin with leases and publish, by what memory holds."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

import devices
import pytest
import torch
from arena_engine import LAYOUTS, PAGE, Engine, K, len_of
from common import some

from kvpool import (
    ArenaLease,
    ArgumentError,
    CacheArena,
    CacheLayout,
    Group,
    IndexOwnershipError,
    StaleError,
    StateError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("device")


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("seed", range(4))
def test_memory_holds_what_its_tokens_left_there(name: str, seed: int) -> None:
    choose = random.Random(seed)  # noqa: S311 - of a test
    engine = Engine(LAYOUTS[name], choose.choice([6_000, 12_000, 60_000]))
    heads = [[choose.randrange(3) for _ in range(24)] for _ in range(3)]
    hits = 0
    for _ in range(150):
        live = sorted(engine.tokens)
        match choose.choice(["begin", "begin", "grow", "grow", "publish", "publish", "finish"]):
            case "begin":
                head = choose.choice(heads)[: choose.randint(1, 24)]
                tail = [choose.randrange(3) for _ in range(choose.randint(1, 6))]
                begun = engine.begin(head + tail, choose.choice([3, 4, 8, 30]))
                hits += begun[1] if begun else 0
            case "grow":
                rows = [row for row in live if len(engine.tokens[row]) < 50 and choose.random() < 0.6]
                engine.grow(
                    rows, [[choose.randrange(3) for _ in range(choose.choice([1, 1, 4]))] for _ in rows]
                )
            case "publish" if live:
                row = choose.choice(live)
                length = engine.publish(row)
                assert length == len(engine.tokens[row]) // PAGE * PAGE
                engine.check(row, len(engine.tokens[row]))
            case "finish" if live:
                engine.finish(choose.choice(live))
            case _:
                pass
        engine.verify()
    assert hits > 0
    for row in [*engine.tokens]:
        engine.check(row, len(engine.tokens[row]))
        engine.finish(row)
    engine.cache.clear()
    stats = engine.arena.stats()
    assert stats["available"] == stats["capacity"]


def test_a_state_goes_on_from_its_snapshot() -> None:
    engine = Engine(LAYOUTS["hybrid"], 1 << 16)
    row, found = some(engine.begin([1, 2, 3, 4, 5, 6, 7, 8, 9], 8))
    assert found == 0
    assert engine.publish(row) == 8
    other, found = some(engine.begin([1, 2, 3, 4, 5, 6, 7, 8, 0, 0], 30))
    assert found == 8
    assert engine.planner.units(row, "full") == {
        at: unit for at, unit in engine.planner.units(other, "full").items() if at < 2
    }
    assert engine.planner.units(row, "state") != engine.planner.units(other, "state")


def test_without_a_snapshot_a_hybrid_prefix_is_not_found() -> None:
    engine = Engine(LAYOUTS["hybrid"], 1 << 16)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    row, _ = some(engine.begin(tokens, 30))
    assert engine.planner.publish(row, tokens[:8]) == 8
    other, found = some(engine.begin(tokens, 30))
    assert found == 0
    with pytest.raises(ArgumentError, match="a snapshot is of all of them, not of 8"):
        engine.planner.publish(row, tokens[:8], snapshot=True)
    # The first has published the same tokens: the other goes on with its units.
    assert engine.planner.publish(other, tokens[:8]) == 8
    assert [*engine.planner.units(other, "full").values()][:2] == [
        *engine.planner.units(row, "full").values()
    ][:2]
    engine.check(other, 9)
    engine.verify()


def test_the_block_table_shows_units_that_a_publication_replaced() -> None:
    engine = Engine(LAYOUTS["windows"], 1 << 16)
    tokens = [5, 6, 7, 8, 9]
    one, other = (some(engine.begin(tokens, 30))[0] for _ in range(2))
    for row in (one, other):
        assert engine.publish(row) == 4
    plan = some(engine.planner.decode([one, other], [6, 6]))
    table, indices = some(plan.group("full").block_table), some(plan.group("full").kv_indices)
    assert table[0, 0] == table[1, 0] == indices[0] == indices[2]
    assert table[0, 1] != table[1, 1]


def test_a_lease_is_for_one_request_and_ends_with_it() -> None:
    engine = Engine(LAYOUTS["windows"], 1 << 16)
    planner, cache = engine.planner, engine.cache
    one, other = some(planner.alloc(2))
    lease = cache.match([1, 2, 3, 4, 5])
    assert planner.extend([one], [0], [5], prefixes=[lease]) is not None
    # Its own lease again changes nothing.
    assert planner.extend([one], [5], [6], prefixes=[lease]) is not None
    with pytest.raises(StateError, match="another request's"):
        planner.extend([other], [0], [5], prefixes=[lease])
    with pytest.raises(StateError, match="publishes through its planner"):
        lease.publish([1, 2, 3, 4], {})
    lease.release()
    assert planner.publish(one, [1, 2, 3, 4]) == 4
    assert lease.length == 4
    assert cache.stats()["locked"] == 4
    planner.finish([one])
    assert cache.stats()["locked"] == 0
    with pytest.raises(StaleError, match="it was released"):
        len_of(lease)


@pytest.mark.parametrize("lacks", ["window", "state"])
def test_a_lease_that_lacks_what_the_next_token_sees_is_refused(lacks: str) -> None:
    engine = Engine(LAYOUTS["hybrid"], 1 << 16)
    taken = some(engine.arena.alloc({"full": 2, "window": 2}))
    lease = engine.cache.match([])
    units: dict[str, list[int | None]] = {name: [*numbers] for name, numbers in taken.items()}
    if lacks == "window":
        # The first page has the sinks.
        engine.arena.free("window", [taken["window"][1]])
        units["window"][1] = None
    lease.publish([*range(8)], units)
    message = {"window": "lacks units of group window", "state": "has no snapshot of group state"}[lacks]
    [row] = some(engine.planner.alloc())
    with pytest.raises(ArgumentError, match=message):
        engine.planner.extend([row], [8], [9], prefixes=[lease])
    lease.release()
    assert engine.planner.extend([row], [0], [9]) is not None
    engine.verify()


def test_a_short_step_keeps_the_state_and_the_lease_of_a_request() -> None:
    engine = Engine(LAYOUTS["hybrid"], 1 << 13)
    [row] = some(engine.planner.alloc())
    first, other = engine.cache.match([]), engine.cache.match([])
    assert engine.planner.extend([row], [0], [0], prefixes=[first]) is not None
    state = engine.planner.units(row, "state")
    taken = []
    while (more := engine.arena.alloc({"full": 1})) is not None:
        taken += more["full"]
    assert engine.planner.extend([row], [0], [40], prefixes=[other]) is None
    engine.verify()
    assert engine.planner.units(row, "state") == state != {}
    engine.arena.free("full", taken)
    engine.tokens[row] = []
    assert engine.grow([row], [[1, 2, 3, 4]])
    assert engine.publish(row) == 4
    engine.finish(row)
    other.release()
    engine.cache.clear()
    assert engine.arena.group_stats("state")["in_use"] == 0


def test_a_request_that_begins_again_publishes_its_windows() -> None:
    layout = CacheLayout([Group("window", "window", [1], K, tokens=5)], page_size=PAGE)
    engine = Engine(layout, 1 << 14)
    row, _ = some(engine.begin([*range(11)], 30))
    engine.planner.truncate([row], [0])
    engine.tokens[row] = []
    assert engine.grow([row], [[*range(11)]])
    assert engine.grow([row], [[11]])
    assert engine.publish(row) == 12
    assert len_of(engine.cache.match([*range(12)])) == 12


def test_a_lease_that_is_released_while_it_is_claimed_ends_with_the_claim() -> None:
    engine = Engine(LAYOUTS["full"], 1700)
    one, other = some(engine.planner.alloc(2))
    assert engine.planner.extend([one], [0], [60]) is not None
    lease = engine.cache.match([])
    assert engine.planner.extend([other], [0], [64], prefixes=[lease]) is None
    lease.release()
    with pytest.raises(StaleError, match="it was released"):
        engine.planner.extend([other], [0], [1], prefixes=[lease])


def test_a_publication_without_room_for_a_snapshot_keeps_the_pages() -> None:
    engine = Engine(LAYOUTS["hybrid"], 1 << 12)
    row, _ = some(engine.begin([1, 2, 3, 4], 30))
    held = []
    while (taken := engine.arena.alloc({"state": 1})) is not None:
        held += taken["state"]
    assert engine.publish(row) == 4
    assert engine.cache.stats()["snapshots"] == 0
    engine.check(row, 4)
    engine.verify()
    engine.arena.free("state", held)
    assert engine.publish(row) == 4
    assert engine.cache.stats()["snapshots"] == 1


def test_a_lease_of_a_request_that_is_not_planned_is_free_again() -> None:
    engine = Engine(LAYOUTS["full"], 1700)
    planner = engine.planner
    one, other = some(planner.alloc(2))
    lease = engine.cache.match([1, 2, 3])
    assert planner.extend([one], [0], [64], prefixes=[None]) is not None
    assert planner.extend([other], [0], [64], prefixes=[lease]) is None
    with pytest.raises(ArgumentError, match="has a lease of 0 tokens; it cannot grow from 4 to 5"):
        planner.extend([other], [4], [5], prefixes=[lease])
    planner.finish([one])
    assert planner.extend([other], [0], [4], prefixes=[lease]) is not None


MISUSE: dict[str, tuple[type[Exception], str, Callable[[Engine, ArenaLease], object]]] = {
    "has tokens": (
        ArgumentError,
        "has 5 tokens with units; only a new one begins with a lease",
        lambda e, lease: e.planner.extend([1], [5], [6], prefixes=[lease]),
    ),
    "too few": (
        ArgumentError,
        "2 rows and 1 prefixes",
        lambda e, lease: e.planner.extend([1, 2], [5, 0], [6, 1], prefixes=[lease]),
    ),
    "no lease": (
        TypeError,
        "an entry of prefixes must be an ArenaLease or None, not",
        lambda e, _: e.planner.extend([2], [0], [1], prefixes=[3]),  # type: ignore[list-item]
    ),
    "no sequence": (
        TypeError,
        "prefixes must be a sequence with one entry for each request, not",
        lambda e, lease: e.planner.extend([2], [0], [1], prefixes=lease),  # type: ignore[arg-type]
    ),
    "another arena": (
        ArgumentError,
        "of another arena",
        lambda e, _: e.planner.extend(
            [2], [0], [1], prefixes=[Engine(LAYOUTS["full"], 1 << 16).cache.match([1])]
        ),
    ),
    "publish without a lease": (StateError, "row 2 has no lease", lambda e, _: e.planner.publish(2, [])),
    "no entries": (
        ArgumentError,
        "1 rows and 0 prefixes",
        lambda e, _: e.planner.extend([2], [0], [1], prefixes=[]),
    ),
    "publish more": (
        ArgumentError,
        "has 5 tokens with units; it cannot publish 8",
        lambda e, _: e.planner.publish(1, range(8)),
    ),
    "publish parts of pages": (
        ArgumentError,
        "page",
        lambda e, _: e.planner.publish(1, [1, 2, 3, 4, 5], snapshot=True),
    ),
    "publish other rows": (IndexOwnershipError, "is not allocated", lambda e, _: e.planner.publish(3, [1])),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_changes_nothing(name: str) -> None:
    engine = Engine(LAYOUTS["hybrid"], 1 << 16)
    row, _ = some(engine.begin([1, 2, 3, 4, 5], 30))
    engine.planner.alloc()
    lease = engine.cache.match([1, 2, 3, 4, 5])
    before = [engine.planner.units(row, group.name) for group in engine.groups], engine.arena.stats()
    error, message, call = MISUSE[name]
    with pytest.raises(error, match=message):
        call(engine, lease)
    assert (
        [engine.planner.units(row, group.name) for group in engine.groups],
        engine.arena.stats(),
    ) == before
    engine.check(row, 5)
    engine.verify()
    engine.finish(row)
    lease.release()
    assert engine.arena.group_stats("full")["in_use"] == 0


def test_a_window_can_be_published_up_to_the_last_whole_page() -> None:
    layout = CacheLayout([Group("window", "window", [1], K, tokens=5)], page_size=PAGE)
    engine = Engine(layout, 1 << 14)
    tokens = [*range(11)]
    row, _ = some(engine.begin(tokens, 30))
    engine.grow([row], [[11]])
    # The token at position 11 sees 7 to 11, the one behind page 1 also 4.
    assert [*engine.planner.units(row, "window")] == [1, 2]
    assert engine.publish(row) == 12
    assert len_of(engine.cache.match([*range(12)])) == 12


def test_other_tokens_than_those_of_the_lease_are_not_published() -> None:
    engine = Engine(LAYOUTS["windows"], 1 << 16)
    row, _ = some(engine.begin([*range(9)], 30))
    assert engine.planner.publish(row, [0, 1, 2, 3]) == 4
    before = [engine.planner.units(row, group.name) for group in engine.groups]
    with pytest.raises(ArgumentError, match="has 4 tokens in its lease; it cannot publish the first 3"):
        engine.planner.publish(row, [9, 9, 9])
    with pytest.raises(ArgumentError, match="differ from those of the lease at position 1"):
        engine.planner.publish(row, [0, 9, 2, 3, 4, 5, 6, 7])
    assert [engine.planner.units(row, group.name) for group in engine.groups] == before
    assert engine.publish(row) == 8
    engine.check(row, 9)
    engine.verify()


def test_a_clear_of_the_arena_ends_leases() -> None:
    engine = Engine(LAYOUTS["hybrid"], 1 << 16)
    row, _ = some(engine.begin([1, 2, 3, 4], 30))
    engine.publish(row)
    lease = engine.cache.match([1, 2, 3, 4])
    engine.arena.clear()
    with pytest.raises(StaleError, match="ended when the arena was cleared"):
        engine.planner.publish(row, [1, 2, 3, 4])
    with pytest.raises(StaleError, match="the arena was cleared"):
        engine.planner.extend([row], [4], [5], prefixes=[lease])
    again = engine.cache.match([1, 2, 3, 4])
    assert len_of(again) == 0
    assert engine.planner.extend([row], [0], [4], prefixes=[again]) is not None
    assert engine.planner.publish(row, [1, 2, 3, 4]) == 4
    engine.verify()


def test_threads_share_a_cache() -> None:
    engine = Engine(LAYOUTS["hybrid"], 1 << 14)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        choose = random.Random(seed)  # noqa: S311 - of a test
        try:
            for _ in range(60):
                tokens = [choose.randrange(2) for _ in range(17)]
                taken = engine.planner.alloc()
                if taken is None:
                    continue
                lease = engine.cache.match(tokens, max_tokens=16)
                found = len_of(lease)
                if engine.planner.extend(taken, [found], [16], prefixes=[lease]) is not None:
                    assert engine.planner.publish(taken[0], tokens[:16], snapshot=True) == 16
                engine.planner.finish(taken)
                lease.release()
        except BaseException as failure:  # noqa: BLE001 - of any thread
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    engine.verify()
    assert engine.cache.stats()["locked"] == 0
    engine.cache.clear()
    assert engine.arena.stats()["available"] == engine.arena.stats()["capacity"]


def test_units_are_copied_by_the_arena() -> None:
    arena = CacheArena(LAYOUTS["hybrid"], 1 << 16, devices.current())
    units = some(arena.alloc({"full": 3, "state": 2}))
    k, recurrent = arena.buffer("full", "k", 3), arena.buffer("state", "recurrent", 4)
    k[units["full"]] = torch.arange(3, dtype=torch.float32, device=k.device).view(3, 1, 1)
    arena.copy("full", units["full"][:2], units["full"][1:])
    assert k[units["full"]][:, 0, 0].tolist() == [1, 2, 2]
    state = units["state"]
    recurrent[state[0]] = 5.0
    arena.copy("state", state[1:], state[:1])
    assert recurrent[state[1]].tolist() == recurrent[state[0]].tolist()
    with pytest.raises(ArgumentError, match="1 destinations and 2 sources"):
        arena.copy("full", units["full"][:1], units["full"][:2])
    with pytest.raises(IndexOwnershipError, match="not allocated"):
        arena.copy("full", [units["full"][-1] + 1], units["full"][:1])
    with pytest.raises(IndexError, match="1000000"):
        arena.copy("full", units["full"][:1], [1_000_000])
    with pytest.raises(ArgumentError, match="no group"):
        arena.copy("other", [], [])
    with pytest.raises(ArgumentError, match="8193 units are more than the 8192 that are copied at once"):
        arena.copy("full", [1] * 8193, [1] * 8193)
