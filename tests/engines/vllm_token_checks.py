"""What kvpool's schedulers and vLLM's do with tokens of a request: the same answers, types and state."""

from __future__ import annotations

import random
import runpy
from collections import Counter
from copy import deepcopy
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock, init_none_hash
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.request import Request

from kvpool.integrations.seams import have_source
from kvpool.integrations.vllm import hashing, tokens
from kvpool.integrations.vllm.kv_cache_manager import _NoBlocks

SIZE, LONGEST, EOS, STOP = 4, 60, 2, 7

own: Any = tokens.Scheduler.__bases__[-1]


class OtherRequest(Request):  # type: ignore[misc]  # vLLM has no types here
    """A request of another package, which counts what is appended to it."""

    appended = 0

    def append_output_token_ids(self, token_ids: int | list[int]) -> None:
        self.appended += 1
        super().append_output_token_ids(token_ids)


class Sides:
    """kvpool's scheduler and vLLM's, without what else they need."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        kind: type = tokens.Scheduler,
        **state: Any,  # noqa: ANN401
    ) -> None:
        self.kvpool, self.vllm = (object.__new__(each) for each in (kind, own))
        for side in (self.kvpool, self.vllm):
            vars(side).update(state)
        self.left: Counter[str] = Counter()
        """How often kvpool's scheduler called vLLM's method."""
        for name in tokens._METHODS:
            monkeypatch.setattr(own, name, self._counting(name, getattr(own, name)))

    def _counting(self, name: str, method: Any) -> Any:  # noqa: ANN401
        def counted(side: Any, *arguments: Any) -> Any:  # noqa: ANN401
            self.left[name] += side is self.kvpool
            return method(side, *arguments)

        return counted


def hashers() -> list[Any]:
    """None, kvpool's, vLLM's, vLLM's with tokens ahead, and one with something to do after any token."""
    init_none_hash(sha256)
    return [
        None,
        hashing.get_request_block_hasher(SIZE, sha256),
        hashing._own(SIZE, sha256),
        hashing._own(SIZE, sha256, 1),
        hashing.get_request_block_hasher(SIZE, sha256, 2),
        lambda request: [f"{request.num_tokens}".encode()],
    ]


def twins(kind: Any = Request, hasher: Any = None, prompt: int = 5, **options: Any) -> list[Any]:  # noqa: ANN401
    """Two requests that are the same."""
    params = SamplingParams(**{"max_tokens": 20, **options})
    params._eos_token_id = EOS
    return [
        kind(
            "name",
            list(range(10, 10 + prompt)),
            deepcopy(params),
            None,
            arrival_time=0.0,
            block_hasher=hasher,
        )
        for _ in range(2)
    ]


def state(request: Any) -> dict[str, Any]:  # noqa: ANN401
    """What a request has, with views of lists as lists."""
    shown = {name: getattr(value, "_x", value) for name, value in vars(request).items()}
    shown["prefill_stats"] = vars(shown["prefill_stats"])
    return shown


def append(sides: Sides, requests: list[Any], new: list[Any], stale: bool = False) -> tuple[bool, bool]:
    """Appends tokens on both sides. Whether the request ends, and whether it went the short way."""
    before, given = sides.left["_update_request_with_output"], [new, list(new)]
    answers: list[Any] = []
    for side, request, mine in zip((sides.kvpool, sides.vllm), requests, given, strict=True):
        answers.append(side._update_request_with_output(request, mine, stale))
        assert answers[-1][0] is mine
    assert answers[0] == answers[1]
    assert [*map(type, answers[0][0])] == [*map(type, answers[1][0])]
    assert state(requests[0]) == state(requests[1])
    return answers[0][1], before == sides.left["_update_request_with_output"]


REPEATS = RepetitionDetectionParams(max_pattern_size=2, min_count=2)

SHORT, OWN = True, False

