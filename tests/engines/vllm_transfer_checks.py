"""Both halves of `KvpoolTransferConnector` without a model: hand-offs, and each reason to refuse one."""

from __future__ import annotations

import random
import sys
import time
from collections import Counter, deque
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

sys.path.append(str(Path(__file__).parents[1] / "python" / "support"))

import direct_network
import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from kvpool.errors import ArgumentError, ConfigError
from kvpool.integrations.vllm import transfer_worker
from kvpool.integrations.vllm.handoff import Handoff, digest_of
from kvpool.integrations.vllm.transfer import KvpoolTransferConnector
from kvpool.integrations.vllm.transfer_scheduler import TransferScheduler
from kvpool.integrations.vllm.transfer_worker import TransferWorker, rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SIZES, WINDOW = (4, 8), 16
"""Tokens of a block, of a group with full attention and of one with a window of so many tokens."""

BLOCKS = 400


def request(name: str, prompt: list[int] | None, **params: Any) -> Any:  # noqa: ANN401
    """A request of vLLM, as far as the connector looks at it."""
    return SimpleNamespace(
        request_id=name, kv_transfer_params=params, prompt_token_ids=prompt, prompt_embeds=None,
        num_prompt_tokens=len(prompt or ()), num_computed_tokens=0, num_preemptions=0, lora_request=None,
        mm_features=[],
    )  # fmt: skip


class Block:
    """A block of vLLM."""

    def __init__(self, number: int) -> None:
        self.block_id, self.is_null = number, number == 0


def behind_window(computed: int) -> int:
    """How many tokens the one after `computed` does not attend to."""
    return max(0, computed - WINDOW + 1)


