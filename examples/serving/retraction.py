"""A scheduler with retraction, written out: what `kvpool_serving` does, in short.

Requests grow by a token in each step. When there is no slot for all of them, the one that has generated least
goes back to the queue, and its slots go to the prefix cache: they are free for others, and what they do not
take is found there. The model is a toy: K of a token is the token, and the next one follows from K of all
before it, so that one wrong slot would give another answer.

    python examples/serving/retraction.py
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

import kvpool

SLOTS, ROWS, PROMPT, ANSWER, STEP_TOKENS = 192, 8, 24, 32, 64
RESERVE = 4  # free slots for each running request before another begins, lest it be retracted at once


def next_token(keys: torch.Tensor) -> int:
    """Return what the model says after tokens with these K."""
    return (31 * int(keys.sum()) + len(keys)) % 1000


@dataclass
class Request:
    """A prompt, what was generated, and the places of both while the request runs."""

    prompt: list[int]
    answer: list[int] = field(default_factory=list)
    row: int = 0
    lease: kvpool.Lease | None = None
    retracted: kvpool.WaitingRequest | None = None

    @property
    def tokens(self) -> list[int]:
        """All tokens so far."""
        return self.prompt + self.answer


class Scheduler:
    """Continuous batching over a table, an allocator and a prefix cache.

    Attributes:
        waiting: Requests without slots, first come first served; those that were retracted in front.
        running: Requests with a row, the one that began first in front.
        computed: Tokens that the model has computed.
        retractions: How often a request went back.
        given_back: Tokens that these requests had computed.
    """

    def __init__(self) -> None:
        self.kv, self.allocator = kvpool.make_full_attention_net_mem_pool(
            SLOTS, 1, 1, 1, 1, 1, "cpu", "float32"
        )
        self.table = kvpool.ReqToTokenPool(ROWS, PROMPT + ANSWER, "cpu")
        self.cache = kvpool.PrefixCache(self.allocator)
        self.planner = kvpool.BatchPlanner(self.table, self.allocator, ROWS, STEP_TOKENS)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.computed = self.retractions = self.given_back = 0

    def step(self) -> None:
        """Generate one token for each request that runs, then begin others with what is left."""
        if self.running:
            while (plan := self._decode()) is None:  # short, also of what the cache could give up
                self.retract(min(self.running, key=lambda request: len(request.answer)))
            self._generate(self.running, plan, [request.tokens[-1] for request in self.running])
        while self.waiting and self._begin(self.waiting[0]):
            self.waiting.popleft()
        for request in [each for each in self.running if len(each.answer) == ANSWER]:
            self._release(request)

    def retract(self, request: Request) -> None:
        """Give up what a request has, and queue it again."""
        self._release(request)
        self.waiting.appendleft(request)
        self.retractions += 1
        # It is the next one: the cache gives up what it had last of all.
        request.retracted = self.cache.add_waiting(request.tokens, rank=-self.retractions)
        self.given_back += len(request.tokens) - 1

    def _decode(self) -> kvpool.BatchPlan | None:
        rows = [request.row for request in self.running]
        # The last token has no slot yet. The lengths are those after the step.
        return self.planner.decode(rows, [len(request.tokens) for request in self.running])

    def _begin(self, request: Request) -> bool:
        """Take a row, and slots for all tokens but those that the cache has; False without so many."""
        needed = len(request.tokens) + RESERVE * len(self.running)
        rows = self.table.alloc(1) if needed <= self.cache.obtainable_size() else None
        if rows is None:
            return False
        lease = self.cache.match(request.tokens, limit=len(request.tokens) - 1)  # the last is always computed
        plan = self.planner.extend(rows, [lease.length], [len(request.tokens)], prefixes=[lease])
        if plan is None:
            lease.release()
            self.table.free(rows)
            return False
        request.row, request.lease, request.retracted = rows[0], lease, None
        self.running.append(request)
        self._generate([request], plan, request.tokens[lease.length :])
        return True

    def _generate(self, requests: list[Request], plan: kvpool.BatchPlan, tokens: list[int]) -> None:
        """Run the model: K of new tokens go to their slots, and each request gets a token."""
        keys = torch.tensor(tokens, dtype=torch.float32).view(-1, 1, 1)
        self.kv.set_kv_buffer(0, plan.out_cache_loc, keys, keys)
        self.computed += len(tokens)
        for request in requests:
            slots = self.table.read(request.row, len(request.tokens))
            request.answer.append(next_token(self.kv.get_key_buffer(0)[slots]))

    def _release(self, request: Request) -> None:
        """Leave K and V to the cache, where others may find or evict them, and free the row."""
        written = request.tokens[:-1]
        assert request.lease is not None
        request.lease.publish(written[request.lease.length :], row=request.row)
        self.planner.finish([request.row], [len(written)])
        self.running.remove(request)
        request.lease = None


def main() -> None:
    """Serve twelve requests in a pool for fewer than four, and compare each with the model alone."""
    scheduler = Scheduler()
    requests = [Request([(7 * number + at) % 1000 for at in range(PROMPT)]) for number in range(12)]
    scheduler.waiting.extend(requests)
    steps = 0
    while scheduler.waiting or scheduler.running:
        scheduler.step()
        steps += 1
    for request in requests:
        tokens = list(request.prompt)
        while len(tokens) < PROMPT + ANSWER:
            tokens.append(next_token(torch.tensor(tokens)))
        assert request.tokens == tokens
    # What is left belongs to the cache, which gives it up when it is needed.
    assert scheduler.allocator.stats()["in_use"] == scheduler.cache.evictable_size()
    again = scheduler.computed - len(requests) * (PROMPT + ANSWER - 1)
    print(f"{len(requests)} requests in {steps} steps, {scheduler.retractions} retractions")
    print(f"{scheduler.given_back} tokens given back, {again} of them computed again")
    assert 0 < again < scheduler.given_back


if __name__ == "__main__":
    main()