# By a request: its tokens, what else differs, and by whom its last token is appended.
TOKENS: dict[str, tuple[list[list[Any]], dict[str, Any], bool]] = {
    "nothing": ([[30], [31], [32], [33], [34]], {}, SHORT),
    "fewer than the least number": ([[30]], {"min_tokens": 9}, SHORT),
    "several tokens": ([[30], [31, 32]], {}, OWN),
    "no token": ([[]], {}, OWN),
    "an end": ([[30], [EOS]], {}, OWN),
    "an end that is ignored": ([[30], [EOS]], {"ignore_eos": True}, OWN),
    "a token to stop at": ([[30], [STOP]], {"stop_token_ids": [3, STOP]}, OWN),
    "no token to stop at": ([[30], [STOP]], {"stop_token_ids": [3, 4]}, SHORT),
    "several, with a stop": ([[30, STOP, 31]], {"stop_token_ids": [STOP]}, OWN),
    "the last token": ([[30], [31]], {"max_tokens": 2}, OWN),
    "the longest request": ([[30]], {"prompt": LONGEST - 1}, OWN),
    "one below the longest": ([[30]], {"prompt": LONGEST - 2}, SHORT),
    "a repetition": ([[30], [30]], {"repetition_detection": REPEATS}, OWN),
    "a truth": ([[True]], {}, OWN),
    "another kind of request": ([[30]], {"kind": OtherRequest}, OWN),
}