class Engine:
    """An engine's blocks, with both halves of the connector. Two layers, whose rows all groups share."""

    def __init__(self, name: str, rank: int = 0, lease_s: float = 30.0, ahead: int = 0) -> None:
        # Plans that workers have not carried out: with asynchronous scheduling there is one.
        self.ahead, self.plans = ahead, deque[tuple[Any, set[str]]]()
        self.layers = {f"layer.{at}": torch.zeros(BLOCKS, 8, 2) for at in range(2)}
        self.scheduler = TransferScheduler(name, SIZES, lease_s)
        self.worker = TransferWorker(name, rank)
        self.worker.register(self.layers, BLOCKS, {"of": "tests"})
        self.scheduler.peers = (self.worker.endpoint.metadata(),) * (rank + 1)
        manager: Any = SimpleNamespace(
            get_blocks=lambda name: SimpleNamespace(blocks=[[*map(Block, own)] for own in self.owned[name]]),
            coordinator=SimpleNamespace(
                single_type_managers=[
                    SimpleNamespace(get_num_skipped_tokens=lambda _: 0),
                    SimpleNamespace(get_num_skipped_tokens=behind_window),
                ]
            ),
            block_pool=SimpleNamespace(touch=self.touch, free_blocks=self.release),
        )
        self.scheduler.manager = manager
        self.owned: dict[str, tuple[list[int], ...]] = {}
        self.free = [*range(1, BLOCKS)]
        self.touched: set[int] = set()
        self.behind: set[int] = set()
        self.kept: dict[str, tuple[list[int], ...]] = {}
        self.ended: set[str] = set()
        self.arrived: set[str] = set()
        self.failed: set[str] = set()

    def alloc(self, name: str, tokens: int, computed: int = 0) -> None:
        """Gives a request blocks for all of its tokens but those behind the window of the computed ones."""
        behind = behind_window(computed) // SIZES[1]
        counts = [-(-tokens // size) for size in SIZES]
        full = [self.free.pop() for _ in range(counts[0])]
        window = [0] * behind + [self.free.pop() for _ in range(counts[1] - behind)]
        self.owned[name] = (full, window)

    def fill(self, prompt: list[int], name: str, until: int) -> None:
        """Writes what belongs to the tokens up to there."""
        for group, (blocks, size) in enumerate(zip(self.owned[name], SIZES, strict=True)):
            for at, block in enumerate(blocks):
                if block and at * size < until:
                    for layer, tensor in enumerate(self.layers.values()):
                        tensor[block] = content(prompt, group, layer, at)

    def step(self, **scheduled: int) -> None:
        """A step, with so many tokens of requests."""
        output: Any = SimpleNamespace(num_scheduled_tokens=scheduled)
        self.plans.append((self.scheduler.plan(output), self.ended))
        self.ended = set()
        if len(self.plans) <= self.ahead:
            return
        plan, ended = self.plans.popleft()
        self.worker.step(plan)
        results = self.worker.results(ended)
        self.scheduler.returned(results.finished_sending)
        for name in results.finished_sending:
            self.give(self.kept.pop(name))
        assert results.failed_recving <= results.finished_recving
        self.arrived |= results.finished_recving
        self.failed |= results.failed_recving

    def read(self, of: Any, elsewhere: int) -> None:  # noqa: ANN401
        """Gives a request's blocks to the connector, as they are."""
        blocks: Any = SimpleNamespace(get_block_ids=lambda: self.owned[of.request_id])
        self.scheduler.allocated(of, blocks, elsewhere)

    def has_read(self, name: str) -> bool:
        """Steps until a request's blocks have arrived, or not."""
        until = time.monotonic() + 20
        while name not in self.arrived:
            assert time.monotonic() < until
            self.step()
        return name not in self.failed

    def touch(self, blocks: list[Block]) -> None:
        """Keeps blocks, as the connector asks for it."""
        assert not self.touched & {block.block_id for block in blocks}
        self.touched |= {block.block_id for block in blocks}

    def release(self, blocks: list[Block]) -> None:
        """Takes them back."""
        self.touched -= {block.block_id for block in blocks}
        over = self.behind & {block.block_id for block in blocks}
        self.behind -= over
        self.give(([*over],))

    def pass_window(self, of: Any) -> None:  # noqa: ANN401
        """Frees what is behind the window of the token after a prompt, as vLLM does before it ends one."""
        window = self.owned[of.request_id][1]
        for at in range(behind_window(of.num_prompt_tokens) // SIZES[1]):
            block, window[at] = window[at], 0
            if block in self.touched:
                self.behind.add(block)
            elif block:
                self.give(([block],))

    def give(self, blocks: Sequence[list[int]]) -> None:
        """Takes blocks back: whoever gets them next has other content."""
        for block in (block for group in blocks for block in group if block):
            for tensor in self.layers.values():
                tensor[block] = -1.0
            self.free.append(block)

    def finish(self, of: Any, *, is_whole: bool = True) -> dict[str, Any] | None:  # noqa: ANN401
        """Ends a request; returns the parameters of its answer."""
        for _ in range(self.ahead):
            self.step()  # its last output is there when its last plan was carried out
        if of.request_id in self.owned:
            self.pass_window(of)
        blocks = self.owned.pop(of.request_id, ([], []))
        keeps, params = self.scheduler.finished(of, blocks, is_whole=is_whole)
        self.ended.add(of.request_id)
        if keeps:
            self.kept[of.request_id] = blocks
        else:
            self.give(blocks)
        assert keeps == (params is not None)
        return params

    def close(self) -> None:
        """Ends its endpoint."""
        self.worker.close()

    def is_idle(self) -> bool:
        """Whether nothing is lent, read or kept. Then all blocks and keys are there."""
        worker = self.worker
        if self.kept or worker._leases or worker._sent or worker._reading or worker._returning:
            return False
        assert sorted(self.free) == [*range(1, BLOCKS)]
        assert len(self.scheduler._keys._free) == 4096
        assert not self.touched
        assert not self.behind
        return True


def content(prompt: list[int], group: int, layer: int, at: int) -> float:
    """What is in a block of a prompt."""
    return float(hash((tuple(prompt), group, layer, at)) % (1 << 20))


@pytest.fixture(name="made")
def engines_over_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Engine]]:
    """Engines, each with an endpoint of a network in this process."""
    monkeypatch.setattr(
        transfer_worker, "Endpoint", lambda name, rows, **_: direct_network.endpoint(name, rows)
    )
    engines: list[Engine] = []
    yield engines
    for engine in engines:
        engine.close()


def computed(engine: Engine, of: Any) -> dict[str, Any] | None:  # noqa: ANN401
    """Has a prompt computed in one step."""
    engine.scheduler.add(of)
    engine.alloc(of.request_id, of.num_prompt_tokens)
    engine.fill(of.prompt_token_ids, of.request_id, of.num_prompt_tokens)
    engine.step(**{of.request_id: of.num_prompt_tokens})
    return engine.finish(of)


def loaded(engine: Engine, of: Any, local: int = 0) -> bool:  # noqa: ANN401
    """Has a prompt read, all but its first tokens, and returns whether it has arrived."""
    engine.scheduler.add(of)
    elsewhere = engine.scheduler.tokens_elsewhere(of, local)
    engine.alloc(of.request_id, of.num_prompt_tokens, of.num_prompt_tokens - 1)
    engine.read(of, elsewhere)
    return engine.has_read(of.request_id)


def preempt(engine: Engine, of: Any) -> None:  # noqa: ANN401
    """Takes a request's blocks, so that it begins again."""
    engine.give(engine.owned[of.request_id])
    of.num_computed_tokens, of.num_preemptions = 0, of.num_preemptions + 1
    engine.alloc(of.request_id, of.num_prompt_tokens)


def hand_offs(
    dice: random.Random, prefill: Engine, decode: Engine, name: str, seen: Counter[str]
) -> Iterator[None]:
    """One request on its way over both engines, with a step of one of them at a time."""
    prompt = [dice.randrange(50) for _ in range(dice.randrange(1, 60))]
    first = request(name, prompt, do_remote_decode=True)
    prefill.scheduler.add(first)
    prefill.alloc(name, len(prompt))
    while first.num_computed_tokens < len(prompt):
        count = min(dice.randrange(1, 30), len(prompt) - first.num_computed_tokens)
        prefill.fill(prompt, name, first.num_computed_tokens + count)
        prefill.step(**{name: count})
        first.num_computed_tokens += count
        yield
        if dice.random() < 0.1:
            seen["preempted late" if first.num_computed_tokens == len(prompt) else "preempted"] += 1
            preempt(prefill, first)
            yield
    is_whole = dice.random() < 0.8
    params = prefill.finish(first, is_whole=is_whole)
    yield
    assert (params is not None) == is_whole
    if params is None:
        seen["aborted"] += 1
        return
    then = request(name, prompt, **params)
    decode.scheduler.add(then)
    yield
    if dice.random() < 0.1:  # the client has gone
        seen["gone early"] += 1
        decode.finish(then, is_whole=False)
        decode.step()
        return
    local = min(dice.choice([0, 0, 8, 16, 48]), (len(prompt) - 1) // 8 * 8)
    elsewhere = decode.scheduler.tokens_elsewhere(then, local)
    assert elsewhere == max(0, len(prompt) - 1 - local)
    decode.alloc(name, len(prompt), len(prompt) - 1)
    decode.fill(prompt, name, local)
    decode.read(then, elsewhere)
    is_over = elsewhere > 0 and dice.random() < 0.1
    if is_over:
        decode.ended.add(name)  # while it waits for its blocks
    yield
    if elsewhere:
        is_there = decode.has_read(name)
        assert is_there or is_over
        seen["ended" if is_over else "read"] += 1
    else:
        is_there = True
        seen["all here"] += 1
    for group, blocks in enumerate(decode.owned[name] if is_there else ()):
        for at, block in enumerate(blocks):
            for layer, tensor in enumerate(decode.layers.values()):
                # The last token is computed anyway.
                is_read = block and at * SIZES[group] < len(prompt) - 1
                assert not is_read or (tensor[block] == content(prompt, group, layer, at)).all(), name
    assert decode.finish(then) is None


def test_random_hand_offs_bring_their_blocks_and_leave_nothing(made: list[Engine]) -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        dice = random.Random(seed)  # noqa: S311
        ahead = seed % 2
        prefill, decode = Engine(f"p{seed}", ahead=ahead), Engine(f"d{seed}", ahead=ahead)
        made += prefill, decode
        running = [hand_offs(dice, prefill, decode, f"r{at}", seen) for at in range(8)]
        while running:
            one = dice.choice(running)
            if next(one, 0) == 0:
                running.remove(one)
        until = time.monotonic() + 20
        while not (prefill.is_idle() and decode.is_idle()):
            assert time.monotonic() < until
            decode.step()
            prefill.step()
    assert min(seen.values()) > 3
    assert seen.keys() == {
        "preempted",
        "preempted late",
        "aborted",
        "gone early",
        "all here",
        "ended",
        "read",
    }


def test_a_request_without_a_whole_lease_is_not_handed_over(
    made: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine("p", lease_s=0.001)
    made.append(engine)
    late = request("late", [1, 2, 3], do_remote_decode=True)
    engine.scheduler.add(late)
    engine.alloc("late", 3)
    engine.step(late=3)
    engine.scheduler._prefills["late"].lent.until -= 1  # type: ignore[union-attr]
    assert engine.finish(late) is None
    by_embeddings = request("embeddings", None, do_remote_decode=True)
    by_embeddings.num_prompt_tokens = 9
    engine.scheduler.add(by_embeddings)
    engine.alloc("embeddings", 9)
    engine.step(embeddings=9)
    assert engine.finish(by_embeddings) is None
    # A block was freed while the request went on.
    moved = request("moved", [*range(40)], do_remote_decode=True)
    engine.scheduler.add(moved)
    engine.alloc("moved", 40)
    engine.step(moved=40)
    full, window = engine.owned["moved"]
    engine.free.append(window.pop())
    engine.owned["moved"] = (full, window)
    assert engine.finish(moved) is None
    gap = request("gap", [*range(40)], do_remote_decode=True)
    engine.scheduler.add(gap)
    engine.alloc("gap", 40)
    engine.free.append(engine.owned["gap"][1][3])
    engine.owned["gap"][1][3] = 0
    engine.step(gap=40)
    assert engine.finish(gap) is None
    unknown = request("unknown", [1], do_remote_decode=True)
    engine.scheduler.peers = ()
    engine.scheduler.add(unknown)
    engine.alloc("unknown", 1)
    engine.step(unknown=1)
    assert engine.finish(unknown) is None
    engine.step()
    assert engine.is_idle()
    engine.scheduler.peers = (b"",)
    monkeypatch.setattr(engine.scheduler._keys, "_free", {})
    assert computed(engine, request("many", [1], do_remote_decode=True)) is None


def test_a_lease_that_is_over_gives_the_blocks_back_and_nothing_is_read(made: list[Engine]) -> None:
    prefill, decode = Engine("p", lease_s=0.05), Engine("d")
    made += prefill, decode
    params = computed(prefill, request("one", [1, 2, 3], do_remote_decode=True))
    assert params is not None
    while prefill.kept:
        prefill.step()
    again = request("one", [1, 2, 3], **params)
    assert not loaded(decode, again)
    assert decode.scheduler.tokens_elsewhere(again, 0) == 0  # it is asked for once


def test_what_a_request_keeps_ends_with_its_lease(made: list[Engine]) -> None:
    """Of one that goes on, and waits after a preemption."""
    engine = Engine("p", lease_s=0.1)
    made.append(engine)
    for is_preempted in (True, False):
        going_on = request("one", [*range(39)], do_remote_decode=True)
        engine.scheduler.add(going_on)
        engine.alloc("one", 39)
        engine.step(one=39)
        assert engine.touched
        if is_preempted:
            going_on.num_preemptions += 1
        else:
            time.sleep(0.2)
        engine.step()
        assert not engine.touched
        engine.finish(going_on, is_whole=False)
        engine.step()
        assert engine.is_idle()


def test_less_may_be_read_than_there_is(made: list[Engine]) -> None:
    prefill, decode = Engine("p"), Engine("d")
    made += prefill, decode
    prompt = [*range(15)]
    params = computed(prefill, request("one", prompt, do_remote_decode=True))
    assert params is not None
    then = request("one", prompt, **params)
    decode.scheduler.add(then)
    assert decode.scheduler.tokens_elsewhere(then, 0) == 14
    decode.alloc("one", 15)
    decode.read(then, 8)
    assert decode.has_read("one")
    for group, size in enumerate(SIZES):
        blocks = decode.owned["one"][group]
        for at in range(len(blocks)):
            expected = content(prompt, group, 0, at) if at * size < 8 else 0.0
            assert (decode.layers["layer.0"][blocks[at]] == expected).all(), (group, at)


@pytest.mark.parametrize("role", ["do_remote_decode", "do_remote_prefill"])
def test_an_engine_does_what_its_role_is(
    made: list[Engine], caplog: pytest.LogCaptureFixture, role: str
) -> None:
    prefill, other = Engine("p"), Engine("d")
    made += prefill, other
    params = computed(prefill, request("one", [1, 2, 3], do_remote_decode=True))
    assert params is not None
    forbids = {"may_lend": role != "do_remote_decode", "may_read": role != "do_remote_prefill"}
    scheduler = TransferScheduler("d", SIZES, 30.0, **forbids)
    asked = request("two", [1, 2, 3], **(params if role == "do_remote_prefill" else {role: True}))
    scheduler.add(asked)
    assert f"asks for {role}, and kv_role forbids it" in caplog.text
    assert scheduler.tokens_elsewhere(asked, 0) == 0
    assert scheduler.finished(asked, ([], []), is_whole=True) == (False, None)


def test_a_lease_lasts_as_long_as_its_request_waits(made: list[Engine]) -> None:
    prefill, decode = Engine("p", lease_s=0.6), Engine("d", lease_s=0.6)
    made += prefill, decode
    params = computed(prefill, request("one", [1, 2, 3], do_remote_decode=True))
    assert params is not None
    waiting = request("one", [1, 2, 3], **params)
    decode.scheduler.add(waiting)
    until = time.monotonic() + 2
    while time.monotonic() < until:
        assert decode.scheduler.tokens_elsewhere(waiting, 0) == 2
        decode.step()
        prefill.step()
        time.sleep(0.02)
    assert prefill.kept
    decode.alloc("one", 3)
    decode.read(waiting, 2)
    assert decode.has_read("one")
    while prefill.kept:
        decode.step()
        prefill.step()
    # Of a peer that is gone, or that never was.
    gone = request("gone", [1, 2, 3], **params)
    decode.scheduler.add(gone)
    decode.scheduler._arrivals["gone"].heard -= 1
    prefill.close()
    decode.step()
    assert not loaded(decode, request("two", [1, 2, 3], **params))


def test_blocks_that_are_not_there_any_more_are_not_read(made: list[Engine]) -> None:
    prefill, decode = Engine("p"), Engine("d")
    made += prefill, decode
    asked = request("one", [*range(40)], do_remote_decode=True)
    prefill.scheduler.add(asked)
    prefill.alloc("one", 40, 40)  # all behind the window is gone
    prefill.step(one=40)
    params = prefill.finish(asked)
    assert params is not None
    then = request("one", [*range(40)], **params)
    decode.scheduler.add(then)
    assert decode.scheduler.tokens_elsewhere(then, 0) == 39
    decode.alloc("one", 40)
    decode.read(then, 39)
    assert not decode.has_read("one")
    while not prefill.is_idle():  # it has the lease back
        decode.step()
        prefill.step()


def test_other_prompts_other_blocks_and_other_workers_are_refused(
    made: list[Engine], caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode, second = Engine("p", lease_s=2.0), Engine("d"), Engine("e", rank=1)
    made += prefill, decode, second
    params = computed(prefill, request("one", [1, 2, 3], do_remote_decode=True))
    assert params is not None
    for wrong in ([1, 2, 4], [1, 2]):
        of = request(f"of {wrong}", wrong, **params)
        decode.scheduler.add(of)
        assert decode.scheduler.tokens_elsewhere(of, 0) == 0
    with_lora = request("lora", [1, 2, 3], **params)
    with_lora.lora_request = SimpleNamespace(lora_name="other")
    decode.scheduler.add(with_lora)
    assert decode.scheduler.tokens_elsewhere(with_lora, 0) == 0
    assert caplog.text.count("not the one of 3 tokens that was computed for it") == 3
    handoff = Handoff.from_params(params)
    other = request("other", [1, 2, 3], **handoff._replace(groups=((0, 2), (0, 1))).to_params("one", "p"))
    decode.scheduler.add(other)
    assert decode.scheduler.tokens_elsewhere(other, 0) == 0
    assert "groups of [1, 1] blocks" in caplog.text
    assert not loaded(second, request("far", [1, 2, 3], **params))
    assert "rank 1 is beyond the 1 of the other engine" in caplog.text
    decode.finish(other)
    decode.step()
    prefill.step()
    assert prefill.kept  # who refuses it does not give it back: it may be somebody else's
    assert loaded(decode, request("one", [1, 2, 3], **params))
    while prefill.kept:
        decode.step()
        prefill.step()


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"kvpool": {}},
        {"kvpool": None},
        {"tokens": 0},
        {"tokens": "many"},
        {"tokens": float("inf")},
        {"groups": [[0, float("inf")]]},
        {"groups": [[0]]},
        {"groups": [[-1, 2]]},
        {"ticket": "?"},
        {"peers": []},
        {"peers": 5},
    ],
)
def test_hand_offs_that_are_not_whole_are_refused(made: list[Engine], wrong: dict[str, Any]) -> None:
    engine = Engine("d")
    made.append(engine)
    good = Handoff(3, "digest", ((0, 1), (0, 1)), b"ticket", (b"peer",))
    params = good.to_params("one", "p")
    assert Handoff.from_params(params) == good
    if "kvpool" in wrong or not wrong:
        del params["kvpool"]
        params |= wrong
    else:
        params["kvpool"] |= wrong
    with pytest.raises(ArgumentError, match=r"whole hand-off|cannot be"):
        Handoff.from_params(params)
    one = request("one", [1, 2, 3], **params)
    engine.scheduler.add(one)
    assert engine.scheduler.tokens_elsewhere(one, 0) == 0


def test_a_ticket_or_a_peer_that_is_none_fails_one_request(made: list[Engine]) -> None:
    prefill, decode = Engine("p"), Engine("d")
    made += prefill, decode
    params = computed(prefill, request("one", [1, 2, 3], do_remote_decode=True))
    assert params is not None
    good = Handoff.from_params(params)
    for at, wrong in enumerate((good._replace(ticket=b"none"), good._replace(peers=(b"none",)))):
        of = request(f"{at}", [1, 2, 3], **wrong.to_params("one", "p"))
        assert not loaded(decode, of)
    assert loaded(decode, request("good", [1, 2, 3], **params))


def test_the_digest_is_that_of_tokens_lora_and_images() -> None:
    one = request("one", [1, 2, 3])
    same = digest_of(one, 3)
    assert digest_of(request("two", [1, 2, 3, 4]), 3) == same
    assert digest_of(one, 2) != same
    one.mm_features = [SimpleNamespace(identifier="image")]
    with_image = digest_of(one, 3)
    one.lora_request = SimpleNamespace(lora_name="lora")
    assert len({same, with_image, digest_of(one, 3)}) == 3
    one.prompt_embeds = torch.zeros(3, 8)
    assert digest_of(one, 3) is None


def test_caches_are_rows_of_blocks() -> None:
    shape = {"of": "tests"}
    apart = {"a": torch.zeros(6, 4, 2), "b": torch.zeros(6, 4, 2)}
    rows = rows_of(apart, 6, shape, "cpu")
    addresses, sizes, row = rows.get_contiguous_buf_infos()
    assert addresses == [tensor.data_ptr() for tensor in apart.values()]
    swapped = rows_of({"b": apart["a"], "a": apart["b"]}, 6, shape, "cpu")
    assert swapped.get_contiguous_buf_infos()[0] == addresses[::-1]
    assert (sizes, row) == ([192, 192], [32, 32])
    # Kernels may have smaller blocks than the scheduler.
    assert rows_of(apart, 3, shape, "cpu").get_contiguous_buf_infos()[2] == [64, 64]
    # Layers within a block, one behind the other.
    packed = torch.zeros(6, 2, 8)
    views = {"a": packed[:, 0], "b": packed[:, 1]}
    assert rows_of(views, 6, shape, "cpu").get_contiguous_buf_infos() == ([packed.data_ptr()], [384], [64])
    assert rows_of(views, 6, shape, "cpu").shape != rows_of({"a": views["a"]}, 6, shape, "cpu").shape
    with pytest.raises(ConfigError, match=r"\[6, 4, 2\] values, not 4 blocks"):
        rows_of(apart, 4, shape, "cpu")
    with pytest.raises(ConfigError, match="do not lie together"):
        rows_of({"a": torch.zeros(2, 6, 4).transpose(0, 1)}, 6, shape, "cpu")


@pytest.mark.parametrize(
    ("ways", "extra", "spec", "words"),
    [
        ({"pipeline_parallel_size": 2}, {}, "full", "2-fold pipeline parallelism"),
        ({"decode_context_parallel_size": 4}, {}, "full", "4-fold decode context parallelism"),
        ({}, {"lease_s": 0}, "full", "lease_s is 0"),
        ({}, {}, "state", "moves no recurrent states"),
    ],
)
def test_engines_that_cannot_be_a_part_are_refused(
    ways: dict[str, int], extra: dict[str, Any], spec: str, words: str
) -> None:
    specs: dict[str, Any] = {
        "full": FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32),
        "state": MambaSpec(block_size=16, shapes=((1,),), dtypes=(torch.float32,)),
    }
    names = ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size")
    transfer = SimpleNamespace(
        kv_connector_extra_config=extra, engine_id="one", kv_load_failure_policy="fail", is_kv_producer=True
    )
    config: Any = SimpleNamespace(
        kv_transfer_config=transfer, parallel_config=SimpleNamespace(**{**dict.fromkeys(names, 1), **ways})
    )
    caches: Any = SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=specs[spec])], has_mamba_layers=spec == "state"
    )
    with pytest.raises(ConfigError, match=words):
        KvpoolTransferConnector(config, KVConnectorRole.SCHEDULER, caches)
    assert transfer.kv_load_failure_policy == "fail"
