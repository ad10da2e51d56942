"""The real pymllm, from the folder that `PYMLLM_PATH` names, and its runner without a model.

What needs a GPU is replaced by the lightest thing that shows a mistake: the K and V of a slot are the prefix
of tokens that was computed into it, a state is the prefix that it has seen. The bookkeeping is that of
`ModelRunnerProcess`, unmodified.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

import kvpool

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

FOLDER = os.environ.get("PYMLLM_PATH", "")


def need_pymllm() -> None:
    """Makes pymllm importable, or skips the module with the reason."""
    if not (Path(FOLDER) / "pymllm" / "mem_cache").is_dir():
        pytest.skip("PYMLLM_PATH names no folder with the package pymllm", allow_module_level=True)
    if FOLDER not in sys.path:
        sys.path.insert(0, FOLDER)
    if importlib.util.find_spec("mllm_kernel") is None:
        # Compiled kernels, which pymllm asks whether they can be used.
        store = types.ModuleType("mllm_kernel.cuda.jit.store_cache")
        vars(store).update(store_cache=None, can_use_store_cache=lambda _: False)
        for name in ("mllm_kernel", "mllm_kernel.cuda", "mllm_kernel.cuda.jit"):
            sys.modules.setdefault(name, types.ModuleType(name))
        sys.modules[store.__name__] = store


class States:
    """The track slots of a `GDNPool`, and what each state has seen."""

    def __init__(self, rows: int, tracks: int) -> None:
        self.seen: dict[int, tuple[int, ...]] = {}
        self.free = [*range(rows + 1, rows + 1 + tracks)]
        self.total = tracks

    def alloc_track_slot(self) -> int | None:
        return self.free.pop() if self.free else None

    def free_track_slot(self, slot: int) -> None:
        assert slot not in self.free, f"track slot {slot} is freed twice"
        self.free.append(slot)

    def copy_states(self, source: int, destination: int) -> None:
        self.seen[destination] = self.seen[source]

    def reset_states(self, rows: torch.Tensor) -> None:
        self.seen.update(dict.fromkeys(rows.tolist(), ()))


class Request:
    """A request: what it has, and how far it is."""

    def __init__(self, rid: str, prompt: list[int], outputs: int, name: str | None = None) -> None:
        self.rid = rid
        self.prompt = prompt
        self.tokens = [*prompt]
        self.outputs = outputs
        self.meta = {"rid": rid, "input_ids": prompt, "name": name}


class Engine:
    """`ModelRunnerProcess` with pools of kvpool and no model."""

    def __init__(
        self,
        slots: int = 512,
        rows: int = 8,
        context: int = 256,
        *,
        hybrid: bool = False,
        strict: bool = True,
        **config: object,
    ) -> None:
        from pymllm.orchestrator.model_runner_process import ModelRunnerProcess

        self.allocator = kvpool.TokenToKVPoolAllocator(slots, "cpu", strict=strict)
        self.table = kvpool.ReqToTokenPool(rows, context, "cpu")
        self.states = States(rows, 4 * rows) if hybrid else None
        self.process = ModelRunnerProcess(server_config=SimpleNamespace(**config))
        self.process._runner = SimpleNamespace(
            token_to_kv_pool_allocator=self.allocator,
            req_to_token_pool=self.table,
            gdn_pool=self.states,
            num_gdn_layers=int(hybrid),
            sliding_window_size=config.get("sliding_window_size"),
            device="cpu",
        )
        self.cache = self.process._radix_cache = self.process._create_prefix_cache()
        self.computed: dict[int, tuple[int, ...]] = {}
        self.live: list[Request] = []
        self.hit_tokens = 0
        self.random = random.Random(0)  # noqa: S311 - only variety is needed

    def slots_of(self, request: Request, count: int) -> list[int]:
        row = self.process._rid_to_req_pool_idx[request.rid]
        found: list[int] = self.table.req_to_token[row, :count].tolist()
        return found

    def check(self, request: Request, count: int) -> None:
        """Every entry of the request's row is a slot with the K and V of its own prefix."""
        for position, slot in enumerate(self.slots_of(request, count)):
            assert slot != 0, f"{request.rid} reads the padding slot at {position}"
            assert self.computed[slot] == tuple(request.tokens[: position + 1]), (request.rid, position)

    def compute(self, request: Request, begin: int, end: int) -> None:
        for position, slot in enumerate(self.slots_of(request, end)[begin:], begin):
            self.computed[slot] = tuple(request.tokens[: position + 1])

    def extend(self, requests: Sequence[Request]) -> None:
        """The prefill of a batch, as `_forward_batch` does it."""
        metas = [request.meta for request in requests]
        batch = {"batch_size": len(requests), "seq_lens": [len(request.prompt) for request in requests]}
        _, prefixes, _ = self.process._allocate_extend(batch, metas)
        for request, prefix in zip(requests, prefixes, strict=True):
            self.hit_tokens += prefix
            self.check(request, prefix)
            self.compute(request, prefix, len(request.prompt))
            if self.states is not None:
                row = self.process._rid_to_req_pool_idx[request.rid]
                seen = self.states.seen[row]
                # Where the runner shortens a hit to have two tokens left, it restores the state behind them.
                shortened = prefix == len(request.prompt) - 2 and len(seen) > prefix
                assert len(seen) == prefix or shortened, (request.rid, len(seen), prefix)
                self.states.seen[row] = tuple(request.prompt)
        if self.states is not None:
            self.process._track_gdn_state_after_extend(metas)
        self.process._insert_into_radix_cache(metas)
        for request in requests:
            self.check(request, len(request.prompt))
            self.sample(request)
        self.live.extend(requests)

    def sample(self, request: Request) -> None:
        token = self.random.randrange(4)
        request.tokens.append(token)
        self.process._rid_to_output_ids[request.rid].append(token)

    def decode(self) -> None:
        """A decode step of every live request; those that are done leave."""
        for request in [each for each in self.live if len(each.tokens) >= len(each.prompt) + each.outputs]:
            self.finish(request)
        if not self.live:
            return
        batch = {"batch_size": len(self.live), "seq_lens": [len(request.tokens) for request in self.live]}
        self.process._allocate_decode(batch, [request.meta for request in self.live])
        for request in self.live:
            self.compute(request, len(request.tokens) - 1, len(request.tokens))
            self.check(request, len(request.tokens))
            self.sample(request)

    def finish(self, request: Request) -> None:
        self.process._free_rid_resources(request.rid)
        self.live.remove(request)

    def pass_through(self, prompt: list[int], steps: int) -> None:
        """The runner's work for a request without the model, unchecked, for timing."""
        metas, batch = [{"rid": "r", "input_ids": prompt}], {"batch_size": 1, "seq_lens": [len(prompt)]}
        process = self.process
        process._allocate_extend(batch, metas)
        process._insert_into_radix_cache(metas)
        process._rid_to_output_ids["r"].append(1)
        for end in range(len(prompt) + 1, len(prompt) + 1 + steps):
            process._allocate_decode({"batch_size": 1, "seq_lens": [end]}, metas)
            process._rid_to_output_ids["r"].append(1)
        process._free_rid_resources("r")

    def run(self, count: int, most: int = 4, vocabulary: int = 3, longest: int = 40) -> None:
        """Requests with much in common, some at once, to their end."""
        waiting = [
            Request(
                f"r{number}",
                [self.random.randrange(vocabulary) for _ in range(self.random.randint(1, longest))],
                self.random.randint(1, 12),
            )
            for number in range(count)
        ]
        # Some are asked again, some go on.
        for number in range(0, count - 1, 3):
            prompt = waiting[number].prompt
            waiting[number + 1].prompt[:] = [*prompt, 1] if number % 2 else [*prompt]
            waiting[number + 1].tokens[:] = waiting[number + 1].prompt
        while waiting or self.live:
            room = min(most - len(self.live), self.random.randint(1, 3), len(waiting))
            if room > 0:
                batch, waiting = waiting[:room], waiting[room:]
                self.extend(batch)
            self.decode()

    def check_idle(self) -> None:
        """Nothing is owned and free, owned by nobody, or dropped."""
        stats = self.allocator.stats()
        cached = self.cache.total_size()
        assert stats["in_use"] == stats["cached"] == cached, stats
        assert stats["available"] + cached == self.allocator.size, stats
        assert self.cache.evictable_size() == cached
        assert self.table.available_size() == self.table.stats()["capacity"]
        self.cache.evict(self.allocator.size)
        assert self.allocator.available_size() == self.allocator.size