@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.parametrize("kind", [tokens.Scheduler, tokens.AsyncScheduler])
def test_each_reason_to_go_the_way_of_vllm(name: str, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    new, options, way = TOKENS[name]
    sides = Sides(monkeypatch, kind, max_model_len=LONGEST)
    for hasher in hashers():
        requests = twins(hasher=hasher, **options)
        for each in new[:-1]:
            assert append(sides, requests, each)[0] is False
        assert append(sides, requests, new[-1])[1] == way


def test_what_is_no_token_of_text_fails_as_in_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = Sides(monkeypatch, max_model_len=LONGEST)
    wrong: list[tuple[type[Exception], Any, dict[str, Any]]] = [
        (TypeError, np.int64(30), {}),
        (AssertionError, 30, {"pooling_params": PoolingParams()}),
        (AssertionError, 30, {"sampling_params": None}),
    ]
    for error, new, changes in wrong:
        requests = twins()
        for side, request in zip((sides.kvpool, sides.vllm), requests, strict=True):
            vars(request).update(changes)
            with pytest.raises(error):
                side._update_request_with_output(request, [new])
        assert state(requests[0]) == state(requests[1])
    assert sides.left["_update_request_with_output"] == len(wrong)


def test_tokens_are_appended_as_by_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random requests from their first token to the last one, with tokens ahead and stale ones."""
    dice = random.Random(1)  # noqa: S311
    sides = Sides(monkeypatch, max_model_len=LONGEST)
    ways: Counter[bool] = Counter()
    ends: Counter[str] = Counter()
    made = hashers()
    for _ in range(1500):
        requests = twins(
            hasher=dice.choice(made),
            prompt=dice.randrange(1, 55),
            max_tokens=dice.randrange(1, 40),
            min_tokens=dice.choice((0, 0, 1)),
            stop_token_ids=dice.choice(([], [STOP], [3, STOP])),
            repetition_detection=dice.choice((None, None, None, REPEATS)),
            ignore_eos=dice.random() < 0.2,
        )
        stops = False
        while not stops:
            stale, ahead, computed = dice.random() < 0.1, dice.choice((0, 0, 3, 4)), dice.randrange(100)
            for request in requests:
                request.num_output_placeholders, request.num_computed_tokens = ahead, computed
            count = dice.choice((1, 1, 1, 1, 1, 1, 2, 3))
            stops, way = append(sides, requests, [dice.randrange(60) for _ in range(count)], stale)
            ways[way] += 1
        ends[requests[0].status.name] += 1
    assert min(ways[SHORT], ways[OWN]) > 2000
    assert {"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"} <= {*ends}
    assert min(ends.values()) > 10


def test_workers_are_told_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(2)  # noqa: S311
    own_ways = 0
    for _ in range(400):
        groups = dice.randrange(1, 4)
        nothing = dice.choice((KVCacheBlocks, _NoBlocks))(tuple(() for _ in range(groups)))
        requests = [
            Request(f"{at}", list(range(at + 1)), SamplingParams(max_tokens=50), None) for at in range(12)
        ]
        dice.shuffle(requests)
        for request in requests:
            request.append_output_token_ids([dice.randrange(60) for _ in range(dice.randrange(5))])
            request.num_computed_tokens = dice.randrange(90)
            request.num_output_placeholders = dice.randrange(3)

        def some(nothing: Any = nothing, groups: int = groups) -> Any:  # noqa: ANN401
            lists = [
                [KVCacheBlock(dice.randrange(9)) for _ in range(dice.randrange(2))] for _ in range(groups)
            ]
            return nothing if dice.random() < 0.6 else KVCacheBlocks(tuple(lists))

        running = dice.randrange(len(requests))
        resumed = requests[running : running + dice.choice((0, 0, 2))]
        blocks = {request.request_id: some() for request in requests}
        known = {request.request_id for request in requests if dice.random() < dice.choice((0.5, 1))}
        with monkeypatch.context() as undone:
            sides = Sides(
                undone,
                use_pp=dice.random() < 0.2,
                use_v2_model_runner=dice.random() < 0.3,
                prev_step_scheduled_req_ids=known,
            )
            for side in (sides.kvpool, sides.vllm):
                side.kv_cache_manager = type("Manager", (), {"empty_kv_cache_blocks": nothing})()
                side.scheduler_config = type("Config", (), {"async_scheduling": dice.random() < 0})()
            counts = dict.fromkeys(blocks, 1)
            found, expected = (
                side._make_cached_request_data(requests[:running], resumed, counts, {}, blocks)
                for side in (sides.kvpool, sides.vllm)
            )
        assert found == expected
        for field in fields(CachedRequestData):
            values = [getattr(side, field.name) for side in (found, expected)]
            assert type(values[0]) is type(values[1])
            assert [*map(type, values[0])] == [*map(type, values[1])]
            assert list(values[0]) == list(values[1])  # the order, too
        assert sides.left["_make_cached_request_data"] == bool(resumed or sides.kvpool.use_pp)
        own_ways += bool(resumed or sides.kvpool.use_pp)
    assert 100 < own_ways < 300


def test_ends_of_chunks_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(3)  # noqa: S311
    request = twins(prompt=30)[0]
    changed = 0
    for lookahead in (0, 1, 2, 8):
        with monkeypatch.context() as undone:
            sides = Sides(undone, num_prefill_lookahead=lookahead)
            for _ in range(500):
                computed, new = dice.randrange(31), dice.randrange(-3, 32)
                found, expected = (
                    side._reserve_prefill_lookahead(request, computed, new)
                    for side in (sides.kvpool, sides.vllm)
                )
                assert found == expected
                changed += found not in {new, 0}
            assert sides.left["_reserve_prefill_lookahead"] == (500 if lookahead else 0)
    assert changed > 50


def test_a_vllm_with_other_methods_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tokens.IS_KNOWN
    assert runpy.run_path(tokens.__file__)["IS_KNOWN"]

    def other(self: Any, request: Any, new_token_ids: Any, is_stale: bool = False) -> None:  # noqa: ANN401
        """Changes something."""

    for kind in (own, tokens.AsyncScheduler.__bases__[-1]):
        with monkeypatch.context() as undone:
            undone.setattr(kind, "_update_request_with_output", other)
            made = runpy.run_path(tokens.__file__)
        assert not made["IS_KNOWN"]
        assert made["Scheduler"].__bases__ == (own,)
    others = {
        "vllm.v1.request.Request": OtherRequest,
        "vllm.v1.core.sched.scheduler.check_stop": lambda request, max_model_len: True,  # noqa: ARG005
    }
    for name, value in others.items():
        with monkeypatch.context() as undone:
            undone.setattr(name, value)
            assert not runpy.run_path(tokens.__file__)["IS_KNOWN"]
    assert not have_source([len], "")
